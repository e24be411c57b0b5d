#include "data/log.h"
#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ull; // for %llu

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Some NaNs would print as "-nan".
static double plain(double x)
{
    return isnan(x) ? (double)NAN : x;
}

// ---- lines --------------------------------------------------------------------------------------

// A number in JSON that reads back exactly.
static const char *json_number(double x, char text[32])
{
    if (!isfinite(x)) {
        return "null";
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, x);
        if (strtod(text, NULL) == x) {
            break;
        }
    }
    return text;
}

static int log_step_json(char *buf, size_t size, const struct log_step *s)
{
    char loss[32], norm[32], lr[32], mfu[32];
    return snprintf(buf, size,
                    "{\"step\":%llu,\"tokens\":%llu,\"loss\":%s,\"norm\":%s,\"lr\":%s,\"ms\":%.3f,"
                    "\"tok_per_s\":%.1f,\"mfu\":%s,\"skipped\":%s}",
                    (ull)s->step, (ull)s->tokens, json_number(s->loss, loss),
                    json_number(s->norm, norm), json_number(s->lr, lr), s->ms, s->tokens_per_s,
                    json_number(s->mfu < 0 ? NAN : round(1e4 * s->mfu) / 1e4, mfu),
                    s->skipped ? "true" : "false");
}

static int step_words(char *buf, size_t size, const struct log_config *c, uint64_t step)
{
    int width = snprintf(NULL, 0, "%llu", (ull)c->steps);
    return snprintf(buf, size, "step %*llu/%llu", width, (ull)step, (ull)c->steps);
}

int log_step_line(char *buf, size_t size, const struct log_config *c, const struct log_step *s)
{
    char step[64], mfu[32] = "n/a";
    step_words(step, sizeof step, c, s->step + 1);
    if (s->mfu >= 0) {
        snprintf(mfu, sizeof mfu, "%.1f%%", 100 * s->mfu);
    }
    const char *dtype = c->dtype ? c->dtype : "";
    return snprintf(buf, size,
                    "%s | loss %f | norm %.4f | lr %.2e | %.2f ms | %s%s%s MFU | %.0f tok/s%s",
                    step, plain(s->loss), plain(s->norm), s->lr, s->ms, mfu, *dtype ? " " : "",
                    dtype, s->tokens_per_s, s->skipped ? " | skipped" : "");
}

static void time_words(double seconds, char text[32])
{
    if (!(seconds < 360000)) {
        snprintf(text, 32, "%.0f days", fmin(seconds / 86400, 1e9));
    } else if (seconds >= 3600) {
        snprintf(text, 32, "%dh%02dm", (int)seconds / 3600, (int)seconds / 60 % 60);
    } else if (seconds >= 60) {
        snprintf(text, 32, "%dm%02ds", (int)seconds / 60, (int)seconds % 60);
    } else {
        snprintf(text, 32, "%ds", (int)seconds);
    }
}

int log_bar_line(char *buf, size_t size, const struct log *log, const struct log_step *s,
                 int columns)
{
    enum { BAR_MIN = 8, BAR_MAX = 40 };
    char step[64], val[32] = "", left[48] = "", time[32], words[256], bar[BAR_MAX + 1];
    step_words(step, sizeof step, &log->config, s->step + 1);
    if (!isnan(log->last_val)) {
        snprintf(val, sizeof val, " | val %.3f", log->last_val);
    }
    if (log->s_per_step > 0 && log->config.steps > s->step) {
        time_words(log->s_per_step * (double)(log->config.steps - s->step - 1), time);
        snprintf(left, sizeof left, " | %s left", time);
    }
    double part = log->config.steps ? (double)(s->step + 1) / (double)log->config.steps : 1;
    part = fmin(part, 1);
    int length = snprintf(words, sizeof words, " %3d%% | %s | loss %.3f%s | %.0f tok/s%s",
                          (int)(100 * part), step, plain(s->loss), val, s->tokens_per_s, left);
    int room = columns - 1 - length - 2; // the last column would wrap in some terminals
    if (room < BAR_MIN) {
        return snprintf(buf, size, "%.*s", columns > 1 ? columns - 1 : 1, words + 1);
    }
    int width = room < BAR_MAX ? room : BAR_MAX, full = (int)(part * width);
    memset(bar, ' ', (size_t)width);
    memset(bar, '=', (size_t)full);
    if (full < width) {
        bar[full] = '>';
    }
    bar[width] = '\0';
    return snprintf(buf, size, "[%s]%s", bar, words);
}

// ---- the files, when a run begins ---------------------------------------------------------------

// Is the line part of what stays? Metrics that stay go into the curves.
typedef bool keep_fn(struct log *log, const char *line, size_t length);

static bool keep_main(struct log *log, const char *line, size_t length)
{
    (void)length;
    char *end;
    // What is not ours (a remark by hand) stays.
    return strncmp(line, "s:", 2) != 0 || strtoull(line + 2, &end, 10) < log->config.next;
}

static bool keep_metrics(struct log *log, const char *line, size_t length)
{
    json_t *object = json_loadb(line, length, 0, NULL);
    json_t *step = json_object_get(object, "step"), *tokens = json_object_get(object, "tokens");
    bool keep = json_is_integer(step) && json_integer_value(step) >= 0 &&
                (uint64_t)json_integer_value(step) < log->config.next;
    if (keep) {
        json_t *loss = json_object_get(object, "loss"), *val = json_object_get(object, "val_loss");
        uint64_t at = (uint64_t)json_integer_value(tokens);
        if (json_is_number(loss)) {
            curve_add(&log->train, at, json_number_value(loss));
        }
        if (json_is_number(val)) {
            curve_add(&log->val, at, json_number_value(val));
            log->last_val = json_number_value(val);
        }
    }
    json_decref(object);
    return keep;
}

// Truncates the file before its first line that does not stay.
static int cut(struct log *log, int fd, const char *path, keep_fn *keep, struct error *err)
{
    int copy = dup(fd);
    FILE *file = copy < 0 ? NULL : fdopen(copy, "r");
    if (!file) {
        if (copy >= 0) {
            close(copy);
        }
        return error_set(err, STATUS_FAIL, "cannot read %s: %s", path, strerror(errno));
    }
    char *line = NULL;
    size_t room = 0;
    off_t good = 0;
    ssize_t n;
    while (log->config.next > 0 && (n = getline(&line, &room, file)) > 0 && line[n - 1] == '\n' &&
           keep(log, line, (size_t)n)) {
        good += n;
    }
    free(line);
    int failed = ferror(file);
    fclose(file);
    if (failed || ftruncate(fd, good) != 0 || fsync(fd) != 0) {
        return error_set(err, STATUS_FAIL, "cannot cut %s at byte %lld: %s", path, (long long)good,
                         strerror(errno));
    }
    return STATUS_OK;
}

static int open_file(struct log *log, const char *name, keep_fn *keep, int *fd, struct error *err)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", log->config.dir, name) >= PATH_MAX) {
        return error_set(err, STATUS_FAIL, "directory '%.200s': its name is too long",
                         log->config.dir);
    }
    *fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (*fd < 0) {
        return error_set(err, STATUS_FAIL, "cannot open %s: %s", path, strerror(errno));
    }
    return cut(log, *fd, path, keep, err);
}

int log_open(struct log *log, const struct log_config *config, struct error *err)
{
    memset(log, 0, sizeof *log);
    log->config = *config;
    log->main_fd = log->metrics_fd = -1;
    log->last_val = NAN;
    curve_clear(&log->train);
    curve_clear(&log->val);
    if (!config->dir) {
        return STATUS_OK;
    }
    if (snprintf(log->svg_path, PATH_MAX, "%s/loss.svg", config->dir) >= PATH_MAX ||
        open_file(log, "main.log", keep_main, &log->main_fd, err) ||
        open_file(log, "metrics.jsonl", keep_metrics, &log->metrics_fd, err)) {
        log_close(log, &(struct error){0});
        return err->status;
    }
    return STATUS_OK;
}

// ---- while it runs ------------------------------------------------------------------------------

// `main_line` and `json` with their newlines.
static int write_files(struct log *log, const char *main_line, const char *json, struct error *err)
{
    if (log->config.json) {
        fputs(json, stdout);
        fflush(stdout);
    }
    if (log->main_fd >= 0 &&
        (file_write_all(log->main_fd, "main.log", main_line, strlen(main_line), err) ||
         file_write_all(log->metrics_fd, "metrics.jsonl", json, strlen(json), err))) {
        return err->status;
    }
    return STATUS_OK;
}

static int columns_of(FILE *out)
{
    struct winsize w;
    return ioctl(fileno(out), TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col : 80;
}

static void show_bar(struct log *log, const struct log_step *s)
{
    uint64_t now = now_ns();
    bool last = s->step + 1 >= log->config.steps;
    if (log->bar_shown && !last && now - log->bar_ns < 100000000) {
        return; // ten times a second is enough
    }
    char line[512];
    log_bar_line(line, sizeof line, log, s, columns_of(log->config.out));
    fprintf(log->config.out, "\r%s\033[K", line);
    fflush(log->config.out);
    log->bar_shown = true;
    log->bar_ns = now;
}

void log_clear_bar(struct log *log)
{
    if (log->bar_shown) {
        fputs("\r\033[K", log->config.out);
        fflush(log->config.out);
    }
    log->bar_shown = false;
}

int log_train(struct log *log, const struct log_step *s, struct error *err)
{
    char line[512], json[512];
    if (log->first_ns == 0) {
        log->first_ns = now_ns();
        log->first_step = s->step;
    } else if (s->step > log->first_step) {
        log->s_per_step =
            1e-9 * (double)(now_ns() - log->first_ns) / (double)(s->step - log->first_step);
    }
    curve_add(&log->train, s->tokens, s->loss);
    if (log->config.bar) {
        show_bar(log, s);
    } else {
        log_step_line(line, sizeof line, &log->config, s);
        fprintf(log->config.out, "%s\n", line);
        fflush(log->config.out);
    }
    snprintf(line, sizeof line, "s:%llu trl:%.4f lr:%.6f norm:%.2f\n", (ull)s->step, plain(s->loss),
             s->lr, plain(s->norm));
    int n = log_step_json(json, sizeof json - 1, s);
    memcpy(json + n, "\n", 2);
    return write_files(log, line, json, err);
}

// A line between training steps: validation or evaluation.
static int log_between(struct log *log, uint64_t step, uint64_t tokens, const char *key,
                       const char *short_key, const char *words, double value, struct error *err)
{
    char where[64], number[32], line[128], json[192];
    if (!log->config.bar) {
        step_words(where, sizeof where, &log->config, step);
        fprintf(log->config.out, "%s | %s %f\n", where, words, plain(value));
        fflush(log->config.out);
    }
    snprintf(line, sizeof line, "s:%llu %s:%.4f\n", (ull)step, short_key, plain(value));
    snprintf(json, sizeof json, "{\"step\":%llu,\"tokens\":%llu,\"%s\":%s}\n", (ull)step,
             (ull)tokens, key, json_number(value, number));
    return write_files(log, line, json, err);
}

static int draw(struct log *log, struct error *err)
{
    return svg_write(log->svg_path, &log->train, &log->val, log->config.floor,
                     log->config.floor_label, err);
}

int log_val(struct log *log, uint64_t step, uint64_t tokens, double loss, struct error *err)
{
    log->last_val = plain(loss);
    curve_add(&log->val, tokens, loss);
    if (log_between(log, step, tokens, "val_loss", "tel", "val loss", loss, err)) {
        return err->status;
    }
    return log->main_fd >= 0 ? draw(log, err) : STATUS_OK;
}

int log_eval(struct log *log, uint64_t step, uint64_t tokens, double accuracy, struct error *err)
{
    return log_between(log, step, tokens, "eval", "eval", "eval", accuracy, err);
}

int log_close(struct log *log, struct error *err)
{
    int status = STATUS_OK;
    if (log->bar_shown) {
        fputc('\n', log->config.out); // its last state stays
        log->bar_shown = false;
    }
    if (log->metrics_fd >= 0 && (log->train.count || log->val.count)) {
        status = draw(log, err);
    }
    if (log->main_fd >= 0) {
        close(log->main_fd);
    }
    if (log->metrics_fd >= 0) {
        close(log->metrics_fd);
    }
    log->main_fd = log->metrics_fd = -1;
    return status;
}
