// generate.c - feeds tokens to a session one by one and draws the next from its logits.
#include "hete/generate.h"
#include "hete/comm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// A uniform number in [0, 1) for (seed, n): splitmix64 (Steele et al. 2014).
static double uniform(uint64_t seed, uint64_t n)
{
    uint64_t x = seed * 0xd1342543de82ef95u + (n + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

static bool likelier(const float *logits, int32_t a, int32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

// The k likeliest tokens into order, best first, by insertion.
static void select_top(const float *logits, size_t vocab, size_t k, int32_t *order)
{
    size_t n = 0;
    for (size_t t = 0; t < vocab; t++) {
        if (n == k && !likelier(logits, (int32_t)t, order[k - 1])) {
            continue;
        }
        size_t at = n < k ? n++ : k - 1;
        for (; at > 0 && likelier(logits, (int32_t)t, order[at - 1]); at--) {
            order[at] = order[at - 1];
        }
        order[at] = (int32_t)t;
    }
}

int32_t choose_token(const float *logits, size_t vocab, double temperature, size_t top_k, double u,
                     int32_t *order)
{
    size_t n = top_k && top_k < vocab ? top_k : vocab;
    double sum = 0;
    if (n < vocab || temperature <= 0) {
        n = temperature <= 0 ? 1 : n;
        select_top(logits, vocab, n, order);
    } else {
        for (size_t i = 0; i < vocab; i++) {
            order[i] = (int32_t)i;
        }
    }
    if (n == 1) {
        return order[0];
    }
    double max = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        max = fmax(max, logits[order[i]]);
    }
    for (size_t i = 0; i < n; i++) {
        sum += exp((logits[order[i]] - max) / temperature);
    }
    double left = u * sum;
    int32_t token = order[0];
    for (size_t i = 0; i < n && left >= 0; i++) {
        double p = exp((logits[order[i]] - max) / temperature);
        if (p > 0) { // rounding may leave something to tokens that have no chance
            token = order[i];
        }
        left -= p;
    }
    return token;
}

static bool all_finite(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            return false;
        }
    }
    return true;
}

int generate(struct session *s, const struct generate_config *config, const int32_t *prompt,
             size_t prompt_tokens, bool (*emit)(void *ctx, int32_t token), void *ctx,
             struct error *err)
{
    size_t limit = session_decode_limit(s), n = 0, fed = 0;
    limit = limit < config->max_seq ? limit : config->max_seq;
    size_t room = limit > prompt_tokens ? limit : prompt_tokens;
    float *logits = malloc(session_logits(s) * sizeof *logits);
    int32_t *order = malloc(config->vocab * sizeof *order);
    int32_t *text = malloc((room + 1) * sizeof *text);
    int status = STATUS_OK;
    if (!logits || !order || !text) {
        status = error_set(err, STATUS_FAIL, "no memory to generate text");
    } else {
        memcpy(text, prompt, prompt_tokens * sizeof *text);
        n = prompt_tokens;
    }
    for (size_t made = 0; status == STATUS_OK && made < config->tokens; made++) {
        if (n > limit) { // forget the earlier half
            size_t keep = (limit + 1) / 2;
            memmove(text, text + n - keep, keep * sizeof *text);
            n = keep;
            fed = 0;
        }
        for (; fed < n; fed++) {
            session_decode(s, text[fed], fed, logits);
        }
        if (!all_finite(logits, config->vocab)) {
            status = error_set(err, STATUS_FAIL,
                               "the model gives logits that are not finite: its parameters are "
                               "damaged");
            break;
        }
        int32_t token = choose_token(logits, config->vocab, config->temperature, config->top_k,
                                     uniform(config->seed, made), order);
        if (config->comm) { // exp may round in another way elsewhere
            status = comm_broadcast(config->comm, &token, sizeof token, 0, err);
        }
        text[n++] = token;
        if (status || !emit(ctx, token) || token == config->eot) {
            break;
        }
    }
    free(logits);
    free(order);
    free(text);
    return status;
}
