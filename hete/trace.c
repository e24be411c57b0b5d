// trace.c - schedules as events (JSON) and as rectangles (SVG).
#include "hete/trace.h"
#include "data/files.h"
#include "data/svg.h"
#include "hete/step.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- times --------------------------------------------------------------------------------------

// Times of operation `at` (step * n_ops + op), end not before start; false: it has none.
static bool times_of(const struct schedule *s, size_t at, double *start, double *end)
{
    const struct timing *t = s->timings + at;
    *start = t->start;
    *end = fmax(t->start, t->end);
    return isfinite(t->start) && isfinite(t->end);
}

static size_t total_of(const struct schedule *s)
{
    return s->steps * s->graph->n_ops;
}

static const char *label(char out[64], const struct op *op)
{
    if (op_has_unit(op->kind)) {
        snprintf(out, 64, "%.40s %u", op_name(op->kind), op->unit);
    } else {
        snprintf(out, 64, "%.40s", op_name(op->kind));
    }
    return out;
}

// ---- Chrome's format ----------------------------------------------------------------------------

struct trace {
    FILE *out;
    const struct schedule *s;
    size_t pid;
    double zero; // the moment that is 0
    uint64_t arrows;
};

// The earliest start of a schedule, and of those that share its clock.
static double zero_of(const struct schedule *schedules, size_t n, size_t which)
{
    double zero = INFINITY, start, end;
    for (size_t i = 0; i < n; i++) {
        const struct schedule *s = schedules + i;
        bool counts = i == which || (s->clock != 0 && s->clock == schedules[which].clock);
        for (size_t at = 0; counts && at < total_of(s); at++) {
            if (times_of(s, at, &start, &end)) {
                zero = fmin(zero, start);
            }
        }
    }
    return zero;
}

// Nanoseconds as microseconds with decimals: whole numbers inside, so that order survives printing.
static int64_t ns_of(const struct trace *t, double seconds)
{
    return (int64_t)llround(fmin(1e9 * (seconds - t->zero), 9e17));
}

static void put_us(const struct trace *t, const char *name, int64_t ns)
{
    fprintf(t->out, "\"%s\":%lld.%03lld,", name, (long long)(ns / 1000), (long long)(ns % 1000));
}

static size_t lanes_of(const struct schedule *s)
{
    for (size_t i = 0; i < s->graph->n_ops; i++) {
        if (s->graph->ops[i].lane == LANE_COMM) {
            return LANES;
        }
    }
    return LANE_COMM; // with a single rank there is nothing to be seen
}

static void put_begin(const struct trace *t, const char *phase, size_t lane)
{
    fprintf(t->out, ",\n{\"ph\":\"%s\",\"pid\":%zu,\"tid\":%zu,", phase, t->pid, lane + 1);
}

static void put_names(const struct trace *t)
{
    json_t *string = json_string(t->s->title);
    char *title = json_dumps(string, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
    put_begin(t, "M", 0);
    fprintf(t->out, "\"name\":\"process_name\",\"args\":{\"name\":%s}}", title ? title : "\"\"");
    free(title);
    json_decref(string);
    put_begin(t, "M", 0);
    fprintf(t->out, "\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%zu}}", t->pid);
    for (size_t lane = 0; lane < lanes_of(t->s); lane++) {
        put_begin(t, "M", lane);
        fprintf(t->out, "\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}",
                lane_name((enum lane)lane));
        put_begin(t, "M", lane);
        fprintf(t->out, "\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%zu}}", lane);
    }
}

static void put_op(const struct trace *t, size_t at)
{
    const struct op *op = t->s->graph->ops + at % t->s->graph->n_ops;
    double start, end;
    char name[64];
    if (!times_of(t->s, at, &start, &end)) {
        return;
    }
    put_begin(t, "X", op->lane);
    put_us(t, "ts", ns_of(t, start));
    put_us(t, "dur", ns_of(t, end) - ns_of(t, start));
    fprintf(t->out, "\"name\":\"%s\",\"args\":{\"unit\":%u,\"micro\":%u,", label(name, op),
            op->unit, op->micro);
    fprintf(t->out, "\"slice\":%u,\"step\":%llu}}", op->slice,
            (unsigned long long)(t->s->first_step + at / t->s->graph->n_ops));
}

static void put_arrow_end(const struct trace *t, bool head, size_t lane, int64_t ns)
{
    put_begin(t, head ? "f" : "s", lane);
    put_us(t, "ts", ns);
    fprintf(t->out, "\"id\":%llu,%s\"cat\":\"waits\",\"name\":\"waits\"}",
            (unsigned long long)t->arrows, head ? "\"bp\":\"e\"," : "");
}

// Within a lane the order shows what waits. An arrow cannot point back in time, and its tail must
// lie inside the slice that it leaves.
static void put_arrow(struct trace *t, const struct edge *e, size_t step)
{
    const struct graph *g = t->s->graph;
    size_t from_lane = g->ops[e->from].lane, to_lane = g->ops[e->to].lane;
    double start, end, to_start, to_end;
    if (from_lane == to_lane || step + e->next >= t->s->steps ||
        !times_of(t->s, step * g->n_ops + e->from, &start, &end) ||
        !times_of(t->s, (step + e->next) * g->n_ops + e->to, &to_start, &to_end) ||
        to_start < end) {
        return;
    }
    int64_t tail = ns_of(t, end);
    put_arrow_end(t, false, from_lane, tail > ns_of(t, start) ? tail - 1 : tail);
    put_arrow_end(t, true, to_lane, ns_of(t, to_start));
    t->arrows++;
}

static void put_schedule(struct trace *t)
{
    const struct graph *g = t->s->graph;
    put_names(t);
    for (size_t at = 0; at < total_of(t->s); at++) {
        put_op(t, at);
    }
    for (size_t step = 0; step < t->s->steps; step++) {
        for (size_t e = 0; e < g->n_edges; e++) {
            put_arrow(t, g->edges + e, step);
        }
    }
}

int trace_write(const char *path, const struct schedule *schedules, size_t n, struct error *err)
{
    char *text = NULL;
    size_t bytes = 0;
    struct trace t = {.out = open_memstream(&text, &bytes)};
    if (t.out) {
        // The first event is there so that every other one can begin with a comma.
        fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
              "{\"ph\":\"M\",\"pid\":1,\"name\":\"process_labels\",\"args\":{\"labels\":\"\"}}",
              t.out);
    }
    for (size_t i = 0; t.out && i < n; i++) {
        t.s = schedules + i;
        t.pid = i + 1;
        t.zero = zero_of(schedules, n, i);
        put_schedule(&t);
    }
    bool failed = !t.out || fputs("\n]}\n", t.out) < 0;
    failed = (t.out && fclose(t.out) != 0) || failed; // a full memory shows at the latest here
    int status = failed ? error_set(err, STATUS_FAIL, "trace %s: no memory for its events", path)
                        : file_replace(path, text, bytes, err);
    free(text);
    return status;
}

// ---- the picture: colours -----------------------------------------------------------------------

enum family {
    FORWARD,
    RECOMPUTE,
    HEAD,
    BACKWARD,
    FETCH,
    GRAD_OUT,
    EXCHANGE,
    ADAM,
    NORM,
    TOKENS,
    FAMILIES
};

struct rgb {
    double r, g, b;
};

static const struct {
    const char *name;
    struct rgb light, dark; // of the first and of the last unit
} look[FAMILIES] = {
    [FORWARD] = {"forward", {158, 196, 232}, {43, 98, 164}},
    [RECOMPUTE] = {"recompute", {205, 192, 232}, {108, 80, 168}},
    [HEAD] = {"head", {62, 150, 150}, {62, 150, 150}},
    [BACKWARD] = {"backward", {243, 187, 160}, {190, 80, 46}},
    [FETCH] = {"parameters in", {170, 217, 168}, {52, 130, 66}},
    [GRAD_OUT] = {"gradients out", {233, 182, 208}, {168, 66, 118}},
    [EXCHANGE] = {"between ranks", {176, 214, 220}, {48, 120, 134}},
    [ADAM] = {"Adam", {246, 220, 146}, {204, 152, 24}},
    [NORM] = {"norm, clip, sums", {190, 184, 172}, {112, 106, 94}},
    [TOKENS] = {"tokens, losses", {140, 150, 162}, {140, 150, 162}},
};

static enum family family_of(const struct op *op)
{
    if (op->lane == LANE_COMM) {
        return EXCHANGE;
    }
    switch (op->kind) {
    case CALL_RECOMPUTE:
        return RECOMPUTE;
    case CALL_HEAD:
    case CALL_LOSS:
    case CALL_LOGITS:
        return HEAD;
    case CALL_BACKWARD:
    case CALL_ENCODE_BACKWARD:
        return BACKWARD;
    case OP_FETCH:
        return FETCH;
    case OP_GRAD_OUT:
        return GRAD_OUT;
    case OP_ADAM:
    case OP_HOST_ADAM:
        return ADAM;
    case OP_ACCUMULATE:
    case OP_NORM:
    case OP_CLIP:
    case OP_HOST_ACCUMULATE:
    case OP_HOST_NORM:
    case OP_BARRIER:
    case OP_BEGIN:
        return NORM;
    case OP_TOKENS_IN:
    case OP_LOSSES_OUT:
        return TOKENS;
    default:
        return FORWARD;
    }
}

static struct rgb mix(struct rgb x, struct rgb y, double share)
{
    return (struct rgb){x.r + share * (y.r - x.r), x.g + share * (y.g - x.g),
                        x.b + share * (y.b - x.b)};
}

static unsigned hex(struct rgb c)
{
    return (unsigned)(c.r + 0.5) << 16 | (unsigned)(c.g + 0.5) << 8 | (unsigned)(c.b + 0.5);
}

static bool is_dark(struct rgb c)
{
    return 0.3 * c.r + 0.59 * c.g + 0.11 * c.b < 140;
}

// ---- the picture: what is seen of a schedule ----------------------------------------------------

enum {
    WIDTH = 1280,
    LEFT = 84,
    RIGHT = 1212,
    TOP = 84,
    PANEL_HEAD = 46, // title and step numbers
    ROW = 30,
    ROW_GAP = 5,
    PANEL_FOOT = 14,
    AXIS = 44,
};

static int panel_height(const struct schedule *s)
{
    return PANEL_HEAD + (int)lanes_of(s) * (ROW + ROW_GAP) + PANEL_FOOT;
}

// Of a step's length, to both sides of the step.
#define NEIGHBOUR 0.22

struct item {
    double start, end;
    size_t at; // step * n_ops + op
};

struct panel {
    struct svg *svg;
    const struct schedule *s;
    struct item *items; // those that can be seen, by lane and start
    size_t first[LANES + 1], n;
    size_t step;     // the steady one, counted from 0
    double from, to; // when it begins and ends
    double px_per_s;
    int y;
    unsigned units; // the last one
};

// When a step's compute begins. An operation of another lane, if it has none.
static double step_begin(const struct schedule *s, size_t step)
{
    double first = INFINITY, start, end;
    for (int pass = 0; pass < 2 && !isfinite(first); pass++) {
        for (size_t i = 0; i < s->graph->n_ops; i++) {
            if ((pass || s->graph->ops[i].lane == LANE_COMPUTE) &&
                times_of(s, step * s->graph->n_ops + i, &start, &end)) {
                first = fmin(first, start);
            }
        }
    }
    return first;
}

static double step_end(const struct schedule *s, size_t step)
{
    double last = -INFINITY, start, end;
    if (step + 1 < s->steps) {
        return step_begin(s, step + 1);
    }
    for (size_t i = 0; i < s->graph->n_ops; i++) {
        if (times_of(s, step * s->graph->n_ops + i, &start, &end)) {
            last = fmax(last, end);
        }
    }
    return last;
}

// The one in the middle: neither the first, which finds the lanes empty, nor the last, if it can
// be.
static void choose_step(struct panel *p)
{
    size_t steps = p->s->steps, last = steps > 2 ? steps - 2 : 0;
    p->step = steps / 2 < last ? steps / 2 : last;
    p->from = steps ? step_begin(p->s, p->step) : NAN;
    p->to = steps ? step_end(p->s, p->step) : NAN;
    if (!isfinite(p->from) || !isfinite(p->to) || p->to < p->from) {
        p->from = p->to = 0;
    }
}

static double x_of(const struct panel *p, double time)
{
    double margin = (RIGHT - LEFT) * NEIGHBOUR / (1 + 2 * NEIGHBOUR);
    return fmin(fmax(LEFT + margin + (time - p->from) * p->px_per_s, LEFT), RIGHT);
}

static double row_y(const struct panel *p, size_t lane)
{
    return p->y + PANEL_HEAD + (double)lane * (ROW + ROW_GAP);
}

static const struct op *op_of(const struct panel *p, size_t at)
{
    return p->s->graph->ops + at % p->s->graph->n_ops;
}

static int by_start(const void *x, const void *y)
{
    const struct item *a = x, *b = y;
    return a->start != b->start ? (a->start < b->start ? -1 : 1)
                                : (a->at > b->at) - (a->at < b->at);
}

// Of the whole schedule, by lane; also those outside the picture, whose ends bound idle times.
static bool collect(struct panel *p)
{
    p->items = malloc((total_of(p->s) + 1) * sizeof *p->items);
    for (size_t lane = 0; p->items && lane < LANES; lane++) {
        p->first[lane] = p->n;
        for (size_t at = 0; at < total_of(p->s); at++) {
            struct item item = {.at = at};
            const struct op *op = op_of(p, at);
            p->units = op->unit > p->units ? op->unit : p->units;
            if (op->lane == lane && times_of(p->s, at, &item.start, &item.end)) {
                p->items[p->n++] = item;
            }
        }
        qsort(p->items + p->first[lane], p->n - p->first[lane], sizeof *p->items, by_start);
    }
    p->first[LANES] = p->n;
    return p->items;
}

// ---- the picture: rows --------------------------------------------------------------------------

// Operations that are drawn as one rectangle: one, or several that are too small to be told apart.
struct run {
    double x, end;
    double px[FAMILIES], unit_px; // what each family covers; sum of unit numbers, so weighted
    double seconds;
    size_t n, at; // at: the first one
    bool visible;
};

static void draw_run(const struct panel *p, const struct run *r)
{
    double width = fmax(r->end - r->x, 0.3), covered = 0;
    size_t family = 0;
    char name[64];
    if (r->n == 0) {
        return;
    }
    for (size_t i = 0; i < FAMILIES; i++) {
        covered += r->px[i];
        family = r->px[i] > r->px[family] ? i : family;
    }
    const struct op *op = op_of(p, r->at);
    double unit = covered > 0 ? r->unit_px / covered : op->unit;
    struct rgb color = mix(look[family].light, look[family].dark, p->units ? unit / p->units : 0);
    // Small operations with gaps between them are as pale as they are sparse.
    color = mix((struct rgb){255, 255, 255}, color, fmin(covered / width, 1));
    svg_put(p->svg, "<rect x=\"%.1f\" width=\"%.1f\" height=\"%d\" fill=\"#%06x\"><title>", r->x,
            width, ROW, hex(color));
    if (r->n == 1) {
        svg_put(p->svg, "%s, ", label(name, op));
    } else {
        svg_put(p->svg, "%zu operations from %s on, ", r->n, label(name, op));
    }
    svg_put(p->svg, "%.4g ms</title></rect>\n", 1e3 * r->seconds);
    int digits = snprintf(name, sizeof name, "%u", op->unit);
    if (r->n == 1 && op->slice == 0 && op_has_unit(op->kind) && width > 6.5 * digits + 3) {
        svg_put(p->svg, "<text class=\"u\" x=\"%.1f\" y=\"19\" fill=\"%s\">%s</text>\n",
                r->x + width / 2, is_dark(color) ? "#fff" : "#333", name);
    }
}

// Joins what is below a pixel, until a pixel is full.
static void draw_items(const struct panel *p, size_t lane)
{
    struct run run = {0};
    for (size_t i = p->first[lane]; i < p->first[lane + 1]; i++) {
        const struct item *item = p->items + i;
        const struct op *op = op_of(p, item->at);
        double x = x_of(p, item->start), end = x_of(p, item->end), px = end - x;
        if (item->end <= item->start || end <= LEFT || x >= RIGHT) {
            continue;
        }
        if (run.n == 0 || px >= 1 || run.end - run.x >= 1 || x - run.end > 0.5) {
            draw_run(p, &run);
            run = (struct run){.x = x, .end = end, .at = item->at};
        }
        run.n++;
        run.seconds += item->end - item->start;
        run.px[family_of(op)] += px;
        run.unit_px += px * op->unit;
        run.end = fmax(run.end, end);
    }
    draw_run(p, &run);
}

static void draw_idle(const struct panel *p)
{
    char name[64];
    double busy_until = NAN;
    for (size_t i = p->first[LANE_COMPUTE]; i < p->first[LANE_COMPUTE + 1]; i++) {
        const struct item *item = p->items + i;
        double x = x_of(p, busy_until), end = x_of(p, item->start);
        if (item->start > busy_until && end - x > 0.5) {
            uint32_t cause = p->s->timings[item->at].cause;
            svg_put(p->svg,
                    "<rect x=\"%.1f\" width=\"%.1f\" height=\"%d\" fill=\"url(#idle)\">"
                    "<title>idle %.4g ms",
                    x, end - x, ROW, 1e3 * (item->start - busy_until));
            if (cause < total_of(p->s)) {
                svg_put(p->svg, ", waits for %s", label(name, op_of(p, cause)));
            }
            svg_put(p->svg, "</title></rect>\n");
        }
        busy_until = fmax(busy_until, item->end);
    }
}

// Of the steady step's time, whichever step the operations belong to.
static double busy_share(const struct panel *p, size_t lane)
{
    double busy = 0;
    for (size_t i = p->first[lane]; i < p->first[lane + 1]; i++) {
        busy += fmax(fmin(p->items[i].end, p->to) - fmax(p->items[i].start, p->from), 0);
    }
    return p->to > p->from ? busy / (p->to - p->from) : 0;
}

static void draw_rows(const struct panel *p)
{
    for (size_t lane = 0; lane < lanes_of(p->s); lane++) {
        double y = row_y(p, lane);
        svg_put(p->svg,
                "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n"
                "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">%.0f%%</text>\n",
                LEFT - 10, y + 20, lane_name((enum lane)lane), WIDTH - 16, y + 20,
                fmin(100 * busy_share(p, lane), 100));
        svg_put(p->svg, "<path d=\"M%d %.1fH%d\" stroke=\"#dfe3e8\"/>\n", LEFT, y + ROW + 0.5,
                RIGHT);
        svg_put(p->svg, "<g transform=\"translate(0 %.0f)\">\n", y);
        if (lane == LANE_COMPUTE) {
            draw_idle(p);
        }
        draw_items(p, lane);
        svg_put(p->svg, "</g>\n");
    }
}

// ---- the picture: panels ------------------------------------------------------------------------

static void draw_borders(const struct panel *p)
{
    double top = p->y + 26, bottom = row_y(p, lanes_of(p->s)), before = -INFINITY;
    svg_put(p->svg, "<g fill=\"#fff\" fill-opacity=\"0.55\" pointer-events=\"none\">\n");
    svg_put(p->svg, "<rect x=\"%d\" y=\"%.0f\" width=\"%.1f\" height=\"%.0f\"/>\n", LEFT, top,
            x_of(p, p->from) - LEFT, bottom - top);
    svg_put(p->svg, "<rect x=\"%.1f\" y=\"%.0f\" width=\"%.1f\" height=\"%.0f\"/>\n</g>\n",
            x_of(p, p->to), top, RIGHT - x_of(p, p->to), bottom - top);
    for (size_t step = 0; step < p->s->steps; step++) {
        double begin = step_begin(p->s, step), x = x_of(p, begin);
        if (!isfinite(begin) || x <= LEFT || x >= RIGHT || x - before < 4) {
            continue;
        }
        svg_put(p->svg, "<path d=\"M%.1f %.0fV%.0f\" stroke=\"#3d4852\" stroke-width=\"1.2\"/>\n",
                x, top, bottom);
        if (x + 70 < RIGHT && x - before > 70) {
            svg_put(p->svg, "<text x=\"%.1f\" y=\"%.0f\" font-size=\"12\">step %llu</text>\n",
                    x + 5, top + 13, (unsigned long long)(p->s->first_step + step));
        }
        before = x;
    }
}

static void draw_panel(const struct panel *p)
{
    svg_put(p->svg, "<text x=\"%d\" y=\"%d\" font-size=\"15\" font-weight=\"bold\">", LEFT,
            p->y + 16);
    svg_put_text(p->svg, p->s->title);
    double ms = 1e3 * (p->to - p->from);
    svg_put(p->svg, ": %.*f ms a step</text>\n", ms >= 100 ? 1 : ms >= 1 ? 2 : 4, ms);
    svg_put(
        p->svg,
        "<text x=\"%d\" y=\"%d\" text-anchor=\"end\" font-size=\"12\" fill=\"#666\">busy</text>\n",
        WIDTH - 16, p->y + 39);
    svg_put(p->svg, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%.0f\" fill=\"#f3f6f9\"/>\n",
            x_of(p, p->from), p->y + 26, x_of(p, p->to) - x_of(p, p->from),
            row_y(p, lanes_of(p->s)) - p->y - 26);
    draw_rows(p);
    draw_borders(p);
}

static void draw_axis(struct svg *svg, double longest, const struct panel *any, int y)
{
    double tick = svg_tick(1e3 * longest * (1 + 2 * NEIGHBOUR), 12);
    svg_put(svg, "<g font-size=\"12\" fill=\"#444\" text-anchor=\"middle\">\n");
    for (double k = ceil(-1e3 * longest * NEIGHBOUR / tick);
         k * tick <= 1e3 * longest * (1 + NEIGHBOUR); k++) {
        double x = x_of(any, any->from + k * tick / 1e3);
        svg_put(svg, "<path d=\"M%.1f %dv5\" stroke=\"#444\"/>", x, y);
        svg_put(svg, "<text x=\"%.1f\" y=\"%d\">%.6g</text>\n", x, y + 19, k == 0 ? 0 : k * tick);
    }
    svg_put(svg, "<path d=\"M%d %dH%d\" stroke=\"#444\"/>\n", LEFT, y, RIGHT);
    svg_put(svg, "<text x=\"%d\" y=\"%d\">ms</text></g>\n", RIGHT + 26, y + 19);
}

static void draw_legend(struct svg *svg, const struct schedule *schedules, size_t n)
{
    bool seen[FAMILIES] = {false};
    double x = LEFT;
    for (size_t i = 0; i < n; i++) {
        for (size_t op = 0; op < schedules[i].graph->n_ops; op++) {
            seen[family_of(schedules[i].graph->ops + op)] = true;
        }
    }
    svg_put(svg, "<g font-size=\"12\">\n");
    for (size_t f = 0; f < FAMILIES; f++) {
        if (!seen[f]) {
            continue;
        }
        for (int shade = 0; shade < 3; shade++) {
            svg_put(svg, "<rect x=\"%.0f\" y=\"48\" width=\"8\" height=\"14\" fill=\"#%06x\"/>",
                    x + 8 * shade, hex(mix(look[f].light, look[f].dark, shade / 2.0)));
        }
        svg_put(svg, "<text x=\"%.0f\" y=\"60\">%s</text>\n", x + 30, look[f].name);
        x += 30 + 6.3 * (double)strlen(look[f].name) + 20;
    }
    svg_put(svg,
            "<rect x=\"%.0f\" y=\"48\" width=\"24\" height=\"14\" fill=\"url(#idle)\"/>"
            "<text x=\"%.0f\" y=\"60\">idle</text>\n</g>\n",
            x, x + 30);
}

static void draw_heading(struct svg *svg)
{
    svg_put(svg,
            "<style>.u{font-size:11px;text-anchor:middle;pointer-events:none}</style>\n"
            "<defs><pattern id=\"idle\" width=\"6\" height=\"6\" "
            "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
            "<rect width=\"6\" height=\"6\" fill=\"#fff\"/>"
            "<path d=\"M1.5 0V6\" stroke=\"#b9c0c8\" stroke-width=\"1.6\"/></pattern></defs>\n");
    svg_put(
        svg,
        "<g fill=\"#222\">\n<text x=\"%d\" y=\"28\" font-size=\"17\" font-weight=\"bold\">"
        "One steady step between its neighbours</text>\n<text x=\"%d\" y=\"28\" "
        "text-anchor=\"end\" font-size=\"12\" fill=\"#666\">numbers: units; light to dark: first "
        "to last unit</text>\n",
        LEFT, RIGHT);
}

int timeline_write(const char *path, const struct schedule *schedules, size_t n, struct error *err)
{
    struct svg svg;
    double longest = 1e-9; // anything shorter is no step
    int y = TOP;
    struct panel *panels = calloc(n + 1, sizeof *panels);
    bool failed = !panels;
    for (size_t i = 0; i < n && !failed; i++) {
        panels[i] = (struct panel){.svg = &svg, .s = schedules + i, .y = y};
        y += panel_height(schedules + i);
        choose_step(panels + i);
        longest = fmax(longest, panels[i].to - panels[i].from);
        failed = !collect(panels + i);
    }
    int status = failed ? error_set(err, STATUS_FAIL, "timeline %s: no memory for its panels", path)
                        : svg_open(&svg, path, WIDTH, y + AXIS, "A training step by lanes", err);
    if (!status) {
        draw_heading(&svg);
        draw_legend(&svg, schedules, n);
        for (size_t i = 0; i <= n; i++) { // the last one has no schedule, and lends its scale
            panels[i].px_per_s = (RIGHT - LEFT) / (longest * (1 + 2 * NEIGHBOUR));
            if (i < n) {
                draw_panel(panels + i);
            }
        }
        draw_axis(&svg, longest, panels + n, y);
        svg_put(&svg, "</g>\n");
        status = svg_close(&svg);
    }
    for (size_t i = 0; panels && i < n; i++) {
        free(panels[i].items);
    }
    free(panels);
    return status;
}
