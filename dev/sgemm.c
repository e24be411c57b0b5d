// sgemm.c - our matrix product against OpenBLAS on the tiles of training, one thread.
//
// build/dev/sgemm; TRAIN_GPT_ISA and OPENBLAS_CORETYPE choose what runs. Both take turns on the
// same shapes, timed by the thread's own CPU time (machines are shared), and medians are
// reported. One operand comes from far memory, as weights do in training: each turn takes
// another piece of a buffer that no cache near the core holds.
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define TURNS      21
#define FAR_FLOATS ((size_t)48 << 20)

struct shape {
    const char *what;
    bool ta, tb;
    size_t m, n, k, lda, ldb, ldc; // a tile, within matrices of so many columns
    bool near;                     // all operands in the cache, as in attention
};

static const struct shape shapes[] = {
    {"large", false, false, 2048, 512, 2048, 2048, 512, 512, false},
    {"forward", false, true, 256, 384, 768, 768, 768, 768, false},
    {"forward", false, true, 256, 768, 768, 768, 768, 2304, false},
    {"forward", false, true, 256, 768, 3072, 3072, 3072, 768, false},
    {"forward", false, true, 512, 384, 384, 384, 384, 1152, false},
    {"forward", false, true, 512, 384, 1536, 1536, 1536, 384, false},
    {"backward", false, false, 256, 384, 768, 768, 768, 768, false},
    {"backward", false, false, 256, 384, 2304, 2304, 768, 768, false},
    {"backward", false, false, 256, 768, 3072, 3072, 768, 768, false},
    {"backward", false, false, 512, 384, 1152, 1152, 384, 384, false},
    {"backward", false, false, 256, 768, 12576, 50304, 768, 768, false},
    {"weights", true, false, 512, 768, 256, 2304, 768, 768, false},
    {"weights", true, false, 384, 768, 256, 768, 768, 768, false},
    {"weights", true, false, 288, 384, 1024, 1152, 384, 384, false},
    {"weights", true, false, 512, 384, 256, 3072, 768, 768, false},
    {"attention", false, true, 64, 128, 64, 64, 64, 128, true},
    {"attention", false, false, 64, 64, 128, 128, 64, 64, true},
    {"attention", true, false, 128, 64, 64, 128, 64, 64, true},
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
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
        perror("sgemm: buffer");
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE); // as the device's arena
    for (size_t i = 0; i < n; i++) {
        p[i] = (float)(i % 13) / 13 - 0.5f;
    }
    return p;
}

// The next piece of n floats of far memory.
static float *piece(float *far, size_t n)
{
    static size_t at;
    at = at + 2 * n > FAR_FLOATS ? 0 : at + n;
    return far + at;
}

// GFLOP/s of one turn. In forward and backward products b is far, in gradients of weights c is.
static double rate(sgemm_fn sgemm, const struct shape *s, float *far, float *a, float *other)
{
    size_t repeat = s->near ? 200 : 1;
    bool far_c = s->ta && !s->near;
    float *b = s->near || far_c ? other : piece(far, (s->tb ? s->n : s->k) * s->ldb);
    float *c = s->near ? far : far_c ? piece(far, s->m * s->ldc) : other;
    double start = now();
    for (size_t r = 0; r < repeat; r++) {
        sgemm(s->ta, s->tb, s->m, s->n, s->k, a, s->lda, b, s->ldb, 0, c, s->ldc);
    }
    return 2.0 * (double)(s->m * s->n * s->k * repeat) / (now() - start) / 1e9;
}

int main(void)
{
    enum isa isa;
    struct error err;
    if (isa_choose(&isa, &err)) {
        fprintf(stderr, "sgemm: %s\n", err.text);
        return 1;
    }
    char name[64] = "no OpenBLAS", why[128];
    sgemm_fn own = cpu_sgemm(isa), blas = blas_open(isa, name, sizeof name, why, sizeof why);
    if (!blas) {
        fprintf(stderr, "sgemm: %s\n", why);
        return 1;
    }
    float *far = buffer(FAR_FLOATS), *a = buffer((size_t)256 * 50304);
    float *other = buffer((size_t)4 << 20);
    double best = 0;
    printf("%-7s own / %s\n%-10s    %5s x%5s x%6s %9s %9s %7s %15s\n", isa_name(isa), name, "", "m",
           "n", "k", "blas", "own", "ratio", "of large: own");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct shape *s = shapes + i;
        double x[TURNS], y[TURNS], ratio[TURNS];
        for (int t = -2; t < TURNS; t++) {
            int at = t < 0 ? 0 : t;
            x[at] = rate(blas, s, far, a, other);
            y[at] = rate(own, s, far, a, other);
            ratio[at] = y[at] / x[at];
        }
        double blas_rate = median(x, TURNS), own_rate = median(y, TURNS);
        best = i == 0 ? blas_rate : best;
        printf("%-10s %c%c %5zu x%5zu x%6zu %9.1f %9.1f %7.3f %15.3f\n", s->what, s->ta ? 'T' : 'N',
               s->tb ? 'T' : 'N', s->m, s->n, s->k, blas_rate, own_rate, median(ratio, TURNS),
               own_rate / best);
    }
    return 0;
}
