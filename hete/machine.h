// machine.h - a machine as a file: what it has and how fast it is. scripts/machines/ holds some. A
// measured profile (profile.h) is such a file too, of other names: the times of one model shape.
//
// The format is one `name value` per line with # comments; hete/FORMATS.md describes it. Unknown
// names, missing ones, ones that are there twice and absurd values are refused with the line.
#ifndef HETE_MACHINE_H
#define HETE_MACHINE_H

#include "hete/cost.h"

// Host memory, CPU Adam and the network are the machine's: its GPUs share them. All else is of one
// GPU, its copy link too.
struct machine {
    char name[64];
    size_t device_bytes, host_bytes, pinned_bytes; // usable by sessions; pinned is part of host
    double peak_flops[2]; // FLOP/s of matrix products, by enum dtype: what MFU is held against
    double efficiency;    // fraction of it that matrix products of training reach
    double device_rate;   // bytes/s of device memory, for work that is no matrix product
    double launch_s;      // of an operation of the compute lane
    struct device_link link;
    double host_adam; // parameters/s of CPU Adam, while copies run
    double host_rate; // bytes/s of host memory, for other work on the host
    double gpu_link;  // bytes/s between the GPUs of a machine, each direction; 0: none
    double network;   // bytes/s of the machine to and from others, each direction; 0: none
    // What each further message between two GPUs adds, some of them being under way at once.
    double gpu_link_latency_s, network_latency_s;
    size_t gpus; // of each machine that train, at most the ranks. Not of the file: 1
};

int machine_read(struct machine *m, const char *path, struct error *err);

// The value of --emulate, FILE or FILE:N (N: 1 to 1024; 1 without): the machine in the file as a
// miniature sees it whose hidden and head size, sequence and vocabulary are 1/N of the real ones.
// Bytes and parameters of such a model are 1/N^2 and its matrix and attention FLOP 1/N^3, so
// memory, latencies and launches are divided by N^2 and the peak by N: every time and every size
// stands to the others as it does in the original, 1/N^2 of it.
int machine_read_emulated(struct machine *m, const char *spec, size_t *n, struct error *err);

// Times of a model's operations on the machine: matrix FLOP at peak_flops * efficiency, other work
// by bytes, the larger one of both, and launch_s. 0: a call whose work the model does not tell.
//
// shape->ranks GPUs, g of them (at least 1, at most the ranks) on each machine. The host's work
// gets 1/g of its rate. An exchange of S bytes among N ranks is N - 1 messages of S/N bytes in and
// out of each: g - 1 of them go to GPUs of the same machine, N - g over the network, which the g
// GPUs share, both at the same time. A gather is NCCL's ring: each rank passes N - 1 pieces on to
// the next one, and of a machine's g only one is followed by a GPU of another machine:
//
//     exchange  max((g - 1) (gpu_link_latency + S/N / gpu_link),
//                   (N - g) (network_latency + S/N / (network / g)))
//     gather    max((N - 1) (gpu_link_latency + S/N / gpu_link),
//                   (N - 1) (network_latency + S/N / network))       the latter: several machines
//
// (bytes: Thakur, Rabenseifner, Gropp 2005, pairwise exchange and ring.) The sum of a scatter then
// reads N pieces and writes one. Trees have fewer latencies; small messages are where this is too
// slow.
void machine_costs(struct costs *costs, const struct machine *m, const struct step_shape *shape);

// Does the exchange of a block's gradient wait for the network rather than for the link between the
// GPUs of a machine?
bool machine_waits_for_network(const struct machine *m, const struct step_shape *shape);

// Costs as a file. What is read is to the bit what was written. comment: one line, or NULL.
int costs_write(const struct costs *costs, const char *path, const char *comment,
                struct error *err);
int costs_read(struct costs *costs, const char *path, struct error *err);

#endif
