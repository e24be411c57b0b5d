// grammar.h - a probabilistic grammar of texts whose entropy is known exactly.
//
// Called by data/corpus.c (the default corpus) and by tests (smaller grammars).
//
// RULES AND SLOTS. A rule is a list of alternatives, all equally likely. An alternative is text in
// which
//     <rule>         is replaced by an alternative of that rule,
//     {slot.field}   draws a record for the slot, all equally likely, and prints one of its fields,
//     [slot.field]   prints a field of the record that the slot holds.
// What a slot holds lasts to the end of the document, and that is what a model has to remember:
// the hero's name and pronoun, the colour of what she wants. Fields of a record are separated by |.
// A slot may be `unlike` another: it never draws the record that the other holds.
//
// EXACT ENTROPY. Rules must not be recursive, so entropy and mean length are finite sums. They are
// those of derivations, and those of texts as well if each text has one derivation only. To be sure
// of that, every choice must be decided by the text that it prints first: of any two alternatives
// (and of any two records, in the field that is printed when one is drawn) neither may begin with
// the other. Then a reader going from left to right knows every choice. grammar_open() refuses a
// grammar where that does not hold, so it proves every grammar that it accepts.
//
// A document is the text, preceded by one end-of-text token; the lengths below count that token.
//
// ROWS. A model does not see documents but rows of T tokens that begin anywhere. Where a row begins
// inside a document, names and colours are unknown until they occur, so the best possible loss on
// rows is above the entropy per token. grammar_nats() is exact for such rows, too: it sums over
// every place of the grammar where the row may have begun.
#ifndef DATA_GRAMMAR_H
#define DATA_GRAMMAR_H

#include "data/error.h"

#include <stddef.h>
#include <stdint.h>

struct grammar_slot {
    const char *name;
    const char *fields;         // names, separated by |
    const char *const *records; // NULL at the end
    const char *unlike;         // a slot with the same records, drawn before this one; or NULL
};

struct grammar_rule {
    const char *name;
    const char *const *alternatives; // NULL at the end
};

// Both lists end with a NULL name. A document is an expansion of the first rule.
struct grammar_source {
    const struct grammar_rule *rules;
    const struct grammar_slot *slots;
};

struct grammar;

// Refuses unknown names, recursion, fields printed before their slot is drawn, and whatever could
// make a text have two derivations.
int grammar_open(struct grammar **out, const struct grammar_source *source, struct error *err);
void grammar_close(struct grammar *grammar);

// Of one document. nats / tokens is the loss per token of a perfect model that sees it from its
// start. tokens_max is the length of the longest.
struct grammar_entropy {
    double nats;
    double tokens;
    size_t tokens_max;
};
struct grammar_entropy grammar_entropy(const struct grammar *grammar);

// Draws the text of a document (without the end-of-text token), fewer than tokens_max bytes, and
// returns its length. *random is the state of the generator and the only source of chance: the same
// state gives the same documents on every machine. *nats, if not NULL: -log of its probability.
size_t grammar_draw(const struct grammar *grammar, uint64_t *random, char *text, double *nats);

// -log of the probability that n tokens in sequence, from a random place of an endless series of
// documents on, are these. End-of-text is GRAMMAR_END. INFINITY for what cannot occur.
// The least possible mean loss on a row of T tokens, targets shifted by one, is
// (grammar_nats(row, T + 1) - grammar_nats(row, 1)) / T.
enum { GRAMMAR_END = 256 };
double grammar_nats(const struct grammar *grammar, const uint16_t *tokens, size_t n);

// The same for a row that begins with the first token of a document.
double grammar_nats_from_start(const struct grammar *grammar, const uint16_t *tokens, size_t n);

#endif
