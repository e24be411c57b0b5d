// svg.h - the picture of a training run: loss against tokens, as an SVG that any browser shows.
//
// Called by log.c. A curve holds at most CURVE_BUCKETS buckets of equally many points; when they
// are full, neighbours are merged and the width doubles, so memory and file size are fixed, and the
// same points always give the same picture. Points that are not finite are left out.
#ifndef DATA_SVG_H
#define DATA_SVG_H

#include "data/error.h"

#include <stddef.h>
#include <stdint.h>

enum { CURVE_BUCKETS = 1024 };

struct curve {
    size_t count;   // buckets in use; all but the last are full
    uint64_t width; // points in a full bucket
    struct {
        uint64_t points;
        double loss_sum, tokens_sum;
    } bucket[CURVE_BUCKETS];
};

void curve_clear(struct curve *c);
void curve_add(struct curve *c, uint64_t tokens, double loss);

// Training raw (faint) and smoothed, validation with its points, axes, legend, and, if floor > 0, a
// dashed line with its label. Written atomically.
int svg_write(const char *path, const struct curve *train, const struct curve *val, double floor,
              const char *floor_label, struct error *err);

#endif
