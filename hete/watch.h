// watch.h - the times of a session's last steps, kept for reports and pictures beside what was
// predicted.
#ifndef HETE_WATCH_H
#define HETE_WATCH_H

#include "hete/comm.h"
#include "hete/prepare.h"

#define WATCH_RANKS_MAX ((size_t)64) // in a trace: those behind are left out

struct watch {
    const struct prepared *prepared;
    struct measured measured; // if `any`
    bool any;
    struct timing *timings; // of `steps` steps, the first of which has the number first_step
    size_t steps;
    uint64_t first_step;
    // Rank 0, after watch_gather: the last steps of ranks 1 to ranks - 1, on its own clock.
    struct timing *others; // [ranks - 1][gathered steps * n_ops]
    size_t ranks;
};

// Takes the room that will be needed.
int watch_open(struct watch *w, const struct prepared *prepared, const struct session *s,
               struct error *err);
void watch_close(struct watch *w);

// After `done` steps, before anything else runs on the lanes. Nothing is in flight.
void watch_keep(struct watch *w, struct session *s, uint64_t done);

void watch_report(const struct watch *w, FILE *out);

// Called by all ranks, on their main threads, after training: gives rank 0 the others' times of the
// steps that it draws. All have made the same steps, of the same operations.
//
// The ranks of one machine have one clock. Between machines clocks differ by any amount: that is
// found from a few barriers of all ranks, as behind a barrier it is later than before it on any
// other rank. What remains unknown is about as long as a barrier takes. Clocks that may be the same
// by that are taken to be.
int watch_gather(struct watch *w, const struct session *s, struct comm *c, struct error *err);

// One rank's clock before and behind a barrier.
struct clock_reading {
    double before, behind;
};
// Seconds to add to another rank's clock to get this one's, from n barriers of both.
double clock_offset(const struct clock_reading *mine, const struct clock_reading *theirs, size_t n);

// The schedule as it was predicted and as it was measured: a trace, where the other ranks are
// beside this one if they were gathered, and a picture. "": not wanted.
int watch_draw(const struct watch *w, const struct session *s, const char *trace,
               const char *timeline, struct error *err);

#endif
