// every_plan.h - the planner against all plans of a small model.
#ifndef TEST_EVERY_PLAN_H
#define TEST_EVERY_PLAN_H

#include "hete/plan.h"

// Fails the running case where auto's plan takes more than `most` times the best of all decisions
// per unit. With one rank 6^blocks of them are tried, with several 10^blocks, each with every
// choice for unit 0 and for early Adam. The counts (slots, buffers, slices) are the usual ones;
// with others auto may even be better.
void must_find_best(const struct plan_problem *problem, double most);

#endif
