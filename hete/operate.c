// operate.c - what each operation of a step does, on whichever thread runs it.
//
// Nothing here waits or locks: an operation may touch what it has declared (step.c), and runs when
// the graph allows it. Addresses come from the declared accesses.
#include "hete/inside.h"

#include <assert.h>
#include <stdio.h>

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
        .dscale = 1.0f / (float)(s->config.B * s->config.T * s->config.micro_batches * ranks(s)),
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

const struct access *access_of(const struct graph *g, const struct op *op, enum buffer_kind kind)
{
    for (size_t i = 0; i < op->n_accesses; i++) {
        const struct access *a = g->accesses + op->first_access + i;
        if (a->kind == kind) {
            return a;
        }
    }
    return NULL;
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
                   at(s, BUF_HOST_PARAMS, current(s, op->unit, op->slice)) + first * elem_bytes(s),
                   n * elem_bytes(s));
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

// ---- other ranks --------------------------------------------------------------------------------

// Every rank adds up a piece of the gradient over all ranks, in their order and in fp32, rounds it
// once, and gives it to all.
static int reduce(struct session *s, const struct graph *g, const struct op *op, struct error *err)
{
    const struct layers *f = s->dev->layers;
    size_t k = op->unit > 0, rank = (size_t)comm_rank(s->config.comm);
    size_t first = s->piece_first[k][rank], n = s->piece_n[k][rank];
    struct comm_pieces pieces = {elem_bytes(s), s->piece_first[k], s->piece_n[k]};
    char *grads = lane(s, BUF_GRADS, access_of(g, op, BUF_GRADS)->index);
    char *stage = lane(s, BUF_EXCHANGE, 0);
    float *sum = (float *)(stage + ranks(s) * n * elem_bytes(s));
    if (comm_exchange(s->config.comm, stage, grads, &pieces, err)) {
        return err->status;
    }
    for (size_t r = 0; r < ranks(s) && n; r++) {
        f->accumulate(s->dev, sum, stage + r * n * elem_bytes(s), r == 0, n);
    }
    if (n) {
        f->cast(s->dev, grads + first * elem_bytes(s), sum, n);
    }
    return comm_gather(s->config.comm, grads, grads + first * elem_bytes(s), &pieces, err);
}

// Sum of the losses of this rank's part of a step.
static double sum_of_losses(const struct session *s)
{
    double sum = 0;
    for (size_t m = 0; m < s->config.micro_batches; m++) {
        const float *losses = (float *)at(s, BUF_HOST_LOSSES, m);
        for (size_t i = 0; i < s->config.B * s->config.T; i++) {
            sum += losses[i];
        }
    }
    return sum;
}

static int share_loss(struct session *s, struct error *err)
{
    double *all = (double *)at(s, BUF_RANK_LOSSES, 0);
    size_t rank = (size_t)comm_rank(s->config.comm);
    all[rank] = sum_of_losses(s);
    return comm_share(s->config.comm, all + rank, all, sizeof *all, err);
}

static int tell_ranks(struct session *s, const struct graph *g, const struct op *op,
                      struct error *err)
{
    char doing[64];
    snprintf(doing, sizeof doing, "%s of unit %u, micro-batch %u", op_name(op->kind), op->unit,
             op->micro);
    comm_doing(s->config.comm, COMM_LANE, doing);
    int status = op->kind == OP_REDUCE ? reduce(s, g, op, err) : share_loss(s, err);
    comm_doing(s->config.comm, COMM_LANE, "");
    return status;
}

// ---- clip and Adam ------------------------------------------------------------------------------

// Sum of squares of a unit's gradient.
static double unit_norm(struct session *s, size_t u)
{
    double sum = 0;
    if (!accumulates(s) || !on_host(s, u)) {
        return *(double *)at(s, BUF_NORM, u);
    }
    const float *chunks = (float *)at(s, BUF_HOST_CHUNKS, u);
    for (size_t i = 0; i < (unit_elems(s, u) + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK; i++) {
        sum += (double)chunks[i];
    }
    return sum;
}

struct adamw adamw_of(const struct session_update *up, double scale, uint64_t updates)
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
    uint64_t made = s->made[step % IN_FLIGHT];
    double loss = ranks(s) == 1 ? sum_of_losses(s) : 0, sum = 0;
    for (size_t rank = 0; rank < ranks(s) && ranks(s) > 1; rank++) {
        loss += ((double *)at(s, BUF_RANK_LOSSES, 0))[rank];
    }
    for (size_t u = 0; u < s->model->units; u++) {
        s->host_norms[u] = unit_norm(s, u);
        sum += s->host_norms[u];
    }
    r->loss = loss / (double)(n * k * ranks(s));
    r->norm = sqrt(sum);
    bool sound = !up->guard || isfinite(r->norm);
    bool accepted = sound && (!up->accept || up->accept(up->ctx, r->loss, r->norm));
    r->updated = accepted || !s->plan.hold_updates;
    if (s->plan.hold_updates) {
        double scale = up->clip > 0 && r->norm > up->clip ? up->clip / r->norm : 1;
        f->adamw = adamw_of(up, scale, f->updates + made);
    }
    s->made[(step + 1) % IN_FLIGHT] = made + r->updated;
    bool right = r->updated && f->adamw.scale == 1;
    s->guesses += s->plan.speculate;
    s->right += s->plan.speculate && right;
    atomic_store(&f->refuted, !right);
    if (s->lanes && !(isfinite(r->loss) && isfinite(r->norm))) {
        execute_hold(s->lanes, step);
    }
}

// Where the optimizer of a unit lies, at its first element.
struct optimizer {
    char *params;
    struct adamw_state state;
};

// Updates elements [first, first + n) of a unit: in place, or, if `to` is not `from`, from one to
// the other.
static void adam(struct session *s, struct device *dev, size_t u, const struct adamw *scalars,
                 const struct optimizer *to, const struct optimizer *from, const char *grads,
                 size_t first, size_t n)
{
    const struct unit *unit = model_unit(s->model, u);
    const struct layers *f = dev->layers;
    size_t own = elem_bytes(s), grad_bytes = accumulates(s) ? sizeof(float) : own;
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t lo = t->offset > first ? t->offset : first, end = t->offset + t->elems;
        size_t hi = end < first + n ? end : first + n;
        if (lo >= hi) {
            continue;
        }
        struct adamw a = *scalars;
        a.decay = t->decay ? a.decay : 1;
        char *params = to->params + lo * own;
        const void *g = grads + lo * grad_bytes;
        struct adamw_state x = {to->state.master + lo, to->state.m + lo, to->state.v + lo};
        struct adamw_state y = {from->state.master + lo, from->state.m + lo, from->state.v + lo};
        if (to != from && accumulates(s)) {
            f->adamw_apart_fp32(dev, params, &x, &y, g, &a, hi - lo);
        } else if (to != from) {
            f->adamw_apart(dev, params, &x, &y, g, &a, hi - lo);
        } else if (accumulates(s)) {
            f->adamw_fp32(dev, params, x.master, x.m, x.v, g, &a, hi - lo);
        } else {
            f->adamw(dev, params, x.master, x.m, x.v, g, &a, hi - lo);
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
    float *moments = lane(s, BUF_MOMENTS, u);
    struct optimizer o = {
        .params = lane(s, BUF_PARAMS, u),
        .state = {lane(s, bf16 ? BUF_MASTER : BUF_PARAMS, u), moments, moments + n},
    };
    const char *from = grads ? lane(s, BUF_GRADS, grads->index) : lane(s, BUF_SUM, u);
    if (updates(s, step)) {
        adam(s, s->dev, u, &s->flight[step % IN_FLIGHT].adamw, &o, &o, from, 0, n);
    }
}

static struct optimizer host_optimizer(const struct session *s, size_t u, size_t index)
{
    bool bf16 = s->dev->dtype != DTYPE_FP32;
    float *moments = (float *)at(s, BUF_HOST_MOMENTS, index);
    return (struct optimizer){
        .params = at(s, BUF_HOST_PARAMS, index),
        .state = {(float *)at(s, bf16 ? BUF_HOST_MASTER : BUF_HOST_PARAMS, index), moments,
                  moments + unit_elems(s, u)},
    };
}

static const char *host_gradient(const struct session *s, size_t u)
{
    return at(s, accumulates(s) ? BUF_HOST_SUM : BUF_HOST_GRADS, u);
}

static void host_speculate(struct session *s, const struct op *op, uint64_t step)
{
    struct flight *f = s->flight + step % IN_FLIGHT;
    size_t u = op->unit, first, n = step_slice(&s->shape, &s->plan, u, op->slice, &first);
    struct optimizer from = host_optimizer(s, u, current(s, u, op->slice));
    struct optimizer to = host_optimizer(s, u, spare(s, u, op->slice));
    if (!atomic_load(&f->refuted)) {
        struct adamw a = adamw_of(&f->update, 1, f->updates + s->made[step % IN_FLIGHT]);
        adam(s, s->host, u, &a, &to, &from, host_gradient(s, u), first, n);
    }
}

static void host_adam(struct session *s, const struct op *op, uint64_t step)
{
    const struct flight *f = s->flight + step % IN_FLIGHT;
    size_t u = op->unit, first, n = step_slice(&s->shape, &s->plan, u, op->slice, &first);
    if (!updates(s, step)) {
        return;
    }
    if (s->plan.speculate && f->adamw.scale == 1) {
        s->swapped[u][op->slice] = !s->swapped[u][op->slice];
    } else {
        struct optimizer o = host_optimizer(s, u, current(s, u, op->slice));
        adam(s, s->host, u, &f->adamw, &o, &o, host_gradient(s, u), first, n);
    }
    s->newest[u].version[op->slice]++;
}

int run_op(void *ctx, const struct op *op, uint64_t step, struct error *err)
{
    struct session *s = ctx;
    const struct graph *g = s->loaded;
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
    case OP_HOST_SPECULATE:
        host_speculate(s, op, step);
        break;
    case OP_HOST_ADAM:
        host_adam(s, op, step);
        break;
    case OP_REDUCE:
    case OP_SHARE_LOSS:
        return tell_ranks(s, g, op, err);
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
void poison(void *ctx, const struct op *op, const struct access *a)
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
