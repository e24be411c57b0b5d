#include "test/cuda/host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KEYS 512

static const char *const kinds[SIM_KINDS] = {
    [SIM_BOUNDS] = "out of bounds",
    [SIM_ALIGNMENT] = "misaligned",
    [SIM_SHARED_RACE] = "race in shared memory",
    [SIM_BLOCK_RACE] = "race between blocks",
    [SIM_STREAM_RACE] = "race between operations",
    [SIM_DEADLOCK] = "deadlock",
    [SIM_PAGEABLE] = "pageable copy",
    [SIM_MISUSE] = "misuse",
};

static struct {
    size_t count[SIM_KINDS];
    uint64_t keys[KEYS]; // of what has been printed
    size_t n_keys;
    bool quiet, failed, at_exit;
    char last[1024];
} reports;

// Runs after everything else that a program does at its end.
static void exit_failed(void)
{
    if (reports.failed) {
        fflush(NULL);
        _exit(86);
    }
}

static bool is_new(enum sim_kind kind, const char *key)
{
    uint64_t h = 1469598103934665603u ^ (uint64_t)kind;
    for (; *key; key++) {
        h = (h ^ (unsigned char)*key) * 1099511628211u;
    }
    for (size_t i = 0; i < reports.n_keys; i++) {
        if (reports.keys[i] == h) {
            return false;
        }
    }
    if (reports.n_keys < KEYS) {
        reports.keys[reports.n_keys++] = h;
    }
    return true;
}

static void report(enum sim_kind kind, const char *key, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));
static void report(enum sim_kind kind, const char *key, const char *format, va_list args)
{
    reports.count[kind]++;
    if (!reports.quiet) {
        reports.failed = true;
        if (!reports.at_exit) {
            reports.at_exit = true;
            atexit(exit_failed);
        }
    }
    if (is_new(kind, key)) {
        vsnprintf(reports.last, sizeof reports.last, format, args);
        if (!reports.quiet) {
            fprintf(stderr, "sim: %s: %s\n", kinds[kind], reports.last);
        }
    }
}

void sim_report(enum sim_kind kind, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    report(kind, sim_running(), format, args);
    va_end(args);
}

void sim_report_once(enum sim_kind kind, const char *key, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    report(kind, key, format, args);
    va_end(args);
}

size_t sim_reports(enum sim_kind kind)
{
    return reports.count[kind];
}

void sim_forget_reports(void)
{
    memset(reports.count, 0, sizeof reports.count);
    reports.n_keys = 0;
    reports.last[0] = '\0';
}

void sim_expect_reports(bool quiet)
{
    reports.quiet = quiet;
}

const char *sim_last_report(void)
{
    return reports.last;
}

// ---- settings ----

static void bad_setting(const char *name, const char *value, const char *allowed)
{
    fprintf(stderr, "sim: %s=%s: use %s\n", name, value, allowed);
    abort();
}

static int choice(const char *name, const char *const *names, int n, int otherwise)
{
    const char *value = getenv(name);
    if (!value || !*value) {
        return otherwise;
    }
    char allowed[128] = "";
    for (int i = 0; i < n; i++) {
        if (strcmp(value, names[i]) == 0) {
            return i;
        }
        size_t used = strlen(allowed);
        snprintf(allowed + used, sizeof allowed - used, "%s%s", i ? ", " : "", names[i]);
    }
    bad_setting(name, value, allowed);
    return otherwise;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *value = getenv(name);
    if (!value || !*value) {
        return otherwise;
    }
    char *end;
    uint64_t n = strtoull(value, &end, 0);
    if (*end) {
        bad_setting(name, value, "a whole number");
    }
    return n;
}

static void read_failure(struct sim_settings *s)
{
    static const char *const names[] = {"",    "no-driver", "old-driver", "no-device", "sm_75",
                                        "oom", "pin",       "lost",       "hang"};
    const char *value = getenv("SIM_FAIL");
    if (!value) {
        return;
    }
    size_t length = strcspn(value, ":");
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (strlen(names[i]) == length && strncmp(value, names[i], length) == 0) {
            bool counts = i == SIM_LOST || i == SIM_HANG;
            char *end = NULL;
            s->failure = (enum sim_failure)i;
            s->failure_launch =
                counts && value[length] ? strtoull(value + length + 1, &end, 10) : 0;
            if (counts ? s->failure_launch > 0 && !*end : !value[length]) {
                return;
            }
        }
    }
    bad_setting("SIM_FAIL", value,
                "no-driver, old-driver, no-device, sm_75, oom, pin, lost:N or hang:N");
}

struct sim_settings *sim_settings(void)
{
    static struct sim_settings s;
    static bool ready;
    if (!ready) {
        static const char *const orders[] = {"forward", "reverse", "shuffle"};
        static const char *const schedules[] = {"lazy", "random", "time"};
        ready = true;
        s.seed = number("SIM_SEED", 1);
        s.order = choice("SIM_ORDER", orders, 3, SIM_FORWARD);
        s.schedule = choice("SIM_SCHEDULE", schedules, 3, SIM_RANDOM);
        s.memory = number("SIM_MEMORY", (uint64_t)512 << 20);
        s.devices = (int)number("SIM_DEVICES", 1);
        s.speed = (struct sim_speed){.call_s = 1e-6,
                                     .kernel_s = 3e-6,
                                     .copy_s = 5e-6,
                                     .copy_in = 12e9,
                                     .copy_out = 12e9,
                                     .memory = 500e9};
        read_failure(&s);
    }
    return &s;
}
