// stream.c - converts between the dtype of a file and fp32, piece by piece.
#include "hete/stream.h"
#include "kernels/bf16.h"

static void move(const struct stream *s, float *x, size_t first, size_t n, bool to_session)
{
    for (size_t i = 0; i < n;) {
        struct span span = s->span(s->ctx, first + i);
        size_t m = span.elems < n - i ? span.elems : n - i;
        if (to_session) {
            session_write(s->session, s->state, span.unit, span.at, x + i, m);
        } else {
            session_read(s->session, s->state, span.unit, span.at, x + i, m);
        }
        i += m;
    }
}

int stream_give(void *stream, void *file, size_t first, size_t n, struct error *err)
{
    const struct stream *s = stream;
    move(s, s->fp32 ? s->fp32 : file, first, n, false);
    for (size_t i = 0; s->fp32 && i < n; i++) {
        ((uint16_t *)file)[i] = bf16_round(s->fp32[i]);
    }
    return session_moved(s->session, err);
}

int stream_take(void *stream, void *file, size_t first, size_t n, struct error *err)
{
    const struct stream *s = stream;
    for (size_t i = 0; s->fp32 && i < n; i++) {
        s->fp32[i] = bf16_load(((const uint16_t *)file)[i]);
    }
    move(s, s->fp32 ? s->fp32 : file, first, n, true);
    return session_moved(s->session, err);
}
