// Fuzzes the readers of model files and training states. The input is the file. Checksums would
// stop a fuzzer at the door, so a copy of every input that looks like a state is given right ones.
#include "data/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

static void check(int holds)
{
    if (!holds) {
        abort();
    }
}

// Sees that chunks come in order, without gaps, and reads every byte.
struct reader {
    size_t next, elem_bytes;
    uint64_t sum;
};

static int take(void *ctx, void *buf, size_t first, size_t n, struct error *err)
{
    (void)err;
    struct reader *r = ctx;
    check(first == r->next && n > 0 && n * r->elem_bytes <= CHECKPOINT_CHUNK);
    r->sum += XXH3_64bits(buf, n * r->elem_bytes);
    r->next += n;
    return STATUS_OK;
}

static void read_model(const char *path)
{
    struct model_header h;
    struct error err;
    if (model_read_header(path, &h, &err) == STATUS_OK) {
        struct reader r = {.elem_bytes = model_elem_bytes(&h)};
        check(model_read(path, &h, take, &r, &err) == STATUS_OK && r.next == model_elems(&h));
    }
}

static void read_state(const char *path)
{
    static struct state_file s;
    static struct numbers n;
    struct error err;
    uint64_t u;
    double window[4];
    if (state_open(&s, path, &err)) {
        check(err.text[0] && s.fd == -1);
        return;
    }
    int good = state_verify(&s, &err) == STATUS_OK;
    for (size_t i = 0; i < s.section_count; i++) {
        const struct state_section *c = &s.section[i];
        struct reader r = {.elem_bytes = c->dtype == SECTION_BYTES  ? 1
                                         : c->dtype == SECTION_FP32 ? 4
                                                                    : 2};
        int status = state_read(&s, c->name, c->dtype, c->elems, take, &r, &err);
        // A name may stand there twice; then it is the first that is read.
        check(!good || status == STATUS_OK || strstr(err.text, "expected"));
    }
    if (state_read_numbers(&s, "run", &n, &err) == STATUS_OK) {
        check(n.bytes < sizeof n.text && n.text[n.bytes] == '\0');
        numbers_get_u64(&n, "step", &u, &err);
        numbers_get_f64(&n, "window", window, 4, &err);
    }
    state_close(&s);
}

// Right checksums for the header and for all sections that lie within the file.
static void seal(uint8_t *data, size_t size)
{
    uint32_t sections;
    if (size < 64) {
        return;
    }
    memcpy(&sections, data + 12, 4);
    if (sections > STATE_SECTIONS_MAX || size < 64 + 56 * (size_t)sections) {
        return;
    }
    for (size_t i = 0; i < sections; i++) {
        uint8_t *entry = data + 64 + 56 * i;
        uint64_t bytes, offset;
        memcpy(&bytes, entry + 32, 8);
        memcpy(&offset, entry + 40, 8);
        if (offset <= size && bytes <= size - offset) {
            uint64_t sum = XXH3_64bits(data + offset, bytes);
            memcpy(entry + 48, &sum, 8);
        }
    }
    uint8_t sealed[56 + 56 * STATE_SECTIONS_MAX];
    memcpy(sealed, data, 56);
    memcpy(sealed + 56, data + 64, 56 * (size_t)sections);
    uint64_t sum = XXH3_64bits(sealed, 56 + 56 * (size_t)sections);
    memcpy(data + 56, &sum, 8);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        check(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    uint8_t *copy = malloc(size + 1);
    memcpy(copy, data, size);
    check(ftruncate(fd, 0) == 0 && pwrite(fd, copy, size, 0) == (ssize_t)size);
    read_model(path);
    read_state(path);
    seal(copy, size);
    check(pwrite(fd, copy, size, 0) == (ssize_t)size);
    read_state(path);
    free(copy);
    return 0;
}
