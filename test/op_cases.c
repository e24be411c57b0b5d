#include "test/op_cases.h"
#include "kernels/bf16.h"
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

// A device under test with the tensors of the shape that is being tried. The tests keep to the
// device seam: tensors live in the device's arena and are copied.
struct rig {
    const struct op_variant *variant;
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

static void to_device(struct rig *r, void *at, const void *host, size_t bytes)
{
    device_sync(r->dev);
    if (bytes > 0) {
        device_poke(r->dev, at, host, bytes);
    }
}

static void from_device(struct rig *r, void *host, const void *at, size_t bytes)
{
    device_sync(r->dev);
    if (bytes > 0) {
        device_peek(r->dev, host, at, bytes);
    }
}

static void *reserve(struct rig *r, size_t bytes, bool read_only)
{
    static const char canary[CANARY_BYTES] = "nobody writes behind the end of a tensor";
    char *at = r->arena + r->used;
    r->used += device_round(bytes + CANARY_BYTES);
    assert_true(r->used <= ARENA_BYTES && r->n_tensors < COUNT(r->tensors));
    to_device(r, at + bytes, canary, CANARY_BYTES);
    if (r->variant->tensor && bytes > 0) {
        r->variant->tensor(at, bytes, read_only);
    }
    r->tensors[r->n_tensors++] = (struct tensor_check){at, bytes};
    return at;
}

static void check_canaries(struct rig *r)
{
    for (size_t i = 0; i < r->n_tensors; i++) {
        char behind[CANARY_BYTES];
        from_device(r, behind, r->tensors[i].at + r->tensors[i].bytes, CANARY_BYTES);
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
    struct tensor_ref t = {reserve(r, bytes, false), NULL, n, fp32};
    device_fill(r->dev, t.at, 0xff, bytes);
    return t;
}

// A tensor that holds `values`, which are rounded to its dtype first.
static struct tensor_ref tensor_of(struct rig *r, double *values, size_t n, bool fp32,
                                   bool read_only)
{
    size_t size = elem_size(r, fp32);
    struct tensor_ref t = {reserve(r, n * size, read_only), values, n, fp32};
    char *host = malloc(n * size + 1);
    for (size_t i = 0; i < n; i++) {
        float x = (float)values[i];
        uint16_t h = bf16_round(x);
        memcpy(host + i * size, size == sizeof x ? (void *)&x : (void *)&h, size);
        values[i] = (double)(size == sizeof x ? x : bf16_load(h));
    }
    to_device(r, t.at, host, n * size);
    free(host);
    return t;
}

static struct tensor_ref input_of(struct rig *r, double *values, size_t n, bool fp32)
{
    return tensor_of(r, values, n, fp32, true);
}

// Read and written.
static struct tensor_ref state_of(struct rig *r, double *values, size_t n, bool fp32)
{
    return tensor_of(r, values, n, fp32, false);
}

// Random values in mean +- range.
static double *random_values(struct rig *r, size_t n, double mean, double range)
{
    double *values = host_array(r, n);
    for (size_t i = 0; i < n; i++) {
        values[i] = mean + range * uniform(r);
    }
    return values;
}

static struct tensor_ref input(struct rig *r, size_t n, double mean, double range)
{
    return input_of(r, random_values(r, n, mean, range), n, false);
}

static int32_t *input_tokens(struct rig *r, int32_t *host, size_t n)
{
    void *at = reserve(r, n * sizeof *host, true);
    to_device(r, at, host, n * sizeof *host);
    return at;
}

// What the device holds, in double; adds it to the hash.
static double *fetch(struct rig *r, const struct tensor_ref *t)
{
    size_t size = elem_size(r, t->fp32);
    double *x = host_array(r, t->n);
    char *host = malloc(t->n * size + 1);
    from_device(r, host, t->at, t->n * size);
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
    bool cpu = strcmp(r->variant->kind, "cpu") == 0;
    for (size_t i = 0; i < t->n; i++) {
        scale = fmax(scale, fabs(expected[i]));
    }
    for (size_t i = 0; i < t->n; i++) {
        double error = fabs(x[i] - expected[i]);
        if (!(error <= half_ulp * fabs(expected[i]) + noise * scale)) {
            fail_msg("%s %s, shape %zu: %s[%zu] is %.9g, not %.9g; that is %.3g of the largest",
                     r->op, r->variant->name, r->shape, what, i, x[i], expected[i], error / scale);
        }
        // It would make whatever reads it on a CPU tens of times slower.
        if (cpu && x[i] != 0 && fabs(x[i]) < (double)FLT_MIN) {
            fail_msg("%s %s, shape %zu: %s[%zu] is subnormal: %g", r->op, r->variant->name,
                     r->shape, what, i, x[i]);
        }
    }
    check_canaries(r);
}

// Where a device rounds to bf16 on the way to a result, in sums of weights below 1 or once more.
static double bf16_noise(const struct rig *r, double noise)
{
    return r->variant->rows_of_8 && r->variant->dtype == DTYPE_BF16 ? noise : 0;
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
        // In long texts most tokens are rare: 0 is nearly everywhere.
        tokens[i] = (int32_t)(pow((uniform(r) + 1) / 2, N > 1000 ? 64 : 1) * (double)V);
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
    struct tensor_ref dwte = state_of(r, expected_dwte, V * C, true);
    ref_encoder_backward(expected_dwte, expected_dwpe, dout.values, tokens, B, T, C);
    r->f->encoder_backward(r->dev, dwte.at, dwpe.at, dout.at, device_tokens, B, T, C, maxT);
    check(r, "dwte", &dwte, expected_dwte, N > 1000 ? 1e-6 : 2e-7, 1);
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
    struct tensor_ref dbias = output(r, C, false);
    struct tensor_ref residual = state_of(r, random_values(r, N * C, 0, 1), N * C, false);
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
    const double noise = r->variant->rows_of_8 ? 3e-6 : 1e-6;

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
    check(r, "gelu", &gelu, y, 1e-6 + bf16_noise(r, 4e-3), 1);

    ref_matmul_backward(dx, dw, db, dout.values, inp.values, weight.values, N, C, OC);
    ref_gelu_backward(dx, dx, before.values, N * C);
    ref_gelu_forward(g, before.values, N * C);
    r->f->matmul_gelu_backward_input(r->dev, dpre.at, again.at, before.at, dout.at, weight.at, N, C,
                                     OC);
    check(r, "dpre", &dpre, dx, 3e-6 + bf16_noise(r, 4e-3), sqrt((double)OC));
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
    double inside = bf16_noise(r, 4e-3);                         // probabilities
    double rounded = r->variant->dtype == DTYPE_BF16 ? 6e-3 : 0; // backward reads a rounded out

    ref_attention_forward(y, l, qkv.values, B, T, C, NH);
    r->f->attention_forward(r->dev, out.at, lse.at, qkv.at, B, T, C, NH);
    check(r, "out", &out, y, noise + inside, 1);
    check(r, "lse", &lse, l, r->variant->rows_of_8 ? 1e-6 : 3e-7, 1);

    ref_attention_backward(dx, dout.values, qkv.values, B, T, C, NH);
    r->f->attention_backward(r->dev, dqkv.at, dout.at, qkv.at, out.at, lse.at, B, T, C, NH);
    check(r, "dqkv", &dqkv, dx, 2 * noise + rounded + inside, 1);

    if (B == 1) {
        r->f->attention_decode(r->dev, last.at, qkv.at, T, C, NH);
        check(r, "decoded", &last, y + (T - 1) * C, noise + inside, 1);
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
    struct tensor_ref logits = state_of(r, values, N * Vp, false), losses = output(r, N, true);
    int32_t *device_targets = input_tokens(r, targets, N);
    double *l = host_array(r, N), *dx = host_array(r, N * Vp);
    const float dscale = 1.0f / 3;

    ref_classifier(l, dx, values, targets, (double)dscale, N, V, Vp);
    r->f->classifier(r->dev, losses.at, logits.at, device_targets, 0, N, V, Vp);
    check(r, "losses", &losses, l, 2e-7, 1);
    r->f->classifier(r->dev, losses.at, logits.at, device_targets, dscale, N, V, Vp);
    check(r, "losses", &losses, l, 2e-7, 1);
    check(r, "dlogits", &logits, dx, 2e-7, 1e-3);

    static const char nan[] = "\xff\xff\xff\xff";
    to_device(r, (char *)logits.at + (V - 1) * elem_size(r, false), nan, elem_size(r, false));
    r->f->classifier(r->dev, losses.at, logits.at, device_targets, 0, N, V, Vp);
    assert_true(isnan(fetch(r, &losses)[0]));
    free(targets);
}

static void check_norm(struct rig *r, const void *at, const struct tensor_ref *x)
{
    double got, expected = ref_sumsq(x->values, x->n);
    uint64_t bits;
    from_device(r, &got, at, sizeof got);
    assert_true(fabs(got - expected) <= 1e-6 * expected);
    memcpy(&bits, &got, sizeof bits);
    r->hash = (r->hash ^ bits) * 0x100000001b3u;
    check_canaries(r);
}

static void try_norm(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    double *values = random_values(r, n, 0, 3);
    for (size_t i = 4 * SUMSQ_CHUNK; i < n && i < 40 * SUMSQ_CHUNK; i++) {
        values[i] *= i / SUMSQ_CHUNK % 3 ? 1 : 0x1p-20; // of these the double sum loses bits
    }
    struct tensor_ref x = input_of(r, values, n, false);
    struct tensor_ref y = input_of(r, random_values(r, n, 0, 1), n, true);
    struct tensor_ref chunks = output(r, n / SUMSQ_CHUNK + 1, true);
    void *sum = reserve(r, sizeof(double), false);
    r->f->sumsq(r->dev, sum, chunks.at, x.at, n);
    check_norm(r, sum, &x);
    r->f->sumsq_fp32(r->dev, sum, chunks.at, y.at, n);
    check_norm(r, sum, &y);
}

// What is not finite must come out of the norm, wherever it is.
static void try_infinite_norm(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    for (size_t i = 0; i < 2; i++) {
        double *values = random_values(r, n, 0, 1), got;
        values[d[1]] = i ? (double)INFINITY : (double)NAN;
        struct tensor_ref x = input_of(r, values, n, false);
        struct tensor_ref chunks = output(r, n / SUMSQ_CHUNK + 1, true);
        void *sum = reserve(r, sizeof(double), false);
        r->f->sumsq(r->dev, sum, chunks.at, x.at, n);
        from_device(r, &got, sum, sizeof got);
        assert_true(i ? isinf(got) : isnan(got));
    }
}

static void try_sums(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    struct tensor_ref x = input(r, n, 0, 3), acc = output(r, n, true);
    struct tensor_ref y = input_of(r, random_values(r, n, 0, 1), n, true);
    struct tensor_ref rounded = output(r, n, false);
    double *sum = host_array(r, n);

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

// Sums of two bf16 numbers in the embedding (vector stores) and in the cast (scalar ones), and what
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
    double *a = host_array(r, n), *b = host_array(r, n), *sum = host_array(r, n);
    for (size_t i = 0; i < n; i++) {
        a[i] = table[i % COUNT(table)][0];
        b[i] = table[i % COUNT(table)][1];
        sum[i] = (double)((float)a[i] + (float)b[i]);
    }
    struct tensor_ref wte = input_of(r, a, n, false), wpe = input_of(r, b, n, false);
    struct tensor_ref fp32 = input_of(r, sum, n, true);
    struct tensor_ref out = output(r, n, false), rounded = output(r, n, false);
    r->f->encoder_decode(r->dev, out.at, 0, 0, wte.at, wpe.at, n);
    r->f->cast(r->dev, rounded.at, fp32.at, n);
    const double *x = fetch(r, &out), *y = fetch(r, &rounded);
    for (size_t i = 0; i < n; i++) {
        double expected = r->variant->dtype == DTYPE_FP32 ? sum[i] : table[i % COUNT(table)][2];
        assert_true(isnan(expected) ? isnan(x[i]) : x[i] == expected);
        assert_true(isnan(expected) ? isnan(y[i]) : y[i] == expected);
    }
    // Rounding up must not carry these out of the NaNs.
    static const uint32_t nans[] = {0x7f800001, 0x7fffffff, 0xffffffff};
    to_device(r, fp32.at, nans, sizeof nans);
    r->f->cast(r->dev, rounded.at, fp32.at, COUNT(nans));
    const double *z = fetch(r, &rounded);
    assert_true(isnan(z[0]) && isnan(z[1]) && isnan(z[2]));
}

// Half an ulp of the larger term, which is what a single rounding may cost.
static double half_ulp(double a, double b)
{
    return 0x1p-24 * fmax(fabs(a), fabs(b)) + 1e-45;
}

// The tensors of an update: one that a test makes, or the state apart that it writes to.
struct update {
    struct tensor_ref master, m, v, params;
};

static struct adamw_state state_at(const struct update *u)
{
    return (struct adamw_state){u->master.at, u->m.at, u->v.at};
}

static void run_adamw(struct rig *r, const struct update *to, const struct update *from,
                      const struct tensor_ref *grad, const struct adamw *a)
{
    struct adamw_state state = state_at(to), before = state_at(from);
    size_t n = grad->n;
    if (to != from && grad->fp32) {
        r->f->adamw_apart_fp32(r->dev, to->params.at, &state, &before, grad->at, a, n);
    } else if (to != from) {
        r->f->adamw_apart(r->dev, to->params.at, &state, &before, grad->at, a, n);
    } else if (grad->fp32) {
        r->f->adamw_fp32(r->dev, to->params.at, state.master, state.m, state.v, grad->at, a, n);
    } else {
        r->f->adamw(r->dev, to->params.at, state.master, state.m, state.v, grad->at, a, n);
    }
}

static void expect_same(struct rig *r, const struct tensor_ref *a, const struct tensor_ref *b)
{
    assert_memory_equal(fetch(r, a), fetch(r, b), a->n * sizeof(double));
}

static struct update empty_update(struct rig *r, size_t n)
{
    struct update u = {output(r, n, true), output(r, n, true), output(r, n, true), {0}};
    u.params = r->variant->dtype == DTYPE_FP32 ? u.master : output(r, n, false);
    return u;
}

static struct adamw scalars_of(unsigned step)
{
    double lr = 1e-3 * (1 + step % 7), beta1 = 0.9, beta2 = 0.95;
    return (struct adamw){
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
}

// One update of n parameters, from a random state, judged element by element; and the same from
// one place to another.
static void update(struct rig *r, size_t n, const struct adamw *a, bool fp32_grad)
{
    double *p = random_values(r, n, 0, 1), *m = random_values(r, n, 0, 0.1);
    double *v = host_array(r, n), *g = random_values(r, n, 0, 1);
    for (size_t i = 0; i < n; i++) {
        v[i] = m[i] * m[i] + 1e-3 * (uniform(r) + 1); // as averages are: E[g^2] >= E[g]^2
        g[i] = i % 9 == 4 ? 0 : g[i];
    }
    struct tensor_ref grad = input_of(r, g, n, fp32_grad);
    struct update apart = empty_update(r, n);
    struct update u = {state_of(r, p, n, true), state_of(r, m, n, true), state_of(r, v, n, true),
                       .params = {0}};
    u.params = r->variant->dtype == DTYPE_FP32 ? u.master : output(r, n, false);
    double *p0 = host_array(r, n), *m0 = host_array(r, n);
    memcpy(p0, p, n * sizeof *p);
    memcpy(m0, m, n * sizeof *m);
    ref_adamw(p, m, v, g, a, n);
    run_adamw(r, &apart, &u, &grad, a);
    run_adamw(r, &u, &u, &grad, a);
    const double *got_p = fetch(r, &u.master), *got_m = fetch(r, &u.m), *got_v = fetch(r, &u.v);
    const double *stored = fetch(r, &u.params);
    for (size_t i = 0; i < n; i++) {
        assert_true(fabs(got_m[i] - m[i]) <= 4 * half_ulp(m0[i], g[i]));
        assert_true(fabs(got_v[i] - v[i]) <= 4 * half_ulp(v[i], 0));
        // Old and new moment may cancel: it is their size that counts, not that of the sum.
        double largest = fmax(fabs(m0[i]), 0.1 * fabs(g[i]));
        double step = (double)a->step * largest / (sqrt(v[i]) * (double)a->v_correction);
        // Roundings: 3 of m, 5 of the divisor, 2 of the quotient; 2 where p is decayed and moved.
        assert_true(fabs(got_p[i] - p[i]) <= 10 * half_ulp(step, 0) + 2 * half_ulp(p0[i], 0));
        float f = (float)got_p[i];
        assert_true(stored[i] == (double)(u.params.fp32 ? f : bf16_load(bf16_round(f))));
    }
    expect_same(r, &apart.master, &u.master);
    expect_same(r, &apart.m, &u.m);
    expect_same(r, &apart.v, &u.v);
    expect_same(r, &apart.params, &u.params);
    check_canaries(r);
}

static void try_adamw(struct rig *r, const size_t *d)
{
    struct adamw a = scalars_of((unsigned)d[1]);
    update(r, d[0], &a, false);
    update(r, d[0], &a, true);
}

// ---- all of them, over all shapes ---------------------------------------------------------------

static const struct op_case op_cases[] = {
    {.name = "encoder",
     .run = try_encoder,
     .shapes = {{1, 1, 1}, {2, 3, 5}, {3, 17, 36}, {2, 5, 67}, {5, 33, 130}},
     .rows_of_8 = {{1, 1, 8},
                   {2, 3, 16},
                   {3, 17, 40},
                   {2, 5, 72},
                   {5, 33, 136},
                   {1, 2100, 8},
                   {2, 2, 2056}}},
    {.name = "layernorm",
     .run = try_layernorm,
     .shapes =
         {{1, 1}, {1, 7}, {3, 8}, {5, 33}, {17, 48}, {70, 36}, {2, 131}, {9, 1023}, {300, 16}},
     .rows_of_8 = {{1, 8},
                   {3, 16},
                   {5, 40},
                   {17, 48},
                   {70, 72},
                   {9, 1032},
                   {300, 16},
                   {9, 1544},
                   {3, 3080},
                   {2, 6152}}},
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
                {530, 3, 1030}},
     .rows_of_8 = {{1, 8, 8},
                   {1, 40, 120},
                   {3, 8, 16},
                   {5, 40, 24},
                   {17, 64, 32},
                   {51, 40, 144},
                   {2, 104, 8},
                   {9, 1104, 24},
                   {600, 24, 408},
                   {20, 536, 40},
                   {530, 8, 1032}}},
    {.name = "gelu",
     .run = try_gelu,
     .shapes = {{1, 1, 1},
                {1, 12, 31},
                {4, 7, 9},
                {5, 33, 17},
                {51, 144, 36},
                {9, 1100, 20},
                {600, 21, 401}},
     .rows_of_8 = {{1, 8, 8},
                   {1, 16, 32},
                   {4, 8, 16},
                   {5, 40, 24},
                   {51, 144, 40},
                   {9, 1104, 24},
                   {600, 24, 408}}},
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
                {1, 150, 30, 2, 20}},
     .rows_of_8 = {{1, 1, 8, 1, 1},
                   {2, 17, 24, 3, 1},
                   {1, 64, 64, 2, 1},
                   {1, 65, 80, 2, 2},
                   {1, 129, 48, 1, 1},
                   {2, 40, 320, 5, 2},
                   {1, 150, 32, 1, 3},
                   {1, 33, 240, 2, 1},
                   {1, 70, 128, 1, 20}}},
    {.name = "classifier",
     .run = try_classifier,
     .shapes = {{1, 1, 128, 1},
                {3, 211, 256, 4},
                {5, 128, 128, 30},
                {7, 257, 384, 4},
                {2, 50257, 50304, 4},
                {9, 3, 128, 20000}}},
    {.name = "norm",
     .run = try_norm,
     .shapes = {{1023}, {1024}, {1025}, {2049}, {65535}, {65536 + 17}},
     .rows_of_8 = {{1023}, {1024}, {1025}, {2049}, {65536 + 17}, {4100 * 1024 + 3}},
     .count = 70,
     .same_everywhere = true},
    {.name = "norm that is not finite",
     .run = try_infinite_norm,
     .shapes = {{1, 0}, {100, 99}, {5000, 1}, {5000, 4999}}},
    {.name = "sums",
     .run = try_sums,
     .shapes = {{1023}, {1025}, {65535}, {65536 + 17}},
     .count = 70,
     .same_everywhere = true},
    {.name = "rounding",
     .run = try_rounding,
     .shapes = {{10}, {40}, {47}},
     .rows_of_8 = {{16}, {40}, {48}}},
    // DeepSpeed #493, #735 and lightseq #98: the tail, every length, every step's own rate.
    {.name = "adamw",
     .run = try_adamw,
     .shapes = {{1023, 3}, {65536 + 9, 2}, {33, 1000}, {65, 100000}},
     .count = 201,
     .same_everywhere = true},
};

// Forgets the tensors of a shape.
static void reset(struct rig *r)
{
    device_sync(r->dev);
    if (r->variant->forget) {
        r->variant->forget(r->dev);
    }
    for (size_t i = 0; i < r->hosts; i++) {
        free(r->host[i]);
    }
    r->hosts = r->n_tensors = r->used = 0;
}

// The device of the case that runs, or of one that failed.
static struct device *open_device;

static void close_device(void)
{
    device_close(open_device);
    open_device = NULL;
}

// Opens the variant's device; false: this machine cannot run it.
static bool open_rig(struct rig *r, const struct op_variant *v, int threads)
{
    struct device_config config = {.kind = v->kind,
                                   .dtype = v->dtype,
                                   .threads = threads,
                                   .head_size = v->rows_of_8 ? 128 : 160,
                                   .max_seq = 300,
                                   .padded_vocab = 50304};
    struct error err;
    setenv("TRAIN_GPT_ISA", isa_name(v->isa), 1);
    setenv("TRAIN_GPT_BLAS", v->own_sgemm ? "own" : "openblas", 1);
    *r = (struct rig){.variant = v, .rng = 1};
    if (open_device) {
        close_device();
    }
    if (device_open(&open_device, &config, &err)) {
        fprintf(stderr, "skipped: %s: %s\n", v->name, err.text);
        open_device = NULL;
        return false;
    }
    r->dev = open_device;
    bool cpu = strcmp(v->kind, "cpu") == 0;
    if (cpu && !v->own_sgemm && cpu_of(r->dev)->sgemm == cpu_sgemm(v->isa)) {
        fprintf(stderr, "skipped: %s: %s\n", v->name, r->dev->warning);
        close_device();
        return false;
    }
    void *arena;
    assert_int_equal(device_arena(r->dev, ARENA_BYTES, &arena, &err), STATUS_OK);
    r->arena = arena;
    r->f = r->dev->layers;
    reset(r);
    return true;
}

bool op_run(const struct op_case *op, const struct op_variant *v, int threads, uint64_t *hash)
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
    bool own = v->rows_of_8 && op->rows_of_8[0][0];
    const size_t(*shapes)[5] = own ? op->rows_of_8 : op->shapes;
    for (r.shape = 0; r.shape < OP_SHAPES && shapes[r.shape][0]; r.shape++) {
        op->run(&r, shapes[r.shape]);
        reset(&r);
    }
    struct error err;
    if (device_status(r.dev, &err)) {
        fail_msg("%s %s: %s", op->name, v->name, err.text);
    }
    close_device();
    *hash = r.hash;
    return true;
}

int op_main(const struct op_variant *variants, size_t n_variants, void (*test)(void **state))
{
    size_t n = COUNT(op_cases) * n_variants;
    struct op_test tests[n];
    struct CMUnitTest units[n];
    for (size_t i = 0; i < n; i++) {
        struct op_test *t = tests + i;
        t->op = op_cases + i / n_variants;
        t->variant = variants + i % n_variants;
        snprintf(t->name, sizeof t->name, "%s, %s", t->op->name, t->variant->name);
        units[i] = (struct CMUnitTest){.name = t->name, .test_func = test, .initial_state = t};
    }
    return cmocka_run_group_tests(units, NULL, NULL);
}
