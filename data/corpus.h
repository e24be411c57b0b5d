// corpus.h - the default corpus: little stories drawn from a grammar of our own.
//
// Called by data/tokenize.c (--stories) and tests.
//
// A story is some 500 bytes about an animal that wants something, goes out to find it, and makes a
// friend. A few hundred words. What makes it more than word statistics is what it must keep: the
// hero's name goes with a pronoun, the animal with its home and its food, and the colour and the
// thing of the second sentence come back in the last ones. Tokens are bytes and end-of-text (256),
// which stands before every story.
//
// HOW GOOD A MODEL CAN GET is known exactly (data/grammar.h; `./tokenize --stories` prints it): the
// entropy per token is the loss of a perfect model that sees every story from its start. A model
// sees rows of T tokens that begin anywhere, and has to guess again what went before; that costs
// it a fixed number of nats per row, so the best loss on rows is the entropy plus about that over
// T. corpus_row_loss() gives it for T: the entropy is 61.33 nats in 480.8 tokens, 0.1275 per token;
// the best loss is 0.267 for T = 64, 0.180 for 256, 0.141 for 1024 (about 14 / T more).
#ifndef DATA_CORPUS_H
#define DATA_CORPUS_H

#include "data/error.h"
#include "data/grammar.h"

#include <stddef.h>
#include <stdint.h>

enum { CORPUS_TOKENS = 8 * 1000 * 1000 }; // default size, validation included

extern const struct grammar_source corpus_source;

// Writes <prefix>_train_NNNNNN.bin, <prefix>_val_NNNNNN.bin and <prefix>_tokenizer.bin: whole
// stories, until at least that many tokens are reached in each. No validation shards for 0 tokens.
// The two are drawn from independent random streams of the seed. Nothing is published unless all
// of it could be written.
int corpus_write(const char *prefix, uint64_t train_tokens, uint64_t val_tokens,
                 uint64_t shard_tokens, uint64_t seed, struct error *err);

// The mean loss per token, in nats, of a perfect model on rows of T tokens (as data/shards.h cuts
// them), and the standard error of that mean: exact for each of `rows` rows that are drawn.
struct corpus_row_loss {
    double mean, standard_error;
};
int corpus_row_loss(struct corpus_row_loss *out, const struct grammar *grammar, size_t T,
                    size_t rows, uint64_t seed, struct error *err);

#endif
