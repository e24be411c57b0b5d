// Checks the references: every backward against central differences of its forward, in double
// precision and over odd shapes. A layer is seen as one function of one array that holds all its
// inputs, so that a single check serves them all.
#include "test/reference.h"

#include "test/cmocka.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct shape {
    size_t B, T, C, NH, V, Vp, OC;
};

// An operation with all its inputs in x and all its outputs in y; tokens are inputs without a
// gradient.
struct layer {
    const char *name;
    size_t (*inputs)(const struct shape *);
    size_t (*outputs)(const struct shape *);
    void (*forward)(double *y, const double *x, const int32_t *tokens, const struct shape *);
    void (*backward)(double *dx, const double *dy, const double *x, const int32_t *tokens,
                     const struct shape *);
};

// ---- the layers ---------------------------------------------------------------------------------

// x: wte(V,C), wpe(T,C)
static size_t encoder_inputs(const struct shape *s)
{
    return (s->V + s->T) * s->C;
}

static size_t rows_of_c(const struct shape *s)
{
    return s->B * s->T * s->C;
}

static void encoder_forward(double *y, const double *x, const int32_t *tokens,
                            const struct shape *s)
{
    ref_encoder_forward(y, tokens, x, x + s->V * s->C, s->B, s->T, s->C);
}

static void encoder_backward(double *dx, const double *dy, const double *x, const int32_t *tokens,
                             const struct shape *s)
{
    (void)x;
    memset(dx, 0, encoder_inputs(s) * sizeof *dx);
    ref_encoder_backward(dx, dx + s->V * s->C, dy, tokens, s->B, s->T, s->C);
}

// x: inp(N,C), weight(C), bias(C)
static size_t layernorm_inputs(const struct shape *s)
{
    return rows_of_c(s) + 2 * s->C;
}

static void layernorm_forward(double *y, const double *x, const int32_t *tokens,
                              const struct shape *s)
{
    size_t N = s->B * s->T, C = s->C;
    double *stats = malloc(2 * N * sizeof *stats);
    (void)tokens;
    ref_layernorm_forward(y, stats, stats + N, x, x + N * C, x + N * C + C, N, C);
    free(stats);
}

static void layernorm_backward(double *dx, const double *dy, const double *x, const int32_t *tokens,
                               const struct shape *s)
{
    size_t N = s->B * s->T, C = s->C;
    (void)tokens;
    ref_layernorm_backward(dx, dx + N * C, dx + N * C + C, dy, x, x + N * C, N, C);
}

// x: inp(N,C), weight(OC,C), bias(OC), residual(N,OC)
static size_t matmul_inputs(const struct shape *s)
{
    return rows_of_c(s) + s->OC * s->C + s->OC + s->B * s->T * s->OC;
}

static size_t matmul_outputs(const struct shape *s)
{
    return s->B * s->T * s->OC;
}

static void matmul_forward(double *y, const double *x, const int32_t *tokens, const struct shape *s)
{
    const double *weight = x + rows_of_c(s), *bias = weight + s->OC * s->C;
    (void)tokens;
    ref_matmul_forward(y, x, weight, bias, bias + s->OC, s->B * s->T, s->C, s->OC);
}

static void matmul_backward(double *dx, const double *dy, const double *x, const int32_t *tokens,
                            const struct shape *s)
{
    double *dweight = dx + rows_of_c(s), *dbias = dweight + s->OC * s->C;
    (void)tokens;
    ref_matmul_backward(dx, dweight, dbias, dy, x, x + rows_of_c(s), s->B * s->T, s->C, s->OC);
    memcpy(dbias + s->OC, dy, matmul_outputs(s) * sizeof *dy);
}

static void gelu_forward(double *y, const double *x, const int32_t *tokens, const struct shape *s)
{
    (void)tokens;
    ref_gelu_forward(y, x, rows_of_c(s));
}

static void gelu_backward(double *dx, const double *dy, const double *x, const int32_t *tokens,
                          const struct shape *s)
{
    (void)tokens;
    ref_gelu_backward(dx, dy, x, rows_of_c(s));
}

// x: qkv(B,T,3C); y: out(B,T,C)
static size_t attention_inputs(const struct shape *s)
{
    return 3 * rows_of_c(s);
}

static void attention_forward(double *y, const double *x, const int32_t *tokens,
                              const struct shape *s)
{
    double *lse = malloc(s->B * s->NH * s->T * sizeof *lse);
    (void)tokens;
    ref_attention_forward(y, lse, x, s->B, s->T, s->C, s->NH);
    free(lse);
}

static void attention_backward(double *dx, const double *dy, const double *x, const int32_t *tokens,
                               const struct shape *s)
{
    (void)tokens;
    ref_attention_backward(dx, dy, x, s->B, s->T, s->C, s->NH);
}

// x: logits(N,Vp); y: losses(N), of which the backward takes the sum: dy is 1 for this layer.
static size_t classifier_inputs(const struct shape *s)
{
    return s->B * s->T * s->Vp;
}

static size_t classifier_outputs(const struct shape *s)
{
    return s->B * s->T;
}

static void classifier_forward(double *y, const double *x, const int32_t *tokens,
                               const struct shape *s)
{
    double *unused = malloc(classifier_inputs(s) * sizeof *unused);
    ref_classifier(y, unused, x, tokens, 0, s->B * s->T, s->V, s->Vp);
    free(unused);
}

static void classifier_backward(double *dx, const double *dy, const double *x,
                                const int32_t *tokens, const struct shape *s)
{
    double *losses = malloc(classifier_outputs(s) * sizeof *losses);
    ref_classifier(losses, dx, x, tokens, 1, s->B * s->T, s->V, s->Vp);
    for (size_t i = 0; i < classifier_inputs(s); i++) {
        dx[i] *= dy[i / s->Vp];
    }
    free(losses);
}

static const struct layer encoder = {"encoder", encoder_inputs, rows_of_c, encoder_forward,
                                     encoder_backward};
static const struct layer layernorm = {"layernorm", layernorm_inputs, rows_of_c, layernorm_forward,
                                       layernorm_backward};
static const struct layer matmul = {"matmul", matmul_inputs, matmul_outputs, matmul_forward,
                                    matmul_backward};
static const struct layer gelu = {"gelu", rows_of_c, rows_of_c, gelu_forward, gelu_backward};
static const struct layer attention = {"attention", attention_inputs, rows_of_c, attention_forward,
                                       attention_backward};
static const struct layer classifier = {"classifier", classifier_inputs, classifier_outputs,
                                        classifier_forward, classifier_backward};

// ---- the check ----------------------------------------------------------------------------------

static double *random_array(size_t n, unsigned seed)
{
    double *x = malloc(n * sizeof *x);
    srand(seed);
    for (size_t i = 0; i < n; i++) {
        x[i] = 3.0 * rand() / RAND_MAX - 1.5;
    }
    return x;
}

static double weighted_sum(const struct layer *l, const struct shape *s, const double *x,
                           const int32_t *tokens, const double *weights)
{
    double *y = malloc(l->outputs(s) * sizeof *y), sum = 0;
    l->forward(y, x, tokens, s);
    for (size_t i = 0; i < l->outputs(s); i++) {
        sum += y[i] * weights[i];
    }
    free(y);
    return sum;
}

// The largest difference between the layer's gradient and that by differences, over the largest
// gradient. `spoil` is added to one element of the former.
static double gradient_error(const struct layer *l, const struct shape *s, double spoil)
{
    size_t n = l->inputs(s), rows = s->B * s->T;
    double *x = random_array(n, 1), *dy = random_array(l->outputs(s), 2);
    double *dx = malloc(n * sizeof *dx), worst = 0, largest = 0;
    int32_t *tokens = malloc(rows * sizeof *tokens);
    for (size_t i = 0; i < rows; i++) {
        tokens[i] = (int32_t)(i * 7 % s->V); // some twice, where V < rows
    }
    if (l == &classifier) {
        tokens[0] = -1;
    }
    l->backward(dx, dy, x, tokens, s);
    dx[n / 2] += spoil;
    for (size_t i = 0; i < n; i++) {
        const double h = 1e-5;
        double at = x[i];
        x[i] = at + h;
        double above = weighted_sum(l, s, x, tokens, dy);
        x[i] = at - h;
        double below = weighted_sum(l, s, x, tokens, dy);
        x[i] = at;
        worst = fmax(worst, fabs(dx[i] - (above - below) / (2 * h)));
        largest = fmax(largest, fabs(dx[i]));
    }
    free(x);
    free(dy);
    free(dx);
    free(tokens);
    return worst / fmax(largest, 1e-3);
}

static const struct shape shapes[] = {
    {.B = 1, .T = 1, .C = 1, .NH = 1, .V = 1, .Vp = 1, .OC = 1},
    {.B = 1, .T = 1, .C = 6, .NH = 2, .V = 3, .Vp = 4, .OC = 2},
    {.B = 2, .T = 3, .C = 5, .NH = 1, .V = 4, .Vp = 7, .OC = 3},
    {.B = 3, .T = 7, .C = 9, .NH = 3, .V = 11, .Vp = 16, .OC = 5},
    {.B = 1, .T = 13, .C = 4, .NH = 4, .V = 2, .Vp = 2, .OC = 7},
};

static void test_gradient(void **state)
{
    const struct layer *l = *state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        double error = gradient_error(l, shapes + i, 0);
        if (!(error < 1e-8)) {
            fail_msg("%s, shape %zu: off by %g of the largest gradient", l->name, i, error);
        }
    }
}

// The check finds an error of one thousandth in one element.
static void test_spoiled_gradient(void **state)
{
    const struct layer *l = *state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        assert_true(gradient_error(l, shapes + i, 1e-3) > 1e-6);
    }
}

// Values that can be worked out on paper.
static void test_known_values(void **state)
{
    (void)state;
    double x[4] = {0, 1, -1, 3}, y[4];
    ref_gelu_forward(y, x, 4);
    assert_true(fabs(y[0]) < 1e-15 && fabs(y[1] - 0.841191990608) < 1e-11 &&
                fabs(y[2] + 0.158808009392) < 1e-11 && fabs(y[3] - 2.996362607) < 1e-8);

    double logits[4] = {0, 0, 0, 99}, dlogits[4], loss;
    ref_classifier(&loss, dlogits, logits, (int32_t[]){1}, 6, 1, 3, 4);
    assert_true(fabs(loss - log(3)) < 1e-15 && fabs(dlogits[0] - 2) < 1e-14 &&
                fabs(dlogits[1] + 4) < 1e-14 && dlogits[3] == 0);

    // Equal keys: the output is the mean of the values so far, the log-sum-exp is log(t+1).
    double qkv[3 * 3] = {1, 0, 3, 2, 0, 5, 3, 0, 10}, out[3], lse[3];
    ref_attention_forward(out, lse, qkv, 1, 3, 1, 1);
    assert_true(fabs(out[0] - 3) < 1e-14 && fabs(out[1] - 4) < 1e-14 && fabs(out[2] - 6) < 1e-14 &&
                fabs(lse[2] - log(3)) < 1e-14);

    // The first update moves by lr against the sign of the gradient, after the decay.
    struct adamw a = {.beta1 = 0.5f,
                      .one_minus_beta1 = 0.5f,
                      .beta2 = 0.75f,
                      .one_minus_beta2 = 0.25f,
                      .scale = 2,
                      .decay = 0.5f,
                      .step = 0.25f / 0.5f,
                      .v_correction = 2};
    double p[2] = {1, 1}, m[2] = {0}, v[2] = {0}, g[2] = {3, -4};
    ref_adamw(p, m, v, g, &a, 2);
    assert_true(p[0] == 0.25 && p[1] == 0.75 && m[0] == 3 && v[0] == 9 && v[1] == 16);
    assert_true(ref_sumsq(g, 2) == 25);
}

int main(void)
{
    const struct layer *layers[] = {&encoder, &layernorm, &matmul, &gelu, &attention, &classifier};
    enum { LAYERS = sizeof layers / sizeof *layers };
    struct CMUnitTest tests[2 * LAYERS + 1] = {cmocka_unit_test(test_known_values)};
    char names[2 * LAYERS][64];
    for (size_t i = 0; i < 2 * LAYERS; i++) {
        const struct layer *l = layers[i / 2];
        snprintf(names[i], sizeof names[i], "%s of %s", i % 2 ? "spoiled gradient" : "gradient",
                 l->name);
        tests[1 + i] =
            (struct CMUnitTest){.name = names[i],
                                .test_func = i % 2 ? test_spoiled_gradient : test_gradient,
                                .initial_state = (void *)(uintptr_t)l};
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
