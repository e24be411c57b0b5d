// execute.c - a mutex, a list of ready operations per lane, and a counter per operation.
//
// A lane's thread waits until an operation in its list may start, runs it without the mutex, and
// then counts down its successors of this step and the next; those that reach 0 go into their
// lanes' lists. The lists are short, so the choice is a walk through them.
//
// On a device that queues, "runs" is "is queued" for all lanes but the host's: the caller's thread
// does that, and asks the device which operations are done. An operation of the compute or comm
// lane is counted down early, when what it waits for is queued.
#include "hete/execute.h"
#include "hete/step.h"
#include "kernels/clock.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define IN_FLIGHT 2
// What a device is given ahead. Each operation of the compute lane launches some 20 kernels, and a
// launch blocks where 1024 are pending; of copies one more, lest the link idle while it is chosen.
#define QUEUE_MAX  16
#define COPIES_MAX 2
#define POLL_S     5e-6 // between questions to the device: copies wait for the answer

// An operation of a step: step * n_ops + op, so that program order is the order of positions.
typedef uint64_t position;
#define NOWHERE UINT64_MAX

struct record {
    double start, end;
    position cause;
    bool paced, late;
};

// One step in flight.
struct flight {
    uint64_t step;
    size_t left;     // operations that are not done
    bool awaited;    // its end has been seen: the place is free
    uint32_t *waits; // by operation: predecessors that are not done
    bool *done, *queued;
};

struct ready {
    position at, cause; // cause: the predecessor that was done last
    double since;
    uint64_t arrival;
};

struct lane_state {
    struct executor *e;
    enum lane lane;
    pthread_t thread;
    bool started;
    pthread_cond_t work;
    struct ready *ready; // room for all operations in flight
    size_t n_ready;
    position running, last; // last: ended before
    position cursor;        // of a lane that runs in order: its next operation
    double last_end;
    uint64_t random;
    // On a device that queues: what it has of this lane, oldest first.
    struct ready queue[QUEUE_MAX];
    double queued_s[QUEUE_MAX];
    size_t n_queued;
};

struct executor {
    struct execute_config config;
    pthread_mutex_t mutex;
    pthread_cond_t finished;
    struct lane_state lane[LANES];
    const struct graph *graph;
    const double *pace;
    bool fifo, quit, held, stuck;
    uint64_t held_step;
    struct flight flight[IN_FLIGHT];
    uint64_t first_step, next_step; // since the graph was loaded
    uint32_t *n_preds;              // by operation: edges within the step
    uint32_t *first_pred, *pred;    // by operation: edges that lead to it, on a device that queues
    struct record *records;         // EXECUTE_KEPT_STEPS * n_ops
    uint64_t arrivals, progress;
    struct error error; // of the operation that failed first
};

static uint64_t step_of(const struct executor *e, position at)
{
    return at / e->graph->n_ops;
}

static size_t op_of(const struct executor *e, position at)
{
    return (size_t)(at % e->graph->n_ops);
}

static struct flight *flight_of(struct executor *e, uint64_t step)
{
    return e->flight + step % IN_FLIGHT;
}

static struct record *record_of(const struct executor *e, position at)
{
    return e->records + step_of(e, at) % EXECUTE_KEPT_STEPS * e->graph->n_ops + op_of(e, at);
}

// ---- readiness ----------------------------------------------------------------------------------

static void push(struct executor *e, position at, position cause)
{
    struct lane_state *l = e->lane + e->graph->ops[op_of(e, at)].lane;
    l->ready[l->n_ready++] = (struct ready){at, cause, clock_s(), e->arrivals++};
    pthread_cond_signal(&l->work);
}

static bool on_device(const struct executor *e, enum lane lane)
{
    return e->config.device && lane != LANE_HOST;
}

// Does `to` wait only until `from` is queued? The stream sees to the rest.
static bool is_early(const struct executor *e, const struct edge *edge)
{
    const struct op *from = e->graph->ops + edge->from, *to = e->graph->ops + edge->to;
    return on_device(e, (enum lane)from->lane) && lane_in_order((enum lane)to->lane) &&
           !to->by_host;
}

// After an operation is queued (early) or done.
static void release_successors(struct executor *e, position at, bool early)
{
    const struct graph *g = e->graph;
    size_t op = op_of(e, at);
    for (uint32_t i = g->first_edge[op]; i < g->first_edge[op + 1]; i++) {
        uint64_t step = step_of(e, at) + g->edges[i].next;
        struct flight *f = flight_of(e, step);
        if (step < e->next_step && is_early(e, g->edges + i) == early &&
            --f->waits[g->edges[i].to] == 0) {
            push(e, step * g->n_ops + g->edges[i].to, at);
        }
    }
}

static void finish(struct executor *e, struct lane_state *l, position at, struct record record)
{
    struct flight *f = flight_of(e, step_of(e, at));
    *record_of(e, at) = record;
    l->last = at;
    l->last_end = record.end;
    f->done[op_of(e, at)] = true;
    e->progress++;
    release_successors(e, at, false);
    if (--f->left == 0 || e->held || e->config.device) {
        pthread_cond_broadcast(&e->finished);
    }
}

// ---- choice -------------------------------------------------------------------------------------

static uint64_t draw(struct lane_state *l, uint64_t n) // xorshift (Marsaglia 2003)
{
    l->random ^= l->random << 13;
    l->random ^= l->random >> 7;
    l->random ^= l->random << 17;
    return l->random % n;
}

static bool may_start(const struct executor *e, position at)
{
    return !e->held || step_of(e, at) <= e->held_step;
}

// Does the lane keep to program order? Under chaos only where all ranks have to.
static bool follows(const struct executor *e, const struct lane_state *l)
{
    return lane_in_order(l->lane) && (!e->config.chaos || l->lane == LANE_COMM);
}

// Index of the ready operation to run next, or n_ready.
static size_t choose(struct executor *e, struct lane_state *l)
{
    size_t best = l->n_ready;
    if (e->error.status) {
        return best;
    }
    for (size_t i = 0, start = e->config.chaos && l->n_ready ? draw(l, l->n_ready) : 0;
         i < l->n_ready; i++) {
        size_t at = (start + i) % l->n_ready;
        const struct ready *r = l->ready + at, *b = l->ready + best;
        if (!may_start(e, r->at)) {
            continue;
        }
        if (follows(e, l)) {
            if (r->at == l->cursor) {
                return at;
            }
        } else if (e->config.chaos) {
            return at;
        } else if (best == l->n_ready || (e->fifo ? r->arrival < b->arrival : r->at < b->at)) {
            best = at;
        }
    }
    return best;
}

// The lane's first operation from `at` on, in this step or the next one.
static position next_of(const struct executor *e, enum lane lane, position at)
{
    for (size_t i = 0; i < e->graph->n_ops; i++, at++) {
        if (e->graph->ops[op_of(e, at)].lane == lane) {
            return at;
        }
    }
    return NOWHERE; // a step without any
}

// ---- lanes --------------------------------------------------------------------------------------

static void dawdle(struct executor *e, struct lane_state *l)
{
    if (e->config.chaos && draw(l, 3) == 0) {
        clock_sleep_until(clock_s() + 1e-6 * (double)draw(l, 400));
    }
}

static void poison(struct executor *e, const struct op *op)
{
    const struct access *a = e->graph->accesses + op->first_access;
    for (size_t i = 0; e->config.chaos && e->config.poison && i < op->n_accesses; i++) {
        if (a[i].mode == ACCESS_WRITE) {
            e->config.poison(e->config.ctx, op, a + i);
        }
    }
}

static void keep_pace(double least, struct record *r)
{
    double end = r->start + least;
    r->paced = end > r->start;
    r->late = r->paced && clock_s() > end;
    if (r->paced && !r->late) {
        clock_sleep_until(end);
    }
}

static void run(struct executor *e, struct lane_state *l, struct ready r)
{
    size_t i = op_of(e, r.at);
    const struct op *op = e->graph->ops + i;
    struct record record = {.cause = r.since > l->last_end ? r.cause : l->last};
    struct error err = {0};
    l->running = r.at;
    uint64_t step = step_of(e, r.at);
    double least = e->pace ? e->pace[i] : 0;
    pthread_mutex_unlock(&e->mutex);
    poison(e, op);
    dawdle(e, l);
    record.start = clock_s();
    int status = e->config.run(e->config.ctx, op, step, &err);
    keep_pace(least, &record);
    dawdle(e, l);
    pthread_mutex_lock(&e->mutex);
    if (status && !e->error.status) {
        e->error = err;
        pthread_cond_broadcast(&e->finished);
    }
    l->running = NOWHERE;
    if (!status && !e->quit) { // who quits may have freed the graph
        record.end = clock_s();
        finish(e, l, r.at, record);
    }
}

static struct ready take(struct executor *e, struct lane_state *l, size_t i)
{
    struct ready r = l->ready[i];
    l->ready[i] = l->ready[--l->n_ready];
    if (follows(e, l)) {
        l->cursor = next_of(e, l->lane, l->cursor + 1);
    }
    return r;
}

static void *serve(void *arg)
{
    struct lane_state *l = arg;
    struct executor *e = l->e;
    prctl(PR_SET_TIMERSLACK, 1); // ns: paced operations end on time
    pthread_mutex_lock(&e->mutex);
    while (!e->quit) {
        size_t i = choose(e, l);
        if (i == l->n_ready) {
            pthread_cond_wait(&l->work, &e->mutex);
            continue;
        }
        run(e, l, take(e, l, i));
    }
    pthread_mutex_unlock(&e->mutex);
    return NULL;
}

// ---- lanes of a device that queues --------------------------------------------------------------

static enum device_lane device_lane(enum lane lane)
{
    static const enum device_lane of[LANES] = {[LANE_COMPUTE] = DEVICE_COMPUTE,
                                               [LANE_COPY_IN] = DEVICE_COPY_IN,
                                               [LANE_COPY_OUT] = DEVICE_COPY_OUT,
                                               [LANE_COMM] = DEVICE_COMM};
    return of[lane];
}

static size_t mark_of(const struct executor *e, position at)
{
    return step_of(e, at) % IN_FLIGHT * e->graph->n_ops + op_of(e, at);
}

static bool is_done(struct executor *e, position at)
{
    struct flight *f = flight_of(e, step_of(e, at));
    return f->step != step_of(e, at) || f->done[op_of(e, at)];
}

// The k-th predecessor of an operation, or NOWHERE: of a step before the first.
static position pred_of(const struct executor *e, position at, uint32_t k)
{
    const struct edge *edge = e->graph->edges + e->pred[k];
    uint64_t step = step_of(e, at);
    bool none = edge->next && step == e->first_step;
    return none ? NOWHERE : (step - edge->next) * e->graph->n_ops + edge->from;
}

static enum lane lane_of(const struct executor *e, position at)
{
    return (enum lane)e->graph->ops[op_of(e, at)].lane;
}

// The k-th predecessor of an operation, if another lane of the device still has it, else NOWHERE.
static position pending_pred(struct executor *e, position at, uint32_t k)
{
    position from = pred_of(e, at, k);
    bool other =
        from != NOWHERE && lane_of(e, from) != lane_of(e, at) && on_device(e, lane_of(e, from));
    return other && !is_done(e, from) ? from : NOWHERE;
}

// Streams wait for each other only where an edge joins two of them and it is not known yet that
// there is nothing to wait for.
static void await_streams(struct executor *e, position at)
{
    size_t op = op_of(e, at);
    for (uint32_t k = e->first_pred[op]; k < e->first_pred[op + 1]; k++) {
        position from = pending_pred(e, at, k);
        if (from != NOWHERE) {
            device_await(e->config.device, device_lane(lane_of(e, at)), mark_of(e, from));
        }
    }
}

static void fail_at(struct executor *e, position at, const struct error *why)
{
    const struct op *op = e->graph->ops + op_of(e, at);
    if (!e->error.status) {
        error_set(&e->error, why->status, "%s; step %llu, %s lane: %s of unit %u, micro-batch %u",
                  why->text, (unsigned long long)step_of(e, at), lane_name((enum lane)op->lane),
                  op_name(op->kind), op->unit, op->micro);
    }
}

// Queues an operation; one that is the host's own is done at once, but for what it has queued on
// the comm lane.
static void enqueue(struct executor *e, struct lane_state *l, struct ready r)
{
    struct device *dev = e->config.device;
    const struct op *op = e->graph->ops + op_of(e, r.at);
    struct error err = {0};
    struct record record = {.cause = r.since > l->last_end ? r.cause : l->last};
    pthread_mutex_unlock(&e->mutex); // an operation may hold the executor
    device_begin(dev, device_lane(l->lane), op_name(op->kind));
    await_streams(e, r.at);
    poison(e, op);
    record.start = clock_s();
    int status = e->config.run(e->config.ctx, op, step_of(e, r.at), &err);
    device_end(dev, device_lane(l->lane), mark_of(e, r.at));
    status = status ? status : device_status(dev, &err);
    pthread_mutex_lock(&e->mutex);
    e->progress++;
    if (status) {
        fail_at(e, r.at, &err);
        return;
    }
    flight_of(e, step_of(e, r.at))->queued[op_of(e, r.at)] = true;
    release_successors(e, r.at, true);
    if (op->by_host && l->lane != LANE_COMM) {
        record.end = clock_s();
        finish(e, l, r.at, record);
    } else {
        l->queued_s[l->n_queued] = record.start;
        l->queue[l->n_queued++] = r;
    }
}

// When it started is not asked for: when it was queued, what it waited for ended, or its lane was
// done with what came before, whichever was last.
static void dequeue(struct executor *e, struct lane_state *l)
{
    position at = l->queue[0].at;
    size_t op = op_of(e, at);
    struct record record = {.start = fmax(l->queued_s[0], l->last_end), .cause = l->last};
    if (l->queued_s[0] > l->last_end) {
        record.cause = l->queue[0].cause;
    }
    for (uint32_t k = e->first_pred[op]; k < e->first_pred[op + 1]; k++) {
        position from = pred_of(e, at, k);
        bool known = from != NOWHERE && step_of(e, from) + EXECUTE_KEPT_STEPS > step_of(e, at);
        if (known && record_of(e, from)->end > record.start) {
            record.start = record_of(e, from)->end;
            record.cause = from;
        }
    }
    record.end = fmax(device_passed_s(e->config.device, mark_of(e, at)), record.start);
    l->n_queued--;
    memmove(l->queue, l->queue + 1, l->n_queued * sizeof *l->queue);
    memmove(l->queued_s, l->queued_s + 1, l->n_queued * sizeof *l->queued_s);
    finish(e, l, at, record);
}

// An operation that has passed, after those before it in its lane, and before them what they have
// waited for in other lanes: that has passed, too. It was queued before them, as was what that
// waited for in this lane, which is gone from here.
static void retire_to(struct executor *e, position at)
{
    struct lane_state *l = e->lane + lane_of(e, at);
    while (!is_done(e, at)) {
        position first = l->queue[0].at;
        for (uint32_t k = e->first_pred[op_of(e, first)]; k < e->first_pred[op_of(e, first) + 1];
             k++) {
            position from = pending_pred(e, first, k);
            if (from != NOWHERE) {
                retire_to(e, from);
            }
        }
        dequeue(e, l);
    }
}

static bool retire(struct executor *e, enum lane lane)
{
    const struct lane_state *l = e->lane + lane;
    bool any = false;
    while (l->n_queued && device_passed(e->config.device, mark_of(e, l->queue[0].at))) {
        retire_to(e, l->queue[0].at);
        any = true;
    }
    return any;
}

// An error that shows when the device is asked is of what it was doing: the first operation in
// program order that it has, not one that would be queued now.
static void notice_failure(struct executor *e)
{
    position at = NOWHERE;
    struct error err = {0};
    if (e->error.status || !device_status(e->config.device, &err)) {
        return;
    }
    for (int i = 0; i < LANES; i++) {
        const struct lane_state *l = e->lane + i;
        at = lane_in_order(l->lane) && l->n_queued && l->queue[0].at < at ? l->queue[0].at : at;
    }
    fail_at(e, at != NOWHERE ? at : e->lane[LANE_COMPUTE].cursor, &err);
}

// Looks once after the lanes of the device: what is done, what can be queued. False: nothing was.
static bool drive(struct executor *e)
{
    bool any = false;
    for (int i = 0; i < LANES && e->config.device; i++) {
        struct lane_state *l = e->lane + i;
        if (!on_device(e, (enum lane)i)) {
            continue;
        }
        any |= retire(e, (enum lane)i);
        notice_failure(e);
        size_t room = lane_in_order(l->lane) ? QUEUE_MAX : COPIES_MAX, at;
        bool idles = e->config.chaos && draw(l, 3) == 0;
        // One at a time: an operation of the compute lane is many launches, and a copy that has
        // become ready is not to wait for a queue full of them.
        if (!idles && l->n_queued < room && (at = choose(e, l)) < l->n_ready) {
            enqueue(e, l, take(e, l, at));
            any = true;
        }
    }
    return any;
}

// Until something may have changed.
static void rest(struct executor *e, double seconds)
{
    double until = clock_s() + seconds;
    struct timespec t = {.tv_sec = (time_t)until,
                         .tv_nsec = (long)((until - (double)(time_t)until) * 1e9)};
    pthread_cond_timedwait(&e->finished, &e->mutex, &t);
}

// ---- opening ------------------------------------------------------------------------------------

int execute_open(struct executor **out, const struct execute_config *config, struct error *err)
{
    struct executor *e = calloc(1, sizeof *e);
    if (!e) {
        return error_set(err, STATUS_FAIL, "no memory for the executor");
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->finished, &monotonic);
    pthread_condattr_destroy(&monotonic);
    e->config = *config;
    for (int i = 0; i < LANES; i++) {
        struct lane_state *l = e->lane + i;
        *l = (struct lane_state){.e = e, .lane = (enum lane)i, .running = NOWHERE};
        l->random = config->chaos * 0x9e3779b97f4a7c15u + (uint64_t)i + 1;
        pthread_cond_init(&l->work, NULL);
    }
    if (config->device) {
        prctl(PR_SET_TIMERSLACK, 1L); // of this thread, which asks the device
    }
    for (int i = 0; i < LANES; i++) {
        if (on_device(e, (enum lane)i)) {
            continue;
        }
        int failed = pthread_create(&e->lane[i].thread, NULL, serve, e->lane + i);
        if (failed) {
            execute_close(e);
            return error_set(err, STATUS_FAIL, "no thread for the %s lane: %s",
                             lane_name((enum lane)i), strerror(failed));
        }
        e->lane[i].started = true;
    }
    *out = e;
    return STATUS_OK;
}

static void unload(struct executor *e)
{
    for (int i = 0; i < LANES; i++) {
        free(e->lane[i].ready);
        e->lane[i].ready = NULL;
        e->lane[i].n_ready = e->lane[i].n_queued = 0;
        e->lane[i].last = NOWHERE;
        e->lane[i].last_end = 0;
    }
    for (int i = 0; i < IN_FLIGHT; i++) {
        free(e->flight[i].waits);
        free(e->flight[i].done);
        free(e->flight[i].queued);
        e->flight[i] = (struct flight){.awaited = true};
    }
    free(e->n_preds);
    free(e->first_pred);
    free(e->pred);
    free(e->records);
    e->n_preds = e->first_pred = e->pred = NULL;
    e->records = NULL;
    e->graph = NULL;
}

void execute_close(struct executor *e)
{
    if (!e) {
        return;
    }
    pthread_mutex_lock(&e->mutex);
    e->quit = true;
    for (int i = 0; i < LANES; i++) {
        pthread_cond_signal(&e->lane[i].work);
    }
    pthread_mutex_unlock(&e->mutex);
    if (e->stuck) { // a lane may never come back: what it uses stays
        for (int i = 0; i < LANES; i++) {
            if (e->lane[i].started) {
                pthread_detach(e->lane[i].thread);
            }
        }
        return;
    }
    for (int i = 0; i < LANES; i++) {
        if (e->lane[i].started) {
            pthread_join(e->lane[i].thread, NULL);
        }
        pthread_cond_destroy(&e->lane[i].work);
    }
    unload(e);
    pthread_cond_destroy(&e->finished);
    pthread_mutex_destroy(&e->mutex);
    free(e);
}

static bool allocate(struct executor *e, const struct graph *graph)
{
    size_t n = graph->n_ops;
    bool ok = true;
    for (int i = 0; i < LANES; i++) {
        e->lane[i].ready = malloc(IN_FLIGHT * n * sizeof *e->lane[i].ready);
        ok = ok && e->lane[i].ready;
    }
    for (int i = 0; i < IN_FLIGHT; i++) {
        e->flight[i].waits = malloc(n * sizeof *e->flight[i].waits);
        e->flight[i].done = malloc(n * sizeof *e->flight[i].done);
        e->flight[i].queued = malloc(n * sizeof *e->flight[i].queued);
        ok = ok && e->flight[i].waits && e->flight[i].done && e->flight[i].queued;
    }
    e->n_preds = calloc(n, sizeof *e->n_preds);
    e->first_pred = calloc(n + 1, sizeof *e->first_pred);
    e->pred = calloc(graph->n_edges + 1, sizeof *e->pred);
    e->records = calloc(EXECUTE_KEPT_STEPS * n, sizeof *e->records);
    return ok && e->n_preds && e->first_pred && e->pred && e->records;
}

// Edges by where they lead.
static void list_preds(struct executor *e, const struct graph *g)
{
    for (size_t i = 0; i < g->n_edges; i++) {
        e->n_preds[g->edges[i].to] += !g->edges[i].next;
        e->first_pred[g->edges[i].to + 1]++;
    }
    for (size_t op = 0; op < g->n_ops; op++) {
        e->first_pred[op + 1] += e->first_pred[op];
    }
    for (size_t i = g->n_edges; i-- > 0;) { // backwards: each list begins where the next one ends
        e->pred[--e->first_pred[g->edges[i].to + 1]] = (uint32_t)i;
    }
    memmove(e->first_pred, e->first_pred + 1, g->n_ops * sizeof *e->first_pred);
    e->first_pred[g->n_ops] = (uint32_t)g->n_edges;
}

int execute_load(struct executor *e, const struct graph *graph, bool fifo, const double *pace,
                 struct error *err)
{
    if (e->config.device && device_marks(e->config.device, IN_FLIGHT * graph->n_ops, err)) {
        return err->status;
    }
    pthread_mutex_lock(&e->mutex);
    unload(e);
    bool ok = allocate(e, graph);
    if (ok) {
        list_preds(e, graph);
        e->graph = graph;
        e->fifo = fifo;
        e->pace = pace;
        e->first_step = e->next_step = 0;
    } else {
        unload(e);
    }
    pthread_mutex_unlock(&e->mutex);
    return ok ? STATUS_OK : error_set(err, STATUS_FAIL, "no memory to execute a step");
}

// ---- steps --------------------------------------------------------------------------------------

static void begin_first(struct executor *e, uint64_t step)
{
    e->first_step = e->next_step = step;
    for (enum lane l = 0; l < LANES; l++) {
        e->lane[l].cursor = next_of(e, l, step * e->graph->n_ops);
    }
}

int execute_start(struct executor *e, uint64_t step, struct error *err)
{
    const struct graph *g = e->graph;
    struct flight *f = flight_of(e, step), *before = flight_of(e, step + 1);
    if (!f->awaited) {
        return error_set(err, STATUS_FAIL, "step %llu is started while step %llu is in flight",
                         (unsigned long long)step, (unsigned long long)f->step);
    }
    pthread_mutex_lock(&e->mutex);
    if (e->next_step == e->first_step) {
        begin_first(e, step);
    }
    bool follows = step > e->first_step;
    f->step = step;
    f->left = g->n_ops;
    f->awaited = false;
    memcpy(f->waits, e->n_preds, g->n_ops * sizeof *f->waits);
    memset(f->done, 0, g->n_ops * sizeof *f->done);
    memset(f->queued, 0, g->n_ops * sizeof *f->queued);
    for (size_t i = 0; follows && i < g->n_edges; i++) {
        const struct edge *edge = g->edges + i;
        bool over = is_early(e, edge) ? before->queued[edge->from] : before->done[edge->from];
        f->waits[edge->to] += edge->next && !over;
    }
    e->next_step = step + 1;
    for (size_t i = 0; i < g->n_ops; i++) {
        if (f->waits[i] == 0) {
            push(e, step * g->n_ops + i, NOWHERE);
        }
    }
    for (int i = 0; i < QUEUE_MAX && drive(e); i++) {
    }
    int status = STATUS_OK;
    if (e->error.status) {
        *err = e->error;
        status = err->status;
    }
    pthread_mutex_unlock(&e->mutex);
    return status;
}

static void describe(const struct executor *e, const struct flight *f, char *out, size_t size)
{
    size_t n = 0;
    for (int i = 0; i < LANES; i++) {
        position at = e->lane[i].n_queued ? e->lane[i].queue[0].at : e->lane[i].running;
        const char *state = "runs";
        for (size_t op = 0; at == NOWHERE && op < e->graph->n_ops; op++) {
            if (e->graph->ops[op].lane == i && !f->done[op]) {
                at = f->step * e->graph->n_ops + op;
                state = "has not started";
            }
        }
        if (at != NOWHERE && n < size) {
            const struct op *op = e->graph->ops + op_of(e, at);
            n += (size_t)snprintf(out + n, size - n, "; %s lane: %s of unit %u, micro-batch %u %s",
                                  lane_name((enum lane)i), op_name(op->kind), op->unit, op->micro,
                                  state);
        }
    }
}

static int starved(struct executor *e, const struct flight *f, double seconds, struct error *err)
{
    char waiting[384] = "";
    describe(e, f, waiting, sizeof waiting);
    e->stuck = true;
    int status = error_set(err, STATUS_FAIL, "step %llu: nothing has finished for %g s%s",
                           (unsigned long long)f->step, seconds, waiting);
    e->error = *err;
    return status;
}

static double patience_of(const struct executor *e)
{
    return e->config.watchdog_s > 0 ? e->config.watchdog_s : 300;
}

// Seconds since *last, of which those do not count in which this process stood still (SIGSTOP, a
// cluster that lets another job run): nobody waits longer than `longest` between two looks.
static double awake_since(double *last, double longest)
{
    double now = clock_s(), s = now - *last;
    *last = now;
    return fmin(s, 2 * longest);
}

// Is the lane at work? Of what a device has been given, the first of each lane is, once nothing is
// pending that it waits for in other lanes.
static bool works(struct executor *e, const struct lane_state *l)
{
    if (l->n_queued == 0) {
        return l->running != NOWHERE;
    }
    position at = l->queue[0].at;
    size_t op = op_of(e, at);
    for (uint32_t k = e->first_pred[op]; k < e->first_pred[op + 1]; k++) {
        if (pending_pred(e, at, k) != NOWHERE) {
            return false;
        }
    }
    return true;
}

// Is an exchange with other ranks all that runs? It lasts as long as the slowest of them; that one
// is gone is not told by time (comm.h).
static bool only_others_work(struct executor *e)
{
    bool here = false;
    for (int i = 0; i < LANES; i++) {
        here |= i != LANE_COMM && works(e, e->lane + i);
    }
    return !here && works(e, e->lane + LANE_COMM);
}

static void tell(struct executor *e, bool waits, bool *told)
{
    if (e->config.waits && (waits || *told)) {
        e->config.waits(e->config.ctx, waits);
    }
    *told = waits;
}

int execute_wait(struct executor *e, uint64_t step, struct error *err)
{
    struct flight *f = flight_of(e, step);
    double patience = patience_of(e), last = clock_s(), silent = 0, look = fmin(patience, 1);
    int status = STATUS_OK;
    bool told = false;
    pthread_mutex_lock(&e->mutex);
    for (uint64_t progress = e->progress; f->left > 0 && !e->error.status && !status;) {
        if (!drive(e)) {
            rest(e, e->config.device ? POLL_S : look);
        }
        double waited = awake_since(&last, look);
        bool others = only_others_work(e);
        tell(e, others, &told);
        silent += others ? 0 : waited;
        if (e->progress != progress) {
            progress = e->progress;
            silent = 0;
        } else if (f->left > 0 && silent > patience) {
            status = starved(e, f, patience, err);
        }
    }
    tell(e, false, &told);
    if (!status && e->error.status) {
        *err = e->error;
        status = err->status;
    }
    f->awaited = true;
    pthread_mutex_unlock(&e->mutex);
    return status;
}

void execute_hold(struct executor *e, uint64_t step)
{
    pthread_mutex_lock(&e->mutex);
    e->held = true;
    e->held_step = step;
    pthread_mutex_unlock(&e->mutex);
}

void execute_release(struct executor *e)
{
    pthread_mutex_lock(&e->mutex);
    e->held = false;
    for (int i = 0; i < LANES; i++) {
        pthread_cond_signal(&e->lane[i].work);
    }
    pthread_mutex_unlock(&e->mutex);
}

void execute_settle(struct executor *e)
{
    pthread_mutex_lock(&e->mutex);
    double patience = patience_of(e), last = clock_s(), waited = 0;
    bool told = false;
    for (int i = 0; i < LANES && e->held;) {
        struct lane_state *l = e->lane + i;
        bool over = e->error.status || waited > patience;
        if ((l->running != NOWHERE || l->n_queued) && !over) {
            drive(e);
            rest(e, e->config.device ? POLL_S : 1);
            waited += awake_since(&last, 1);
            tell(e, only_others_work(e), &told);
            i = 0;
        } else {
            i++;
        }
    }
    tell(e, false, &told);
    pthread_mutex_unlock(&e->mutex);
}

// ---- times --------------------------------------------------------------------------------------

size_t execute_timings(const struct executor *e, struct timing *timings, size_t steps,
                       uint64_t *first)
{
    uint64_t done = e->next_step - e->first_step;
    size_t n = e->graph ? e->graph->n_ops : 0;
    steps = steps < EXECUTE_KEPT_STEPS ? steps : EXECUTE_KEPT_STEPS;
    steps = done < steps ? (size_t)done : steps;
    *first = e->next_step - steps;
    for (size_t s = 0; s < steps; s++) {
        for (size_t i = 0; i < n; i++) {
            const struct record *r = record_of(e, (*first + s) * n + i);
            bool known = r->cause != NOWHERE && r->cause >= *first * n;
            timings[s * n + i] = (struct timing){
                r->start, r->end, known ? (uint32_t)(r->cause - *first * n) : TIMING_NONE};
        }
    }
    return steps;
}

void execute_late(const struct executor *e, uint64_t first, uint64_t *late, uint64_t *paced)
{
    *late = *paced = 0;
    if (e->next_step > first + EXECUTE_KEPT_STEPS) {
        first = e->next_step - EXECUTE_KEPT_STEPS;
    }
    for (uint64_t step = first; step < e->next_step; step++) {
        for (size_t i = 0; i < e->graph->n_ops; i++) {
            const struct record *r = record_of(e, step * e->graph->n_ops + i);
            bool alone = e->graph->ops[i].lane != LANE_COMM;
            *late += alone && r->late;
            *paced += alone && r->paced;
        }
    }
}
