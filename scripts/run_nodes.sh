#!/usr/bin/env bash
# Trains on several machines, by mpirun over ssh.
#
#     HOSTS=FILE scripts/run_nodes.sh OPTION...      options of ./train_gpt, as they are
#
# Every machine needs the same program and the same data at the same paths (a shared folder), an
# --out that the first machine can write and all can read, and ssh without a password from the
# first to the others. FILE has a line per machine, with as many slots as it has GPUs (or NUMA
# nodes), this machine first:
#
#     node1 slots=8
#     node2 slots=8
#
# Environment: RANKS (default: all slots), TRAIN_GPT (the program, default train_gpt in this
# folder), INTERFACE (network for MPI over TCP, e.g. ib0 or 10.0.0.0/16, where machines have several
# of which not all lead to each other), MPIRUN_OPTIONS, DRY_RUN and signals: as for run_node.sh.
set -u

if [ ! -r "${HOSTS-}" ] || [[ $HOSTS == *[[:space:]]* ]]; then
    echo "run_nodes.sh: HOSTS='${HOSTS-}' is no file that can be read (and without blanks in its" \
        "name): one with a line 'machine slots=N' for each machine" >&2
    exit 2
fi
slots=$(sed 's/#.*//' "$HOSTS" | awk 'NF { n = 1
    for (i = 2; i <= NF; i++) if (sub(/^slots=/, "", $i)) n = $i
    sum += n } END { print sum + 0 }')
options="--hostfile $HOSTS --map-by slot ${INTERFACE:+--mca btl_tcp_if_include $INTERFACE}"
# What this environment sets, the other machines are told.
for name in $(compgen -e | grep -E '^(TRAIN_GPT_|NCCL_|OMP_|XDG_CACHE_HOME$|LD_LIBRARY_PATH$)'); do
    options+=" -x $name"
done

export RANKS=${RANKS:-$slots} TRAIN_GPT=${TRAIN_GPT:-$PWD/train_gpt}
export MPIRUN_OPTIONS="$options ${MPIRUN_OPTIONS-}"
exec "$(dirname "$0")/run_node.sh" "$@"
