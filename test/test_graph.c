// The list of operations itself, and whether what a session's operations declare is what they
// touch.
//
// The second needs the inside of a session: its source is included here, under other names since
// its object file is linked too. Each operation is run twice from the same bytes of memory: as it
// is, and with every byte that the operation does not declare overwritten. What it declares to
// write must come out the same, and no other byte may change.
#define session_open           inside_session_open
#define session_close          inside_session_close
#define session_print_memory   inside_session_print_memory
#define session_arena_bytes    inside_session_arena_bytes
#define session_read           inside_session_read
#define session_write          inside_session_write
#define session_step           inside_session_step
#define session_losses         inside_session_losses
#define session_decode         inside_session_decode
#define session_decode_limit   inside_session_decode_limit
#define session_logits         inside_session_logits
#define session_find_nonfinite inside_session_find_nonfinite
#include "hete/session.c"

#include "test/cmocka.h"
#include "test/tiny.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

// ---- the list -----------------------------------------------------------------------------------

struct visit {
    const struct graph *graph;
    size_t n;
};

static void visit(void *ctx, const struct op *op)
{
    struct visit *v = ctx;
    assert_ptr_equal(op, v->graph->ops + v->n);
    v->n++;
}

// Thousands of operations with 0 to 6 accesses each come back as they were added, and run in order.
static void test_order(void **state)
{
    struct graph g = {0};
    (void)state;
    for (size_t i = 0; i < 5000; i++) {
        graph_add(&g, (uint16_t)(i % 30), (enum lane)(i % 4), i, i * 3);
        for (size_t a = 0; a < i % 7; a++) {
            (a % 2 ? graph_writes : graph_reads)(&g, (enum buffer_kind)((i + a) % 14), i * 10 + a);
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
        assert_int_equal(op->n_accesses, i % 7);
        for (size_t a = 0; a < op->n_accesses; a++) {
            const struct access *access = g.accesses + op->first_access + a;
            assert_int_equal(access->kind, (i + a) % 14);
            assert_int_equal(access->index, i * 10 + a);
            assert_int_equal(access->write, a % 2);
        }
    }
    struct visit v = {.graph = &g};
    graph_run_serial(&g, visit, &v);
    assert_int_equal(v.n, 5000);
    graph_free(&g);
    assert_true(!g.ops && !g.accesses && !g.n_ops && !g.n_accesses);
    graph_run_serial(&g, visit, &v); // an empty list runs nothing
    assert_int_equal(v.n, 5000);
}

// ---- sessions and their graphs ------------------------------------------------------------------

enum which { STEP, LOSS, DECODE };

struct graph_case {
    const char *name;
    enum which which;
    enum dtype dtype;
    size_t micro_batches;
    bool eval;
};

static const struct graph_case cases[] = {
    {"step, fp32", STEP, DTYPE_FP32, 1, false},
    {"step, fp32, 3 micro-batches", STEP, DTYPE_FP32, 3, false},
    {"step, bf16", STEP, DTYPE_BF16, 1, false},
    {"step, bf16, 3 micro-batches", STEP, DTYPE_BF16, 3, false},
    {"loss, training", LOSS, DTYPE_FP32, 1, false},
    {"loss, no training", LOSS, DTYPE_BF16, 1, true},
    {"decode, training", DECODE, DTYPE_BF16, 1, false},
    {"decode, no training", DECODE, DTYPE_FP32, 1, true},
};

static void open_case(struct tiny *t, const struct graph_case *c)
{
    struct tiny_shape shape = {.layers = 3,
                               .heads = 2,
                               .hidden = 12,
                               .vocab = 20,
                               .max_seq = 9,
                               .head_rows = 7,
                               .B = 2,
                               .T = 9,
                               .micro_batches = c->micro_batches,
                               .dtype = c->dtype,
                               .threads = 1,
                               .eval = c->eval};
    tiny_open(t, &shape);
    tiny_scramble(t, 1);
}

static struct graph *graph_of(struct session *s, enum which which)
{
    return which == STEP ? &s->step : which == LOSS ? &s->loss : &s->decode;
}

static bool persistent(const struct access *a, enum which which)
{
    // Decoding reads the keys and values of the tokens before.
    return a->kind == BUF_PARAMS || a->kind == BUF_MOMENTS ||
           (which == DECODE && a->kind == BUF_KEPT);
}

static bool same_buffer(const struct access *a, const struct access *b)
{
    return a->kind == b->kind && a->index == b->index;
}

// Is `a` written by any operation in [from, to)?
static bool written(const struct graph *g, const struct access *a, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        for (size_t k = 0; k < g->ops[i].n_accesses; k++) {
            const struct access *b = g->accesses + g->ops[i].first_access + k;
            if (b->write && same_buffer(a, b)) {
                return true;
            }
        }
    }
    return false;
}

// What an operation reads was written before it in the list, or is the state that a session keeps;
// each operation writes something, and names no buffer twice.
static void test_data_flow(void **state)
{
    const struct graph_case *c = *state;
    struct tiny t;
    open_case(&t, c);
    const struct graph *g = graph_of(t.s, c->which);
    assert_true(g->n_ops > 4);
    for (size_t i = 0; i < g->n_ops; i++) {
        const struct access *a = g->accesses + g->ops[i].first_access;
        size_t n = g->ops[i].n_accesses;
        bool writes = false;
        for (size_t k = 0; k < n; k++) {
            writes = writes || a[k].write;
            if (!a[k].write && !persistent(a + k, c->which) && !written(g, a + k, 0, i)) {
                fail_msg("operation %zu (kind %u) reads buffer (%u, %u), which nothing wrote", i,
                         g->ops[i].kind, a[k].kind, a[k].index);
            }
            for (size_t other = 0; other < k; other++) {
                assert_false(same_buffer(a + k, a + other));
            }
        }
        assert_true(writes);
    }
    tiny_close(&t);
}

// ---- what an operation touches ------------------------------------------------------------------

// Memory of a buffer: up to four pieces of the arena, or of the host's memory.
struct span {
    char *at;
    size_t bytes;
};

// dst gets the pieces of one buffer; returns how many.
static size_t spans_of(struct session *s, const struct access *a, struct span *dst)
{
    const struct place *p = s->place + a->index;
    size_t n = a->index < s->model->units ? model_unit(s->model, a->index)->params : 0;
    size_t own = n * elem_bytes(s), fp32 = n * sizeof(float), N = s->config.B * s->config.T;
    size_t micro = a->index * N * sizeof(int32_t);
    bool masters = s->config.train && s->dev->dtype != DTYPE_FP32;
#define PIECES(...)                                                                                \
    do {                                                                                           \
        const struct span pieces[] = {__VA_ARGS__};                                                \
        memcpy(dst, pieces, sizeof pieces);                                                        \
        return COUNT(pieces);                                                                      \
    } while (0)
    switch (a->kind) {
    case BUF_PARAMS:
        PIECES({at(s, p->params), own});
    case BUF_MOMENTS:
        PIECES({at(s, p->m), fp32}, {at(s, p->v), fp32}, {at(s, p->master), masters ? fp32 : 0});
    case BUF_GRADS:
        PIECES({at(s, p->grads), own});
    case BUF_SUM:
        PIECES({at(s, p->sum), fp32});
    case BUF_GRADS_FP32:
        PIECES({at(s, s->grads_fp32), s->bytes.grads_fp32});
    case BUF_X:
        PIECES({at(s, p->x), s->bytes.boundary});
    case BUF_KEPT:
        PIECES({at(s, p->kept), s->bytes.kept});
    case BUF_DX:
        PIECES({at(s, s->dx), s->bytes.boundary});
    case BUF_WORK: {
        size_t most = s->model->embed.params > s->model->block.params ? s->model->embed.params
                                                                      : s->model->block.params;
        size_t chunks = s->config.train ? (most / SUMSQ_CHUNK + 1) * sizeof(float) : 0;
        PIECES({at(s, s->work), s->bytes.work}, {at(s, s->chunks), chunks});
    }
    case BUF_TOKENS:
        PIECES({at(s, s->tokens) + micro, N * sizeof(int32_t)},
               {at(s, s->targets) + micro, N * sizeof(int32_t)});
    case BUF_LOSSES:
        PIECES({at(s, s->losses) + micro, N * sizeof(float)});
    case BUF_HOST_LOSSES:
        PIECES({(char *)s->host_losses + micro, N * sizeof(float)});
    case BUF_NORM:
        PIECES({at(s, s->norms) + a->index * sizeof(double), sizeof(double)});
    case BUF_SCALE: // with the norms on the host, which are the operation's own
        PIECES({(char *)&s->adamw, sizeof s->adamw}, {(char *)s->result, sizeof *s->result},
               {(char *)s->host_norms, s->model->units * sizeof *s->host_norms});
    default:
        fail_msg("a buffer of kind %u: no session has one", a->kind);
        return 0;
    }
#undef PIECES
}

// All memory that any buffer may lie in: the arena and four pieces of the host's.
#define REGIONS 5

struct world {
    struct session *s;
    struct span region[REGIONS];
    char *before[REGIONS], *expected[REGIONS];
    uint8_t *declared[REGIONS]; // of each byte: 1 read, 2 written
};

static void make_world(struct world *w, struct session *s)
{
    size_t tokens = s->config.B * s->config.T * s->config.micro_batches;
    w->s = s;
    w->region[0] = (struct span){s->arena, s->arena_bytes};
    w->region[1] = (struct span){(char *)s->host_losses, tokens * sizeof(float)};
    w->region[2] = (struct span){(char *)&s->adamw, sizeof s->adamw};
    w->region[3] = (struct span){(char *)s->result, sizeof *s->result};
    w->region[4] = (struct span){(char *)s->host_norms, s->model->units * sizeof(double)};
    for (size_t r = 0; r < REGIONS; r++) {
        w->before[r] = test_alloc(w->region[r].bytes, 1);
        w->expected[r] = test_alloc(w->region[r].bytes, 1);
        w->declared[r] = test_alloc(w->region[r].bytes, 1);
    }
}

static void free_world(struct world *w)
{
    for (size_t r = 0; r < REGIONS; r++) {
        free(w->before[r]);
        free(w->expected[r]);
        free(w->declared[r]);
    }
}

static void save(struct world *w, char **to)
{
    for (size_t r = 0; r < REGIONS; r++) {
        memcpy(to[r], w->region[r].at, w->region[r].bytes);
    }
}

static void restore(struct world *w, char **from)
{
    for (size_t r = 0; r < REGIONS; r++) {
        memcpy(w->region[r].at, from[r], w->region[r].bytes);
    }
}

static void declare_span(struct world *w, const struct span *span, bool write)
{
    for (size_t r = 0; r < REGIONS; r++) {
        if (span->at >= w->region[r].at && span->at < w->region[r].at + w->region[r].bytes) {
            size_t first = (size_t)(span->at - w->region[r].at);
            assert_true(first + span->bytes <= w->region[r].bytes);
            for (size_t i = first; i < first + span->bytes; i++) {
                w->declared[r][i] |= write ? 2 : 1;
            }
        }
    }
}

// Marks what the operation declares, but for the access `without`.
static void declare_op(struct world *w, const struct graph *g, const struct op *op, size_t without)
{
    for (size_t r = 0; r < REGIONS; r++) {
        memset(w->declared[r], 0, w->region[r].bytes);
    }
    for (size_t k = 0; k < op->n_accesses; k++) {
        const struct access *a = g->accesses + op->first_access + k;
        struct span spans[4];
        for (size_t i = k == without ? 0 : spans_of(w->s, a, spans); i-- > 0;) {
            declare_span(w, spans + i, a->write);
        }
    }
}

// What a byte that is not declared is overwritten with: 0.0115 in fp32 and bf16, which no sum
// swallows and which, unlike a NaN, does not survive arithmetic. Tokens and results become 0, which
// can still be looked up and is false.
static char poison(const struct world *w, size_t r, size_t i)
{
    bool token = r == 0 && i >= w->s->tokens && i < w->s->losses;
    return token || r == 3 ? 0 : 0x3c;
}

static void poison_undeclared(struct world *w)
{
    for (size_t r = 0; r < REGIONS; r++) {
        for (size_t i = 0; i < w->region[r].bytes; i++) {
            if (!w->declared[r][i]) {
                w->region[r].at[i] = poison(w, r, i);
            }
        }
    }
}

// Bytes that are wrong after the operation has run in a poisoned world.
static size_t wrong_bytes(const struct world *w)
{
    size_t wrong = 0;
    for (size_t r = 0; r < REGIONS; r++) {
        for (size_t i = 0; i < w->region[r].bytes; i++) {
            uint8_t declared = w->declared[r][i];
            char expected = declared & 2   ? w->expected[r][i]
                            : declared & 1 ? w->before[r][i]
                                           : poison(w, r, i);
            wrong += w->region[r].at[i] != expected;
        }
    }
    return wrong;
}

// Runs the operation once as it is and once poisoned; the world then is as after the first.
static size_t try_op(struct world *w, const struct graph *g, const struct op *op, size_t without)
{
    save(w, w->before);
    run_op(w->s, op);
    save(w, w->expected);
    restore(w, w->before);
    declare_op(w, g, op, without);
    poison_undeclared(w);
    run_op(w->s, op);
    size_t wrong = wrong_bytes(w);
    restore(w, w->expected);
    return wrong;
}

// An access of no bytes (fp32 has no gradient of its own for the tied embedding) needs no proof.
static bool has_bytes(struct session *s, const struct access *a)
{
    struct span spans[4];
    size_t bytes = 0;
    for (size_t i = spans_of(s, a, spans); i-- > 0;) {
        bytes += spans[i].bytes;
    }
    return bytes > 0;
}

// With all accesses no byte is wrong; with any one of them left out, some are.
static void check_op(struct world *w, const struct graph *g, const struct op *op)
{
    for (size_t k = 0; k < op->n_accesses; k++) {
        const struct access *a = g->accesses + op->first_access + k;
        char *start[REGIONS];
        for (size_t r = 0; r < REGIONS; r++) {
            start[r] = test_alloc(w->region[r].bytes, 1);
        }
        save(w, start);
        if (has_bytes(w->s, a) && try_op(w, g, op, k) == 0) {
            fail_msg("operation %zu (kind %u, unit %u) does not touch buffer (%u, %u)",
                     (size_t)(op - g->ops), op->kind, op->unit, a->kind, a->index);
        }
        restore(w, start);
        for (size_t r = 0; r < REGIONS; r++) {
            free(start[r]);
        }
    }
    size_t wrong = try_op(w, g, op, SIZE_MAX);
    if (wrong) {
        fail_msg("operation %zu (kind %u, unit %u) touches what it does not declare: %zu bytes "
                 "are wrong",
                 (size_t)(op - g->ops), op->kind, op->unit, wrong);
    }
}

static void test_declared_is_touched(void **state)
{
    const struct graph_case *c = *state;
    const struct session_update update = {.lr = 0.01,
                                          .beta1 = 0.9,
                                          .beta2 = 0.95,
                                          .eps = 1e-8,
                                          .weight_decay = 0.1,
                                          .clip = 1,
                                          .guard = true};
    struct session_result result = {0};
    struct world w;
    struct tiny t;
    uint64_t rng = test_seed();
    open_case(&t, c);
    int32_t *batch = tiny_batch(&rng, t.tokens, 20);
    t.s->in_tokens = batch;
    t.s->in_targets = batch + t.tokens;
    t.s->update = &update;
    t.s->result = &result;
    make_world(&w, t.s);
    const struct graph *g = graph_of(t.s, c->which);
    for (size_t round = 0; round < 2; round++) { // the second finds what the first has left
        t.s->pos = round;
        t.s->token = (int32_t)(3 + round);
        for (size_t i = 0; i < g->n_ops; i++) {
            check_op(&w, g, g->ops + i);
        }
        assert_true(c->which != STEP || result.updated);
    }
    free_world(&w);
    free(batch);
    tiny_close(&t);
}

// ---- names and bytes ----------------------------------------------------------------------------

// Do pieces of two buffers overlap, or two pieces of one?
static bool overlap(struct session *s, const struct access *a, const struct access *b, bool one)
{
    struct span x[4], y[4];
    size_t nx = spans_of(s, a, x), ny = spans_of(s, b, y);
    for (size_t i = 0; i < nx; i++) {
        for (size_t j = one ? i + 1 : 0; j < ny; j++) {
            if (x[i].at < y[j].at + y[j].bytes && y[j].at < x[i].at + x[i].bytes) {
                return true;
            }
        }
    }
    return false;
}

// Do two operations conflict: by the names of their buffers, or by the bytes?
static bool conflict(struct session *s, const struct graph *g, const struct op *a,
                     const struct op *b, bool by_bytes)
{
    for (size_t i = 0; i < a->n_accesses; i++) {
        for (size_t j = 0; j < b->n_accesses; j++) {
            const struct access *x = g->accesses + a->first_access + i;
            const struct access *y = g->accesses + b->first_access + j;
            if ((x->write || y->write) &&
                (by_bytes ? overlap(s, x, y, false) : same_buffer(x, y))) {
                return true;
            }
        }
    }
    return false;
}

// Any two operations, of one run of the list or of two, that touch the same bytes, one of them
// writing, are ordered by the declared accesses.
static void test_bytes_are_ordered(void **state)
{
    const struct graph_case *c = *state;
    struct session_result result;
    struct tiny t;
    open_case(&t, c);
    t.s->result = &result;
    const struct graph *g = graph_of(t.s, c->which);
    size_t n = 2 * g->n_ops, conflicts = 0;
    bool *path = test_alloc(n * n, sizeof *path); // path[i*n+j]: i must be done before j
    for (size_t j = 0; j < n; j++) {
        for (size_t i = j; i-- > 0;) {
            const struct op *a = g->ops + i % g->n_ops, *b = g->ops + j % g->n_ops;
            if (!path[i * n + j] && conflict(t.s, g, a, b, false)) {
                path[i * n + j] = true;
                for (size_t k = 0; k < i; k++) {
                    path[k * n + j] = path[k * n + j] || path[k * n + i];
                }
            }
        }
    }
    for (size_t j = 0; j < n; j++) {
        for (size_t i = 0; i < j; i++) {
            const struct op *a = g->ops + i % g->n_ops, *b = g->ops + j % g->n_ops;
            if (conflict(t.s, g, a, b, true)) {
                conflicts++;
                if (!path[i * n + j]) {
                    fail_msg("operations %zu and %zu touch the same bytes in any order", i, j);
                }
            }
        }
    }
    assert_true(conflicts > n);
    free(path);
    tiny_close(&t);
}

// Each buffer, and each of its pieces, has memory of its own.
static void test_buffers_do_not_overlap(void **state)
{
    const struct graph_case *c = *state;
    struct session_result result;
    struct tiny t;
    open_case(&t, c);
    t.s->result = &result;
    const struct graph *g = graph_of(t.s, c->which);
    for (size_t i = 0; i < g->n_accesses; i++) {
        for (size_t j = 0; j <= i; j++) {
            const struct access *a = g->accesses + i, *b = g->accesses + j;
            if (overlap(t.s, a, b, same_buffer(a, b))) {
                fail_msg("buffers (%u, %u) and (%u, %u) overlap", a->kind, a->index, b->kind,
                         b->index);
            }
        }
    }
    tiny_close(&t);
}

int main(void)
{
    static const struct {
        const char *name;
        void (*run)(void **state);
    } per_case[] = {
        {"what is read was written before", test_data_flow},
        {"fairscale #496, DeepSpeed #1219: operations touch what they declare, all of it",
         test_declared_is_touched},
        {"what touches the same bytes is ordered", test_bytes_are_ordered},
        {"ggml #1501: live buffers do not overlap", test_buffers_do_not_overlap},
    };
    struct CMUnitTest tests[1 + COUNT(per_case) * COUNT(cases)] = {cmocka_unit_test(test_order)};
    static char names[COUNT(tests)][128];
    for (size_t i = 0; i + 1 < COUNT(tests); i++) {
        size_t t = i / COUNT(cases), c = i % COUNT(cases);
        snprintf(names[i], sizeof names[i], "%s: %s", per_case[t].name, cases[c].name);
        tests[i + 1] = (struct CMUnitTest){
            .name = names[i], .test_func = per_case[t].run, .initial_state = (void *)(cases + c)};
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
