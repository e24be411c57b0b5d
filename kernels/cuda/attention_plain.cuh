// attention_plain.cuh - attention by multiply-adds on tiles in shared memory, in fp32
// (attention.h).
//
// A block of 128 threads owns 32 rows, four threads to a row: thread `part` of them has columns
// part, part+4, .. of a tile of scores, and the same of what is accumulated. Both backward kernels
// are one: what they call x and y is
//
//              own x  own y   visited x  visited y   dx           dy
//   dK, dV     k      v       q          dout        dK = ds^T q  dV = p^T dout
//   dQ         q      dout    k          v           dQ = ds k
#ifndef KERNELS_CUDA_ATTENTION_PLAIN_CUH
#define KERNELS_CUDA_ATTENTION_PLAIN_CUH

#include "kernels/cuda/attention.h"

#define PLAIN_THREADS 128
#define PLAIN_ROWS    32 // of a block, and of a tile that it visits
#define PLAIN_SCORES  (PLAIN_ROWS / 4)

// A tile's rows are HS + 1 floats apart: as many banks.
template <int HS> struct plain_tile {
    float x[PLAIN_ROWS][HS + 1];
};
typedef float plain_scores[PLAIN_ROWS][PLAIN_ROWS + 1];

// Rows first.. of x, 0 behind its T rows and hs columns.
template <int HS>
__device__ static void plain_load(struct plain_tile<HS> *tile, const floatX *x, size_t ld,
                                  int first, const struct attention &a)
{
    for (int i = threadIdx.x; i < PLAIN_ROWS * HS; i += PLAIN_THREADS) {
        int r = i / HS, c = i % HS;
        bool valid = first + r < a.T && c < a.hs;
        tile->x[r][c] = valid ? to_float(x[(first + r) * ld + c]) : 0;
    }
}

// acc += p[r] tile, the thread's columns of it.
template <int HS>
__device__ static inline void plain_accumulate(float acc[HS / 4], const float p[PLAIN_ROWS],
                                               const struct plain_tile<HS> *tile, int part)
{
    for (int j = 0; j < PLAIN_ROWS; j++) {
        float w = p[j];
#pragma unroll
        for (int i = 0; i < HS / 4; i++) {
            acc[i] += w * tile->x[j][part + 4 * i];
        }
    }
}

// s = own[r] . the rows of tile that the thread has.
template <int HS>
__device__ static inline void plain_dots(float s[PLAIN_SCORES], const float own[HS + 1],
                                         const struct plain_tile<HS> *tile, int part, int hs)
{
#pragma unroll
    for (int j = 0; j < PLAIN_SCORES; j++) {
        s[j] = 0;
    }
    for (int d = 0; d < hs; d++) {
        float x = own[d];
#pragma unroll
        for (int j = 0; j < PLAIN_SCORES; j++) {
            s[j] += x * tile->x[part + 4 * j][d];
        }
    }
}

template <int HS>
__device__ static inline void plain_store(floatX *row, const float acc[HS / 4], float k, int part,
                                          int hs)
{
#pragma unroll
    for (int i = 0; i < HS / 4; i++) {
        if (part + 4 * i < hs) {
            row[part + 4 * i] = from_float<floatX>(acc[i] * k);
        }
    }
}

template <int HS> struct plain_forward_smem {
    struct plain_tile<HS> q, kv;
    plain_scores p;
};

template <int HS>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_forward_plain(floatX *out, float *lse, const floatX *qkv, struct attention a)
{
    DYN_SMEM(struct plain_forward_smem<HS>, smem);
    struct block_part at = block_part_of(a, PLAIN_ROWS, false);
    int r = threadIdx.x / 4, part = threadIdx.x % 4, row = at.first + r;
    float max = -INFINITY, sum = 0, o[HS / 4] = {0}, s[PLAIN_SCORES];
    plain_load(&smem->q, qkv + at.q, 3 * a.C, at.first, a);
    for (int k0 = 0; k0 < lesser(a.T, at.first + PLAIN_ROWS); k0 += PLAIN_ROWS) {
        __syncthreads();
        plain_load(&smem->kv, qkv + at.k, 3 * a.C, k0, a);
        __syncthreads();
        plain_dots(s, smem->q.x[r], &smem->kv, part, a.hs);
        float top = max;
        for (int j = 0; j < PLAIN_SCORES; j++) {
            s[j] = k0 + part + 4 * j <= row ? s[j] : -INFINITY;
            top = fmaxf(top, s[j]);
        }
        top = quad_max(top); // finite: each row sees key 0
        float shrink = exp2f((max - top) * a.log2_scale);
        max = top;
        sum *= shrink;
        for (int j = 0; j < PLAIN_SCORES; j++) {
            float p = exp2f((s[j] - top) * a.log2_scale);
            smem->p[r][part + 4 * j] = p;
            sum += p;
        }
#pragma unroll
        for (int i = 0; i < HS / 4; i++) {
            o[i] *= shrink;
        }
        __syncthreads();
        plain_load(&smem->kv, qkv + at.v, 3 * a.C, k0, a);
        __syncthreads();
        plain_accumulate(o, smem->p[r], &smem->kv, part);
    }
    sum = quad_sum(sum);
    if (row < a.T) {
        plain_store<HS>(out + at.out + row * a.C, o, 1 / sum, part, a.hs);
        if (part == 0) {
            lse[at.lse + row] = max * a.scale + logf(sum);
        }
    }
}

// D of a row and head, by four threads, into the first 4 bytes of that row of dQ.
static __global__ void __launch_bounds__(256)
    attention_row_dots(floatX *dqkv, const floatX *dout, const floatX *out, struct attention a)
{
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 4, n = (size_t)a.B * a.T * a.NH;
    int part = threadIdx.x % 4;
    size_t row = i / a.NH, head = i % a.NH * a.hs;
    float sum = 0;
    for (int d = part * packed<floatX>::size; i < n && d < a.hs; d += 4 * packed<floatX>::size) {
        packed<floatX> x = load16(dout + row * a.C + head + d);
        packed<floatX> y = load16(out + row * a.C + head + d);
        for (int j = 0; j < packed<floatX>::size; j++) {
            sum += to_float(x.x[j]) * to_float(y.x[j]);
        }
    }
    sum = quad_sum(sum);
    if (i < n && part == 0) {
        *(float *)(dqkv + row * 3 * a.C + head) = sum;
    }
}

template <int HS> struct plain_backward_smem {
    struct plain_tile<HS> own_x, own_y, x, y;
    plain_scores p, ds;
};

// The rows' own: log2(e) lse, and D. Queries behind the last get what makes p 0.
__device__ static inline float query_lse2(const float *lse, int query, int T)
{
    return query < T ? lse[query] * LOG2_E : INFINITY;
}
__device__ static inline float query_dot(const floatX *dq, int query, const struct attention &a)
{
    return query < a.T ? *(const float *)(dq + query * 3 * a.C) : 0;
}

// KEYS: the block owns keys, and dqkv gets dK and dV; else queries, and dQ.
template <int HS, bool KEYS>
__global__ void __launch_bounds__(PLAIN_THREADS)
    attention_backward_plain(floatX *dqkv, const floatX *dout, const floatX *qkv, const float *lse,
                             struct attention a)
{
    DYN_SMEM(struct plain_backward_smem<HS>, smem);
    struct block_part at = block_part_of(a, PLAIN_ROWS, KEYS);
    int r = threadIdx.x / 4, part = threadIdx.x % 4, row = at.first + r;
    plain_load(&smem->own_x, qkv + (KEYS ? at.k : at.q), 3 * a.C, at.first, a);
    plain_load(&smem->own_y, KEYS ? qkv + at.v : dout + at.out, KEYS ? 3 * a.C : a.C, at.first, a);
    float s[PLAIN_SCORES], dp[PLAIN_SCORES], dx[HS / 4] = {0}, dy[KEYS ? HS / 4 : 1] = {0};
    int end = KEYS ? a.T : lesser(a.T, at.first + PLAIN_ROWS);
    for (int c0 = KEYS ? at.first : 0; c0 < end; c0 += PLAIN_ROWS) {
        __syncthreads();
        plain_load(&smem->x, qkv + (KEYS ? at.q : at.k), 3 * a.C, c0, a);
        plain_load(&smem->y, KEYS ? dout + at.out : qkv + at.v, KEYS ? a.C : 3 * a.C, c0, a);
        __syncthreads();
        plain_dots(s, smem->own_x.x[r], &smem->x, part, a.hs);
        plain_dots(dp, smem->own_y.x[r], &smem->y, part, a.hs);
        for (int j = 0; j < PLAIN_SCORES; j++) {
            int column = c0 + part + 4 * j;
            int query = KEYS ? column : row, key = KEYS ? row : column;
            float L = query_lse2(lse + at.lse, query, a.T), D = query_dot(dqkv + at.q, query, a);
            float p = key <= query ? exp2f(s[j] * a.log2_scale - L) : 0;
            smem->p[r][part + 4 * j] = p;
            smem->ds[r][part + 4 * j] = p * (dp[j] - D);
        }
        __syncwarp(); // a row's threads are of one warp
        plain_accumulate(dx, smem->ds[r], &smem->x, part);
        if constexpr (KEYS) {
            plain_accumulate(dy, smem->p[r], &smem->y, part);
        }
    }
    if (row < a.T) {
        plain_store<HS>(dqkv + (KEYS ? at.k : at.q) + row * 3 * a.C, dx, a.scale, part, a.hs);
        if constexpr (KEYS) {
            plain_store<HS>(dqkv + at.v + row * 3 * a.C, dy, 1, part, a.hs);
        }
    }
}

template <int HS>
static void launch_forward_plain(struct device *dev, floatX *out, float *lse, const floatX *qkv,
                                 const struct attention &a)
{
    LAUNCH(dev, (attention_forward_plain<HS>), attention_blocks(a, PLAIN_ROWS), PLAIN_THREADS,
           sizeof(struct plain_forward_smem<HS>), out, lse, qkv, a);
}

static void forward_plain(struct device *dev, void *out, float *lse, const void *qkv, size_t B,
                          size_t T, size_t C, size_t NH)
{
    struct attention a = attention_of(B, T, C, NH);
    void (*const launch)(struct device *, floatX *, float *, const floatX *,
                         const struct attention &) = a.hs <= 32   ? launch_forward_plain<32>
                                                     : a.hs <= 64 ? launch_forward_plain<64>
                                                                  : launch_forward_plain<128>;
    launch(dev, (floatX *)out, lse, (const floatX *)qkv, a);
}

static void launch_row_dots(struct device *dev, floatX *dqkv, const floatX *dout, const floatX *out,
                            const struct attention &a)
{
    LAUNCH(dev, attention_row_dots, blocks_of((size_t)a.B * a.T * a.NH, 64), 256, 0, dqkv, dout,
           out, a);
}

template <int HS>
static void launch_backward_plain(struct device *dev, floatX *dqkv, const floatX *dout,
                                  const floatX *qkv, const float *lse, const struct attention &a)
{
    size_t smem = sizeof(struct plain_backward_smem<HS>);
    unsigned blocks = attention_blocks(a, PLAIN_ROWS);
    ALLOW_SMEM(dev, (attention_backward_plain<HS, true>), smem);
    ALLOW_SMEM(dev, (attention_backward_plain<HS, false>), smem);
    LAUNCH(dev, (attention_backward_plain<HS, true>), blocks, PLAIN_THREADS, smem, dqkv, dout, qkv,
           lse, a);
    LAUNCH(dev, (attention_backward_plain<HS, false>), blocks, PLAIN_THREADS, smem, dqkv, dout, qkv,
           lse, a);
}

static void backward_plain(struct device *dev, void *dqkv, const void *dout, const void *qkv,
                           const void *out, const float *lse, size_t B, size_t T, size_t C,
                           size_t NH)
{
    struct attention a = attention_of(B, T, C, NH);
    launch_row_dots(dev, (floatX *)dqkv, (const floatX *)dout, (const floatX *)out, a);
    void (*const launch)(struct device *, floatX *, const floatX *, const floatX *, const float *,
                         const struct attention &) = a.hs <= 32   ? launch_backward_plain<32>
                                                     : a.hs <= 64 ? launch_backward_plain<64>
                                                                  : launch_backward_plain<128>;
    launch(dev, (floatX *)dqkv, (const floatX *)dout, (const floatX *)qkv, lse, a);
}

// ---- one query ----

#define DECODE_WARPS 8
#define DECODE_KEYS  4 // of a warp at a time
#define DECODE_DIMS  (ATTENTION_HEAD_SIZE_MAX / 32)

// A block for a head. Its warps share the n keys out, and put their partial softmaxes together in
// order.
static __global__ void __launch_bounds__(32 * DECODE_WARPS)
    attention_decode_kernel(floatX *out, const floatX *qkv, int n, struct attention a)
{
    __shared__ float parts[DECODE_WARPS][ATTENTION_HEAD_SIZE_MAX];
    __shared__ float maxima[DECODE_WARPS], sums[DECODE_WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const floatX *head = qkv + (size_t)blockIdx.x * a.hs, *last = head + (n - 1) * 3 * a.C;
    float max = -INFINITY, sum = 0, q[DECODE_DIMS], o[DECODE_DIMS] = {0};
    for (int i = 0; i < DECODE_DIMS; i++) {
        q[i] = lane + 32 * i < a.hs ? to_float(last[lane + 32 * i]) : 0;
    }
    for (int t = warp * DECODE_KEYS; t < n; t += DECODE_WARPS * DECODE_KEYS) {
        float s[DECODE_KEYS] = {0}, v[DECODE_KEYS][DECODE_DIMS] = {{0}}, top = max;
        for (int j = 0; j < DECODE_KEYS; j++) {
            const floatX *row = head + (size_t)lesser(t + j, n - 1) * 3 * a.C;
            for (int i = 0; i < DECODE_DIMS; i++) {
                if (lane + 32 * i < a.hs) {
                    s[j] += q[i] * to_float(row[a.C + lane + 32 * i]);
                    v[j][i] = to_float(row[2 * a.C + lane + 32 * i]);
                }
            }
        }
        for (int j = 0; j < DECODE_KEYS; j++) {
            s[j] = warp_sum(s[j]);
            s[j] = t + j < n ? s[j] : -INFINITY;
            top = fmaxf(top, s[j]);
        }
        float shrink = exp2f((max - top) * a.log2_scale);
        max = top;
        sum *= shrink;
        for (int i = 0; i < DECODE_DIMS; i++) {
            o[i] *= shrink;
        }
        for (int j = 0; j < DECODE_KEYS; j++) {
            float p = exp2f((s[j] - top) * a.log2_scale);
            sum += p;
            for (int i = 0; i < DECODE_DIMS; i++) {
                o[i] += p * v[j][i];
            }
        }
    }
    for (int i = 0; i < DECODE_DIMS; i++) {
        parts[warp][lane + 32 * i] = o[i];
    }
    if (lane == 0) {
        maxima[warp] = max;
        sums[warp] = sum;
    }
    __syncthreads();
    if ((int)threadIdx.x < a.hs) {
        float top = maxima[0], value = 0, total = 0; // warp 0 has seen a key
        for (int w = 1; w < DECODE_WARPS; w++) {
            top = fmaxf(top, maxima[w]);
        }
        for (int w = 0; w < DECODE_WARPS; w++) {
            float k = exp2f((maxima[w] - top) * a.log2_scale);
            value += k * parts[w][threadIdx.x];
            total += k * sums[w];
        }
        out[(size_t)blockIdx.x * a.hs + threadIdx.x] = from_float<floatX>(value / total);
    }
}

#endif
