#include "test/scratch.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];

int scratch_make(void **state)
{
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/train_gpt_test_XXXXXX", base ? base : "/tmp");
    return mkdtemp(folder) ? 0 : -1;
}

void scratch_clear(void)
{
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        remove(scratch(entry->d_name));
    if (dir)
        closedir(dir);
}

int scratch_remove(void **state)
{
    (void)state;
    scratch_clear();
    return rmdir(folder);
}

const char *scratch(const char *name)
{
    static char paths[16][PATH_MAX + 300];
    static unsigned next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

void scratch_write(const char *name, const void *data, size_t bytes)
{
    FILE *out = fopen(scratch(name), "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, bytes, out), bytes);
    assert_int_equal(fclose(out), 0);
}

void *scratch_read(const char *name, size_t *bytes)
{
    FILE *in = fopen(name[0] == '/' || name[0] == '.' ? name : scratch(name), "rb");
    if (!in)
        fail_msg("%s is missing", name);
    fseek(in, 0, SEEK_END);
    *bytes = (size_t)ftell(in);
    rewind(in);
    char *data = malloc(*bytes + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *bytes, in), *bytes);
    data[*bytes] = 0;
    fclose(in);
    return data;
}

bool scratch_exists(const char *name)
{
    return access(scratch(name), F_OK) == 0;
}

size_t scratch_files(void)
{
    size_t n = 0;
    DIR *dir = opendir(folder);
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n - 2; // . and ..
}

uint64_t scratch_seed(void)
{
    const char *given = getenv("TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    fprintf(stderr, "seed: TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

const char *shared_file(const char *name)
{
    static char path[PATH_MAX];
    const char *base = getenv("TRAIN_GPT_SHARED");
    snprintf(path, sizeof path, "%s/data/%s", base ? base : "../shared", name);
    if (access(path, R_OK) == 0)
        return path;
    fprintf(stderr, "skipped: %s is not there, so nothing was checked against it\n", path);
    return NULL;
}

void test_threads_sleep(char **argv)
{
    if (!getenv("OMP_WAIT_POLICY")) { // read while the program is loaded
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv); // if it fails, only time is lost
    }
}
