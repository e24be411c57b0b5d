// search.h - tries plans: do they fit, how long will a step take, is that the best so far? What
// plan_choose (plan.h) is made of; others only compare all policies with it.
//
// A plan is simulated only if it fits and if the least time that any schedule of it could take is
// below the best so far. For the plans of the search this least time, like the bytes, is a sum of
// terms per unit; the terms are differences between steps of a few units, written down and laid out
// by step.h like any other, so that nothing is counted in two places.
//
// auto: for all numbers of blocks with a device optimizer and of streamed blocks, and as few
// recomputed ones as fit, the least times are compared; the plans are simulated in their order
// until none can be faster than the best. Then blocks of the best ones take each other's parts
// while that helps, and at last other numbers of slices and buffers are tried. Against all plans of
// up to 6 blocks on random machines this was never 0.5% slower; without the swaps up to 5%. With
// several ranks all of that is done for each ZeRO stage of what has its optimizer on the device;
// then runs of units are given other stages while that helps. Against all plans of up to 3 blocks,
// a thousand random problems, this was never 1% slower.
//
// autohete: AutoHete's three integers say how many of the first blocks are recomputed, how many of
// the first blocks are streamed and how many of the last ones have a host optimizer. Here streaming
// implies a host optimizer, so that the streamed blocks are the first ones of those that have it.
// The embedding's optimizer, of which the paper is not known to say anything, is on the device
// where that fits. With several ranks what is on the device is of ZeRO stage 3.
#ifndef HETE_SEARCH_H
#define HETE_SEARCH_H

#include "hete/plan.h"
#include "hete/simulate.h"

// A step's operations, and what each of them costs.
struct written_step {
    struct graph graph;
    double *work;
    size_t max_ops; // that work has room for
};

// One search, or several of one problem: what it has found out about the problem stays.
struct search {
    struct plan_problem plain;          // of problem: no plan speculates
    const struct plan_problem *problem; // what is searched
    bool may_speculate;                 // auto looks for a plan that does, too
    struct step_shape shape;
    size_t shared; // bytes of BUF_SHARED
    struct plan best;
    double best_s; // INFINITY: none so far
    // Of the plans that did not fit, the one that asks for least beyond the budgets.
    struct plan nearest;
    size_t nearest_over; // SIZE_MAX: none so far
    // Once auto has searched: what autohete would find; INFINITY: nothing, or it is not known.
    struct plan autohete;
    double autohete_s;
    bool all_stream;             // ZeRO stage 3 is asked for: no choice has resident blocks
    int autohete_zero;           // the ZeRO stage that it has with this problem
    double last_s;               // of the plan tried last; INFINITY: it was not simulated
    size_t simulations, written; // plans simulated; operations of plans that were written down
    struct known *known;         // terms found so far
    int status; // of the first failure, which err describes; nothing is tried any more
    struct error *err;
    // What simulations work with.
    struct written_step step[2];
    struct timing *timings;
    size_t max_timings;
};

// Do not copy it: it points into itself.
void search_open(struct search *s, const struct plan_problem *problem, struct error *err);
void search_close(struct search *s);

// Bytes of a plan: total[SPACE_HOST] without total[SPACE_PINNED].
struct plan_bytes {
    size_t total[SPACES];
    size_t shared; // of those on the host: BUF_SHARED, whose rounding depends on all units
};
int plan_bytes(struct plan_bytes *out, const struct step_shape *shape, const struct plan *plan,
               size_t pinned, struct error *err);
// What a plan of so many bytes needs beyond the budgets.
size_t plan_over(const struct plan_bytes *bytes, const struct budget *budget);

// Simulates, of many micro-batches a few: a step of more of them is longer by as much for each
// further one. The least time is exact. False: no memory, or the least time of the plan is not
// below limit_s.
bool search_predict(struct search *s, const struct plan *plan, double limit_s,
                    struct prediction *out);

// The plans that a few numbers describe, in the order of the blocks:
//   optimizer   device: the first n_device | host: the others
//   parameters  n_stream of the others are streamed: the last ones, spread evenly, or the first
//   activations recompute: the first n_recompute
// With several ranks, those with a device optimizer are of a ZeRO stage: 0, 2 (sharded) or 3
// (streamed too); unit 0 may be sharded.
enum stream_order { STREAM_LAST, STREAM_SPREAD, STREAM_FIRST, STREAM_ORDERS };
struct choice {
    size_t n_device, n_stream, n_recompute;
    enum stream_order order;
    bool embed_on_host, early_adam;
    size_t zero;                        // with one rank 0
    bool embed_shard;                   // where it is not on the host, which implies it
    size_t slots, grad_buffers, slices; // where there is something to use them for
};
void plan_of_choice(struct plan *plan, const struct plan_problem *problem, const struct choice *c);

// What only policies have, besides a choice.
struct handicap {
    bool barrier, fifo, serial_copies;
};

// Keeps the plan if it is the best so far; writes it down only where it can be. False if it does
// not fit.
bool search_try_choice(struct search *s, const struct choice *c, struct handicap handicap);

// What a choice needs, and the least time it can take, from terms. Exact (in the order of blocks
// that are streamed nothing of it depends), but for least_s, which is at most the plan's own.
struct estimate {
    double device_bytes, host_bytes; // host_bytes: with pinned ones
    double over;                     // bytes beyond the budgets
    double busiest_s, least_s;
    double streaming_s; // of the busier one of the lanes that streaming burdens
};
void search_estimate(struct search *s, const struct choice *c, struct estimate *out);

// Two slots, two gradient buffers, and slices that latency allows; lean: one of each of the former.
struct choice search_usual(const struct search *s, bool lean);
// Of the ZeRO stage that the problem asks for, or, if it leaves that open, of this one.
void choose_stage(struct choice *c, const struct plan_problem *problem, size_t zero);

// All of them, or those that AutoHete's three integers describe.
void search_auto(struct search *s);
void search_autohete(struct search *s);

// Gives units of the best plan other ZeRO stages while that helps.
void search_mix(struct search *s);

// The least over all choices that fit of the busiest lane's total.
double search_bound(struct search *s);

// plan_choose: the result is in s->best. May be called again, for other policies.
int search_policy(struct search *s, const char *policy);

#endif
