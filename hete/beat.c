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

struct beat {
    struct beat_wire wire;
    int rank, ranks;
    struct comm_config config;
    double beat_s, tick_s;

    pthread_t thread;
    int wake;             // an eventfd: `stop` or `giving_up` has been set
    pthread_mutex_t lock; // of what follows
    pthread_cond_t told;
    struct beat_doing own;
    bool waits;
    uint64_t moves;              // operations of this rank's begun, and messages done
    bool stop, giving_up, ended; // ended: the thread tells nobody anything any more
    struct error why;            // set before `failed`
    atomic_bool failed;

    // The thread's own.
    struct beat_place *places;   // [ranks]
    struct pollfd *polls;        // [1 + ranks]: wake, then this machine's processes; fd < 0: none
    struct beat_doing neighbour; // the right one
    double silence_s;            // of the right neighbour
    uint64_t seen;               // of `moves`
    double stalled_s;            // since when all wait, and nothing moves
    double sent_s;               // when the last beat left
    int dead;                    // a process that the kernel says has ended; -1: none
    double dead_s;               // since when
};

// ---- what is said -------------------------------------------------------------------------------

// "'step 3', 'exchange of unit 2'"
static const char *say_doing(char out[2 * BEAT_DOING_BYTES + 16], const struct beat_doing *d)
{
    const char *a = d->text[COMM_MAIN], *b = d->text[COMM_LANE];
    snprintf(out, 2 * BEAT_DOING_BYTES + 16, "'%s%s%s'", a, *a && *b ? "', '" : "",
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

static struct beat_doing own_doing(struct beat *b)
{
    pthread_mutex_lock(&b->lock);
    struct beat_doing d = b->own;
    bool waits = b->waits || d.leaves;
    pthread_mutex_unlock(&b->lock);
    d.waiting = !waits ? 0 : b->neighbour.waiting < b->ranks ? b->neighbour.waiting + 1 : b->ranks;
    return d;
}

static void tell_all(struct beat *b, enum beat_kind kind, const char *text, int except)
{
    struct beat_message m = {.kind = kind, .doing = own_doing(b)};
    snprintf(m.text, sizeof m.text, "%.*s", (int)sizeof m.text - 1, text);
    b->wire.tell(b->wire.ctx, &m, except);
}

// The last thing the thread does. The calls that wait fail after `gone` has returned: if it ends
// the process, only one message is seen.
static void end(struct beat *b, const char *what)
{
    char doing[2 * BEAT_DOING_BYTES + 16];
    struct beat_doing own = own_doing(b);
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
    char who[160], doing[2 * BEAT_DOING_BYTES + 16], text[sizeof((struct beat_message *)0)->text];
    say_rank(b, rank, who, sizeof who);
    int n = snprintf(text, sizeof text, "%s %s", who, how);
    if (rank == (b->rank + 1) % b->ranks && n > 0 && (size_t)n < sizeof text) {
        snprintf(text + n, sizeof text - (size_t)n, "; it was last at %s",
                 say_doing(doing, &b->neighbour));
    }
    tell_all(b, BEAT_GONE, text, is_gone ? rank : -1);
    end(b, text);
}

// ---- what is heard ------------------------------------------------------------------------------

// Takes every message that is there. False: one of them ends this.
static bool listen(struct beat *b)
{
    struct beat_message m;
    char who[160], text[sizeof m.text + 200];
    for (int from; b->wire.hear(b->wire.ctx, &m, &from);) {
        if (m.kind == BEAT_FAILED) {
            say_rank(b, from, who, sizeof who);
            snprintf(text, sizeof text, "%s has failed: %s", who, m.text);
            end(b, text);
            return false;
        }
        if (m.kind == BEAT_GONE) {
            end(b, m.text);
            return false;
        }
        b->neighbour = m.doing;
        b->silence_s = 0;
    }
    return true;
}

static void send_beat(struct beat *b, double now)
{
    struct beat_message m = {.kind = BEAT_ALIVE, .doing = own_doing(b)};
    if (b->wire.send(b->wire.ctx, &m)) { // else the watcher sleeps: no heap of messages for it
        b->sent_s = now;
    }
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

// Do all wait for each other, for too long?
static bool is_stalled(struct beat *b, const struct beat_doing *own, double awake_s)
{
    char text[sizeof((struct beat_message *)0)->text];
    pthread_mutex_lock(&b->lock);
    bool moves = b->moves != b->seen;
    b->seen = b->moves;
    pthread_mutex_unlock(&b->lock);
    b->stalled_s = !moves && own->waiting == b->ranks ? b->stalled_s + awake_s : 0;
    if (b->stalled_s < b->config.stall_s + 2 * b->ranks * b->beat_s) {
        return false;
    }
    snprintf(text, sizeof text,
             "all %d ranks have done nothing but wait for each other for %.0f s: something between "
             "them is stuck",
             b->ranks, b->stalled_s);
    tell_all(b, BEAT_GONE, text, -1);
    end(b, text);
    return true;
}

static bool judge(struct beat *b, double now, double awake_s)
{
    struct beat_doing own = own_doing(b);
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
    const struct beat_doing *n = &b->neighbour;
    for (int t = 0; n->leaves && t < COMM_THREADS; t++) {
        if (n->begun[t] < own.begun[t]) {
            accuse(b, right, false, "leaves, although the others wait for it");
            return false;
        }
    }
    return !is_stalled(b, &own, awake_s);
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
            tell_all(b, BEAT_FAILED, b->why.text, -1);
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
    snprintf(b->own.text[thread], BEAT_DOING_BYTES, "%s", text);
    pthread_mutex_unlock(&b->lock);
}

void beat_begin(struct beat *b, enum comm_thread thread)
{
    pthread_mutex_lock(&b->lock);
    b->own.begun[thread]++;
    b->moves++;
    pthread_mutex_unlock(&b->lock);
}

void beat_moves(struct beat *b)
{
    pthread_mutex_lock(&b->lock);
    b->moves++;
    pthread_mutex_unlock(&b->lock);
}

void beat_waits(struct beat *b, bool waits)
{
    pthread_mutex_lock(&b->lock);
    b->waits = waits;
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
    // The thread takes a second at most, unless it is stuck in its wire.
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
    free(b);
}

void beat_place(struct beat_place *own)
{
    struct stat space = {0};
    memset(own, 0, sizeof *own);
    gethostname(own->host, sizeof own->host - 1);
    own->pid = getpid();
    if (stat("/proc/self/ns/pid", &space) == 0) {
        own->space[0] = space.st_dev;
        own->space[1] = space.st_ino;
    }
}

// A handle on every other process of this machine.
static void find_processes(struct beat *b)
{
    const struct beat_place *own = b->places + b->rank;
    for (int i = 0; i < b->ranks; i++) {
        const struct beat_place *p = b->places + i;
        bool here = i != b->rank && p->space[1] && strcmp(p->host, own->host) == 0 &&
                    memcmp(p->space, own->space, sizeof p->space) == 0;
        // Where the kernel has no such call, its silence will tell.
        int fd = here ? (int)syscall(SYS_pidfd_open, (pid_t)p->pid, 0) : -1;
        b->polls[1 + i] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
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
    b->polls = calloc((size_t)ranks + 1, sizeof *b->polls);
    for (int i = 0; b->polls && i < ranks + 1; i++) {
        b->polls[i].fd = -1;
    }
    b->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!b->places || !b->polls || b->wake < 0) {
        free_beat(b);
        return NULL;
    }
    b->polls[0] = (struct pollfd){.fd = b->wake, .events = POLLIN};
    return b;
}

int beat_open(struct beat **out, const struct beat_wire *wire, int rank, int ranks,
              const struct beat_place *places, const struct comm_config *config, struct error *err)
{
    struct beat *b = new_beat(ranks);
    if (!b) {
        wire->close(wire->ctx, false);
        return error_set(err, STATUS_FAIL, "no memory or no file handle to watch %d ranks", ranks);
    }
    b->rank = rank;
    b->wire = *wire;
    b->config = *config;
    b->beat_s = config->silence_s < 10 ? config->silence_s / 10 : 1;
    b->tick_s = b->beat_s / 4;
    b->dead = -1;
    memcpy(b->places, places, (size_t)ranks * sizeof *places);
    find_processes(b);
    if (pthread_create(&b->thread, NULL, beat_main, b)) {
        wire->close(wire->ctx, false);
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
    b->wire.close(b->wire.ctx, atomic_load(&b->failed));
    free_beat(b);
}
