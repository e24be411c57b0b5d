#!/usr/bin/env bash
# Several ranks train one model: the same losses as one does, the same bits at one number of ranks
# whatever the plan; what they refuse; and what becomes of the others when one ends.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
# shellcheck source=test/ranks.sh
. "$(dirname "$0")/ranks.sh"
model=(-i "$data/a_train*.bin" --layers 3 --hidden 48 --heads 3 --seq 16 --max-seq 32
    --micro-batch 2 --total-batch 384 --threads 1 --host-threads 1 --val-every 0 --sample-every 0)

# ranks N ARGUMENT...: into $scratch/out, what it prints into $scratch/log
ranks() {
    rm -rf "$scratch/out"
    launch -np "$1" "$bin/train_gpt" "${model[@]}" --out "$scratch/out" "${@:2}" \
        >"$scratch/log" 2>&1
}

as_one() { # DTYPE RELATIVE
    local n
    train_gpt "${model[@]}" --dtype "$1" --steps 20 --out "$scratch/one" >/dev/null
    for n in 1 2 3 4; do
        ranks $n --dtype "$1" --steps 20
        near "$scratch/one" "$scratch/out" "$2"
    done
    ranks 1 --dtype "$1" --steps 20 # alone among many: to the last bit
    cmp "$scratch"/one/model_00000020.bin "$scratch"/out/model_00000020.bin
}

same_bits() { # N ARGUMENT...
    local n=$1 plan
    shift
    ranks "$n" --steps 6 "$@"
    mv "$scratch/out" "$scratch/plain"
    for plan in '--policy zero-offload' '--policy zero-infinity --chaos 7' '--policy stronghold' \
        '--chaos 3' '--device-memory 760000' '--zero 0' '--zero 2' '--zero 3 --chaos 11'; do
        # shellcheck disable=SC2086 # words
        ranks "$n" --steps 6 "$@" $plan || { cat "$scratch/log" && return 1; }
        cmp "$scratch"/plain/model_00000006.bin "$scratch"/out/model_00000006.bin
        cmp <(losses "$scratch/plain/metrics.jsonl") <(losses "$scratch/out/metrics.jsonl")
    done
}

resumed() { # PLAN OF THE SAVING RUN, PLAN OF THE RESUMED ONE
    local n
    ranks 2 --steps 8
    mv "$scratch/out" "$scratch/whole"
    for n in 2 1 3 4; do
        # shellcheck disable=SC2086 # words
        ranks 2 --steps 4 $1
        # shellcheck disable=SC2086
        launch -np $n "$bin/train_gpt" "${model[@]}" --steps 8 --out "$scratch/out" --resume $2 \
            >"$scratch/log" 2>&1
        near "$scratch/whole" "$scratch/out" 1e-5
        [ $n -ne 2 ] || cmp "$scratch"/whole/model_00000008.bin "$scratch"/out/model_00000008.bin
    done
}

refused() { # TEXT ARGUMENT...: of the second rank alone
    local rc=0
    timeout 60 mpirun --oversubscribe -np 1 "$bin/train_gpt" "${model[@]}" --steps 3 : \
        -np 1 "$bin/train_gpt" "${model[@]}" --steps 3 "${@:2}" </dev/null >"$scratch/log" 2>&1 ||
        rc=$?
    cat "$scratch/log"
    [ $rc -ne 0 ]
    [ $rc -ne 124 ]
    grep -q "$1" "$scratch/log"
}

# The library's own sums: near to ours, whatever is sharded.
fast() { # DTYPE RELATIVE
    local plan
    train_gpt "${model[@]}" --dtype "$1" --steps 10 --out "$scratch/one" >/dev/null
    for plan in '--zero 0' '--zero 2' '--policy zero-offload'; do
        # shellcheck disable=SC2086 # words
        ranks 3 --dtype "$1" --steps 10 --fast-reduce $plan
        near "$scratch/one" "$scratch/out" "$2"
    done
}

# Ranks share the batches of a validation, also where there is not one for each of them.
validated() {
    local n plan
    local -a val=(-j "$data/a_val*.bin" --val-every 2 --steps 4)
    train_gpt "${model[@]}" "${val[@]}" --val-batches 5 --out "$scratch/one" >/dev/null
    for n in 2 3 4; do
        for plan in '--policy resident' '--policy zero-infinity'; do
            # shellcheck disable=SC2086 # words
            ranks $n "${val[@]}" --val-batches 5 $plan
            paste <(sed -n 's/.*"val_loss":\([0-9.]*\).*/\1/p' "$scratch/one/metrics.jsonl") \
                <(sed -n 's/.*"val_loss":\([0-9.]*\).*/\1/p' "$scratch/out/metrics.jsonl") |
                awk '{ d = ($1 - $2) / $1; worst = d * d > worst ? d * d : worst }
                    END { print NR, worst; exit !(NR == 3 && worst < 1e-10) }'
        done
    done
}

indivisible() {
    ranks 5 --steps 1 && return 1
    grep -q 'not a multiple of --micro-batch 2 x --seq 16 x 5 ranks = 160' "$scratch/log"
}

# A rank other than the first, by its place among mpirun's children.
child() { # N OF PARENT
    pgrep -P "$2" | sed -n "${1}p"
}

# fault SIGNAL: of the second of three ranks, in the middle of training
fault() {
    local signal=$1 rc=0 parent victim started
    rm -rf "$scratch/out"
    timeout -k 5 60 mpirun --oversubscribe -np 3 "$bin/train_gpt" "${model[@]}" --steps 100000 \
        --checkpoint-every 20 --out "$scratch/out" </dev/null >"$scratch/log" 2>&1 &
    parent=$!
    until ls "$scratch"/out/DONE_* >/dev/null 2>&1; do sleep 0.1; done
    victim=$(child 2 "$(pgrep -P $parent)")
    started=$SECONDS
    kill -s "$signal" "$victim"
    wait $parent || rc=$?
    tail -n 20 "$scratch/log"
    grep -q 'rank 1 of 3 .*step [0-9]' "$scratch/log"
    grep -q 'the last checkpoint is that of step [0-9]' "$scratch/log"
    kill -KILL "$victim" 2>/dev/null || true # it may only stand still
    [ $rc -ne 0 ]
    [ $((SECONDS - started)) -le 35 ]
    last=$(find "$scratch/out" -name 'DONE_*' | sort | tail -n 1)
    [ -e "$scratch/out/model_${last##*_}.bin" ]
}

stopped_together() {
    local rc=0 parent
    rm -rf "$scratch/out"
    timeout -k 5 60 mpirun --oversubscribe -np 3 "$bin/train_gpt" "${model[@]}" --steps 100000 \
        --out "$scratch/out" </dev/null >"$scratch/log" 2>&1 &
    parent=$!
    until grep -q '"step"' "$scratch/out/metrics.jsonl" 2>/dev/null; do sleep 0.1; done
    kill -TERM "$(child 2 "$(pgrep -P $parent)")"
    wait $parent || rc=$?
    tail -n 5 "$scratch/log"
    grep -q 'stopped by a signal after step' "$scratch/log"
    ls "$scratch"/out/model_*.bin
}

tap_case 'fp32: 1 to 4 ranks have the losses of one process' as_one fp32 1e-5
tap_case 'bf16: 1 to 4 ranks have the losses of one process' as_one bf16 1e-3
tap_case '2 ranks: the same bits under every plan' same_bits 2
tap_case '3 ranks, bf16, one micro-batch: the same bits' same_bits 3 --dtype bf16 -d 96
tap_case 'fp32: --fast-reduce' fast fp32 1e-5
tap_case 'bf16: --fast-reduce' fast bf16 2e-3
tap_case 'saved by 2 ranks, resumed by 2, 1, 3, 4' resumed '' ''
tap_case 'the same, sharded in one way and in another' resumed '--zero 3' '--policy zero-offload'
tap_case 'validation is divided among 2, 3, 4 ranks' validated
tap_case 'different options are refused, by name' refused 'lr' --lr 0.5
tap_case 'different models are refused' refused 'layers' --layers 2
tap_case 'a batch that ranks cannot share is refused' indivisible
tap_case 'kill -9 of a rank ends all, the last checkpoint is whole' fault KILL
tap_case 'a rank that is stopped ends all' fault STOP
tap_case 'a signal to one rank stops all after the same step' stopped_together
tap_done
