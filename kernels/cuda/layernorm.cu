// layernorm.cu - layer normalisation, forward and backward: each row is read once, and stays in
// registers between its sums and its results. C is a multiple of 8.
#include "kernels/cuda/group.h"
#include "kernels/cuda/reduce.h"

#define EPSILON      1e-5f
#define MAX_CHANNELS ((size_t)12288) // of a row in the registers of one block

enum { P = packed<floatX>::size };

static bool fits(struct device *dev, const char *op, size_t C)
{
    if (C > MAX_CHANNELS) {
        cuda_fail(dev, op, "more than 12288 channels: use fewer, or --device cpu");
    }
    return C <= MAX_CHANNELS;
}

static inline unsigned round32(size_t n)
{
    return (unsigned)((n + 31) / 32 * 32);
}

// ---- forward ------------------------------------------------------------------------------------

// Vectors of 16 bytes that a thread holds.
#define FORWARD_VECTORS 4

// threadIdx.x goes over a row, threadIdx.y over rows.
static __global__ void __launch_bounds__(1024)
    forward_kernel(floatX *out, float *mean, float *rstd, const floatX *inp, const floatX *weight,
                   const floatX *bias, size_t N, size_t C)
{
    __shared__ float shared[2][32][1];
    size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y, vectors = C / P;
    if (row >= N) {
        return; // a whole warp, in blocks without barriers
    }
    packed<floatX> x[FORWARD_VECTORS];
    float sum[1] = {0}, square[1] = {0};
#pragma unroll
    for (int k = 0; k < FORWARD_VECTORS; k++) {
        size_t v = threadIdx.x + k * blockDim.x;
        if (v < vectors) {
            x[k] = load16(inp + row * C + v * P);
            for (int i = 0; i < P; i++) {
                sum[0] += to_float(x[k].x[i]);
            }
        }
    }
    block_sum(sum, shared[0]);
    float mu = sum[0] / (float)C;
#pragma unroll
    for (int k = 0; k < FORWARD_VECTORS; k++) {
        if (threadIdx.x + k * blockDim.x < vectors) {
            for (int i = 0; i < P; i++) {
                float d = to_float(x[k].x[i]) - mu;
                square[0] += d * d;
            }
        }
    }
    block_sum(square, shared[1]);
    float rs = 1.0f / sqrtf(square[0] / (float)C + EPSILON);
#pragma unroll
    for (int k = 0; k < FORWARD_VECTORS; k++) {
        size_t v = threadIdx.x + k * blockDim.x;
        if (v < vectors) {
            packed<floatX> w = load16(weight + v * P), b = load16(bias + v * P), y;
            for (int i = 0; i < P; i++) {
                float norm = (to_float(x[k].x[i]) - mu) * rs;
                y.x[i] = from_float<floatX>(norm * to_float(w.x[i]) + to_float(b.x[i]));
            }
            store16(out + row * C + v * P, y);
        }
    }
    if (threadIdx.x == 0) {
        mean[row] = mu;
        rstd[row] = rs;
    }
}

void OP(layernorm_forward)(struct device *dev, void *out, float *mean, float *rstd, const void *inp,
                           const void *weight, const void *bias, size_t N, size_t C)
{
    if (!fits(dev, "layernorm_forward", C)) {
        return;
    }
    unsigned threads = round32(blocks_of(C / P, FORWARD_VECTORS));
    unsigned rows = threads == 32 ? 4 : 1;
    LAUNCH(dev, forward_kernel, blocks_of(N, rows), dim3(threads, rows), 0, (floatX *)out, mean,
           rstd, (const floatX *)inp, (const floatX *)weight, (const floatX *)bias, N, C);
}

// ---- backward -----------------------------------------------------------------------------------

#define BACKWARD_THREADS 384 // at most: 12288 channels are held without spills
#define BACKWARD_BLOCKS  ((size_t)1024)
#define BACKWARD_ROWS    8 // of a block at least, unless there are fewer

// With n = (x - mean) rstd and g = dout * weight:
//   dx = (g - mean(g) - n mean(g n)) rstd,  dweight = sum dout n,  dbias = sum dout.
// A block takes rows blockIdx.x, blockIdx.x + gridDim.x, ... A thread has the same columns in each,
// and leaves their sums for dweight and dbias in partials(gridDim.x, 2C).
template <int VECTORS>
static __global__ void __launch_bounds__(BACKWARD_THREADS)
    backward_kernel(floatX *dinp, float *partials, const floatX *dout, const floatX *dresidual,
                    const floatX *inp, const floatX *weight, const float *mean, const float *rstd,
                    size_t N, size_t C)
{
    __shared__ float shared[2][32][2];
    size_t vectors = C / P;
    const bool EARLY = VECTORS <= 2; // the residual is loaded with the rest if registers suffice
    float dw[VECTORS][P] = {}, db[VECTORS][P] = {};
    int turn = 0; // of two: one barrier per row suffices
    for (size_t row = blockIdx.x; row < N; row += gridDim.x, turn ^= 1) {
        packed<floatX> d[VECTORS], x[VECTORS], residual[VECTORS];
        float mu = mean[row], rs = rstd[row], sums[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            size_t v = threadIdx.x + k * blockDim.x, at = row * C + v * P;
            if (v < vectors) {
                packed<floatX> w = load16(weight + v * P);
                d[k] = load16(dout + at);
                x[k] = load16(inp + at);
                if (dresidual && EARLY) {
                    residual[k] = load16(dresidual + at);
                }
                for (int i = 0; i < P; i++) {
                    float di = to_float(d[k].x[i]), norm = (to_float(x[k].x[i]) - mu) * rs;
                    float g = di * to_float(w.x[i]);
                    sums[0] += g;
                    sums[1] += g * norm;
                    dw[k][i] += di * norm;
                    db[k][i] += di;
                }
            }
        }
        block_sum(sums, shared[turn]);
        float mean_g = sums[0] / (float)C, mean_gn = sums[1] / (float)C;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            size_t v = threadIdx.x + k * blockDim.x;
            if (v < vectors) {
                packed<floatX> w = load16(weight + v * P), dx;
                if (dresidual && !EARLY) {
                    residual[k] = load16(dresidual + row * C + v * P);
                }
                for (int i = 0; i < P; i++) {
                    float norm = (to_float(x[k].x[i]) - mu) * rs;
                    float g = to_float(d[k].x[i]) * to_float(w.x[i]);
                    float sum = (g - mean_g - norm * mean_gn) * rs;
                    sum += dresidual ? to_float(residual[k].x[i]) : 0.0f;
                    dx.x[i] = from_float<floatX>(sum);
                }
                store16(dinp + row * C + v * P, dx);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
        size_t v = threadIdx.x + k * blockDim.x;
        if (v < vectors) {
            float *to = partials + (size_t)blockIdx.x * 2 * C + v * P;
            store_group(to, dw[k]);
            store_group(to + C, db[k]);
        }
    }
}

// Blocks are as many as the shape gives work to and scratch has room for.
static size_t backward_blocks(size_t N, size_t C)
{
    size_t room = CUDA_SCRATCH_BYTES / (2 * C * sizeof(float));
    size_t most = room < BACKWARD_BLOCKS ? room : BACKWARD_BLOCKS;
    size_t wanted = blocks_of(N, BACKWARD_ROWS);
    return wanted < most ? wanted : most;
}

#define BACKWARD(VECTORS)                                                                          \
    LAUNCH(dev, backward_kernel<VECTORS>, (unsigned)blocks, round32(blocks_of(C / P, VECTORS)), 0, \
           (floatX *)dinp, partials, (const floatX *)dout, (const floatX *)dresidual,              \
           (const floatX *)inp, (const floatX *)weight, mean, rstd, N, C)

void OP(layernorm_backward)(struct device *dev, void *dinp, void *dweight, void *dbias,
                            const void *dout, const void *dresidual, const void *inp,
                            const void *weight, const float *mean, const float *rstd, size_t N,
                            size_t C)
{
    if (!fits(dev, "layernorm_backward", C)) {
        return;
    }
    float *partials = cuda_of(dev)->scratch;
    size_t blocks = backward_blocks(N, C), per_thread = blocks_of(C / P, BACKWARD_THREADS);
    if (per_thread <= 1) {
        BACKWARD(1);
    } else if (per_thread <= 2) {
        BACKWARD(2);
    } else if (per_thread <= 4) {
        BACKWARD(4);
    } else {
        BACKWARD(MAX_CHANNELS / P / BACKWARD_THREADS); // 4 or 8
    }
    column_totals(dev, (floatX *)dweight, (floatX *)dbias, C, partials, blocks, 2 * C);
}
