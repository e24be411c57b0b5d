// blas.c - OpenBLAS, loaded at run time.
//
// Not linked, for two reasons. The program then runs where it is not installed. And OpenBLAS picks
// its kernels while it is being loaded, by a list of processors that ends with its release: on a
// newer one it falls back to SSE, six times slower. So the kernel family is named for it here
// (OPENBLAS_CORETYPE, unless the user has set it) from what the processor supports, and because a
// wrong family computes wrong numbers, what was loaded is tested before it is used.
#include "kernels/cpu/cpu.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 }; // the values of CBLAS

static void (*cblas_sgemm)(int order, int ta, int tb, int m, int n, int k, float alpha,
                           const float *a, int lda, const float *b, int ldb, float beta, float *c,
                           int ldc);
static void (*set_num_threads)(int);

static void openblas_sgemm(bool ta, bool tb, size_t m, size_t n, size_t k, const float *a,
                           size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    cblas_sgemm(ROW_MAJOR, ta ? TRANS : NO_TRANS, tb ? TRANS : NO_TRANS, (int)m, (int)n, (int)k, 1,
                a, (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

// Every transposition, with sizes that no block divides, against plain sums in double.
static bool computes_right(sgemm_fn sgemm)
{
    enum { M = 67, N = 71, K = 133 };
    static float a[M * K], b[K * N], c[M * N];
    for (int i = 0; i < M * K; i++) {
        a[i] = (float)(i * 7 % 23) / 23 - 0.5f;
    }
    for (int i = 0; i < K * N; i++) {
        b[i] = (float)(i * 5 % 19) / 19 - 0.5f;
    }
    for (int t = 0; t < 4; t++) {
        bool ta = t & 1, tb = t & 2;
        sgemm(ta, tb, M, N, K, a, ta ? M : K, b, tb ? K : N, 0, c, N);
        for (int i = 0; i < M * N; i++) {
            int row = i / N, col = i % N;
            double sum = 0;
            for (int k = 0; k < K; k++) {
                sum +=
                    (double)a[ta ? k * M + row : row * K + k] * b[tb ? col * K + k : k * N + col];
            }
            if (!(fabs(sum - (double)c[i]) < 1e-4)) {
                return false;
            }
        }
    }
    return true;
}

sgemm_fn blas_open(enum isa isa, char *name, size_t name_size, char *why, size_t why_size)
{
    static const char *const core[ISA_COUNT] = {NULL, "HASWELL", "SKYLAKEX"};
    if (core[isa]) {
        setenv("OPENBLAS_CORETYPE", core[isa], 0);
    }
    setenv("OPENBLAS_NUM_THREADS", "1", 1); // read while loading: no threads of its own
    void *lib = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        snprintf(why, why_size, "OpenBLAS not found (Debian: libopenblas0-pthread)");
        return NULL;
    }
    *(void **)&cblas_sgemm = dlsym(lib, "cblas_sgemm");
    *(void **)&set_num_threads = dlsym(lib, "openblas_set_num_threads");
    char *(*corename)(void);
    *(void **)&corename = dlsym(lib, "openblas_get_corename");
    if (!cblas_sgemm || !set_num_threads || !corename) {
        snprintf(why, why_size, "libopenblas.so.0 lacks the functions that are needed");
        return NULL;
    }
    set_num_threads(1);
    snprintf(name, name_size, "OpenBLAS %s", corename());
    if (!computes_right(openblas_sgemm)) {
        snprintf(why, why_size, "%s computes wrong products on this processor", name);
        return NULL;
    }
    return openblas_sgemm;
}

bool blas_set_threads(int threads)
{
    if (set_num_threads) {
        set_num_threads(threads);
    }
    return set_num_threads;
}
