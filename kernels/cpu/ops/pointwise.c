// pointwise.c - operations that visit every element once: optimizer, norm, casts, sums.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#include <math.h>

// Elements that a thread takes at a time.
#define BLOCK ((size_t)65536)

static inline size_t block_end(size_t lo, size_t n)
{
    return lo + BLOCK < n ? lo + BLOCK : n;
}

// The element arithmetic of AdamW: g, p, m and v are updated. No fused multiply-add anywhere: mul,
// add, sqrt and div are IEEE operations, so the bits are the same in every ISA and on every device.
#define ADAMW(p, m, v, g)                                                                          \
    g *= a.scale;                                                                                  \
    m = a.beta1 * m + a.one_minus_beta1 * g;                                                       \
    v = a.beta2 * v + a.one_minus_beta2 * g * g;                                                   \
    p = p * a.decay - a.step * m / (sqrtf(v) * a.v_correction + a.eps)

#define ADAMW_BLOCK(name, grad_type, grad_load)                                                    \
    static void name(floatX *params, float *restrict master, float *restrict m, float *restrict v, \
                     const grad_type *restrict grad, struct adamw a, size_t lo, size_t hi)         \
    {                                                                                              \
        for (size_t i = lo; i < hi; i++) {                                                         \
            float g = grad_load(grad + i), p = master[i], mi = m[i], vi = v[i];                    \
            ADAMW(p, mi, vi, g);                                                                   \
            m[i] = mi;                                                                             \
            v[i] = vi;                                                                             \
            master[i] = p;                                                                         \
            ADAMW_STORE(params + i, p);                                                            \
        }                                                                                          \
    }

// The same from one place to another, in groups whose results bypass the caches: a line that is
// written as a whole need not be read first.
#define GROUP ((size_t)16)
#define ADAMW_APART(name, grad_type, grad_load)                                                    \
    static void name(floatX *params, const struct adamw_state *to, const struct adamw_state *from, \
                     const grad_type *restrict grad, struct adamw a, size_t lo, size_t hi)         \
    {                                                                                              \
        const float *restrict master = from->master, *restrict m = from->m, *restrict v = from->v; \
        size_t i = lo;                                                                             \
        for (; i + GROUP <= hi; i += GROUP) {                                                      \
            float p[GROUP], mi[GROUP], vi[GROUP];                                                  \
            for (size_t k = 0; k < GROUP; k++) {                                                   \
                float g = grad_load(grad + i + k);                                                 \
                p[k] = master[i + k];                                                              \
                mi[k] = m[i + k];                                                                  \
                vi[k] = v[i + k];                                                                  \
                ADAMW(p[k], mi[k], vi[k], g);                                                      \
                ADAMW_STORE(params + i + k, p[k]);                                                 \
            }                                                                                      \
            stream_group(to->master + i, p);                                                       \
            stream_group(to->m + i, mi);                                                           \
            stream_group(to->v + i, vi);                                                           \
        }                                                                                          \
        stream_end();                                                                              \
        for (; i < hi; i++) {                                                                      \
            float g = grad_load(grad + i), p = master[i], mi = m[i], vi = v[i];                    \
            ADAMW(p, mi, vi, g);                                                                   \
            to->m[i] = mi;                                                                         \
            to->v[i] = vi;                                                                         \
            to->master[i] = p;                                                                     \
            ADAMW_STORE(params + i, p);                                                            \
        }                                                                                          \
    }

#ifdef USE_BF16
#define ADAMW_STORE(p, x) store(p, x)
#else
#define ADAMW_STORE(p, x) (void)(p) // params is master
#endif

static inline float load_fp32(const float *p)
{
    return *p;
}

ADAMW_BLOCK(adamw_block, floatX, load)
ADAMW_BLOCK(adamw_block_fp32, float, load_fp32)
ADAMW_APART(adamw_apart_block, floatX, load)
ADAMW_APART(adamw_apart_block_fp32, float, load_fp32)

void OP(adamw)(struct device *dev, void *params, float *master, float *m, float *v,
               const void *grad, const struct adamw *a, size_t n)
{
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < n; lo += BLOCK) {
        adamw_block(params, master, m, v, grad, *a, lo, block_end(lo, n));
    }
}

void OP(adamw_fp32)(struct device *dev, void *params, float *master, float *m, float *v,
                    const float *grad, const struct adamw *a, size_t n)
{
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < n; lo += BLOCK) {
        adamw_block_fp32(params, master, m, v, grad, *a, lo, block_end(lo, n));
    }
}

void OP(adamw_apart)(struct device *dev, void *params, const struct adamw_state *to,
                     const struct adamw_state *from, const void *grad, const struct adamw *a,
                     size_t n)
{
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < n; lo += BLOCK) {
        adamw_apart_block(params, to, from, grad, *a, lo, block_end(lo, n));
    }
}

void OP(adamw_apart_fp32)(struct device *dev, void *params, const struct adamw_state *to,
                          const struct adamw_state *from, const float *grad, const struct adamw *a,
                          size_t n)
{
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < n; lo += BLOCK) {
        adamw_apart_block_fp32(params, to, from, grad, *a, lo, block_end(lo, n));
    }
}

// 16 running sums whatever the ISA, so that the norm has the same bits in all of them.
#define LANES 16

#define CHUNK_SUMSQ(name, type, type_load)                                                         \
    static float name(const type *x, size_t n)                                                     \
    {                                                                                              \
        float lane[LANES] = {0};                                                                   \
        size_t i = 0;                                                                              \
        for (; i + LANES <= n; i += LANES) {                                                       \
            for (size_t l = 0; l < LANES; l++) {                                                   \
                float f = type_load(x + i + l);                                                    \
                lane[l] += f * f;                                                                  \
            }                                                                                      \
        }                                                                                          \
        for (size_t l = 0; i < n; i++, l++) {                                                      \
            float f = type_load(x + i);                                                            \
            lane[l] += f * f;                                                                      \
        }                                                                                          \
        for (size_t half = LANES / 2; half > 0; half /= 2) {                                       \
            for (size_t l = 0; l < half; l++) {                                                    \
                lane[l] += lane[l + half];                                                         \
            }                                                                                      \
        }                                                                                          \
        return lane[0];                                                                            \
    }

CHUNK_SUMSQ(chunk_sumsq, floatX, load)
CHUNK_SUMSQ(chunk_sumsq_fp32, float, load_fp32)

static inline size_t chunk_size(size_t chunk, size_t n)
{
    size_t left = n - chunk * SUMSQ_CHUNK;
    return left < SUMSQ_CHUNK ? left : SUMSQ_CHUNK;
}

static double sum_in_order(const float *chunks, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += chunks[i];
    }
    return sum;
}

void OP(sumsq)(struct device *dev, double *sum, float *chunks, const void *x, size_t n)
{
    size_t count = (n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK;
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t i = 0; i < count; i++) {
        chunks[i] = chunk_sumsq((const floatX *)x + i * SUMSQ_CHUNK, chunk_size(i, n));
    }
    *sum = sum_in_order(chunks, count);
}

void OP(sumsq_fp32)(struct device *dev, double *sum, float *chunks, const float *x, size_t n)
{
    size_t count = (n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK;
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t i = 0; i < count; i++) {
        chunks[i] = chunk_sumsq_fp32(x + i * SUMSQ_CHUNK, chunk_size(i, n));
    }
    *sum = sum_in_order(chunks, count);
}

void OP(accumulate)(struct device *dev, float *acc, const void *x, bool first, size_t n)
{
    const floatX *in = x;
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < n; lo += BLOCK) {
        size_t hi = block_end(lo, n);
        for (size_t i = lo; i < hi; i++) {
            acc[i] = first ? load(in + i) : acc[i] + load(in + i);
        }
    }
}

void OP(cast)(struct device *dev, void *out, const float *x, size_t n)
{
    floatX *o = out;
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < n; lo += BLOCK) {
        size_t hi = block_end(lo, n);
        for (size_t i = lo; i < hi; i++) {
            store(o + i, x[i]);
        }
    }
}
