// attention_mma.cuh - attention on tensor cores: bf16 products with fp32 sums (attention.h).
//
// A block of 4 warps owns 64 or 128 rows and visits tiles of the others, which cp.async brings into
// shared memory while the tile before is computed with. A warp owns 16*MT rows alone: its scores
// stay in its registers, since the layout in which mma leaves a 16x16 tile of them,
//
//            columns 2t 2t+1   2t+8 2t+9            (g = lane / 4, t = lane % 4)
//   row g    d[0] d[1]         next n: d[0] d[1]
//   row g+8  d[2] d[3]         next n: d[2] d[3]
//
// is, rounded to bf16, the one in which it takes the left operand of the next product. Hence both
// backward kernels have the rows on the left that they own: scores are transposed where those are
// keys. What is called x and y is as in attention_plain.cuh.
//
// Tiles in shared memory have rows of HS values (hs rounded up to 16) and 16 bytes more: the rows
// of an 8x8 matrix then lie in different banks. What is behind hs or T is 0, and costs time only.
//
// What is rounded to bf16 on the way: p and ds, as left operands. Sums of p are of what was not
// rounded.
#ifndef KERNELS_CUDA_ATTENTION_MMA_CUH
#define KERNELS_CUDA_ATTENTION_MMA_CUH

#include "kernels/cuda/attention_plain.cuh" // its D
#include "kernels/cuda/ptx.h"

#define MMA_WARPS   4
#define MMA_THREADS (32 * MMA_WARPS)
#define MMA_LD(HS)  ((HS) + 8)

// Sizes of tiles, by head size: what fits into 255 registers a thread without spills (nvcc -Xptxas
// -v), and two blocks into a multiprocessor's shared memory. Kernels take such a struct.
template <int HEAD> struct mma_forward_sizes {
    static const int HS = HEAD;
    static const int MT = 2;                          // times 16 rows of a warp
    static const int COLUMNS = HEAD <= 112 ? 64 : 48; // keys visited at a time
    static const bool KEEP = HEAD <= 80;              // queries stay in registers
};
template <int HEAD> struct mma_keys_sizes { // where keys are owned, and queries visited
    static const int HS = HEAD;
    static const int MT = HEAD <= 64 ? 2 : 1;
    static const int COLUMNS = HEAD <= 64 ? 64 : 32;
    static const int SCORES = HEAD == 64 ? 16 : 32; // columns whose scores are in registers
};
template <int HEAD> struct mma_queries_sizes {
    static const int HS = HEAD;
    static const int MT = HEAD <= 96 ? 2 : 1;
    static const int COLUMNS = HEAD <= 64 ? 64 : 32;
    static const int SCORES = 32;
};

template <class S> __host__ __device__ constexpr int mma_rows()
{
    return 16 * S::MT * MMA_WARPS;
}
template <class S> constexpr size_t mma_forward_bytes()
{
    return (mma_rows<S>() + 2 * S::COLUMNS) * MMA_LD(S::HS) * sizeof(floatX);
}
template <class S> constexpr size_t mma_backward_bytes()
{
    return (2 * mma_rows<S>() + 4 * S::COLUMNS) * MMA_LD(S::HS) * sizeof(floatX) +
           4 * S::COLUMNS * sizeof(float);
}

// ---- tiles and operands ----

// Starts to copy rows first.. of x; 0 behind its T rows and hs columns.
template <int HS, int ROWS>
__device__ static inline void mma_load(floatX *tile, const floatX *x, size_t ld, int first,
                                       const struct attention &a)
{
    const int lanes = HS <= 16 ? 2 : HS <= 32 ? 4 : HS <= 64 ? 8 : 16; // of a row
    const int step = MMA_THREADS / lanes;
    static_assert(ROWS % step == 0, "a tile is whole passes of the block");
    int r = threadIdx.x / lanes, c = threadIdx.x % lanes * 8;
    const floatX *from = x + (first + r) * ld + c;
    floatX *to = tile + r * MMA_LD(HS) + c;
#pragma unroll 1 // its addresses, unrolled, would take the registers of scores
    for (int i = 0; i < ROWS / step; i++) {
        if (c < HS) {
            ptx_cp_async(to, from, first + r < a.T && c < a.hs);
        }
        r += step;
        from += step * ld;
        to += step * MMA_LD(HS);
    }
}

// Left operand: rows 0..15, columns k.. of a tile.
template <int HS> __device__ static inline void left(uint32_t a[4], const floatX *tile, int k)
{
    int lane = threadIdx.x % 32;
    ptx_ldmatrix(a, tile + lane % 16 * MMA_LD(HS) + k + lane / 16 * 8);
}

// Right operands: the transpose of rows 0..15, columns k.. of a tile; b[0..1] of the first 8 rows.
template <int HS>
__device__ static inline void right_transposed(uint32_t b[4], const floatX *tile, int k)
{
    int lane = threadIdx.x % 32;
    ptx_ldmatrix(b, tile + (lane / 16 * 8 + lane % 8) * MMA_LD(HS) + k + lane / 8 % 2 * 8);
}

// Right operands: rows 0..15, columns n.. of a tile; b[0..1] of the first 8 columns.
template <int HS> __device__ static inline void right(uint32_t b[4], const floatX *tile, int n)
{
    int lane = threadIdx.x % 32;
    ptx_ldmatrix_trans(b, tile + lane % 16 * MMA_LD(HS) + n + lane / 16 * 8);
}

__device__ static inline uint32_t pair_of(float lower, float upper)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(lower, upper);
    return *reinterpret_cast<uint32_t *>(&pair);
}

// s(16*MT,8*NT) = own(16*MT,HS) tile(8*NT,HS)^T. kept: own's operands, where KEEP.
template <int HS, int MT, int NT, bool KEEP>
__device__ static inline void mma_scores(float s[MT][NT][4], const floatX *own,
                                         const uint32_t kept[MT][KEEP ? HS / 16 : 1][4],
                                         const floatX *tile)
{
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        s[i / 4 / NT][i / 4 % NT][i % 4] = 0;
    }
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (KEEP) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    a[m][i] = kept[m][KEEP ? k : 0][i];
                }
            } else {
                left<HS>(a[m], own + 16 * m * MMA_LD(HS), 16 * k);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            right_transposed<HS>(b, tile + 8 * n * MMA_LD(HS), 16 * k);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ptx_mma(s[m][n], a[m], b);
                ptx_mma(s[m][n + 1], a[m], b + 2);
            }
        }
    }
}

// acc(16*MT,HS) += p(16*MT,8*NT) tile(8*NT,HS)
template <int HS, int MT, int NT>
__device__ static inline void mma_accumulate(float acc[MT][HS / 8][4], const float p[MT][NT][4],
                                             const floatX *tile)
{
#pragma unroll
    for (int k = 0; k < NT; k += 2) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            a[m][0] = pair_of(p[m][k][0], p[m][k][1]);
            a[m][1] = pair_of(p[m][k][2], p[m][k][3]);
            a[m][2] = pair_of(p[m][k + 1][0], p[m][k + 1][1]);
            a[m][3] = pair_of(p[m][k + 1][2], p[m][k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < HS / 8; n += 2) {
            uint32_t b[4];
            right<HS>(b, tile + 8 * k * MMA_LD(HS), 8 * n);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ptx_mma(acc[m][n], a[m], b);
                ptx_mma(acc[m][n + 1], a[m], b + 2);
            }
        }
    }
}

// Stores the warp's rows, first.. of x, times k[m][half], by way of its own rows of a tile that it
// needs no more: 16 bytes at a time.
template <int HS, int MT>
__device__ static inline void mma_store(floatX *x, size_t ld, int first, const struct attention &a,
                                        floatX *stage, const float acc[MT][HS / 8][4],
                                        const float k[MT][2])
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MT * (HS / 8) * 2; i++) {
        int m = i / 2 / (HS / 8), n = i / 2 % (HS / 8), half = i % 2;
        uint32_t *at = (uint32_t *)(stage + (16 * m + 8 * half + g) * MMA_LD(HS) + 8 * n + 2 * t);
        *at = pair_of(acc[m][n][2 * half] * k[m][half], acc[m][n][2 * half + 1] * k[m][half]);
    }
    __syncwarp();
    for (int i = lane; i < 16 * MT * (HS / 8); i += 32) {
        int r = i / (HS / 8), c = i % (HS / 8) * 8;
        if (first + r < a.T && c < a.hs) {
            store16(x + (first + r) * ld + c, load16(stage + r * MMA_LD(HS) + c));
        }
    }
}

// ---- forward ----

// Hides keys behind the query. row, column: of the lane's d[0] in the first tile.
template <int MT, int NT>
__device__ static inline void mma_mask(float s[MT][NT][4], int row, int column)
{
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        int m = i / 4 / NT, n = i / 4 % NT, j = i % 4;
        if (column + 8 * n + j % 2 > row + 16 * m + j / 2 * 8) {
            s[m][n][j] = -INFINITY;
        }
    }
}

// What a lane knows of its rows g and g+8 of each m.
template <int MT> struct softmax {
    float max[MT][2]; // of scores, the same in the four lanes of a row
    float sum[MT][2]; // of exp(s - max), the lane's own columns
};

// s becomes exp(s - max); what was summed under an older maximum shrinks.
template <int HS, int MT, int NT>
__device__ static inline void mma_softmax(float s[MT][NT][4], float o[MT][HS / 8][4],
                                          struct softmax<MT> *rows, float log2_scale)
{
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int m = i / 2, half = i % 2 * 2;
        float top = rows->max[m][i % 2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            top = fmaxf(top, fmaxf(s[m][n][half], s[m][n][half + 1]));
        }
        top = quad_max(top); // finite: each row sees key 0, which comes first
        float shrink = ptx_exp2((rows->max[m][i % 2] - top) * log2_scale);
        float shift = top * log2_scale, sum = 0;
#pragma unroll
        for (int n = 0; n < 2 * NT; n++) {
            float *p = &s[m][n / 2][half + n % 2];
            *p = ptx_exp2(fmaf(*p, log2_scale, -shift));
            sum += *p;
        }
        rows->max[m][i % 2] = top;
        rows->sum[m][i % 2] = rows->sum[m][i % 2] * shrink + sum;
#pragma unroll
        for (int n = 0; n < HS / 4; n++) {
            o[m][n / 2][half + n % 2] *= shrink;
        }
    }
}

// Keys and values have one place each: the values arrive while scores are computed, the next keys
// while the values are used.
template <class S>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_forward_mma(floatX *out, float *lse, const floatX *qkv, struct attention a)
{
    const int HS = S::HS, MT = S::MT, ROWS = mma_rows<S>(), KEYS = S::COLUMNS, NT = KEYS / 8;
    const bool KEEP = S::KEEP;
    DYN_SMEM(floatX, queries);
    floatX *keys = queries + ROWS * MMA_LD(HS), *values = keys + KEYS * MMA_LD(HS);
    struct block_part at = block_part_of(a, ROWS, false);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int first = at.first + warp * 16 * MT, end = lesser(a.T, at.first + ROWS);
    floatX *own = queries + warp * 16 * MT * MMA_LD(HS);
    float s[MT][NT][4], o[MT][HS / 8][4] = {{{0}}};
    uint32_t kept[MT][KEEP ? HS / 16 : 1][4];
    struct softmax<MT> rows;
    for (int m = 0; m < 2 * MT; m++) {
        rows.max[m / 2][m % 2] = -INFINITY;
        rows.sum[m / 2][m % 2] = 0;
    }
    mma_load<HS, ROWS>(queries, qkv + at.q, 3 * a.C, at.first, a);
    mma_load<HS, KEYS>(keys, qkv + at.k, 3 * a.C, 0, a);
    for (int k0 = 0; k0 < end; k0 += KEYS) {
        bool sees = k0 < first + 16 * MT;
        ptx_cp_async_wait();
        __syncthreads(); // the keys are there, the values have been used
        mma_load<HS, KEYS>(values, qkv + at.v, 3 * a.C, k0, a);
        if (KEEP && k0 == 0) {
#pragma unroll
            for (int i = 0; i < MT * (HS / 16); i++) {
                left<HS>(kept[i / (HS / 16)][i % (HS / 16)], own + i / (HS / 16) * 16 * MMA_LD(HS),
                         i % (HS / 16) * 16);
            }
        }
        if (sees) {
            mma_scores<HS, MT, NT, KEEP>(s, own, kept, keys);
        }
        ptx_cp_async_wait();
        __syncthreads(); // the values are there, the keys have been used
        if (k0 + KEYS < end) {
            mma_load<HS, KEYS>(keys, qkv + at.k, 3 * a.C, k0 + KEYS, a);
        }
        if (sees) {
            if (k0 + KEYS > first + 1) {
                mma_mask<MT, NT>(s, first + g, k0 + 2 * t);
            }
            mma_softmax<HS, MT, NT>(s, o, &rows, a.log2_scale);
            mma_accumulate<HS, MT, NT>(o, s, values);
        }
    }
    for (int m = 0; m < 2 * MT; m++) {
        float sum = quad_sum(rows.sum[m / 2][m % 2]);
        int row = first + m * 8 + g;
        if (t == 0 && row < a.T) {
            lse[at.lse + row] = rows.max[m / 2][m % 2] * a.scale + logf(sum);
        }
        rows.sum[m / 2][m % 2] = 1 / sum;
    }
    mma_store<HS, MT>(out + at.out, a.C, first, a, own, o, rows.sum);
}

// ---- backward ----

// log2(e) lse and D of the queries of a visited tile.
template <int COLUMNS> struct query_stats {
    float lse2[COLUMNS], dot[COLUMNS];
};

// s and dp become p and ds. edge: some of the columns are hidden from some of the rows.
template <int MT, int NT, bool KEYS>
__device__ static inline void mma_gradient(float s[MT][NT][4], float dp[MT][NT][4],
                                           const float lse2[MT][2], const float dot[MT][2],
                                           const float *column_lse2, const float *column_dot,
                                           int row, int column, bool edge, float log2_scale)
{
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        int m = i / 4 / NT, n = i / 4 % NT, j = i % 4;
        float L = KEYS ? column_lse2[8 * n + j % 2] : lse2[m][j / 2];
        s[m][n][j] = ptx_exp2(fmaf(s[m][n][j], log2_scale, -L));
    }
    if (edge) {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; i++) {
            int m = i / 4 / NT, n = i / 4 % NT, j = i % 4;
            int r = row + 16 * m + j / 2 * 8, c = column + 8 * n + j % 2;
            s[m][n][j] = (KEYS ? c < r : c > r) ? 0 : s[m][n][j];
        }
    }
#pragma unroll
    for (int i = 0; i < MT * NT * 4; i++) {
        int m = i / 4 / NT, n = i / 4 % NT, j = i % 4;
        float D = KEYS ? column_dot[8 * n + j % 2] : dot[m][j / 2];
        dp[m][n][j] = s[m][n][j] * (dp[m][n][j] - D);
    }
}

// KEYS: the block owns keys, and dqkv gets dK and dV; else queries, and dQ.
template <class S, bool KEYS>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    attention_backward_mma(floatX *dqkv, const floatX *dout, const floatX *qkv, const float *lse,
                           struct attention a)
{
    const int HS = S::HS, MT = S::MT, ROWS = mma_rows<S>(), COLUMNS = S::COLUMNS;
    const int SCORES = S::SCORES, NT = SCORES / 8, TILE = COLUMNS * MMA_LD(HS);
    DYN_SMEM(floatX, own_x);
    floatX *own_y = own_x + ROWS * MMA_LD(HS), *tiles = own_y + ROWS * MMA_LD(HS);
    struct query_stats<COLUMNS> *stats = (struct query_stats<COLUMNS> *)(tiles + 4 * TILE);
    struct block_part at = block_part_of(a, ROWS, KEYS);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int first = at.first + warp * 16 * MT, last = first + 16 * MT - 1;
    const floatX *visited_x = qkv + (KEYS ? at.q : at.k);
    const floatX *visited_y = KEYS ? dout + at.out : qkv + at.v;
    size_t ld_y = KEYS ? a.C : 3 * a.C;
    int begin = KEYS ? at.first : 0, end = KEYS ? a.T : lesser(a.T, at.first + ROWS);
    float lse2[MT][2], dot[MT][2], s[MT][NT][4], dp[MT][NT][4];
    float dx[MT][HS / 8][4] = {{{0}}}, dy[MT][KEYS ? HS / 8 : 1][4] = {{{0}}};
    for (int m = 0; !KEYS && m < 2 * MT; m++) {
        lse2[m / 2][m % 2] = query_lse2(lse + at.lse, first + 8 * m + g, a.T);
        dot[m / 2][m % 2] = query_dot(dqkv + at.q, first + 8 * m + g, a);
    }
    mma_load<HS, ROWS>(own_x, qkv + (KEYS ? at.k : at.q), 3 * a.C, at.first, a);
    mma_load<HS, ROWS>(own_y, KEYS ? qkv + at.v : dout + at.out, KEYS ? 3 * a.C : a.C, at.first, a);
    own_x += warp * 16 * MT * MMA_LD(HS);
    own_y += warp * 16 * MT * MMA_LD(HS);
    // Turn i loads tile i and computes with tile i-1, which arrived while i-2 was computed with.
    for (int c1 = begin, turn = 0; c1 < end + COLUMNS; c1 += COLUMNS, turn ^= 1) {
        int c0 = c1 - COLUMNS;
        ptx_cp_async_wait();
        __syncthreads(); // tile i-1 is there, i-2 has been used
        if (c1 < end) {
            mma_load<HS, COLUMNS>(tiles + 2 * turn * TILE, visited_x, 3 * a.C, c1, a);
            mma_load<HS, COLUMNS>(tiles + (2 * turn + 1) * TILE, visited_y, ld_y, c1, a);
            for (int i = threadIdx.x; KEYS && i < COLUMNS; i += MMA_THREADS) {
                stats[turn].lse2[i] = query_lse2(lse + at.lse, c1 + i, a.T);
                stats[turn].dot[i] = query_dot(dqkv + at.q, c1 + i, a);
            }
        }
        const floatX *x = tiles + 2 * (turn ^ 1) * TILE, *y = x + TILE;
#pragma unroll 1
        for (int n = 0; c0 >= begin && n < COLUMNS; n += SCORES) {
            if (KEYS ? c0 + n + SCORES <= first : c0 + n > last) {
                continue; // nothing here that the warp's rows exchange
            }
            bool edge = KEYS ? c0 + n < last : c0 + n + SCORES > first + 1;
            mma_scores<HS, MT, NT, false>(s, own_x, NULL, x + n * MMA_LD(HS));
            mma_scores<HS, MT, NT, false>(dp, own_y, NULL, y + n * MMA_LD(HS));
            mma_gradient<MT, NT, KEYS>(s, dp, lse2, dot, stats[turn ^ 1].lse2 + n + 2 * t,
                                       stats[turn ^ 1].dot + n + 2 * t, first + g, c0 + n + 2 * t,
                                       edge, a.log2_scale);
            if constexpr (KEYS) {
                mma_accumulate<HS, MT, NT>(dy, s, y + n * MMA_LD(HS));
            }
            mma_accumulate<HS, MT, NT>(dx, dp, x + n * MMA_LD(HS));
        }
    }
    float scale[MT][2], one[MT][2];
    for (int m = 0; m < 2 * MT; m++) {
        scale[m / 2][m % 2] = a.scale;
        one[m / 2][m % 2] = 1;
    }
    mma_store<HS, MT>(dqkv + (KEYS ? at.k : at.q), 3 * a.C, first, a, own_x, dx, scale);
    if constexpr (KEYS) {
        mma_store<HS, MT>(dqkv + at.v, 3 * a.C, first, a, own_y, dy, one);
    }
}

// ---- launches ----

template <class S>
static void launch_forward_mma(struct device *dev, floatX *out, float *lse, const floatX *qkv,
                               const struct attention &a)
{
    size_t smem = mma_forward_bytes<S>();
    ALLOW_SMEM(dev, attention_forward_mma<S>, smem);
    LAUNCH(dev, attention_forward_mma<S>, attention_blocks(a, mma_rows<S>()), MMA_THREADS, smem,
           out, lse, qkv, a);
}

template <class S, bool KEYS>
static void launch_backward_mma(struct device *dev, floatX *dqkv, const floatX *dout,
                                const floatX *qkv, const float *lse, const struct attention &a)
{
    size_t smem = mma_backward_bytes<S>();
    ALLOW_SMEM(dev, (attention_backward_mma<S, KEYS>), smem);
    LAUNCH(dev, (attention_backward_mma<S, KEYS>), attention_blocks(a, mma_rows<S>()), MMA_THREADS,
           smem, dqkv, dout, qkv, lse, a);
}

// 8 kernels of each, for head sizes rounded up to 16.
#define MMA_BY_HEAD_SIZE(launch)                                                                   \
    {                                                                                              \
        launch(16), launch(32), launch(48), launch(64), launch(80), launch(96), launch(112),       \
            launch(128)                                                                            \
    }

static void forward_mma(struct device *dev, void *out, float *lse, const void *qkv, size_t B,
                        size_t T, size_t C, size_t NH)
{
#define FORWARD(HEAD) launch_forward_mma<struct mma_forward_sizes<HEAD>>
    static void (*const launch[])(struct device *, floatX *, float *, const floatX *,
                                  const struct attention &) = MMA_BY_HEAD_SIZE(FORWARD);
    struct attention a = attention_of(B, T, C, NH);
    launch[(a.hs - 1) / 16](dev, (floatX *)out, lse, (const floatX *)qkv, a);
}

static void backward_mma(struct device *dev, void *dqkv, const void *dout, const void *qkv,
                         const void *out, const float *lse, size_t B, size_t T, size_t C, size_t NH)
{
    typedef void (*const launcher)(struct device *, floatX *, const floatX *, const floatX *,
                                   const float *, const struct attention &);
#define BACKWARD_KEYS(HEAD)    launch_backward_mma<struct mma_keys_sizes<HEAD>, true>
#define BACKWARD_QUERIES(HEAD) launch_backward_mma<struct mma_queries_sizes<HEAD>, false>
    static launcher keys[] = MMA_BY_HEAD_SIZE(BACKWARD_KEYS);
    static launcher queries[] = MMA_BY_HEAD_SIZE(BACKWARD_QUERIES);
    struct attention a = attention_of(B, T, C, NH);
    int size = (a.hs - 1) / 16;
    launch_row_dots(dev, (floatX *)dqkv, (const floatX *)dout, (const floatX *)out, a);
    keys[size](dev, (floatX *)dqkv, (const floatX *)dout, (const floatX *)qkv, lse, a);
    queries[size](dev, (floatX *)dqkv, (const floatX *)dout, (const floatX *)qkv, lse, a);
}

#endif
