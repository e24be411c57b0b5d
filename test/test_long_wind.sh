#!/usr/bin/env bash
# An emulated machine, every lane paced: a step takes as long as predicted, whatever the policy, and
# pace changes no loss. On a machine that does other things too, operations end late and times mean
# nothing: such a run is repeated twice, then its time is not judged.
# shellcheck disable=SC2154 # what tap.sh and cli.sh set
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
export XDG_CACHE_HOME=$tap_scratch/cache
make_data "$tap_scratch/data/a"

train() {
    train_gpt -i "$tap_scratch/data/a_train*.bin" --layers 6 --hidden 64 --heads 4 --max-seq 32 \
        --seq 32 --micro-batch 8 --dtype bf16 --clip 0 --no-guard --steps 8 --val-every 0 \
        --sample-every 0 --log-json "$@"
}

# paced POLICY: leaves the metrics in $tap_scratch/POLICY, what was said in POLICY.err
paced() {
    for _ in 1 2 3; do
        train --emulate scripts/machines/a100-40g --device-memory 3M --policy "$1" \
            >"$tap_scratch/$1" 2>"$tap_scratch/$1.err" || return
        grep -q 'the times mean nothing' "$tap_scratch/$1.err" || break
    done
}

equal_losses() { # POLICY
    tail -n 3 "$tap_scratch/$1.err"
    cmp <(losses "$tap_scratch/plain") <(losses "$tap_scratch/$1")
    [ "$(losses "$tap_scratch/$1" | wc -l)" -eq 8 ]
}

within_10_percent() { # POLICY
    sed -n '/predicted *measured/,$p' "$tap_scratch/$1.err"
    awk '/^step .* of the predicted/ { n++; bad = $3 < 0.9 * $2 || $3 > 1.1 * $2 }
        END { exit n != 1 || bad }' "$tap_scratch/$1.err"
}

train >"$tap_scratch/plain" 2>/dev/null
for policy in auto zero-offload stronghold; do
    paced $policy
    tap_case "$policy: the losses of a run that is not paced" equal_losses $policy
    late=$(grep 'the times mean nothing' "$tap_scratch/$policy.err")
    if [ -n "$late" ]; then
        tap_skip "$policy: a step takes as long as predicted" "after 3 tries, $late"
    else
        tap_case "$policy: a step takes as long as predicted, within 10%" within_10_percent $policy
    fi
done
tap_done
