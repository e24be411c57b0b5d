// profile.h - measures a device and its host for one model shape: what the planner counts with.
//
// The shape's own model with a single block is run for real: each operation of the step, host Adam
// while copies run, copies alone and both ways at once; medians of several tries. Takes a second or
// so at the sizes that are worth planning; cached by machine, shape and threads.
//
// Several ranks measure at the same time, each on its part of their machine, and what they say to
// each other too. All get the same costs: of each the slowest rank's.
#ifndef HETE_PROFILE_H
#define HETE_PROFILE_H

#include "hete/comm.h"
#include "hete/cost.h"

struct profile_config {
    // A device of the same kind; opened and closed here. An emulated one (memory is not 0) gets as
    // much memory as it takes.
    struct device_config device;
    int host_threads;          // for work on the host; 0: as many as the process may use
    const struct model *model; // one block: 2 units
    size_t B, T;
    struct comm *comm;    // the other ranks, which all call this; NULL: none
    bool fast_reduce;     // gradients by comm_reduce (session.h)
    const char *cache;    // directory, or NULL: measure, and keep nothing
    const char *identity; // of the shape: part of the cache's file name, which also has the
                          // device's summary in it (hashed)
};

// STATUS_FAIL: no memory, no device; the other ranks fail too (comm_abort). A cache that cannot be
// read or written is measured anew, on all ranks, and is not an error. *cached: the costs come from
// a file (costs_read, machine.h).
int profile_measure(struct costs *out, const struct profile_config *config, bool *cached,
                    struct error *err);

#endif
