// tiny.h - small GPTs in a session, and random numbers, for tests.
//
// A failure of anything here that is not itself under test fails the running case.
#ifndef TEST_TINY_H
#define TEST_TINY_H

#include "hete/session.h"
#include "kernels/gpt.h"

struct tiny_shape {
    size_t layers, heads, hidden, vocab, max_seq, head_rows;
    size_t B, T, micro_batches;
    enum dtype dtype;
    int threads;
    bool eval; // no gradients, no moments
    // For lanes and plans; may be left out.
    const struct plan *plan;
    uint64_t chaos;
    size_t memory; // of an emulated device; 0: the plain one
    size_t pinned; // bytes at most; 0: no limit
    struct device_link link;
    double watchdog_s; // 0: 60
    struct comm *comm; // NULL: no other ranks
};

// What tests of sessions are repeated for.
struct tiny_kind {
    const char *name;
    enum dtype dtype;
    size_t micro_batches;
};
enum { TINY_KINDS = 4 };
extern const struct tiny_kind tiny_kinds[TINY_KINDS];

struct tiny {
    struct gpt gpt;
    struct device *dev, *host; // host: NULL without a plan
    struct comm *comm;
    struct session *s;
    size_t elems;        // of all units, one behind the other, gaps included
    size_t tokens;       // of a step
    size_t micro_tokens; // of a micro-batch
};

// The ranks of a test program that is run by mpirun; or one. A rank that is gone ends the program.
struct comm *tiny_ranks(void);
// To be returned from main: failed, as cmocka counts it, or whether another rank has.
int tiny_ranks_end(struct comm *comm, int failed);

// The kind of device that is under test: TEST_DEVICE, or cpu.
const char *test_device(void);

struct gpt_config tiny_config(const struct tiny_shape *shape);
void tiny_open(struct tiny *t, const struct tiny_shape *shape);
void tiny_close(struct tiny *t);
// Bytes of device memory that the shape needs under its plan: the smallest `memory`.
size_t tiny_device_bytes(const struct tiny_shape *shape);

// A plan of random decisions, all of them possible ones.
void tiny_random_plan(struct plan *plan, uint64_t *rng, const struct model *model,
                      const struct tiny_shape *shape, bool hold_updates);

// The state of all units as one array; the caller frees it.
float *tiny_read(const struct tiny *t, enum state state);
void tiny_write(const struct tiny *t, enum state state, const float *x);

// Every byte of the model's state.
struct tiny_state {
    float *state[3];
    size_t bytes;
};

struct tiny_state tiny_take(const struct tiny *t);
void tiny_drop(struct tiny_state *s);
bool tiny_same(const struct tiny_state *a, const struct tiny_state *b);

double tiny_largest(const float *x, size_t n); // magnitude

// Fail the running case: where a tensor of `a` differs from that of `b` by more than `tolerance` of
// the largest value in it, or of a hundredth of the largest of all; where a differs from b.
void tiny_expect_close(const struct tiny *t, const char *what, const float *a, const float *b,
                       double tolerance);
void tiny_expect_near(double a, double b, double relative);

// Calls f for every tensor of every unit; first: its first element in the arrays above.
typedef void (*tiny_tensor_fn)(void *ctx, size_t unit, const struct tensor *tensor, size_t first);
void tiny_each(const struct tiny *t, tiny_tensor_fn f, void *ctx);
// Where a unit starts in the arrays above, and one of its tensors by name.
size_t tiny_unit_at(const struct tiny *t, size_t unit);
const struct tensor *tiny_tensor(const struct tiny *t, size_t unit, const char *name);

// The initial values that training starts from.
void tiny_init(const struct tiny *t, uint64_t seed);
// Values so large that every part of the model matters: weights of deviation 1/sqrt(C), norms and
// biases away from 1 and 0. Padding and gaps stay 0. The same values whatever the dtype.
void tiny_scramble(const struct tiny *t, uint64_t seed);

// Gradients of the mean loss, all units, without a trace in the session (a step with lr = beta1 =
// 0, whose first moment is the gradient). norm may be NULL. The caller frees it.
float *tiny_gradient(const struct tiny *t, const int32_t *tokens, const int32_t *targets,
                     double *norm);

// Mean of session_losses over the tokens of one micro-batch.
double tiny_loss(const struct tiny *t, const int32_t *tokens, const int32_t *targets);

// n random tokens below vocab, and as many targets, of which one in nine is -1. Two arrays in one;
// the caller frees it: targets start at n.
int32_t *tiny_batch(uint64_t *rng, size_t n, size_t vocab);

// splitmix64 (Steele et al. 2014): 64 random bits, a number in [0, 1), one of 0 .. n-1, and an
// approximately normal number (a sum of twelve uniform ones).
uint64_t rng_bits(uint64_t *rng);
double rng_unit(uint64_t *rng);
size_t rng_below(uint64_t *rng, size_t n);
double rng_normal(uint64_t *rng);

// The seed of this run: TEST_SEED or a fixed one; says so on stderr.
uint64_t test_seed(void);

void *test_alloc(size_t n, size_t size);

#endif
