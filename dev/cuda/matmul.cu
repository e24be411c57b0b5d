// matmul.cu - a study of the matrix products in bf16: what follows a product element by element in
// cuBLASLt's epilogue, and by a kernel of ours. Which of the two pays decides lt_cache's fuse.
// `make CUDA=1 dev-cuda`, then build-cuda/dev/cuda/matmul on a machine with a GPU.
//
// Results of the two are held against each other: they differ by one more rounding.
#include "kernels/cuda/lt.h"
#include "kernels/cuda/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#define ARENA_BYTES ((size_t)6 << 30)
#define REPEATS     20

struct study {
    struct device *dev;
    const struct layers *f;
    size_t N, C, OC;
    // inp(N,C), weight(OC,C), bias(OC), dout(N,OC), narrow(N,C); results: wide[2](N,OC),
    // low[2](N,C), dweight(OC,C), dbias(OC), sum(OC,C) in fp32
    floatX *inp, *weight, *bias, *dout, *narrow, *wide[2], *low[2], *dweight, *dbias;
    float *sum;
};

static void run_plain(struct study *s)
{
    s->f->matmul_forward(s->dev, s->wide[0], s->inp, s->weight, NULL, NULL, s->N, s->C, s->OC);
}
static void run_bias(struct study *s)
{
    s->f->matmul_forward(s->dev, s->wide[0], s->inp, s->weight, s->bias, NULL, s->N, s->C, s->OC);
}
static void run_residual(struct study *s)
{
    s->f->matmul_forward(s->dev, s->wide[0], s->inp, s->weight, s->bias, s->dout, s->N, s->C,
                         s->OC);
}
static void run_gelu(struct study *s)
{
    s->f->matmul_gelu_forward(s->dev, s->wide[0], s->wide[1], s->inp, s->weight, s->bias, s->N,
                              s->C, s->OC);
}
static void run_input(struct study *s)
{
    s->f->matmul_backward_input(s->dev, s->low[0], s->dout, s->weight, s->N, s->C, s->OC);
}
static void run_gelu_input(struct study *s)
{
    s->f->matmul_gelu_backward_input(s->dev, s->low[0], s->low[1], s->narrow, s->dout, s->weight,
                                     s->N, s->C, s->OC);
}
static void run_weight(struct study *s)
{
    s->f->matmul_backward_weight(s->dev, s->dweight, s->dbias, s->dout, s->inp, s->N, s->C, s->OC);
}
static void run_weight_fp32(struct study *s)
{
    s->f->matmul_backward_weight_fp32(s->dev, s->sum, s->dout, s->inp, true, s->N, s->C, s->OC);
}

// What an operation writes first, and how much of it.
enum { WIDE, LOW, DWEIGHT };

static const struct {
    const char *name;
    void (*run)(struct study *s);
    int result;
    bool two_ways;
} ops[] = {
    {"forward", run_plain, WIDE, false},
    {"forward, bias", run_bias, WIDE, false},
    {"forward, bias, residual", run_residual, WIDE, false},
    {"forward, GELU", run_gelu, WIDE, true},
    {"input's gradient", run_input, LOW, false},
    {"input's, through GELU", run_gelu_input, LOW, true},
    {"weight's and bias's", run_weight, DWEIGHT, true},
    {"weight's, fp32, added", run_weight_fp32, DWEIGHT, false},
};

// The four products of a block, and the head's.
static const struct {
    size_t N, C, OC;
} shapes[] = {{16384, 768, 2304}, {16384, 768, 768},  {16384, 768, 3072}, {16384, 3072, 768},
              {4096, 768, 50304}, {8192, 1600, 4800}, {8192, 1600, 6400}, {8192, 6400, 1600}};

static void check_status(struct device *dev)
{
    struct error err;
    device_sync(dev);
    if (device_status(dev, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
}

static floatX *take(char **at, size_t n)
{
    floatX *p = (floatX *)*at;
    *at += device_round(n * sizeof *p);
    return p;
}

static floatX *take_random(struct study *s, char **at, size_t n)
{
    floatX *p = take(at, n);
    std::vector<floatX> host(n);
    for (floatX &x : host) {
        x = __float2bfloat16_rn((float)rand() / (float)RAND_MAX * 2 - 1);
    }
    device_poke(s->dev, p, host.data(), n * sizeof *p);
    return p;
}

static void lay_out(struct study *s, char *at)
{
    s->inp = take_random(s, &at, s->N * s->C);
    s->weight = take_random(s, &at, s->OC * s->C);
    s->bias = take_random(s, &at, s->OC);
    s->dout = take_random(s, &at, s->N * s->OC);
    s->narrow = take_random(s, &at, s->N * s->C);
    for (int i = 0; i < 2; i++) {
        s->wide[i] = take(&at, s->N * s->OC);
        s->low[i] = take(&at, s->N * s->C);
    }
    s->dweight = take(&at, s->OC * s->C);
    s->dbias = take(&at, s->OC);
    s->sum = (float *)take(&at, 2 * s->OC * s->C);
}

static std::vector<float> fetch(const struct study *s, int result)
{
    const floatX *from = result == WIDE ? s->wide[0] : result == LOW ? s->low[0] : s->dweight;
    size_t n = result == WIDE ? s->N * s->OC : result == LOW ? s->N * s->C : s->OC * s->C;
    std::vector<floatX> host(n);
    std::vector<float> values(n);
    device_peek(s->dev, host.data(), from, n * sizeof(floatX));
    for (size_t i = 0; i < n; i++) {
        values[i] = __bfloat162float(host[i]);
    }
    return values;
}

// Largest difference, of the largest value.
static double difference(const std::vector<float> &a, const std::vector<float> &b)
{
    double most = 0, largest = 0;
    for (size_t i = 0; i < a.size(); i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        most = d <= most ? most : d; // a NaN stays
        largest = fmax(largest, fabs((double)b[i]));
    }
    return most / largest;
}

static double best_ms(struct study *s, void (*run)(struct study *s))
{
    cudaEvent_t begin, end;
    double best = 1e30;
    cuda_ok(s->dev, "cudaEventCreate", cudaEventCreate(&begin));
    cuda_ok(s->dev, "cudaEventCreate", cudaEventCreate(&end));
    for (int i = 0; i < REPEATS; i++) {
        float ms = 0;
        cuda_ok(s->dev, "cudaEventRecord", cudaEventRecord(begin, cuda_stream(s->dev)));
        run(s);
        cuda_ok(s->dev, "cudaEventRecord", cudaEventRecord(end, cuda_stream(s->dev)));
        check_status(s->dev);
        cuda_ok(s->dev, "cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin, end));
        best = fmin(best, (double)ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return best;
}

// How many are wrong.
static int try_shape(struct study *s)
{
    double flops = 2.0 * (double)s->N * (double)s->C * (double)s->OC;
    int wrong = 0;
    for (const auto &op : ops) {
        std::vector<float> apart;
        for (int fuse = 0; fuse <= (op.two_ways ? 1 : 0); fuse++) {
            cuda_of(s->dev)->plans->fuse = fuse;
            double ms = best_ms(s, op.run), off = 0;
            if (op.two_ways) {
                std::vector<float> got = fetch(s, op.result);
                off = apart.empty() ? 0 : difference(got, apart);
                apart = apart.empty() ? got : apart;
            }
            bool right = off < 0.02; // the one has rounded to bf16 once more: 2^-8
            wrong += !right;
            printf("  %-24s %-6s %8.3f ms %8.1f TFLOP/s%s\n", op.name,
                   op.two_ways ? fuse ? "fused" : "apart" : "", ms, flops / ms * 1e-9,
                   right ? "" : "   WRONG");
            fflush(stdout);
        }
    }
    return wrong;
}

int main(void)
{
    struct device_config config = {};
    struct study s = {};
    struct error err;
    void *arena;
    int wrong = 0;
    config.kind = "cuda";
    config.dtype = DTYPE_BF16;
    config.head_size = 64;
    config.max_seq = 1024;
    config.padded_vocab = 50304;
    if (device_open(&s.dev, &config, &err) || device_arena(s.dev, ARENA_BYTES, &arena, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    s.f = s.dev->layers;
    printf("%s\n", s.dev->summary);
    for (const auto &shape : shapes) {
        s.N = shape.N;
        s.C = shape.C;
        s.OC = shape.OC;
        lay_out(&s, (char *)arena);
        printf("N %zu C %zu OC %zu\n", s.N, s.C, s.OC);
        wrong += try_shape(&s);
    }
    device_close(s.dev);
    return wrong ? 1 : 0;
}
