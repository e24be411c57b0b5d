// Tests of data/log.c and data/svg.c: formats, cutting on resume, curves, the picture.
#include "data/log.h"
#include "test/cmocka.h"

#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static int make_folder(void **state)
{
    char *dir = strdup("/tmp/test_log.XXXXXX");
    *state = dir;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_folder(void **state)
{
    int status = nftw(*state, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(*state);
    return status;
}

static char *read_file(const char *dir, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    if (!f) {
        fail_msg("%s is missing", path);
    }
    fseek(f, 0, SEEK_END);
    size_t bytes = (size_t)ftell(f);
    rewind(f);
    char *data = calloc(1, bytes + 1);
    assert_int_equal(fread(data, 1, bytes, f), bytes);
    fclose(f);
    return data;
}

static void write_file(const char *dir, const char *name, const char *data, size_t bytes)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
}

static void same_file(const char *dir, const char *name, const char *expected)
{
    char *data = read_file(dir, name);
    assert_string_equal(data, expected);
    free(data);
}

static void succeeded(int status, const struct error *err)
{
    if (status) {
        fail_msg("%s", err->text);
    }
}

static struct log_step step_of(uint64_t step)
{
    return (struct log_step){.step = step,
                             .tokens = 512 * (step + 1),
                             .loss = 10.0 / (double)(step + 1) + 0.1,
                             .norm = 6.2413,
                             .lr = 3e-4,
                             .ms = 12.34,
                             .mfu = 0.456,
                             .tokens_per_s = 12345};
}

static FILE *nowhere(void)
{
    FILE *f = fopen("/dev/null", "w");
    assert_non_null(f);
    return f;
}

// Steps [from, to) of a run of 60 with a validation every 5 steps.
static void run_steps(const char *dir, uint64_t from, uint64_t to, double floor)
{
    static struct log log;
    struct error err;
    struct log_config config = {.dir = dir,
                                .next = from,
                                .steps = 60,
                                .out = nowhere(),
                                .floor = floor,
                                .floor_label = "best <possible> & more"};
    succeeded(log_open(&log, &config, &err), &err);
    for (uint64_t step = from; step < to; step++) {
        struct log_step s = step_of(step);
        if (step % 5 == 0) {
            succeeded(log_val(&log, step, 512 * step, 11 - 0.1 * (double)step, &err), &err);
            succeeded(log_eval(&log, step, 512 * step, 0.29, &err), &err);
        }
        succeeded(log_train(&log, &s, &err), &err);
    }
    succeeded(log_close(&log, &err), &err);
    fclose(config.out);
}

// ---- formats ------------------------------------------------------------------------------------

static void the_step_line_is_that_of_the_contract(void **state)
{
    (void)state;
    char line[256];
    struct log_config c = {.steps = 60, .dtype = "bf16"};
    struct log_step s = step_of(0);
    s.loss = 7.356158;
    log_step_line(line, sizeof line, &c, &s);
    assert_string_equal(line, "step  1/60 | loss 7.356158 | norm 6.2413 | lr 3.00e-04 | 12.34 ms | "
                              "45.6% bf16 MFU | 12345 tok/s");
    c.dtype = "";
    s.step = 59;
    s.skipped = true;
    log_step_line(line, sizeof line, &c, &s);
    assert_string_equal(line, "step 60/60 | loss 7.356158 | norm 6.2413 | lr 3.00e-04 | 12.34 ms | "
                              "45.6% MFU | 12345 tok/s | skipped");
    s.mfu = -1;
    s.loss = -NAN;
    s.norm = INFINITY;
    log_step_line(line, sizeof line, &c, &s);
    assert_string_equal(line, "step 60/60 | loss nan | norm inf | lr 3.00e-04 | 12.34 ms | "
                              "n/a MFU | 12345 tok/s | skipped");
}

static void main_log_is_that_of_llm_c(void **state)
{
    run_steps(*state, 0, 2, 0);
    same_file(*state, "main.log",
              "s:0 tel:11.0000\ns:0 eval:0.2900\n"
              "s:0 trl:10.1000 lr:0.000300 norm:6.24\n"
              "s:1 trl:5.1000 lr:0.000300 norm:6.24\n");
}

static void metrics_are_json_with_exact_numbers(void **state)
{
    static struct log log;
    struct error err;
    struct log_config config = {.dir = *state, .steps = 60, .out = nowhere()};
    struct log_step s = step_of(0);
    s.loss = 1.0 / 3 * 7;
    s.norm = NAN;
    s.mfu = -1;
    s.skipped = true;
    succeeded(log_open(&log, &config, &err), &err);
    succeeded(log_val(&log, 0, 0, INFINITY, &err), &err);
    succeeded(log_train(&log, &s, &err), &err);
    succeeded(log_close(&log, &err), &err);
    fclose(config.out);

    char *text = read_file(*state, "metrics.jsonl"), *second = strchr(text, '\n') + 1;
    json_error_t where;
    json_t *val = json_loadb(text, (size_t)(second - text), 0, &where);
    json_t *train = json_loads(second, 0, &where);
    assert_non_null(val);
    assert_non_null(train);
    assert_true(json_is_null(json_object_get(val, "val_loss")));
    assert_int_equal(json_integer_value(json_object_get(train, "step")), 0);
    assert_int_equal(json_integer_value(json_object_get(train, "tokens")), 512);
    assert_true(json_real_value(json_object_get(train, "loss")) == s.loss);
    assert_true(json_real_value(json_object_get(train, "lr")) == s.lr);
    assert_true(json_is_null(json_object_get(train, "norm")));
    assert_true(json_is_null(json_object_get(train, "mfu")));
    assert_true(json_is_true(json_object_get(train, "skipped")));
    assert_true(json_is_number(json_object_get(train, "ms")));
    assert_true(json_is_number(json_object_get(train, "tok_per_s")));
    json_decref(val);
    json_decref(train);
    free(text);
    same_file(*state, "main.log", "s:0 tel:inf\ns:0 trl:2.3333 lr:0.000300 norm:nan\n");
}

static void json_goes_to_stdout_as_well(void **state)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/stdout", (const char *)*state);
    pid_t pid = fork();
    if (pid == 0) {
        static struct log log;
        struct error err;
        struct log_config c = {.dir = *state, .steps = 60, .out = nowhere(), .json = true};
        struct log_step s = step_of(0);
        int status = !freopen(path, "w", stdout) || log_open(&log, &c, &err) ||
                     log_val(&log, 0, 0, 10.5, &err) || log_train(&log, &s, &err) ||
                     log_close(&log, &err);
        _exit(status);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    char *lines = read_file(*state, "stdout");
    assert_true(strncmp(lines, "{\"step\":0,", 10) == 0);
    same_file(*state, "metrics.jsonl", lines);
    free(lines);
}

static void without_a_directory_there_are_only_lines(void **state)
{
    static struct log log;
    (void)state;
    struct error err;
    char *text = NULL;
    size_t length;
    struct log_config config = {.steps = 60, .out = open_memstream(&text, &length)};
    struct log_step s = step_of(0);
    succeeded(log_open(&log, &config, &err), &err);
    succeeded(log_val(&log, 0, 0, 10.5, &err), &err);
    succeeded(log_train(&log, &s, &err), &err);
    succeeded(log_close(&log, &err), &err);
    fclose(config.out);
    assert_string_equal(text, "step  0/60 | val loss 10.500000\n"
                              "step  1/60 | loss 10.100000 | norm 6.2413 | lr 3.00e-04 | 12.34 ms "
                              "| 45.6% MFU | 12345 tok/s\n");
    free(text);
}

// ---- the bar ------------------------------------------------------------------------------------

static void the_bar_fits_any_terminal(void **state)
{
    (void)state;
    static struct log log;
    char line[512];
    log.config.steps = 300;
    log.last_val = 2.402;
    log.s_per_step = 0.5;
    struct log_step s = step_of(119);
    for (int columns = 0; columns < 300; columns++) {
        int n = log_bar_line(line, sizeof line, &log, &s, columns);
        assert_int_equal(n, strlen(line));
        assert_true(n < columns || columns < 3);
        assert_null(strchr(line, '\n'));
    }
    log_bar_line(line, sizeof line, &log, &s, 120);
    assert_string_equal(line, "[================>                       ]  40% | step 120/300 | "
                              "loss 0.183 | val 2.402 | 12345 tok/s | 1m30s left");
    s.step = 299;
    log_bar_line(line, sizeof line, &log, &s, 120);
    assert_non_null(strstr(line, "====] 100% | step 300/300"));
    log.config.steps = 300000;
    log_bar_line(line, sizeof line, &log, &s, 200);
    assert_non_null(strstr(line, "41h37m left"));
    log.s_per_step = 1e30;
    assert_true(log_bar_line(line, sizeof line, &log, &s, 200) < 200);
    log.s_per_step = 0; // not known yet
    log.last_val = NAN;
    log_bar_line(line, sizeof line, &log, &s, 200);
    assert_null(strstr(line, "left"));
    assert_null(strstr(line, "val"));
}

static void the_bar_is_drawn_over_itself(void **state)
{
    (void)state;
    static struct log log;
    struct error err;
    char *text = NULL;
    size_t length;
    struct log_config config = {.steps = 3, .out = open_memstream(&text, &length), .bar = true};
    succeeded(log_open(&log, &config, &err), &err);
    for (uint64_t step = 0; step < 3; step++) {
        struct log_step s = step_of(step);
        succeeded(log_val(&log, step, 0, 2, &err), &err);
        succeeded(log_train(&log, &s, &err), &err);
    }
    succeeded(log_close(&log, &err), &err);
    fclose(config.out);
    assert_true(text[0] == '\r');
    assert_non_null(strstr(text, "step 1/3"));
    assert_non_null(strstr(text, "step 3/3")); // the last one always
    assert_true(strchr(text, '\n') == text + length - 1);
    free(text);
}

// ---- resume -------------------------------------------------------------------------------------

static void a_resumed_run_leaves_the_files_of_one_that_was_not(void **state)
{
    run_steps(*state, 0, 30, 0.05);
    char *main_log = read_file(*state, "main.log"), *metrics = read_file(*state, "metrics.jsonl");
    char *svg = read_file(*state, "loss.svg");
    const uint64_t resumed[] = {30, 29, 20, 11, 5, 1, 0};
    for (size_t i = 0; i < sizeof resumed / sizeof *resumed; i++) {
        run_steps(*state, resumed[i], 30, 0.05);
        same_file(*state, "main.log", main_log);
        same_file(*state, "metrics.jsonl", metrics);
        same_file(*state, "loss.svg", svg);
    }
    free(main_log);
    free(metrics);
    free(svg);
}

// Whatever a kill left of the last lines: what stays are the whole lines of steps before 6.
static void logs_cut_at_any_byte_are_mended(void **state)
{
    run_steps(*state, 0, 6, 0);
    char *want_main = read_file(*state, "main.log"), *want = read_file(*state, "metrics.jsonl");
    run_steps(*state, 0, 10, 0);
    char *main_log = read_file(*state, "main.log"), *metrics = read_file(*state, "metrics.jsonl");
    static struct log log;
    struct log_config config = {.dir = *state, .next = 6, .steps = 60, .out = nowhere()};
    for (size_t n = 0; n <= strlen(metrics); n++) {
        struct error err;
        size_t m = n < strlen(main_log) ? n : strlen(main_log);
        write_file(*state, "main.log", main_log, m);
        write_file(*state, "metrics.jsonl", metrics, n);
        succeeded(log_open(&log, &config, &err), &err);
        succeeded(log_close(&log, &err), &err);
        char *got_main = read_file(*state, "main.log"), *got = read_file(*state, "metrics.jsonl");
        size_t g = strlen(got), gm = strlen(got_main);
        assert_true(g <= strlen(want) && gm <= strlen(want_main));
        assert_memory_equal(got, want, g);
        assert_memory_equal(got_main, want_main, gm);
        assert_true(g == 0 || got[g - 1] == '\n');
        assert_true(gm == 0 || got_main[gm - 1] == '\n');
        assert_true(n < strlen(want) || g == strlen(want));
        assert_true(n - g < 300 || n > strlen(want)); // no more is lost than the last line
        free(got_main);
        free(got);
    }
    fclose(config.out);
    free(want_main), free(want), free(main_log), free(metrics);
}

static void a_new_run_begins_with_empty_files(void **state)
{
    run_steps(*state, 0, 10, 0);
    run_steps(*state, 0, 0, 0);
    same_file(*state, "main.log", "");
    same_file(*state, "metrics.jsonl", "");
}

static void remarks_in_main_log_stay_on_resume(void **state)
{
    const char *text = "# a remark\ns:0 trl:1.0\ns:1 trl:1.0\n";
    write_file(*state, "main.log", text, strlen(text));
    run_steps(*state, 1, 1, 0);
    same_file(*state, "main.log", "# a remark\ns:0 trl:1.0\n");
}

static void a_log_that_cannot_be_written_is_an_error(void **state)
{
    pid_t pid = fork();
    if (pid == 0) {
        static struct log log;
        struct error err = {0};
        struct log_config c = {.dir = *state, .steps = 60, .out = nowhere()};
        struct log_step s = step_of(0);
        struct rlimit limit = {100, 100};
        signal(SIGXFSZ, SIG_IGN);
        int bad = log_open(&log, &c, &err) || setrlimit(RLIMIT_FSIZE, &limit) ||
                  log_train(&log, &s, &err) != STATUS_FAIL || !strstr(err.text, "metrics.jsonl") ||
                  log_close(&log, &err) != STATUS_FAIL || !strstr(err.text, "loss.svg");
        _exit(bad);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);

    static struct log log;
    struct error err;
    struct log_config c = {.dir = "/nowhere/at/all", .steps = 60};
    assert_int_equal(log_open(&log, &c, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "/nowhere/at/all/main.log"));
}

// ---- curves and the picture ---------------------------------------------------------------------

static void curves_keep_every_point(void **state)
{
    (void)state;
    static struct curve c;
    double loss_sum = 0, tokens_sum = 0;
    curve_clear(&c);
    for (uint64_t n = 1; n <= 10000; n++) {
        curve_add(&c, n, (double)(n % 7));
        curve_add(&c, n, NAN);
        loss_sum += (double)(n % 7);
        tokens_sum += (double)n;
        double losses = 0, tokens = 0;
        uint64_t points = 0;
        for (size_t i = 0; i < c.count; i++) {
            assert_true(c.bucket[i].points == c.width || i + 1 == c.count);
            losses += c.bucket[i].loss_sum;
            tokens += c.bucket[i].tokens_sum;
            points += c.bucket[i].points;
        }
        assert_true(losses == loss_sum && tokens == tokens_sum && points == n); // exact integers
        assert_true(c.count <= CURVE_BUCKETS && (n <= 512 || c.count > CURVE_BUCKETS / 2 - 1));
    }
}

// Tags are closed in order, attributes are quoted, and no number is nan or inf.
static void check_svg(const char *svg)
{
    char open[32][32];
    int depth = 0;
    assert_true(strncmp(svg, "<svg ", 5) == 0);
    assert_null(strstr(svg, "nan"));
    assert_null(strstr(svg, "inf"));
    for (const char *at = svg; (at = strchr(at, '<')); at++) {
        const char *end = strchr(at, '>');
        assert_non_null(end);
        char name[32];
        int quotes = 0;
        for (const char *c = at; c < end; c++) {
            quotes += *c == '"';
        }
        assert_int_equal(quotes % 2, 0);
        if (at[1] == '/') {
            snprintf(name, sizeof name, "%.*s", (int)(end - at - 2), at + 2);
            assert_true(depth > 0);
            assert_string_equal(name, open[--depth]);
        } else if (end[-1] != '/') {
            assert_true(depth < 32);
            snprintf(open[depth++], 32, "%.*s", (int)strcspn(at + 1, " >"), at + 1);
        }
    }
    assert_int_equal(depth, 0);
}

static void draw(const char *dir, const struct curve *train, const struct curve *val, double floor)
{
    struct error err;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/x.svg", dir);
    succeeded(svg_write(path, train, val, floor, "best <possible> & more", &err), &err);
    char *svg = read_file(dir, "x.svg");
    check_svg(svg);
    assert_true(!floor == !strstr(svg, "best &lt;possible> &amp; more"));
    free(svg);
}

static void pictures_of_odd_curves_are_well_formed(void **state)
{
    static struct curve none, one, same, wild, tiny;
    curve_clear(&none), curve_clear(&one), curve_clear(&same), curve_clear(&wild);
    curve_clear(&tiny);
    curve_add(&one, 0, 10.5);
    for (uint64_t i = 0; i < 5000; i++) {
        curve_add(&same, i, 2);
        curve_add(&wild, i << 50, i % 1000 == 999 ? 1e300 : i % 7 ? -3.0 : INFINITY);
        curve_add(&tiny, i, 1e-300);
    }
    const struct curve *all[] = {&none, &one, &same, &wild, &tiny};
    for (int t = 0; t < 5; t++) {
        for (int v = 0; v < 5; v++) {
            draw(*state, all[t], all[v], 0);
            draw(*state, all[t], all[v], 1.25);
        }
    }
}

static void the_picture_stays_small(void **state)
{
    static struct curve train, val;
    struct stat st;
    char path[PATH_MAX];
    curve_clear(&train), curve_clear(&val);
    for (uint64_t i = 0; i < 300000; i++) {
        curve_add(&train, i * 1000, 2 + 8 / (1 + (double)i / 1000));
        curve_add(&val, i * 1000, 2.1 + 8 / (1 + (double)i / 1000));
    }
    draw(*state, &train, &val, 1.9);
    snprintf(path, sizeof path, "%s/x.svg", (const char *)*state);
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_size < 100000);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        CASE(the_step_line_is_that_of_the_contract),
        CASE(main_log_is_that_of_llm_c),
        CASE(metrics_are_json_with_exact_numbers),
        CASE(json_goes_to_stdout_as_well),
        CASE(without_a_directory_there_are_only_lines),
        CASE(the_bar_fits_any_terminal),
        CASE(the_bar_is_drawn_over_itself),
        CASE(a_resumed_run_leaves_the_files_of_one_that_was_not),
        CASE(logs_cut_at_any_byte_are_mended),
        CASE(a_new_run_begins_with_empty_files),
        CASE(remarks_in_main_log_stay_on_resume),
        CASE(a_log_that_cannot_be_written_is_an_error),
        CASE(curves_keep_every_point),
        CASE(pictures_of_odd_curves_are_well_formed),
        CASE(the_picture_stays_small),
    };
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
