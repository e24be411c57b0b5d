// The contract that everything rests on: whatever the plan, whatever the lanes do and when, the
// losses, norms, parameters and moments are those of a plain run that offloads nothing, bit for
// bit.
//
// Random models, plans, numbers of micro-batches and chaos seeds; lanes dawdle and take what is
// ready in any order, dead buffers hold NaN, two steps are in flight. CONTRACT_PLANS says how many
// plans (300); TEST_SEED replays a run, and each case prints its own seed.
#include "hete/comm.h"
#include "hete/plan.h"
#include "kernels/clock.h"

#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 4

static struct comm *comm; // of several ranks, each of which runs all of this; or of one

struct outcome {
    struct session_result step[STEPS];
    float *params, *m, *v, *losses, *logits;
    size_t elems, tokens, vocab;
};

struct scenario {
    struct tiny_shape shape;
    bool hold;
    double clip; // some steps are clipped, some not
    int32_t *batch;
};

// The last rank wants to stop in the second step.
static bool stop(void *ctx)
{
    return *(const size_t *)ctx == 1 && comm_rank(comm) == comm_ranks(comm) - 1;
}

static struct session_update update_of(const struct scenario *c, size_t step)
{
    static size_t numbers[STEPS];
    numbers[step] = step;
    return (struct session_update){.lr = 1e-3 * (double)(step + 1),
                                   .beta1 = 0.9,
                                   .beta2 = 0.95,
                                   .eps = 1e-8,
                                   .weight_decay = 0.1,
                                   .clip = c->hold ? c->clip : 0,
                                   .guard = c->hold,
                                   .stop = stop,
                                   .ctx = numbers + step};
}

static void drop(struct outcome *o)
{
    free(o->params);
    free(o->m);
    free(o->v);
    free(o->losses);
    free(o->logits);
}

static void step_through(const struct tiny *t, const struct scenario *c, struct outcome *o,
                         size_t ahead)
{
    size_t started = 0;
    for (size_t done = 0; done < STEPS;) {
        // After the second step nothing is in flight: validation and decoding come between.
        size_t end = done < 2 ? 2 : STEPS;
        while (started < end && started < done + ahead) {
            struct session_update update = update_of(c, started);
            update.step = done;
            const int32_t *batch = c->batch + started * 2 * t->tokens;
            session_start(t->s, batch, batch + t->tokens, &update);
            started++;
        }
        session_finish(t->s, o->step + done++);
        if (done == 2) {
            session_losses(t->s, c->batch, c->batch + t->tokens, o->losses);
            size_t limit = session_decode_limit(t->s), most = c->shape.max_seq;
            for (size_t i = 0; i < limit && i < most; i++) {
                session_decode(t->s, c->batch[i], i, o->logits);
            }
        }
    }
    if (session_error(t->s)->status) {
        fail_msg("%s", session_error(t->s)->text);
    }
}

static void run(const struct scenario *c, const struct tiny_shape *shape, struct outcome *o)
{
    struct tiny t;
    tiny_open(&t, shape);
    tiny_scramble(&t, 7);
    *o = (struct outcome){.elems = t.elems,
                          .tokens = shape->B * shape->T,
                          .vocab = session_logits(t.s),
                          .losses = test_alloc(shape->B * shape->T, sizeof(float)),
                          .logits = test_alloc(session_logits(t.s), sizeof(float))};
    step_through(&t, c, o, shape->plan ? 2 : 1);
    o->params = tiny_read(&t, STATE_PARAMS);
    o->m = tiny_read(&t, STATE_M);
    o->v = tiny_read(&t, STATE_V);
    assert_int_equal(device_pageable_copies(t.dev), 0);
    tiny_close(&t);
}

static void expect_same(const struct outcome *a, const struct outcome *b)
{
    for (size_t i = 0; i < STEPS; i++) {
        assert_memory_equal(&a->step[i].loss, &b->step[i].loss, sizeof(double));
        assert_memory_equal(&a->step[i].norm, &b->step[i].norm, sizeof(double));
        assert_int_equal(a->step[i].updated, b->step[i].updated);
        assert_int_equal(a->step[i].stop, i == 1);
        assert_int_equal(b->step[i].stop, i == 1);
    }
    assert_memory_equal(a->losses, b->losses, a->tokens * sizeof(float));
    assert_memory_equal(a->logits, b->logits, a->vocab * sizeof(float));
    assert_memory_equal(a->m, b->m, a->elems * sizeof(float));
    assert_memory_equal(a->v, b->v, a->elems * sizeof(float));
    assert_memory_equal(a->params, b->params, a->elems * sizeof(float));
}

static void random_scenario(struct scenario *c, uint64_t *rng)
{
    size_t heads = 1 + rng_below(rng, 3), T = 4 + rng_below(rng, 13);
    *c = (struct scenario){.hold = rng_below(rng, 3) > 0, .clip = 0.5 + 8 * rng_unit(rng)};
    c->shape = (struct tiny_shape){.layers = 1 + rng_below(rng, 6),
                                   .heads = heads,
                                   .hidden = heads * (8 + 8 * rng_below(rng, 3)),
                                   .vocab = 30 + rng_below(rng, 200),
                                   .max_seq = T,
                                   .head_rows = 1 + rng_below(rng, 40),
                                   .B = 1 + rng_below(rng, 3),
                                   .T = T,
                                   .micro_batches = 1 + rng_below(rng, 4),
                                   .dtype = rng_below(rng, 2) ? DTYPE_BF16 : DTYPE_FP32,
                                   .threads = 1,
                                   .comm = comm_ranks(comm) > 1 ? comm : NULL};
    size_t tokens = c->shape.B * T * c->shape.micro_batches;
    c->batch = test_alloc(STEPS * 2 * tokens, sizeof *c->batch);
    for (size_t s = 0; s < STEPS; s++) {
        for (int rank = 0; rank < comm_ranks(comm); rank++) {
            int32_t *batch = tiny_batch(rng, tokens, c->shape.vocab);
            if (rank == comm_rank(comm)) {
                memcpy(c->batch + s * 2 * tokens, batch, 2 * tokens * sizeof *batch);
            }
            free(batch);
        }
    }
}

static void describe(uint64_t seed, const struct scenario *c, const struct plan *p)
{
    const struct tiny_shape *s = &c->shape;
    char units[64] = "";
    if (comm_rank(comm) > 0) {
        return;
    }
    for (size_t u = 0; u < p->units; u++) {
        const struct unit_plan *d = p->unit + u;
        // Of several ranks S and H are sharded; s: streamed from shards on the device.
        units[2 * u] = d->stream && d->host_optimizer ? 'S'
                       : d->stream                    ? 's'
                       : d->host_optimizer            ? 'H'
                       : d->shard                     ? 'd'
                                                      : 'D';
        units[2 * u + 1] = d->recompute ? 'r' : 'k';
    }
    fprintf(stderr,
            "case %llu: L%zu C%zu B%zu T%zu k%zu %s hold %d | %s slots %zu grads %zu slices %zu "
            "early %d speculate %d fifo %d barrier %d serial %d\n",
            (unsigned long long)seed, s->layers, s->hidden, s->B, s->T, s->micro_batches,
            s->dtype ? "bf16" : "fp32", c->hold, units, p->slots, p->grad_buffers, p->slices,
            p->early_adam, p->speculate, p->fifo, p->barrier, p->serial_copies);
}

// Decisions for the shape, and what they take.
static void random_plan(struct plan *plan, struct tiny_shape *shape, bool hold, uint64_t *rng)
{
    struct gpt gpt;
    struct gpt_config config = tiny_config(shape);
    gpt_open(&gpt, &config);
    tiny_random_plan(plan, rng, &gpt.model, shape, hold);
    plan->speculate = hold && !plan->barrier && rng_below(rng, 2);
    shape->plan = plan;
    shape->memory = tiny_device_bytes(shape);
}

static void test_random_plans(void **state)
{
    const char *count = getenv("CONTRACT_PLANS");
    size_t outcomes[2] = {0}; // of speculation: it held, something was clipped
    uint64_t seed = test_seed();
    (void)state;
    int plans = count ? atoi(count) : 300;
    for (int i = 0; i < plans; i++) {
        uint64_t rng = seed + (uint64_t)i;
        struct scenario c;
        struct plan plan;
        random_scenario(&c, &rng);
        struct tiny_shape shape = c.shape;
        random_plan(&plan, &shape, c.hold, &rng);
        shape.chaos = 1 + rng_below(&rng, 1000000);
        describe(seed + (uint64_t)i, &c, &plan);
        struct outcome plain, planned;
        run(&c, &c.shape, &plain);
        run(&c, &shape, &planned);
        expect_same(&plain, &planned);
        for (size_t k = 0; plan.speculate && k < STEPS; k++) {
            outcomes[plain.step[k].norm > c.clip]++;
        }
        drop(&plain);
        drop(&planned);
        free(c.batch);
    }
    fprintf(stderr, "speculation held in %zu steps, did not in %zu\n", outcomes[0], outcomes[1]);
    assert_true(plans < 100 || (outcomes[0] > 0 && outcomes[1] > 0));
}

// A rank that is longer in coming than the watchdog waits for anything here.
static void test_slow_rank(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct scenario c;
        struct plan plan;
        struct tiny t;
        struct session_result result;
        random_scenario(&c, &rng);
        random_plan(&plan, &c.shape, c.hold, &rng);
        c.shape.watchdog_s = 3;
        tiny_open(&t, &c.shape);
        tiny_scramble(&t, 7);
        if (comm_rank(comm) == comm_ranks(comm) - 1) {
            clock_sleep_until(clock_s() + 5);
        }
        struct session_update update = update_of(&c, 0);
        session_step(t.s, c.batch, c.batch + t.tokens, &update, &result);
        if (session_error(t.s)->status) {
            fail_msg("%s", session_error(t.s)->text);
        }
        tiny_close(&t);
        free(c.batch);
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    comm = tiny_ranks();
    const struct CMUnitTest tests[] = {
        {"fairscale #496, torchtune #1867, diffusers #14657, prime-rl PR#3109: random plans under "
         "chaos give the bits of a plain run",
         test_random_plans, NULL, NULL, NULL},
    };
    const struct CMUnitTest ranks[] = {
        {"a slow rank is waited for", test_slow_rank, NULL, NULL, NULL},
    };
    int failed = cmocka_run_group_tests_name("contract", tests, NULL, NULL);
    if (!failed && comm_ranks(comm) > 1) {
        failed = cmocka_run_group_tests_name("ranks", ranks, NULL, NULL);
    }
    return tiny_ranks_end(comm, failed);
}
