#include "kernels/cpu/link.h"

#include <math.h>

static bool moving(const struct link *link, int direction)
{
    return link->copy[direction].active && link->copy[direction].moves <= link->now;
}

// Bytes per second of a direction that moves; infinite without limit.
static double rate(const struct link *link, int direction)
{
    const struct device_link *s = &link->speed;
    bool duplex = moving(link, !direction);
    double alone = direction == LINK_IN ? s->in : s->out;
    double both = direction == LINK_IN ? s->in_duplex : s->out_duplex;
    double r = duplex ? both : alone;
    return r > 0 ? r : INFINITY;
}

// When this direction begins or ends to move, if the rates stay as they are.
static double next_event(const struct link *link, int direction)
{
    if (!link->copy[direction].active) {
        return INFINITY;
    }
    if (!moving(link, direction)) {
        return link->copy[direction].moves;
    }
    return link->now + link->copy[direction].left / rate(link, direction);
}

// Goes to the next event, or to `until` if that is earlier. False: nothing happens until then.
static bool step(struct link *link, double until)
{
    double event[LINK_DIRECTIONS], speed[LINK_DIRECTIONS];
    bool moves[LINK_DIRECTIONS];
    for (int d = 0; d < LINK_DIRECTIONS; d++) {
        event[d] = next_event(link, d);
        speed[d] = rate(link, d);
        moves[d] = moving(link, d);
    }
    double first = fmin(event[LINK_IN], event[LINK_OUT]), to = fmin(first, until);
    for (int d = 0; d < LINK_DIRECTIONS; d++) {
        if (!moves[d]) {
            continue;
        }
        if (event[d] <= to) {
            link->copy[d].active = false;
            link->copy[d].end = to;
        } else if (to > link->now) {
            link->copy[d].left = fmax(0, link->copy[d].left - speed[d] * (to - link->now));
        }
    }
    link->now = to;
    return first <= until && first < INFINITY;
}

void link_advance(struct link *link, double now)
{
    if (now < link->now) {
        return;
    }
    while (step(link, now)) {
    }
}

void link_begin(struct link *link, int direction, size_t bytes, double now)
{
    link_advance(link, now);
    link->copy[direction].active = true;
    link->copy[direction].moves = link->now + link->speed.latency_s;
    link->copy[direction].left = (double)bytes;
}

double link_end(const struct link *link, int direction)
{
    struct link future = *link;
    while (future.copy[direction].active && step(&future, INFINITY)) {
    }
    return future.copy[direction].end;
}
