// encoder.cu - study of the embedding's backward: a sum by token, in the order of rows, without
// atomics.
#include "dev/cuda/study.h"
#include "kernels/cuda/group.h"

#include <stdio.h>

enum { P = packed<floatX>::size };

static struct {
    float *dwte;
    floatX *dwpe;
    const floatX *dout;
    const int32_t *tokens;
    size_t B, T, C, V;
} t;

// A thread per column walks over all rows.
static __global__ void by_columns(float *dwte, const floatX *dout, const int32_t *tokens, size_t N,
                                  size_t C)
{
    size_t c = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t r = 0; c < C && r < N; r++) {
        dwte[(size_t)tokens[r] * C + c] += to_float(dout[r * C + c]);
    }
}

// A warp per token and 32*P columns walks over all tokens.
static __global__ void by_tokens(float *dwte, const floatX *dout, const int32_t *tokens, size_t N,
                                 size_t C)
{
    unsigned lane = threadIdx.x % 32;
    int32_t token = (int32_t)blockIdx.x;
    size_t c = ((blockIdx.y * blockDim.x + threadIdx.x) / 32 * 32 + lane) * P;
    float sum[P] = {}, d[P];
    if (c < C) {
        load_group(sum, dwte + (size_t)token * C + c);
    }
    for (size_t base = 0; base < N; base += 32) {
        unsigned found =
            __ballot_sync(0xffffffffu, base + lane < N && tokens[base + lane] == token);
        for (; found && c < C; found &= found - 1) {
            load_group(d, dout + (base + (size_t)__ffs((int)found) - 1) * C + c);
            for (int i = 0; i < P; i++) {
                sum[i] += d[i];
            }
        }
    }
    if (c < C) {
        store_group(dwte + (size_t)token * C + c, sum);
    }
}

static void run_by_columns(struct device *dev, unsigned block)
{
    LAUNCH(dev, by_columns, blocks_of(t.C, block), block, 0, t.dwte, t.dout, t.tokens, t.B * t.T,
           t.C);
}

static void run_by_tokens(struct device *dev, unsigned block)
{
    dim3 grid((unsigned)t.V, blocks_of(t.C, (size_t)block * P));
    LAUNCH(dev, by_tokens, grid, block, 0, t.dwte, t.dout, t.tokens, t.B * t.T, t.C);
}

static void run_shipped(struct device *dev, unsigned)
{
    dev->layers->encoder_backward(dev, t.dwte, t.dwpe, t.dout, t.tokens, t.B, t.T, t.C, t.T);
}

static const struct version versions[] = {
    {"a thread per column", run_by_columns, {128, 32}},
    {"a warp per token of the vocabulary", run_by_tokens, {32, 128}},
    {"a block per token that occurs, and dwpe: shipped", run_shipped, {}},
};

int main(int argc, char **argv)
{
    struct study *s = study_open(sizeof(floatX) == 2 ? DTYPE_BF16 : DTYPE_FP32, argc, argv);
    bool small = study_small(s), good = true;
    static const size_t shapes[][4] = {{1, 5, 8, 7},
                                       {3, 50, 264, 100},
                                       {2, 700, 16, 300},
                                       {16, 1024, 768, 50304},
                                       {64, 1024, 1600, 50304}};
    for (const auto &d : shapes) {
        char shape[64];
        bool timed = d[0] * d[1] > 10000;
        if (timed && small) {
            continue;
        }
        study_reset(s);
        t.B = d[0];
        t.T = d[1];
        t.C = d[2];
        t.V = d[3];
        size_t n = t.B * t.T * t.C;
        t.dwte = (float *)study_state(s, t.V * t.C, true, 1, 0);
        t.dwpe = (floatX *)study_input(s, t.T * t.C, false, 0);
        t.dout = (floatX *)study_input(s, n, false, 1);
        t.tokens = study_tokens(s, t.B * t.T, t.V);
        snprintf(shape, sizeof shape, "encoder_backward B=%zu T=%zu C=%zu V=%zu", t.B, t.T, t.C,
                 t.V);
        good &= study_compare(s, shape, versions, 3, timed ? (double)(n * sizeof(floatX)) : 0);
    }
    return good ? 0 : 1;
}
