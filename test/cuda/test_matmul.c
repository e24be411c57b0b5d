// The cuda device's matrix products (kernels/cuda/matmul.c, lt.c) on the CPU runtime, against the
// references in double: shapes that are multiples of nothing, every operand that may be missing,
// epilogues and the kernels that stand in for them; and the table of plans.
//
// Kernels may touch the tensors of the case and the device's workspace and nothing else (sim_part).
#include "kernels/bf16.h"
#include "kernels/cuda/lt.h"
#include "test/cmocka.h"
#include "test/cuda/lt.h"
#include "test/cuda/sim.h"
#include "test/reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BYTES  ((size_t)16 << 20)
#define COUNT(array) (sizeof(array) / sizeof *(array))

struct rig {
    struct device *dev;
    const struct layers *f;
    char *arena;
    size_t used;
    uint64_t rng;
    const size_t *shape; // N, C, OC; for messages
    double *host[64];
    size_t hosts;
};

// A tensor on the device; values: what an input holds, exactly.
struct tensor_ref {
    char *at;
    double *values;
    size_t n;
    bool fp32;
};

static uint64_t seed = 1;

static void open_rig(struct rig *r, enum dtype dtype)
{
    struct device_config config = {
        .kind = "cuda", .dtype = dtype, .head_size = 16, .max_seq = 64, .padded_vocab = 128};
    struct error err;
    void *arena;
    *r = (struct rig){.rng = seed};
    if (device_open(&r->dev, &config, &err) || device_arena(r->dev, ARENA_BYTES, &arena, &err)) {
        fail_msg("%s", err.text);
    }
    r->arena = arena;
    r->f = r->dev->layers;
}

// Forgets the tensors.
static void reset(struct rig *r)
{
    for (size_t i = 0; i < r->hosts; i++) {
        free(r->host[i]);
    }
    r->hosts = r->used = 0;
    sim_parts_forget();
    sim_part(cuda_of(r->dev)->lt_workspace, CUDA_LT_BYTES, false);
    sim_part(cuda_of(r->dev)->scratch, CUDA_SCRATCH_BYTES, false);
}

static void close_rig(struct rig *r)
{
    struct error err;
    reset(r);
    sim_parts_forget();
    assert_int_equal(device_status(r->dev, &err), STATUS_OK);
    device_close(r->dev);
}

static double uniform(struct rig *r)
{
    r->rng = r->rng * 6364136223846793005u + 1442695040888963407u;
    return (double)(r->rng >> 11) * 0x1p-52 - 1;
}

static double *host_array(struct rig *r, size_t n)
{
    assert_true(r->hosts < COUNT(r->host));
    double *x = calloc(n + 1, sizeof *x);
    assert_non_null(x);
    return r->host[r->hosts++] = x;
}

static bool narrow(const struct rig *r, bool fp32)
{
    return !fp32 && r->dev->dtype == DTYPE_BF16;
}

// What a tensor holds is set and read as doubles, exactly.
static void put(struct rig *r, const struct tensor_ref *t)
{
    size_t size = narrow(r, t->fp32) ? 2 : 4;
    char *bytes = malloc(t->n * size + 1);
    for (size_t i = 0; i < t->n; i++) {
        float x = (float)t->values[i];
        uint16_t h = bf16_round(x);
        memcpy(bytes + i * size, size == 4 ? (void *)&x : (void *)&h, size);
        t->values[i] = (double)(size == 4 ? x : bf16_load(h));
    }
    device_poke(r->dev, t->at, bytes, t->n * size);
    free(bytes);
}

static double *get(struct rig *r, const struct tensor_ref *t)
{
    size_t size = narrow(r, t->fp32) ? 2 : 4;
    double *x = host_array(r, t->n);
    char *bytes = malloc(t->n * size + 1);
    device_sync(r->dev);
    device_peek(r->dev, bytes, t->at, t->n * size);
    for (size_t i = 0; i < t->n; i++) {
        uint16_t h;
        float f;
        memcpy(size == 4 ? (void *)&f : (void *)&h, bytes + i * size, size);
        x[i] = (double)(size == 4 ? f : bf16_load(h));
    }
    free(bytes);
    return x;
}

// skip: elements that lie before the tensor, in the same piece of memory.
static struct tensor_ref tensor_at(struct rig *r, size_t n, bool fp32, size_t skip, bool read_only)
{
    size_t size = narrow(r, fp32) ? 2 : 4;
    struct tensor_ref t = {r->arena + r->used + skip * size, host_array(r, n), n, fp32};
    r->used += device_round((n + skip) * size) + DEVICE_ALIGN;
    assert_true(r->used <= ARENA_BYTES);
    sim_part(t.at, n * size, read_only);
    return t;
}

static struct tensor_ref input_at(struct rig *r, size_t n, double range, size_t skip)
{
    struct tensor_ref t = tensor_at(r, n, false, skip, true);
    for (size_t i = 0; i < n; i++) {
        t.values[i] = range * uniform(r);
    }
    put(r, &t);
    return t;
}

static struct tensor_ref input(struct rig *r, size_t n, double range)
{
    return input_at(r, n, range, 0);
}

// Filled with NaN, so that an element that is not written shows.
static struct tensor_ref output_at(struct rig *r, size_t n, bool fp32, size_t skip)
{
    struct tensor_ref t = tensor_at(r, n, fp32, skip, false);
    for (size_t i = 0; i < n; i++) {
        t.values[i] = (double)NAN;
    }
    put(r, &t);
    return t;
}

static struct tensor_ref output(struct rig *r, size_t n, bool fp32)
{
    return output_at(r, n, fp32, 0);
}

// |error| <= `roundings` of the value to its dtype + what fp32 sums of this size deserve.
static void check(struct rig *r, const char *what, const struct tensor_ref *t,
                  const double *expected, double roundings, double noise)
{
    const double *x = get(r, t);
    double half_ulp = narrow(r, t->fp32) ? 0x1p-8 : 0x1p-24;
    for (size_t i = 0; i < t->n; i++) {
        double error = fabs(x[i] - expected[i]);
        if (!(error <= roundings * half_ulp * fabs(expected[i]) + noise)) {
            fail_msg("%zu x %zu x %zu, %s, epilogues %s: %s[%zu] is %.9g, not %.9g", r->shape[0],
                     r->shape[1], r->shape[2], r->dev->dtype == DTYPE_BF16 ? "bf16" : "fp32",
                     cuda_of(r->dev)->plans->fuse ? "fused" : "apart", what, i, x[i], expected[i]);
        }
    }
}

static double noise_of(size_t k)
{
    return 3e-6 * sqrt((double)k) + 1e-6;
}

// ---- against the references ---------------------------------------------------------------------

static void try_forward(struct rig *r, size_t N, size_t C, size_t OC)
{
    struct tensor_ref inp = input(r, N * C, 1), weight = input(r, OC * C, 1);
    struct tensor_ref bias = input(r, OC, 1), residual = input(r, N * OC, 1);
    double *y = host_array(r, N * OC);
    for (int i = 0; i < 4; i++) {
        const struct tensor_ref *b = i & 1 ? &bias : NULL, *res = i & 2 ? &residual : NULL;
        struct tensor_ref out = output(r, N * OC, false);
        ref_matmul_forward(y, inp.values, weight.values, b ? b->values : NULL,
                           res ? res->values : NULL, N, C, OC);
        r->f->matmul_forward(r->dev, out.at, inp.at, weight.at, b ? b->at : NULL,
                             res ? res->at : NULL, N, C, OC);
        check(r, "out", &out, y, 1, noise_of(C));
    }
}

static void try_backward(struct rig *r, size_t N, size_t C, size_t OC)
{
    struct tensor_ref inp = input(r, N * C, 1), weight = input(r, OC * C, 1);
    struct tensor_ref dout = input(r, N * OC, 1), dinp = output(r, N * C, false);
    struct tensor_ref dweight = output(r, OC * C, false), dbias = output(r, OC, false);
    struct tensor_ref sum = output(r, OC * C, true);
    double *dx = host_array(r, N * C), *dw = host_array(r, OC * C), *db = host_array(r, OC);
    ref_matmul_backward(dx, dw, db, dout.values, inp.values, weight.values, N, C, OC);

    r->f->matmul_backward_input(r->dev, dinp.at, dout.at, weight.at, N, C, OC);
    check(r, "dinp", &dinp, dx, 1, noise_of(OC));
    if (OC % 8 == 0) {
        r->f->matmul_backward_weight(r->dev, dweight.at, dbias.at, dout.at, inp.at, N, C, OC);
        check(r, "dweight", &dweight, dw, 1, noise_of(N));
        check(r, "dbias", &dbias, db, 1, noise_of(N));
    }
    r->f->matmul_backward_weight_fp32(r->dev, (float *)sum.at, dout.at, inp.at, false, N, C, OC);
    check(r, "fp32 dweight", &sum, dw, 1, noise_of(N));
    r->f->matmul_backward_weight_fp32(r->dev, (float *)sum.at, dout.at, inp.at, true, N, C, OC);
    for (size_t i = 0; i < OC * C; i++) {
        dw[i] *= 2;
    }
    check(r, "fp32 dweight, twice", &sum, dw, 1, 2 * noise_of(N));
}

static void try_gelu_forward(struct rig *r, size_t N, size_t C, size_t OC, bool with_bias)
{
    bool fused = cuda_of(r->dev)->plans->fuse && with_bias;
    struct tensor_ref inp = input(r, N * C, 1), weight = input(r, OC * C, 1);
    struct tensor_ref bias = input(r, OC, 3);
    struct tensor_ref pre = output(r, N * OC, false), gelu = output(r, N * OC, false);
    double *y = host_array(r, N * OC);
    ref_matmul_forward(y, inp.values, weight.values, with_bias ? bias.values : NULL, NULL, N, C,
                       OC);
    r->f->matmul_gelu_forward(r->dev, gelu.at, pre.at, inp.at, weight.at,
                              with_bias ? bias.at : NULL, N, C, OC);
    check(r, "pre", &pre, y, 1, noise_of(C));
    ref_gelu_forward(y, fused ? y : get(r, &pre), N * OC); // fused: before it is rounded
    check(r, "gelu", &gelu, y, 1, fused ? 2 * noise_of(C) : 1e-6);
}

static void try_gelu_backward(struct rig *r, size_t N, size_t C, size_t OC)
{
    bool fused = cuda_of(r->dev)->plans->fuse;
    struct tensor_ref pre = input(r, N * C, 6), weight = input(r, OC * C, 1);
    struct tensor_ref dout = input(r, N * OC, 1), dpre = output(r, N * C, false);
    struct tensor_ref gelu = output(r, N * C, false);
    double *dx = host_array(r, N * C), *dw = host_array(r, OC * C), *db = host_array(r, OC);
    double *g = host_array(r, N * C);
    ref_matmul_backward(dx, dw, db, dout.values, pre.values, weight.values, N, C, OC);
    ref_gelu_backward(dx, dx, pre.values, N * C);
    ref_gelu_forward(g, pre.values, N * C);
    r->f->matmul_gelu_backward_input(r->dev, dpre.at, gelu.at, pre.at, dout.at, weight.at, N, C,
                                     OC);
    check(r, "dpre", &dpre, dx, fused ? 1 : 2.01, 3 * noise_of(OC));
    check(r, "gelu given back", &gelu, g, 1, 1e-6);
}

static void test_shapes(enum dtype dtype, bool fuse)
{
    static const size_t shapes[][3] = {{1, 1, 1},     {1, 36, 108}, {3, 5, 1},     {4, 7, 9},
                                       {5, 33, 17},   {17, 64, 31}, {51, 36, 144}, {2, 100, 1},
                                       {9, 1100, 24}, {70, 65, 66}, {130, 24, 40}, {20, 530, 37},
                                       {64, 64, 64},  {8, 128, 512}};
    struct rig r;
    open_rig(&r, dtype);
    cuda_of(r.dev)->plans->fuse = fuse;
    for (size_t i = 0; i < COUNT(shapes); i++) {
        size_t N = shapes[i][0], C = shapes[i][1], OC = shapes[i][2];
        void (*const tries[])(struct rig *, size_t, size_t, size_t) = {try_forward, try_backward};
        r.shape = shapes[i];
        for (size_t t = 0; t < COUNT(tries); t++) {
            reset(&r);
            tries[t](&r, N, C, OC);
        }
        if (OC % 8 == 0) {
            reset(&r);
            try_gelu_forward(&r, N, C, OC, true);
            reset(&r);
            try_gelu_forward(&r, N, C, OC, false);
        }
        if (C % 8 == 0) {
            reset(&r);
            try_gelu_backward(&r, N, C, OC);
        }
    }
    close_rig(&r);
}

static void test_fp32(void **state)
{
    (void)state;
    test_shapes(DTYPE_FP32, false);
}

static void test_fp32_fused(void **state)
{
    (void)state;
    test_shapes(DTYPE_FP32, true);
}

static void test_bf16(void **state)
{
    (void)state;
    test_shapes(DTYPE_BF16, false);
}

static void test_bf16_fused(void **state)
{
    (void)state;
    test_shapes(DTYPE_BF16, true);
}

// ---- plans --------------------------------------------------------------------------------------

// A chunk of rows may begin at any row: the algorithm must not expect more of its address, and its
// result must not depend on it.
static void test_rows_begin_anywhere(void **state)
{
    (void)state;
    static const size_t shape[] = {6, 33, 40};
    size_t N = shape[0], C = shape[1], OC = shape[2];
    for (int dtype = DTYPE_FP32; dtype <= DTYPE_BF16; dtype++) {
        struct rig r;
        double *first = NULL;
        open_rig(&r, (enum dtype)dtype);
        reset(&r);
        r.shape = shape;
        struct tensor_ref weight = input(&r, OC * C, 1), bias = input(&r, OC, 1);
        struct sim_lt_counts before = sim_lt_counts();
        uint64_t rng = r.rng;
        for (size_t row = 0; row < 4; row++) {
            r.rng = rng;
            struct tensor_ref inp = input_at(&r, N * C, 1, row * C);
            struct tensor_ref out = output_at(&r, N * OC, false, row * OC);
            r.f->matmul_forward(r.dev, out.at, inp.at, weight.at, bias.at, NULL, N, C, OC);
            double *x = get(&r, &out);
            first = first ? first : x;
            assert_memory_equal(x, first, N * OC * sizeof *x);
        }
        assert_int_equal(sim_lt_counts().heuristics - before.heuristics, 1);
        close_rig(&r);
    }
}

static void run_all(struct rig *r, size_t N, size_t C, size_t OC)
{
    reset(r);
    try_forward(r, N, C, OC);
    try_backward(r, N, C, OC);
    reset(r);
    try_gelu_forward(r, N, C, OC, true);
    try_gelu_backward(r, N, C, OC);
}

static void test_each_shape_is_asked_for_once(void **state)
{
    (void)state;
    static const size_t shape[] = {16, 24, 40};
    for (int fuse = 0; fuse < 2; fuse++) {
        struct rig r;
        open_rig(&r, DTYPE_BF16);
        cuda_of(r.dev)->plans->fuse = fuse;
        r.shape = shape;
        struct sim_lt_counts start = sim_lt_counts();
        run_all(&r, 16, 24, 40);
        struct sim_lt_counts once = sim_lt_counts();
        // Forward with and without bias, the input's gradient, two of the weight; fused, those with
        // GELU come on top of it.
        assert_int_equal(once.heuristics - start.heuristics, fuse ? 7 : 5);
        for (int i = 0; i < 3; i++) {
            run_all(&r, 16, 24, 40);
        }
        assert_int_equal(sim_lt_counts().heuristics, once.heuristics);
        assert_int_equal(sim_lt_counts().products - start.products,
                         4 * (once.products - start.products));
        close_rig(&r);
        assert_int_equal(sim_lt_counts().handles, 0);
    }
}

// More shapes than the table holds: it starts anew, and nothing else changes.
static void test_table_is_emptied_when_full(void **state)
{
    (void)state;
    struct rig r;
    open_rig(&r, DTYPE_FP32);
    reset(&r);
    struct tensor_ref inp = input(&r, 3 * LT_PLANS, 1), weight = input(&r, 3 * 8, 1);
    struct tensor_ref out = output(&r, LT_PLANS * 8, false);
    double *y = host_array(&r, LT_PLANS * 8);
    struct sim_lt_counts before = sim_lt_counts();
    for (size_t round = 0; round < 2; round++) {
        for (size_t N = 1; N <= LT_PLANS; N++) {
            r.shape = (const size_t[]){N, 3, 8};
            r.f->matmul_forward(r.dev, out.at, inp.at, weight.at, NULL, NULL, N, 3, 8);
            r.f->matmul_forward(r.dev, out.at, inp.at, weight.at, NULL, NULL, N, 3, 8);
        }
        ref_matmul_forward(y, inp.values, weight.values, NULL, NULL, LT_PLANS, 3, 8);
        check(&r, "out", &out, y, 1, noise_of(3));
    }
    assert_int_equal(sim_lt_counts().heuristics - before.heuristics, 2 * LT_PLANS);
    close_rig(&r);
}

// Where cuBLASLt has no algorithm for an epilogue, a kernel of ours does it; that there is none is
// asked for once.
static void test_epilogue_that_is_not_there(void **state)
{
    (void)state;
    static const uint32_t missing[] = {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
                                       CUBLASLT_EPILOGUE_BGRADB};
    static const size_t shape[] = {16, 24, 40};
    for (size_t i = 0; i < COUNT(missing); i++) {
        struct rig r;
        open_rig(&r, DTYPE_FP32); // roundings are too small to tell the two ways apart
        cuda_of(r.dev)->plans->fuse = true;
        r.shape = shape;
        sim_lt_refuse(missing[i]);
        run_all(&r, 16, 24, 40);
        struct sim_lt_counts once = sim_lt_counts();
        run_all(&r, 16, 24, 40);
        assert_int_equal(sim_lt_counts().heuristics, once.heuristics);
        sim_lt_refuse(0);
        close_rig(&r);
    }
}

static void test_no_algorithm_is_an_error(void **state)
{
    (void)state;
    struct rig r;
    struct error err;
    open_rig(&r, DTYPE_BF16);
    reset(&r);
    struct tensor_ref inp = input(&r, 64, 1), weight = input(&r, 64, 1);
    struct tensor_ref out = output(&r, 64, false);
    sim_lt_refuse(CUBLASLT_EPILOGUE_DEFAULT);
    r.f->matmul_forward(r.dev, out.at, inp.at, weight.at, NULL, NULL, 8, 8, 8);
    sim_lt_refuse(0);
    assert_int_equal(device_status(r.dev, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "cublasLtMatmulAlgoGetHeuristic"));
    assert_non_null(strstr(err.text, "CUBLAS_STATUS_NOT_SUPPORTED"));
    assert_non_null(strstr(err.text, "N 8, C 8, OC 8"));
    assert_non_null(strstr(err.text, "bf16"));
    reset(&r);
    sim_parts_forget();
    device_close(r.dev);
}

// What the shape promises of its addresses, and an address that does not keep it.
static void test_address_of_less_alignment_is_refused(void **state)
{
    (void)state;
    struct rig r;
    struct error err;
    open_rig(&r, DTYPE_BF16);
    reset(&r);
    struct tensor_ref inp = input_at(&r, 8 * 64, 1, 8), weight = input(&r, 8 * 64, 1);
    struct tensor_ref out = output(&r, 64, false);
    r.f->matmul_forward(r.dev, out.at, inp.at, weight.at, NULL, NULL, 8, 64, 8);
    assert_int_equal(device_status(r.dev, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED"));
    reset(&r);
    sim_parts_forget();
    device_close(r.dev);
}

// All products share a workspace: those of two lanes, with nothing between them, are a race.
static void test_products_of_two_lanes_race(void **state)
{
    (void)state;
    struct rig r;
    struct error err;
    open_rig(&r, DTYPE_FP32);
    reset(&r);
    struct tensor_ref inp = input(&r, 64, 1), weight = input(&r, 64, 1);
    struct tensor_ref out[2] = {output(&r, 64, false), output(&r, 64, false)};
    assert_int_equal(device_marks(r.dev, 1, &err), STATUS_OK);
    sim_expect_reports(true);
    for (size_t i = 0; i < 2; i++) {
        enum device_lane lane = i ? DEVICE_COPY_IN : DEVICE_COMPUTE;
        device_begin(r.dev, lane, "product");
        r.f->matmul_forward(r.dev, out[i].at, inp.at, weight.at, NULL, NULL, 8, 8, 8);
        device_end(r.dev, lane, 0);
    }
    device_sync(r.dev);
    assert_true(sim_reports(SIM_STREAM_RACE) > 0);
    sim_forget_reports();
    sim_expect_reports(false);
    close_rig(&r);
}

static void test_rate_leaves_no_trace(void **state)
{
    (void)state;
    struct rig r;
    size_t free_before, free_after, total;
    open_rig(&r, DTYPE_BF16);
    void *workspace = cuda_of(r.dev)->lt_workspace;
    assert_int_equal(cudaMemGetInfo(&free_before, &total), cudaSuccess);
    assert_true(device_matmul_rate(r.dev, 96) >= 0); // its clock may be a virtual one
    assert_int_equal(cudaMemGetInfo(&free_after, &total), cudaSuccess);
    assert_int_equal(free_after, free_before);
    assert_ptr_equal(cuda_of(r.dev)->lt_workspace, workspace);
    close_rig(&r);
}

int main(int argc, char **argv)
{
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    fprintf(stderr, "seed %llu (an argument sets it)\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp32),
        cmocka_unit_test(test_fp32_fused),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_bf16_fused),
        cmocka_unit_test(test_rows_begin_anywhere),
        cmocka_unit_test(test_each_shape_is_asked_for_once),
        cmocka_unit_test(test_table_is_emptied_when_full),
        cmocka_unit_test(test_epilogue_that_is_not_there),
        cmocka_unit_test(test_no_algorithm_is_an_error),
        cmocka_unit_test(test_address_of_less_alignment_is_refused),
        cmocka_unit_test(test_products_of_two_lanes_race),
        cmocka_unit_test(test_rate_leaves_no_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
