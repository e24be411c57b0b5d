// The whole model against PyTorch: logits, loss, every gradient, ten AdamW steps, from the fixture
// of test/make_fixture.py. And what must hold of a step whatever its numbers: the same bits with
// any number of threads, micro-batches that add up, a non-finite norm that changes nothing.
#include "data/checkpoint.h"
#include "hete/session.h"
#include "kernels/bf16.h"
#include "kernels/gpt.h"
#include "test/cmocka.h"
#include "test/scratch.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIXTURES "test/fixtures/"

enum { MAX_STEPS = 10, MAX_TOKENS = 64 };

// ---- the fixture --------------------------------------------------------------------------------

struct reference {
    struct gpt_config shape;
    size_t params;
    float *initial, *bf16; // params: tiny.bin, tiny_bf16.bin widened
    size_t B, T;
    int32_t x[MAX_TOKENS], y[MAX_TOKENS];
    float *logits; // (B,T,V)
    float loss;
    float *grads; // params
    double beta1, beta2, eps, clip, decay;
    struct {
        float lr, loss, norm;
        int32_t x[MAX_TOKENS], y[MAX_TOKENS];
    } step[MAX_STEPS];
    size_t steps;
    float *trained; // params
};

static struct reference ref;

static void take(FILE *f, void *out, size_t bytes)
{
    assert_int_equal(fread(out, 1, bytes, f), bytes);
}

static float *floats(size_t n)
{
    float *p = malloc(n * sizeof *p);
    assert_non_null(p);
    return p;
}

static FILE *open_fixture(const char *path, int32_t magic, int32_t *header)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        fail_msg("%s: missing; test/make_fixture.py writes it", path);
    }
    take(f, header, 256 * sizeof *header);
    assert_int_equal(header[0], magic);
    return f;
}

static void close_fixture(FILE *f)
{
    assert_int_equal(fgetc(f), EOF);
    fclose(f);
}

static int keep_fp32(void *out, void *buf, size_t first, size_t n, struct error *err)
{
    (void)err;
    memcpy((float *)out + first, buf, n * sizeof(float));
    return STATUS_OK;
}

static int keep_bf16(void *out, void *buf, size_t first, size_t n, struct error *err)
{
    (void)err;
    for (size_t i = 0; i < n; i++) {
        ((float *)out)[first + i] = bf16_load(((uint16_t *)buf)[i]);
    }
    return STATUS_OK;
}

static float *read_model(const char *path, int version, struct model_header *h)
{
    struct error err;
    if (model_read_header(path, h, &err)) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(h->version, version);
    float *params = floats(model_elems(h));
    if (model_read(path, h, version == MODEL_FP32 ? keep_fp32 : keep_bf16, params, &err)) {
        fail_msg("%s", err.text);
    }
    return params;
}

static void read_debug_state(void)
{
    int32_t h[256];
    FILE *f = open_fixture(FIXTURES "tiny_debug.bin", 20240327, h);
    ref.B = (size_t)h[2];
    ref.T = (size_t)h[3];
    size_t N = ref.B * ref.T;
    assert_true(N <= MAX_TOKENS);
    ref.logits = floats(N * ref.shape.vocab);
    ref.grads = floats(ref.params);
    take(f, ref.x, N * sizeof *ref.x);
    take(f, ref.y, N * sizeof *ref.y);
    take(f, ref.logits, N * ref.shape.vocab * sizeof(float));
    take(f, &ref.loss, sizeof ref.loss);
    take(f, ref.grads, ref.params * sizeof(float));
    close_fixture(f);
}

static void read_training(void)
{
    int32_t h[256];
    FILE *f = open_fixture(FIXTURES "tiny_train.bin", 20261130, h);
    ref.steps = (size_t)h[4];
    assert_true((size_t)h[2] == ref.B && (size_t)h[3] == ref.T && ref.steps <= MAX_STEPS);
    assert_int_equal(h[5], ref.params);
    take(f, &ref.beta1, 5 * sizeof ref.beta1);
    for (size_t s = 0; s < ref.steps; s++) {
        take(f, &ref.step[s].lr, sizeof(float));
        take(f, ref.step[s].x, ref.B * ref.T * sizeof(int32_t));
        take(f, ref.step[s].y, ref.B * ref.T * sizeof(int32_t));
        take(f, &ref.step[s].loss, sizeof(float));
        take(f, &ref.step[s].norm, sizeof(float));
    }
    ref.trained = floats(ref.params);
    take(f, ref.trained, ref.params * sizeof(float));
    close_fixture(f);
}

static int read_reference(void **state)
{
    (void)state;
    struct model_header h, h5;
    ref.initial = read_model(FIXTURES "tiny.bin", MODEL_FP32, &h);
    ref.bf16 = read_model(FIXTURES "tiny_bf16.bin", MODEL_BF16, &h5);
    ref.shape = (struct gpt_config){.max_seq = h.max_seq,
                                    .vocab = h.vocab,
                                    .layers = h.layers,
                                    .heads = h.heads,
                                    .hidden = h.hidden};
    ref.params = gpt_params(&ref.shape);
    assert_int_equal(ref.params, model_elems(&h));
    read_debug_state();
    read_training();
    return 0;
}

static int free_reference(void **state)
{
    (void)state;
    free(ref.initial);
    free(ref.bf16);
    free(ref.logits);
    free(ref.grads);
    free(ref.trained);
    return 0;
}

// ---- a session over the tiny model --------------------------------------------------------------

struct tiny {
    struct gpt gpt;
    struct device *dev;
    struct session *session;
};

struct setting {
    enum dtype dtype;
    int threads;
    size_t B, micro_batches, head_rows;
    const char *isa; // NULL: the best
};

// Moves all parameters (or moments) between a session and an array in the order of the model file.
static void move(struct tiny *t, enum state state, float *file, bool in)
{
    for (size_t i = 0; i < gpt_spans(&t->gpt); i++) {
        struct gpt_span span = gpt_span(&t->gpt, i);
        size_t n = span.tensor->elems;
        if (in) {
            session_write(t->session, state, span.unit, span.tensor->offset, file, n);
        } else {
            session_read(t->session, state, span.unit, span.tensor->offset, file, n);
        }
        file += n;
    }
}

static float *read_state(struct tiny *t, enum state state)
{
    float *out = floats(ref.params);
    move(t, state, out, false);
    return out;
}

static void open_tiny(struct tiny *t, const struct setting *s)
{
    struct error err;
    struct gpt_config shape = ref.shape;
    setenv("TRAIN_GPT_ISA", s->isa ? s->isa : "", 1);
    shape.head_rows = s->head_rows;
    gpt_open(&t->gpt, &shape);
    struct device_config device = {.kind = "cpu",
                                   .dtype = s->dtype,
                                   .threads = s->threads,
                                   .head_size = gpt_head_size(&shape),
                                   .max_seq = shape.max_seq,
                                   .padded_vocab = gpt_padded_vocab(&shape)};
    struct session_config config = {
        .B = s->B, .T = ref.T, .micro_batches = s->micro_batches, .train = true};
    int status = device_open(&t->dev, &device, &err);
    if (status == STATUS_USAGE && s->isa) {
        fprintf(stderr, "skipped: %s\n", err.text);
        skip();
    }
    if (status || session_open(&t->session, t->dev, &t->gpt.model, &config, &err)) {
        fail_msg("%s", err.text);
    }
    move(t, STATE_PARAMS, ref.initial, true);
}

static void close_tiny(struct tiny *t)
{
    session_close(t->session);
    device_close(t->dev);
}

// The gradient of the mean loss: Adam's first moment when it forgets everything else.
static float *gradient(struct tiny *t, double *loss, double *norm)
{
    struct session_update update = {.lr = 0, .eps = 1e-8};
    struct session_result result;
    session_step(t->session, ref.x, ref.y, &update, &result);
    *loss = result.loss;
    *norm = result.norm;
    return read_state(t, STATE_M);
}

static struct session_result train_step(struct tiny *t, size_t s)
{
    struct session_update update = {.lr = (double)ref.step[s].lr,
                                    .beta1 = ref.beta1,
                                    .beta2 = ref.beta2,
                                    .eps = ref.eps,
                                    .weight_decay = ref.decay,
                                    .clip = ref.clip,
                                    .guard = true,
                                    .step = s};
    struct session_result result;
    session_step(t->session, ref.step[s].x, ref.step[s].y, &update, &result);
    return result;
}

static const struct setting plain = {DTYPE_FP32, 0, 3, 1, 1024, NULL};

// ---- distances ----------------------------------------------------------------------------------

// |got - want| / |want| in the Euclidean norm; infinite if a NaN or a wrong zero is involved.
static double distance(const float *got, const float *want, size_t n)
{
    double diff = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        diff += pow((double)got[i] - (double)want[i], 2);
        size += pow((double)want[i], 2);
    }
    return diff == 0 ? 0 : diff > 0 && size > 0 ? sqrt(diff / size) : INFINITY;
}

// Calls fn for each tensor of each layer with its place in the file.
typedef void span_fn(const char *name, size_t unit, size_t at, size_t n, void *ctx);

static void each_span(const struct gpt *gpt, span_fn *fn, void *ctx)
{
    size_t at = 0;
    for (size_t i = 0; i < gpt_spans(gpt); i++) {
        struct gpt_span s = gpt_span(gpt, i);
        fn(s.tensor->name, s.unit, at, s.tensor->elems, ctx);
        at += s.tensor->elems;
    }
    assert_int_equal(at, ref.params);
}

struct comparison {
    const float *got, *want, *from; // from: what the distance is relative to, if not to 0
    double tolerance, worst;
    const char *worst_name; // of a tensor beyond the tolerance
    size_t worst_unit, beyond;
};

static void compare_piece(const char *name, size_t unit, size_t at, size_t n, struct comparison *c)
{
    float *got = floats(n), *want = floats(n);
    for (size_t i = 0; i < n; i++) {
        got[i] = c->got[at + i] - (c->from ? c->from[at + i] : 0);
        want[i] = c->want[at + i] - (c->from ? c->from[at + i] : 0);
    }
    double d = distance(got, want, n);
    c->beyond += !(d <= c->tolerance);
    if (!(d <= c->worst)) {
        c->worst = d;
        c->worst_name = name;
        c->worst_unit = unit;
    }
    free(got);
    free(want);
}

static void compare_span(const char *name, size_t unit, size_t at, size_t n, void *ctx)
{
    struct comparison *c = ctx;
    if (c->from && strcmp(name, "qkvb") == 0) {
        // A bias of the keys moves all scores of a row alike: its gradient is 0, and after Adam
        // has divided rounding noise by its own size there is nothing left to compare.
        compare_piece(name, unit, at, n / 3, c);
        compare_piece(name, unit, at + 2 * n / 3, n / 3, c);
    } else {
        compare_piece(name, unit, at, n, c);
    }
}

static void expect_close(const struct gpt *gpt, const char *what, struct comparison *c)
{
    each_span(gpt, compare_span, c);
    if (c->beyond) {
        fail_msg("%s: %zu tensors are off; most of all %s of unit %zu, by %.3g of its size", what,
                 c->beyond, c->worst_name, c->worst_unit, c->worst);
    }
}

static void expect_near(const char *what, double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance * fabs(want))) {
        fail_msg("%s is %.9g, not %.9g: off by %.3g", what, got, want, fabs(got / want - 1));
    }
}

// ---- against PyTorch ----------------------------------------------------------------------------

// One token at a time, through the cache of keys and values.
static void test_logits(void **state)
{
    (void)state;
    struct tiny t;
    open_tiny(&t, &plain);
    size_t V = ref.shape.vocab;
    float *logits = floats(session_logits(t.session));
    for (size_t r = 0; r < ref.B * ref.T; r++) {
        session_decode(t.session, ref.x[r], r % ref.T, logits);
        double d = distance(logits, ref.logits + r * V, V);
        if (!(d < 1e-6)) {
            fail_msg("logits of token %zu are off by %.3g of their size", r, d);
        }
    }
    free(logits);
    close_tiny(&t);
}

static void test_losses(void **state)
{
    (void)state;
    struct tiny t;
    open_tiny(&t, &plain);
    float losses[MAX_TOKENS];
    session_losses(t.session, ref.x, ref.y, losses);
    double mean = 0;
    for (size_t r = 0; r < ref.B * ref.T; r++) {
        const float *logits = ref.logits + r * ref.shape.vocab;
        double sum = 0;
        for (size_t v = 0; v < ref.shape.vocab; v++) {
            sum += exp((double)logits[v]);
        }
        expect_near("loss of a token", (double)losses[r], log(sum) - (double)logits[ref.y[r]],
                    1e-6);
        mean += (double)losses[r] / (double)(ref.B * ref.T);
    }
    expect_near("mean loss", mean, (double)ref.loss, 2e-7);
    close_tiny(&t);
}

static void test_gradients(void **state)
{
    struct tiny t;
    open_tiny(&t, *state);
    double loss, norm;
    float *grads = gradient(&t, &loss, &norm);
    expect_near("loss", loss, (double)ref.loss, 2e-7);
    double sum = 0;
    for (size_t i = 0; i < ref.params; i++) {
        sum += (double)ref.grads[i] * (double)ref.grads[i];
    }
    expect_near("norm", norm, sqrt(sum), 5e-7);
    expect_close(&t.gpt, "gradients",
                 &(struct comparison){.got = grads, .want = ref.grads, .tolerance = 2e-6});
    free(grads);
    close_tiny(&t);
}

static void test_ten_steps(void **state)
{
    struct tiny t;
    open_tiny(&t, *state);
    size_t clipped = 0;
    for (size_t s = 0; s < ref.steps; s++) {
        struct session_result r = train_step(&t, s);
        assert_true(r.updated);
        expect_near("loss", r.loss, (double)ref.step[s].loss, 5e-7);
        expect_near("norm", r.norm, (double)ref.step[s].norm, 1e-6);
        clipped += (double)ref.step[s].norm > ref.clip;
    }
    assert_true(clipped > 1 && clipped < ref.steps - 1); // or the fixture is not what it should be
    float *params = read_state(&t, STATE_PARAMS);
    expect_close(&t.gpt, "what ten steps changed",
                 &(struct comparison){
                     .got = params, .want = ref.trained, .from = ref.initial, .tolerance = 2e-5});
    free(params);
    close_tiny(&t);
}

// In 16 bits everything is coarser, but nothing is biased: losses follow those of PyTorch.
static void test_bf16(void **state)
{
    struct tiny t;
    open_tiny(&t, *state);
    double loss, norm;
    float *grads = gradient(&t, &loss, &norm);
    expect_near("loss", loss, (double)ref.loss, 2e-3);
    expect_close(&t.gpt, "gradients",
                 &(struct comparison){.got = grads, .want = ref.grads, .tolerance = 4e-2});
    free(grads);
    close_tiny(&t);
    open_tiny(&t, *state); // without the moments that gradient() leaves behind
    for (size_t s = 0; s < ref.steps; s++) {
        struct session_result r = train_step(&t, s);
        expect_near("loss", r.loss, (double)ref.step[s].loss, 3e-3);
        expect_near("norm", r.norm, (double)ref.step[s].norm, 2e-2);
    }
    close_tiny(&t);
}

static void test_bf16_model_file(void **state)
{
    (void)state;
    for (size_t i = 0; i < ref.params; i++) {
        assert_true(ref.bf16[i] == bf16_load(bf16_round(ref.initial[i])));
    }
}

// ---- wrong references fail ----------------------------------------------------------------------

// How many tensors the comparison of gradients calls wrong.
static size_t beyond(const struct gpt *gpt, const float *got)
{
    struct comparison c = {.got = got, .want = ref.grads, .tolerance = 2e-6};
    each_span(gpt, compare_span, &c);
    return c.beyond;
}

struct spoiled {
    const struct gpt *gpt;
    float *grads;
};

// One element of one tensor is off by a ten-thousandth of it, or is no number at all.
static void spoil(const char *name, size_t unit, size_t at, size_t n, void *ctx)
{
    struct spoiled *s = ctx;
    (void)name;
    (void)unit;
    float *largest = s->grads + at;
    for (size_t i = at; i < at + n; i++) {
        largest = fabsf(s->grads[i]) > fabsf(*largest) ? s->grads + i : largest;
    }
    float before = *largest;
    *largest = before * 1.0001f;
    assert_int_equal(beyond(s->gpt, s->grads), 1);
    *largest = NAN;
    assert_int_equal(beyond(s->gpt, s->grads), 1);
    *largest = before;
}

static void test_wrong_reference(void **state)
{
    (void)state;
    struct gpt gpt;
    gpt_open(&gpt, &ref.shape);
    float *grads = floats(ref.params);
    memcpy(grads, ref.grads, ref.params * sizeof *grads);
    assert_int_equal(beyond(&gpt, grads), 0);
    each_span(&gpt, spoil, &(struct spoiled){&gpt, grads});

    // A gradient where there must be none: the first padded row of the embedding.
    grads[ref.shape.vocab * ref.shape.hidden] = 1e-4f;
    assert_int_equal(beyond(&gpt, grads), 1);
    grads[ref.shape.vocab * ref.shape.hidden] = 0;
    for (size_t i = 0; i < ref.params; i++) {
        grads[i] *= 1.00001f;
    }
    assert_int_equal(beyond(&gpt, grads), gpt_spans(&gpt));
    free(grads);
}

// ---- what must hold of any step -----------------------------------------------------------------

static float *trained_by(const struct setting *s, struct session_result *last)
{
    struct tiny t;
    open_tiny(&t, s);
    for (size_t i = 0; i < ref.steps; i++) {
        *last = train_step(&t, i);
    }
    float *params = read_state(&t, STATE_PARAMS);
    close_tiny(&t);
    return params;
}

static void test_threads_same_bits(void **state)
{
    const struct setting *s = *state;
    struct session_result one, more;
    struct setting setting = *s;
    setting.threads = 1;
    float *expected = trained_by(&setting, &one);
    for (setting.threads = 2; setting.threads <= 3; setting.threads++) {
        float *params = trained_by(&setting, &more);
        assert_memory_equal(params, expected, ref.params * sizeof *params);
        assert_true(one.loss == more.loss && one.norm == more.norm);
        free(params);
    }
    free(expected);
}

// DeepSpeed #8035: one value that is not finite, and the update must not happen: parameters and
// moments keep every bit, and the next step is as if nothing had been.
static void test_nonfinite_changes_nothing(void **state)
{
    struct tiny t;
    open_tiny(&t, *state);
    train_step(&t, 0); // moments that are not zero
    static const enum state states[] = {STATE_PARAMS, STATE_M, STATE_V};
    const size_t unit = 2, element = 133;
    float *before[3], good, bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t b = 0; b < 3; b++) {
        session_read(t.session, STATE_PARAMS, unit, element, &good, 1);
        session_write(t.session, STATE_PARAMS, unit, element, bad + b, 1);
        for (size_t i = 0; i < 3; i++) {
            before[i] = read_state(&t, states[i]);
        }
        struct session_result r = train_step(&t, 1);
        assert_true(!r.updated && !isfinite(r.norm));
        for (size_t i = 0; i < 3; i++) {
            float *after = read_state(&t, states[i]);
            assert_memory_equal(after, before[i], ref.params * sizeof *after);
            free(after);
            free(before[i]);
        }
        char where[128];
        assert_true(session_find_nonfinite(t.session, where, sizeof where));
        assert_string_equal(where, "parameter qkvw of unit 2 (block), element 5");
        session_write(t.session, STATE_PARAMS, unit, element, &good, 1);
    }
    struct session_result last, undisturbed;
    for (size_t s = 1; s < ref.steps; s++) {
        last = train_step(&t, s);
    }
    float *params = read_state(&t, STATE_PARAMS), *expected = trained_by(*state, &undisturbed);
    assert_memory_equal(params, expected, ref.params * sizeof *params);
    assert_true(last.loss == undisturbed.loss);
    free(params);
    free(expected);
    close_tiny(&t);
}

// llm.c #212 #456 #700: sizes beyond 2^31, worked out without allocating them.
static void test_sizes(void **state)
{
    (void)state;
    struct gpt gpt;
    struct gpt_config shape = {.vocab = 50257, .head_rows = 1024};
    struct error err;
    assert_int_equal(gpt_parse(&shape, "d12", &err), STATUS_OK);
    assert_int_equal(gpt_params(&shape), (497904640 - 1024) / 4); // llm.c's gpt2_124M.bin
    assert_int_equal(gpt_parse(&shape, "gpt3:c12288", &err), STATUS_OK);
    size_t B = 64, T = 1024, N = B * T, C = 12288, Vp = 50304, L = 96, NH = 96;
    assert_int_equal(gpt_params(&shape), (Vp + 2048 + 2) * C + L * (12 * C + 13) * C);
    gpt_open(&gpt, &shape);
    struct unit_bytes bytes = gpt.model.bytes(&gpt.model, DTYPE_FP32, B, T);
    assert_int_equal(bytes.boundary, N * C * 4);
    assert_int_equal(bytes.kept, 9 * N * C * 4 + NH * N * 4 + 4 * N * 4);
    assert_true(bytes.work >= 10 * N * C * 4);
    assert_int_equal(gpt.model.block.params, (12 * C + 13) * C);
}

// ---- a block alone ------------------------------------------------------------------------------

static void put(struct device *dev, char *at, const float *x, size_t n)
{
    uint16_t *rounded = malloc(n * sizeof *rounded);
    assert_non_null(rounded);
    for (size_t i = 0; i < n; i++) {
        rounded[i] = bf16_round(x[i]);
    }
    bool wide = dev->dtype == DTYPE_FP32;
    device_poke(dev, at, wide ? (const void *)x : rounded, n * dtype_bytes(dev->dtype));
    free(rounded);
}

// The kept bytes of a block after a call, from memory full of old bytes. y may be NULL: not given.
static char *kept_by(enum call call, struct device *dev, const struct gpt *gpt, char *arena,
                     bool give_y, char *y)
{
    const struct unit *block = &gpt->model.block;
    size_t B = 2, T = 13, params = device_round(block->params * dtype_bytes(dev->dtype));
    struct unit_bytes b = gpt->model.bytes(&gpt->model, dev->dtype, B, T);
    char *x_at = arena + params, *y_at = x_at + b.boundary, *kept_at = y_at + b.boundary;
    device_fill(dev, y_at, 0x3c, b.boundary + b.kept + b.work);
    char *lane = arena + dev->lane_offset;
    struct unit_args a = {.params = lane,
                          .x = lane + params,
                          .y = give_y ? lane + (y_at - arena) : NULL,
                          .kept = lane + (kept_at - arena),
                          .work = lane + (kept_at - arena) + b.kept,
                          .B = B,
                          .T = T};
    block->fn[call](&gpt->model, dev, &a);
    char *kept = malloc(b.kept);
    assert_non_null(kept);
    device_peek(dev, kept, kept_at, b.kept);
    device_peek(dev, y, y_at, b.boundary);
    return kept;
}

static void test_recompute(void **state)
{
    const enum dtype *dtype = *state;
    struct error err;
    struct gpt gpt;
    struct gpt_config shape = {
        .max_seq = 16, .vocab = 99, .layers = 1, .heads = 3, .hidden = 48, .head_rows = 8};
    gpt_open(&gpt, &shape);
    struct device_config config = {.kind = "cpu",
                                   .dtype = *dtype,
                                   .head_size = gpt_head_size(&shape),
                                   .max_seq = shape.max_seq,
                                   .padded_vocab = gpt_padded_vocab(&shape),
                                   .memory = (size_t)8 << 20};
    struct device *dev;
    void *arena;
    setenv("TRAIN_GPT_ISA", "", 1);
    if (device_open(&dev, &config, &err) || device_arena(dev, config.memory, &arena, &err)) {
        fail_msg("%s", err.text);
    }
    struct unit_bytes b = gpt.model.bytes(&gpt.model, *dtype, 2, 13);
    size_t n = gpt.model.block.params, rows = 2 * 13 * shape.hidden;
    float *params = floats(n + rows);
    gpt_init(&gpt, 1, 1, 0, params, n);
    for (size_t i = 0; i < rows; i++) {
        params[n + i] = sinf((float)i) * 3;
    }
    put(dev, arena, params, n);
    put(dev, (char *)arena + device_round(n * dtype_bytes(*dtype)), params + n, rows);

    char *y = malloc(b.boundary), *untouched = malloc(b.boundary), *untouched_kept = malloc(b.kept);
    assert_true(y && untouched && untouched_kept);
    memset(untouched, 0x3c, b.boundary);
    memset(untouched_kept, 0x3c, b.kept);
    char *forward = kept_by(CALL_FORWARD, dev, &gpt, arena, true, y);
    assert_memory_not_equal(y, untouched, b.boundary);
    assert_memory_not_equal(forward, untouched_kept, b.kept);
    for (int give_y = 0; give_y < 2; give_y++) {
        char *again = kept_by(CALL_RECOMPUTE, dev, &gpt, arena, give_y, y);
        assert_memory_equal(again, forward, b.kept);
        assert_memory_equal(y, untouched, b.boundary);
        free(again);
    }
    free(forward);
    free(untouched_kept);
    free(untouched);
    free(y);
    free(params);
    device_close(dev);
}

static void test_work(void **state)
{
    (void)state;
    struct gpt gpt;
    struct gpt_config shape = {.max_seq = 1024,
                               .vocab = 50257,
                               .layers = 12,
                               .heads = 12,
                               .hidden = 768,
                               .head_rows = 256};
    gpt_open(&gpt, &shape);
    size_t B = 3, T = 700;
    double N = (double)(B * T), C = 768, L = 12;
    struct call_work w[CALLS], half;
    for (int c = 0; c < CALLS; c++) {
        w[c] = gpt.model.work(&gpt.model, DTYPE_FP32, c, B, T);
        half = gpt.model.work(&gpt.model, DTYPE_BF16, c, B, T);
        assert_true(half.flops == w[c].flops);
        assert_true(c > CALL_LOSS ? w[c].bytes == 0 && w[c].flops == 0 : w[c].bytes > N * C);
        if (c <= CALL_LOSS && c != CALL_ENCODE_BACKWARD) { // which sums in fp32 anyway
            assert_true(half.bytes * 2 == w[c].bytes);
        }
    }
    // What MFU counts, but without the parameters that are in no matrix product.
    double step = L * (w[CALL_FORWARD].flops + w[CALL_BACKWARD].flops) + w[CALL_HEAD].flops;
    double vectors = (1024 + 2) * C + L * 13 * C;
    expect_near("FLOP of a step", step, N * (gpt_flops_per_token(&shape, T) - 6 * vectors), 1e-12);
    expect_near("FLOP of a recomputation", w[CALL_RECOMPUTE].flops,
                w[CALL_FORWARD].flops - 8 * N * C * C, 1e-12);
    expect_near("FLOP of the loss", w[CALL_LOSS].flops * 3, w[CALL_HEAD].flops, 1e-12);
    assert_true(w[CALL_ENCODE].flops == 0 && w[CALL_ENCODE_BACKWARD].flops == 0);
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    static enum dtype fp32 = DTYPE_FP32, half = DTYPE_BF16;
    static struct setting whole = {DTYPE_FP32, 0, 3, 1, 1024, NULL},
                          chunked = {DTYPE_FP32, 0, 3, 1, 7, NULL},
                          micro = {DTYPE_FP32, 0, 1, 3, 1024, NULL},
                          base = {DTYPE_FP32, 0, 3, 1, 1024, "base"},
                          avx2 = {DTYPE_FP32, 0, 3, 1, 1024, "avx2"},
                          bf16 = {DTYPE_BF16, 0, 3, 1, 7, NULL},
                          bf16_micro = {DTYPE_BF16, 0, 1, 3, 1024, NULL};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_losses),
        {"gradients", test_gradients, NULL, NULL, &whole},
        {"gradients, head in chunks of 7 rows", test_gradients, NULL, NULL, &chunked},
        {"gradients, three micro-batches", test_gradients, NULL, NULL, &micro},
        {"gradients, base ISA", test_gradients, NULL, NULL, &base},
        {"gradients, AVX2", test_gradients, NULL, NULL, &avx2},
        {"ten steps", test_ten_steps, NULL, NULL, &whole},
        {"ten steps, head in chunks of 7 rows", test_ten_steps, NULL, NULL, &chunked},
        {"ten steps, three micro-batches", test_ten_steps, NULL, NULL, &micro},
        {"ten steps, base ISA", test_ten_steps, NULL, NULL, &base},
        {"bf16", test_bf16, NULL, NULL, &bf16},
        {"bf16, three micro-batches", test_bf16, NULL, NULL, &bf16_micro},
        cmocka_unit_test(test_bf16_model_file),
        cmocka_unit_test(test_wrong_reference),
        {"threads: the same bits", test_threads_same_bits, NULL, NULL, &whole},
        {"threads: the same bits, micro-batches", test_threads_same_bits, NULL, NULL, &micro},
        {"threads: the same bits, bf16", test_threads_same_bits, NULL, NULL, &bf16_micro},
        {"non-finite: no update", test_nonfinite_changes_nothing, NULL, NULL, &whole},
        {"non-finite: no update, bf16", test_nonfinite_changes_nothing, NULL, NULL, &bf16_micro},
        cmocka_unit_test(test_sizes),
        {"recomputation keeps what forward does", test_recompute, NULL, NULL, &fp32},
        {"recomputation keeps what forward does, bf16", test_recompute, NULL, NULL, &half},
        cmocka_unit_test(test_work),
    };
    return cmocka_run_group_tests(tests, read_reference, free_reference);
}
