// What does not depend on the transport: which one, one rank, and the agreement.
#include "hete/comm.h"
#include "hete/transport.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int number_in(const char *name)
{
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long n = text ? strtol(text, &end, 10) : 0;
    return text && end != text && !errno && n > 0 && n <= INT32_MAX ? (int)n : 0;
}

// -1: not there.
static int index_in(const char *name)
{
    const char *text = getenv(name);
    return text && strcmp(text, "0") == 0 ? 0 : number_in(name) ? number_in(name) : -1;
}

// How many ranks a launcher that MPI can talk to says there are: 1 where there is none, 0 where it
// does not say. Open MPI's mpirun, then those that speak PMI (MPICH's, Intel's, Slurm's), then
// PMIx.
static int launched_ranks(void)
{
    int n = number_in("OMPI_COMM_WORLD_SIZE");
    n = n ? n : number_in("PMI_SIZE");
    return n ? n : getenv("PMIX_RANK") ? number_in("SLURM_STEP_NUM_TASKS") : 1;
}

static int open_alone(struct comm **out, struct error *err)
{
    struct comm *c = calloc(1, sizeof *c);
    if (!c) {
        return error_set(err, STATUS_FAIL, "no memory for a rank");
    }
    *c = (struct comm){.ranks = 1, .local_ranks = 1};
    *out = c;
    return STATUS_OK;
}

// Where MPI knows of no ranks: what torchrun and others of its kind say, or Slurm.
static struct comm_launch launch_of(void)
{
    struct comm_launch l = {
        .ranks = number_in("WORLD_SIZE"),
        .rank = index_in("RANK"),
        .local_rank = index_in("LOCAL_RANK"),
        .local_ranks = number_in("LOCAL_WORLD_SIZE") ? number_in("LOCAL_WORLD_SIZE") : -1,
    };
    bool mpi = number_in("OMPI_COMM_WORLD_SIZE") || number_in("PMI_SIZE") || getenv("PMIX_RANK");
    if (l.ranks == 0 && getenv("SLURM_PROCID") && !mpi) {
        l = (struct comm_launch){.ranks = number_in("SLURM_STEP_NUM_TASKS"),
                                 .rank = index_in("SLURM_PROCID"),
                                 .local_rank = index_in("SLURM_LOCALID"),
                                 .local_ranks = -1};
    }
    l.ranks = l.ranks > 0 && l.rank >= 0 && l.rank < l.ranks ? l.ranks : 0;
    return l;
}

int comm_launched_rank(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
    struct comm_launch l = launch_of();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (index_in(names[i]) >= 0) {
            return index_in(names[i]);
        }
    }
    return l.ranks > 0 ? l.rank : 0;
}

bool comm_meets(bool gpus, int *rank)
{
    struct comm_launch l = launch_of();
    *rank = l.rank;
    return gpus && launched_ranks() == 1 && l.ranks > 1;
}

// Each would take itself for the only one.
static int refuse_strays(const struct comm_launch *l, struct error *err)
{
    return getenv("WORLD_SIZE")
               ? error_set(err, STATUS_FAIL,
                           "RANK and WORLD_SIZE name rank %d of %d, but on the CPU ranks talk by "
                           "MPI: mpirun -np %d, or --device cuda",
                           l->rank, l->ranks, l->ranks)
               : error_set(err, STATUS_FAIL,
                           "srun has started %d tasks that do not know of each other: "
                           "srun --mpi=pmix (srun --mpi=list names what there is)",
                           l->ranks);
}

static int refuse_size(int size, struct error *err)
{
    const char *rank = getenv("RANK");
    return error_set(err, STATUS_FAIL,
                     "WORLD_SIZE is %d, but RANK is %s: a launcher sets both, RANK from 0 to %d; "
                     "without other ranks unset WORLD_SIZE",
                     size, rank ? rank : "not there", size - 1);
}

static int open_on_gpus(struct comm **out, struct comm *base, const struct comm_config *config,
                        const struct comm_launch *launch, struct error *err)
{
#ifdef USE_NCCL
    return comm_nccl_open(out, base, config, launch, err);
#else
    (void)out;
    (void)config;
    error_set(err, STATUS_FAIL,
              "--device cuda: one of %d ranks, but this program was built without NCCL: "
              "scripts/install_deps.sh cuda says how to get it, then make",
              base ? base->ranks : launch->ranks);
    if (base) {
        base->transport->give_up(base, err->text);
    }
    return err->status;
#endif
}

#ifdef USE_MPI
// Ranks that would talk over NCCL and ranks that would not must not begin to.
static int agree_on_gpus(struct comm *c, bool gpus, struct error *err)
{
    bool all[c->ranks];
    if (comm_all_gather(c, &gpus, all, sizeof gpus, err)) {
        return err->status;
    }
    for (int i = 1; i < c->ranks; i++) {
        if (all[i] != all[0]) {
            error_set(err, STATUS_FAIL,
                      "the ranks are not alike: rank 0 would compute on a %s, rank %d on a %s; "
                      "--device cpu, or --device cuda where each has a GPU",
                      all[0] ? "GPU" : "CPU", i, all[i] ? "GPU" : "CPU");
            c->transport->give_up(c, err->text);
            return err->status;
        }
    }
    return STATUS_OK;
}

static int open_mpi(struct comm **out, const struct comm_config *config, int launched,
                    struct error *err)
{
    const struct comm_launch unsaid = {.local_rank = -1, .local_ranks = -1};
    if (comm_mpi_open(out, config, launched, err)) {
        return err->status;
    }
    if ((*out)->ranks > 1 && agree_on_gpus(*out, config->gpus, err)) {
        return err->status;
    }
    if (config->gpus && (*out)->ranks > 1) {
        struct comm_launch launch = unsaid;
        launch.local_rank = (*out)->local_rank;
        launch.local_ranks = (*out)->local_ranks;
        return open_on_gpus(out, *out, config, &launch, err);
    }
    return STATUS_OK;
}
#else
static int open_mpi(struct comm **out, const struct comm_config *config, int launched,
                    struct error *err)
{
    (void)out;
    (void)config;
    return error_set(err, STATUS_FAIL,
                     "started as one of %d ranks, but this program was built without MPI: "
                     "scripts/install_deps.sh test installs Open MPI, then make",
                     launched);
}
#endif

int comm_open(struct comm **out, const struct comm_config *config, struct error *err)
{
    int launched = launched_ranks();
    struct comm_launch launch = launch_of();
    struct comm_config c = *config;
    size_t longest = (size_t)1 << 30;
    c.silence_s = c.silence_s > 0 ? c.silence_s : 20;
    c.start_s = c.start_s > 0 ? c.start_s : 120;
    c.stall_s = c.stall_s > 0 ? c.stall_s : 300;
    c.message_bytes = c.message_bytes ? c.message_bytes : (size_t)1 << 24;
    c.message_bytes = c.message_bytes < longest ? c.message_bytes : longest;
    *out = NULL;
    if (launched != 1) {
        return open_mpi(out, &c, launched, err);
    }
    if (launch.ranks == 0 && number_in("WORLD_SIZE") > 1) {
        return refuse_size(number_in("WORLD_SIZE"), err);
    }
    if (launch.ranks <= 1) {
        return open_alone(out, err);
    }
    return c.gpus ? open_on_gpus(out, NULL, &c, &launch, err) : refuse_strays(&launch, err);
}

int comm_close(struct comm *c, struct error *err)
{
    if (c->transport) {
        return c->transport->close(c, err);
    }
    free(c);
    return STATUS_OK;
}

int comm_rank(const struct comm *c)
{
    return c->rank;
}

int comm_ranks(const struct comm *c)
{
    return c->ranks;
}

int comm_local_rank(const struct comm *c)
{
    return c->local_rank;
}

int comm_local_ranks(const struct comm *c)
{
    return c->local_ranks;
}

int comm_gpu(const struct comm *c)
{
    return c->gpu;
}

void comm_use_device(struct comm *c, struct device *dev)
{
    if (c->ranks > 1 && c->transport->use_device) {
        c->transport->use_device(c, dev);
    }
}

void comm_abort(struct comm *c, const char *why)
{
    if (c->ranks > 1) {
        c->transport->give_up(c, why);
    }
}

void comm_doing(struct comm *c, enum comm_thread thread, const char *text)
{
    if (c->ranks > 1) {
        c->transport->doing(c, thread, text);
    }
}

void comm_waits(struct comm *c, bool waits)
{
    if (c->ranks > 1) {
        c->transport->waits(c, waits);
    }
}

// ---- small ones ---------------------------------------------------------------------------------

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0) {
        memcpy(to, from, bytes);
    }
}

// Around the main thread's operations.
static const struct transport *waiting(struct comm *c)
{
    c->transport->waits(c, true);
    return c->transport;
}

static int waited(struct comm *c, int status)
{
    c->transport->waits(c, false);
    return status;
}

int comm_all_gather(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    if (c->ranks > 1) {
        return waited(c, waiting(c)->all_gather(c, mine, all, bytes, err));
    }
    copy(all, mine, bytes);
    return STATUS_OK;
}

int comm_broadcast(struct comm *c, void *x, size_t bytes, int from, struct error *err)
{
    return c->ranks > 1 ? waited(c, waiting(c)->broadcast(c, x, bytes, from, err)) : STATUS_OK;
}

int comm_barrier(struct comm *c, struct error *err)
{
    return c->ranks > 1 ? waited(c, waiting(c)->barrier(c, err)) : STATUS_OK;
}

// ---- agreement ----------------------------------------------------------------------------------

// Names and values one after the other, each ended by a 0.
static char *pack(const struct comm_value *values, size_t n, size_t *bytes)
{
    *bytes = 0;
    for (size_t i = 0; i < n; i++) {
        *bytes += strlen(values[i].name) + strlen(values[i].value) + 2;
    }
    char *packed = malloc(*bytes + 1), *at = packed; // not of 0 bytes
    for (size_t i = 0; packed && i < n; i++) {
        at = stpcpy(at, values[i].name) + 1;
        at = stpcpy(at, values[i].value) + 1;
    }
    return packed;
}

// Text `index` of what was packed; NULL: there are not so many.
static const char *packed_text(const char *packed, size_t bytes, size_t index)
{
    const char *end = packed + bytes;
    for (; index > 0 && packed < end; index--) {
        packed += strlen(packed) + 1;
    }
    return packed < end ? packed : NULL;
}

// The first text that is not the same; SIZE_MAX: all are.
static size_t first_difference(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    const char *a_end = a + a_bytes, *b_end = b + b_bytes;
    for (size_t i = 0;; i++) {
        if (a == a_end || b == b_end) {
            return a == a_end && b == b_end ? SIZE_MAX : i;
        }
        if (strcmp(a, b) != 0) {
            return i;
        }
        a += strlen(a) + 1;
        b += strlen(b) + 1;
    }
}

// A rank that cannot go on says so, or it would leave the others alone with the rest.
static int no_memory(struct comm *c, struct error *err)
{
    error_set(err, STATUS_FAIL, "no memory to compare what the ranks were started with");
    comm_abort(c, err->text);
    return err->status;
}

// Rank `from`'s texts into *theirs, which the caller frees, on all ranks.
static int spread(struct comm *c, const char *mine, size_t bytes, int from, char **theirs,
                  size_t *theirs_bytes, struct error *err)
{
    uint64_t size = bytes;
    *theirs = NULL;
    if (comm_broadcast(c, &size, sizeof size, from, err)) {
        return err->status;
    }
    *theirs_bytes = size;
    *theirs = malloc(size + 1);
    if (!*theirs) {
        return no_memory(c, err);
    }
    if (c->rank == from) {
        copy(*theirs, mine, bytes);
    }
    return comm_broadcast(c, *theirs, size, from, err);
}

// Of a long text, what is around the first byte that differs from the other's.
enum { EXCERPT = 120 };
static void excerpt(char out[EXCERPT + 8], const char *text, const char *other)
{
    size_t same = 0, length = strlen(text);
    while (other && text[same] && text[same] == other[same]) {
        same++;
    }
    size_t from = length <= EXCERPT || same <= EXCERPT / 2 ? 0 : same - EXCERPT / 2;
    snprintf(out, EXCERPT + 8, "%s%.*s%s", from > 0 ? "..." : "", EXCERPT, text + from,
             from + EXCERPT < length ? "..." : "");
}

static int disagree(int rank, size_t index, const char *ours, size_t ours_bytes, const char *theirs,
                    size_t theirs_bytes, struct error *err)
{
    size_t name = index - index % 2;
    const char *a = packed_text(ours, ours_bytes, index);
    const char *b = packed_text(theirs, theirs_bytes, index);
    char a_part[EXCERPT + 8], b_part[EXCERPT + 8];
    excerpt(a_part, a ? a : "nothing", b);
    excerpt(b_part, b ? b : "nothing", a);
    if (name == index) {
        return error_set(err, STATUS_FAIL,
                         "the ranks are not started alike: where rank 0 has '%s', rank %d has '%s'",
                         a_part, rank, b_part);
    }
    return error_set(err, STATUS_FAIL,
                     "the ranks are not started alike: %s is '%s' on rank 0 and '%s' on rank %d; "
                     "all ranks need the same command, files and build",
                     packed_text(ours, ours_bytes, name), a_part, b_part, rank);
}

// Rank 0's texts are `ours` here. Says on all ranks where the first difference is.
static int compare(struct comm *c, const char *mine, size_t bytes, const char *ours,
                   size_t ours_bytes, struct error *err)
{
    uint64_t differs = first_difference(ours, ours_bytes, mine, bytes);
    uint64_t *all = malloc((size_t)c->ranks * sizeof *all);
    if (!all) {
        return no_memory(c, err);
    }
    int status = comm_all_gather(c, &differs, all, sizeof differs, err);
    int rank = 0;
    for (int i = 1; i < c->ranks && status == STATUS_OK; i++) {
        rank = all[i] < all[rank] ? i : rank;
    }
    uint64_t index = status ? SIZE_MAX : all[rank];
    free(all);
    if (index == SIZE_MAX) {
        return status;
    }
    char *theirs;
    size_t theirs_bytes;
    status = spread(c, mine, bytes, rank, &theirs, &theirs_bytes, err);
    if (status == STATUS_OK) {
        status = disagree(rank, index, ours, ours_bytes, theirs, theirs_bytes, err);
    }
    free(theirs);
    return status;
}

int comm_agree(struct comm *c, const struct comm_value *values, size_t n, struct error *err)
{
    if (c->ranks == 1) {
        return STATUS_OK;
    }
    size_t bytes, ours_bytes;
    char *mine = pack(values, n, &bytes), *ours;
    if (!mine) {
        return no_memory(c, err);
    }
    int status = spread(c, mine, bytes, 0, &ours, &ours_bytes, err);
    if (status == STATUS_OK) {
        status = compare(c, mine, bytes, ours, ours_bytes, err);
    }
    free(ours);
    free(mine);
    return status;
}

// ---- pieces -------------------------------------------------------------------------------------

int comm_exchange(struct comm *c, void *stage, const void *x, const struct comm_pieces *p,
                  struct error *err)
{
    if (c->ranks > 1) {
        return c->transport->exchange(c, stage, x, p, err);
    }
    copy(stage, (const char *)x + p->first[0] * p->element, p->n[0] * p->element);
    return STATUS_OK;
}

int comm_gather(struct comm *c, void *x, const void *mine, const struct comm_pieces *p,
                struct error *err)
{
    char *place = (char *)x + p->first[c->rank] * p->element;
    if (c->ranks > 1) {
        return c->transport->gather(c, x, mine, p, err);
    }
    if (mine != place) {
        copy(place, mine, p->n[0] * p->element);
    }
    return STATUS_OK;
}

int comm_share(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    if (c->ranks > 1) {
        return c->transport->share(c, mine, all, bytes, err);
    }
    if (mine != all) {
        copy(all, mine, bytes);
    }
    return STATUS_OK;
}

int comm_reduce(struct comm *c, void *sum, const void *x, const struct comm_pieces *p,
                struct error *err)
{
    if (c->ranks > 1) {
        return c->transport->reduce(c, sum, x, p, err);
    }
    copy(sum, (const char *)x + p->first[0] * p->element, p->n[0] * p->element);
    return STATUS_OK;
}
