// plan.c - plans that are fixed by a policy, what makes a plan one for a problem, and what to tell
// a user whose problem has none. The search is in search.h.
#include "hete/plan.h"
#include "hete/search.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

const char *const plan_policies[] = {"auto",         "autohete",    "resident",
                                     "zero-offload", "twin-flow",   "zero-infinity",
                                     "stronghold",   "patrickstar", NULL};

void plan_resident(struct plan *plan, const struct model *model, size_t B, size_t T,
                   size_t micro_batches, bool hold_updates)
{
    *plan = (struct plan){.policy = "resident",
                          .units = model->units,
                          .B = B,
                          .T = T,
                          .micro_batches = micro_batches,
                          .ranks = 1,
                          .hold_updates = hold_updates,
                          .grad_buffers = micro_batches > 1,
                          .slices = 1};
}

void plan_shape(struct step_shape *shape, const struct plan_problem *problem)
{
    step_shape(shape, problem->model, problem->dtype, problem->B, problem->T,
               problem->micro_batches, true);
    shape->ranks = problem->ranks > 1 ? problem->ranks : 1;
}

// ---- policies -----------------------------------------------------------------------------------

// Baselines. Each is tried with and without recomputing all blocks; device Adam comes after the
// whole backward. zero: the ZeRO stage of what is left on the device, with several ranks.
struct policy {
    const char *name;
    void (*choose)(struct choice *c, struct search *s, double ratio);
    struct handicap handicap;
    size_t zero;
};

static size_t blocks_of(const struct search *s)
{
    return s->problem->model->units - 1;
}

static bool fits(struct search *s, const struct choice *c)
{
    struct estimate e;
    search_estimate(s, c, &e);
    return e.over <= 0;
}

static void all_on_device(struct choice *c, struct search *s, double ratio)
{
    (void)ratio;
    c->n_device = blocks_of(s);
}

static void optimizers_on_host(struct choice *c, struct search *s, double ratio)
{
    (void)s;
    (void)ratio;
    c->embed_on_host = true;
}

// The embedding comes before the first block: its optimizer is on the host if all are.
static void some_optimizers_on_host(struct choice *c, struct search *s, double ratio)
{
    c->n_device = (size_t)round((1 - ratio) * (double)blocks_of(s));
    c->embed_on_host = ratio >= 1;
}

static void all_streamed(struct choice *c, struct search *s, double ratio)
{
    (void)ratio;
    c->embed_on_host = true;
    c->n_stream = blocks_of(s);
}

// As few streamed blocks as fit.
static void window_on_device(struct choice *c, struct search *s, double ratio)
{
    size_t low = 0, high = blocks_of(s);
    (void)ratio;
    c->embed_on_host = true;
    while (low < high) {
        c->n_stream = low + (high - low) / 2;
        if (fits(s, c)) {
            high = c->n_stream;
        } else {
            low = c->n_stream + 1;
        }
    }
    c->n_stream = high;
}

// The optimizers of 0.8 times as many blocks as then still fit.
static void chunks_on_device(struct choice *c, struct search *s, double ratio)
{
    window_on_device(c, s, ratio);
    size_t low = 0, high = blocks_of(s) - c->n_stream;
    while (low < high) {
        c->n_device = high - (high - low) / 2;
        if (fits(s, c)) {
            low = c->n_device;
        } else {
            high = c->n_device - 1;
        }
    }
    c->n_device = low * 4 / 5;
}

// Held updates (exact clipping) are not StrongHold's, which updates during backward: then only the
// window and the order are.
static const struct policy policies[] = {
    {"resident", all_on_device, {0}, 0},
    {"zero-offload", optimizers_on_host, {true, true, false}, 2},
    {"twin-flow", some_optimizers_on_host, {true, true, false}, 2},
    {"zero-infinity", all_streamed, {true, true, false}, 3},
    {"stronghold", window_on_device, {false, true, false}, 2},
    {"patrickstar", chunks_on_device, {true, true, true}, 3},
};
enum { POLICIES = COUNT(policies) };

static void try_policy(struct search *s, const struct policy *policy, double ratio)
{
    bool any = false;
    for (int lean = 0; lean < 2 && !any; lean++) {
        for (int recompute = 0; recompute < 2; recompute++) {
            struct choice c = search_usual(s, lean);
            choose_stage(&c, s->problem, policy->zero);
            c.n_recompute = recompute ? blocks_of(s) : 0;
            policy->choose(&c, s, ratio);
            c.n_stream = s->all_stream ? blocks_of(s) - c.n_device : c.n_stream;
            any |= search_try_choice(s, &c, policy->handicap);
        }
    }
}

// ---- what does not fit --------------------------------------------------------------------------

// The largest micro-batch, for the same batch, with which the plan would fit; 0: none.
static size_t smaller_batch(const struct search *s, const struct plan *plan)
{
    const struct plan_problem *p = s->problem;
    for (size_t B = p->B / 2; B > 0; B--) {
        struct step_shape shape;
        struct plan_bytes bytes;
        struct plan less = *plan;
        if (p->B % B) {
            continue;
        }
        less.B = B;
        less.micro_batches = p->micro_batches * (p->B / B);
        less.grad_buffers = less.grad_buffers ? less.grad_buffers : 1;
        step_shape(&shape, p->model, p->dtype, B, p->T, less.micro_batches, true);
        shape.ranks = less.ranks;
        if (!plan_bytes(&bytes, &shape, &less, p->budget.pinned, s->err) &&
            plan_over(&bytes, &p->budget) == 0) {
            return B;
        }
    }
    return 0;
}

// "5000 bytes of device memory, 1000 more than the 4000 there are" for each budget that is short.
static int describe_short(char *out, size_t size, const struct plan_bytes *bytes,
                          const struct budget *budget)
{
    size_t need[2] = {bytes->total[SPACE_DEVICE],
                      bytes->total[SPACE_HOST] + bytes->total[SPACE_PINNED]};
    const size_t has[2] = {budget->device, budget->host};
    static const char *const name[2] = {"device", "host"};
    int n = 0;
    for (int i = 0; i < 2; i++) {
        if (need[i] > has[i]) {
            n += snprintf(out + n, size - (size_t)n,
                          "%s%zu bytes of %s memory, %zu more than the %zu there are "
                          "(--%s-memory %zu would do)",
                          n ? ", and " : "", need[i], name[i], need[i] - has[i], has[i], name[i],
                          need[i]);
        }
    }
    return n;
}

static int nothing_fits(const struct search *s, const char *policy, struct error *err)
{
    struct plan_bytes bytes;
    char text[512], batch[128] = "";
    const struct plan *plan = &s->nearest;
    int status = plan_bytes(&bytes, &s->shape, plan, s->problem->budget.pinned, err);
    if (status) {
        return status;
    }
    size_t B = smaller_batch(s, plan);
    if (B) {
        snprintf(batch, sizeof batch, "; or a micro-batch of %zu instead of %zu rows (-b %zu)", B,
                 s->problem->B, B);
    }
    describe_short(text, sizeof text, &bytes, &s->problem->budget);
    return error_set(err, STATUS_FAIL, "no plan of policy %s fits: the nearest one needs %s%s",
                     policy, text, batch);
}

// ---- choosing -----------------------------------------------------------------------------------

// Runs a policy's search; false if there is none of that name.
static bool run_policy(struct search *s, const char *policy)
{
    if (strcmp(policy, "autohete") == 0) {
        search_autohete(s);
        return true;
    }
    size_t name = strcspn(policy, ":");
    for (size_t i = 0; i < POLICIES; i++) {
        const struct policy *p = policies + i;
        if (strlen(p->name) != name || strncmp(policy, p->name, name) != 0) {
            continue;
        }
        bool takes_ratio = p->choose == some_optimizers_on_host;
        const char *number = policy + name + (policy[name] != 0);
        char *end = NULL;
        double ratio = strtod(number, &end);
        bool has_ratio =
            *number && strspn(number, "0123456789.") == strlen(number) && !*end && ratio <= 1;
        if (takes_ratio ? !has_ratio : policy[name]) {
            return false;
        }
        try_policy(s, p, ratio);
        return true;
    }
    return false;
}

// The plan of an earlier search, if it is no slower than what has been found since.
static void keep_better(struct search *s, const struct plan *best, double best_s)
{
    if (best_s <= s->best_s) {
        s->best = *best;
        s->best_s = best_s;
    }
}

static void run_searches(struct search *s)
{
    search_auto(s);
    struct plan best = s->best;
    double best_s = s->best_s;
    s->best_s = INFINITY; // or it would stop before it has found what it finds alone
    search_autohete(s);
    bool its_own = s->plain.ranks <= 1 || s->plain.zero == s->autohete_zero;
    if (its_own && s->autohete_s == INFINITY) { // the first of stage 3
        s->autohete = s->best;
        s->autohete_s = s->best_s;
    }
    keep_better(s, &best, best_s);
}

static void run_policies(struct search *s)
{
    for (size_t i = 0; i < POLICIES; i++) {
        for (int tenths = 0; tenths <= 10; tenths++) {
            if (policies[i].choose == some_optimizers_on_host || tenths == 0) {
                try_policy(s, policies + i, tenths / 10.0);
            }
        }
    }
}

// The search, and what each policy would choose; where the ZeRO stage is free, for each stage as if
// it were asked for (3 also with resident blocks of the host), and what a mix of them gains.
static void run_auto(struct search *s, bool with_policies)
{
    static const int stages[] = {0, 2, 3, 3};
    bool free_stage = s->plain.ranks > 1 && s->plain.zero < 0;
    struct plan best;
    double best_s = INFINITY;
    for (size_t i = 0; i < (free_stage ? COUNT(stages) : 1); i++) {
        s->plain.zero = free_stage ? stages[i] : s->plain.zero;
        s->all_stream = free_stage ? i == 3 : s->all_stream;
        s->best_s = INFINITY;
        run_searches(s);
        if (with_policies) {
            run_policies(s);
        }
        keep_better(s, &best, best_s);
        best = s->best;
        best_s = s->best_s;
    }
    if (free_stage) {
        s->plain.zero = -1;
        s->all_stream = false;
        search_mix(s);
    }
}

static int check_problem(const struct plan_problem *p, struct error *err)
{
    if (p->model->units > PLAN_UNITS_MAX) {
        return error_set(err, STATUS_FAIL, "%zu blocks are more than a plan can have (%zu)",
                         p->model->units - 1, PLAN_UNITS_MAX - 1);
    }
    return STATUS_OK;
}

// The memory that speculation takes may be worth more elsewhere: it is searched for apart, and what
// is better counts.
static void try_speculating(struct search *s)
{
    struct search other;
    struct plan_problem problem = s->plain;
    problem.speculate = true;
    search_open(&other, &problem, s->err);
    other.plain.speculate = true;
    run_auto(&other, false);
    s->status = other.status;
    if (other.best_s < s->best_s) {
        s->best = other.best;
        s->best_s = other.best_s;
    }
    search_close(&other);
}

int search_policy(struct search *s, const char *policy)
{
    bool known = true;
    s->best_s = INFINITY;
    s->nearest_over = SIZE_MAX;
    s->status = check_problem(s->problem, s->err);
    if (s->status) {
        return s->status;
    }
    if (strcmp(policy, "auto") == 0) {
        run_auto(s, true);
        if (s->may_speculate && !s->status) {
            try_speculating(s);
        }
    } else if (strcmp(policy, "autohete") == 0 && s->autohete_s < INFINITY) {
        s->best = s->autohete;
        s->best_s = s->autohete_s;
    } else {
        known = run_policy(s, policy);
    }
    if (!known) {
        return error_set(s->err, STATUS_USAGE,
                         "there is no policy '%s'; there are auto, autohete, resident, "
                         "zero-offload, twin-flow:R (R from 0 to 1: the share of optimizers on the "
                         "host), zero-infinity, stronghold and patrickstar",
                         policy);
    }
    if (s->status) {
        return s->status;
    }
    if (s->best_s == INFINITY) {
        return nothing_fits(s, policy, s->err);
    }
    snprintf(s->best.policy, sizeof s->best.policy, "%s", policy);
    return STATUS_OK;
}

int plan_choose(struct plan *out, const struct plan_problem *problem, const char *policy,
                struct error *err)
{
    struct search s;
    search_open(&s, problem, err);
    int status = search_policy(&s, policy);
    if (!status) {
        *out = s.best;
    }
    search_close(&s);
    return status;
}

double plan_bound(const struct plan_problem *problem)
{
    struct error err;
    struct search s;
    search_open(&s, problem, &err);
    double bound = check_problem(problem, &err) ? INFINITY : search_bound(&s);
    search_close(&s);
    return bound;
}

// ---- a given plan -------------------------------------------------------------------------------

int plan_predict(struct prediction *out, const struct plan *plan,
                 const struct plan_problem *problem, struct error *err)
{
    struct search s;
    struct plan_bytes bytes;
    search_open(&s, problem, err);
    int status = plan_bytes(&bytes, &s.shape, plan, problem->budget.pinned, err);
    if (!status) {
        search_predict(&s, plan, INFINITY, out);
        status = s.status;
        out->device_bytes = bytes.total[SPACE_DEVICE];
        out->pinned_bytes = bytes.total[SPACE_PINNED];
        out->host_bytes = bytes.total[SPACE_HOST];
    }
    search_close(&s);
    return status;
}

static int refuse(struct error *err, const char *what)
{
    return error_set(err, STATUS_FAIL, "the plan %s", what);
}

static int check_units(const struct plan *plan, struct error *err)
{
    for (size_t u = 0; u < plan->units; u++) {
        const struct unit_plan *d = plan->unit + u;
        if (u == 0 && (d->recompute || d->stream)) {
            return refuse(err, "recomputes or streams unit 0, which is always kept and resident");
        }
        if (plan->ranks == 1 && d->stream && !d->host_optimizer) {
            return error_set(err, STATUS_FAIL,
                             "the plan streams unit %zu, whose optimizer is on the device; a "
                             "streamed unit needs a host optimizer",
                             u);
        }
        if (plan->ranks == 1 && d->shard) {
            return error_set(err, STATUS_FAIL,
                             "the plan shards unit %zu, but is for a single rank, which has all "
                             "of it: whole",
                             u);
        }
        if (plan->ranks > 1 && !d->shard && (d->host_optimizer || d->stream)) {
            return error_set(err, STATUS_FAIL,
                             "the plan has unit %zu whole on each of %zu ranks though it %s; with "
                             "several ranks that needs shard",
                             u, plan->ranks, d->stream ? "streams it" : "updates it on the host");
        }
    }
    return STATUS_OK;
}

static int check_counts(const struct plan *plan, struct error *err)
{
    bool streams = false, shares = plan->micro_batches > 1 && plan->units > 1;
    for (size_t u = 1; u < plan->units; u++) {
        streams |= plan->unit[u].stream;
        shares |= plan->unit[u].host_optimizer || plan->unit[u].shard;
    }
    if (plan->slots > PLAN_SLOTS_MAX || (streams && plan->slots == 0)) {
        return error_set(err, STATUS_FAIL, "the plan has %zu slots; with streamed units 1 to %zu",
                         plan->slots, PLAN_SLOTS_MAX);
    }
    if (plan->grad_buffers > PLAN_GRADS_MAX || (shares && plan->grad_buffers == 0)) {
        return error_set(err, STATUS_FAIL,
                         "the plan has %zu gradient buffers; with host optimizers, several "
                         "micro-batches or shard 1 to %zu",
                         plan->grad_buffers, PLAN_GRADS_MAX);
    }
    if (plan->slices < 1 || plan->slices > PLAN_SLICES_MAX) {
        return error_set(err, STATUS_FAIL, "the plan has %zu slices instead of 1 to %zu",
                         plan->slices, PLAN_SLICES_MAX);
    }
    if (plan->early_adam && plan->hold_updates) {
        return refuse(err, "has early_adam, but updates are held until the norm is known "
                           "(--clip 0 --no-guard would allow it)");
    }
    if (plan->speculate && (!plan->hold_updates || plan->barrier)) {
        return refuse(err, "has speculate, which is for updates that are held until the norm is "
                           "known, without a barrier");
    }
    return STATUS_OK;
}

static int check_ranks(const struct plan *plan, const struct plan_problem *problem,
                       struct error *err)
{
    size_t ranks = problem->ranks > 1 ? problem->ranks : 1;
    if (plan->ranks == ranks) {
        return STATUS_OK;
    }
    return error_set(err, STATUS_FAIL,
                     "the plan is for %zu rank%s, and this run has %zu: start it as %zu, or have "
                     "another plan made (without --plan)",
                     plan->ranks, plan->ranks == 1 ? "" : "s", ranks, plan->ranks);
}

int plan_check(const struct plan *plan, const struct plan_problem *problem, struct error *err)
{
    if (check_ranks(plan, problem, err)) {
        return err->status;
    }
    if (plan->units != problem->model->units || plan->B != problem->B || plan->T != problem->T ||
        plan->micro_batches != problem->micro_batches) {
        return error_set(err, STATUS_FAIL,
                         "the plan is for %zu units, %zu x %zu tokens and %zu micro-batches, not "
                         "for %zu units, %zu x %zu tokens and %zu micro-batches",
                         plan->units, plan->B, plan->T, plan->micro_batches, problem->model->units,
                         problem->B, problem->T, problem->micro_batches);
    }
    if (plan->hold_updates != problem->hold_updates) {
        return refuse(err, plan->hold_updates
                               ? "holds updates for the norm, which nothing here asks for"
                               : "does not hold updates for the norm, which clipping, the guard "
                                 "and the test for outliers need");
    }
    int status = check_units(plan, err);
    status = status ? status : check_counts(plan, err);
    if (status) {
        return status;
    }
    struct step_shape shape;
    struct plan_bytes bytes;
    char text[512];
    plan_shape(&shape, problem);
    status = plan_bytes(&bytes, &shape, plan, problem->budget.pinned, err);
    if (!status && describe_short(text, sizeof text, &bytes, &problem->budget)) {
        status = error_set(err, STATUS_FAIL, "the plan needs %s", text);
    }
    return status;
}
