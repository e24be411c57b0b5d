// files.h - files that are whole or not there, and the directory that they go into.
//
// Called by the other modules of data/ and by train_gpt.c, from one thread.
//
// ATOMIC WRITES. A file is written under a temporary name in its own folder, fsynced, renamed, and
// then the folder is fsynced: whoever opens the final name finds the old or the new content,
// complete, also after kill -9 or a power cut. After a failure the temporary file is gone; only a
// killed process leaves one, `NAME.<pid>.tmp`, and dir_lock() removes those.
//
//     atomic_open -> atomic_write ... -> atomic_commit      (or atomic_abort at any point)
//
// LOCK. An output directory has one writer. The lock is flock() on DIR/lock: it goes with the
// process, so a kill leaves none behind. The file itself stays.
#ifndef DATA_FILES_H
#define DATA_FILES_H

#include "data/error.h"

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

// Makes a directory and the parents that are missing. Fine if it is there already.
int dir_make(const char *path, struct error *err);

// Can files be made here? Makes one and removes it.
int dir_writable(const char *path, struct error *err);

// Bytes that this user may still write on the file system of `path`.
int dir_free_bytes(const char *path, uint64_t *bytes, struct error *err);

struct dir_lock {
    int fd;
};

// Refuses if another process has the lock; with it, removes temporary files of killed runs.
int dir_lock(struct dir_lock *lock, const char *path, struct error *err);
void dir_unlock(struct dir_lock *lock);

struct atomic_file {
    int fd; // -1: not open
    uint64_t bytes;
    char path[PATH_MAX], temp[PATH_MAX];
};

int atomic_open(struct atomic_file *f, const char *path, struct error *err);
int atomic_write(struct atomic_file *f, const void *data, size_t bytes, struct error *err);
// Over bytes that are written already.
int atomic_rewrite(struct atomic_file *f, uint64_t offset, const void *data, size_t bytes,
                   struct error *err);
int atomic_commit(struct atomic_file *f, struct error *err);
void atomic_abort(struct atomic_file *f); // does nothing after a commit or a failure

// Could a file of this name be written? Makes its temporary file and removes it.
int file_writable(const char *path, struct error *err);

// The whole content at once.
int file_replace(const char *path, const void *data, size_t bytes, struct error *err);

// Exactly `bytes` bytes at `offset`, or an error that says what was found.
int file_read_at(int fd, const char *path, void *data, size_t bytes, uint64_t offset,
                 struct error *err);
int file_write_all(int fd, const char *path, const void *data, size_t bytes, struct error *err);

// Opens a regular file for reading and tells its size.
int file_open(const char *path, int *fd, uint64_t *bytes, struct error *err);

#endif
