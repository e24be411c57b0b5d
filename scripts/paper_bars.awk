# results.tsv of scripts/reproduce_paper.sh -> a bar chart as SVG: a panel per mode, a group of bars
# per model, speed-up over zero-offload. A mark over a bar: what the paper's averages say of it.
BEGIN {
    n_policies = split("patrickstar stronghold autohete-fifo autohete auto", policy, " ")
    split("#9aa5b1 #6b8fb5 #e0a458 #d1495b #2e4057", color, " ")
    # The paper compares autohete with each; the others follow by division.
    mark["autohete"] = 1.85
    mark["patrickstar"] = 1.85 / 1.63
    mark["stronghold"] = 1.85 / 1.32
    mark["autohete-fifo"] = 1.85 / 1.16
    n_modes = split("unguarded clip", mode, " ")
    title["unguarded"] = "without clipping and guard"
    title["clip"] = "--clip 1, guarded"
    BAR = 16
    GROUP = n_policies * BAR + 24
    HEIGHT = 220
    LEFT = 56
    TOP = 64
}

NR > 1 {
    if (!($1 in seen)) {
        seen[$1] = 1
        model[++n_models] = $1
    }
    ms[$1, $2, $3] = $10 == "ok" ? $5 : 0 # the times of a void run mean nothing
}

function speedup(m, how, p) {
    return ms[m, how, p] > 0 && ms[m, how, "zero-offload"] > 0 \
        ? ms[m, how, "zero-offload"] / ms[m, how, p] : 0
}

function y_of(x) { return TOP + HEIGHT * (1 - x / top) }

function text(x, y, anchor, s) {
    printf "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, s
}

function line(x0, y0, x1, y1, style) {
    printf "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x0, y0, x1, y1, style
}

function bar(x, m, how, k,    s, p) {
    p = policy[k]
    s = speedup(m, how, p)
    if (s) {
        printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"%.1f\" fill=\"%s\">", x, y_of(s),
            BAR - 2, y_of(0) - y_of(s), color[k]
        printf "<title>%s, %s, %s: %.2fx</title></rect>\n", m, title[how], p, s
        printf "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" font-size=\"8\">%.2f</text>\n",
            x + BAR / 2 - 1, y_of(s) - 3, s
    }
    if (mark[p]) {
        line(x - 1, y_of(mark[p]), x + BAR - 1, y_of(mark[p]),
             "stroke=\"black\" stroke-width=\"2.5\"")
    }
}

function panel(left, how,    i, k, x) {
    text(left + n_models * GROUP / 2, TOP - 12, "middle", title[how])
    for (x = 0; x <= top; x += 0.5) {
        line(left, y_of(x), left + n_models * GROUP, y_of(x),
             x == 1 ? "stroke=\"#555\" stroke-dasharray=\"4 3\"" : "stroke=\"#ddd\"")
        text(left - 6, y_of(x) + 4, "end", sprintf("%.1fx", x))
    }
    for (i = 1; i <= n_models; i++) {
        for (k = 1; k <= n_policies; k++) {
            bar(left + (i - 1) * GROUP + 12 + (k - 1) * BAR, model[i], how, k)
        }
        text(left + (i - 0.5) * GROUP, y_of(0) + 16, "middle", model[i])
    }
}

END {
    top = 2.25
    for (key in ms) {
        split(key, part, SUBSEP)
        top = speedup(part[1], part[2], part[3]) > top - 0.2 \
            ? speedup(part[1], part[2], part[3]) + 0.2 : top
    }
    panel_width = LEFT + n_models * GROUP + 24
    width = n_modes * panel_width > 640 ? n_modes * panel_width : 640
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" ", width,
        TOP + HEIGHT + 64
    print "font-family=\"sans-serif\" font-size=\"12\">"
    printf "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
    text(12, 22, "start", "Speed-up over zero-offload on an emulated A100-40GB, batch 8; " \
        "black: the paper's average")
    for (i = 1; i <= n_modes; i++) {
        panel(LEFT + (i - 1) * panel_width, mode[i])
    }
    for (k = 1; k <= n_policies; k++) {
        x = LEFT + (k - 1) * 116
        printf "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x,
            TOP + HEIGHT + 34, color[k]
        text(x + 18, TOP + HEIGHT + 44, "start", policy[k])
    }
    print "</svg>"
}
