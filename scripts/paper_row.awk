# The log of a run of scripts/reproduce_paper.sh -> its line of results.tsv. Variables: id (model,
# mode and policy), rows (of a step), tries. Times are those of the slow motion; samples_per_s is
# that of the machine which is emulated.
BEGIN {
    OFS = "\t"
    gsub(/ /, OFS, id)
}

/^slow motion: / { slow = $(NF - 2) }

/^step .* of the predicted / { predicted = $2; measured = $3 }

# "copy in   busy <predicted> <measured>   exposed <predicted> <measured>"
measured && / busy / && !/^ / {
    name = $0
    sub(/ *busy.*/, "", name)
    for (i = 1; $i != "busy"; i++) {
    }
    weight = $(i + 2) + $(i + 5)
    if (weight > most) {
        most = weight
        limit = name
    }
}

/ paced operations ended late / { late = $1 / $3 }

/^train_gpt: no plan / { reason = $0; sub(/^train_gpt: /, "", reason) }

END {
    if (!measured) {
        print id, "", "", "", "", tries, "", reason == "" ? "failed" : "does not fit: " reason
        exit
    }
    print id, predicted, measured, sprintf("%.4f", rows / (measured / 1000 / slow)),
        sprintf("%.5f", late), tries, limit,
        (late > 0.01 ? "void" : "ok")
}
