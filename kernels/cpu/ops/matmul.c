// matmul.c - matrix products, cut into tiles whose shape depends on the matrices alone.
//
// Each tile is one single-threaded sgemm on one OpenMP thread, so the bits do not depend on the
// number of threads (OpenBLAS's own threading makes them depend on it). What follows a product
// element by element (bias, residual, GELU) is done to a tile while it is in the cache.
//
// bf16: the panels of a tile are widened to fp32 in the thread's scratch, MATMUL_TILE_K columns at
// a time.
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#define min(a, b) ((a) < (b) ? (a) : (b))

// Up to this many rows a product is bound by reading the weights, and dot products do better.
#define DOT_ROWS 4

struct product {
    // out(M,N) = op(a) op(b): a is (M,K), or (K,M) if ta; b is (K,N), or (N,K) if tb.
    size_t M, N, K;
    const floatX *a, *b;
    bool ta, tb;
    // Exactly one of these two is written.
    floatX *out;
    float *out_fp32;
    bool accumulate; // out_fp32 += rather than =
    // What follows (each may be NULL).
    const floatX *bias;     // (N): added
    const floatX *residual; // (M,N): added
    floatX *gelu;           // (M,N): GELU(out), or GELU(pre) if there is a pre
    const floatX *pre;      // (M,N): out *= GELU'(pre)
};

struct range {
    size_t first, n;
};

// Is there anything to do after the sums? In fp32 they are already where they belong.
static bool needs_finish(const struct product *p)
{
#ifdef USE_BF16
    return p->out;
#else
    return p->out && (p->bias || p->residual || p->gelu);
#endif
}

// One row of a tile: t holds n sums in fp32, at column 0 of out.
static void finish_row(const struct product *p, const float *t, size_t row, size_t col, size_t n)
{
    size_t at = row * p->N + col;
    for (size_t j = 0; j < n; j += VL) {
        size_t w = min(VL, n - j);
        bool whole = w == VL;
#define LOAD(ptr)     (whole ? vload((ptr) + j) : vload_part((ptr) + j, w, 0))
#define STORE(ptr, x) (whole ? vstore((ptr) + j, x) : vstore_part((ptr) + j, x, w))
        vf x = whole ? vloadf(t + j) : vloadf_part(t + j, w, 0);
        if (p->bias) {
            x += LOAD(p->bias + col);
        }
        if (p->residual) {
            x += LOAD(p->residual + at);
        }
        if (p->pre) {
            vf pre = LOAD(p->pre + at);
            vf s = vgelu_gate(pre);
            STORE(p->gelu + at, pre * s);
            x *= vgelu_slope(pre, s);
        }
        STORE(p->out + at, x);
        if (p->gelu && !p->pre) {
            STORE(p->gelu + at, vgelu(LOAD(p->out + at))); // from the rounded value, as stored
        }
#undef LOAD
#undef STORE
    }
}

static float dot(const floatX *a, const floatX *b, size_t K)
{
    vf sum[2] = {{0}, {0}};
    size_t k = 0;
    for (; k + 2 * VL <= K; k += 2 * VL) {
        sum[0] = vfma(vload(a + k), vload(b + k), sum[0]);
        sum[1] = vfma(vload(a + k + VL), vload(b + k + VL), sum[1]);
    }
    for (; k < K; k += VL) {
        size_t w = min(VL, K - k);
        sum[0] = vfma(vload_part(a + k, w, 0), vload_part(b + k, w, 0), sum[0]);
    }
    return vsum(sum[0] + sum[1]);
}

static void dots(const struct product *p, size_t i0, size_t m, size_t j0, size_t n, float *c,
                 size_t ldc)
{
    for (size_t j = 0; j < n; j++) {
        for (size_t i = 0; i < m; i++) {
            c[i * ldc + j] = dot(p->a + (i0 + i) * p->K, p->b + (j0 + j) * p->K, p->K);
        }
    }
}

#ifdef USE_BF16
// rows x cols of x, widened; returns out.
static const float *widen(float *out, const floatX *x, size_t ld, size_t rows, size_t cols)
{
    for (size_t r = 0; r < rows; r++) {
        size_t c = 0;
        for (; c + VL <= cols; c += VL) {
            vstoref(out + r * cols + c, vload(x + r * ld + c));
        }
        for (; c < cols; c++) {
            out[r * cols + c] = load(x + r * ld + c);
        }
    }
    return out;
}

static void multiply(struct cpu *cpu, const struct product *p, struct range i, struct range j,
                     struct range k, float *c, size_t ldc, float *scratch)
{
    size_t lda = p->ta ? p->M : p->K, ldb = p->tb ? p->K : p->N;
    float *wa = scratch, *wb = wa + MATMUL_TILE_M * MATMUL_TILE_K;
    for (size_t at = 0; at < k.n; at += MATMUL_TILE_K) {
        size_t k0 = k.first + at, n = min(MATMUL_TILE_K, k.n - at);
        const float *a = p->ta ? widen(wa, p->a + k0 * lda + i.first, lda, n, i.n)
                               : widen(wa, p->a + i.first * lda + k0, lda, i.n, n);
        const float *b = p->tb ? widen(wb, p->b + j.first * ldb + k0, ldb, j.n, n)
                               : widen(wb, p->b + k0 * ldb + j.first, ldb, n, j.n);
        cpu->sgemm(p->ta, p->tb, i.n, j.n, n, a, p->ta ? i.n : n, b, p->tb ? n : j.n,
                   p->accumulate || at > 0, c, ldc);
    }
}
#else
static void multiply(struct cpu *cpu, const struct product *p, struct range i, struct range j,
                     struct range k, float *c, size_t ldc, float *scratch)
{
    (void)scratch;
    size_t lda = p->ta ? p->M : p->K, ldb = p->tb ? p->K : p->N;
    cpu->sgemm(p->ta, p->tb, i.n, j.n, k.n,
               p->ta ? p->a + k.first * lda + i.first : p->a + i.first * lda + k.first, lda,
               p->tb ? p->b + j.first * ldb + k.first : p->b + k.first * ldb + j.first, ldb,
               p->accumulate, c, ldc);
}
#endif

// Size of each of `parts` equal parts of n, a multiple of 16.
static size_t part(size_t n, size_t parts)
{
    return ((n + parts - 1) / parts + 15) / 16 * 16;
}

static size_t parts_of(size_t n, size_t most)
{
    return (n + most - 1) / most;
}

struct tiling {
    size_t m, n, k;          // of one tile
    size_t rows, cols, deep; // how many
};

// By the shape alone. Large tiles pack less; but a few threads want an even number of them, and
// not too few. A long K with a small result is cut along K too, into partial results that are
// added in order.
static struct tiling tile_shape(const struct product *p)
{
    struct tiling t = {.rows = parts_of(p->M, MATMUL_TILE_M), .deep = 1};
    t.cols = parts_of(p->N, MATMUL_TILE_N);
    if (t.rows * t.cols < 6) {
        t.cols = parts_of(p->N, MATMUL_TILE_N / 2);
    }
    if (p->out && p->K >= MATMUL_DEEP && MATMUL_DEEP_PARTS * p->M * p->N <= MATMUL_PARTIALS) {
        t.deep = MATMUL_DEEP_PARTS;
        t.cols = parts_of(p->N, MATMUL_TILE_N);
    }
    if (t.rows * t.cols * t.deep % 2 == 1) {
        *(p->M >= p->N ? &t.rows : &t.cols) += 1;
    }
    t.m = part(p->M, t.rows);
    t.n = part(p->N, t.cols);
    t.k = part(p->K, t.deep);
    return t;
}

static void whole_tile(struct cpu *cpu, const struct product *p, size_t i, size_t m, size_t j,
                       size_t n, float *scratch)
{
    float *c = p->out_fp32 ? p->out_fp32 + i * p->N + j : NULL;
    size_t ldc = p->N;
#ifdef USE_BF16
    if (!c) {
        c = scratch + (MATMUL_TILE_M + MATMUL_TILE_N) * MATMUL_TILE_K;
        ldc = n;
    }
#else
    c = c ? c : p->out + i * p->N + j;
#endif
    if (p->M <= DOT_ROWS && !p->ta && p->tb) {
        dots(p, i, m, j, n, c, ldc);
    } else {
        multiply(cpu, p, (struct range){i, m}, (struct range){j, n}, (struct range){0, p->K}, c,
                 ldc, scratch);
    }
    for (size_t r = 0; needs_finish(p) && r < m; r++) {
        finish_row(p, c + r * ldc, i + r, j, n);
    }
}

// Row i of the result out of its partial results, which lie MATMUL_DEEP_PARTS times one behind the
// other.
static void add_partials(const struct product *p, float *partials, size_t i)
{
    float *sum = partials + i * p->N;
    for (size_t d = 1; d < MATMUL_DEEP_PARTS; d++) {
        const float *x = sum + d * p->M * p->N;
        for (size_t j = 0; j < p->N; j++) {
            sum[j] += x[j];
        }
    }
    finish_row(p, sum, i, 0, p->N);
}

static void run(struct device *dev, const struct product *p)
{
    struct cpu *cpu = cpu_of(dev);
    struct tiling t = tile_shape(p);
#pragma omp parallel num_threads(dev->threads)
    {
        float *scratch = thread_scratch(dev);
#pragma omp for schedule(dynamic, 1)
        for (size_t task = 0; task < t.rows * t.cols * t.deep; task++) {
            size_t i = task % t.rows * t.m, j = task / t.rows % t.cols * t.n;
            size_t d = task / t.rows / t.cols, k = d * t.k;
            if (i >= p->M || j >= p->N) {
                continue; // rounding to 16 has left nothing for the last part
            }
            size_t m = min(t.m, p->M - i), n = min(t.n, p->N - j);
            if (t.deep == 1) {
                whole_tile(cpu, p, i, m, j, n, scratch);
            } else {
                multiply(cpu, p, (struct range){i, m}, (struct range){j, n},
                         (struct range){k, min(t.k, p->K - k)},
                         cpu->partials + (d * p->M + i) * p->N + j, p->N, scratch);
            }
        }
        if (t.deep > 1) {
#pragma omp for schedule(static)
            for (size_t i = 0; i < p->M; i++) {
                add_partials(p, cpu->partials, i);
            }
        }
    }
}

void OP(matmul_forward)(struct device *dev, void *out, const void *inp, const void *weight,
                        const void *bias, const void *residual, size_t N, size_t C, size_t OC)
{
    run(dev, &(struct product){.M = N,
                               .N = OC,
                               .K = C,
                               .a = inp,
                               .b = weight,
                               .tb = true,
                               .out = out,
                               .bias = bias,
                               .residual = residual});
}

void OP(matmul_gelu_forward)(struct device *dev, void *gelu, void *pre, const void *inp,
                             const void *weight, const void *bias, size_t N, size_t C, size_t OC)
{
    run(dev, &(struct product){.M = N,
                               .N = OC,
                               .K = C,
                               .a = inp,
                               .b = weight,
                               .tb = true,
                               .out = pre,
                               .bias = bias,
                               .gelu = gelu});
}

void OP(matmul_backward_input)(struct device *dev, void *dinp, const void *dout, const void *weight,
                               size_t N, size_t C, size_t OC)
{
    run(dev, &(struct product){.M = N, .N = C, .K = OC, .a = dout, .b = weight, .out = dinp});
}

void OP(matmul_gelu_backward_input)(struct device *dev, void *dpre, void *gelu, const void *pre,
                                    const void *dout, const void *weight, size_t N, size_t C,
                                    size_t OC)
{
    run(dev, &(struct product){.M = N,
                               .N = C,
                               .K = OC,
                               .a = dout,
                               .b = weight,
                               .out = dpre,
                               .gelu = gelu,
                               .pre = pre});
}

void OP(matmul_backward_weight_fp32)(struct device *dev, float *dweight, const void *dout,
                                     const void *inp, bool accumulate, size_t N, size_t C,
                                     size_t OC)
{
    run(dev, &(struct product){.M = OC,
                               .N = C,
                               .K = N,
                               .a = dout,
                               .ta = true,
                               .b = inp,
                               .out_fp32 = dweight,
                               .accumulate = accumulate});
}

// Columns that one task sums over all rows, in order.
#define COLUMNS ((size_t)64)

static void bias_gradient(struct device *dev, floatX *dbias, const floatX *dout, size_t N,
                          size_t OC)
{
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t lo = 0; lo < OC; lo += COLUMNS) {
        size_t n = min(COLUMNS, OC - lo);
        float sum[COLUMNS] = {0};
        for (size_t r = 0; r < N; r++) {
            for (size_t c = 0; c < n; c++) {
                sum[c] += load(dout + r * OC + lo + c);
            }
        }
        for (size_t c = 0; c < n; c++) {
            store(dbias + lo + c, sum[c]);
        }
    }
}

void OP(matmul_backward_weight)(struct device *dev, void *dweight, void *dbias, const void *dout,
                                const void *inp, size_t N, size_t C, size_t OC)
{
    run(dev, &(struct product){
                 .M = OC, .N = C, .K = N, .a = dout, .ta = true, .b = inp, .out = dweight});
    bias_gradient(dev, dbias, dout, N, OC);
}
