// graph.h - a step as a list of operations in program order, each saying what it reads and writes.
//
// Program order is what a trainer without offloading would do. It is the meaning of the step:
// whatever runs the list may overlap or reorder operations only where no two of them touch the same
// buffer with one of them writing. Nothing else is ever synchronised by hand, so an access that is
// not declared is a bug. The serial executor below runs the list as it stands.
#ifndef HETE_GRAPH_H
#define HETE_GRAPH_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Engines that work at the same time.
enum lane {
    LANE_COMPUTE,  // the device's kernels
    LANE_COPY_IN,  // host to device
    LANE_COPY_OUT, // device to host
    LANE_HOST,     // work on the host's own data
};

// A buffer is named by what it holds and for whom, not by where it is.
enum buffer_kind {
    BUF_PARAMS,     // index: unit
    BUF_MOMENTS,    // index: unit; with the master weights, where there are any
    BUF_GRADS,      // index: gradient buffer
    BUF_SUM,        // index: unit; gradients summed over micro-batches
    BUF_GRADS_FP32, // unit 0's fp32 gradient of the tied embedding
    BUF_X,          // index: boundary buffer
    BUF_KEPT,       // index: unit
    BUF_DX,
    BUF_WORK,
    BUF_TOKENS,      // index: micro-batch; inputs and targets
    BUF_LOSSES,      // index: micro-batch, on the device
    BUF_HOST_LOSSES, // index: micro-batch
    BUF_NORM,        // index: unit; sum of squares of its gradient
    BUF_SCALE,       // what the update is scaled by, and whether it happens
};

struct access {
    uint16_t kind; // enum buffer_kind
    bool write;    // writes, or reads and writes
    uint32_t index;
};

struct op {
    uint16_t kind; // whose meaning belongs to whoever built the list
    uint16_t lane; // enum lane
    uint32_t unit;
    uint32_t micro;                    // micro-batch
    uint32_t first_access, n_accesses; // in graph.accesses
};

struct graph {
    struct op *ops;
    size_t n_ops, max_ops;
    struct access *accesses;
    size_t n_accesses, max_accesses;
    bool failed; // out of memory while adding
};

// Appends an operation; the accesses that follow belong to it.
void graph_add(struct graph *g, uint16_t kind, enum lane lane, size_t unit, size_t micro);
void graph_reads(struct graph *g, enum buffer_kind kind, size_t index);
void graph_writes(struct graph *g, enum buffer_kind kind, size_t index);

// Runs the list in program order, one operation at a time.
typedef void (*op_fn)(void *ctx, const struct op *op);
void graph_run_serial(const struct graph *g, op_fn run, void *ctx);

void graph_free(struct graph *g);

#endif
