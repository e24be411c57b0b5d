// cores.c - who overlaps with whom, parts by hwloc, and the binding.
#include "hete/cores.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef USE_HWLOC
#include <hwloc.h>
#endif

static bool has(const struct core_set *s, size_t core)
{
    return s->bits[core / 64] >> core % 64 & 1;
}

static size_t count(const struct core_set *s)
{
    size_t n = 0;
    for (size_t i = 0; i < CORES_MAX / 64; i++) {
        n += (size_t)__builtin_popcountll(s->bits[i]);
    }
    return n;
}

static bool overlap(const struct core_set *x, const struct core_set *y)
{
    uint64_t common = 0;
    for (size_t i = 0; i < CORES_MAX / 64; i++) {
        common |= x->bits[i] & y->bits[i];
    }
    return common != 0;
}

static void unite(struct core_set *x, const struct core_set *y)
{
    for (size_t i = 0; i < CORES_MAX / 64; i++) {
        x->bits[i] |= y->bits[i];
    }
}

// As taskset writes them: 0-3,8. What does not fit is left out.
static void print_set(char *out, size_t size, const struct core_set *s)
{
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < CORES_MAX; i++) {
        size_t last = i;
        if (!has(s, i)) {
            continue;
        }
        while (last + 1 < CORES_MAX && has(s, last + 1)) {
            last++;
        }
        char text[32];
        int length = last > i ? snprintf(text, sizeof text, "%s%zu-%zu", n ? "," : "", i, last)
                              : snprintf(text, sizeof text, "%s%zu", n ? "," : "", i);
        if (n + (size_t)length + sizeof ",..." > size) {
            snprintf(out + n, size - n, ",...");
            return;
        }
        memcpy(out + n, text, (size_t)length + 1);
        n += (size_t)length;
        i = last;
    }
}

// ---- parts --------------------------------------------------------------------------------------

#ifdef USE_HWLOC
static void from_bitmap(struct core_set *out, hwloc_const_bitmap_t from)
{
    *out = (struct core_set){0};
    for (unsigned i = 0; i < CORES_MAX; i++) {
        out->bits[i / 64] |= (uint64_t)(hwloc_bitmap_isset(from, i) != 0) << i % 64;
    }
}

// Part `index` of `parts` of the cores in `of`, which the topology is cut down to.
static bool part_of(struct core_set *out, hwloc_topology_t topology, const struct core_set *of,
                    size_t parts, size_t index)
{
    hwloc_bitmap_t keep = hwloc_bitmap_alloc(), *sets = calloc(parts, sizeof(hwloc_bitmap_t));
    bool done = false;
    for (unsigned i = 0; keep && i < CORES_MAX; i++) {
        if (has(of, i)) {
            hwloc_bitmap_set(keep, i);
        }
    }
    if (keep && sets && hwloc_topology_restrict(topology, keep, 0) == 0) {
        hwloc_obj_t root = hwloc_get_root_obj(topology);
        if (hwloc_distrib(topology, &root, 1, sets, (unsigned)parts, INT_MAX, 0) == 0) {
            from_bitmap(out, sets[index]);
            done = count(out) > 0;
        }
    }
    for (size_t i = 0; sets && i < parts; i++) {
        hwloc_bitmap_free(sets[i]);
    }
    free(sets);
    hwloc_bitmap_free(keep);
    return done;
}

// Finds out how many cores are there, and divides what is to be divided.
static void by_topology(struct core_share *s, const struct core_set *of, size_t index)
{
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) {
        return;
    }
    if (hwloc_topology_load(topology) == 0) {
        int all = hwloc_bitmap_weight(hwloc_topology_get_allowed_cpuset(topology));
        s->there = all > 0 ? (size_t)all : 0;
        s->bind = s->sharing > 1 && s->sharing <= s->divided &&
                  part_of(&s->cores, topology, of, s->sharing, index);
    }
    hwloc_topology_destroy(topology);
}

static bool bind_process(const struct core_set *to)
{
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) {
        return false;
    }
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    for (unsigned i = 0; set && i < CORES_MAX; i++) {
        if (has(to, i)) {
            hwloc_bitmap_set(set, i);
        }
    }
    bool bound = set && hwloc_topology_load(topology) == 0 &&
                 hwloc_set_cpubind(topology, set, HWLOC_CPUBIND_PROCESS) == 0;
    hwloc_bitmap_free(set);
    hwloc_topology_destroy(topology);
    return bound;
}
#else
static void by_topology(struct core_share *s, const struct core_set *of, size_t index)
{
    (void)s;
    (void)of;
    (void)index;
}

static bool bind_process(const struct core_set *to)
{
    (void)to;
    return false; // never asked for
}
#endif

// The ranks of self's machine whose cores overlap with its own, be it by way of others.
static void find_sharing(bool *in, struct core_set *of, const struct core_claim *claims,
                         size_t ranks, size_t self)
{
    *of = claims[self].may;
    in[self] = true;
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < ranks; i++) {
            if (!in[i] && strcmp(claims[i].machine, claims[self].machine) == 0 &&
                overlap(of, &claims[i].may)) {
                in[i] = more = true;
                unite(of, &claims[i].may);
            }
        }
    }
}

int cores_divide(struct core_share *out, const struct core_claim *claims, size_t ranks, size_t self,
                 struct error *err)
{
    struct core_set of, taken = {{0}};
    size_t index = 0;
    bool *in = calloc(ranks, sizeof *in);
    if (!in) {
        return error_set(err, STATUS_FAIL, "no memory for the cores of %zu ranks", ranks);
    }
    find_sharing(in, &of, claims, ranks, self);
    *out = (struct core_share){.cores = claims[self].may, .divided = count(&of)};
    for (size_t i = 0; i < ranks; i++) {
        if (strcmp(claims[i].machine, claims[self].machine) == 0) {
            out->local++;
            unite(&taken, &claims[i].may);
        }
        out->sharing += in[i];
        index += in[i] && i < self;
    }
    free(in);
    out->taken = count(&taken);
    by_topology(out, &of, index);
    out->threads = out->bind ? count(&out->cores) : out->divided / out->sharing;
    out->threads = out->threads ? out->threads : 1;
    return STATUS_OK;
}

// ---- this rank ----------------------------------------------------------------------------------

// Containers of one machine may have names of their own; what the system drew when it started is
// common to them.
static void name_machine(char out[64])
{
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    size_t n = f ? fread(out, 1, 63, f) : 0;
    if (f) {
        fclose(f);
    }
    out[n] = 0;
    if (n == 0 && gethostname(out, 63)) {
        out[0] = 0;
    }
    out[63] = 0;
}

static void claim(struct core_claim *mine)
{
    cpu_set_t set[CORES_MAX / CPU_SETSIZE];
    *mine = (struct core_claim){.machine = ""};
    name_machine(mine->machine);
    if (sched_getaffinity(0, sizeof set, set) == 0) {
        for (size_t i = 0; i < CORES_MAX; i++) {
            mine->may.bits[i / 64] |= (uint64_t)(CPU_ISSET_S(i, sizeof set, set) != 0) << i % 64;
        }
    }
}

static void describe(struct cores *out, const struct core_share *s, bool failed)
{
    char list[128];
    print_set(list, sizeof list, &s->cores);
    int n = snprintf(out->summary, sizeof out->summary,
                     "%zu rank%s on this machine, this one has core%s %s", s->local,
                     s->local == 1 ? "" : "s", count(&s->cores) == 1 ? "" : "s", list);
    if (!s->bind && s->sharing > 1) {
        snprintf(out->summary + n, sizeof out->summary - (size_t)n,
                 " together with %zu other%s: %zu thread%s", s->sharing - 1,
                 s->sharing == 2 ? "" : "s", s->threads, s->threads == 1 ? "" : "s");
    }
    if (failed) {
        snprintf(out->warning, sizeof out->warning,
                 "a rank cannot be bound to cores %s: %s; the launcher may be able to "
                 "(mpirun --map-by slot:PE=N)",
                 list, strerror(errno));
    } else if (s->sharing > s->divided) {
        snprintf(out->warning, sizeof out->warning,
                 "%zu ranks share %zu core%s of this machine and wait for each other: fewer ranks, "
                 "or more cores",
                 s->sharing, s->divided, s->divided == 1 ? "" : "s");
    } else if (s->taken < s->there) {
        snprintf(out->warning, sizeof out->warning,
                 "the ranks on this machine were started on %zu of its %zu cores; if they are to "
                 "have all: mpirun --bind-to none, srun --cpu-bind=none",
                 s->taken, s->there);
    }
}

int cores_take(struct cores *out, struct comm *c, struct error *err)
{
    size_t ranks = (size_t)comm_ranks(c);
    struct core_claim mine, *all = malloc(ranks * sizeof *all);
    struct core_share share;
    *out = (struct cores){0};
    claim(&mine);
    int status = all ? comm_all_gather(c, &mine, all, sizeof mine, err)
                     : error_set(err, STATUS_FAIL, "no memory for the cores of %zu ranks", ranks);
    status = status ? status : cores_divide(&share, all, ranks, (size_t)comm_rank(c), err);
    free(all);
    if (status == STATUS_OK) {
        describe(out, &share, share.bind && !bind_process(&share.cores));
        out->threads = share.threads;
    }
    return status;
}
