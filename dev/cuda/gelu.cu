// gelu.cu - study of the GELU: what 16-byte accesses and a cheap gate are worth.
#include "dev/cuda/study.h"
#include "kernels/cuda/group.h"

#include <stdio.h>

enum { P = packed<floatX>::size };

static struct {
    floatX *gelu;
    const floatX *pre;
    size_t n;
} t;

__device__ static float by_tanh(float x)
{
    return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

static __global__ void elements(floatX *gelu, const floatX *pre, size_t n)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        gelu[i] = from_float<floatX>(by_tanh(to_float(pre[i])));
    }
}

static __global__ void vectors(floatX *gelu, const floatX *pre, size_t n)
{
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * P;
    if (i < n) {
        float x[P];
        load_group(x, pre + i);
        for (int k = 0; k < P; k++) {
            x[k] = by_tanh(x[k]);
        }
        store_group(gelu + i, x);
    }
}

static void run_elements(struct device *dev, unsigned block)
{
    LAUNCH(dev, elements, blocks_of(t.n, block), block, 0, t.gelu, t.pre, t.n);
}

static void run_vectors(struct device *dev, unsigned block)
{
    LAUNCH(dev, vectors, blocks_of(t.n, (size_t)block * P), block, 0, t.gelu, t.pre, t.n);
}

static void run_shipped(struct device *dev, unsigned)
{
    OP(gelu_forward)(dev, t.gelu, t.pre, t.n);
}

static const struct version versions[] = {
    {"an element per thread, tanhf", run_elements, {256, 64, 512, 1024}},
    {"16 bytes per thread, tanhf", run_vectors, {64, 128, 256, 512, 1024}},
    {"16 bytes, 1/(1 + exp): shipped", run_shipped, {}},
};

int main(int argc, char **argv)
{
    struct study *s = study_open(sizeof(floatX) == 2 ? DTYPE_BF16 : DTYPE_FP32, argc, argv);
    bool small = study_small(s), good = true;
    static const size_t shapes[] = {8, 264, 4096, 40000, (size_t)64 << 20};
    for (size_t n : shapes) {
        char shape[64];
        bool timed = n > 100000;
        if (timed && small) {
            continue;
        }
        study_reset(s);
        t = {(floatX *)study_output(s, n, false, 4e-3), (floatX *)study_input(s, n, false, 4), n};
        snprintf(shape, sizeof shape, "gelu_forward n=%zu", n);
        good &= study_compare(s, shape, versions, 3, timed ? 2.0 * (double)n * sizeof(floatX) : 0);
    }
    return good ? 0 : 1;
}
