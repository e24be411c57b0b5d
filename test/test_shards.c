// Tests of data/shards.c: rows, order, resume, every refusal, memory, and the writer.
#include "data/shards.h"
#include "test/scratch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static struct error err;
static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

// A shard whose token i is first + i, written byte by byte as the format says.
static void make_shard(const char *name, uint32_t first, uint32_t n, bool wide)
{
    size_t width = wide ? 4 : 2, bytes = 1024 + n * width;
    unsigned char *file = calloc(1, bytes);
    assert_non_null(file);
    int32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1, (int32_t)n};
    memcpy(file, header, sizeof header);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = first + i;
        memcpy(file + 1024 + i * width, &token, width);
    }
    scratch_write(name, file, bytes);
    free(file);
}

static struct loader *must_open(const char *pattern, size_t T, uint64_t seed, bool shuffle)
{
    struct loader *l;
    if (loader_open(&l, scratch(pattern), T, UINT32_MAX, seed, shuffle, &err) != STATUS_OK)
        fail_msg("%s", err.text);
    return l;
}

static void assert_error(int status, const char *const words[])
{
    assert_int_equal(status, STATUS_FAIL);
    assert_null(strchr(err.text, '\n'));
    for (int i = 0; words[i]; i++) {
        if (!strstr(err.text, words[i]))
            fail_msg("\"%s\" does not say \"%s\"", err.text, words[i]);
    }
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void rows_are_cut_as_documented(void **state)
{
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        scratch_clear();
        make_shard("a.bin", 100, 10, wide);
        struct loader *l = must_open("a.bin", 4, 1, false);
        assert_int_equal(loader_rows(l), 2);
        assert_int_equal(loader_tokens(l), 10);
        assert_int_equal(loader_shards(l), 1);
        for (int row = 0; row < 5; row++) {
            int32_t in[4], out[4];
            assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
            for (int i = 0; i < 4; i++) {
                assert_int_equal(in[i], 100 + row % 2 * 4 + i);
                assert_int_equal(out[i], in[i] + 1);
            }
        }
        assert_int_equal(loader_tell(l).epoch, 2);
        assert_int_equal(loader_tell(l).row, 1);
        loader_close(l);
    }
}

static void a_row_may_be_a_single_token_or_a_whole_shard(void **state)
{
    (void)state;
    scratch_clear();
    make_shard("a.bin", 0, 6, false);
    int32_t in[5], out[5];
    struct loader *l = must_open("a.bin", 1, 1, false);
    assert_int_equal(loader_rows(l), 5);
    assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
    assert_int_equal(in[0], 0);
    assert_int_equal(out[0], 1);
    loader_close(l);
    l = must_open("a.bin", 5, 1, true);
    assert_int_equal(loader_rows(l), 1);
    assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
    assert_int_equal(out[4], 5);
    loader_close(l);
}

// Shards s0, s1, ... whose tokens are all different; returns the rows of T in them.
static uint64_t make_shards(int n_shards, size_t T)
{
    uint32_t first = 0;
    uint64_t rows = 0;
    scratch_clear();
    for (int i = 0; i < n_shards; i++) {
        char name[32];
        snprintf(name, sizeof name, "s%03d.bin", i);
        uint32_t n = (uint32_t)T + 1 + random_below(40 * (uint32_t)T);
        make_shard(name, first, n, true);
        first += n;
        rows += (n - 1) / T;
    }
    return rows;
}

// Reads `rows` rows and stores the first token of each.
static void read_firsts(struct loader *l, size_t T, uint64_t rows, int32_t *firsts)
{
    int32_t in[64], out[64];
    for (uint64_t i = 0; i < rows; i++) {
        if (loader_next(l, in, out, &err) != STATUS_OK)
            fail_msg("%s", err.text);
        for (size_t t = 0; t < T; t++) {
            assert_int_equal(in[t], in[0] + (int32_t)t);
            assert_int_equal(out[t], in[t] + 1);
        }
        firsts[i] = in[0];
    }
}

static int ascending(const void *a, const void *b)
{
    return *(const int32_t *)a < *(const int32_t *)b ? -1
                                                     : *(const int32_t *)a > *(const int32_t *)b;
}

// llm.c #573: no real shuffling.
static void every_row_comes_once_per_epoch_in_a_new_order(void **state)
{
    (void)state;
    enum { T = 7, EPOCHS = 4 };
    for (int round = 0; round < 20; round++) {
        uint64_t rows = make_shards(1 + (int)random_below(9), T);
        int32_t *sorted = malloc(rows * sizeof *sorted), *seen[EPOCHS];
        struct loader *l = must_open("s*.bin", T, 0, false);
        assert_int_equal(loader_rows(l), rows);
        read_firsts(l, T, rows, sorted);
        for (uint64_t i = 1; i < rows; i++)
            assert_true(sorted[i] > sorted[i - 1]); // sequential: shards by name, rows in order
        loader_close(l);

        l = must_open("s*.bin", T, 42, true);
        for (int e = 0; e < EPOCHS; e++) {
            seen[e] = malloc(rows * sizeof *seen[e]);
            assert_int_equal(loader_tell(l).epoch, e);
            read_firsts(l, T, rows, seen[e]);
            if (rows >= 20) {
                assert_memory_not_equal(seen[e], sorted, rows * sizeof *sorted);
                for (int other = 0; other < e; other++)
                    assert_memory_not_equal(seen[e], seen[other], rows * sizeof *sorted);
            }
        }
        loader_close(l);
        for (int e = 0; e < EPOCHS; e++) {
            qsort(seen[e], rows, sizeof *seen[e], ascending);
            assert_memory_equal(seen[e], sorted, rows * sizeof *sorted);
            free(seen[e]);
        }
        free(sorted);
    }
}

static void another_seed_is_another_order(void **state)
{
    (void)state;
    enum { T = 4 };
    uint64_t rows = make_shards(5, T);
    int32_t *a = malloc(rows * sizeof *a), *b = malloc(rows * sizeof *b);
    for (int same = 0; same < 2; same++) {
        struct loader *l = must_open("s*.bin", T, 1, true);
        read_firsts(l, T, rows, a);
        loader_close(l);
        l = must_open("s*.bin", T, same ? 1 : 2, true);
        read_firsts(l, T, rows, b);
        loader_close(l);
        assert_int_equal(memcmp(a, b, rows * sizeof *a) == 0, same);
    }
    free(a);
    free(b);
}

// Which of n rows comes at which place must be uniform: n*n counts over many epochs, chi-square.
static void the_order_is_uniform(void **state)
{
    (void)state;
    enum { EPOCHS = 4000, T = 1 };
    static const uint32_t sizes[] = {2, 3, 5, 16, 17};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint32_t n = sizes[k], counts[17][17] = {{0}};
        for (int by_shard = 0; by_shard < 2; by_shard++) { // n rows in a shard, n shards of a row
            scratch_clear();
            memset(counts, 0, sizeof counts);
            for (uint32_t i = 0; i < (by_shard ? n : 1); i++) {
                char name[32];
                snprintf(name, sizeof name, "s%02u.bin", i);
                make_shard(name, i, by_shard ? 2 : n + 1, false);
            }
            struct loader *l = must_open("s*.bin", T, 7 + k, true);
            assert_int_equal(loader_rows(l), n);
            for (int e = 0; e < EPOCHS; e++) {
                int32_t firsts[17];
                read_firsts(l, T, n, firsts);
                for (uint32_t place = 0; place < n; place++)
                    counts[place][firsts[place]]++;
            }
            loader_close(l);
            double expected = (double)EPOCHS / n, chi2 = 0;
            for (uint32_t i = 0; i < n * n; i++) {
                double d = counts[i / n][i % n] - expected;
                chi2 += d * d / expected;
            }
            double freedom = (n - 1.0) * (n - 1.0);
            if (chi2 > freedom + 6 * (1 + freedom)) // far beyond chance; a fixed order gives 4000*n
                fail_msg("n = %u: chi-square %.1f for %.0f degrees of freedom", n, chi2, freedom);
        }
    }
}

// llm.c #573: wrong after resume.
static void a_resumed_loader_gives_the_same_rows(void **state)
{
    (void)state;
    enum { T = 5 };
    for (int round = 0; round < 30; round++) {
        bool shuffle = round % 3 != 0;
        uint64_t rows = make_shards(1 + (int)random_below(7), T);
        struct loader *l = must_open("s*.bin", T, 9, shuffle);
        uint64_t before = random_below((uint32_t)(3 * rows) + 1), after = 2 * rows + 1;
        int32_t *all = malloc((before + after) * sizeof *all);
        read_firsts(l, T, before, all);
        struct loader_state at = loader_tell(l);
        assert_true(at.row < rows);
        assert_int_equal(at.epoch * rows + at.row, before);
        read_firsts(l, T, after, all);
        struct loader_state end = loader_tell(l);

        int32_t *again = malloc(after * sizeof *again);
        struct loader *resumed = must_open("s*.bin", T, 9, shuffle);
        assert_int_equal(loader_seek(resumed, at, &err), STATUS_OK);
        read_firsts(resumed, T, after, again);
        assert_memory_equal(all, again, after * sizeof *all);
        assert_int_equal(loader_tell(resumed).epoch, end.epoch);
        assert_int_equal(loader_tell(resumed).row, end.row);
        loader_close(resumed);

        // Going back in the same loader, and to the start.
        assert_int_equal(loader_seek(l, at, &err), STATUS_OK);
        read_firsts(l, T, after, again);
        assert_memory_equal(all, again, after * sizeof *all);
        loader_rewind(l);
        assert_int_equal(loader_tell(l).epoch + loader_tell(l).row, 0);

        // Rows that are skipped are those that would have been read.
        loader_skip(l, before);
        assert_int_equal(loader_tell(l).epoch, at.epoch);
        assert_int_equal(loader_tell(l).row, at.row);
        read_firsts(l, T, after, again);
        assert_memory_equal(all, again, after * sizeof *all);

        struct loader_state wrong = {0, rows};
        assert_error(loader_seek(l, wrong, &err), WORDS("s000.bin", "row", "--seq"));
        loader_close(l);
        free(all);
        free(again);
    }
}

static void an_open_that_fails_says(const char *pattern, size_t T, uint32_t vocab,
                                    const char *const words[])
{
    struct loader *l;
    int rc = loader_open(&l, scratch(pattern), T, vocab, 1, false, &err);
    assert_null(l);
    assert_error(rc, words);
}

// llm.c #826: "Bad magic" and nothing else.
static void bad_files_are_named_and_explained(void **state)
{
    (void)state;
    enum { N = 20, BYTES = 1024 + 2 * N };
    static const struct {
        int field;
        int32_t value;
        const char *words[5];
    } headers[] = {
        {0, 12345, {"x.bin", "1064 bytes", "magic 12345", "20240520", "./tokenize"}},
        {0, 20240326, {"x.bin", "a model", "20240326", "20240520"}},
        {0, 20240328, {"x.bin", "a tokenizer", "20240328"}},
        {0, 20240522, {"x.bin", "an evaluation file"}},
        {0, 20240801, {"x.bin", "version 1", "expected 7"}},
        {1, 2, {"x.bin", "1064 bytes", "version 2", "expected 1"}},
        {2, -1, {"x.bin", "-1 tokens"}},
        {2, N + 1, {"x.bin", "cut short", "1064 bytes", "expected 1066"}},
        {2, N - 1, {"x.bin", "too long", "1064 bytes", "expected 1062"}},
        {2, INT32_MAX, {"x.bin", "cut short"}},
    };
    scratch_clear();
    make_shard("good.bin", 0, N, false);
    size_t bytes;
    char *good = scratch_read("good.bin", &bytes);
    assert_int_equal(bytes, BYTES);
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        char bad[BYTES];
        memcpy(bad, good, BYTES);
        memcpy(bad + 4 * headers[i].field, &headers[i].value, 4);
        scratch_write("x.bin", bad, BYTES);
        const char *words[6] = {NULL};
        memcpy(words, headers[i].words, sizeof headers[i].words);
        an_open_that_fails_says("x.bin", 4, 100, words);
        an_open_that_fails_says("*.bin", 4, 100, words); // not the good one's fault
    }
    scratch_write("x.bin", "", 0);
    an_open_that_fails_says("x.bin", 4, 100, WORDS("x.bin", "empty"));
    scratch_write("x.bin", good, 1023);
    an_open_that_fails_says("x.bin", 4, 100, WORDS("x.bin", "1023 bytes", "1024"));
    scratch_write("x.bin", good, BYTES - 1);
    an_open_that_fails_says("x.bin", 4, 100, WORDS("x.bin", "1063 bytes", "expected 1064"));
    an_open_that_fails_says("x.bin", 4, 100, WORDS("cut short"));
    assert_int_equal(remove(scratch("x.bin")), 0);
    an_open_that_fails_says("x*.bin", 4, 100, WORDS("x*.bin", "no token shard matches"));
    an_open_that_fails_says("x.bin", 4, 100, WORDS("x.bin", "no token shard matches"));
    an_open_that_fails_says("good.bin", N, 100, WORDS("good.bin", "20 tokens", "20 + 1", "--seq"));
    an_open_that_fails_says(".", 4, 100, WORDS("not a regular file"));
    assert_int_equal(mkfifo(scratch("fifo.bin"), 0600), 0);
    an_open_that_fails_says("fifo.bin", 4, 100, WORDS("fifo.bin", "not a regular file"));
    free(good);
}

static void a_token_outside_the_vocabulary_is_located(void **state)
{
    (void)state;
    int32_t in[4], out[4];
    for (int wide = 0; wide < 2; wide++) {
        scratch_clear();
        make_shard("a.bin", 0, 9, wide);
        struct loader *l; // rows 0..4 and 4..8
        assert_int_equal(loader_open(&l, scratch("a.bin"), 4, 8, 1, false, &err), STATUS_OK);
        assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
        int rc = loader_next(l, in, out, &err); // 8 is only a target
        assert_error(rc, WORDS("a.bin", "token 8 ", "position 8,", "8 tokens"));
        assert_int_equal(loader_tell(l).row, 1);
        loader_close(l);
        assert_int_equal(loader_open(&l, scratch("a.bin"), 4, 3, 1, false, &err), STATUS_OK);
        assert_error(loader_next(l, in, out, &err), WORDS("token 3 ", "position 3,"));
        loader_close(l);
    }
    make_shard("b.bin", 0xfffffff0, 9, true); // negative as int32
    struct loader *l;
    assert_int_equal(loader_open(&l, scratch("b.bin"), 4, 100, 1, false, &err), STATUS_OK);
    assert_error(loader_next(l, in, out, &err), WORDS("token 4294967280 ", "position 0,"));
    loader_close(l);
}

static void a_shard_that_changes_is_an_error_not_a_signal(void **state)
{
    (void)state;
    int32_t in[64], out[64];
    for (int how = 0; how < 4; how++) {
        scratch_clear();
        make_shard("a.bin", 0, 30000, false);
        struct loader *l = must_open("a.bin", 64, 1, false);
        if (how > 0)
            assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
        if (how == 3) { // another file of the same size under the same name: seen when reopened
            make_shard("b.bin", 1, 30000, false);
            struct timespec times[2] = {{1, 0}, {1, 0}};
            assert_int_equal(utimensat(AT_FDCWD, scratch("b.bin"), times, 0), 0);
            loader_close(l);
            l = must_open("a.bin", 64, 1, false);
            assert_int_equal(rename(scratch("b.bin"), scratch("a.bin")), 0);
        } else if (how == 2) { // the same size, another content
            usleep(20000);     // coarse clocks
            make_shard("a.bin", 1, 30000, false);
        } else {
            assert_int_equal(truncate(scratch("a.bin"), 2000), 0);
        }
        assert_error(loader_next(l, in, out, &err), WORDS("a.bin", "changed"));
        loader_close(l);
    }
    make_shard("a.bin", 0, 300, false);
    struct loader *l = must_open("a.bin", 64, 1, false);
    assert_int_equal(remove(scratch("a.bin")), 0);
    assert_error(loader_next(l, in, out, &err), WORDS("a.bin", "cannot open"));
    loader_close(l);
}

static size_t resident_bytes(void)
{
    unsigned long total, resident;
    FILE *in = fopen("/proc/self/statm", "r");
    assert_non_null(in);
    assert_int_equal(fscanf(in, "%lu %lu", &total, &resident), 2);
    fclose(in);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

static int open_files(void)
{
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

// Sparse shards of zeros: 24 of 4 MB, then 1 of 96 MB. The sanitizers allow for some MB of growth.
static void memory_grows_neither_with_shards_nor_with_their_size(void **state)
{
    (void)state;
    enum { T = 1024 };
    static int32_t in[T], out[T];
    for (int big = 0; big < 2; big++) {
        scratch_clear();
        int n = big ? 1 : 24;
        for (int i = 0; i < n; i++) {
            char name[32];
            snprintf(name, sizeof name, "s%02d.bin", i);
            int32_t header[256] = {20240520, 1, (big ? 48 : 2) << 20};
            scratch_write(name, header, sizeof header);
            assert_int_equal(truncate(scratch(name), 1024 + 2 * (off_t)header[2]), 0);
        }
        struct loader *l = must_open("s*.bin", T, 1, big);
        assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
        size_t before = resident_bytes(), most = 0;
        int files = open_files();
        uint64_t rows = loader_rows(l);
        for (uint64_t i = 0; i < rows; i++) {
            assert_int_equal(loader_next(l, in, out, &err), STATUS_OK);
            if (i % 256 == 0) {
                size_t now = resident_bytes();
                most = now > most ? now : most;
                assert_int_equal(open_files(), files);
            }
        }
        loader_close(l);
        if (most > before + (12 << 20))
            fail_msg("grew from %zu to %zu bytes", before, most);
    }
}

static uint64_t fingerprint(const char *pattern)
{
    struct loader *l = must_open(pattern, 4, 1, false);
    uint64_t f = loader_fingerprint(l);
    loader_close(l);
    return f;
}

static void the_fingerprint_knows_the_data(void **state)
{
    (void)state;
    scratch_clear();
    make_shard("s1.bin", 0, 5000, false);
    uint64_t one = fingerprint("s*.bin");
    assert_int_equal(mkdir(scratch("sub"), 0700), 0);
    make_shard("sub/s1.bin", 0, 5000, false);
    assert_true(fingerprint("sub/s*.bin") == one); // the same, elsewhere
    remove(scratch("sub/s1.bin"));
    make_shard("s2.bin", 0, 5000, false);
    uint64_t two = fingerprint("s*.bin");
    assert_true(two != one);
    make_shard("s2.bin", 0, 5001, false);
    assert_true(fingerprint("s*.bin") != two);
    make_shard("s2.bin", 1, 5000, false);
    assert_true(fingerprint("s*.bin") != two);
    make_shard("s2.bin", 0, 5000, true);
    assert_true(fingerprint("s*.bin") != two);
    make_shard("s2.bin", 0, 5000, false);
    assert_true(fingerprint("s*.bin") == two);
    rename(scratch("s2.bin"), scratch("s3.bin"));
    assert_true(fingerprint("s*.bin") != two);
}

static void a_path_with_brackets_is_a_path(void **state)
{
    (void)state;
    scratch_clear();
    make_shard("a[1].bin", 0, 10, false);
    make_shard("a1.bin", 0, 20, false);
    struct loader *l = must_open("a[1].bin", 4, 1, false);
    assert_int_equal(loader_tokens(l), 10);
    loader_close(l);
    remove(scratch("a[1].bin"));
    l = must_open("a[1].bin", 4, 1, false); // now it is a glob
    assert_int_equal(loader_tokens(l), 20);
    loader_close(l);
}

// ---- the writer ----

static void write_range(struct shard_writer *w, uint32_t first, uint32_t n, uint32_t piece)
{
    uint32_t ids[1000];
    for (uint32_t i = 0; i < n;) {
        uint32_t k = n - i < piece ? n - i : piece;
        for (uint32_t j = 0; j < k; j++)
            ids[j] = first + i + j;
        assert_int_equal(shard_write(w, ids, k, &err), STATUS_OK);
        i += k;
    }
}

static void a_series_is_what_was_written(void **state)
{
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        scratch_clear();
        uint32_t n = wide ? 150000 : 60000;
        struct shard_writer *w;
        assert_int_equal(shard_writer_open(&w, scratch("d/e/w"), 25000, wide, &err), STATUS_OK);
        write_range(w, 0, n, 999);
        assert_int_equal(shard_writer_tokens(w), n);
        assert_int_equal(shard_writer_seal(w, &err), STATUS_OK);
        assert_false(scratch_exists("d/e/w_000000.bin")); // not before it is published
        assert_int_equal(shard_writer_publish(w, &err), STATUS_OK);
        assert_int_equal(shard_writer_shards(w), (n + 24999) / 25000);
        shard_writer_close(w);

        uint32_t next = 0;
        for (uint32_t shard = 0; shard < (n + 24999) / 25000; shard++) {
            char name[64];
            snprintf(name, sizeof name, "d/e/w_%06u.bin", shard);
            struct shard_reader *r;
            assert_int_equal(shard_reader_open(&r, scratch(name), &err), STATUS_OK);
            uint32_t ids[777];
            size_t got;
            do {
                assert_int_equal(shard_read(r, ids, 777, &got, &err), STATUS_OK);
                for (size_t i = 0; i < got; i++)
                    assert_int_equal(ids[i], next++);
            } while (got > 0);
            shard_reader_close(r);
            remove(scratch(name));
        }
        assert_int_equal(next, n);
        remove(scratch("d/e"));
        remove(scratch("d"));
    }
}

static void a_new_series_replaces_the_old_one_or_leaves_it(void **state)
{
    (void)state;
    scratch_clear();
    for (int i = 0; i < 3; i++) {
        struct shard_writer *w;
        assert_int_equal(shard_writer_open(&w, scratch("w"), 100, false, &err), STATUS_OK);
        write_range(w, 0, i == 0 ? 450 : 150, 50);
        if (i == 1) { // given up: the 5 files of the first stay
            shard_writer_close(w);
            assert_int_equal(scratch_files(), 5);
            continue;
        }
        assert_int_equal(shard_writer_seal(w, &err), STATUS_OK);
        assert_int_equal(shard_writer_publish(w, &err), STATUS_OK);
        shard_writer_close(w);
        assert_int_equal(scratch_files(), i == 0 ? 5 : 2);
    }
    assert_int_equal(fingerprint("w_*.bin") != 0, 1);
}

// A file size limit fails as a full disk does: in the middle of a write.
static void a_full_disk_leaves_no_half_file(void **state)
{
    (void)state;
    scratch_clear();
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    limit = (struct rlimit){.rlim_cur = 300000, .rlim_max = old.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    struct shard_writer *w;
    assert_int_equal(shard_writer_open(&w, scratch("w"), 1 << 20, false, &err), STATUS_OK);
    static uint32_t ids[1 << 18];
    setrlimit(RLIMIT_FSIZE, &limit);
    int rc = shard_write(w, ids, sizeof ids / sizeof *ids, &err);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_error(rc, WORDS("w_000000.bin"));
    shard_writer_close(w);
    assert_int_equal(scratch_files(), 0);

    rc = shard_writer_open(&w, "/dev/null/x/w", 100, false, &err);
    assert_error(rc, WORDS("/dev/null"));
}

int main(void)
{
    random_state = scratch_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_cut_as_documented),
        cmocka_unit_test(a_row_may_be_a_single_token_or_a_whole_shard),
        cmocka_unit_test(every_row_comes_once_per_epoch_in_a_new_order),
        cmocka_unit_test(another_seed_is_another_order),
        cmocka_unit_test(the_order_is_uniform),
        cmocka_unit_test(a_resumed_loader_gives_the_same_rows),
        cmocka_unit_test(bad_files_are_named_and_explained),
        cmocka_unit_test(a_token_outside_the_vocabulary_is_located),
        cmocka_unit_test(a_shard_that_changes_is_an_error_not_a_signal),
        cmocka_unit_test(memory_grows_neither_with_shards_nor_with_their_size),
        cmocka_unit_test(the_fingerprint_knows_the_data),
        cmocka_unit_test(a_path_with_brackets_is_a_path),
        cmocka_unit_test(a_series_is_what_was_written),
        cmocka_unit_test(a_new_series_replaces_the_old_one_or_leaves_it),
        cmocka_unit_test(a_full_disk_leaves_no_half_file),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
