#!/usr/bin/env bash
# The whole way in a few minutes, on any machine: packages, build, corpus, a small GPT, its text.
# `make demo` calls it. Leaves in out/demo: main.log, metrics.jsonl, loss.svg, the checkpoint.
#
# DEMO_STEPS=N trains for N steps instead of about two minutes.
set -eu
unset MAKEFLAGS MAKELEVEL # as if called by hand: all cores, no warnings about a jobserver
cd "$(dirname "$0")/.."

say() {
    printf '\n== %s\n' "$*"
}

say 'packages'
scripts/install_deps.sh build

say 'build'
make --no-print-directory all

say 'corpus: little stories'
[ -e data/stories_train_000000.bin ] || make --no-print-directory corpus

say 'training'
model=(--layers 4 --hidden 128 --heads 4 --max-seq 128)
rm -rf out/demo
./train_gpt "${model[@]}" --seq 128 --micro-batch 16 --steps "${DEMO_STEPS:-1500}" --out out/demo \
    --lr 2e-3 --warmup 50 --lr-final 0.1 --weight-decay 0.1 --val-every 100 --val-batches 10 \
    --sample-every 300 --sample-tokens 200

say 'what it writes now'
newest=$(printf '%s\n' out/demo/model_*.bin | sort | tail -n 1)
./train_gpt --generate --model "$newest" --sample-tokens 400 --temperature 0.8

say 'left in out/demo'
ls -l out/demo
printf '\nYour own text: ./tokenize mytext.txt -o data/mine\n'
printf "Then:          ./train_gpt -i 'data/mine_train*.bin' -j 'data/mine_val*.bin' -o out/mine\n"
