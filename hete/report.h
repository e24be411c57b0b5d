// report.h - plans for people and for tools: the table at start, --plan-only, predicted against
// measured.
#ifndef HETE_REPORT_H
#define HETE_REPORT_H

#include "hete/plan.h"
#include "hete/session.h"

#include <stdio.h>

// The plan as a table: runs of units with the same decisions share a row. What was decided and why,
// bytes on device, host and pinned, milliseconds per lane; then slots, buffers and slices, the
// predicted step time and peak, and what waiting for the norm (clip, guard) costs.
int report_plan(FILE *out, const struct plan *plan, const struct plan_problem *problem,
                struct error *err);

// How far a model that stands for one n times as wide and as long (hidden and head size, sequence,
// vocabulary) is from its geometry: biases, norms, statistics and the padding of the vocabulary do
// not scale with the rest.
void report_miniature(FILE *out, const struct plan_problem *problem, const struct model *whole,
                      size_t n);

// One policy's line of --plan-only.
struct policy_result {
    char policy[32];
    size_t B, micro_batches;
    struct plan plan;
    struct prediction prediction;
    double bound_s;  // plan_bound of the problem with this micro-batch
    char error[512]; // not empty: does not fit, with the reason
};
// A number of GPUs that train with the same rows each (weak scaling).
#define SCALE_POINTS_MAX 24
struct scale_point {
    size_t gpus, nodes;  // of all nodes
    double tokens_per_s; // per GPU
    bool network;        // messages wait for the network rather than the link between GPUs
    struct prediction prediction;
    char error[512]; // not empty: does not fit, with the reason
};

// What the policies are compared on.
struct report_subject {
    const char *model, *machine; // names
    const struct plan_problem *problem;
    double flops;       // of one step, by the usual count (6N + 6LCT per token)
    size_t gpus, nodes; // of each node; they share a step's rows, the problem is one GPU's part
    bool ranks;         // they have measured, and are called ranks
    const struct scale_point *scaling;
    size_t n_scaling; // 0: not looked into
};

// Two tables of policies: step time, tok/s, MFU, distance to the bound, bytes per budget; busy and
// exposed time per lane. Then one of the scaling.
void report_policies(FILE *out, const struct report_subject *subject,
                     const struct policy_result *results, size_t n);
// The same as JSON (hete/FORMATS.md). STATUS_FAIL: no memory, or out cannot be written.
int report_policies_json(FILE *out, const struct report_subject *subject,
                         const struct policy_result *results, size_t n, struct error *err);

// Predicted and measured step time, busy and exposed time per lane, GB/s of copies and of Adam.
void report_measured(FILE *out, const struct prediction *predicted,
                     const struct measured *measured);

#endif
