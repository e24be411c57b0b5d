// The planner on random machines: against all plans there are, against every policy, within its
// budgets; and what it says where nothing fits.
#include "hete/check.h"
#include "hete/search.h"
#include "kernels/gpt.h"

#include "test/cmocka.h"
#include "test/tiny.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- random problems ----------------------------------------------------------------------------

struct random_problem {
    struct gpt gpt;
    struct costs costs;
    struct plan_problem problem;
};

// a to b, as often below their geometric mean as above.
static double between(uint64_t *rng, double a, double b)
{
    return a * pow(b / a, rng_unit(rng));
}

// Times relative to a block's forward, in the range of what machines have.
static void random_costs(struct costs *c, uint64_t *rng, const struct model *model,
                         enum dtype dtype)
{
    double forward = 1e-3, bytes = (double)(model->block.params * dtype_bytes(dtype));
    double embed = (double)model->embed.params / (double)model->block.params;
    *c = (struct costs){.clip = 1e-3 * forward};
    c->call[CALL_FORWARD][1] = forward;
    c->call[CALL_RECOMPUTE][1] = forward * between(rng, 0.6, 1);
    c->call[CALL_BACKWARD][1] = 2 * forward;
    c->call[CALL_HEAD][0] = forward * between(rng, 0.1, 6);
    c->call[CALL_ENCODE][0] = 0.02 * forward;
    c->call[CALL_ENCODE_BACKWARD][0] = 0.05 * forward;
    double adam = forward * between(rng, 0.02, 0.5);
    double host = forward * between(rng, 0.2, 5) / (double)model->block.params;
    for (int k = 0; k < 2; k++) {
        double size = k ? 1 : embed;
        c->adam[k] = size * adam;
        c->norm[k] = size * adam * 0.1;
        c->accumulate[k] = size * adam * 0.4;
    }
    c->host_adam = host;
    c->host_accumulate = 0.3 * host;
    c->host_norm = 0.1 * host;
    c->link.in = bytes / (forward * between(rng, 0.1, 3));
    c->link.out = c->link.in * between(rng, 0.8, 1.2);
    c->link.in_duplex = c->link.in * between(rng, 0.5, 1);
    c->link.out_duplex = c->link.out * between(rng, 0.8, 1);
    c->link.latency_s = rng_below(rng, 2) ? 0.01 * forward : 0;
}

static size_t device_bytes(const struct plan_problem *p, const struct choice *c)
{
    struct search s;
    struct estimate e;
    struct error err = {0};
    search_open(&s, p, &err);
    search_estimate(&s, c, &e);
    search_close(&s);
    return (size_t)e.device_bytes;
}

// A budget between what the leanest plan and the one without offloading need.
static void random_problem(struct random_problem *r, uint64_t *rng, size_t layers)
{
    struct gpt_config config = {.max_seq = 64,
                                .vocab = 100 + rng_below(rng, 2000),
                                .layers = layers,
                                .heads = 2,
                                .hidden = 32 * (1 + rng_below(rng, 4)),
                                .head_rows = 32};
    gpt_open(&r->gpt, &config);
    r->problem = (struct plan_problem){.model = &r->gpt.model,
                                       .dtype = rng_below(rng, 2) ? DTYPE_BF16 : DTYPE_FP32,
                                       .B = 1 + rng_below(rng, 4),
                                       .T = 16 << rng_below(rng, 3),
                                       .micro_batches = rng_below(rng, 3) ? 1 : 2,
                                       .hold_updates = rng_below(rng, 2),
                                       .costs = &r->costs,
                                       .budget = {SIZE_MAX, SIZE_MAX, SIZE_MAX}};
    random_costs(&r->costs, rng, &r->gpt.model, r->problem.dtype);
    struct choice all = {.n_device = layers, .grad_buffers = 2, .slots = 2, .slices = 4};
    struct choice lean = {.n_stream = layers,
                          .n_recompute = layers,
                          .embed_on_host = true,
                          .grad_buffers = 2,
                          .slots = 2,
                          .slices = 4};
    size_t most = device_bytes(&r->problem, &all), least = device_bytes(&r->problem, &lean);
    r->problem.budget.device = least + (size_t)((double)(most - least) * rng_unit(rng));
}

static void choose(struct plan *plan, struct prediction *p, const struct plan_problem *problem,
                   const char *policy)
{
    struct error err = {0};
    if (plan_choose(plan, problem, policy, &err) || plan_check(plan, problem, &err) ||
        plan_predict(p, plan, problem, &err)) {
        fail_msg("%s: %s", policy, err.text);
    }
}

// ---- against all plans --------------------------------------------------------------------------

// The digits of n in base 6 say for each block: recompute or not; device, host, host and stream.
static void plan_of_number(struct plan *plan, const struct plan_problem *problem, size_t n,
                           const struct choice *like)
{
    size_t blocks = problem->model->units - 1, streamed = 0;
    bool any_host = like->embed_on_host, any_shared = false;
    plan_resident(plan, problem->model, problem->B, problem->T, problem->micro_batches,
                  problem->hold_updates);
    plan->unit[0].host_optimizer = like->embed_on_host;
    for (size_t u = 1; u <= blocks; u++, n /= 6) {
        size_t where = n % 6 / 2;
        plan->unit[u] = (struct unit_plan){n % 2, where == 2, where > 0};
        streamed += where == 2;
        any_shared |= where > 0;
    }
    any_host |= any_shared;
    plan->early_adam = like->early_adam;
    plan->slots = streamed < 2 ? streamed : 2;
    plan->grad_buffers = any_shared ? 2 : plan->grad_buffers;
    plan->slices = any_host ? like->slices : 1;
}

static double best_of_all(struct plan *best, const struct plan_problem *problem)
{
    struct search s;
    struct error err = {0};
    double best_s = INFINITY;
    size_t plans = (size_t)pow(6, (double)problem->model->units - 1);
    search_open(&s, problem, &err);
    for (int embed = 0; embed < 2; embed++) {
        for (int early = 0; early <= !problem->hold_updates; early++) {
            struct choice like = search_usual(&s, false);
            like.embed_on_host = embed;
            like.early_adam = early;
            for (size_t n = 0; n < plans; n++) {
                struct plan plan;
                struct plan_bytes bytes;
                struct prediction p;
                plan_of_number(&plan, problem, n, &like);
                assert_int_equal(plan_bytes(&bytes, &s.shape, &plan, SIZE_MAX, &err), STATUS_OK);
                if (plan_over(&bytes, &problem->budget) == 0) {
                    assert_true(search_predict(&s, &plan, INFINITY, &p));
                    if (p.step_s < best_s) {
                        best_s = p.step_s;
                        *best = plan;
                    }
                }
            }
        }
    }
    search_close(&s);
    return best_s;
}

static void print_plan(const struct plan *plan)
{
    for (size_t u = 0; u < plan->units; u++) {
        const struct unit_plan *d = plan->unit + u;
        printf(" %s%s", d->stream ? "stream" : d->host_optimizer ? "host" : "device",
               d->recompute ? ",recompute" : "");
    }
    printf(" early %d\n", plan->early_adam);
}

static void test_against_all_plans(void **state)
{
    uint64_t rng = test_seed();
    size_t layers = getenv("L") ? strtoul(getenv("L"), NULL, 10) : 3;
    int rounds = getenv("N") ? atoi(getenv("N")) : 20;
    double worst = 0, sum = 0;
    (void)state;
    for (int round = 0; round < rounds; round++) {
        struct random_problem r;
        struct plan plan, best;
        struct prediction p;
        random_problem(&r, &rng, layers);
        choose(&plan, &p, &r.problem, "auto");
        double best_s = best_of_all(&best, &r.problem);
        double loss = p.step_s / best_s - 1;
        if (loss > 0.0005) {
            printf("round %d %s hold %d micro %zu: %.4f%% slots %zu grads %zu slices %zu\n", round, plan.policy, plan.hold_updates, plan.micro_batches, 100 * loss, plan.slots, plan.grad_buffers, plan.slices);
            print_plan(&plan);
            print_plan(&best);
        }
        worst = loss > worst ? loss : worst;
        sum += loss;
    }
    printf("worst %.4f%% mean %.4f%%\n", 100 * worst, 100 * sum / rounds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_all_plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
