#!/usr/bin/env bash
# ./train_gpt under a plan, as a user sees it: what is refused and how, and that a cap, a policy, a
# plan file or chaos changes nothing but where and when things happen.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

export XDG_CACHE_HOME=$tap_scratch/cache # measured costs
machine=scripts/machines/a100-40g
data=$tap_scratch/data
make_data "$data/a"
small=("${tiny[@]}" --layers 4)
train() {
    train_gpt -i "$data/a_train*.bin" "${small[@]}" "$@"
}

# trained NAME ARGUMENT...: trains and leaves in $scratch the output as NAME, and what was computed,
# without times, as NAME.losses.
trained() {
    local name=$scratch/$1
    shift
    train "$@" >"$name" 2>"$name.err"
    sed -n -e 's/^\(step .* | norm [^|]*\)|.*/\1/p' -e '/ val loss /p' -e '/ skipped: /p' \
        "$name" >"$name.losses"
    [ -s "$name.losses" ]
}

# equal NAME NAME: the same text of losses, norms and validation losses
equal() {
    diff "$scratch/$1.losses" "$scratch/$2.losses"
}

# arena NAME SPACE: bytes that the run printed (device, pinned host, host); nothing: none
arena() {
    sed -n "/^$2 memory (bytes)/,/arena, sealed/s/.*arena, sealed *//p" "$scratch/$1"
}

# cap PERCENT ARGUMENT...: that much of the device memory which the run takes when all is resident
cap() {
    local percent=$1
    shift
    trained resident_need "$@" --steps 1
    echo $(($(arena resident_need device) * percent / 100))
}

# would_do OPTION: the number that the last refusal names for it
would_do() {
    sed -n "s/.*(--$1 \([0-9]*\) would do).*/\1/p" "$scratch/stderr"
}

refuse() {
    local status=$1 pattern=$2
    shift 2
    refused "$status" "$pattern" -i "$data/a_train*.bin" "${small[@]}" --steps 2 "$@"
}

# ---- bad input ----------------------------------------------------------------------------------

case_options_that_contradict_each_other() {
    refuse 2 '--machine and --emulate' --machine $machine --emulate $machine
    refuse 2 '--gpus .*without --plan-only' --gpus 4
    refuse 2 '--nodes .*without --plan-only' --nodes 4
    refuse 2 '--zero and --plan' --plan x --zero 3
    refuse 2 "--zero .-z.: '4' is out of range .allowed: 0 to 3, or auto" --zero 4
    refuse 2 '--format .*without --plan-only' --format json
    refuse 2 '--plan and --policy' --plan x --policy resident
    refuse 2 '--micro-batch auto and --plan' --plan x -b auto
    refuse 2 '--micro-batch auto and --emulate' --emulate $machine -b auto
    refuse 2 'auto: give --total-batch' -b auto
    refuse 2 '--link-gb-per-s 1 .*--device-memory' --link-gb-per-s 1
    refuse 2 '--gpus 3 --nodes 1: --total-batch 64 has 4 rows, which 3 GPUs' --plan-only \
        --machine $machine --gpus 3
    refuse 2 '--gpus 2 --nodes 3: --total-batch 128 has 8 rows, which 6 GPUs' --plan-only \
        --machine $machine --gpus 2 --nodes 3 -d 128
    refuse 2 '--gpus 2: needs a --machine' --plan-only --gpus 2 -d 128
    refuse 2 '--nodes 2: needs a --machine' --plan-only --nodes 2 -d 128
}

case_policies_that_do_not_exist() {
    local policy
    for policy in foo twin-flow twin-flow: twin-flow:2 twin-flow:x twin-flow:-1 twin-flow:nan \
        'twin-flow: 1' twin-flow:0x1 twin-flow:1e0 resident:1 auto:; do
        refuse 2 "no policy '$policy'; there are auto, .*twin-flow:R" --policy "$policy"
    done
}

case_budgets_out_of_range() {
    refuse 2 "--device-memory: '0' is out of range" --device-memory 0
    refuse 2 "--host-memory: '0' is out of range" --host-memory 0
    refuse 2 "--pinned-memory: '-5' is out of range" --pinned-memory -5
    refuse 1 '--device-memory 1099511627776000: .*bytes are free' --device-memory 1024000Gi
    refuse 1 '--host-memory 1099511627776000: only [0-9]* bytes are free' --host-memory 1024000Gi
}

# Is refused, with a number; one byte less is too, and with that number it trains.
smallest() {
    local need
    refuse 1 "$1" --device-memory 1000 "${@:2}"
    need=$(would_do device-memory)
    refuse 1 "$need bytes of device memory, 1 more than the $((need - 1)) there are" \
        --device-memory $((need - 1)) "${@:2}"
    trained "at_$need" --steps 2 --device-memory "$need" "${@:2}"
    trained free --steps 2
    equal "at_$need" free
}

case_a_cap_below_the_smallest_plan_names_one_that_would_do() {
    smallest 'no plan of policy auto fits: .*bytes of device memory'
}

case_a_policy_that_does_not_fit_says_what_would_do() {
    local policy
    for policy in resident zero-offload twin-flow:0.5 zero-infinity stronghold patrickstar \
        autohete; do
        smallest "no plan of policy $policy fits: .*bytes of device memory" --policy "$policy"
    done
}

case_a_smaller_micro_batch_that_is_suggested_fits() {
    local rows
    refuse 1 'or a micro-batch of [0-9]* instead of 32 rows' --device-memory 600K -b 32
    rows=$(sed -n 's/.*(-b \([0-9]*\)).*/\1/p' "$scratch/stderr")
    trained less --steps 1 --device-memory 600K -b "$rows" -d 512
}

case_too_little_host_memory_is_refused_before_it_is_taken() {
    local cap need
    cap=$(cap 30)
    refuse 1 'bytes of host memory, .*--host-memory [0-9]* would do' --device-memory "$cap" \
        --host-memory 1000 --policy zero-infinity
    need=$(would_do host-memory)
    trained enough --steps 1 --device-memory "$cap" --host-memory "$need" --policy zero-infinity
    [ $(($(arena enough host) + $(arena enough 'pinned host'))) -eq "$need" ]
    refuse 1 '2560 bytes of host memory, 2559 more than the 1 there are' --host-memory 1
}

# What the step needs grows with the batch, so nothing can be measured of it: refused without.
case_a_batch_beyond_any_machine_is_refused_before_it_is_measured() {
    local huge=(-b 65536 --hidden 1024 --layers 4)
    refuse 1 'bytes of device memory' --device-memory 1M "${huge[@]}"
    refuse 1 'bytes of this machine.s memory, of which [0-9]* are free' "${huge[@]}"
    refuse 1 'bytes of device memory' --policy auto "${huge[@]}"
}

case_less_host_memory_chooses_another_plan() {
    local host with=(-b 16 --steps 2 --policy zero-offload)
    trained much "${with[@]}"
    host=$(($(arena much host) + $(arena much 'pinned host') - 1))
    refuse 1 "$host there are" "${with[@]}" --host-memory $host
    with=(-b 16 --steps 2 --device-memory "$(arena much device)")
    trained less "${with[@]}" --host-memory $host
    [ $(($(arena less host) + $(arena less 'pinned host'))) -le $host ]
    equal much less
}

case_files_that_could_not_be_written_are_found_before_training() {
    local option
    for option in trace timeline save-plan; do
        refuse 1 "--$option: cannot write $scratch/none/x.*No such file" \
            "--$option" "$scratch/none/x"
        refuse 1 "--$option: $scratch is there and is no file" "--$option" "$scratch"
    done
    # Into a directory that the run makes.
    train --steps 3 --out "$scratch/out" --trace "$scratch/out/t.json" >"$scratch/log"
    [ -s "$scratch/out/t.json" ]
}

case_plan_files_that_are_not_for_this_run() {
    local plan=$scratch/plan
    trained saved --steps 2 --save-plan "$plan" --policy zero-infinity
    refuse 1 "--plan $plan: .*is for 5 units, .*not for 4 units" --plan "$plan" --layers 3
    refuse 1 "--plan $plan: .*4 x 16 tokens .*not for .*2 x 16 tokens" --plan "$plan" -b 2
    refuse 1 "--plan $plan: .*and 1 micro-batches, not .*3 micro-batches" --plan "$plan" -d 192
    refuse 1 "--plan $plan: .*holds updates" --plan "$plan" --clip 0 --no-guard
    refuse 1 "--plan $plan: .*[0-9]* more than the 200000 there are .--device-memory" \
        --plan "$plan" --device-memory 200K
    refuse 1 "--plan $plan: .*bytes of host memory" --plan "$plan" --host-memory 2000
    sed -e 's/^ranks .*/ranks 2/' -e 's/ whole$/ shard/' "$plan" >"$plan-2"
    refuse 1 "--plan $plan-2: the plan is for 2 ranks, and this run has 1: start it as 2, or" \
        --plan "$plan-2"
    refuse 1 'cannot open .*nothing: No such file' --plan "$scratch/nothing"
    refuse 1 "$scratch is not a file" --plan "$scratch"
}

# edited SED_EXPRESSION PATTERN ARGUMENT...: the plan, so edited, is refused
edited() {
    sed "$1" "$scratch/plan" >"$scratch/edited"
    refuse 1 "$2" --plan "$scratch/edited" "${@:3}"
}

case_plan_files_edited_badly() {
    trained saved --steps 2 --save-plan "$scratch/plan" --policy zero-infinity
    edited '$a frobnicate 3' "edited:[0-9]*: 'frobnicate' is not a field"
    edited 's/^slots .*/slots 9/' 'edited:9: slots 9 is out of range .allowed: 0 to 8'
    edited 's/^slots .*/slots many/' "edited:9: slots 'many'"
    edited '/^slices/d' 'edited: slices is missing'
    edited '$a slices 2' 'edited:[0-9]*: slices is there twice'
    edited 's/^unit 1-4 /unit 1-3 /' 'nothing is said of unit 4'
    edited 's/^unit 1-4 /unit 1-9 /' 'unit 9, but there are 5 units'
    edited 's/ keep / kept /' "'kept' is none of"
    edited 's/host-optimizer/device-optimizer/' 'stream needs host-optimizer'
    edited 's/ whole$//' 'it is not said whether whole or shard'
    edited 's/ whole$/ shard/' 'edited:[0-9]*: shard needs several ranks'
    edited 's/^ranks .*/ranks 2/' 'edited:[0-9]*: stream and host-optimizer need shard'
    edited 's/^slots .*/slots 0/' 'slots; with streamed units 1 to'
    edited 's/^early_adam .*/early_adam 1/' 'early_adam, but updates are held'
    head -c 4096 /dev/zero >"$scratch/plan"
    edited '' 'edited is no text'
    : >"$scratch/plan"
    edited '' 'edited: .* is missing'
}

case_machine_files_with_missing_or_absurd_values() {
    local f=$scratch/m
    absurd() {
        sed "$1" $machine >"$f"
        refuse 1 "$2" --machine "$f"
        refuse 1 "$2" --emulate "$f"
        refuse 1 "$2" --plan-only --machine "$f"
    }
    absurd '/^efficiency/d' "$f: missing: efficiency"
    absurd 's/^efficiency.*/efficiency 2/' "$f:[0-9]*: efficiency 2 is out of range"
    absurd 's/^efficiency.*/efficiency 0/' "$f:[0-9]*: efficiency 0 is out of range"
    absurd 's/^device_memory_gb.*/device_memory_gb -1/' "$f:[0-9]*: device_memory_gb -1 is out of"
    absurd 's/^device_memory_gb.*/device_memory_gb nan/' "$f:[0-9]*: device_memory_gb 'nan' is not"
    absurd 's/^device_memory_gb.*/device_memory_gb/' "$f:[0-9]*: device_memory_gb: expected one"
    absurd 's/^copy_in_gb_per_s.*/copy_in_gb_per_s 0/' "$f:[0-9]*: copy_in_gb_per_s 0 is out of"
    absurd 's/^copy_in_duplex.*/copy_in_duplex_gb_per_s 99/' "$f: copy_in_duplex_gb_per_s 99 is"
    absurd '/^network_gb_per_s/d' "$f: missing: network_gb_per_s"
    absurd 's/^pinned_memory_gb.*/pinned_memory_gb 9999/' "$f: pinned_memory_gb 9999 is more than"
    absurd '$a colour green' "$f:[0-9]*: 'colour' is not a name"
    absurd '$a efficiency 0.5' "$f:[0-9]*: efficiency is there twice"
    refuse 1 'cannot open .*nothing: No such file' --machine "$scratch/nothing"
    refuse 2 'miniature of 1:N' --emulate $machine:0
    refuse 2 'miniature of 1:N' --emulate $machine:99999999999999999999
}

# ---- what is computed is always the same --------------------------------------------------------

# same_under_plans ARGUMENT...: the losses, norms and validation losses of a run do not depend on a
# cap, a policy, pinned memory or chaos.
same_under_plans() {
    local with=("$@" -j "$data/a_val*.bin" --steps 4 --val-every 2) cap policy
    cap=$(cap 30 "$@")
    trained whole "${with[@]}"
    trained capped "${with[@]}" --device-memory "$cap"
    equal whole capped
    [ "$(arena capped device)" -le "$cap" ]
    for policy in auto autohete resident zero-offload twin-flow:0.5 zero-infinity stronghold \
        patrickstar; do
        trained by_policy "${with[@]}" --policy $policy --chaos 7
        equal whole by_policy
        grep -q "^plan: $policy, predicted" "$scratch/by_policy"
    done
    trained pageable "${with[@]}" --device-memory "$cap" --pinned-memory 1 --chaos 8
    equal whole pageable
    [ "$(arena pageable 'pinned host')" = '' ]
}
case_losses_are_the_same_fp32() {
    same_under_plans
}
case_losses_are_the_same_bf16_accumulated() {
    same_under_plans --dtype bf16 -d 192
}
case_losses_are_the_same_unheld_accumulated() {
    same_under_plans --clip 0 --no-guard -d 128
}
case_losses_are_the_same_unheld_bf16() {
    same_under_plans --clip 0 --no-guard --dtype bf16 --head-rows 5
}
case_losses_are_the_same_with_tests_for_outliers() {
    same_under_plans --skip-loss-z 1.5 --skip-norm-z 1.5 --clip 0.5
}

# Adam on the host need not wait for the norm. It always has to do it again: all is clipped; now and
# then: some are skipped; never: nothing is clipped.
case_losses_are_the_same_when_speculating() {
    local with settings='--clip 1e-3|--clip 1 --skip-loss-z 1.5 --skip-norm-z 1.5|--clip 1000' of
    trained saved --steps 1 --policy zero-infinity --save-plan "$scratch/plan"
    sed -i -e 's/^speculate.*/speculate 1/' -e 's/^barrier.*/barrier 0/' "$scratch/plan"
    while IFS= read -r -d '|' of; do
        read -ra with <<<"$of"
        trained whole --steps 140 --lr 1e-2 "${with[@]}"
        trained ahead --steps 140 --lr 1e-2 "${with[@]}" --plan "$scratch/plan" --chaos 4
        equal whole ahead
        trained auto --steps 140 --lr 1e-2 "${with[@]}" --speculate --device-memory "$(cap 30)"
        equal whole auto
    done <<<"$settings|"
    edited 's/^hold_updates.*/hold_updates 0/' 'speculate, which is for updates that are held' \
        --clip 0 --no-guard
    refuse 2 '--speculate and --emulate' --speculate --emulate "$machine"
}

# How far the text reaches that a sample is made from depends on the memory that it can use: while
# it is short, there is no difference.
case_samples_are_the_same() {
    local with=(--steps 2 --seq 32 --sample-every 1 --sample-tokens 30)
    local text='/^---$/ { inside = !inside } inside'
    trained whole "${with[@]}"
    trained capped "${with[@]}" --device-memory "$(cap 40 --seq 32)" --chaos 5
    [ "$(awk "$text" "$scratch/whole" | wc -l)" -ge 4 ]
    diff <(awk "$text" "$scratch/whole") <(awk "$text" "$scratch/capped")
}

case_copies_that_are_not_pinned_are_told() {
    local with=(--steps 4 --policy zero-infinity) copies
    trained pageable "${with[@]}" --pinned-memory 10000
    copies=$(sed -n 's/.*warning: pinned memory .*: \([0-9]*\) of [0-9]* copies a step.*/\1/p' \
        "$scratch/pageable")
    # Counted as they are made: the same number in each of the four steps.
    grep -q "^$((4 * copies)) copies went through pageable memory.*--pinned-memory" \
        "$scratch/pageable"
    [ "$(arena pageable 'pinned host')" -le 10000 ]
    trained pinned "${with[@]}"
    fails grep -i 'pageable' "$scratch/pinned"
    equal pageable pinned
}

# ---- what is printed ----------------------------------------------------------------------------

# What --plan-only says a policy needs is what a run takes, to the byte.
case_plan_only_says_what_a_run_takes() {
    local policy json=$scratch/json space key
    local with=(-d 128 --dtype bf16)
    # shellcheck disable=SC2094 # the cache of costs is filled by the first
    train "${with[@]}" --plan-only --format json >"$json" 2>"$scratch/err"
    for policy in resident zero-offload zero-infinity stronghold patrickstar; do
        trained run "${with[@]}" --steps 1 --policy $policy
        for space in 'device:device' 'host:host' 'pinned host:pinned'; do
            key=${space#*:}_bytes
            [ "$(sed -n "/\"policy\": \"$policy\"/,/}/s/.*\"$key\": \([0-9]*\).*/\1/p" "$json" |
                head -n 1)" = "$(arena run "${space%:*}" | grep . || echo 0)" ]
        done
    done
}

case_a_saved_plan_is_followed() {
    local cap
    cap=$(cap 40)
    trained chosen --steps 3 --device-memory "$cap" --save-plan "$scratch/plan"
    trained followed --steps 3 --device-memory "$cap" --plan "$scratch/plan" \
        --save-plan "$scratch/again"
    equal chosen followed
    cmp "$scratch/plan" "$scratch/again"
    diff <(sed -n '/memory (bytes)/,/sealed/p' "$scratch/chosen") \
        <(sed -n '/memory (bytes)/,/sealed/p' "$scratch/followed")
    # Edited by hand.
    sed -i -e 's/^unit 0 .*/unit 0 keep resident host-optimizer whole/' -e 's/^slices.*/slices 3/' \
        -e 's/^grad_buffers.*/grad_buffers 1/' "$scratch/plan"
    trained edited --steps 3 --plan "$scratch/plan"
    equal chosen edited
}

# Far below a second; the limit only keeps a search that never ends from being waited for.
case_plan_only_needs_neither_data_nor_machine() {
    local out=$scratch/out policy
    timeout 60 "$bin/train_gpt" -i "$scratch/no*.bin" --model gpt2:d48 --layers 96 -b 8 -t 1024 \
        --dtype bf16 --plan-only --machine $machine >"$out" 2>"$scratch/err"
    for policy in auto autohete resident zero-offload twin-flow:0.5 zero-infinity stronghold \
        patrickstar; do
        grep -q "^$policy " "$out"
    done
    grep -q 'resident  *does not fit: .*bytes of device memory, [0-9]* more than the' "$out"
    fails compgen -G "$scratch/*.tmp"
    train_gpt -i "$scratch/no*.bin" --plan-only --machine $machine --gpus 4 -b 2 -d 8192 \
        --format json >"$out"
    grep -q '"gpus": 4' "$out"
    ! command -v jq >/dev/null || jq -e '[.policies[].fits] | length == 8 and all' "$out"
}

# A cluster that nobody here has, and how throughput falls as GPUs grow.
case_plan_only_answers_for_clusters() {
    local out=$scratch/out with=(-i "$scratch/no*.bin" --model gpt2:d48 -b 2 --dtype bf16
        --plan-only --machine "$machine")
    timeout 60 "$bin/train_gpt" "${with[@]}" --gpus 8 --nodes 16 -d 262144 >"$out" 2>"$scratch/err"
    grep -q '^128 GPUs, 8 on each of 16 machines' "$out"
    grep -q '^policy  *busy ms: .* host  *comm  *exposed ms: .* comm$' "$out"
    sed -n '/^scaling of policy auto/,$p' "$out" >"$scratch/scaling"
    [ "$(awk '$1 + 0 > 0 { print $1 }' "$scratch/scaling" | tr '\n' ' ')" = \
        '1 2 4 8 16 32 64 128 256 512 1024 ' ]
    awk '$1 == 8 { print $2 } $1 == 1024 { print $2 }' "$scratch/scaling" | tr '\n' ' ' |
        grep -qx '1 128 '
    grep -q '^ *1024 .* comm, .*of the step (the network)$' "$scratch/scaling"
    train_gpt "${with[@]}" --gpus 3 --nodes 2 -d 12288 --zero 2 --format json >"$out"
    if command -v jq >/dev/null; then
        jq -e '.gpus == 3 and .nodes == 2 and [.scaling[].gpus] == [1, 2, 3, 6, 12, 24, 48, 96, 192,
            384, 768] and ([.scaling[] | .gpus / .nodes <= 3] | all)' "$out"
        jq -e '.policies[0].plan | .ranks == 6 and ([.units[] | .host_optimizer or (.shard and
            (.stream | not))] | all)' "$out"
    fi
    sed 's/^network_gb_per_s.*/network_gb_per_s 0/' $machine >"$scratch/m"
    refused 1 'm: 4 ranks, 2 on a machine, need its network_gb_per_s' "${with[@]}" \
        --machine "$scratch/m" --gpus 2 --nodes 2 -d 8192
    # One GPU has nobody to talk to.
    train_gpt "${with[@]}" -d 2048 --zero 3 >"$out" 2>"$scratch/err"
    fails grep -e comm -e scaling "$out"
}

case_plan_only_where_nothing_fits_says_what_is_nearest() {
    local rc=0
    train --plan-only --machine $machine --device-memory 1000 >"$scratch/out" || rc=$?
    [ $rc -eq 1 ]
    [ "$(grep -c 'does not fit: .*--device-memory [0-9]* would do' "$scratch/out")" -eq 8 ]
}

case_reports_come_when_asked_for_and_at_the_end() {
    trained run --steps 9 --report 4 --device-memory 100M
    [ "$(grep -c '^ms a step  *predicted  *measured' "$scratch/run")" -eq 3 ]
    [ "$(grep -c '^compute  *busy ' "$scratch/run")" -eq 3 ]
    sed -n '/^step  *4\/9/{n;p}' "$scratch/run" | grep -q '^ms a step'
    trained short --steps 2 --report 1
    [ "$(grep -c '^no times yet' "$scratch/short")" -eq 2 ]
}

case_a_trace_and_a_timeline() {
    trained run --steps 6 --policy zero-infinity --trace "$scratch/t.json" \
        --timeline "$scratch/t.svg"
    grep -q '"traceEvents"' "$scratch/t.json"
    head -c 300 "$scratch/t.svg" | grep -q '<svg '
    ! command -v jq >/dev/null || jq -e '.traceEvents | length > 50' "$scratch/t.json"
    ! command -v xmllint >/dev/null || xmllint --noout "$scratch/t.svg"
}

case_the_micro_batch_is_chosen_among_those_that_fit() {
    local rows
    trained all -b auto -d 256 --steps 3
    trained few -b auto -d 256 --steps 3 --device-memory "$(cap 60 -b 1)"
    for run in all few; do
        rows=$(sed -n 's/^step: [0-9]* x \([0-9]*\) rows.*= 256 tokens.*/\1/p' "$scratch/$run")
        [ $((256 / 16 % rows)) -eq 0 ]
        trained by_hand -b "$rows" -d 256 --steps 3
        equal by_hand "$run"
    done
}

# Resident memory at its highest, less what the run says it has taken. A model of 10M parameters.
case_memory_beyond_the_arenas_is_little() {
    case ${BUILD-} in *address* | *thread*) return 0 ;; esac # they take much for themselves
    local pid taken most dtype run
    for dtype in fp32 bf16; do
        mkfifo "$scratch/pipe"
        "$bin/train_gpt" -i "$data/a_train*.bin" "${tiny[@]}" --layers 4 --hidden 448 --heads 7 \
            --dtype $dtype --head-rows 64 --steps 100000 --threads 2 --host-threads 2 \
            --device-memory 60M >"$scratch/pipe" 2>/dev/null &
        pid=$!
        run=$scratch/run
        exec 3<"$scratch/pipe"
        while IFS= read -r line <&3; do
            echo "$line" >>"$run"
            [[ $line != 'step  '*'5/100000 | loss '* ]] || break
        done
        most=$(awk '/^VmHWM:/ { print $2 * 1024 }' "/proc/$pid/status")
        kill -KILL "$pid"
        wait "$pid" || true
        exec 3<&-
        taken=$(awk '/arena, sealed|thread scratch/ { n += $3 } END { print n }' "$run")
        echo "most $most, taken $taken"
        [ "$taken" -gt 100000000 ]
        [ $((most - taken)) -le $((64 << 20)) ]
        rm "$scratch/pipe" "$run"
    done
}

# A rename would put a file in the place of whatever has the name.
case_outputs_replace_files_alone() {
    mkfifo "$scratch/pipe"
    refuse 1 'is no file' --policy resident --trace "$scratch/pipe"
    [ -p "$scratch/pipe" ]
    refuse 2 'both are to write' --policy resident --trace "$scratch/x" --timeline "$scratch/x"
    : >"$scratch/file"
    ln -s file "$scratch/link"
    train --policy resident --steps 1 --save-plan "$scratch/link" >/dev/null
    [ -L "$scratch/link" ]
    grep -q '^policy resident' "$scratch/file"
}

case_what_cannot_be_printed_is_an_error() {
    local rc=0
    [ -w /dev/full ] || return 0
    train_gpt --plan-only --machine $machine -e d12 >/dev/full 2>"$scratch/stderr" || rc=$?
    [ $rc -eq 1 ]
    grep -q 'stdout cannot be written' "$scratch/stderr"
}

case_plan_only_says_whether_anything_fits() {
    local rc=0
    train_gpt --plan-only --machine scripts/machines/a100-40g -e d48 --seq 1024 -b 4 \
        --device-memory 10M >/dev/null 2>&1 || rc=$?
    [ $rc -eq 1 ]
}

case_a_trained_model_writes_the_same_under_a_cap() {
    local need text
    train --steps 2 --out "$scratch/run" >/dev/null
    text=$(train_gpt --generate --model "$(model "$scratch/run" 2)" --sample-tokens 20)
    refused 1 'still needs' --generate --model "$(model "$scratch/run" 2)" --device-memory 1000
    need=$(would_do device-memory)
    [ "$text" = "$(train_gpt --generate --model "$(model "$scratch/run" 2)" --sample-tokens 20 \
        --device-memory "$need")" ]
}

run_cases
