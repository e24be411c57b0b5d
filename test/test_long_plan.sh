#!/usr/bin/env bash
# The planner against all plans there are: of up to six blocks on 50 random machines, and of up to
# four with several ranks.
cd "$(dirname "$0")/.." || exit 1
TEST_LONG=1 "${BUILD:-build}/test/test_plan" &&
    TEST_LONG=1 exec "${BUILD:-build}/test/test_plan_ranks"
