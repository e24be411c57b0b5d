# shellcheck shell=bash
# tap.sh - what a shell test needs: source it, run cases, end with tap_done. A case is a function or
# command that returns 0 when it passes; what it prints is shown when it does not. It runs in a
# subshell with `set -e` and a scratch folder of its own as $scratch.
#
#     . "$(dirname "$0")/tap.sh"
#     case_help() { "$TRAIN_GPT_BIN"/train_gpt --help | grep -q -- --model; }
#     tap_case 'help names the model option' case_help
#     tap_done
set -u
tap_count=0
tap_failed=0
tap_scratch=$(mktemp -d)
trap 'rm -rf "$tap_scratch"' EXIT

# tap_case NAME COMMAND [ARGUMENT...]
tap_case() {
    local name=$1 rc
    shift
    tap_count=$((tap_count + 1))
    mkdir "$tap_scratch/$tap_count"
    # Not in an if or behind ||: bash would ignore set -e inside.
    (
        set -e
        export scratch=$tap_scratch/$tap_count
        "$@"
    ) >"$tap_scratch/output" 2>&1
    rc=$?
    if [ "$rc" -eq 0 ]; then
        echo "ok $tap_count - $name"
    else
        tap_failed=$((tap_failed + 1))
        echo "not ok $tap_count - $name"
        sed 's/^/# /' "$tap_scratch/output"
        echo "# status $rc"
    fi
}

# tap_skip NAME REASON
tap_skip() {
    tap_count=$((tap_count + 1))
    echo "ok $tap_count - $1 # SKIP $2"
    echo "skipped: $1: $2" >&2
}

# The plan comes last, so that a script which ends early is found out.
tap_done() {
    echo "1..$tap_count"
    [ "$tap_failed" -eq 0 ]
    exit
}
