// Who tells whom, and when somebody is called gone: see beat.h.
#include "hete/beat.h"
#include "kernels/clock.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { DOING_BYTES = 96, TAG = 0 };

enum message_kind { MESSAGE_BEAT, MESSAGE_FAILED, MESSAGE_GONE };

// What a rank knows of itself, and its watcher of it.
struct doing {
    char text[COMM_THREADS][DOING_BYTES];
    uint64_t begun[COMM_THREADS]; // operations
    bool leaves;
};

struct message {
    enum message_kind kind;
    struct doing doing;
    char text[512]; // of FAILED, why; of GONE, who and how it was found
};

// Where a rank runs. Process numbers mean something in their own name space alone.
struct place {
    char host[64];
    int64_t pid;
    uint64_t space[2];
};

struct beat {
    MPI_Comm comm;
    int rank, ranks;
    struct comm_config config;
    double beat_s, tick_s;

    pthread_t thread;
    int wake;             // an eventfd: `stop` or `giving_up` has been set
    pthread_mutex_t lock; // of what follows
    pthread_cond_t told;
    struct doing own;
    bool stop, giving_up, ended; // ended: the thread tells nobody anything any more
    struct error why;            // set before `failed`
    atomic_bool failed;

    // The thread's own.
    struct place *places;  // [ranks]
    struct pollfd *polls;  // [1 + ranks]: wake, then the processes of this machine; fd < 0: none
    MPI_Request *tellings; // [ranks]
    MPI_Request in, out;   // one message may be under way in, one beat out
    struct message message_in, message_out, message_all;
    struct doing neighbour; // the right one
    double silence_s;       // of the right neighbour
    double sent_s;          // when the last beat left
    int dead;               // a process that the kernel says has ended; -1: none
    double dead_s;          // since when
};

int mpi_error(int code, const char *what, struct error *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return error_set(err, STATUS_FAIL, "MPI: %s: %s", what, text);
}

// ---- what is said -------------------------------------------------------------------------------

// "'step 3', 'exchange of unit 2'"
static const char *say_doing(char out[2 * DOING_BYTES + 16], const struct doing *d)
{
    const char *a = d->text[COMM_MAIN], *b = d->text[COMM_LANE];
    snprintf(out, 2 * DOING_BYTES + 16, "'%s%s%s'", a, *a && *b ? "', '" : "",
             *b   ? b
             : *a ? ""
                  : "nothing that it named");
    return out;
}

static void say_rank(struct beat *b, int rank, char *out, size_t bytes)
{
    snprintf(out, bytes, "rank %d of %d (process %lld on %s)", rank, b->ranks,
             (long long)b->places[rank].pid, b->places[rank].host);
}

static struct doing own_doing(struct beat *b)
{
    pthread_mutex_lock(&b->lock);
    struct doing d = b->own;
    pthread_mutex_unlock(&b->lock);
    return d;
}

// To all but oneself and `except`. Who has not taken it after a second does not get it.
static void tell_all(struct beat *b, enum message_kind kind, const char *text, int except)
{
    struct message *m = &b->message_all;
    m->kind = kind;
    m->doing = own_doing(b);
    snprintf(m->text, sizeof m->text, "%s", text);
    for (int i = 0; i < b->ranks; i++) {
        b->tellings[i] = MPI_REQUEST_NULL;
        if (i != b->rank && i != except) {
            MPI_Isend(m, sizeof *m, MPI_BYTE, i, TAG, b->comm, &b->tellings[i]);
        }
    }
    double until = clock_s() + 1;
    for (int all = 0; !all && clock_s() < until; clock_sleep_until(clock_s() + 1e-3)) {
        if (MPI_Testall(b->ranks, b->tellings, &all, MPI_STATUSES_IGNORE)) {
            return;
        }
    }
}

// The last thing the thread does. The calls that wait fail after `gone` has returned: if it ends
// the process, only one message is seen.
static void end(struct beat *b, const char *what)
{
    char doing[2 * DOING_BYTES + 16];
    struct doing own = own_doing(b);
    struct error err;
    error_set(&err, STATUS_FAIL, "%s; rank %d was at %s", what, b->rank, say_doing(doing, &own));
    pthread_mutex_lock(&b->lock);
    bool quiet = b->giving_up || !b->config.gone;
    pthread_mutex_unlock(&b->lock);
    if (!quiet) {
        b->config.gone(b->config.ctx, &err);
    }
    pthread_mutex_lock(&b->lock);
    b->why = err;
    b->ended = true;
    atomic_store(&b->failed, true);
    pthread_mutex_unlock(&b->lock);
}

// This rank has found out. Whoever is gone is not told, it could be waited for.
static void accuse(struct beat *b, int rank, bool is_gone, const char *how)
{
    char who[160], doing[2 * DOING_BYTES + 16], text[sizeof b->message_all.text];
    say_rank(b, rank, who, sizeof who);
    int n = snprintf(text, sizeof text, "%s %s", who, how);
    if (rank == (b->rank + 1) % b->ranks && n > 0 && (size_t)n < sizeof text) {
        snprintf(text + n, sizeof text - (size_t)n, "; it was last at %s",
                 say_doing(doing, &b->neighbour));
    }
    tell_all(b, MESSAGE_GONE, text, is_gone ? rank : -1);
    end(b, text);
}

// ---- what is heard ------------------------------------------------------------------------------

// Takes every message that is there. False: one of them ends this.
static bool listen(struct beat *b)
{
    for (;;) {
        int there = 0;
        MPI_Status status;
        if (MPI_Test(&b->in, &there, &status) || !there) {
            return true;
        }
        const struct message *m = &b->message_in;
        char who[160], text[sizeof m->text + 200];
        if (m->kind == MESSAGE_FAILED) {
            say_rank(b, status.MPI_SOURCE, who, sizeof who);
            snprintf(text, sizeof text, "%s has failed: %s", who, m->text);
            end(b, text);
            return false;
        }
        if (m->kind == MESSAGE_GONE) {
            end(b, m->text);
            return false;
        }
        b->neighbour = m->doing;
        b->silence_s = 0;
        MPI_Irecv(&b->message_in, sizeof b->message_in, MPI_BYTE, MPI_ANY_SOURCE, TAG, b->comm,
                  &b->in);
    }
}

static void send_beat(struct beat *b, double now)
{
    int free = 1;
    MPI_Test(&b->out, &free, MPI_STATUS_IGNORE);
    if (!free) {
        return; // the watcher sleeps: no heap of messages for it
    }
    b->message_out.kind = MESSAGE_BEAT;
    b->message_out.doing = own_doing(b);
    MPI_Isend(&b->message_out, offsetof(struct message, text), MPI_BYTE,
              (b->rank + b->ranks - 1) % b->ranks, TAG, b->comm, &b->out);
    b->sent_s = now;
}

// Of the processes of this machine, has one ended? Its last words may still be under way, so it
// is given a moment; a little less by its left neighbour, who knows what it was doing.
static bool look_for_dead(struct beat *b, double now, bool leaves)
{
    for (int i = 0; i < b->ranks; i++) {
        struct pollfd *p = b->polls + 1 + i;
        if (p->fd >= 0 && p->revents) {
            close(p->fd);
            p->fd = -1;
            if (b->dead < 0) {
                b->dead = i;
                b->dead_s = now;
            }
        }
    }
    double moment_s = b->dead == (b->rank + 1) % b->ranks ? 0.2 : 0.4;
    if (b->dead < 0 || leaves || now - b->dead_s < moment_s) {
        return true;
    }
    accuse(b, b->dead, true, "has ended without a word: killed, or out of memory");
    return false;
}

static bool judge(struct beat *b, double now, double awake_s)
{
    struct doing own = own_doing(b);
    int right = (b->rank + 1) % b->ranks;
    char how[160];
    if (!look_for_dead(b, now, own.leaves)) {
        return false;
    }
    b->silence_s += awake_s;
    if (b->silence_s >= b->config.silence_s) {
        snprintf(how, sizeof how,
                 "has not been heard of for %.3g s: stopped, out of memory or cut off",
                 b->silence_s);
        accuse(b, right, true, how);
        return false;
    }
    const struct doing *n = &b->neighbour;
    for (int t = 0; n->leaves && t < COMM_THREADS; t++) {
        if (n->begun[t] < own.begun[t]) {
            accuse(b, right, false, "leaves, although the others wait for it");
            return false;
        }
    }
    return true;
}

static void *beat_main(void *arg)
{
    struct beat *b = arg;
    double last = clock_s();
    bool left = false;
    for (;;) {
        // Until the next look, or until there is something to see.
        double sleep_s = b->dead >= 0 ? 0.01 : b->tick_s;
        poll(b->polls, (nfds_t)b->ranks + 1, (int)(1e3 * sleep_s) + 1);
        double now = clock_s(), awake_s = now - last < 2 * sleep_s ? now - last : 2 * sleep_s;
        last = now;
        if (b->polls[0].revents) {
            uint64_t count;
            (void)!read(b->wake, &count, sizeof count);
        }
        pthread_mutex_lock(&b->lock);
        bool stop = b->stop, giving_up = b->giving_up, leaves = b->own.leaves;
        pthread_mutex_unlock(&b->lock);
        if (stop) {
            return NULL;
        }
        if (giving_up) {
            tell_all(b, MESSAGE_FAILED, b->why.text, -1);
            break;
        }
        if (!listen(b)) {
            break;
        }
        if (now - b->sent_s >= b->beat_s || leaves != left) {
            left = leaves;
            send_beat(b, now);
        }
        if (!judge(b, now, awake_s)) {
            break;
        }
    }
    pthread_mutex_lock(&b->lock);
    b->ended = true;
    pthread_cond_broadcast(&b->told);
    pthread_mutex_unlock(&b->lock);
    return NULL;
}

// ---- the other threads --------------------------------------------------------------------------

static void wake(struct beat *b)
{
    uint64_t one = 1;
    (void)!write(b->wake, &one, sizeof one);
}

void beat_doing(struct beat *b, enum comm_thread thread, const char *text)
{
    pthread_mutex_lock(&b->lock);
    snprintf(b->own.text[thread], DOING_BYTES, "%s", text);
    pthread_mutex_unlock(&b->lock);
}

void beat_begin(struct beat *b, enum comm_thread thread)
{
    pthread_mutex_lock(&b->lock);
    b->own.begun[thread]++;
    pthread_mutex_unlock(&b->lock);
}

void beat_leave(struct beat *b)
{
    pthread_mutex_lock(&b->lock);
    b->own.leaves = true;
    pthread_mutex_unlock(&b->lock);
    wake(b);
}

void beat_abort(struct beat *b, const char *why)
{
    pthread_mutex_lock(&b->lock);
    if (!b->ended && !b->giving_up) {
        b->giving_up = true;
        error_set(&b->why, STATUS_FAIL, "%s", why);
        atomic_store(&b->failed, true);
        wake(b);
    }
    // The thread takes a second at most, unless it is stuck in MPI.
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 3;
    while (!b->ended && pthread_cond_clockwait(&b->told, &b->lock, CLOCK_MONOTONIC, &until) == 0) {
    }
    pthread_mutex_unlock(&b->lock);
}

bool beat_failed(struct beat *b, struct error *err)
{
    if (!atomic_load_explicit(&b->failed, memory_order_acquire)) {
        return false;
    }
    pthread_mutex_lock(&b->lock);
    *err = b->why;
    pthread_mutex_unlock(&b->lock);
    return true;
}

// ---- start and end ------------------------------------------------------------------------------

static void free_beat(struct beat *b)
{
    for (int i = 0; b->polls && i < b->ranks + 1; i++) {
        if (b->polls[i].fd >= 0) {
            close(b->polls[i].fd);
        }
    }
    pthread_cond_destroy(&b->told);
    pthread_mutex_destroy(&b->lock);
    free(b->places);
    free(b->polls);
    free(b->tellings);
    free(b);
}

// Everybody's place, and a handle on every other process of this machine.
static int find_places(struct beat *b, struct error *err)
{
    struct place *own = b->places + b->rank;
    struct stat space = {0};
    gethostname(own->host, sizeof own->host - 1);
    own->pid = getpid();
    if (stat("/proc/self/ns/pid", &space) == 0) {
        own->space[0] = space.st_dev;
        own->space[1] = space.st_ino;
    }
    int code = MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, b->places, sizeof *own, MPI_BYTE, b->comm);
    if (code) {
        return mpi_error(code, "exchanging the names of machines", err);
    }
    for (int i = 0; i < b->ranks; i++) {
        const struct place *p = b->places + i;
        bool here = i != b->rank && p->space[1] && strcmp(p->host, own->host) == 0 &&
                    memcmp(p->space, own->space, sizeof p->space) == 0;
        // Where the kernel has no such call, its silence will tell.
        int fd = here ? (int)syscall(SYS_pidfd_open, (pid_t)p->pid, 0) : -1;
        b->polls[1 + i] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    return STATUS_OK;
}

static struct beat *new_beat(int ranks)
{
    struct beat *b = calloc(1, sizeof *b);
    if (!b) {
        return NULL;
    }
    b->ranks = ranks;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->told, NULL);
    b->places = calloc((size_t)ranks, sizeof *b->places);
    b->tellings = calloc((size_t)ranks, sizeof *b->tellings);
    b->polls = calloc((size_t)ranks + 1, sizeof *b->polls);
    for (int i = 0; b->polls && i < ranks + 1; i++) {
        b->polls[i].fd = -1;
    }
    b->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!b->places || !b->tellings || !b->polls || b->wake < 0) {
        free_beat(b);
        return NULL;
    }
    b->polls[0] = (struct pollfd){.fd = b->wake, .events = POLLIN};
    return b;
}

int beat_open(struct beat **out, MPI_Comm comm, const struct comm_config *config, struct error *err)
{
    int ranks;
    MPI_Comm_size(comm, &ranks);
    struct beat *b = new_beat(ranks);
    if (!b) {
        return error_set(err, STATUS_FAIL, "no memory or no file handle to watch %d ranks", ranks);
    }
    MPI_Comm_rank(comm, &b->rank);
    b->comm = comm;
    b->config = *config;
    b->beat_s = config->silence_s < 10 ? config->silence_s / 10 : 1;
    b->tick_s = b->beat_s / 4;
    b->in = b->out = MPI_REQUEST_NULL;
    b->dead = -1;
    if (find_places(b, err)) {
        free_beat(b);
        return err->status;
    }
    MPI_Irecv(&b->message_in, sizeof b->message_in, MPI_BYTE, MPI_ANY_SOURCE, TAG, comm, &b->in);
    if (pthread_create(&b->thread, NULL, beat_main, b)) {
        free_beat(b);
        return error_set(err, STATUS_FAIL, "no thread to watch the other ranks");
    }
    *out = b;
    return STATUS_OK;
}

void beat_close(struct beat *b)
{
    pthread_mutex_lock(&b->lock);
    b->stop = true;
    pthread_mutex_unlock(&b->lock);
    wake(b);
    pthread_join(b->thread, NULL);
    if (atomic_load(&b->failed)) {
        return; // what was told may still be under way, from b's memory: the process ends with it
    }
    MPI_Wait(&b->out, MPI_STATUS_IGNORE); // short enough to leave without the other's doing
    MPI_Cancel(&b->in);
    MPI_Wait(&b->in, MPI_STATUS_IGNORE);
    free_beat(b);
}
