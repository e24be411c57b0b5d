// gelu.cu - GELU both ways, and bias gradients: what matrix products have before and after them
// where no epilogue does it. Row lengths are multiples of 8.
#include "kernels/cuda/group.h"
#include "kernels/cuda/reduce.h"

#define THREADS 256

enum { P = packed<floatX>::size };

// GELU in its tanh form, 0.5x(1 + tanh(u)) with u = sqrt(2/pi)(x + 0.044715x^3), is x times this
// gate, 1/(1 + exp(-2u)). Below 1e-20 the gate is 0, as on the cpu device: subnormal gradients
// would slow down the host's Adam.
__device__ static inline float gelu_gate(float x)
{
    const float c = 0.79788456f;
    float u = x * (x * x * (0.044715f * c) + c);
    float gate = __fdividef(1.0f, 1.0f + expf(-2.0f * u));
    return gate < 1e-20f ? 0.0f : gate;
}

// d GELU / dx = s + x s (1-s) 2u', u' = sqrt(2/pi)(1 + 3*0.044715x^2); s = gelu_gate(x).
__device__ static inline float gelu_slope(float x, float s)
{
    const float c = 0.79788456f;
    float du2 = x * x * (2 * 3 * 0.044715f * c) + 2 * c;
    return x * s * ((1.0f - s) * du2) + s;
}

static __global__ void __launch_bounds__(THREADS)
    gelu_forward_kernel(floatX *gelu, const floatX *pre, size_t n)
{
    size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * P;
    if (at >= n) {
        return;
    }
    float x[P];
    load_group(x, pre + at);
    for (int i = 0; i < P; i++) {
        x[i] *= gelu_gate(x[i]);
    }
    store_group(gelu + at, x);
}

static __global__ void __launch_bounds__(THREADS)
    gelu_backward_kernel(floatX *dpre, floatX *gelu, const floatX *pre, const floatX *dgelu,
                         size_t n)
{
    size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) * P;
    if (at >= n) {
        return;
    }
    float x[P], d[P];
    load_group(x, pre + at);
    load_group(d, dgelu + at);
    for (int i = 0; i < P; i++) {
        float gate = gelu_gate(x[i]);
        d[i] *= gelu_slope(x[i], gate);
        x[i] *= gate;
    }
    store_group(gelu + at, x);
    store_group(dpre + at, d);
}

void OP(gelu_forward)(struct device *dev, void *gelu, const void *pre, size_t n)
{
    LAUNCH(dev, gelu_forward_kernel, blocks_of(n, P * THREADS), THREADS, 0, (floatX *)gelu,
           (const floatX *)pre, n);
}

void OP(gelu_backward)(struct device *dev, void *dpre, void *gelu, const void *pre,
                       const void *dgelu, size_t n)
{
    LAUNCH(dev, gelu_backward_kernel, blocks_of(n, P * THREADS), THREADS, 0, (floatX *)dpre,
           (floatX *)gelu, (const floatX *)pre, (const floatX *)dgelu, n);
}

// ---- bias gradient ------------------------------------------------------------------------------

#define BIAS_GROUPS 8            // rows that a block reads at the same time, each by a warp
#define BIAS_ROWS   ((size_t)64) // of a block at least
#define BIAS_BLOCKS ((size_t)1024)

// partials(gridDim.y, OC): sums of `rows` rows. A lane has P columns; warp g sums rows g,
// g + BIAS_GROUPS, ... in order; then the warps' sums, in order.
static __global__ void __launch_bounds__(32 * BIAS_GROUPS)
    bias_kernel(float *partials, const floatX *dout, size_t rows, size_t N, size_t OC)
{
    __shared__ float shared[BIAS_GROUPS][P][32];
    size_t c = ((size_t)blockIdx.x * 32 + threadIdx.x) * P, first = blockIdx.y * rows;
    size_t end = first + rows < N ? first + rows : N;
    float sum[P] = {};
    if (c < OC) {
#pragma unroll 4
        for (size_t r = first + threadIdx.y; r < end; r += BIAS_GROUPS) {
            float d[P];
            load_group(d, dout + r * OC + c);
            for (int i = 0; i < P; i++) {
                sum[i] += d[i];
            }
        }
    }
    for (int i = 0; i < P; i++) {
        shared[threadIdx.y][i][threadIdx.x] = sum[i];
    }
    __syncthreads();
    if (threadIdx.y == 0 && c < OC) {
        for (int g = 1; g < BIAS_GROUPS; g++) {
            for (int i = 0; i < P; i++) {
                sum[i] += shared[g][i][threadIdx.x];
            }
        }
        store_group(partials + blockIdx.y * OC + c, sum);
    }
}

void OP(bias_backward)(struct device *dev, void *dbias, const void *dout, size_t N, size_t OC)
{
    float *partials = cuda_of(dev)->scratch;
    size_t columns = blocks_of(OC, 32 * P), chunks = blocks_of(N, BIAS_ROWS);
    size_t room = CUDA_SCRATCH_BYTES / (OC * sizeof(float)), most = blocks_of(BIAS_BLOCKS, columns);
    most = most < room ? most : room;
    chunks = chunks < most ? chunks : most;
    size_t rows = blocks_of(N, chunks);
    chunks = blocks_of(N, rows);
    LAUNCH(dev, bias_kernel, dim3((unsigned)columns, (unsigned)chunks), dim3(32, BIAS_GROUPS), 0,
           partials, (const floatX *)dout, rows, N, OC);
    column_totals(dev, (floatX *)dbias, nullptr, OC, partials, chunks, OC);
}
