// attention.cu - the attention operations of layers.h, of one dtype: which implementation does
// what.
#include "kernels/cuda/attention.h"

#include "kernels/cuda/attention_plain.cuh"
#ifdef USE_BF16
#include "kernels/cuda/attention_mma.cuh"
#endif

extern "C" {

const struct attention_passes OP(attention_plain) = {forward_plain, backward_plain};
#ifdef USE_BF16
const struct attention_passes OP(attention_mma) = {forward_mma, backward_mma};
#define BEST attention_mma
#else
#define BEST attention_plain
#endif

void OP(attention_forward)(struct device *dev, void *out, float *lse, const void *qkv, size_t B,
                           size_t T, size_t C, size_t NH)
{
    OP(BEST).forward(dev, out, lse, qkv, B, T, C, NH);
}

void OP(attention_backward)(struct device *dev, void *dqkv, const void *dout, const void *qkv,
                            const void *out, const float *lse, size_t B, size_t T, size_t C,
                            size_t NH)
{
    OP(BEST).backward(dev, dqkv, dout, qkv, out, lse, B, T, C, NH);
}

void OP(attention_decode)(struct device *dev, void *out, const void *qkv, size_t n, size_t C,
                          size_t NH)
{
    struct attention a = attention_of(1, n, C, NH);
    LAUNCH(dev, attention_decode_kernel, (unsigned)NH, 32 * DECODE_WARPS, 0, (floatX *)out,
           (const floatX *)qkv, (int)n, a);
}
}
