// The list of operations and the edges that are derived from it; and whether what a session's
// operations declare is what they touch.
//
// The second needs the inside of a session. Each operation is run twice from the same bytes of all
// memory, the device's and the host's: as it is; and with every byte that it does not declare
// overwritten, and every byte that it says it overwrites full of NaN. What it declares to write
// must come out the same, and no other byte may change.
#include "hete/inside.h"

#include "test/cmocka.h"
#include "test/random_graph.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

// ---- the list -----------------------------------------------------------------------------------

struct visit {
    const struct graph *graph;
    size_t n, fails_at;
};

static int visit(void *ctx, const struct op *op, uint64_t step, struct error *err)
{
    struct visit *v = ctx;
    assert_ptr_equal(op, v->graph->ops + v->n);
    assert_int_equal(step, 7);
    return v->n++ == v->fails_at ? error_set(err, STATUS_USAGE, "as told") : STATUS_OK;
}

// Thousands of operations with 0 to 6 accesses each come back as they were added, and run in order
// until one fails.
static void test_order(void **state)
{
    struct graph g = {0};
    struct error err = {0};
    (void)state;
    for (size_t i = 0; i < 5000; i++) {
        graph_add(&g, (uint16_t)(i % 30), (enum lane)(i % 4), i, i * 3)->slice = (uint8_t)(i % 9);
        for (size_t a = 0; a < i % 7; a++) {
            graph_access(&g, (enum access_mode)(a % 3), (enum buffer_kind)((i + a) % BUFFER_KINDS),
                         i * 10 + a, a);
        }
    }
    assert_false(g.failed);
    assert_int_equal(g.n_ops, 5000);
    for (size_t i = 0; i < 5000; i++) {
        const struct op *op = g.ops + i;
        assert_int_equal(op->kind, i % 30);
        assert_int_equal(op->lane, i % 4);
        assert_int_equal(op->unit, i);
        assert_int_equal(op->micro, i * 3);
        assert_int_equal(op->slice, i % 9);
        assert_int_equal(op->n_accesses, i % 7);
        for (size_t a = 0; a < op->n_accesses; a++) {
            const struct access *access = g.accesses + op->first_access + a;
            assert_int_equal(access->kind, (i + a) % BUFFER_KINDS);
            assert_int_equal(access->index, i * 10 + a);
            assert_int_equal(access->mode, a % 3);
            assert_int_equal(access->slice, a);
        }
    }
    struct visit v = {.graph = &g, .fails_at = SIZE_MAX};
    assert_int_equal(graph_run_serial(&g, 7, visit, &v, &err), STATUS_OK);
    assert_int_equal(v.n, 5000);
    v = (struct visit){.graph = &g, .fails_at = 1234};
    assert_int_equal(graph_run_serial(&g, 7, visit, &v, &err), STATUS_USAGE);
    assert_string_equal(err.text, "as told");
    assert_int_equal(v.n, 1235);
    graph_free(&g);
    assert_true(!g.ops && !g.accesses && !g.n_ops && !g.n_accesses);
    assert_int_equal(graph_run_serial(&g, 7, visit, &v, &err), STATUS_OK);
    assert_int_equal(v.n, 1235); // an empty list runs nothing
}

// ---- edges --------------------------------------------------------------------------------------

// Sorted, found from where they start, in the step or into the next one, none twice, each between
// two operations that conflict.
static void check_edges(const struct graph *g)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        assert_true(g->first_edge[i] <= g->first_edge[i + 1]);
        for (size_t e = g->first_edge[i]; e < g->first_edge[i + 1]; e++) {
            const struct edge *edge = g->edges + e;
            assert_int_equal(edge->from, i);
            assert_true(edge->next ? g->repeats : edge->from < edge->to);
            assert_true(ops_conflict(g, edge->from, edge->to));
            for (size_t other = g->first_edge[i]; other < e; other++) {
                assert_false(edge->to == g->edges[other].to && edge->next == g->edges[other].next);
            }
        }
    }
    assert_int_equal(g->first_edge[0], 0);
    assert_int_equal(g->first_edge[g->n_ops], g->n_edges);
}

// Any two operations of two steps that follow each other, if they conflict, are joined by a path.
static void check_paths(const struct graph *g)
{
    size_t n = g->n_ops, two = 2 * n;
    bool *path = graph_paths(g);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i + 1; j < (g->repeats ? two : n); j++) {
            if (ops_conflict(g, i, j % n) && !path[i * two + j]) {
                fail_msg("no path from operation %zu to %zu", i, j);
            }
        }
    }
    free(path);
}

static void test_link(void **state)
{
    uint64_t rng = test_seed();
    size_t edges = 0, into_next = 0;
    (void)state;
    for (size_t round = 0; round < 500; round++) {
        struct graph g;
        struct error err = {0};
        bool repeats = rng_below(&rng, 3) > 0;
        random_graph(&g, &rng, rng_below(&rng, 50), repeats);
        check_edges(&g);
        check_paths(&g);
        size_t n_edges = g.n_edges;
        edges += n_edges;
        for (size_t e = 0; e < n_edges; e++) {
            into_next += g.edges[e].next;
        }
        assert_int_equal(graph_link(&g, repeats, &err), STATUS_OK); // once more: the same edges
        assert_int_equal(g.n_edges, n_edges);
        check_edges(&g);
        graph_free(&g);
    }
    assert_true(into_next > 1000 && edges > 2 * into_next);
}

// By hand: a write waits for the reads since the write before, and not for that write as well.
// The same list in memory whose bytes between the fields are others. Only for its hash.
static void copy_list(struct graph *copy, const struct graph *g, int fill)
{
    *copy = *g;
    copy->ops = test_alloc(g->n_ops + 1, sizeof *g->ops);
    copy->accesses = test_alloc(g->n_accesses + 1, sizeof *g->accesses);
    memset(copy->ops, fill, g->n_ops * sizeof *g->ops);
    memset(copy->accesses, fill, g->n_accesses * sizeof *g->accesses);
    for (size_t i = 0; i < g->n_ops; i++) {
        struct op *to = copy->ops + i;
        const struct op *from = g->ops + i;
        to->kind = from->kind;
        to->lane = from->lane;
        to->slice = from->slice;
        to->by_host = from->by_host;
        to->unit = from->unit;
        to->micro = from->micro;
        to->first_access = from->first_access;
        to->n_accesses = from->n_accesses;
    }
    for (size_t i = 0; i < g->n_accesses; i++) {
        copy->accesses[i].kind = g->accesses[i].kind;
        copy->accesses[i].mode = g->accesses[i].mode;
        copy->accesses[i].slice = g->accesses[i].slice;
        copy->accesses[i].index = g->accesses[i].index;
    }
}

// One bit of a field, and back.
#define CHANGED(g, hash, field, rng)                                                               \
    do {                                                                                           \
        __typeof__(field) was = (field);                                                           \
        (field) ^= (__typeof__(field))(1ull << rng_below((rng), 8 * sizeof was));                  \
        assert_true(graph_hash(g) != (hash));                                                      \
        (field) = was;                                                                             \
    } while (0)

static void check_changes(struct graph *g, uint64_t hash, uint64_t *rng)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        struct op *op = g->ops + i;
        CHANGED(g, hash, op->kind, rng);
        CHANGED(g, hash, op->lane, rng);
        CHANGED(g, hash, op->slice, rng);
        CHANGED(g, hash, op->unit, rng);
        CHANGED(g, hash, op->micro, rng);
        op->by_host = !op->by_host;
        assert_true(graph_hash(g) != hash);
        op->by_host = !op->by_host;
        if (op->n_accesses) {
            op->n_accesses--;
            assert_true(graph_hash(g) != hash);
            op->n_accesses++;
        }
    }
    for (size_t i = 0; i < g->n_accesses; i++) {
        CHANGED(g, hash, g->accesses[i].kind, rng);
        CHANGED(g, hash, g->accesses[i].mode, rng);
        CHANGED(g, hash, g->accesses[i].slice, rng);
        CHANGED(g, hash, g->accesses[i].index, rng);
    }
}

static void test_hash(void **state)
{
    uint64_t rng = test_seed();
    (void)state;
    for (size_t round = 0; round < 100; round++) {
        struct graph g, a, b;
        random_graph(&g, &rng, 1 + rng_below(&rng, 30), rng_below(&rng, 2));
        copy_list(&a, &g, 0);
        copy_list(&b, &g, 0xa5);
        uint64_t hash = graph_hash(&g);
        assert_true(graph_hash(&a) == hash && graph_hash(&b) == hash);
        check_changes(&b, hash, &rng);
        assert_true(graph_hash(&b) == hash);
        b.n_ops--;
        assert_true(graph_hash(&b) != hash);
        for (size_t i = 0; i < a.n_ops; i++) { // an access of one, now of its neighbour
            if (i > 0 && a.ops[i].n_accesses > 0) {
                a.ops[i - 1].n_accesses++;
                a.ops[i].first_access++;
                a.ops[i].n_accesses--;
                assert_true(graph_hash(&a) != hash);
                break;
            }
        }
        free(a.ops);
        free(a.accesses);
        free(b.ops);
        free(b.accesses);
        graph_free(&g);
    }
}

static void test_link_by_hand(void **state)
{
    static const struct edge expected[] = {
        {0, 1, false}, {0, 2, false}, {1, 3, false}, {2, 3, false}, {3, 0, true}};
    static const enum access_mode modes[] = {ACCESS_WRITE, ACCESS_READ, ACCESS_READ, ACCESS_UPDATE};
    struct graph g = {0};
    struct error err = {0};
    (void)state;
    for (size_t i = 0; i < COUNT(modes); i++) {
        graph_add(&g, 0, LANE_HOST, 0, 0);
        graph_access(&g, modes[i], BUF_X, 3, 1);
        graph_access(&g, modes[i], BUF_X, 3, 2); // the same conflict twice: one edge
    }
    graph_add(&g, 0, LANE_HOST, 0, 0);
    graph_access(&g, ACCESS_READ, BUF_X, 3, 0); // a slice of its own
    assert_int_equal(graph_link(&g, true, &err), STATUS_OK);
    assert_int_equal(g.n_edges, COUNT(expected));
    for (size_t e = 0; e < COUNT(expected); e++) {
        assert_int_equal(g.edges[e].from, expected[e].from);
        assert_int_equal(g.edges[e].to, expected[e].to);
        assert_int_equal(g.edges[e].next, expected[e].next);
    }
    graph_free(&g);
}

// Run by mpirun, the sessions below are those of several ranks; then each of these does the same.
static struct comm *comm;

// ---- sessions and their graphs ------------------------------------------------------------------

enum which { STEP, LOSS, DECODE, GRAPHS };

struct graph_case {
    const char *name;
    enum dtype dtype;
    size_t micro_batches;
    bool eval;
    size_t plans; // random ones; 0: resident
};

static const struct graph_case cases[] = {
    {"resident, fp32", DTYPE_FP32, 1, false, 0},
    {"resident, fp32, 3 micro-batches", DTYPE_FP32, 3, false, 0},
    {"resident, bf16", DTYPE_BF16, 1, false, 0},
    {"resident, bf16, 3 micro-batches", DTYPE_BF16, 3, false, 0},
    {"resident, no training", DTYPE_FP32, 1, true, 0},
    {"plans, fp32", DTYPE_FP32, 1, false, 6},
    {"plans, fp32, 2 micro-batches", DTYPE_FP32, 2, false, 4},
    {"plans, bf16", DTYPE_BF16, 1, false, 6},
    {"plans, bf16, 2 micro-batches", DTYPE_BF16, 2, false, 4},
    {"plans, no training", DTYPE_BF16, 1, true, 4},
};

// A session on the plain cpu device, whose memory the test can look at.
static void open_case(struct tiny *t, const struct graph_case *c, uint64_t *rng)
{
    static struct plan plan;
    struct tiny_shape shape = {.layers = 3,
                               .heads = 2,
                               .hidden = 12,
                               // No padding, which would be all that a rank has.
                               .vocab = comm_ranks(comm) > 1 ? 128 : 20,
                               .max_seq = 9,
                               .head_rows = 7,
                               .B = 2,
                               .T = 9,
                               .micro_batches = c->micro_batches,
                               .dtype = c->dtype,
                               .threads = 1,
                               .eval = c->eval,
                               .comm = comm_ranks(comm) > 1 ? comm : NULL};
    if (c->plans) {
        struct gpt gpt;
        struct gpt_config config = tiny_config(&shape);
        gpt_open(&gpt, &config);
        tiny_random_plan(&plan, rng, &gpt.model, &shape, rng_below(rng, 2));
        for (size_t u = 0; u < plan.units && c->eval; u++) {
            plan.unit[u].recompute = false; // there is no backward to do it for
        }
        shape.plan = &plan;
    }
    tiny_open(t, &shape);
}

static struct graph *graph_of(struct session *s, enum which which)
{
    return which == STEP ? &s->step : which == LOSS ? &s->loss : &s->decode;
}

typedef void (*session_fn)(struct session *s, const struct graph *g, enum which which,
                           uint64_t *rng);

// Calls f for the graphs of every plan of the case.
static void each_graph(const struct graph_case *c, session_fn f)
{
    uint64_t seed = test_seed();
    if (c->eval && comm_ranks(comm) > 1) {
        skip(); // every rank generates by itself
    }
    for (size_t p = 0; p < (c->plans ? c->plans : 1); p++) {
        struct tiny t;
        uint64_t rng = seed + p;
        open_case(&t, c, &rng);
        for (enum which which = c->eval ? LOSS : STEP; which < GRAPHS; which++) {
            tiny_scramble(&t, 1);
            t.s->loaded = graph_of(t.s, which);
            f(t.s, t.s->loaded, which, &rng);
        }
        tiny_close(&t);
    }
}

// What a session keeps from step to step; tokens of a policy hold nothing.
static bool persistent(const struct access *a, enum which which)
{
    switch (a->kind) {
    case BUF_PARAMS:
    case BUF_PARAM_SHARD:
    case BUF_MASTER:
    case BUF_MOMENTS:
    case BUF_HOST_PARAMS:
    case BUF_HOST_MASTER:
    case BUF_HOST_MOMENTS:
    case BUF_TOKEN:
        return true;
    default: // decoding reads the keys and values of the tokens before
        return which == DECODE && (a->kind == BUF_KEPT || a->kind == BUF_X);
    }
}

static bool same_buffer(const struct access *a, const struct access *b)
{
    return a->kind == b->kind && a->index == b->index;
}

static bool same_slice(const struct access *a, const struct access *b)
{
    return same_buffer(a, b) && a->slice == b->slice;
}

// Is `a` written by any operation before the one at `to`?
static bool written(const struct graph *g, const struct access *a, size_t to)
{
    for (size_t i = 0; i < g->ops[to].first_access; i++) {
        const struct access *b = g->accesses + i;
        if (b->mode != ACCESS_READ && same_slice(a, b)) {
            return true;
        }
    }
    return false;
}

// What an operation reads was written before it in the list, or is the state that a session keeps;
// each operation writes something, and names no slice twice.
static void check_data_flow(struct session *s, const struct graph *g, enum which which,
                            uint64_t *rng)
{
    (void)s;
    (void)rng;
    assert_true(g->n_ops > 4);
    for (size_t i = 0; i < g->n_ops; i++) {
        const struct access *a = g->accesses + g->ops[i].first_access;
        bool writes = false;
        for (size_t k = 0; k < g->ops[i].n_accesses; k++) {
            writes = writes || a[k].mode != ACCESS_READ;
            if (a[k].mode != ACCESS_WRITE && !persistent(a + k, which) && !written(g, a + k, i)) {
                fail_msg("operation %zu (%s) reads %s %u, which nothing wrote", i,
                         op_name(g->ops[i].kind), buffer_name((enum buffer_kind)a[k].kind),
                         a[k].index);
            }
            for (size_t other = 0; other < k; other++) {
                assert_false(same_slice(a + k, a + other));
            }
        }
        assert_true(writes);
    }
}

static void test_data_flow(void **state)
{
    each_graph(*state, check_data_flow);
}

// ---- bytes of an access -------------------------------------------------------------------------

struct span {
    char *at;
    size_t bytes;
};

#define SPANS ((size_t)12)

static size_t add_span(struct span *dst, size_t n, void *at, size_t bytes)
{
    dst[n] = (struct span){at, bytes};
    return n + (bytes > 0);
}

static struct span whole(const struct session *s, const struct access *a)
{
    enum buffer_kind kind = (enum buffer_kind)a->kind;
    return (struct span){at(s, kind, a->index), s->layout.region[kind][a->index].bytes};
}

// The unit whose bytes are there.
static size_t unit_of(const struct op *op, const struct access *a)
{
    bool by_unit = a->kind != BUF_SLOT && a->kind != BUF_GRADS && a->kind != BUF_HOST_STAGE;
    return by_unit ? a->index : op->unit;
}

// Elements of a unit's slice in a buffer of `size` bytes each.
static size_t add_slice(const struct session *s, const struct op *op, const struct access *a,
                        struct span *dst, size_t n, size_t size)
{
    size_t first, elems = step_slice(&s->shape, &s->plan, unit_of(op, a), a->slice, &first);
    return add_span(dst, n, whole(s, a).at + first * size, elems * size);
}

// The same where all of a unit lies. Of a sharded one slice 0 has what other ranks hold, too.
static size_t add_slice_of_all(const struct session *s, const struct op *op, const struct access *a,
                               struct span *dst, size_t n)
{
    size_t u = unit_of(op, a), own = elem_bytes(s);
    struct part p = slice_of(s, u, a->slice), held = held_of(s, u);
    char *at = whole(s, a).at;
    n = add_span(dst, n, at + p.first * own, p.n * own);
    if (a->slice == 0) {
        size_t end = held.first + held.n;
        n = add_span(dst, n, at, held.first * own);
        n = add_span(dst, n, at + end * own, (unit_elems(s, u) - end) * own);
    }
    return n;
}

// What the session keeps of a version beside the bytes.
static size_t add_stamp(struct stamp *stamp, const struct access *a, struct span *dst, size_t n)
{
    n = add_span(dst, n, stamp->version + a->slice, sizeof *stamp->version);
    return add_span(dst, n, &stamp->unit, sizeof stamp->unit);
}

// The same of all slices.
static size_t add_stamps(struct stamp *stamp, struct span *dst, size_t n)
{
    return add_span(dst, n, stamp, sizeof *stamp);
}

static size_t spans_of_scale(struct session *s, uint64_t step, struct span *dst)
{
    struct flight *f = s->flight + step % IN_FLIGHT;
    size_t n = add_span(dst, 0, &f->adamw, sizeof f->adamw);
    n = add_span(dst, n, &f->result.loss, sizeof f->result.loss);
    n = add_span(dst, n, &f->result.norm, sizeof f->result.norm);
    n = add_span(dst, n, &f->result.updated, 2 * sizeof f->result.updated); // and stop
    n = add_span(dst, n, s->sums, step_shared(&s->shape) * sizeof *s->sums);
    return add_span(dst, n, &s->made, sizeof s->made);
}

// dst[SPANS] gets the pieces of memory that an access of an operation names; returns how many.
static size_t spans_of(struct session *s, const struct op *op, const struct access *a,
                       uint64_t step, struct span *dst)
{
    size_t own = elem_bytes(s), n;
    switch (a->kind) {
    case BUF_TOKEN:
        return 0;
    case BUF_SCALE:
        return spans_of_scale(s, step, dst);
    case BUF_PARAMS:
        n = add_stamp(s->here + a->index, a, dst, 0);
        if (sharded(s, a->index) && a->slice == 0) {
            n = add_stamps(s->gathered + a->index, dst, n);
            n = on_host(s, a->index) ? n : add_stamps(s->newest + a->index, dst, n);
        }
        return add_slice_of_all(s, op, a, dst, n);
    case BUF_SLOT:
        n = add_stamp(s->slot + a->index, a, dst, 0);
        n = a->slice == 0 ? add_stamps(s->slot_gathered + a->index, dst, n) : n;
        return add_slice_of_all(s, op, a, dst, n);
    case BUF_PARAM_SHARD:
        n = add_stamps(s->newest + a->index, dst, 0);
        *(dst + n) = whole(s, a);
        return n + 1;
    case BUF_HOST_PARAMS:
        n = add_span(dst, 0, s->newest[a->index].version + a->slice, sizeof(uint64_t));
        return add_slice(s, op, a, dst, n, own);
    case BUF_GRADS:
        return add_slice_of_all(s, op, a, dst, 0);
    case BUF_HOST_GRADS:
    case BUF_HOST_STAGE:
        return add_slice(s, op, a, dst, 0, own);
    case BUF_HOST_MOMENTS:
        n = add_slice(s, op, a, dst, 0, sizeof(float));
        return add_span(dst, n, dst->at + step_held(&s->shape, &s->plan, a->index) * sizeof(float),
                        dst->bytes);
    case BUF_HOST_MASTER:
    case BUF_HOST_SUM:
        return add_slice(s, op, a, dst, 0, sizeof(float));
    case BUF_HOST_CHUNKS:
        n = add_slice(s, op, a, dst, 0, sizeof(float));
        dst->at = whole(s, a).at + (size_t)(dst->at - whole(s, a).at) / SUMSQ_CHUNK;
        dst->bytes = (dst->bytes / sizeof(float) + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK * sizeof(float);
        return n;
    default:
        assert_int_equal(a->slice, 0);
        *dst = whole(s, a);
        return dst->bytes > 0;
    }
}

// The unit that a place on the device holds is one for all its slices.
static bool is_unit(const struct access *a, const struct span *span)
{
    return (a->kind == BUF_PARAMS || a->kind == BUF_SLOT) && span->bytes == sizeof(size_t);
}

static bool overlap(const struct span *x, const struct span *y)
{
    return x->at < y->at + y->bytes && y->at < x->at + x->bytes;
}

// A buffer or slice has the same memory in every operation, and shares it with no other.
static void check_names(struct session *s, const struct graph *g, enum which which, uint64_t *rng)
{
    struct {
        struct access access;
        struct span span[SPANS];
        size_t n;
    } *seen = test_alloc(g->n_accesses, sizeof *seen);
    size_t n_seen = 0;
    (void)which;
    (void)rng;
    for (const struct op *op = g->ops; op < g->ops + g->n_ops; op++) {
        for (size_t k = 0; k < op->n_accesses; k++) {
            const struct access *a = g->accesses + op->first_access + k;
            struct span span[SPANS];
            size_t n = spans_of(s, op, a, 0, span), known = n_seen;
            if (a->kind == BUF_GRADS && ranks(s) > 1) {
                continue; // cut by the unit that is there
            }
            for (size_t i = 0; i < n_seen; i++) {
                known = same_slice(&seen[i].access, a) ? i : known;
            }
            if (known == n_seen) {
                seen[n_seen].access = *a;
                seen[n_seen].n = n;
                memcpy(seen[n_seen++].span, span, sizeof span);
            }
            assert_int_equal(seen[known].n, n);
            assert_memory_equal(seen[known].span, span, n * sizeof *span);
        }
    }
    for (size_t i = 0; i < n_seen; i++) {
        for (size_t j = 0; j < i; j++) {
            for (size_t p = 0; p < seen[i].n; p++) {
                for (size_t q = 0; q < seen[j].n; q++) {
                    const struct access *a = &seen[i].access, *b = &seen[j].access;
                    bool unit = same_buffer(a, b) && is_unit(a, seen[i].span + p);
                    if (!unit && overlap(seen[i].span + p, seen[j].span + q)) {
                        fail_msg("%s %u and %s %u overlap", buffer_name((enum buffer_kind)a->kind),
                                 a->index, buffer_name((enum buffer_kind)b->kind), b->index);
                    }
                }
            }
        }
    }
    free(seen);
}

static void test_names(void **state)
{
    each_graph(*state, check_names);
}

// ---- what an operation touches ------------------------------------------------------------------

// All memory that an access may name: the arenas, what a step leaves, and the session's books,
// which are never overwritten here, since assertions read them.
#define REGIONS     16
#define FIRST_BOOK  10
#define NOT_TOUCHED 0 // in world.declared; else 1 + enum access_mode

struct world {
    struct session *s;
    uint64_t step;
    struct span region[REGIONS];
    char *before[REGIONS], *expected[REGIONS], *start[REGIONS];
    char *poison[REGIONS]; // what a byte that is not declared is overwritten with
    uint8_t *declared[REGIONS];
};

// 0.0115 in fp32 and bf16 (other ranks: more), which no sum swallows and which, unlike a NaN, does
// not survive arithmetic.
#define POISON 0x3c
// Of bytes that an operation says it overwrites: NaN.
#define DEAD 0xff

static size_t region_of(const struct world *w, const char *at)
{
    for (size_t r = 0; r < REGIONS; r++) {
        if (at >= w->region[r].at && at < w->region[r].at + w->region[r].bytes) {
            return r;
        }
    }
    fail_msg("memory that is in no region");
    return 0;
}

// Tokens and results become 0, which can still be looked up and is false.
static void poison_with_zeros(struct world *w)
{
    const struct session *s = w->s;
    static const enum buffer_kind tokens[] = {BUF_TOKENS, BUF_HOST_TOKENS};
    for (size_t k = 0; k < COUNT(tokens); k++) {
        for (size_t i = 0; i < s->layout.indices[tokens[k]]; i++) {
            const struct region *r = s->layout.region[tokens[k]] + i;
            memset(w->poison[r->space] + r->offset, 0, r->bytes);
        }
    }
    for (size_t f = 0; f < IN_FLIGHT; f++) {
        const char *updated = (const char *)&s->flight[f].result.updated;
        memset(w->poison[region_of(w, updated)], 0, 2);
    }
}

static void make_world(struct world *w, struct session *s)
{
    size_t units = s->model->units, n = 0;
    w->s = s;
    for (; n < SPACES; n++) {
        w->region[n] = (struct span){s->arena[n], s->layout.total[n]};
    }
    for (struct flight *f = s->flight; f < s->flight + IN_FLIGHT; f++) {
        w->region[n++] = (struct span){(char *)&f->adamw, sizeof f->adamw};
        w->region[n++] = (struct span){(char *)&f->result, 2 * sizeof(double)};
        w->region[n++] = (struct span){(char *)&f->result.updated, 2};
    }
    w->region[n++] = (struct span){(char *)s->sums, step_shared(&s->shape) * sizeof *s->sums};
    assert_int_equal(n, FIRST_BOOK);
    w->region[n++] = (struct span){(char *)&s->made, sizeof s->made};
    w->region[n++] = (struct span){(char *)s->newest, units * sizeof *s->newest};
    w->region[n++] = (struct span){(char *)s->here, units * sizeof *s->here};
    w->region[n++] = (struct span){(char *)s->slot, sizeof s->slot};
    w->region[n++] = (struct span){(char *)s->gathered, units * sizeof *s->gathered};
    w->region[n++] = (struct span){(char *)s->slot_gathered, sizeof s->slot_gathered};
    assert_int_equal(n, REGIONS);
    for (size_t r = 0; r < REGIONS; r++) {
        w->before[r] = test_alloc(w->region[r].bytes, 1);
        w->expected[r] = test_alloc(w->region[r].bytes, 1);
        w->start[r] = test_alloc(w->region[r].bytes, 1);
        w->poison[r] = test_alloc(w->region[r].bytes, 1);
        w->declared[r] = test_alloc(w->region[r].bytes, 1);
        memset(w->poison[r], POISON + (int)s->shape.rank, w->region[r].bytes);
    }
    poison_with_zeros(w);
}

static void free_world(struct world *w)
{
    for (size_t r = 0; r < REGIONS; r++) {
        free(w->before[r]);
        free(w->expected[r]);
        free(w->start[r]);
        free(w->poison[r]);
        free(w->declared[r]);
    }
}

static void save(const struct world *w, char *const *to)
{
    for (size_t r = 0; r < REGIONS; r++) {
        if (w->region[r].bytes) {
            memcpy(to[r], w->region[r].at, w->region[r].bytes);
        }
    }
}

static void restore(const struct world *w, char *const *from)
{
    for (size_t r = 0; r < REGIONS; r++) {
        if (w->region[r].bytes) {
            memcpy(w->region[r].at, from[r], w->region[r].bytes);
        }
    }
}

static void declare_span(struct world *w, const struct span *span, enum access_mode mode)
{
    size_t r = region_of(w, span->at), first = (size_t)(span->at - w->region[r].at);
    assert_true(first + span->bytes <= w->region[r].bytes);
    memset(w->declared[r] + first, 1 + (int)mode, span->bytes);
}

// What is written before a step starts, and so declared nowhere.
static void declare_inputs(struct world *w, const struct op *op)
{
    struct session *s = w->s;
    struct flight *f = s->flight + w->step % IN_FLIGHT;
    if (op->kind == OP_TOKENS_IN) {
        const struct access tokens = {.kind = BUF_HOST_TOKENS,
                                      .index = (uint32_t)host_tokens(s, w->step, op->micro)};
        struct span span = whole(s, &tokens);
        declare_span(w, &span, ACCESS_READ);
    } else if (!s->plan.hold_updates && (op->kind == OP_ADAM || op->kind == OP_HOST_ADAM)) {
        declare_span(w, &(struct span){(char *)&f->adamw, sizeof f->adamw}, ACCESS_READ);
    }
}

// Marks what the operation declares, but for the buffer of `without`.
static void declare_op(struct world *w, const struct graph *g, const struct op *op,
                       const struct access *without)
{
    for (size_t r = 0; r < REGIONS; r++) {
        memset(w->declared[r], NOT_TOUCHED, w->region[r].bytes);
    }
    declare_inputs(w, op);
    for (size_t k = 0; k < op->n_accesses; k++) {
        const struct access *a = g->accesses + op->first_access + k;
        struct span span[SPANS];
        size_t n = without && same_buffer(a, without) ? 0 : spans_of(w->s, op, a, w->step, span);
        while (n-- > 0) {
            declare_span(w, span + n, (enum access_mode)a->mode);
        }
    }
}

static void overwrite_undeclared(struct world *w)
{
    for (size_t r = 0; r < FIRST_BOOK; r++) {
        char *at = w->region[r].at;
        const char *poison = w->poison[r];
        const uint8_t *declared = w->declared[r];
        for (size_t i = 0; i < w->region[r].bytes; i++) {
            at[i] = declared[i] == NOT_TOUCHED        ? poison[i]
                    : declared[i] == 1 + ACCESS_WRITE ? (char)DEAD
                                                      : at[i];
        }
    }
}

// Bytes that are wrong after the operation has run in a world that was overwritten. A dead byte
// that it leaves alone both times is as good as overwritten: nobody may read it.
static size_t wrong_bytes(const struct world *w)
{
    size_t wrong = 0;
    for (size_t r = 0; r < REGIONS; r++) {
        const char *now = w->region[r].at, *before = w->before[r], *expected = w->expected[r];
        const char *other = r < FIRST_BOOK ? w->poison[r] : before;
        const uint8_t *declared = w->declared[r];
        for (size_t i = 0; i < w->region[r].bytes; i++) {
            char want = declared[i] == NOT_TOUCHED       ? other[i]
                        : declared[i] == 1 + ACCESS_READ ? before[i]
                                                         : expected[i];
            bool left =
                declared[i] == 1 + ACCESS_WRITE && now[i] == (char)DEAD && expected[i] == before[i];
            wrong += now[i] != want && !left;
        }
    }
    return wrong;
}

static void run(struct world *w, const struct op *op)
{
    struct error err = {0};
    assert_int_equal(run_op(w->s, op, w->step, &err), STATUS_OK);
}

// Runs the operation once as it is and once overwritten; the world then is as after the first.
static size_t try_op(struct world *w, const struct graph *g, const struct op *op,
                     const struct access *without)
{
    save(w, w->before);
    run(w, op);
    save(w, w->expected);
    restore(w, w->before);
    declare_op(w, g, op, without);
    overwrite_undeclared(w);
    run(w, op);
    size_t wrong = wrong_bytes(w);
    restore(w, w->expected);
    return wrong;
}

static bool does_nothing(const struct op *op)
{
    return op->kind == OP_BARRIER || op->kind == OP_BEGIN;
}

// A slice of which this rank, with fewer elements than another, has none.
static bool is_empty(const struct session *s, const struct op *op)
{
    bool sliced = op->kind == OP_FETCH || op->kind == OP_GRAD_OUT || op->lane == LANE_HOST;
    return sliced && op_has_unit(op->kind) && slice_of(s, op->unit, op->slice).n == 0;
}

// With all accesses no byte is wrong; without any one of the buffers some are. Of those one in
// `sample` is tried.
static void check_op(struct world *w, const struct graph *g, const struct op *op, uint64_t *rng,
                     size_t sample)
{
    struct span span[SPANS];
    for (size_t k = 0; k < op->n_accesses && !does_nothing(op); k++) {
        const struct access *a = g->accesses + op->first_access + k;
        bool another = k && same_buffer(a, a - 1); // slice of a buffer that was tried
        if (another || rng_below(rng, sample) || spans_of(w->s, op, a, w->step, span) == 0) {
            continue;
        }
        save(w, w->start);
        if (try_op(w, g, op, a) == 0 && !is_empty(w->s, op)) {
            fail_msg("operation %zu (%s of unit %u) does not touch %s %u", (size_t)(op - g->ops),
                     op_name(op->kind), op->unit, buffer_name((enum buffer_kind)a->kind), a->index);
        }
        restore(w, w->start);
    }
    size_t wrong = try_op(w, g, op, NULL);
    if (wrong) {
        fail_msg("operation %zu (%s of unit %u, micro-batch %u, slice %u) touches what it does not "
                 "declare: %zu bytes are wrong",
                 (size_t)(op - g->ops), op_name(op->kind), op->unit, op->micro, op->slice, wrong);
    }
}

// Two rounds: the second finds what the first has left.
static void check_touched(struct session *s, const struct graph *g, enum which which, uint64_t *rng)
{
    struct session_update update = {
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    size_t n = s->config.B * s->config.T;
    struct world w = {0};
    bool hold = update.guard = s->plan.hold_updates;
    update.clip = hold;
    make_world(&w, s);
    for (w.step = 0; w.step < 2; w.step++) {
        struct flight *f = s->flight + w.step;
        f->update = update;
        f->adamw = adamw_of(&update, 1, w.step);
        s->pos = w.step;
        s->token = (int32_t)(3 + w.step);
        for (size_t m = 0; m < s->config.micro_batches; m++) {
            int32_t *batch = tiny_batch(rng, n, 20);
            memcpy(at(s, BUF_HOST_TOKENS, host_tokens(s, w.step, m)), batch, 2 * n * sizeof *batch);
            free(batch);
        }
        for (size_t u = 0; u < s->model->units && which != STEP; u++) {
            float x; // what is on the device is old: it is fetched again
            session_read(s, STATE_PARAMS, u, 0, &x, 1);
            session_write(s, STATE_PARAMS, u, 0, &x, 1);
        }
        for (size_t i = 0; i < g->n_ops; i++) {
            check_op(&w, g, g->ops + i, rng, s->lanes ? 4 : 1);
        }
        assert_true(which != STEP || f->result.updated);
    }
    free_world(&w);
}

static void test_touched(void **state)
{
    each_graph(*state, check_touched);
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    comm = tiny_ranks();
    static const struct {
        const char *name;
        void (*run)(void **state);
    } per_case[] = {
        {"what is read was written before", test_data_flow},
        {"ggml #1501: buffers do not overlap", test_names},
        {"fairscale #496, DeepSpeed #1219, ao PR#1649: operations touch what they declare, all of "
         "it",
         test_touched},
    };
    static const struct CMUnitTest once[] = {
        cmocka_unit_test(test_order),
        {.name = "edges against all pairs of operations", .test_func = test_link},
        {.name = "edges by hand", .test_func = test_link_by_hand},
        {.name = "any change of the list changes its hash", .test_func = test_hash},
    };
    struct CMUnitTest tests[COUNT(once) + COUNT(per_case) * COUNT(cases)];
    static char names[COUNT(tests)][128];
    memcpy(tests, once, sizeof once);
    for (size_t i = COUNT(once); i < COUNT(tests); i++) {
        size_t t = (i - COUNT(once)) / COUNT(cases), c = (i - COUNT(once)) % COUNT(cases);
        snprintf(names[i], sizeof names[i], "%s: %s", per_case[t].name, cases[c].name);
        tests[i] = (struct CMUnitTest){
            .name = names[i], .test_func = per_case[t].run, .initial_state = (void *)(cases + c)};
    }
    return tiny_ranks_end(comm, cmocka_run_group_tests_name("graph", tests, NULL, NULL));
}
