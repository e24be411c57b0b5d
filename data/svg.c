#include "data/svg.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// ---- any picture --------------------------------------------------------------------------------

static void flush(struct svg *svg)
{
    if (svg->file.fd >= 0) {
        atomic_write(&svg->file, svg->text, svg->used, svg->err); // closes the file when it fails
    }
    svg->used = 0;
}

void svg_put(struct svg *svg, const char *format, ...)
{
    char piece[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    size_t length = (size_t)n < sizeof piece ? (size_t)n : sizeof piece - 1;
    if (svg->used + length > sizeof svg->text) {
        flush(svg);
    }
    memcpy(svg->text + svg->used, piece, length);
    svg->used += length;
}

void svg_put_text(struct svg *svg, const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '<':
            svg_put(svg, "&lt;");
            break;
        case '&':
            svg_put(svg, "&amp;");
            break;
        default:
            // XML has no way to say most control characters.
            svg_put(svg, "%c", (unsigned char)*text < ' ' ? ' ' : *text);
        }
    }
}

int svg_open(struct svg *svg, const char *path, int width, int height, const char *title,
             struct error *err)
{
    svg->used = 0;
    svg->err = err;
    if (atomic_open(&svg->file, path, err)) {
        return err->status;
    }
    svg_put(svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\" font-family=\"sans-serif\" font-size=\"14\">\n<title>",
            width, height, width, height);
    svg_put_text(svg, title);
    svg_put(svg, "</title>\n<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", width, height);
    return STATUS_OK;
}

int svg_close(struct svg *svg)
{
    svg_put(svg, "</svg>\n");
    flush(svg);
    return svg->file.fd < 0 ? svg->err->status : atomic_commit(&svg->file, svg->err);
}

double svg_tick(double span, int count)
{
    double raw = span / count, power = pow(10, floor(log10(raw))), lead = raw / power;
    return power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
}

// ---- curves -------------------------------------------------------------------------------------

void curve_clear(struct curve *c)
{
    c->count = 0;
    c->width = 1;
}

static void merge_pairs(struct curve *c)
{
    for (size_t i = 0; i < c->count / 2; i++) {
        c->bucket[i] = c->bucket[2 * i];
        c->bucket[i].points += c->bucket[2 * i + 1].points;
        c->bucket[i].loss_sum += c->bucket[2 * i + 1].loss_sum;
        c->bucket[i].tokens_sum += c->bucket[2 * i + 1].tokens_sum;
    }
    c->count /= 2;
    c->width *= 2;
}

void curve_add(struct curve *c, uint64_t tokens, double loss)
{
    if (!isfinite(loss)) {
        return;
    }
    if (c->count == 0 || c->bucket[c->count - 1].points == c->width) {
        if (c->count == CURVE_BUCKETS) {
            merge_pairs(c);
        }
        memset(&c->bucket[c->count++], 0, sizeof *c->bucket);
    }
    c->bucket[c->count - 1].points++;
    c->bucket[c->count - 1].loss_sum += loss;
    c->bucket[c->count - 1].tokens_sum += (double)tokens;
}

static double loss_at(const struct curve *c, size_t i)
{
    return c->bucket[i].loss_sum / (double)c->bucket[i].points;
}

static double tokens_at(const struct curve *c, size_t i)
{
    return c->bucket[i].tokens_sum / (double)c->bucket[i].points;
}

// Mean over a window around i, narrower near the ends, so that it neither lags nor bends there.
static double smooth_at(const struct curve *c, size_t i)
{
    size_t half = c->count / 50, left = i, right = c->count - 1 - i;
    half = half < left ? half : left;
    half = half < right ? half : right;
    double sum = 0;
    for (size_t k = i - half; k <= i + half; k++) {
        sum += loss_at(c, k);
    }
    return sum / (double)(2 * half + 1);
}

// ---- loss against tokens ------------------------------------------------------------------------

enum { WIDTH = 860, HEIGHT = 500, LEFT = 64, RIGHT = 840, TOP = 48, BOTTOM = 446 };

#define TRAIN_COLOR "#2b6cb0"
#define VAL_COLOR   "#d9480f"
#define FLOOR_COLOR "#2f7d4f"

struct picture {
    struct svg svg;
    double x_max, y_min, y_max; // what the axes span; x begins at 0
};

static double x_of(const struct picture *p, double tokens)
{
    return LEFT + (RIGHT - LEFT) * tokens / p->x_max;
}

static double y_of(const struct picture *p, double loss)
{
    double y = BOTTOM - (BOTTOM - TOP) * (loss - p->y_min) / (p->y_max - p->y_min);
    return fmin(fmax(y, -HEIGHT), 2 * HEIGHT); // what is far outside is clipped anyway
}

static void widen(struct picture *p, const struct curve *c, double cap)
{
    for (size_t i = 0; i < c->count; i++) {
        double loss = loss_at(c, i);
        p->x_max = fmax(p->x_max, tokens_at(c, i));
        p->y_min = fmin(p->y_min, loss);
        p->y_max = fmax(p->y_max, fmin(loss, cap));
    }
}

static void choose_axes(struct picture *p, const struct curve *train, const struct curve *val,
                        double floor_loss)
{
    // A run that explodes must not flatten what came before.
    double first = train->count ? loss_at(train, 0) : val->count ? loss_at(val, 0) : 1;
    double cap = first > 0 ? 1.5 * first : INFINITY;
    p->x_max = 1;
    p->y_min = floor_loss > 0 ? floor_loss : INFINITY;
    p->y_max = -INFINITY;
    widen(p, train, cap);
    widen(p, val, cap);
    if (!isfinite(p->y_min) || !isfinite(p->y_max)) {
        p->y_min = 0;
        p->y_max = 1;
    }
    double span = p->y_max - p->y_min;
    double margin = span > 1e-6 * fabs(p->y_max) ? 0.05 * span : 0.05 * fabs(p->y_max) + 1e-3;
    p->y_min -= margin;
    p->y_max += margin;
}

static void draw_axes(struct picture *p)
{
    static const struct {
        double size;
        const char *suffix;
    } unit[] = {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "K"}, {1, ""}};
    double dy = svg_tick(p->y_max - p->y_min, 7), dx = svg_tick(p->x_max, 8);
    size_t u = 0;
    while (unit[u].size > p->x_max && u < 4) {
        u++;
    }
    svg_put(&p->svg, "<g stroke=\"#e3e6ea\" stroke-width=\"1\">\n");
    for (double k = ceil(p->y_min / dy); k * dy <= p->y_max; k++) {
        svg_put(&p->svg, "<path d=\"M%d %.1fH%d\"/>\n", LEFT, y_of(p, k * dy), RIGHT);
    }
    svg_put(&p->svg, "</g>\n<g fill=\"#444\" font-size=\"12\" text-anchor=\"end\">\n");
    for (double k = ceil(p->y_min / dy); k * dy <= p->y_max; k++) {
        svg_put(&p->svg, "<text x=\"%d\" y=\"%.1f\">%.10g</text>\n", LEFT - 8, y_of(p, k * dy) + 4,
                k * dy);
    }
    svg_put(&p->svg, "</g>\n<g fill=\"#444\" font-size=\"12\" text-anchor=\"middle\">\n");
    for (double k = 0; k * dx <= p->x_max; k++) {
        svg_put(&p->svg, "<text x=\"%.1f\" y=\"%d\">%.10g%s</text>\n", x_of(p, k * dx), BOTTOM + 20,
                k * dx / unit[u].size, k > 0 ? unit[u].suffix : "");
    }
    svg_put(&p->svg, "<text x=\"%d\" y=\"%d\" font-size=\"13\">tokens</text>\n", (LEFT + RIGHT) / 2,
            BOTTOM + 42);
    svg_put(&p->svg,
            "<text transform=\"translate(18 %d) rotate(-90)\" font-size=\"13\">loss</text>\n</g>\n",
            (TOP + BOTTOM) / 2);
    svg_put(&p->svg, "<g stroke=\"#444\">\n<path d=\"M%d %dV%dH%d\" fill=\"none\"/>\n", LEFT, TOP,
            BOTTOM, RIGHT);
    for (double k = 0; k * dx <= p->x_max; k++) {
        svg_put(&p->svg, "<path d=\"M%.1f %dv5\"/>\n", x_of(p, k * dx), BOTTOM);
    }
    svg_put(&p->svg, "</g>\n");
}

static void draw_line(struct picture *p, const struct curve *c,
                      double (*loss)(const struct curve *, size_t), const char *style)
{
    if (c->count == 0) {
        return;
    }
    svg_put(&p->svg, "<polyline fill=\"none\" stroke-linejoin=\"round\" %s points=\"", style);
    for (size_t i = 0; i < c->count; i++) {
        svg_put(&p->svg, "%s%.1f,%.1f", i ? " " : "", x_of(p, tokens_at(c, i)),
                y_of(p, loss(c, i)));
    }
    svg_put(&p->svg, "\"/>\n");
}

static void draw_points(struct picture *p, const struct curve *c)
{
    for (size_t i = 0; c->count <= 60 && i < c->count; i++) {
        svg_put(&p->svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"" VAL_COLOR "\"/>\n",
                x_of(p, tokens_at(c, i)), y_of(p, loss_at(c, i)));
    }
}

static void draw_floor(struct picture *p, double floor_loss, const char *label)
{
    double y = y_of(p, floor_loss);
    svg_put(&p->svg,
            "<path d=\"M%d %.1fH%d\" stroke=\"" FLOOR_COLOR "\" stroke-width=\"1.5\" "
            "stroke-dasharray=\"7 5\"/>\n",
            LEFT, y, RIGHT);
    // White behind the letters keeps them readable where a curve comes near.
    svg_put(&p->svg,
            "<text x=\"%d\" y=\"%.1f\" fill=\"" FLOOR_COLOR "\" font-size=\"12\" stroke=\"#fff\" "
            "stroke-width=\"3\" paint-order=\"stroke\">",
            LEFT + 8, y - 6);
    svg_put_text(&p->svg, label ? label : "");
    svg_put(&p->svg, " %.4g</text>\n", floor_loss);
}

static void draw_legend(struct picture *p, const struct curve *train, const struct curve *val)
{
    int x = LEFT;
    if (train->count) {
        svg_put(&p->svg,
                "<path d=\"M%d 30h26\" stroke=\"" TRAIN_COLOR "\" stroke-width=\"2.5\"/>"
                "<text x=\"%d\" y=\"34\">training %.4f</text>\n",
                x, x + 34,
                smooth_at(train, train->count - 1 - train->count / 50)); // the last whole window
        x += 190;
    }
    if (val->count) {
        svg_put(&p->svg,
                "<path d=\"M%d 30h26\" stroke=\"" VAL_COLOR "\" stroke-width=\"2\"/>"
                "<text x=\"%d\" y=\"34\">validation %.4f</text>\n",
                x, x + 34, loss_at(val, val->count - 1));
    }
}

int svg_write(const char *path, const struct curve *train, const struct curve *val, double floor,
              const char *floor_label, struct error *err)
{
    struct picture p;
    choose_axes(&p, train, val, floor);
    if (svg_open(&p.svg, path, WIDTH, HEIGHT, "Loss against tokens", err)) {
        return err->status;
    }
    svg_put(&p.svg,
            "<clipPath id=\"plot\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>"
            "</clipPath>\n",
            LEFT - 4, TOP, RIGHT - LEFT + 8, BOTTOM - TOP);
    draw_axes(&p);
    draw_legend(&p, train, val);
    svg_put(&p.svg, "<g clip-path=\"url(#plot)\">\n");
    draw_line(&p, train, loss_at,
              "stroke=\"" TRAIN_COLOR "\" stroke-width=\"1\" stroke-opacity=\"0.3\"");
    draw_line(&p, train, smooth_at, "stroke=\"" TRAIN_COLOR "\" stroke-width=\"2.5\"");
    draw_line(&p, val, loss_at, "stroke=\"" VAL_COLOR "\" stroke-width=\"2\"");
    draw_points(&p, val);
    if (floor > 0) {
        draw_floor(&p, floor, floor_label);
    }
    svg_put(&p.svg, "</g>\n");
    return svg_close(&p.svg);
}
