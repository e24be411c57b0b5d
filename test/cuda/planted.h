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
    enum sim_kind kind; // SIM_KINDS: no report
    void (*launch)(struct device *, float *out, const float *in);
    // What out[i] must be without a bug. NULL: is not looked at.
    float (*expected)(const float *in, size_t i);
    size_t results; // elements of out that are
};
extern const struct planted planted[];
extern const size_t n_planted;

#ifdef __cplusplus
}
#endif
#endif
