// shards.h - token shards: rows of T tokens out of a glob of files, and the writer of such files.
//
// Called by train_gpt.c (one loader for training, one for validation; each from one thread at a
// time), by data/tokenize.c and data/corpus.c (writer). Format: 256 int32 of header, then uint16
// tokens (magic 20240520, version 1) or uint32 tokens (magic 20240801, version 7).
//
// ROWS. A shard of n tokens holds (n-1)/T rows. Row i has the tokens [i*T, i*T+T) as its input and
// [i*T+1, i*T+T+1) as its targets: neighbouring rows share one token, nothing crosses a shard, and
// at most T-1 tokens at a shard's end are dropped. The order of the data depends on rows alone,
// never on how many of them a micro-batch or a process takes at a time.
//
//     shard   t0 t1 t2 t3 t4 t5 t6 t7 t8 t9          T = 4, n = 10
//     row 0   [---------]                            targets t1..t4
//     row 1               [---------]                targets t5..t8    (t9 is dropped)
//
// ORDER. Sequential: shards by name, rows ascending; every epoch the same. Shuffled: every epoch
// visits the shards in a new order, and inside a shard the rows in a new order. Both are keyed
// pseudo-random permutations of (seed, epoch): nothing is stored, any position is computed. Hence
// the state is two numbers and a resume is exact. (Rejected: one permutation over all rows, which
// would make every read a seek into another file; a shuffle buffer, whose content is state.)
//
// MEMORY. One shard is open at a time, and 1 MiB of it (or a row, if longer) is mapped. Beyond that
// there are 56 bytes and a path per shard.
//
// FILES THAT CHANGE. Headers and exact sizes of all shards are checked at open. Size and
// modification time are checked again before every row is read, so a shard that is truncated or
// rewritten during a run is an error that names it. Only a truncation in the microseconds between
// that check and the copy can still raise SIGBUS.
#ifndef DATA_SHARDS_H
#define DATA_SHARDS_H

#include "data/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What the magic number of one of llm.c's formats says that a file is ("a model"), or NULL.
const char *kind_of_magic(int32_t magic);

struct loader;

// Where a loader stands: `row` rows of epoch `epoch` have been handed out, 0 <= row < loader_rows.
struct loader_state {
    uint64_t epoch;
    uint64_t row;
};

// Opens all shards that match the glob `pattern` (or the file of exactly that name), sorted by
// name. `vocab`: every token must be smaller. Checks each header and size; refuses shards that are
// missing, empty, short, over-long, of another kind or version, or smaller than one row of T+1.
int loader_open(struct loader **out, const char *pattern, size_t T, uint32_t vocab, uint64_t seed,
                bool shuffle, struct error *err);
void loader_close(struct loader *loader);

uint64_t loader_rows(const struct loader *loader);   // rows per epoch, of T tokens each
uint64_t loader_tokens(const struct loader *loader); // tokens in all shards, dropped ones included
size_t loader_shards(const struct loader *loader);

// A hash of every shard's file name, header, size, first and last tokens. Equal for the same files
// in another folder; a resumed run compares it to tell that its data is not what it was. Holds
// neither T nor the seed.
uint64_t loader_fingerprint(const struct loader *loader);

// Copies the next row: tokens[T], targets[T]. After the last row of an epoch follows the first of
// the next one. Fails on a token >= vocab (shard, position, token) and on a shard that has changed;
// the loader then stays where it was.
int loader_next(struct loader *loader, int32_t *tokens, int32_t *targets, struct error *err);

// As if `rows` rows had been copied, without looking at them. Takes time O(shards).
void loader_skip(struct loader *loader, uint64_t rows);

struct loader_state loader_tell(const struct loader *loader);

// The next row will be the one that followed when loader_tell() gave `state`. Takes time O(shards).
// Fails if state.row >= loader_rows (a state of other data, or of another T).
int loader_seek(struct loader *loader, struct loader_state state, struct error *err);
void loader_rewind(struct loader *loader); // to {0, 0}

// ---- a whole shard ----
//
// All tokens of one shard in order, in pieces (./tokenize --decode).
struct shard_reader;
int shard_reader_open(struct shard_reader **out, const char *path, struct error *err);
int shard_read(struct shard_reader *reader, uint32_t *tokens, size_t max, size_t *n,
               struct error *err); // *n = 0 at the end
void shard_reader_close(struct shard_reader *reader);

// ---- writing ----
//
// A writer makes a series <prefix>_000000.bin, <prefix>_000001.bin, ... of at most `shard_tokens`
// tokens each. Until published every file is <name>.tmp; a full disk or a kill leaves the files of
// an earlier series as they were. Publishing replaces that series: files with higher numbers that
// it left behind are removed, or a glob would mix old data with new.
//
//     shard_writer_open -> shard_write ... -> shard_writer_seal -> shard_writer_publish
//
// Seal both the training and the validation series before publishing either, and no failure can
// leave one new and one old. shard_writer_close() at any time removes what is not published.
struct shard_writer;

// wide: uint32 tokens (for vocabularies above 65536). Missing parent folders are made.
int shard_writer_open(struct shard_writer **out, const char *prefix, uint64_t shard_tokens,
                      bool wide, struct error *err);
int shard_write(struct shard_writer *writer, const uint32_t *tokens, size_t n, struct error *err);
int shard_writer_seal(struct shard_writer *writer, struct error *err);    // header, flush, fsync
int shard_writer_publish(struct shard_writer *writer, struct error *err); // rename, fsync folder
uint64_t shard_writer_tokens(const struct shard_writer *writer);          // written so far
size_t shard_writer_shards(const struct shard_writer *writer);            // files begun so far
void shard_writer_close(struct shard_writer *writer);

#endif
