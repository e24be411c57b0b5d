// kernel.h - one launch from inside: what fiber.c, block.c, access.c and shared.c share.
//
//   memory of the threads  | guard | stack 0 | guard | stack 1 | ...        fiber.c
//   dynamic shared memory  | window, no access | bytes asked for | window | shared.c
//   static shared memory   this thread's TLS block: shim.h makes __shared__ thread_local
#ifndef TEST_CUDA_KERNEL_H
#define TEST_CUDA_KERNEL_H

#include "test/cuda/threads.h"

#define SIM_THREADS     1024 // of a block
#define SIM_WARPS       (SIM_THREADS / 32)
#define SIM_WARP_EPOCHS (1u << 20)

// ---- fiber.c ----

// Stacks of SIM_THREADS fibers, made at the first call; index SIM_THREADS is the host's.
void sim_fibers_open(void);
// The next switch to it calls entry, which never returns, on an empty stack.
void sim_fiber_reset(unsigned fiber, void (*entry)(void));
void sim_fiber_switch(unsigned from, unsigned to);
extern uintptr_t sim_stacks;
extern size_t sim_stacks_bytes;

// ---- block.c ----

enum sim_wait {
    SIM_RUNS,
    SIM_RETURNED,
    SIM_AT_BARRIER,
    SIM_AT_WARP_BARRIER,
    SIM_AT_SHUFFLE,
    SIM_AT_BALLOT,
    SIM_AT_WARP,
};

struct sim_thread {
    uint3 index;
    unsigned number, lane, warp, rank; // rank: of its lane in the order of its warp
    enum sim_wait state;
    unsigned mask; // of the warp operation that it waits at
    void *operand; // of the same
    // Barriers of lanes: each takes its lanes to one epoch, higher than theirs were. What lane r
    // has done in epochs below seen[r] is ordered before what this one does.
    uint32_t warp_epoch, seen[32];
    const void *site;         // where it waits
    unsigned copies, commits; // cp.async: under way, and groups so far
};

// The thread that runs; NULL: host code.
extern struct sim_thread *sim_self;
// Where in the code it has last called the runtime.
extern const void *sim_site;
#define SIM_HERE() (sim_site = __builtin_return_address(0))
// Grows with every barrier and block: what has a lower one is ordered before.
extern uint32_t sim_epoch;
// The block that runs, and how many the launch has.
extern uint32_t sim_block, sim_blocks;
extern const struct sim_kernel *sim_kernel_now;

// Ends the launch, after a report of what must not go on. Called by a thread; does not return.
void sim_abandon(void) __attribute__((noreturn));

// ---- access.c ----

void sim_access_launch(void); // a launch begins
void sim_access_block(void);  // a block of it begins

// ---- shared.c ----

// Dynamic shared memory: what is asked for begins here, DYNAMIC_BYTES could be used. An address
// that is up to SIM_WINDOW away from that is meant to be in it.
#define SIM_WINDOW        ((size_t)1 << 20)
#define SIM_DYNAMIC_BYTES ((size_t)256 << 10)
extern uintptr_t sim_dynamic;

struct sim_variable { // a __shared__ one
    const char *symbol;
    uintptr_t at;
    size_t bytes;
    bool used; // by this launch
    bool guard;
};
extern uintptr_t sim_tls; // this thread's block of thread-local variables
extern size_t sim_tls_bytes;
// The one that an address in that block is meant to be in, or NULL. From its first use in a launch
// on, it is poisoned for each block.
struct sim_variable *sim_variable_at(uintptr_t a);
// Is it a flag of the compiler's own, which says that a variable has been constructed?
bool sim_is_guard(uintptr_t a);
const char *sim_variable_name(const struct sim_variable *v);

void sim_shared_launch(void); // a launch begins
void sim_shared_block(void);  // a block of it begins

#endif
