# results.tsv, then simulated.tsv of scripts/reproduce_paper.sh -> the table for people. Exit status
# 1: predictions are off by more than the bounds below, or a run is void or failed.
BEGIN {
    MEDIAN_MOST = 0.05
    WORST_MOST = 0.10
    if (ranks == 4) {
        paper("autohete", "zero-offload", 2.23, 2.67)
        paper("autohete", "patrickstar", 1.65, 1.79)
        paper("autohete", "stronghold", 1.44, 1.52)
        paper("autohete", "autohete-fifo", 1.21, 1.30)
    } else {
        paper("autohete", "zero-offload", 1.85, 2.08)
        paper("autohete", "patrickstar", 1.63, 1.91)
        paper("autohete", "stronghold", 1.32, 1.41)
        paper("autohete", "autohete-fifo", 1.16, 1.24)
    }
    paper("auto", "autohete", 0, 0)
    split("unguarded clip", modes, " ")
    title["unguarded"] = "without clipping and guard"
    title["clip"] = "with --clip 1 and the guard"
}

function paper(fast, slow, average, best) {
    n_pairs++
    pair_fast[n_pairs] = fast
    pair_slow[n_pairs] = slow
    paper_average[n_pairs] = average
    paper_best[n_pairs] = best
}

function model_is(name) {
    if (!(name in seen_model)) {
        seen_model[name] = 1
        model[++n_models] = name
    }
}

function times(x) { return x > 0 ? sprintf("%.2fx", x) : "-" }

FNR == 1 { file++ }

file == 1 && FNR > 1 {
    model_is($1)
    line[++n_lines] = $0
    if ($10 == "ok") { # the times of void runs are shown, and count for nothing
        ms["measured", $1, $2, $3] = $5
        limit[$1, $2, $3] = $9
        error[++n_errors] = $5 > $4 ? $5 / $4 - 1 : 1 - $5 / $4
        if (error[n_errors] >= error[worst + 0]) {
            worst = n_errors
            worst_run = $1 " " $2 " " $3
        }
    }
    n_void += $10 == "void"
    n_failed += $10 == "failed"
}

file == 2 {
    if (!($1 in seen_rate)) {
        seen_rate[$1] = 1
        rate[++n_rates] = $1
    }
    ms[$1, $2, $3, $4] = $5
}

# Of one pair of policies over all models: sets `average` and `best`, 0 where none has both.
function compare(source, mode, fast, slow,    i, x, n) {
    average = best = n = 0
    for (i = 1; i <= n_models; i++) {
        if (ms[source, model[i], mode, fast] && ms[source, model[i], mode, slow]) {
            x = ms[source, model[i], mode, slow] / ms[source, model[i], mode, fast]
            average += x
            best = x > best ? x : best
            n++
        }
    }
    average = n ? average / n : 0
}

function print_runs(    i, f, base) {
    printf "%-5s %-10s %-14s %10s %10s %8s %10s %8s %7s  %s\n", "model", "mode", "policy",
        "predicted", "measured", "off by", "samples/s", "speed-up", "late", "limit"
    for (i = 1; i <= n_lines; i++) {
        split(line[i], f, "\t")
        printf "%-5s %-10s %-14s ", f[1], f[2], f[3]
        if (f[4] == "") {
            print f[10]
            continue
        }
        base = ms["measured", f[1], f[2], "zero-offload"]
        printf "%10.1f %10.1f %+7.1f%% %10.3f %8s %6.1f%%  %s%s\n", f[4], f[5],
            100 * (f[5] / f[4] - 1), f[6], times(f[10] == "ok" ? base / f[5] : 0), 100 * f[7], f[9],
            f[10] == "void" ? "; VOID after " f[8] " tries" : ""
    }
    print "predicted, measured: ms of a step in slow motion; samples/s and speed-up (over"
    print "zero-offload): of the emulated machine; limit: the lane that is longest busy and exposed"
}

function print_limits(mode, policy,    i, text) {
    for (i = 1; i <= n_models; i++) {
        if (limit[model[i], mode, policy] != "") {
            text = text (text == "" ? "" : ", ") model[i] " " limit[model[i], mode, policy]
        }
    }
    return text
}

function print_pairs(mode,    i, r) {
    printf "\nAverage speed-up over the models, %s\n", title[mode]
    printf "%-28s %15s   %-24s  %15s\n", "", "measured", " simulated, CPU Adam at", "the paper"
    printf "%-28s %7s %7s  ", "", "average", "best"
    for (r = 1; r <= n_rates; r++) {
        printf " %7s", rate[r] "G/s"
    }
    printf "   %7s %7s\n", "average", "best"
    for (i = 1; i <= n_pairs; i++) {
        compare("measured", mode, pair_fast[i], pair_slow[i])
        printf "%-28s %7s %7s  ", pair_fast[i] " over " pair_slow[i], times(average), times(best)
        short = average && average < paper_average[i]
        for (r = 1; r <= n_rates; r++) {
            order = pair_slow[i] == "autohete-fifo"
            compare(rate[r], mode, order ? "priority" : pair_fast[i], order ? "fifo" : pair_slow[i])
            printf " %7s", times(average)
        }
        printf "   %7s %7s%s\n", times(paper_average[i]), times(paper_best[i]),
            short ? "  less; limit: " print_limits(mode, pair_fast[i]) : ""
    }
}

function print_errors(    i, j, x, median) {
    for (i = 2; i <= n_errors; i++) {
        x = error[i]
        for (j = i - 1; j >= 1 && error[j] > x; j--) {
            error[j + 1] = error[j]
        }
        error[j + 1] = x
    }
    if (n_errors == 0) {
        printf "\nSimulator against reality: %d runs void, %d failed: MISSED\n", n_void, n_failed
        bad = 1
        return
    }
    median = n_errors % 2 ? error[(n_errors + 1) / 2] \
                          : (error[n_errors / 2] + error[n_errors / 2 + 1]) / 2
    bad = median > MEDIAN_MOST || error[n_errors] > WORST_MOST || n_void || n_failed
    printf "\nSimulator against reality, %d runs: off by %.1f%% (median; at most %.0f%%), ",
        n_errors, 100 * median, 100 * MEDIAN_MOST
    printf "%.1f%% (worst, %s; at most %.0f%%)", 100 * error[n_errors], worst_run, 100 * WORST_MOST
    if (n_void + n_failed) {
        printf "; %d void, %d failed", n_void, n_failed
    }
    print bad ? ": MISSED" : ": kept"
}

END {
    print_runs()
    print_pairs(modes[1])
    print_pairs(modes[2])
    print_errors()
    exit bad
}
