#include "test/every_plan.h"
#include "test/cmocka.h"
#include "test/random_problem.h"

#include <math.h>

// What may become of a block besides recomputation: with one rank the first three.
enum { DEVICE, HOST, HOST_STREAM, SHARD, SHARD_STREAM };

static size_t choices_per_block(const struct plan_problem *problem)
{
    return 2 * (problem->ranks > 1 ? SHARD_STREAM + 1 : HOST_STREAM + 1);
}

// A digit of n for each block: twice the above, and one more if it recomputes.
static void plan_of_number(struct plan *plan, const struct plan_problem *problem, size_t n,
                           const struct choice *like)
{
    size_t blocks = problem->model->units - 1, streamed = 0, base = choices_per_block(problem);
    bool several = problem->ranks > 1, any_host = like->embed_on_host;
    bool any_shared = several && problem->micro_batches > 1;
    plan_resident(plan, problem->model, problem->B, problem->T, problem->micro_batches,
                  problem->hold_updates);
    plan->ranks = several ? problem->ranks : 1;
    plan->unit[0].host_optimizer = like->embed_on_host;
    plan->unit[0].shard = several && (like->embed_on_host || like->embed_shard);
    for (size_t u = 1; u <= blocks; u++, n /= base) {
        size_t where = n % base / 2;
        bool host = where == HOST || where == HOST_STREAM;
        plan->unit[u] = (struct unit_plan){.recompute = n % 2,
                                           .stream = where == HOST_STREAM || where == SHARD_STREAM,
                                           .host_optimizer = host,
                                           .shard = several && where != DEVICE};
        streamed += plan->unit[u].stream;
        any_shared |= where != DEVICE;
        any_host |= host;
    }
    plan->early_adam = like->early_adam;
    plan->slots = streamed < 2 ? streamed : 2;
    plan->grad_buffers = any_shared ? 2 : plan->grad_buffers;
    plan->slices = any_host ? like->slices : 1;
}

// Keeps the best of all plans that are like this one in all but their blocks.
static void try_blocks(struct search *s, const struct choice *like, struct plan *best,
                       double *best_s)
{
    const struct plan_problem *problem = s->problem;
    size_t blocks = problem->model->units - 1;
    size_t plans = (size_t)pow((double)choices_per_block(problem), (double)blocks);
    struct error err = {0};
    for (size_t n = 0; n < plans; n++) {
        struct plan plan;
        struct plan_bytes bytes;
        struct prediction p;
        plan_of_number(&plan, problem, n, like);
        assert_int_equal(plan_bytes(&bytes, &s->shape, &plan, SIZE_MAX, &err), STATUS_OK);
        if (plan_over(&bytes, &problem->budget) > 0) {
            continue;
        }
        // With several ranks there are too many to simulate those that cannot be better.
        double limit_s = problem->ranks > 1 ? *best_s : INFINITY;
        bool predicted = search_predict(s, &plan, limit_s, &p);
        assert_true(predicted || (limit_s < INFINITY && s->status == STATUS_OK));
        if (predicted && p.step_s < *best_s) {
            *best_s = p.step_s;
            *best = plan;
        }
    }
}

static double best_of_all(struct plan *best, const struct plan_problem *problem)
{
    struct search s;
    struct error err = {0};
    double best_s = INFINITY;
    search_open(&s, problem, &err);
    for (int embed = 0; embed < (problem->ranks > 1 ? 3 : 2); embed++) {
        for (int early = 0; early <= !problem->hold_updates; early++) {
            struct choice like = search_usual(&s, false);
            like.embed_on_host = embed == 1;
            like.embed_shard = embed == 2;
            like.early_adam = early;
            try_blocks(&s, &like, best, &best_s);
        }
    }
    search_close(&s);
    return best_s;
}

static void print_plan(const struct plan *plan)
{
    for (size_t u = 0; u < plan->units; u++) {
        const struct unit_plan *d = plan->unit + u;
        print_error("%s%s%s%s ", d->host_optimizer ? "host" : "device",
                    d->shard && !d->host_optimizer ? ",shard" : "", d->stream ? ",stream" : "",
                    d->recompute ? ",recompute" : "");
    }
    print_error("early %d slots %zu grads %zu slices %zu\n", plan->early_adam, plan->slots,
                plan->grad_buffers, plan->slices);
}

void must_find_best(const struct plan_problem *problem, double most)
{
    struct plan plan, best;
    struct prediction p;
    must_choose(&plan, &p, problem, "auto");
    double best_s = best_of_all(&best, problem);
    if (p.step_s > best_s * most) {
        print_plan(&plan);
        print_plan(&best);
        fail_msg("%zu blocks: %.2f%% slower than the best plan", problem->model->units - 1,
                 100 * (p.step_s / best_s - 1));
    }
}
