// lines.c - splits a small text file into lines of words, and says where an error is.
#include "hete/lines.h"
#include "data/files.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int lines_open(struct lines *l, const char *path, struct error *err)
{
    int fd;
    uint64_t bytes;
    *l = (struct lines){.path = path};
    if (file_open(path, &fd, &bytes, err)) {
        return err->status;
    }
    int status = STATUS_OK;
    if (bytes > LINES_BYTES_MAX) {
        status =
            error_set(err, STATUS_FAIL, "%s has %llu bytes: a file of this kind has %zu at most",
                      path, (unsigned long long)bytes, LINES_BYTES_MAX);
    } else if (!(l->text = malloc((size_t)bytes + 1))) {
        status = error_set(err, STATUS_FAIL, "%s: no memory for its %llu bytes", path,
                           (unsigned long long)bytes);
    } else {
        status = file_read_at(fd, path, l->text, (size_t)bytes, 0, err);
    }
    close(fd);
    if (!status && memchr(l->text, 0, (size_t)bytes)) {
        status = error_set(err, STATUS_FAIL, "%s is no text: it has bytes that are 0", path);
    }
    if (status) {
        lines_close(l);
        return status;
    }
    l->next = l->text;
    l->end = l->text + bytes;
    *l->end = '\0';
    return STATUS_OK;
}

void lines_close(struct lines *l)
{
    free(l->text);
    l->text = NULL;
}

int lines_next(struct lines *l, struct error *err)
{
    static const char blanks[] = " \t\r\v\f";
    l->words = 0;
    while (l->words == 0 && l->next < l->end) {
        char *line = l->next, *end = line + strcspn(line, "\n");
        l->next = end < l->end ? end + 1 : end;
        l->number++;
        *end = '\0';
        line[strcspn(line, "#")] = '\0';
        for (line += strspn(line, blanks); *line; line += strspn(line, blanks)) {
            if (l->words == LINES_WORDS_MAX) {
                return lines_error(l, err, "more than %zu words", LINES_WORDS_MAX);
            }
            l->word[l->words++] = line;
            line += strcspn(line, blanks);
            if (*line) {
                *line++ = '\0';
            }
        }
    }
    return STATUS_OK;
}

int lines_error(const struct lines *l, struct error *err, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    for (char *c = text; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == 127) {
            *c = '?'; // words of the file are quoted, and a message is one line
        }
    }
    return error_set(err, STATUS_FAIL, "%s:%zu: %s", l->path, l->number, text);
}

int lines_int(const struct lines *l, const char *name, const char *word, uint64_t min, uint64_t max,
              uint64_t *out, struct error *err)
{
    size_t digits = strspn(word, "0123456789");
    char *end;
    unsigned long long n = digits > 0 && digits < 20 ? strtoull(word, &end, 10) : 0;
    if (digits == 0 || word[digits]) {
        return lines_error(l, err, "%s '%.40s' is not a whole number (allowed: %llu to %llu)", name,
                           word, (unsigned long long)min, (unsigned long long)max);
    }
    if (digits >= 20 || n < min || n > max) {
        return lines_error(l, err, "%s %.40s is out of range (allowed: %llu to %llu)", name, word,
                           (unsigned long long)min, (unsigned long long)max);
    }
    *out = n;
    return STATUS_OK;
}

int lines_real(const struct lines *l, const char *name, const char *word, double min, double max,
               double *out, struct error *err)
{
    // strtod alone would take hexadecimal, inf and nan.
    char *end = NULL;
    double x = strspn(word, "0123456789+-.eE") == strlen(word) ? strtod(word, &end) : 0;
    if (!end || end == word || *end) {
        return lines_error(l, err, "%s '%.40s' is not a number (allowed: %.10g to %.10g)", name,
                           word, min, max);
    }
    if (!(x >= min && x <= max)) {
        return lines_error(l, err, "%s %.40s is out of range (allowed: %.10g to %.10g)", name, word,
                           min, max);
    }
    *out = x;
    return STATUS_OK;
}
