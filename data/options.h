// options.h - the command line of ./train_gpt: one table, three readers.
//
// Called by train_gpt.c only. A single table (options.c) has a row per option: names, type,
// default, range, help. The parser, --help, the "options" section of a training state, and the test
// that the documentation names only options that exist all read that table, so they cannot
// disagree.
//
// SYNTAX. `--name value`, `--name=value`, `-x value`. Short names are llm.c's, with llm.c's meaning
// (-nk, -sl, ... have two letters; they do not combine). There are no positional arguments.
// Integers take a suffix: K M G = 10^3 10^6 10^9, Ki Mi Gi = 2^10 2^20 2^30. A switch takes an
// optional 0 or 1 (`--resume`, `--resume 1`, `-y 1` are the same). A later option wins over an
// earlier one.
//
// AUTOMATIC. Where the default depends on something else (the model, the data, the plan), the field
// holds OPTION_AUTO until train_gpt.c decides; `auto` on the command line says the same, and so
// does -1, as in llm.c (-x -1).
//
// RESUME. `--resume` where there is nothing to resume is an error. llm.c's run scripts give `-y 1`
// from the first run on, so that spelling sets begin_if_none too.
//
// llm.c's flags that have no meaning here (-f -ge -lg -r -w -p?) are accepted with their value;
// each leaves one line in `notes` for the user.
//
// Rejected: getopt_long (long options with one dash, no types, ranges or defaults, one-letter short
// names), a configuration file (a run script is one already).
#ifndef DATA_OPTIONS_H
#define DATA_OPTIONS_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
    OPTION_AUTO = -1,
    OPTIONS_MAX = 96,          // rows of the table at most
    OPTION_TEXT_MAX = 4096,    // bytes of a text value, its 0 included
    OPTIONS_SAVED_MAX = 65536, // bytes of all saved values as text
    OPTIONS_ALIKE_MAX = 262144 // of all values
};

enum schedule_choice { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD };
enum device_choice { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum dtype_choice { CHOICE_FP32, CHOICE_BF16 };
enum format_choice { FORMAT_TEXT, FORMAT_JSON };

struct options {
    // data and model
    char train[OPTION_TEXT_MAX], val[OPTION_TEXT_MAX]; // globs of token shards
    char model[OPTION_TEXT_MAX];                       // dN, gpt2:dN, gpt3:cN, or a model file
    int64_t layers, hidden, heads, vocab, max_seq;     // OPTION_AUTO: the model's
    // batch and length
    int64_t micro_batch; // rows; OPTION_AUTO: the planner's choice
    int64_t seq;         // tokens of a row; OPTION_AUTO: min(1024, the model's)
    int64_t total_batch; // tokens of a step; OPTION_AUTO: micro_batch * seq
    int64_t steps;       // of the whole run; 0: only validate; OPTION_AUTO: one epoch
    // optimizer
    double lr, lr_final; // lr_final: fraction of lr at the end
    int64_t warmup;      // steps
    int schedule;        // enum schedule_choice
    double weight_decay, beta1, beta2, eps;
    double clip;                     // 0: none
    bool no_guard;                   // update even if the norm is not finite
    double skip_loss_z, skip_norm_z; // 0: never skip
    bool overfit_batch;              // train on the first batch alone
    // validation and samples
    int64_t val_every, val_batches;      // steps (0: never), micro-batches
    char eval[OPTION_TEXT_MAX];          // "": none
    int64_t sample_every, sample_tokens; // steps (0: never), tokens
    double temperature;                  // 0: always the likeliest token
    int64_t top_k;                       // 0: all tokens
    char prompt[OPTION_TEXT_MAX];        // "": end-of-text
    // output
    char out[OPTION_TEXT_MAX]; // "": write nothing
    int64_t checkpoint_every;  // steps; 0: never
    int64_t keep, major_every; // 0: keep all; steps, 0: none
    bool resume;
    bool begin_if_none; // resume was asked for by -y: as in llm.c, no checkpoint means a new run
    bool log_json;
    // machine
    int device;      // enum device_choice
    int64_t threads; // 0: all cores
    int dtype;       // enum dtype_choice
    int64_t seed;
    int64_t head_rows; // rows of logits that exist at one time
    bool fast_reduce;  // ranks sum gradients by their library's own reductions
    // memory and planning; none of it is part of a training state
    int64_t device_memory;              // bytes; OPTION_AUTO: no cap
    int64_t host_memory, pinned_memory; // bytes; OPTION_AUTO: what the system has to give
    double link_gb_per_s;               // each direction; 0: unlimited
    char machine[OPTION_TEXT_MAX];      // machine file; "": this machine, measured
    char emulate[OPTION_TEXT_MAX];      // machine file, and perhaps :N; "": no pacing
    int64_t host_threads;               // 0: all cores
    char policy[OPTION_TEXT_MAX];       // checked by the planner
    bool speculate;                     // host Adam may, on nothing being clipped or skipped
    char plan[OPTION_TEXT_MAX];         // plan file to follow; "": none
    char save_plan[OPTION_TEXT_MAX];    // plan file to write; "": none
    bool plan_only;                     // print what every policy would do
    int64_t gpus, nodes;                // of --plan-only: GPUs of each of so many machines
    int64_t zero;                       // ZeRO stage; OPTION_AUTO: the planner's choice
    int format;                         // enum format_choice, of --plan-only
    int64_t report;                     // steps; 0: at the end only
    char trace[OPTION_TEXT_MAX];        // "": none
    char timeline[OPTION_TEXT_MAX];     // "": none
    int64_t chaos;                      // seed; 0: none
    // what to do
    bool generate, help, version;

    // Filled by the parser.
    unsigned char given[OPTIONS_MAX]; // by row of the table
    int note_count;
    char notes[24][160]; // one line each, for main to print
};

// Defaults, then the command line. STATUS_USAGE: one line with the option, the value, what is
// allowed. With --help or --version nothing after it is looked at.
int options_parse(struct options *o, int argc, char *const *argv, struct error *err);

// Was it on the command line? `name` is a long name that exists.
bool options_given(const struct options *o, const char *name);

// The help: all options by group, with defaults and ranges.
void options_help(FILE *out);

// Name of a choice option's present value ("cosine", "bf16").
const char *options_choice(const struct options *o, const char *name);

// ---- in a training state ----
//
// All values but those of one invocation (out, resume, device, threads, log-json, generate, ...) as
// lines `name=value`; backslash and newline in texts as \\ and \n. Numbers round-trip exactly.
// Returns the length, or 0 if `room` is too small (OPTIONS_SAVED_MAX always suffices).
size_t options_save(const struct options *o, char *text, size_t room);

// The same of every option that all ranks of a run have to be given alike: all but the numbers of
// threads. OPTIONS_ALIKE_MAX always suffices.
size_t options_alike(const struct options *o, char *text, size_t room);

// Takes the saved values for all options that were not given on the command line. Where a given one
// differs, the given one stays and `differs` is called (if not NULL), for the user to be told.
// Fails on a line that is not an option of this version or out of range; `o` is unchanged then.
typedef void options_differ_fn(void *ctx, const char *name, const char *saved, const char *given);
int options_merge(struct options *o, const char *text, size_t length, options_differ_fn *differs,
                  void *ctx, struct error *err);

// ---- the table, for tests ----
enum option_type {
    OPTION_SWITCH,    // bool
    OPTION_INT,       // int64_t
    OPTION_REAL,      // double
    OPTION_TEXT,      // char[OPTION_TEXT_MAX]
    OPTION_CHOICE,    // int, index into the choices
    OPTION_HELLASWAG, // llm.c's -h: 0 or 1
    OPTION_LLMC,      // a flag of llm.c that is ignored
};

struct option_row {
    const char *name;       // long, without dashes; NULL for a flag that only llm.c has
    const char *short_name; // without the dash, or NULL
    enum option_type type;
    const char *value;          // what the help calls it; NULL for a switch
    const char *const *choices; // of OPTION_CHOICE, NULL behind the last
    const char *initial;        // default as text, in words where it is automatic
    double min, max;            // of the value (TEXT: of its length), both included
    size_t offset;              // into struct options
    bool automatic;             // OPTION_AUTO is allowed
    bool saved;                 // part of a training state
    const char *group;          // heading in the help
    const char *help;           // or the note that a flag of llm.c leaves
};
const struct option_row *options_table(size_t *rows);

#endif
