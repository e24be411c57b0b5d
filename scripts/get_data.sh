#!/usr/bin/env bash
# Fetches real data sets into data/, from where their authors publish them.
#
#     scripts/get_data.sh                     lists the names
#     scripts/get_data.sh NAME [SHARDS]       fetches one; SHARDS: how many training shards
#
# Needs curl and sha256sum. An interrupted fetch goes on where it stopped: call it again. Files that
# are there and whole are not fetched again.
#
# CHECKSUMS. For tinyshakespeare and gpt2-bpe they are pinned below: those files are what they have
# always been, or refused. For the other sets this script knows none. There it computes the checksum
# at the first fetch, prints it, keeps it in FILE.sha256, and holds every later run against that:
# this finds a file that was damaged or changed since, not one that was bad at the first fetch. Of
# token shards the header's size is checked as well, which finds a file that was cut short.
#
# Environment: DATA_MIRROR=URL fetches URL/FILE instead, from a mirror of your own.
set -euo pipefail
cd "$(dirname "$0")/.."

huggingface=https://huggingface.co/datasets

die() {
    echo "get_data.sh: $*" >&2
    exit 1
}

list() {
    cat <<'LIST'
tinyshakespeare   1.1 MB of text
tinystories       2.2 GB of text: GPT-4's stories for small models, and 22 MB to validate on
gpt2-bpe          GPT-2's vocab.bpe and encoder.json, for ./tokenize --bpe data/gpt2-bpe
fineweb10B [N]    N (10) of 103 token shards of web text, 100M tokens = 200 MB each
fineweb100B [N]   N (10) of 1030 token shards, likewise
hellaswag         hellaswag_val.bin, for ./train_gpt --eval
LIST
}

sha256() {
    sha256sum "$1" | cut -d' ' -f1
}

# fetch URL FILE: leaves FILE.part complete.
fetch() {
    local url=$1 part=$2.part code rc=0
    [ -z "${DATA_MIRROR-}" ] || url=$DATA_MIRROR/${url##*/}
    echo "fetching $url"
    code=$(curl --fail --location --retry 3 --continue-at - --output "$part" \
        --write-out '%{http_code}' "$url") || rc=$?
    # 416: nothing is left to fetch.
    [ "$rc" -eq 0 ] || [ "$code" = 416 ] ||
        die "$url: curl failed with status $rc (HTTP $code); call this again to go on"
}

# check_shard FILE [AS]: does the size agree with the header?
check_shard() {
    local magic tokens size
    size=$(wc -c <"$1")
    magic=$(od -An -N4 -td4 "$1" | tr -d ' ')
    tokens=$(od -An -j8 -N4 -td4 "$1" | tr -d ' ')
    [ "$magic" = 20240520 ] ||
        die "${2-$1}: not a token shard: magic ${magic:-none}, expected 20240520"
    [ "$size" -eq $((1024 + 2 * tokens)) ] ||
        die "${2-$1}: $size bytes, expected $((1024 + 2 * tokens)) for its $tokens tokens"
}

# get URL FILE KIND [SHA256]: KIND is shard or other.
get() {
    local url=$1 file=$2 kind=$3 expected=${4-} found
    mkdir -p "$(dirname "$file")"
    [ -n "$expected" ] || [ ! -f "$file.sha256" ] || expected=$(cut -d' ' -f1 "$file.sha256")
    if [ -f "$file" ]; then
        found=$(sha256 "$file")
        if [ -n "$expected" ] && [ "$found" != "$expected" ]; then
            die "$file: sha256 $found, expected $expected; remove it and call this again"
        fi
        echo "$file is there"
    else
        fetch "$url" "$file"
        found=$(sha256 "$file.part")
        if [ -n "$expected" ] && [ "$found" != "$expected" ]; then
            rm "$file.part"
            die "$url: sha256 $found, expected $expected; thrown away"
        fi
        [ "$kind" != shard ] || (check_shard "$file.part" "$url") || {
            rm "$file.part"
            exit 1
        }
        mv "$file.part" "$file"
    fi
    if [ -z "$expected" ]; then
        echo "$found  ${file##*/}" >"$file.sha256"
        echo "$file: sha256 $found (first seen now, kept in $file.sha256)"
    fi
}

# fineweb NAME REPOSITORY SHARDS OF
fineweb() {
    local base=$huggingface/$2/resolve/main i number
    case $3 in
    '' | *[!0-9]*) die "$3: expected a number of shards from 1 to $4" ;;
    esac
    if [ "$3" -lt 1 ] || [ "$3" -gt "$4" ]; then
        die "$3: expected a number of shards from 1 to $4"
    fi
    get "$huggingface/karpathy/llmc-starter-pack/resolve/main/gpt2_tokenizer.bin" \
        "data/$1_tokenizer.bin" other
    get "$base/fineweb_val_000000.bin" "data/$1_val_000000.bin" shard
    for ((i = 1; i <= $3; i++)); do
        number=$(printf %06d "$i")
        get "$base/fineweb_train_$number.bin" "data/$1_train_$number.bin" shard
    done
    echo "next: ./train_gpt -i 'data/$1_train*.bin' -j 'data/$1_val*.bin'"
}

shards=${2-10}
case ${1-} in
'' | -h | --help)
    echo 'usage: scripts/get_data.sh NAME [SHARDS]'
    list
    ;;
tinyshakespeare)
    get https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt \
        data/tinyshakespeare.txt other \
        86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
    echo 'next: ./tokenize data/tinyshakespeare.txt -o data/tinyshakespeare'
    ;;
tinystories)
    base=$huggingface/roneneldan/TinyStories/resolve/main
    get $base/TinyStoriesV2-GPT4-train.txt data/tinystories_train.txt other
    get $base/TinyStoriesV2-GPT4-valid.txt data/tinystories_val.txt other
    echo 'next: ./tokenize data/tinystories_train.txt -o data/tinystories --val-fraction 0'
    echo '      ./tokenize data/tinystories_val.txt -o data/tinystories --val-fraction 1'
    ;;
gpt2-bpe)
    base=https://openaipublic.blob.core.windows.net/gpt-2/encodings/main
    get $base/vocab.bpe data/gpt2-bpe/vocab.bpe other \
        1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
    get $base/encoder.json data/gpt2-bpe/encoder.json other \
        196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
    echo 'next: ./tokenize mytext.txt -o data/mine --bpe data/gpt2-bpe'
    ;;
fineweb10B)
    fineweb fineweb10B kjj0/fineweb10B-gpt2 "$shards" 103
    ;;
fineweb100B)
    fineweb fineweb100B kjj0/fineweb100B-gpt2 "$shards" 1030
    ;;
hellaswag)
    get $huggingface/karpathy/llmc-starter-pack/resolve/main/hellaswag_val.bin \
        data/hellaswag_val.bin other
    echo 'next: ./train_gpt ... --eval data/hellaswag_val.bin'
    ;;
*)
    echo "get_data.sh: unknown name $1; known are:" >&2
    list >&2
    exit 2
    ;;
esac
