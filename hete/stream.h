// stream.h - a state of a session as one sequence, in the order in which model files have it.
//
// stream_give and stream_take are what data/checkpoint.h asks for: chunks come in order, and the
// bytes are those of the file, fp32 or bf16.
//
// With several ranks one of them writes a file, but the state lies on all: while the first rank
// gives, the others follow, and hand out what is asked for, until it says that it is done.
#ifndef HETE_STREAM_H
#define HETE_STREAM_H

#include "hete/comm.h"
#include "hete/session.h"

// Element `first` of the sequence belongs to unit `unit`, at element `at` of it, and so do the
// `elems` from there on.
struct span {
    size_t unit, at, elems;
};

struct stream {
    struct session *session;
    enum state state;
    struct span (*span)(const void *ctx, size_t first); // of the model
    const void *ctx;
    struct comm *comm; // while giving: of the ranks that follow; NULL: none do
    float *fp32;       // room for a chunk, where the file has bf16; else NULL
};

int stream_give(void *stream, void *file, size_t first, size_t n, struct error *err);
int stream_take(void *stream, void *file, size_t first, size_t n, struct error *err);

// The other ranks', until the first one's stream_done, which says whether its files are whole.
// STATUS_FAIL: no memory, or a rank is gone.
int stream_follow(struct session *session, struct comm *comm, bool *whole, struct error *err);
int stream_done(struct comm *comm, bool whole, struct error *err);

#endif
