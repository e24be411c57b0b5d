// isa.c - which of the compiled instruction sets this processor runs.
#include "kernels/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[ISA_COUNT] = {"base", "avx2", "avx512"};

const char *isa_name(enum isa isa)
{
    return names[isa];
}

// __builtin_cpu_supports asks cpuid and the operating system's saved state (xgetbv).
static enum isa best(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
    return v4 ? ISA_AVX512 : v3 ? ISA_AVX2 : ISA_BASE;
#else
    return ISA_BASE;
#endif
}

int isa_choose(enum isa *out, struct error *err)
{
    *out = best();
    const char *asked = getenv("TRAIN_GPT_ISA");
    if (!asked || !*asked) {
        return STATUS_OK;
    }
    for (enum isa i = ISA_BASE; i < ISA_COUNT; i++) {
        if (strcmp(asked, names[i]) == 0) {
            if (i > *out) {
                return error_set(err, STATUS_USAGE,
                                 "TRAIN_GPT_ISA=%s: this processor runs %s at most", asked,
                                 names[*out]);
            }
            *out = i;
            return STATUS_OK;
        }
    }
    return error_set(err, STATUS_USAGE, "TRAIN_GPT_ISA=%s: not one of base, avx2, avx512", asked);
}
