// Sessions whose plans keep parameters, gradients or optimizers on the host, against those that do
// not: the faults that trainers of this kind have had. That random plans give the same bits is in
// test_contract.c, that operations touch what they declare in test_graph.c.
#include "hete/inside.h"

#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const struct tiny_shape usual_shape = {.layers = 3,
                                              .heads = 2,
                                              .hidden = 24,
                                              .vocab = 61,
                                              .max_seq = 20,
                                              .head_rows = 13,
                                              .B = 2,
                                              .T = 20,
                                              .micro_batches = 1,
                                              .threads = 1};

static struct tiny_shape shape_of(const struct tiny_kind *kind)
{
    struct tiny_shape shape = usual_shape;
    shape.dtype = kind->dtype;
    shape.micro_batches = kind->micro_batches;
    return shape;
}

// ---- plans --------------------------------------------------------------------------------------

enum { RESIDENT, HOST_ADAM, STREAMED, MIXED, NO_BLOCKS, PLANS };

static void decide(struct plan *p, size_t which)
{
    for (size_t u = 0; u < p->units; u++) {
        p->unit[u] = which == HOST_ADAM  ? (struct unit_plan){.host_optimizer = true}
                     : which == STREAMED ? (struct unit_plan){u > 0, u > 0, true, false}
                     : which != MIXED    ? (struct unit_plan){.host_optimizer = u == 0}
                     : u == 1            ? (struct unit_plan){false, true, true, false}
                     : u == 2            ? (struct unit_plan){true, false, true, false}
                                         : (struct unit_plan){.recompute = u > 0};
    }
}

static void make_plan(struct plan *p, size_t which, const struct tiny_shape *shape)
{
    struct gpt_config config = tiny_config(shape);
    struct gpt gpt;
    gpt_open(&gpt, &config);
    plan_resident(p, &gpt.model, shape->B, shape->T, shape->micro_batches, true);
    if (which != RESIDENT) {
        decide(p, which);
        p->slots = which == STREAMED ? 2 : which == MIXED;
        p->grad_buffers = which == NO_BLOCKS && shape->micro_batches == 1 ? 0 : 2;
        p->slices = 2 + which;
    }
}

// A session under a plan, on a device of exactly the memory that it needs.
static void open_planned(struct tiny *t, const struct tiny_shape *shape, const struct plan *plan)
{
    struct tiny_shape planned = *shape;
    planned.plan = plan;
    planned.memory = tiny_device_bytes(&planned);
    tiny_open(t, &planned);
    tiny_scramble(t, 1);
}

static void open_case(struct tiny *t, const struct tiny_shape *shape, size_t which)
{
    struct plan plan;
    make_plan(&plan, which, shape);
    open_planned(t, shape, &plan);
}

static void open_plain(struct tiny *t, const struct tiny_shape *shape)
{
    tiny_open(t, shape);
    tiny_scramble(t, 1);
}

// ---- steps --------------------------------------------------------------------------------------

static struct session_update update_of(uint64_t step)
{
    return (struct session_update){.lr = 1e-3 * (double)(step + 1),
                                   .beta1 = 0.9,
                                   .beta2 = 0.95,
                                   .eps = 1e-8,
                                   .weight_decay = 0.1,
                                   .clip = 0.5,
                                   .guard = true,
                                   .step = step};
}

static void check(const struct tiny *t)
{
    if (session_error(t->s)->status) {
        fail_msg("%s", session_error(t->s)->text);
    }
}

// Step number `step` on data of that number.
static struct session_result step(const struct tiny *t, uint64_t step)
{
    struct session_update update = update_of(step);
    struct session_result result;
    uint64_t rng = 100 + step;
    int32_t *batch = tiny_batch(&rng, t->tokens, usual_shape.vocab);
    session_step(t->s, batch, batch + t->tokens, &update, &result);
    free(batch);
    check(t);
    return result;
}

static void expect_same_result(const struct session_result *a, const struct session_result *b)
{
    assert_memory_equal(&a->loss, &b->loss, sizeof a->loss);
    assert_memory_equal(&a->norm, &b->norm, sizeof a->norm);
    assert_int_equal(a->updated, b->updated);
}

static void expect_same_state(const struct tiny *a, const struct tiny *b)
{
    struct tiny_state x = tiny_take(a), y = tiny_take(b);
    assert_true(tiny_same(&x, &y));
    tiny_drop(&x);
    tiny_drop(&y);
}

// ---- micro-batches, norm, clipping --------------------------------------------------------------

// As `wide`, the same rows in one micro-batch; eps is large, so that an update is proportional to
// its gradient and no rounding turns its sign.
static void step_gently(const struct tiny *t, uint64_t step, struct session_result *result)
{
    struct session_update update = update_of(step);
    uint64_t rng = 100 + step;
    int32_t *batch = tiny_batch(&rng, t->tokens, usual_shape.vocab);
    update.lr = update.eps = 0.1;
    session_step(t->s, batch, batch + t->tokens, &update, result);
    free(batch);
    check(t);
}

// Under every plan, steps 1 and 2: three micro-batches are one batch of all rows, within rounding;
// and are what they are without offloading, in every bit.
static void test_accumulation(void **state)
{
    const struct tiny_kind *kind = *state;
    bool bf16 = kind->dtype == DTYPE_BF16;
    struct tiny_shape shape = shape_of(kind), wide = shape;
    shape.micro_batches = 3;
    wide.B = 3 * shape.B;
    wide.micro_batches = 1;
    for (size_t which = 0; which < PLANS; which++) {
        struct tiny split, plain, one;
        open_case(&split, &shape, which);
        open_plain(&plain, &shape);
        open_case(&one, &wide, which);
        for (uint64_t s = 0; s < 2; s++) {
            struct session_result a, b, c;
            step_gently(&split, s, &a);
            step_gently(&plain, s, &b);
            step_gently(&one, s, &c);
            expect_same_result(&a, &b);
            expect_same_state(&split, &plain);
            tiny_expect_near(a.loss, c.loss, bf16 ? s ? 2e-3 : 1e-4 : 1e-6);
            tiny_expect_near(a.norm, c.norm, bf16 ? 5e-3 : 1e-5);
            struct tiny_state x = tiny_take(&split), y = tiny_take(&one);
            for (size_t i = 0; i < 3; i++) {
                tiny_expect_close(&split, "three micro-batches", x.state[i], y.state[i],
                                  bf16 ? s ? 5e-2 : 2e-2 : 2e-5);
            }
            tiny_drop(&x);
            tiny_drop(&y);
        }
        tiny_close(&split);
        tiny_close(&plain);
        tiny_close(&one);
    }
}

// The norm is the same wherever gradients are, and clipping scales every gradient by clip/norm:
// exact in m, which after the first step is (1-beta1) times what the optimizer was given.
static void test_clipping(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    struct tiny plain;
    uint64_t rng = 100;
    double norm;
    open_plain(&plain, &shape);
    int32_t *batch = tiny_batch(&rng, plain.tokens, shape.vocab);
    float *g = tiny_gradient(&plain, batch, batch + plain.tokens, &norm);
    assert_true(norm > 0.5); // more than step() clips to
    float scale = (float)(0.5 / norm);
    for (size_t which = 0; which < PLANS; which++) {
        struct tiny t;
        open_case(&t, &shape, which);
        struct session_result result = step(&t, 0);
        assert_memory_equal(&result.norm, &norm, sizeof norm);
        float *m = tiny_read(&t, STATE_M);
        for (size_t i = 0; i < t.elems; i++) {
            assert_true(m[i] == (float)(1 - 0.9) * (g[i] * scale));
        }
        free(m);
        tiny_close(&t);
    }
    free(g);
    free(batch);
    tiny_close(&plain);
}

// Every update with the same bias corrections, into however many slices its work is cut.
static void test_slices(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    static const size_t slices[] = {1, 2, 3, 7, PLAN_SLICES_MAX};
    struct tiny plain;
    open_plain(&plain, &shape);
    for (uint64_t s = 0; s < 3; s++) {
        step(&plain, s);
    }
    for (size_t i = 0; i < COUNT(slices); i++) {
        struct plan plan;
        struct tiny t;
        make_plan(&plan, MIXED, &shape);
        plan.slices = slices[i];
        open_planned(&t, &shape, &plan);
        for (uint64_t s = 0; s < 3; s++) {
            step(&t, s);
        }
        expect_same_state(&t, &plain);
        tiny_close(&t);
    }
    tiny_close(&plain);
}

// ---- which version is where ---------------------------------------------------------------------

// Every slice that the host has of a unit has been updated as often as there were updates since
// `base`, and no place on the device holds a newer one.
static void expect_versions(const struct tiny *t, const struct stamp *base, uint64_t updates)
{
    const struct session *s = t->s;
    for (size_t u = 0; u < s->model->units; u++) {
        size_t first;
        for (size_t i = 0; on_host(s, u) && step_slice(&s->shape, &s->plan, u, i, &first); i++) {
            assert_int_equal(s->newest[u].version[i], base[u].version[i] + updates);
            assert_true(s->here[u].version[i] <= s->newest[u].version[i]);
        }
    }
    for (size_t slot = 0; slot < s->plan.slots; slot++) {
        const struct stamp *held = s->slot + slot;
        assert_in_range(held->unit, 1, s->model->units - 1);
        // Filled in this step, before its update; what it held the step before was one older.
        assert_int_equal(held->version[0], base[held->unit].version[0] + updates - 1);
    }
}

static void test_versions(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    for (size_t which = HOST_ADAM; which < PLANS; which++) {
        struct stamp base[8];
        struct tiny t;
        open_case(&t, &shape, which);
        memcpy(base, t.s->newest, t.s->model->units * sizeof *base);
        for (uint64_t s = 0; s < 4; s++) {
            assert_true(step(&t, s).updated);
            expect_versions(&t, base, s + 1);
        }
        tiny_close(&t);
    }
}

// A forward pass on parameters of the step before does not get past its stamp.
static void test_old_version(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    for (int old = 0; old < 2; old++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            struct tiny t;
            struct error err;
            freopen("/dev/null", "w", stderr);
            open_case(&t, &shape, STREAMED);
            struct session *s = t.s;
            s->loaded = &s->loss;
            for (const struct op *op = s->loss.ops; op->kind != CALL_HEAD; op++) {
                if (op->kind == CALL_FORWARD) {
                    s->slot[access_of(&s->loss, op, BUF_SLOT)->index].version[1] -= (uint64_t)old;
                    run_op(s, op, 0, &err);
                    _exit(0);
                }
                run_op(s, op, 0, &err);
            }
            _exit(1);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(old ? WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT
                        : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

// ---- faults -------------------------------------------------------------------------------------

// Bytes of a unit's parameters where the device computes with them, and of the host's copy.
static void device_params(const struct tiny *t, size_t u, char *out)
{
    device_peek(t->dev, out, at(t->s, BUF_PARAMS, u), unit_elems(t->s, u) * elem_bytes(t->s));
}

// A parameter that is not finite, wherever it and its optimizer are: no byte of the state changes,
// on host or device, the tensor is named, and the next step is as if nothing had been.
static void test_guard(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    static const float faults[] = {NAN, INFINITY, NAN, -INFINITY};
    for (size_t which = 0; which < PLANS; which++) {
        struct tiny t, clean;
        open_case(&t, &shape, which);
        open_plain(&clean, &shape);
        for (uint64_t s = 0; s < COUNT(faults); s++) {
            size_t u = (size_t)s % t.s->model->units, n = unit_elems(t.s, u) * elem_bytes(t.s);
            const struct tensor *tensor = tiny_tensor(&t, u, u ? "fcw" : "wte");
            char found[160], expected[160], *before = test_alloc(n, 1), *after = test_alloc(n, 1);
            float good;
            bool here = !t.s->plan.unit[u].stream && !on_host(t.s, u);
            session_read(t.s, STATE_PARAMS, u, tensor->offset + 3, &good, 1);
            session_write(t.s, STATE_PARAMS, u, tensor->offset + 3, faults + s, 1);
            struct tiny_state was = tiny_take(&t);
            if (here) {
                device_params(&t, u, before);
            }
            struct session_result result = step(&t, s);
            assert_false(result.updated);
            assert_false(isfinite(result.norm));
            struct tiny_state is = tiny_take(&t);
            assert_true(tiny_same(&was, &is));
            if (here) {
                device_params(&t, u, after);
                assert_memory_equal(before, after, n);
            }
            assert_true(session_find_nonfinite(t.s, found, sizeof found));
            snprintf(expected, sizeof expected, "parameter %s of unit %zu (%s), element 3",
                     tensor->name, u, model_unit(t.s->model, u)->name);
            assert_string_equal(found, expected);

            session_write(t.s, STATE_PARAMS, u, tensor->offset + 3, &good, 1);
            struct session_result a = step(&t, s), b = step(&clean, s);
            assert_true(a.updated);
            expect_same_result(&a, &b);
            expect_same_state(&t, &clean);
            tiny_drop(&was);
            tiny_drop(&is);
            free(before);
            free(after);
        }
        tiny_close(&t);
        tiny_close(&clean);
    }
}

// Two steps in flight when the first one finds a gradient that overflows: neither updates, and the
// second one leaves alone what the first one has left to be looked at.
static void test_guard_in_flight(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    const float huge = 3e38f;
    for (size_t which = 0; which < PLANS; which++) {
        struct tiny t;
        uint64_t rng = test_seed();
        char found[160], name[160];
        int unit;
        open_case(&t, &shape, which);
        size_t at = tiny_tensor(&t, 0, "lnfw")->offset;
        for (size_t i = 0; i < shape.hidden; i++) {
            session_write(t.s, STATE_PARAMS, 0, at + i, &huge, 1);
        }
        struct tiny_state was = tiny_take(&t);
        struct session_update update = update_of(0);
        struct session_result result;
        int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
        session_start(t.s, batch, batch + t.tokens, &update);
        session_start(t.s, batch, batch + t.tokens, &update);
        session_finish(t.s, &result);
        assert_false(result.updated);
        assert_true(session_find_nonfinite(t.s, found, sizeof found));
        if (sscanf(found, "gradient of %159s of unit %d (block)", name, &unit) != 2) {
            assert_int_equal(sscanf(found, "gradient of unit %d (block)", &unit), 1);
        }
        assert_int_equal(unit, shape.layers); // where backward begins
        session_finish(t.s, &result);
        assert_false(result.updated);
        struct tiny_state is = tiny_take(&t);
        assert_true(tiny_same(&was, &is));
        check(&t);
        tiny_drop(&was);
        tiny_drop(&is);
        free(batch);
        tiny_close(&t);
    }
}

// ---- memory -------------------------------------------------------------------------------------

// Losses of a validation and logits after some tokens.
static void look(const struct tiny *t, float *losses, float *logits)
{
    uint64_t rng = 7;
    size_t n = usual_shape.B * usual_shape.T;
    int32_t *batch = tiny_batch(&rng, n, usual_shape.vocab);
    session_losses(t->s, batch, batch + n, losses);
    for (size_t i = 0; i < session_decode_limit(t->s); i++) {
        session_decode(t->s, batch[i], i, logits);
    }
    free(batch);
    check(t);
}

// With pinned memory for all of it no copy is pageable. With too little the rest lies in pageable
// memory, its copies are counted, and the bits are the same.
static void test_pinned(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    struct tiny plain;
    open_plain(&plain, &shape);
    for (uint64_t s = 0; s < 2; s++) {
        step(&plain, s);
    }
    for (size_t which = HOST_ADAM; which < PLANS; which++) {
        size_t pinned = 0, all = 0;
        for (size_t share = 0; share < 4; share++) { // of what would be needed: all, 2/3, 1/3, 0
            float losses[2 * 20], logits[128];
            struct plan plan;
            struct tiny t;
            make_plan(&plan, which, &shape);
            struct tiny_shape planned = shape;
            planned.plan = &plan;
            planned.memory = tiny_device_bytes(&planned);
            planned.pinned = share ? 1 + (3 - share) * pinned / 3 : 0;
            tiny_open(&t, &planned);
            tiny_scramble(&t, 1);
            const size_t *total = t.s->layout.total;
            pinned = share ? pinned : total[SPACE_PINNED];
            all = share ? all : total[SPACE_PINNED] + total[SPACE_HOST];
            assert_true(share == 0 || total[SPACE_PINNED] <= planned.pinned);
            assert_int_equal(total[SPACE_PINNED] + total[SPACE_HOST], all);
            for (uint64_t s = 0; s < 2; s++) {
                step(&t, s);
            }
            look(&t, losses, logits);
            assert_int_equal(device_pageable_copies(t.dev) > 0, share > 0);
            expect_same_state(&t, &plain);
            tiny_close(&t);
        }
    }
    tiny_close(&plain);
}

// A device that is smaller than the parameters of the model: start-up, training, validation and
// decoding fit into exactly the bytes that the plan says, and not into one less.
static void test_cap(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    float losses[2 * 20], logits[128];
    struct plan plan;
    struct tiny t;
    shape.layers = 24;
    make_plan(&plan, STREAMED, &shape);
    shape.plan = &plan;
    shape.memory = tiny_device_bytes(&shape);
    tiny_open(&t, &shape);
    assert_true(shape.memory < t.elems * dtype_bytes(shape.dtype));
    assert_int_equal(session_arena_bytes(t.s), shape.memory);
    tiny_init(&t, 1);
    for (uint64_t s = 0; s < 2; s++) {
        step(&t, s);
    }
    look(&t, losses, logits);

    struct gpt gpt;
    struct device *small;
    struct session *s;
    struct error err = {0};
    struct gpt_config config = tiny_config(&shape);
    struct device_config device = {.kind = "cpu",
                                   .dtype = shape.dtype,
                                   .threads = 1,
                                   .head_size = gpt_head_size(&config),
                                   .max_seq = shape.max_seq,
                                   .padded_vocab = gpt_padded_vocab(&config),
                                   .memory = shape.memory - 1};
    struct session_config session = {.B = shape.B,
                                     .T = shape.T,
                                     .micro_batches = shape.micro_batches,
                                     .train = true,
                                     .plan = &plan,
                                     .host = t.host};
    char needed[32];
    gpt_open(&gpt, &config);
    assert_int_equal(device_open(&small, &device, &err), STATUS_OK);
    assert_int_equal(session_open(&s, small, &gpt.model, &session, &err), STATUS_FAIL);
    snprintf(needed, sizeof needed, "%zu", shape.memory);
    assert_non_null(strstr(err.text, needed));
    device_close(small);
    tiny_close(&t);
}

// Not a number that arithmetic gives; so small that a norm does not feel it in gaps of gradients.
#define UNTOUCHED 0xa5

// Bytes of a region up to the last one that was written.
static size_t high_water(const struct session *s, const struct region *r)
{
    const unsigned char *p = (unsigned char *)s->arena[r->space] + r->offset;
    p += r->space == SPACE_DEVICE ? s->dev->lane_offset : 0;
    size_t n = r->bytes;
    while (n > 0 && p[n - 1] == UNTOUCHED) {
        n--;
    }
    return n;
}

// Steps, a validation and decoding write to the end of every region of every arena, but for what
// rounding and gaps between tensors leave: what was planned is what is used, per category.
static void test_high_water(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    for (size_t which = 0; which < PLANS; which++) {
        float losses[2 * 20], logits[128];
        struct tiny t;
        open_case(&t, &shape, which);
        struct session *s = t.s;
        device_fill(t.dev, s->arena[SPACE_DEVICE], UNTOUCHED, s->layout.total[SPACE_DEVICE]);
        memset(s->arena[SPACE_PINNED], UNTOUCHED, s->layout.total[SPACE_PINNED]);
        if (s->layout.total[SPACE_HOST]) {
            memset(s->arena[SPACE_HOST], UNTOUCHED, s->layout.total[SPACE_HOST]);
        }
        float *zeros = test_alloc(t.elems, sizeof *zeros);
        tiny_write(&t, STATE_M, zeros);
        tiny_write(&t, STATE_V, zeros);
        tiny_scramble(&t, 1);
        free(zeros);
        for (uint64_t i = 0; i < 2; i++) {
            assert_true(step(&t, i).updated);
        }
        look(&t, losses, logits);
        for (int kind = 0; kind < BUFFER_KINDS; kind++) {
            for (size_t i = 0; i < s->layout.indices[kind]; i++) {
                const struct region *r = s->layout.region[kind] + i;
                size_t used = high_water(s, r), slack = 2 * DEVICE_ALIGN;
                if (r->bytes && (used == 0 || used + slack < r->bytes)) {
                    fail_msg("plan %zu: of %zu bytes of %s %zu only %zu were used", which, r->bytes,
                             buffer_name((enum buffer_kind)kind), i, used);
                }
            }
        }
        tiny_close(&t);
    }
}

// ---- state --------------------------------------------------------------------------------------

// Initial values do not depend on where they are written, and what the device then computes with
// are these.
static void test_initial_values(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    float expected[2 * 20], logits[128], losses[2 * 20];
    struct tiny plain;
    open_plain(&plain, &shape);
    tiny_init(&plain, 5);
    look(&plain, expected, logits);
    for (size_t which = 0; which < PLANS; which++) {
        struct tiny t;
        open_case(&t, &shape, which);
        look(&t, losses, logits); // of other parameters, which the device now holds
        tiny_init(&t, 5);
        look(&t, losses, logits);
        assert_memory_equal(losses, expected, sizeof losses);
        expect_same_state(&t, &plain);
        const struct tensor *w = tiny_tensor(&t, 1, "qkvw");
        float *x = tiny_read(&t, STATE_PARAMS);
        const float *first = x + tiny_unit_at(&t, 1) + w->offset;
        const float *second = x + tiny_unit_at(&t, 2) + w->offset;
        assert_memory_not_equal(first, second, w->elems * sizeof *x);
        free(x);
        tiny_close(&t);
    }
    tiny_close(&plain);
}

// Three steps, each with the result and the state of a session that offloads nothing.
static void expect_like_plain(const struct tiny *t, const struct tiny_shape *shape)
{
    struct tiny plain;
    open_plain(&plain, shape);
    for (uint64_t s = 0; s < 3; s++) {
        struct session_result a = step(t, s), b = step(&plain, s);
        expect_same_result(&a, &b);
        expect_same_state(t, &plain);
    }
    tiny_close(&plain);
}

static void test_recompute(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    for (size_t from = 1; from <= shape.layers; from++) { // recomputed: all, all but one, the last
        struct plan plan;
        struct tiny t;
        make_plan(&plan, RESIDENT, &shape);
        for (size_t u = from; u < plan.units; u++) {
            plan.unit[u].recompute = true;
        }
        open_planned(&t, &shape, &plan);
        expect_like_plain(&t, &shape);
        tiny_close(&t);
    }
}

// Lanes with little or nothing to do: all on the device, and all but the optimizer of the tied
// embedding, which still has one owner and one update.
static void test_empty_host(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    static const size_t plans[] = {RESIDENT, NO_BLOCKS};
    for (size_t i = 0; i < COUNT(plans); i++) {
        struct tiny t;
        open_case(&t, &shape, plans[i]);
        assert_non_null(t.s->lanes);
        expect_like_plain(&t, &shape);
        tiny_close(&t);
    }
}

// Saved under one plan, loaded under another: the next three steps are the same, for all pairs.
static void test_state_moves(void **state)
{
    struct tiny_shape shape = shape_of(*state);
    struct session_result expected[5];
    struct tiny plain;
    open_plain(&plain, &shape);
    for (uint64_t s = 0; s < 5; s++) {
        expected[s] = step(&plain, s);
    }
    for (size_t from = 0; from < PLANS; from++) {
        struct tiny a;
        open_case(&a, &shape, from);
        step(&a, 0);
        step(&a, 1);
        struct tiny_state saved = tiny_take(&a);
        tiny_close(&a);
        for (size_t to = 0; to < PLANS; to++) {
            struct tiny b;
            open_case(&b, &shape, to);
            step(&b, 0); // something else is there
            for (enum state i = STATE_PARAMS; i <= STATE_V; i++) {
                tiny_write(&b, i, saved.state[i]);
            }
            for (uint64_t s = 2; s < 5; s++) {
                struct session_result result = step(&b, s);
                expect_same_result(&result, expected + s);
            }
            expect_same_state(&b, &plain);
            tiny_close(&b);
        }
        tiny_drop(&saved);
    }
    tiny_close(&plain);
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    static const struct {
        const char *name;
        void (*run)(void **state);
        bool once_per_dtype;
    } per_kind[] = {
        {"llm.c #318 #412, DeepSpeed #6550 #7967 #7981: k micro-batches are one batch, offloaded",
         test_accumulation, true},
        {"pytorch #148532, torchtune #1977, torchtitan #990: exact clipping for every placement",
         test_clipping, false},
        {"DeepSpeed #7819: one bias correction for all slices", test_slices, false},
        {"Megatron-LM #950 #7398, DeepSpeed #3097: parameters are of this step", test_versions,
         false},
        {"Megatron-LM #950: parameters of the step before are noticed", test_old_version, true},
        {"DeepSpeed #8035: a non-finite norm changes no byte, offloaded", test_guard, false},
        {"DeepSpeed #8035: two steps in flight, and the first one overflows", test_guard_in_flight,
         false},
        {"DeepSpeed #6670 #6962, unsloth #338: no pageable copies; if pinned memory is short, some",
         test_pinned, false},
        {"DeepSpeed #2497 #7309: a device smaller than the model", test_cap, false},
        {"DeepSpeed #5102 #4093: all that was planned is used", test_high_water, false},
        {"torchtitan #3106: initial values, offloaded", test_initial_values, true},
        {"DeepSpeed #8012, entrenar #314: no block on the host, or only the tied embedding",
         test_empty_host, false},
        {"OLMo-core #828: recomputation changes nothing", test_recompute, false},
        {"Megatron-LM #1842, prime-rl #3561, SkyRL #1403, DeepSpeed #562: state of another plan",
         test_state_moves, false},
    };
    struct CMUnitTest tests[COUNT(per_kind) * TINY_KINDS];
    static char names[COUNT(tests)][160];
    size_t n = 0;
    for (size_t i = 0; i < COUNT(tests); i++) {
        size_t t = i / TINY_KINDS, k = i % TINY_KINDS;
        if (per_kind[t].once_per_dtype && tiny_kinds[k].micro_batches > 1) {
            continue;
        }
        snprintf(names[n], sizeof names[n], "%s: %s", per_kind[t].name, tiny_kinds[k].name);
        tests[n] = (struct CMUnitTest){.name = names[n],
                                       .test_func = per_kind[t].run,
                                       .initial_state = (void *)(tiny_kinds + k)};
        n++;
    }
    return _cmocka_run_group_tests("offload", tests, n, NULL, NULL);
}
