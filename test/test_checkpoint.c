// Tests of data/checkpoint.c and data/files.c: round trips, every byte flipped, every length cut,
// full disks, kills, locks, retention.
#include "data/checkpoint.h"
#include "data/files.h"
#include "test/cmocka.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

// ---- a folder per test --------------------------------------------------------------------------

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static int make_folder(void **state)
{
    char *dir = strdup("/tmp/test_checkpoint.XXXXXX");
    *state = dir;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_folder(void **state)
{
    int status = nftw(*state, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(*state);
    return status;
}

static const char *in(const char *dir, const char *name)
{
    static char path[4][PATH_MAX];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, PATH_MAX, "%s/%s", dir, name);
    return p;
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

// Files in a folder, but for its lock.
static int files_in(const char *dir)
{
    int count = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; (e = readdir(d));) {
        count +=
            e->d_name[0] != '.' && strcmp(e->d_name, "lock") != 0 && !strstr(e->d_name, ".old");
    }
    closedir(d);
    return count;
}

static char *read_file(const char *path, size_t *bytes)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *bytes = (size_t)ftell(f);
    rewind(f);
    char *data = malloc(*bytes + 1);
    assert_int_equal(fread(data, 1, *bytes, f), *bytes);
    fclose(f);
    return data;
}

static void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
}

static void succeeded(int status, const struct error *err)
{
    if (status) {
        fail_msg("%s", err->text);
    }
}

// It failed, in one line that says all of `words` (split at '~').
static void failed(int status, const struct error *err, const char *words)
{
    char copy[256];
    assert_int_equal(status, STATUS_FAIL);
    assert_int_equal(err->status, STATUS_FAIL);
    assert_null(strchr(err->text, '\n'));
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok(copy, "~"); word; word = strtok(NULL, "~")) {
        if (!strstr(err->text, word)) {
            fail_msg("'%s' does not say '%s'", err->text, word);
        }
    }
}

// ---- elements that say where they belong --------------------------------------------------------

struct elements {
    size_t bytes; // of one
    size_t next;  // expected first element of the next chunk
    uint64_t salt;
    size_t fail_at; // the chunk that holds this element fails
};

static uint32_t element(const struct elements *e, size_t i)
{
    return (uint32_t)((i + e->salt) * 2654435761u >> (e->bytes == 2 ? 16 : 0));
}

static int bring(void *ctx, void *buf, size_t first, size_t n, struct error *err)
{
    struct elements *e = ctx;
    assert_true(first == e->next && n >= 1 && n * e->bytes <= CHECKPOINT_CHUNK);
    for (size_t i = 0; i < n; i++) {
        if (first + i == e->fail_at) {
            return error_set(err, STATUS_FAIL, "the source failed");
        }
        uint32_t value = element(e, first + i);
        memcpy((char *)buf + i * e->bytes, &value, e->bytes);
    }
    e->next += n;
    return STATUS_OK;
}

static int take(void *ctx, void *buf, size_t first, size_t n, struct error *err)
{
    (void)err;
    struct elements *e = ctx;
    assert_true(first == e->next && n >= 1 && n * e->bytes <= CHECKPOINT_CHUNK);
    for (size_t i = 0; i < n; i++) {
        uint32_t value = element(e, first + i);
        assert_memory_equal((char *)buf + i * e->bytes, &value, e->bytes);
    }
    e->next += n;
    return STATUS_OK;
}

// ---- model files --------------------------------------------------------------------------------

static struct model_header shape_of(uint32_t max_seq, uint32_t vocab, uint32_t layers,
                                    uint32_t heads, uint32_t hidden)
{
    return (struct model_header){
        MODEL_FP32, max_seq, vocab, layers, heads, hidden, (vocab + 127) / 128 * 128};
}

static void model_round_trip(void **state)
{
    const int versions[] = {MODEL_FP32, MODEL_BF16};
    for (int v = 0; v < 2; v++) {
        struct error err;
        struct model_header h = shape_of(70, 1000, 3, 5, 120), back;
        h.version = versions[v];
        size_t elem_bytes = h.version == MODEL_FP32 ? 4 : 2, bytes;
        struct elements out = {.bytes = elem_bytes, .salt = 7, .fail_at = SIZE_MAX}, in_ = out;
        const char *path = in(*state, "model.bin");
        succeeded(model_write(path, &h, bring, &out, &err), &err);
        assert_int_equal(out.next, model_elems(&h));
        assert_true(model_elems(&h) * elem_bytes > CHECKPOINT_CHUNK); // more than one chunk
        succeeded(model_read_header(path, &back, &err), &err);
        assert_memory_equal(&h, &back, sizeof h);
        succeeded(model_read(path, &back, take, &in_, &err), &err);
        assert_int_equal(in_.next, model_elems(&h));

        char *data = read_file(path, &bytes);
        const int32_t *ints = (const int32_t *)data;
        const int32_t expected[9] = {20240326, h.version, 70, 1000, 3, 5, 120, 1024, 0};
        assert_memory_equal(ints, expected, sizeof expected);
        assert_int_equal(bytes, 1024 + model_elems(&h) * elem_bytes);
        uint32_t last = element(&in_, model_elems(&h) - 1);
        assert_memory_equal(data + bytes - elem_bytes, &last, elem_bytes);
        free(data);
        assert_int_equal(files_in(*state), 1);
    }
}

static void sizes_do_not_overflow(void **state)
{
    (void)state;
    struct model_header h = shape_of(1024, 50257, 12, 12, 768);
    assert_int_equal(model_file_bytes(&h), 497904640);
    h.version = MODEL_BF16;
    assert_int_equal(model_file_bytes(&h), 1024 + (497904640 - 1024) / 2);

    // llm.c #212 #456 #700: products beyond 2^31.
    h = shape_of(1024, 50304, 48, 25, 1600);
    assert_int_equal(model_file_bytes(&h), 1024 + 4ull * 1557686400);
    h = shape_of(2048, 50257, 96, 96, 12288); // GPT-3
    assert_int_equal(model_elems(&h), 174604836864ull);
    h = shape_of(1 << 20, 1 << 24, 1000, 1, 65536); // the largest that is allowed
    struct error err;
    succeeded(model_check(&h, "largest", &err), &err);
    __uint128_t C = 65536,
                elems = ((__uint128_t)(1 << 24) + (1 << 20) + 2) * C + 1000 * (12 * C * C + 13 * C);
    assert_true(elems == model_elems(&h));
    assert_true(1024 + 4 * elems == model_file_bytes(&h));
}

// A file as large as GPT-3's in fp32, all holes.
static void a_model_of_700_gb_has_its_size_checked(void **state)
{
    struct error err;
    struct model_header h = shape_of(2048, 50257, 96, 96, 12288), back;
    int32_t ints[256] = {20240326, 3, 2048, 50257, 96, 96, 12288, 50304};
    const char *path = in(*state, "large.bin");
    write_file(path, ints, sizeof ints);
    if (truncate(path, (off_t)model_file_bytes(&h)) != 0) {
        fprintf(stderr, "skip: no file of %llu bytes here: %s\n",
                (unsigned long long)model_file_bytes(&h), strerror(errno));
        skip();
    }
    succeeded(model_read_header(path, &back, &err), &err);
    assert_int_equal(truncate(path, (off_t)(model_file_bytes(&h) - (1ull << 32))), 0);
    failed(model_read_header(path, &back, &err), &err, "bytes, expected 698419348480");
}

static void refused_model(const char *path, const int32_t *ints, size_t bytes, const char *words)
{
    struct error err = {0};
    struct model_header h;
    write_file(path, ints, bytes);
    failed(model_read_header(path, &h, &err), &err, words);
    assert_non_null(strstr(err.text, path));
}

static void models_that_are_none_are_refused(void **state)
{
    enum { GOOD = 1024 + 4 * 156 };
    static const struct {
        int field, value;
        const char *words;
    } bad[] = {
        {0, 20240520, "magic 20240520~expected 20240326~token shard~--train"},
        {0, 20240801, "token shard"},
        {0, 20240522, "evaluation file~--eval"},
        {0, 20240328, "tokenizer"},
        {0, 20240327, "debug state"},
        {0, 20240527, "training state of llm.c"},
        {0, 0, "magic 0"},
        {0, 0x53545047, "a training state~--resume"},
        {1, 1, "version 1~expected 3 (fp32) or 5 (bf16)~llm.c"},
        {1, 2, "version 2~llm.c"},
        {1, 4, "version 4~llm.c"},
        {1, 6, "version 6~expected 3"},
        {1, -3, "version -3"},
        {2, 0, "maximum sequence 0~1048576"},
        {2, -1, "maximum sequence 4294967295"},
        {3, 0, "vocabulary 0"},
        {3, 1 << 30, "vocabulary 1073741824"},
        {3, 129, "padded vocabulary 128, expected 256"},
        {4, 0, "layers 0"},
        {4, 1001, "layers 1001"},
        {5, 0, "heads 0"},
        {5, 3, "1 channels~3 heads"},
        {6, 0, "channels 0"},
        {6, 65537, "channels 65537"},
        {6, 2, "bytes, expected"},
        {7, 1, "padded vocabulary 1, expected 128"},
    };
    int32_t good[GOOD / 4] = {20240326, 3, 1, 1, 1, 1, 1, 128};
    struct model_header h;
    struct error err;
    const char *path = in(*state, "bad.bin");
    write_file(path, good, GOOD);
    succeeded(model_read_header(path, &h, &err), &err);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int32_t ints[GOOD / 4];
        memcpy(ints, good, GOOD);
        ints[bad[i].field] = bad[i].value;
        refused_model(path, ints, GOOD, bad[i].words);
    }
    refused_model(path, good, 0, "0 bytes, too short");
    refused_model(path, good, 1023, "1023 bytes, too short");
    refused_model(path, good, GOOD - 1, "1647 bytes, expected 1648");
    refused_model(path, good, 1024, "1024 bytes, expected 1648");
    int32_t longer[GOOD / 4 + 1] = {20240326, 3, 1, 1, 1, 1, 1, 128};
    refused_model(path, longer, GOOD + 4, "1652 bytes, expected 1648");
    failed(model_read_header(in(*state, "none.bin"), &h, &err), &err, "none.bin~No such file");
    failed(model_read_header(*state, &h, &err), &err, "is not a file");
    assert_int_equal(mkfifo(in(*state, "pipe"), 0600), 0);
    failed(model_read_header(in(*state, "pipe"), &h, &err), &err, "is not a file");
}

static void a_model_that_shrinks_while_read_is_an_error(void **state)
{
    struct error err;
    struct model_header h = shape_of(1, 1, 1, 1, 1);
    struct elements e = {.bytes = 4, .fail_at = SIZE_MAX};
    const char *path = in(*state, "m.bin");
    succeeded(model_write(path, &h, bring, &e, &err), &err);
    assert_int_equal(truncate(path, 1500), 0);
    e.next = 0;
    failed(model_read(path, &h, take, &e, &err), &err, "ends at byte 1500");
}

static void a_failing_source_leaves_the_old_file(void **state)
{
    struct error err;
    struct model_header h = shape_of(70, 1000, 3, 5, 120);
    struct elements e = {.bytes = 4, .fail_at = model_elems(&h) - 1};
    const char *path = in(*state, "m.bin");
    write_file(path, "old", 3);
    failed(model_write(path, &h, bring, &e, &err), &err, "the source failed");
    size_t bytes;
    char *data = read_file(path, &bytes);
    assert_memory_equal(data, "old", 3);
    assert_int_equal(bytes, 3);
    free(data);
    assert_int_equal(files_in(*state), 1);
}

// ---- training states ----------------------------------------------------------------------------

static int write_state(const char *path, uint64_t step, const struct model_header *h,
                       const char *options, struct error *err)
{
    struct numbers n;
    numbers_clear(&n);
    numbers_put_u64(&n, "step", step);
    numbers_put_f64(&n, "window", (double[]){1.5, NAN, -INFINITY}, 3);
    struct elements e[3] = {{4, 0, step + 1, SIZE_MAX}, {4, 0, 2, SIZE_MAX}, {4, 0, 3, SIZE_MAX}};
    struct state_part parts[] = {
        {"options", SECTION_BYTES, strlen(options), options, NULL, NULL},
        {"run", SECTION_BYTES, n.bytes, n.text, NULL, NULL},
        {"master", SECTION_FP32, model_elems(h), NULL, bring, &e[0]},
        {"m", SECTION_FP32, model_elems(h), NULL, bring, &e[1]},
        {"v", SECTION_FP32, model_elems(h), NULL, bring, &e[2]},
    };
    return state_write(path, step, h, parts, 5, err);
}

static int open_and_verify(const char *path, struct error *err)
{
    struct state_file s;
    if (state_open(&s, path, err)) {
        return err->status;
    }
    int status = state_verify(&s, err);
    state_close(&s);
    return status;
}

static void state_round_trip(void **state)
{
    struct error err;
    struct model_header h = shape_of(70, 1000, 3, 5, 120);
    const char *path = in(*state, "state_00000041.bin");
    succeeded(write_state(path, 41, &h, "lr=0.1\n", &err), &err);
    struct state_file s;
    succeeded(state_open(&s, path, &err), &err);
    succeeded(state_verify(&s, &err), &err);
    assert_int_equal(s.step, 41);
    assert_memory_equal(&s.shape, &h, sizeof h);
    assert_int_equal(s.section_count, 5);

    char text[16];
    size_t length;
    struct numbers n;
    uint64_t step;
    double window[3];
    succeeded(state_read_bytes(&s, "options", text, sizeof text, &length, &err), &err);
    assert_int_equal(length, 7);
    assert_memory_equal(text, "lr=0.1\n", 7);
    failed(state_read_bytes(&s, "options", text, 6, &length, &err), &err, "7 bytes~at most 6");
    succeeded(state_read_numbers(&s, "run", &n, &err), &err);
    succeeded(numbers_get_u64(&n, "step", &step, &err), &err);
    assert_int_equal(step, 41);
    succeeded(numbers_get_f64(&n, "window", window, 3, &err), &err);
    assert_true(window[0] == 1.5 && isnan(window[1]) && window[2] == -INFINITY);

    const char *names[] = {"v", "master", "m"}; // in any order
    const uint64_t salts[] = {3, 42, 2};
    for (int i = 0; i < 3; i++) {
        struct elements e = {.bytes = 4, .salt = salts[i]};
        succeeded(state_read(&s, names[i], SECTION_FP32, model_elems(&h), take, &e, &err), &err);
        assert_int_equal(e.next, model_elems(&h));
    }
    failed(state_read(&s, "m", SECTION_FP32, 5, take, NULL, &err), &err, "'m'~expected 5");
    failed(state_read(&s, "m", SECTION_BF16, 5, take, NULL, &err), &err, "no section 'm'");
    failed(state_read(&s, "w", SECTION_FP32, 5, take, NULL, &err), &err, "no section 'w'");
    state_close(&s);
    assert_int_equal(files_in(*state), 1);
}

static void every_flipped_byte_is_found(void **state)
{
    struct error err;
    struct model_header h = shape_of(1, 1, 1, 1, 1);
    const char *path = in(*state, "s.bin");
    succeeded(write_state(path, 3, &h, "lr=0.1\n", &err), &err);
    size_t bytes, in_sections = 0;
    char *data = read_file(path, &bytes);
    int fd = open(path, O_WRONLY);
    const unsigned char flips[] = {0x01, 0x80, 0xff};
    for (size_t i = 0; i < bytes; i++) {
        for (int f = 0; f < 3; f++) {
            char c = (char)(data[i] ^ flips[f]);
            assert_int_equal(pwrite(fd, &c, 1, (off_t)i), 1);
            memset(&err, 0, sizeof err);
            if (!open_and_verify(path, &err)) {
                fail_msg("byte %zu of %zu flipped by %02x: not found", i, bytes, flips[f]);
            }
            assert_non_null(strstr(err.text, path));
            in_sections += strstr(err.text, "section '") != NULL;
        }
        assert_int_equal(pwrite(fd, &data[i], 1, (off_t)i), 1);
    }
    assert_int_equal(in_sections, 3 * (bytes - 64 - 5 * 56));
    close(fd);
    succeeded(open_and_verify(path, &err), &err);
    free(data);
}

static void every_cut_length_is_found(void **state)
{
    struct error err;
    struct model_header h = shape_of(1, 1, 1, 1, 1);
    const char *path = in(*state, "s.bin");
    succeeded(write_state(path, 3, &h, "lr=0.1\n", &err), &err);
    size_t bytes;
    char *data = read_file(path, &bytes);
    for (size_t n = bytes; n-- > 0;) {
        assert_int_equal(truncate(path, (off_t)n), 0);
        failed(open_and_verify(path, &err), &err, n ? "s.bin" : "cut short: 0 bytes");
        if (n >= 64 + 5 * 56) {
            char size[64];
            snprintf(size, sizeof size, "%zu bytes, expected %zu", n, bytes);
            failed(STATUS_FAIL, &err, size);
            assert_non_null(strstr(err.text, "it ends in section '"));
        }
    }
    char *longer = calloc(1, bytes + 4096);
    memcpy(longer, data, bytes);
    write_file(path, longer, bytes + 1);
    failed(open_and_verify(path, &err), &err, "bytes, expected");
    write_file(path, longer, bytes + 4096);
    failed(open_and_verify(path, &err), &err, "bytes, expected");
    free(longer);
    free(data);
}

// Headers whose checksum is right but whose content cannot be.
static void tables_that_lie_are_refused(void **state)
{
    struct error err;
    struct model_header h = shape_of(1, 1, 1, 1, 1);
    const char *path = in(*state, "s.bin");
    succeeded(write_state(path, 3, &h, "lr=0.1\n", &err), &err);
    size_t bytes;
    char *good = read_file(path, &bytes), *data = malloc(bytes);
    static const struct {
        size_t at;
        uint64_t value;
        size_t size;
        const char *words;
    } lies[] = {
        {8, 2, 4, "version 2"},
        {12, 0, 4, "0 sections"},
        {12, 17, 4, "17 sections"},
        {12, 4, 4, "damaged"},
        {16, 1, 8, "add up"},
        {32, 0, 4, "maximum sequence 0"},
        {52, 1, 4, "padded vocabulary 1"},
        {64, 0, 1, "no sense"},                                // no name
        {64 + 56 + 15, 'x', 1, "no sense"},                    // name without an end
        {64 + 16, 0, 4, "no sense"},                           // dtype
        {64 + 16, 9, 4, "no sense"},                           // dtype
        {64 + 20, 1, 4, "no sense"},                           // the zero
        {64 + 24, 8, 8, "no sense"},                           // elements, not bytes
        {64 + 2 * 56 + 24, (1ull << 62) + 156, 8, "no sense"}, // times 4 is right modulo 2^64
        {64 + 2 * 56 + 32, 1ull << 62, 8, "no sense"},         // bytes, not elements
        {64 + 40, 0, 8, "no sense"},                           // offset into the header
        {64 + 56 + 40, UINT64_MAX, 8, "no sense"},             // offset
    };
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        memcpy(data, good, bytes);
        memcpy(data + lies[i].at, &lies[i].value, lies[i].size);
        uint32_t sections;
        memcpy(&sections, data + 12, 4);
        char sealed[56 + 17 * 56];
        memcpy(sealed, data, 56);
        memcpy(sealed + 56, data + 64, sections * 56);
        uint64_t sum = XXH3_64bits(sealed, 56 + sections * 56);
        memcpy(data + 56, &sum, 8);
        write_file(path, data, bytes);
        failed(open_and_verify(path, &err), &err, lies[i].words);
    }
    free(good);
    free(data);
}

static void other_files_are_no_states(void **state)
{
    struct error err;
    const char *path = in(*state, "s.bin");
    int32_t ints[256] = {20240326, 3};
    write_file(path, ints, sizeof ints);
    failed(open_and_verify(path, &err), &err, "not a training state, a model");
    ints[0] = 20240527;
    write_file(path, ints, sizeof ints);
    failed(open_and_verify(path, &err), &err, "not a training state~llm.c");
    memset(ints, 'x', sizeof ints);
    write_file(path, ints, sizeof ints);
    failed(open_and_verify(path, &err), &err, "not a training state");
    failed(open_and_verify(*state, &err), &err, "is not a file");
    failed(open_and_verify(in(*state, "none"), &err), &err, "No such file");
}

// ---- numbers ------------------------------------------------------------------------------------

static void numbers_come_back_bit_for_bit(void **state)
{
    (void)state;
    struct numbers n;
    struct error err;
    const double values[] = {0.0,      -0.0,      1.0 / 3, -1e308 * 1.7, 5e-324,
                             INFINITY, -INFINITY, 1e-310,  NAN,          123456789.125};
    double back[10];
    uint64_t u;
    numbers_clear(&n);
    numbers_put_u64(&n, "large", UINT64_MAX);
    numbers_put_f64(&n, "values", values, 10);
    numbers_put_f64(&n, "none", values, 0);
    numbers_put_u64(&n, "val", 7);
    succeeded(numbers_get_u64(&n, "large", &u, &err), &err);
    assert_true(u == UINT64_MAX);
    succeeded(numbers_get_u64(&n, "val", &u, &err), &err);
    assert_int_equal(u, 7);
    succeeded(numbers_get_f64(&n, "values", back, 10, &err), &err);
    for (int i = 0; i < 10; i++) {
        assert_true(isnan(values[i]) ? isnan(back[i]) : memcmp(&values[i], &back[i], 8) == 0);
    }
    succeeded(numbers_get_f64(&n, "none", back, 0, &err), &err);
    failed(numbers_get_f64(&n, "values", back, 9, &err), &err, "'values'~expected 9 numbers");
    failed(numbers_get_f64(&n, "none", back, 1, &err), &err, "'none'~expected 1 number");
    failed(numbers_get_u64(&n, "values", &u, &err), &err, "'values'");
    failed(numbers_get_u64(&n, "missing", &u, &err), &err, "'missing'");
    failed(numbers_get_u64(&n, "arge", &u, &err), &err, "'arge'");
}

static void numbers_that_are_none_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "a=\n",   "a=x\n",  "a=1",      "a=1 \n", "a= 1\n",
        "a=1x\n", "a=-1\n", "a=1\n\na", "a",      "a=99999999999999999999\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct numbers n;
        struct error err;
        uint64_t u;
        numbers_clear(&n);
        n.bytes = strlen(bad[i]);
        memcpy(n.text, bad[i], n.bytes + 1);
        if (i == 7) {
            succeeded(numbers_get_u64(&n, "a", &u, &err), &err); // the first line is good
        } else {
            failed(numbers_get_u64(&n, "a", &u, &err), &err, "'a'");
        }
    }
}

// ---- the directory of a run ---------------------------------------------------------------------

static void put_checkpoint(const char *dir, uint64_t step)
{
    struct error err;
    struct model_header h = shape_of(1, 1, 1, 1, 1);
    struct elements e = {.bytes = 4, .fail_at = SIZE_MAX};
    char path[PATH_MAX];
    model_path(path, dir, step);
    succeeded(model_write(path, &h, bring, &e, &err), &err);
    state_path(path, dir, step);
    succeeded(write_state(path, step, &h, "", &err), &err);
    succeeded(checkpoint_done(dir, step, &err), &err);
}

static void spoil(const char *dir, uint64_t step)
{
    char path[PATH_MAX];
    state_path(path, dir, step);
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, "!", 1, 700), 1);
    close(fd);
}

// Files of a step: all three, or none.
static bool has(const char *dir, uint64_t step)
{
    char m[PATH_MAX], s[PATH_MAX], d[64];
    model_path(m, dir, step);
    state_path(s, dir, step);
    snprintf(d, sizeof d, "DONE_%08llu", (unsigned long long)step);
    int count = exists(m) + exists(s) + exists(in(dir, d));
    assert_true(count == 0 || count == 3);
    return count == 3;
}

struct refusals {
    int count;
    char last[PATH_MAX];
};

static void count_refusal(void *ctx, const char *path, const char *reason)
{
    struct refusals *r = ctx;
    assert_non_null(strstr(reason, path));
    snprintf(r->last, PATH_MAX, "%s", path);
    r->count++;
}

static void the_newest_good_state_is_taken(void **state)
{
    struct error err;
    struct state_file s;
    struct refusals r = {0};
    failed(state_open_newest(&s, *state, count_refusal, &r, &err), &err, "nothing to resume");
    failed(state_open_newest(&s, in(*state, "none"), NULL, NULL, &err), &err,
           "nothing to resume~No such file");
    assert_false(state_any(*state) || state_any(in(*state, "none")));
    for (uint64_t step = 10; step <= 40; step += 10) {
        put_checkpoint(*state, step);
    }
    put_checkpoint(*state, 123456789); // more than eight digits
    succeeded(state_open_newest(&s, *state, count_refusal, &r, &err), &err);
    assert_int_equal(s.step, 123456789);
    state_close(&s);
    assert_int_equal(r.count, 0);
    spoil(*state, 123456789);
    spoil(*state, 40);
    write_file(in(*state, "state_00000099.bin.123.tmp"), "half", 4);
    write_file(in(*state, "state_99.bin"), "other", 5);
    succeeded(state_open_newest(&s, *state, count_refusal, &r, &err), &err);
    assert_int_equal(s.step, 30);
    state_close(&s);
    assert_int_equal(r.count, 2);
    assert_non_null(strstr(r.last, "state_00000040.bin"));
    assert_int_equal(rename(in(*state, "state_00000010.bin"), in(*state, "state_00000050.bin")), 0);
    succeeded(state_open_newest(&s, *state, count_refusal, &r, &err), &err);
    assert_int_equal(s.step, 30); // 50 was renamed
    state_close(&s);
    spoil(*state, 30);
    spoil(*state, 20);
    failed(state_open_newest(&s, *state, NULL, NULL, &err), &err, "none of 5~is good~00000020");
    assert_int_equal(s.fd, -1);
    assert_true(state_any(*state));
}

static void pruning_keeps_the_newest_and_the_major(void **state)
{
    struct error err;
    for (uint64_t step = 1; step <= 12; step++) {
        put_checkpoint(*state, step);
    }
    write_file(in(*state, "model_mine.bin"), "mine", 4);
    succeeded(checkpoint_prune(*state, 12, 0, 0, &err), &err); // keep all
    assert_true(has(*state, 1));
    succeeded(checkpoint_prune(*state, 12, 3, 5, &err), &err);
    for (uint64_t step = 1; step <= 12; step++) {
        assert_true(has(*state, step) == (step >= 10 || step == 5));
    }
    // A run that resumed at 9 behind states that it did not trust.
    put_checkpoint(*state, 9);
    succeeded(checkpoint_prune(*state, 9, 1, 0, &err), &err);
    assert_true(has(*state, 9) && !has(*state, 5));
    assert_true(has(*state, 10) && has(*state, 11) && has(*state, 12));
    failed(checkpoint_prune(*state, 8, 1, 0, &err), &err, "step 8~vanished");
    assert_true(has(*state, 9));
    size_t removed;
    succeeded(checkpoint_set_aside(*state, 11, &removed, &err), &err);
    assert_int_equal(removed, 2);
    assert_true(has(*state, 9) && has(*state, 10) && !has(*state, 11) && !has(*state, 12));
    succeeded(checkpoint_set_aside(*state, 0, &removed, &err), &err);
    assert_int_equal(removed, 2);
    assert_int_equal(files_in(*state), 1);
    assert_true(exists(in(*state, "state_00000009.bin.old")));
    assert_true(exists(in(*state, "model_00000012.bin.old")));
    assert_true(exists(in(*state, "model_mine.bin")));
}

static void an_interrupted_pruning_is_finished_later(void **state)
{
    struct error err;
    put_checkpoint(*state, 1);
    put_checkpoint(*state, 2);
    unlink(in(*state, "model_00000001.bin"));
    succeeded(checkpoint_prune(*state, 2, 1, 0, &err), &err);
    assert_int_equal(files_in(*state), 3);
}

static void room_is_checked_for_keep_plus_two(void **state)
{
    struct error err;
    uint64_t available;
    struct model_header small = shape_of(1, 1, 1, 1, 1),
                        large = shape_of(2048, 50257, 96, 96, 12288);
    succeeded(checkpoint_room(*state, &small, 0, &err), &err);
    succeeded(checkpoint_room(*state, &small, 3, &err), &err);
    failed(checkpoint_room(in(*state, "none"), &small, 3, &err), &err, "none");
    succeeded(dir_free_bytes(*state, &available, &err), &err);
    if ((double)available > 2 * 16.0 * 174.6e9) {
        fprintf(stderr, "skip: %.0f GB are free here, too much to be short of\n",
                (double)available / 1e9);
        skip();
    }
    failed(checkpoint_room(*state, &large, 0, &err), &err, "no room~2 of 2793");
    failed(checkpoint_room(*state, &large, 5, &err), &err, "no room~7 of 2793~--keep~--out");
    put_checkpoint(*state, 1);
    put_checkpoint(*state, 2);
    failed(checkpoint_room(*state, &large, 5, &err), &err, "no room~5 of 2793");
    failed(checkpoint_room(*state, &large, 1, &err), &err, "no room~2 of 2793");
}

// ---- files and directories ----------------------------------------------------------------------

static void directories_are_made_with_parents(void **state)
{
    struct error err;
    succeeded(dir_make(in(*state, "a/b//c/"), &err), &err);
    succeeded(dir_make(in(*state, "a/b/c"), &err), &err);
    succeeded(dir_writable(in(*state, "a/b/c"), &err), &err);
    assert_int_equal(files_in(in(*state, "a/b/c")), 0);
    write_file(in(*state, "file"), "", 0);
    failed(dir_make(in(*state, "file"), &err), &err, "file~not a directory");
    failed(dir_make(in(*state, "file/x"), &err), &err, "cannot make directory~Not a directory");
    failed(dir_make("", &err), &err, "empty");
    char longest[PATH_MAX + 10];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    failed(dir_make(longest, &err), &err, "too long");
    failed(dir_writable(in(*state, "none"), &err), &err, "none~No such file");
    failed(dir_writable("/proc", &err), &err, "cannot write into directory /proc");
}

static void atomic_files_are_whole_or_not_there(void **state)
{
    struct error err;
    struct atomic_file f;
    const char *path = in(*state, "f");
    succeeded(atomic_open(&f, path, &err), &err);
    succeeded(atomic_write(&f, "half", 4, &err), &err);
    assert_false(exists(path));
    atomic_abort(&f);
    atomic_abort(&f); // harmless
    assert_int_equal(files_in(*state), 0);
    succeeded(file_replace(path, "one", 3, &err), &err);
    succeeded(file_replace(path, "twotwo", 6, &err), &err);
    size_t bytes;
    char *data = read_file(path, &bytes);
    assert_int_equal(bytes, 6);
    assert_memory_equal(data, "twotwo", 6);
    free(data);
    failed(file_replace(in(*state, "none/f"), "x", 1, &err), &err, "none/f~No such file");
    mkdir(in(*state, "d"), 0700);
    failed(file_replace(in(*state, "d"), "x", 1, &err), &err, "is there and is no file");
    assert_int_equal(files_in(*state), 2);
}

// Runs `body` in a process of its own; its exit status, or minus the signal that ended it.
static int in_child(void (*body)(const char *dir), const char *dir)
{
    pid_t pid = fork();
    if (pid == 0) {
        body(dir);
        _exit(99);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void write_beyond_the_limit(const char *dir)
{
    struct error err = {0};
    struct model_header h = shape_of(70, 1000, 3, 5, 120);
    struct elements e = {.bytes = 4, .fail_at = SIZE_MAX};
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit = {1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) {
        _exit(1);
    }
    if (model_write(in(dir, "m.bin"), &h, bring, &e, &err) != STATUS_FAIL ||
        !strstr(err.text, "m.bin: File too large")) {
        _exit(2);
    }
    if (write_state(in(dir, "s.bin"), 1, &h, "", &err) != STATUS_FAIL ||
        !strstr(err.text, "s.bin: File too large")) {
        _exit(3);
    }
    _exit(0);
}

static void a_file_that_grows_too_large_is_an_error(void **state)
{
    assert_int_equal(in_child(write_beyond_the_limit, *state), 0);
    assert_int_equal(files_in(*state), 0);
}

static void a_full_disk_leaves_the_last_checkpoint(void **state)
{
    const char *disk = in(*state, "disk");
    struct error err;
    struct model_header h = shape_of(70, 1000, 3, 5, 120);
    assert_int_equal(mkdir(disk, 0700), 0);
    if (mount("none", disk, "tmpfs", 0, "size=12m") != 0) {
        fprintf(stderr, "skip: a full disk needs the right to mount one: %s\n", strerror(errno));
        skip();
    }
    int status = STATUS_OK;
    uint64_t step = 0;
    while (!status && step < 100) { // 8 MB each
        char path[PATH_MAX];
        state_path(path, disk, ++step);
        status = write_state(path, step, &h, "", &err);
    }
    struct error found = err;
    int left = files_in(disk), room = checkpoint_room(disk, &h, 0, &err);
    struct state_file s;
    struct error open_err;
    int opened = state_open_newest(&s, disk, NULL, NULL, &open_err);
    state_close(&s);
    assert_int_equal(umount(disk), 0);
    failed(status, &found, "cannot write~No space left~make room");
    failed(room, &err, "no room for checkpoints");
    succeeded(opened, &open_err);
    assert_int_equal(left, step - 1);
    assert_int_equal(s.step, step - 1);
}

// ---- locks and kills ----------------------------------------------------------------------------

static void try_to_lock(const char *dir)
{
    struct dir_lock lock;
    struct error err;
    int status = dir_lock(&lock, dir, &err);
    _exit(status == STATUS_OK ? 0 : strstr(err.text, "in use by another run") ? 1 : 2);
}

static void lock_and_die(const char *dir)
{
    struct dir_lock lock;
    struct error err;
    if (dir_lock(&lock, dir, &err) == STATUS_OK) {
        write_file(in(dir, "state_00000007.bin.77.tmp"), "half", 4);
        kill(getpid(), SIGKILL);
    }
}

static void one_run_per_directory(void **state)
{
    struct dir_lock lock, second;
    struct error err;
    succeeded(dir_lock(&lock, *state, &err), &err);
    assert_int_equal(in_child(try_to_lock, *state), 1);
    failed(dir_lock(&second, *state, &err), &err, "in use by another run~--out");
    dir_unlock(&lock);
    dir_unlock(&lock); // harmless
    assert_int_equal(in_child(try_to_lock, *state), 0);
    failed(dir_lock(&lock, in(*state, "none"), &err), &err, "none/lock");
}

static void a_kill_leaves_no_lock_and_its_files_are_cleaned(void **state)
{
    static const char *const kept[] = {"a.tmp", "a.b.tmp", "a.12.tmp.bin",
                                       ".tmp",  "12.tmp",  "x.bin"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        write_file(in(*state, kept[i]), "", 0);
    }
    assert_int_equal(in_child(lock_and_die, *state), -SIGKILL);
    assert_true(exists(in(*state, "state_00000007.bin.77.tmp")));
    struct dir_lock lock;
    struct error err;
    succeeded(dir_lock(&lock, *state, &err), &err);
    assert_false(exists(in(*state, "state_00000007.bin.77.tmp")));
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        assert_true(exists(in(*state, kept[i])));
    }
    dir_unlock(&lock);
}

// Writes checkpoints and prunes for ever; tells each step that is complete.
static void write_for_ever(const char *dir, int tell)
{
    struct error err;
    struct model_header h = shape_of(20, 300, 1, 1, 64);
    for (uint64_t step = 1;; step++) {
        struct elements e = {.bytes = 4, .fail_at = SIZE_MAX};
        char path[PATH_MAX];
        model_path(path, dir, step);
        int status = model_write(path, &h, bring, &e, &err);
        state_path(path, dir, step);
        if (status || write_state(path, step, &h, "", &err) || checkpoint_done(dir, step, &err) ||
            write(tell, &step, sizeof step) != sizeof step ||
            checkpoint_prune(dir, step, 2, 0, &err)) {
            _exit(1);
        }
    }
}

static void fifty_kills_lose_nothing(void **state)
{
    unsigned seed = (unsigned)time(NULL);
    fprintf(stderr, "seed %u\n", seed);
    for (int kill_number = 0; kill_number < 50; kill_number++) {
        // A folder each: a kill between model and state leaves a model that only a resumed run,
        // which these are not, would complete.
        char dir[PATH_MAX];
        snprintf(dir, sizeof dir, "%s/%d", (const char *)*state, kill_number);
        assert_int_equal(mkdir(dir, 0700), 0);
        int pipes[2];
        assert_int_equal(pipe(pipes), 0);
        pid_t pid = fork();
        if (pid == 0) {
            write_for_ever(dir, pipes[1]);
        }
        close(pipes[1]);
        uint64_t told = 0, step;
        assert_int_equal(read(pipes[0], &told, sizeof told), sizeof told);
        usleep((useconds_t)(rand_r(&seed) % 15000));
        kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status));
        while (read(pipes[0], &step, sizeof step) == sizeof step) {
            told = step;
        }
        close(pipes[0]);

        struct error err;
        struct state_file s;
        struct refusals r = {0};
        struct dir_lock lock;
        succeeded(dir_lock(&lock, dir, &err), &err);
        succeeded(state_open_newest(&s, dir, count_refusal, &r, &err), &err);
        assert_true(s.step >= told && s.step <= told + 1);
        assert_int_equal(r.count, 0);
        state_close(&s);
        assert_true(files_in(dir) <= 3 * 3 + 1);
        dir_unlock(&lock);
    }
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        CASE(model_round_trip),
        CASE(sizes_do_not_overflow),
        CASE(a_model_of_700_gb_has_its_size_checked),
        CASE(models_that_are_none_are_refused),
        CASE(a_model_that_shrinks_while_read_is_an_error),
        CASE(a_failing_source_leaves_the_old_file),
        CASE(state_round_trip),
        CASE(every_flipped_byte_is_found),
        CASE(every_cut_length_is_found),
        CASE(tables_that_lie_are_refused),
        CASE(other_files_are_no_states),
        CASE(numbers_come_back_bit_for_bit),
        CASE(numbers_that_are_none_are_refused),
        CASE(the_newest_good_state_is_taken),
        CASE(pruning_keeps_the_newest_and_the_major),
        CASE(an_interrupted_pruning_is_finished_later),
        CASE(room_is_checked_for_keep_plus_two),
        CASE(directories_are_made_with_parents),
        CASE(atomic_files_are_whole_or_not_there),
        CASE(a_file_that_grows_too_large_is_an_error),
        CASE(a_full_disk_leaves_the_last_checkpoint),
        CASE(one_run_per_directory),
        CASE(a_kill_leaves_no_lock_and_its_files_are_cleaned),
        CASE(fifty_kills_lose_nothing),
    };
    return cmocka_run_group_tests_name("checkpoint", tests, NULL, NULL);
}
