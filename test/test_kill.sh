#!/usr/bin/env bash
# Runs that are killed, stopped, or started twice: nothing is lost.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

data=$tap_scratch/data
make_data "$data/a" 200
train() {
    train_gpt -i "$data/a_train*.bin" "${tiny[@]}" "$@"
}

seed=${KILL_SEED:-$$}
echo "# KILL_SEED=$seed"

# Says -y from the first run on, as run scripts do, and writes a checkpoint after every second step.
case_fifty_kills_at_random_moments_lose_nothing() {
    local kills=0 runs=0 finished=0 pid steps=120
    RANDOM=$seed
    train --steps $steps -n 2 --keep 2 --val-every 9 --out "$scratch/whole" >/dev/null
    while [ "$kills" -lt 50 ]; do
        "$bin/train_gpt" -i "$data/a_train*.bin" "${tiny[@]}" --steps $steps -n 2 --keep 2 \
            --val-every 9 --out "$scratch/run" -y 1 >"$scratch/log" 2>"$scratch/stderr" &
        pid=$!
        runs=$((runs + 1))
        sleep "0.$(printf %03d $((RANDOM % 400)))"
        kill -KILL $pid 2>/dev/null || true
        if wait $pid; then
            same "$scratch/whole" "$scratch/run" $steps
            rm -r "$scratch/run"
            finished=$((finished + 1))
        elif [ $? -eq 137 ]; then
            kills=$((kills + 1))
        else
            echo "run $runs failed:"
            cat "$scratch/log" "$scratch/stderr"
            return 1
        fi
        # Files are whole or not there: no state is ever refused.
        fails grep refused "$scratch/log"
        [ $runs -lt 1000 ]
    done
    train --steps $steps -n 2 --keep 2 --val-every 9 --out "$scratch/run" -y 1
    same "$scratch/whole" "$scratch/run" $steps
    # What killed runs left half-written is gone.
    fails compgen -G "$scratch/run/*.tmp"
    echo "$runs runs, $finished finished before they were killed"
}

# A run of many steps whose output is read at our leisure: while we look at step 7, it can be at
# most as far ahead as a pipe is deep, and so it cannot end before it gets the signal. Sets
# $pid. The rest of the output is in file 3; what was read is in $scratch/log.
long_run() {
    mkfifo "$scratch/pipe"
    "$bin/train_gpt" -i "$data/a_train*.bin" "${tiny[@]}" --hidden 8 --layers 1 --steps 3000 \
        "$@" >"$scratch/pipe" 2>"$scratch/stderr" &
    pid=$!
    exec 3<"$scratch/pipe"
    until [[ $line == 'step    7/3000 | loss '* ]]; do
        IFS= read -r line <&3
        echo "$line" >>"$scratch/log"
    done
}

# stopped SIGNAL STATUS
stopped() {
    local pid line='' rc=0 step
    long_run --out "$scratch/run"
    kill "-$1" "$pid"
    cat <&3 >>"$scratch/log"
    wait "$pid" || rc=$?
    [ "$rc" -eq "$2" ]
    step=$(tail -n 2 "$scratch/log" | sed -n 's/^step *\([0-9]*\)\/3000 | loss.*/\1/p')
    [ "$step" -lt 3000 ]
    [ "$(tail -n 1 "$scratch/log")" = "stopped by a signal after step $step; the same command with \
--resume goes on, --out $scratch/run" ]
    [ -e "$(printf '%s/state_%08d.bin' "$scratch/run" "$step")" ]
    [ ! -s "$scratch/stderr" ]
    # As if it had never been stopped.
    train --hidden 8 --layers 1 --steps 3000 --out "$scratch/whole" >/dev/null
    train --hidden 8 --layers 1 --steps 3000 --out "$scratch/run" --resume >/dev/null
    same "$scratch/whole" "$scratch/run" 3000
}
case_sigint_writes_a_checkpoint_and_says_how_to_go_on() {
    stopped INT 130
}
case_sigterm_writes_a_checkpoint_and_says_how_to_go_on() {
    stopped TERM 143
}

case_a_signal_without_out_says_that_nothing_is_saved() {
    local pid line='' rc=0
    long_run
    kill -INT "$pid"
    cat <&3 >>"$scratch/log"
    wait "$pid" || rc=$?
    [ "$rc" -eq 130 ]
    tail -n 1 "$scratch/log" | grep -q '^stopped by a signal after step .*nothing is saved'
}

# Both signals wait while it is stopped, so that no step can end between them.
case_a_second_signal_stops_at_once() {
    local pid line='' rc=0
    long_run --out "$scratch/run"
    kill -STOP "$pid"
    kill -INT "$pid"
    kill -TERM "$pid"
    kill -CONT "$pid"
    cat <&3 >>"$scratch/log"
    wait "$pid" || rc=$?
    [ "$rc" -eq 130 ] || [ "$rc" -eq 143 ]
    fails grep 'stopped by a signal' "$scratch/log"
    fails compgen -G "$scratch/run/state_*"
}

case_two_runs_into_one_folder() {
    local pid line='' rc=0
    long_run --out "$scratch/run"
    cp "$scratch/run/main.log" "$scratch/before"
    refused 1 'run is in use by another run: .*another --out' -i "$data/a_train*.bin" "${tiny[@]}" \
        --out "$scratch/run"
    refused 1 'run is in use by another run' -i "$data/a_train*.bin" "${tiny[@]}" \
        --out "$scratch/run" -y 1
    kill -KILL "$pid"
    wait "$pid" || rc=$?
    [ "$rc" -eq 137 ]
    head -c "$(stat -c %s "$scratch/before")" "$scratch/run/main.log" | cmp - "$scratch/before"
    # A kill leaves no lock behind.
    train --steps 1 --out "$scratch/run" >/dev/null
}

# Whoever reads our output may go away (a pager, `head`): training does not end for that.
case_a_closed_pipe_does_not_end_the_run() {
    train --steps 200 --out "$scratch/run" | head -n 1 >/dev/null
    [ -e "$scratch/run/state_00000200.bin" ]
}

run_cases
