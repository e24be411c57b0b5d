// error.h - how a library function tells its caller what went wrong.
//
// The one header that every folder may include. Library functions never print and never exit: they
// fill a struct error and return its status; only main() turns it into a line on stderr and an exit
// status. A message says what, where, which value, and what to do about it, in one line.
#ifndef DATA_ERROR_H
#define DATA_ERROR_H

enum {
    STATUS_OK = 0,
    STATUS_FAIL = 1,  // bad data, full disk, no memory: the exit status of a failed run
    STATUS_USAGE = 2, // the command line itself is wrong
};

struct error {
    int status;
    char text[1024];
};

// Stores the message (printf style) and the status, and returns the status, so that a function can
// end with `return error_set(err, STATUS_FAIL, ...)`.
int error_set(struct error *err, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#endif
