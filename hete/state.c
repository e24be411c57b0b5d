// state.c - parameters and moments of a session in and out, wherever the plan has put them.
#include "hete/inside.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

void to_fp32(float *out, const void *in, enum dtype dtype, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        out[i] =
            dtype == DTYPE_FP32 ? ((const float *)in)[i] : bf16_load(((const uint16_t *)in)[i]);
    }
}

// ---- state --------------------------------------------------------------------------------------

// Elements moved at a time between a state in 16 bits and fp32 host memory.
#define MOVE ((size_t)65536) // a GPU is slow with small pieces

// A run of elements somewhere.
struct state_place {
    char *at;
    enum space space;
    enum dtype dtype;
};

static struct state_place place_of(const struct session *s, enum buffer_kind kind, size_t index,
                                   enum dtype dtype, size_t first)
{
    return (struct state_place){at(s, kind, index) + first * dtype_bytes(dtype),
                                s->layout.region[kind][index].space, dtype};
}

// What this rank updates of the parameters, in the dtype that the device computes with. Of an
// element of the unit.
static struct state_place working(const struct session *s, size_t u, size_t first)
{
    enum dtype dtype = s->dev->dtype;
    size_t held = first - held_of(s, u).first;
    if (on_host(s, u)) { // what is copied to the device
        return place_of(s, BUF_HOST_PARAMS, current(s, u, 0), dtype, held);
    }
    return s->plan.unit[u].stream ? place_of(s, BUF_PARAM_SHARD, u, dtype, held)
                                  : place_of(s, BUF_PARAMS, u, dtype, first);
}

// Between steps all slices of a unit's state lie in the same place.
static struct state_place state_at(const struct session *s, enum state state, size_t u,
                                   size_t first)
{
    bool host = on_host(s, u);
    size_t index = host ? current(s, u, 0) : u, held = first - held_of(s, u).first;
    if (state == STATE_PARAMS && (s->dev->dtype == DTYPE_FP32 || !s->config.train)) {
        return working(s, u, first);
    }
    if (state == STATE_PARAMS) {
        return place_of(s, host ? BUF_HOST_MASTER : BUF_MASTER, index, DTYPE_FP32, held);
    }
    return place_of(s, host ? BUF_HOST_MOMENTS : BUF_MOMENTS, index, DTYPE_FP32,
                    held + (state == STATE_V ? step_held(&s->shape, &s->plan, u) : 0));
}

static void move_out(const struct session *s, const struct state_place *p, size_t at, float *out,
                     size_t n)
{
    uint16_t bf16[MOVE];
    const char *from = p->at + at * dtype_bytes(p->dtype);
    if (p->space != SPACE_DEVICE) {
        to_fp32(out, from, p->dtype, n);
    } else if (p->dtype == DTYPE_FP32) {
        device_peek(s->dev, out, from, n * sizeof *out);
    } else {
        device_peek(s->dev, bf16, from, n * sizeof *bf16);
        to_fp32(out, bf16, p->dtype, n);
    }
}

static void move_in(const struct session *s, const struct state_place *p, size_t at,
                    const float *in, size_t n)
{
    uint16_t bf16[MOVE];
    const void *from = in;
    size_t size = dtype_bytes(p->dtype);
    for (size_t i = 0; p->dtype != DTYPE_FP32 && i < n; i++) {
        bf16[i] = bf16_round(in[i]);
        from = bf16;
    }
    if (p->space == SPACE_DEVICE) {
        device_poke(s->dev, p->at + at * size, from, n * size);
    } else {
        memcpy(p->at + at * size, from, n * size);
    }
}

// [first, first + n) without what is not in p.
static struct part overlap(struct part p, size_t first, size_t n)
{
    size_t lo = first > p.first ? first : p.first, end = first + n, p_end = p.first + p.n;
    size_t hi = end < p_end ? end : p_end;
    return (struct part){.first = lo, .n = hi > lo ? hi - lo : 0};
}

static void read_own(const struct session *s, enum state state, size_t u, struct part p, float *out)
{
    struct state_place place = state_at(s, state, u, p.first);
    for (size_t i = 0; i < p.n; i += MOVE) {
        move_out(s, &place, i, out + i, p.n - i < MOVE ? p.n - i : MOVE);
    }
}

void session_read(struct session *s, enum state state, size_t unit, size_t first, float *out,
                  size_t n)
{
    assert(session_in_flight(s) == 0);
    if (!sharded(s, unit)) {
        read_own(s, state, unit, (struct part){.first = first, .n = n}, out);
        return;
    }
    struct comm_pieces pieces = pieces_of(s, unit);
    for (size_t r = 0; r < ranks(s) && s->error.status == STATUS_OK; r++) {
        struct part of_r = {.first = pieces.first[r], .n = pieces.n[r]};
        struct part p = overlap(of_r, first, n);
        float *to = out + (p.first - first);
        if (p.n && r == s->shape.rank) {
            read_own(s, state, unit, p, to);
        }
        if (p.n) {
            comm_broadcast(s->config.comm, to, p.n * sizeof *to, (int)r, &s->error);
        }
    }
}

static void write_own(struct session *s, enum state state, size_t u, struct part p, const float *in)
{
    struct state_place place = state_at(s, state, u, p.first), w = working(s, u, p.first);
    for (size_t i = 0; i < p.n; i += MOVE) {
        size_t m = p.n - i < MOVE ? p.n - i : MOVE;
        move_in(s, &place, i, in + i, m);
        if (state == STATE_PARAMS && w.at != place.at) {
            move_in(s, &w, i, in + i, m);
        }
    }
}

void session_write(struct session *s, enum state state, size_t unit, size_t first, const float *in,
                   size_t n)
{
    assert(session_in_flight(s) == 0);
    struct part p = overlap(held_of(s, unit), first, n);
    if (p.n) {
        write_own(s, state, unit, p, in + (p.first - first));
    }
    for (size_t i = 0; state == STATE_PARAMS && i < PLAN_SLICES_MAX; i++) {
        s->newest[unit].version[i]++; // what the device has of it is old
    }
}

int session_moved(const struct session *s, struct error *err)
{
    if (s->error.status) {
        *err = s->error;
        return err->status;
    }
    return device_status(s->dev, err);
}

// ---- looking for what is not finite -------------------------------------------------------------

// Index of the first element that is not finite, or n.
static size_t nonfinite(const struct session *s, const struct state_place *p, size_t first,
                        size_t n)
{
    for (size_t i = 0; i < n; i += MOVE) {
        float x[MOVE];
        size_t m = n - i < MOVE ? n - i : MOVE;
        move_out(s, p, first + i, x, m);
        for (size_t j = 0; j < m; j++) {
            if (!isfinite(x[j])) {
                return i + j;
            }
        }
    }
    return n;
}

// p: of part `part` of the unit, from its first element on.
static bool find_in_unit(const struct session *s, size_t u, const char *what,
                         const struct state_place *p, struct part part, char *out, size_t size)
{
    const struct unit *unit = model_unit(s->model, u);
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        struct part in = overlap(part, t->offset, t->elems);
        size_t e = nonfinite(s, p, in.first - part.first, in.n);
        if (e < in.n) {
            snprintf(out, size, "%s %s of unit %zu (%s), element %zu", what, t->name, u, unit->name,
                     in.first - t->offset + e);
            return true;
        }
    }
    return false;
}

// Where what is left of a unit's gradient after a step still is. False: it has been overwritten.
static bool gradient_at(const struct session *s, size_t u, struct state_place *p)
{
    enum dtype dtype = s->dev->dtype;
    if (accumulates(s)) {
        *p = place_of(s, on_host(s, u) ? BUF_HOST_SUM : BUF_SUM, u, DTYPE_FP32, 0);
        return true;
    }
    if (on_host(s, u)) {
        *p = place_of(s, BUF_HOST_GRADS, u, dtype, 0);
        return true;
    }
    for (size_t i = 0; i < s->step.n_ops; i++) {
        const struct op *op = s->step.ops + i;
        const struct access *whole = access_of(&s->step, op, BUF_GRADS);
        if (op->kind == OP_ADAM && op->unit == u) {
            *p = whole ? place_of(s, BUF_GRADS, whole->index, dtype, held_of(s, u).first)
                       : place_of(s, BUF_GRAD_SHARD, u, dtype, 0);
        }
    }
    return u == 0 || !s->plan.early_adam;
}

static bool find_in_gradients(const struct session *s, char *out, size_t size)
{
    for (size_t u = s->model->units; s->config.train && u-- > 0;) {
        struct state_place p;
        if (gradient_at(s, u, &p) &&
            find_in_unit(s, u, "gradient of", &p, held_of(s, u), out, size)) {
            return true;
        }
        if (!isfinite(s->sums[SHARED_NORMS + u])) {
            snprintf(out, size, "gradient of unit %zu (%s)", u, model_unit(s->model, u)->name);
            return true;
        }
    }
    return false;
}

bool session_find_nonfinite(struct session *s, char *out, size_t size)
{
    for (size_t u = 0; u < s->model->units; u++) {
        struct part held = held_of(s, u);
        struct state_place p = working(s, u, held.first);
        if (find_in_unit(s, u, "parameter", &p, held, out, size)) {
            return true;
        }
    }
    for (size_t u = 0; u < s->model->units; u++) {
        size_t x = s->config.train ? u : u % 2, n = s->shape.bytes.boundary / elem_bytes(s);
        struct state_place p = place_of(s, BUF_X, x, s->dev->dtype, 0);
        size_t e = nonfinite(s, &p, 0, n);
        if (e < n) {
            snprintf(out, size, "output of unit %zu (%s), element %zu", u,
                     model_unit(s->model, u)->name, e);
            return true;
        }
    }
    return find_in_gradients(s, out, size);
}
