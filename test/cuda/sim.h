// sim.h - the CPU runtime that executes the CUDA files where there is no GPU: how its parts meet.
//
//   kernels/cuda/*.cu      compiled by g++ with the toolkit's own headers, -fsanitize=thread, and
//                          shim.h force-included: every memory access calls __tsan_read4(p), ...
//   shim.h  fiber.c block.c access.c     one kernel launch: a fiber per CUDA thread, blocks one
//                          after the other, shuffles and barriers, shared memory, and our own
//                          __tsan_* callbacks (no libtsan)
//   runtime.c queue.c race.c             cuda* functions of the same names as the real ones:
//                          memory, streams, events, copies; a seeded scheduler; vector clocks
//   lt.c                   the part of cuBLASLt that the project uses, on the CPU
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
struct sim_settings {
    uint64_t seed;                                        // SIM_SEED
    enum { SIM_FORWARD, SIM_REVERSE, SIM_SHUFFLE } order; // SIM_ORDER: of lanes, warps and blocks
    // SIM_SCHEDULE: lazy (an operation runs when somebody waits for it), random (any ready stream,
    // at each call), time (by virtual time)
    enum { SIM_LAZY, SIM_RANDOM, SIM_TIME } schedule;
    size_t memory; // SIM_MEMORY: bytes of device memory; 512 MiB
};
struct sim_settings *sim_settings(void);
double sim_time(void); // virtual seconds, SIM_TIME

#ifdef __cplusplus
}
#endif
#endif
