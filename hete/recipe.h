// recipe.h - how a run moves from step to step: the learning rate, and which updates are skipped.
#ifndef HETE_RECIPE_H
#define HETE_RECIPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum lr_shape { LR_COSINE, LR_LINEAR, LR_CONSTANT, LR_WSD };

struct lr_schedule {
    enum lr_shape shape;
    double lr;       // the peak
    double final;    // fraction of the peak at the end
    uint64_t warmup; // steps of linear rise
    uint64_t steps;  // of the whole run
};

// Learning rate of step s = 0, 1, .. After the rise: cosine and linear fall from the peak to the
// final rate; wsd (warm-up, stable, decay) stays at the peak for 80% of the run and then falls with
// 1 - sqrt (Haegele et al. 2024).
double lr_at(const struct lr_schedule *s, uint64_t step);

// A running window of the last values, to tell how unusual the next one is.
#define OUTLIER_WINDOW 128

struct outlier {
    double value[OUTLIER_WINDOW]; // in a ring
    double count;                 // values seen; a double so that the whole struct saves as numbers
};

// Adds a value and returns its z-score against the window that it now is part of; NaN until the
// window is full. A value that is not finite is not added: +infinity.
double outlier_add(struct outlier *o, double value);

#endif
