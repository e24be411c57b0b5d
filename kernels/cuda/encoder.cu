// encoder.cu - token and position embedding, forward, backward and for one token. C is a multiple
// of 8.
#include "kernels/cuda/group.h"

enum { P = packed<floatX>::size };

// ---- forward ------------------------------------------------------------------------------------

#define FORWARD_ROWS 8 // of a block, each of one warp

__device__ static inline void add_rows(floatX *out, const floatX *a, const floatX *b, size_t C)
{
    for (size_t c = (size_t)threadIdx.x * P; c < C; c += (size_t)blockDim.x * P) {
        float x[P], y[P];
        load_group(x, a + c);
        load_group(y, b + c);
        for (int i = 0; i < P; i++) {
            x[i] += y[i];
        }
        store_group(out + c, x);
    }
}

static __global__ void __launch_bounds__(32 * FORWARD_ROWS)
    forward_kernel(floatX *out, const int32_t *tokens, const floatX *wte, const floatX *wpe,
                   size_t N, size_t T, size_t C)
{
    size_t row = (size_t)blockIdx.x * FORWARD_ROWS + threadIdx.y;
    if (row < N) {
        add_rows(out + row * C, wte + (size_t)tokens[row] * C, wpe + row % T * C, C);
    }
}

static __global__ void decode_kernel(floatX *out, const floatX *wte_row, const floatX *wpe_row,
                                     size_t C)
{
    add_rows(out, wte_row, wpe_row, C);
}

void OP(encoder_forward)(struct device *dev, void *out, const int32_t *tokens, const void *wte,
                         const void *wpe, size_t B, size_t T, size_t C)
{
    LAUNCH(dev, forward_kernel, blocks_of(B * T, FORWARD_ROWS), dim3(32, FORWARD_ROWS), 0,
           (floatX *)out, tokens, (const floatX *)wte, (const floatX *)wpe, B * T, T, C);
}

void OP(encoder_decode)(struct device *dev, void *out, int32_t token, size_t pos, const void *wte,
                        const void *wpe, size_t C)
{
    LAUNCH(dev, decode_kernel, 1, 256, 0, (floatX *)out, (const floatX *)wte + (size_t)token * C,
           (const floatX *)wpe + pos * C, C);
}

// ---- backward -----------------------------------------------------------------------------------

#define THREADS 256
#define WARPS   (THREADS / 32)
#define SCAN    1024 // tokens that a block looks at before it adds: a bit each in 32 words
#define AT_ONCE 4    // rows that are loaded before the first one is added

// A block per row and THREADS*P columns. The block of a token's first row adds all rows of that
// token to dwte, in order; the others leave as soon as they see that theirs is not the first.

// What a block found among some tokens: which are its own, from the first one on.
struct found {
    uint32_t words[32];
    uint32_t index[SCAN];
};

// Looks for `token` among tokens lo to hi-1, at most SCAN; returns their number.
__device__ static unsigned find(struct found *found, const int32_t *tokens, size_t lo, size_t hi,
                                int32_t token)
{
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t word[SCAN / THREADS];
#pragma unroll
    for (unsigned k = 0; k < SCAN / THREADS; k++) {
        size_t i = lo + k * THREADS + threadIdx.x;
        word[k] = __ballot_sync(0xffffffffu, i < hi && tokens[i] == token);
        if (lane == 0) {
            found->words[k * WARPS + warp] = word[k];
        }
    }
    __syncthreads();
    unsigned count = (unsigned)__popc(found->words[lane]), upto = count; // this word's are included
    for (unsigned d = 1; d < 32; d *= 2) {
        unsigned before = __shfl_up_sync(0xffffffffu, upto, d);
        upto += lane >= d ? before : 0;
    }
#pragma unroll
    for (unsigned k = 0; k < SCAN / THREADS; k++) {
        unsigned before = __shfl_sync(0xffffffffu, upto - count, (int)(k * WARPS + warp));
        if (word[k] >> lane & 1) {
            before += (unsigned)__popc(word[k] & ((1u << lane) - 1));
            found->index[before] = k * THREADS + threadIdx.x;
        }
    }
    unsigned total = __shfl_sync(0xffffffffu, upto, 31);
    __syncthreads();
    return total;
}

// sum(P) += the rows found, in order, at this thread's columns, which `dout` points at.
__device__ static inline void add_found(float (&sum)[P], const struct found *found, unsigned n,
                                        const floatX *dout, size_t C)
{
    for (unsigned j = 0; j < n; j += AT_ONCE) {
        packed<floatX> d[AT_ONCE] = {};
#pragma unroll
        for (unsigned k = 0; k < AT_ONCE; k++) {
            if (j + k < n) {
                d[k] = load16(dout + found->index[j + k] * C);
            }
        }
#pragma unroll
        for (unsigned k = 0; k < AT_ONCE; k++) {
            for (int i = 0; i < P; i++) {
                sum[i] += to_float(d[k].x[i]);
            }
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    dwte_kernel(float *dwte, const floatX *dout, const int32_t *tokens, size_t N, size_t C)
{
    __shared__ struct found found;
    size_t row = blockIdx.x, c = ((size_t)blockIdx.y * THREADS + threadIdx.x) * P;
    int32_t token = tokens[row];
    for (size_t hi = row; hi > 0;) { // backwards: most tokens have occurred not long ago
        size_t lo = hi > SCAN ? hi - SCAN : 0;
        if (find(&found, tokens, lo, hi, token)) {
            return;
        }
        hi = lo;
    }
    float sum[P], *to = dwte + (size_t)token * C + c;
    if (c < C) {
        load_group(sum, to);
    }
    for (size_t lo = row; lo < N; lo += SCAN) {
        unsigned n = find(&found, tokens, lo, N, token);
        if (c < C) {
            add_found(sum, &found, n, dout + lo * C + c, C);
        }
    }
    if (c < C) {
        store_group(to, sum);
    }
}

// A block per position.
static __global__ void __launch_bounds__(THREADS)
    dwpe_kernel(floatX *dwpe, const floatX *dout, size_t B, size_t T, size_t C)
{
    size_t t = blockIdx.x;
    for (size_t c = (size_t)threadIdx.x * P; c < C; c += THREADS * P) {
        float sum[P] = {};
        for (size_t b = 0; t < T && b < B; b++) {
            float d[P];
            load_group(d, dout + (b * T + t) * C + c);
            for (int i = 0; i < P; i++) {
                sum[i] += d[i];
            }
        }
        store_group(dwpe + t * C + c, sum);
    }
}

void OP(encoder_backward)(struct device *dev, float *dwte, void *dwpe, const void *dout,
                          const int32_t *tokens, size_t B, size_t T, size_t C, size_t maxT)
{
    dim3 grid((unsigned)(B * T), blocks_of(C, THREADS * P));
    LAUNCH(dev, dwte_kernel, grid, THREADS, 0, dwte, (const floatX *)dout, tokens, B * T, C);
    LAUNCH(dev, dwpe_kernel, (unsigned)maxT, THREADS, 0, (floatX *)dwpe, (const floatX *)dout, B, T,
           C);
}
