#include "test/random_graph.h"

#include "hete/step.h"
#include "test/cmocka.h"
#include "test/tiny.h"

#include <string.h>

enum { SLICES = 3 };

// One operation works on all slices of a unit's gradients or parameters, or on one of them.
static void sliced_access(struct graph *g, uint64_t *rng, enum access_mode mode,
                          enum buffer_kind kind, size_t index)
{
    if (rng_below(rng, 2)) {
        graph_access(g, mode, kind, index, g->ops[g->n_ops - 1].slice);
        return;
    }
    for (size_t s = 0; s < SLICES; s++) {
        graph_access(g, mode, kind, index, s);
    }
}

static void random_access(struct graph *g, uint64_t *rng, size_t buffers)
{
    static const enum buffer_kind whole[] = {BUF_X, BUF_DX, BUF_WORK, BUF_SCALE};
    static const enum buffer_kind sliced[] = {BUF_PARAMS, BUF_GRADS, BUF_HOST_MOMENTS};
    size_t which = rng_below(rng, 10), index = rng_below(rng, buffers);
    enum access_mode mode = which < 5 ? ACCESS_READ : which < 7 ? ACCESS_UPDATE : ACCESS_WRITE;
    if (rng_below(rng, 2)) {
        graph_access(g, mode, whole[rng_below(rng, 4)], index, 0);
    } else {
        sliced_access(g, rng, mode, sliced[rng_below(rng, 3)], index);
    }
}

void random_graph(struct graph *g, uint64_t *rng, size_t n, bool repeats)
{
    struct error err = {0};
    size_t buffers = 1 + rng_below(rng, 1 + n / 4);
    *g = (struct graph){0};
    for (size_t i = 0; i < n; i++) {
        struct op *op = graph_add(g, (uint16_t)rng_below(rng, OP_KINDS),
                                  (enum lane)rng_below(rng, LANES), i, rng_below(rng, 2));
        op->slice = (uint8_t)rng_below(rng, SLICES);
        for (size_t a = rng_below(rng, 4); a > 0; a--) {
            random_access(g, rng, buffers);
        }
    }
    assert_int_equal(graph_link(g, repeats, &err), STATUS_OK);
}

bool ops_conflict(const struct graph *g, size_t i, size_t j)
{
    const struct op *a = g->ops + i, *b = g->ops + j;
    for (size_t x = 0; x < a->n_accesses; x++) {
        for (size_t y = 0; y < b->n_accesses; y++) {
            const struct access *p = g->accesses + a->first_access + x;
            const struct access *q = g->accesses + b->first_access + y;
            if (p->kind == q->kind && p->index == q->index && p->slice == q->slice &&
                (p->mode != ACCESS_READ || q->mode != ACCESS_READ)) {
                return true;
            }
        }
    }
    return false;
}

bool *graph_paths(const struct graph *g)
{
    size_t n = g->n_ops, two = 2 * n;
    bool *path = test_alloc(two * two + 1, sizeof *path);
    for (size_t e = 0; e < g->n_edges; e++) {
        const struct edge *edge = g->edges + e;
        path[edge->from * two + edge->to + (edge->next ? n : 0)] = true;
        if (!edge->next) {
            path[(n + edge->from) * two + n + edge->to] = true;
        }
    }
    for (size_t k = 0; k < two; k++) {
        for (size_t i = 0; i < k; i++) {
            for (size_t j = k + 1; path[i * two + k] && j < two; j++) {
                path[i * two + j] |= path[k * two + j];
            }
        }
    }
    return path;
}

void graph_remove_edge(struct graph *g, size_t e)
{
    uint32_t from = g->edges[e].from;
    memmove(g->edges + e, g->edges + e + 1, (g->n_edges - e - 1) * sizeof *g->edges);
    g->n_edges--;
    for (size_t i = from + 1; i <= g->n_ops; i++) {
        g->first_edge[i]--;
    }
}
