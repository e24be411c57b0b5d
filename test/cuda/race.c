// race.c - which operation touched what, and whether something orders it with those before it.
//
// An operation X happens before Y if Y's clock has X's number in X's lane. Clocks are made when
// operations are queued (queue.c), so what is said here does not depend on the order in which the
// scheduler runs them: of two operations without an order that touch the same bytes, one of them
// writing, the one that runs later finds what the other has left, and reports.
//
// What touched some bytes last is a *state*: the last writer, and those readers since that are not
// ordered with each other. States are numbered, and never change: the shadow has one number per 4
// bytes, and an operation maps numbers to numbers, looking into a state once however many cells
// have it. Accesses that are no whole cells split them: 4 numbers, one per byte, until all 4 are
// the same again. Pages of cells that were last touched as a whole have one number for all, so that
// long copies cost little. Exact to the byte.
#include "test/cuda/host.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SEQ_BITS    28
#define SPLIT       0x80000000u // cell: a number in `splits`, else a state
#define NO_STATE    0xffffffffu
#define MEMOS       1024
#define LOOKUP_BITS 8

static_assert(SPLIT == MIXED, "a state has neither bit");
static_assert(LANES <= 1 << (32 - SEQ_BITS), "an operation is named by 32 bits");

// Reserved address space; what is not used costs nothing.
#define STATE_WORDS  ((size_t)1 << 31)
#define SPLITS_COUNT ((size_t)1 << 26)

struct memo {
    uint32_t tag, in, out;
};

static struct {
    // A state: writer, number of readers, readers. Operations are lane << SEQ_BITS | seq, 0: none.
    uint32_t *states, states_used;
    uint32_t (*splits)[4], splits_used, splits_free;
    struct span *parts;
    size_t n_parts, parts_room;
    const struct span *lookup[2][1 << LOOKUP_BITS]; // without parts, with
} race;

// The operation that runs.
static struct {
    bool active, narrow; // narrow: parts count
    struct clock clock;
    const char *name;
    int lane;
    uint32_t seq, self, own; // own: the state {self, no readers}
    uint32_t in[2], out[2];  // last step of reads and of writes
    uint32_t tag;
    size_t bytes;
} now;
static struct memo memos[2][MEMOS];

const char *sim_running(void)
{
    return now.active ? now.name : "host";
}

static void *reserve(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("sim: no address space for the race checker");
        abort();
    }
    return p;
}

void race_reset(void)
{
    if (!race.states) {
        race.states = reserve(STATE_WORDS * sizeof *race.states);
        race.splits = reserve(SPLITS_COUNT * sizeof *race.splits);
        race.states_used = 2; // state 0: nobody
    }
    race.states_used = 2;
    race.splits_used = 1;
    race.splits_free = 0;
    race.n_parts = 0;
    race_moved();
}

void race_moved(void)
{
    memset(race.lookup, 0, sizeof race.lookup);
}

// ---- states ----

static bool before(uint32_t op)
{
    return now.clock.at[op >> SEQ_BITS] >= (op & ((1u << SEQ_BITS) - 1));
}

static void conflict(uint32_t op, bool write, const char *did, const void *p)
{
    char self[128], other[128], where[128], key[256];
    int lane = (int)(op >> SEQ_BITS);
    uint32_t seq = op & ((1u << SEQ_BITS) - 1);
    queue_describe(self, sizeof self, now.lane, now.seq);
    queue_describe(other, sizeof other, lane, seq);
    memory_describe(where, sizeof where, p);
    snprintf(key, sizeof key, "%s|%s", now.name, queue_note(lane, seq)->name);
    sim_report_once(SIM_STREAM_RACE, key,
                    "%s %s %p (%s), which %s %s, and nothing orders the two: an event to wait for "
                    "is missing",
                    self, write ? "writes" : "reads", p, where, other, did);
}

static uint32_t state_new(uint32_t writer)
{
    if (race.states_used > STATE_WORDS - 2 - LANES) {
        fprintf(stderr, "sim: the race checker has no room for more states\n");
        abort();
    }
    uint32_t id = race.states_used;
    race.states[id] = writer;
    race.states[id + 1] = 0;
    race.states_used += 2;
    return id;
}

static uint32_t step_new(uint32_t in, bool write, const void *p)
{
    const uint32_t *s = race.states + in;
    uint32_t writer = s[0], n = s[1];
    if (writer == now.self && (!write || n == 0)) {
        return in;
    }
    if (!before(writer)) {
        conflict(writer, write, "writes", p);
    }
    if (!write) {
        for (uint32_t i = 0; i < n; i++) {
            if (s[2 + i] == now.self) {
                return in;
            }
        }
        uint32_t out = state_new(writer);
        for (uint32_t i = 0; i < n; i++) {
            if (!before(s[2 + i])) {
                race.states[race.states_used++] = s[2 + i];
            }
        }
        race.states[race.states_used++] = now.self;
        race.states[out + 1] = race.states_used - out - 2;
        return out;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (!before(s[2 + i])) {
            conflict(s[2 + i], true, "reads", p);
        }
    }
    if (!now.own) {
        now.own = state_new(now.self);
    }
    return now.own;
}

// The state of bytes at p after the running operation's access, from the one before it.
static uint32_t step(uint32_t in, bool write, const void *p)
{
    if (in == now.in[write]) {
        return now.out[write];
    }
    struct memo *memo = &memos[write][(in * 2654435761u) >> 22];
    if (memo->tag != now.tag || memo->in != in) {
        *memo = (struct memo){now.tag, in, step_new(in, write, p)};
    }
    now.in[write] = in;
    now.out[write] = memo->out;
    return memo->out;
}

// ---- cells ----

static void split_touch(uint32_t *cell, unsigned from, unsigned to, bool write, const char *p)
{
    uint32_t id = *cell & ~SPLIT;
    if (!(*cell & SPLIT)) {
        uint32_t out = step(*cell, write, p);
        if (out == *cell) {
            return;
        }
        id = race.splits_free;
        if (id) {
            race.splits_free = race.splits[id][0];
        } else if (race.splits_used == SPLITS_COUNT) {
            fprintf(stderr, "sim: the race checker has no room for more bytes\n");
            abort();
        } else {
            id = race.splits_used++;
        }
        for (int i = 0; i < 4; i++) {
            race.splits[id][i] = *cell;
        }
        *cell = SPLIT | id;
    }
    uint32_t *s = race.splits[id];
    for (unsigned i = from; i < to; i++) {
        uint32_t out = step(s[i], write, p + (i - from));
        now.bytes += out != s[i];
        s[i] = out;
    }
    if (s[0] == s[1] && s[0] == s[2] && s[0] == s[3]) {
        *cell = s[0];
        s[0] = race.splits_free;
        race.splits_free = id;
    }
}

static void cells_touch(uint32_t *c, size_t n, bool write, const char *p)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t in = c[i];
        if (in == now.out[write]) {
            continue;
        }
        if (in & SPLIT) {
            split_touch(c + i, 0, 4, write, p + 4 * i);
            continue;
        }
        uint32_t out = step(in, write, p + 4 * i);
        if (out != in) {
            now.bytes += 4;
            c[i] = out;
        }
        // Long ranges are mostly of one state.
        while (n - i > 16) {
            uint32_t differ = 0;
            for (size_t j = 1; j <= 16; j++) {
                differ |= c[i + j] ^ in;
            }
            if (differ) {
                break;
            }
            for (size_t j = 1; j <= 16; j++) {
                c[i + j] = out;
            }
            now.bytes += out != in ? 64 : 0;
            i += 16;
        }
    }
}

// The cells count again, instead of their page's number.
static void page_open(const struct shadow *shadow, size_t page)
{
    uint32_t *cells = shadow->cells + page * PAGE_CELLS, state = shadow->pages[page];
    if (state != MIXED) {
        for (size_t i = 0; i < PAGE_CELLS; i++) {
            cells[i] = state;
        }
        shadow->pages[page] = MIXED;
    }
}

static void page_touch(const struct shadow *shadow, size_t page, bool write, const char *p)
{
    uint32_t *cells = shadow->cells + page * PAGE_CELLS, state = shadow->pages[page];
    if (state != MIXED) {
        uint32_t out = step(state, write, p);
        now.bytes += out != state ? 4 * PAGE_CELLS : 0;
        shadow->pages[page] = out;
        return;
    }
    cells_touch(cells, PAGE_CELLS, write, p);
    uint32_t differ = 0;
    for (size_t i = 0; i < PAGE_CELLS; i++) {
        differ |= cells[i] ^ cells[0];
    }
    if (!differ && !(cells[0] & SPLIT)) {
        shadow->pages[page] = cells[0];
    }
}

static void whole_cells(const struct shadow *shadow, size_t first, size_t n, bool write,
                        const char *p)
{
    while (n > 0) {
        size_t page = first / PAGE_CELLS, here = PAGE_CELLS - first % PAGE_CELLS;
        here = here < n ? here : n;
        uint32_t state = shadow->pages[page];
        if (here == PAGE_CELLS) {
            page_touch(shadow, page, write, p);
        } else if (state == MIXED || step(state, write, p) != state) {
            page_open(shadow, page);
            cells_touch(shadow->cells + first, here, write, p);
        }
        first += here;
        n -= here;
        p += 4 * here;
    }
}

static void bytes_touch(const struct shadow *shadow, uintptr_t offset, size_t bytes, bool write,
                        const char *p)
{
    while (bytes > 0) {
        unsigned from = offset & 3;
        size_t n = 4 - from < bytes ? 4 - from : bytes;
        if (n == 4) {
            n = bytes & ~(size_t)3;
            whole_cells(shadow, offset / 4, n / 4, write, p);
        } else {
            page_open(shadow, offset / 4 / PAGE_CELLS);
            split_touch(shadow->cells + offset / 4, from, from + (unsigned)n, write, p);
        }
        offset += n;
        bytes -= n;
        p += n;
    }
}

// ---- bounds ----

extern const char __executable_start[], end[];

static const struct span *part_at(uintptr_t at)
{
    size_t lo = 0, hi = race.n_parts;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (race.parts[mid].hi <= at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < race.n_parts && race.parts[lo].lo <= at ? &race.parts[lo] : NULL;
}

static const struct span *look_up(uintptr_t at, bool narrow)
{
    // Tensors at distances of powers of two must not meet.
    size_t entry = (at >> 8) * UINT64_C(0x9e3779b97f4a7c15) >> (64 - LOOKUP_BITS);
    const struct span **known = &race.lookup[narrow][entry];
    const struct span *span = *known;
    if (span && at >= span->lo && at < span->hi) {
        return span;
    }
    span = memory_at((const void *)at);
    if (span && narrow && span->kind == SPAN_DEVICE) {
        span = part_at(at);
    }
    if (span) {
        *known = span;
    }
    return span;
}

static void out_of_bounds(const struct span *span, const void *p, size_t bytes, bool write)
{
    char self[128] = "a kernel", where[192], key[256];
    if (now.active) {
        queue_describe(self, sizeof self, now.lane, now.seq);
    }
    uintptr_t at = (uintptr_t)p;
    memory_describe(where, sizeof where, p);
    const char *why = "";
    if (span && write && span->read_only) {
        why = ": read-only there";
    } else if (span) {
        why = ": beyond its end";
    } else if (now.narrow && memory_at(p)) {
        why = ": in no declared part";
    }
    snprintf(key, sizeof key, "%s|%s|%d", sim_running(), why, write);
    char room[64] = "";
    if (span && at + bytes > span->hi) {
        snprintf(room, sizeof room, ", where %zu bytes are left", (size_t)(span->hi - at));
    }
    sim_report_once(SIM_BOUNDS, key, "%s %s %zu bytes at %p (%s)%s%s; %s", self,
                    write ? "writes" : "reads", bytes, p, where, why, room, sim_where());
}

bool race_touch(const void *p, size_t bytes, bool write)
{
    if (bytes == 0) {
        return true;
    }
    uintptr_t at = (uintptr_t)p;
    const struct span *span = look_up(at, now.narrow);
    if (!span || bytes > span->hi - at || (write && span->read_only)) {
        // Constant tables lie in the program itself.
        if (!span && !write && at >= (uintptr_t)__executable_start && at < (uintptr_t)end) {
            return true;
        }
        out_of_bounds(span, p, bytes, write);
        return false;
    }
    if (!now.active) {
        return true;
    }
    uintptr_t offset = at - span->shadow.origin;
    if (((offset | bytes) & 3) == 0) {
        whole_cells(&span->shadow, offset / 4, bytes / 4, write, p);
    } else {
        bytes_touch(&span->shadow, offset, bytes, write, p);
    }
    return true;
}

void sim_touch(const void *p, size_t bytes, bool write)
{
    race_touch(p, bytes, write);
}

// ---- operations ----

static void begin(const char *name, int lane, uint32_t seq, const struct clock *clock)
{
    now.active = true;
    now.clock = *clock;
    now.name = name;
    now.lane = lane;
    now.seq = seq;
    now.self = (uint32_t)lane << SEQ_BITS | seq;
    now.own = 0;
    now.tag++;
    now.bytes = 0;
    for (int i = 0; i < 2; i++) {
        now.in[i] = now.out[i] = NO_STATE;
    }
}

void race_begin(const struct op *op)
{
    begin(op->name, op->lane, op->seq, &op->clock);
    now.narrow = op->kind == OP_KERNEL && race.n_parts > 0;
}

size_t race_end(void)
{
    now.active = now.narrow = false;
    return now.bytes;
}

void race_host(const struct clock *host, const void *p, size_t bytes, bool write)
{
    const struct span *span = memory_at(p);
    if (!memory_ours(p)) {
        return; // pageable: no operation touches it when the host does not know
    }
    if (span && span->kind == SPAN_DEVICE) {
        sim_report_once(SIM_MISUSE, "host", "the host touches device memory at %p", p);
        return;
    }
    begin(queue_note(LANE_HOST, host->at[LANE_HOST])->name, LANE_HOST, host->at[LANE_HOST], host);
    race_touch(p, bytes, write);
    race_end();
}

// Its shadow may stay: all that has been done is before whatever is queued after this.
void race_forget(const struct span *span)
{
    size_t kept = 0;
    for (size_t i = 0; i < race.n_parts; i++) {
        if (race.parts[i].hi <= span->lo || race.parts[i].lo >= span->hi) {
            race.parts[kept++] = race.parts[i];
        }
    }
    race.n_parts = kept;
    race_moved();
}

// ---- parts ----

void sim_part(const void *p, size_t bytes, bool read_only)
{
    uintptr_t at = (uintptr_t)p;
    const struct span *whole = memory_at(p);
    size_t i = 0;
    while (i < race.n_parts && race.parts[i].lo < at) {
        i++;
    }
    bool overlaps =
        (i > 0 && race.parts[i - 1].hi > at) || (i < race.n_parts && race.parts[i].lo < at + bytes);
    if (!whole || whole->kind != SPAN_DEVICE || bytes > whole->hi - at || overlaps) {
        sim_report_once(SIM_MISUSE, "sim_part", "sim_part(%p, %zu): %s", p, bytes,
                        overlaps ? "overlaps another part" : "not in one device allocation");
        return;
    }
    if (race.n_parts == race.parts_room) {
        race.parts_room = race.parts_room ? 2 * race.parts_room : 64;
        race.parts = realloc(race.parts, race.parts_room * sizeof *race.parts);
        if (!race.parts) {
            abort();
        }
    }
    memmove(race.parts + i + 1, race.parts + i, (race.n_parts - i) * sizeof *race.parts);
    race.parts[i] = *whole;
    race.parts[i].lo = at;
    race.parts[i].hi = at + bytes;
    race.parts[i].read_only = read_only;
    race.n_parts++;
    race_moved();
}

void sim_parts_forget(void)
{
    race.n_parts = 0;
    race_moved();
}
