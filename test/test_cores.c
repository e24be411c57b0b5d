// The division of cores among ranks, on machines that hwloc makes up.
#include "hete/cores.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 12 };

static struct core_set range(size_t first, size_t n)
{
    struct core_set s = {{0}};
    for (size_t i = first; i < first + n; i++) {
        s.bits[i / 64] |= 1ull << i % 64;
    }
    return s;
}

static bool has(const struct core_set *s, size_t core)
{
    return s->bits[core / 64] >> core % 64 & 1;
}

static size_t count(const struct core_set *s)
{
    size_t n = 0;
    for (size_t i = 0; i < CORES_MAX; i++) {
        n += has(s, i);
    }
    return n;
}

static struct core_claim claim(const char *machine, struct core_set may)
{
    struct core_claim c = {.may = may};
    snprintf(c.machine, sizeof c.machine, "%s", machine);
    return c;
}

// What every rank works out for itself.
static void divide(struct core_share out[], const struct core_claim *claims, size_t ranks)
{
    struct error err;
    for (size_t r = 0; r < ranks; r++) {
        assert_int_equal(cores_divide(out + r, claims, ranks, r, &err), STATUS_OK);
        assert_int_equal(count(&out[r].cores) > 0, count(&claims[r].may) > 0);
        assert_true(out[r].threads >= 1);
        if (out[r].bind) {
            assert_int_equal(out[r].threads, count(&out[r].cores));
        } else {
            assert_memory_equal(&out[r].cores, &claims[r].may, sizeof claims[r].may);
        }
    }
}

// Every core of `all` is in one part, and no other core is.
static void check_parts(const struct core_share *share, size_t ranks, const struct core_set *all)
{
    for (size_t i = 0; i < CORES_MAX; i++) {
        size_t n = 0;
        for (size_t r = 0; r < ranks; r++) {
            n += has(&share[r].cores, i);
        }
        assert_int_equal(n, has(all, i));
    }
}

// The parts of a machine of so many packages of 8 cores of 2 threads, in the order of the ranks.
static void check_places(const struct core_share *share, size_t ranks, size_t packages)
{
    size_t next = 0;
    for (size_t r = 0; r < ranks; r++) {
        size_t n = count(&share[r].cores);
        for (size_t i = next; i < next + n; i++) {
            assert_true(has(&share[r].cores, i));
        }
        assert_true(n % 2 == 0); // both threads of a core
        assert_true(next / 16 == (next + n - 1) / 16 || (next % 16 == 0 && n % 16 == 0));
        assert_true(n >= 2 * (8 * packages / ranks / 2)); // never less than half of an even share
        next += n;
    }
}

#ifdef USE_HWLOC
static const bool with_hwloc = true;
#else
static const bool with_hwloc = false;
#endif

static void need_hwloc(void)
{
    if (!with_hwloc) {
        fprintf(stderr, "skipped: this build is one without hwloc\n");
        skip();
    }
}

static void made_up(const char *machine)
{
    setenv("HWLOC_SYNTHETIC", machine, 1);
}

static void test_packages(void **state)
{
    (void)state;
    need_hwloc();
    made_up("package:2 [numa] l3:1 core:8 pu:2");
    for (size_t ranks = 2; ranks <= 5; ranks++) {
        struct core_claim claims[MOST_RANKS];
        struct core_share share[MOST_RANKS];
        struct core_set all = range(0, 32);
        for (size_t r = 0; r < ranks; r++) {
            claims[r] = claim("a", all);
        }
        divide(share, claims, ranks);
        check_parts(share, ranks, &all);
        check_places(share, ranks, 2);
        for (size_t r = 0; r < ranks; r++) {
            assert_true(share[r].bind);
            assert_int_equal(share[r].there, 32);
            assert_int_equal(share[r].taken, 32);
        }
    }
}

// Three ranks of one package, the fourth of the other: as a launcher that binds to packages.
static void test_bound_to_packages(void **state)
{
    (void)state;
    need_hwloc();
    made_up("package:2 [numa] l3:1 core:8 pu:2");
    struct core_claim claims[4];
    struct core_share share[4];
    struct core_set all = range(0, 32);
    for (size_t r = 0; r < 4; r++) {
        claims[r] = claim("a", range(r == 1 ? 16 : 0, 16));
    }
    divide(share, claims, 4);
    check_parts(share, 4, &all);
    assert_false(share[1].bind);
    assert_int_equal(share[1].sharing, 1);
    assert_int_equal(share[0].sharing, 3);
    assert_int_equal(share[0].local, 4);
}

static void test_alone(void **state)
{
    (void)state;
    made_up("core:8 pu:1");
    struct core_claim claims[3] = {claim("a", range(0, 8)), claim("b", range(0, 8)),
                                   claim("c", range(3, 2))};
    struct core_share share[3];
    divide(share, claims, 3);
    for (size_t r = 0; r < 3; r++) {
        assert_false(share[r].bind);
        assert_int_equal(share[r].local, 1);
        assert_int_equal(share[r].threads, r == 2 ? 2 : 8);
    }
    assert_int_equal(share[2].taken, 2);
    assert_int_equal(share[2].there, with_hwloc ? 8 : 0);
}

static void test_too_many(void **state)
{
    (void)state;
    made_up("core:2 pu:1");
    struct core_claim claims[4];
    struct core_share share[4];
    for (size_t r = 0; r < 4; r++) {
        claims[r] = claim("a", range(0, 2));
    }
    divide(share, claims, 4);
    for (size_t r = 0; r < 4; r++) {
        assert_false(share[r].bind);
        assert_int_equal(share[r].threads, 1);
        assert_int_equal(share[r].sharing, 4);
        assert_int_equal(share[r].divided, 2);
    }
}

// A machine that cannot be told apart by hwloc (its cores are none of these) binds nobody.
static void test_unknown_cores(void **state)
{
    (void)state;
    made_up("core:2 pu:1");
    struct core_claim claims[2] = {claim("a", range(100, 8)), claim("a", range(100, 8))};
    struct core_share share[2];
    divide(share, claims, 2);
    assert_int_equal(share[0].threads, 4);
    assert_int_equal(share[1].threads, 4);
}

// Any affinities on two machines, against who overlaps with whom by all pairs.
static void try_affinities(uint64_t *rng)
{
    struct core_claim claims[MOST_RANKS];
    struct core_share share[MOST_RANKS];
    bool joined[MOST_RANKS][MOST_RANKS];
    size_t ranks = 1 + rng_below(rng, MOST_RANKS);
    for (size_t r = 0; r < ranks; r++) {
        size_t first = rng_below(rng, 32);
        claims[r] = claim(rng_below(rng, 2) ? "a" : "b",
                          range(first, 1 + rng_below(rng, 32 - (uint32_t)first)));
    }
    for (size_t i = 0; i < ranks; i++) {
        for (size_t j = 0; j < ranks; j++) {
            joined[i][j] = (claims[i].may.bits[0] & claims[j].may.bits[0]) &&
                           strcmp(claims[i].machine, claims[j].machine) == 0;
        }
    }
    for (size_t k = 0; k < ranks; k++) {
        for (size_t i = 0; i < ranks; i++) {
            for (size_t j = 0; j < ranks; j++) {
                joined[i][j] = joined[i][j] || (joined[i][k] && joined[k][j]);
            }
        }
    }
    divide(share, claims, ranks);
    for (size_t i = 0; i < ranks; i++) {
        struct core_share group[MOST_RANKS];
        struct core_set all = {{0}};
        size_t n = 0;
        for (size_t j = 0; j < ranks; j++) {
            if (joined[i][j]) {
                all.bits[0] |= claims[j].may.bits[0];
                group[n++] = share[j];
            }
        }
        assert_int_equal(share[i].sharing, n);
        assert_int_equal(share[i].divided, count(&all));
        assert_int_equal(share[i].bind, n > 1 && n <= count(&all));
        if (share[i].bind) {
            check_parts(group, n, &all);
        }
    }
}

static void test_affinities(void **state)
{
    (void)state;
    uint64_t rng = scratch_seed();
    need_hwloc();
    made_up("package:2 [numa] l3:2 core:4 pu:2");
    for (int i = 0; i < 100; i++) {
        try_affinities(&rng);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {.name = "2 packages of 8 cores among 2 to 5 ranks", .test_func = test_packages},
        {.name = "ranks that are bound to packages", .test_func = test_bound_to_packages},
        {.name = "one rank on each machine", .test_func = test_alone},
        {.name = "more ranks than cores", .test_func = test_too_many},
        {.name = "cores that are not known", .test_func = test_unknown_cores},
        {.name = "any affinities", .test_func = test_affinities},
    };
    return cmocka_run_group_tests_name("cores", tests, NULL, NULL);
}
