// attention.h - causal attention of the cuda device: what its two implementations share, and both
// of them by name, for tests and studies. The device uses OP(attention_*) of attention.cu.
//
//   attention_plain.cuh   fp32 and bf16, one multiply-add at a time: the reference, and fp32's
//   attention_mma.cuh     bf16 on tensor cores: what bf16 uses
//
// Nothing of size T*T exists. A head's scores are computed by tiles and forgotten:
//
//   forward     a block owns a tile of queries and visits the tiles of keys up to the diagonal,
//               with an online softmax; lse keeps what backward needs to rebuild p = exp(s - lse)
//   backward    1. D = rowsum(dout * out) of every row and head
//               2. a block owns a tile of keys, visits the queries from the diagonal on: dK, dV
//               3. a block owns a tile of queries, visits the keys up to the diagonal: dQ
//               with ds = p (dp - D), dp = dout v^T:  dV = p^T dout, dK = ds^T q, dQ = ds k
//
// Steps 2 and 3 compute s and dp twice between them: 7 products instead of 5. In exchange no sum
// has an order that depends on who comes first, and there are no atomics. D needs no memory of its
// own: until step 3 stores dQ, it lies in the first 4 bytes of each row of dQ.
//
// (Milakov and Gimelshein 2018; Dao et al. 2022; Dao 2023.)
#ifndef KERNELS_CUDA_ATTENTION_H
#define KERNELS_CUDA_ATTENTION_H

#include "kernels/cuda/cuda.h"

#define ATTENTION_HEAD_SIZE_MAX 128

// Rows of a head are read in pieces of 16 bytes, and are whole in a block's shared memory.
static inline bool attention_head_size_fits(size_t hs)
{
    return hs > 0 && hs <= ATTENTION_HEAD_SIZE_MAX && hs % 8 == 0;
}

// As in layers.h.
struct attention_passes {
    void (*forward)(struct device *, void *out, float *lse, const void *qkv, size_t B, size_t T,
                    size_t C, size_t NH);
    void (*backward)(struct device *, void *dqkv, const void *dout, const void *qkv,
                     const void *out, const float *lse, size_t B, size_t T, size_t C, size_t NH);
};

#ifdef __cplusplus
extern "C" {
#endif
extern const struct attention_passes attention_plain_cuda_fp32, attention_plain_cuda_bf16,
    attention_mma_cuda_bf16;
#ifdef __cplusplus
}

#include "kernels/cuda/ops.h"

#include <assert.h>

#define LOG2_E 1.4426950408889634f

// The arguments of a pass, as its kernels get them.
struct attention {
    size_t C;
    int B, T, NH, hs;
    float scale, log2_scale; // of scores, 1/sqrt(hs); of exponents of 2
};

static inline struct attention attention_of(size_t B, size_t T, size_t C, size_t NH)
{
    assert(attention_head_size_fits(C / NH)); // the device was opened for it
    struct attention a = {C, (int)B, (int)T, (int)NH, (int)(C / NH), 0, 0};
    a.scale = 1.0f / sqrtf((float)a.hs);
    a.log2_scale = a.scale * LOG2_E;
    return a;
}

// What a block works on: rows first.. of one head. q, k, v and their gradients have rows of 3C
// values; out and dout of C, which begin at `out`.
struct block_part {
    size_t q, k, v, out; // offsets of row 0
    size_t lse;
    int first;
};

// Blocks of one head are neighbours, since they read the same rows; the longest of them is first.
__device__ static inline struct block_part block_part_of(const struct attention &a, int rows,
                                                         bool keys)
{
    int tiles = (a.T + rows - 1) / rows, tile = (int)(blockIdx.x % tiles);
    size_t bh = blockIdx.x / tiles, b = bh / a.NH, h = bh % a.NH;
    struct block_part part;
    part.q = b * a.T * 3 * a.C + h * a.hs;
    part.k = part.q + a.C;
    part.v = part.k + a.C;
    part.out = b * a.T * a.C + h * a.hs;
    part.lse = bh * a.T;
    part.first = (keys ? tile : tiles - 1 - tile) * rows; // few queries see the last keys
    return part;
}

__device__ static inline int lesser(int a, int b)
{
    return a < b ? a : b;
}

static inline unsigned attention_blocks(const struct attention &a, int rows)
{
    return (unsigned)a.B * a.NH * blocks_of(a.T, rows);
}

// Four neighbouring lanes share a row.
__device__ static inline float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ static inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// A kernel gets more than 48 KiB of shared memory only when that was asked for, once.
#define ALLOW_SMEM(dev, kernel, bytes)                                                             \
    do {                                                                                           \
        static bool asked;                                                                         \
        if (!asked) {                                                                              \
            asked = cuda_ok(dev, "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)",               \
                            cudaFuncSetAttribute((const void *)kernel,                             \
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,      \
                                                 (int)(bytes)));                                   \
        }                                                                                          \
    } while (0)
#endif
#endif
