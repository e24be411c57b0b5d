// sim.h - the CPU runtime that executes the CUDA files where there is no GPU: how its parts meet.
//
//   kernels/cuda/*.cu      compiled by g++ with the toolkit's own headers, -fsanitize=thread, and
//                          shim.h force-included: every memory access calls __tsan_read4(p), ...
//   shim.h threads.h fiber.c block.c shared.c access.c ptx.c
//                          one kernel launch: a fiber per CUDA thread, blocks one after the other,
//                          shuffles and barriers, shared memory, and our own __tsan_* callbacks (no
//                          libtsan)
//   runtime.c memory.c queue.c race.c report.c
//                          cuda* functions of the same names as the real ones: memory, streams,
//                          events, copies; a seeded scheduler; vector clocks (host.h is between
//                          them)
//   lt.c                   the part of cuBLASLt that the project uses, on the CPU
//   nccl.c nccl.h          the same of NCCL, between processes
//
// Everything runs on the one thread that calls the CUDA API, inside its calls.
#ifndef TEST_CUDA_SIM_H
#define TEST_CUDA_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- one launch (block.c) ----

struct sim_kernel {
    const char *name;
    dim3 grid, block;
    size_t smem;              // dynamic shared memory, bytes
    void (*call)(void *args); // one CUDA thread
    void *args;               // a copy of the launch's arguments, malloc'ed by shim.h
    void (*release)(void *args);
};

// Called by shim.h's LAUNCH: queues it (queue.c). A launch that cannot be (block of more than 1024
// threads, empty grid, more than 227 KiB of shared memory) becomes cudaGetLastError's error.
void sim_launch(const struct sim_kernel *kernel, cudaStream_t stream);
// Runs all of a launch, now, on the calling thread. Device memory is accessible.
void sim_run_kernel(const struct sim_kernel *kernel);
// "block 3,0,0 thread 17,0,0 of kernel name" of the CUDA thread that runs, or "host".
const char *sim_where(void);

// ---- accesses (race.c) ----

// An access of the operation that runs now to memory that is neither its stack nor shared: bounds,
// use after free, races with operations that no edge orders. Called by access.c for kernels (where
// alignment has been checked) and by queue.c for copies and fills.
void sim_touch(const void *p, size_t bytes, bool write);

// Narrows the bounds for tests: from the first call on, kernels may touch only such parts of device
// memory. Parts do not overlap; sim_parts_forget forgets all of them.
void sim_part(const void *p, size_t bytes, bool read_only);
void sim_parts_forget(void);

// The host reads or writes pinned memory now, from any thread: what a host lane does, which nothing
// instruments. A copy that is queued, and of whose end the host does not know yet, must not touch
// the same bytes. Nothing happens in programs without the runtime.
void sim_host_access(const void *p, size_t bytes, bool write) __attribute__((weak));
static inline void sim_host_touch(const void *p, size_t bytes, bool write)
{
    if (sim_host_access) {
        sim_host_access(p, bytes, write);
    }
}

// ---- reports ----

enum sim_kind {
    SIM_BOUNDS,      // device, shared or pinned memory, freed memory, a read-only part
    SIM_ALIGNMENT,   // vector access at an address that is no multiple of its size
    SIM_SHARED_RACE, // two threads of a block without a barrier between them
    SIM_BLOCK_RACE,  // two blocks of a launch
    SIM_STREAM_RACE, // two operations, or an operation and the host, that no edge orders
    SIM_DEADLOCK,    // divergent barrier or shuffle
    SIM_PAGEABLE,    // asynchronous copy from or to memory that is not pinned
    SIM_MISUSE,      // of the API
    SIM_KINDS
};
// Notes a report. Unless a test has asked for quiet, it is printed, and the process exits with 86
// at its end; the same report of one kernel and kind is printed once.
void sim_report(enum sim_kind kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
size_t sim_reports(enum sim_kind kind); // since sim_forget_reports
void sim_forget_reports(void);
void sim_expect_reports(bool quiet);
const char *sim_last_report(void);

// ---- settings: environment variables, or before the first CUDA call ----
//
// cudaDeviceReset begins anew, with the settings as they are then.

// What goes wrong, for tests of how a program takes it.
enum sim_failure {
    SIM_HEALTHY,
    SIM_NO_DRIVER,  // "no-driver"
    SIM_OLD_DRIVER, // "old-driver"
    SIM_NO_DEVICE,  // "no-device"
    SIM_SM_75,      // "sm_75": a GPU that is too old
    SIM_OOM,        // "oom": no device memory, although it looks free
    SIM_PIN,        // "pin": host memory cannot be pinned
    SIM_LOST,       // "lost:N": the device is gone from the N-th launch on (from 1)
    SIM_HANG,       // "hang:N": the N-th launch never ends. What would wait for it for ever is
                    // reported as SIM_DEADLOCK and returns cudaErrorLaunchTimeout.
};

// Virtual time: what takes how long. A kernel or fill takes as long as memory needs for the bytes
// that it touches, each counted once per operation and direction.
struct sim_speed {
    double call_s;            // of the host, in each call
    double kernel_s, copy_s;  // of each kernel or fill, each copy
    double copy_in, copy_out; // bytes/s of the two copy engines
    double memory;            // bytes/s
};

struct sim_settings {
    uint64_t seed;                                        // SIM_SEED
    enum { SIM_FORWARD, SIM_REVERSE, SIM_SHUFFLE } order; // SIM_ORDER: of lanes, warps and blocks
    // SIM_SCHEDULE: lazy (an operation runs when somebody waits for it), random (any ready stream,
    // at each call), time (by virtual time)
    enum { SIM_LAZY, SIM_RANDOM, SIM_TIME } schedule;
    size_t memory; // SIM_MEMORY: bytes of device memory; 512 MiB
    int devices; // SIM_DEVICES: GPUs that the process sees, 1; it may use one, for each has its own
    enum sim_failure failure; // SIM_FAIL
    uint64_t failure_launch;  // its N
    struct sim_speed speed;
};
struct sim_settings *sim_settings(void);
double sim_time(void); // virtual seconds of the host, SIM_TIME

#ifdef __cplusplus
}
#endif
#endif
