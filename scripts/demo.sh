#!/usr/bin/env bash
# The whole way in a few minutes, on any machine: packages, build, corpus, a small GPT that trains
# in a third of the memory it needs, its text. `make demo` calls it. Leaves in out/demo:
# timeline.svg, trace.json, main.log, metrics.jsonl, loss.svg, the checkpoint.
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

model=(--layers 5 --hidden 128 --heads 4 --max-seq 128 --seq 128 --micro-batch 4)
say 'what the model needs, with everything on the device'
need=$(./train_gpt "${model[@]}" --plan-only --machine scripts/machines/a100-40g --format json |
    sed -n '/"policy": "resident"/,/"busy_s"/s/.*"device_bytes": \([0-9]*\).*/\1/p' | head -n 1)
printf '%s bytes\n' "$need"

# The link is so slow that copies take a good part of a step: there is something to hide.
say "training in a third of that: --device-memory $((need / 3))"
rm -rf out/demo
./train_gpt "${model[@]}" --steps "${DEMO_STEPS:-2000}" --out out/demo --lr 2e-3 --warmup 50 \
    --lr-final 0.1 --weight-decay 0.1 --val-every 250 --val-batches 40 --sample-every 500 \
    --sample-tokens 200 --device-memory $((need / 3)) --link-gb-per-s 0.5 \
    --timeline out/demo/timeline.svg --trace out/demo/trace.json

say 'what it writes now'
newest=$(printf '%s\n' out/demo/model_*.bin | sort | tail -n 1)
./train_gpt --generate --model "$newest" --sample-tokens 400 --temperature 0.8

say 'left in out/demo'
ls -l out/demo
cat <<'END'

timeline.svg   a step as it was predicted (above) and as it was measured (below), a row for each of
               compute, copies in, copies out and the optimizer on the host: while the device
               computes with one block, the next one's parameters come in, and the gradients of the
               last one leave to be used on the host. Gaps in the first row are what is not hidden.
trace.json     the same, operation by operation, for https://ui.perfetto.dev or chrome://tracing
loss.svg       the loss: to the last bit that of a run without --device-memory
END
printf '\nYour own text: ./tokenize mytext.txt -o data/mine\n'
printf "Then:          ./train_gpt -i 'data/mine_train*.bin' -j 'data/mine_val*.bin' -o out/mine\n"
