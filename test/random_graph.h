// random_graph.h - steps that no model has, for tests of what reads only a graph.
#ifndef TEST_RANDOM_GRAPH_H
#define TEST_RANDOM_GRAPH_H

#include "hete/graph.h"

// Writes down n operations on all lanes, which read, update and overwrite whole buffers and slices
// of some, as real steps do, and links them. The caller frees the graph.
void random_graph(struct graph *g, uint64_t *rng, size_t n, bool repeats);

#endif
