#!/usr/bin/env bash
# Several ranks measure together and make one plan: what it shards changes no bit, its bytes are
# those that a rank takes, and a plan for another number of ranks is refused.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
# shellcheck source=test/ranks.sh
. "$(dirname "$0")/ranks.sh"
model+=(--total-batch 192 --layers 3)

# ranks N NAME ARGUMENT...: what it prints into $scratch/NAME, its losses into NAME.losses
ranks() {
    local n=$1 name=$scratch/$2
    shift 2
    rm -rf "$name.out"
    launch -np "$n" "$bin/train_gpt" "${model[@]}" --steps 4 --out "$name.out" "$@" >"$name" 2>&1 ||
        { cat "$name" && return 1; }
    losses "$name.out/metrics.jsonl" >"$name.losses"
    [ "$(wc -l <"$name.losses")" -eq 4 ]
}

equal() {
    diff "$scratch/$1.losses" "$scratch/$2.losses"
}

# decisions NAME: of a printed plan, the words of each run of units
decisions() {
    awk '/^  units / { inside = 1; next }
        $1 == "shared" { exit }
        inside { print $1, $2, $3, $4, $5 }' "$scratch/$1"
}

case_every_stage_has_the_same_bits() {
    local zero
    ranks 3 plain
    for zero in 0 1 2 3; do
        ranks 3 "z$zero" -z $zero --policy resident
        equal plain "z$zero"
    done
    decisions z0 | grep -qx '1-3 keep resident device whole'
    decisions z1 | grep -qx '1-3 keep resident device shard'
    diff <(decisions z1) <(decisions z2)
    decisions z3 | grep -qx '0 keep resident device shard'
    decisions z3 | grep -qx '1-3 keep stream device shard'
    ranks 3 asked -z 1 # without a policy auto plans
    grep -q '^plan: auto, predicted' "$scratch/asked"
    equal plain asked
}

case_policies_have_the_same_bits() {
    local policy cap
    ranks 2 plain --dtype bf16
    for policy in auto autohete zero-offload zero-infinity; do
        ranks 2 by_policy --dtype bf16 --policy $policy --chaos 5
        equal plain by_policy
    done
    decisions by_policy | grep -qx '1-3 keep stream host shard'
    cap=$(sed -n '/^device memory/,/sealed/s/.*arena, sealed *//p' "$scratch/plain")
    cap=$((cap * 3 / 4))
    ranks 2 capped --dtype bf16 --device-memory $cap
    equal plain capped
    [ "$(sed -n '/^device memory/,/sealed/s/.*arena, sealed *//p' "$scratch/capped")" -le $cap ]
}

# The ranks measure together, and one of them answers; what is another machine's needs but one.
case_only_a_plan() {
    local words=(--plan-only)
    launch -np 2 "$bin/train_gpt" "${model[@]}" "${words[@]}" >"$scratch/out" 2>"$scratch/err"
    cat "$scratch/err" "$scratch/out"
    grep -q '^2 ranks, 2 on each of 1 machine: batch and memory are one rank' "$scratch/out"
    [ "$(grep -c '^budget ' "$scratch/out")" -eq 1 ]
    [ "$(grep -c '^model: ' "$scratch/err")" -eq 1 ]
    grep -q '^policy .* comm$' "$scratch/out"
    launch -np 2 "$bin/train_gpt" "${model[@]}" "${words[@]}" --format json >"$scratch/out"
    [ "$(grep -o '"gpus": 2' "$scratch/out" | wc -l)" -eq 1 ]
    launch -np 2 "$bin/train_gpt" "${model[@]}" "${words[@]}" --gpus 2 \
        --machine scripts/machines/a100-40g >"$scratch/out" 2>"$scratch/err"
    [ "$(grep -c '^2 GPUs, 2 on each of 1 machine' "$scratch/out")" -eq 1 ]
}

case_the_micro_batch_is_chosen_by_all() {
    ranks 3 chosen -b auto
    ranks 3 given -b "$(sed -n 's/^step: [0-9]* x \([0-9]*\) rows.*/\1/p' "$scratch/chosen")"
    equal chosen given
}

case_costs_are_measured_together_and_kept() {
    export XDG_CACHE_HOME=$scratch/cache
    ranks 2 first --policy auto
    grep -q '^costs: this machine, measured$' "$scratch/first"
    grep -q '^block_scatter_s 0*[1-9.]' "$XDG_CACHE_HOME"/train_gpt/profile-*
    ranks 2 second --policy auto
    grep -q '^costs: this machine, measured earlier' "$scratch/second"
    ranks 3 third --policy auto
    grep -q '^costs: this machine, measured$' "$scratch/third"
}

case_a_plan_is_for_its_ranks() {
    ranks 2 saved --policy zero-infinity --save-plan "$scratch/plan"
    grep -qx 'ranks 2' "$scratch/plan"
    grep -qx 'unit 1-3 keep stream host-optimizer shard' "$scratch/plan"
    ranks 2 followed --plan "$scratch/plan"
    equal saved followed
    ! launch -np 3 "$bin/train_gpt" "${model[@]}" --plan "$scratch/plan" >"$scratch/log" 2>&1
    grep -q 'the plan is for 2 ranks, and this run has 3: start it as 2' "$scratch/log"
}

case_a_machine_with_slow_motion() {
    ranks 2 slow --emulate scripts/machines/a100-40g:16 --policy autohete --device-memory 2M
    grep -q '^slow motion: a second of A100-40GB takes' "$scratch/slow"
    grep -q '^comm  *busy ' "$scratch/slow"
    ranks 2 plain
    equal slow plain
}

run_cases
