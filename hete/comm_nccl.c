// The lane over NCCL, for ranks that compute on GPUs; the main thread's calls over MPI where there
// is MPI, else over NCCL, too. Liveness is the base's: that of MPI's heartbeat, or of the meeting
// (meet.h).
//
// The lane's operations are queued on the device's own stream for them and return; what they read
// and write is in order there. An exchange is a group of messages between pairs of ranks: the bytes
// of a reduce-scatter, with nothing added up in an order of NCCL's. The two communicators, of the
// lane and of the main thread, may have operations under way at once, in an order that is not the
// same on all ranks. That is safe as long as the kernels of both find room on a GPU, so the main
// thread's take one block. Connections between ranks are made while opening: making one later would
// wait for ranks that may be waiting for this one.
//
// Communicators do not block the calling thread: whatever it waits for, it looks whether a rank is
// gone. One that has failed is aborted, never destroyed, which would wait.
#include "hete/meet.h"
#include "kernels/clock.h"

#include <assert.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHARE_BYTES ((size_t)16 << 10) // of each rank, at once

struct nccl {
    struct comm comm;
    struct comm *base;
    struct comm_config config;
    pthread_t caller;      // the thread that calls CUDA
    bool small;            // the main thread's calls are this transport's, not the base's
    ncclComm_t lane, main; // NULL after an error; main: and where it is the base's
    cudaStream_t stream;   // of the main thread, and of the lane while there is no device
    struct device *dev;
    char *lane_bounce, *main_bounce; // device memory: [ranks][SHARE_BYTES]
    char *main_host;                 // pinned, the same
    struct error error;              // the first
};

// What ranks have to know of each other before NCCL does.
struct place {
    char host[64];
    char uuid[16];                     // of the only GPU that a rank sees
    int gpus, local_rank, local_ranks; // -1: the launcher does not say
    char why[128];                     // there is no GPU
};

// ---- errors -------------------------------------------------------------------------------------

// After the first error nothing may wait for kernels that wait for other ranks: they are ended.
static void abort_both(struct nccl *n)
{
    ncclComm_t comms[] = {n->lane, n->main};
    n->lane = n->main = NULL;
    for (int i = 0; i < 2; i++) {
        if (comms[i]) {
            ncclCommAbort(comms[i]);
        }
    }
}

static int failed(struct nccl *n, struct error *err)
{
    if (n->error.status) {
        abort_both(n);
    }
    *err = n->error;
    return err->status;
}

static int set_failed(struct nccl *n, const char *library, const char *what, const char *why,
                      struct error *err)
{
    if (!n->error.status) {
        error_set(&n->error, STATUS_FAIL,
                  "rank %d: %s: %s: %s; NCCL_DEBUG=INFO in the environment says more", n->comm.rank,
                  library, what, why);
    }
    return failed(n, err);
}

static int cuda_failed(struct nccl *n, const char *what, cudaError_t code, struct error *err)
{
    cudaGetLastError();
    return set_failed(n, "CUDA", what, cudaGetErrorString(code), err);
}

static int nccl_failed(struct nccl *n, const char *what, ncclResult_t result, struct error *err)
{
    char why[512];
    const char *last = ncclGetLastError(NULL);
    snprintf(why, sizeof why, "%s%s%.400s", ncclGetErrorString(result), *last ? ": " : "", last);
    return set_failed(n, "NCCL", what, why, err);
}

// Of the communicators, has one failed where nobody was looking? Also a device's hook.
static int check(void *ctx, struct error *err)
{
    struct nccl *n = ctx;
    ncclComm_t comms[] = {n->lane, n->main};
    for (int i = 0; i < 2 && !n->error.status; i++) {
        ncclResult_t state = ncclSuccess;
        if (comms[i] && ncclCommGetAsyncError(comms[i], &state) == ncclSuccess &&
            state != ncclSuccess && state != ncclInProgress) {
            return nccl_failed(n, "an operation that was under way", state, err);
        }
    }
    if (!n->error.status && n->base->transport->failed(n->base, err)) {
        n->error = *err;
    }
    return failed(n, err);
}

// ---- waiting ------------------------------------------------------------------------------------

static void rest(unsigned *looks)
{
    if (++*looks > 2000) {
        clock_sleep_until(clock_s() + 100e-6);
    } else if (*looks > 50) {
        sched_yield();
    }
}

// limit_s: 0: however long it takes.
static int look_again(struct nccl *n, const char *what, double until, unsigned *looks,
                      struct error *err)
{
    if (check(n, err)) {
        return err->status;
    }
    if (until > 0 && clock_s() > until) {
        return set_failed(n, "NCCL", what,
                          "the ranks are not connected yet: can their machines reach each other "
                          "(NCCL_SOCKET_IFNAME)?",
                          err);
    }
    rest(looks);
    return STATUS_OK;
}

// Until what a call of NCCL has begun is queued; the call returned `result`.
static int queued(struct nccl *n, ncclComm_t comm, ncclResult_t result, const char *what,
                  double until, struct error *err)
{
    unsigned looks = 0;
    while (result == ncclInProgress) {
        ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        result = asked == ncclSuccess ? result : asked;
        if (result == ncclInProgress && look_again(n, what, until, &looks, err)) {
            return err->status;
        }
    }
    return result == ncclSuccess ? STATUS_OK : nccl_failed(n, what, result, err);
}

// Until the stream has done everything.
static int done(struct nccl *n, cudaStream_t stream, const char *what, double until,
                struct error *err)
{
    cudaError_t code;
    for (unsigned looks = 0; (code = cudaStreamQuery(stream)) == cudaErrorNotReady;) {
        cudaGetLastError(); // or the next launch would be blamed for it
        if (look_again(n, what, until, &looks, err)) {
            return err->status;
        }
    }
    return code == cudaSuccess ? STATUS_OK : cuda_failed(n, what, code, err);
}

static int copy(struct nccl *n, void *to, const void *from, size_t bytes, cudaStream_t stream,
                const char *what, struct error *err)
{
    cudaError_t code = bytes > 0 && to != from
                           ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream)
                           : cudaSuccess;
    return code == cudaSuccess ? STATUS_OK : cuda_failed(n, what, code, err);
}

// ---- the lane -----------------------------------------------------------------------------------

static int begin(struct nccl *n, enum comm_thread thread, struct error *err)
{
    n->base->transport->begin(n->base, thread);
    n->base->transport->waits(n->base, true); // the lane's calls, too, are the main thread's
    return n->error.status ? failed(n, err) : STATUS_OK;
}

static cudaStream_t lane_stream(const struct nccl *n)
{
    return n->dev ? device_stream(n->dev, DEVICE_COMM) : n->stream;
}

// Queued; and done, where there is no device yet, and with it nobody to wait for it.
static int end(struct nccl *n, ncclResult_t result, const char *what, struct error *err)
{
    if (queued(n, n->lane, result, what, 0, err) || (!n->dev && done(n, n->stream, what, 0, err))) {
        return err->status;
    }
    n->base->transport->waits(n->base, false);
    return STATUS_OK;
}

static char *piece(const struct comm_pieces *p, const void *x, int rank)
{
    return (char *)(uintptr_t)x + p->first[rank] * p->element;
}

// Messages with all others, in one group; empty ones are none.
static ncclResult_t send_and_receive(struct nccl *n, char *stage, const char *x,
                                     const struct comm_pieces *p)
{
    int rank = n->comm.rank, ranks = n->comm.ranks;
    size_t mine = p->n[rank] * p->element;
    cudaStream_t stream = lane_stream(n);
    ncclResult_t result = ncclGroupStart();
    for (int round = 1; round < ranks && result == ncclSuccess; round++) {
        int to = (rank + round) % ranks, from = (rank + ranks - round) % ranks;
        size_t theirs = p->n[to] * p->element;
        if (theirs > 0) {
            result = ncclSend(piece(p, x, to), theirs, ncclInt8, to, n->lane, stream);
        }
        if (mine > 0 && result == ncclSuccess) {
            char *at = stage + (size_t)from * mine;
            result = ncclRecv(at, mine, ncclInt8, from, n->lane, stream);
        }
    }
    ncclResult_t closed = ncclGroupEnd();
    return result == ncclSuccess ? closed : result;
}

static int exchange(struct comm *c, void *stage, const void *x, const struct comm_pieces *p,
                    struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    size_t mine = p->n[c->rank] * p->element;
    char *own = (char *)stage + (size_t)c->rank * mine;
    if (begin(n, COMM_LANE, err) ||
        copy(n, own, piece(p, x, c->rank), mine, lane_stream(n), "exchange", err)) {
        return err->status;
    }
    return end(n, send_and_receive(n, stage, x, p), "exchange", err);
}

// Pieces of one size that lie side by side, in the order of the ranks.
static bool is_even(const struct comm *c, const struct comm_pieces *p)
{
    bool even = true;
    for (int i = 1; i < c->ranks; i++) {
        even = even && p->n[i] == p->n[0] && p->first[i] == p->first[0] + (size_t)i * p->n[0];
    }
    return even && p->n[0] > 0;
}

// NCCL's own, which sends over the network once what several GPUs of a machine want; nothing is
// added up.
static int gather(struct comm *c, void *x, const void *mine, const struct comm_pieces *p,
                  struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    cudaStream_t stream = lane_stream(n);
    if (begin(n, COMM_LANE, err)) {
        return err->status;
    }
    if (is_even(c, p)) {
        size_t bytes = p->n[0] * p->element;
        return end(n, ncclAllGather(mine, piece(p, x, 0), bytes, ncclInt8, n->lane, stream),
                   "gather", err);
    }
    ncclResult_t result = ncclGroupStart();
    for (int root = 0; root < c->ranks && result == ncclSuccess; root++) {
        char *at = piece(p, x, root);
        if (p->n[root] > 0) {
            result = ncclBroadcast(root == c->rank ? mine : at, at, p->n[root] * p->element,
                                   ncclInt8, root, n->lane, stream);
        }
    }
    ncclResult_t closed = ncclGroupEnd();
    return end(n, result == ncclSuccess ? closed : result, "gather", err);
}

// Through device memory, as much at once as there is room for.
static int share(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    cudaStream_t stream = lane_stream(n);
    if (begin(n, COMM_LANE, err)) {
        return err->status;
    }
    for (size_t at = 0; at < bytes; at += SHARE_BYTES) {
        size_t now = bytes - at < SHARE_BYTES ? bytes - at : SHARE_BYTES;
        char *place = n->lane_bounce + (size_t)c->rank * now;
        if (copy(n, place, (const char *)mine + at, now, stream, "share", err) ||
            queued(n, n->lane, ncclAllGather(place, n->lane_bounce, now, ncclInt8, n->lane, stream),
                   "share", 0, err)) {
            return err->status;
        }
        for (size_t r = 0; r < (now == bytes ? 1 : (size_t)c->ranks); r++) {
            size_t run = now == bytes ? (size_t)c->ranks * now : now;
            if (copy(n, (char *)all + r * bytes + at, n->lane_bounce + r * now, run, stream,
                     "share", err)) {
                return err->status;
            }
        }
    }
    return end(n, ncclSuccess, "share", err);
}

static int reduce(struct comm *c, void *sum, const void *x, const struct comm_pieces *p,
                  struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    cudaStream_t stream = lane_stream(n);
    ncclDataType_t type = p->element == sizeof(float) ? ncclFloat : ncclBfloat16;
    if (begin(n, COMM_LANE, err)) {
        return err->status;
    }
    if (is_even(c, p)) {
        return end(n,
                   ncclReduceScatter(piece(p, x, 0), sum, p->n[0], type, ncclSum, n->lane, stream),
                   "reduction", err);
    }
    ncclResult_t result = ncclGroupStart();
    for (int root = 0; root < c->ranks && result == ncclSuccess; root++) {
        if (p->n[root] > 0) {
            result = ncclReduce(piece(p, x, root), root == c->rank ? sum : NULL, p->n[root], type,
                                ncclSum, root, n->lane, stream);
        }
    }
    ncclResult_t closed = ncclGroupEnd();
    return end(n, result == ncclSuccess ? closed : result, "reduction", err);
}

static void use_device(struct comm *c, struct device *dev)
{
    struct nccl *n = (struct nccl *)c;
    if (n->dev) {
        n->dev->watch = NULL;
    }
    n->dev = dev && dev->queues ? dev : NULL;
    if (n->dev) {
        dev->watch = check;
        dev->watch_ctx = n;
    }
}

// ---- the main thread ----------------------------------------------------------------------------

// One chunk, at most SHARE_BYTES from each rank.
static int gather_chunk(struct nccl *n, const void *mine, size_t bytes, double until,
                        struct error *err)
{
    size_t offset = (size_t)n->comm.rank * bytes, total = (size_t)n->comm.ranks * bytes;
    char *place = n->main_bounce + offset;
    memcpy(n->main_host + offset, mine, bytes);
    if (copy(n, place, n->main_host + offset, bytes, n->stream, "all-gather", err) ||
        queued(n, n->main,
               ncclAllGather(place, n->main_bounce, bytes, ncclInt8, n->main, n->stream),
               "all-gather", until, err) ||
        copy(n, n->main_host, n->main_bounce, total, n->stream, "all-gather", err)) {
        return err->status;
    }
    return done(n, n->stream, "all-gather", until, err);
}

static int all_gather(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    if (!n->small) {
        return n->base->transport->all_gather(n->base, mine, all, bytes, err);
    }
    if (begin(n, COMM_MAIN, err)) {
        return err->status;
    }
    for (size_t at = 0; at < bytes; at += SHARE_BYTES) {
        size_t now = bytes - at < SHARE_BYTES ? bytes - at : SHARE_BYTES;
        if (gather_chunk(n, (const char *)mine + at, now, 0, err)) {
            return err->status;
        }
        for (size_t r = 0; r < (size_t)c->ranks; r++) {
            memcpy((char *)all + r * bytes + at, n->main_host + r * now, now);
        }
    }
    return STATUS_OK;
}

static int broadcast_chunk(struct nccl *n, char *x, size_t bytes, int from, struct error *err)
{
    bool mine = from == n->comm.rank;
    if (mine) {
        memcpy(n->main_host, x, bytes);
    }
    if ((mine && copy(n, n->main_bounce, n->main_host, bytes, n->stream, "broadcast", err)) ||
        queued(n, n->main,
               ncclBroadcast(n->main_bounce, n->main_bounce, bytes, ncclInt8, from, n->main,
                             n->stream),
               "broadcast", 0, err) ||
        (!mine && copy(n, n->main_host, n->main_bounce, bytes, n->stream, "broadcast", err)) ||
        done(n, n->stream, "broadcast", 0, err)) {
        return err->status;
    }
    if (!mine) {
        memcpy(x, n->main_host, bytes);
    }
    return STATUS_OK;
}

static int broadcast(struct comm *c, void *x, size_t bytes, int from, struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    size_t most = (size_t)c->ranks * SHARE_BYTES;
    if (!n->small) {
        return n->base->transport->broadcast(n->base, x, bytes, from, err);
    }
    if (begin(n, COMM_MAIN, err)) {
        return err->status;
    }
    for (size_t at = 0; at < bytes; at += most) {
        if (broadcast_chunk(n, (char *)x + at, bytes - at < most ? bytes - at : most, from, err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

static int barrier(struct comm *c, struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    if (!n->small) {
        return n->base->transport->barrier(n->base, err);
    }
    return begin(n, COMM_MAIN, err) ? err->status : gather_chunk(n, "", 1, 0, err);
}

static void doing(struct comm *c, enum comm_thread thread, const char *text)
{
    struct comm *base = ((struct nccl *)c)->base;
    base->transport->doing(base, thread, text);
}

static void waits(struct comm *c, bool waits)
{
    struct comm *base = ((struct nccl *)c)->base;
    base->transport->waits(base, waits);
}

// ---- end ----------------------------------------------------------------------------------------

// Who waits for the device is not to wait for the others' kernels.
static void give_up(struct comm *c, const char *why)
{
    struct nccl *n = (struct nccl *)c;
    n->base->transport->give_up(n->base, why);
    if (pthread_equal(pthread_self(), n->caller)) {
        struct error err;
        check(n, &err);
    }
}

// All ranks are here when it returns STATUS_OK, and what they had under way is done.
static int leave(struct nccl *n, struct error *err)
{
    if (check(n, err) || n->base->transport->leave(n->base, err)) {
        return err->status;
    }
    return n->small ? gather_chunk(n, "", 1, 0, err) : STATUS_OK;
}

static int finish(struct nccl *n, ncclComm_t *comm, struct error *err)
{
    double until = clock_s() + n->config.silence_s;
    if (*comm && queued(n, *comm, ncclCommFinalize(*comm), "the end", until, err)) {
        return err->status;
    }
    ncclResult_t result = *comm ? ncclCommDestroy(*comm) : ncclSuccess;
    *comm = NULL;
    return result == ncclSuccess ? STATUS_OK : nccl_failed(n, "the end", result, err);
}

static int close_nccl(struct comm *c, struct error *err)
{
    struct nccl *n = (struct nccl *)c;
    struct error closing;
    use_device(c, NULL);
    int status = leave(n, err);
    if (status == STATUS_OK && (finish(n, &n->lane, err) || finish(n, &n->main, err))) {
        status = err->status;
    }
    abort_both(n);
    if (status == STATUS_OK) { // or freeing might wait for a kernel that waits for others
        cudaFree(n->lane_bounce);
        cudaFree(n->main_bounce);
        cudaFreeHost(n->main_host);
        cudaStreamDestroy(n->stream);
    }
    if (n->base->transport->close(n->base, status ? &closing : err) && status == STATUS_OK) {
        status = err->status;
    }
    free(n);
    return status;
}

static const struct transport nccl_transport = {
    .close = close_nccl,
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
    .use_device = use_device,
};

// ---- which GPU ----------------------------------------------------------------------------------

static void find_place(struct place *p, const struct comm_launch *launch)
{
    struct cudaDeviceProp prop;
    memset(p, 0, sizeof *p);
    gethostname(p->host, sizeof p->host - 1);
    p->local_rank = launch->local_rank;
    p->local_ranks = launch->local_ranks;
    cudaError_t code = cudaGetDeviceCount(&p->gpus);
    if (code == cudaSuccess && p->gpus == 1 &&
        (code = cudaGetDeviceProperties(&prop, 0)) == cudaSuccess) {
        memcpy(p->uuid, &prop.uuid, sizeof p->uuid);
    }
    if (code != cudaSuccess) {
        cudaGetLastError();
        p->gpus = 0;
        snprintf(p->why, sizeof p->why, " (%s)", cudaGetErrorString(code));
    }
}

// Where the launcher does not say: by the machines' names.
static void count_local(struct place *all, int ranks)
{
    for (int i = 0; i < ranks; i++) {
        int before = 0, here = 0;
        for (int k = 0; k < ranks; k++) {
            bool same = strcmp(all[i].host, all[k].host) == 0;
            here += same;
            before += same && k < i;
        }
        all[i].local_rank = all[i].local_rank < 0 ? before : all[i].local_rank;
        all[i].local_ranks = all[i].local_ranks < 0 ? here : all[i].local_ranks;
        if (all[i].local_ranks <= all[i].local_rank) {
            all[i].local_ranks = all[i].local_rank + 1;
        }
    }
}

// A launcher may have given each rank a GPU of its own to see.
static bool has_own(const struct place *all, int ranks, int rank)
{
    bool shared = false;
    for (int k = 0; k < ranks; k++) {
        shared |= k != rank && strcmp(all[k].host, all[rank].host) == 0 &&
                  memcmp(all[k].uuid, all[rank].uuid, sizeof all[k].uuid) == 0;
    }
    return all[rank].gpus == 1 && !shared;
}

// The same on all ranks: they look at the same places.
static int choose_gpus(struct nccl *n, struct place *all, struct error *err)
{
    struct comm *c = &n->comm;
    count_local(all, c->ranks);
    for (int i = 0; i < c->ranks; i++) {
        const struct place *p = all + i;
        if (p->gpus == 0) {
            return error_set(err, STATUS_FAIL,
                             "--device cuda: rank %d of %d sees no GPU on %s%s: fewer ranks there, "
                             "or --device cpu",
                             i, c->ranks, p->host, p->why);
        }
        if (p->gpus < p->local_ranks && !has_own(all, c->ranks, i)) {
            return error_set(err, STATUS_FAIL,
                             "--device cuda: rank %d sees %d GPU%s on %s, where %d ranks need one "
                             "each: fewer ranks there, or more in CUDA_VISIBLE_DEVICES",
                             i, p->gpus, p->gpus == 1 ? "" : "s", p->host, p->local_ranks);
        }
    }
    const struct place *own = all + c->rank;
    c->local_rank = own->local_rank;
    c->local_ranks = own->local_ranks;
    c->gpu = own->gpus < own->local_ranks ? 0 : own->local_rank;
    cudaError_t code = cudaSetDevice(c->gpu);
    return code == cudaSuccess ? STATUS_OK : cuda_failed(n, "choosing the GPU", code, err);
}

// ---- start --------------------------------------------------------------------------------------

struct ids {
    ncclUniqueId lane, main;
    int result; // of making them
};

static void make_ids(struct ids *ids)
{
    memset(ids, 0, sizeof *ids);
    ncclResult_t result = ncclGetUniqueId(&ids->lane);
    ids->result = result ? (int)result : (int)ncclGetUniqueId(&ids->main);
}

// Over MPI: who is where, and NCCL's ids.
static int tell_ids(struct nccl *n, struct place *mine, struct place *all, struct ids *ids,
                    struct error *err)
{
    const struct transport *t = n->base->transport;
    return t->all_gather(n->base, mine, all, sizeof *mine, err) ||
                   t->broadcast(n->base, ids, sizeof *ids, 0, err)
               ? err->status
               : STATUS_OK;
}

static int take_memory(struct nccl *n, struct error *err)
{
    size_t bytes = (size_t)n->comm.ranks * SHARE_BYTES;
    int least = 0, first = 0;
    void *lane, *main = NULL, *host = NULL;
    cudaError_t code = cudaDeviceGetStreamPriorityRange(&least, &first);
    code = code ? code : cudaStreamCreateWithPriority(&n->stream, cudaStreamNonBlocking, first);
    code = code ? code : cudaMalloc(&lane, bytes);
    if (n->small) {
        code = code ? code : cudaMalloc(&main, bytes);
        code = code ? code : cudaHostAlloc(&host, bytes, cudaHostAllocDefault);
    }
    if (code != cudaSuccess) {
        return cuda_failed(n, "memory for what ranks share", code, err);
    }
    n->lane_bounce = lane;
    n->main_bounce = main;
    n->main_host = host;
    return STATUS_OK;
}

// All pairs of ranks talk once.
static int connect_all(struct nccl *n, double until, struct error *err)
{
    struct comm *c = &n->comm;
    size_t first[c->ranks], count[c->ranks];
    for (int i = 0; i < c->ranks; i++) {
        first[i] = (size_t)i;
        count[i] = 1;
    }
    struct comm_pieces p = {1, first, count};
    ncclResult_t result = send_and_receive(n, n->lane_bounce + c->ranks, n->lane_bounce, &p);
    if (queued(n, n->lane, result, "the first messages", until, err)) {
        return err->status;
    }
    result =
        ncclAllGather(n->lane_bounce, n->lane_bounce + c->ranks, 1, ncclInt8, n->lane, n->stream);
    if (queued(n, n->lane, result, "the first messages", until, err) ||
        done(n, n->stream, "the first messages", until, err)) {
        return err->status;
    }
    return n->small ? gather_chunk(n, "", 1, until, err) : STATUS_OK;
}

static int start(struct nccl *n, struct ids *ids, struct error *err)
{
    double until = clock_s() + n->config.start_s;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    int rank = n->comm.rank, ranks = n->comm.ranks;
    config.blocking = 0;
    if (ids->result) {
        return nccl_failed(n, "an id for the ranks (of rank 0)", (ncclResult_t)ids->result, err);
    }
    ncclResult_t result = ncclCommInitRankConfig(&n->lane, ranks, ids->lane, rank, &config);
    if (queued(n, n->lane, result, "connecting the ranks", until, err)) {
        return err->status;
    }
    if (n->small) {
        config.maxCTAs = 1;
        result = ncclCommInitRankConfig(&n->main, ranks, ids->main, rank, &config);
        if (queued(n, n->main, result, "connecting the ranks", until, err)) {
            return err->status;
        }
    }
    return take_memory(n, err) || connect_all(n, until, err) ? err->status : STATUS_OK;
}

// n->base is there: everybody is told if this fails.
static int open_on_base(struct nccl *n, struct place *all, struct ids *ids, struct error *err)
{
    if (choose_gpus(n, all, err) == STATUS_OK && start(n, ids, err) == STATUS_OK) {
        return STATUS_OK;
    }
    n->base->transport->give_up(n->base, err->text);
    abort_both(n);
    return err->status;
}

int comm_nccl_open(struct comm **out, struct comm *base, const struct comm_config *config,
                   const struct comm_launch *launch, struct error *err)
{
    struct nccl *n = calloc(1, sizeof *n);
    struct place mine, *all = calloc((size_t)(base ? base->ranks : launch->ranks), sizeof *all);
    struct ids ids;
    if (!n || !all) {
        free(n);
        free(all);
        return error_set(err, STATUS_FAIL, "no memory for the ranks");
    }
    n->config = *config;
    n->caller = pthread_self();
    n->base = base;
    n->small = base == NULL;
    setenv("NCCL_RUNTIME_CONNECT", "0", 0); // those of collectives; connect_all makes the others
    find_place(&mine, launch);
    make_ids(&ids);
    static_assert(sizeof mine <= MEET_WORDS_MAX && sizeof ids <= MEET_DATA_MAX, "what ranks tell");
    int status = base ? tell_ids(n, &mine, all, &ids, err)
                      : comm_meet_open(&n->base, config, launch, &mine, all, sizeof mine, &ids,
                                       sizeof ids, err);
    if (status == STATUS_OK) {
        n->comm = *n->base;
        n->comm.transport = &nccl_transport;
        status = open_on_base(n, all, &ids, err);
    }
    free(all);
    if (status) {
        free(n); // the base may be at work: the process ends without its end, which could wait
        return status;
    }
    *out = &n->comm;
    return STATUS_OK;
}
