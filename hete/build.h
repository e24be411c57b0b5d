// build.h - which program this is, for ranks that have to run the same one.
#ifndef HETE_BUILD_H
#define HETE_BUILD_H

#include <stddef.h>

// The compiler, and a hash of the machine code: another source or other flags show in it, another
// place of the files or other debug information do not.
void build_identity(char *out, size_t size);

#endif
