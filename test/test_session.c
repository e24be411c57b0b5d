// Training sessions of tiny GPTs on the cpu device: what must hold of whole steps, whatever the
// model. The optimizer's arithmetic by itself is in test_optimizer.c, single operations are in
// test_ops.c, and what the steps declare to touch is in test_graph.c.
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

// Channels are no multiple of a vector, T none of a tile of attention, the head's chunks are
// uneven.
static const struct tiny_shape usual_shape = {.layers = 2,
                                              .heads = 3,
                                              .hidden = 36,
                                              .vocab = 61,
                                              .max_seq = 75,
                                              .head_rows = 50,
                                              .B = 2,
                                              .T = 70,
                                              .micro_batches = 1,
                                              .threads = 1};

static const struct session_update usual_update = {.lr = 1e-3,
                                                   .beta1 = 0.9,
                                                   .beta2 = 0.95,
                                                   .eps = 1e-8,
                                                   .weight_decay = 0.1,
                                                   .clip = 1,
                                                   .guard = true};

static void open_usual(struct tiny *t, const struct tiny_kind *kind)
{
    struct tiny_shape shape = usual_shape;
    shape.dtype = kind->dtype;
    shape.micro_batches = kind->micro_batches;
    tiny_open(t, &shape);
}

static void step(const struct tiny *t, const int32_t *batch, const struct session_update *update,
                 struct session_result *result)
{
    session_step(t->s, batch, batch + t->tokens, update, result);
}

static bool unchanged(const struct tiny *t, const struct tiny_state *before)
{
    struct tiny_state now = tiny_take(t);
    bool equal = tiny_same(&now, before);
    tiny_drop(&now);
    return equal;
}

// ---- threads ------------------------------------------------------------------------------------

struct run {
    struct session_result result[3];
    struct tiny_state state;
    float losses[2 * 135], logits[128];
};

// T reaches over two tiles of queries and of keys.
static void run_with_threads(struct run *run, int threads, enum dtype dtype)
{
    struct tiny_shape shape = usual_shape;
    struct tiny t;
    uint64_t rng = 7;
    shape.T = 135;
    shape.max_seq = 140;
    shape.micro_batches = 2;
    shape.dtype = dtype;
    shape.threads = threads;
    memset(run, 0, sizeof *run);
    tiny_open(&t, &shape);
    tiny_scramble(&t, 1);
    for (size_t i = 0; i < COUNT(run->result); i++) {
        struct session_update update = usual_update;
        int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
        update.step = i;
        step(&t, batch, &update, run->result + i);
        session_losses(t.s, batch, batch + t.tokens, run->losses);
        free(batch);
    }
    for (size_t pos = 0; pos < 5; pos++) {
        session_decode(t.s, (int32_t)pos, pos, run->logits);
    }
    run->state = tiny_take(&t);
    tiny_close(&t);
}

static void same_with_any_threads(enum dtype dtype)
{
    static struct run one, other;
    run_with_threads(&one, 1, dtype);
    for (int threads = 2; threads <= 4; threads++) {
        run_with_threads(&other, threads, dtype);
        for (size_t i = 0; i < COUNT(one.result); i++) {
            assert_true(one.result[i].updated && other.result[i].updated);
            assert_true(one.result[i].loss == other.result[i].loss);
            assert_true(one.result[i].norm == other.result[i].norm);
        }
        assert_memory_equal(one.losses, other.losses, sizeof one.losses);
        assert_memory_equal(one.logits, other.logits, sizeof one.logits);
        assert_true(tiny_same(&one.state, &other.state));
        tiny_drop(&other.state);
    }
    tiny_drop(&one.state);
}

// With either kind of matrix product.
static void test_threads(void **state)
{
    const struct tiny_kind *kind = *state;
    const char *asked = getenv("TRAIN_GPT_BLAS"), *const blas[] = {"own", "openblas"};
    char before[16];
    snprintf(before, sizeof before, "%s", asked ? asked : "");
    for (size_t i = 0; i < COUNT(blas); i++) {
        setenv("TRAIN_GPT_BLAS", blas[i], 1);
        same_with_any_threads(kind->dtype);
    }
    setenv("TRAIN_GPT_BLAS", before, 1); // empty: not asked for
}

static const char *const launcher[] = {"--launcher", NULL};

// What a program started by `launcher` would run with: threads, cores, warning.
static int launched(void)
{
    struct device_config config = {
        .kind = "cpu", .head_size = 4, .max_seq = 8, .padded_vocab = 128};
    struct device *dev;
    struct error err;
    if (device_open(&dev, &config, &err)) {
        return 1;
    }
    printf("%d %d %s\n", dev->threads,
           !!strstr(dev->summary, dev->threads > 1 ? "threads" : "thread"), dev->warning);
    device_close(dev);
    return 0;
}

// Starts this program anew on the first `cores` allowed cores with OMP_NUM_THREADS as given.
static int launch(int cores, const char *omp_num_threads, char *warning, size_t size)
{
    int pipes[2], threads = 0, said = 0, status;
    assert_int_equal(pipe(pipes), 0);
    pid_t pid = fork();
    if (pid == 0) {
        cpu_set_t allowed, some;
        CPU_ZERO(&some);
        sched_getaffinity(0, sizeof allowed, &allowed);
        for (int c = 0; c < CPU_SETSIZE && CPU_COUNT(&some) < cores; c++) {
            if (CPU_ISSET(c, &allowed)) {
                CPU_SET(c, &some);
            }
        }
        sched_setaffinity(0, sizeof some, &some);
        unsetenv("OMP_NUM_THREADS");
        setenv("TRAIN_GPT_BLAS", "openblas", 1);
        if (omp_num_threads) {
            setenv("OMP_NUM_THREADS", omp_num_threads, 1);
        }
        dup2(pipes[1], STDOUT_FILENO);
        execl("/proc/self/exe", "test_session", launcher[0], (char *)NULL);
        _exit(127);
    }
    close(pipes[1]);
    FILE *out = fdopen(pipes[0], "r");
    char line[1024] = "";
    assert_non_null(fgets(line, sizeof line, out));
    fclose(out);
    int end = 0;
    assert_int_equal(sscanf(line, "%d %d %n", &threads, &said, &end), 2);
    snprintf(warning, size, "%s", line + end);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_true(said);
    return threads;
}

static void test_launcher(void **state)
{
    char warning[1024];
    cpu_set_t allowed;
    (void)state;
    sched_getaffinity(0, sizeof allowed, &allowed);
    int cores = CPU_COUNT(&allowed);
    assert_int_equal(launch(cores, NULL, warning, sizeof warning), cores);
    assert_null(strstr(warning, "only 1 thread"));
    assert_int_equal(launch(1, NULL, warning, sizeof warning), 1); // affinity is no mistake
    assert_null(strstr(warning, "only 1 thread"));
    if (cores < 2) {
        fprintf(stderr, "skipped: one core only, nothing to warn of\n");
        skip();
    }
    assert_int_equal(launch(cores, "1", warning, sizeof warning), 1);
    assert_non_null(strstr(warning, "only 1 thread"));
    assert_non_null(strstr(warning, "OMP_NUM_THREADS=1"));

    scratch_write("libopenblas.so.0", "", 0); // found first, and not a library
    setenv("LD_LIBRARY_PATH", scratch(""), 1);
    assert_int_equal(launch(cores, "1", warning, sizeof warning), 1);
    unsetenv("LD_LIBRARY_PATH");
    assert_non_null(strstr(warning, "only 1 thread")); // one warning does not hide another
    assert_non_null(strstr(warning, "OpenBLAS"));
}

// ---- micro-batches ------------------------------------------------------------------------------

struct trace {
    struct session_result result[2];
    struct tiny_state state[2]; // after each step
};

// Two steps over 6 rows as `k` micro-batches. eps is large, so that an update is proportional to
// its gradient and no rounding turns its sign.
static void run_two_steps(struct trace *trace, size_t k, enum dtype dtype)
{
    struct tiny_shape shape = usual_shape;
    struct tiny t;
    uint64_t rng = 3;
    shape.B = 6 / k;
    shape.micro_batches = k;
    shape.dtype = dtype;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 1);
    for (size_t i = 0; i < 2; i++) {
        struct session_update update = usual_update;
        int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
        update.step = i;
        update.lr = 0.1;
        update.eps = 0.1;
        step(&t, batch, &update, trace->result + i);
        trace->state[i] = tiny_take(&t);
        free(batch);
    }
    tiny_close(&t);
}

static void test_accumulation(void **state)
{
    const struct tiny_kind *kind = *state;
    bool bf16 = kind->dtype == DTYPE_BF16;
    static const size_t splits[] = {2, 3, 6};
    struct trace whole, split;
    struct tiny shape;
    open_usual(&shape, kind);
    run_two_steps(&whole, 1, kind->dtype);
    for (size_t i = 0; i < COUNT(splits); i++) {
        run_two_steps(&split, splits[i], kind->dtype);
        for (size_t s = 0; s < 2; s++) {
            double tolerance = bf16 ? s ? 2e-2 : 6e-3 : 1e-5;
            tiny_expect_near(split.result[s].loss, whole.result[s].loss,
                             bf16 ? s ? 1e-3 : 5e-5 : 1e-6);
            tiny_expect_near(split.result[s].norm, whole.result[s].norm, bf16 ? 2e-3 : 1e-5);
            tiny_expect_close(&shape, s ? "m after step 2" : "m after step 1",
                              split.state[s].state[STATE_M], whole.state[s].state[STATE_M],
                              tolerance);
            tiny_expect_close(&shape, s ? "v after step 2" : "v after step 1",
                              split.state[s].state[STATE_V], whole.state[s].state[STATE_V],
                              2 * tolerance);
            tiny_expect_close(&shape, s ? "p after step 2" : "p after step 1",
                              split.state[s].state[STATE_PARAMS],
                              whole.state[s].state[STATE_PARAMS], tolerance);
            tiny_drop(split.state + s);
        }
    }
    tiny_drop(whole.state);
    tiny_drop(whole.state + 1);
    tiny_close(&shape);
}

// ---- norm and clipping --------------------------------------------------------------------------

static double norm_of(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)x[i];
    }
    return sqrt(sum);
}

// The norm is that of all gradients, and clipping scales each of them by clip/norm: exact in m,
// which after the first step is (1-beta1) times what the optimizer was given.
static void test_clipping(void **state)
{
    const double clips[] = {0, 0.5, 0.999, 1.001, 3}; // of the norm; 0: never
    struct tiny t;
    uint64_t rng = test_seed();
    double norm;
    open_usual(&t, *state);
    for (size_t c = 0; c < COUNT(clips); c++) {
        int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
        tiny_scramble(&t, 1);
        float *g = tiny_gradient(&t, batch, batch + t.tokens, &norm);
        tiny_expect_near(norm, norm_of(g, t.elems), 1e-6);
        float *zero = test_alloc(t.elems, sizeof *zero);
        tiny_write(&t, STATE_M, zero);
        tiny_write(&t, STATE_V, zero);

        struct session_update update = usual_update;
        struct session_result result;
        update.clip = clips[c] * norm;
        step(&t, batch, &update, &result);
        assert_true(result.updated && result.norm == norm); // the norm before clipping
        bool clipped = clips[c] > 0 && clips[c] < 1;
        float scale = clipped ? (float)(update.clip / norm) : 1;
        float *m = tiny_read(&t, STATE_M), *v = tiny_read(&t, STATE_V);
        for (size_t i = 0; i < t.elems; i++) {
            float clipped_g = g[i] * scale;
            assert_true(m[i] == (float)(1 - 0.9) * clipped_g);
            tiny_expect_near((double)v[i], 0.05 * (double)clipped_g * (double)clipped_g, 5e-7);
        }
        tiny_expect_near(norm_of(m, t.elems) / 0.1, clipped ? update.clip : norm, 1e-6);
        free(batch);
        free(zero);
        free(g);
        free(m);
        free(v);
    }
    tiny_close(&t);
}

// ---- one update of each tensor per step ---------------------------------------------------------

struct expected_update {
    struct tiny_state before, after;
    const float *g;
    const struct session_update *update;
    double scale;
};

// AdamW as it is written in the paper, from the recipe in double. 4 ulp for m and v, since the
// recipe's numbers are rounded too, and for p as much of itself and of the change.
static void check_tensor_update(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    const struct expected_update *e = ctx;
    const struct session_update *u = e->update;
    double t = (double)u->step + 1, wd = tensor->decay ? u->weight_decay : 0;
    for (size_t i = first; i < first + tensor->elems; i++) {
        double g = (double)e->g[i] * e->scale;
        double m_old = u->beta1 * (double)e->before.state[STATE_M][i], m_new = (1 - u->beta1) * g;
        double v = u->beta2 * (double)e->before.state[STATE_V][i] + (1 - u->beta2) * g * g;
        double per_m = u->lr / (1 - pow(u->beta1, t)) / (sqrt(v / (1 - pow(u->beta2, t))) + u->eps);
        double p_old = (double)e->before.state[STATE_PARAMS][i];
        double p = p_old * (1 - u->lr * wd) - per_m * (m_old + m_new);
        double size_m = fmax(fabs(m_old), fabs(m_new)), ulp = 0x1p-23;
        double off_m = fabs((double)e->after.state[STATE_M][i] - m_old - m_new);
        double off_v = fabs((double)e->after.state[STATE_V][i] - v);
        double off_p = fabs((double)e->after.state[STATE_PARAMS][i] - p);
        if (!(off_m <= 4 * ulp * size_m + 1e-44 && off_v <= 4 * ulp * v + 1e-44 &&
              off_p <= 2 * ulp * fabs(p_old) + 8 * ulp * per_m * size_m)) {
            fail_msg("step %g: %s of unit %zu, element %zu: p %.9g, not %.9g; m %.9g, not %.9g; v "
                     "%.9g, not %.9g",
                     t, tensor->name, unit, i - first, (double)e->after.state[STATE_PARAMS][i], p,
                     (double)e->after.state[STATE_M][i], m_old + m_new,
                     (double)e->after.state[STATE_V][i], v);
        }
    }
}

// The schedule's rate and the count of the bias corrections reach every tensor of a step, the tied
// embedding is updated once, what must not decay does not.
static void test_updates(void **state)
{
    struct tiny t;
    uint64_t rng = test_seed();
    open_usual(&t, *state);
    tiny_scramble(&t, 1);
    for (uint64_t i = 0; i < 5; i++) {
        struct session_update update = usual_update;
        struct session_result result;
        struct expected_update e = {.update = &update};
        int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
        double norm;
        float *g = tiny_gradient(&t, batch, batch + t.tokens, &norm);
        update.lr = 1e-3 * (double)(1 + i % 3);
        update.step = i;
        update.clip = i % 2 ? norm / 3 : 0;
        e.g = g;
        e.scale = i % 2 ? (double)(float)(update.clip / norm) : 1;
        e.before = tiny_take(&t);
        step(&t, batch, &update, &result);
        assert_true(result.updated);
        e.after = tiny_take(&t);
        tiny_each(&t, check_tensor_update, &e);
        tiny_drop(&e.before);
        tiny_drop(&e.after);
        free(g);
        free(batch);
    }
    tiny_close(&t);
}

struct decay_check {
    struct tiny_state before, after;
    float shrink;
};

static void check_tensor_decay(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    static const char *const decays[] = {"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"};
    const struct decay_check *d = ctx;
    float factor = 1;
    for (size_t i = 0; i < COUNT(decays); i++) {
        factor = strcmp(tensor->name, decays[i]) == 0 ? d->shrink : factor;
    }
    for (size_t i = first; i < first + tensor->elems; i++) {
        float expected = d->before.state[STATE_PARAMS][i] * factor;
        if (memcmp(d->after.state[STATE_PARAMS] + i, &expected, sizeof expected) != 0) {
            fail_msg("%s of unit %zu: %.9g became %.9g, not %.9g", tensor->name, unit,
                     (double)d->before.state[STATE_PARAMS][i],
                     (double)d->after.state[STATE_PARAMS][i], (double)expected);
        }
    }
}

// Without a gradient (all targets ignored) matrices shrink by exactly 1 - lr*wd, and norms and
// biases keep every bit.
static void test_decay(void **state)
{
    struct decay_check d = {.shrink = (float)(1 - 1e-3 * 0.1)};
    struct session_result result;
    struct tiny t;
    uint64_t rng = test_seed();
    open_usual(&t, *state);
    tiny_scramble(&t, 1);
    int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
    memset(batch + t.tokens, 0xff, t.tokens * sizeof *batch);
    d.before = tiny_take(&t);
    step(&t, batch, &usual_update, &result);
    assert_true(result.updated && result.norm == 0 && result.loss == 0);
    d.after = tiny_take(&t);
    tiny_each(&t, check_tensor_decay, &d);
    tiny_drop(&d.before);
    tiny_drop(&d.after);
    free(batch);
    tiny_close(&t);
}

// d loss / d wte[token] by central differences, for tokens that are input and target at once: the
// head's part and the embedding's part are both in the gradient.
static void test_tied_gradient(void **state)
{
    struct tiny_shape shape = usual_shape;
    struct tiny t;
    uint64_t rng = test_seed();
    (void)state;
    shape.vocab = 7; // each token is seen often
    shape.threads = 1;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 1);
    int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
    float *g = tiny_gradient(&t, batch, batch + t.tokens, NULL), p;
    double most = tiny_largest(g, shape.vocab * shape.hidden);
    for (size_t i = 0; i < shape.vocab * shape.hidden; i += 5) {
        double loss[2], h = 4e-3;
        session_read(t.s, STATE_PARAMS, 0, i, &p, 1);
        for (int side = 0; side < 2; side++) {
            float moved = p + (float)(side ? h : -h);
            session_write(t.s, STATE_PARAMS, 0, i, &moved, 1);
            loss[side] = tiny_loss(&t, batch, batch + t.tokens);
        }
        session_write(t.s, STATE_PARAMS, 0, i, &p, 1);
        double slope = (loss[1] - loss[0]) / (2 * h);
        if (!(fabs(slope - (double)g[i]) <= 2e-3 * most)) {
            fail_msg("wte[%zu]: gradient %g, differences give %g", i, (double)g[i], slope);
        }
    }
    free(batch);
    free(g);
    tiny_close(&t);
}

// ---- faults -------------------------------------------------------------------------------------

struct fault {
    size_t unit;
    const char *tensor;
    float value;
};

// A NaN or an infinity in one parameter: the guard holds the update back, nothing changes, and
// once the parameter is repaired the run goes on as if nothing had been.
static void test_guard(void **state)
{
    static const struct fault faults[] = {
        {0, "wte", NAN}, {0, "lnfw", INFINITY},    {1, "qkvw", -INFINITY}, {1, "ln2b", NAN},
        {2, "fcw", NAN}, {2, "fcprojb", INFINITY}, {0, "wpe", NAN},        {0, "lnfb", 3e38f},
    };
    struct tiny t, clean;
    struct session_update update = usual_update;
    struct session_result result, expected;
    uint64_t rng = test_seed();
    open_usual(&t, *state);
    open_usual(&clean, *state);
    tiny_scramble(&t, 1);
    tiny_scramble(&clean, 1);
    for (size_t i = 0; i < COUNT(faults); i++) {
        const struct fault *f = faults + i;
        int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
        size_t at = tiny_tensor(&t, f->unit, f->tensor)->offset;
        float good;
        batch[0] = 0; // the token and the position that the fault is in
        session_read(t.s, STATE_PARAMS, f->unit, at, &good, 1);
        session_write(t.s, STATE_PARAMS, f->unit, at, &f->value, 1);
        struct tiny_state before = tiny_take(&t);
        step(&t, batch, &update, &result);
        assert_false(result.updated);
        assert_false(isfinite(result.norm));
        assert_int_equal(isnan(result.loss), !isfinite(f->value)); // NaN is reported as NaN
        assert_true(unchanged(&t, &before));
        tiny_drop(&before);

        session_write(t.s, STATE_PARAMS, f->unit, at, &good, 1);
        step(&t, batch, &update, &result);
        step(&clean, batch, &update, &expected);
        assert_true(result.updated && expected.updated);
        assert_true(result.loss == expected.loss && result.norm == expected.norm);
        struct tiny_state after = tiny_take(&clean);
        assert_true(unchanged(&t, &after));
        tiny_drop(&after);
        free(batch);
        update.step++;
    }
    tiny_close(&t);
    tiny_close(&clean);
}

// Without the guard the same fault reaches the parameters: the guard is what held it back.
static void test_no_guard(void **state)
{
    struct session_update update = usual_update;
    struct session_result result;
    struct tiny t;
    uint64_t rng = test_seed();
    const float nan = NAN;
    open_usual(&t, *state);
    tiny_scramble(&t, 1);
    int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
    session_write(t.s, STATE_PARAMS, 1, 0, &nan, 1);
    update.guard = false;
    update.clip = 0;
    step(&t, batch, &update, &result);
    assert_true(result.updated && isnan(result.loss) && isnan(result.norm));
    float *p = tiny_read(&t, STATE_PARAMS);
    size_t bad = 0;
    for (size_t i = 0; i < t.elems; i++) {
        bad += isnan(p[i]) != 0;
    }
    assert_true(bad > 100);
    free(p);
    free(batch);
    tiny_close(&t);
}

struct naming {
    const struct tiny *t;
    uint64_t rng;
};

static void name_parameter(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    struct naming *n = ctx;
    size_t e = rng_below(&n->rng, tensor->elems), at = tensor->offset + e;
    float good, bad = rng_below(&n->rng, 2) ? NAN : -INFINITY;
    char found[160] = "untouched", expected[160];
    (void)first;
    session_read(n->t->s, STATE_PARAMS, unit, at, &good, 1);
    session_write(n->t->s, STATE_PARAMS, unit, at, &bad, 1);
    assert_true(session_find_nonfinite(n->t->s, found, sizeof found));
    snprintf(expected, sizeof expected, "parameter %s of unit %zu (%s), element %zu", tensor->name,
             unit, model_unit(&n->t->gpt.model, unit)->name, e);
    assert_string_equal(found, expected);
    session_write(n->t->s, STATE_PARAMS, unit, at, &good, 1);
    assert_false(session_find_nonfinite(n->t->s, found, sizeof found));
}

static void test_names_parameter(void **state)
{
    struct naming n = {.rng = test_seed()};
    struct session_result result;
    struct tiny t;
    open_usual(&t, *state);
    tiny_scramble(&t, 1);
    int32_t *batch = tiny_batch(&n.rng, t.tokens, usual_shape.vocab);
    step(&t, batch, &usual_update, &result);
    n.t = &t;
    tiny_each(&t, name_parameter, &n);
    free(batch);
    tiny_close(&t);
}

// Finite parameters whose sum overflows in the embedding's output; then finite outputs with
// gradients that overflow.
static void test_names_output_and_gradient(void **state)
{
    const float huge = 3e38f;
    struct session_result result;
    struct tiny t;
    uint64_t rng = test_seed();
    char found[160], name[160];
    open_usual(&t, *state);
    tiny_scramble(&t, 1);
    int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
    size_t last = t.tokens - usual_shape.B * usual_shape.T; // of the last micro-batch
    batch[last] = 5;
    session_write(t.s, STATE_PARAMS, 0, 5 * usual_shape.hidden + 3, &huge, 1);
    session_write(t.s, STATE_PARAMS, 0, tiny_tensor(&t, 0, "wpe")->offset + 3, &huge, 1);
    step(&t, batch, &usual_update, &result);
    assert_false(result.updated);
    assert_true(session_find_nonfinite(t.s, found, sizeof found));
    assert_string_equal(found, "output of unit 0 (embedding and head), element 3");

    tiny_scramble(&t, 1);
    size_t at = tiny_tensor(&t, 0, "lnfw")->offset;
    for (size_t i = 0; i < usual_shape.hidden; i++) {
        session_write(t.s, STATE_PARAMS, 0, at + i, &huge, 1);
    }
    step(&t, batch, &usual_update, &result);
    assert_false(result.updated);
    assert_true(session_find_nonfinite(t.s, found, sizeof found));
    int unit;
    assert_int_equal(sscanf(found, "gradient of %159s of unit %d (block)", name, &unit), 2);
    assert_int_equal(unit, 2); // where backward begins
    free(batch);
    tiny_close(&t);
}

struct asked {
    double loss, norm;
    int times;
    bool answer;
};

static bool accept(void *ctx, double loss, double norm)
{
    struct asked *a = ctx;
    a->loss = loss;
    a->norm = norm;
    a->times++;
    return a->answer;
}

// An update that the caller refuses leaves no trace, one that he accepts is the usual one; of one
// that the guard refuses he is not asked.
static void test_accept(void **state)
{
    struct session_update update = usual_update;
    struct session_result result;
    struct asked asked = {0};
    struct tiny t, twin;
    uint64_t rng = test_seed();
    open_usual(&t, *state);
    open_usual(&twin, *state);
    tiny_scramble(&t, 1);
    tiny_scramble(&twin, 1);
    int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
    struct tiny_state before = tiny_take(&t);
    update.accept = accept;
    update.ctx = &asked;
    step(&t, batch, &update, &result);
    assert_false(result.updated);
    assert_int_equal(asked.times, 1);
    assert_true(asked.loss == result.loss && asked.norm == result.norm && result.norm > 0);
    assert_true(unchanged(&t, &before));

    asked.answer = true;
    step(&t, batch, &update, &result);
    assert_true(result.updated);
    step(&twin, batch, &usual_update, &result);
    struct tiny_state after = tiny_take(&twin);
    assert_false(tiny_same(&before, &after));
    assert_true(unchanged(&t, &after));

    const float nan = NAN;
    session_write(t.s, STATE_PARAMS, 1, 0, &nan, 1);
    step(&t, batch, &update, &result);
    assert_false(result.updated);
    assert_int_equal(asked.times, 2);
    tiny_drop(&before);
    tiny_drop(&after);
    free(batch);
    tiny_close(&t);
    tiny_close(&twin);
}

// ---- initial values -----------------------------------------------------------------------------

static float *initial(const struct gpt *gpt, uint64_t seed, size_t unit)
{
    size_t n = model_unit(&gpt->model, unit)->params;
    float *x = test_alloc(n, sizeof *x);
    gpt_init(gpt, seed, unit, 0, x, n);
    return x;
}

static void open_model(struct gpt *gpt)
{
    struct gpt_config config = {
        .max_seq = 33, .vocab = 300, .layers = 8, .heads = 5, .hidden = 85, .head_rows = 64};
    gpt_open(gpt, &config);
}

static void test_init_any_order(void **state)
{
    struct gpt gpt;
    uint64_t rng = test_seed();
    (void)state;
    open_model(&gpt);
    for (size_t unit = 0; unit < 3; unit++) {
        size_t n = model_unit(&gpt.model, unit)->params;
        float *whole = initial(&gpt, 5, unit), *pieces = test_alloc(n, sizeof *pieces);
        memset(pieces, 0xff, n * sizeof *pieces);
        for (size_t end = n; end > 0;) { // from the back, the model's units in turn
            size_t length = 1 + rng_below(&rng, end < 3000 ? end : 3000);
            float other[7];
            gpt_init(&gpt, 5, unit, end - length, pieces + end - length, length);
            gpt_init(&gpt, 6, 2, rng_below(&rng, 100), other, 7);
            end -= length;
        }
        assert_memory_equal(pieces, whole, n * sizeof *whole);
        free(whole);
        free(pieces);
    }
}

// Tensors with random values differ between layers, seeds and each other.
static void test_init_differs(void **state)
{
    struct gpt gpt;
    (void)state;
    open_model(&gpt);
    float *blocks[9];
    for (size_t unit = 1; unit <= 8; unit++) {
        blocks[unit] = initial(&gpt, 5, unit);
    }
    blocks[0] = initial(&gpt, 6, 1); // another seed
    for (size_t t = 0; t < gpt.model.block.n_tensors; t++) {
        const struct tensor *tensor = gpt.model.block.tensors + t;
        for (size_t a = 0; a <= 8 && tensor->init_std > 0; a++) {
            for (size_t b = 0; b < a; b++) {
                size_t equal = 0;
                for (size_t i = tensor->offset; i < tensor->offset + tensor->elems; i++) {
                    equal += blocks[a][i] == blocks[b][i];
                }
                assert_true(equal * 100 < tensor->elems);
            }
        }
    }
    size_t fc = gpt.model.block.tensors[8].offset, qkv = gpt.model.block.tensors[2].offset;
    assert_memory_not_equal(blocks[1] + fc, blocks[1] + qkv, 64);
    for (size_t i = 0; i < 9; i++) {
        free(blocks[i]);
    }
}

// Mean and deviation within 5 standard errors; constants; zeros in padded rows and gaps.
static void test_init_values(void **state)
{
    struct gpt gpt;
    (void)state;
    open_model(&gpt);
    for (size_t unit = 0; unit <= 1; unit++) {
        const struct unit *u = model_unit(&gpt.model, unit);
        float *x = initial(&gpt, 5, unit);
        for (size_t t = 0; t < u->n_tensors; t++) {
            const struct tensor *tensor = u->tensors + t;
            double sum = 0, squares = 0, n = (double)tensor->init_elems;
            size_t end = t + 1 < u->n_tensors ? tensor[1].offset : u->params;
            bool residual =
                strcmp(tensor->name, "attprojw") == 0 || strcmp(tensor->name, "fcprojw") == 0;
            bool norm = strncmp(tensor->name, "ln", 2) == 0;
            bool bias = tensor->name[strlen(tensor->name) - 1] == 'b';
            for (size_t i = 0; i < tensor->init_elems; i++) {
                sum += (double)x[tensor->offset + i];
                squares += pow((double)x[tensor->offset + i], 2);
            }
            for (size_t i = tensor->offset + tensor->init_elems; i < end; i++) {
                assert_true(x[i] == 0);
            }
            if (norm || bias) {
                assert_true(sum == (bias ? 0 : n) && squares == (bias ? 0 : n));
                continue;
            }
            double std = residual ? 0.02 / 4 : 0.02; // 1/sqrt(2*8 layers)
            assert_true(fabs(sum / n) < 5 * std / sqrt(n));
            assert_true(fabs(sqrt(squares / n) / std - 1) < 5 / sqrt(2 * n));
        }
        free(x);
    }
    assert_int_equal(tiny_tensor(&(struct tiny){.gpt = gpt}, 0, "wte")->init_elems, 300 * 85);
}

// ---- padding ------------------------------------------------------------------------------------

struct zeros {
    const float *x;
    size_t end; // of the tensor before, where a gap may begin
    size_t checked;
};

static void check_zeros(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    struct zeros *z = ctx;
    (void)unit;
    for (size_t i = z->end; i < first; i++, z->checked++) {
        assert_true(z->x[i] == 0);
    }
    for (size_t i = first + tensor->init_elems; i < first + tensor->elems; i++, z->checked++) {
        assert_true(z->x[i] == 0);
    }
    z->end = first + tensor->elems;
}

// The rows of tokens that do not exist, and the gaps between tensors, stay 0 through training.
static void test_padding(void **state)
{
    struct session_result result;
    struct tiny t;
    uint64_t rng = test_seed();
    open_usual(&t, *state);
    tiny_init(&t, 1);
    for (uint64_t i = 0; i < 4; i++) {
        struct session_update update = usual_update;
        int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
        update.step = i;
        update.lr = 0.05;
        update.weight_decay = 0.5;
        step(&t, batch, &update, &result);
        assert_true(result.updated);
        free(batch);
    }
    struct tiny_state s = tiny_take(&t);
    for (size_t i = 0; i < COUNT(s.state); i++) {
        struct zeros z = {.x = s.state[i]};
        tiny_each(&t, check_zeros, &z);
        assert_true(z.checked >= (128 - 61) * 36 + 2 * 28);
    }
    tiny_drop(&s);
    tiny_close(&t);
}

// ---- losses -------------------------------------------------------------------------------------

// What a step reports is the mean of what session_losses gives for its micro-batches, bit for bit;
// token by token too; an ignored target counts 0. And looking at losses changes nothing.
static void test_losses(void **state)
{
    const size_t n = usual_shape.B * usual_shape.T;
    struct session_update update = usual_update;
    struct session_result result;
    struct tiny t;
    uint64_t rng = test_seed();
    open_usual(&t, *state);
    tiny_scramble(&t, 1);
    int32_t *batch = tiny_batch(&rng, t.tokens, usual_shape.vocab);
    float *losses = test_alloc(t.tokens, sizeof *losses);
    struct tiny_state before = tiny_take(&t);
    double sum = 0;
    for (size_t i = 0; i < t.tokens; i += n) {
        session_losses(t.s, batch + i, batch + t.tokens + i, losses + i);
    }
    for (size_t i = 0; i < t.tokens; i++) {
        assert_true(batch[t.tokens + i] < 0 ? losses[i] == 0 : losses[i] > 0);
        sum += (double)losses[i];
    }
    assert_true(unchanged(&t, &before));
    update.accept = accept;
    update.ctx = &(struct asked){0};
    step(&t, batch, &update, &result);
    assert_true(result.loss == sum / (double)t.tokens);

    int32_t *one = test_alloc(t.tokens, sizeof *one);
    for (int tries = 0; tries < 20; tries++) {
        size_t i = rng_below(&rng, t.tokens);
        memset(one, 0xff, t.tokens * sizeof *one);
        one[i] = batch[t.tokens + i];
        session_step(t.s, batch, one, &update, &result);
        assert_true(result.loss == (double)losses[i] / (double)t.tokens);
    }
    tiny_drop(&before);
    free(one);
    free(losses);
    free(batch);
    tiny_close(&t);
}

// A row whose targets are all ignored adds nothing to any gradient but counts as tokens.
static void test_ignored_row(void **state)
{
    struct tiny_shape shape = usual_shape;
    struct tiny two, one;
    uint64_t rng = test_seed();
    (void)state;
    tiny_open(&two, &shape);
    shape.B = 1;
    tiny_open(&one, &shape);
    tiny_scramble(&two, 1);
    tiny_scramble(&one, 1);
    int32_t *batch = tiny_batch(&rng, two.tokens, shape.vocab), *targets = batch + two.tokens;
    memset(targets + shape.T, 0xff, shape.T * sizeof *targets);
    float *a = tiny_gradient(&two, batch, targets, NULL);
    float *b = tiny_gradient(&one, batch, targets, NULL);
    for (size_t i = 0; i < one.elems; i++) {
        b[i] /= 2;
    }
    tiny_expect_close(&one, "gradient with an ignored row", a, b, 1e-5);
    free(a);
    free(b);
    free(batch);
    tiny_close(&two);
    tiny_close(&one);
}

// A session without training, whose boundaries share memory, gives the same bits.
static void test_eval_session(void **state)
{
    const struct tiny_kind *kind = *state;
    struct tiny_shape shape = usual_shape;
    struct tiny train, eval;
    uint64_t rng = test_seed();
    shape.layers = 4;
    shape.dtype = kind->dtype;
    tiny_open(&train, &shape);
    shape.eval = true;
    tiny_open(&eval, &shape);
    assert_true(session_arena_bytes(eval.s) < session_arena_bytes(train.s));
    tiny_scramble(&train, 1);
    tiny_scramble(&eval, 1);
    int32_t *batch = tiny_batch(&rng, train.tokens, shape.vocab);
    float a[2 * 70], b[2 * 70], logits_a[128], logits_b[128];
    for (int repeat = 0; repeat < 2; repeat++) {
        session_losses(train.s, batch, batch + train.tokens, a);
        session_losses(eval.s, batch, batch + train.tokens, b);
        assert_memory_equal(a, b, sizeof a);
        for (size_t pos = 0; pos < 9; pos++) {
            session_decode(train.s, batch[pos], pos, logits_a);
            session_decode(eval.s, batch[pos], pos, logits_b);
            assert_memory_equal(logits_a, logits_b, sizeof logits_a);
        }
    }
    char found[100];
    assert_false(session_find_nonfinite(eval.s, found, sizeof found));
    free(batch);
    tiny_close(&train);
    tiny_close(&eval);
}

static double minus_log_softmax(const float *logits, size_t vocab, int32_t target)
{
    double most = -INFINITY, sum = 0;
    for (size_t i = 0; i < vocab; i++) {
        most = fmax(most, (double)logits[i]);
    }
    for (size_t i = 0; i < vocab; i++) {
        sum += exp((double)logits[i] - most);
    }
    return log(sum) + most - (double)logits[target];
}

// Token by token with the key-value cache, at every position: the losses of the whole forward pass.
static void check_decode(const struct tiny *t, size_t B, size_t T, const int32_t *batch,
                         const int32_t *targets, double tolerance)
{
    size_t V = t->gpt.config.vocab, Vp = session_logits(t->s);
    float *losses = test_alloc(B * T, sizeof *losses), *logits = test_alloc(Vp, sizeof *logits);
    session_losses(t->s, batch, targets, losses);
    for (size_t i = 0; i < B * T; i++) {
        session_decode(t->s, batch[i], i % T, logits);
        double loss = targets[i] < 0 ? 0 : minus_log_softmax(logits, V, targets[i]);
        if (!(fabs(loss - (double)losses[i]) <= tolerance)) {
            fail_msg("row %zu, position %zu: loss %g, with the cache %g", i / T, i % T,
                     (double)losses[i], loss);
        }
        for (size_t v = V; v < Vp; v++) {
            assert_true(logits[v] == 0);
        }
    }
    free(losses);
    free(logits);
}

static void test_decode(void **state)
{
    const struct tiny_kind *kind = *state;
    struct tiny_shape shape = usual_shape;
    struct tiny t;
    uint64_t rng = test_seed();
    shape.T = 135;
    shape.max_seq = 135;
    shape.dtype = kind->dtype;
    tiny_open(&t, &shape);
    tiny_scramble(&t, 1);
    assert_int_equal(session_logits(t.s), 128);
    assert_int_equal(session_decode_limit(t.s), 135); // a row
    int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
    check_decode(&t, shape.B, shape.T, batch, batch + t.tokens,
                 kind->dtype == DTYPE_FP32 ? 1e-4 : 0.15);
    free(batch);
    tiny_close(&t);
}

// How the head is cut into chunks changes roundings, nothing else.
static void test_head_rows(void **state)
{
    static const size_t rows[] = {1, 7, 64, 139, 140, 1000};
    struct tiny_shape shape = usual_shape;
    struct tiny t;
    uint64_t rng = test_seed();
    float expected[2 * 70], losses[2 * 70], *expected_g = NULL;
    (void)state;
    int32_t *batch = tiny_batch(&rng, 2 * 70, shape.vocab);
    for (size_t i = 0; i < COUNT(rows); i++) {
        shape.head_rows = rows[i];
        tiny_open(&t, &shape);
        tiny_scramble(&t, 1);
        session_losses(t.s, batch, batch + t.tokens, i ? losses : expected);
        float *g = tiny_gradient(&t, batch, batch + t.tokens, NULL);
        for (size_t j = 0; j < COUNT(losses) && i; j++) {
            assert_true(fabsf(losses[j] - expected[j]) <= 2e-6f * fmaxf(1, expected[j]));
        }
        if (i) {
            tiny_expect_close(&t, "gradient", g, expected_g, 1e-5);
            free(g);
        } else {
            expected_g = g;
        }
        tiny_close(&t);
    }
    free(expected_g);
    free(batch);
}

// ---- state --------------------------------------------------------------------------------------

// A session that is given the state of another one goes on with the same bits; in bf16 that needs
// the fp32 masters.
static void test_state_moves(void **state)
{
    const struct tiny_kind *kind = *state;
    struct session_update update = usual_update;
    struct session_result a, b;
    struct tiny first, second;
    uint64_t rng = test_seed();
    open_usual(&first, kind);
    open_usual(&second, kind);
    tiny_scramble(&first, 1);
    for (uint64_t i = 0; i < 6; i++) {
        int32_t *batch = tiny_batch(&rng, first.tokens, usual_shape.vocab);
        update.step = i;
        step(&first, batch, &update, &a);
        if (i == 2) {
            struct tiny_state s = tiny_take(&first);
            for (enum state k = STATE_PARAMS; k <= STATE_V; k++) {
                tiny_write(&second, k, s.state[k]);
            }
            size_t fine = 0; // masters that no bf16 holds
            for (size_t j = 0; j < first.elems; j++) {
                uint32_t bits;
                memcpy(&bits, s.state[STATE_PARAMS] + j, sizeof bits);
                fine += (bits & 0xffff) != 0;
            }
            assert_true(fine > first.elems / 2);
            tiny_drop(&s);
        } else if (i > 2) {
            step(&second, batch, &update, &b);
            assert_true(a.loss == b.loss && a.norm == b.norm);
        }
        free(batch);
    }
    struct tiny_state s = tiny_take(&first);
    assert_true(unchanged(&second, &s));
    tiny_drop(&s);
    tiny_close(&first);
    tiny_close(&second);
}

// ---- memory -------------------------------------------------------------------------------------

static size_t up(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static size_t most_of(size_t a, size_t b)
{
    return a > b ? a : b;
}

// The table's lines as they follow from the shapes. The order is that of the table.
enum { PARAMETERS = PARAMS, LINES = CATEGORIES };
static const char *const line_names[LINES] = {"parameters",       "fp32 masters", "gradients",
                                              "Adam moments",     "activations",  "workspace",
                                              "tokens and losses"};

static void predict(size_t *bytes, const struct tiny *t, const struct tiny_shape *s)
{
    size_t e = s->dtype == DTYPE_FP32 ? 4 : 2, N = s->B * s->T, row = N * s->hidden * e;
    size_t n0 = t->gpt.model.embed.params, n = t->gpt.model.block.params, L = s->layers;
    size_t Vp = (s->vocab + 127) / 128 * 128, chunk = s->head_rows < N ? s->head_rows : N;
    size_t kept = up(3 * row) + 2 * up(row) + up(4 * row) + up(4 * N * s->heads) + 4 * up(4 * N);
    size_t fp32 = up(4 * n0) + L * up(4 * n), own = up(e * n0) + L * up(e * n);
    size_t block_work = 2 * up(row) + 2 * up(4 * row);
    size_t head_work = up(chunk * Vp * e) + 2 * up(row) + 2 * up(4 * N);
    size_t work = most_of(most_of(block_work, head_work), 16 * up(s->hidden * e));
    bool train = !s->eval, bf16 = s->dtype == DTYPE_BF16;
    memset(bytes, 0, LINES * sizeof *bytes);
    bytes[PARAMETERS] = own;
    bytes[MASTERS] = train && bf16 ? fp32 : 0;
    bytes[MOMENTS] = train ? 2 * fp32 : 0;
    bytes[GRADIENTS] = !train ? 0 : s->micro_batches > 1 ? fp32 + up(e * n0) + up(e * n) : own;
    bytes[GRADIENTS] += train && bf16 ? up(4 * Vp * s->hidden) : 0;
    bytes[ACTIVATIONS] = (train ? L + 2 : 2) * up(row) + L * kept;
    size_t chunks = train ? up(4 * ((most_of(n0, n) + 1023) / 1024)) : 0; // of norms
    bytes[WORKSPACE] = most_of(work, chunks);
    bytes[BATCH] = s->micro_batches * (up(8 * N) + up(4 * N));
}

static void check_table(const struct tiny *t, const struct tiny_shape *shape)
{
    size_t expected[LINES], sum = 0, arena = 0, scratch = 0, size;
    char *text;
    FILE *out = open_memstream(&text, &size);
    session_print_memory(t->s, out);
    fclose(out);
    predict(expected, t, shape);
    bool device = true; // the first table
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        size_t bytes = strlen(line) > 20 ? strtoull(line + 20, NULL, 10) : 0;
        device = device && strncmp(line, "pinned", 6) != 0;
        for (size_t i = 0; device && i < LINES; i++) {
            if (strncmp(line + 2, line_names[i], strlen(line_names[i])) == 0) {
                assert_int_equal(bytes, expected[i]);
                expected[i] = 0; // seen
                sum += bytes;
            }
        }
        arena = device && strncmp(line + 2, "arena", 5) == 0 ? bytes : arena;
        scratch = strncmp(line + 2, "thread scratch", 14) == 0 ? bytes : scratch;
    }
    for (size_t i = 0; i < LINES; i++) {
        assert_int_equal(expected[i], 0);
    }
    assert_int_equal(sum, arena);
    assert_int_equal(arena, session_arena_bytes(t->s));
    assert_int_equal(scratch, t->dev->workspace_bytes);
    free(text);
}

static void test_memory_table(void **state)
{
    (void)state;
    for (size_t i = 0; i < 8; i++) {
        struct tiny_shape shape = usual_shape;
        struct tiny t;
        shape.dtype = i & 1 ? DTYPE_BF16 : DTYPE_FP32;
        shape.micro_batches = i & 2 ? 3 : 1;
        shape.eval = i & 4;
        tiny_open(&t, &shape);
        check_table(&t, &shape);
        void *more;
        struct error err;
        assert_int_equal(device_arena(t.dev, 256, &more, &err), STATUS_FAIL); // sealed
        tiny_close(&t);
    }
}

// Twice the sequence is at most twice the bytes of everything.
static void test_no_t_squared(void **state)
{
    size_t arena[3], scratch[3];
    struct unit_bytes bytes[3];
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct tiny_shape shape = usual_shape;
        struct tiny t;
        shape.B = 1;
        shape.T = shape.max_seq = (size_t)1024 << i;
        tiny_open(&t, &shape);
        bytes[i] = t.gpt.model.bytes(&t.gpt.model, DTYPE_FP32, 1, shape.T);
        arena[i] = session_arena_bytes(t.s);
        scratch[i] = t.dev->workspace_bytes;
        tiny_close(&t);
    }
    for (size_t i = 0; i < 2; i++) {
        assert_true(arena[i + 1] <= 2 * arena[i]);
        assert_true(scratch[i + 1] <= 2 * scratch[i]);
        assert_true(bytes[i + 1].boundary <= 2 * bytes[i].boundary);
        assert_true(bytes[i + 1].kept <= 2 * bytes[i].kept);
        assert_true(bytes[i + 1].work <= 2 * bytes[i].work);
        assert_true(bytes[i + 1].kept > bytes[i].kept);
    }
}

// The largest GPT-2 at 64 rows, in numbers worked out by hand; many of them beyond 2^32.
static void test_sizes(void **state)
{
    struct gpt_config config = {.vocab = 50257, .head_rows = 1024};
    struct gpt gpt;
    struct error err;
    (void)state;
    assert_int_equal(gpt_parse(&config, "d48", &err), STATUS_OK);
    assert_int_equal(gpt_check(&config, &err), STATUS_OK);
    assert_int_equal(gpt_padded_vocab(&config), 50304);
    assert_int_equal(gpt_params(&config), 1557686400);
    gpt_open(&gpt, &config);
    assert_int_equal(gpt.model.embed.params, (50304 + 1024 + 2) * 1600);
    assert_int_equal(gpt.model.block.params, 12 * 1600 * 1600 + 13 * 1600);
    struct unit_bytes b = gpt.model.bytes(&gpt.model, DTYPE_FP32, 64, 1024);
    assert_int_equal(b.boundary, 419430400);
    assert_int_equal(b.kept, 9 * (size_t)419430400 + 29 * (size_t)262144);
    assert_int_equal(b.work, 10 * (size_t)419430400);
    assert_int_equal(b.grads_fp32, 0);
    b = gpt.model.bytes(&gpt.model, DTYPE_BF16, 64, 1024);
    assert_int_equal(b.boundary, 209715200);
    assert_int_equal(b.kept, 9 * (size_t)209715200 + 29 * (size_t)262144);
    assert_int_equal(b.work, 10 * (size_t)209715200);
    assert_int_equal(b.grads_fp32, (size_t)50304 * 1600 * 4);
    config.head_rows = 65536; // all logits at once
    gpt_open(&gpt, &config);
    b = gpt.model.bytes(&gpt.model, DTYPE_FP32, 64, 1024);
    assert_int_equal(b.work,
                     (size_t)65536 * 50304 * 4 + 2 * (size_t)419430400 + 2 * (size_t)262144);
}

static int try_open(struct gpt_config config, struct session_config session, struct error *err)
{
    struct device_config device = {
        .kind = "cpu", .head_size = 64, .max_seq = 8, .padded_vocab = 128};
    struct device *dev;
    struct session *s = NULL;
    struct gpt gpt;
    assert_int_equal(gpt_check(&config, err), STATUS_OK);
    gpt_open(&gpt, &config);
    assert_int_equal(device_open(&dev, &device, err), STATUS_OK);
    int status = session_open(&s, dev, &gpt.model, &session, err);
    if (!status) {
        session_close(s);
    }
    device_close(dev);
    return status;
}

// More than any address space, and sizes whose products pass 2^64: an error with the numbers.
static void test_too_large(void **state)
{
    struct gpt_config config = {.max_seq = (size_t)1 << 20,
                                .vocab = (size_t)1 << 24,
                                .layers = 1000,
                                .heads = 1024,
                                .hidden = 65536,
                                .head_rows = 1024};
    static const struct session_config sessions[] = {
        {.B = 65536, .T = (size_t)1 << 20, .micro_batches = 1, .train = true},
        {.B = (size_t)1 << 32, .T = (size_t)1 << 20, .micro_batches = (size_t)1 << 20},
        {.B = 1, .T = 1, .micro_batches = (size_t)1 << 60, .train = true},
        {.B = (size_t)1 << 40, .T = (size_t)1 << 20, .micro_batches = 16, .train = true},
    };
    struct error err;
    char number[32];
    (void)state;
    const struct session_config large = {
        .B = (size_t)1 << 17, .T = 1024, .micro_batches = 1, .train = true};
    assert_int_equal(try_open(config, large, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "no memory for a device arena of"));
    unsigned long long bytes = strtoull(strstr(err.text, "arena of") + 9, NULL, 10);
    unsigned long long params = 1000ull * 12 * 65536 * 65536, row = 1ull << (27 + 16 + 2);
    assert_true(bytes > 16 * params + 1000 * 10 * row);
    for (size_t i = 0; i < COUNT(sessions); i++) {
        assert_int_equal(try_open(config, sessions[i], &err), STATUS_FAIL);
        snprintf(number, sizeof number, "%zu", sessions[i].B);
        assert_non_null(strstr(err.text, number));
    }
}

// ---- any shape ----------------------------------------------------------------------------------

struct slopes {
    const struct tiny *t;
    const int32_t *tokens, *targets;
    const float *g;
    double most;
};

// The loss along each tensor's gradient must rise by the gradient's length.
static void check_slope(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    const struct slopes *s = ctx;
    size_t n = tensor->elems;
    const float *g = s->g + first;
    double length = norm_of(g, n), loss[2];
    if (length < 5e-3 * s->most) {
        return; // 0 but for rounding, or too small for differences of fp32 losses
    }
    double h = fmin(4e-4 / length, 4e-4);
    float *p = test_alloc(n, sizeof *p), *moved = test_alloc(n, sizeof *moved);
    session_read(s->t->s, STATE_PARAMS, unit, tensor->offset, p, n);
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < n; i++) {
            moved[i] = p[i] + (float)((side ? h : -h) * (double)g[i] / length);
        }
        session_write(s->t->s, STATE_PARAMS, unit, tensor->offset, moved, n);
        loss[side] = tiny_loss(s->t, s->tokens, s->targets);
    }
    session_write(s->t->s, STATE_PARAMS, unit, tensor->offset, p, n);
    double slope = (loss[1] - loss[0]) / (2 * h);
    if (!(fabs(slope - length) <= 0.02 * length + 2e-3 * s->most)) {
        fail_msg("%s of unit %zu: gradient of length %g, along it the loss rises by %g",
                 tensor->name, unit, length, slope);
    }
    free(p);
    free(moved);
}

static struct tiny_shape random_shape(uint64_t *rng, size_t i)
{
    size_t heads = 1 + rng_below(rng, 4), hs = 1 + rng_below(rng, 13);
    struct tiny_shape s = {.layers = 1 + rng_below(rng, 3),
                           .heads = heads,
                           .hidden = heads * hs < 5 ? 5 * heads : heads * hs,
                           .vocab = i == 0 ? 2 : 2 + rng_below(rng, 299),
                           .head_rows = 1 + rng_below(rng, 200),
                           .B = i % 3 == 1 ? 1 : 1 + rng_below(rng, 3),
                           .T = i % 4 == 2 ? 1 : 1 + rng_below(rng, 150),
                           .micro_batches = 1,
                           .threads = 1};
    s.max_seq = s.T + rng_below(rng, 3);
    fprintf(stderr, "L %zu NH %zu C %zu V %zu B %zu T %zu of %zu, head rows %zu\n", s.layers,
            s.heads, s.hidden, s.vocab, s.B, s.T, s.max_seq, s.head_rows);
    return s;
}

// The same rows one at a time must give the gradient of the batch.
static void check_split(const struct tiny_shape *shape, const int32_t *batch, const float *g)
{
    struct tiny_shape rows = *shape;
    struct tiny t;
    rows.micro_batches = rows.B;
    rows.B = 1;
    rows.threads = 2;
    tiny_open(&t, &rows);
    tiny_scramble(&t, 1);
    float *split = tiny_gradient(&t, batch, batch + t.tokens, NULL);
    tiny_expect_close(&t, "gradient of single rows", split, g, 5e-5);
    free(split);
    tiny_close(&t);
}

static void test_random_shapes(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (size_t i = 0; i < 16; i++) {
        struct tiny_shape shape = random_shape(&rng, i);
        struct tiny t;
        tiny_open(&t, &shape);
        tiny_scramble(&t, 1);
        int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab), *targets = batch + t.tokens;
        targets[0] = 1; // not all ignored
        float *g = tiny_gradient(&t, batch, targets, NULL);
        struct slopes slopes = {
            .t = &t, .tokens = batch, .targets = targets, .g = g, .most = norm_of(g, t.elems)};
        tiny_each(&t, check_slope, &slopes);
        check_decode(&t, shape.B, shape.T, batch, targets, 1e-4);
        check_split(&shape, batch, g);
        free(g);
        free(batch);
        tiny_close(&t);
    }
}

// -------------------------------------------------------------------------------------------------

#define ONCE(title, function)                                                                      \
    {                                                                                              \
        .name = (title), .test_func = (function)                                                   \
    }

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], launcher[0]) == 0) {
        return launched();
    }
    test_threads_sleep(argv);
    static const struct {
        const char *name;
        void (*run)(void **state);
        bool once_per_dtype;
    } per_kind[] = {
        {"same bits with 1 to 4 threads", test_threads, true},
        {"llm.c #318 #412, DeepSpeed #6550 #7967 #7981: k micro-batches are one batch",
         test_accumulation, true},
        {"pytorch #148532, torchtitan #990: norm of all gradients, exact clipping", test_clipping,
         false},
        {"DeepSpeed #493, entrenar #314: one AdamW of every tensor per step", test_updates, false},
        {"DeepSpeed #482 #7905: matrices decay, exactly; norms and biases do not", test_decay,
         false},
        {"DeepSpeed #8035: a non-finite norm changes no byte", test_guard, false},
        {"without the guard a NaN spreads", test_no_guard, false},
        {"llm.c #19: the tensor that holds a NaN is named", test_names_parameter, false},
        {"llm.c #19: an output or gradient that overflows is named", test_names_output_and_gradient,
         false},
        {"a refused update changes no byte", test_accept, false},
        {"padded rows and gaps stay 0", test_padding, false},
        {"session_losses and the step's loss agree in every bit", test_losses, false},
        {"a session without training gives the same bits", test_eval_session, true},
        {"decoding with the cache gives the losses of the whole pass", test_decode, true},
        {"OpenTau #185, llm.c #522: state moved to a new session, same bits", test_state_moves,
         false},
    };
    static const struct CMUnitTest once[] = {
        {.name = "Megatron #188, prime-rl #3248: affinity obeyed, one thread warned of",
         .test_func = test_launcher,
         .setup_func = scratch_make,
         .teardown_func = scratch_remove},
        ONCE("entrenar #314: tied embedding against central differences", test_tied_gradient),
        ONCE("torchtitan #3106: initial values in any order of any ranges", test_init_any_order),
        ONCE("torchtitan #3106: layers start from different values", test_init_differs),
        ONCE("initial values have GPT-2's deviations", test_init_values),
        ONCE("a row of ignored targets adds no gradient", test_ignored_row),
        ONCE("losses do not depend on --head-rows but for rounding", test_head_rows),
        ONCE("DeepSpeed #5102: the memory table is what the shapes say", test_memory_table),
        ONCE("nothing grows with T*T", test_no_t_squared),
        ONCE("llm.c #212 #456 #700: sizes beyond 32 bits", test_sizes),
        ONCE("llama.cpp #27648: too large is an error with the numbers", test_too_large),
        ONCE("random shapes: gradients, decoding, single rows", test_random_shapes),
    };
    struct CMUnitTest tests[COUNT(per_kind) * TINY_KINDS + COUNT(once)];
    static char names[COUNT(tests)][128];
    size_t n = 0;
    for (size_t i = 0; i < COUNT(per_kind) * TINY_KINDS; i++) {
        size_t t = i / TINY_KINDS, k = i % TINY_KINDS;
        if (per_kind[t].once_per_dtype && tiny_kinds[k].micro_batches > 1) {
            continue;
        }
        snprintf(names[n], sizeof names[n], "%s, %s", per_kind[t].name, tiny_kinds[k].name);
        tests[n] = (struct CMUnitTest){.name = names[n],
                                       .test_func = per_kind[t].run,
                                       .initial_state = (void *)(tiny_kinds + k)};
        n++;
    }
    memcpy(tests + n, once, sizeof once);
    n += COUNT(once);
    return _cmocka_run_group_tests("session", tests, n, NULL, NULL);
}
