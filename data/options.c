#include "data/options.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define K           1e3
#define M           1e6
#define G           1e9
#define HELLASWAG   "dev/data/hellaswag/hellaswag_val.bin"
#define ONE_PROCESS "this program is one process"
#define PLANNING    "Memory and planning"

#define AT(field) offsetof(struct options, field)
// clang-format off
#define ROW(name, s, type, value, choices, initial, min, max, field, automatic, saved, help) \
    {name, s, type, value, choices, initial, min, max, AT(field), automatic, saved, GROUP, help}
#define SWITCH(name, s, field, saved, help) \
    ROW(name, s, OPTION_SWITCH, NULL, NULL, "0", 0, 1, field, false, saved, help)
#define INT(name, s, field, initial, min, max, saved, help) \
    ROW(name, s, OPTION_INT, "N", NULL, initial, min, max, field, false, saved, help)
#define AUTO(name, s, field, initial, min, max, help) \
    ROW(name, s, OPTION_INT, "N", NULL, initial, min, max, field, true, true, help)
#define BYTES(name, field, initial, help) \
    ROW(name, NULL, OPTION_INT, "BYTES", NULL, initial, 1, 0x1p50, field, true, false, help)
#define REAL(name, s, field, initial, min, max, help) \
    ROW(name, s, OPTION_REAL, "X", NULL, initial, min, max, field, false, true, help)
#define TEXT(name, s, field, value, initial, min, saved, help) \
    ROW(name, s, OPTION_TEXT, value, NULL, initial, min, OPTION_TEXT_MAX - 1, field, false, saved, \
        help)
#define CHOICE(name, s, field, choices, initial, saved, help) \
    ROW(name, s, OPTION_CHOICE, "NAME", choices, initial, 0, 0, field, false, saved, help)
// Without a field of its own.
#define LLMC(s, type, note) \
    {NULL, s, type, "V", NULL, "", 0, 0, 0, false, false, GROUP, note}
// clang-format on

// In the order of the enums in options.h.
static const char *const schedules[] = {"cosine", "linear", "constant", "wsd", NULL};
static const char *const devices[] = {"auto", "cpu", "cuda", NULL};
static const char *const dtypes[] = {"fp32", "bf16", NULL};
static const char *const formats[] = {"text", "json", NULL};
static const char *const off_on[] = {"0", "1", NULL};

static const struct option_row table[] = {
#define GROUP "Data and model"
    TEXT("train", "i", train, "GLOB", "data/stories_train*.bin", 1, true,
         "token shards to train on; the default is the corpus that `make corpus` writes"),
    TEXT("val", "j", val, "GLOB", "data/stories_val*.bin", 1, true, "token shards to validate on"),
    TEXT("model", "e", model, "MODEL", "d6", 1, true,
         "dN or gpt2:dN (N layers), gpt3:cN (N channels), or a model file"),
    AUTO("layers", NULL, layers, "the model's", 1, 1 * K, "number of blocks"),
    AUTO("hidden", NULL, hidden, "the model's", 1, 65536, "channels"),
    AUTO("heads", NULL, heads, "the model's", 1, 1024, "attention heads; must divide --hidden"),
    AUTO("vocab", NULL, vocab, "the data's", 2, 1 << 24, "vocabulary, in tokens"),
    AUTO("max-seq", NULL, max_seq, "the model's", 1, 1 << 20, "positions that the model has"),
#undef GROUP
#define GROUP "Batch and length of the run"
    ROW("micro-batch", "b", OPTION_INT, "N", NULL, "4", 1, 65536, micro_batch, true, true,
        "rows computed at one time; auto: as many as make --total-batch fastest"),
    AUTO("seq", "t", seq, "min(1024, the model's)", 1, 1 << 20, "tokens in a row"),
    AUTO("total-batch", "d", total_batch, "micro-batch * seq", 1, 1 * G,
         "tokens in a step; more than micro-batch * seq accumulates gradients"),
    AUTO("steps", "x", steps, "one epoch", 0, 1 * G, "steps of the whole run; 0: only validate"),
#undef GROUP
#define GROUP "Optimizer"
    REAL("lr", "l", lr, "3e-4", 0, 10, "learning rate"),
    INT("warmup", "u", warmup, "0", 0, 1 * G, true, "steps in which it rises from 0"),
    REAL("lr-final", "q", lr_final, "1.0", 0, 1, "fraction of it that is left at the end"),
    CHOICE("schedule", "k", schedule, schedules, "cosine", true,
           "how it falls; wsd: constant, then down in the last fifth"),
    REAL("weight-decay", "c", weight_decay, "0", 0, 10, "decay of matrices"),
    REAL("beta1", NULL, beta1, "0.9", 0, 0.999999, "decay of the first moment"),
    REAL("beta2", NULL, beta2, "0.95", 0, 0.999999, "decay of the second moment"),
    REAL("eps", NULL, eps, "1e-8", 1e-30, 1, "added to the root of the second moment"),
    REAL("clip", NULL, clip, "1.0", 0, 1e6, "largest gradient norm; 0: no clipping"),
    SWITCH("no-guard", NULL, no_guard, true, "update even if the norm is not finite"),
    REAL("skip-loss-z", "sl", skip_loss_z, "0", 0, 1e6,
         "skip an update whose loss is X standard deviations above the last ones; 0: never"),
    REAL("skip-norm-z", "sg", skip_norm_z, "0", 0, 1e6, "the same by gradient norm; 0: never"),
    SWITCH("overfit-batch", "a", overfit_batch, true, "train on the first batch alone"),
#undef GROUP
#define GROUP "Validation and samples"
    INT("val-every", "v", val_every, "20", 0, 1 * G, true, "steps between validations; 0: none"),
    INT("val-batches", "m", val_batches, "20", 1, 1 * G, true, "micro-batches of a validation"),
    TEXT("eval", NULL, eval, "FILE", "", 0, true,
         "HellaSwag-style file, scored at every validation; none by default"),
    INT("sample-every", "s", sample_every, "20", 0, 1 * G, true,
        "steps between samples of text; 0: none"),
    INT("sample-tokens", "g", sample_tokens, "64", 0, 1 * M, true, "length of a sample"),
    REAL("temperature", NULL, temperature, "1.0", 0, 100, "0: always the likeliest token"),
    INT("top-k", NULL, top_k, "0", 0, 1 << 24, true, "draw from the K likeliest tokens; 0: all"),
    TEXT("prompt", NULL, prompt, "TEXT", "", 0, true,
         "what a sample begins with; end-of-text by default"),
    SWITCH("generate", NULL, generate, false,
           "no training: print --sample-tokens tokens of --model, after --prompt"),
#undef GROUP
#define GROUP "Output"
    TEXT("out", "o", out, "DIR", "", 0, false,
         "directory for log, metrics and checkpoints; none by default"),
    INT("checkpoint-every", "n", checkpoint_every, "0", 0, 1 * G, true,
        "steps between checkpoints; 0: none"),
    INT("keep", "nk", keep, "0", 0, 1 * M, true, "checkpoints to keep; 0: all"),
    INT("major-every", "nm", major_every, "0", 0, 1 * G, true,
        "checkpoints of multiples of so many steps are kept for ever; 0: none"),
    SWITCH("resume", "y", resume, false, "go on from the newest good checkpoint in --out"),
    SWITCH("log-json", NULL, log_json, false, "metrics as JSON lines on stdout"),
#undef GROUP
#define GROUP "Machine"
    CHOICE("device", NULL, device, devices, "auto", false,
           "where to compute; auto: a GPU if there is one"),
    INT("threads", NULL, threads, "0", 0, 4096, false, "CPU threads; 0: all cores"),
    CHOICE("dtype", NULL, dtype, dtypes, "fp32", true,
           "parameters and gradients; on cuda bf16 unless it is given"),
    INT("seed", NULL, seed, "1337", 0, 4294967295.0, true, "of weights, data order and samples"),
    INT("head-rows", NULL, head_rows, "256", 1, 1 << 20, true,
        "rows of logits that exist at one time; on cuda 2048 unless it is given"),
    SWITCH("fast-reduce", NULL, fast_reduce, true,
           "several ranks: sum gradients by the library's own reduce-scatter; faster on some "
           "networks, but not in general the same bits from run to run"),
    SWITCH("help", NULL, help, false, "print this"),
    SWITCH("version", NULL, version, false, "print the version"),
#undef GROUP
#define GROUP PLANNING
    BYTES("device-memory", device_memory, "no cap",
          "cap on device memory; what does not fit moves to the host and back as it is used"),
    BYTES("host-memory", host_memory, "what is free", "cap on host memory, pinned memory included"),
    BYTES("pinned-memory", pinned_memory, "what may be locked", "cap on pinned host memory"),
    ROW("link-gb-per-s", NULL, OPTION_REAL, "X", NULL, "0", 0, 1e6, link_gb_per_s, false, false,
        "speed of the emulated link under --device-memory, each direction; 0: unlimited"),
    TEXT("machine", NULL, machine, "FILE", "", 0, false,
         "plan for the machine that a file describes (scripts/machines/) instead of measuring"),
    TEXT(
        "emulate", NULL, emulate, "FILE[:N]", "", 0, false,
        "run in slow motion, every lane paced as on that machine; N: the model is a miniature, 1:N "
        "in hidden and head size, sequence and vocabulary"),
    INT("host-threads", NULL, host_threads, "0", 0, 4096, false,
        "CPU threads of the optimizer on the host; 0: all cores"),
    TEXT("policy", NULL, policy, "NAME", "auto", 1, false,
         "how to plan: auto, autohete, resident, zero-offload, twin-flow:R, zero-infinity, "
         "stronghold or patrickstar"),
    SWITCH(
        "speculate", NULL, speculate, false,
        "the host's Adam need not wait for the norm: it writes beside the old state, and does it "
        "again where something is clipped or skipped; the same bits, more host memory"),
    TEXT("plan", NULL, plan, "FILE", "", 0, false, "follow the plan in a file"),
    TEXT("save-plan", NULL, save_plan, "FILE", "", 0, false, "write the plan to a file"),
    SWITCH("plan-only", NULL, plan_only, false,
           "no training: print what every policy would need and how fast it would be"),
    ROW("zero", "z", OPTION_INT, "N", NULL, "the planner's", 0, 3, zero, true, false,
        "ZeRO stage, with several ranks; 1 and 2 are the same here; at every stage, what has its "
        "optimizer on the host is sharded"),
    INT("gpus", NULL, gpus, "1", 1, 1024, false, "GPUs of each machine, for --plan-only"),
    INT("nodes", NULL, nodes, "1", 1, 1024, false, "machines, for --plan-only"),
    CHOICE("format", NULL, format, formats, "text", false, "of what --plan-only prints"),
    INT("report", NULL, report, "0", 0, 1 * G, false,
        "steps between reports of predicted against measured times; 0: one at the end"),
    TEXT("trace", NULL, trace, "FILE", "", 0, false,
         "write the lanes' schedule as a Chrome or Perfetto trace (JSON)"),
    TEXT("timeline", NULL, timeline, "FILE", "", 0, false,
         "draw the predicted and the measured schedule (SVG)"),
    INT("chaos", NULL, chaos, "0", 0, 4294967295.0, false,
        "delay and reorder all that may be, by this seed: a test of the scheduler; 0: don't"),
#undef GROUP
#define GROUP "Flags of llm.c"
    LLMC("h", OPTION_HELLASWAG, "1: --eval " HELLASWAG ", if it is there"),
    LLMC("f", OPTION_LLMC, "arithmetic follows from --dtype"),
    LLMC("ge", OPTION_LLMC, "the kernels decide what is fused"),
    LLMC("lg", OPTION_LLMC, "there is no GPU to report on"),
    LLMC("r", OPTION_LLMC, "what is recomputed is not chosen by hand"),
    LLMC("w", OPTION_LLMC, "fp32 master weights are always kept"),
    LLMC("pn", OPTION_LLMC, ONE_PROCESS),
    LLMC("pr", OPTION_LLMC, ONE_PROCESS),
    LLMC("pg", OPTION_LLMC, ONE_PROCESS),
    LLMC("pi", OPTION_LLMC, ONE_PROCESS),
    LLMC("pm", OPTION_LLMC, ONE_PROCESS),
    LLMC("pf", OPTION_LLMC, ONE_PROCESS),
    LLMC("pp", OPTION_LLMC, ONE_PROCESS),
    LLMC("ps", OPTION_LLMC, ONE_PROCESS),
#undef GROUP
};

enum { ROWS = sizeof table / sizeof *table };
_Static_assert(sizeof table / sizeof *table <= sizeof((struct options *)0)->given,
               "struct options has too few given[]");

const struct option_row *options_table(size_t *rows)
{
    *rows = ROWS;
    return table;
}

static const struct option_row *row_by_name(const char *name, size_t length)
{
    for (size_t i = 0; i < ROWS; i++) {
        if (table[i].name && strlen(table[i].name) == length &&
            memcmp(table[i].name, name, length) == 0) {
            return &table[i];
        }
    }
    return NULL;
}

bool options_given(const struct options *o, const char *name)
{
    const struct option_row *row = row_by_name(name, strlen(name));
    assert(row);
    return o->given[row - table];
}

// ---- numbers as text ----------------------------------------------------------------------------

static const struct {
    const char *suffix;
    int64_t factor;
} units[] = {{"Gi", 1 << 30}, {"Mi", 1 << 20}, {"Ki", 1 << 10}, {"G", 1000000000},
             {"M", 1000000},  {"K", 1000},     {"", 1}};

// Beyond int64: the nearest end of its range, which no option allows.
static bool parse_int(const char *text, int64_t *out)
{
    const char *digits = text + (*text == '-');
    if (*digits < '0' || *digits > '9') {
        return false;
    }
    char *end;
    long long n = strtoll(text, &end, 10); // at the ends of its range if beyond
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].suffix) == 0) {
            if (__builtin_mul_overflow(n, units[i].factor, out)) {
                *out = n < 0 ? INT64_MIN : INT64_MAX;
            }
            return true;
        }
    }
    return false;
}

static bool parse_real(const char *text, double *out)
{
    // strtod alone would take hexadecimal, inf, nan and leading blanks.
    if (*text == '\0' || strspn(text, "0123456789+-.eE") != strlen(text)) {
        return false;
    }
    char *end;
    *out = strtod(text, &end);
    return *end == '\0' && end != text; // an infinity (1e999) is out of range everywhere
}

static void limit_text(const struct option_row *row, double limit, char text[32])
{
    int64_t n = (int64_t)limit;
    if (row->type == OPTION_REAL || n < 10000) {
        snprintf(text, 32, "%.10g", limit);
        return;
    }
    for (size_t i = 0;; i++) {
        if (n % units[i].factor == 0) {
            snprintf(text, 32, "%lld%s", (long long)(n / units[i].factor), units[i].suffix);
            return;
        }
    }
}

// The default is OPTION_AUTO, and `initial` says what that comes to.
static bool in_words(const struct option_row *row)
{
    return row->automatic && (row->initial[0] < '0' || row->initial[0] > '9');
}

static void allowed_text(const struct option_row *row, char text[128])
{
    char min[32], max[32];
    switch (row->type) {
    case OPTION_INT:
    case OPTION_REAL:
        limit_text(row, row->min, min);
        limit_text(row, row->max, max);
        snprintf(text, 128, "%s to %s%s%s%s", min, max, row->automatic ? ", or auto" : "",
                 in_words(row) ? ": " : "", in_words(row) ? row->initial : "");
        break;
    case OPTION_TEXT:
        snprintf(text, 128, "%.0f to %.0f bytes", row->min, row->max);
        break;
    case OPTION_CHOICE:
        for (size_t i = 0, n = 0; row->choices[i]; i++) {
            n += (size_t)snprintf(text + n, 128 - n, "%s%s", i ? "|" : "", row->choices[i]);
        }
        break;
    case OPTION_SWITCH:
    case OPTION_HELLASWAG:
        snprintf(text, 128, "0 or 1");
        break;
    case OPTION_LLMC:
        snprintf(text, 128, "any value");
    }
}

// ---- one value ----------------------------------------------------------------------------------

static int choice_index(const char *const *choices, const char *text)
{
    for (int i = 0; choices[i]; i++) {
        if (strcmp(choices[i], text) == 0) {
            return i;
        }
    }
    return -1;
}

static void label_text(const struct option_row *row, char text[64])
{
    if (row->name) {
        snprintf(text, 64, row->short_name ? "--%s (-%s)" : "--%s", row->name, row->short_name);
    } else {
        snprintf(text, 64, "-%s", row->short_name);
    }
}

static int refuse_value(const struct option_row *row, const char *text, const char *what,
                        struct error *err)
{
    char label[64], allowed[128];
    label_text(row, label);
    allowed_text(row, allowed);
    return error_set(err, STATUS_USAGE, "%s: '%.200s' %s (allowed: %s)", label, text, what,
                     allowed);
}

static int set_int(const struct option_row *row, int64_t *field, const char *text,
                   struct error *err)
{
    int64_t n = OPTION_AUTO;
    bool automatic = row->automatic && strcmp(text, "auto") == 0;
    if (!automatic && !parse_int(text, &n)) {
        return refuse_value(row, text, "is not a whole number", err);
    }
    if (!(row->automatic && n == OPTION_AUTO) && (n < row->min || n > row->max)) {
        return refuse_value(row, text, "is out of range", err);
    }
    *field = n;
    return STATUS_OK;
}

static int set_real(const struct option_row *row, double *field, const char *text,
                    struct error *err)
{
    double x;
    if (!parse_real(text, &x)) {
        return refuse_value(row, text, "is not a number", err);
    }
    if (x < row->min || x > row->max) {
        return refuse_value(row, text, "is out of range", err);
    }
    *field = x;
    return STATUS_OK;
}

static int set_text(const struct option_row *row, char *field, const char *text, struct error *err)
{
    size_t length = strlen(text);
    if (length < row->min || length > row->max) {
        return refuse_value(row, text, length ? "is too long" : "is empty", err);
    }
    memcpy(field, text, length + 1);
    return STATUS_OK;
}

static int set_value(struct options *o, const struct option_row *row, const char *text,
                     struct error *err)
{
    void *field = (char *)o + row->offset;
    int index;
    switch (row->type) {
    case OPTION_INT:
        return set_int(row, field, text, err);
    case OPTION_REAL:
        return set_real(row, field, text, err);
    case OPTION_TEXT:
        return set_text(row, field, text, err);
    case OPTION_CHOICE:
        index = choice_index(row->choices, text);
        if (index < 0) {
            return refuse_value(row, text, "is none of the choices", err);
        }
        *(int *)field = index;
        return STATUS_OK;
    case OPTION_SWITCH:
    case OPTION_HELLASWAG:
        index = choice_index(off_on, text);
        if (index < 0) {
            return refuse_value(row, text, "is neither 0 nor 1", err);
        }
        if (row->type == OPTION_SWITCH) {
            *(bool *)field = index;
        }
        return STATUS_OK;
    case OPTION_LLMC:
        break;
    }
    return STATUS_OK;
}

// The fewest digits that give the same number.
static void real_text(double x, char text[32])
{
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, x);
        if (strtod(text, NULL) == x) {
            return;
        }
    }
}

// The present value as text that set_value() takes.
static void get_value(const struct options *o, const struct option_row *row,
                      char text[OPTION_TEXT_MAX])
{
    const void *field = (const char *)o + row->offset;
    switch (row->type) {
    case OPTION_INT:
        snprintf(text, OPTION_TEXT_MAX, "%lld", (long long)*(const int64_t *)field);
        break;
    case OPTION_REAL:
        real_text(*(const double *)field, text);
        break;
    case OPTION_TEXT:
        memcpy(text, field, strlen(field) + 1);
        break;
    case OPTION_CHOICE:
        snprintf(text, OPTION_TEXT_MAX, "%s", row->choices[*(const int *)field]);
        break;
    case OPTION_SWITCH:
        snprintf(text, OPTION_TEXT_MAX, "%d", *(const bool *)field);
        break;
    case OPTION_HELLASWAG:
    case OPTION_LLMC:
        text[0] = '\0';
    }
}

const char *options_choice(const struct options *o, const char *name)
{
    const struct option_row *row = row_by_name(name, strlen(name));
    assert(row && row->type == OPTION_CHOICE);
    return row->choices[*(const int *)((const char *)o + row->offset)];
}

// ---- the command line ---------------------------------------------------------------------------

// Edit distance in which two neighbours that changed places count once (Damerau, restricted).
static size_t distance(const char *a, const char *b)
{
    enum { LONGEST = 32 };
    size_t na = strlen(a), nb = strlen(b);
    size_t d[LONGEST + 1][LONGEST + 1];
    if (na > LONGEST || nb > LONGEST) {
        return LONGEST;
    }
    for (size_t i = 0; i <= na; i++) {
        for (size_t j = 0; j <= nb; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            size_t best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            best = d[i - 1][j] + 1 < best ? d[i - 1][j] + 1 : best;
            best = d[i][j - 1] + 1 < best ? d[i][j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                d[i - 2][j - 2] + 1 < best) {
                best = d[i - 2][j - 2] + 1;
            }
            d[i][j] = best;
        }
    }
    return d[na][nb];
}

static int refuse_option(const char *arg, struct error *err)
{
    char name[64];
    const char *begin = arg + strspn(arg, "-");
    snprintf(name, sizeof name, "%.*s", (int)strcspn(begin, "="), begin);
    const char *nearest = NULL;
    size_t least = strlen(name) / 3 + 2;
    for (size_t i = 0; i < ROWS; i++) {
        size_t d = table[i].name ? distance(name, table[i].name) : least;
        if (d < least) {
            least = d;
            nearest = table[i].name;
        }
    }
    return error_set(err, STATUS_USAGE, "unknown option '%.200s'%s%s (see --help)", arg,
                     nearest ? ": did you mean --" : "", nearest ? nearest : "");
}

// The row that an argument names, and the value in it behind '=', if any.
static const struct option_row *row_of(const char *arg, const char **value)
{
    *value = NULL;
    if (strncmp(arg, "--", 2) == 0) {
        size_t length = strcspn(arg, "=");
        *value = arg[length] ? arg + length + 1 : NULL;
        return row_by_name(arg + 2, length - 2);
    }
    for (size_t i = 0; arg[0] == '-' && i < ROWS; i++) {
        if (table[i].short_name && strcmp(table[i].short_name, arg + 1) == 0) {
            return &table[i];
        }
    }
    return NULL;
}

static void add_note(struct options *o, const char *flag, const char *value, const char *note)
{
    if (o->note_count < (int)(sizeof o->notes / sizeof *o->notes)) {
        snprintf(o->notes[o->note_count++], sizeof *o->notes, "-%s %.40s is ignored: %s", flag,
                 value, note);
    }
}

// llm.c's -h 1 evaluates a file of a fixed name if it is there; an explicit --eval wins over it.
static void apply_hellaswag(struct options *o, const char *value)
{
    const struct option_row *eval = row_by_name("eval", 4);
    if (!value || o->given[eval - table]) {
        return;
    }
    if (strcmp(value, "1") == 0 && access(HELLASWAG, R_OK) != 0) {
        add_note(o, "h", value, HELLASWAG " is not here (name a file with --eval)");
        return;
    }
    snprintf(o->eval, sizeof o->eval, "%s", strcmp(value, "1") == 0 ? HELLASWAG : "");
    o->given[eval - table] = 1;
}

// Has it a value that is not its default?
static bool asks_for(const struct options *o, const struct option_row *row)
{
    char value[OPTION_TEXT_MAX];
    if (row->automatic && in_words(row)) {
        return *(const int64_t *)((const char *)o + row->offset) != OPTION_AUTO;
    }
    get_value(o, row, value);
    return strcmp(value, row->initial) != 0;
}

// What no run can do at once, or what one of them would make the other do nothing.
static const struct {
    const char *name, *other, *why;
} excluded[] = {
    {"machine", "emulate", "--emulate plans for the machine that it paces"},
    {"plan", "policy", "the plan in the file is followed as it is; leave one of them out"},
    {"plan-only", "generate", "one plans a training run, the other runs a trained model"},
    {"plan-only", "resume",
     "it plans without a run; give --model FILE for a trained model's shape"},
    {"plan-only", "plan",
     "it lists every policy's plan; without it the plan's figures are printed"},
    {"plan-only", "policy", "it lists every policy; without it the one is used"},
    {"plan-only", "save-plan",
     "it lists every policy's plan; without it the chosen one is written"},
    {"plan-only", "trace", "no step is made that could be drawn"},
    {"plan-only", "timeline", "no step is made that could be drawn"},
    {"plan-only", "chaos", "no step is made that could be disturbed"},
    {"zero", "plan", "the plan in the file says what is sharded"},
    {"speculate", "plan", "the plan in the file says whether (its line speculate)"},
    {"speculate", "emulate",
     "whether it holds depends on the training, which a miniature does not stand for"},
};

// An option that says something about another one.
static const struct {
    const char *name, *needs;
} needed[] = {{"format", "plan-only"}, {"gpus", "plan-only"}, {"nodes", "plan-only"}};

static int check_pairs(const struct options *o, struct error *err)
{
    for (size_t i = 0; i < sizeof excluded / sizeof *excluded; i++) {
        const char *name = excluded[i].name, *other = excluded[i].other;
        if (asks_for(o, row_by_name(name, strlen(name))) &&
            asks_for(o, row_by_name(other, strlen(other)))) {
            return error_set(err, STATUS_USAGE, "--%s and --%s exclude each other: %s", name, other,
                             excluded[i].why);
        }
    }
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        const char *name = needed[i].name, *needs = needed[i].needs;
        if (asks_for(o, row_by_name(name, strlen(name))) &&
            !asks_for(o, row_by_name(needs, strlen(needs)))) {
            return error_set(err, STATUS_USAGE, "--%s means nothing without --%s", name, needs);
        }
    }
    return STATUS_OK;
}

// Options whose values are about planning.
static bool bounds_memory(const char *name)
{
    static const char *const names[] = {"device-memory", "host-memory", "pinned-memory",
                                        "link-gb-per-s", "host-threads"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

static int check_planning(const struct options *o, struct error *err)
{
    bool planned = o->plan_only || o->machine[0] || o->device_memory != OPTION_AUTO;
    if (o->link_gb_per_s > 0 && !planned && !o->emulate[0]) {
        return error_set(err, STATUS_USAGE,
                         "--link-gb-per-s %g means nothing without a device behind a link: give "
                         "--device-memory too",
                         o->link_gb_per_s);
    }
    if (o->speculate && o->clip <= 0 && o->no_guard && o->skip_loss_z <= 0 && o->skip_norm_z <= 0) {
        return error_set(err, STATUS_USAGE,
                         "--speculate means nothing with --clip 0 --no-guard: no update waits");
    }
    if (o->speculate && strcmp(o->policy, "auto") != 0) {
        return error_set(err, STATUS_USAGE,
                         "--speculate means nothing with --policy %s: only auto does", o->policy);
    }
    if (o->micro_batch == OPTION_AUTO && (o->plan[0] || o->emulate[0])) {
        return error_set(err, STATUS_USAGE,
                         "--micro-batch auto and --%s exclude each other: %s; give the rows of a "
                         "micro-batch (-b N)",
                         o->plan[0] ? "plan" : "emulate",
                         o->plan[0] ? "a plan is for one micro-batch"
                                    : "what is emulated is one miniature of one run");
    }
    for (size_t i = 0; i < ROWS && o->generate; i++) {
        if (strcmp(table[i].group, PLANNING) == 0 && asks_for(o, &table[i]) &&
            !bounds_memory(table[i].name)) {
            return error_set(err, STATUS_USAGE,
                             "--%s and --generate exclude each other: only training is planned, a "
                             "trained model runs within its memory with as few blocks streamed as "
                             "it takes",
                             table[i].name);
        }
    }
    return STATUS_OK;
}

static int check_combination(const struct options *o, struct error *err)
{
    if (o->out[0] == '\0' && (o->resume || o->checkpoint_every > 0)) {
        return error_set(err, STATUS_USAGE, "%s needs a directory: --out DIR (-o)",
                         o->resume ? "--resume (-y)" : "--checkpoint-every (-n)");
    }
    return check_pairs(o, err) ? err->status : check_planning(o, err);
}

static void set_defaults(struct options *o)
{
    memset(o, 0, sizeof *o);
    for (size_t i = 0; i < ROWS; i++) {
        struct error err;
        const char *initial = in_words(&table[i]) ? "auto" : table[i].initial;
        int status = table[i].name ? set_value(o, &table[i], initial, &err) : STATUS_OK;
        assert(status == STATUS_OK);
        (void)status;
    }
}

// Finds the value of the option at argv[*i] and moves *i past it.
static int take_value(const struct option_row *row, const char **value, int argc, char *const *argv,
                      int *i, struct error *err)
{
    const char *unused;
    if (*value) {
        return STATUS_OK;
    }
    if (*i + 1 < argc && !row_of(argv[*i + 1], &unused)) {
        // A switch alone means 1; -h alone is what everybody types for help.
        bool optional = row->type == OPTION_SWITCH || row->type == OPTION_HELLASWAG;
        if (!optional || argv[*i + 1][0] != '-') {
            *value = argv[++*i];
            return STATUS_OK;
        }
    }
    if (row->type == OPTION_SWITCH || row->type == OPTION_HELLASWAG) {
        *value = "1";
        return STATUS_OK;
    }
    char label[64], allowed[128];
    label_text(row, label);
    allowed_text(row, allowed);
    return error_set(err, STATUS_USAGE, "%s: its value is missing (allowed: %s)", label, allowed);
}

static int parse(struct options *o, int argc, char *const *argv, struct error *err)
{
    const char *hellaswag = NULL;
    set_defaults(o);
    for (int i = 1; i < argc; i++) {
        const char *value, *arg = argv[i];
        const struct option_row *row = row_of(arg, &value);
        if (!row) {
            return refuse_option(arg, err);
        }
        int before = i;
        if (take_value(row, &value, argc, argv, &i, err) || set_value(o, row, value, err)) {
            return err->status;
        }
        if (row->type == OPTION_HELLASWAG) {
            o->help = before == i;
            hellaswag = value;
        } else if (row->type == OPTION_LLMC && !o->given[row - table]) {
            add_note(o, row->short_name, value, row->help);
        }
        o->given[row - table] = 1;
        o->begin_if_none = o->resume && (o->begin_if_none || strcmp(arg, "-y") == 0);
        if (o->help || o->version) {
            return STATUS_OK;
        }
    }
    apply_hellaswag(o, hellaswag);
    return check_combination(o, err);
}

// Messages quote what the user typed; they stay one line whatever that was.
static int in_one_line(int status, struct error *err)
{
    for (char *c = err->text; status && *c; c++) {
        if ((unsigned char)*c < ' ') {
            *c = '?';
        }
    }
    return status;
}

int options_parse(struct options *o, int argc, char *const *argv, struct error *err)
{
    return in_one_line(parse(o, argc, argv, err), err);
}

// ---- help ---------------------------------------------------------------------------------------

enum { HELP_INDENT = 34, HELP_WIDTH = 98 };

// Words of `text` behind column `column`, broken at HELP_WIDTH; returns the column reached.
static int print_words(FILE *out, const char *text, int column)
{
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", HELP_INDENT, "");
            column = HELP_INDENT;
        }
        column += fprintf(out, " %.*s", length, text);
        text += length;
        text += strspn(text, " ");
    }
    return column;
}

static void print_row(FILE *out, const struct option_row *row)
{
    char left[128], right[256], allowed[128] = "";
    snprintf(left, sizeof left, "  %s%-3s%s%s %s", row->short_name ? "-" : " ",
             row->short_name ? row->short_name : "", row->name ? "--" : "",
             row->name ? row->name : "", row->value ? row->value : "");
    int column = fprintf(out, "%-*s", HELP_INDENT, left);
    column = print_words(out, row->help, column);
    if (row->type == OPTION_SWITCH || row->type == OPTION_LLMC || row->type == OPTION_HELLASWAG) {
        fputc('\n', out);
        return;
    }
    if (row->type != OPTION_TEXT) {
        allowed_text(row, allowed);
        allowed[strcspn(allowed, ":")] = '\0';
    }
    snprintf(right, sizeof right, "[%s%s%s]", row->initial,
             row->initial[0] && allowed[0] ? "; " : "", allowed);
    if (strcmp(right, "[]") != 0) {
        print_words(out, right, column);
    }
    fputc('\n', out);
}

void options_help(FILE *out)
{
    fprintf(out, "Usage: train_gpt [OPTION [VALUE]] ...\n"
                 "Trains a GPT on token shards, or prints text that a trained one makes up.\n"
                 "--name value and --name=value are the same. [default; allowed values].\n"
                 "Whole numbers take K M G (powers of 1000) or Ki Mi Gi (powers of 1024).\n");
    for (size_t i = 0; i < ROWS; i++) {
        if (i == 0 || table[i].group != table[i - 1].group) {
            fprintf(out, "\n%s:\n", table[i].group);
        }
        print_row(out, &table[i]);
    }
}

// ---- in a training state ------------------------------------------------------------------------

static size_t escape(char *out, const char *text)
{
    size_t n = 0;
    for (; *text; text++) {
        if (*text == '\\' || *text == '\n') {
            out[n++] = '\\';
        }
        out[n++] = *text == '\n' ? 'n' : *text;
    }
    out[n] = '\0';
    return n;
}

// False if the text is too long or a backslash stands before anything but n and backslash.
static bool unescape(char out[OPTION_TEXT_MAX], const char *text, size_t length)
{
    size_t n = 0;
    for (size_t i = 0; i < length; i++) {
        char c = text[i];
        if (c == '\\') {
            c = ++i < length ? text[i] : '\0';
            if (c != 'n' && c != '\\') {
                return false;
            }
            c = c == 'n' ? '\n' : c;
        }
        if (c == '\0' || n == OPTION_TEXT_MAX - 1) {
            return false;
        }
        out[n++] = c;
    }
    out[n] = '\0';
    return true;
}

static size_t put_values(const struct options *o, bool (*wanted)(const struct option_row *),
                         char *text, size_t room)
{
    size_t used = 0;
    for (size_t i = 0; i < ROWS; i++) {
        if (!table[i].name || !wanted(&table[i])) {
            continue;
        }
        char value[OPTION_TEXT_MAX], escaped[2 * OPTION_TEXT_MAX];
        get_value(o, &table[i], value);
        escape(escaped, value);
        int n = snprintf(text + used, room - used, "%s=%s\n", table[i].name, escaped);
        if ((size_t)n >= room - used) {
            return 0;
        }
        used += (size_t)n;
    }
    return used;
}

static bool is_saved(const struct option_row *row)
{
    return row->saved;
}

size_t options_save(const struct options *o, char *text, size_t room)
{
    return put_values(o, is_saved, text, room);
}

static bool is_alike(const struct option_row *row)
{
    return strcmp(row->name, "threads") != 0 && strcmp(row->name, "host-threads") != 0;
}

size_t options_alike(const struct options *o, char *text, size_t room)
{
    return put_values(o, is_alike, text, room);
}

static int merge_line(struct options *o, const char *line, size_t length,
                      options_differ_fn *differs, void *ctx, struct error *err)
{
    const char *equals = memchr(line, '=', length);
    const struct option_row *row = equals ? row_by_name(line, (size_t)(equals - line)) : NULL;
    char value[OPTION_TEXT_MAX], present[OPTION_TEXT_MAX];
    if (!row || !row->saved || !unescape(value, equals + 1, (size_t)(line + length - equals - 1))) {
        return error_set(err, STATUS_FAIL,
                         "saved options: '%.*s' is no option of this version of the program",
                         (int)(length < 80 ? length : 80), line);
    }
    struct options saved = *o;
    if (set_value(&saved, row, value, err)) {
        char reason[sizeof err->text];
        memcpy(reason, err->text, sizeof reason);
        return error_set(err, STATUS_FAIL, "saved options: %.900s", reason);
    }
    if (!o->given[row - table]) {
        *o = saved;
        return STATUS_OK;
    }
    get_value(&saved, row, value);
    get_value(o, row, present);
    if (differs && strcmp(value, present) != 0) {
        differs(ctx, row->name, value, present);
    }
    return STATUS_OK;
}

int options_merge(struct options *o, const char *text, size_t length, options_differ_fn *differs,
                  void *ctx, struct error *err)
{
    struct options merged = *o;
    for (const char *line = text, *end = text + length; line < end;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((newline ? newline : end) - line);
        if (merge_line(&merged, line, n, differs, ctx, err)) {
            return in_one_line(err->status, err);
        }
        line += n + 1;
    }
    *o = merged;
    return STATUS_OK;
}
