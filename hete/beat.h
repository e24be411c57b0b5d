// beat.h - are the other ranks alive? A thread per rank that asks, over MPI.
//
//   rank       0 <--- 1 <--- 2 <--- 3        every beat_s a small message to the left neighbour,
//              |________________^            which is the one that watches
//
// What a beat says is what its rank is doing, and how many operations it has begun. A rank says
// that its right neighbour is gone when it has not heard of it for silence_s; counted is the time
// in which this rank was awake itself, so that a rank which was stopped and goes on blames nobody.
// On one machine the kernel says at once when a process has ended (pidfd). Whoever finds out tells
// all.
//
// A rank that leaves (beat_leave) with fewer operations begun than the one that watches it would be
// waited for without end: that is found here, too.
#ifndef HETE_BEAT_H
#define HETE_BEAT_H

#include "hete/comm.h"

#include <mpi.h>
#include <stdbool.h>

struct beat;

// Called by all ranks. comm: for this alone; MPI must allow several threads.
int beat_open(struct beat **out, MPI_Comm comm, const struct comm_config *config,
              struct error *err);
// Ends the thread; nobody is watched any more. Frees b.
void beat_close(struct beat *b);

void beat_doing(struct beat *b, enum comm_thread thread, const char *text);
// This rank begins an operation that the others have to take part in.
void beat_begin(struct beat *b, enum comm_thread thread);
// This rank begins no more of them: that its process ends is not a death.
void beat_leave(struct beat *b);
void beat_abort(struct beat *b, const char *why);

// Is a rank gone, or has this one given up? One load; err is set then.
bool beat_failed(struct beat *b, struct error *err);

// The message of an MPI function that did not return MPI_SUCCESS.
int mpi_error(int code, const char *what, struct error *err);

#endif
