// report.c - tables of plans, policies and measurements, in text and as JSON.
#include "hete/report.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- numbers ------------------------------------------------------------------------------------

struct text {
    char s[32];
};

// Three digits, and a unit.
static struct text size_text(size_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    struct text t;
    double value = (double)bytes;
    size_t u = 0;
    while (value >= 1024 && u + 1 < sizeof unit / sizeof *unit) {
        value /= 1024;
        u++;
    }
    int decimals = u == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    if (bytes == SIZE_MAX) {
        snprintf(t.s, sizeof t.s, "no limit");
    } else if (bytes == 0) {
        snprintf(t.s, sizeof t.s, "0");
    } else {
        snprintf(t.s, sizeof t.s, "%.*f %s", decimals, value, unit[u]);
    }
    return t;
}

static struct text number_text(double x, int decimals)
{
    struct text t;
    if (!isfinite(x)) {
        snprintf(t.s, sizeof t.s, "n/a");
    } else if (fabs(x) < 1e10) {
        snprintf(t.s, sizeof t.s, "%.*f", decimals, x);
    } else {
        snprintf(t.s, sizeof t.s, "%.3g", x);
    }
    return t;
}

static struct text ms_text(double seconds)
{
    double ms = 1e3 * seconds;
    return ms == 0 ? (struct text){"0"} : number_text(ms, ms < 10 ? 3 : ms < 100 ? 2 : 1);
}

static struct text percent_text(double share)
{
    struct text t;
    snprintf(t.s, sizeof t.s, isfinite(share) ? "%.1f%%" : "n/a", 100 * share);
    return t;
}

static double ratio(double x, double y)
{
    return y > 0 ? x / y : NAN;
}

// ---- a plan as a table --------------------------------------------------------------------------

enum column { FORWARD, RECOMPUTE, BACKWARD, UPDATE, COPY_IN, COPY_OUT, HOST, COMM, COLUMNS };

struct row {
    size_t first, last; // units
    size_t bytes[SPACES];
    double seconds[COLUMNS]; // per step
};

struct table {
    struct row *rows; // runs of units with equal decisions, then what several units share
    size_t n;         // with that one
    struct row total;
    size_t category[CATEGORIES][SPACES]; // bytes
    size_t copies, pageable;             // of a step; those of them whose host side is not pinned
};

static enum column column_of(const struct op *op)
{
    static const enum column of_lane[LANES] = {UPDATE, COPY_IN, COPY_OUT, HOST, COMM};
    if (op->lane != LANE_COMPUTE) {
        return of_lane[op->lane];
    }
    switch (op->kind) {
    case CALL_ENCODE:
    case CALL_FORWARD:
        return FORWARD;
    case CALL_RECOMPUTE:
        return RECOMPUTE;
    case CALL_HEAD:
    case CALL_BACKWARD:
    case CALL_ENCODE_BACKWARD:
        return BACKWARD;
    default:
        return UPDATE;
    }
}

static struct row *row_of(const struct table *t, size_t unit)
{
    size_t i = 0;
    while (i + 1 < t->n && unit > t->rows[i].last) {
        i++;
    }
    return t->rows + i;
}

static void add_times(struct table *t, const struct plan_problem *problem, const struct graph *g,
                      const double *work)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        const struct op *op = g->ops + i;
        struct row *row = op_has_unit(op->kind) ? row_of(t, op->unit) : t->rows + t->n - 1;
        row->seconds[column_of(op)] += cost_alone(problem->costs, op, work[i]);
    }
}

#define NOBODY  SIZE_MAX
#define SEVERAL (SIZE_MAX - 1)

// A buffer is its unit's if that unit alone writes it.
static bool add_bytes(struct table *t, const struct layout *layout, const struct graph *g)
{
    size_t most = 0;
    for (int k = 0; k < BUFFER_KINDS; k++) {
        most = layout->indices[k] > most ? layout->indices[k] : most;
    }
    size_t *owner = malloc(BUFFER_KINDS * (most + 1) * sizeof *owner);
    for (size_t i = 0; owner && i < BUFFER_KINDS * most; i++) {
        owner[i] = NOBODY;
    }
    for (size_t i = 0; owner && i < g->n_ops; i++) {
        const struct op *op = g->ops + i;
        for (size_t a = op->first_access; a < op->first_access + op->n_accesses; a++) {
            const struct access *access = g->accesses + a;
            if (access->mode == ACCESS_READ || access->index >= layout->indices[access->kind]) {
                continue;
            }
            size_t *o = owner + access->kind * most + access->index;
            size_t unit = op_has_unit(op->kind) ? op->unit : SEVERAL;
            *o = *o == NOBODY || *o == unit ? unit : SEVERAL;
        }
    }
    for (size_t k = 0; owner && k < BUFFER_KINDS; k++) {
        for (size_t i = 0; i < layout->indices[k]; i++) {
            const struct region *r = layout->region[k] + i;
            size_t o = owner[k * most + i];
            struct row *row = o >= SEVERAL ? t->rows + t->n - 1 : row_of(t, o);
            row->bytes[r->space] += r->bytes;
        }
    }
    free(owner);
    return owner;
}

static void count_copies(struct table *t, const struct layout *layout, const struct graph *g)
{
    for (size_t i = 0; i < g->n_ops; i++) {
        const struct op *op = g->ops + i;
        // Tokens are no access: the host lays them down between steps.
        bool pageable = op->kind == OP_TOKENS_IN &&
                        layout->region[BUF_HOST_TOKENS][op->micro].space == SPACE_HOST;
        if (op->lane != LANE_COPY_IN && op->lane != LANE_COPY_OUT) {
            continue;
        }
        for (size_t a = op->first_access; a < op->first_access + op->n_accesses; a++) {
            const struct access *access = g->accesses + a;
            pageable |= access->index < layout->indices[access->kind] &&
                        layout->region[access->kind][access->index].space == SPACE_HOST;
        }
        t->copies++;
        t->pageable += pageable;
    }
}

// The rows of a plan, empty.
static bool make_rows(struct table *t, const struct plan *plan)
{
    *t = (struct table){.rows = calloc(plan->units + 1, sizeof *t->rows)};
    for (size_t u = 0; t->rows && u < plan->units; u++) {
        if (u < 2 || !unit_plan_same(plan->unit + u, plan->unit + u - 1)) {
            t->rows[t->n++].first = u;
        }
        t->rows[t->n - 1].last = u;
    }
    t->n++;
    return t->rows;
}

static int make_table(struct table *t, const struct plan *plan, const struct plan_problem *problem,
                      struct error *err)
{
    struct step_shape shape;
    struct layout layout = {0};
    struct graph g = {0};
    double *work = NULL;
    plan_shape(&shape, problem);
    bool failed = !make_rows(t, plan);
    int status = layout_make(&layout, &shape, plan, problem->budget.pinned, err);
    status = status ? status : step_build(&g, &shape, plan, STEP_TRAIN, err);
    if (!status && !failed && (work = malloc((g.n_ops + 1) * sizeof *work))) {
        costs_of_graph(problem->costs, &shape, plan, &g, work);
        add_times(t, problem, &g, work);
        count_copies(t, &layout, &g);
    }
    if (!status && (failed || !work || !add_bytes(t, &layout, &g))) {
        status = error_set(err, STATUS_FAIL, "no memory for the table of a plan");
    }
    for (int c = 0; !status && c < CATEGORIES; c++) {
        for (int s = 0; s < SPACES; s++) {
            t->category[c][s] = layout.category[s][c];
        }
    }
    for (size_t i = 0; !status && i < t->n; i++) {
        for (int s = 0; s < SPACES; s++) {
            t->total.bytes[s] += t->rows[i].bytes[s];
        }
        for (int c = 0; c < COLUMNS; c++) {
            t->total.seconds[c] += t->rows[i].seconds[c];
        }
    }
    free(work);
    graph_free(&g);
    if (layout.region[0]) {
        layout_free(&layout);
    }
    return status;
}

static int columns_shown(const struct table *t)
{
    return t->total.seconds[COMM] > 0 ? COLUMNS : COMM;
}

// ranks: of the plan. What of a unit is cut among them is said where there are several.
static void print_row(FILE *out, const struct row *row, const char *name,
                      const struct unit_plan *decided, size_t ranks, int columns)
{
    fprintf(out, "  %-8s", name);
    if (decided) {
        fprintf(out, " %-11s %-10s %-9s", decided->recompute ? "recompute" : "keep",
                decided->stream ? "stream" : "resident",
                decided->host_optimizer ? "host" : "device");
    } else {
        fprintf(out, " %-32s", "");
    }
    if (ranks > 1) {
        fprintf(out, " %-5s", !decided ? "" : decided->shard ? "shard" : "whole");
    }
    fprintf(out, " %9s %9s %9s |", size_text(row->bytes[SPACE_DEVICE]).s,
            size_text(row->bytes[SPACE_PINNED]).s, size_text(row->bytes[SPACE_HOST]).s);
    for (int c = 0; c < columns; c++) {
        fprintf(out, " %8s", ms_text(row->seconds[c]).s);
    }
    fputc('\n', out);
}

static void print_table(FILE *out, const struct table *t, const struct plan *plan)
{
    fprintf(out, "  %-8s %-11s %-10s %-9s%s %9s %9s %9s |", "units", "activations", "parameters",
            "optimizer", plan->ranks > 1 ? " state" : "", "device", "pinned", "host");
    int columns = columns_shown(t);
    fprintf(out, " %8s %8s %8s %8s %8s %8s %8s%s  ms\n", "forward", "recomp.", "backward", "update",
            "copy in", "copy out", "host", columns > COMM ? "     comm" : "");
    for (size_t i = 0; i + 1 < t->n; i++) {
        const struct row *row = t->rows + i;
        struct text name;
        if (row->first == row->last) {
            snprintf(name.s, sizeof name.s, "%zu", row->first);
        } else {
            snprintf(name.s, sizeof name.s, "%zu-%zu", row->first, row->last);
        }
        print_row(out, row, name.s, plan->unit + row->first, plan->ranks, columns);
    }
    print_row(out, t->rows + t->n - 1, "shared", NULL, plan->ranks, columns);
    print_row(out, &t->total, "total", NULL, plan->ranks, columns);
}

// ---- what surrounds the table -------------------------------------------------------------------

// Of a step of all ranks.
static double tokens_of(const struct plan *plan)
{
    return (double)plan->B * (double)plan->T * (double)plan->micro_batches * (double)plan->ranks;
}

// What a rank holds of the model's state.
static void print_ranks(FILE *out, const struct table *t, const struct plan *plan)
{
    static const enum category state[] = {PARAMS, MASTERS, MOMENTS, GRADIENTS};
    size_t sharded = 0;
    for (size_t u = 0; u < plan->units; u++) {
        sharded += plan->unit[u].shard;
    }
    if (plan->ranks == 1) {
        return;
    }
    fprintf(out, "  each of %zu ranks, device + host:", plan->ranks);
    for (size_t i = 0; i < sizeof state / sizeof *state; i++) {
        const size_t *bytes = t->category[state[i]];
        fprintf(out, "%s %s %s + %s", i ? "," : "", category_name[state[i]],
                size_text(bytes[SPACE_DEVICE]).s,
                size_text(bytes[SPACE_PINNED] + bytes[SPACE_HOST]).s);
    }
    fprintf(out, "; of %zu of %zu units it updates a piece, 1/%zu\n", sharded, plan->units,
            plan->ranks);
}

static void print_budget(FILE *out, const char *what, size_t bytes, size_t budget)
{
    fprintf(out, "%s %s", what, size_text(bytes).s);
    if (budget != SIZE_MAX) {
        fprintf(out, " of %s", size_text(budget).s);
    }
}

static void print_budgets(FILE *out, const struct prediction *p, const struct budget *budget)
{
    print_budget(out, "  memory: device", p->device_bytes, budget->device);
    print_budget(out, ", host", p->host_bytes + p->pinned_bytes, budget->host);
    print_budget(out, ", of that pinned", p->pinned_bytes, budget->pinned);
    fputc('\n', out);
}

static void print_pageable(FILE *out, const struct table *t)
{
    if (t->pageable) {
        fprintf(out,
                "  warning: pinned memory does not suffice: %zu of %zu copies a step are from or "
                "to pageable memory, which is slower; raise --pinned-memory\n",
                t->pageable, t->copies);
    }
}

static void print_settings(FILE *out, const struct plan *plan)
{
    fprintf(out, "  %zu slot%s, %zu gradient buffer%s, %zu slice%s", plan->slots,
            plan->slots == 1 ? "" : "s", plan->grad_buffers, plan->grad_buffers == 1 ? "" : "s",
            plan->slices, plan->slices == 1 ? "" : "s");
    fprintf(out, "%s%s%s%s%s\n", plan->speculate ? ", the host's Adam speculates" : "",
            plan->early_adam ? ", device Adam during backward" : "",
            plan->fifo ? ", first come first served" : "",
            plan->barrier ? ", a barrier around the updates" : "",
            plan->serial_copies ? ", no copies during compute" : "");
}

static void print_lanes(FILE *out, const struct prediction *p)
{
    fprintf(out, "  lanes: compute busy %s ms", ms_text(p->busy_s[LANE_COMPUTE]).s);
    for (int lane = LANE_COMPUTE + 1; lane < lanes_shown(p->busy_s); lane++) {
        fprintf(out, "; %s busy %s", lane_name((enum lane)lane), ms_text(p->busy_s[lane]).s);
        if (p->exposed_s[lane] > 0) {
            fprintf(out, ", exposed %s", ms_text(p->exposed_s[lane]).s);
        }
    }
    fputc('\n', out);
}

// The same plan, were no update held back.
static int print_norm(FILE *out, const struct plan *plan, const struct plan_problem *problem,
                      const struct prediction *held, struct error *err)
{
    struct plan free_plan = *plan;
    struct plan_problem free_problem = *problem;
    struct prediction p;
    if (!plan->hold_updates) {
        fputs("  updates do not wait for the global norm\n", out);
        return STATUS_OK;
    }
    free_plan.hold_updates = free_problem.hold_updates = free_plan.speculate = false;
    int status = plan_predict(&p, &free_plan, &free_problem, err);
    if (!status) {
        double cost = held->step_s - p.step_s;
        fprintf(out, "  waiting for the global norm (clip, guard) costs %s ms a step (%s)%s\n",
                ms_text(cost > 0 ? cost : 0).s, percent_text(ratio(fmax(cost, 0), p.step_s)).s,
                plan->speculate ? ", as long as nothing is clipped or skipped (--speculate)"
                : cost > 0.02 * p.step_s ? "; see --speculate"
                                         : "");
    }
    return status;
}

static void print_why(FILE *out, const struct plan *plan, const struct prediction *p,
                      const struct budget *budget)
{
    size_t recomputed = 0, streamed = 0, on_host = 0, limit = 0, tightest = 0;
    for (size_t u = 0; u < plan->units; u++) {
        recomputed += plan->unit[u].recompute;
        streamed += plan->unit[u].stream;
        on_host += plan->unit[u].host_optimizer;
    }
    for (size_t lane = 1; lane < LANES; lane++) {
        limit = p->busy_s[lane] > p->busy_s[limit] ? lane : limit;
    }
    fprintf(out, "  why: %s is the limit (busy %s of the step); ", lane_name((enum lane)limit),
            percent_text(ratio(p->busy_s[limit], p->step_s)).s);
    if (recomputed + streamed + on_host == 0) {
        fputs("everything fits on the device\n", out);
        return;
    }
    static const char *const name[] = {"device", "host", "pinned"};
    const double use[] = {
        ratio((double)p->device_bytes, (double)budget->device),
        ratio((double)p->host_bytes + (double)p->pinned_bytes, (double)budget->host),
        ratio((double)p->pinned_bytes, (double)budget->pinned)};
    for (size_t i = 1; i < 3; i++) {
        tightest = use[i] > use[tightest] ? i : tightest;
    }
    fprintf(out, "%s memory is the tightest (%s used): ", name[tightest],
            percent_text(use[tightest]).s);
    fprintf(out, "of %zu units %zu recompute, %zu stream, %zu update on the host\n", plan->units,
            recomputed, streamed, on_host);
}

int report_plan(FILE *out, const struct plan *plan, const struct plan_problem *problem,
                struct error *err)
{
    struct table table;
    struct prediction p;
    int status = make_table(&table, plan, problem, err);
    status = status ? status : plan_predict(&p, plan, problem, err);
    if (!status) {
        fprintf(out, "plan: %s, predicted %s ms a step (%s tok/s), bound %s ms\n", plan->policy,
                ms_text(p.step_s).s, number_text(ratio(tokens_of(plan), p.step_s), 0).s,
                ms_text(fmin(plan_bound(problem), p.bound_s)).s);
        print_table(out, &table, plan);
        print_ranks(out, &table, plan);
        print_budgets(out, &p, &problem->budget);
        print_pageable(out, &table);
        print_settings(out, plan);
        print_lanes(out, &p);
        status = print_norm(out, plan, problem, &p, err);
    }
    if (!status) {
        print_why(out, plan, &p, &problem->budget);
    }
    free(table.rows);
    return status;
}

// ---- miniatures ---------------------------------------------------------------------------------

static double params_of(const struct model *m)
{
    return (double)m->embed.params + (double)(m->units - 1) * (double)m->block.params;
}

// FLOP of the calls of a micro-batch that recomputes nothing.
static double flops_of(const struct model *m, enum dtype dtype, size_t B, size_t T)
{
    static const enum call once[] = {CALL_ENCODE, CALL_HEAD, CALL_ENCODE_BACKWARD};
    static const enum call of_block[] = {CALL_FORWARD, CALL_BACKWARD};
    double flops = 0;
    for (size_t i = 0; i < sizeof once / sizeof *once; i++) {
        flops += m->work(m, dtype, once[i], B, T).flops;
    }
    for (size_t i = 0; i < sizeof of_block / sizeof *of_block; i++) {
        flops += (double)(m->units - 1) * m->work(m, dtype, of_block[i], B, T).flops;
    }
    return flops;
}

void report_miniature(FILE *out, const struct plan_problem *problem, const struct model *whole,
                      size_t n)
{
    const struct model *mini = problem->model;
    enum dtype dtype = problem->dtype;
    size_t B = problem->B, T = problem->T;
    double square = (double)(n * n);
    double kept = (double)mini->bytes(mini, dtype, B, T).kept;
    double whole_kept = (double)whole->bytes(whole, dtype, B, T * n).kept;
    double flops = flops_of(mini, dtype, B, T), whole_flops = flops_of(whole, dtype, B, T * n);
    fprintf(out,
            "miniature of 1:%zu: parameters %+.2f%%, bytes kept %+.2f%%, FLOP %+.2f%% of what they "
            "should be\n",
            n, 100 * (square * params_of(mini) / params_of(whole) - 1),
            100 * (square * kept / whole_kept - 1),
            100 * (square * (double)n * flops / whole_flops - 1));
}

// ---- policies -----------------------------------------------------------------------------------

static size_t all_gpus(const struct report_subject *subject)
{
    return subject->gpus * subject->nodes;
}

static double step_tokens(const struct policy_result *r, const struct report_subject *subject)
{
    return (double)(r->B * subject->problem->T * r->micro_batches * all_gpus(subject));
}

static double mfu(const struct report_subject *subject, double step_s)
{
    return ratio(subject->flops / (double)all_gpus(subject),
                 step_s * subject->problem->costs->peak_flops);
}

static void print_policy(FILE *out, const struct report_subject *subject,
                         const struct policy_result *r)
{
    const struct prediction *p = &r->prediction;
    struct text batch;
    if (r->error[0]) {
        fprintf(out, "%-16s does not fit: %s\n", r->policy, r->error);
        return;
    }
    snprintf(batch.s, sizeof batch.s, "%zux%zu", r->B, r->micro_batches);
    fprintf(out, "%-16s %8s %10s %9s %7s", r->policy, batch.s, ms_text(p->step_s).s,
            number_text(ratio(step_tokens(r, subject), p->step_s), 0).s,
            percent_text(mfu(subject, p->step_s)).s);
    fprintf(out, " %7s %9s %9s %9s\n", number_text(ratio(p->step_s, r->bound_s), 3).s,
            size_text(p->device_bytes).s, size_text(p->pinned_bytes).s, size_text(p->host_bytes).s);
}

static int lanes_of(const struct report_subject *subject)
{
    return all_gpus(subject) > 1 ? LANES : LANE_COMM;
}

static void print_policy_lanes(FILE *out, const struct report_subject *subject,
                               const struct policy_result *results, size_t n)
{
    int lanes = lanes_of(subject);
    fprintf(out, "\n%-16s busy ms:", "policy");
    for (int lane = 0; lane < lanes; lane++) {
        fprintf(out, " %9s", lane_name((enum lane)lane));
    }
    fprintf(out, "   exposed ms:");
    for (int lane = LANE_COMPUTE + 1; lane < lanes; lane++) {
        fprintf(out, " %9s", lane_name((enum lane)lane));
    }
    fputc('\n', out);
    for (size_t i = 0; i < n; i++) {
        const struct prediction *p = &results[i].prediction;
        if (results[i].error[0]) {
            continue;
        }
        fprintf(out, "%-16s         ", results[i].policy);
        for (int lane = 0; lane < lanes; lane++) {
            fprintf(out, " %9s", ms_text(p->busy_s[lane]).s);
        }
        fprintf(out, "              ");
        for (int lane = LANE_COMPUTE + 1; lane < lanes; lane++) {
            fprintf(out, " %9s", ms_text(p->exposed_s[lane]).s);
        }
        fputc('\n', out);
    }
}

// ---- scaling ------------------------------------------------------------------------------------

// The point that others are compared with: the first that fits. NULL: none.
static const struct scale_point *scale_base(const struct report_subject *subject)
{
    size_t i = 0;
    while (i < subject->n_scaling && subject->scaling[i].error[0]) {
        i++;
    }
    return i < subject->n_scaling ? subject->scaling + i : NULL;
}

// The lane that the compute lane waits for most.
static enum lane waited_for(const struct prediction *p)
{
    enum lane most = LANE_COPY_IN;
    for (enum lane lane = LANE_COPY_IN; lane < LANES; lane++) {
        most = p->exposed_s[lane] > p->exposed_s[most] ? lane : most;
    }
    return most;
}

static void print_point(FILE *out, const struct scale_point *point, const struct scale_point *base)
{
    const struct prediction *p = &point->prediction;
    enum lane lane = waited_for(p);
    fprintf(out, "%6zu %9zu", point->gpus, point->nodes);
    if (point->error[0]) {
        fprintf(out, "  does not fit: %s\n", point->error);
        return;
    }
    fprintf(out, " %10s %12s %8s", ms_text(p->step_s).s, number_text(point->tokens_per_s, 1).s,
            percent_text(ratio(point->tokens_per_s, base->tokens_per_s)).s);
    if (p->exposed_s[lane] < 1e-3 * p->step_s) {
        fprintf(out, "   nothing\n");
        return;
    }
    fprintf(out, "   %s, %s of the step", lane_name(lane),
            percent_text(ratio(p->exposed_s[lane], p->step_s)).s);
    if (lane == LANE_COMM) {
        fprintf(out, " (%s)", point->network ? "the network" : "the link between GPUs");
    }
    fputc('\n', out);
}

static void print_scaling(FILE *out, const struct report_subject *subject)
{
    const struct plan_problem *problem = subject->problem;
    const struct scale_point *base = scale_base(subject);
    fprintf(out,
            "\nscaling of policy auto, the same %zu rows on every GPU (weak scaling), at most %zu "
            "GPU%s a machine\n",
            problem->B * problem->micro_batches, subject->gpus, subject->gpus == 1 ? "" : "s");
    fprintf(out, "%6s %9s %10s %12s %8s   %s\n", "GPUs", "machines", "step ms", "tok/s a GPU",
            "of first", "compute waits most for");
    for (size_t i = 0; i < subject->n_scaling; i++) {
        print_point(out, subject->scaling + i, base);
    }
}

void report_policies(FILE *out, const struct report_subject *subject,
                     const struct policy_result *results, size_t n)
{
    const struct budget *budget = &subject->problem->budget;
    if (all_gpus(subject) > 1) {
        const char *one = subject->ranks ? "rank" : "GPU";
        fprintf(out,
                "%zu %ss, %zu on each of %zu machine%s: batch and memory are one %s's, tok/s all "
                "of them\n",
                all_gpus(subject), one, subject->gpus, subject->nodes,
                subject->nodes == 1 ? "" : "s", one);
    }
    fprintf(out, "%-16s %8s %10s %9s %7s %7s %9s %9s %9s\n", "policy", "batch", "step ms", "tok/s",
            "MFU", "/bound", "device", "pinned", "host");
    for (size_t i = 0; i < n; i++) {
        print_policy(out, subject, results + i);
    }
    fprintf(out, "%-16s %8s %10s %9s %7s %7s %9s", "budget", "", "", "", "", "",
            size_text(budget->device).s);
    fprintf(out, " %9s %9s (with pinned)\n", size_text(budget->pinned).s,
            size_text(budget->host).s);
    print_policy_lanes(out, subject, results, n);
    if (subject->n_scaling) {
        print_scaling(out, subject);
    }
}

// ---- policies as JSON ---------------------------------------------------------------------------

static json_t *real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *integer(size_t n)
{
    return n <= INT64_MAX ? json_integer((json_int_t)n) : json_null();
}

static json_t *string(const char *text)
{
    json_t *valid = json_string(text);
    return valid ? valid : json_string("(not UTF-8)");
}

// comm: there are other ranks.
static json_t *lanes(const double *seconds, bool comm)
{
    json_t *object = json_pack("{s:o, s:o, s:o, s:o}", "compute", real(seconds[LANE_COMPUTE]),
                               "copy_in", real(seconds[LANE_COPY_IN]), "copy_out",
                               real(seconds[LANE_COPY_OUT]), "host", real(seconds[LANE_HOST]));
    if (comm && json_object_set_new(object, "comm", real(seconds[LANE_COMM]))) {
        json_decref(object);
        return NULL;
    }
    return object;
}

static json_t *unit_runs(const struct plan *plan)
{
    json_t *runs = json_array();
    for (size_t first = 0, next; first < plan->units; first = next) {
        const struct unit_plan *d = plan->unit + first;
        for (next = first + 1; first && next < plan->units && unit_plan_same(d, plan->unit + next);
             next++) {
        }
        if (json_array_append_new(
                runs, json_pack("{s:o, s:o, s:b, s:b, s:b, s:b}", "from", integer(first), "to",
                                integer(next - 1), "recompute", d->recompute, "stream", d->stream,
                                "host_optimizer", d->host_optimizer, "shard", d->shard))) {
            json_decref(runs);
            return NULL;
        }
    }
    return runs;
}

static json_t *plan_object(const struct plan *plan)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:b, s:b, s:b, s:b, s:b, s:b, s:o}", "policy",
                     string(plan->policy), "ranks", integer(plan->ranks), "slots",
                     integer(plan->slots), "grad_buffers", integer(plan->grad_buffers), "slices",
                     integer(plan->slices), "hold_updates", plan->hold_updates, "early_adam",
                     plan->early_adam, "speculate", plan->speculate, "fifo", plan->fifo, "barrier",
                     plan->barrier, "serial_copies", plan->serial_copies, "units", unit_runs(plan));
}

// A value of a policy that fits.
static json_t *only(bool fits, json_t *value)
{
    if (fits) {
        return value;
    }
    json_decref(value);
    return json_null();
}

static json_t *policy_object(const struct report_subject *subject, const struct policy_result *r)
{
    const struct prediction *p = &r->prediction;
    bool fits = !r->error[0], several = all_gpus(subject) > 1;
    json_t *object = json_pack(
        "{s:o, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "policy", string(r->policy), "fits", fits,
        "error", only(!fits, string(r->error)), "micro_batch", integer(r->B), "micro_batches",
        integer(r->micro_batches), "step_s", only(fits, real(p->step_s)), "tokens_per_s",
        only(fits, real(ratio(step_tokens(r, subject), p->step_s))), "mfu",
        only(fits, real(mfu(subject, p->step_s))), "bound_s", only(fits, real(r->bound_s)));
    json_t *more = json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o}", "device_bytes", only(fits, integer(p->device_bytes)),
        "host_bytes", only(fits, integer(p->host_bytes)), "pinned_bytes",
        only(fits, integer(p->pinned_bytes)), "busy_s", only(fits, lanes(p->busy_s, several)),
        "exposed_s", only(fits, lanes(p->exposed_s, several)), "plan",
        only(fits, plan_object(&r->plan)));
    if (!object || !more || json_object_update(object, more)) {
        json_decref(object);
        object = NULL;
    }
    json_decref(more);
    return object;
}

static json_t *point_object(const struct scale_point *point, const struct scale_point *base)
{
    const struct prediction *p = &point->prediction;
    bool fits = !point->error[0];
    enum lane lane = waited_for(p);
    double share = fits ? ratio(point->tokens_per_s, base->tokens_per_s) : NAN;
    static const char *const name[LANES] = {"compute", "copy_in", "copy_out", "host", "comm"};
    return json_pack("{s:o, s:o, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:b}", "gpus",
                     integer(point->gpus), "nodes", integer(point->nodes), "fits", fits, "error",
                     only(!fits, string(point->error)), "step_s", only(fits, real(p->step_s)),
                     "tokens_per_s_per_gpu", only(fits, real(point->tokens_per_s)), "of_first",
                     real(share), "waits_for", only(fits, string(name[lane])), "exposed_s",
                     only(fits, real(p->exposed_s[lane])), "network", point->network);
}

static json_t *scaling_array(const struct report_subject *subject)
{
    json_t *points = json_array();
    const struct scale_point *base = scale_base(subject);
    for (size_t i = 0; points && i < subject->n_scaling; i++) {
        if (json_array_append_new(points, point_object(subject->scaling + i, base))) {
            json_decref(points);
            points = NULL;
        }
    }
    return points;
}

static json_t *policies_object(const struct report_subject *subject,
                               const struct policy_result *results, size_t n)
{
    const struct plan_problem *problem = subject->problem;
    json_t *policies = json_array();
    bool failed = !policies;
    for (size_t i = 0; i < n && !failed; i++) {
        failed = json_array_append_new(policies, policy_object(subject, results + i)) != 0;
    }
    if (failed) {
        json_decref(policies);
        return NULL;
    }
    const struct budget *b = &problem->budget;
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:s, s:o, s:{s:o, s:o, s:o}, s:o, s:o}",
                     "model", string(subject->model), "machine", string(subject->machine), "gpus",
                     integer(subject->gpus), "nodes", integer(subject->nodes), "batch",
                     integer(problem->B * problem->micro_batches * all_gpus(subject)), "seq_len",
                     integer(problem->T), "dtype", problem->dtype == DTYPE_FP32 ? "fp32" : "bf16",
                     "flops_per_step", real(subject->flops), "budget", "device_bytes",
                     integer(b->device), "host_bytes", integer(b->host), "pinned_bytes",
                     integer(b->pinned), "policies", policies, "scaling", scaling_array(subject));
}

int report_policies_json(FILE *out, const struct report_subject *subject,
                         const struct policy_result *results, size_t n, struct error *err)
{
    json_t *root = policies_object(subject, results, n);
    bool written = root && json_dumpf(root, out, JSON_INDENT(2)) == 0 && fputc('\n', out) != EOF;
    bool made = root;
    json_decref(root);
    if (!written) {
        return error_set(err, STATUS_FAIL, "the policies as JSON: %s",
                         made ? "cannot write the output" : "no memory");
    }
    return STATUS_OK;
}

// ---- measured -----------------------------------------------------------------------------------

// Host Adam moves these bytes per parameter in either dtype: fp32 master and moments in and out,
// and gradient in and parameter out of 16 bits each, or a gradient of 32 and no parameter apart.
#define ADAM_BYTES 28

static void print_rate(FILE *out, const char *what, double n, double seconds, const char *unit)
{
    double giga = 1e-9 * ratio(n, seconds);
    if (giga > 0 && isfinite(giga)) {
        fprintf(out, "%s%s %s", what, number_text(giga, 2).s, unit);
    }
}

static void print_lane(FILE *out, enum lane lane, const struct prediction *p,
                       const struct lane_times *t)
{
    fprintf(out, "%-9s busy %10s %10s", lane_name(lane), ms_text(p->busy_s[lane]).s,
            ms_text(t->busy_s[lane]).s);
    if (lane != LANE_COMPUTE) {
        fprintf(out, "   exposed %9s %9s", ms_text(p->exposed_s[lane]).s,
                ms_text(t->exposed_s[lane]).s);
    }
    fputc('\n', out);
}

void report_measured(FILE *out, const struct prediction *predicted, const struct measured *m)
{
    const struct lane_times *t = &m->times;
    fprintf(out, "%-14s %10s %10s\n", "ms a step", "predicted", "measured");
    fprintf(out, "%-14s %10s %10s   of the predicted %s\n", "step", ms_text(predicted->step_s).s,
            ms_text(t->period_s).s, percent_text(ratio(t->period_s, predicted->step_s)).s);
    for (int lane = 0; lane < lanes_shown(predicted->busy_s); lane++) {
        print_lane(out, (enum lane)lane, predicted, t);
    }
    print_rate(out, "copies in ", m->bytes_in, t->busy_s[LANE_COPY_IN], "GB/s, ");
    print_rate(out, "copies out ", m->bytes_out, t->busy_s[LANE_COPY_OUT], "GB/s, ");
    print_rate(out, "host Adam ", m->host_adam_params, m->host_adam_s, "G parameters/s");
    print_rate(out, " = ", ADAM_BYTES * m->host_adam_params, m->host_adam_s, "GB/s, ");
    fprintf(out, "%d host thread%s, %s\n", m->host_threads, m->host_threads == 1 ? "" : "s",
            m->isa);
    if (m->pageable_copies) {
        fprintf(out,
                "%llu copies went through pageable memory, which is slower: "
                "raise --pinned-memory\n",
                (unsigned long long)m->pageable_copies);
    }
    if (m->guesses) {
        fprintf(out, "speculation held in %llu of %llu steps\n", (unsigned long long)m->right,
                (unsigned long long)m->guesses);
    }
    if (m->late) {
        fprintf(out, "%llu of %llu paced operations ended late (%s)%s\n",
                (unsigned long long)m->late, (unsigned long long)m->paced,
                percent_text(ratio((double)m->late, (double)m->paced)).s,
                m->late * 100 > m->paced ? ": more than 1%, the times mean nothing" : "");
    }
}
