#include "data/shards.h"

#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats are read as they lie");

enum {
    HEADER_INTS = 256,
    HEADER_BYTES = HEADER_INTS * 4,
    MAGIC_16 = 20240520,
    VERSION_16 = 1,
    MAGIC_32 = 20240801,
    VERSION_32 = 7,
    WINDOW_BYTES = 1 << 20,
    WINDOW_ALIGN = 1 << 16, // a multiple of every page size in use
    SAMPLE_BYTES = 4096,    // of a shard's first and last tokens, for the fingerprint
};

struct shard {
    char *path;
    uint64_t tokens;
    uint64_t rows;
    uint64_t bytes;
    struct timespec modified;
    uint32_t width; // bytes per token: 2 or 4
};

struct loader {
    struct shard *shards;
    size_t n_shards;
    size_t T;
    uint32_t vocab;
    uint64_t seed;
    bool shuffle;
    uint64_t rows, tokens, fingerprint;

    struct loader_state state;
    size_t turn;         // state.row lies in the turn-th shard of this epoch's order,
    uint64_t turn_start; // whose first row this is

    const struct shard *open; // fd and window belong to it; NULL: none
    int fd;
    const unsigned char *window;
    uint64_t window_start;
    size_t window_bytes;
};

// ---- order ----

static uint64_t mix(uint64_t x) // splitmix64's finaliser
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t mix2(uint64_t a, uint64_t b)
{
    return mix(mix(a + 0x9e3779b97f4a7c15u) ^ b);
}

// A bijection of [0, n): a Feistel network over the next power of 4, walked along its cycle until
// it is back inside. Needs n <= 2^62.
static uint64_t permute(uint64_t i, uint64_t n, uint64_t key)
{
    int half = 2;
    while (UINT64_C(1) << 2 * half < n)
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 6; round++) {
            uint64_t next = left ^ (mix2(key + round, right) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

static size_t shard_of_turn(const struct loader *l, size_t turn)
{
    return l->shuffle ? permute(turn, l->n_shards, mix2(l->seed, l->state.epoch)) : turn;
}

static uint64_t row_in_shard(const struct loader *l, size_t shard, uint64_t i)
{
    uint64_t key = mix2(mix2(l->seed, l->state.epoch), shard + 1);
    return l->shuffle ? permute(i, l->shards[shard].rows, key) : i;
}

// ---- checks at open ----

const char *kind_of_magic(int32_t magic)
{
    switch (magic) {
    case MAGIC_16:
    case MAGIC_32:
        return "a token shard";
    case 20240326:
        return "a model";
    case 20240327:
        return "a debug state";
    case 20240328:
        return "a tokenizer";
    case 20240522:
        return "an evaluation file";
    }
    return NULL;
}

static int check_header(struct shard *s, const int32_t *header, struct error *err)
{
    bool magic_ok = header[0] == MAGIC_16 || header[0] == MAGIC_32;
    const char *kind = kind_of_magic(header[0]);
    if (kind && !magic_ok)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): is %s, not a token shard: "
                         "magic %d, expected %d or %d; give the path of token shards",
                         s->path, s->bytes, kind, header[0], MAGIC_16, MAGIC_32);
    if (!magic_ok)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): not a token shard: magic %d, expected %d (uint16)"
                         " or %d (uint32); ./tokenize makes shards of text, scripts/get_data.sh "
                         "fetches some",
                         s->path, s->bytes, header[0], MAGIC_16, MAGIC_32);
    int32_t version = header[0] == MAGIC_16 ? VERSION_16 : VERSION_32;
    if (header[1] != version)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): token shard of version %d, expected %d for magic "
                         "%d; make it again with ./tokenize",
                         s->path, s->bytes, header[1], version, header[0]);
    if (header[2] < 0)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): header says %d tokens; make it again", s->path,
                         s->bytes, header[2]);
    s->tokens = (uint64_t)header[2];
    s->width = header[0] == MAGIC_16 ? 2 : 4;
    uint64_t expected = HEADER_BYTES + s->tokens * s->width;
    if (s->bytes != expected)
        return error_set(err, STATUS_FAIL,
                         "%s: %s: %" PRIu64 " bytes, expected %" PRIu64 " (header: %" PRIu64
                         " tokens of %" PRIu32 " bytes); copy or make it again",
                         s->path, s->bytes < expected ? "cut short" : "too long", s->bytes,
                         expected, s->tokens, s->width);
    return STATUS_OK;
}

static int open_regular(const char *path, struct stat *st, struct error *err)
{
    // O_NONBLOCK: opening a FIFO must not wait for a writer.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, st)) {
        error_set(err, STATUS_FAIL, "%s: cannot open the token shard: %s", path, strerror(errno));
    } else if (!S_ISREG(st->st_mode)) {
        error_set(err, STATUS_FAIL, "%s: not a regular file; give token shards", path);
    } else {
        return fd;
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

// Opens a shard and checks all that can be told from its header and size.
static int open_and_check(struct shard *s, int *fd, int32_t header[HEADER_INTS], struct error *err)
{
    struct stat st;
    *fd = open_regular(s->path, &st, err);
    if (*fd < 0)
        return STATUS_FAIL;
    s->bytes = (uint64_t)st.st_size;
    s->modified = st.st_mtim;
    int rc;
    if (s->bytes == 0)
        rc = error_set(err, STATUS_FAIL,
                       "%s: empty file (0 bytes), expected a token shard; copy or make it again",
                       s->path);
    else if (s->bytes < HEADER_BYTES)
        rc = error_set(err, STATUS_FAIL,
                       "%s: %" PRIu64 " bytes are too few for a token shard, whose header alone "
                       "has %d; copy or make it again",
                       s->path, s->bytes, HEADER_BYTES);
    else
        rc = file_read_at(*fd, s->path, header, HEADER_BYTES, 0, err);
    if (rc == STATUS_OK)
        rc = check_header(s, header, err);
    if (rc != STATUS_OK)
        close(*fd);
    return rc;
}

// The same, and adds the shard to the fingerprint.
static int shard_check(struct shard *s, XXH3_state_t *hash, struct error *err)
{
    int32_t header[HEADER_INTS];
    int fd;
    int rc = open_and_check(s, &fd, header, err);
    if (rc != STATUS_OK)
        return rc;
    uint64_t body = s->bytes - HEADER_BYTES;
    size_t n = body < SAMPLE_BYTES ? (size_t)body : SAMPLE_BYTES;
    unsigned char sample[2 * SAMPLE_BYTES];
    rc = file_read_at(fd, s->path, sample, n, HEADER_BYTES, err);
    if (rc == STATUS_OK)
        rc = file_read_at(fd, s->path, sample + n, n, s->bytes - n, err);
    close(fd);
    const char *slash = strrchr(s->path, '/');
    const char *name = slash ? slash + 1 : s->path;
    XXH3_64bits_update(hash, name, strlen(name) + 1);
    XXH3_64bits_update(hash, header, sizeof header);
    XXH3_64bits_update(hash, sample, 2 * n);
    return rc;
}

static int add_shard(struct loader *l, const char *path, struct error *err)
{
    if ((l->n_shards & (l->n_shards - 1)) == 0) { // full: 0, 1, 2, 4, ...
        size_t room = l->n_shards ? 2 * l->n_shards : 1;
        struct shard *grown = realloc(l->shards, room * sizeof *grown);
        if (!grown)
            return error_set(err, STATUS_FAIL, "%s: no memory for %zu shards", path, room);
        l->shards = grown;
    }
    l->shards[l->n_shards] = (struct shard){.path = strdup(path)};
    if (!l->shards[l->n_shards].path)
        return error_set(err, STATUS_FAIL, "%s: no memory for the path", path);
    l->n_shards++;
    return STATUS_OK;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct shard *)a)->path, ((const struct shard *)b)->path);
}

static int find_shards(struct loader *l, const char *pattern, struct error *err)
{
    if (access(pattern, F_OK) == 0) // a path with brackets in it is a path first
        return add_shard(l, pattern, err);
    glob_t found = {0};
    int rc = STATUS_OK;
    if (glob(pattern, GLOB_NOSORT, NULL, &found) != 0)
        rc = error_set(err, STATUS_FAIL,
                       "%s: no token shard matches; `make corpus` makes the default ones, "
                       "./tokenize those of a text, "
                       "scripts/get_data.sh fetches some",
                       pattern);
    for (size_t i = 0; rc == STATUS_OK && i < found.gl_pathc; i++)
        rc = add_shard(l, found.gl_pathv[i], err);
    globfree(&found);
    if (rc == STATUS_OK)
        qsort(l->shards, l->n_shards, sizeof *l->shards, by_path);
    return rc;
}

static int check_shards(struct loader *l, struct error *err)
{
    XXH3_state_t *hash = XXH3_createState();
    if (!hash)
        return error_set(err, STATUS_FAIL, "no memory to check the shards");
    XXH3_64bits_reset(hash);
    int rc = STATUS_OK;
    for (size_t i = 0; rc == STATUS_OK && i < l->n_shards; i++) {
        struct shard *s = &l->shards[i];
        rc = shard_check(s, hash, err);
        if (rc == STATUS_OK && s->tokens < l->T + 1)
            rc = error_set(err, STATUS_FAIL,
                           "%s: %" PRIu64 " tokens are fewer than one row (%zu + 1); use a shorter "
                           "--seq or leave this shard out",
                           s->path, s->tokens, l->T);
        if (rc == STATUS_OK)
            s->rows = (s->tokens - 1) / l->T;
        l->rows += s->rows;
        l->tokens += s->tokens;
    }
    l->fingerprint = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return rc;
}

int loader_open(struct loader **out, const char *pattern, size_t T, uint32_t vocab, uint64_t seed,
                bool shuffle, struct error *err)
{
    *out = NULL;
    if (T == 0 || T > INT32_MAX)
        return error_set(err, STATUS_USAGE, "rows of %zu tokens: must be 1 to %d", T, INT32_MAX);
    struct loader *l = calloc(1, sizeof *l);
    if (!l)
        return error_set(err, STATUS_FAIL, "%s: no memory for a loader", pattern);
    *l = (struct loader){.T = T, .vocab = vocab, .seed = seed, .shuffle = shuffle, .fd = -1};
    int rc = find_shards(l, pattern, err);
    if (rc == STATUS_OK)
        rc = check_shards(l, err);
    if (rc != STATUS_OK) {
        loader_close(l);
        return rc;
    }
    *out = l;
    return STATUS_OK;
}

// ---- reading ----

static void unmap_window(struct loader *l)
{
    if (l->window)
        munmap((void *)l->window, l->window_bytes);
    l->window = NULL;
}

static void close_shard(struct loader *l)
{
    unmap_window(l);
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
    l->open = NULL;
}

void loader_close(struct loader *l)
{
    if (!l)
        return;
    close_shard(l);
    for (size_t i = 0; i < l->n_shards; i++)
        free(l->shards[i].path);
    free(l->shards);
    free(l);
}

// Makes `s` the open shard, and fails if it is not what it was when the loader was opened.
static int open_shard(struct loader *l, const struct shard *s, struct error *err)
{
    struct stat st;
    if (l->open != s) {
        close_shard(l);
        l->fd = open_regular(s->path, &st, err);
        if (l->fd < 0)
            return STATUS_FAIL;
        l->open = s;
    } else if (fstat(l->fd, &st)) {
        return error_set(err, STATUS_FAIL, "%s: %s", s->path, strerror(errno));
    }
    if ((uint64_t)st.st_size != s->bytes || st.st_mtim.tv_sec != s->modified.tv_sec ||
        st.st_mtim.tv_nsec != s->modified.tv_nsec) {
        close_shard(l);
        return error_set(err, STATUS_FAIL,
                         "%s: changed during the run (%" PRIu64
                         " bytes when it was opened, %" PRIu64
                         " now); put the file back and resume",
                         s->path, s->bytes, (uint64_t)st.st_size);
    }
    return STATUS_OK;
}

// Makes bytes [at, at+n) of the open shard visible, and returns their address.
static const void *map_bytes(struct loader *l, uint64_t at, size_t n, struct error *err)
{
    if (!l->window || at < l->window_start || at + n > l->window_start + l->window_bytes) {
        unmap_window(l);
        uint64_t start = at - at % WINDOW_ALIGN;
        uint64_t end = at + n > start + WINDOW_BYTES ? at + n : start + WINDOW_BYTES;
        if (end > l->open->bytes)
            end = l->open->bytes;
        void *window = mmap(NULL, end - start, PROT_READ, MAP_SHARED, l->fd, (off_t)start);
        if (window == MAP_FAILED) {
            error_set(err, STATUS_FAIL, "%s: cannot map %" PRIu64 " bytes: %s", l->open->path,
                      end - start, strerror(errno));
            return NULL;
        }
        l->window = window;
        l->window_start = start;
        l->window_bytes = end - start;
    }
    return l->window + (at - l->window_start);
}

// Copies n tokens and returns how many of them, from the first on, are < vocab.
static size_t copy_tokens(int32_t *out, const void *in, uint32_t width, size_t n, uint32_t vocab)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t token = width == 2 ? ((const uint16_t *)in)[i] : ((const uint32_t *)in)[i];
        largest = token > largest ? token : largest;
        out[i] = (int32_t)token;
    }
    if (largest < vocab)
        return n;
    size_t good = 0;
    while ((uint32_t)out[good] < vocab)
        good++;
    return good;
}

int loader_next(struct loader *l, int32_t *tokens, int32_t *targets, struct error *err)
{
    size_t shard = shard_of_turn(l, l->turn);
    const struct shard *s = &l->shards[shard];
    uint64_t first = row_in_shard(l, shard, l->state.row - l->turn_start) * l->T;
    int rc = open_shard(l, s, err);
    if (rc != STATUS_OK)
        return rc;
    const unsigned char *in =
        map_bytes(l, HEADER_BYTES + first * s->width, (l->T + 1) * s->width, err);
    if (!in)
        return STATUS_FAIL;

    size_t good = copy_tokens(tokens, in, s->width, l->T, l->vocab);
    memmove(targets, tokens + 1, (l->T - 1) * sizeof *tokens);
    if (good == l->T)
        good += copy_tokens(&targets[l->T - 1], in + l->T * s->width, s->width, 1, l->vocab);
    if (good < l->T + 1)
        return error_set(err, STATUS_FAIL,
                         "%s: token %" PRIu32 " at position %" PRIu64
                         ", but the vocabulary has %" PRIu32 " tokens (0 to %" PRIu32
                         "); is this another tokenizer's shard?",
                         s->path, (uint32_t)(good < l->T ? tokens[good] : targets[l->T - 1]),
                         first + good, l->vocab, l->vocab - 1);

    l->state.row++;
    if (l->state.row == l->turn_start + s->rows) {
        l->turn_start = l->state.row;
        l->turn++;
    }
    if (l->state.row == l->rows) {
        l->state = (struct loader_state){.epoch = l->state.epoch + 1};
        l->turn = 0;
        l->turn_start = 0;
    }
    return STATUS_OK;
}

struct loader_state loader_tell(const struct loader *l)
{
    return l->state;
}

static void go_to(struct loader *l, struct loader_state state)
{
    l->state = state;
    l->turn = 0;
    l->turn_start = 0;
    for (;;) {
        uint64_t rows = l->shards[shard_of_turn(l, l->turn)].rows;
        if (state.row < l->turn_start + rows)
            return;
        l->turn_start += rows;
        l->turn++;
    }
}

void loader_skip(struct loader *l, uint64_t rows)
{
    uint64_t row = l->state.row + rows;
    go_to(l, (struct loader_state){l->state.epoch + row / l->rows, row % l->rows});
}

int loader_seek(struct loader *l, struct loader_state state, struct error *err)
{
    if (state.row >= l->rows)
        return error_set(err, STATUS_FAIL,
                         "%s: cannot go on at row %" PRIu64 ": there are %" PRIu64 " rows of %zu "
                         "tokens; is this the data and --seq of the run to resume?",
                         l->shards[0].path, state.row, l->rows, l->T);
    go_to(l, state);
    return STATUS_OK;
}

void loader_rewind(struct loader *l)
{
    l->state = (struct loader_state){0};
    l->turn = 0;
    l->turn_start = 0;
}

uint64_t loader_rows(const struct loader *l)
{
    return l->rows;
}

uint64_t loader_tokens(const struct loader *l)
{
    return l->tokens;
}

size_t loader_shards(const struct loader *l)
{
    return l->n_shards;
}

uint64_t loader_fingerprint(const struct loader *l)
{
    return l->fingerprint;
}

// ---- a whole shard ----

struct shard_reader {
    struct shard shard;
    int fd;
    uint64_t at; // tokens read
};

int shard_reader_open(struct shard_reader **out, const char *path, struct error *err)
{
    *out = NULL;
    int32_t header[HEADER_INTS];
    struct shard_reader *r = calloc(1, sizeof *r);
    char *copy = strdup(path);
    if (!r || !copy) {
        free(r);
        free(copy);
        return error_set(err, STATUS_FAIL, "%s: no memory for a reader", path);
    }
    r->shard.path = copy;
    int rc = open_and_check(&r->shard, &r->fd, header, err);
    if (rc != STATUS_OK) {
        free(copy);
        free(r);
        return rc;
    }
    *out = r;
    return STATUS_OK;
}

int shard_read(struct shard_reader *r, uint32_t *tokens, size_t max, size_t *n, struct error *err)
{
    uint64_t left = r->shard.tokens - r->at;
    *n = left < max ? (size_t)left : max;
    int rc = file_read_at(r->fd, r->shard.path, tokens, *n * r->shard.width,
                          HEADER_BYTES + r->at * r->shard.width, err);
    if (rc != STATUS_OK)
        return rc;
    const unsigned char *narrow = (const unsigned char *)tokens;
    for (size_t i = *n; r->shard.width == 2 && i-- > 0;) { // widened in place, from the end
        uint16_t token;
        memcpy(&token, narrow + 2 * i, sizeof token);
        tokens[i] = token;
    }
    r->at += *n;
    return STATUS_OK;
}

void shard_reader_close(struct shard_reader *r)
{
    if (!r)
        return;
    close(r->fd);
    free(r->shard.path);
    free(r);
}

// ---- writing ----

enum { BUFFER_TOKENS = 1 << 16 };

struct shard_writer {
    char *prefix;
    uint64_t shard_tokens; // at most, per file
    uint32_t width;
    int fd;            // of the file begun last; -1: none
    uint64_t in_shard; // tokens of it, buffered ones included
    uint64_t total;
    size_t begun, published; // files
    size_t buffered;
    union {
        uint16_t narrow[BUFFER_TOKENS];
        uint32_t wide[BUFFER_TOKENS];
    } buffer;
};

static void series_path(const struct shard_writer *w, size_t i, const char *suffix,
                        char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s_%06zu.bin%s", w->prefix, i, suffix); // length checked at open
}

int shard_writer_open(struct shard_writer **out, const char *prefix, uint64_t shard_tokens,
                      bool wide, struct error *err)
{
    *out = NULL;
    if (shard_tokens == 0 || shard_tokens > INT32_MAX)
        return error_set(err, STATUS_USAGE, "%" PRIu64 " tokens per shard: must be 1 to %d",
                         shard_tokens, INT32_MAX);
    if (strlen(prefix) + 40 > PATH_MAX)
        return error_set(err, STATUS_FAIL, "%.60s...: path too long", prefix);
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", prefix);
    char *slash = strrchr(folder, '/');
    if (slash && slash != folder) {
        *slash = 0;
        int rc = dir_make(folder, err);
        if (rc != STATUS_OK)
            return rc;
    }
    struct shard_writer *w = malloc(sizeof *w);
    char *copy = strdup(prefix);
    if (!w || !copy) {
        free(w);
        free(copy);
        return error_set(err, STATUS_FAIL, "%s: no memory for a shard writer", prefix);
    }
    w->prefix = copy;
    w->shard_tokens = shard_tokens;
    w->width = wide ? 4 : 2;
    w->fd = -1;
    w->in_shard = w->total = 0;
    w->begun = w->published = w->buffered = 0;
    *out = w;
    return STATUS_OK;
}

static int begin_shard(struct shard_writer *w, struct error *err)
{
    static const int32_t blank[HEADER_INTS]; // no magic until the shard is complete
    char path[PATH_MAX];
    series_path(w, w->begun, ".tmp", path);
    w->fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return error_set(err, STATUS_FAIL, "%s: cannot create: %s", path, strerror(errno));
    w->begun++;
    w->in_shard = 0;
    return file_write_all(w->fd, path, blank, sizeof blank, err);
}

static int flush_buffer(struct shard_writer *w, struct error *err)
{
    char path[PATH_MAX];
    series_path(w, w->begun - 1, ".tmp", path);
    int rc = file_write_all(w->fd, path, &w->buffer, w->buffered * w->width, err);
    w->buffered = 0;
    return rc;
}

static int end_shard(struct shard_writer *w, struct error *err)
{
    int rc = flush_buffer(w, err);
    if (rc != STATUS_OK)
        return rc;
    int32_t header[3] = {w->width == 2 ? MAGIC_16 : MAGIC_32,
                         w->width == 2 ? VERSION_16 : VERSION_32, (int32_t)w->in_shard};
    bool bad = pwrite(w->fd, header, sizeof header, 0) != sizeof header || fsync(w->fd);
    bad |= close(w->fd) != 0;
    w->fd = -1;
    char path[PATH_MAX];
    series_path(w, w->begun - 1, ".tmp", path);
    return bad ? error_set(err, STATUS_FAIL, "%s: cannot write: %s", path, strerror(errno))
               : STATUS_OK;
}

int shard_write(struct shard_writer *w, const uint32_t *tokens, size_t n, struct error *err)
{
    for (size_t i = 0; i < n; i++) {
        int rc = STATUS_OK;
        if (w->fd >= 0 && w->in_shard == w->shard_tokens)
            rc = end_shard(w, err);
        else if (w->buffered == BUFFER_TOKENS)
            rc = flush_buffer(w, err);
        if (rc == STATUS_OK && w->fd < 0)
            rc = begin_shard(w, err);
        if (rc != STATUS_OK)
            return rc;
        if (w->width == 2)
            w->buffer.narrow[w->buffered++] = (uint16_t)tokens[i];
        else
            w->buffer.wide[w->buffered++] = tokens[i];
        w->in_shard++;
        w->total++;
    }
    return STATUS_OK;
}

int shard_writer_seal(struct shard_writer *w, struct error *err)
{
    return w->fd >= 0 ? end_shard(w, err) : STATUS_OK;
}

static int sync_folder(const char *prefix, struct error *err)
{
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", prefix);
    char *slash = strrchr(folder, '/');
    if (slash)
        slash[slash == folder] = 0;
    else
        snprintf(folder, sizeof folder, ".");
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool bad = fd < 0 || (fsync(fd) && errno != EINVAL); // EINVAL: has nothing to sync
    if (bad)
        error_set(err, STATUS_FAIL, "%s: cannot sync: %s", folder, strerror(errno));
    if (fd >= 0)
        close(fd);
    return bad ? STATUS_FAIL : STATUS_OK;
}

int shard_writer_publish(struct shard_writer *w, struct error *err)
{
    char temp[PATH_MAX], path[PATH_MAX];
    for (; w->published < w->begun; w->published++) {
        series_path(w, w->published, ".tmp", temp);
        series_path(w, w->published, "", path);
        if (rename(temp, path))
            return error_set(err, STATUS_FAIL, "%s: cannot rename to %s: %s", temp, path,
                             strerror(errno));
    }
    for (size_t i = w->begun;; i++) { // what a longer series left behind
        series_path(w, i, "", path);
        if (unlink(path))
            break;
    }
    return sync_folder(w->prefix, err);
}

uint64_t shard_writer_tokens(const struct shard_writer *w)
{
    return w->total;
}

size_t shard_writer_shards(const struct shard_writer *w)
{
    return w->begun;
}

void shard_writer_close(struct shard_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0)
        close(w->fd);
    char temp[PATH_MAX];
    for (size_t i = w->published; i < w->begun; i++) {
        series_path(w, i, ".tmp", temp);
        unlink(temp);
    }
    free(w->prefix);
    free(w);
}
