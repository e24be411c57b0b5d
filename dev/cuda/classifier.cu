// classifier.cu - study of softmax with cross-entropy: passes over a row of logits.
#include "dev/cuda/study.h"
#include "kernels/cuda/reduce.h"

#include <float.h>
#include <stdio.h>

static struct {
    float *losses;
    floatX *logits;
    const int32_t *targets;
    size_t N, V, Vp;
} t;

#define DSCALE 0.25f

__device__ static float block_max(float x, float *shared)
{
    unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) {
        shared[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return warp_max(lane < warps ? shared[lane] : -FLT_MAX);
}

// Maximum, sum, gradient: three passes, an element at a time.
static __global__ void three_passes(float *losses, floatX *logits, const int32_t *targets, size_t V,
                                    size_t Vp)
{
    __shared__ float largest[32], sums[32][1];
    floatX *x = logits + blockIdx.x * Vp;
    size_t target = (size_t)targets[blockIdx.x];
    float at_target = to_float(x[target]), max = -FLT_MAX, sum[1] = {0};
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) {
        max = fmaxf(max, to_float(x[v]));
    }
    max = block_max(max, largest);
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) {
        sum[0] += expf(to_float(x[v]) - max);
    }
    block_sum(sum, sums);
    for (size_t v = threadIdx.x; v < Vp; v += blockDim.x) {
        float p = v < V ? expf(to_float(x[v]) - max) / sum[0] : 0.0f;
        x[v] = from_float<floatX>((p - (v == target ? 1.0f : 0.0f)) * DSCALE);
    }
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = logf(sum[0]) + max - at_target;
    }
}

// Maximum and sum in one pass, still an element at a time.
static __global__ void two_passes(float *losses, floatX *logits, const int32_t *targets, size_t V,
                                  size_t Vp)
{
    __shared__ float largest[32], sums[32][1];
    floatX *x = logits + blockIdx.x * Vp;
    size_t target = (size_t)targets[blockIdx.x];
    float at_target = to_float(x[target]), mine = -FLT_MAX, sum[1] = {0};
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) {
        float f = to_float(x[v]), max = fmaxf(mine, f);
        sum[0] = sum[0] * expf(mine - max) + expf(f - max);
        mine = max;
    }
    float max = block_max(mine, largest);
    sum[0] *= expf(mine - max);
    block_sum(sum, sums);
    for (size_t v = threadIdx.x; v < Vp; v += blockDim.x) {
        float p = v < V ? expf(to_float(x[v]) - max) / sum[0] : 0.0f;
        x[v] = from_float<floatX>((p - (v == target ? 1.0f : 0.0f)) * DSCALE);
    }
    if (threadIdx.x == 0) {
        losses[blockIdx.x] = logf(sum[0]) + max - at_target;
    }
}

static void run_three(struct device *dev, unsigned block)
{
    LAUNCH(dev, three_passes, (unsigned)t.N, block, 0, t.losses, t.logits, t.targets, t.V, t.Vp);
}

static void run_two(struct device *dev, unsigned block)
{
    LAUNCH(dev, two_passes, (unsigned)t.N, block, 0, t.losses, t.logits, t.targets, t.V, t.Vp);
}

static void run_shipped(struct device *dev, unsigned)
{
    dev->layers->classifier(dev, t.losses, t.logits, t.targets, DSCALE, t.N, t.V, t.Vp);
}

static const struct version versions[] = {
    {"three passes, by elements", run_three, {256, 64, 1024}},
    {"two passes, by elements", run_two, {64, 256, 512, 1024}},
    {"two passes, 16 bytes: shipped", run_shipped, {}},
};

int main(int argc, char **argv)
{
    struct study *s = study_open(sizeof(floatX) == 2 ? DTYPE_BF16 : DTYPE_FP32, argc, argv);
    bool small = study_small(s), good = true;
    static const size_t shapes[][3] = {
        {1, 100, 128}, {5, 1000, 1024}, {3, 8000, 8064}, {4096, 50257, 50304}};
    for (const auto &d : shapes) {
        char shape[64];
        bool timed = d[0] > 100;
        if (timed && small) {
            continue;
        }
        study_reset(s);
        t.N = d[0];
        t.V = d[1];
        t.Vp = d[2];
        t.losses = (float *)study_output(s, t.N, true, 1e-5);
        t.logits = (floatX *)study_state(s, t.N * t.Vp, false, 5, 4e-3);
        t.targets = study_tokens(s, t.N, t.V);
        snprintf(shape, sizeof shape, "classifier N=%zu V=%zu Vp=%zu", t.N, t.V, t.Vp);
        double bytes = 2.0 * (double)(t.N * t.Vp * sizeof(floatX)); // read once, written once
        good &= study_compare(s, shape, versions, 3, timed ? bytes : 0);
    }
    return good ? 0 : 1;
}
