#include "hete/session.h"
#include "hete/graph.h"
#include "kernels/bf16.h"
#include "kernels/layers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Operations of the graphs. The first ones are calls of a unit (unit.h).
enum {
    OP_TOKENS_IN = CALLS,
    OP_LOSSES_OUT,
    OP_ACCUMULATE,
    OP_NORM,
    OP_CLIP,
    OP_ADAM,
};

// Offsets of one unit's buffers in the arena.
struct place {
    size_t params, master, m, v, grads, sum, kept, x;
};

enum category { PARAMS, MASTERS, GRADIENTS, MOMENTS, ACTIVATIONS, WORKSPACE, BATCH, CATEGORIES };

static const char *const category_name[CATEGORIES] = {
    "parameters",  "fp32 masters", "gradients",        "Adam moments",
    "activations", "workspace",    "tokens and losses"};

struct session {
    struct device *dev;
    const struct model *model;
    struct session_config config;
    struct unit_bytes bytes;
    char *arena;
    size_t arena_bytes, category[CATEGORIES];
    struct place *place; // one per unit
    size_t dx, work, grads_fp32, tokens, targets, losses, norms, chunks;
    struct graph step, loss, decode;
    double *host_norms; // one per unit
    float *host_losses; // of a whole step
    void *host_logits;  // Vp, in the device's dtype
    // What the step that is running was asked to do.
    const int32_t *in_tokens, *in_targets;
    const struct session_update *update;
    struct session_result *result;
    struct adamw adamw; // decay: of tensors that decay
    int32_t token;
    size_t pos;
};

static char *at(const struct session *s, size_t offset)
{
    return s->arena + offset;
}

static size_t elem_bytes(const struct session *s)
{
    return dtype_bytes(s->dev->dtype);
}

// ---- layout -------------------------------------------------------------------------------------

static size_t reserve(struct session *s, enum category category, size_t bytes)
{
    size_t offset = s->arena_bytes;
    s->arena_bytes += device_round(bytes);
    s->category[category] += device_round(bytes);
    return offset;
}

static void lay_out_unit(struct session *s, size_t u)
{
    struct place *p = s->place + u;
    size_t n = model_unit(s->model, u)->params, fp32 = n * sizeof(float);
    bool bf16 = s->dev->dtype != DTYPE_FP32, sums = s->config.micro_batches > 1;
    p->params = reserve(s, PARAMS, n * elem_bytes(s));
    if (s->config.train) {
        p->master = bf16 ? reserve(s, MASTERS, fp32) : p->params;
        p->m = reserve(s, MOMENTS, fp32);
        p->v = reserve(s, MOMENTS, fp32);
        p->sum = sums ? reserve(s, GRADIENTS, fp32) : 0;
        // With sums, a block's own gradient is short-lived: all blocks share one buffer.
        p->grads = sums && u > 1 ? s->place[1].grads : reserve(s, GRADIENTS, n * elem_bytes(s));
    }
    // Without training a boundary is needed only until the next one is there.
    p->x =
        s->config.train || u < 2 ? reserve(s, ACTIVATIONS, s->bytes.boundary) : s->place[u - 2].x;
    p->kept = u ? reserve(s, ACTIVATIONS, s->bytes.kept) : 0;
}

static void lay_out(struct session *s)
{
    size_t tokens = s->config.B * s->config.T * s->config.micro_batches, most = 0;
    s->bytes = s->model->bytes(s->model, s->dev->dtype, s->config.B, s->config.T);
    for (size_t u = 0; u < s->model->units; u++) {
        size_t n = model_unit(s->model, u)->params;
        most = n > most ? n : most;
        lay_out_unit(s, u);
    }
    s->work = reserve(s, WORKSPACE, s->bytes.work);
    if (s->config.train) {
        s->dx = reserve(s, ACTIVATIONS, s->bytes.boundary);
        s->grads_fp32 = reserve(s, GRADIENTS, s->bytes.grads_fp32);
        s->norms = reserve(s, WORKSPACE, s->model->units * sizeof(double));
        s->chunks = reserve(s, WORKSPACE, (most / SUMSQ_CHUNK + 1) * sizeof(float));
    }
    s->tokens = reserve(s, BATCH, tokens * sizeof(int32_t));
    s->targets = reserve(s, BATCH, tokens * sizeof(int32_t));
    s->losses = reserve(s, BATCH, tokens * sizeof(float));
}

void session_print_memory(const struct session *s, FILE *out)
{
    fprintf(out, "device memory (bytes)\n");
    for (int c = 0; c < CATEGORIES; c++) {
        if (s->category[c]) {
            fprintf(out, "  %-18s %15zu\n", category_name[c], s->category[c]);
        }
    }
    fprintf(out, "  %-18s %15zu\n", "arena, sealed", s->arena_bytes);
    fprintf(out, "  %-18s %15zu  outside the arena\n", "thread scratch", s->dev->workspace_bytes);
}

size_t session_arena_bytes(const struct session *s)
{
    return s->arena_bytes;
}

// ---- the steps, written down --------------------------------------------------------------------

static size_t last_unit(const struct session *s)
{
    return s->model->units - 1;
}

// The gradient buffer that a unit's backward writes.
static size_t grad_buffer(const struct session *s, size_t u)
{
    return s->config.micro_batches > 1 && u > 1 ? 1 : u;
}

// The buffer of the boundary after a unit; without training two take turns (lay_out_unit).
static size_t x_buffer(const struct session *s, size_t u)
{
    return s->config.train ? u : u % 2;
}

static void add_forward(struct session *s, struct graph *g, size_t micro)
{
    graph_add(g, OP_TOKENS_IN, LANE_COPY_IN, 0, micro);
    graph_writes(g, BUF_TOKENS, micro);
    graph_add(g, CALL_ENCODE, LANE_COMPUTE, 0, micro);
    graph_reads(g, BUF_TOKENS, micro);
    graph_reads(g, BUF_PARAMS, 0);
    graph_writes(g, BUF_X, x_buffer(s, 0));
    for (size_t u = 1; u <= last_unit(s); u++) {
        graph_add(g, CALL_FORWARD, LANE_COMPUTE, u, micro);
        graph_reads(g, BUF_PARAMS, u);
        graph_reads(g, BUF_X, x_buffer(s, u - 1));
        graph_writes(g, BUF_X, x_buffer(s, u));
        graph_writes(g, BUF_KEPT, u);
        graph_writes(g, BUF_WORK, 0);
    }
}

static void add_losses_out(struct graph *g, size_t micro)
{
    graph_add(g, OP_LOSSES_OUT, LANE_COPY_OUT, 0, micro);
    graph_reads(g, BUF_LOSSES, micro);
    graph_writes(g, BUF_HOST_LOSSES, micro);
}

// What happens to a unit's gradient of one micro-batch when it is complete.
static void add_gradient(struct session *s, struct graph *g, size_t u, size_t micro)
{
    size_t k = s->config.micro_batches;
    if (k > 1) {
        graph_add(g, OP_ACCUMULATE, LANE_COMPUTE, u, micro);
        graph_reads(g, BUF_GRADS, grad_buffer(s, u));
        graph_writes(g, BUF_SUM, u);
    }
    if (micro + 1 == k) {
        graph_add(g, OP_NORM, LANE_COMPUTE, u, micro);
        graph_reads(g, k > 1 ? BUF_SUM : BUF_GRADS, u);
        graph_writes(g, BUF_NORM, u);
        graph_writes(g, BUF_WORK, 0);
    }
}

static void add_backward(struct session *s, struct graph *g, size_t micro)
{
    graph_add(g, CALL_HEAD, LANE_COMPUTE, 0, micro);
    graph_reads(g, BUF_TOKENS, micro);
    graph_reads(g, BUF_PARAMS, 0);
    graph_reads(g, BUF_X, x_buffer(s, last_unit(s)));
    graph_writes(g, BUF_LOSSES, micro);
    graph_writes(g, BUF_DX, 0);
    graph_writes(g, BUF_GRADS, 0);
    graph_writes(g, BUF_GRADS_FP32, 0);
    graph_writes(g, BUF_WORK, 0);
    for (size_t u = last_unit(s); u >= 1; u--) {
        graph_add(g, CALL_BACKWARD, LANE_COMPUTE, u, micro);
        graph_reads(g, BUF_PARAMS, u);
        graph_reads(g, BUF_X, x_buffer(s, u - 1));
        graph_reads(g, BUF_KEPT, u);
        graph_writes(g, BUF_DX, 0);
        graph_writes(g, BUF_GRADS, grad_buffer(s, u));
        graph_writes(g, BUF_WORK, 0);
        add_gradient(s, g, u, micro);
    }
    graph_add(g, CALL_ENCODE_BACKWARD, LANE_COMPUTE, 0, micro);
    graph_reads(g, BUF_TOKENS, micro);
    graph_reads(g, BUF_DX, 0);
    graph_writes(g, BUF_GRADS, 0);
    graph_writes(g, BUF_GRADS_FP32, 0);
    add_gradient(s, g, 0, micro);
}

static void add_update(struct session *s, struct graph *g)
{
    graph_add(g, OP_CLIP, LANE_COPY_OUT, 0, 0);
    for (size_t u = 0; u < s->model->units; u++) {
        graph_reads(g, BUF_NORM, u);
    }
    for (size_t m = 0; m < s->config.micro_batches; m++) {
        graph_reads(g, BUF_HOST_LOSSES, m);
    }
    graph_writes(g, BUF_SCALE, 0);
    for (size_t u = 0; u < s->model->units; u++) {
        graph_add(g, OP_ADAM, LANE_COMPUTE, u, 0);
        graph_reads(g, BUF_SCALE, 0);
        graph_reads(g, s->config.micro_batches > 1 ? BUF_SUM : BUF_GRADS, u);
        graph_writes(g, BUF_PARAMS, u);
        graph_writes(g, BUF_MOMENTS, u);
    }
}

static void write_training(struct session *s)
{
    for (size_t m = 0; m < s->config.micro_batches; m++) {
        add_forward(s, &s->step, m);
        add_backward(s, &s->step, m);
        add_losses_out(&s->step, m);
    }
    add_update(s, &s->step);
}

static void write_loss(struct session *s)
{
    add_forward(s, &s->loss, 0);
    graph_add(&s->loss, CALL_LOSS, LANE_COMPUTE, 0, 0);
    graph_reads(&s->loss, BUF_TOKENS, 0);
    graph_reads(&s->loss, BUF_PARAMS, 0);
    graph_reads(&s->loss, BUF_X, x_buffer(s, last_unit(s)));
    graph_writes(&s->loss, BUF_LOSSES, 0);
    graph_writes(&s->loss, BUF_WORK, 0);
    add_losses_out(&s->loss, 0);
}

static void write_decode(struct session *s)
{
    struct graph *g = &s->decode;
    graph_add(g, CALL_ENCODE_TOKEN, LANE_COMPUTE, 0, 0);
    graph_reads(g, BUF_PARAMS, 0);
    graph_writes(g, BUF_X, x_buffer(s, 0));
    for (size_t u = 1; u <= last_unit(s); u++) {
        graph_add(g, CALL_DECODE, LANE_COMPUTE, u, 0);
        graph_reads(g, BUF_PARAMS, u);
        graph_reads(g, BUF_X, x_buffer(s, u - 1));
        graph_writes(g, BUF_X, x_buffer(s, u));
        graph_writes(g, BUF_KEPT, u);
        graph_writes(g, BUF_WORK, 0);
    }
    graph_add(g, CALL_LOGITS, LANE_COMPUTE, 0, 0);
    graph_reads(g, BUF_PARAMS, 0);
    graph_reads(g, BUF_X, x_buffer(s, last_unit(s)));
    graph_writes(g, BUF_WORK, 0);
}

// ---- running an operation -----------------------------------------------------------------------

static struct unit_args args_of(struct session *s, const struct op *op)
{
    const struct place *p = s->place + op->unit;
    size_t u = op->unit, tokens = op->micro * s->config.B * s->config.T;
    // Unit 0 stands at both ends: it gives x[0] and takes the last boundary.
    size_t x = u ? s->place[u - 1].x : s->place[last_unit(s)].x;
    return (struct unit_args){
        .params = at(s, p->params),
        .grads = at(s, p->grads),
        .grads_fp32 = (float *)at(s, s->grads_fp32),
        .x = at(s, x),
        .y = at(s, p->x),
        .dx = at(s, s->dx),
        .kept = at(s, p->kept),
        .work = at(s, s->work),
        .tokens = (int32_t *)at(s, s->tokens) + tokens,
        .targets = (int32_t *)at(s, s->targets) + tokens,
        .losses = (float *)at(s, s->losses) + tokens,
        .B = s->config.B,
        .T = s->config.T,
        .dscale = 1.0f / (float)(s->config.B * s->config.T * s->config.micro_batches),
        .token = s->token,
        .pos = s->pos,
    };
}

static void tokens_in(struct session *s, size_t micro)
{
    size_t n = s->config.B * s->config.T, first = micro * n, bytes = n * sizeof(int32_t);
    device_copy_in(s->dev, (int32_t *)at(s, s->tokens) + first, s->in_tokens + first, bytes);
    device_copy_in(s->dev, (int32_t *)at(s, s->targets) + first, s->in_targets + first, bytes);
}

static void losses_out(struct session *s, size_t micro)
{
    size_t n = s->config.B * s->config.T, first = micro * n;
    device_copy_out(s->dev, s->host_losses + first, (float *)at(s, s->losses) + first,
                    n * sizeof(float));
}

static void norm(struct session *s, size_t u)
{
    const struct place *p = s->place + u;
    size_t n = model_unit(s->model, u)->params;
    double *sum = (double *)at(s, s->norms) + u;
    float *chunks = (float *)at(s, s->chunks);
    if (s->config.micro_batches > 1) {
        s->dev->layers->sumsq_fp32(s->dev, sum, chunks, (float *)at(s, p->sum), n);
    } else {
        s->dev->layers->sumsq(s->dev, sum, chunks, at(s, p->grads), n);
    }
}

// The global norm is known here, and with it whether and by how much the parameters may move.
static void clip(struct session *s)
{
    const struct session_update *up = s->update;
    struct session_result *r = s->result;
    size_t n = s->config.B * s->config.T * s->config.micro_batches;
    double loss = 0, sum = 0;
    device_copy_out(s->dev, s->host_norms, at(s, s->norms), s->model->units * sizeof(double));
    for (size_t i = 0; i < n; i++) {
        loss += s->host_losses[i];
    }
    for (size_t u = 0; u < s->model->units; u++) {
        sum += s->host_norms[u];
    }
    r->loss = loss / (double)n;
    r->norm = sqrt(sum);
    r->updated =
        (!up->guard || isfinite(r->norm)) && (!up->accept || up->accept(up->ctx, r->loss, r->norm));
    double t = (double)up->step + 1;
    s->adamw = (struct adamw){
        .beta1 = (float)up->beta1,
        .beta2 = (float)up->beta2,
        .one_minus_beta1 = (float)(1 - up->beta1),
        .one_minus_beta2 = (float)(1 - up->beta2),
        .eps = (float)up->eps,
        .scale = (float)(up->clip > 0 && r->norm > up->clip ? up->clip / r->norm : 1),
        .decay = (float)(1 - up->lr * up->weight_decay),
        .step = (float)(up->lr / (1 - pow(up->beta1, t))),
        .v_correction = (float)(1 / sqrt(1 - pow(up->beta2, t))),
    };
}

static void adam(struct session *s, size_t u)
{
    const struct place *p = s->place + u;
    const struct unit *unit = model_unit(s->model, u);
    for (size_t i = 0; i < unit->n_tensors && s->result->updated; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t fp32 = t->offset * sizeof(float), own = t->offset * elem_bytes(s);
        struct adamw a = s->adamw;
        a.decay = t->decay ? a.decay : 1;
        float *m = (float *)at(s, p->m + fp32), *v = (float *)at(s, p->v + fp32);
        float *master = (float *)at(s, p->master + fp32);
        if (s->config.micro_batches > 1) {
            s->dev->layers->adamw_fp32(s->dev, at(s, p->params + own), master, m, v,
                                       (float *)at(s, p->sum + fp32), &a, t->elems);
        } else {
            s->dev->layers->adamw(s->dev, at(s, p->params + own), master, m, v,
                                  at(s, p->grads + own), &a, t->elems);
        }
    }
}

static void run_op(void *ctx, const struct op *op)
{
    struct session *s = ctx;
    const struct unit *unit = model_unit(s->model, op->unit);
    const struct place *p = s->place + op->unit;
    switch (op->kind) {
    case OP_TOKENS_IN:
        tokens_in(s, op->micro);
        break;
    case OP_LOSSES_OUT:
        losses_out(s, op->micro);
        break;
    case OP_ACCUMULATE:
        s->dev->layers->accumulate(s->dev, (float *)at(s, p->sum), at(s, p->grads), op->micro == 0,
                                   unit->params);
        break;
    case OP_NORM:
        norm(s, op->unit);
        break;
    case OP_CLIP:
        clip(s);
        break;
    case OP_ADAM:
        adam(s, op->unit);
        break;
    default: {
        struct unit_args args = args_of(s, op);
        unit->fn[op->kind](s->model, s->dev, &args);
        break;
    }
    }
}

// ---- the public calls ---------------------------------------------------------------------------

void session_step(struct session *s, const int32_t *tokens, const int32_t *targets,
                  const struct session_update *update, struct session_result *result)
{
    s->in_tokens = tokens;
    s->in_targets = targets;
    s->update = update;
    s->result = result;
    graph_run_serial(&s->step, run_op, s);
}

void session_losses(struct session *s, const int32_t *tokens, const int32_t *targets, float *losses)
{
    s->in_tokens = tokens;
    s->in_targets = targets;
    graph_run_serial(&s->loss, run_op, s);
    memcpy(losses, s->host_losses, s->config.B * s->config.T * sizeof *losses);
}

size_t session_decode_limit(const struct session *s)
{
    return s->config.B * s->config.T;
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
    graph_run_serial(&s->decode, run_op, s);
    size_t n = s->model->logits;
    device_copy_out(s->dev, s->host_logits, at(s, s->work), n * elem_bytes(s));
    to_fp32(logits, s->host_logits, s->dev->dtype, n);
}

// Elements moved at a time between a state in 16 bits and fp32 host memory.
#define MOVE ((size_t)4096)

// Offset and dtype of a state of a unit.
static size_t state_at(const struct session *s, enum state state, size_t unit, enum dtype *dtype)
{
    const struct place *p = s->place + unit;
    *dtype = DTYPE_FP32;
    if (state == STATE_PARAMS && !s->config.train) {
        *dtype = s->dev->dtype;
        return p->params;
    }
    return state == STATE_PARAMS ? p->master : state == STATE_M ? p->m : p->v;
}

void session_read(struct session *s, enum state state, size_t unit, size_t first, float *out,
                  size_t n)
{
    enum dtype dtype;
    size_t base = state_at(s, state, unit, &dtype), size = dtype_bytes(dtype);
    for (size_t i = 0; i < n; i += MOVE) {
        char buf[MOVE * sizeof(float)];
        size_t m = n - i < MOVE ? n - i : MOVE;
        device_copy_out(s->dev, buf, at(s, base + (first + i) * size), m * size);
        to_fp32(out + i, buf, dtype, m);
    }
}

static void write_bf16(struct session *s, size_t offset, const float *in, size_t n)
{
    for (size_t i = 0; i < n; i += MOVE) {
        uint16_t buf[MOVE];
        size_t m = n - i < MOVE ? n - i : MOVE;
        for (size_t j = 0; j < m; j++) {
            buf[j] = bf16_round(in[i + j]);
        }
        device_copy_in(s->dev, at(s, offset + i * sizeof *buf), buf, m * sizeof *buf);
    }
}

void session_write(struct session *s, enum state state, size_t unit, size_t first, const float *in,
                   size_t n)
{
    enum dtype dtype;
    size_t base = state_at(s, state, unit, &dtype);
    if (dtype == DTYPE_FP32) {
        device_copy_in(s->dev, at(s, base + first * sizeof *in), in, n * sizeof *in);
    }
    if (state == STATE_PARAMS && s->dev->dtype != DTYPE_FP32) {
        write_bf16(s, s->place[unit].params + first * sizeof(uint16_t), in, n);
    }
}

// Index of the first element that is not finite, or n.
static size_t nonfinite(struct session *s, size_t offset, enum dtype dtype, size_t n)
{
    size_t size = dtype_bytes(dtype);
    for (size_t i = 0; i < n; i += MOVE) {
        char buf[MOVE * sizeof(float)];
        float x[MOVE];
        size_t m = n - i < MOVE ? n - i : MOVE;
        device_copy_out(s->dev, buf, at(s, offset + i * size), m * size);
        to_fp32(x, buf, dtype, m);
        for (size_t j = 0; j < m; j++) {
            if (!isfinite(x[j])) {
                return i + j;
            }
        }
    }
    return n;
}

static bool find_in_unit(struct session *s, size_t u, const char *what, size_t base,
                         enum dtype dtype, char *out, size_t size)
{
    const struct unit *unit = model_unit(s->model, u);
    for (size_t i = 0; i < unit->n_tensors; i++) {
        const struct tensor *t = unit->tensors + i;
        size_t e = nonfinite(s, base + t->offset * dtype_bytes(dtype), dtype, t->elems);
        if (e < t->elems) {
            snprintf(out, size, "%s %s of unit %zu (%s), element %zu", what, t->name, u, unit->name,
                     e);
            return true;
        }
    }
    return false;
}

bool session_find_nonfinite(struct session *s, char *out, size_t size)
{
    enum dtype own = s->dev->dtype;
    bool sums = s->config.micro_batches > 1;
    for (size_t u = 0; u < s->model->units; u++) {
        if (find_in_unit(s, u, "parameter", s->place[u].params, own, out, size)) {
            return true;
        }
    }
    for (size_t u = 0; u < s->model->units; u++) {
        size_t n = s->bytes.boundary / dtype_bytes(own), e = nonfinite(s, s->place[u].x, own, n);
        if (e < n) {
            snprintf(out, size, "output of unit %zu (%s), element %zu", u,
                     model_unit(s->model, u)->name, e);
            return true;
        }
    }
    for (size_t u = s->model->units; s->config.train && u-- > 0;) {
        const struct place *p = s->place + u;
        if (find_in_unit(s, u, "gradient of", sums ? p->sum : p->grads, sums ? DTYPE_FP32 : own,
                         out, size)) {
            return true;
        }
    }
    return false;
}

// ---- opening ------------------------------------------------------------------------------------

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

int session_open(struct session **out, struct device *dev, const struct model *model,
                 const struct session_config *config, struct error *err)
{
    if (check_batch(config, err)) {
        return err->status;
    }
    struct session *s = calloc(1, sizeof *s);
    size_t tokens = config->B * config->T * config->micro_batches;
    if (s) {
        s->place = calloc(model->units, sizeof *s->place);
        s->host_norms = calloc(model->units, sizeof *s->host_norms);
        s->host_losses = calloc(tokens, sizeof *s->host_losses);
        s->host_logits = calloc(model->logits, dtype_bytes(dev->dtype));
    }
    if (!s || !s->place || !s->host_norms || !s->host_losses || !s->host_logits) {
        session_close(s);
        return error_set(err, STATUS_FAIL, "no memory for the session");
    }
    s->dev = dev;
    s->model = model;
    s->config = *config;
    lay_out(s);
    if (config->train) {
        write_training(s);
    }
    write_loss(s);
    write_decode(s);
    if (s->step.failed || s->loss.failed || s->decode.failed) {
        session_close(s);
        return error_set(err, STATUS_FAIL, "no memory for the graphs of a step");
    }
    void *arena;
    if (device_arena(dev, s->arena_bytes, &arena, err)) {
        session_close(s);
        return err->status;
    }
    s->arena = arena;
    *out = s;
    return STATUS_OK;
}

void session_close(struct session *s)
{
    if (!s) {
        return;
    }
    graph_free(&s->step);
    graph_free(&s->loss);
    graph_free(&s->decode);
    free(s->place);
    free(s->host_norms);
    free(s->host_losses);
    free(s->host_logits);
    free(s);
}
