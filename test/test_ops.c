// Every layer operation of every variant (dtype, ISA, matrix product) against the references in
// double, over odd shapes.
//
// A case runs its operation twice, with 1 and with 3 threads. Each run checks every output against
// the reference and the bytes behind each tensor; the two runs must agree in every bit.
// The tests keep to the device seam: tensors live in the device's arena and are copied.
#include "kernels/bf16.h"
#include "kernels/cpu/cpu.h"
#include "test/cmocka.h"
#include "test/reference.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES  ((size_t)64 << 20)
#define CANARY_BYTES ((size_t)64)
#define COUNT(array) (sizeof(array) / sizeof *(array))

struct variant {
    const char *name;
    enum dtype dtype;
    enum isa isa;
    bool own_sgemm; // not OpenBLAS
};

// A device under test with the tensors of the shape that is being tried.
struct rig {
    const struct variant *variant;
    struct device *dev;
    const struct layers *f;
    char *arena;
    size_t used;
    uint64_t rng, hash; // hash: over every byte of every output
    const char *op;
    size_t shape; // index, for messages
    double *host[64];
    size_t hosts;
    struct tensor_check {
        const char *at;
        size_t bytes;
    } tensors[64];
    size_t n_tensors;
};

// A tensor on the device; values: what an input holds, exactly.
struct tensor_ref {
    void *at;
    double *values;
    size_t n;
    bool fp32;
};

static double *host_array(struct rig *r, size_t n)
{
    assert_true(r->hosts < COUNT(r->host));
    double *x = calloc(n + 1, sizeof *x);
    assert_non_null(x);
    return r->host[r->hosts++] = x;
}

static double uniform(struct rig *r)
{
    r->rng = r->rng * 6364136223846793005u + 1442695040888963407u;
    return (double)(r->rng >> 11) * 0x1p-52 - 1;
}

static size_t elem_size(const struct rig *r, bool fp32)
{
    return fp32 ? sizeof(float) : dtype_bytes(r->variant->dtype);
}

static void *reserve(struct rig *r, size_t bytes)
{
    static const char canary[CANARY_BYTES] = "nobody writes behind the end of a tensor";
    char *at = r->arena + r->used;
    r->used += device_round(bytes + CANARY_BYTES);
    assert_true(r->used <= ARENA_BYTES && r->n_tensors < COUNT(r->tensors));
    device_copy_in(r->dev, at + bytes, canary, CANARY_BYTES);
    r->tensors[r->n_tensors++] = (struct tensor_check){at, bytes};
    return at;
}

static void check_canaries(struct rig *r)
{
    for (size_t i = 0; i < r->n_tensors; i++) {
        char behind[CANARY_BYTES];
        device_copy_out(r->dev, behind, r->tensors[i].at + r->tensors[i].bytes, CANARY_BYTES);
        if (strcmp(behind, "nobody writes behind the end of a tensor") != 0) {
            fail_msg("%s %s, shape %zu: wrote behind tensor %zu", r->op, r->variant->name, r->shape,
                     i);
        }
    }
}

// An output, filled with NaN so that an element that is not written shows.
static struct tensor_ref output(struct rig *r, size_t n, bool fp32)
{
    size_t bytes = n * elem_size(r, fp32);
    struct tensor_ref t = {reserve(r, bytes), NULL, n, fp32};
    memset(t.at, 0xff, bytes);
    return t;
}

// An input that holds `values`, which are rounded to its dtype first.
static struct tensor_ref input_of(struct rig *r, double *values, size_t n, bool fp32)
{
    size_t size = elem_size(r, fp32);
    struct tensor_ref t = {reserve(r, n * size), values, n, fp32};
    char *host = malloc(n * size + 1);
    for (size_t i = 0; i < n; i++) {
        float x = (float)values[i];
        uint16_t h = bf16_round(x);
        memcpy(host + i * size, size == sizeof x ? (void *)&x : (void *)&h, size);
        values[i] = (double)(size == sizeof x ? x : bf16_load(h));
    }
    device_copy_in(r->dev, t.at, host, n * size);
    free(host);
    return t;
}

// Random values in mean +- range.
static struct tensor_ref input(struct rig *r, size_t n, double mean, double range)
{
    double *values = host_array(r, n);
    for (size_t i = 0; i < n; i++) {
        values[i] = mean + range * uniform(r);
    }
    return input_of(r, values, n, false);
}

static int32_t *input_tokens(struct rig *r, int32_t *host, size_t n)
{
    void *at = reserve(r, n * sizeof *host);
    device_copy_in(r->dev, at, host, n * sizeof *host);
    return at;
}

// What the device holds, in double; adds it to the hash.
static double *fetch(struct rig *r, const struct tensor_ref *t)
{
    size_t size = elem_size(r, t->fp32);
    double *x = host_array(r, t->n);
    char *host = malloc(t->n * size + 1);
    device_copy_out(r->dev, host, t->at, t->n * size);
    for (size_t i = 0; i < t->n; i++) {
        uint32_t bits = 0;
        memcpy(&bits, host + i * size, size);
        r->hash = (r->hash ^ bits) * 0x100000001b3u;
        float f = bf16_load((uint16_t)bits);
        if (size == sizeof f) {
            memcpy(&f, &bits, sizeof f);
        }
        x[i] = (double)f;
    }
    free(host);
    return x;
}

// Compares an output with its reference: |error| <= ulps * half an ulp of the value + noise * the
// largest value (or `scale`, if that is more). noise is what fp32 sums of this operation deserve.
static void check(struct rig *r, const char *what, const struct tensor_ref *t,
                  const double *expected, double noise, double scale)
{
    double *x = fetch(r, t);
    double half_ulp = t->fp32 || r->variant->dtype == DTYPE_FP32 ? 0x1p-24 : 0x1p-8;
    for (size_t i = 0; i < t->n; i++) {
        scale = fmax(scale, fabs(expected[i]));
    }
    for (size_t i = 0; i < t->n; i++) {
        double error = fabs(x[i] - expected[i]);
        if (!(error <= half_ulp * fabs(expected[i]) + noise * scale)) {
            fail_msg("%s %s, shape %zu: %s[%zu] is %.9g, not %.9g; that is %.3g of the largest",
                     r->op, r->variant->name, r->shape, what, i, x[i], expected[i], error / scale);
        }
        // It would make whatever reads it tens of times slower.
        if (x[i] != 0 && fabs(x[i]) < (double)FLT_MIN) {
            fail_msg("%s %s, shape %zu: %s[%zu] is subnormal: %g", r->op, r->variant->name,
                     r->shape, what, i, x[i]);
        }
    }
    check_canaries(r);
}

// ---- the operations -----------------------------------------------------------------------------

static void try_encoder(struct rig *r, const size_t *d)
{
    size_t B = d[0], T = d[1], C = d[2], N = B * T, V = 11, maxT = T + 3;
    struct tensor_ref wte = input(r, V * C, 0, 1), wpe = input(r, maxT * C, 0, 1);
    struct tensor_ref dout = input(r, N * C, 0, 1);
    struct tensor_ref out = output(r, N * C, false), row = output(r, C, false);
    struct tensor_ref dwpe = output(r, maxT * C, false);
    int32_t *tokens = malloc(N * sizeof *tokens);
    for (size_t i = 0; i < N; i++) {
        tokens[i] = (int32_t)((uniform(r) + 1) / 2 * (double)V);
    }
    int32_t *device_tokens = input_tokens(r, tokens, N);
    double *y = host_array(r, N * C), *expected_dwte = host_array(r, V * C);
    double *expected_dwpe = host_array(r, maxT * C);

    ref_encoder_forward(y, tokens, wte.values, wpe.values, B, T, C);
    r->f->encoder_forward(r->dev, out.at, device_tokens, wte.at, wpe.at, B, T, C);
    check(r, "out", &out, y, 0, 0);
    r->f->encoder_decode(r->dev, row.at, tokens[N - 1], T - 1, wte.at, wpe.at, C);
    check(r, "decoded", &row, y + (N - 1) * C, 0, 0);

    // dwte already holds the gradient of the head.
    for (size_t i = 0; i < V * C; i++) {
        expected_dwte[i] = uniform(r);
    }
    struct tensor_ref dwte = input_of(r, expected_dwte, V * C, true);
    ref_encoder_backward(expected_dwte, expected_dwpe, dout.values, tokens, B, T, C);
    r->f->encoder_backward(r->dev, dwte.at, dwpe.at, dout.at, device_tokens, B, T, C, maxT);
    check(r, "dwte", &dwte, expected_dwte, 2e-7, 1);
    check(r, "dwpe", &dwpe, expected_dwpe, 1e-7, 1);
    free(tokens);
}

static void try_layernorm(struct rig *r, const size_t *d)
{
    size_t N = d[0], C = d[1];
    // A mean that is large beside the deviation makes a careless variance wrong.
    struct tensor_ref inp = input(r, N * C, 5, 2), weight = input(r, C, 1, 0.5);
    struct tensor_ref bias = input(r, C, 0, 1), dout = input(r, N * C, 0, 1);
    struct tensor_ref out = output(r, N * C, false);
    struct tensor_ref mean = output(r, N, true), rstd = output(r, N, true);
    struct tensor_ref dinp = output(r, N * C, false), dweight = output(r, C, false);
    struct tensor_ref dbias = output(r, C, false), residual = input(r, N * C, 0, 1);
    double *y = host_array(r, N * C), *m = host_array(r, N), *s = host_array(r, N);
    double *dx = host_array(r, N * C), *dw = host_array(r, C), *db = host_array(r, C);
    double *sum = host_array(r, N * C);

    ref_layernorm_forward(y, m, s, inp.values, weight.values, bias.values, N, C);
    r->f->layernorm_forward(r->dev, out.at, mean.at, rstd.at, inp.at, weight.at, bias.at, N, C);
    check(r, "out", &out, y, 4e-6, 0);
    check(r, "mean", &mean, m, 5e-7, 0);
    check(r, "rstd", &rstd, s, 2e-6, 0);

    ref_layernorm_backward(dx, dw, db, dout.values, inp.values, weight.values, N, C);
    r->f->layernorm_backward(r->dev, dinp.at, dweight.at, dbias.at, dout.at, NULL, inp.at,
                             weight.at, mean.at, rstd.at, N, C);
    double scale = C > 1 ? 0 : s[0]; // one channel: everything cancels
    check(r, "dinp", &dinp, dx, 4e-6, scale);
    check(r, "dweight", &dweight, dw, 4e-6, scale);
    check(r, "dbias", &dbias, db, 2e-6, sqrt((double)N));

    for (size_t i = 0; i < N * C; i++) {
        sum[i] = residual.values[i] + dx[i];
    }
    r->f->layernorm_backward(r->dev, dinp.at, dweight.at, dbias.at, dout.at, residual.at, inp.at,
                             weight.at, mean.at, rstd.at, N, C);
    check(r, "dinp with residual", &dinp, sum, 4e-6, scale);
    r->f->layernorm_backward(r->dev, residual.at, dweight.at, dbias.at, dout.at, residual.at,
                             inp.at, weight.at, mean.at, rstd.at, N, C);
    check(r, "dinp in place", &residual, sum, 4e-6, scale);
    check(r, "dweight in place", &dweight, dw, 4e-6, scale);
}

static void try_matmul(struct rig *r, const size_t *d)
{
    size_t N = d[0], C = d[1], OC = d[2];
    struct tensor_ref inp = input(r, N * C, 0, 1), weight = input(r, OC * C, 0, 1);
    struct tensor_ref bias = input(r, OC, 0, 1), residual = input(r, N * OC, 0, 1);
    struct tensor_ref dout = input(r, N * OC, 0, 1);
    struct tensor_ref out = output(r, N * OC, false), dinp = output(r, N * C, false);
    struct tensor_ref dweight = output(r, OC * C, false), dbias = output(r, OC, false);
    struct tensor_ref sum = output(r, OC * C, true);
    double *y = host_array(r, N * OC), *dx = host_array(r, N * C);
    double *dw = host_array(r, OC * C), *db = host_array(r, OC);
    const double noise = 1e-6;

    ref_matmul_forward(y, inp.values, weight.values, NULL, NULL, N, C, OC);
    r->f->matmul_forward(r->dev, out.at, inp.at, weight.at, NULL, NULL, N, C, OC);
    check(r, "out", &out, y, noise, sqrt((double)C));
    ref_matmul_forward(y, inp.values, weight.values, bias.values, residual.values, N, C, OC);
    r->f->matmul_forward(r->dev, out.at, inp.at, weight.at, bias.at, residual.at, N, C, OC);
    check(r, "out with bias and residual", &out, y, noise, sqrt((double)C));

    ref_matmul_backward(dx, dw, db, dout.values, inp.values, weight.values, N, C, OC);
    r->f->matmul_backward_input(r->dev, dinp.at, dout.at, weight.at, N, C, OC);
    check(r, "dinp", &dinp, dx, noise, sqrt((double)OC));
    r->f->matmul_backward_weight(r->dev, dweight.at, dbias.at, dout.at, inp.at, N, C, OC);
    check(r, "dweight", &dweight, dw, noise, sqrt((double)N));
    check(r, "dbias", &dbias, db, noise, sqrt((double)N));

    r->f->matmul_backward_weight_fp32(r->dev, sum.at, dout.at, inp.at, false, N, C, OC);
    check(r, "fp32 dweight", &sum, dw, noise, sqrt((double)N));
    r->f->matmul_backward_weight_fp32(r->dev, sum.at, dout.at, inp.at, true, N, C, OC);
    for (size_t i = 0; i < OC * C; i++) {
        dw[i] *= 2;
    }
    check(r, "fp32 dweight, twice", &sum, dw, noise, 2 * sqrt((double)N));
}

static void try_gelu(struct rig *r, const size_t *d)
{
    size_t N = d[0], C = d[1], OC = d[2]; // forward OC outputs; backward C inputs
    struct tensor_ref inp = input(r, N * C, 0, 1), weight = input(r, OC * C, 0, 1);
    struct tensor_ref bias = input(r, OC, 0, 3), before = input(r, N * C, 0, 12);
    struct tensor_ref pre = output(r, N * OC, false), gelu = output(r, N * OC, false);
    struct tensor_ref dout = input(r, N * OC, 0, 1), dpre = output(r, N * C, false);
    struct tensor_ref again = output(r, N * C, false);
    double *y = host_array(r, N * OC), *dx = host_array(r, N * C);
    double *dw = host_array(r, OC * C), *db = host_array(r, OC), *g = host_array(r, N * C);

    ref_matmul_forward(y, inp.values, weight.values, bias.values, NULL, N, C, OC);
    r->f->matmul_gelu_forward(r->dev, gelu.at, pre.at, inp.at, weight.at, bias.at, N, C, OC);
    check(r, "pre", &pre, y, 2e-6, sqrt((double)C));
    ref_gelu_forward(y, fetch(r, &pre), N * OC);
    check(r, "gelu", &gelu, y, 1e-6, 1);

    ref_matmul_backward(dx, dw, db, dout.values, inp.values, weight.values, N, C, OC);
    ref_gelu_backward(dx, dx, before.values, N * C);
    ref_gelu_forward(g, before.values, N * C);
    r->f->matmul_gelu_backward_input(r->dev, dpre.at, again.at, before.at, dout.at, weight.at, N, C,
                                     OC);
    check(r, "dpre", &dpre, dx, 3e-6, sqrt((double)OC));
    check(r, "gelu given back", &again, g, 1e-6, 1);
}

static void try_attention(struct rig *r, const size_t *d)
{
    size_t B = d[0], T = d[1], C = d[2], NH = d[3], N = B * T;
    double range = (double)d[4]; // of queries and keys: with 100, scores reach thousands
    double *values = host_array(r, 3 * N * C);
    for (size_t i = 0; i < 3 * N * C; i++) {
        values[i] = uniform(r) * (i % (3 * C) < 2 * C ? range : 1);
    }
    struct tensor_ref qkv = input_of(r, values, 3 * N * C, false);
    struct tensor_ref dout = input(r, N * C, 0, 1), out = output(r, N * C, false);
    struct tensor_ref lse = output(r, N * NH, true), dqkv = output(r, 3 * N * C, false);
    struct tensor_ref last = output(r, C, false);
    double *y = host_array(r, N * C), *l = host_array(r, N * NH), *dx = host_array(r, 3 * N * C);
    // Where scores are large, their rounding is what exp() amplifies.
    double noise = 1e-6 * fmax(1, range * range / 4);
    double bf16_noise = r->variant->dtype == DTYPE_BF16 ? 6e-3 : 0; // backward reads a rounded out

    ref_attention_forward(y, l, qkv.values, B, T, C, NH);
    r->f->attention_forward(r->dev, out.at, lse.at, qkv.at, B, T, C, NH);
    check(r, "out", &out, y, noise, 1);
    check(r, "lse", &lse, l, 3e-7, 1);

    ref_attention_backward(dx, dout.values, qkv.values, B, T, C, NH);
    r->f->attention_backward(r->dev, dqkv.at, dout.at, qkv.at, out.at, lse.at, B, T, C, NH);
    check(r, "dqkv", &dqkv, dx, 2 * noise + bf16_noise, 1);

    if (B == 1) {
        r->f->attention_decode(r->dev, last.at, qkv.at, T, C, NH);
        check(r, "decoded", &last, y + (T - 1) * C, noise, 1);
    }
}

static void try_classifier(struct rig *r, const size_t *d)
{
    size_t N = d[0], V = d[1], Vp = d[2];
    double range = (double)d[3];
    double *values = host_array(r, N * Vp);
    int32_t *targets = malloc(N * sizeof *targets);
    for (size_t i = 0; i < N * Vp; i++) {
        values[i] = i % Vp < V ? range * uniform(r) : 1e6; // the padding must not be looked at
    }
    for (size_t i = 0; i < N; i++) {
        targets[i] = i % 5 == 3 ? -1 : (int32_t)((uniform(r) + 1) / 2 * (double)V);
    }
    struct tensor_ref logits = input_of(r, values, N * Vp, false), losses = output(r, N, true);
    int32_t *device_targets = input_tokens(r, targets, N);
    double *l = host_array(r, N), *dx = host_array(r, N * Vp);
    const float dscale = 1.0f / 3;

    ref_classifier(l, dx, values, targets, (double)dscale, N, V, Vp);
    r->f->classifier(r->dev, losses.at, logits.at, device_targets, 0, N, V, Vp);
    check(r, "losses", &losses, l, 2e-7, 1);
    r->f->classifier(r->dev, losses.at, logits.at, device_targets, dscale, N, V, Vp);
    check(r, "losses", &losses, l, 2e-7, 1);
    check(r, "dlogits", &logits, dx, 2e-7, 1e-3);
    free(targets);
}

static void try_sums(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    struct tensor_ref x = input(r, n, 0, 3);
    struct tensor_ref chunks = output(r, n / SUMSQ_CHUNK + 1, true), acc = output(r, n, true);
    struct tensor_ref rounded = output(r, n, false);
    double *fp32 = host_array(r, n), *sum = host_array(r, n), got;
    for (size_t i = 0; i < n; i++) {
        fp32[i] = uniform(r);
    }
    struct tensor_ref y = input_of(r, fp32, n, true);
    void *result = reserve(r, sizeof got);

    r->f->sumsq(r->dev, result, chunks.at, x.at, n);
    device_copy_out(r->dev, &got, result, sizeof got);
    assert_true(fabs(got - ref_sumsq(x.values, n)) <= 1e-6 * got);
    r->f->sumsq_fp32(r->dev, result, chunks.at, y.at, n);
    device_copy_out(r->dev, &got, result, sizeof got);
    assert_true(fabs(got - ref_sumsq(y.values, n)) <= 1e-6 * got);
    r->hash ^= (uint64_t)(got * 0x1p40);

    r->f->accumulate(r->dev, acc.at, x.at, true, n);
    check(r, "first", &acc, x.values, 0, 0);
    r->f->accumulate(r->dev, acc.at, x.at, false, n);
    for (size_t i = 0; i < n; i++) {
        sum[i] = 2 * x.values[i];
    }
    check(r, "sum", &acc, sum, 0, 0);
    r->f->cast(r->dev, rounded.at, y.at, n);
    check(r, "cast", &rounded, y.values, 0, 0);
}

// Sums of two bf16 numbers in the product (vector stores) and in the cast (scalar ones), and what
// they round to: to nearest, ties to even, overflow to infinity, a NaN stays one.
static void try_rounding(struct rig *r, const size_t *d)
{
    static const double table[][3] = {
        {1, 0x1p-8, 1},          {1, 0x3p-8, 1 + 0x4p-8},    {1, 0x1.02p-8, 1 + 0x1p-7},
        {-1, -0x1p-8, -1},       {-1, -0x3p-8, -1 - 0x4p-8}, {0x1.fep127, 0x1p119, INFINITY},
        {INFINITY, 1, INFINITY}, {INFINITY, -INFINITY, NAN}, {NAN, 1, NAN},
        {0x1p-133, 0, 0x1p-133},
    };
    size_t n = d[0];
    double *a = host_array(r, n), *b = host_array(r, n), *sum = host_array(r, n), one[] = {1};
    for (size_t i = 0; i < n; i++) {
        a[i] = table[i % COUNT(table)][0];
        b[i] = table[i % COUNT(table)][1];
        sum[i] = (double)((float)a[i] + (float)b[i]);
    }
    struct tensor_ref inp = input_of(r, one, 1, false), weight = input_of(r, a, n, false);
    struct tensor_ref bias = input_of(r, b, n, false), fp32 = input_of(r, sum, n, true);
    struct tensor_ref out = output(r, n, false), rounded = output(r, n, false);
    r->f->matmul_forward(r->dev, out.at, inp.at, weight.at, bias.at, NULL, 1, 1, n);
    r->f->cast(r->dev, rounded.at, fp32.at, n);
    const double *x = fetch(r, &out), *y = fetch(r, &rounded);
    for (size_t i = 0; i < n; i++) {
        double expected = r->variant->dtype == DTYPE_FP32 ? sum[i] : table[i % COUNT(table)][2];
        assert_true(isnan(expected) ? isnan(x[i]) : x[i] == expected);
        assert_true(isnan(expected) ? isnan(y[i]) : y[i] == expected);
    }
    // Rounding up must not carry these out of the NaNs.
    static const uint32_t nans[] = {0x7f800001, 0x7fffffff, 0xffffffff};
    device_copy_in(r->dev, fp32.at, nans, sizeof nans);
    r->f->cast(r->dev, rounded.at, fp32.at, COUNT(nans));
    const double *z = fetch(r, &rounded);
    assert_true(isnan(z[0]) && isnan(z[1]) && isnan(z[2]));
}

// Half an ulp of the larger term, which is what a single rounding may cost.
static double half_ulp(double a, double b)
{
    return 0x1p-24 * fmax(fabs(a), fabs(b)) + 1e-45;
}

// One update of n parameters, from a random state, judged element by element.
static void try_adamw(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    unsigned step = (unsigned)d[1];
    double lr = 1e-3 * (1 + step % 7), beta1 = 0.9, beta2 = 0.95;
    struct adamw a = {
        .beta1 = (float)beta1,
        .beta2 = (float)beta2,
        .one_minus_beta1 = (float)(1 - beta1),
        .one_minus_beta2 = (float)(1 - beta2),
        .eps = 1e-8f,
        .scale = step % 2 ? 1 : 0.37f,
        .decay = (float)(1 - lr * 0.1),
        .step = (float)(lr / (1 - pow(beta1, step))),
        .v_correction = (float)(1 / sqrt(1 - pow(beta2, step))),
    };
    for (int fp32_grad = 0; fp32_grad < 2; fp32_grad++) {
        double *p = host_array(r, n), *m = host_array(r, n), *v = host_array(r, n);
        double *g = host_array(r, n);
        for (size_t i = 0; i < n; i++) {
            p[i] = uniform(r);
            m[i] = 0.1 * uniform(r);
            v[i] = m[i] * m[i] + 1e-3 * (uniform(r) + 1); // as averages are: E[g^2] >= E[g]^2
            g[i] = i % 9 == 4 ? 0 : uniform(r);
        }
        struct tensor_ref master = input_of(r, p, n, true), tm = input_of(r, m, n, true);
        struct tensor_ref tv = input_of(r, v, n, true), tg = input_of(r, g, n, fp32_grad);
        struct tensor_ref params = r->variant->dtype == DTYPE_FP32 ? master : output(r, n, false);
        double *p0 = host_array(r, n), *m0 = host_array(r, n);
        memcpy(p0, p, n * sizeof *p);
        memcpy(m0, m, n * sizeof *m);
        ref_adamw(p, m, v, g, &a, n);
        if (fp32_grad) {
            r->f->adamw_fp32(r->dev, params.at, master.at, tm.at, tv.at, tg.at, &a, n);
        } else {
            r->f->adamw(r->dev, params.at, master.at, tm.at, tv.at, tg.at, &a, n);
        }
        const double *got_p = fetch(r, &master), *got_m = fetch(r, &tm), *got_v = fetch(r, &tv);
        const double *stored = fetch(r, &params);
        for (size_t i = 0; i < n; i++) {
            assert_true(fabs(got_m[i] - m[i]) <= 4 * half_ulp(m0[i], g[i]));
            assert_true(fabs(got_v[i] - v[i]) <= 4 * half_ulp(v[i], 0));
            // Old and new moment may cancel: it is their size that counts, not that of the sum.
            double largest = fmax(fabs(m0[i]), 0.1 * fabs(g[i]));
            double update = (double)a.step * largest / (sqrt(v[i]) * (double)a.v_correction);
            assert_true(fabs(got_p[i] - p[i]) <= 4 * half_ulp(p0[i], update));
            float f = (float)got_p[i];
            assert_true(stored[i] == (double)(params.fp32 ? f : bf16_load(bf16_round(f))));
        }
        check_canaries(r);
    }
}

// ---- all of them, over all shapes ---------------------------------------------------------------

#define MAX_SHAPES 16

struct op {
    const char *name;
    void (*run)(struct rig *, const size_t *dims);
    size_t shapes[MAX_SHAPES][5]; // ends with zeros, unless counts is set
    size_t count;                 // n from 0 to count-1 come before the shapes
    bool same_in_every_isa;
};

static const struct op ops[] = {
    {.name = "encoder",
     .run = try_encoder,
     .shapes = {{1, 1, 1}, {2, 3, 5}, {3, 17, 36}, {2, 5, 67}, {5, 33, 130}}},
    {.name = "layernorm",
     .run = try_layernorm,
     .shapes =
         {{1, 1}, {1, 7}, {3, 8}, {5, 33}, {17, 48}, {70, 36}, {2, 131}, {9, 1023}, {300, 16}}},
    {.name = "matmul",
     .run = try_matmul,
     .shapes = {{1, 1, 1},
                {1, 36, 108},
                {3, 5, 1},
                {4, 7, 9},
                {5, 33, 17},
                {17, 64, 31},
                {51, 36, 144},
                {2, 100, 1},
                {9, 1100, 20},
                {600, 21, 401},
                {20, 530, 37},
                {530, 3, 1030}}},
    {.name = "gelu",
     .run = try_gelu,
     .shapes = {{1, 1, 1},
                {1, 12, 31},
                {4, 7, 9},
                {5, 33, 17},
                {51, 144, 36},
                {9, 1100, 20},
                {600, 21, 401}}},
    {.name = "attention",
     .run = try_attention,
     .shapes = {{1, 1, 4, 1, 1},
                {2, 17, 36, 3, 1},
                {1, 64, 32, 2, 1},
                {1, 65, 16, 2, 2},
                {1, 128, 24, 3, 1},
                {1, 129, 24, 3, 1},
                {2, 200, 10, 5, 2},
                {1, 300, 7, 7, 3},
                {1, 70, 160, 1, 1},
                {1, 150, 30, 2, 20}}},
    {.name = "classifier",
     .run = try_classifier,
     .shapes = {{1, 1, 128, 1},
                {3, 211, 256, 4},
                {5, 128, 128, 30},
                {7, 257, 384, 4},
                {2, 50257, 50304, 4},
                {9, 3, 128, 20000}}},
    {.name = "sums",
     .run = try_sums,
     .shapes = {{1023}, {1024}, {1025}, {2049}, {65535}, {65536 + 17}},
     .count = 70,
     .same_in_every_isa = true},
    {.name = "rounding", .run = try_rounding, .shapes = {{10}, {40}, {47}}},
    // DeepSpeed #493, #735 and lightseq #98: the tail, every length, every step's own rate.
    {.name = "adamw",
     .run = try_adamw,
     .shapes = {{1023, 3}, {65536 + 9, 2}, {33, 1000}, {65, 100000}},
     .count = 201,
     .same_in_every_isa = true},
};

static void reset(struct rig *r)
{
    for (size_t i = 0; i < r->hosts; i++) {
        free(r->host[i]);
    }
    r->hosts = r->n_tensors = r->used = 0;
}

// Opens the variant's device; false: this machine cannot run it.
static bool open_rig(struct rig *r, const struct variant *v, int threads)
{
    struct device_config config = {.kind = "cpu",
                                   .dtype = v->dtype,
                                   .threads = threads,
                                   .head_size = 160,
                                   .max_seq = 300,
                                   .padded_vocab = 50304};
    struct error err;
    setenv("TRAIN_GPT_ISA", isa_name(v->isa), 1);
    setenv("TRAIN_GPT_BLAS", v->own_sgemm ? "own" : "openblas", 1);
    *r = (struct rig){.variant = v, .rng = 1};
    if (device_open(&r->dev, &config, &err)) {
        fprintf(stderr, "skipped: %s: %s\n", v->name, err.text);
        return false;
    }
    if (!v->own_sgemm && cpu_of(r->dev)->sgemm == cpu_sgemm(v->isa)) {
        fprintf(stderr, "skipped: %s: %s\n", v->name, r->dev->warning);
        device_close(r->dev);
        return false;
    }
    void *arena;
    assert_int_equal(device_arena(r->dev, ARENA_BYTES, &arena, &err), STATUS_OK);
    r->arena = arena;
    r->f = r->dev->layers;
    return true;
}

// Runs the operation over all its shapes; false: this machine cannot.
static bool run_op(const struct op *op, const struct variant *v, int threads, uint64_t *hash)
{
    struct rig r;
    if (!open_rig(&r, v, threads)) {
        return false;
    }
    r.op = op->name;
    for (size_t n = 0; n < op->count; n++) {
        op->run(&r, (size_t[5]){n, 1 + n % 50});
        reset(&r);
    }
    for (r.shape = 0; r.shape < MAX_SHAPES && op->shapes[r.shape][0]; r.shape++) {
        op->run(&r, op->shapes[r.shape]);
        reset(&r);
    }
    device_close(r.dev);
    *hash = r.hash;
    return true;
}

static const struct variant variants[] = {
    {"fp32 base", DTYPE_FP32, ISA_BASE, false},
    {"fp32 base, own sgemm", DTYPE_FP32, ISA_BASE, true},
    {"fp32 avx2", DTYPE_FP32, ISA_AVX2, false},
    {"fp32 avx2, own sgemm", DTYPE_FP32, ISA_AVX2, true},
    {"fp32 avx512", DTYPE_FP32, ISA_AVX512, false},
    {"fp32 avx512, own sgemm", DTYPE_FP32, ISA_AVX512, true},
    {"bf16 base", DTYPE_BF16, ISA_BASE, false},
    {"bf16 avx2", DTYPE_BF16, ISA_AVX2, false},
    {"bf16 avx512", DTYPE_BF16, ISA_AVX512, false},
};

struct op_case {
    const struct op *op;
    const struct variant *variant;
};

static void test_op(void **state)
{
    const struct op_case *c = *state;
    uint64_t hash, more_threads, base;
    if (!run_op(c->op, c->variant, 1, &hash)) {
        skip();
    }
    assert_true(run_op(c->op, c->variant, 3, &more_threads));
    assert_int_equal(hash, more_threads);
    if (c->op->same_in_every_isa) {
        struct variant own = {"base", c->variant->dtype, ISA_BASE, true};
        assert_true(run_op(c->op, &own, 1, &base));
        assert_int_equal(hash, base);
    }
}

int main(void)
{
    struct CMUnitTest tests[COUNT(ops) * COUNT(variants)];
    static struct op_case cases[COUNT(ops) * COUNT(variants)];
    static char names[COUNT(tests)][64];
    for (size_t i = 0; i < COUNT(tests); i++) {
        cases[i] = (struct op_case){ops + i / COUNT(variants), variants + i % COUNT(variants)};
        snprintf(names[i], sizeof names[i], "%s, %s", cases[i].op->name, cases[i].variant->name);
        tests[i] =
            (struct CMUnitTest){.name = names[i], .test_func = test_op, .initial_state = cases + i};
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
