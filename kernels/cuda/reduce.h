// reduce.h - sums over the threads of a block, and over partial sums of blocks, in fixed order.
#ifndef KERNELS_CUDA_REDUCE_H
#define KERNELS_CUDA_REDUCE_H

#include "kernels/cuda/ops.h"

// K sums over the threads of a row of the block (blockDim.x: a multiple of 32, up to 1024; rows are
// of one warp where blockDim.y > 1); the result is in all threads. `shared` has 32 entries; it may
// be used again after a barrier that follows.
template <int K> __device__ static inline void block_sum(float (&x)[K], float (*shared)[K])
{
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < K; k++) {
        x[k] = warp_sum(x[k]);
    }
    if (warps == 1) {
        return;
    }
    if (lane == 0) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            shared[warp][k] = x[k];
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++) {
        x[k] = warp_sum(lane < warps ? shared[lane][k] : 0.0f);
    }
}

// Rows of `partials` that are summed at the same time at most, each by a warp.
#define TOTAL_GROUPS 32

// first(split), second(columns - split) = column sums of partials(rows, columns). A block has 32
// columns; warp g of G sums rows g, g + G, ... in order; then the warps' sums, in order.
static __global__ void __launch_bounds__(32 * TOTAL_GROUPS)
    column_totals_kernel(floatX *first, floatX *second, size_t split, const float *partials,
                         size_t rows, size_t columns)
{
    __shared__ float shared[TOTAL_GROUPS][32];
    size_t c = (size_t)blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (c < columns) {
#pragma unroll 8
        for (size_t r = threadIdx.y; r < rows; r += blockDim.y) {
            sum += partials[r * columns + c];
        }
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < columns) {
        for (unsigned g = 1; g < blockDim.y; g++) {
            sum += shared[g][threadIdx.x];
        }
        floatX *out = c < split ? first + c : second + (c - split);
        *out = from_float<floatX>(sum);
    }
}

static inline void column_totals(struct device *dev, floatX *first, floatX *second, size_t split,
                                 const float *partials, size_t rows, size_t columns)
{
    unsigned groups = rows < TOTAL_GROUPS ? (unsigned)rows : TOTAL_GROUPS;
    LAUNCH(dev, column_totals_kernel, blocks_of(columns, 32), dim3(32, groups), 0, first, second,
           split, partials, rows, columns);
}

#endif
