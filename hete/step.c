// step.c - writes down the operations of a step with what they touch, and lays out the buffers.
//
// This is the only place that knows what a plan means. Order in the list is program order, so
// fetches and recomputations stand where their result is needed.
#include "hete/step.h"
#include "hete/plan.h"
#include "kernels/layers.h"

#include <stdlib.h>

const char *op_name(uint16_t kind)
{
    static const char *const name[OP_KINDS] = {
        [CALL_ENCODE] = "encode",
        [CALL_FORWARD] = "forward",
        [CALL_RECOMPUTE] = "recompute",
        [CALL_HEAD] = "head",
        [CALL_BACKWARD] = "backward",
        [CALL_ENCODE_BACKWARD] = "encode backward",
        [CALL_LOSS] = "loss",
        [CALL_ENCODE_TOKEN] = "encode token",
        [CALL_DECODE] = "decode",
        [CALL_LOGITS] = "logits",
        [OP_TOKENS_IN] = "tokens in",
        [OP_LOSSES_OUT] = "losses out",
        [OP_FETCH] = "fetch",
        [OP_GRAD_OUT] = "gradient out",
        [OP_ACCUMULATE] = "accumulate",
        [OP_NORM] = "norm",
        [OP_CLIP] = "clip",
        [OP_ADAM] = "adam",
        [OP_HOST_ACCUMULATE] = "host accumulate",
        [OP_HOST_NORM] = "host norm",
        [OP_HOST_SPECULATE] = "host speculate",
        [OP_HOST_ADAM] = "host adam",
        [OP_SCATTER] = "scatter",
        [OP_GATHER_GRADS] = "gather gradients",
        [OP_GATHER] = "gather",
        [OP_SHARE] = "share",
        [OP_BARRIER] = "barrier",
        [OP_BEGIN] = "begin",
    };
    return kind < OP_KINDS && name[kind] ? name[kind] : "operation";
}

bool op_has_unit(uint16_t kind)
{
    return kind != OP_TOKENS_IN && kind != OP_LOSSES_OUT && kind != OP_CLIP && kind != OP_SHARE &&
           kind != OP_BARRIER && kind != OP_BEGIN;
}

void step_shape(struct step_shape *shape, const struct model *model, enum dtype dtype, size_t B,
                size_t T, size_t micro_batches, bool train)
{
    *shape = (struct step_shape){.model = model,
                                 .dtype = dtype,
                                 .B = B,
                                 .T = T,
                                 .micro_batches = micro_batches,
                                 .ranks = 1,
                                 .train = train,
                                 .bytes = model->bytes(model, dtype, B, T)};
}

size_t step_decode_limit(const struct step_shape *shape)
{
    size_t all = shape->B * shape->T, cache = shape->bytes.cache;
    size_t in_boundary = cache ? shape->bytes.boundary / cache : 0;
    return !shape->train ? all : in_boundary > shape->T ? in_boundary : shape->T;
}

size_t step_slice(const struct step_shape *shape, const struct plan *plan, size_t unit,
                  size_t slice, size_t *first)
{
    size_t n = step_held(shape, plan, unit);
    size_t chunks = (n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK;
    size_t per = (chunks + plan->slices - 1) / plan->slices * SUMSQ_CHUNK;
    *first = slice * per < n ? slice * per : n;
    return n - *first < per ? n - *first : per;
}

size_t step_piece(const struct step_shape *shape, size_t unit, size_t rank, size_t *first)
{
    size_t groups = model_unit(shape->model, unit)->params / TENSOR_ALIGN;
    size_t begin = groups * rank / shape->ranks, end = groups * (rank + 1) / shape->ranks;
    *first = begin * TENSOR_ALIGN;
    return (end - begin) * TENSOR_ALIGN;
}

static size_t largest_piece(const struct step_shape *shape, size_t unit)
{
    size_t groups = model_unit(shape->model, unit)->params / TENSOR_ALIGN;
    return (groups + shape->ranks - 1) / shape->ranks * TENSOR_ALIGN;
}

size_t step_held(const struct step_shape *shape, const struct plan *plan, size_t unit)
{
    return plan->unit[unit].shard ? largest_piece(shape, unit)
                                  : model_unit(shape->model, unit)->params;
}

// ---- operations ---------------------------------------------------------------------------------

// Tokens of policies that keep operations apart.
enum { TOKEN_SERIAL, TOKEN_BARRIER, TOKEN_BEGIN };

struct building {
    struct graph *g;
    const struct step_shape *shape;
    const struct plan *plan;
    size_t last; // unit
    size_t grads_used;
    size_t stages_used;
    // What the slots hold, and when each was used last.
    size_t held[PLAN_SLOTS_MAX], used[PLAN_SLOTS_MAX], clock;
    bool fetched[PLAN_UNITS_MAX]; // resident units that are updated elsewhere: in this step
};

#define EMPTY SIZE_MAX

static bool accumulates(const struct building *b)
{
    return b->shape->micro_batches > 1;
}

static bool on_host(const struct building *b, size_t u)
{
    return b->plan->unit[u].host_optimizer;
}

static void add(struct building *b, uint16_t kind, enum lane lane, size_t u, size_t micro)
{
    graph_add(b->g, kind, lane, u, micro);
}

static void touch(struct building *b, enum access_mode mode, enum buffer_kind kind, size_t index)
{
    graph_access(b->g, mode, kind, index, 0);
}

// All slices of a buffer that holds something of a unit.
static void touch_all(struct building *b, enum access_mode mode, enum buffer_kind kind,
                      size_t index, size_t u)
{
    size_t first;
    for (size_t i = 0; i < b->plan->slices; i++) {
        if (step_slice(b->shape, b->plan, u, i, &first)) {
            graph_access(b->g, mode, kind, index, i);
        }
    }
}

// All of a gradient buffer, also slices that are empty: units that share it may be cut otherwise.
static void touch_grads(struct building *b, enum access_mode mode, size_t index)
{
    for (size_t i = 0; i < b->plan->slices; i++) {
        graph_access(b->g, mode, BUF_GRADS, index, i);
    }
}

// The next operation of a run over the slices of a unit; false where there are no more.
static bool add_slice(struct building *b, uint16_t kind, enum lane lane, size_t u, size_t micro,
                      size_t slice)
{
    size_t first;
    if (slice >= b->plan->slices || step_slice(b->shape, b->plan, u, slice, &first) == 0) {
        return false;
    }
    graph_add(b->g, kind, lane, u, micro)->slice = (uint8_t)slice;
    return true;
}

static void serialise(struct building *b)
{
    if (b->plan->serial_copies) {
        touch(b, ACCESS_UPDATE, BUF_TOKEN, TOKEN_SERIAL);
    }
}

static void add_fetch(struct building *b, size_t u, size_t micro, enum buffer_kind to, size_t index)
{
    // A resident unit is not fetched again where nothing has changed: its bytes are not dead.
    enum access_mode mode = to == BUF_SLOT ? ACCESS_WRITE : ACCESS_UPDATE;
    for (size_t i = 0; add_slice(b, OP_FETCH, LANE_COPY_IN, u, micro, i); i++) {
        graph_access(b->g, ACCESS_READ, BUF_HOST_PARAMS, u, i);
        graph_access(b->g, mode, to, index, i);
        serialise(b);
    }
}

static void add_gather(struct building *b, size_t u, size_t micro, enum buffer_kind to,
                       size_t index)
{
    const struct unit_plan *p = b->plan->unit + u;
    bool from_shard = p->stream && !p->host_optimizer; // else a rank's piece is in its place
    add(b, OP_GATHER, LANE_COMM, u, micro);
    if (from_shard) {
        touch(b, ACCESS_READ, BUF_PARAM_SHARD, u);
    }
    touch_all(b, from_shard ? ACCESS_WRITE : ACCESS_UPDATE, to, index, u);
}

static void bring(struct building *b, size_t u, size_t micro, enum buffer_kind to, size_t index)
{
    if (b->plan->unit[u].host_optimizer) {
        add_fetch(b, u, micro, to, index);
    }
    if (b->plan->unit[u].shard) {
        add_gather(b, u, micro, to, index);
    }
}

// Sees to it that the parameters of a unit are on the device, before the operation that uses them
// is added; returns the slot of a streamed unit.
static size_t fetch(struct building *b, size_t u, size_t micro)
{
    const struct unit_plan *p = b->plan->unit + u;
    if (!p->stream) {
        if (!b->fetched[u]) {
            bring(b, u, micro, BUF_PARAMS, u);
            b->fetched[u] = true;
        }
        return 0;
    }
    size_t slot = 0;
    for (size_t i = 0; i < b->plan->slots; i++) {
        if (b->held[i] == u) {
            b->used[i] = ++b->clock;
            return i;
        }
        slot = b->used[i] < b->used[slot] ? i : slot;
    }
    bring(b, u, micro, BUF_SLOT, slot);
    b->held[slot] = u;
    b->used[slot] = ++b->clock;
    return slot;
}

static void reads_params(struct building *b, size_t u, size_t slot)
{
    bool stream = b->plan->unit[u].stream;
    touch_all(b, ACCESS_READ, stream ? BUF_SLOT : BUF_PARAMS, stream ? slot : u, u);
}

// Adds an operation that computes with the parameters of a unit.
static void add_call(struct building *b, enum call call, size_t u, size_t micro)
{
    size_t slot = fetch(b, u, micro);
    add(b, call, LANE_COMPUTE, u, micro);
    reads_params(b, u, slot);
    serialise(b);
}

// ---- forward ------------------------------------------------------------------------------------

// The boundary after a unit; without training two take turns.
static size_t boundary(const struct building *b, size_t u)
{
    return b->shape->train ? u : u % 2;
}

static size_t kept(const struct building *b, size_t u)
{
    return b->plan->unit[u].recompute ? 0 : u;
}

static void add_forward(struct building *b, size_t micro)
{
    add(b, OP_TOKENS_IN, LANE_COPY_IN, 0, micro);
    touch(b, ACCESS_WRITE, BUF_TOKENS, micro);
    add_call(b, CALL_ENCODE, 0, micro);
    if (b->plan->barrier && micro == 0) {
        touch(b, ACCESS_READ, BUF_TOKEN, TOKEN_BEGIN);
    }
    touch(b, ACCESS_READ, BUF_TOKENS, micro);
    touch(b, ACCESS_WRITE, BUF_X, boundary(b, 0));
    for (size_t u = 1; u <= b->last; u++) {
        add_call(b, CALL_FORWARD, u, micro);
        touch(b, ACCESS_READ, BUF_X, boundary(b, u - 1));
        touch(b, ACCESS_WRITE, BUF_X, boundary(b, u));
        touch(b, ACCESS_WRITE, BUF_KEPT, kept(b, u));
        touch(b, ACCESS_WRITE, BUF_WORK, 0);
    }
}

static void add_losses_out(struct building *b, size_t micro)
{
    add(b, OP_LOSSES_OUT, LANE_COPY_OUT, 0, micro);
    touch(b, ACCESS_READ, BUF_LOSSES, micro);
    touch(b, ACCESS_WRITE, BUF_HOST_LOSSES, micro);
}

// No forward of a policy with a barrier begins before all parameters are new.
static void add_begin(struct building *b)
{
    for (size_t u = 0; u <= b->last; u++) {
        if (!b->plan->unit[u].stream) {
            fetch(b, u, 0);
        }
    }
    add(b, OP_BEGIN, LANE_COMPUTE, 0, 0);
    for (size_t u = 0; u <= b->last; u++) {
        bool stream = b->plan->unit[u].stream;
        if (stream && !on_host(b, u)) {
            touch(b, ACCESS_READ, BUF_PARAM_SHARD, u);
        } else {
            touch_all(b, ACCESS_READ, stream ? BUF_HOST_PARAMS : BUF_PARAMS, u, u);
        }
    }
    touch(b, ACCESS_WRITE, BUF_TOKEN, TOKEN_BEGIN);
}

// ---- backward -----------------------------------------------------------------------------------

// Gradient buffers: 0 of unit 0; 1 .. grad_buffers shared; then one of blocks whose device Adam
// comes at once; then one for each other block on the device.
static size_t grads_early(const struct plan *plan)
{
    return 1 + plan->grad_buffers;
}

static size_t grads_own(const struct plan *plan, size_t u)
{
    return grads_early(plan) + u;
}

static bool shares_grads(const struct step_shape *shape, const struct plan *plan, size_t u)
{
    return u > 0 &&
           (shape->micro_batches > 1 || plan->unit[u].host_optimizer || plan->unit[u].shard);
}

// Does a rank's piece of the gradient wait for Adam in a place of its own?
static bool keeps_piece(const struct step_shape *shape, const struct plan *plan, size_t u)
{
    const struct unit_plan *p = plan->unit + u;
    return u > 0 && p->shard && !p->host_optimizer && shape->micro_batches == 1 &&
           !plan->early_adam;
}

static size_t choose_grads(struct building *b, size_t u)
{
    if (u == 0) {
        return 0;
    }
    if (shares_grads(b->shape, b->plan, u)) {
        return 1 + b->grads_used++ % b->plan->grad_buffers;
    }
    return b->plan->early_adam ? grads_early(b->plan) : grads_own(b->plan, u);
}

// A unit's gradient of a micro-batch as a rank goes on with it.
static void read_gradient(struct building *b, size_t u, size_t grads)
{
    if (keeps_piece(b->shape, b->plan, u)) {
        touch(b, ACCESS_READ, BUF_GRAD_SHARD, u);
    } else {
        touch_grads(b, ACCESS_READ, grads);
    }
}

// The same of the whole step.
static void read_final_gradient(struct building *b, size_t u, size_t grads)
{
    if (accumulates(b)) {
        touch(b, ACCESS_READ, BUF_SUM, u);
    } else {
        read_gradient(b, u, grads);
    }
}

static void add_norm(struct building *b, size_t u, size_t micro, size_t grads)
{
    add(b, OP_NORM, LANE_COMPUTE, u, micro);
    read_final_gradient(b, u, grads);
    touch(b, ACCESS_WRITE, BUF_NORM, u);
    touch(b, ACCESS_WRITE, BUF_WORK, 0);
}

static void add_adam(struct building *b, size_t u, size_t grads)
{
    add(b, OP_ADAM, LANE_COMPUTE, u, 0);
    if (b->plan->hold_updates) {
        touch(b, ACCESS_READ, BUF_SCALE, 0);
    }
    read_final_gradient(b, u, grads);
    if (b->plan->unit[u].stream) {
        touch(b, ACCESS_UPDATE, BUF_PARAM_SHARD, u);
    } else {
        touch_all(b, ACCESS_UPDATE, BUF_PARAMS, u, u);
    }
    if (b->shape->dtype != DTYPE_FP32) {
        touch(b, ACCESS_UPDATE, BUF_MASTER, u);
    }
    touch(b, ACCESS_UPDATE, BUF_MOMENTS, u);
}

static void add_gradient_on_device(struct building *b, size_t u, size_t micro, size_t grads)
{
    bool final = micro + 1 == b->shape->micro_batches;
    if (accumulates(b)) {
        add(b, OP_ACCUMULATE, LANE_COMPUTE, u, micro);
        touch_grads(b, ACCESS_READ, grads);
        touch(b, micro ? ACCESS_UPDATE : ACCESS_WRITE, BUF_SUM, u);
    }
    if (final) {
        add_norm(b, u, micro, grads);
    }
    if (final && b->plan->early_adam) {
        add_adam(b, u, grads);
    }
}

static void add_gradient_to_host(struct building *b, size_t u, size_t micro, size_t grads)
{
    bool final = micro + 1 == b->shape->micro_batches, sums = accumulates(b);
    if (!sums) {
        add_norm(b, u, micro, grads);
    }
    size_t stage = u ? 1 + b->stages_used++ % PLAN_STAGES : 0;
    for (size_t i = 0; add_slice(b, OP_GRAD_OUT, LANE_COPY_OUT, u, micro, i); i++) {
        graph_access(b->g, ACCESS_READ, BUF_GRADS, grads, i);
        graph_access(b->g, ACCESS_WRITE, sums ? BUF_HOST_STAGE : BUF_HOST_GRADS, sums ? stage : u,
                     i);
    }
    for (size_t i = 0; sums && add_slice(b, OP_HOST_ACCUMULATE, LANE_HOST, u, micro, i); i++) {
        graph_access(b->g, ACCESS_READ, BUF_HOST_STAGE, stage, i);
        graph_access(b->g, micro ? ACCESS_UPDATE : ACCESS_WRITE, BUF_HOST_SUM, u, i);
    }
    for (size_t i = 0; sums && final && add_slice(b, OP_HOST_NORM, LANE_HOST, u, micro, i); i++) {
        graph_access(b->g, ACCESS_READ, BUF_HOST_SUM, u, i);
        graph_access(b->g, ACCESS_WRITE, BUF_HOST_CHUNKS, u, i);
    }
}

static void add_scatter(struct building *b, size_t u, size_t micro, size_t grads)
{
    bool apart = keeps_piece(b->shape, b->plan, u);
    add(b, OP_SCATTER, LANE_COMM, u, micro);
    touch_grads(b, apart ? ACCESS_READ : ACCESS_UPDATE, grads);
    if (apart) {
        touch(b, ACCESS_WRITE, BUF_GRAD_SHARD, u);
    }
    touch(b, ACCESS_WRITE, BUF_EXCHANGE, 0);
    if (!b->plan->unit[u].shard) {
        add(b, OP_GATHER_GRADS, LANE_COMM, u, micro);
        touch_grads(b, ACCESS_UPDATE, grads);
    }
}

// What happens to a unit's gradient of one micro-batch when it is complete.
static void add_gradient(struct building *b, size_t u, size_t micro, size_t grads)
{
    if (b->shape->ranks > 1) {
        add_scatter(b, u, micro, grads);
    }
    if (on_host(b, u)) {
        add_gradient_to_host(b, u, micro, grads);
    } else {
        add_gradient_on_device(b, u, micro, grads);
    }
}

static void touch_embed_grads(struct building *b, enum access_mode mode)
{
    touch_grads(b, mode, 0);
    if (b->shape->bytes.grads_fp32) {
        touch(b, mode, BUF_GRADS_FP32, 0);
    }
}

// So that the gather of the next unit need not wait for the scatter of this one.
static void fetch_ahead(struct building *b, size_t u, size_t micro)
{
    if (b->shape->ranks > 1 && b->plan->slots > 1 && u > 1) {
        fetch(b, u, micro);
        fetch(b, u - 1, micro);
    }
}

static void add_backward(struct building *b, size_t micro)
{
    add_call(b, CALL_HEAD, 0, micro);
    touch(b, ACCESS_READ, BUF_TOKENS, micro);
    touch(b, ACCESS_READ, BUF_X, boundary(b, b->last));
    touch(b, ACCESS_WRITE, BUF_LOSSES, micro);
    touch(b, ACCESS_WRITE, BUF_DX, 0);
    touch_embed_grads(b, ACCESS_WRITE);
    touch(b, ACCESS_WRITE, BUF_WORK, 0);
    add_losses_out(b, micro);
    for (size_t u = b->last; u >= 1; u--) {
        fetch_ahead(b, u, micro);
        if (b->plan->unit[u].recompute) {
            add_call(b, CALL_RECOMPUTE, u, micro);
            touch(b, ACCESS_READ, BUF_X, boundary(b, u - 1));
            touch(b, ACCESS_WRITE, BUF_KEPT, kept(b, u));
            touch(b, ACCESS_WRITE, BUF_WORK, 0);
        }
        size_t grads = choose_grads(b, u);
        add_call(b, CALL_BACKWARD, u, micro);
        touch(b, ACCESS_READ, BUF_X, boundary(b, u - 1));
        touch(b, ACCESS_READ, BUF_KEPT, kept(b, u));
        touch(b, ACCESS_UPDATE, BUF_DX, 0);
        touch_grads(b, ACCESS_WRITE, grads);
        touch(b, ACCESS_WRITE, BUF_WORK, 0);
        add_gradient(b, u, micro, grads);
    }
    add(b, CALL_ENCODE_BACKWARD, LANE_COMPUTE, 0, micro);
    touch(b, ACCESS_READ, BUF_TOKENS, micro);
    touch(b, ACCESS_READ, BUF_DX, 0);
    touch_embed_grads(b, ACCESS_UPDATE);
    add_gradient(b, 0, micro, 0);
}

// ---- update -------------------------------------------------------------------------------------

static void touch_losses_and_norms(struct building *b)
{
    for (size_t u = 0; u <= b->last; u++) {
        if (accumulates(b) && on_host(b, u)) {
            touch_all(b, ACCESS_READ, BUF_HOST_CHUNKS, u, u);
        } else {
            touch(b, ACCESS_READ, BUF_NORM, u);
        }
    }
    for (size_t m = 0; m < b->shape->micro_batches; m++) {
        touch(b, ACCESS_READ, BUF_HOST_LOSSES, m);
    }
}

// Where updates wait for it, on the compute lane, which stores it straight into host memory. Where
// they do not, it only feeds the log and must not stop the compute lane.
static void add_clip(struct building *b)
{
    bool alone = b->shape->ranks == 1;
    if (!alone) {
        graph_add(b->g, OP_SHARE, LANE_COMM, 0, 0)->by_host = true;
        touch_losses_and_norms(b);
        touch(b, ACCESS_WRITE, BUF_SHARED, 0);
    }
    enum lane lane = b->plan->hold_updates ? LANE_COMPUTE : LANE_HOST;
    graph_add(b->g, OP_CLIP, lane, 0, 0)->by_host = true;
    if (alone) {
        touch_losses_and_norms(b);
    } else {
        touch(b, ACCESS_READ, BUF_SHARED, 0);
    }
    touch(b, ACCESS_WRITE, BUF_SCALE, 0);
}

static void add_barrier(struct building *b)
{
    add(b, OP_BARRIER, LANE_HOST, 0, 0);
    for (size_t u = 0; u <= b->last; u++) {
        if (on_host(b, u)) {
            touch_all(b, ACCESS_READ, accumulates(b) ? BUF_HOST_SUM : BUF_HOST_GRADS, u, u);
        }
    }
    touch(b, ACCESS_WRITE, BUF_TOKEN, TOKEN_BARRIER);
}

// Accesses to a slice of the optimizer's state on the host.
static void touch_host_state(struct building *b, enum access_mode mode, size_t index, size_t slice)
{
    graph_access(b->g, mode, BUF_HOST_PARAMS, index, slice);
    if (b->shape->dtype != DTYPE_FP32) {
        graph_access(b->g, mode, BUF_HOST_MASTER, index, slice);
    }
    graph_access(b->g, mode, BUF_HOST_MOMENTS, index, slice);
}

static void read_host_gradient(struct building *b, size_t u, size_t slice)
{
    graph_access(b->g, ACCESS_READ, accumulates(b) ? BUF_HOST_SUM : BUF_HOST_GRADS, u, slice);
}

// Stands behind clip, so that what is next to be committed comes first, but does not wait for it.
static void add_speculation(struct building *b, size_t u)
{
    for (size_t i = 0; add_slice(b, OP_HOST_SPECULATE, LANE_HOST, u, 0, i); i++) {
        read_host_gradient(b, u, i);
        touch_host_state(b, ACCESS_READ, u, i);
        touch_host_state(b, ACCESS_WRITE, step_spare(b->shape, u), i);
    }
}

static void add_host_adam(struct building *b, size_t u)
{
    for (size_t i = 0; add_slice(b, OP_HOST_ADAM, LANE_HOST, u, 0, i); i++) {
        if (b->plan->hold_updates) {
            touch(b, ACCESS_READ, BUF_SCALE, 0);
        }
        if (b->plan->barrier) {
            touch(b, ACCESS_READ, BUF_TOKEN, TOKEN_BARRIER);
        }
        read_host_gradient(b, u, i);
        touch_host_state(b, ACCESS_UPDATE, u, i);
        if (b->plan->speculate) {
            touch_host_state(b, ACCESS_UPDATE, step_spare(b->shape, u), i);
        }
    }
}

static void add_update(struct building *b)
{
    if (b->plan->hold_updates) {
        add_clip(b);
    }
    if (b->plan->barrier) {
        add_barrier(b);
    }
    for (size_t i = 0; i <= b->last; i++) {
        size_t u = b->plan->fifo ? b->last - i : i; // fifo: as the gradients arrive
        if (on_host(b, u) && b->plan->speculate) {
            add_speculation(b, u);
        }
        if (on_host(b, u)) {
            add_host_adam(b, u);
        }
    }
    for (size_t u = 0; u <= b->last && !b->plan->early_adam; u++) {
        if (!on_host(b, u)) {
            add_adam(b, u, u ? grads_own(b->plan, u) : 0);
        }
    }
    if (!b->plan->hold_updates) {
        add_clip(b);
    }
}

// ---- the steps ----------------------------------------------------------------------------------

static void build_training(struct building *b)
{
    if (b->plan->barrier) {
        add_begin(b);
    }
    for (size_t m = 0; m < b->shape->micro_batches; m++) {
        add_forward(b, m);
        add_backward(b, m);
    }
    add_update(b);
}

static void build_loss(struct building *b)
{
    add_forward(b, 0);
    add_call(b, CALL_LOSS, 0, 0);
    touch(b, ACCESS_READ, BUF_TOKENS, 0);
    touch(b, ACCESS_READ, BUF_X, boundary(b, b->last));
    touch(b, ACCESS_WRITE, BUF_LOSSES, 0);
    touch(b, ACCESS_WRITE, BUF_WORK, 0);
    add_losses_out(b, 0);
}

// One token passes through the blocks in place. The cache of keys and values lies where a block's
// activations are kept; for blocks that keep none, where its output is.
static void build_decode(struct building *b)
{
    enum buffer_kind x = b->shape->train ? BUF_DX : BUF_X;
    add_call(b, CALL_ENCODE_TOKEN, 0, 0);
    touch(b, ACCESS_WRITE, x, 0);
    for (size_t u = 1; u <= b->last; u++) {
        add_call(b, CALL_DECODE, u, 0);
        touch(b, ACCESS_UPDATE, x, 0);
        touch(b, ACCESS_UPDATE, b->plan->unit[u].recompute ? BUF_X : BUF_KEPT, u);
        touch(b, ACCESS_WRITE, BUF_WORK, 0);
    }
    add_call(b, CALL_LOGITS, 0, 0);
    touch(b, ACCESS_READ, x, 0);
    touch(b, ACCESS_WRITE, BUF_WORK, 0);
}

int step_build(struct graph *g, const struct step_shape *shape, const struct plan *plan,
               enum step_kind kind, struct error *err)
{
    struct plan alone; // validation and decoding: what keeps training in step is not needed
    if (kind != STEP_TRAIN) {
        alone = *plan;
        alone.barrier = alone.serial_copies = false;
        plan = &alone;
    }
    struct building b = {.g = g, .shape = shape, .plan = plan, .last = shape->model->units - 1};
    for (size_t i = 0; i < PLAN_SLOTS_MAX; i++) {
        b.held[i] = EMPTY;
    }
    switch (kind) {
    case STEP_TRAIN:
        build_training(&b);
        break;
    case STEP_LOSS:
        build_loss(&b);
        break;
    case STEP_DECODE:
        build_decode(&b);
        break;
    }
    return graph_link(g, kind == STEP_TRAIN, err);
}

// ---- memory -------------------------------------------------------------------------------------

const char *const category_name[CATEGORIES] = {"parameters",       "fp32 masters", "gradients",
                                               "Adam moments",     "activations",  "workspace",
                                               "tokens and losses"};

static const enum category category_of[BUFFER_KINDS] = {
    [BUF_PARAMS] = PARAMS,        [BUF_SLOT] = PARAMS,          [BUF_MASTER] = MASTERS,
    [BUF_MOMENTS] = MOMENTS,      [BUF_GRADS] = GRADIENTS,      [BUF_SUM] = GRADIENTS,
    [BUF_GRADS_FP32] = GRADIENTS, [BUF_X] = ACTIVATIONS,        [BUF_KEPT] = ACTIVATIONS,
    [BUF_DX] = ACTIVATIONS,       [BUF_WORK] = WORKSPACE,       [BUF_TOKENS] = BATCH,
    [BUF_LOSSES] = BATCH,         [BUF_NORM] = WORKSPACE,       [BUF_HOST_PARAMS] = PARAMS,
    [BUF_HOST_MASTER] = MASTERS,  [BUF_HOST_MOMENTS] = MOMENTS, [BUF_HOST_GRADS] = GRADIENTS,
    [BUF_HOST_STAGE] = GRADIENTS, [BUF_HOST_SUM] = GRADIENTS,   [BUF_HOST_CHUNKS] = WORKSPACE,
    [BUF_HOST_LOSSES] = BATCH,    [BUF_HOST_TOKENS] = BATCH,    [BUF_EXCHANGE] = WORKSPACE,
    [BUF_SHARED] = BATCH,         [BUF_PARAM_SHARD] = PARAMS,   [BUF_GRAD_SHARD] = GRADIENTS,
};

struct placing {
    struct layout *layout;
    const struct step_shape *shape;
    const struct plan *plan;
    size_t pinned; // at most
};

static void place(struct placing *p, enum space space, enum buffer_kind kind, size_t index,
                  size_t bytes)
{
    struct layout *l = p->layout;
    bytes = device_round(bytes);
    if (space == SPACE_PINNED && bytes > p->pinned - l->total[SPACE_PINNED]) {
        space = SPACE_HOST;
    }
    l->region[kind][index] = (struct region){space, l->total[space], bytes};
    l->total[space] += bytes;
    l->category[space][category_of[kind]] += bytes;
}

// Bytes of n elements of the model's dtype, and of fp32.
static size_t own(const struct placing *p, size_t n)
{
    return n * dtype_bytes(p->shape->dtype);
}

static size_t fp32(size_t n)
{
    return n * sizeof(float);
}

static size_t speculates(const struct placing *p)
{
    return p->shape->train && p->plan->speculate;
}

static void place_device_unit(struct placing *p, size_t u)
{
    const struct step_shape *s = p->shape;
    const struct unit_plan *d = p->plan->unit + u;
    size_t whole = model_unit(s->model, u)->params, n = step_held(s, p->plan, u);
    if (!d->stream) {
        place(p, SPACE_DEVICE, BUF_PARAMS, u, own(p, whole));
    } else if (!d->host_optimizer) {
        place(p, SPACE_DEVICE, BUF_PARAM_SHARD, u, own(p, n));
    }
    if (s->train && !d->host_optimizer) {
        place(p, SPACE_DEVICE, BUF_MASTER, u, s->dtype == DTYPE_FP32 ? 0 : fp32(n));
        place(p, SPACE_DEVICE, BUF_MOMENTS, u, 2 * fp32(n));
        place(p, SPACE_DEVICE, BUF_SUM, u, s->micro_batches > 1 ? fp32(n) : 0);
        if (u && !shares_grads(s, p->plan, u) && !p->plan->early_adam) {
            place(p, SPACE_DEVICE, BUF_GRADS, grads_own(p->plan, u), own(p, n));
        }
        place(p, SPACE_DEVICE, BUF_GRAD_SHARD, u, keeps_piece(s, p->plan, u) ? own(p, n) : 0);
    }
    if (s->train || u < 2) {
        size_t cache = d->recompute ? step_decode_limit(s) * s->bytes.cache : 0;
        place(p, SPACE_DEVICE, BUF_X, u, s->bytes.boundary > cache ? s->bytes.boundary : cache);
    }
    if (u && !d->recompute) {
        place(p, SPACE_DEVICE, BUF_KEPT, u, s->bytes.kept);
    }
}

static void place_shared(struct placing *p)
{
    const struct step_shape *s = p->shape;
    const struct plan *plan = p->plan;
    size_t block = s->model->block.params, embed = s->model->embed.params;
    size_t most = block > embed ? block : embed;
    size_t chunks = s->train ? fp32((most + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK) : 0;
    bool any_recomputed = false, any_shared = false, any_early = false;
    for (size_t u = 1; u < s->model->units; u++) {
        any_recomputed |= plan->unit[u].recompute;
        any_shared |= shares_grads(s, plan, u);
        any_early |= plan->early_adam && !shares_grads(s, plan, u);
    }
    for (size_t i = 0; i < plan->slots; i++) {
        place(p, SPACE_DEVICE, BUF_SLOT, i, own(p, block));
    }
    place(p, SPACE_DEVICE, BUF_KEPT, 0, any_recomputed ? s->bytes.kept : 0);
    place(p, SPACE_DEVICE, BUF_WORK, 0, s->bytes.work > chunks ? s->bytes.work : chunks);
    for (size_t m = 0; m < s->micro_batches; m++) {
        place(p, SPACE_DEVICE, BUF_TOKENS, m, 2 * s->B * s->T * sizeof(int32_t));
        place(p, SPACE_DEVICE, BUF_LOSSES, m, fp32(s->B * s->T));
    }
    if (s->train) {
        place(p, SPACE_DEVICE, BUF_DX, 0, s->bytes.boundary);
        place(p, SPACE_DEVICE, BUF_GRADS, 0, own(p, embed));
        place(p, SPACE_DEVICE, BUF_GRADS_FP32, 0, s->bytes.grads_fp32);
        for (size_t i = 1; any_shared && i <= plan->grad_buffers; i++) {
            place(p, SPACE_DEVICE, BUF_GRADS, i, own(p, block));
        }
        if (any_early) {
            place(p, SPACE_DEVICE, BUF_GRADS, grads_early(plan), own(p, block));
        }
    }
}

// What is copied most often comes first, in case pinned memory does not suffice for all.
static void place_pinned(struct placing *p)
{
    const struct step_shape *s = p->shape;
    size_t units = s->model->units, steps_in_flight = 2;
    bool sums = s->micro_batches > 1;
    for (size_t u = 0; u < units; u++) { // where the sum is on the host the norm is taken there
        bool there = p->plan->unit[u].host_optimizer && sums;
        place(p, SPACE_PINNED, BUF_NORM, u, s->train && !there ? sizeof(double) : 0);
    }
    for (size_t m = 0; m < s->micro_batches; m++) {
        place(p, SPACE_PINNED, BUF_HOST_LOSSES, m, fp32(s->B * s->T));
    }
    for (size_t m = 0; m < steps_in_flight * s->micro_batches; m++) {
        place(p, SPACE_PINNED, BUF_HOST_TOKENS, m, 2 * s->B * s->T * sizeof(int32_t));
    }
    for (size_t pass = 0; pass < 2; pass++) {
        for (size_t u = 0; u < units; u++) {
            const struct unit_plan *d = p->plan->unit + u;
            if (d->host_optimizer && d->stream == (pass == 0)) {
                size_t bytes = own(p, step_held(s, p->plan, u));
                place(p, SPACE_PINNED, BUF_HOST_PARAMS, u, bytes);
                place(p, SPACE_PINNED, BUF_HOST_PARAMS, step_spare(s, u), speculates(p) * bytes);
            }
        }
    }
    size_t most = 0; // of a block
    for (size_t u = 0; u < units && s->train; u++) {
        if (p->plan->unit[u].host_optimizer) {
            size_t n = step_held(s, p->plan, u);
            place(p, SPACE_PINNED, BUF_HOST_GRADS, u, sums ? 0 : own(p, n));
            most = u > 0 && n > most ? n : most;
        }
    }
    if (s->train && sums && p->plan->unit[0].host_optimizer) {
        place(p, SPACE_PINNED, BUF_HOST_STAGE, 0, own(p, step_held(s, p->plan, 0)));
    }
    for (size_t i = 1; sums && i <= PLAN_STAGES; i++) {
        place(p, SPACE_PINNED, BUF_HOST_STAGE, i, own(p, most));
    }
}

// What ranks tell each other.
static void place_exchange(struct placing *p)
{
    const struct step_shape *s = p->shape;
    size_t embed = largest_piece(s, 0), block = largest_piece(s, 1);
    size_t most = embed > block ? embed : block;
    if (s->train && s->ranks > 1) {
        place(p, SPACE_DEVICE, BUF_EXCHANGE, 0, s->ranks * own(p, most) + fp32(most));
        place(p, SPACE_PINNED, BUF_SHARED, 0, s->ranks * step_shared(s) * sizeof(double));
    }
}

static void place_host(struct placing *p)
{
    const struct step_shape *s = p->shape;
    for (size_t u = 0; u < s->model->units && s->train; u++) {
        size_t n = step_held(s, p->plan, u);
        if (p->plan->unit[u].host_optimizer) {
            bool sums = s->micro_batches > 1;
            size_t master = s->dtype == DTYPE_FP32 ? 0 : fp32(n), moments = 2 * fp32(n);
            place(p, SPACE_HOST, BUF_HOST_MASTER, u, master);
            place(p, SPACE_HOST, BUF_HOST_MOMENTS, u, moments);
            place(p, SPACE_HOST, BUF_HOST_MASTER, step_spare(s, u), speculates(p) * master);
            place(p, SPACE_HOST, BUF_HOST_MOMENTS, step_spare(s, u), speculates(p) * moments);
            place(p, SPACE_HOST, BUF_HOST_SUM, u, sums ? fp32(n) : 0);
            place(p, SPACE_HOST, BUF_HOST_CHUNKS, u,
                  sums ? fp32((n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK) : 0);
        }
    }
}

int layout_make(struct layout *layout, const struct step_shape *shape, const struct plan *plan,
                size_t pinned, struct error *err)
{
    size_t units = shape->model->units, most = 2 * shape->micro_batches;
    most = most > 2 * units ? most : 2 * units;
    most += 1 + PLAN_GRADS_MAX + PLAN_SLOTS_MAX;
    *layout = (struct layout){0};
    struct region *regions = calloc(BUFFER_KINDS * most, sizeof *regions);
    if (!regions) {
        return error_set(err, STATUS_FAIL, "no memory to lay out %zu units", units);
    }
    for (int k = 0; k < BUFFER_KINDS; k++) {
        layout->region[k] = regions + (size_t)k * most;
        layout->indices[k] = most;
    }
    struct placing p = {.layout = layout, .shape = shape, .plan = plan, .pinned = pinned};
    for (size_t u = 0; u < units; u++) {
        place_device_unit(&p, u);
    }
    place_shared(&p);
    place_exchange(&p);
    place_pinned(&p);
    place_host(&p);
    return STATUS_OK;
}

void layout_free(struct layout *layout)
{
    free(layout->region[0]); // all in one piece
    *layout = (struct layout){0};
}
