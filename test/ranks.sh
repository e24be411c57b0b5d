# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # what the tests use, what tap.sh and cli.sh set
# ranks.sh - what the tests of several ranks have in common; source it behind cli.sh. Without an
# mpirun that the program can talk to there is nothing to test.
if ! command -v mpirun >/dev/null || ! mpirun --version | grep -q 'Open MPI'; then
    echo "no mpirun of Open MPI (scripts/install_deps.sh test)" >&2
    exit 77
fi
if OMPI_COMM_WORLD_SIZE=2 train_gpt --steps 1 2>&1 | grep -q 'without MPI'; then
    echo 'this build is one without MPI' >&2
    exit 77
fi

export XDG_CACHE_HOME=$tap_scratch/cache
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0 # of Open MPI
data=$tap_scratch/data
make_data "$data/a" 200
model=(-i "$data/a_train*.bin" --layers 2 --hidden 32 --heads 2 --seq 16 --max-seq 32
    --micro-batch 2 --total-batch 128 --threads 1 --host-threads 1 --val-every 0 --sample-every 0)

# near DIR DIR TOLERANCE: the losses of two runs
near() {
    losses "$1/metrics.jsonl" >"$scratch/losses.1"
    losses "$2/metrics.jsonl" >"$scratch/losses.2"
    close_to "$3" "$scratch/losses.1" "$scratch/losses.2"
}

# launch ARGUMENT...: mpirun, ended after a while
launch() {
    timeout -k 5 100 mpirun --oversubscribe "$@" </dev/null
}

# ranks_of PID: the processes of the ranks below this one, in the order of the ranks
ranks_of() {
    find_ranks "$1" | sort -n | cut -d ' ' -f 2
}
find_ranks() {
    local child
    for child in $(pgrep -P "$1"); do
        if [[ $(readlink "/proc/$child/exe") == */train_gpt ]]; then
            echo "$(tr '\0' '\n' <"/proc/$child/environ" |
                sed -n 's/^OMPI_COMM_WORLD_RANK=//p') $child"
        else
            find_ranks "$child"
        fi
    done
}

# until_true COMMAND...: within a time that is long enough for anything
until_true() {
    local tries
    for ((tries = 0; tries < 600; tries++)); do
        ! "$@" >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    echo "never: $*"
    return 1
}
