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
// Rows are divided into groups of nearly equal size, each with a loop of its own, so that no row is
// padded. About 0.7 MB of stack. Small operands, as in attention, are not packed at all.
//
// Each element of c is a sum over k in order, cut every KC: its bits depend on k and the ISA only.
// dev/sgemm.c holds it against OpenBLAS. Rejected: 8 x 3 vectors (columns come in multiples of 16),
// KC 384 (no faster, and the strip then fills L1), packing all of op(b) at once (far memory in
// bursts).
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#define min(a, b) ((a) < (b) ? (a) : (b))

// The block of c: MR x NR, in MR x 2 vectors; MR_STEP is the distance of packed columns of a.
#if VEC_BYTES == 64
#define MR      14
#define MR_STEP 16
#else
#define MR      6
#define MR_STEP 8
#endif
#define NR     ((size_t)(2 * VEC_BYTES / 4))
#define KC     ((size_t)256)
#define MC     ((size_t)512)
#define GROUPS (MC / MR + 1)
#define QUADS  ((MR + 3) / 4) // of rows
// Steps along k that packed columns of a are fetched ahead of their use.
#define AHEAD ((size_t)32)
// An operand of up to so many floats stays in L1 or nearly so, and is read where it lies.
#define SMALL ((size_t)16384)

// Wholly, and before the compiler decides what may live in registers.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 14")
#endif

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
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[0] + p)),
                                _mm_loadu_ps(row[4] + p), 1);
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
                const float *row = x.at + p * x.along;
                memcpy(out + p * step, row, VEC_BYTES / 2);
                memcpy(out + p * step + w - VL / 2, row + w - VL / 2, VEC_BYTES / 2);
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

// What is to be in the cache soon: so many pairs of lines, step floats from one to the next.
struct fetch {
    const float *at;
    size_t pair, step;
};

struct block {
    struct view a, b; // b.across is 1
    size_t k;
    float *c;
    size_t ldc;
    bool add;
    struct fetch next; // a pair every 8 steps along k
};

// c(m,NR) = a(m,k) b(k,NR), or +=. m is a constant where this is inlined.
static inline __attribute__((always_inline)) void micro(const struct block *t, size_t m)
{
    vf acc[MR][2];
    const float *b = t->b.at, *next = t->next.at, *row[QUADS];
    size_t across = t->a.across, a_step = t->a.along, b_step = t->b.along;
    UNROLL
    for (size_t q = 0; q < QUADS; q++) {
        row[q] = t->a.at + 4 * q * across;
        __asm__("" : "+r"(row[q])); // else the compiler wants 14 offsets in registers
    }
    UNROLL
    for (size_t i = 0; i < m; i++) {
        acc[i][0] = acc[i][1] = (vf){0};
        __builtin_prefetch(t->c + i * t->ldc, 1);
        __builtin_prefetch(t->c + i * t->ldc + VL, 1);
    }
    for (size_t p = t->k; p > 0; p--) {
        if (p % 8 == 0) {
            __builtin_prefetch(next);
            __builtin_prefetch(next + t->next.pair);
            next += t->next.step;
        }
        vf b0 = vloadf(b), b1 = vloadf(b + VL);
        __builtin_prefetch(row[0] + AHEAD * MR_STEP);
        UNROLL
        for (size_t i = 0; i < m; i++) {
            vf ai = vset(row[i / 4][i % 4 * across]);
            acc[i][0] = vfma(ai, b0, acc[i][0]);
            acc[i][1] = vfma(ai, b1, acc[i][1]);
        }
        UNROLL
        for (size_t q = 0; q < QUADS; q++) {
            row[q] += a_step;
        }
        b += b_step;
    }
    float *c = t->c;
    UNROLL
    for (size_t i = 0; i < m; i++, c += t->ldc) {
        vstoref(c, t->add ? vloadf(c) + acc[i][0] : acc[i][0]);
        vstoref(c + VL, t->add ? vloadf(c + VL) + acc[i][1] : acc[i][1]);
    }
}

#if MR == 14
#define EACH(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10) F(11) F(12) F(13) F(14)
#else
#define EACH(F) F(1) F(2) F(3) F(4) F(5) F(6)
#endif
#define NAME(m) micro_##m,
#define MICRO(m)                                                                                   \
    static void micro_##m(const struct block *t)                                                   \
    {                                                                                              \
        micro(t, m);                                                                               \
    }
EACH(MICRO)
static void (*const micro_of[MR + 1])(const struct block *) = {NULL, EACH(NAME)};

// A block at the right edge, of w < NR columns: by way of a whole one.
static void edge(const struct block *block, size_t m, size_t w)
{
    float whole[MR * NR];
    struct block t = *block;
    t.c = whole;
    t.ldc = NR;
    t.add = false;
    micro_of[m](&t);
    for (size_t i = 0; i < m; i++) {
        float *c = block->c + i * block->ldc;
        for (size_t j = 0; j < w; j++) {
            c[j] = whole[i * NR + j] + (block->add ? c[j] : 0.0f);
        }
    }
}

static struct view from(struct view x, size_t along, size_t across)
{
    x.at += along * x.along + across * x.across;
    return x;
}

// The part of the next strip (NR across, k along) that is fetched during group g.
static struct fetch share(struct view strip, size_t k, size_t g)
{
    if (strip.along == 1) {
        return (struct fetch){from(strip, 0, 2 * g % NR).at, strip.across, 8};
    }
    return (struct fetch){from(strip, g % 8 * (k / 8), 0).at, VL, strip.along};
}

// c(m,n) = a(m,k) b(k,n), or +=; m <= MC, k <= KC. after: the strip that the next call starts with.
static void panel(size_t m, size_t n, size_t k, struct view a, struct view b, struct view after,
                  bool add, float *c, size_t ldc)
{
    _Alignas(64) float packed_a[GROUPS * MR_STEP * KC], packed_b[KC * NR];
    bool pack_a = m * a.across > SMALL || k * a.along > SMALL;
    bool pack_b = b.across != 1 || n % NR || k * b.along > SMALL;
    struct view group[GROUPS];
    size_t first[GROUPS + 1], groups = (m + MR - 1) / MR; // as equal as can be
    for (size_t g = 0; g <= groups; g++) {
        first[g] = g * m / groups;
    }
    for (size_t g = 0; g < groups; g++) {
        group[g] = from(a, 0, first[g]);
        if (pack_a) {
            float *to = packed_a + g * MR_STEP * KC;
            pack(to, MR_STEP, group[g], k, first[g + 1] - first[g]);
            group[g] = (struct view){to, MR_STEP, 1};
        }
    }
    for (size_t j = 0; j < n; j += NR) {
        struct block t = {.b = from(b, 0, j), .k = k, .ldc = ldc, .add = add};
        struct view next = j + NR < n ? from(b, 0, j + NR) : after;
        if (pack_b) {
            pack(packed_b, NR, t.b, k, min(NR, n - j));
            t.b = (struct view){packed_b, NR, 1};
        }
        for (size_t g = 0; g < groups; g++) {
            t.a = group[g];
            t.c = c + first[g] * ldc + j;
            t.next = share(next, k, g);
            if (n - j < NR) {
                edge(&t, first[g + 1] - first[g], n - j);
            } else {
                micro_of[first[g + 1] - first[g]](&t);
            }
        }
    }
}

void OP(sgemm)(bool ta, bool tb, size_t m, size_t n, size_t k, const float *a, size_t lda,
               const float *b, size_t ldb, float beta, float *c, size_t ldc)
{
    struct view va = {a, ta ? lda : 1, ta ? 1 : lda}, vb = {b, tb ? 1 : ldb, tb ? ldb : 1};
    for (size_t p = 0; p < k; p += KC) {
        for (size_t i = 0; i < m; i += MC) {
            struct view after = from(vb, i + MC < m ? p : min(p + KC, k - 1), 0);
            panel(min(MC, m - i), n, min(KC, k - p), from(va, p, i), from(vb, p, 0), after,
                  p > 0 || beta != 0, c + i * ldc, ldc);
        }
    }
}
