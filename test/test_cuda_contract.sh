#!/usr/bin/env bash
# The contract on the cuda device, executed on the CPU: random plans under chaos and random
# schedules of the streams give the bits of a run that keeps everything on the device, and nothing
# is raced for, out of bounds or copied from pageable memory (the runtime exits with 86 then).
if [ -z "${CUDA_SIM-}" ]; then
    echo 'not built: no CUDA toolkit, NO_CUDA=1, SAN=... or CC=clang' >&2
    exit 77
fi
export TEST_DEVICE=cuda CONTRACT_PLANS="${CUDA_PLANS:-60}"
export SIM_SCHEDULE=random SIM_SEED="${SIM_SEED:-1}"
exec "$CUDA_SIM/test/test_contract"
