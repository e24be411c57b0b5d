#!/usr/bin/env bash
# Checkpoints know nothing of the plan: what was saved under one goes on under any other, bit for
# bit, and a run that is killed under a cap loses nothing.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

export XDG_CACHE_HOME=$tap_scratch/cache # measured costs
data=$tap_scratch/data
make_data "$data/a" 200
train() {
    train_gpt -i "$data/a_train*.bin" "${tiny[@]}" --layers 4 "$@"
}

# plan NAME: sets $plan to the options of it, and $cap if it needs one
plan() {
    case $1 in
    resident) plan=(--policy resident) ;;
    streamed) plan=(--policy zero-infinity --chaos 3) ;;
    mixed) plan=(--plan "$scratch/mixed.plan") ;;
    offload) plan=(--policy zero-offload) ;;
    capped) plan=(--device-memory "$cap") ;;
    esac
}

# Every kind of decision there is. With accumulation gradient buffers serve the others too.
write_mixed() {
    train --steps 1 --policy resident --save-plan "$scratch/plan" "$@" |
        sed -n '/^device memory/,/sealed/s/.*arena, sealed *//p' >"$scratch/need"
    cap=$(($(cat "$scratch/need") * 2 / 5))
    {
        sed -e '/^unit /d' -e 's/^slots.*/slots 2/' -e 's/^grad_buffers.*/grad_buffers 2/' \
            -e 's/^slices.*/slices 3/' -e 's/^speculate.*/speculate 1/' "$scratch/plan"
        echo 'unit 0 keep resident host-optimizer whole'
        echo 'unit 1 recompute resident device-optimizer whole'
        echo 'unit 2 keep stream host-optimizer whole'
        echo 'unit 3 recompute stream host-optimizer whole'
        echo 'unit 4 keep resident host-optimizer whole'
    } >"$scratch/mixed.plan"
}

# exact_pairs ALL ARGUMENT...: three steps under each plan, then three under each one (or under the
# next two alone, if ALL is false), against six without any.
exact_pairs() {
    local all=$1 plan=() cap names=(resident streamed mixed offload capped) from to i
    shift
    local with=(--steps 6 -n 3 --schedule linear --lr-final 0.1 -j "$data/a_val*.bin" --val-every 2
        "$@")
    write_mixed "$@"
    train "${with[@]}" --out "$scratch/whole" >/dev/null
    for i in 0 1 2 3 4; do
        from=${names[i]}
        plan "$from"
        train "${with[@]}" --out "$scratch/$from" "${plan[@]}" >/dev/null
        same "$scratch/whole" "$scratch/$from" 6
        for to in "${names[@]}"; do
            $all || [ "$to" = "${names[(i + 1) % 5]}" ] || [ "$to" = "${names[(i + 2) % 5]}" ] ||
                continue
            cut_back "$scratch/$from" "$scratch/on" 3
            plan "$to"
            train "${with[@]}" --out "$scratch/on" --resume "${plan[@]}" >"$scratch/log"
            echo "from $from to $to"
            grep -q '^resume: .*, step 3$' "$scratch/log"
            fails grep 'is .* now, was' "$scratch/log"
            same "$scratch/whole" "$scratch/on" 6
            rm -r "${scratch:?}/on"
        done
    done
}
case_all_pairs_of_five_plans_fp32() {
    exact_pairs true
}
case_each_of_five_plans_bf16_accumulated() {
    exact_pairs false --dtype bf16 -d 192
}

# A checkpoint is also the end of a run under a plan: a model file of one generates text in another
# run, and a new run begins from it under any plan.
case_a_model_file_begins_a_run_under_any_plan() {
    local plan=() cap name
    write_mixed
    train --steps 3 --out "$scratch/first" --policy zero-infinity >/dev/null
    train_gpt --generate --model "$(model "$scratch/first" 3)" --sample-tokens 5 >/dev/null
    for name in resident capped; do
        plan $name
        train --model "$(model "$scratch/first" 3)" --steps 3 --out "$scratch/$name" "${plan[@]}" \
            >/dev/null
    done
    same "$scratch/resident" "$scratch/capped" 3
}

case_kills_under_a_cap_lose_nothing() {
    local plan=() cap pid kills=0 runs=0 rc with=(--steps 60 -n 2 --keep 2 --val-every 9)
    RANDOM=${KILL_SEED:-$$}
    write_mixed
    plan capped
    train "${with[@]}" --out "$scratch/whole" >/dev/null
    while [ $kills -lt 8 ]; do
        "$bin/train_gpt" -i "$data/a_train*.bin" "${tiny[@]}" --layers 4 "${with[@]}" "${plan[@]}" \
            --chaos $((1 + RANDOM)) --out "$scratch/run" -y 1 >"$scratch/log" 2>"$scratch/stderr" &
        pid=$!
        rc=0
        runs=$((runs + 1))
        sleep "0.$(printf %03d $((RANDOM % 400)))"
        kill -KILL $pid 2>/dev/null || true
        wait $pid || rc=$?
        case $rc in
        0) # finished before
            same "$scratch/whole" "$scratch/run" 60
            rm -r "$scratch/run"
            ;;
        137) kills=$((kills + 1)) ;;
        *)
            cat "$scratch/log" "$scratch/stderr"
            return 1
            ;;
        esac
        fails grep refused "$scratch/log"
        [ $runs -lt 200 ]
    done
    train "${with[@]}" "${plan[@]}" --out "$scratch/run" -y 1 >/dev/null
    same "$scratch/whole" "$scratch/run" 60
}

# All in one go: it says so, and what is saved is a good checkpoint.
case_a_signal_under_a_cap_saves_the_steps_that_are_done() {
    local plan=() cap pid line='' rc=0 step
    write_mixed
    plan capped
    mkfifo "$scratch/pipe"
    "$bin/train_gpt" -i "$data/a_train*.bin" "${tiny[@]}" --layers 4 --steps 3000 "${plan[@]}" \
        --chaos 5 --out "$scratch/run" >"$scratch/pipe" &
    pid=$!
    exec 3<"$scratch/pipe"
    until [[ $line == 'step    7/3000 | loss '* ]]; do
        IFS= read -r line <&3
    done
    kill -TERM $pid
    cat <&3 >"$scratch/log"
    wait $pid || rc=$?
    [ $rc -eq 143 ]
    step=$(sed -n 's/^stopped by a signal after step \([0-9]*\);.*/\1/p' "$scratch/log")
    train --steps "$step" --out "$scratch/whole" >/dev/null
    cmp "$(model "$scratch/whole" "$step")" "$(model "$scratch/run" "$step")"
}

# The next step is under way when the log cannot be written: it ends, and what is saved is whole.
case_a_full_disk_in_the_middle_saves_the_steps_that_are_done() {
    local policy step run rc with=(-i "$data/a_train*.bin" --layers 1 --hidden 4 --heads 1 --seq 8
        --max-seq 8 -b 1 --threads 1 --val-every 0 --sample-every 0)
    for policy in zero-infinity resident; do
        rc=0
        (
            ulimit -f 40 # KiB
            train_gpt "${with[@]}" --steps 2000 --policy $policy --out "$scratch/$policy"
        ) >/dev/null 2>"$scratch/stderr" || rc=$?
        [ $rc -eq 1 ]
        step=$(sed -n 's/.*step \([0-9]*\) is saved in.*/\1/p' "$scratch/stderr")
        train_gpt "${with[@]}" --steps "$step" --out "$scratch/whole" >/dev/null
        cmp "$(model "$scratch/whole" "$step")" "$(model "$scratch/$policy" "$step")"
        for run in whole $policy; do # with the moments, and the same rows
            train_gpt "${with[@]}" --steps $((step + 3)) --out "$scratch/$run" --resume >/dev/null
        done
        cmp "$(model "$scratch/whole" $((step + 3)))" "$(model "$scratch/$policy" $((step + 3)))"
        rm -r "$scratch/whole"
    done
}

run_cases
