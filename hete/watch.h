// watch.h - the times of a session's last steps, kept for reports and pictures beside what was
// predicted.
#ifndef HETE_WATCH_H
#define HETE_WATCH_H

#include "hete/prepare.h"

struct watch {
    const struct prepared *prepared;
    struct measured measured; // if `any`
    bool any;
    struct timing *timings; // of `steps` steps, the first of which has the number first_step
    size_t steps;
    uint64_t first_step;
};

// Takes the room that will be needed.
int watch_open(struct watch *w, const struct prepared *prepared, const struct session *s,
               struct error *err);
void watch_close(struct watch *w);

// After `done` steps, before anything else runs on the lanes. Nothing is in flight.
void watch_keep(struct watch *w, struct session *s, uint64_t done);

void watch_report(const struct watch *w, FILE *out);

// The schedule as it was predicted and as it was measured: a trace and a picture. "": not wanted.
int watch_draw(const struct watch *w, const struct session *s, const char *trace,
               const char *timeline, struct error *err);

#endif
