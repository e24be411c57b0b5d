#!/usr/bin/env bash
# Trains with several ranks on this machine, by mpirun.
#
#     scripts/run_node.sh OPTION...          options of ./train_gpt, as they are
#
# Environment: RANKS (default: one per GPU, without GPUs one per NUMA node), TRAIN_GPT (the program,
# default ./train_gpt), MPIRUN_OPTIONS (more options for mpirun, words between blanks, e.g.
# --oversubscribe for more ranks than cores), DRY_RUN=1 (prints the command, runs nothing).
#
# Ctrl-C or SIGTERM stops after the running step and saves a checkpoint if there is an --out; the
# same command with --resume goes on. A second one stops at once. mpirun itself would, after
# SIGTERM, kill a second or two later, without time for a checkpoint, and with a longer limit
# (odls_base_sigkill_timeout) waits that long before it tells the ranks; what it forwards at once is
# SIGUSR1, which means the same to them.
set -u

program=${TRAIN_GPT:-./train_gpt}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
nodes=$({ lscpu -p=node 2>/dev/null || echo 0; } | grep -v '^#' | sort -u | wc -l)
ranks=${RANKS:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo "$nodes")}

# The ranks divide the cores themselves (hete/cores.h): mpirun would give each of two just one core.
read -r -a more <<<"${MPIRUN_OPTIONS-}"
command=(mpirun -np "$ranks" --bind-to none ${more[@]+"${more[@]}"} "$program" "$@")

if [ "${DRY_RUN-0}" = 1 ]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

set -m # a process group of its own: Ctrl-C is for this script alone
"${command[@]}" </dev/null &
mpirun=$!
trap 'kill -USR1 "$mpirun"' INT TERM
wait "$mpirun"
while kill -0 "$mpirun" 2>/dev/null; do # it was a signal that has ended the waiting
    wait "$mpirun"
done
wait "$mpirun" # its exit status, whatever the one before has said
