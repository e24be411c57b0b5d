// Profiles: every operation of a step gets a time, and times are measured once per machine and
// shape. How long things take is nobody's business here.
#include "hete/machine.h"
#include "hete/profile.h"
#include "kernels/gpt.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct gpt gpt;

static struct profile_config config_of(enum dtype dtype, size_t memory)
{
    const struct gpt_config config = {
        .max_seq = 16, .vocab = 100, .layers = 1, .heads = 2, .hidden = 32, .head_rows = 8};
    gpt_open(&gpt, &config);
    return (struct profile_config){
        .device = {.kind = "cpu",
                   .dtype = dtype,
                   .threads = 1,
                   .head_size = 16,
                   .max_seq = 16,
                   .padded_vocab = 128,
                   .memory = memory,
                   .link = {.latency_s = 1e-5,
                            .in = 2e9,
                            .out = 2e9,
                            .in_duplex = 1e9,
                            .out_duplex = 1.5e9}},
        .host_threads = 2,
        .model = &gpt.model,
        .B = 2,
        .T = 16,
        .identity = "tiny",
    };
}

static void measures(struct costs *costs, const struct profile_config *config, bool cached)
{
    struct error err = {0};
    bool from_file = !cached;
    memset(costs, 0xff, sizeof *costs);
    if (profile_measure(costs, config, &from_file, &err)) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(from_file, cached);
}

// Every call has a time in the unit that it belongs to and nowhere else.
static void every_operation_has_a_time(void **state)
{
    (void)state;
    for (int variant = 0; variant < 4; variant++) {
        struct costs c;
        struct profile_config config =
            config_of(variant % 2 ? DTYPE_BF16 : DTYPE_FP32, variant / 2 ? 1 : 0);
        measures(&c, &config, false);
        for (size_t call = 0; call < CALLS; call++) {
            for (size_t k = 0; k < 2; k++) {
                bool there = model_unit(&gpt.model, k)->fn[call];
                assert_true(there ? c.call[call][k] > 0 : c.call[call][k] == 0);
            }
        }
        for (size_t k = 0; k < 2; k++) {
            assert_true(c.adam[k] > 0 && c.accumulate[k] > 0 && c.norm[k] > 0);
        }
        assert_true(c.clip > 0 && c.host_adam > 0 && c.host_accumulate > 0 && c.host_norm > 0);
        assert_true(c.link.latency_s > 0 && c.link.in_duplex > 0 && c.link.out_duplex > 0);
        assert_true(c.link.in >= c.link.in_duplex && c.link.out >= c.link.out_duplex);
        assert_true(c.peak_flops > 0);
        for (const double *x = (const double *)&c; x < (const double *)(&c + 1); x++) {
            assert_true(isfinite(*x));
        }
        if (variant / 2) {
            assert_true(c.link.latency_s >= 1e-5); // an emulated copy takes that at least
        }
    }
}

static void the_second_time_comes_from_the_cache(void **state)
{
    (void)state;
    struct costs first, again;
    struct profile_config config = config_of(DTYPE_FP32, 1);
    config.cache = scratch("cache");
    measures(&first, &config, false);
    measures(&again, &config, true);
    assert_memory_equal(&first, &again, sizeof first);
    // The memory is not what times depend on; all of these are.
    struct profile_config other = config;
    other.device.memory = 1 << 30;
    measures(&again, &other, true);
    other.B = 1;
    measures(&again, &other, false);
    other = config;
    other.T = 8;
    measures(&again, &other, false);
    other = config;
    other.identity = "another";
    measures(&again, &other, false);
    other = config;
    other.host_threads = 1;
    measures(&again, &other, false);
    other = config;
    other.device.dtype = DTYPE_BF16;
    measures(&again, &other, false);
    other = config;
    other.device.link.in_duplex = 0.9e9;
    measures(&again, &other, false);
    other = config;
    other.device.memory = 0;
    measures(&again, &other, false);
    measures(&again, &config, true);
    assert_memory_equal(&first, &again, sizeof first);
}

static void a_corrupt_cache_is_measured_anew(void **state)
{
    (void)state;
    static const char *const contents[] = {"", "nonsense\n", "forward_s 1\n", "forward_s nan\n"};
    struct costs costs, again;
    struct profile_config config = config_of(DTYPE_FP32, 1);
    char command[600], name[300];
    config.cache = scratch("fresh");
    measures(&costs, &config, false);
    snprintf(command, sizeof command, "ls -d %s/profile-*", config.cache);
    FILE *ls = popen(command, "r");
    assert_non_null(fgets(name, sizeof name, ls));
    pclose(ls);
    name[strcspn(name, "\n")] = '\0';
    for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
        FILE *out = fopen(name, "w");
        assert_non_null(out);
        fputs(contents[i], out);
        fclose(out);
        measures(&costs, &config, false);
        measures(&again, &config, true);
        assert_memory_equal(&costs, &again, sizeof costs);
    }
    struct error err = {0};
    assert_int_equal(costs_read(&again, name, &err), 0); // a file like any other
    assert_memory_equal(&costs, &again, sizeof costs);
}

static void no_place_for_a_cache_is_no_error(void **state)
{
    (void)state;
    struct costs costs;
    struct profile_config config = config_of(DTYPE_FP32, 1);
    scratch_write("file", "", 0);
    config.cache = scratch("file");
    measures(&costs, &config, false);
    measures(&costs, &config, false);
    config.cache = NULL;
    measures(&costs, &config, false);
    measures(&costs, &config, false);
}

static void a_device_that_is_not_there_is_an_error(void **state)
{
    (void)state;
    struct costs costs;
    struct error err = {0};
    bool cached = true;
    struct profile_config config = config_of(DTYPE_FP32, 1);
    config.device.kind = "abacus";
    assert_int_equal(profile_measure(&costs, &config, &cached, &err), STATUS_USAGE);
    assert_non_null(strstr(err.text, "abacus"));
    assert_false(cached);
}

static int remove_folders(void **state)
{
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s' '%s'", scratch("cache"), scratch("fresh"));
    return system(command) || scratch_remove(state);
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_has_a_time),
        cmocka_unit_test(the_second_time_comes_from_the_cache),
        cmocka_unit_test(a_corrupt_cache_is_measured_anew),
        cmocka_unit_test(no_place_for_a_cache_is_no_error),
        cmocka_unit_test(a_device_that_is_not_there_is_an_error),
    };
    return cmocka_run_group_tests(tests, scratch_make, remove_folders);
}
