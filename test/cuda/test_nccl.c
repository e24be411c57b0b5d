// NCCL between two CPU runtimes: two processes, which do what a case says for their rank. What they
// exchange is checked by the program (test_comm_cuda.sh); here it is what goes wrong.
#include "test/cmocka.h"
#include "test/cuda/nccl.h"
#include "test/cuda/sim.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES ((size_t)200000) // more than a ring holds

struct rank {
    int rank;
    ncclComm_t comm;
    cudaStream_t compute, lane;
    cudaEvent_t event;
    char *out, *in; // device memory
};

#define OK(call)                                                                                   \
    do {                                                                                           \
        int code_ = (int)(call);                                                                   \
        if (code_ != 0) {                                                                          \
            fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, code_);                  \
            _exit(9);                                                                              \
        }                                                                                          \
    } while (0)

static ncclResult_t settled(ncclComm_t comm, ncclResult_t result)
{
    while (result == ncclInProgress) {
        usleep(100);
        OK(ncclCommGetAsyncError(comm, &result));
    }
    return result;
}

static void open_rank(struct rank *r, int rank, ncclUniqueId id, int blocking)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    r->rank = rank;
    (void)ncclCommInitRankConfig(&r->comm, 2, id, rank, &config);
    OK(settled(r->comm, ncclInProgress));
    OK(cudaStreamCreateWithFlags(&r->compute, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&r->lane, cudaStreamNonBlocking));
    OK(cudaEventCreate(&r->event));
    OK(cudaMalloc((void **)&r->out, BYTES));
    OK(cudaMalloc((void **)&r->in, BYTES));
}

static ncclResult_t swap(struct rank *r, size_t bytes)
{
    int other = 1 - r->rank;
    ncclGroupStart();
    ncclSend(r->out, bytes, ncclInt8, other, r->comm, r->lane);
    ncclRecv(r->in, BYTES, ncclInt8, other, r->comm, r->lane);
    return settled(r->comm, ncclGroupEnd());
}

// Runs a case in two processes; the exit status of rank 0, and of rank 1 in *second.
typedef int (*case_fn)(struct rank *r);
static int both(case_fn run, int blocking, int *second)
{
    ncclUniqueId id;
    pid_t pid[2];
    int status[2];
    ncclGetUniqueId(&id);
    for (int i = 0; i < 2; i++) {
        pid[i] = fork();
        if (pid[i] == 0) {
            struct rank r = {0};
            alarm(40);
            sim_settings()->seed = (uint64_t)i + 1;
            sim_expect_reports(true);
            open_rank(&r, i, id, blocking);
            _exit(run(&r));
        }
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(waitpid(pid[i], &status[i], 0), pid[i]);
    }
    *second = status[1];
    return status[0];
}

static void expect_both(case_fn run, int blocking)
{
    int second, first = both(run, blocking, &second);
    assert_int_equal(first, 0);
    assert_int_equal(second, 0);
}

static size_t all_reports(void)
{
    size_t n = 0;
    for (int kind = 0; kind < SIM_KINDS; kind++) {
        n += sim_reports((enum sim_kind)kind);
    }
    return n;
}

// Written on one stream, sent on another, used on the first again.
static int pass_on(struct rank *r, bool first, bool last)
{
    char there[BYTES];
    for (int step = 0; step < 3; step++) {
        OK(cudaMemsetAsync(r->out, 10 * step + r->rank, BYTES, r->compute));
        OK(cudaEventRecord(r->event, r->compute));
        OK(first ? cudaStreamWaitEvent(r->lane, r->event, 0) : cudaSuccess);
        OK(swap(r, BYTES));
        OK(cudaEventRecord(r->event, r->lane));
        OK(last ? cudaStreamWaitEvent(r->compute, r->event, 0) : cudaSuccess);
        OK(cudaMemcpyAsync(r->out, r->in, BYTES, cudaMemcpyDeviceToDevice, r->compute));
        OK(cudaDeviceSynchronize());
        OK(cudaMemcpy(there, r->out, BYTES, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < BYTES && first && last; i++) {
            if (there[i] != 10 * step + 1 - r->rank) {
                return 1;
            }
        }
    }
    return 0;
}

static int in_order(struct rank *r)
{
    return pass_on(r, true, true) ? 1 : all_reports() ? 2 : 0;
}

static int not_before(struct rank *r)
{
    pass_on(r, false, true);
    return sim_reports(SIM_STREAM_RACE) ? 0 : 1;
}

static int not_after(struct rank *r)
{
    pass_on(r, true, false);
    return sim_reports(SIM_STREAM_RACE) ? 0 : 1;
}

// Queued only when asked about: an event in between is too early.
static int too_early(struct rank *r)
{
    for (int i = 0; i < 20; i++) {
        ncclGroupStart();
        ncclSend(r->out, BYTES, ncclInt8, 1 - r->rank, r->comm, r->lane);
        ncclRecv(r->in, BYTES, ncclInt8, 1 - r->rank, r->comm, r->lane);
        ncclResult_t result = ncclGroupEnd();
        OK(cudaEventRecord(r->event, r->lane));
        OK(settled(r->comm, result));
        OK(cudaStreamWaitEvent(r->compute, r->event, 0));
        OK(cudaMemsetAsync(r->in, 0, BYTES, r->compute));
        OK(cudaDeviceSynchronize());
    }
    return sim_reports(SIM_STREAM_RACE) ? 0 : 1;
}

// Of the two, rank 0 gets fewer bytes than it has asked for.
static int other_count(struct rank *r)
{
    ncclResult_t result = ncclSuccess;
    swap(r, r->rank == 0 ? BYTES : BYTES / 2);
    for (int i = 0; i < 4000 && result == ncclSuccess; i++) { // rank 1 for as long as this lasts
        (void)cudaStreamQuery(r->lane);
        OK(ncclCommGetAsyncError(r->comm, &result));
        usleep(50);
    }
    OK(ncclCommAbort(r->comm));
    return r->rank == 1 || (result == ncclInvalidUsage && sim_reports(SIM_MISUSE)) ? 0 : 1;
}

static int beyond(struct rank *r)
{
    swap(r, BYTES + 4);
    (void)cudaStreamQuery(r->lane);
    for (int i = 0; i < 100; i++) {
        (void)cudaStreamQuery(r->lane);
    }
    OK(ncclCommAbort(r->comm));
    return sim_reports(SIM_BOUNDS) ? 0 : 1;
}

// The other one dies: what waits for it does so, until it is aborted.
static int left_alone(struct rank *r)
{
    if (r->rank == 1) {
        kill(getpid(), SIGKILL);
    }
    OK(swap(r, BYTES));
    for (int i = 0; i < 1000; i++) {
        if (cudaStreamQuery(r->lane) != cudaErrorNotReady) {
            return 1;
        }
    }
    OK(ncclCommAbort(r->comm));
    OK(cudaStreamSynchronize(r->lane));
    OK(cudaFree(r->in));
    return 0;
}

static void test_in_order(void **state)
{
    (void)state;
    expect_both(in_order, 1);
    expect_both(in_order, 0);
}

static void test_missing_event(void **state)
{
    (void)state;
    expect_both(not_before, 1);
    expect_both(not_after, 0);
    expect_both(too_early, 0);
}

static void test_wrong_sizes(void **state)
{
    int second;
    (void)state;
    assert_int_equal(both(other_count, 1, &second), 0);
    assert_int_equal(both(beyond, 1, &second), 0);
}

static void test_left_alone(void **state)
{
    int second;
    (void)state;
    assert_int_equal(both(left_alone, 1, &second), 0);
    assert_true(WIFSIGNALED(second));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        {"messages follow the streams", test_in_order, NULL, NULL, NULL},
        {"a missing event is a race", test_missing_event, NULL, NULL, NULL},
        {"sizes that differ, and beyond the end", test_wrong_sizes, NULL, NULL, NULL},
        {"a rank that dies", test_left_alone, NULL, NULL, NULL},
    };
    return cmocka_run_group_tests_name("nccl", tests, NULL, NULL);
}
