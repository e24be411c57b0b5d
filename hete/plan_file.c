// The plan file: a line per field and per run of units. hete/FORMATS.md describes it; the names are
// those of struct plan.
#include "data/files.h"
#include "hete/lines.h"
#include "hete/plan.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct plan_field {
    const char *name;
    size_t offset;
    bool is_switch; // a bool, else a size_t
    uint64_t min, max;
};

#define NUMBER(field, min, max)                                                                    \
    {                                                                                              \
#field, offsetof(struct plan, field), false, min, max                                      \
    }
#define SWITCH(field)                                                                              \
    {                                                                                              \
#field, offsetof(struct plan, field), true, 0, 1                                           \
    }
static const struct plan_field plan_fields[] = {
    NUMBER(units, 2, PLAN_UNITS_MAX),
    {"rows", offsetof(struct plan, B), false, 1, 65536},
    {"tokens", offsetof(struct plan, T), false, 1, 1 << 20},
    NUMBER(micro_batches, 1, 1000000000),
    NUMBER(ranks, 1, PLAN_RANKS_MAX),
    SWITCH(hold_updates),
    NUMBER(slots, 0, PLAN_SLOTS_MAX),
    NUMBER(grad_buffers, 0, PLAN_GRADS_MAX),
    NUMBER(slices, 1, PLAN_SLICES_MAX),
    SWITCH(early_adam),
    SWITCH(speculate),
    SWITCH(fifo),
    SWITCH(barrier),
    SWITCH(serial_copies),
};
enum { FIELDS = sizeof plan_fields / sizeof *plan_fields, POLICY = FIELDS, SEEN };

// What is decided of a unit: one word of each pair, the second one where the bool is true.
static const struct {
    const char *word[2];
    size_t offset;
} decisions[] = {
    {{"keep", "recompute"}, offsetof(struct unit_plan, recompute)},
    {{"resident", "stream"}, offsetof(struct unit_plan, stream)},
    {{"device-optimizer", "host-optimizer"}, offsetof(struct unit_plan, host_optimizer)},
    {{"whole", "shard"}, offsetof(struct unit_plan, shard)},
};
enum { DECISIONS = sizeof decisions / sizeof *decisions };

// ---- writing ------------------------------------------------------------------------------------

static int write_units(FILE *out, const struct plan *plan)
{
    int failed = 0;
    for (size_t first = 0, next; first < plan->units; first = next) {
        for (next = first + 1;
             next < plan->units && unit_plan_same(&plan->unit[first], &plan->unit[next]); next++) {
        }
        failed |= fprintf(out, "unit %zu", first) < 0;
        failed |= next > first + 1 && fprintf(out, "-%zu", next - 1) < 0;
        for (size_t d = 0; d < DECISIONS; d++) {
            const bool *yes =
                (const bool *)((const char *)&plan->unit[first] + decisions[d].offset);
            failed |= fprintf(out, " %s", decisions[d].word[*yes]) < 0;
        }
        failed |= fputc('\n', out) == EOF;
    }
    return failed;
}

int plan_text(const struct plan *plan, char **text, size_t *bytes, struct error *err)
{
    *text = NULL;
    FILE *out = open_memstream(text, bytes);
    assert(plan->policy[0] && plan->units >= 2 && plan->units <= PLAN_UNITS_MAX);
    int failed = !out || fprintf(out, "# a plan of train_gpt: see hete/FORMATS.md\npolicy %s\n",
                                 plan->policy) < 0;
    for (size_t i = 0; out && i < FIELDS; i++) {
        const void *field = (const char *)plan + plan_fields[i].offset;
        size_t value = plan_fields[i].is_switch ? *(const bool *)field : *(const size_t *)field;
        failed |= fprintf(out, "%s %zu\n", plan_fields[i].name, value) < 0;
    }
    failed |= out && write_units(out, plan);
    failed |= out && fclose(out) != 0;
    if (failed) {
        free(*text);
        *text = NULL;
        return error_set(err, STATUS_FAIL, "no memory for the text of a plan");
    }
    return STATUS_OK;
}

int plan_write(const struct plan *plan, const char *path, struct error *err)
{
    char *text;
    size_t bytes;
    int status = plan_text(plan, &text, &bytes, err);
    status = status ? status : file_replace(path, text, bytes, err);
    free(text);
    return status;
}

// ---- reading ------------------------------------------------------------------------------------

struct reading {
    struct lines lines;
    struct plan *plan;
    size_t seen[SEEN];           // line of a field, 0: not there
    size_t unit[PLAN_UNITS_MAX]; // line of a unit
    size_t last_unit;            // the largest that was named
};

static int read_decisions(const struct lines *l, struct unit_plan *unit, struct error *err)
{
    bool decided[DECISIONS] = {0};
    *unit = (struct unit_plan){0};
    for (size_t i = 2; i < l->words; i++) {
        size_t d = 0, yes = 0;
        while (d < DECISIONS && strcmp(l->word[i], decisions[d].word[yes]) != 0) {
            d += yes;
            yes = !yes;
        }
        if (d == DECISIONS) {
            return lines_error(l, err,
                               "'%.40s' is none of keep recompute, resident stream, "
                               "device-optimizer host-optimizer, whole shard",
                               l->word[i]);
        }
        if (decided[d]) {
            return lines_error(l, err, "%s or %s is decided twice", decisions[d].word[0],
                               decisions[d].word[1]);
        }
        decided[d] = true;
        *(bool *)((char *)unit + decisions[d].offset) = yes;
    }
    for (size_t d = 0; d < DECISIONS; d++) {
        if (!decided[d]) {
            return lines_error(l, err, "it is not said whether %s or %s", decisions[d].word[0],
                               decisions[d].word[1]);
        }
    }
    return STATUS_OK;
}

// `unit A WORD...` or `unit A-B WORD...`.
static int read_units(struct reading *r, struct error *err)
{
    const struct lines *l = &r->lines;
    struct unit_plan unit;
    uint64_t first, last;
    if (l->words < 2) {
        return lines_error(l, err, "unit: its number is missing (unit 0, unit 1-12)");
    }
    char *dash = strchr(l->word[1], '-');
    if (dash) {
        *dash = '\0';
    }
    if (lines_int(l, "unit", l->word[1], 0, PLAN_UNITS_MAX - 1, &first, err) ||
        lines_int(l, "unit", dash ? dash + 1 : l->word[1], first, PLAN_UNITS_MAX - 1, &last, err) ||
        read_decisions(l, &unit, err)) {
        return err->status;
    }
    if (first == 0 && (unit.recompute || unit.stream)) {
        return lines_error(l, err, "unit 0, the embedding and head, is always: keep resident");
    }
    for (size_t u = first; u <= last; u++) {
        if (r->unit[u]) {
            return lines_error(l, err, "unit %zu is there twice, first in line %zu", u, r->unit[u]);
        }
        r->unit[u] = l->number;
        r->plan->unit[u] = unit;
    }
    r->last_unit = last > r->last_unit ? last : r->last_unit;
    return STATUS_OK;
}

static int read_value(struct reading *r, size_t i, struct error *err)
{
    const struct lines *l = &r->lines;
    const struct plan_field *f = &plan_fields[i];
    uint64_t value = 0;
    if (l->words != 2) {
        return lines_error(l, err, "%s: expected one value, found %zu", l->word[0], l->words - 1);
    }
    if (i == POLICY) {
        if (strlen(l->word[1]) >= sizeof r->plan->policy) {
            return lines_error(l, err, "policy '%.40s' is longer than %zu bytes", l->word[1],
                               sizeof r->plan->policy - 1);
        }
        snprintf(r->plan->policy, sizeof r->plan->policy, "%s", l->word[1]);
        return STATUS_OK;
    }
    if (lines_int(l, f->name, l->word[1], f->min, f->max, &value, err)) {
        return err->status;
    }
    void *field = (char *)r->plan + f->offset;
    if (f->is_switch) {
        *(bool *)field = value;
    } else {
        *(size_t *)field = value;
    }
    return STATUS_OK;
}

static int read_line(struct reading *r, struct error *err)
{
    const struct lines *l = &r->lines;
    if (strcmp(l->word[0], "unit") == 0) {
        return read_units(r, err);
    }
    size_t i = 0;
    while (i < FIELDS && strcmp(l->word[0], plan_fields[i].name) != 0) {
        i++;
    }
    if (i == FIELDS && strcmp(l->word[0], "policy") != 0) {
        return lines_error(l, err, "'%.40s' is not a field of a plan (hete/FORMATS.md has them)",
                           l->word[0]);
    }
    if (r->seen[i]) {
        return lines_error(l, err, "%s is there twice, first in line %zu", l->word[0], r->seen[i]);
    }
    r->seen[i] = l->number;
    return read_value(r, i, err);
}

// What goes together depends on the ranks, whose line may come after those of the units.
static int check_shards(const struct reading *r, struct error *err)
{
    const struct plan *plan = r->plan;
    for (size_t u = 0; u < plan->units; u++) {
        const struct unit_plan *d = plan->unit + u;
        const char *wrong = NULL;
        if (plan->ranks > 1 && !d->shard && (d->stream || d->host_optimizer)) {
            wrong = "stream and host-optimizer need shard where there are several ranks";
        } else if (plan->ranks == 1 && d->shard) {
            wrong = "shard needs several ranks, and the plan is for one: whole";
        } else if (plan->ranks == 1 && d->stream && !d->host_optimizer) {
            wrong = "stream needs host-optimizer: streamed parameters are updated on the host";
        }
        if (wrong) {
            return error_set(err, STATUS_FAIL, "%s:%zu: %s", r->lines.path, r->unit[u], wrong);
        }
    }
    return STATUS_OK;
}

static int check_complete(const struct reading *r, struct error *err)
{
    const struct plan *plan = r->plan;
    for (size_t i = 0; i < SEEN; i++) {
        if (!r->seen[i]) {
            return error_set(err, STATUS_FAIL, "%s: %s is missing", r->lines.path,
                             i == POLICY ? "policy" : plan_fields[i].name);
        }
    }
    for (size_t u = 0; u < plan->units; u++) {
        if (!r->unit[u]) {
            return error_set(err, STATUS_FAIL,
                             "%s: there are %zu units, but nothing is said of unit %zu",
                             r->lines.path, plan->units, u);
        }
    }
    if (r->last_unit >= plan->units) {
        return error_set(err, STATUS_FAIL, "%s:%zu: unit %zu, but there are %zu units: 0 to %zu",
                         r->lines.path, r->unit[r->last_unit], r->last_unit, plan->units,
                         plan->units - 1);
    }
    return check_shards(r, err);
}

int plan_read(struct plan *plan, const char *path, struct error *err)
{
    struct reading *r = calloc(1, sizeof *r);
    if (!r) {
        return error_set(err, STATUS_FAIL, "%s: no memory to read a plan", path);
    }
    *plan = (struct plan){0};
    r->plan = plan;
    int status = lines_open(&r->lines, path, err);
    if (!status) {
        status = lines_next(&r->lines, err);
        while (!status && r->lines.words > 0) {
            status = read_line(r, err);
            status = status ? status : lines_next(&r->lines, err);
        }
        status = status ? status : check_complete(r, err);
        lines_close(&r->lines);
    }
    free(r);
    return status;
}
