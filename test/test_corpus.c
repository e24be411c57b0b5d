// Tests of data/grammar.c and data/corpus.c: that the entropy which the README promises is exact.
#include "data/corpus.h"
#include "data/shards.h"
#include "test/scratch.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static struct error err;

static struct grammar *must_open(const struct grammar_source *source)
{
    struct grammar *g;
    if (grammar_open(&g, source, &err) != STATUS_OK)
        fail_msg("%s", err.text);
    return g;
}

// ---- a grammar small enough to enumerate ----

static const char *const tiny_names[] = {"Al|he", "Bo|he", "Cy|she", NULL};
static const struct grammar_slot tiny_slots[] = {
    {"a", "name|it", tiny_names, NULL},
    {"b", "name|it", tiny_names, "a"},
    {"c", "word", LIST("x", "yy"), NULL},
    {NULL, NULL, NULL, NULL},
};
static const struct grammar_rule tiny_rules[] = {
    {"story", LIST("{a.name}<middle>.", "Q{a.name}{c.word}<tail>[a.it]!")},
    {"middle", LIST(" met {b.name}<tail>[b.it][a.it]", ",{c.word}{c.word}[c.word]")},
    {"tail", LIST("-", "+{c.word}")},
    {NULL, NULL},
};
static const struct grammar_source tiny = {tiny_rules, tiny_slots};

struct text {
    char text[64];
    size_t n;
    double nats;
};

static int by_text(const void *a, const void *b)
{
    return strcmp(((const struct text *)a)->text, ((const struct text *)b)->text);
}

// Draws until every text has come up; returns the distinct ones.
static size_t all_texts(const struct grammar *g, struct text *distinct, size_t max)
{
    enum { DRAWS = 200000 };
    struct text *drawn = calloc(DRAWS, sizeof *drawn);
    uint64_t random = 5;
    for (int i = 0; i < DRAWS; i++) {
        drawn[i].n = grammar_draw(g, &random, drawn[i].text, &drawn[i].nats);
        drawn[i].text[drawn[i].n] = 0;
    }
    qsort(drawn, DRAWS, sizeof *drawn, by_text);
    size_t n = 0;
    for (int i = 0; i < DRAWS; i++) {
        if (n > 0 && strcmp(distinct[n - 1].text, drawn[i].text) == 0) {
            assert_true(distinct[n - 1].nats == drawn[i].nats); // one derivation
            continue;
        }
        assert_true(n < max);
        distinct[n++] = drawn[i];
    }
    free(drawn);
    return n;
}

static void a_tiny_grammar_has_the_entropy_of_its_enumeration(void **state)
{
    (void)state;
    struct grammar *g = must_open(&tiny);
    static struct text texts[1000];
    size_t n = all_texts(g, texts, 1000);
    assert_int_equal(n, 3 * (2 * 3 + 4) + 3 * 2 * 3); // counted by hand
    double sum = 0, nats = 0, tokens = 0;
    size_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        double p = exp(-texts[i].nats);
        sum += p;
        nats += p * texts[i].nats;
        tokens += p * (double)(texts[i].n + 1);
        longest = texts[i].n + 1 > longest ? texts[i].n + 1 : longest;
    }
    struct grammar_entropy e = grammar_entropy(g);
    assert_true(fabs(sum - 1) < 1e-12); // so no text is missing, and none counted twice
    assert_true(fabs(nats - e.nats) < 1e-12);
    assert_true(fabs(tokens - e.tokens) < 1e-12);
    assert_true(longest <= e.tokens_max);
    grammar_close(g);
}

// The probabilities of all sequences of n tokens add up to 1, and each is the sum of its
// continuations: so grammar_nats() is a distribution over rows that begin anywhere.
static double sum_of_rows(const struct grammar *g, uint16_t *row, size_t at, size_t n)
{
    double own = at > 0 ? exp(-grammar_nats(g, row, at)) : 1;
    if (own == 0 || at == n)
        return own;
    double sum = 0;
    for (const char *c = "AlBoCyhes QmetxY,y.!+-Z"; *c; c++) {
        row[at] = (unsigned char)*c;
        if (memchr("AlBoCyhes QmetxY,y.!+-Z", *c, 23) == c) // once per character
            sum += sum_of_rows(g, row, at + 1, n);
    }
    row[at] = GRAMMAR_END;
    sum += sum_of_rows(g, row, at + 1, n);
    if (fabs(sum - own) > 1e-9)
        fail_msg("continuations of %zu tokens: %.12f of %.12f", at, sum, own);
    return sum;
}

static void probabilities_of_rows_add_up(void **state)
{
    (void)state;
    struct grammar *g = must_open(&tiny);
    uint16_t row[12];
    assert_true(fabs(sum_of_rows(g, row, 0, 12) - 1) < 1e-9);
    grammar_close(g);
}

// The same probabilities, counted: rows of 3 tokens of a long text against grammar_nats().
static void probabilities_of_rows_are_frequencies(void **state)
{
    (void)state;
    enum { TOKENS = 2000000 };
    struct grammar *g = must_open(&tiny);
    uint16_t *tokens = malloc((TOKENS + 100) * sizeof *tokens);
    uint64_t random = 77;
    size_t n = 0;
    while (n < TOKENS) {
        char text[64];
        size_t len = grammar_draw(g, &random, text, NULL);
        tokens[n++] = GRAMMAR_END;
        for (size_t i = 0; i < len; i++)
            tokens[n++] = (unsigned char)text[i];
    }
    for (size_t probe = 1000; probe < 1040; probe++) {
        size_t hits = 0;
        for (size_t i = 0; i + 3 < n; i++)
            hits += memcmp(tokens + i, tokens + probe, 3 * sizeof *tokens) == 0;
        double p = exp(-grammar_nats(g, tokens + probe, 3)), found = (double)hits / (double)n;
        if (fabs(found - p) > 8 * sqrt(p / (double)n))
            fail_msg("row at %zu: probability %.6f, frequency %.6f", probe, p, found);
    }
    free(tokens);
    grammar_close(g);
}

static void grammars_that_prove_nothing_are_refused(void **state)
{
    (void)state;
    const struct {
        const char *const *story, *const *part;
        const char *words;
    } cases[] = {
        {LIST("a", "ab"), LIST("p"), "cannot be told apart"},
        {LIST("<part>x", "pq"), LIST("p", "r"), "cannot be told apart"},
        {LIST("{prefix.word}"), LIST("p"), "cannot be told apart"},
        {LIST("[c.word]"), LIST("p"), "may not have been drawn"},
        {LIST("<part>[c.word]"), LIST("{c.word}", "z"), "may not have been drawn"},
        {LIST("{b.name}"), LIST("p"), "must be unlike"},
        {LIST("{a.name}{b.name}{a.name}"), LIST("p"), "drawn twice"},
        {LIST("<part>"), LIST("<story>"), "recursive"},
        {LIST("<nothing>"), LIST("p"), "unknown name"},
        {LIST("{c.nothing}"), LIST("p"), "unknown name"},
        {LIST("a<part"), LIST("p"), "unbalanced"},
        {LIST(""), LIST("p"), "unbalanced"},
        {LIST("a"), LIST("p"), "never used"},
    };
    const struct grammar_slot slots[] = {
        {"a", "name|it", tiny_names, NULL},
        {"b", "name|it", tiny_names, "a"},
        {"c", "word", LIST("x", "yy"), NULL},
        {"prefix", "word", LIST("cat", "caterpillar"), NULL},
        {NULL, NULL, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct grammar_rule rules[] = {
            {"story", cases[i].story}, {"part", cases[i].part}, {NULL, NULL}};
        const struct grammar_source source = {rules, slots};
        struct grammar *g;
        assert_int_equal(grammar_open(&g, &source, &err), STATUS_FAIL);
        assert_null(g);
        if (!strstr(err.text, cases[i].words))
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, err.text, cases[i].words);
    }
}

// ---- the corpus ----

static void stories_have_the_entropy_that_is_claimed(void **state)
{
    (void)state;
    enum { STORIES = 20000 };
    struct grammar *g = must_open(&corpus_source);
    struct grammar_entropy e = grammar_entropy(g);
    char *text = malloc(e.tokens_max);
    uint64_t random = scratch_seed();
    double nats = 0, nats2 = 0, tokens = 0, tokens2 = 0;
    for (int i = 0; i < STORIES; i++) {
        double one;
        double n = (double)grammar_draw(g, &random, text, &one) + 1;
        assert_true(n <= (double)e.tokens_max);
        nats += one / STORIES;
        nats2 += one * one / STORIES;
        tokens += n / STORIES;
        tokens2 += n * n / STORIES;
    }
    double nats_error = sqrt((nats2 - nats * nats) / STORIES);
    double tokens_error = sqrt((tokens2 - tokens * tokens) / STORIES);
    fprintf(stderr, "a story: %.3f nats (drawn: %.3f +- %.3f), %.2f tokens (drawn: %.2f +- %.2f)\n",
            e.nats, nats, nats_error, e.tokens, tokens, tokens_error);
    assert_true(fabs(nats - e.nats) < 6 * nats_error && nats_error < 0.2);
    assert_true(fabs(tokens - e.tokens) < 6 * tokens_error && tokens_error < 2);
    free(text);
    grammar_close(g);
}

// A reader that sums over all derivations of a text finds the probability it was drawn with: there
// is no second derivation.
static void reading_a_story_finds_how_it_was_drawn(void **state)
{
    (void)state;
    struct grammar *g = must_open(&corpus_source);
    size_t max = grammar_entropy(g).tokens_max;
    char *text = malloc(max);
    uint16_t *tokens = malloc(max * sizeof *tokens);
    uint64_t random = scratch_seed();
    for (int i = 0; i < 2000; i++) {
        double drawn;
        size_t n = grammar_draw(g, &random, text, &drawn);
        tokens[0] = GRAMMAR_END;
        for (size_t k = 0; k < n; k++)
            tokens[k + 1] = (unsigned char)text[k];
        assert_true(fabs(grammar_nats_from_start(g, tokens, n + 1) - drawn) < 1e-9);
        tokens[n / 2] = '#';
        assert_true(isinf(grammar_nats_from_start(g, tokens, n + 1)));
    }
    free(text);
    free(tokens);
    grammar_close(g);
}

static void rows_cost_a_fixed_number_of_nats(void **state)
{
    (void)state;
    struct grammar *g = must_open(&corpus_source);
    struct grammar_entropy e = grammar_entropy(g);
    double excess[3];
    for (int i = 0; i < 3; i++) {
        size_t T = (size_t)256 << i;
        struct corpus_row_loss loss;
        assert_int_equal(corpus_row_loss(&loss, g, T, 400, 1, &err), STATUS_OK);
        assert_true(loss.mean > e.nats / e.tokens);
        excess[i] = (loss.mean - e.nats / e.tokens) * (double)T;
        fprintf(stderr, "rows of %zu: %.4f +- %.4f, %.1f nats per row above %.4f per token\n", T,
                loss.mean, loss.standard_error, excess[i], e.nats / e.tokens);
        assert_true(excess[i] > 8 && excess[i] < 20);
    }
    grammar_close(g);
}

static void the_same_seed_gives_the_same_bytes(void **state)
{
    (void)state;
    struct grammar *g = must_open(&corpus_source);
    uint64_t random = 1;
    char *text = malloc(grammar_entropy(g).tokens_max);
    size_t n = grammar_draw(g, &random, text, NULL);
    // A change here changes every user's default corpus, and the loss curves in the documentation.
    static const char start[] = "Far away, in a striped tent, lived a hungry camel. The name of ";
    assert_true(n > sizeof start);
    assert_memory_equal(text, start, sizeof start - 1);
    free(text);
    grammar_close(g);
    scratch_clear();
    for (int i = 0; i < 3; i++) {
        const char *prefix = scratch(i == 0 ? "a" : i == 1 ? "b" : "c");
        assert_int_equal(corpus_write(prefix, 20000, 5000, 1 << 20, i == 2 ? 8 : 7, &err), 0);
    }
    size_t sizes[3];
    char *files[3] = {scratch_read("a_train_000000.bin", &sizes[0]),
                      scratch_read("b_train_000000.bin", &sizes[1]),
                      scratch_read("c_train_000000.bin", &sizes[2])};
    assert_int_equal(sizes[0], sizes[1]);
    assert_memory_equal(files[0], files[1], sizes[0]);
    assert_memory_not_equal(files[0], files[2], 4000);
    for (int i = 0; i < 3; i++)
        free(files[i]);
}

static int by_pointer(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Reads a shard of stories; returns them as strings.
static size_t read_stories(const char *name, char **stories, size_t max)
{
    struct shard_reader *r;
    assert_int_equal(shard_reader_open(&r, scratch(name), &err), STATUS_OK);
    uint32_t *ids = malloc(1000000 * sizeof *ids);
    size_t n, found = 0, at = 0;
    assert_int_equal(shard_read(r, ids, 1000000, &n, &err), STATUS_OK);
    shard_reader_close(r);
    assert_true(n < 1000000 && ids[0] == GRAMMAR_END && ids[n - 1] == '\n');
    for (size_t i = 0; i < n; i++) {
        if (ids[i] == GRAMMAR_END) {
            assert_true(found < max);
            stories[found] = calloc(1, 2000);
            found++;
            at = 0;
        } else {
            stories[found - 1][at++] = (char)ids[i];
        }
    }
    free(ids);
    return found;
}

static void training_and_validation_share_no_story(void **state)
{
    (void)state;
    enum { MAX = 3000 };
    scratch_clear();
    assert_int_equal(corpus_write(scratch("s"), 400000, 100000, 1 << 20, 3, &err), STATUS_OK);
    assert_int_equal(scratch_files(), 3);
    static char *stories[2 * MAX];
    size_t train = read_stories("s_train_000000.bin", stories, MAX);
    size_t all = train + read_stories("s_val_000000.bin", stories + train, MAX);
    assert_true(train > 700 && all - train > 150);
    qsort(stories, all, sizeof *stories, by_pointer);
    for (size_t i = 1; i < all; i++)
        assert_string_not_equal(stories[i], stories[i - 1]);
    for (size_t i = 0; i < all; i++)
        free(stories[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tiny_grammar_has_the_entropy_of_its_enumeration),
        cmocka_unit_test(probabilities_of_rows_add_up),
        cmocka_unit_test(probabilities_of_rows_are_frequencies),
        cmocka_unit_test(grammars_that_prove_nothing_are_refused),
        cmocka_unit_test(stories_have_the_entropy_that_is_claimed),
        cmocka_unit_test(reading_a_story_finds_how_it_was_drawn),
        cmocka_unit_test(rows_cost_a_fixed_number_of_nats),
        cmocka_unit_test(the_same_seed_gives_the_same_bytes),
        cmocka_unit_test(training_and_validation_share_no_story),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
