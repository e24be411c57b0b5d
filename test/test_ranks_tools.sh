#!/usr/bin/env bash
# Around several ranks: the cores that each has, the trace of all of them, the scripts that start
# them.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
# shellcheck source=test/ranks.sh
. "$(dirname "$0")/ranks.sh"

# The cores that each thread of a process may use, every different list once.
cores_of() {
    sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$1"/task/*/status | sort -u
}

case_ranks_divide_the_cores() {
    local parent first second pids
    launch -np 2 --bind-to none "$bin/train_gpt" "${model[@]}" --threads 0 --host-threads 0 \
        --policy zero-offload --steps 100000 --out "$scratch/out" >"$scratch/log" 2>&1 &
    parent=$!
    until_true grep '"step"' "$scratch/out/metrics.jsonl"
    mapfile -t pids < <(ranks_of $parent)
    first=$(cores_of "${pids[0]}")
    second=$(cores_of "${pids[1]}")
    kill -TERM "${pids[0]}"
    wait $parent || true
    cat "$scratch/log"
    echo "cores: '$first' and '$second' of '$(cores_of $$)'"
    # Every thread of a rank has the same cores, and no core is given twice if there are enough.
    [[ -n $first && $first != *$'\n'* && $second != *$'\n'* ]]
    if [ "$(nproc)" -gt 1 ] && objdump -p "$bin/train_gpt" | grep -q "NEEDED.*hwloc"; then
        grep -q "^cores: 2 ranks on this machine, this one has cores* $first\$" "$scratch/log"
        fails grep -x -f <(list_of "$second") <(list_of "$first")
    else
        [ "$first" = "$second" ]
    fi
}

# A list of cores, one a line: 0-2,5 as 0 1 2 5
list_of() {
    local part
    for part in ${1//,/ }; do
        seq "${part%-*}" "${part#*-}"
    done
}

case_fewer_cores_than_ranks() {
    local core
    core=$(list_of "$(cores_of $$)" | head -n 1)
    launch -np 3 --bind-to none taskset -c "$core" "$bin/train_gpt" "${model[@]}" -d 96 \
        --threads 0 --host-threads 0 --steps 2 >"$scratch/log" 2>&1
    grep 'device:' "$scratch/log"
    grep -q '^warning: 3 ranks share 1 core of this machine' "$scratch/log"
    [ "$(grep -c warning "$scratch/log")" -eq 1 ]
}

# What takes one process is done by one.
case_a_text_is_generated_once() {
    train_gpt "${model[@]}" --steps 1 --out "$scratch/out" >/dev/null
    generate=(-e "$(compgen -G "$scratch/out/model_*.bin")" --generate --sample-tokens 5 --seed 3)
    train_gpt "${generate[@]}" >"$scratch/one"
    launch -np 3 "$bin/train_gpt" "${generate[@]}" >"$scratch/three" 2>"$scratch/err"
    diff "$scratch/one" "$scratch/three"
    grep -q '^train_gpt: rank 2 has nothing to do: --generate is done by rank 0' "$scratch/err"
}

# Of the process in a trace with this name: its number.
process() {
    sed -n "s/.*\"pid\":\\([0-9]*\\),.*\"process_name\".*\"$2\".*/\\1/p" "$1"
}

case_a_trace_has_a_process_per_rank() {
    local rank pid trace=$scratch/trace.json lane
    launch -np 2 "$bin/train_gpt" "${model[@]}" --steps 8 --policy zero-infinity --trace "$trace" \
        --timeline "$scratch/t.svg" >"$scratch/log" 2>&1 || { cat "$scratch/log" && return 1; }
    [ "$(grep -c process_name "$trace")" -eq 3 ]
    [ -n "$(process "$trace" predicted)" ]
    for rank in 0 1; do
        pid=$(process "$trace" "rank $rank measured")
        for lane in compute 'copy in' 'copy out' host comm; do
            lane=$(sed -n "s/.*\"pid\":$pid,\"tid\":\\([0-9]*\\),.*thread_name.*\"$lane\".*/\\1/p" \
                "$trace")
            grep -q "\"ph\":\"X\",\"pid\":$pid,\"tid\":$lane," "$trace"
        done
        grep "\"ph\":\"X\",\"pid\":$pid," "$trace" | sed 's/.*"step":\([0-9]*\).*/\1/' | sort -u \
            >"$scratch/steps$rank"
        [ "$(tr '\n' ' ' <"$scratch/steps$rank")" = '4 5 6 7 ' ]
    done
    ! command -v jq >/dev/null || jq -e '.traceEvents | length > 100' "$trace"
    # They exchange gradients: whatever the clocks, neither can be a step ahead of the other.
    awk -v a="$(process "$trace" 'rank 0 measured')" -v b="$(process "$trace" 'rank 1 measured')" '
        /"ph":"X"/ { pid = ts = step = $0
            sub(/.*"pid":/, "", pid); sub(/.*"ts":/, "", ts); sub(/.*"step":/, "", step)
            pid += 0; ts += 0; step += 0
            if (!((pid, step) in from) || ts < from[pid, step]) from[pid, step] = ts
            if (ts > to[pid, step]) to[pid, step] = ts }
        END { for (s = 4; s < 7; s++)
                  if (!(from[a, s] < to[b, s + 1] && from[b, s] < to[a, s + 1])) exit 1 }' "$trace"
    [ -s "$scratch/t.svg" ]
    fails compgen -G "$scratch/*.tmp"
}

# What rank 0 cannot write ends the others too. Its file size is limited while it trains.
case_a_trace_that_cannot_be_written() {
    local rc=0 parent pids
    launch -np 2 "$bin/train_gpt" "${model[@]}" --steps 100000 --trace "$scratch/trace.json" \
        >"$scratch/log" 2>&1 &
    parent=$!
    until_true grep -a '/100000 | loss' "$scratch/log"
    mapfile -t pids < <(ranks_of $parent)
    prlimit --pid "${pids[0]}" --fsize=1000
    kill -TERM "${pids[1]}"
    wait $parent || rc=$?
    tail -n 3 "$scratch/log"
    [ "$rc" -eq 1 ]
    grep -aq 'train_gpt: .*trace.json' "$scratch/log"
    fails compgen -G "$scratch/*.tmp"
}

# ---- scripts ------------------------------------------------------------------------------------

case_run_node_trains_and_a_signal_saves_a_checkpoint() {
    local script rc=0 last
    export RANKS=2 TRAIN_GPT=$bin/train_gpt MPIRUN_OPTIONS=--oversubscribe
    timeout -k 5 100 scripts/run_node.sh "${model[@]}" --steps 3 --out "$scratch/three" \
        >"$scratch/log" 2>&1
    [ "$(losses "$scratch/three/metrics.jsonl" | wc -l)" -eq 3 ]
    grep -q '^cores: 2 ranks' "$scratch/log"

    scripts/run_node.sh "${model[@]}" --steps 100000 --out "$scratch/out" >"$scratch/log" 2>&1 &
    script=$!
    until_true grep '"step"' "$scratch/out/metrics.jsonl"
    kill -TERM $script
    wait $script || rc=$?
    tail -n 3 "$scratch/log"
    [ "$rc" -eq $((128 + 10)) ]
    grep -aq 'stopped by a signal after step' "$scratch/log"
    last=$(find "$scratch/out" -name 'DONE_*')
    [ -e "$scratch/out/state_${last##*_}.bin" ]
}

case_run_node_without_a_number_of_ranks() {
    local line
    mkdir "$scratch/bin"
    printf '#!/bin/sh\necho "GPU 0: x"; echo "GPU 1: x"; echo "GPU 2: x"\n' \
        >"$scratch/bin/nvidia-smi"
    chmod +x "$scratch/bin/nvidia-smi"
    line=$(PATH=$scratch/bin:$PATH DRY_RUN=1 scripts/run_node.sh --out 'a b')
    [ "$line" = 'mpirun -np 3 --bind-to none ./train_gpt --out a\ b ' ]
}

# This machine twice; the slots of all lines are counted.
case_run_nodes() {
    local line
    refused_by_run_nodes ''
    refused_by_run_nodes "$scratch/none"
    printf '# two\nnode1 slots=8\nnode2   max_slots=9 slots=4 # more\n\nnode3\n' \
        >"$scratch/hosts"
    line=$(HOSTS=$scratch/hosts INTERFACE=ib0 OMP_NUM_THREADS=7 DRY_RUN=1 TRAIN_GPT=/opt/train_gpt \
        scripts/run_nodes.sh -n 5)
    echo "$line"
    [[ $line == "mpirun -np 13 --bind-to none --hostfile $scratch/hosts --map-by slot \
--mca btl_tcp_if_include ib0"*' -x OMP_NUM_THREADS '*'/opt/train_gpt -n 5 ' ]]

    echo 'localhost slots=2' >"$scratch/hosts"
    HOSTS=$scratch/hosts TRAIN_GPT=$bin/train_gpt MPIRUN_OPTIONS=--oversubscribe timeout -k 5 100 \
        scripts/run_nodes.sh "${model[@]}" --steps 3 --out "$scratch/out" >"$scratch/log" 2>&1
    [ "$(losses "$scratch/out/metrics.jsonl" | wc -l)" -eq 3 ]
}
refused_by_run_nodes() {
    local rc=0
    HOSTS=$1 scripts/run_nodes.sh >"$scratch/log" 2>&1 || rc=$?
    [ "$rc" -eq 2 ]
    grep -q "HOSTS='$1' is no file" "$scratch/log"
}

# slurm STATUS ARGUMENT...: the job's script, with an srun that runs one task and ends with STATUS
slurm() {
    mkdir -p "$scratch/bin"
    cat >"$scratch/bin/srun" <<'END'
#!/usr/bin/env bash
printf '%q ' srun "$@" >"$scratch/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=5 SLURM_NTASKS=16 SLURM_LOCALID=1 "$@"
exit "$srun_status"
END
    printf '#!/bin/sh\necho "$@" >"$scratch/scontrol"\n' >"$scratch/bin/scontrol"
    cat >"$scratch/bin/trainer" <<'END'
#!/bin/sh
echo "rank ${RANK-} of ${WORLD_SIZE-}, ${LOCAL_RANK-} here: $*" >"$scratch/task"
END
    chmod +x "$scratch"/bin/*
    srun_status=$1 PATH=$scratch/bin:$PATH SLURM_JOB_ID=77 SLURM_CPUS_PER_TASK=3 \
        SLURM_SUBMIT_DIR=$scratch TRAIN_GPT=trainer bash scripts/run_slurm.sbatch "${@:2}"
}

case_run_slurm() {
    local rc=0
    export scratch
    slurm 0 --out 'a b'
    [ "$(cat "$scratch/srun")" = 'srun --cpus-per-task=3 --mpi=pmix trainer --out a\ b -y 1 ' ]
    [ "$(cat "$scratch/task")" = 'rank  of ,  here: --out a b -y 1' ]
    [ ! -e "$scratch/scontrol" ]
    LAUNCH='env' slurm 1 --out x || rc=$?
    [ "$rc" -eq 1 ] # an error does not go back into the queue
    [ "$(cat "$scratch/task")" = 'rank 5 of 16, 1 here: --out x -y 1' ]
    [ ! -e "$scratch/scontrol" ]
    slurm 143 --out x # the signal before the end of the time
    [ "$(cat "$scratch/scontrol")" = 'requeue 77' ]
    rc=0
    LAUNCH='what' slurm 0 || rc=$?
    [ "$rc" -eq 2 ]
}

run_cases
