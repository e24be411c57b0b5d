// sgemm.c - the matrix product of our own, for one thread and one tile.
//
// Made for the tiles of training, where one side has a few hundred rows and the other operand, the
// weights, comes from far memory and is used once:
//
//        op(b)  k x n            a strip of NR columns is packed, KC deep, into a buffer that
//      +----+====+----+          stays in L1 for all rows of the tile; while it is in use, the
//   k  |    |strip next|         next strip is prefetched. So far memory is read smoothly, and
//      +----+====+----+          weights never take a detour through a second copy in L2.
//
//   +-------+ +----+====+----+
//   |=======| |    |block    |   MR rows of op(a), read where they lie or packed, times the strip
//   |       | |    +====+    |   give a block of c, which is held in registers over KC and then
//   +-------+ +----+----+----+   stored: no pass that clears c.
//    op(a) m x k     c m x n
//
// Each element of c is a sum over k in order, cut every KC: its bits depend on k and the ISA only.
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#define min(a, b) ((a) < (b) ? (a) : (b))

// The block of c: MR x NR, in MR x 2 vectors; MR_STEP is the distance of packed columns of a.
#if VEC_BYTES == 64
#define MR      ((size_t)14)
#define MR_STEP ((size_t)16)
#else
#define MR      ((size_t)6)
#define MR_STEP ((size_t)8)
#endif
#define NR (2 * VL)
#ifndef PF
#define PF 1
#endif
#ifndef CF
#define CF 1
#endif
#if CF
#define PREFC(x) __builtin_prefetch(x,1);__builtin_prefetch(x+VL,1)
#else
#define PREFC(x)
#endif
#ifndef KCN
#define KCN 256
#endif
#define KC ((size_t)KCN)
#define MC ((size_t)512)

// A matrix by the distances in memory of neighbours along k, and across it.
struct view {
    const float *at;
    size_t along, across;
};

#if VEC_BYTES > 16
#if VEC_BYTES == 64
#define MM(op) _mm512_##op
typedef __m512d vd;
typedef __m512 vm;

static inline vm load_lanes(const float *const *row, size_t p)
{
    vm v = _mm512_castps128_ps512(_mm_loadu_ps(row[0] + p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(row[4] + p), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(row[8] + p), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(row[12] + p), 3);
}
#else
#define MM(op) _mm256_##op
typedef __m256d vd;
typedef __m256 vm;

static inline vm load_lanes(const float *const *row, size_t p)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[0] + p)), _mm_loadu_ps(row[4] + p),
                                1);
}
#endif

// out[i*step + j] = row[j][p+i] for i < 4, j < VL.
static inline void transpose4(float *out, size_t step, const float *const *row, size_t p)
{
    vm x0 = load_lanes(row, p), x1 = load_lanes(row + 1, p);
    vm x2 = load_lanes(row + 2, p), x3 = load_lanes(row + 3, p);
    vd t0 = (vd)MM(unpacklo_ps)(x0, x1), t1 = (vd)MM(unpackhi_ps)(x0, x1);
    vd t2 = (vd)MM(unpacklo_ps)(x2, x3), t3 = (vd)MM(unpackhi_ps)(x2, x3);
    vstoref(out, (vf)MM(unpacklo_pd)(t0, t2));
    vstoref(out + step, (vf)MM(unpackhi_pd)(t0, t2));
    vstoref(out + 2 * step, (vf)MM(unpacklo_pd)(t1, t3));
    vstoref(out + 3 * step, (vf)MM(unpackhi_pd)(t1, t3));
}
#endif

// out[p*step + i] = element (p,i) of x, for p < k, i < width <= step. Beyond width: anything.
static void pack(float *out, size_t step, struct view x, size_t k, size_t width)
{
    for (size_t i = 0; i < width; i += VL, out += VL, x.at += VL * x.across) {
        size_t p = 0, w = min(VL, width - i);
        if (x.across == 1 && w == VL) {
            for (; p < k; p++) {
                vstoref(out + p * step, vloadf(x.at + p * x.along));
            }
        } else if (x.across == 1 && w >= VL / 2) { // two halves that overlap
            for (; p < k; p++) {
                const float *from = x.at + p * x.along, *end = from + w - VL / 2;
                memcpy(out + p * step, from, VEC_BYTES / 2);
                memcpy(out + p * step + w - VL / 2, end, VEC_BYTES / 2);
            }
        }
#if VEC_BYTES > 16
        if (x.along == 1) {
            const float *row[VEC_BYTES / 4];
            for (size_t j = 0; j < VL; j++) {
                row[j] = x.at + min(j, w - 1) * x.across;
            }
            for (; p + 4 <= k; p += 4) {
                transpose4(out + p * step, step, row, p);
            }
        }
#endif
        for (; p < k; p++) {
            for (size_t j = 0; j < VL; j++) {
                out[p * step + j] = x.at[p * x.along + min(j, w - 1) * x.across];
            }
        }
    }
}

struct block {
    const float *a, *b; // packed: MR_STEP and NR floats for each k
    size_t k;
    float *c;
    size_t ldc, width; // columns of c that exist
    bool add;
    const float *next; // to be fetched meanwhile, 4 lines for each 16 steps
    size_t next_pair, next_step;
};

// The first n of a row of c.
static inline void put(float *c, vf x, size_t n, bool add)
{
    if (n >= VL) {
        vstoref(c, add ? vloadf(c) + x : x);
    } else {
        vstoref_part(c, add ? vloadf_part(c, n, 0) + x : x, n);
    }
}

// c(m,NR) = a(m,k) b(k,NR). m is a constant where this is inlined.
static inline __attribute__((always_inline)) void micro(const struct block *t, size_t m)
{
    vf acc[MR][2];
    const float *a = t->a, *b = t->b, *next = t->next;
#pragma GCC unroll 14
    for (size_t i = 0; i < m; i++) {
        acc[i][0] = acc[i][1] = (vf){0};
        PREFC(t->c + i * t->ldc);
    }
#pragma GCC unroll 1
    for (size_t p = t->k; p > 0; p--) {
        vf b0 = vloadf(b), b1 = vloadf(b + VL);
#pragma GCC unroll 14
        for (size_t i = 0; i < m; i++) {
            vf ai = vset(a[i]);
            acc[i][0] = vfma(ai, b0, acc[i][0]);
            acc[i][1] = vfma(ai, b1, acc[i][1]);
        }
        if (PF && p % 8 == 0) {
            __builtin_prefetch(next);
            __builtin_prefetch(next + t->next_pair);
            next += t->next_step;
        }
        a += MR_STEP;
        b += NR;
    }
    float *c = t->c;
    size_t w = t->width;
#pragma GCC unroll 14
    for (size_t i = 0; i < m; i++, c += t->ldc) {
        put(c, acc[i][0], w, t->add);
        if (w > VL) {
            put(c + VL, acc[i][1], w - VL, t->add);
        }
    }
}

#define MICRO(m)                                                                                   \
    static void micro_##m(const struct block *t)                                                   \
    {                                                                                              \
        micro(t, m);                                                                               \
    }
MICRO(1) MICRO(2) MICRO(3) MICRO(4) MICRO(5) MICRO(6)
#if VEC_BYTES == 64
MICRO(7) MICRO(8) MICRO(9) MICRO(10) MICRO(11) MICRO(12) MICRO(13) MICRO(14)
#endif

static void (*const micro_of[])(const struct block *) = {
    NULL, micro_1, micro_2, micro_3, micro_4, micro_5, micro_6,
#if VEC_BYTES == 64
    micro_7, micro_8, micro_9, micro_10, micro_11, micro_12, micro_13, micro_14,
#endif
};

static struct view from(struct view x, size_t along, size_t across)
{
    x.at += along * x.along + across * x.across;
    return x;
}

static void panel(size_t m, size_t n, size_t k, struct view a, struct view b, bool add, float *c, size_t ldc)
{
    float pa[(VEC_BYTES == 64 ? 38 * 16 : 87 * 8) * KCN] __attribute__((aligned(64)));
    float pb[KCN * 2 * VEC_BYTES / 4] __attribute__((aligned(64)));
    size_t groups = (m + MR - 1) / MR;
    for (size_t g = 0; g < groups; g++) {
        size_t i = g * m / groups, end = (g + 1) * m / groups;
        pack(pa + g * MR_STEP * KC, MR_STEP, from(a, 0, i), k, end - i);
    }
    for (size_t j = 0; j < n; j += NR) {
        size_t w = min(NR, n - j);
        pack(pb, NR, from(b, 0, j), k, w);
        for (size_t g = 0; g < groups; g++) {
            size_t i = g * m / groups, end = (g + 1) * m / groups;
            struct block t = {.a = pa + g * MR_STEP * KC, .b = pb, .k = k,
                .c = c + i * ldc + j, .ldc = ldc, .width = w, .add = add};
            if (b.across == 1) {
                t.next = b.at + j + NR + g * k / 8 * b.along;
                t.next_pair = VL;
                t.next_step = b.along;
            } else {
                t.next = b.at + (j + NR + 2 * g % NR) * b.across;
                t.next_pair = b.across;
                t.next_step = 8;
            }
            micro_of[end - i](&t);
        }
    }
}

void OP(sgemm)(bool ta, bool tb, size_t m, size_t n, size_t k, const float *a, size_t lda,
               const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    struct view va = {a, ta ? lda : 1, ta ? 1 : lda}, vb = {b, tb ? 1 : ldb, tb ? ldb : 1};
    for (size_t p = 0; p < k; p += KC) {
        for (size_t i = 0; i < m; i += MC) {
            panel(min(MC, m - i), n, min(KC, k - p), from(va, p, i), from(vb, p, 0),
                  p > 0 || beta != 0, c + i * ldc, ldc);
        }
    }
}
