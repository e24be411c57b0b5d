// comm.h - what the ranks of a run say to each other.
//
// A rank is one process of a run, numbered from 0; they run the same program on a share of the data
// each. Where nothing has launched several ranks there is one, everything below is a copy or
// nothing at all, and no transport is started. Otherwise the transport is MPI (mpirun, or srun with
// PMIx), which is in the build if `make` has found it. Between GPUs the lane is NCCL's; then MPI is
// not needed where a launcher sets RANK and WORLD_SIZE (torchrun) or Slurm's variables are there,
// and the ranks meet in a directory that all of them see (meet.h).
//
//   main thread   agree . . . . all_gather . broadcast . . . barrier . . close     between steps
//   one lane        exchange | gather | exchange | ...                             during steps
//   heartbeat     . . beat . . beat . . beat . . beat . . beat . . beat            by itself
//
// The three share nothing: each has a communicator of its own. With GPUs the main thread is the
// lane's, too: the one thread that calls the device. All ranks call the same functions
// in the same order, per thread. A call returns when this rank's part is done. Nothing here adds
// anything up, but for comm_reduce: the results are the same bits whatever the size of messages.
//
// Liveness. A rank that is killed, stopped or cut off is noticed by every other rank: on its own
// node at once where it has ended, else when nothing was heard of it for silence_s. How long an
// operation takes is never held against a rank; it is its heartbeat thread that has to answer. But
// nobody waits for ever: if all ranks do nothing but wait for each other for stall_s, and nothing
// moves between them (of NCCL's operations only their beginnings are seen), they all end. In each
// of these cases config.gone is called, on a thread of the transport's, and after it returned,
// which it need not, every call that waits or comes later fails with the same message. A rank that
// fails by itself says why first: comm_abort.
#ifndef HETE_COMM_H
#define HETE_COMM_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>

struct comm;
struct device;

struct comm_config {
    // Of a rank of which nothing is heard for so long, everybody says that it is gone; also the
    // limit of MPI's own end. 0: 20. All ranks give the same.
    double silence_s;
    double start_s;       // the limit of MPI's own start. 0: 120
    double stall_s;       // see Liveness. 0: 300
    size_t message_bytes; // what is longer is sent in several messages. 0: 2^24; at most 2^30
    bool gpus;            // the lane's memory is that of GPUs, one for each rank
    const char *dir;      // where ranks of GPUs meet without MPI: that of this run. NULL: nowhere
    // The message names the rank that is gone, what it did last, and what this rank was doing. It
    // is for whoever owns the process to print it and end the process, by _exit: other threads are
    // at work. It calls nothing of this header, is called once at most, and not after comm_abort.
    // NULL: nothing is called.
    void (*gone)(void *ctx, const struct error *err);
    void *ctx;
};

// Called by all ranks, once in a process. STATUS_FAIL: the launcher has started several ranks and
// this build has no MPI or one that does not know of them; it does not say which this is; MPI has
// no threads; no memory; no GPU for each rank, or NCCL does not connect them. STATUS_USAGE: where
// no `dir` is given and needed.
int comm_open(struct comm **out, const struct comm_config *config, struct error *err);

// Called by all ranks that have not failed, with no other thread in a call: waits for the others,
// however long their last work takes. STATUS_FAIL: one of them is gone, or leaves without having
// done what this one has; the rest of the process ends without them. After a failed call or
// comm_abort it waits for nobody. Frees c in any case.
int comm_close(struct comm *c, struct error *err);

int comm_rank(const struct comm *c);
int comm_ranks(const struct comm *c);
// Among the ranks on the same machine.
int comm_local_rank(const struct comm *c);
int comm_local_ranks(const struct comm *c);
// Index of this rank's GPU among those that the process sees; 0 without GPUs.
int comm_gpu(const struct comm *c);

// The rank that a launcher says this process is, before comm_open or without it; 0: or there is no
// launcher.
int comm_launched_rank(void);

// Will comm_open need a directory in which the ranks meet? Rank 0 has locked it before. *rank: this
// process's.
bool comm_meets(bool gpus, int *rank);

// Tells the other ranks that this one ends, and why (one line, without its rank): their `gone` is
// called with that, and this rank's calls fail. Returns when they have been told, or after a few
// seconds. From any thread.
void comm_abort(struct comm *c, const char *why);

// What this rank is doing, for the message about one that is gone: both threads' texts are in it.
// Copied, and cut after 95 bytes. "": nothing worth telling. Costs nothing with one rank.
enum comm_thread { COMM_MAIN, COMM_LANE, COMM_THREADS };
void comm_doing(struct comm *c, enum comm_thread thread, const char *text);

// Of the main thread: it waits for the lane, and nothing else is at work here; or no longer so. In
// the calls below that is known anyway.
void comm_waits(struct comm *c, bool waits);

// ---- the main thread, between steps -------------------------------------------------------------

// mine[bytes] of every rank into all[ranks][bytes], in rank order.
int comm_all_gather(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err);
// x[bytes] of rank `from` into everybody's.
int comm_broadcast(struct comm *c, void *x, size_t bytes, int from, struct error *err);
int comm_barrier(struct comm *c, struct error *err);

struct comm_value {
    const char *name, *value;
};
// Do all ranks have the same values, of the same names, in the same order? STATUS_FAIL on all of
// them, with the same message, if not: the first name that differs, the lowest rank that differs
// from rank 0 there, and both values. The process is as it was after that: comm_close works.
int comm_agree(struct comm *c, const struct comm_value *values, size_t n, struct error *err);

// ---- one thread, during steps -------------------------------------------------------------------
//
// With GPUs x, stage, sum and mine are addresses for `layers` on the device, and these functions
// queue on its DEVICE_COMM lane and return. What comm_share is given is pinned host memory: mine is
// read, and all is written, by the time that the lane has passed. If something fails later, the
// device fails with it.

// The device that the lane's memory is of, while it is open; nothing is in flight. NULL: none any
// more. One that does not queue changes nothing.
void comm_use_device(struct comm *c, struct device *dev);

// How an array is cut among the ranks. Piece i, of rank i, is elements [first[i], first[i] + n[i]);
// pieces do not overlap, may lie in any order, leave gaps and be empty. The same on all ranks.
struct comm_pieces {
    size_t element;          // bytes
    const size_t *first, *n; // [ranks], in elements
};

// The first half of a reduce-scatter in rank order: everybody's version of this rank's piece.
//   stage[j] = piece `rank` of rank j's x      stage[ranks][n[rank]], x: read at all pieces
int comm_exchange(struct comm *c, void *stage, const void *x, const struct comm_pieces *p,
                  struct error *err);

// Everybody gets all pieces: piece i of x comes from rank i's `mine`, which may be its place in x.
// Gaps stay as they are.
int comm_gather(struct comm *c, void *x, const void *mine, const struct comm_pieces *p,
                struct error *err);

// mine[bytes] of every rank into all[ranks][bytes], in rank order; a few kilobytes of host memory
// each. mine may be its place in all.
int comm_share(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err);

// What comm_exchange and a sum do, by the library's own reductions: in an order that it chooses, so
// not in general the same bits from one MPI, size or number of nodes to the next. For networks that
// add up by themselves: on one machine Open MPI 4.1 takes 3 to 5 times as long as comm_exchange.
// element: 4 of fp32, or 2 of bf16, which is rounded whenever two are added.
//   sum = the sum over j of piece `rank` of rank j's x      sum[n[rank]], apart from x
int comm_reduce(struct comm *c, void *sum, const void *x, const struct comm_pieces *p,
                struct error *err);

#endif
