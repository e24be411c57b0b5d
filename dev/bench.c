// bench.c - how fast training is, held against what this machine can do in the same run.
//
// `make bench`. Machines are shared and their clocks move, so a rate is never compared with one
// from another run: each round measures the limits (matrix products, memory stream) and training
// one after the other, and what is reported are medians and ratios of medians. Each model runs in
// a child process of its own, so that its peak memory is its own.
#include "data/shards.h"
#include "hete/session.h"
#include "kernels/cpu/cpu.h"
#include "kernels/gpt.h"
#include "kernels/layers.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUNDS 7

static double now(void)
{
    return omp_get_wtime();
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, by_value);
    return x[n / 2];
}

static float *buffer(size_t n)
{
    size_t huge = (size_t)2 << 20, bytes = (n * sizeof(float) + huge - 1) / huge * huge;
    float *p = aligned_alloc(huge, bytes);
    if (!p) {
        perror("bench: buffer");
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE); // as the device's arena
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        p[i] = (float)(i % 13) / 13 - 0.5f;
    }
    return p;
}

// FLOP/s of OpenBLAS with threads of its own; ours where there is no OpenBLAS.
static double blas_rate(struct device *dev, const float *a, const float *b, float *c, size_t m,
                        size_t n, size_t k)
{
    static sgemm_fn openblas;
    char name[96], why[160];
    enum isa isa;
    struct error err;
    if (!openblas && isa_choose(&isa, &err) == STATUS_OK) {
        openblas = blas_open(isa, name, sizeof name, why, sizeof why);
    }
    if (!openblas) {
        return device_matmul_rate(dev, m);
    }
    blas_set_threads(dev->threads);
    double start = now();
    openblas(false, true, m, n, k, a, k, b, k, 0, c, n);
    double rate = 2.0 * (double)m * (double)n * (double)k / (now() - start);
    blas_set_threads(1);
    return rate;
}

// Bytes per second of the update that Adam is bound by: read 4 arrays, write 3 of them in place.
static double stream_rate(struct device *dev, float *x, size_t n)
{
    float *a = x, *b = x + n, *c = x + 2 * n, *d = x + 3 * n;
    double start = now();
#pragma omp parallel for simd num_threads(dev->threads) schedule(static)
    for (size_t i = 0; i < n; i++) {
        float g = d[i];
        a[i] += g;
        b[i] += g;
        c[i] += g;
    }
    return 28.0 * (double)n / (now() - start);
}

// Parameters of an Adam measurement, and the memory that its devices compute on: p, m, v and the
// gradient in fp32, then the gradient and the parameters in 16 bits.
struct adam {
    struct device *fp32, *bf16;
    size_t n;
    float *x, *m, *v, *g;
    void *g16, *p16;
    struct adamw a;
};

// Bytes per second; each parameter moves 28 bytes, as in the stream, in every form.
static double adam_rate(const struct adam *a, struct device *dev)
{
    double start = now();
    if (dev == a->fp32) {
        dev->layers->adamw(dev, a->x, a->x, a->m, a->v, a->g, &a->a, a->n);
    } else {
        dev->layers->adamw(dev, a->p16, a->x, a->m, a->v, a->g16, &a->a, a->n);
    }
    return 28.0 * (double)a->n / (now() - start);
}

// The 16-bit form as three passes: the gradient to fp32, the update, the parameters to 16 bits.
static double three_pass_rate(const struct adam *a)
{
    double start = now();
    a->bf16->layers->accumulate(a->bf16, a->g, a->g16, true, a->n);
    a->fp32->layers->adamw(a->fp32, a->x, a->x, a->m, a->v, a->g, &a->a, a->n);
    a->bf16->layers->cast(a->bf16, a->p16, a->x, a->n);
    return 28.0 * (double)a->n / (now() - start);
}

static struct device *open_device(const struct gpt_config *c, enum dtype dtype, int threads)
{
    struct error err;
    struct device *dev;
    if (device_open(&dev,
                    &(struct device_config){.kind = "cpu",
                                            .dtype = dtype,
                                            .threads = threads,
                                            .head_size = gpt_head_size(c),
                                            .max_seq = c->max_seq,
                                            .padded_vocab = gpt_padded_vocab(c)},
                    &err)) {
        fprintf(stderr, "bench: %s\n", err.text);
        exit(1);
    }
    return dev;
}

struct trainer {
    struct gpt gpt;
    struct device *dev;
    struct session *session;
    int32_t *tokens;
    size_t B, T;
    uint64_t step;
};

static void open_trainer(struct trainer *t, const struct gpt_config *c, size_t B, size_t T,
                         int threads)
{
    struct error err;
    t->B = B;
    t->T = T;
    t->step = 0;
    gpt_open(&t->gpt, c);
    t->dev = open_device(c, DTYPE_FP32, threads);
    struct session_config config = {.B = B, .T = T, .micro_batches = 1, .train = true};
    if (session_open(&t->session, t->dev, &t->gpt.model, &config, &err)) {
        fprintf(stderr, "bench: %s\n", err.text);
        exit(1);
    }
    size_t piece = (size_t)1 << 20;
    float *buf = buffer(piece);
    for (size_t u = 0; u < t->gpt.model.units; u++) {
        size_t n = model_unit(&t->gpt.model, u)->params;
        for (size_t i = 0; i < n; i += piece) {
            size_t m = n - i < piece ? n - i : piece;
            gpt_init(&t->gpt, 1, u, i, buf, m);
            session_write(t->session, STATE_PARAMS, u, i, buf, m);
        }
    }
    free(buf);
    t->tokens = malloc((B * T + 1) * sizeof *t->tokens);
    for (size_t i = 0; i <= B * T; i++) {
        t->tokens[i] = (int32_t)(i * 7919 % c->vocab);
    }
}

// Seconds of one step.
static double train(struct trainer *t)
{
    struct session_update up = {.lr = 1e-4,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .eps = 1e-8,
                                .clip = 1,
                                .guard = true,
                                .step = t->step++};
    struct session_result r;
    double start = now();
    session_step(t->session, t->tokens, t->tokens + 1, &up, &r);
    return now() - start;
}

// Seconds of the matrix products of a step alone: what training could reach at most.
static double products(struct trainer *t, float *x, float *y, float *w)
{
    const struct gpt_config *c = &t->gpt.config;
    size_t C = c->hidden, N = t->B * t->T, rows = c->head_rows < N ? c->head_rows : N;
    size_t shape[][3] = {{C, 3 * C, 1}, {C, C, 1}, {C, 4 * C, 1}, {4 * C, C, 1}};
    const struct layers *f = t->dev->layers;
    double seconds = 0;
    for (int s = 0; s < 5; s++) {
        size_t in = s < 4 ? shape[s][0] : C, out = s < 4 ? shape[s][1] : gpt_padded_vocab(c);
        size_t n = s < 4 ? N : rows;
        double times = s < 4 ? (double)c->layers : (double)N / (double)rows, start = now();
        f->matmul_forward(t->dev, y, x, w, NULL, NULL, n, in, out);
        f->matmul_backward_input(t->dev, x, y, w, n, in, out);
        f->matmul_backward_weight_fp32(t->dev, w, y, x, s == 4 && times > 1, n, in, out);
        seconds += times * (now() - start);
    }
    return seconds;
}

static size_t peak_bytes(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (size_t)r.ru_maxrss * 1024;
}

static void bench_model(const char *name, const struct gpt_config *c, size_t B, size_t T,
                        double goal, int threads)
{
    struct trainer t;
    open_trainer(&t, c, B, T, threads);
    train(&t);
    train(&t);
    size_t peak = peak_bytes(); // before the buffers of the measurements
    size_t n = 2048, N = B * T,
           wide = gpt_padded_vocab(c) > 4 * c->hidden ? gpt_padded_vocab(c) : 4 * c->hidden;
    float *a = buffer(3 * n * n), *x = buffer(N * 4 * c->hidden), *y = buffer(N * wide);
    float *w = buffer(wide * c->hidden);
    double sgemm[ROUNDS], step[ROUNDS], product[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double rate[3];
        for (int i = 0; i < 3; i++) {
            rate[i] = blas_rate(t.dev, a, a + n * n, a + 2 * n * n, n, n, n);
        }
        sgemm[r] = median(rate, 3);
        product[r] = products(&t, x, y, w);
        step[r] = train(&t);
    }
    double flops = gpt_flops_per_token(c, T) * (double)N;
    double rate = median(sgemm, ROUNDS), s = median(step, ROUNDS), p = median(product, ROUNDS);
    char aim[16] = "-";
    if (goal > 0) {
        snprintf(aim, sizeof aim, "%.2f", goal);
    }
    printf("%-28s %7.1f %8.1f %9.2f %6.3f %8.3f %6s %8.3f\n", name, rate / 1e9, (double)N / s,
           s / (double)N * 1e6 / (double)c->layers, flops / s / rate, flops / p / rate, aim,
           (double)peak / (1 << 30));
    session_close(t.session);
    device_close(t.dev);
}

static void bench_limits(int threads)
{
    struct gpt_config c = {
        .max_seq = 64, .vocab = 257, .layers = 1, .heads = 1, .hidden = 64, .head_rows = 64};
    struct device *dev = open_device(&c, DTYPE_FP32, threads);
    static const size_t shape[][3] = {{2048, 2048, 2048}, {256, 2304, 768},  {256, 768, 3072},
                                      {256, 50304, 768},  {1024, 1536, 384}, {1024, 384, 1536}};
    float *x = buffer((size_t)50304 * 768), *y = buffer((size_t)4 << 20);
    float *z = buffer((size_t)50304 * 256);
    printf("%s\n", dev->summary);
    printf("\n%-28s %10s %10s   GFLOP/s\n", "matrix product (MxNxK)", "OpenBLAS", "tiles");
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        size_t m = shape[i][0], n = shape[i][1], k = shape[i][2];
        double blas[ROUNDS], tiles[ROUNDS];
        for (int r = -1; r < ROUNDS; r++) {
            double rate = blas_rate(dev, y, x, z, m, n, k), start = now();
            dev->layers->matmul_forward(dev, z, y, x, NULL, NULL, m, k, n);
            double own = 2.0 * (double)m * (double)n * (double)k / (now() - start);
            blas[r < 0 ? 0 : r] = rate;
            tiles[r < 0 ? 0 : r] = own;
        }
        printf("%5zux%5zux%5zu %27.1f %10.1f\n", m, n, k, median(blas, ROUNDS) / 1e9,
               median(tiles, ROUNDS) / 1e9);
    }
    device_close(dev);
}

static void bench_adam(int threads)
{
    struct gpt_config c = {
        .max_seq = 64, .vocab = 257, .layers = 1, .heads = 1, .hidden = 64, .head_rows = 64};
    size_t n = (size_t)32 << 20;
    float *x = buffer(5 * n);
    struct adam a = {.fp32 = open_device(&c, DTYPE_FP32, threads),
                     .bf16 = open_device(&c, DTYPE_BF16, threads),
                     .n = n,
                     .x = x,
                     .m = x + n,
                     .v = x + 2 * n,
                     .g = x + 3 * n,
                     .g16 = x + 4 * n,
                     .p16 = x + 4 * n + n / 2,
                     .a = {.beta1 = 0.9f,
                           .beta2 = 0.95f,
                           .one_minus_beta1 = 0.1f,
                           .one_minus_beta2 = 0.05f,
                           .eps = 1e-8f,
                           .scale = 1,
                           .decay = 1,
                           .step = 1e-3f,
                           .v_correction = 1}};
    // Sums of squares stay positive though the stream adds gradients to them: 0.0115 in any width.
    memset(a.v, 0, n * sizeof *a.v);
    memset(a.g, 0x3c, n * sizeof *a.g + n * sizeof(uint16_t));
    double stream[ROUNDS], adam[ROUNDS], host[ROUNDS], passes[ROUNDS];
    for (int r = -1; r < ROUNDS; r++) { // the first one warms up
        int i = r < 0 ? 0 : r;
        stream[i] = stream_rate(a.fp32, x, n);
        adam[i] = adam_rate(&a, a.fp32);
        host[i] = adam_rate(&a, a.bf16);
        passes[i] = three_pass_rate(&a);
    }
    double most = median(stream, ROUNDS), own = median(adam, ROUNDS), mixed = median(host, ROUNDS);
    double slow = median(passes, ROUNDS);
    printf("%-28d %8.1f %8.1f %6.2f %10.1f %6.2f %9.1f %6.2f\n", a.fp32->threads, most / 1e9,
           own / 1e9, own / most, mixed / 1e9, mixed / most, slow / 1e9, mixed / slow);
    free(x);
    device_close(a.fp32);
    device_close(a.bf16);
}

// Peak memory of a process that reads so many shards from end to end.
static void bench_reader(size_t shards)
{
    enum { SHARD = 100000, T = 256 };
    char dir[] = "/tmp/bench_XXXXXX", prefix[64], pattern[80], path[96];
    struct error err;
    struct shard_writer *w;
    struct loader *loader;
    static uint32_t tokens[SHARD];
    static int32_t row[2][T];
    uint64_t rows = 0;
    snprintf(prefix, sizeof prefix, "%s/x", mkdtemp(dir) ? dir : "/tmp");
    snprintf(pattern, sizeof pattern, "%s_*.bin", prefix);
    int status = shard_writer_open(&w, prefix, SHARD, false, &err);
    for (size_t i = 0; status == STATUS_OK && i < shards; i++) {
        status = shard_write(w, tokens, SHARD, &err);
    }
    if (status || shard_writer_seal(w, &err) || shard_writer_publish(w, &err) ||
        loader_open(&loader, pattern, T, 50257, 1, true, &err)) {
        fprintf(stderr, "bench: %s\n", err.text);
        _exit(1);
    }
    shard_writer_close(w);
    for (; rows < loader_rows(loader); rows++) {
        if (loader_next(loader, row[0], row[1], &err)) {
            fprintf(stderr, "bench: %s\n", err.text);
            _exit(1);
        }
    }
    printf("reader: %4zu shards, %6.1f MB read: peak %.1f MiB\n", shards,
           (double)shards * 2 * SHARD / 1e6, (double)peak_bytes() / (1 << 20));
    loader_close(loader);
    for (size_t i = 0; i < shards; i++) {
        snprintf(path, sizeof path, "%s_%06zu.bin", prefix, i);
        unlink(path);
    }
    rmdir(dir);
}

static void print_load(void)
{
    double load[3] = {0};
    char host[64] = "";
    FILE *f = fopen("/proc/sys/kernel/osrelease", "r");
    if (f) {
        if (fscanf(f, "%63s", host) != 1) {
            host[0] = 0;
        }
        fclose(f);
    }
    if (getloadavg(load, 3) < 1) {
        load[0] = -1;
    }
    printf("Linux %s, %d cores, load before the run %.2f%s\n", host, omp_get_num_procs(), load[0],
           load[0] > 0.5 ? "  (others are using this machine: expect noise)" : "");
}

// Runs one part in a child process: its memory and threads are its own.
#define IN_CHILD(call)                                                                             \
    do {                                                                                           \
        fflush(stdout);                                                                            \
        pid_t pid = fork();                                                                        \
        if (pid == 0) {                                                                            \
            call;                                                                                  \
            fflush(stdout);                                                                        \
            _exit(0);                                                                              \
        }                                                                                          \
        int status;                                                                                \
        if (pid < 0 || waitpid(pid, &status, 0) < 0 || status != 0) {                              \
            fprintf(stderr, "bench: a part failed\n");                                             \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

int main(int argc, char **argv)
{
    int threads = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 0;
    struct gpt_config d6 = {
        .max_seq = 1024, .vocab = 50257, .layers = 6, .heads = 6, .hidden = 384, .head_rows = 256};
    struct gpt_config d12 = d6, d12_long = d6;
    d12.layers = d12.heads = d12_long.layers = d12_long.heads = 12;
    d12.hidden = d12_long.hidden = 768;
    print_load();
    IN_CHILD(bench_limits(threads));
    printf("\n%-28s %8s %8s %6s %10s %6s %9s %6s   GB/s, 28 bytes a parameter\n", "update, threads",
           "stream", "Adam", "ratio", "host Adam", "ratio", "3 passes", "ratio");
    IN_CHILD(bench_adam(1));
    IN_CHILD(bench_adam(threads));
    printf(
        "stream: read 4, write 3 in place; Adam: fp32 alone; host Adam: 16-bit gradient in, 16-bit "
        "parameters\nout (goal 0.85 of the stream, 1.5 of the same in three passes)\n");
    printf("\n%-28s %7s %8s %9s %6s %8s %6s %8s\n", "training", "GFLOP/s", "tok/s", "us/tok/L",
           "ratio", "ceiling", "goal", "peak GiB");
    IN_CHILD(bench_model("124M 12x768 B4 T64", &d12, 4, 64, 0.80, threads));
    IN_CHILD(bench_model("30M 6x384 B4 T256", &d6, 4, 256, 0.75, threads));
    IN_CHILD(bench_model("124M 12x768 B1 T1024", &d12_long, 1, 1024, 0, threads));
    for (size_t layers = 3; layers <= 24; layers *= 2) {
        struct gpt_config deep = {.max_seq = 256,
                                  .vocab = 257,
                                  .layers = layers,
                                  .heads = 6,
                                  .hidden = 384,
                                  .head_rows = 256};
        char name[32];
        snprintf(name, sizeof name, "%zux384 B4 T256 bytes", layers);
        IN_CHILD(bench_model(name, &deep, 4, 256, 0, threads));
    }
    printf("GFLOP/s: OpenBLAS 2048^3; us/tok/L: microseconds per token and layer, head included;\n"
           "ratio: model FLOP/s (6N + 6LCT per token) over OpenBLAS's 2048^3 rate of the same "
           "rounds;\nceiling: the ratio if a step were its matrix products alone\n\n");
    for (size_t shards = 1; shards <= 256; shards *= 16) {
        IN_CHILD(bench_reader(shards));
    }
    return 0;
}
