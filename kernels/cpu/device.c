// device.c - the cpu device: host memory, OpenMP threads, and one of the compiled variants.
//
// With config.memory it emulates a device that has memory of its own. Its arena is mapped where
// only the lanes know it, and copies take the time of the link that link.h describes:
//
//   device addresses   [ nobody can access ]       what device_arena hands out
//        + lane_offset
//   arena              [ read, write       ]       what functions of `layers` get
#include "kernels/clock.h"
#include "kernels/cpu/cpu.h"
#include "kernels/driver.h"
#include "kernels/layers.h"

#include <errno.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define VARIANT(isa)                                                                               \
    extern const struct layers layers_fp32_##isa, layers_bf16_##isa;                               \
    extern __typeof__(*(sgemm_fn)0) sgemm_fp32_##isa;
VARIANT(base)
#ifdef __x86_64__
VARIANT(avx2)
VARIANT(avx512)
#endif

const struct layers *cpu_layers(enum dtype dtype, enum isa isa)
{
    static const struct layers *const table[ISA_COUNT][2] = {
        [ISA_BASE] = {&layers_fp32_base, &layers_bf16_base},
#ifdef __x86_64__
        [ISA_AVX2] = {&layers_fp32_avx2, &layers_bf16_avx2},
        [ISA_AVX512] = {&layers_fp32_avx512, &layers_bf16_avx512},
#endif
    };
    return table[isa][dtype];
}

sgemm_fn cpu_sgemm(enum isa isa)
{
    static const sgemm_fn table[ISA_COUNT] = {
        [ISA_BASE] = sgemm_fp32_base,
#ifdef __x86_64__
        [ISA_AVX2] = sgemm_fp32_avx2,
        [ISA_AVX512] = sgemm_fp32_avx512,
#endif
    };
    return table[isa];
}

static void processor_name(char *out, size_t size)
{
    snprintf(out, size, "unknown processor");
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        char *value = strchr(line, ':');
        if (value && strncmp(line, "model name", 10) == 0) {
            value[strcspn(value, "\n")] = 0;
            snprintf(out, size, "%s", value + 2);
            break;
        }
    }
    if (f) {
        fclose(f);
    }
}

// Threads asked for, or all that affinity and OMP_NUM_THREADS allow. One thread where more cores
// are there is usually a launcher's doing, and 80 times slower is easily missed.
static void choose_threads(struct device *dev, int asked)
{
    int cores = omp_get_num_procs();
    dev->threads = asked > 0 ? asked : omp_get_max_threads();
    if (dev->threads == 1 && cores > 1 && asked == 0) {
        snprintf(dev->warning, sizeof dev->warning,
                 "only 1 thread is used but %d cores are there (OMP_NUM_THREADS=%s?); "
                 "--threads %d uses them all",
                 cores, getenv("OMP_NUM_THREADS") ? getenv("OMP_NUM_THREADS") : "", cores);
    }
    if (asked > cores) {
        snprintf(dev->warning, sizeof dev->warning,
                 "--threads %d, but only %d cores are there: they will wait for each other", asked,
                 cores);
    }
    omp_set_dynamic(0);
}

// Ours on AVX-512, where it is faster (dev/sgemm.c); elsewhere OpenBLAS, if it is there and
// computes rightly. TRAIN_GPT_BLAS=own|openblas asks for one.
static int choose_sgemm(struct cpu *cpu, enum isa isa, char *name, size_t size, struct error *err)
{
    const char *asked = getenv("TRAIN_GPT_BLAS");
    char why[160] = "";
    if (!asked || !*asked) {
        asked = isa == ISA_AVX512 ? "own" : "openblas";
    } else if (strcmp(asked, "own") != 0 && strcmp(asked, "openblas") != 0) {
        return error_set(err, STATUS_USAGE, "TRAIN_GPT_BLAS=%s: not one of own, openblas", asked);
    }
    if (strcmp(asked, "openblas") == 0) {
        cpu->sgemm = blas_open(isa, name, size, why, sizeof why);
    }
    if (!cpu->sgemm) {
        cpu->sgemm = cpu_sgemm(isa);
        snprintf(name, size, "own matrix products");
    }
    if (why[0]) {
        char *warning = cpu->base.warning;
        size_t n = strlen(warning); // that of the threads may stand there
        snprintf(warning + n, sizeof cpu->base.warning - n, "%s%s: matrix products are our own",
                 n ? "; " : "", why);
    }
    return STATUS_OK;
}

static void emulate(struct cpu *cpu, const struct device_config *config)
{
    struct device *dev = &cpu->base;
    dev->separate = true;
    dev->memory = config->memory;
    cpu->link.speed = config->link;
    pthread_mutex_init(&cpu->link_lock, NULL);
    size_t n = strlen(dev->summary);
    double mib = (double)config->memory / (1 << 20);
    snprintf(dev->summary + n, sizeof dev->summary - n, ", emulating a device of %.*g MiB",
             mib < 100 ? 3 : 15, mib < 100 ? mib : round(mib));
}

// ---- memory -------------------------------------------------------------------------------------

static int no_memory(struct error *err, const char *what, size_t bytes)
{
    return error_set(err, STATUS_FAIL,
                     "no memory for %s of %zu bytes: %s; a smaller model, --micro-batch or --seq "
                     "needs less",
                     what, bytes, strerror(errno));
}

static int cpu_arena(struct device *dev, size_t bytes, void **base, struct error *err)
{
    struct cpu *cpu = cpu_of(dev);
    if (cpu->arena) {
        return error_set(err, STATUS_FAIL, "the device arena is sealed at %zu bytes",
                         cpu->arena_bytes);
    }
    if (bytes > dev->memory) {
        return error_set(err, STATUS_FAIL,
                         "%zu bytes of device memory are asked for, but the device has %zu: a "
                         "larger --device-memory, or a smaller model, --micro-batch or --seq",
                         bytes, dev->memory);
    }
    void *arena = host_map(bytes), *addresses = NULL;
    if (!arena) {
        return no_memory(err, "a device arena", bytes);
    }
    if (dev->separate) {
        addresses =
            mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (addresses == MAP_FAILED) {
            int e = no_memory(err, "device addresses", bytes);
            munmap(arena, bytes);
            return e;
        }
        dev->lane_offset = (char *)arena - (char *)addresses;
    }
    cpu->arena = arena;
    cpu->addresses = addresses;
    cpu->arena_bytes = bytes;
    *base = dev->separate ? addresses : arena;
    return STATUS_OK;
}

static int cpu_host_arena(struct device *dev, size_t bytes, bool pinned, void **base,
                          struct error *err)
{
    struct cpu *cpu = cpu_of(dev);
    const char *kind = pinned ? "pinned" : "pageable";
    if (cpu->host[pinned]) {
        return error_set(err, STATUS_FAIL, "the arena of %s host memory is sealed at %zu bytes",
                         kind, cpu->host_bytes[pinned]);
    }
    cpu->host[pinned] = host_map(bytes);
    if (!cpu->host[pinned]) {
        return no_memory(err, pinned ? "a pinned host arena" : "a host arena", bytes);
    }
    cpu->host_bytes[pinned] = bytes;
    *base = cpu->host[pinned];
    return STATUS_OK;
}

// Where a device address really is.
static void *real(struct device *dev, const void *address)
{
    return (char *)address + dev->lane_offset;
}

static void cpu_peek(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    memcpy(host_dst, real(dev, device_src), bytes);
}

static void cpu_poke(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    memcpy(real(dev, device_dst), host_src, bytes);
}

static void cpu_fill(struct device *dev, void *device_dst, int byte, size_t bytes)
{
    memset(real(dev, device_dst), byte, bytes);
}

// ---- copies -------------------------------------------------------------------------------------

static void sleep_exactly(double until)
{
    int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1L);
    clock_sleep_until(until);
    prctl(PR_SET_TIMERSLACK, (long)slack);
}

// Until the direction's copy ends. Should the other direction begin meanwhile, the end is later
// than it was thought to be, and there is more to wait. The last bit is not slept: threads wake up
// late.
static void wait_for_end(struct cpu *cpu, int direction)
{
    const double last_bit = 20e-6;
    for (;;) {
        pthread_mutex_lock(&cpu->link_lock);
        double end = link_end(&cpu->link, direction), time = clock_s();
        bool over = end <= time;
        if (over) {
            link_advance(&cpu->link, time);
        }
        pthread_mutex_unlock(&cpu->link_lock);
        if (over) {
            return;
        }
        if (end - time > last_bit) {
            sleep_exactly(end - last_bit);
        }
    }
}

static bool is_pinned(const struct cpu *cpu, const void *host)
{
    return (uintptr_t)host - (uintptr_t)cpu->host[1] < cpu->host_bytes[1];
}

static void copy(struct device *dev, int direction, void *dst, const void *src, const void *host,
                 size_t bytes)
{
    struct cpu *cpu = cpu_of(dev);
    if (!dev->separate) {
        memcpy(dst, src, bytes);
        return;
    }
    if (!is_pinned(cpu, host)) {
        atomic_fetch_add_explicit(&cpu->pageable_copies, 1, memory_order_relaxed);
    }
    pthread_mutex_lock(&cpu->link_lock);
    link_begin(&cpu->link, direction, bytes, clock_s());
    pthread_mutex_unlock(&cpu->link_lock);
    memcpy(dst, src, bytes); // while the link's time passes
    wait_for_end(cpu, direction);
}

static void cpu_copy_in(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    copy(dev, LINK_IN, real(dev, device_dst), host_src, host_src, bytes);
}

static void cpu_copy_out(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    copy(dev, LINK_OUT, host_dst, real(dev, device_src), host_dst, bytes);
}

static void cpu_set_link(struct device *dev, const struct device_link *link)
{
    if (dev->separate) {
        cpu_of(dev)->link.speed = *link;
    }
}

static void cpu_get_link(const struct device *dev, struct device_link *link)
{
    *link = ((const struct cpu *)dev)->link.speed;
}

static uint64_t cpu_pageable_copies(const struct device *dev)
{
    return ((const struct cpu *)dev)->pageable_copies;
}

// ---- rates --------------------------------------------------------------------------------------

static double cpu_matmul_rate(struct device *dev, size_t n)
{
    struct cpu *cpu = cpu_of(dev);
    size_t bytes = n * n * sizeof(float);
    float *x = host_map(3 * bytes);
    if (!x) {
        return 0;
    }
    for (size_t i = 0; i < 2 * n * n; i++) {
        x[i] = (float)(i % 7) - 3;
    }
    double best = 0;
    for (int try = 0; try < 4; try++) { // the first one warms up
        double start = omp_get_wtime();
#pragma omp parallel for num_threads(dev->threads) schedule(dynamic, 1)
        for (size_t b = 0; b < (n + 255) / 256; b++) {
            size_t lo = b * 256, rows = n - lo < 256 ? n - lo : 256;
            cpu->sgemm(false, false, rows, n, n, x + lo * n, n, x + n * n, n, 0,
                       x + 2 * n * n + lo * n, n);
        }
        double rate = 2.0 * (double)n * (double)n * (double)n / (omp_get_wtime() - start);
        best = rate > best ? rate : best;
    }
    munmap(x, 3 * bytes);
    return best;
}

static void cpu_rest(struct device *dev)
{
    (void)dev;
#ifndef __clang__ // LLVM's would end the workers of all threads
    omp_pause_resource_all(omp_pause_hard);
#endif
}

static void cpu_close(struct device *dev)
{
    struct cpu *cpu = cpu_of(dev);
    host_unmap(cpu->scratch, dev->workspace_bytes);
    host_unmap(cpu->arena, cpu->arena_bytes);
    host_unmap(cpu->addresses, cpu->arena_bytes);
    host_unmap(cpu->host[0], cpu->host_bytes[0]);
    host_unmap(cpu->host[1], cpu->host_bytes[1]);
    if (dev->separate) {
        pthread_mutex_destroy(&cpu->link_lock);
    }
    free(cpu);
}

// ---- opening ------------------------------------------------------------------------------------

static const struct device_driver driver = {
    .arena = cpu_arena,
    .host_arena = cpu_host_arena,
    .copy_in = cpu_copy_in,
    .copy_out = cpu_copy_out,
    .peek = cpu_peek,
    .poke = cpu_poke,
    .fill = cpu_fill,
    .pageable_copies = cpu_pageable_copies,
    .matmul_rate = cpu_matmul_rate,
    .close = cpu_close,
    .set_link = cpu_set_link,
    .get_link = cpu_get_link,
    .rest = cpu_rest,
};

int cpu_open(struct device **out, const struct device_config *config, struct error *err)
{
    enum isa isa;
    if (isa_choose(&isa, err)) {
        return err->status;
    }
    struct cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) {
        return error_set(err, STATUS_FAIL, "no memory for the cpu device");
    }
    struct device *dev = &cpu->base;
    dev->kind = "cpu";
    dev->driver = &driver;
    dev->dtype = config->dtype;
    dev->memory = SIZE_MAX;
    dev->layers = cpu_layers(config->dtype, isa);
    dev->isa = isa_name(isa);
    choose_threads(dev, config->threads);
    char blas[96], processor[96];
    if (choose_sgemm(cpu, isa, blas, sizeof blas, err)) {
        free(cpu);
        return err->status;
    }
    processor_name(processor, sizeof processor);
    snprintf(dev->summary, sizeof dev->summary, "cpu: %s, %s, %s, %d thread%s", processor,
             isa_name(isa), blas, dev->threads, dev->threads == 1 ? "" : "s");

    size_t floats = attention_scratch(config->max_seq, config->head_size);
    floats = floats > MATMUL_SCRATCH ? floats : MATMUL_SCRATCH;
    floats = floats > config->padded_vocab ? floats : config->padded_vocab;
    cpu->scratch_floats = device_round(floats * sizeof(float)) / sizeof(float);
    dev->workspace_bytes =
        (cpu->scratch_floats * (size_t)dev->threads + MATMUL_PARTIALS) * sizeof(float);
    cpu->scratch = host_map(dev->workspace_bytes);
    if (!cpu->scratch) {
        int e = error_set(err, STATUS_FAIL, "no memory for %d x %zu bytes of thread scratch: %s",
                          dev->threads, cpu->scratch_floats * sizeof(float), strerror(errno));
        free(cpu);
        return e;
    }
    cpu->partials = cpu->scratch + cpu->scratch_floats * (size_t)dev->threads;
    if (config->memory) {
        emulate(cpu, config);
    }
    *out = dev;
    return STATUS_OK;
}
