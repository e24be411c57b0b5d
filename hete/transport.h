// transport.h - the functions of comm.h as a table that every transport fills in.
#ifndef HETE_TRANSPORT_H
#define HETE_TRANSPORT_H

#include "hete/comm.h"

// With one rank only `close` is called, and it may be that there is no table.
struct transport {
    int (*close)(struct comm *, struct error *); // frees it
    void (*give_up)(struct comm *, const char *why);
    void (*doing)(struct comm *, enum comm_thread, const char *text);
    int (*all_gather)(struct comm *, const void *mine, void *all, size_t bytes, struct error *);
    int (*broadcast)(struct comm *, void *x, size_t bytes, int from, struct error *);
    int (*barrier)(struct comm *, struct error *);
    int (*exchange)(struct comm *, void *stage, const void *x, const struct comm_pieces *,
                    struct error *);
    int (*gather)(struct comm *, void *x, const void *mine, const struct comm_pieces *,
                  struct error *);
    int (*share)(struct comm *, const void *mine, void *all, size_t bytes, struct error *);
    int (*reduce)(struct comm *, float *sum, const float *x, const struct comm_pieces *,
                  struct error *);
};

// What a transport's own structure begins with.
struct comm {
    const struct transport *transport;
    int rank, ranks, local_rank, local_ranks;
};

// The limits of config are set. launched: how many ranks the launcher says there are, 0: unknown.
int comm_mpi_open(struct comm **out, const struct comm_config *config, int launched,
                  struct error *err);

#endif
