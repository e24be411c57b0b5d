// inside.h - the inside of a session, for the files that make it up: session.c (opening, steps),
// operate.c (what an operation does), state.c (parameters and moments in and out). Nobody else
// includes this.
#ifndef HETE_INSIDE_H
#define HETE_INSIDE_H

#include "hete/comm.h"
#include "hete/execute.h"
#include "hete/session.h"
#include "kernels/bf16.h"
#include "kernels/layers.h"

#include <math.h>
#include <stdatomic.h>

#define IN_FLIGHT 2

// A step between session_start and session_finish.
struct flight {
    struct session_update update;
    struct session_result result;
    struct adamw adamw; // decay: of tensors that decay
    uint64_t updates;   // done by other sessions: what is added to this one's count
    // Set by clip: speculation went wrong. What is still to be done of it is in vain.
    atomic_bool refuted;
};

// Which version of a unit's parameters a place on the device holds, by slice. Version 0: none.
struct stamp {
    size_t unit;
    uint64_t version[PLAN_SLICES_MAX];
};

struct session {
    struct device *dev, *host;
    const struct model *model;
    struct session_config config;
    struct plan plan;
    struct step_shape shape;
    struct layout layout;
    char *arena[SPACES];
    struct graph step, loss, decode;
    struct executor *lanes; // NULL: serial
    const struct graph *loaded;
    struct flight flight[IN_FLIGHT];
    uint64_t started, finished; // training steps
    uint64_t runs;              // of the graph that is loaded, where it is not the training step
    uint64_t made[IN_FLIGHT];   // updates before a step, by step % IN_FLIGHT
    uint64_t reported;          // updates of the steps that are finished
    bool held;
    struct error error;
    double *pace;           // by operation of the training step; NULL: not paced
    double *work;           // costs_of_graph of the training step; NULL without training
    struct timing *timings; // room for EXECUTE_KEPT_STEPS steps; NULL where they run serially
    double *sums;           // over the ranks, of what each shares (step.h)
    void *host_logits;      // Vp, in the device's dtype
    // By unit and slice: its state on the host and its spare have changed places.
    bool (*swapped)[PLAN_SLICES_MAX];
    uint64_t guesses, right; // steps with speculation, and those in which it held
    struct stamp *newest;    // by unit: the version that its optimizer has made
    // By unit: what its place on the device has, and, where it is sharded, what it has of all
    // ranks.
    struct stamp *here, *gathered;
    struct stamp slot[PLAN_SLOTS_MAX], slot_gathered[PLAN_SLOTS_MAX];
    int32_t token;
    size_t pos;
    size_t *piece_first[2], *piece_n[2]; // of unit 0, of a block: by rank (step_piece)
};

// ---- addresses ----------------------------------------------------------------------------------

static inline size_t elem_bytes(const struct session *s)
{
    return dtype_bytes(s->dev->dtype);
}

static inline size_t unit_elems(const struct session *s, size_t u)
{
    return model_unit(s->model, u)->params;
}

// Address of a buffer: of device memory, as the device handed it out.
static inline char *at(const struct session *s, enum buffer_kind kind, size_t index)
{
    const struct region *r = s->layout.region[kind] + index;
    return s->arena[r->space] + r->offset;
}

// Address of a buffer for the functions of `layers`.
static inline void *lane(const struct session *s, enum buffer_kind kind, size_t index)
{
    bool device = s->layout.region[kind][index].space == SPACE_DEVICE;
    return at(s, kind, index) + (device ? s->dev->lane_offset : 0);
}

static inline bool on_host(const struct session *s, size_t u)
{
    return s->plan.unit[u].host_optimizer;
}

static inline bool sharded(const struct session *s, size_t u)
{
    return s->plan.unit[u].shard;
}

// Are the parameters that the device computes with made elsewhere?
static inline bool is_brought(const struct session *s, size_t u)
{
    return on_host(s, u) || sharded(s, u);
}

// Does the next step stand still after one that is not finite?
static inline bool stands_still(const struct session *s)
{
    return s->shape.ranks == 1 || s->plan.hold_updates;
}

// Index of the region that holds a slice of a unit's valid state on the host, and of the other one.
static inline size_t current(const struct session *s, size_t u, size_t slice)
{
    return s->swapped[u][slice] ? step_spare(&s->shape, u) : u;
}

static inline size_t spare(const struct session *s, size_t u, size_t slice)
{
    return s->swapped[u][slice] ? u : step_spare(&s->shape, u);
}

static inline size_t ranks(const struct session *s)
{
    return s->shape.ranks;
}

// A run of a unit's elements: [first, first + n) of the unit, from `held` on in what this rank
// holds of it.
struct part {
    size_t first, held, n;
};

// What this rank adds up of a unit.
static inline struct part piece_of(const struct session *s, size_t u)
{
    size_t k = u > 0;
    return (struct part){.first = s->piece_first[k][s->shape.rank],
                         .n = s->piece_n[k][s->shape.rank]};
}

// What it updates.
static inline struct part held_of(const struct session *s, size_t u)
{
    return sharded(s, u) ? piece_of(s, u) : (struct part){.n = unit_elems(s, u)};
}

// A slice of that; no elements where the largest rank's piece has some and this one's has not.
static inline struct part slice_of(const struct session *s, size_t u, size_t slice)
{
    struct part p = held_of(s, u);
    size_t n = step_slice(&s->shape, &s->plan, u, slice, &p.held);
    size_t end = p.held + n < p.n ? p.held + n : p.n;
    p.first += p.held;
    p.n = end > p.held ? end - p.held : 0;
    return p;
}

static inline struct comm_pieces pieces_of(const struct session *s, size_t u)
{
    return (struct comm_pieces){elem_bytes(s), s->piece_first[u > 0], s->piece_n[u > 0]};
}

static inline bool accumulates(const struct session *s)
{
    return s->config.micro_batches > 1;
}

// The one access of an operation to a kind of buffer, or NULL.
const struct access *access_of(const struct graph *g, const struct op *op, enum buffer_kind kind);

// Scalars of the update that follows `updates` others.
struct adamw adamw_of(const struct session_update *up, double scale, uint64_t updates);

// Execute callbacks (operate.c); ctx: the session.
int run_op(void *ctx, const struct op *op, uint64_t step, struct error *err);
void poison(void *ctx, const struct op *op, const struct access *a);

void to_fp32(float *out, const void *in, enum dtype dtype, size_t n);

static inline size_t host_tokens(const struct session *s, uint64_t step, size_t micro)
{
    return step % IN_FLIGHT * s->config.micro_batches + micro;
}

#endif
