// nccl.c - NCCL between processes that each have a CPU runtime: what nccl.h declares, over shared
// memory.
//
// A communicator is a file in shared memory, named by the id: a ring of bytes for each pair of
// ranks. Calls become parts (send to a peer, receive from one, add what comes), the parts of a
// group one operation of the stream. It is done when all its parts are, and a send is when the
// other side has taken all of it. So what would make the real one wait for ever does so here, for
// a minute. Nothing runs by itself: an operation gets on whenever the runtime looks at it.
//
// Stricter than the real one: a communicator that does not block says ncclInProgress every other
// time, and queues the group only when it is asked about it; counts that differ are reported.
//
// SIM_NCCL_FAIL=N: the N-th group of this process ends in ncclRemoteError, as a cut network does.
#include "test/cuda/nccl.h"
#include "kernels/bf16.h"
#include "test/cuda/host.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define RING_BYTES ((size_t)64 << 10)
#define PATIENCE_S 60.0
#define COMM_MAGIC UINT64_C(0x6363636e6d6f63)

struct ring {
    _Atomic uint64_t written, read; // bytes, ever
    unsigned char data[RING_BYTES];
};

struct segment {
    atomic_int joined;
    struct ring ring[]; // [from * ranks + to]
};

// What goes before the bytes of each message.
struct head {
    uint64_t bytes;
    uint32_t type, what;
};

enum part_kind { PART_SEND, PART_RECEIVE, PART_ADD, PART_COPY };

struct part {
    enum part_kind kind;
    int peer;
    void *p;
    const void *from; // PART_COPY
    size_t bytes, done;
    ncclDataType_t type;
    bool begun, over;
    uint64_t end; // of a send, in its ring
};

// The calls of a group on one communicator and stream.
struct work {
    struct ncclComm *comm;
    cudaStream_t stream;
    struct part *parts;
    size_t n, room;
    uint64_t ticket; // operations of a communicator run in the order of the calls
    bool begun;
    struct work *next;
};

struct ncclComm {
    uint64_t magic;
    int rank, ranks;
    bool blocking, ready, aborted;
    struct segment *segment;
    size_t bytes;
    char name[64];
    ncclResult_t error;
    uint64_t tickets, ended;
    double moved_s;
    struct work *deferred; // the host has not been told yet that they are queued
};

static struct {
    int depth;
    struct work *works;
    uint64_t groups, ids;
    char last[256];
} nccl;

static double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static ncclResult_t fail(ncclResult_t result, const char *what)
{
    snprintf(nccl.last, sizeof nccl.last, "%s", what);
    return result;
}

static ncclResult_t misuse(const char *call, const char *what)
{
    sim_report_once(SIM_MISUSE, what, "%s: %s", call, what);
    return fail(ncclInvalidUsage, what);
}

// ---- rings --------------------------------------------------------------------------------------

static struct ring *ring_of(const struct ncclComm *c, int from, int to)
{
    return c->segment->ring + from * c->ranks + to;
}

static size_t put(struct ring *r, const void *from, size_t bytes)
{
    uint64_t at = atomic_load_explicit(&r->written, memory_order_relaxed);
    size_t room = RING_BYTES - (size_t)(at - atomic_load_explicit(&r->read, memory_order_acquire));
    size_t n = bytes < room ? bytes : room;
    for (size_t i = 0; i < n;) {
        size_t place = (size_t)((at + i) % RING_BYTES), run = RING_BYTES - place;
        run = run < n - i ? run : n - i;
        memcpy(r->data + place, (const char *)from + i, run);
        i += run;
    }
    atomic_store_explicit(&r->written, at + n, memory_order_release);
    return n;
}

static size_t waiting(const struct ring *r)
{
    return (size_t)(atomic_load_explicit(&r->written, memory_order_acquire) -
                    atomic_load_explicit(&r->read, memory_order_relaxed));
}

// n bytes are there.
static void get(struct ring *r, void *to, size_t n)
{
    uint64_t at = atomic_load_explicit(&r->read, memory_order_relaxed);
    for (size_t i = 0; i < n;) {
        size_t place = (size_t)((at + i) % RING_BYTES), run = RING_BYTES - place;
        run = run < n - i ? run : n - i;
        memcpy((char *)to + i, r->data + place, run);
        i += run;
    }
    atomic_store_explicit(&r->read, at + n, memory_order_release);
}

// ---- parts --------------------------------------------------------------------------------------

static void send(struct ncclComm *c, struct part *p)
{
    struct ring *r = ring_of(c, c->rank, p->peer);
    struct head head = {p->bytes, p->type, 0x5e4d};
    if (!p->begun && RING_BYTES - waiting(r) >= sizeof head) {
        put(r, &head, sizeof head);
        p->end = atomic_load(&r->written) + p->bytes;
        p->begun = true;
    }
    if (p->begun) {
        p->done += put(r, (const char *)p->p + p->done, p->bytes - p->done);
        p->over = atomic_load_explicit(&r->read, memory_order_acquire) >= p->end;
    }
}

static size_t bytes_of(size_t count, ncclDataType_t type)
{
    return type == ncclFloat ? 4 * count : type == ncclBfloat16 ? 2 * count : count;
}

static void add(void *sum, const void *x, size_t bytes, ncclDataType_t type)
{
    for (size_t i = 0; type == ncclFloat && i < bytes / sizeof(float); i++) {
        ((float *)sum)[i] += ((const float *)x)[i];
    }
    for (size_t i = 0; type == ncclBfloat16 && i < bytes / sizeof(uint16_t); i++) {
        uint16_t *to = (uint16_t *)sum + i;
        *to = bf16_round(bf16_load(*to) + bf16_load(((const uint16_t *)x)[i]));
    }
}

static void receive(struct ncclComm *c, struct part *p)
{
    struct ring *r = ring_of(c, p->peer, c->rank);
    struct head head;
    if (!p->begun && waiting(r) >= sizeof head) {
        get(r, &head, sizeof head);
        p->begun = true;
        if (head.what != 0x5e4d || head.bytes != p->bytes || head.type != p->type) {
            sim_report_once(SIM_MISUSE, "nccl counts",
                            "rank %d receives %zu bytes of type %d from rank %d, which sends %zu "
                            "of type %u",
                            c->rank, p->bytes, (int)p->type, p->peer, (size_t)head.bytes,
                            head.type);
            c->error = ncclInvalidUsage;
        }
    }
    while (p->begun && p->done < p->bytes && !c->error) {
        float chunk[1024];
        size_t n = p->bytes - p->done, there = waiting(r);
        n = n < sizeof chunk ? n : sizeof chunk;
        n = n < there ? n : there;
        n -= p->kind == PART_ADD ? n % bytes_of(1, p->type) : 0; // whole ones are added
        if (n == 0) {
            break;
        }
        get(r, chunk, n);
        if (p->kind == PART_ADD) {
            add((char *)p->p + p->done, chunk, n, p->type);
        } else {
            memcpy((char *)p->p + p->done, chunk, n);
        }
        p->done += n;
    }
    p->over = p->begun && p->done == p->bytes;
}

// Of the parts before it none goes the same way: messages of a pair keep their order, and what is
// added to the same place is added one after the other.
static bool is_next(const struct work *w, size_t i)
{
    for (size_t k = 0; k < i; k++) {
        const struct part *a = w->parts + k, *b = w->parts + i;
        bool same_way = (a->kind == PART_SEND) == (b->kind == PART_SEND) && a->peer == b->peer;
        bool same_sum = b->kind == PART_ADD && a->kind == PART_ADD && a->p == b->p;
        if (!a->over && (same_way || same_sum)) {
            return false;
        }
    }
    return true;
}

// What the operation will touch, all at once: the race checker has to know, not when.
static void touch(struct work *w)
{
    for (size_t i = 0; i < w->n; i++) {
        struct part *p = w->parts + i;
        bool fits = race_touch(p->p, p->bytes, p->kind != PART_SEND);
        if (p->kind == PART_COPY && fits && race_touch(p->from, p->bytes, false)) {
            memmove(p->p, p->from, p->bytes);
        }
        p->over = p->kind == PART_COPY;
        if (!fits) {
            w->comm->error = ncclInvalidArgument;
        }
    }
}

static void end_work(struct work *w)
{
    w->comm->ended = w->ticket + 1;
    free(w->parts);
    free(w);
}

// Called by queue.c, as often as it looks, until it returns true. w is gone then.
static bool get_on(void *arg)
{
    struct work *w = arg;
    struct ncclComm *c = w->comm;
    size_t left = 0, moved = 0;
    if (c->aborted) {
        end_work(w);
        return true;
    }
    if (c->error && clock_s() - c->moved_s > 2 * PATIENCE_S) { // it should have been aborted
        end_work(w);
        return true;
    }
    if (c->ended != w->ticket || c->error) {
        return false;
    }
    if (!w->begun) {
        w->begun = true;
        c->moved_s = clock_s();
        touch(w);
    }
    for (size_t i = 0; i < w->n; i++) {
        struct part *p = w->parts + i;
        if (!p->over && is_next(w, i)) {
            size_t before = p->done;
            (p->kind == PART_SEND ? send : receive)(c, p);
            moved += p->done - before + p->over;
        }
        left += !p->over;
    }
    if (left == 0 && !c->error) {
        end_work(w);
        return true;
    }
    c->moved_s = moved ? clock_s() : c->moved_s;
    if (clock_s() - c->moved_s > PATIENCE_S) {
        sim_report_once(SIM_DEADLOCK, "nccl", "rank %d: an operation between ranks has waited %g s",
                        c->rank, PATIENCE_S);
        c->error = ncclInternalError;
    }
    return false;
}

// ---- groups -------------------------------------------------------------------------------------

static struct work *work_of(struct ncclComm *c, cudaStream_t stream)
{
    struct work **at = &nccl.works;
    for (; *at; at = &(*at)->next) {
        if ((*at)->comm == c && (*at)->stream == stream) {
            return *at;
        }
    }
    *at = calloc(1, sizeof **at);
    if (!*at) {
        abort();
    }
    (*at)->comm = c;
    (*at)->stream = stream;
    return *at;
}

static void add_part(struct work *w, struct part part)
{
    if (part.bytes == 0) {
        return;
    }
    if (w->n == w->room) {
        w->room = w->room ? 2 * w->room : 8;
        w->parts = realloc(w->parts, w->room * sizeof *w->parts);
        if (!w->parts) {
            abort();
        }
    }
    w->parts[w->n++] = part;
}

static void drop(struct work *w)
{
    free(w->parts);
    free(w);
}

static void enqueue(struct work *w)
{
    const char *limit = getenv("SIM_NCCL_FAIL");
    if (limit && ++nccl.groups == strtoull(limit, NULL, 10)) {
        w->comm->error = ncclRemoteError;
        w->comm->moved_s = clock_s();
    }
    w->ticket = w->comm->tickets++;
    if (!queue_external(w->stream, "NCCL", get_on, w)) {
        w->comm->error = ncclInvalidArgument;
        drop(w);
    }
}

ncclResult_t ncclGroupStart(void)
{
    nccl.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t result = ncclSuccess;
    if (nccl.depth == 0) {
        return misuse(__func__, "no group has been started");
    }
    if (--nccl.depth > 0) {
        return ncclSuccess;
    }
    while (nccl.works) {
        struct work *w = nccl.works;
        nccl.works = w->next;
        w->next = NULL;
        if (w->n == 0) {
            drop(w);
        } else if (!w->comm->blocking && sim_random() % 2) {
            w->comm->deferred = w;
            result = ncclInProgress;
        } else {
            enqueue(w);
        }
    }
    return result;
}

static ncclResult_t check(const char *call, struct ncclComm *c)
{
    if (!c || c->magic != COMM_MAGIC || c->aborted) {
        return misuse(call, "no such communicator");
    }
    if (!c->ready || c->deferred) {
        return misuse(call, "the communicator is at something else: ncclInProgress");
    }
    return c->error;
}

// A call by itself is a group of one.
#define CALL(c, stream, body)                                                                      \
    ncclResult_t bad = check(__func__, c);                                                         \
    if (bad) {                                                                                     \
        return bad;                                                                                \
    }                                                                                              \
    ncclGroupStart();                                                                              \
    struct work *w = work_of(c, stream);                                                           \
    body;                                                                                          \
    return ncclGroupEnd()

ncclResult_t ncclSend(const void *p, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    CALL(comm, stream,
         add_part(w, (struct part){PART_SEND, .peer = peer, .p = (void *)(uintptr_t)p,
                                   .bytes = bytes_of(count, type), .type = type}));
}

ncclResult_t ncclRecv(void *p, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    CALL(comm, stream,
         add_part(w, (struct part){PART_RECEIVE, .peer = peer, .p = p,
                                   .bytes = bytes_of(count, type), .type = type}));
}

static void copy_part(struct work *w, void *to, const void *from, size_t bytes)
{
    if (to != from) {
        add_part(w, (struct part){PART_COPY, .peer = -1, .p = to, .from = from, .bytes = bytes});
    }
}

static void send_parts(struct work *w, const void *from, size_t bytes, ncclDataType_t type)
{
    for (int i = 0; i < w->comm->ranks; i++) {
        if (i != w->comm->rank) {
            add_part(w, (struct part){PART_SEND, .peer = i, .p = (void *)(uintptr_t)from,
                                      .bytes = bytes, .type = type});
        }
    }
}

ncclResult_t ncclAllGather(const void *mine, void *all, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    size_t bytes = bytes_of(count, type);
    CALL(comm, stream, {
        copy_part(w, (char *)all + (size_t)comm->rank * bytes, mine, bytes);
        send_parts(w, mine, bytes, type);
        for (int i = 0; i < comm->ranks; i++) {
            if (i != comm->rank) {
                add_part(w, (struct part){PART_RECEIVE, .peer = i,
                                          .p = (char *)all + (size_t)i * bytes, .bytes = bytes,
                                          .type = type});
            }
        }
    });
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    size_t bytes = bytes_of(count, type);
    CALL(comm, stream, {
        if (comm->rank == root) {
            copy_part(w, to, from, bytes);
            send_parts(w, from, bytes, type);
        } else {
            add_part(w, (struct part){PART_RECEIVE, .peer = root, .p = to, .bytes = bytes,
                                      .type = type});
        }
    });
}

// In an order that is not that of the ranks.
static void reduce_parts(struct work *w, const void *from, void *to, size_t bytes,
                         ncclDataType_t type, int root)
{
    struct ncclComm *c = w->comm;
    if (c->rank != root) {
        add_part(w, (struct part){PART_SEND, .peer = root, .p = (void *)(uintptr_t)from,
                                  .bytes = bytes, .type = type});
        return;
    }
    copy_part(w, to, from, bytes);
    for (int i = 1; i < c->ranks; i++) {
        add_part(w, (struct part){PART_ADD, .peer = (root + c->ranks - i) % c->ranks, .p = to,
                                  .bytes = bytes, .type = type});
    }
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    CALL(comm, stream, reduce_parts(w, from, to, bytes_of(count, type), type, root));
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    (void)op;
    size_t bytes = bytes_of(count, type);
    CALL(comm, stream, {
        for (int root = 0; root < comm->ranks; root++) {
            reduce_parts(w, (const char *)from + (size_t)root * bytes, to, bytes, type, root);
        }
    });
}

// ---- communicators ------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int *version)
{
    *version = 22800;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const text[] = {"no error",
                                       "unhandled cuda error",
                                       "system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error",
                                       "in progress"};
    return text[result];
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return nccl.last;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/sim-nccl-%ld-%.0f-%llu", (long)getpid(),
             1e9 * clock_s(), (unsigned long long)nccl.ids++);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    struct ncclComm *c = calloc(1, sizeof *c);
    if (!c) {
        abort();
    }
    *comm = NULL;
    c->magic = COMM_MAGIC;
    c->rank = rank;
    c->ranks = ranks;
    c->blocking = config->blocking != 0;
    c->bytes = sizeof *c->segment + (size_t)ranks * (size_t)ranks * sizeof(struct ring);
    snprintf(c->name, sizeof c->name, "%.63s", id.internal);
    int fd = shm_open(c->name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)c->bytes) != 0 ||
        (c->segment = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) ==
            MAP_FAILED) {
        free(c);
        return fail(ncclSystemError, "shared memory");
    }
    close(fd);
    atomic_fetch_add(&c->segment->joined, 1);
    *comm = c;
    ncclResult_t state = ncclInProgress;
    for (double until = clock_s() + PATIENCE_S; c->blocking && state == ncclInProgress;) {
        ncclCommGetAsyncError(c, &state);
        if (clock_s() > until) {
            return fail(ncclSystemError, "not all ranks have come");
        }
        usleep(100);
    }
    return state;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error)
{
    if (c->magic != COMM_MAGIC) {
        return misuse(__func__, "no such communicator");
    }
    if (!c->ready && atomic_load(&c->segment->joined) == c->ranks) {
        c->ready = true;
        shm_unlink(c->name);
    }
    if (c->deferred) {
        enqueue(c->deferred);
        c->deferred = NULL;
        *error = ncclInProgress; // one look more
        return ncclSuccess;
    }
    *error = c->error ? c->error : c->ready ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    ncclResult_t bad = check(__func__, c);
    return bad                      ? bad
           : c->ended != c->tickets ? misuse(__func__, "operations are under way")
                                    : ncclSuccess;
}

// Its memory stays: the runtime may hold operations of it.
ncclResult_t ncclCommAbort(ncclComm_t c)
{
    if (!c || c->magic != COMM_MAGIC) {
        return misuse(__func__, "no such communicator");
    }
    c->aborted = true;
    c->magic = 0;
    shm_unlink(c->name);
    if (c->deferred) {
        drop(c->deferred);
        c->deferred = NULL;
    }
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    if (c && c->magic == COMM_MAGIC && c->ended != c->tickets) {
        misuse(__func__, "operations are under way: would wait for ever");
    }
    return ncclCommAbort(c);
}
