#!/usr/bin/env bash
# Tests scripts/get_data.sh against a mirror in the scratch folder: checksums, resumption, refusals.
# shellcheck disable=SC2317,SC2031 # cases run in tap_case's subshell
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
script=$(cd "$(dirname "$0")/.." && pwd)/scripts/get_data.sh
shared=$(cd "${TRAIN_GPT_SHARED:-../shared}/data" 2>/dev/null && pwd)

# The script works on the tree that it lies in.
prepare() {
    mkdir -p "$scratch/scripts" "$scratch/mirror"
    cp "$script" "$scratch/scripts/"
    cd "$scratch"
    export DATA_MIRROR=file://$scratch/mirror
}

get() {
    scripts/get_data.sh "$@" 2>&1
}

# refuses WORD... -- ARGUMENT...
refuses() {
    local words=() word rc=0
    while [ "$1" != -- ]; do
        words+=("$1")
        shift
    done
    shift
    get "$@" >log || rc=$?
    cat log
    [ "$rc" -ne 0 ]
    for word in "${words[@]}"; do grep -qF -- "$word" log; done
}

little_endian() {
    printf '%b' "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 & 255)) $(($1 >> 8 & 255)) \
        $(($1 >> 16 & 255)) $(($1 >> 24 & 255)))"
}

shard() { # FILE TOKENS
    { little_endian 20240520 && little_endian 1 && little_endian "$2"; } >"$1"
    truncate -s $((1024 + 2 * $2)) "$1"
}

case_names() {
    prepare
    get | grep -q '^tinyshakespeare '
    refuses 'unknown name frob' tinyshakespeare -- frob
}

case_pinned() {
    prepare
    cp "$shared/tinyshakespeare.txt" mirror/input.txt
    get tinyshakespeare
    cmp data/tinyshakespeare.txt mirror/input.txt
    rm mirror/input.txt # must not be fetched again
    get tinyshakespeare | grep -q 'is there'
    echo >>data/tinyshakespeare.txt
    refuses 86c4e6aa 'remove it' -- tinyshakespeare
}

case_pinned_refused() {
    prepare
    echo 'not Shakespeare' >mirror/input.txt
    refuses 'expected 86c4e6aa' -- tinyshakespeare
    [ -z "$(ls data)" ]
}

case_resumed() {
    prepare
    mkdir data
    cp "$shared/tinyshakespeare.txt" mirror/input.txt
    head -c 500000 mirror/input.txt >data/tinyshakespeare.txt.part
    # The part that is not fetched again.
    printf 'x' | dd of=mirror/input.txt conv=notrunc status=none
    get tinyshakespeare
    cmp data/tinyshakespeare.txt "$shared/tinyshakespeare.txt"
}

case_first_seen() {
    prepare
    echo story >mirror/TinyStoriesV2-GPT4-train.txt
    echo other >mirror/TinyStoriesV2-GPT4-valid.txt
    get tinystories >log
    grep -qF "$(sha256sum mirror/TinyStoriesV2-GPT4-train.txt | cut -d' ' -f1) (first seen" log
    (cd data && sha256sum --check --quiet ./*.sha256)
    echo changed >data/tinystories_val.txt
    refuses data/tinystories_val.txt 'remove it' -- tinystories
    rm data/tinystories_val.txt
    echo changed >mirror/TinyStoriesV2-GPT4-valid.txt
    refuses 'thrown away' -- tinystories
}

case_shards() {
    prepare
    echo tokenizer >mirror/gpt2_tokenizer.bin
    for name in val_000000 train_000001 train_000002 train_000003; do
        shard "mirror/fineweb_$name.bin" 1000
    done
    truncate -s -2 mirror/fineweb_train_000003.bin
    get fineweb10B 2
    [ "$(echo data/*.bin)" = "$(echo data/fineweb10B_{tokenizer,train_00000{1,2},val_000000}.bin)" ]
    refuses 3022 'expected 3024' -- fineweb10B 3
    refuses '104' '1 to 103' -- fineweb10B 104
    refuses 'many' '1 to 103' -- fineweb10B many
}

case_missing() {
    prepare
    refuses curl TinyStories 'call this again' -- tinystories
}

if ! command -v curl >/dev/null; then
    tap_skip 'get_data.sh' 'no curl'
    tap_done
fi
tap_case 'lists its names, refuses others' case_names
if [ -f "$shared/tinyshakespeare.txt" ]; then
    tap_case 'a pinned file is checked at every call' case_pinned
    tap_case 'an interrupted fetch goes on' case_resumed
else
    tap_skip 'a pinned file is checked at every call' 'no ../shared/data/tinyshakespeare.txt'
    tap_skip 'an interrupted fetch goes on' 'no ../shared/data/tinyshakespeare.txt'
fi
tap_case 'a file that is not what is pinned is thrown away' case_pinned_refused
tap_case 'other files are held against the first fetch' case_first_seen
tap_case 'shards are checked against their header' case_shards
tap_case 'a fetch that fails says how to go on' case_missing
tap_done
