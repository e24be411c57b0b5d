// graph.c - lists that grow, and edges from what happened last to each buffer.
//
// The list is walked through twice, as two steps that follow each other: per buffer and slice its
// last writer and the readers since are known, and an access waits for those it conflicts with.
#include "hete/graph.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

const char *lane_name(enum lane lane)
{
    static const char *const name[LANES] = {"compute", "copy in", "copy out", "host", "comm"};
    return name[lane];
}

const char *buffer_name(enum buffer_kind kind)
{
    static const char *const name[BUFFER_KINDS] = {
        [BUF_PARAMS] = "parameters",
        [BUF_SLOT] = "slot",
        [BUF_MASTER] = "master",
        [BUF_MOMENTS] = "moments",
        [BUF_GRADS] = "gradients",
        [BUF_SUM] = "gradient sum",
        [BUF_PARAM_SHARD] = "parameter shard",
        [BUF_GRAD_SHARD] = "gradient shard",
        [BUF_GRADS_FP32] = "fp32 gradient",
        [BUF_X] = "boundary",
        [BUF_KEPT] = "kept activations",
        [BUF_DX] = "dx",
        [BUF_WORK] = "workspace",
        [BUF_TOKENS] = "tokens",
        [BUF_LOSSES] = "losses",
        [BUF_NORM] = "norm",
        [BUF_HOST_PARAMS] = "host parameters",
        [BUF_HOST_MASTER] = "host master",
        [BUF_HOST_MOMENTS] = "host moments",
        [BUF_HOST_GRADS] = "host gradients",
        [BUF_HOST_STAGE] = "host stage",
        [BUF_HOST_SUM] = "host gradient sum",
        [BUF_HOST_CHUNKS] = "host chunk sums",
        [BUF_HOST_LOSSES] = "host losses",
        [BUF_HOST_TOKENS] = "host tokens",
        [BUF_EXCHANGE] = "exchange",
        [BUF_SHARED] = "what ranks share",
        [BUF_SCALE] = "scale",
        [BUF_TOKEN] = "token",
    };
    return name[kind];
}

// Room for one more element; sets failed, and returns false, if there is no memory.
static bool grow(struct graph *g, void **array, size_t n, size_t *max, size_t size)
{
    if (n < *max) {
        return true;
    }
    size_t more = *max ? 2 * *max : 256;
    void *p = realloc(*array, more * size);
    if (!p) {
        g->failed = true;
        return false;
    }
    *array = p;
    *max = more;
    return true;
}

struct op *graph_add(struct graph *g, uint16_t kind, enum lane lane, size_t unit, size_t micro)
{
    if (!grow(g, (void **)&g->ops, g->n_ops, &g->max_ops, sizeof *g->ops)) {
        return &g->nowhere;
    }
    g->ops[g->n_ops] = (struct op){.kind = kind,
                                   .lane = (uint8_t)lane,
                                   .unit = (uint32_t)unit,
                                   .micro = (uint32_t)micro,
                                   .first_access = (uint32_t)g->n_accesses};
    return g->ops + g->n_ops++;
}

void graph_access(struct graph *g, enum access_mode mode, enum buffer_kind kind, size_t index,
                  size_t slice)
{
    if (g->n_ops &&
        grow(g, (void **)&g->accesses, g->n_accesses, &g->max_accesses, sizeof *g->accesses)) {
        g->accesses[g->n_accesses++] = (struct access){.kind = (uint16_t)kind,
                                                       .mode = (uint8_t)mode,
                                                       .slice = (uint8_t)slice,
                                                       .index = (uint32_t)index};
        g->ops[g->n_ops - 1].n_accesses++;
    }
}

// ---- edges --------------------------------------------------------------------------------------

#define NONE UINT32_MAX

// What happened last to a buffer: positions count through two steps, so that an operation of the
// step before is told from one of this step. Readers since the last write form a list.
struct last {
    uint32_t writer;  // position, or NONE
    uint32_t readers; // first in the list, or NONE
};

struct reader {
    uint32_t at; // position
    uint32_t next;
};

struct linking {
    struct graph *g;
    size_t base[BUFFER_KINDS], indices[BUFFER_KINDS], slices[BUFFER_KINDS];
    struct last *last;
    struct reader *readers;
    size_t n_readers;
    uint32_t *seen; // by operation: 1 + the position that has an edge from it already
};

static struct last *last_of(const struct linking *l, const struct access *a)
{
    return l->last + l->base[a->kind] + a->index * l->slices[a->kind] + a->slice;
}

// Position of the second step `to` waits for `from`, which is of either.
static void add_edge(struct linking *l, uint32_t from, uint32_t to)
{
    struct graph *g = l->g;
    uint32_t n = (uint32_t)g->n_ops, op = from % n;
    bool next = from < n;
    if (to < n || from == to || l->seen[from] == to + 1) {
        return; // the first step only sets the scene
    }
    l->seen[from] = to + 1;
    if (grow(g, (void **)&g->edges, g->n_edges, &g->max_edges, sizeof *g->edges)) {
        g->edges[g->n_edges++] = (struct edge){.from = op, .to = to - n, .next = next};
    }
}

static void visit(struct linking *l, const struct access *a, uint32_t at)
{
    struct last *b = last_of(l, a);
    if (a->mode == ACCESS_READ) {
        if (b->writer != NONE) {
            add_edge(l, b->writer, at);
        }
        l->readers[l->n_readers] = (struct reader){at, b->readers};
        b->readers = (uint32_t)l->n_readers++;
        return;
    }
    bool read = false; // by another operation: it has waited for the writer
    for (uint32_t r = b->readers; r != NONE; r = l->readers[r].next) {
        add_edge(l, l->readers[r].at, at);
        read = read || l->readers[r].at != at;
    }
    if (!read && b->writer != NONE) {
        add_edge(l, b->writer, at);
    }
    *b = (struct last){.writer = at, .readers = NONE};
}

// By from, then edges within the step before those into the next one, then by to. They were added
// in the order of to: it is enough to count them out.
static bool sort_edges(struct linking *l)
{
    struct graph *g = l->g;
    uint32_t *place = l->seen; // by 2 from + next; done with otherwise
    struct edge *sorted = malloc((g->max_edges + 1) * sizeof *sorted);
    if (!sorted) {
        return false;
    }
    memset(place, 0, (2 * g->n_ops + 1) * sizeof *place);
    for (size_t e = 0; e < g->n_edges; e++) {
        place[2 * g->edges[e].from + g->edges[e].next + 1]++;
    }
    for (size_t i = 0; i < 2 * g->n_ops; i++) {
        place[i + 1] += place[i];
    }
    for (size_t i = 0; i <= g->n_ops; i++) {
        g->first_edge[i] = place[2 * i];
    }
    for (size_t e = 0; e < g->n_edges; e++) {
        sorted[place[2 * g->edges[e].from + g->edges[e].next]++] = g->edges[e];
    }
    free(g->edges);
    g->edges = sorted;
    return true;
}

static bool prepare(struct linking *l)
{
    struct graph *g = l->g;
    size_t buffers = 0;
    for (size_t i = 0; i < g->n_accesses; i++) {
        const struct access *a = g->accesses + i;
        l->indices[a->kind] = a->index >= l->indices[a->kind] ? a->index + 1 : l->indices[a->kind];
        l->slices[a->kind] = a->slice >= l->slices[a->kind] ? a->slice + 1u : l->slices[a->kind];
    }
    for (int k = 0; k < BUFFER_KINDS; k++) {
        l->base[k] = buffers;
        buffers += l->indices[k] * l->slices[k];
    }
    l->last = malloc((buffers + 1) * sizeof *l->last);
    l->readers = malloc((2 * g->n_accesses + 1) * sizeof *l->readers);
    l->seen = calloc(2 * g->n_ops + 1, sizeof *l->seen);
    g->first_edge = malloc((g->n_ops + 1) * sizeof *g->first_edge);
    for (size_t i = 0; l->last && i < buffers; i++) {
        l->last[i] = (struct last){NONE, NONE};
    }
    return l->last && l->readers && l->seen && g->first_edge;
}

int graph_link(struct graph *g, bool repeats, struct error *err)
{
    struct linking l = {.g = g};
    free(g->first_edge);
    g->n_edges = 0;
    g->repeats = repeats;
    if (!prepare(&l)) {
        g->failed = true;
    }
    for (uint32_t step = repeats ? 0 : 1; step < 2 && !g->failed; step++) {
        for (uint32_t i = 0; i < g->n_ops; i++) {
            const struct op *op = g->ops + i;
            for (size_t a = 0; a < op->n_accesses; a++) {
                visit(&l, g->accesses + op->first_access + a, step * (uint32_t)g->n_ops + i);
            }
        }
    }
    if (!g->failed && !sort_edges(&l)) {
        g->failed = true;
    }
    free(l.last);
    free(l.readers);
    free(l.seen);
    if (g->failed) {
        return error_set(err, STATUS_FAIL, "no memory for a graph of %zu operations", g->n_ops);
    }
    return STATUS_OK;
}

// Field by field: what lies between the fields of a struct is nobody's.
uint64_t graph_hash(const struct graph *g)
{
    XXH64_hash_t hash = g->repeats;
    for (size_t i = 0; i < g->n_ops; i++) {
        const struct op *op = g->ops + i;
        uint32_t fields[] = {op->kind, op->lane,  op->slice,     op->by_host,
                             op->unit, op->micro, op->n_accesses};
        hash = XXH64(fields, sizeof fields, hash);
        for (size_t k = 0; k < op->n_accesses; k++) {
            const struct access *a = g->accesses + op->first_access + k;
            uint32_t touched[] = {a->kind, a->mode, a->slice, a->index};
            hash = XXH64(touched, sizeof touched, hash);
        }
    }
    return hash;
}

int graph_run_serial(const struct graph *g, uint64_t step, op_fn run, void *ctx, struct error *err)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        int status = run(ctx, g->ops + i, step, err);
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

void graph_free(struct graph *g)
{
    free(g->ops);
    free(g->accesses);
    free(g->edges);
    free(g->first_edge);
    *g = (struct graph){0};
}
