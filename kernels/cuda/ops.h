// ops.h - what every operation of the cuda device needs: names of the dtype that is being compiled,
// launches, values in registers, 16-byte accesses.
//
// Rows are multiples of 16 bytes: C, OC and Vp are multiples of 8, since head sizes are. Lengths of
// the optimizer's operations are arbitrary.
//
// Each .cu file, and matmul.c, is compiled once per dtype: VARIANT is cuda_fp32 or cuda_bf16. Two
// macros are all that lets the same files run on a CPU for tests (test/cuda): LAUNCH and DYN_SMEM.
#ifndef KERNELS_CUDA_OPS_H
#define KERNELS_CUDA_OPS_H

#include "kernels/cuda/cuda.h"

// OP(name) is name_cuda_fp32 or name_cuda_bf16.
#define PASTE_(name, variant) name##_##variant
#define PASTE(name, variant)  PASTE_(name, variant)
#define OP(name)              PASTE(name, VARIANT)

#ifdef __cplusplus
extern "C" {
#endif
// The operations of this dtype, as the table of layers.h has them.
#define DECLARE(name) extern __typeof__(*((struct layers *)0)->name) OP(name);
LAYER_OPS(DECLARE)
#undef DECLARE

// Operations that are steps of others.
// gelu(n) = GELU(pre), tanh form. n is a multiple of 8.
void OP(gelu_forward)(struct device *dev, void *gelu, const void *pre, size_t n);
// dpre(n) = dgelu * GELU'(pre), in place too; gelu(n) = GELU(pre).
void OP(gelu_backward)(struct device *dev, void *dpre, void *gelu, const void *pre,
                       const void *dgelu, size_t n);
// dbias(OC) = column sums of dout(N,OC), in fixed order.
void OP(bias_backward)(struct device *dev, void *dbias, const void *dout, size_t N, size_t OC);
#ifdef __cplusplus
}

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#ifdef USE_BF16
typedef __nv_bfloat16 floatX;
#else
typedef float floatX;
#endif

// LAUNCH(dev, kernel, grid, block, smem, args...) queues a kernel; a kernel whose name has a comma
// in it stands in parentheses. DYN_SMEM(type, name) declares the dynamic shared memory.
#ifdef __CUDACC__
#define LAUNCH(dev, kernel, grid, block, smem, ...)                                                \
    do {                                                                                           \
        kernel<<<grid, block, smem, cuda_stream(dev)>>>(__VA_ARGS__);                              \
        cuda_launched(dev, #kernel);                                                               \
    } while (0)
#define DYN_SMEM(type, name)                                                                       \
    extern __shared__ __align__(128) unsigned char dynamic_smem[];                                 \
    type *name = reinterpret_cast<type *>(dynamic_smem)
#else
#include "test/cuda/shim.h"
#endif

__device__ static inline float to_float(float x)
{
    return x;
}
__device__ static inline float to_float(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}
template <typename T> __device__ static inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x)
{
    return x;
}
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

// 16 bytes of values in registers: loaded and stored at once, at addresses that are multiples
// of 16.
template <typename T> struct alignas(16) packed {
    static const int size = 16 / sizeof(T);
    T x[size];
};

template <typename T> __device__ static inline packed<T> load16(const T *p)
{
    packed<T> v;
    *reinterpret_cast<int4 *>(v.x) = *reinterpret_cast<const int4 *>(p);
    return v;
}
template <typename T> __device__ static inline void store16(T *p, const packed<T> &v)
{
    *reinterpret_cast<int4 *>(p) = *reinterpret_cast<const int4 *>(v.x);
}

__device__ static inline float warp_sum(float x) // the same in all lanes, and in fixed order
{
    for (int d = 16; d > 0; d /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, d);
    }
    return x;
}
__device__ static inline float warp_max(float x)
{
    for (int d = 16; d > 0; d /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    }
    return x;
}

static inline unsigned blocks_of(size_t n, size_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}
#endif // __cplusplus
#endif
