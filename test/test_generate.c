// Sampling: which token a uniform number picks, and when generation stops.
#include "hete/generate.h"
#include "kernels/gpt.h"
#include "test/cmocka.h"

#include <math.h>
#include <stdlib.h>

enum { V = 5 };

static const float logits[V] = {0.5f, -1, 2, 0.25f, 2};

static int32_t choose(double temperature, size_t top_k, double u)
{
    int32_t order[V];
    return choose_token(logits, V, temperature, top_k, u, order);
}

// Fraction of evenly spaced u that pick each token.
static void frequencies(double *f, double temperature, size_t top_k)
{
    const int n = 100000;
    for (int i = 0; i < V; i++) {
        f[i] = 0;
    }
    for (int i = 0; i < n; i++) {
        f[choose(temperature, top_k, (i + 0.5) / n)] += 1.0 / n;
    }
}

static void test_greedy(void **state)
{
    (void)state;
    const double u[] = {0, 0.3, 0.999999999};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(choose(0, 0, u[i]), 2); // the first of the two that are likeliest
        assert_int_equal(choose(0, 3, u[i]), 2);
        assert_int_equal(choose(3, 1, u[i]), 2);
    }
}

static void test_softmax(void **state)
{
    (void)state;
    const double temperatures[] = {0.5, 1, 4};
    for (int t = 0; t < 3; t++) {
        double f[V], sum = 0;
        frequencies(f, temperatures[t], 0);
        for (int i = 0; i < V; i++) {
            sum += exp((double)logits[i] / temperatures[t]);
        }
        for (int i = 0; i < V; i++) {
            assert_true(fabs(f[i] - exp((double)logits[i] / temperatures[t]) / sum) < 5e-5);
        }
    }
}

static void test_top_k(void **state)
{
    (void)state;
    double f[V];
    frequencies(f, 1, 2);
    assert_true(fabs(f[2] - 0.5) < 5e-5 && fabs(f[4] - 0.5) < 5e-5 && f[0] + f[1] + f[3] == 0);
    frequencies(f, 1, 3);
    assert_true(fabs(f[0] / f[2] - exp(-1.5)) < 1e-3 && f[1] + f[3] == 0);
    frequencies(f, 1, 100); // more than there are: all
    assert_true(f[1] > 0.01);
}

static void test_ends_of_the_range(void **state)
{
    (void)state;
    for (size_t k = 0; k <= V; k++) {
        int32_t first = choose(1, k, 0), last = choose(1, k, nextafter(1, 0));
        assert_true(first >= 0 && first < V && last >= 0 && last < V);
    }
    float extreme[V] = {-INFINITY, -1e30f, 1e30f, -INFINITY, -INFINITY};
    int32_t order[V];
    assert_int_equal(choose_token(extreme, V, 1, 0, nextafter(1, 0), order), 2);
    assert_int_equal(choose_token(extreme, V, 1e-6, 3, 0.5, order), 2);
}

// ---- a model that has learned nothing -----------------------------------------------------------

enum { VOCAB = 50, MAX_SEQ = 8, TEXT = 40 };

struct text {
    int32_t tokens[TEXT];
    size_t n, stop_after;
};

static bool keep(void *ctx, int32_t token)
{
    struct text *t = ctx;
    assert_true(t->n < TEXT && token >= 0 && token < VOCAB);
    t->tokens[t->n++] = token;
    return t->n != t->stop_after;
}

static struct {
    struct gpt gpt;
    struct device *dev;
    struct session *session;
} model;

static int open_model(void **state)
{
    (void)state;
    struct error err;
    struct gpt_config shape = {
        .max_seq = MAX_SEQ, .vocab = VOCAB, .layers = 1, .heads = 2, .hidden = 12, .head_rows = 4};
    struct device_config device = {
        .kind = "cpu", .head_size = 6, .max_seq = MAX_SEQ, .padded_vocab = 128};
    struct session_config config = {.B = 1, .T = MAX_SEQ, .micro_batches = 1};
    gpt_open(&model.gpt, &shape);
    if (device_open(&model.dev, &device, &err) ||
        session_open(&model.session, model.dev, &model.gpt.model, &config, &err)) {
        return -1;
    }
    for (size_t u = 0; u < model.gpt.model.units; u++) {
        size_t n = model_unit(&model.gpt.model, u)->params;
        float *params = malloc(n * sizeof *params);
        gpt_init(&model.gpt, 1, u, 0, params, n);
        session_write(model.session, STATE_PARAMS, u, 0, params, n);
        free(params);
    }
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    session_close(model.session);
    device_close(model.dev);
    return 0;
}

static const struct generate_config config = {
    .vocab = VOCAB, .max_seq = MAX_SEQ, .eot = -1, .tokens = TEXT, .temperature = 1, .seed = 7};

static int run(const struct generate_config *c, struct text *t)
{
    struct error err = {0};
    int status = generate(model.session, c, (int32_t[]){3, 1, 4}, 3, keep, t, &err);
    assert_int_equal(status, err.status);
    return status;
}

// Far more tokens than the model has positions; the same ones every time, others for other seeds.
static void test_seeded(void **state)
{
    (void)state;
    struct text a = {0}, b = {0}, c = {0};
    struct generate_config other = config;
    other.seed++;
    assert_int_equal(run(&config, &a), STATUS_OK);
    assert_int_equal(run(&config, &b), STATUS_OK);
    assert_int_equal(run(&other, &c), STATUS_OK);
    assert_int_equal(a.n, TEXT);
    assert_memory_equal(&a, &b, sizeof a);
    assert_memory_not_equal(&a, &c, sizeof a);
}

static void test_stops(void **state)
{
    (void)state;
    struct text a = {0}, b = {0}, c = {.stop_after = 5};
    run(&config, &a);
    struct generate_config until = config;
    until.eot = a.tokens[11];
    size_t first = 0;
    while (a.tokens[first] != until.eot) {
        first++;
    }
    run(&until, &b);
    assert_int_equal(b.n, first + 1); // the end-of-text token is the last one
    run(&config, &c);
    assert_int_equal(c.n, 5);
}

static void test_damaged_model(void **state)
{
    (void)state;
    struct text t = {0};
    float good, bad = NAN;
    session_read(model.session, STATE_PARAMS, 1, 0, &good, 1);
    session_write(model.session, STATE_PARAMS, 1, 0, &bad, 1);
    assert_int_equal(run(&config, &t), STATUS_FAIL);
    session_write(model.session, STATE_PARAMS, 1, 0, &good, 1);
    assert_int_equal(run(&config, &t), STATUS_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),        cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_top_k),         cmocka_unit_test(test_ends_of_the_range),
        cmocka_unit_test(test_seeded),        cmocka_unit_test(test_stops),
        cmocka_unit_test(test_damaged_model),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
