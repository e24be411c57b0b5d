// memory.c - device memory, and host memory that is pinned: where it lies, what is allocated, and
// who may touch it.
//
// Device memory is one reservation of address space, accessible only while an operation runs.
// Allocations lie apart, with room between them, and an address is not soon used again: what is
// beyond an allocation, or was freed, belongs to nobody.
#include "test/cuda/host.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE    ((uintptr_t)2 << 20)
#define PINNED_BYTES ((size_t)64 << 30) // of address space
#define FREED        64

struct region {
    uintptr_t base, end, next; // next: where to look for room first
    uintptr_t align;
    struct shadow shadow;
    size_t reserved; // behind base, with what aligning it has cost
    void *reservation;
};

static struct {
    struct region device, pinned;
    uintptr_t device_top; // as far as device memory has been used
    size_t device_used;
    bool open;
    struct span *live; // ascending
    size_t n_live, live_room;
    struct span freed[FREED]; // the last ones
    unsigned allocations, frees;
} mem;
static struct sigaction before_us;

// ---- regions and spans ----

static void *reserve(size_t bytes, int protection)
{
    void *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("sim: no address space for memory");
        abort();
    }
    return p;
}

static struct shadow shadow_make(uintptr_t origin, size_t bytes)
{
    size_t pages = bytes / (4 * PAGE_CELLS) + 1;
    return (struct shadow){
        .origin = origin,
        .cells = reserve(pages * PAGE_CELLS * sizeof(uint32_t), PROT_READ | PROT_WRITE),
        .pages = reserve(pages * sizeof(uint32_t), PROT_READ | PROT_WRITE)};
}

static void shadow_drop(const struct shadow *s, size_t bytes)
{
    size_t pages = bytes / (4 * PAGE_CELLS) + 1;
    munmap(s->cells, pages * PAGE_CELLS * sizeof(uint32_t));
    munmap(s->pages, pages * sizeof(uint32_t));
}

// Huge pages: of a region that is large, and much used. They make mprotect cheap.
static void region_make(struct region *r, size_t bytes, uintptr_t align, int protection, bool huge)
{
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    r->reserved = bytes + HUGE_PAGE;
    r->reservation = reserve(r->reserved, protection);
    r->base = ((uintptr_t)r->reservation + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    r->end = r->base + bytes;
    r->next = r->base;
    r->align = align;
    r->shadow = shadow_make(r->base, bytes);
    if (huge) {
        madvise((void *)r->base, bytes, MADV_HUGEPAGE);
    }
}

static void region_drop(struct region *r)
{
    if (r->reservation) {
        munmap(r->reservation, r->reserved);
        shadow_drop(&r->shadow, r->end - r->base);
    }
}

static bool region_has(const struct region *r, const void *p)
{
    return (uintptr_t)p >= r->base && (uintptr_t)p < r->end;
}

// Index of the first span that ends after `at`.
static size_t span_index(uintptr_t at)
{
    size_t lo = 0, hi = mem.n_live;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (mem.live[mid].hi <= at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

const struct span *memory_at(const void *p)
{
    size_t i = span_index((uintptr_t)p);
    return i < mem.n_live && mem.live[i].lo <= (uintptr_t)p ? &mem.live[i] : NULL;
}

bool memory_ours(const void *p)
{
    return region_has(&mem.device, p) || region_has(&mem.pinned, p) || memory_at(p);
}

static void span_insert(const struct span *span)
{
    if (mem.n_live == mem.live_room) {
        mem.live_room = mem.live_room ? 2 * mem.live_room : 64;
        mem.live = realloc(mem.live, mem.live_room * sizeof *mem.live);
        if (!mem.live) {
            abort();
        }
    }
    size_t i = span_index(span->lo);
    memmove(mem.live + i + 1, mem.live + i, (mem.n_live - i) * sizeof *mem.live);
    mem.live[i] = *span;
    mem.live[i].number = ++mem.allocations;
    mem.n_live++;
    race_moved();
}

static void span_remove(const void *p)
{
    size_t i = span_index((uintptr_t)p);
    struct span span = mem.live[i];
    race_forget(&span);
    memmove(mem.live + i, mem.live + i + 1, (mem.n_live - i - 1) * sizeof *mem.live);
    mem.n_live--;
    mem.freed[mem.frees++ % FREED] = span;
    race_moved();
}

// Room for an allocation, with something unused around it; 0: none.
static uintptr_t region_room(const struct region *r, size_t bytes)
{
    for (int pass = 0; pass < 2; pass++) {
        uintptr_t at = pass ? r->base : r->next;
        for (size_t i = span_index(at); i < mem.n_live && mem.live[i].lo < r->end; i++) {
            if (mem.live[i].lo > at && mem.live[i].lo - at > bytes) {
                break;
            }
            at = (mem.live[i].hi + 2 * r->align - 1) / r->align * r->align;
        }
        if (at < r->end && r->end - at >= bytes) {
            return at;
        }
    }
    return 0;
}

static void *region_take(struct region *r, size_t bytes, int kind)
{
    uintptr_t at = region_room(r, bytes + r->align);
    if (!at) {
        return NULL;
    }
    r->next = (at + bytes + 2 * r->align - 1) / r->align * r->align;
    struct span span = {.lo = at, .hi = at + bytes, .shadow = r->shadow, .kind = kind};
    span_insert(&span);
    return (void *)at;
}

static const char *kind_name(const struct span *s)
{
    return s->kind == SPAN_DEVICE ? "device" : s->kind == SPAN_PINNED ? "pinned" : "registered";
}

void memory_describe(char *text, size_t size, const void *p)
{
    uintptr_t at = (uintptr_t)p;
    const struct span *span = memory_at(p), *near = NULL;
    const char *how = "";
    size_t distance = 0;
    if (span) {
        snprintf(text, size, "%s allocation %u of %zu bytes, at byte %zu", kind_name(span),
                 span->number, (size_t)(span->hi - span->lo), (size_t)(at - span->lo));
        return;
    }
    size_t i = span_index(at);
    for (size_t k = 0; k < FREED && k < mem.frees; k++) {
        const struct span *f = &mem.freed[(mem.frees - 1 - k) % FREED];
        if (at >= f->lo && at < f->hi) {
            snprintf(text, size, "freed: %s allocation %u of %zu bytes, at byte %zu", kind_name(f),
                     f->number, (size_t)(f->hi - f->lo), (size_t)(at - f->lo));
            return;
        }
    }
    if (!memory_ours(p)) {
        snprintf(text, size, "the host's own memory");
        return;
    }
    if (i > 0) {
        near = &mem.live[i - 1];
        distance = at - near->hi;
        how = "behind the end of";
    }
    if (i < mem.n_live && (!near || mem.live[i].lo - at < distance)) {
        near = &mem.live[i];
        distance = near->lo - at;
        how = "before";
    }
    if (near) {
        snprintf(text, size, "%zu bytes %s %s allocation %u of %zu bytes", distance, how,
                 kind_name(near), near->number, (size_t)(near->hi - near->lo));
    } else {
        snprintf(text, size, "nothing is allocated");
    }
}

// ---- protection ----

static void on_fault(int sig, siginfo_t *info, void *context)
{
    (void)sig;
    (void)context;
    char where[160], text[400];
    struct sigaction next = before_us;
    if (region_has(&mem.device, info->si_addr)) {
        memory_describe(where, sizeof where, info->si_addr);
        int n = snprintf(text, sizeof text, "sim: host code touches device memory at %p (%s)\n",
                         info->si_addr, where);
        (void)!write(STDERR_FILENO, text, (size_t)n);
        memset(&next, 0, sizeof next);
        next.sa_handler = SIG_DFL;
    } else if (mem.open) {
        int n = snprintf(text, sizeof text, "sim: %s faults at %p; %s\n", sim_running(),
                         info->si_addr, sim_where());
        (void)!write(STDERR_FILENO, text, (size_t)n);
    }
    sigaction(SIGSEGV, &next, NULL); // the access is tried again, and is that one's
}

static void protect(int protection)
{
    uintptr_t bytes = mem.device_top - mem.device.base;
    if (bytes && mprotect((void *)mem.device.base, bytes, protection)) {
        perror("sim: mprotect");
        abort();
    }
    mem.open = protection != PROT_NONE;
}

void memory_open(void)
{
    if (!mem.open) {
        protect(PROT_READ | PROT_WRITE);
    }
}

void memory_close(void)
{
    if (!mem.open) {
        return;
    }
    protect(PROT_NONE);
    // Test frameworks put their own handler in place at any time.
    struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, old;
    sigaction(SIGSEGV, &ours, &old);
    if (!(old.sa_flags & SA_SIGINFO) || old.sa_sigaction != on_fault) {
        before_us = old;
    }
}

// ---- what runtime.c asks ----

void memory_reset(void)
{
    for (size_t i = 0; i < mem.n_live; i++) {
        if (mem.live[i].kind == SPAN_REGISTERED) {
            shadow_drop(&mem.live[i].shadow, mem.live[i].hi - mem.live[i].shadow.origin);
        }
    }
    region_drop(&mem.device);
    region_drop(&mem.pinned);
    free(mem.live);
    memset(&mem, 0, sizeof mem);
    size_t bytes = sim_settings()->memory;
    region_make(&mem.device, 2 * bytes + ((size_t)64 << 20), 256, PROT_NONE,
                bytes >= (size_t)16 << 20);
    region_make(&mem.pinned, PINNED_BYTES, 4096, PROT_READ | PROT_WRITE, false);
    mem.device_top = mem.device.base;
}

bool memory_is_device(const void *p)
{
    return region_has(&mem.device, p);
}

static size_t rounded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

size_t memory_left(void)
{
    return sim_settings()->memory - mem.device_used;
}

static void *take_device(size_t bytes)
{
    size_t cap = sim_settings()->memory;
    void *p = bytes <= cap && rounded(bytes) <= memory_left()
                  ? region_take(&mem.device, bytes, SPAN_DEVICE)
                  : NULL;
    if (!p) {
        return NULL;
    }
    mem.device_used += rounded(bytes);
    uintptr_t top = ((uintptr_t)p + bytes + HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE;
    if (top > mem.device_top) {
        mem.device_top = top < mem.device.end ? top : mem.device.end;
        mem.open = false; // not all of it
    }
    memory_open();
    return p;
}

void *memory_take(size_t bytes, bool device)
{
    void *p = device                     ? take_device(bytes)
              : bytes > PINNED_BYTES / 2 ? NULL
                                         : region_take(&mem.pinned, bytes, SPAN_PINNED);
    if (p) {
        memset(p, 0xff, bytes); // NaN in every type
    }
    return p;
}

bool memory_register(void *p, size_t bytes)
{
    uintptr_t at = (uintptr_t)p, origin = at & ~(uintptr_t)3;
    size_t i = span_index(at);
    if (memory_ours(p) || (i < mem.n_live && mem.live[i].lo < at + bytes)) {
        return false;
    }
    struct span span = {.lo = at, .hi = at + bytes, .kind = SPAN_REGISTERED};
    span.shadow = shadow_make(origin, span.hi - origin);
    span_insert(&span);
    return true;
}

void memory_give(const void *p)
{
    const struct span span = *memory_at(p);
    span_remove(p);
    if (span.kind == SPAN_REGISTERED) {
        shadow_drop(&span.shadow, span.hi - span.shadow.origin);
        return;
    }
    uintptr_t lo = (span.lo + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uintptr_t hi = span.hi / HUGE_PAGE * HUGE_PAGE;
    if (hi > lo) {
        madvise((void *)lo, hi - lo, MADV_DONTNEED);
    }
    if (span.kind == SPAN_DEVICE) {
        mem.device_used -= rounded(span.hi - span.lo);
    }
}
