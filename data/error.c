#include "data/error.h"

#include <stdarg.h>
#include <stdio.h>

int error_set(struct error *err, int status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, args);
    va_end(args);
    err->status = status;
    return status;
}
