// lt.h - how tests look into the cuBLASLt of the CPU runtime (lt.c), and narrow what it can do.
#ifndef TEST_CUDA_LT_H
#define TEST_CUDA_LT_H

#include <stddef.h>
#include <stdint.h>

// Calls of cublasLtMatmulAlgoGetHeuristic, products queued, and handles open.
struct sim_lt_counts {
    size_t heuristics, products, handles;
};
struct sim_lt_counts sim_lt_counts(void);

// From now on there is no algorithm for this epilogue (cublasLtEpilogue_t); 0: for all again.
void sim_lt_refuse(uint32_t epilogue);

#endif
