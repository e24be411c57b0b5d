// Reports of plans: the table accounts for every byte and every second, the JSON has every field,
// and odd numbers leave both readable.
//
// The table itself is inside report.c: its source is included here, under other names since its
// object file is linked too.
#define report_plan          inside_report_plan
#define report_policies      inside_report_policies
#define report_policies_json inside_report_policies_json
#define report_measured      inside_report_measured
#define report_miniature     inside_report_miniature
#include "hete/report.c"

#include "test/cmocka.h"
#include "test/tiny.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static uint64_t rng;

// ---- problems and plans -------------------------------------------------------------------------

struct problem_case {
    struct gpt gpt;
    struct costs costs;
    struct plan_problem problem;
    struct plan plan;
};

static void random_costs(struct costs *c)
{
    *c = (struct costs){.peak_flops = 1e12, .clip = 1e-5};
    for (int i = 0; i < 2; i++) {
        for (int call = 0; call < CALLS; call++) {
            c->call[call][i] = 1e-3 * (1 + rng_unit(&rng));
        }
        c->accumulate[i] = c->norm[i] = c->adam[i] = 1e-4 * (1 + rng_unit(&rng));
        c->scatter[i] = c->gather[i] = 1e-4 * (1 + rng_unit(&rng));
    }
    c->share = 1e-5;
    c->host_adam = c->host_accumulate = c->host_norm = 1e-9 * (1 + rng_unit(&rng));
    c->link = (struct device_link){1e-5, 1e9, 8e8, 7e8, 6e8};
}

// Any decisions that make sense together.
static void random_case(struct problem_case *c)
{
    struct gpt_config config = {.max_seq = 32,
                                .vocab = 500,
                                .layers = 1 + rng_below(&rng, 9),
                                .heads = 2,
                                .hidden = 32,
                                .head_rows = 16};
    *c = (struct problem_case){0};
    gpt_open(&c->gpt, &config);
    random_costs(&c->costs);
    c->problem = (struct plan_problem){.model = &c->gpt.model,
                                       .dtype = rng_below(&rng, 2) ? DTYPE_FP32 : DTYPE_BF16,
                                       .B = 1 + rng_below(&rng, 3),
                                       .T = 16,
                                       .micro_batches = 1 + rng_below(&rng, 3),
                                       .ranks = rng_below(&rng, 2) ? 1 : 2 + rng_below(&rng, 4),
                                       .zero = -1,
                                       .hold_updates = rng_below(&rng, 2),
                                       .costs = &c->costs,
                                       .budget = {SIZE_MAX, SIZE_MAX, SIZE_MAX}};
    bool several = c->problem.ranks > 1;
    c->plan = (struct plan){.policy = "auto",
                            .units = c->gpt.model.units,
                            .ranks = c->problem.ranks,
                            .B = c->problem.B,
                            .T = c->problem.T,
                            .micro_batches = c->problem.micro_batches,
                            .hold_updates = c->problem.hold_updates,
                            .slots = 2,
                            .grad_buffers = 1 + rng_below(&rng, 3),
                            .slices = 1 + rng_below(&rng, 4),
                            .early_adam = !c->problem.hold_updates && rng_below(&rng, 2)};
    for (size_t u = 0; u < c->plan.units; u++) {
        struct unit_plan *d = c->plan.unit + u;
        if (u > 1 && rng_below(&rng, 2)) {
            *d = d[-1];
            continue;
        }
        d->host_optimizer = rng_below(&rng, 2);
        d->stream = u && (several || d->host_optimizer) && rng_below(&rng, 2);
        d->recompute = u && rng_below(&rng, 2);
        d->shard = several && (d->host_optimizer || d->stream || rng_below(&rng, 2));
    }
    if (rng_below(&rng, 4) == 0) {
        c->problem.budget.pinned = 1 << (12 + rng_below(&rng, 8));
    }
}

static void ok(int status, const struct error *err)
{
    if (status) {
        fail_msg("%s", err->text);
    }
}

static FILE *writer; // the report that is under test

static FILE *open_text(void)
{
    writer = tmpfile();
    assert_non_null(writer);
    return writer;
}

static char *close_text(void)
{
    long bytes = ftell(writer);
    char *text = test_alloc((size_t)bytes + 1, 1);
    rewind(writer);
    assert_int_equal(fread(text, 1, (size_t)bytes, writer), bytes);
    fclose(writer);
    return text;
}

static void has(const char *text, const char *what)
{
    if (!strstr(text, what)) {
        fail_msg("'%s' is not in:\n%s", what, text);
    }
}

// ---- sizes --------------------------------------------------------------------------------------

static void sizes_have_three_digits(void **state)
{
    static const struct {
        size_t bytes;
        const char *text;
    } some[] = {{0, "0"},
                {1, "1 B"},
                {1023, "1023 B"},
                {1024, "1.00 KiB"},
                {10 * 1024 - 1, "10.0 KiB"},
                {102348, "99.9 KiB"},
                {102399, "100 KiB"},
                {1000 << 20, "1000 MiB"},
                {(size_t)40 << 30, "40.0 GiB"},
                {(size_t)3 << 39, "1.50 TiB"},
                {SIZE_MAX - 1, "16.0 EiB"},
                {SIZE_MAX, "no limit"}};
    (void)state;
    for (size_t i = 0; i < COUNT(some); i++) {
        assert_string_equal(size_text(some[i].bytes).s, some[i].text);
    }
    assert_string_equal(ms_text(0.4123).s, "412.3");
    assert_string_equal(ms_text(0.0123456).s, "12.35");
    assert_string_equal(ms_text(0.00123456).s, "1.235");
    assert_string_equal(ms_text(0).s, "0");
    assert_string_equal(ms_text(NAN).s, "n/a");
    assert_string_equal(ms_text(1e300).s, "1e+303");
}

// ---- the table ----------------------------------------------------------------------------------

static void close_to(double x, double y)
{
    assert_true(fabs(x - y) <= 1e-9 * (fabs(x) + fabs(y)));
}

static void check_rows(const struct table *t, const struct plan *plan)
{
    size_t next = 0;
    for (size_t i = 0; i + 1 < t->n; i++) {
        const struct row *row = t->rows + i;
        assert_int_equal(row->first, next);
        assert_true(row->last >= row->first && row->last < plan->units);
        for (size_t u = row->first; u < row->last; u++) {
            assert_memory_equal(plan->unit + u, plan->unit + u + 1, sizeof *plan->unit);
        }
        if (i > 1) {
            assert_true(
                memcmp(plan->unit + row->first - 1, plan->unit + row->first, sizeof *plan->unit));
        }
        next = row->last + 1;
    }
    assert_int_equal(next, plan->units);
}

// Seconds of every lane that the graph has.
static void check_seconds(const struct table *t, const struct problem_case *c,
                          const struct step_shape *shape)
{
    struct graph g = {0};
    struct error err;
    double lane[LANES] = {0};
    ok(step_build(&g, shape, &c->plan, STEP_TRAIN, &err), &err);
    double *work = test_alloc(g.n_ops, sizeof *work);
    costs_of_graph(&c->costs, shape, &c->plan, &g, work);
    for (size_t i = 0; i < g.n_ops; i++) {
        enum lane l = (enum lane)g.ops[i].lane;
        double rate = l == LANE_COPY_IN ? c->costs.link.in : c->costs.link.out;
        bool copies = l == LANE_COPY_IN || l == LANE_COPY_OUT;
        lane[l] += copies ? c->costs.link.latency_s + work[i] / rate : work[i];
    }
    const double *s = t->total.seconds;
    close_to(s[FORWARD] + s[RECOMPUTE] + s[BACKWARD] + s[UPDATE], lane[LANE_COMPUTE]);
    close_to(s[COPY_IN], lane[LANE_COPY_IN]);
    close_to(s[COPY_OUT], lane[LANE_COPY_OUT]);
    close_to(s[HOST], lane[LANE_HOST]);
    close_to(s[COMM], lane[LANE_COMM]);
    assert_true((s[COMM] > 0) == (c->problem.ranks > 1));
    free(work);
    graph_free(&g);
}

// What a unit must have at least, whoever else has a share.
static void check_unit_bytes(const struct table *t, const struct problem_case *c,
                             const struct layout *layout)
{
    for (size_t u = 0; u < c->plan.units; u++) {
        const struct row *row = row_of(t, u);
        size_t moments = layout->region[BUF_MOMENTS][u].bytes;
        size_t host_moments = layout->region[BUF_HOST_MOMENTS][u].bytes;
        size_t params = layout->region[BUF_PARAMS][u].bytes;
        assert_true((moments == 0) == c->plan.unit[u].host_optimizer);
        assert_true((host_moments != 0) == c->plan.unit[u].host_optimizer);
        size_t units = row->last - row->first + 1;
        assert_true(row->bytes[SPACE_DEVICE] >= units * (moments + params));
        assert_true(row->bytes[SPACE_HOST] >= units * host_moments);
    }
}

static void the_table_accounts_for_all_bytes_and_seconds(void **state)
{
    (void)state;
    for (int round = 0; round < 300; round++) {
        struct problem_case c;
        struct table t;
        struct layout layout;
        struct step_shape shape;
        struct error err;
        random_case(&c);
        plan_shape(&shape, &c.problem);
        ok(layout_make(&layout, &shape, &c.plan, c.problem.budget.pinned, &err), &err);
        ok(make_table(&t, &c.plan, &c.problem, &err), &err);
        for (int s = 0; s < SPACES; s++) {
            size_t sum = 0;
            for (int k = 0; k < CATEGORIES; k++) {
                sum += t.category[k][s];
            }
            assert_int_equal(t.total.bytes[s], layout.total[s]);
            assert_int_equal(sum, layout.total[s]);
        }
        check_rows(&t, &c.plan);
        check_unit_bytes(&t, &c, &layout);
        check_seconds(&t, &c, &shape);
        layout_free(&layout);
        free(t.rows);
    }
}

static void a_plan_is_told_in_full(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        struct problem_case c;
        struct error err;
        struct table t;
        char piece[64];
        random_case(&c);
        c.problem.budget = (struct budget){(size_t)1 << 28, (size_t)1 << 30, SIZE_MAX};
        ok(report_plan(open_text(), &c.plan, &c.problem, &err), &err);
        char *text = close_text();
        ok(make_table(&t, &c.plan, &c.problem, &err), &err);
        has(text, "plan: auto, predicted ");
        for (size_t i = 0; i + 1 < t.n; i++) {
            const struct unit_plan *d = c.plan.unit + t.rows[i].first;
            snprintf(piece, sizeof piece,
                     t.rows[i].first == t.rows[i].last ? "\n  %zu " : "\n  %zu-%zu ",
                     t.rows[i].first, t.rows[i].last);
            has(text, piece);
            has(text, d->recompute ? " recompute " : " keep ");
            has(text, d->stream ? " stream " : " resident ");
            has(text, d->host_optimizer ? " host " : " device ");
        }
        size_t sharded = 0;
        for (size_t u = 0; u < c.plan.units; u++) {
            sharded += c.plan.unit[u].shard;
        }
        assert_true((strstr(text, " whole ") || strstr(text, " shard ")) == (c.plan.ranks > 1));
        snprintf(piece, sizeof piece, "of %zu of %zu units it updates a piece, 1/%zu\n", sharded,
                 c.plan.units, c.plan.ranks);
        assert_true((strstr(text, piece) != NULL) == (c.plan.ranks > 1));
        has(text, "\n  shared ");
        has(text, "\n  total ");
        has(text, size_text(t.total.bytes[SPACE_DEVICE]).s);
        has(text, " of 256 MiB");
        has(text, c.plan.hold_updates ? "waiting for the global norm (clip, guard) costs "
                                      : "updates do not wait");
        has(text, "\n  why: ");
        has(text, " is the limit");
        free(t.rows);
        free(text);
    }
}

// ---- policies -----------------------------------------------------------------------------------

static void random_results(struct policy_result *results, size_t n, const struct problem_case *c)
{
    struct error err;
    for (size_t i = 0; i < n; i++) {
        struct policy_result *r = results + i;
        *r = (struct policy_result){
            .B = c->problem.B, .micro_batches = c->problem.micro_batches, .plan = c->plan};
        snprintf(r->policy, sizeof r->policy, "policy-%zu", i);
        if (i % 3 == 2) {
            snprintf(r->error, sizeof r->error, "the device is \"%zu\" bytes short", i);
        } else {
            ok(plan_predict(&r->prediction, &r->plan, &c->problem, &err), &err);
        }
    }
}

static json_t *load(const char *text)
{
    json_error_t err;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &err);
    if (!root) {
        fail_msg("%s in:\n%s", err.text, text);
    }
    return root;
}

static const json_t *get(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    if (!value) {
        fail_msg("no field '%s'", name);
    }
    return value;
}

static double number(const json_t *object, const char *name)
{
    assert_true(json_is_number(get(object, name)));
    return json_number_value(get(object, name));
}

static void check_lanes(const json_t *lanes, const double *seconds, bool several)
{
    static const char *const name[] = {"compute", "copy_in", "copy_out", "host", "comm"};
    assert_int_equal(json_object_size(lanes), several ? LANES : LANE_COMM);
    for (int lane = 0; lane < (several ? LANES : LANE_COMM); lane++) {
        close_to(number(lanes, name[lane]), seconds[lane]);
    }
}

// Every unit once, in order, with its decisions.
static void check_plan(const json_t *object, const struct plan *plan)
{
    const json_t *units = get(object, "units");
    size_t next = 0;
    assert_true(number(object, "slots") == (double)plan->slots);
    assert_true(number(object, "ranks") == (double)plan->ranks);
    assert_true(number(object, "grad_buffers") == (double)plan->grad_buffers);
    assert_true(number(object, "slices") == (double)plan->slices);
    assert_true(json_is_true(get(object, "early_adam")) == plan->early_adam);
    assert_true(json_is_true(get(object, "hold_updates")) == plan->hold_updates);
    assert_true(json_is_boolean(get(object, "fifo")) && json_is_boolean(get(object, "barrier")));
    assert_true(json_is_boolean(get(object, "serial_copies")));
    assert_string_equal(json_string_value(get(object, "policy")), plan->policy);
    for (size_t i = 0; i < json_array_size(units); i++) {
        const json_t *run = json_array_get(units, i);
        assert_true(number(run, "from") == (double)next);
        for (; next <= (size_t)number(run, "to"); next++) {
            assert_true(json_is_true(get(run, "recompute")) == plan->unit[next].recompute);
            assert_true(json_is_true(get(run, "stream")) == plan->unit[next].stream);
            assert_true(json_is_true(get(run, "host_optimizer")) ==
                        plan->unit[next].host_optimizer);
            assert_true(json_is_true(get(run, "shard")) == plan->unit[next].shard);
        }
    }
    assert_int_equal(next, plan->units);
}

static void check_policy(const json_t *object, const struct policy_result *r,
                         const struct report_subject *subject)
{
    static const char *const null[] = {"step_s",       "tokens_per_s", "mfu",          "bound_s",
                                       "device_bytes", "host_bytes",   "pinned_bytes", "busy_s",
                                       "exposed_s",    "plan"};
    const struct prediction *p = &r->prediction;
    size_t gpus = subject->gpus * subject->nodes;
    assert_string_equal(json_string_value(get(object, "policy")), r->policy);
    assert_true(number(object, "micro_batch") == (double)r->B);
    assert_true(number(object, "micro_batches") == (double)r->micro_batches);
    assert_true(json_is_true(get(object, "fits")) == !r->error[0]);
    if (r->error[0]) {
        assert_string_equal(json_string_value(get(object, "error")), r->error);
        for (size_t i = 0; i < COUNT(null); i++) {
            assert_true(json_is_null(get(object, null[i])));
        }
        return;
    }
    assert_true(json_is_null(get(object, "error")));
    close_to(number(object, "step_s"), p->step_s);
    close_to(number(object, "tokens_per_s") * p->step_s,
             (double)(r->B * r->micro_batches * subject->problem->T * gpus));
    close_to(number(object, "mfu") * p->step_s * subject->problem->costs->peak_flops * (double)gpus,
             subject->flops);
    close_to(number(object, "bound_s"), r->bound_s);
    assert_true(number(object, "device_bytes") == (double)p->device_bytes);
    assert_true(number(object, "host_bytes") == (double)p->host_bytes);
    assert_true(number(object, "pinned_bytes") == (double)p->pinned_bytes);
    check_lanes(get(object, "busy_s"), p->busy_s, gpus > 1);
    check_lanes(get(object, "exposed_s"), p->exposed_s, gpus > 1);
    check_plan(get(object, "plan"), &r->plan);
}

static void random_points(struct scale_point *points, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        points[i] = (struct scale_point){.gpus = (size_t)1 << i, .nodes = i ? i : 1};
        if (i == 0 || rng_below(&rng, 3) == 0) {
            snprintf(points[i].error, sizeof points[i].error, "%zu bytes short", i);
            continue;
        }
        points[i].tokens_per_s = 1000 * (1 + rng_unit(&rng));
        points[i].network = rng_below(&rng, 2);
        points[i].prediction.step_s = 1 + rng_unit(&rng);
        points[i].prediction.exposed_s[1 + rng_below(&rng, LANES - 1)] = 0.01 + rng_unit(&rng);
    }
}

static void check_points(const json_t *array, const struct report_subject *subject)
{
    static const char *const name[] = {"compute", "copy_in", "copy_out", "host", "comm"};
    double first = 0;
    assert_int_equal(json_array_size(array), subject->n_scaling);
    for (size_t i = 0; i < subject->n_scaling; i++) {
        const struct scale_point *p = subject->scaling + i;
        const json_t *object = json_array_get(array, i);
        bool fits = !p->error[0];
        assert_true(number(object, "gpus") == (double)p->gpus);
        assert_true(number(object, "nodes") == (double)p->nodes);
        assert_true(json_is_true(get(object, "fits")) == fits);
        assert_true(json_is_null(get(object, "error")) == fits);
        assert_true(json_is_null(get(object, "step_s")) != fits);
        if (fits) {
            const char *lane = json_string_value(get(object, "waits_for"));
            first = first > 0 ? first : p->tokens_per_s;
            close_to(number(object, "of_first"), p->tokens_per_s / first);
            for (int l = 1; l < LANES; l++) {
                double s = p->prediction.exposed_s[l];
                assert_true((strcmp(lane, name[l]) == 0) == (s > 0));
                assert_true(s == 0 || s == number(object, "exposed_s"));
            }
        }
    }
}

static void policies_are_told_to_tools_in_full(void **state)
{
    struct policy_result results[7];
    struct scale_point points[6];
    (void)state;
    for (int round = 0; round < 30; round++) {
        struct problem_case c;
        struct error err;
        random_case(&c);
        random_results(results, COUNT(results), &c);
        random_points(points, COUNT(points));
        struct report_subject subject = {.model = "gpt2:d12 <\"&\">",
                                         .machine = "this one",
                                         .problem = &c.problem,
                                         .flops = 1e9,
                                         .gpus = 1 + rng_below(&rng, 4),
                                         .nodes = 1 + rng_below(&rng, 2),
                                         .scaling = points,
                                         .n_scaling = rng_below(&rng, COUNT(points) + 1)};
        ok(report_policies_json(open_text(), &subject, results, COUNT(results), &err), &err);
        char *text = close_text();
        json_t *root = load(text);
        assert_string_equal(json_string_value(get(root, "model")), subject.model);
        assert_string_equal(json_string_value(get(root, "machine")), subject.machine);
        assert_true(number(root, "batch") ==
                    (double)(c.problem.B * c.problem.micro_batches * subject.gpus * subject.nodes));
        assert_true(number(root, "gpus") == (double)subject.gpus);
        assert_true(number(root, "nodes") == (double)subject.nodes);
        check_points(get(root, "scaling"), &subject);
        assert_true(number(root, "seq_len") == (double)c.problem.T);
        assert_true(number(root, "flops_per_step") == 1e9);
        assert_true(json_is_null(get(get(root, "budget"), "device_bytes"))); // no limit
        const json_t *policies = get(root, "policies");
        assert_int_equal(json_array_size(policies), COUNT(results));
        for (size_t i = 0; i < COUNT(results); i++) {
            check_policy(json_array_get(policies, i), results + i, &subject);
        }
        json_decref(root);
        free(text);
    }
}

static void policies_are_told_to_people(void **state)
{
    struct policy_result results[3];
    struct problem_case c;
    (void)state;
    random_case(&c);
    random_results(results, COUNT(results), &c);
    results[0].prediction = (struct prediction){.step_s = 0.5,
                                                .busy_s = {0.4, 0.3, 0.2, 0.1},
                                                .exposed_s = {0, 0.07, 0.02, 0.01},
                                                .device_bytes = 5 << 20,
                                                .host_bytes = 6 << 20,
                                                .pinned_bytes = 7 << 20};
    results[0].bound_s = 0.4;
    struct scale_point points[] = {
        {.gpus = 1, .nodes = 1, .error = "3 bytes short"},
        {.gpus = 2, .nodes = 1, .tokens_per_s = 800, .prediction = {.step_s = 0.25}},
        {.gpus = 4,
         .nodes = 2,
         .tokens_per_s = 600,
         .network = true,
         .prediction = {.step_s = 0.2, .exposed_s = {[LANE_HOST] = 0.01, [LANE_COMM] = 0.03}}}};
    struct report_subject subject = {.model = "model",
                                     .machine = "machine",
                                     .problem = &c.problem,
                                     .flops = 1e11,
                                     .gpus = 1,
                                     .nodes = 2,
                                     .scaling = points,
                                     .n_scaling = COUNT(points)};
    report_policies(open_text(), &subject, results, COUNT(results));
    char *text = close_text();
    static const char *const told[] = {
        " 500.0 ",
        " 10.0%",
        " 1.250 ",
        " 5.00 MiB",
        " 6.00 MiB",
        " 7.00 MiB",
        " 400.0 ",
        " 300.0 ",
        " 200.0 ",
        " 100.0 ",
        " 70.00 ",
        " 20.00 ",
        " 10.00 ",
        " no limit",
        "does not fit: the device is \"2\" bytes short",
        "2 GPUs, 1 on each of 2 machines",
        "     1         1  does not fit: 3 bytes short\n",
        "     2         1      250.0        800.0   100.0%   nothing\n",
        "     4         2      200.0        600.0    75.0%   comm, 15.0% of the step (the net"};
    for (size_t i = 0; i < COUNT(told); i++) {
        has(text, told[i]);
    }
    free(text);
}

static void odd_numbers_leave_reports_readable(void **state)
{
    static const double some[] = {0, -1, 1e300, 5e-324, NAN, INFINITY, -INFINITY};
    struct policy_result results[2];
    struct problem_case c;
    struct error err;
    (void)state;
    random_case(&c);
    for (int round = 0; round < 200; round++) {
        random_results(results, COUNT(results), &c);
        struct prediction *p = &results[0].prediction;
        double *numbers = &p->step_s;
        for (size_t i = 0; i < 2 + 2 * LANES; i++) {
            numbers[i] = some[rng_below(&rng, COUNT(some))];
        }
        struct scale_point point = {.gpus = SIZE_MAX, .nodes = 0, .prediction = *p};
        point.tokens_per_s = some[rng_below(&rng, COUNT(some))];
        p->device_bytes = p->host_bytes = p->pinned_bytes = SIZE_MAX;
        c.costs.peak_flops = some[rng_below(&rng, COUNT(some))];
        snprintf(results[1].policy, sizeof results[1].policy, "\xff\x01\"\\");
        struct report_subject subject = {.model = "\xc3",
                                         .machine = "",
                                         .problem = &c.problem,
                                         .flops = some[rng_below(&rng, COUNT(some))],
                                         .gpus = 1,
                                         .nodes = 1 + rng_below(&rng, 2),
                                         .scaling = &point,
                                         .n_scaling = 1};
        ok(report_policies_json(open_text(), &subject, results, 2, &err), &err);
        char *text = close_text();
        json_decref(load(text));
        free(text);
        report_policies(open_text(), &subject, results, 2);
        text = close_text();
        assert_null(strstr(text, "nan"));
        free(text);
        struct measured m = {.isa = "base", .pageable_copies = UINT64_MAX, .late = 3};
        m.times.period_s = some[rng_below(&rng, COUNT(some))];
        memcpy(m.times.busy_s, p->exposed_s, sizeof m.times.busy_s);
        m.bytes_in = m.bytes_out = m.host_adam_params = some[rng_below(&rng, COUNT(some))];
        m.host_adam_s = some[rng_below(&rng, COUNT(some))];
        report_measured(open_text(), p, &m);
        text = close_text();
        assert_null(strstr(text, "nan"));
        free(text);
    }
    struct report_subject subject = {
        .model = "m", .machine = "m", .problem = &c.problem, .gpus = 1, .nodes = 1};
    ok(report_policies_json(open_text(), &subject, NULL, 0, &err), &err);
    free(close_text());
}

static void a_full_disk_is_an_error(void **state)
{
    struct problem_case c;
    struct error err = {0};
    FILE *full = fopen("/dev/full", "w");
    (void)state;
    if (!full) {
        skip();
    }
    setvbuf(full, NULL, _IONBF, 0);
    random_case(&c);
    struct report_subject subject = {
        .model = "m", .machine = "m", .problem = &c.problem, .gpus = 1, .nodes = 1};
    assert_int_equal(report_policies_json(full, &subject, NULL, 0, &err), STATUS_FAIL);
    has(err.text, "cannot write");
    fclose(full);
}

// ---- measured -----------------------------------------------------------------------------------

static void measured_stands_beside_predicted(void **state)
{
    struct prediction p = {
        .step_s = 0.4, .busy_s = {0.31, 0.21, 0.11, 0.12}, .exposed_s = {0, 0.051, 0.052, 0.053}};
    struct measured m = {.times = {0.5, {0.32, 0.2, 0.1, 0.25}, {0, 0.061, 0.062, 0.063}},
                         .bytes_in = 4e8,
                         .bytes_out = 1e8,
                         .host_adam_params = 5e7,
                         .host_adam_s = 0.2,
                         .pageable_copies = 17,
                         .late = 2,
                         .paced = 100,
                         .host_threads = 3,
                         .isa = "avx2"};
    (void)state;
    report_measured(open_text(), &p, &m);
    char *text = close_text();
    static const char *const told[] = {" 400.0 ",
                                       " 500.0 ",
                                       "125.0%",
                                       " 310.0 ",
                                       " 320.0\n",
                                       " 51.00 ",
                                       " 61.00\n",
                                       "in 2.00 GB/s",
                                       "out 1.00 GB",
                                       "0.25 G parameters/s = 7.00 GB/s",
                                       "3 host threads, avx2\n",
                                       "17 copies",
                                       "2 of 100",
                                       "more than 1%"};
    for (size_t i = 0; i < COUNT(told); i++) {
        has(text, told[i]);
    }
    free(text);
    m.late = 1;
    m.pageable_copies = 0;
    report_measured(open_text(), &p, &m);
    text = close_text();
    assert_null(strstr(text, "more than 1%"));
    assert_null(strstr(text, "pageable"));
    free(text);
}

int main(void)
{
    rng = test_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_have_three_digits),
        cmocka_unit_test(the_table_accounts_for_all_bytes_and_seconds),
        cmocka_unit_test(a_plan_is_told_in_full),
        cmocka_unit_test(policies_are_told_to_tools_in_full),
        cmocka_unit_test(policies_are_told_to_people),
        cmocka_unit_test(odd_numbers_leave_reports_readable),
        cmocka_unit_test(a_full_disk_is_an_error),
        cmocka_unit_test(measured_stands_beside_predicted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
