// cuda.h - inside the cuda device: what its operations need to know of it. Only kernels/cuda
// includes this, from C and from CUDA C.
//
// Exactly one thread calls the CUDA API. Functions of `layers` queue their kernels on the stream of
// the lane that device_begin has chosen (the compute lane, unless told otherwise) and return.
// Nothing that they do may wait for the device.
#ifndef KERNELS_CUDA_CUDA_H
#define KERNELS_CUDA_CUDA_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" { // what these declare is C, and called from CUDA C by studies
#endif
#include "kernels/device.h"
#include "kernels/layers.h"

// Device memory of the device's own, behind the arena in the same allocation.
#define CUDA_LT_BYTES      ((size_t)32 << 20) // cuBLASLt's workspace, whatever the plan
#define CUDA_SCRATCH_BYTES ((size_t)16 << 20) // partial sums of kernels of the compute lane

struct lt_cache; // lt.h

struct cuda {
    struct device base; // first member
    cudaStream_t stream[DEVICE_LANES], current;
    cublasLtHandle_t lt;
    struct lt_cache *plans; // of matrix products, by shape
    char *arena;            // arena_bytes, then cuBLASLt's workspace, then scratch
    size_t arena_bytes;
    void *lt_workspace;
    float *scratch;
    void *host[2]; // pageable, pinned
    size_t host_bytes[2];
    cudaEvent_t *marks;
    size_t n_marks;
    cudaEvent_t origin[2]; // times count from the first; the other one is to replace it
    bool renewing;
    double origin_s; // clock_s() at the first
    uint64_t pageable_copies;
    struct error error; // the first one; nothing is queued after it
};

static inline struct cuda *cuda_of(struct device *dev)
{
    return (struct cuda *)dev;
}

static inline cudaStream_t cuda_stream(struct device *dev)
{
    return cuda_of(dev)->current;
}

// False, and the device's error says which call failed and how, if code is not cudaSuccess.
bool cuda_ok(struct device *dev, const char *call, cudaError_t code);
// The same after a launch.
bool cuda_launched(struct device *dev, const char *kernel);
// The same for any library: what it says of its code.
void cuda_fail(struct device *dev, const char *call, const char *why);

// Matrix products' plans (lt.c). Opened with the device, when its dtype is set.
int lt_open(struct cuda *cuda, struct error *err);
void lt_close(struct cuda *cuda);
// FLOP/s of the product of square matrices of size n, the best of several: on memory of its own,
// with a smaller n if there is not enough. 0: not even for that, or the device has an error.
double lt_rate(struct cuda *cuda, size_t n);

extern const struct layers layers_cuda_fp32, layers_cuda_bf16;

#ifdef __cplusplus
}
#endif
#endif
