// ptx.h - the PTX instructions that kernels here use, one function each (PTX ISA 8.x, chapters
// "Warp Level Matrix Instructions" and "Asynchronous copy"). All 32 lanes of a warp call those of
// matrices together. In fragments g = lane / 4 and t = lane % 4.
//
// Where there is no nvcc the same is computed on the CPU, for tests: test/cuda/ptx.h.
#ifndef KERNELS_CUDA_PTX_H
#define KERNELS_CUDA_PTX_H

#include <cuda_runtime.h>
#include <stdint.h>

#ifdef __CUDACC__
__device__ static inline uint32_t ptx_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
#else
#include "test/cuda/ptx.h"
#endif

// Loads four 8x8 matrices of 16-bit values from shared memory. Lane l names row l%8 of matrix l/8:
// 16 bytes, aligned. r[i] becomes row g, columns 2t and 2t+1 (upper half) of matrix i.
__device__ static inline void ptx_ldmatrix(uint32_t r[4], const void *row)
{
#ifdef __CUDACC__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared(row))
                 : "memory");
#else
    struct sim_ldmatrix mine;
    *(int4 *)mine.row = *(const int4 *)row;
    sim_warp(sim_ldmatrix, &mine);
    memcpy(r, mine.r, sizeof mine.r);
#endif
}

// The same of the transposed matrices: r[i] becomes rows 2t and 2t+1, column g.
__device__ static inline void ptx_ldmatrix_trans(uint32_t r[4], const void *row)
{
#ifdef __CUDACC__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared(row))
                 : "memory");
#else
    struct sim_ldmatrix mine;
    *(int4 *)mine.row = *(const int4 *)row;
    sim_warp(sim_ldmatrix_trans, &mine);
    memcpy(r, mine.r, sizeof mine.r);
#endif
}

// d(16,8) += a(16,16) b(16,8), bf16 with fp32 accumulation. Two values a register, the one of the
// lower column (a) or row (b) in the lower half:
//   a[0] row g, columns 2t 2t+1    a[1] row g+8    a[2] row g, columns 2t+8 2t+9    a[3] row g+8
//   b[0] rows 2t 2t+1, column g    b[1] rows 2t+8 2t+9
//   d[0] d[1] row g, columns 2t 2t+1    d[2] d[3] row g+8
__device__ static inline void ptx_mma(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#ifdef __CUDACC__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    struct sim_mma mine = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    sim_warp(sim_mma, &mine);
    memcpy(d, mine.d, sizeof mine.d);
#endif
}

// Starts copying 16 bytes, both addresses aligned, past the registers; zeros if not valid.
__device__ static inline void ptx_cp_async(void *shared, const void *global, bool valid)
{
#ifdef __CUDACC__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx_shared(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
#else
    sim_cp_async(shared, global, 16, valid ? 16 : 0);
#endif
}

// Waits for all that the calling thread has started; others see it after a barrier.
__device__ static inline void ptx_cp_async_wait(void)
{
#ifdef __CUDACC__
    asm volatile("cp.async.wait_all;" ::: "memory");
#else
    sim_cp_async_commit();
    sim_cp_async_wait(0);
#endif
}

// 2^x within 2 ulp; 0 where it would be subnormal.
__device__ static inline float ptx_exp2(float x)
{
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -126 ? 0 : exp2f(x);
#endif
}

#endif
