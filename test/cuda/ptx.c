// ptx.c - see ptx.h. Fragments as the PTX ISA documents them (kernels/cuda/ptx.h repeats it).
#include "test/cuda/ptx.h"

#include "kernels/bf16.h"

static uint16_t row_value(void *const *lanes, int matrix, unsigned row, unsigned column)
{
    return ((const struct sim_ldmatrix *)lanes[8 * matrix + row])->row[column];
}

void sim_ldmatrix(void *const *lanes)
{
    for (unsigned lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            uint32_t lower = row_value(lanes, i, lane / 4, 2 * (lane % 4));
            uint32_t upper = row_value(lanes, i, lane / 4, 2 * (lane % 4) + 1);
            ((struct sim_ldmatrix *)lanes[lane])->r[i] = lower | upper << 16;
        }
    }
}

void sim_ldmatrix_trans(void *const *lanes)
{
    for (unsigned lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            uint32_t lower = row_value(lanes, i, 2 * (lane % 4), lane / 4);
            uint32_t upper = row_value(lanes, i, 2 * (lane % 4) + 1, lane / 4);
            ((struct sim_ldmatrix *)lanes[lane])->r[i] = lower | upper << 16;
        }
    }
}

static float half_of(uint32_t pair, unsigned i)
{
    return bf16_load((uint16_t)(i ? pair >> 16 : pair));
}

void sim_mma(void *const *lanes)
{
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        const struct sim_mma *mine = lanes[lane];
        unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 8; i++) { // register i/2, half i%2
            a[g + i / 2 % 2 * 8][2 * t + i / 4 * 8 + i % 2] = half_of(mine->a[i / 2], i % 2);
        }
        for (unsigned i = 0; i < 4; i++) {
            b[2 * t + i / 2 * 8 + i % 2][g] = half_of(mine->b[i / 2], i % 2);
        }
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        struct sim_mma *mine = lanes[lane];
        for (unsigned i = 0; i < 4; i++) {
            unsigned row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
            for (unsigned k = 0; k < 16; k++) {
                mine->d[i] += a[row][k] * b[k][column];
            }
        }
    }
}
