#!/usr/bin/env bash
# A small GPT learns real text and the default corpus to stated losses, in a stated number of steps.
# shellcheck disable=SC2030,SC2031,SC2317 # cases run in subshells, called by tap_case
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

small=(--layers 2 --hidden 128 --heads 4 --seq 64 --max-seq 64 --micro-batch 16 --lr 3e-3
    --warmup 20 --lr-final 0.1 --sample-every 0)

text=$shared/data/tinyshakespeare.txt

# last_val FILE: the last validation loss of a metrics.jsonl
last_val() {
    sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "$1" | tail -n 1
}

# below LIMIT FILE
below() {
    last_val "$2" | awk -v limit="$1" '{ print "# validation loss", $1; exit !($1 < limit) }'
}

# Measured: 2.142. Letters alone are 3.3, pairs of letters 2.5.
case_tinyshakespeare() {
    "$bin/tokenize" "$text" -o "$scratch/ts" >/dev/null
    train_gpt -i "$scratch/ts_train*.bin" "${small[@]}" --steps 400 --val-every 400 \
        --out "$scratch/out" >/dev/null
    below 2.2 "$scratch/out/metrics.jsonl"
}

# The same run on one thread and on two: the same bits.
case_threads() {
    local n
    "$bin/tokenize" "$text" -o "$scratch/ts" >/dev/null
    for n in 1 2; do
        train_gpt -i "$scratch/ts_train*.bin" "${small[@]}" --steps 20 --val-every 20 \
            --threads "$n" --out "$scratch/$n" >/dev/null
    done
    same "$scratch/1" "$scratch/2" 20
}

if [ -e "$text" ]; then
    tap_case '400 steps on tinyshakespeare reach 2.2 nats a byte' case_tinyshakespeare
    tap_case 'tinyshakespeare: the same bits with 1 and 2 threads' case_threads
else
    tap_skip 'tinyshakespeare' "no $text"
fi
tap_done
