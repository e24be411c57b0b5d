// cpu.h - inside the cpu device: what its operations need to know of it. Only kernels/cpu includes
// this.
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "kernels/cpu/link.h"
#include "kernels/device.h"

#include <pthread.h>
#include <stdatomic.h>

// c(m,n) = op(a)(m,k) op(b)(k,n) + beta*c, row-major, beta 0 or 1, on the calling thread alone.
// ta: a is stored (k,m); tb: b is stored (n,k). ld*: elements from one row to the next.
typedef void (*sgemm_fn)(bool ta, bool tb, size_t m, size_t n, size_t k, const float *a, size_t lda,
                         const float *b, size_t ldb, float beta, float *c, size_t ldc);

struct cpu {
    struct device base;
    sgemm_fn sgemm;        // OpenBLAS, or our own loop
    float *scratch;        // one piece per thread
    size_t scratch_floats; // size of a piece
    float *partials;       // MATMUL_PARTIALS floats, shared by the threads
    // The arena, and on an emulated device its addresses: a range of the same size that nobody can
    // access. Host code that takes a device address for its own dies on the spot.
    void *arena, *addresses;
    size_t arena_bytes;
    void *host[2]; // pageable, pinned
    size_t host_bytes[2];
    // Emulated devices only.
    struct link link;
    pthread_mutex_t link_lock;
    _Atomic uint64_t pageable_copies;
};

static inline struct cpu *cpu_of(struct device *dev)
{
    return (struct cpu *)dev; // base is the first member
}

// Attention works on tiles of queries by keys; the floats of scratch that a thread needs for it.
#define ATTENTION_TILE_Q ((size_t)64)
#define ATTENTION_TILE_K ((size_t)128)

static inline size_t attention_scratch(size_t T, size_t hs)
{
    size_t tiles = 4 * ATTENTION_TILE_K * hs + 2 * ATTENTION_TILE_Q * ATTENTION_TILE_K;
    return 3 * T * hs + 2 * ATTENTION_TILE_Q * hs + 4 * hs + T + tiles; // backward needs most
}

// A matrix product works on tiles of at most M x N; bf16 operands are widened K columns at a time.
#define MATMUL_TILE_M ((size_t)512)
#define MATMUL_TILE_N ((size_t)768)
#define MATMUL_TILE_K ((size_t)512)
#define MATMUL_SCRATCH                                                                             \
    (MATMUL_TILE_K * (MATMUL_TILE_M + MATMUL_TILE_N) + MATMUL_TILE_M * MATMUL_TILE_N)
// From this K on it is cut into so many parts, if their results fit into so many floats.
#define MATMUL_DEEP       ((size_t)8192)
#define MATMUL_DEEP_PARTS ((size_t)4)
#define MATMUL_PARTIALS   ((size_t)1 << 21)

// The instruction sets that the operations were compiled for, best last.
enum isa { ISA_BASE, ISA_AVX2, ISA_AVX512, ISA_COUNT };

// The best of them that this processor and its operating system run; the environment variable
// TRAIN_GPT_ISA=base|avx2|avx512 asks for a lesser one. STATUS_USAGE: unknown or not available.
int isa_choose(enum isa *out, struct error *err);
const char *isa_name(enum isa isa);

// The layer table of a variant, and the matrix product of our own that goes with it.
const struct layers *cpu_layers(enum dtype dtype, enum isa isa);
sgemm_fn cpu_sgemm(enum isa isa);

// Loads OpenBLAS (blas.c). NULL, with the reason in why, if it is missing or computes wrongly.
sgemm_fn blas_open(enum isa isa, char *name, size_t name_size, char *why, size_t why_size);
// OpenBLAS's own multi-threaded sgemm, for benchmarks: sets its thread count. False: not loaded.
bool blas_set_threads(int threads);

#endif
