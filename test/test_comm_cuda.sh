#!/usr/bin/env bash
# shellcheck disable=SC2031,SC2317 # cases run in subshells, called by tap_case
# The ranks of test_comm with a GPU each, executed on the CPU: what they exchange, over MPI and
# without it, and what becomes of the others when one of them dies, stops, fails, leaves or never
# comes. The runtime exits with 86 where something is raced for, or out of bounds.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
if [ -z "${CUDA_SIM-}" ]; then
    echo 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang' >&2
    exit 77
fi
program=$CUDA_SIM/test/test_comm
seed=${COMM_SEED:-$RANDOM}
export TEST_DEVICE=cuda SIM_DEVICES=4 SIM_MEMORY=134217728
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# alone N MODE ARGUMENT...: their numbers in pids, what they print in $scratch/output
alone() {
    local r
    pids=()
    : >"$scratch/output"
    for ((r = 0; r < $1; r++)); do
        RANK=$r WORLD_SIZE=$1 TEST_DIR=$scratch "$program" "${@:2}" >>"$scratch/output" 2>&1 \
            </dev/null &
        pids+=($!)
    done
}

case_mode() { # N MODE SCHEDULE [SILENCE_S]
    local p
    echo "seed $seed"
    SIM_SCHEDULE=$3 SIM_SEED=$seed alone "$1" "$2" "$seed" "${@:4}"
    for p in "${pids[@]}"; do
        wait "$p" || { cat "$scratch/output" && return 1; }
    done
    [ "$(cat "$scratch/output")" = "$1 ranks are done" ] # and nothing else is said
    [ ! -e "$scratch/ranks" ]
}

case_mpi() { # N
    echo "seed $seed"
    timeout -k 5 60 mpirun --oversubscribe -np "$1" "$program" data "$seed" \
        >"$scratch/output" 2>&1 </dev/null || { cat "$scratch/output" && return 1; }
    [ "$(cat "$scratch/output")" = "$1 ranks are done" ]
}

# case_fault N MODE WORDS: the last of N ranks meets its fate. Each of the others ends and names it,
# and what it and they were at.
case_fault() {
    local n=$1 last=$(($1 - 1)) r start=$SECONDS
    alone "$n" "$2" "$seed" 2
    for ((r = 0; r < last; r++)); do
        wait "${pids[r]}" && return 1
    done
    kill -KILL "${pids[last]}" 2>/dev/null || true # it may only stand still
    cat "$scratch/output"
    [ $((SECONDS - start)) -lt 30 ]
    for ((r = 0; r < last; r++)); do
        grep -q "^rank $r: rank $last of $n (process ${pids[last]} on .*) $3.*was at .*'step 20'" \
            "$scratch/output"
    done
}

case_stall() { # N
    local p
    alone "$1" stall "$seed" 2
    for p in "${pids[@]}"; do
        wait "$p" && return 1
    done
    cat "$scratch/output"
    [ "$(grep -c "^rank [0-9]*: all $1 ranks have done nothing but wait for each other.*'step 3'" \
        "$scratch/output")" -eq "$1" ]
}

case_late() {
    local victim
    alone 2 late 1
    victim=${pids[1]}
    wait "${pids[0]}" && return 1
    kill -KILL "$victim"
    cat "$scratch/output"
    grep -q 'rank 0 of 2: rank 1 has not come to .* within 1 s' "$scratch/output"
}

for n in 2 4; do
    for schedule in lazy random time; do
        tap_case "$n ranks: data, $schedule" case_mode $n data $schedule
    done
done
tap_case '3 ranks: agreement' case_mode 3 agree random
tap_case '3 ranks: barrier' case_mode 3 barrier random
tap_case '2 ranks: long work is no death' case_mode 2 slow random 1
tap_case '2 ranks: one that was stopped for a while goes on' case_mode 2 pause random 2
tap_case '2 ranks: one that never comes' case_late
tap_case '3 ranks: all wait for each other' case_stall 3
ended='has ended without a word'
tap_case '3 ranks: one is killed' case_fault 3 kill "$ended"
tap_case '3 ranks: one is killed, and calls that wait fail' case_fault 3 kill-quiet "$ended"
tap_case '3 ranks: one is stopped' case_fault 3 stop 'has not been heard of for 2'
tap_case '3 ranks: one fails and says why' case_fault 3 abort 'has failed: the disk is full'
tap_case '2 ranks: one leaves while the other goes on' case_fault 2 leave \
    'leaves, although the others wait for it'
if OMPI_COMM_WORLD_SIZE=2 "$program" barrier 2>&1 | grep -q 'without MPI' ||
    ! command -v mpirun >/dev/null; then
    tap_skip '2 and 3 ranks over MPI: data' 'no mpirun, or no MPI in this build'
else
    tap_case '2 ranks over MPI: data' case_mpi 2
    tap_case '3 ranks over MPI: data' case_mpi 3
fi
tap_done
