#include "test/tiny.h"
#include "hete/comm.h"
#include "test/cmocka.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *test_alloc(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);
    assert_non_null(p);
    return p;
}

// ---- random numbers -----------------------------------------------------------------------------

uint64_t rng_bits(uint64_t *rng)
{
    uint64_t x = *rng += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double rng_unit(uint64_t *rng)
{
    return (double)(rng_bits(rng) >> 11) * 0x1p-53;
}

size_t rng_below(uint64_t *rng, size_t n)
{
    return (size_t)(rng_unit(rng) * (double)n);
}

double rng_normal(uint64_t *rng)
{
    double sum = -6;
    for (int i = 0; i < 12; i++) {
        sum += rng_unit(rng);
    }
    return sum;
}

uint64_t test_seed(void)
{
    const char *text = getenv("TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : 1337;
    fprintf(stderr, "TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

// ---- sessions -----------------------------------------------------------------------------------

const struct tiny_kind tiny_kinds[TINY_KINDS] = {
    {"fp32", DTYPE_FP32, 1},
    {"fp32, 3 micro-batches", DTYPE_FP32, 3},
    {"bf16", DTYPE_BF16, 1},
    {"bf16, 3 micro-batches", DTYPE_BF16, 3},
};

const char *test_device(void)
{
    const char *kind = getenv("TEST_DEVICE");
    return kind ? kind : "cpu";
}

static void rank_is_gone(void *ctx, const struct error *err)
{
    (void)ctx;
    fprintf(stderr, "%s\n", err->text);
    _exit(1);
}

struct comm *tiny_ranks(void)
{
    struct comm_config config = {.gone = rank_is_gone, .gpus = strcmp(test_device(), "cuda") == 0};
    struct comm *comm;
    struct error err;
    if (comm_open(&comm, &config, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    return comm;
}

int tiny_ranks_end(struct comm *comm, int failed)
{
    struct error err;
    if (failed) {
        comm_abort(comm, "a case has failed");
    }
    return comm_close(comm, &err) || failed;
}

struct gpt_config tiny_config(const struct tiny_shape *shape)
{
    return (struct gpt_config){.max_seq = shape->max_seq,
                               .vocab = shape->vocab,
                               .layers = shape->layers,
                               .heads = shape->heads,
                               .hidden = shape->hidden,
                               .head_rows = shape->head_rows};
}

void tiny_open(struct tiny *t, const struct tiny_shape *shape)
{
    struct gpt_config config = tiny_config(shape);
    struct device_config device = {.kind = test_device(),
                                   .dtype = shape->dtype,
                                   .threads = shape->threads,
                                   .head_size = gpt_head_size(&config),
                                   .max_seq = shape->max_seq,
                                   .padded_vocab = gpt_padded_vocab(&config)};
    struct device_config plain = device;
    plain.kind = "cpu";
    device.index = shape->comm ? comm_gpu(shape->comm) : 0;
    device.memory = shape->memory;
    device.link = shape->link;
    struct session_config session = {.B = shape->B,
                                     .T = shape->T,
                                     .micro_batches = shape->micro_batches,
                                     .train = !shape->eval,
                                     .plan = shape->plan,
                                     .chaos = shape->chaos,
                                     .comm = shape->comm,
                                     .pinned = shape->pinned,
                                     .watchdog_s = shape->watchdog_s > 0 ? shape->watchdog_s : 60};
    struct error err = {0};
    *t = (struct tiny){.tokens = shape->B * shape->T * shape->micro_batches,
                       .micro_tokens = shape->B * shape->T};
    assert_int_equal(gpt_check(&config, &err), STATUS_OK);
    gpt_open(&t->gpt, &config);
    t->elems = tiny_unit_at(t, t->gpt.model.units);
    if (device_open(&t->dev, &device, &err) ||
        (shape->plan && device_open(&t->host, &plain, &err))) {
        fail_msg("%s", err.text);
    }
    session.host = t->host;
    if (shape->comm) {
        comm_use_device(shape->comm, t->dev);
    }
    t->comm = shape->comm;
    if (session_open(&t->s, t->dev, &t->gpt.model, &session, &err)) {
        fail_msg("%s", err.text);
    }
}

size_t tiny_device_bytes(const struct tiny_shape *shape)
{
    struct gpt gpt;
    struct gpt_config config = tiny_config(shape);
    struct step_shape s;
    struct layout layout;
    struct error err;
    gpt_open(&gpt, &config);
    step_shape(&s, &gpt.model, shape->dtype, shape->B, shape->T, shape->micro_batches, true);
    s.ranks = shape->plan->ranks;
    assert_int_equal(layout_make(&layout, &s, shape->plan, SIZE_MAX, &err), STATUS_OK);
    size_t bytes = layout.total[SPACE_DEVICE];
    layout_free(&layout);
    return bytes;
}

void tiny_close(struct tiny *t)
{
    session_close(t->s);
    if (t->comm) {
        comm_use_device(t->comm, NULL);
    }
    device_close(t->dev);
    if (t->host) {
        device_close(t->host);
    }
}

void tiny_random_plan(struct plan *plan, uint64_t *rng, const struct model *model,
                      const struct tiny_shape *shape, bool hold_updates)
{
    bool any_stream = false, any_shared = shape->micro_batches > 1;
    plan_resident(plan, model, shape->B, shape->T, shape->micro_batches, hold_updates);
    plan->ranks = shape->comm ? (size_t)comm_ranks(shape->comm) : 1;
    for (size_t u = 0; u < model->units; u++) {
        struct unit_plan *p = plan->unit + u;
        p->recompute = u > 0 && rng_below(rng, 2);
        p->stream = u > 0 && rng_below(rng, 3) == 0;
        p->host_optimizer = p->stream || rng_below(rng, 2);
        if (plan->ranks > 1) { // streaming asks for sharding, not for a host optimizer
            p->host_optimizer = rng_below(rng, 2);
            p->shard = p->stream || p->host_optimizer || rng_below(rng, 2);
        }
        any_stream |= p->stream;
        any_shared |= u > 0 && (p->host_optimizer || p->shard);
    }
    snprintf(plan->policy, sizeof plan->policy, "random");
    plan->slots = any_stream ? 1 + rng_below(rng, 4) : 0;
    plan->grad_buffers = any_shared ? 1 + rng_below(rng, 3) : 0;
    plan->slices = 1 + rng_below(rng, 6);
    plan->early_adam = !hold_updates && rng_below(rng, 2);
    plan->fifo = rng_below(rng, 4) == 0;
    plan->barrier = rng_below(rng, 4) == 0;
    plan->serial_copies = rng_below(rng, 4) == 0;
}

size_t tiny_unit_at(const struct tiny *t, size_t unit)
{
    return unit == 0 ? 0 : t->gpt.model.embed.params + (unit - 1) * t->gpt.model.block.params;
}

void tiny_each(const struct tiny *t, tiny_tensor_fn f, void *ctx)
{
    for (size_t u = 0; u < t->gpt.model.units; u++) {
        const struct unit *unit = model_unit(&t->gpt.model, u);
        for (size_t i = 0; i < unit->n_tensors; i++) {
            f(ctx, u, unit->tensors + i, tiny_unit_at(t, u) + unit->tensors[i].offset);
        }
    }
}

const struct tensor *tiny_tensor(const struct tiny *t, size_t unit, const char *name)
{
    const struct unit *u = model_unit(&t->gpt.model, unit);
    for (size_t i = 0; i < u->n_tensors; i++) {
        if (strcmp(u->tensors[i].name, name) == 0) {
            return u->tensors + i;
        }
    }
    fail_msg("no tensor %s in unit %zu", name, unit);
    return NULL;
}

float *tiny_read(const struct tiny *t, enum state state)
{
    float *x = test_alloc(t->elems, sizeof *x);
    for (size_t u = 0; u < t->gpt.model.units; u++) {
        session_read(t->s, state, u, 0, x + tiny_unit_at(t, u),
                     model_unit(&t->gpt.model, u)->params);
    }
    return x;
}

void tiny_write(const struct tiny *t, enum state state, const float *x)
{
    for (size_t u = 0; u < t->gpt.model.units; u++) {
        session_write(t->s, state, u, 0, x + tiny_unit_at(t, u),
                      model_unit(&t->gpt.model, u)->params);
    }
}

struct tiny_state tiny_take(const struct tiny *t)
{
    struct tiny_state s = {.bytes = t->elems * sizeof(float)};
    for (enum state i = STATE_PARAMS; i <= STATE_V; i++) {
        s.state[i] = tiny_read(t, i);
    }
    return s;
}

void tiny_drop(struct tiny_state *s)
{
    for (size_t i = 0; i < 3; i++) {
        free(s->state[i]);
    }
}

bool tiny_same(const struct tiny_state *a, const struct tiny_state *b)
{
    bool equal = a->bytes == b->bytes;
    for (size_t i = 0; i < 3; i++) {
        equal = equal && memcmp(a->state[i], b->state[i], a->bytes) == 0;
    }
    return equal;
}

// Compares arrays of all units tensor by tensor: differences up to `tolerance` of the tensor's
// largest value, or of a hundredth of the largest of all, since some gradients are 0 but for
// rounding.
struct comparison {
    const float *a, *b;
    double tolerance, most;
    const char *what;
};

double tiny_largest(const float *x, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        most = fmax(most, fabs((double)x[i]));
    }
    return most;
}

static void compare_tensor(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    const struct comparison *c = ctx;
    double scale = fmax(tiny_largest(c->b + first, tensor->elems), c->most / 100);
    for (size_t i = first; i < first + tensor->elems; i++) {
        double difference = fabs((double)c->a[i] - (double)c->b[i]);
        if (!(difference <= c->tolerance * scale)) {
            fail_msg("%s: %s of unit %zu, element %zu: %.9g is not %.9g: %.2g of the largest",
                     c->what, tensor->name, unit, i - first, (double)c->a[i], (double)c->b[i],
                     difference / scale);
        }
    }
}

void tiny_expect_close(const struct tiny *t, const char *what, const float *a, const float *b,
                       double tolerance)
{
    struct comparison c = {
        .a = a, .b = b, .tolerance = tolerance, .most = tiny_largest(b, t->elems), .what = what};
    tiny_each(t, compare_tensor, &c);
}

void tiny_expect_near(double a, double b, double relative)
{
    if (!(fabs(a - b) <= relative * fabs(b))) {
        fail_msg("%.12g is not %.12g: %.2g", a, b, fabs(a - b) / fabs(b));
    }
}

void tiny_init(const struct tiny *t, uint64_t seed)
{
    float *x = test_alloc(t->elems, sizeof *x);
    for (size_t u = 0; u < t->gpt.model.units; u++) {
        gpt_init(&t->gpt, seed, u, 0, x + tiny_unit_at(t, u), model_unit(&t->gpt.model, u)->params);
    }
    tiny_write(t, STATE_PARAMS, x);
    free(x);
}

struct scramble {
    const struct tiny *t;
    uint64_t rng;
    float *x;
};

static void scramble_tensor(void *ctx, size_t unit, const struct tensor *tensor, size_t first)
{
    struct scramble *s = ctx;
    (void)unit;
    double weight = 1 / sqrt((double)s->t->gpt.config.hidden);
    for (size_t i = 0; i < tensor->init_elems; i++) {
        double deviation = tensor->init_std > 0 ? weight : 0.1;
        s->x[first + i] = (float)((double)tensor->init_value + deviation * rng_normal(&s->rng));
    }
}

void tiny_scramble(const struct tiny *t, uint64_t seed)
{
    struct scramble s = {.t = t, .rng = seed, .x = test_alloc(t->elems, sizeof(float))};
    tiny_each(t, scramble_tensor, &s);
    tiny_write(t, STATE_PARAMS, s.x);
    free(s.x);
}

float *tiny_gradient(const struct tiny *t, const int32_t *tokens, const int32_t *targets,
                     double *norm)
{
    struct session_update update = {.beta2 = 0.5, .eps = 1};
    struct session_result result;
    float *m = tiny_read(t, STATE_M), *v = tiny_read(t, STATE_V);
    session_step(t->s, tokens, targets, &update, &result);
    float *gradient = tiny_read(t, STATE_M);
    tiny_write(t, STATE_M, m);
    tiny_write(t, STATE_V, v);
    free(m);
    free(v);
    if (norm) {
        *norm = result.norm;
    }
    return gradient;
}

double tiny_loss(const struct tiny *t, const int32_t *tokens, const int32_t *targets)
{
    size_t n = t->micro_tokens;
    float *losses = test_alloc(n, sizeof *losses);
    double sum = 0;
    session_losses(t->s, tokens, targets, losses);
    for (size_t i = 0; i < n; i++) {
        sum += (double)losses[i];
    }
    free(losses);
    return sum / (double)n;
}

int32_t *tiny_batch(uint64_t *rng, size_t n, size_t vocab)
{
    int32_t *batch = test_alloc(2 * n, sizeof *batch);
    for (size_t i = 0; i < n; i++) {
        batch[i] = (int32_t)rng_below(rng, vocab);
        batch[n + i] = rng_below(rng, 9) ? (int32_t)rng_below(rng, vocab) : -1;
    }
    return batch;
}
