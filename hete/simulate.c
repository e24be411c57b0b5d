// simulate.c - there is no queue of events: every lane runs at most one operation, so the next
// event is the earliest of LANES moments. Each moment is a round: what ends then ends, and only
// then do free lanes choose. An operation that takes no time ends in a further round of the same
// moment.
//
// Up to two steps run, and a third one is already counted down by what leads into it: counters of
// step s are in row s % ROWS.
#include "hete/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define IN_FLIGHT ((size_t)2)
#define ROWS      (IN_FLIGHT + 1)

// A ready operation that waits for its lane.
struct waiting {
    double ready; // fifo: since when, else 0
    uint32_t at;  // position: step * n_ops + op
};

struct running {
    uint32_t at; // position, or TIMING_NONE: the lane is free
    double end;  // of the operation, or of a copy's latency
    // Copies, once their bytes move:
    bool moving;
    double left, since, rate; // bytes left at a moment; rate 0: without limit
    // The operation before, and when it ended.
    uint32_t last;
    double last_end;
};

struct clock {
    const struct simulation *in;
    const struct graph *g;
    size_t n; // operations of a step
    // While an operation waits, .start and .cause of its timing say when and by whom it got ready.
    struct timing *timings;
    uint32_t *waits[ROWS]; // what each operation still waits for
    size_t undone[ROWS];
    uint32_t *in_edges, *in_next; // edges into each operation: within the step, into the next one
    size_t begun, done;           // steps
    // Lanes that run in order: their operations. cursor: step * n_ops + index.
    uint32_t *ops[LANES];
    size_t n_ops[LANES], cursor[LANES];
    struct waiting *heap[LANES]; // of the others
    size_t heap_size[LANES];
    struct running lane[LANES];
    double now;
};

// ---- ready operations of a lane -----------------------------------------------------------------

static bool before(const struct waiting *a, const struct waiting *b)
{
    return a->ready != b->ready ? a->ready < b->ready : a->at < b->at;
}

static void push(struct clock *c, enum lane lane, struct waiting w)
{
    struct waiting *heap = c->heap[lane];
    size_t i = c->heap_size[lane]++;
    for (; i > 0 && before(&w, heap + (i - 1) / 2); i = (i - 1) / 2) {
        heap[i] = heap[(i - 1) / 2];
    }
    heap[i] = w;
}

static uint32_t pop(struct clock *c, enum lane lane)
{
    struct waiting *heap = c->heap[lane];
    uint32_t at = heap[0].at;
    size_t n = --c->heap_size[lane], i = 0;
    struct waiting w = heap[n];
    for (size_t child = 1; child < n; child = 2 * i + 1) {
        child += child + 1 < n && before(heap + child + 1, heap + child);
        if (!before(heap + child, &w)) {
            break;
        }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = w;
    return at;
}

static void make_ready(struct clock *c, uint32_t at, uint32_t cause)
{
    enum lane lane = c->g->ops[at % c->n].lane;
    c->timings[at].start = c->now;
    c->timings[at].cause = cause;
    if (!lane_in_order(lane)) {
        push(c, lane, (struct waiting){c->in->fifo ? c->now : 0, at});
    }
}

// ---- steps --------------------------------------------------------------------------------------

static void prepare_step(struct clock *c, size_t step)
{
    uint32_t *waits = c->waits[step % ROWS];
    c->undone[step % ROWS] = c->n;
    for (size_t i = 0; i < c->n; i++) {
        waits[i] = c->in_edges[i] + (step ? c->in_next[i] : 0);
    }
}

// cause: what ended last, so that the step may begin.
static void begin_steps(struct clock *c, uint32_t cause)
{
    while (c->done < c->begun && !c->undone[c->done % ROWS]) {
        prepare_step(c, c->done + ROWS);
        c->done++;
    }
    for (; c->begun < c->in->steps && c->begun < c->done + IN_FLIGHT; c->begun++) {
        const uint32_t *waits = c->waits[c->begun % ROWS];
        for (size_t i = 0; i < c->n; i++) {
            if (!waits[i]) {
                make_ready(c, (uint32_t)(c->begun * c->n + i), cause);
            }
        }
    }
}

static void finish(struct clock *c, struct running *lane)
{
    uint32_t at = lane->at, op = at % (uint32_t)c->n;
    size_t step = at / c->n;
    const struct graph *g = c->g;
    c->timings[at].end = c->now;
    lane->last = at;
    lane->last_end = c->now;
    lane->at = TIMING_NONE;
    lane->moving = false;
    for (uint32_t e = g->first_edge[op]; e < g->first_edge[op + 1]; e++) {
        const struct edge *edge = g->edges + e;
        size_t to = step + edge->next;
        if (--c->waits[to % ROWS][edge->to] == 0 && to < c->begun) {
            make_ready(c, (uint32_t)(to * c->n + edge->to), at);
        }
    }
    if (--c->undone[step % ROWS] == 0) {
        begin_steps(c, at);
    }
}

// ---- lanes --------------------------------------------------------------------------------------

// Called when copies begin or end: each goes on at the rate that is now right.
static void set_rates(struct clock *c)
{
    struct running *in = c->lane + LANE_COPY_IN, *out = c->lane + LANE_COPY_OUT;
    const struct device_link *link = &c->in->link;
    bool both = in->moving && out->moving;
    double rate[2] = {both ? link->in_duplex : link->in, both ? link->out_duplex : link->out};
    struct running *lane[2] = {in, out};
    for (int i = 0; i < 2; i++) {
        struct running *r = lane[i];
        if (r->moving && (r->rate != rate[i] || r->since < 0)) {
            r->left -= r->since < 0 ? 0 : r->rate * (c->now - r->since);
            r->since = c->now;
            r->rate = rate[i];
            r->end = rate[i] > 0 ? c->now + fmax(r->left, 0) / rate[i] : c->now;
        }
    }
}

static void start(struct clock *c, struct running *lane, uint32_t at)
{
    struct timing *t = c->timings + at;
    uint32_t op = at % (uint32_t)c->n;
    enum lane which = c->g->ops[op].lane;
    double work = c->in->work[op];
    if (lane->last != TIMING_NONE && lane->last_end > t->start) {
        t->cause = lane->last;
    }
    t->start = c->now;
    lane->at = at;
    if (which == LANE_COPY_IN || which == LANE_COPY_OUT) {
        lane->end = c->now + c->in->link.latency_s;
        lane->left = work;
        lane->since = -1;
        lane->moving = c->in->link.latency_s <= 0 && work > 0;
    } else {
        lane->end = c->now + work;
    }
}

static void dispatch(struct clock *c)
{
    for (enum lane l = 0; l < LANES; l++) {
        struct running *lane = c->lane + l;
        if (lane->at == TIMING_NONE && c->heap_size[l]) {
            start(c, lane, pop(c, l));
        }
        if (lane->at == TIMING_NONE && lane_in_order(l) && c->n_ops[l]) {
            size_t step = c->cursor[l] / c->n_ops[l];
            uint32_t op = c->ops[l][c->cursor[l] % c->n_ops[l]];
            if (step < c->begun && !c->waits[step % ROWS][op]) {
                c->cursor[l]++;
                start(c, lane, (uint32_t)(step * c->n + op));
            }
        }
    }
    set_rates(c);
}

// One round; false if nothing runs.
static bool advance(struct clock *c)
{
    double now = INFINITY;
    for (int l = 0; l < LANES; l++) {
        if (c->lane[l].at != TIMING_NONE && c->lane[l].end < now) {
            now = c->lane[l].end;
        }
    }
    if (now == INFINITY) {
        return false;
    }
    c->now = now;
    for (int l = 0; l < LANES; l++) {
        struct running *lane = c->lane + l;
        if (lane->at == TIMING_NONE || lane->end > now) {
            continue;
        }
        bool copy = l == LANE_COPY_IN || l == LANE_COPY_OUT;
        if (copy && !lane->moving && lane->left > 0) {
            lane->moving = true; // its latency is over
        } else {
            finish(c, lane);
        }
    }
    dispatch(c);
    return true;
}

// ---- simulate -----------------------------------------------------------------------------------

static bool make_clock(struct clock *c)
{
    size_t n = c->n, lane_ops[LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        lane_ops[c->g->ops[i].lane]++;
    }
    uint32_t *p = calloc((ROWS + 3) * n + 1, sizeof *p);
    struct waiting *w = malloc((IN_FLIGHT * n + 1) * sizeof *w);
    c->in_edges = p;
    c->heap[0] = w;
    if (!p || !w) {
        return false;
    }
    c->in_next = p + n;
    for (size_t r = 0; r < ROWS; r++) {
        c->waits[r] = p + (3 + r) * n;
    }
    uint32_t *ops = p + 2 * n;
    for (enum lane l = 0; l < LANES; l++) {
        c->heap[l] = w;
        w += IN_FLIGHT * lane_ops[l];
        c->ops[l] = ops;
        ops += lane_ops[l];
    }
    for (size_t i = 0; i < n; i++) {
        enum lane l = c->g->ops[i].lane;
        c->ops[l][c->n_ops[l]++] = (uint32_t)i;
    }
    for (size_t e = 0; e < c->g->n_edges; e++) {
        const struct edge *edge = c->g->edges + e;
        (edge->next ? c->in_next : c->in_edges)[edge->to]++;
    }
    for (size_t s = 0; s < ROWS; s++) {
        prepare_step(c, s);
    }
    for (int l = 0; l < LANES; l++) {
        c->lane[l].at = c->lane[l].last = TIMING_NONE;
    }
    return true;
}

int simulate(const struct simulation *simulation, struct timing *timings, struct error *err)
{
    struct clock c = {.in = simulation,
                      .g = simulation->graph,
                      .n = simulation->graph->n_ops,
                      .timings = timings};
    bool memory = make_clock(&c);
    if (memory && c.n) {
        begin_steps(&c, TIMING_NONE);
        dispatch(&c);
        while (advance(&c)) {
        }
    }
    free(c.in_edges);
    free(c.heap[0]);
    if (!memory) {
        return error_set(err, STATUS_FAIL, "no memory to simulate %zu operations", c.n);
    }
    if (c.n && c.done < simulation->steps) {
        return error_set(err, STATUS_FAIL,
                         "step %zu of the simulated graph never ends: %zu operations wait for each "
                         "other",
                         c.done, c.undone[c.done % ROWS]);
    }
    return STATUS_OK;
}

// ---- what a schedule says -----------------------------------------------------------------------

static double clip(double x, double from, double to)
{
    return x < from ? from : x > to ? to : x;
}

// Gives each moment of [from, .start of operation `at`] to the lane that works then, back along
// the causes; to the waiting operation's own lane where none does.
static void follow_back(struct lane_times *out, const struct graph *g, const struct timing *timings,
                        uint32_t at, double from)
{
    double t = timings[at].start;
    while (t > from) {
        uint32_t cause = timings[at].cause;
        double end = cause == TIMING_NONE ? from : clip(timings[cause].end, from, t);
        out->exposed_s[g->ops[at % g->n_ops].lane] += t - end;
        if (cause == TIMING_NONE) {
            return;
        }
        t = clip(timings[cause].start, from, end);
        out->exposed_s[g->ops[cause % g->n_ops].lane] += end - t;
        at = cause;
    }
}

void lane_times(struct lane_times *out, const struct graph *graph, const struct timing *timings,
                size_t first, size_t steps)
{
    size_t n = graph->n_ops, head = 0, last = steps - 1;
    *out = (struct lane_times){0};
    while (head < n && graph->ops[head].lane != LANE_COMPUTE) {
        head++;
    }
    if (head == n || last <= first) {
        return;
    }
    double from = timings[first * n + head].start, to = timings[last * n + head].start;
    double idle_from = from; // the compute lane's last operation ended then
    for (size_t i = 0; i < steps * n; i++) {
        const struct timing *t = timings + i;
        enum lane lane = graph->ops[i % n].lane;
        out->busy_s[lane] += clip(t->end, from, to) - clip(t->start, from, to);
        if (lane == LANE_COMPUTE && t->start > from && t->start <= to) {
            follow_back(out, graph, timings, (uint32_t)i, idle_from);
        }
        if (lane == LANE_COMPUTE && t->end > idle_from) {
            idle_from = t->end;
        }
    }
    double periods = (double)(last - first);
    out->period_s = (to - from) / periods;
    for (int l = 0; l < LANES; l++) {
        out->busy_s[l] /= periods;
        out->exposed_s[l] /= periods;
    }
}
