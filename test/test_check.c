// The checker against all pairs of accesses and the closure of all paths, on random steps with
// edges taken away; layouts with one thing wrong.
#include "hete/check.h"

#include "test/cmocka.h"
#include "test/random_graph.h"
#include "test/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- graphs -------------------------------------------------------------------------------------

static bool races_at(const struct graph *g, const bool *path, size_t i, size_t j)
{
    size_t n = g->n_ops;
    return ops_conflict(g, i % n, j % n) && !path[i * 2 * n + j];
}

static bool has_race(const struct graph *g, const bool *path)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        for (size_t j = i + 1; j < (g->repeats ? 2 : 1) * g->n_ops; j++) {
            if (races_at(g, path, i, j)) {
                return true;
            }
        }
    }
    return false;
}

static void insert_edge(struct graph *g, size_t e, struct edge edge)
{
    memmove(g->edges + e + 1, g->edges + e, (g->n_edges - e) * sizeof *g->edges);
    g->edges[e] = edge;
    g->n_edges++;
    for (size_t i = edge.from + 1; i <= g->n_ops; i++) {
        g->first_edge[i]++;
    }
}

// The verdict is the closure's, and the two operations that the error names do race.
static bool expect_verdict(const struct graph *g)
{
    struct error err = {0};
    bool *path = graph_paths(g), race = has_race(g, path);
    int status = check_graph(g, &err);
    assert_int_equal(status, race ? STATUS_FAIL : STATUS_OK);
    if (race) {
        unsigned from, to;
        const char *joins = strstr(err.text, "joins operations ");
        assert_non_null(joins);
        assert_int_equal(sscanf(joins, "joins operations %u and %u", &from, &to), 2);
        bool next = strstr(err.text, " of the next step") != NULL;
        assert_true(from < g->n_ops && to < g->n_ops && (next || from < to));
        assert_true(races_at(g, path, from, to + (next ? g->n_ops : 0)));
        assert_non_null(strstr(err.text, op_name(g->ops[from].kind)));
        assert_non_null(strstr(err.text, op_name(g->ops[to].kind)));
    }
    free(path);
    return race;
}

static void test_against_closure(void **state)
{
    uint64_t rng = test_seed();
    size_t races = 0, rounds = 400;
    (void)state;
    for (size_t round = 0; round < rounds; round++) {
        struct graph g;
        random_graph(&g, &rng, 1 + rng_below(&rng, 40), rng_below(&rng, 3) > 0);
        for (size_t drop = rng_below(&rng, 4); drop > 0 && g.n_edges; drop--) {
            graph_remove_edge(&g, rng_below(&rng, g.n_edges));
        }
        races += expect_verdict(&g);
        graph_free(&g);
    }
    assert_true(races > rounds / 10 && races < rounds - rounds / 10);
}

// fairscale #496, DeepSpeed #1219: an edge that is missing is found, whichever it is, unless other
// edges make the same path.
static void test_every_edge_matters(void **state)
{
    uint64_t rng = test_seed();
    size_t redundant = 0, needed = 0;
    (void)state;
    for (size_t round = 0; round < 40; round++) {
        struct graph g;
        random_graph(&g, &rng, 5 + rng_below(&rng, 30), round % 4 > 0);
        assert_false(expect_verdict(&g));
        for (size_t e = 0; e < g.n_edges; e++) {
            struct edge edge = g.edges[e];
            graph_remove_edge(&g, e);
            bool *path = graph_paths(&g);
            bool joined = path[edge.from * 2 * g.n_ops + edge.to + (edge.next ? g.n_ops : 0)];
            free(path);
            assert_int_equal(expect_verdict(&g), !joined);
            *(joined ? &redundant : &needed) += 1;
            insert_edge(&g, e, edge);
        }
        graph_free(&g);
    }
    assert_true(redundant > 100 && needed > 100);
}

// Edges that lead nowhere, back, or lie where nobody looks for them.
static void test_malformed_edges(void **state)
{
    struct graph g = {0};
    struct error err = {0};
    (void)state;
    graph_add(&g, 0, LANE_COMPUTE, 0, 0);
    graph_access(&g, ACCESS_WRITE, BUF_X, 0, 0);
    graph_add(&g, 0, LANE_HOST, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_X, 0, 0);
    assert_int_equal(graph_link(&g, false, &err), STATUS_OK);
    assert_int_equal(check_graph(&g, &err), STATUS_OK);
    const struct edge bad[] = {{0, 0, false}, {0, 2, false}, {0, 1, true}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        g.edges[0] = bad[i];
        assert_int_equal(check_graph(&g, &err), STATUS_FAIL);
        assert_non_null(strstr(err.text, "does not lead forward"));
    }
    g.edges[0] = (struct edge){0, 1, false};
    g.first_edge[1] = 0;
    assert_int_equal(check_graph(&g, &err), STATUS_FAIL);
    g.first_edge[1] = 1;
    g.first_edge[2] = 0;
    assert_int_equal(check_graph(&g, &err), STATUS_FAIL);
    graph_free(&g);
}

// ---- layouts ------------------------------------------------------------------------------------

static struct region params[] = {{SPACE_DEVICE, 0, 1024}, {SPACE_DEVICE, 1536, 512}};
static struct region x[] = {{SPACE_DEVICE, 1024, 512}, {SPACE_DEVICE, 1280, 0}};
static struct region host[] = {{SPACE_PINNED, 0, 256}, {SPACE_HOST, 0, 256}};

static void expect_layout(const char *problem)
{
    struct error err = {0};
    struct layout layout = {
        .total = {2048, 256, 256},
        .indices = {[BUF_PARAMS] = 2, [BUF_X] = 2, [BUF_HOST_PARAMS] = 2},
        .region = {[BUF_PARAMS] = params, [BUF_X] = x, [BUF_HOST_PARAMS] = host}};
    int status = check_layout(&layout, &err);
    assert_int_equal(status, problem ? STATUS_FAIL : STATUS_OK);
    if (problem && !strstr(err.text, problem)) {
        fail_msg("'%s' instead of '%s'", err.text, problem);
    }
}

// ggml #1501: buffers that share memory.
static void test_layouts(void **state)
{
    (void)state;
    expect_layout(NULL);
    x[0].bytes = 513;
    expect_layout("boundary 0 and parameters 1 overlap at byte 1536");
    x[0].bytes = 512;
    params[1].offset = 0;
    expect_layout("overlap at byte 0 of device memory");
    params[1].offset = 1537;
    expect_layout("not aligned");
    params[1].offset = 1536;
    params[1].bytes = 513;
    expect_layout("leaves the 2048 bytes");
    params[1].bytes = SIZE_MAX - 1000;
    expect_layout("leaves the 2048 bytes");
    params[1].bytes = 512;
    host[1].space = SPACE_PINNED;
    expect_layout("overlap at byte 0 of pinned memory");
    host[1].space = SPACE_HOST;
    expect_layout(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_closure),
        cmocka_unit_test(test_every_edge_matters),
        cmocka_unit_test(test_malformed_edges),
        cmocka_unit_test(test_layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
