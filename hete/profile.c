// Three phases share the arena, for none needs what another one has there:
//
//   calls      params of both units, grads of both, x y dx, kept, work, tokens, losses
//   optimizer  params, grads, master, m, v of `elems` elements; a buffer per direction of copies
//   ranks      a gradient, everybody's version of this rank's piece of it, their sum
//
// The optimizer's arrays are walked through from try to try, so that they come from memory as they
// do in a step, not from a cache; what a unit has beyond their size is extrapolated.
#include "hete/profile.h"
#include "data/files.h"
#include "hete/machine.h"
#include "kernels/clock.h"
#include "kernels/layers.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define ELEMS_MAX     ((size_t)4 << 20)
#define COPY_MIN      ((size_t)64 << 10)
#define COPY_MAX      ((size_t)64 << 20)
#define TINY_COPY     ((size_t)64)
#define SLICES        ((size_t)4) // into which host work is usually cut
#define TRIES_MIN     7
#define TRIES_MAX     63
#define ENOUGH        0.01 // seconds of tries: what is short is tried more often than TRIES_MIN
#define SECONDS_MIN   1e-9 // nothing takes no time
#define LONG          0.1  // seconds of a call that is not repeated
#define ENOUGH_COPIES ((size_t)4)  // before the rate of copies is believed
#define SHARED        ((size_t)64) // numbers that a rank shares in a step: one or so per unit

// Offsets into the device's arena.
struct calls_layout {
    size_t params[2], grads[2], grads_fp32, x, y, dx, kept, work, tokens, targets, losses, end;
};
struct optimizer_layout {
    size_t params, grads, master, m, v, chunks, norm, in, out, end;
};

struct ranks_layout {
    size_t grads, stage, sum, end;
};

struct profile {
    const struct profile_config *config;
    const struct model *model;
    struct device *dev;
    struct device *host; // a plain cpu device that works on host memory
    char *base;
    struct calls_layout calls;
    struct optimizer_layout opt;
    struct ranks_layout among;
    size_t ranks, *piece_first, *piece_n; // of what is exchanged, by rank
    struct error lost;                    // why ranks cannot be reached; its status: STATUS_OK
    size_t elems, copy_bytes, walked;
    bool on_host; // host work is measured: another thread calls the device
    // Host memory: the first four pinned.
    char *params, *grads, *in, *out;
    float *master, *m, *v, *chunks;
};

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t take(size_t *end, size_t bytes)
{
    size_t at = *end;
    *end += device_round(bytes);
    return at;
}

// ---- tries --------------------------------------------------------------------------------------

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, size_t n)
{
    qsort(times, n, sizeof *times, by_size);
    return fmax(times[n / 2], SECONDS_MIN);
}

typedef void work_fn(struct profile *p, size_t arg);

static double once(struct profile *p, work_fn *work, size_t arg)
{
    double start = clock_s();
    work(p, arg);
    if (!p->on_host) {
        device_sync(p->dev);
    }
    return clock_s() - start;
}

// Seconds of one call. What takes long needs no warm-up to be told from noise, and gets none; what
// is short is lost in the time that sleeping threads take to come, and is tried until they are
// awake. A device that queues loads its code when it is first called, which may take longer than
// everything else, and is no part of a step.
static double measure(struct profile *p, work_fn *work, size_t arg)
{
    double times[TRIES_MAX], spent = 0;
    if (p->dev->queues && !p->on_host) {
        once(p, work, arg);
    }
    double first = once(p, work, arg);
    size_t n = 0, tries = first > 0.02 ? 3 : TRIES_MIN;
    if (first > LONG) {
        return first;
    }
    while (n < tries || (n < TRIES_MAX && spent < ENOUGH)) {
        times[n] = once(p, work, arg);
        spent += times[n++];
    }
    return median(times, n);
}

// ---- memory -------------------------------------------------------------------------------------

// Of a unit, as many elements as are worked on at a time.
static size_t elems_of(const struct profile *p, size_t k)
{
    return least(model_unit(p->model, k)->params, p->elems);
}

static void lay_out(struct profile *p, enum dtype dtype)
{
    size_t B = p->config->B, T = p->config->T, e = dtype_bytes(dtype);
    struct unit_bytes bytes = p->model->bytes(p->model, dtype, B, T);
    struct calls_layout *c = &p->calls;
    for (size_t k = 0; k < 2; k++) {
        c->params[k] = take(&c->end, model_unit(p->model, k)->params * e);
        c->grads[k] = take(&c->end, model_unit(p->model, k)->params * e);
    }
    c->grads_fp32 = take(&c->end, bytes.grads_fp32);
    c->x = take(&c->end, bytes.boundary);
    c->y = take(&c->end, bytes.boundary);
    c->dx = take(&c->end, bytes.boundary);
    c->kept = take(&c->end, bytes.kept);
    c->work = take(&c->end, bytes.work);
    c->tokens = take(&c->end, B * T * sizeof(int32_t));
    c->targets = take(&c->end, B * T * sizeof(int32_t));
    c->losses = take(&c->end, B * T * sizeof(float));

    size_t embed = p->model->embed.params, block = p->model->block.params;
    p->elems = least(most(embed, 8 * block), ELEMS_MAX);
    p->copy_bytes = least(most(block * e, COPY_MIN), COPY_MAX);
    struct optimizer_layout *o = &p->opt;
    o->params = take(&o->end, p->elems * e);
    o->grads = take(&o->end, p->elems * e);
    o->m = take(&o->end, p->elems * sizeof(float));
    o->v = take(&o->end, p->elems * sizeof(float));
    o->master = dtype == DTYPE_FP32 ? o->params : take(&o->end, p->elems * sizeof(float));
    o->chunks = take(&o->end, p->elems / SUMSQ_CHUNK * sizeof(float) + sizeof(float));
    o->norm = take(&o->end, sizeof(double));
    o->in = take(&o->end, p->copy_bytes);
    o->out = take(&o->end, p->copy_bytes);

    size_t among = p->ranks > 1 ? elems_of(p, 0) : 0;
    among = p->ranks > 1 ? most(among, elems_of(p, 1)) : 0;
    p->among.grads = take(&p->among.end, among * e);
    p->among.stage = take(&p->among.end, (among + p->ranks * TENSOR_ALIGN) * e);
    p->among.sum = take(&p->among.end, (among / p->ranks + TENSOR_ALIGN) * sizeof(float));
}

static size_t arena_bytes(const struct profile *p)
{
    return most(most(p->calls.end, p->opt.end), p->among.end);
}

static int take_host_memory(struct profile *p, struct error *err)
{
    bool fp32 = p->dev->dtype == DTYPE_FP32;
    size_t n = device_round(p->elems * dtype_bytes(p->dev->dtype)), copies = p->copy_bytes;
    size_t floats = device_round(p->elems * sizeof(float)) / sizeof(float);
    void *pinned, *pageable;
    if (device_host_arena(p->dev, 2 * n + 2 * device_round(copies), true, &pinned, err) ||
        device_host_arena(p->dev, 4 * floats * sizeof(float), false, &pageable, err)) {
        return err->status;
    }
    p->params = pinned;
    p->grads = p->params + n;
    p->in = p->grads + n;
    p->out = p->in + device_round(copies);
    p->m = pageable;
    p->v = p->m + floats;
    p->master = fp32 ? (float *)p->params : p->v + floats;
    p->chunks = p->v + 2 * floats;
    return STATUS_OK;
}

// ---- contents -----------------------------------------------------------------------------------

enum { PIECE = 16384 };

// n elements that vary around `value` by `deviation`, in the dtype given.
static void make_values(void *out, enum dtype dtype, float value, float deviation, size_t n)
{
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        float x = value + deviation * 3.4641016f * ((float)(state >> 8) * 0x1p-24f - 0.5f);
        if (dtype == DTYPE_FP32) {
            ((float *)out)[i] = x;
        } else {
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            ((uint16_t *)out)[i] = (uint16_t)(bits >> 16); // bf16, truncated
        }
    }
}

// Values as they are in training: zeros and denormal numbers take another time. `out` is host
// memory, or NULL: `offset` of the device's arena.
static void fill(struct profile *p, void *out, size_t offset, enum dtype dtype, float value,
                 float deviation, size_t n)
{
    static _Thread_local float piece[PIECE];
    size_t e = dtype_bytes(dtype);
    make_values(piece, dtype, value, deviation, PIECE);
    for (size_t i = 0; i < n; i += PIECE) {
        size_t bytes = least(n - i, PIECE) * e;
        if (out) {
            memcpy((char *)out + i * e, piece, bytes);
        } else {
            device_poke(p->dev, p->base + offset + i * e, piece, bytes);
        }
    }
}

static void fill_tokens(struct profile *p, size_t offset, size_t n, size_t vocab, uint32_t *state)
{
    static _Thread_local int32_t piece[PIECE];
    for (size_t i = 0; i < n; i += PIECE) {
        size_t m = least(n - i, PIECE);
        for (size_t j = 0; j < m; j++) {
            *state = *state * 1664525u + 1013904223u;
            piece[j] = (int32_t)((*state >> 8) % vocab);
        }
        device_poke(p->dev, p->base + offset + i * sizeof *piece, piece, m * sizeof *piece);
    }
}

static void fill_for_calls(struct profile *p)
{
    enum dtype dtype = p->dev->dtype;
    size_t n = p->config->B * p->config->T;
    device_fill(p->dev, p->base, 0, p->calls.end); // no page is touched for the first time later
    for (size_t k = 0; k < 2; k++) {
        const struct unit *unit = model_unit(p->model, k);
        for (size_t i = 0; i < unit->n_tensors; i++) {
            const struct tensor *t = &unit->tensors[i];
            fill(p, NULL, p->calls.params[k] + t->offset * dtype_bytes(dtype), dtype, t->init_value,
                 t->init_std, t->elems);
        }
    }
    // Tokens: at least Vp - 127 of Vp are real ones.
    size_t vocab = p->model->logits > 128 ? p->model->logits - 127 : 1;
    uint32_t state = 7;
    fill_tokens(p, p->calls.tokens, n, vocab, &state);
    fill_tokens(p, p->calls.targets, n, vocab, &state);
}

static void fill_for_optimizer(struct profile *p)
{
    enum dtype dtype = p->dev->dtype;
    const struct optimizer_layout *o = &p->opt;
    size_t n = p->elems;
    device_fill(p->dev, p->base, 0, o->end);
    device_sync(p->dev);
    memset(p->in, 1, p->copy_bytes);
    memset(p->out, 1, p->copy_bytes);
    const struct {
        void *host;
        size_t device;
        enum dtype dtype;
        float value, deviation;
    } array[] = {{p->params, o->params, dtype, 0, 0.02f},
                 {p->grads, o->grads, dtype, 0, 0.001f},
                 {p->m, o->m, DTYPE_FP32, 0, 0.001f},
                 {p->v, o->v, DTYPE_FP32, 1e-6f, 1e-7f},
                 {p->master, o->master, DTYPE_FP32, 0, 0.02f}};
    for (size_t i = 0; i < sizeof array / sizeof *array; i++) {
        fill(p, array[i].host, 0, array[i].dtype, array[i].value, array[i].deviation, n);
        fill(p, NULL, array[i].device, array[i].dtype, array[i].value, array[i].deviation, n);
    }
}

// ---- the model's calls --------------------------------------------------------------------------

static void *lane(struct profile *p, size_t offset)
{
    return p->base + p->dev->lane_offset + offset;
}

static size_t unit_of(enum call call)
{
    return call == CALL_FORWARD || call == CALL_RECOMPUTE || call == CALL_BACKWARD ||
           call == CALL_DECODE;
}

static void run_call(struct profile *p, size_t call)
{
    size_t k = unit_of(call);
    const struct calls_layout *c = &p->calls;
    struct unit_args a = {
        .params = lane(p, c->params[k]),
        .grads = lane(p, c->grads[k]),
        .grads_fp32 = lane(p, c->grads_fp32),
        .x = lane(p, call == CALL_HEAD || call == CALL_LOSS ? c->y : c->x),
        .y = lane(p, call == CALL_ENCODE ? c->x : c->y),
        .dx = lane(p, c->dx),
        .kept = lane(p, c->kept),
        .work = lane(p, c->work),
        .tokens = lane(p, c->tokens),
        .targets = lane(p, c->targets),
        .losses = lane(p, c->losses),
        .B = p->config->B,
        .T = p->config->T,
        .dscale = 1.0f / (float)(p->config->B * p->config->T),
        .pos = p->config->T / 2, // of a token that is decoded
    };
    model_unit(p->model, k)->fn[call](p->model, p->dev, &a);
}

static double flops(const struct profile *p, enum call call)
{
    const struct profile_config *c = p->config;
    return p->model->work(p->model, p->dev->dtype, call, c->B, c->T).flops;
}

static void measure_calls(struct profile *p, struct costs *costs)
{
    // Each finds what the ones before left; tokens come last, since they overwrite what is kept.
    static const enum call calls[CALLS] = {
        CALL_ENCODE,   CALL_FORWARD,         CALL_RECOMPUTE,    CALL_HEAD,   CALL_LOSS,
        CALL_BACKWARD, CALL_ENCODE_BACKWARD, CALL_ENCODE_TOKEN, CALL_DECODE, CALL_LOGITS};
    fill_for_calls(p);
    for (size_t i = 0; i < CALLS; i++) {
        double head = costs->call[CALL_HEAD][0];
        if (calls[i] == CALL_LOSS && head > LONG) {
            // A part of what the head does: not worth the time.
            costs->call[CALL_LOSS][0] = head * flops(p, CALL_LOSS) / flops(p, CALL_HEAD);
            continue;
        }
        costs->call[calls[i]][unit_of(calls[i])] = measure(p, run_call, calls[i]);
    }
}

// ---- the optimizer on the device ----------------------------------------------------------------

// Where the next n elements of the optimizer's arrays begin; n is at most elems.
static size_t walk(struct profile *p, size_t n)
{
    size_t at = p->walked + n <= p->elems ? p->walked : 0;
    p->walked = at + (n + SUMSQ_CHUNK - 1) / SUMSQ_CHUNK * SUMSQ_CHUNK;
    return at;
}

static const struct adamw adam = {.beta1 = 0.9f,
                                  .beta2 = 0.95f,
                                  .one_minus_beta1 = 0.1f,
                                  .one_minus_beta2 = 0.05f,
                                  .eps = 1e-8f,
                                  .scale = 1,
                                  .decay = 1,
                                  .step = 1e-6f,
                                  .v_correction = 1};

// By tensors, as a step does it.
static void run_adam(struct profile *p, size_t k)
{
    const struct unit *unit = model_unit(p->model, k);
    const struct optimizer_layout *o = &p->opt;
    size_t n = elems_of(p, k), first = walk(p, n), e = dtype_bytes(p->dev->dtype);
    for (size_t i = 0; i < unit->n_tensors && unit->tensors[i].offset < n; i++) {
        const struct tensor *t = &unit->tensors[i];
        size_t at = first + t->offset, fp32 = at * sizeof(float);
        p->dev->layers->adamw(p->dev, lane(p, o->params + at * e), lane(p, o->master + fp32),
                              lane(p, o->m + fp32), lane(p, o->v + fp32),
                              lane(p, o->grads + at * e), &adam, least(t->elems, n - t->offset));
    }
}

static void run_accumulate(struct profile *p, size_t k)
{
    size_t n = elems_of(p, k), at = walk(p, n);
    p->dev->layers->accumulate(p->dev, lane(p, p->opt.m + at * sizeof(float)),
                               lane(p, p->opt.grads + at * dtype_bytes(p->dev->dtype)), false, n);
}

static void run_norm(struct profile *p, size_t k)
{
    size_t n = elems_of(p, k), at = walk(p, n);
    p->dev->layers->sumsq(p->dev, lane(p, p->opt.norm), lane(p, p->opt.chunks),
                          lane(p, p->opt.grads + at * dtype_bytes(p->dev->dtype)), n);
}

// What the global norm costs the compute lane: the host sees what was computed, and answers.
static void run_clip(struct profile *p, size_t unused)
{
    double sums[32];
    (void)unused;
    device_peek(p->dev, sums, p->base + p->opt.norm, sizeof(double));
    device_poke(p->dev, p->base + p->opt.norm, sums, sizeof(double));
}

static void measure_device_optimizer(struct profile *p, struct costs *costs)
{
    for (size_t k = 0; k < 2; k++) {
        double whole = (double)model_unit(p->model, k)->params / (double)elems_of(p, k);
        costs->adam[k] = measure(p, run_adam, k) * whole;
        costs->accumulate[k] = measure(p, run_accumulate, k) * whole;
        costs->norm[k] = measure(p, run_norm, k) * whole;
    }
    costs->clip = measure(p, run_clip, 0);
}

// ---- copies -------------------------------------------------------------------------------------

// A thread per direction copies again and again until it is told to stop.
struct copier {
    struct profile *p;
    bool out;
    atomic_bool *stop;
    atomic_size_t copies; // that are done
    double times[TRIES_MAX];
    pthread_t thread;
};

static void run_copy_in(struct profile *p, size_t bytes)
{
    device_copy_in(p->dev, p->base + p->opt.in, p->in, bytes);
}

static void run_copy_out(struct profile *p, size_t bytes)
{
    device_copy_out(p->dev, p->out, p->base + p->opt.out, bytes);
}

static void *run_copier(void *arg)
{
    struct copier *c = arg;
    work_fn *copy = c->out ? run_copy_out : run_copy_in;
    while (!atomic_load(c->stop)) {
        size_t n = atomic_load(&c->copies);
        c->times[n % TRIES_MAX] = once(c->p, copy, c->p->copy_bytes);
        atomic_store(&c->copies, n + 1);
    }
    return NULL;
}

// Runs `work` while both directions copy; times[d]: seconds of a copy meanwhile (in, out).
static int while_copying(struct profile *p, void (*work)(void *ctx), void *ctx, double times[2],
                         struct error *err)
{
    atomic_bool stop = false;
    struct copier copier[2];
    size_t started = 0;
    for (; started < 2; started++) {
        copier[started] = (struct copier){.p = p, .out = started == 1, .stop = &stop};
        if (pthread_create(&copier[started].thread, NULL, run_copier, &copier[started])) {
            break;
        }
    }
    for (size_t d = 0; started == 2 && d < 2; d++) {
        while (atomic_load(&copier[d].copies) < ENOUGH_COPIES) {
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
    }
    if (started == 2 && work) {
        work(ctx);
    }
    atomic_store(&stop, true);
    for (size_t d = 0; d < started; d++) {
        pthread_join(copier[d].thread, NULL);
        times[d] = median(copier[d].times, least(atomic_load(&copier[d].copies), TRIES_MAX));
    }
    return started == 2 ? STATUS_OK : error_set(err, STATUS_FAIL, "no thread for copies");
}

// A device that queues is called by this thread alone: it copies, and another one works.
struct worker {
    void (*work)(void *ctx);
    void *ctx;
    atomic_bool done;
    pthread_t thread;
};

static void *run_worker(void *arg)
{
    struct worker *w = arg;
    w->work(w->ctx);
    atomic_store(&w->done, true);
    return NULL;
}

// Keeps a copy of this direction under way until `stop`, and notes how long the last one took.
// False: none is.
static bool keep_copying(struct copier *c, double *since, bool *queued, bool stop)
{
    struct device *dev = c->p->dev;
    size_t n = c->copies;
    if (*queued && device_passed(dev, c->out)) {
        double end = device_passed_s(dev, c->out);
        c->times[n % TRIES_MAX] = fmax(end - *since, SECONDS_MIN);
        c->copies = n + 1;
        *since = end;
        *queued = false;
    }
    if (!*queued && !stop) {
        (c->out ? run_copy_out : run_copy_in)(c->p, c->p->copy_bytes);
        device_end(dev, c->out ? DEVICE_COPY_OUT : DEVICE_COPY_IN, c->out);
        *queued = true;
    }
    return *queued;
}

static int while_copying_queued(struct profile *p, void (*work)(void *ctx), void *ctx,
                                double times[2], struct error *err)
{
    struct copier copier[2] = {{.p = p}, {.p = p, .out = true}};
    struct worker worker = {.work = work, .ctx = ctx};
    double since[2] = {clock_s(), clock_s()};
    bool queued[2] = {false, false}, stop = false, busy = true;
    if (device_marks(p->dev, 2, err)) {
        return err->status;
    }
    if (work && pthread_create(&worker.thread, NULL, run_worker, &worker)) {
        return error_set(err, STATUS_FAIL, "no thread to measure work on the host");
    }
    while (busy && device_status(p->dev, err) == STATUS_OK) {
        bool enough = copier[0].copies >= ENOUGH_COPIES && copier[1].copies >= ENOUGH_COPIES;
        stop = enough && (!work || atomic_load(&worker.done));
        busy = false;
        for (size_t d = 0; d < 2; d++) {
            busy |= keep_copying(copier + d, since + d, queued + d, stop);
        }
    }
    if (work) {
        pthread_join(worker.thread, NULL);
    }
    for (size_t d = 0; d < 2 && !busy; d++) {
        times[d] = median(copier[d].times, least(copier[d].copies, TRIES_MAX));
    }
    return device_status(p->dev, err);
}

static int during_copies(struct profile *p, void (*work)(void *ctx), void *ctx, double times[2],
                         struct error *err)
{
    return (p->dev->queues ? while_copying_queued : while_copying)(p, work, ctx, times, err);
}

static double rate(const struct profile *p, double seconds, double latency)
{
    return (double)p->copy_bytes / fmax(seconds - latency, 0.1 * seconds);
}

// A slow link gets smaller copies: some 30 ms each.
static void choose_copy_bytes(struct profile *p, double latency)
{
    size_t all = p->copy_bytes;
    p->copy_bytes = COPY_MIN;
    double in = once(p, run_copy_in, COPY_MIN), out = once(p, run_copy_out, COPY_MIN);
    double bytes = 0.03 * rate(p, fmax(in, out), latency);
    p->copy_bytes = bytes < (double)all ? most((size_t)bytes, COPY_MIN) : all;
}

static int measure_link(struct profile *p, struct costs *costs, struct error *err)
{
    struct device_link *link = &costs->link;
    double both[2];
    double latency = fmin(measure(p, run_copy_in, TINY_COPY), measure(p, run_copy_out, TINY_COPY));
    link->latency_s = latency;
    choose_copy_bytes(p, latency);
    link->in = rate(p, measure(p, run_copy_in, p->copy_bytes), latency);
    link->out = rate(p, measure(p, run_copy_out, p->copy_bytes), latency);
    if (during_copies(p, NULL, NULL, both, err)) {
        return err->status;
    }
    link->in_duplex = fmin(rate(p, both[0], latency), link->in);
    link->out_duplex = fmin(rate(p, both[1], latency), link->out);
    return STATUS_OK;
}

// ---- work on the host ---------------------------------------------------------------------------

static void run_host_adam(struct profile *p, size_t n)
{
    size_t at = walk(p, n), e = dtype_bytes(p->host->dtype);
    p->host->layers->adamw(p->host, p->params + at * e, p->master + at, p->m + at, p->v + at,
                           p->grads + at * e, &adam, n);
}

static void run_host_speculate(struct profile *p, size_t n)
{
    size_t to = walk(p, n), from = walk(p, n), e = dtype_bytes(p->host->dtype);
    p->host->layers->adamw_apart(p->host, p->params + to * e,
                                 &(struct adamw_state){p->master + to, p->m + to, p->v + to},
                                 &(struct adamw_state){p->master + from, p->m + from, p->v + from},
                                 p->grads + to * e, &adam, n);
}

static void run_host_accumulate(struct profile *p, size_t n)
{
    size_t at = walk(p, n);
    p->host->layers->accumulate(p->host, p->m + at, p->grads + at * dtype_bytes(p->host->dtype),
                                false, n);
}

static void run_host_norm(struct profile *p, size_t n)
{
    double sum;
    p->host->layers->sumsq_fp32(p->host, &sum, p->chunks, p->m + walk(p, n), n);
}

struct host_work {
    struct profile *p;
    struct costs *costs;
};

static void work_on_host(void *ctx)
{
    struct host_work *w = ctx;
    w->p->on_host = true;
    size_t block = w->p->model->block.params;
    size_t slice = (block / SLICES / SUMSQ_CHUNK + 1) * SUMSQ_CHUNK;
    slice = least(slice, w->p->elems);
    w->costs->host_adam = measure(w->p, run_host_adam, slice) / (double)slice;
    w->costs->host_speculate = measure(w->p, run_host_speculate, slice) / (double)slice;
    w->costs->host_accumulate = measure(w->p, run_host_accumulate, slice) / (double)slice;
    w->costs->host_norm = measure(w->p, run_host_norm, slice) / (double)slice;
    w->p->on_host = false;
}

// ---- other ranks --------------------------------------------------------------------------------

// Cuts n elements into pieces as a step does (step_piece).
static struct comm_pieces cut(struct profile *p, size_t n)
{
    size_t groups = n / TENSOR_ALIGN;
    for (size_t i = 0; i < p->ranks; i++) {
        size_t begin = groups * i / p->ranks, end = groups * (i + 1) / p->ranks;
        p->piece_first[i] = begin * TENSOR_ALIGN;
        p->piece_n[i] = (end - begin) * TENSOR_ALIGN;
    }
    return (struct comm_pieces){dtype_bytes(p->dev->dtype), p->piece_first, p->piece_n};
}

// What an operation of the comm lane does (operate.c).
static void run_scatter(struct profile *p, size_t k)
{
    const struct layers *f = p->dev->layers;
    struct comm_pieces pieces = cut(p, elems_of(p, k));
    size_t rank = (size_t)comm_rank(p->config->comm), n = pieces.n[rank];
    char *grads = lane(p, p->among.grads), *stage = lane(p, p->among.stage);
    float *sum = lane(p, p->among.sum);
    bool summed = p->config->fast_reduce;
    if (p->lost.status ||
        (summed ? comm_reduce : comm_exchange)(p->config->comm, stage, grads, &pieces, &p->lost)) {
        return;
    }
    for (size_t r = 0; r < (summed ? 1 : p->ranks) && n; r++) {
        f->accumulate(p->dev, sum, stage + r * n * pieces.element, r == 0, n);
    }
    if (n) {
        f->cast(p->dev, grads + pieces.first[rank] * pieces.element, sum, n);
    }
}

static void run_gather(struct profile *p, size_t k)
{
    struct comm_pieces pieces = cut(p, elems_of(p, k));
    size_t rank = (size_t)comm_rank(p->config->comm);
    char *grads = lane(p, p->among.grads);
    if (!p->lost.status) {
        comm_gather(p->config->comm, grads, grads + pieces.first[rank] * pieces.element, &pieces,
                    &p->lost);
    }
}

static void run_share(struct profile *p, size_t n)
{
    double *all = (double *)p->in;
    if (!p->lost.status) {
        comm_share(p->config->comm, all + n * (size_t)comm_rank(p->config->comm), all,
                   n * sizeof *all, &p->lost);
    }
}

// The largest of the ranks' numbers, each of n; of rates, which stand at `rate`, the least.
static int agree(struct profile *p, double *x, size_t n, const bool *rate, struct error *err)
{
    double *all = malloc(p->ranks * n * sizeof *all);
    if (!all) {
        return error_set(err, STATUS_FAIL, "no memory for what %zu ranks have measured", p->ranks);
    }
    int status = comm_all_gather(p->config->comm, x, all, n * sizeof *x, err);
    for (size_t i = 0; status == STATUS_OK && i < p->ranks * n; i++) {
        double *agreed = x + i % n;
        *agreed = rate && rate[i % n] ? fmin(*agreed, all[i]) : fmax(*agreed, all[i]);
    }
    free(all);
    return status;
}

static double once_among(struct profile *p, work_fn *work, size_t arg)
{
    comm_waits(p->config->comm, true);
    double s = once(p, work, arg);
    comm_waits(p->config->comm, false);
    return s;
}

// As measure(), but all ranks try equally often.
static double measure_among(struct profile *p, work_fn *work, size_t arg)
{
    double times[TRIES_MAX];
    double first = (once_among(p, work, arg), once_among(p, work, arg));
    if (p->lost.status || agree(p, &first, 1, NULL, &p->lost) || first > LONG) {
        return first;
    }
    size_t n = (size_t)fmin(fmax(ENOUGH / fmax(first, SECONDS_MIN), TRIES_MIN), TRIES_MAX);
    for (size_t i = 0; i < n; i++) {
        times[i] = once_among(p, work, arg);
    }
    return median(times, n);
}

static int measure_ranks(struct profile *p, struct costs *costs, struct error *err)
{
    size_t shared = least(SHARED, COPY_MIN / p->ranks / sizeof(double));
    size_t n = most(elems_of(p, 0), elems_of(p, 1));
    if (p->ranks == 1) {
        return STATUS_OK;
    }
    fill(p, NULL, p->among.grads, p->dev->dtype, 0, 0.001f, n);
    device_begin(p->dev, DEVICE_COMM, "profile");
    comm_doing(p->config->comm, COMM_LANE, "measuring what the ranks exchange");
    for (size_t k = 0; k < 2; k++) {
        double whole = (double)model_unit(p->model, k)->params / (double)elems_of(p, k);
        costs->scatter[k] = measure_among(p, run_scatter, k) * whole;
        costs->gather[k] = measure_among(p, run_gather, k) * whole;
    }
    costs->share = measure_among(p, run_share, shared);
    comm_doing(p->config->comm, COMM_LANE, "");
    device_begin(p->dev, DEVICE_COMPUTE, "profile");
    *err = p->lost;
    return err->status;
}

// ---- all of it ----------------------------------------------------------------------------------

// Until all ranks are here: what they measure then they measure at the same time.
static int together(const struct profile *p, struct error *err)
{
    return p->ranks > 1 ? comm_barrier(p->config->comm, err) : STATUS_OK;
}

static int measure_all(struct profile *p, struct costs *costs, struct error *err)
{
    void *base;
    double unused[2];
    struct host_work work = {p, costs};
    if (device_arena(p->dev, arena_bytes(p), &base, err) || take_host_memory(p, err) ||
        together(p, err)) {
        return err->status;
    }
    p->base = base;
    measure_calls(p, costs);
    fill_for_optimizer(p);
    if (together(p, err)) {
        return err->status;
    }
    measure_device_optimizer(p, costs);
    costs->peak_flops = device_matmul_rate(p->dev, 1024);
    if (together(p, err) || measure_link(p, costs, err) || together(p, err) ||
        during_copies(p, work_on_host, &work, unused, err) || together(p, err)) {
        return err->status;
    }
    return measure_ranks(p, costs, err);
}

// Everybody counts with the slowest rank.
static int agree_on_costs(struct profile *p, struct costs *costs, struct error *err)
{
    enum { NUMBERS = sizeof *costs / sizeof(double) };
    bool rate[NUMBERS] = {0};
    const double *rates[] = {&costs->link.in, &costs->link.out, &costs->link.in_duplex,
                             &costs->link.out_duplex, &costs->peak_flops};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
        rate[rates[i] - (const double *)costs] = true;
    }
    return p->ranks > 1 ? agree(p, (double *)costs, NUMBERS, rate, err) : STATUS_OK;
}

// Everything that times depend on, in words; its hash is the cache's name.
static void cache_path(const struct profile *p, char path[PATH_MAX], char words[512])
{
    const struct profile_config *c = p->config;
    const struct device_link *l = &c->device.link;
    char key[2048];
    snprintf(words, 512, "%s, %zu x %zu tokens, %s, on %s; %d threads on the host", c->identity,
             c->B, c->T, p->dev->dtype == DTYPE_FP32 ? "fp32" : "bf16", p->dev->summary,
             p->host->threads);
    int n = snprintf(key, sizeof key, "%s|%.400s|%zu|%zu|%a %a %a %a %a", words, c->identity,
                     p->model->embed.params, p->model->block.params, l->latency_s, l->in, l->out,
                     l->in_duplex, l->out_duplex);
    if (p->ranks > 1) {
        n += snprintf(key + n, sizeof key - (size_t)n, "|%zu ranks, %d here%s", p->ranks,
                      comm_local_ranks(c->comm), c->fast_reduce ? ", fast" : "");
    }
    snprintf(path, PATH_MAX, "%s/profile-%016llx", c->cache,
             (unsigned long long)XXH3_64bits(key, least((size_t)n, sizeof key - 1)));
}

// Costs from the cache, if all ranks have some there. path: "" on a rank that has no cache.
static int read_cache(struct profile *p, struct costs *out, const char *path, bool *cached,
                      struct error *err)
{
    struct error ignored;
    double missing = !path[0] || costs_read(out, path, &ignored) != STATUS_OK;
    int status = p->ranks > 1 ? agree(p, &missing, 1, NULL, err) : STATUS_OK;
    *cached = status == STATUS_OK && missing == 0;
    return status || !*cached ? status : agree_on_costs(p, out, err);
}

static int cached_or_measured(struct profile *p, struct costs *out, bool *cached, struct error *err)
{
    char path[PATH_MAX] = "", words[512];
    const char *cache = p->config->cache;
    struct error ignored;
    if (cache) {
        cache_path(p, path, words);
    }
    if (read_cache(p, out, path, cached, err) || *cached) {
        return *cached ? STATUS_OK : err->status;
    }
    *out = (struct costs){0};
    if (measure_all(p, out, err) || agree_on_costs(p, out, err)) {
        return err->status;
    }
    bool writes = cache && (p->ranks == 1 || comm_local_rank(p->config->comm) == 0);
    if (writes && dir_make(cache, &ignored) == STATUS_OK) {
        costs_write(out, path, words, &ignored);
    }
    return STATUS_OK;
}

static int profile_devices(struct profile *p, struct costs *out, bool *cached, struct error *err)
{
    struct device_config device = p->config->device, host = p->config->device;
    lay_out(p, device.dtype);
    if (device.memory) {
        device.memory = arena_bytes(p);
    }
    host.kind = "cpu";
    host.threads = p->config->host_threads;
    host.memory = 0;
    if (device_open(&p->dev, &device, err)) {
        return err->status;
    }
    int status = device_open(&p->host, &host, err);
    if (p->ranks > 1) {
        comm_use_device(p->config->comm, p->dev);
        comm_doing(p->config->comm, COMM_MAIN, "measuring");
    }
    status = status ? status : cached_or_measured(p, out, cached, err);
    if (status && p->ranks > 1) {
        return status; // what was begun may never end: it is left as it is
    }
    if (p->ranks > 1) {
        comm_use_device(p->config->comm, NULL);
        comm_doing(p->config->comm, COMM_MAIN, "");
    }
    if (p->host) {
        device_close(p->host);
    }
    device_close(p->dev);
    return status;
}

int profile_measure(struct costs *out, const struct profile_config *config, bool *cached,
                    struct error *err)
{
    size_t ranks = config->comm ? (size_t)comm_ranks(config->comm) : 1;
    size_t *pieces = calloc(2 * ranks, sizeof *pieces);
    struct profile p = {.config = config,
                        .model = config->model,
                        .ranks = ranks,
                        .piece_first = pieces,
                        .piece_n = pieces + ranks};
    *out = (struct costs){0};
    *cached = false;
    int status = pieces ? together(&p, err) // fails where a rank is gone already
                        : error_set(err, STATUS_FAIL, "no memory for %zu ranks", ranks);
    status = status ? status : profile_devices(&p, out, cached, err);
    free(pieces);
    if (status && ranks > 1) {
        comm_abort(config->comm, err->text); // the others wait for this one to measure
    }
    return status;
}
