// lt.h - matrix products by cuBLASLt: a plan per shape, made when the shape is first met and kept.
//
// cuBLASLt is column-major: a row-major (R,K) matrix is to it a K x R one. So
//
//     D (m x n)  =  op(A) (m x k)  op(B) (k x n)  [+ C]
//
//     LT_FORWARD      out(N,OC)      weight(OC,C)  A^T    inp(N,C)    B      m OC  n N   k C
//     LT_INPUT        dinp(N,C)      weight(OC,C)  A      dout(N,OC)  B      m C   n N   k OC
//     LT_WEIGHT       dweight(OC,C)  inp(N,C)      A      dout(N,OC)  B^T    m C   n OC  k N
//     LT_WEIGHT_FP32  the same; dweight is fp32 whatever the dtype
//
// Accumulation and scaling are fp32, and fp32 operands are not cut to TF32.
//
// The same bits for the same shape, on every call and under every plan of memory:
// - one algorithm per shape, the heuristic's first. It is asked with all that it may depend on
// fixed
//   by the shape: the alignment that every operand of this shape has (not that of the pointers of
//   the first call), one workspace size;
// - the reduction schemes are masked to none: each element is one sum in one block, in the order of
//   k. No split of k, so no partial results whose order of arrival could show;
// - one workspace, on one stream: no two products use it at the same time.
// It does depend on the GPU and on the version of cuBLASLt.
#ifndef KERNELS_CUDA_LT_H
#define KERNELS_CUDA_LT_H

#include "kernels/cuda/cuda.h"

enum lt_op { LT_FORWARD, LT_INPUT, LT_WEIGHT, LT_WEIGHT_FP32 };

struct lt_shape {
    enum lt_op op;
    cublasLtEpilogue_t epilogue;
    size_t N, C, OC;
};

struct lt_operands {
    void *d;
    const void *a, *b;
    const void *c; // added; NULL: nothing. May be d.
    void *bias;    // m elements, of D's dtype; of n for CUBLASLT_EPILOGUE_BGRADB
    void *aux;     // of D's shape and dtype: GELU's input. Its rows are multiples of 8 elements.
};

// Plans in the table. When it is full it is emptied: what is needed is asked for again.
#define LT_PLANS ((size_t)512)

struct lt_plan {
    struct lt_shape shape;
    bool made;
    cublasStatus_t status; // of making it
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algo;
};

struct lt_cache {
    // Whether cuBLASLt's epilogues do what is more than a bias (GELU, its gradient, the gradient of
    // a bias), where they can.
    bool fuse;
    size_t n; // plans
    struct lt_plan plan[LT_PLANS];
};

// Is there an algorithm for this shape with this epilogue?
bool lt_has(struct device *dev, const struct lt_shape *shape);
// Queues the product. Without an algorithm, or if cuBLASLt refuses: cuda_fail.
void lt_matmul(struct device *dev, const struct lt_shape *shape, const struct lt_operands *o);

#endif
