// The optimizer's kernels in every variant (dtype, ISA): AdamW against fp64 over many steps, the
// same bits however the work is cut, the sum of squares as layers.h defines it, and how the ISA is
// chosen. test_ops.c judges single updates; what a session makes of them is in test_session.c.
#include "kernels/bf16.h"
#include "kernels/cpu/cpu.h"
#include "kernels/layers.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define CANARIES     ((size_t)16)    // elements behind the end of each array
#define BLOCK        ((size_t)65536) // elements that a thread takes at a time (ops/pointwise.c)

struct variant {
    const char *name;
    enum dtype dtype;
    enum isa isa;
};

static const struct variant variants[] = {
    {"fp32 base", DTYPE_FP32, ISA_BASE},     {"fp32 avx2", DTYPE_FP32, ISA_AVX2},
    {"fp32 avx512", DTYPE_FP32, ISA_AVX512}, {"bf16 base", DTYPE_BF16, ISA_BASE},
    {"bf16 avx2", DTYPE_BF16, ISA_AVX2},     {"bf16 avx512", DTYPE_BF16, ISA_AVX512},
};

// False, and said, where this processor cannot run the variant.
static bool can_run(const struct variant *v)
{
    enum isa best;
    struct error err;
    unsetenv("TRAIN_GPT_ISA");
    assert_int_equal(isa_choose(&best, &err), STATUS_OK);
    if (v->isa > best) {
        fprintf(stderr, "skipped: %s: this processor runs %s at most\n", v->name, isa_name(best));
    }
    return v->isa <= best;
}

// ---- the state of n parameters ------------------------------------------------------------------

struct arrays {
    size_t n;
    float *master, *m, *v, *grad32;
    uint16_t *params, *grad16; // in use for bf16
};

// Gradients and moments of all magnitudes, down to denormals; some gradients are 0. Parameters and
// gradients are bf16 numbers, so that both dtypes can hold the same ones.
static double wide(uint64_t *rng, int low, int high)
{
    double x = ldexp(rng_unit(rng) - 0.5, low + (int)rng_below(rng, (size_t)(high - low)));
    return (double)bf16_load(bf16_round((float)x));
}

static void new_gradients(struct arrays *a, uint64_t *rng)
{
    for (size_t i = 0; i < a->n; i++) {
        double g = rng_below(rng, 9) ? wide(rng, -70, 4) : 0;
        a->grad32[i] = (float)g;
        a->grad16[i] = bf16_round((float)g);
    }
}

static void make_arrays(struct arrays *a, size_t n, uint64_t *rng)
{
    *a = (struct arrays){.n = n};
    float **fp32[] = {&a->master, &a->m, &a->v, &a->grad32};
    uint16_t **fp16[] = {&a->params, &a->grad16};
    for (size_t i = 0; i < COUNT(fp32); i++) {
        *fp32[i] = test_alloc(n + CANARIES, sizeof(float));
        memset(*fp32[i] + n, 0xa5, CANARIES * sizeof(float));
    }
    for (size_t i = 0; i < COUNT(fp16); i++) {
        *fp16[i] = test_alloc(n + CANARIES, sizeof(uint16_t));
        memset(*fp16[i] + n, 0xa5, CANARIES * sizeof(uint16_t));
    }
    for (size_t i = 0; i < n; i++) {
        a->master[i] = (float)wide(rng, -9, 3);
        a->params[i] = bf16_round(a->master[i]);
        a->m[i] = (float)wide(rng, -40, 4);
        a->v[i] = (float)fabs(wide(rng, -80, 8));
    }
    new_gradients(a, rng);
}

static void free_arrays(struct arrays *a)
{
    free(a->master);
    free(a->m);
    free(a->v);
    free(a->grad32);
    free(a->params);
    free(a->grad16);
}

static void check_canaries(const struct arrays *a)
{
    char canary[CANARIES * sizeof(float)];
    memset(canary, 0xa5, sizeof canary);
    assert_memory_equal(a->master + a->n, canary, sizeof canary);
    assert_memory_equal(a->m + a->n, canary, sizeof canary);
    assert_memory_equal(a->v + a->n, canary, sizeof canary);
    assert_memory_equal(a->grad32 + a->n, canary, sizeof canary);
    assert_memory_equal(a->params + a->n, canary, CANARIES * sizeof(uint16_t));
    assert_memory_equal(a->grad16 + a->n, canary, CANARIES * sizeof(uint16_t));
}

static void assert_same_state(const struct arrays *a, const struct arrays *b)
{
    assert_memory_equal(a->master, b->master, a->n * sizeof(float));
    assert_memory_equal(a->m, b->m, a->n * sizeof(float));
    assert_memory_equal(a->v, b->v, a->n * sizeof(float));
    assert_memory_equal(a->params, b->params, a->n * sizeof(uint16_t));
}

// The same update from one place to another gives the same bits, and nothing beyond its end.
static void update_apart(const struct layers *f, struct device *dev, bool fp32_grad,
                         const struct arrays *a, const struct adamw *w, size_t lo, size_t hi,
                         struct arrays *out)
{
    size_t n = hi - lo;
    bool bf16 = dev->dtype == DTYPE_BF16;
    float **state[] = {&out->master, &out->m, &out->v};
    for (size_t i = 0; i < 3; i++) {
        *state[i] = test_alloc(n + 1, sizeof(float));
        (*state[i])[n] = 42;
    }
    out->params = test_alloc(n + 1, sizeof *out->params);
    out->params[n] = 42;
    struct adamw_state to = {out->master, out->m, out->v};
    struct adamw_state from = {a->master + lo, a->m + lo, a->v + lo};
    void *params = bf16 ? (void *)out->params : out->master;
    if (fp32_grad) {
        f->adamw_apart_fp32(dev, params, &to, &from, a->grad32 + lo, w, n);
    } else {
        f->adamw_apart(dev, params, &to, &from,
                       bf16 ? (const void *)(a->grad16 + lo) : a->grad32 + lo, w, n);
    }
    for (size_t i = 0; i < 3; i++) {
        assert_true((*state[i])[n] == 42);
    }
    assert_int_equal(out->params[n], 42);
}

static void expect_apart(struct arrays *apart, const struct arrays *a, bool bf16, size_t lo,
                         size_t n)
{
    assert_memory_equal(apart->master, a->master + lo, n * sizeof(float));
    assert_memory_equal(apart->m, a->m + lo, n * sizeof(float));
    assert_memory_equal(apart->v, a->v + lo, n * sizeof(float));
    if (bf16) {
        assert_memory_equal(apart->params, a->params + lo, n * sizeof(uint16_t));
    }
    free(apart->master);
    free(apart->m);
    free(apart->v);
    free(apart->params);
}

// One update of elements [lo, hi), with gradients in the variant's dtype or in fp32.
static void update(const struct variant *v, int threads, bool fp32_grad, struct arrays *a,
                   const struct adamw *w, size_t lo, size_t hi)
{
    struct device dev = {.dtype = v->dtype, .threads = threads};
    const struct layers *f = cpu_layers(v->dtype, v->isa);
    bool bf16 = v->dtype == DTYPE_BF16;
    void *params = bf16 ? (void *)(a->params + lo) : a->master + lo;
    struct arrays apart;
    update_apart(f, &dev, fp32_grad, a, w, lo, hi, &apart);
    if (fp32_grad) {
        f->adamw_fp32(&dev, params, a->master + lo, a->m + lo, a->v + lo, a->grad32 + lo, w,
                      hi - lo);
    } else {
        f->adamw(&dev, params, a->master + lo, a->m + lo, a->v + lo,
                 bf16 ? (const void *)(a->grad16 + lo) : a->grad32 + lo, w, hi - lo);
    }
    expect_apart(&apart, a, bf16, lo, hi - lo);
}

// ---- against fp64 -------------------------------------------------------------------------------

// What a user asks for, in double; the kernel gets it as a session would hand it over.
struct recipe {
    double lr, beta1, beta2, eps, decay, scale;
    unsigned t; // 1 for the first update
};

static struct adamw scalars(const struct recipe *r)
{
    return (struct adamw){
        .beta1 = (float)r->beta1,
        .beta2 = (float)r->beta2,
        .one_minus_beta1 = (float)(1 - r->beta1),
        .one_minus_beta2 = (float)(1 - r->beta2),
        .eps = (float)r->eps,
        .scale = (float)r->scale,
        .decay = (float)(1 - r->lr * r->decay),
        .step = (float)(r->lr / (1 - pow(r->beta1, r->t))),
        .v_correction = (float)(1 / sqrt(1 - pow(r->beta2, r->t))),
    };
}

// The rate, the clipping and the decay change from step to step.
static struct recipe recipe_of(unsigned t)
{
    return (struct recipe){.lr = 1e-3 * (1 + t % 7),
                           .beta1 = 0.9,
                           .beta2 = 0.95,
                           .eps = 1e-8,
                           .decay = t % 3 ? 0.1 : 0,
                           .scale = t % 2 ? 1 : 0.37,
                           .t = t};
}

// ulps of the largest magnitude among the result and what it was made of.
static void assert_within(double ulps, const char *what, size_t i, double got, double expected,
                          double a, double b)
{
    double most = fmax(fabs(expected), fmax(fabs(a), fabs(b)));
    double ulp = fmax(ldexp(1, ilogb(fmax(most, 0x1p-149)) - 23), 0x1p-149);
    if (!(fabs(got - expected) <= ulps * ulp)) {
        fail_msg("%s[%zu] is %.9g, not %.9g: %.2f ulp", what, i, got, expected,
                 fabs(got - expected) / ulp);
    }
}

// One step from the fp32 state `old` and the fp32 scalars `w`, element by element, in double.
static void check_step(const struct arrays *old, const struct arrays *new, const struct adamw *w,
                       enum dtype dtype)
{
    double step = (double)w->step, v_correction = (double)w->v_correction, eps = (double)w->eps;
    for (size_t i = 0; i < old->n; i++) {
        double g = (double)(old->grad32[i] * w->scale); // clipped: an fp32 number too
        double m_old = (double)w->beta1 * (double)old->m[i], m_new = (double)w->one_minus_beta1 * g;
        double v_old = (double)w->beta2 * (double)old->v[i];
        double v_new = (double)w->one_minus_beta2 * g * g;
        double p_old = (double)old->master[i] * (double)w->decay;
        double per_m = step / (sqrt(v_old + v_new) * v_correction + eps);
        assert_within(2, "m", i, (double)new->m[i], m_old + m_new, m_old, m_new);
        assert_within(2, "v", i, (double)new->v[i], v_old + v_new, v_old, v_new);
        // The change of p comes out of a dozen roundings and is good to 6 ulp of its own, which
        // shows only where it is not small beside p.
        double change = per_m * fmax(fabs(m_old), fabs(m_new));
        assert_within(change > fabs(p_old) / 8 ? 6 : 2, "p", i, (double)new->master[i],
                      p_old - per_m * (m_old + m_new), p_old, change);
        if (dtype == DTYPE_BF16) {
            assert_int_equal(new->params[i], bf16_round(new->master[i]));
        }
    }
}

static void copy_state(struct arrays *to, const struct arrays *from)
{
    memcpy(to->master, from->master, from->n * sizeof(float));
    memcpy(to->m, from->m, from->n * sizeof(float));
    memcpy(to->v, from->v, from->n * sizeof(float));
    memcpy(to->params, from->params, from->n * sizeof(uint16_t));
    memcpy(to->grad32, from->grad32, from->n * sizeof(float));
    memcpy(to->grad16, from->grad16, from->n * sizeof(uint16_t));
}

static void train_against_fp64(const struct variant *v, size_t n, bool fp32_grad, uint64_t *rng)
{
    struct arrays a, old;
    make_arrays(&a, n, rng);
    make_arrays(&old, n, rng);
    for (unsigned t = 1; t <= 50; t++) {
        struct recipe r = recipe_of(t);
        struct adamw w = scalars(&r);
        new_gradients(&a, rng);
        copy_state(&old, &a);
        update(v, 1, fp32_grad, &a, &w, 0, n);
        check_step(&old, &a, &w, v->dtype);
        check_canaries(&a);
    }
    free_arrays(&a);
    free_arrays(&old);
}

static void test_fp64(void **state)
{
    const struct variant *v = *state;
    uint64_t rng = test_seed();
    if (!can_run(v)) {
        skip();
    }
    for (size_t n = 0; n <= 200; n++) {
        train_against_fp64(v, n, n % 2, &rng);
    }
}

static void test_odd_lengths(void **state)
{
    static const size_t lengths[] = {1, 7, 8, 9, 15, 17, 31, 33, 63, 65, 1023};
    const struct variant *v = *state;
    uint64_t rng = test_seed();
    if (!can_run(v)) {
        skip();
    }
    for (size_t i = 0; i < COUNT(lengths); i++) {
        train_against_fp64(v, lengths[i], false, &rng);
        train_against_fp64(v, lengths[i], true, &rng);
    }
}

// ---- the same bits ------------------------------------------------------------------------------

// Lengths around the vectors and around the blocks that threads share out.
static const size_t lengths[] = {1, 17, 1023, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 77};

static void same_as(const struct arrays *start, const struct arrays *expected,
                    const struct variant *v, int threads, bool fp32_grad, const struct adamw *w)
{
    uint64_t rng = 0;
    struct arrays a;
    make_arrays(&a, start->n, &rng);
    copy_state(&a, start);
    update(v, threads, fp32_grad, &a, w, 0, a.n);
    assert_same_state(&a, expected);
    check_canaries(&a);
    free_arrays(&a);
}

// Any ISA, 1 to 4 threads, gradients in fp32 or in the dtype: the bits of the base ISA.
static void test_same_bits(void **state)
{
    const struct variant *v = *state;
    const struct variant base = {"base", v->dtype, ISA_BASE};
    uint64_t rng = test_seed();
    struct recipe r = recipe_of(2);
    struct adamw w = scalars(&r);
    if (!can_run(v)) {
        skip();
    }
    for (size_t l = 0; l < COUNT(lengths); l++) {
        struct arrays start, expected;
        make_arrays(&start, lengths[l], &rng);
        make_arrays(&expected, lengths[l], &rng);
        copy_state(&expected, &start);
        update(&base, 1, false, &expected, &w, 0, expected.n);
        assert_memory_not_equal(expected.m, start.m, start.n * sizeof(float));
        for (int threads = 1; threads <= 4; threads++) {
            same_as(&start, &expected, v, threads, false, &w);
            same_as(&start, &expected, v, threads, true, &w);
        }
        free_arrays(&start);
        free_arrays(&expected);
    }
}

// Cuts [0, n) at random into `parts` pieces and updates them in random order.
static void update_in_parts(const struct variant *v, struct arrays *a, const struct adamw *w,
                            size_t parts, uint64_t *rng)
{
    size_t lo[7], hi[7], order[7];
    for (size_t i = 0, at = 0; i < parts; i++) {
        lo[i] = at;
        at = i + 1 == parts ? a->n : at + rng_below(rng, a->n - at + 1);
        hi[i] = at;
        order[i] = i;
    }
    for (size_t i = parts; i > 1; i--) {
        size_t j = rng_below(rng, i), swapped = order[j];
        order[j] = order[i - 1];
        order[i - 1] = swapped;
    }
    for (size_t i = 0; i < parts; i++) {
        update(v, 2, i % 2, a, w, lo[order[i]], hi[order[i]]);
    }
}

static void test_sub_blocks(void **state)
{
    const struct variant *v = *state;
    uint64_t rng = test_seed();
    if (!can_run(v)) {
        skip();
    }
    for (size_t l = 0; l < COUNT(lengths); l++) {
        struct arrays start, whole, cut;
        make_arrays(&start, lengths[l], &rng);
        make_arrays(&whole, lengths[l], &rng);
        make_arrays(&cut, lengths[l], &rng);
        copy_state(&whole, &start);
        copy_state(&cut, &start);
        for (unsigned t = 1; t <= 5; t++) {
            struct recipe r = recipe_of(t);
            struct adamw w = scalars(&r);
            update(v, 1, false, &whole, &w, 0, whole.n);
            update_in_parts(v, &cut, &w, t == 1 ? 1 : 7, &rng);
            assert_same_state(&cut, &whole);
        }
        check_canaries(&cut);
        free_arrays(&start);
        free_arrays(&whole);
        free_arrays(&cut);
    }
}

// ---- decay --------------------------------------------------------------------------------------

// With no gradient and no history only decay moves a parameter, by one fp32 product.
static void test_decay(void **state)
{
    const struct variant *v = *state;
    uint64_t rng = test_seed();
    struct recipe r = {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .scale = 1, .t = 1};
    if (!can_run(v)) {
        skip();
    }
    for (int decays = 0; decays < 2; decays++) {
        struct arrays a, old;
        r.decay = decays ? 0.1 : 0;
        struct adamw w = scalars(&r);
        float shrink = (float)(1 - 3e-4 * 0.1);
        make_arrays(&a, 1023, &rng);
        make_arrays(&old, 1023, &rng);
        memset(a.m, 0, a.n * sizeof *a.m);
        memset(a.v, 0, a.n * sizeof *a.v);
        memset(a.grad32, 0, a.n * sizeof *a.grad32);
        memset(a.grad16, 0, a.n * sizeof *a.grad16);
        copy_state(&old, &a);
        update(v, 2, false, &a, &w, 0, a.n);
        for (size_t i = 0; i < a.n; i++) {
            float expected = decays ? old.master[i] * shrink : old.master[i];
            assert_memory_equal(a.master + i, &expected, sizeof expected);
        }
        assert_memory_equal(a.m, old.m, a.n * sizeof *a.m);
        assert_memory_equal(a.v, old.v, a.n * sizeof *a.v);
        free_arrays(&a);
        free_arrays(&old);
    }
}

// ---- the sum of squares -------------------------------------------------------------------------

// fp32 within a chunk, double across chunks: the bits of all variants and thread counts agree, and
// a chunk's sum is right to fp32's precision.
static void test_sumsq(void **state)
{
    const struct variant *v = *state;
    const struct layers *f = cpu_layers(v->dtype, v->isa);
    const struct layers *base = cpu_layers(DTYPE_FP32, ISA_BASE);
    static const size_t sizes[] = {0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 3 * BLOCK + 77};
    uint64_t rng = test_seed();
    if (!can_run(v)) {
        skip();
    }
    for (size_t l = 0; l < COUNT(sizes); l++) {
        struct arrays a;
        make_arrays(&a, sizes[l], &rng);
        float *chunks = test_alloc(a.n / SUMSQ_CHUNK + 1, sizeof *chunks);
        double expected, exact = 0, got[2];
        base->sumsq_fp32(&(struct device){.threads = 1}, &expected, chunks, a.grad32, a.n);
        for (size_t i = 0; i < a.n; i++) {
            exact += (double)a.grad32[i] * (double)a.grad32[i];
        }
        assert_true(fabs(expected - exact) <= 1e-5 * exact);
        const void *x = v->dtype == DTYPE_BF16 ? (const void *)a.grad16 : a.grad32;
        for (int threads = 1; threads <= 4; threads++) {
            struct device dev = {.dtype = v->dtype, .threads = threads};
            f->sumsq(&dev, got, chunks, x, a.n);
            f->sumsq_fp32(&dev, got + 1, chunks, a.grad32, a.n);
            assert_memory_equal(got, &expected, sizeof expected);
            assert_memory_equal(got + 1, &expected, sizeof expected);
        }
        free(chunks);
        free_arrays(&a);
    }
}

// Across chunks fp32 would lose these: 1 + 2^20 times 2^-24 is 1 in fp32.
static void test_sumsq_in_double(void **state)
{
    size_t n = SUMSQ_CHUNK * 4096;
    float *x = test_alloc(n, sizeof *x), *chunks = test_alloc(4097, sizeof *chunks);
    double sum;
    (void)state;
    x[0] = 1;
    for (size_t i = 1; i < 4096; i++) {
        x[i * SUMSQ_CHUNK] = 0x1p-13f;
    }
    cpu_layers(DTYPE_FP32, ISA_BASE)
        ->sumsq_fp32(&(struct device){.threads = 2}, &sum, chunks, x, n);
    assert_true(sum == 1 + 4095 * 0x1p-26);
    free(x);
    free(chunks);
}

// ---- which variant runs -------------------------------------------------------------------------

static void test_isa_override(void **state)
{
    static const char *const nonsense[] = {"avx", "AVX2", "avx512 ", "sse", "2", "best"};
    struct device_config config = {
        .kind = "cpu", .threads = 1, .head_size = 4, .max_seq = 8, .padded_vocab = 128};
    struct error err;
    struct device *dev;
    enum isa best, isa;
    (void)state;
    unsetenv("TRAIN_GPT_ISA");
    assert_int_equal(isa_choose(&best, &err), STATUS_OK);
    for (enum isa i = ISA_BASE; i < ISA_COUNT; i++) {
        setenv("TRAIN_GPT_ISA", isa_name(i), 1);
        if (i > best) { // never an illegal instruction
            assert_int_equal(isa_choose(&isa, &err), STATUS_USAGE);
            assert_non_null(strstr(err.text, isa_name(best)));
            assert_int_equal(device_open(&dev, &config, &err), STATUS_USAGE);
            continue;
        }
        for (enum dtype d = DTYPE_FP32; d <= DTYPE_BF16; d++) {
            config.dtype = d;
            assert_int_equal(device_open(&dev, &config, &err), STATUS_OK);
            assert_ptr_equal(dev->layers, cpu_layers(d, i));
            assert_non_null(strstr(dev->summary, isa_name(i)));
            device_close(dev);
        }
    }
    for (size_t i = 0; i < COUNT(nonsense); i++) {
        setenv("TRAIN_GPT_ISA", nonsense[i], 1);
        assert_int_equal(isa_choose(&isa, &err), STATUS_USAGE);
        assert_non_null(strstr(err.text, nonsense[i]));
        assert_int_equal(device_open(&dev, &config, &err), STATUS_USAGE);
    }
    setenv("TRAIN_GPT_ISA", "", 1); // as if it were not set
    assert_int_equal(isa_choose(&isa, &err), STATUS_OK);
    assert_int_equal(isa, best);
    unsetenv("TRAIN_GPT_ISA");

    setenv("TRAIN_GPT_BLAS", "mkl", 1);
    assert_int_equal(device_open(&dev, &config, &err), STATUS_USAGE);
    assert_non_null(strstr(err.text, "TRAIN_GPT_BLAS=mkl"));
    unsetenv("TRAIN_GPT_BLAS");
}

// Each variant is compiled code of its own: an override that changed nothing would go unnoticed.
static void test_variants_differ(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(variants); i++) {
        for (size_t j = 0; j < i && can_run(variants + i); j++) {
            const struct layers *a = cpu_layers(variants[i].dtype, variants[i].isa);
            const struct layers *b = cpu_layers(variants[j].dtype, variants[j].isa);
            assert_true(a->adamw != b->adamw && a->matmul_forward != b->matmul_forward);
        }
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    static const struct {
        const char *name;
        void (*run)(void **state);
    } per_variant[] = {
        {"DeepSpeed #493: 50 steps within 2 ulp of fp64, n = 0..200", test_fp64},
        {"DeepSpeed #735, lightseq #98: odd lengths, canaries", test_odd_lengths},
        {"DeepSpeed #7819: 1 or 7 sub-blocks in any order, same bits", test_sub_blocks},
        {"same bits in every ISA, with 1 to 4 threads, from fp32 gradients", test_same_bits},
        {"DeepSpeed #482 #7905: decay is exact, no decay changes nothing", test_decay},
        {"sum of squares: same bits in every ISA, with 1 to 4 threads", test_sumsq},
    };
    static const struct CMUnitTest once[] = {
        cmocka_unit_test(test_sumsq_in_double),
        {.name = "DeepSpeed #2618 #7556: TRAIN_GPT_ISA and _BLAS are obeyed or refused",
         .test_func = test_isa_override},
        cmocka_unit_test(test_variants_differ),
    };
    enum { EACH = COUNT(per_variant) * COUNT(variants) };
    struct CMUnitTest tests[EACH + COUNT(once)];
    static char names[EACH][96];
    for (size_t i = 0; i < EACH; i++) {
        size_t t = i / COUNT(variants), v = i % COUNT(variants);
        snprintf(names[i], sizeof names[i], "%s, %s", per_variant[t].name, variants[v].name);
        tests[i] = (struct CMUnitTest){.name = names[i],
                                       .test_func = per_variant[t].run,
                                       .initial_state = (void *)(variants + v)};
    }
    memcpy(tests + EACH, once, sizeof once);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
