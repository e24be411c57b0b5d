#!/usr/bin/env bash
# ./train_gpt as a user meets it: its files and lines, sampling, evaluation, llm.c's run scripts.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

data=$tap_scratch/data
make_data "$data/a" 400
train() {
    train_gpt -i "$data/a_train*.bin" "${tiny[@]}" "$@"
}

num='-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?'
step_line="step +[0-9]+/[0-9]+ \\| loss [0-9]+\\.[0-9]{6} \\| norm [0-9]+\\.[0-9]{4} \\| \
lr [0-9]\\.[0-9]{2}e[-+][0-9]{2} \\| [0-9]+\\.[0-9]{2} ms \\| \
[0-9]+\\.[0-9]%DTYPE MFU \\| [0-9]+ tok/s"
json_step="\\{\"step\":[0-9]+,\"tokens\":[0-9]+,\"loss\":$num,\"norm\":$num,\"lr\":$num,\
\"ms\":$num,\"tok_per_s\":$num,\"mfu\":$num,\"skipped\":(true|false)\\}"
json_val="\\{\"step\":[0-9]+,\"tokens\":[0-9]+,\"(val_loss|eval)\":$num\\}"

# ---- lines and files ----

case_lines_of_the_log() {
    train --steps 12 --val-every 4 >"$scratch/fp32"
    train --steps 12 --val-every 4 --dtype bf16 >"$scratch/bf16"
    [ "$(grep -cxE "${step_line/DTYPE/}" "$scratch/fp32")" -eq 12 ]
    [ "$(grep -cxE "${step_line/DTYPE/ bf16}" "$scratch/bf16")" -eq 12 ]
    [ "$(grep -cxE 'step +[0-9]+/12 \| val loss [0-9]+\.[0-9]{6}' "$scratch/fp32")" -eq 4 ]
    grep -q '^step  1/12 | loss 5\.' "$scratch/fp32"
    grep -q '^step 12/12 | loss ' "$scratch/fp32"
}

case_main_log() {
    train --steps 12 --val-every 4 --lr 1e-3 --schedule linear --lr-final 0 --out "$scratch/run" \
        >/dev/null
    [ "$(grep -cxE 's:[0-9]+ trl:[0-9]+\.[0-9]{4} lr:0\.[0-9]{6} norm:[0-9]+\.[0-9]{2}' \
        "$scratch/run/main.log")" -eq 12 ]
    [ "$(grep -cxE 's:[0-9]+ tel:[0-9]+\.[0-9]{4}' "$scratch/run/main.log")" -eq 4 ]
    [ "$(wc -l <"$scratch/run/main.log")" -eq 16 ]
    # Validation at a step comes before it.
    grep -n . "$scratch/run/main.log" | cut -d ' ' -f 1 | tr '\n' ' ' >"$scratch/order"
    [ "$(cat "$scratch/order")" = '1:s:0 2:s:0 3:s:1 4:s:2 5:s:3 6:s:4 7:s:4 8:s:5 9:s:6 10:s:7 '\
'11:s:8 12:s:8 13:s:9 14:s:10 15:s:11 16:s:12 ' ]
    grep -q '^s:6 .* lr:0.000500 ' "$scratch/run/main.log"
}

case_metrics_are_json() {
    train --steps 12 --val-every 4 --out "$scratch/run" >/dev/null
    [ "$(grep -cxE "$json_step" "$scratch/run/metrics.jsonl")" -eq 12 ]
    [ "$(grep -cxE "$json_val" "$scratch/run/metrics.jsonl")" -eq 4 ]
    [ "$(wc -l <"$scratch/run/metrics.jsonl")" -eq 16 ]
    grep -q '^{"step":0,"tokens":0,"val_loss":5' "$scratch/run/metrics.jsonl"
    grep -q '^{"step":0,"tokens":64,"loss":5' "$scratch/run/metrics.jsonl"
    grep -q '^{"step":12,"tokens":768,"val_loss":' "$scratch/run/metrics.jsonl"
}

case_log_json_leaves_stdout_pure() {
    train --steps 6 --val-every 3 --sample-every 3 --log-json --out "$scratch/run" \
        >"$scratch/stdout" 2>"$scratch/stderr"
    [ "$(grep -cxE "$json_step" "$scratch/stdout")" -eq 6 ]
    [ "$(grep -cxE "$json_val" "$scratch/stdout")" -eq 3 ]
    cmp "$scratch/stdout" "$scratch/run/metrics.jsonl"
    # What is for people is still there.
    [ "$(grep -cxE "${step_line/DTYPE/}" "$scratch/stderr")" -eq 6 ]
    grep -q '^model: 2 layers' "$scratch/stderr"
}

# Elements nest, and text holds no bare < or &.
well_formed() {
    awk 'BEGIN { RS = "<" }
        NR == 1 { if ($0 ~ /[^ \n]/) bad = "text before the first element"; next }
        {
            end = index($0, ">")
            if (!end) { bad = "no > in: " $0; exit }
            tag = substr($0, 1, end - 1)
            text = substr($0, end + 1)
            gsub(/&(amp|lt|gt|quot|#[0-9]+);/, "", text)
            if (text ~ /[&>]/) bad = "text: " text
            if (tag ~ /^[?!]/) next
            split(tag, word, /[ \n\/]/)
            if (tag ~ /^\//) { if (open[depth--] != word[2]) bad = "closed: " tag }
            else if (tag !~ /\/$/) open[++depth] = word[1]
            if (gsub(/"/, "", tag) % 2) bad = "quotes: " tag
        }
        END { if (depth) bad = "not closed: " open[depth]
              if (bad) print bad
              exit bad != "" }' "$1"
}

case_the_picture() {
    train --steps 12 --val-every 4 --out "$scratch/run" >/dev/null
    well_formed "$scratch/run/loss.svg"
    head -n 3 "$scratch/run/loss.svg" | grep -q '<svg .*xmlns="http://www.w3.org/2000/svg"'
    ! command -v xmllint >/dev/null || xmllint --noout "$scratch/run/loss.svg"
    # It can fail.
    sed 's|</svg>||' "$scratch/run/loss.svg" >"$scratch/bad.svg"
    fails well_formed "$scratch/bad.svg"
}

case_memory_table_adds_up() {
    train --steps 1 >"$scratch/log"
    awk '/^device memory/ { on = 1; next }
        on && /arena, sealed/ { total = $3; on = 0 }
        on { sum += $NF }
        END { print sum, total; exit !(sum > 0 && sum <= total && sum > 0.95 * total) }' \
        "$scratch/log"
    grep -q '^device: cpu: .*, 1 thread, fp32$' "$scratch/log"
    grep -qE '^model: 2 layers, 32 channels, 2 heads, vocabulary 257 .*: [0-9]+ parameters$' \
        "$scratch/log"
    grep -qE '^data: [0-9]+ rows of 16 tokens in [0-9]+ shards; validation: [0-9]+ rows$' \
        "$scratch/log"
}

case_help_and_version() {
    train_gpt --help >"$scratch/help" 2>"$scratch/stderr"
    [ ! -s "$scratch/stderr" ]
    local name
    for name in train val model layers hidden heads vocab max-seq out micro-batch seq total-batch \
        steps lr warmup lr-final schedule weight-decay beta1 beta2 eps clip no-guard skip-loss-z \
        skip-norm-z val-every val-batches sample-every sample-tokens temperature top-k prompt \
        checkpoint-every keep major-every resume overfit-batch eval device threads dtype seed \
        generate log-json; do
        grep -qE -- "--$name( |\$)" "$scratch/help" || { echo "--$name is missing" && return 1; }
    done
    for name in 'i +--train' 'j +--val' 'e +--model' 'o +--out' 'b +--micro-batch' 't +--seq' \
        'd +--total-batch' 'x +--steps' 'l +--lr' 'u +--warmup' 'q +--lr-final' 'k +--schedule' \
        'c +--weight-decay' 'sl +--skip-loss-z' 'sg +--skip-norm-z' 'v +--val-every' \
        'm +--val-batches' 's +--sample-every' 'g +--sample-tokens' 'n +--checkpoint-every' \
        'nk +--keep' 'nm +--major-every' 'y +--resume' 'a +--overfit-batch'; do
        grep -qE -- "^ *-$name" "$scratch/help" || { echo "-$name is missing" && return 1; }
    done
    train_gpt --version | grep -q '^train_gpt [0-9]'
}

# ---- the batch, the schedule, validation ----

case_defaults_of_the_contract() {
    train_gpt -i "$data/a_train*.bin" --layers 1 --hidden 16 --heads 1 --seq 64 --threads 1 \
        >"$scratch/log"
    # One epoch of 4 rows; validation and sample at every 20th step.
    local rows
    rows=$(sed -n 's/^data: \([0-9]*\) rows.*/\1/p' "$scratch/log")
    grep -q "^step: 1 x 4 rows of 64 = 256 tokens; $((rows / 4)) steps\$" "$scratch/log"
    [ "$(grep -c '^step .* | loss' "$scratch/log")" -eq $((rows / 4)) ]
    grep -q '^step  0/.* | val loss ' "$scratch/log"
    grep -q '^step 20/.* | val loss ' "$scratch/log"
    grep -q '^generating:$' "$scratch/log"
    grep -q ' lr 3.00e-04 ' "$scratch/log"
}

# 3 rows of validation, batches of 16.
case_fewer_validation_rows_than_a_batch() {
    local b
    # shellcheck disable=SC2046 # numbers
    shard $(seq 100 148) >"$scratch/v.bin"
    for b in 1 2 16; do
        train_gpt -i "$data/a_train*.bin" -j "$scratch/v.bin" "${tiny[@]}" --steps 0 --val-every 1 \
            --micro-batch $b >"$scratch/$b"
        sed -n 's/^step .*val loss //p' "$scratch/$b" >"$scratch/$b.loss"
    done
    close_to 1e-6 "$scratch/1.loss" "$scratch/2.loss"
    close_to 1e-6 "$scratch/1.loss" "$scratch/16.loss"
}

case_validation_changes_nothing() {
    train --steps 8 --out "$scratch/a" >/dev/null
    train --steps 8 --val-every 2 --sample-every 3 --out "$scratch/b" >/dev/null
    cmp "$scratch/a/model_00000008.bin" "$scratch/b/model_00000008.bin"
}

case_accumulation_is_one_large_batch() {
    train --steps 10 --micro-batch 16 --out "$scratch/a" >/dev/null
    train --steps 10 --micro-batch 2 --total-batch 256 --out "$scratch/b" >/dev/null
    losses "$scratch/a/metrics.jsonl" >"$scratch/a.losses"
    losses "$scratch/b/metrics.jsonl" >"$scratch/b.losses"
    close_to 1e-6 "$scratch/a.losses" "$scratch/b.losses"
}

case_overfitting_one_batch() {
    train --steps 120 --overfit-batch --lr 1e-2 --out "$scratch/run" >/dev/null
    [ "$(losses "$scratch/run/metrics.jsonl" | tail -n 1 | cut -d . -f 1)" -eq 0 ]
}

# --model FILE goes on from the parameters of a file.
case_a_model_file_to_begin_with() {
    train --steps 20 --lr 1e-2 --val-every 20 --out "$scratch/a" >/dev/null
    train_gpt -i "$data/a_train*.bin" --model "$scratch/a/model_00000020.bin" --seq 16 --steps 0 \
        --threads 1 --out "$scratch/b" >/dev/null
    grep '^s:20 tel:' "$scratch/a/main.log" | cut -d ' ' -f 2 >"$scratch/loss"
    grep '^s:0 tel:' "$scratch/b/main.log" | cut -d ' ' -f 2 | cmp - "$scratch/loss"
    # A bf16 file makes a bf16 run, unless told otherwise.
    train --steps 2 --dtype bf16 --out "$scratch/c" >/dev/null
    train_gpt -i "$data/a_train*.bin" --model "$scratch/c/model_00000002.bin" --seq 16 --steps 1 \
        --threads 1 --val-every 0 | grep -q 'bf16 MFU'
}

# ---- sampling ----

# A text of one habit, which is learnt in a second.
make_habit() {
    mkdir -p "$tap_scratch/habit"
    awk 'BEGIN { for (i = 0; i < 1200; i++) printf "the cat sat. " }' |
        "$bin/tokenize" - -o "$tap_scratch/habit/h" --plain >/dev/null
    train_gpt -i "$tap_scratch/habit/h_train*.bin" "${tiny[@]}" --seq 32 --steps 250 --lr 1e-2 \
        --warmup 10 --lr-final 0.1 --out "$tap_scratch/habit/run" >/dev/null
}
make_habit
habit=$tap_scratch/habit/run/model_00000250.bin
generate() {
    train_gpt -i "$tap_scratch/habit/h_train*.bin" --model "$habit" --threads 1 --generate "$@"
}

case_generate_prints_text_and_nothing_else() {
    generate --prompt 'the cat ' --sample-tokens 18 --temperature 0 >"$scratch/text" \
        2>"$scratch/stderr"
    [ "$(cat "$scratch/text")" = 'the cat sat. the cat sat. ' ]
    grep -q '^model: ' "$scratch/stderr"
}

case_generate_depends_on_the_seed_alone() {
    local t
    for t in 1 2; do
        generate --sample-tokens 30 --temperature 3 --seed 5 --threads $t >"$scratch/$t" \
            2>/dev/null
    done
    generate --sample-tokens 30 --temperature 3 --seed 6 >"$scratch/other" 2>/dev/null
    cmp "$scratch/1" "$scratch/2"
    differ "$scratch/1" "$scratch/other"
    # One candidate leaves nothing to chance.
    generate --sample-tokens 30 --temperature 3 --top-k 1 --seed 6 >"$scratch/k" 2>/dev/null
    generate --sample-tokens 30 --temperature 0 >"$scratch/0" 2>/dev/null
    cmp "$scratch/k" "$scratch/0"
}

# More text than the model has positions (32): it goes on from the later half.
case_generate_beyond_the_positions() {
    generate --prompt 'the cat ' --sample-tokens 122 --temperature 0 >"$scratch/text" 2>/dev/null
    [ "$(cat "$scratch/text")" = "$(for _ in $(seq 10); do printf 'the cat sat. '; done)" ]
}

case_generate_without_a_tokenizer_prints_tokens() {
    mkdir "$scratch/d"
    cp "$tap_scratch"/habit/h_train* "$scratch/d"
    train_gpt -i "$scratch/d/h_train*.bin" --model "$habit" --threads 1 --generate \
        --sample-tokens 5 --temperature 0 2>/dev/null | grep -qxE '([0-9]+ ){5}'
}

case_samples_while_training() {
    train --steps 6 --sample-every 3 --sample-tokens 9 --prompt 'line 12' >"$scratch/log"
    [ "$(grep -c '^generating:$' "$scratch/log")" -eq 2 ]
    [ "$(grep -c '^---$' "$scratch/log")" -eq 4 ]
    [ "$(grep -c '^line 12' "$scratch/log")" -eq 2 ]
}

# ---- evaluation ----

# example INDEX LABEL: "the cat " + one of four words of which the model knows one
bytes() {
    printf '%s' "$1" | od -An -v -tu1
}
example() {
    local -a context words=()
    local word
    read -r -d '' -a context < <(bytes 'the cat ') || true
    for word in 'ran.' 'sat.' 'is' 'sits down.'; do
        local -a tokens
        read -r -d '' -a tokens < <(bytes "$word") || true
        words+=("${#tokens[@]}" "${tokens[@]}")
    done
    le16 65535 $((2 * (6 + ${#context[@]} + ${#words[@]}))) "$1" "$2" 4 "${#context[@]}" \
        "${context[@]}" "${words[@]}"
}
case_evaluation_knows_what_is_right() {
    { header 20240522 1 4 76 && example 0 1 && example 1 1 && example 2 0 && example 3 1; } \
        >"$scratch/e.bin"
    train_gpt -i "$tap_scratch/habit/h_train*.bin" --model "$habit" --steps 0 --threads 1 \
        --seq 20 --micro-batch 3 --eval "$scratch/e.bin" --out "$scratch/run" >"$scratch/log"
    grep -qx 's:0 eval:0.7500' "$scratch/run/main.log"
    grep -qx '{"step":0,"tokens":0,"eval":0.75}' "$scratch/run/metrics.jsonl"
    grep -q '^step 0/0 | eval 0.750000$' "$scratch/log"
}

# ---- llm.c's scripts ----

# The flags of its run_gpt2_124M.sh and pyrun scripts, with the values made small.
case_run_scripts_of_llm_c() {
    local out=$scratch/log124M
    "$bin/train_gpt" \
        -i "$data/a_train_*.bin" \
        -j "$data/a_val_*.bin" \
        -o "$out" \
        -v 4 -s 5 -g 14 \
        -h 0 \
        -b 4 -t 16 \
        -d 128 \
        -r 0 \
        -z 1 \
        -c 0.1 \
        -l 0.0006 \
        -q 0.0 \
        -u 2 \
        -n 5 -nk 2 -nm 10 -ge 0 -f 1 -sl 3.0 -sg 3.0 \
        -y 1 \
        -x 8 \
        -e "d6" --layers 2 --hidden 32 --heads 2 --threads 1 >"$scratch/log" 2>"$scratch/stderr"
    [ -e "$out/DONE_00000008" ] # what the scripts wait for
    [ -e "$out/model_00000008.bin" ]
    [ "$(grep -cE '^s:[0-9]+ trl:' "$out/main.log")" -eq 8 ]
    grep -qE '^note: .*-z 1' "$scratch/log"
    grep -qE '^note: .*-r 0' "$scratch/log"
    [ ! -s "$scratch/stderr" ]
    # A second time there is something to resume.
    "$bin/train_gpt" -i "$data/a_train_*.bin" -j "$data/a_val_*.bin" -o "$out" -y 1 -x 10 \
        --threads 1 | grep -q '^resume: .*, step 8$'
}
case_help_of_llm_c() {
    train_gpt -h | grep -q '^Usage: train_gpt'
    # -h 1 is HellaSwag, where the file is.
    train -h 1 --steps 1 | grep -q '^note: .*hellaswag_val.bin is not here'
}

run_cases
