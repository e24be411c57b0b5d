// runtime.c - our own functions with the names of the CUDA runtime's: devices, memory, streams,
// events, copies, errors. They check what they are given more strictly than the real ones; when
// something runs, and what is ordered with what, is queue.c's.
//
// Device memory is one reservation of address space, accessible only while an operation runs.
// Allocations lie apart, with room between them, and an address is not soon used again: what is
// beyond an allocation, or was freed, belongs to nobody.
#include "test/cuda/host.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE      ((uintptr_t)2 << 20)
#define PINNED_BYTES   ((size_t)64 << 30) // of address space
#define SMEM_MAX       ((size_t)227 << 10)
#define EVENT_MAGIC    UINT64_C(0x6576656e74)
#define FREED          64
#define DRIVER_VERSION 13000

struct region {
    uintptr_t base, end, next; // next: where to look for room first
    uintptr_t align;
    struct shadow shadow;
    size_t reserved; // behind base, with what aligning it has cost
    void *reservation;
};

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
    bool ready, lost, open;
    pthread_t caller;
    cudaError_t last;
    struct region device, pinned;
    uintptr_t device_top; // as far as device memory has been used
    size_t device_used;
    struct span *live; // ascending
    size_t n_live, live_room;
    struct span freed[FREED]; // the last ones
    unsigned allocations, frees;
    struct CUstream_st *streams;
    struct CUevent_st *events;
    uint64_t rng, seed, launches;
    struct sigaction before; // us
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

// ---- regions and spans ----

static void *reserve(size_t bytes, int protection)
{
    void *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("sim: no address space for memory");
        abort();
    }
    return p;
}

static struct shadow shadow_make(uintptr_t origin, size_t bytes)
{
    size_t pages = bytes / (4 * PAGE_CELLS) + 1;
    return (struct shadow){
        .origin = origin,
        .cells = reserve(pages * PAGE_CELLS * sizeof(uint32_t), PROT_READ | PROT_WRITE),
        .pages = reserve(pages * sizeof(uint32_t), PROT_READ | PROT_WRITE)};
}

static void shadow_drop(const struct shadow *s, size_t bytes)
{
    size_t pages = bytes / (4 * PAGE_CELLS) + 1;
    munmap(s->cells, pages * PAGE_CELLS * sizeof(uint32_t));
    munmap(s->pages, pages * sizeof(uint32_t));
}

// Huge pages: of a region that is large, and much used. They make mprotect cheap.
static void region_make(struct region *r, size_t bytes, uintptr_t align, int protection, bool huge)
{
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    r->reserved = bytes + HUGE_PAGE;
    r->reservation = reserve(r->reserved, protection);
    r->base = ((uintptr_t)r->reservation + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    r->end = r->base + bytes;
    r->next = r->base;
    r->align = align;
    r->shadow = shadow_make(r->base, bytes);
    if (huge) {
        madvise((void *)r->base, bytes, MADV_HUGEPAGE);
    }
}

static void region_drop(struct region *r)
{
    if (r->reservation) {
        munmap(r->reservation, r->reserved);
        shadow_drop(&r->shadow, r->end - r->base);
    }
}

static bool region_has(const struct region *r, const void *p)
{
    return (uintptr_t)p >= r->base && (uintptr_t)p < r->end;
}

// Index of the first span that ends after `at`.
static size_t span_index(uintptr_t at)
{
    size_t lo = 0, hi = rt.n_live;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (rt.live[mid].hi <= at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

const struct span *memory_at(const void *p)
{
    size_t i = span_index((uintptr_t)p);
    return i < rt.n_live && rt.live[i].lo <= (uintptr_t)p ? &rt.live[i] : NULL;
}

bool memory_ours(const void *p)
{
    return region_has(&rt.device, p) || region_has(&rt.pinned, p) || memory_at(p);
}

static void span_insert(const struct span *span)
{
    if (rt.n_live == rt.live_room) {
        rt.live_room = rt.live_room ? 2 * rt.live_room : 64;
        rt.live = realloc(rt.live, rt.live_room * sizeof *rt.live);
        if (!rt.live) {
            abort();
        }
    }
    size_t i = span_index(span->lo);
    memmove(rt.live + i + 1, rt.live + i, (rt.n_live - i) * sizeof *rt.live);
    rt.live[i] = *span;
    rt.live[i].number = ++rt.allocations;
    rt.n_live++;
    race_moved();
}

static void span_remove(const void *p)
{
    size_t i = span_index((uintptr_t)p);
    struct span span = rt.live[i];
    race_forget(&span);
    memmove(rt.live + i, rt.live + i + 1, (rt.n_live - i - 1) * sizeof *rt.live);
    rt.n_live--;
    rt.freed[rt.frees++ % FREED] = span;
    race_moved();
}

// Room for an allocation, with something unused around it; 0: none.
static uintptr_t region_room(const struct region *r, size_t bytes)
{
    for (int pass = 0; pass < 2; pass++) {
        uintptr_t at = pass ? r->base : r->next;
        for (size_t i = span_index(at); i < rt.n_live && rt.live[i].lo < r->end; i++) {
            if (rt.live[i].lo > at && rt.live[i].lo - at > bytes) {
                break;
            }
            at = (rt.live[i].hi + 2 * r->align - 1) / r->align * r->align;
        }
        if (at < r->end && r->end - at >= bytes) {
            return at;
        }
    }
    return 0;
}

static void *region_take(struct region *r, size_t bytes, int kind)
{
    uintptr_t at = region_room(r, bytes + r->align);
    if (!at) {
        return NULL;
    }
    r->next = (at + bytes + 2 * r->align - 1) / r->align * r->align;
    struct span span = {.lo = at, .hi = at + bytes, .shadow = r->shadow, .kind = kind};
    span_insert(&span);
    return (void *)at;
}

static const char *kind_name(const struct span *s)
{
    return s->kind == SPAN_DEVICE ? "device" : s->kind == SPAN_PINNED ? "pinned" : "registered";
}

void memory_describe(char *text, size_t size, const void *p)
{
    uintptr_t at = (uintptr_t)p;
    const struct span *span = memory_at(p), *near = NULL;
    const char *how = "";
    size_t distance = 0;
    if (span) {
        snprintf(text, size, "%s allocation %u of %zu bytes, at byte %zu", kind_name(span),
                 span->number, (size_t)(span->hi - span->lo), (size_t)(at - span->lo));
        return;
    }
    size_t i = span_index(at);
    for (size_t k = 0; k < FREED && k < rt.frees; k++) {
        const struct span *f = &rt.freed[(rt.frees - 1 - k) % FREED];
        if (at >= f->lo && at < f->hi) {
            snprintf(text, size, "freed: %s allocation %u of %zu bytes, at byte %zu", kind_name(f),
                     f->number, (size_t)(f->hi - f->lo), (size_t)(at - f->lo));
            return;
        }
    }
    if (!memory_ours(p)) {
        snprintf(text, size, "the host's own memory");
        return;
    }
    if (i > 0) {
        near = &rt.live[i - 1];
        distance = at - near->hi;
        how = "behind the end of";
    }
    if (i < rt.n_live && (!near || rt.live[i].lo - at < distance)) {
        near = &rt.live[i];
        distance = near->lo - at;
        how = "before";
    }
    if (near) {
        snprintf(text, size, "%zu bytes %s %s allocation %u of %zu bytes", distance, how,
                 kind_name(near), near->number, (size_t)(near->hi - near->lo));
    } else {
        snprintf(text, size, "nothing is allocated");
    }
}

// ---- protection ----

static void on_fault(int sig, siginfo_t *info, void *context)
{
    (void)sig;
    (void)context;
    char where[160], text[400];
    struct sigaction next = rt.before;
    if (region_has(&rt.device, info->si_addr)) {
        memory_describe(where, sizeof where, info->si_addr);
        int n = snprintf(text, sizeof text, "sim: host code touches device memory at %p (%s)\n",
                         info->si_addr, where);
        (void)!write(STDERR_FILENO, text, (size_t)n);
        memset(&next, 0, sizeof next);
        next.sa_handler = SIG_DFL;
    } else if (rt.open) {
        int n = snprintf(text, sizeof text, "sim: %s faults at %p; %s\n", sim_running(),
                         info->si_addr, sim_where());
        (void)!write(STDERR_FILENO, text, (size_t)n);
    }
    sigaction(SIGSEGV, &next, NULL); // the access is tried again, and is that one's
}

static void protect(int protection)
{
    uintptr_t bytes = rt.device_top - rt.device.base;
    if (bytes && mprotect((void *)rt.device.base, bytes, protection)) {
        perror("sim: mprotect");
        abort();
    }
    rt.open = protection != PROT_NONE;
}

void memory_open(void)
{
    if (!rt.open) {
        protect(PROT_READ | PROT_WRITE);
    }
}

static void memory_close(void)
{
    if (!rt.open) {
        return;
    }
    protect(PROT_NONE);
    // Test frameworks put their own handler in place at any time.
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, old;
    sigaction(SIGSEGV, &ours, &old);
    if (!(old.sa_flags & SA_SIGINFO) || old.sa_sigaction != on_fault) {
        rt.before = old;
    }
}

// ---- calls ----

static void begin(void)
{
    const struct sim_settings *s = sim_settings();
    rt.ready = true;
    rt.caller = pthread_self();
    region_make(&rt.device, 2 * s->memory + ((size_t)64 << 20), 256, PROT_NONE,
                s->memory >= (size_t)16 << 20);
    region_make(&rt.pinned, PINNED_BYTES, 4096, PROT_READ | PROT_WRITE, false);
    rt.device_top = rt.device.base;
    queue_reset();
    race_reset();
}

static void forget_all(void)
{
    for (size_t i = 0; i < rt.n_live; i++) {
        if (rt.live[i].kind == SPAN_REGISTERED) {
            shadow_drop(&rt.live[i].shadow, rt.live[i].hi - rt.live[i].shadow.origin);
        }
    }
    region_drop(&rt.device);
    region_drop(&rt.pinned);
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
    free(rt.live);
    struct sigaction before = rt.before;
    memset(&rt, 0, sizeof rt);
    rt.before = before;
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
    *count = code == cudaSuccess;
    return sim_leave(code);
}

static cudaError_t device_call(int device)
{
    cudaError_t code = sim_enter();
    return code == cudaSuccess && device != 0 ? cudaErrorInvalidDevice : code;
}

cudaError_t cudaSetDevice(int device)
{
    return sim_leave(device_call(device));
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
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
    size_t rounded = (bytes + 255) / 256 * 256;
    if (sim_settings()->failure == SIM_OOM || bytes > sim_settings()->memory ||
        rounded > sim_settings()->memory - rt.device_used ||
        !(*p = region_take(&rt.device, bytes, SPAN_DEVICE))) {
        return sim_leave(cudaErrorMemoryAllocation);
    }
    rt.device_used += rounded;
    uintptr_t top = ((uintptr_t)*p + bytes + HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE;
    if (top > rt.device_top) {
        rt.device_top = top < rt.device.end ? top : rt.device.end;
        rt.open = false;
    }
    memory_open();
    memset(*p, 0xff, bytes); // NaN in every type
    return sim_leave(cudaSuccess);
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
    if (code != cudaSuccess) {
        return code;
    }
    size_t bytes = span->hi - span->lo;
    struct shadow shadow = span->shadow;
    uintptr_t end = span->hi;
    span_remove(p);
    if (kind == SPAN_REGISTERED) {
        shadow_drop(&shadow, end - shadow.origin);
        return cudaSuccess;
    }
    uintptr_t lo = ((uintptr_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uintptr_t hi = ((uintptr_t)p + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (hi > lo) {
        madvise((void *)lo, hi - lo, MADV_DONTNEED);
    }
    if (kind == SPAN_DEVICE) {
        rt.device_used -= (bytes + 255) / 256 * 256;
    }
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    cudaError_t code = sim_enter();
    return sim_leave(code != cudaSuccess ? code : free_span(p, SPAN_DEVICE, __func__));
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    cudaError_t code = sim_enter();
    *total = sim_settings()->memory;
    *free_bytes = *total - rt.device_used;
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
    if (sim_settings()->failure == SIM_PIN || bytes > PINNED_BYTES / 2 ||
        !(*p = region_take(&rt.pinned, bytes, SPAN_PINNED))) {
        return sim_leave(cudaErrorMemoryAllocation);
    }
    memset(*p, 0xff, bytes);
    return sim_leave(cudaSuccess);
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
    uintptr_t at = (uintptr_t)p;
    if (code != cudaSuccess) {
        return sim_leave(code);
    }
    if (!p || bytes == 0 || memory_ours(p)) {
        return sim_leave(!p || bytes == 0 ? cudaErrorInvalidValue
                                          : cudaErrorHostMemoryAlreadyRegistered);
    }
    size_t i = span_index(at);
    if (i < rt.n_live && rt.live[i].lo < at + bytes) {
        return sim_leave(cudaErrorHostMemoryAlreadyRegistered);
    }
    if (sim_settings()->failure == SIM_PIN) {
        return sim_leave(cudaErrorMemoryAllocation);
    }
    uintptr_t origin = at & ~(uintptr_t)3;
    struct span span = {.lo = at, .hi = at + bytes, .kind = SPAN_REGISTERED};
    span.shadow = shadow_make(origin, span.hi - origin);
    span_insert(&span);
    return sim_leave(cudaSuccess);
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
    bool from_device = region_has(&rt.device, src), to_device = region_has(&rt.device, dst);
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
    return async || region_has(&rt.device, dst) ? cudaSuccess : settle(queue_clock(lane), call);
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
