// host.h - between runtime.c, memory.c, queue.c, race.c and report.c.
//
// Everything is a singleton: a process has one device. All of it is guarded by one lock, which
// every CUDA call holds from sim_enter to sim_leave.
#ifndef TEST_CUDA_HOST_H
#define TEST_CUDA_HOST_H

#include "test/cuda/sim.h"

// ---- memory (memory.c) ----

// What touched the memory from origin on (race.c): a number per 4 bytes, and one per page of them,
// which counts instead of them unless it is MIXED. All are 0 at first.
#define PAGE_CELLS ((size_t)1024)
#define MIXED      0x80000000u
struct shadow {
    uintptr_t origin; // a multiple of 4
    uint32_t *cells, *pages;
};

// Bytes that operations may touch: an allocation, or a part of one.
struct span {
    uintptr_t lo, hi; // [lo, hi)
    struct shadow shadow;
    enum { SPAN_DEVICE, SPAN_PINNED, SPAN_REGISTERED } kind;
    bool read_only;
    unsigned number; // of the allocation, from 1
};
// The one that has p, or NULL.
const struct span *memory_at(const void *p);
// Device or pinned memory, allocated now or once; else p is the host's own.
bool memory_ours(const void *p);
// "70 bytes behind the end of device allocation 3 (4096 bytes)"
void memory_describe(char *text, size_t size, const void *p);
// Device memory is out of the host's reach unless open; sim_leave closes it.
void memory_open(void);
void memory_close(void);

void memory_reset(void); // nothing is allocated; the size of device memory is as in the settings
bool memory_is_device(const void *p); // allocated or not
size_t memory_left(void);             // of device memory, bytes
// Device or pinned memory, all bytes 0xff. NULL: there is not so much.
void *memory_take(size_t bytes, bool device);
bool memory_register(void *p, size_t bytes); // false: some of it is known already
void memory_give(const void *p);             // one of those, by its first byte

// ---- clocks ----

// Lanes of the clocks: the host, the default stream, then streams.
enum { LANE_HOST, LANE_DEFAULT, LANE_FIRST, LANES = 16 };

// at[i]: the last operation of lane i that happens before, or is, the one that has this clock.
struct clock {
    uint32_t at[LANES];
};
static inline void clock_join(struct clock *c, const struct clock *other)
{
    for (int i = 0; i < LANES; i++) {
        c->at[i] = c->at[i] > other->at[i] ? c->at[i] : other->at[i];
    }
}

// ---- operations (queue.c) ----

enum op_kind { OP_KERNEL, OP_COPY, OP_FILL, OP_MARK, OP_EXTERNAL };
enum engine { ENGINE_COMPUTE, ENGINE_IN, ENGINE_OUT, ENGINES, ENGINE_NONE = ENGINES };

struct op {
    enum op_kind kind;
    int lane;
    uint32_t seq; // in its lane, from 1
    struct clock clock;
    const char *name; // lives as long as the program
    struct sim_kernel kernel;
    void *dst;
    const void *src;
    size_t bytes;
    int value;    // OP_FILL
    void *staged; // what src points at, if it is the operation's own
    // OP_EXTERNAL: called, with memory accessible, until it returns true. It touches what it needs
    // in the first call.
    bool (*get_on)(void *state);
    void *state;
    bool begun;
    enum engine engine;
    double issued, finish; // virtual time
    bool running, hangs;
    struct op *next;
};

// What is kept of each operation for ever, for reports and times.
struct note {
    const char *name;
    const void *at;
    size_t bytes;
    double finish;
};

void queue_reset(void);
int queue_open(bool blocking, int priority); // a lane, or -1: there are no more
void queue_close(int lane);
// Queues op (kind, name and operands filled in) on a lane, in program order after what the host
// knows of. Takes over what it owns. Returns its number.
uint32_t queue_add(int lane, const struct op *op);
// What is queued on the lane from now on happens after that.
void queue_wait(int lane, const struct clock *after);
// Clock of all that the lane has been given; of an operation that was just added.
const struct clock *queue_clock(int lane);
void queue_all(struct clock *clock);
bool queue_done(const struct clock *target);
// Host: runs what must be, until target is done; from then on it happens before. False: never.
bool queue_settle(const struct clock *target, const char *call);
// Host: is it done? Each time that it is not, it comes nearer.
bool queue_poll(const struct clock *target);
// Queues what depends on other processes; nccl.c. False: no such stream.
bool queue_external(cudaStream_t stream, const char *name, bool (*get_on)(void *state),
                    void *state); // runtime.c
void queue_poke(void);            // at every call: the scheduler may run something
struct note *queue_note(int lane, uint32_t seq);
void queue_describe(char *text, size_t size, int lane, uint32_t seq);

// ---- races (race.c) ----

void race_reset(void);
void race_begin(const struct op *op); // sim_touch is about it until race_end
size_t race_end(void);                // bytes that it has touched, for virtual time
void race_host(const struct clock *host, const void *p, size_t bytes, bool write);
// An access of an operation that is out of bounds is not to be done.
bool race_touch(const void *p, size_t bytes, bool write);
void race_forget(const struct span *span); // freed, when nothing is pending
void race_moved(void);                     // allocations have changed

// ---- calls (runtime.c) ----

// Every CUDA call is between these two. What sim_enter returns, if it is not cudaSuccess, is what
// the call comes to.
cudaError_t sim_enter(void);
cudaError_t sim_leave(cudaError_t code); // code becomes the last error
bool sim_lock(void);                     // false, and not locked: no CUDA call has been made yet
void sim_unlock(void);
uint64_t sim_random(void);

// ---- reports (report.c) ----

// Printed once per kind and key.
void sim_report_once(enum sim_kind kind, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
const char *sim_running(void); // name of the operation that runs, or "host" (race.c)

#endif
