// Tests of data/tokenizer.c: GPT-2's tokens exactly, every byte back, every refusal.
#include "data/tokenizer.h"
#include "test/scratch.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static struct error err;
static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static void must(int rc)
{
    if (rc != STATUS_OK)
        fail_msg("%s", err.text);
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

// GPT-2's tokenizer, or a skipped test.
static struct tokenizer *gpt2(void)
{
    const char *path = shared_file("encoder.json");
    if (!path)
        skip();
    char dir[PATH_MAX];
    snprintf(dir, sizeof dir, "%.*s", (int)(strrchr(path, '/') - path), path);
    struct tokenizer *t;
    must(tokenizer_gpt2(&t, dir, &err));
    return t;
}

static struct tokens encoded(const struct tokenizer *t, const void *text, size_t n, bool special)
{
    struct encoder *e;
    struct tokens tokens = {0};
    must(encoder_open(&e, t, &err));
    must(encode(e, text, n, special, &tokens, &err));
    encoder_close(e);
    return tokens;
}

// Defines the tests NAME_bytes and NAME_gpt2, which call check(tokenizer).
#define FOR_BOTH(name, check)                                                                      \
    static void name##_bytes(void **state)                                                         \
    {                                                                                              \
        (void)state;                                                                               \
        struct tokenizer *t;                                                                       \
        must(tokenizer_bytes(&t, &err));                                                           \
        check(t);                                                                                  \
        tokenizer_free(t);                                                                         \
    }                                                                                              \
    static void name##_gpt2(void **state)                                                          \
    {                                                                                              \
        (void)state;                                                                               \
        struct tokenizer *t = gpt2();                                                              \
        check(t);                                                                                  \
        tokenizer_free(t);                                                                         \
    }

static void assert_tokens(struct tokens a, const uint32_t *ids, size_t n)
{
    assert_int_equal(a.n, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(a.ids[i], ids[i]);
}

static void assert_decodes_to(const struct tokenizer *t, struct tokens tokens,
                              const unsigned char *text, size_t n)
{
    size_t at = 0;
    for (size_t i = 0; i < tokens.n; i++) {
        size_t len;
        const unsigned char *bytes = tokenizer_decode(t, tokens.ids[i], &len);
        assert_non_null(bytes);
        assert_true(len > 0 && at + len <= n);
        assert_memory_equal(bytes, text + at, len);
        at += len;
    }
    assert_int_equal(at, n);
}

// ---- texts that look for trouble ----

static size_t put_utf8(unsigned char *out, uint32_t c)
{
    if (c < 0x80)
        return out[0] = (unsigned char)c, 1;
    if (c < 0x800)
        return out[0] = (unsigned char)(0xc0 | c >> 6), out[1] = 0x80 | (c & 63), 2;
    if (c < 0x10000)
        return out[0] = (unsigned char)(0xe0 | c >> 12), out[1] = 0x80 | (c >> 6 & 63),
               out[2] = 0x80 | (c & 63), 3;
    out[0] = (unsigned char)(0xf0 | c >> 18);
    out[1] = 0x80 | (c >> 12 & 63);
    out[2] = 0x80 | (c >> 6 & 63);
    out[3] = 0x80 | (c & 63);
    return 4;
}

// Letters, white space of all kinds, contractions, any character, invalid bytes, end-of-text.
static size_t hostile_text(unsigned char *out, size_t max)
{
    static const uint32_t spaces[] = {' ',    ' ',    '\n',   '\t',   '\r',   0x0b,   0x1c,
                                      0x1f,   0x85,   0xa0,   0x1680, 0x180e, 0x2000, 0x2028,
                                      0x2029, 0x202f, 0x205f, 0x3000, 0xfeff, 0x200b};
    static const char *const words[] = {
        "'s",       "'re", "'LL",  "'",        "<|endoftext|>", "<|endof",      "text|>",
        " the",     "12",  "\xff", "\xe4\xb8", "\xc0\x80",      "\xed\xa0\x80", "\xf4\x90\x80\x80",
        "\xe2\x82", "!?",  "   "};
    size_t n = 0;
    while (n + 16 < max) {
        switch (random_below(6)) {
        case 0:
            n += put_utf8(out + n, spaces[random_below(sizeof spaces / sizeof *spaces)]);
            break;
        case 1:
            n += put_utf8(out + n, random_below(0x110000)); // surrogates too
            break;
        case 2:
            n += put_utf8(out + n, random_below(0x3100));
            break;
        case 3: {
            const char *word = words[random_below(sizeof words / sizeof *words)];
            memcpy(out + n, word, strlen(word));
            n += strlen(word);
            break;
        }
        case 4:
            out[n++] = (unsigned char)random_below(256);
            break;
        default:
            for (uint32_t k = random_below(9); k > 0; k--)
                out[n++] = (unsigned char)('a' + random_below(26));
        }
    }
    return n;
}

// ---- the bytes ----

static void bytes_are_their_own_tokens(void **state)
{
    (void)state;
    struct tokenizer *t;
    must(tokenizer_bytes(&t, &err));
    assert_int_equal(tokenizer_vocab(t), 257);
    assert_int_equal(tokenizer_eot(t), 256);
    unsigned char all[256];
    for (int i = 0; i < 256; i++)
        all[i] = (unsigned char)i;
    struct tokens tokens = encoded(t, all, 256, true);
    assert_int_equal(tokens.n, 256);
    for (uint32_t i = 0; i < 256; i++)
        assert_int_equal(tokens.ids[i], i);
    assert_decodes_to(t, tokens, all, 256);
    free(tokens.ids);
    size_t len;
    assert_memory_equal(tokenizer_decode(t, 256, &len), "<|endoftext|>", 13);
    assert_int_equal(len, 13);
    assert_null(tokenizer_decode(t, 257, &len));
    tokenizer_free(t);
}

static void end_of_text_is_a_token_only_if_asked_for(void **state)
{
    (void)state;
    struct tokenizer *t;
    must(tokenizer_bytes(&t, &err));
    static const char text[] = "a<|endoftext|><|endoftext|<|endoftext|>";
    static const uint32_t special[] = {'a', 256, '<', '|', 'e', 'n', 'd', 'o',
                                       'f', 't', 'e', 'x', 't', '|', 256};
    struct tokens tokens = encoded(t, text, sizeof text - 1, true);
    assert_tokens(tokens, special, sizeof special / sizeof *special);
    free(tokens.ids);
    tokens = encoded(t, text, sizeof text - 1, false);
    assert_int_equal(tokens.n, sizeof text - 1);
    free(tokens.ids);
    tokenizer_free(t);
}

// ---- GPT-2 ----

static void tinyshakespeare_is_338025_tokens(void **state)
{
    (void)state;
    struct tokenizer *t = gpt2();
    const char *path = shared_file("tinyshakespeare.txt");
    if (!path) {
        tokenizer_free(t);
        skip();
    }
    assert_int_equal(tokenizer_vocab(t), GPT2_VOCAB);
    assert_int_equal(tokenizer_eot(t), GPT2_EOT);
    size_t n;
    unsigned char *text = scratch_read(path, &n);
    static const uint32_t first[] = {5962, 22307, 25, 198, 8421};
    struct tokens tokens = encoded(t, text, n, false);
    assert_int_equal(tokens.n, 338025);
    assert_memory_equal(tokens.ids, first, sizeof first);
    assert_decodes_to(t, tokens, text, n);
    free(tokens.ids);
    size_t cut = (size_t)(0.9 * (double)n); // all of it is ASCII
    tokens = encoded(t, text, cut, false);
    assert_int_equal(tokens.n, 301966);
    free(tokens.ids);
    tokens = encoded(t, text + cut, n - cut, false);
    assert_int_equal(tokens.n, 36059);
    free(tokens.ids);
    free(text);
    tokenizer_free(t);
}

// What two independent implementations (the `regex` and `tiktoken` packages) agree on.
#define TEXT(s) (s), sizeof(s) - 1
static const struct {
    const char *text;
    size_t bytes;
    size_t n;
    uint32_t ids[80];
} known[] = {
    {TEXT("Hello, world! I've got 3 dogs, they're 12's"),
     14,
     {15496, 11, 995, 0, 314, 1053, 1392, 513, 6844, 11, 484, 821, 1105, 338}},
    {TEXT("a"
          "\xc2\x85"
          "b"
          "\xc2\xa0"
          "c "
          "\xc2\xa0"
          "d"),
     9,
     {64, 126, 227, 65, 1849, 66, 220, 1849, 67}},
    {TEXT("x"
          "\xe1\xa0\x8e"
          "y"
          "\xe1\xa0\x8e"
          " z"),
     9,
     {87, 157, 254, 236, 88, 157, 254, 236, 1976}},
    {TEXT("tabs"
          "\t\t"
          "and"
          "\x1c\x1d"
          " "
          "\x1e\x1f"
          "separators"
          "\x0b\x0c"
          "."),
     15,
     {8658, 82, 197, 197, 392, 216, 217, 220, 218, 219, 25512, 2024, 199, 200, 13}},
    {TEXT("  leading and trailing  "), 6, {220, 3756, 290, 25462, 220, 220}},
    {TEXT("line"
          "\x0d\n\x0d\n"
          "  next"
          "\n"
          ""),
     8,
     {1370, 201, 198, 201, 198, 220, 1306, 198}},
    {TEXT(""
          "\xe3\x80\x80\xe3\x80\x80\xe4\xb8\xad\xe6\x96\x87\xe3\x80\x82"
          " "
          "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e\xe3\x81\xa7\xe3\x81\x99"
          ""),
     17,
     {5099, 222, 5099, 222, 40792, 23877, 229, 16764, 10545, 245, 98, 17312, 105, 45739, 252, 30640,
      33623}},
    {TEXT("na"
          "\xc3\xaf"
          "ve caf"
          "\xc3\xa9"
          " e"
          "\xcc\x81"
          " "
          "\xc7\x85"
          " "
          "\xc3\x9f"
          ""),
     11,
     {2616, 38776, 40304, 304, 136, 223, 220, 131, 227, 6184, 253}},
    {TEXT(""
          "\xe2\x85\xa7"
          " "
          "\xc2\xb2\xc2\xbd"
          " "
          "\xd9\xa3\xd9\xa4"
          " x"
          "\xc2\xb2"
          ""),
     12,
     {158, 227, 100, 1587, 110, 23141, 18923, 96, 149, 97, 2124, 31185}},
    {TEXT(""
          "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7"
          " "
          "\xf0\x9f\x98\x80"
          ""),
     12,
     {41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 30325, 222}},
    {TEXT(""
          "\xef\xbb\xbf"
          "bom"
          "\xe2\x80\x8b"
          "zero"
          "\xe2\x80\xa8"
          "line"
          "\xe2\x80\xa9"
          "par"
          "\xe2\x80\xaf"
          "nn"
          "\xe2\x81\x9f"
          "mm"),
     19,
     {171, 119, 123, 65, 296, 9525, 22570, 447, 101, 1370, 447, 102, 1845, 447, 107, 20471, 46256,
      253, 3020}},
    {TEXT("'S 'LL 're're ''s it''s I'M"),
     15,
     {6, 50, 705, 3069, 705, 260, 821, 10148, 82, 340, 7061, 82, 314, 6, 44}},
    {TEXT(""), 0, {0}},
    {TEXT(""
          "\xe1\x9a\x80\xe2\x80\x83"
          " "
          "\xe2\x80\x83"
          "x"),
     9,
     {157, 248, 222, 447, 225, 220, 447, 225, 87}},
    {TEXT("antidisestablishmentarianism aaaaaaaaaaaaaaaaaaaaaaaaa"),
     12,
     {415, 29207, 44390, 3699, 1042, 257, 24794, 24794, 24794, 24794, 24794, 24794}},
    {TEXT("<|endoftext|> is text"), 9, {27, 91, 437, 1659, 5239, 91, 29, 318, 2420}},
    {TEXT(""
          "\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80\x00\x7f"
          ""),
     11,
     {176, 237, 123, 123, 169, 253, 123, 29773, 222, 188, 221}},
};

static void hostile_unicode_gives_the_known_tokens(void **state)
{
    (void)state;
    struct tokenizer *t = gpt2();
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        struct tokens tokens = encoded(t, known[i].text, known[i].bytes, false);
        assert_tokens(tokens, known[i].ids, known[i].n);
        free(tokens.ids);
    }
    tokenizer_free(t);
}

// BPE as its definition says, from vocab.bpe: merge the pair of lowest rank wherever it occurs,
// again and again. For words of ASCII letters, which GPT-2 spells as themselves.
struct naive {
    json_t *rank, *id;
};

static void naive_bpe(const struct naive *naive, const char *word, struct tokens *out)
{
    char parts[256][260], pair[530];
    size_t n = strlen(word);
    for (size_t i = 0; i < n; i++)
        snprintf(parts[i], sizeof parts[i], "%c", word[i]);
    for (;;) {
        json_int_t best = -1;
        char left[260] = "", right[260] = "";
        for (size_t i = 0; i + 1 < n; i++) {
            strcat(strcat(strcpy(pair, parts[i]), " "), parts[i + 1]);
            json_t *rank = json_object_get(naive->rank, pair);
            if (rank && (best < 0 || json_integer_value(rank) < best)) {
                best = json_integer_value(rank);
                strcpy(left, parts[i]);
                strcpy(right, parts[i + 1]);
            }
        }
        if (best < 0)
            break;
        size_t kept = 0;
        for (size_t i = 0; i < n; i++, kept++) {
            bool hit = i + 1 < n && strcmp(parts[i], left) == 0 && strcmp(parts[i + 1], right) == 0;
            if (kept != i)
                memmove(parts[kept], parts[i], strlen(parts[i]) + 1);
            if (hit)
                strcat(parts[kept], parts[++i]);
        }
        n = kept;
    }
    for (size_t i = 0; i < n; i++)
        out->ids[out->n++] = (uint32_t)json_integer_value(json_object_get(naive->id, parts[i]));
}

static json_t *read_ranks(const char *path)
{
    size_t n;
    char *text = scratch_read(path, &n);
    json_t *ranks = json_object();
    int rank = 0;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        if (rank++ > 0) // the first line is a version
            assert_int_equal(json_object_set_new(ranks, line, json_integer(rank)), 0);
    }
    free(text);
    return ranks;
}

static void merges_agree_with_the_definition(void **state)
{
    (void)state;
    struct tokenizer *t = gpt2();
    struct naive naive = {read_ranks(shared_file("vocab.bpe")),
                          json_load_file(shared_file("encoder.json"), 0, NULL)};
    assert_int_equal(json_object_size(naive.rank), 50000);
    for (int round = 0; round < 3000; round++) {
        char word[201];
        uint32_t n = 1 + random_below(round % 10 ? 24 : 200), letters = round % 3 ? 26 : 2;
        for (uint32_t i = 0; i < n; i++) { // likely letters, or runs of two
            word[i] = round % 3 == 1
                          ? "etaoinshrdlcumwfgypbvkjxqz"[random_below(1 + random_below(26))]
                          : (char)('a' + random_below(letters));
        }
        word[n] = 0;
        uint32_t ids[256];
        struct tokens expected = {.ids = ids}, found = encoded(t, word, n, false);
        naive_bpe(&naive, word, &expected);
        assert_tokens(found, ids, expected.n);
        free(found.ids);
    }
    json_decref(naive.rank);
    json_decref(naive.id);
    tokenizer_free(t);
}

static void check_round_trip(const struct tokenizer *t)
{
    static unsigned char text[5000];
    struct encoder *e;
    struct tokens tokens = {0};
    must(encoder_open(&e, t, &err));
    for (int round = 0; round < 400; round++) {
        size_t n = round % 4 ? hostile_text(text, 17 + random_below(4900)) : random_below(3000);
        for (size_t i = 0; round % 4 == 0 && i < n; i++)
            text[i] = (unsigned char)random_below(256);
        tokens.n = 0;
        must(encode(e, text, n, round % 2, &tokens, &err));
        assert_decodes_to(t, tokens, text, n);
    }
    free(tokens.ids);
    encoder_close(e);
}
FOR_BOTH(decoding_gives_back_any, check_round_trip)

// Quadratic merging would take hours here.
static void a_megabyte_of_one_letter_is_no_attack(void **state)
{
    (void)state;
    struct tokenizer *t = gpt2();
    enum { N = 1 << 20 };
    unsigned char *text = malloc(N);
    static const unsigned char fill[] = {'a', ' ', '\n', '!', '1', 0xff, 0x80};
    time_t start = time(NULL);
    for (size_t i = 0; i < sizeof fill; i++) {
        memset(text, fill[i], N);
        struct tokens tokens = encoded(t, text, N, true);
        assert_decodes_to(t, tokens, text, N);
        free(tokens.ids);
    }
    assert_true(time(NULL) - start < 120);
    free(text);
    tokenizer_free(t);
}

static void check_cuts(const struct tokenizer *t)
{
    static unsigned char text[600];
    int cuts = 0;
    struct encoder *e;
    struct tokens whole = {0}, parts = {0};
    must(encoder_open(&e, t, &err));
    for (int round = 0; round < 3000; round++) {
        size_t n = hostile_text(text, 17 + random_below(580)), seen = random_below((uint32_t)n + 1);
        size_t cut = tokenizer_cut(t, text, seen);
        assert_true(cut <= seen);
        cuts += cut > 0 && cut < n;
        whole.n = parts.n = 0;
        must(encode(e, text, n, true, &whole, &err));
        must(encode(e, text, cut, true, &parts, &err));
        must(encode(e, text + cut, n - cut, true, &parts, &err));
        assert_tokens(parts, whole.ids, whole.n);
    }
    free(whole.ids);
    free(parts.ids);
    encoder_close(e);
    assert_true(cuts > 1500);
}
FOR_BOTH(text_may_be_cut_where_it_says, check_cuts)

// A vocabulary whose merges join each white space character with a space behind it: a cut between
// the two shows.
static void no_cut_within_white_space(void **state)
{
    (void)state;
    static const uint32_t spaces[] = {'\t',   '\n',   0x0b,   '\r',   ' ',    0x85,
                                      0xa0,   0x1680, 0x2000, 0x2005, 0x200a, 0x2028,
                                      0x2029, 0x202f, 0x205f, 0x3000};
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        unsigned char file[4096], *p = file + 1024, text[16] = "a";
        size_t n = put_utf8(text + 1, spaces[i]);
        memcpy(text + 1 + n, "  x", 3);
        int32_t header[256] = {20240328, 2, 256 + (int32_t)n + 1, 256 + (int32_t)n};
        memcpy(file, header, sizeof header);
        for (int byte = 0; byte < 256; byte++) {
            *p++ = 1;
            *p++ = (unsigned char)byte;
        }
        for (size_t len = 2; len <= n + 1; len++) { // the character's bytes, then a space
            *p++ = (unsigned char)len;
            memcpy(p, text + 1, len);
            p += len;
        }
        memcpy(p, "\5<end>", 6);
        scratch_write("t.bin", file, (size_t)(p + 6 - file));
        struct tokenizer *t;
        must(tokenizer_read(&t, scratch("t.bin"), &err));
        struct tokens whole = encoded(t, text, n + 4, true);
        assert_int_equal(whole.n, 4); // a, (space space), space, x
        for (size_t len = 0; len <= n + 4; len++) {
            size_t cut = tokenizer_cut(t, text, len);
            struct tokens a = encoded(t, text, cut, true);
            struct tokens b = encoded(t, text + cut, n + 4 - cut, true);
            assert_int_equal(a.n + b.n, 4);
            free(a.ids);
            free(b.ids);
        }
        free(whole.ids);
        tokenizer_free(t);
    }
}

// ---- files ----

static void check_file(const struct tokenizer *t)
{
    static unsigned char text[3000];
    struct tokenizer *back;
    must(tokenizer_write(t, scratch("t.bin"), &err));
    must(tokenizer_read(&back, scratch("t.bin"), &err));
    assert_int_equal(tokenizer_vocab(back), tokenizer_vocab(t));
    assert_int_equal(tokenizer_eot(back), tokenizer_eot(t));
    for (uint32_t id = 0; id < tokenizer_vocab(back); id++) {
        size_t n, m;
        const unsigned char *a = tokenizer_decode(t, id, &n);
        const unsigned char *b = tokenizer_decode(back, id, &m);
        assert_int_equal(n, m);
        assert_memory_equal(a, b, n);
    }
    for (int round = 0; round < 50; round++) {
        size_t n = hostile_text(text, sizeof text);
        struct tokens a = encoded(t, text, n, true), b = encoded(back, text, n, true);
        assert_tokens(a, b.ids, b.n);
        free(a.ids);
        free(b.ids);
    }
    tokenizer_free(back);
}
FOR_BOTH(a_written_file_reads_back, check_file)

// A tokenizer file of the given tokens; returns its size.
static size_t make_file(char *file, int32_t vocab, int32_t eot, const char *const *tokens)
{
    int32_t header[256] = {20240328, 2, vocab, eot};
    memcpy(file, header, sizeof header);
    size_t n = sizeof header;
    for (int i = 0; tokens[i]; i++) {
        file[n++] = (char)strlen(tokens[i]);
        memcpy(file + n, tokens[i], strlen(tokens[i]));
        n += strlen(tokens[i]);
    }
    return n;
}

static void reading_fails_with(const char *file, size_t n, const char *const words[])
{
    scratch_write("bad.bin", file, n);
    struct tokenizer *t;
    int rc = tokenizer_read(&t, scratch("bad.bin"), &err);
    assert_null(t);
    assert_error(rc, words);
}

static void bad_files_are_named_and_explained(void **state)
{
    (void)state;
    static char file[4096];
    const char *const tokens[] = {"a", "b", "ab", "<end>", NULL};
    size_t n = make_file(file, 4, 3, tokens);
    static const struct {
        int field;
        int32_t value;
        const char *words[4];
    } headers[] = {
        {0, 7, {"bad.bin", "magic 7", "20240328"}},
        {0, 20240520, {"bad.bin", "a token shard"}},
        {1, 1, {"bad.bin", "version 1", "expected 2"}},
        {2, 0, {"bad.bin", "0 tokens"}},
        {2, -5, {"bad.bin", "-5 tokens"}},
        {2, 5, {"bad.bin", "token 4 of 5"}},
        {2, INT32_MAX, {"bad.bin", "tokens"}},
        {3, 4, {"bad.bin", "end-of-text 4"}},
        {3, -1, {"bad.bin", "end-of-text -1"}},
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        int32_t good;
        memcpy(&good, file + 4 * headers[i].field, 4);
        memcpy(file + 4 * headers[i].field, &headers[i].value, 4);
        const char *words[5] = {NULL};
        memcpy(words, headers[i].words, sizeof headers[i].words);
        reading_fails_with(file, n, words);
        memcpy(file + 4 * headers[i].field, &good, 4);
    }
    reading_fails_with(file, 0, WORDS("bad.bin", "0 bytes"));
    reading_fails_with(file, 1023, WORDS("bad.bin", "1023 bytes"));
    reading_fails_with(file, n - 1, WORDS("bad.bin", "token 3 of 4"));
    reading_fails_with(file, n + 1, WORDS("bad.bin", "1 bytes behind"));
    file[1024] = 0;
    reading_fails_with(file, n, WORDS("bad.bin", "token 0 is empty"));
    struct tokenizer *t;
    assert_error(tokenizer_read(&t, scratch("none.bin"), &err), WORDS("none.bin"));
    assert_error(tokenizer_gpt2(&t, scratch("none"), &err),
                 WORDS("none/encoder.json", "scripts/get_data.sh"));
}

static void a_vocabulary_without_some_bytes_says_so(void **state)
{
    (void)state;
    static char file[4096];
    const char *const tokens[] = {"a", "b", "ab", "<end>", NULL};
    scratch_write("t.bin", file, make_file(file, 4, 3, tokens));
    struct tokenizer *t;
    must(tokenizer_read(&t, scratch("t.bin"), &err));
    struct tokens out = encoded(t, "abba<end>", 9, true);
    assert_tokens(out, (const uint32_t[]){2, 1, 0, 3}, 4);
    free(out.ids);
    struct encoder *e;
    out = (struct tokens){0};
    must(encoder_open(&e, t, &err));
    assert_error(encode(e, "abc", 3, true, &out, &err), WORDS("0x63"));
    free(out.ids);
    encoder_close(e);
    tokenizer_free(t);
}

// Copies GPT-2's two files into the scratch folder, vocab.bpe through `change`.
static void changed_merges_fail_with(void (*change)(char *text, size_t n),
                                     const char *const words[])
{
    size_t n;
    char *text = scratch_read(shared_file("encoder.json"), &n);
    scratch_write("encoder.json", text, n);
    free(text);
    text = scratch_read(shared_file("vocab.bpe"), &n);
    change(text, n);
    scratch_write("vocab.bpe", text, strlen(text));
    free(text);
    char dir[PATH_MAX];
    snprintf(dir, sizeof dir, "%s", scratch(""));
    struct tokenizer *t;
    int rc = tokenizer_gpt2(&t, dir, &err);
    assert_null(t);
    assert_error(rc, words);
}

static void cut_short(char *text, size_t n)
{
    *strchr(text + n / 2, '\n') = 0;
}

static void swap_lines(char *text, size_t n)
{
    (void)n;
    char *h = strstr(text, "\nh e\n"), *i = strstr(text, "\ni n\n"); // two early merges
    memcpy(h, "\ni n\n", 5);
    memcpy(i, "\nh e\n", 5);
}

static void change_line(char *text, size_t n)
{
    (void)n;
    memcpy(strstr(text, "\nh e\n"), "\nx q\n", 5);
}

static void merges_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    tokenizer_free(gpt2()); // or skip
    changed_merges_fail_with(cut_short, WORDS("vocab.bpe", "merges", "50000"));
    changed_merges_fail_with(swap_lines, WORDS("vocab.bpe", "merge order"));
    changed_merges_fail_with(change_line, WORDS("vocab.bpe", "line 4", "\"xq\""));
}

static void the_tokenizer_beside_shards_is_found(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        uint32_t vocab; // 0: none; 1: refused
    } cases[] = {
        {"mine_train*.bin", 3},
        {"mine_val_000000.bin", 3},
        {"mine_train_000001.bin", 3},
        {"mine_*.bin", 3},
        {"mine.bin", 3},
        {"my_train_val*.bin", 4},
        {"other_train*.bin", 2},
        {"*.bin", 2},
        {"m*_train*.bin", 1},
        {"broken_train_000000.bin", 1},
    };
    static char file[4096];
    const char *const tokens[] = {"a", "b", "c", "d", NULL};
    const char *const fewer[] = {"a", "b", "c", NULL}, *const two[] = {"a", "b", NULL};
    struct tokenizer *t;
    scratch_clear();
    must(tokenizer_beside(&t, scratch("mine_train*.bin"), &err));
    assert_null(t);
    scratch_write("mine_tokenizer.bin", file, make_file(file, 3, 0, fewer));
    scratch_write("my_train_tokenizer.bin", file, make_file(file, 4, 0, tokens));
    scratch_write("broken_tokenizer.bin", "x", 1);
    must(tokenizer_beside(&t, scratch("other_train*.bin"), &err));
    assert_null(t);
    scratch_write("tokenizer.bin", file, make_file(file, 2, 0, two));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int rc = tokenizer_beside(&t, scratch(cases[i].pattern), &err);
        assert_int_equal(rc, cases[i].vocab == 1 ? STATUS_FAIL : STATUS_OK);
        if (rc == STATUS_OK && (!t || tokenizer_vocab(t) != cases[i].vocab))
            fail_msg("%s: found %u tokens", cases[i].pattern, t ? tokenizer_vocab(t) : 0);
        tokenizer_free(t);
    }
}

int main(void)
{
    random_state = scratch_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_their_own_tokens),
        cmocka_unit_test(end_of_text_is_a_token_only_if_asked_for),
        cmocka_unit_test(tinyshakespeare_is_338025_tokens),
        cmocka_unit_test(hostile_unicode_gives_the_known_tokens),
        cmocka_unit_test(merges_agree_with_the_definition),
        cmocka_unit_test(decoding_gives_back_any_bytes),
        cmocka_unit_test(decoding_gives_back_any_gpt2),
        cmocka_unit_test(a_megabyte_of_one_letter_is_no_attack),
        cmocka_unit_test(text_may_be_cut_where_it_says_bytes),
        cmocka_unit_test(text_may_be_cut_where_it_says_gpt2),
        cmocka_unit_test(no_cut_within_white_space),
        cmocka_unit_test(a_written_file_reads_back_bytes),
        cmocka_unit_test(a_written_file_reads_back_gpt2),
        cmocka_unit_test(bad_files_are_named_and_explained),
        cmocka_unit_test(a_vocabulary_without_some_bytes_says_so),
        cmocka_unit_test(merges_that_do_not_fit_are_refused),
        cmocka_unit_test(the_tokenizer_beside_shards_is_found),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
