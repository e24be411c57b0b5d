// gpu_check.c - what scripts/gpu_check.sh asks of a GPU beside training: are the kernels right, and
// how fast are its links, its products and Adam? Needs nothing that a test needs.
//
//     gpu_check kernels [--small]    every operation of layers.h on the cuda device, held against
//                                    the cpu device; and twice, to the same bits
//     gpu_check rates [--small]      copies alone and both ways at once, Adam here and there,
//     products
//
// Prints a row per line, tabs between its fields: what, number, unit, ok or FAIL or -, remark. Exit
// status 1: a row says FAIL, or the device gave an error. --small: for the CPU runtime of
// test/cuda.
#include "kernels/bf16.h"
#include "kernels/clock.h"
#include "kernels/layers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static bool small;

static void die(const char *what, const char *why)
{
    fprintf(stderr, "gpu_check: %s: %s\n", what, why);
    exit(1);
}

static void *host_memory(size_t bytes)
{
    void *p = calloc(1, bytes + 1);
    if (!p) {
        die("host memory", "there is not enough");
    }
    return p;
}

static struct device *open_device(const char *kind, enum dtype dtype, size_t bytes, void **arena)
{
    struct device *dev;
    struct error err;
    struct device_config config = {
        .kind = kind, .dtype = dtype, .head_size = 128, .max_seq = 1024, .padded_vocab = 50304};
    if (device_open(&dev, &config, &err) || device_arena(dev, bytes, arena, &err)) {
        die(kind, err.text);
    }
    return dev;
}

static void close_device(struct device *dev)
{
    struct error err;
    device_sync(dev);
    if (device_status(dev, &err)) {
        die(dev->kind, err.text);
    }
    device_close(dev);
}

static const char *dtype_name(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? "bf16" : "fp32";
}

static void row(const char *what, double number, const char *unit, const char *verdict,
                const char *remark)
{
    printf("%s\t%.6g\t%s\t%s\t%s\n", what, number, unit, verdict, remark);
    fflush(stdout);
}

// ---- kernels: tensors ---------------------------------------------------------------------------

enum kind { STORED, FP32, FP64 }; // STORED: of the device's dtype

// What is compared of an operation. |cuda - cpu| may be: so many units in the last place of the
// value, and `noise` of the largest value, which is what sums in another order deserve.
struct result {
    const char *name;
    const void *at;
    size_t n;
    enum kind kind;
    double ulps, noise;
    double *values;
    uint64_t hash;
};

// A device with the tensors of one case. The same case makes the same tensors on every device.
struct rig {
    struct device *dev;
    const struct layers *f;
    char *arena;
    size_t arena_bytes, used;
    uint64_t rng;
    struct result results[24];
    size_t n;
};

static double uniform(struct rig *r)
{
    r->rng = r->rng * 6364136223846793005u + 1442695040888963407u;
    return (double)(r->rng >> 11) * 0x1p-52 - 1;
}

static size_t size_of(const struct rig *r, enum kind kind)
{
    return kind == FP64 ? 8 : kind == FP32 ? 4 : dtype_bytes(r->dev->dtype);
}

static const char behind[64] = "nobody writes behind the end of a tensor";

static void *reserve(struct rig *r, size_t bytes)
{
    char *at = r->arena + r->used;
    r->used += device_round(bytes + sizeof behind);
    if (r->used > r->arena_bytes) {
        die("kernels", "the arena is too small for a case");
    }
    device_poke(r->dev, at + bytes, behind, sizeof behind);
    return at;
}

// Random values in mean +- range.
static void *input(struct rig *r, size_t n, enum kind kind, double mean, double range)
{
    size_t size = size_of(r, kind);
    char *host = host_memory(n * size);
    for (size_t i = 0; i < n; i++) {
        float x = (float)(mean + range * uniform(r));
        uint16_t h = bf16_round(x);
        memcpy(host + i * size, size == sizeof x ? (void *)&x : (void *)&h, size);
    }
    void *at = reserve(r, n * size);
    device_poke(r->dev, at, host, n * size);
    free(host);
    return at;
}

static int32_t *tokens_of(struct rig *r, int32_t *host, size_t n, size_t V, bool ignore_some)
{
    for (size_t i = 0; i < n; i++) {
        host[i] = (int32_t)((uniform(r) + 1) / 2 * (double)V);
        host[i] = ignore_some && i % 5 == 3 ? -1 : host[i];
    }
    int32_t *at = reserve(r, n * sizeof *host);
    device_poke(r->dev, at, host, n * sizeof *host);
    return at;
}

// What lies at `at` now is looked at when the operation is done.
static void *watch(struct rig *r, const char *name, void *at, size_t n, enum kind kind, double ulps,
                   double noise)
{
    if (r->n == COUNT(r->results)) {
        die(name, "too many results");
    }
    r->results[r->n++] = (struct result){name, at, n, kind, ulps, noise, NULL, 0};
    return at;
}

// A result, full of NaN at first, so that an element that is not written shows.
static void *output(struct rig *r, const char *name, size_t n, enum kind kind, double ulps,
                    double noise)
{
    size_t bytes = n * size_of(r, kind);
    char *host = host_memory(bytes);
    memset(host, 0xff, bytes);
    void *at = reserve(r, bytes);
    device_poke(r->dev, at, host, bytes);
    free(host);
    return watch(r, name, at, n, kind, ulps, noise);
}

static void fetch(struct rig *r, struct result *t)
{
    size_t size = size_of(r, t->kind);
    char *host = host_memory(t->n * size);
    t->values = host_memory(t->n * sizeof *t->values);
    device_peek(r->dev, host, t->at, t->n * size);
    t->hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < t->n * size; i++) {
        t->hash = (t->hash ^ (unsigned char)host[i]) * 0x100000001b3u;
    }
    for (size_t i = 0; i < t->n; i++) {
        uint16_t h;
        float f;
        memcpy(size == 2 ? (void *)&h : (void *)&f, host + i * size, size == 2 ? 2 : 4);
        t->values[i] = (double)(size == 2 ? bf16_load(h) : f);
        if (size == 8) {
            memcpy(t->values + i, host + i * size, 8);
        }
    }
    char end[sizeof behind];
    device_peek(r->dev, end, (const char *)t->at + t->n * size, sizeof end);
    if (memcmp(end, behind, sizeof end) != 0) {
        die(t->name, "wrote behind the end of the tensor");
    }
    free(host);
}

// ---- kernels: the operations --------------------------------------------------------------------

// Noise of sums in fp32, and of what is rounded to the dtype on the way there.
#define SUM   1e-5
#define INNER (r->dev->dtype == DTYPE_BF16 ? 8e-3 : 2e-5)

static void run_encoder(struct rig *r, const size_t *d)
{
    size_t B = d[0], T = d[1], C = d[2], N = B * T, V = 97, maxT = T + 3;
    void *wte = input(r, V * C, STORED, 0, 1), *wpe = input(r, maxT * C, STORED, 0, 1);
    void *dout = input(r, N * C, STORED, 0, 1);
    int32_t *host = host_memory(N * sizeof *host), *tokens = tokens_of(r, host, N, V, false);
    r->f->encoder_forward(r->dev, output(r, "out", N * C, STORED, 0, 0), tokens, wte, wpe, B, T, C);
    r->f->encoder_decode(r->dev, output(r, "decoded", C, STORED, 0, 0), host[N - 1], T - 1, wte,
                         wpe, C);
    float *dwte = watch(r, "dwte", input(r, V * C, FP32, 0, 1), V * C, FP32, 1, SUM);
    void *dwpe = output(r, "dwpe", maxT * C, STORED, 1, SUM);
    r->f->encoder_backward(r->dev, dwte, dwpe, dout, tokens, B, T, C, maxT);
    free(host);
}

static void run_layernorm(struct rig *r, const size_t *d)
{
    size_t N = d[0], C = d[1];
    void *inp = input(r, N * C, STORED, 5, 2), *weight = input(r, C, STORED, 1, 0.5);
    void *bias = input(r, C, STORED, 0, 1), *dout = input(r, N * C, STORED, 0, 1);
    void *residual = input(r, N * C, STORED, 0, 1);
    float *mean = output(r, "mean", N, FP32, 1, SUM), *rstd = output(r, "rstd", N, FP32, 1, SUM);
    r->f->layernorm_forward(r->dev, output(r, "out", N * C, STORED, 1, SUM), mean, rstd, inp,
                            weight, bias, N, C);
    for (int with = 0; with < 2; with++) {
        void *dinp = output(r, with ? "dinp and residual" : "dinp", N * C, STORED, 1, SUM);
        void *dweight = output(r, "dweight", C, STORED, 1, SUM);
        void *dbias = output(r, "dbias", C, STORED, 1, SUM);
        r->f->layernorm_backward(r->dev, dinp, dweight, dbias, dout, with ? residual : NULL, inp,
                                 weight, mean, rstd, N, C);
    }
    watch(r, "dinp in place", residual, N * C, STORED, 1, SUM);
    r->f->layernorm_backward(r->dev, residual, output(r, "dweight", C, STORED, 1, SUM),
                             output(r, "dbias", C, STORED, 1, SUM), dout, residual, inp, weight,
                             mean, rstd, N, C);
}

static void run_matmul(struct rig *r, const size_t *d)
{
    size_t N = d[0], C = d[1], OC = d[2];
    void *inp = input(r, N * C, STORED, 0, 1), *weight = input(r, OC * C, STORED, 0, 1);
    void *bias = input(r, OC, STORED, 0, 1), *residual = input(r, N * OC, STORED, 0, 1);
    void *dout = input(r, N * OC, STORED, 0, 1);
    r->f->matmul_forward(r->dev, output(r, "out", N * OC, STORED, 1, SUM), inp, weight, NULL, NULL,
                         N, C, OC);
    r->f->matmul_forward(r->dev, output(r, "out with bias", N * OC, STORED, 1, SUM), inp, weight,
                         bias, NULL, N, C, OC);
    r->f->matmul_forward(r->dev, output(r, "out with both", N * OC, STORED, 1, SUM), inp, weight,
                         bias, residual, N, C, OC);
    r->f->matmul_backward_input(r->dev, output(r, "dinp", N * C, STORED, 1, SUM), dout, weight, N,
                                C, OC);
    void *dbias = output(r, "dbias", OC, STORED, 1, SUM);
    r->f->matmul_backward_weight(r->dev, output(r, "dweight", OC * C, STORED, 1, SUM), dbias, dout,
                                 inp, N, C, OC);
    float *sum = output(r, "fp32 dweight", OC * C, FP32, 1, SUM);
    r->f->matmul_backward_weight_fp32(r->dev, sum, dout, inp, false, N, C, OC);
    r->f->matmul_backward_weight_fp32(r->dev, sum, dout, inp, true, N, C, OC);
}

static void run_gelu(struct rig *r, const size_t *d)
{
    size_t N = d[0], C = d[1], OC = d[2];
    void *inp = input(r, N * C, STORED, 0, 1), *weight = input(r, OC * C, STORED, 0, 1);
    void *bias = input(r, OC, STORED, 0, 3), *before = input(r, N * C, STORED, 0, 6);
    void *dout = input(r, N * OC, STORED, 0, 1);
    void *pre = output(r, "pre", N * OC, STORED, 1, SUM);
    // It is made from pre before or after that is rounded, and a library's may be an approximation.
    double noise = r->dev->dtype == DTYPE_BF16 ? 1e-3 : SUM;
    void *gelu = output(r, "gelu", N * OC, STORED, 3, noise);
    r->f->matmul_gelu_forward(r->dev, gelu, pre, inp, weight, bias, N, C, OC);
    void *dpre = output(r, "dpre", N * C, STORED, 3, noise);
    void *again = output(r, "gelu given back", N * C, STORED, 1, SUM);
    r->f->matmul_gelu_backward_input(r->dev, dpre, again, before, dout, weight, N, C, OC);
}

static void run_attention(struct rig *r, const size_t *d)
{
    size_t B = d[0], T = d[1], C = d[2], NH = d[3], N = B * T;
    void *qkv = input(r, 3 * N * C, STORED, 0, 1), *dout = input(r, N * C, STORED, 0, 1);
    void *out = output(r, "out", N * C, STORED, 1, INNER);
    float *lse = output(r, "lse", N * NH, FP32, 1, SUM);
    r->f->attention_forward(r->dev, out, lse, qkv, B, T, C, NH);
    r->f->attention_backward(r->dev, output(r, "dqkv", 3 * N * C, STORED, 1, INNER), dout, qkv, out,
                             lse, B, T, C, NH);
    r->f->attention_decode(r->dev, output(r, "decoded", C, STORED, 1, INNER), qkv, T, C, NH);
}

static void run_classifier(struct rig *r, const size_t *d)
{
    size_t N = d[0], V = d[1], Vp = d[2];
    void *logits = input(r, N * Vp, STORED, 0, 4);
    int32_t *host = host_memory(N * sizeof *host), *targets = tokens_of(r, host, N, V, true);
    r->f->classifier(r->dev, output(r, "losses", N, FP32, 1, SUM), logits, targets, 0, N, V, Vp);
    watch(r, "dlogits", logits, N * Vp, STORED, 1, SUM);
    r->f->classifier(r->dev, output(r, "losses", N, FP32, 1, SUM), logits, targets, 1.0f / 3, N, V,
                     Vp);
    free(host);
}

static void run_sums(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    void *x = input(r, n, STORED, 0, 3);
    float *y = input(r, n, FP32, 0, 1);
    float *chunks = reserve(r, (n / SUMSQ_CHUNK + 1) * sizeof *chunks);
    r->f->sumsq(r->dev, output(r, "sum of squares", 1, FP64, 0, 1e-6), chunks, x, n);
    r->f->sumsq_fp32(r->dev, output(r, "sum of fp32 squares", 1, FP64, 0, 1e-6), chunks, y, n);
    float *acc = output(r, "accumulated", n, FP32, 0, 0);
    r->f->accumulate(r->dev, acc, x, true, n);
    r->f->accumulate(r->dev, acc, x, false, n);
    r->f->cast(r->dev, output(r, "cast", n, STORED, 0, 0), y, n);
}

// The bits are the host's, since updates are made on either side.
static void run_adamw(struct rig *r, const size_t *d)
{
    size_t n = d[0];
    const struct adamw a = {.beta1 = 0.9f,
                            .beta2 = 0.95f,
                            .one_minus_beta1 = 0.1f,
                            .one_minus_beta2 = 0.05f,
                            .eps = 1e-8f,
                            .scale = 0.37f,
                            .decay = 0.9999f,
                            .step = 3e-3f,
                            .v_correction = 1.7f};
    bool fp32 = r->dev->dtype == DTYPE_FP32;
    void *grad = input(r, n, STORED, 0, 1), *sum = input(r, n, FP32, 0, 1);
    for (int i = 0; i < 4; i++) {
        struct adamw_state s = {input(r, n, FP32, 0, 1), input(r, n, FP32, 0, 0.1),
                                input(r, n, FP32, 0.02, 0.01)};
        struct adamw_state to = s;
        if (i >= 2) { // the result goes elsewhere
            to = (struct adamw_state){reserve(r, n * 4), reserve(r, n * 4), reserve(r, n * 4)};
        }
        void *params = fp32 ? to.master : output(r, "parameters", n, STORED, 0, 0);
        watch(r, "master", to.master, n, FP32, 0, 0);
        watch(r, "m", to.m, n, FP32, 0, 0);
        watch(r, "v", to.v, n, FP32, 0, 0);
        if (i == 0) {
            r->f->adamw(r->dev, params, s.master, s.m, s.v, grad, &a, n);
        } else if (i == 1) {
            r->f->adamw_fp32(r->dev, params, s.master, s.m, s.v, sum, &a, n);
        } else if (i == 2) {
            r->f->adamw_apart(r->dev, params, &to, &s, grad, &a, n);
        } else {
            r->f->adamw_apart_fp32(r->dev, params, &to, &s, sum, &a, n);
        }
    }
}

// Small shapes for the CPU runtime, and as they come; then those of models.
static const struct op {
    const char *name;
    void (*run)(struct rig *, const size_t *dims);
    size_t little[3][4], large[4][4]; // end with zeros
} ops[] = {
    {"encoder", run_encoder, {{2, 3, 8}, {3, 17, 40}}, {{4, 256, 768}, {2, 1000, 1600}}},
    {"layernorm",
     run_layernorm,
     {{1, 8}, {5, 40}, {33, 264}},
     {{1024, 768}, {777, 1600}, {64, 4096}}},
    {"matmul",
     run_matmul,
     {{1, 8, 24}, {5, 40, 16}, {33, 72, 136}},
     {{256, 768, 3072}, {1024, 1600, 4800}, {1, 768, 2304}, {333, 1024, 1000}}},
    {"gelu",
     run_gelu,
     {{1, 8, 32}, {5, 40, 16}, {33, 72, 136}},
     {{256, 768, 3072}, {1024, 1600, 6400}, {333, 1024, 1000}}},
    {"attention",
     run_attention,
     {{1, 1, 8, 1}, {2, 17, 48, 2}, {1, 70, 64, 1}},
     {{2, 1024, 768, 12}, {1, 333, 320, 5}, {2, 129, 256, 2}, {1, 512, 1600, 25}}},
    {"classifier",
     run_classifier,
     {{3, 211, 256}, {5, 128, 128}},
     {{256, 50257, 50304}, {1024, 257, 384}}},
    {"sums", run_sums, {{64}, {1025}, {70000}}, {{(size_t)1 << 22}, {12345677}}},
    {"adamw", run_adamw, {{64}, {1023}, {9001}}, {{(size_t)1 << 22}, {1234567}}},
};

// ---- kernels: comparison ------------------------------------------------------------------------

static void run_case(struct rig *r, const struct op *op, const size_t *dims)
{
    r->used = r->n = 0;
    r->rng = 1;
    op->run(r, dims);
    device_sync(r->dev);
    for (size_t i = 0; i < r->n; i++) {
        fetch(r, &r->results[i]);
    }
}

static void forget(struct rig *r)
{
    for (size_t i = 0; i < r->n; i++) {
        free(r->results[i].values);
    }
}

// The largest error as a multiple of what is allowed: more than 1 is wrong.
static double error_of(const struct result *got, const struct result *expected, enum dtype dtype)
{
    double ulp = got->kind == STORED && dtype == DTYPE_BF16 ? 0x1p-7 : 0x1p-23;
    double scale = 0, worst = 0;
    for (size_t i = 0; i < got->n; i++) {
        scale = fmax(scale, fabs(expected->values[i]));
    }
    for (size_t i = 0; i < got->n; i++) {
        double a = got->values[i], b = expected->values[i], error = fabs(a - b);
        double allowed = got->ulps * ulp * fabs(b) + got->noise * scale;
        if (error != 0 || isnan(a) != isnan(b)) {
            double ratio = error / allowed;
            worst = ratio <= worst ? worst : isnan(ratio) ? (double)INFINITY : ratio;
        }
    }
    return worst;
}

struct verdict {
    double worst;
    char remark[256];
    bool bad;
};

static void blame(struct verdict *v, const struct result *t, const size_t *d, const char *why)
{
    if (!v->bad) {
        snprintf(v->remark, sizeof v->remark, "%s of %zu x %zu x %zu x %zu: %s", t->name, d[0],
                 d[1], d[2], d[3], why);
    }
    v->bad = true;
}

static void compare(struct rig *cpu, struct rig *cuda, const struct op *op, const size_t *dims,
                    struct verdict *v)
{
    uint64_t hashes[COUNT(cuda->results)];
    run_case(cpu, op, dims);
    run_case(cuda, op, dims);
    for (size_t i = 0; i < cuda->n; i++) {
        const struct result *t = &cuda->results[i];
        double error = error_of(t, &cpu->results[i], cuda->dev->dtype);
        hashes[i] = t->hash;
        v->worst = fmax(v->worst, error);
        if (error > 1) {
            char why[64];
            snprintf(why, sizeof why, "off by %.3g times what is allowed", error);
            blame(v, t, dims, why);
        }
    }
    forget(cuda);
    run_case(cuda, op, dims);
    for (size_t i = 0; i < cuda->n; i++) {
        if (cuda->results[i].hash != hashes[i]) {
            blame(v, &cuda->results[i], dims, "other bits when it is run again");
        }
    }
    forget(cuda);
    forget(cpu);
}

static bool check_op(struct rig *cpu, struct rig *cuda, const struct op *op)
{
    struct verdict v = {0};
    struct error err;
    char what[64];
    for (size_t i = 0; i < COUNT(op->little) && op->little[i][0]; i++) {
        compare(cpu, cuda, op, op->little[i], &v);
    }
    for (size_t i = 0; !small && i < COUNT(op->large) && op->large[i][0]; i++) {
        compare(cpu, cuda, op, op->large[i], &v);
    }
    if (device_status(cuda->dev, &err)) {
        die(op->name, err.text);
    }
    snprintf(what, sizeof what, "%s, %s", op->name, dtype_name(cuda->dev->dtype));
    row(what, v.worst, "of the tolerance", v.bad ? "FAIL" : "ok", v.remark);
    return !v.bad;
}

static bool check_kernels(void)
{
    bool good = true;
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        struct rig cpu = {.arena_bytes = (size_t)(small ? 16 : 1024) << 20}, cuda = cpu;
        void *arena;
        cpu.dev = open_device("cpu", (enum dtype)dtype, cpu.arena_bytes, &arena);
        cpu.arena = arena;
        cuda.dev = open_device("cuda", (enum dtype)dtype, cuda.arena_bytes, &arena);
        cuda.arena = arena;
        cpu.f = cpu.dev->layers;
        cuda.f = cuda.dev->layers;
        if (dtype == DTYPE_FP32) {
            fprintf(stderr, "%s\n%s\n", cuda.dev->summary, cpu.dev->summary);
        }
        for (size_t i = 0; i < COUNT(ops); i++) {
            good &= check_op(&cpu, &cuda, &ops[i]);
        }
        close_device(cuda.dev);
        close_device(cpu.dev);
    }
    return good;
}

// ---- rates --------------------------------------------------------------------------------------

#define TRIES 8

// Bytes per second of copies of so many bytes, to and from the device, one way or both.
static void copy_rates(struct device *dev, char *device, char *host, size_t bytes, bool in,
                       bool out, double rates[2])
{
    device_sync(dev);
    double start = clock_s();
    device_begin(dev, DEVICE_COPY_IN, "copies in");
    device_begin(dev, DEVICE_COPY_OUT, "copies out");
    for (int i = 0; i < TRIES; i++) {
        if (in) {
            device_copy_in(dev, device, host, bytes);
        }
        if (out) {
            device_copy_out(dev, host + bytes, device + bytes, bytes);
        }
    }
    device_end(dev, DEVICE_COPY_IN, 0);
    device_end(dev, DEVICE_COPY_OUT, 1);
    device_sync(dev);
    for (size_t i = 0; i < 2; i++) {
        rates[i] = TRIES * (double)bytes / (device_passed_s(dev, i) - start);
    }
}

static void measure_copies(void)
{
    size_t bytes = (size_t)(small ? 1 : 256) << 20;
    struct error err;
    void *device, *host;
    struct device *dev = open_device("cuda", DTYPE_BF16, 2 * bytes, &device);
    if (device_host_arena(dev, 2 * bytes, true, &host, &err) || device_marks(dev, 2, &err)) {
        die("pinned memory", err.text);
    }
    double in[2], out[2], both[2];
    copy_rates(dev, device, host, bytes, true, true, both); // warms up
    copy_rates(dev, device, host, bytes, true, false, in);
    copy_rates(dev, device, host, bytes, false, true, out);
    copy_rates(dev, device, host, bytes, true, true, both);
    row("copy in", in[0] / 1e9, "GB/s", "-", "alone");
    row("copy out", out[1] / 1e9, "GB/s", "-", "alone");
    row("copy in, duplex", both[0] / 1e9, "GB/s", "-", "both at once");
    row("copy out, duplex", both[1] / 1e9, "GB/s", "-", "both at once");
    close_device(dev);
}

// Parameters per second of the update in 16 bits, which moves 28 bytes for each.
static double adam_rate(const char *kind, size_t n)
{
    void *arena;
    size_t wide = device_round(n * 4), slim = device_round(n * 2);
    struct device *dev = open_device(kind, DTYPE_BF16, 3 * wide + 2 * slim, &arena);
    float *master = arena, *m = master + wide / 4, *v = m + wide / 4;
    char *grad = (char *)(v + wide / 4), *params = grad + slim;
    const struct adamw a = {.beta1 = 0.9f,
                            .beta2 = 0.95f,
                            .one_minus_beta1 = 0.1f,
                            .one_minus_beta2 = 0.05f,
                            .eps = 1e-8f,
                            .scale = 1,
                            .decay = 1,
                            .step = 1e-3f,
                            .v_correction = 1};
    double best = 0;
    for (int i = 0; i < TRIES; i++) {
        device_sync(dev);
        double start = clock_s();
        dev->layers->adamw(dev, params, master, m, v, grad, &a, n);
        device_sync(dev);
        best = fmax(best, (double)n / (clock_s() - start));
    }
    close_device(dev);
    return best;
}

static void measure_rates(void)
{
    size_t n = small ? (size_t)1 << 16 : (size_t)1 << 26, edge = small ? 128 : 8192;
    measure_copies();
    double device = adam_rate("cuda", n), host = adam_rate("cpu", n);
    row("Adam, device", device / 1e9, "Gparam/s", "-", "");
    row("Adam, device", 28 * device / 1e9, "GB/s", "-", "28 bytes a parameter");
    row("Adam, host", host / 1e9, "Gparam/s", "-", "");
    row("Adam, host", 28 * host / 1e9, "GB/s", "-", "28 bytes a parameter");
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        void *arena;
        char what[32];
        struct device *dev = open_device("cuda", (enum dtype)dtype, DEVICE_ALIGN, &arena);
        snprintf(what, sizeof what, "products, %s", dtype_name((enum dtype)dtype));
        row(what, device_matmul_rate(dev, dtype == DTYPE_FP32 ? edge / 2 : edge) / 1e12, "TFLOP/s",
            "-", "square, the best of several");
        close_device(dev);
    }
}

int main(int argc, char **argv)
{
    small = argc == 3 && strcmp(argv[2], "--small") == 0;
    if (argc == 2 || small) {
        if (strcmp(argv[1], "kernels") == 0) {
            return check_kernels() ? 0 : 1;
        }
        if (strcmp(argv[1], "rates") == 0) {
            measure_rates();
            return 0;
        }
    }
    fputs("usage: gpu_check kernels|rates [--small]\n", stderr);
    return 2;
}
