// execute.h - runs a graph on real lanes, one thread each.
//
// The compute lane runs strictly in program order; every other lane, when free, takes the ready
// operation that comes first in program order (of the older step first), or, fifo, the one that was
// ready first. Operations are dispatched when they are ready, never queued ahead. Two steps may be
// in flight. With chaos every lane takes any ready operation and dawdles: the results must be the
// same.
//
// On a device that queues (device.h) the lanes have no threads, but for the host's: the caller's
// thread, the only one that calls the device, looks after them while it is in one of the functions
// below. The compute and comm lanes are queued ahead of the device, an operation as soon as its
// predecessors on the device are queued; streams wait for each other where an edge says so. Copies
// are queued when everything before them is done.
//
// One thread, the caller's, starts and awaits steps; the operations run on the lanes' threads.
// When an operation fails, nothing more starts and the error is what execute_wait returns. A wait
// in which nothing finishes for watchdog_s fails and names the operations that are waited for. Time
// in which nothing but LANE_COMM works is other ranks', and does not count: what else is queued on
// a device then waits for that lane.
#ifndef HETE_EXECUTE_H
#define HETE_EXECUTE_H

#include "hete/graph.h"
#include "hete/simulate.h"
#include "kernels/device.h"

struct executor;

struct execute_config {
    op_fn run;
    void *ctx;
    struct device *device; // NULL: none that queues
    double watchdog_s;     // 0: 300
    uint64_t chaos;        // seed; 0: none
    // Told by those that wait, with a mutex held: from now on nothing but LANE_COMM works, or
    // something does again. May be NULL.
    void (*waits)(void *ctx, bool for_others);
    // Chaos only: called before an operation runs, for each access that overwrites; fills the
    // buffer with what nobody should see.
    void (*poison)(void *ctx, const struct op *op, const struct access *access);
};

int execute_open(struct executor **out, const struct execute_config *config, struct error *err);
void execute_close(struct executor *e);

// From now on steps of this graph are run. Nothing may be in flight. pace: NULL, or for each
// operation the seconds it is to take at least (0: as long as it takes).
int execute_load(struct executor *e, const struct graph *graph, bool fifo, const double *pace,
                 struct error *err);

// Starts a step; at most two are in flight. Numbers given to one graph are consecutive.
int execute_start(struct executor *e, uint64_t step, struct error *err);
// Until all of that step is done.
int execute_wait(struct executor *e, uint64_t step, struct error *err);

// Called by an operation that runs: no operation of a later step starts until execute_release.
void execute_hold(struct executor *e, uint64_t step);
void execute_release(struct executor *e);
// After a hold: until no operation of a later step runs, or for watchdog_s.
void execute_settle(struct executor *e);

// Times of the last steps that are complete, at most `steps` of them, oldest first, into
// timings[steps * n_ops]; returns how many. Nothing may be in flight. *first: number of the oldest.
size_t execute_timings(const struct executor *e, struct timing *timings, size_t steps,
                       uint64_t *first);
#define EXECUTE_KEPT_STEPS ((size_t)16)

// Of the steps that execute_timings gives, from number `first` on: operations that ended later than
// their pace, and all that had one; without those of LANE_COMM, which end when the slowest rank has
// done its part.
void execute_late(const struct executor *e, uint64_t first, uint64_t *late, uint64_t *paced);

#endif
