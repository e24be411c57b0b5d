// ops.h - names of the operations of the variant (dtype and ISA) that is being compiled.
#ifndef KERNELS_CPU_OPS_OPS_H
#define KERNELS_CPU_OPS_OPS_H

#include "kernels/cpu/cpu.h"
#include "kernels/layers.h"

#include <omp.h>

// OP(name) is name_fp32_avx2 and so on; VARIANT comes from the Makefile.
#define PASTE_(name, variant) name##_##variant
#define PASTE(name, variant)  PASTE_(name, variant)
#define OP(name)              PASTE(name, VARIANT)

static inline float *thread_scratch(struct device *dev)
{
    struct cpu *cpu = cpu_of(dev);
    return cpu->scratch + (size_t)omp_get_thread_num() * cpu->scratch_floats;
}

// C(m,n) = op(A) op(B), the matrix product of our own (sgemm.c).
void OP(sgemm)(bool ta, bool tb, size_t m, size_t n, size_t k, const float *a, size_t lda,
               const float *b, size_t ldb, float beta, float *c, size_t ldc);

#endif
