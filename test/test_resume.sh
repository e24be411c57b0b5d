#!/usr/bin/env bash
# Resuming: k steps + resume + the rest are N steps, bit for bit; what may change on the way, and
# what is said of damaged checkpoints.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

data=$tap_scratch/data
make_data "$data/a" 60 # some 70 rows of 16 tokens: a few epochs in the runs below
train() {
    train_gpt -i "$data/a_train*.bin" "${tiny[@]}" "$@"
}

# exact STEPS EVERY ARGUMENT...: from every checkpoint of one run, go on to its end
exact() {
    local steps=$1 every=$2 k
    shift 2
    train --steps "$steps" --checkpoint-every "$every" --out "$scratch/whole" "$@" >"$scratch/log"
    for ((k = every; k < steps; k += every)); do
        cut_back "$scratch/whole" "$scratch/$k" "$k"
        train --steps "$steps" --checkpoint-every "$every" --out "$scratch/$k" "$@" --resume \
            >"$scratch/$k.log"
        grep -q "^resume: .*state_0*$k.bin, step $k\$" "$scratch/$k.log"
        [ "$(grep -c '^step .*| loss' "$scratch/$k.log")" -eq $((steps - k)) ]
        same "$scratch/whole" "$scratch/$k" "$steps"
        rm -r "${scratch:?}/$k"
    done
}

# The epoch must end between two checkpoints, or nothing of its end is tested.
case_a_run_of_several_epochs() {
    local steps=44 rows
    exact $steps 11 --schedule cosine --warmup 15 --lr-final 0.1 --val-every 7 --weight-decay 0.1
    rows=$(sed -n 's/^data: \([0-9]*\) rows.*/\1/p' "$scratch/log")
    [ $((steps * 4)) -gt $((2 * rows)) ]
    [ $((11 * 4)) -lt "$rows" ]
}

case_bf16_with_accumulation() {
    exact 24 8 --dtype bf16 --total-batch 192 --schedule wsd
}

case_fp32_with_accumulation_and_other_options() {
    exact 24 8 --total-batch 192 --schedule linear --clip 0 --no-guard --beta1 0.8 --eps 1e-6 \
        --head-rows 7 --seed 5
}

# The windows hold 128 steps: from then on some are skipped, before and after the checkpoint.
case_outlier_windows() {
    exact 190 150 --lr 1e-3 --skip-loss-z 0.5 --skip-norm-z 0.5
    grep -q '^step 1[34][0-9] skipped: z-score' "$scratch/log"
    grep -q '^step 1[678][0-9] skipped: z-score' "$scratch/log"
    [ "$(grep -c '"skipped":true' "$scratch/whole/metrics.jsonl")" -eq \
        "$(grep -c '^step [0-9]* skipped:' "$scratch/log")" ]
}

case_overfit_batch() {
    exact 6 3 --overfit-batch
}

# Without any file of the first run but the state.
case_the_state_alone_suffices() {
    train --steps 10 -n 5 --out "$scratch/a" >/dev/null
    mkdir "$scratch/b"
    cp "$(state "$scratch/a" 5)" "$scratch/b"
    train_gpt --resume --out "$scratch/b" --threads 1 >"$scratch/log"
    cmp "$(model "$scratch/a" 10)" "$(model "$scratch/b" 10)"
    cmp "$(state "$scratch/a" 10)" "$(state "$scratch/b" 10)"
}

# A run that is lengthened: the state of the short run holds its own --steps.
case_explicit_flags_win_and_differences_are_told() {
    train --schedule constant --steps 12 --out "$scratch/a" >/dev/null
    train --schedule constant --steps 6 --out "$scratch/b" >/dev/null
    train --schedule constant --steps 12 --out "$scratch/b" --resume --val-batches 3 --beta2 0.95 \
        >"$scratch/log"
    grep '^resume: --' "$scratch/log" | sort >"$scratch/told"
    diff "$scratch/told" - <<'TOLD'
resume: --steps is 12 now, was 6
resume: --val-batches is 3 now, was 20
TOLD
    cmp "$(model "$scratch/a" 12)" "$(model "$scratch/b" 12)"
    cmp "$scratch/a/main.log" "$scratch/b/main.log"
}

case_another_rate_has_its_effect() {
    train --steps 8 -n 4 --out "$scratch/a" >/dev/null
    cut_back "$scratch/a" "$scratch/b" 4
    train --steps 8 --out "$scratch/b" --resume --lr 1e-3 >"$scratch/log"
    grep -q '^resume: --lr is 0.001 now, was 0.0003$' "$scratch/log"
    grep -q '^s:3 .* lr:0.000300 ' "$scratch/b/main.log"
    grep -q '^s:4 .* lr:0.001000 ' "$scratch/b/main.log"
    differ "$(model "$scratch/a" 8)" "$(model "$scratch/b" 8)"
}

# The step is the same rows, however many at a time.
case_another_micro_batch() {
    local b
    train --steps 20 -n 10 --total-batch 256 --out "$scratch/a" >/dev/null
    losses "$scratch/a/metrics.jsonl" >"$scratch/a.losses"
    for b in 1 2 8 16; do
        cut_back "$scratch/a" "$scratch/$b" 10
        train --total-batch 256 --out "$scratch/$b" --resume --micro-batch $b >"$scratch/log"
        grep -q "^resume: --micro-batch is $b now, was 4\$" "$scratch/log"
        losses "$scratch/$b/metrics.jsonl" >"$scratch/$b.losses"
        close_to 1e-6 "$scratch/a.losses" "$scratch/$b.losses"
    done
    # The data, and not only its like: other rows give other losses.
    train --steps 20 --total-batch 256 --out "$scratch/other" --seed 2 >/dev/null
    losses "$scratch/other/metrics.jsonl" >"$scratch/other.losses"
    fails close_to 1e-3 "$scratch/a.losses" "$scratch/other.losses"
}

# fp32 -> bf16 rounds the parameters once; bf16 -> fp32 goes on from the masters.
dtype() {
    local from=$1 to=$2
    train --dtype "$from" --steps 20 -n 10 --out "$scratch/a" >/dev/null
    cut_back "$scratch/a" "$scratch/b" 10
    train --out "$scratch/b" --dtype "$to" --resume >"$scratch/log" 2>&1
    grep -q "^resume: --dtype is $to now, was $from\$" "$scratch/log"
    losses "$scratch/a/metrics.jsonl" >"$scratch/a.losses"
    losses "$scratch/b/metrics.jsonl" >"$scratch/b.losses"
    differ "$scratch/a.losses" "$scratch/b.losses"
    close_to 2e-3 "$scratch/a.losses" "$scratch/b.losses"
}
case_from_fp32_to_bf16() {
    dtype fp32 bf16
}
case_from_bf16_to_fp32() {
    dtype bf16 fp32
}

case_another_shape_is_refused() {
    local -a given
    train --steps 2 --out "$scratch/a" >/dev/null
    for given in '--layers 3' '--hidden 64' '--heads 4' '--vocab 300' '--max-seq 64'; do
        # Options given twice: the last one counts.
        # shellcheck disable=SC2086 # two words
        refused 2 "^?${given% *} ${given#* }: .*state_00000002.bin has [0-9]+, .*shape" \
            -i "$data/a_train*.bin" --out "$scratch/a" --resume $given
    done
    refused 2 '--model d12 has 12 layers.*checkpoint .* has 2, ' \
        -i "$data/a_train*.bin" --out "$scratch/a" --resume --model d12
    train --steps 3 --out "$scratch/a" --resume >/dev/null # it is as good as before
}

case_nothing_to_resume() {
    refused 1 'nothing to resume: .*nowhere' -i "$data/a_train*.bin" --out "$scratch/nowhere" \
        --resume
    [ ! -e "$scratch/nowhere" ]
    mkdir "$scratch/empty"
    refused 1 'empty: nothing to resume' -i "$data/a_train*.bin" --out "$scratch/empty" --resume
    refused 2 '--resume .*--out' -i "$data/a_train*.bin" --resume
}

# llm.c's run scripts give -y 1 from the first run on.
case_the_short_form_may_begin() {
    train --steps 6 --out "$scratch/a" >/dev/null
    train --steps 6 --out "$scratch/b/c" -n 3 -y 1 >"$scratch/log"
    grep -qx "resume: no checkpoint in $scratch/b/c yet; starting from the beginning" "$scratch/log"
    cmp "$(model "$scratch/a" 6)" "$(model "$scratch/b/c" 6)"
    train --steps 8 --out "$scratch/b/c" -y 1 >"$scratch/log"
    grep -q '^resume: .*, step 6$' "$scratch/log"
    echo | poke "$(state "$scratch/b/c" 8)" 99
    echo | poke "$(state "$scratch/b/c" 6)" 99
    echo | poke "$(state "$scratch/b/c" 3)" 99
    refused 1 'none of 3 training states .* is good' -i "$data/a_train*.bin" "${tiny[@]}" \
        --out "$scratch/b/c" -y 1
}

# damaged COMMAND...: is run on the newest state; the run goes on from the one before.
damaged() {
    local newest
    newest=$(state "$scratch/b" 8)
    rm -rf "$scratch/b"
    cp -r "$scratch/a" "$scratch/b"
    "$@" "$newest"
    train --steps 12 -n 4 --out "$scratch/b" --resume >"$scratch/log" 2>&1
    grep "^resume: refused: $newest .*; looking for an older one\$" "$scratch/log"
    grep -q "^resume: $(state "$scratch/b" 4), step 4\$" "$scratch/log"
    same "$scratch/whole" "$scratch/b" 12
}
flip() {
    local at=$1 byte
    byte=$(od -An -tu1 -j "$at" -N 1 "$2")
    # shellcheck disable=SC2059 # the byte is the format
    printf "\\x$(printf %02x $((byte ^ 16)))" | poke "$2" "$at"
}
case_a_damaged_newest_state_is_refused_by_name() {
    local size at
    train --steps 12 -n 4 --out "$scratch/whole" >/dev/null
    cut_back "$scratch/whole" "$scratch/a" 8
    size=$(stat -c %s "$(state "$scratch/a" 8)")
    # Magic, table, options, masters, the last byte of the second moments.
    for at in 3 70 400 $((size / 3)) $((size - 1)); do
        damaged flip "$at"
    done
    damaged truncate -s 0
    damaged truncate -s 50
    damaged truncate -s $((size - 1))
    damaged truncate -s $((size + 1))
}

case_a_damaged_only_state_is_an_error() {
    train --steps 2 --out "$scratch/a" >/dev/null
    flip 2000 "$(state "$scratch/a" 2)"
    refused 1 'none of 1 training states in .* is good: .*state_00000002.bin' \
        -i "$data/a_train*.bin" --out "$scratch/a" --resume
    [ -e "$(state "$scratch/a" 2)" ]
}

# What a resume needs is in the state; the model file is for others.
case_a_missing_model_file_does_not_matter() {
    train --steps 8 -n 4 --out "$scratch/whole" >/dev/null
    cut_back "$scratch/whole" "$scratch/a" 4
    rm "$(model "$scratch/a" 4)"
    train --steps 8 -n 4 --out "$scratch/a" --resume >/dev/null
    same "$scratch/whole" "$scratch/a" 8
}

# Other data has no row to go on from; the model and the schedule go on.
case_other_data_begins_at_its_first_row() {
    train --steps 4 --out "$scratch/a" >/dev/null
    make_data "$scratch/other" 50
    train_gpt -i "$scratch/other_train*.bin" --threads 1 --out "$scratch/a" --steps 6 --resume \
        >"$scratch/log"
    grep -q '^resume: --train .* is not the data .* first row$' "$scratch/log"
    grep -q '^step 5/6 ' "$scratch/log"
}

# The same shards elsewhere are the same data.
case_moved_data_is_the_same_data() {
    train --steps 8 -n 4 --out "$scratch/whole" >/dev/null
    cut_back "$scratch/whole" "$scratch/a" 4
    cp -r "$data" "$scratch/moved"
    train_gpt --resume --out "$scratch/a" --threads 1 -i "$scratch/moved/a_train*.bin" \
        >"$scratch/log"
    fails grep -q 'not the data' "$scratch/log"
    cmp "$(model "$scratch/whole" 8)" "$(model "$scratch/a" 8)"
}

# left DIR: the steps of which there is a checkpoint
left() {
    # shellcheck disable=SC2012 # names of ours
    ls "$1" | sed -n 's/^state_0*\([0-9]*\).bin$/\1/p' | tr '\n' ' '
}
case_keep_and_major_every() {
    local -a files
    train --steps 10 -n 1 --out "$scratch/all" >/dev/null
    [ "$(left "$scratch/all")" = '1 2 3 4 5 6 7 8 9 10 ' ]
    train --steps 10 -n 1 --keep 2 --out "$scratch/keep" >/dev/null
    [ "$(left "$scratch/keep")" = '9 10 ' ]
    train --steps 11 -n 1 -nk 2 -nm 4 --out "$scratch/major" >/dev/null
    [ "$(left "$scratch/major")" = '4 8 10 11 ' ]
    # Of what is pruned nothing stays, and of what is not, everything.
    files=("$scratch/major"/model_* "$scratch/major"/DONE_*)
    [ "${#files[@]}" -eq 8 ]
    train --steps 10 --out "$scratch/last" >/dev/null
    [ "$(left "$scratch/last")" = '10 ' ]
}

# A new run into an old folder must not be resumed from the old one's checkpoints later.
case_a_new_run_sets_old_checkpoints_aside() {
    train --steps 9 -n 3 --out "$scratch/a" >/dev/null
    cp "$(state "$scratch/a" 9)" "$scratch/kept"
    train --steps 4 -n 2 --out "$scratch/a" >"$scratch/log"
    grep -q "3 checkpoints .* renamed to \*.old" "$scratch/log"
    [ "$(left "$scratch/a")" = '2 4 ' ]
    cmp "$scratch/kept" "$(state "$scratch/a" 9).old"
    [ "$(grep -c . "$scratch/a/main.log")" -eq 4 ]
}

# A finished run that is resumed has nothing to do, and does no harm.
case_resuming_a_finished_run() {
    train --steps 4 --val-every 2 --out "$scratch/a" >/dev/null
    cp -r "$scratch/a" "$scratch/b"
    train --steps 4 --val-every 2 --out "$scratch/b" --resume >"$scratch/log" 2>&1
    fails grep -q '^step .* loss .* norm' "$scratch/log"
    same "$scratch/a" "$scratch/b" 4
}

run_cases
