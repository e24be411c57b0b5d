// Kernels on the CPU runtime: every planted bug is reported, under every order of lanes, warps and
// blocks and every seed, and correct kernels are not.
#include "test/cmocka.h"
#include "test/cuda/planted.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SEEDS 25 // of each order

static struct cuda cuda; // its stream is the default one
static float *device_in, *device_out;
static float in[PLANTED_FLOATS], out[PLANTED_FLOATS];
static uint64_t seed;

static const char *const kinds[SIM_KINDS + 1] = {
    [SIM_BOUNDS] = "bounds",           [SIM_ALIGNMENT] = "alignment",
    [SIM_SHARED_RACE] = "shared race", [SIM_BLOCK_RACE] = "block race",
    [SIM_STREAM_RACE] = "stream race", [SIM_DEADLOCK] = "deadlock",
    [SIM_PAGEABLE] = "pageable",       [SIM_MISUSE] = "misuse",
    [SIM_KINDS] = "nothing",
};

static void run(const struct planted *p)
{
    sim_forget_reports();
    memset(out, 0, sizeof out);
    assert_int_equal(cudaMemcpy(device_out, out, sizeof out, cudaMemcpyHostToDevice), cudaSuccess);
    planted_launch(p, &cuda.base, device_out, device_in);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_int_equal(cudaMemcpy(out, device_out, sizeof out, cudaMemcpyDeviceToHost), cudaSuccess);
}

// Replays as: SEED=... of the message.
static void check(const struct planted *p)
{
    char how[128];
    snprintf(how, sizeof how, "%s, SEED=%llu, order %d", p->name,
             (unsigned long long)sim_settings()->seed, (int)sim_settings()->order);
    run(p);
    for (int kind = 0; kind < SIM_KINDS; kind++) {
        size_t n = sim_reports((enum sim_kind)kind);
        if ((n > 0) != (kind == (int)p->kind)) {
            fail_msg("%s: %zu reports of %s where %s was planted; the last one: %s", how, n,
                     kinds[kind], kinds[p->kind], sim_last_report());
        }
    }
    for (size_t i = 0; i < p->results; i++) {
        float want = p->expected(in, i);
        if (!(out[i] == want || (isnan(out[i]) && isnan(want)))) {
            fail_msg("%s: result %zu is %g, not %g", how, i, (double)out[i], (double)want);
        }
    }
}

static void test_planted(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_planted; i++) {
        for (int order = SIM_FORWARD; order <= SIM_SHUFFLE; order++) {
            sim_settings()->order = order;
            for (int s = 0; s < (order == SIM_SHUFFLE ? SEEDS : 1); s++) {
                sim_settings()->seed = seed + (uint64_t)s;
                check(&planted[i]);
            }
        }
    }
}

static const struct planted *find(const char *name)
{
    for (size_t i = 0; i < n_planted; i++) {
        if (strcmp(planted[i].name, name) == 0) {
            return &planted[i];
        }
    }
    fail_msg("no kernel %s", name);
    return NULL;
}

static void expect_report(const char *name, const char *const *words)
{
    run(find(name));
    for (; *words; words++) {
        if (!strstr(sim_last_report(), *words)) {
            fail_msg("the report of %s lacks \"%s\": %s", name, *words, sim_last_report());
        }
    }
}

// A report names the kernel, who did it, and to what.
static void test_reports_tell(void **state)
{
    (void)state;
    sim_settings()->order = SIM_FORWARD;
    expect_report("some_at_barrier",
                  (const char *[]){"some_at_barrier", "block 0,0,0", "thread 0,0,0",
                                   "__syncthreads", "thread 16,0,0 has returned", NULL});
    expect_report("dynamic_beyond",
                  (const char *[]){"thread 255,0,0", "byte 1024 of the 1024", NULL});
    expect_report("static_beyond",
                  (const char *[]){"thread 31,0,0", "byte 124 of the 124", "variable s", NULL});
    expect_report("no_barrier", (const char *[]){"shared s", "thread ", "barrier", NULL});
    expect_report("misaligned_load", (const char *[]){"thread 0,0,0", "16 bytes", NULL});
    expect_report("blocks_overlap", (const char *[]){"block 4,0,0", "block 3,0,0 has", NULL});
}

// Counts of integers are exact, whatever the order in which threads add.
static void test_atomics(void **state)
{
    (void)state;
    sim_settings()->order = SIM_SHUFFLE;
    run(find("count"));
    int counts[8], want[8] = {0};
    memcpy(counts, out + 8, sizeof counts);
    for (size_t i = 0; i < 512; i++) {
        want[(int)in[i] & 7]++;
    }
    assert_memory_equal(counts, want, sizeof want);
}

static int set_up(void **state)
{
    (void)state;
    const char *text = getenv("SEED");
    seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    sim_expect_reports(true);
    for (size_t i = 0; i < PLANTED_FLOATS; i++) {
        in[i] = (float)((i * 7 + i / 64) % 100);
    }
    if (cudaMalloc((void **)&device_in, sizeof in) ||
        cudaMalloc((void **)&device_out, sizeof out)) {
        return 1;
    }
    return cudaMemcpy(device_in, in, sizeof in, cudaMemcpyHostToDevice) != cudaSuccess;
}

static int tear_down(void **state)
{
    (void)state;
    sim_forget_reports();
    sim_parts_forget();
    return cudaFree(device_in) != cudaSuccess || cudaFree(device_out) != cudaSuccess;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_planted),
        cmocka_unit_test(test_reports_tell),
        cmocka_unit_test(test_atomics),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
