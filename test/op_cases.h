// op_cases.h - every layer operation over odd shapes, against the references in double.
//
// Each run checks every output against the reference, and the bytes behind each tensor. The hash of
// all outputs lets callers demand that two runs agree in every bit.
#ifndef TEST_OP_CASES_H
#define TEST_OP_CASES_H

#include "kernels/cpu/cpu.h"
#include "kernels/device.h"

// What operations are tried on.
struct op_variant {
    const char *name;
    const char *kind; // of the device
    enum dtype dtype;
    enum isa isa;   // cpu
    bool own_sgemm; // cpu: not OpenBLAS
    bool rows_of_8; // the other list of shapes, and the tolerances of tensor cores in bf16
    // NULL, or what is told of the memory that operations may touch: tensors as they are made, and
    // that all are forgotten (also before the first one).
    void (*tensor)(const void *at, size_t bytes, bool read_only);
    void (*forget)(struct device *dev);
};

#define OP_SHAPES 16

struct rig;

struct op_case {
    const char *name;
    void (*run)(struct rig *, const size_t *dims);
    size_t shapes[OP_SHAPES][5];    // ends with zeros
    size_t rows_of_8[OP_SHAPES][5]; // for devices whose rows are multiples of 8; none: `shapes`
    size_t count;                   // n from 0 to count-1 come before the shapes
    bool same_everywhere;           // same bits in every ISA and on every device
};

// What a test gets: *state is one of these.
struct op_test {
    const struct op_case *op;
    const struct op_variant *variant;
    char name[64];
};

// Runs a test for each operation and variant; what main returns.
int op_main(const struct op_variant *variants, size_t n_variants, void (*test)(void **state));

// Runs the operation over all its shapes; false: this machine cannot, and why is on stderr. Inside
// a cmocka test.
bool op_run(const struct op_case *op, const struct op_variant *v, int threads, uint64_t *hash);

#endif
