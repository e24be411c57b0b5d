#include "data/evalset.h"

#include "data/files.h"
#include "data/shards.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HEADER_INTS = 256,
    HEADER_BYTES = HEADER_INTS * 4,
    MAGIC = 20240522,
    VERSION = 1,
    EXAMPLE_MARK = 65535,
    EXAMPLE_FIELDS = 6,      // before the context's tokens
    FILE_BYTES_MAX = 1 << 30 // limit on what is read into memory
};

struct evalset {
    size_t T;
    size_t count;
    uint16_t *stream;
    size_t *start; // [count]: where in the stream an example begins
};

// What is being checked, for the messages.
struct cursor {
    const char *path;
    const uint16_t *stream;
    size_t at, end; // uint16s: of the next field; of this example
    size_t example;
    size_t row_tokens; // of the context and one completion
    size_t T;
    uint32_t vocab;
};

static int bad_field(const struct cursor *c, const char *field, long found, const char *expected,
                     struct error *err)
{
    return error_set(err, STATUS_FAIL,
                     "%s: example %zu, byte %zu: %s is %ld, expected %s; make the file again",
                     c->path, c->example, HEADER_BYTES + 2 * c->at, field, found, expected);
}

// A count and as many tokens.
static int check_tokens(struct cursor *c, const char *what, struct error *err)
{
    if (c->at >= c->end || c->stream[c->at] == 0 || c->stream[c->at] >= c->end - c->at)
        return bad_field(c, what, c->at < c->end ? c->stream[c->at] : -1,
                         "1 or more tokens within the example", err);
    size_t n = c->stream[c->at++];
    for (size_t i = 0; i < n; i++, c->at++) {
        uint16_t token = c->stream[c->at];
        if (token >= c->vocab)
            return error_set(err, STATUS_FAIL,
                             "%s: example %zu: token %u at byte %zu, but the vocabulary has "
                             "%" PRIu32 " tokens; is this another tokenizer's file?",
                             c->path, c->example, token, HEADER_BYTES + 2 * c->at, c->vocab);
    }
    c->row_tokens += n;
    return STATUS_OK;
}

static int check_completions(struct cursor *c, struct error *err)
{
    c->row_tokens = 0;
    int rc = check_tokens(c, "n_context", err);
    size_t context = c->row_tokens;
    for (int k = 0; rc == STATUS_OK && k < EVAL_COMPLETIONS; k++) {
        c->row_tokens = context;
        rc = check_tokens(c, "the length of a completion", err);
        if (rc == STATUS_OK && c->row_tokens - 1 > c->T) // the last token is only a target
            rc = error_set(err, STATUS_FAIL,
                           "%s: example %zu takes rows of %zu tokens, but they have %zu: --seq %zu "
                           "or more, or no --eval",
                           c->path, c->example, c->row_tokens - 1, c->T, c->row_tokens - 1);
    }
    if (rc == STATUS_OK && c->at != c->end)
        return bad_field(c, "the example's size", (long)(2 * (c->end - c->at)),
                         "nothing behind the last completion", err);
    return rc;
}

// One example, which begins at c->at; n: uint16s in the stream.
static int check_example(struct cursor *c, size_t n, size_t longest_bytes, struct error *err)
{
    size_t begin = c->at;
    if (n - begin < EXAMPLE_FIELDS)
        return error_set(err, STATUS_FAIL, "%s: cut short: ends within example %zu; copy it again",
                         c->path, c->example);
    const uint16_t *field = c->stream + begin;
    if (field[0] != EXAMPLE_MARK)
        return bad_field(c, "its mark", field[0], "65535", err);
    c->at = begin + 1;
    if (field[1] % 2 || field[1] < 2 * EXAMPLE_FIELDS || field[1] > longest_bytes)
        return bad_field(c, "its size in bytes", field[1],
                         "an even number, 12 to the header's longest example", err);
    if (field[1] / 2u > n - begin)
        return error_set(err, STATUS_FAIL, "%s: cut short: ends within example %zu; copy it again",
                         c->path, c->example);
    c->end = begin + field[1] / 2;
    c->at = begin + 2;
    if (field[2] != (c->example & 0xffff))
        return bad_field(c, "its index", field[2], "its place in the file", err);
    c->at = begin + 3;
    if (field[3] >= EVAL_COMPLETIONS)
        return bad_field(c, "its label", field[3], "0 to 3", err);
    c->at = begin + 4;
    if (field[4] != EVAL_COMPLETIONS)
        return bad_field(c, "its number of completions", field[4], "4", err);
    c->at = begin + 5;
    return check_completions(c, err);
}

static int check_header(const char *path, const int32_t *header, uint64_t size, struct error *err)
{
    const char *kind = kind_of_magic(header[0]);
    if (header[0] != MAGIC)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): %s%s, not an evaluation file: magic %d, expected "
                         "%d; --eval takes llm.c's HellaSwag files",
                         path, size, kind ? "is " : "unknown format", kind ? kind : "", header[0],
                         MAGIC);
    if (header[1] != VERSION)
        return error_set(err, STATUS_FAIL,
                         "%s (%" PRIu64 " bytes): evaluation file of version %d, expected %d; make "
                         "it again",
                         path, size, header[1], VERSION);
    if (header[2] < 1 || header[3] < 2 * EXAMPLE_FIELDS)
        return error_set(err, STATUS_FAIL,
                         "%s: header says %d examples, the longest of %d bytes; make it again",
                         path, header[2], header[3]);
    return STATUS_OK;
}

static int check_examples(struct evalset *set, struct cursor *c, size_t n, size_t longest_bytes,
                          struct error *err)
{
    // An example has 26 bytes at least: a header that promises more than the file holds is
    // refused before it can ask for memory.
    if (set->count > n / (EXAMPLE_FIELDS + 1))
        return error_set(err, STATUS_FAIL,
                         "%s: %zu bytes cannot hold the %zu examples of its header; copy it again",
                         c->path, HEADER_BYTES + 2 * n, set->count);
    set->start = malloc(set->count * sizeof *set->start);
    if (!set->start)
        return error_set(err, STATUS_FAIL, "%s: no memory for %zu examples", c->path, set->count);
    for (c->example = 0; c->example < set->count; c->example++) {
        set->start[c->example] = c->at;
        int rc = check_example(c, n, longest_bytes, err);
        if (rc != STATUS_OK)
            return rc;
    }
    if (c->at != n)
        return error_set(err, STATUS_FAIL,
                         "%s: too long: %zu bytes behind the last of %zu examples; copy it again",
                         c->path, 2 * (n - c->at), set->count);
    return STATUS_OK;
}

static int read_file(struct evalset *set, const char *path, uint32_t vocab, struct error *err)
{
    int fd;
    uint64_t size;
    int rc = file_open(path, &fd, &size, err);
    if (rc != STATUS_OK)
        return rc;
    int32_t header[HEADER_INTS];
    if (size < sizeof header)
        rc = error_set(err, STATUS_FAIL,
                       "%s: %" PRIu64 " bytes are too few for an evaluation file, whose header "
                       "alone has %zu; copy it again",
                       path, size, sizeof header);
    if (rc == STATUS_OK)
        rc = file_read_at(fd, path, header, sizeof header, 0, err);
    if (rc == STATUS_OK)
        rc = check_header(path, header, size, err);
    if (rc == STATUS_OK && (size % 2 || size > FILE_BYTES_MAX))
        rc = error_set(err, STATUS_FAIL, "%s: %" PRIu64 " bytes: expected an even number up to %d",
                       path, size, FILE_BYTES_MAX);
    if (rc == STATUS_OK) {
        set->count = (size_t)header[2];
        set->stream = malloc(size - sizeof header + 1);
        if (!set->stream)
            rc = error_set(err, STATUS_FAIL, "%s: no memory for %" PRIu64 " bytes", path, size);
    }
    if (rc == STATUS_OK)
        rc = file_read_at(fd, path, set->stream, size - sizeof header, sizeof header, err);
    close(fd);
    if (rc != STATUS_OK)
        return rc;
    struct cursor c = {.path = path, .stream = set->stream, .T = set->T, .vocab = vocab};
    return check_examples(set, &c, (size - sizeof header) / 2, (size_t)header[3], err);
}

int evalset_open(struct evalset **out, const char *path, size_t T, uint32_t vocab,
                 struct error *err)
{
    *out = NULL;
    struct evalset *set = calloc(1, sizeof *set);
    if (!set)
        return error_set(err, STATUS_FAIL, "%s: no memory for an evaluation set", path);
    set->T = T;
    int rc = read_file(set, path, vocab, err);
    if (rc != STATUS_OK) {
        evalset_close(set);
        return rc;
    }
    *out = set;
    return STATUS_OK;
}

void evalset_close(struct evalset *set)
{
    if (!set)
        return;
    free(set->stream);
    free(set->start);
    free(set);
}

size_t evalset_count(const struct evalset *set)
{
    return set->count;
}

int evalset_rows(const struct evalset *set, size_t example, int32_t *tokens, int32_t *targets,
                 unsigned char *mask)
{
    size_t T = set->T;
    memset(tokens, 0, EVAL_COMPLETIONS * T * sizeof *tokens);
    memset(targets, 0, EVAL_COMPLETIONS * T * sizeof *targets);
    memset(mask, 0, EVAL_COMPLETIONS * T);
    const uint16_t *field = set->stream + set->start[example];
    int label = field[3];
    size_t n_context = field[5];
    const uint16_t *context = field + EXAMPLE_FIELDS;
    const uint16_t *completion = context + n_context;
    for (size_t k = 0; k < EVAL_COMPLETIONS; k++) {
        size_t n = *completion++;
        for (size_t i = 0; i < n_context + n; i++) {
            int32_t token = i < n_context ? context[i] : completion[i - n_context];
            if (i + 1 < n_context + n)
                tokens[k * T + i] = token;
            if (i > 0) {
                targets[k * T + i - 1] = token;
                mask[k * T + i - 1] = i >= n_context;
            }
        }
        completion += n;
    }
    return label;
}

int evalset_choice(const float *losses, const unsigned char *mask, size_t T)
{
    int best = 0;
    double best_mean = INFINITY;
    for (int k = 0; k < EVAL_COMPLETIONS; k++) {
        double sum = 0;
        size_t n = 0;
        for (size_t t = 0; t < T; t++) {
            if (mask[(size_t)k * T + t]) {
                sum += losses[(size_t)k * T + t];
                n++;
            }
        }
        if (n > 0 && sum / (double)n < best_mean) {
            best_mean = sum / (double)n;
            best = k;
        }
    }
    return best;
}
