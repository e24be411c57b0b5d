#!/usr/bin/env bash
# scripts/reproduce_paper.sh: its options, and what it makes of logs. (That predictions hold under
# pace is test_long_wind.sh's business.)
# shellcheck disable=SC2154 # what tap.sh and cli.sh set
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
# shellcheck source=test/cli.sh
. "$(dirname "$0")/cli.sh"

case_bad_options_name_themselves() {
    local arguments rc
    for arguments in '--steps 6' '--ranks 3' '--ranks' '--steps 17' '--steps x' --steps --slow; do
        rc=0
        # shellcheck disable=SC2086 # words
        scripts/reproduce_paper.sh $arguments >"$scratch/out" 2>&1 || rc=$?
        cat "$scratch/out"
        [ $rc -eq 2 ]
        grep -qe "${arguments% *}" "$scratch/out"
    done
    scripts/reproduce_paper.sh --help | grep -q -- --quick
}

# log PREDICTED MEASURED LATE: of 1000 operations
log() {
    printf '%s\n' 'slow motion: a second of A100-40GB takes 2 s here' 'step 1/8 | loss 8.08' \
        "step               $1     $2   of the predicted 100.0%" \
        'compute   busy     400.0     500.0' \
        'copy in   busy      300.0      310.0   exposed     39.28     40.16' \
        'host      busy      450.0      475.0   exposed     180.0     190.0' \
        "$3 of 1000 paced operations ended late (?%)"
}

# row MODEL MODE POLICY: the log on stdin
row() {
    awk -v id="$*" -v rows=8 -v tries=1 -f scripts/paper_row.awk -
}

case_a_log_gives_a_row() {
    log 990 1000 10 | row 4B clip auto >"$scratch/row"
    printf '4B\tclip\tauto\t990\t1000\t16.0000\t0.01000\t1\thost\tok\n' | diff - "$scratch/row"
    log 990 1000 11 | row 4B clip auto | grep -q 'void$'
    echo 'train_gpt: no plan of policy auto fits' | row 4B clip auto | grep -q 'does not fit: no p'
    echo 'nothing' | row 4B clip auto | grep -q 'failed$'
}

# results FACTOR LATE: two models, three policies; autohete takes FACTOR % of the predicted time
results() {
    echo header
    for model in 4B 8B; do
        log 2000 2000 0 | row $model clip zero-offload
        log 1500 1500 0 | row $model clip autohete-fifo
        log 1000 "$((10 * $1))" "$2" | row $model clip autohete
    done
    echo 'train_gpt: no plan of policy auto fits' | row 4B clip auto
}

table() {
    results "$@" >"$scratch/results"
    printf '3.0\t%s\n' $'4B\tclip\tautohete\t5' $'4B\tclip\tzero-offload\t15' >"$scratch/simulated"
    awk -F '\t' -f scripts/paper_table.awk "$scratch/results" "$scratch/simulated"
}

case_the_table_judges_predictions() {
    table 102 0 >"$scratch/table"
    cat "$scratch/table"
    grep -qE '^autohete over zero-offload +1\.96x +1\.96x +3\.00x +1\.85x +2\.08x$' "$scratch/table"
    grep -qE '^4B +clip +auto +does not fit: no plan of policy auto fits$' "$scratch/table"
    grep -q '6 runs: off by 0.0% (median.* 2.0% (worst.*: kept$' "$scratch/table"
    fails table 112 0
    fails table 89 0
    fails table 100 11 >"$scratch/void"
    grep -qE '^autohete over zero-offload +- +- ' "$scratch/void"
}

case_the_chart_is_a_picture() {
    results 100 0 | awk -F '\t' -f scripts/paper_bars.awk >"$scratch/bars.svg"
    [ "$(grep -c '<title>' "$scratch/bars.svg")" -eq 4 ]
    tail -n 1 "$scratch/bars.svg" | grep -qx '</svg>'
}

run_cases
