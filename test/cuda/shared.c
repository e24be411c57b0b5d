// Shared memory of a block: dynamic and static, poisoned for each block.
#include "test/cuda/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// 227 KiB, what a block of sm_90 may ask for; aligned as DYN_SMEM says, and not better.
#define DYNAMIC_BYTES ((size_t)256 << 10)
#define DYNAMIC_ALIGN 128

uintptr_t sim_dynamic;

static void open_dynamic(void)
{
    size_t bytes = DYNAMIC_BYTES + 2 * SIM_WINDOW;
    char *window = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (window == MAP_FAILED ||
        mprotect(window + SIM_WINDOW, DYNAMIC_BYTES, PROT_READ | PROT_WRITE)) {
        perror("shared memory of CUDA blocks");
        abort();
    }
    sim_dynamic = (uintptr_t)window + SIM_WINDOW + DYNAMIC_ALIGN;
}

void *sim_dynamic_shared(void)
{
    return (void *)sim_dynamic;
}

void sim_shared_launch(void)
{
    if (!sim_dynamic) {
        open_dynamic();
    }
}

void sim_shared_block(void)
{
    memset((void *)sim_dynamic, 0xff, sim_kernel_now->smem);
}
