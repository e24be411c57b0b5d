// device.h - the seam between the trainer and what computes: memory, copies, and a table of layers.
//
// A device has memory of its own. Host code never dereferences a device address: it moves bytes
// with device_copy_in/out and computes with the functions of `layers`. The cpu device happens to
// keep its memory in the host's RAM, but nothing outside kernels/cpu may rely on that: the same
// callers drive devices whose memory is elsewhere.
//
// A device that queues (`queues`) has a stream per lane: what its functions are asked to do is done
// later, in order on each lane, while they return at once. Marks tell how far a lane has come, and
// let one lane wait for another. Exactly one thread calls such a device. Others have done
// everything when a function returns, and take no marks.
//
// All memory is one arena. It is taken once, before the first step, at exactly the size that was
// planned, and never grows: there is no call that allocates later.
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum dtype {
    DTYPE_FP32,
    DTYPE_BF16, // stored in 16 bits; arithmetic and accumulation are fp32
};

static inline size_t dtype_bytes(enum dtype d)
{
    return d == DTYPE_FP32 ? 4 : 2;
}

// Addresses handed out of the arena, and the sizes between them, are multiples of this.
#define DEVICE_ALIGN ((size_t)256)

static inline size_t device_round(size_t bytes)
{
    return (bytes + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN;
}

// The link between host and device. Rates in bytes/s, 0: without limit, as memory copies them.
// While both directions are busy each goes at its duplex rate.
struct device_link {
    double latency_s; // of every copy
    double in, out;   // alone
    double in_duplex, out_duplex;
};

// Lanes of a device. What `layers` and device_fill do goes to the lane that device_begin has
// chosen, copies go to their own. What is exchanged with other ranks goes to DEVICE_COMM, before
// all else that waits.
enum device_lane { DEVICE_COMPUTE, DEVICE_COPY_IN, DEVICE_COPY_OUT, DEVICE_COMM, DEVICE_LANES };

struct device_config {
    const char *kind; // "auto", "cpu" or "cuda"
    int index;        // which of the GPUs that the process sees; others have but one
    enum dtype dtype;
    int threads;         // 0: as many as the process may use
    size_t head_size;    // channels of one attention head
    size_t max_seq;      // longest sequence
    size_t padded_vocab; // longest row that the classifier sees
    // The cpu device as an emulated one: memory of its own, of so many bytes at most, behind a
    // link. 0: a plain cpu device, whose link is memory itself.
    size_t memory;
    struct device_link link;
};

struct layers;
struct device_driver;

struct device {
    const char *kind;
    const struct device_driver *driver; // the functions below (driver.h)
    enum dtype dtype;
    const struct layers *layers; // what it can compute (layers.h)
    int threads;                 // CPU threads that compute
    const char *isa;             // instruction set of what is computed on the CPU
    size_t workspace_bytes;      // held by the device itself, outside the arena
    size_t memory;               // bytes an arena can have; SIZE_MAX: what the host has
    bool separate;               // has memory of its own, and lanes worth running at the same time
    bool queues;
    // What a lane adds to a device address before it hands it to a function of `layers`. Addresses
    // without it fault when the host dereferences them (emulated), or need nothing added (0).
    ptrdiff_t lane_offset;
    // Asked while a device that queues is waited for: has what others have queued on its streams
    // failed (comm.h)? The device has then, too. NULL: nobody is asked.
    int (*watch)(void *ctx, struct error *err);
    void *watch_ctx;
    char summary[256]; // one line for the user: processor, ISA, BLAS, threads
    char warning[512]; // empty, or what the user should know before training
};

// The kind that is meant: `asked`, or, for "auto", the best that can be used here. why: what speaks
// against a better one, else "".
const char *device_kind(const char *asked, char *why, size_t size);

// Bytes that an arena could have on a device of this kind now; SIZE_MAX: what the host has.
int device_memory(const struct device_config *config, size_t *bytes, struct error *err);

// Opens a device. STATUS_USAGE: no such kind; STATUS_FAIL: it is not usable here.
int device_open(struct device **out, const struct device_config *config, struct error *err);

// Takes the arena, zero-filled. At most one per device.
int device_arena(struct device *dev, size_t bytes, void **base, struct error *err);

// Host memory for the session, zero-filled, at most one piece of each kind per device. Copies from
// and to pinned memory go at the link's rate; others are counted, and slower on real devices.
int device_host_arena(struct device *dev, size_t bytes, bool pinned, void **base,
                      struct error *err);

// Return when the copy is done (or queued). One thread per direction may be inside at a time. On an
// emulated device a copy takes as long as the link would.
void device_copy_in(struct device *dev, void *device_dst, const void *host_src, size_t bytes);
void device_copy_out(struct device *dev, void *host_dst, const void *device_src, size_t bytes);

// The same without the link's time and not counted, and done on return on every device: state that
// moves between steps (start, checkpoints, inspection).
void device_peek(struct device *dev, void *host_dst, const void *device_src, size_t bytes);
void device_poke(struct device *dev, void *device_dst, const void *host_src, size_t bytes);

// Sets all bytes, at once (tests, chaos).
void device_fill(struct device *dev, void *device_dst, int byte, size_t bytes);

// ---- devices that queue ----

// From now on `layers` and device_fill go to this lane; label (an operation's name) shows in
// profilers.
void device_begin(struct device *dev, enum device_lane lane, const char *label);
// A lane's stream, for libraries that queue on it themselves: a cudaStream_t. NULL: does not queue.
void *device_stream(struct device *dev, enum device_lane lane);
// Marks the point that the lane has been queued to. Marks are numbered from 0; there are as many as
// device_marks asked for last, which needs that nothing is in flight.
void device_end(struct device *dev, enum device_lane lane, size_t mark);
int device_marks(struct device *dev, size_t n, struct error *err);
// What is queued on the lane from now on waits for the mark.
void device_await(struct device *dev, enum device_lane lane, size_t mark);
bool device_passed(struct device *dev, size_t mark);
// clock_s() when the mark was passed, as near as the device tells.
double device_passed_s(struct device *dev, size_t mark);

// Until everything that was queued is done.
void device_sync(struct device *dev);
// The device's first error, if there has been one; nothing is queued after it. STATUS_OK: none.
int device_status(struct device *dev, struct error *err);

// Changes the link of an emulated device; nothing may be in flight.
void device_set_link(struct device *dev, const struct device_link *link);
void device_get_link(const struct device *dev, struct device_link *link);

// Copies between pageable and device memory since the device was opened, of device_copy_in/out.
uint64_t device_pageable_copies(const struct device *dev);

// Rate (FLOP/s) of matrix products in the device's arithmetic, with all its threads, on square
// matrices of size n, the best of several tries: what throughput is held against.
double device_matmul_rate(struct device *dev, size_t n);

// Gives up the worker threads of the calling thread, until it computes again. OpenMP's workers wait
// less patiently for their next task, and wake up later, where there are more of them than cores.
void device_rest(struct device *dev);

void device_close(struct device *dev);

#ifdef __cplusplus
}
#endif
#endif
