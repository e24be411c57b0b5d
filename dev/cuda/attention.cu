// attention.cu - study of attention: the plain kernels as the reference and, in bf16, the shipped
// ones on tensor cores and these with other tiles; each checked against the reference, and timed
// over shapes. With the argument `check` only small shapes run, once.
//
// FLOPs are those of what causal attention needs: half of 2 products forward, of 5 backward, which
// computes 7 (attention.h): dK and dV 4, of which 3.5 are counted, dQ 3, counted as 1.5.
// To make another choice the default: mma_forward_sizes, mma_keys_sizes and
// mma_queries_sizes.
#include "kernels/cuda/attention_plain.cuh"
#ifdef USE_BF16
#include "kernels/cuda/attention_mma.cuh"
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#define REPEATS 10

#ifdef USE_BF16
template <int HEAD, int M, int C, bool K> struct forward_tiles {
    static const int HS = HEAD, MT = M, COLUMNS = C;
    static const bool KEEP = K;
};
template <int HEAD, int M, int C, int SC> struct backward_tiles {
    static const int HS = HEAD, MT = M, COLUMNS = C, SCORES = SC;
};

#endif

struct study {
    struct device *dev;
    struct attention a;
    floatX *qkv, *dout, *out, *dqkv;
    float *lse;
};

enum pass { FORWARD, KEYS, QUERIES };
static const char *pass_names[] = {"forward", "dK dV", "dQ"};
static const double pass_products[] = {2, 3.5, 1.5};

struct version {
    enum pass pass;
    int head; // 0: any
    const char *tiles;
    void (*run)(struct study *s);
};

static void run_forward_plain(struct study *s)
{
    forward_plain(s->dev, s->out, s->lse, s->qkv, s->a.B, s->a.T, s->a.C, s->a.NH);
}
template <bool K> static void run_backward_plain(struct study *s)
{
    size_t smem = sizeof(struct plain_backward_smem<128>);
    ALLOW_SMEM(s->dev, (attention_backward_plain<128, K>), smem);
    LAUNCH(s->dev, (attention_backward_plain<128, K>), attention_blocks(s->a, PLAIN_ROWS),
           PLAIN_THREADS, smem, s->dqkv, s->dout, s->qkv, s->lse, s->a);
}
#ifdef USE_BF16
template <class S> static void run_forward(struct study *s)
{
    launch_forward_mma<S>(s->dev, s->out, s->lse, s->qkv, s->a);
}
template <class S, bool K> static void run_backward(struct study *s)
{
    launch_backward_mma<S, K>(s->dev, s->dqkv, s->dout, s->qkv, s->lse, s->a);
}

#define SHIPPED(hs)                                                                                \
    {FORWARD, hs, "as shipped", run_forward<mma_forward_sizes<hs>>},                               \
        {KEYS, hs, "as shipped", run_backward<mma_keys_sizes<hs>, true>},                          \
    {                                                                                              \
        QUERIES, hs, "as shipped", run_backward<mma_queries_sizes<hs>, false>                      \
    }
#define FORWARD_TRY(hs, mt, columns, keep)                                                         \
    {                                                                                              \
        FORWARD, hs, #mt "x16 rows, " #columns " keys, kept " #keep,                               \
            run_forward<forward_tiles<hs, mt, columns, keep>>                                      \
    }
#define KEYS_TRY(hs, mt, columns, scores)                                                          \
    {                                                                                              \
        KEYS, hs, #mt "x16 rows, " #columns " queries, " #scores " scores",                        \
            run_backward<backward_tiles<hs, mt, columns, scores>, true>                            \
    }
#define QUERIES_TRY(hs, mt, columns, scores)                                                       \
    {                                                                                              \
        QUERIES, hs, #mt "x16 rows, " #columns " keys, " #scores " scores",                        \
            run_backward<backward_tiles<hs, mt, columns, scores>, false>                           \
    }

#endif

// The first of each pass is the reference.
static const struct version versions[] = {
    {FORWARD, 0, "plain", run_forward_plain},
    {KEYS, 0, "plain", run_backward_plain<true>},
    {QUERIES, 0, "plain", run_backward_plain<false>},
#ifdef USE_BF16
    SHIPPED(64),
    FORWARD_TRY(64, 1, 64, true),
    FORWARD_TRY(64, 2, 32, true),
    FORWARD_TRY(64, 2, 64, false),
    KEYS_TRY(64, 1, 64, 32),
    KEYS_TRY(64, 2, 64, 32),
    KEYS_TRY(64, 2, 32, 16),
    QUERIES_TRY(64, 1, 64, 64),
    QUERIES_TRY(64, 2, 32, 32),
    SHIPPED(80),
    SHIPPED(128),
    FORWARD_TRY(128, 1, 64, true),
    FORWARD_TRY(128, 2, 32, false),
    FORWARD_TRY(128, 2, 64, false),
    KEYS_TRY(128, 1, 32, 16),
    KEYS_TRY(128, 1, 64, 32),
    QUERIES_TRY(128, 1, 64, 32),
    QUERIES_TRY(128, 2, 32, 16),
#endif
};

// The first ones are for checks.
#define CHECKS 2
static const struct {
    int B, T, NH, hs;
} shapes[] = {{1, 133, 2, 64},   {2, 65, 1, 128},   {16, 1024, 12, 64}, {4, 1024, 25, 64},
              {2, 8192, 12, 64}, {2, 2048, 32, 80}, {4, 2048, 16, 128}};

static void check_status(struct device *dev)
{
    struct error err;
    device_sync(dev);
    if (device_status(dev, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
}

static void random_values(struct study *s, floatX *x, size_t n)
{
    std::vector<floatX> host(n);
    for (size_t i = 0; i < n; i++) {
        host[i] = (floatX)((float)rand() / (float)RAND_MAX * 2 - 1);
    }
    device_poke(s->dev, x, host.data(), n * sizeof *x);
}

static size_t lay_out(struct study *s, char *arena)
{
    size_t n = (size_t)s->a.B * s->a.T * s->a.C, row = device_round(n * sizeof(floatX));
    s->qkv = (floatX *)arena;
    s->dout = (floatX *)(arena + 3 * row);
    s->out = (floatX *)(arena + 4 * row);
    s->dqkv = (floatX *)(arena + 5 * row);
    s->lse = (float *)(arena + 8 * row);
    return n;
}

// What the pass has written, in fp32.
static std::vector<float> fetch(const struct study *s, enum pass pass, size_t n)
{
    size_t count = pass == FORWARD ? n : 3 * n, C = s->a.C;
    std::vector<floatX> host(count);
    std::vector<float> values;
    device_peek(s->dev, host.data(), pass == FORWARD ? s->out : s->dqkv, count * sizeof(floatX));
    for (size_t i = 0; i < count; i++) {
        if (pass == FORWARD || (i % (3 * C) < C) == (pass == QUERIES)) {
            values.push_back((float)host[i]);
        }
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

static double best_ms(struct study *s, const struct version *v)
{
    cudaEvent_t begin, end;
    double best = 1e30;
    cuda_ok(s->dev, "cudaEventCreate", cudaEventCreate(&begin));
    cuda_ok(s->dev, "cudaEventCreate", cudaEventCreate(&end));
    for (int i = 0; i < REPEATS; i++) {
        float ms = 0;
        cuda_ok(s->dev, "cudaEventRecord", cudaEventRecord(begin, cuda_stream(s->dev)));
        v->run(s);
        cuda_ok(s->dev, "cudaEventRecord", cudaEventRecord(end, cuda_stream(s->dev)));
        check_status(s->dev);
        cuda_ok(s->dev, "cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin, end));
        best = fmin(best, (double)ms);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return best;
}

// All versions of a pass; how many are wrong.
static int try_pass(struct study *s, enum pass pass, size_t n, bool timed)
{
    std::vector<float> expected;
    double T = s->a.T, flops = pass_products[pass] * s->a.B * T * T * (double)s->a.C;
    int wrong = 0;
    for (const struct version &v : versions) {
        if (v.pass != pass || (v.head && v.head != s->a.hs)) {
            continue;
        }
        // D lies where dQ is stored: what is timed below, after this, is right no more.
        size_t bytes = n * sizeof(floatX);
        device_fill(s->dev, s->dqkv, 0xff, 3 * bytes);
        run_forward_plain(s);
        launch_row_dots(s->dev, s->dqkv, s->dout, s->out, s->a);
        device_fill(s->dev, s->out, 0xff, pass == FORWARD ? bytes : 0);
        v.run(s);
        check_status(s->dev);
        std::vector<float> got = fetch(s, pass, n);
        double off = expected.empty() ? 0 : difference(got, expected);
        if (expected.empty()) {
            expected = got;
        }
        bool right = off < 0.02; // p and ds are rounded to bf16: 2^-8 each
        wrong += !right;
        printf("  %-8s %-36s off by %.1e of the largest%s", pass_names[pass], v.tiles, off,
               right ? "" : "   WRONG");
        if (timed) {
            double ms = best_ms(s, &v);
            printf("   %9.3f ms %8.1f TFLOP/s", ms, flops / ms * 1e-9);
        }
        printf("\n");
        fflush(stdout);
    }
    return wrong;
}

int main(int argc, char **argv)
{
    struct device_config config = {};
    struct study s = {};
    struct error err;
    void *arena;
    bool check = argc > 1 && strcmp(argv[1], "check") == 0;
    size_t n_shapes = check ? CHECKS : sizeof shapes / sizeof *shapes;
    int wrong = 0;
    config.kind = "cuda";
    config.dtype = sizeof(floatX) == 2 ? DTYPE_BF16 : DTYPE_FP32;
    config.head_size = ATTENTION_HEAD_SIZE_MAX;
    if (device_open(&s.dev, &config, &err) ||
        device_arena(s.dev, check ? (size_t)64 << 20 : (size_t)1 << 30, &arena, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    printf("%s\n", s.dev->summary);
    for (size_t i = 0; i < n_shapes; i++) {
        size_t C = (size_t)shapes[i].NH * shapes[i].hs;
        s.a = attention_of(shapes[i].B, shapes[i].T, C, shapes[i].NH);
        size_t n = lay_out(&s, (char *)arena);
        random_values(&s, s.qkv, 3 * n);
        random_values(&s, s.dout, n);
        printf("B %d T %d NH %d hs %d\n", s.a.B, s.a.T, s.a.NH, s.a.hs);
        for (int pass = FORWARD; pass <= QUERIES; pass++) {
            wrong += try_pass(&s, (enum pass)pass, n, i >= CHECKS);
        }
    }
    device_close(s.dev);
    return wrong ? 1 : 0;
}
