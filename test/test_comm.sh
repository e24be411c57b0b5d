#!/usr/bin/env bash
# shellcheck disable=SC2031,SC2317 # cases run in subshells, called by tap_case
# Several ranks of test_comm under mpirun: what they exchange, what they agree on, and what becomes
# of the others when one of them dies, stops, fails or leaves.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
program=${BUILD:-build}/test/test_comm
seed=${COMM_SEED:-$((RANDOM * 3))} # whole messages, short ones, longer ones: by seed % 3

if ! command -v mpirun >/dev/null || ! mpirun --version | grep -q 'Open MPI'; then
    echo "no mpirun of Open MPI (scripts/install_deps.sh test)" >&2
    exit 77
fi
# A launcher that MPI knows nothing of; also shows which build this is.
if OMPI_COMM_WORLD_SIZE=2 "$program" barrier 2>&1 | grep -q 'without MPI'; then
    echo 'this build is one without MPI' >&2
    exit 77
fi

# What Open MPI itself leaves behind is not ours to find.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ranks() { # N ARGUMENT...
    timeout -k 5 60 mpirun --oversubscribe -np "$@" </dev/null
}

case_stray() {
    rc=0
    OMPI_COMM_WORLD_SIZE=2 "$program" barrier >"$scratch/output" 2>&1 || rc=$?
    cat "$scratch/output"
    [ "$rc" -eq 1 ]
    grep -q 'the launcher started 2 ranks, MPI knows of 1: mpirun is not of the MPI' \
        "$scratch/output"
}

case_half_a_launcher() {
    rc=0
    env -u RANK WORLD_SIZE=4 "$program" barrier >"$scratch/output" 2>&1 || rc=$?
    [ "$rc" -eq 1 ]
    rc=0
    RANK=4 WORLD_SIZE=4 "$program" barrier >>"$scratch/output" 2>&1 || rc=$?
    cat "$scratch/output"
    [ "$rc" -eq 1 ]
    grep -q 'WORLD_SIZE is 4, but RANK is not there: ' "$scratch/output"
    grep -q 'WORLD_SIZE is 4, but RANK is 4: a launcher sets both, RANK from 0 to 3' \
        "$scratch/output"
}

case_mode() { # N MODE SEED [SILENCE_S]
    echo "seed $3"
    ranks "$1" "$program" "${@:2}" >"$scratch/output" 2>&1 || {
        cat "$scratch/output"
        return 1
    }
    [ "$(cat "$scratch/output")" = "$1 ranks are done" ] # and nothing else is said
}

case_tcp() {
    ranks 3 --mca btl tcp,self "$program" data "$1"
}

# Waits until none of the processes in a file is there any more, but those named.
all_ended() { # OUTPUT [BUT]
    local pid tries
    sed -n 's/^process //p' "$1" | while read -r pid; do
        for ((tries = 0; tries < 300; tries++)); do
            [ "$pid" != "${2-}" ] && grep -q '^State:[[:space:]]*[^Z]' "/proc/$pid/status" \
                2>/dev/null || continue 2
            sleep 0.1
        done
        echo "process $pid is still there"
        return 1
    done
}

# case_fault N MODE WORDS: the last of N ranks meets its fate. mpirun fails, one of the others at
# least names that rank, what it and what they were at, and nobody is left.
case_fault() {
    local n=$1 last=$(($1 - 1)) rc=0 start=$SECONDS
    ranks "$n" "$program" "$2" "$seed" 2 >"$scratch/output" 2>&1 || rc=$?
    cat "$scratch/output"
    [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ]
    [ $((SECONDS - start)) -lt 30 ]
    grep -q "^rank [0-9]*: rank $last of $n (process [0-9]* on .*) $3.*was at .*'step 20', \
'exchange of unit 7'" "$scratch/output"
    [ "$(grep -c '^process' "$scratch/output")" -eq "$n" ]
    all_ended "$scratch/output"
}

# The same where mpirun ends nobody: each of the others notices by itself.
case_alone() { # N MODE WORDS
    local n=$1 last=$(($1 - 1)) i victim
    : >"$scratch/output"
    ranks "$n" --enable-recovery "$program" "$2" "$seed" 2 >>"$scratch/output" 2>&1 &
    for ((i = 0; i < 300; i++)); do
        [ "$(grep -c "^rank [0-9]*: rank $last of $n" "$scratch/output")" -lt "$last" ] || break
        sleep 0.1
    done
    cat "$scratch/output"
    victim=$(sed -n "s/^rank 0: rank $last of $n (process \([0-9]*\).*/\1/p" "$scratch/output")
    for ((i = 0; i < last; i++)); do
        grep -q "^rank $i: rank $last of $n (process $victim on .*) $3" "$scratch/output"
    done
    all_ended "$scratch/output" "$victim"
    kill -KILL "$victim" 2>/dev/null || true # it may be stopped
    wait
}

case_stall() { # N
    local rc=0
    ranks "$1" "$program" stall "$seed" 2 >"$scratch/output" 2>&1 || rc=$?
    cat "$scratch/output"
    [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ]
    grep -q "^rank [0-9]*: all $1 ranks have done nothing but wait for each other for .*'step 3'" \
        "$scratch/output"
}

case_late() {
    rc=0
    ranks 2 "$program" late 1 >"$scratch/output" 2>&1 || rc=$?
    cat "$scratch/output"
    [ "$rc" -ne 0 ] && [ "$rc" -ne 124 ]
    grep -q '^rank 0: MPI_Init has not come back for 1 s' "$scratch/output"
}

tap_case 'ranks that MPI does not know are refused' case_stray
tap_case 'a WORLD_SIZE without its RANK is refused' case_half_a_launcher
tap_case '1 rank: data' case_mode 1 data "$seed"
tap_case '1 rank: agreement' case_mode 1 agree "$seed"
for n in 2 3 4; do
    for i in 0 1 2; do
        tap_case "$n ranks: data, seed $((seed + i))" case_mode "$n" data $((seed + i))
    done
    tap_case "$n ranks: agreement" case_mode "$n" agree "$seed"
done
tap_case '3 ranks over TCP: data' case_tcp "$seed"
tap_case '4 ranks: barrier' case_mode 4 barrier "$seed"
tap_case '3 ranks: long work is no death' case_mode 3 slow "$seed" 1
tap_case '2 ranks: one that was stopped for a while goes on' case_mode 2 pause "$seed" 2
tap_case '2 ranks: one that never comes' case_late
tap_case '2 ranks: all wait for each other' case_stall 2
tap_case '4 ranks: all wait for each other' case_stall 4

silent='has not been heard of for 2'
ended='has ended without a word'
tap_case '3 ranks: one is killed' case_fault 3 kill "$ended"
tap_case '2 ranks: one is killed while the other works' case_fault 2 kill-asleep "$ended"
tap_case '3 ranks: one is killed, and calls that wait fail' case_fault 3 kill-quiet "$ended"
tap_case '3 ranks: one is stopped' case_fault 3 stop "$silent"
tap_case '2 ranks: one is stopped while the other works' case_fault 2 stop-asleep "$silent"
tap_case '4 ranks: one fails and says why' case_fault 4 abort 'has failed: the disk is full'
tap_case '3 ranks: one fails, and calls that wait fail' case_fault 3 abort-quiet \
    'has failed: the disk is full'
tap_case '2 ranks: one ends without closing' case_fault 2 exit "$ended"
tap_case '3 ranks: one leaves while the others go on' case_fault 3 leave \
    'leaves, although the others wait for it'
tap_case '4 ranks, each on its own: one is killed' case_alone 4 kill "$ended"
tap_case '4 ranks, each on its own: one is stopped' case_alone 4 stop "$silent"
tap_done
