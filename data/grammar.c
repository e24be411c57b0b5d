#include "data/grammar.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ALTERNATIVES_MAX = 64,
    RECORDS_MAX = 64,
    FIELDS_MAX = 8,
    SLOTS_MAX = 64,
    RULES_MAX = 64,
    ITEMS_MAX = 64, // of an alternative
    DEPTH_MAX = 16, // of rules within rules
};

struct span {
    const char *text;
    size_t n;
};

enum item_kind { ITEM_TEXT, ITEM_RULE, ITEM_DRAW, ITEM_FIELD };

struct item {
    enum item_kind kind;
    int index;        // of the rule or slot
    int field;        // of the slot
    struct span text; // ITEM_TEXT
};

struct alternative {
    struct item items[ITEMS_MAX];
    int n;
};

struct rule {
    const char *name;
    struct alternative *alternatives;
    int n;
    bool used;
};

struct slot {
    const char *name;
    int n, n_fields;
    int unlike;    // the slot whose record this one does not draw; -1: none
    int unlike_by; // the slot that has this one as `unlike`; -1: none
    struct span fields[RECORDS_MAX][FIELDS_MAX];
};

struct grammar {
    struct rule rules[RULES_MAX];
    struct slot slots[SLOTS_MAX];
    int n_rules, n_slots;
    struct grammar_entropy entropy;
};

// How many records a slot can draw from.
static int drawable(const struct slot *s)
{
    return s->n - (s->unlike >= 0);
}

// ---- compiling ----

static int split(const char *text, struct span *parts, int max)
{
    int n = 0;
    for (const char *at = text;; at++) {
        size_t len = strcspn(at, "|");
        if (n == max)
            return max + 1;
        parts[n++] = (struct span){at, len};
        at += len;
        if (!*at)
            return n;
    }
}

static int find_rule(const struct grammar_source *src, const char *name, size_t n)
{
    for (int i = 0; src->rules[i].name; i++) {
        if (strlen(src->rules[i].name) == n && memcmp(src->rules[i].name, name, n) == 0)
            return i;
    }
    return -1;
}

static int find_slot(const struct grammar_source *src, const char *name, size_t n)
{
    for (int i = 0; src->slots[i].name; i++) {
        if (strlen(src->slots[i].name) == n && memcmp(src->slots[i].name, name, n) == 0)
            return i;
    }
    return -1;
}

static int find_field(const struct grammar_source *src, int slot, const char *name, size_t n)
{
    struct span fields[FIELDS_MAX];
    int count = split(src->slots[slot].fields, fields, FIELDS_MAX);
    for (int i = 0; i < count; i++) {
        if (fields[i].n == n && memcmp(fields[i].text, name, n) == 0)
            return i;
    }
    return -1;
}

static int compile_slot(struct grammar *g, const struct grammar_source *src, int i,
                        struct error *err)
{
    const struct grammar_slot *from = &src->slots[i];
    struct slot *s = &g->slots[i];
    struct span names[FIELDS_MAX];
    s->name = from->name;
    s->n_fields = split(from->fields, names, FIELDS_MAX);
    s->unlike = from->unlike ? find_slot(src, from->unlike, strlen(from->unlike)) : -1;
    s->unlike_by = -1;
    for (int other = 0; src->slots[other].name; other++) {
        if (!src->slots[other].unlike || strcmp(src->slots[other].unlike, s->name) != 0)
            continue;
        if (s->unlike_by >= 0)
            return error_set(err, STATUS_FAIL, "slots %s and %s are both unlike %s",
                             src->slots[s->unlike_by].name, src->slots[other].name, s->name);
        s->unlike_by = other;
    }
    if (s->n_fields > FIELDS_MAX)
        return error_set(err, STATUS_FAIL, "slot %s: more than %d fields", s->name, FIELDS_MAX);
    if (from->unlike && (s->unlike < 0 || src->slots[s->unlike].records != from->records ||
                         src->slots[s->unlike].unlike))
        return error_set(err, STATUS_FAIL, "slot %s: unlike %s, which has other records", s->name,
                         from->unlike);
    for (; from->records[s->n]; s->n++) {
        if (s->n == RECORDS_MAX ||
            split(from->records[s->n], s->fields[s->n], FIELDS_MAX) != s->n_fields)
            return error_set(err, STATUS_FAIL,
                             "slot %s: record \"%s\": expected %d fields of one "
                             "of %d records",
                             s->name, from->records[s->n], s->n_fields, RECORDS_MAX);
        for (int f = 0; f < s->n_fields; f++) {
            if (s->fields[s->n][f].n == 0)
                return error_set(err, STATUS_FAIL, "slot %s: record %d has an empty field", s->name,
                                 s->n);
        }
    }
    if (drawable(s) < 1)
        return error_set(err, STATUS_FAIL, "slot %s: too few records to draw one", s->name);
    return STATUS_OK;
}

// One item of "...<rule>...{slot.field}...[slot.field]..."; advances *at.
static int compile_item(const struct grammar_source *src, const char **at, struct item *item,
                        struct error *err)
{
    const char *open = *at, *close = NULL;
    if (*open == '<')
        close = strchr(open, '>');
    else if (*open == '{')
        close = strchr(open, '}');
    else if (*open == '[')
        close = strchr(open, ']');
    if (!close) {
        *item = (struct item){.kind = ITEM_TEXT, .text = {open, strcspn(open, "<{[>}]")}};
        *at += item->text.n;
        if (item->text.n == 0)
            return error_set(err, STATUS_FAIL, "unbalanced bracket at \"%.40s\"", open);
        return STATUS_OK;
    }
    const char *name = open + 1;
    size_t n = (size_t)(close - name), dot = strcspn(name, ".");
    if (*open == '<') {
        *item = (struct item){.kind = ITEM_RULE, .index = find_rule(src, name, n)};
    } else {
        size_t slot_n = dot < n ? dot : n;
        *item = (struct item){.kind = *open == '{' ? ITEM_DRAW : ITEM_FIELD,
                              .index = find_slot(src, name, slot_n)};
        if (dot < n && item->index >= 0)
            item->field = find_field(src, item->index, name + dot + 1, n - dot - 1);
    }
    if (item->index < 0 || item->field < 0)
        return error_set(err, STATUS_FAIL, "unknown name in \"%.*s\"", (int)n + 2, open);
    *at = close + 1;
    return STATUS_OK;
}

static int compile_rule(struct grammar *g, const struct grammar_source *src, int i,
                        struct error *err)
{
    struct rule *r = &g->rules[i];
    r->name = src->rules[i].name;
    int n = 0;
    while (src->rules[i].alternatives[n])
        n++;
    r->alternatives = calloc((size_t)n + 1, sizeof *r->alternatives);
    if (!r->alternatives)
        return error_set(err, STATUS_FAIL, "no memory for rule %s", r->name);
    if (n == 0 || n > ALTERNATIVES_MAX)
        return error_set(err, STATUS_FAIL, "rule %s: %d alternatives, expected 1 to %d", r->name, n,
                         ALTERNATIVES_MAX);
    for (r->n = 0; r->n < n; r->n++) {
        struct alternative *a = &r->alternatives[r->n];
        const char *at = src->rules[i].alternatives[r->n];
        do { // an empty alternative is an unbalanced bracket
            if (a->n == ITEMS_MAX)
                return error_set(err, STATUS_FAIL, "rule %s: more than %d items", r->name,
                                 ITEMS_MAX);
            int rc = compile_item(src, &at, &a->items[a->n++], err);
            if (rc != STATUS_OK)
                return rc;
        } while (*at);
    }
    return STATUS_OK;
}

// ---- proving ----

// Which slots have been drawn at some point of a document, a bit each.
struct drawn {
    uint64_t surely, maybe;
};

static int check_rule(struct grammar *g, int rule, int depth, struct drawn *drawn,
                      struct error *err);

static int check_item(struct grammar *g, const struct item *item, int depth, struct drawn *drawn,
                      struct error *err)
{
    if (item->kind == ITEM_TEXT)
        return STATUS_OK;
    if (item->kind == ITEM_RULE)
        return check_rule(g, item->index, depth + 1, drawn, err);
    const struct slot *s = &g->slots[item->index];
    uint64_t bit = UINT64_C(1) << item->index;
    if (item->kind == ITEM_FIELD)
        return drawn->surely & bit
                   ? STATUS_OK
                   : error_set(err, STATUS_FAIL, "%s is printed where it may not have been drawn",
                               s->name);
    if (s->unlike >= 0 && !(drawn->surely >> s->unlike & 1))
        return error_set(err, STATUS_FAIL, "%s may be drawn before %s, which it must be unlike",
                         s->name, g->slots[s->unlike].name);
    if (s->unlike_by >= 0 && drawn->maybe & bit)
        return error_set(err, STATUS_FAIL, "%s is drawn twice, but %s must be unlike it", s->name,
                         g->slots[s->unlike_by].name);
    drawn->surely |= bit;
    drawn->maybe |= bit;
    return STATUS_OK;
}

// Follows every path through a document.
static int check_rule(struct grammar *g, int rule, int depth, struct drawn *drawn,
                      struct error *err)
{
    struct rule *r = &g->rules[rule];
    if (depth == DEPTH_MAX)
        return error_set(err, STATUS_FAIL, "rule %s: recursive, or deeper than %d", r->name,
                         DEPTH_MAX);
    r->used = true;
    struct drawn after = {.surely = UINT64_MAX};
    for (int a = 0; a < r->n; a++) {
        struct drawn here = *drawn;
        for (int i = 0; i < r->alternatives[a].n; i++) {
            int rc = check_item(g, &r->alternatives[a].items[i], depth, &here, err);
            if (rc != STATUS_OK)
                return rc;
        }
        after.surely &= here.surely;
        after.maybe |= here.maybe;
    }
    *drawn = after;
    return STATUS_OK;
}

typedef bool span_fn(void *ctx, struct span text);

// Calls fn with every text that an alternative may print first, while it returns true.
static bool each_first(const struct grammar *g, const struct alternative *a, span_fn *fn, void *ctx)
{
    const struct item *first = &a->items[0];
    if (first->kind == ITEM_TEXT)
        return fn(ctx, first->text);
    if (first->kind == ITEM_RULE) {
        const struct rule *r = &g->rules[first->index];
        for (int i = 0; i < r->n; i++) {
            if (!each_first(g, &r->alternatives[i], fn, ctx))
                return false;
        }
        return true;
    }
    const struct slot *s = &g->slots[first->index];
    for (int i = 0; i < s->n; i++) {
        if (!fn(ctx, s->fields[i][first->field]))
            return false;
    }
    return true;
}

static bool one_begins_with_other(struct span a, struct span b)
{
    return memcmp(a.text, b.text, a.n < b.n ? a.n : b.n) == 0;
}

struct clash {
    const struct grammar *g;
    const struct alternative *other;
    struct span text, with;
};

static bool compare_inner(void *ctx, struct span text)
{
    struct clash *c = ctx;
    c->with = text;
    return !one_begins_with_other(c->text, text);
}

static bool compare_outer(void *ctx, struct span text)
{
    struct clash *c = ctx;
    c->text = text;
    return each_first(c->g, c->other, compare_inner, c);
}

static int check_alternatives(const struct grammar *g, const struct rule *r, struct error *err)
{
    for (int a = 0; a < r->n; a++) {
        for (int b = a + 1; b < r->n; b++) {
            struct clash c = {.g = g, .other = &r->alternatives[b]};
            if (!each_first(g, &r->alternatives[a], compare_outer, &c))
                return error_set(err, STATUS_FAIL,
                                 "rule %s: alternatives %d and %d cannot be told "
                                 "apart by \"%.*s\" and \"%.*s\"",
                                 r->name, a, b, (int)c.text.n, c.text.text, (int)c.with.n,
                                 c.with.text);
        }
    }
    return STATUS_OK;
}

static int check_draws(const struct grammar *g, const struct rule *r, struct error *err)
{
    for (int a = 0; a < r->n; a++) {
        for (int i = 0; i < r->alternatives[a].n; i++) {
            const struct item *item = &r->alternatives[a].items[i];
            const struct slot *s = &g->slots[item->index];
            for (int x = 0; item->kind == ITEM_DRAW && x < s->n * s->n; x++) {
                struct span p = s->fields[x / s->n][item->field];
                struct span q = s->fields[x % s->n][item->field];
                if (x / s->n < x % s->n && one_begins_with_other(p, q))
                    return error_set(err, STATUS_FAIL,
                                     "slot %s: records cannot be told apart by "
                                     "\"%.*s\" and \"%.*s\"",
                                     s->name, (int)p.n, p.text, (int)q.n, q.text);
            }
        }
    }
    return STATUS_OK;
}

// ---- entropy ----

// Entropy, mean length and greatest length of what a rule prints. A slot's record is uniform
// whatever was drawn before it, and independent of which alternatives are taken, so means add up.
static struct grammar_entropy rule_entropy(const struct grammar *g, int rule)
{
    const struct rule *r = &g->rules[rule];
    struct grammar_entropy e = {.nats = log(r->n)};
    for (int a = 0; a < r->n; a++) {
        size_t max = 0;
        for (int i = 0; i < r->alternatives[a].n; i++) {
            const struct item *item = &r->alternatives[a].items[i];
            struct grammar_entropy part = {.tokens = (double)item->text.n,
                                           .tokens_max = item->text.n};
            if (item->kind == ITEM_RULE) {
                part = rule_entropy(g, item->index);
            } else if (item->kind != ITEM_TEXT) {
                const struct slot *s = &g->slots[item->index];
                for (int k = 0; k < s->n; k++) {
                    size_t n = s->fields[k][item->field].n;
                    part.tokens += (double)n / s->n;
                    part.tokens_max = n > part.tokens_max ? n : part.tokens_max;
                }
                if (item->kind == ITEM_DRAW)
                    part.nats = log(drawable(s));
            }
            e.nats += part.nats / r->n;
            e.tokens += part.tokens / r->n;
            max += part.tokens_max;
        }
        e.tokens_max = max > e.tokens_max ? max : e.tokens_max;
    }
    return e;
}

struct grammar_entropy grammar_entropy(const struct grammar *g)
{
    return g->entropy;
}

int grammar_open(struct grammar **out, const struct grammar_source *src, struct error *err)
{
    *out = NULL;
    struct grammar *g = calloc(1, sizeof *g);
    if (!g)
        return error_set(err, STATUS_FAIL, "no memory for a grammar");
    while (src->slots[g->n_slots].name)
        g->n_slots++;
    while (src->rules[g->n_rules].name)
        g->n_rules++;
    int rc = STATUS_OK;
    if (g->n_slots > SLOTS_MAX || g->n_rules < 1 || g->n_rules > RULES_MAX)
        rc = error_set(err, STATUS_FAIL, "%d slots and %d rules: expected up to %d and 1 to %d",
                       g->n_slots, g->n_rules, SLOTS_MAX, RULES_MAX);
    for (int i = 0; rc == STATUS_OK && i < g->n_slots; i++)
        rc = compile_slot(g, src, i, err);
    for (int i = 0; rc == STATUS_OK && i < g->n_rules; i++)
        rc = compile_rule(g, src, i, err);
    if (rc == STATUS_OK)
        rc = check_rule(g, 0, 0, &(struct drawn){0}, err);
    for (int i = 0; rc == STATUS_OK && i < g->n_rules; i++) {
        if (!g->rules[i].used)
            rc = error_set(err, STATUS_FAIL, "rule %s is never used", g->rules[i].name);
        else
            rc = check_alternatives(g, &g->rules[i], err);
        if (rc == STATUS_OK)
            rc = check_draws(g, &g->rules[i], err);
    }
    if (rc != STATUS_OK) {
        grammar_close(g);
        return rc;
    }
    g->entropy = rule_entropy(g, 0);
    g->entropy.tokens += 1; // end-of-text
    g->entropy.tokens_max += 1;
    *out = g;
    return STATUS_OK;
}

void grammar_close(struct grammar *g)
{
    if (!g)
        return;
    for (int i = 0; i < g->n_rules && i < RULES_MAX; i++)
        free(g->rules[i].alternatives);
    free(g);
}

// ---- drawing ----

static int random_below(uint64_t *state, int n) // splitmix64; n is tiny, the bias is < n / 2^32
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return (int)((x >> 32) * (uint64_t)n >> 32);
}

struct drawing {
    const struct grammar *g;
    uint64_t *random;
    char *at;
    double nats;
    int held[SLOTS_MAX]; // record per slot
};

static void draw_slot(struct drawing *d, int slot)
{
    const struct slot *s = &d->g->slots[slot];
    int record = random_below(d->random, drawable(s));
    if (s->unlike >= 0 && record >= d->held[s->unlike])
        record++;
    d->held[slot] = record;
    d->nats += log(drawable(s));
}

static void draw_rule(struct drawing *d, int rule)
{
    const struct rule *r = &d->g->rules[rule];
    const struct alternative *a = &r->alternatives[random_below(d->random, r->n)];
    d->nats += log(r->n);
    for (int i = 0; i < a->n; i++) {
        const struct item *item = &a->items[i];
        struct span text = item->text;
        if (item->kind == ITEM_RULE) {
            draw_rule(d, item->index);
            continue;
        }
        if (item->kind == ITEM_DRAW)
            draw_slot(d, item->index);
        if (item->kind != ITEM_TEXT)
            text = d->g->slots[item->index].fields[d->held[item->index]][item->field];
        memcpy(d->at, text.text, text.n);
        d->at += text.n;
    }
}

size_t grammar_draw(const struct grammar *g, uint64_t *random, char *text, double *nats)
{
    struct drawing d = {.g = g, .random = random, .at = text};
    draw_rule(&d, 0);
    if (nats)
        *nats = d.nats;
    return (size_t)(d.at - text);
}

// ---- the probability of tokens that are given ----

enum { UNKNOWN = -1 };

// A place in a document being read: the items still to come, innermost rule last.
struct place {
    struct {
        const struct alternative *alternative;
        int next;
    } stack[DEPTH_MAX];
    int depth;
    int8_t held[SLOTS_MAX]; // UNKNOWN: drawn before the row began, not seen since
};

struct reading {
    const struct grammar *g;
    const uint16_t *tokens;
    size_t n;
};

static double add_logs(double a, double b)
{
    double high = a > b ? a : b, low = a > b ? b : a;
    return low == -INFINITY ? high : high + log1p(exp(low - high));
}

static bool matches(const struct reading *r, size_t at, const char *text, size_t n)
{
    for (size_t i = 0; i < n && at + i < r->n; i++) {
        if (r->tokens[at + i] != (unsigned char)text[i])
            return false;
    }
    return true;
}

static double read_on(const struct reading *r, struct place *p, size_t at);

// log-probability of tokens[at..n), given that the document goes on with what `p` holds.
static double read_slot(const struct reading *r, struct place *p, const struct item *item,
                        size_t at)
{
    const struct slot *s = &r->g->slots[item->index];
    int held = item->kind == ITEM_DRAW ? UNKNOWN : p->held[item->index];
    int unlike = item->kind == ITEM_FIELD && s->unlike < 0 ? s->unlike_by : s->unlike;
    int other = unlike >= 0 && held == UNKNOWN ? p->held[unlike] : UNKNOWN;
    // Uniform over all records but the one that the slot it differs from is known to hold.
    double each = held != UNKNOWN ? 0 : -log(s->n - (other != UNKNOWN));
    double sum = -INFINITY;
    for (int k = held == UNKNOWN ? 0 : held; k < (held == UNKNOWN ? s->n : held + 1); k++) {
        struct span text = s->fields[k][item->field];
        if (k == other || !matches(r, at, text.text, text.n))
            continue;
        struct place after = *p;
        after.held[item->index] = (int8_t)k;
        sum = add_logs(sum, each + read_on(r, &after, at + text.n));
    }
    return sum;
}

static double read_rule(const struct reading *r, struct place *p, int rule, size_t at)
{
    const struct rule *from = &r->g->rules[rule];
    double sum = -INFINITY;
    for (int a = 0; a < from->n; a++) {
        const struct alternative *alternative = &from->alternatives[a];
        const struct item *first = &alternative->items[0];
        if (first->kind == ITEM_TEXT && !matches(r, at, first->text.text, first->text.n))
            continue; // only to be quick
        struct place inner = *p;
        inner.stack[inner.depth].alternative = alternative;
        inner.stack[inner.depth++].next = 0;
        sum = add_logs(sum, read_on(r, &inner, at) - log(from->n));
    }
    return sum;
}

static double read_on(const struct reading *r, struct place *p, size_t at)
{
    while (at < r->n) {
        if (p->depth == 0) { // the next document
            if (r->tokens[at] != GRAMMAR_END)
                return -INFINITY;
            return at + 1 < r->n ? read_rule(r, p, 0, at + 1) : 0;
        }
        const struct alternative *a = p->stack[p->depth - 1].alternative;
        if (p->stack[p->depth - 1].next == a->n) {
            p->depth--;
            continue;
        }
        const struct item *item = &a->items[p->stack[p->depth - 1].next++];
        if (item->kind == ITEM_RULE)
            return read_rule(r, p, item->index, at);
        if (item->kind != ITEM_TEXT)
            return read_slot(r, p, item, at);
        if (!matches(r, at, item->text.text, item->text.n))
            return -INFINITY;
        at += item->text.n;
    }
    return 0;
}

// Sums over all places inside the items of a rule that stands where `p` is, reached with
// log-probability `reach` within a document.
static double begin_in_rule(const struct reading *r, struct place *p, int rule, double reach);

// The same inside one text, which is not the row's beginning but for its tail.
static double begin_in_text(const struct reading *r, const struct place *p, struct span text,
                            double reach)
{
    double sum = -INFINITY;
    for (size_t skip = 0; skip < text.n; skip++) {
        if (!matches(r, 0, text.text + skip, text.n - skip))
            continue;
        struct place after = *p;
        sum = add_logs(sum, reach + read_on(r, &after, text.n - skip));
    }
    return sum;
}

static double begin_in_rule(const struct reading *r, struct place *p, int rule, double reach)
{
    const struct rule *from = &r->g->rules[rule];
    double sum = -INFINITY;
    reach -= log(from->n);
    for (int a = 0; a < from->n; a++) {
        const struct alternative *alternative = &from->alternatives[a];
        for (int i = 0; i < alternative->n; i++) {
            const struct item *item = &alternative->items[i];
            struct place inner = *p;
            inner.stack[inner.depth].alternative = alternative;
            inner.stack[inner.depth++].next = i + 1;
            if (item->kind == ITEM_TEXT) {
                sum = add_logs(sum, begin_in_text(r, &inner, item->text, reach));
            } else if (item->kind == ITEM_RULE) {
                sum = add_logs(sum, begin_in_rule(r, &inner, item->index, reach));
            } else {
                const struct slot *s = &r->g->slots[item->index];
                for (int k = 0; k < s->n; k++) {
                    inner.held[item->index] = (int8_t)k;
                    sum = add_logs(sum, begin_in_text(r, &inner, s->fields[k][item->field],
                                                      reach - log(s->n)));
                }
            }
        }
    }
    return sum;
}

double grammar_nats_from_start(const struct grammar *g, const uint16_t *tokens, size_t n)
{
    struct reading r = {g, tokens, n};
    struct place p = {.depth = 0};
    return -read_on(&r, &p, 0);
}

double grammar_nats(const struct grammar *g, const uint16_t *tokens, size_t n)
{
    struct reading r = {g, tokens, n};
    struct place p = {.depth = 0};
    memset(p.held, UNKNOWN, sizeof p.held);
    struct place start = p;
    double sum = add_logs(read_on(&r, &start, 0), begin_in_rule(&r, &p, 0, 0));
    return log(g->entropy.tokens) - sum;
}
