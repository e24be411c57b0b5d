// machine.h - a machine as a file: what it has and how fast it is. scripts/machines/ holds some; a
// measured profile (profile.h) is such a file too, with the times of one model shape in it.
//
// The format is one `name value` per line with # comments; hete/FORMATS.md describes it. Unknown
// names, missing ones and absurd values are refused with the line.
#ifndef HETE_MACHINE_H
#define HETE_MACHINE_H

#include "hete/cost.h"

struct machine {
    char name[64];
    size_t device_bytes, host_bytes, pinned_bytes; // usable by a session
    double peak_flops;  // FLOP/s of the dtype's matrix products: what MFU is held against
    double efficiency;  // fraction of it that matrix products of training reach
    double device_rate; // bytes/s of device memory, for work that is no matrix product
    double launch_s;    // of an operation of the compute lane
    struct device_link link;
    double host_adam; // parameters/s of CPU Adam, while copies run
    double host_rate; // bytes/s of host memory, for other work on the host
    double gpu_link;  // bytes/s between the GPUs of a machine, each direction; 0: one GPU
};

int machine_read(struct machine *m, const char *path, struct error *err);

// Times of a model's operations on the machine: matrix FLOP at peak_flops * efficiency, other work
// by bytes, the larger one of both, and launch_s.
void machine_costs(struct costs *costs, const struct machine *m, const struct step_shape *shape);

#endif
