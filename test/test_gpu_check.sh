#!/usr/bin/env bash
# scripts/gpu_check.sh on the CPU runtime: every part in small, one table, JSON, and a failure that
# loses no other part.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
if [ -z "${CUDA_SIM-}" ]; then
    echo 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang' >&2
    exit 77
fi

parts() {
    scripts/gpu_check.sh --sim --out "$scratch/out" build kernels losses resident
    grep -q . "$scratch/out/results.json"
    ! grep -i '"fail' "$scratch/out/results.json"
}

unknown_part() {
    local rc=0
    scripts/gpu_check.sh --sim --out "$scratch/out" nothing 2>"$scratch/err" || rc=$?
    [ $rc -eq 2 ]
    grep -q nothing "$scratch/err"
}

tap_case 'four parts pass' parts
tap_case 'a part that there is not is a usage error' unknown_part
tap_done
