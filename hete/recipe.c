// recipe.c - formulas, without state beyond the windows of outliers.
#include "hete/recipe.h"

#include <math.h>

double lr_at(const struct lr_schedule *s, uint64_t step)
{
    double low = s->lr * s->final, drop = s->lr - low;
    if (step < s->warmup) {
        return s->lr * ((double)step + 1) / (double)s->warmup;
    }
    double from = s->shape == LR_WSD ? 0.8 * (double)s->steps : (double)s->warmup;
    double span = (double)s->steps - from;
    double done = span > 0 ? ((double)step - from) / span : 1;
    done = fmin(1, fmax(0, done));
    switch (s->shape) {
    case LR_COSINE:
        return low + 0.5 * (1 + cos(M_PI * done)) * drop;
    case LR_LINEAR:
        return s->lr - done * drop;
    case LR_WSD:
        return low + (1 - sqrt(done)) * drop;
    default:
        return s->lr;
    }
}

double outlier_add(struct outlier *o, double value)
{
    if (!isfinite(value)) {
        return INFINITY;
    }
    o->value[(size_t)fmod(o->count, OUTLIER_WINDOW)] = value;
    o->count++;
    if (o->count < OUTLIER_WINDOW) {
        return NAN;
    }
    double sum = 0, squares = 0;
    for (size_t i = 0; i < OUTLIER_WINDOW; i++) {
        sum += o->value[i];
    }
    double mean = sum / OUTLIER_WINDOW;
    for (size_t i = 0; i < OUTLIER_WINDOW; i++) {
        squares += (o->value[i] - mean) * (o->value[i] - mean);
    }
    double deviation = sqrt(squares / OUTLIER_WINDOW);
    return deviation > 0 ? (value - mean) / deviation : 0;
}
