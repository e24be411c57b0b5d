// What ranks say to each other. By itself: one rank, which nothing has launched. With arguments it
// is one of the ranks that test_comm.sh has mpirun start:
//
//     test_comm MODE SEED [SILENCE_S]
//
// TEST_DEVICE=cuda: the ranks are of GPUs, executed on the CPU (test_comm_cuda.sh), and what the
// lane moves is device memory. They meet in TEST_DIR where nothing with MPI has started them.
//
// Exit status: 0, or 1 with a message on stderr that begins with the rank.
#include "hete/comm.h"
#include "kernels/bf16.h"
#include "kernels/clock.h"
#include "kernels/device.h"
#include "test/cmocka.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct comm *comm; // of this rank
static int rank, ranks;
static uint64_t seed;
static struct device *gpu; // NULL: the lane's memory is the host's
static char *arena, *pinned;
static size_t arena_used;
#define ARENA_BYTES  ((size_t)24 << 20)
#define PINNED_BYTES ((size_t)1 << 18)

// ---- what every rank can work out of every other ------------------------------------------------

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// The same sequence on all ranks, for what is to be the same on all of them.
static uint64_t draw(uint64_t *state)
{
    return mix(*state += 0x9e3779b97f4a7c15);
}

static unsigned char byte_of(uint64_t what, int of, size_t at)
{
    return (unsigned char)mix(mix(what + (uint64_t)of * 977) + at);
}

// Shows which rank, seed and what is wrong, and takes the other ranks along.
static void check(bool holds, const char *what, uint64_t where)
{
    if (!holds) {
        fprintf(stderr, "rank %d: seed %llu: %s (%llu)\n", rank, (unsigned long long)seed, what,
                (unsigned long long)where);
        comm_abort(comm, what);
        _exit(1);
    }
}

static void check_status(int status, const struct error *err)
{
    check(status == STATUS_OK, err->text, 0);
}

static void *memory(size_t bytes)
{
    void *p = calloc(bytes + 1, 1);
    check(p != NULL, "no memory", bytes);
    return p;
}

// ---- the lane's memory --------------------------------------------------------------------------

static void open_gpu(void)
{
    struct error err;
    struct device_config config = {
        .kind = "cuda", .index = comm_gpu(comm), .head_size = 8, .max_seq = 8, .padded_vocab = 128};
    void *p[2];
    check_status(device_open(&gpu, &config, &err), &err);
    check_status(device_arena(gpu, ARENA_BYTES, &p[0], &err), &err);
    check_status(device_host_arena(gpu, PINNED_BYTES, true, &p[1], &err), &err);
    arena = p[0];
    pinned = p[1];
    comm_use_device(comm, gpu);
}

// Where the lane finds the same bytes; their guard, if any, included.
static void *to_lane(void *host, size_t bytes)
{
    if (!gpu || bytes == 0) {
        return host;
    }
    char *p = arena + arena_used;
    arena_used += device_round(bytes);
    check(arena_used <= ARENA_BYTES, "no device memory", bytes);
    device_poke(gpu, p, host, bytes);
    return p;
}

static void from_lane(void *host, const void *lane, size_t bytes)
{
    if (host != lane) {
        device_peek(gpu, host, lane, bytes);
    }
}

// What was queued is done, if it was begun.
static int lane_done(int status, struct error *err)
{
    arena_used = 0;
    if (status || !gpu) {
        return status;
    }
    device_sync(gpu);
    return device_status(gpu, err);
}

// ---- pieces -------------------------------------------------------------------------------------

enum { MOST_RANKS = 16, GUARD = 64 };

struct cut {
    size_t first[MOST_RANKS], n[MOST_RANKS], total;
    struct comm_pieces p;
};

// Empty, single, odd and large pieces, with gaps, in any order in memory.
static void draw_cut(struct cut *c, uint64_t *state)
{
    static const size_t sizes[] = {1, 2, 4, 8, 3, 12, 16};
    static const size_t most[] = {0, 1, 7, 65, 4096, 30011};
    size_t at = 0;
    bool backward = draw(state) % 2;
    for (int i = 0; i < ranks; i++) {
        int piece = backward ? ranks - 1 - i : i;
        at += draw(state) % 3 ? 0 : draw(state) % 9;
        c->first[piece] = at;
        c->n[piece] = draw(state) % (most[draw(state) % 6] + 1);
        at += c->n[piece];
    }
    c->total = at;
    c->p = (struct comm_pieces){sizes[draw(state) % 7], c->first, c->n};
}

static void fill(unsigned char *x, size_t bytes, uint64_t what, int of)
{
    for (size_t i = 0; i < bytes; i++) {
        x[i] = byte_of(what, of, i);
    }
}

static void check_bytes(const unsigned char *x, size_t bytes, uint64_t what, int of, size_t first,
                        const char *where)
{
    for (size_t i = 0; i < bytes; i++) {
        check(x[i] == byte_of(what, of, first + i), where, i);
    }
}

static void one_exchange(uint64_t *state)
{
    struct cut c;
    struct error err;
    draw_cut(&c, state);
    uint64_t what = draw(state);
    size_t e = c.p.element, own = c.n[rank] * e, stage_bytes = (size_t)ranks * own;
    unsigned char *x = memory(c.total * e), *stage = memory(stage_bytes + GUARD);
    fill(x, c.total * e, what, rank);
    fill(stage + stage_bytes, GUARD, what, 99);
    void *at = to_lane(stage, stage_bytes + GUARD), *from = to_lane(x, c.total * e);
    check_status(lane_done(comm_exchange(comm, at, from, &c.p, &err), &err), &err);
    from_lane(stage, at, stage_bytes + GUARD);
    from_lane(x, from, c.total * e);
    for (int j = 0; j < ranks; j++) {
        check_bytes(stage + (size_t)j * own, own, what, j, c.first[rank] * e, "exchange: wrong");
    }
    check_bytes(stage + stage_bytes, GUARD, what, 99, 0, "exchange: too much");
    check_bytes(x, c.total * e, what, rank, 0, "exchange: x has changed");
    free(stage);
    free(x);
}

// Half the time pieces of one size, side by side.
static void draw_even(struct cut *c, uint64_t *state)
{
    bool even = draw(state) % 2;
    for (int i = 0; i < ranks && even; i++) {
        c->first[i] = 5 + (size_t)i * 77;
        c->n[i] = 77;
        c->total = c->first[i] + c->n[i];
    }
}

static void one_gather(uint64_t *state)
{
    struct cut c;
    struct error err;
    draw_cut(&c, state);
    draw_even(&c, state);
    uint64_t what = draw(state);
    size_t e = c.p.element;
    unsigned char *x = memory(c.total * e + GUARD), *expected = memory(c.total * e + GUARD);
    fill(x, c.total * e + GUARD, what, rank);
    unsigned char *own = x + c.first[rank] * e, *mine = memory(c.n[rank] * e + 1);
    memcpy(mine, own, c.n[rank] * e);
    if (what % 2) { // the piece comes from elsewhere
        memset(own, 0, c.n[rank] * e);
    }
    memcpy(expected, x, c.total * e + GUARD);
    for (int j = 0; j < ranks; j++) {
        for (size_t i = c.first[j] * e; i < (c.first[j] + c.n[j]) * e; i++) {
            expected[i] = byte_of(what, j, i);
        }
    }
    char *at = to_lane(x, c.total * e + GUARD), *from = to_lane(mine, c.n[rank] * e + 1);
    from = what % 2 ? from : at + c.first[rank] * e;
    check_status(lane_done(comm_gather(comm, at, from, &c.p, &err), &err), &err);
    from_lane(x, at, c.total * e + GUARD);
    check(memcmp(x, expected, c.total * e + GUARD) == 0, "gather: wrong", c.total);
    free(mine);
    free(expected);
    free(x);
}

// Small whole numbers: any order of additions is exact.
static float number_of(uint64_t what, int of, size_t at)
{
    return (float)byte_of(what, of, at) - 100;
}

static void put_number(void *x, size_t at, bool fp32, float value)
{
    if (fp32) {
        ((float *)x)[at] = value;
    } else {
        ((uint16_t *)x)[at] = bf16_round(value);
    }
}

static float get_number(const void *x, size_t at, bool fp32)
{
    return fp32 ? ((const float *)x)[at] : bf16_load(((const uint16_t *)x)[at]);
}

static void one_share(uint64_t *state)
{
    struct error err;
    uint64_t what = draw(state);
    size_t bytes = 8 * (1 + draw(state) % (draw(state) % 8 ? 400 : 4000));
    unsigned char *all = memory(bytes * (size_t)ranks), *mine = memory(bytes);
    if (gpu) { // which takes no memory that is not pinned
        free(all);
        free(mine);
        all = (unsigned char *)pinned;
        mine = all + (size_t)ranks * bytes;
    }
    unsigned char *from = what % 2 ? mine : all + (size_t)rank * bytes;
    fill(from, bytes, what, rank);
    check_status(lane_done(comm_share(comm, from, all, bytes, &err), &err), &err);
    for (int j = 0; j < ranks; j++) {
        check_bytes(all + (size_t)j * bytes, bytes, what, j, 0, "share: wrong");
    }
    if (!gpu) {
        free(mine);
        free(all);
    }
}

static void one_reduce(uint64_t *state)
{
    struct cut c;
    struct error err;
    draw_cut(&c, state);
    draw_even(&c, state);
    uint64_t what = draw(state);
    bool fp32 = what % 2;
    c.p.element = fp32 ? sizeof(float) : sizeof(uint16_t);
    unsigned char *x = memory(c.total * c.p.element);
    unsigned char *sum = memory((c.n[rank] + 1) * c.p.element);
    for (size_t i = 0; i < c.total; i++) {
        put_number(x, i, fp32, number_of(what, rank, i));
    }
    put_number(sum, c.n[rank], fp32, 77);
    void *at = to_lane(sum, (c.n[rank] + 1) * c.p.element);
    const void *from = to_lane(x, c.total * c.p.element);
    check_status(lane_done(comm_reduce(comm, at, from, &c.p, &err), &err), &err);
    from_lane(sum, at, (c.n[rank] + 1) * c.p.element);
    for (size_t i = 0; i < c.n[rank]; i++) {
        float expected = 0;
        for (int j = 0; j < ranks; j++) {
            expected += number_of(what, j, c.first[rank] + i);
        }
        // Of 8 bits: up to a rounding for each rank.
        float most = fp32 ? 0 : (float)ranks * 200 * (float)ranks / 256;
        check(fabsf(get_number(sum, i, fp32) - expected) <= most, "reduce: wrong", i);
    }
    check(get_number(sum, c.n[rank], fp32) == 77, "reduce: too much", c.n[rank]);
    free(sum);
    free(x);
}

static void dawdle(uint64_t *own)
{
    if (draw(own) % 4 == 0) {
        usleep((useconds_t)(draw(own) % 3000));
    }
}

static void one_of_lane(uint64_t *state, uint64_t *own)
{
    dawdle(own);
    switch (draw(state) % 4) {
    case 0:
        one_exchange(state);
        break;
    case 1:
        one_gather(state);
        break;
    case 2:
        one_share(state);
        break;
    default:
        one_reduce(state);
    }
}

static void *lane_main(void *arg)
{
    uint64_t state = *(const uint64_t *)arg, own = state + (uint64_t)rank;
    for (int i = 0; i < 60; i++) {
        comm_doing(comm, COMM_LANE, i % 2 ? "odd" : "even");
        one_of_lane(&state, &own);
    }
    return NULL;
}

// ---- small ones ---------------------------------------------------------------------------------

static void one_small(uint64_t *state)
{
    struct error err;
    uint64_t what = draw(state), kind = draw(state) % 3;
    size_t bytes = draw(state) % 5 ? draw(state) % 300 : draw(state) % 20000;
    unsigned char *mine = memory(bytes), *all = memory(bytes * (size_t)ranks);
    fill(mine, bytes, what, rank);
    if (kind == 0) {
        check_status(comm_all_gather(comm, mine, all, bytes, &err), &err);
        for (int j = 0; j < ranks; j++) {
            check_bytes(all + (size_t)j * bytes, bytes, what, j, 0, "all_gather: wrong");
        }
    } else if (kind == 1) {
        check_status(comm_broadcast(comm, mine, bytes, 0, &err), &err);
        check_bytes(mine, bytes, what, 0, 0, "broadcast: wrong");
    } else {
        check_status(comm_barrier(comm, &err), &err);
    }
    free(all);
    free(mine);
}

// The lane and the main thread at once, each in its own order; with a GPU they are one thread.
static void mode_data(void)
{
    uint64_t state = mix(seed), lane = mix(seed + 1), own = mix(seed + 2 + (uint64_t)rank);
    pthread_t thread;
    check(gpu || !pthread_create(&thread, NULL, lane_main, &lane), "no thread", 0);
    for (int i = 0; i < 60; i++) {
        comm_doing(comm, COMM_MAIN, "main");
        dawdle(&own);
        one_small(&state);
        if (gpu) {
            one_of_lane(&lane, &own);
        }
    }
    if (!gpu) {
        pthread_join(thread, NULL);
    }
}

// Everybody leaves the barrier after everybody has come.
static void mode_barrier(void)
{
    struct error err;
    uint64_t state = mix(seed);
    double all[2 * MOST_RANKS], mine[2];
    for (int i = 0; i < 10; i++) {
        if ((uint64_t)rank == draw(&state) % (uint64_t)ranks) {
            usleep(20000);
        }
        mine[0] = clock_s(); // one machine, one clock
        check_status(comm_barrier(comm, &err), &err);
        mine[1] = clock_s();
        check_status(comm_all_gather(comm, mine, all, sizeof mine, &err), &err);
        for (int j = 0; j < ranks; j++) {
            check(all[2 * j] <= mine[1], "barrier: left before all had come", (uint64_t)j);
        }
    }
}

// ---- agreement ----------------------------------------------------------------------------------

// All ranks agree, or all give the message that has these words, separated by ~.
static void agrees(const struct comm_value *values, size_t n, const char *words)
{
    struct error err = {0};
    char copy[512];
    int status = comm_agree(comm, values, n, &err);
    check(status == (words && ranks > 1 ? STATUS_FAIL : STATUS_OK), err.text, (uint64_t)status);
    if (status == STATUS_OK) {
        return;
    }
    snprintf(copy, sizeof copy, "%s", words);
    for (char *word = strtok(copy, "~"); word; word = strtok(NULL, "~")) {
        check(strstr(err.text, word) != NULL, err.text, 0);
    }
    char all[MOST_RANKS][sizeof err.text];
    check_status(comm_all_gather(comm, err.text, all, sizeof err.text, &err), &err);
    for (int j = 0; j < ranks; j++) {
        check(strcmp(all[j], all[0]) == 0, "agree: not the same message everywhere", (uint64_t)j);
    }
}

static void mode_agree(void)
{
    bool last = ranks > 1 && rank == ranks - 1, second = rank == 1;
    char words[128], text[2][1000];
    for (int i = 0; i < 2; i++) {
        memset(text[i], 'a', sizeof text[i] - 1);
        text[i][sizeof text[i] - 1] = 0;
    }
    text[1][600] = 'b';
    struct comm_value same[] = {{"build", "1.0 gcc"}, {"--lr", "3e-4"}, {"empty", ""}};
    agrees(same, 3, NULL);
    agrees(same, 0, NULL);

    // The last rank differs in the first value, rank 1 in a later one.
    struct comm_value a[] = {{"build", last ? "1.1" : "1.0"}, {"--lr", second ? "1" : "2"}};
    snprintf(words, sizeof words, "build is '1.0' on rank 0 and '1.1' on rank %d", ranks - 1);
    agrees(a, 2, words);
    // Both differ in the same one: the lower rank is named.
    struct comm_value b[] = {{"build", "x"}, {"--lr", second || last ? "1e-3" : "3e-4"}};
    agrees(b, 2, "--lr is '3e-4' on rank 0 and '1e-3' on rank 1;");
    // A name, the end of the list on either side, and far inside of a long value.
    struct comm_value c[] = {{"build", "x"}, {last ? "--dtype" : "--lr", "1"}};
    snprintf(words, sizeof words, "where rank 0 has '--lr', rank %d has '--dtype'", ranks - 1);
    agrees(c, 2, words);
    snprintf(words, sizeof words, "where rank 0 has 'empty', rank %d has 'nothing'", ranks - 1);
    agrees(same, last ? 2 : 3, words);
    snprintf(words, sizeof words, "where rank 0 has 'nothing', rank %d has 'empty'", ranks - 1);
    agrees(same, last ? 3 : 2, words);
    struct comm_value d[] = {{"graph", text[last]}};
    snprintf(words, sizeof words, "graph is '...~aaa...' on rank 0~ab~aaa...' on rank %d",
             ranks - 1);
    agrees(d, 1, words);
    agrees(same, 3, NULL);
}

// ---- faults -------------------------------------------------------------------------------------

// What train_gpt would do.
static void gone(void *ctx, const struct error *err)
{
    (void)ctx;
    fprintf(stderr, "rank %d: %s\n", rank, err->text);
    _exit(1);
}

// What a caller without a `gone` would.
static void go(const struct error *err)
{
    struct error again, closing;
    fprintf(stderr, "rank %d: %s\n", rank, err->text);
    check(comm_barrier(comm, &again) == STATUS_FAIL, "a barrier without all ranks", 0);
    check(strcmp(again.text, err->text) == 0, again.text, 0);
    check(comm_close(comm, &closing) == STATUS_FAIL, "a close without all ranks", 0);
    check(strcmp(closing.text, err->text) == 0, closing.text, 0);
    exit(1);
}

static void own_fault(const char *kind)
{
    struct error err;
    if (strcmp(kind, "kill") == 0) {
        kill(getpid(), SIGKILL);
    } else if (strcmp(kind, "stop") == 0) {
        kill(getpid(), SIGSTOP);
    } else if (strcmp(kind, "abort") == 0) {
        comm_abort(comm, "the disk is full");
        check(comm_barrier(comm, &err) == STATUS_FAIL, "a barrier after comm_abort", 0);
        check(comm_close(comm, &err) == STATUS_FAIL, "a close after comm_abort", 0);
        exit(1);
    } else if (strcmp(kind, "exit") == 0) {
        exit(0);
    } else if (strcmp(kind, "leave") == 0) {
        comm_close(comm, &err); // without what the others do
        exit(1);
    }
}

// Pieces of 1000 elements, and room for an exchange of them.
static void cut_thousands(struct cut *c, void **x, void **stage)
{
    size_t bytes = 4000 * (size_t)ranks;
    for (int i = 0; i < ranks; i++) {
        c->first[i] = 1000 * (size_t)i;
        c->n[i] = 1000;
    }
    c->p = (struct comm_pieces){4, c->first, c->n};
    *x = to_lane(memory(bytes), bytes);
    *stage = to_lane(memory(bytes), bytes);
}

// The last rank meets its fate while the others exchange, or sleep.
static void mode_fault(const char *kind, bool asleep)
{
    struct error err;
    struct cut c;
    void *x, *stage;
    cut_thousands(&c, &x, &stage);
    fprintf(stderr, "process %d\n", getpid());
    signal(SIGTERM, SIG_IGN); // what mpirun sends first: train_gpt would finish its step
    for (int i = 0;; i++) {
        char doing[32];
        snprintf(doing, sizeof doing, "step %d", i);
        comm_doing(comm, COMM_MAIN, doing);
        comm_doing(comm, COMM_LANE, "exchange of unit 7");
        if (i == 20 && rank == ranks - 1) {
            usleep(600000); // a beat has told of this step
            own_fault(kind);
        }
        while (i == 20 && asleep) {
            sleep(1);
        }
        // Where no `gone` ends the process before.
        if (lane_done(comm_exchange(comm, stage, x, &c.p, &err), &err)) {
            go(&err);
        }
        usleep(1000);
    }
}

// A rank that is at work for long, or was stopped and goes on, is not dead.
static void mode_slow(double silence_s)
{
    struct error err;
    if (rank == ranks - 1) {
        usleep((useconds_t)(2.5e6 * silence_s));
    }
    check_status(comm_barrier(comm, &err), &err);
    if (rank == 0) {
        usleep((useconds_t)(1.5e6 * silence_s)); // the others wait in comm_close
    }
}

// All wait, but not for the same: nothing will ever come.
static void mode_stall(void)
{
    struct error err;
    struct cut c;
    void *x, *stage;
    cut_thousands(&c, &x, &stage);
    comm_doing(comm, COMM_MAIN, "step 3");
    if (rank < ranks - 1) {
        check_status(comm_barrier(comm, &err), &err);
    } else {
        comm_waits(comm, true);
        int status = comm_exchange(comm, stage, x, &c.p, &err);
        comm_waits(comm, true); // for what a device has queued
        check_status(lane_done(status, &err), &err);
    }
    check(false, "something has come", 0);
}

static void mode_pause(double silence_s)
{
    struct error err;
    if (rank == ranks - 1) {
        pid_t self = getpid();
        if (fork() == 0) {
            usleep((useconds_t)(0.5e6 * silence_s));
            kill(self, SIGCONT);
            _exit(0);
        }
        kill(self, SIGSTOP);
    }
    check_status(comm_barrier(comm, &err), &err);
}

// ---- large pieces, and how fast -----------------------------------------------------------------

// More than 2^31 bytes from the last rank to rank 0, and back.
static void mode_large(void)
{
    struct error err;
    size_t bytes = ((size_t)1 << 31) + 4099, first[MOST_RANKS] = {0}, n[MOST_RANKS] = {bytes};
    struct comm_pieces p = {1, first, n};
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    unsigned char *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    size_t stage_bytes = rank == 0 ? (size_t)ranks * bytes : 1;
    unsigned char *stage = mmap(NULL, stage_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    check(x != MAP_FAILED && stage != MAP_FAILED, "no memory", bytes);
    for (size_t i = 0; i < bytes; i += 65521) {
        x[i] = byte_of(seed, rank, i);
    }
    check_status(comm_exchange(comm, stage, x, &p, &err), &err);
    for (int j = 0; j < ranks && rank == 0; j++) {
        for (size_t i = 0; i < bytes; i += 65521) {
            check(stage[(size_t)j * bytes + i] == byte_of(seed, j, i), "exchange: wrong", i);
        }
    }
    munmap(stage, stage_bytes);
    check_status(comm_gather(comm, x, x + first[rank], &p, &err), &err);
    for (size_t i = 0; i < bytes; i += 65521) {
        check(x[i] == byte_of(seed, 0, i), "gather: wrong", i);
    }
    munmap(x, bytes);
}

static void mode_bench(void)
{
    struct error err;
    static const size_t elements[] = {256, 65536, 4 << 20, 32 << 20};
    for (int s = 0; s < 4; s++) {
        size_t first[MOST_RANKS], n[MOST_RANKS], total = elements[s];
        for (int i = 0; i < ranks; i++) {
            first[i] = total * (size_t)i / (size_t)ranks;
            n[i] = total * (size_t)(i + 1) / (size_t)ranks - first[i];
        }
        struct comm_pieces p = {sizeof(float), first, n};
        float *x = memory(total * sizeof *x), *stage = memory((total + 64) * sizeof *x);
        double took[3] = {1e9, 1e9, 1e9};
        for (int i = 0; i < 15; i++) {
            check_status(comm_barrier(comm, &err), &err);
            double t = clock_s();
            check_status(i % 3 == 0   ? comm_exchange(comm, stage, x, &p, &err)
                         : i % 3 == 1 ? comm_gather(comm, x, x + first[rank], &p, &err)
                                      : comm_reduce(comm, stage, x, &p, &err),
                         &err);
            t = clock_s() - t;
            took[i % 3] = t < took[i % 3] ? t : took[i % 3];
        }
        double moved = (double)(total * sizeof *x) * (ranks - 1) / ranks;
        if (rank == 0) {
            printf("%zu bytes: exchange %.3f ms (%.2f GB/s), gather %.3f ms (%.2f), reduce %.3f ms "
                   "(%.2f)\n",
                   total * sizeof *x, 1e3 * took[0], 1e-9 * moved / took[0], 1e3 * took[1],
                   1e-9 * moved / took[1], 1e3 * took[2], 1e-9 * moved / took[2]);
        }
        free(x);
        free(stage);
    }
}

static int run_rank(int argc, char **argv)
{
    const char *mode = argv[1];
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    struct comm_config config = {.silence_s = argc > 3 ? strtod(argv[3], NULL) : 0,
                                 .start_s = strcmp(mode, "late") == 0,
                                 .stall_s = 1,
                                 .gpus = getenv("TEST_DEVICE") != NULL,
                                 .dir = getenv("TEST_DIR"),
                                 .gone = strstr(mode, "-quiet") ? NULL : gone};
    if (strcmp(mode, "data") == 0) {
        config.message_bytes = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 37 : 1000;
    }
    struct error err = {0};
    const char *who = getenv("RANK") ? getenv("RANK") : getenv("OMPI_COMM_WORLD_RANK");
    while (strcmp(mode, "late") == 0 && strcmp(who, "0") != 0) {
        sleep(1);
    }
    if (comm_open(&comm, &config, &err)) {
        fprintf(stderr, "not opened: %s\n", err.text);
        return 1;
    }
    rank = comm_rank(comm);
    ranks = comm_ranks(comm);
    check(ranks <= MOST_RANKS, "too many ranks", (uint64_t)ranks);
    check(comm_local_rank(comm) == rank && comm_local_ranks(comm) == ranks, "one machine", 0);
    if (config.gpus && ranks > 1) {
        open_gpu();
    }
    if (strcmp(mode, "data") == 0) {
        mode_data();
    } else if (strcmp(mode, "barrier") == 0) {
        mode_barrier();
    } else if (strcmp(mode, "agree") == 0) {
        mode_agree();
    } else if (strcmp(mode, "slow") == 0) {
        mode_slow(config.silence_s);
    } else if (strcmp(mode, "stall") == 0) {
        mode_stall();
    } else if (strcmp(mode, "pause") == 0) {
        mode_pause(config.silence_s);
    } else if (strcmp(mode, "large") == 0) {
        mode_large();
    } else if (strcmp(mode, "bench") == 0) {
        mode_bench();
    } else {
        char kind[16];
        snprintf(kind, sizeof kind, "%.*s", (int)strcspn(mode, "-"), mode);
        mode_fault(kind, strstr(mode, "-asleep") != NULL);
    }
    if (gpu) {
        comm_use_device(comm, NULL);
        device_close(gpu);
    }
    check_status(comm_close(comm, &err), &err);
    if (rank == 0) {
        printf("%d ranks are done\n", ranks);
    }
    return 0;
}

// ---- one rank, without a launcher ---------------------------------------------------------------

static int open_one(void **state)
{
    (void)state;
    struct error err;
    struct comm_config config = {0};
    seed = (uint64_t)(clock_s() * 1e9) % 1000000;
    print_message("seed %llu\n", (unsigned long long)seed);
    ranks = 1;
    return comm_open(&comm, &config, &err);
}

static int close_one(void **state)
{
    (void)state;
    struct error err;
    return comm_close(comm, &err);
}

static void alone(void **state)
{
    (void)state;
    assert_int_equal(comm_rank(comm), 0);
    assert_int_equal(comm_ranks(comm), 1);
    assert_int_equal(comm_local_rank(comm), 0);
    assert_int_equal(comm_local_ranks(comm), 1);
    comm_doing(comm, COMM_MAIN, "nothing");
    comm_abort(comm, "nobody hears this");
}

static void alone_data(void **state)
{
    (void)state;
    mode_data();
}

static void alone_agrees(void **state)
{
    (void)state;
    mode_agree();
}

// With the environment that a launcher leaves, of ranks that are not there.
static void strays(void **state)
{
    (void)state;
    struct error err;
    struct comm_config config = {0};
    struct comm *c;
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    setenv("SLURM_PROCID", "1", 1);
    assert_int_equal(comm_open(&c, &config, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "4 tasks"));
    assert_non_null(strstr(err.text, "srun --mpi=pmix"));
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    assert_int_equal(comm_open(&c, &config, &err), STATUS_OK);
    assert_int_equal(comm_ranks(c), 1);
    assert_int_equal(comm_close(c, &err), STATUS_OK);
    unsetenv("SLURM_STEP_NUM_TASKS");
    unsetenv("SLURM_PROCID");
#ifndef USE_MPI
    setenv("OMPI_COMM_WORLD_SIZE", "3", 1);
    assert_int_equal(comm_open(&c, &config, &err), STATUS_FAIL);
    assert_non_null(strstr(err.text, "one of 3 ranks"));
    assert_non_null(strstr(err.text, "without MPI"));
#endif
    unsetenv("OMPI_COMM_WORLD_SIZE");
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        return run_rank(argc, argv);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(alone, open_one, close_one),
        cmocka_unit_test_setup_teardown(alone_data, open_one, close_one),
        cmocka_unit_test_setup_teardown(alone_agrees, open_one, close_one),
        cmocka_unit_test(strays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
