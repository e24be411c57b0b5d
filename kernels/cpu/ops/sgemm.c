// sgemm.c - a matrix product of our own, for machines without OpenBLAS.
//
// The usual scheme in its smallest form: panels of A and B are packed so that the innermost loop
// reads both in order, and a block of C stays in registers for KC steps. About half of OpenBLAS's
// speed; it exists so that the program runs everywhere, not to compete.
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#define KC ((size_t)256)
#define MR ((size_t)6)
#define NR (2 * VL)

static void pack(float *out, const float *x, size_t ld, bool transposed, size_t k, size_t width,
                 size_t used)
{
    for (size_t p = 0; p < k; p++) {
        for (size_t i = 0; i < width; i++) {
            out[p * width + i] = i >= used ? 0.0f : transposed ? x[i * ld + p] : x[p * ld + i];
        }
    }
}

// acc(MR,NR) = a(k,MR)^T b(k,NR), both packed.
static void micro(vf acc[MR][2], const float *a, const float *b, size_t k)
{
    for (size_t i = 0; i < MR; i++) {
        acc[i][0] = acc[i][1] = vset(0);
    }
    for (size_t p = 0; p < k; p++) {
        vf b0 = vloadf(b + p * NR), b1 = vloadf(b + p * NR + VL);
        for (size_t i = 0; i < MR; i++) {
            vf ai = vset(a[p * MR + i]);
            acc[i][0] = vfma(ai, b0, acc[i][0]);
            acc[i][1] = vfma(ai, b1, acc[i][1]);
        }
    }
}

static void add_block(float *c, size_t ldc, const vf acc[MR][2], size_t m, size_t n, float beta)
{
    for (size_t i = 0; i < m; i++) {
        float row[2 * VEC_BYTES / 4];
        vstoref(row, acc[i][0]);
        vstoref(row + VL, acc[i][1]);
        for (size_t j = 0; j < n; j++) {
            c[i * ldc + j] = row[j] + (beta == 0 ? 0.0f : c[i * ldc + j]);
        }
    }
}

void OP(sgemm)(bool ta, bool tb, size_t m, size_t n, size_t k, const float *a, size_t lda,
               const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    float pa[256 * 6], pb[256 * 2 * VEC_BYTES / 4];
    for (size_t p = 0; p < k; p += KC) {
        size_t kc = k - p < KC ? k - p : KC;
        for (size_t j = 0; j < n; j += NR) {
            size_t nr = n - j < NR ? n - j : NR;
            pack(pb, tb ? b + j * ldb + p : b + p * ldb + j, ldb, tb, kc, NR, nr);
            for (size_t i = 0; i < m; i += MR) {
                size_t mr = m - i < MR ? m - i : MR;
                vf acc[MR][2];
                pack(pa, ta ? a + p * lda + i : a + i * lda + p, lda, !ta, kc, MR, mr);
                micro(acc, pa, pb, kc);
                add_block(c + i * ldc + j, ldc, (const vf(*)[2])acc, mr, nr, p > 0 ? 1 : beta);
            }
        }
    }
}
