# Builds ./train_gpt and ./tokenize, and runs everything around them: `make help`.
#
# Variables: CC=gcc|clang, OPT=-O0..-O3, SAN=address|thread, JOBS=compilers at once, V=1 to see the
# commands. CUDA=1|0: with the cuda device or without (default: with it where nvcc and a GPU are);
# CUDA=sim: with the cuda device on the CPU runtime of test/cuda. CUDA_HOME=toolkit. MPI=0: without
# MPI, the program of one process (default: with it where pkg-config ompi-c or mpicc is). HWLOC=0:
# without hwloc, ranks are not bound to cores (default: with it where hwloc.h is). NCCL=0: with
# CUDA, without several GPUs (default: with them where nccl.h is; CUDA=sim has its own). Each
# combination has a build folder of its own (build, build-clang-O0, build-cuda, build-address, ...),
# BUILD=... names another. The programs lie in the working folder for build and build-cuda, else in
# BUILD.

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
NVCC_FOUND := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA_HOME  := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC_FOUND)))
CUDA       := $(if $(NVCC_FOUND),$(if $(shell nvidia-smi -L 2>/dev/null),1,0),0)
USE_CUDA    = $(filter-out 0,$(CUDA))
ifeq ($(filter 0 1 sim,$(CUDA)),)
$(error CUDA=$(CUDA): 0, 1 or sim)
endif
ifneq ($(USE_CUDA),)
ifeq ($(NVCC_FOUND),)
$(error CUDA=$(CUDA): no nvcc on PATH or in /usr/local/cuda; scripts/install_deps.sh cuda says more)
endif
endif
ifneq ($(CUDNN),)
$(error CUDNN=$(CUDNN): attention by cuDNN is not offered, see Limits in README.md)
endif
BUILD   = build$(COMPILER:%=-%)$(OPT:-O3=)$(SAN:%=-%)$(USE_CUDA:%=-cuda$(filter-out 1,$(CUDA)))$(\
          )$(if $(filter 0,$(MPI)),$(if $(filter file,$(origin MPI)),,-nompi))$(\
          )$(if $(filter 0,$(HWLOC)),$(if $(filter file,$(origin HWLOC)),,-nohwloc))$(\
          )$(if $(filter 0,$(NCCL)),$(if $(filter file,$(origin NCCL)),,-nonccl))
BIN     = $(if $(filter build build-cuda,$(BUILD)),.,$(BUILD))

# Never -ffast-math or -Ofast: they delete the NaN checks. No contraction: an a*b+c must give the
# same bits in every ISA; where a fused multiply-add is wanted it is written out.
comma   = ,
SANS    = $(if $(SAN),-fsanitize=$(SAN)$(if $(filter address,$(SAN)),$(comma)undefined) \
          -fno-sanitize-recover=all -fno-omit-frame-pointer)
CFLAGS  = -std=c11 -D_GNU_SOURCE -I. -g $(OPT) -fno-math-errno -fno-trapping-math \
          -ffp-contract=off -fopenmp -Wall -Wextra -Werror $(SANS) \
          $(if $(USE_CUDA),-DUSE_CUDA -isystem $(CUDA_HOME)/include) $(MPI_CFLAGS) \
          $(HWLOC_CFLAGS) $(NCCL_CFLAGS)
LDFLAGS = -fopenmp $(SANS)
LDLIBS  = -lpcre2-8 -ljansson -lxxhash -ldl -lm -lpthread $(NCCL_LIBS) $(CUDA_LIBS_$(CUDA)) \
          $(MPI_LIBS) $(HWLOC_LIBS)
CUDA_LIBS_1   = -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublasLt -lcudart -lstdc++
CUDA_LIBS_sim = -lstdc++

# Open MPI's as pkg-config knows them, else those of whatever has an mpicc, whose -show prints them
# after a compiler's name.
MPI        := $(if $(shell pkg-config --exists ompi-c 2>/dev/null && echo 1)$(shell \
              command -v mpicc),1,0)
ifneq ($(MPI),0)
MPI_FLAGS  := $(or $(shell pkg-config --cflags --libs ompi-c 2>/dev/null),\
              $(wordlist 2,99,$(shell mpicc -show 2>/dev/null)))
endif
MPI_CFLAGS  = $(if $(MPI_FLAGS),-DUSE_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_FLAGS))))
MPI_LIBS    = $(if $(MPI_FLAGS),-Wl$(comma)--push-state$(comma)--as-needed \
              $(filter-out -I% -D%,$(MPI_FLAGS)) -Wl$(comma)--pop-state)
MPI_FOUND   = $(if $(MPI_FLAGS),$(or $(shell pkg-config --modversion ompi-c 2>/dev/null | \
              sed 's/^/Open MPI /'),mpicc),none: no more than one process)

# NCCL comes with some toolkits, or as a package of its own. On the CPU runtime: test/cuda/nccl.c.
NCCL_HEADER := $(if $(filter 1,$(CUDA)),$(firstword $(wildcard $(CUDA_HOME)/include/nccl.h \
               /usr/local/include/nccl.h /usr/include/nccl.h)))
NCCL        := $(if $(filter sim,$(CUDA))$(NCCL_HEADER),1,0)
USE_NCCL     = $(if $(USE_CUDA),$(filter-out 0,$(NCCL)))
NCCL_CFLAGS  = $(if $(USE_NCCL),-DUSE_NCCL)
NCCL_LIBS    = $(if $(USE_NCCL),$(if $(filter 1,$(CUDA)),-lnccl))
$(BUILD)/hete/comm_nccl.o: CFLAGS += $(if $(filter sim,$(CUDA)),-Itest/cuda)
NCCL_FOUND   = $(if $(USE_NCCL),$(or $(NCCL_HEADER),of the CPU runtime),none: no more than one GPU)

# What is known of a machine's cores, to divide them among ranks.
HWLOC      := $(if $(shell echo '\#include <hwloc.h>' | $(CC) -E - >/dev/null 2>&1 && echo 1),1,0)
HWLOC_CFLAGS = $(if $(filter-out 0,$(HWLOC)),-DUSE_HWLOC)
HWLOC_LIBS   = $(if $(filter-out 0,$(HWLOC)),-lhwloc)
HWLOC_FOUND  = $(if $(HWLOC_LIBS),hwloc,no hwloc: ranks are not bound to cores)

# Every file of kernels/cpu/ops is compiled once per (dtype, ISA); kernels/cpu/device.c picks the
# variant at run time. No other object holds AVX instructions.
DTYPES      = fp32 bf16
ISAS        = $(if $(filter x86_64,$(shell uname -m)),base avx2 avx512,base)
ISA_base    =
ISA_avx2    = -march=x86-64-v3 -DVEC_BYTES=32
ISA_avx512  = -march=x86-64-v4 -DVEC_BYTES=64 -mprefer-vector-width=512
DTYPE_fp32  =
DTYPE_bf16  = -DUSE_BF16

# Every file of kernels/cuda is compiled once per dtype, but for what is of the device as a whole.
# nvcc: code for sm_80 and sm_90, and PTX of the latter for what comes after them. g++, for tests:
# the same files with shim.h around them, and every access instrumented (test/cuda/sim.h). Without
# SRA, which makes four accesses of one of 16 bytes, whose alignment is to be checked.
NVCC      = $(NVCC_FOUND)
NVCCFLAGS = -std=c++17 -O3 -I. -lineinfo -Xptxas -v -Xcompiler -Wall,-Wextra,-fno-strict-aliasing \
            -Werror all-warnings -gencode arch=compute_80,code=sm_80 \
            -gencode arch=compute_90,code=[sm_90,compute_90]
SIMFLAGS  = -std=c++17 -g -O1 -I. -isystem $(CUDA_HOME)/include -x c++ -include test/cuda/shim.h \
            -fsanitize=thread -fno-tree-sra -fno-strict-aliasing -fno-math-errno \
            -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -Werror
CUDA_DEVICE = kernels/cuda/device.c kernels/cuda/lt.c
CUDA_OPS_C  = $(filter-out $(CUDA_DEVICE),$(wildcard kernels/cuda/*.c))
CUDA_OPS_CU = $(wildcard kernels/cuda/*.cu)
CUDA_OBJ_1  = $(CUDA_DEVICE:%.c=$(BUILD)/%.o) \
              $(foreach d,$(DTYPES),$(CUDA_OPS_C:kernels/cuda/%.c=$(BUILD)/cuda-$d/%.o) \
                                    $(CUDA_OPS_CU:kernels/cuda/%.cu=$(BUILD)/cuda-$d/%.o))
CUDA_OBJ_sim = $(CUDA_OBJ_1) $(patsubst %.c,$(BUILD)/%.o,$(filter-out test/cuda/test_%,\
                                                          $(wildcard test/cuda/*.c)))

PROGRAMS  = train_gpt tokenize
MAINS     = train_gpt.c data/tokenize.c
OPS       = $(wildcard kernels/cpu/ops/*.c)
LIB       = $(filter-out $(MAINS) $(if $(MPI_FLAGS),,hete/comm_mpi.c) \
                         $(if $(USE_NCCL),,hete/comm_nccl.c hete/meet.c) \
                         $(if $(MPI_FLAGS)$(USE_NCCL),,hete/beat.c),\
            $(wildcard kernels/*.c kernels/cpu/*.c hete/*.c data/*.c))
LIB_OBJ   = $(LIB:%.c=$(BUILD)/%.o) \
            $(foreach d,$(DTYPES),$(foreach i,$(ISAS),\
                $(OPS:kernels/cpu/ops/%.c=$(BUILD)/ops-$d-$i/%.o))) $(CUDA_OBJ_$(CUDA))
SIM_TESTS = $(patsubst %.c,$(BUILD)/%,$(wildcard test/cuda/test_*.c))
TESTS     = $(patsubst %.c,$(BUILD)/%,$(wildcard test/test_*.c))
TEST_OBJ  = $(patsubst %.c,$(BUILD)/%.o,$(filter-out test/test_%,$(wildcard test/*.c)))
FUZZERS   = $(patsubst %.c,$(BUILD)/%,$(wildcard test/fuzz/fuzz_*.c))
DEV       = $(patsubst %.c,$(BUILD)/%,$(wildcard dev/*.c))
DEV_CUDA  = $(patsubst %.cu,$(BUILD)/%,$(wildcard dev/cuda/*.cu))

.PHONY: all demo corpus test test-long bench dev-cuda fuzz check-format help clean FORCE
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

dev-cuda: $(DEV_CUDA) ## with CUDA=1: build the studies of single kernels, BUILD/dev/cuda/NAME

FUZZ_SECONDS = 60
fuzz: ## run each fuzzer of test/fuzz for FUZZ_SECONDS=60 s (needs clang)
	@scripts/install_deps.sh ci
	@$(MAKE) --no-print-directory CC=clang OPT=-O1 SAN=fuzzer-no-link,address,undefined \
	    BUILD=build-fuzz run-fuzzers

check-format: ## fail where clang-format would change something
	@command -v clang-format >/dev/null || { scripts/install_deps.sh ci; }
	clang-format --dry-run -Werror $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

.PHONY: ptxas-table
PTXAS = $(foreach d,$(DTYPES),$(CUDA_OPS_CU:kernels/cuda/%.cu=$(BUILD)/cuda-$d/%.o))
ptxas-table: $(PTXAS) ## CUDA=1: registers, shared memory and spills of every kernel
	@for file in $(PTXAS:.o=.ptxas); do \
	    dtype=$${file%/*}; echo "== $$(basename $$file .ptxas).cu $${dtype##*-}"; \
	    c++filt -p <$$file; \
	done | awk -f scripts/ptxas_table.awk scripts/ptxas_spills -

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

clean: ## remove everything that make has built
	rm -rf build build-* $(PROGRAMS)

.PHONY: run-tests run-fuzzers where
where: # the folders of the programs and of all else that is built, for scripts
	@echo $(BIN) $(BUILD)

# The CUDA files on the CPU, for the tests of them: where there is a toolkit (its headers), and
# nothing else is asked for. NO_CUDA=1 leaves them out.
SIM_BUILD = $(if $(filter 1,$(NO_CUDA))$(SAN)$(COMPILER),,$(if $(wildcard \
            $(CUDA_HOME)/include/cublasLt.h),build-cudasim))
run-tests: all $(TESTS) $(if $(SIM_BUILD),for-sim-tests)
	@BUILD=$(BUILD) TRAIN_GPT_BIN=$(BIN) CUDA_SIM=$(SIM_BUILD) test/run.sh $(LONG) $(TEST)

.PHONY: for-sim-tests
for-sim-tests:
	@$(MAKE) --no-print-directory CUDA=sim BUILD=$(SIM_BUILD) sim-tests

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

# The programs in the working folder come from one of two builds.
build/linked: FORCE
	@mkdir -p $(@D)
	@echo $(BUILD) | cmp -s - $@ || echo $(BUILD) >$@

$(BIN)/train_gpt: $(BUILD)/train_gpt.o $(LIB_OBJ) $(if $(filter .,$(BIN)),build/linked)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(BIN)/tokenize: $(BUILD)/data/tokenize.o $(LIB_OBJ) $(if $(filter .,$(BIN)),build/linked)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(TESTS): %: %.o $(TEST_OBJ) $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -lcmocka -o $@

# Tests that need the CPU runtime: `make CUDA=sim sim-tests`.
.PHONY: sim-tests
sim-tests: $(SIM_TESTS) $(BUILD)/test/test_contract $(BUILD)/test/test_comm $(BIN)/train_gpt \
           $(BIN)/tokenize
$(BUILD)/test/cuda/test_kernel: $(BUILD)/test/cuda/planted.o
$(SIM_TESTS): %: %.o $(TEST_OBJ) $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -lcmocka -o $@

$(DEV): %: %.o $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(DEV_CUDA): %: %.o $(BUILD)/dev/cuda/study.o $(LIB_OBJ)
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(LDLIBS) -o $@

$(FUZZERS): %: %.o $(filter $(BUILD)/data/%,$(LIB_OBJ))
	@echo '  LD  $@'
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer $(filter %.o,$^) $(LDLIBS) -o $@

# Changes only when a flag or the compiler does; every object depends on it.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@{ $(CC) --version | head -n 1; echo '$(CFLAGS) $(LDFLAGS) $(LDLIBS) $(ISA_avx2) $(ISA_avx512) \
	    $(if $(USE_CUDA),$(NVCC) $(NVCCFLAGS) $(SIMFLAGS))'; } >$@.new
	@cmp -s $@.new $@ || { scripts/install_deps.sh --check && \
	    echo '  MPI $(MPI_FOUND); $(HWLOC_FOUND)' && echo '  NCCL $(NCCL_FOUND)'; }
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

$(BUILD)/dev/cuda/%.o: dev/cuda/%.cu $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CU  $@'
	$(Q)$(filter-out -Xptxas -v,$(CU_COMPILER_$(CUDA))) $(DTYPE_bf16) -DVARIANT=cuda_bf16 \
	    -MMD -MP -c $< -o $@

# Kernels for tests of the CPU runtime itself.
$(BUILD)/test/cuda/%.o: test/cuda/%.cu $(BUILD)/flags
	@mkdir -p $(@D)
	@echo '  CU  $@'
	$(Q)g++ $(SIMFLAGS) -DVARIANT=cuda_fp32 -MMD -MP -c $< -o $@

CU_COMPILER_1   = $(NVCC) $(NVCCFLAGS)
CU_COMPILER_sim = g++ $(SIMFLAGS)
define CUDA_VARIANT
$(BUILD)/cuda-$1/%.o: kernels/cuda/%.c $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo '  CC  $$@'
	$$(Q)$$(CC) $$(CFLAGS) $$(DTYPE_$1) -DVARIANT=cuda_$1 -MMD -MP -c $$< -o $$@
$(BUILD)/cuda-$1/%.o: kernels/cuda/%.cu $(BUILD)/flags
	@mkdir -p $$(@D)
	@echo '  CU  $$@'
	$$(Q)$$(CU_COMPILER_$(CUDA)) $$(DTYPE_$1) -DVARIANT=cuda_$1 -MMD -MP -c $$< -o $$@ \
	    2>$$(@:.o=.ptxas) || { cat $$(@:.o=.ptxas); rm -f $$@; exit 1; }
endef
$(foreach d,$(DTYPES),$(eval $(call CUDA_VARIANT,$d)))

.SECONDARY:
.DELETE_ON_ERROR:
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
