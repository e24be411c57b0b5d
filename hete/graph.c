#include "hete/graph.h"

#include <stdlib.h>

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

void graph_add(struct graph *g, uint16_t kind, enum lane lane, size_t unit, size_t micro)
{
    if (grow(g, (void **)&g->ops, g->n_ops, &g->max_ops, sizeof *g->ops)) {
        g->ops[g->n_ops++] = (struct op){.kind = kind,
                                         .lane = (uint16_t)lane,
                                         .unit = (uint32_t)unit,
                                         .micro = (uint32_t)micro,
                                         .first_access = (uint32_t)g->n_accesses};
    }
}

static void declare(struct graph *g, enum buffer_kind kind, size_t index, bool write)
{
    if (g->n_ops &&
        grow(g, (void **)&g->accesses, g->n_accesses, &g->max_accesses, sizeof *g->accesses)) {
        g->accesses[g->n_accesses++] =
            (struct access){.kind = (uint16_t)kind, .write = write, .index = (uint32_t)index};
        g->ops[g->n_ops - 1].n_accesses++;
    }
}

void graph_reads(struct graph *g, enum buffer_kind kind, size_t index)
{
    declare(g, kind, index, false);
}

void graph_writes(struct graph *g, enum buffer_kind kind, size_t index)
{
    declare(g, kind, index, true);
}

void graph_run_serial(const struct graph *g, op_fn run, void *ctx)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        run(ctx, g->ops + i);
    }
}

void graph_free(struct graph *g)
{
    free(g->ops);
    free(g->accesses);
    *g = (struct graph){0};
}
