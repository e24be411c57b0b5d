// Tests of data/evalset.c: rows of an example, every field refused by name, the choice.
#include "data/evalset.h"
#include "test/scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct error err;

enum { T = 8, VOCAB = 100, EXAMPLE = 18 }; // EXAMPLE: uint16s of one

// Two examples: context 1 2 3, completions 10 / 20 21 / 30 / 40, and the same with label 3.
static const uint16_t examples[2][EXAMPLE] = {
    {65535, 36, 0, 2, 4, 3, 1, 2, 3, 1, 10, 2, 20, 21, 1, 30, 1, 40},
    {65535, 36, 1, 3, 4, 3, 1, 2, 3, 1, 10, 2, 20, 21, 1, 30, 1, 40},
};

static size_t make_file(unsigned char *file)
{
    int32_t header[256] = {20240522, 1, 2, 36};
    memcpy(file, header, sizeof header);
    memcpy(file + sizeof header, examples, sizeof examples);
    return sizeof header + sizeof examples;
}

static void an_example_becomes_four_rows(void **state)
{
    (void)state;
    unsigned char file[2048];
    scratch_write("e.bin", file, make_file(file));
    struct evalset *set;
    if (evalset_open(&set, scratch("e.bin"), T, VOCAB, &err) != STATUS_OK)
        fail_msg("%s", err.text);
    assert_int_equal(evalset_count(set), 2);
    int32_t tokens[4 * T], targets[4 * T];
    unsigned char mask[4 * T];
    memset(tokens, 0xff, sizeof tokens);
    assert_int_equal(evalset_rows(set, 1, tokens, targets, mask), 3);
    assert_int_equal(evalset_rows(set, 0, tokens, targets, mask), 2);
    static const int32_t row0[T] = {1, 2, 3}, next0[T] = {2, 3, 10};
    static const int32_t row1[T] = {1, 2, 3, 20}, next1[T] = {2, 3, 20, 21};
    static const unsigned char mask0[T] = {0, 0, 1}, mask1[T] = {0, 0, 1, 1};
    assert_memory_equal(tokens, row0, sizeof row0);
    assert_memory_equal(targets, next0, sizeof next0);
    assert_memory_equal(mask, mask0, sizeof mask0);
    assert_memory_equal(tokens + T, row1, sizeof row1);
    assert_memory_equal(targets + T, next1, sizeof next1);
    assert_memory_equal(mask + T, mask1, sizeof mask1);
    evalset_close(set);
}

static void opening_fails_with(const unsigned char *file, size_t n, size_t row, uint32_t vocab,
                               const char *a, const char *b)
{
    scratch_write("bad.bin", file, n);
    struct evalset *set;
    assert_int_equal(evalset_open(&set, scratch("bad.bin"), row, vocab, &err), STATUS_FAIL);
    assert_null(set);
    assert_null(strchr(err.text, '\n'));
    if (!strstr(err.text, "bad.bin") || !strstr(err.text, a) || !strstr(err.text, b))
        fail_msg("\"%s\" does not say \"%s\" and \"%s\"", err.text, a, b);
}

static void every_field_is_checked(void **state)
{
    (void)state;
    unsigned char file[2048];
    static const struct {
        size_t at; // byte
        int32_t value;
        size_t bytes;
        const char *a, *b;
    } changes[] = {
        {0, 7, 4, "magic 7", "20240522"},
        {0, 20240520, 4, "a token shard", "20240522"},
        {4, 2, 4, "version 2", "expected 1"},
        {8, 0, 4, "0 examples", ""},
        {8, -1, 4, "-1 examples", ""},
        {8, 3, 4, "cut short", "example 2"},
        {8, 1, 4, "too long", "36 bytes behind"},
        {8, INT32_MAX, 4, "cannot hold", ""},
        {12, 34, 4, "example 0", "its size in bytes is 36"},
        {1024, 1, 2, "example 0", "its mark is 1"},
        {1024 + 2, 37, 2, "example 0", "its size in bytes is 37"},
        {1024 + 2, 10, 2, "example 0", "its size in bytes is 10"},
        {1024 + 2, 34, 2, "example 0", "the length of a completion"},
        {1024 + 4, 1, 2, "example 0", "its index is 1"},
        {1024 + 6, 4, 2, "example 0", "its label is 4"},
        {1024 + 8, 2, 2, "example 0", "its number of completions is 2"},
        {1024 + 10, 0, 2, "example 0", "n_context is 0"},
        {1024 + 10, 65535, 2, "example 0", "n_context is 65535"},
        {1024 + 12, 100, 2, "example 0", "token 100"},
        {1024 + 18, 0, 2, "example 0", "the length of a completion is 0"},
        {1024 + 36 + 28, 3, 2, "example 1", "the length of a completion"},
        {1024 + 36 + 4, 0, 2, "example 1", "its index is 0"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        size_t n = make_file(file);
        memcpy(file + changes[i].at, &changes[i].value, changes[i].bytes);
        opening_fails_with(file, n, T, VOCAB, changes[i].a, changes[i].b);
    }
    size_t n = make_file(file);
    opening_fails_with(file, 0, T, VOCAB, "0 bytes", "");
    opening_fails_with(file, 1000, T, VOCAB, "1000 bytes", "1024");
    opening_fails_with(file, n - 1, T, VOCAB, "even number", "");
    opening_fails_with(file, n - 2, T, VOCAB, "cut short", "example 1");
    opening_fails_with(file, n, 3, VOCAB, "example 0 takes rows of 4 tokens", "--seq 4");
    opening_fails_with(file, n, T, 40, "token 40", "40 tokens");
}

static void the_choice_is_the_lowest_mean_over_completion_tokens(void **state)
{
    (void)state;
    float losses[4 * T];
    unsigned char mask[4 * T] = {0};
    for (int i = 0; i < 4 * T; i++)
        losses[i] = 0; // what the mask leaves out would win
    mask[0 * T + 2] = 1, losses[0 * T + 2] = 2.5f;
    mask[1 * T + 2] = mask[1 * T + 3] = 1, losses[1 * T + 2] = 3, losses[1 * T + 3] = 1;
    mask[2 * T + 2] = 1, losses[2 * T + 2] = 2.1f;
    mask[3 * T + 2] = 1, losses[3 * T + 2] = 9;
    assert_int_equal(evalset_choice(losses, mask, T), 1); // mean 2, sum 4
    losses[3 * T + 2] = 1.5f;
    assert_int_equal(evalset_choice(losses, mask, T), 3);
    losses[0 * T + 2] = 1.5f;
    assert_int_equal(evalset_choice(losses, mask, T), 0); // a tie
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_example_becomes_four_rows),
        cmocka_unit_test(every_field_is_checked),
        cmocka_unit_test(the_choice_is_the_lowest_mean_over_completion_tokens),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
