// study.h - versions of a kernel side by side: the first is the reference, the others are checked
// against it, over block sizes, and timed. One program per kernel family, in bf16:
// `make CUDA=1 dev-cuda`, then build-cuda/dev/cuda/layernorm on a machine with a GPU.
//
// With the argument `check` only the small shapes run, which the CPU runtime of test/cuda can do
// as well (make CUDA=sim dev-cuda).
#ifndef DEV_CUDA_STUDY_H
#define DEV_CUDA_STUDY_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

struct version {
    const char *name;
    void (*run)(struct device *dev, unsigned block); // queues it, on the program's tensors
    unsigned blocks[6];                              // threads, ends with 0; none: it has its own
};

struct study;

// Opens the device, or ends the program. study_small: only small shapes are asked for.
struct study *study_open(enum dtype dtype, int argc, char **argv);
bool study_small(const struct study *s);
struct device *study_device(struct study *s);
// Forgets all tensors.
void study_reset(struct study *s);

// Tensors of n elements, in the study's dtype or in fp32: random within +-range (and scratch);
// outputs, which the versions must agree on within `tolerance` of the largest element, or in all
// bits if it is 0; and what is both.
void *study_input(struct study *s, size_t n, bool fp32, float range);
void *study_output(struct study *s, size_t n, bool fp32, double tolerance);
void *study_state(struct study *s, size_t n, bool fp32, float range, double tolerance);
int32_t *study_tokens(struct study *s, size_t n, size_t vocab);

// Runs them, prints a line per version and block size. bytes: what must be moved at least; 0: not
// timed. False: one of them is wrong.
bool study_compare(struct study *s, const char *shape, const struct version *versions, size_t n,
                   double bytes);

#ifdef __cplusplus
}
#endif
#endif
