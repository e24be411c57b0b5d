// optimizer.cu - operations that visit every element once: norm, AdamW, sums, casts. Lengths are
// arbitrary; tensors start at multiples of 16 bytes.
//
// Norm and AdamW give the same bits as the cpu device: the same IEEE operations in the same order,
// written as intrinsics, which the compiler does not contract.
#include "kernels/cuda/group.h"

#define THREADS 256

enum { P = packed<floatX>::size };

// First of the P elements of this thread.
__device__ static inline size_t group_start(void)
{
    return ((size_t)blockIdx.x * THREADS + threadIdx.x) * P;
}

// ---- sum of squares -----------------------------------------------------------------------------

// A chunk is summed in 16 running sums, element i in sum i % 16, as the cpu device does.
#define LANES 16

template <int K> __device__ static inline void add_squares(float (&lane)[K], const float (&x)[K])
{
#pragma unroll
    for (int i = 0; i < K; i++) {
        lane[i] = __fadd_rn(lane[i], __fmul_rn(x[i], x[i]));
    }
}

// chunks[c] = sum of squares of chunk c. A thread has as many of the running sums as it loads at
// once; 2 or 4 threads share a chunk.
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    sumsq_chunks_kernel(float *chunks, const T *x, size_t n)
{
    const int K = packed<T>::size, team = LANES / K;
    size_t thread = (size_t)blockIdx.x * THREADS + threadIdx.x, chunk = thread / team;
    size_t first = chunk * SUMSQ_CHUNK + thread % team * K, end = (chunk + 1) * SUMSQ_CHUNK;
    float lane[K] = {}, f[K];
    if (end <= n) {
#pragma unroll 8
        for (size_t i = 0; i < SUMSQ_CHUNK; i += LANES) {
            load_group(f, x + first + i);
            add_squares(lane, f);
        }
    } else {
        for (size_t i = first; i < n; i += LANES) { // squares of the zeros behind n change nothing
            load_group(f, x + i, n - i);
            add_squares(lane, f);
        }
    }
#pragma unroll
    for (int d = team / 2; d > 0; d /= 2) {
        for (int i = 0; i < K; i++) {
            lane[i] = __fadd_rn(lane[i], __shfl_down_sync(0xffffffffu, lane[i], (unsigned)d));
        }
    }
#pragma unroll
    for (int half = K / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            lane[i] = __fadd_rn(lane[i], lane[i + half]);
        }
    }
    if (thread % team == 0 && chunk * SUMSQ_CHUNK < n) {
        chunks[chunk] = lane[0];
    }
}

// Exponent of the lowest bit that is set in a number; of 0, and of what is not finite, such that
// no other number limits it, or fits.
#define LOWEST_OF_ZERO     900
#define LOWEST_OF_INFINITY (-2000)

__device__ static inline int lowest_bit(double x)
{
    unsigned long long bits = (unsigned long long)__double_as_longlong(x);
    int exponent = (int)(bits >> 52 & 0x7ff);
    bits &= 0xfffffffffffffull;
    if (exponent == 0x7ff) {
        return LOWEST_OF_INFINITY;
    }
    bits |= exponent ? 1ull << 52 : 0;
    int zeros = __popcll(~bits & (bits - 1)); // below the lowest bit
    return bits ? (exponent ? exponent : 1) - 1075 + zeros : LOWEST_OF_ZERO;
}

#define TOTAL_THREADS 1024
#define TOTAL_CHUNKS  4 // of a thread

// *sum = chunks(count), added in order, in double. One after the other they would take longer than
// everything else. But as long as all are multiples of some 2^e, and the sum is below 2^(e+53),
// nothing is rounded, and any order gives the same bits: that is nearly always so.
static __global__ void __launch_bounds__(TOTAL_THREADS)
    sumsq_total_kernel(double *sum, const float *chunks, size_t count)
{
    __shared__ double warp_sums[TOTAL_THREADS / 32];
    __shared__ int warp_lowest[TOTAL_THREADS / 32];
    double total = 0; // of thread 0
    for (size_t lo = 0; lo < count; lo += TOTAL_THREADS * TOTAL_CHUNKS) {
        size_t at = lo + threadIdx.x * TOTAL_CHUNKS, hi = lo + TOTAL_THREADS * TOTAL_CHUNKS;
        float x[TOTAL_CHUNKS];
        load_group(x, chunks + at, at < count ? count - at : 0);
        double part = 0;
        int lowest = LOWEST_OF_ZERO;
        for (int i = 0; i < TOTAL_CHUNKS; i++) {
            part += (double)x[i];
            lowest = min(lowest, lowest_bit((double)x[i]));
        }
        for (int d = 16; d > 0; d /= 2) {
            part += __shfl_xor_sync(0xffffffffu, part, d);
            lowest = min(lowest, __shfl_xor_sync(0xffffffffu, lowest, d));
        }
        if (threadIdx.x % 32 == 0) {
            warp_sums[threadIdx.x / 32] = part;
            warp_lowest[threadIdx.x / 32] = lowest;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            double all = total;
            lowest = lowest_bit(total);
            for (int w = 0; w < TOTAL_THREADS / 32; w++) {
                all += warp_sums[w];
                lowest = min(lowest, warp_lowest[w]);
            }
            if (all < ldexp(1.0, lowest + 53)) {
                total = all;
            } else {
                for (size_t i = lo; i < count && i < hi; i++) {
                    total += (double)chunks[i];
                }
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *sum = total;
    }
}

template <typename T>
static void sumsq(struct device *dev, double *sum, float *chunks, const T *x, size_t n)
{
    size_t count = blocks_of(n, SUMSQ_CHUNK), team = LANES / packed<T>::size;
    if (n > 0) {
        LAUNCH(dev, sumsq_chunks_kernel<T>, blocks_of(count * team, THREADS), THREADS, 0, chunks, x,
               n);
    }
    LAUNCH(dev, sumsq_total_kernel, 1, TOTAL_THREADS, 0, sum, (const float *)chunks, count);
}

void OP(sumsq)(struct device *dev, double *sum, float *chunks, const void *x, size_t n)
{
    sumsq(dev, sum, chunks, (const floatX *)x, n);
}

void OP(sumsq_fp32)(struct device *dev, double *sum, float *chunks, const float *x, size_t n)
{
    sumsq(dev, sum, chunks, x, n);
}

// ---- AdamW --------------------------------------------------------------------------------------

// The formula of struct adamw (layers.h); g, p, m, v are one element.
__device__ static inline void update(float *p, float *m, float *v, float g, const struct adamw *a)
{
    g = __fmul_rn(g, a->scale);
    *m = __fadd_rn(__fmul_rn(a->beta1, *m), __fmul_rn(a->one_minus_beta1, g));
    *v = __fadd_rn(__fmul_rn(a->beta2, *v), __fmul_rn(__fmul_rn(a->one_minus_beta2, g), g));
    float divisor = __fadd_rn(__fmul_rn(__fsqrt_rn(*v), a->v_correction), a->eps);
    *p = __fsub_rn(__fmul_rn(*p, a->decay), __fdiv_rn(__fmul_rn(a->step, *m), divisor));
}

// `to` may be `from`. In fp32 params is the master, and not written twice.
template <typename G>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(floatX *params, struct adamw_state to, struct adamw_state from, const G *grad,
                 struct adamw a, size_t n)
{
    size_t at = group_start();
    if (at >= n) {
        return;
    }
    float g[P], p[P], m[P], v[P];
    load_group(g, grad + at, n - at);
    load_group(p, from.master + at, n - at);
    load_group(m, from.m + at, n - at);
    load_group(v, from.v + at, n - at);
#pragma unroll
    for (int i = 0; i < P; i++) {
        update(p + i, m + i, v + i, g[i], &a);
    }
    store_group(to.master + at, p, n - at);
    store_group(to.m + at, m, n - at);
    store_group(to.v + at, v, n - at);
    if (sizeof(floatX) < sizeof(float)) {
        store_group(params + at, p, n - at);
    }
}

template <typename G>
static void adamw(struct device *dev, void *params, const struct adamw_state *to,
                  const struct adamw_state *from, const G *grad, const struct adamw *a, size_t n)
{
    if (n > 0) {
        LAUNCH(dev, adamw_kernel<G>, blocks_of(n, THREADS * P), THREADS, 0, (floatX *)params, *to,
               *from, grad, *a, n);
    }
}

void OP(adamw)(struct device *dev, void *params, float *master, float *m, float *v,
               const void *grad, const struct adamw *a, size_t n)
{
    struct adamw_state state = {master, m, v};
    adamw(dev, params, &state, &state, (const floatX *)grad, a, n);
}

void OP(adamw_fp32)(struct device *dev, void *params, float *master, float *m, float *v,
                    const float *grad, const struct adamw *a, size_t n)
{
    struct adamw_state state = {master, m, v};
    adamw(dev, params, &state, &state, grad, a, n);
}

void OP(adamw_apart)(struct device *dev, void *params, const struct adamw_state *to,
                     const struct adamw_state *from, const void *grad, const struct adamw *a,
                     size_t n)
{
    adamw(dev, params, to, from, (const floatX *)grad, a, n);
}

void OP(adamw_apart_fp32)(struct device *dev, void *params, const struct adamw_state *to,
                          const struct adamw_state *from, const float *grad, const struct adamw *a,
                          size_t n)
{
    adamw(dev, params, to, from, grad, a, n);
}

// ---- sums and casts -----------------------------------------------------------------------------

static __global__ void __launch_bounds__(THREADS)
    accumulate_kernel(float *acc, const floatX *x, bool first, size_t n)
{
    size_t at = group_start();
    if (at >= n) {
        return;
    }
    float f[P], sum[P];
    load_group(f, x + at, n - at);
    if (!first) {
        load_group(sum, acc + at, n - at);
        for (int i = 0; i < P; i++) {
            f[i] = sum[i] + f[i];
        }
    }
    store_group(acc + at, f, n - at);
}

static __global__ void __launch_bounds__(THREADS) cast_kernel(floatX *out, const float *x, size_t n)
{
    size_t at = group_start();
    if (at >= n) {
        return;
    }
    float f[P];
    load_group(f, x + at, n - at);
    store_group(out + at, f, n - at);
}

void OP(accumulate)(struct device *dev, float *acc, const void *x, bool first, size_t n)
{
    if (n > 0) {
        LAUNCH(dev, accumulate_kernel, blocks_of(n, THREADS * P), THREADS, 0, acc,
               (const floatX *)x, first, n);
    }
}

void OP(cast)(struct device *dev, void *out, const float *x, size_t n)
{
    if (n > 0) {
        LAUNCH(dev, cast_kernel, blocks_of(n, THREADS * P), THREADS, 0, (floatX *)out, x, n);
    }
}
