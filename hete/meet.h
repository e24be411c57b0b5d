// meet.h - ranks that no MPI has started find each other in a directory, and watch each other
// there.
//
// For GPUs: what has to pass before NCCL can carry anything is little, and each rank has been told
// its number (comm_launch). All ranks see DIR, which is the run's --out; rank 0 has its lock. What
// follows lies in DIR/ranks. JOB is a number made of the job's identity: whatever the launchers'
// variables say of it (torchrun's run id and restart, MASTER_ADDR and MASTER_PORT, Slurm's job,
// step and restart) and the number of ranks.
//
//   rank i > 0   hello.JOB.i   its identity, a nonce of its own, what it has to say
//   rank 0       (removes all files that are there)
//                job.JOB       a token of its own, each rank's nonce and words, rank 0's data
//   rank i > 0   hello.JOB.i   the same, with the token: it has joined
//   rank 0       (removes job.JOB and the hellos when all have joined)
//
// Nobody takes what an earlier job has left, be its identity the same: a rank believes a job file
// only with its own nonce in it, which is random and made by this process, and rank 0 counts a rank
// as joined only with its own token. An old hello that rank 0 did take for a new one is replaced by
// its rank, and rank 0 writes the job file again with the new nonce. A rank whose hello has been
// removed writes it again; one that finds somebody else's in its place says so: two processes have
// the same number. Whoever waits longer than start_s says for whom.
//
// A second job in the same DIR is refused by the lock, before its rank 0 touches anything. Its
// other ranks leave hellos that nobody asks for any more; what the first job goes on with is named
// by its token. (While the first one's ranks still gather, a second one whose launcher gives it no
// name of its own is not told from it, and one of the two ranks of one number ends.)
//
// From then on (beat.h), once a beat:
//
//   rank i       beat.TOKEN.i  what it does, and a count: written in place, not synced, so that no
//                              full or busy disk holds it up
//   anybody      end.TOKEN     once: who has failed or is gone, and why. All look for it.
//
// A shared file system tells of changes when a file is opened anew: nothing is kept open.
#ifndef HETE_MEET_H
#define HETE_MEET_H

#include "hete/transport.h"

enum { MEET_WORDS_MAX = 256, MEET_DATA_MAX = 512 }; // bytes

// mine[bytes] of every rank into all[ranks][bytes], data of rank 0 into everybody's. The transport
// is one of liveness alone: it carries nothing. STATUS_USAGE: no config->dir. The limits of config
// are set.
int comm_meet_open(struct comm **out, const struct comm_config *config,
                   const struct comm_launch *launch, const void *mine, void *all, size_t bytes,
                   void *data, size_t data_bytes, struct error *err);

#endif
