// step.h - writes down the steps of a model under a plan: the operations, the buffers, the bytes.
//
// One training step, in program order (k micro-batches), fetches left out:
//
//   for each micro-batch:  tokens in | encode | forward 1..L | head | losses out |
//                          [recompute u,] backward u, gradient of u   for u = L..1 |
//                          encode backward, gradient of unit 0
//       gradient of u, optimizer on the device: k > 1: added to the sum; last: norm
//                      optimizer on the host:   k = 1: norm, gradient out
//                                               k > 1: gradient out to a stage, added on the host;
//                                                      last: sums of squares there
//   clip:  global norm -> scale, or no update at all
//   Adam:  host units 0, 1, .. L by slices, then device units 0, 1, .. L; with speculation: of each
//          host unit first what need not wait for clip, then what makes it good
//
// A fetch stands right before the use that needs it: of a streamed unit into the slot that was used
// least recently, unless a slot holds it; of a resident unit whose optimizer is on the host into
// its own place, before its first use of the step.
//
// With several ranks each does this for its rows, and besides, on the comm lane:
//
//   scatter u   as soon as a unit's gradient of a micro-batch is complete: each rank gets its piece
//               summed over the ranks (in their order, in fp32, rounded once)
//   gather gradients u   where the optimizer is not sharded: the pieces of all ranks. Otherwise a
//               rank goes on with its piece alone
//   share       before clip: the losses and the norms of the pieces, which are summed in rank order
//   gather u    where it is sharded: the parameters' pieces, behind the fetch if there is one and
//               where a fetch would stand; during backward one unit ahead, since this lane runs in
//               program order and would else hold it back behind the scatter before it
//
// The list is the same on all ranks, also where pieces differ in size or are empty.
#ifndef HETE_STEP_H
#define HETE_STEP_H

#include "hete/graph.h"
#include "kernels/unit.h"

struct plan;

// Operations. The first ones are calls of a unit (unit.h).
enum op_kind {
    OP_TOKENS_IN = CALLS, // copy in
    OP_LOSSES_OUT,        // copy out
    OP_FETCH,             // copy in: a slice of a unit's parameters
    OP_GRAD_OUT,          // copy out: a slice of a unit's gradient
    OP_ACCUMULATE,        // compute
    OP_NORM,              // compute: sum of squares of a unit's gradient
    OP_CLIP,              // compute; host, where no update waits for it
    OP_ADAM,              // compute
    OP_HOST_ACCUMULATE,   // host: a slice
    OP_HOST_NORM,         // host: a slice
    OP_HOST_SPECULATE,    // host: a slice's Adam, unclipped, beside the old state
    OP_HOST_ADAM,         // host: a slice
    OP_SCATTER,      // comm: a rank's piece of a unit's gradient becomes the sum over the ranks
    OP_GATHER_GRADS, // comm: the pieces of all ranks
    OP_GATHER,       // comm: a unit's parameters, of all ranks
    OP_SHARE,        // comm: every rank gets the losses and norms of all
    OP_BARRIER,      // host: waits, does nothing
    OP_BEGIN,        // compute: waits, does nothing
    OP_KINDS
};
const char *op_name(uint16_t kind);
bool op_has_unit(uint16_t kind); // false: it is of the whole step or micro-batch

enum step_kind { STEP_TRAIN, STEP_LOSS, STEP_DECODE };

// Sizes of a model, once for all that needs them.
struct step_shape {
    const struct model *model;
    enum dtype dtype;
    size_t B, T, micro_batches; // of one rank
    size_t ranks, rank;         // rank: which of them this is; plans are the same for all
    bool train;
    struct unit_bytes bytes;
};
void step_shape(struct step_shape *shape, const struct model *model, enum dtype dtype, size_t B,
                size_t T, size_t micro_batches, bool train);

// The elements [*first, *first + n) of a unit whose gradients a rank adds up, and, where it is
// sharded, updates; n may be 0. Multiples of TENSOR_ALIGN.
size_t step_piece(const struct step_shape *shape, size_t unit, size_t rank, size_t *first);

// Elements of a unit's optimizer state that are planned for on every rank: the unit's, or, where it
// is sharded, the largest piece.
size_t step_held(const struct step_shape *shape, const struct plan *plan, size_t unit);

// What each rank shares in a step: numbers, the last ones the sums of squares of its pieces of each
// unit's gradient.
enum { SHARED_LOSS, SHARED_STOP, SHARED_NORMS };
static inline size_t step_shared(const struct step_shape *shape)
{
    return SHARED_NORMS + shape->model->units;
}

// Writes the operations of a step and links them. A training step repeats; the others stand alone.
int step_build(struct graph *g, const struct step_shape *shape, const struct plan *plan,
               enum step_kind kind, struct error *err);

// Positions that decoding can remember. While training that depends on no plan: a row, or as many
// as fit where the output of a block that keeps nothing lies.
size_t step_decode_limit(const struct step_shape *shape);

// With speculation a unit's state on the host exists twice. Buffers of index u hold what is valid,
// those of this index what may become so; which bytes these are changes places (operate.c).
static inline size_t step_spare(const struct step_shape *shape, size_t unit)
{
    return shape->model->units + unit;
}

// Elements of unit u's slice, of the step_held there are: [*first, *first + n); n may be 0. first
// is a multiple of SUMSQ_CHUNK.
size_t step_slice(const struct step_shape *shape, const struct plan *plan, size_t unit,
                  size_t slice, size_t *first);

// ---- memory ----

enum space { SPACE_DEVICE, SPACE_PINNED, SPACE_HOST, SPACES };

enum category { PARAMS, MASTERS, GRADIENTS, MOMENTS, ACTIVATIONS, WORKSPACE, BATCH, CATEGORIES };
extern const char *const category_name[CATEGORIES];

// All buffers of a kind and index, one behind the other.
struct region {
    enum space space;
    size_t offset, bytes; // offset: DEVICE_ALIGN
};

struct layout {
    size_t total[SPACES], category[SPACES][CATEGORIES];
    size_t indices[BUFFER_KINDS];        // regions of a kind; those that are not there have 0 bytes
    struct region *region[BUFFER_KINDS]; // by index
};

// Places every buffer of the plan; what does not fit into `pinned` bytes of pinned memory lies in
// pageable memory instead. STATUS_FAIL: no memory, or sizes that overflow.
int layout_make(struct layout *layout, const struct step_shape *shape, const struct plan *plan,
                size_t pinned, struct error *err);
void layout_free(struct layout *layout);

#endif
