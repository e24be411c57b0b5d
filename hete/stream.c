// stream.c - converts between the dtype of a file and fp32, piece by piece.
#include "hete/stream.h"
#include "kernels/bf16.h"

#include <stdlib.h>

#define PIECE ((size_t)1 << 20) // elements that are asked for at a time

// What the first rank asks for; n 0: nothing more, and whether what it wrote is whole.
struct request {
    uint64_t state, unit, at, n, whole;
};

static int read_piece(const struct stream *s, size_t unit, size_t at, float *x, size_t n,
                      struct error *err)
{
    struct request r = {s->state, unit, at, n, 0};
    if (s->comm && comm_broadcast(s->comm, &r, sizeof r, 0, err)) {
        return err->status;
    }
    session_read(s->session, s->state, unit, at, x, n);
    return session_moved(s->session, err);
}

static int move(const struct stream *s, float *x, size_t first, size_t n, bool to_session,
                struct error *err)
{
    for (size_t i = 0; i < n;) {
        struct span span = s->span(s->ctx, first + i);
        size_t m = span.elems < n - i ? span.elems : n - i;
        m = m < PIECE ? m : PIECE;
        if (to_session) {
            session_write(s->session, s->state, span.unit, span.at, x + i, m);
        } else if (read_piece(s, span.unit, span.at, x + i, m, err)) {
            return err->status;
        }
        i += m;
    }
    return session_moved(s->session, err);
}

int stream_follow(struct session *session, struct comm *comm, bool *whole, struct error *err)
{
    float *x = malloc(PIECE * sizeof *x);
    struct request r = {.n = 1};
    int status =
        x ? STATUS_OK : error_set(err, STATUS_FAIL, "no memory to hand out %zu elements", PIECE);
    while (!status && !(status = comm_broadcast(comm, &r, sizeof r, 0, err)) && r.n) {
        session_read(session, (enum state)r.state, r.unit, r.at, x, r.n);
        status = session_moved(session, err);
    }
    *whole = r.whole;
    free(x);
    return status;
}

int stream_done(struct comm *comm, bool whole, struct error *err)
{
    struct request r = {.whole = whole};
    return comm_broadcast(comm, &r, sizeof r, 0, err);
}

int stream_give(void *stream, void *file, size_t first, size_t n, struct error *err)
{
    const struct stream *s = stream;
    if (move(s, s->fp32 ? s->fp32 : file, first, n, false, err)) {
        return err->status;
    }
    for (size_t i = 0; s->fp32 && i < n; i++) {
        ((uint16_t *)file)[i] = bf16_round(s->fp32[i]);
    }
    return STATUS_OK;
}

int stream_take(void *stream, void *file, size_t first, size_t n, struct error *err)
{
    const struct stream *s = stream;
    for (size_t i = 0; s->fp32 && i < n; i++) {
        s->fp32[i] = bf16_load(((const uint16_t *)file)[i]);
    }
    return move(s, s->fp32 ? s->fp32 : file, first, n, true, err);
}
