// cmocka.h - cmocka with the headers that it wants to be included first.
#ifndef TEST_CMOCKA_H
#define TEST_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> // after the headers above, which it does not include itself

#endif
