// Profiles: every operation of a step gets a time, and times are measured once per machine and
// shape. How long things take is nobody's business here.
#include "hete/machine.h"
#include "hete/profile.h"
#include "hete/transport.h"
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

// ---- with another rank --------------------------------------------------------------------------

// The other rank is this one, but for what it has measured: everything takes it twice as long.
struct other {
    struct comm comm;
    bool has_costs;    // in its cache
    struct costs mine; // what this rank has told it last
    size_t barriers, reductions, scatters, gathers, shares;
    bool lost;
};

static int ask_other(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    struct other *o = (struct other *)c;
    double *twice = (double *)((char *)all + bytes);
    assert_int_equal(bytes % sizeof(double), 0);
    memcpy(all, mine, bytes);
    for (size_t i = 0; i < bytes / sizeof(double); i++) {
        twice[i] = 2 * ((const double *)mine)[i];
    }
    if (bytes == sizeof o->mine) {
        memcpy(&o->mine, mine, bytes);
    } else if (*(const double *)mine == 0 || *(const double *)mine == 1) {
        *twice = !o->has_costs; // whether they are missing, not seconds
    }
    (void)err;
    return STATUS_OK;
}

static int meet(struct comm *c, struct error *err)
{
    struct other *o = (struct other *)c;
    o->barriers++;
    return o->lost ? error_set(err, STATUS_FAIL, "rank 1 is gone") : STATUS_OK;
}

static int exchange(struct comm *c, void *stage, const void *x, const struct comm_pieces *p,
                    struct error *err)
{
    size_t bytes = p->n[0] * p->element;
    memcpy(stage, (const char *)x + p->first[0] * p->element, bytes);
    memcpy((char *)stage + bytes, stage, bytes);
    ((struct other *)c)->scatters++;
    (void)err;
    return STATUS_OK;
}

static int reduce(struct comm *c, void *sum, const void *x, const struct comm_pieces *p,
                  struct error *err)
{
    memcpy(sum, (const char *)x + p->first[0] * p->element, p->n[0] * p->element);
    ((struct other *)c)->reductions++;
    (void)err;
    return STATUS_OK;
}

static int gather(struct comm *c, void *x, const void *mine, const struct comm_pieces *p,
                  struct error *err)
{
    memcpy((char *)x + p->first[1] * p->element, mine, p->n[1] * p->element);
    ((struct other *)c)->gathers++;
    (void)err;
    return STATUS_OK;
}

static int share(struct comm *c, const void *mine, void *all, size_t bytes, struct error *err)
{
    memcpy((char *)all + bytes, mine, bytes);
    ((struct other *)c)->shares++;
    (void)err;
    return STATUS_OK;
}

static void give_up(struct comm *c, const char *why)
{
    ((struct other *)c)->has_costs = strstr(why, "gone");
}

static void forget(struct comm *c, enum comm_thread thread, const char *text)
{
    assert_true(c && thread < COMM_THREADS && text);
}

static void forget_that(struct comm *c, bool waits)
{
    (void)c;
    (void)waits;
}

static const struct transport transport = {.doing = forget,
                                           .waits = forget_that,
                                           .all_gather = ask_other,
                                           .barrier = meet,
                                           .exchange = exchange,
                                           .gather = gather,
                                           .reduce = reduce,
                                           .share = share,
                                           .give_up = give_up};

static struct other open_other(void)
{
    return (struct other){.comm = {.transport = &transport, .ranks = 2, .local_ranks = 2}};
}

// Every time is the slower rank's, every rate too.
static void ranks_agree_on_the_slowest(void **state)
{
    (void)state;
    for (int variant = 0; variant < 4; variant++) {
        struct costs c;
        struct other o = open_other();
        struct profile_config config =
            config_of(variant % 2 ? DTYPE_BF16 : DTYPE_FP32, variant / 2 ? 1 : 0);
        config.comm = &o.comm;
        config.fast_reduce = variant == 3;
        measures(&c, &config, false);
        assert_true((config.fast_reduce ? o.scatters : o.reductions) == 0);
        assert_true(c.scatter[0] > 0 && c.scatter[1] > 0 && c.gather[0] > 0 && c.gather[1] > 0);
        assert_true(c.share > 0 && o.scatters + o.reductions >= 14 && o.gathers >= 14 &&
                    o.shares >= 7);
        assert_true(o.barriers >= 4); // all are at the same at the same time
        const double *mine = (const double *)&o.mine;
        for (const double *x = (const double *)&c; x < (const double *)(&c + 1); x++, mine++) {
            bool rate = (x >= &c.link.in && x <= &c.link.out_duplex) || x == &c.peak_flops;
            assert_true(*x == (rate ? *mine : 2 * *mine));
        }
    }
}

static void a_cache_counts_if_all_ranks_have_one(void **state)
{
    (void)state;
    struct costs first, again;
    struct other o = open_other();
    struct profile_config config = config_of(DTYPE_FP32, 1);
    config.cache = scratch("shared");
    measures(&first, &config, false); // alone
    config.comm = &o.comm;
    measures(&first, &config, false); // another number of ranks
    measures(&again, &config, false); // the other one has none
    o.has_costs = true;
    measures(&first, &config, true);
    assert_true(first.scatter[1] == 2 * again.scatter[1]); // the other one's are older
    o.comm.local_ranks = 1;
    measures(&again, &config, false);
    o.comm.rank = 1; // another one writes
    o.comm.local_rank = 1;
    o.comm.local_ranks = 3;
    measures(&again, &config, false);
    measures(&again, &config, false);
    config.comm = NULL;
    measures(&again, &config, true);
}

static void a_rank_that_is_gone_ends_the_measurement(void **state)
{
    (void)state;
    struct costs costs;
    struct error err = {0};
    struct other o = open_other();
    bool cached;
    struct profile_config config = config_of(DTYPE_FP32, 1);
    config.comm = &o.comm;
    o.lost = true;
    assert_int_equal(profile_measure(&costs, &config, &cached, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "gone"));
    assert_true(o.has_costs && o.barriers == 1); // told the others, waited no longer
}

static int remove_folders(void **state)
{
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s' '%s' '%s'", scratch("cache"), scratch("fresh"),
             scratch("shared"));
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
        cmocka_unit_test(ranks_agree_on_the_slowest),
        cmocka_unit_test(a_cache_counts_if_all_ranks_have_one),
        cmocka_unit_test(a_rank_that_is_gone_ends_the_measurement),
    };
    return cmocka_run_group_tests(tests, scratch_make, remove_folders);
}
