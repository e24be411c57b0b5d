// device.h - the seam between the trainer and what computes: memory, copies, and a table of layers.
//
// A device has memory of its own. Host code never dereferences a device address: it moves bytes
// with device_copy_in/out and computes with the functions of `layers`. The cpu device happens to
// keep its memory in the host's RAM, but nothing outside kernels/cpu may rely on that: the same
// callers drive devices whose memory is elsewhere.
//
// All memory is one arena. It is taken once, before the first step, at exactly the size that was
// planned, and never grows: there is no call that allocates later.
#ifndef KERNELS_DEVICE_H
#define KERNELS_DEVICE_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

struct device_config {
    const char *kind; // "auto" or "cpu"
    enum dtype dtype;
    int threads;         // 0: as many as the process may use
    size_t head_size;    // channels of one attention head
    size_t max_seq;      // longest sequence
    size_t padded_vocab; // longest row that the classifier sees
};

struct layers;

struct device {
    const char *kind;
    enum dtype dtype;
    const struct layers *layers; // what it can compute (layers.h)
    int threads;                 // CPU threads that compute
    size_t workspace_bytes;      // held by the device itself, outside the arena
    char summary[256];           // one line for the user: processor, ISA, BLAS, threads
    char warning[512];           // empty, or what the user should know before training
};

// Opens a device. STATUS_USAGE: no such kind; STATUS_FAIL: it is not usable here.
int device_open(struct device **out, const struct device_config *config, struct error *err);

// Takes the arena, zero-filled. At most one per device.
int device_arena(struct device *dev, size_t bytes, void **base, struct error *err);

void device_copy_in(struct device *dev, void *device_dst, const void *host_src, size_t bytes);
void device_copy_out(struct device *dev, void *host_dst, const void *device_src, size_t bytes);

// Single-precision matrix-product rate (FLOP/s) of this device with all its threads, on square
// matrices of size n, the best of several tries: what throughput is held against.
double device_sgemm_rate(struct device *dev, size_t n);

void device_close(struct device *dev);

#endif
