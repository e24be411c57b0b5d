// layernorm.cu - study of layer normalisation: what it costs to read rows more than once.
#include "dev/cuda/study.h"
#include "kernels/cuda/group.h"

#include <stdio.h>

enum { P = packed<floatX>::size };

static struct {
    floatX *out, *dinp, *dweight, *dbias;
    const floatX *inp, *weight, *bias, *dout;
    float *mean, *rstd;
    size_t N, C;
} t;

// ---- forward ------------------------------------------------------------------------------------

static __global__ void thread_per_row(floatX *out, float *mean, float *rstd, const floatX *inp,
                                      const floatX *weight, const floatX *bias, size_t N, size_t C)
{
    size_t r = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= N) {
        return;
    }
    const floatX *x = inp + r * C;
    float sum = 0, square = 0;
    for (size_t c = 0; c < C; c++) {
        sum += to_float(x[c]);
    }
    float mu = sum / (float)C;
    for (size_t c = 0; c < C; c++) {
        square += (to_float(x[c]) - mu) * (to_float(x[c]) - mu);
    }
    float rs = 1.0f / sqrtf(square / (float)C + 1e-5f);
    for (size_t c = 0; c < C; c++) {
        float norm = (to_float(x[c]) - mu) * rs;
        out[r * C + c] = from_float<floatX>(norm * to_float(weight[c]) + to_float(bias[c]));
    }
    mean[r] = mu;
    rstd[r] = rs;
}

// Reads the row three times: twice from the caches, if they are large enough.
static __global__ void warp_per_row(floatX *out, float *mean, float *rstd, const floatX *inp,
                                    const floatX *weight, const floatX *bias, size_t N, size_t C)
{
    size_t r = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (r >= N) {
        return;
    }
    const floatX *row = inp + r * C;
    float sum = 0, square = 0, x[P], w[P], b[P];
    for (size_t c = lane * P; c < C; c += 32 * P) {
        load_group(x, row + c);
        for (int i = 0; i < P; i++) {
            sum += x[i];
        }
    }
    float mu = warp_sum(sum) / (float)C;
    for (size_t c = lane * P; c < C; c += 32 * P) {
        load_group(x, row + c);
        for (int i = 0; i < P; i++) {
            square += (x[i] - mu) * (x[i] - mu);
        }
    }
    float rs = 1.0f / sqrtf(warp_sum(square) / (float)C + 1e-5f);
    for (size_t c = lane * P; c < C; c += 32 * P) {
        load_group(x, row + c);
        load_group(w, weight + c);
        load_group(b, bias + c);
        for (int i = 0; i < P; i++) {
            x[i] = (x[i] - mu) * rs * w[i] + b[i];
        }
        store_group(out + r * C + c, x);
    }
    if (lane == 0) {
        mean[r] = mu;
        rstd[r] = rs;
    }
}

static void run_thread_per_row(struct device *dev, unsigned block)
{
    LAUNCH(dev, thread_per_row, blocks_of(t.N, block), block, 0, t.out, t.mean, t.rstd, t.inp,
           t.weight, t.bias, t.N, t.C);
}

static void run_warp_per_row(struct device *dev, unsigned block)
{
    LAUNCH(dev, warp_per_row, blocks_of(t.N, block / 32), block, 0, t.out, t.mean, t.rstd, t.inp,
           t.weight, t.bias, t.N, t.C);
}

static void run_forward(struct device *dev, unsigned)
{
    dev->layers->layernorm_forward(dev, t.out, t.mean, t.rstd, t.inp, t.weight, t.bias, t.N, t.C);
}

static const struct version forward[] = {
    {"a thread per row", run_thread_per_row, {128, 32, 512}},
    {"a warp per row, read three times", run_warp_per_row, {32, 128, 256, 512, 1024}},
    {"rows in registers: shipped", run_forward, {}},
};

// ---- backward -----------------------------------------------------------------------------------

// dinp alone; columns need a kernel of their own, which reads dout and inp again.
static __global__ void rows(floatX *dinp, const floatX *dout, const floatX *inp,
                            const floatX *weight, const float *mean, const float *rstd, size_t N,
                            size_t C)
{
    size_t r = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (r >= N) {
        return;
    }
    float mu = mean[r], rs = rstd[r], sum_g = 0, sum_gn = 0, d[P], x[P], w[P];
    for (size_t c = lane * P; c < C; c += 32 * P) {
        load_group(d, dout + r * C + c);
        load_group(x, inp + r * C + c);
        load_group(w, weight + c);
        for (int i = 0; i < P; i++) {
            sum_g += d[i] * w[i];
            sum_gn += d[i] * w[i] * (x[i] - mu) * rs;
        }
    }
    float mean_g = warp_sum(sum_g) / (float)C, mean_gn = warp_sum(sum_gn) / (float)C;
    for (size_t c = lane * P; c < C; c += 32 * P) {
        load_group(d, dout + r * C + c);
        load_group(x, inp + r * C + c);
        load_group(w, weight + c);
        for (int i = 0; i < P; i++) {
            d[i] = (d[i] * w[i] - mean_g - (x[i] - mu) * rs * mean_gn) * rs;
        }
        store_group(dinp + r * C + c, d);
    }
}

static __global__ void columns(floatX *dweight, floatX *dbias, const floatX *dout,
                               const floatX *inp, const float *mean, const float *rstd, size_t N,
                               size_t C)
{
    size_t c = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) {
        return;
    }
    float dw = 0, db = 0;
    for (size_t r = 0; r < N; r++) {
        float d = to_float(dout[r * C + c]);
        dw += d * (to_float(inp[r * C + c]) - mean[r]) * rstd[r];
        db += d;
    }
    dweight[c] = from_float<floatX>(dw);
    dbias[c] = from_float<floatX>(db);
}

static void run_rows_and_columns(struct device *dev, unsigned block)
{
    LAUNCH(dev, rows, blocks_of(t.N, block / 32), block, 0, t.dinp, t.dout, t.inp, t.weight, t.mean,
           t.rstd, t.N, t.C);
    LAUNCH(dev, columns, blocks_of(t.C, 32), 32, 0, t.dweight, t.dbias, t.dout, t.inp, t.mean,
           t.rstd, t.N, t.C);
}

static void run_backward(struct device *dev, unsigned)
{
    dev->layers->layernorm_backward(dev, t.dinp, t.dweight, t.dbias, t.dout, nullptr, t.inp,
                                    t.weight, t.mean, t.rstd, t.N, t.C);
}

static const struct version backward[] = {
    {"rows, and columns by threads", run_rows_and_columns, {256, 32, 1024}},
    {"one read, partial sums: shipped", run_backward, {}},
};

static bool try_shape(struct study *s, size_t N, size_t C, bool timed)
{
    char shape[64];
    double tolerance = sizeof(floatX) == 2 ? 8e-3 : 1e-5, row = (double)(N * C * sizeof(floatX));
    study_reset(s);
    t.N = N;
    t.C = C;
    t.inp = (floatX *)study_input(s, N * C, false, 1);
    t.weight = (floatX *)study_input(s, C, false, 1);
    t.bias = (floatX *)study_input(s, C, false, 1);
    t.out = (floatX *)study_output(s, N * C, false, tolerance);
    t.mean = (float *)study_output(s, N, true, 1e-4);
    t.rstd = (float *)study_output(s, N, true, 1e-5);
    snprintf(shape, sizeof shape, "layernorm_forward N=%zu C=%zu", N, C);
    bool good = study_compare(s, shape, forward, 3, timed ? 2 * row : 0);
    study_reset(s);
    t.inp = (floatX *)study_input(s, N * C, false, 1);
    t.dout = (floatX *)study_input(s, N * C, false, 1);
    t.weight = (floatX *)study_input(s, C, false, 1);
    t.mean = (float *)study_input(s, N, true, 0.1f);
    t.rstd = (float *)study_input(s, N, true, 1);
    t.dinp = (floatX *)study_output(s, N * C, false, tolerance);
    t.dweight = (floatX *)study_output(s, C, false, tolerance);
    t.dbias = (floatX *)study_output(s, C, false, tolerance);
    snprintf(shape, sizeof shape, "layernorm_backward N=%zu C=%zu", N, C);
    return study_compare(s, shape, backward, 2, timed ? 3 * row : 0) && good;
}

int main(int argc, char **argv)
{
    struct study *s = study_open(sizeof(floatX) == 2 ? DTYPE_BF16 : DTYPE_FP32, argc, argv);
    bool small = study_small(s), good = true;
    static const size_t few[][2] = {{1, 8}, {7, 72}, {33, 768}, {5, 4104}};
    static const size_t many[][2] = {{16384, 768}, {16384, 1600}, {8192, 4096}, {2048, 12288}};
    for (const auto &shape : few) {
        good &= try_shape(s, shape[0], shape[1], false);
    }
    for (const auto &shape : many) {
        good &= small || try_shape(s, shape[0], shape[1], true);
    }
    return good ? 0 : 1;
}
