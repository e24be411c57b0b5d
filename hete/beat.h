// beat.h - are the other ranks alive? A thread per rank that asks, over MPI (comm_mpi.c) or files
// (meet.c).
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
// What a beat also says is how many ranks, from its own to the right, do nothing but wait for
// others. That is all of them only if nobody is at work; if it stays so for stall_s, and for as
// long as the news needs to come around, and nothing moves, whoever finds out tells all.
//
// A rank that leaves (beat_leave) with fewer operations begun than the one that watches it would be
// waited for without end: that is found here, too.
#ifndef HETE_BEAT_H
#define HETE_BEAT_H

#include "hete/comm.h"

#include <stdbool.h>
#include <stdint.h>

// Where a rank runs. Process numbers mean something in their own name space alone.
struct beat_place {
    char host[64];
    int64_t pid;
    uint64_t space[2];
};
void beat_place(struct beat_place *own);

// What a rank knows of itself, and its watcher of it.
enum { BEAT_DOING_BYTES = 96 };
struct beat_doing {
    char text[COMM_THREADS][BEAT_DOING_BYTES];
    uint64_t begun[COMM_THREADS]; // operations
    int waiting;                  // ranks, from this one to the right
    bool leaves;
};

struct beat_message {
    enum beat_kind { BEAT_ALIVE, BEAT_FAILED, BEAT_GONE } kind;
    struct beat_doing doing;
    char text[512]; // of FAILED, why; of GONE, who and how it was found
};

// How messages travel. Called by the thread alone, but for close.
struct beat_wire {
    void *ctx;
    // To the left neighbour, without its text. False: the one before has not left yet.
    bool (*send)(void *ctx, const struct beat_message *m);
    // To all but oneself and `except` (-1: nobody). Returns after a second or so, whatever happens.
    void (*tell)(void *ctx, const struct beat_message *m, int except);
    // Has something come: what, and from whom?
    bool (*hear)(void *ctx, struct beat_message *m, int *from);
    // failed: what was told may still be under way.
    void (*close)(void *ctx, bool failed);
};

struct beat;

// Called by all ranks; places[ranks]. The wire is closed by beat_close, or if this fails.
int beat_open(struct beat **out, const struct beat_wire *wire, int rank, int ranks,
              const struct beat_place *places, const struct comm_config *config, struct error *err);
// Ends the thread; nobody is watched any more. Frees b.
void beat_close(struct beat *b);

void beat_doing(struct beat *b, enum comm_thread thread, const char *text);
// This rank begins an operation that the others have to take part in.
void beat_begin(struct beat *b, enum comm_thread thread);
// Of an operation that has begun: a part of what it sends and receives is done.
void beat_moves(struct beat *b);
// This rank does nothing but wait for others, until it says that it does.
void beat_waits(struct beat *b, bool waits);
// This rank begins no more of them: that its process ends is not a death.
void beat_leave(struct beat *b);
void beat_abort(struct beat *b, const char *why);

// Is a rank gone, or has this one given up? One load; err is set then.
bool beat_failed(struct beat *b, struct error *err);

#endif
