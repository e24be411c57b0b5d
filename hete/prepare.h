// prepare.h - from what the user asks for to a plan: budgets, costs, the size of a micro-batch.
//
// The costs come from a machine file, or are measured (profile.h). With emulate they come from the
// file and every lane is slowed down by one common factor, so that each operation has at least
// twice the time that it takes here: a machine in slow motion whose scheduling is real.
#ifndef HETE_PREPARE_H
#define HETE_PREPARE_H

#include "hete/comm.h"
#include "hete/machine.h"
#include "hete/plan.h"
#include "hete/report.h"

struct prepare_config {
    const struct model *model;
    const struct model *one_block; // the same shape with a single block, to be measured
    struct device_config device;   // memory and link are filled in here
    int host_threads;              // 0: as many as the process may use
    size_t B, T;                   // B 0: the planner's choice
    size_t rows;                   // of a step
    bool hold_updates, speculate;
    size_t device_memory, host_memory, pinned_memory; // bytes; 0: not given
    double link_gb_per_s;                             // 0: not limited
    const char *machine, *emulate;                    // files; "": none
    const char *policy, *plan;                        // plan: a file; "": none
    int zero;                                         // of plan_problem
    // The run's ranks, which all call the functions below with the same configuration; NULL: one,
    // or, of an estimate for a machine file, gpus on each of nodes. Options are of each rank, what
    // a machine or its file has of host memory is shared by the ranks there.
    struct comm *comm;
    bool fast_reduce;             // of profile.h; a machine file does not tell
    size_t gpus, nodes;           // 0: 1
    const char *cache, *identity; // of profile.h
};

struct prepared {
    struct plan_problem problem;
    struct costs costs;
    struct plan plan;
    struct prediction prediction;
    char machine[64];   // its name, or "this machine"
    size_t miniature;   // of --emulate FILE:N; else 1
    double slow_motion; // of an emulated machine: seconds here per second there; else 1
    bool measured;      // costs were measured or come from the cache of an earlier measurement
    bool cached;
    struct device_config device; // to be opened for the session
};

// All ranks make the same plan, from the same costs and budgets. STATUS_USAGE: options that
// contradict each other, no such policy. STATUS_FAIL: nothing fits; a file cannot be read; the
// ranks do not ask for the same.
int prepare(struct prepared *out, const struct prepare_config *config, struct error *err);

// Everything on a device without a cap, and nothing measured. STATUS_FAIL: more than this machine's
// memory (by how much).
int prepare_resident(struct prepared *out, const struct prepare_config *config, struct error *err);

// For a session that does not train: as few blocks streamed as the budget asks for; nothing is
// measured. STATUS_FAIL: nothing fits; what would do.
int prepare_inference(struct prepared *out, const struct prepare_config *config, struct error *err);

// Every policy's best plan, without a device being opened unless costs have to be measured. The
// caller frees *results; out->problem is that of the last micro-batch that was tried.
int prepare_policies(struct prepared *out, struct policy_result **results, size_t *n,
                     const struct prepare_config *config, struct error *err);

// The policy auto with B rows in a micro-batch on 1, 2, 4, .. GPUs of one machine, up to config's
// gpus, and then on 1, 2, 4, .. whole machines, up to 1024 GPUs; each GPU has the same part of the
// step's rows, config->rows. Needs a machine file.
int prepare_scaling(struct scale_point points[SCALE_POINTS_MAX], size_t *n,
                    const struct prepare_config *config, size_t B, struct error *err);

// Times of steps of the plan's training graph, as they are predicted: timings[steps * n_ops].
int prepared_schedule(const struct prepared *p, const struct graph *graph, struct timing *timings,
                      size_t steps, struct error *err);

#endif
