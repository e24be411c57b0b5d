// session.h - a model on a device, ready to train, evaluate and generate.
//
// Opening a session lays out everything that it will ever hold in one device arena, takes it, and
// writes down each kind of step as a graph (graph.h). From then on nothing is allocated.
//
// One training step, in program order (k micro-batches):
//
//   for each micro-batch:  tokens in | encode | forward 1..L | head | backward L..1 |
//                          encode backward | losses out
//       each gradient, where it is born: summed over micro-batches if k > 1; after the last one
//       its sum of squares is taken
//   clip:  global norm -> scale, or no update at all
//   Adam:  unit 0, 1, .. L
//
// Memory, per unit u and boundary x[u]:
//
//   parameters[0..L]  moments m, v[0..L]  (bf16: fp32 masters[0..L])
//   k = 1: gradients[0..L]              k > 1: sums[0..L], gradients of unit 0 and of one block
//   x[0..L]  kept[1..L]  dx  work  tokens and losses of the whole step
//
// There is one gradient buffer dx for all boundaries; it goes through the blocks in place.
#ifndef HETE_SESSION_H
#define HETE_SESSION_H

#include "kernels/unit.h"

#include <stdio.h>

struct session;

struct session_config {
    size_t B, T;          // one micro-batch: B rows of T tokens
    size_t micro_batches; // in a step
    bool train;           // false: no gradients, no moments
};

// STATUS_FAIL: no memory for the arena, or a batch beyond any machine's.
int session_open(struct session **out, struct device *dev, const struct model *model,
                 const struct session_config *config, struct error *err);
void session_close(struct session *s);

// Prints what the arena holds, in bytes; its exact total is what was taken from the device.
void session_print_memory(const struct session *s, FILE *out);
size_t session_arena_bytes(const struct session *s);

// State of the model, moved as fp32 whatever the device holds: elements [first, first+n) of a unit.
enum state {
    STATE_PARAMS, // the fp32 masters where there are any
    STATE_M,
    STATE_V,
};
void session_read(struct session *s, enum state state, size_t unit, size_t first, float *out,
                  size_t n);
void session_write(struct session *s, enum state state, size_t unit, size_t first, const float *in,
                   size_t n);

struct session_update {
    double lr, beta1, beta2, eps, weight_decay;
    double clip;   // global norm above which gradients are scaled down; 0: never
    bool guard;    // a norm that is not finite: no update
    uint64_t step; // updates done so far; the bias corrections use step + 1
    // Asked with the step's loss and norm before any parameter changes; false: no update. May be
    // NULL.
    bool (*accept)(void *ctx, double loss, double norm);
    void *ctx;
};

struct session_result {
    double loss; // mean over all tokens of the step
    double norm; // global gradient norm, before clipping
    bool updated;
};

// One optimizer step on micro_batches * B rows: tokens, targets (rows, T), host memory.
void session_step(struct session *s, const int32_t *tokens, const int32_t *targets,
                  const struct session_update *update, struct session_result *result);

// Loss of every token of one micro-batch of B rows, without training: losses(B,T). A target of -1
// gives 0.
void session_losses(struct session *s, const int32_t *tokens, const int32_t *targets,
                    float *losses);

// Feeds the token at position pos (0, 1, ..) and gives the logits(Vp) of the next one. Positions
// up to B*T of the session can be remembered. Training in between forgets them.
void session_decode(struct session *s, int32_t token, size_t pos, float *logits);
size_t session_decode_limit(const struct session *s);
size_t session_logits(const struct session *s); // Vp

// The first tensor that holds a NaN or an infinity, in program order of the last step: parameters,
// outputs of units, gradients. False if there is none.
bool session_find_nonfinite(struct session *s, char *out, size_t size);

#endif
