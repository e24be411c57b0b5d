// cores.h - the cores of a machine, divided among the ranks that run on it.
//
// A core is what the system counts as one: a hardware thread, where there are several to a core.
// Which ones a process may use is its affinity. Ranks whose affinities overlap would compute with
// as many threads each as if they were alone, and wait for each other. So all ranks tell theirs:
//
//   disjoint       the launcher has given each rank its own: left as they are
//   overlapping    the cores of those ranks together are cut into as many parts, along packages,
//                  NUMA nodes and caches (hwloc_distrib), and each rank binds itself to its part,
//                  in rank order
//   fewer than the ranks, or a build without hwloc: nobody is bound, threads are counted so that
//                  the ranks together have one per core, but each has one
//
// Afterwards affinity does the work: whoever counts the cores of this process finds its part, and
// threads start where the one that starts them may run. OMP_PROC_BIND and OMP_PLACES are read
// before that and would have to be right for each rank: leave them alone. Which cores are near a
// GPU is not looked at: a launcher that binds may do better.
#ifndef HETE_CORES_H
#define HETE_CORES_H

#include "hete/comm.h"

#include <stdbool.h>
#include <stdint.h>

#define CORES_MAX 4096 // of a machine; those with higher numbers are not used

struct core_set {
    uint64_t bits[CORES_MAX / 64]; // core i: bit i % 64 of word i / 64
};

// What a rank tells the others.
struct core_claim {
    char machine[64]; // the same for ranks on one machine
    struct core_set may;
};

struct core_share {
    struct core_set cores; // what this rank has
    bool bind;             // it has to bind itself to them
    size_t threads;        // how many of its threads they can run
    size_t local;          // ranks on the machine
    size_t sharing;        // of those, the ones whose cores were divided, this one included
    size_t divided;        // cores that were
    size_t taken;          // by all ranks of the machine
    size_t there;          // that any process here could have; 0: not known
};

// The share of one of `ranks` ranks. STATUS_FAIL: no memory.
int cores_divide(struct core_share *out, const struct core_claim *claims, size_t ranks, size_t self,
                 struct error *err);

struct cores {
    size_t threads;
    char summary[256]; // one line for the user: who has what
    char warning[256]; // "" or what is wrong with it
};

// Called by all ranks, on their main threads, before a thread is started that computes: divides the
// cores and binds all threads that the process has. That it cannot be bound is a warning.
int cores_take(struct cores *out, struct comm *c, struct error *err);

#endif
