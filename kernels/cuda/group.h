// group.h - groups of K elements as floats in registers, from and to memory of any type by 16-byte
// accesses. K is a multiple of packed<T>::size, and addresses are multiples of 16.
#ifndef KERNELS_CUDA_GROUP_H
#define KERNELS_CUDA_GROUP_H

#include "kernels/cuda/ops.h"

template <int K, typename T> __device__ static inline void load_group(float (&x)[K], const T *from)
{
#pragma unroll
    for (int j = 0; j < K; j += packed<T>::size) {
        packed<T> v = load16(from + j);
#pragma unroll
        for (int i = 0; i < packed<T>::size; i++) {
            x[j + i] = to_float(v.x[i]);
        }
    }
}

template <int K, typename T> __device__ static inline void store_group(T *to, const float (&x)[K])
{
#pragma unroll
    for (int j = 0; j < K; j += packed<T>::size) {
        packed<T> v;
#pragma unroll
        for (int i = 0; i < packed<T>::size; i++) {
            v.x[i] = from_float<T>(x[j + i]);
        }
        store16(to + j, v);
    }
}

// The same where only the first n elements exist: the others are read as 0, and not written.
template <int K, typename T>
__device__ static inline void load_group(float (&x)[K], const T *from, size_t n)
{
    if (n >= K) {
        load_group(x, from);
        return;
    }
#pragma unroll
    for (int i = 0; i < K; i++) {
        x[i] = (size_t)i < n ? to_float(from[i]) : 0.0f;
    }
}

template <int K, typename T>
__device__ static inline void store_group(T *to, const float (&x)[K], size_t n)
{
    if (n >= K) {
        store_group(to, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < K; i++) {
        if ((size_t)i < n) {
            to[i] = from_float<T>(x[i]);
        }
    }
}

#endif
