// Fuzzes the command line and the saved options. Input: lines. "=" as the first line: the rest is
// saved options; else every line is an argument.
#include "data/options.h"

#include <stdlib.h>
#include <string.h>

static void check(bool holds)
{
    if (!holds) {
        abort();
    }
}

static void check_error(int status, const struct error *err)
{
    check(status == err->status && err->text[0] && !strchr(err->text, '\n'));
}

// What was parsed comes back from its own text.
static void check_round_trip(const struct options *o)
{
    static char text[OPTIONS_SAVED_MAX], again[OPTIONS_SAVED_MAX];
    static struct options back;
    struct error err;
    char *argv[] = {"train_gpt"};
    size_t n = options_save(o, text, sizeof text);
    check(n > 0 && options_parse(&back, 1, argv, &err) == STATUS_OK);
    check(options_merge(&back, text, n, NULL, NULL, &err) == STATUS_OK);
    check(options_save(&back, again, sizeof again) == n && memcmp(text, again, n) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct options o;
    struct error err = {0};
    char *text = malloc(size + 1), *argv[64] = {"train_gpt"};
    int argc = 1;
    memcpy(text, data, size);
    text[size] = '\0';
    if (size >= 2 && memcmp(text, "=\n", 2) == 0) {
        check(options_parse(&o, 1, argv, &err) == STATUS_OK);
        int status = options_merge(&o, text + 2, size - 2, NULL, NULL, &err);
        if (status) {
            check_error(status, &err);
        }
        check_round_trip(&o);
    } else {
        for (char *line = text; line && argc < 64; argc++) {
            argv[argc] = line;
            line = strchr(line, '\n');
            if (line) {
                *line++ = '\0';
            }
        }
        int status = options_parse(&o, argc, argv, &err);
        if (status) {
            check_error(status, &err);
        } else {
            check_round_trip(&o);
        }
    }
    free(text);
    return 0;
}
