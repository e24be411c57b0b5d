#include "kernels/gpt.h"
#include "kernels/layers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- shape --------------------------------------------------------------------------------------

int gpt_parse(struct gpt_config *config, const char *spec, struct error *err)
{
    // gpt2: layers, channels, heads. gpt3: the table of Brown et al. 2020.
    static const size_t gpt2[][3] = {
        {6, 384, 6}, {12, 768, 12}, {24, 1024, 16}, {36, 1280, 20}, {48, 1600, 25}};
    static const size_t gpt3[][3] = {{6, 384, 6},    {12, 768, 12},  {24, 1024, 16},
                                     {24, 1536, 16}, {24, 2048, 16}, {32, 2560, 32},
                                     {32, 4096, 32}, {40, 5120, 40}, {96, 12288, 96}};
    char kind = 0, tail = 0;
    size_t n = 0;
    const char *text =
        strncmp(spec, "gpt2:", 5) == 0 || strncmp(spec, "gpt3:", 5) == 0 ? spec + 5 : spec;
    bool is_gpt3 = strncmp(spec, "gpt3:", 5) == 0;
    bool parsed = sscanf(text, "%c%6zu%c", &kind, &n, &tail) == 2 && kind == (is_gpt3 ? 'c' : 'd');
    const size_t(*table)[3] = is_gpt3 ? gpt3 : gpt2;
    size_t rows = is_gpt3 ? sizeof gpt3 / sizeof *gpt3 : sizeof gpt2 / sizeof *gpt2;
    for (size_t i = 0; parsed && i < rows; i++) {
        if (table[i][is_gpt3] == n) {
            config->layers = table[i][0];
            config->hidden = table[i][1];
            config->heads = table[i][2];
            config->max_seq = is_gpt3 ? 2048 : 1024;
            return STATUS_OK;
        }
    }
    return error_set(err, STATUS_USAGE,
                     "--model %s: not a model file and not one of d6 d12 d24 d36 d48, gpt2:dN, "
                     "gpt3:cN (N = 384 768 1024 1536 2048 2560 4096 5120 12288); other shapes: "
                     "--layers --hidden --heads",
                     spec);
}

int gpt_check(const struct gpt_config *c, struct error *err)
{
    const struct {
        const char *name;
        size_t value, most;
    } field[] = {{"--layers", c->layers, 1000},
                 {"--hidden", c->hidden, 65536},
                 {"--heads", c->heads, 1024},
                 {"--vocab", c->vocab, (size_t)1 << 24},
                 {"--max-seq", c->max_seq, (size_t)1 << 20},
                 {"--head-rows", c->head_rows, (size_t)1 << 20}};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++) {
        if (field[i].value < 1 || field[i].value > field[i].most) {
            return error_set(err, STATUS_USAGE, "%s %zu: must be from 1 to %zu", field[i].name,
                             field[i].value, field[i].most);
        }
    }
    if (c->hidden % c->heads != 0) {
        return error_set(err, STATUS_USAGE,
                         "--hidden %zu is not a multiple of --heads %zu: each head gets "
                         "hidden/heads channels",
                         c->hidden, c->heads);
    }
    return STATUS_OK;
}

size_t gpt_padded_vocab(const struct gpt_config *c)
{
    return (c->vocab + 127) / 128 * 128;
}

size_t gpt_head_size(const struct gpt_config *c)
{
    return c->hidden / c->heads;
}

size_t gpt_params(const struct gpt_config *c)
{
    size_t C = c->hidden;
    return (gpt_padded_vocab(c) + c->max_seq + 2) * C + c->layers * (12 * C * C + 13 * C);
}

double gpt_flops_per_token(const struct gpt_config *c, size_t T)
{
    return 6.0 * (double)gpt_params(c) + 6.0 * (double)(c->layers * c->hidden) * (double)T;
}

// ---- tensors ------------------------------------------------------------------------------------

enum { WTE, WPE, LNFW, LNFB };
enum { LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, FC2W, FC2B, BLOCK_TENSORS };

static size_t lay_out(struct tensor *t, size_t n)
{
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        t[i].offset = at;
        at += (t[i].elems + TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN;
        t[i].init_elems = t[i].init_elems ? t[i].init_elems : t[i].elems;
    }
    return at;
}

static const struct tensor *embed_tensor(const struct model *m, int t)
{
    return m->embed.tensors + t;
}

static const struct gpt_config *config_of(const struct model *m)
{
    return &((const struct gpt *)m)->config;
}

static const void *param(struct device *dev, const struct unit *unit, const struct unit_args *a,
                         int t)
{
    return (const char *)a->params + unit->tensors[t].offset * dtype_bytes(dev->dtype);
}

static void *grad(struct device *dev, const struct unit *unit, const struct unit_args *a, int t)
{
    return (char *)a->grads + unit->tensors[t].offset * dtype_bytes(dev->dtype);
}

// Hands out consecutive aligned pieces of a buffer.
struct pieces {
    char *at;
    size_t used;
};

static void *piece(struct pieces *p, size_t bytes)
{
    char *start = p->at ? p->at + p->used : NULL;
    p->used += device_round(bytes);
    return start;
}

// ---- block --------------------------------------------------------------------------------------

// What forward keeps: 9C elements per row and a few floats. The outputs of the norms and of the
// GELU are not kept, since backward makes them again while it passes over their inputs anyway.
struct block_kept {
    void *qkv;                            // (B,T,3C)  first: decoding uses it as its cache
    void *att;                            // (B,T,C)
    void *x2;                             // (B,T,C)   after attention and residual
    void *pre;                            // (B,T,4C)  before the GELU
    float *lse;                           // (B,NH,T)
    float *mean1, *rstd1, *mean2, *rstd2; // (B,T)
};

static struct block_kept lay_out_kept(struct pieces *p, const struct gpt_config *c,
                                      enum dtype dtype, size_t N)
{
    size_t row = N * c->hidden * dtype_bytes(dtype), stat = N * sizeof(float);
    struct block_kept k;
    k.qkv = piece(p, 3 * row);
    k.att = piece(p, row);
    k.x2 = piece(p, row);
    k.pre = piece(p, 4 * row);
    k.lse = piece(p, c->heads * stat);
    k.mean1 = piece(p, stat);
    k.rstd1 = piece(p, stat);
    k.mean2 = piece(p, stat);
    k.rstd2 = piece(p, stat);
    return k;
}

struct block_work {
    void *ln;   // (B,T,C)
    void *gelu; // (B,T,4C)
    void *dpre; // (B,T,4C)  and dqkv (B,T,3C)
    void *dln;  // (B,T,C)
};

static struct block_work lay_out_work(struct pieces *p, const struct gpt_config *c,
                                      enum dtype dtype, size_t N)
{
    size_t row = N * c->hidden * dtype_bytes(dtype);
    struct block_work w;
    w.ln = piece(p, row);
    w.gelu = piece(p, 4 * row);
    w.dpre = piece(p, 4 * row);
    w.dln = piece(p, row);
    return w;
}

#define P(t) param(dev, &m->block, a, t)
#define G(t) grad(dev, &m->block, a, t)

// All of it or, for a recomputation, all but the last product: nothing that backward uses comes
// from that one.
static void forward(const struct model *m, struct device *dev, const struct unit_args *a,
                    bool recompute)
{
    const struct gpt_config *c = config_of(m);
    const struct layers *f = dev->layers;
    size_t B = a->B, T = a->T, N = B * T, C = c->hidden;
    struct block_kept k = lay_out_kept(&(struct pieces){.at = a->kept}, c, dev->dtype, N);
    struct block_work w = lay_out_work(&(struct pieces){.at = a->work}, c, dev->dtype, N);

    f->layernorm_forward(dev, w.ln, k.mean1, k.rstd1, a->x, P(LN1W), P(LN1B), N, C);
    f->matmul_forward(dev, k.qkv, w.ln, P(QKVW), P(QKVB), NULL, N, C, 3 * C);
    f->attention_forward(dev, k.att, k.lse, k.qkv, B, T, C, c->heads);
    f->matmul_forward(dev, k.x2, k.att, P(PROJW), P(PROJB), a->x, N, C, C);
    f->layernorm_forward(dev, w.ln, k.mean2, k.rstd2, k.x2, P(LN2W), P(LN2B), N, C);
    f->matmul_gelu_forward(dev, w.gelu, k.pre, w.ln, P(FCW), P(FCB), N, C, 4 * C);
    if (!recompute) {
        f->matmul_forward(dev, a->y, w.gelu, P(FC2W), P(FC2B), k.x2, N, 4 * C, C);
    }
}

static void block_forward(const struct model *m, struct device *dev, const struct unit_args *a)
{
    forward(m, dev, a, false);
}

static void block_recompute(const struct model *m, struct device *dev, const struct unit_args *a)
{
    forward(m, dev, a, true);
}

static void block_backward(const struct model *m, struct device *dev, const struct unit_args *a)
{
    const struct gpt_config *c = config_of(m);
    const struct layers *f = dev->layers;
    size_t B = a->B, T = a->T, N = B * T, C = c->hidden;
    struct block_kept k = lay_out_kept(&(struct pieces){.at = a->kept}, c, dev->dtype, N);
    struct block_work w = lay_out_work(&(struct pieces){.at = a->work}, c, dev->dtype, N);
    void *dqkv = w.dpre, *datt = w.dln; // their lives do not overlap

    f->matmul_gelu_backward_input(dev, w.dpre, w.gelu, k.pre, a->dx, P(FC2W), N, 4 * C, C);
    f->matmul_backward_weight(dev, G(FC2W), G(FC2B), a->dx, w.gelu, N, 4 * C, C);
    f->layernorm_forward(dev, w.ln, k.mean2, k.rstd2, k.x2, P(LN2W), P(LN2B), N, C);
    f->matmul_backward_weight(dev, G(FCW), G(FCB), w.dpre, w.ln, N, C, 4 * C);
    f->matmul_backward_input(dev, w.dln, w.dpre, P(FCW), N, C, 4 * C);
    f->layernorm_backward(dev, a->dx, G(LN2W), G(LN2B), w.dln, a->dx, k.x2, P(LN2W), k.mean2,
                          k.rstd2, N, C);

    f->matmul_backward_weight(dev, G(PROJW), G(PROJB), a->dx, k.att, N, C, C);
    f->matmul_backward_input(dev, datt, a->dx, P(PROJW), N, C, C);
    f->attention_backward(dev, dqkv, datt, k.qkv, k.att, k.lse, B, T, C, c->heads);
    f->layernorm_forward(dev, w.ln, k.mean1, k.rstd1, a->x, P(LN1W), P(LN1B), N, C);
    f->matmul_backward_weight(dev, G(QKVW), G(QKVB), dqkv, w.ln, N, C, 3 * C);
    f->matmul_backward_input(dev, w.dln, dqkv, P(QKVW), N, C, 3 * C);
    f->layernorm_backward(dev, a->dx, G(LN1W), G(LN1B), w.dln, a->dx, a->x, P(LN1W), k.mean1,
                          k.rstd1, N, C);
}

// One position; the rows of qkv before it are the cache.
static void block_decode(const struct model *m, struct device *dev, const struct unit_args *a)
{
    const struct gpt_config *c = config_of(m);
    const struct layers *f = dev->layers;
    size_t C = c->hidden, row = C * dtype_bytes(dev->dtype);
    struct pieces p = {.at = a->work};
    void *ln = piece(&p, row), *att = piece(&p, row), *x2 = piece(&p, row);
    void *pre = piece(&p, 4 * row), *gelu = piece(&p, 4 * row);
    float *stats = piece(&p, 2 * sizeof(float));
    void *qkv = (char *)a->kept + a->pos * 3 * row;

    f->layernorm_forward(dev, ln, stats, stats + 1, a->x, P(LN1W), P(LN1B), 1, C);
    f->matmul_forward(dev, qkv, ln, P(QKVW), P(QKVB), NULL, 1, C, 3 * C);
    f->attention_decode(dev, att, a->kept, a->pos + 1, C, c->heads);
    f->matmul_forward(dev, x2, att, P(PROJW), P(PROJB), a->x, 1, C, C);
    f->layernorm_forward(dev, ln, stats, stats + 1, x2, P(LN2W), P(LN2B), 1, C);
    f->matmul_gelu_forward(dev, gelu, pre, ln, P(FCW), P(FCB), 1, C, 4 * C);
    f->matmul_forward(dev, a->y, gelu, P(FC2W), P(FC2B), x2, 1, 4 * C, C);
}

#undef P
#undef G

// ---- embedding and head -------------------------------------------------------------------------

#define P(t) param(dev, &m->embed, a, t)
#define G(t) grad(dev, &m->embed, a, t)

struct head_work {
    void *ln, *dln;     // (B,T,C)
    float *mean, *rstd; // (B,T)
    void *logits;       // (head_rows,Vp)
};

static size_t head_rows(const struct gpt_config *c, size_t N)
{
    return c->head_rows < N ? c->head_rows : N;
}

static struct head_work lay_out_head(struct pieces *p, const struct gpt_config *c, enum dtype dtype,
                                     size_t N)
{
    size_t e = dtype_bytes(dtype);
    struct head_work w;
    w.logits = piece(p, head_rows(c, N) * gpt_padded_vocab(c) * e); // first: CALL_LOGITS
    w.ln = piece(p, N * c->hidden * e);
    w.dln = piece(p, N * c->hidden * e);
    w.mean = piece(p, N * sizeof(float));
    w.rstd = piece(p, N * sizeof(float));
    return w;
}

// The gradient of wte has two uses, head and embedding: it is summed in fp32 and rounded once.
static float *wte_sum(const struct model *m, struct device *dev, const struct unit_args *a)
{
    return dev->dtype == DTYPE_FP32 ? G(WTE) : a->grads_fp32;
}

static void embed_encode(const struct model *m, struct device *dev, const struct unit_args *a)
{
    dev->layers->encoder_forward(dev, a->y, a->tokens, P(WTE), P(WPE), a->B, a->T,
                                 config_of(m)->hidden);
}

// The head in chunks of rows: final norm, logits, loss and, for training, the gradients.
static void head(const struct model *m, struct device *dev, const struct unit_args *a, float dscale)
{
    const struct gpt_config *c = config_of(m);
    const struct layers *f = dev->layers;
    size_t N = a->B * a->T, C = c->hidden, V = c->vocab, Vp = gpt_padded_vocab(c);
    size_t row = C * dtype_bytes(dev->dtype), chunk = head_rows(c, N);
    struct head_work w = lay_out_head(&(struct pieces){.at = a->work}, c, dev->dtype, N);

    f->layernorm_forward(dev, w.ln, w.mean, w.rstd, a->x, P(LNFW), P(LNFB), N, C);
    for (size_t r = 0; r < N; r += chunk) {
        size_t n = N - r < chunk ? N - r : chunk;
        char *ln = (char *)w.ln + r * row, *dln = (char *)w.dln + r * row;
        f->matmul_forward(dev, w.logits, ln, P(WTE), NULL, NULL, n, C, Vp);
        f->classifier(dev, a->losses + r, w.logits, a->targets + r, dscale, n, V, Vp);
        if (dscale != 0) {
            f->matmul_backward_input(dev, dln, w.logits, P(WTE), n, C, Vp);
            f->matmul_backward_weight_fp32(dev, wte_sum(m, dev, a), w.logits, ln, r > 0, n, C, Vp);
        }
    }
    if (dscale != 0) {
        f->layernorm_backward(dev, a->dx, G(LNFW), G(LNFB), w.dln, NULL, a->x, P(LNFW), w.mean,
                              w.rstd, N, C);
    }
}

static void embed_head(const struct model *m, struct device *dev, const struct unit_args *a)
{
    head(m, dev, a, a->dscale);
}

static void embed_loss(const struct model *m, struct device *dev, const struct unit_args *a)
{
    head(m, dev, a, 0);
}

static void embed_encode_backward(const struct model *m, struct device *dev,
                                  const struct unit_args *a)
{
    const struct gpt_config *c = config_of(m);
    float *sum = wte_sum(m, dev, a);
    dev->layers->encoder_backward(dev, sum, G(WPE), a->dx, a->tokens, a->B, a->T, c->hidden,
                                  c->max_seq);
    if (dev->dtype != DTYPE_FP32) {
        dev->layers->cast(dev, G(WTE), sum, embed_tensor(m, WTE)->elems);
    }
}

static void embed_encode_token(const struct model *m, struct device *dev, const struct unit_args *a)
{
    dev->layers->encoder_decode(dev, a->y, a->token, a->pos, P(WTE), P(WPE), config_of(m)->hidden);
}

static void embed_logits(const struct model *m, struct device *dev, const struct unit_args *a)
{
    const struct gpt_config *c = config_of(m);
    struct head_work w = lay_out_head(&(struct pieces){.at = a->work}, c, dev->dtype, 1);
    dev->layers->layernorm_forward(dev, w.ln, w.mean, w.rstd, a->x, P(LNFW), P(LNFB), 1, c->hidden);
    dev->layers->matmul_forward(dev, w.logits, w.ln, P(WTE), NULL, NULL, 1, c->hidden,
                                gpt_padded_vocab(c));
}

#undef P
#undef G

// ---- the model ----------------------------------------------------------------------------------

static struct unit_bytes gpt_bytes(const struct model *m, enum dtype dtype, size_t B, size_t T)
{
    const struct gpt_config *c = config_of(m);
    struct pieces kept = {0}, work = {0}, head = {0};
    lay_out_kept(&kept, c, dtype, B * T);
    lay_out_work(&work, c, dtype, B * T);
    lay_out_head(&head, c, dtype, B * T);
    size_t decode = 16 * device_round(c->hidden * dtype_bytes(dtype)); // 11C and six roundings
    size_t most = work.used > head.used ? work.used : head.used;
    return (struct unit_bytes){
        .boundary = device_round(B * T * c->hidden * dtype_bytes(dtype)),
        .kept = kept.used,
        .cache = 3 * c->hidden * dtype_bytes(dtype),
        .work = most > decode ? most : decode,
        .grads_fp32 =
            dtype == DTYPE_FP32 ? 0 : device_round(embed_tensor(m, WTE)->elems * sizeof(float)),
    };
}

// Bytes: what norms, residuals, biases, GELU, softmax and embedding read and write beside the
// operands of the products, each tensor once per pass over it.
static struct call_work gpt_work(const struct model *m, enum dtype dtype, enum call call, size_t B,
                                 size_t T)
{
    const struct gpt_config *c = config_of(m);
    double N = (double)(B * T), C = (double)c->hidden, Vp = (double)gpt_padded_vocab(c);
    double element = (double)dtype_bytes(dtype), row = N * C * element, logits = N * Vp * element;
    double products = 24 * N * C * C, attention = 2 * N * (double)T * C; // causal: half of T x T
    double wte = Vp * C, wpe = (double)c->max_seq * C;
    switch (call) {
    case CALL_ENCODE:
        return (struct call_work){0, 3 * row}; // two rows in, their sum out
    case CALL_FORWARD:
        return (struct call_work){products + attention, 10 * row}; // norms 4, residuals 2, GELU 4
    case CALL_RECOMPUTE:
        return (struct call_work){products * 2 / 3 + attention, 9 * row};
    case CALL_HEAD: // norm 2, its gradient 3; logits: read twice, written
        return (struct call_work){6 * N * C * Vp, 5 * row + 3 * logits};
    case CALL_BACKWARD: // norms 4 and their gradients 8, GELU 8, biases 9
        return (struct call_work){2 * (products + attention), 29 * row};
    case CALL_ENCODE_BACKWARD: // rows in, added to an fp32 sum; in 16 bits the sum is rounded
        return (struct call_work){0, 2 * row + N * C * 8 + wpe * element +
                                         (dtype == DTYPE_FP32 ? 0 : wte * (4 + element))};
    case CALL_LOSS:
        return (struct call_work){2 * N * C * Vp, 2 * row + 2 * logits};
    default:
        return (struct call_work){0, 0};
    }
}

void gpt_open(struct gpt *gpt, const struct gpt_config *config)
{
    size_t C = config->hidden, Vp = gpt_padded_vocab(config);
    float std = 0.02f, residual = 0.02f / sqrtf(2.0f * (float)config->layers);
    *gpt = (struct gpt){
        .config = *config,
        .embed_tensors = {[WTE] = {"wte", .elems = Vp * C, .decay = true, .init_std = std,
                                   .init_elems = config->vocab * C},
                          [WPE] = {"wpe", .elems = config->max_seq * C, .decay = true,
                                   .init_std = std},
                          [LNFW] = {"lnfw", .elems = C, .init_value = 1},
                          [LNFB] = {"lnfb", .elems = C}},
        .block_tensors = {[LN1W] = {"ln1w", .elems = C, .init_value = 1},
                          [LN1B] = {"ln1b", .elems = C},
                          [QKVW] = {"qkvw", .elems = 3 * C * C, .decay = true, .init_std = std},
                          [QKVB] = {"qkvb", .elems = 3 * C},
                          [PROJW] = {"attprojw", .elems = C * C, .decay = true,
                                     .init_std = residual},
                          [PROJB] = {"attprojb", .elems = C},
                          [LN2W] = {"ln2w", .elems = C, .init_value = 1},
                          [LN2B] = {"ln2b", .elems = C},
                          [FCW] = {"fcw", .elems = 4 * C * C, .decay = true, .init_std = std},
                          [FCB] = {"fcb", .elems = 4 * C},
                          [FC2W] = {"fcprojw", .elems = 4 * C * C, .decay = true,
                                    .init_std = residual},
                          [FC2B] = {"fcprojb", .elems = C}},
    };
    gpt->model = (struct model){
        .units = 1 + config->layers,
        .embed = {.name = "embedding and head",
                  .tensors = gpt->embed_tensors,
                  .n_tensors = 4,
                  .params = lay_out(gpt->embed_tensors, 4),
                  .fn = {[CALL_ENCODE] = embed_encode,
                         [CALL_HEAD] = embed_head,
                         [CALL_LOSS] = embed_loss,
                         [CALL_ENCODE_BACKWARD] = embed_encode_backward,
                         [CALL_ENCODE_TOKEN] = embed_encode_token,
                         [CALL_LOGITS] = embed_logits}},
        .block = {.name = "block",
                  .tensors = gpt->block_tensors,
                  .n_tensors = BLOCK_TENSORS,
                  .params = lay_out(gpt->block_tensors, BLOCK_TENSORS),
                  .fn = {[CALL_FORWARD] = block_forward,
                         [CALL_RECOMPUTE] = block_recompute,
                         [CALL_BACKWARD] = block_backward,
                         [CALL_DECODE] = block_decode}},
        .logits = Vp,
        .bytes = gpt_bytes,
        .work = gpt_work,
    };
}

size_t gpt_spans(const struct gpt *gpt)
{
    return 4 + BLOCK_TENSORS * gpt->config.layers;
}

struct gpt_span gpt_span(const struct gpt *gpt, size_t i)
{
    size_t L = gpt->config.layers, blocks = BLOCK_TENSORS * L;
    if (i < 2) {
        return (struct gpt_span){0, gpt->embed_tensors + WTE + i};
    }
    if (i < 2 + blocks) {
        return (struct gpt_span){1 + (i - 2) % L, gpt->block_tensors + (i - 2) / L};
    }
    return (struct gpt_span){0, gpt->embed_tensors + LNFW + (i - 2 - blocks)};
}

// ---- initial values -----------------------------------------------------------------------------

static uint64_t mix(uint64_t x) // the finaliser of splitmix64 (Steele et al. 2014)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// A standard normal number for a counter, by Box and Muller.
static float normal(uint64_t key, uint64_t counter)
{
    uint64_t bits = mix(key + (counter + 1) * 0x9e3779b97f4a7c15u);
    double u = ((double)(bits >> 32) + 0.5) * 0x1p-32;
    double v = (double)(bits & 0xffffffffu) * 0x1p-32;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

void gpt_init(const struct gpt *gpt, uint64_t seed, size_t unit, size_t first, float *out, size_t n)
{
    const struct unit *u = model_unit(&gpt->model, unit);
    memset(out, 0, n * sizeof *out);
    for (size_t i = 0; i < u->n_tensors; i++) {
        const struct tensor *t = u->tensors + i;
        uint64_t key = mix(mix(seed) + unit * 64 + i);
        size_t lo = t->offset > first ? t->offset : first;
        size_t hi = t->offset + t->init_elems < first + n ? t->offset + t->init_elems : first + n;
#pragma omp parallel for schedule(static)
        for (size_t e = lo; e < hi; e++) {
            out[e - first] =
                t->init_std > 0 ? t->init_std * normal(key, e - t->offset) : t->init_value;
        }
    }
}
