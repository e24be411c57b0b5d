// encoder.c - token and position embedding, forward, backward and for one token.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops/ops.h"
#include "kernels/cpu/ops/vec.h"

static inline void add_rows(floatX *out, const floatX *a, const floatX *b, size_t C)
{
    size_t i = 0;
    for (; i + VL <= C; i += VL) {
        vstore(out + i, vload(a + i) + vload(b + i));
    }
    for (; i < C; i++) {
        store(out + i, load(a + i) + load(b + i));
    }
}

void OP(encoder_forward)(struct device *dev, void *out, const int32_t *tokens, const void *wte,
                         const void *wpe, size_t B, size_t T, size_t C)
{
#pragma omp parallel for num_threads(dev->threads) schedule(static)
    for (size_t r = 0; r < B * T; r++) {
        add_rows((floatX *)out + r * C, (const floatX *)wte + (size_t)tokens[r] * C,
                 (const floatX *)wpe + r % T * C, C);
    }
}

void OP(encoder_decode)(struct device *dev, void *out, int32_t token, size_t pos, const void *wte,
                        const void *wpe, size_t C)
{
    (void)dev;
    add_rows(out, (const floatX *)wte + (size_t)token * C, (const floatX *)wpe + pos * C, C);
}

// A task owns some columns of dwte and walks over all rows in order: tokens that occur twice never
// meet another thread, and the order of each sum is that of the rows.
#define COLUMNS ((size_t)32)

void OP(encoder_backward)(struct device *dev, float *dwte, void *dwpe, const void *dout,
                          const int32_t *tokens, size_t B, size_t T, size_t C, size_t maxT)
{
    const floatX *d = dout;
    floatX *dp = dwpe;
#pragma omp parallel num_threads(dev->threads)
    {
#pragma omp for schedule(static) nowait
        for (size_t lo = 0; lo < C; lo += COLUMNS) {
            size_t hi = lo + COLUMNS < C ? lo + COLUMNS : C;
            for (size_t r = 0; r < B * T; r++) {
                float *row = dwte + (size_t)tokens[r] * C;
                for (size_t c = lo; c < hi; c++) {
                    row[c] += load(d + r * C + c);
                }
            }
        }
#pragma omp for schedule(static)
        for (size_t t = 0; t < maxT; t++) {
            for (size_t c = 0; c < C; c++) {
                float sum = 0;
                for (size_t b = 0; t < T && b < B; b++) {
                    sum += load(d + (b * T + t) * C + c);
                }
                store(dp + t * C + c, sum);
            }
        }
    }
}
