// Choosing tokens against brute force, and generating text with a tiny GPT.
#include "hete/generate.h"
#include "test/cmocka.h"
#include "test/tiny.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- choosing -----------------------------------------------------------------------------------

#define MOST_VOCAB 80

// Probability of each token: sort, keep the first k, soften, normalise.
static void brute_force(double *p, const float *logits, size_t vocab, double temperature, size_t k)
{
    size_t order[MOST_VOCAB];
    double sum = 0;
    for (size_t i = 0; i < vocab; i++) {
        order[i] = i;
        p[i] = 0;
    }
    for (size_t i = 0; i < vocab; i++) { // the smaller index first among equals
        for (size_t j = vocab - 1; j > i; j--) {
            if (logits[order[j]] > logits[order[j - 1]]) {
                size_t swapped = order[j];
                order[j] = order[j - 1];
                order[j - 1] = swapped;
            }
        }
    }
    if (temperature == 0) {
        p[order[0]] = 1;
        return;
    }
    for (size_t i = 0; i < vocab && (k == 0 || i < k); i++) {
        p[order[i]] = exp(((double)logits[order[i]] - (double)logits[order[0]]) / temperature);
        sum += p[order[i]];
    }
    for (size_t i = 0; i < vocab; i++) {
        p[i] /= sum;
    }
}

// Each token owns an interval of [0, 1): on a grid of u its count is right to one.
static void check_distribution(const float *logits, size_t vocab, double temperature, size_t k)
{
    enum { GRID = 4001 };
    double p[MOST_VOCAB];
    int32_t order[MOST_VOCAB];
    size_t count[MOST_VOCAB] = {0};
    brute_force(p, logits, vocab, temperature, k);
    for (size_t i = 0; i < GRID; i++) {
        int32_t token =
            choose_token(logits, vocab, temperature, k, ((double)i + 0.5) / GRID, order);
        assert_in_range(token, 0, vocab - 1);
        count[token]++;
    }
    for (size_t i = 0; i < vocab; i++) {
        if (fabs((double)count[i] - p[i] * GRID) > 1 + 1e-6) {
            fail_msg("vocab %zu, temperature %g, top %zu: token %zu with probability %g came %zu "
                     "times of %d",
                     vocab, temperature, k, i, p[i], count[i], GRID);
        }
    }
}

static void random_logits(float *logits, size_t vocab, uint64_t *rng)
{
    bool ties = rng_below(rng, 2);
    for (size_t i = 0; i < vocab; i++) {
        double x = 3 * rng_normal(rng);
        logits[i] = (float)(ties ? floor(x) : x);
    }
}

static void test_distribution(void **state)
{
    static const double temperatures[] = {0, 0.3, 1, 2.5};
    float logits[MOST_VOCAB];
    uint64_t rng = test_seed();
    (void)state;
    for (size_t i = 0; i < 200; i++) {
        size_t vocab = i % 8 == 0 ? 1 + i / 8 % 3 : 1 + rng_below(&rng, MOST_VOCAB);
        size_t k = i % 3 ? rng_below(&rng, vocab + 3) : 0; // more than there are: all
        random_logits(logits, vocab, &rng);
        check_distribution(logits, vocab, temperatures[i % 4], k);
    }
}

// Among equal logits the smaller token comes first: at temperature 0, and at the edge of the top k.
static void test_ties(void **state)
{
    const float logits[] = {1, 3, 2, 3, 2, 3, 2, 0};
    double p[MOST_VOCAB];
    int32_t order[8];
    (void)state;
    assert_int_equal(choose_token(logits, 8, 0, 0, 0.99, order), 1);
    assert_int_equal(choose_token(logits, 8, 1, 1, 0.99, order), 1);
    brute_force(p, logits, 8, 1, 4);
    assert_true(p[2] > 0 && p[4] == 0);
    check_distribution(logits, 8, 1, 2);
    check_distribution(logits, 8, 1, 4);
    check_distribution(logits, 8, 1, 7);
}

// Neither a cold temperature nor a large logit overflows; the largest u picks a possible token.
static void test_extremes(void **state)
{
    float logits[MOST_VOCAB];
    int32_t order[MOST_VOCAB];
    uint64_t rng = test_seed();
    (void)state;
    const float large[] = {-3e38f, 2.9e38f, 3e38f, 0};
    assert_int_equal(choose_token(large, 4, 1, 0, 0.5, order), 2);
    assert_int_equal(choose_token(large, 4, 1e-30, 0, 0.999, order), 2);
    const float impossible[] = {-INFINITY, -1e30f, 1e30f, -INFINITY, -INFINITY};
    assert_int_equal(choose_token(impossible, 5, 1, 0, 1 - 0x1p-53, order), 2);
    assert_int_equal(choose_token(impossible, 5, 1e-6, 3, 0.5, order), 2);
    for (size_t i = 0; i < 20000; i++) {
        random_logits(logits, MOST_VOCAB, &rng);
        logits[0] = logits[MOST_VOCAB - 1] = -2000; // no chance at all
        int32_t last = choose_token(logits, MOST_VOCAB, 1, 0, 1 - 0x1p-53, order);
        int32_t first = choose_token(logits, MOST_VOCAB, 1, 0, 0, order);
        assert_in_range(last, 1, MOST_VOCAB - 2);
        assert_in_range(first, 1, MOST_VOCAB - 2);
    }
}

// ---- generating ---------------------------------------------------------------------------------

static const struct tiny_shape shape = {.layers = 2,
                                        .heads = 2,
                                        .hidden = 24,
                                        .vocab = 50,
                                        .max_seq = 20,
                                        .head_rows = 64,
                                        .B = 1,
                                        .T = 20,
                                        .micro_batches = 1,
                                        .threads = 1,
                                        .eval = true};

static const struct generate_config usual = {
    .vocab = 50, .max_seq = 20, .eot = -1, .tokens = 64, .temperature = 0};

struct text {
    int32_t token[4096];
    size_t n, most; // emit asks to stop at `most`
};

static bool emit(void *ctx, int32_t token)
{
    struct text *text = ctx;
    text->token[text->n++] = token;
    return text->n < text->most;
}

static void run(const struct tiny *t, const struct generate_config *config, const int32_t *prompt,
                size_t n, struct text *text)
{
    struct error err;
    text->n = 0;
    text->most = text->most ? text->most : 4096;
    if (generate(t->s, config, prompt, n, emit, text, &err)) {
        fail_msg("%s", err.text);
    }
}

// The likeliest token after a text, all of it fed anew: what generate() does with its cache.
static int32_t likeliest_after(const struct tiny *t, const int32_t *text, size_t n)
{
    float logits[128];
    size_t best = 0;
    for (size_t i = 0; i < n; i++) {
        session_decode(t->s, text[i], i, logits);
    }
    for (size_t v = 1; v < shape.vocab; v++) {
        best = logits[v] > logits[best] ? v : best;
    }
    return (int32_t)best;
}

// Greedy text far beyond the cache: when it is full, the later half goes on. `limit` positions fit.
static void check_beyond(const struct tiny *t, const struct generate_config *config, size_t limit,
                         size_t prompt_tokens)
{
    int32_t window[64];
    struct text text = {0};
    uint64_t rng = prompt_tokens;
    size_t n = 0, distinct = 0;
    for (; n < prompt_tokens; n++) {
        window[n] = (int32_t)rng_below(&rng, shape.vocab);
    }
    run(t, config, window, n, &text);
    assert_int_equal(text.n, config->tokens);
    for (size_t i = 0; i < text.n; i++) {
        if (n > limit) {
            size_t keep = (limit + 1) / 2;
            memmove(window, window + n - keep, keep * sizeof *window);
            n = keep;
        }
        assert_int_equal(text.token[i], likeliest_after(t, window, n));
        window[n++] = text.token[i];
        distinct += i > 0 && text.token[i] != text.token[i - 1];
    }
    assert_true(distinct > text.n / 10); // a model that repeats itself would prove little
}

static void test_beyond_cache(void **state)
{
    static const size_t prompts[] = {1, 2, 19, 20, 21, 45};
    struct tiny t;
    (void)state;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 5);
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
        check_beyond(&t, &usual, 20, prompts[i]);
    }
    tiny_close(&t);

    // The cache may be smaller than the model, or larger: the less of both counts.
    struct tiny_shape other = shape;
    other.T = 7;
    tiny_open(&t, &other);
    tiny_scramble(&t, 5);
    check_beyond(&t, &usual, 7, 3);
    tiny_close(&t);
    other.T = 20;
    other.B = 2;
    tiny_open(&t, &other);
    tiny_scramble(&t, 5);
    assert_int_equal(session_decode_limit(t.s), 40);
    check_beyond(&t, &usual, 20, 3);
    tiny_close(&t);
}

static void test_seeds(void **state)
{
    struct generate_config config = usual;
    struct text a = {0}, b = {0};
    const int32_t prompt[] = {4, 9};
    struct tiny t;
    (void)state;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 5);
    config.temperature = 1;
    config.top_k = 10;
    for (config.seed = 0; config.seed < 20; config.seed++) {
        run(&t, &config, prompt, 2, &a);
        run(&t, &config, prompt, 2, &b);
        assert_int_equal(a.n, 64);
        assert_memory_equal(a.token, b.token, a.n * sizeof *a.token);
        config.seed++;
        run(&t, &config, prompt, 2, &b);
        assert_memory_not_equal(a.token, b.token, a.n * sizeof *a.token);
    }
    tiny_close(&t);
}

// A model of zeros finds all tokens equally likely: their counts, and those of pairs of neighbours,
// must pass a chi-square test (beyond 7 sigma of its mean is a fault, not bad luck).
static void test_uniform(void **state)
{
    enum { V = 8 };
    struct generate_config config = usual;
    struct tiny_shape zero = shape;
    static struct text text;
    double count[V] = {0}, pairs[V * V] = {0}, chi = 0, chi_pairs = 0;
    const int32_t prompt[] = {0};
    struct tiny t;
    zero.vocab = V;
    tiny_open(&t, &zero);
    config.vocab = V;
    config.tokens = 4000;
    config.temperature = 1;
    config.seed = test_seed();
    text.n = text.most = 0;
    (void)state;
    run(&t, &config, prompt, 1, &text);
    assert_int_equal(text.n, 4000);
    for (size_t i = 0; i < text.n; i++) {
        count[text.token[i]]++;
        pairs[i ? text.token[i - 1] * V + text.token[i] : 0]++;
    }
    for (size_t i = 0; i < V; i++) {
        chi += pow(count[i] - 4000.0 / V, 2) / (4000.0 / V);
    }
    for (size_t i = 0; i < V * V; i++) {
        chi_pairs += pow(pairs[i] - 4000.0 / V / V, 2) / (4000.0 / V / V);
    }
    assert_true(chi < V - 1 + 7 * sqrt(2 * (V - 1)));
    assert_true(chi_pairs < V * V - 1 + 7 * sqrt(2 * (V * V - 1)));
    tiny_close(&t);
}

// It ends after the end-of-text token, which is handed out, after as many tokens as were asked for,
// and when emit has enough.
static void test_stops(void **state)
{
    struct generate_config config = usual;
    struct text free_run = {0}, text = {0};
    const int32_t prompt[] = {4, 9};
    struct tiny t;
    (void)state;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 5);
    run(&t, &config, prompt, 2, &free_run);
    config.eot = free_run.token[10];
    run(&t, &config, prompt, 2, &text);
    size_t first = 0;
    while (free_run.token[first] != config.eot) {
        first++;
    }
    assert_int_equal(text.n, first + 1);
    assert_memory_equal(text.token, free_run.token, text.n * sizeof *text.token);
    config.eot = -1;
    text.most = 3;
    run(&t, &config, prompt, 2, &text);
    assert_int_equal(text.n, 3);
    text.most = 0;
    config.tokens = 0;
    run(&t, &config, prompt, 2, &text);
    assert_int_equal(text.n, 0);
    tiny_close(&t);
}

// The padded part of the vocabulary is never chosen, however likely its logits look.
static void test_padding_is_never_chosen(void **state)
{
    struct generate_config config = usual;
    static struct text text;
    const int32_t prompt[] = {1};
    struct tiny t;
    (void)state;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 5);
    // All real tokens get logits below 0, what the padding has: lnfw = 0, lnfb = 1, wte = -1.
    const float minus = -1, zero = 0, one = 1;
    for (size_t i = 0; i < shape.vocab * shape.hidden; i++) {
        session_write(t.s, STATE_PARAMS, 0, i, &minus, 1);
    }
    for (size_t i = 0; i < shape.hidden; i++) {
        session_write(t.s, STATE_PARAMS, 0, tiny_tensor(&t, 0, "lnfw")->offset + i, &zero, 1);
        session_write(t.s, STATE_PARAMS, 0, tiny_tensor(&t, 0, "lnfb")->offset + i, &one, 1);
    }
    for (int temperature = 0; temperature < 2; temperature++) {
        config.temperature = temperature;
        config.tokens = 200;
        run(&t, &config, prompt, 1, &text);
        for (size_t i = 0; i < text.n; i++) {
            assert_in_range(text.token[i], 0, shape.vocab - 1);
        }
    }
    tiny_close(&t);
}

// One damaged number is an error, wherever it is and however tokens are chosen.
static void test_damaged(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    const int32_t prompt[] = {1};
    struct error err;
    struct tiny t;
    uint64_t rng = test_seed();
    (void)state;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 5);
    for (size_t i = 0; i < 60; i++) {
        struct generate_config config = usual;
        struct text text = {.most = 4096};
        size_t unit = i % 5 == 4; // a token that the prompt has not, or a block
        size_t at = unit ? i % shape.hidden : (2 + rng_below(&rng, shape.vocab - 2)) * shape.hidden;
        float good;
        config.temperature = (double)(i % 2);
        config.top_k = i % 4 < 2 ? 0 : 5;
        session_read(t.s, STATE_PARAMS, unit, at, &good, 1);
        session_write(t.s, STATE_PARAMS, unit, at, bad + i % 3, 1);
        assert_int_equal(generate(t.s, &config, prompt, 1, emit, &text, &err), STATUS_FAIL);
        assert_non_null(strstr(err.text, "not finite"));
        session_write(t.s, STATE_PARAMS, unit, at, &good, 1);
        run(&t, &config, prompt, 1, &text);
        assert_int_equal(text.n, 64);
    }
    tiny_close(&t);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_distribution), cmocka_unit_test(test_ties),
        cmocka_unit_test(test_extremes),     cmocka_unit_test(test_beyond_cache),
        cmocka_unit_test(test_seeds),        cmocka_unit_test(test_uniform),
        cmocka_unit_test(test_stops),        cmocka_unit_test(test_padding_is_never_chosen),
        cmocka_unit_test(test_damaged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
