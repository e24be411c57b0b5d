// Runs a launch: its blocks one after the other, a fiber for each thread of a block.
//
// A thread runs until it must wait: at a barrier for the block, at a shuffle for its warp. Then the
// next lane of its warp that is ready runs, else the next warp. The last one to arrive does what
// they have come for, makes the others ready and goes on. When nobody is ready and not all have
// returned, threads wait for some that never come: a deadlock, which ends the launch.
//
// "In order" means by rank: lanes have a rank in their warp, warps in their block.
#include "test/cuda/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HOST SIM_THREADS // the fiber that sim_run_kernel is called on

struct warp {
    uint32_t ready;      // by rank
    uint32_t exists;     // by lane
    uint32_t waiting;    // by lane: at an operation of lanes
    uint8_t lane_at[32]; // by rank
};

struct sim_thread *sim_self;
const void *sim_site;
uint32_t sim_epoch, sim_block, sim_blocks;
const struct sim_kernel *sim_kernel_now;

static struct sim_thread thread[SIM_THREADS];
static struct warp warp[SIM_WARPS];
static unsigned n_threads, n_warps;
static uint8_t warp_at[SIM_WARPS], rank_of_warp[SIM_WARPS];
static uint32_t warps_ready; // by rank
static unsigned returned, arrived;
static int votes, result; // of the block's barrier
static unsigned fibers;   // so many have a stack
static bool abandoned;
static uint3 block_index;
static uint64_t rng;
static int ordered; // of sim_settings, for this launch

static uint32_t below(uint32_t n)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng >> 32) * n >> 32);
}

extern const char __executable_start[];

// What addr2line is to be asked for.
static unsigned long offset_of(const void *site)
{
    return site ? (unsigned long)((uintptr_t)site - (uintptr_t)__executable_start) : 0;
}

const char *sim_where(void)
{
    static char where[512];
    if (!sim_kernel_now) {
        return "host";
    }
    uint3 b = block_index, t = sim_self ? sim_self->index : (uint3){0, 0, 0};
    snprintf(where, sizeof where, "block %u,%u,%u thread %u,%u,%u of kernel %s (code at 0x%lx)",
             b.x, b.y, b.z, t.x, t.y, t.z, sim_kernel_now->name, offset_of(sim_site));
    return where;
}

// ---- what a thread asks ----

uint3 sim_thread_index(void)
{
    return sim_self->index;
}

uint3 sim_block_index(void)
{
    return block_index;
}

uint3 sim_block_size(void)
{
    dim3 d = sim_kernel_now->block;
    return (uint3){d.x, d.y, d.z};
}

uint3 sim_grid_size(void)
{
    dim3 d = sim_kernel_now->grid;
    return (uint3){d.x, d.y, d.z};
}

// ---- who runs next ----

static void make_ready(unsigned w, uint32_t ranks)
{
    if (ranks) {
        warp[w].ready |= ranks;
        warps_ready |= 1u << rank_of_warp[w];
    }
}

// The ranks of lanes.
static uint32_t ranks_of(unsigned w, uint32_t lanes)
{
    if (lanes == warp[w].exists) {
        unsigned n = (unsigned)__builtin_popcount(lanes);
        return n == 32 ? 0xffffffffu : (1u << n) - 1;
    }
    uint32_t ranks = 0;
    for (; lanes; lanes &= lanes - 1) {
        ranks |= 1u << thread[w * 32 + (unsigned)__builtin_ctz(lanes)].rank;
    }
    return ranks;
}

// NULL: nobody.
static struct sim_thread *take_ready(unsigned w)
{
    if (!warp[w].ready) {
        if (!warps_ready) {
            return NULL;
        }
        uint32_t later = warps_ready & ~((2u << rank_of_warp[w]) - 1);
        w = warp_at[__builtin_ctz(later ? later : warps_ready)];
    }
    unsigned rank = (unsigned)__builtin_ctz(warp[w].ready);
    warp[w].ready &= warp[w].ready - 1;
    if (!warp[w].ready) {
        warps_ready &= ~(1u << rank_of_warp[w]);
    }
    return &thread[w * 32 + warp[w].lane_at[rank]];
}

static void leave(struct sim_thread *next)
{
    struct sim_thread *self = sim_self;
    sim_self = next;
    sim_fiber_switch(self->number, next ? next->number : HOST);
}

void sim_abandon(void)
{
    abandoned = true;
    leave(NULL);
    abort(); // nobody switches to it again
}

// ---- deadlocks ----

static const char *const at[] = {
    [SIM_RUNS] = "runs",
    [SIM_RETURNED] = "has returned",
    [SIM_AT_BARRIER] = "waits at __syncthreads",
    [SIM_AT_WARP_BARRIER] = "waits at __syncwarp",
    [SIM_AT_SHUFFLE] = "waits at a shuffle",
    [SIM_AT_BALLOT] = "waits at a vote",
    [SIM_AT_WARP] = "waits at an instruction of its warp",
};

// Somebody else than a, at another place or with another mask; in a's warp, if there is one.
static const struct sim_thread *other_than(const struct sim_thread *a)
{
    for (unsigned i = 0; i < n_threads; i++) {
        const struct sim_thread *b = &thread[(a->warp * 32 + i) % n_threads];
        if (b->state != a->state || (a->state != SIM_AT_BARRIER && b->mask != a->mask)) {
            return b;
        }
    }
    return NULL;
}

static void report_deadlock(void)
{
    const struct sim_thread *a = thread;
    while (a->state == SIM_RETURNED) {
        a++;
    }
    sim_self = (struct sim_thread *)a; // for sim_where
    sim_site = a->site;
    const struct sim_thread *b = other_than(a);
    if (b) {
        sim_report(
            SIM_DEADLOCK,
            "%s %s (mask %08x), thread %u,%u,%u %s (mask %08x, code at 0x%lx): all must come "
            "to the same one",
            sim_where(), at[a->state], a->mask, b->index.x, b->index.y, b->index.z, at[b->state],
            b->mask, offset_of(b->site));
    } else {
        sim_report(SIM_DEADLOCK, "%s %s (mask %08x), and so do all others", sim_where(),
                   at[a->state], a->mask);
    }
    sim_self = NULL;
}

// The thread that runs waits, in this state, until another makes it ready.
static void wait_turn(void)
{
    struct sim_thread *self = sim_self, *next = take_ready(self->warp);
    self->site = sim_site;
    if (!next) {
        abandoned = true;
        report_deadlock();
        sim_self = self;
    }
    leave(next);
    self->state = SIM_RUNS;
}

// ---- barriers and warps ----

int sim_barrier(int predicate)
{
    SIM_HERE();
    votes += predicate != 0;
    if (++arrived < n_threads) {
        sim_self->state = SIM_AT_BARRIER;
        wait_turn();
        return result;
    }
    arrived = 0;
    result = votes;
    votes = 0;
    sim_epoch++;
    for (unsigned w = 0; w < n_warps; w++) {
        uint32_t ranks = ranks_of(w, warp[w].exists);
        make_ready(w, w == sim_self->warp ? ranks & ~(1u << sim_self->rank) : ranks);
    }
    return result;
}

// True for the last one of the lanes in *mask, which must do what they have come for and then call
// lanes_go; *mask loses the lanes that do not exist. False: it has been done.
static bool lanes_meet(enum sim_wait what, unsigned *mask, void *operand)
{
    struct sim_thread *self = sim_self, *lanes = &thread[self->warp * 32];
    struct warp *w = &warp[self->warp];
    unsigned expected = *mask & w->exists;
    if (!(expected >> self->lane & 1)) {
        sim_report(SIM_DEADLOCK, "%s is not in the mask %08x of its own warp operation",
                   sim_where(), *mask);
        sim_abandon();
    }
    self->state = what;
    self->mask = *mask;
    self->operand = operand;
    w->waiting |= 1u << self->lane;
    bool all = (w->waiting & expected) == expected;
    for (uint32_t rest = all ? expected : 0; rest; rest &= rest - 1) {
        const struct sim_thread *lane = &lanes[__builtin_ctz(rest)];
        all = all && lane->state == what && lane->mask == *mask;
    }
    if (!all) {
        wait_turn();
        return false;
    }
    *mask = expected;
    return true;
}

static void lanes_go(unsigned lanes)
{
    struct sim_thread *self = sim_self;
    warp[self->warp].waiting &= ~lanes;
    make_ready(self->warp, ranks_of(self->warp, lanes) & ~(1u << self->rank));
    self->state = SIM_RUNS;
}

static void lanes_ordered(struct sim_thread *lanes, unsigned mask)
{
    uint32_t epoch = 0, seen[32] = {0};
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        const struct sim_thread *t = &lanes[__builtin_ctz(rest)];
        epoch = t->warp_epoch > epoch ? t->warp_epoch : epoch;
        for (unsigned i = 0; mask != 0xffffffffu && i < 32; i++) {
            seen[i] = t->seen[i] > seen[i] ? t->seen[i] : seen[i];
        }
    }
    for (unsigned i = 0; i < 32; i++) {
        seen[i] = mask >> i & 1 ? epoch + 1 : seen[i];
    }
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        struct sim_thread *t = &lanes[__builtin_ctz(rest)];
        t->warp_epoch = epoch + 1;
        memcpy(t->seen, seen, sizeof seen);
    }
}

void sim_warp_barrier(unsigned mask)
{
    SIM_HERE();
    if (lanes_meet(SIM_AT_WARP_BARRIER, &mask, NULL)) {
        lanes_ordered(&thread[sim_self->warp * 32], mask);
        lanes_go(mask);
    }
}

struct shuffle {
    uint64_t bits;
    unsigned from;
};

// PTX ISA, shfl.sync: a lane whose source lies outside its segment keeps its own value.
static unsigned shuffle_source(enum sim_shuffle how, unsigned lane, unsigned by, int width)
{
    unsigned segment = (unsigned)width - 1, first = lane & ~segment, last = lane | segment;
    unsigned from = how == SIM_SHUFFLE_IDX    ? first | (by & segment)
                    : how == SIM_SHUFFLE_UP   ? lane - by
                    : how == SIM_SHUFFLE_DOWN ? lane + by
                                              : lane ^ by;
    bool inside = how == SIM_SHUFFLE_UP ? by <= lane && from >= first : from <= last;
    return inside ? from : lane;
}

uint64_t sim_shuffle(enum sim_shuffle how, unsigned mask, uint64_t bits, unsigned by, int width)
{
    SIM_HERE();
    struct shuffle mine = {bits, shuffle_source(how, sim_self->lane, by, width)};
    unsigned lanes = mask;
    if (lanes_meet(SIM_AT_SHUFFLE, &lanes, &mine)) {
        struct sim_thread *t = &thread[sim_self->warp * 32];
        uint64_t given[32];
        for (uint32_t rest = lanes; rest; rest &= rest - 1) {
            unsigned lane = (unsigned)__builtin_ctz(rest);
            given[lane] = ((struct shuffle *)t[lane].operand)->bits;
        }
        for (uint32_t rest = lanes; rest; rest &= rest - 1) {
            unsigned lane = (unsigned)__builtin_ctz(rest);
            struct shuffle *s = t[lane].operand;
            s->bits = lanes >> s->from & 1 ? given[s->from] : UINT64_MAX;
        }
        lanes_go(lanes);
    }
    if (!((mask & warp[sim_self->warp].exists) >> mine.from & 1)) {
        sim_report(SIM_DEADLOCK, "%s shuffles from lane %u, which does not take part (mask %08x)",
                   sim_where(), mine.from, mask);
        sim_abandon();
    }
    return mine.bits;
}

unsigned sim_ballot(unsigned mask, int predicate)
{
    SIM_HERE();
    unsigned mine = predicate != 0, lanes = mask;
    if (lanes_meet(SIM_AT_BALLOT, &lanes, &mine)) {
        struct sim_thread *t = &thread[sim_self->warp * 32];
        unsigned ballot = 0;
        for (uint32_t rest = lanes; rest; rest &= rest - 1) {
            unsigned lane = (unsigned)__builtin_ctz(rest);
            ballot |= *(unsigned *)t[lane].operand << lane;
        }
        for (uint32_t rest = lanes; rest; rest &= rest - 1) {
            *(unsigned *)t[__builtin_ctz(rest)].operand = ballot;
        }
        lanes_go(lanes);
    }
    return mine;
}

unsigned sim_active(void)
{
    return warp[sim_self->warp].exists;
}

void sim_warp(void (*run)(void *const *lanes), void *mine)
{
    SIM_HERE();
    unsigned lanes = 0xffffffffu;
    if (lanes_meet(SIM_AT_WARP, &lanes, mine)) {
        if (lanes != 0xffffffffu) {
            sim_report(SIM_DEADLOCK, "%s is at an instruction of 32 lanes in a warp of %d",
                       sim_where(), __builtin_popcount(lanes));
            sim_abandon();
        }
        void *all[32];
        for (unsigned lane = 0; lane < 32; lane++) {
            all[lane] = thread[sim_self->warp * 32 + lane].operand;
        }
        run(all);
        lanes_go(lanes);
    }
}

struct exchange {
    const void *mine;
    size_t bytes;
    char *all;
};

static void run_exchange(void *const *lanes)
{
    for (unsigned from = 0; from < 32; from++) {
        const struct exchange *give = lanes[from];
        for (unsigned to = 0; to < 32; to++) {
            const struct exchange *take = lanes[to];
            memcpy(take->all + from * give->bytes, give->mine, give->bytes);
        }
    }
}

void sim_warp_exchange(const void *mine, size_t bytes, void *all32)
{
    sim_warp(run_exchange, &(struct exchange){mine, bytes, all32});
}

// ---- launches ----

static void thread_main(void)
{
    for (;;) {
        sim_kernel_now->call(sim_kernel_now->args);
        sim_self->state = SIM_RETURNED;
        struct sim_thread *next = NULL;
        if (++returned < n_threads && !(next = take_ready(sim_self->warp))) {
            abandoned = true;
            struct sim_thread *self = sim_self;
            report_deadlock();
            sim_self = self;
        }
        leave(next);
    }
}

// Of n things: the i-th, reversed or shuffled.
static void order(uint8_t *things, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        things[i] = (uint8_t)(ordered == SIM_REVERSE ? n - 1 - i : i);
    }
    for (unsigned i = n; ordered == SIM_SHUFFLE && i > 1; i--) {
        unsigned j = below(i);
        uint8_t swap = things[j];
        things[j] = things[i - 1];
        things[i - 1] = swap;
    }
}

static void order_threads(void)
{
    order(warp_at, n_warps);
    for (unsigned w = 0; w < n_warps; w++) {
        unsigned n = n_threads - w * 32 < 32 ? n_threads - w * 32 : 32;
        rank_of_warp[warp_at[w]] = (uint8_t)w;
        order(warp[w].lane_at, n);
        for (unsigned rank = 0; rank < n; rank++) {
            thread[w * 32 + warp[w].lane_at[rank]].rank = rank;
        }
    }
}

static void begin_launch(const struct sim_kernel *kernel)
{
    sim_fibers_open();
    sim_kernel_now = kernel;
    sim_site = NULL;
    dim3 d = kernel->block, g = kernel->grid;
    n_threads = d.x * d.y * d.z;
    n_warps = (n_threads + 31) / 32;
    sim_blocks = g.x * g.y * g.z;
    abandoned = false;
    ordered = (int)sim_settings()->order;
    rng += sim_settings()->seed;
    for (unsigned i = 0; i < n_threads; i++) {
        thread[i] = (struct sim_thread){.index = {i % d.x, i / d.x % d.y, i / d.x / d.y},
                                        .number = i,
                                        .lane = i % 32,
                                        .warp = i / 32};
    }
    for (unsigned w = 0; w < n_warps; w++) {
        unsigned n = n_threads - w * 32;
        warp[w].exists = n >= 32 ? 0xffffffffu : (1u << n) - 1;
    }
    for (; fibers < n_threads; fibers++) {
        sim_fiber_reset(fibers, thread_main);
    }
    order_threads();
    sim_shared_launch();
    sim_access_launch();
}

static void run_block(uint32_t number)
{
    dim3 g = sim_kernel_now->grid;
    sim_block = number;
    block_index = (uint3){number % g.x, number / g.x % g.y, number / g.x / g.y};
    sim_epoch++;
    returned = arrived = 0;
    votes = 0;
    if (ordered == SIM_SHUFFLE) {
        order_threads();
    }
    sim_shared_block();
    sim_access_block();
    bool epochs_end = false;
    for (unsigned i = 0; i < n_threads; i++) {
        thread[i].state = SIM_RUNS;
        if (thread[i].warp_epoch > SIM_WARP_EPOCHS / 2) {
            epochs_end = true;
        }
        thread[i].copies = thread[i].commits = 0;
        thread[i].mask = 0;
        thread[i].site = NULL;
    }
    for (unsigned i = 0; epochs_end && i < n_threads; i++) {
        thread[i].warp_epoch = 0;
        memset(thread[i].seen, 0, sizeof thread[i].seen);
    }
    for (unsigned w = 0; w < n_warps; w++) {
        warp[w].waiting = 0;
        warp[w].ready = 0;
        make_ready(w, ranks_of(w, warp[w].exists));
    }
    sim_self = take_ready(warp_at[0]);
    sim_fiber_switch(HOST, sim_self->number);
    sim_self = NULL;
}

static uint32_t common_divisor(uint32_t a, uint32_t b)
{
    return b ? common_divisor(b, a % b) : a;
}

void sim_run_kernel(const struct sim_kernel *kernel)
{
    begin_launch(kernel);
    // Shuffled: i*step + start walks through all blocks where step and their number have no common
    // divisor.
    uint32_t n = sim_blocks, start = 0, step = 1;
    if (ordered == SIM_SHUFFLE) {
        start = below(n);
        do {
            step = 1 + below(n);
        } while (common_divisor(step, n) != 1);
    }
    for (uint32_t i = 0; i < n && !abandoned; i++) {
        uint32_t forward = (uint32_t)(((uint64_t)i * step + start) % n);
        run_block(ordered == SIM_REVERSE ? n - 1 - i : forward);
    }
    if (abandoned) { // stacks hold what was under way
        fibers = 0;
        warps_ready = 0;
    }
    sim_kernel_now = NULL;
}
