// operate.c - what each operation of a step does, on whichever thread runs it.
//
// Nothing here waits or locks: an operation may touch what it has declared (step.c), and runs when
// the graph allows it. Addresses come from the declared accesses.
#include "hete/inside.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

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
    size_t first;
    bool whole = sharded(s, op->unit);
    if (is_brought(s, op->unit) && (a->kind == BUF_PARAMS || a->kind == BUF_SLOT) &&
        step_slice(&s->shape, &s->plan, op->unit, a->slice, &first)) {
        const struct stamp *slot = whole ? s->slot_gathered : s->slot;
        const struct stamp *here = whole ? s->gathered : s->here;
        const struct stamp *stamp = (a->kind == BUF_SLOT ? slot : here) + a->index;
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
    struct part p = slice_of(s, op->unit, op->slice);
    if (!a && to->version[op->slice] == newest) {
        return; // fetched by a validation since, or not updated
    }
    char *dst = a ? at(s, BUF_SLOT, a->index) : at(s, BUF_PARAMS, op->unit);
    char *src = at(s, BUF_HOST_PARAMS, current(s, op->unit, op->slice));
    if (p.n) {
        device_copy_in(s->dev, dst + p.first * elem_bytes(s), src + p.held * elem_bytes(s),
                       p.n * elem_bytes(s));
    }
    to->unit = op->unit;
    to->version[op->slice] = newest;
}

static void grad_out(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *from = access_of(g, op, BUF_GRADS);
    const struct access *stage = access_of(g, op, BUF_HOST_STAGE);
    struct part p = slice_of(s, op->unit, op->slice);
    char *dst = stage ? at(s, BUF_HOST_STAGE, stage->index) : at(s, BUF_HOST_GRADS, op->unit);
    if (p.n) {
        device_copy_out(s->dev, dst + p.held * elem_bytes(s),
                        at(s, BUF_GRADS, from->index) + p.first * elem_bytes(s),
                        p.n * elem_bytes(s));
    }
}

// A rank's part of a gradient of one micro-batch, or NULL if the operation does not read it.
static char *gradient_of(const struct session *s, const struct graph *g, const struct op *op,
                         struct part p)
{
    const struct access *whole = access_of(g, op, BUF_GRADS);
    const struct access *piece = access_of(g, op, BUF_GRAD_SHARD);
    return whole   ? (char *)lane(s, BUF_GRADS, whole->index) + p.first * elem_bytes(s)
           : piece ? (char *)lane(s, BUF_GRAD_SHARD, piece->index) + p.held * elem_bytes(s)
                   : NULL;
}

// With several ranks always of what this one adds up, so that the sum over the ranks does not
// depend on who updates what.
static void norm(struct session *s, const struct graph *g, const struct op *op)
{
    size_t u = op->unit;
    struct part p = piece_of(s, u);
    char *grads = gradient_of(s, g, op, p);
    double *sum = lane(s, BUF_NORM, u);
    float *chunks = lane(s, BUF_WORK, 0);
    if (p.n == 0) {
        return; // 0, as it was from the start
    }
    if (grads) {
        s->dev->layers->sumsq(s->dev, sum, chunks, grads, p.n);
    } else {
        float *sums = lane(s, BUF_SUM, u);
        s->dev->layers->sumsq_fp32(s->dev, sum, chunks, sums + (sharded(s, u) ? 0 : p.first), p.n);
    }
}

static void accumulate(struct session *s, const struct graph *g, const struct op *op)
{
    struct part p = held_of(s, op->unit);
    if (p.n) {
        s->dev->layers->accumulate(s->dev, lane(s, BUF_SUM, op->unit), gradient_of(s, g, op, p),
                                   op->micro == 0, p.n);
    }
}

static void host_accumulate(struct session *s, const struct graph *g, const struct op *op)
{
    const struct access *stage = access_of(g, op, BUF_HOST_STAGE);
    struct part p = slice_of(s, op->unit, op->slice);
    s->host->layers->accumulate(s->host, (float *)at(s, BUF_HOST_SUM, op->unit) + p.held,
                                at(s, BUF_HOST_STAGE, stage->index) + p.held * elem_bytes(s),
                                op->micro == 0, p.n);
}

// The fp32 part of the norm's tree. The double part is taken by clip, across all slices in order.
static void host_norm(struct session *s, const struct op *op)
{
    double ignored;
    struct part p = slice_of(s, op->unit, op->slice);
    s->host->layers->sumsq_fp32(s->host, &ignored,
                                (float *)at(s, BUF_HOST_CHUNKS, op->unit) + p.held / SUMSQ_CHUNK,
                                (float *)at(s, BUF_HOST_SUM, op->unit) + p.held, p.n);
}

// ---- other ranks --------------------------------------------------------------------------------

// Every rank adds up a piece of the gradient over all ranks, in their order and in fp32, and rounds
// it once.
static int scatter(struct session *s, const struct graph *g, const struct op *op, struct error *err)
{
    const struct layers *f = s->dev->layers;
    struct part p = piece_of(s, op->unit);
    struct comm_pieces pieces = pieces_of(s, op->unit);
    char *grads = lane(s, BUF_GRADS, access_of(g, op, BUF_GRADS)->index);
    bool apart = access_of(g, op, BUF_GRAD_SHARD) != NULL;
    char *to = apart ? lane(s, BUF_GRAD_SHARD, op->unit) : grads + p.first * elem_bytes(s);
    char *stage = lane(s, BUF_EXCHANGE, 0);
    float *sum = (float *)(stage + ranks(s) * p.n * elem_bytes(s));
    bool summed = s->config.fast_reduce;
    if (summed ? comm_reduce(s->config.comm, stage, grads, &pieces, err)
               : comm_exchange(s->config.comm, stage, grads, &pieces, err)) {
        return err->status;
    }
    for (size_t r = 0; r < (summed ? 1 : ranks(s)) && p.n; r++) {
        f->accumulate(s->dev, sum, stage + r * p.n * elem_bytes(s), r == 0, p.n);
    }
    if (p.n) {
        f->cast(s->dev, to, sum, p.n);
    }
    return STATUS_OK;
}

static int gather_grads(struct session *s, const struct graph *g, const struct op *op,
                        struct error *err)
{
    struct comm_pieces pieces = pieces_of(s, op->unit);
    char *grads = lane(s, BUF_GRADS, access_of(g, op, BUF_GRADS)->index);
    return comm_gather(s->config.comm, grads, grads + piece_of(s, op->unit).first * elem_bytes(s),
                       &pieces, err);
}

// All ranks have made the same updates, and so skip the same.
static int gather(struct session *s, const struct graph *g, const struct op *op, struct error *err)
{
    size_t u = op->unit;
    struct comm_pieces pieces = pieces_of(s, u);
    const struct access *slot = access_of(g, op, BUF_SLOT);
    struct stamp *to = slot ? s->slot_gathered + slot->index : s->gathered + u;
    bool from_shard = access_of(g, op, BUF_PARAM_SHARD) != NULL;
    if (!slot && memcmp(to->version, s->newest[u].version, sizeof to->version) == 0) {
        return STATUS_OK;
    }
    *to = s->newest[u];
    to->unit = u;
    char *dst = slot ? lane(s, BUF_SLOT, slot->index) : lane(s, BUF_PARAMS, u);
    const char *mine =
        from_shard ? lane(s, BUF_PARAM_SHARD, u) : dst + piece_of(s, u).first * elem_bytes(s);
    return comm_gather(s->config.comm, dst, mine, &pieces, err);
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

// Sum of squares of what this rank adds up of a unit's gradient.
static double unit_norm(const struct session *s, size_t u)
{
    double sum = 0;
    if (!accumulates(s) || !on_host(s, u)) {
        return *(double *)at(s, BUF_NORM, u);
    }
    const float *chunks = (float *)at(s, BUF_HOST_CHUNKS, u);
    for (size_t i = 0; i < (held_of(s, u).n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK; i++) {
        sum += (double)chunks[i];
    }
    return sum;
}

// What one rank has to share: of one rank alone, all there is.
static void sum_up(const struct session *s, uint64_t step, double *out)
{
    const struct session_update *up = &s->flight[step % IN_FLIGHT].update;
    out[SHARED_LOSS] = sum_of_losses(s);
    out[SHARED_STOP] = up->stop && up->stop(up->ctx);
    for (size_t u = 0; u < s->model->units; u++) {
        out[SHARED_NORMS + u] = unit_norm(s, u);
    }
}

static int share(struct session *s, uint64_t step, struct error *err)
{
    size_t n = step_shared(&s->shape);
    double *all = (double *)at(s, BUF_SHARED, 0), *mine = all + s->shape.rank * n;
    sum_up(s, step, mine);
    return comm_share(s->config.comm, mine, all, n * sizeof *all, err);
}

static int tell_ranks(struct session *s, const struct graph *g, const struct op *op, uint64_t step,
                      struct error *err)
{
    char doing[64];
    int length = snprintf(doing, sizeof doing, "%s", op_name(op->kind));
    if (op_has_unit(op->kind)) {
        snprintf(doing + length, sizeof doing - (size_t)length, " of unit %u, micro-batch %u",
                 op->unit, op->micro);
    }
    comm_doing(s->config.comm, COMM_LANE, doing);
    int status = op->kind == OP_SCATTER        ? scatter(s, g, op, err)
                 : op->kind == OP_GATHER_GRADS ? gather_grads(s, g, op, err)
                 : op->kind == OP_GATHER       ? gather(s, g, op, err)
                                               : share(s, step, err);
    comm_doing(s->config.comm, COMM_LANE, "");
    return status;
}

// ---- clip and Adam ------------------------------------------------------------------------------

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

// In rank order.
static void sum_over_ranks(struct session *s, uint64_t step)
{
    size_t n = step_shared(&s->shape);
    if (ranks(s) == 1) {
        sum_up(s, step, s->sums);
        return;
    }
    const double *all = (double *)at(s, BUF_SHARED, 0);
    memcpy(s->sums, all, n * sizeof *all);
    for (size_t i = n; i < n * ranks(s); i++) {
        s->sums[i % n] += all[i];
    }
}

// The global norm is known here, and with it whether and by how much the parameters may move.
static void clip(struct session *s, uint64_t step)
{
    struct flight *f = s->flight + step % IN_FLIGHT;
    const struct session_update *up = &f->update;
    struct session_result *r = &f->result;
    size_t k = s->config.micro_batches, n = s->config.B * s->config.T;
    uint64_t made = s->made[step % IN_FLIGHT];
    double sum = 0, *sums = s->sums;
    sum_over_ranks(s, step);
    for (size_t u = 0; u < s->model->units; u++) {
        sum += sums[SHARED_NORMS + u];
    }
    r->loss = sums[SHARED_LOSS] / (double)(n * k * ranks(s));
    r->stop = sums[SHARED_STOP] > 0;
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
    if (s->lanes && stands_still(s) && !(isfinite(r->loss) && isfinite(r->norm))) {
        execute_hold(s->lanes, step);
    }
}

// Where the optimizer of a unit lies, at its first element.
struct optimizer {
    char *params;
    struct adamw_state state;
};

// Updates a part of a unit: in place, or, if `to` is not `from`, from one to the other. grads: from
// the first element that this rank holds on.
static void adam(struct session *s, struct device *dev, size_t u, const struct adamw *scalars,
                 const struct optimizer *to, const struct optimizer *from, const char *grads,
                 struct part p)
{
    const struct unit *unit = model_unit(s->model, u);
    const struct layers *f = dev->layers;
    size_t own = elem_bytes(s), grad_bytes = accumulates(s) ? sizeof(float) : own;
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t begin = t->offset > p.first ? t->offset : p.first, end = t->offset + t->elems;
        size_t n = (end < p.first + p.n ? end : p.first + p.n);
        if (begin >= n) {
            continue;
        }
        n -= begin;
        size_t at = begin - p.first + p.held;
        struct adamw a = *scalars;
        a.decay = t->decay ? a.decay : 1;
        char *params = to->params + at * own;
        const void *g = grads + at * grad_bytes;
        struct adamw_state x = {to->state.master + at, to->state.m + at, to->state.v + at};
        struct adamw_state y = {from->state.master + at, from->state.m + at, from->state.v + at};
        if (to != from && accumulates(s)) {
            f->adamw_apart_fp32(dev, params, &x, &y, g, &a, n);
        } else if (to != from) {
            f->adamw_apart(dev, params, &x, &y, g, &a, n);
        } else if (accumulates(s)) {
            f->adamw_fp32(dev, params, x.master, x.m, x.v, g, &a, n);
        } else {
            f->adamw(dev, params, x.master, x.m, x.v, g, &a, n);
        }
    }
}

static bool updates(const struct session *s, uint64_t step)
{
    return !s->plan.hold_updates || s->flight[step % IN_FLIGHT].result.updated;
}

// The first element that this rank updates of a unit's parameters on the device.
static char *updated_params(const struct session *s, size_t u)
{
    return s->plan.unit[u].stream
               ? lane(s, BUF_PARAM_SHARD, u)
               : (char *)lane(s, BUF_PARAMS, u) + held_of(s, u).first * elem_bytes(s);
}

static void device_adam(struct session *s, const struct graph *g, const struct op *op,
                        uint64_t step)
{
    size_t u = op->unit;
    struct part p = held_of(s, u);
    bool bf16 = s->dev->dtype != DTYPE_FP32;
    float *moments = lane(s, BUF_MOMENTS, u);
    char *params = updated_params(s, u);
    struct optimizer o = {
        .params = params,
        .state = {bf16 ? lane(s, BUF_MASTER, u) : (float *)params, moments,
                  moments + step_held(&s->shape, &s->plan, u)},
    };
    const char *from = gradient_of(s, g, op, p);
    if (!updates(s, step)) {
        return;
    }
    adam(s, s->dev, u, &s->flight[step % IN_FLIGHT].adamw, &o, &o,
         from ? from : lane(s, BUF_SUM, u), p);
    for (size_t i = 0; sharded(s, u) && i < PLAN_SLICES_MAX; i++) {
        s->newest[u].version[i]++;
    }
}

static struct optimizer host_optimizer(const struct session *s, size_t u, size_t index)
{
    bool bf16 = s->dev->dtype != DTYPE_FP32;
    float *moments = (float *)at(s, BUF_HOST_MOMENTS, index);
    return (struct optimizer){
        .params = at(s, BUF_HOST_PARAMS, index),
        .state = {(float *)at(s, bf16 ? BUF_HOST_MASTER : BUF_HOST_PARAMS, index), moments,
                  moments + step_held(&s->shape, &s->plan, u)},
    };
}

static const char *host_gradient(const struct session *s, size_t u)
{
    return at(s, accumulates(s) ? BUF_HOST_SUM : BUF_HOST_GRADS, u);
}

static void host_speculate(struct session *s, const struct op *op, uint64_t step)
{
    struct flight *f = s->flight + step % IN_FLIGHT;
    size_t u = op->unit;
    struct optimizer from = host_optimizer(s, u, current(s, u, op->slice));
    struct optimizer to = host_optimizer(s, u, spare(s, u, op->slice));
    if (!atomic_load(&f->refuted)) {
        struct adamw a = adamw_of(&f->update, 1, f->updates + s->made[step % IN_FLIGHT]);
        adam(s, s->host, u, &a, &to, &from, host_gradient(s, u), slice_of(s, u, op->slice));
    }
}

static void host_adam(struct session *s, const struct op *op, uint64_t step)
{
    const struct flight *f = s->flight + step % IN_FLIGHT;
    size_t u = op->unit;
    if (!updates(s, step)) {
        return;
    }
    if (s->plan.speculate && f->adamw.scale == 1) {
        s->swapped[u][op->slice] = !s->swapped[u][op->slice];
    } else {
        struct optimizer o = host_optimizer(s, u, current(s, u, op->slice));
        adam(s, s->host, u, &f->adamw, &o, &o, host_gradient(s, u), slice_of(s, u, op->slice));
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
    case OP_SCATTER:
    case OP_GATHER_GRADS:
    case OP_GATHER:
    case OP_SHARE:
        return tell_ranks(s, g, op, step, err);
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

static void poison_elems(struct session *s, const struct op *op, const struct access *a,
                         size_t first, size_t end, bool gaps)
{
    const struct unit *unit = model_unit(s->model, op->unit);
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t next = i + 1 < unit->n_tensors ? unit->tensors[i + 1].offset : unit->params;
        size_t lo = t->offset > first ? t->offset : first;
        size_t t_end = gaps ? next : t->offset + t->elems, hi = t_end < end ? t_end : end;
        if (lo < hi) {
            device_fill(s->dev, at(s, (enum buffer_kind)a->kind, a->index) + lo * elem_bytes(s),
                        0xff, (hi - lo) * elem_bytes(s));
        }
    }
}

// What an operation is about to overwrite is dead: whoever still reads it gets NaN. The gaps
// between tensors of gradients stay zero, since norms are taken across them.
void poison(void *ctx, const struct op *op, const struct access *a)
{
    struct session *s = ctx;
    const struct region *r = s->layout.region[a->kind] + a->index;
    bool whole = op->kind == OP_GATHER || op->kind < CALLS; // writes the pieces of all ranks
    if (a->kind == BUF_GRADS && whole) {
        if (a->slice == 0) {
            poison_elems(s, op, a, 0, unit_elems(s, op->unit), false);
        }
    } else if (a->kind == BUF_SLOT && whole) {
        if (a->slice == 0) {
            poison_elems(s, op, a, 0, unit_elems(s, op->unit), true);
        }
    } else if (a->kind == BUF_SLOT) {
        struct part p = slice_of(s, op->unit, a->slice), all = held_of(s, op->unit);
        poison_elems(s, op, a, p.first, p.first + p.n, true);
        if (a->slice == 0) { // what other ranks will send
            poison_elems(s, op, a, 0, all.first, true);
            poison_elems(s, op, a, all.first + all.n, unit_elems(s, op->unit), true);
        }
    } else if (r->bytes && r->space == SPACE_DEVICE) {
        device_fill(s->dev, at(s, (enum buffer_kind)a->kind, a->index), 0xff, r->bytes);
    }
}
