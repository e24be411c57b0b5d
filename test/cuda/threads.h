// threads.h - what a CUDA thread asks of the runtime: shim.h puts CUDA C's names on these.
#ifndef TEST_CUDA_THREADS_H
#define TEST_CUDA_THREADS_H

#include "test/cuda/sim.h"

#ifdef __cplusplus
extern "C" {
#endif

// Each __shared__ variable begins at a multiple of this, more than a kernel can have: so what is
// beyond its end is no other variable's.
#define SIM_SHARED_ALIGN 65536

// ---- block.c ----

// Constant for the code of one CUDA thread: a compiler may call them once.
uint3 sim_thread_index(void) __attribute__((const));
uint3 sim_block_index(void) __attribute__((const));
uint3 sim_block_size(void) __attribute__((const));
uint3 sim_grid_size(void) __attribute__((const));

// Of all threads of the block. How many gave a predicate that is not 0.
int sim_barrier(int predicate);

// Of the lanes in mask; lanes that the block does not have are excused. Only the barrier orders
// what the lanes do to memory: shuffles and votes are none (CUDA C++ Programming Guide, warp
// functions).
enum sim_shuffle { SIM_SHUFFLE_IDX, SIM_SHUFFLE_UP, SIM_SHUFFLE_DOWN, SIM_SHUFFLE_XOR };
void sim_warp_barrier(unsigned mask);
uint64_t sim_shuffle(enum sim_shuffle how, unsigned mask, uint64_t bits, unsigned by, int width);
unsigned sim_ballot(unsigned mask, int predicate);
unsigned sim_active(void);

// Of all 32 lanes. When all have come, run is called once, with what each has given.
void sim_warp(void (*run)(void *const *lanes), void *mine);
// all32(32,bytes): every lane's, by lane.
void sim_warp_exchange(const void *mine, size_t bytes, void *all32);

// ---- shared.c, access.c ----

void *sim_dynamic_shared(void);

// Copies source_bytes and fills up to `bytes` (4, 8 or 16) with zeros. They arrive at the wait.
void sim_cp_async(void *shared, const void *global, size_t bytes, size_t source_bytes);
void sim_cp_async_commit(void);
void sim_cp_async_wait(unsigned pending_groups);

void sim_access(const void *p, size_t bytes, bool write); // what the compiler does not report
void sim_atomic(const void *p, size_t bytes);
void sim_fence(void);

#ifdef __cplusplus
}
#endif
#endif
