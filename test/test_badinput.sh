#!/usr/bin/env bash
# Bad input gets one clear line and exit status 1 (data) or 2 (usage); never a signal, and never a
# default in its place.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

data=$tap_scratch/data
make_data "$data/a" 200
train_gpt -i "$data/a_train*.bin" "${tiny[@]}" --steps 2 --out "$tap_scratch/good" >/dev/null
model=$tap_scratch/good/model_00000002.bin
good=(-i "$data/a_train*.bin" "${tiny[@]}" --steps 2)

# ---- token shards ----

# bad_shard PATH PATTERN: as training data and as validation data
bad_shard() {
    refused 1 "${1//\*/\\*}.*$2" "${tiny[@]}" --steps 2 -i "$1"
    refused 1 "${1//\*/\\*}.*$2" "${good[@]}" --val-every 1 -j "$1"
}

case_shards_missing() {
    bad_shard "$scratch/none.bin" 'no token shard matches; .*tokenize'
    bad_shard "$scratch/nothing*.bin" 'no token shard matches; .*tokenize'
    refused 2 '--train .*empty' -i ''
}
case_shards_empty() {
    : >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" 'empty file \(0 bytes\)'
}
case_shards_without_a_whole_header() {
    head -c 1023 "$data/a_train_000000.bin" >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" '1023 bytes.*1024'
}
case_shards_cut_short() {
    head -c 7023 "$data/a_train_000000.bin" >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" 'cut short: 7023 bytes, expected 7024 .*3000 tokens'
}
case_shards_over_long() {
    { cat "$data/a_train_000000.bin" && echo; } >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" 'too long: 7025 bytes, expected 7024 .*3000 tokens'
}
case_shards_of_no_kind() {
    { header 12345 1 100 && head -c 200 /dev/zero; } >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" '12345.*20240520'
}
case_shards_that_are_something_else() {
    bad_shard "$model" 'is a model, .*20240326, expected 20240520'
    bad_shard "$data/a_tokenizer.bin" 'is a tokenizer, .*20240328, expected 20240520'
}
case_shards_of_another_version() {
    { header 20240520 2 100 && head -c 200 /dev/zero; } >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" 'version 2, .*expected 1'
}
case_shards_that_are_folders() {
    mkdir "$scratch/a.bin"
    bad_shard "$scratch/a.bin" ''
}
case_shards_smaller_than_a_row() {
    shard 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 >"$scratch/a.bin"
    bad_shard "$scratch/a.bin" '16 tokens.*--seq'
}
# 33 tokens, of which the vocabulary does not have the 21st.
case_a_token_beyond_the_vocabulary() {
    # shellcheck disable=SC2046 # numbers
    shard $(seq 20) 777 $(seq 12) >"$scratch/a.bin"
    refused 1 "$scratch/a.bin: token 777 at position 20, .* 300 tokens" "${tiny[@]}" --vocab 300 \
        --steps 2 -i "$scratch/a.bin"
    refused 1 "$scratch/a.bin: token 777 at position 20, .* 257 tokens" "${good[@]}" \
        --val-every 1 -j "$scratch/a.bin"
    # The last token of a row is only a target, and is looked at too.
    # shellcheck disable=SC2046
    shard $(seq 16) 300 >"$scratch/a.bin"
    refused 1 "$scratch/a.bin: token 300 at position 16, " "${tiny[@]}" --vocab 300 --steps 2 \
        -i "$scratch/a.bin"
}
case_one_bad_shard_of_many() {
    cp "$data"/a_train* "$data/a_tokenizer.bin" "$scratch"
    truncate -s -2 "$scratch/a_train_000001.bin"
    refused 1 "a_train_000001.bin" "${tiny[@]}" -i "$scratch/a_train*.bin"
}
case_fewer_rows_than_a_step() {
    # shellcheck disable=SC2046
    shard $(seq 40) >"$scratch/a.bin"
    refused 1 '2 rows of 16 .*--steps' "${tiny[@]}" -i "$scratch/a.bin"
}

# ---- model files ----

# bad_model FILE PATTERN: to go on from, and to generate from
bad_model() {
    refused 1 "$1.*$2" -i "$data/a_train*.bin" --model "$1" --steps 2 --threads 1
    refused 1 "$1.*$2" -i "$data/a_train*.bin" --model "$1" --generate --threads 1
}
# patched WORD VALUE: a copy of the model with another number in its header
patched() {
    cp "$model" "$scratch/m.bin"
    le32 "$2" | poke "$scratch/m.bin" $((4 * $1))
}

case_models_missing() {
    bad_model "$scratch/none.bin" 'No such file'
}
case_models_empty() {
    : >"$scratch/m.bin"
    bad_model "$scratch/m.bin" '0 bytes'
}
case_models_without_a_whole_header() {
    head -c 1000 "$model" >"$scratch/m.bin"
    bad_model "$scratch/m.bin" '1000 bytes.*1024'
}
case_models_cut_short() {
    local size
    size=$(stat -c %s "$model")
    head -c $((size - 4)) "$model" >"$scratch/m.bin"
    bad_model "$scratch/m.bin" "$((size - 4)).*$size|$size.*$((size - 4))"
}
case_models_over_long() {
    local size
    size=$(stat -c %s "$model")
    { cat "$model" && printf x; } >"$scratch/m.bin"
    bad_model "$scratch/m.bin" "$((size + 1)).*$size|$size.*$((size + 1))"
}
case_models_of_no_kind() {
    patched 0 4711
    bad_model "$scratch/m.bin" '4711.*20240326'
    bad_model "$data/a_train_000000.bin" '20240520.*20240326'
}
case_models_of_other_versions() {
    local v
    for v in 1 2 4 6; do
        patched 1 $v
        bad_model "$scratch/m.bin" "version $v.*3.*5"
    done
}
case_models_of_shapes_that_cannot_be() {
    local field
    for field in '2 0' '3 0' '4 0' '5 0' '5 3' '6 0' '7 100' '2 4294967295' '6 4294967295'; do
        # shellcheck disable=SC2086 # two words
        patched $field
        bad_model "$scratch/m.bin" ''
    done
}
case_rows_longer_than_the_model_file_has_positions() {
    refused 2 '--seq 33: .*32 tokens' -i "$data/a_train*.bin" --model "$model" --seq 33
}
case_shape_options_against_a_model_file() {
    refused 2 '--layers 5: .*has 2, .*shape' -i "$data/a_train*.bin" --model "$model" --layers 5
    refused 2 '--max-seq 64: .*has 32, .*shape' -i "$data/a_train*.bin" --model "$model" \
        --max-seq 64
}
case_a_model_with_fewer_tokens_than_the_data() {
    train_gpt "${good[@]}" --vocab 300 --out "$scratch/run" >/dev/null
    make_data "$scratch/b"
    train_gpt -i "$scratch/b_train*.bin" --model "$scratch/run/model_00000002.bin" --steps 1 \
        --seq 16 --threads 1 --val-every 0 >/dev/null
    refused 1 'b_train_.*bin: token [0-9]* at position .* has 64 tokens' "${tiny[@]}" --vocab 64 \
        -i "$scratch/b_train*.bin"
}

# planted OFFSET TENSOR: a NaN in the model file, at an element
planted() {
    cp "$model" "$scratch/m.bin"
    le32 2143289344 | poke "$scratch/m.bin" $((1024 + 4 * $1)) # 0x7fc00000
    local rc=0
    train_gpt -i "$data/a_train*.bin" --model "$scratch/m.bin" --seq 16 --steps 5 --threads 1 \
        --val-every 0 --sample-every 0 --out "$scratch/run" >"$scratch/log" 2>"$scratch/stderr" ||
        rc=$?
    cat "$scratch/stderr"
    [ "$rc" -eq 1 ]
    grep -qE "^step 1: loss -?nan, .*first tensor that is not finite: .*$2" "$scratch/stderr"
    tail -n 1 "$scratch/stderr" | grep -qE "^train_gpt: step 1: not finite: .*$2"
    fails compgen -G "$scratch/run/state_*"
    rm -r "$scratch/run"
}
# 2 layers, C 32, Vp 384, 32 positions: tensors in the order of the file
case_a_nan_in_the_model_names_step_and_tensor() {
    local wpe=$((384 * 32)) ln1w qkvw fcb lnfw
    ln1w=$((wpe + 32 * 32))
    qkvw=$((ln1w + 4 * 32))
    fcb=$((qkvw + 2 * (3 * 32 * 32 + 3 * 32 + 32 * 32 + 32 + 2 * 32 + 4 * 32 * 32)))
    lnfw=$((fcb + 2 * (4 * 32 + 4 * 32 * 32 + 32)))
    planted $((32 * 101)) 'wte of unit 0' # the letter e
    planted $wpe 'wpe of unit 0'
    planted $ln1w 'ln1w of unit 1'
    planted $((qkvw + 3 * 32 * 32 + 7)) 'qkvw of unit 2'
    planted $fcb 'fcb of unit 1'
    planted $lnfw 'lnfw of unit 0'
}

case_a_rate_that_destroys_the_model_names_step_and_tensor() {
    local rc=0
    train_gpt -i "$data/a_train*.bin" "${tiny[@]}" --lr 10 --clip 0 --no-guard --eps 1e-30 \
        --beta2 0 --steps 2000 >"$scratch/log" 2>"$scratch/stderr" || rc=$?
    tail -n 2 "$scratch/stderr"
    [ "$rc" -le 1 ] # it may survive
    [ "$rc" -eq 0 ] || grep -qE '^train_gpt: step [0-9]+: not finite: .' "$scratch/stderr"
}

# ---- training states ----

# bad_state PATTERN
bad_state() {
    refused 1 "state_00000002.bin.*$1" -i "$data/a_train*.bin" --out "$scratch/run" --resume \
        --threads 1
}
case_states_that_are_none() {
    cp -r "$tap_scratch/good" "$scratch/run"
    local state=$scratch/run/state_00000002.bin
    cp "$model" "$state"
    bad_state 'not a training state.*model'
    head -c 5000 /dev/urandom >"$state"
    bad_state 'not a training state'
    cp "$tap_scratch/good/state_00000002.bin" "$state"
    le32 2 | poke "$state" 8
    bad_state 'version 2, expected 1'
    cp "$tap_scratch/good/state_00000002.bin" "$scratch/run/state_00000009.bin"
    refused 1 'state_00000009.bin.*renamed|none of 2' -i "$data/a_train*.bin" \
        --out "$scratch/run" --resume
}

# ---- tokenizers ----

bad_tokenizer() {
    refused 1 "$scratch/a_tokenizer.bin.*$1" "${tiny[@]}" --steps 2 -i "$scratch/a_train*.bin"
}
case_tokenizers_that_are_none() {
    local file=$scratch/a_tokenizer.bin of=$data/a_tokenizer.bin
    cp "$data"/a_train* "$scratch"
    : >"$file"
    bad_tokenizer '0 bytes|empty|short'
    head -c 1000 "$of" >"$file"
    bad_tokenizer '1000 bytes.*1024'
    head -c 1200 "$of" >"$file"
    bad_tokenizer ''
    { cat "$of" && echo; } >"$file"
    bad_tokenizer ''
    cp "$of" "$file"
    le32 4711 | poke "$file" 0
    bad_tokenizer '4711.*20240328'
    cp "$of" "$file"
    le32 9 | poke "$file" 4
    bad_tokenizer 'version 9.*2'
    cp "$of" "$file"
    le32 100000 | poke "$file" 8
    bad_tokenizer ''
    cp "$of" "$file"
    le32 257 | poke "$file" 12
    bad_tokenizer 'end-of-text.*257'
    cp "$of" "$file"
    printf '\0' | poke "$file" 1024
    bad_tokenizer ''
}

# ---- evaluation files ----

bad_eval() {
    refused 1 "$scratch/e.bin.*$1" "${good[@]}" --val-every 1 --eval "$scratch/e.bin"
}
case_evaluation_files_that_are_none() {
    local file=$scratch/e.bin
    # One example: 5 tokens of context and completions of 2, 1, 2, 3; the third is right.
    header 20240522 1 1 46 >"$scratch/good.bin"
    le16 65535 46 0 2 4 5 101 102 103 104 105 2 97 98 1 98 2 99 100 3 97 98 99 >>"$scratch/good.bin"
    train_gpt "${good[@]}" --val-every 1 --eval "$scratch/good.bin" >/dev/null
    bad_eval 'No such file'
    : >"$file"
    bad_eval '0 bytes|empty|short'
    head -c 1000 "$scratch/good.bin" >"$file"
    bad_eval '1000 bytes.*1024'
    head -c 1050 "$scratch/good.bin" >"$file"
    bad_eval ''
    { cat "$scratch/good.bin" && le16 7; } >"$file"
    bad_eval ''
    cp "$scratch/good.bin" "$file"
    le32 20240520 | poke "$file" 0
    bad_eval '20240520.*20240522'
    cp "$scratch/good.bin" "$file"
    le32 2 | poke "$file" 4
    bad_eval 'version 2.*1'
    cp "$scratch/good.bin" "$file"
    le32 2 | poke "$file" 8
    bad_eval 'example 1'
    cp "$scratch/good.bin" "$file"
    le16 4 | poke "$file" $((1024 + 6)) # the label
    bad_eval 'example 0.*label is 4'
    cp "$scratch/good.bin" "$file"
    le16 5 | poke "$file" $((1024 + 8)) # the number of completions
    bad_eval 'example 0.* 5.*4'
    cp "$scratch/good.bin" "$file"
    le16 300 | poke "$file" $((1024 + 12)) # a token
    bad_eval 'example 0.*token 300.*257'
    # Rows of 7 tokens are needed.
    refused 1 "$scratch/good.bin.*--seq 7" "${good[@]}" --seq 6 --val-every 1 \
        --eval "$scratch/good.bin"
}

# ---- the command line ----

# usage OPTION VALUE PATTERN
usage() {
    refused 2 "$3" "${good[@]}" "$1" "$2"
    grep -qF -- "$1" "$scratch/stderr"
    grep -qF -- "$2" "$scratch/stderr"
}
case_values_out_of_range_or_unparsable() {
    usage --layers 0 '1 to 1000'
    usage --lr 11 '0 to 10'
    usage --lr x 'not a number.*0 to 10'
    usage --steps 1.5 'not a whole number'
    usage --micro-batch -4 '1 to '
    usage --schedule cosin 'cosine\|linear\|constant\|wsd'
    usage --dtype fp16 'fp32\|bf16'
    usage --device tpu 'auto\|cpu'
    usage --beta2 1 'to 0.999999'
    usage --seed 4294967296 '0 to'
    usage --threads 5000 '0 to 4096'
    usage --top-k 1T 'not a whole number'
    usage --no-guard 2 '0 or 1|unknown'
}
case_options_unknown_or_without_a_value() {
    refused 2 "unknown option '--lrr'.*--lr" --lrr 1
    refused 2 "unknown option 'data.bin'" data.bin
    refused 2 "unknown option '-Q'" -Q 1
    refused 2 '--steps.*missing.*0 to' --steps
    refused 2 '--steps.*missing' --steps --lr 1
}
case_shapes_and_batches_that_do_not_fit() {
    refused 2 'hidden.*33.*heads.*2|heads.*2.*hidden.*33' -i "$data/a_train*.bin" --layers 1 \
        --hidden 33 --heads 2
    refused 2 '--total-batch 100 .*multiple.*4 x --seq 16.*64' "${good[@]}" --total-batch 100
    refused 2 '--total-batch 32 .*multiple' "${good[@]}" --total-batch 32
    refused 2 '--seq 33: .*32' "${good[@]}" --seq 33
    refused 2 '--model d7: .*d6.*gpt3' -i "$data/a_train*.bin" --model d7
    refused 2 '--generate .*--model' -i "$data/a_train*.bin" --generate
    refused 2 '--checkpoint-every.*--out' "${good[@]}" -n 1
}
# Sizes that no machine has: a message, not a crash nor an overflow.
case_models_that_fit_nowhere() {
    local why='training needs [0-9]* bytes of this machine.s memory.*a smaller model'
    refused 1 "$why" -i "$data/a_train*.bin" --layers 1000 --hidden 65536 --heads 1024 --seq 16
    refused 1 "$why" "${good[@]}" --micro-batch 65536 --max-seq 1Mi --seq 300 \
        --hidden 65536
}
case_a_prompt_without_a_tokenizer() {
    cp "$data"/a_train* "$scratch"
    refused 2 '--prompt needs the tokenizer' "${tiny[@]}" -i "$scratch/a_train*.bin" --vocab 257 \
        --prompt Hello --sample-every 1 --steps 1
    refused 2 '--prompt needs the tokenizer' -i "$scratch/a_train*.bin" --model "$model" \
        --threads 1 --generate --prompt Hello
}

# ---- the output folder: found at start ----

case_out_cannot_be_made() {
    : >"$scratch/file"
    refused 1 "$scratch/file" "${good[@]}" --out "$scratch/file"
    refused 1 "$scratch/file/run" "${good[@]}" --out "$scratch/file/run"
    refused 1 /proc/none "${good[@]}" --out /proc/none
}
case_out_is_not_writable() {
    mkdir "$scratch/run"
    if [ "$(id -u)" -eq 0 ]; then
        # Root may write anywhere but on what cannot be written.
        refused 1 'cannot write into directory /proc' "${good[@]}" --out /proc
    else
        chmod 555 "$scratch/run"
        refused 1 "cannot write into directory $scratch/run" "${good[@]}" --out "$scratch/run"
    fi
}

# A process may have a limit on the size of its files: an error at start, not SIGXFSZ.
case_a_limit_on_the_size_of_files() {
    ulimit -f 100
    refused 1 'state has .*ulimit -f' "${good[@]}" --out "$scratch/run"
    fails compgen -G "$scratch/run/*.bin"
}
# What is not known at start: the file that passes the limit is the log.
case_a_limit_on_the_size_of_files_that_grow() {
    local rc=0
    ulimit -f 20
    train_gpt -i "$data/a_train*.bin" "${tiny[@]}" --layers 1 --hidden 2 --steps 1000 \
        --out "$scratch/run" >"$scratch/log" 2>"$scratch/stderr" || rc=$?
    cat "$scratch/stderr"
    [ "$rc" -eq 1 ]
    tail -n 1 "$scratch/stderr" | grep -q '^train_gpt: cannot write .*: File too large'
}

# with_disk KB COMMAND...: with a file system of that size at $scratch/disk, in a mount namespace
with_disk() {
    local kb=$1
    shift
    mkdir "$scratch/disk"
    mount -t tmpfs -o size="$kb"k none "$scratch/disk"
    trap 'umount "$scratch/disk"' EXIT
    "$@"
}
no_room_at_start() {
    refused 1 "no room for checkpoints in $scratch/disk/run: .*needed.*free" "${good[@]}" -n 1 \
        --out "$scratch/disk/run"
    fails compgen -G "$scratch/disk/run/*.bin"
}
# The disk fills up behind its back: an error, and the last checkpoint is good.
disk_fills_up() {
    local pid line='' rc=0
    mkfifo "$scratch/pipe"
    "$bin/train_gpt" "${good[@]}" --steps 3000 -n 1000 --keep 1 --out "$scratch/disk/run" \
        >"$scratch/pipe" 2>"$scratch/stderr" &
    pid=$!
    exec 3<"$scratch/pipe"
    until [[ $line == 'step 1500/3000 | loss '* ]]; do
        IFS= read -r line <&3
    done
    head -c 100M /dev/zero >"$scratch/disk/other" 2>/dev/null || true
    cat <&3 >"$scratch/log"
    wait "$pid" || rc=$?
    cat "$scratch/stderr"
    [ "$rc" -eq 1 ]
    tail -n 1 "$scratch/stderr" | grep -q 'No space left on device'
    rm "$scratch/disk/other"
    train_gpt "${good[@]}" --steps 3000 -n 1000 --keep 1 --out "$scratch/disk/run" --resume \
        >"$scratch/log"
    grep -qE '^resume: .*, step (1000|2000)$' "$scratch/log"
    [ -e "$scratch/disk/run/state_00003000.bin" ]
}

for c in $(declare -F | sed -n 's/^declare -f \(case_\)/\1/p'); do
    tap_case "$(echo "${c#case_}" | tr _ ' ')" "$c"
done
probe=$tap_scratch/probe
mkdir "$probe"
if mount -t tmpfs -o size=64k none "$probe" 2>/dev/null && umount "$probe"; then
    tap_case 'a disk too small for the checkpoints is found at start' with_disk 900 no_room_at_start
    tap_case 'a disk that fills up leaves the last checkpoint' with_disk 4000 disk_fills_up
else
    tap_skip 'full disks' 'needs the right to mount a tmpfs'
fi
tap_done
