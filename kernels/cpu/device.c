// device.c - the cpu device: host memory, OpenMP threads, and one of the compiled variants.
#include "kernels/cpu/cpu.h"
#include "kernels/layers.h"

#include <errno.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

static void *map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        return NULL;
    }
    madvise(p, bytes, MADV_HUGEPAGE); // advice only: fewer page faults and TLB misses
    return p;
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

int device_open(struct device **out, const struct device_config *config, struct error *err)
{
    if (strcmp(config->kind, "auto") != 0 && strcmp(config->kind, "cpu") != 0) {
        return error_set(err, STATUS_USAGE, "--device %s: this build has auto, cpu", config->kind);
    }
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
    dev->dtype = config->dtype;
    dev->layers = cpu_layers(config->dtype, isa);
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
    cpu->scratch = map(dev->workspace_bytes);
    if (!cpu->scratch) {
        int e = error_set(err, STATUS_FAIL, "no memory for %d x %zu bytes of thread scratch: %s",
                          dev->threads, cpu->scratch_floats * sizeof(float), strerror(errno));
        free(cpu);
        return e;
    }
    cpu->partials = cpu->scratch + cpu->scratch_floats * (size_t)dev->threads;
    *out = dev;
    return STATUS_OK;
}

int device_arena(struct device *dev, size_t bytes, void **base, struct error *err)
{
    struct cpu *cpu = cpu_of(dev);
    if (cpu->arena) {
        return error_set(err, STATUS_FAIL, "the device arena is sealed at %zu bytes",
                         cpu->arena_bytes);
    }
    cpu->arena = map(bytes);
    if (!cpu->arena) {
        return error_set(err, STATUS_FAIL,
                         "no memory for an arena of %zu bytes: %s; a smaller model, --micro-batch "
                         "or --seq needs less",
                         bytes, strerror(errno));
    }
    cpu->arena_bytes = bytes;
    *base = cpu->arena;
    return STATUS_OK;
}

void device_copy_in(struct device *dev, void *device_dst, const void *host_src, size_t bytes)
{
    (void)dev;
    memcpy(device_dst, host_src, bytes);
}

void device_copy_out(struct device *dev, void *host_dst, const void *device_src, size_t bytes)
{
    (void)dev;
    memcpy(host_dst, device_src, bytes);
}

double device_sgemm_rate(struct device *dev, size_t n)
{
    struct cpu *cpu = cpu_of(dev);
    size_t bytes = n * n * sizeof(float);
    float *x = map(3 * bytes);
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

void device_close(struct device *dev)
{
    struct cpu *cpu = cpu_of(dev);
    munmap(cpu->scratch, dev->workspace_bytes);
    if (cpu->arena) {
        munmap(cpu->arena, cpu->arena_bytes);
    }
    free(cpu);
}
