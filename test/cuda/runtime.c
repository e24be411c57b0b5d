// runtime.c - our own functions with the names of the CUDA runtime's: devices, memory, streams,
// events, copies, errors. They check what they are given more strictly than the real ones; when
// something runs, and what is ordered with what, is queue.c's.
#include "test/cuda/host.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMEM_MAX       ((size_t)227 << 10)
#define EVENT_MAGIC    UINT64_C(0x6576656e74)
#define DRIVER_VERSION 13000

struct CUstream_st {
    bool live;
    int lane, priority;
    unsigned flags;
    struct CUstream_st *next;
};

struct CUevent_st {
    uint64_t magic;
    bool timed, recorded;
    int lane;
    uint32_t seq;
    struct clock clock; // 0 until it is recorded
    struct CUevent_st *next;
};

static struct {
    bool ready, lost;
    int device; // in use
    pthread_t caller;
    cudaError_t last;
    struct CUstream_st *streams;
    struct CUevent_st *events;
    uint64_t rng, seed, launches;
} rt;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t sim_random(void)
{
    if (rt.seed != sim_settings()->seed) {
        rt.rng = rt.seed = sim_settings()->seed;
    }
    uint64_t x = rt.rng += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

// ---- calls ----

static void begin(void)
{
    rt.ready = true;
    rt.caller = pthread_self();
    memory_reset();
    queue_reset();
    race_reset();
}

static void forget_all(void)
{
    while (rt.streams) {
        struct CUstream_st *s = rt.streams;
        rt.streams = s->next;
        free(s);
    }
    while (rt.events) {
        struct CUevent_st *e = rt.events;
        rt.events = e->next;
        free(e);
    }
    memset(&rt, 0, sizeof rt);
}

bool sim_lock(void)
{
    pthread_mutex_lock(&lock);
    if (!rt.ready) {
        pthread_mutex_unlock(&lock);
        return false;
    }
    return true;
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

cudaError_t sim_enter(void)
{
    pthread_mutex_lock(&lock);
    if (!rt.ready) {
        begin();
    }
    if (!pthread_equal(rt.caller, pthread_self())) {
        sim_report_once(SIM_MISUSE, "thread", "the CUDA API is called from a second thread");
    }
    if (rt.lost) {
        return cudaErrorDevicesUnavailable;
    }
    switch (sim_settings()->failure) {
    case SIM_NO_DRIVER:
    case SIM_OLD_DRIVER:
        return cudaErrorInsufficientDriver;
    case SIM_NO_DEVICE:
        return cudaErrorNoDevice;
    default:
        queue_poke();
        return cudaSuccess;
    }
}

cudaError_t sim_leave(cudaError_t code)
{
    if (code != cudaSuccess) {
        rt.last = code;
    }
    memory_close();
    pthread_mutex_unlock(&lock);
    return code;
}

static cudaError_t misuse(const char *call, const char *what, const void *p, cudaError_t code)
{
    char key[128];
    snprintf(key, sizeof key, "%s|%s", call, what);
    sim_report_once(SIM_MISUSE, key, "%s(%p): %s", call, p, what);
    return code;
}

// ---- devices ----

cudaError_t cudaGetDeviceCount(int *count)
{
    cudaError_t code = sim_enter();
    *count = code == cudaSuccess ? sim_settings()->devices : 0;
    return sim_leave(code);
}

static cudaError_t device_call(int device)
{
    cudaError_t code = sim_enter();
    bool known = device >= 0 && device < sim_settings()->devices;
    return code == cudaSuccess && !known ? cudaErrorInvalidDevice : code;
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t code = device_call(device);
    if (code == cudaSuccess && device != rt.device && rt.streams) {
        code = misuse(__func__, "another device than before", NULL, cudaErrorInvalidDevice);
    }
    rt.device = code == cudaSuccess ? device : rt.device;
    return sim_leave(code);
}

cudaError_t cudaGetDevice(int *device)
{
    *device = rt.device;
    return sim_leave(sim_enter());
}

cudaError_t cudaSetDeviceFlags(unsigned flags)
{
    (void)flags;
    return sim_leave(sim_enter());
}

// As of an H100 (compute capability 9.0), where programs might ask.
static const struct {
    enum cudaDeviceAttr attribute;
    int value;
} attributes[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)SMEM_MAX},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1 << 10},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrHostRegisterSupported, 1},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrL2CacheSize, 50 << 20},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrEccEnabled, 1},
    {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrPageableMemoryAccess, 0},
    {cudaDevAttrIntegrated, 0},
    {cudaDevAttrComputeMode, cudaComputeModeDefault},
};

static int capability(void) // 10 times major, plus minor
{
    return sim_settings()->failure == SIM_SM_75 ? 75 : 90;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    cudaError_t code = device_call(device);
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    if (attribute == cudaDevAttrComputeCapabilityMajor ||
        attribute == cudaDevAttrComputeCapabilityMinor) {
        bool major = attribute == cudaDevAttrComputeCapabilityMajor;
        *value = major ? capability() / 10 : capability() % 10;
        return sim_leave(cudaSuccess);
    }
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (attributes[i].attribute == attribute) {
            *value = attributes[i].value;
            return sim_leave(cudaSuccess);
        }
    }
    return sim_leave(cudaErrorNotSupported);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    cudaError_t code = device_call(device);
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "CPU runtime");
    snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "sim %d", device);
    p->totalGlobalMem = sim_settings()->memory;
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->sharedMemPerBlock = (size_t)48 << 10;
    p->sharedMemPerBlockOptin = SMEM_MAX;
    p->sharedMemPerMultiprocessor = (size_t)228 << 10;
    p->reservedSharedMemPerBlock = (size_t)1 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT32_MAX;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->multiProcessorCount = 132;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->asyncEngineCount = 3;
    p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
    p->hostRegisterSupported = p->canUseHostPointerForRegisteredMem = 1;
    p->streamPrioritiesSupported = p->ECCEnabled = p->cooperativeLaunch = 1;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    return sim_leave(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    sim_enter();
    enum sim_failure failure = sim_settings()->failure;
    *version = failure == SIM_NO_DRIVER ? 0 : failure == SIM_OLD_DRIVER ? 11040 : DRIVER_VERSION;
    return sim_leave(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    sim_enter();
    *version = CUDART_VERSION;
    return sim_leave(cudaSuccess);
}

// ---- the host waits ----

static cudaError_t settle(const struct clock *target, const char *call)
{
    return queue_settle(target, call) ? cudaSuccess : cudaErrorLaunchTimeout;
}

static cudaError_t settle_all(const char *call)
{
    struct clock all;
    queue_all(&all);
    return settle(&all, call);
}

cudaError_t cudaDeviceSynchronize(void)
{
    cudaError_t code = sim_enter();
    return sim_leave(code != cudaSuccess ? code : settle_all(__func__));
}

cudaError_t cudaDeviceReset(void)
{
    pthread_mutex_lock(&lock);
    if (rt.ready) {
        forget_all();
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

// ---- memory ----

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    cudaError_t code = sim_enter();
    *p = NULL;
    if (code != cudaSuccess || bytes == 0) {
        return sim_leave(code);
    }
    *p = sim_settings()->failure == SIM_OOM ? NULL : memory_take(bytes, true);
    return sim_leave(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}

// Of either kind: waits for everything, as the real one does.
static cudaError_t free_span(void *p, int kind, const char *call)
{
    if (!p) {
        return cudaSuccess;
    }
    const struct span *span = memory_at(p);
    if (!span || span->lo != (uintptr_t)p || (int)span->kind != kind) {
        return misuse(call, "is no such allocation (freed before?)", p, cudaErrorInvalidValue);
    }
    cudaError_t code = settle_all(call);
    if (code == cudaSuccess) {
        memory_give(p);
    }
    return code;
}

cudaError_t cudaFree(void *p)
{
    cudaError_t code = sim_enter();
    return sim_leave(code != cudaSuccess ? code : free_span(p, SPAN_DEVICE, __func__));
}

// Kernels take device memory when they are loaded, and keep it: less is free than there was before
// the first launch.
#define LOADED ((size_t)4096)

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    cudaError_t code = sim_enter();
    *total = sim_settings()->memory;
    size_t loaded = rt.launches ? LOADED : 0;
    *free_bytes = code == cudaSuccess && memory_left() > loaded ? memory_left() - loaded : 0;
    return sim_leave(code);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    cudaError_t code = sim_enter();
    *p = NULL;
    if (code != cudaSuccess || bytes == 0) {
        return sim_leave(code);
    }
    *p = sim_settings()->failure == SIM_PIN ? NULL : memory_take(bytes, false);
    return sim_leave(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    return cudaHostAlloc(p, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *p)
{
    cudaError_t code = sim_enter();
    return sim_leave(code != cudaSuccess ? code : free_span(p, SPAN_PINNED, __func__));
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    (void)flags;
    cudaError_t code = sim_enter();
    if (code == cudaSuccess && (!p || bytes == 0)) {
        code = cudaErrorInvalidValue;
    } else if (code == cudaSuccess && sim_settings()->failure == SIM_PIN) {
        code = cudaErrorMemoryAllocation;
    } else if (code == cudaSuccess && !memory_register(p, bytes)) {
        code = cudaErrorHostMemoryAlreadyRegistered;
    }
    return sim_leave(code);
}

cudaError_t cudaHostUnregister(void *p)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess) {
        code = free_span(p, SPAN_REGISTERED, __func__);
        code = code == cudaErrorInvalidValue ? cudaErrorHostMemoryNotRegistered : code;
    }
    return sim_leave(code);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    cudaError_t code = sim_enter();
    const struct span *span = code == cudaSuccess ? memory_at(host) : NULL;
    *device = host;
    if (code == cudaSuccess && (!span || span->kind == SPAN_DEVICE)) {
        code = cudaErrorInvalidValue;
    }
    return sim_leave(code);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    cudaError_t code = sim_enter();
    const struct span *span = code == cudaSuccess ? memory_at(p) : NULL;
    memset(a, 0, sizeof *a);
    if (!span) {
        a->type = cudaMemoryTypeUnregistered;
        a->device = -2; // as the real one says
        a->hostPointer = (void *)(uintptr_t)p;
        return sim_leave(code);
    }
    a->type = span->kind == SPAN_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    a->devicePointer = (void *)(uintptr_t)p;
    a->hostPointer = span->kind == SPAN_DEVICE ? NULL : a->devicePointer;
    return sim_leave(code);
}

// ---- streams ----

// The lane of a stream, or -1, which is reported.
static int lane_of(cudaStream_t stream, const char *call)
{
    if (stream == NULL || stream == cudaStreamLegacy) {
        return LANE_DEFAULT;
    }
    for (const struct CUstream_st *s = rt.streams; s; s = s->next) {
        if (s == stream && s->live) {
            return s->lane;
        }
    }
    misuse(call, "no such stream (destroyed?)", stream, cudaErrorInvalidResourceHandle);
    return -1;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    cudaError_t code = sim_enter();
    *stream = NULL;
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    int lane = queue_open(!(flags & cudaStreamNonBlocking), priority);
    if (lane < 0) {
        return sim_leave(misuse(__func__, "the CPU runtime has no more streams", NULL,
                                cudaErrorMemoryAllocation));
    }
    struct CUstream_st *s = malloc(sizeof *s);
    if (!s) {
        abort();
    }
    *s = (struct CUstream_st){true, lane, priority, flags, rt.streams};
    rt.streams = s;
    *stream = s;
    return sim_leave(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return sim_leave(sim_enter());
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    int lane = lane_of(stream, __func__);
    if (lane < LANE_FIRST) {
        return sim_leave(cudaErrorInvalidResourceHandle);
    }
    stream->live = false; // its address stays taken, and is no stream
    queue_close(lane);
    return sim_leave(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    int lane = code == cudaSuccess ? lane_of(stream, __func__) : LANE_DEFAULT;
    if (lane < 0) {
        code = cudaErrorInvalidResourceHandle;
    }
    return sim_leave(code != cudaSuccess ? code : settle(queue_clock(lane), __func__));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    int lane = code == cudaSuccess ? lane_of(stream, __func__) : LANE_DEFAULT;
    if (lane < 0) {
        code = cudaErrorInvalidResourceHandle;
    }
    if (code == cudaSuccess && !queue_poll(queue_clock(lane))) {
        code = cudaErrorNotReady;
    }
    return sim_leave(code);
}

// ---- events ----

static bool is_event(cudaEvent_t event, const char *call)
{
    if (event && event->magic == EVENT_MAGIC) {
        return true;
    }
    misuse(call, "no such event (destroyed?)", event, cudaErrorInvalidResourceHandle);
    return false;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    cudaError_t code = sim_enter();
    *event = NULL;
    if (code == cudaSuccess) {
        struct CUevent_st *e = calloc(1, sizeof *e);
        if (!e) {
            abort();
        }
        e->magic = EVENT_MAGIC;
        e->timed = !(flags & cudaEventDisableTiming);
        e->next = rt.events;
        rt.events = e;
        *event = e;
    }
    return sim_leave(code);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess && !is_event(event, __func__)) {
        code = cudaErrorInvalidResourceHandle;
    }
    if (code == cudaSuccess) {
        event->magic = 0; // its address stays taken
    }
    return sim_leave(code);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    int lane = lane_of(stream, __func__);
    if (lane < 0 || !is_event(event, __func__)) {
        return sim_leave(cudaErrorInvalidResourceHandle);
    }
    event->seq =
        queue_add(lane, &(struct op){.kind = OP_MARK, .name = "event", .engine = ENGINE_NONE});
    event->lane = lane;
    event->clock = *queue_clock(lane);
    event->recorded = true;
    return sim_leave(cudaSuccess);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    (void)flags;
    return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    cudaError_t code = sim_enter();
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    int lane = lane_of(stream, __func__);
    if (lane < 0 || !is_event(event, __func__)) {
        return sim_leave(cudaErrorInvalidResourceHandle);
    }
    queue_wait(lane, &event->clock); // not recorded: nothing to wait for, as on a GPU
    return sim_leave(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess && !is_event(event, __func__)) {
        code = cudaErrorInvalidResourceHandle;
    }
    if (code == cudaSuccess && !queue_poll(&event->clock)) {
        code = cudaErrorNotReady;
    }
    return sim_leave(code);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess && !is_event(event, __func__)) {
        code = cudaErrorInvalidResourceHandle;
    }
    if (code == cudaSuccess) {
        code = settle(&event->clock, __func__);
    }
    return sim_leave(code);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    cudaError_t code = sim_enter();
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    if (!is_event(from, __func__) || !is_event(to, __func__) || !from->recorded || !to->recorded ||
        !from->timed || !to->timed) {
        return sim_leave(cudaErrorInvalidResourceHandle);
    }
    if (!queue_done(&from->clock) || !queue_done(&to->clock)) {
        return sim_leave(cudaErrorNotReady);
    }
    double a = queue_note(from->lane, from->seq)->finish, b = queue_note(to->lane, to->seq)->finish;
    *ms = (float)(1e3 * (b - a));
    return sim_leave(cudaSuccess);
}

// ---- copies and fills ----

static cudaError_t copy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                        int lane, bool async, const char *call)
{
    static const char *const names[] = {"copy on the host", "copy to the device",
                                        "copy to the host", "copy on the device"};
    static const enum engine engines[] = {ENGINE_OUT, ENGINE_IN, ENGINE_OUT, ENGINE_COMPUTE};
    bool from_device = memory_is_device(src), to_device = memory_is_device(dst);
    int actual = 2 * from_device + to_device; // as cudaMemcpyKind counts
    if (lane < 0) {
        return cudaErrorInvalidResourceHandle;
    }
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (kind != cudaMemcpyDefault && (int)kind != actual) {
        return misuse(call, "the addresses do not lie as the direction says", dst,
                      cudaErrorInvalidValue);
    }
    bool pageable = (!from_device && !memory_ours(src)) || (!to_device && !memory_ours(dst));
    if (pageable && async) {
        sim_report_once(SIM_PAGEABLE, names[actual],
                        "%s: %zu bytes from %p to %p, %s memory that "
                        "is not pinned",
                        names[actual], bytes, src, dst, from_device ? "to" : "from");
    }
    struct op op = {.kind = OP_COPY,
                    .name = names[actual],
                    .dst = dst,
                    .src = src,
                    .bytes = bytes,
                    .engine = engines[actual]};
    if (pageable && to_device) {
        // The host may go on as soon as the bytes are in a buffer of the driver's.
        op.src = op.staged = malloc(bytes);
        if (!op.staged) {
            return cudaErrorMemoryAllocation;
        }
        memcpy(op.staged, src, bytes);
    }
    queue_add(lane, &op);
    bool waits = to_device ? !from_device && !async && !pageable : !async || pageable;
    return waits ? settle(queue_clock(lane), call) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess) {
        code = copy(dst, src, bytes, kind, lane_of(stream, __func__), true, __func__);
    }
    return sim_leave(code);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess) {
        code = copy(dst, src, bytes, kind, LANE_DEFAULT, false, __func__);
    }
    return sim_leave(code);
}

static cudaError_t fill(void *dst, int value, size_t bytes, int lane, bool async, const char *call)
{
    if (lane < 0) {
        return cudaErrorInvalidResourceHandle;
    }
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (!memory_ours(dst)) {
        return misuse(call, "is neither device nor pinned memory", dst, cudaErrorInvalidValue);
    }
    queue_add(lane, &(struct op){.kind = OP_FILL,
                                 .name = "fill",
                                 .dst = dst,
                                 .bytes = bytes,
                                 .value = value,
                                 .engine = ENGINE_COMPUTE});
    return async || memory_is_device(dst) ? cudaSuccess : settle(queue_clock(lane), call);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess) {
        code = fill(dst, value, bytes, lane_of(stream, __func__), true, __func__);
    }
    return sim_leave(code);
}

cudaError_t cudaMemset(void *dst, int value, size_t bytes)
{
    cudaError_t code = sim_enter();
    if (code == cudaSuccess) {
        code = fill(dst, value, bytes, LANE_DEFAULT, false, __func__);
    }
    return sim_leave(code);
}

// ---- what others do ----

bool queue_external(cudaStream_t stream, const char *name, bool (*get_on)(void *state), void *state)
{
    cudaError_t code = sim_enter();
    int lane = code == cudaSuccess ? lane_of(stream, name) : -1;
    if (lane >= 0) {
        queue_add(lane, &(struct op){.kind = OP_EXTERNAL,
                                     .name = name,
                                     .engine = ENGINE_NONE,
                                     .get_on = get_on,
                                     .state = state});
    }
    sim_leave(code);
    return lane >= 0;
}

// ---- launches ----

static cudaError_t launchable(const struct sim_kernel *k)
{
    const dim3 g = k->grid, b = k->block;
    if (!g.x || !g.y || !g.z || g.x > INT32_MAX || g.y > 65535 || g.z > 65535 || !b.x || !b.y ||
        !b.z || b.x > 1024 || b.y > 1024 || b.z > 64 || b.x * b.y * b.z > 1024) {
        return cudaErrorInvalidConfiguration;
    }
    return k->smem > SMEM_MAX ? cudaErrorInvalidValue : cudaSuccess;
}

void sim_launch(const struct sim_kernel *kernel, cudaStream_t stream)
{
    cudaError_t code = sim_enter();
    const struct sim_settings *s = sim_settings();
    int lane = -1;
    if (code == cudaSuccess) {
        code = launchable(kernel);
    }
    if (code == cudaSuccess) {
        lane = lane_of(stream, kernel->name);
        code = lane < 0 ? cudaErrorInvalidResourceHandle : cudaSuccess;
    }
    if (code == cudaSuccess) {
        rt.launches++;
        if (s->failure == SIM_LOST && rt.launches >= s->failure_launch) {
            rt.lost = true;
            code = cudaErrorDevicesUnavailable;
        } else if (s->failure == SIM_SM_75) {
            code = cudaErrorNoKernelImageForDevice;
        }
    }
    if (code == cudaSuccess) {
        queue_add(lane, &(struct op){.kind = OP_KERNEL,
                                     .name = kernel->name,
                                     .kernel = *kernel,
                                     .engine = ENGINE_COMPUTE,
                                     .hangs = s->failure == SIM_HANG &&
                                              rt.launches == s->failure_launch});
    } else if (kernel->release) {
        kernel->release(kernel->args);
    }
    sim_leave(code);
}

cudaError_t cudaFuncSetAttribute(const void *func, enum cudaFuncAttribute attribute, int value)
{
    (void)func;
    cudaError_t code = sim_enter();
    if (code == cudaSuccess && attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        code = value < 0 || value > (int)SMEM_MAX ? cudaErrorInvalidValue : cudaSuccess;
    } else if (code == cudaSuccess && attribute != cudaFuncAttributePreferredSharedMemoryCarveout) {
        code = cudaErrorNotSupported;
    }
    return sim_leave(code);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *func)
{
    (void)func;
    cudaError_t code = sim_enter();
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->maxDynamicSharedSizeBytes = (int)SMEM_MAX;
    a->ptxVersion = a->binaryVersion = capability();
    return sim_leave(code);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *func,
                                                                   int block_size, size_t smem,
                                                                   unsigned flags)
{
    (void)func;
    (void)flags;
    cudaError_t code = sim_enter();
    *blocks = 0;
    if (code == cudaSuccess && block_size < 1) {
        code = cudaErrorInvalidValue;
    }
    if (code == cudaSuccess && block_size <= 1024 && smem <= SMEM_MAX) {
        int by_threads = 2048 / ((block_size + 31) / 32 * 32);
        int by_smem = (int)(((size_t)228 << 10) / (smem + 1024));
        *blocks = by_threads < by_smem ? by_threads : by_smem;
        *blocks = *blocks < 32 ? *blocks : 32;
    }
    return sim_leave(code);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *func,
                                                          int block_size, size_t smem)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, func, block_size, smem,
                                                                  0);
}

// ---- errors ----

cudaError_t cudaGetLastError(void)
{
    pthread_mutex_lock(&lock);
    cudaError_t code = rt.last;
    if (!rt.lost) {
        rt.last = cudaSuccess;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

cudaError_t cudaPeekAtLastError(void)
{
    pthread_mutex_lock(&lock);
    cudaError_t code = rt.last;
    pthread_mutex_unlock(&lock);
    return code;
}

#define ERRORS(X)                                                                                  \
    X(cudaSuccess, "no error")                                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                                  \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") \
    X(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable")            \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
    X(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device") \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                   \
    X(cudaErrorNotReady, "device not ready")                                                       \
    X(cudaErrorLaunchTimeout, "the launch timed out and was terminated")                           \
    X(cudaErrorHostMemoryAlreadyRegistered, "host memory is already registered")                   \
    X(cudaErrorHostMemoryNotRegistered, "host memory is not registered")                           \
    X(cudaErrorNotSupported, "operation not supported")

const char *cudaGetErrorName(cudaError_t code)
{
    switch (code) {
#define NAME(code, text)                                                                           \
    case code:                                                                                     \
        return #code;
        ERRORS(NAME)
    default:
        return "unrecognized error code";
    }
}

const char *cudaGetErrorString(cudaError_t code)
{
    switch (code) {
#define TEXT(code, text)                                                                           \
    case code:                                                                                     \
        return text;
        ERRORS(TEXT)
    default:
        return "unrecognized error code";
    }
}
