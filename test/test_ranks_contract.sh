#!/usr/bin/env bash
# The contract with several ranks: whatever is sharded, streamed or on the host, and however the
# lanes dawdle, at one number of ranks the bits are those of a plan that shards nothing. 17 ranks:
# units are smaller than that, so that some pieces are empty. And operations touch what they
# declare.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
program=${BUILD:-build}/test/test_contract
if ! command -v mpirun >/dev/null || ! mpirun --version | grep -q 'Open MPI'; then
    echo "no mpirun of Open MPI (scripts/install_deps.sh test)" >&2
    exit 77
fi
if OMPI_COMM_WORLD_SIZE=2 "$program" 2>&1 | grep -q 'without MPI'; then
    echo 'this build is one without MPI' >&2
    exit 77
fi
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0 # of Open MPI
unset CMOCKA_MESSAGE_OUTPUT # what is looked for below is not TAP
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

plans() { # RANKS PLANS SEED [PROGRAM]
    local test=${4:-$program}
    TEST_SEED=$3 CONTRACT_PLANS=$2 timeout -k 5 300 mpirun --oversubscribe -np "$1" "$test" \
        </dev/null >"$scratch/log" 2>&1 || {
        grep -e '^case' -e ERROR -e rank "$scratch/log" | tail -n 20
        return 1
    }
    [ "$(grep -c PASSED "$scratch/log")" -eq $((2 * $1)) ] # two groups
}

# Over NCCL, executed on the CPU; what is raced for ends with status 86.
cuda_plans() { # RANKS PLANS SEED
    export TEST_DEVICE=cuda SIM_SCHEDULE=random SIM_SEED=$3 SIM_DEVICES=$1
    plans "$@" "$CUDA_SIM/test/test_contract"
}

declared() { # RANKS SEED
    local test=${BUILD:-build}/test/test_graph
    TEST_SEED=$2 timeout -k 5 300 mpirun --oversubscribe -np "$1" "$test" \
        </dev/null >"$scratch/log" 2>&1 || {
        grep -e ERROR -e rank "$scratch/log" | tail -n 20
        return 1
    }
    [ "$(grep -c PASSED "$scratch/log")" -eq "$1" ]
}

seed=${TEST_SEED:-$((RANDOM * 1000))}
for case in '2 60' '3 60' '4 25' '17 5'; do
    read -r n count <<<"$case"
    tap_case "$n ranks, $count random plans from TEST_SEED=$seed on" plans "$n" "$count" "$seed"
done
for n in 2 3; do
    tap_case "$n ranks touch what they declare, TEST_SEED=$seed" declared "$n" "$seed"
done
for case in '2 6' '4 3'; do
    read -r n count <<<"$case"
    name="cuda: $n ranks, $count random plans from TEST_SEED=$seed on"
    if [ -n "${CUDA_SIM-}" ]; then
        tap_case "$name" cuda_plans "$n" "$count" "$seed"
    else
        tap_skip "$name" 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang'
    fi
done
tap_done
