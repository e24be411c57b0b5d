// queue.c - streams, and when what is queued on them runs.
//
// Each lane is a list of operations that run in order. An operation has the clock of what happens
// before it, made when it is queued: from its stream, from events that the stream waits for, from
// the default stream where that one takes part, and from what the host has seen to be done. The
// same clock says when it may run: when all of that is done. Which of the lanes whose head may run
// goes next, and how far at each call, is up to the schedule:
//
//   SIM_LAZY    what is waited for, and only that
//   SIM_RANDOM  at each call any number of operations of any lanes, by the seed
//   SIM_TIME    three engines (compute, copy in, copy out), each with one operation at a time, the
//               ready one that has waited longest. A kernel does its work when it starts (what it
//               touches tells how long it lasts), a copy when it ends. The host's time passes in
//               calls and in waiting; what would end later than that has not happened yet.
#include "test/cuda/host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MISSES_MAX 2 // queries in vain, until virtual time goes on to the next end

struct lane {
    bool used, blocking;
    int priority;
    struct clock clock; // of the last operation
    struct op *head, **tail;
    struct note *notes;
    size_t notes_room;
};

static struct {
    struct lane lanes[LANES];
    struct clock done, host; // done.at[LANE_HOST] is the largest number
    size_t pending;
    int schedule; // as it was when the first of those that are pending was queued
    struct op *free_ops;
    // virtual time
    double now;
    double engine_free[ENGINES];
    struct op *engine_runs[ENGINES];
    unsigned misses;
    // otherwise
    double origin;
} q;

static double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double sim_time(void)
{
    return q.now;
}

// ---- notes ----

static void note_add(int lane, uint32_t seq, const struct note *note)
{
    struct lane *l = &q.lanes[lane];
    if (seq >= l->notes_room) {
        l->notes_room = l->notes_room ? 2 * l->notes_room : 256;
        l->notes = realloc(l->notes, l->notes_room * sizeof *l->notes);
        if (!l->notes) {
            abort();
        }
    }
    l->notes[seq] = *note;
}

struct note *queue_note(int lane, uint32_t seq)
{
    return &q.lanes[lane].notes[seq];
}

void queue_describe(char *text, size_t size, int lane, uint32_t seq)
{
    const struct note *n = queue_note(lane, seq);
    if (lane == LANE_HOST) {
        snprintf(text, size, "the host (%s, %zu bytes at %p)", n->name, n->bytes, n->at);
    } else if (n->bytes) {
        snprintf(text, size, "%s (stream %d, operation %u, %zu bytes to %p)", n->name,
                 lane - LANE_DEFAULT, seq, n->bytes, n->at);
    } else {
        snprintf(text, size, "%s (stream %d, operation %u)", n->name, lane - LANE_DEFAULT, seq);
    }
}

// ---- lanes ----

static void release(struct op *op)
{
    if (op->kernel.release) {
        op->kernel.release(op->kernel.args);
    }
    free(op->staged);
    op->next = q.free_ops;
    q.free_ops = op;
}

static void lane_use(int lane, bool blocking, int priority)
{
    struct lane *l = &q.lanes[lane];
    uint32_t seq = l->clock.at[lane]; // goes on: the shadow knows those before
    memset(&l->clock, 0, sizeof l->clock);
    l->clock.at[lane] = seq;
    l->used = true;
    l->blocking = blocking;
    l->priority = priority;
}

void queue_reset(void)
{
    struct op *free_ops = q.free_ops;
    for (int i = 0; i < LANES; i++) {
        struct lane *l = &q.lanes[i];
        while (l->head) {
            struct op *op = l->head;
            l->head = op->next;
            q.free_ops = free_ops;
            release(op);
            free_ops = q.free_ops;
        }
        free(l->notes);
    }
    memset(&q, 0, sizeof q);
    q.free_ops = free_ops;
    q.origin = clock_s();
    q.done.at[LANE_HOST] = UINT32_MAX;
    for (int i = 0; i < LANES; i++) {
        q.lanes[i].tail = &q.lanes[i].head;
        note_add(i, 0, &(struct note){.name = "nothing"});
    }
    lane_use(LANE_DEFAULT, true, 0);
}

int queue_open(bool blocking, int priority)
{
    int found = -1;
    for (int i = LANE_FIRST; i < LANES; i++) {
        struct lane *l = &q.lanes[i];
        if (l->used || l->head) {
            continue;
        }
        found = found < 0 ? i : found;
        if (q.host.at[i] >= l->clock.at[i]) { // nothing of the stream before it can race
            found = i;
            break;
        }
    }
    if (found >= 0) {
        lane_use(found, blocking, priority);
    }
    return found;
}

void queue_close(int lane)
{
    q.lanes[lane].used = false; // what it was given still runs
}

void queue_wait(int lane, const struct clock *after)
{
    clock_join(&q.lanes[lane].clock, after);
}

const struct clock *queue_clock(int lane)
{
    return &q.lanes[lane].clock;
}

void queue_all(struct clock *clock)
{
    memset(clock, 0, sizeof *clock);
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        clock_join(clock, &q.lanes[i].clock);
    }
}

bool queue_done(const struct clock *target)
{
    for (int i = 0; i < LANES; i++) {
        if (q.done.at[i] < target->at[i]) {
            return false;
        }
    }
    return true;
}

uint32_t queue_add(int lane, const struct op *wanted)
{
    struct lane *l = &q.lanes[lane];
    struct op *op = q.free_ops;
    if (op) {
        q.free_ops = op->next;
    } else if (!(op = malloc(sizeof *op))) {
        abort();
    }
    clock_join(&l->clock, &q.host);
    if (lane == LANE_DEFAULT) {
        for (int i = LANE_FIRST; i < LANES; i++) {
            if (q.lanes[i].blocking) {
                clock_join(&l->clock, &q.lanes[i].clock);
            }
        }
    } else if (l->blocking) {
        clock_join(&l->clock, &q.lanes[LANE_DEFAULT].clock);
    }
    *op = *wanted;
    op->lane = lane;
    op->seq = ++l->clock.at[lane];
    op->clock = l->clock;
    op->issued = q.now;
    op->running = op->begun = false;
    op->next = NULL;
    *l->tail = op;
    l->tail = &op->next;
    q.schedule = q.pending++ ? q.schedule : (int)sim_settings()->schedule;
    q.misses = 0;
    note_add(lane, op->seq,
             &(struct note){.name = op->name,
                            .at = op->dst,
                            .bytes = op->kind == OP_COPY || op->kind == OP_FILL ? op->bytes : 0});
    return op->seq;
}

// ---- running ----

static bool is_ready(const struct op *op)
{
    if (op->hangs) {
        return false;
    }
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        if (i != op->lane && q.done.at[i] < op->clock.at[i]) {
            return false;
        }
    }
    return true;
}

// What the operation does to memory; bytes touched.
static size_t perform(struct op *op)
{
    memory_open();
    race_begin(op);
    switch (op->kind) {
    case OP_KERNEL:
        sim_run_kernel(&op->kernel);
        break;
    case OP_COPY: {
        // Memory that is not pinned has no shadow: it takes no part after the call.
        bool in = !memory_ours(op->src) || race_touch(op->src, op->bytes, false);
        bool out = !memory_ours(op->dst) || race_touch(op->dst, op->bytes, true);
        if (in && out) {
            memmove(op->dst, op->staged ? op->staged : op->src, op->bytes);
        }
        break;
    }
    case OP_FILL:
        if (race_touch(op->dst, op->bytes, true)) {
            memset(op->dst, op->value, op->bytes);
        }
        break;
    case OP_MARK:
    case OP_EXTERNAL:
        break;
    }
    return race_end();
}

// One look at what depends on others; false: it is not done.
static bool get_on(struct op *op)
{
    memory_open();
    if (!op->begun) {
        race_begin(op);
    }
    bool done = op->get_on(op->state);
    if (!op->begun) {
        race_end();
    }
    op->begun = true;
    return done;
}

static void finish(struct op *op, double at)
{
    struct lane *l = &q.lanes[op->lane];
    l->head = op->next;
    if (!l->head) {
        l->tail = &l->head;
    }
    q.done.at[op->lane] = op->seq;
    queue_note(op->lane, op->seq)->finish = at;
    q.pending--;
    release(op);
}

static bool run_head(int lane)
{
    struct op *op = q.lanes[lane].head;
    if (!op || !is_ready(op)) {
        return false;
    }
    if (op->kind == OP_EXTERNAL && !get_on(op)) {
        return false;
    }
    if (op->kind != OP_MARK && op->kind != OP_EXTERNAL) {
        perform(op);
    }
    finish(op, clock_s() - q.origin);
    return true;
}

// Runs one operation of those in target, or of any (NULL). False: none can run.
static bool run_one(const struct clock *target)
{
    int first = (int)(sim_random() % LANES);
    for (int i = 0; i < LANES; i++) {
        int lane = (first + i) % LANES;
        if (target && q.done.at[lane] >= target->at[lane]) {
            continue;
        }
        if (run_head(lane)) {
            return true;
        }
    }
    return false;
}

// ---- virtual time ----

static double ready_at(const struct op *op)
{
    double at = op->issued;
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        uint32_t seq = i == op->lane ? op->seq - 1 : op->clock.at[i];
        double t = q.lanes[i].notes[seq].finish;
        at = t > at ? t : at;
    }
    return at;
}

static void start(struct op *op, double at)
{
    const struct sim_speed *speed = &sim_settings()->speed;
    double bytes = (double)op->bytes;
    op->running = true;
    q.engine_runs[op->engine] = op;
    if (op->engine == ENGINE_COMPUTE) {
        op->finish = at + speed->kernel_s + (double)perform(op) / speed->memory;
    } else {
        double rate = op->engine == ENGINE_IN ? speed->copy_in : speed->copy_out;
        op->finish = at + speed->copy_s + bytes / rate;
    }
}

static void start_ready(void)
{
    struct op *best[ENGINES];
    double best_at[ENGINES];
    memset(best, 0, sizeof best);
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        struct op *op = q.lanes[i].head;
        if (!op || op->running || !is_ready(op)) {
            continue;
        }
        double at = ready_at(op);
        if (op->kind == OP_EXTERNAL && !get_on(op)) {
            continue;
        }
        if (op->engine == ENGINE_NONE) {
            finish(op, at);
            i = LANE_DEFAULT - 1; // others may be ready now
            memset(best, 0, sizeof best);
            continue;
        }
        struct op *b = best[op->engine];
        double lead = b ? best_at[op->engine] - at : 1;
        if (lead > 0 || (lead == 0 && q.lanes[i].priority < q.lanes[b->lane].priority)) {
            best[op->engine] = op;
            best_at[op->engine] = at;
        }
    }
    for (int e = 0; e < ENGINES; e++) {
        if (best[e] && !q.engine_runs[e]) {
            double at = best_at[e];
            start(best[e], at > q.engine_free[e] ? at : q.engine_free[e]);
        }
    }
}

// Completes what ends first, unless it ends after `until`. False: nothing does.
static bool advance(double until)
{
    start_ready();
    struct op *first = NULL;
    for (int e = 0; e < ENGINES; e++) {
        struct op *op = q.engine_runs[e];
        if (op && (!first || op->finish < first->finish)) {
            first = op;
        }
    }
    if (!first || first->finish > until) {
        return false;
    }
    q.engine_runs[first->engine] = NULL;
    q.engine_free[first->engine] = first->finish;
    if (first->engine != ENGINE_COMPUTE) {
        perform(first);
    }
    finish(first, first->finish);
    start_ready();
    return true;
}

static void host_reaches(const struct clock *target)
{
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        double t = q.lanes[i].notes[target->at[i]].finish;
        q.now = t > q.now ? t : q.now;
    }
}

// ---- the host ----

void queue_poke(void)
{
    if (q.schedule == SIM_TIME) {
        q.now += sim_settings()->speed.call_s;
        while (advance(q.now)) {
        }
    } else if (q.schedule == SIM_RANDOM && q.pending > 0) {
        uint64_t r = sim_random();
        size_t n = r % 4 == 0 ? (r >> 8) % (q.pending + 1) : (r >> 8) % 3;
        while (n-- > 0 && run_one(NULL)) {
        }
    }
}

// What holds target up, for the report of a wait without end.
static void report_hang(const struct clock *target, const char *call)
{
    char text[128] = "nothing";
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        const struct op *op = q.lanes[i].head;
        if (op && q.done.at[i] < target->at[i] && op->hangs) {
            queue_describe(text, sizeof text, i, op->seq);
        }
    }
    sim_report_once(SIM_DEADLOCK, call, "%s waits for ever: %s does not end", call, text);
}

// Is what target waits for something that others have to get on with?
static bool external(const struct clock *target)
{
    for (int i = LANE_DEFAULT; i < LANES; i++) {
        const struct op *op = q.lanes[i].head;
        if (op && q.done.at[i] < target->at[i] && op->kind == OP_EXTERNAL && is_ready(op)) {
            usleep(20);
            return true;
        }
    }
    return false;
}

bool queue_settle(const struct clock *target, const char *call)
{
    bool timed = q.schedule == SIM_TIME, any = q.schedule == SIM_RANDOM;
    while (!queue_done(target)) {
        if (!(timed ? advance(1e300)
                    : run_one(any && sim_random() % 2 ? NULL : target) || run_one(target))) {
            if (queue_done(target)) {
                break; // by a mark, which ends at once
            }
            if (external(target)) {
                continue;
            }
            report_hang(target, call);
            return false;
        }
    }
    if (timed) {
        host_reaches(target);
    }
    clock_join(&q.host, target);
    return true;
}

bool queue_poll(const struct clock *target)
{
    if (queue_done(target)) {
        clock_join(&q.host, target);
        return true;
    }
    if (q.schedule == SIM_LAZY) {
        run_one(target);
    } else if (q.schedule == SIM_TIME &&
               (++q.misses > MISSES_MAX || sim_settings()->speed.call_s <= 0)) {
        double next = 1e300;
        for (int e = 0; e < ENGINES; e++) {
            const struct op *op = q.engine_runs[e];
            next = op && op->finish < next ? op->finish : next;
        }
        q.now = next < 1e300 && next > q.now ? next : q.now;
        while (advance(q.now)) {
        }
    }
    return false;
}

void sim_host_access(const void *p, size_t bytes, bool write)
{
    if (!sim_lock()) {
        return;
    }
    uint32_t seq = ++q.host.at[LANE_HOST];
    note_add(LANE_HOST, seq,
             &(struct note){.name = write ? "write" : "read", .at = p, .bytes = bytes});
    race_host(&q.host, p, bytes, write);
    sim_unlock();
}
