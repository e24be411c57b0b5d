// generate.h - sampling from a model, one token at a time, with the session's key-value cache.
#ifndef HETE_GENERATE_H
#define HETE_GENERATE_H

#include "hete/session.h"

struct generate_config {
    size_t vocab;       // tokens that may be chosen
    size_t max_seq;     // positions that the model knows
    int32_t eot;        // generation ends after this token
    size_t tokens;      // at most this many
    double temperature; // 0: the likeliest token
    size_t top_k;       // choose among the k likeliest; 0: among all
    uint64_t seed;
    struct comm *comm; // the session's other ranks, which generate along; NULL: none
};

// Feeds the prompt (at least one token), then chooses tokens and hands each to `emit` as it comes;
// emit returns false to stop. When the cache is full, the later half of the text is fed again and
// generation goes on. STATUS_FAIL: no memory, or logits that are not finite.
int generate(struct session *s, const struct generate_config *config, const int32_t *prompt,
             size_t prompt_tokens, bool (*emit)(void *ctx, int32_t token), void *ctx,
             struct error *err);

// The token that a uniform number u in [0, 1) picks. order: workspace of vocab elements.
int32_t choose_token(const float *logits, size_t vocab, double temperature, size_t top_k, double u,
                     int32_t *order);

#endif
