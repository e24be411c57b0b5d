// vec.h - vectors of the variant's native width, for the operations in this folder.
//
// Reductions go through these types and a fixed tree rather than through the compiler's own
// vectoriser, so that their order, and with it every bit, is settled by the source and the ISA and
// not by alignment or a cost model.
#ifndef KERNELS_CPU_OPS_VEC_H
#define KERNELS_CPU_OPS_VEC_H

#include "kernels/bf16.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#ifndef VEC_BYTES
#define VEC_BYTES 16
#endif
#define VL ((size_t)(VEC_BYTES / 4)) // floats in a vector

typedef float vf __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vi __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VEC_BYTES / 2)));

// floatX: the storage type of the table that is being compiled.
#ifdef USE_BF16
typedef uint16_t floatX;
#else
typedef float floatX;
#endif

static inline vf vset(float x)
{
    return x - (vf){0};
}

static inline vf vloadf(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void vstoref(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

// Stores 16 floats, where they are aligned past the caches. Stores of this kind are seen by other
// threads after stream_end.
static inline void stream_group(float *to, const float x[16])
{
#ifdef __SSE2__
    if ((uintptr_t)to % VEC_BYTES == 0) {
        for (size_t i = 0; i < 16; i += VL) {
#if VEC_BYTES == 64
            _mm512_stream_ps(to + i, _mm512_loadu_ps(x + i));
#elif VEC_BYTES == 32
            _mm256_stream_ps(to + i, _mm256_loadu_ps(x + i));
#else
            _mm_stream_ps(to + i, _mm_loadu_ps(x + i));
#endif
        }
        return;
    }
#endif
    memcpy(to, x, 16 * sizeof *to);
}

static inline void stream_end(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

#ifdef USE_BF16
static inline float load(const floatX *p)
{
    return bf16_load(*p);
}

static inline void store(floatX *p, float x)
{
    *p = bf16_round(x);
}

static inline vf vload(const floatX *p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

static inline void vstore(floatX *p, vf v)
{
    vu u = (vu)v;
    vu is_nan = (vu)((vi)(u & 0x7fffffffu) > 0x7f800000);
    vu even = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    vu r = (is_nan & (0x0040u | (u >> 16))) | (~is_nan & even);
    vh h = __builtin_convertvector(r, vh);
    memcpy(p, &h, sizeof h);
}
#else
static inline float load(const floatX *p)
{
    return *p;
}

static inline void store(floatX *p, float x)
{
    *p = x;
}

static inline vf vload(const floatX *p)
{
    return vloadf(p);
}

static inline void vstore(floatX *p, vf v)
{
    vstoref(p, v);
}
#endif

// The first n < VL elements; the rest of the vector is `fill`.
static inline vf vloadf_part(const float *p, size_t n, float fill)
{
    vf v = vset(fill);
    for (size_t i = 0; i < n; i++) {
        v[i] = p[i];
    }
    return v;
}

static inline vf vload_part(const floatX *p, size_t n, float fill)
{
    vf v = vset(fill);
    for (size_t i = 0; i < n; i++) {
        v[i] = load(p + i);
    }
    return v;
}

static inline void vstoref_part(float *p, vf v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        p[i] = v[i];
    }
}

static inline void vstore_part(floatX *p, vf v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        store(p + i, v[i]);
    }
}

// a*b + c in one rounding where the ISA has it (the base ISA of x86-64 has not).
static inline vf vfma(vf a, vf b, vf c)
{
#if VEC_BYTES == 64
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VEC_BYTES == 32
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The larger one; b where either is a NaN.
static inline vf vmax(vf a, vf b)
{
#if VEC_BYTES == 64
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VEC_BYTES == 32
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi gt = a > b;
    return (vf)(((vi)a & gt) | ((vi)b & ~gt));
#endif
}

static inline vf vmin(vf a, vf b)
{
#if VEC_BYTES == 64
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VEC_BYTES == 32
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    vi lt = a < b;
    return (vf)(((vi)a & lt) | ((vi)b & ~lt));
#endif
}

static inline float vsum(vf v)
{
    float a[VEC_BYTES / 4];
    memcpy(a, &v, sizeof a);
    for (size_t n = VL / 2; n > 0; n /= 2) {
        for (size_t i = 0; i < n; i++) {
            a[i] += a[i + n];
        }
    }
    return a[0];
}

static inline float vmax_all(vf v)
{
    float m = v[0];
    for (size_t i = 1; i < VL; i++) {
        m = v[i] > m ? v[i] : m;
    }
    return m;
}

// exp(x), relative error below 2e-7, for x up to 88; larger ones count as 88, a NaN stays a NaN.
// Below -46 (1e-20) it is 0: nothing beside the 1 that every use adds it to, but a
// gradient made of smaller numbers is subnormal, and with those a matrix product is up to 50 times
// slower.
// x = n*ln2 + r, |r| <= ln2/2; exp(r) by its Taylor series to r^7.
static inline vf vexp(vf x)
{
    vi tiny = x < vset(-46.0f);
    x = vmin(vset(88.0f), vmax(vset(-46.0f), x));
    const vf magic = vset(12582912.0f); // 1.5*2^23: adding it rounds to an integer
    vf shifted = vfma(x, vset(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = vfma(n, vset(-0.693359375f), x); // ln2 in two parts, the first one exact
    r = vfma(n, vset(2.12194440e-4f), r);
    vf p = vset(1.0f / 5040);
    p = vfma(p, r, vset(1.0f / 720));
    p = vfma(p, r, vset(1.0f / 120));
    p = vfma(p, r, vset(1.0f / 24));
    p = vfma(p, r, vset(1.0f / 6));
    p = vfma(p, r, vset(0.5f));
    p = vfma(p, r, vset(1.0f));
    p = vfma(p, r, vset(1.0f));
    // The integer sits in the low bits of `shifted`; 2^n is put together from its exponent field.
    vi exponent = ((vi)shifted - (vi)magic + 127) << 23;
    return (vf)((vi)(p * (vf)exponent) & ~tiny);
}

// GELU in its tanh form, 0.5x(1 + tanh(u)) with u = sqrt(2/pi)(x + 0.044715x^3), written as
// x*s with s = 1/(1 + exp(-2u)): the same function without a tanh. An s below 1e-20 is 0, as in
// vexp() (in fp32, 1 + tanh(u) is 0 long before); a NaN stays a NaN.
static inline vf vgelu_gate(vf x)
{
    const float c = 0.79788456f;
    vf u = x * vfma(x * x, vset(0.044715f * c), vset(c));
    vf s = vset(1.0f) / (vset(1.0f) + vexp(u * -2.0f));
    vi tiny = s < vset(1e-20f);
    return (vf)((vi)s & ~tiny);
}

static inline vf vgelu(vf x)
{
    return x * vgelu_gate(x);
}

// d GELU / dx = s + x s (1-s) 2u', u' = sqrt(2/pi)(1 + 3*0.044715x^2). s is vgelu_gate(x).
static inline vf vgelu_slope(vf x, vf s)
{
    const float c = 0.79788456f;
    vf du2 = vfma(x * x, vset(2 * 3 * 0.044715f * c), vset(2 * c));
    return vfma(x * s, (vset(1.0f) - s) * du2, s);
}

#endif
