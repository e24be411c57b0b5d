// Pictures of schedules: what a trace says is what the schedule says; the timeline is well-formed,
// small and complete, whatever the numbers.
#include "hete/step.h"
#include "hete/trace.h"
#include "hete/watch.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint64_t rng;

// ---- a step like those of training --------------------------------------------------------------

static void access_slices(struct graph *g, enum access_mode mode, enum buffer_kind kind,
                          size_t index, size_t slices)
{
    for (size_t s = 0; s < slices; s++) {
        graph_access(g, mode, kind, index, s);
    }
}

static void add_sliced(struct graph *g, uint16_t kind, enum lane lane, size_t unit, size_t micro,
                       size_t slices, const struct access *from, const struct access *to)
{
    for (size_t s = 0; s < slices; s++) {
        graph_add(g, kind, lane, unit, micro)->slice = (uint8_t)s;
        graph_access(g, ACCESS_READ, from->kind, from->index, s);
        graph_access(g, to->mode, to->kind, to->index, s);
    }
}

static void add_fetch(struct graph *g, size_t u, size_t micro, size_t slices)
{
    add_sliced(g, OP_FETCH, LANE_COPY_IN, u, micro, slices,
               &(struct access){.kind = BUF_HOST_PARAMS, .index = (uint32_t)u},
               &(struct access){.kind = BUF_SLOT, .mode = ACCESS_WRITE, .index = u % 2});
}

static void add_call(struct graph *g, uint16_t kind, size_t u, size_t micro, size_t slices)
{
    graph_add(g, kind, LANE_COMPUTE, u, micro);
    access_slices(g, ACCESS_READ, BUF_SLOT, u % 2, slices);
    if (kind == CALL_BACKWARD) {
        access_slices(g, ACCESS_WRITE, BUF_GRADS, u % 2, slices);
    }
    graph_access(g, ACCESS_UPDATE, BUF_X, 0, 0);
}

// All blocks streamed and recomputed, their optimizer on the host.
static void build(struct graph *g, size_t layers, size_t slices, size_t micro_batches)
{
    struct error err;
    for (size_t m = 0; m < micro_batches; m++) {
        graph_add(g, OP_TOKENS_IN, LANE_COPY_IN, 0, m);
        graph_access(g, ACCESS_WRITE, BUF_TOKENS, m, 0);
        graph_add(g, CALL_ENCODE, LANE_COMPUTE, 0, m);
        graph_access(g, ACCESS_READ, BUF_TOKENS, m, 0);
        graph_access(g, ACCESS_WRITE, BUF_X, 0, 0);
        for (size_t u = 1; u <= layers; u++) {
            add_fetch(g, u, m, slices);
            add_call(g, CALL_FORWARD, u, m, slices);
        }
        graph_add(g, CALL_HEAD, LANE_COMPUTE, 0, m);
        graph_access(g, ACCESS_UPDATE, BUF_X, 0, 0);
        for (size_t u = layers; u >= 1; u--) {
            add_fetch(g, u, m, slices);
            add_call(g, CALL_RECOMPUTE, u, m, slices);
            add_call(g, CALL_BACKWARD, u, m, slices);
            add_sliced(g, OP_GRAD_OUT, LANE_COPY_OUT, u, m, slices,
                       &(struct access){.kind = BUF_GRADS, .index = u % 2},
                       &(struct access){
                           .kind = BUF_HOST_GRADS, .mode = ACCESS_WRITE, .index = (uint32_t)u});
        }
    }
    graph_add(g, OP_CLIP, LANE_COMPUTE, 0, 0);
    graph_access(g, ACCESS_READ, BUF_X, 0, 0);
    graph_access(g, ACCESS_WRITE, BUF_SCALE, 0, 0);
    for (size_t u = 1; u <= layers; u++) {
        for (size_t s = 0; s < slices; s++) {
            graph_add(g, OP_HOST_ADAM, LANE_HOST, u, 0)->slice = (uint8_t)s;
            graph_access(g, ACCESS_READ, BUF_SCALE, 0, 0);
            graph_access(g, ACCESS_READ, BUF_HOST_GRADS, u, s);
            graph_access(g, ACCESS_UPDATE, BUF_HOST_PARAMS, u, s);
        }
    }
    assert_int_equal(graph_link(g, true, &err), STATUS_OK);
}

static double seconds_of(const struct op *op, size_t slices)
{
    double ms = op->kind == CALL_FORWARD ? 3 : op->kind == CALL_RECOMPUTE ? 2.8 : 0.4;
    ms = op->kind == CALL_BACKWARD ? 6 : op->kind == CALL_HEAD ? 8 : ms;
    ms = op->kind == OP_FETCH || op->kind == OP_GRAD_OUT ? 4.5 / (double)slices : ms;
    ms = op->kind == OP_HOST_ADAM ? 9 / (double)slices : ms;
    return 1e-3 * ms * (0.9 + 0.2 * rng_unit(&rng));
}

// Every lane in program order. Zero-length operations now and then.
static struct timing *schedule(const struct graph *g, size_t steps, size_t slices)
{
    struct timing *t = test_alloc(steps * g->n_ops, sizeof *t);
    double lane_end[LANES] = {100, 100, 100, 100};
    for (size_t i = 0; i < steps * g->n_ops; i++) {
        t[i] = (struct timing){.start = 100, .cause = TIMING_NONE};
    }
    for (size_t at = 0; at < steps * g->n_ops; at++) {
        size_t op = at % g->n_ops, lane = g->ops[op].lane;
        double seconds = rng_below(&rng, 50) ? seconds_of(g->ops + op, slices) : 0;
        t[at].start = fmax(t[at].start, lane_end[lane]);
        t[at].end = lane_end[lane] = t[at].start + seconds;
        for (uint32_t e = g->first_edge[op]; e < g->first_edge[op + 1]; e++) {
            size_t to = at - op + g->edges[e].to + g->edges[e].next * g->n_ops;
            if (to < steps * g->n_ops && t[to].start <= t[at].end) {
                t[to].start = t[at].end;
                t[to].cause = (uint32_t)at;
            }
        }
    }
    return t;
}

// ---- the trace ----------------------------------------------------------------------------------

static json_t *load(const char *path)
{
    json_error_t err;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &err);
    if (!root) {
        fail_msg("%s:%d: %s", path, err.line, err.text);
    }
    return root;
}

static double number(const json_t *event, const char *name)
{
    const json_t *value = json_object_get(event, name);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static const char *phase_of(const json_t *event)
{
    const char *phase = json_string_value(json_object_get(event, "ph"));
    assert_non_null(phase);
    return phase;
}

// Slices of one process, in the order of the file: that of steps and operations.
static void check_slices(const json_t *events, size_t pid, const struct schedule *s)
{
    const json_t *event;
    size_t i, at = 0;
    json_array_foreach(events, i, event)
    {
        if (strcmp(phase_of(event), "X") || number(event, "pid") != (double)pid) {
            continue;
        }
        const struct op *op = s->graph->ops + at % s->graph->n_ops;
        const json_t *args = json_object_get(event, "args");
        assert_in_range(at, 0, s->steps * s->graph->n_ops - 1);
        assert_float_equal(number(event, "ts"), 1e6 * (s->timings[at].start - s->timings[0].start),
                           2e-3);
        assert_float_equal(number(event, "dur"), 1e6 * (s->timings[at].end - s->timings[at].start),
                           2e-3);
        assert_true(number(event, "tid") == 1 + op->lane);
        assert_true(number(args, "unit") == op->unit && number(args, "slice") == op->slice);
        assert_true(number(args, "micro") == op->micro);
        assert_true(number(args, "step") == (double)(s->first_step + at / s->graph->n_ops));
        at++;
    }
    assert_int_equal(at, s->steps * s->graph->n_ops);
}

// The slice of a process and lane that holds the moment; also at its end, if it is that of a tail.
static bool inside_slice(const json_t *events, const json_t *arrow)
{
    const json_t *event;
    size_t i;
    double ts = number(arrow, "ts");
    json_array_foreach(events, i, event)
    {
        if (!strcmp(phase_of(event), "X") && number(event, "pid") == number(arrow, "pid") &&
            number(event, "tid") == number(arrow, "tid") && ts > number(event, "ts") - 1e-4 &&
            ts < number(event, "ts") + number(event, "dur") + 1e-4) {
            return true;
        }
    }
    return false;
}

static size_t joins(const struct graph *g, size_t steps)
{
    size_t n = 0;
    for (size_t e = 0; e < g->n_edges; e++) {
        if (g->ops[g->edges[e].from].lane != g->ops[g->edges[e].to].lane) {
            n += g->edges[e].next ? steps - 1 : steps;
        }
    }
    return n;
}

static void check_arrows(const json_t *events, size_t expected)
{
    const json_t *event;
    size_t i, tails = 0, heads = 0;
    const json_t **tail = test_alloc(expected, sizeof *tail);
    json_array_foreach(events, i, event)
    {
        const char *phase = phase_of(event);
        if (!strcmp(phase, "s")) {
            size_t id = (size_t)number(event, "id");
            assert_true(id < expected && !tail[id]);
            tail[id] = event;
            tails++;
        } else if (!strcmp(phase, "f")) {
            size_t id = (size_t)number(event, "id");
            assert_true(id < expected && tail[id]);
            assert_true(number(tail[id], "ts") <= number(event, "ts"));
            assert_true(number(tail[id], "pid") == number(event, "pid"));
            assert_true(number(tail[id], "tid") != number(event, "tid"));
            assert_string_equal(json_string_value(json_object_get(event, "bp")), "e");
            if (rng_below(&rng, 20) == 0) { // each takes a while
                assert_true(inside_slice(events, tail[id]) && inside_slice(events, event));
            }
            heads++;
        }
    }
    free(tail);
    assert_int_equal(tails, expected);
    assert_int_equal(heads, expected);
}

static void every_operation_and_every_join_is_in_the_trace(void **state)
{
    struct graph g = {0};
    struct error err;
    (void)state;
    build(&g, 5, 3, 2);
    struct timing *predicted = schedule(&g, 3, 3), *measured = schedule(&g, 4, 3);
    struct schedule s[] = {{"predicted \"<&>\" \x01", &g, predicted, 3, 0, 0},
                           {"measured", &g, measured, 4, 4000000000000, 0}};
    const char *path = scratch("trace.json");
    assert_int_equal(trace_write(path, s, 2, &err), STATUS_OK);
    json_t *root = load(path), *events = json_object_get(root, "traceEvents");
    check_slices(events, 1, s);
    check_slices(events, 2, s + 1);
    check_arrows(events, joins(&g, 3) + joins(&g, 4));
    json_decref(root);
    free(predicted);
    free(measured);
    graph_free(&g);
}

// Two ranks and a prediction: the ranks' times are on one axis, that of the first to begin.
static void schedules_of_one_clock_have_one_axis(void **state)
{
    struct graph g = {0};
    struct error err;
    (void)state;
    build(&g, 2, 1, 1);
    double first[] = {0, 0.25 + rng_unit(&rng), 0}, least[3] = {INFINITY, INFINITY, INFINITY};
    struct timing *t[3];
    struct schedule s[3];
    size_t i;
    for (i = 0; i < 3; i++) {
        t[i] = schedule(&g, 2, 1);
        s[i] = (struct schedule){"rank", &g, t[i], 2, 0, i > 0};
    }
    for (i = 0; i < 2 * g.n_ops; i++) {
        t[1][i].start += first[1];
        t[1][i].end += first[1];
    }
    assert_int_equal(trace_write(scratch("trace.json"), s, 3, &err), STATUS_OK);
    json_t *root = load(scratch("trace.json")), *event;
    json_array_foreach(json_object_get(root, "traceEvents"), i, event)
    {
        if (!strcmp(phase_of(event), "X")) {
            double *x = least + (size_t)number(event, "pid") - 1;
            *x = fmin(*x, number(event, "ts"));
        }
    }
    for (i = 0; i < 3; i++) {
        assert_float_equal(least[i], 1e6 * first[i], 2e-3);
        free(t[i]);
    }
    json_decref(root);
    graph_free(&g);
}

// Barriers of two ranks: each enters when it likes and leaves some time after the last one has
// entered.
static void the_offset_of_a_clock_is_found_from_barriers(void **state)
{
    enum { N = 8 };
    (void)state;
    for (size_t round = 0; round < 1000; round++) {
        struct clock_reading mine[N], theirs[N];
        double offset = round % 2 ? 1e5 * (rng_unit(&rng) - 0.5) : 0, now = 0, shortest = 1;
        for (size_t i = 0; i < N; i++) {
            double a = now + 1e-3 * rng_unit(&rng), b = now + 1e-3 * rng_unit(&rng);
            double last = fmax(a, b);
            now = last + 1e-3;
            mine[i] = (struct clock_reading){a, last + 1e-4 * rng_unit(&rng)};
            theirs[i] = (struct clock_reading){b - offset, last + 1e-4 * rng_unit(&rng) - offset};
            shortest = fmin(shortest, fmax(mine[i].behind - a, theirs[i].behind + offset - b));
        }
        double found = clock_offset(mine, theirs, N);
        assert_true(fabs(found - offset) <= shortest + 1e-9);
        assert_true(offset != 0 || found == 0);
    }
}

static void a_trace_names_its_schedules_and_lanes(void **state)
{
    struct graph g = {0};
    struct error err;
    const char *title = "predicted \"<&>\" \x01";
    (void)state;
    struct schedule s = {title, &g, NULL, 0, 0, 0};
    assert_int_equal(trace_write(scratch("trace.json"), &s, 1, &err), STATUS_OK);
    json_t *root = load(scratch("trace.json")), *event;
    size_t i, lanes = 0, titles = 0;
    json_array_foreach(json_object_get(root, "traceEvents"), i, event)
    {
        const char *what = json_string_value(json_object_get(event, "name"));
        const char *name =
            json_string_value(json_object_get(json_object_get(event, "args"), "name"));
        if (!strcmp(what, "process_name")) {
            assert_string_equal(name, title);
            titles++;
        } else if (!strcmp(what, "thread_name")) {
            assert_string_equal(name, lane_name((enum lane)lanes));
            assert_true(number(event, "tid") == (double)++lanes);
        }
    }
    assert_int_equal(titles, 1);
    assert_int_equal(lanes, LANE_COMM); // there are no other ranks
    json_decref(root);
}

// ---- the timeline -------------------------------------------------------------------------------

// Tags balance, attributes are quoted, no stray < or &, nothing behind the root. `count`: how often
// the element occurs.
static void check_xml(const char *text, const char *element, size_t *count)
{
    char open[64][16];
    size_t depth = 0, roots = 0;
    *count = 0;
    for (const char *p = text; *p;) {
        if (*p == '&') {
            assert_true(!strncmp(p, "&lt;", 4) || !strncmp(p, "&amp;", 5));
        }
        if (*p != '<') {
            assert_true((unsigned char)*p >= ' ' || *p == '\n');
            assert_true(depth || *p == '\n');
            p++;
            continue;
        }
        bool closes = p[1] == '/';
        char name[16] = "";
        assert_int_equal(sscanf(p + 1 + closes, "%15[a-zA-Z]", name), 1);
        const char *end = p;
        for (bool quoted = false; *end && (quoted || *end != '>'); end++) {
            assert_false(end > p && *end == '<');
            quoted = quoted != (*end == '"');
        }
        assert_int_equal(*end, '>');
        *count += !closes && !strcmp(name, element);
        if (closes) {
            assert_true(depth > 0);
            assert_string_equal(open[--depth], name);
        } else if (end[-1] != '/') {
            roots += depth == 0;
            assert_true(depth < 64);
            strcpy(open[depth++], name);
        }
        p = end + 1;
    }
    assert_int_equal(depth, 0);
    assert_int_equal(roots, 1);
}

static char *draw(const struct schedule *s, size_t n, size_t *bytes, size_t *rects)
{
    struct error err;
    assert_int_equal(timeline_write(scratch("timeline.svg"), s, n, &err), STATUS_OK);
    char *text = scratch_read("timeline.svg", bytes);
    check_xml(text, "rect", rects);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    return text;
}

static size_t occurrences(const char *text, const char *what)
{
    size_t n = 0;
    for (const char *p = text; (p = strstr(p, what)); p++) {
        n++;
    }
    return n;
}

static void the_timeline_shows_every_lane_and_operation(void **state)
{
    struct graph g = {0};
    size_t bytes, rects;
    (void)state;
    build(&g, 4, 2, 1);
    struct timing *t = schedule(&g, 5, 2);
    struct schedule s[] = {{"predicted <1> & more", &g, t, 5, 10, 0},
                           {"measured", &g, t, 5, 10, 0}};
    char *text = draw(s, 2, &bytes, &rects);
    for (int lane = 0; lane < LANE_COMM; lane++) {
        char row[32];
        snprintf(row, sizeof row, ">%s</text>", lane_name((enum lane)lane));
        assert_int_equal(occurrences(text, row), 2);
    }
    assert_non_null(strstr(text, ">predicted &lt;1> &amp; more: "));
    assert_non_null(strstr(text, ">measured: "));
    assert_int_equal(occurrences(text, ">step 12<"), 2); // the third of five is the steady one
    // 4 units are wide enough for a rectangle each; neighbours add some.
    for (unsigned u = 1; u <= 4; u++) {
        char title[64];
        snprintf(title, sizeof title, "<title>%s %u, ", op_name(CALL_BACKWARD), u);
        assert_in_range(occurrences(text, title), 2, 6);
        snprintf(title, sizeof title, "<title>%s %u, ", op_name(OP_HOST_ADAM), u);
        assert_in_range(occurrences(text, title), 2, 12);
    }
    assert_non_null(strstr(text, "<title>idle "));
    assert_non_null(strstr(text, ", waits for "));
    assert_null(strstr(text, "<script"));
    free(text);
    free(t);
    graph_free(&g);
}

// Rectangles of compute in the steady step cover what the busy share says.
static void the_busy_share_is_that_of_the_schedule(void **state)
{
    struct graph g = {0};
    struct error err;
    size_t bytes, rects;
    (void)state;
    graph_add(&g, CALL_FORWARD, LANE_COMPUTE, 1, 0);
    graph_add(&g, OP_HOST_ADAM, LANE_HOST, 1, 0);
    assert_int_equal(graph_link(&g, true, &err), STATUS_OK);
    struct timing t[] = {{0, 3, TIMING_NONE},   {3, 4, 0}, {10, 13, TIMING_NONE}, {3, 16, 2},
                         {20, 23, TIMING_NONE}, {9, 9, 4}};
    struct schedule s = {"steps of 10 s", &g, t, 3, 0, 0};
    char *text = draw(&s, 1, &bytes, &rects);
    assert_non_null(strstr(text, "steps of 10 s: 10000.0 ms a step"));
    assert_int_equal(occurrences(text, ">30%</text>"), 1); // compute
    assert_int_equal(occurrences(text, ">60%</text>"), 1); // host: from 10 to 16
    assert_int_equal(occurrences(text, ">0%</text>"), 2);
    assert_int_equal(occurrences(text, "<title>idle 7000 ms"), 2);
    free(text);
    graph_free(&g);
}

static void the_timeline_of_a_large_model_stays_small(void **state)
{
    struct graph g = {0};
    size_t bytes, rects;
    (void)state;
    build(&g, 96, 4, 8);
    struct timing *t = schedule(&g, 4, 4);
    struct schedule s[] = {{"predicted", &g, t, 4, 0, 0}, {"measured", &g, t, 4, 0, 0}};
    char *text = draw(s, 2, &bytes, &rects);
    assert_in_range(bytes, 10000, 1000000);
    free(text);
    free(t);
    graph_free(&g);
}

// ---- numbers that no schedule should have -------------------------------------------------------

static double hostile(void)
{
    static const double some[] = {0,    -1,     1e300, -1e300,   1e-300,    1e-9,
                                  1e18, 5e-324, NAN,   INFINITY, -INFINITY, 100};
    return some[rng_below(&rng, sizeof some / sizeof *some)] *
           (rng_below(&rng, 2) ? 1 : rng_unit(&rng));
}

static void hostile_times_give_valid_files(void **state)
{
    struct graph g = {0};
    struct error err;
    (void)state;
    build(&g, 2, 2, 1);
    for (int round = 0; round < 300; round++) {
        size_t steps = 1 + rng_below(&rng, 4);
        struct timing *t = schedule(&g, steps, 2);
        for (size_t i = rng_below(&rng, 2 * steps * g.n_ops); i > 0; i--) {
            struct timing *one = t + rng_below(&rng, steps * g.n_ops);
            *one = (struct timing){hostile(), hostile(), (uint32_t)rng_bits(&rng)};
        }
        struct schedule s = {"odd", &g, t, steps, (uint64_t)1 << 62, 0};
        size_t bytes, count;
        assert_int_equal(trace_write(scratch("odd.json"), &s, 1, &err), STATUS_OK);
        json_decref(load(scratch("odd.json")));
        assert_int_equal(timeline_write(scratch("odd.svg"), &s, 1, &err), STATUS_OK);
        char *text = scratch_read("odd.svg", &bytes);
        check_xml(text, "rect", &count);
        free(text);
        free(t);
    }
    graph_free(&g);
}

static void empty_and_short_schedules_give_valid_files(void **state)
{
    struct graph empty = {0}, g = {0};
    struct error err;
    size_t bytes, rects;
    (void)state;
    build(&g, 1, 1, 1);
    assert_int_equal(graph_link(&empty, true, &err), STATUS_OK);
    struct timing *t = schedule(&g, 2, 1), *zero = test_alloc(2 * g.n_ops, sizeof *zero);
    struct schedule s[] = {{"no operations", &empty, t, 2, 0, 0},
                           {"no steps", &g, t, 0, 0, 0},
                           {"one step", &g, t, 1, 0, 0},
                           {"two steps", &g, t, 2, 0, 0},
                           {"no time", &g, zero, 2, 0, 0}};
    for (size_t first = 0; first < 5; first++) {
        for (size_t n = 0; first + n <= 5; n++) {
            free(draw(s + first, n, &bytes, &rects));
            assert_int_equal(trace_write(scratch("trace.json"), s + first, n, &err), STATUS_OK);
            json_decref(load(scratch("trace.json")));
        }
    }
    free(t);
    free(zero);
    graph_free(&empty);
    graph_free(&g);
}

static void a_folder_that_is_not_there_is_an_error(void **state)
{
    struct graph g = {0};
    struct error err = {0};
    (void)state;
    struct schedule s = {"one", &g, NULL, 0, 0, 0};
    assert_int_equal(trace_write(scratch("no/such/folder.json"), &s, 1, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "no/such"));
    assert_int_equal(timeline_write(scratch("no/such/folder.svg"), &s, 1, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "no/such"));
}

int main(void)
{
    rng = test_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_and_every_join_is_in_the_trace),
        cmocka_unit_test(schedules_of_one_clock_have_one_axis),
        cmocka_unit_test(the_offset_of_a_clock_is_found_from_barriers),
        cmocka_unit_test(a_trace_names_its_schedules_and_lanes),
        cmocka_unit_test(the_timeline_shows_every_lane_and_operation),
        cmocka_unit_test(the_busy_share_is_that_of_the_schedule),
        cmocka_unit_test(the_timeline_of_a_large_model_stays_small),
        cmocka_unit_test(hostile_times_give_valid_files),
        cmocka_unit_test(empty_and_short_schedules_give_valid_files),
        cmocka_unit_test(a_folder_that_is_not_there_is_an_error),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
