// The planner with several ranks: what is sharded and streamed, against all plans there are,
// against every policy and every ZeRO stage, within each rank's budgets.
#include "hete/check.h"
#include "hete/search.h"

#include "test/cmocka.h"
#include "test/every_plan.h"
#include "test/random_problem.h"
#include "test/tiny.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

static const char *const policies[] = {"auto",          "autohete",      "resident",
                                       "zero-offload",  "twin-flow:0.3", "twin-flow:1",
                                       "zero-infinity", "stronghold",    "patrickstar"};

static const int stages[] = {0, 2, 3}; // 1 is 2

// ---- terms and times ----------------------------------------------------------------------------

static void estimates_are_exact(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 600; round++) {
        struct random_problem r;
        struct search s;
        struct error err = {0};
        struct plan plan;
        struct prediction p;
        struct estimate e;
        random_problem(&r, &rng, 1 + rng_below(&rng, 12));
        random_ranks(&r, &rng);
        r.problem.budget.device = SIZE_MAX;
        search_open(&s, &r.problem, &err);
        struct choice c = random_choice(&rng, &s);
        plan_of_choice(&plan, &r.problem, &c);
        if (plan_check(&plan, &r.problem, &err) || plan_predict(&p, &plan, &r.problem, &err)) {
            fail_msg("%s", err.text);
        }
        search_estimate(&s, &c, &e);
        assert_true(e.device_bytes == (double)p.device_bytes);
        assert_true(e.host_bytes == (double)(p.host_bytes + p.pinned_bytes));
        assert_true(fabs(e.busiest_s / p.bound_s - 1) < 1e-9);
        if (!(e.least_s >= e.busiest_s && e.least_s <= p.step_s * (1 + 1e-9))) {
            fail_msg("least %g of a step of %g", e.least_s, p.step_s);
        }
        search_close(&s);
    }
}

// All operations of some steps, of which the first half is left out.
static double time_all(const struct plan_problem *p, const struct plan *plan, size_t steps)
{
    struct error err = {0};
    struct graph g = {0};
    struct step_shape shape;
    struct lane_times times;
    plan_shape(&shape, p);
    assert_int_equal(step_build(&g, &shape, plan, STEP_TRAIN, &err), STATUS_OK);
    double *work = test_alloc(g.n_ops, sizeof *work);
    struct timing *timings = test_alloc(steps * g.n_ops, sizeof *timings);
    costs_of_graph(p->costs, &shape, plan, &g, work);
    struct simulation in = {
        .graph = &g, .work = work, .link = p->costs->link, .fifo = plan->fifo, .steps = steps};
    assert_int_equal(simulate(&in, timings, &err), STATUS_OK);
    lane_times(&times, &g, timings, steps / 2, steps);
    free(work);
    free(timings);
    graph_free(&g);
    return times.period_s;
}

// Two steps and a few micro-batches are enough to see the period, whatever the plan.
static void steps_are_predicted(void **state)
{
    uint64_t rng = test_seed();
    size_t compared = 0, off = 0;
    (void)state;
    for (int round = 0; round < 150; round++) {
        struct random_problem r;
        struct plan plan;
        struct error err = {0};
        struct prediction p;
        random_problem(&r, &rng, 1 + rng_below(&rng, 12));
        random_ranks(&r, &rng);
        r.problem.micro_batches = 1 + rng_below(&rng, rng_below(&rng, 2) ? 4 : 24);
        const char *policy = policies[rng_below(&rng, COUNT(policies))];
        if (plan_choose(&plan, &r.problem, policy, &err)) {
            continue;
        }
        assert_int_equal(plan_predict(&p, &plan, &r.problem, &err), STATUS_OK);
        off += fabs(time_all(&r.problem, &plan, 8) / p.step_s - 1) > 0.005;
        compared++;
    }
    print_message("%zu of %zu steps are not predicted to 0.5%%\n", off, compared);
    assert_true(compared >= 100 && off <= 2);
}

// The bound looks at few choices: none of the others that fit has a busiest lane with less to do.
static void the_bound_is_the_least(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 25; round++) {
        struct random_problem r;
        struct search s;
        struct error err = {0};
        struct estimate e;
        double least = INFINITY;
        random_problem(&r, &rng, 1 + rng_below(&rng, 8));
        random_ranks(&r, &rng);
        r.problem.zero = rng_below(&rng, 2) ? -1 : stages[rng_below(&rng, COUNT(stages))];
        size_t blocks = r.problem.model->units - 1;
        search_open(&s, &r.problem, &err);
        double bound = search_bound(&s);
        for (size_t i = 0; i < 9 * PLAN_SLOTS_MAX; i++) {
            struct choice c = {.early_adam = true, .grad_buffers = 1, .slices = 1};
            c.slots = 1 + i / 9;
            c.zero = (size_t)stages[i % 3];
            c.embed_on_host = i % 9 / 3 == 0;
            c.embed_shard = i % 9 / 3 == 1;
            int zero = r.problem.zero;
            bool whole = !c.embed_on_host && !c.embed_shard;
            if (zero >= 0 &&
                ((size_t)zero != c.zero || (whole && zero) || (c.embed_shard && !zero))) {
                continue;
            }
            for (c.n_device = 0; c.n_device <= blocks; c.n_device++) {
                c.n_stream = zero == 3 ? blocks - c.n_device : 0;
                for (; c.n_stream <= blocks - c.n_device; c.n_stream++) {
                    for (c.n_recompute = 0; c.n_recompute <= blocks; c.n_recompute++) {
                        search_estimate(&s, &c, &e);
                        least = e.over <= 0 ? fmin(least, e.busiest_s) : least;
                    }
                }
            }
        }
        assert_true(bound == least || fabs(bound / least - 1) < 1e-9);
        search_close(&s);
    }
}

// ---- against all plans --------------------------------------------------------------------------

static void check_optimal(uint64_t *rng, size_t layers, size_t problems)
{
    for (size_t i = 0; i < problems; i++) {
        struct random_problem r;
        random_problem(&r, rng, layers);
        random_ranks(&r, rng);
        must_find_best(&r.problem, 1.01);
    }
}

static void auto_is_the_best_of_all_plans(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    check_optimal(&rng, 1, 60);
    check_optimal(&rng, 2, 50);
    check_optimal(&rng, 3, 8);
}

static void auto_is_the_best_of_all_plans_long(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    check_optimal(&rng, 3, 100);
    check_optimal(&rng, 4, 10);
}

// ---- against policies and stages ----------------------------------------------------------------

static void auto_is_never_worse(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 30; round++) {
        struct random_problem r;
        struct plan best, plan;
        struct prediction best_p, p;
        struct error err = {0};
        random_problem(&r, &rng, 1 + rng_below(&rng, 20));
        random_ranks(&r, &rng);
        must_choose(&best, &best_p, &r.problem, "auto");
        for (size_t i = 0; i < COUNT(policies) * 4; i++) {
            const char *policy = policies[i / 4];
            r.problem.zero = i % 4 ? stages[i % 4 - 1] : -1;
            if (plan_choose(&plan, &r.problem, policy, &err)) {
                assert_int_equal(err.status, STATUS_FAIL);
                continue;
            }
            must_choose(&plan, &p, &r.problem, policy);
            assert_true(best_p.step_s <= p.step_s * (1 + 1e-9));
            assert_true(p.step_s >= p.bound_s * (1 - 1e-9));
        }
    }
}

// What is asked for is what units with an optimizer on the device get, unit 0 never streamed.
static void stages_are_what_they_are(void **state)
{
    uint64_t rng = test_seed();
    size_t seen[4] = {0};
    (void)state;
    for (int round = 0; round < 100; round++) {
        struct random_problem r;
        struct plan plan;
        struct error err = {0};
        random_problem(&r, &rng, 1 + rng_below(&rng, 10));
        random_ranks(&r, &rng);
        r.problem.zero = (int)rng_below(&rng, 4);
        const char *policy = policies[rng_below(&rng, COUNT(policies))];
        if (plan_choose(&plan, &r.problem, policy, &err)) {
            continue;
        }
        for (size_t u = 0; u < plan.units; u++) {
            const struct unit_plan *d = plan.unit + u;
            if (r.problem.zero == 3) {
                assert_int_equal(d->stream, u > 0);
            }
            if (!d->host_optimizer) {
                assert_int_equal(d->shard, r.problem.zero > 0);
                assert_int_equal(d->stream, u > 0 && r.problem.zero == 3);
                seen[r.problem.zero]++;
            }
        }
    }
    assert_true(seen[0] && seen[1] && seen[2] && seen[3]);
}

static void policies_are_what_they_are(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 20; round++) {
        struct random_problem r;
        struct plan plan;
        struct prediction p;
        random_problem(&r, &rng, 10);
        random_ranks(&r, &rng);
        r.problem.budget.device = SIZE_MAX;
        must_choose(&plan, &p, &r.problem, "resident");
        for (size_t u = 0; u < plan.units; u++) {
            assert_false(plan.unit[u].shard || plan.unit[u].stream || plan.unit[u].host_optimizer);
        }
        must_choose(&plan, &p, &r.problem, "zero-offload"); // ZeRO-2: parameters on every rank
        for (size_t u = 0; u < plan.units; u++) {
            assert_true(plan.unit[u].shard && plan.unit[u].host_optimizer);
            assert_false(plan.unit[u].stream);
        }
        must_choose(&plan, &p, &r.problem, "twin-flow:0.3");
        assert_true(plan.unit[1].shard && !plan.unit[1].stream && !plan.unit[1].host_optimizer);
        must_choose(&plan, &p, &r.problem, "zero-infinity");
        assert_true(plan.unit[10].shard && plan.unit[10].stream && plan.unit[10].host_optimizer);
        must_choose(&plan, &p, &r.problem, "autohete"); // ZeRO-3
        for (size_t u = 0; u < plan.units; u++) {
            const struct unit_plan *d = plan.unit + u;
            assert_true(d->shard && (u == 0 || d->host_optimizer || d->stream));
        }
    }
}

// With one rank there is nothing to share, whatever is asked for.
static void one_rank_knows_no_stage(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 10; round++) {
        struct random_problem r;
        struct plan plan, other;
        struct prediction p;
        random_problem(&r, &rng, 1 + rng_below(&rng, 10));
        must_choose(&plan, &p, &r.problem, "auto");
        for (int zero = -1; zero < 4; zero++) {
            r.problem.zero = zero;
            r.problem.ranks = (size_t)zero & 1; // 0 is 1
            must_choose(&other, &p, &r.problem, "auto");
            assert_memory_equal(&plan, &other, sizeof plan);
        }
    }
}

// What a search has found out for one policy changes nothing for the next one.
static void one_search_for_all_policies(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 6; round++) {
        struct random_problem r;
        struct search s;
        struct plan plan;
        struct error err = {0}, alone = {0};
        random_problem(&r, &rng, 1 + rng_below(&rng, 10));
        random_ranks(&r, &rng);
        r.problem.zero = round % 2 ? -1 : (int)rng_below(&rng, 4);
        r.problem.speculate = rng_below(&rng, 2);
        r.costs.host_speculate = r.costs.host_adam;
        search_open(&s, &r.problem, &err);
        for (size_t i = 0; i < COUNT(policies); i++) {
            int status = plan_choose(&plan, &r.problem, policies[i], &alone);
            assert_int_equal(search_policy(&s, policies[i]), status);
            if (status) {
                assert_string_equal(err.text, alone.text);
            } else {
                assert_memory_equal(&plan, &s.best, sizeof plan);
            }
        }
        search_close(&s);
    }
}

// ---- memory -------------------------------------------------------------------------------------

// What is chosen fits on every rank, to the byte, and is a step that can run.
static void budgets_hold_on_every_rank(void **state)
{
    uint64_t rng = test_seed();
    size_t chosen = 0;
    (void)state;
    for (int round = 0; round < 300; round++) {
        struct random_problem r;
        struct plan plan;
        struct error err = {0};
        random_problem(&r, &rng, 1 + rng_below(&rng, 12));
        random_ranks(&r, &rng);
        struct budget *budget = &r.problem.budget;
        budget->host = rng_below(&rng, 2) ? SIZE_MAX : rng_below(&rng, 4000000);
        budget->pinned = rng_below(&rng, 2) ? SIZE_MAX : rng_below(&rng, 1000000);
        const char *policy = policies[rng_below(&rng, COUNT(policies))];
        if (plan_choose(&plan, &r.problem, policy, &err)) {
            continue;
        }
        chosen++;
        for (size_t rank = 0; rank < r.problem.ranks; rank++) {
            struct layout layout;
            struct graph g = {0};
            struct step_shape shape;
            plan_shape(&shape, &r.problem);
            shape.rank = rank;
            assert_int_equal(layout_make(&layout, &shape, &plan, budget->pinned, &err), STATUS_OK);
            assert_true(layout.total[SPACE_DEVICE] <= budget->device);
            assert_true(layout.total[SPACE_PINNED] <= budget->pinned);
            assert_true(layout.total[SPACE_PINNED] + layout.total[SPACE_HOST] <= budget->host);
            assert_int_equal(check_layout(&layout, &err), STATUS_OK);
            assert_int_equal(step_build(&g, &shape, &plan, STEP_TRAIN, &err), STATUS_OK);
            assert_int_equal(check_graph(&g, &err), STATUS_OK);
            graph_free(&g);
            layout_free(&layout);
        }
    }
    assert_true(chosen > 100);
}

// Optimizer state on the host is divided by the ranks, but for what rounding of each buffer adds.
static void host_optimizers_are_divided(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 20; round++) {
        struct random_problem r;
        struct plan plan;
        struct prediction alone, p;
        random_problem(&r, &rng, 1 + rng_below(&rng, 10));
        r.problem.budget.device = SIZE_MAX;
        must_choose(&plan, &alone, &r.problem, "zero-offload");
        random_ranks(&r, &rng);
        r.problem.budget.device = SIZE_MAX;
        must_choose(&plan, &p, &r.problem, "zero-offload");
        double n = (double)r.problem.ranks, buffers = 10 * (double)plan.units;
        double part = (double)alone.host_bytes / n;
        assert_true((double)p.host_bytes <= part + buffers * (DEVICE_ALIGN + 64 * sizeof(float)));
        assert_true((double)p.host_bytes >= part);
    }
}

// ---- plans of others ----------------------------------------------------------------------------

static void expect_refused(const struct plan *plan, const struct plan_problem *problem,
                           const char *why)
{
    struct error err = {0};
    assert_int_equal(plan_check(plan, problem, &err), STATUS_FAIL);
    if (!strstr(err.text, why)) {
        fail_msg("'%s' instead of '%s'", err.text, why);
    }
}

static void plans_are_checked(void **state)
{
    uint64_t rng = test_seed();
    struct random_problem r;
    struct plan good, p;
    struct prediction prediction;
    (void)state;
    random_problem(&r, &rng, 4);
    random_ranks(&r, &rng);
    r.problem.ranks = 4;
    must_choose(&good, &prediction, &r.problem, "zero-infinity");
    p = good;
    p.unit[2].shard = false;
    expect_refused(&p, &r.problem, "unit 2 whole on each of 4 ranks though it streams it");
    p.unit[2].stream = false;
    expect_refused(&p, &r.problem, "though it updates it on the host; with several ranks that");
    p = good;
    p.unit[0].stream = true;
    expect_refused(&p, &r.problem, "unit 0");
    p = good;
    p.unit[1].host_optimizer = false; // ZeRO-3
    r.problem.budget.device = SIZE_MAX;
    struct error err = {0};
    assert_int_equal(plan_check(&p, &r.problem, &err), STATUS_OK);
    r.problem.ranks = 2;
    expect_refused(&good, &r.problem, "is for 4 ranks, and this run has 2: start it as 4");
    r.problem.ranks = 1;
    must_choose(&good, &prediction, &r.problem, "resident");
    good.unit[3].shard = true;
    expect_refused(&good, &r.problem, "shards unit 3, but is for a single rank");
    r.problem.ranks = 3;
    expect_refused(&good, &r.problem, "is for 1 rank, and this run has 3");
}

// What a plan costs is counted in simulations, not in seconds of a machine that others use too.
static void few_simulations(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 4; round++) {
        struct random_problem r;
        struct search s;
        struct error err = {0};
        random_problem(&r, &rng, 96);
        random_ranks(&r, &rng);
        search_open(&s, &r.problem, &err);
        assert_int_equal(search_policy(&s, "auto"), STATUS_OK);
        assert_true(s.simulations <= 2000 && s.written <= 2000000);
        search_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(estimates_are_exact),
        cmocka_unit_test(steps_are_predicted),
        cmocka_unit_test(the_bound_is_the_least),
        cmocka_unit_test(auto_is_the_best_of_all_plans),
        cmocka_unit_test(auto_is_never_worse),
        cmocka_unit_test(stages_are_what_they_are),
        cmocka_unit_test(policies_are_what_they_are),
        cmocka_unit_test(one_rank_knows_no_stage),
        cmocka_unit_test(one_search_for_all_policies),
        cmocka_unit_test(budgets_hold_on_every_rank),
        cmocka_unit_test(host_optimizers_are_divided),
        cmocka_unit_test(plans_are_checked),
        cmocka_unit_test(few_simulations),
    };
    const struct CMUnitTest long_tests[] = {cmocka_unit_test(auto_is_the_best_of_all_plans_long)};
    return getenv("TEST_LONG") ? cmocka_run_group_tests(long_tests, NULL, NULL)
                               : cmocka_run_group_tests(tests, NULL, NULL);
}
