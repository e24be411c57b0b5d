// prepare.c - budgets of this machine or of a file, costs measured or computed, then the planner.
#include "hete/prepare.h"
#include "hete/profile.h"
#include "hete/search.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- budgets ------------------------------------------------------------------------------------

// The number behind a name in a file of `name value` lines, or the first number of the file if name
// is NULL. False: none.
static bool read_number(const char *path, const char *name, unsigned long long *value)
{
    FILE *f = fopen(path, "r");
    char line[256];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        size_t skip = name ? strlen(name) : 0;
        found =
            (!name || strncmp(line, name, skip) == 0) && sscanf(line + skip, "%llu", value) == 1;
    }
    if (f) {
        fclose(f);
    }
    return found;
}

// Bytes that this process may still take: of the system and of its cgroup, whichever is less.
static size_t host_memory_free(void)
{
    static const char *const group[][3] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
         "/sys/fs/cgroup/memory.stat"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
         "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat"}};
    unsigned long long kib, limit, used, cached;
    size_t free_bytes = SIZE_MAX;
    if (read_number("/proc/meminfo", "MemAvailable:", &kib)) {
        free_bytes = (size_t)kib << 10;
    }
    for (size_t i = 0; i < 2; i++) {
        if (read_number(group[i][0], NULL, &limit) && read_number(group[i][1], NULL, &used)) {
            // File pages that nobody uses are given back when they are needed.
            used -=
                read_number(group[i][2], "inactive_file ", &cached) && cached < used ? cached : 0;
            size_t left = limit > used ? (size_t)(limit - used) : 0;
            free_bytes = left < free_bytes ? left : free_bytes;
        }
    }
    return free_bytes;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

// What the user gave, else what the machine has.
static size_t given_or(size_t given, size_t has)
{
    return given ? given : has;
}

// What the arenas may take: some is left for everything that is none.
#define HOST_RESERVE ((size_t)64 << 20)

static size_t memory_for_arenas(void)
{
    size_t has = host_memory_free();
    return has > HOST_RESERVE ? has - HOST_RESERVE : 0;
}

static bool separate(const struct prepare_config *c)
{
    return strcmp(c->device.kind, "cuda") == 0;
}

static bool set(const char *text)
{
    return text && text[0];
}

// ranks: of the run, here: those of this machine. host_free: bytes that each may take.
struct context {
    const struct prepare_config *config;
    struct prepared *out;
    struct machine machine;
    bool has_machine;
    size_t ranks, here, host_free;
};

// Each of the n numbers becomes the least of what the ranks have.
static int agree_on_least(struct comm *comm, size_t *x, size_t n, struct error *err)
{
    size_t ranks = comm ? (size_t)comm_ranks(comm) : 1, *all;
    if (ranks == 1) {
        return STATUS_OK;
    }
    all = malloc(ranks * n * sizeof *all);
    if (!all) {
        return error_set(err, STATUS_FAIL, "no memory to ask %zu ranks", ranks);
    }
    int status = comm_all_gather(comm, x, all, n * sizeof *x, err);
    for (size_t i = 0; status == STATUS_OK && i < ranks * n; i++) {
        x[i % n] = least(x[i % n], all[i]);
    }
    free(all);
    return status;
}

// As many ranks here as on the machine that has most of them.
static int count_ranks(struct context *x, struct error *err)
{
    const struct prepare_config *c = x->config;
    size_t nodes = c->nodes ? c->nodes : 1;
    x->here = c->gpus ? c->gpus : 1;
    x->ranks = x->here * nodes;
    if (!c->comm) {
        return STATUS_OK;
    }
    size_t others = x->ranks = (size_t)comm_ranks(c->comm);
    others -= (size_t)comm_local_ranks(c->comm);
    int status = agree_on_least(c->comm, &others, 1, err);
    x->here = x->ranks - others;
    return status;
}

// A device with memory of its own, of which `device` bytes can be had.
static int separate_budget(struct budget *b, const struct prepare_config *c, size_t has,
                           size_t device, struct error *err)
{
    if (c->device_memory > device) {
        return error_set(err, STATUS_FAIL,
                         "--device-memory %zu: the device can give a model %zu bytes now; give at "
                         "most that",
                         c->device_memory, device);
    }
    if (c->host_memory > has) {
        return error_set(err, STATUS_FAIL,
                         "--host-memory %zu: only %zu bytes are free; give at most that",
                         c->host_memory, has);
    }
    b->host = least(b->host, has);
    b->device = least(b->device, device);
    b->pinned = least(b->pinned, b->host);
    return STATUS_OK;
}

// An emulated device's memory is the host's too. A machine file may give more than there is here:
// what counts is what the plan takes of it (check_room).
static int budget_here(struct budget *b, const struct prepare_config *c, size_t has,
                       struct error *err)
{
    size_t device;
    if (device_memory(&c->device, &device, err)) {
        return err->status;
    }
    if (device < SIZE_MAX) {
        return separate_budget(b, c, has, device, err);
    }
    if (c->device_memory > has) {
        return error_set(err, STATUS_FAIL,
                         "--device-memory %zu: the emulated device lies in this machine's memory, "
                         "of which %zu bytes are free; give at most that, or less",
                         c->device_memory, has);
    }
    if (c->host_memory > has) {
        return error_set(err, STATUS_FAIL,
                         "--host-memory %zu: only %zu bytes are free; give at most that",
                         c->host_memory, has);
    }
    b->host = least(b->host, has - c->device_memory);
    b->device = least(b->device, has);
    b->pinned = least(b->pinned, b->host);
    return STATUS_OK;
}

// The same on all ranks, which would else make different plans.
static int real_budget(struct context *x, struct error *err)
{
    struct budget *b = &x->out->problem.budget;
    x->host_free = memory_for_arenas() / x->here;
    if (budget_here(b, x->config, x->host_free, err)) {
        return err->status;
    }
    size_t agreed[] = {x->host_free, b->device, b->host, b->pinned};
    int status = agree_on_least(x->config->comm, agreed, sizeof agreed / sizeof *agreed, err);
    x->host_free = agreed[0];
    *b = (struct budget){.device = agreed[1], .host = agreed[2], .pinned = agreed[3]};
    return status;
}

// Before anything is allocated. Budgets that the user did not set may be this machine's whole
// memory, each of them.
static int check_room(const struct context *x, struct error *err)
{
    const struct prediction *p = &x->out->prediction;
    size_t device = separate(x->config) ? 0 : p->device_bytes; // it has been checked
    size_t needs = device + p->host_bytes + p->pinned_bytes, has = x->host_free;
    if (needs <= has) {
        return STATUS_OK;
    }
    bool divisible = x->ranks > 1 && x->config->zero < 3;
    return error_set(err, STATUS_FAIL,
                     "training needs %zu bytes of this machine's memory, of which %zu are free: "
                     "%zu bytes too many; a smaller model, --micro-batch or --seq needs less, and "
                     "so may a --device-memory below %zu%s",
                     needs, has, needs - has, p->device_bytes,
                     divisible ? ", or --zero 3, which divides the model among the ranks" : "");
}

// ---- costs --------------------------------------------------------------------------------------

static int missing_rate(const struct context *x, const char *field, const char *what,
                        struct error *err)
{
    const struct prepare_config *c = x->config;
    return error_set(err, STATUS_FAIL,
                     "%s: %zu ranks, %zu on a machine, need its %s, the rate between %s",
                     set(c->emulate) ? c->emulate : c->machine, x->ranks, x->here, field, what);
}

static int read_machine(struct context *x, struct error *err)
{
    const struct prepare_config *c = x->config;
    x->out->miniature = 1;
    snprintf(x->out->machine, sizeof x->out->machine, "this machine");
    x->out->slow_motion = 1;
    if (!set(c->machine) && !set(c->emulate)) {
        return STATUS_OK;
    }
    if (set(c->emulate) ? machine_read_emulated(&x->machine, c->emulate, &x->out->miniature, err)
                        : machine_read(&x->machine, c->machine, err)) {
        return err->status;
    }
    x->has_machine = true;
    x->machine.gpus = x->here;
    if (x->here > 1 && x->machine.gpu_link <= 0) {
        return missing_rate(x, "gpu_link_gb_per_s", "its GPUs", err);
    }
    if (x->ranks > x->here && x->machine.network <= 0) {
        return missing_rate(x, "network_gb_per_s", "machines", err);
    }
    snprintf(x->out->machine, sizeof x->out->machine, "%s", x->machine.name);
    return STATUS_OK;
}

static void set_budget(struct context *x)
{
    const struct prepare_config *c = x->config;
    struct budget *b = &x->out->problem.budget;
    const struct machine *m = x->has_machine ? &x->machine : NULL;
    b->device = given_or(c->device_memory, m ? m->device_bytes : SIZE_MAX);
    b->host = given_or(c->host_memory, m ? m->host_bytes / x->here : SIZE_MAX);
    b->pinned = given_or(c->pinned_memory, m ? m->pinned_bytes / x->here : SIZE_MAX);
}

static void set_link(struct context *x)
{
    double rate = x->config->link_gb_per_s * 1e9;
    struct device_config *d = &x->out->device;
    *d = x->config->device;
    d->link = (struct device_link){.in = rate, .out = rate, .in_duplex = rate, .out_duplex = rate};
    size_t device = x->out->problem.budget.device;
    d->memory = device == SIZE_MAX ? 0 : device;
}

static int measure(struct context *x, size_t B, struct costs *costs, bool *cached,
                   struct error *err)
{
    const struct prepare_config *c = x->config;
    struct profile_config p = {.device = x->out->device,
                               .host_threads = c->host_threads,
                               .model = c->one_block,
                               .B = B,
                               .T = c->T,
                               .comm = c->comm,
                               .fast_reduce = c->fast_reduce,
                               .cache = c->cache,
                               .identity = c->identity};
    return profile_measure(costs, &p, cached, err);
}

// The slowest operation of a training step here, measured in its time on the emulated machine.
static double slowest(const struct costs *here, const struct costs *there)
{
    static const enum call calls[] = {CALL_ENCODE, CALL_FORWARD,  CALL_RECOMPUTE,
                                      CALL_HEAD,   CALL_BACKWARD, CALL_ENCODE_BACKWARD};
    double most = 0;
    for (int u = 0; u < 2; u++) {
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
            double there_s = there->call[calls[i]][u];
            most = there_s > 0 ? fmax(most, here->call[calls[i]][u] / there_s) : most;
        }
        most = fmax(most, here->accumulate[u] / there->accumulate[u]);
        most = fmax(most, here->norm[u] / there->norm[u]);
        most = fmax(most, here->adam[u] / there->adam[u]);
        most = there->scatter[u] > 0 ? fmax(most, here->scatter[u] / there->scatter[u]) : most;
        most = there->gather[u] > 0 ? fmax(most, here->gather[u] / there->gather[u]) : most;
    }
    most = fmax(most, here->host_adam / there->host_adam);
    most = fmax(most, there->link.in_duplex / here->link.in_duplex);
    return fmax(most, there->link.out_duplex / here->link.out_duplex);
}

static void slow_down(struct costs *c, double factor)
{
    for (int u = 0; u < 2; u++) {
        for (int call = 0; call < CALLS; call++) {
            c->call[call][u] *= factor;
        }
        c->accumulate[u] *= factor;
        c->norm[u] *= factor;
        c->adam[u] *= factor;
        c->scatter[u] *= factor;
        c->gather[u] *= factor;
    }
    c->clip *= factor;
    c->share *= factor;
    c->host_adam *= factor;
    c->host_speculate *= factor;
    c->host_accumulate *= factor;
    c->host_norm *= factor;
    c->link.latency_s *= factor;
    c->link.in /= factor;
    c->link.out /= factor;
    c->link.in_duplex /= factor;
    c->link.out_duplex /= factor;
    c->peak_flops /= factor;
}

// At least twice what an operation takes here, and as much again for the lanes that disturb it.
#define SLOW_MOTION 4.0
// No operation of the compute and comm lanes is paced to less: the system takes a core away for as
// long, now and then. In slow motion only norms, the encoder and what ranks share are shorter.
#define PACE_MIN 2e-3

static int emulate(struct context *x, size_t B, struct error *err)
{
    struct costs here, *there = &x->out->costs;
    struct device_link link = x->out->device.link;
    bool cached;
    x->out->device.link = (struct device_link){0}; // as fast as memory is
    if (measure(x, B, &here, &cached, err)) {
        return err->status;
    }
    double factor = SLOW_MOTION * slowest(&here, there);
    slow_down(there, factor);
    there->least = PACE_MIN;
    x->out->slow_motion = factor / (double)(x->out->miniature * x->out->miniature);
    x->out->device.link = x->config->link_gb_per_s > 0 ? link : there->link;
    return STATUS_OK;
}

static void set_problem(struct context *x, size_t B)
{
    const struct prepare_config *c = x->config;
    struct prepared *out = x->out;
    out->costs = (struct costs){0};
    out->problem.model = c->model;
    out->problem.dtype = c->device.dtype;
    out->problem.B = B;
    out->problem.T = c->T;
    out->problem.micro_batches = c->rows / B;
    out->problem.ranks = x->ranks;
    out->problem.zero = c->zero;
    out->problem.hold_updates = c->hold_updates;
    out->problem.speculate = c->speculate;
    out->problem.costs = &out->costs;
    set_link(x);
}

// Does anything fit? If not, nothing of this size may be measured, and any costs will show it.
static bool fits(const struct context *x)
{
    struct plan plan;
    struct error why;
    return plan_choose(&plan, &x->out->problem, "auto", &why) == STATUS_OK;
}

// Costs of a micro-batch of B rows.
static int set_costs(struct context *x, size_t B, struct error *err)
{
    const struct prepare_config *c = x->config;
    struct prepared *out = x->out;
    if ((!x->has_machine || set(c->emulate)) && !set(c->plan) && !fits(x)) {
        return STATUS_OK;
    }
    if (!x->has_machine) {
        out->measured = true;
        return measure(x, B, &out->costs, &out->cached, err);
    }
    struct step_shape shape;
    plan_shape(&shape, &out->problem);
    machine_costs(&out->costs, &x->machine, &shape);
    return set(c->emulate) ? emulate(x, B, err) : STATUS_OK;
}

// ---- plans --------------------------------------------------------------------------------------

static int plan_from_file(struct prepared *out, const char *path, struct error *err)
{
    struct error why;
    if (plan_read(&out->plan, path, err)) {
        return err->status;
    }
    if (plan_check(&out->plan, &out->problem, &why)) {
        return error_set(err, why.status, "--plan %s: %s", path, why.text);
    }
    return STATUS_OK;
}

// CPU Adam is measured on its own. A plan that counts with a rate it does not reach costs more than
// one that leaves some of it unused (a rate 30% below the plan's: 10% on average; above: 2%).
#define ADAM_TO_COUNT_WITH 0.85

static double adam_to_count_with(const struct prepared *p)
{
    return p->costs.host_adam / (p->measured ? ADAM_TO_COUNT_WITH : 1);
}

static int search(struct plan *plan, struct prepared *out, const char *policy, struct error *err)
{
    double host_adam = out->costs.host_adam;
    out->costs.host_adam = adam_to_count_with(out);
    int status = plan_choose(plan, &out->problem, policy, err);
    out->costs.host_adam = host_adam;
    return status;
}

// A plan that cannot take less than limit_s is not searched for: then that is what it takes.
static int choose(struct context *x, size_t B, double limit_s, struct error *err)
{
    struct prepared *out = x->out;
    const struct prepare_config *c = x->config;
    set_problem(x, B);
    if ((set(c->plan) && plan_from_file(out, c->plan, err)) || set_costs(x, B, err)) {
        return err->status;
    }
    if (limit_s < INFINITY && plan_bound(&out->problem) >= limit_s) {
        out->prediction = (struct prediction){.step_s = limit_s};
        return STATUS_OK;
    }
    if ((!set(c->plan) && search(&out->plan, out, c->policy, err)) ||
        plan_predict(&out->prediction, &out->plan, &out->problem, err)) {
        return err->status;
    }
    return check_room(x, err);
}

// The micro-batch that makes a whole step shortest, of those that divide it. Ties: the larger one.
static int choose_rows(struct context *x, struct error *err)
{
    const struct prepare_config *c = x->config;
    struct error why = {0};
    struct prepared best = {.prediction.step_s = INFINITY};
    for (size_t B = c->rows; B >= 1; B--) {
        if (c->rows % B) {
            continue;
        }
        if (choose(x, B, best.prediction.step_s, &why)) {
            if (why.status == STATUS_USAGE) {
                *err = why;
                return why.status;
            }
            continue; // does not fit
        }
        if (x->out->prediction.step_s < best.prediction.step_s) {
            best = *x->out;
        }
    }
    if (best.prediction.step_s == INFINITY) {
        *err = why; // of a single row
        return err->status;
    }
    *x->out = best;
    return STATUS_OK;
}

int prepare(struct prepared *out, const struct prepare_config *config, struct error *err)
{
    struct context x = {.config = config, .out = out};
    *out = (struct prepared){0};
    if (count_ranks(&x, err) || read_machine(&x, err)) {
        return err->status;
    }
    set_budget(&x);
    if (real_budget(&x, err)) {
        return err->status;
    }
    return config->B ? choose(&x, config->B, INFINITY, err) : choose_rows(&x, err);
}

int prepare_resident(struct prepared *out, const struct prepare_config *config, struct error *err)
{
    struct context x = {.config = config, .out = out};
    *out = (struct prepared){.miniature = 1, .slow_motion = 1};
    struct plan_problem *p = &out->problem;
    if (count_ranks(&x, err)) {
        return err->status;
    }
    set_budget(&x);
    set_problem(&x, config->B);
    plan_resident(&out->plan, p->model, p->B, p->T, p->micro_batches, p->hold_updates);
    out->plan.ranks = p->ranks;
    if (plan_check(&out->plan, p, err) || real_budget(&x, err) ||
        plan_predict(&out->prediction, &out->plan, p, err)) {
        return err->status;
    }
    return check_room(&x, err);
}

static int inference_bytes(size_t *device, size_t *host, const struct plan_problem *p,
                           const struct plan *plan, struct error *err)
{
    struct step_shape shape;
    struct layout layout;
    step_shape(&shape, p->model, p->dtype, p->B, p->T, 1, false);
    if (layout_make(&layout, &shape, plan, p->budget.pinned, err)) {
        return err->status;
    }
    *device = layout.total[SPACE_DEVICE];
    *host = layout.total[SPACE_PINNED] + layout.total[SPACE_HOST];
    layout_free(&layout);
    return STATUS_OK;
}

int prepare_inference(struct prepared *out, const struct prepare_config *config, struct error *err)
{
    struct context x = {.config = config, .out = out};
    struct plan_problem *p = &out->problem;
    size_t bytes = 0, host = 0, L = config->model->units - 1;
    *out = (struct prepared){.miniature = 1, .slow_motion = 1};
    p->model = config->model;
    p->dtype = config->device.dtype;
    p->B = config->B;
    p->T = config->T;
    if (count_ranks(&x, err)) {
        return err->status;
    }
    set_budget(&x);
    set_link(&x);
    if (real_budget(&x, err)) {
        return err->status;
    }
    plan_resident(&out->plan, p->model, p->B, p->T, 1, true);
    for (size_t streamed = 0;; streamed++) {
        out->plan.slots = streamed < 2 ? streamed : 2;
        if (streamed) {
            out->plan.unit[L + 1 - streamed] =
                (struct unit_plan){.stream = true, .host_optimizer = true};
        }
        if (inference_bytes(&bytes, &host, p, &out->plan, err)) {
            return err->status;
        }
        if (bytes <= p->budget.device && host <= p->budget.host) {
            return STATUS_OK;
        }
        if (bytes <= p->budget.device) {
            return error_set(err, STATUS_FAIL,
                             "with %zu blocks streamed the model needs %zu bytes of host memory, "
                             "and there are %zu (--host-memory)",
                             streamed, host, p->budget.host);
        }
        if (!config->device_memory && !separate(config)) {
            return error_set(err, STATUS_FAIL, "the model needs %zu bytes, and only %zu are free",
                             bytes, p->budget.device);
        }
        if (streamed == L) {
            return error_set(err, STATUS_FAIL,
                             "with all %zu blocks streamed the model still needs %zu bytes of "
                             "device memory, and there are %zu (--device-memory %zu would do)",
                             L, bytes, p->budget.device, bytes);
        }
    }
}

static bool better(const struct policy_result *a, const struct policy_result *b)
{
    return !a->error[0] && (b->error[0] || a->prediction.step_s < b->prediction.step_s);
}

// Puts what the policy does with this problem in place of *r if it is better, or needs less.
static int try_policy(struct policy_result *r, const char *policy, struct search *s,
                      struct prepared *out, double bound_s, struct error *err)
{
    const struct plan_problem *p = &out->problem;
    struct policy_result now = {.B = p->B, .micro_batches = p->micro_batches, .bound_s = bound_s};
    struct error why;
    double host_adam = out->costs.host_adam;
    bool first = r->B == 0;
    if (!first && !r->error[0] && r->prediction.step_s <= bound_s) {
        return STATUS_OK; // it cannot be better
    }
    snprintf(now.policy, sizeof now.policy, "%s", policy);
    s->err = &why;
    out->costs.host_adam = adam_to_count_with(out);
    if (search_policy(s, policy)) {
        snprintf(now.error, sizeof now.error, "%.511s", why.text);
    }
    out->costs.host_adam = host_adam;
    if (now.error[0]) {
        *r = first || r->error[0] ? now : *r;
        return STATUS_OK;
    }
    now.plan = s->best;
    int status = plan_predict(&now.prediction, &now.plan, p, err);
    now.bound_s = fmin(bound_s, now.prediction.bound_s); // not below a mix of ZeRO stages
    if (!status && (first || better(&now, r))) {
        *r = now;
    }
    return status;
}

// All policies, one after another, with what one search has found out.
static int try_policies(struct policy_result *list, size_t n, struct prepared *out,
                        struct error *err)
{
    struct search s;
    double bound_s = plan_bound(&out->problem);
    int status = STATUS_OK;
    search_open(&s, &out->problem, err);
    for (size_t i = 0; status == STATUS_OK && i < n; i++) {
        char policy[32]; // twin-flow: half of it
        snprintf(policy, sizeof policy, "%s%s", plan_policies[i],
                 strcmp(plan_policies[i], "twin-flow") == 0 ? ":0.5" : "");
        status = try_policy(list + i, policy, &s, out, bound_s, err);
    }
    search_close(&s);
    return status;
}

int prepare_policies(struct prepared *out, struct policy_result **results, size_t *n,
                     const struct prepare_config *config, struct error *err)
{
    struct context x = {.config = config, .out = out};
    size_t count = 0;
    *out = (struct prepared){0};
    while (plan_policies[count]) {
        count++;
    }
    if ((config->gpus > 1 || config->nodes > 1) && !set(config->machine)) {
        return error_set(err, STATUS_USAGE, "--%s %zu: needs a --machine file",
                         config->gpus > 1 ? "gpus" : "nodes",
                         config->gpus > 1 ? config->gpus : config->nodes);
    }
    struct policy_result *list = calloc(count, sizeof *list);
    int status = list ? count_ranks(&x, err)
                      : error_set(err, STATUS_FAIL, "no memory for %zu policies", count);
    status = status ? status : read_machine(&x, err);
    if (status == STATUS_OK) {
        set_budget(&x);
    }
    if (status == STATUS_OK && !x.has_machine) {
        status = real_budget(&x, err);
    }
    for (size_t B = config->B ? config->B : config->rows; status == STATUS_OK && B >= 1; B--) {
        if (config->rows % B) {
            continue;
        }
        set_problem(&x, B);
        status = set_costs(&x, B, err);
        status = status ? status : try_policies(list, count, out, err);
        if (config->B) {
            break;
        }
    }
    if (status) {
        free(list);
        return status;
    }
    *results = list;
    *n = count;
    return STATUS_OK;
}

// How throughput per GPU changes with this many of them.
static int scale(struct scale_point *point, const struct prepare_config *config, size_t gpus,
                 size_t nodes, size_t B, struct error *err)
{
    struct prepare_config c = *config;
    struct prepared out = {0};
    struct context x = {.config = &c, .out = &out};
    struct step_shape shape;
    struct error why;
    c.gpus = gpus;
    c.nodes = nodes;
    *point = (struct scale_point){.gpus = gpus * nodes, .nodes = nodes};
    if (count_ranks(&x, err) || read_machine(&x, err)) {
        return err->status;
    }
    set_budget(&x);
    set_problem(&x, B);
    plan_shape(&shape, &out.problem);
    machine_costs(&out.costs, &x.machine, &shape);
    point->network = machine_waits_for_network(&x.machine, &shape);
    if (plan_choose(&out.plan, &out.problem, "auto", &why)) {
        snprintf(point->error, sizeof point->error, "%.511s", why.text);
        return STATUS_OK;
    }
    if (plan_predict(&point->prediction, &out.plan, &out.problem, err)) {
        return err->status;
    }
    point->tokens_per_s = (double)(c.rows * c.T) / point->prediction.step_s;
    return STATUS_OK;
}

#define SCALE_GPUS_MAX ((size_t)1024)

int prepare_scaling(struct scale_point points[SCALE_POINTS_MAX], size_t *n,
                    const struct prepare_config *config, size_t B, struct error *err)
{
    size_t all = config->gpus ? config->gpus : 1;
    *n = 0;
    for (size_t gpus = 1; gpus < all; gpus *= 2) {
        if (scale(points + (*n)++, config, gpus, 1, B, err)) {
            return err->status;
        }
    }
    for (size_t nodes = 1; nodes * all <= SCALE_GPUS_MAX; nodes *= 2) {
        if (scale(points + (*n)++, config, all, nodes, B, err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

int prepared_schedule(const struct prepared *p, const struct graph *graph, struct timing *timings,
                      size_t steps, struct error *err)
{
    const struct plan_problem *q = &p->problem;
    struct step_shape shape;
    double *work = malloc((graph->n_ops + 1) * sizeof *work);
    if (!work) {
        return error_set(err, STATUS_FAIL, "no memory to simulate %zu operations", graph->n_ops);
    }
    plan_shape(&shape, q);
    costs_of_graph(&p->costs, &shape, &p->plan, graph, work);
    struct simulation simulation = {
        .graph = graph, .work = work, .link = p->costs.link, .fifo = p->plan.fifo, .steps = steps};
    int status = simulate(&simulation, timings, err);
    free(work);
    return status;
}
