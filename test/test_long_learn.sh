#!/usr/bin/env bash
# Training on the default corpus gets near the loss that a perfect model would reach.
# shellcheck disable=SC2030,SC2031,SC2317 # cases run in subshells, called by tap_case
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

# The demo's model and steps. A perfect model reaches 0.216 on rows of 128 tokens; a guess from the
# frequency of bytes is 3. Measured at step 1200: 0.349.
case_stories() {
    "$bin/tokenize" --stories -o "$scratch/stories" >/dev/null
    train_gpt -i "$scratch/stories_train*.bin" --layers 4 --hidden 128 --heads 4 --max-seq 128 \
        --seq 128 --micro-batch 16 --steps 1500 --lr 2e-3 --warmup 50 --lr-final 0.1 \
        --weight-decay 0.1 --val-every 1500 --val-batches 10 --sample-every 0 --out "$scratch/out" |
        sed -n 's/^stories: .* loss of \([0-9.]*\) on.*/\1/p' >"$scratch/floor"
    sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "$scratch/out/metrics.jsonl" | tail -n 1 |
        paste -d ' ' - "$scratch/floor" |
        awk '{ print "# validation loss", $1, "perfect", $2; exit !($1 > $2 && $1 < $2 + 0.15) }'
}

tap_case '1500 steps on the stories come within 0.15 nats of a perfect model' case_stories
tap_done
