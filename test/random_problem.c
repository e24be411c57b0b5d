#include "test/random_problem.h"

#include "test/cmocka.h"
#include "test/tiny.h"

#include <math.h>

// a to b, as often below their geometric mean as above.
double between(uint64_t *rng, double a, double b)
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
static void random_budget(struct random_problem *r, uint64_t *rng)
{
    size_t layers = r->gpt.model.units - 1;
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

void random_problem(struct random_problem *r, uint64_t *rng, size_t layers)
{
    static const size_t micro_batches[] = {1, 1, 1, 1, 1, 1, 2, 3, 10};
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
                                       .micro_batches = micro_batches[rng_below(rng, 9)],
                                       .hold_updates = rng_below(rng, 2),
                                       .costs = &r->costs,
                                       .budget = {SIZE_MAX, SIZE_MAX, SIZE_MAX}};
    random_costs(&r->costs, rng, &r->gpt.model, r->problem.dtype);
    random_budget(r, rng);
}

void random_ranks(struct random_problem *r, uint64_t *rng)
{
    struct costs *c = &r->costs;
    double scatter = c->call[CALL_FORWARD][1] * between(rng, 0.05, 3);
    double gather = scatter * between(rng, 0.5, 1);
    double embed = (double)r->gpt.model.embed.params / (double)r->gpt.model.block.params;
    r->problem.ranks = 2 + rng_below(rng, 7);
    r->problem.zero = -1;
    for (int k = 0; k < 2; k++) {
        c->scatter[k] = (k ? 1 : embed) * scatter;
        c->gather[k] = (k ? 1 : embed) * gather;
    }
    c->share = 1e-3 * scatter;
    random_budget(r, rng);
}

struct choice random_choice(uint64_t *rng, const struct search *s)
{
    size_t blocks = s->problem->model->units - 1;
    struct choice c = {.n_device = rng_below(rng, blocks + 1),
                       .n_recompute = rng_below(rng, blocks + 1),
                       .order = (enum stream_order)rng_below(rng, STREAM_ORDERS),
                       .embed_on_host = rng_below(rng, 2),
                       .early_adam = !s->problem->hold_updates && rng_below(rng, 2),
                       .slots = 1 + rng_below(rng, 4),
                       .grad_buffers = 1 + rng_below(rng, 3),
                       .slices = 1 + rng_below(rng, 5)};
    c.n_stream = rng_below(rng, blocks - c.n_device + 1);
    if (s->problem->ranks > 1) {
        static const size_t stages[] = {0, 2, 3};
        c.zero = stages[rng_below(rng, 3)];
        c.embed_shard = !c.embed_on_host && rng_below(rng, 2);
    }
    return c;
}

void must_choose(struct plan *plan, struct prediction *p, const struct plan_problem *problem,
                 const char *policy)
{
    struct error err = {0};
    if (plan_choose(plan, problem, policy, &err) || plan_check(plan, problem, &err) ||
        plan_predict(p, plan, problem, &err)) {
        fail_msg("%s: %s", policy, err.text);
    }
}
