// Fuzzes the readers of token shards and evaluation files. The input is the file.
#include "data/evalset.h"
#include "data/shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { T = 3, VOCAB = 1000, ROWS_MAX = 200 };

static void check(int holds)
{
    if (!holds)
        abort();
}

static void read_rows(const char *path, bool shuffle)
{
    struct loader *l;
    struct error err = {0};
    if (loader_open(&l, path, T, VOCAB, 1, shuffle, &err) != STATUS_OK) {
        check(err.status == STATUS_FAIL && err.text[0] && !strchr(err.text, '\n'));
        return;
    }
    check(loader_rows(l) >= 1 && loader_rows(l) == (loader_tokens(l) - 1) / T);
    for (uint64_t i = 0; i < 2 * loader_rows(l) && i < ROWS_MAX; i++) {
        int32_t in[T], out[T], again[T];
        struct loader_state at = loader_tell(l);
        if (loader_next(l, in, out, &err) != STATUS_OK)
            break;
        for (int t = 0; t < T; t++)
            check(in[t] >= 0 && in[t] < VOCAB && out[t] >= 0 && out[t] < VOCAB);
        check(memcmp(in + 1, out, (T - 1) * sizeof *in) == 0);
        struct loader_state after = loader_tell(l);
        check(loader_seek(l, at, &err) == STATUS_OK);
        check(loader_next(l, again, out, &err) == STATUS_OK);
        check(memcmp(in, again, sizeof in) == 0);
        check(loader_tell(l).row == after.row && loader_tell(l).epoch == after.epoch);
    }
    loader_close(l);
}

static void read_all(const char *path)
{
    struct shard_reader *r;
    struct error err;
    if (shard_reader_open(&r, path, &err) != STATUS_OK)
        return;
    uint32_t tokens[100];
    size_t n;
    do
        check(shard_read(r, tokens, 100, &n, &err) == STATUS_OK && n <= 100);
    while (n > 0);
    shard_reader_close(r);
}

static void read_examples(const char *path)
{
    enum { ROW = 16 };
    struct evalset *set;
    struct error err = {0};
    if (evalset_open(&set, path, ROW, VOCAB, &err) != STATUS_OK) {
        check(err.status == STATUS_FAIL && err.text[0] && !strchr(err.text, '\n'));
        return;
    }
    for (size_t i = 0; i < evalset_count(set); i++) {
        int32_t in[EVAL_COMPLETIONS * ROW], out[EVAL_COMPLETIONS * ROW];
        unsigned char mask[EVAL_COMPLETIONS * ROW];
        int label = evalset_rows(set, i, in, out, mask);
        check(label >= 0 && label < EVAL_COMPLETIONS);
        for (int k = 0; k < EVAL_COMPLETIONS; k++) {
            int n = 0;
            for (int t = 0; t < ROW; t++) {
                n += mask[k * ROW + t];
                check(in[k * ROW + t] < VOCAB && out[k * ROW + t] < VOCAB);
            }
            check(n >= 1);
        }
    }
    evalset_close(set);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd = memfd_create("shard", 0);
    check(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    read_rows(path, false);
    read_rows(path, true);
    read_all(path);
    read_examples(path);
    close(fd);
    return 0;
}
