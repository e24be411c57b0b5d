#include "hete/search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// What plans are measured by before they are simulated. Seconds, but for the bytes.
enum term {
    DEVICE_BYTES,
    HOST_BYTES,               // pinned ones too
    BUSY,                     // of each lane
    ADAM_HOST = BUSY + LANES, // on the host
    FETCH_FIRST,              // copies in for the first forward
    OUT_LAST,                 // copies out of the last micro-batch's gradients
    GATHER_FIRST,             // of updated parameters, for the first forward
    SCATTER_LAST,             // of the last micro-batch's gradients
    APART,                    // compute between those two that neither can overlap
    APART_UPDATE,             // compute during which no host Adam can run
    TERMS
};

#define STREAMS (PLAN_SLOTS_MAX + 3)

// Terms of any choice with the same embedding, slots, buffers and slices: sums of these.
struct terms {
    double none[2][TERMS];   // no block; [1]: some share gradient buffers
    double device[2][TERMS]; // the first block with its optimizer there, each other one
    double host[TERMS];
    double stream[STREAMS][TERMS]; // so many of them
    double recompute[2][TERMS];    // the first, each other one
};

// Terms that are found once and for all choices that have the same of everything but blocks.
struct known {
    struct choice like;
    struct terms terms;
    // ZeRO stage 3: so many blocks with a device optimizer and of the host's streamed ones, which
    // take turns in the slots; `found` when they are first asked for.
    double one[TERMS], streamed[STREAMS][STREAMS][TERMS];
    bool found[STREAMS][STREAMS];
    struct known *next;
};

#define CLOSE         0.999         // a plan that cannot gain more is not tried
#define WORTH         0.995         // a plan that needs more of something must be this much faster
#define TOP           16            // plans that are refined
#define BLOCKS_SINGLY ((size_t)128) // with more of them not every number is tried
// Operations that are written down: what the search, and what refining its best plans, may cost.
#define EXPLORE_OPS ((size_t)60000)
#define REFINE_OPS  ((size_t)30000)

// ---- one plan -----------------------------------------------------------------------------------

int plan_bytes(struct plan_bytes *out, const struct step_shape *shape, const struct plan *plan,
               size_t pinned, struct error *err)
{
    struct layout layout;
    int status = layout_make(&layout, shape, plan, pinned, err);
    for (int i = 0; i < SPACES && !status; i++) {
        out->total[i] = layout.total[i];
    }
    out->shared = status ? 0 : layout.region[BUF_SHARED][0].bytes;
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
    *s = (struct search){.plain = *problem,
                         .may_speculate = problem->speculate,
                         .best_s = INFINITY,
                         .nearest_over = SIZE_MAX,
                         .autohete_s = INFINITY,
                         .err = err};
    s->plain.speculate = false;
    s->plain.ranks = problem->ranks > 1 ? problem->ranks : 1;
    s->problem = &s->plain;
    s->all_stream = s->plain.ranks > 1 && problem->zero == 3;
    s->autohete_zero = problem->zero < 0 ? 3 : problem->zero;
    plan_shape(&s->shape, problem);
    if (s->plain.ranks > 1 && problem->model->units <= PLAN_UNITS_MAX) {
        struct plan plan;
        struct plan_bytes bytes = {0};
        plan_resident(&plan, problem->model, problem->B, problem->T, problem->micro_batches,
                      problem->hold_updates);
        s->status = plan_bytes(&bytes, &s->shape, &plan, SIZE_MAX, err);
        s->shared = bytes.shared;
    }
}

void search_close(struct search *s)
{
    for (size_t i = 0; i < 2; i++) {
        graph_free(&s->step[i].graph);
        free(s->step[i].work);
    }
    free(s->timings);
    while (s->known) {
        struct known *next = s->known->next;
        free(s->known);
        s->known = next;
    }
}

static int no_memory(struct search *s, size_t ops)
{
    return error_set(s->err, STATUS_FAIL, "no memory to simulate %zu operations", ops);
}

// Micro-batches that are written down. Steps of more of them are longer by as much for each further
// one. Against all operations of up to 32 of them, in 16000 plans of all kinds on machines of all
// kinds, that was right to 0.5% but for two plans, 0.8% and 4.5% off: the copies of the latter
// disturb each other in a pattern of three micro-batches. With FEW 4: but for four plans, by up to
// 11%.
enum { FEW = 5, ALL = 2 * FEW - 1 }; // up to so many all of them cost no more
enum { STEPS = 3, FIRST = 1 };       // the period is exact from the second step on

// Writes down the step and what each of its operations costs.
static bool write_step(struct search *s, struct written_step *w, const struct step_shape *shape,
                       const struct plan *plan)
{
    w->graph.n_ops = w->graph.n_accesses = 0;
    s->status = s->status ? s->status : step_build(&w->graph, shape, plan, STEP_TRAIN, s->err);
    if (!s->status && w->graph.n_ops > w->max_ops) {
        free(w->work);
        w->max_ops = 2 * w->graph.n_ops;
        w->work = malloc(w->max_ops * sizeof *w->work);
        if (!w->work) {
            w->max_ops = 0;
            s->status = no_memory(s, w->graph.n_ops);
        }
    }
    if (!s->status) {
        costs_of_graph(s->problem->costs, shape, plan, &w->graph, w->work);
    }
    return !s->status;
}

// ---- terms --------------------------------------------------------------------------------------

// Gradients of all host units leave, their Adam runs and their parameters come back between the
// last block's backward (its gradient is the first) and its next forward (by then all parameters
// but its own have been used). What computes from that forward to that backward is APART; while
// updates are held for the norm, no Adam runs up to the clip either.
static void terms_of_step(double *v, const struct search *s, const struct written_step *w,
                          const struct step_shape *shape, const struct plan *plan)
{
    size_t last = shape->model->units - 1;
    bool head = false, from_last = false;
    double compute = 0;
    for (size_t i = 0; i < w->graph.n_ops; i++) {
        const struct op *op = w->graph.ops + i;
        double seconds = cost_alone(s->problem->costs, op, w->work[i]);
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
            v[APART_UPDATE] = plan->hold_updates && !plan->speculate ? compute : v[APART];
        }
        v[ADAM_HOST] += op->kind == OP_HOST_ADAM || op->kind == OP_HOST_SPECULATE ? seconds : 0;
        v[FETCH_FIRST] += op->kind == OP_FETCH && !head ? seconds : 0;
        v[OUT_LAST] +=
            op->kind == OP_GRAD_OUT && op->micro + 1 == shape->micro_batches ? seconds : 0;
        v[GATHER_FIRST] += op->kind == OP_GATHER && !head ? seconds : 0;
        v[SCATTER_LAST] +=
            op->kind == OP_SCATTER && op->micro + 1 == shape->micro_batches ? seconds : 0;
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
    double update = v[APART_UPDATE] + fmax(v[ADAM_HOST], fmax(v[FETCH_FIRST], v[GATHER_FIRST]));
    return fmax(busiest(v), fmax(update, v[APART] + fmax(v[OUT_LAST], v[SCATTER_LAST])));
}

// Further micro-batches than those that are written down.
static double further(const struct step_shape *shape)
{
    return shape->micro_batches > ALL ? (double)(shape->micro_batches - FEW) : 0;
}

// Writes the step down with as many micro-batches as that takes: in s->step[0], and if there are
// further ones, with one less in s->step[1].
static bool write_few(struct search *s, double *v, const struct step_shape *shape,
                      const struct plan *plan)
{
    struct step_shape few = *shape;
    double more = further(shape), less[TERMS] = {0};
    few.micro_batches = more > 0 ? FEW : shape->micro_batches;
    if (!write_step(s, s->step, &few, plan)) {
        return false;
    }
    terms_of_step(v, s, s->step, &few, plan);
    if (more > 0) {
        few.micro_batches--;
        if (!write_step(s, s->step + 1, &few, plan)) {
            return false;
        }
        terms_of_step(less, s, s->step + 1, &few, plan);
        for (int i = 0; i < TERMS; i++) {
            v[i] += more * (v[i] - less[i]);
        }
    }
    return true;
}

static bool time_step(struct search *s, const struct written_step *w, bool fifo,
                      struct lane_times *out)
{
    size_t n = STEPS * w->graph.n_ops;
    if (n > s->max_timings) {
        free(s->timings);
        s->max_timings = 2 * n;
        s->timings = malloc(s->max_timings * sizeof *s->timings);
        if (!s->timings) {
            s->max_timings = 0;
            s->status = no_memory(s, w->graph.n_ops);
            return false;
        }
    }
    struct simulation in = {.graph = &w->graph,
                            .work = w->work,
                            .link = s->problem->costs->link,
                            .fifo = fifo,
                            .steps = STEPS};
    s->simulations++;
    s->status = simulate(&in, s->timings, s->err);
    if (!s->status) {
        lane_times(out, &w->graph, s->timings, FIRST, STEPS);
    }
    return !s->status;
}

bool search_predict(struct search *s, const struct plan *plan, double limit_s,
                    struct prediction *out)
{
    double v[TERMS] = {0}, more = further(&s->shape);
    struct lane_times few, less = {0};
    if (!write_few(s, v, &s->shape, plan)) {
        return false;
    }
    s->written += s->step[0].graph.n_ops + (more > 0 ? s->step[1].graph.n_ops : 0);
    if (least_time(v) >= limit_s || !time_step(s, s->step, plan->fifo, &few) ||
        (more > 0 && !time_step(s, s->step + 1, plan->fifo, &less))) {
        return false;
    }
    *out = (struct prediction){.step_s = few.period_s, .bound_s = busiest(v)};
    if (more > 0) {
        out->step_s += more * (few.period_s - less.period_s);
        out->step_s = fmax(out->step_s, out->bound_s); // but for rounding it is
    }
    for (int l = 0; l < LANES; l++) {
        double busy = few.busy_s[l] - less.busy_s[l];
        double exposed = few.exposed_s[l] - less.exposed_s[l];
        out->busy_s[l] = few.busy_s[l] + more * busy;
        out->exposed_s[l] = fmax(few.exposed_s[l] + more * exposed, 0);
    }
    return true;
}

// Keeps the plan if it is the best so far. False if it does not fit.
static bool try_plan(struct search *s, const struct plan *plan)
{
    struct plan_bytes bytes;
    struct prediction p;
    s->last_s = INFINITY;
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
    if (search_predict(s, plan, s->best_s, &p)) {
        s->last_s = p.step_s;
        if (p.step_s < s->best_s) {
            s->best_s = p.step_s;
            s->best = *plan;
        }
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
        return (2 * (i + 1) * c->n_stream + n) / (2 * n) > (2 * i * c->n_stream + n) / (2 * n);
    default:
        return i >= n - c->n_stream;
    }
}

void plan_of_choice(struct plan *plan, const struct plan_problem *problem, const struct choice *c)
{
    plan_resident(plan, problem->model, problem->B, problem->T, problem->micro_batches,
                  problem->hold_updates);
    size_t last = problem->model->units - 1;
    bool several = problem->ranks > 1;
    size_t streamed = c->n_stream + (c->zero == 3 ? c->n_device : 0);
    plan->ranks = several ? problem->ranks : 1;
    plan->unit[0].host_optimizer = c->embed_on_host;
    plan->unit[0].shard = several && (c->embed_on_host || c->embed_shard);
    for (size_t u = 1; u <= last; u++) {
        bool host = u > c->n_device;
        plan->unit[u] = (struct unit_plan){.recompute = u <= c->n_recompute,
                                           .stream = host ? streams(c, u, last) : c->zero == 3,
                                           .host_optimizer = host,
                                           .shard = several && (host || c->zero > 0)};
    }
    plan->early_adam = c->early_adam && !problem->hold_updates;
    plan->speculate =
        problem->speculate && problem->hold_updates && (c->n_device < last || c->embed_on_host);
    plan->slots = c->slots < streamed ? c->slots : streamed;
    if (c->n_device < last || c->zero > 0) {
        plan->grad_buffers = c->grad_buffers;
    }
    if (c->n_device < last || c->embed_on_host) {
        plan->slices = c->slices;
    }
}

// out = terms of a step of so many blocks, less those of another.
static void probe(double *out, struct search *s, const struct choice *like, size_t device,
                  size_t host, size_t stream, size_t recompute, const double *less)
{
    struct model few = *s->problem->model;
    struct plan_problem problem = *s->problem;
    struct step_shape shape = s->shape;
    struct choice c = *like;
    struct plan plan;
    struct plan_bytes bytes = {0};
    double v[TERMS] = {0};
    few.units = 1 + device + host + stream;
    problem.model = shape.model = &few;
    memset(out, 0, TERMS * sizeof *out);
    c.n_device = device;
    c.n_stream = stream;
    c.n_recompute = recompute;
    plan_of_choice(&plan, &problem, &c);
    if (!write_few(s, v, &shape, &plan)) {
        return;
    }
    s->status = plan_bytes(&bytes, &shape, &plan, SIZE_MAX, s->err);
    v[DEVICE_BYTES] = (double)bytes.total[SPACE_DEVICE];
    v[HOST_BYTES] =
        (double)bytes.total[SPACE_PINNED] + (double)bytes.total[SPACE_HOST] - (double)bytes.shared;
    for (int i = 0; i < TERMS; i++) {
        out[i] = v[i] - (less ? less[i] : 0);
    }
}

// ZeRO stage 3: what so many blocks with a device optimizer, and of the host's streamed ones, add
// to a block of the host. From two more than there are slots on each one adds the same.
static const double *streamed_terms(struct search *s, struct known *k, size_t device, size_t host)
{
    double *v = k->streamed[device][host];
    if (!k->found[device][host]) {
        probe(v, s, &k->like, device, 1, host, 0, k->one);
        k->found[device][host] = true;
    }
    return v;
}

static void find_terms(struct known *k, struct search *s)
{
    double *one = k->one, two[TERMS];
    struct terms *t = &k->terms;
    const struct choice *like = &k->like;
    probe(one, s, like, 0, 1, 0, 0, NULL);
    probe(t->host, s, like, 0, 2, 0, 0, one);
    for (int i = 0; i < TERMS; i++) {
        t->none[1][i] = one[i] - t->host[i];
    }
    if (like->zero < 3) {
        probe(t->device[0], s, like, 1, 1, 0, 0, one);
        probe(two, s, like, 1, 1, 0, 0, NULL);
        probe(t->device[1], s, like, 2, 1, 0, 0, two);
        probe(t->none[0], s, like, 1, 0, 0, 0, t->device[0]);
    } else {
        probe(t->none[0], s, like, 1, 0, 0, 0, streamed_terms(s, k, 1, 0));
    }
    for (size_t n = 1; like->zero < 3 && n <= like->slots + 2; n++) {
        probe(t->stream[n], s, like, 0, 1, n, 0, one);
    }
    probe(two, s, like, 0, 3, 0, 0, NULL); // the last of them never recomputed: see APART
    probe(t->recompute[0], s, like, 0, 3, 0, 1, two);
    probe(two, s, like, 0, 3, 0, 1, NULL);
    probe(t->recompute[1], s, like, 0, 3, 0, 2, two);
}

static struct known *known_for(struct search *s, const struct choice *c)
{
    struct known *k = s->known;
    for (; k; k = k->next) {
        if (k->like.embed_on_host == c->embed_on_host && k->like.early_adam == c->early_adam &&
            k->like.slots == c->slots && k->like.grad_buffers == c->grad_buffers &&
            k->like.slices == c->slices && k->like.zero == c->zero &&
            k->like.embed_shard == c->embed_shard) {
            return k;
        }
    }
    k = s->status ? NULL : calloc(1, sizeof *k);
    if (!k) {
        s->status = s->status ? s->status : error_set(s->err, STATUS_FAIL, "no memory to plan");
        return NULL;
    }
    k->like = *c;
    k->next = s->known;
    s->known = k;
    find_terms(k, s);
    return k;
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

// Of ZeRO stage 3, as far as it differs from the sum above.
static void add_streamed(double *v, struct search *s, struct known *k, const struct choice *c)
{
    size_t all = c->slots + 2, device = c->n_device < all ? c->n_device : all;
    size_t host = c->n_stream < all ? c->n_stream : all;
    const double *here = streamed_terms(s, k, device, host);
    const double *fewer = device == all ? streamed_terms(s, k, device - 1, host) : here;
    const double *less = host == all ? streamed_terms(s, k, device, host - 1) : here;
    for (int i = 0; i < TERMS; i++) {
        v[i] += here[i] + (double)(c->n_device - device) * (here[i] - fewer[i]) +
                (double)(c->n_stream - host) * (here[i] - less[i]);
    }
}

void search_estimate(struct search *s, const struct choice *c, struct estimate *out)
{
    struct known *k = known_for(s, c);
    double v[TERMS] = {0};
    if (k) {
        sum_terms(v, &k->terms, c, s->problem->model->units - 1);
    }
    if (k && c->zero == 3) {
        add_streamed(v, s, k, c);
    }
    *out = (struct estimate){.device_bytes = v[DEVICE_BYTES],
                             .host_bytes = v[HOST_BYTES] + (double)s->shared,
                             .busiest_s = busiest(v),
                             .streaming_s = fmax(v[BUSY + LANE_COPY_IN], v[BUSY + LANE_COMM]),
                             .least_s = least_time(v)};
    out->over = fmax(out->device_bytes - (double)s->problem->budget.device, 0) +
                fmax(out->host_bytes - (double)s->problem->budget.host, 0);
}

// ---- the search ---------------------------------------------------------------------------------

bool search_try_choice(struct search *s, const struct choice *c, struct handicap handicap)
{
    struct estimate e;
    struct plan plan;
    s->last_s = INFINITY;
    search_estimate(s, c, &e);
    if (s->status || (e.over <= 0 && e.least_s >= s->best_s) || e.over >= (double)s->nearest_over) {
        return e.over <= 0;
    }
    plan_of_choice(&plan, s->problem, c);
    plan.barrier = handicap.barrier;
    plan.fifo = handicap.fifo;
    plan.serial_copies = handicap.serial_copies;
    return try_plan(s, &plan);
}

// Slices so long that latency is a small part of their copies.
static size_t slices_for(const struct plan_problem *problem)
{
    const struct device_link *link = &problem->costs->link;
    double rate = fmax(link->in, link->out);
    double bytes = (double)(problem->model->block.params * dtype_bytes(problem->dtype)) /
                   (double)problem->ranks; // of a piece
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

void choose_stage(struct choice *c, const struct plan_problem *problem, size_t zero)
{
    zero = problem->zero < 0 ? zero : (size_t)problem->zero;
    c->zero = problem->ranks <= 1 ? 0 : zero == 1 ? 2 : zero;
    c->embed_shard = c->zero > 0 && !c->embed_on_host;
}

// Fewest recomputed blocks with which the choice fits, or all blocks if it never does.
static void recompute_least(struct search *s, struct choice *c, struct estimate *e)
{
    size_t blocks = s->problem->model->units - 1;
    double device = (double)s->problem->budget.device;
    c->n_recompute = 0;
    search_estimate(s, c, e);
    if (e->device_bytes > device && blocks > 1) {
        // All blocks but the first of them save the same.
        struct estimate one, all;
        c->n_recompute = 1;
        search_estimate(s, c, &one);
        c->n_recompute = blocks;
        search_estimate(s, c, &all);
        double each = (one.device_bytes - all.device_bytes) / (double)(blocks - 1);
        double more = ceil((one.device_bytes - device) / each);
        c->n_recompute = more < (double)blocks ? 1 + (size_t)fmax(more, 0) : blocks;
        search_estimate(s, c, e);
    }
}

// Called with each choice that may be the best of its numbers of blocks.
typedef void (*choice_fn)(void *ctx, const struct choice *c, const struct estimate *e);

// The number after n, `by` further on; the last one is `end`.
static size_t next(size_t n, size_t by, size_t end)
{
    return n < end && end - n < by ? end : n + by;
}

// by: every so many blocks.
static void each_choice(struct search *s, struct choice c, size_t by, choice_fn f, void *ctx)
{
    size_t blocks = s->problem->model->units - 1;
    for (c.n_device = 0; c.n_device <= blocks; c.n_device = next(c.n_device, by, blocks)) {
        size_t on_host = blocks - c.n_device;
        c.n_stream = s->all_stream ? on_host : 0;
        for (; c.n_stream <= on_host; c.n_stream = next(c.n_stream, by, on_host)) {
            struct estimate e;
            recompute_least(s, &c, &e);
            if (s->status) {
                return;
            }
            f(ctx, &c, &e);
        }
    }
}

struct candidate {
    double least_s, step_s; // step_s: INFINITY: not simulated
    struct choice choice;
};

// What a policy's numbers may be, and the choices that fit.
struct exploration {
    struct search *s;
    bool order[STREAM_ORDERS];
    struct candidate *list;
    size_t n, max;
    struct choice nearest; // of those that do not fit
    double over;
    // The best that were simulated, best first, and how many.
    struct candidate top[TOP];
    size_t n_top;
};

static void gather(void *ctx, const struct choice *c, const struct estimate *e)
{
    struct exploration *x = ctx;
    if (e->over > 0) {
        x->nearest = e->over < x->over ? *c : x->nearest;
        x->over = fmin(x->over, e->over);
        return;
    }
    if (x->n == x->max) {
        size_t max = x->max ? 2 * x->max : 1024;
        struct candidate *list = realloc(x->list, max * sizeof *list);
        if (!list) {
            x->s->status = error_set(x->s->err, STATUS_FAIL, "no memory for %zu plans", max);
            return;
        }
        x->list = list;
        x->max = max;
    }
    x->list[x->n++] = (struct candidate){e->least_s, INFINITY, *c};
}

static int by_least(const void *x, const void *y)
{
    const struct candidate *p = x, *q = y;
    const struct choice *a = &p->choice, *b = &q->choice;
    float x_s = (float)p->least_s, y_s = (float)q->least_s; // sums differ in their last bits
    if (x_s != y_s) {
        return x_s < y_s ? -1 : 1;
    }
    if (a->n_stream != b->n_stream) {
        return a->n_stream < b->n_stream ? -1 : 1;
    }
    if (a->n_device != b->n_device) {
        return a->n_device > b->n_device ? -1 : 1;
    }
    return a->embed_on_host != b->embed_on_host ? a->embed_on_host - b->embed_on_host
                                                : a->early_adam - b->early_adam;
}

static void remember(struct exploration *x, struct candidate c)
{
    if (c.step_s == INFINITY) {
        return;
    }
    size_t i = x->n_top < TOP ? x->n_top++ : TOP;
    for (; i > 0 && c.step_s < x->top[i - 1].step_s; i--) {
        if (i < TOP) {
            x->top[i] = x->top[i - 1];
        }
    }
    if (i < TOP) {
        x->top[i] = c;
    }
}

// Simulates the candidate in each order of its streamed blocks that makes a difference.
static void try_orders(struct exploration *x, struct candidate c)
{
    struct search *s = x->s;
    size_t on_host = s->problem->model->units - 1 - c.choice.n_device;
    bool same = c.choice.n_stream == 0 || c.choice.n_stream == on_host, done = false;
    for (int o = 0; o < STREAM_ORDERS && !done; o++) {
        if (x->order[o]) {
            c.choice.order = (enum stream_order)o;
            search_try_choice(s, &c.choice, (struct handicap){0});
            c.step_s = s->last_s;
            remember(x, c);
            done = same;
        }
    }
}

// The candidate that promises most comes first: few others promise as much as it keeps.
static void try_gathered(struct exploration *x)
{
    struct search *s = x->s;
    size_t first = 0, n = 0, end = s->written + EXPLORE_OPS;
    for (size_t i = 1; i < x->n; i++) {
        first = by_least(x->list + i, x->list + first) < 0 ? i : first;
    }
    if (x->n) {
        try_orders(x, x->list[first]);
    } else if (x->over < INFINITY) {
        search_try_choice(s, &x->nearest, (struct handicap){0}); // for the error
    }
    for (size_t i = 0; i < x->n; i++) {
        if (i != first && x->list[i].least_s < s->best_s) {
            x->list[n++] = x->list[i];
        }
    }
    if (n) {
        qsort(x->list, n, sizeof *x->list, by_least);
    }
    for (size_t i = 0; i < n && x->list[i].least_s < s->best_s * CLOSE; i++) {
        if (s->status || s->written >= end) {
            break;
        }
        try_orders(x, x->list[i]);
    }
}

// Gathers all numbers of blocks for one choice of the rest.
static void gather_all(struct exploration *x, bool lean, bool embed_on_host)
{
    size_t by = 1 + (x->s->problem->model->units - 1) / BLOCKS_SINGLY;
    for (int early = 0; early <= !x->s->problem->hold_updates; early++) {
        struct choice c = search_usual(x->s, lean);
        c.embed_on_host = embed_on_host;
        choose_stage(&c, x->s->problem, 3);
        c.early_adam = early;
        each_choice(x->s, c, by, gather, x);
    }
}

// ---- beyond a few numbers -----------------------------------------------------------------------

// Blocks are of one kind: two of them may take each other's part, or one decision of it, in as many
// bytes; and one may recompute without need, which can take compute out of the way of copies. False
// if that changes nothing, or makes no plan.
static bool change_blocks(struct plan *plan, size_t u, size_t v, int what)
{
    struct unit_plan *a = plan->unit + u, *b = plan->unit + v, x = *a, y = *b;
    if (what == 0) {
        *a = y;
        *b = x;
        return x.host_optimizer != y.host_optimizer;
    }
    if (what == 1) {
        a->stream = y.stream;
        b->stream = x.stream;
        return x.stream != y.stream && x.host_optimizer && y.host_optimizer;
    }
    if (what == 2) {
        a->recompute = y.recompute;
        b->recompute = x.recompute;
        return x.recompute != y.recompute;
    }
    a->recompute = true;
    return !x.recompute && v == u + 1;
}

// Changes blocks of a plan while that makes it faster.
static void refine(struct search *s, const struct choice *start, double step_s, size_t end)
{
    size_t units = s->problem->model->units;
    struct plan plan;
    bool improved = true, any = false;
    plan_of_choice(&plan, s->problem, start);
    while (improved) {
        improved = false;
        for (int what = 0; what < 4; what++) {
            for (size_t gap = 1; gap < units - 1; gap++) {
                for (size_t u = 1; u + gap < units && s->written < end && !s->status; u++) {
                    struct plan other = plan;
                    struct prediction p;
                    if (change_blocks(&other, u, u + gap, what) &&
                        search_predict(s, &other, step_s, &p) && p.step_s < step_s) {
                        plan = other;
                        step_s = p.step_s;
                        improved = any = true;
                    }
                }
            }
        }
    }
    if (any) {
        try_plan(s, &plan);
    }
}

// Other counts than the usual ones, where they gain enough to pay for what no simulation knows:
// work for more operations, memory that something else could use.
static void tune(struct search *s)
{
    for (int what = 0; what < 4 && s->best_s < INFINITY; what++) {
        struct plan plan = s->best;
        double before = s->best_s;
        size_t *slices = &plan.slices;
        *slices = what == 0 ? 2 * *slices : what == 1 ? *slices / 2 : *slices;
        plan.grad_buffers += what == 2 && plan.grad_buffers;
        plan.slots += what == 3 && plan.slots;
        s->best_s *= WORTH;
        if (*slices >= 1 && *slices <= PLAN_SLICES_MAX) {
            try_plan(s, &plan);
        }
        s->best_s = s->best_s < before * WORTH ? s->best_s : before;
    }
}

void search_auto(struct search *s)
{
    struct exploration x = {.s = s, .over = INFINITY, .order = {true, true, true}};
    for (int lean = 0; lean < 2 && !x.n; lean++) {
        gather_all(&x, lean, false);
        gather_all(&x, lean, true);
    }
    try_gathered(&x);
    free(x.list);
    for (size_t i = 0, end = s->written + REFINE_OPS; i < x.n_top && s->written < end; i++) {
        refine(s, &x.top[i].choice, x.top[i].step_s, end);
    }
    tune(s);
}

void search_autohete(struct search *s)
{
    struct exploration x = {.s = s, .over = INFINITY, .order = {[STREAM_FIRST] = true}};
    for (int i = 0; i < 4 && !x.n; i++) {
        gather_all(&x, i / 2, i % 2);
    }
    try_gathered(&x);
    free(x.list);
}

// Of each number of streamed blocks as few recomputed ones as fit. With more streamed blocks there
// are more copies in and gathers, and no more of anything else: it is enough to find where those
// come to be most (up to as many as there are slots, a streamed block saves nothing: these are all
// tried).
static double least_streaming(struct search *s, struct choice c, double least)
{
    size_t on_host = s->problem->model->units - 1 - c.n_device;
    size_t low = c.slots + 2 < on_host ? c.slots + 2 : on_host, high = on_host;
    struct estimate e;
    low = s->all_stream ? on_host : low;
    for (c.n_stream = s->all_stream ? low : 0; c.n_stream <= low; c.n_stream++) {
        recompute_least(s, &c, &e);
        least = e.over <= 0 ? fmin(least, e.busiest_s) : least;
    }
    while (low < high) {
        c.n_stream = low + (high - low) / 2;
        recompute_least(s, &c, &e);
        least = e.over <= 0 ? fmin(least, e.busiest_s) : least;
        if (e.over > 0 || e.streaming_s < e.busiest_s) {
            low = c.n_stream + 1;
        } else {
            high = c.n_stream;
        }
    }
    c.n_stream = low;
    recompute_least(s, &c, &e);
    return e.over <= 0 ? fmin(least, e.busiest_s) : least;
}

static double least_with(struct search *s, struct choice c, double least)
{
    size_t blocks = s->problem->model->units - 1;
    for (c.n_device = 0; c.n_device <= blocks && !s->status; c.n_device++) {
        struct estimate e; // nothing recomputed or streamed
        search_estimate(s, &c, &e);
        least = e.busiest_s < least ? least_streaming(s, c, least) : least;
    }
    return least;
}

// Does the problem leave units on the device this stage?
static bool allows(const struct plan_problem *p, size_t zero)
{
    struct choice c = {0};
    choose_stage(&c, p, zero);
    return c.zero == zero;
}

double search_bound(struct search *s)
{
    static const size_t stages[] = {0, 2, 3};
    double least = INFINITY;
    for (size_t slots = 1; slots <= PLAN_SLOTS_MAX; slots++) {
        for (size_t i = 0; i < 9; i++) {
            bool host = i / 3 == 0, shard = i / 3 == 1;
            struct choice c = {.embed_on_host = host,
                               .embed_shard = shard,
                               .zero = stages[i % 3],
                               .early_adam = true, // the fewest bytes, where it is allowed
                               .slots = slots,
                               .grad_buffers = 1,
                               .slices = 1};
            if (allows(s->problem, c.zero) && (host || allows(s->problem, 2 * (size_t)shard) ||
                                               (shard && allows(s->problem, 3)))) {
                least = least_with(s, c, least);
            }
        }
    }
    return least;
}

// ---- units of several ZeRO stages ---------------------------------------------------------------

// As many slots and gradient buffers as there is use for.
static void count_buffers(struct plan *plan)
{
    size_t streamed = 0, sharded = 0;
    for (size_t u = 1; u < plan->units; u++) {
        streamed += plan->unit[u].stream;
        sharded += plan->unit[u].shard;
    }
    plan->slots = plan->slots ? plan->slots : 2;
    plan->slots = plan->slots < streamed ? plan->slots : streamed;
    plan->grad_buffers = sharded && !plan->grad_buffers ? 2 : plan->grad_buffers;
}

// Gives those of `n` units from `first` on whose optimizer is on the device another stage, and lets
// `keep` more blocks keep their activations. False if that changes nothing.
static bool change_stage(struct plan *plan, size_t first, size_t n, size_t zero, size_t keep)
{
    bool changed = false;
    for (size_t u = first; u < first + n && u < plan->units; u++) {
        struct unit_plan *d = plan->unit + u, was = *d;
        if (!d->host_optimizer) {
            d->shard = zero > 0;
            d->stream = zero == 3 && u > 0;
            changed |= !unit_plan_same(d, &was);
        }
    }
    for (size_t u = plan->units - 1; u > 0 && keep > 0; u--) {
        keep -= plan->unit[u].recompute;
        plan->unit[u].recompute = false;
    }
    count_buffers(plan);
    return changed && keep == 0;
}

// Of longer and shorter runs of units.
void search_mix(struct search *s)
{
    static const size_t stages[] = {0, 2, 3};
    size_t end = s->written + REFINE_OPS, length = s->best.units;
    for (bool any = false; s->best_s < INFINITY && length > 0; length = any ? length : length / 2) {
        any = false;
        for (size_t first = 0; first < s->best.units; first += length) {
            for (size_t i = 0; i < 6 && s->written < end && !s->status; i++) {
                struct plan plan = s->best;
                double before = s->best_s;
                if (change_stage(&plan, first, length, stages[i % 3], i / 3)) {
                    try_plan(s, &plan);
                }
                any |= s->best_s < before;
            }
        }
    }
}
