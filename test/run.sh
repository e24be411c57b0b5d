#!/usr/bin/env bash
# Runs the tests and counts their cases. `make test` calls it; by hand:
#
#     test/run.sh [--long] [FILTER]     only the tests whose name contains FILTER
#
# A test is a program $BUILD/test/test_* (built from test/test_*.c), a script test/test_*.sh, or a
# program $CUDA_SIM/test/cuda/test_* (from test/cuda/test_*.c, named cuda_* here). It
# speaks TAP on stdout (cmocka with CMOCKA_MESSAGE_OUTPUT=TAP, scripts through test/tap.sh) and
# exits with 0 (passed), 1 (failed) or 77 (nothing in it can run here; the last line on stderr says
# why). Tests named test_long_* run only with --long.
#
# What a test cannot get away with: a program that dies by a signal, runs past its time, prints no
# result, no plan, or fewer results than its plan, or exits with an error though every case passed,
# is a failure. A skip is shown with what the test printed about it.
#
# Ends with one line `N passed, N failed, N skipped`, which counts cases. Exit status 1 when a case
# failed or none passed.
#
# Environment, for the tests too: BUILD (folder of objects and test programs, default build),
# TRAIN_GPT_BIN (folder of ./train_gpt and ./tokenize), CUDA_SIM (folder of a build with CUDA=sim;
# empty: its tests are skipped), TRAIN_GPT_SHARED (real text for tests, default ../shared),
# TEST_SKIP (names of tests to leave out), TEST_SECONDS (limit for one program), TESTS (folder of
# the scripts and sources; test/test_run.sh plants its own there).
set -u
cd "$(dirname "$0")/.." || exit 1

long=
[ "${1-}" = --long ] && { long=1 && shift; }
filter=${1-}
tests=${TESTS:-test}
limit_s=${TEST_SECONDS:-$([ -n "$long" ] && echo 3600 || echo 300)}
export BUILD=${BUILD:-build}
export TRAIN_GPT_BIN=${TRAIN_GPT_BIN:-.}
export TRAIN_GPT_SHARED=${TRAIN_GPT_SHARED:-../shared}
export CMOCKA_MESSAGE_OUTPUT=TAP

scratch=$(mktemp -d)
pid=
trap 'rm -rf "$scratch"' EXIT
trap '[ -n "$pid" ] && kill -TERM -- "-$pid" 2>/dev/null; exit 130' INT TERM

# Prints "passed failed skipped planned plans" of the TAP in a file. Several groups in one program
# print several plans, which add up.
count_tap() {
    awk '/^1\.\.[0-9]+/       { plans++; planned += substr($1, 4) }
         /^(not )?ok .*# *SKIP/ { skipped++; next }
         /^ok( |$)/           { passed++ }
         /^not ok( |$)/       { failed++ }
         END { print passed + 0, failed + 0, skipped + 0, planned + 0, plans + 0 }' "$1"
}

# Prints what a test says of its skipped cases: cmocka's TAP knows no reasons, they are on stderr.
skip_lines() {
    if grep -q '^\(not \)*ok .*# *SKIP' "$1"; then
        grep -i skip "$2" || grep '# *SKIP' "$1"
    fi
}

passed_sum=0 failed_sum=0 skipped_sum=0
failures=() skips=()

# Runs one test, adds to the sums, prints its line and, when it failed, its output.
run_test() {
    local name=$1 path=$2 out=$scratch/out err=$scratch/err problem='' rc start seconds
    local passed failed skipped planned plans
    start=$EPOCHREALTIME
    # A job of its own (set -m): Ctrl-C reaches the trap at once, and the whole group can be ended.
    set -m
    timeout -k 5 "$limit_s" "$path" </dev/null >"$out" 2>"$err" &
    pid=$!
    set +m
    wait "$pid" 2>/dev/null
    rc=$?
    kill -KILL -- "-$pid" 2>/dev/null # what the test may have left running
    pid=
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    read -r passed failed skipped planned plans < <(count_tap "$out")
    local seen=$((passed + failed + skipped))

    if [ "$rc" -eq 77 ] && [ "$seen" -eq 0 ]; then
        skipped=1
        skips+=("$name: $(tail -n 1 "$err")")
    elif [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
        problem="ended after its limit of $limit_s s"
    elif [ "$rc" -gt 128 ]; then
        problem="died by signal $(kill -l $((rc - 128)) 2>/dev/null || echo $((rc - 128)))"
    elif [ "$seen" -eq 0 ]; then
        problem="printed no result (exit status $rc)"
    elif [ "$plans" -eq 0 ]; then
        problem='printed no plan (1..N): it ended early'
    elif [ "$seen" -ne "$planned" ]; then
        problem="planned $planned cases and reported $seen"
    elif [ "$rc" -ne 0 ] && [ "$failed" -eq 0 ]; then
        problem="exit status $rc though no case failed"
    elif [ "$rc" -eq 0 ] && [ "$failed" -ne 0 ]; then
        problem="exit status 0 though $failed cases failed"
    fi
    if [ "$seen" -lt "$planned" ]; then
        failed=$((failed + planned - seen))
    elif [ -n "$problem" ] && [ "$failed" -eq 0 ]; then
        failed=1
    fi

    passed_sum=$((passed_sum + passed))
    failed_sum=$((failed_sum + failed))
    skipped_sum=$((skipped_sum + skipped))
    local verdict=ok
    [ "$skipped" -gt 0 ] && verdict=skip
    [ "$failed" -gt 0 ] && verdict=FAIL
    printf '%-5s %-28s %4d passed' "$verdict" "$name" "$passed"
    [ "$failed" -gt 0 ] && printf ', %d failed' "$failed"
    [ "$skipped" -gt 0 ] && printf ', %d skipped' "$skipped"
    printf ', %s s\n' "$seconds"
    if [ "$failed" -gt 0 ]; then
        failures+=("$name${problem:+: $problem}")
        [ -n "$problem" ] && printf '      %s\n' "$problem"
        # The beginning names the first wrong thing; nobody reads more than a few screens of it.
        grep -v '^ok ' "$out" | head -n 200 | sed 's/^/    | /'
        head -n 200 "$err" | sed 's/^/    ! /'
    fi
    local line
    while IFS= read -r line; do
        skips+=("$name: $line")
    done < <(skip_lines "$out" "$err")
}

for source in "$tests"/test_*.c "$tests"/test_*.sh "$tests"/cuda/test_*.c; do
    [ -e "$source" ] || continue
    name=$(basename "${source%.*}")
    [[ $source == */cuda/* ]] && name=cuda_${name#test_}
    [[ $name == *"$filter"* && " ${TEST_SKIP-} " != *" $name "* ]] || continue
    [[ $name == test_long_* && -z $long ]] && continue
    case $source in
    */cuda/*.c)
        path=${CUDA_SIM-}/test/cuda/test_${name#cuda_}
        if [ -z "${CUDA_SIM-}" ]; then
            printf 'skip  %-28s\n' "$name"
            skips+=("$name: not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang")
            skipped_sum=$((skipped_sum + 1))
            continue
        fi
        ;;
    *.c) path=$BUILD/test/$name ;;
    *) path=$source ;;
    esac
    if [ -x "$path" ]; then
        run_test "$name" "$path"
    else
        printf 'FAIL  %-28s not built or not executable: %s\n' "$name" "$path"
        failures+=("$name: not built or not executable")
        failed_sum=$((failed_sum + 1))
    fi
done

if [ ${#skips[@]} -gt 0 ]; then
    printf '\nSKIPPED:\n'
    printf '  %s\n' "${skips[@]}"
fi
if [ ${#failures[@]} -gt 0 ]; then
    printf '\nFAILED:\n'
    printf '  %s\n' "${failures[@]}"
fi
[ $((passed_sum + failed_sum + skipped_sum)) -gt 0 ] || echo "no test matches '$filter'"
printf '\n%d passed, %d failed, %d skipped\n' "$passed_sum" "$failed_sum" "$skipped_sum"
[ "$failed_sum" -eq 0 ] && [ "$passed_sum" -gt 0 ]
