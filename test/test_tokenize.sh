#!/usr/bin/env bash
# Tests ./tokenize as users call it: text to shards and back, its refusals, a full disk.
# shellcheck disable=SC2317,SC2031 # cases run in tap_case's subshell
# shellcheck source=test/tap.sh
. "$(dirname "$0")/tap.sh"
tokenize=$(cd "${TRAIN_GPT_BIN:-.}" && pwd)/tokenize
shared=$(cd "${TRAIN_GPT_SHARED:-../shared}/data" 2>/dev/null && pwd)
eot='<|endoftext|>'

tokens() { # of a shard of uint16, blanks between
    tail -c +1025 "$1" | od -An -v -tu2 | xargs
}

count() { # of tokens, from a shard's header
    od -An -j8 -N4 -td4 "$1" | xargs
}

# refuses STATUS WORD... -- ARGUMENT...: one line on stderr that holds all words, nothing on stdout.
refuses() {
    local status=$1 rc=0 words=() word
    shift
    while [ "$1" != -- ]; do
        words+=("$1")
        shift
    done
    shift
    "$tokenize" "$@" >"$scratch/stdout" 2>"$scratch/stderr" </dev/null || rc=$?
    cat "$scratch/stderr"
    [ "$rc" -eq "$status" ]
    [ "$(wc -l <"$scratch/stderr")" -eq 1 ]
    [ ! -s "$scratch/stdout" ]
    for word in "${words[@]}"; do grep -qF -- "$word" "$scratch/stderr"; done
}

case_layout() {
    cd "$scratch"
    printf 'ab' >1.txt
    printf '%sc%s%sd' "$eot" "$eot" "$eot" >2.txt
    "$tokenize" 1.txt 2.txt -o new/dir/x --val-fraction 0
    [ "$(ls new/dir)" = $'x_tokenizer.bin\nx_train_000000.bin' ]
    [ "$(tokens new/dir/x_train_000000.bin)" = '256 97 98 256 99 256 100' ]
    "$tokenize" 1.txt 2.txt --plain --val-fraction=1 --output new/dir/x
    [ "$(count new/dir/x_train_000000.bin)" = 7 ]
    [ "$(count new/dir/x_val_000000.bin)" = $((1 + 2 + 1 + 3 * 13 + 2)) ]
}

case_validation_tail() {
    cd "$scratch"
    printf 'äöüßabcdef' >x.txt # 10 characters, 14 bytes
    "$tokenize" x.txt -o x --val-fraction 0.7
    [ "$("$tokenize" --decode x_train_000000.bin)" = "${eot}äöü" ]
    [ "$("$tokenize" --decode x_val_000000.bin)" = "${eot}ßabcdef" ]
}

case_round_trip() {
    cd "$scratch"
    head -c 300000 /dev/urandom >x.bin
    "$tokenize" x.bin -o x --val-fraction 0 --shard-tokens 70K
    [ "$(echo x_train*)" = "$(echo x_train_00000{0..4}.bin)" ]
    { printf %s "$eot" && cat x.bin; } | cmp - <("$tokenize" --decode x_train*.bin)
}

case_shorter_series() {
    cd "$scratch"
    seq 1000 >x.txt
    "$tokenize" x.txt -o x --shard-tokens 1K
    [ "$(echo x_train*)" = "$(echo x_train_00000{0..3}.bin)" ]
    "$tokenize" x.txt -o x
    [ "$(echo x_*)" = 'x_tokenizer.bin x_train_000000.bin x_val_000000.bin' ]
}

case_stdin_and_pipes() {
    cd "$scratch"
    seq 5000 >x.txt
    "$tokenize" x.txt -o x
    "$tokenize" - -o y <x.txt
    seq 5000 | "$tokenize" - -o z
    "$tokenize" <(cat x.txt) -o p
    for name in y z p; do
        cmp x_train_000000.bin "${name}_train_000000.bin"
        cmp x_val_000000.bin "${name}_val_000000.bin"
    done
    [ -z "$(find . -name '*spool*' -o -name '*tmp*')" ]
}

# 12 MB: more than one window, many chunks.
case_threads() {
    cd "$scratch"
    "$tokenize" --stories 12M -o s --val-fraction 0
    "$tokenize" --decode s_train_000000.bin >s.txt
    for threads in 1 2 3; do
        "$tokenize" s.txt -o "t$threads" --threads "$threads" "$@"
    done
    cmp t1_train_000000.bin t2_train_000000.bin
    cmp t1_train_000000.bin t3_train_000000.bin
    cmp t1_val_000000.bin t3_val_000000.bin
    cmp <("$tokenize" --decode t1_train_000000.bin t1_val_000000.bin | sed "s/$eot//g") \
        <(sed "s/$eot//g" s.txt)
}

case_without_spaces() { # nowhere to cut: the window must grow, and the result be right
    cd "$scratch"
    head -c 9000000 /dev/zero | tr '\0' 'x' >x.txt
    "$tokenize" x.txt -o x --val-fraction 0 --threads 2 "$@"
    [ "$("$tokenize" --decode x_train_000000.bin | md5sum)" = \
        "$({ printf %s "$eot" && cat x.txt; } | md5sum)" ]
}

case_tinyshakespeare() {
    cd "$scratch"
    "$tokenize" "$shared/tinyshakespeare.txt" -o ts --bpe "$shared" --val-fraction 0.1
    # One end-of-text stands before each part.
    [ "$(count ts_train_000000.bin)" = $((301966 + 1)) ]
    [ "$(count ts_val_000000.bin)" = $((36059 + 1)) ]
    [ "$(tokens ts_train_000000.bin | head -n 1 | cut -d' ' -f1-6)" = \
        '50256 5962 22307 25 198 8421' ]
    "$tokenize" "$shared/tinyshakespeare.txt" -o ts --bpe "$shared" --val-fraction 0
    [ "$(count ts_train_000000.bin)" = $((338025 + 1)) ]
}

case_stories() {
    cd "$scratch"
    "$tokenize" --stories 100K -o s >out
    grep -q "perfect model's loss: 0\.1" out
    [ "$(count s_train_000000.bin)" -ge 90000 ]
    [ "$(count s_train_000000.bin)" -lt 92000 ]
    [ "$(count s_val_000000.bin)" -ge 10000 ]
    "$tokenize" --stories=100K -o again
    cmp s_train_000000.bin again_train_000000.bin
    "$tokenize" --stories -o d 100K --seed 1337
    cmp s_train_000000.bin d_train_000000.bin
    "$tokenize" --stories -o d 100K --seed 1338
    ! cmp -s s_train_000000.bin d_train_000000.bin
}

case_decode_without_tokenizer() {
    cd "$scratch"
    printf 'ab' >x.txt
    "$tokenize" x.txt -o x --val-fraction 0
    rm x_tokenizer.bin
    [ "$("$tokenize" --decode x_train_000000.bin 2>/dev/null | xargs)" = '256 97 98' ]
}

case_usage() {
    "$tokenize" --help | grep -q -- --val-fraction
    refuses 2 --frob -- --frob
    refuses 2 --frob -- x --frob=3 -o y
    refuses 2 '--threads zero' -- x -o y --threads zero
    refuses 2 '--threads 0' '1 to' -- x -o y --threads 0
    refuses 2 '--shard-tokens 3G' -- x -o y --shard-tokens 3G
    refuses 2 '--shard-tokens 1.0001K' 'whole number' -- x -o y --shard-tokens 1.0001K
    refuses 2 '--val-fraction 1.5' '0 to 1' -- x -o y --val-fraction 1.5
    refuses 2 '--val-fraction nan' -- x -o y --val-fraction nan
    refuses 2 -o value -- x -o
    refuses 2 'no input' -- -o y
    refuses 2 '-o PREFIX' -- x
    refuses 2 --decode --stories -- --decode --stories
    refuses 2 '--stories many' -- --stories many
}

case_bad_data() {
    cd "$scratch"
    refuses 1 none.txt 'No such file' -- none.txt -o x
    refuses 1 'directory' -- . -o x
    : >empty.txt
    refuses 1 'no text' -- empty.txt -o x
    printf 'a' >a.txt
    refuses 1 x_train 'no text' -- a.txt -o x # 0.9 of a character
    refuses 1 encoder.json get_data.sh -- a.txt -o x --bpe .
    refuses 1 a.txt -- --decode a.txt
    refuses 1 /proc/nothing -- a.txt -o /proc/nothing/x
    [ "$(echo x_*)" = 'x_*' ]
}

# A limit on the size of files fails as a full disk does: in the middle of a write.
case_full_disk() {
    cd "$scratch"
    seq 100000 >x.txt
    "$tokenize" x.txt -o x
    md5sum x_* >before
    seq 200000 >y.txt
    (
        trap '' XFSZ
        ulimit -f 1000
        refuses 1 x_train_000000.bin -- y.txt -o x
    )
    md5sum x_* | diff before - # the old series is whole, and nothing is beside it
    [ -z "$(find . -name '*.tmp')" ]
}

tap_case 'documents, end-of-text, validation only or none' case_layout
tap_case 'the tail is cut by characters' case_validation_tail
tap_case 'any bytes come back, from many shards' case_round_trip
tap_case 'a shorter series leaves none of the longer one' case_shorter_series
tap_case 'stdin and pipes are as good as files' case_stdin_and_pipes
tap_case 'the same shards with 1, 2 and 3 threads: bytes' case_threads
tap_case 'text without a space: bytes' case_without_spaces
if [ -f "$shared/encoder.json" ]; then
    tap_case 'the same shards with 1, 2 and 3 threads: BPE' case_threads --bpe "$shared"
    tap_case 'text without a space: BPE' case_without_spaces --bpe "$shared"
    tap_case 'tinyshakespeare is 301,966 + 36,059 tokens' case_tinyshakespeare
else
    reason='no ../shared/data/encoder.json'
    tap_skip 'the same shards with 1, 2 and 3 threads: BPE' "$reason"
    tap_skip 'text without a space: BPE' "$reason"
    tap_skip 'tinyshakespeare is 301,966 + 36,059 tokens' "$reason"
fi
tap_case 'stories' case_stories
tap_case 'shards without a tokenizer are printed as ids' case_decode_without_tokenizer
tap_case 'bad usage: status 2 and one line' case_usage
tap_case 'bad data: status 1 and one line' case_bad_data
tap_case 'a full disk leaves the old shards, and no others' case_full_disk
tap_done
