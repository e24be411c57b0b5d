// Every access of a kernel to memory. The compiler reports them (-fsanitize=thread) by calling
// functions of libtsan's names, which are here; libtsan itself is not linked.
//
//   stacks of the threads       not looked at
//   shared memory               alignment, bounds; races of threads: shared_cell
//   the program's constants     not looked at
//   everything else             alignment; races of blocks: global_cell; then sim_touch
//
// A cell is two bytes, the smallest type that kernels share between threads. A race is reported
// whatever the order in which threads and blocks have run, since a cell remembers who has read it
// and who has written it since the last barrier (shared) or in this launch (global).
#include "test/cuda/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum access { READ, WRITE, ATOMIC };

static bool told[SIM_KINDS]; // one report of each kind per launch

static bool tell(enum sim_kind kind)
{
    bool first = !told[kind];
    told[kind] = true;
    return first;
}

static void *map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("shadow of memory");
        abort();
    }
    return p;
}

// ---- shared memory ----

// A stamp tells who and when: epoch of the block's barriers, of the warp's barriers, flags, thread.
//
//     63      32 31        12 11                   10             9   0
//     epoch      warp epoch   many warps | atomic  many lanes     thread
//
// The last writer, and the readers since: one, or several of one warp, or of several warps.
struct shared_cell {
    uint64_t wrote, read;
};

#define MANY_LANES ((uint64_t)1 << 10)
#define MANY_WARPS ((uint64_t)1 << 11) // of a reader
#define BY_ATOMIC  ((uint64_t)1 << 11) // of a writer

static struct shared_cell *dynamic_cells, *static_cells;

static unsigned thread_of(uint64_t stamp)
{
    return stamp & 1023;
}

static uint64_t warp_epoch_of(uint64_t stamp)
{
    return stamp >> 12 & (SIM_WARP_EPOCHS - 1);
}

// An access of this epoch that may be made at the same time as `now`, by the thread that runs. Of
// several lanes it is not known who they were: those are ordered if any could be.
static bool unordered(uint64_t stamp, uint64_t now)
{
    if (stamp & MANY_WARPS || thread_of(stamp) / 32 != thread_of(now) / 32) {
        return true;
    }
    if (stamp & MANY_LANES) {
        return warp_epoch_of(stamp) >= warp_epoch_of(now);
    }
    return thread_of(stamp) != thread_of(now) &&
           warp_epoch_of(stamp) >= sim_self->seen[thread_of(stamp) % 32];
}

static bool same_epoch(uint64_t stamp, uint64_t now)
{
    return (stamp ^ now) >> 32 == 0;
}

__attribute__((noinline, cold)) static void shared_race(const struct sim_variable *v, size_t offset,
                                                        enum access access, uint64_t other,
                                                        bool other_wrote)
{
    if (!tell(SIM_SHARED_RACE)) {
        return;
    }
    dim3 d = sim_kernel_now->block;
    unsigned t = thread_of(other);
    char who[64] = "several threads have";
    if (other_wrote || !(other & (MANY_LANES | MANY_WARPS))) {
        snprintf(who, sizeof who, "thread %u,%u,%u has", t % d.x, t / d.x % d.y, t / d.x / d.y);
    }
    sim_report(SIM_SHARED_RACE, "%s %s byte %zu of shared %s, which %s %s: put a barrier between",
               sim_where(), access == READ ? "reads" : "writes", offset,
               v ? sim_variable_name(v) : "dynamic memory", who, other_wrote ? "written" : "read");
}

// Readers, with one more; before, they were not of several warps.
static uint64_t read_by(uint64_t read, uint64_t now)
{
    if (!same_epoch(read, now)) {
        return now;
    }
    if (thread_of(read) / 32 != thread_of(now) / 32) {
        return now | MANY_WARPS;
    }
    return unordered(read, now) ? now | MANY_LANES : now;
}

static void read_shared(struct shared_cell *cell, size_t cells, uint64_t now,
                        const struct sim_variable *v, size_t offset)
{
    for (size_t i = 0; i < cells; i++) {
        uint64_t wrote = cell[i].wrote & ~BY_ATOMIC, read = cell[i].read;
        if (same_epoch(wrote, now) && wrote != now && unordered(wrote, now)) {
            shared_race(v, offset + 2 * i, READ, wrote, true);
        }
        if (read != now && !(read & MANY_WARPS && same_epoch(read, now))) {
            cell[i].read = read_by(read, now);
        }
    }
}

static void write_shared(struct shared_cell *cell, size_t cells, uint64_t now, enum access access,
                         const struct sim_variable *v, size_t offset)
{
    for (size_t i = 0; i < cells; i++) {
        uint64_t wrote = cell[i].wrote & ~BY_ATOMIC, read = cell[i].read;
        if (same_epoch(wrote, now) && wrote != now && unordered(wrote, now) &&
            !(access == ATOMIC && cell[i].wrote & BY_ATOMIC)) {
            shared_race(v, offset + 2 * i, access, wrote, true);
        }
        if (same_epoch(read, now) && read != now && unordered(read, now)) {
            shared_race(v, offset + 2 * i, access, read, false);
        }
        if (access == WRITE) {
            cell[i].wrote = now;
        } else if (cell[i].wrote & BY_ATOMIC ||
                   !same_epoch(wrote, now)) { // a plain one stays known
            cell[i].wrote = now | BY_ATOMIC;
        }
    }
}

// offset: in the variable, or in dynamic shared memory (NULL).
static void shared_access(struct shared_cell *cell, size_t bytes, enum access access,
                          const struct sim_variable *v, size_t offset)
{
    size_t cells = (offset + bytes - 1) / 2 - offset / 2 + 1;
    uint64_t now =
        (uint64_t)sim_epoch << 32 | (uint64_t)sim_self->warp_epoch << 12 | sim_self->number;
    if (access == READ) {
        read_shared(cell, cells, now, v, offset);
    } else {
        write_shared(cell, cells, now, access, v, offset);
    }
}

static void dynamic_access(uintptr_t a, size_t bytes, enum access access)
{
    size_t offset = a - sim_dynamic, limit = sim_kernel_now->smem;
    if (a < sim_dynamic || offset + bytes > limit) {
        sim_report(
            SIM_BOUNDS, "%s %s %zu bytes at byte %td of the %zu of its dynamic shared memory",
            sim_where(), access == READ ? "reads" : "writes", bytes, (ptrdiff_t)offset, limit);
        sim_abandon();
    }
    shared_access(&dynamic_cells[offset / 2], bytes, access, NULL, offset);
}

static void static_access(uintptr_t a, size_t bytes, enum access access)
{
    const struct sim_variable *v = sim_variable_at(a);
    if (!v || a + bytes > v->at + v->bytes) {
        if (sim_is_guard(a)) {
            return;
        }
        sim_report(SIM_BOUNDS, "%s %s %zu bytes at byte %zu of the %zu of shared variable %s",
                   sim_where(), access == READ ? "reads" : "writes", bytes,
                   v ? a - v->at : a - sim_tls, v ? v->bytes : 0,
                   v ? sim_variable_name(v) : "(none: thread-local memory)");
        sim_abandon();
    }
    shared_access(&static_cells[(a - sim_tls) / 2], bytes, access, v, a - v->at);
}

// ---- global memory ----

// Stamps of blocks: those of earlier launches are lower than `first`.
struct global_cell {
    uint32_t wrote, read;
};

#define CHUNK_BITS 20 // 1 MiB of memory has its cells in one piece
#define CHUNK      ((uintptr_t)1 << CHUNK_BITS)
#define CHUNKS     ((size_t)1 << 16) // 64 GiB
#define KEPT       128               // chunks, from one launch to the next: 512 MiB of cells

#define CELLS_BYTES (CHUNK / 2 * sizeof(struct global_cell))

static struct chunk {
    uintptr_t number;
    struct global_cell *cells;
} chunks[CHUNKS];
static size_t n_chunks;

static uint32_t first;        // stamp of this launch's block 0
static uint32_t many, atomic; // stamps: several blocks; atomic operations. None is higher
static bool fenced;           // this block has called __threadfence
static bool counted;          // this block has done an atomic operation after that
static uint32_t n_counted;    // blocks of which that is true

static struct global_cell *cells_of(uintptr_t number)
{
    for (size_t i = number % CHUNKS, tried = 0; tried < CHUNKS; i = (i + 1) % CHUNKS, tried++) {
        if (!chunks[i].cells) {
            chunks[i] = (struct chunk){number, map(CELLS_BYTES)};
            n_chunks++;
        }
        if (chunks[i].number == number) {
            return chunks[i].cells;
        }
    }
    fprintf(stderr, "kernels touch more than 64 GiB of memory\n");
    abort();
}

static void new_stamps(void)
{
    if (n_chunks > KEPT || atomic > UINT32_MAX - 3 - sim_blocks) {
        for (size_t i = 0; i < CHUNKS; i++) {
            if (chunks[i].cells) {
                munmap(chunks[i].cells, CELLS_BYTES);
            }
        }
        memset(chunks, 0, sizeof chunks);
        n_chunks = 0;
        atomic = 0;
    }
    first = atomic + 1;
    many = first + sim_blocks;
    atomic = many + 1;
}

__attribute__((noinline, cold)) static void block_race(uintptr_t a, enum access access,
                                                       uint32_t other, bool other_wrote)
{
    // The last block may use what all others have left, if each has said so: __threadfence, then an
    // atomic operation.
    if (n_counted == sim_blocks || !tell(SIM_BLOCK_RACE)) {
        return;
    }
    dim3 g = sim_kernel_now->grid;
    uint32_t b = other - first;
    char who[64];
    snprintf(who, sizeof who, "block %u,%u,%u has", b % g.x, b / g.x % g.y, b / g.x / g.y);
    sim_report(SIM_BLOCK_RACE, "%s %s memory at %p, which %s %s: blocks run at the same time",
               sim_where(), access == READ ? "reads" : "writes", (void *)a,
               other == many     ? "other blocks have"
               : other == atomic ? "an atomic operation of another block has"
                                 : who,
               other_wrote ? "written" : "read");
}

// True if no block has touched the cell in this way before, in this launch.
static bool read_cell(struct global_cell *cell, uintptr_t a, uint32_t me)
{
    if (cell->wrote == me || cell->read == me) {
        return false;
    }
    bool fresh = cell->wrote < first && cell->read < first;
    if (cell->wrote >= first) {
        block_race(a, READ, cell->wrote, true);
    }
    cell->read = cell->read < first ? me : many;
    return fresh;
}

static bool write_cell(struct global_cell *cell, uintptr_t a, uint32_t me, enum access access)
{
    if (cell->wrote == me && access == WRITE) {
        return false;
    }
    bool fresh = cell->wrote < first;
    if (!fresh && cell->wrote != me && !(access == ATOMIC && cell->wrote == atomic)) {
        block_race(a, access, cell->wrote, true);
    }
    if (cell->read >= first && cell->read != me) {
        block_race(a, access, cell->read, false);
    }
    if (access == WRITE || cell->wrote != me) { // a plain one stays known
        cell->wrote = access == ATOMIC ? atomic : me;
    }
    return fresh;
}

static void global_access(uintptr_t a, size_t bytes, enum access access)
{
    uint32_t me = first + sim_block;
    bool fresh = false;
    for (uintptr_t at = a & ~(uintptr_t)1, end = a + bytes; at < end;) {
        struct global_cell *cells = cells_of(at >> CHUNK_BITS);
        uintptr_t stop = (at | (CHUNK - 1)) + 1;
        for (stop = stop < end ? stop : end; at < stop; at += 2) {
            struct global_cell *cell = &cells[at % CHUNK / 2];
            fresh |= access == READ ? read_cell(cell, at, me) : write_cell(cell, at, me, access);
        }
    }
    if (fresh) {
        size_t before = sim_reports(SIM_BOUNDS);
        sim_touch((void *)a, bytes, access != READ);
        if (sim_reports(SIM_BOUNDS) != before) {
            sim_abandon(); // the access itself may be a fault
        }
    }
    if (access == ATOMIC && fenced && !counted) {
        counted = true;
        n_counted++;
    }
}

// ---- all of it ----

extern const char __executable_start[], __data_start[];

// Host code's, and of threads to their stacks.
static bool of_no_interest(uintptr_t a)
{
    return !sim_self || a - sim_stacks < sim_stacks_bytes;
}

__attribute__((noinline)) static void sort_out(uintptr_t a, size_t bytes, enum access access)
{
    if (a - (sim_dynamic - SIM_WINDOW) < 2 * SIM_WINDOW) {
        dynamic_access(a, bytes, access);
    } else if (a - sim_tls < sim_tls_bytes) {
        static_access(a, bytes, access);
    } else if (access != READ || a - (uintptr_t)__executable_start >=
                                     (uintptr_t)__data_start - (uintptr_t)__executable_start) {
        global_access(a, bytes, access);
    }
}

static inline void look_at(uintptr_t a, size_t bytes, enum access access)
{
    if (!of_no_interest(a) && bytes) {
        sort_out(a, bytes, access);
    }
}

__attribute__((noinline, cold)) static void misaligned(uintptr_t a, size_t bytes, bool write)
{
    if (of_no_interest(a)) {
        return;
    }
    sim_report(SIM_ALIGNMENT, "%s %s %zu bytes at once at %p, which is no multiple of that",
               sim_where(), write ? "writes" : "reads", bytes, (void *)a);
    sim_abandon();
}

static void aligned_access(const void *p, size_t bytes, bool write)
{
    if ((uintptr_t)p % bytes) {
        misaligned((uintptr_t)p, bytes, write);
    }
    look_at((uintptr_t)p, bytes, write ? WRITE : READ);
}

void sim_access(const void *p, size_t bytes, bool write)
{
    SIM_HERE();
    look_at((uintptr_t)p, bytes, write ? WRITE : READ);
}

void sim_atomic(const void *p, size_t bytes)
{
    SIM_HERE();
    if ((uintptr_t)p % bytes) {
        misaligned((uintptr_t)p, bytes, true);
    }
    look_at((uintptr_t)p, bytes, ATOMIC);
}

void sim_fence(void)
{
    fenced = true;
}

void sim_access_launch(void)
{
    if (!dynamic_cells) {
        dynamic_cells = map(SIM_DYNAMIC_BYTES / 2 * sizeof *dynamic_cells);
    }
    size_t bytes = (sim_tls_bytes / 2 + 1) * sizeof *static_cells;
    if (!static_cells) {
        static_cells = map(bytes);
    }
    memset(told, 0, sizeof told);
    n_counted = 0;
    new_stamps();
}

void sim_access_block(void)
{
    fenced = counted = false;
}

// ---- cp.async ----

#define COPIES 64 // under way, of a thread

static struct copy {
    void *to;
    const void *from;
    uint32_t bytes, source_bytes;
    unsigned group;
} copies[SIM_THREADS][COPIES];

// Its destination is written at any time until it is waited for: it is poisoned now, and again
// written then.
void sim_cp_async(void *shared, const void *global, size_t bytes, size_t source_bytes)
{
    SIM_HERE();
    struct sim_thread *self = sim_self;
    if ((uintptr_t)shared % bytes || (uintptr_t)global % bytes) {
        misaligned((uintptr_t)shared % bytes ? (uintptr_t)shared : (uintptr_t)global, bytes, true);
    }
    if (self->copies == COPIES) {
        sim_report(SIM_MISUSE, "%s has %d asynchronous copies under way: wait for some",
                   sim_where(), COPIES);
        sim_abandon();
    }
    look_at((uintptr_t)global, source_bytes, READ);
    look_at((uintptr_t)shared, bytes, WRITE);
    memset(shared, 0xff, bytes);
    copies[self->number][self->copies++] =
        (struct copy){shared, global, (uint32_t)bytes, (uint32_t)source_bytes, self->commits};
}

void sim_cp_async_commit(void)
{
    sim_self->commits++;
}

void sim_cp_async_wait(unsigned pending_groups)
{
    SIM_HERE();
    struct sim_thread *self = sim_self;
    struct copy *mine = copies[self->number];
    unsigned left = 0;
    for (unsigned i = 0; i < self->copies; i++) {
        if (mine[i].group + pending_groups < self->commits) {
            look_at((uintptr_t)mine[i].to, mine[i].bytes, WRITE);
            memset(mine[i].to, 0, mine[i].bytes);
            memcpy(mine[i].to, mine[i].from, mine[i].source_bytes);
        } else {
            mine[left++] = mine[i];
        }
    }
    self->copies = left;
}

// ---- what the compiler calls ----

#define ACCESS(bytes)                                                                              \
    void __tsan_read##bytes(void *p);                                                              \
    void __tsan_read##bytes(void *p)                                                               \
    {                                                                                              \
        SIM_HERE();                                                                                \
        aligned_access(p, bytes, false);                                                           \
    }                                                                                              \
    void __tsan_write##bytes(void *p);                                                             \
    void __tsan_write##bytes(void *p)                                                              \
    {                                                                                              \
        SIM_HERE();                                                                                \
        aligned_access(p, bytes, true);                                                            \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

// Of structures and of types that are packed.
void __tsan_read_range(void *p, size_t bytes);
void __tsan_read_range(void *p, size_t bytes)
{
    SIM_HERE();
    look_at((uintptr_t)p, bytes, READ);
}

void __tsan_write_range(void *p, size_t bytes);
void __tsan_write_range(void *p, size_t bytes)
{
    SIM_HERE();
    look_at((uintptr_t)p, bytes, WRITE);
}

void __tsan_init(void);
void __tsan_init(void)
{
}

void __tsan_func_entry(void *caller);
void __tsan_func_entry(void *caller)
{
    (void)caller;
}

void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}
