// watch.c - copies times out of a session before they are overwritten.
#include "hete/watch.h"
#include "hete/trace.h"

#include <stdlib.h>

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

int watch_draw(const struct watch *w, const struct session *s, const char *trace,
               const char *timeline, struct error *err)
{
    const struct graph *g = session_graph(s);
    size_t steps = w->steps < PICTURE_STEPS ? w->steps : PICTURE_STEPS, skip = w->steps - steps;
    struct timing *predicted = malloc((PICTURE_STEPS * g->n_ops + 1) * sizeof *predicted);
    if (!predicted) {
        return error_set(err, STATUS_FAIL, "no memory for a picture of %zu operations", g->n_ops);
    }
    int status = prepared_schedule(w->prepared, g, predicted, PICTURE_STEPS, err);
    struct schedule schedules[] = {
        {.title = "predicted", .graph = g, .timings = predicted, .steps = PICTURE_STEPS},
        {.title = "measured",
         .graph = g,
         .timings = w->timings + skip * g->n_ops,
         .steps = steps,
         .first_step = w->first_step + skip},
    };
    if (!status && trace[0]) {
        status = trace_write(trace, schedules, steps ? 2 : 1, err);
    }
    if (!status && timeline[0]) {
        status = timeline_write(timeline, schedules, steps ? 2 : 1, err);
    }
    free(predicted);
    return status;
}
