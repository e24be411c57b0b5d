// transport.h - the functions of comm.h as a table that every transport fills in.
#ifndef HETE_TRANSPORT_H
#define HETE_TRANSPORT_H

#include "hete/comm.h"
#include "kernels/device.h"

// With one rank only `close` is called, and it may be that there is no table.
struct transport {
    int (*close)(struct comm *, struct error *); // frees it
    void (*give_up)(struct comm *, const char *why);
    void (*doing)(struct comm *, enum comm_thread, const char *text);
    void (*waits)(struct comm *, bool waits); // comm.c tells of the main thread's calls
    int (*all_gather)(struct comm *, const void *mine, void *all, size_t bytes, struct error *);
    int (*broadcast)(struct comm *, void *x, size_t bytes, int from, struct error *);
    int (*barrier)(struct comm *, struct error *);
    int (*exchange)(struct comm *, void *stage, const void *x, const struct comm_pieces *,
                    struct error *);
    int (*gather)(struct comm *, void *x, const void *mine, const struct comm_pieces *,
                  struct error *);
    int (*share)(struct comm *, const void *mine, void *all, size_t bytes, struct error *);
    int (*reduce)(struct comm *, void *sum, const void *x, const struct comm_pieces *,
                  struct error *);
    void (*use_device)(struct comm *, struct device *); // NULL: host memory
    // For a transport that leaves liveness to this one (comm_nccl.c). begin: an operation in which
    // all take part. failed: is a rank gone? leave: no more operations.
    void (*begin)(struct comm *, enum comm_thread);
    bool (*failed)(struct comm *, struct error *);
    int (*leave)(struct comm *, struct error *);
};

// What a transport's own structure begins with.
struct comm {
    const struct transport *transport;
    int rank, ranks, local_rank, local_ranks, gpu;
};

// What a launcher that sets RANK and the like says. ranks 0: there is none. -1: it does not say.
struct comm_launch {
    int rank, ranks, local_rank, local_ranks;
};

// The limits of config are set. launched: how many ranks the launcher says there are, 0: unknown.
int comm_mpi_open(struct comm **out, const struct comm_config *config, int launched,
                  struct error *err);

// On GPUs. base: an open transport over MPI, which is then this one's; NULL: the ranks meet in
// config.dir (meet.h), and launch says which this is. The limits of config are set.
int comm_nccl_open(struct comm **out, struct comm *base, const struct comm_config *config,
                   const struct comm_launch *launch, struct error *err);

#endif
