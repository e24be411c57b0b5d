#!/usr/bin/env bash
# llm.c #19 #32 #81: what an optimizing compiler did to the numbers. The losses of ten steps are the
# same within 1e-5 for gcc and clang, -O0, -O2 and -O3, and for every instruction set.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1

# Ten steps of a small model whose shapes no vector width divides; prints their losses.
# losses PROGRAM [OPTION...]
losses() {
    local program=$1
    shift
    rm -rf "$scratch/out"
    "$program" -i "$tap_scratch/text_train*.bin" -j "$tap_scratch/text_val*.bin" \
        --layers 2 --hidden 60 --heads 3 --max-seq 50 --seq 50 --micro-batch 3 --total-batch 300 \
        --steps 10 --lr 1e-2 --warmup 3 --weight-decay 0.1 --val-every 0 --sample-every 0 \
        --out "$scratch/out" "$@" >/dev/null
    sed -n 's/.*"loss":\([0-9.e+-]*\).*/\1/p' "$scratch/out/metrics.jsonl"
}

# Fails where a loss of file $1 is further than 1e-5 from that of file $2, or there are not ten.
same_losses() {
    paste -d ' ' "$1" "$2" | awk '
        { d = ($1 - $2) / $2; d = d < 0 ? -d : d; worst = d > worst ? d : worst }
        NF != 2 || !(d <= 1e-5) { print "step " NR - 1 ": " $0 " differ by " d; bad = 1 }
        END { print "largest difference: " worst; exit bad || NR != 10 }'
}

case_build() { # COMPILER OPTIMIZATION
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u BUILD make -s CC="$1" OPT="$2" all
    local folder
    folder=build$(case $1 in gcc) ;; *) echo "-$1" ;; esac)${2#-O3}
    [ "$folder" = build ] && folder=.
    losses "$folder/train_gpt" >"$scratch/losses"
    same_losses "$scratch/losses" "$tap_scratch/reference"
}

case_isa() {
    TRAIN_GPT_ISA=$1 losses "$TRAIN_GPT_BIN/train_gpt" >"$scratch/losses"
    same_losses "$scratch/losses" "$tap_scratch/reference"
}

# They are losses of a model that learns, and a difference of 2e-5 is seen.
case_reference() {
    awk 'NR == 1 { first = $1 } END { exit !(NR == 10 && first > 5 && $1 < first - 0.5) }' \
        "$tap_scratch/reference"
    awk '{ printf "%.17g\n", NR == 7 ? $1 * 1.00002 : $1 }' "$tap_scratch/reference" \
        >"$scratch/losses"
    ! same_losses "$scratch/losses" "$tap_scratch/reference" || return 1
}

export TRAIN_GPT_BIN=${TRAIN_GPT_BIN:-.}
scratch=$tap_scratch
"$TRAIN_GPT_BIN/tokenize" --stories 50K -o "$tap_scratch/text" >&2 || exit 1
losses "$TRAIN_GPT_BIN/train_gpt" >"$tap_scratch/reference"
tap_case 'the reference learns, and a difference shows' case_reference
for compiler in gcc clang; do
    if ! command -v $compiler >/dev/null; then
        tap_skip "$compiler" "$compiler is not installed (scripts/install_deps.sh ci)"
        continue
    fi
    for optimization in -O0 -O2 -O3; do
        tap_case "$compiler $optimization" case_build $compiler $optimization
    done
done
flags=$(grep -m 1 '^flags' /proc/cpuinfo)
for isa in base avx2 avx512f; do
    if [ $isa = base ] || [[ " $flags " == *" $isa "* ]]; then
        tap_case "instructions: ${isa%f}" case_isa "${isa%f}"
    else
        tap_skip "instructions: ${isa%f}" 'this processor does not have them'
    fi
done
tap_done
