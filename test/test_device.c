// The emulated device: memory that host code cannot touch, a cap, and a link whose time is right.
//
// Times are compared on a virtual clock. On the real one only a lower bound is, which holds however
// slow the machine is: no copy ends before the link would let it.
#include "kernels/cpu/link.h"
#include "kernels/layers.h"
#include "test/cmocka.h"
#include "test/scratch.h"
#include "test/tiny.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MEMORY ((size_t)3 << 20)

static struct device *open_device(size_t memory, const struct device_link *link)
{
    struct error err;
    struct device *dev;
    struct device_config config = {.kind = "cpu",
                                   .threads = 1,
                                   .head_size = 16,
                                   .max_seq = 16,
                                   .padded_vocab = 128,
                                   .memory = memory};
    if (link) {
        config.link = *link;
    }
    if (device_open(&dev, &config, &err)) {
        fail_msg("%s", err.text);
    }
    return dev;
}

static char *arena_of(struct device *dev, size_t bytes)
{
    struct error err;
    void *base;
    if (device_arena(dev, bytes, &base, &err)) {
        fail_msg("%s", err.text);
    }
    return base;
}

static char *host_arena(struct device *dev, size_t bytes, bool pinned)
{
    struct error err;
    void *base;
    if (device_host_arena(dev, bytes, pinned, &base, &err)) {
        fail_msg("%s", err.text);
    }
    return base;
}

static bool all_zero(const char *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

// ---- memory -------------------------------------------------------------------------------------

// The signal that ends a process which reads or writes the byte; 0: nothing happens.
static int signal_of_access(volatile char *byte, bool write)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL); // not a sanitizer's or cmocka's
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        if (write) {
            *byte = 1;
        }
        _exit(*byte == 77);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void host_access_dies(void **state)
{
    (void)state;
    struct device *dev = open_device(MEMORY, NULL);
    char *arena = arena_of(dev, MEMORY);
    assert_true(dev->separate && dev->lane_offset != 0);
    size_t at[] = {0, 12345, MEMORY - 1};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(signal_of_access(arena + at[i], false), SIGSEGV);
        assert_int_equal(signal_of_access(arena + at[i], true), SIGSEGV);
        assert_int_equal(signal_of_access(arena + dev->lane_offset + at[i], true), 0);
    }
    device_close(dev);
}

static void plain_device_is_host_memory(void **state)
{
    (void)state;
    struct device *dev = open_device(0, &(struct device_link){.latency_s = 1, .in = 1, .out = 1});
    char *arena = arena_of(dev, MEMORY);
    assert_true(!dev->separate && dev->lane_offset == 0 && dev->memory == SIZE_MAX);
    assert_true(all_zero(arena, MEMORY));
    struct device_link link;
    device_get_link(dev, &link);
    assert_true(link.latency_s == 0 && link.in == 0 && link.out == 0);
    device_set_link(dev, &(struct device_link){.latency_s = 3600});
    device_copy_in(dev, arena + 5, "abc", 3); // without a limit, or this takes an hour
    assert_memory_equal(arena + 5, "abc", 3);
    assert_int_equal(device_pageable_copies(dev), 0);
    device_close(dev);
}

static void cap_is_refused_with_both_numbers(void **state)
{
    (void)state;
    struct error err;
    void *base = NULL;
    struct device *dev = open_device(MEMORY, NULL);
    assert_int_equal(dev->memory, MEMORY);
    assert_non_null(strstr(dev->summary, "emulating a device of 3 MiB"));
    assert_int_equal(device_arena(dev, MEMORY + 1, &base, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "3145729 bytes"));
    assert_non_null(strstr(err.text, "has 3145728"));
    assert_non_null(strstr(err.text, "--device-memory"));
    assert_null(base);
    arena_of(dev, MEMORY); // a refusal leaves nothing behind
    assert_int_equal(device_arena(dev, 256, &base, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "sealed at 3145728"));
    device_close(dev);

    dev = open_device(SIZE_MAX, NULL); // more than there are addresses
    assert_int_equal(device_arena(dev, (size_t)1 << 60, &base, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "1152921504606846976 bytes"));
    assert_non_null(strstr(err.text, "--micro-batch"));
    device_close(dev);
}

static void host_arenas(void **state)
{
    (void)state;
    struct error err;
    void *base = NULL;
    struct device *dev = open_device(MEMORY, NULL);
    for (int pinned = 0; pinned < 2; pinned++) {
        assert_int_equal(device_host_arena(dev, (size_t)1 << 60, pinned, &base, &err), STATUS_FAIL);
        assert_non_null(strstr(err.text, "1152921504606846976 bytes"));
        size_t bytes = 100000 + 4096 * (size_t)pinned;
        char *p = host_arena(dev, bytes, pinned);
        assert_true(all_zero(p, bytes));
        memset(p, 1, bytes);
        assert_int_equal(device_host_arena(dev, 1, pinned, &base, &err), STATUS_FAIL);
        assert_non_null(strstr(err.text, pinned ? "pinned" : "pageable"));
    }
    device_close(dev);
}

// Random copies of every kind against an array that stands for the device's memory.
static void copies_move_the_right_bytes(void **state)
{
    (void)state;
    uint64_t rng = test_seed();
    enum { N = 1 << 16 };
    struct device *dev = open_device(MEMORY, NULL);
    char *arena = arena_of(dev, N), *host = host_arena(dev, N, true);
    char *expected = test_alloc(N, 1), *before = test_alloc(N, 1);
    memset(expected, 0, N); // the arena is zero-filled
    for (int i = 0; i < 5000; i++) {
        size_t at = rng_below(&rng, N), from = rng_below(&rng, N);
        size_t most = N - (at > from ? at : from), n = rng_below(&rng, most + 1);
        int kind = (int)rng_below(&rng, 5), byte = (int)rng_below(&rng, 256);
        memset(host + from, (int)rng_below(&rng, 256), n);
        memcpy(before, host, N);
        if (kind == 0) {
            device_fill(dev, arena + at, byte, n);
            memset(expected + at, byte, n);
        } else if (kind < 3) {
            (kind == 1 ? device_copy_in : device_poke)(dev, arena + at, host + from, n);
            memcpy(expected + at, host + from, n);
        } else {
            (kind == 3 ? device_copy_out : device_peek)(dev, host + from, arena + at, n);
            memcpy(before + from, expected + at, n);
        }
        assert_memory_equal(host, before, N);
    }
    device_peek(dev, host, arena, N);
    assert_memory_equal(host, expected, N);
    free(expected);
    free(before);
    device_close(dev);
}

static void lanes_compute_on_it(void **state)
{
    (void)state;
    enum { N = 1000 };
    struct device *dev = open_device(MEMORY, NULL);
    char *arena = arena_of(dev, 2 * N * sizeof(float));
    float host[N], sum[N];
    for (int i = 0; i < N; i++) {
        host[i] = (float)i;
    }
    device_copy_in(dev, arena, host, sizeof host);
    float *x = (float *)(void *)(arena + dev->lane_offset);
    dev->layers->accumulate(dev, x + N, x, true, N);
    dev->layers->accumulate(dev, x + N, x, false, N);
    device_copy_out(dev, sum, arena + sizeof host, sizeof sum);
    for (int i = 0; i < N; i++) {
        assert_true(sum[i] == 2 * (float)i);
    }
    device_close(dev);
}

// ---- pageable copies ----------------------------------------------------------------------------

static void pageable_copies_are_counted(void **state)
{
    (void)state;
    enum { N = 4096 };
    struct device *dev = open_device(MEMORY, NULL);
    char *arena = arena_of(dev, N), stack[16] = "";
    device_copy_in(dev, arena, stack, sizeof stack); // no pinned memory yet
    char *pinned = host_arena(dev, N, true), *pageable = host_arena(dev, N, false);
    device_copy_in(dev, arena, pinned, N);
    device_copy_out(dev, pinned + N - 1, arena, 1);
    assert_int_equal(device_pageable_copies(dev), 1);
    device_copy_out(dev, pageable, arena, N);
    device_copy_in(dev, arena, pageable + N - 1, 1);
    device_copy_out(dev, stack, arena, sizeof stack);
    assert_int_equal(device_pageable_copies(dev), 4);
    device_peek(dev, stack, arena, sizeof stack); // state between steps: not counted
    device_poke(dev, arena, stack, sizeof stack);
    assert_int_equal(device_pageable_copies(dev), 4);
    device_close(dev);
}

// ---- the link on a virtual clock ----------------------------------------------------------------

#define NEAR(got, want) assert_true(fabs((got) - (want)) < 1e-9)

static void link_by_hand(void **state)
{
    (void)state;
    struct link l = {
        .speed = {.latency_s = 1, .in = 10, .out = 20, .in_duplex = 5, .out_duplex = 10}};
    // in: latency to 1, 10/s to 3, 5/s to 7, 10/s. out: latency to 3, 10/s to 7.
    link_begin(&l, LINK_IN, 100, 0);
    NEAR(link_end(&l, LINK_IN), 11);
    link_begin(&l, LINK_OUT, 40, 2);
    NEAR(link_end(&l, LINK_OUT), 7);
    NEAR(link_end(&l, LINK_IN), 13);
    link_advance(&l, 7);
    assert_true(!l.copy[LINK_OUT].active && l.copy[LINK_IN].active);
    NEAR(link_end(&l, LINK_OUT), 7);
    NEAR(link_end(&l, LINK_IN), 13);
    link_advance(&l, 20);
    NEAR(link_end(&l, LINK_IN), 13);
    // The latency of one direction does not slow the other; no bytes are latency alone.
    link_begin(&l, LINK_OUT, 20, 20);
    link_begin(&l, LINK_IN, 0, 21);
    NEAR(link_end(&l, LINK_OUT), 22);
    NEAR(link_end(&l, LINK_IN), 22);
    // Without a limit: at once after the latency, and the other direction is not slowed.
    l.speed.in = l.speed.in_duplex = 0;
    link_begin(&l, LINK_OUT, 200, 30);
    link_begin(&l, LINK_IN, (size_t)1 << 40, 31);
    NEAR(link_end(&l, LINK_IN), 32);
    NEAR(link_end(&l, LINK_OUT), 41);
}

enum { COPIES = 8 };

struct traffic {
    struct device_link speed;
    size_t bytes[LINK_DIRECTIONS][COPIES];
    double gap[LINK_DIRECTIONS][COPIES]; // from the end of the copy before
};

struct ends {
    double end[LINK_DIRECTIONS][COPIES];
};

static struct traffic random_traffic(uint64_t *rng)
{
    struct traffic t;
    double in = rng_below(rng, 8) ? 1 + 3 * rng_unit(rng) : 0; // 0: without limit
    double out = rng_below(rng, 8) ? 1 + 3 * rng_unit(rng) : 0;
    t.speed = (struct device_link){
        .latency_s = rng_below(rng, 3) ? 0.2 * rng_unit(rng) : 0,
        .in = in,
        .out = out,
        .in_duplex = in * (0.4 + 0.6 * rng_unit(rng)),
        .out_duplex = out * (0.4 + 0.6 * rng_unit(rng)),
    };
    for (int d = 0; d < LINK_DIRECTIONS; d++) {
        for (int i = 0; i < COPIES; i++) {
            t.bytes[d][i] = rng_below(rng, 4);
            t.gap[d][i] = rng_below(rng, 2) ? rng_unit(rng) : 0;
        }
    }
    return t;
}

// Both directions by tiny steps of time: bytes flow at the rate of the moment.
static void by_brute_force(const struct traffic *t, double dt, struct ends *out)
{
    struct {
        int i;
        bool active;
        double begin, left;
    } c[LINK_DIRECTIONS] = {{.begin = t->gap[0][0]}, {.begin = t->gap[1][0]}};
    for (double now = 0; c[0].i < COPIES || c[1].i < COPIES; now += dt) {
        bool moves[LINK_DIRECTIONS];
        for (int d = 0; d < LINK_DIRECTIONS; d++) {
            if (c[d].i < COPIES && !c[d].active && now >= c[d].begin) {
                c[d].active = true;
                c[d].left = (double)t->bytes[d][c[d].i];
            }
            moves[d] = c[d].active && now >= c[d].begin + t->speed.latency_s;
        }
        for (int d = 0; d < LINK_DIRECTIONS; d++) {
            double rate = d == LINK_IN ? (moves[1] ? t->speed.in_duplex : t->speed.in)
                                       : (moves[0] ? t->speed.out_duplex : t->speed.out);
            c[d].left -= moves[d] ? rate * dt : 0;
            if (moves[d] && (c[d].left <= 0 || rate == 0)) {
                out->end[d][c[d].i++] = now;
                c[d].active = false;
                c[d].begin = c[d].i < COPIES ? now + t->gap[d][c[d].i] : 0;
            }
        }
    }
}

// The same by events, as callers of the link see them; it is asked at useless moments too.
static void by_link(const struct traffic *t, uint64_t *rng, struct ends *out)
{
    struct link l = {.speed = t->speed};
    int i[LINK_DIRECTIONS] = {0, 0};
    bool active[LINK_DIRECTIONS] = {false, false};
    double begin[LINK_DIRECTIONS] = {t->gap[0][0], t->gap[1][0]}, now = 0;
    while (i[0] < COPIES || i[1] < COPIES) {
        double event[LINK_DIRECTIONS];
        for (int d = 0; d < LINK_DIRECTIONS; d++) {
            event[d] = i[d] == COPIES ? INFINITY : active[d] ? link_end(&l, d) : begin[d];
        }
        int d = event[0] <= event[1] ? 0 : 1;
        if (rng_below(rng, 2)) {
            link_advance(&l, now + rng_unit(rng) * (event[d] - now));
        }
        now = active[d] ? link_end(&l, d) : event[d]; // the last bit may have changed
        if (active[d]) {
            link_advance(&l, now);
            assert_false(l.copy[d].active);
            assert_true(link_end(&l, d) == now);
            out->end[d][i[d]++] = now;
            begin[d] = i[d] < COPIES ? now + t->gap[d][i[d]] : 0;
        } else {
            link_begin(&l, d, t->bytes[d][i[d]], now);
        }
        active[d] = !active[d];
    }
}

static void link_against_brute_force(void **state)
{
    (void)state;
    uint64_t rng = test_seed();
    const double dt = 1e-4;
    for (int i = 0; i < 150; i++) {
        uint64_t seed = rng;
        struct traffic t = random_traffic(&rng);
        struct ends want, got;
        by_brute_force(&t, dt, &want);
        by_link(&t, &rng, &got);
        for (int d = 0; d < LINK_DIRECTIONS; d++) {
            for (int k = 0; k < COPIES; k++) {
                // Three events per copy, each late by a step at most.
                if (!(fabs(got.end[d][k] - want.end[d][k]) < 6 * COPIES * dt)) {
                    fail_msg("TEST_SEED=%llu: copy %d %s ends at %.5f, not %.5f",
                             (unsigned long long)seed, k, d == LINK_IN ? "in" : "out",
                             got.end[d][k], want.end[d][k]);
                }
            }
        }
    }
}

// ---- the link on the real clock -----------------------------------------------------------------

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct carrier {
    struct device *dev;
    int direction;
    uint64_t rng;
    char *device, *host;
    size_t bytes, too_early, wrong;
};

static void *carry(void *arg)
{
    struct carrier *c = arg;
    struct device_link link;
    device_get_link(c->dev, &link);
    double rate = c->direction == LINK_IN ? link.in : link.out;
    for (int i = 0; i < 60; i++) {
        size_t n = 1 + rng_below(&c->rng, c->bytes);
        double start = now();
        if (c->direction == LINK_IN) {
            memset(c->host, i, n);
            device_copy_in(c->dev, c->device, c->host, n);
        } else {
            memset(c->host, ~i, n);
            device_copy_out(c->dev, c->host, c->device, n);
            c->wrong += c->host[0] != 55 || c->host[n - 1] != 55;
        }
        c->too_early += now() - start < link.latency_s + (double)n / rate;
    }
    return NULL;
}

static void copies_take_the_time_of_the_link(void **state)
{
    (void)state;
    enum { N = 1 << 16 };
    struct device_link link = {
        .latency_s = 1e-4, .in = 1e8, .out = 2e8, .in_duplex = 7e7, .out_duplex = 9e7};
    struct device *dev = open_device(MEMORY, &(struct device_link){.latency_s = 3600});
    device_set_link(dev, &link);
    char *arena = arena_of(dev, 2 * N), *host = host_arena(dev, 2 * N, true);
    device_fill(dev, arena + N, 55, N);
    struct carrier c[LINK_DIRECTIONS];
    pthread_t thread[LINK_DIRECTIONS];
    uint64_t seed = test_seed();
    for (int d = 0; d < LINK_DIRECTIONS; d++) {
        c[d] = (struct carrier){dev, d, seed + (uint64_t)d, arena + d * N, host + d * N, N, 0, 0};
        assert_int_equal(pthread_create(thread + d, NULL, carry, c + d), 0);
    }
    for (int d = 0; d < LINK_DIRECTIONS; d++) {
        pthread_join(thread[d], NULL);
        assert_int_equal(c[d].too_early, 0);
        assert_int_equal(c[d].wrong, 0);
    }
    char last[1];
    device_peek(dev, last, arena, 1);
    assert_int_equal(last[0], 59);
    assert_int_equal(device_pageable_copies(dev), 0);
    device_close(dev);
}

int main(int argc, char **argv)
{
    (void)argc;
    test_threads_sleep(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_access_dies),
        cmocka_unit_test(plain_device_is_host_memory),
        cmocka_unit_test(cap_is_refused_with_both_numbers),
        cmocka_unit_test(host_arenas),
        cmocka_unit_test(copies_move_the_right_bytes),
        cmocka_unit_test(lanes_compute_on_it),
        cmocka_unit_test(pageable_copies_are_counted),
        cmocka_unit_test(link_by_hand),
        cmocka_unit_test(link_against_brute_force),
        cmocka_unit_test(copies_take_the_time_of_the_link),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
