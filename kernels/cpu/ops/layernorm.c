// layernorm.c - layer normalisation, forward and backward.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#include <math.h>

#define EPSILON 1e-5f

static float row_mean(const floatX *x, size_t C)
{
    vf sum = {0};
    size_t c = 0;
    for (; c + VL <= C; c += VL) {
        sum += vload(x + c);
    }
    sum += vload_part(x + c, C - c, 0);
    return vsum(sum) / (float)C;
}

static float row_variance(const floatX *x, float mean, size_t C)
{
    vf sum = {0};
    size_t c = 0;
    for (; c + VL <= C; c += VL) {
        vf d = vload(x + c) - mean;
        sum = vfma(d, d, sum);
    }
    vf d = vload_part(x + c, C - c, mean) - mean;
    sum = vfma(d, d, sum);
    return vsum(sum) / (float)C;
}

void OP(layernorm_forward)(struct device *dev, void *out, float *mean, float *rstd, const void *inp,
                           const void *weight, const void *bias, size_t N, size_t C)
{
    const floatX *w = weight, *b = bias;
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t r = 0; r < N; r++) {
        const floatX *x = (const floatX *)inp + r * C;
        floatX *o = (floatX *)out + r * C;
        float mu = row_mean(x, C);
        float rs = 1.0f / sqrtf(row_variance(x, mu, C) + EPSILON);
        size_t c = 0;
        for (; c + VL <= C; c += VL) {
            vstore(o + c, vfma((vload(x + c) - mu) * rs, vload(w + c), vload(b + c)));
        }
        vf n = (vload_part(x + c, C - c, 0) - mu) * rs;
        vstore_part(o + c, vfma(n, vload_part(w + c, C - c, 0), vload_part(b + c, C - c, 0)),
                    C - c);
        mean[r] = mu;
        rstd[r] = rs;
    }
}

// With n = (x - mean) rstd and g = dout * weight:
//   dx = (g - mean(g) - n mean(g n)) rstd,  dweight = sum dout n,  dbias = sum dout.
static void row_backward(floatX *dx, const floatX *dout, const floatX *dres, const floatX *x,
                         const floatX *w, float mean, float rstd, size_t C)
{
    vf sum_g = {0}, sum_gn = {0};
    size_t c = 0;
    for (; c + VL <= C; c += VL) {
        vf g = vload(dout + c) * vload(w + c);
        sum_g += g;
        sum_gn = vfma(g, (vload(x + c) - mean) * rstd, sum_gn);
    }
    vf g = vload_part(dout + c, C - c, 0) * vload_part(w + c, C - c, 0);
    sum_g += g;
    sum_gn = vfma(g, (vload_part(x + c, C - c, 0) - mean) * rstd, sum_gn);
    float mean_g = vsum(sum_g) / (float)C, mean_gn = vsum(sum_gn) / (float)C;
    for (c = 0; c < C; c += VL) {
        size_t n = C - c < VL ? C - c : VL;
        bool whole = n == VL;
        vf d = whole ? vload(dout + c) : vload_part(dout + c, n, 0);
        vf norm = ((whole ? vload(x + c) : vload_part(x + c, n, 0)) - mean) * rstd;
        vf gw = d * (whole ? vload(w + c) : vload_part(w + c, n, 0));
        vf out = (gw - mean_g - norm * mean_gn) * rstd;
        if (dres) {
            out += whole ? vload(dres + c) : vload_part(dres + c, n, 0);
        }
        if (whole) {
            vstore(dx + c, out);
        } else {
            vstore_part(dx + c, out, n);
        }
    }
}

// Columns that one task sums over all rows, in order: no partial sums, and the same bits whatever
// the number of threads.
#define COLUMNS ((size_t)64)

static void column_sums(floatX *dweight, floatX *dbias, const floatX *dout, const floatX *inp,
                        const float *mean, const float *rstd, size_t N, size_t C, size_t lo)
{
    size_t n = C - lo < COLUMNS ? C - lo : COLUMNS;
    float dw[COLUMNS] = {0}, db[COLUMNS] = {0};
    for (size_t r = 0; r < N; r++) {
        const floatX *d = dout + r * C + lo, *x = inp + r * C + lo;
        for (size_t c = 0; c < n; c++) {
            float g = load(d + c);
            db[c] += g;
            dw[c] += g * ((load(x + c) - mean[r]) * rstd[r]);
        }
    }
    for (size_t c = 0; c < n; c++) {
        store(dweight + lo + c, dw[c]);
        store(dbias + lo + c, db[c]);
    }
}

void OP(layernorm_backward)(struct device *dev, void *dinp, void *dweight, void *dbias,
                            const void *dout, const void *dresidual, const void *inp,
                            const void *weight, const float *mean, const float *rstd, size_t N,
                            size_t C)
{
#pragma omp parallel num_threads(dev->threads)
    {
#pragma omp for schedule(static) nowait
        for (size_t lo = 0; lo < C; lo += COLUMNS) {
            column_sums(dweight, dbias, dout, inp, mean, rstd, N, C, lo);
        }
#pragma omp for schedule(static)
        for (size_t r = 0; r < N; r++) {
            row_backward((floatX *)dinp + r * C, (const floatX *)dout + r * C,
                         dresidual ? (const floatX *)dresidual + r * C : NULL,
                         (const floatX *)inp + r * C, weight, mean[r], rstd[r], C);
        }
    }
}
