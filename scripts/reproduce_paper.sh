#!/usr/bin/env bash
# The paper's experiment in a wind tunnel: miniatures of its models, 1:16, on an emulated A100 in
# slow motion whose lanes are all paced (hete/FORMATS.md says what --emulate FILE:16 scales).
#
#     scripts/reproduce_paper.sh [--quick|--full] [--ranks N] [--steps N] [--help]
#
#     (default)  4B, 8B and 12B, in less than an hour on 2 cores
#     --quick    4B alone, about 5 minutes
#     --full     2B, 4B, 6B, 8B, 10B and 12B, about two hours
#     --ranks N  of one machine, each with a GPU of its own and a share of the batch: 4 for the
#                paper's other table. By mpirun; 2, 4 or 8, default 1
#     --steps N  of each run, 7 to 16; else as many as the time allows. The first two warm up.
#
# Each model is trained under every policy, without clipping and guard and with --clip 1. A run of
# which more than 1% of the operations ended late says nothing: it is repeated up to twice while
# there is time, and marked if it stays void. Use a machine that does nothing else.
#
# Leaves in out/paper (several ranks: out/paper-N): results.tsv, simulated.tsv, table.txt (also
# printed), speedup.svg, the logs
# and plans. Exit status 1: predictions are off by more than 5% (median) or 10% (worst), or a run
# is void or failed. How the speed-ups compare to the paper's is a finding and changes nothing.
set -eu
unset MAKEFLAGS MAKELEVEL
export LC_ALL=C
cd "$(dirname "$0")/.."

machine=scripts/machines/a100-40g
scale=16
rows=8
out=out/paper
policies='zero-offload patrickstar stronghold autohete autohete-fifo auto'
rates='1.5 3.0 5.0' # of CPU Adam, 10^9 parameters/s; 3.0 is the machine file's

usage() {
    sed -n '/^# The paper/,/^set /s/^# \{0,1\}//p' "$0"
}

fail() {
    echo "reproduce_paper.sh: $*" >&2
    exit "${status:-1}"
}

bad_usage() {
    status=2
    fail "$* (--help lists the options)"
}

parse() {
    models='4B 8B 12B' limit_s=3300 steps='' ranks=1
    while [ $# -gt 0 ]; do
        case $1 in
        --quick) models=4B limit_s=420 ;;
        --full) models='2B 4B 6B 8B 10B 12B' limit_s=7200 ;;
        --steps)
            steps=${2-}
            [[ $steps =~ ^[0-9]{1,2}$ && $steps -ge 7 && $steps -le 16 ]] ||
                bad_usage "--steps '$steps': a number from 7 to 16"
            shift
            ;;
        --ranks)
            ranks=${2-}
            [[ $ranks =~ ^[1248]$ ]] || bad_usage "--ranks '$ranks': 1, 2, 4 or 8"
            shift
            ;;
        --help)
            usage
            exit 0
            ;;
        *) bad_usage "unknown argument '$1'" ;;
        esac
        shift
    done
    launch=()
    if [ "$ranks" -gt 1 ]; then
        out=$out-$ranks
        launch=(mpirun --oversubscribe -np "$ranks")
        command -v mpirun >/dev/null || fail 'no mpirun (scripts/install_deps.sh test)'
    fi
}

# ---- the models ---------------------------------------------------------------------------------

# Layers and hidden size; heads are of 128.
shape() {
    case $1 in
    2B) echo 40 2048 ;;
    4B) echo 21 4096 ;;
    6B) echo 30 4096 ;;
    8B) echo 40 4096 ;;
    10B) echo 32 5120 ;;
    12B) echo 26 6144 ;;
    esac
}

# Sets `args` to the options of MODEL in MODE as a miniature (scale 16) or whole (1).
set_args() {
    local layers hidden by=$3
    read -r layers hidden < <(shape "$1")
    args=(--layers "$layers" --hidden $((hidden / by)) --heads $((hidden / 128))
        --vocab $((50257 / by)) --max-seq $((1024 / by)) --seq $((1024 / by)) --dtype bf16
        --micro-batch $((rows / ranks)) --total-batch $((rows * (1024 / by))))
    case $2 in
    unguarded) args+=(--clip 0 --no-guard) ;;
    clip) args+=(--clip 1) ;;
    esac
}

emulated() { # MODEL MODE ARGUMENT...
    local cache args
    cache=${try_cache:-$(cat "$out/cache/$1")}
    set_args "$1" "$2" $scale
    shift 2
    XDG_CACHE_HOME=$cache "${launch[@]}" ./train_gpt "${args[@]}" --emulate "$machine:$scale" "$@" \
        </dev/null
}

# No step is made: only the plan is printed, with what it is expected to take.
predicted() { # MODEL MODE NAME ARGUMENT...
    emulated "$1" "$2" "${@:4}" --train 'data/stories_train*.bin' --steps 0 --val-every 0 \
        --sample-every 0 2>&1 | tee "$out/plan.log" | awk -v id="$1 $2 $3" '
            /^plan: / { sub(/.*predicted /, ""); print id, $1; n++ } END { exit !n }'
}

# The table of --plan-only as lines `policy ms`; a policy that does not fit has none.
policy_times() {
    awk 'NF == 0 { exit } $2 ~ /^[0-9]+x[0-9]+$/ { print $1, $3 }'
}

# The slow motion follows from what operations take here, and whatever else the machine does makes
# them look slower: of several measurements, one perhaps from earlier, the fastest is nearest to the
# truth. $out/cache/MODEL names its folder.
calibrate() { # MODEL
    local try ms best=
    for try in "${XDG_CACHE_HOME:-$HOME/.cache}" "$out"/cache/try{1,2,3,4}; do
        ms=$(try_cache=$try predicted "$1" clip auto --policy auto) || {
            cat "$out/plan.log" >&2
            fail "$1: no plan"
        }
        ms=${ms##* }
        if [ -z "$best" ] || awk -v a="$ms" -v b="$best" 'BEGIN { exit !(a < b) }'; then
            best=$ms
            echo "$try" >"$out/cache/$1"
        fi
    done
}

# ---- time ---------------------------------------------------------------------------------------

# Every run's name: MODEL-MODE-POLICY.
all_runs() {
    local model mode policy
    for model in $models; do
        for mode in unguarded clip; do
            for policy in $policies; do
                echo "$model-$mode-$policy"
            done
        done
    done
}

# Appends `run seconds` of a step to $out/expected; a policy that does not fit has none.
expect() { # MODEL
    local mode policy
    for mode in unguarded clip; do
        for policy in $policies; do
            predicted "$1" $mode "$policy" --policy "${policy%-fifo}" || true
        done
    done | awk '{ print $1 "-" $2 "-" $3, $4 / 1000 }' >>"$out/expected"
}

start_s=3 # of a run, before its first step

# seconds_for [RUN]: what one run is expected to take, or all of them once
seconds_for() {
    awk -v run="${1-}" -v steps="$steps" -v start=$start_s '
        run == "" || run == $1 { sum += start + steps * $2 } END { printf "%d\n", sum }' \
        "$out/expected"
}

# As many steps as take two thirds of the time, so that some runs can be repeated.
choose_steps() {
    steps=${steps:-$(awk -v limit=$limit_s -v start=$start_s '{ sum += $2 }
        END { n = int((limit * 2 / 3 - start * NR) / (sum ? sum : 1))
              print(n < 7 ? 7 : n > 12 ? 12 : n) }' "$out/expected")}
    printf '%d runs of %d steps take about %d minutes, repeated ones not counted\n' \
        "$(wc -l <"$out/expected")" "$steps" $((($(seconds_for) + 59) / 60))
}

# ---- runs ---------------------------------------------------------------------------------------

fifo_of() { # PLAN
    sed 's/^fifo 0/fifo 1/; s/^policy .*/policy autohete-fifo/' "$1" >"$1.fifo"
}

train() { # MODEL MODE POLICY
    local plan=$out/$1-$2.plan extra=(--policy "$3")
    case $3 in
    autohete) extra+=(--save-plan "$plan") ;;
    autohete-fifo) # the same plan but for the order
        [ -e "$plan" ] || { echo 'train_gpt: no plan of policy autohete' && return 1; }
        fifo_of "$plan"
        extra=(--plan "$plan.fifo")
        ;;
    esac
    emulated "$1" "$2" "${extra[@]}" --train 'data/stories_train*.bin' --steps "$steps" \
        --val-every 0 --sample-every 0
}

void() {
    grep -q 'the times mean nothing' "$1"
}

# Trains and leaves the run's line of results.tsv.
run_one() { # RUN TRY
    local model mode policy rc=0 log=$out/$1.log
    IFS=- read -r model mode policy <<<"$1"
    train "$model" "$mode" "$policy" >"$log" 2>&1 || rc=$?
    if [ $rc -ne 0 ] && ! grep -q '^train_gpt: no plan of policy' "$log"; then
        tail -n 3 "$log" >&2
        fail "$log: train_gpt ended with status $rc"
    fi
    awk -v id="$model $mode $policy" -v rows=$rows -v tries="$2" -f scripts/paper_row.awk "$log" |
        tee "$out/$1.row" | awk -F '\t' '{
            if ($4 == "") printf "%-4s %-10s %-14s %s\n", $1, $2, $3, $10
            else printf "%-4s %-10s %-14s predicted %7.1f ms, measured %7.1f, %.1f%% late%s\n",
                $1, $2, $3, $4, $5, 100 * $7, $10 == "ok" ? "" : " (" $10 ")" }'
}

# Void runs are repeated when all have had their turn: the machine may be quieter then.
run_all() {
    local run try
    for try in 1 2 3; do
        for run in $(all_runs); do
            if [ $try -eq 1 ]; then
                run_one "$run" $try
            elif void "$out/$run.log" && [ $((SECONDS + $(seconds_for "$run"))) -le $limit_s ]; then
                run_one "$run" $try
            fi
        done
    done
    {
        echo model mode policy predicted_ms measured_ms samples_per_s late tries limit state |
            tr ' ' '\t'
        for run in $(all_runs); do
            cat "$out/$run.row"
        done
    } >"$out/results.tsv"
}

# ---- simulation ---------------------------------------------------------------------------------

# On machines that differ in CPU Adam alone: `rate model mode policy ms`, tabs between them. What
# the planner says of the whole models; of the order, what it says of the miniature under one plan.
simulate() {
    local rate model mode args
    for rate in $rates; do
        sed "s/^\(host_adam_gparams_per_s *\)[0-9.]*/\1$rate/" $machine >"$out/adam-$rate"
        for model in $models; do
            for mode in unguarded clip; do
                set_args "$model" $mode 1
                ./train_gpt "${args[@]}" --machine "$out/adam-$rate" --plan-only --gpus "$ranks" |
                    policy_times |
                    sed "s/^/$rate $model $mode /"
                simulate_order "$rate" "$model" $mode
            done
        done
    done | tr ' ' '\t' >"$out/simulated.tsv"
}

simulate_order() { # RATE MODEL MODE
    local machine=$out/adam-$1 plan=$out/order
    shift
    if predicted "$@" priority --policy autohete --save-plan "$plan" >"$plan.tsv"; then
        fifo_of "$plan"
        predicted "$@" fifo --plan "$plan.fifo" >>"$plan.tsv"
        sed "s/^/${machine##*-} /" "$plan.tsv"
    fi
    rm -f "$plan" "$plan.tsv" "$plan.fifo"
}

# ---- all of it ----------------------------------------------------------------------------------

geometry() {
    local model
    echo 'How far the miniatures are from 1:16 of the models:'
    for model in $models; do
        sed -n "s/^miniature of 1:[0-9]*: /  $(printf %-4s "$model") /p" \
            "$out/$model-clip-auto.log"
    done
}

prepare() {
    make --no-print-directory all
    [ -e data/stories_train_000000.bin ] || make --no-print-directory corpus
    rm -rf "$out"
    mkdir -p "$out"/cache
}

main() {
    local model rc=0
    parse "$@"
    prepare
    SECONDS=0
    for model in $models; do
        calibrate "$model"
        expect "$model"
    done
    choose_steps
    run_all
    simulate
    {
        awk -F '\t' -v ranks="$ranks" -f scripts/paper_table.awk "$out"/results.tsv \
            "$out"/simulated.tsv || touch "$out"/bad
        echo
        geometry
    } >"$out"/table.txt
    awk -F '\t' -f scripts/paper_bars.awk "$out"/results.tsv >"$out"/speedup.svg
    echo
    cat "$out"/table.txt
    printf '\n%s minutes. Left in %s: results.tsv, simulated.tsv, table.txt, speedup.svg\n' \
        $(((SECONDS + 59) / 60)) "$out"
    [ ! -e "$out"/bad ] || rc=1
    rm -rf "$out"/bad "$out"/cache "$out"/expected "$out"/plan.log "$out"/*.row "$out"/adam-*
    exit $rc
}

main "$@"
