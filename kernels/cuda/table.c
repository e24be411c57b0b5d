// table.c - the layer table of one dtype.
#include "kernels/cuda/ops.h"

#define ENTRY(name) .name = OP(name)
const struct layers OP(layers) = {
    ENTRY(encoder_forward),
    ENTRY(encoder_backward),
    ENTRY(encoder_decode),
    ENTRY(layernorm_forward),
    ENTRY(layernorm_backward),
    ENTRY(matmul_forward),
    ENTRY(matmul_gelu_forward),
    ENTRY(matmul_backward_input),
    ENTRY(matmul_gelu_backward_input),
    ENTRY(matmul_backward_weight),
    ENTRY(matmul_backward_weight_fp32),
    ENTRY(attention_forward),
    ENTRY(attention_backward),
    ENTRY(attention_decode),
    ENTRY(classifier),
    ENTRY(sumsq),
    ENTRY(sumsq_fp32),
    ENTRY(adamw),
    ENTRY(adamw_fp32),
    ENTRY(adamw_apart),
    ENTRY(adamw_apart_fp32),
    ENTRY(accumulate),
    ENTRY(cast),
};
