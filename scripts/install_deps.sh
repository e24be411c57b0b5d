#!/usr/bin/env bash
# Installs what this project needs and the machine lacks: Debian's (or Ubuntu's) packages only.
#
#     scripts/install_deps.sh [--check] [build|test|ci|cuda]
#
#     build   (default) to build and run ./train_gpt and ./tokenize
#     test    also to run `make test`
#     ci      also for `make check-format`, `make fuzz`, CC=clang
#     cuda    for CUDA=1 and the tests of the CUDA files. The toolkit is NVIDIA's and not installed
#             from here: says what is missing
#     --check installs nothing: prints what is missing to build and exits with 1 if something is
#
# Says what it will install before it does; quiet where nothing is missing. Where there is no
# apt-get, or no right to use it, it prints the list and exits with 1.
set -u

check=
[ "${1-}" = --check ] && { check=1 && shift; }
case ${1-build} in
build) groups='build' ;;
test) groups='build test' ;;
ci) groups='build test ci' ;;
cuda) groups='build cuda' ;;
*)
    echo "install_deps.sh: unknown group '$1': build, test, ci or cuda" >&2
    exit 2
    ;;
esac

# A probe looks for what is used, not for the package, so that other systems are judged rightly too.
have_command() { command -v "$1" >/dev/null; }
have_header() {
    # shellcheck disable=SC2086 # a command with its options
    echo "#include <$1>" | ${2:-cc} -DPCRE2_CODE_UNIT_WIDTH=8 -fopenmp -E - >/dev/null 2>&1
}
have_library() { PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep -q "$1"; }
have_mpi() { pkg-config --exists ompi-c 2>/dev/null || have_command mpicc; }
have_fuzzer() {
    local rc folder
    folder=$(mktemp -d)
    echo 'int LLVMFuzzerTestOneInput(const char *p, long n) { return !p + n < 0; }' |
        clang -fsanitize=fuzzer,address -x c - -o "$folder/probe" 2>/dev/null
    rc=$?
    rm -r "$folder"
    return $rc
}

missing=()
# need GROUP PACKAGE PROBE...
need() {
    [[ " $groups " == *" $1 "* ]] || return 0
    "${@:3}" || missing+=("$2")
}
need build gcc have_command gcc
need build make have_command make
need build libc6-dev have_header stdio.h
need build libpcre2-dev have_header pcre2.h
need build libjansson-dev have_header jansson.h
need build libxxhash-dev have_header xxhash.h
# Found at run time. Without it the program works, slowly, and says so: nothing to fail a build for.
[ -n "$check" ] || need build libopenblas0-pthread have_library 'libopenblas\.so\.0'
need test libcmocka-dev have_header cmocka.h
need test curl have_command curl
need test binutils have_command objdump
# For several ranks. A build without MPI is a whole program, so it is not asked for to build.
need test libopenmpi-dev have_mpi
need test openmpi-bin have_command mpirun
need test libhwloc-dev have_header hwloc.h
need ci git have_command git
need ci shellcheck have_command shellcheck
need ci clang have_command clang
need ci clang-format have_command clang-format
need ci libomp-dev have_header omp.h clang
need ci libclang-rt-dev have_fuzzer

if [[ " $groups " == *' cuda '* ]]; then
    nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
    toolkit=$(dirname "$(dirname "$(readlink -f "${nvcc:-/nowhere/bin/nvcc}")")")
    if [ ! -e "$toolkit/include/cublasLt.h" ] || ! "$nvcc" --version >/dev/null; then
        echo 'missing: the CUDA toolkit (nvcc, cuBLASLt and NVTX) on PATH or in /usr/local/cuda:' \
            'https://developer.nvidia.com/cuda-downloads has it. NO_CUDA=1 goes without' >&2
        exit 1
    fi
    need cuda g++ have_command g++
    # For several GPUs. Some toolkits hold it; NVIDIA's and Debian's non-free packages do.
    if [ ! -e "$toolkit/include/nccl.h" ] && ! have_header nccl.h "cc -I$toolkit/include"; then
        if apt-cache show libnccl-dev >/dev/null 2>&1; then
            missing+=(libnccl-dev)
        else
            echo 'no NCCL: no more than one GPU. https://developer.nvidia.com/nccl has it' >&2
        fi
    fi
fi

[ ${#missing[@]} -eq 0 ] && exit 0

if [ -n "$check" ]; then
    echo "missing: ${missing[*]} (Debian's names). scripts/install_deps.sh installs them" >&2
    exit 1
fi
as_root=
[ "$(id -u)" -eq 0 ] || as_root=sudo
if ! have_command apt-get || { [ -n "$as_root" ] && ! have_command sudo; }; then
    echo "missing, please install (Debian's names): ${missing[*]}" >&2
    exit 1
fi

echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq || exit
# In older releases the clang package itself holds its run-time library.
packages=()
for package in "${missing[@]}"; do
    if apt-cache show "$package" >/dev/null 2>&1 || [ "$package" != libclang-rt-dev ]; then
        packages+=("$package")
    fi
done
$as_root apt-get install -y -qq --no-install-recommends "${packages[@]}"
