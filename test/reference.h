// reference.h - every layer operation as a plain loop in double precision: what the fast ones are
// judged by. Each backward is itself checked by central differences of its forward
// (test_reference.c).
//
// Dimensions as in kernels/layers.h: B T C V Vp NH, N rows, OC output channels. Outputs first.
// Gradients are written, not added to, except where it is said.
#ifndef TEST_REFERENCE_H
#define TEST_REFERENCE_H

#include "kernels/layers.h"

#include <stddef.h>
#include <stdint.h>

// out(B,T,C) = wte[token] + wpe[t]
void ref_encoder_forward(double *out, const int32_t *tokens, const double *wte, const double *wpe,
                         size_t B, size_t T, size_t C);
// Adds to dwte(V,C) and dwpe(maxT,C).
void ref_encoder_backward(double *dwte, double *dwpe, const double *dout, const int32_t *tokens,
                          size_t B, size_t T, size_t C);

// out(N,C) = (inp - mean) * rstd * weight + bias, rstd = 1/sqrt(var + 1e-5); mean, rstd (N)
void ref_layernorm_forward(double *out, double *mean, double *rstd, const double *inp,
                           const double *weight, const double *bias, size_t N, size_t C);
void ref_layernorm_backward(double *dinp, double *dweight, double *dbias, const double *dout,
                            const double *inp, const double *weight, size_t N, size_t C);

// out(N,OC) = inp(N,C) weight(OC,C)^T + bias(OC) + residual(N,OC); bias, residual may be NULL
void ref_matmul_forward(double *out, const double *inp, const double *weight, const double *bias,
                        const double *residual, size_t N, size_t C, size_t OC);
void ref_matmul_backward(double *dinp, double *dweight, double *dbias, const double *dout,
                         const double *inp, const double *weight, size_t N, size_t C, size_t OC);

// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
void ref_gelu_forward(double *out, const double *inp, size_t n);
void ref_gelu_backward(double *dinp, const double *dout, const double *inp, size_t n);

// Causal attention over qkv(B,T,3C): out(B,T,C), and lse(B,NH,T), the log-sum-exp of each row's
// scores q.k/sqrt(hs).
void ref_attention_forward(double *out, double *lse, const double *qkv, size_t B, size_t T,
                           size_t C, size_t NH);
void ref_attention_backward(double *dqkv, const double *dout, const double *qkv, size_t B, size_t T,
                            size_t C, size_t NH);

// losses(N): cross-entropy of logits(N,Vp) over the first V columns; dlogits(N,Vp): its gradient
// times dscale. A row whose target is -1 has loss and gradient 0.
void ref_classifier(double *losses, double *dlogits, const double *logits, const int32_t *targets,
                    double dscale, size_t N, size_t V, size_t Vp);

double ref_sumsq(const double *x, size_t n);

// The formula of struct adamw, with its scalars as they are.
void ref_adamw(double *p, double *m, double *v, const double *g, const struct adamw *a, size_t n);

#endif
