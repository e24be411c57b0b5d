#!/usr/bin/env bash
# The determinism contract, on the program as a whole: no bit depends on the number of threads, and
# little on the instruction set.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

data=$tap_scratch/data
make_data "$data/a" 2000

# Large enough that matrix products, attention, loss and Adam are all cut into several pieces; odd
# numbers of rows and heads.
train() {
    train_gpt -i "$data/a_train*.bin" --layers 2 --hidden 96 --heads 3 --seq 80 --micro-batch 3 \
        --total-batch 480 --steps 8 --val-every 4 --val-batches 2 --weight-decay 0.1 \
        --sample-every 4 --sample-tokens 8 "$@"
}

# threads DTYPE
threads() {
    local n
    for n in 1 2 3; do
        train --dtype "$1" --threads "$n" --out "$scratch/$n" >"$scratch/$n.txt"
    done
    same "$scratch/1" "$scratch/2" 8
    same "$scratch/1" "$scratch/3" 8
    # What is sampled along the way too.
    sed -n '/^---$/,/^---$/p' "$scratch/1.txt" >"$scratch/1.samples"
    [ "$(grep -c '^---$' "$scratch/1.samples")" -eq 4 ]
    sed -n '/^---$/,/^---$/p' "$scratch/3.txt" | cmp - "$scratch/1.samples"
}

# A run again is the same, and what should change it does: the test can fail.
seed_and_options() {
    train --threads 1 --out "$scratch/a" >/dev/null
    train --threads 1 --out "$scratch/b" >/dev/null
    same "$scratch/a" "$scratch/b" 8
    train --threads 1 --out "$scratch/c" --seed 1 >/dev/null
    differ "$scratch/a/model_00000008.bin" "$scratch/c/model_00000008.bin"
    train --threads 1 --out "$scratch/d" --lr 2.999e-4 >/dev/null
    differ "$scratch/a/model_00000008.bin" "$scratch/d/model_00000008.bin"
}

# isa DTYPE ISA TOLERANCE: against the baseline. Their sums are taken in another order.
isa() {
    local i
    for i in base "$2"; do
        TRAIN_GPT_ISA=$i train --dtype "$1" --threads 1 --out "$scratch/$i" | grep -q ", $i, "
        losses "$scratch/$i/metrics.jsonl" >"$scratch/$i.losses"
    done
    close_to "$3" "$scratch/base.losses" "$scratch/$2.losses"
}

isa_unknown() {
    TRAIN_GPT_ISA=sse9 refused 2 'TRAIN_GPT_ISA=sse9: not one of' -i "$data/a_train*.bin"
}

tap_case 'fp32: the same bits with 1, 2 and 3 threads' threads fp32
tap_case 'bf16: the same bits with 1, 2 and 3 threads' threads bf16
tap_case 'the same command gives the same bits, another seed or rate others' seed_and_options
for i in avx2 avx512; do
    if TRAIN_GPT_ISA=$i train_gpt -i "$data/a_train*.bin" "${tiny[@]}" --steps 0 \
        >/dev/null 2>&1; then
        tap_case "fp32: $i gives the losses of the baseline" isa fp32 $i 1e-6
        tap_case "bf16: $i gives the losses of the baseline" isa bf16 $i 1e-3
    else
        tap_skip "$i gives the losses of the baseline" 'this processor does not have it'
    fi
done
tap_case 'an unknown TRAIN_GPT_ISA is refused' isa_unknown
tap_done
