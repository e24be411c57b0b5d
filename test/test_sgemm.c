// The matrix product of our own, in every ISA that this processor has, against sums in double.
//
// Shapes around the edges of its blocks and random ones; every transposition, rows that lie further
// apart than they are long, beta 0 over NaN, beta 1, and canaries around every row of c.
#include "kernels/cpu/cpu.h"
#include "test/cmocka.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CANARY (-12345.0f)

static uint64_t rng;

static size_t below(size_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (size_t)(rng >> 33) % n;
}

static float uniform(void)
{
    return (float)below(1 << 24) * 0x1p-23f - 1;
}

struct matrix {
    float *at;
    size_t ld;
};

// Exactly as large as it must be, so that a sanitizer sees a read beyond the end.
static struct matrix matrix(size_t rows, size_t cols)
{
    struct matrix x = {.ld = cols + (below(2) ? below(9) : 0)};
    size_t n = (rows - 1) * x.ld + cols;
    x.at = malloc(n * sizeof *x.at);
    assert_non_null(x.at);
    for (size_t i = 0; i < n; i++) {
        x.at[i] = uniform();
    }
    return x;
}

struct shape {
    bool ta, tb;
    size_t m, n, k;
    bool add;
};

static float element(struct matrix x, bool transposed, size_t row, size_t col)
{
    return transposed ? x.at[col * x.ld + row] : x.at[row * x.ld + col];
}

static void check_element(struct shape s, struct matrix a, struct matrix b, size_t i, size_t j,
                          float old, float got)
{
    double sum = s.add ? (double)old : 0, size = fabs(sum);
    for (size_t p = 0; p < s.k; p++) {
        double x = (double)element(a, s.ta, i, p) * (double)element(b, s.tb, p, j);
        sum += x;
        size += fabs(x);
    }
    double most = FLT_EPSILON * (2 + sqrt((double)s.k)) * size;
    if (!(fabs((double)got - sum) <= most)) {
        fail_msg("%c%c %zux%zux%zu add %d: c[%zu][%zu] is %.9g, not %.9g", s.ta ? 'T' : 'N',
                 s.tb ? 'T' : 'N', s.m, s.n, s.k, s.add, i, j, (double)got, sum);
    }
}

// Elements of c that are checked: all of a small one, else samples and the last row and column.
static void check_product(struct shape s, struct matrix a, struct matrix b, size_t ldc,
                          const float *old, const float *c)
{
    bool small = s.m * s.n * s.k < 400000;
    for (size_t i = 0; i < s.m; i++) {
        for (size_t j = 0; j < s.n; j++) {
            if (small || i + 1 == s.m || j + 1 == s.n || below(50) == 0) {
                check_element(s, a, b, i, j, old[i * ldc + j], c[i * ldc + j]);
            }
        }
    }
}

static void run(sgemm_fn sgemm, struct shape s)
{
    struct matrix a = s.ta ? matrix(s.k, s.m) : matrix(s.m, s.k);
    struct matrix b = s.tb ? matrix(s.n, s.k) : matrix(s.k, s.n);
    size_t ldc = s.n + 1 + below(9), n = (s.m + 2) * ldc; // a row above and one below
    float *c = malloc(n * sizeof *c), *old = malloc(n * sizeof *old);
    assert_true(c && old);
    for (size_t i = 0; i < n; i++) {
        bool inside = i / ldc >= 1 && i / ldc <= s.m && i % ldc < s.n;
        old[i] = !inside ? CANARY : s.add ? uniform() : NAN;
    }
    memcpy(c, old, n * sizeof *c);
    sgemm(s.ta, s.tb, s.m, s.n, s.k, a.at, a.ld, b.at, b.ld, s.add ? 1 : 0, c + ldc, ldc);
    check_product(s, a, b, ldc, old + ldc, c + ldc);
    for (size_t i = 0; i < n; i++) {
        if (i / ldc < 1 || i / ldc > s.m || i % ldc >= s.n) {
            assert_true(c[i] == CANARY);
        }
    }
    free(a.at);
    free(b.at);
    free(c);
    free(old);
}

static sgemm_fn sgemm_of(void **state)
{
    struct error err;
    enum isa isa = *(enum isa *)*state, best;
    unsetenv("TRAIN_GPT_ISA");
    assert_int_equal(isa_choose(&best, &err), STATUS_OK);
    if (isa > best) {
        fprintf(stderr, "skipped: this processor has no %s\n", isa_name(isa));
        skip();
    }
    return cpu_sgemm(isa);
}

// All transpositions of a shape, set and add.
static void run_all(sgemm_fn sgemm, size_t m, size_t n, size_t k)
{
    for (int t = 0; t < 8; t++) {
        run(sgemm, (struct shape){t & 1, t & 2, m, n, k, t & 4});
    }
}

static void random_shapes(void **state)
{
    sgemm_fn sgemm = sgemm_of(state);
    for (int i = 0; i < 200; i++) {
        run_all(sgemm, 1 + below(70), 1 + below(70), 1 + below(70));
    }
}

static void block_edges(void **state)
{
    sgemm_fn sgemm = sgemm_of(state);
    static const size_t m[] = {1, 6, 7, 14, 15, 29, 64, 511, 512, 513};
    static const size_t n[] = {1, 8, 16, 17, 32, 33, 64, 96};
    static const size_t k[] = {1, 4, 15, 16, 255, 256, 257, 515};
    for (int i = 0; i < 60; i++) {
        run_all(sgemm, m[below(10)], n[below(8)], k[below(8)]);
    }
    run_all(sgemm, 513, 97, 513);
}

// The bits depend on the shape, not on where the operands lie or how far apart their rows are.
static void same_bits(void **state)
{
    sgemm_fn sgemm = sgemm_of(state);
    enum { M = 37, N = 45, K = 300, LD = 331 };
    static float a[2][K * LD + 16], b[2][K * LD + 16], c[2][M * LD];
    for (int t = 0; t < 4; t++) {
        bool ta = t & 1, tb = t & 2;
        size_t a_rows = ta ? K : M, a_cols = ta ? M : K, b_rows = tb ? N : K, b_cols = tb ? K : N;
        for (size_t i = 0; i < a_rows * a_cols; i++) {
            a[0][i] = a[1][3 + i / a_cols * LD + i % a_cols] = uniform();
        }
        for (size_t i = 0; i < b_rows * b_cols; i++) {
            b[0][i] = b[1][5 + i / b_cols * LD + i % b_cols] = uniform();
        }
        sgemm(ta, tb, M, N, K, a[0], a_cols, b[0], b_cols, 0, c[0], N);
        sgemm(ta, tb, M, N, K, a[1] + 3, LD, b[1] + 5, LD, 0, c[1], LD);
        for (size_t i = 0; i < M; i++) {
            assert_memory_equal(c[0] + i * N, c[1] + i * LD, N * sizeof(float));
        }
    }
}

int main(void)
{
    static enum isa isa[ISA_COUNT] = {ISA_BASE, ISA_AVX2, ISA_AVX512};
    const char *seed = getenv("SEED");
    rng = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL);
    fprintf(stderr, "SEED=%llu\n", (unsigned long long)rng);
#define CASES(name, isa)                                                                           \
    {name ": random shapes", random_shapes, NULL, NULL, isa},                                      \
        {name ": edges of blocks", block_edges, NULL, NULL, isa},                                  \
    {                                                                                              \
        name ": same bits wherever the operands lie", same_bits, NULL, NULL, isa                   \
    }
    const struct CMUnitTest tests[] = {CASES("base", isa + 0), CASES("avx2", isa + 1),
                                       CASES("avx512", isa + 2)};
    return cmocka_run_group_tests_name("sgemm", tests, NULL, NULL);
}
