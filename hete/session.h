// session.h - a model on a device under a plan, ready to train, evaluate and generate.
//
// Opening a session lays out everything that it will ever hold in one device arena and two host
// arenas, takes them, writes down each kind of step as a graph (step.h), and proves the graphs and
// the layout free of races (check.h). From then on nothing is allocated.
//
// Where the plan keeps everything on a device that is no other than the host, steps run serially in
// program order on the caller's thread. Everywhere else, and if asked to, they run on lanes
// (execute.h), and the next step may be started before the one that runs is finished: only what
// depends on its results waits.
#ifndef HETE_SESSION_H
#define HETE_SESSION_H

#include "hete/execute.h"
#include "hete/plan.h"
#include "kernels/unit.h"

#include <stdio.h>

struct session;
struct comm;

struct session_config {
    size_t B, T;          // one micro-batch: B rows of T tokens
    size_t micro_batches; // in a step
    bool train;           // false: no gradients, no moments
    // All of the following may be left out.
    const struct plan *plan;  // NULL: plan_resident, updates held
    struct device *host;      // plain cpu device of the same dtype for the host lane; needed if the
                              // plan has an optimizer there
    size_t pinned;            // bytes of pinned memory at most; 0: no limit
    uint64_t chaos;           // seed of execute.h's chaos; 0: none
    double watchdog_s;        // of execute.h; 0: its default
    const struct costs *pace; // operations of a training step last at least as long as this says;
                              // copies go by the device's link
    struct comm *comm;        // the other ranks of the run; NULL: none. B, T and micro_batches are
                              // what this rank does of a step
    bool fast_reduce;         // gradients by comm_reduce: outside the contract
    bool lanes;               // also where nothing is to overlap: steps are timed
};

// STATUS_FAIL: no memory for the arenas, or more than the device has; a batch beyond any machine's;
// a step that is not free of races. What the plan may take is the planner's to see to (plan_check).
int session_open(struct session **out, struct device *dev, const struct model *model,
                 const struct session_config *config, struct error *err);
void session_close(struct session *s);

// Prints what the arenas hold, in bytes; the exact totals are what was taken.
void session_print_memory(const struct session *s, FILE *out);
size_t session_arena_bytes(const struct session *s);

// Once a lane has failed nothing runs any more and every call returns at once; this says why.
// Its status is STATUS_OK while all is well. A lane may still be at work then: a session that has
// failed is not closed, the process ends.
const struct error *session_error(const struct session *s);

// State of the model, moved as fp32 whatever the device holds: elements [first, first+n) of a unit.
// With several ranks all of them call these, in the same order and with the same arguments: a unit
// that is sharded is read from the ranks that have it. Writing keeps what this rank holds.
enum state {
    STATE_PARAMS, // the fp32 masters where there are any
    STATE_M,
    STATE_V,
};
void session_read(struct session *s, enum state state, size_t unit, size_t first, float *out,
                  size_t n);
void session_write(struct session *s, enum state state, size_t unit, size_t first, const float *in,
                   size_t n);
// After reading or writing: has all of it been moved? If not, why the device has not.
int session_moved(const struct session *s, struct error *err);

struct session_update {
    double lr, beta1, beta2, eps, weight_decay;
    double clip; // global norm above which gradients are scaled down; 0: never
    bool guard;  // a norm that is not finite: no update
    // Updates done by the steps that are finished; those in flight are counted by the session. The
    // bias corrections use one more.
    uint64_t step;
    // Asked with the step's loss and norm before any parameter changes, on any thread; false: no
    // update, if the plan holds updates. May be NULL.
    bool (*accept)(void *ctx, double loss, double norm);
    // Asked once a step on every rank, on any thread. May be NULL.
    bool (*stop)(void *ctx);
    void *ctx;
};

struct session_result {
    double loss; // mean over all tokens of the step
    double norm; // global gradient norm, before clipping
    bool updated;
    bool stop; // some rank's `stop` has said so
};

// Starts an optimizer step on micro_batches * B rows: tokens, targets (rows, T), host memory, free
// again on return. At most two may be in flight.
void session_start(struct session *s, const int32_t *tokens, const int32_t *targets,
                   const struct session_update *update);
// Waits for the oldest step in flight. If its loss or norm is not finite, the next step stands
// still until the next call, so that session_find_nonfinite can look; of several ranks that do not
// hold updates it is finished, too.
void session_finish(struct session *s, struct session_result *result);
size_t session_in_flight(const struct session *s);

// Both, one after the other. This and all calls below need that nothing is in flight.
void session_step(struct session *s, const int32_t *tokens, const int32_t *targets,
                  const struct session_update *update, struct session_result *result);

// Loss of every token of one micro-batch of B rows, without training: losses(B,T). A target of -1
// gives 0.
void session_losses(struct session *s, const int32_t *tokens, const int32_t *targets,
                    float *losses);

// Feeds the token at position pos (0, 1, ..) and gives the logits(Vp) of the next one. Positions
// up to session_decode_limit can be remembered, of those that the model has.
// Training in between forgets them.
void session_decode(struct session *s, int32_t token, size_t pos, float *logits);
size_t session_decode_limit(const struct session *s);
size_t session_logits(const struct session *s); // Vp

// The first tensor that holds a NaN or an infinity, in program order of the last step: parameters,
// outputs of units, gradients (a gradient that has been overwritten: by its unit). False if there
// is none.
bool session_find_nonfinite(struct session *s, char *out, size_t size);

// The training step as the lanes run it, and the times of its last steps (execute_timings): 0 where
// steps run serially.
const struct graph *session_graph(const struct session *s);
size_t session_timings(const struct session *s, struct timing *timings, size_t steps,
                       uint64_t *first);

// What the last steps took (at least three; fewer are not enough to say: false). Nothing is in
// flight.
struct measured {
    struct lane_times times;
    double bytes_in, bytes_out; // copied per step
    double host_adam_params;    // updated on the host per step,
    double host_adam_s;         // and how long that took, other work on the host aside
    uint64_t pageable_copies;   // since the session was opened
    uint64_t late, paced;       // operations that ended later than their pace; all that had one
    uint64_t guesses, right;    // steps with speculation since the session was opened, and those in
                                // which it held
    int host_threads;
    const char *isa;
};
bool session_measure(struct session *s, struct measured *out);

#endif
