#include "data/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

// ---- directories --------------------------------------------------------------------------------

int dir_make(const char *path, struct error *err)
{
    char part[PATH_MAX];
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof part - 64) { // room for the names of files
        return error_set(err, STATUS_FAIL, "directory '%.200s': its name is %s", path,
                         length ? "too long" : "empty");
    }
    memcpy(part, path, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (part[i] != '/' && part[i] != '\0') {
            continue;
        }
        part[i] = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST) {
            return error_set(err, STATUS_FAIL, "cannot make directory %s: %s", part,
                             strerror(errno));
        }
        part[i] = path[i];
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        return error_set(err, STATUS_FAIL, "%s is not a directory: choose another name", path);
    }
    return STATUS_OK;
}

int dir_writable(const char *path, struct error *err)
{
    char probe[PATH_MAX];
    if (snprintf(probe, sizeof probe, "%s/probe.%ld.tmp", path, (long)getpid()) >= PATH_MAX) {
        return error_set(err, STATUS_FAIL, "directory '%.200s': its name is too long", path);
    }
    int fd = open(probe, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, "", 1) != 1) {
        int cause = errno;
        if (fd >= 0) {
            close(fd);
            unlink(probe);
        }
        return error_set(err, STATUS_FAIL, "cannot write into directory %s: %s", path,
                         strerror(cause));
    }
    close(fd);
    unlink(probe);
    return STATUS_OK;
}

int dir_free_bytes(const char *path, uint64_t *bytes, struct error *err)
{
    struct statvfs fs;
    if (statvfs(path, &fs) != 0) {
        return error_set(err, STATUS_FAIL, "cannot tell the free space of %s: %s", path,
                         strerror(errno));
    }
    *bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return STATUS_OK;
}

// NAME.<pid>.tmp, as atomic_open() calls its files.
static int is_temporary(const char *name)
{
    size_t length = strlen(name);
    if (length < 6 || strcmp(name + length - 4, ".tmp") != 0) {
        return 0;
    }
    size_t digits = length - 4;
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9') {
        digits--;
    }
    return digits > 1 && digits < length - 4 && name[digits - 1] == '.';
}

static void remove_temporaries(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir) {
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(dir))) {
        if (is_temporary(entry->d_name)) {
            unlinkat(dirfd(dir), entry->d_name, 0);
        }
    }
    closedir(dir);
}

int dir_lock(struct dir_lock *lock, const char *path, struct error *err)
{
    char name[PATH_MAX];
    lock->fd = -1;
    if (snprintf(name, sizeof name, "%s/lock", path) >= PATH_MAX) {
        return error_set(err, STATUS_FAIL, "directory '%.200s': its name is too long", path);
    }
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        return error_set(err, STATUS_FAIL, "cannot open %s: %s", name, strerror(errno));
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int cause = errno;
        close(fd);
        if (cause == EWOULDBLOCK) {
            return error_set(err, STATUS_FAIL,
                             "directory %s is in use by another run: wait for it, or give this run "
                             "another --out",
                             path);
        }
        return error_set(err, STATUS_FAIL, "cannot lock %s: %s", name, strerror(cause));
    }
    lock->fd = fd;
    remove_temporaries(path);
    return STATUS_OK;
}

void dir_unlock(struct dir_lock *lock)
{
    if (lock->fd >= 0) {
        close(lock->fd);
    }
    lock->fd = -1;
}

// ---- atomic writes ------------------------------------------------------------------------------

static int fail_write(const char *path, int cause, struct error *err)
{
    const char *advice = cause == ENOSPC   ? ": make room, or choose another place"
                         : cause == EDQUOT ? ": your quota is used up"
                         : cause == EFBIG  ? ": files here may not get that large"
                                           : "";
    return error_set(err, STATUS_FAIL, "cannot write %s: %s%s", path, strerror(cause), advice);
}

int file_write_all(int fd, const char *path, const void *data, size_t bytes, struct error *err)
{
    for (const char *at = data; bytes > 0;) {
        ssize_t n = write(fd, at, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return fail_write(path, errno, err);
        }
        at += n;
        bytes -= (size_t)n;
    }
    return STATUS_OK;
}

// A rename replaces whatever has the name. That may be a file; a link stands for what it leads to,
// and a device or a pipe is never meant.
static int resolve(const char *path, char target[PATH_MAX], struct error *err)
{
    struct stat at;
    if (stat(path, &at) != 0) {
        snprintf(target, PATH_MAX, "%s", path);
        return STATUS_OK;
    }
    if (!S_ISREG(at.st_mode)) {
        return error_set(err, STATUS_FAIL, "%s is there and is no file: give another name", path);
    }
    return realpath(path, target) ? STATUS_OK : fail_write(path, errno, err);
}

int atomic_open(struct atomic_file *f, const char *path, struct error *err)
{
    char target[PATH_MAX];
    f->fd = -1;
    f->bytes = 0;
    if (strlen(path) < PATH_MAX && resolve(path, target, err)) {
        return err->status;
    }
    if (strlen(path) < PATH_MAX) {
        path = target;
    }
    if (snprintf(f->path, PATH_MAX, "%s", path) >= PATH_MAX ||
        snprintf(f->temp, PATH_MAX, "%s.%ld.tmp", path, (long)getpid()) >= PATH_MAX) {
        return error_set(err, STATUS_FAIL, "'%.200s...': the name of the file is too long", path);
    }
    f->fd = open(f->temp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0) {
        return fail_write(f->path, errno, err);
    }
    return STATUS_OK;
}

void atomic_abort(struct atomic_file *f)
{
    if (f->fd >= 0) {
        close(f->fd);
        unlink(f->temp);
        f->fd = -1;
    }
}

int atomic_write(struct atomic_file *f, const void *data, size_t bytes, struct error *err)
{
    int status = file_write_all(f->fd, f->path, data, bytes, err);
    if (status) {
        atomic_abort(f);
        return status;
    }
    f->bytes += bytes;
    return STATUS_OK;
}

int atomic_rewrite(struct atomic_file *f, uint64_t offset, const void *data, size_t bytes,
                   struct error *err)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(f->fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno != EINTR) {
            int status = fail_write(f->path, errno, err);
            atomic_abort(f);
            return status;
        }
        done += n < 0 ? 0 : (size_t)n;
    }
    return STATUS_OK;
}

static int sync_folder_of(const char *path, struct error *err)
{
    char folder[PATH_MAX] = ".";
    const char *slash = strrchr(path, '/');
    if (slash) {
        // "/name" lies in "/".
        snprintf(folder, sizeof folder, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    }
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    // EINVAL: a file system whose folders cannot be synced, and need not be.
    int failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL);
    int cause = errno;
    if (fd >= 0) {
        close(fd);
    }
    if (failed) {
        return error_set(err, STATUS_FAIL, "cannot sync directory %s: %s", folder, strerror(cause));
    }
    return STATUS_OK;
}

int atomic_commit(struct atomic_file *f, struct error *err)
{
    // A full disk may show only here, when delayed writes happen.
    if (fsync(f->fd) != 0 || rename(f->temp, f->path) != 0) {
        int status = fail_write(f->path, errno, err);
        atomic_abort(f);
        return status;
    }
    int close_failed = close(f->fd);
    f->fd = -1;
    if (close_failed) {
        return fail_write(f->path, errno, err);
    }
    return sync_folder_of(f->path, err);
}

int file_writable(const char *path, struct error *err)
{
    struct atomic_file f;
    int status = atomic_open(&f, path, err);
    atomic_abort(&f);
    return status;
}

int file_replace(const char *path, const void *data, size_t bytes, struct error *err)
{
    struct atomic_file f;
    if (atomic_open(&f, path, err) || atomic_write(&f, data, bytes, err)) {
        return err->status;
    }
    return atomic_commit(&f, err);
}

// ---- reading ------------------------------------------------------------------------------------

int file_open(const char *path, int *fd, uint64_t *bytes, struct error *err)
{
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe must not hang us
    if (*fd < 0) {
        return error_set(err, STATUS_FAIL, "cannot open %s: %s", path, strerror(errno));
    }
    if (fstat(*fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(*fd);
        *fd = -1;
        return error_set(err, STATUS_FAIL, "%s is not a file", path);
    }
    *bytes = (uint64_t)st.st_size;
    return STATUS_OK;
}

int file_read_at(int fd, const char *path, void *data, size_t bytes, uint64_t offset,
                 struct error *err)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return error_set(err, STATUS_FAIL, "cannot read %s: %s", path, strerror(errno));
        }
        if (n == 0) {
            return error_set(
                err, STATUS_FAIL, "%s ends at byte %llu: expected %zu bytes from byte %llu on",
                path, (unsigned long long)(offset + done), bytes, (unsigned long long)offset);
        }
        done += (size_t)n;
    }
    return STATUS_OK;
}
