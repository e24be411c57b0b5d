// tokenize.c - ./tokenize: text to token shards and back, and the default corpus. See usage[].
//
// Text is read in windows that are cut where a cut changes nothing (tokenizer_cut), a window is cut
// again into chunks that the threads encode, and the chunks are written in order: the shards are
// the same whatever the number of threads, and memory is bounded by the longest stretch of text
// without white space, not by the file.
#include "data/corpus.h"
#include "data/files.h"
#include "data/shards.h"
#include "data/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char usage[] =
    "usage: tokenize FILE... -o PREFIX [options]     text to token shards (FILE -: stdin)\n"
    "       tokenize --decode SHARD...               shards back to text, end-of-text tokens "
    "included\n"
    "       tokenize --stories [N] [-o PREFIX]       the default corpus: N tokens (8M) of stories\n"
    "\n"
    "Writes PREFIX_train_000000.bin ..., PREFIX_val_000000.bin ... and PREFIX_tokenizer.bin, "
    "which\n"
    "replace those of an earlier run. Tokens are bytes, or GPT-2's with --bpe. Every FILE is a\n"
    "document; an end-of-text token stands before each, and wherever a text says <|endoftext|>\n"
    "(never two in sequence). The tail of every text goes to the validation shards: of n "
    "characters\n"
    "the first floor((1 - fraction) * n) are for training.\n"
    "\n"
    "  -o, --output PREFIX     where to write; data/stories for --stories\n"
    "  --bpe DIR               GPT-2's tokens; DIR holds vocab.bpe and encoder.json\n"
    "  --val-fraction F        0 to 1 (0.1); 0: training shards only; 1: validation shards only\n"
    "  --shard-tokens N        tokens per shard at most (100M)\n"
    "  --plain                 <|endoftext|> in a text is text\n"
    "  --threads N             (all cores)\n"
    "  --seed N                of --stories (1337)\n"
    "  --decode, --stories     see above\n"
    "  -h, --help              this text\n"
    "\n"
    "N takes a suffix: K M G = 10^3 10^6 10^9, Ki Mi Gi = 2^10 2^20 2^30. Exit status: 0, 1 bad\n"
    "data or disk, 2 bad usage.\n";

enum {
    WINDOW_BYTES = 8 << 20,
    CHUNK_BYTES = 256 << 10,
    THREADS_MAX = 1024,
};

struct settings {
    const char *prefix; // NULL: none given
    const char *bpe;    // NULL: bytes
    double val_fraction;
    uint64_t shard_tokens, seed, story_tokens, threads;
    bool plain, decode, stories, help;
    char **inputs;
    int n_inputs;
};

// ---- the command line ----

static int parse_size(const char *option, const char *text, uint64_t min, uint64_t max,
                      uint64_t *out, struct error *err)
{
    static const struct {
        const char *suffix;
        double factor;
    } units[] = {{"", 1},      {"K", 1e3},      {"M", 1e6},     {"G", 1e9},
                 {"Ki", 1024}, {"Mi", 1 << 20}, {"Gi", 1 << 30}};
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    bool good = end != text && errno == 0 && (*text == '.' || (*text >= '0' && *text <= '9'));
    double factor = 0;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].suffix) == 0)
            factor = units[i].factor;
    }
    value *= factor;
    if (!good || factor == 0 || !(value >= (double)min && value <= (double)max) ||
        value != (double)(uint64_t)value)
        return error_set(err, STATUS_USAGE,
                         "%s %s: expected a whole number from %" PRIu64 " to %" PRIu64, option,
                         text, min, max);
    *out = (uint64_t)value;
    return STATUS_OK;
}

static int parse_fraction(const char *option, const char *text, double *out, struct error *err)
{
    char *end;
    *out = strtod(text, &end);
    if (end == text || *end || !(*out >= 0 && *out <= 1))
        return error_set(err, STATUS_USAGE, "%s %s: expected a number from 0 to 1", option, text);
    return STATUS_OK;
}

static int set_option(struct settings *s, const char *name, const char *value, struct error *err)
{
    if (strcmp(name, "--output") == 0)
        s->prefix = value;
    else if (strcmp(name, "--bpe") == 0)
        s->bpe = value;
    else if (strcmp(name, "--val-fraction") == 0)
        return parse_fraction(name, value, &s->val_fraction, err);
    else if (strcmp(name, "--shard-tokens") == 0)
        return parse_size(name, value, 1, INT32_MAX, &s->shard_tokens, err);
    else if (strcmp(name, "--threads") == 0)
        return parse_size(name, value, 1, THREADS_MAX, &s->threads, err);
    else if (strcmp(name, "--seed") == 0)
        return parse_size(name, value, 0, UINT64_C(1) << 53, &s->seed, err);
    else
        return error_set(err, STATUS_USAGE, "unknown option %s; --help lists them", name);
    return STATUS_OK;
}

// Sets a switch, if `name` is one.
static bool set_switch(struct settings *s, const char *name)
{
    if (strcmp(name, "--plain") == 0)
        s->plain = true;
    else if (strcmp(name, "--decode") == 0)
        s->decode = true;
    else if (strcmp(name, "--stories") == 0)
        s->stories = true;
    else if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        s->help = true;
    else
        return false;
    return true;
}

static int check_settings(struct settings *s, struct error *err)
{
    if (s->help)
        return STATUS_OK;
    if (s->decode && s->stories)
        return error_set(err, STATUS_USAGE, "--decode and --stories exclude each other");
    if (s->stories && s->n_inputs > 1)
        return error_set(err, STATUS_USAGE, "--stories takes one number, found %s", s->inputs[1]);
    if (s->stories && s->n_inputs == 1)
        return parse_size("--stories", s->inputs[0], 1, UINT64_C(1) << 40, &s->story_tokens, err);
    if (!s->stories && s->n_inputs == 0)
        return error_set(err, STATUS_USAGE, "no input files; --help shows how to call this");
    if (!s->stories && !s->decode && !s->prefix)
        return error_set(err, STATUS_USAGE, "no -o PREFIX: where shall the shards go?");
    return STATUS_OK;
}

// s->inputs must have room for argc paths.
static int parse_command_line(struct settings *s, int argc, char **argv, struct error *err)
{
    bool options_end = false;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i];
        if (options_end || arg[0] != '-' || strcmp(arg, "-") == 0) {
            s->inputs[s->n_inputs++] = arg;
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            options_end = true;
            continue;
        }
        if (set_switch(s, arg))
            continue;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(arg, "="), arg);
        const char *value = strchr(arg, '=');
        if (value && strcmp(name, "--stories") == 0) {
            s->stories = true;
            s->inputs[s->n_inputs++] = (char *)value + 1;
            continue;
        }
        if (strcmp(name, "-o") == 0)
            snprintf(name, sizeof name, "--output");
        struct settings unused = *s; // an unknown option is worse than a missing value
        if (!value && i + 1 == argc && set_option(&unused, name, "", err) != STATUS_USAGE)
            return error_set(err, STATUS_USAGE, "%s: its value is missing", arg);
        int rc = set_option(s, name, value ? value + 1 : i + 1 < argc ? argv[++i] : "", err);
        if (rc != STATUS_OK)
            return rc;
    }
    return check_settings(s, err);
}

// ---- progress ----

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct progress {
    bool tty;
    double start, last;
    uint64_t done, all; // bytes
};

static void progress_add(struct progress *p, uint64_t bytes)
{
    p->done += bytes;
    double now = seconds();
    if (!p->tty || now - p->last < 0.2)
        return;
    p->last = now;
    fprintf(stderr, "\r%3.0f%%  %.0f of %.0f MB  %.1f MB/s ",
            100.0 * (double)p->done / (double)p->all, (double)p->done / 1e6, (double)p->all / 1e6,
            (double)p->done / 1e6 / (now - p->start));
}

static void progress_end(const struct progress *p)
{
    if (p->tty && p->last > 0)
        fprintf(stderr, "\r%60s\r", "");
}

// ---- encoding ----

enum { TRAIN, VAL };

struct chunk {
    const char *text;
    size_t n;
    struct tokens tokens;
    struct error err;
};

struct job {
    const struct settings *settings;
    struct tokenizer *tokenizer;
    struct encoder **encoders; // one per thread
    int threads;
    struct shard_writer *out[2]; // TRAIN, VAL; NULL: not asked for
    bool after_eot[2];           // end-of-text was the last token written
    char *window;
    size_t window_bytes;
    struct chunk *chunks;
    size_t n_chunks, chunk_room;
    struct progress progress;
};

static int write_tokens(struct job *job, int part, const uint32_t *ids, size_t n, struct error *err)
{
    uint32_t eot = tokenizer_eot(job->tokenizer);
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] == eot && job->after_eot[part]) { // leave this one out
            int rc = shard_write(job->out[part], ids + from, i - from, err);
            if (rc != STATUS_OK)
                return rc;
            from = i + 1;
        }
        job->after_eot[part] = ids[i] == eot;
    }
    return shard_write(job->out[part], ids + from, n - from, err);
}

// Cuts text[n] into chunks where that changes nothing.
static int make_chunks(struct job *job, const char *text, size_t n, struct error *err)
{
    job->n_chunks = 0;
    for (size_t at = 0; at < n;) {
        size_t cut = 0;
        for (size_t want = CHUNK_BYTES; cut == 0; want *= 2)
            cut = want < n - at ? tokenizer_cut(job->tokenizer, text + at, want) : n - at;
        if (job->n_chunks == job->chunk_room) {
            size_t room = job->chunk_room ? 2 * job->chunk_room : 64;
            struct chunk *chunks = realloc(job->chunks, room * sizeof *chunks);
            if (!chunks)
                return error_set(err, STATUS_FAIL, "no memory for %zu chunks", room);
            memset(chunks + job->chunk_room, 0, (room - job->chunk_room) * sizeof *chunks);
            job->chunks = chunks;
            job->chunk_room = room;
        }
        struct chunk *c = &job->chunks[job->n_chunks++];
        c->text = text + at;
        c->n = cut;
        c->tokens.n = 0;
        c->err.status = STATUS_OK;
        at += cut;
    }
    return STATUS_OK;
}

static int encode_window(struct job *job, int part, size_t n, struct error *err)
{
    int rc = make_chunks(job, job->window, n, err);
    if (rc != STATUS_OK)
        return rc;
#pragma omp parallel for schedule(dynamic) num_threads(job->threads)
    for (size_t i = 0; i < job->n_chunks; i++) {
        struct chunk *c = &job->chunks[i];
        encode(job->encoders[omp_get_thread_num()], c->text, c->n, !job->settings->plain,
               &c->tokens, &c->err);
    }
    for (size_t i = 0; rc == STATUS_OK && i < job->n_chunks; i++) {
        const struct chunk *c = &job->chunks[i];
        if (c->err.status != STATUS_OK) {
            *err = c->err;
            return c->err.status;
        }
        rc = write_tokens(job, part, c->tokens.ids, c->tokens.n, err);
    }
    progress_add(&job->progress, n);
    return rc;
}

// A document: bytes [from, to) of the file.
static int encode_text(struct job *job, int part, int fd, const char *path, uint64_t from,
                       uint64_t to, struct error *err)
{
    if (from == to)
        return STATUS_OK;
    uint32_t eot = tokenizer_eot(job->tokenizer);
    int rc = write_tokens(job, part, &eot, 1, err);
    size_t have = 0;
    while (rc == STATUS_OK && (from < to || have > 0)) {
        size_t more = job->window_bytes - have;
        if (more > to - from)
            more = (size_t)(to - from);
        rc = file_read_at(fd, path, job->window + have, more, from, err);
        if (rc != STATUS_OK)
            return rc;
        have += more;
        from += more;
        size_t cut = from == to ? have : tokenizer_cut(job->tokenizer, job->window, have);
        if (cut == 0) {
            char *wider = realloc(job->window, 2 * job->window_bytes);
            if (!wider)
                return error_set(err, STATUS_FAIL, "%s: no memory for %zu bytes without a space",
                                 path, 2 * job->window_bytes);
            job->window = wider;
            job->window_bytes *= 2;
            continue;
        }
        rc = encode_window(job, part, cut, err);
        have -= cut;
        memmove(job->window, job->window + cut, have);
    }
    return rc;
}

// Characters begin at all bytes but 10xxxxxx. Counts them, up to `limit`, and tells where that is.
static int count_characters(struct job *job, int fd, const char *path, uint64_t bytes,
                            uint64_t limit, uint64_t *count, uint64_t *where, struct error *err)
{
    *count = 0;
    for (uint64_t at = 0; at < bytes;) {
        size_t n = bytes - at < job->window_bytes ? (size_t)(bytes - at) : job->window_bytes;
        int rc = file_read_at(fd, path, job->window, n, at, err);
        if (rc != STATUS_OK)
            return rc;
        for (size_t i = 0; i < n; i++) {
            if (((unsigned char)job->window[i] & 0xc0) == 0x80)
                continue;
            if (*count == limit) {
                *where = at + i;
                return STATUS_OK;
            }
            ++*count;
        }
        at += n;
    }
    *where = bytes;
    return STATUS_OK;
}

static int encode_file(struct job *job, int fd, const char *path, uint64_t bytes, struct error *err)
{
    double fraction = job->settings->val_fraction;
    uint64_t cut = fraction < 1 ? bytes : 0;
    int rc = STATUS_OK;
    if (fraction > 0 && fraction < 1) {
        uint64_t all, kept;
        rc = count_characters(job, fd, path, bytes, UINT64_MAX, &all, &cut, err);
        if (rc == STATUS_OK)
            rc = count_characters(job, fd, path, bytes, (uint64_t)((1 - fraction) * (double)all),
                                  &kept, &cut, err);
    }
    if (rc == STATUS_OK)
        rc = encode_text(job, TRAIN, fd, path, 0, cut, err);
    if (rc == STATUS_OK)
        rc = encode_text(job, VAL, fd, path, cut, bytes, err);
    return rc;
}

// What cannot be read twice (stdin, pipes) goes through a nameless file beside the output.
static int spool(int in, const char *path, const char *prefix, int *fd, struct error *err)
{
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s_spool_XXXXXX", prefix);
    *fd = mkstemp(name);
    if (*fd < 0)
        return error_set(err, STATUS_FAIL, "%s: cannot create: %s", name, strerror(errno));
    unlink(name);
    static char buffer[1 << 16];
    int rc = STATUS_OK;
    ssize_t n;
    while (rc == STATUS_OK && (n = read(in, buffer, sizeof buffer)) != 0) {
        if (n > 0)
            rc = file_write_all(*fd, name, buffer, (size_t)n, err);
        else if (errno != EINTR)
            rc = error_set(err, STATUS_FAIL, "%s: cannot read: %s", path, strerror(errno));
    }
    if (rc != STATUS_OK)
        close(*fd);
    return rc;
}

static int encode_input(struct job *job, const char *path, struct error *err)
{
    struct stat st;
    bool is_stdin = strcmp(path, "-") == 0;
    int fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) || S_ISDIR(st.st_mode)) {
        int rc = error_set(err, STATUS_FAIL, "%s: cannot open: %s", path,
                           fd < 0 ? strerror(errno) : "is a directory");
        if (fd >= 0 && !is_stdin)
            close(fd);
        return rc;
    }
    int rc = STATUS_OK;
    if (is_stdin || !S_ISREG(st.st_mode)) {
        int copy;
        rc = spool(fd, path, job->settings->prefix, &copy, err);
        if (!is_stdin)
            close(fd);
        if (rc != STATUS_OK)
            return rc;
        fd = copy;
        if (fstat(fd, &st))
            rc = error_set(err, STATUS_FAIL, "%s: %s", path, strerror(errno));
        job->progress.all += (uint64_t)st.st_size;
    }
    if (rc == STATUS_OK)
        rc = encode_file(job, fd, path, (uint64_t)st.st_size, err);
    close(fd);
    return rc;
}

static int open_job(struct job *job, struct error *err)
{
    static const char *const names[] = {"train", "val"};
    const struct settings *s = job->settings;
    int rc = s->bpe ? tokenizer_gpt2(&job->tokenizer, s->bpe, err)
                    : tokenizer_bytes(&job->tokenizer, err);
    if (rc != STATUS_OK)
        return rc;
    job->threads = s->threads ? (int)s->threads : omp_get_max_threads();
    job->encoders = calloc((size_t)job->threads, sizeof *job->encoders);
    job->window_bytes = WINDOW_BYTES;
    job->window = malloc(job->window_bytes);
    if (!job->encoders || !job->window)
        return error_set(err, STATUS_FAIL, "no memory for %d threads", job->threads);
    for (int i = 0; rc == STATUS_OK && i < job->threads; i++)
        rc = encoder_open(&job->encoders[i], job->tokenizer, err);
    for (int part = TRAIN; rc == STATUS_OK && part <= VAL; part++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s_%s", s->prefix, names[part]);
        if (part == TRAIN ? s->val_fraction < 1 : s->val_fraction > 0)
            rc = shard_writer_open(&job->out[part], path, s->shard_tokens,
                                   tokenizer_vocab(job->tokenizer) > 65536, err);
    }
    job->progress = (struct progress){.tty = isatty(STDERR_FILENO), .start = seconds()};
    for (int i = 0; i < s->n_inputs; i++) {
        struct stat st;
        if (stat(s->inputs[i], &st) == 0 && S_ISREG(st.st_mode))
            job->progress.all += (uint64_t)st.st_size;
    }
    return rc;
}

static void close_job(struct job *job)
{
    for (int i = 0; job->encoders && i < job->threads; i++)
        encoder_close(job->encoders[i]);
    for (size_t i = 0; i < job->chunk_room; i++)
        free(job->chunks[i].tokens.ids);
    free(job->chunks);
    free(job->encoders);
    free(job->window);
    shard_writer_close(job->out[TRAIN]);
    shard_writer_close(job->out[VAL]);
    tokenizer_free(job->tokenizer);
}

static int publish(struct job *job, struct error *err)
{
    const struct settings *s = job->settings;
    int rc = STATUS_OK;
    for (int part = TRAIN; rc == STATUS_OK && part <= VAL; part++) {
        if (!job->out[part])
            continue;
        if (shard_writer_tokens(job->out[part]) == 0)
            return error_set(err, STATUS_FAIL,
                             "%s_%s: there is no text for it in the input; give more text, or "
                             "--val-fraction %d",
                             s->prefix, part == TRAIN ? "train" : "val", part == TRAIN);
        rc = shard_writer_seal(job->out[part], err);
    }
    char path[PATH_MAX];
    if (rc == STATUS_OK && snprintf(path, sizeof path, "%s_tokenizer.bin", s->prefix) > 0)
        rc = tokenizer_write(job->tokenizer, path, err);
    for (int part = TRAIN; rc == STATUS_OK && part <= VAL; part++) {
        if (job->out[part])
            rc = shard_writer_publish(job->out[part], err);
    }
    return rc;
}

static int encode_inputs(const struct settings *s, struct error *err)
{
    struct job job = {.settings = s};
    int rc = open_job(&job, err);
    for (int i = 0; rc == STATUS_OK && i < s->n_inputs; i++)
        rc = encode_input(&job, s->inputs[i], err);
    progress_end(&job.progress);
    if (rc == STATUS_OK)
        rc = publish(&job, err);
    for (int part = TRAIN; rc == STATUS_OK && part <= VAL; part++) {
        if (job.out[part])
            printf("%s_%s: %" PRIu64 " tokens in %zu shard%s\n", s->prefix,
                   part == TRAIN ? "train" : "val", shard_writer_tokens(job.out[part]),
                   shard_writer_shards(job.out[part]),
                   shard_writer_shards(job.out[part]) == 1 ? "" : "s");
    }
    if (rc == STATUS_OK)
        printf("%s_tokenizer.bin: %" PRIu32 " tokens; %.1f MB/s with %d threads\n", s->prefix,
               tokenizer_vocab(job.tokenizer),
               (double)job.progress.done / 1e6 / (seconds() - job.progress.start), job.threads);
    close_job(&job);
    return rc;
}

// ---- decoding ----

static int print_tokens(const struct tokenizer *tokenizer, const char *path, const uint32_t *ids,
                        size_t n, struct error *err)
{
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const unsigned char *bytes = tokenizer ? tokenizer_decode(tokenizer, ids[i], &len) : NULL;
        if (bytes)
            fwrite(bytes, 1, len, stdout);
        else if (tokenizer)
            return error_set(err, STATUS_FAIL,
                             "%s: token %" PRIu32 ", but the tokenizer beside it has %" PRIu32
                             " tokens; is it another one's?",
                             path, ids[i], tokenizer_vocab(tokenizer));
        else
            printf("%" PRIu32 "\n", ids[i]);
    }
    return ferror(stdout) ? error_set(err, STATUS_FAIL, "stdout: %s", strerror(errno)) : STATUS_OK;
}

static int decode_shard(const char *path, struct error *err)
{
    static uint32_t ids[1 << 16];
    struct tokenizer *tokenizer = NULL;
    struct shard_reader *reader = NULL;
    int rc = shard_reader_open(&reader, path, err);
    if (rc == STATUS_OK)
        rc = tokenizer_beside(&tokenizer, path, err);
    if (rc == STATUS_OK && !tokenizer)
        fprintf(stderr, "%s: no tokenizer beside it; printing ids\n", path);
    size_t n = 1;
    while (rc == STATUS_OK && n > 0) {
        rc = shard_read(reader, ids, sizeof ids / sizeof *ids, &n, err);
        if (rc == STATUS_OK)
            rc = print_tokens(tokenizer, path, ids, n, err);
    }
    shard_reader_close(reader);
    tokenizer_free(tokenizer);
    return rc;
}

static int decode_inputs(const struct settings *s, struct error *err)
{
    int rc = STATUS_OK;
    for (int i = 0; rc == STATUS_OK && i < s->n_inputs; i++)
        rc = decode_shard(s->inputs[i], err);
    return rc;
}

// ---- stories ----

static int make_stories(const struct settings *s, struct error *err)
{
    const char *prefix = s->prefix ? s->prefix : "data/stories";
    uint64_t val = (uint64_t)(s->val_fraction * (double)s->story_tokens);
    int rc = corpus_write(prefix, s->story_tokens - val, val, s->shard_tokens, s->seed, err);
    struct grammar *g = NULL;
    if (rc == STATUS_OK)
        rc = grammar_open(&g, &corpus_source, err);
    struct corpus_row_loss on_rows;
    if (rc == STATUS_OK)
        rc = corpus_row_loss(&on_rows, g, 256, 1000, s->seed, err);
    if (rc == STATUS_OK) {
        struct grammar_entropy e = grammar_entropy(g);
        printf("%s: stories of %.0f tokens, %" PRIu64 " tokens to train on, %" PRIu64
               " to validate\nA perfect model's loss: %.4f, seeing every story from its start; "
               "%.4f on rows of 256 tokens\n",
               prefix, e.tokens, s->story_tokens - val, val, e.nats / e.tokens, on_rows.mean);
    }
    grammar_close(g);
    return rc;
}

int main(int argc, char **argv)
{
    struct error err = {0};
    struct settings s = {.val_fraction = 0.1,
                         .shard_tokens = 100 * 1000 * 1000,
                         .seed = 1337,
                         .story_tokens = CORPUS_TOKENS,
                         .inputs = calloc((size_t)argc, sizeof *s.inputs)};
    int rc = s.inputs ? parse_command_line(&s, argc, argv, &err)
                      : error_set(&err, STATUS_FAIL, "no memory for %d arguments", argc);
    if (rc == STATUS_OK && s.help)
        fputs(usage, stdout);
    else if (rc == STATUS_OK && s.decode)
        rc = decode_inputs(&s, &err);
    else if (rc == STATUS_OK && s.stories)
        rc = make_stories(&s, &err);
    else if (rc == STATUS_OK)
        rc = encode_inputs(&s, &err);
    if (rc == STATUS_OK && fflush(stdout))
        rc = error_set(&err, STATUS_FAIL, "stdout: %s", strerror(errno));
    if (rc != STATUS_OK)
        fprintf(stderr, "tokenize: %s\n", err.text);
    free(s.inputs);
    return rc;
}
