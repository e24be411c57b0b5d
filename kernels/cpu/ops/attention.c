// attention.c - causal self-attention by tiles, with an online softmax.
//
// Scores exist only for one tile of TILE_Q queries by TILE_K keys at a time:
//
//           keys 0 ..........
//   query  [####|\   |    |    ]    # whole tiles, \ tiles on the diagonal (masked),
//     |    [####|####|\   |    ]    blank: above the diagonal, never visited
//     v    [####|####|####|\   ]
//
// Forward, per query row, over the tiles of keys from left to right: the running maximum m and the
// running sum l of exp(s - m); what was accumulated under an older maximum is rescaled.
// Backward rebuilds a tile of probabilities from the kept log-sum-exp: p = exp(s - lse).
//
// The task of a thread is (batch, head, query tile) forward and (batch, head) backward; each sum is
// in the order of the tiles, so the bits do not depend on the number of threads.
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#include <math.h>

#define min(a, b) ((a) < (b) ? (a) : (b))
#define TILE_Q    ATTENTION_TILE_Q
#define TILE_K    ATTENTION_TILE_K

// Copies rows x hs out of a matrix with row stride ld, in fp32, times k.
static void gather(float *out, const floatX *x, size_t ld, size_t rows, size_t hs, float k)
{
    for (size_t r = 0; r < rows; r++) {
        size_t i = 0;
        for (; i + VL <= hs; i += VL) {
            vstoref(out + r * hs + i, vload(x + r * ld + i) * k);
        }
        for (; i < hs; i++) {
            out[r * hs + i] = load(x + r * ld + i) * k;
        }
    }
}

static void scatter(floatX *out, const float *x, size_t ld, size_t rows, size_t hs, float k)
{
    for (size_t r = 0; r < rows; r++) {
        size_t i = 0;
        for (; i + VL <= hs; i += VL) {
            vstore(out + r * ld + i, vloadf(x + r * hs + i) * k);
        }
        for (; i < hs; i++) {
            store(out + r * ld + i, x[r * hs + i] * k);
        }
    }
}

static float row_max(const float *s, size_t n)
{
    vf m = vset(-INFINITY);
    size_t i = 0;
    for (; i + VL <= n; i += VL) {
        m = vmax(vloadf(s + i), m);
    }
    return vmax_all(vmax(vloadf_part(s + i, n - i, -INFINITY), m));
}

// s = exp(s - max) for the first n of `width`, 0 for the rest; returns the sum.
static float row_exp(float *s, float max, size_t n, size_t width)
{
    vf sum = {0};
    size_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf e = vexp(vloadf(s + i) - max);
        vstoref(s + i, e);
        sum += e;
    }
    for (; i < n; i++) {
        vf e = vexp(vset(s[i] - max));
        s[i] = e[0];
        sum[0] += e[0];
    }
    memset(s + n, 0, (width - n) * sizeof *s);
    return vsum(sum);
}

static void row_times(float *x, float k, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] *= k;
    }
}

static float row_dot(const float *a, const float *b, size_t n)
{
    vf sum = {0};
    size_t i = 0;
    for (; i + VL <= n; i += VL) {
        sum = vfma(vloadf(a + i), vloadf(b + i), sum);
    }
    return vsum(vfma(vloadf_part(a + i, n - i, 0), vloadf_part(b + i, n - i, 0), sum));
}

// Keys of the tile at k0 that query q may see, of nk.
static size_t visible(size_t q, size_t k0, size_t nk)
{
    return q < k0 ? 0 : min(nk, q - k0 + 1);
}

struct head {
    size_t T, C, hs;
    const floatX *q, *k, *v; // (T, ld) each, hs used
    size_t ld;
    float scale;
};

static struct head head_at(const floatX *qkv, size_t b, size_t h, size_t T, size_t C, size_t NH)
{
    size_t hs = C / NH;
    const floatX *q = qkv + b * T * 3 * C + h * hs;
    return (struct head){.T = T,
                         .C = C,
                         .hs = hs,
                         .q = q,
                         .k = q + C,
                         .v = q + 2 * C,
                         .ld = 3 * C,
                         .scale = 1.0f / sqrtf((float)hs)};
}

static void forward_tile(struct cpu *cpu, const struct head *h, floatX *out, float *lse, size_t q0,
                         float *scratch)
{
    size_t hs = h->hs, nq = min(TILE_Q, h->T - q0);
    float *q = scratch, *o = q + TILE_Q * hs, *k = o + TILE_Q * hs, *v = k + TILE_K * hs;
    float *s = v + TILE_K * hs, m[TILE_Q], l[TILE_Q];
    gather(q, h->q + q0 * h->ld, h->ld, nq, hs, h->scale);
    for (size_t i = 0; i < nq; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
    }
    for (size_t k0 = 0; k0 < q0 + nq; k0 += TILE_K) {
        size_t nk = min(TILE_K, q0 + nq - k0);
        gather(k, h->k + k0 * h->ld, h->ld, nk, hs, 1);
        gather(v, h->v + k0 * h->ld, h->ld, nk, hs, 1);
        cpu->sgemm(false, true, nq, nk, hs, q, hs, k, hs, 0, s, nk);
        for (size_t i = 0; i < nq; i++) {
            size_t n = visible(q0 + i, k0, nk);
            float *si = s + i * nk, max = n ? row_max(si, n) : m[i];
            max = max > m[i] ? max : m[i];
            float shrink = k0 ? vexp(vset(m[i] - max))[0] : 0;
            l[i] = l[i] * shrink + row_exp(si, max, n, nk);
            m[i] = max;
            if (k0 && shrink != 1) {
                row_times(o + i * hs, shrink, hs);
            }
        }
        cpu->sgemm(false, false, nq, hs, nk, s, nk, v, hs, k0 > 0, o, hs);
    }
    for (size_t i = 0; i < nq; i++) {
        scatter(out + (q0 + i) * h->C, o + i * hs, 0, 1, hs, 1.0f / l[i]);
        lse[q0 + i] = m[i] + logf(l[i]);
    }
}

void OP(attention_forward)(struct device *dev, void *out, float *lse, const void *qkv, size_t B,
                           size_t T, size_t C, size_t NH)
{
    size_t tiles = (T + TILE_Q - 1) / TILE_Q;
#pragma omp parallel num_threads(dev->threads)
    {
        float *scratch = thread_scratch(dev);
#pragma omp for schedule(dynamic, 1)
        for (size_t task = 0; task < B * NH * tiles; task++) {
            size_t bh = task % (B * NH), b = bh / NH, h = bh % NH;
            size_t tile = tiles - 1 - task / (B * NH); // the longest rows first
            struct head head = head_at(qkv, b, h, T, C, NH);
            forward_tile(cpu_of(dev), &head, (floatX *)out + b * T * C + h * head.hs, lse + bh * T,
                         tile * TILE_Q, scratch);
        }
    }
}

struct backward {
    struct cpu *cpu;
    struct head head;
    float *q, *dout, *dq, *D; // (T,hs) q scaled; D(T) = rowsum(dout * out)
    float *k, *v, *dk, *dv;   // (TILE_K,hs)
    float *p, *ds;            // (TILE_Q,TILE_K)
    const float *lse;         // (T)
};

static struct backward backward_at(struct cpu *cpu, struct head head, const float *lse,
                                   float *scratch)
{
    size_t row = head.T * head.hs, tile = TILE_K * head.hs;
    float *t = scratch + 3 * row + head.T, *s = t + 4 * tile;
    return (struct backward){.cpu = cpu,
                             .head = head,
                             .q = scratch,
                             .dout = scratch + row,
                             .dq = scratch + 2 * row,
                             .D = scratch + 3 * row,
                             .k = t,
                             .v = t + tile,
                             .dk = t + 2 * tile,
                             .dv = t + 3 * tile,
                             .p = s,
                             .ds = s + TILE_Q * TILE_K,
                             .lse = lse};
}

// Adds the part of dq, dk, dv that queries q0.. and the tile of keys at k0 exchange.
static void backward_tile(const struct backward *b, size_t q0, size_t k0, size_t nk, bool first)
{
    size_t hs = b->head.hs, nq = min(TILE_Q, b->head.T - q0);
    const float *q = b->q + q0 * hs, *dout = b->dout + q0 * hs;
    sgemm_fn sgemm = b->cpu->sgemm;
    sgemm(false, true, nq, nk, hs, q, hs, b->k, hs, 0, b->p, nk);
    sgemm(false, true, nq, nk, hs, dout, hs, b->v, hs, 0, b->ds, nk);
    for (size_t i = 0; i < nq; i++) {
        float *p = b->p + i * nk, *ds = b->ds + i * nk, D = b->D[q0 + i];
        row_exp(p, b->lse[q0 + i], visible(q0 + i, k0, nk), nk);
        for (size_t j = 0; j < nk; j++) {
            ds[j] = p[j] * (ds[j] - D);
        }
    }
    sgemm(true, false, nk, hs, nq, b->p, nk, dout, hs, !first, b->dv, hs);
    sgemm(true, false, nk, hs, nq, b->ds, nk, q, hs, !first, b->dk, hs);
    sgemm(false, false, nq, hs, nk, b->ds, nk, b->k, hs, k0 > 0, b->dq + q0 * hs, hs);
}

static void backward_head(const struct backward *b, floatX *dqkv, const floatX *dout,
                          const floatX *out, float *row)
{
    const struct head *h = &b->head;
    size_t T = h->T, C = h->C, hs = h->hs;
    gather(b->q, h->q, h->ld, T, hs, h->scale);
    gather(b->dout, dout, C, T, hs, 1);
    for (size_t t = 0; t < T; t++) {
        gather(row, out + t * C, 0, 1, hs, 1);
        b->D[t] = row_dot(b->dout + t * hs, row, hs);
    }
    for (size_t k0 = 0; k0 < T; k0 += TILE_K) {
        size_t nk = min(TILE_K, T - k0);
        gather(b->k, h->k + k0 * h->ld, h->ld, nk, hs, 1);
        gather(b->v, h->v + k0 * h->ld, h->ld, nk, hs, 1);
        size_t first = k0 / TILE_Q * TILE_Q;
        for (size_t q0 = first; q0 < T; q0 += TILE_Q) {
            backward_tile(b, q0, k0, nk, q0 == first);
        }
        scatter(dqkv + C + k0 * 3 * C, b->dk, 3 * C, nk, hs, 1);
        scatter(dqkv + 2 * C + k0 * 3 * C, b->dv, 3 * C, nk, hs, 1);
    }
    scatter(dqkv, b->dq, 3 * C, T, hs, h->scale);
}

void OP(attention_backward)(struct device *dev, void *dqkv, const void *dout, const void *qkv,
                            const void *out, const float *lse, size_t B, size_t T, size_t C,
                            size_t NH)
{
    size_t hs = C / NH;
#pragma omp parallel num_threads(dev->threads)
    {
        float *row = thread_scratch(dev), *scratch = row + hs;
#pragma omp for schedule(dynamic, 1)
        for (size_t bh = 0; bh < B * NH; bh++) {
            size_t b = bh / NH, h = bh % NH, at = b * T * C + h * hs;
            struct backward back =
                backward_at(cpu_of(dev), head_at(qkv, b, h, T, C, NH), lse + bh * T, scratch);
            backward_head(&back, (floatX *)dqkv + 3 * b * T * C + h * hs, (const floatX *)dout + at,
                          (const floatX *)out + at, row);
        }
    }
}

void OP(attention_decode)(struct device *dev, void *out, const void *qkv, size_t n, size_t C,
                          size_t NH)
{
    size_t hs = C / NH;
#pragma omp parallel num_threads(dev->threads)
    {
        float *q = thread_scratch(dev), *row = q + hs, *o = row + hs, *s = o + hs;
#pragma omp for schedule(static)
        for (size_t h = 0; h < NH; h++) {
            struct head head = head_at(qkv, 0, h, n, C, NH);
            gather(q, head.q + (n - 1) * head.ld, 0, 1, hs, head.scale);
            for (size_t t = 0; t < n; t++) {
                gather(row, head.k + t * head.ld, 0, 1, hs, 1);
                s[t] = row_dot(q, row, hs);
            }
            float sum = row_exp(s, row_max(s, n), n, n);
            memset(o, 0, hs * sizeof *o);
            for (size_t t = 0; t < n; t++) {
                gather(row, head.v + t * head.ld, 0, 1, hs, 1);
                for (size_t i = 0; i < hs; i++) {
                    o[i] += s[t] * row[i];
                }
            }
            scatter((floatX *)out + h * hs, o, 0, 1, hs, 1.0f / sum);
        }
    }
}
