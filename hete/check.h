// check.h - proves a step free of races before it runs.
//
// Two operations race if they touch the same buffer, one of them writing, and no path of edges
// joins them. The proof is made on the graph alone, within a step and into the next one, and does
// not trust the derivation of the edges: it follows them. That buffers do not share bytes is proved
// on the layout. Both take milliseconds for 96 layers, and every run begins with them.
#ifndef HETE_CHECK_H
#define HETE_CHECK_H

#include "hete/step.h"

// STATUS_FAIL: err names the two operations (kind, unit, micro-batch, slice), the buffer, and
// whether the second one is in the next step.
int check_graph(const struct graph *graph, struct error *err);

// STATUS_FAIL: err names two buffers that overlap, or one that is misaligned or leaves its arena.
int check_layout(const struct layout *layout, struct error *err);

#endif
