// Every layer operation of every variant of the cpu device (dtype, ISA, matrix product) over odd
// shapes (op_cases.h).
//
// A case runs its operation twice, with 1 and with 3 threads: they must agree in every bit.
#include "test/cmocka.h"
#include "test/op_cases.h"

#define CPU(label, type, set, own)                                                                 \
    {                                                                                              \
        .name = (label), .kind = "cpu", .dtype = (type), .isa = (set), .own_sgemm = (own)          \
    }
static const struct op_variant variants[] = {
    CPU("fp32 base", DTYPE_FP32, ISA_BASE, false),
    CPU("fp32 base, own sgemm", DTYPE_FP32, ISA_BASE, true),
    CPU("fp32 avx2", DTYPE_FP32, ISA_AVX2, false),
    CPU("fp32 avx2, own sgemm", DTYPE_FP32, ISA_AVX2, true),
    CPU("fp32 avx512", DTYPE_FP32, ISA_AVX512, false),
    CPU("fp32 avx512, own sgemm", DTYPE_FP32, ISA_AVX512, true),
    CPU("bf16 base", DTYPE_BF16, ISA_BASE, false),
    CPU("bf16 avx2", DTYPE_BF16, ISA_AVX2, false),
    CPU("bf16 avx512", DTYPE_BF16, ISA_AVX512, false),
};

static void test_op(void **state)
{
    const struct op_test *t = *state;
    uint64_t hash, more_threads, base;
    if (!op_run(t->op, t->variant, 1, &hash)) {
        skip();
    }
    assert_true(op_run(t->op, t->variant, 3, &more_threads));
    assert_int_equal(hash, more_threads);
    if (t->op->same_everywhere) {
        struct op_variant own = CPU("base", t->variant->dtype, ISA_BASE, true);
        assert_true(op_run(t->op, &own, 1, &base));
        assert_int_equal(hash, base);
    }
}

int main(void)
{
    return op_main(variants, sizeof variants / sizeof *variants, test_op);
}
