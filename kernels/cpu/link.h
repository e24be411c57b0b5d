// link.h - the link between host and device as a fluid: how far a copy in each direction is at any
// moment. Arithmetic alone, on a clock that the caller supplies.
//
// A copy first waits for the latency, which neither occupies the link nor slows the other
// direction; then it moves its bytes. While both directions move bytes each goes at its duplex
// rate, else at its own; a rate changes at the very moment at which the other direction begins or
// ends to move. A rate of 0 moves any number of bytes at once.
//
//   in    |latency|=== in ===|== in_duplex ==|== in ==|
//   out              |latency|== out_duplex =|
#ifndef KERNELS_CPU_LINK_H
#define KERNELS_CPU_LINK_H

#include "kernels/device.h"

enum { LINK_IN, LINK_OUT, LINK_DIRECTIONS };

struct link {
    struct device_link speed;
    double now; // of the state below; seconds
    struct {
        bool active;  // waits for its latency or moves bytes
        double moves; // when the latency is over
        double left;  // bytes still to move
        double end;   // of the last copy that has ended
    } copy[LINK_DIRECTIONS];
};

// A copy begins; none may be active in that direction. now: never less than before.
void link_begin(struct link *link, int direction, size_t bytes, double now);

// When the direction's latest copy ends or has ended, unless another one begins before that.
double link_end(const struct link *link, int direction);

// Brings the state to a moment: copies that end until then are no longer active.
void link_advance(struct link *link, double now);

#endif
