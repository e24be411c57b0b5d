#include "dev/cuda/study.h"
#include "kernels/bf16.h"
#include "kernels/cuda/cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TENSORS 16
#define REPEATS 20

struct study {
    struct device *dev;
    bool small;
    char *arena;
    size_t bytes, used, n;
    uint64_t rng;
    struct study_tensor {
        void *at;
        void *initial, *reference; // on the host; reference: outputs only
        size_t n, elem;
        double tolerance; // < 0: an input
    } tensors[TENSORS];
};

static void *must(void *p, const char *what)
{
    if (!p) {
        fprintf(stderr, "study: %s\n", what);
        exit(1);
    }
    return p;
}

struct study *study_open(enum dtype dtype, int argc, char **argv)
{
    struct study *s = must(calloc(1, sizeof *s), "no memory");
    struct device_config config = {.kind = "cuda", .dtype = dtype, .head_size = 64};
    struct error err;
    void *arena;
    s->small = argc > 1 && strcmp(argv[1], "check") == 0;
    s->bytes = s->small ? (size_t)64 << 20 : (size_t)3 << 30;
    if (device_open(&s->dev, &config, &err) || device_arena(s->dev, s->bytes, &arena, &err)) {
        must(NULL, err.text);
    }
    s->arena = arena;
    printf("%s\n", s->dev->summary);
    return s;
}

bool study_small(const struct study *s)
{
    return s->small;
}

struct device *study_device(struct study *s)
{
    return s->dev;
}

void study_reset(struct study *s)
{
    for (size_t i = 0; i < s->n; i++) {
        free(s->tensors[i].initial);
        free(s->tensors[i].reference);
    }
    s->n = s->used = 0;
}

static void *add(struct study *s, size_t n, size_t elem, double tolerance)
{
    must(s->n < TENSORS && s->used + n * elem <= s->bytes ? s : NULL, "too many tensors");
    struct study_tensor *t = s->tensors + s->n++;
    *t = (struct study_tensor){.at = s->arena + s->used,
                               .initial = must(malloc(n * elem), "no memory"),
                               .n = n,
                               .elem = elem,
                               .tolerance = tolerance};
    s->used += device_round(n * elem);
    memset(t->initial, 0xff, n * elem); // NaN
    return t->initial;
}

static float uniform(struct study *s)
{
    s->rng = s->rng * 6364136223846793005u + 1442695040888963407u;
    return (float)(s->rng >> 40) * 0x1p-23f - 1;
}

static void *finish(struct study *s)
{
    const struct study_tensor *t = s->tensors + s->n - 1;
    device_poke(s->dev, t->at, t->initial, t->n * t->elem);
    return t->at;
}

static size_t elem_of(const struct study *s, bool fp32)
{
    return fp32 ? sizeof(float) : dtype_bytes(s->dev->dtype);
}

void *study_state(struct study *s, size_t n, bool fp32, float range, double tolerance)
{
    size_t elem = elem_of(s, fp32);
    char *initial = add(s, n, elem, tolerance);
    for (size_t i = 0; i < n; i++) {
        float f = range * uniform(s);
        uint16_t h = bf16_round(f);
        memcpy(initial + i * elem, elem == sizeof f ? (void *)&f : (void *)&h, elem);
    }
    return finish(s);
}

void *study_input(struct study *s, size_t n, bool fp32, float range)
{
    return study_state(s, n, fp32, range, -1);
}

void *study_output(struct study *s, size_t n, bool fp32, double tolerance)
{
    add(s, n, elem_of(s, fp32), tolerance);
    return finish(s);
}

int32_t *study_tokens(struct study *s, size_t n, size_t vocab)
{
    int32_t *tokens = add(s, n, sizeof *tokens, -1);
    for (size_t i = 0; i < n; i++) {
        float u = fabsf(uniform(s));
        tokens[i] = (int32_t)(u * u * u * (float)(vocab - 1)); // some are frequent
    }
    return finish(s);
}

static double value(const struct study_tensor *t, const void *from, size_t i)
{
    float f;
    uint16_t h;
    if (t->elem == sizeof f) {
        memcpy(&f, (const char *)from + i * sizeof f, sizeof f);
    } else {
        memcpy(&h, (const char *)from + i * sizeof h, sizeof h);
        f = bf16_load(h);
    }
    return (double)f;
}

// The largest difference from the reference, of the largest element; a NaN is infinitely wrong.
static double difference(const struct study_tensor *t, const void *got)
{
    double largest = 1e-30, worst = 0;
    if (t->tolerance == 0) {
        return memcmp(got, t->reference, t->n * t->elem) ? INFINITY : 0;
    }
    for (size_t i = 0; i < t->n; i++) {
        largest = fmax(largest, fabs(value(t, t->reference, i)));
    }
    for (size_t i = 0; i < t->n; i++) {
        double d = fabs(value(t, got, i) - value(t, t->reference, i)) / largest;
        worst = isnan(d) ? INFINITY : fmax(worst, d);
    }
    return worst;
}

// Runs it once from the initial state. The first one becomes the reference; else prints and
// returns whether it agrees.
static bool check(struct study *s, const struct version *v, unsigned block, bool first)
{
    bool good = true;
    for (size_t i = 0; i < s->n; i++) {
        device_poke(s->dev, s->tensors[i].at, s->tensors[i].initial,
                    s->tensors[i].n * s->tensors[i].elem);
    }
    v->run(s->dev, block);
    for (size_t i = 0; i < s->n; i++) {
        struct study_tensor *t = s->tensors + i;
        if (t->tolerance < 0) {
            continue;
        }
        void *got = must(malloc(t->n * t->elem), "no memory");
        device_peek(s->dev, got, t->at, t->n * t->elem);
        if (first) {
            free(t->reference);
            t->reference = got;
            continue;
        }
        double d = difference(t, got);
        if (d > t->tolerance) {
            good = false;
            printf("  %s, block %u: WRONG: output %zu differs by %.2g, allowed is %.2g\n", v->name,
                   block, i, d, t->tolerance);
        }
        free(got);
    }
    struct error err;
    if (device_status(s->dev, &err)) {
        must(NULL, err.text);
    }
    return good;
}

// Milliseconds of the fastest of REPEATS runs.
static double time_ms(struct study *s, const struct version *v, unsigned block)
{
    cudaEvent_t from, to;
    float best = INFINITY, ms = INFINITY;
    cudaEventCreate(&from);
    cudaEventCreate(&to);
    for (int i = 0; i < REPEATS; i++) {
        cudaEventRecord(from, cuda_stream(s->dev));
        v->run(s->dev, block);
        cudaEventRecord(to, cuda_stream(s->dev));
        cudaEventSynchronize(to);
        cudaEventElapsedTime(&ms, from, to);
        best = fminf(best, ms);
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return (double)best;
}

bool study_compare(struct study *s, const char *shape, const struct version *versions, size_t n,
                   double bytes)
{
    static const unsigned own[] = {1, 0}; // one try
    bool good = true;
    printf("%s\n", shape);
    for (size_t i = 0; i < n; i++) {
        const struct version *v = versions + i;
        for (const unsigned *b = v->blocks[0] ? v->blocks : own; *b; b++) {
            bool right = check(s, v, *b, i == 0 && b == (v->blocks[0] ? v->blocks : own));
            good = good && right;
            if (right && bytes > 0) {
                double ms = time_ms(s, v, *b);
                printf("  %zu %-32s block %4u %9.4f ms %7.0f GB/s\n", i, v->name,
                       v->blocks[0] ? *b : 0, ms, 1e-6 * bytes / ms);
            }
        }
    }
    printf("  %zu versions %s\n", n, good ? "agree" : "DIFFER");
    return good;
}
