// gpt.h - GPT-2 as a model made of units: its shape, its parameters, its calls.
//
// Pre-layernorm blocks (eps 1e-5), learned positions, GELU in tanh form, biases, head tied to the
// embedding (Radford et al. 2019). B batch, T sequence, C channels, V vocabulary, Vp padded
// vocabulary (V rounded up to 128), L layers, NH heads.
#ifndef KERNELS_GPT_H
#define KERNELS_GPT_H

#include "kernels/unit.h"

struct gpt_config {
    size_t max_seq, vocab, layers, heads, hidden;
    size_t head_rows; // rows of logits that exist at one time
};

// "dN" and "gpt2:dN" (N layers: 6 12 24 36 48), "gpt3:cN" (N channels, the table of the GPT-3
// paper). Leaves vocab alone. STATUS_USAGE: none of these.
int gpt_parse(struct gpt_config *config, const char *spec, struct error *err);

// Refuses shapes that cannot be: zeros, hidden not a multiple of heads, sizes that overflow.
int gpt_check(const struct gpt_config *config, struct error *err);

size_t gpt_padded_vocab(const struct gpt_config *config);
size_t gpt_head_size(const struct gpt_config *config);

// Parameters, the padded rows of wte included, gaps not.
size_t gpt_params(const struct gpt_config *config);

// FLOP per token of one training step by the usual count, 6N + 6LCT (Chowdhery et al. 2022 with
// causal attention): 2 forward and 4 backward per parameter; recomputation is not counted.
double gpt_flops_per_token(const struct gpt_config *config, size_t T);

struct gpt {
    struct model model; // first member: hete gets its address
    struct gpt_config config;
    struct tensor embed_tensors[4], block_tensors[12];
};

void gpt_open(struct gpt *gpt, const struct gpt_config *config);

// The parameters in the order of the model file (wte, wpe, then each block tensor for all layers,
// lnfw, lnfb) are a list of spans: span i is `elems` elements of `tensor` in `unit`.
struct gpt_span {
    size_t unit;
    const struct tensor *tensor;
};
size_t gpt_spans(const struct gpt *gpt);
struct gpt_span gpt_span(const struct gpt *gpt, size_t i);

// Initial values of n parameters of a unit from element `first` on (host memory, fp32). A value
// depends on the seed, the tensor, the unit and the element alone, so any range in any order gives
// the same model.
void gpt_init(const struct gpt *gpt, uint64_t seed, size_t unit, size_t first, float *out,
              size_t n);

#endif
