#!/usr/bin/env bash
# Several ranks with a GPU each, executed on the CPU: by mpirun, and by RANK and WORLD_SIZE alone.
# Their losses against the cpu device's, their bits, how they meet, and what becomes of the others
# when one ends. The runtime exits with 86 where something is raced for, or out of bounds.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
if [ -z "${CUDA_SIM-}" ]; then
    echo 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang' >&2
    exit 77
fi
sim=$(cd "$CUDA_SIM" && pwd)/train_gpt

export XDG_CACHE_HOME=$tap_scratch/cache SIM_DEVICES=4 SIM_MEMORY=67108864
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
data=$tap_scratch/data
make_data "$data/a" 60
model=(-i "$data/a_train*.bin" --layers 2 --hidden 32 --heads 2 --seq 16 --max-seq 16
    --micro-batch 2 --total-batch 128 --threads 1 --host-threads 1 --val-every 0 --sample-every 0)

has_mpi() {
    command -v mpirun >/dev/null && mpirun --version | grep -q 'Open MPI' &&
        ! OMPI_COMM_WORLD_SIZE=2 "$sim" "${model[@]}" --steps 1 2>&1 | grep -q 'without MPI'
}

# mpi N DEVICE OUT ARGUMENT...
mpi() {
    rm -rf "$3"
    timeout -k 5 100 mpirun --oversubscribe -np "$1" "$sim" "${model[@]}" --device "$2" \
        --out "$3" "${@:4}" </dev/null >"$scratch/log" 2>&1
}

# start RANK N OUT ARGUMENT...: its number is $!, what it prints is in OUT.RANK
start() {
    RANK=$1 WORLD_SIZE=$2 LOCAL_RANK=$1 "$sim" "${model[@]}" --device cuda --out "$3" "${@:4}" \
        </dev/null >"$3.$1" 2>&1 &
}

# until_there PATTERN: a file, but not for ever
until_there() {
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        # shellcheck disable=SC2086 # a pattern
        ls $1 >/dev/null 2>&1 && return
        sleep 0.05
    done
    echo "no $1"
    return 1
}

# alone N OUT ARGUMENT...: the last rank first
alone() {
    local r rc=0 pids=()
    for ((r = $1 - 1; r >= 0; r--)); do
        start $r "$@"
        pids+=($!)
    done
    for r in "${pids[@]}"; do
        wait "$r" || rc=$?
    done
    return $rc
}

# near DIR DIR
near() {
    losses "$1/metrics.jsonl" >"$scratch/a"
    losses "$2/metrics.jsonl" >"$scratch/b"
    close_to 1e-4 "$scratch/a" "$scratch/b"
}

as_mpi() {
    local n
    for n in 2 4; do
        mpi $n cpu "$scratch/cpu" --dtype fp32 --steps 4
        mpi $n cuda "$scratch/cuda" --dtype fp32 --steps 4
        near "$scratch/cpu" "$scratch/cuda"
        alone $n "$scratch/alone" --dtype fp32 --steps 4
        cmp "$scratch"/cuda/model_00000004.bin "$scratch"/alone/model_00000004.bin
        [ ! -e "$scratch/alone/ranks" ]
    done
}

same_bits() {
    local schedule seed=$RANDOM
    echo "seed $seed"
    alone 2 "$scratch/resident" --steps 3 --policy resident
    for schedule in lazy random time; do
        SIM_SCHEDULE=$schedule SIM_SEED=$seed alone 2 "$scratch/$schedule" --steps 3 \
            --policy zero-infinity --chaos 3
        cmp "$scratch"/resident/model_*.bin "$scratch/$schedule"/model_*.bin
    done
}

# What an earlier job of the same name has left, which ended while its ranks met: the job file and
# hellos, and those of one that ended later.
stale() {
    local first second
    start 0 2 "$scratch/out" --steps 1
    first=$!
    until_there "$scratch/out/ranks"
    sleep 0.5 # what was there is removed
    kill -STOP $first
    start 1 2 "$scratch/out" --steps 1
    second=$!
    until_there "$scratch/out/ranks/hello.*.1"
    kill -STOP $second
    kill -CONT $first
    until_there "$scratch/out/ranks/job.*"
    kill -KILL $first $second
    wait $first $second || true
    find "$scratch/out/ranks" | grep hello
    : >"$scratch/out/ranks/end.0123456789abcdef"
    : >"$scratch/out/ranks/beat.0123456789abcdef.0"
    alone 2 "$scratch/out" --steps 1
    [ -e "$scratch/out/DONE_00000001" ]
    [ ! -e "$scratch/out/ranks" ]
}

# says TEXT: what was printed last
says() {
    cat "$scratch"/out.* "$scratch"/log 2>/dev/null | tail -n 30
    cat "$scratch"/out.* "$scratch"/log 2>/dev/null | grep -q -- "$1"
}

second_job() {
    local first second
    start 0 2 "$scratch/out" --steps 100000
    first=$!
    start 1 2 "$scratch/out" --steps 100000
    second=$!
    until_there "$scratch/out/metrics.jsonl"
    RANK=0 WORLD_SIZE=2 "$sim" "${model[@]}" --device cuda --out "$scratch/out" \
        >"$scratch/log" 2>&1 && return 1
    grep -q 'in use by another run' "$scratch/log"
    RANK=1 WORLD_SIZE=2 timeout 2 "$sim" "${model[@]}" --device cuda --out "$scratch/out" \
        >"$scratch/log" 2>&1 && return 1
    kill -TERM $second
    wait $first
    says 'stopped by a signal after step'
}

no_out() {
    RANK=0 WORLD_SIZE=2 "$sim" "${model[@]}" --device cuda --steps 1 >"$scratch/log" 2>&1 &&
        return 1
    says '--out DIR is missing'
}

on_cpu() {
    RANK=1 WORLD_SIZE=2 "$sim" "${model[@]}" --device cpu --steps 1 >"$scratch/log" 2>&1 &&
        return 1
    says 'mpirun -np 2'
}

few_gpus() {
    SIM_DEVICES=1 alone 2 "$scratch/out" --steps 1 && return 1
    says '2 ranks need one each.*CUDA_VISIBLE_DEVICES'
}

different_options() {
    start 0 2 "$scratch/out" --steps 3
    local first=$!
    start 1 2 "$scratch/out" --steps 3 --lr 0.5
    wait $first && return 1
    wait $! && return 1
    says 'lr is .* on rank 0 and .* on rank 1'
}

# fault SIGNAL WORDS: what the second of three ranks meets while they train
fault() {
    local r rc=0 pids=() started
    for r in 0 1 2; do
        RANK=$r WORLD_SIZE=3 "$sim" "${model[@]}" --total-batch 96 --device cuda --steps 100000 \
            --checkpoint-every 5 --out "$scratch/out" </dev/null >"$scratch/out.$r" 2>&1 &
        pids+=($!)
    done
    until_there "$scratch/out/DONE_00000010" # the one before is known to be there
    started=$SECONDS
    kill -s "$1" "${pids[1]}"
    wait "${pids[0]}" && return 1
    wait "${pids[2]}" && return 1
    kill -KILL "${pids[1]}" 2>/dev/null || true
    [ $((SECONDS - started)) -le 30 ]
    tail -n 4 "$scratch"/out.[02]
    for r in 0 2; do
        grep -q "rank 1 of 3 (process ${pids[1]} on .*$2.*was at .*step [0-9]" "$scratch/out.$r"
    done
    grep -q 'the last checkpoint is that of step [0-9]' "$scratch/out.0"
}

fault_mpi() {
    local parent victim started=$SECONDS
    timeout -k 5 60 mpirun --oversubscribe --enable-recovery -np 2 "$sim" "${model[@]}" \
        --device cuda --steps 100000 --checkpoint-every 5 --out "$scratch/out" </dev/null \
        >"$scratch/log" 2>&1 &
    parent=$!
    until_there "$scratch/out/DONE_*"
    victim=$(pgrep -P "$(pgrep -P $parent)" | sed -n 2p)
    kill -KILL "$victim"
    wait $parent || true # which lets the others do as they like
    [ $((SECONDS - started)) -le 40 ]
    says 'rank 1 of 2 (process .*has ended without a word'
}

# NCCL itself finds that something is wrong.
nccl_fails() {
    SIM_NCCL_FAIL=400 start 1 2 "$scratch/out" --steps 100
    local second=$!
    start 0 2 "$scratch/out" --steps 100
    wait $second && return 1
    wait $! && return 1
    grep 'rank 1 of 2 (.* has failed: rank 1: NCCL: .*network error' "$scratch/out.0"
    grep 'NCCL_DEBUG=INFO' "$scratch/out.1"
}

tap_case 'by RANK and WORLD_SIZE: two runs, plans and schedules have the same bits' same_bits
tap_case 'what an earlier job has left is not taken' stale
tap_case 'a second job in the same --out is refused, and the first goes on' second_job
tap_case 'without --out they say that it is needed' no_out
tap_case 'RANK and WORLD_SIZE on the CPU are refused' on_cpu
tap_case 'fewer GPUs than ranks are refused' few_gpus
tap_case 'different options are refused, by name' different_options
tap_case 'kill -9 of a rank ends the others' fault KILL 'has ended without a word'
tap_case 'a rank that is stopped ends the others' fault STOP 'has not been heard of for'
tap_case 'a failure of NCCL ends all' nccl_fails
if has_mpi; then
    tap_case '2 and 4 ranks have the losses of MPI on the CPU, and the same bits without MPI' as_mpi
    tap_case 'kill -9 of a rank under mpirun ends the other' fault_mpi
else
    tap_skip '2 and 4 ranks have the losses of MPI on the CPU' 'no mpirun, or no MPI in this build'
fi
tap_done
