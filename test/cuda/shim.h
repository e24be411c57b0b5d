// shim.h - lets g++ compile the .cu files: CUDA C's words over the toolkit's own headers.
//
// Included before anything else of a .cu file that g++ compiles (and by kernels/cuda/ops.h). The
// toolkit's headers give types, bf16 conversions and the API; here are the qualifiers, the built-in
// variables, what lanes and blocks do together, and intrinsics. What is missing here and harmless
// on the host is to be added in the same way.
//
// Instructions of whole warps. A wrapper around inline PTX has a C branch for the host, which gives
// its operands to sim_warp: all 32 lanes arrive, then `run` is called once, with every lane's
// pointer, and computes for all of them:
//
//     struct mma { uint32_t a[4], b[2]; float c[4]; }; // one lane's fragments
//     static void mma_run(void *const *lanes) { ... ((struct mma *)lanes[lane])->c[i] += ... }
//     ... sim_warp(mma_run, &mine);
//
// or has all lanes' bytes copied to each lane, which computes its own part: sim_warp_exchange.
//
// cp.async: sim_cp_async, sim_cp_async_commit, sim_cp_async_wait. The bytes arrive at the wait;
// until then the destination holds NaN.
#ifndef TEST_CUDA_SHIM_H
#define TEST_CUDA_SHIM_H

#include "test/cuda/threads.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// ---- qualifiers ----

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __grid_constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
// Thread-local, which nothing else in a .cu file is: so the runtime knows shared variables from
// others (shared.c).
#define __shared__ thread_local __attribute__((aligned(SIM_SHARED_ALIGN)))

// ---- built-in variables ----

#define threadIdx (sim_thread_index())
#define blockIdx  (sim_block_index())
#define blockDim  (sim_block_size())
#define gridDim   (sim_grid_size())
#define warpSize  32

// ---- lanes and blocks ----

static inline void __syncthreads()
{
    sim_barrier(0);
}
static inline int __syncthreads_count(int predicate)
{
    return sim_barrier(predicate);
}
static inline int __syncthreads_or(int predicate)
{
    return sim_barrier(predicate) != 0;
}
static inline int __syncthreads_and(int predicate)
{
    return sim_barrier(!predicate) == 0;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    sim_warp_barrier(mask);
}
static inline void __threadfence()
{
    sim_fence();
}
static inline void __threadfence_block()
{
}
static inline unsigned __activemask()
{
    return sim_active();
}
static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return sim_ballot(mask, predicate);
}
static inline int __any_sync(unsigned mask, int predicate)
{
    return sim_ballot(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate)
{
    return sim_ballot(mask, !predicate) == 0;
}

template <typename T>
static inline T sim_shuffle_value(enum sim_shuffle how, unsigned mask, T x, unsigned by, int width)
{
    static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles move up to 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, (const void *)&x, sizeof x);
    bits = sim_shuffle(how, mask, bits, by, width);
    __builtin_memcpy((void *)&x, &bits, sizeof x);
    return x;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32)
{
    return sim_shuffle_value(SIM_SHUFFLE_IDX, mask, x, (unsigned)lane, width);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32)
{
    return sim_shuffle_value(SIM_SHUFFLE_UP, mask, x, delta, width);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32)
{
    return sim_shuffle_value(SIM_SHUFFLE_DOWN, mask, x, delta, width);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32)
{
    return sim_shuffle_value(SIM_SHUFFLE_XOR, mask, x, (unsigned)bits, width);
}

// ---- atomics: of integers only, since sums of floats must not depend on the order of threads ----

template <typename T> struct sim_same {
    static_assert(std::is_integral<T>::value, "no float atomics: results must be deterministic");
    typedef T type;
};
#define SIM_ATOMIC(name, value)                                                                    \
    template <typename T>                                                                          \
    __attribute__((no_sanitize("thread"))) static inline T name(T *p,                              \
                                                                typename sim_same<T>::type x)      \
    {                                                                                              \
        sim_atomic(p, sizeof *p);                                                                  \
        T old = *p;                                                                                \
        *p = (value);                                                                              \
        return old;                                                                                \
    }
SIM_ATOMIC(atomicAdd, (T)(old + x))
SIM_ATOMIC(atomicSub, (T)(old - x))
SIM_ATOMIC(atomicExch, x)
SIM_ATOMIC(atomicMin, x < old ? x : old)
SIM_ATOMIC(atomicMax, x > old ? x : old)
SIM_ATOMIC(atomicAnd, (T)(old &x))
SIM_ATOMIC(atomicOr, (T)(old | x))
SIM_ATOMIC(atomicInc, old >= x ? 0 : (T)(old + 1))
#undef SIM_ATOMIC
template <typename T>
__attribute__((no_sanitize("thread"))) static inline T
atomicCAS(T *p, typename sim_same<T>::type expected, typename sim_same<T>::type x)
{
    sim_atomic(p, sizeof *p);
    T old = *p;
    *p = old == expected ? x : old;
    return old;
}

// ---- loads and stores with hints; bytes ----

#define SIM_LOAD(name)                                                                             \
    template <typename T> static inline T name(const T *p)                                         \
    {                                                                                              \
        return *p;                                                                                 \
    }
SIM_LOAD(__ldg)
SIM_LOAD(__ldcg)
SIM_LOAD(__ldca)
SIM_LOAD(__ldcs)
SIM_LOAD(__ldcv)
SIM_LOAD(__ldlu)
#undef SIM_LOAD
#define SIM_STORE(name)                                                                            \
    template <typename T> static inline void name(T *p, typename std::common_type<T>::type x)      \
    {                                                                                              \
        *p = x;                                                                                    \
    }
SIM_STORE(__stcg)
SIM_STORE(__stcs)
SIM_STORE(__stwb)
SIM_STORE(__stwt)
#undef SIM_STORE

// The compiler reports what it does itself, as for a few bytes, but not what the library does.
__attribute__((always_inline)) static inline void *sim_memcpy(void *to, const void *from, size_t n)
{
    if (!__builtin_constant_p(n) || (n != 1 && n != 2 && n != 4 && n != 8)) {
        sim_access(from, n, false);
        sim_access(to, n, true);
    }
    return __builtin_memcpy(to, from, n);
}
__attribute__((always_inline)) static inline void *sim_memset(void *to, int byte, size_t n)
{
    sim_access(to, n, true);
    return __builtin_memset(to, byte, n);
}
#define memcpy(to, from, n) sim_memcpy(to, from, n)
#define memset(to, byte, n) sim_memset(to, byte, n)

// ---- arithmetic ----

template <typename A, typename B>
static inline constexpr typename std::common_type<A, B>::type min(A a, B b)
{
    typedef typename std::common_type<A, B>::type C;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <typename A, typename B>
static inline constexpr typename std::common_type<A, B>::type max(A a, B b)
{
    typedef typename std::common_type<A, B>::type C;
    return (C)a < (C)b ? (C)b : (C)a;
}
static inline float min(float a, float b)
{
    return fminf(a, b);
}
static inline float max(float a, float b)
{
    return fmaxf(a, b);
}

// Fast ones are as exact as the library's: tests compare within tolerances.
#define SIM_FLOAT1(name, value)                                                                    \
    static inline float name(float x)                                                              \
    {                                                                                              \
        return (value);                                                                            \
    }
#define SIM_FLOAT2(name, value)                                                                    \
    static inline float name(float x, float y)                                                     \
    {                                                                                              \
        return (value);                                                                            \
    }
SIM_FLOAT1(rsqrtf, 1.0f / sqrtf(x))
SIM_FLOAT1(__frsqrt_rn, (float)(1.0 / sqrt((double)x)))
SIM_FLOAT1(__frcp_rn, 1.0f / x)
SIM_FLOAT1(__fsqrt_rn, sqrtf(x))
SIM_FLOAT1(__saturatef, x >= 1 ? 1.0f : x > 0 ? x : 0.0f)
SIM_FLOAT2(__fadd_rn, x + y)
SIM_FLOAT2(__fsub_rn, x - y)
SIM_FLOAT2(__fmul_rn, x *y)
SIM_FLOAT2(__fdiv_rn, x / y)
SIM_FLOAT2(__fdividef, x / y)
SIM_FLOAT2(fdividef, x / y)
#undef SIM_FLOAT1
#undef SIM_FLOAT2
static inline float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}
static inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}
static inline double __dadd_rn(double x, double y)
{
    return x + y;
}
static inline double __dmul_rn(double x, double y)
{
    return x * y;
}
static inline double __fma_rn(double x, double y, double z)
{
    return fma(x, y, z);
}
// glibc's headers declare these names, and libm lacks them.
#define __expf   expf
#define __exp10f exp10f
#define __logf   logf
#define __log2f  log2f
#define __log10f log10f
#define __sinf   sinf
#define __cosf   cosf
#define __powf   powf
#define __tanf   tanf

template <typename To, typename From> static inline To sim_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
#define SIM_CONVERT(name, to, from, value)                                                         \
    static inline to name(from x)                                                                  \
    {                                                                                              \
        return (value);                                                                            \
    }
SIM_CONVERT(__float_as_int, int, float, sim_bits<int>(x))
SIM_CONVERT(__int_as_float, float, int, sim_bits<float>(x))
SIM_CONVERT(__float_as_uint, unsigned, float, sim_bits<unsigned>(x))
SIM_CONVERT(__uint_as_float, float, unsigned, sim_bits<float>(x))
SIM_CONVERT(__double_as_longlong, long long, double, sim_bits<long long>(x))
SIM_CONVERT(__longlong_as_double, double, long long, sim_bits<double>(x))
SIM_CONVERT(__float2int_rn, int, float, (int)rintf(x))
SIM_CONVERT(__float2int_rz, int, float, (int)x)
SIM_CONVERT(__float2int_rd, int, float, (int)floorf(x))
SIM_CONVERT(__float2int_ru, int, float, (int)ceilf(x))
SIM_CONVERT(__int2float_rn, float, int, (float)x)
SIM_CONVERT(__uint2float_rn, float, unsigned, (float)x)
SIM_CONVERT(__ull2float_rn, float, unsigned long long, (float)x)
SIM_CONVERT(__double2float_rn, float, double, (float)x)
SIM_CONVERT(__popc, int, unsigned, __builtin_popcount(x))
SIM_CONVERT(__popcll, int, unsigned long long, __builtin_popcountll(x))
SIM_CONVERT(__clz, int, int, x ? __builtin_clz((unsigned)x) : 32)
SIM_CONVERT(__ffs, int, int, __builtin_ffs(x))
#undef SIM_CONVERT
static inline unsigned __umulhi(unsigned x, unsigned y)
{
    return (unsigned)((uint64_t)x * y >> 32);
}
static inline void __trap()
{
    abort();
}

// ---- launches ----

template <size_t I, typename T> struct sim_argument {
    T value;
};
template <typename I, typename... P> struct sim_call;
template <size_t... I, typename... P>
struct sim_call<std::index_sequence<I...>, P...> : sim_argument<I, P>... {
    void (*kernel)(P...);

    // Its reads are of no kernel.
    __attribute__((no_sanitize("thread"))) static void run(void *p)
    {
        sim_call *c = (sim_call *)p;
        c->kernel(static_cast<sim_argument<I, P> *>(c)->value...);
    }
};

// Called with a kernel's arguments: they are converted as those of any function, and copied.
template <typename... P> struct sim_launcher {
    struct sim_kernel launch;
    cudaStream_t stream;
    void (*kernel)(P...);

    sim_launcher(const char *name, dim3 grid, dim3 block, size_t smem, cudaStream_t on,
                 void (*function)(P...))
        : launch(), stream(on), kernel(function)
    {
        launch.name = name;
        launch.grid = grid;
        launch.block = block;
        launch.smem = smem;
    }

    void operator()(P... arguments)
    {
        typedef sim_call<std::index_sequence_for<P...>, P...> call;
        static_assert(std::is_trivially_destructible<call>::value, "arguments are plain data");
        void *memory = malloc(sizeof(call));
        if (!memory) {
            abort();
        }
        launch.args = new (memory) call{{arguments}..., kernel};
        launch.call = call::run;
        launch.release = free;
        sim_launch(&launch, stream);
    }
};

#define LAUNCH(dev, kernel, grid, block, smem, ...)                                                \
    do {                                                                                           \
        sim_launcher(#kernel, grid, block, smem, cuda_stream(dev), kernel)(__VA_ARGS__);           \
        cuda_launched(dev, #kernel);                                                               \
    } while (0)
#define DYN_SMEM(type, name) type *name = reinterpret_cast<type *>(sim_dynamic_shared())

#endif
