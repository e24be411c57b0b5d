// graph.h - a step as a list of operations in program order, each saying what it reads and writes.
//
// Program order is what a trainer without offloading would do. It is the meaning of the step:
// whatever runs the list may overlap or reorder operations only where no two of them touch the same
// bytes with one of them writing. Nothing is ever synchronised by hand, so an access that is not
// declared is a bug. graph_link derives what must wait for what; the executor (execute.h), the
// simulator (simulate.h) and the checker (check.h) read nothing but the list and those edges.
//
//   list      fetch 3 | forward 3 | ... | backward 3 | grad out 3 | ... | clip | adam 3
//   edges        `--------^   `-------------^  `-----------^                 `-----^
//   next step: `fetch 3` waits for this step's `adam 3` and for the last reader of its slot.
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
    LANE_COMM,     // exchange with other ranks
    LANES
};

// Lanes that run strictly in program order: the device's kernels, and what every rank has to begin
// in the same order. Every other lane takes what is ready.
static inline bool lane_in_order(enum lane lane)
{
    return lane == LANE_COMPUTE || lane == LANE_COMM;
}
const char *lane_name(enum lane lane);

// A buffer is named by what it holds and for whom. Two buffers never share a byte (step.h lays them
// out), so to be free of races by name is to be free of races.
enum buffer_kind {
    // device
    BUF_PARAMS,  // index: unit, sliced
    BUF_SLOT,    // parameters of the streamed unit that is there. index: slot, sliced
    BUF_MASTER,  // fp32 parameters. index: unit; in fp32 they are BUF_PARAMS and not declared
    BUF_MOMENTS, // m and v. index: unit
    BUF_GRADS,   // index: gradient buffer, sliced
    BUF_SUM,     // gradients summed over micro-batches, fp32. index: unit
    // A rank's pieces, where nothing whole holds them: parameters of a streamed unit, a gradient on
    // its way to a later Adam. index: unit
    BUF_PARAM_SHARD,
    BUF_GRAD_SHARD,
    BUF_EXCHANGE,   // a rank's piece of a gradient from every rank, and their fp32 sum
    BUF_GRADS_FP32, // unit 0's fp32 gradient of the tied embedding
    BUF_X,          // index: boundary
    BUF_KEPT,       // index: 0 for all units that are recomputed, else the unit
    BUF_DX,
    BUF_WORK,
    BUF_TOKENS, // index: micro-batch; inputs and targets
    BUF_LOSSES, // index: micro-batch
    // host
    BUF_NORM,         // sum of squares of a unit's gradient, stored by the device. index: unit
    BUF_HOST_PARAMS,  // what is copied to the device. index: unit, sliced
    BUF_HOST_MASTER,  // index: unit, sliced; in fp32 they are BUF_HOST_PARAMS and not declared
    BUF_HOST_MOMENTS, // index: unit, sliced
    BUF_HOST_GRADS,   // index: unit, sliced
    BUF_HOST_STAGE,  // gradients of one micro-batch, on their way to the sum. index: buffer, sliced
    BUF_HOST_SUM,    // index: unit, sliced
    BUF_HOST_CHUNKS, // fp32 sums of squares of chunks of the gradient. index: unit, sliced
    BUF_HOST_LOSSES, // index: micro-batch
    BUF_HOST_TOKENS, // of steps in flight: written before a step starts, so in no access
    BUF_SHARED,      // numbers of each rank, for all
    BUF_SCALE,       // what the update is scaled by, and whether it happens
    BUF_TOKEN,       // no bytes: accessed by operations that a policy keeps apart
    BUFFER_KINDS
};
const char *buffer_name(enum buffer_kind kind);

enum access_mode {
    ACCESS_READ,
    ACCESS_UPDATE, // reads and writes
    ACCESS_WRITE,  // overwrites all of it that matters: what was there before is dead
};

struct access {
    uint16_t kind; // enum buffer_kind
    uint8_t mode;  // enum access_mode
    uint8_t slice; // 0 where a buffer is not sliced
    uint32_t index;
};

struct op {
    uint16_t kind; // whose meaning belongs to whoever built the list
    uint8_t lane;  // enum lane
    uint8_t slice; // of the unit, where the operation works on one
    // Of the compute lane: it is the host that works, on what the operations before it gave. A
    // device that queues has to be done with them. Of the comm lane: the same, but what it then
    // queues on the device has to be done before it is.
    bool by_host;
    uint32_t unit;
    uint32_t micro;                    // micro-batch
    uint32_t first_access, n_accesses; // in graph.accesses
};

// Lanes that something is to be said of: LANE_COMM only where there are other ranks.
static inline int lanes_shown(const double busy_s[LANES])
{
    return busy_s[LANE_COMM] > 0 ? LANES : LANE_COMM;
}

// `to` waits for `from`, or for the `from` of the step before.
struct edge {
    uint32_t from, to;
    bool next; // to is in the step after from's
};

struct graph {
    struct op *ops;
    size_t n_ops, max_ops;
    struct access *accesses;
    size_t n_accesses, max_accesses;
    struct edge *edges; // sorted by from; edges of op i: [first_edge[i], first_edge[i + 1])
    size_t n_edges, max_edges;
    uint32_t *first_edge;
    bool repeats;      // steps follow each other, so that edges lead into the next one
    bool failed;       // out of memory while adding
    struct op nowhere; // what a caller may fill in when there is no memory
};

// Appends an operation; the accesses that follow belong to it.
struct op *graph_add(struct graph *g, uint16_t kind, enum lane lane, size_t unit, size_t micro);
void graph_access(struct graph *g, enum access_mode mode, enum buffer_kind kind, size_t index,
                  size_t slice);

// Derives the edges: read after write, write after read, write after write, for each buffer and
// slice; if the step repeats, also from its last accesses to the first ones of the next step.
// No edge is there twice. STATUS_FAIL: no memory, here or while adding.
int graph_link(struct graph *g, bool repeats, struct error *err);

// What the operations and accesses are, in their order: any change of one gives another hash. Not
// of the edges, which follow from them.
uint64_t graph_hash(const struct graph *g);

// Runs the list in program order, one operation at a time. Stops at the first status that is not
// STATUS_OK and returns it.
typedef int (*op_fn)(void *ctx, const struct op *op, uint64_t step, struct error *err);
int graph_run_serial(const struct graph *g, uint64_t step, op_fn run, void *ctx, struct error *err);

void graph_free(struct graph *g);

#endif
