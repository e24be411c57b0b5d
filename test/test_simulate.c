// The virtual clock against a slow one that knows only the rules, on random steps; the sharing of
// the link, the orders and what a schedule says, on steps small enough to work out by hand.
#include "hete/simulate.h"

#include "test/cmocka.h"
#include "test/random_graph.h"
#include "test/tiny.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- a slow clock -------------------------------------------------------------------------------

enum progress { WAITING, RUNNING, DONE };

struct slow_op {
    enum progress state;
    double ready, start, end;
    double latency, left; // of what runs
};

struct slow {
    const struct simulation *in;
    size_t n, total;
    struct slow_op *ops; // by position
    double now;
};

static const struct op *op_at(const struct slow *s, size_t at)
{
    return s->in->graph->ops + at % s->n;
}

static bool is_ready(const struct slow *s, size_t at)
{
    const struct graph *g = s->in->graph;
    size_t step = at / s->n;
    for (size_t e = 0; e < g->n_edges; e++) {
        const struct edge *edge = g->edges + e;
        bool before_first = edge->next && step == 0;
        if (edge->to == at % s->n && !before_first &&
            s->ops[(step - edge->next) * s->n + edge->from].state != DONE) {
            return false;
        }
    }
    // No step begins before the one before it, nor before the last but one is complete.
    for (size_t i = 0; step >= 2 && i < (step - 1) * s->n; i++) {
        if (s->ops[i].state != DONE) {
            return false;
        }
    }
    return true;
}

static bool moves(const struct slow *s, enum lane lane)
{
    for (size_t i = 0; i < s->total; i++) {
        const struct slow_op *o = s->ops + i;
        if (o->state == RUNNING && op_at(s, i)->lane == lane && o->latency <= 0 && o->left > 0) {
            return true;
        }
    }
    return false;
}

// Units of work per second; 0: at once.
static double rate_of(const struct slow *s, size_t at)
{
    const struct device_link *link = &s->in->link;
    switch (op_at(s, at)->lane) {
    case LANE_COPY_IN:
        return moves(s, LANE_COPY_OUT) ? link->in_duplex : link->in;
    case LANE_COPY_OUT:
        return moves(s, LANE_COPY_IN) ? link->out_duplex : link->out;
    default:
        return 1;
    }
}

static double time_left(const struct slow *s, size_t at)
{
    const struct slow_op *o = s->ops + at;
    double rate = rate_of(s, at);
    return o->latency > 0 ? o->latency : o->left > 0 && rate > 0 ? o->left / rate : 0;
}

static void choose(struct slow *s, enum lane lane)
{
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < s->total; i++) {
        struct slow_op *o = s->ops + i;
        if (op_at(s, i)->lane != lane || o->state == DONE) {
            continue;
        }
        if (o->state == RUNNING) {
            return;
        }
        bool ready = is_ready(s, i);
        if (ready && o->ready < 0) {
            o->ready = s->now;
        }
        bool sooner = best == SIZE_MAX || (s->in->fifo && o->ready < s->ops[best].ready);
        if (ready && (lane_in_order(lane) ? best == SIZE_MAX : sooner)) {
            best = i;
        }
        if (lane_in_order(lane)) {
            break;
        }
    }
    if (best != SIZE_MAX) {
        struct slow_op *o = s->ops + best;
        bool copy = lane == LANE_COPY_IN || lane == LANE_COPY_OUT;
        o->state = RUNNING;
        o->start = s->now;
        o->left = s->in->work[best % s->n];
        o->latency = copy ? s->in->link.latency_s : 0;
    }
}

static void note_ready(struct slow *s)
{
    for (size_t i = 0; i < s->total; i++) {
        if (s->ops[i].ready < 0 && is_ready(s, i)) {
            s->ops[i].ready = s->now;
        }
    }
}

// Moves the clock to the next moment at which something ends; false if nothing runs.
static bool slow_advance(struct slow *s)
{
    double left[LANES], least = INFINITY;
    size_t runs[LANES];
    bool any = false;
    for (int l = 0; l < LANES; l++) {
        runs[l] = SIZE_MAX;
    }
    for (size_t i = 0; i < s->total; i++) {
        if (s->ops[i].state == RUNNING) {
            int l = op_at(s, i)->lane;
            runs[l] = i;
            left[l] = time_left(s, i);
            least = fmin(least, left[l]);
            any = true;
        }
    }
    double rate[LANES];
    for (int l = 0; l < LANES; l++) {
        rate[l] = runs[l] != SIZE_MAX ? rate_of(s, runs[l]) : 0;
    }
    s->now += any ? least : 0;
    for (int l = 0; l < LANES; l++) {
        if (runs[l] == SIZE_MAX) {
            continue;
        }
        struct slow_op *o = s->ops + runs[l];
        bool ends = left[l] <= least + 1e-12;
        if (o->latency > 0) {
            o->latency = ends ? 0 : o->latency - least;
            ends = ends && o->left <= 0;
        } else {
            o->left = ends ? 0 : o->left - rate[l] * least;
        }
        if (ends) {
            o->state = DONE;
            o->end = s->now;
        }
    }
    return any;
}

static struct slow_op *slow_simulate(const struct simulation *in)
{
    struct slow s = {.in = in, .n = in->graph->n_ops, .total = in->steps * in->graph->n_ops};
    s.ops = test_alloc(s.total, sizeof *s.ops);
    for (size_t i = 0; i < s.total; i++) {
        s.ops[i].ready = -1;
    }
    do {
        note_ready(&s);
        for (int l = 0; l < LANES; l++) {
            choose(&s, (enum lane)l);
        }
    } while (slow_advance(&s));
    return s.ops;
}

// ---- random steps -------------------------------------------------------------------------------

// exact: whole numbers and rates that keep them so, which gives many events at one moment.
static struct device_link random_link(uint64_t *rng, bool exact)
{
    struct device_link link = {.latency_s = rng_below(rng, 2) ? (double)rng_below(rng, 3) : 0};
    if (exact) {
        link.in = link.in_duplex = rng_below(rng, 3) ? 1 : 0;
        link.out = link.out_duplex = rng_below(rng, 3) ? 2 : 0;
        return link;
    }
    link.in = rng_below(rng, 6) ? 0.5 + rng_unit(rng) : 0;
    link.out = rng_below(rng, 6) ? 0.5 + rng_unit(rng) : 0;
    link.in_duplex = link.in * (0.3 + 0.7 * rng_unit(rng));
    link.out_duplex = link.out * (0.3 + 0.7 * rng_unit(rng));
    link.latency_s *= rng_unit(rng);
    return link;
}

static double *random_work(uint64_t *rng, size_t n, bool exact)
{
    double *work = test_alloc(n + 1, sizeof *work);
    for (size_t i = 0; i < n; i++) {
        work[i] = rng_below(rng, 5) == 0 ? 0 : exact ? (double)rng_below(rng, 8) : rng_unit(rng);
    }
    return work;
}

static void test_against_slow_clock(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 400; round++) {
        struct graph g;
        struct error err = {0};
        bool exact = round % 2;
        random_graph(&g, &rng, 1 + rng_below(&rng, 30), rng_below(&rng, 4) > 0);
        double *work = random_work(&rng, g.n_ops, exact);
        struct simulation in = {.graph = &g,
                                .work = work,
                                .link = random_link(&rng, exact),
                                .fifo = rng_below(&rng, 2),
                                .steps = 1 + rng_below(&rng, 5)};
        struct timing *timings = test_alloc(in.steps * g.n_ops, sizeof *timings);
        assert_int_equal(simulate(&in, timings, &err), STATUS_OK);
        struct slow_op *expected = slow_simulate(&in);
        for (size_t i = 0; i < in.steps * g.n_ops; i++) {
            if (fabs(timings[i].start - expected[i].start) > 1e-9 ||
                fabs(timings[i].end - expected[i].end) > 1e-9) {
                fail_msg("round %d, operation %zu of step %zu: [%g, %g], expected [%g, %g]", round,
                         i % g.n_ops, i / g.n_ops, timings[i].start, timings[i].end,
                         expected[i].start, expected[i].end);
            }
        }
        free(expected);
        free(timings);
        free(work);
        graph_free(&g);
    }
}

// ---- causes -------------------------------------------------------------------------------------

static bool may_cause(const struct graph *g, size_t cause, size_t at)
{
    size_t n = g->n_ops;
    if (g->ops[cause % n].lane == g->ops[at % n].lane || cause / n + 2 <= at / n) {
        return true;
    }
    for (uint32_t e = g->first_edge[cause % n]; e < g->first_edge[cause % n + 1]; e++) {
        if (cause - cause % n + g->edges[e].next * n + g->edges[e].to == at) {
            return true;
        }
    }
    return false;
}

// An operation starts at the very moment at which its cause ends; busy and exposed times of the
// compute lane fill the period.
static void test_causes(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (int round = 0; round < 200; round++) {
        struct graph g;
        struct error err = {0};
        struct lane_times times;
        random_graph(&g, &rng, 1 + rng_below(&rng, 60), true);
        double *work = random_work(&rng, g.n_ops, false);
        struct simulation in = {
            .graph = &g, .work = work, .link = random_link(&rng, false), .steps = 6};
        struct timing *timings = test_alloc(in.steps * g.n_ops, sizeof *timings);
        assert_int_equal(simulate(&in, timings, &err), STATUS_OK);
        for (size_t i = 0; i < in.steps * g.n_ops; i++) {
            const struct timing *t = timings + i;
            if (t->cause == TIMING_NONE) {
                assert_true(t->start == 0);
            } else {
                assert_true(timings[t->cause].end == t->start);
                assert_true(may_cause(&g, t->cause, i));
            }
        }
        lane_times(&times, &g, timings, 2, in.steps);
        double sum = times.busy_s[LANE_COMPUTE];
        for (int l = 0; l < LANES; l++) {
            assert_true(times.busy_s[l] <= times.period_s * (1 + 1e-9));
            sum += times.exposed_s[l];
        }
        assert_true(fabs(sum - times.period_s) < 1e-9);
        assert_true(times.exposed_s[LANE_COMPUTE] < 1e-9);
        free(timings);
        free(work);
        graph_free(&g);
    }
}

// ---- by hand ------------------------------------------------------------------------------------

static void run(struct graph *g, const double *work, struct device_link link, bool fifo,
                size_t steps, struct timing *timings)
{
    struct error err = {0};
    struct simulation in = {.graph = g, .work = work, .link = link, .fifo = fifo, .steps = steps};
    assert_int_equal(graph_link(g, steps > 1, &err), STATUS_OK);
    assert_int_equal(simulate(&in, timings, &err), STATUS_OK);
}

static void expect(const struct timing *t, double start, double end)
{
    assert_true(fabs(t->start - start) < 1e-12 && fabs(t->end - end) < 1e-12);
}

// In: 1 s of latency, then 10 bytes. Out: the same from 4 s on. Both move from 5 s.
static void test_link_is_shared(void **state)
{
    struct graph g = {0};
    struct timing t[3];
    struct device_link link = {
        .latency_s = 1, .in = 2, .out = 2, .in_duplex = 0.5, .out_duplex = 1};
    const double work[] = {10, 4, 10};
    (void)state;
    graph_add(&g, 0, LANE_COPY_IN, 0, 0);
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_X, 0, 0);
    graph_add(&g, 0, LANE_COPY_OUT, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_X, 0, 0);
    run(&g, work, link, false, 1, t);
    expect(t + 0, 0, 9);    // 8 bytes by 5 s, the others at half a byte per second
    expect(t + 2, 4, 12);   // 4 bytes by 9 s, the others alone
    link.in_duplex = 0.125; // 16 s for 2 bytes, but for the end of the other
    run(&g, work, link, false, 1, t);
    expect(t + 2, 4, 15);
    expect(t + 0, 0, 15 + (2 - 10 * 0.125) / 2);
    link = (struct device_link){.latency_s = 1};
    run(&g, work, link, false, 1, t);
    expect(t + 0, 0, 1);
    expect(t + 2, 4, 5);
    graph_free(&g);
}

// The host is busy until 4 s; then 3 is ready since 1 s and 2 since 2 s.
static void test_orders(void **state)
{
    struct graph g = {0};
    struct timing t[5];
    const double work[] = {4, 1, 1, 1, 1};
    (void)state;
    graph_add(&g, 0, LANE_HOST, 0, 0);
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_X, 1, 0);
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_X, 2, 0);
    graph_add(&g, 0, LANE_HOST, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_X, 2, 0);
    graph_add(&g, 0, LANE_HOST, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_X, 1, 0);
    run(&g, work, (struct device_link){0}, false, 1, t);
    expect(t + 3, 4, 5);
    expect(t + 4, 5, 6);
    run(&g, work, (struct device_link){0}, true, 1, t);
    expect(t + 3, 5, 6);
    expect(t + 4, 4, 5);
    graph_free(&g);
}

// Forward 2 s, gradient out 3 s, Adam 4 s, and the next forward waits: 9 s a step.
static void test_exposed(void **state)
{
    struct graph g = {0};
    struct timing t[12];
    struct lane_times times;
    const double work[] = {2, 3, 4};
    (void)state;
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_PARAMS, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_GRADS, 0, 0);
    graph_add(&g, 0, LANE_COPY_OUT, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_GRADS, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_HOST_GRADS, 0, 0);
    graph_add(&g, 0, LANE_HOST, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_HOST_GRADS, 0, 0);
    graph_access(&g, ACCESS_UPDATE, BUF_PARAMS, 0, 0);
    run(&g, work, (struct device_link){.out = 1, .out_duplex = 1}, false, 4, t);
    lane_times(&times, &g, t, 1, 4);
    assert_true(times.period_s == 9);
    assert_true(times.busy_s[LANE_COMPUTE] == 2 && times.exposed_s[LANE_COMPUTE] == 0);
    assert_true(times.busy_s[LANE_COPY_OUT] == 3 && times.exposed_s[LANE_COPY_OUT] == 3);
    assert_true(times.busy_s[LANE_HOST] == 4 && times.exposed_s[LANE_HOST] == 4);
    assert_true(times.busy_s[LANE_COPY_IN] == 0 && times.exposed_s[LANE_COPY_IN] == 0);
    // Measured: half a second between the end of Adam and the start of forward.
    for (size_t i = 3; i < 12; i++) {
        t[i].start += 0.5 * (double)(i / 3);
        t[i].end += 0.5 * (double)(i / 3);
    }
    lane_times(&times, &g, t, 1, 4);
    assert_true(times.period_s == 9.5 && times.exposed_s[LANE_COMPUTE] == 0.5);
    assert_true(times.exposed_s[LANE_HOST] == 4 && times.exposed_s[LANE_COPY_OUT] == 3);
    graph_free(&g);
}

// Nothing joins the steps, but the third one waits for the first.
static void test_two_steps_in_flight(void **state)
{
    struct graph g = {0};
    struct timing t[8];
    const double work[] = {1, 5};
    (void)state;
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_add(&g, 0, LANE_HOST, 0, 0);
    run(&g, work, (struct device_link){0}, false, 4, t);
    expect(t + 2, 1, 2);
    expect(t + 4, 5, 6);
    expect(t + 6, 10, 11);
    assert_int_equal(t[4].cause, 1);
    graph_free(&g);
}

// A list that is not in the order of its edges never ends: an error, not a hang.
static void test_deadlock(void **state)
{
    struct graph g = {0};
    struct error err = {0};
    struct timing t[2];
    const double work[] = {1, 1};
    (void)state;
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_X, 0, 0);
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_X, 0, 0);
    assert_int_equal(graph_link(&g, false, &err), STATUS_OK);
    g.edges[0].from = 1;
    g.edges[0].to = 0;
    g.first_edge[1] = 0;
    struct simulation in = {.graph = &g, .work = work, .steps = 1};
    assert_int_equal(simulate(&in, t, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "2 operations wait"));
    graph_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_slow_clock),
        cmocka_unit_test(test_causes),
        cmocka_unit_test(test_link_is_shared),
        cmocka_unit_test(test_orders),
        cmocka_unit_test(test_exposed),
        cmocka_unit_test(test_two_steps_in_flight),
        cmocka_unit_test(test_deadlock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
