// The executor on a device that queues, with random steps on all lanes, the comm lane among them:
// no two operations that an edge joins are raced for, each lane that has to keeps to program order,
// an operation by the host finds its inputs there. And what becomes of it when one kind of waiting
// is forgotten.
#include "hete/execute.h"
#include "kernels/driver.h"
#include "test/cmocka.h"
#include "test/cuda/hasty.h"
#include "test/cuda/sim.h"
#include "test/random_graph.h"
#include "test/tiny.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SEEDS 40
#define STEPS 4
#define CELL  ((size_t)64) // bytes of a buffer or slice, in pinned memory
#define CELLS ((size_t)BUFFER_KINDS * 64 * 4)

static size_t awaited;

struct machine {
    const struct graph *g;
    struct device *dev;
    char *cells, *scratch; // scratch: a cell of device memory for each lane
    uint64_t last[LANES];  // position of the operation before
    bool disorder;
};

static char *cell_of(const struct machine *m, const struct access *a)
{
    return m->cells + (((size_t)a->kind * 64 + a->index) * 4 + a->slice) * CELL;
}

// By the host: now. On a lane of the device: a copy from or to the buffer on its stream.
static void touch(const struct machine *m, const struct op *op, const struct access *a, bool host)
{
    static const enum device_lane lanes[] = {[LANE_COMPUTE] = DEVICE_COMPUTE,
                                             [LANE_COPY_IN] = DEVICE_COPY_IN,
                                             [LANE_COPY_OUT] = DEVICE_COPY_OUT,
                                             [LANE_COMM] = DEVICE_COMM};
    char *cell = cell_of(m, a), *scratch = m->scratch + op->lane * CELL;
    if (host) {
        sim_host_touch(cell, CELL, a->mode != ACCESS_READ);
        return;
    }
    cudaStream_t stream = device_stream(m->dev, lanes[op->lane]);
    if (a->mode != ACCESS_WRITE) {
        assert_int_equal(cudaMemcpyAsync(scratch, cell, CELL, cudaMemcpyDefault, stream), 0);
    }
    if (a->mode != ACCESS_READ) {
        assert_int_equal(cudaMemcpyAsync(cell, scratch, CELL, cudaMemcpyDefault, stream), 0);
    }
}

static int run_op(void *ctx, const struct op *op, uint64_t step, struct error *err)
{
    struct machine *m = ctx;
    uint64_t at = 1 + step * m->g->n_ops + (uint64_t)(op - m->g->ops);
    bool host = op->lane == LANE_HOST || (op->lane == LANE_COMPUTE && op->by_host);
    (void)err;
    if (lane_in_order((enum lane)op->lane)) { // each on one thread
        m->disorder |= at <= m->last[op->lane];
        m->last[op->lane] = at;
    }
    const struct access *a = m->g->accesses + op->first_access;
    bool sends = op->lane == LANE_COMM && op->by_host;
    for (size_t i = 0; i < op->n_accesses && sends; i++) { // it reads before it queues anything
        if (a[i].mode == ACCESS_READ) {
            touch(m, op, a + i, true);
        }
    }
    for (size_t i = 0; i < op->n_accesses; i++) {
        if (!sends || a[i].mode != ACCESS_READ) {
            touch(m, op, a + i, host);
        }
    }
    return STATUS_OK;
}

static void open_machine(struct machine *m, struct graph *g, uint64_t seed)
{
    uint64_t rng = seed;
    struct error err;
    void *p;
    struct device_config config = {
        .kind = "cuda", .head_size = 8, .max_seq = 8, .padded_vocab = 128};
    random_graph(g, &rng, 2 + rng_below(&rng, 40), true);
    for (size_t i = 0; i < g->n_ops; i++) {
        bool may = lane_in_order((enum lane)g->ops[i].lane);
        g->ops[i].by_host = may && rng_below(&rng, 4) == 0;
    }
    *m = (struct machine){.g = g};
    assert_int_equal(device_open(&m->dev, &config, &err), STATUS_OK);
    assert_int_equal(device_arena(m->dev, LANES * CELL, &p, &err), STATUS_OK);
    m->scratch = p;
    assert_int_equal(device_host_arena(m->dev, CELLS * CELL, true, &p, &err), STATUS_OK);
    m->cells = p;
}

// What was recorded agrees with the edges, of operations on the device: its clock is another one.
static void expect_times(const struct executor *e, const struct graph *g)
{
    struct timing *times = test_alloc(EXECUTE_KEPT_STEPS * g->n_ops, sizeof *times);
    uint64_t first;
    size_t steps = execute_timings(e, times, EXECUTE_KEPT_STEPS, &first);
    assert_int_equal(steps, STEPS);
    for (size_t i = 0; i < steps * g->n_edges; i++) {
        const struct edge *edge = g->edges + i % g->n_edges;
        size_t step = i / g->n_edges, to = step + edge->next;
        const struct op *op = g->ops + edge->to;
        if (to < steps && op->lane != LANE_HOST && !op->by_host) {
            assert_true(times[to * g->n_ops + edge->to].start >=
                        times[step * g->n_ops + edge->from].end);
        }
    }
    free(times);
}

// awaits, passed: as in the driver, or replaced.
static void run(uint64_t seed, const struct device_driver *replaced, bool chaos)
{
    struct machine m;
    struct graph g;
    struct executor *e;
    struct error err = {0};
    sim_settings()->seed = seed;
    sim_settings()->schedule = seed % 3;
    open_machine(&m, &g, seed);
    struct execute_config config = {
        .run = run_op, .ctx = &m, .device = m.dev, .watchdog_s = 20, .chaos = chaos ? seed : 0};
    const struct device_driver *whole = m.dev->driver;
    sim_forget_reports();
    awaited = 0;
    m.dev->driver = replaced ? replaced : whole;
    assert_int_equal(execute_open(&e, &config, &err), STATUS_OK);
    assert_int_equal(execute_load(e, &g, false, NULL, &err), STATUS_OK);
    for (uint64_t step = 0; step < STEPS; step++) {
        assert_int_equal(execute_start(e, step, &err), STATUS_OK);
        if (step && execute_wait(e, step - 1, &err)) {
            fail_msg("seed %llu: %s", (unsigned long long)seed, err.text);
        }
    }
    assert_int_equal(execute_wait(e, STEPS - 1, &err), STATUS_OK);
    if (!replaced) {
        expect_times(e, &g);
    }
    assert_false(m.disorder && !chaos);
    execute_close(e);
    m.dev->driver = whole;
    device_sync(m.dev);
    device_close(m.dev);
    graph_free(&g);
}

static void test_clean(void **state)
{
    uint64_t seed = test_seed();
    (void)state;
    for (uint64_t i = 0; i < 2 * SEEDS; i++) {
        run(seed + i, NULL, i % 2);
        for (int kind = 0; kind < SIM_KINDS; kind++) {
            if (sim_reports((enum sim_kind)kind)) {
                fail_msg("seed %llu: %s", (unsigned long long)(seed + i), sim_last_report());
            }
        }
    }
}

// ---- what is forgotten --------------------------------------------------------------------------

static struct device_driver broken;
static const struct device_driver *whole;
static enum device_lane forgetful;

static void no_await(struct device *dev, enum device_lane lane, size_t mark)
{
    if (lane == forgetful) {
        awaited++;
    } else {
        whole->await(dev, lane, mark);
    }
}

static void take_driver(void)
{
    struct machine m;
    struct graph g;
    open_machine(&m, &g, 1);
    whole = m.dev->driver;
    broken = *whole;
    device_close(m.dev);
    graph_free(&g);
}

// A lane whose stream does not wait for the others.
static void test_no_await(void **state)
{
    uint64_t seed = test_seed();
    size_t seen = 0, forgotten = 0;
    forgetful = *(const enum device_lane *)*state;
    take_driver();
    broken.await = no_await;
    sim_expect_reports(true);
    for (uint64_t i = 0; i < SEEDS; i++) {
        run(seed + i, &broken, false);
        forgotten += awaited > 0;
        seen += awaited > 0 && sim_reports(SIM_STREAM_RACE) > 0;
    }
    sim_expect_reports(false);
    sim_forget_reports();
    // Where the operation before it has touched things by the host alone nothing is raced for.
    assert_true(forgotten > SEEDS / 4 && seen >= forgotten * 3 / 4);
}

// The host takes for done what is only queued.
static void test_not_done(void **state)
{
    uint64_t seed = test_seed();
    size_t seen = 0;
    (void)state;
    take_driver();
    broken.passed = passed_at_once;
    broken.passed_s = passed_now;
    sim_expect_reports(true);
    for (uint64_t i = 0; i < SEEDS; i++) {
        run(seed + i, &broken, false);
        seen += sim_reports(SIM_STREAM_RACE) > 0;
    }
    sim_expect_reports(false);
    sim_forget_reports();
    assert_true(seen > SEEDS / 4);
}

// ---- patience -----------------------------------------------------------------------------------

#define LONG_S 0.6 // how long the operations take, and
#define DOG_S  0.2 // how long nothing may finish

static double begun_s;

static bool passed_late(struct device *dev, size_t mark)
{
    return clock_s() > begun_s + LONG_S && whole->passed(dev, mark);
}

static size_t told_others, told_here;

static void count_told(void *ctx, bool for_others)
{
    (void)ctx;
    told_others += for_others;
    told_here += !for_others;
}

// An operation of the comm lane and one of the compute lane; the second waits for the first or,
// apart, takes long at the same time.
static int wait_for_two(bool comm_first, bool apart, struct error *err)
{
    struct machine m;
    struct graph g, spare;
    struct executor *e;
    open_machine(&m, &spare, 1);
    g = (struct graph){0};
    for (size_t i = 0; i < 2; i++) {
        bool comm = comm_first == (i == 0);
        graph_add(&g, 0, comm ? LANE_COMM : LANE_COMPUTE, (unsigned)i, 0);
        graph_access(&g, ACCESS_UPDATE, apart && i ? BUF_X : BUF_GRADS, 0, 0);
    }
    assert_int_equal(graph_link(&g, false, err), STATUS_OK);
    m.g = &g;
    struct execute_config config = {
        .run = run_op, .ctx = &m, .device = m.dev, .watchdog_s = DOG_S, .waits = count_told};
    whole = m.dev->driver;
    broken = *whole;
    broken.passed = passed_late;
    m.dev->driver = &broken;
    told_others = told_here = 0;
    assert_int_equal(execute_open(&e, &config, err), STATUS_OK);
    assert_int_equal(execute_load(e, &g, false, NULL, err), STATUS_OK);
    begun_s = clock_s();
    int status = execute_start(e, 0, err);
    status = status ? status : execute_wait(e, 0, err);
    execute_close(e);
    m.dev->driver = whole;
    device_sync(m.dev);
    device_close(m.dev);
    graph_free(&g);
    graph_free(&spare);
    return status;
}

// What waits for an exchange is queued behind it: that lasts as long as the slowest rank.
static void test_patience(void **state)
{
    struct error err = {0};
    (void)state;
    if (wait_for_two(true, false, &err)) {
        fail_msg("%s", err.text);
    }
    assert_true(told_others > 0);
    assert_int_equal(told_here, 1);
}

// Not so what this rank's own device does, be there an exchange that waits for it or one that does
// not.
static void test_no_patience(void **state)
{
    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        struct error err = {0};
        assert_int_equal(wait_for_two(false, apart, &err), STATUS_FAIL);
        assert_non_null(strstr(err.text, "nothing has finished for 0.2 s"));
        assert_non_null(strstr(err.text, "compute lane: "));
        assert_int_equal(told_others, 0);
    }
}

int main(void)
{
    static enum device_lane compute = DEVICE_COMPUTE, comm = DEVICE_COMM;
    const struct CMUnitTest tests[] = {
        {"edges hold on all lanes", test_clean, NULL, NULL, NULL},
        {"compute that does not wait", test_no_await, NULL, NULL, &compute},
        {"comm that does not wait", test_no_await, NULL, NULL, &comm},
        {"what is queued is not done", test_not_done, NULL, NULL, NULL},
        {"an exchange takes as long as the slowest rank", test_patience, NULL, NULL, NULL},
        {"other operations do not", test_no_patience, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("lanes", tests, NULL, NULL);
}
