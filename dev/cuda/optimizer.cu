// optimizer.cu - study of AdamW, whether accesses by 16 bytes and past the caches pay, and of the
// norm's sum, which must give the bits of a sum in order.
#include "dev/cuda/study.h"
#include "kernels/cuda/group.h"

#include <stdio.h>

enum { P = packed<floatX>::size };

static const struct adamw scalars = {.beta1 = 0.9f,
                                     .beta2 = 0.95f,
                                     .one_minus_beta1 = 0.1f,
                                     .one_minus_beta2 = 0.05f,
                                     .eps = 1e-8f,
                                     .scale = 0.5f,
                                     .decay = 0.9999f,
                                     .step = 1e-3f,
                                     .v_correction = 1.5f};

static struct {
    floatX *params, *grad;
    float *master, *m, *v, *chunks, *x;
    double *sum;
    size_t n;
} t;

// ---- AdamW --------------------------------------------------------------------------------------

__device__ static void update(float *p, float *m, float *v, float g, const struct adamw &a)
{
    g = __fmul_rn(g, a.scale);
    *m = __fadd_rn(__fmul_rn(a.beta1, *m), __fmul_rn(a.one_minus_beta1, g));
    *v = __fadd_rn(__fmul_rn(a.beta2, *v), __fmul_rn(__fmul_rn(a.one_minus_beta2, g), g));
    float divisor = __fadd_rn(__fmul_rn(__fsqrt_rn(*v), a.v_correction), a.eps);
    *p = __fsub_rn(__fmul_rn(*p, a.decay), __fdiv_rn(__fmul_rn(a.step, *m), divisor));
}

static __global__ void elements(floatX *params, float *master, float *m, float *v,
                                const floatX *grad, struct adamw a, size_t n)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        update(master + i, m + i, v + i, to_float(grad[i]), a);
        if (sizeof(floatX) < sizeof(float)) {
            params[i] = from_float<floatX>(master[i]);
        }
    }
}

__device__ static void load_streaming(float (&x)[P], const float *from)
{
    for (int i = 0; i < P; i += 4) {
        float4 f = __ldcs(reinterpret_cast<const float4 *>(from + i));
        x[i] = f.x, x[i + 1] = f.y, x[i + 2] = f.z, x[i + 3] = f.w;
    }
}

__device__ static void store_streaming(float *to, const float (&x)[P])
{
    for (int i = 0; i < P; i += 4) {
        __stcs(reinterpret_cast<float4 *>(to + i), make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
    }
}

// n is a multiple of 8 here.
static __global__ void streaming(floatX *params, float *master, float *m, float *v,
                                 const floatX *grad, struct adamw a, size_t n)
{
    size_t at = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * P;
    if (at >= n) {
        return;
    }
    float g[P], p[P], mi[P], vi[P];
    load_group(g, grad + at);
    load_streaming(p, master + at);
    load_streaming(mi, m + at);
    load_streaming(vi, v + at);
    for (int i = 0; i < P; i++) {
        update(p + i, mi + i, vi + i, g[i], a);
    }
    store_streaming(master + at, p);
    store_streaming(m + at, mi);
    store_streaming(v + at, vi);
    if (sizeof(floatX) < sizeof(float)) {
        store_group(params + at, p);
    }
}

static void run_elements(struct device *dev, unsigned block)
{
    LAUNCH(dev, elements, blocks_of(t.n, block), block, 0, t.params, t.master, t.m, t.v, t.grad,
           scalars, t.n);
}

static void run_streaming(struct device *dev, unsigned block)
{
    LAUNCH(dev, streaming, blocks_of(t.n, (size_t)block * P), block, 0, t.params, t.master, t.m,
           t.v, t.grad, scalars, t.n);
}

static void run_adamw(struct device *dev, unsigned)
{
    dev->layers->adamw(dev, t.params, t.master, t.m, t.v, t.grad, &scalars, t.n);
}

static const struct version adamw[] = {
    {"an element per thread", run_elements, {256, 64, 1024}},
    {"16 bytes, state past the caches", run_streaming, {64, 128, 256, 512}},
    {"16 bytes: shipped", run_adamw, {}},
};

// ---- sum of squares -----------------------------------------------------------------------------

static __global__ void sum_in_order(double *sum, const float *chunks, size_t count)
{
    double total = 0;
    for (size_t i = 0; i < count; i++) {
        total += (double)chunks[i];
    }
    *sum = total;
}

// The chunks' sums by what is shipped, then theirs by one thread.
static void run_in_order(struct device *dev, unsigned)
{
    dev->layers->sumsq_fp32(dev, t.sum, t.chunks, t.x, t.n);
    LAUNCH(dev, sum_in_order, 1, 1, 0, t.sum, t.chunks, (t.n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK);
}

static void run_sumsq(struct device *dev, unsigned)
{
    dev->layers->sumsq_fp32(dev, t.sum, t.chunks, t.x, t.n);
}

static const struct version sumsq[] = {
    {"shipped, and again by one thread", run_in_order, {}},
    {"any order where it is exact: shipped", run_sumsq, {}},
};

static bool try_shape(struct study *s, size_t n, bool timed)
{
    char shape[64];
    bool bf16 = sizeof(floatX) == 2;
    study_reset(s);
    t.n = n;
    t.master = (float *)study_state(s, n, true, 1, 0);
    t.m = (float *)study_state(s, n, true, 0.1f, 0);
    t.v = (float *)study_state(s, n, true, 0, 0);
    t.grad = (floatX *)study_input(s, n, false, 1);
    t.params = bf16 ? (floatX *)study_output(s, n, false, 0) : (floatX *)t.master;
    snprintf(shape, sizeof shape, "adamw n=%zu", n);
    double bytes = 28.0 * (double)n; // state read and written, gradient, in bf16 the parameter
    bool good = study_compare(s, shape, adamw, 3, timed ? bytes : 0);
    study_reset(s);
    t.x = (float *)study_input(s, n, true, 1);
    t.chunks = (float *)study_input(s, n / SUMSQ_CHUNK + 1, true, 0);
    t.sum = (double *)study_output(s, 2, true, 0); // a double's bits
    snprintf(shape, sizeof shape, "sumsq_fp32 n=%zu", n);
    return study_compare(s, shape, sumsq, 2, timed ? (double)n * sizeof(float) : 0) && good;
}

int main(int argc, char **argv)
{
    struct study *s = study_open(sizeof(floatX) == 2 ? DTYPE_BF16 : DTYPE_FP32, argc, argv);
    bool small = study_small(s), good = true;
    static const size_t few[] = {8, 1032, 70000}, many[] = {(size_t)7 << 20, (size_t)30 << 20};
    for (size_t n : few) {
        good &= try_shape(s, n, false);
    }
    for (size_t n : many) {
        good &= small || try_shape(s, n, true);
    }
    return good ? 0 : 1;
}
