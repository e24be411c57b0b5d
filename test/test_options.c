// Tests of data/options.c: the table, every kind of refusal, llm.c's run scripts, saved options.
#include "data/options.h"
#include "test/cmocka.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Splits at blanks; a word of '' is empty.
static int parse(struct options *o, const char *line, struct error *err)
{
    char copy[8192], *argv[128] = {"train_gpt"};
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) {
        argv[argc++] = strcmp(word, "''") == 0 ? "" : word;
    }
    memset(err, 0, sizeof *err);
    return options_parse(o, argc, argv, err);
}

static void parses(struct options *o, const char *line)
{
    struct error err;
    if (parse(o, line, &err)) {
        fail_msg("'%s' was refused: %s", line, err.text);
    }
}

// The line is refused with status 2 and one line that contains all of `words` (split at '~').
static void refused(const char *line, const char *words)
{
    struct options o;
    struct error err;
    char copy[256];
    if (!parse(&o, line, &err)) {
        fail_msg("'%s' was accepted", line);
    }
    assert_int_equal(err.status, STATUS_USAGE);
    assert_null(strchr(err.text, '\n'));
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok(copy, "~"); word; word = strtok(NULL, "~")) {
        if (!strstr(err.text, word)) {
            fail_msg("'%s': '%s' does not say '%s'", line, err.text, word);
        }
    }
}

static void defaults_are_those_of_the_contract(void **state)
{
    (void)state;
    struct options o;
    parses(&o, "");
    assert_string_equal(o.model, "d6");
    assert_int_equal(o.micro_batch, 4);
    assert_int_equal(o.seq, OPTION_AUTO);
    assert_int_equal(o.total_batch, OPTION_AUTO);
    assert_int_equal(o.steps, OPTION_AUTO);
    assert_true(o.lr == 3e-4 && o.lr_final == 1.0 && o.weight_decay == 0);
    assert_true(o.beta1 == 0.9 && o.beta2 == 0.95 && o.eps == 1e-8 && o.clip == 1.0);
    assert_int_equal(o.schedule, SCHEDULE_COSINE);
    assert_int_equal(o.warmup, 0);
    assert_true(o.skip_loss_z == 0 && o.skip_norm_z == 0);
    assert_int_equal(o.val_every, 20);
    assert_int_equal(o.val_batches, 20);
    assert_int_equal(o.sample_every, 20);
    assert_int_equal(o.sample_tokens, 64);
    assert_true(o.temperature == 1.0);
    assert_int_equal(o.top_k, 0);
    assert_string_equal(o.out, "");
    assert_string_equal(o.eval, "");
    assert_string_equal(o.prompt, "");
    assert_int_equal(o.checkpoint_every, 0);
    assert_int_equal(o.keep, 0);
    assert_int_equal(o.major_every, 0);
    assert_int_equal(o.seed, 1337);
    assert_int_equal(o.threads, 0);
    assert_int_equal(o.head_rows, 256);
    assert_int_equal(o.dtype, CHOICE_FP32);
    assert_int_equal(o.device, DEVICE_AUTO);
    assert_true(o.device_memory == OPTION_AUTO && o.host_memory == OPTION_AUTO &&
                o.pinned_memory == OPTION_AUTO);
    assert_true(o.link_gb_per_s == 0);
    assert_string_equal(o.policy, "auto");
    assert_true(!o.machine[0] && !o.emulate[0] && !o.plan[0] && !o.save_plan[0] && !o.trace[0] &&
                !o.timeline[0]);
    assert_true(o.host_threads == 0 && o.gpus == 1 && o.nodes == 1 && o.report == 0 &&
                o.chaos == 0);
    assert_true(o.zero == OPTION_AUTO && !o.fast_reduce);
    assert_int_equal(o.format, FORMAT_TEXT);
    assert_false(o.no_guard || o.overfit_batch || o.resume || o.log_json || o.generate || o.help ||
                 o.plan_only);
    assert_int_equal(o.note_count, 0);
    size_t rows;
    const struct option_row *table = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        assert_false(table[i].name && options_given(&o, table[i].name));
    }
}

static void names_are_unique_and_well_formed(void **state)
{
    (void)state;
    size_t rows;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        assert_true(t[i].name || t[i].short_name);
        assert_true(t[i].help && t[i].group && t[i].initial);
        for (const char *c = t[i].name ? t[i].name : ""; *c; c++) {
            assert_true(islower((unsigned char)*c) || isdigit((unsigned char)*c) || *c == '-');
        }
        for (size_t k = 0; k < i; k++) {
            assert_false(t[i].name && t[k].name && strcmp(t[i].name, t[k].name) == 0);
            assert_false(t[i].short_name && t[k].short_name &&
                         strcmp(t[i].short_name, t[k].short_name) == 0);
        }
    }
}

// Each option by its long name in both spellings and by its short name, at both ends of its range
// and just beyond.
static void every_option_takes_its_range_and_no_more(void **state)
{
    (void)state;
    size_t rows;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        if (t[i].type != OPTION_INT && t[i].type != OPTION_REAL) {
            continue;
        }
        // What some options mean nothing without.
        const char *formats[] = {"--out x --plan-only --%s=%s",
                                 "--out x --device-memory 1 --%s %s"};
        formats[0] = strcmp(t[i].name, "chaos") == 0 ? "--out x --%s=%s" : formats[0];
        bool cluster = strcmp(t[i].name, "gpus") == 0 || strcmp(t[i].name, "nodes") == 0;
        formats[1] = cluster ? "--out x --plan-only --%s %s" : formats[1];
        double ends[] = {t[i].min, t[i].max};
        for (int e = 0; e < 2; e++) {
            struct options o;
            char line[256], value[64];
            snprintf(value, sizeof value, "%.17g", ends[e]);
            for (int f = 0; f < 2; f++) {
                snprintf(line, sizeof line, formats[f], t[i].name, value);
                parses(&o, line);
                assert_true(options_given(&o, t[i].name));
                const void *field = (const char *)&o + t[i].offset;
                assert_true(t[i].type == OPTION_INT ? (double)*(const int64_t *)field == ends[e]
                                                    : *(const double *)field == ends[e]);
            }
            if (t[i].short_name) {
                snprintf(line, sizeof line, "-o x -%s %s", t[i].short_name, value);
                parses(&o, line);
            }
            double beyond = t[i].type == OPTION_INT ? ends[e] + (e ? 1 : -1)
                            : e                     ? ends[e] * 1.0001
                                                    : ends[e] * 0.9999 - 1e-31;
            if (t[i].automatic && beyond == -1) {
                beyond = -2;
            }
            snprintf(value, sizeof value, "%.17g", beyond);
            snprintf(line, sizeof line, formats[1], t[i].name, value);
            refused(line, t[i].name);
            refused(line, "out of range~allowed:");
            refused(line, value);
        }
    }
}

static void values_that_cannot_be_parsed_are_refused(void **state)
{
    (void)state;
    static const char *const bad_int[] = {"",   "x",   "1x", "1.5", "0x10", "1e3", "--",  "-",
                                          "1 ", "1KK", "1k", "1mi", "Mi",   "nan", "+-1", "1Ti"};
    static const char *const bad_real[] = {"",   "x",   "1x",  "nan",   "inf", "-inf", "0x1p3",
                                           "1e", "1,5", "--1", "1e999", "e5",  ".",    "1.0.0"};
    size_t rows;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        const char *const *bad = t[i].type == OPTION_INT ? bad_int : bad_real;
        size_t count = t[i].type == OPTION_INT ? sizeof bad_int / sizeof *bad_int
                                               : sizeof bad_real / sizeof *bad_real;
        for (size_t b = 0; b < count && (t[i].type == OPTION_INT || t[i].type == OPTION_REAL);
             b++) {
            char arg[64], *argv[] = {"train_gpt", arg};
            struct options o;
            struct error err = {0};
            snprintf(arg, sizeof arg, "--%s=%s", t[i].name, bad[b]);
            if (options_parse(&o, 2, argv, &err) != STATUS_USAGE) {
                fail_msg("%s was accepted", arg);
            }
            assert_non_null(strstr(err.text, t[i].name));
            assert_non_null(strstr(err.text, "allowed: "));
        }
    }
    refused("--schedule cos", "--schedule~cos~cosine|linear|constant|wsd");
    refused("--dtype fp16", "--dtype~fp16~fp32|bf16");
    refused("--device tpu", "--device~tpu~auto|cpu|cuda");
    refused("-o x -y 2", "--resume~'2'~0 or 1");
    refused("--generate=yes", "--generate~yes~0 or 1");
    refused("-i ''", "--train~empty");
}

static void overflow_is_out_of_range(void **state)
{
    (void)state;
    refused("-d 9223372036854775807", "out of range");
    refused("-d 9223372036854775808", "out of range");
    refused("-d 9999999999999999999999999", "out of range");
    refused("-d 9223372036854775807Gi", "out of range");
    refused("-d -9223372036854775807Gi", "out of range");
    refused("-d 18446744073709551617", "out of range"); // 1 modulo 2^64
}

static void missing_values_are_refused(void **state)
{
    (void)state;
    size_t rows;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        if (t[i].type == OPTION_SWITCH || t[i].type == OPTION_HELLASWAG) {
            continue;
        }
        char line[64];
        const char *dashes = t[i].name ? "--" : "-";
        const char *name = t[i].name ? t[i].name : t[i].short_name;
        snprintf(line, sizeof line, "%s%s", dashes, name);
        refused(line, "value is missing");
        snprintf(line, sizeof line, "%s%s --seed 3", dashes, name);
        refused(line, "value is missing");
    }
    refused("-v -s 3", "--val-every~missing");
}

static void unknown_options_suggest_the_nearest(void **state)
{
    (void)state;
    refused("--seeed 3", "unknown option~--seeed~did you mean --seed");
    refused("--schedlue linear", "--schedule");
    refused("--micro_batch=3", "--micro-batch");
    refused("--warmpu 3", "--warmup");
    refused("-lr 3", "did you mean --lr");
    refused("-seed 3", "did you mean --seed");
    refused("--nothing-like-it 3", "unknown option~--nothing-like-it~--help");
    refused("foo", "unknown option 'foo'");
    refused("-b 4 foo", "foo");
    refused("-", "unknown option '-'");
    refused("--", "unknown option '--'");
    refused("--=3", "unknown option");
    refused("-b=4", "unknown option '-b=4'");
    refused("-nx 4", "unknown option '-nx'");
    struct options o;
    struct error err;
    assert_int_equal(parse(&o, "--nothing-like-it 3", &err), STATUS_USAGE);
    assert_null(strstr(err.text, "did you mean"));
}

static void sizes_take_suffixes(void **state)
{
    (void)state;
    struct options o;
    static const struct {
        const char *line;
        int64_t value;
    } cases[] = {{"-d 512", 512},      {"-d 2K", 2000},     {"-d 2Ki", 2048},
                 {"-d 3M", 3000000},   {"-d 3Mi", 3145728}, {"-d 1G", 1000000000},
                 {"-d 0512Ki", 524288}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        parses(&o, cases[i].line);
        assert_int_equal(o.total_batch, cases[i].value);
    }
    parses(&o, "-x -1 -d -1 -t -1");
    assert_int_equal(o.steps, OPTION_AUTO);
    assert_int_equal(o.total_batch, OPTION_AUTO);
    assert_int_equal(o.seq, OPTION_AUTO);
}

static void automatic_options_take_auto_and_no_others_do(void **state)
{
    (void)state;
    size_t rows, automatic = 0;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        if (t[i].type != OPTION_INT && t[i].type != OPTION_REAL) {
            continue;
        }
        char line[64];
        snprintf(line, sizeof line, "--%s auto", t[i].name);
        if (!t[i].automatic) {
            refused(line, "'auto' is not a");
            continue;
        }
        struct options o;
        parses(&o, line);
        assert_int_equal(*(const int64_t *)((const char *)&o + t[i].offset), OPTION_AUTO);
        assert_true(options_given(&o, t[i].name));
        snprintf(line, sizeof line, "--%s automatic", t[i].name);
        refused(line, "is not a whole number~or auto");
        automatic++;
    }
    assert_true(automatic >= 12);
    struct options o;
    parses(&o, "-b auto");
    assert_int_equal(o.micro_batch, OPTION_AUTO);
    parses(&o, "-b -1 --device-memory auto --host-memory -1");
    assert_int_equal(o.micro_batch, OPTION_AUTO);
    assert_true(o.device_memory == OPTION_AUTO && o.host_memory == OPTION_AUTO);
}

static void memory_and_planning_reach_their_fields(void **state)
{
    (void)state;
    struct options o;
    parses(&o, "--device-memory 600M --host-memory 3Gi --pinned-memory 1G --link-gb-per-s 2.5 "
               "--machine m --host-threads 3 --policy twin-flow:0.25 --save-plan s --report 10 "
               "--trace t.json --timeline t.svg --chaos 7");
    assert_int_equal(o.device_memory, 600000000);
    assert_int_equal(o.host_memory, (int64_t)3 << 30);
    assert_int_equal(o.pinned_memory, 1000000000);
    assert_true(o.link_gb_per_s == 2.5);
    assert_string_equal(o.machine, "m");
    assert_string_equal(o.policy, "twin-flow:0.25");
    assert_string_equal(o.save_plan, "s");
    assert_string_equal(o.trace, "t.json");
    assert_string_equal(o.timeline, "t.svg");
    assert_true(o.host_threads == 3 && o.report == 10 && o.chaos == 7);
    parses(&o, "--emulate e:16 --plan p --link-gb-per-s 1");
    assert_string_equal(o.emulate, "e:16");
    assert_string_equal(o.plan, "p");
    parses(&o, "--plan-only --gpus 4 --nodes 3 --format json");
    assert_true(o.plan_only && o.gpus == 4 && o.nodes == 3 && o.format == FORMAT_JSON);
    for (int64_t zero = 0; zero < 4; zero++) { // as llm.c has it
        char line[16];
        snprintf(line, sizeof line, "-z %d", (int)zero);
        parses(&o, line);
        assert_true(o.zero == zero);
    }
    parses(&o, "--zero auto --fast-reduce");
    assert_true(o.zero == OPTION_AUTO && o.fast_reduce);
    refused("--zero 4", "--zero (-z)~0 to 3");
    refused("--device-memory 0", "--device-memory~'0' is out of range~auto: no cap");
    refused("--host-memory 0", "--host-memory~out of range~auto: what is free");
    refused("--gpus 0", "--gpus~1 to 1024");
    refused("--nodes 1025", "--nodes~1 to 1024");
    refused("--format xml", "--format~xml~text|json");
    refused("--policy ''", "--policy~empty");
}

static void switches_take_an_optional_value(void **state)
{
    (void)state;
    struct options o;
    parses(&o, "-o x --resume --no-guard -a --seed 3");
    assert_true(o.resume && o.no_guard && o.overfit_batch && o.seed == 3);
    parses(&o, "-o x -y 1 -a 1 --no-guard=1");
    assert_true(o.resume && o.no_guard && o.overfit_batch);
    parses(&o, "-o x -y 0 -a 0 --no-guard 0");
    assert_false(o.resume || o.no_guard || o.overfit_batch);
    assert_true(options_given(&o, "resume"));
}

static void messages_stay_one_line(void **state)
{
    (void)state;
    char *bad[] = {"--lr=1\n2", "--no\nsuch=3", "a\tb", "--schedule=\x1b[2J"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct options o;
        struct error err = {0};
        char *argv[] = {"train_gpt", bad[i]};
        assert_int_equal(options_parse(&o, 2, argv, &err), STATUS_USAGE);
        for (const char *c = err.text; *c; c++) {
            assert_false(iscntrl((unsigned char)*c));
        }
    }
}

static void the_last_of_two_wins(void **state)
{
    (void)state;
    struct options o;
    parses(&o, "-l 0.1 --lr 0.2 -l 0.3");
    assert_true(o.lr == 0.3);
}

// llm.c's scripts give -y 1 on their first run already.
static void only_the_short_resume_may_begin_anew(void **state)
{
    (void)state;
    struct options o;
    parses(&o, "-o x -y 1");
    assert_true(o.resume && o.begin_if_none);
    parses(&o, "-o x --resume 1");
    assert_true(o.resume && !o.begin_if_none);
    parses(&o, "-o x --resume");
    assert_true(o.resume && !o.begin_if_none);
    parses(&o, "-o x -y 0");
    assert_false(o.resume || o.begin_if_none);
    refused("-y 1", "--resume~--out");
    refused("-n 10", "--checkpoint-every~--out");
}

static void contradictions_are_refused(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"--machine m", "--emulate e"},     {"--plan p", "--policy resident"},
        {"--plan-only", "--generate"},      {"--plan-only", "--resume --out x"},
        {"--plan-only", "--plan p"},        {"--plan-only", "--policy resident"},
        {"--plan-only", "--save-plan s"},   {"--plan-only", "--trace t"},
        {"--plan-only", "--timeline t"},    {"--plan-only", "--chaos 1"},
        {"--micro-batch auto", "--plan p"}, {"--micro-batch auto", "--emulate e"},
        {"--zero 2", "--plan p"},           {"--zero 2", "--generate"},
        {"--report 1", "--generate"},       {"--policy resident", "--generate"}};
    struct options o;
    char line[128], words[128];
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const char *a = pairs[i][0], *b = pairs[i][1];
        snprintf(words, sizeof words, "%.*s~%.*s~exclude each other", (int)strcspn(a, " "), a,
                 (int)strcspn(b, " "), b);
        for (int swap = 0; swap < 2; swap++) {
            snprintf(line, sizeof line, "%s %s", swap ? b : a, swap ? a : b);
            refused(line, words);
        }
    }
    refused("--gpus 2", "--gpus~without --plan-only");
    refused("--nodes 2", "--nodes~without --plan-only");
    refused("--format json", "--format~without --plan-only");
    refused("--link-gb-per-s 2", "--link-gb-per-s 2~--device-memory");
    // Saying what is so anyway contradicts nothing.
    parses(&o, "--gpus 1 --format text --link-gb-per-s 0 --plan p --policy auto --plan-only 0");
    parses(&o, "--generate --device-memory auto --host-threads 0 --report 0");
}

static void help_and_version_end_the_parsing(void **state)
{
    (void)state;
    struct options o;
    parses(&o, "--help --nonsense");
    assert_true(o.help);
    parses(&o, "-b 4 --version --nonsense");
    assert_true(o.version);
    parses(&o, "-h");
    assert_true(o.help);
    parses(&o, "-h 1");
    assert_false(o.help);
    parses(&o, "-h 0");
    assert_false(o.help);
    refused("--nonsense --help", "nonsense");
}

static void help_names_every_option_with_default_and_range(void **state)
{
    (void)state;
    char *text = NULL;
    size_t length, rows;
    FILE *out = open_memstream(&text, &length);
    options_help(out);
    fclose(out);
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        char name[64];
        snprintf(name, sizeof name, t[i].name ? "--%s" : "-%s",
                 t[i].name ? t[i].name : t[i].short_name);
        const char *at = strstr(text, name);
        if (!at) {
            fail_msg("%s is not in the help", name);
        }
        if (t[i].type == OPTION_INT || t[i].type == OPTION_REAL) {
            char initial[64];
            snprintf(initial, sizeof initial, "[%s;", t[i].initial);
            // Lines may break at blanks in it.
            initial[strcspn(initial, " ")] = '\0';
            assert_non_null(strstr(at, initial));
        }
    }
    for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
        assert_true(strcspn(line, "\n") <= 100);
    }
    free(text);
}

// ---- llm.c's run scripts: their arguments, with train_gpt2cu called train_gpt -------------------

struct script {
    const char *line;
    const char *model;
    int64_t micro_batch, seq, total_batch, sample_every, sample_tokens, warmup, every, steps;
    double lr, lr_final;
    int notes; // -h 1 without the file, and each flag that is ignored
};

static const struct script scripts[] = {
    {"-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin "
     "-o log_gpt2_124M -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 "
     "-l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12",
     "d12", 64, 1024, 524288, 20000, 144, 700, 5000, -1, 0.0006, 0, 2},
    {"-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin "
     "-o log_gpt2_350M -v 250 -s 100000 -g 144 -h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 "
     "-l 0.0003 -q 0.0 -u 700 -n 2000 -x 60000 -y 1 -e d24 -pn 8 -pr 0",
     "d24", 64, 1024, 524288, 100000, 144, 700, 2000, 60000, 0.0003, 0, 4},
    {"-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin "
     "-o log_gpt2_774M -v 250 -s 300000 -g 144 -h 1 -b 32 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 "
     "-l 0.00025 -q 0.0 -u 700 -n 4000 -x 286102 -y 1 -e d36",
     "d36", 32, 1024, 524288, 300000, 144, 700, 4000, 286102, 0.00025, 0, 2},
    {"-i dev/data/edu_fineweb100B/edu_fineweb_train_*.bin "
     "-j dev/data/edu_fineweb100B/edu_fineweb_val_*.bin -o log_gpt2_1558M -v 250 -s 300000 -g 384 "
     "-h 1 -b 16 -t 1024 -d 1048576 -r 0 -z 1 -c 0.1 -k cosine -l 0.0006 -q 0.1 -u 700 -n 2000 "
     "-x 32000 -ge 1 -y 1 -e d48",
     "d48", 16, 1024, 1048576, 300000, 384, 700, 2000, 32000, 0.0006, 0.1, 3},
    {"-i dev/data/fineweb100B/fineweb_train_*.bin -j dev/data/fineweb100B/fineweb_val_*.bin "
     "-o log_gpt3_125M -v 250 -s 20000 -g 144 -h 1 -b 32 -t 2048 -d 524288 -r 0 -z 1 -c 0.1 "
     "-l 0.0006 -q 0.1 -u 700 -n 10000 -nk 5 -nm 50000 -ge 1 -sl 7.0 -sg 7.0 -y 1 -x 572204 "
     "-e gpt3:c768",
     "gpt3:c768", 32, 2048, 524288, 20000, 144, 700, 10000, 572204, 0.0006, 0.1, 3},
    {"-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin "
     "-o log_multi -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 2097152 -r 0 -z 1 -c 0.1 "
     "-l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12 -pn 16 -pr 0 -pg 8 -ps 10.0.1.220 -pi tcp",
     "d12", 64, 1024, 2097152, 20000, 144, 700, 5000, -1, 0.0006, 0, 7},
    {"-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin "
     "-o log_multi -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 2097152 -r 0 -z 1 -c 0.1 "
     "-l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12 -pn 16 -pr 0 -pg 8 -pf log_multi -pi fs",
     "d12", 64, 1024, 2097152, 20000, 144, 700, 5000, -1, 0.0006, 0, 7},
    {"-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin "
     "-o log_mpi -v 250 -s 20000 -g 144 -h 1 -b 64 -t 1024 -d 2097152 -r 0 -z 1 -c 0.1 "
     "-l 0.0006 -q 0.1 -u 700 -n 1000 -y 0 -e gpt2:d12 -pi mpi -w 1 -f 1 -lg -1 -pm mpi -pp /tmp",
     "gpt2:d12", 64, 1024, 2097152, 20000, 144, 700, 1000, -1, 0.0006, 0.1, 8},
};

static void llm_c_scripts_parse_with_their_meaning(void **state)
{
    (void)state;
    char here[PATH_MAX], dir[] = "/tmp/test_options.XXXXXX";
    assert_non_null(getcwd(here, sizeof here));
    assert_non_null(mkdtemp(dir)); // no HellaSwag file here
    assert_int_equal(chdir(dir), 0);
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        const struct script *s = &scripts[i];
        struct options o;
        parses(&o, s->line);
        assert_string_equal(o.model, s->model);
        assert_int_equal(o.micro_batch, s->micro_batch);
        assert_int_equal(o.seq, s->seq);
        assert_int_equal(o.total_batch, s->total_batch);
        assert_int_equal(o.val_every, 250);
        assert_int_equal(o.sample_every, s->sample_every);
        assert_int_equal(o.sample_tokens, s->sample_tokens);
        assert_int_equal(o.warmup, s->warmup);
        assert_int_equal(o.checkpoint_every, s->every);
        assert_int_equal(o.steps, s->steps);
        assert_true(o.lr == s->lr && o.lr_final == s->lr_final && o.weight_decay == 0.1);
        assert_int_equal(o.schedule, SCHEDULE_COSINE);
        assert_string_equal(o.eval, "");
        if (o.note_count != s->notes) {
            fail_msg("script %zu leaves %d notes, expected %d", i, o.note_count, s->notes);
        }
        for (int n = 0; n < o.note_count; n++) {
            assert_non_null(strstr(o.notes[n], "is ignored: "));
        }
    }
    assert_int_equal(chdir(here), 0);
    rmdir(dir);
}

static void hellaswag_flag_names_the_file_if_it_is_there(void **state)
{
    (void)state;
    char here[PATH_MAX], dir[] = "/tmp/test_options.XXXXXX";
    const char *file = "dev/data/hellaswag/hellaswag_val.bin";
    assert_non_null(getcwd(here, sizeof here));
    assert_non_null(mkdtemp(dir));
    assert_int_equal(chdir(dir), 0);
    assert_int_equal(system("mkdir -p dev/data/hellaswag && touch "
                            "dev/data/hellaswag/hellaswag_val.bin"),
                     0);
    struct options o;
    parses(&o, "-h 1");
    assert_string_equal(o.eval, file);
    assert_true(options_given(&o, "eval"));
    assert_int_equal(o.note_count, 0);
    parses(&o, "-h 1 --eval other.bin");
    assert_string_equal(o.eval, "other.bin");
    parses(&o, "--eval other.bin -h 0");
    assert_string_equal(o.eval, "other.bin");
    parses(&o, "-h 0");
    assert_string_equal(o.eval, "");
    assert_int_equal(system("rm -r dev"), 0);
    assert_int_equal(chdir(here), 0);
    rmdir(dir);
}

// ---- saved options ------------------------------------------------------------------------------

struct difference {
    int count;
    char text[256];
};

static void note_difference(void *ctx, const char *name, const char *saved, const char *given)
{
    struct difference *d = ctx;
    d->count++;
    snprintf(d->text, sizeof d->text, "%s %s %s", name, saved, given);
}

static void saved_options_come_back_exactly(void **state)
{
    (void)state;
    static char text[OPTIONS_SAVED_MAX], again[OPTIONS_SAVED_MAX];
    char *argv[] = {"train_gpt",
                    "--prompt",
                    "a\\n=b\nc\n\\",
                    "--lr",
                    "0.1234567890123456789",
                    "--eps",
                    "3.3333333333333333e-9",
                    "-e",
                    "gpt3:c768",
                    "--no-guard",
                    "-k",
                    "wsd",
                    "--dtype",
                    "bf16",
                    "-d",
                    "512Ki",
                    "--seed",
                    "4294967295",
                    "-x",
                    "-1"};
    struct options o, back;
    struct error err = {0};
    assert_int_equal(options_parse(&o, sizeof argv / sizeof *argv, argv, &err), 0);
    size_t length = options_save(&o, text, sizeof text);
    assert_true(length > 0);
    parses(&back, "");
    assert_int_equal(options_merge(&back, text, length, NULL, NULL, &err), 0);
    assert_string_equal(back.prompt, "a\\n=b\nc\n\\");
    assert_true(back.lr == o.lr && back.eps == o.eps && back.no_guard);
    assert_int_equal(back.schedule, SCHEDULE_WSD);
    assert_int_equal(back.total_batch, 524288);
    assert_int_equal(back.seed, 4294967295);
    assert_false(options_given(&back, "lr"));
    assert_int_equal(options_save(&back, again, sizeof again), length);
    assert_memory_equal(text, again, length);
    assert_int_equal(options_save(&o, text, length), 0); // no room for the last byte
}

static void the_longest_texts_fit(void **state)
{
    (void)state;
    static char text[OPTIONS_SAVED_MAX];
    static char longest[OPTION_TEXT_MAX + 1];
    memset(longest, '\n', OPTION_TEXT_MAX - 1);
    char *argv[] = {"train_gpt", "-i",    longest,    "-j",    longest, "-e",   longest,
                    "--eval",    longest, "--prompt", longest, "-o",    longest};
    struct options o, back;
    struct error err = {0};
    assert_int_equal(options_parse(&o, sizeof argv / sizeof *argv, argv, &err), 0);
    size_t length = options_save(&o, text, sizeof text);
    assert_true(length > 5 * 2 * (OPTION_TEXT_MAX - 1));
    parses(&back, "");
    assert_int_equal(options_merge(&back, text, length, NULL, NULL, &err), 0);
    assert_string_equal(back.train, longest);
    longest[OPTION_TEXT_MAX - 1] = 'x';
    assert_int_equal(options_parse(&o, sizeof argv / sizeof *argv, argv, &err), STATUS_USAGE);
    assert_non_null(strstr(err.text, "too long"));
}

static void given_options_win_and_differences_are_told(void **state)
{
    (void)state;
    static char text[OPTIONS_SAVED_MAX];
    struct options o;
    struct error err = {0};
    struct difference d = {0};
    parses(&o, "-l 0.001 -b 8 -k linear -o a --threads 3");
    size_t length = options_save(&o, text, sizeof text);
    assert_null(strstr(text, "threads"));
    parses(&o, "-l 0.002 -b 8 -o b --resume");
    assert_int_equal(options_merge(&o, text, length, note_difference, &d, &err), 0);
    assert_int_equal(d.count, 1);
    assert_string_equal(d.text, "lr 0.001 0.002");
    assert_true(o.lr == 0.002 && o.micro_batch == 8 && o.schedule == SCHEDULE_LINEAR && o.resume);
    assert_string_equal(o.out, "b");
    assert_int_equal(o.threads, 0);
}

// Everything but the numbers of threads, also at its longest.
static void ranks_compare_all_but_threads(void **state)
{
    (void)state;
    static char text[OPTIONS_ALIKE_MAX], longest[OPTION_TEXT_MAX];
    char *argv[] = {"train_gpt", "-i",         longest, "-j",       longest, "-e",
                    longest,     "--eval",     longest, "--prompt", longest, "-o",
                    longest,     "--trace",    longest, "--plan",   longest, "--save-plan",
                    longest,     "--timeline", longest};
    struct options o;
    struct error err = {0};
    size_t rows;
    const struct option_row *t = options_table(&rows);
    memset(longest, '\n', OPTION_TEXT_MAX - 1);
    assert_int_equal(options_parse(&o, sizeof argv / sizeof *argv, argv, &err), STATUS_OK);
    assert_true(options_alike(&o, text, sizeof text) > 10 * 2 * (OPTION_TEXT_MAX - 1));
    for (size_t i = 1; i < rows; i++) {
        char line[80];
        snprintf(line, sizeof line, "\n%s=", t[i].name ? t[i].name : "");
        if (t[i].name) {
            assert_int_equal(strstr(text, line) != NULL, strstr(t[i].name, "threads") == NULL);
        }
    }
}

// A run may go on under another plan, so no training state may hold one.
static void a_training_state_knows_nothing_of_the_plan(void **state)
{
    (void)state;
    static char text[OPTIONS_SAVED_MAX];
    size_t rows, planning = 0;
    const struct option_row *t = options_table(&rows);
    struct options o;
    parses(&o, "--device-memory 600M --policy resident --chaos 7");
    assert_true(options_save(&o, text, sizeof text) > 0);
    for (size_t i = 0; i < rows; i++) {
        if (strcmp(t[i].group, "Memory and planning") == 0) {
            char line[64];
            snprintf(line, sizeof line, "\n%s=", t[i].name);
            assert_null(strstr(text, line));
            planning++;
        }
    }
    assert_int_equal(planning, 20);
    assert_non_null(strstr(text, "\nmicro-batch=4\n"));
}

static void damaged_saved_options_are_refused_and_change_nothing(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "lr=0.1\nnonsense=3\n", "lr=0.1\nlr\n", "lr=0.1\nlr=x\n",
        "lr=0.1\nlr=11\n",      "lr=0.1\n=\n",  "lr=0.1\nprompt=\\x\n",
        "lr=0.1\nprompt=\\",    "lr=0.1\n\n",   "lr=0.1\nout=x\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct options o, before;
        struct error err = {0};
        parses(&o, "");
        before = o;
        assert_int_equal(options_merge(&o, bad[i], strlen(bad[i]), NULL, NULL, &err), STATUS_FAIL);
        assert_true(err.text[0] != '\0');
        assert_memory_equal(&o, &before, sizeof o);
    }
    struct options o;
    struct error err = {0};
    parses(&o, "");
    assert_int_equal(options_merge(&o, "prompt=a\0b\n", 11, NULL, NULL, &err), STATUS_FAIL);
}

static bool is_option(const char *name, size_t length)
{
    size_t rows;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        if (t[i].name && strlen(t[i].name) == length && strncmp(t[i].name, name, length) == 0) {
            return true;
        }
    }
    return false;
}

// ./tokenize has no table; what it compares arguments with stands in its source.
static bool is_option_of_tokenize(const char *source, const char *name, size_t length)
{
    char quoted[80];
    snprintf(quoted, sizeof quoted, "--%.*s", (int)(length < 70 ? length : 70), name);
    for (const char *at = source; (at = strstr(at, quoted)); at++) {
        char next = at[length + 2];
        if (!isalnum((unsigned char)next) && next != '-') {
            return true;
        }
    }
    return false;
}

// The first `--name` in a line from `at` on that is no option of one of the two programs, nor of
// make or git; NULL: there is none.
static const char *stranger(const char *line, const char *source)
{
    static const char *const others[] = {"recursive", "long"};
    for (const char *at = line; (at = strstr(at, "--")); at += 2) {
        const char *name = at + 2;
        size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-");
        bool known = (at > line && !strchr(" `(|'\"[/", at[-1])) || !islower((int)*name) ||
                     is_option(name, n) || is_option_of_tokenize(source, name, n);
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            known = known || (strlen(others[i]) == n && strncmp(others[i], name, n) == 0);
        }
        if (!known) {
            return at;
        }
    }
    return NULL;
}

static void documentation_names_only_options_that_exist(void **state)
{
    (void)state;
    static char source[1 << 17];
    static const char *const documents[] = {"README.md", "hete/FORMATS.md"};
    FILE *tokenize = fopen("data/tokenize.c", "r");
    for (size_t i = 0; i < sizeof documents / sizeof *documents; i++) {
        FILE *document = fopen(documents[i], "r");
        if (!document || !tokenize) {
            fprintf(stderr, "skip: %s or data/tokenize.c is not in the working folder\n",
                    documents[i]);
            skip();
        }
        if (i == 0) {
            source[fread(source, 1, sizeof source - 1, tokenize)] = '\0';
        }
        char *line = NULL;
        size_t room = 0;
        while (getline(&line, &room, document) > 0) {
            const char *name = stranger(line, source);
            if (name) {
                fail_msg("%s names %.30s, which does not exist", documents[i], name);
            }
        }
        free(line);
        fclose(document);
    }
    fclose(tokenize);
}

static void the_readme_names_every_option(void **state)
{
    (void)state;
    static char text[1 << 17];
    FILE *readme = fopen("README.md", "r");
    if (!readme) {
        fprintf(stderr, "skip: README.md is not in the working folder\n");
        skip();
    }
    text[fread(text, 1, sizeof text - 1, readme)] = '\0';
    fclose(readme);
    size_t rows;
    const struct option_row *t = options_table(&rows);
    for (size_t i = 0; i < rows; i++) {
        if (t[i].name && strcmp(t[i].name, "version") != 0) {
            char name[64];
            snprintf(name, sizeof name, "--%s`", t[i].name);
            if (!strstr(text, name)) {
                fail_msg("README.md does not name `%s", name);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_those_of_the_contract),
        cmocka_unit_test(names_are_unique_and_well_formed),
        cmocka_unit_test(every_option_takes_its_range_and_no_more),
        cmocka_unit_test(values_that_cannot_be_parsed_are_refused),
        cmocka_unit_test(overflow_is_out_of_range),
        cmocka_unit_test(missing_values_are_refused),
        cmocka_unit_test(unknown_options_suggest_the_nearest),
        cmocka_unit_test(sizes_take_suffixes),
        cmocka_unit_test(automatic_options_take_auto_and_no_others_do),
        cmocka_unit_test(memory_and_planning_reach_their_fields),
        cmocka_unit_test(switches_take_an_optional_value),
        cmocka_unit_test(messages_stay_one_line),
        cmocka_unit_test(the_last_of_two_wins),
        cmocka_unit_test(only_the_short_resume_may_begin_anew),
        cmocka_unit_test(contradictions_are_refused),
        cmocka_unit_test(help_and_version_end_the_parsing),
        cmocka_unit_test(help_names_every_option_with_default_and_range),
        cmocka_unit_test(llm_c_scripts_parse_with_their_meaning),
        cmocka_unit_test(hellaswag_flag_names_the_file_if_it_is_there),
        cmocka_unit_test(saved_options_come_back_exactly),
        cmocka_unit_test(the_longest_texts_fit),
        cmocka_unit_test(given_options_win_and_differences_are_told),
        cmocka_unit_test(ranks_compare_all_but_threads),
        cmocka_unit_test(a_training_state_knows_nothing_of_the_plan),
        cmocka_unit_test(damaged_saved_options_are_refused_and_change_nothing),
        cmocka_unit_test(documentation_names_only_options_that_exist),
        cmocka_unit_test(the_readme_names_every_option),
    };
    return cmocka_run_group_tests_name("options", tests, NULL, NULL);
}
