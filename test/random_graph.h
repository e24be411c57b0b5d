// random_graph.h - steps that no model has, for tests of what reads only a graph.
#ifndef TEST_RANDOM_GRAPH_H
#define TEST_RANDOM_GRAPH_H

#include "hete/graph.h"

// Writes down n operations on all lanes, which read, update and overwrite whole buffers and slices
// of some, as real steps do, and links them. The caller frees the graph.
void random_graph(struct graph *g, uint64_t *rng, size_t n, bool repeats);

// Do operations i and j touch the same buffer and slice, one of them writing?
bool ops_conflict(const struct graph *g, size_t i, size_t j);

// paths[i * 2n + j]: a path of edges leads from position i to j, where positions count through two
// steps of n operations. The caller frees it.
bool *graph_paths(const struct graph *g);

void graph_remove_edge(struct graph *g, size_t e);

#endif
