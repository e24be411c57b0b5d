// machine.c - tables of fields, read and written by name.
#include "hete/machine.h"
#include "data/files.h"
#include "hete/lines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- a file of numbers by name ------------------------------------------------------------------

// A number of a file: `unit` of the field's own units, within min and max of the file's.
struct field {
    const char *name;
    size_t offset;
    bool bytes; // a size_t, else a double
    double unit, min, max;
};

enum { FIELDS_MAX = 64 };

struct numbers {
    const struct field *fields;
    size_t n;
    void *out;
    char *name; // of 64 bytes: the line `name` gives a text; NULL: no such line
};

static int read_name(const struct lines *l, char name[64], struct error *err)
{
    size_t used = 0;
    for (size_t i = 1; i < l->words; i++) {
        size_t length = strlen(l->word[i]) + (i > 1);
        if (used + length > 63) {
            return lines_error(l, err, "name: longer than 63 bytes");
        }
        used += (size_t)snprintf(name + used, 64 - used, "%s%s", i > 1 ? " " : "", l->word[i]);
    }
    return used > 0 ? STATUS_OK : lines_error(l, err, "name: its value is missing");
}

static int read_field(const struct lines *l, const struct field *f, void *out, struct error *err)
{
    double x;
    if (l->words != 2) {
        return lines_error(l, err, "%s: expected one number (%.10g to %.10g), found %zu words",
                           f->name, f->min, f->max, l->words - 1);
    }
    if (lines_real(l, f->name, l->word[1], f->min, f->max, &x, err)) {
        return err->status;
    }
    void *field = (char *)out + f->offset;
    if (f->bytes) {
        *(size_t *)field = (size_t)(x * f->unit + 0.5);
    } else {
        *(double *)field = x * f->unit;
    }
    return STATUS_OK;
}

// The line that the present one belongs to: the number of a field, n for `name`.
static int read_line(const struct lines *l, const struct numbers *numbers, size_t seen[],
                     struct error *err)
{
    size_t i = 0;
    while (i < numbers->n && strcmp(l->word[0], numbers->fields[i].name) != 0) {
        i++;
    }
    if (i == numbers->n && !(numbers->name && strcmp(l->word[0], "name") == 0)) {
        return lines_error(l, err, "'%.40s' is not a name of this file (hete/FORMATS.md has them)",
                           l->word[0]);
    }
    if (seen[i]) {
        return lines_error(l, err, "%s is there twice, first in line %zu", l->word[0], seen[i]);
    }
    seen[i] = l->number;
    return i == numbers->n ? read_name(l, numbers->name, err)
                           : read_field(l, &numbers->fields[i], numbers->out, err);
}

static int none_missing(const struct numbers *numbers, const char *path, const size_t seen[],
                        struct error *err)
{
    char missing[512] = "";
    size_t used = 0;
    for (size_t i = 0; i < numbers->n + (numbers->name != NULL) && used < sizeof missing; i++) {
        if (!seen[i]) {
            used +=
                (size_t)snprintf(missing + used, sizeof missing - used, "%s%s", used ? ", " : "",
                                 i == numbers->n ? "name" : numbers->fields[i].name);
        }
    }
    return used ? error_set(err, STATUS_FAIL,
                            "%s: missing: %s (hete/FORMATS.md says what they are)", path, missing)
                : STATUS_OK;
}

static int read_numbers(const struct numbers *numbers, const char *path, struct error *err)
{
    struct lines l;
    size_t seen[FIELDS_MAX + 1] = {0}; // line in which a field stands
    if (lines_open(&l, path, err)) {
        return err->status;
    }
    int status = lines_next(&l, err);
    while (!status && l.words > 0) {
        status = read_line(&l, numbers, seen, err);
        status = status ? status : lines_next(&l, err);
    }
    lines_close(&l);
    return status ? status : none_missing(numbers, path, seen, err);
}

// ---- machines -----------------------------------------------------------------------------------

#define GB    1e9
#define US    1e-6
#define AT(f) offsetof(struct machine, f)

static const struct field machine_fields[] = {
    {"device_memory_gb", AT(device_bytes), true, GB, 1e-6, 1e9},
    {"host_memory_gb", AT(host_bytes), true, GB, 1e-6, 1e9},
    {"pinned_memory_gb", AT(pinned_bytes), true, GB, 1e-6, 1e9},
    {"bf16_tflops", AT(peak_flops[DTYPE_BF16]), false, 1e12, 1e-6, 1e6},
    {"fp32_tflops", AT(peak_flops[DTYPE_FP32]), false, 1e12, 1e-6, 1e6},
    {"efficiency", AT(efficiency), false, 1, 0.001, 1},
    {"device_gb_per_s", AT(device_rate), false, GB, 1e-6, 1e6},
    {"launch_us", AT(launch_s), false, US, 0, 1e6},
    {"copy_latency_us", AT(link.latency_s), false, US, 0, 1e6},
    {"copy_in_gb_per_s", AT(link.in), false, GB, 1e-6, 1e6},
    {"copy_out_gb_per_s", AT(link.out), false, GB, 1e-6, 1e6},
    {"copy_in_duplex_gb_per_s", AT(link.in_duplex), false, GB, 1e-6, 1e6},
    {"copy_out_duplex_gb_per_s", AT(link.out_duplex), false, GB, 1e-6, 1e6},
    {"host_adam_gparams_per_s", AT(host_adam), false, 1e9, 1e-6, 1e6},
    {"host_gb_per_s", AT(host_rate), false, GB, 1e-6, 1e6},
    {"gpu_link_gb_per_s", AT(gpu_link), false, GB, 0, 1e6},
    {"gpu_link_latency_us", AT(gpu_link_latency_s), false, US, 0, 1e6},
    {"network_gb_per_s", AT(network), false, GB, 0, 1e6},
    {"network_latency_us", AT(network_latency_s), false, US, 0, 1e6},
};
#undef AT

#define COUNT(array) (sizeof(array) / sizeof *(array))
_Static_assert(COUNT(machine_fields) <= FIELDS_MAX, "FIELDS_MAX");

int machine_read(struct machine *m, const char *path, struct error *err)
{
    const struct numbers numbers = {machine_fields, COUNT(machine_fields), m, m->name};
    *m = (struct machine){.gpus = 1};
    if (read_numbers(&numbers, path, err)) {
        return err->status;
    }
    const struct {
        const char *name, *of;
        double value, most;
    } limit[] = {
        {"pinned_memory_gb", "host_memory_gb", (double)m->pinned_bytes, (double)m->host_bytes},
        {"copy_in_duplex_gb_per_s", "copy_in_gb_per_s", m->link.in_duplex, m->link.in},
        {"copy_out_duplex_gb_per_s", "copy_out_gb_per_s", m->link.out_duplex, m->link.out}};
    for (size_t i = 0; i < COUNT(limit); i++) {
        if (limit[i].value > limit[i].most) {
            return error_set(err, STATUS_FAIL, "%s: %s %.10g is more than %s %.10g", path,
                             limit[i].name, limit[i].value / GB, limit[i].of, limit[i].most / GB);
        }
    }
    return STATUS_OK;
}

int machine_read_emulated(struct machine *m, const char *spec, size_t *n, struct error *err)
{
    char path[4096];
    const char *colon = strrchr(spec, ':');
    bool scaled = colon && colon[1] && strspn(colon + 1, "0123456789") == strlen(colon + 1);
    int length = (int)(scaled ? (size_t)(colon - spec) : strlen(spec));
    *n = 1;
    if (scaled && strlen(colon + 1) < 5) {
        *n = strtoul(colon + 1, NULL, 10);
    } else if (scaled) {
        *n = 0;
    }
    if (*n < 1 || *n > 1024) {
        return error_set(
            err, STATUS_USAGE,
            "--emulate %.200s: the model is a miniature of 1:N, and N is from 1 to 1024", spec);
    }
    if (snprintf(path, sizeof path, "%.*s", length, spec) >= (int)sizeof path) {
        return error_set(err, STATUS_FAIL, "'%.200s...': the name of the file is too long", spec);
    }
    if (machine_read(m, path, err)) {
        return err->status;
    }
    size_t square = *n * *n;
    m->device_bytes /= square;
    m->host_bytes /= square;
    m->pinned_bytes /= square;
    m->peak_flops[DTYPE_FP32] /= (double)*n;
    m->peak_flops[DTYPE_BF16] /= (double)*n;
    m->launch_s /= (double)square;
    m->link.latency_s /= (double)square;
    m->gpu_link_latency_s /= (double)square;
    m->network_latency_s /= (double)square;
    return STATUS_OK;
}

// Seconds until each of n ranks, g of them on a machine, has sent a message of so many bytes to
// every other one: to those on its own machine, to those on others.
struct messages {
    double near_s, far_s;
};

static struct messages messages(const struct machine *m, double n, double g, double bytes)
{
    return (struct messages){
        .near_s = g > 1 ? (g - 1) * (m->gpu_link_latency_s + bytes / m->gpu_link) : 0,
        .far_s = n > g ? (n - g) * (m->network_latency_s + bytes * g / m->network) : 0,
    };
}

static double exchange_s(const struct machine *m, double n, double g, double bytes)
{
    struct messages s = messages(m, n, g, bytes);
    return fmax(s.near_s, s.far_s);
}

// Until n - 1 messages of so many bytes have gone round.
static double ring_s(const struct machine *m, double n, double g, double bytes)
{
    double near_s = g > 1 ? m->gpu_link_latency_s + bytes / m->gpu_link : 0;
    double far_s = n > g ? m->network_latency_s + bytes / m->network : 0;
    return (n - 1) * fmax(near_s, far_s);
}

static double unit_bytes(const struct step_shape *shape, size_t u)
{
    return (double)(model_unit(shape->model, u)->params * dtype_bytes(shape->dtype));
}

bool machine_waits_for_network(const struct machine *m, const struct step_shape *shape)
{
    double n = (double)shape->ranks;
    struct messages s = messages(m, n, (double)m->gpus, unit_bytes(shape, 1) / n);
    return s.far_s > s.near_s;
}

static void comm_costs(struct costs *costs, const struct machine *m, const struct step_shape *shape)
{
    double n = (double)shape->ranks, g = (double)m->gpus;
    if (shape->ranks <= 1) {
        return;
    }
    for (size_t k = 0; k < 2; k++) {
        double bytes = unit_bytes(shape, k);
        costs->gather[k] = ring_s(m, n, g, bytes / n) + m->launch_s;
        costs->scatter[k] =
            exchange_s(m, n, g, bytes / n) + (bytes + bytes / n) / m->device_rate + 2 * m->launch_s;
    }
    costs->share = exchange_s(m, n, g, 0) + m->launch_s;
}

void machine_costs(struct costs *costs, const struct machine *m, const struct step_shape *shape)
{
    *costs = (struct costs){.clip = m->launch_s, .link = m->link};
    costs->peak_flops = m->peak_flops[shape->dtype];
    double rate = costs->peak_flops * m->efficiency;
    bool sums = shape->micro_batches > 1;
    double element = (double)dtype_bytes(shape->dtype), grad = sums ? 4 : element;
    // Adam reads and writes master, m and v (in fp32 the parameters are the master), reads the
    // gradient and writes 16-bit parameters.
    double adam = 24 + grad + (shape->dtype == DTYPE_FP32 ? 0 : element);
    double accumulate = 8 + element; // the sum is read and written
    for (size_t k = 0; k < 2; k++) {
        const struct unit *unit = model_unit(shape->model, k);
        double params = (double)unit->params;
        for (enum call c = 0; c < CALLS; c++) {
            struct call_work w = {0, 0};
            if (unit->fn[c]) {
                w = shape->model->work(shape->model, shape->dtype, c, shape->B, shape->T);
            }
            if (w.flops > 0 || w.bytes > 0) {
                costs->call[c][k] = fmax(w.flops / rate, w.bytes / m->device_rate) + m->launch_s;
            }
        }
        costs->adam[k] = params * adam / m->device_rate + m->launch_s;
        costs->accumulate[k] = params * accumulate / m->device_rate + m->launch_s;
        costs->norm[k] = params * grad / m->device_rate + m->launch_s;
    }
    double sharers = (double)m->gpus;
    costs->host_adam = sharers / m->host_adam;
    costs->host_speculate = costs->host_adam; // the same bytes
    costs->host_accumulate = sharers * accumulate / m->host_rate;
    costs->host_norm = sharers * 4 / m->host_rate; // of the fp32 sum
    comm_costs(costs, m, shape);
}

// ---- costs --------------------------------------------------------------------------------------

#define AT(f) offsetof(struct costs, f)
#define SECONDS(name, f)                                                                           \
    {                                                                                              \
        name, AT(f), false, 1, 0, 1e6                                                              \
    }
#define RATE(name, f)                                                                              \
    {                                                                                              \
        name, AT(f), false, 1, 0, 1e18                                                             \
    }

static const struct field cost_fields[] = {
    SECONDS("encode_s", call[CALL_ENCODE][0]),
    SECONDS("forward_s", call[CALL_FORWARD][1]),
    SECONDS("recompute_s", call[CALL_RECOMPUTE][1]),
    SECONDS("head_s", call[CALL_HEAD][0]),
    SECONDS("backward_s", call[CALL_BACKWARD][1]),
    SECONDS("encode_backward_s", call[CALL_ENCODE_BACKWARD][0]),
    SECONDS("loss_s", call[CALL_LOSS][0]),
    SECONDS("encode_token_s", call[CALL_ENCODE_TOKEN][0]),
    SECONDS("decode_s", call[CALL_DECODE][1]),
    SECONDS("logits_s", call[CALL_LOGITS][0]),
    SECONDS("embed_accumulate_s", accumulate[0]),
    SECONDS("block_accumulate_s", accumulate[1]),
    SECONDS("embed_norm_s", norm[0]),
    SECONDS("block_norm_s", norm[1]),
    SECONDS("embed_adam_s", adam[0]),
    SECONDS("block_adam_s", adam[1]),
    SECONDS("clip_s", clip),
    SECONDS("embed_scatter_s", scatter[0]),
    SECONDS("block_scatter_s", scatter[1]),
    SECONDS("embed_gather_s", gather[0]),
    SECONDS("block_gather_s", gather[1]),
    SECONDS("share_s", share),
    SECONDS("host_adam_s_per_param", host_adam),
    SECONDS("host_speculate_s_per_param", host_speculate),
    SECONDS("host_accumulate_s_per_param", host_accumulate),
    SECONDS("host_norm_s_per_param", host_norm),
    SECONDS("copy_latency_s", link.latency_s),
    RATE("copy_in_bytes_per_s", link.in),
    RATE("copy_out_bytes_per_s", link.out),
    RATE("copy_in_duplex_bytes_per_s", link.in_duplex),
    RATE("copy_out_duplex_bytes_per_s", link.out_duplex),
    RATE("peak_flop_per_s", peak_flops),
};
_Static_assert(COUNT(cost_fields) <= FIELDS_MAX, "FIELDS_MAX");

int costs_write(const struct costs *costs, const char *path, const char *comment, struct error *err)
{
    char text[4096];
    size_t used = comment ? (size_t)snprintf(text, sizeof text, "# %.500s\n", comment) : 0;
    for (size_t i = 0; i < COUNT(cost_fields); i++) {
        double x = *(const double *)((const char *)costs + cost_fields[i].offset);
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "%s %.17g\n", cost_fields[i].name, x);
    }
    return file_replace(path, text, used, err);
}

int costs_read(struct costs *costs, const char *path, struct error *err)
{
    const struct numbers numbers = {cost_fields, COUNT(cost_fields), costs, NULL};
    *costs = (struct costs){0};
    return read_numbers(&numbers, path, err);
}
