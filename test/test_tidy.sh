#!/usr/bin/env bash
# The rules of this code that a machine can check. Each rule is a function that prints what breaks
# it in the git repository of the working folder and fails if it printed something; each is tried on
# a repository in which it is broken as well, so that a rule which finds nothing any more is found.
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
cd "$(dirname "$0")/.." || exit 1
export LC_ALL=C.UTF-8
BUILD=${BUILD:-build}

if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    echo 'the rules need a git checkout, to know which files are ours' >&2
    exit 77
fi

# ours PATTERN...: tracked files
ours() {
    git ls-files -- "$@"
}

code=('*.c' '*.h' '*.cu' '*.cuh')

# The library: what may neither print nor exit.
library() {
    ours '*.c' | grep -vE '^(test|dev)/|^train_gpt\.c$|^data/tokenize\.c$'
}

# Fails if the input is not empty, and shows it.
none() {
    ! grep .
}

# ---- text ----

rule_line_length() {
    ours "${code[@]}" '*.sh' '*.py' Makefile .ci/run | xargs grep -nE '^.{101,}' | none
}

rule_no_tabs() {
    ours "${code[@]}" '*.sh' '*.py' .ci/run | xargs grep -nP '\t' | none
}

rule_no_trailing_space() {
    ours "${code[@]}" '*.sh' '*.py' '*.md' Makefile .ci/run |
        xargs grep -nE '[[:space:]]$' | none
}

# data/error.h is guarded by DATA_ERROR_H.
rule_header_guards() {
    ours '*.h' | while read -r file; do
        guard=$(echo "$file" | tr 'a-z/.-' 'A-Z___')
        [ "$(grep -m 1 '^#' "$file")" = "#ifndef $guard" ] &&
            grep -qx "#define $guard" "$file" || echo "$file: not guarded by $guard"
    done | none
}

# A machine's own folders; also where somebody works.
rule_no_machine_paths() {
    ours | grep -v '^test/fixtures/' | xargs grep -nIE '(^|[^a-zA-Z0-9_.])/(work|root|home)/' | none
}

rule_no_large_files() {
    ours | while read -r file; do
        [ "$(stat -c %s "$file")" -le 2000000 ] || echo "$file is larger than 2 MB"
    done | none
}

# ---- code ----

# Unbounded copies, conversions that cannot report an error, names that race.
rule_no_forbidden_calls() {
    ours "${code[@]}" ':!test/test_*' | xargs grep -nE \
        '\b(strcpy|strcat|v?sprintf|gets|atoi|atol|atof|tmpnam|tempnam|mktemp)\(' | none
}

# They delete NaN checks. A comment may say so.
rule_no_fast_math() {
    ours Makefile '*.sh' .ci/run | grep -v test_tidy | xargs grep -nE '^[^#]*(-ffast-math|-Ofast)' |
        none
}

# Library functions return an error; only main() prints and exits.
rule_library_is_silent() {
    library | xargs grep -nE \
        '\b(exit|_exit|abort|printf|vprintf|perror|puts|putchar)\(|fprintf\((stderr|stdout)' | none
}

# Errors and files that are whole belong to everybody.
rule_layers() {
    {
        ours 'hete/*.[ch]' | xargs grep -nE '#include "(data/|kernels/(gpt|cpu))' |
            grep -vE '"data/(error|files|svg)\.h"'
        ours 'kernels/*.[ch]' 'kernels/*.cu*' | xargs grep -nE '#include "(hete|data/[^e])'
        ours 'data/*.[ch]' | xargs grep -nE '#include "(hete|kernels)'
    } | none
}

rule_functions_are_short() {
    ours '*.c' '*.cu' '*.cuh' | xargs awk 'FNR == 1 { start = 0 }
        /^{/ { start = FNR }
        /^}/ && start { if (FNR - start > 71) print FILENAME ":" start ": " FNR - start - 1 " lines"
                        start = 0 }' | none
}

# ---- nothing dead ----

rule_headers_are_included() {
    ours '*.h' '*.cuh' | while read -r file; do
        ours "${code[@]}" | xargs grep -qF "#include \"$file\"" || echo "$file: nobody includes it"
    done | none
}

# Every source lies where the Makefile looks, every script and fixture is named by somebody.
rule_no_dead_files() {
    {
        ours | grep -vE '/|^(\.clang-format|\.gitignore|LICENSE|Makefile|README\.md|train_gpt\.c)$'
        local known='train_gpt|(kernels|kernels/cpu|kernels/cpu/ops|hete|data|dev|test)/[^/]*'
        local cuda='(kernels|test|dev)/cuda/[^/]*'
        ours '*.c' | grep -vE "^($known|$cuda|test/fuzz/fuzz_[^/]*)\\.c\$"
        ours '*.cu' | grep -vE "^$cuda\\.cu\$"
        ours 'scripts/*' 'test/fixtures/*' 'test/*.py' | while read -r file; do
            ours | grep -vxF "$file" | xargs grep -qIF "$(basename "$file")" || echo "$file"
        done
        ours 'test/fuzz/corpus/*' | cut -d / -f 4 | sort -u | while read -r name; do
            [ -e "test/fuzz/$name.c" ] || echo "test/fuzz/corpus/$name has no fuzzer"
        done
    } | sed 's/$/: not used/' | none
}

rule_scripts_are_executable() {
    ours '*.sh' '*.py' .ci/run | grep -vxE 'test/(tap|cli|ranks)\.sh' | while read -r file; do
        [ -x "$file" ] || echo "$file: not executable"
    done | none
}

# ---- what was built ----

# objects: those of the current sources
objects() {
    find "$BUILD" -name '*.o' | while read -r object; do
        source=${object#"$BUILD"/}
        source=${source%.o}.c
        [[ $source == ops-* ]] && source=kernels/cpu/ops/${source#*/}
        [ -e "$source" ] && echo "$object"
    done
}

# An object that is not of an AVX variant runs everywhere: no VEX or EVEX instruction (their names
# begin with v), no wide register. AVX2 objects hold no AVX-512 register.
rule_instruction_sets() {
    objects | grep -v 'ops-[^/]*-avx512/' | while read -r object; do
        pattern='\t(v[a-z0-9]+ |[^\t]*%[yz]mm)'
        [[ $object == *-avx2/* ]] && pattern='%zmm|%k[1-7]'
        objdump -d --no-show-raw-insn "$object" | grep -vP '\tver[rw] ' | grep -m 1 -P "$pattern" |
            sed "s|^|$object: |"
    done | none
}

# A function that no other file names is static. (The operations of a variant are named by pasting.)
rule_public_functions_are_used() {
    objects | grep -vE '/(ops-|test/|dev/)' | while read -r object; do
        source=${object#"$BUILD"/}
        nm "$object" | awk '$2 == "T" && $3 != "main" { print $3 }' | while read -r name; do
            git grep -lw "$name" -- '*.c' '*.h' | grep -qvxE "${source%.o}\.[ch]" ||
                echo "${source%.o}.c: $name"
        done
    done | none
}

# ---- the Makefile ----

plain_make() {
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u MAKEOVERRIDES -u TEST make "$@"
}

rule_make_help_is_true() {
    {
        plain_make -s help | awk '$1 == "make" { print $2 }' | sort >"$scratch/helped"
        [ -s "$scratch/helped" ] || echo 'make help lists nothing'
        while read -r target; do
            plain_make -n "$target" >/dev/null 2>&1 || echo "make $target: no such target"
        done <"$scratch/helped"
        sed -n '0,/^\.PHONY:/s/^\.PHONY: *//p' Makefile | tr ' ' '\n' | grep -vx FORCE | sort |
            comm -23 - "$scratch/helped" | sed 's/$/: a target that make help does not name/'
    } | none
}

# ---- every rule on this repository, and on one that breaks it ----

# Plants files in a repository of its own: plant PATH < content
plant() {
    mkdir -p "$(dirname "$1")"
    cat >"$1"
    git add -f "$1"
}

# broken RULE PLANTER: the rule passes over a repository with harmless files and fails after
# PLANTER.
broken() {
    mkdir "$scratch/repository"
    cd "$scratch/repository"
    git init -q .
    BUILD=$PWD/build
    echo '#include "data/a.h"' | plant data/a.c
    printf '#ifndef DATA_A_H\n#define DATA_A_H\n#endif\n' | plant data/a.h
    printf '%b' '.PHONY: all help\nall: ## build\n\t@true\nhelp: ## list\n' \
        '\t@sed -n "s/^\\([a-z]*\\):.* ## .*/make \\1/p" Makefile\n' | plant Makefile
    mkdir build
    "$1"
    "$2"
    if "$1" >"$scratch/found"; then
        echo "$1 does not see what $2 planted"
        return 1
    fi
    [ -s "$scratch/found" ]
}

plant_line_length() { printf '// %0100d\n' 0 | plant data/b.c; }
plant_no_tabs() { printf '\tint x;\n' | plant data/b.c; }
plant_no_trailing_space() { echo 'int x; ' | plant data/b.c; }
plant_header_guards() { printf '#ifndef B_H\n#define B_H\n#endif\n' | plant data/b.h; }
plant_no_machine_paths() { echo "see /ho""me/me/notes" | plant data/b.c; }
plant_no_large_files() { head -c 2000001 /dev/zero | plant data/b; }
plant_no_forbidden_calls() { echo '    strcpy(a, b);' | plant data/b.c; }
plant_no_fast_math() { echo 'CFLAGS = -O3 -ffast-math' | plant Makefile; }
plant_library_is_silent() { echo '    fprintf(stderr, "no");' | plant data/b.c; }
plant_layers() { echo '#include "hete/graph.h"' | plant data/b.c; }
plant_functions_are_short() {
    { echo 'int f(void)' && echo '{' && seq 71 | sed 's/.*/    x++;/' && echo '}'; } |
        plant data/b.c
}
plant_headers_are_included() { echo | plant data/b.h; }
plant_no_dead_files() { echo | plant scripts/unused.sh; }
plant_scripts_are_executable() { echo | plant scripts/b.sh; }
plant_instruction_sets() {
    mkdir -p build/data
    echo 'void f(float *x) { for (int i = 0; i < 64; i++) x[i] *= 2; }' >data/a.c
    cc -O3 -march=x86-64-v3 -c data/a.c -o build/data/a.o
}
plant_public_functions_are_used() {
    mkdir -p build/data
    echo 'int f(void) { return 1; }' >data/a.c
    cc -c data/a.c -o build/data/a.o
}
plant_make_help_is_true() {
    sed 's/^all:/all: nowhere/' Makefile >Makefile.new
    plant Makefile <Makefile.new
}

for rule in $(declare -F | sed -n 's/^declare -f rule_//p'); do
    if [[ $rule == instruction_sets && $(uname -m) != x86_64 ]]; then
        tap_skip "$rule" 'for x86-64 only'
        continue
    fi
    tap_case "$rule" "rule_$rule"
    tap_case "$rule: finds what is planted" broken "rule_$rule" "plant_$rule"
done

if command -v shellcheck >/dev/null; then
    # shellcheck disable=SC2046 # names of ours hold no spaces
    tap_case shellcheck shellcheck -S warning -x $(ours '*.sh' '*.sbatch' .ci/run)
else
    tap_skip shellcheck 'shellcheck is not installed (scripts/install_deps.sh ci)'
fi
tap_done
