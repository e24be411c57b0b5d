// evalset.h - multiple-choice evaluation files in llm.c's format (HellaSwag, MMLU).
//
// Called by train_gpt.c for --eval, from one thread. The whole file is checked at open and kept in
// memory (HellaSwag's validation set: 7 MB, read once).
//
// FILE. 256 int32: magic 20240522, version 1, number of examples, longest example in bytes. Then
// per example a stream of uint16: 65535, bytes of the example (these fields included), index,
// label, number of completions (4), n_context, context tokens, then 4 x (n, tokens).
//
// An example becomes 4 rows of T tokens, one per completion, context and completion in sequence:
//
//     tokens   c0 c1 c2 a0 a1 .  .       inputs; unused positions are 0
//     targets  c1 c2 a0 a1 .  .  .       the next token
//     mask     0  0  1  1  0  0  0       1: the target is a token of the completion
//
// The model's choice is the completion with the lowest mean loss over its own tokens. An example
// that is longer than T is an error at open, not cut: a cut example would be another question.
#ifndef DATA_EVALSET_H
#define DATA_EVALSET_H

#include "data/error.h"

#include <stddef.h>
#include <stdint.h>

enum { EVAL_COMPLETIONS = 4 };

struct evalset;

// Checks every field of every example, and that it fits into rows of T and under vocab.
int evalset_open(struct evalset **out, const char *path, size_t T, uint32_t vocab,
                 struct error *err);
void evalset_close(struct evalset *set);

size_t evalset_count(const struct evalset *set);

// Fills the rows of one example: tokens, targets (4,T), mask (4,T) of 0 or 1. Returns its label.
// Needs example < evalset_count().
int evalset_rows(const struct evalset *set, size_t example, int32_t *tokens, int32_t *targets,
                 unsigned char *mask);

// The completion with the lowest mean of losses (4,T) where mask (4,T) is 1; the first on a tie.
int evalset_choice(const float *losses, const unsigned char *mask, size_t T);

#endif
