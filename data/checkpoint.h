// checkpoint.h - model files (llm.c's format) and training states (our own), whole or not at all.
//
// Called by train_gpt.c, from one thread. Everything is written through files.h (temporary file,
// fsync, rename, fsync of the folder), streamed in chunks of at most CHECKPOINT_CHUNK bytes through
// a callback, so that no copy of a model is ever held here. Knows nothing of devices or kernels:
// the callback brings the elements in the order of the file.
//
// A directory of a run holds, for step s (updates done so far):
//
//     model_%08d.bin   the parameters, for llm.c's tools too
//     state_%08d.bin   everything that a bit-exact resume needs; complete without the model file
//     DONE_%08d        empty; llm.c's run scripts wait for the one of the last step
//
// written in this order. The rename of the state is the moment at which a checkpoint exists.
// All numbers are little-endian, and so must the host be.
//
// MODEL FILE. 256 int32: 20240326, version 3 = fp32 or 5 = bf16, max_seq, vocab, layers, heads,
// hidden, padded vocab; then the tensors in the order of FORMATS (wte, wpe, ln1w, ...).
//
// TRAINING STATE, byte for byte:
//
//     offset  size
//          0     8  "GPTSTATE"
//          8     4  version, 1
//         12     4  number n of sections, 1 .. 16
//         16     8  size of the file
//         24     8  step
//         32    24  max_seq, vocab, layers, heads, hidden, padded vocab (uint32 each)
//         56     8  XXH3-64 of bytes 0..55 followed by the table
//         64  56*n  table, per section:
//                      0  16  name, padded with 0
//                     16   4  dtype: 1 = bytes, 2 = fp32, 3 = bf16
//                     20   4  0
//                     24   8  elements
//                     32   8  bytes
//                     40   8  offset in the file
//                     48   8  XXH3-64 of the section's bytes
//     64 + 56*n      the sections, in the order of the table, without gaps, to the end of the file
//
// So every byte is under a checksum, and the exact size is known before any of it is read. Sections
// of a training run: "options" (options_save), "run" (struct numbers below), and "master", "m", "v"
// (fp32, all elements in the order of the model file, whatever the plan, the device or the dtype of
// the run). Rejected: checksums behind the data (a trailer), since then a truncated file has no
// table to say what is missing; a checksum per chunk, since a state is refused as a whole anyway.
#ifndef DATA_CHECKPOINT_H
#define DATA_CHECKPOINT_H

#include "data/error.h"

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CHECKPOINT_CHUNK = 1 << 20 };

// Source: fill buf with elements [first, first + n). Sink: take them from buf. In the dtype of the
// file. Not STATUS_OK: the whole call fails with *err. Chunks come in order, without gaps.
typedef int checkpoint_fn(void *ctx, void *buf, size_t first, size_t n, struct error *err);

// ---- model files ----

enum { MODEL_FP32 = 3, MODEL_BF16 = 5 };

struct model_header {
    int version; // MODEL_FP32 or MODEL_BF16
    uint32_t max_seq, vocab, layers, heads, hidden, padded_vocab;
};

// Refuses shapes that cannot be; `where` (a path) begins the message.
int model_check(const struct model_header *h, const char *where, struct error *err);

// Elements of all tensors, of a header that model_check() accepts: it cannot overflow then.
size_t model_elems(const struct model_header *h);
size_t model_elem_bytes(const struct model_header *h);
uint64_t model_file_bytes(const struct model_header *h);

// Magic, version, every field, the exact size of the file.
int model_read_header(const char *path, struct model_header *h, struct error *err);

// Streams all elements to `sink`; `h` is what model_read_header() gave.
int model_read(const char *path, const struct model_header *h, checkpoint_fn *sink, void *ctx,
               struct error *err);
int model_write(const char *path, const struct model_header *h, checkpoint_fn *source, void *ctx,
                struct error *err);

// ---- named numbers: the "run" section ----
//
// Lines `name=1 2 3`. Doubles are written in hexadecimal and come back bit for bit, NaN and
// infinities included (a NaN as some NaN).
struct numbers {
    size_t bytes;
    char text[32768];
};

void numbers_clear(struct numbers *n);
// A name holds no '=' or newline and is put once. More than fits is a programmer's error (assert).
void numbers_put_u64(struct numbers *n, const char *name, uint64_t value);
void numbers_put_f64(struct numbers *n, const char *name, const double *values, size_t count);
// Fail if the name is missing, or holds anything but exactly `count` numbers.
int numbers_get_u64(const struct numbers *n, const char *name, uint64_t *value, struct error *err);
int numbers_get_f64(const struct numbers *n, const char *name, double *values, size_t count,
                    struct error *err);

// ---- training states ----

enum section_dtype { SECTION_BYTES = 1, SECTION_FP32 = 2, SECTION_BF16 = 3 };
enum { STATE_SECTIONS_MAX = 16, STATE_NAME_MAX = 16 };

// What to write. `data` if it lies in memory as a whole, else `source` with `ctx`.
struct state_part {
    const char *name; // at most 15 bytes
    enum section_dtype dtype;
    uint64_t elems;
    const void *data;
    checkpoint_fn *source;
    void *ctx;
};

int state_write(const char *path, uint64_t step, const struct model_header *shape,
                const struct state_part *parts, size_t part_count, struct error *err);

struct state_section {
    char name[STATE_NAME_MAX];
    uint32_t dtype;
    uint64_t elems, bytes, offset, checksum;
};

struct state_file {
    int fd; // -1: not open
    char path[PATH_MAX];
    uint64_t step;
    struct model_header shape; // version is MODEL_FP32
    size_t section_count;
    struct state_section section[STATE_SECTIONS_MAX];
};

// Header, table and exact size are right; nothing else is read yet.
int state_open(struct state_file *s, const char *path, struct error *err);
void state_close(struct state_file *s);

// The checksum of every section. Call it before anything of the state is used.
int state_verify(struct state_file *s, struct error *err);

// Streams a section, which must be of this dtype and length, and checks its checksum again.
int state_read(struct state_file *s, const char *name, enum section_dtype dtype, uint64_t elems,
               checkpoint_fn *sink, void *ctx, struct error *err);

// A section of bytes that fits into `room`; *length tells how many there were.
int state_read_bytes(struct state_file *s, const char *name, void *data, size_t room,
                     size_t *length, struct error *err);
int state_read_numbers(struct state_file *s, const char *name, struct numbers *n,
                       struct error *err);

// ---- the directory of a run ----

// Names of the files of a step: DIR/model_%08d.bin and so on.
void model_path(char path[PATH_MAX], const char *dir, uint64_t step);
void state_path(char path[PATH_MAX], const char *dir, uint64_t step);

// Opens and verifies the newest state that is good. For every newer one that is not, `refused` is
// called with its path and the reason (if not NULL). STATUS_FAIL: there is none (said so), or none
// that is good.
typedef void state_refused_fn(void *ctx, const char *path, const char *reason);
int state_open_newest(struct state_file *s, const char *dir, state_refused_fn *refused, void *ctx,
                      struct error *err);

// Is there any state, good or not? (Where there is none, -y 1 begins a new run.)
bool state_any(const char *dir);

// The empty file DONE_%08d, once the checkpoint of `step` is complete.
int checkpoint_done(const char *dir, uint64_t step, struct error *err);

// Removes old checkpoints, now that the one of `step` is complete: the newest `keep` of steps <=
// `step` stay (0: all), and all steps that are multiples of `major_every` (0: none). States of
// later steps are not touched and do not count, since a run that resumed behind them did not trust
// them.
int checkpoint_prune(const char *dir, uint64_t step, uint64_t keep, uint64_t major_every,
                     struct error *err);

// Renames the files of all checkpoints of steps >= `from` to *.old (one generation: an older *.old
// is replaced): a new run into an old directory, or it would later resume from the old run. Nothing
// that somebody may still want is lost. *count counts states.
int checkpoint_set_aside(const char *dir, uint64_t from, size_t *count, struct error *err);

// Before step 0: is there room for the keep + 2 checkpoints that can exist at one time (the new
// one, and the old one until it is pruned)? With keep 0 for two. Those that are there already
// count. And may a file be as large as a state (ulimit -f)?
int checkpoint_room(const char *dir, const struct model_header *h, uint64_t keep,
                    struct error *err);

#endif
