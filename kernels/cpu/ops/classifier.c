// classifier.c - softmax cross-entropy over a chunk of rows, its gradient written in place.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

#include <math.h>

// Row to fp32 in `e`; returns its largest value (a NaN anywhere makes the sum below a NaN).
static float row_max(float *e, const floatX *x, size_t V)
{
    vf m = vset(-INFINITY);
    size_t v = 0;
    for (; v + VL <= V; v += VL) {
        vf f = vload(x + v);
        vstoref(e + v, f);
        m = vmax(f, m);
    }
    vf f = vload_part(x + v, V - v, -INFINITY);
    vstoref_part(e + v, f, V - v);
    return vmax_all(vmax(f, m));
}

// e = exp(e - max); returns the sum.
static float row_exp(float *e, float max, size_t V)
{
    vf sum = {0};
    size_t v = 0;
    for (; v + VL <= V; v += VL) {
        vf f = vexp(vloadf(e + v) - max);
        vstoref(e + v, f);
        sum += f;
    }
    for (; v < V; v++) {
        vf f = vexp(vset(e[v] - max));
        e[v] = f[0];
        sum[0] += f[0];
    }
    return vsum(sum);
}

static void row_scale(floatX *dx, const float *e, float k, size_t V, size_t Vp)
{
    size_t v = 0;
    for (; v + VL <= V; v += VL) {
        vstore(dx + v, vloadf(e + v) * k);
    }
    for (; v < V; v++) {
        store(dx + v, e[v] * k);
    }
    for (; v < Vp; v++) {
        store(dx + v, 0.0f);
    }
}

static float row(floatX *logits, float *e, int32_t target, float dscale, size_t V, size_t Vp)
{
    if (target < 0) {
        if (dscale != 0) {
            memset(logits, 0, Vp * sizeof *logits);
        }
        return 0;
    }
    float max = row_max(e, logits, V);
    float at_target = e[target];
    float sum = row_exp(e, max, V);
    if (dscale != 0) {
        // p - 1 is small when the prediction is good: the difference is taken before rounding.
        float p = e[target] / sum;
        row_scale(logits, e, dscale / sum, V, Vp);
        store(logits + target, (p - 1.0f) * dscale);
    }
    return logf(sum) + max - at_target;
}

void OP(classifier)(struct device *dev, float *losses, void *logits, const int32_t *targets,
                    float dscale, size_t N, size_t V, size_t Vp)
{
#pragma omp parallel num_threads(dev->threads)
    {
        float *scratch = thread_scratch(dev);
#pragma omp for schedule(static)
        for (size_t r = 0; r < N; r++) {
            losses[r] = row((floatX *)logits + r * Vp, scratch, targets[r], dscale, V, Vp);
        }
    }
}
