// ptx.h - what the instructions of kernels/cuda/ptx.h compute, for a whole warp at once: functions
// for shim.h's sim_warp, with every lane's operands. (Copies and shuffles are shim.h's own.)
#ifndef TEST_CUDA_PTX_H
#define TEST_CUDA_PTX_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct sim_ldmatrix {
    uint16_t row[8] __attribute__((aligned(16))); // that the lane has named
    uint32_t r[4];
};
void sim_ldmatrix(void *const *lanes);
void sim_ldmatrix_trans(void *const *lanes);

struct sim_mma {
    float d[4];
    uint32_t a[4], b[2];
};
void sim_mma(void *const *lanes);

#ifdef __cplusplus
}
#endif
#endif
