// trace.h - pictures of a schedule: Chrome/Perfetto traces and a timeline as SVG.
#ifndef HETE_TRACE_H
#define HETE_TRACE_H

#include "hete/simulate.h"

// Times of consecutive steps of a graph, simulated or measured.
struct schedule {
    const char *title; // "predicted", "measured"
    const struct graph *graph;
    const struct timing *timings; // steps * n_ops
    size_t steps;
    uint64_t first_step; // its number
    unsigned clock;      // schedules of the same one share a time axis; 0: one of its own
};

// Chrome trace format (JSON): a process per schedule, a thread per lane, a slice per operation with
// unit, micro-batch and slice as arguments, arrows along the edges that join lanes.
int trace_write(const char *path, const struct schedule *schedules, size_t n, struct error *err);

// An SVG picture: the schedules one above the other on one time axis, a row per lane, one steady
// step in the middle between its neighbours; colours by what an operation does and shades by unit,
// idle compute time marked, busy share of each lane at its row's end, a legend.
int timeline_write(const char *path, const struct schedule *schedules, size_t n, struct error *err);

#endif
