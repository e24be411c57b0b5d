// random_problem.h - what the planner may be asked, at random.
#ifndef TEST_RANDOM_PROBLEM_H
#define TEST_RANDOM_PROBLEM_H

#include "hete/search.h"
#include "kernels/gpt.h"

// It points into itself: do not copy it.
struct random_problem {
    struct gpt gpt;
    struct costs costs;
    struct plan_problem problem;
};

// a to b, as often below their geometric mean as above.
double between(uint64_t *rng, double a, double b);

// One rank, a device budget between what the leanest plan and the one without offloading need.
void random_problem(struct random_problem *r, uint64_t *rng, size_t layers);
// Makes it one of 2 to 8 ranks, with another budget.
void random_ranks(struct random_problem *r, uint64_t *rng);

struct choice random_choice(uint64_t *rng, const struct search *s);

// Fails the running case if the policy has no plan, or one that is none for the problem.
void must_choose(struct plan *plan, struct prediction *p, const struct plan_problem *problem,
                 const char *policy);

#endif
