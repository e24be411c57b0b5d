#!/usr/bin/env bash
# Tests the test runner: plants programs that fail in every way known, and reads what it says.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
here=$(cd "$(dirname "$0")" && pwd)

# plant NAME < script: a test in $scratch.
plant() {
    { echo '#!/usr/bin/env bash' && cat; } >"$scratch/test_$1.sh"
    chmod +x "$scratch/test_$1.sh"
}

# expect STATUS LAST_LINE [RUNNER_ARGUMENT...]: runs the runner over $scratch; its report is left in
# $scratch/report.
expect() {
    local status=$1 line=$2 rc=0
    shift 2
    TESTS=$scratch TEST_SECONDS=1 "$here/run.sh" "$@" >"$scratch/report" 2>&1 || rc=$?
    cat "$scratch/report"
    [ "$rc" -eq "$status" ]
    [ "$(tail -n 1 "$scratch/report")" = "$line" ]
    [ "$(grep -c '^[0-9]* passed, [0-9]* failed, [0-9]* skipped$' "$scratch/report")" -eq 1 ]
}

says() {
    grep -qF -- "$1" "$scratch/report"
}

case_pass() {
    plant a <<<'echo 1..2; echo ok 1 - x; echo ok 2 - y'
    plant b <<<'echo ok 1 - z; echo 1..1'
    expect 0 '3 passed, 0 failed, 0 skipped'
}

case_fail() {
    plant a <<<'echo 1..2; echo ok 1 - x; echo not ok 2 - y; echo "# because"; echo why >&2; exit 1'
    expect 1 '1 passed, 1 failed, 0 skipped'
    says '| # because'
    says '! why'
}

case_fail_hidden_by_status() {
    plant a <<<'echo 1..2; echo ok 1 - x; echo not ok 2 - y; exit 0'
    expect 1 '1 passed, 1 failed, 0 skipped'
}

case_status_without_failure() {
    plant a <<<'echo 1..1; echo ok 1 - x; exit 3'
    expect 1 '1 passed, 1 failed, 0 skipped'
    says 'exit status 3 though no case failed'
}

case_signal() {
    plant a <<<'echo 1..3; echo ok 1 - x; kill -SEGV $$'
    expect 1 '1 passed, 2 failed, 0 skipped'
    says 'died by signal SEGV'
}

case_signal_after_all_passed() {
    plant a <<<'echo 1..1; echo ok 1 - x; kill -ABRT $$'
    expect 1 '1 passed, 1 failed, 0 skipped'
}

case_hang() {
    plant a <<<'echo 1..1; sleep 99'
    plant b <<<'echo 1..1; echo ok 1 - x'
    expect 1 '1 passed, 1 failed, 0 skipped'
    says 'ended after its limit of 1 s'
}

# A test that leaves a program running behind it.
case_survivor_is_ended() {
    plant a <<<"sleep 99 & echo \$! >$scratch/pid; echo 1..1; echo ok 1 - x"
    expect 0 '1 passed, 0 failed, 0 skipped'
    sleep 0.1
    local stat
    stat=$(cat "/proc/$(cat "$scratch/pid")/stat" || echo gone)
    [[ $stat == gone || $stat == *' Z '* ]]
}

case_silent() {
    plant a <<<'exit 0'
    expect 1 '0 passed, 1 failed, 0 skipped'
    says 'printed no result'
}

case_short() {
    plant a <<<'echo 1..4; echo ok 1 - x'
    expect 1 '1 passed, 3 failed, 0 skipped'
}

case_no_plan() {
    plant a <<<'echo ok 1 - x'
    expect 1 '1 passed, 1 failed, 0 skipped'
}

case_too_many() {
    plant a <<<'echo 1..1; echo ok 1 - x; echo ok 2 - y'
    expect 1 '2 passed, 1 failed, 0 skipped'
}

case_skip_case() {
    plant a <<<'echo 1..2; echo ok 1 - x; echo "not ok 2 # SKIP y"; echo "skipped: no text" >&2'
    expect 0 '1 passed, 0 failed, 1 skipped'
    says 'test_a: skipped: no text'
}

case_skip_program() {
    plant a <<<'echo no graphics card >&2; exit 77'
    plant b <<<'echo 1..1; echo ok 1 - x'
    expect 0 '1 passed, 0 failed, 1 skipped'
    says 'test_a: no graphics card'
}

# cmocka's exit status is its number of failures, which may be 77.
case_77_failures() {
    plant a <<<'echo 1..77; for i in $(seq 77); do echo not ok $i - x; done; exit 77'
    expect 1 '0 passed, 77 failed, 0 skipped'
}

case_nothing_passed() {
    plant a <<<'exit 77'
    expect 1 '0 passed, 0 failed, 1 skipped'
    expect 1 '0 passed, 0 failed, 0 skipped' no_such_test
}

case_not_built() {
    plant b <<<'echo 1..1; echo ok 1 - x'
    touch "$scratch/test_never_built.c"
    expect 1 '1 passed, 1 failed, 0 skipped'
}

case_filter_and_long() {
    plant a <<<'echo 1..1; echo ok 1 - x'
    plant b <<<'echo 1..1; echo ok 1 - x'
    plant long_c <<<'echo 1..1; echo ok 1 - x'
    expect 0 '1 passed, 0 failed, 0 skipped' _b
    expect 0 '2 passed, 0 failed, 0 skipped'
    expect 0 '3 passed, 0 failed, 0 skipped' --long
}

# What the shell tests themselves stand on.
case_tap_helper() {
    plant a <<EOF
. "$here/tap.sh"
broken() { false; echo unreachable; }
tap_case good true
tap_case bad broken
tap_skip later 'not today'
tap_done
EOF
    plant b <<EOF
. "$here/tap.sh"
tap_case good true
EOF
    expect 1 '2 passed, 2 failed, 1 skipped'
    says 'test_a: skipped: later: not today'
}

for c in $(declare -F | sed -n 's/^declare -f \(case_\)/\1/p'); do
    tap_case "${c#case_}" "$c"
done
tap_done
