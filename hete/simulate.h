// simulate.h - runs a graph on a virtual clock: how long a step will take, and what waits for what.
//
// The rules are the executor's (execute.h): the compute lane runs strictly in program order; every
// other lane, when free, takes the ready operation that comes first in program order, or, fifo,
// the one that was ready first. Two steps are in flight: step s + 2 begins when all of step s is
// done. The two copy directions share the link as device_link says: a copy's rate changes at the
// moment the other direction begins or ends.
#ifndef HETE_SIMULATE_H
#define HETE_SIMULATE_H

#include "hete/graph.h"
#include "kernels/device.h"

// One operation of one step, simulated or measured. Seconds since some moment.
struct timing {
    double start, end;
    // What it waited for last before it could start: position step * n_ops + op of an operation it
    // depends on, or of the one before it in its lane; TIMING_NONE: nothing.
    uint32_t cause;
};
#define TIMING_NONE UINT32_MAX

struct simulation {
    const struct graph *graph; // linked
    const double *work;        // per operation: seconds (compute, host), bytes (copies)
    struct device_link link;
    bool fifo;
    size_t steps;
};

// Fills timings[steps * n_ops]. STATUS_FAIL: no memory.
int simulate(const struct simulation *simulation, struct timing *timings, struct error *err);

// What timings of consecutive steps say, from step `first` to the last one. Needs two steps more
// than first. period_s: from one step's first compute operation to the next one's, the mean.
// busy_s: per step and lane. exposed_s: the time per step in which the compute lane does nothing,
// by the lane that it waits for: each gap is followed back through the causes, and each moment of
// it belongs to the lane that works then.
struct lane_times {
    double period_s, busy_s[LANES], exposed_s[LANES];
};
void lane_times(struct lane_times *out, const struct graph *graph, const struct timing *timings,
                size_t first, size_t steps);

#endif
