#include "data/tokenizer.h"

#include "data/files.h"
#include "data/shards.h"

#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum {
    HEADER_INTS = 256,
    MAGIC = 20240328,
    VERSION = 2,
    TOKEN_BYTES_MAX = 255,
    VOCAB_MAX = 1 << 24, // limit on a file's claim, far above any vocabulary
};

static const char end_of_text[] = "<|endoftext|>";

// Which pair of tokens becomes which: open addressing, at most half full.
struct merge {
    uint64_t pair; // left << 32 | right; NO_PAIR: free
    uint32_t result;
};
static const uint64_t NO_PAIR = UINT64_MAX;
static const uint32_t NO_TOKEN = UINT32_MAX;

struct tokenizer {
    uint32_t vocab, eot;
    uint32_t *start;      // [vocab + 1]: token id is bytes[start[id] .. start[id+1])
    unsigned char *bytes; // all tokens, in id order
    uint32_t of_byte[256];
    struct merge *merges; // [merge_mask + 1]
    size_t merge_mask, n_merges;
    pcre2_code *splitter; // NULL: there are no merges, so nothing needs splitting
};

// A part of a piece that is being merged: a token, and its neighbours in a doubly linked list.
struct part {
    uint32_t token; // NO_TOKEN: merged into its left neighbour
    uint32_t prev, next;
};

struct cached {
    uint64_t hash; // 0: free
    uint8_t len, n;
    char text[22];
    uint32_t ids[8];
};

enum { CACHE_SLOTS = 1 << 15, CACHE_TEXT = 22, CACHE_IDS = 8 };

struct encoder {
    const struct tokenizer *tokenizer;
    pcre2_match_data *match;
    struct cached *cache;
    struct part *parts;
    uint64_t *heap;      // pairs that may be merged: rank (= resulting id) << 32 | left part
    size_t heap_n, room; // parts[room], heap[2 * room]
};

// ---- merging ----

static size_t merge_slot(const struct tokenizer *t, uint64_t pair)
{
    size_t i = (pair * 0x9e3779b97f4a7c15u >> 20) & t->merge_mask;
    while (t->merges[i].pair != pair && t->merges[i].pair != NO_PAIR)
        i = (i + 1) & t->merge_mask;
    return i;
}

static void heap_push(struct encoder *e, uint64_t candidate)
{
    size_t i = e->heap_n++;
    while (i > 0 && candidate < e->heap[(i - 1) / 2]) {
        e->heap[i] = e->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    e->heap[i] = candidate;
}

static uint64_t heap_pop(struct encoder *e)
{
    uint64_t top = e->heap[0], last = e->heap[--e->heap_n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->heap_n; i = child) {
        if (child + 1 < e->heap_n && e->heap[child + 1] < e->heap[child])
            child++;
        if (e->heap[child] >= last)
            break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

static uint64_t pair_at(const struct encoder *e, uint32_t left)
{
    uint32_t right = e->parts[left].next;
    if (e->parts[left].token == NO_TOKEN || right == NO_TOKEN)
        return NO_PAIR;
    return (uint64_t)e->parts[left].token << 32 | e->parts[right].token;
}

// What the part and its right neighbour merge into; NO_TOKEN: they don't.
static uint32_t merged(const struct encoder *e, uint32_t left)
{
    uint64_t pair = pair_at(e, left);
    if (pair == NO_PAIR)
        return NO_TOKEN;
    const struct merge *m = &e->tokenizer->merges[merge_slot(e->tokenizer, pair)];
    return m->pair == pair ? m->result : NO_TOKEN;
}

static void push_pair(struct encoder *e, uint32_t left)
{
    uint32_t rank = merged(e, left);
    if (rank != NO_TOKEN)
        heap_push(e, (uint64_t)rank << 32 | left);
}

static int make_room(struct encoder *e, size_t n, struct error *err)
{
    if (n <= e->room)
        return STATUS_OK;
    if (n >= NO_TOKEN)
        return error_set(err, STATUS_FAIL, "%zu bytes without a place to split them", n);
    size_t room = n < 64 ? 64 : n + n / 4;
    struct part *parts = realloc(e->parts, room * sizeof *parts);
    if (parts)
        e->parts = parts;
    // At most n-1 pairs at first; a merge takes one away and adds two.
    uint64_t *heap = realloc(e->heap, 2 * room * sizeof *heap);
    if (heap)
        e->heap = heap;
    if (!parts || !heap)
        return error_set(err, STATUS_FAIL, "no memory to merge %zu bytes", n);
    e->room = room;
    return STATUS_OK;
}

// BPE on one piece: its tokens stand in the list from parts[0] on. Needs n > 0.
static int merge_piece(struct encoder *e, const unsigned char *piece, size_t n, struct error *err)
{
    int rc = make_room(e, n, err);
    if (rc != STATUS_OK)
        return rc;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = e->tokenizer->of_byte[piece[i]];
        if (token == NO_TOKEN)
            return error_set(err, STATUS_FAIL, "the vocabulary has no token for byte 0x%02x",
                             piece[i]);
        e->parts[i] = (struct part){token, i - 1, i + 1}; // 0 - 1 is NO_TOKEN
    }
    e->parts[n - 1].next = NO_TOKEN;
    e->heap_n = 0;
    for (uint32_t i = 0; i + 1 < n; i++)
        push_pair(e, i);
    while (e->heap_n > 0) {
        uint64_t candidate = heap_pop(e);
        uint32_t at = (uint32_t)candidate, rank = (uint32_t)(candidate >> 32);
        if (merged(e, at) != rank)
            continue; // stale: one of the two has been merged elsewhere
        struct part *left = &e->parts[at], *right = &e->parts[left->next];
        left->token = rank;
        left->next = right->next;
        right->token = NO_TOKEN;
        if (left->next != NO_TOKEN)
            e->parts[left->next].prev = at;
        if (left->prev != NO_TOKEN)
            push_pair(e, left->prev);
        push_pair(e, at);
    }
    return STATUS_OK;
}

// ---- making a tokenizer ----

static bool encodable(const struct tokenizer *t, const unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (t->of_byte[bytes[i]] == NO_TOKEN)
            return false;
    }
    return true;
}

// Rebuilds the merge table from the tokens' bytes; see "ENCODING" in the header.
static int recover_merges(struct tokenizer *t, struct error *err)
{
    size_t slots = 1;
    while (slots < 2 * (size_t)t->vocab)
        slots *= 2;
    t->merges = malloc(slots * sizeof *t->merges);
    if (!t->merges)
        return error_set(err, STATUS_FAIL, "no memory for a merge table of %zu slots", slots);
    t->merge_mask = slots - 1;
    for (size_t i = 0; i < slots; i++)
        t->merges[i].pair = NO_PAIR;

    struct encoder e = {.tokenizer = t};
    int rc = STATUS_OK;
    for (uint32_t id = 0; rc == STATUS_OK && id < t->vocab; id++) {
        size_t n;
        const unsigned char *bytes = tokenizer_decode(t, id, &n);
        if (n < 2 || id == t->eot || !encodable(t, bytes, n))
            continue;
        rc = merge_piece(&e, bytes, n, err);
        uint64_t pair = rc == STATUS_OK ? pair_at(&e, 0) : NO_PAIR;
        if (pair != NO_PAIR && e.parts[e.parts[0].next].next == NO_TOKEN) {
            t->merges[merge_slot(t, pair)] = (struct merge){pair, id};
            t->n_merges++;
        }
    }
    free(e.parts);
    free(e.heap);
    return rc;
}

static int compile_splitter(struct tokenizer *t, struct error *err)
{
// Unicode's White_Space, for inside a class.
#define WS                                                                                         \
    "\\t-\\r "                                                                                     \
    "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
    static const char pattern[] = "'(?:s|t|re|ve|m|ll|d)"
                                  "| ?\\p{L}+"
                                  "| ?\\p{N}+"
                                  "| ?[^" WS "\\p{L}\\p{N}]+"
                                  "|[" WS "]+(?![^" WS "])"
                                  "|[" WS "]+";
#undef WS
    int code;
    PCRE2_SIZE at;
    t->splitter =
        pcre2_compile((PCRE2_SPTR)pattern, sizeof pattern - 1, PCRE2_UTF, &code, &at, NULL);
    if (!t->splitter)
        return error_set(err, STATUS_FAIL,
                         "PCRE2 refuses the splitting pattern (error %d at %zu); "
                         "is it built with Unicode?",
                         code, (size_t)at);
    pcre2_jit_compile(t->splitter, PCRE2_JIT_COMPLETE); // where there is no JIT: slower, the same
    return STATUS_OK;
}

// Takes over the arrays, also on failure.
static int make(struct tokenizer **out, uint32_t vocab, uint32_t eot, uint32_t *start,
                unsigned char *bytes, struct error *err)
{
    *out = NULL;
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t || !start || !bytes) {
        free(t);
        free(start);
        free(bytes);
        return error_set(err, STATUS_FAIL, "no memory for a tokenizer of %" PRIu32 " tokens",
                         vocab);
    }
    *t = (struct tokenizer){.vocab = vocab, .eot = eot, .start = start, .bytes = bytes};
    bool all_bytes = true;
    memset(t->of_byte, 0xff, sizeof t->of_byte); // NO_TOKEN
    for (uint32_t id = vocab; id-- > 0;) {       // the lowest id wins
        if (start[id + 1] - start[id] == 1 && id != eot)
            t->of_byte[bytes[start[id]]] = id;
        else
            all_bytes &= id == eot;
    }
    int rc = STATUS_OK;
    if (!all_bytes)
        rc = recover_merges(t, err);
    if (rc == STATUS_OK && t->n_merges > 0)
        rc = compile_splitter(t, err);
    if (rc != STATUS_OK) {
        tokenizer_free(t);
        return rc;
    }
    *out = t;
    return STATUS_OK;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    pcre2_code_free(t->splitter);
    free(t->start);
    free(t->bytes);
    free(t->merges);
    free(t);
}

int tokenizer_bytes(struct tokenizer **out, struct error *err)
{
    size_t n = sizeof end_of_text - 1;
    uint32_t *start = malloc((257 + 1) * sizeof *start);
    unsigned char *bytes = malloc(256 + n);
    for (uint32_t i = 0; start && bytes && i <= 256; i++) {
        start[i] = i;
        if (i < 256)
            bytes[i] = (unsigned char)i;
    }
    if (start && bytes) {
        start[257] = 256 + (uint32_t)n;
        memcpy(bytes + 256, end_of_text, n);
    }
    return make(out, 257, 256, start, bytes, err);
}

// ---- GPT-2's files ----

// GPT-2 writes every byte as one printable character: itself, or U+0100 and following for those
// that are not printable, in order. -1: not such a character.
static int byte_of_character(uint32_t c)
{
    static const uint8_t ranges[][2] = {{0, 0x20}, {0x7f, 0xa0}, {0xad, 0xad}}; // not printable
    uint32_t next = 0x100;
    for (int r = 0; r < 3; r++) {
        uint32_t n = ranges[r][1] - ranges[r][0] + 1u;
        if (c >= ranges[r][0] && c <= ranges[r][1])
            return -1;
        if (c >= next && c < next + n)
            return (int)(ranges[r][0] + (c - next));
        next += n;
    }
    return c < 0x100 ? (int)c : -1;
}

// Decodes a key of encoder.json (valid UTF-8) to the token's bytes; returns their number, 0 if it
// is no such key.
static size_t bytes_of_key(const char *key, unsigned char out[TOKEN_BYTES_MAX])
{
    size_t n = 0;
    for (const unsigned char *p = (const unsigned char *)key; *p; n++) {
        uint32_t c = *p++;
        if (c >= 0xe0 || n == TOKEN_BYTES_MAX)
            return 0;
        if (c >= 0xc0)
            c = (c & 0x1f) << 6 | (*p++ & 0x3fu);
        int byte = byte_of_character(c);
        if (byte < 0)
            return 0;
        out[n] = (unsigned char)byte;
    }
    return n;
}

// Fills start and bytes from {"token": id, ...}. Every id from 0 to vocab-1 must occur once.
static int tokens_of_json(const char *path, json_t *root, uint32_t *start, unsigned char *bytes,
                          struct error *err)
{
    uint32_t vocab = (uint32_t)json_object_size(root);
    const char **keys = calloc(vocab, sizeof *keys);
    if (!keys)
        return error_set(err, STATUS_FAIL, "%s: no memory for %" PRIu32 " keys", path, vocab);
    int rc = STATUS_OK;
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value)
    {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (rc == STATUS_OK && (id < 0 || id >= vocab || keys[id]))
            rc = error_set(err, STATUS_FAIL,
                           "%s: token \"%s\" has no id of its own between 0 and %" PRIu32
                           "; expected GPT-2's encoder.json",
                           path, key, vocab - 1);
        else if (rc == STATUS_OK)
            keys[id] = key;
    }
    start[0] = 0;
    for (uint32_t id = 0; rc == STATUS_OK && id < vocab; id++) {
        size_t n = bytes_of_key(keys[id], bytes + start[id]);
        if (n == 0)
            rc = error_set(err, STATUS_FAIL,
                           "%s: token \"%s\" (id %" PRIu32 ") is not 1 to %d bytes in GPT-2's "
                           "spelling",
                           path, keys[id], id, TOKEN_BYTES_MAX);
        start[id + 1] = start[id] + (uint32_t)n;
    }
    free(keys);
    return rc;
}

static uint32_t id_of_key(json_t *root, const char *key)
{
    json_t *value = json_object_get(root, key);
    return json_is_integer(value) ? (uint32_t)json_integer_value(value) : NO_TOKEN;
}

// Checks one line "left right" of vocab.bpe against the merge table. *last: id of the line before.
static int check_merge(const struct tokenizer *t, json_t *root, const char *path, size_t line,
                       char *text, uint32_t *last, struct error *err)
{
    char *space = strchr(text, ' ');
    if (!space || strchr(space + 1, ' '))
        return error_set(err, STATUS_FAIL, "%s: line %zu: expected two tokens, found \"%.80s\"",
                         path, line, text);
    *space = 0;
    uint64_t pair = (uint64_t)id_of_key(root, text) << 32 | id_of_key(root, space + 1);
    memmove(space, space + 1, strlen(space + 1) + 1);
    uint32_t id = id_of_key(root, text);
    const struct merge *m = &t->merges[merge_slot(t, pair)];
    if (id == NO_TOKEN || m->pair != pair || m->result != id || (*last != NO_TOKEN && id <= *last))
        return error_set(err, STATUS_FAIL,
                         "%s: line %zu: the merge to \"%.80s\" does not agree with encoder.json, "
                         "whose ids must be in merge order",
                         path, line, text);
    *last = id;
    return STATUS_OK;
}

static int check_merges(const struct tokenizer *t, json_t *root, const char *path,
                        struct error *err)
{
    FILE *in = fopen(path, "r");
    if (!in)
        return error_set(err, STATUS_FAIL, "%s: cannot open: %s", path, strerror(errno));
    char *text = NULL;
    size_t room = 0, line = 0, merges = 0;
    uint32_t last = NO_TOKEN;
    int rc = STATUS_OK;
    for (ssize_t n; rc == STATUS_OK && (n = getline(&text, &room, in)) >= 0;) {
        line++;
        if (n > 0 && text[n - 1] == '\n')
            text[--n] = 0;
        if (n == 0 || (line == 1 && strncmp(text, "#version", 8) == 0))
            continue;
        rc = check_merge(t, root, path, line, text, &last, err);
        merges++;
    }
    if (rc == STATUS_OK && ferror(in))
        rc = error_set(err, STATUS_FAIL, "%s: cannot read: %s", path, strerror(errno));
    if (rc == STATUS_OK && merges != t->n_merges)
        rc = error_set(err, STATUS_FAIL,
                       "%s: %zu merges, but encoder.json has %zu merged tokens; are the two files "
                       "of one vocabulary, and complete?",
                       path, merges, t->n_merges);
    free(text);
    fclose(in);
    return rc;
}

int tokenizer_gpt2(struct tokenizer **out, const char *dir, struct error *err)
{
    *out = NULL;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/encoder.json", dir);
    json_error_t where;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &where);
    if (!root)
        return error_set(err, STATUS_FAIL,
                         "%s: %s (line %d); --bpe takes a folder with GPT-2's encoder.json and "
                         "vocab.bpe (scripts/get_data.sh gpt2-bpe fetches them)",
                         path, where.text, where.line);
    size_t vocab = json_object_size(root);
    uint32_t eot = id_of_key(root, end_of_text);
    int rc = STATUS_OK;
    struct tokenizer *t = NULL;
    if (!json_is_object(root) || vocab == 0 || vocab > VOCAB_MAX)
        rc = error_set(err, STATUS_FAIL, "%s: expected an object of 1 to %d tokens", path,
                       VOCAB_MAX);
    else if (eot >= vocab)
        rc = error_set(err, STATUS_FAIL, "%s: has no token %s", path, end_of_text);
    if (rc == STATUS_OK) {
        uint32_t *start = malloc((vocab + 1) * sizeof *start);
        unsigned char *bytes = malloc((vocab + 1) * TOKEN_BYTES_MAX);
        if (start && bytes)
            rc = tokens_of_json(path, root, start, bytes, err);
        if (rc == STATUS_OK) {
            rc = make(&t, (uint32_t)vocab, eot, start, bytes, err);
        } else {
            free(start);
            free(bytes);
        }
    }
    if (rc == STATUS_OK && t->n_merges == 0)
        rc = error_set(err, STATUS_FAIL, "%s: has no merged tokens", path);
    if (rc == STATUS_OK) {
        snprintf(path, sizeof path, "%s/vocab.bpe", dir);
        rc = check_merges(t, root, path, err);
    }
    json_decref(root);
    if (rc != STATUS_OK)
        tokenizer_free(t);
    else
        *out = t;
    return rc;
}

// ---- the file ----

static int check_header(const char *path, const int32_t *header, uint64_t size, struct error *err)
{
    const char *kind = kind_of_magic(header[0]);
    if (header[0] != MAGIC)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): %s%s, not a tokenizer: magic %d, expected %d; "
                         "./tokenize writes one beside its shards",
                         path, size, kind ? "is " : "unknown format", kind ? kind : "", header[0],
                         MAGIC);
    if (header[1] != VERSION)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): tokenizer of version %d, expected %d; write it "
                         "again with ./tokenize",
                         path, size, header[1], VERSION);
    if (header[2] < 1 || header[2] > VOCAB_MAX || header[3] < 0 || header[3] >= header[2])
        return error_set(err, STATUS_FAIL,
                         "%s: %d tokens, end-of-text %d: expected 1 to %d tokens and an end-of-text"
                         " among them",
                         path, header[2], header[3], VOCAB_MAX);
    return STATUS_OK;
}

// Cuts the body into tokens: start[], and their bytes moved together.
static int parse_tokens(const char *path, unsigned char *body, size_t size, uint32_t vocab,
                        uint32_t *start, struct error *err)
{
    size_t in = 0;
    start[0] = 0;
    for (uint32_t id = 0; id < vocab; id++) {
        size_t n = in < size ? body[in] : 0;
        if (in >= size || in + 1 + n > size)
            return error_set(err, STATUS_FAIL,
                             "%s: ends within token %" PRIu32 " of %" PRIu32 "; copy it again",
                             path, id, vocab);
        if (n == 0)
            return error_set(err, STATUS_FAIL,
                             "%s: token %" PRIu32 " is empty, expected 1 to %d "
                             "bytes",
                             path, id, TOKEN_BYTES_MAX);
        memmove(body + start[id], body + in + 1, n);
        start[id + 1] = start[id] + (uint32_t)n;
        in += 1 + n;
    }
    if (in != size)
        return error_set(err, STATUS_FAIL,
                         "%s: %zu bytes behind the last of %" PRIu32 " tokens; copy it again", path,
                         size - in, vocab);
    return STATUS_OK;
}

int tokenizer_read(struct tokenizer **out, const char *path, struct error *err)
{
    *out = NULL;
    int32_t header[HEADER_INTS];
    int fd;
    uint64_t size;
    int rc = file_open(path, &fd, &size, err);
    if (rc != STATUS_OK)
        return rc;
    uint64_t size_max = sizeof header + (uint64_t)VOCAB_MAX * (1 + TOKEN_BYTES_MAX);
    if (size < sizeof header)
        rc = error_set(err, STATUS_FAIL,
                       "%s: %" PRIu64 " bytes are too few for a tokenizer, whose header alone has "
                       "%zu; copy it again",
                       path, size, sizeof header);
    if (rc == STATUS_OK)
        rc = file_read_at(fd, path, header, sizeof header, 0, err);
    if (rc == STATUS_OK)
        rc = check_header(path, header, size, err);
    if (rc == STATUS_OK && size > size_max)
        rc = error_set(err, STATUS_FAIL, "%s: %" PRIu64 " bytes are too many for a tokenizer", path,
                       size);
    if (rc != STATUS_OK) {
        close(fd);
        return rc;
    }
    uint32_t vocab = (uint32_t)header[2];
    size_t body_bytes = size - sizeof header;
    uint32_t *start = malloc((vocab + 1) * sizeof *start);
    unsigned char *body = malloc(body_bytes + 1);
    if (!start || !body)
        rc = error_set(err, STATUS_FAIL, "%s: no memory for %" PRIu64 " bytes", path, size);
    if (rc == STATUS_OK)
        rc = file_read_at(fd, path, body, body_bytes, sizeof header, err);
    close(fd);
    if (rc == STATUS_OK)
        rc = parse_tokens(path, body, body_bytes, vocab, start, err);
    if (rc == STATUS_OK)
        return make(out, vocab, (uint32_t)header[3], start, body, err);
    free(start);
    free(body);
    return rc;
}

int tokenizer_write(const struct tokenizer *t, const char *path, struct error *err)
{
    size_t size = HEADER_INTS * 4 + t->vocab + t->start[t->vocab];
    unsigned char *file = calloc(1, size);
    if (!file)
        return error_set(err, STATUS_FAIL, "%s: no memory for %zu bytes", path, size);
    int32_t header[4] = {MAGIC, VERSION, (int32_t)t->vocab, (int32_t)t->eot};
    memcpy(file, header, sizeof header);
    unsigned char *p = file + HEADER_INTS * 4;
    for (uint32_t id = 0; id < t->vocab; id++) {
        size_t n;
        const unsigned char *bytes = tokenizer_decode(t, id, &n);
        *p++ = (unsigned char)n;
        memcpy(p, bytes, n);
        p += n;
    }
    int rc = file_replace(path, file, size, err);
    free(file);
    return rc;
}

// ---- the tokenizer beside shards ----

// *found = the file that `path` (which may be a glob) names, "" if there is none.
static int find_file(const char *path, char found[PATH_MAX], struct error *err)
{
    found[0] = 0;
    if (access(path, F_OK) == 0) {
        snprintf(found, PATH_MAX, "%s", path);
        return STATUS_OK;
    }
    glob_t matches = {0};
    int rc = STATUS_OK;
    if (glob(path, 0, NULL, &matches) == 0) {
        if (matches.gl_pathc > 1)
            rc = error_set(err, STATUS_FAIL,
                           "%s: %s and %s both match; name the shards of one tokenizer", path,
                           matches.gl_pathv[0], matches.gl_pathv[1]);
        snprintf(found, PATH_MAX, "%s", matches.gl_pathv[0]);
    }
    globfree(&matches);
    return rc;
}

// The length of NAME in the file name of a shard; see the header.
static size_t name_length(const char *file)
{
    size_t best = 0;
    for (const char *p = file; *p; p++) {
        if (strncmp(p, "_train", 6) == 0 || strncmp(p, "_val", 4) == 0)
            best = (size_t)(p - file);
    }
    if (best > 0)
        return best;
    size_t n = strlen(file);
    if (n >= 4 && strcmp(file + n - 4, ".bin") == 0)
        n -= 4;
    while (n > 0 && strchr("0123456789*?[]_-", file[n - 1]))
        n--;
    return n;
}

int tokenizer_beside(struct tokenizer **out, const char *pattern, struct error *err)
{
    *out = NULL;
    const char *slash = strrchr(pattern, '/');
    const char *file = slash ? slash + 1 : pattern;
    int folder = (int)(file - pattern), name = (int)name_length(file);
    char path[PATH_MAX], found[PATH_MAX] = "";
    int rc = STATUS_OK;
    if (strlen(pattern) + 20 > sizeof path)
        return error_set(err, STATUS_FAIL, "%.60s...: path too long", pattern);
    if (name > 0) {
        snprintf(path, sizeof path, "%.*s%.*s_tokenizer.bin", folder, pattern, name, file);
        rc = find_file(path, found, err);
    }
    if (rc == STATUS_OK && !found[0]) {
        snprintf(path, sizeof path, "%.*stokenizer.bin", folder, pattern);
        rc = find_file(path, found, err);
    }
    return rc == STATUS_OK && found[0] ? tokenizer_read(out, found, err) : rc;
}

// ---- asking ----

uint32_t tokenizer_vocab(const struct tokenizer *t)
{
    return t->vocab;
}

uint32_t tokenizer_eot(const struct tokenizer *t)
{
    return t->eot;
}

uint64_t tokenizer_hash(const struct tokenizer *t)
{
    uint64_t lengths = XXH3_64bits_withSeed(t->start, (t->vocab + 1) * sizeof *t->start, t->eot);
    return XXH3_64bits_withSeed(t->bytes, t->start[t->vocab], lengths);
}

const unsigned char *tokenizer_decode(const struct tokenizer *t, uint32_t id, size_t *len)
{
    if (id >= t->vocab) {
        *len = 0;
        return NULL;
    }
    *len = t->start[id + 1] - t->start[id];
    return t->bytes + t->start[id];
}

// ---- encoding ----

int encoder_open(struct encoder **out, const struct tokenizer *t, struct error *err)
{
    *out = NULL;
    struct encoder *e = calloc(1, sizeof *e);
    if (e && t->splitter) {
        e->match = pcre2_match_data_create(1, NULL);
        e->cache = calloc(CACHE_SLOTS, sizeof *e->cache);
    }
    if (!e || (t->splitter && (!e->match || !e->cache))) {
        encoder_close(e);
        return error_set(err, STATUS_FAIL, "no memory for an encoder");
    }
    e->tokenizer = t;
    *out = e;
    return STATUS_OK;
}

void encoder_close(struct encoder *e)
{
    if (!e)
        return;
    pcre2_match_data_free(e->match);
    free(e->cache);
    free(e->parts);
    free(e->heap);
    free(e);
}

static int reserve(struct tokens *tokens, size_t more, struct error *err)
{
    if (tokens->n + more <= tokens->capacity)
        return STATUS_OK;
    size_t capacity =
        2 * tokens->capacity > tokens->n + more ? 2 * tokens->capacity : tokens->n + more;
    uint32_t *ids = realloc(tokens->ids, capacity * sizeof *ids);
    if (!ids)
        return error_set(err, STATUS_FAIL, "no memory for %zu tokens", capacity);
    tokens->ids = ids;
    tokens->capacity = capacity;
    return STATUS_OK;
}

static int encode_piece(struct encoder *e, const unsigned char *piece, size_t n,
                        struct tokens *tokens, struct error *err)
{
    int rc = reserve(tokens, n, err);
    if (rc != STATUS_OK)
        return rc;
    bool short_piece = n <= CACHE_TEXT;
    uint64_t hash = short_piece ? XXH3_64bits(piece, n) | 1 : 0;
    struct cached *slot = &e->cache[(hash >> 32) % CACHE_SLOTS];
    if (short_piece && slot->hash == hash && slot->len == n && memcmp(slot->text, piece, n) == 0) {
        memcpy(tokens->ids + tokens->n, slot->ids, slot->n * sizeof *slot->ids);
        tokens->n += slot->n;
        return STATUS_OK;
    }
    rc = merge_piece(e, piece, n, err);
    if (rc != STATUS_OK)
        return rc;
    uint32_t *first = tokens->ids + tokens->n;
    for (uint32_t i = 0; i != NO_TOKEN; i = e->parts[i].next)
        tokens->ids[tokens->n++] = e->parts[i].token;
    size_t made = (size_t)(tokens->ids + tokens->n - first);
    if (short_piece && made <= CACHE_IDS) {
        *slot = (struct cached){.hash = hash, .len = (uint8_t)n, .n = (uint8_t)made};
        memcpy(slot->text, piece, n);
        memcpy(slot->ids, first, made * sizeof *first);
    }
    return STATUS_OK;
}

static int match_error(int code, struct error *err)
{
    PCRE2_UCHAR text[120] = "";
    pcre2_get_error_message(code, text, sizeof text);
    return error_set(err, STATUS_FAIL, "cannot split the text: %s", (const char *)text);
}

// How many bytes from the start on are valid UTF-8. PCRE2 judges, so that it never sees others.
static int valid_prefix(struct encoder *e, const unsigned char *text, size_t len, size_t *valid,
                        struct error *err)
{
    int rc = pcre2_match(e->tokenizer->splitter, text, len, 0, 0, e->match, NULL);
    if (rc < 0 && (rc > PCRE2_ERROR_UTF8_ERR1 || rc < PCRE2_ERROR_UTF8_ERR21))
        return match_error(rc, err);
    *valid = rc < 0 ? pcre2_get_startchar(e->match) : len;
    return STATUS_OK;
}

static int encode_valid(struct encoder *e, const unsigned char *text, size_t len,
                        struct tokens *tokens, struct error *err)
{
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(e->match);
    for (size_t at = 0; at < len;) {
        int rc =
            pcre2_match(e->tokenizer->splitter, text, len, at, PCRE2_NO_UTF_CHECK, e->match, NULL);
        if (rc < 0)
            return match_error(rc, err);
        // The pattern has an alternative for any character, so pieces follow each other closely.
        size_t end = span[1];
        rc = encode_piece(e, text + at, end - at, tokens, err);
        if (rc != STATUS_OK)
            return rc;
        at = end;
    }
    return STATUS_OK;
}

static int encode_split(struct encoder *e, const unsigned char *text, size_t len,
                        struct tokens *tokens, struct error *err)
{
    for (size_t at = 0; at < len;) {
        size_t bad = at, valid = 0;
        while (bad < len) {
            int rc = valid_prefix(e, text + bad, len - bad, &valid, err);
            if (rc != STATUS_OK)
                return rc;
            if (valid > 0)
                break;
            bad++;
        }
        int rc = STATUS_OK;
        if (bad > at)
            rc = encode_piece(e, text + at, bad - at, tokens, err);
        if (rc == STATUS_OK && valid > 0)
            rc = encode_valid(e, text + bad, valid, tokens, err);
        if (rc != STATUS_OK)
            return rc;
        at = bad + valid;
    }
    return STATUS_OK;
}

static int encode_bytes(struct encoder *e, const unsigned char *text, size_t len,
                        struct tokens *tokens, struct error *err)
{
    int rc = reserve(tokens, len, err);
    if (rc != STATUS_OK)
        return rc;
    for (size_t i = 0; i < len; i++) {
        uint32_t token = e->tokenizer->of_byte[text[i]];
        if (token == NO_TOKEN)
            return error_set(err, STATUS_FAIL, "the vocabulary has no token for byte 0x%02x",
                             text[i]);
        tokens->ids[tokens->n++] = token;
    }
    return STATUS_OK;
}

int encode(struct encoder *e, const void *text, size_t len, bool special, struct tokens *tokens,
           struct error *err)
{
    const struct tokenizer *t = e->tokenizer;
    size_t mark_bytes;
    const unsigned char *mark = tokenizer_decode(t, t->eot, &mark_bytes);
    const unsigned char *at = text, *end = at + len;
    for (;;) {
        const unsigned char *found =
            special ? memmem(at, (size_t)(end - at), mark, mark_bytes) : NULL;
        size_t n = (size_t)((found ? found : end) - at);
        int rc =
            t->splitter ? encode_split(e, at, n, tokens, err) : encode_bytes(e, at, n, tokens, err);
        if (rc != STATUS_OK || !found)
            return rc;
        rc = reserve(tokens, 1, err);
        if (rc != STATUS_OK)
            return rc;
        tokens->ids[tokens->n++] = t->eot;
        at = found + mark_bytes;
    }
}

// ---- where text may be cut ----

// Could a cut at p fall into the spelling of end-of-text, given what may follow text[0..len)?
static bool inside_mark(const struct tokenizer *t, const unsigned char *text, size_t len, size_t p)
{
    size_t n;
    const unsigned char *mark = tokenizer_decode(t, t->eot, &n);
    for (size_t back = 1; back < n && back <= p; back++) {
        size_t seen = n < len - (p - back) ? n : len - (p - back);
        if (memcmp(text + p - back, mark, seen) == 0)
            return true;
    }
    return false;
}

// Does text[0..n) end in one of Unicode's White_Space characters?
static bool ends_in_space(const unsigned char *text, size_t n)
{
    unsigned char last = text[n - 1];
    if (last < 0x80)
        return last == ' ' || (last >= '\t' && last <= '\r');
    if (n >= 2 && text[n - 2] == 0xc2)
        return last == 0x85 || last == 0xa0;
    if (n < 3)
        return false;
    uint32_t c = (uint32_t)text[n - 3] << 16 | (uint32_t)text[n - 2] << 8 | last;
    return c == 0xe19a80 || (c >= 0xe28080 && c <= 0xe2808a) || c == 0xe280a8 || c == 0xe280a9 ||
           c == 0xe280af || c == 0xe2819f || c == 0xe38080;
}

size_t tokenizer_cut(const struct tokenizer *t, const void *text, size_t len)
{
    const unsigned char *s = text;
    if (!t->splitter) {
        size_t p = len;
        while (p > 0 && inside_mark(t, s, len, p))
            p--;
        return p;
    }
    for (size_t p = len; p-- > 1;) {
        if (s[p] < 0x80 && ends_in_space(s, p + 1) && !ends_in_space(s, p) &&
            !inside_mark(t, s, len, p))
            return p;
    }
    return 0;
}
