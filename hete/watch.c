// watch.c - copies times out of a session before they are overwritten.
#include "hete/watch.h"
#include "hete/trace.h"
#include "kernels/clock.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int watch_open(struct watch *w, const struct prepared *prepared, const struct session *s,
               struct error *err)
{
    size_t n = session_graph(s)->n_ops * EXECUTE_KEPT_STEPS;
    *w = (struct watch){.prepared = prepared, .timings = malloc((n + 1) * sizeof *w->timings)};
    return w->timings ? STATUS_OK
                      : error_set(err, STATUS_FAIL, "no memory for the times of %zu operations", n);
}

void watch_close(struct watch *w)
{
    free(w->timings);
    free(w->others);
    *w = (struct watch){0};
}

void watch_keep(struct watch *w, struct session *s, uint64_t done)
{
    uint64_t first; // the session counts from its own first step
    if (session_measure(s, &w->measured)) {
        w->any = true;
        w->steps = session_timings(s, w->timings, EXECUTE_KEPT_STEPS, &first);
        w->first_step = done - w->steps;
    }
}

void watch_report(const struct watch *w, FILE *out)
{
    if (w->any) {
        report_measured(out, &w->prepared->prediction, &w->measured);
        double ratio = w->measured.times.period_s / w->prepared->prediction.step_s;
        if (w->prepared->measured && (ratio > 2 || ratio < 0.5)) {
            fputs("the prediction is far off: the costs were measured when this machine was busier "
                  "or idler than now\n",
                  out);
        }
    } else {
        fputs("no times yet: they take three steps without a validation or sample between them\n",
              out);
    }
}

// Steps of a picture: a steady one between its neighbours, and one to get there.
#define PICTURE_STEPS ((size_t)4)

static size_t drawn_steps(const struct watch *w)
{
    return w->steps < PICTURE_STEPS ? w->steps : PICTURE_STEPS;
}

static const struct timing *drawn_timings(const struct watch *w, const struct graph *g)
{
    return w->timings + (w->steps - drawn_steps(w)) * g->n_ops;
}

// ---- the other ranks ----------------------------------------------------------------------------

double clock_offset(const struct clock_reading *mine, const struct clock_reading *theirs, size_t n)
{
    double least = -INFINITY, most = INFINITY;
    for (size_t i = 0; i < n; i++) {
        least = fmax(least, mine[i].before - theirs[i].behind);
        most = fmin(most, mine[i].behind - theirs[i].before);
    }
    return least <= 0 && most >= 0 ? 0 : (least + most) / 2;
}

enum { READINGS = 8 };

static int read_clocks(struct clock_reading *all, struct comm *c, struct error *err)
{
    struct clock_reading mine[READINGS];
    for (size_t i = 0; i < READINGS; i++) {
        mine[i].before = clock_s();
        if (comm_barrier(c, err)) {
            return err->status;
        }
        mine[i].behind = clock_s();
    }
    return comm_all_gather(c, mine, all, sizeof mine, err);
}

// Rank `from`'s times, on rank 0 into its place in w->others.
static int fetch_times(struct watch *w, const struct graph *g, struct comm *c, size_t from,
                       double offset, struct error *err)
{
    size_t n = drawn_steps(w) * g->n_ops;
    struct timing *to = w->others + (comm_rank(c) == 0 ? from - 1 : 0) * n;
    if ((size_t)comm_rank(c) == from) {
        memcpy(to, drawn_timings(w, g), n * sizeof *to);
    }
    if (comm_broadcast(c, to, n * sizeof *to, (int)from, err)) {
        return err->status;
    }
    for (size_t i = 0; i < n; i++) {
        to[i].start += offset;
        to[i].end += offset;
    }
    return STATUS_OK;
}

int watch_gather(struct watch *w, const struct session *s, struct comm *c, struct error *err)
{
    const struct graph *g = session_graph(s);
    size_t all = (size_t)comm_ranks(c), n = drawn_steps(w) * g->n_ops;
    size_t ranks = all < WATCH_RANKS_MAX ? all : WATCH_RANKS_MAX;
    struct clock_reading *clocks = malloc(all * READINGS * sizeof *clocks);
    w->others = malloc(((comm_rank(c) == 0 ? ranks : 1) * n + 1) * sizeof *w->others);
    comm_doing(c, COMM_MAIN, "gathering times");
    int status = clocks && w->others
                     ? read_clocks(clocks, c, err)
                     : error_set(err, STATUS_FAIL, "no memory for the times of %zu ranks", ranks);
    for (size_t r = 1; status == STATUS_OK && r < ranks; r++) {
        double offset = clock_offset(clocks, clocks + r * READINGS, READINGS);
        status = fetch_times(w, g, c, r, offset, err);
    }
    free(clocks);
    w->ranks = ranks;
    return status;
}

// ---- pictures -----------------------------------------------------------------------------------

// This rank's times, and behind them those of the others.
static size_t measured_schedules(struct schedule *out, char titles[][48], const struct watch *w,
                                 const struct graph *g)
{
    size_t steps = drawn_steps(w), ranks = w->ranks ? w->ranks : 1;
    for (size_t r = 0; r < ranks; r++) {
        if (w->ranks > 1) {
            snprintf(titles[r], sizeof titles[r], "rank %zu measured", r);
        } else {
            snprintf(titles[r], sizeof titles[r], "measured");
        }
        out[r] = (struct schedule){
            .title = titles[r],
            .graph = g,
            .timings = r ? w->others + (r - 1) * steps * g->n_ops : drawn_timings(w, g),
            .steps = steps,
            .first_step = w->first_step + w->steps - steps,
            .clock = 1,
        };
    }
    return steps ? ranks : 0;
}

int watch_draw(const struct watch *w, const struct session *s, const char *trace,
               const char *timeline, struct error *err)
{
    const struct graph *g = session_graph(s);
    struct schedule schedules[1 + WATCH_RANKS_MAX];
    char titles[WATCH_RANKS_MAX][48];
    struct timing *predicted = malloc((PICTURE_STEPS * g->n_ops + 1) * sizeof *predicted);
    if (!predicted) {
        return error_set(err, STATUS_FAIL, "no memory for a picture of %zu operations", g->n_ops);
    }
    int status = prepared_schedule(w->prepared, g, predicted, PICTURE_STEPS, err);
    schedules[0] = (struct schedule){
        .title = "predicted", .graph = g, .timings = predicted, .steps = PICTURE_STEPS};
    size_t measured = measured_schedules(schedules + 1, titles, w, g);
    if (!status && trace[0]) {
        status = trace_write(trace, schedules, 1 + measured, err);
    }
    if (!status && timeline[0]) {
        status = timeline_write(timeline, schedules, measured ? 2 : 1, err);
    }
    free(predicted);
    return status;
}
