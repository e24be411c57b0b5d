// scratch.h - a fresh folder for one test program, small things to put there, and how it starts.
#ifndef TEST_SCRATCH_H
#define TEST_SCRATCH_H

#include "test/cmocka.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Setup and teardown of a cmocka group: makes the folder, removes it with all that is in it.
int scratch_make(void **state);
int scratch_remove(void **state);

// "<folder>/<name>"; valid until called 16 times more.
const char *scratch(const char *name);

void scratch_write(const char *name, const void *data, size_t bytes);
void *scratch_read(const char *name, size_t *bytes); // free() it; fails the test if missing
bool scratch_exists(const char *name);
size_t scratch_files(void); // how many there are
void scratch_clear(void);   // removes all files

// A seed for the random numbers of a test: from TEST_SEED, else the time. Printed.
uint64_t scratch_seed(void);

// Path of a file of real text for tests; NULL, and a line on stderr, if it is not there: skip().
const char *shared_file(const char *name);

// Starts the program anew with OpenMP threads that sleep while they wait: with more threads than
// cores, or on a busy machine, spinning ones make a test ten times slower. First thing in main().
void test_threads_sleep(char **argv);

#endif
