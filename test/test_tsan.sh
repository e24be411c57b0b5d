#!/usr/bin/env bash
# shellcheck disable=SC2031,SC2317 # cases run in subshells, called by tap_case
# The lanes under clang's thread sanitizer: the executor by itself, and 30 random plans under chaos
# (CONTRACT_PLANS). A build of its own, of these two programs only.
#
# Their OpenMP teams have one thread, and what libomp does for them is not compiled for the
# sanitizer: it is told to ignore that. So it sees the lanes, which are this project's own threads,
# and nothing of the loops inside an operation (test_session compares those bit by bit).
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1

if ! command -v clang >/dev/null; then
    echo 'clang is not installed (scripts/install_deps.sh ci)' >&2
    exit 77
fi
build='build-clang-O1-thread'
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66
export CONTRACT_PLANS=${CONTRACT_PLANS:-30}

case_build() {
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u MAKEOVERRIDES -u TEST \
        make CC=clang OPT=-O1 SAN=thread BUILD="$build" "$build/test/test_execute" \
        "$build/test/test_contract"
}

# The sanitizer sees a race of two lanes here, or its silence would say nothing.
case_planted() {
    "$build/test/test_execute" edge
    rc=0
    "$build/test/test_execute" race >"$scratch/output" 2>&1 || rc=$?
    cat "$scratch/output"
    [ "$rc" -eq 66 ]
    grep -q 'ThreadSanitizer: data race' "$scratch/output"
}

case_silent() { # PROGRAM
    "$build/test/$1" >"$scratch/output" 2>&1 || {
        cat "$scratch/output"
        return 1
    }
    ! grep ThreadSanitizer "$scratch/output" || return 1
}

tap_case 'a build for the thread sanitizer' case_build
tap_case 'two lanes without an edge between them are reported, with one they are not' case_planted
tap_case 'the executor is free of data races' case_silent test_execute
tap_case "$CONTRACT_PLANS random plans under chaos are free of data races" case_silent test_contract
tap_done
