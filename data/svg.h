// svg.h - SVG files that any browser shows, and one of them: loss against tokens of a training run.
//
// A curve holds at most CURVE_BUCKETS buckets of equally many points; when they
// are full, neighbours are merged and the width doubles, so memory and file size are fixed, and the
// same points always give the same picture. Points that are not finite are left out.
#ifndef DATA_SVG_H
#define DATA_SVG_H

#include "data/files.h"

#include <stddef.h>
#include <stdint.h>

// A picture that is being written: white ground, sans-serif text, 14 pixels. The file is there,
// whole, after svg_close; the first error is kept and given back there.
struct svg {
    struct atomic_file file;
    char text[8192];
    size_t used;
    struct error *err;
};

int svg_open(struct svg *svg, const char *path, int width, int height, const char *title,
             struct error *err);
// printf style, at most 1023 bytes.
void svg_put(struct svg *svg, const char *format, ...) __attribute__((format(printf, 2, 3)));
void svg_put_text(struct svg *svg, const char *text); // escaped
int svg_close(struct svg *svg);

// A distance of 1, 2 or 5 times a power of ten that cuts `span` into about `count` parts.
double svg_tick(double span, int count);

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
