#include "data/checkpoint.h"
#include "data/files.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files are little-endian");

typedef unsigned long long ull; // for %llu

static uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

// ---- model files --------------------------------------------------------------------------------

enum { HEADER_INTS = 256, HEADER_BYTES = 4 * HEADER_INTS, MODEL_MAGIC = 20240326 };

int model_check(const struct model_header *h, const char *where, struct error *err)
{
    const struct {
        const char *name;
        uint32_t value, most;
    } field[] = {{"maximum sequence", h->max_seq, 1 << 20},
                 {"vocabulary", h->vocab, 1 << 24},
                 {"layers", h->layers, 1000},
                 {"heads", h->heads, 1024},
                 {"channels", h->hidden, 65536}};
    if (h->version != MODEL_FP32 && h->version != MODEL_BF16) {
        return error_set(err, STATUS_FAIL, "%s: version %d, expected 3 (fp32) or 5 (bf16)%s", where,
                         h->version,
                         h->version == 1 || h->version == 2 || h->version == 4
                             ? ": an old format without padded vocabulary; let a current llm.c "
                               "(train_gpt2.py) write the model anew"
                             : "");
    }
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
        if (field[i].value < 1 || field[i].value > field[i].most) {
            return error_set(err, STATUS_FAIL, "%s: %s %u, expected 1 to %u: the file is damaged",
                             where, field[i].name, field[i].value, field[i].most);
        }
    }
    if (h->hidden % h->heads != 0) {
        return error_set(err, STATUS_FAIL, "%s: %u channels are no multiple of %u heads", where,
                         h->hidden, h->heads);
    }
    if (h->padded_vocab != (h->vocab + 127) / 128 * 128) {
        return error_set(err, STATUS_FAIL,
                         "%s: padded vocabulary %u, expected %u (vocabulary %u rounded up to 128)",
                         where, h->padded_vocab, (h->vocab + 127) / 128 * 128, h->vocab);
    }
    return STATUS_OK;
}

// At most 2^36 + 1000 * 13 * 2^32 < 2^56 within the limits above.
size_t model_elems(const struct model_header *h)
{
    size_t C = h->hidden;
    return ((size_t)h->padded_vocab + h->max_seq + 2) * C + h->layers * (12 * C * C + 13 * C);
}

size_t model_elem_bytes(const struct model_header *h)
{
    return h->version == MODEL_BF16 ? 2 : 4;
}

uint64_t model_file_bytes(const struct model_header *h)
{
    return HEADER_BYTES + (uint64_t)model_elems(h) * model_elem_bytes(h);
}

// What a file that is no model is, for those who mixed up two options.
static const char *kind_of(uint32_t magic)
{
    switch (magic) {
    case 20240520:
    case 20240801:
        return ", a token shard (give it to --train or --val)";
    case 20240522:
        return ", an evaluation file (give it to --eval)";
    case 20240328:
        return ", a tokenizer";
    case 20240327:
        return ", a debug state of llm.c";
    case 20240527:
        return ", a training state of llm.c (only its model file can be read)";
    case 20240326:
        return ", a model";
    case 0x53545047: // "GPTS"
        return ", a training state (resume with --out DIR --resume, or give the model file)";
    default:
        return "";
    }
}

int model_read_header(const char *path, struct model_header *h, struct error *err)
{
    uint32_t ints[HEADER_INTS];
    uint64_t bytes;
    int fd;
    if (file_open(path, &fd, &bytes, err)) {
        return err->status;
    }
    if (bytes < HEADER_BYTES) {
        close(fd);
        return error_set(err, STATUS_FAIL,
                         "%s: %llu bytes, too short for the header (%d) of a model file", path,
                         (ull)bytes, HEADER_BYTES);
    }
    int status = file_read_at(fd, path, ints, HEADER_BYTES, 0, err);
    close(fd);
    if (status) {
        return status;
    }
    if (ints[0] != MODEL_MAGIC) {
        return error_set(err, STATUS_FAIL,
                         "%s (%llu bytes) is not a model file: magic %u, expected %d%s", path,
                         (ull)bytes, ints[0], MODEL_MAGIC, kind_of(ints[0]));
    }
    *h = (struct model_header){.version = (int)ints[1],
                               .max_seq = ints[2],
                               .vocab = ints[3],
                               .layers = ints[4],
                               .heads = ints[5],
                               .hidden = ints[6],
                               .padded_vocab = ints[7]};
    if (model_check(h, path, err)) {
        return err->status;
    }
    if (bytes != model_file_bytes(h)) {
        return error_set(err, STATUS_FAIL,
                         "%s: %llu bytes, expected %llu by its header: the copy is incomplete or "
                         "damaged",
                         path, (ull)bytes, (ull)model_file_bytes(h));
    }
    return STATUS_OK;
}

// ---- streams ------------------------------------------------------------------------------------

static void *chunk_new(struct error *err)
{
    void *chunk = malloc(CHECKPOINT_CHUNK);
    if (!chunk) {
        error_set(err, STATUS_FAIL, "no memory for a buffer of %d bytes", CHECKPOINT_CHUNK);
    }
    return chunk;
}

// Hands `elems` elements of the file from `offset` on to `sink` (may be NULL), and all their bytes
// to `hash` (may be NULL).
static int stream_in(int fd, const char *path, uint64_t offset, uint64_t elems, size_t elem_bytes,
                     checkpoint_fn *sink, void *ctx, XXH3_state_t *hash, struct error *err)
{
    char *chunk = chunk_new(err);
    int status = chunk ? STATUS_OK : err->status;
    for (uint64_t first = 0; !status && first < elems;) {
        size_t n = (size_t)min_u64(elems - first, CHECKPOINT_CHUNK / elem_bytes);
        status = file_read_at(fd, path, chunk, n * elem_bytes, offset + first * elem_bytes, err);
        if (!status && hash) {
            XXH3_64bits_update(hash, chunk, n * elem_bytes);
        }
        if (!status && sink) {
            status = sink(ctx, chunk, first, n, err);
        }
        first += n;
    }
    free(chunk);
    return status;
}

// After a failure the temporary file is gone.
static int stream_out(struct atomic_file *f, uint64_t elems, size_t elem_bytes,
                      checkpoint_fn *source, void *ctx, XXH3_state_t *hash, struct error *err)
{
    char *chunk = chunk_new(err);
    int status = chunk ? STATUS_OK : err->status;
    for (uint64_t first = 0; !status && first < elems;) {
        size_t n = (size_t)min_u64(elems - first, CHECKPOINT_CHUNK / elem_bytes);
        status = source(ctx, chunk, first, n, err);
        if (!status && hash) {
            XXH3_64bits_update(hash, chunk, n * elem_bytes);
        }
        if (!status) {
            status = atomic_write(f, chunk, n * elem_bytes, err);
        }
        first += n;
    }
    free(chunk);
    if (status) {
        atomic_abort(f);
    }
    return status;
}

int model_read(const char *path, const struct model_header *h, checkpoint_fn *sink, void *ctx,
               struct error *err)
{
    uint64_t bytes;
    int fd;
    if (file_open(path, &fd, &bytes, err)) {
        return err->status;
    }
    int status = stream_in(fd, path, HEADER_BYTES, model_elems(h), model_elem_bytes(h), sink, ctx,
                           NULL, err);
    close(fd);
    return status;
}

int model_write(const char *path, const struct model_header *h, checkpoint_fn *source, void *ctx,
                struct error *err)
{
    uint32_t ints[HEADER_INTS] = {
        MODEL_MAGIC, (uint32_t)h->version, h->max_seq, h->vocab, h->layers, h->heads,
        h->hidden,   h->padded_vocab};
    struct atomic_file f;
    if (model_check(h, path, err) || atomic_open(&f, path, err) ||
        atomic_write(&f, ints, sizeof ints, err) ||
        stream_out(&f, model_elems(h), model_elem_bytes(h), source, ctx, NULL, err)) {
        return err->status;
    }
    return atomic_commit(&f, err);
}

// ---- named numbers ------------------------------------------------------------------------------

void numbers_clear(struct numbers *n)
{
    n->bytes = 0;
    n->text[0] = '\0';
}

// Text behind "name=", or NULL.
static const char *numbers_find(const struct numbers *n, const char *name)
{
    size_t length = strlen(name);
    for (const char *line = n->text; *line;) {
        if (strncmp(line, name, length) == 0 && line[length] == '=') {
            return line + length + 1;
        }
        const char *newline = strchr(line, '\n');
        line = newline ? newline + 1 : line + strlen(line);
    }
    return NULL;
}

static void numbers_append(struct numbers *n, const char *text)
{
    size_t length = strlen(text);
    assert(n->bytes + length < sizeof n->text);
    memcpy(n->text + n->bytes, text, length + 1);
    n->bytes += length;
}

static void numbers_begin(struct numbers *n, const char *name)
{
    assert(!strpbrk(name, "=\n") && !numbers_find(n, name));
    numbers_append(n, name);
}

void numbers_put_u64(struct numbers *n, const char *name, uint64_t value)
{
    char text[32];
    numbers_begin(n, name);
    snprintf(text, sizeof text, "=%llu\n", (ull)value);
    numbers_append(n, text);
}

void numbers_put_f64(struct numbers *n, const char *name, const double *values, size_t count)
{
    char text[40];
    numbers_begin(n, name);
    for (size_t i = 0; i < count; i++) {
        snprintf(text, sizeof text, "%c%a", i ? ' ' : '=', values[i]);
        numbers_append(n, text);
    }
    numbers_append(n, count ? "\n" : "=\n");
}

static int numbers_fail(const char *name, const char *at, size_t count, struct error *err)
{
    if (!at) {
        return error_set(err, STATUS_FAIL,
                         "the training state holds no '%s': it was written by another version",
                         name);
    }
    int length = (int)strcspn(at, "\n");
    return error_set(err, STATUS_FAIL,
                     "'%s' in the training state is '%.*s', expected %zu number%s", name,
                     length < 40 ? length : 40, at, count, count == 1 ? "" : "s");
}

int numbers_get_u64(const struct numbers *n, const char *name, uint64_t *value, struct error *err)
{
    const char *at = numbers_find(n, name);
    char *end = NULL;
    errno = 0;
    if (at && *at >= '0' && *at <= '9') {
        *value = strtoull(at, &end, 10);
    }
    return end && *end == '\n' && errno == 0 ? STATUS_OK : numbers_fail(name, at, 1, err);
}

int numbers_get_f64(const struct numbers *n, const char *name, double *values, size_t count,
                    struct error *err)
{
    const char *begin = numbers_find(n, name), *at = begin;
    for (size_t i = 0; at && i < count; i++) {
        char *end;
        if (i > 0 && *at++ != ' ') {
            return numbers_fail(name, begin, count, err);
        }
        // strtod would skip blanks, even into the next line.
        values[i] = strtod(at, &end);
        if (end == at || *at == ' ' || *at == '\n') {
            return numbers_fail(name, begin, count, err);
        }
        at = end;
    }
    return at && *at == '\n' ? STATUS_OK : numbers_fail(name, begin, count, err);
}

// ---- training states: the header ----------------------------------------------------------------

struct disk_header {
    char magic[8];
    uint32_t version, sections;
    uint64_t bytes, step;
    uint32_t shape[6];
    uint64_t checksum;
};

struct disk_section {
    char name[STATE_NAME_MAX];
    uint32_t dtype, zero;
    uint64_t elems, bytes, offset, checksum;
};

_Static_assert(sizeof(struct disk_header) == 64, "no padding");
_Static_assert(sizeof(struct disk_section) == 56, "no padding");

static const char state_magic[8] = {'G', 'P', 'T', 'S', 'T', 'A', 'T', 'E'};

static size_t section_elem_bytes(uint32_t dtype)
{
    switch (dtype) {
    case SECTION_BYTES:
        return 1;
    case SECTION_FP32:
        return 4;
    case SECTION_BF16:
        return 2;
    default:
        return 0;
    }
}

static XXH3_state_t *hash_new(struct error *err)
{
    XXH3_state_t *hash = XXH3_createState();
    if (!hash) {
        error_set(err, STATUS_FAIL, "no memory for a checksum");
    } else {
        XXH3_64bits_reset(hash);
    }
    return hash;
}

static int header_checksum(const struct disk_header *h, const struct disk_section *table,
                           uint64_t *sum, struct error *err)
{
    XXH3_state_t *hash = hash_new(err);
    if (!hash) {
        return err->status;
    }
    XXH3_64bits_update(hash, h, offsetof(struct disk_header, checksum));
    XXH3_64bits_update(hash, table, h->sections * sizeof *table);
    *sum = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return STATUS_OK;
}

// ---- training states: writing -------------------------------------------------------------------

static int write_part(struct atomic_file *f, const struct state_part *part,
                      struct disk_section *section, struct error *err)
{
    section->offset = f->bytes;
    if (part->data) {
        section->checksum = XXH3_64bits(part->data, section->bytes);
        return atomic_write(f, part->data, section->bytes, err);
    }
    XXH3_state_t *hash = hash_new(err);
    if (!hash) {
        atomic_abort(f);
        return err->status;
    }
    int status = stream_out(f, part->elems, section_elem_bytes(part->dtype), part->source,
                            part->ctx, hash, err);
    section->checksum = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return status;
}

int state_write(const char *path, uint64_t step, const struct model_header *shape,
                const struct state_part *parts, size_t part_count, struct error *err)
{
    assert(part_count >= 1 && part_count <= STATE_SECTIONS_MAX);
    struct disk_section table[STATE_SECTIONS_MAX] = {{{0}, 0, 0, 0, 0, 0, 0}};
    struct disk_header h = {.version = 1,
                            .sections = (uint32_t)part_count,
                            .step = step,
                            .shape = {shape->max_seq, shape->vocab, shape->layers, shape->heads,
                                      shape->hidden, shape->padded_vocab}};
    size_t head_bytes = sizeof h + part_count * sizeof *table;
    memcpy(h.magic, state_magic, sizeof h.magic);
    struct atomic_file f;
    // The header is written twice: it holds checksums that are known only at the end.
    if (model_check(shape, path, err) || atomic_open(&f, path, err) ||
        atomic_write(&f, &h, sizeof h, err) ||
        atomic_write(&f, table, part_count * sizeof *table, err)) {
        return err->status;
    }
    assert(f.bytes == head_bytes);
    for (size_t i = 0; i < part_count; i++) {
        assert(strlen(parts[i].name) < STATE_NAME_MAX);
        snprintf(table[i].name, sizeof table[i].name, "%s", parts[i].name);
        table[i].dtype = parts[i].dtype;
        table[i].elems = parts[i].elems;
        table[i].bytes = parts[i].elems * section_elem_bytes(parts[i].dtype);
        if (write_part(&f, &parts[i], &table[i], err)) {
            return err->status;
        }
    }
    h.bytes = f.bytes;
    if (header_checksum(&h, table, &h.checksum, err) || atomic_rewrite(&f, 0, &h, sizeof h, err) ||
        atomic_rewrite(&f, sizeof h, table, part_count * sizeof *table, err)) {
        atomic_abort(&f);
        return err->status;
    }
    return atomic_commit(&f, err);
}

// ---- training states: reading -------------------------------------------------------------------

static int refuse(const struct state_file *s, struct error *err, const char *reason)
{
    return error_set(err, STATUS_FAIL, "%s is damaged: %s", s->path, reason);
}

static int read_header(struct state_file *s, uint64_t size, struct disk_header *h,
                       struct disk_section *table, struct error *err)
{
    uint64_t sum = 0;
    if (size < sizeof *h) {
        return error_set(err, STATUS_FAIL, "%s is cut short: %llu bytes, its header alone has %zu",
                         s->path, (ull)size, sizeof *h);
    }
    if (file_read_at(s->fd, s->path, h, sizeof *h, 0, err)) {
        return err->status;
    }
    if (memcmp(h->magic, state_magic, sizeof h->magic) != 0) {
        uint32_t magic;
        memcpy(&magic, h->magic, sizeof magic);
        return error_set(err, STATUS_FAIL, "%s (%llu bytes) is not a training state%s", s->path,
                         (ull)size, kind_of(magic));
    }
    if (h->version != 1) {
        return error_set(err, STATUS_FAIL,
                         "%s: version %u, expected 1: written by another version of the program",
                         s->path, h->version);
    }
    if (h->sections < 1 || h->sections > STATE_SECTIONS_MAX) {
        return error_set(err, STATUS_FAIL, "%s is damaged: %u sections, expected 1 to %d", s->path,
                         h->sections, STATE_SECTIONS_MAX);
    }
    if (size < sizeof *h + h->sections * sizeof *table) {
        return error_set(err, STATUS_FAIL,
                         "%s is cut short: %llu bytes end in its table of sections", s->path,
                         (ull)size);
    }
    if (file_read_at(s->fd, s->path, table, h->sections * sizeof *table, sizeof *h, err) ||
        header_checksum(h, table, &sum, err)) {
        return err->status;
    }
    if (sum != h->checksum) {
        return refuse(s, err, "the checksum of its header does not match");
    }
    return STATUS_OK;
}

// The header is as it was written. It may still have been written by something else than us.
static int take_table(struct state_file *s, const struct disk_header *h,
                      const struct disk_section *table, struct error *err)
{
    uint64_t end = sizeof *h + h->sections * sizeof *table;
    for (size_t i = 0; i < h->sections; i++) {
        const struct disk_section *d = &table[i];
        size_t elem_bytes = section_elem_bytes(d->dtype);
        uint64_t bytes;
        if (d->name[0] == '\0' || d->name[STATE_NAME_MAX - 1] != '\0' || elem_bytes == 0 ||
            d->zero != 0 || __builtin_mul_overflow(d->elems, elem_bytes, &bytes) ||
            d->bytes != bytes || d->offset != end || __builtin_add_overflow(end, bytes, &end) ||
            end > INT64_MAX) {
            return refuse(s, err, "its table of sections makes no sense");
        }
        struct state_section *section = &s->section[i];
        memcpy(section->name, d->name, STATE_NAME_MAX);
        section->dtype = d->dtype;
        section->elems = d->elems;
        section->bytes = d->bytes;
        section->offset = d->offset;
        section->checksum = d->checksum;
    }
    s->section_count = h->sections;
    return end == h->bytes ? STATUS_OK : refuse(s, err, "its sections do not add up to its size");
}

static int check_size(const struct state_file *s, uint64_t size, uint64_t expected,
                      struct error *err)
{
    if (size > expected) {
        return error_set(err, STATUS_FAIL, "%s is damaged: %llu bytes, expected %llu", s->path,
                         (ull)size, (ull)expected);
    }
    for (size_t i = 0; i < s->section_count; i++) {
        const struct state_section *section = &s->section[i];
        if (size < section->offset + section->bytes) {
            return error_set(err, STATUS_FAIL,
                             "%s is cut short: %llu bytes, expected %llu; it ends in section '%s'",
                             s->path, (ull)size, (ull)expected, section->name);
        }
    }
    return STATUS_OK;
}

int state_open(struct state_file *s, const char *path, struct error *err)
{
    struct disk_header h;
    struct disk_section table[STATE_SECTIONS_MAX];
    uint64_t size;
    memset(s, 0, sizeof *s);
    snprintf(s->path, PATH_MAX, "%s", path);
    if (file_open(path, &s->fd, &size, err)) {
        return err->status;
    }
    if (read_header(s, size, &h, table, err) || take_table(s, &h, table, err) ||
        check_size(s, size, h.bytes, err)) {
        state_close(s);
        return err->status;
    }
    s->step = h.step;
    s->shape = (struct model_header){.version = MODEL_FP32,
                                     .max_seq = h.shape[0],
                                     .vocab = h.shape[1],
                                     .layers = h.shape[2],
                                     .heads = h.shape[3],
                                     .hidden = h.shape[4],
                                     .padded_vocab = h.shape[5]};
    if (model_check(&s->shape, path, err)) {
        state_close(s);
        return err->status;
    }
    return STATUS_OK;
}

void state_close(struct state_file *s)
{
    if (s->fd >= 0) {
        close(s->fd);
    }
    s->fd = -1;
}

static int read_section(struct state_file *s, const struct state_section *section,
                        checkpoint_fn *sink, void *ctx, struct error *err)
{
    XXH3_state_t *hash = hash_new(err);
    if (!hash) {
        return err->status;
    }
    int status = stream_in(s->fd, s->path, section->offset, section->elems,
                           section_elem_bytes(section->dtype), sink, ctx, hash, err);
    uint64_t sum = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    if (!status && sum != section->checksum) {
        status =
            error_set(err, STATUS_FAIL,
                      "%s is damaged: section '%s' (bytes %llu to %llu) has checksum %016llx, "
                      "expected %016llx",
                      s->path, section->name, (ull)section->offset,
                      (ull)(section->offset + section->bytes), (ull)sum, (ull)section->checksum);
    }
    return status;
}

int state_verify(struct state_file *s, struct error *err)
{
    for (size_t i = 0; i < s->section_count; i++) {
        if (read_section(s, &s->section[i], NULL, NULL, err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

static const struct state_section *find_section(const struct state_file *s, const char *name,
                                                enum section_dtype dtype, struct error *err)
{
    for (size_t i = 0; i < s->section_count; i++) {
        if (strcmp(s->section[i].name, name) == 0 && s->section[i].dtype == dtype) {
            return &s->section[i];
        }
    }
    error_set(err, STATUS_FAIL, "%s has no section '%s' of dtype %d", s->path, name, (int)dtype);
    return NULL;
}

int state_read(struct state_file *s, const char *name, enum section_dtype dtype, uint64_t elems,
               checkpoint_fn *sink, void *ctx, struct error *err)
{
    const struct state_section *section = find_section(s, name, dtype, err);
    if (!section) {
        return err->status;
    }
    if (section->elems != elems) {
        return error_set(err, STATUS_FAIL, "%s: section '%s' has %llu elements, expected %llu",
                         s->path, name, (ull)section->elems, (ull)elems);
    }
    return read_section(s, section, sink, ctx, err);
}

static int copy_sink(void *ctx, void *buf, size_t first, size_t n, struct error *err)
{
    (void)err;
    memcpy((char *)ctx + first, buf, n);
    return STATUS_OK;
}

int state_read_bytes(struct state_file *s, const char *name, void *data, size_t room,
                     size_t *length, struct error *err)
{
    const struct state_section *section = find_section(s, name, SECTION_BYTES, err);
    if (!section) {
        return err->status;
    }
    if (section->bytes > room) {
        return error_set(err, STATUS_FAIL, "%s: section '%s' has %llu bytes, expected at most %zu",
                         s->path, name, (ull)section->bytes, room);
    }
    *length = (size_t)section->bytes;
    return read_section(s, section, copy_sink, data, err);
}

int state_read_numbers(struct state_file *s, const char *name, struct numbers *n, struct error *err)
{
    numbers_clear(n);
    size_t length;
    if (state_read_bytes(s, name, n->text, sizeof n->text - 1, &length, err)) {
        return err->status;
    }
    n->bytes = length;
    n->text[length] = '\0';
    return STATUS_OK;
}

// ---- the directory of a run ---------------------------------------------------------------------

void model_path(char path[PATH_MAX], const char *dir, uint64_t step)
{
    snprintf(path, PATH_MAX, "%s/model_%08llu.bin", dir, (ull)step);
}

void state_path(char path[PATH_MAX], const char *dir, uint64_t step)
{
    snprintf(path, PATH_MAX, "%s/state_%08llu.bin", dir, (ull)step);
}

static void done_path(char path[PATH_MAX], const char *dir, uint64_t step)
{
    snprintf(path, PATH_MAX, "%s/DONE_%08llu", dir, (ull)step);
}

static int newer_first(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

// state_%08d.bin and nothing else, not state_8.bin or state_00000008.bin.123.tmp.
static int state_step(const char *name, uint64_t *step)
{
    char again[64];
    if (strncmp(name, "state_", 6) != 0) {
        return 0;
    }
    *step = strtoull(name + 6, NULL, 10);
    snprintf(again, sizeof again, "state_%08llu.bin", (ull)*step);
    return strcmp(name, again) == 0;
}

// Steps of which there is a state, newest first, good or not. *steps is malloc'ed.
static int state_list(const char *dir, uint64_t **steps, size_t *count, struct error *err)
{
    DIR *d = opendir(dir);
    if (!d) {
        return error_set(err, STATUS_FAIL, "cannot open directory %s: %s", dir, strerror(errno));
    }
    *steps = NULL;
    *count = 0;
    size_t room = 0;
    uint64_t step;
    for (struct dirent *entry; (entry = readdir(d));) {
        if (!state_step(entry->d_name, &step)) {
            continue;
        }
        if (*count == room) {
            room = 2 * room + 16;
            uint64_t *more = realloc(*steps, room * sizeof *more);
            if (!more) {
                closedir(d);
                free(*steps);
                return error_set(err, STATUS_FAIL, "no memory for %zu steps", room);
            }
            *steps = more;
        }
        (*steps)[(*count)++] = step;
    }
    closedir(d);
    if (*count) {
        qsort(*steps, *count, sizeof **steps, newer_first);
    }
    return STATUS_OK;
}

bool state_any(const char *dir)
{
    uint64_t *steps;
    size_t count;
    if (state_list(dir, &steps, &count, &(struct error){0})) {
        return false;
    }
    free(steps);
    return count > 0;
}

static int open_good(struct state_file *s, const char *path, uint64_t step, struct error *err)
{
    if (state_open(s, path, err)) {
        return err->status;
    }
    int status = state_verify(s, err);
    if (!status && s->step != step) {
        status =
            error_set(err, STATUS_FAIL, "%s holds step %llu: it was renamed", path, (ull)s->step);
    }
    if (status) {
        state_close(s);
    }
    return status;
}

int state_open_newest(struct state_file *s, const char *dir, state_refused_fn *refused, void *ctx,
                      struct error *err)
{
    uint64_t *steps;
    size_t count;
    s->fd = -1;
    if (state_list(dir, &steps, &count, err)) {
        char reason[sizeof err->text];
        memcpy(reason, err->text, sizeof reason);
        return error_set(err, STATUS_FAIL, "nothing to resume: %.900s", reason);
    }
    int status = error_set(err, STATUS_FAIL,
                           "no training state (state_*.bin) in %s: nothing to resume", dir);
    for (size_t i = 0; status && i < count; i++) {
        char path[PATH_MAX], reason[sizeof err->text];
        state_path(path, dir, steps[i]);
        status = open_good(s, path, steps[i], err);
        if (status) {
            memcpy(reason, err->text, sizeof reason);
            if (refused) {
                refused(ctx, path, reason);
            }
            error_set(err, STATUS_FAIL, "none of %zu training states in %.300s is good: %.600s",
                      count, dir, reason);
        }
    }
    free(steps);
    return status;
}

int checkpoint_done(const char *dir, uint64_t step, struct error *err)
{
    char path[PATH_MAX];
    done_path(path, dir, step);
    return file_replace(path, "", 0, err);
}

// The state goes last: after a kill in between, the next call finds it and removes the rest.
// Removes the files of a step, or renames them to *.old.
static int retire_step(const char *dir, uint64_t step, bool keep_old, struct error *err)
{
    void (*const names[])(char *, const char *, uint64_t) = {model_path, done_path, state_path};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[PATH_MAX], old[PATH_MAX + 8];
        names[i](path, dir, step);
        snprintf(old, sizeof old, "%s.old", path);
        if ((keep_old ? rename(path, old) : unlink(path)) != 0 && errno != ENOENT) {
            return error_set(err, STATUS_FAIL, "cannot %s %s: %s", keep_old ? "rename" : "remove",
                             path, strerror(errno));
        }
    }
    return STATUS_OK;
}

int checkpoint_prune(const char *dir, uint64_t step, uint64_t keep, uint64_t major_every,
                     struct error *err)
{
    uint64_t *steps;
    size_t count, first = 0;
    if (keep == 0) {
        return STATUS_OK;
    }
    if (state_list(dir, &steps, &count, err)) {
        return err->status;
    }
    while (first < count && steps[first] > step) {
        first++;
    }
    int status = STATUS_OK;
    if (first == count || steps[first] != step) {
        status = error_set(err, STATUS_FAIL, "the checkpoint of step %llu has vanished from %s",
                           (ull)step, dir);
    }
    for (size_t i = first; !status && i < count; i++) {
        int major = major_every && steps[i] % major_every == 0;
        if (i - first >= keep && !major) {
            status = retire_step(dir, steps[i], false, err);
        }
    }
    free(steps);
    return status;
}

int checkpoint_set_aside(const char *dir, uint64_t from, size_t *count, struct error *err)
{
    uint64_t *steps;
    size_t found;
    *count = 0;
    if (state_list(dir, &steps, &found, err)) {
        return err->status;
    }
    int status = STATUS_OK;
    for (size_t i = 0; !status && i < found && steps[i] >= from; i++) {
        status = retire_step(dir, steps[i], true, err);
        *count += status == STATUS_OK;
    }
    free(steps);
    return status;
}

int checkpoint_room(const char *dir, const struct model_header *h, uint64_t keep, struct error *err)
{
    uint64_t *steps, available;
    size_t count;
    if (dir_free_bytes(dir, &available, err) || state_list(dir, &steps, &count, err)) {
        return err->status;
    }
    free(steps);
    uint64_t wanted = 2 + (keep ? keep - min_u64(keep, count) : 0);
    // Options, numbers and tables are small.
    double each = (double)model_file_bytes(h) + 12.0 * (double)model_elems(h) + 2e5;
    if ((double)wanted * each > (double)available) {
        return error_set(err, STATUS_FAIL,
                         "no room for checkpoints in %s: %llu of %.1f MB each are needed, %.1f MB "
                         "are free: make room, lower --keep, or choose another --out",
                         dir, (ull)wanted, each / 1e6, (double)available / 1e6);
    }
    struct rlimit limit;
    double state = 12.0 * (double)model_elems(h);
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        state > (double)limit.rlim_cur) {
        return error_set(err, STATUS_FAIL,
                         "a training state has %.1f MB, but files may not be larger than %.1f MB "
                         "here: raise that limit (ulimit -f)",
                         state / 1e6, (double)limit.rlim_cur / 1e6);
    }
    return STATUS_OK;
}
