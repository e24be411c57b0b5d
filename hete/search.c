#include "hete/search.h"

#include <math.h>
#include <stdlib.h>

// ---- one plan -----------------------------------------------------------------------------------

int plan_bytes(struct plan_bytes *out, const struct step_shape *shape, const struct plan *plan,
               size_t pinned, struct error *err)
{
    struct layout layout;
    int status = layout_make(&layout, shape, plan, pinned, err);
    for (int i = 0; i < SPACES && !status; i++) {
        out->total[i] = layout.total[i];
    }
    layout_free(&layout);
    return status;
}

size_t plan_over(const struct plan_bytes *bytes, const struct budget *budget)
{
    size_t device = bytes->total[SPACE_DEVICE];
    size_t host = bytes->total[SPACE_PINNED] + bytes->total[SPACE_HOST];
    return (device > budget->device ? device - budget->device : 0) +
           (host > budget->host ? host - budget->host : 0);
}

void search_open(struct search *s, const struct plan_problem *problem, struct error *err)
{
    *s = (struct search){
        .problem = problem, .best_s = INFINITY, .nearest_over = SIZE_MAX, .err = err};
    step_shape(&s->shape, problem->model, problem->dtype, problem->B, problem->T,
               problem->micro_batches, true);
}

void search_close(struct search *s)
{
    graph_free(&s->graph);
    free(s->work);
    free(s->timings);
}

enum { STEPS = 3, FIRST = 1 }; // the period is exact from the second step on

// Writes down the step and what each of its operations costs.
static bool write_step(struct search *s, const struct step_shape *shape, const struct plan *plan)
{
    s->graph.n_ops = s->graph.n_accesses = 0;
    s->status = s->status ? s->status : step_build(&s->graph, shape, plan, STEP_TRAIN, s->err);
    if (!s->status && s->graph.n_ops > s->max_ops) {
        free(s->work);
        free(s->timings);
        s->max_ops = 2 * s->graph.n_ops;
        s->work = malloc(s->max_ops * sizeof *s->work);
        s->timings = malloc(STEPS * s->max_ops * sizeof *s->timings);
        if (!s->work || !s->timings) {
            s->max_ops = 0;
            s->status = error_set(s->err, STATUS_FAIL, "no memory to simulate %zu operations",
                                  s->graph.n_ops);
        }
    }
    if (!s->status) {
        costs_of_graph(s->problem->costs, shape, plan, &s->graph, s->work);
    }
    return !s->status;
}

// ---- terms --------------------------------------------------------------------------------------

// What plans are measured by before they are simulated. Seconds, but for the bytes.
enum term {
    DEVICE_BYTES,
    HOST_BYTES,               // pinned ones too
    BUSY,                     // of each lane
    ADAM_HOST = BUSY + LANES, // on the host
    FETCH_FIRST,              // copies in for the first forward
    OUT_LAST,                 // copies out of the last micro-batch's gradients
    APART,                    // compute between those two that neither can overlap
    APART_UPDATE,             // compute during which no host Adam can run
    TERMS
};

static double seconds_of(const struct search *s, size_t i)
{
    const struct device_link *link = &s->problem->costs->link;
    switch (s->graph.ops[i].lane) {
    case LANE_COPY_IN:
        return link->latency_s + (link->in > 0 ? s->work[i] / link->in : 0);
    case LANE_COPY_OUT:
        return link->latency_s + (link->out > 0 ? s->work[i] / link->out : 0);
    default:
        return s->work[i];
    }
}

// Gradients of all host units leave, their Adam runs and their parameters come back between the
// last block's backward (its gradient is the first) and its next forward (by then all parameters
// but its own have been used). What computes from that forward to that backward is APART; while
// updates are held for the norm, no Adam runs up to the clip either.
static void terms_of_step(double *v, const struct search *s, const struct step_shape *shape,
                          const struct plan *plan)
{
    size_t last = shape->model->units - 1;
    bool head = false, from_last = false;
    double compute = 0;
    for (size_t i = 0; i < s->graph.n_ops; i++) {
        const struct op *op = s->graph.ops + i;
        double seconds = seconds_of(s, i);
        v[BUSY + op->lane] += seconds;
        head = head || op->kind == CALL_HEAD;
        from_last = from_last || (op->kind == CALL_FORWARD && op->unit == last);
        if (op->lane == LANE_COMPUTE && from_last) {
            compute += seconds;
        }
        if (op->kind == CALL_BACKWARD && op->unit == last && plan->unit[last].host_optimizer) {
            v[APART] = compute;
        }
        if (op->kind == OP_CLIP) {
            v[APART_UPDATE] = plan->hold_updates ? compute : v[APART];
        }
        v[ADAM_HOST] += op->kind == OP_HOST_ADAM ? seconds : 0;
        v[FETCH_FIRST] += op->kind == OP_FETCH && !head ? seconds : 0;
        v[OUT_LAST] +=
            op->kind == OP_GRAD_OUT && op->micro + 1 == shape->micro_batches ? seconds : 0;
    }
}

static double busiest(const double *v)
{
    double most = 0;
    for (int l = 0; l < LANES; l++) {
        most = fmax(most, v[BUSY + l]);
    }
    return most;
}

// No schedule is faster.
static double least_time(const double *v)
{
    double update = v[APART_UPDATE] + fmax(v[ADAM_HOST], v[FETCH_FIRST]);
    return fmax(busiest(v), fmax(update, v[APART] + v[OUT_LAST]));
}

bool search_predict(struct search *s, const struct plan *plan, double limit_s,
                    struct prediction *out)
{
    double v[TERMS] = {0};
    struct lane_times times;
    if (!write_step(s, &s->shape, plan)) {
        return false;
    }
    terms_of_step(v, s, &s->shape, plan);
    if (least_time(v) >= limit_s) {
        return false;
    }
    struct simulation in = {.graph = &s->graph,
                            .work = s->work,
                            .link = s->problem->costs->link,
                            .fifo = plan->fifo,
                            .steps = STEPS};
    s->simulations++;
    s->status = simulate(&in, s->timings, s->err);
    if (s->status) {
        return false;
    }
    lane_times(&times, &s->graph, s->timings, FIRST, STEPS);
    *out = (struct prediction){.step_s = times.period_s, .bound_s = busiest(v)};
    for (int l = 0; l < LANES; l++) {
        out->busy_s[l] = times.busy_s[l];
        out->exposed_s[l] = times.exposed_s[l];
    }
    return true;
}

bool search_try(struct search *s, const struct plan *plan)
{
    struct plan_bytes bytes;
    struct prediction p;
    if (!s->status) {
        s->status = plan_bytes(&bytes, &s->shape, plan, s->problem->budget.pinned, s->err);
    }
    if (s->status) {
        return false;
    }
    size_t over = plan_over(&bytes, &s->problem->budget);
    if (over) {
        if (over < s->nearest_over) {
            s->nearest_over = over;
            s->nearest = *plan;
        }
        return false;
    }
    if (search_predict(s, plan, s->best_s, &p) && p.step_s < s->best_s) {
        s->best_s = p.step_s;
        s->best = *plan;
    }
    return true;
}

// ---- plans that a few numbers describe ----------------------------------------------------------

static bool streams(const struct choice *c, size_t u, size_t last)
{
    if (u <= c->n_device) {
        return false;
    }
    size_t i = u - c->n_device - 1, n = last - c->n_device; // among those that might be
    switch (c->order) {
    case STREAM_FIRST:
        return i < c->n_stream;
    case STREAM_SPREAD:
        return (i + 1) * c->n_stream / n > i * c->n_stream / n;
    default:
        return i >= n - c->n_stream;
    }
}

void plan_of_choice(struct plan *plan, const struct plan_problem *problem, const struct choice *c)
{
    plan_resident(plan, problem->model, problem->B, problem->T, problem->micro_batches,
                  problem->hold_updates);
    size_t last = problem->model->units - 1;
    plan->unit[0].host_optimizer = c->embed_on_host;
    for (size_t u = 1; u <= last; u++) {
        plan->unit[u] = (struct unit_plan){.recompute = u <= c->n_recompute,
                                           .stream = streams(c, u, last),
                                           .host_optimizer = u > c->n_device};
    }
    plan->early_adam = c->early_adam && !problem->hold_updates;
    plan->slots = c->slots < c->n_stream ? c->slots : c->n_stream;
    if (c->n_device < last) {
        plan->grad_buffers = c->grad_buffers;
    }
    if (c->n_device < last || c->embed_on_host) {
        plan->slices = c->slices;
    }
}

// Terms of any choice with the same embedding, slots, buffers and slices: sums of these.
struct terms {
    double none[2][TERMS];   // no block; [1]: some share gradient buffers
    double device[2][TERMS]; // the first block with its optimizer there, each other one
    double host[TERMS];
    double stream[PLAN_SLOTS_MAX + 3][TERMS]; // so many of them
    double recompute[2][TERMS];               // the first, each other one
};

// out = terms of a step of so many blocks, less those of another.
static void probe(double *out, struct search *s, const struct choice *like, size_t device,
                  size_t host, size_t stream, size_t recompute, const double *less)
{
    struct model few = *s->problem->model;
    struct plan_problem problem = *s->problem;
    struct step_shape shape = s->shape;
    struct choice c = *like;
    struct plan plan;
    struct plan_bytes bytes;
    double v[TERMS] = {0};
    few.units = 1 + device + host + stream;
    problem.model = shape.model = &few;
    c.n_device = device;
    c.n_stream = stream;
    c.n_recompute = recompute;
    plan_of_choice(&plan, &problem, &c);
    if (!write_step(s, &shape, &plan)) {
        return;
    }
    terms_of_step(v, s, &shape, &plan);
    s->status = plan_bytes(&bytes, &shape, &plan, SIZE_MAX, s->err);
    v[DEVICE_BYTES] = (double)bytes.total[SPACE_DEVICE];
    v[HOST_BYTES] = (double)bytes.total[SPACE_PINNED] + (double)bytes.total[SPACE_HOST];
    for (int i = 0; i < TERMS; i++) {
        out[i] = v[i] - (less ? less[i] : 0);
    }
}

static void find_terms(struct terms *t, struct search *s, const struct choice *like)
{
    double one[TERMS], two[TERMS];
    *t = (struct terms){0};
    probe(one, s, like, 0, 1, 0, 0, NULL);
    probe(t->host, s, like, 0, 2, 0, 0, one);
    for (int i = 0; i < TERMS; i++) {
        t->none[1][i] = one[i] - t->host[i];
    }
    probe(t->device[0], s, like, 1, 1, 0, 0, one);
    probe(two, s, like, 1, 1, 0, 0, NULL);
    probe(t->device[1], s, like, 2, 1, 0, 0, two);
    probe(t->none[0], s, like, 1, 0, 0, 0, t->device[0]);
    for (size_t n = 1; n <= like->slots + 2; n++) {
        probe(t->stream[n], s, like, 0, 1, n, 0, one);
    }
    probe(two, s, like, 0, 3, 0, 0, NULL); // the last of them never recomputed: see APART
    probe(t->recompute[0], s, like, 0, 3, 0, 1, two);
    probe(two, s, like, 0, 3, 0, 1, NULL);
    probe(t->recompute[1], s, like, 0, 3, 0, 2, two);
}

static void sum_terms(double *v, const struct terms *t, const struct choice *c, size_t blocks)
{
    size_t n = c->n_stream, known = c->slots + 2, on_host = blocks - c->n_device;
    double devices = c->n_device ? (double)(c->n_device - 1) : 0;
    double hosts = (double)(on_host - n), recomputed = c->n_recompute ? 1 : 0;
    double further = n > known ? (double)(n - known) : 0;
    const double *stream = t->stream[n > known ? known : n], *before = t->stream[known - 1];
    for (int i = 0; i < TERMS; i++) {
        v[i] = t->none[on_host > 0][i] + (c->n_device ? t->device[0][i] : 0) +
               devices * t->device[1][i] + hosts * t->host[i] + stream[i] +
               further * (t->stream[known][i] - before[i]) + recomputed * t->recompute[0][i] +
               (recomputed > 0 ? (double)(c->n_recompute - 1) * t->recompute[1][i] : 0);
    }
}

// ---- the search ---------------------------------------------------------------------------------

struct candidate {
    double least_s;
    uint16_t n_device, n_stream, n_recompute;
    uint8_t order, embed_on_host, early_adam, lean;
};

struct candidates {
    struct candidate *all;
    size_t n, max;
};

// Fewest recomputed blocks with which the choice fits; false if it never does. v: its terms then.
static bool recompute_least(double *v, struct choice *c, const struct terms *t,
                            const struct budget *budget, size_t blocks)
{
    double device = (double)budget->device, host = (double)budget->host;
    c->n_recompute = 0;
    sum_terms(v, t, c, blocks);
    if (v[DEVICE_BYTES] > device && blocks) {
        c->n_recompute = 1;
        sum_terms(v, t, c, blocks);
        double over = v[DEVICE_BYTES] - device, each = -t->recompute[1][DEVICE_BYTES];
        if (over > 0 && each > 0) {
            double more = ceil(over / each);
            c->n_recompute = more < (double)blocks ? 1 + (size_t)more : blocks;
            sum_terms(v, t, c, blocks);
        }
    }
    return v[DEVICE_BYTES] <= device && v[HOST_BYTES] <= host;
}

// Called with each choice, its terms and whether it fits.
typedef void (*choice_fn)(void *ctx, const struct choice *c, const double *v, bool fits);

// All numbers of blocks for what is the same for all of them. f may be given one choice of several
// that differ in the order of the streamed blocks alone.
static void each_choice(struct search *s, const struct choice *like, choice_fn f, void *ctx)
{
    struct terms t;
    struct choice c = *like;
    double v[TERMS];
    size_t blocks = s->problem->model->units - 1;
    find_terms(&t, s, like);
    for (c.n_device = 0; c.n_device <= blocks && !s->status; c.n_device++) {
        for (c.n_stream = 0; c.n_stream <= blocks - c.n_device; c.n_stream++) {
            bool fits = recompute_least(v, &c, &t, &s->problem->budget, blocks);
            f(ctx, &c, v, fits);
        }
    }
}

static int by_least(const void *x, const void *y)
{
    const struct candidate *a = x, *b = y;
    if (a->least_s != b->least_s) {
        return a->least_s < b->least_s ? -1 : 1;
    }
    if (a->n_stream != b->n_stream) {
        return a->n_stream - b->n_stream;
    }
    return a->n_device != b->n_device       ? b->n_device - a->n_device
           : a->early_adam != b->early_adam ? a->early_adam - b->early_adam
                                            : a->order - b->order;
}

struct gathering {
    struct search *s;
    struct candidates list;
    bool order[STREAM_ORDERS];
    double nearest; // bytes over the budgets
    bool lean;
};

static void gather(void *ctx, const struct choice *c, const double *v, bool fits)
{
    struct gathering *g = ctx;
    struct candidates *list = &g->list;
    const struct budget *budget = &g->s->problem->budget;
    double over = fmax(v[DEVICE_BYTES] - (double)budget->device, 0) +
                  fmax(v[HOST_BYTES] - (double)budget->host, 0);
    if (!fits && over < g->nearest) {
        g->nearest = over;
        plan_of_choice(&g->s->nearest, g->s->problem, c);
        g->s->nearest_over = (size_t)over;
    }
    size_t blocks = g->s->problem->model->units - 1;
    bool same = c->n_stream == 0 || c->n_stream == blocks - c->n_device;
    bool done = false; // where the order makes no difference, one is enough
    for (int o = 0; o < STREAM_ORDERS && fits && !done; o++) {
        if (!g->order[o] || g->s->status) {
            continue;
        }
        if (list->n == list->max) {
            size_t max = list->max ? 2 * list->max : 1024;
            struct candidate *all = realloc(list->all, max * sizeof *all);
            if (!all) {
                g->s->status = error_set(g->s->err, STATUS_FAIL, "no memory for %zu plans", max);
                return;
            }
            list->all = all;
            list->max = max;
        }
        list->all[list->n++] = (struct candidate){.least_s = least_time(v),
                                                  .n_device = (uint16_t)c->n_device,
                                                  .n_stream = (uint16_t)c->n_stream,
                                                  .n_recompute = (uint16_t)c->n_recompute,
                                                  .order = (uint8_t)o,
                                                  .embed_on_host = c->embed_on_host,
                                                  .early_adam = c->early_adam,
                                                  .lean = g->lean};
        done = same;
    }
}

// Slices so long that latency is a small part of their copies.
static size_t slices_for(const struct plan_problem *problem)
{
    const struct device_link *link = &problem->costs->link;
    double rate = fmax(link->in, link->out);
    double bytes = (double)(problem->model->block.params * dtype_bytes(problem->dtype));
    size_t slices = 4;
    while (slices > 1 && rate > 0 && 8 * link->latency_s > bytes / (double)slices / rate) {
        slices /= 2;
    }
    return slices;
}

struct choice search_usual(const struct search *s, bool lean)
{
    return (struct choice){
        .slots = lean ? 1 : 2, .grad_buffers = lean ? 1 : 2, .slices = slices_for(s->problem)};
}

static void try_candidates(struct search *s, struct candidates *list)
{
    if (list->n) {
        qsort(list->all, list->n, sizeof *list->all, by_least);
    }
    for (size_t i = 0; i < list->n && !s->status; i++) {
        const struct candidate *k = list->all + i;
        struct choice c = search_usual(s, k->lean);
        struct plan plan;
        if (k->least_s >= s->best_s) {
            break;
        }
        c.n_device = k->n_device;
        c.n_stream = k->n_stream;
        c.n_recompute = k->n_recompute;
        c.order = (enum stream_order)k->order;
        c.embed_on_host = k->embed_on_host;
        c.early_adam = k->early_adam;
        plan_of_choice(&plan, s->problem, &c);
        search_try(s, &plan);
    }
}

static void gather_all(struct gathering *g, bool embed_on_host)
{
    for (int early = 0; early <= !g->s->problem->hold_updates; early++) {
        struct choice c = search_usual(g->s, g->lean);
        c.embed_on_host = embed_on_host;
        c.early_adam = early;
        each_choice(g->s, &c, gather, g);
    }
}

void search_auto(struct search *s)
{
    struct gathering g = {.s = s, .nearest = INFINITY, .order = {true, true, true}};
    for (int lean = 0; lean < 2 && !g.list.n; lean++) {
        g.lean = lean;
        gather_all(&g, false);
        gather_all(&g, true);
    }
    try_candidates(s, &g.list);
    free(g.list.all);
}

void search_autohete(struct search *s)
{
    struct gathering g = {.s = s, .nearest = INFINITY, .order = {[STREAM_FIRST] = true}};
    for (int i = 0; i < 4 && !g.list.n; i++) {
        g.lean = i / 2;
        gather_all(&g, i % 2);
    }
    try_candidates(s, &g.list);
    free(g.list.all);
}

static void lower(void *ctx, const struct choice *c, const double *v, bool fits)
{
    double *least = ctx;
    (void)c;
    if (fits) {
        *least = fmin(*least, busiest(v));
    }
}

double search_bound(struct search *s)
{
    double least = INFINITY;
    for (size_t slots = 1; slots <= PLAN_SLOTS_MAX; slots++) {
        for (int embed_on_host = 0; embed_on_host < 2; embed_on_host++) {
            struct choice c = {.embed_on_host = embed_on_host,
                               .early_adam = true, // the fewest bytes, where it is allowed
                               .slots = slots,
                               .grad_buffers = 1,
                               .slices = 1};
            each_choice(s, &c, lower, &least);
        }
    }
    return least;
}
