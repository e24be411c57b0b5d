// clock.h - the clock that lanes and emulated links go by.
#ifndef KERNELS_CLOCK_H
#define KERNELS_CLOCK_H

#include <errno.h>
#include <time.h>

// Seconds since some moment; never set back.
static inline double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// The thread's timer slack says how much longer this may last (prctl; 50 us where nobody has set
// it).
static inline void clock_sleep_until(double s)
{
    struct timespec t = {.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

#endif
