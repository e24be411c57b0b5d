// classifier.cu - softmax cross-entropy, its gradient written over the logits: a block per row, one
// pass for the largest logit and the sum together (Milakov and Gimelshein 2018), one, which finds
// the row in the caches, for the gradient. Vp is a multiple of 8.
#include "kernels/cuda/group.h"

#include <float.h>

enum { P = packed<floatX>::size };

// exp() of a logit less the largest one. Below 1e-20 it is 0, as on the cpu device: nothing beside
// the 1 in the sum, but gradients made of it would be subnormal.
__device__ static inline float exp_below(float x)
{
    return x < -46.0f ? 0.0f : expf(x);
}

// The largest of some logits, and the sum of their exp() less it.
struct soft {
    float max, sum;
};

__device__ static inline struct soft soft_join(struct soft a, struct soft b)
{
    float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp_below(a.max - max) + b.sum * exp_below(b.max - max)};
}

// Of a warp, the same in all lanes.
__device__ static inline struct soft warp_soft(struct soft a)
{
    for (int d = 16; d > 0; d /= 2) {
        struct soft b = {__shfl_xor_sync(0xffffffffu, a.max, d),
                         __shfl_xor_sync(0xffffffffu, a.sum, d)};
        a = soft_join(a, b);
    }
    return a;
}

// Of the first V elements of x, in all threads.
__device__ static struct soft row_soft(const floatX *x, size_t V)
{
    __shared__ struct soft shared[32];
    unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const struct soft none = {-FLT_MAX, 0}; // no infinity: it would make NaNs of -infinity
    struct soft soft = none;
    for (size_t at = (size_t)threadIdx.x * P; at < V; at += (size_t)blockDim.x * P) {
        float f[P], max = soft.max, sum = 0;
        load_group(f, x + at);
        for (int i = 0; i < P; i++) {
            f[i] = at + i < V ? f[i] : -INFINITY;
            max = fmaxf(max, f[i]);
        }
        for (int i = 0; i < P; i++) {
            sum += exp_below(f[i] - max);
        }
        soft = {max, soft.sum * exp_below(soft.max - max) + sum};
    }
    soft = warp_soft(soft);
    if (lane == 0) {
        shared[threadIdx.x / 32] = soft;
    }
    __syncthreads();
    return warp_soft(lane < warps ? shared[lane] : none);
}

static __global__ void __launch_bounds__(1024)
    classifier_kernel(float *losses, floatX *logits, const int32_t *targets, float dscale, size_t V,
                      size_t Vp)
{
    floatX *x = logits + (size_t)blockIdx.x * Vp;
    int32_t target = targets[blockIdx.x];
    struct soft soft = {0, 1};
    if (target >= 0) {
        float at_target = to_float(x[target]);
        soft = row_soft(x, V);
        if (threadIdx.x == 0) {
            losses[blockIdx.x] = logf(soft.sum) + soft.max - at_target;
        }
    } else if (threadIdx.x == 0) {
        losses[blockIdx.x] = 0;
    }
    if (dscale == 0) {
        return;
    }
    float inverse = 1.0f / soft.sum;
    for (size_t at = (size_t)threadIdx.x * P; at < Vp; at += (size_t)blockDim.x * P) {
        float f[P];
        load_group(f, x + at);
        for (int i = 0; i < P; i++) {
            bool real = target >= 0 && at + i < V;
            float p = real ? exp_below(f[i] - soft.max) * inverse : 0.0f;
            // p - 1 is small when the prediction is good: the difference is taken before rounding.
            p -= real && at + i == (size_t)target ? 1.0f : 0.0f;
            f[i] = p * dscale;
        }
        store_group(x + at, f);
    }
}

void OP(classifier)(struct device *dev, float *losses, void *logits, const int32_t *targets,
                    float dscale, size_t N, size_t V, size_t Vp)
{
    size_t threads = (size_t)blocks_of(Vp / P, 32) * 32;
    LAUNCH(dev, classifier_kernel, (unsigned)N, (unsigned)(threads < 1024 ? threads : 1024), 0,
           losses, (floatX *)logits, targets, dscale, V, Vp);
}
