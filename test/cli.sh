# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # what the tests use, what tap.sh sets
# cli.sh - what the tests of ./train_gpt as a user runs it have in common; source it behind tap.sh.
# They run in the folder of the repository and write below $tap_scratch alone.
export LC_ALL=C
unset TRAIN_GPT_ISA OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
bin=$(cd "${TRAIN_GPT_BIN:-.}" && pwd) || exit 1
shared=${TRAIN_GPT_SHARED:-../shared}

train_gpt() {
    "$bin/train_gpt" "$@"
}

# A model and a batch that take no time.
tiny=(--layers 2 --hidden 32 --heads 2 --seq 16 --max-seq 32 --micro-batch 4 --threads 1
    --val-every 0 --sample-every 0)

# make_data PREFIX [LINES]: shards (several) and a tokenizer of a text of little regularity
make_data() {
    mkdir -p "$(dirname "$1")"
    awk -v n="${2:-400}" 'BEGIN { for (i = 1; i <= n; i++)
        print "line " i ": " i * 7919 % 1009 ", " (i % 3 ? "red" : "blue") }' |
        "$bin/tokenize" - -o "$1" --shard-tokens 3000 >/dev/null
}

# le16 N..., le32 N...: the numbers as little-endian bytes
le16() {
    local n bytes
    for n; do
        printf -v bytes '\\x%02x\\x%02x' $((n & 255)) $((n >> 8 & 255))
        # shellcheck disable=SC2059 # the bytes are the format
        printf "$bytes"
    done
}
le32() {
    local n
    for n; do
        le16 $((n & 65535)) $((n >> 16 & 65535))
    done
}

# header N...: a file header of 256 int32 that begins with these
header() {
    le32 "$@"
    head -c $((1024 - 4 * $#)) /dev/zero
}

# shard TOKEN...: a token shard
shard() {
    header 20240520 1 $#
    le16 "$@"
}

# poke FILE OFFSET < BYTES: overwrites them in the file
poke() {
    dd of="$1" bs=1 seek="$2" conv=notrunc status=none
}

# The losses of a metrics.jsonl, one a line.
losses() {
    sed -n 's/.*"loss":\([^,]*\),.*/\1/p' "$1"
}

# A metrics.jsonl without times.
timeless() {
    sed 's/"ms":[^}]*"skipped"/"skipped"/' "$1"
}

# close_to TOLERANCE FILE FILE: as many numbers in both, none further apart, relatively
close_to() {
    [ "$(wc -l <"$2")" -eq "$(wc -l <"$3")" ]
    paste "$2" "$3" | awk -v most="$1" '
        { d = ($1 > $2 ? $1 - $2 : $2 - $1) / ($1 > 0 ? $1 : -$1)
          if (d > worst) worst = d
          if (!(d <= most)) { print "line " NR ": " $1 " and " $2; bad = 1 } }
        END { if (NR == 0) print "no numbers"; print "worst " worst
              exit bad || NR == 0 }'
}

# same DIR DIR STEP: two runs are one: parameters, state and logs at that step, but for times
same() {
    cmp "$(model "$1" "$3")" "$(model "$2" "$3")"
    cmp "$(state "$1" "$3")" "$(state "$2" "$3")"
    cmp "$1/main.log" "$2/main.log"
    cmp <(timeless "$1/metrics.jsonl") <(timeless "$2/metrics.jsonl")
    cmp "$1/loss.svg" "$2/loss.svg"
}

# state DIR STEP, model DIR STEP: the files of a checkpoint
state() {
    printf '%s/state_%08d.bin' "$1" "$2"
}
model() {
    printf '%s/model_%08d.bin' "$1" "$2"
}

# cut_back FROM TO STEP: a copy of a run as it was when the checkpoint of that step was its last
cut_back() {
    local file
    cp -r "$1" "$2"
    for file in "$2"/state_* "$2"/model_* "$2"/DONE_*; do
        [[ ${file##*_} > $(printf '%08d.zzz' "$3") ]] && rm "$file"
    done
    [ -e "$(state "$2" "$3")" ]
}

# The command fails. (`! command` would not do: bash's set -e passes over it.)
fails() {
    if "$@"; then
        echo "did not fail: $*"
        return 1
    fi
}

# differ FILE FILE
differ() {
    [ -s "$1" ] && [ -s "$2" ]
    fails cmp -s "$1" "$2"
}

# refused STATUS PATTERN ARGUMENT...: train_gpt exits with this status; the only line on stderr (of
# a bad command line) or the last one (of bad data) matches; no step was made. What it printed is
# left in $scratch/stdout and $scratch/stderr.
refused() {
    local status=$1 pattern=$2 rc=0
    shift 2
    train_gpt "$@" >"$scratch/stdout" 2>"$scratch/stderr" </dev/null || rc=$?
    echo "status $rc, expected $status and: $pattern"
    tail -n 3 "$scratch/stderr"
    [ "$rc" -eq "$status" ]
    [ "$status" -ne 2 ] || [ "$(wc -l <"$scratch/stderr")" -eq 1 ]
    tail -n 1 "$scratch/stderr" | grep -qE -- "^train_gpt: .*$pattern"
    fails grep '^step *[0-9]*/[0-9]* | loss' "$scratch/stdout"
}

# Runs every function case_* as a case, in the order of their names, and ends.
run_cases() {
    local c
    for c in $(declare -F | sed -n 's/^declare -f \(case_\)/\1/p'); do
        tap_case "$(echo "${c#case_}" | tr _ ' ')" "$c"
    done
    tap_done
}
