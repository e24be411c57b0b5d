// Fibers: a stack per CUDA thread of a block, kept for the whole process.
//
// Each stack has a guard page below it: a thread that overruns its own dies, instead of writing to
// its neighbour's.
#include "test/cuda/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define STACK_BYTES ((size_t)64 << 10)
#define GUARD_BYTES ((size_t)4 << 10)
#define STRIDE      (STACK_BYTES + GUARD_BYTES)

uintptr_t sim_stacks;
size_t sim_stacks_bytes;

void sim_fibers_open(void)
{
    if (sim_stacks) {
        return;
    }
    sim_stacks_bytes = SIM_THREADS * STRIDE;
    char *base = mmap(NULL, sim_stacks_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        perror("stacks of CUDA threads");
        abort();
    }
    for (size_t i = 0; i < SIM_THREADS; i++) {
        if (mprotect(base + i * STRIDE, GUARD_BYTES, PROT_NONE)) {
            perror("guard pages of CUDA threads' stacks");
            abort();
        }
    }
    sim_stacks = (uintptr_t)base;
}

// -DSIM_UCONTEXT: what other processors do, 20 times slower.
#if defined __x86_64__ && !defined SIM_UCONTEXT

static void *stack_pointer[SIM_THREADS + 1];

// Keeps what the ABI has a function keep, and nothing else: no kernel changes rounding modes.
void sim_switch_stacks(void **save, void *to);
__asm__(".text\n"
        ".type sim_switch_stacks, @function\n"
        "sim_switch_stacks:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size sim_switch_stacks, .-sim_switch_stacks\n");

void sim_fiber_reset(unsigned fiber, void (*entry)(void))
{
    // Tops at different offsets in their pages, else all of them share few cache sets. An entry
    // finds its stack as after a call: 8 bytes off a multiple of 16.
    uintptr_t top = sim_stacks + (fiber + 1) * STRIDE - fiber % 32 * 128;
    void **at = (void **)top;
    *--at = NULL;
    *--at = (void *)(uintptr_t)entry;
    for (int saved = 0; saved < 6; saved++) {
        *--at = NULL;
    }
    stack_pointer[fiber] = at;
}

void sim_fiber_switch(unsigned from, unsigned to)
{
    sim_switch_stacks(&stack_pointer[from], stack_pointer[to]);
}

#else
#include <ucontext.h>

static ucontext_t context[SIM_THREADS + 1];

void sim_fiber_reset(unsigned fiber, void (*entry)(void))
{
    ucontext_t *c = &context[fiber];
    getcontext(c);
    c->uc_stack.ss_sp = (void *)(sim_stacks + fiber * STRIDE + GUARD_BYTES);
    c->uc_stack.ss_size = STACK_BYTES;
    c->uc_link = NULL;
    makecontext(c, entry, 0);
}

void sim_fiber_switch(unsigned from, unsigned to)
{
    swapcontext(&context[from], &context[to]);
}
#endif
