// Plan files: what is written comes back, what people write is read, and whatever else is in a file
// is refused by file and line.
#include "hete/plan.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char by_hand[] = "# what I found to be best\r\n"
                              "\n"
                              "  policy   twin-flow:0.5   # with a comment\n"
                              "slots 2\n"
                              "units 13\n"
                              "rows 4\n"
                              "tokens 64\n"
                              "micro_batches 3\n"
                              "unit 5-12 host-optimizer keep resident whole\n"
                              "unit 0 keep resident device-optimizer whole\n"
                              "\tunit\t1-4 recompute stream host-optimizer whole\n"
                              "ranks 1\n"
                              "hold_updates 1\n"
                              "grad_buffers 2\n"
                              "slices 4\n"
                              "early_adam 0\n"
                              "speculate 0\n"
                              "fifo 1\n"
                              "barrier 0\n"
                              "serial_copies 0"; // no newline at the end

static int read_text(struct plan *plan, const char *text, size_t bytes, struct error *err)
{
    *err = (struct error){0};
    scratch_write("plan", text, bytes);
    return plan_read(plan, scratch("plan"), err);
}

static void assert_same(const struct plan *a, const struct plan *b)
{
    assert_string_equal(a->policy, b->policy);
    assert_true(a->units == b->units && a->B == b->B && a->T == b->T &&
                a->micro_batches == b->micro_batches && a->ranks == b->ranks &&
                a->hold_updates == b->hold_updates);
    assert_true(a->slots == b->slots && a->grad_buffers == b->grad_buffers &&
                a->slices == b->slices && a->early_adam == b->early_adam &&
                a->speculate == b->speculate && a->fifo == b->fifo && a->barrier == b->barrier &&
                a->serial_copies == b->serial_copies);
    for (size_t u = 0; u < a->units; u++) {
        assert_memory_equal(&a->unit[u], &b->unit[u], sizeof a->unit[u]);
    }
}

static bool coin(uint64_t *rng)
{
    return rng_below(rng, 2);
}

static void random_plan(struct plan *plan, uint64_t *rng)
{
    memset(plan, 0, sizeof *plan);
    snprintf(plan->policy, sizeof plan->policy, "twin-flow:%.3f", rng_unit(rng));
    plan->units = 2 + rng_below(rng, coin(rng) ? 12 : PLAN_UNITS_MAX - 1);
    plan->B = 1 + rng_below(rng, 65536);
    plan->T = 1 + rng_below(rng, 1 << 20);
    plan->micro_batches = 1 + rng_below(rng, 1000000000);
    plan->ranks = coin(rng) ? 1 : 1 + rng_below(rng, PLAN_RANKS_MAX);
    plan->slots = rng_below(rng, PLAN_SLOTS_MAX + 1);
    plan->grad_buffers = rng_below(rng, PLAN_GRADS_MAX + 1);
    plan->slices = 1 + rng_below(rng, PLAN_SLICES_MAX);
    plan->hold_updates = coin(rng);
    plan->early_adam = coin(rng);
    plan->speculate = coin(rng);
    plan->fifo = coin(rng);
    plan->barrier = coin(rng);
    plan->serial_copies = coin(rng);
    plan->unit[0].host_optimizer = coin(rng);
    plan->unit[0].shard = plan->ranks > 1 && (plan->unit[0].host_optimizer || coin(rng));
    for (size_t u = 1; u < plan->units; u++) {
        struct unit_plan *unit = &plan->unit[u];
        bool several = plan->ranks > 1;
        *unit = plan->unit[u - 1];
        if (u == 1 || rng_below(rng, 4) == 0) { // runs of different lengths
            unit->recompute = coin(rng);
            unit->host_optimizer = coin(rng);
            unit->stream = (several || unit->host_optimizer) && coin(rng);
            unit->shard = several && (unit->host_optimizer || unit->stream || coin(rng));
        }
    }
}

static void random_plans_come_back(void **state)
{
    (void)state;
    uint64_t rng = scratch_seed();
    for (int i = 0; i < 100; i++) {
        struct plan plan, back;
        struct error err = {0};
        random_plan(&plan, &rng);
        memset(&back, 0xff, sizeof back);
        if (plan_write(&plan, scratch("plan"), &err) || plan_read(&back, scratch("plan"), &err)) {
            fail_msg("plan %d: %s", i, err.text);
        }
        assert_same(&plan, &back);
    }
    assert_int_equal(scratch_files(), 1);
}

static void what_people_write_is_read(void **state)
{
    (void)state;
    struct plan plan;
    struct error err;
    if (read_text(&plan, by_hand, strlen(by_hand), &err)) {
        fail_msg("%s", err.text);
    }
    assert_string_equal(plan.policy, "twin-flow:0.5");
    assert_true(plan.units == 13 && plan.B == 4 && plan.T == 64 && plan.micro_batches == 3);
    assert_true(plan.slots == 2 && plan.grad_buffers == 2 && plan.slices == 4 && plan.ranks == 1);
    assert_true(plan.hold_updates && plan.fifo);
    assert_false(plan.early_adam || plan.barrier || plan.serial_copies);
    for (size_t u = 0; u < 13; u++) {
        bool first = u >= 1 && u <= 4;
        assert_int_equal(plan.unit[u].recompute, first);
        assert_int_equal(plan.unit[u].stream, first);
        assert_int_equal(plan.unit[u].host_optimizer, u > 0);
    }
}

// Runs of equal units share a line, so that a plan of any depth can be taken in at a glance.
static void a_written_plan_is_small(void **state)
{
    (void)state;
    struct plan plan = {
        .policy = "auto", .units = 97, .B = 1, .T = 1, .micro_batches = 1, .ranks = 1, .slices = 4};
    struct error err = {0};
    for (size_t u = 40; u < 97; u++) {
        plan.unit[u].recompute = true;
    }
    assert_int_equal(plan_write(&plan, scratch("plan"), &err), 0);
    size_t bytes, lines = 0;
    char *text = scratch_read("plan", &bytes);
    for (const char *c = text; *c; c++) {
        lines += *c == '\n';
    }
    assert_int_equal(lines, 18);
    assert_non_null(strstr(text, "\nunit 0-39 keep resident device-optimizer whole\n"
                                 "unit 40-96 recompute resident device-optimizer whole\n"));
    free(text);
}

// by_hand with one line replaced: what the message must say (words split at '~').
static const struct {
    const char *line, *instead, *words;
} refusals[] = {
    {"slots 2\n", "", "plan: slots is missing"},
    {"serial_copies 0", "", "serial_copies is missing"},
    {"policy   twin-flow:0.5", "", "policy is missing"},
    {"slots 2\n", "slots 9\n", "plan:4:~slots 9 is out of range~0 to 8"},
    {"slots 2\n", "slots -1\n", "plan:4:~slots '-1' is not a whole number~0 to 8"},
    {"slots 2\n", "slots two\n", "'two' is not a whole number"},
    {"slots 2\n", "slots 99999999999999999999999\n", "out of range~0 to 8"},
    {"slots 2\n", "slots\n", "plan:4: slots: expected one value, found 0"},
    {"slots 2\n", "slots 2 3\n", "expected one value, found 2"},
    {"slots 2\n", "slots 2\nslots 2\n", "plan:5: slots is there twice, first in line 4"},
    {"slots 2\n", "slots 2\nnonsense 3\n", "plan:5: 'nonsense' is not a field of a plan~FORMATS"},
    {"fifo 1\n", "fifo 2\n", "fifo 2 is out of range~0 to 1"},
    {"slices 4\n", "slices 0\n", "slices 0 is out of range~1 to 16"},
    {"grad_buffers 2\n", "grad_buffers 9\n", "0 to 8"},
    {"units 13\n", "units 1\n", "units 1 is out of range~2 to 1001"},
    {"units 13\n", "units 1002\n", "2 to 1001"},
    {"units 13\n", "units 14\n", "14 units, but nothing is said of unit 13"},
    {"units 13\n", "units 12\n", "plan:9: unit 12, but there are 12 units: 0 to 11"},
    {"rows 4\n", "rows 0\n", "1 to 65536"},
    {"tokens 64\n", "tokens 1048577\n", "1 to 1048576"},
    {"unit 5-12", "unit 4-12", "plan:11: unit 4 is there twice, first in line 9"},
    {"unit 5-12", "unit 6-12", "nothing is said of unit 5"},
    {"unit 5-12", "unit 12-5", "plan:9: unit 5 is out of range (allowed: 12 to 1000)"},
    {"unit 5-12", "unit 5-", "unit '' is not a whole number"},
    {"unit 5-12", "unit -", "unit '' is not a whole number"},
    {"unit 5-12", "unit 5-12-13", "unit '12-13' is not a whole number"},
    {"unit 5-12", "unit x", "unit 'x' is not a whole number~0 to 1000"},
    {"unit 5-12", "unit 5-1001", "out of range (allowed: 5 to 1000)"},
    {"unit 5-12 host-optimizer keep resident whole", "unit", "unit: its number is missing"},
    {"host-optimizer keep resident", "keep resident", "not said whether device-optimizer or host"},
    {"host-optimizer keep resident", "keep keep", "keep or recompute is decided twice"},
    {"host-optimizer keep resident", "keep recompute", "keep or recompute is decided twice"},
    {"host-optimizer keep resident", "maybe", "'maybe' is none of keep recompute"},
    {"recompute stream host-optimizer", "keep stream device-optimizer",
     "plan:11: stream needs host-optimizer"},
    {"resident whole\nunit 0", "resident\nunit 0", "plan:9: it is not said whether whole or shard"},
    {"resident whole\nunit 0", "resident shard\nunit 0", "plan:9: shard needs several ranks"},
    {"ranks 1\n", "ranks 2\n", "plan:11: stream and host-optimizer need shard"},
    {"ranks 1\n", "ranks 0\n", "plan:12: ranks 0 is out of range~1 to 1048576"},
    {"ranks 1\n", "", "ranks is missing"},
    {"unit 0 keep", "unit 0 recompute", "unit 0~always"},
    {"twin-flow:0.5", "a-name-that-is-longer-than-any-policy", "longer than 31 bytes"},
    {"twin-flow:0.5", "a b c d e f g h i j k l m n o p", "more than 16 words"},
};

static void assert_says(const char *text, const char *words)
{
    char copy[256];
    assert_null(strchr(text, '\n'));
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok(copy, "~"); word; word = strtok(NULL, "~")) {
        if (!strstr(text, word)) {
            fail_msg("'%s' does not say '%s'", text, word);
        }
    }
}

static void all_else_is_refused_by_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        char text[2048];
        struct plan plan;
        struct error err;
        const char *at = strstr(by_hand, refusals[i].line);
        assert_non_null(at);
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - by_hand), by_hand, refusals[i].instead,
                 at + strlen(refusals[i].line));
        if (read_text(&plan, text, strlen(text), &err) != STATUS_FAIL) {
            fail_msg("'%s' instead of '%s' was accepted", refusals[i].instead, refusals[i].line);
        }
        assert_says(err.text, refusals[i].words);
    }
    struct plan plan;
    struct error err = {0};
    assert_int_equal(plan_read(&plan, scratch("nothing"), &err), STATUS_FAIL);
    assert_says(err.text, "nothing~No such file");
    assert_int_equal(plan_read(&plan, scratch(""), &err), STATUS_FAIL);
    assert_int_equal(read_text(&plan, "", 0, &err), STATUS_FAIL);
    assert_int_equal(read_text(&plan, "units 2\0\n", 9, &err), STATUS_FAIL);
    assert_says(err.text, "no text");
    char *large = test_alloc(1, 2 << 20);
    memset(large, '\n', 2 << 20);
    assert_int_equal(read_text(&plan, large, 2 << 20, &err), STATUS_FAIL);
    assert_says(err.text, "2097152 bytes");
    free(large);
    assert_int_equal(read_text(&plan, "\x1b[2J 3\n", 7, &err), STATUS_FAIL);
    assert_null(strchr(err.text, 0x1b));
}

// The plan in the documentation is one.
static void the_documented_plan_is_read(void **state)
{
    (void)state;
    FILE *in = fopen("hete/FORMATS.md", "r");
    if (!in) {
        fprintf(stderr, "skip: hete/FORMATS.md is not in the working folder\n");
        skip();
    }
    char text[2048], line[512];
    size_t used = 0;
    while (fgets(line, sizeof line, in) && strncmp(line, "## Machine", 10) != 0) {
        if (strncmp(line, "    ", 4) == 0) {
            used += (size_t)snprintf(text + used, sizeof text - used, "%s", line);
            assert_true(used < sizeof text);
        }
    }
    fclose(in);
    struct plan plan;
    struct error err;
    if (read_text(&plan, text, used, &err)) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(plan.units, 13);
    assert_true(plan.unit[4].stream && !plan.unit[5].recompute);
}

// A file with some of its bytes, words or lines changed is refused with a message, or is a plan
// that could have been written.
static void mutated_files_do_no_harm(void **state)
{
    (void)state;
    uint64_t rng = scratch_seed();
    static const char *const pieces[] = {"unit ",     "0", "-", "\n", " ",      "#",
                                         "\nslots 3", "5", "9", "\0", "stream", "unit 1-999"};
    size_t accepted = 0;
    for (int i = 0; i < 3000; i++) {
        char text[4096];
        size_t n = strlen(by_hand);
        memcpy(text, by_hand, n);
        for (size_t k = 1 + rng_below(&rng, 4); k > 0 && n > 0; k--) {
            size_t at = rng_below(&rng, n);
            const char *piece = pieces[rng_below(&rng, sizeof pieces / sizeof *pieces)];
            size_t length = strlen(piece), cut = rng_below(&rng, 30);
            switch (rng_below(&rng, 4)) {
            case 0:
                text[at] = (char)rng_bits(&rng);
                break;
            case 1:
                memmove(text + at + length, text + at, n - at);
                memcpy(text + at, piece, length);
                n += length;
                break;
            case 2:
                cut = cut < n - at ? cut : n - at;
                memmove(text + at, text + at + cut, n - at - cut);
                n -= cut;
                break;
            default:
                text[at] = '0' + (char)rng_below(&rng, 10);
            }
        }
        struct plan plan, back;
        struct error err;
        if (read_text(&plan, text, n, &err)) {
            assert_int_equal(err.status, STATUS_FAIL);
            assert_true(strlen(err.text) > 0 && !strchr(err.text, '\n'));
            continue;
        }
        if (++accepted > 100) {
            continue; // writing waits for the disk
        }
        assert_int_equal(plan_write(&plan, scratch("again"), &err), 0);
        assert_int_equal(plan_read(&back, scratch("again"), &err), 0);
        assert_same(&plan, &back);
    }
    assert_in_range(accepted, 1, 2500);
}

static void a_plan_that_cannot_be_written_says_where(void **state)
{
    (void)state;
    struct plan plan;
    struct error err = {0};
    assert_int_equal(read_text(&plan, by_hand, strlen(by_hand), &err), 0);
    assert_int_equal(plan_write(&plan, scratch("no/such/folder"), &err), STATUS_FAIL);
    assert_says(err.text, "no/such/folder");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_plans_come_back),
        cmocka_unit_test(what_people_write_is_read),
        cmocka_unit_test(a_written_plan_is_small),
        cmocka_unit_test(all_else_is_refused_by_line),
        cmocka_unit_test(the_documented_plan_is_read),
        cmocka_unit_test(mutated_files_do_no_harm),
        cmocka_unit_test(a_plan_that_cannot_be_written_says_where),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
