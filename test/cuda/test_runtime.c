// The host half of the CPU runtime: what is planted is reported in every seed of every schedule,
// clean programs never are, and times are those computed by hand.
//
// Kernels are plain callbacks of one thread that declare what they touch.
#include "test/cmocka.h"
#include "test/cuda/sim.h"
#include "test/tiny.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SEEDS    200
#define SLOTS    2
#define N        64 // floats of a slot
#define BYTES    (N * sizeof(float))
#define CLEAN    (-1)
#define MEMORY   ((size_t)1 << 20)
#define OK(call) assert_int_equal(call, cudaSuccess)
#define COUNT(a) (sizeof(a) / sizeof *(a))

static const char *const schedules[] = {"lazy", "random", "time"};
static uint64_t first_seed;

// ---- kernels ----

struct range {
    char *at;
    size_t bytes;
    bool write;
};
struct touches { // touches ranges, and changes nothing
    size_t n;
    struct range r[4];
};

static void touch_body(void *args)
{
    const struct touches *t = args;
    for (size_t i = 0; i < t->n; i++) {
        sim_touch(t->r[i].at, t->r[i].bytes, t->r[i].write);
    }
}

struct add { // out[i] += in[i]
    float *out;
    const float *in;
};

static void add_body(void *args)
{
    const struct add *a = args;
    for (size_t i = 0; i < N; i++) {
        sim_touch(a->in + i, 4, false);
        sim_touch(a->out + i, 4, false);
        sim_touch(a->out + i, 4, true);
        a->out[i] += a->in[i];
    }
}

static void launch(const char *name, void (*body)(void *), const void *args, size_t bytes,
                   cudaStream_t stream)
{
    struct sim_kernel k = {.name = name,
                           .grid = {1, 1, 1},
                           .block = {1, 1, 1},
                           .call = body,
                           .args = malloc(bytes),
                           .release = free};
    assert_non_null(k.args);
    memcpy(k.args, args, bytes);
    sim_launch(&k, stream);
}

static void add(float *out, const float *in, cudaStream_t stream)
{
    launch("add", add_body, &(struct add){out, in}, sizeof(struct add), stream);
}

static void touch(const char *name, void *at, size_t bytes, bool write, cudaStream_t stream)
{
    struct touches t = {1, {{at, bytes, write}}};
    launch(name, touch_body, &t, sizeof t, stream);
}

// ---- a device with the usual things ----

struct rig {
    cudaStream_t in, compute, out;
    cudaEvent_t full[SLOTS], empty[SLOTS], event;
    float *slot[SLOTS], *sum; // device
    float *host, *result;     // pinned
    float *pageable;
};

static void rig_open(struct rig *r)
{
    memset(r, 0, sizeof *r);
    OK(cudaSetDevice(0));
    OK(cudaStreamCreateWithFlags(&r->in, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&r->compute, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithPriority(&r->out, cudaStreamNonBlocking, -1));
    OK(cudaEventCreate(&r->event));
    for (int i = 0; i < SLOTS; i++) {
        OK(cudaEventCreateWithFlags(&r->full[i], cudaEventDisableTiming));
        OK(cudaEventCreateWithFlags(&r->empty[i], cudaEventDisableTiming));
        OK(cudaMalloc((void **)&r->slot[i], BYTES));
    }
    OK(cudaMalloc((void **)&r->sum, BYTES));
    OK(cudaHostAlloc((void **)&r->host, 8 * BYTES, cudaHostAllocDefault));
    OK(cudaMallocHost((void **)&r->result, BYTES));
    r->pageable = calloc(N, sizeof(float));
    assert_non_null(r->pageable);
    OK(cudaMemset(r->sum, 0, BYTES));
    OK(cudaDeviceSynchronize());
}

static void begin(int schedule, uint64_t seed)
{
    struct sim_settings *s = sim_settings();
    s->schedule = schedule;
    s->seed = seed;
    s->memory = MEMORY;
    s->failure = SIM_HEALTHY;
    OK(cudaDeviceReset());
    cudaGetLastError();
    sim_parts_forget();
    sim_forget_reports();
    sim_expect_reports(true);
}

// Runs the scenario under every schedule and seed: reports of `kind` and no others, or none.
static void each(void (*scenario)(struct rig *), int kind)
{
    for (int schedule = 0; schedule < 3; schedule++) {
        for (uint64_t seed = first_seed; seed < first_seed + SEEDS; seed++) {
            struct rig r;
            begin(schedule, seed);
            rig_open(&r);
            scenario(&r);
            OK(cudaDeviceSynchronize());
            for (int k = 0; k < SIM_KINDS; k++) {
                if ((sim_reports(k) > 0) != (k == kind)) {
                    fail_msg("%s, seed %llu: %zu reports of kind %d, planted: %d; last: %s",
                             schedules[schedule], (unsigned long long)seed, sim_reports(k), k, kind,
                             sim_last_report());
                }
            }
            free(r.pageable);
        }
    }
    sim_expect_reports(false);
    sim_forget_reports();
}

// ---- a pipeline through two slots, with and without its edges ----

enum missing { EDGE_NONE, EDGE_FULL, EDGE_EMPTY, EDGE_SUM };

static void pipeline(struct rig *r, enum missing missing)
{
    for (size_t i = 0; i < 8 * N; i++) {
        r->host[i] = (float)(i % 97);
    }
    sim_host_touch(r->host, 8 * BYTES, true);
    for (int i = 0; i < 8; i++) {
        int s = i % SLOTS;
        if (missing != EDGE_EMPTY) {
            OK(cudaStreamWaitEvent(r->in, r->empty[s], 0)); // not recorded at first: no edge
        }
        OK(cudaMemcpyAsync(r->slot[s], r->host + i * N, BYTES, cudaMemcpyHostToDevice, r->in));
        OK(cudaEventRecord(r->full[s], r->in));
        if (missing != EDGE_FULL) {
            OK(cudaStreamWaitEvent(r->compute, r->full[s], 0));
        }
        add(r->sum, r->slot[s], r->compute);
        OK(cudaEventRecord(r->empty[s], r->compute));
    }
    OK(cudaEventRecord(r->event, r->compute));
    if (missing != EDGE_SUM) {
        OK(cudaStreamWaitEvent(r->out, r->event, 0));
    }
    OK(cudaMemcpyAsync(r->result, r->sum, BYTES, cudaMemcpyDeviceToHost, r->out));
}

static void clean_pipeline(struct rig *r)
{
    pipeline(r, EDGE_NONE);
    OK(cudaStreamSynchronize(r->out));
    sim_host_touch(r->result, BYTES, false);
    sim_host_touch(r->host, 8 * BYTES, true); // the copies in are before what was waited for
    for (int k = 0; k < N; k++) {
        float sum = 0;
        for (int i = 0; i < 8; i++) {
            sum += (float)((i * N + k) % 97);
        }
        assert_true(r->result[k] == sum);
    }
}

static void missing_full(struct rig *r)
{
    pipeline(r, EDGE_FULL);
}
static void missing_empty(struct rig *r)
{
    pipeline(r, EDGE_EMPTY);
}
static void missing_sum(struct rig *r)
{
    pipeline(r, EDGE_SUM);
}

static void test_pipeline(void **state)
{
    (void)state;
    each(clean_pipeline, CLEAN);
    each(missing_full, SIM_STREAM_RACE);
    each(missing_empty, SIM_STREAM_RACE);
    each(missing_sum, SIM_STREAM_RACE);
}

// ---- events ----

static void waited_before_recorded(struct rig *r)
{
    OK(cudaStreamWaitEvent(r->compute, r->event, 0));
    OK(cudaMemcpyAsync(r->slot[0], r->host, BYTES, cudaMemcpyHostToDevice, r->in));
    OK(cudaEventRecord(r->event, r->in));
    touch("read", r->slot[0], BYTES, false, r->compute);
}

// The wait is for what the event stood for when it was called.
static void recorded_again(struct rig *r, bool wait_again)
{
    OK(cudaMemcpyAsync(r->slot[0], r->host, BYTES, cudaMemcpyHostToDevice, r->in));
    OK(cudaEventRecord(r->event, r->in));
    OK(cudaStreamWaitEvent(r->compute, r->event, 0));
    OK(cudaMemcpyAsync(r->slot[1], r->host, BYTES, cudaMemcpyHostToDevice, r->in));
    OK(cudaEventRecord(r->event, r->in));
    touch("first", r->slot[0], BYTES, false, r->compute);
    if (wait_again) {
        OK(cudaStreamWaitEvent(r->compute, r->event, 0));
    }
    touch("second", r->slot[1], BYTES, false, r->compute);
}
static void recorded_again_clean(struct rig *r)
{
    recorded_again(r, true);
}
static void recorded_again_race(struct rig *r)
{
    recorded_again(r, false);
}

// Order goes through a third stream.
static void through_another(struct rig *r)
{
    touch("write", r->sum, BYTES, true, r->in);
    OK(cudaEventRecord(r->full[0], r->in));
    OK(cudaStreamWaitEvent(r->out, r->full[0], 0));
    OK(cudaEventRecord(r->full[1], r->out)); // nothing is queued there
    OK(cudaStreamWaitEvent(r->compute, r->full[1], 0));
    touch("write too", r->sum, BYTES, true, r->compute);
    OK(cudaEventDestroy(r->full[1])); // it still counts
}

static void readers_then_writer(struct rig *r, bool all)
{
    touch("read 1", r->sum, BYTES, false, r->in);
    OK(cudaEventRecord(r->full[0], r->in));
    touch("read 2", r->sum, BYTES, false, r->out);
    OK(cudaEventRecord(r->full[1], r->out));
    OK(cudaStreamWaitEvent(r->compute, r->full[0], 0));
    if (all) {
        OK(cudaStreamWaitEvent(r->compute, r->full[1], 0));
    }
    touch("write", r->sum, BYTES, true, r->compute);
}
static void readers_clean(struct rig *r)
{
    readers_then_writer(r, true);
}
static void readers_race(struct rig *r)
{
    readers_then_writer(r, false);
}

static void test_events(void **state)
{
    (void)state;
    each(waited_before_recorded, SIM_STREAM_RACE);
    each(recorded_again_clean, CLEAN);
    each(recorded_again_race, SIM_STREAM_RACE);
    each(through_another, CLEAN);
    each(readers_clean, CLEAN);
    each(readers_race, SIM_STREAM_RACE);
}

// ---- the host ----

static void copy_out(struct rig *r)
{
    touch("write", r->sum, BYTES, true, r->out);
    OK(cudaMemcpyAsync(r->result, r->sum, BYTES, cudaMemcpyDeviceToHost, r->out));
    OK(cudaEventRecord(r->event, r->out));
}
static void host_too_early(struct rig *r)
{
    copy_out(r);
    sim_host_touch(r->result, 4, false);
}
static void host_after_event(struct rig *r)
{
    copy_out(r);
    OK(cudaEventSynchronize(r->event));
    sim_host_touch(r->result, BYTES, true);
    OK(cudaMemcpyAsync(r->sum, r->result, BYTES, cudaMemcpyHostToDevice, r->in));
}
static void host_after_query(struct rig *r)
{
    copy_out(r);
    int queries = 0;
    while (cudaEventQuery(r->event) == cudaErrorNotReady) {
        assert_true(++queries < 10000);
    }
    while (cudaStreamQuery(r->out) == cudaErrorNotReady) {
        assert_true(++queries < 10000);
    }
    sim_host_touch(r->result, BYTES, false);
}
static void host_overwrites_source(struct rig *r)
{
    OK(cudaMemcpyAsync(r->sum, r->host, BYTES, cudaMemcpyHostToDevice, r->in));
    sim_host_touch(r->host + N - 1, 4, true);
}
static void host_reads_source(struct rig *r)
{
    OK(cudaMemcpyAsync(r->sum, r->host, BYTES, cudaMemcpyHostToDevice, r->in));
    sim_host_touch(r->host, BYTES, false);
}
static void host_on_device(struct rig *r)
{
    sim_host_touch(r->sum, 4, false);
}
static void host_after_free(struct rig *r)
{
    OK(cudaFreeHost(r->host));
    sim_host_touch(r->host, 4, true);
}

static void test_host(void **state)
{
    (void)state;
    each(host_too_early, SIM_STREAM_RACE);
    each(host_after_event, CLEAN);
    each(host_after_query, CLEAN);
    each(host_overwrites_source, SIM_STREAM_RACE);
    each(host_reads_source, CLEAN);
    each(host_on_device, SIM_MISUSE);
    each(host_after_free, SIM_BOUNDS);
}

// Nothing runs before somebody waits for it, and then only what that needs.
static void test_lazy(void **state)
{
    (void)state;
    struct rig r;
    begin(SIM_LAZY, first_seed);
    rig_open(&r);
    r.host[0] = 1;
    r.result[0] = 2;
    OK(cudaMemcpyAsync(r.slot[0], r.host, 4, cudaMemcpyHostToDevice, r.in));
    OK(cudaMemcpyAsync(r.slot[1], r.host, 4, cudaMemcpyHostToDevice, r.compute));
    OK(cudaEventRecord(r.event, r.in));
    OK(cudaStreamWaitEvent(r.out, r.event, 0));
    OK(cudaMemcpyAsync(r.result, r.slot[0], 4, cudaMemcpyDeviceToHost, r.out));
    for (int i = 0; i < 100; i++) {
        OK(cudaEventRecord(r.full[0], r.in));
    }
    assert_true(r.result[0] == 2);
    r.host[0] = 3;
    OK(cudaStreamSynchronize(r.out));
    assert_true(r.result[0] == 3);
    assert_int_equal(cudaStreamQuery(r.compute), cudaErrorNotReady);
    free(r.pageable);
}

static void says(const char *const *words)
{
    for (; *words; words++) {
        if (!strstr(sim_last_report(), *words)) {
            fail_msg("no \"%s\" in: %s", *words, sim_last_report());
        }
    }
}

// A report names both operations, their streams and the address.
static void test_reports(void **state)
{
    (void)state;
    struct rig r;
    char at[32];
    begin(SIM_LAZY, first_seed);
    rig_open(&r);
    OK(cudaMemcpyAsync(r.slot[0], r.host, BYTES, cudaMemcpyHostToDevice, r.in));
    OK(cudaStreamSynchronize(r.in));
    OK(cudaMemcpyAsync(r.slot[1], r.host, BYTES, cudaMemcpyHostToDevice, r.in));
    touch("reader", (char *)r.slot[1] + 20, 4, false, r.compute);
    OK(cudaDeviceSynchronize());
    snprintf(at, sizeof at, "%p", (void *)((char *)r.slot[1] + 20));
    says((const char *[]){"reader (stream 2", "copy to the device (stream 1", at,
                          "device allocation 2 of 256 bytes, at byte 20", NULL});
    touch("twice", (char *)r.sum - 4, 4, false, r.in);
    touch("twice", (char *)r.sum + BYTES, 4, false, r.in);
    OK(cudaDeviceSynchronize());
    says((const char *[]){"twice (stream 1", "reads 4 bytes", "4 bytes before device allocation 3",
                          NULL}); // once for one kernel
    assert_int_equal(sim_reports(SIM_BOUNDS), 2);
    free(r.pageable);
    sim_forget_reports();
    sim_expect_reports(false);
}

// ---- the default stream ----

static void default_stream(struct rig *r, unsigned flags)
{
    cudaStream_t a, b;
    OK(cudaStreamCreateWithFlags(&a, flags));
    OK(cudaStreamCreateWithFlags(&b, flags));
    touch("before", r->sum, BYTES, true, a);
    touch("default", r->sum, BYTES, true, NULL);
    touch("after", r->sum, BYTES, true, b);
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}
static void default_blocking(struct rig *r)
{
    default_stream(r, cudaStreamDefault);
}
static void default_non_blocking(struct rig *r)
{
    default_stream(r, cudaStreamNonBlocking);
}
static void default_after_non_blocking(struct rig *r)
{
    touch("before", r->sum, BYTES, true, r->in);
    touch("default", r->sum, BYTES, true, NULL);
}
// A copy from memory that is not pinned has returned before the device has it.
static void staged_copy(struct rig *r)
{
    OK(cudaMemcpy(r->sum, r->pageable, BYTES, cudaMemcpyHostToDevice));
    touch("read", r->sum, BYTES, false, r->compute);
}
static void staged_copy_waited(struct rig *r)
{
    r->pageable[5] = 17;
    OK(cudaMemcpy(r->sum, r->pageable, BYTES, cudaMemcpyHostToDevice));
    r->pageable[5] = 18;
    OK(cudaStreamSynchronize(NULL));
    add(r->sum, r->sum, r->compute);
    OK(cudaStreamSynchronize(r->compute));
    OK(cudaMemcpy(r->pageable, r->sum, BYTES, cudaMemcpyDeviceToHost));
    assert_true(r->pageable[5] == 34);
}
static void pinned_copy(struct rig *r)
{
    OK(cudaMemcpy(r->sum, r->host, BYTES, cudaMemcpyHostToDevice));
    touch("read", r->sum, BYTES, false, r->compute);
}

static void test_default_stream(void **state)
{
    (void)state;
    each(default_blocking, CLEAN);
    each(default_non_blocking, SIM_STREAM_RACE);
    each(default_after_non_blocking, SIM_STREAM_RACE);
    each(staged_copy, SIM_STREAM_RACE);
    each(staged_copy_waited, CLEAN);
    each(pinned_copy, CLEAN);
}

// ---- bounds ----

static void copy_too_long(struct rig *r)
{
    OK(cudaMemcpyAsync(r->sum, r->host, BYTES + 1, cudaMemcpyHostToDevice, r->in));
}
static void copy_beyond_pinned(struct rig *r)
{
    OK(cudaMemcpyAsync(r->result + 1, r->sum, BYTES, cudaMemcpyDeviceToHost, r->in));
}
static void kernel_beyond(struct rig *r)
{
    touch("beyond", r->sum + N - 1, 8, true, r->compute);
}
static void kernel_on_host_memory(struct rig *r)
{
    touch("host's", r->pageable, 4, false, r->compute);
}
static void used_after_free(struct rig *r)
{
    OK(cudaFree(r->slot[1]));
    touch("late", r->slot[1], 4, false, r->compute);
}
static void copy_after_free(struct rig *r)
{
    OK(cudaFreeHost(r->host));
    OK(cudaMemcpyAsync(r->sum, r->host, BYTES, cudaMemcpyHostToDevice, r->in));
}
static void freed_behind_use(struct rig *r) // waits for the kernel
{
    touch("in time", r->slot[1], BYTES, true, r->compute);
    OK(cudaFree(r->slot[1]));
}
static void fill_too_long(struct rig *r)
{
    OK(cudaMemsetAsync((char *)r->sum + 8, 0, BYTES, r->compute));
}
static void inside_parts(struct rig *r)
{
    sim_part(r->sum, 64, false);
    sim_part(r->sum + 32, 64, true);
    touch("inside", r->sum, 64, true, r->compute);
    touch("inside", r->sum + 32, 64, false, r->compute);
    touch("pinned", r->result, 64, true, r->compute);
    OK(cudaMemsetAsync(r->sum, 0, BYTES, r->compute));
}
static void between_parts(struct rig *r)
{
    inside_parts(r);
    touch("outside", r->sum + 16, 4, false, r->compute);
}
static void across_a_part(struct rig *r)
{
    inside_parts(r);
    touch("across", r->sum + 15, 8, false, r->compute);
}
static void read_only_part(struct rig *r)
{
    inside_parts(r);
    touch("writes", r->sum + 32, 4, true, r->compute);
}
static void parts_forgotten(struct rig *r)
{
    inside_parts(r);
    OK(cudaDeviceSynchronize());
    sim_parts_forget();
    touch("outside", r->sum + 16, 4, true, r->compute);
}
static void constants(struct rig *r)
{
    touch("constant", (void *)(uintptr_t)schedules, sizeof schedules, false, r->compute);
}

static void test_bounds(void **state)
{
    (void)state;
    each(copy_too_long, SIM_BOUNDS);
    each(copy_beyond_pinned, SIM_BOUNDS);
    each(kernel_beyond, SIM_BOUNDS);
    each(kernel_on_host_memory, SIM_BOUNDS);
    each(used_after_free, SIM_BOUNDS);
    each(copy_after_free, SIM_BOUNDS);
    each(freed_behind_use, CLEAN);
    each(fill_too_long, SIM_BOUNDS);
    each(inside_parts, CLEAN);
    each(between_parts, SIM_BOUNDS);
    each(across_a_part, SIM_BOUNDS);
    each(read_only_part, SIM_BOUNDS);
    each(parts_forgotten, CLEAN);
    each(constants, CLEAN);
}

// ---- other mistakes ----

static void unpinned_in(struct rig *r)
{
    OK(cudaMemcpyAsync(r->sum, r->pageable, BYTES, cudaMemcpyHostToDevice, r->in));
}
static void unpinned_out(struct rig *r)
{
    OK(cudaMemcpyAsync(r->pageable, r->sum, BYTES, cudaMemcpyDeviceToHost, r->in));
    assert_true(r->pageable[0] == 0);
}
static void registered(struct rig *r)
{
    OK(cudaHostRegister(r->pageable, BYTES, cudaHostRegisterDefault));
    OK(cudaMemcpyAsync(r->sum, r->pageable, BYTES, cudaMemcpyHostToDevice, r->in));
    assert_int_equal(cudaHostRegister(r->pageable + 1, 4, 0), cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaHostUnregister(r->pageable));
}
static void freed_twice(struct rig *r)
{
    OK(cudaFree(r->sum));
    assert_int_equal(cudaFree(r->sum), cudaErrorInvalidValue);
}
static void dead_stream(struct rig *r)
{
    OK(cudaStreamDestroy(r->in));
    assert_int_equal(cudaStreamSynchronize(r->in), cudaErrorInvalidResourceHandle);
}
static void dead_event(struct rig *r)
{
    OK(cudaEventDestroy(r->event));
    assert_int_equal(cudaEventRecord(r->event, r->in), cudaErrorInvalidResourceHandle);
}
static void wrong_direction(struct rig *r)
{
    assert_int_equal(cudaMemcpy(r->sum, r->host, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
}

static void test_misuse(void **state)
{
    (void)state;
    each(unpinned_in, SIM_PAGEABLE);
    each(unpinned_out, SIM_PAGEABLE);
    each(registered, CLEAN);
    each(freed_twice, SIM_MISUSE);
    each(dead_stream, SIM_MISUSE);
    each(dead_event, SIM_MISUSE);
    each(wrong_direction, SIM_MISUSE);
}

// ---- how a process ends ----

static int child_of(void (*work)(struct rig *))
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rig r;
        (void)!freopen("/dev/null", "w", stderr);
        begin(SIM_RANDOM, 1);
        sim_expect_reports(false);
        rig_open(&r);
        work(&r);
        cudaDeviceSynchronize();
        exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void host_writes_device(struct rig *r)
{
    add(r->sum, r->sum, r->compute);
    OK(cudaDeviceSynchronize());
    ((volatile float *)r->sum)[3] = 1;
}

static void test_ends(void **state)
{
    (void)state;
    int status = child_of(host_writes_device);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    status = child_of(host_too_early);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 86);
    status = child_of(copy_too_long);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 86);
    status = child_of(clean_pipeline);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// ---- random programs, against sets of operations instead of clocks ----

#define WINDOW   32 // bytes, or KiB, that everybody fights for
#define ACTIONS  14
#define OPS      ACTIONS
#define PROGRAMS 4000
#define EVENTS   2
#define STREAMS  3

struct program {
    uint64_t rng;
    char *window;
    size_t scale; // 1, or 1024, so that pages of the shadow are touched as a whole and in part
    cudaStream_t stream[STREAMS];
    cudaEvent_t event[EVENTS];
    // Sets of operations that are before what comes next there: bit i is operation i.
    uint32_t on[STREAMS], at[EVENTS], host;
    uint32_t before[OPS];
    struct touches touches[OPS];
    int ops;
};

static uint32_t draw(struct program *p, uint32_t n)
{
    return (uint32_t)rng_below(&p->rng, n);
}

static void draw_ranges(struct program *p, struct touches *t, size_t most)
{
    t->n = 1 + draw(p, (uint32_t)most);
    for (size_t i = 0; i < t->n; i++) {
        size_t at = draw(p, WINDOW), n = 1 + draw(p, 12);
        bool whole = draw(p, 3) == 0; // cells
        at = whole ? at & ~(size_t)3 : at;
        n = whole ? (n + 3) & ~(size_t)3 : n;
        n = at + n > WINDOW ? WINDOW - at : n;
        t->r[i] = (struct range){p->window + at * p->scale, n * p->scale, draw(p, 3) == 0};
    }
}

static void act(struct program *p)
{
    uint32_t s = draw(p, STREAMS), e = draw(p, EVENTS), i = (uint32_t)p->ops;
    switch (draw(p, 9)) {
    default:
        p->on[s] |= p->host;
        draw_ranges(p, &p->touches[i], 3);
        launch("random", touch_body, &p->touches[i], sizeof p->touches[i], p->stream[s]);
        p->before[i] = p->on[s];
        p->on[s] |= 1u << i;
        p->ops++;
        break;
    case 0:
        draw_ranges(p, &p->touches[i], 1);
        sim_host_touch(p->touches[i].r[0].at, p->touches[i].r[0].bytes, p->touches[i].r[0].write);
        p->before[i] = p->host;
        p->host |= 1u << i;
        p->ops++;
        break;
    case 1:
    case 2:
        OK(cudaEventRecord(p->event[e], p->stream[s]));
        p->at[e] = p->on[s] |= p->host;
        break;
    case 3:
    case 4:
        OK(cudaStreamWaitEvent(p->stream[s], p->event[e], 0));
        p->on[s] |= p->at[e];
        break;
    case 5:
        if (draw(p, 2)) {
            OK(cudaEventSynchronize(p->event[e]));
            p->host |= p->at[e];
        } else if (cudaStreamQuery(p->stream[s]) == cudaSuccess) {
            p->host |= p->on[s];
        }
        break;
    }
}

static bool has_race(const struct program *p)
{
    for (int j = 0; j < p->ops; j++) {
        for (int i = 0; i < j; i++) {
            const struct touches *a = &p->touches[i], *b = &p->touches[j];
            for (size_t k = 0; k < a->n * b->n; k++) {
                const struct range *x = &a->r[k / b->n], *y = &b->r[k % b->n];
                if ((x->write || y->write) && x->at < y->at + y->bytes &&
                    y->at < x->at + x->bytes && !(p->before[j] >> i & 1)) {
                    return true;
                }
            }
        }
    }
    return false;
}

static void test_random_programs(void **state)
{
    (void)state;
    int races = 0;
    for (uint64_t n = 0; n < PROGRAMS; n++) {
        struct program p = {.rng = first_seed + n, .scale = n % 3 ? 1 : 1024};
        if (n % 100 == 0) {
            begin((int)(n / 100 % 3), first_seed + n);
        }
        OK(cudaHostAlloc((void **)&p.window, WINDOW * p.scale, cudaHostAllocDefault));
        for (int i = 0; i < STREAMS; i++) {
            OK(cudaStreamCreateWithFlags(&p.stream[i], cudaStreamNonBlocking));
        }
        for (int i = 0; i < EVENTS; i++) {
            OK(cudaEventCreate(&p.event[i]));
        }
        sim_forget_reports();
        for (int i = 0; i < ACTIONS; i++) {
            act(&p);
        }
        OK(cudaDeviceSynchronize());
        bool expected = has_race(&p);
        races += expected;
        if ((sim_reports(SIM_STREAM_RACE) > 0) != expected) {
            fail_msg("program of seed %llu: a race is %sthere, %zu are reported",
                     (unsigned long long)(first_seed + n), expected ? "" : "not ",
                     sim_reports(SIM_STREAM_RACE));
        }
        for (int i = 0; i < STREAMS; i++) {
            OK(cudaStreamDestroy(p.stream[i]));
        }
        OK(cudaFreeHost(p.window));
    }
    assert_in_range(races, PROGRAMS / 10, PROGRAMS * 9 / 10); // both are tried
    sim_forget_reports();
    sim_expect_reports(false);
}

// ---- virtual time ----

static const double unit = BYTES / 1e6; // to copy a slot, or to touch one

static void begin_timed(struct rig *r, double latency)
{
    sim_settings()->speed = (struct sim_speed){
        .kernel_s = latency, .copy_s = latency, .copy_in = 1e6, .copy_out = 1e6, .memory = 1e6};
    begin(SIM_TIME, first_seed);
    rig_open(r);
}

static void assert_units(double seconds, double units)
{
    if (seconds < (units - 1e-3) * unit || seconds > (units + 1e-3) * unit) {
        fail_msg("%.4f units instead of %.4f", seconds / unit, units);
    }
}

static void test_time_engines(void **state)
{
    (void)state;
    struct rig r;
    cudaEvent_t start;
    float ms;
    begin_timed(&r, 0);
    OK(cudaEventCreate(&start));
    // One after the other.
    double t = sim_time();
    OK(cudaEventRecord(start, r.in));
    OK(cudaMemcpyAsync(r.slot[0], r.host, BYTES, cudaMemcpyHostToDevice, r.in));
    touch("kernel", r.slot[0], BYTES, true, r.in);
    OK(cudaMemcpyAsync(r.result, r.slot[0], BYTES, cudaMemcpyDeviceToHost, r.in));
    OK(cudaEventRecord(r.event, r.in));
    assert_int_equal(cudaEventElapsedTime(&ms, start, r.event), cudaErrorNotReady);
    OK(cudaEventSynchronize(r.event));
    OK(cudaEventElapsedTime(&ms, start, r.event));
    assert_units(1e-3 * ms, 3);
    assert_units(sim_time() - t, 3);
    // All at once.
    t = sim_time();
    OK(cudaMemcpyAsync(r.slot[0], r.host, BYTES, cudaMemcpyHostToDevice, r.in));
    touch("kernel", r.slot[1], BYTES, true, r.compute);
    OK(cudaMemcpyAsync(r.result, r.sum, BYTES, cudaMemcpyDeviceToHost, r.out));
    OK(cudaDeviceSynchronize());
    assert_units(sim_time() - t, 1);
    // Two copies in one direction share an engine; half of one comes first.
    t = sim_time();
    OK(cudaMemcpyAsync(r.slot[0], r.host, BYTES, cudaMemcpyHostToDevice, r.in));
    OK(cudaMemcpyAsync(r.slot[1], r.host, BYTES / 2, cudaMemcpyHostToDevice, r.compute));
    OK(cudaStreamSynchronize(r.in));
    assert_units(sim_time() - t, 1);
    OK(cudaStreamSynchronize(r.compute));
    assert_units(sim_time() - t, 1.5);
    assert_int_equal(sim_reports(SIM_STREAM_RACE), 0);
    free(r.pageable);
}

// 8 copies of 1 unit, each added (3 units: in, and sum both ways) as soon as it is there, 1 copy.
static void test_time_pipeline(void **state)
{
    (void)state;
    for (int latency = 0; latency < 2; latency++) {
        struct rig r;
        begin_timed(&r, latency * unit);
        double t = sim_time();
        pipeline(&r, EDGE_NONE);
        OK(cudaStreamSynchronize(r.out));
        assert_units(sim_time() - t, latency ? 2 + 8 * 4 + 2 : 1 + 8 * 3 + 1);
        free(r.pageable);
    }
}

static void test_time_priority(void **state)
{
    (void)state;
    struct rig r;
    begin_timed(&r, 0);
    double t = sim_time();
    touch("first", r.sum, BYTES, true, r.in);
    OK(cudaEventRecord(r.event, r.in));
    OK(cudaStreamWaitEvent(r.compute, r.event, 0));
    OK(cudaStreamWaitEvent(r.out, r.event, 0));
    touch("low", r.slot[0], BYTES, true, r.compute);
    touch("high", r.slot[1], BYTES, true, r.out);
    OK(cudaStreamSynchronize(r.out));
    assert_units(sim_time() - t, 2);
    OK(cudaStreamSynchronize(r.compute));
    assert_units(sim_time() - t, 3);
    free(r.pageable);
}

static void test_time_queries(void **state)
{
    (void)state;
    for (int slow = 0; slow < 2; slow++) {
        struct rig r;
        begin_timed(&r, 0);
        sim_settings()->speed.call_s = slow ? unit / 100 : 0;
        double t = sim_time();
        touch("kernel", r.sum, BYTES, true, r.compute);
        OK(cudaEventRecord(r.event, r.compute));
        int misses = 0;
        while (cudaEventQuery(r.event) != cudaSuccess) {
            assert_true(++misses < 100);
        }
        assert_true(misses > 0);
        assert_units(sim_time() - t, slow ? (sim_time() - t) / unit : 1);
        assert_in_range((uintmax_t)(1e3 * (sim_time() - t) / unit), 999, 1050);
        free(r.pageable);
    }
}

// ---- memory, devices, launches ----

static void test_memory(void **state)
{
    (void)state;
    begin(SIM_RANDOM, first_seed);
    char *p, *q, *host;
    size_t left, total;
    struct cudaPointerAttributes a;
    assert_int_equal(cudaMalloc((void **)&p, MEMORY + 1), cudaErrorMemoryAllocation);
    assert_null(p);
    assert_string_equal(cudaGetErrorName(cudaGetLastError()), "cudaErrorMemoryAllocation");
    OK(cudaGetLastError());
    OK(cudaMalloc((void **)&p, MEMORY - 1000));
    OK(cudaMemGetInfo(&left, &total));
    assert_int_equal(total, MEMORY);
    assert_in_range(left, 1, 1000);
    assert_int_equal(cudaMalloc((void **)&q, 1001), cudaErrorMemoryAllocation);
    assert_int_equal((uintptr_t)p % 256, 0);
    OK(cudaMallocHost((void **)&host, MEMORY));
    memset(host, 0, MEMORY);
    OK(cudaMemcpy(host, p, MEMORY - 1000, cudaMemcpyDefault));
    for (size_t i = 0; i < MEMORY; i++) {
        assert_int_equal((unsigned char)host[i], i < MEMORY - 1000 ? 0xff : 0); // poison
    }
    OK(cudaPointerGetAttributes(&a, p + 5));
    assert_int_equal(a.type, cudaMemoryTypeDevice);
    OK(cudaPointerGetAttributes(&a, host + 5));
    assert_int_equal(a.type, cudaMemoryTypeHost);
    OK(cudaPointerGetAttributes(&a, &left));
    assert_int_equal(a.type, cudaMemoryTypeUnregistered);
    // Addresses come back late: what was freed stays a mistake for a while.
    char *before = p;
    for (int i = 0; i < 100; i++) {
        OK(cudaFree(p));
        OK(cudaMalloc((void **)&p, MEMORY));
        assert_true(i > 0 || p != before);
    }
    OK(cudaFree(NULL));
    OK(cudaFreeHost(host));
    for (int k = 0; k < SIM_KINDS; k++) {
        assert_int_equal(sim_reports(k), 0);
    }
}

static void test_launch_errors(void **state)
{
    (void)state;
    static const struct {
        dim3 grid, block;
        size_t smem;
        cudaError_t code;
    } cases[] = {
        {{1, 1, 1}, {1025, 1, 1}, 0, cudaErrorInvalidConfiguration},
        {{1, 1, 1}, {32, 33, 1}, 0, cudaErrorInvalidConfiguration},
        {{0, 1, 1}, {32, 1, 1}, 0, cudaErrorInvalidConfiguration},
        {{1, 65536, 1}, {32, 1, 1}, 0, cudaErrorInvalidConfiguration},
        {{1, 1, 1}, {32, 1, 1}, ((size_t)227 << 10) + 1, cudaErrorInvalidValue},
    };
    begin(SIM_LAZY, first_seed);
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct sim_kernel k = {.name = "bad",
                               .grid = cases[i].grid,
                               .block = cases[i].block,
                               .smem = cases[i].smem,
                               .call = touch_body,
                               .args = malloc(1),
                               .release = free};
        sim_launch(&k, NULL);
        assert_int_equal(cudaPeekAtLastError(), cases[i].code);
        assert_int_equal(cudaGetLastError(), cases[i].code);
        OK(cudaGetLastError());
    }
    int value;
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    assert_int_equal(value, 227 << 10);
    assert_int_equal(cudaDeviceGetAttribute(&value, cudaDevAttrMaxTexture1DWidth, 0),
                     cudaErrorNotSupported);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
}

static void begin_failing(enum sim_failure failure, uint64_t launch, int schedule)
{
    begin(schedule, first_seed);
    sim_settings()->failure = failure;
    sim_settings()->failure_launch = launch;
}

static void test_failures(void **state)
{
    (void)state;
    int n = 1;
    void *p;
    begin_failing(SIM_NO_DRIVER, 0, SIM_LAZY);
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
    OK(cudaDriverGetVersion(&n));
    assert_int_equal(n, 0);
    begin_failing(SIM_OLD_DRIVER, 0, SIM_LAZY);
    assert_int_equal(cudaSetDevice(0), cudaErrorInsufficientDriver);
    OK(cudaDriverGetVersion(&n));
    assert_in_range(n, 1, CUDART_VERSION - 1);
    begin_failing(SIM_NO_DEVICE, 0, SIM_LAZY);
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    assert_int_equal(n, 0);
    begin_failing(SIM_SM_75, 0, SIM_LAZY);
    struct cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, 0));
    assert_int_equal(10 * prop.major + prop.minor, 75);
    touch("new", &n, 0, false, NULL);
    assert_int_equal(cudaGetLastError(), cudaErrorNoKernelImageForDevice);
    begin_failing(SIM_OOM, 0, SIM_LAZY);
    assert_int_equal(cudaMalloc(&p, 1), cudaErrorMemoryAllocation);
    OK(cudaMallocHost(&p, 1));
    begin_failing(SIM_PIN, 0, SIM_LAZY);
    OK(cudaMalloc(&p, 1));
    assert_int_equal(cudaHostAlloc(&p, 1, 0), cudaErrorMemoryAllocation);
    assert_int_equal(cudaHostRegister(&n, sizeof n, 0), cudaErrorMemoryAllocation);
}

static void test_lost_and_hang(void **state)
{
    (void)state;
    for (int schedule = 0; schedule < 3; schedule++) {
        struct rig r;
        begin_failing(SIM_LOST, 2, schedule);
        rig_open(&r);
        add(r.sum, r.sum, r.compute);
        OK(cudaGetLastError());
        add(r.sum, r.sum, r.compute);
        assert_int_equal(cudaGetLastError(), cudaErrorDevicesUnavailable);
        assert_int_equal(cudaStreamSynchronize(r.compute), cudaErrorDevicesUnavailable);
        assert_int_equal(cudaGetLastError(), cudaErrorDevicesUnavailable); // stays
        free(r.pageable);
        begin_failing(SIM_HANG, 2, schedule);
        rig_open(&r);
        add(r.sum, r.sum, r.compute);
        OK(cudaEventRecord(r.full[0], r.compute));
        add(r.sum, r.sum, r.compute);
        OK(cudaEventRecord(r.event, r.compute));
        OK(cudaStreamWaitEvent(r.out, r.event, 0));
        OK(cudaMemcpyAsync(r.result, r.sum, BYTES, cudaMemcpyDeviceToHost, r.out));
        OK(cudaEventSynchronize(r.full[0]));
        for (int i = 0; i < 1000; i++) {
            assert_int_equal(cudaEventQuery(r.event), cudaErrorNotReady);
        }
        assert_int_equal(sim_reports(SIM_DEADLOCK), 0);
        assert_int_equal(cudaStreamSynchronize(r.out), cudaErrorLaunchTimeout);
        assert_int_equal(sim_reports(SIM_DEADLOCK), 1);
        free(r.pageable);
    }
    begin(SIM_LAZY, first_seed);
    sim_expect_reports(false);
}

int main(void)
{
    first_seed = test_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pipeline),      cmocka_unit_test(test_events),
        cmocka_unit_test(test_host),          cmocka_unit_test(test_lazy),
        cmocka_unit_test(test_reports),       cmocka_unit_test(test_default_stream),
        cmocka_unit_test(test_bounds),        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_ends),          cmocka_unit_test(test_random_programs),
        cmocka_unit_test(test_time_engines),  cmocka_unit_test(test_time_pipeline),
        cmocka_unit_test(test_time_priority), cmocka_unit_test(test_time_queries),
        cmocka_unit_test(test_memory),        cmocka_unit_test(test_launch_errors),
        cmocka_unit_test(test_failures),      cmocka_unit_test(test_lost_and_hang),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
