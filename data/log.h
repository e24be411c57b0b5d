// log.h - what a run tells: lines or a progress bar for the user, and three files for later.
//
// Called by train_gpt.c, from one thread. Files in the run's directory (none without one):
//
//     main.log       llm.c's lines: `s:0 tel:10.98`, `s:0 trl:7.35 lr:0.000300 norm:6.24`,
//                    `s:0 eval:0.29`
//     metrics.jsonl  one JSON object a line: {"step":0,"tokens":512,"loss":7.35,...} per training
//                    step, {"step":0,"tokens":0,"val_loss":10.98}, {"step":0,..,"eval":0.29}
//     loss.svg       training and validation loss against tokens (svg.h), rewritten atomically at
//                    every validation and at the end
//
// STEPS count from 0, as in llm.c: the training line of step s is the update s -> s+1, validation
// at step s comes before it. The user's line says `step s+1/steps`. "tokens" are those trained on
// when the line is written.
//
// RESUME. A run that goes on at step k repeats whatever is due at step k: the files are truncated
// before the first line of a step >= k, or that a kill left incomplete, whichever comes first. So
// the files of a run that was interrupted are the files of one that was not, but for times. Every
// line is one write() with O_APPEND.
//
// NaN and infinities are null in JSON, which has no word for them, and `nan` and `inf` elsewhere.
//
// MEMORY is fixed: curves are kept in at most CURVE_BUCKETS buckets, whose width doubles when they
// run out (svg.h), and are rebuilt from metrics.jsonl on resume. Nothing is allocated per step.
#ifndef DATA_LOG_H
#define DATA_LOG_H

#include "data/error.h"
#include "data/svg.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct log_config {
    const char *dir;   // NULL: no files
    uint64_t next;     // first step of this run: 0, or where it resumes
    uint64_t steps;    // of the whole run
    bool bar;          // a progress bar instead of a line per step (out is a terminal)
    bool json;         // the lines of metrics.jsonl on stdout too
    FILE *out;         // lines and bar: stdout, or stderr if JSON goes to stdout
    const char *dtype; // what "MFU" is said of, "bf16"; "": just "MFU"
    double floor;      // a loss to draw as a line into loss.svg, with its label; 0: none
    const char *floor_label;
};

struct log_step {
    uint64_t step;
    uint64_t tokens; // trained on, this step included
    double loss, norm, lr;
    double ms;           // of this step
    double mfu;          // fraction of the peak; negative: not known
    double tokens_per_s; // smoothed or not, as the caller likes
    bool skipped;        // no update was made (outlier, or a norm that is not finite)
};

struct log {
    struct log_config config;
    int main_fd, metrics_fd; // -1: no files
    struct curve train, val;
    double last_val; // NaN: none yet
    // When the first step of this run was done (0: not yet), and how long one takes since then,
    // validation and all included (0: not known).
    uint64_t first_step, first_ns;
    double s_per_step;
    bool bar_shown;  // it is on the screen
    uint64_t bar_ns; // when it was last drawn
    char svg_path[PATH_MAX];
};

// Opens or begins the files. With next = 0 they begin empty. What `config` points to must outlive
// the log.
int log_open(struct log *log, const struct log_config *config, struct error *err);

int log_train(struct log *log, const struct log_step *s, struct error *err);
int log_val(struct log *log, uint64_t step, uint64_t tokens, double loss, struct error *err);
int log_eval(struct log *log, uint64_t step, uint64_t tokens, double accuracy, struct error *err);

// Takes the bar off the screen, so that other text can be printed; the next step draws it again.
void log_clear_bar(struct log *log);

// Draws the picture a last time, takes the bar away and closes. Also after an error.
int log_close(struct log *log, struct error *err);

// The pieces, for tests: each fills buf like snprintf, without a newline.
// `step  1/60 | loss 7.356158 | norm 6.2413 | lr 3.00e-04 | 12.34 ms | 45.6% bf16 MFU | 12345
// tok/s`
int log_step_line(char *buf, size_t size, const struct log_config *c, const struct log_step *s);
int log_bar_line(char *buf, size_t size, const struct log *log, const struct log_step *s,
                 int columns);

#endif
