#!/usr/bin/env bash
# Pieces of more than 2^31 bytes between two ranks.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
if ! command -v mpirun >/dev/null || ! ldd "$BUILD/test/test_comm" | grep -q libmpi; then
    echo 'no mpirun, or a build without MPI (scripts/install_deps.sh test)' >&2
    exit 77
fi
if [ "$(awk '/^MemAvailable/ { print $2 }' /proc/meminfo)" -lt 12000000 ]; then
    echo 'less than 12 GB of memory are available' >&2
    exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
tap_case 'pieces of more than 2 GiB' mpirun --oversubscribe -np 2 "$BUILD/test/test_comm" large 1
tap_done
