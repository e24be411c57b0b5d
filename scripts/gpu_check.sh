#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command of at most 8 minutes: for a machine with one
# NVIDIA GPU and the CUDA toolkit. Needs no network, no OpenBLAS, no test library.
#
#     scripts/gpu_check.sh [--sim] [--out DIR] [PART...]
#
#     --sim      in small, on the CPU runtime of test/cuda: tries the script where there is no GPU.
#                Its times mean nothing.
#     --out DIR  where to leave results; out/gpu_check-DATE
#     PART...    of these, in this order; all of them
#         build     with CUDA=1
#         kernels   every operation on the GPU against the CPU, and twice, to the same bits
#         losses    ten steps on the GPU and on the CPU, fp32 and bf16
#         plans     five plans, one of them shaken up, give the same bits on the GPU
#         rates     copies alone and both ways at once, Adam on either side, cuBLAS's peak
#         resident  124M and 1.5B parameters with everything on the GPU: tok/s, MFU
#         capped    774M parameters in a third of the memory they need, under four policies
#
# A part that fails, or runs out of its time, ends none of the others. One table at the end; all of
# it also in DIR/results.json, beside each part's log, the metrics of the runs, and traces. Exit
# status 1: something failed; 2: bad usage.
set -u
unset MAKEFLAGS MAKELEVEL
export LC_ALL=C
here=$PWD
cd "$(dirname "$0")/.." || exit 1

parts='build kernels losses plans rates resident capped'
total_s=465 # of all parts; what is left of 8 minutes is for the table

usage() {
    sed -n '/^# Everything/,/^set /s/^# \{0,1\}//p' "$0" | sed '/^set /d'
}

# Seconds that a part may take.
limit_of() {
    case $1 in
    build) echo 240 ;;
    kernels | plans) echo 75 ;;
    losses) echo 45 ;;
    rates) echo 40 ;;
    resident) echo 90 ;;
    capped) echo 130 ;;
    esac
}

# ---- rows: what, number, unit, ok or FAIL or -, remark; tabs between them -----------------------

row() {
    printf '%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "${5-}" >>"$out/$part.tsv"
}

# The part goes on, and fails at its end.
failed() { # WHAT REMARK
    row "$1" '' '' FAIL "$2"
    echo "FAILED: $1: $2" >&2
    bad=1
}

# ---- training ----------------------------------------------------------------------------------

# The line of a log that says why the program failed.
reason() {
    { grep -E '^(train_gpt|gpu_check|sim): ' "$1" || cat "$1"; } | tail -n 1 | tr '\t' ' '
}

# ran NAME SECONDS ARGUMENT...: trains with the metrics in $out/NAME.jsonl and the rest in
# $out/NAME.log; false, and a row that says why, if that fails.
ran() {
    local name=$1 rc=0
    # In the foreground: in the group of the part, whose limit ends it too.
    timeout --foreground --kill-after=5 "$2" "$bin/train_gpt" --train "$data" --val-every 0 \
        --sample-every 0 --log-json "${@:3}" >"$out/$name.jsonl" 2>"$out/$name.log" \
        </dev/null || rc=$?
    if [ "$rc" -ne 0 ]; then
        if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
            failed "$name" "not done in $2 s"
        else
            failed "$name" "$(reason "$out/$name.log")"
        fi
        return 1
    fi
}

# The numbers of a field, one a line.
field() { # NAME FIELD
    sed -n "s/.*\"$2\":\([^,}]*\).*/\1/p" "$out/$1.jsonl"
}

# The median, the first few steps left out.
steady() {
    sed 1,3d | sort -g | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)] }'
}

small_model() {
    if [ -n "$sim" ]; then
        model=(--layers 3 --hidden 64 --heads 2 --seq 32 --max-seq 32 --micro-batch 2)
    else
        model=(--layers 6 --hidden 384 --heads 6 --seq 256 --max-seq 256 --micro-batch 8)
    fi
}

# Device bytes of the `resident` plan of such a model; no GPU is asked.
need() {
    "$bin/train_gpt" --train "$data" --plan-only --machine scripts/machines/h200 \
        --format json "$@" |
        awk '/"policy": "resident"/ { found = 1 }
             found && /"device_bytes"/ && !n++ { gsub(/[^0-9]/, ""); print }'
}

# ---- parts -------------------------------------------------------------------------------------

part_build() {
    make --no-print-directory CUDA="$cuda" all "$build/dev/gpu_check" || return 1
    [ -e data/stories_train_000000.bin ] || "$bin/tokenize" --stories || return 1
    row 'build' '' '' ok "$("$bin/train_gpt" --version)"
}

# Rows that the program prints are ours.
check_program() {
    "$build/dev/gpu_check" "$@" ${sim:+--small} >>"$out/$part.tsv"
}

# The largest difference of the losses of two runs, relatively; nothing if they are not as many.
apart() { # NAME NAME
    paste <(field "$1" loss) <(field "$2" loss) | awk '
        NF != 2 || $1 == "null" || $2 == "null" { wrong = 1 }
        { d = ($1 > $2 ? $1 - $2 : $2 - $1) / ($1 > 0 ? $1 : 1); worst = d > worst ? d : worst }
        END { if (NR > 0 && !wrong) print worst }'
}

part_losses() {
    local dtype device most worst model
    small_model
    for dtype in fp32 bf16; do
        most=1e-4
        [ "$dtype" = fp32 ] || most=2e-2
        for device in cpu cuda; do
            ran "losses-$device-$dtype" 30 "${model[@]}" --device $device --dtype "$dtype" \
                --steps 10 || continue 2
        done
        worst=$(apart "losses-cpu-$dtype" "losses-cuda-$dtype")
        if awk -v worst="$worst" -v most="$most" \
            'BEGIN { exit !(worst != "" && worst <= most) }'; then
            row "losses, $dtype" "$worst" relative ok "cuda and cpu, 10 steps; allowed $most"
        else
            failed "losses, $dtype" "cuda and cpu differ by '$worst', allowed $most"
        fi
    done
}

part_plans() {
    local model name cap more file
    small_model
    cap=$(need "${model[@]}" --dtype bf16)
    [ -n "$cap" ] || { failed 'plans' '--plan-only says no device bytes' && return 1; }
    cap=$((cap * 55 / 100))
    # Name, then options.
    while read -r name more; do
        # shellcheck disable=SC2086 # options
        ran "plans-$name" 25 "${model[@]}" --device cuda --dtype bf16 --steps 6 \
            --out "$out/plans-$name" ${more//CAP/$cap} || continue
        [ "$name" != resident ] || continue
        for file in model_00000006.bin state_00000006.bin; do
            if cmp "$out/plans-resident/$file" "$out/plans-$name/$file"; then
                row "$name" '' '' ok "$file: the bytes of resident"
            else
                failed "plans, $name" "$file is not that of resident"
            fi
        done
        rm -r "$out/plans-$name"
    done <<END
resident --policy resident
zero-offload --policy zero-offload --device-memory CAP
stronghold --policy stronghold --device-memory CAP
autohete --policy autohete --device-memory CAP
auto --policy auto --device-memory CAP
auto-chaos --policy auto --device-memory CAP --chaos 1
END
}

# Tokens per second of a run, and its FLOP/s as a part of the peak that `rates` has found.
speed() { # NAME WHAT
    local tokens flops peak
    tokens=$(field "$1" tok_per_s | steady)
    # 6N + 6LCT of "model: L layers, C channels, ... : N parameters" and "step: .. x .. rows of T"
    flops=$(awk '
        /^model: / { L = $2; C = $4; N = $(NF - 1) }
        /^step: / { for (i = 1; i < NF; i++) if ($i == "of") T = $(i + 1) }
        END { print 6 * N + 6 * L * C * T }' "$out/$1.log")
    peak=$(awk -F '\t' '$1 == "products, bf16" { print $2 }' "$out/rates.tsv" 2>/dev/null)
    row "$2" "$tokens" tok/s ok
    if [ -n "$peak" ]; then
        row "$2" "$(awk -v t="$tokens" -v f="$flops" -v p="$peak" \
            'BEGIN { if (p + 0 != 0) printf "%.1f", 100 * t * f / (p * 1e12) }')" '% MFU' - \
            "of $peak TFLOP/s"
    fi
}

# 50257 tokens as GPT-2 has, whatever the data; logits in large chunks.
big=(--vocab 50257 --seq 1024 --max-seq 1024 --head-rows 4096 --dtype bf16 --device cuda)
little=(--vocab 300 --seq 32 --max-seq 32 --dtype bf16 --device cuda)

part_resident() {
    if [ -n "$sim" ]; then
        ran resident-124M 30 "${little[@]}" --layers 2 --hidden 64 --heads 2 -b 2 --steps 6 \
            --policy resident && speed resident-124M '124M (tiny)'
        return
    fi
    ran resident-124M 40 "${big[@]}" --model d12 -b 32 --steps 16 --policy resident &&
        speed resident-124M '124M, batch 32'
    ran resident-1.5B 60 "${big[@]}" --model d48 -b 8 --steps 10 --policy resident &&
        speed resident-1.5B '1.5B, batch 8'
}

# Predicted and measured milliseconds of a step.
held_against() { # NAME WHAT
    local predicted measured
    read -r predicted measured < <(
        sed -n 's/^step *\([0-9.]*\) *\([0-9.]*\) *of the predicted.*/\1 \2/p' "$out/$1.log" |
            tail -n 1)
    if [ -z "${measured-}" ]; then
        failed "$2" "$out/$1.log says no measured times"
        return
    fi
    row "$2" "$predicted" ms - 'a step, predicted'
    row "$2" "$measured" ms - 'a step, measured'
}

part_capped() {
    local cap policy percent=33 model=("${big[@]}" --model d36 -b 4)
    if [ -n "$sim" ]; then
        model=("${little[@]}" --layers 4 --hidden 64 --heads 2 -b 2)
        percent=60
    fi
    cap=$(need "${model[@]}")
    [ -n "$cap" ] || { failed 'capped' '--plan-only says no device bytes' && return 1; }
    cap=$((cap * percent / 100))
    row 'device memory' "$cap" bytes - "the cap: $percent% of what resident takes"
    for policy in zero-offload stronghold autohete auto; do
        ran "capped-$policy" 45 "${model[@]}" --policy "$policy" --device-memory "$cap" \
            --steps 10 --trace "$out/capped-$policy.trace.json" \
            --timeline "$out/capped-$policy.svg" || continue
        speed "capped-$policy" "$policy"
        held_against "capped-$policy" "$policy"
    done
}

do_part() {
    case $part in
    build) part_build ;;
    kernels | rates) check_program "$part" ;;
    losses) part_losses ;;
    plans) part_plans ;;
    resident) part_resident ;;
    capped) part_capped ;;
    esac
}

# ---- results -----------------------------------------------------------------------------------

table() {
    printf '\n%-9s %-26s %12s %-16s %-5s %s\n' part what number unit '' remark
    local name
    for name in $wanted; do
        awk -F '\t' -v part="$name" '{
            printf "%-9s %-26s %12s %-16s %-5s %s\n", part, $1, $2, $3, $4 == "-" ? "" : $4, $5
        }' "$out/$name.tsv"
    done
}

machine_line() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null |
        head -n 1
}

json() {
    local name
    for name in $wanted; do
        sed "s/^/$name\t/" "$out/$name.tsv"
    done | awk -F '\t' -v date="$(date +%Y-%m-%dT%H:%M:%S)" -v gpu="$(machine_line)" \
        -v commit="$(git describe --always --dirty 2>/dev/null)" -v sim="${sim:+1}" '
        function text(s) {
            gsub(/[\\"]/, "\\\\&", s)
            gsub(/[[:cntrl:]]/, " ", s)
            return "\"" s "\""
        }
        BEGIN {
            printf "{\"date\": %s, \"gpu\": %s, \"commit\": %s, \"sim\": %s,\n \"rows\": [",
                text(date), text(gpu), text(commit), sim ? "true" : "false"
        }
        {
            number = $3 ~ /^-?[0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?$/ ? $3 : "null"
            printf "%s\n  {\"part\": %s, \"what\": %s, \"number\": %s, \"unit\": %s, ",
                (NR > 1 ? "," : ""), text($1), text($2), number, text($4)
            printf "\"verdict\": %s, \"remark\": %s}", $5 == "-" ? "null" : text($5), text($6)
        }
        END { printf "\n]}\n" }' >"$out/results.json"
}

# ---- all of it ---------------------------------------------------------------------------------

# In a process of its own, so that a time limit ends all that it has started.
run_part() {
    part=$1
    local limit left rc=0 started=$SECONDS
    limit=$(limit_of "$part")
    [ -z "$sim" ] || limit=$((2 * limit))
    left=$((total_s - SECONDS))
    [ -z "$sim" ] || left=$limit
    : >"$out/$part.tsv"
    if [ "$left" -lt 5 ]; then
        failed "$part" 'no time is left for it'
        return 1
    fi
    [ "$left" -ge "$limit" ] || limit=$left
    echo "== $part (at most $limit s)"
    GPU_CHECK_PART=$part GPU_CHECK_OUT=$out timeout --kill-after=5 "$limit" \
        scripts/gpu_check.sh ${sim:+--sim} >"$out/$part.log" 2>&1 || rc=$?
    if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
        failed "$part" "not done in $limit s; see $out/$part.log"
    elif [ "$rc" -ne 0 ] && ! grep -q "$(printf '\tFAIL\t')" "$out/$part.tsv"; then
        failed "$part" "$(reason "$out/$part.log")"
    fi
    row 'all of it' $((SECONDS - started)) s -
    return "$rc"
}

bad_usage() {
    echo "gpu_check.sh: $* (--help lists the options)" >&2
    exit 2
}

parse() {
    sim='' out='' wanted=''
    while [ $# -gt 0 ]; do
        case $1 in
        --sim) sim=1 ;;
        --out)
            [ -n "${2-}" ] || bad_usage '--out: which folder?'
            out=$2
            shift
            ;;
        --help)
            usage
            exit 0
            ;;
        -*) bad_usage "unknown option '$1'" ;;
        *)
            [[ " $parts " == *" $1 "* ]] || bad_usage "no part '$1'"
            wanted="$wanted $1"
            ;;
        esac
        shift
    done
    wanted=${wanted:-$parts}
    cuda=1
    [ -z "$sim" ] || cuda=sim
    read -r bin build < <(make -s --no-print-directory CUDA="$cuda" where)
    data='data/stories_train*.bin'
}

main() {
    local name rc=0
    parse "$@"
    bad=''
    if [ -n "${GPU_CHECK_PART-}" ]; then
        part=$GPU_CHECK_PART out=$GPU_CHECK_OUT
        do_part && [ -z "$bad" ]
        exit
    fi
    out=${out:-$PWD/out/gpu_check-$(date +%Y%m%d-%H%M%S)}
    [[ $out == /* ]] || out=$here/$out
    mkdir -p "$out/cache" || exit 1
    export XDG_CACHE_HOME=$out/cache # measured costs
    SECONDS=0
    machine_line
    for name in $wanted; do
        run_part "$name" || rc=1
    done
    json
    table
    printf '\n%d s. Left in %s: results.json, logs, metrics, traces\n' "$SECONDS" "$out"
    rm -rf "$out/cache" "$out"/plans-*/
    exit "$rc"
}

main "$@"
