# Targets a user needs: all (default), demo, test, bench, clean. `make help` lists them.
#
# Variables: CC=gcc|clang, OPT=-O3, SAN=address|thread, BUILD=folder for objects.

CC      = gcc
OPT     = -O3
SAN     =
BUILD   = build$(if $(SAN),-$(SAN))
BIN     = $(if $(filter build,$(BUILD)),.,$(BUILD))

# Never -ffast-math or -Ofast: they delete the NaN checks. No contraction: an a*b+c must give the
# same bits in every ISA; where a fused multiply-add is wanted it is written out.
CFLAGS  = -std=c11 -D_GNU_SOURCE -I. -g $(OPT) -fno-math-errno -fno-trapping-math \
          -ffp-contract=off -fopenmp -Wall -Wextra -Werror -MMD -MP \
          $(if $(SAN),-fsanitize=$(SAN)$(if $(filter address,$(SAN)),$(comma)undefined) \
          -fno-sanitize-recover=all -fno-omit-frame-pointer)
LDFLAGS = -fopenmp $(filter -fsanitize%,$(CFLAGS))
LDLIBS  = -lpcre2-8 -ljansson -lxxhash -ldl -lm -lpthread
comma   = ,

# Every file of kernels/cpu/ops is compiled once per (dtype, ISA); kernels/cpu/device.c picks the
# variant at run time. No other object holds AVX instructions.
DTYPES      = fp32 bf16
ISAS        = $(if $(filter x86_64,$(shell uname -m)),base avx2 avx512,base)
ISA_base    =
ISA_avx2    = -march=x86-64-v3 -DVEC_BYTES=32
ISA_avx512  = -march=x86-64-v4 -DVEC_BYTES=64 -mprefer-vector-width=512
DTYPE_fp32  =
DTYPE_bf16  = -DUSE_BF16

PROGRAMS  = train_gpt tokenize
MAINS     = train_gpt.c data/tokenize.c
OPS       = $(wildcard kernels/cpu/ops/*.c)
LIB       = $(filter-out $(MAINS),$(wildcard kernels/*.c kernels/cpu/*.c hete/*.c data/*.c))
LIB_OBJ   = $(LIB:%.c=$(BUILD)/%.o) \
            $(foreach d,$(DTYPES),$(foreach i,$(ISAS),$(OPS:kernels/cpu/ops/%.c=$(BUILD)/ops-$d-$i/%.o)))
TESTS     = $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/test_*.c))

.PHONY: all test clean help
all: $(PROGRAMS:%=$(BIN)/%)

$(BIN)/train_gpt: $(BUILD)/train_gpt.o $(LIB_OBJ)
	$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@

$(BIN)/tokenize: $(BUILD)/data/tokenize.o $(LIB_OBJ)
	$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@

$(BUILD)/test/test_%: $(BUILD)/test/test_%.o $(LIB_OBJ)
	$(CC) $(LDFLAGS) $^ $(LDLIBS) -lcmocka -o $@

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@

define VARIANT
$(BUILD)/ops-$1-$2/%.o: kernels/cpu/ops/%.c
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $$(DTYPE_$1) $$(ISA_$2) -DVARIANT=$1_$2 -Wno-psabi -c $$< -o $$@
endef
$(foreach d,$(DTYPES),$(foreach i,$(ISAS),$(eval $(call VARIANT,$d,$i))))

clean:
	rm -rf build build-* $(PROGRAMS)

.SECONDARY:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
