# What ptxas -v says of every kernel -> a table of registers, shared memory and spills.
#
# First file: the exceptions (scripts/ptxas_spills). Then, from stdin, for each object a line
# `== FILE DTYPE` and what ptxas said, with names as in the source. Exit status 1: a kernel spills
# registers and no exception says why, or an exception is there for a kernel that doesn't.

function is_exception(kernel, arch) {
    if ((kernel, arch) in reason) return kernel SUBSEP arch
    if ((kernel, "all") in reason) return kernel SUBSEP "all"
    return ""
}

# The name alone: no return type, template arguments or parameters.
function bare(name) {
    sub(/[<(].*/, "", name)
    sub(/.*[ :]/, "", name)
    return name
}

function finish(  key) {
    if (kernel == "") return
    printf "%-14s %-5s %-6s %9d %9d %7d %8d %8d  %s\n", file, dtype, arch, registers, shared, stack,
        stores, loads, kernel
    kernels++
    if (stores + loads > 0) {
        key = is_exception(bare(kernel), arch)
        if (key == "") {
            wrong = wrong "spills, without a reason in scripts/ptxas_spills: " kernel ", " dtype \
                ", " arch "\n"
        } else {
            used[key] = 1
        }
    }
    kernel = ""
}

FNR == NR && FILENAME != "-" {
    if ($0 !~ /^ *(#|$)/) {
        key = $1 SUBSEP $2
        $1 = $2 = ""
        reason[key] = $0
    }
    next
}

/^== / {
    finish()
    file = $2
    dtype = $3
    if (!kernels) {
        printf "%-14s %-5s %-6s %9s %9s %7s %8s %8s  %s\n", "file", "dtype", "arch", "registers",
            "shared B", "stack B", "stores B", "loads B", "kernel"
    }
}

/ Compiling entry function / {
    finish()
    kernel = arch = $0
    sub(/.*entry function '/, "", kernel)
    sub(/' for '.*/, "", kernel)
    sub(/.*' for '/, "", arch)
    sub(/'.*/, "", arch)
    registers = shared = stack = stores = loads = 0
}

/ bytes stack frame, / && kernel != "" && !seen_stack[kernel, arch, file, dtype]++ {
    stack = $1
    stores = $5
    loads = $9
}

/ Used [0-9]+ registers/ && kernel != "" {
    for (i = 1; i <= NF; i++) {
        if ($i == "Used") registers = $(i + 1)
        if ($i == "bytes" && $(i + 1) ~ /^smem/) shared = $(i - 1)
    }
    finish()
}

END {
    finish()
    for (key in reason) {
        if (!used[key]) {
            split(key, part, SUBSEP)
            wrong = wrong "scripts/ptxas_spills: " part[1] " " part[2] " does not spill\n"
        }
    }
    if (!kernels) wrong = "no kernels\n"
    printf "%s", wrong > "/dev/stderr"
    exit wrong != ""
}
