// session.c - opening: layout, arenas, graphs, proofs, lanes; and steps: starting and finishing
// them.
//
// The caller's thread starts and awaits; what happens in between is in operate.c. Parameters and
// moments in and out are in state.c.
#include "hete/check.h"
#include "hete/inside.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// ---- the public calls ---------------------------------------------------------------------------

const struct error *session_error(const struct session *s)
{
    return &s->error;
}

size_t session_in_flight(const struct session *s)
{
    return (size_t)(s->started - s->finished);
}

static bool ok(const struct session *s)
{
    return s->error.status == STATUS_OK;
}

// Makes a graph the one that runs. Nothing is in flight.
static void load(struct session *s, const struct graph *g)
{
    if (s->loaded == g) {
        return;
    }
    s->loaded = g;
    s->runs = 0;
    if (s->lanes) {
        const double *pace = g == &s->step ? s->pace : NULL;
        execute_load(s->lanes, g, s->plan.fifo && g == &s->step, pace, &s->error);
    }
}

static void release(struct session *s)
{
    if (s->held) {
        s->held = false;
        execute_release(s->lanes);
    }
}

static void put_tokens(struct session *s, uint64_t step, size_t micro_batches,
                       const int32_t *tokens, const int32_t *targets)
{
    size_t n = s->config.B * s->config.T;
    for (size_t m = 0; m < micro_batches; m++) {
        int32_t *to = (int32_t *)at(s, BUF_HOST_TOKENS, host_tokens(s, step, m));
        memcpy(to, tokens + m * n, n * sizeof *to);
        memcpy(to + n, targets + m * n, n * sizeof *to);
    }
}

void session_start(struct session *s, const int32_t *tokens, const int32_t *targets,
                   const struct session_update *update)
{
    assert(session_in_flight(s) < IN_FLIGHT);
    assert(s->plan.hold_updates || (update->clip <= 0 && !update->guard));
    struct flight *f = s->flight + s->started % IN_FLIGHT;
    f->update = *update;
    f->result = (struct session_result){0};
    f->updates = update->step - s->reported;
    atomic_store(&f->refuted, false);
    if (!s->plan.hold_updates) { // every step updates
        f->adamw = adamw_of(update, 1, update->step + session_in_flight(s));
    }
    if (session_in_flight(s) == 0) {
        load(s, &s->step);
    }
    release(s);
    put_tokens(s, s->started, s->config.micro_batches, tokens, targets);
    if (s->lanes && s->started == 0) {
        device_rest(s->dev); // from now on the lanes compute
    }
    if (s->lanes && ok(s)) {
        execute_start(s->lanes, s->started, &s->error);
    }
    s->started++;
}

// Ranks whose updates are not held are in different places of the next step when they hear of it,
// and some may wait there for others: none is held, the next step ends as it would have.
static void settle(struct session *s)
{
    if (!stands_still(s)) {
        execute_wait(s->lanes, s->started - 1, &s->error);
    } else {
        execute_settle(s->lanes);
    }
}

void session_finish(struct session *s, struct session_result *result)
{
    assert(session_in_flight(s) > 0);
    release(s);
    if (s->lanes && ok(s)) {
        execute_wait(s->lanes, s->finished, &s->error);
    } else if (ok(s)) {
        graph_run_serial(&s->step, s->finished, run_op, s, &s->error);
    }
    *result = s->flight[s->finished % IN_FLIGHT].result;
    s->held = s->lanes && !(isfinite(result->loss) && isfinite(result->norm));
    if (s->held && ok(s)) {
        settle(s);
    }
    s->finished++;
    s->reported += result->updated;
}

void session_step(struct session *s, const int32_t *tokens, const int32_t *targets,
                  const struct session_update *update, struct session_result *result)
{
    session_start(s, tokens, targets, update);
    session_finish(s, result);
}

// Runs a graph that is no training step.
static void run_alone(struct session *s, const struct graph *g)
{
    assert(session_in_flight(s) == 0);
    release(s);
    load(s, g);
    if (s->lanes && ok(s)) {
        if (execute_start(s->lanes, s->runs, &s->error) == STATUS_OK) {
            execute_wait(s->lanes, s->runs, &s->error);
        }
    } else if (ok(s)) {
        graph_run_serial(g, s->runs, run_op, s, &s->error);
    }
    s->runs++;
}

void session_losses(struct session *s, const int32_t *tokens, const int32_t *targets, float *losses)
{
    load(s, &s->loss);
    put_tokens(s, s->runs, 1, tokens, targets);
    run_alone(s, &s->loss);
    memcpy(losses, at(s, BUF_HOST_LOSSES, 0), s->config.B * s->config.T * sizeof *losses);
}

size_t session_decode_limit(const struct session *s)
{
    return step_decode_limit(&s->shape);
}

size_t session_logits(const struct session *s)
{
    return s->model->logits;
}

void session_decode(struct session *s, int32_t token, size_t pos, float *logits)
{
    s->token = token;
    s->pos = pos;
    run_alone(s, &s->decode);
    size_t n = s->model->logits;
    device_peek(s->dev, s->host_logits, at(s, BUF_WORK, 0), n * elem_bytes(s));
    to_fp32(logits, s->host_logits, s->dev->dtype, n);
}

const struct graph *session_graph(const struct session *s)
{
    return &s->step;
}

size_t session_timings(const struct session *s, struct timing *timings, size_t steps,
                       uint64_t *first)
{
    *first = 0;
    return s->lanes && s->loaded == &s->step ? execute_timings(s->lanes, timings, steps, first) : 0;
}

bool session_measure(struct session *s, struct measured *out)
{
    uint64_t first;
    size_t steps = session_timings(s, s->timings, EXECUTE_KEPT_STEPS, &first);
    if (steps < 3) {
        return false;
    }
    *out = (struct measured){.pageable_copies = device_pageable_copies(s->dev),
                             .guesses = s->guesses,
                             .right = s->right,
                             .host_threads = s->host ? s->host->threads : 0,
                             .isa = s->host ? s->host->isa : s->dev->isa};
    lane_times(&out->times, &s->step, s->timings, 1, steps);
    execute_late(s->lanes, first + 1, &out->late, &out->paced); // the first one warms up
    for (size_t i = 0; i < s->step.n_ops; i++) {
        const struct op *op = s->step.ops + i;
        size_t elems, ignored;
        out->bytes_in += op->lane == LANE_COPY_IN ? s->work[i] : 0;
        out->bytes_out += op->lane == LANE_COPY_OUT ? s->work[i] : 0;
        if (op->kind == OP_HOST_ADAM) {
            elems = step_slice(&s->shape, &s->plan, op->unit, op->slice, &ignored);
            out->host_adam_params += (double)elems;
        }
        bool adam = op->kind == OP_HOST_ADAM || op->kind == OP_HOST_SPECULATE;
        for (size_t step = 1; adam && step < steps; step++) {
            const struct timing *t = s->timings + step * s->step.n_ops + i;
            out->host_adam_s += (t->end - t->start) / (double)(steps - 1);
        }
    }
    return true;
}

// ---- opening ------------------------------------------------------------------------------------

void session_print_memory(const struct session *s, FILE *out)
{
    static const char *const name[SPACES] = {"device", "pinned host", "host"};
    for (int space = 0; space < SPACES; space++) {
        if (s->layout.total[space] == 0) {
            continue;
        }
        fprintf(out, "%s memory (bytes)\n", name[space]);
        for (int c = 0; c < CATEGORIES; c++) {
            if (s->layout.category[space][c]) {
                fprintf(out, "  %-18s %15zu\n", category_name[c], s->layout.category[space][c]);
            }
        }
        fprintf(out, "  %-18s %15zu\n", "arena, sealed", s->layout.total[space]);
    }
    fprintf(out, "  %-18s %15zu  outside the arena\n", "thread scratch",
            s->dev->workspace_bytes + (s->host ? s->host->workspace_bytes : 0));
}

size_t session_arena_bytes(const struct session *s)
{
    return s->layout.total[SPACE_DEVICE];
}

// Tokens of a step: beyond any machine, and few enough that the sizes of the largest model that can
// be asked for (gpt_check) stay below 2^64 bytes.
#define TOKENS_MAX ((size_t)1 << 31)

static int check_batch(const struct session_config *c, struct error *err)
{
    if (c->B < 1 || c->T < 1 || c->micro_batches < 1 || c->B > TOKENS_MAX ||
        c->T > TOKENS_MAX / c->B || c->micro_batches > TOKENS_MAX / (c->B * c->T)) {
        return error_set(err, STATUS_FAIL,
                         "%zu micro-batches of %zu rows of %zu tokens: a step has from 1 to %zu "
                         "tokens; see --micro-batch, --seq and --total-batch",
                         c->micro_batches, c->B, c->T, TOKENS_MAX);
    }
    return STATUS_OK;
}

static int take_arenas(struct session *s, struct error *err)
{
    const size_t *total = s->layout.total;
    void *device, *pinned = NULL, *host = NULL;
    if (device_arena(s->dev, total[SPACE_DEVICE], &device, err) ||
        (total[SPACE_PINNED] &&
         device_host_arena(s->dev, total[SPACE_PINNED], true, &pinned, err)) ||
        (total[SPACE_HOST] && device_host_arena(s->dev, total[SPACE_HOST], false, &host, err))) {
        return err->status;
    }
    s->arena[SPACE_DEVICE] = device;
    s->arena[SPACE_PINNED] = pinned;
    s->arena[SPACE_HOST] = host;
    return STATUS_OK;
}

// A device that queues stores the norms where the host reads them, and sends what ranks share.
static int check_norms(const struct session *s, struct error *err)
{
    const struct region *shared = s->layout.region[BUF_SHARED];
    bool pinned = shared->bytes == 0 || shared->space == SPACE_PINNED;
    for (size_t u = 0; u < s->model->units; u++) {
        pinned = pinned && s->layout.region[BUF_NORM][u].space == SPACE_PINNED;
    }
    if (s->dev->queues && !pinned) {
        return error_set(
            err, STATUS_FAIL, "--pinned-memory %zu: the norms of %zu units alone need %zu",
            s->config.pinned, s->model->units, s->model->units * DEVICE_ALIGN + shared->bytes);
    }
    return STATUS_OK;
}

static int build(struct session *s, struct error *err)
{
    struct {
        struct graph *graph;
        enum step_kind kind;
    } steps[] = {{&s->step, STEP_TRAIN}, {&s->loss, STEP_LOSS}, {&s->decode, STEP_DECODE}};
    for (size_t i = s->config.train ? 0 : 1; i < sizeof steps / sizeof *steps; i++) {
        if (step_build(steps[i].graph, &s->shape, &s->plan, steps[i].kind, err) ||
            check_graph(steps[i].graph, err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

// Lanes are worth their threads where something can overlap, or is asked to go astray.
static bool needs_lanes(const struct session *s)
{
    bool any_host = false;
    for (size_t u = 0; u < s->model->units; u++) {
        any_host |= on_host(s, u);
    }
    return any_host || ranks(s) > 1 || s->dev->separate || s->dev->queues || s->config.chaos ||
           s->config.pace || s->config.lanes;
}

static void wait_for_others(void *ctx, bool waits)
{
    struct session *s = ctx;
    comm_waits(s->config.comm, waits);
}

static int open_lanes(struct session *s, struct error *err)
{
    struct execute_config lanes = {.run = run_op,
                                   .ctx = s,
                                   .waits = s->config.comm ? wait_for_others : NULL,
                                   .device = s->dev->queues ? s->dev : NULL,
                                   .watchdog_s = s->config.watchdog_s,
                                   .chaos = s->config.chaos,
                                   .poison = poison};
    size_t n = s->step.n_ops;
    if (!needs_lanes(s)) {
        return STATUS_OK;
    }
    s->timings = malloc((EXECUTE_KEPT_STEPS * n + 1) * sizeof *s->timings);
    s->work = calloc(n + 1, sizeof *s->work);
    s->pace = s->config.pace ? calloc(n + 1, sizeof *s->pace) : NULL;
    if (!s->timings || !s->work || (s->config.pace && !s->pace)) {
        return error_set(err, STATUS_FAIL, "no memory for the times of %zu operations", n);
    }
    static const struct costs nothing;
    costs_of_graph(s->config.pace ? s->config.pace : &nothing, &s->shape, &s->plan, &s->step,
                   s->work);
    for (size_t i = 0; s->pace && i < n; i++) {
        enum lane lane = (enum lane)s->step.ops[i].lane;
        s->pace[i] = lane == LANE_COPY_IN || lane == LANE_COPY_OUT ? 0 : s->work[i];
    }
    return execute_open(&s->lanes, &lanes, err);
}

static bool cut_pieces(struct session *s)
{
    for (size_t k = 0; k < 2; k++) {
        s->piece_first[k] = calloc(ranks(s), sizeof *s->piece_first[k]);
        s->piece_n[k] = calloc(ranks(s), sizeof *s->piece_n[k]);
        for (size_t r = 0; r < ranks(s) && s->piece_first[k] && s->piece_n[k]; r++) {
            s->piece_n[k][r] = step_piece(&s->shape, k, r, s->piece_first[k] + r);
        }
    }
    return s->piece_first[0] && s->piece_first[1] && s->piece_n[0] && s->piece_n[1];
}

static int open_session(struct session *s, struct error *err)
{
    const struct session_config *c = &s->config;
    size_t units = s->model->units;
    size_t pinned = c->pinned ? c->pinned : SIZE_MAX;
    s->sums = calloc(SHARED_NORMS + units, sizeof *s->sums);
    s->host_logits = calloc(s->model->logits, dtype_bytes(s->dev->dtype));
    s->newest = calloc(units, sizeof *s->newest);
    s->here = calloc(units, sizeof *s->here);
    s->gathered = calloc(units, sizeof *s->gathered);
    s->swapped = calloc(units, sizeof *s->swapped);
    if (!s->sums || !s->host_logits || !s->newest || !s->here || !s->gathered || !s->swapped) {
        return error_set(err, STATUS_FAIL, "no memory for the session");
    }
    for (size_t u = 0; u < units; u++) {
        s->here[u].unit = s->gathered[u].unit = u;
        for (size_t i = 0; i < PLAN_SLICES_MAX; i++) {
            s->newest[u].version[i] = 1; // zeros
        }
    }
    step_shape(&s->shape, s->model, s->dev->dtype, c->B, c->T, c->micro_batches, c->train);
    if (c->comm && c->train) {
        s->shape.ranks = (size_t)comm_ranks(c->comm);
        s->shape.rank = (size_t)comm_rank(c->comm);
    }
    if (!cut_pieces(s)) {
        return error_set(err, STATUS_FAIL, "no memory for the pieces of %zu ranks", ranks(s));
    }
    if (layout_make(&s->layout, &s->shape, &s->plan, pinned, err) ||
        check_layout(&s->layout, err) || check_norms(s, err) || build(s, err) ||
        take_arenas(s, err)) {
        return err->status;
    }
    return open_lanes(s, err);
}

int session_open(struct session **out, struct device *dev, const struct model *model,
                 const struct session_config *config, struct error *err)
{
    if (check_batch(config, err)) {
        return err->status;
    }
    struct session *s = calloc(1, sizeof *s);
    if (!s) {
        return error_set(err, STATUS_FAIL, "no memory for the session");
    }
    s->dev = dev;
    s->host = config->host;
    s->model = model;
    s->config = *config;
    if (config->plan) {
        s->plan = *config->plan;
    } else {
        plan_resident(&s->plan, model, config->B, config->T, config->micro_batches, true);
    }
    if (!config->plan && config->comm && config->train) {
        s->plan.ranks = (size_t)comm_ranks(config->comm);
    }
    s->config.plan = &s->plan;
    for (size_t u = 0; u < model->units && !config->train; u++) {
        s->plan.unit[u].recompute = false; // there is no backward
    }
    if (open_session(s, err)) {
        session_close(s);
        return err->status;
    }
    *out = s;
    return STATUS_OK;
}

void session_close(struct session *s)
{
    if (!s) {
        return;
    }
    execute_close(s->lanes);
    graph_free(&s->step);
    graph_free(&s->loss);
    graph_free(&s->decode);
    layout_free(&s->layout);
    free(s->pace);
    free(s->work);
    free(s->timings);
    free(s->sums);
    free(s->host_logits);
    free(s->newest);
    free(s->here);
    free(s->gathered);
    free(s->swapped);
    for (size_t k = 0; k < 2; k++) {
        free(s->piece_first[k]);
        free(s->piece_n[k]);
    }
    free(s);
}
