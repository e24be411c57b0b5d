# Builds ./train_gpt and ./tokenize, and runs everything around them: `make help`.
#
# Variables: CC=gcc|clang, OPT=-O0..-O3, SAN=address|thread, JOBS=compilers at once, V=1 to see the
# commands. Each combination has a build folder of its own (build, build-clang-O0, build-address,
# ...), BUILD=... names another. The programs lie in the working folder for the default build, else
# in BUILD.

ifeq ($(origin CC),default)
CC      = gcc
endif
OPT     = -O3
SAN     =
JOBS   := $(shell nproc 2>/dev/null || echo 2)
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(JOBS)
endif
Q       = $(if $(V),,@)
COMPILER = $(filter-out gcc,$(notdir $(CC)))
BUILD   = build$(COMPILER:%=-%)$(OPT:-O3=)$(SAN:%=-%)
BIN     = $(if $(filter build,$(BUILD)),.,$(BUILD))

# Never -ffast-math or -Ofast: they delete the NaN checks. No contraction: an a*b+c must give the
# same bits in every ISA; where a fused multiply-add is wanted it is written out.
comma   = ,
SANS    = $(if $(SAN),-fsanitize=$(SAN)$(if $(filter address,$(SAN)),$(comma)undefined) \
          -fno-sanitize-recover=all -fno-omit-frame-pointer)
CFLAGS  = -std=c11 -D_GNU_SOURCE -I. -g $(OPT) -fno-math-errno -fno-trapping-math \
          -ffp-contract=off -fopenmp -Wall -Wextra -Werror $(SANS)
LDFLAGS = -fopenmp $(SANS)
LDLIBS  = -lpcre2-8 -ljansson -lxxhash -ldl -lm -lpthread

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
            $(foreach d,$(DTYPES),$(foreach i,$(ISAS),\
                $(OPS:kernels/cpu/ops/%.c=$(BUILD)/ops-$d-$i/%.o)))
TESTS     = $(patsubst %.c,$(BUILD)/%,$(wildcard test/test_*.c))
TEST_OBJ  = $(patsubst %.c,$(BUILD)/%.o,$(filter-out test/test_%,$(wildcard test/*.c)))
FUZZERS   = $(patsubst %.c,$(BUILD)/%,$(wildcard test/fuzz/fuzz_*.c))
DEV       = $(patsubst %.c,$(BUILD)/%,$(wildcard dev/*.c))

.PHONY: all demo corpus test test-long bench fuzz check-format help clean FORCE
all: $(PROGRAMS:%=$(BIN)/%) ## build ./train_gpt and ./tokenize

demo: ## the whole way in minutes: packages, build, corpus, training, sample; leaves out/demo/
	scripts/demo.sh

corpus: all ## make the default corpus: little generated stories, as token shards in data/
	$(BIN)/tokenize --stories

test: ## build and run every test; TEST=name runs those whose name contains it
	@scripts/install_deps.sh test
	@$(MAKE) --no-print-directory run-tests

test-long: ## `make test` with the tests that take long
	@scripts/install_deps.sh test
	@$(MAKE) --no-print-directory run-tests LONG=--long

bench: $(DEV) ## measure sgemm, memory bandwidth and training, print one table
	$(BUILD)/dev/bench

FUZZ_SECONDS = 60
fuzz: ## run each fuzzer of test/fuzz for FUZZ_SECONDS=60 s (needs clang)
	@scripts/install_deps.sh ci
	@$(MAKE) --no-print-directory CC=clang OPT=-O1 SAN=fuzzer-no-link,address,undefined \
	    BUILD=build-fuzz run-fuzzers

check-format: ## fail where clang-format would change something
	@command -v clang-format >/dev/null || { scripts/install_deps.sh ci; }
	clang-format --dry-run -Werror $$(git ls-files '*.c' '*.h')

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

clean: ## remove everything that make has built
	rm -rf build build-* $(PROGRAMS)

.PHONY: run-tests run-fuzzers
run-tests: all $(TESTS)
	@BUILD=$(BUILD) TRAIN_GPT_BIN=$(BIN) test/run.sh $(LONG) $(TEST)

# The corpora grow in the build folder; what is worth keeping is committed by hand.
run-fuzzers: $(FUZZERS)
	@set -e; for fuzzer in $(notdir $(FUZZERS)); do \
	    corpus=$(BUILD)/corpus/$$fuzzer; mkdir -p $$corpus; \
	    cp -r test/fuzz/corpus/$$fuzzer/. $$corpus/; \
	    echo "$$fuzzer: $(FUZZ_SECONDS) s from $$(ls $$corpus | wc -l) inputs"; \
	    $(BUILD)/test/fuzz/$$fuzzer -max_total_time=$(FUZZ_SECONDS) -timeout=10 \
	        -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 \
	        -artifact_prefix=$(BUILD)/$$fuzzer- $$corpus >$(BUILD)/$$fuzzer.log 2>&1 || \
	        { tail -n 50 $(BUILD)/$$fuzzer.log; exit 1; }; \
	    sed -n 's/^stat::number_of_executed_units: */    inputs tried: /p' \
	        $(BUILD)/$$fuzzer.log; \
	done

$(BIN)/train_gpt: $(BUILD)/train_gpt.o $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(BIN)/tokenize: $(BUILD)/data/tokenize.o $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(TESTS): %: %.o $(TEST_OBJ) $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -lcmocka -o $@

$(DEV): %: %.o $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(FUZZERS): %: %.o $(filter $(BUILD)/data/%,$(LIB_OBJ))
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer $(filter %.o,$^) $(LDLIBS) -o $@

# Changes only when a flag or the compiler does; every object depends on it.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@{ $(CC) --version | head -n 1; echo '$(CFLAGS) $(LDFLAGS) $(LDLIBS) $(ISA_avx2) $(ISA_avx512)'; \
	} >$@.new
	@cmp -s $@.new $@ || scripts/install_deps.sh --check
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CC  $@'
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

define VARIANT
$(BUILD)/ops-$1-$2/%.o: kernels/cpu/ops/%.c $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo '  CC  $$@'
	$$(Q)$$(CC) $$(CFLAGS) $$(DTYPE_$1) $$(ISA_$2) -DVARIANT=$1_$2 -Wno-psabi -MMD -MP \
	    -c $$< -o $$@
endef
$(foreach d,$(DTYPES),$(foreach i,$(ISAS),$(eval $(call VARIANT,$d,$i))))

.SECONDARY:
.DELETE_ON_ERROR:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
