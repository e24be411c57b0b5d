#!/usr/bin/env bash
# What goes wrong for one of several ranks ends all of them soon, with a message that says what and
# where, and leaves the last checkpoint as it was.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
# shellcheck source=test/ranks.sh
. "$(dirname "$0")/ranks.sh"

# Starts a run of three ranks without end that writes into $scratch/out, and waits for its first
# checkpoint. Sets $job and $pids.
long_run() {
    launch -np 3 "$bin/train_gpt" "${model[@]}" -d 96 --steps 10000000 --checkpoint-every 20 \
        --keep 2 --out "$scratch/out" "$@" >"$scratch/log" 2>&1 &
    job=$!
    until_true compgen -G "$scratch/out/DONE_*"
    mapfile -t pids < <(ranks_of $job)
    [ ${#pids[@]} -eq 3 ]
}

# ended STATUS SECONDS: the run has, so soon, and so have all its ranks
ended() {
    local rc=0 started=$SECONDS pid
    wait $job || rc=$?
    tail -n 20 "$scratch/log"
    [ $rc -eq "$1" ]
    [ $((SECONDS - started)) -le "$2" ]
    for pid in "${pids[@]}"; do
        until_true fails kill -0 "$pid"
    done
}

# The newest checkpoint is whole: one process goes on from it.
goes_on() {
    local last
    last=$(find "$scratch/out" -name 'DONE_*' | sort | tail -n 1)
    last=$((10#${last##*_}))
    train_gpt "${model[@]}" -d 96 --steps $((last + 2)) --out "$scratch/out" --resume \
        >"$scratch/resumed" 2>&1
    grep "resume: .*, step $last\$" "$scratch/resumed"
    fails grep refused "$scratch/resumed"
}

# A file of the first rank's cannot become so large any more: as if the disk were full.
case_a_full_disk_at_a_checkpoint() {
    long_run
    prlimit --pid "${pids[0]}" --fsize=300000
    ended 1 30
    grep -a 'train_gpt: .*state_[0-9]*.bin' "$scratch/log"
    grep -a 'rank 0 of 3 .*state_[0-9]*.bin' "$scratch/log" # as the others have it
    fails compgen -G "$scratch/out/*.tmp"
    goes_on
}

# The second job refuses, with all its ranks; the first does not notice.
case_two_jobs_into_one_folder() {
    local rc=0 before
    long_run
    launch -np 2 "$bin/train_gpt" "${model[@]}" --steps 5 --out "$scratch/out" \
        >"$scratch/second" 2>&1 || rc=$?
    cat "$scratch/second"
    [ "$rc" -eq 1 ]
    grep -q 'out is in use by another run' "$scratch/second"
    grep -q 'rank 0 of 2 .*is in use by another run' "$scratch/second"
    before=$(wc -l <"$scratch/out/metrics.jsonl")
    until_true grows "$scratch/out/metrics.jsonl" "$before"
    kill -TERM "${pids[2]}"
    ended 143 30
    goes_on
}

grows() { # FILE LINES
    [ "$(wc -l <"$1")" -gt "$2" ]
}

# Of address space there is enough for MPI, but not for the activations of so many rows.
a_rank_out_of_memory() {
    local rc=0 started=$SECONDS large=("${model[@]}" --hidden 512 --heads 8 --micro-batch 512
        -d 24576 --steps 1)
    # shellcheck disable=SC2016 # for the shell that limits itself
    launch -np 1 "$bin/train_gpt" "${large[@]}" : -np 1 bash -c 'ulimit -v 800000; exec "$@"' - \
        "$bin/train_gpt" "${large[@]}" : -np 1 "$bin/train_gpt" "${large[@]}" \
        >"$scratch/log" 2>&1 || rc=$?
    tail -n 20 "$scratch/log"
    [ "$rc" -eq 1 ]
    [ $((SECONDS - started)) -le 30 ]
    grep -q 'rank 1 of 3 .*no memory for .*bytes' "$scratch/log"
}

# unlike TEXT PROGRAM [ARGUMENT...]: two ranks, the second another program and in another folder
unlike() {
    local rc=0
    launch -np 1 --wdir "$scratch/a" "$bin/train_gpt" "${model[@]}" "${@:3}" : \
        -np 1 --wdir "$scratch/b" "$2" "${model[@]}" "${@:3}" >"$scratch/log" 2>&1 || rc=$?
    cat "$scratch/log"
    [ "$rc" -eq 1 ]
    grep -q "the ranks are not started alike: $1" "$scratch/log"
    fails grep -a '| loss' "$scratch/log"
}

# Files of the same name: what is in them differs.
case_different_data() {
    mkdir "$scratch/a" "$scratch/b"
    cp "$data"/a_* "$scratch/a"
    cp "$data"/a_* "$scratch/b"
    printf '\1' | poke "$scratch/b/a_train_000000.bin" 1100
    unlike "the training data is '.*' on rank 0 and '.*' on rank 1" "$bin/train_gpt" \
        -i 'a_train*.bin' --steps 5
}

two_folders() {
    mkdir "$scratch/a" "$scratch/b"
    cp "$data"/a_* "$scratch/a"
    cp "$data"/a_* "$scratch/b"
}

# The units of the model are others, and so are the messages with which their costs are measured;
# with the same vocabulary samples end at other tokens.
case_different_tokenizers() {
    local words
    two_folders
    rm "$scratch"/b/a_tokenizer.bin
    for words in '--steps 5 --zero 2' '--steps 5 --vocab 50257' --plan-only; do
        # shellcheck disable=SC2086 # words
        unlike "the tokenizer is '[0-9a-f]*' on rank 0 and 'none' on rank 1" "$bin/train_gpt" \
            -i 'a_train*.bin' $words
    done
}

case_different_validation_data() {
    two_folders
    printf '\1' | poke "$scratch/b/a_val_000000.bin" 1100
    unlike "the validation data is '.*' on rank 0 and '.*' on rank 1" "$bin/train_gpt" \
        -i 'a_train*.bin' -j 'a_val*.bin' --val-every 2 --steps 5
}

case_different_model_files() {
    local folder
    two_folders
    for folder in a b; do
        train_gpt "${model[@]}" --steps 1 \
            --out "$scratch/$folder/out" >/dev/null
        mv "$scratch/$folder"/out/model_*.bin "$scratch/$folder/model.bin"
    done
    printf '\1' | poke "$scratch/b/model.bin" 2000
    unlike "the content of the model file or checkpoint is '.*' on rank 0" "$bin/train_gpt" \
        -i 'a_train*.bin' -e model.bin --steps 5
}

# It measures with the others, whose costs are not kept for it.
case_a_rank_without_a_cache() {
    local tries
    for tries in first second; do
        launch -np 1 "$bin/train_gpt" "${model[@]}" --steps 2 --zero 2 : -np 1 env -u HOME \
            -u XDG_CACHE_HOME "$bin/train_gpt" "${model[@]}" --steps 2 --zero 2
    done
}

# No rank stands still where another one waits for it.
case_a_loss_that_is_not_finite() {
    local rc plan started=$SECONDS
    for plan in '--zero 2' '--zero 3' '--policy stronghold'; do
        rc=0
        # shellcheck disable=SC2086 # words
        launch -np 3 "$bin/train_gpt" "${model[@]}" -d 96 --steps 400 --lr 10 --weight-decay 1 \
            --clip 0 --no-guard $plan >"$scratch/log" 2>&1 || rc=$?
        cat "$scratch/log"
        [ $rc -eq 1 ]
        [ "$(grep -ac 'first tensor that is not finite' "$scratch/log")" -eq 1 ]
    done
    [ $((SECONDS - started)) -le 60 ]
}

# Of one rank alone, in the middle of training.
case_data_that_cannot_be_read_any_more() {
    two_folders
    launch -np 1 --wdir "$scratch/a" "$bin/train_gpt" "${model[@]}" -i 'a_train*.bin' \
        --steps 10000000 -d 64 --out "$scratch/out" : -np 1 --wdir "$scratch/b" "$bin/train_gpt" \
        "${model[@]}" -i 'a_train*.bin' --steps 10000000 -d 64 --out "$scratch/out" \
        >"$scratch/log" 2>&1 &
    job=$!
    until_true grep -a '| loss' "$scratch/log"
    mapfile -t pids < <(ranks_of $job)
    local shard
    for shard in "$scratch"/b/a_train*; do
        printf '\377\377' | poke "$shard" 1100 # no token, and another time of change
    done
    ended 1 30
    grep -aq 'rank 1 of 2 .*a_train' "$scratch/log"
}

# The first one is the one that writes: others say how to go on.
case_the_first_rank_is_killed() {
    local rc=0 started=$SECONDS
    long_run
    kill -KILL "${pids[0]}"
    wait $job || rc=$?
    tail -n 20 "$scratch/log"
    [ $rc -ne 0 ]
    [ $((SECONDS - started)) -le 30 ]
    grep -aq 'rank 0 of 3 .* has ended without a word.*step [0-9]' "$scratch/log"
    grep -aq 'the last checkpoint is that of step [0-9]*, in .*/out: --resume' "$scratch/log"
    goes_on
}

case_different_plans() {
    mkdir "$scratch/a" "$scratch/b"
    launch -np 2 --wdir "$scratch/a" "$bin/train_gpt" "${model[@]}" --steps 1 --policy resident \
        --save-plan plan >/dev/null
    sed 's/^unit 0-2 keep\(.*\)/unit 0 keep\1\nunit 1-2 recompute\1/' "$scratch/a/plan" \
        >"$scratch/b/plan"
    differ "$scratch/a/plan" "$scratch/b/plan"
    unlike "the plan is '.*keep.*' on rank 0 and '.*recompute.*' on rank 1" "$bin/train_gpt" \
        --steps 5 --plan plan
}

# A copy of the program of which one instruction that does nothing is another one that does nothing.
different_builds() {
    local nop='\x66\x2e\x0f\x1f\x84\x00\x00\x00\x00'
    mkdir "$scratch/a" "$scratch/b"
    sed "0,/$nop\x00/s//$nop\x01/" "$bin/train_gpt" >"$scratch/b/train_gpt"
    chmod +x "$scratch/b/train_gpt"
    differ "$bin/train_gpt" "$scratch/b/train_gpt"
    unlike "the build is '.*, code [0-9a-f]*' on rank 0 and '.*' on rank 1" "$scratch/b/train_gpt" \
        --steps 5
}

case_different_options_of_the_plan() {
    local rc=0
    launch -np 1 "$bin/train_gpt" "${model[@]}" --device-memory 800K : \
        -np 1 "$bin/train_gpt" "${model[@]}" >"$scratch/log" 2>&1 || rc=$?
    cat "$scratch/log"
    [ "$rc" -eq 1 ]
    grep -q "not started alike: device-memory is '800000' on rank 0 and" "$scratch/log"
}

# One rank's signal while all make a sample: they end it at the same token.
case_a_signal_to_one_rank_during_a_sample() {
    long_run --sample-every 40 --sample-tokens 31 --policy zero-infinity --device-memory 800K
    until_true grep -a generating "$scratch/log"
    kill -TERM "${pids[1]}"
    ended 143 30
    grep -aq 'stopped by a signal after step' "$scratch/log"
    goes_on
}

if ldd "$bin/train_gpt" | grep -q 'lib[a-z]*san'; then
    tap_skip 'a rank out of memory' 'a sanitizer takes all address space'
else
    tap_case 'a rank out of memory' a_rank_out_of_memory
fi
if [ "$(uname -m)" = x86_64 ]; then
    tap_case 'different builds' different_builds
else
    tap_skip 'different builds' 'knows no such instruction but of x86-64'
fi
run_cases
