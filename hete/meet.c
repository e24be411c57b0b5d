// Hellos, the job file, beats: see meet.h.
#include "hete/meet.h"
#include "data/files.h"
#include "hete/beat.h"
#include "kernels/clock.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#define POLL_S     0.02 // between looks, at first
#define POLL_S_MAX 0.5
#define TEMP_AGE_S 3600 // of a temporary file that nobody writes any more

struct meet {
    struct comm comm;
    struct comm_config config;
    char dir[PATH_MAX - 128]; // DIR/ranks
    char identity[256];
    uint64_t job, token;
    uint64_t nonce;
    struct beat *beat;
    bool left;
};

// What a rank says of itself. hash: of all that follows.
struct hello {
    uint64_t hash;
    char identity[256];
    int32_t rank, ranks;
    uint64_t nonce, token; // token: of the job that it has joined; 0: none
    struct beat_place place;
    char words[MEET_WORDS_MAX];
};

struct job {
    uint64_t hash;
    char identity[256];
    int32_t ranks;
    uint64_t token;
    char data[MEET_DATA_MAX];
    struct hello hello[]; // [ranks]
};

// ---- files --------------------------------------------------------------------------------------

static uint64_t hash_of(const void *record, size_t bytes)
{
    return XXH3_64bits((const char *)record + sizeof(uint64_t), bytes - sizeof(uint64_t));
}

// DIR/ranks/WHAT.NUMBER[.RANK]
static void name(const struct meet *m, char out[PATH_MAX], const char *what, uint64_t number,
                 int rank)
{
    char tail[16] = "";
    if (rank >= 0) {
        snprintf(tail, sizeof tail, ".%d", rank);
    }
    snprintf(out, PATH_MAX, "%s/%s.%016llx%s", m->dir, what, (unsigned long long)number, tail);
}

// A record that is whole; false: none is there.
static bool read_record(const char *path, void *record, size_t bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t n = pread(fd, record, bytes, 0);
    uint64_t hash;
    close(fd);
    memcpy(&hash, record, sizeof hash);
    return n == (ssize_t)bytes && hash == hash_of(record, bytes);
}

static int write_record(const char *path, void *record, size_t bytes, struct error *err)
{
    uint64_t hash = hash_of(record, bytes);
    memcpy(record, &hash, sizeof hash);
    return file_replace(path, record, bytes, err);
}

// Has a shared file system look for new names.
static void refresh(const struct meet *m)
{
    DIR *dir = opendir(m->dir);
    if (dir) {
        (void)readdir(dir);
        closedir(dir);
    }
}

// What earlier jobs have left, but for temporary files of ranks that write just now.
static void remove_old(const struct meet *m)
{
    DIR *dir = opendir(m->dir);
    struct dirent *entry;
    struct stat st;
    while (dir && (entry = readdir(dir))) {
        size_t length = strlen(entry->d_name);
        bool temporary = length > 4 && strcmp(entry->d_name + length - 4, ".tmp") == 0;
        if (entry->d_name[0] == '.' || fstatat(dirfd(dir), entry->d_name, &st, 0) != 0) {
            continue;
        }
        if (!temporary || time(NULL) - st.st_mtime > TEMP_AGE_S) {
            unlinkat(dirfd(dir), entry->d_name, 0);
        }
    }
    if (dir) {
        closedir(dir);
    }
}

// ---- identity -----------------------------------------------------------------------------------

static void make_identity(struct meet *m)
{
    static const char *const names[] = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
                                        "MASTER_ADDR",         "MASTER_PORT",
                                        "SLURM_JOB_ID",        "SLURM_STEP_ID",
                                        "SLURM_RESTART_COUNT"};
    size_t n = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && n < sizeof m->identity) {
            n += (size_t)snprintf(m->identity + n, sizeof m->identity - n, "%s=%s ", names[i],
                                  value);
        }
    }
    if (n < sizeof m->identity) {
        snprintf(m->identity + n, sizeof m->identity - n, "ranks=%d", m->comm.ranks);
    }
    m->job = XXH3_64bits(m->identity, sizeof m->identity);
}

static int draw(uint64_t *number, struct error *err)
{
    *number = 0;
    while (*number == 0) {
        if (getrandom(number, sizeof *number, 0) != (ssize_t)sizeof *number) {
            return error_set(err, STATUS_FAIL, "no random numbers for the meeting of the ranks");
        }
    }
    return STATUS_OK;
}

static bool same_job(const struct meet *m, const char *identity, int32_t ranks)
{
    return memcmp(identity, m->identity, sizeof m->identity) == 0 && ranks == m->comm.ranks;
}

// ---- the meeting --------------------------------------------------------------------------------

struct meeting {
    struct meet *m;
    struct hello own;
    struct job *job;
    size_t job_bytes;
    bool *joined; // by rank, of rank 0
    double until, poll_s;
};

static bool rest(struct meeting *g)
{
    clock_sleep_until(clock_s() + g->poll_s);
    g->poll_s = g->poll_s * 1.2 < POLL_S_MAX ? g->poll_s * 1.2 : POLL_S_MAX;
    refresh(g->m);
    return clock_s() < g->until;
}

static int nobody(const struct meeting *g, const char *who, struct error *err)
{
    return error_set(err, STATUS_FAIL,
                     "rank %d of %d: %s has not come to %s within %g s: do all ranks run, with the "
                     "same --out on a file system that all see, and the same variables of the "
                     "launcher (here %s)?",
                     g->m->comm.rank, g->m->comm.ranks, who, g->m->dir, g->m->config.start_s,
                     g->m->identity);
}

static int say_hello(struct meeting *g, uint64_t token, struct error *err)
{
    char path[PATH_MAX];
    name(g->m, path, "hello", g->m->job, g->m->comm.rank);
    g->own.token = token;
    return write_record(path, &g->own, sizeof g->own, err);
}

// Does this rank's hello still lie there? Rank 0 removes what it takes for old.
static int keep_hello(struct meeting *g, struct error *err)
{
    char path[PATH_MAX];
    struct hello there;
    name(g->m, path, "hello", g->m->job, g->m->comm.rank);
    if (!read_record(path, &there, sizeof there)) {
        return say_hello(g, 0, err);
    }
    if (there.nonce != g->own.nonce) {
        return error_set(err, STATUS_FAIL,
                         "two processes say in %s that they are rank %d of %d (%s): another --out, "
                         "or another RANK",
                         g->m->dir, g->m->comm.rank, g->m->comm.ranks, g->m->identity);
    }
    return STATUS_OK;
}

static int join(struct meeting *g, struct error *err)
{
    struct meet *m = g->m;
    char path[PATH_MAX];
    name(m, path, "job", m->job, -1);
    if (say_hello(g, 0, err)) {
        return err->status;
    }
    while (!read_record(path, g->job, g->job_bytes) ||
           !same_job(m, g->job->identity, g->job->ranks) ||
           g->job->hello[m->comm.rank].nonce != g->own.nonce) {
        if (!rest(g)) {
            return nobody(g, "rank 0", err);
        }
        if (keep_hello(g, err)) {
            return err->status;
        }
    }
    m->token = g->job->token;
    return say_hello(g, m->token, err);
}

// Takes the hellos that are new. Returns how many ranks have not joined yet; *missing: of these the
// first, *news: is there one that the job file does not have?
static int take_hellos(struct meeting *g, int *missing, bool *news)
{
    int n = 0;
    *missing = 0;
    for (int i = 1; i < g->m->comm.ranks; i++) {
        char path[PATH_MAX];
        struct hello h;
        name(g->m, path, "hello", g->m->job, i);
        if (!g->joined[i] && read_record(path, &h, sizeof h) && h.rank == i &&
            same_job(g->m, h.identity, h.ranks)) {
            *news |= h.nonce != g->job->hello[i].nonce;
            g->joined[i] = h.token == g->m->token;
            g->job->hello[i] = h;
        }
        n += !g->joined[i];
        *missing = *missing == 0 && !g->joined[i] ? i : *missing;
    }
    return n;
}

static bool all_known(const struct meeting *g)
{
    bool all = true;
    for (int i = 1; i < g->m->comm.ranks; i++) {
        all = all && g->job->hello[i].nonce != 0;
    }
    return all;
}

static int gather_all(struct meeting *g, const void *data, size_t data_bytes, struct error *err)
{
    struct meet *m = g->m;
    char path[PATH_MAX], who[48];
    int missing;
    name(m, path, "job", m->job, -1);
    remove_old(m);
    memcpy(g->job->identity, m->identity, sizeof m->identity);
    g->job->ranks = m->comm.ranks;
    g->job->token = m->token;
    memcpy(g->job->data, data, data_bytes);
    g->job->hello[0] = g->own;
    for (bool news = false; take_hellos(g, &missing, &news) > 0;) {
        if (news && all_known(g)) {
            news = false;
            if (write_record(path, g->job, g->job_bytes, err)) {
                return err->status;
            }
        }
        if (!rest(g)) {
            snprintf(who, sizeof who, "rank %d", missing);
            return nobody(g, who, err);
        }
    }
    unlink(path);
    for (int i = 1; i < m->comm.ranks; i++) {
        name(m, path, "hello", m->job, i);
        unlink(path);
    }
    return STATUS_OK;
}

// ---- beats --------------------------------------------------------------------------------------

struct beat_record {
    uint64_t hash, count;
    int32_t from;
    struct beat_message message;
};

struct wire {
    const struct meet *m;
    double every_s, looked_s; // the neighbour's file is looked at so often, and was last
    struct beat_record out, in;
    bool told;
};

static bool send_beat(void *ctx, const struct beat_message *message)
{
    struct wire *w = ctx;
    char path[PATH_MAX];
    name(w->m, path, "beat", w->m->token, w->m->comm.rank);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        return false; // tried again; if it lasts, the others say so
    }
    w->out.count++;
    w->out.from = w->m->comm.rank;
    w->out.message = *message;
    w->out.hash = hash_of(&w->out, sizeof w->out);
    bool written = pwrite(fd, &w->out, sizeof w->out, 0) == (ssize_t)sizeof w->out;
    return close(fd) == 0 && written;
}

// The first one to say why is heard.
static void tell_all(void *ctx, const struct beat_message *message, int except)
{
    struct wire *w = ctx;
    char path[PATH_MAX];
    struct beat_record record;
    struct error ignored;
    (void)except;
    name(w->m, path, "end", w->m->token, -1);
    w->told = true; // it is not news to this rank
    if (!read_record(path, &record, sizeof record)) {
        memset(&record, 0, sizeof record);
        record.from = w->m->comm.rank;
        record.message = *message;
        (void)write_record(path, &record, sizeof record, &ignored);
    }
}

static bool hear(void *ctx, struct beat_message *message, int *from)
{
    struct wire *w = ctx;
    char path[PATH_MAX];
    struct beat_record record;
    double now = clock_s();
    refresh(w->m);
    name(w->m, path, "end", w->m->token, -1);
    if (!w->told && read_record(path, &record, sizeof record)) {
        *message = record.message;
        *from = record.from;
        w->told = true;
        return true;
    }
    if (now - w->looked_s < w->every_s) {
        return false;
    }
    w->looked_s = now;
    *from = (w->m->comm.rank + 1) % w->m->comm.ranks;
    name(w->m, path, "beat", w->m->token, *from);
    if (read_record(path, &record, sizeof record) && record.count != w->in.count) {
        w->in = record;
        *message = record.message;
        return true;
    }
    return false;
}

static void close_wire(void *ctx, bool failed)
{
    struct wire *w = ctx;
    char path[PATH_MAX];
    if (!failed) {
        name(w->m, path, "beat", w->m->token, w->m->comm.rank);
        unlink(path);
    }
    free(w);
}

static int open_beat(struct meet *m, const struct job *job, struct error *err)
{
    struct wire *w = calloc(1, sizeof *w);
    struct beat_place *places = calloc((size_t)m->comm.ranks, sizeof *places);
    if (!w || !places) {
        free(w);
        free(places);
        return error_set(err, STATUS_FAIL, "no memory to watch %d ranks", m->comm.ranks);
    }
    w->m = m;
    w->every_s = (m->config.silence_s < 10 ? m->config.silence_s / 10 : 1) / 2;
    for (int i = 0; i < m->comm.ranks; i++) {
        places[i] = job->hello[i].place;
    }
    struct beat_wire wire = {w, send_beat, tell_all, hear, close_wire};
    int status = beat_open(&m->beat, &wire, m->comm.rank, m->comm.ranks, places, &m->config, err);
    free(places);
    return status;
}

// ---- the transport ------------------------------------------------------------------------------

static void give_up(struct comm *c, const char *why)
{
    beat_abort(((struct meet *)c)->beat, why);
}

static void doing(struct comm *c, enum comm_thread thread, const char *text)
{
    beat_doing(((struct meet *)c)->beat, thread, text);
}

static void waits(struct comm *c, bool waits)
{
    beat_waits(((struct meet *)c)->beat, waits);
}

static void begin(struct comm *c, enum comm_thread thread)
{
    beat_begin(((struct meet *)c)->beat, thread);
}

static bool has_failed(struct comm *c, struct error *err)
{
    return beat_failed(((struct meet *)c)->beat, err);
}

static int leave(struct comm *c, struct error *err)
{
    struct meet *m = (struct meet *)c;
    m->left = true;
    beat_leave(m->beat);
    return beat_failed(m->beat, err) ? err->status : STATUS_OK;
}

// Called after all have left, if all is well.
static int close_meet(struct comm *c, struct error *err)
{
    struct meet *m = (struct meet *)c;
    int status = beat_failed(m->beat, err) ? err->status : STATUS_OK;
    beat_close(m->beat);
    rmdir(m->dir); // by whoever is the last
    free(m);
    return status;
}

static const struct transport meet_transport = {
    .close = close_meet,
    .give_up = give_up,
    .doing = doing,
    .waits = waits,
    .begin = begin,
    .failed = has_failed,
    .leave = leave,
};

// What a rank has written is of no use to anybody when it fails here.
static int withdraw(const struct meet *m, int status)
{
    char path[PATH_MAX];
    struct hello there;
    name(m, path, "hello", m->job, m->comm.rank);
    if (m->comm.rank > 0 && read_record(path, &there, sizeof there) && there.nonce == m->nonce) {
        unlink(path);
    }
    return status;
}

static int meet(struct meeting *g, void *data, size_t data_bytes, struct error *err)
{
    struct meet *m = g->m;
    make_identity(m);
    if (dir_make(m->dir, err) || draw(&m->nonce, err) || draw(&m->token, err)) {
        return err->status;
    }
    memcpy(g->own.identity, m->identity, sizeof m->identity);
    g->own.rank = m->comm.rank;
    g->own.ranks = m->comm.ranks;
    g->own.nonce = m->nonce;
    beat_place(&g->own.place);
    if (m->comm.rank == 0 ? gather_all(g, data, data_bytes, err) : join(g, err)) {
        return withdraw(m, err->status);
    }
    memcpy(data, g->job->data, data_bytes);
    return open_beat(m, g->job, err);
}

static int check_config(const struct comm_config *config, const struct comm_launch *launch,
                        struct error *err)
{
    if (!config->dir) {
        return error_set(err, STATUS_USAGE,
                         "rank %d of %d: --out DIR is missing: without MPI the ranks meet there, "
                         "the same directory for all",
                         launch->rank, launch->ranks);
    }
    if (strlen(config->dir) + sizeof "/ranks" > sizeof((struct meet *)0)->dir) {
        return error_set(err, STATUS_FAIL, "directory '%.200s': its name is too long", config->dir);
    }
    return STATUS_OK;
}

int comm_meet_open(struct comm **out, const struct comm_config *config,
                   const struct comm_launch *launch, const void *mine, void *all, size_t bytes,
                   void *data, size_t data_bytes, struct error *err)
{
    if (check_config(config, launch, err)) {
        return err->status;
    }
    size_t ranks = (size_t)launch->ranks;
    struct meeting g = {.until = clock_s() + config->start_s, .poll_s = POLL_S};
    g.job_bytes = sizeof *g.job + ranks * sizeof g.job->hello[0];
    g.m = calloc(1, sizeof *g.m);
    g.job = calloc(1, g.job_bytes);
    g.joined = calloc(ranks, sizeof *g.joined);
    int status = STATUS_FAIL;
    if (g.m && g.job && g.joined) {
        g.m->comm = (struct comm){
            .transport = &meet_transport, .rank = launch->rank, .ranks = launch->ranks};
        g.m->config = *config;
        snprintf(g.m->dir, sizeof g.m->dir, "%s/ranks", config->dir);
        memcpy(g.own.words, mine, bytes);
        status = meet(&g, data, data_bytes, err);
    } else {
        error_set(err, STATUS_FAIL, "no memory for the meeting of %zu ranks", ranks);
    }
    for (size_t i = 0; i < ranks && status == STATUS_OK; i++) {
        memcpy((char *)all + i * bytes, g.job->hello[i].words, bytes);
    }
    if (status == STATUS_OK) {
        *out = &g.m->comm;
    } else {
        free(g.m);
    }
    free(g.job);
    free(g.joined);
    return status;
}
