// Both implementations of attention on the CPU runtime, against the reference in double: head sizes
// and lengths that are no multiple of any tile, all orders of lanes, warps and blocks.
//
// An element may be off by what is rounded on the way to it, no more. With u half an ulp of what is
// stored, w half an ulp of a left operand of the tensor cores (0: not rounded), e the fp32 noise of
// a probability, and sums over absolute values:
//
//   out    u |out| + (w + e) sum_j p_ij |v_j|
//   D      sum |dout| err(out): backward reads an `out` that has been rounded
//   ds     p (err(D) + e (sum |dout| |v| + |D|)) + (w + e) |ds|
//   dq     u |dq| + scale sum_j err(ds_ij) |k_j|        dk: the same over i, with q
//   dv     u |dv| + (w + e) sum_i p_ij |dout_i|
//
// e grows with the scores, whose rounding the exponential amplifies.
#include "kernels/bf16.h"
#include "kernels/cuda/attention.h"
#include "test/cmocka.h"
#include "test/cuda/sim.h"
#include "test/reference.h"
#include "test/tiny.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES  ((size_t)16 << 20)
#define COUNT(array) (sizeof(array) / sizeof *(array))

struct variant {
    const char *name;
    enum dtype dtype;
    const struct attention_passes *passes;
    double stored, operand; // half an ulp, of 1
};

static struct variant variants[] = {
    {"plain fp32", DTYPE_FP32, &attention_plain_cuda_fp32, 0x1p-24, 0},
    {"plain bf16", DTYPE_BF16, &attention_plain_cuda_bf16, 0x1p-8, 0},
    {"mma bf16", DTYPE_BF16, &attention_mma_cuda_bf16, 0x1p-8, 0x1p-8},
};

struct shape {
    size_t hs, NH, B, T;
    double range; // of queries and keys
};

// Values are what the tensors hold, exactly; bounds are on top of a reference.
struct problem {
    struct shape s;
    size_t C, N;
    double *qkv, *dout;
    double *out, *lse, *dqkv;
    double *out_bound, *lse_bound, *dqkv_bound;
};

static double *array(size_t n)
{
    double *x = calloc(n, sizeof *x);
    assert_non_null(x);
    return x;
}

static double rounded(double x, enum dtype dtype)
{
    return dtype == DTYPE_FP32 ? (double)(float)x : (double)bf16_load(bf16_round((float)x));
}

static double uniform(uint64_t *rng)
{
    *rng = *rng * 6364136223846793005u + 1442695040888963407u;
    return (double)(*rng >> 11) * 0x1p-52 - 1;
}

static void close_problem(struct problem *p)
{
    double *all[] = {p->qkv,  p->dout,      p->out,       p->lse,
                     p->dqkv, p->out_bound, p->lse_bound, p->dqkv_bound};
    for (size_t i = 0; i < COUNT(all); i++) {
        free(all[i]);
    }
}

// ---- bounds -------------------------------------------------------------------------------------

static double dot(const double *a, const double *b, size_t n, bool absolute)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += absolute ? fabs(a[i] * b[i]) : a[i] * b[i];
    }
    return sum;
}

static void add_abs(double *acc, const double *x, double k, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        acc[i] += k * fabs(x[i]);
    }
}

// What query i of one head, whose rows begin at q, adds to the bounds. Gradients lie as values do.
static void bound_query(struct problem *p, const struct variant *v, const double *q, size_t b,
                        size_t h, size_t i)
{
    size_t C = p->C, hs = p->s.hs, row = 3 * C;
    double scale = 1 / sqrt((double)hs), most = 0, D = 0, err_D = 0;
    const double *qi = q + i * row;
    double *bound = p->dqkv_bound + (q - p->qkv), lse = p->lse[(b * p->s.NH + h) * p->s.T + i];
    size_t at = (b * p->s.T + i) * C + h * hs;
    const double *dout = p->dout + at, *out = p->out + at;
    for (size_t j = 0; j <= i; j++) {
        most = fmax(most, scale * dot(qi, q + j * row + C, hs, true));
    }
    double e = 0x1p-22 * (4 + most), we = v->operand + e;
    p->lse_bound[(b * p->s.NH + h) * p->s.T + i] = e;
    add_abs(p->out_bound + at, out, v->stored, hs);
    for (size_t j = 0; j <= i; j++) {
        double prob = exp(scale * dot(qi, q + j * row + C, hs, false) - lse);
        add_abs(p->out_bound + at, q + j * row + 2 * C, we * prob, hs);
        add_abs(bound + j * row + 2 * C, dout, we * prob, hs);
    }
    D = dot(dout, out, hs, false);
    err_D = dot(dout, p->out_bound + at, hs, true) + e * fabs(D);
    for (size_t j = 0; j <= i; j++) {
        const double *k = q + j * row + C, *value = k + C;
        double prob = exp(scale * dot(qi, k, hs, false) - lse);
        double ds = prob * (dot(dout, value, hs, false) - D);
        double err = prob * (err_D + e * dot(dout, value, hs, true)) + we * fabs(ds);
        add_abs(bound + i * row, k, scale * err, hs);
        add_abs(bound + j * row + C, qi, scale * err, hs);
    }
}

static struct problem open_problem(const struct shape *s, const struct variant *v, uint64_t *rng)
{
    struct problem p = {.s = *s, .C = s->hs * s->NH, .N = s->B * s->T};
    size_t n = p.N * p.C;
    p.qkv = array(3 * n);
    p.dout = array(n);
    for (size_t i = 0; i < 3 * n; i++) {
        double range = i % (3 * p.C) < 2 * p.C ? s->range : 1;
        p.qkv[i] = rounded(range * uniform(rng), v->dtype);
    }
    for (size_t i = 0; i < n; i++) {
        p.dout[i] = rounded(uniform(rng), v->dtype);
    }
    p.out = array(n);
    p.lse = array(p.N * s->NH);
    p.dqkv = array(3 * n);
    p.out_bound = array(n);
    p.lse_bound = array(p.N * s->NH);
    p.dqkv_bound = array(3 * n);
    ref_attention_forward(p.out, p.lse, p.qkv, s->B, s->T, p.C, s->NH);
    ref_attention_backward(p.dqkv, p.dout, p.qkv, s->B, s->T, p.C, s->NH);
    for (size_t i = 0; i < s->B * s->NH * s->T; i++) {
        size_t b = i / (s->NH * s->T), h = i / s->T % s->NH;
        bound_query(&p, v, p.qkv + b * s->T * 3 * p.C + h * s->hs, b, h, i % s->T);
    }
    for (size_t i = 0; i < 3 * n; i++) {
        p.dqkv_bound[i] += v->stored * fabs(p.dqkv[i]);
    }
    return p;
}

// ---- the device ---------------------------------------------------------------------------------

struct rig {
    const struct variant *v;
    struct device *dev;
    char *arena;
    size_t used;
};

// Every byte that kernels may touch is within one of these.
static void *tensor(struct rig *r, const void *host, size_t bytes, bool read_only)
{
    char *at = r->arena + r->used;
    r->used += device_round(bytes) + DEVICE_ALIGN;
    assert_true(r->used <= ARENA_BYTES);
    if (host) {
        device_poke(r->dev, at, host, bytes);
    } else {
        device_fill(r->dev, at, 0xff, bytes); // NaN: what is not written shows
    }
    sim_part(at, bytes, read_only);
    return at;
}

static void *stored(const struct variant *v, const double *x, size_t n)
{
    uint16_t *halves = malloc(n * sizeof *halves);
    float *floats = malloc(n * sizeof *floats);
    assert_true(halves && floats);
    for (size_t i = 0; i < n; i++) {
        floats[i] = (float)x[i];
        halves[i] = bf16_round(floats[i]);
    }
    free(v->dtype == DTYPE_FP32 ? (void *)halves : (void *)floats);
    return v->dtype == DTYPE_FP32 ? (void *)floats : (void *)halves;
}

static double value_at(enum dtype dtype, const void *x, size_t i)
{
    float f;
    uint16_t h;
    if (dtype == DTYPE_FP32) {
        memcpy(&f, (const char *)x + i * sizeof f, sizeof f);
        return (double)f;
    }
    memcpy(&h, (const char *)x + i * sizeof h, sizeof h);
    return (double)bf16_load(h);
}

static void check(const struct problem *p, const struct variant *v, const char *what,
                  enum dtype dtype, const void *x, const double *expected, const double *bound,
                  size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double got = value_at(dtype, x, i), error = fabs(got - expected[i]);
        if (!(error <= bound[i] + 1e-30)) {
            fail_msg("%s, hs %zu NH %zu B %zu T %zu: %s[%zu] is %.9g, not %.9g: off by %.3g, may "
                     "be by %.3g",
                     v->name, p->s.hs, p->s.NH, p->s.B, p->s.T, what, i, got, expected[i], error,
                     bound[i]);
        }
    }
}

static void check_no_reports(void)
{
    for (int kind = 0; kind < SIM_KINDS; kind++) {
        if (sim_reports(kind)) {
            fail_msg("the runtime reported: %s", sim_last_report());
        }
    }
}

// Outputs, one behind the other: out, lse, dqkv, as bytes.
struct result {
    char *bytes;
    size_t out, lse, dqkv, all; // where they begin
};

// Forward and backward of batch rows first..first+B of a problem.
static struct result run(struct rig *r, const struct problem *p, size_t first, size_t B)
{
    size_t e = dtype_bytes(r->v->dtype), n = B * p->s.T * p->C, row = p->s.T * p->C;
    size_t lse_bytes = B * p->s.T * p->s.NH * sizeof(float);
    struct result y = {NULL, 0, n * e, n * e + lse_bytes, 4 * n * e + lse_bytes};
    void *host_qkv = stored(r->v, p->qkv + 3 * first * row, 3 * n);
    void *host_dout = stored(r->v, p->dout + first * row, n);
    r->used = 0;
    sim_parts_forget();
    void *qkv = tensor(r, host_qkv, 3 * n * e, true), *out = tensor(r, NULL, n * e, false);
    void *lse = tensor(r, NULL, lse_bytes, false);
    r->v->passes->forward(r->dev, out, lse, qkv, B, p->s.T, p->C, p->s.NH);
    void *dout = tensor(r, host_dout, n * e, true), *dqkv = tensor(r, NULL, 3 * n * e, false);
    r->v->passes->backward(r->dev, dqkv, dout, qkv, out, lse, B, p->s.T, p->C, p->s.NH);
    device_sync(r->dev);
    y.bytes = malloc(y.all);
    assert_non_null(y.bytes);
    device_peek(r->dev, y.bytes + y.out, out, n * e);
    device_peek(r->dev, y.bytes + y.lse, lse, lse_bytes);
    device_peek(r->dev, y.bytes + y.dqkv, dqkv, 3 * n * e);
    free(host_qkv);
    free(host_dout);
    struct error err;
    if (device_status(r->dev, &err)) {
        fail_msg("%s: %s", r->v->name, err.text);
    }
    check_no_reports();
    return y;
}

static void check_result(const struct rig *r, const struct problem *p, const struct result *y)
{
    size_t n = p->N * p->C;
    const struct variant *v = r->v;
    check(p, v, "out", v->dtype, y->bytes + y->out, p->out, p->out_bound, n);
    check(p, v, "lse", DTYPE_FP32, y->bytes + y->lse, p->lse, p->lse_bound, p->N * p->s.NH);
    check(p, v, "dqkv", v->dtype, y->bytes + y->dqkv, p->dqkv, p->dqkv_bound, 3 * n);
}

static struct rig open_rig(const struct variant *v)
{
    struct device_config config = {.kind = "cuda",
                                   .dtype = v->dtype,
                                   .head_size = ATTENTION_HEAD_SIZE_MAX,
                                   .max_seq = 512,
                                   .padded_vocab = 128};
    struct rig r = {.v = v};
    struct error err;
    void *arena;
    if (device_open(&r.dev, &config, &err) || device_arena(r.dev, ARENA_BYTES, &arena, &err)) {
        fail_msg("%s", err.text);
    }
    r.arena = arena;
    return r;
}

static void close_rig(struct rig *r)
{
    sim_parts_forget();
    device_close(r->dev);
}

// ---- tests --------------------------------------------------------------------------------------

static const struct shape shapes[] = {
    {8, 3, 1, 5, 1},    {16, 2, 1, 17, 1},  {24, 1, 2, 16, 1},  {32, 2, 1, 63, 1},
    {40, 1, 1, 64, 1},  {48, 1, 1, 65, 1},  {56, 2, 1, 17, 1},  {64, 1, 1, 1, 1},
    {64, 2, 1, 5, 1},   {64, 1, 1, 63, 1},  {64, 1, 1, 130, 1}, {72, 1, 1, 17, 1},
    {80, 2, 1, 33, 1},  {88, 1, 1, 17, 1},  {96, 1, 1, 65, 1},  {104, 1, 1, 16, 1},
    {112, 1, 1, 5, 1},  {120, 1, 1, 63, 1}, {128, 1, 1, 1, 1},  {128, 1, 1, 130, 1},
    {128, 2, 1, 17, 1}, {32, 1, 1, 65, 12}, // scores in the hundreds
    {16, 1, 1, 260, 1},                     // several tiles on each side of the diagonal
};

static void test_shapes(void **state)
{
    uint64_t rng = test_seed();
    struct rig r = open_rig(*state);
    for (size_t i = 0; i < COUNT(shapes); i++) {
        struct problem p = open_problem(shapes + i, r.v, &rng);
        sim_settings()->order = SIM_FORWARD;
        struct result y = run(&r, &p, 0, p.s.B);
        check_result(&r, &p, &y);
        free(y.bytes);
        close_problem(&p);
    }
    close_rig(&r);
}

// Whatever order lanes, warps and blocks run in, and whatever other rows are in the batch.
static void test_same_bits(void **state)
{
    static const struct shape batch[] = {{40, 1, 2, 65, 1}, {64, 2, 3, 17, 1}, {128, 1, 2, 33, 1}};
    uint64_t rng = test_seed();
    struct rig r = open_rig(*state);
    for (size_t i = 0; i < COUNT(batch); i++) {
        struct problem p = open_problem(batch + i, r.v, &rng);
        sim_settings()->order = SIM_FORWARD;
        struct result y = run(&r, &p, 0, p.s.B);
        check_result(&r, &p, &y);
        for (int order = SIM_REVERSE; order <= SIM_SHUFFLE; order++) {
            sim_settings()->order = order;
            sim_settings()->seed = rng;
            struct result z = run(&r, &p, 0, p.s.B);
            assert_memory_equal(y.bytes, z.bytes, y.all);
            free(z.bytes);
        }
        struct result z = run(&r, &p, p.s.B - 1, 1);
        assert_memory_equal(y.bytes + y.lse / p.s.B * (p.s.B - 1), z.bytes, z.lse);
        assert_memory_equal(y.bytes + y.all - (z.all - z.dqkv), z.bytes + z.dqkv, z.all - z.dqkv);
        free(z.bytes);
        free(y.bytes);
        close_problem(&p);
    }
    close_rig(&r);
}

static void test_decode(void **state)
{
    static const struct shape prefixes[] = {{8, 3, 1, 1, 1},    {40, 2, 1, 3, 1},
                                            {64, 2, 1, 33, 1},  {80, 1, 1, 64, 4},
                                            {128, 2, 1, 65, 1}, {120, 1, 1, 130, 1}};
    uint64_t rng = test_seed();
    struct rig r = open_rig(*state);
    for (size_t i = 0; i < 3 * COUNT(prefixes); i++) {
        struct problem p = open_problem(prefixes + i / 3, r.v, &rng);
        size_t bytes = p.C * dtype_bytes(r.v->dtype), last = (p.N - 1) * p.C;
        void *host = stored(r.v, p.qkv, 3 * p.N * p.C), *y = malloc(bytes);
        sim_settings()->order = (int)(i % 3);
        r.used = 0;
        sim_parts_forget();
        void *qkv = tensor(&r, host, 3 * p.N * bytes, true), *out = tensor(&r, NULL, bytes, false);
        r.dev->layers->attention_decode(r.dev, out, qkv, p.N, p.C, p.s.NH);
        device_sync(r.dev);
        device_peek(r.dev, y, out, bytes);
        check(&p, r.v, "decoded", r.v->dtype, y, p.out + last, p.out_bound + last, p.C);
        check_no_reports();
        free(host);
        free(y);
        close_problem(&p);
    }
    close_rig(&r);
}

static void test_head_sizes(void **state)
{
    (void)state;
    for (size_t hs = 0; hs < 200; hs++) {
        bool fits = hs >= 8 && hs <= 128 && hs % 8 == 0;
        assert_int_equal(attention_head_size_fits(hs), fits);
    }
}

int main(void)
{
    struct CMUnitTest tests[] = {
        {"shapes, plain fp32", test_shapes, NULL, NULL, variants},
        {"shapes, plain bf16", test_shapes, NULL, NULL, variants + 1},
        {"shapes, mma bf16", test_shapes, NULL, NULL, variants + 2},
        {"same bits, plain fp32", test_same_bits, NULL, NULL, variants},
        {"same bits, plain bf16", test_same_bits, NULL, NULL, variants + 1},
        {"same bits, mma bf16", test_same_bits, NULL, NULL, variants + 2},
        {"decode, fp32", test_decode, NULL, NULL, variants},
        {"decode, bf16", test_decode, NULL, NULL, variants + 1},
        cmocka_unit_test(test_head_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
