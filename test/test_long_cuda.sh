#!/usr/bin/env bash
# The long matrix of the CUDA tests: the contract over more plans, under every schedule of the
# streams and every order of lanes and blocks; the other programs under each of them.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
if [ -z "${CUDA_SIM-}" ]; then
    echo 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang' >&2
    exit 77
fi

contract() { # SCHEDULE ORDER SEED
    SIM_SCHEDULE=$1 SIM_ORDER=$2 SIM_SEED=$3 TEST_SEED=$3 TEST_DEVICE=cuda CONTRACT_PLANS=40 \
        "$CUDA_SIM/test/test_contract"
}

program() { # NAME SCHEDULE ORDER SEED
    SIM_SCHEDULE=$2 SIM_ORDER=$3 SIM_SEED=$4 TEST_SEED=$4 "$CUDA_SIM/test/cuda/test_$1"
}

seed=${TEST_SEED:-100}
echo "TEST_SEED=$seed" >&2
for schedule in lazy random time; do
    for order in forward reverse shuffle; do
        seed=$((seed + 100))
        tap_case "contract, $schedule, $order, seed $seed" contract $schedule $order $seed
        for name in ops_cuda attention matmul; do
            tap_case "$name, $schedule, $order, seed $seed" program $name $schedule $order $seed
        done
    done
done
tap_done
