// unit.h - a model as the engine in hete/ sees it: units that own parameters, and calls on them.
//
// Unit 0 holds what the first and the last layer share (the tied embedding, the final norm, the
// loss); units 1..L are the blocks, all of one kind. The engine decides where a unit's bytes are
// and when a call runs; it never knows what the call computes.
//
//   unit 0: ENCODE     1: FORWARD ... L: FORWARD      0: HEAD
//              |  x[0]    |  x[1]  ...   |  x[L]        |
//   unit 0: ENCODE_BACKWARD <- 1: BACKWARD ... L: BACKWARD   (dx, in place)
#ifndef KERNELS_UNIT_H
#define KERNELS_UNIT_H

#include "kernels/device.h"

// Tensors of a unit start at multiples of this many elements; the gaps stay zero.
#define TENSOR_ALIGN ((size_t)64)

struct tensor {
    const char *name;
    size_t offset; // elements, from the start of the unit
    size_t elems;
    bool decay;        // weight decay applies
    float init_std;    // initial values: normal with this deviation, or, if it is 0,
    float init_value;  // this constant
    size_t init_elems; // elements from here on are 0 (rows of the padded vocabulary)
};

enum call {
    CALL_ENCODE,          // tokens -> y
    CALL_FORWARD,         // x -> y, kept
    CALL_RECOMPUTE,       // x -> kept: FORWARD without what only y needs
    CALL_HEAD,            // x, targets -> losses, dx, grads (the part that the head gives)
    CALL_BACKWARD,        // dx, x, kept -> dx, grads
    CALL_ENCODE_BACKWARD, // dx, tokens -> grads (completed)
    CALL_LOSS,            // x, targets -> losses: HEAD without gradients
    // Inference, one token at a time; `kept` is the cache of keys and values.
    CALL_ENCODE_TOKEN, // token, pos -> y(C)
    CALL_DECODE,       // x(C), pos, kept -> y(C), kept
    CALL_LOGITS,       // x(C) -> logits(Vp) at the start of work
    CALLS
};

// Device addresses of one call. Which of them a call uses is said above; params and work always.
struct unit_args {
    const void *params; // laid out as the unit's tensors say
    void *grads;        // the same layout: written, never added to
    float *grads_fp32;  // unit 0 in 16 bits: fp32 sum of a gradient that has several uses
    const void *x;      // (B,T,C) what the unit before gave
    void *y;            // (B,T,C)
    void *dx;           // (B,T,C) gradient of y on entry, of x on exit
    void *kept;         // what forward leaves for backward
    void *work;         // no value survives the call
    const int32_t *tokens, *targets; // (B,T)
    float *losses;                   // (B,T)
    size_t B, T;
    float dscale;  // gradient of the mean loss: 1 / (tokens of the whole step)
    int32_t token; // ENCODE_TOKEN
    size_t pos;    // position of the token that is decoded
};

struct model;
typedef void (*unit_fn)(const struct model *, struct device *, const struct unit_args *);

struct unit {
    const char *name;
    const struct tensor *tensors;
    size_t n_tensors;
    size_t params; // elements, gaps included: a multiple of TENSOR_ALIGN
    unit_fn fn[CALLS];
};

// Bytes that depend on the batch, for units of one kind.
struct unit_bytes {
    size_t boundary;   // x, y or dx
    size_t kept;       // per unit
    size_t work;       // the largest workspace of any call of any unit
    size_t grads_fp32; // unit 0 only
    size_t cache;      // per unit and token, at the start of `kept`: what decoding remembers
};

// What a call does, for estimates: FLOP of matrix products and attention (causal: half), and bytes
// of device memory that everything else moves. Inference calls: 0.
struct call_work {
    double flops, bytes;
};

struct model {
    size_t units;             // 1 + L
    struct unit embed, block; // unit 0, units 1..L
    size_t logits;            // Vp: elements that CALL_LOGITS gives
    struct unit_bytes (*bytes)(const struct model *, enum dtype, size_t B, size_t T);
    struct call_work (*work)(const struct model *, enum dtype, enum call, size_t B, size_t T);
};

static inline const struct unit *model_unit(const struct model *m, size_t u)
{
    return u == 0 ? &m->embed : &m->block;
}

#endif
