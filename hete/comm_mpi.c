// The transport over MPI. The main thread, the lane and the heartbeat have a communicator each.
//
// Everything is non-blocking inside: a call looks after its requests until they are done or the
// heartbeat (beat.h) says that a rank is gone. Exchange and gather are messages between pairs of
// ranks: in round r rank i sends to i + r and receives from i - r, with some rounds under way at
// once. MPI's own all-to-all of unequal pieces counts in int, and its non-blocking ones are the
// same messages.
#include "hete/beat.h"
#include "hete/transport.h"
#include "kernels/bf16.h"
#include "kernels/clock.h"

#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum {
    WINDOW = 16, // messages under way in each direction
    TAG = 0,
    // Of what MPI's collectives get at once: Open MPI's non-blocking ones cut it into parts, and
    // call themselves for each part that is there already, until there is no stack left.
    SEGMENT_BYTES = 1 << 20,
};

struct mpi {
    struct comm comm;
    struct comm_config config;
    MPI_Comm main, lane, beats;
    MPI_Op add_bf16;
    struct beat *beat; // NULL with one rank
    bool left;
};

// ---- limits on MPI's own start and end ----------------------------------------------------------

// MPI_Init and MPI_Finalize wait for all ranks, and the heartbeat cannot run there.
struct limit {
    const struct comm_config *config;
    const char *what;
    double limit_s;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

static void *limit_main(void *arg)
{
    struct limit *l = arg;
    double until = clock_s() + l->limit_s;
    struct timespec t = {.tv_sec = (time_t)until};
    t.tv_nsec = (long)((until - (double)t.tv_sec) * 1e9);
    pthread_mutex_lock(&l->lock);
    while (!l->done && pthread_cond_clockwait(&l->cond, &l->lock, CLOCK_MONOTONIC, &t) == 0) {
    }
    bool done = l->done;
    pthread_mutex_unlock(&l->lock);
    if (!done && l->config->gone) {
        struct error err;
        error_set(&err, STATUS_FAIL, "%s has not come back for %.3g s: is a rank missing?", l->what,
                  l->limit_s);
        l->config->gone(l->config->ctx, &err);
    }
    return NULL;
}

static int limit_begin(struct limit *l, const struct comm_config *config, const char *what,
                       double limit_s, struct error *err)
{
    *l = (struct limit){.config = config, .what = what, .limit_s = limit_s};
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->cond, NULL);
    return pthread_create(&l->thread, NULL, limit_main, l)
               ? error_set(err, STATUS_FAIL, "no thread to watch %s", what)
               : STATUS_OK;
}

static void limit_end(struct limit *l)
{
    pthread_mutex_lock(&l->lock);
    l->done = true;
    pthread_cond_signal(&l->cond);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    pthread_cond_destroy(&l->cond);
    pthread_mutex_destroy(&l->lock);
}

// ---- waiting ------------------------------------------------------------------------------------

// The message of an MPI function that did not return MPI_SUCCESS.
static int mpi_error(int code, const char *what, struct error *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return error_set(err, STATUS_FAIL, "MPI: %s: %s", what, text);
}

// Between two looks at what is under way: soon again, then with the core left to others, then
// asleep, the longer the longer it lasts (a hundredth of that, to 1 ms). MPI moves data only while
// somebody looks, so looks begin anew with every message that is done.
static void rest(unsigned *looks)
{
    if (++*looks > 1000) {
        double sleep_s = 50e-6 + 0.25e-6 * (*looks - 1000);
        clock_sleep_until(clock_s() + (sleep_s < 1e-3 ? sleep_s : 1e-3));
    } else if (*looks > 50) {
        sched_yield();
    }
}

// Until it is done. After a failure MPI may still write where it was told to.
static int await(struct mpi *m, MPI_Request *request, const char *what, struct error *err)
{
    unsigned looks = 0;
    for (int done = 0;; rest(&looks)) {
        int code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code) {
            return mpi_error(code, what, err);
        }
        if (done) {
            beat_moves(m->beat);
            return STATUS_OK;
        }
        if (beat_failed(m->beat, err)) {
            return err->status;
        }
    }
}

// A call of MPI has begun something for the main thread, or failed.
static int begun(struct mpi *m, int code, MPI_Request *request, const char *what, struct error *err)
{
    return code ? mpi_error(code, what, err) : await(m, request, what, err);
}

static size_t shorter(const struct mpi *m, size_t bytes)
{
    return m->config.message_bytes < bytes ? m->config.message_bytes : bytes;
}

// ---- the main thread ----------------------------------------------------------------------------

// Of rank i into all[i], also where `mine` is there already.
static int gather_small(struct mpi *m, MPI_Comm comm, enum comm_thread thread, const void *mine,
                        void *all, size_t bytes, struct error *err)
{
    MPI_Request request;
    if (bytes > INT_MAX) {
        return error_set(err, STATUS_FAIL, "all_gather of %zu bytes: for small things", bytes);
    }
    beat_begin(m->beat, thread);
    const void *from = mine == (char *)all + (size_t)m->comm.rank * bytes ? MPI_IN_PLACE : mine;
    int code =
        MPI_Iallgather(from, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, comm, &request);
    return begun(m, code, &request, "all-gather", err);
}

static int all_gather(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    return gather_small(m, m->main, COMM_MAIN, mine, all, bytes, err);
}

static int broadcast(struct comm *c, void *x, size_t bytes, int from, struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    size_t most = shorter(m, SEGMENT_BYTES);
    beat_begin(m->beat, COMM_MAIN);
    for (size_t at = 0; at < bytes; at += most) {
        MPI_Request request;
        int n = (int)(bytes - at < most ? bytes - at : most);
        int code = MPI_Ibcast((char *)x + at, n, MPI_BYTE, from, m->main, &request);
        if (begun(m, code, &request, "broadcast", err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

static int barrier(struct comm *c, struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    MPI_Request request;
    beat_begin(m->beat, COMM_MAIN);
    int code = MPI_Ibarrier(m->main, &request);
    return begun(m, code, &request, "barrier", err);
}

// ---- the lane -----------------------------------------------------------------------------------

// What this rank sends, or what it receives, in the order in which it does; the other side of a
// pair goes through the same bytes in the same order.
struct flow {
    const struct comm *comm;
    bool sends;
    char *(*place)(const struct flow *, int peer, size_t *bytes);
    char *x, *stage;
    const struct comm_pieces *p;
    int round;   // 1 .. ranks - 1
    size_t done; // bytes of this round that are under way or there
};

static char *piece(const struct flow *f, int rank, size_t *bytes)
{
    *bytes = f->p->n[rank] * f->p->element;
    return f->x + f->p->first[rank] * f->p->element;
}

static char *exchange_place(const struct flow *f, int peer, size_t *bytes)
{
    if (f->sends) {
        return piece(f, peer, bytes);
    }
    *bytes = f->p->n[f->comm->rank] * f->p->element;
    return f->stage + (size_t)peer * *bytes;
}

static char *gather_place(const struct flow *f, int peer, size_t *bytes)
{
    return piece(f, f->sends ? f->comm->rank : peer, bytes);
}

// The next message is begun. *request stays MPI_REQUEST_NULL where there is none.
static int next_message(struct mpi *m, struct flow *f, MPI_Request *request)
{
    int ranks = m->comm.ranks;
    for (; f->round < ranks; f->round++, f->done = 0) {
        int peer = (m->comm.rank + (f->sends ? f->round : ranks - f->round)) % ranks;
        size_t bytes;
        char *at = f->place(f, peer, &bytes) + f->done;
        if (f->done < bytes) {
            size_t left = bytes - f->done, most = m->config.message_bytes;
            int n = (int)(left < most ? left : most);
            f->done += (size_t)n;
            return f->sends ? MPI_Isend(at, n, MPI_BYTE, peer, TAG, m->lane, request)
                            : MPI_Irecv(at, n, MPI_BYTE, peer, TAG, m->lane, request);
        }
    }
    return MPI_SUCCESS;
}

// Both flows until their ends. No rank waits for ever: of all messages that are not done, one of
// the lowest round and place in it is first in its sender's window and in its receiver's.
static int run_flows(struct mpi *m, struct flow *in, struct flow *out, struct error *err)
{
    MPI_Request requests[2 * WINDOW];
    int ready[2 * WINDOW], n = 2 * WINDOW;
    unsigned looks = 0;
    beat_begin(m->beat, COMM_LANE);
    for (int i = 0; i < 2 * WINDOW; i++) {
        requests[i] = MPI_REQUEST_NULL;
        ready[i] = i;
    }
    for (;;) {
        for (int i = 0; i < n; i++) {
            int code = next_message(m, ready[i] < WINDOW ? in : out, requests + ready[i]);
            if (code) {
                return mpi_error(code, "starting a message", err);
            }
        }
        looks = n > 0 ? 0 : looks;
        int code = MPI_Testsome(2 * WINDOW, requests, &n, ready, MPI_STATUSES_IGNORE);
        if (code) {
            return mpi_error(code, "a message", err);
        }
        if (n == MPI_UNDEFINED) { // none is under way
            return STATUS_OK;
        }
        if (beat_failed(m->beat, err)) {
            return err->status;
        }
        if (n == 0) {
            rest(&looks);
        } else {
            beat_moves(m->beat);
        }
    }
}

static int exchange(struct comm *c, void *stage, const void *x, const struct comm_pieces *p,
                    struct error *err)
{
    struct flow in = {.comm = c,
                      .place = exchange_place,
                      .x = (char *)x, // is read only
                      .stage = stage,
                      .p = p,
                      .round = 1};
    struct flow out = in;
    out.sends = true;
    size_t bytes;
    const char *own = piece(&in, c->rank, &bytes);
    if (bytes > 0) {
        memcpy((char *)stage + (size_t)c->rank * bytes, own, bytes);
    }
    return run_flows((struct mpi *)c, &in, &out, err);
}

static int gather(struct comm *c, void *x, const void *mine, const struct comm_pieces *p,
                  struct error *err)
{
    struct flow in = {.comm = c, .place = gather_place, .x = x, .p = p, .round = 1};
    struct flow out = in;
    out.sends = true;
    size_t bytes;
    char *own = piece(&in, c->rank, &bytes);
    if (bytes > 0 && own != mine) {
        memcpy(own, mine, bytes);
    }
    return run_flows((struct mpi *)c, &in, &out, err);
}

static int share(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    return gather_small(m, m->lane, COMM_LANE, mine, all, bytes, err);
}

static void add_bf16(void *in, void *inout, int *n, MPI_Datatype *type)
{
    const uint16_t *x = in;
    uint16_t *y = inout;
    (void)type;
    for (int i = 0; i < *n; i++) {
        y[i] = bf16_round(bf16_load(y[i]) + bf16_load(x[i]));
    }
}

// One reduction for each piece, rooted where the piece belongs, some at once: as many bytes as a
// reduce-scatter, without its demand that pieces lie side by side and count in int.
static int reduce(struct comm *c, void *sum, const void *x, const struct comm_pieces *p,
                  struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    MPI_Request requests[WINDOW];
    bool fp32 = p->element == sizeof(float);
    MPI_Datatype type = fp32 ? MPI_FLOAT : MPI_UINT16_T;
    MPI_Op op = fp32 ? MPI_SUM : m->add_bf16;
    size_t most = (64 << 10) / p->element, begun_ones = 0;
    beat_begin(m->beat, COMM_LANE);
    for (int i = 0; i < WINDOW; i++) {
        requests[i] = MPI_REQUEST_NULL;
    }
    for (int root = 0; root < c->ranks; root++) {
        for (size_t at = 0; at < p->n[root]; at += most) {
            size_t n = p->n[root] - at < most ? p->n[root] - at : most;
            MPI_Request *request = requests + begun_ones++ % WINDOW;
            if (await(m, request, "reduction", err)) { // the one that was there
                return err->status;
            }
            const char *from = (const char *)x + (p->first[root] + at) * p->element;
            char *to = c->rank == root ? (char *)sum + at * p->element : NULL;
            int code = MPI_Ireduce(from, to, (int)n, type, op, root, m->lane, request);
            if (code) {
                return mpi_error(code, "starting a reduction", err);
            }
        }
    }
    for (int i = 0; i < WINDOW; i++) {
        if (await(m, requests + i, "reduction", err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

// ---- what the heartbeat says --------------------------------------------------------------------

struct wire {
    MPI_Comm comm;
    int rank, ranks;
    MPI_Request *tellings; // [ranks]
    MPI_Request in, out;   // one message may be under way in, one beat out
    struct beat_message message_in, message_out, message_all;
};

static void listen_for_more(struct wire *w)
{
    MPI_Irecv(&w->message_in, sizeof w->message_in, MPI_BYTE, MPI_ANY_SOURCE, TAG, w->comm, &w->in);
}

static bool send_beat(void *ctx, const struct beat_message *m)
{
    struct wire *w = ctx;
    int free = 1;
    MPI_Test(&w->out, &free, MPI_STATUS_IGNORE);
    if (free) {
        w->message_out = *m;
        MPI_Isend(&w->message_out, offsetof(struct beat_message, text), MPI_BYTE,
                  (w->rank + w->ranks - 1) % w->ranks, TAG, w->comm, &w->out);
    }
    return free;
}

// Who has not taken it after a second does not get it.
static void tell_all(void *ctx, const struct beat_message *m, int except)
{
    struct wire *w = ctx;
    w->message_all = *m;
    for (int i = 0; i < w->ranks; i++) {
        w->tellings[i] = MPI_REQUEST_NULL;
        if (i != w->rank && i != except) {
            MPI_Isend(&w->message_all, sizeof *m, MPI_BYTE, i, TAG, w->comm, &w->tellings[i]);
        }
    }
    double until = clock_s() + 1;
    for (int all = 0; !all && clock_s() < until; clock_sleep_until(clock_s() + 1e-3)) {
        if (MPI_Testall(w->ranks, w->tellings, &all, MPI_STATUSES_IGNORE)) {
            return;
        }
    }
}

static bool hear(void *ctx, struct beat_message *m, int *from)
{
    struct wire *w = ctx;
    int there = 0;
    MPI_Status status;
    if (MPI_Test(&w->in, &there, &status) || !there) {
        return false;
    }
    *m = w->message_in;
    *from = status.MPI_SOURCE;
    listen_for_more(w);
    return true;
}

static void close_wire(void *ctx, bool failed)
{
    struct wire *w = ctx;
    if (failed) {
        return; // what was told may still be under way, from w's memory: the process ends with it
    }
    MPI_Wait(&w->out, MPI_STATUS_IGNORE); // short enough to leave without the other's doing
    MPI_Cancel(&w->in);
    MPI_Wait(&w->in, MPI_STATUS_IGNORE);
    free(w->tellings);
    free(w);
}

static int open_beat(struct mpi *m, struct error *err)
{
    int ranks = m->comm.ranks;
    struct wire *w = calloc(1, sizeof *w);
    struct beat_place *places = calloc((size_t)ranks, sizeof *places);
    MPI_Request *tellings = calloc((size_t)ranks, sizeof(MPI_Request));
    if (!w || !places || !tellings) {
        free(w);
        free(places);
        free(tellings);
        return error_set(err, STATUS_FAIL, "no memory to watch %d ranks", ranks);
    }
    *w = (struct wire){.comm = m->beats,
                       .rank = m->comm.rank,
                       .ranks = ranks,
                       .tellings = tellings,
                       .in = MPI_REQUEST_NULL,
                       .out = MPI_REQUEST_NULL};
    struct beat_wire wire = {w, send_beat, tell_all, hear, close_wire};
    beat_place(places + m->comm.rank);
    int code = MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, places, sizeof *places, MPI_BYTE, m->beats);
    if (code == MPI_SUCCESS) {
        listen_for_more(w);
        beat_open(&m->beat, &wire, m->comm.rank, ranks, places, &m->config, err);
    } else {
        mpi_error(code, "exchanging the names of machines", err);
        free(tellings);
        free(w);
    }
    free(places);
    return m->beat ? STATUS_OK : err->status;
}

// ---- start and end ------------------------------------------------------------------------------

static void doing(struct comm *c, enum comm_thread thread, const char *text)
{
    beat_doing(((struct mpi *)c)->beat, thread, text);
}

static void give_up(struct comm *c, const char *why)
{
    beat_abort(((struct mpi *)c)->beat, why);
}

static void waits(struct comm *c, bool waits)
{
    beat_waits(((struct mpi *)c)->beat, waits);
}

static void begin(struct comm *c, enum comm_thread thread)
{
    beat_begin(((struct mpi *)c)->beat, thread);
}

static bool has_failed(struct comm *c, struct error *err)
{
    return beat_failed(((struct mpi *)c)->beat, err);
}

// All ranks are here when this returns STATUS_OK.
static int leave(struct comm *c, struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    MPI_Request request;
    m->left = true;
    beat_leave(m->beat);
    if (beat_failed(m->beat, err)) {
        return err->status;
    }
    return begun(m, MPI_Ibarrier(m->main, &request), &request, "the end", err);
}

static int close_mpi(struct comm *c, struct error *err)
{
    struct mpi *m = (struct mpi *)c;
    struct limit limit;
    int status = STATUS_OK;
    if (m->beat) {
        status = m->left ? STATUS_OK : leave(c, err);
        beat_close(m->beat);
    }
    if (status == STATUS_OK) {
        status = limit_begin(&limit, &m->config, "MPI_Finalize", m->config.silence_s, err);
    }
    if (status == STATUS_OK) {
        MPI_Finalize();
        limit_end(&limit);
    }
    free(m);
    return status;
}

static const struct transport mpi_transport = {
    .close = close_mpi,
    .give_up = give_up,
    .doing = doing,
    .waits = waits,
    .all_gather = all_gather,
    .broadcast = broadcast,
    .barrier = barrier,
    .exchange = exchange,
    .gather = gather,
    .share = share,
    .reduce = reduce,
    .begin = begin,
    .failed = has_failed,
    .leave = leave,
};

static int copy_communicator(MPI_Comm *out, struct error *err)
{
    int code = MPI_Comm_dup(MPI_COMM_WORLD, out);
    if (code == MPI_SUCCESS) {
        code = MPI_Comm_set_errhandler(*out, MPI_ERRORS_RETURN);
    }
    return code ? mpi_error(code, "a communicator", err) : STATUS_OK;
}

static int find_ranks(struct mpi *m, struct error *err)
{
    struct comm *c = &m->comm;
    MPI_Comm node;
    MPI_Comm_rank(MPI_COMM_WORLD, &c->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &c->ranks);
    int code = MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    if (code) {
        return mpi_error(code, "the ranks of a machine", err);
    }
    MPI_Comm_rank(node, &c->local_rank);
    MPI_Comm_size(node, &c->local_ranks);
    MPI_Comm_free(&node);
    return STATUS_OK;
}

static int start(struct mpi *m, int launched, struct error *err)
{
    int level;
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    if (code) {
        return error_set(err, STATUS_FAIL, "MPI_Init_thread failed (%d)", code);
    }
    if (level < MPI_THREAD_MULTIPLE) {
        return error_set(err, STATUS_FAIL,
                         "this MPI serves one thread at a time (level %d), MPI_THREAD_MULTIPLE is "
                         "needed: one that was built with it",
                         level);
    }
    if (find_ranks(m, err)) {
        return err->status;
    }
    if (launched > 0 && m->comm.ranks != launched) {
        return error_set(err, STATUS_FAIL,
                         "the launcher started %d ranks, MPI knows of %d: mpirun is not of the MPI "
                         "that this program was built with",
                         launched, m->comm.ranks);
    }
    if (m->comm.ranks == 1) {
        return STATUS_OK;
    }
    code = MPI_Op_create(add_bf16, 1, &m->add_bf16);
    if (code) {
        return mpi_error(code, "a sum of 16 bits", err);
    }
    return copy_communicator(&m->main, err) || copy_communicator(&m->lane, err) ||
                   copy_communicator(&m->beats, err) || open_beat(m, err)
               ? err->status
               : STATUS_OK;
}

int comm_mpi_open(struct comm **out, const struct comm_config *config, int launched,
                  struct error *err)
{
    struct limit limit;
    struct mpi *m = calloc(1, sizeof *m);
    if (!m) {
        return error_set(err, STATUS_FAIL, "no memory for a rank");
    }
    m->comm.transport = &mpi_transport;
    m->config = *config;
    int status = limit_begin(&limit, &m->config, "MPI_Init", config->start_s, err);
    if (status == STATUS_OK) {
        status = start(m, launched, err);
        limit_end(&limit);
    }
    if (status) {
        free(m); // MPI may be up: the process ends without its end, which could wait
        return status;
    }
    *out = &m->comm;
    return STATUS_OK;
}
