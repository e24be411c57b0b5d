// check.c - the accesses are sorted by buffer, so that each buffer's history is one run of the
// list; which operations must be joined by a path follows from it alone. Most are joined by an
// edge; only where there is none the paths are searched.
#include "hete/check.h"

#include <stdio.h>
#include <stdlib.h>

// ---- graph --------------------------------------------------------------------------------------

struct visit {
    struct access access;
    uint32_t op;
    uint32_t order; // of the access in the step
};

// Positions count through two steps: operation i of the second one is n_ops + i.
struct search {
    const struct graph *g;
    struct visit *visits;  // sorted by buffer, then in program order
    uint32_t *readers;     // positions, since the last write
    uint32_t *seen, stamp; // by position: reached in the search of that number
    uint32_t *stack;
};

static bool same_buffer(const struct access *a, const struct access *b)
{
    return a->kind == b->kind && a->index == b->index && a->slice == b->slice;
}

static int by_buffer(const void *x, const void *y)
{
    const struct visit *a = x, *b = y;
    if (!same_buffer(&a->access, &b->access)) {
        const struct access *p = &a->access, *q = &b->access;
        return p->kind != q->kind     ? p->kind - q->kind
               : p->index != q->index ? (p->index < q->index ? -1 : 1)
                                      : p->slice - q->slice;
    }
    return a->order < b->order ? -1 : a->order > b->order;
}

// Is there a path of edges between two positions? Edges lead forward, so a search never needs to
// go beyond its goal.
static bool joined(struct search *s, uint32_t from, uint32_t to)
{
    const struct graph *g = s->g;
    uint32_t n = (uint32_t)g->n_ops;
    size_t top = 0;
    s->stamp++;
    s->stack[top++] = from;
    while (top) {
        uint32_t at = s->stack[--top], base = at / n * n;
        const uint32_t *first = g->first_edge + at % n;
        for (uint32_t e = first[0]; e < first[1]; e++) {
            uint32_t next = base + (g->edges[e].next ? n : 0) + g->edges[e].to;
            if (next == to) {
                return true;
            }
            if (next < to && s->seen[next] != s->stamp) {
                s->seen[next] = s->stamp;
                s->stack[top++] = next;
            }
        }
    }
    return false;
}

static void describe(char *out, size_t size, const struct op *op)
{
    snprintf(out, size, "'%s' (unit %u, micro-batch %u, slice %u)", op_name(op->kind), op->unit,
             op->micro, op->slice);
}

static int require(struct search *s, const struct access *buffer, uint32_t from, uint32_t to,
                   struct error *err)
{
    uint32_t n = (uint32_t)s->g->n_ops;
    if (from == to || from >= n || joined(s, from, to)) { // both in the second step: seen before
        return STATUS_OK;
    }
    char a[128], b[128];
    describe(a, sizeof a, s->g->ops + from);
    describe(b, sizeof b, s->g->ops + to % n);
    return error_set(err, STATUS_FAIL,
                     "%s and %s%s race for %s %u, slice %u: no path of edges joins operations %u "
                     "and %u; this is a bug in the derivation of the edges",
                     a, b, to >= n ? " of the next step" : "",
                     buffer_name((enum buffer_kind)buffer->kind), buffer->index, buffer->slice,
                     from, to % n);
}

// One buffer, through both steps: visits[0 .. n) are all its accesses in a step.
static int check_buffer(struct search *s, const struct visit *visits, size_t n, struct error *err)
{
    uint32_t writer = UINT32_MAX;
    size_t readers = 0;
    for (size_t i = 0; i < (s->g->repeats ? 2 * n : n); i++) {
        const struct visit *v = visits + i % n;
        uint32_t at = v->op + (i < n ? 0 : (uint32_t)s->g->n_ops);
        int status = STATUS_OK;
        if (v->access.mode == ACCESS_READ) {
            status = writer == UINT32_MAX ? STATUS_OK : require(s, &v->access, writer, at, err);
            s->readers[readers++] = at;
        } else {
            bool read = false; // by another operation, which the writer is joined to
            for (size_t r = 0; r < readers && !status; r++) {
                status = require(s, &v->access, s->readers[r], at, err);
                read = read || s->readers[r] != at;
            }
            if (!read && writer != UINT32_MAX && !status) {
                status = require(s, &v->access, writer, at, err);
            }
            writer = at;
            readers = 0;
        }
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

// The edges are what is followed: they must lie where they are looked for, and lead forward.
static int check_edges(const struct graph *g, struct error *err)
{
    for (size_t i = 0, e = 0; i <= g->n_ops; i++) {
        if (g->first_edge[i] != e) {
            return error_set(err, STATUS_FAIL, "edges of operation %zu begin at %u, not at %zu", i,
                             g->first_edge[i], e);
        }
        for (; i < g->n_ops && e < g->n_edges && g->edges[e].from == i; e++) {
            const struct edge *edge = g->edges + e;
            if (edge->to >= g->n_ops || (edge->next ? !g->repeats : edge->to <= edge->from)) {
                return error_set(err, STATUS_FAIL,
                                 "the edge from operation %u to %u%s does not lead forward",
                                 edge->from, edge->to, edge->next ? " of the next step" : "");
            }
        }
    }
    if (g->first_edge[g->n_ops] != g->n_edges) {
        return error_set(err, STATUS_FAIL, "%zu edges, but %u belong to an operation", g->n_edges,
                         g->first_edge[g->n_ops]);
    }
    return STATUS_OK;
}

static int check_buffers(struct search *s, struct error *err)
{
    const struct graph *g = s->g;
    size_t n = 0;
    for (uint32_t i = 0; i < g->n_ops; i++) {
        const struct op *op = g->ops + i;
        for (uint32_t a = op->first_access; a < op->first_access + op->n_accesses; a++) {
            s->visits[n++] = (struct visit){g->accesses[a], i, a};
        }
    }
    qsort(s->visits, n, sizeof *s->visits, by_buffer);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n; end++) {
            if (!same_buffer(&s->visits[i].access, &s->visits[end].access)) {
                break;
            }
        }
        int status = check_buffer(s, s->visits + i, end - i, err);
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

int check_graph(const struct graph *graph, struct error *err)
{
    int status = check_edges(graph, err);
    if (status) {
        return status;
    }
    struct search s = {.g = graph,
                       .visits = malloc((graph->n_accesses + 1) * sizeof *s.visits),
                       .readers = malloc((2 * graph->n_accesses + 1) * sizeof *s.readers),
                       .seen = calloc(2 * graph->n_ops + 1, sizeof *s.seen),
                       .stack = malloc((2 * graph->n_ops + 1) * sizeof *s.stack)};
    if (s.visits && s.readers && s.seen && s.stack) {
        status = check_buffers(&s, err);
    } else {
        status = error_set(err, STATUS_FAIL, "no memory to check a graph of %zu operations",
                           graph->n_ops);
    }
    free(s.visits);
    free(s.readers);
    free(s.seen);
    free(s.stack);
    return status;
}

// ---- layout -------------------------------------------------------------------------------------

struct placed {
    enum buffer_kind kind;
    size_t index;
    const struct region *region;
};

static int by_place(const void *x, const void *y)
{
    const struct region *a = ((const struct placed *)x)->region,
                        *b = ((const struct placed *)y)->region;
    if (a->space != b->space) {
        return a->space < b->space ? -1 : 1;
    }
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

static const char *space_name(enum space space)
{
    static const char *const name[SPACES] = {"device", "pinned", "pageable host"};
    return name[space];
}

static int check_region(const struct layout *layout, const struct placed *p, struct error *err)
{
    const struct region *r = p->region;
    const char *name = buffer_name(p->kind);
    if (r->offset % DEVICE_ALIGN) {
        return error_set(err, STATUS_FAIL,
                         "%s %zu lies at byte %zu of %s memory, not aligned to %zu", name, p->index,
                         r->offset, space_name(r->space), DEVICE_ALIGN);
    }
    size_t total = layout->total[r->space];
    if (r->offset > total || r->bytes > total - r->offset) {
        return error_set(err, STATUS_FAIL,
                         "%s %zu (bytes %zu + %zu) leaves the %zu bytes of %s memory", name,
                         p->index, r->offset, r->bytes, total, space_name(r->space));
    }
    return STATUS_OK;
}

int check_layout(const struct layout *layout, struct error *err)
{
    size_t n = 0, regions = 0;
    for (int k = 0; k < BUFFER_KINDS; k++) {
        regions += layout->indices[k];
    }
    struct placed *placed = malloc((regions + 1) * sizeof *placed);
    if (!placed) {
        return error_set(err, STATUS_FAIL, "no memory to check a layout of %zu buffers", regions);
    }
    for (int k = 0; k < BUFFER_KINDS; k++) {
        for (size_t i = 0; i < layout->indices[k]; i++) {
            if (layout->region[k][i].bytes) {
                placed[n++] = (struct placed){(enum buffer_kind)k, i, layout->region[k] + i};
            }
        }
    }
    qsort(placed, n, sizeof *placed, by_place);
    int status = STATUS_OK;
    for (size_t i = 0; i < n && !status; i++) {
        status = check_region(layout, placed + i, err);
        const struct placed *p = placed + i, *q = placed + i + 1;
        if (!status && i + 1 < n && p->region->space == q->region->space &&
            q->region->offset - p->region->offset < p->region->bytes) {
            status =
                error_set(err, STATUS_FAIL, "%s %zu and %s %zu overlap at byte %zu of %s memory",
                          buffer_name(p->kind), p->index, buffer_name(q->kind), q->index,
                          q->region->offset, space_name(q->region->space));
        }
    }
    free(placed);
    return status;
}
