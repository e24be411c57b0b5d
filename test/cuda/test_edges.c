// What keeps the lanes of a device that queues apart: that a clean run is free of races, and that
// a run in which the executor forgets one kind of waiting is not, whatever the schedule.
#include "kernels/driver.h"
#include "test/cmocka.h"
#include "test/cuda/hasty.h"
#include "test/cuda/sim.h"
#include "test/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEEDS 20
#define STEPS 3

static size_t awaited;
static struct device_driver broken;

static void no_await(struct device *dev, enum device_lane lane, size_t mark)
{
    (void)dev;
    (void)lane;
    (void)mark;
    awaited++;
}

// Every block streamed through two slots, gradients out, optimizers on the host.
static void open_streaming(struct tiny *t, struct plan *plan, struct tiny_shape *shape,
                           uint64_t seed)
{
    uint64_t rng = seed;
    struct gpt gpt;
    *shape = (struct tiny_shape){.layers = 3 + rng_below(&rng, 3),
                                 .heads = 2,
                                 .hidden = 32,
                                 .vocab = 50,
                                 .max_seq = 8,
                                 .head_rows = 16,
                                 .B = 1,
                                 .T = 8,
                                 .micro_batches = 1 + rng_below(&rng, 2),
                                 .dtype = rng_below(&rng, 2) ? DTYPE_BF16 : DTYPE_FP32,
                                 .threads = 1};
    struct gpt_config config = tiny_config(shape);
    gpt_open(&gpt, &config);
    plan_resident(plan, &gpt.model, shape->B, shape->T, shape->micro_batches, true);
    for (size_t u = 0; u < gpt.model.units; u++) {
        plan->unit[u] = (struct unit_plan){
            .recompute = u > 0 && rng_below(&rng, 2), .stream = u > 0, .host_optimizer = true};
    }
    plan->slots = 2;
    plan->grad_buffers = 2;
    plan->slices = 1 + rng_below(&rng, 3);
    shape->plan = plan;
    shape->watchdog_s = 2;
    sim_settings()->seed = seed;
    sim_settings()->schedule = seed % 3;
    tiny_open(t, shape);
    assert_true(t->dev->queues);
    tiny_scramble(t, 7);
}

static void run(uint64_t seed, const struct device_driver *replaced)
{
    struct tiny t;
    struct plan plan;
    struct tiny_shape shape;
    open_streaming(&t, &plan, &shape, seed);
    const struct device_driver *whole = t.dev->driver;
    uint64_t rng = seed;
    int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
    struct session_update update = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .clip = 1, .guard = true};
    struct session_result result;
    sim_forget_reports();
    t.dev->driver = replaced ? replaced : whole;
    for (size_t s = 0; s < STEPS; s++) {
        session_start(t.s, batch, batch + t.tokens, &update);
        if (s) {
            session_finish(t.s, &result);
        }
    }
    session_finish(t.s, &result);
    t.dev->driver = whole;
    device_sync(t.dev);
    free(batch);
    tiny_close(&t);
}

static void test_clean(void **state)
{
    uint64_t seed = test_seed();
    (void)state;
    for (uint64_t i = 0; i < SEEDS; i++) {
        run(seed + i, NULL);
        for (int kind = 0; kind < SIM_KINDS; kind++) {
            if (sim_reports((enum sim_kind)kind)) {
                fail_msg("seed %llu: %s", (unsigned long long)(seed + i), sim_last_report());
            }
        }
    }
}

static void expect_races(const char *what)
{
    uint64_t seed = test_seed();
    sim_expect_reports(true);
    for (uint64_t i = 0; i < SEEDS; i++) {
        awaited = 0;
        run(seed + i, &broken);
        if (broken.await == no_await && awaited == 0) {
            fail_msg("seed %llu: no stream had to wait", (unsigned long long)(seed + i));
        }
        if (sim_reports(SIM_STREAM_RACE) == 0) {
            fail_msg("seed %llu: %s, and no race was reported", (unsigned long long)(seed + i),
                     what);
        }
    }
    sim_expect_reports(false);
    sim_forget_reports();
}

static void take_driver(void)
{
    struct tiny t;
    struct plan plan;
    struct tiny_shape shape;
    open_streaming(&t, &plan, &shape, 1);
    broken = *t.dev->driver;
    tiny_close(&t);
}

static void test_no_await(void **state)
{
    (void)state;
    take_driver();
    broken.await = no_await;
    expect_races("kernels did not wait for copies");
}

static void test_not_done(void **state)
{
    (void)state;
    take_driver();
    broken.passed = passed_at_once;
    broken.passed_s = passed_now;
    expect_races("copies did not wait for kernels");
}

// A kernel that never ends: the watchdog names what is waited for, and nothing waits any longer.
static void test_hang(void **state)
{
    struct tiny t;
    struct plan plan;
    struct tiny_shape shape;
    (void)state;
    cudaDeviceReset(); // launches count from here
    open_streaming(&t, &plan, &shape, 3);
    uint64_t rng = 3;
    int32_t *batch = tiny_batch(&rng, t.tokens, shape.vocab);
    struct session_update update = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    struct session_result result;
    update.guard = true;
    sim_settings()->failure = SIM_HANG;
    sim_settings()->failure_launch = 20;
    for (size_t s = 0; s < STEPS && session_error(t.s)->status == STATUS_OK; s++) {
        session_step(t.s, batch, batch + t.tokens, &update, &result);
    }
    sim_settings()->failure = SIM_HEALTHY;
    assert_int_equal(session_error(t.s)->status, STATUS_FAIL);
    assert_non_null(strstr(session_error(t.s)->text, "nothing has finished for 2 s"));
    assert_non_null(strstr(session_error(t.s)->text, "compute lane: "));
    assert_non_null(strstr(session_error(t.s)->text, " of unit "));
    free(batch); // a session that has failed is not closed
}

int main(void)
{
    setenv("TEST_DEVICE", "cuda", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clean),
        cmocka_unit_test(test_no_await),
        cmocka_unit_test(test_not_done),
        cmocka_unit_test(test_hang),
    };
    return cmocka_run_group_tests_name("edges", tests, NULL, NULL);
}
