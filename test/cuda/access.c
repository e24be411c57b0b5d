// What the compiler's instrumentation calls (-fsanitize=thread), with no libtsan behind it.
#include "test/cuda/kernel.h"

#include <string.h>

void sim_access_launch(void)
{
}

void sim_access_block(void)
{
}

void sim_access(const void *p, size_t bytes, bool write)
{
    (void)p, (void)bytes, (void)write;
}

void sim_atomic(const void *p, size_t bytes)
{
    sim_access(p, bytes, true);
}

void sim_fence(void)
{
}

void sim_cp_async(void *shared, const void *global, size_t bytes, size_t source_bytes)
{
    memset(shared, 0, bytes);
    memcpy(shared, global, source_bytes);
}

void sim_cp_async_commit(void)
{
}

void sim_cp_async_wait(unsigned pending_groups)
{
    (void)pending_groups;
}

#define ACCESS(bytes)                                                                              \
    void __tsan_read##bytes(void *p);                                                              \
    void __tsan_read##bytes(void *p)                                                               \
    {                                                                                              \
        sim_access(p, bytes, false);                                                               \
    }                                                                                              \
    void __tsan_write##bytes(void *p);                                                             \
    void __tsan_write##bytes(void *p)                                                              \
    {                                                                                              \
        sim_access(p, bytes, true);                                                                \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void *p, size_t bytes);
void __tsan_read_range(void *p, size_t bytes)
{
    sim_access(p, bytes, false);
}

void __tsan_write_range(void *p, size_t bytes);
void __tsan_write_range(void *p, size_t bytes)
{
    sim_access(p, bytes, true);
}

void __tsan_init(void);
void __tsan_init(void)
{
}

void __tsan_func_entry(void *caller);
void __tsan_func_entry(void *caller)
{
    (void)caller;
}

void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}
