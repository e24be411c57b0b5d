// Fuzzes the reader of tokenizer files and the encoder. The input is a file if it begins with the
// format's magic, else a text for a small BPE vocabulary and for bytes.
#include "data/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void check(int holds)
{
    if (!holds)
        abort();
}

static struct tokenizer *read_tokenizer(const void *file, size_t size)
{
    int fd = memfd_create("tokenizer", 0);
    check(fd >= 0 && write(fd, file, size) == (ssize_t)size);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct tokenizer *t;
    struct error err = {0};
    if (tokenizer_read(&t, path, &err) != STATUS_OK)
        check(!t && err.status == STATUS_FAIL && err.text[0] && !strchr(err.text, '\n'));
    close(fd);
    return t;
}

// All bytes and a few merges.
static struct tokenizer *small_bpe(void)
{
    static const char *const merged[] = {" t",   "he", " the", "in", "ing",      "\n\n",     "  ",
                                         "    ", "aa", "aaaa", "'s", "\xc3\xa9", "\xe4\xb8", "12"};
    enum { MERGES = sizeof merged / sizeof *merged };
    static unsigned char file[2048];
    int32_t header[256] = {20240328, 2, 256 + MERGES + 1, 256 + MERGES};
    memcpy(file, header, sizeof header);
    unsigned char *p = file + sizeof header;
    for (int i = 0; i < 256 + MERGES + 1; i++) {
        unsigned char byte = (unsigned char)i;
        const void *text = i < 256            ? (const void *)&byte
                           : i < 256 + MERGES ? merged[i - 256]
                                              : "<|endoftext|>";
        size_t n = i < 256 ? 1 : strlen(text);
        *p++ = (unsigned char)n;
        memcpy(p, text, n);
        p += n;
    }
    return read_tokenizer(file, (size_t)(p - file));
}

static struct encoder *open_encoder(const struct tokenizer *t)
{
    struct encoder *e;
    struct error err;
    check(encoder_open(&e, t, &err) == STATUS_OK);
    return e;
}

static void check_text(const struct tokenizer *t, struct encoder *e, const uint8_t *text, size_t n)
{
    struct tokens whole = {0}, parts = {0};
    struct error err;
    if (encode(e, text, n, true, &whole, &err) == STATUS_OK) { // has a token for every byte
        size_t at = 0, len;
        for (size_t i = 0; i < whole.n; i++, at += len) {
            const unsigned char *bytes = tokenizer_decode(t, whole.ids[i], &len);
            check(bytes && at + len <= n && memcmp(bytes, text + at, len) == 0);
        }
        check(at == n);
        size_t cut = tokenizer_cut(t, text, n - n / 4);
        check(cut <= n && encode(e, text, cut, true, &parts, &err) == STATUS_OK);
        check(encode(e, text + cut, n - cut, true, &parts, &err) == STATUS_OK);
        check(parts.n == whole.n);
        check(whole.n == 0 || memcmp(parts.ids, whole.ids, whole.n * sizeof *whole.ids) == 0);
    }
    free(whole.ids);
    free(parts.ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int32_t magic = 20240328;
    static struct tokenizer *bpe, *bytes;
    static struct encoder *bpe_encoder, *bytes_encoder;
    struct error err;
    if (!bpe) {
        bpe = small_bpe();
        check(bpe && tokenizer_bytes(&bytes, &err) == STATUS_OK);
        bpe_encoder = open_encoder(bpe);
        bytes_encoder = open_encoder(bytes);
    }
    if (size >= 4 && memcmp(data, &magic, 4) == 0) {
        struct tokenizer *t = read_tokenizer(data, size);
        if (t) {
            struct encoder *e = open_encoder(t);
            check_text(t, e, data, size < 3000 ? size : 3000);
            encoder_close(e);
        }
        tokenizer_free(t);
    } else {
        check_text(bpe, bpe_encoder, data, size);
        check_text(bytes, bytes_encoder, data, size);
    }
    return 0;
}
