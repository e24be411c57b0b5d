// matmul.c - the matrix products of layers.h, by cuBLASLt.
//
// What follows a product element by element is left to its epilogues where they can and do pay
// (lt_cache's fuse); else a kernel of ours goes over the result. Which of the two follows from GPU,
// dtype and shape, so that bits depend on nothing more.
#include "kernels/cuda/lt.h"
#include "kernels/cuda/ops.h"

// Whether the shape's epilogue is used. row: elements of a row of aux; 0: there is none.
static bool fuses(struct device *dev, const struct lt_shape *shape, size_t row)
{
    return cuda_of(dev)->plans->fuse && row % 8 == 0 && lt_has(dev, shape);
}

static cublasLtEpilogue_t plain(const void *bias)
{
    return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

void OP(matmul_forward)(struct device *dev, void *out, const void *inp, const void *weight,
                        const void *bias, const void *residual, size_t N, size_t C, size_t OC)
{
    lt_matmul(dev, &(struct lt_shape){LT_FORWARD, plain(bias), N, C, OC},
              &(struct lt_operands){
                  .d = out, .a = weight, .b = inp, .c = residual, .bias = (void *)bias});
}

void OP(matmul_gelu_forward)(struct device *dev, void *gelu, void *pre, const void *inp,
                             const void *weight, const void *bias, size_t N, size_t C, size_t OC)
{
    struct lt_shape shape = {LT_FORWARD, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, N, C, OC};
    struct lt_operands o = {.d = gelu, .a = weight, .b = inp, .bias = (void *)bias, .aux = pre};
    if (bias && fuses(dev, &shape, OC)) {
        lt_matmul(dev, &shape, &o);
        return;
    }
    shape.epilogue = plain(bias);
    o.d = pre;
    lt_matmul(dev, &shape, &o);
    OP(gelu_forward)(dev, gelu, pre, N * OC);
}

void OP(matmul_backward_input)(struct device *dev, void *dinp, const void *dout, const void *weight,
                               size_t N, size_t C, size_t OC)
{
    lt_matmul(dev, &(struct lt_shape){LT_INPUT, CUBLASLT_EPILOGUE_DEFAULT, N, C, OC},
              &(struct lt_operands){.d = dinp, .a = weight, .b = dout});
}

void OP(matmul_gelu_backward_input)(struct device *dev, void *dpre, void *gelu, const void *pre,
                                    const void *dout, const void *weight, size_t N, size_t C,
                                    size_t OC)
{
    struct lt_shape shape = {LT_INPUT, CUBLASLT_EPILOGUE_DGELU, N, C, OC};
    struct lt_operands o = {.d = dpre, .a = weight, .b = dout, .aux = (void *)pre};
    if (fuses(dev, &shape, C)) {
        lt_matmul(dev, &shape, &o);
        OP(gelu_forward)(dev, gelu, pre, N * C);
        return;
    }
    shape.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    lt_matmul(dev, &shape, &o);
    OP(gelu_backward)(dev, dpre, gelu, pre, dpre, N * C);
}

void OP(matmul_backward_weight)(struct device *dev, void *dweight, void *dbias, const void *dout,
                                const void *inp, size_t N, size_t C, size_t OC)
{
    struct lt_shape shape = {LT_WEIGHT, CUBLASLT_EPILOGUE_BGRADB, N, C, OC};
    struct lt_operands o = {.d = dweight, .a = inp, .b = dout, .bias = dbias};
    if (fuses(dev, &shape, 0)) {
        lt_matmul(dev, &shape, &o);
        return;
    }
    shape.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    lt_matmul(dev, &shape, &o);
    OP(bias_backward)(dev, dbias, dout, N, OC);
}

void OP(matmul_backward_weight_fp32)(struct device *dev, float *dweight, const void *dout,
                                     const void *inp, bool accumulate, size_t N, size_t C,
                                     size_t OC)
{
    lt_matmul(
        dev, &(struct lt_shape){LT_WEIGHT_FP32, CUBLASLT_EPILOGUE_DEFAULT, N, C, OC},
        &(struct lt_operands){.d = dweight, .a = inp, .b = dout, .c = accumulate ? dweight : NULL});
}
