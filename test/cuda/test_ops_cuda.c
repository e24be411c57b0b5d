// Every layer operation of the cuda device on the CPU runtime, over odd shapes (op_cases.h):
// threads and blocks forward, in reverse and shuffled must give the same bits, touch nothing but
// their tensors and the device's scratch memory, and be free of races.
//
// What has the same bits everywhere is held against the cpu device as well.
#include "kernels/cuda/cuda.h"
#include "test/cmocka.h"
#include "test/cuda/sim.h"
#include "test/op_cases.h"

#include <string.h>

static void forget(struct device *dev)
{
    if (strcmp(dev->kind, "cuda") == 0) {
        sim_parts_forget();
        sim_part(cuda_of(dev)->scratch, CUDA_SCRATCH_BYTES, false);
        sim_part(cuda_of(dev)->lt_workspace, CUDA_LT_BYTES, false);
    }
}

static const struct op_variant variants[] = {
    {.name = "fp32",
     .kind = "cuda",
     .dtype = DTYPE_FP32,
     .rows_of_8 = true,
     .tensor = sim_part,
     .forget = forget},
    {.name = "bf16",
     .kind = "cuda",
     .dtype = DTYPE_BF16,
     .rows_of_8 = true,
     .tensor = sim_part,
     .forget = forget},
};

static void test_op(void **state)
{
    const struct op_test *t = *state;
    uint64_t first, hash;
    sim_forget_reports();
    sim_settings()->seed = 7;
    sim_settings()->order = SIM_FORWARD;
    assert_true(op_run(t->op, t->variant, 1, &first));
    sim_settings()->order = SIM_REVERSE;
    assert_true(op_run(t->op, t->variant, 1, &hash));
    assert_int_equal(first, hash);
    sim_settings()->order = SIM_SHUFFLE;
    assert_true(op_run(t->op, t->variant, 1, &hash));
    assert_int_equal(first, hash);
    if (t->op->same_everywhere) {
        struct op_variant cpu = {.name = "cpu",
                                 .kind = "cpu",
                                 .dtype = t->variant->dtype,
                                 .isa = ISA_BASE,
                                 .own_sgemm = true,
                                 .rows_of_8 = true};
        assert_true(op_run(t->op, &cpu, 1, &hash));
        assert_int_equal(first, hash);
    }
    for (int kind = 0; kind < SIM_KINDS; kind++) {
        if (sim_reports((enum sim_kind)kind) > 0) {
            fail_msg("%s: %s", t->name, sim_last_report());
        }
    }
}

int main(void)
{
    return op_main(variants, sizeof variants / sizeof *variants, test_op);
}
