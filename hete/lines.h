// lines.h - small text files of words: how plans (plan.h) and machines (machine.h) are read.
//
// A line is words between blanks; # begins a comment, lines without words are passed over. Errors
// begin with FILE:LINE. The files are written by people too, so whatever is in one gives an error,
// not a crash.
#ifndef HETE_LINES_H
#define HETE_LINES_H

#include "data/error.h"

#include <stddef.h>
#include <stdint.h>

#define LINES_BYTES_MAX ((size_t)1 << 20) // of a file
#define LINES_WORDS_MAX ((size_t)16)      // of a line

struct lines {
    const char *path;
    char *text, *next, *end;
    size_t number; // of the present line, from 1 on
    char *word[LINES_WORDS_MAX];
    size_t words;
};

// Reads the whole file. STATUS_FAIL: it cannot be read, is too large, or is no text.
int lines_open(struct lines *l, const char *path, struct error *err);
void lines_close(struct lines *l);

// The next line that has words; at the end of the file words is 0.
int lines_next(struct lines *l, struct error *err);

// STATUS_FAIL with "FILE:LINE: " before the message.
int lines_error(const struct lines *l, struct error *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

// A word as a number of the range, both ends included; `name` is what the error calls it.
int lines_int(const struct lines *l, const char *name, const char *word, uint64_t min, uint64_t max,
              uint64_t *out, struct error *err);
int lines_real(const struct lines *l, const char *name, const char *word, double min, double max,
               double *out, struct error *err);

#endif
