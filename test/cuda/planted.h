// planted.h - kernels for test_kernel.c: some with a bug that must be reported, some without.
#ifndef TEST_CUDA_PLANTED_H
#define TEST_CUDA_PLANTED_H

#include "kernels/cuda/cuda.h"
#include "test/cuda/sim.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PLANTED_FLOATS 4096 // of in and of out

struct planted {
    const char *name;
    void (*kernel)(float *out, const float *in); // NULL: takes other arguments
    dim3 grid, block;
    size_t smem;
    enum sim_kind kind; // what must be reported. SIM_KINDS: nothing
    // What out[0..results) must be.
    float (*expected)(const float *in, size_t i);
    size_t results;
};
extern const struct planted planted[];
extern const size_t n_planted;

void planted_launch(const struct planted *, struct device *, float *out, const float *in);

#ifdef __cplusplus
}
#endif
#endif
