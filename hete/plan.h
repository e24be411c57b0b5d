// plan.h - what is decided per unit and once, and the search for the best decisions.
//
// A plan changes where bytes are and when work runs, never a result: the losses and parameters of
// all plans are equal to the last bit.
//
//   activations  keep all                | recompute from the block's input
//   parameters   resident on the device  | streamed in before each use through slots
//   optimizer    on the device           | on the host: gradient out, CPU Adam, parameters in
//
// Unit 0 (embedding and head) is always resident; where its optimizer is, is decided too.
//
// With several ranks there is one decision more: a unit's optimizer state is sharded, a piece
// (step_piece) of it on each rank, or the same on all. Sharded, its gradient is reduce-scattered,
// each rank updates its piece, and before use the pieces of its parameters are gathered: resident
// ones once a step, streamed ones into their slot. A host optimizer and streaming imply it; a
// streamed unit whose optimizer is on the device has its piece of the parameters there, too.
//
//                 device, resident   sharded, resident   sharded, streamed   host (always sharded)
//   ZeRO stage    0                  1 and 2             3                   2, streamed: 3
//
// 1 and 2 differ nowhere: a gradient is cut to the rank's piece as soon as it is complete.
#ifndef HETE_PLAN_H
#define HETE_PLAN_H

#include "hete/cost.h"
#include "kernels/unit.h"

#define PLAN_UNITS_MAX  ((size_t)1001)
#define PLAN_SLOTS_MAX  ((size_t)8)
#define PLAN_GRADS_MAX  ((size_t)8)
#define PLAN_SLICES_MAX ((size_t)16)
#define PLAN_STAGES     ((size_t)2) // host staging buffers, for accumulation
#define PLAN_RANKS_MAX  ((size_t)1 << 20)

struct unit_plan {
    bool recompute; // unit 0: never
    bool stream;    // unit 0: never; implies host_optimizer or, with several ranks, shard
    bool host_optimizer;
    bool shard; // with one rank never; with several implied by host_optimizer and by stream
};

static inline bool unit_plan_same(const struct unit_plan *x, const struct unit_plan *y)
{
    return x->recompute == y->recompute && x->stream == y->stream &&
           x->host_optimizer == y->host_optimizer && x->shard == y->shard;
}

struct plan {
    char policy[32];
    size_t units, B, T, micro_batches; // of one rank
    size_t ranks;
    bool hold_updates; // no update before the global norm is known (clip, guard, outliers)
    struct unit_plan unit[PLAN_UNITS_MAX];
    size_t slots;        // for streamed units; 0 if there are none
    size_t grad_buffers; // shared by the blocks whose gradient is short-lived; 0 if there are none
    size_t slices;       // into which transfers and host work of a unit are cut
    bool early_adam;     // device Adam right after a unit's backward; never with hold_updates
    // Host Adam does not wait for the norm: it writes its result beside the old state, for the case
    // that nothing is clipped or skipped. In that case the two change places, else the update is
    // made as it must be. Only with hold_updates; costs a second copy of the state.
    bool speculate;
    // What only baselines do (PAPER: baselines are fixed plans of the same engine).
    bool fifo;    // lanes serve in order of arrival, host Adam in the order of backward
    bool barrier; // no host Adam before the whole backward is done, no forward before all updates
    bool serial_copies; // fetches and compute exclude each other
};

// Bytes at most. 0: none; SIZE_MAX: no limit.
struct budget {
    size_t device, host, pinned; // host counts pinned memory too
};

struct plan_problem {
    const struct model *model;
    enum dtype dtype;
    size_t B, T, micro_batches; // of one rank
    size_t ranks;               // 0: 1
    // The ZeRO stage. 0: nothing is sharded but what has its optimizer on the host; 1 and 2, the
    // same here: all optimizers, and parameters as the search likes of host optimizers, else
    // resident; 3: every block is streamed, too. -1: the search's choice, a policy's own. With one
    // rank it means nothing.
    int zero;
    bool hold_updates;
    bool speculate;            // plans may: only auto does
    const struct costs *costs; // of this model, dtype and micro-batch
    struct budget budget;
};

// What a plan is expected to do.
struct prediction {
    double step_s;                                 // steady-state period
    double busy_s[LANES], exposed_s[LANES];        // per step; exposed: compute waits for this lane
    double bound_s;                                // the busiest lane's total, were it never idle
    size_t device_bytes, host_bytes, pinned_bytes; // host_bytes without pinned_bytes
};

// Sizes of a problem's training step. Those that differ among the ranks are rank 0's.
void plan_shape(struct step_shape *shape, const struct plan_problem *problem);

// Everything resident, for one rank: the plan of a session without limits.
void plan_resident(struct plan *plan, const struct model *model, size_t B, size_t T,
                   size_t micro_batches, bool hold_updates);

// The best plan of a policy: auto, autohete, resident, zero-offload, twin-flow:R (0..1),
// zero-infinity, stronghold, patrickstar. STATUS_USAGE: no such policy. STATUS_FAIL: nothing fits;
// err says by how much which budget is short and what would fit. In predicted time auto is never
// worse than any other.
int plan_choose(struct plan *out, const struct plan_problem *problem, const char *policy,
                struct error *err);
extern const char *const plan_policies[]; // NULL behind the last; twin-flow without its :R

// Fails if the plan is not one for this problem: units, combinations that make no sense, budgets.
int plan_check(const struct plan *plan, const struct plan_problem *problem, struct error *err);

// Simulates a plan. STATUS_FAIL: no memory.
int plan_predict(struct prediction *out, const struct plan *plan,
                 const struct plan_problem *problem, struct error *err);

// The least over all plans that fit of the busiest lane's total: no scheduler can be faster. With
// several ranks only over plans whose blocks with a device optimizer are all of one ZeRO stage.
double plan_bound(const struct plan_problem *problem);

// A small text file (hete/FORMATS.md describes it). Reading refuses unknown fields, missing
// ones and values out of range, by line.
int plan_write(const struct plan *plan, const char *path, struct error *err);
// What is in such a file; the caller frees it.
int plan_text(const struct plan *plan, char **text, size_t *bytes, struct error *err);
int plan_read(struct plan *plan, const char *path, struct error *err);

#endif
