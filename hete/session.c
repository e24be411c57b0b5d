#include "hete/session.h"
#include "hete/check.h"
#include "hete/execute.h"
#include "kernels/bf16.h"
#include "kernels/layers.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define IN_FLIGHT 2

// A step between session_start and session_finish.
struct flight {
    struct session_update update;
    struct session_result result;
    struct adamw adamw; // decay: of tensors that decay
    uint64_t updates;   // done by other sessions: what is added to this one's count
};

// Which version of a unit's parameters a place on the device holds, by slice. Version 0: none.
struct stamp {
    size_t unit;
    uint64_t version[PLAN_SLICES_MAX];
};

struct session {
    struct device *dev, *host;
    const struct model *model;
    struct session_config config;
    struct plan plan;
    struct step_shape shape;
    struct layout layout;
    char *arena[SPACES];
    struct graph step, loss, decode;
    struct executor *lanes; // NULL: serial
    const struct graph *loaded;
    struct flight flight[IN_FLIGHT];
    uint64_t started, finished; // training steps
    uint64_t runs;              // of the graph that is loaded, where it is not the training step
    uint64_t made, reported;    // updates: of all steps, of those finished
    bool held;
    struct error error;
    double *host_norms;   // one per unit
    void *host_logits;    // Vp, in the device's dtype
    struct stamp *newest; // by unit: the version that the host has
    struct stamp *here;   // by unit: that its place on the device has
    struct stamp slot[PLAN_SLOTS_MAX];
    int32_t token;
    size_t pos;
};

// ---- addresses ----------------------------------------------------------------------------------

static size_t elem_bytes(const struct session *s)
{
    return dtype_bytes(s->dev->dtype);
}

static size_t unit_elems(const struct session *s, size_t u)
{
    return model_unit(s->model, u)->params;
}

// Address of a buffer: of device memory, as the device handed it out.
static char *at(const struct session *s, enum buffer_kind kind, size_t index)
{
    const struct region *r = s->layout.region[kind] + index;
    return s->arena[r->space] + r->offset;
}

// Address of a device buffer for the functions of `layers`.
static void *lane(const struct session *s, enum buffer_kind kind, size_t index)
{
    return at(s, kind, index) + s->dev->lane_offset;
}

static bool on_host(const struct session *s, size_t u)
{
    return s->plan.unit[u].host_optimizer;
}

static bool accumulates(const struct session *s)
{
    return s->config.micro_batches > 1;
}

// ---- running an operation -----------------------------------------------------------------------

// An operation works on what it has declared, and on nothing else: its addresses come from there.
static void bind(const struct session *s, const struct op *op, const struct access *a,
                 struct unit_args *args)
{
    void *p = lane(s, (enum buffer_kind)a->kind, a->index);
    bool decodes =
        op->kind == CALL_ENCODE_TOKEN || op->kind == CALL_DECODE || op->kind == CALL_LOGITS;
    switch (a->kind) {
    case BUF_PARAMS:
    case BUF_SLOT:
        args->params = p;
        break;
    case BUF_GRADS:
        args->grads = p;
        break;
    case BUF_GRADS_FP32:
        args->grads_fp32 = p;
        break;
    case BUF_X: // decoding: in place, or the cache of a block that keeps nothing
        if (decodes && s->config.train) {
            args->kept = p;
        } else {
            args->x = decodes || a->mode == ACCESS_READ ? p : args->x;
            args->y = decodes || a->mode != ACCESS_READ ? p : args->y;
        }
        break;
    case BUF_DX:
        args->dx = p;
        args->x = decodes ? p : args->x;
        args->y = decodes ? p : args->y;
        break;
    case BUF_KEPT:
        args->kept = p;
        break;
    case BUF_WORK:
        args->work = p;
        break;
    case BUF_TOKENS:
        args->tokens = p;
        args->targets = args->tokens + s->config.B * s->config.T;
        break;
    case BUF_LOSSES:
        args->losses = p;
        break;
    default:
        break; // tokens that keep operations apart have no bytes
    }
}

// The parameters that an operation is about to use are the newest, all of them.
static void check_stamp(const struct session *s, const struct op *op, const struct access *a)
{
    if (on_host(s, op->unit) && (a->kind == BUF_PARAMS || a->kind == BUF_SLOT)) {
        const struct stamp *stamp = a->kind == BUF_SLOT ? s->slot + a->index : s->here + a->index;
        assert(stamp->unit == op->unit);
        assert(stamp->version[a->slice] == s->newest[op->unit].version[a->slice]);
    }
}

static void call(struct session *s, const struct graph *g, const struct op *op)
{
    struct unit_args args = {
        .B = s->config.B,
        .T = s->config.T,
        .dscale = 1.0f / (float)(s->config.B * s->config.T * s->config.micro_batches),
        .token = s->token,
        .pos = s->pos,
    };
    for (size_t i = 0; i < op->n_accesses; i++) {
        const struct access *a = g->accesses + op->first_access + i;
        check_stamp(s, op, a);
        bind(s, op, a, &args);
    }
    model_unit(s->model, op->unit)->fn[op->kind](s->model, s->dev, &args);
}

// The one access of an operation to a kind of buffer.
static const struct access *access_of(const struct graph *g, const struct op *op,
                                      enum buffer_kind kind)
{
    for (size_t i = 0; i < op->n_accesses; i++) {
        const struct access *a = g->accesses + op->first_access + i;
        if (a->kind == kind) {
            return a;
        }
    }
    return NULL;
}

static size_t host_tokens(const struct session *s, uint64_t step, size_t micro)
{
    return step % IN_FLIGHT * s->config.micro_batches + micro;
}

static void tokens_in(struct session *s, size_t micro, uint64_t step)
{
    size_t bytes = 2 * s->config.B * s->config.T * sizeof(int32_t);
    device_copy_in(s->dev, at(s, BUF_TOKENS, micro),
                   at(s, BUF_HOST_TOKENS, host_tokens(s, step, micro)), bytes);
}

static void losses_out(struct session *s, size_t micro)
{
    device_copy_out(s->dev, at(s, BUF_HOST_LOSSES, micro), at(s, BUF_LOSSES, micro),
                    s->config.B * s->config.T * sizeof(float));
}

static void fetch(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *a = access_of(g, op, BUF_SLOT);
    struct stamp *to = a ? s->slot + a->index : s->here + op->unit;
    uint64_t newest = s->newest[op->unit].version[op->slice];
    size_t first, n = step_slice(&s->shape, &s->plan, op->unit, op->slice, &first);
    if (!a && to->version[op->slice] == newest) {
        return; // fetched by a validation since, or not updated
    }
    char *dst = a ? at(s, BUF_SLOT, a->index) : at(s, BUF_PARAMS, op->unit);
    device_copy_in(s->dev, dst + first * elem_bytes(s),
                   at(s, BUF_HOST_PARAMS, op->unit) + first * elem_bytes(s), n * elem_bytes(s));
    to->unit = op->unit;
    to->version[op->slice] = newest;
}

static void grad_out(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *from = access_of(g, op, BUF_GRADS);
    const struct access *stage = access_of(g, op, BUF_HOST_STAGE);
    size_t first, n = step_slice(&s->shape, &s->plan, op->unit, op->slice, &first);
    char *dst = stage ? at(s, BUF_HOST_STAGE, stage->index) : at(s, BUF_HOST_GRADS, op->unit);
    device_copy_out(s->dev, dst + first * elem_bytes(s),
                    at(s, BUF_GRADS, from->index) + first * elem_bytes(s), n * elem_bytes(s));
}

static void norm(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *grads = access_of(g, op, BUF_GRADS);
    double *sum = lane(s, BUF_NORM, op->unit);
    float *chunks = lane(s, BUF_WORK, 0);
    size_t n = unit_elems(s, op->unit);
    if (grads) {
        s->dev->layers->sumsq(s->dev, sum, chunks, lane(s, BUF_GRADS, grads->index), n);
    } else {
        s->dev->layers->sumsq_fp32(s->dev, sum, chunks, lane(s, BUF_SUM, op->unit), n);
    }
}

static void accumulate(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *grads = access_of(g, op, BUF_GRADS);
    s->dev->layers->accumulate(s->dev, lane(s, BUF_SUM, op->unit), lane(s, BUF_GRADS, grads->index),
                               op->micro == 0, unit_elems(s, op->unit));
}

static void host_accumulate(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *stage = access_of(g, op, BUF_HOST_STAGE);
    size_t first, n = step_slice(&s->shape, &s->plan, op->unit, op->slice, &first);
    s->host->layers->accumulate(s->host, (float *)at(s, BUF_HOST_SUM, op->unit) + first,
                                at(s, BUF_HOST_STAGE, stage->index) + first * elem_bytes(s),
                                op->micro == 0, n);
}

// The fp32 part of the norm's tree. The double part is taken by clip, across all slices in order.
static void host_norm(struct session *s, const struct op *op)
{
    double ignored;
    size_t first, n = step_slice(&s->shape, &s->plan, op->unit, op->slice, &first);
    s->host->layers->sumsq_fp32(s->host, &ignored,
                                (float *)at(s, BUF_HOST_CHUNKS, op->unit) + first / SUMSQ_CHUNK,
                                (float *)at(s, BUF_HOST_SUM, op->unit) + first, n);
}

// ---- clip and Adam ------------------------------------------------------------------------------

// Sum of squares of a unit's gradient.
static double unit_norm(struct session *s, size_t u)
{
    double sum = 0;
    if (!accumulates(s) || !on_host(s, u)) {
        device_peek(s->dev, &sum, at(s, BUF_NORM, u), sizeof sum);
        return sum;
    }
    const float *chunks = (float *)at(s, BUF_HOST_CHUNKS, u);
    for (size_t i = 0; i < (unit_elems(s, u) + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK; i++) {
        sum += (double)chunks[i];
    }
    return sum;
}

static struct adamw adamw_of(const struct session_update *up, double scale, uint64_t updates)
{
    double t = (double)updates + 1;
    return (struct adamw){
        .beta1 = (float)up->beta1,
        .beta2 = (float)up->beta2,
        .one_minus_beta1 = (float)(1 - up->beta1),
        .one_minus_beta2 = (float)(1 - up->beta2),
        .eps = (float)up->eps,
        .scale = (float)scale,
        .decay = (float)(1 - up->lr * up->weight_decay),
        .step = (float)(up->lr / (1 - pow(up->beta1, t))),
        .v_correction = (float)(1 / sqrt(1 - pow(up->beta2, t))),
    };
}

// The global norm is known here, and with it whether and by how much the parameters may move.
static void clip(struct session *s, uint64_t step)
{
    struct flight *f = s->flight + step % IN_FLIGHT;
    const struct session_update *up = &f->update;
    struct session_result *r = &f->result;
    size_t k = s->config.micro_batches, n = s->config.B * s->config.T;
    double loss = 0, sum = 0;
    for (size_t m = 0; m < k; m++) {
        const float *losses = (float *)at(s, BUF_HOST_LOSSES, m);
        for (size_t i = 0; i < n; i++) {
            loss += losses[i];
        }
    }
    for (size_t u = 0; u < s->model->units; u++) {
        s->host_norms[u] = unit_norm(s, u);
        sum += s->host_norms[u];
    }
    r->loss = loss / (double)(n * k);
    r->norm = sqrt(sum);
    bool sound = !up->guard || isfinite(r->norm);
    bool accepted = sound && (!up->accept || up->accept(up->ctx, r->loss, r->norm));
    r->updated = accepted || !s->plan.hold_updates;
    if (s->plan.hold_updates) {
        double scale = up->clip > 0 && r->norm > up->clip ? up->clip / r->norm : 1;
        f->adamw = adamw_of(up, scale, f->updates + s->made);
    }
    s->made += r->updated;
    if (s->lanes && !(isfinite(r->loss) && isfinite(r->norm))) {
        execute_hold(s->lanes, step);
    }
}

// Where the optimizer of a unit lies, at its first element.
struct adam_state {
    char *params;
    float *master, *m, *v;
    const char *grads;
};

// Updates elements [first, first + n) of a unit.
static void adam(struct session *s, struct device *dev, const struct op *op, uint64_t step,
                 const struct adam_state *a, size_t first, size_t n)
{
    const struct flight *f = s->flight + step % IN_FLIGHT;
    const struct unit *unit = model_unit(s->model, op->unit);
    size_t own = elem_bytes(s);
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t lo = t->offset > first ? t->offset : first, end = t->offset + t->elems;
        size_t hi = end < first + n ? end : first + n;
        if (lo >= hi) {
            continue;
        }
        struct adamw w = f->adamw;
        w.decay = t->decay ? w.decay : 1;
        if (accumulates(s)) {
            dev->layers->adamw_fp32(dev, a->params + lo * own, a->master + lo, a->m + lo, a->v + lo,
                                    (const float *)a->grads + lo, &w, hi - lo);
        } else {
            dev->layers->adamw(dev, a->params + lo * own, a->master + lo, a->m + lo, a->v + lo,
                               a->grads + lo * own, &w, hi - lo);
        }
    }
}

static bool updates(const struct session *s, uint64_t step)
{
    return !s->plan.hold_updates || s->flight[step % IN_FLIGHT].result.updated;
}

static void device_adam(struct session *s, const struct graph *g, const struct op *op,
                        uint64_t step)
{
    size_t u = op->unit, n = unit_elems(s, u);
    const struct access *grads = access_of(g, op, BUF_GRADS);
    bool bf16 = s->dev->dtype != DTYPE_FP32;
    struct adam_state a = {
        .params = lane(s, BUF_PARAMS, u),
        .master = lane(s, bf16 ? BUF_MASTER : BUF_PARAMS, u),
        .m = lane(s, BUF_MOMENTS, u),
        .grads = grads ? lane(s, BUF_GRADS, grads->index) : lane(s, BUF_SUM, u),
    };
    a.v = a.m + n;
    if (updates(s, step)) {
        adam(s, s->dev, op, step, &a, 0, n);
    }
}

static void host_adam(struct session *s, const struct op *op, uint64_t step)
{
    size_t u = op->unit, first, n = step_slice(&s->shape, &s->plan, u, op->slice, &first);
    bool bf16 = s->dev->dtype != DTYPE_FP32;
    struct adam_state a = {
        .params = at(s, BUF_HOST_PARAMS, u),
        .master = (float *)at(s, bf16 ? BUF_HOST_MASTER : BUF_HOST_PARAMS, u),
        .m = (float *)at(s, BUF_HOST_MOMENTS, u),
        .grads = at(s, accumulates(s) ? BUF_HOST_SUM : BUF_HOST_GRADS, u),
    };
    a.v = a.m + unit_elems(s, u);
    if (updates(s, step)) {
        adam(s, s->host, op, step, &a, first, n);
        s->newest[u].version[op->slice]++;
    }
}

static int run_op(void *ctx, const struct op *op, uint64_t step, struct error *err)
{
    struct session *s = ctx;
    const struct graph *g = s->loaded;
    (void)err; // a device that can fail will say so here
    switch (op->kind) {
    case OP_TOKENS_IN:
        tokens_in(s, op->micro, step);
        break;
    case OP_LOSSES_OUT:
        losses_out(s, op->micro);
        break;
    case OP_FETCH:
        fetch(s, g, op);
        break;
    case OP_GRAD_OUT:
        grad_out(s, g, op);
        break;
    case OP_ACCUMULATE:
        accumulate(s, g, op);
        break;
    case OP_NORM:
        norm(s, g, op);
        break;
    case OP_CLIP:
        clip(s, step);
        break;
    case OP_ADAM:
        device_adam(s, g, op, step);
        break;
    case OP_HOST_ACCUMULATE:
        host_accumulate(s, g, op);
        break;
    case OP_HOST_NORM:
        host_norm(s, op);
        break;
    case OP_HOST_ADAM:
        host_adam(s, op, step);
        break;
    case OP_BARRIER:
    case OP_BEGIN:
        break; // what they wait for is all that they are
    default:
        call(s, g, op);
        break;
    }
    return STATUS_OK;
}

// ---- chaos --------------------------------------------------------------------------------------

// What an operation is about to overwrite is dead: whoever still reads it gets NaN. The gaps
// between tensors stay zero, since norms are taken across them.
static void poison(void *ctx, const struct op *op, const struct access *a)
{
    struct session *s = ctx;
    const struct region *r = s->layout.region[a->kind] + a->index;
    if (a->kind == BUF_GRADS) {
        const struct unit *unit = model_unit(s->model, op->unit);
        size_t first, n = step_slice(&s->shape, &s->plan, op->unit, a->slice, &first);
        for (size_t i = 0; i < unit->n_tensors; i++) {
            const struct tensor *t = unit->tensors + i;
            size_t lo = t->offset > first ? t->offset : first, end = t->offset + t->elems;
            size_t hi = end < first + n ? end : first + n;
            if (lo < hi) {
                device_fill(s->dev, at(s, BUF_GRADS, a->index) + lo * elem_bytes(s), 0xff,
                            (hi - lo) * elem_bytes(s));
            }
        }
    } else if (a->kind == BUF_SLOT) {
        size_t first, n = step_slice(&s->shape, &s->plan, op->unit, a->slice, &first);
        device_fill(s->dev, at(s, BUF_SLOT, a->index) + first * elem_bytes(s), 0xff,
                    n * elem_bytes(s));
    } else if (r->bytes && r->space == SPACE_DEVICE) {
        device_fill(s->dev, at(s, (enum buffer_kind)a->kind, a->index), 0xff, r->bytes);
    }
}

// ---- the public calls ---------------------------------------------------------------------------

const struct error *session_error(const struct session *s)
{
    return &s->error;
}

size_t session_in_flight(const struct session *s)
{
    return (size_t)(s->started - s->finished);
}

static bool ok(const struct session *s)
{
    return s->error.status == STATUS_OK;
}

// Makes a graph the one that runs. Nothing is in flight.
static void load(struct session *s, const struct graph *g)
{
    if (s->loaded == g) {
        return;
    }
    s->loaded = g;
    s->runs = 0;
    if (s->lanes) {
        const double *pace = g == &s->step ? s->config.pace : NULL;
        execute_load(s->lanes, g, s->plan.fifo && g == &s->step, pace, &s->error);
    }
}

static void release(struct session *s)
{
    if (s->held) {
        s->held = false;
        execute_release(s->lanes);
    }
}

static void put_tokens(struct session *s, uint64_t step, size_t micro_batches,
                       const int32_t *tokens, const int32_t *targets)
{
    size_t n = s->config.B * s->config.T;
    for (size_t m = 0; m < micro_batches; m++) {
        int32_t *to = (int32_t *)at(s, BUF_HOST_TOKENS, host_tokens(s, step, m));
        memcpy(to, tokens + m * n, n * sizeof *to);
        memcpy(to + n, targets + m * n, n * sizeof *to);
    }
}

void session_start(struct session *s, const int32_t *tokens, const int32_t *targets,
                   const struct session_update *update)
{
    assert(session_in_flight(s) < IN_FLIGHT);
    assert(s->plan.hold_updates || (update->clip <= 0 && !update->guard));
    struct flight *f = s->flight + s->started % IN_FLIGHT;
    f->update = *update;
    f->result = (struct session_result){0};
    f->updates = update->step - s->reported;
    if (!s->plan.hold_updates) { // every step updates
        f->adamw = adamw_of(update, 1, update->step + session_in_flight(s));
    }
    if (session_in_flight(s) == 0) {
        load(s, &s->step);
    }
    release(s);
    put_tokens(s, s->started, s->config.micro_batches, tokens, targets);
    if (s->lanes && ok(s)) {
        execute_start(s->lanes, s->started, &s->error);
    }
    s->started++;
}

void session_finish(struct session *s, struct session_result *result)
{
    assert(session_in_flight(s) > 0);
    release(s);
    if (s->lanes && ok(s)) {
        execute_wait(s->lanes, s->finished, &s->error);
    } else if (ok(s)) {
        graph_run_serial(&s->step, s->finished, run_op, s, &s->error);
    }
    *result = s->flight[s->finished % IN_FLIGHT].result;
    s->held = s->lanes && !(isfinite(result->loss) && isfinite(result->norm));
    s->finished++;
    s->reported += result->updated;
}

void session_step(struct session *s, const int32_t *tokens, const int32_t *targets,
                  const struct session_update *update, struct session_result *result)
{
    session_start(s, tokens, targets, update);
    session_finish(s, result);
}

// Runs a graph that is no training step.
static void run_alone(struct session *s, const struct graph *g)
{
    assert(session_in_flight(s) == 0);
    release(s);
    load(s, g);
    if (s->lanes && ok(s)) {
        if (execute_start(s->lanes, s->runs, &s->error) == STATUS_OK) {
            execute_wait(s->lanes, s->runs, &s->error);
        }
    } else if (ok(s)) {
        graph_run_serial(g, s->runs, run_op, s, &s->error);
    }
    s->runs++;
}

void session_losses(struct session *s, const int32_t *tokens, const int32_t *targets, float *losses)
{
    load(s, &s->loss);
    put_tokens(s, s->runs, 1, tokens, targets);
    run_alone(s, &s->loss);
    memcpy(losses, at(s, BUF_HOST_LOSSES, 0), s->config.B * s->config.T * sizeof *losses);
}

size_t session_decode_limit(const struct session *s)
{
    size_t limit = s->config.B * s->config.T;
    for (size_t u = 1; u < s->model->units; u++) {
        if (s->plan.unit[u].recompute) {
            return limit / 3; // the cache, three times as wide, lies where the block's output is
        }
    }
    return limit;
}

size_t session_logits(const struct session *s)
{
    return s->model->logits;
}

static void to_fp32(float *out, const void *in, enum dtype dtype, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        out[i] =
            dtype == DTYPE_FP32 ? ((const float *)in)[i] : bf16_load(((const uint16_t *)in)[i]);
    }
}

void session_decode(struct session *s, int32_t token, size_t pos, float *logits)
{
    s->token = token;
    s->pos = pos;
    run_alone(s, &s->decode);
    size_t n = s->model->logits;
    device_peek(s->dev, s->host_logits, at(s, BUF_WORK, 0), n * elem_bytes(s));
    to_fp32(logits, s->host_logits, s->dev->dtype, n);
}

const struct graph *session_graph(const struct session *s)
{
    return &s->step;
}

size_t session_timings(const struct session *s, struct timing *timings, size_t steps,
                       uint64_t *first)
{
    *first = 0;
    return s->lanes && s->loaded == &s->step ? execute_timings(s->lanes, timings, steps, first) : 0;
}

void session_late(const struct session *s, uint64_t *late, uint64_t *paced)
{
    *late = *paced = 0;
    if (s->lanes) {
        execute_late(s->lanes, late, paced);
    }
}

// ---- state --------------------------------------------------------------------------------------

// Elements moved at a time between a state in 16 bits and fp32 host memory.
#define MOVE ((size_t)4096)

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

// What the device computes with: on the host, what is copied there.
static struct state_place working(const struct session *s, size_t u, size_t first)
{
    bool host = on_host(s, u);
    return place_of(s, host ? BUF_HOST_PARAMS : BUF_PARAMS, u, s->dev->dtype, first);
}

static struct state_place state_at(const struct session *s, enum state state, size_t u,
                                   size_t first)
{
    bool host = on_host(s, u);
    if (state == STATE_PARAMS && (s->dev->dtype == DTYPE_FP32 || !s->config.train)) {
        return working(s, u, first);
    }
    if (state == STATE_PARAMS) {
        return place_of(s, host ? BUF_HOST_MASTER : BUF_MASTER, u, DTYPE_FP32, first);
    }
    return place_of(s, host ? BUF_HOST_MOMENTS : BUF_MOMENTS, u, DTYPE_FP32,
                    first + (state == STATE_V ? unit_elems(s, u) : 0));
}

static void move_out(const struct session *s, const struct state_place *p, size_t at, float *out,
                     size_t n)
{
    char buf[MOVE * sizeof(float)];
    size_t size = dtype_bytes(p->dtype);
    if (p->space == SPACE_DEVICE) {
        device_peek(s->dev, buf, p->at + at * size, n * size);
        to_fp32(out, buf, p->dtype, n);
    } else {
        to_fp32(out, p->at + at * size, p->dtype, n);
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

void session_read(struct session *s, enum state state, size_t unit, size_t first, float *out,
                  size_t n)
{
    struct state_place p = state_at(s, state, unit, first);
    for (size_t i = 0; i < n; i += MOVE) {
        move_out(s, &p, i, out + i, n - i < MOVE ? n - i : MOVE);
    }
}

void session_write(struct session *s, enum state state, size_t unit, size_t first, const float *in,
                   size_t n)
{
    struct state_place p = state_at(s, state, unit, first), w = working(s, unit, first);
    for (size_t i = 0; i < n; i += MOVE) {
        size_t m = n - i < MOVE ? n - i : MOVE;
        move_in(s, &p, i, in + i, m);
        if (state == STATE_PARAMS && w.at != p.at) {
            move_in(s, &w, i, in + i, m);
        }
    }
    for (size_t i = 0; state == STATE_PARAMS && i < PLAN_SLICES_MAX; i++) {
        s->newest[unit].version[i]++; // what the device has of it is old
    }
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

static bool find_in_unit(const struct session *s, size_t u, const char *what,
                         const struct state_place *p, char *out, size_t size)
{
    const struct unit *unit = model_unit(s->model, u);
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t e = nonfinite(s, p, t->offset, t->elems);
        if (e < t->elems) {
            snprintf(out, size, "%s %s of unit %zu (%s), element %zu", what, t->name, u, unit->name,
                     e);
            return true;
        }
    }
    return false;
}

// Where the gradient of a unit still is after a step. False: it has been overwritten.
static bool gradient_at(const struct session *s, size_t u, struct state_place *p)
{
    if (accumulates(s)) {
        *p = place_of(s, on_host(s, u) ? BUF_HOST_SUM : BUF_SUM, u, DTYPE_FP32, 0);
        return true;
    }
    if (on_host(s, u)) {
        *p = place_of(s, BUF_HOST_GRADS, u, s->dev->dtype, 0);
        return true;
    }
    for (size_t i = 0; i < s->step.n_ops; i++) {
        const struct op *op = s->step.ops + i;
        if (op->kind == OP_ADAM && op->unit == u) {
            *p =
                place_of(s, BUF_GRADS, access_of(&s->step, op, BUF_GRADS)->index, s->dev->dtype, 0);
        }
    }
    return u == 0 || !s->plan.early_adam;
}

static bool find_in_gradients(const struct session *s, char *out, size_t size)
{
    for (size_t u = s->model->units; s->config.train && u-- > 0;) {
        struct state_place p;
        if (gradient_at(s, u, &p) && find_in_unit(s, u, "gradient of", &p, out, size)) {
            return true;
        }
        if (!isfinite(s->host_norms[u])) {
            snprintf(out, size, "gradient of unit %zu (%s)", u, model_unit(s->model, u)->name);
            return true;
        }
    }
    return false;
}

bool session_find_nonfinite(struct session *s, char *out, size_t size)
{
    for (size_t u = 0; u < s->model->units; u++) {
        struct state_place p = working(s, u, 0);
        if (find_in_unit(s, u, "parameter", &p, out, size)) {
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

// ---- opening ------------------------------------------------------------------------------------

void session_print_memory(const struct session *s, FILE *out)
{
    static const char *const name[SPACES] = {"device", "pinned host", "host"};
    for (int space = 0; space < SPACES; space++) {
        if (s->layout.total[space] == 0) {
            continue;
        }
        fprintf(out, "%s memory (bytes)\n", name[space]);
        for (int c = 0; c < CATEGORIES; c++) {
            if (s->layout.category[space][c]) {
                fprintf(out, "  %-18s %15zu\n", category_name[c], s->layout.category[space][c]);
            }
        }
        fprintf(out, "  %-18s %15zu\n", "arena, sealed", s->layout.total[space]);
    }
    fprintf(out, "  %-18s %15zu  outside the arena\n", "thread scratch",
            s->dev->workspace_bytes + (s->host ? s->host->workspace_bytes : 0));
}

size_t session_arena_bytes(const struct session *s)
{
    return s->layout.total[SPACE_DEVICE];
}

const struct layout *session_layout(const struct session *s)
{
    return &s->layout;
}

// Tokens of a step: beyond any machine, and few enough that the sizes of the largest model that can
// be asked for (gpt_check) stay below 2^64 bytes.
#define TOKENS_MAX ((size_t)1 << 31)

static int check_batch(const struct session_config *c, struct error *err)
{
    if (c->B < 1 || c->T < 1 || c->micro_batches < 1 || c->B > TOKENS_MAX ||
        c->T > TOKENS_MAX / c->B || c->micro_batches > TOKENS_MAX / (c->B * c->T)) {
        return error_set(err, STATUS_FAIL,
                         "%zu micro-batches of %zu rows of %zu tokens: a step has from 1 to %zu "
                         "tokens; see --micro-batch, --seq and --total-batch",
                         c->micro_batches, c->B, c->T, TOKENS_MAX);
    }
    return STATUS_OK;
}

static int take_arenas(struct session *s, struct error *err)
{
    const size_t *total = s->layout.total;
    void *device, *pinned = NULL, *host = NULL;
    if (device_arena(s->dev, total[SPACE_DEVICE], &device, err) ||
        (total[SPACE_PINNED] &&
         device_host_arena(s->dev, total[SPACE_PINNED], true, &pinned, err)) ||
        (total[SPACE_HOST] && device_host_arena(s->dev, total[SPACE_HOST], false, &host, err))) {
        return err->status;
    }
    s->arena[SPACE_DEVICE] = device;
    s->arena[SPACE_PINNED] = pinned;
    s->arena[SPACE_HOST] = host;
    return STATUS_OK;
}

static int build(struct session *s, struct error *err)
{
    struct {
        struct graph *graph;
        enum step_kind kind;
    } steps[] = {{&s->step, STEP_TRAIN}, {&s->loss, STEP_LOSS}, {&s->decode, STEP_DECODE}};
    for (size_t i = s->config.train ? 0 : 1; i < sizeof steps / sizeof *steps; i++) {
        if (step_build(steps[i].graph, &s->shape, &s->plan, steps[i].kind, err) ||
            check_graph(steps[i].graph, err)) {
            return err->status;
        }
    }
    return STATUS_OK;
}

// Lanes are worth their threads where something can overlap, or is asked to go astray.
static bool needs_lanes(const struct session *s)
{
    bool any_host = false;
    for (size_t u = 0; u < s->model->units; u++) {
        any_host |= on_host(s, u);
    }
    return any_host || s->dev->emulated || s->config.chaos || s->config.pace;
}

static int open_session(struct session *s, struct error *err)
{
    const struct session_config *c = &s->config;
    size_t units = s->model->units;
    size_t pinned = c->budget.pinned ? c->budget.pinned : SIZE_MAX;
    s->host_norms = calloc(units, sizeof *s->host_norms);
    s->host_logits = calloc(s->model->logits, dtype_bytes(s->dev->dtype));
    s->newest = calloc(units, sizeof *s->newest);
    s->here = calloc(units, sizeof *s->here);
    if (!s->host_norms || !s->host_logits || !s->newest || !s->here) {
        return error_set(err, STATUS_FAIL, "no memory for the session");
    }
    for (size_t u = 0; u < units; u++) {
        s->here[u].unit = u;
        for (size_t i = 0; i < PLAN_SLICES_MAX; i++) {
            s->newest[u].version[i] = 1; // zeros
        }
    }
    step_shape(&s->shape, s->model, s->dev->dtype, c->B, c->T, c->micro_batches, c->train);
    if (layout_make(&s->layout, &s->shape, &s->plan, pinned, err) ||
        check_layout(&s->layout, err) || build(s, err) || take_arenas(s, err)) {
        return err->status;
    }
    struct execute_config lanes = {
        .run = run_op, .ctx = s, .watchdog_s = c->watchdog_s, .chaos = c->chaos, .poison = poison};
    return needs_lanes(s) ? execute_open(&s->lanes, &lanes, err) : STATUS_OK;
}

int session_open(struct session **out, struct device *dev, const struct model *model,
                 const struct session_config *config, struct error *err)
{
    if (check_batch(config, err)) {
        return err->status;
    }
    struct session *s = calloc(1, sizeof *s);
    if (!s) {
        return error_set(err, STATUS_FAIL, "no memory for the session");
    }
    s->dev = dev;
    s->host = config->host;
    s->model = model;
    s->config = *config;
    if (config->plan) {
        s->plan = *config->plan;
    } else {
        plan_resident(&s->plan, model, config->B, config->T, config->micro_batches, true);
    }
    s->config.plan = &s->plan;
    if (open_session(s, err)) {
        session_close(s);
        return err->status;
    }
    *out = s;
    return STATUS_OK;
}

void session_close(struct session *s)
{
    if (!s) {
        return;
    }
    execute_close(s->lanes);
    graph_free(&s->step);
    graph_free(&s->loss);
    graph_free(&s->decode);
    layout_free(&s->layout);
    free(s->host_norms);
    free(s->host_logits);
    free(s->newest);
    free(s->here);
    free(s);
}
