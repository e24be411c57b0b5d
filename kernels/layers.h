// layers.h - WHAT is computed: one entry per layer operation, implemented by every device.
//
// Dimensions: B batch, T sequence, C channels, NH heads, hs = C/NH, L layers, V vocabulary,
// Vp padded vocabulary, N = B*T rows, OC output channels. Row-major; the last dimension is dense.
// Outputs come first, then inputs, then dimensions; d marks a gradient.
//
// `void *` tensors hold the table's dtype, `float *` tensors are fp32 whatever the dtype. All
// arithmetic is fp32 and a result is rounded once, when it is stored.
//
// Every operation gives the same bits on every call with the same inputs, whatever the number of
// threads: the order of each sum depends on the shapes alone. None allocates.
#ifndef KERNELS_LAYERS_H
#define KERNELS_LAYERS_H

#include "kernels/device.h"

// Scalars of one AdamW update, computed once per step on the host so that every slice and
// placement uses the same bits (Loshchilov and Hutter 2019, bias corrections folded in):
//   m = beta1*m + (1-beta1)*g*scale     v = beta2*v + (1-beta2)*(g*scale)^2
//   p = p*decay - step * m / (sqrt(v)*v_correction + eps)
struct adamw {
    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float eps;
    float scale;        // gradient scale: clipping
    float decay;        // 1 - lr*weight_decay, or 1 for tensors that do not decay
    float step;         // lr / (1 - beta1^t)
    float v_correction; // 1 / sqrt(1 - beta2^t)
};

struct adamw_state {
    float *master, *m, *v;
};

// Elements summed in fp32 before the sum of squares goes on in double.
#define SUMSQ_CHUNK ((size_t)1024)

struct layers {
    // out(B,T,C) = wte[token] + wpe[t]. tokens(B,T); wte(Vp,C), wpe(maxT,C).
    void (*encoder_forward)(struct device *, void *out, const int32_t *tokens, const void *wte,
                            const void *wpe, size_t B, size_t T, size_t C);
    // dwte(Vp,C) += the rows of dout(B,T,C) by token; dwpe(maxT,C) = their sum over B, 0 from T on.
    void (*encoder_backward)(struct device *, float *dwte, void *dwpe, const void *dout,
                             const int32_t *tokens, size_t B, size_t T, size_t C, size_t maxT);
    // The same for one token at position pos: out(C).
    void (*encoder_decode)(struct device *, void *out, int32_t token, size_t pos, const void *wte,
                           const void *wpe, size_t C);

    // out(N,C) = (inp - mean) * rstd * weight + bias, rstd = 1/sqrt(var + 1e-5); mean, rstd (N).
    void (*layernorm_forward)(struct device *, void *out, float *mean, float *rstd, const void *inp,
                              const void *weight, const void *bias, size_t N, size_t C);
    // dinp(N,C) = dresidual + gradient through the norm. dresidual may be dinp itself, or NULL (0).
    void (*layernorm_backward)(struct device *, void *dinp, void *dweight, void *dbias,
                               const void *dout, const void *dresidual, const void *inp,
                               const void *weight, const float *mean, const float *rstd, size_t N,
                               size_t C);

    // out(N,OC) = inp(N,C) weight(OC,C)^T + bias(OC) + residual(N,OC); bias, residual may be NULL.
    void (*matmul_forward)(struct device *, void *out, const void *inp, const void *weight,
                           const void *bias, const void *residual, size_t N, size_t C, size_t OC);
    // pre = inp weight^T + bias; gelu = GELU(pre) (tanh form), both (N,OC).
    void (*matmul_gelu_forward)(struct device *, void *gelu, void *pre, const void *inp,
                                const void *weight, const void *bias, size_t N, size_t C,
                                size_t OC);
    // dinp(N,C) = dout(N,OC) weight(OC,C).
    void (*matmul_backward_input)(struct device *, void *dinp, const void *dout, const void *weight,
                                  size_t N, size_t C, size_t OC);
    // The same, through the GELU that made this matmul's input: dpre(N,C) = dinp * GELU'(pre);
    // gelu(N,C) = GELU(pre) is given back, since the weight gradient needs it and it was not kept.
    void (*matmul_gelu_backward_input)(struct device *, void *dpre, void *gelu, const void *pre,
                                       const void *dout, const void *weight, size_t N, size_t C,
                                       size_t OC);
    // dweight(OC,C) = dout(N,OC)^T inp(N,C); dbias(OC) = column sums of dout.
    void (*matmul_backward_weight)(struct device *, void *dweight, void *dbias, const void *dout,
                                   const void *inp, size_t N, size_t C, size_t OC);
    // dweight(OC,C) = [dweight +] dout^T inp in fp32, for a weight whose gradient has several uses.
    void (*matmul_backward_weight_fp32)(struct device *, float *dweight, const void *dout,
                                        const void *inp, bool accumulate, size_t N, size_t C,
                                        size_t OC);

    // Causal self-attention of NH heads, scores scaled by 1/sqrt(hs): out(B,T,C) and the rows'
    // log-sum-exp lse(B,NH,T) from qkv(B,T,3C). By tiles, with an online softmax (Milakov and
    // Gimelshein 2018; Dao et al. 2022): nothing of size T*T exists.
    void (*attention_forward)(struct device *, void *out, float *lse, const void *qkv, size_t B,
                              size_t T, size_t C, size_t NH);
    void (*attention_backward)(struct device *, void *dqkv, const void *dout, const void *qkv,
                               const void *out, const float *lse, size_t B, size_t T, size_t C,
                               size_t NH);
    // out(C) for the last of n positions: qkv(n,3C) is at once the cache of keys and values.
    void (*attention_decode)(struct device *, void *out, const void *qkv, size_t n, size_t C,
                             size_t NH);

    // losses(N) = cross-entropy of logits(N,Vp) over the V real columns; targets(N), -1: ignored,
    // loss 0. With dscale != 0 the logits are replaced by their gradient times dscale.
    void (*classifier)(struct device *, float *losses, void *logits, const int32_t *targets,
                       float dscale, size_t N, size_t V, size_t Vp);

    // *sum (device or pinned memory) = sum of squares of x(n): fp32 within SUMSQ_CHUNK elements,
    // double across chunks in order. chunks: workspace of ceil(n/SUMSQ_CHUNK) floats.
    void (*sumsq)(struct device *, double *sum, float *chunks, const void *x, size_t n);
    void (*sumsq_fp32)(struct device *, double *sum, float *chunks, const float *x, size_t n);

    // One pass over n parameters: m, v and the fp32 master updated from grad, params = rounded
    // master. In fp32 params and master are one tensor.
    void (*adamw)(struct device *, void *params, float *master, float *m, float *v,
                  const void *grad, const struct adamw *a, size_t n);
    void (*adamw_fp32)(struct device *, void *params, float *master, float *m, float *v,
                       const float *grad, const struct adamw *a, size_t n);

    // The same, but the result goes elsewhere: `from` is only read.
    void (*adamw_apart)(struct device *, void *params, const struct adamw_state *to,
                        const struct adamw_state *from, const void *grad, const struct adamw *a,
                        size_t n);
    void (*adamw_apart_fp32)(struct device *, void *params, const struct adamw_state *to,
                             const struct adamw_state *from, const float *grad,
                             const struct adamw *a, size_t n);

    // acc(n) = x, or acc + x: gradients of micro-batches, added in fp32.
    void (*accumulate)(struct device *, float *acc, const void *x, bool first, size_t n);
    // out(n) = x rounded to the table's dtype.
    void (*cast)(struct device *, void *out, const float *x, size_t n);
};

// Every operation of the table, for whoever declares or lists them all.
// clang-format off
#define LAYER_OPS(X) \
    X(encoder_forward) X(encoder_backward) X(encoder_decode) X(layernorm_forward) \
    X(layernorm_backward) X(matmul_forward) X(matmul_gelu_forward) X(matmul_backward_input) \
    X(matmul_gelu_backward_input) X(matmul_backward_weight) X(matmul_backward_weight_fp32) \
    X(attention_forward) X(attention_backward) X(attention_decode) X(classifier) X(sumsq) \
    X(sumsq_fp32) X(adamw) X(adamw_fp32) X(adamw_apart) X(adamw_apart_fp32) X(accumulate) \
    X(cast)
// clang-format on

#endif
