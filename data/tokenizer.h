// tokenizer.h - token ids to bytes and back: bytes, GPT-2's BPE, and any tokenizer `.bin`.
//
// Called by train_gpt.c (prints samples, encodes --prompt) and data/tokenize.c (one encoder per
// thread over one shared tokenizer, which never changes once it is made).
//
// FILE. 256 int32: magic 20240328, version 2, number of tokens, end-of-text id; then per token, in
// id order, one length byte (1-255) and the raw bytes.
//
// ENCODING needs nothing but that file. In a BPE vocabulary the ids of merged tokens are in merge
// order, so the merge that made a token is what BPE with all earlier merges leaves of its bytes:
// two parts. The merge table is rebuilt so, token by token, when a tokenizer is made. A token that
// is left in more than two parts (end-of-text, other special tokens) is never produced from text.
// GPT-2's files vocab.bpe and encoder.json therefore only serve to make a tokenizer, and a file
// whose ids are not in merge order is refused. The bytes tokenizer is the case without merges.
// (Rejected: greedy longest match, which is not what the model was trained on.)
//
// SPLITTING. With merges, text is first split as GPT-2 does, by its regular expression, run by
// PCRE2 with Unicode classes; white space is Unicode's White_Space property, spelled out, since
// PCRE2's \s differs from it. Which characters are letters and digits depends on PCRE2's Unicode
// version for characters assigned lately.
// Bytes that are not valid UTF-8 (overlong forms, surrogates, > U+10FFFF included) are never lost:
// each maximal run of them is a piece of its own, and the text on either side is split as if it
// began and ended there. decode(encode(x)) == x for any bytes.
//
// SPEED. Pieces seen before come from a per-encoder cache; others are merged with a heap over a
// linked list, n log n in the piece's length (a megabyte of one letter is no attack).
#ifndef DATA_TOKENIZER_H
#define DATA_TOKENIZER_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tokenizer;

int tokenizer_bytes(struct tokenizer **out, struct error *err); // 256 bytes + end-of-text (256)

// From DIR/vocab.bpe and DIR/encoder.json.
int tokenizer_gpt2(struct tokenizer **out, const char *dir, struct error *err);

int tokenizer_read(struct tokenizer **out, const char *path, struct error *err);

// The tokenizer that lies beside the shards that `pattern` (a path or a glob) names. For
// DIR/NAME_train*.bin and DIR/NAME_val*.bin it is DIR/NAME_tokenizer.bin, else DIR/tokenizer.bin.
// (For a name with neither _train nor _val, NAME is the name without .bin and a trailing number or
// star.) *out = NULL and STATUS_OK where there is none: then vocabulary and end-of-text are GPT-2's
// (below), and tokens can be printed as ids only. A file that is there but broken is an error.
int tokenizer_beside(struct tokenizer **out, const char *pattern, struct error *err);

enum { GPT2_VOCAB = 50257, GPT2_EOT = 50256 };

// Temporary file, fsync, rename.
int tokenizer_write(const struct tokenizer *tokenizer, const char *path, struct error *err);
void tokenizer_free(struct tokenizer *tokenizer);

uint32_t tokenizer_vocab(const struct tokenizer *tokenizer);
uint32_t tokenizer_eot(const struct tokenizer *tokenizer);
uint64_t tokenizer_hash(const struct tokenizer *tokenizer); // of all tokens and end-of-text

// The bytes of a token (not NUL-terminated; they may be part of a character only). NULL and
// *len = 0 for id >= vocabulary. End-of-text gives its spelling, "<|endoftext|>".
const unsigned char *tokenizer_decode(const struct tokenizer *tokenizer, uint32_t id, size_t *len);

// A growing array of tokens; zero-initialise, free(ids) when done.
struct tokens {
    uint32_t *ids;
    size_t n;
    size_t capacity;
};

// One per thread. Must be closed before its tokenizer is freed.
struct encoder;
int encoder_open(struct encoder **out, const struct tokenizer *tokenizer, struct error *err);
void encoder_close(struct encoder *encoder);

// Appends the tokens of text[len] to *tokens. `special`: the spelling of end-of-text in the text
// becomes that token; otherwise it is text like any other. Fails on a byte that the vocabulary has
// no token for, and out of memory.
int encode(struct encoder *encoder, const void *text, size_t len, bool special,
           struct tokens *tokens, struct error *err);

// The largest p <= len where text may be cut so that encoding text[0..p) and text[p..) separately
// gives what encoding it whole gives, whatever follows text[0..len); 0 if none is found. With
// merges that is in front of ASCII white space that follows something else; never inside
// end-of-text.
size_t tokenizer_cut(const struct tokenizer *tokenizer, const void *text, size_t len);

#endif
