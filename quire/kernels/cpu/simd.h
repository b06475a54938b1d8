/* One vector type for every CPU: as wide as the machine, with an explicit fused multiply-add.
 *
 * Everything is compiled with -ffp-contract=off, so a product is fused with a sum exactly where the source says
 * `fma_v`; two inlined copies of a function can then never round differently. Reductions use LANES logical lanes
 * whatever the vector width, so machines with a fused multiply-add agree with each other bit for bit. */
#ifndef QUIRE_SIMD_H
#define QUIRE_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX__)
#define VL 8
#elif defined(__aarch64__)
#include <arm_neon.h>
#define VL 4
#else
#define VL 4
#endif

#define LANES 16
#define SUB (LANES / VL) /* vectors per logical vector of LANES floats */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));

#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

INLINE vf load_v(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_v(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf set_v(float x) {
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (vf)_mm256_set1_ps(x);
#elif defined(__aarch64__)
    return (vf)vdupq_n_f32(x);
#else
    return (vf){x, x, x, x};
#endif
}

#if defined(__aarch64__)
#include "neon.h"
#endif

INLINE vi set_i(int32_t x) {
#if defined(__aarch64__)
    return (vi)vdupq_n_s32(x); /* gcc would insert lane after lane */
#else
    vi v;
    for (int i = 0; i < VL; i++) v[i] = x;
    return v;
#endif
}

#if defined(__x86_64__)
INLINE __m128i four_bytes(const void *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return _mm_cvtsi32_si128(x);
}
#endif

/* VL signed bytes, unsigned bytes or 16-bit numbers at p, each widened to 32 bits. */
INLINE vi load_i8(const void *p) {
#if defined(__aarch64__)
    int8x8_t bytes = vreinterpret_s8_u32(vld1_dup_u32(p));
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
#elif defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#elif defined(__SSE4_1__)
    return (vi)_mm_cvtepi8_epi32(four_bytes(p));
#endif
}

INLINE vi load_u8(const void *p) {
#if defined(__aarch64__)
    uint8x8_t bytes = vreinterpret_u8_u32(vld1_dup_u32(p));
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
#elif defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
#elif defined(__SSE4_1__)
    return (vi)_mm_cvtepu8_epi32(four_bytes(p));
#endif
}

INLINE vi load_u16(const void *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#elif defined(__SSE4_1__)
    return (vi)_mm_cvtepu16_epi32(_mm_loadl_epi64(p));
#elif defined(__aarch64__)
    return (vi)vmovl_u16(vld1_u16(p));
#endif
}

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

/* Four bits of each lane as a float, those from bit 4 * i on; i is known when it is compiled. */
INLINE vf nibble_to_float(vi x, int i) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps((__m512i)(x >> (4 * i)), numbers); /* looks at four bits only */
#else
    return to_float((x >> (4 * i)) & set_i(15));
#endif
}

/* VL signed bytes at p as floats. */
INLINE vf bytes_to_float(const void *p) {
#if defined(__aarch64__)
    return shifted_bytes_to_float(veorq_u8(vreinterpretq_u8_u32(vld1q_dup_u32(p)), vdupq_n_u8(128)), 0);
#else
    return to_float(load_i8(p));
#endif
}

/* VL numbers of half precision at p as floats. */
INLINE vf halves_to_float(const void *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    _Float16 halves[VL];
    vf x;
    memcpy(halves, p, sizeof halves);
    for (int i = 0; i < VL; i++) x[i] = (float)halves[i];
    return x;
#endif
}

INLINE vi load_i(const void *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* a * b + c, rounded once where the machine can (x86-64-v2 cannot and rounds twice, always). */
INLINE vf fma_v(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

#if !defined(__aarch64__) /* neon.h has them */
/* A factor of whole vectors, and x * v + sum. */
#define load_factor(p) set_v(*(p))
#define fma_factor fma_v
#endif

/* Lanes of a where mask is all ones, of b where it is zero. */
INLINE vf select_v(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vf max_v(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_v(a > b, a, b);
#endif
}

INLINE vf min_v(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select_v(a < b, a, b);
#endif
}

/* 0, 1, 2, ... */
INLINE vi iota_v(void) {
    vi v;
    for (int i = 0; i < VL; i++) v[i] = i;
    return v;
}

/* The first n (< VL) floats at p, zeros after. */
INLINE vf load_tail(const float *p, int64_t n) {
    vf v = set_v(0.0f);
    memcpy(&v, p, (size_t)n * sizeof(float));
    return v;
}

INLINE void store_tail(float *p, vf v, int64_t n) { memcpy(p, &v, (size_t)n * sizeof(float)); }

typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));

/* Sum of LANES lanes by a fixed tree: lane i with i + 8, then + 4, + 2, + 1. */
INLINE float sum_lanes(const vf *v) {
    f8 low, high;
    memcpy(&low, v, sizeof low);
    memcpy(&high, (const char *)v + sizeof low, sizeof high);
    low += high;
    f4 a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (const char *)&low + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
}

#if !defined(__aarch64__) /* which has instructions for these; gcc before 12 does not know the shuffle */
typedef int32_t i4 __attribute__((vector_size(16)));

INLINE i4 max_i4(i4 a, i4 b) {
#if defined(__SSE4_1__)
    return (i4)_mm_max_epi32((__m128i)a, (__m128i)b);
#else
    i4 above = a > b;
    return (above & a) | (~above & b);
#endif
}

/* The largest of LANES integers, halves by halves: of a chain or a loop over them gcc 12 makes one instruction a lane. */
INLINE int32_t largest_i(const vi *v) {
    i4 parts[LANES / 4];
    memcpy(parts, v, sizeof parts);
    i4 most = max_i4(max_i4(parts[0], parts[1]), max_i4(parts[2], parts[3]));
    most = max_i4(most, __builtin_shufflevector(most, most, 2, 3, 0, 1));
    return most[0] > most[1] ? most[0] : most[1];
}

INLINE int32_t sum_i(const vi *v) {
    i4 parts[LANES / 4];
    memcpy(parts, v, sizeof parts);
    i4 sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1);
    return sum[0] + sum[1];
}
#endif

INLINE float greater(float a, float b) { return a > b ? a : b; }

INLINE float max_lanes(vf v) {
    float x[VL];
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__aarch64__)
    return greater(greater(v[0], v[2]), greater(v[1], v[3])); /* gcc would keep v in memory, in loops before this too */
#endif
    memcpy(x, &v, sizeof x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = greater(x[i], x[i + half]);
    return x[0];
}

#endif
