// device.c - the cuda device: one GPU, a stream per lane, and the memory that the plan asks for.
//
// Everything is taken once: the arena with the device's own workspace behind it, and pinned memory
// of exactly the size that is needed. After the first error nothing more is queued: device_status
// tells what it was.
#include "kernels/clock.h"
#include "kernels/cuda/attention.h"
#include "kernels/driver.h"

#include <math.h>
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATIENCE_S 300.0 // with a stream that does not end
#define SPIN_S     0.02  // before the thread sleeps between questions
#define ORIGIN_S   5.0   // after which times are counted from a new origin: they are floats

// What the plan leaves free: the driver's own needs grow while kernels are loaded.
static size_t reserve(size_t total)
{
    size_t most = (size_t)512 << 20;
    return total / 64 < most ? total / 64 : most;
}

// ---- errors -------------------------------------------------------------------------------------

void cuda_fail(struct device *dev, const char *call, const char *why)
{
    struct cuda *cuda = cuda_of(dev);
    if (!cuda->error.status) {
        error_set(&cuda->error, STATUS_FAIL, "%s: %s", call, why);
    }
}

bool cuda_ok(struct device *dev, const char *call, cudaError_t code)
{
    if (code != cudaSuccess) {
        char why[256];
        snprintf(why, sizeof why, "%s (%s)", cudaGetErrorString(code), cudaGetErrorName(code));
        cuda_fail(dev, call, why);
    }
    return code == cudaSuccess;
}

bool cuda_launched(struct device *dev, const char *kernel)
{
    char call[128];
    cudaError_t code = cudaGetLastError();
    if (code == cudaSuccess) {
        return true;
    }
    snprintf(call, sizeof call, "launch of %s", kernel);
    return cuda_ok(dev, call, code);
}

// The call that stands in the source, with its name.
#define DO(dev, call) cuda_ok(dev, #call, call)

static bool failed(struct device *dev)
{
    return cuda_of(dev)->error.status != STATUS_OK;
}

// The device has failed where what others have queued on it has.
static bool watched(struct device *dev)
{
    struct error *error = &cuda_of(dev)->error;
    if (!failed(dev) && dev->watch) {
        dev->watch(dev->watch_ctx, error);
    }
    return !failed(dev);
}

static int cuda_status(struct device *dev, struct error *err)
{
    watched(dev);
    *err = cuda_of(dev)->error;
    return err->status;
}

// ---- memory -------------------------------------------------------------------------------------

static double mib(size_t bytes)
{
    return (double)bytes / (1 << 20);
}

static int cuda_arena(struct device *dev, size_t bytes, void **base, struct error *err)
{
    struct cuda *cuda = cuda_of(dev);
    size_t all = device_round(bytes) + CUDA_LT_BYTES + CUDA_SCRATCH_BYTES, left = 0, total = 0;
    if (cuda->arena) {
        return error_set(err, STATUS_FAIL, "the device arena is sealed at %zu bytes",
                         cuda->arena_bytes);
    }
    if (bytes > dev->memory) {
        return error_set(err, STATUS_FAIL,
                         "%zu bytes of device memory are asked for, but the device has %zu: a "
                         "larger --device-memory, or a smaller model, --micro-batch or --seq",
                         bytes, dev->memory);
    }
    void *arena;
    cudaError_t code = cudaMalloc(&arena, all);
    if (code != cudaSuccess) {
        cudaGetLastError(); // it has been seen
        cudaMemGetInfo(&left, &total);
        return error_set(err, STATUS_FAIL,
                         "the plan takes %zu bytes of device memory and %zu more for workspaces, "
                         "but %zu of %zu are free (%s): another process may have taken some "
                         "meanwhile; free it, or give a --device-memory below %.0f MiB",
                         bytes, all - bytes, left, total, cudaGetErrorString(code),
                         mib(left > reserve(total) ? left - reserve(total) : 0));
    }
    cuda->arena = arena;
    cuda->arena_bytes = bytes;
    cuda->lt_workspace = cuda->arena + device_round(bytes);
    cuda->scratch = (float *)(cuda->arena + device_round(bytes) + CUDA_LT_BYTES);
    DO(dev, cudaMemsetAsync(arena, 0, all, cuda->current));
    DO(dev, cudaStreamSynchronize(cuda->current));
    *base = arena;
    return cuda_status(dev, err);
}

static int cuda_host_arena(struct device *dev, size_t bytes, bool pinned, void **base,
                           struct error *err)
{
    struct cuda *cuda = cuda_of(dev);
    if (cuda->host[pinned]) {
        return error_set(err, STATUS_FAIL, "the arena of %s host memory is sealed at %zu bytes",
                         pinned ? "pinned" : "pageable", cuda->host_bytes[pinned]);
    }
    void *host = NULL;
    if (pinned) {
        cudaError_t code = cudaHostAlloc(&host, bytes, cudaHostAllocDefault);
        if (code != cudaSuccess) {
            cudaGetLastError();
            return error_set(
                err, STATUS_FAIL,
                "%zu bytes of pinned host memory: %s; the system lets programs pin "
                "less than that (free memory, a container's limit): a smaller --pinned-memory",
                bytes, cudaGetErrorString(code));
        }
        memset(host, 0, bytes);
    } else {
        host = host_map(bytes);
        if (!host) {
            return error_set(err, STATUS_FAIL, "no memory for a host arena of %zu bytes", bytes);
        }
    }
    cuda->host[pinned] = host;
    cuda->host_bytes[pinned] = bytes;
    *base = host;
    return STATUS_OK;
}

// ---- copies -------------------------------------------------------------------------------------

static bool is_pinned(const struct cuda *cuda, const void *host)
{
    return (uintptr_t)host - (uintptr_t)cuda->host[1] < cuda->host_bytes[1];
}

static void cuda_copy_in(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    struct cuda *cuda = cuda_of(dev);
    cuda->pageable_copies += !is_pinned(cuda, host_src);
    if (!failed(dev)) {
        DO(dev, cudaMemcpyAsync(device_dst, host_src, bytes, cudaMemcpyHostToDevice,
                                cuda->stream[DEVICE_COPY_IN]));
    }
}

static void cuda_copy_out(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    struct cuda *cuda = cuda_of(dev);
    cuda->pageable_copies += !is_pinned(cuda, host_dst);
    if (!failed(dev)) {
        DO(dev, cudaMemcpyAsync(host_dst, device_src, bytes, cudaMemcpyDeviceToHost,
                                cuda->stream[DEVICE_COPY_OUT]));
    }
}

// Until a stream has done everything; a GPU that hangs is not waited for.
static void settle(struct device *dev, cudaStream_t stream)
{
    double since = clock_s();
    cudaError_t code;
    while ((code = cudaStreamQuery(stream)) == cudaErrorNotReady) {
        double waited = clock_s() - since;
        cudaGetLastError(); // or the next launch would be blamed for it
        if (!watched(dev)) {
            return;
        }
        if (waited > PATIENCE_S) {
            cuda_fail(dev, "cudaStreamQuery", "the GPU has finished nothing for 300 s");
            return;
        }
        if (waited > SPIN_S) {
            clock_sleep_until(clock_s() + 50e-6);
        }
    }
    cuda_ok(dev, "cudaStreamQuery", code);
}

static void cuda_sync(struct device *dev)
{
    for (int lane = 0; lane < DEVICE_LANES && !failed(dev); lane++) {
        settle(dev, cuda_of(dev)->stream[lane]);
    }
}

// After everything that was queued.
static void copy_now(struct device *dev, void *dst, const void *src, size_t bytes,
                     enum cudaMemcpyKind kind)
{
    cuda_sync(dev);
    if (!failed(dev) && DO(dev, cudaMemcpy(dst, src, bytes, kind))) {
        DO(dev, cudaStreamSynchronize(NULL)); // from pageable memory it may still be under way
    }
}

static void cuda_peek(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    copy_now(dev, host_dst, device_src, bytes, cudaMemcpyDeviceToHost);
}

static void cuda_poke(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    copy_now(dev, device_dst, host_src, bytes, cudaMemcpyHostToDevice);
}

static void cuda_fill(struct device *dev, void *device_dst, int byte, size_t bytes)
{
    if (!failed(dev)) {
        DO(dev, cudaMemsetAsync(device_dst, byte, bytes, cuda_stream(dev)));
    }
}

static uint64_t cuda_pageable_copies(const struct device *dev)
{
    return ((const struct cuda *)dev)->pageable_copies;
}

// ---- lanes --------------------------------------------------------------------------------------

static void cuda_begin(struct device *dev, enum device_lane lane, const char *label)
{
    cuda_of(dev)->current = cuda_of(dev)->stream[lane];
    nvtxRangePushA(label);
}

static void *stream_of(struct device *dev, enum device_lane lane)
{
    return cuda_of(dev)->stream[lane];
}

static void cuda_end(struct device *dev, enum device_lane lane, size_t mark)
{
    struct cuda *cuda = cuda_of(dev);
    nvtxRangePop();
    cuda->current = cuda->stream[DEVICE_COMPUTE];
    if (failed(dev)) {
        return;
    }
    DO(dev, cudaEventRecord(cuda->marks[mark], cuda->stream[lane]));
    if (lane == DEVICE_COMPUTE && !cuda->renewing && clock_s() - cuda->origin_s > ORIGIN_S) {
        cuda->renewing = DO(dev, cudaEventRecord(cuda->origin[1], cuda->stream[lane]));
    }
}

static int cuda_marks(struct device *dev, size_t n, struct error *err)
{
    struct cuda *cuda = cuda_of(dev);
    if (n > cuda->n_marks) {
        cudaEvent_t *marks = realloc(cuda->marks, n * sizeof *marks);
        if (!marks) {
            return error_set(err, STATUS_FAIL, "no memory for %zu events", n);
        }
        cuda->marks = marks;
    }
    while (cuda->n_marks < n && !failed(dev) &&
           DO(dev, cudaEventCreate(cuda->marks + cuda->n_marks))) {
        cuda->n_marks++;
    }
    return cuda_status(dev, err);
}

static void cuda_await(struct device *dev, enum device_lane lane, size_t mark)
{
    struct cuda *cuda = cuda_of(dev);
    if (!failed(dev)) {
        DO(dev, cudaStreamWaitEvent(cuda->stream[lane], cuda->marks[mark], 0));
    }
}

static bool passed(struct device *dev, cudaEvent_t event)
{
    cudaError_t code = failed(dev) ? cudaErrorNotReady : cudaEventQuery(event);
    if (code == cudaErrorNotReady) {
        cudaGetLastError(); // or the next launch would be blamed for it
        return false;
    }
    return cuda_ok(dev, "cudaEventQuery", code);
}

static bool cuda_passed(struct device *dev, size_t mark)
{
    return passed(dev, cuda_of(dev)->marks[mark]);
}

static double seconds_after_origin(struct device *dev, cudaEvent_t event)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, cuda_of(dev)->origin[0], event) != cudaSuccess) {
        cudaGetLastError(); // a time is not worth ending for
        return clock_s() - cuda_of(dev)->origin_s;
    }
    return 1e-3 * (double)ms;
}

// Times count from an event whose time on the host's clock is known. It is renewed while training
// goes on, for the difference is a float; the new one cannot have been later than it is now.
static void renew_origin(struct device *dev)
{
    struct cuda *cuda = cuda_of(dev);
    if (cuda->renewing && passed(dev, cuda->origin[1])) {
        double s = cuda->origin_s + seconds_after_origin(dev, cuda->origin[1]);
        cudaEvent_t old = cuda->origin[0];
        cuda->origin[0] = cuda->origin[1];
        cuda->origin[1] = old;
        cuda->origin_s = fmin(s, clock_s());
        cuda->renewing = false;
    }
}

static double cuda_passed_s(struct device *dev, size_t mark)
{
    double s = cuda_of(dev)->origin_s + seconds_after_origin(dev, cuda_of(dev)->marks[mark]);
    renew_origin(dev);
    return s;
}

// ---- opening ------------------------------------------------------------------------------------

static double cuda_matmul_rate(struct device *dev, size_t n)
{
    double best = 0, start = clock_s();
    for (size_t size = n; size <= 8 * n && clock_s() - start < 0.5;
         size *= 2) { // a GPU needs large
        best = fmax(best, lt_rate(cuda_of(dev), size));
    }
    return best;
}

static void cuda_close(struct device *dev)
{
    struct cuda *cuda = cuda_of(dev);
    cuda_sync(dev);
    lt_close(cuda);
    for (size_t i = 0; i < cuda->n_marks; i++) {
        cudaEventDestroy(cuda->marks[i]);
    }
    for (int i = 0; i < 2; i++) {
        if (cuda->origin[i]) {
            cudaEventDestroy(cuda->origin[i]);
        }
    }
    for (int lane = 0; lane < DEVICE_LANES; lane++) {
        if (cuda->stream[lane]) {
            cudaStreamDestroy(cuda->stream[lane]);
        }
    }
    cudaFree(cuda->arena);
    cudaFreeHost(cuda->host[1]);
    host_unmap(cuda->host[0], cuda->host_bytes[0]);
    free(cuda->marks);
    free(cuda);
}

static const struct device_driver driver = {
    .arena = cuda_arena,
    .host_arena = cuda_host_arena,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .peek = cuda_peek,
    .poke = cuda_poke,
    .fill = cuda_fill,
    .pageable_copies = cuda_pageable_copies,
    .matmul_rate = cuda_matmul_rate,
    .close = cuda_close,
    .begin = cuda_begin,
    .stream = stream_of,
    .end = cuda_end,
    .marks = cuda_marks,
    .await = cuda_await,
    .passed = cuda_passed,
    .passed_s = cuda_passed_s,
    .sync = cuda_sync,
    .status = cuda_status,
};

static void version(int v, char out[16])
{
    snprintf(out, 16, "%d.%d", v / 1000, v % 1000 / 10);
}

// Why there is no device that could be used, in the user's words.
static int no_device(struct error *err, cudaError_t code)
{
    int driver_version = 0, runtime_version = 0;
    char has[16], needs[16];
    cudaGetLastError();
    cudaDriverGetVersion(&driver_version);
    cudaRuntimeGetVersion(&runtime_version);
    version(driver_version, has);
    version(runtime_version, needs);
    if (driver_version == 0) {
        return error_set(err, STATUS_FAIL,
                         "--device cuda: there is no NVIDIA driver (CUDA %s is needed); install "
                         "one, or train with --device cpu",
                         needs);
    }
    if (code == cudaErrorInsufficientDriver) {
        return error_set(err, STATUS_FAIL,
                         "--device cuda: the NVIDIA driver is for CUDA %s, and CUDA %s is needed: "
                         "a newer driver, or --device cpu",
                         has, needs);
    }
    return error_set(err, STATUS_FAIL, "--device cuda: %s%s; --device cpu needs none",
                     code == cudaSuccess || code == cudaErrorNoDevice ? "no GPU is there"
                                                                      : cudaGetErrorString(code),
                     getenv("CUDA_VISIBLE_DEVICES") ? " (CUDA_VISIBLE_DEVICES is set)" : "");
}

static int choose_gpu(struct cudaDeviceProp *prop, int index, bool use, struct error *err)
{
    int count = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0) {
        return no_device(err, code);
    }
    if (index >= count) {
        return error_set(err, STATUS_FAIL,
                         "--device cuda: GPU %d is asked for, this process sees %d: "
                         "CUDA_VISIBLE_DEVICES says which",
                         index, count);
    }
    if ((code = cudaGetDeviceProperties(prop, index)) != cudaSuccess) {
        return no_device(err, code);
    }
    if (prop->major < 8) {
        return error_set(err, STATUS_FAIL,
                         "--device cuda: %s has compute capability %d.%d; 8.0 (A100 and later) is "
                         "needed for bf16 on tensor cores",
                         prop->name, prop->major, prop->minor);
    }
    // Last, for it takes memory of the GPU, and one that is too old may fail at it.
    code = use || count == 1 ? cudaSetDevice(index) : cudaSuccess;
    return code == cudaSuccess ? STATUS_OK : no_device(err, code);
}

int cuda_probe(struct error *err)
{
    struct cudaDeviceProp prop;
    return choose_gpu(&prop, 0, false, err); // which one of several is not known yet
}

static int check_config(const struct device_config *c, struct error *err)
{
    if (!attention_head_size_fits(c->head_size)) {
        return error_set(err, STATUS_FAIL,
                         "--device cuda: heads of %zu channels; a multiple of 8 up to %d is "
                         "needed: other --heads or --hidden",
                         c->head_size, ATTENTION_HEAD_SIZE_MAX);
    }
    if (c->link.in > 0 || c->link.out > 0) {
        return error_set(err, STATUS_USAGE,
                         "--link-gb-per-s and --emulate slow down the cpu device; leave them out "
                         "with --device cuda");
    }
    return STATUS_OK;
}

static int set_memory(struct cuda *cuda, size_t asked, struct error *err)
{
    size_t left = 0, total = 0, workspaces = CUDA_LT_BYTES + CUDA_SCRATCH_BYTES;
    if (!DO(&cuda->base, cudaMemGetInfo(&left, &total))) {
        return cuda_status(&cuda->base, err);
    }
    size_t own = workspaces + reserve(total), most = left > own ? left - own : 0;
    // What is asked for may be what the device before this one said that it has: kernels that were
    // loaded since lie in the reserve.
    if (asked > (left > workspaces ? left - workspaces : 0)) {
        return error_set(err, STATUS_FAIL,
                         "--device-memory %zu: the GPU has %zu bytes free, of which a model can "
                         "have %zu (the rest is for workspaces); give at most that",
                         asked, left, most);
    }
    cuda->base.memory = asked ? asked : most;
    return STATUS_OK;
}

static int start(struct cuda *cuda, const struct device_config *config, struct error *err)
{
    struct device *dev = &cuda->base;
    if (set_memory(cuda, config->memory, err) || lt_open(cuda, err)) {
        return err->status;
    }
    int least = 0, first = 0;
    DO(dev, cudaDeviceGetStreamPriorityRange(&least, &first));
    for (int lane = 0; lane < DEVICE_LANES; lane++) {
        // What waits for other ranks must not wait for a place among the blocks of a large kernel.
        DO(dev, cudaStreamCreateWithPriority(cuda->stream + lane, cudaStreamNonBlocking,
                                             lane == DEVICE_COMM ? first : 0));
    }
    cuda->current = cuda->stream[DEVICE_COMPUTE];
    for (int i = 0; i < 2 && !failed(dev); i++) {
        DO(dev, cudaEventCreate(cuda->origin + i));
    }
    if (!failed(dev) && DO(dev, cudaEventRecord(cuda->origin[0], cuda->current)) &&
        DO(dev, cudaEventSynchronize(cuda->origin[0]))) {
        cuda->origin_s = clock_s();
    }
    return cuda_status(dev, err);
}

int cuda_open(struct device **out, const struct device_config *config, struct error *err)
{
    struct cudaDeviceProp prop;
    if (check_config(config, err) || choose_gpu(&prop, config->index, true, err)) {
        return err->status;
    }
    struct cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda) {
        return error_set(err, STATUS_FAIL, "no memory for the cuda device");
    }
    struct device *dev = &cuda->base;
    dev->kind = "cuda";
    dev->driver = &driver;
    dev->dtype = config->dtype;
    dev->layers = config->dtype == DTYPE_FP32 ? &layers_cuda_fp32 : &layers_cuda_bf16;
    dev->workspace_bytes = CUDA_LT_BYTES + CUDA_SCRATCH_BYTES;
    dev->separate = dev->queues = true;
    dev->threads = 1;
    dev->isa = "cuda";
    if (start(cuda, config, err)) {
        cuda_close(dev);
        return err->status;
    }
    char has[16], runtime[16];
    int driver_version = 0, runtime_version = 0;
    cudaDriverGetVersion(&driver_version);
    cudaRuntimeGetVersion(&runtime_version);
    version(driver_version, has);
    version(runtime_version, runtime);
    snprintf(dev->summary, sizeof dev->summary,
             "cuda: %.96s (sm_%d%d, %d multiprocessors, %.0f MiB), CUDA %s on a driver for %s",
             prop.name, prop.major, prop.minor, prop.multiProcessorCount, mib(prop.totalGlobalMem),
             runtime, has);
    *out = dev;
    return STATUS_OK;
}
