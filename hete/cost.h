// cost.h - how long each operation of a step takes on a machine, measured (profile.h) or computed
// from a machine file (machine.h). Seconds, bytes, bytes per second.
#ifndef HETE_COST_H
#define HETE_COST_H

#include "hete/step.h"

struct costs {
    // Compute lane, seconds per operation: [0] unit 0, [1] a block.
    double call[CALLS][2];
    double accumulate[2], norm[2], adam[2], clip;
    // Comm lane, seconds per operation on a whole unit: the reduce-scatter in rank order with its
    // sum, the all-gather of a parameter's or gradient's pieces; losses and norms of all ranks.
    double scatter[2], gather[2], share;
    // Host lane, seconds per element of the unit, while copies run.
    double host_adam, host_speculate, host_accumulate, host_norm;
    struct device_link link;
    double peak_flops; // FLOP/s that MFU is held against
    double least;      // what no operation of the compute and comm lanes is below; not in files: 0
};

// For operation i of the graph: seconds (compute, host) or bytes (copies).
void costs_of_graph(const struct costs *costs, const struct step_shape *shape,
                    const struct plan *plan, const struct graph *graph, double *work);

// Seconds that an operation takes whose copy, if it is one, has the link for itself.
double cost_alone(const struct costs *costs, const struct op *op, double work);

#endif
