#!/usr/bin/env bash
# The whole program with --device cuda, executed on the CPU: its losses against the cpu device's,
# its bits under plans, and what it says where there is no GPU to be used.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"
if [ -z "${CUDA_SIM-}" ]; then
    echo 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang' >&2
    exit 77
fi

export XDG_CACHE_HOME=$tap_scratch/cache
data=$tap_scratch/data
make_data "$data/a" 100

# on DEVICE ARGUMENT...: the losses of 20 steps, one a line
on() {
    local device=$1
    shift
    "$CUDA_SIM"/train_gpt --device "$device" -i "$data/a_train*.bin" --layers 3 --hidden 64 \
        --heads 4 --max-seq 32 -t 32 -b 2 -d 128 --steps 20 --val-every 0 --sample-every 0 \
        "$@" >"$scratch/$device.out" || return
    sed -n 's/^step .* | loss \([0-9.]*\) .*/\1/p' "$scratch/$device.out"
}

# close TOLERANCE: 20 losses each, and no two further apart
close() {
    paste "$scratch/a" "$scratch/b" | awk -v most="$1" '
        { d = $1 - $2; d = d < 0 ? -d : d; if (d > worst) worst = d }
        END { print NR " losses, at most " worst " apart"; exit !(NR == 20 && worst <= most) }'
}

same_losses() { # DTYPE TOLERANCE
    on cpu --dtype "$1" >"$scratch/a"
    on cuda --dtype "$1" >"$scratch/b"
    close "$2"
}

# Everything that a plan decides, against everything on the device.
same_bits() {
    local policy
    on cuda --out "$scratch/resident" --policy resident >"$scratch/a"
    for policy in zero-offload zero-infinity stronghold autohete; do
        on cuda --out "$scratch/$policy" --policy "$policy" --chaos 5 >"$scratch/b"
        cmp "$scratch/a" "$scratch/b"
        cmp "$scratch"/resident/model_*.bin "$scratch/$policy"/model_*.bin
    done
}

bf16_is_default() {
    on cuda | grep -q . && grep -q '^device: cuda: .*, bf16$' "$scratch/cuda.out"
}

auto_prefers_cuda() {
    on auto | grep -q . && grep -q '^device: cuda: ' "$scratch/auto.out"
}

auto_without_gpu() {
    SIM_FAIL=no-device on auto 2>"$scratch/err" | grep -q .
    cat "$scratch/err"
    grep -q '^device: cpu: .*, fp32$' "$scratch/auto.out"
    grep -q '^training on the CPU: .*no GPU' "$scratch/err"
}

# refused FAULT TEXT ARGUMENT...
refused() {
    local fault=$1 text=$2
    shift 2
    SIM_FAIL=$fault on cuda "$@" >"$scratch/losses" 2>"$scratch/err" && return 1
    cat "$scratch/err"
    grep -q "^train_gpt: .*$text" "$scratch/err"
    [ ! -s "$scratch/losses" ]
}

lost() {
    SIM_FAIL=lost:1500 on cuda --out "$scratch/out" --checkpoint-every 2 2>"$scratch/err" &&
        return 1
    cat "$scratch/err"
    grep -Eq '^train_gpt: .*; step [0-9]+, .* lane: .* of unit [0-9]' "$scratch/err"
    grep -q '^train_gpt: the last checkpoint is that of step ' "$scratch/err"
}

tap_case 'fp32: 20 losses are the cpu device'\''s to 1e-4' same_losses fp32 1e-4
tap_case 'bf16: 20 losses are the cpu device'\''s to 2e-2' same_losses bf16 2e-2
tap_case 'five policies give the same bits' same_bits
tap_case 'bf16 is the default' bf16_is_default
tap_case 'auto takes a GPU' auto_prefers_cuda
tap_case 'auto without a GPU trains on the CPU and says why' auto_without_gpu
tap_case 'no driver' refused no-driver 'no NVIDIA driver'
tap_case 'a driver that is too old' refused old-driver 'a newer driver'
tap_case 'no GPU' refused no-device 'no GPU'
tap_case 'a GPU that is too old' refused sm_75 'compute capability 7.5'
tap_case 'memory taken by somebody else meanwhile' refused oom 'are free'
tap_case 'memory that cannot be pinned' refused pin 'pinned'
tap_case 'heads that are no multiple of 8' refused '' 'multiple of 8' --hidden 60 --heads 5
tap_case 'more memory than there is' refused '' 'device-memory' --device-memory 100G
tap_case 'a GPU that is lost: operation, unit, step and checkpoint are named' lost
tap_done
