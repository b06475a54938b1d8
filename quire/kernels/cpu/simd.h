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

INLINE vi set_i(int32_t x) {
    vi v;
    for (int i = 0; i < VL; i++) v[i] = x;
    return v;
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

#if defined(__aarch64__)
/* What follows is assembly, since gcc would copy registers and fill others with single lanes. Each such instruction costs
 * as much as arithmetic; a load does not, so what is overwritten is loaded anew. */

/* acc + w * x[lane] */
INLINE vf fma_lane(vf acc, vf w, vf x, int lane) {
    if (lane == 0) __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(acc) : "w"(w), "w"(x));
    else if (lane == 1) __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[1]" : "+w"(acc) : "w"(w), "w"(x));
    else if (lane == 2) __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[2]" : "+w"(acc) : "w"(w), "w"(x));
    else __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[3]" : "+w"(acc) : "w"(w), "w"(x));
    return acc;
}

/* a * b + the vector at p */
INLINE vf fma_at(vf a, vf b, const void *p) {
    vf sum;
    __asm__("ldr %q0, %3\n\tfmla %0.4s, %1.4s, %2.4s"
                         : "=&w"(sum) : "w"(a), "w"(b), "m"(*(const char(*)[16])p));
    return sum;
}

/* Four of 16 bytes as floats: the i-th four, or of each word the i-th byte. A byte becomes the last bits of 2^23 + byte,
 * from which `less` is subtracted; that is exact, and a conversion takes as long as four such instructions. */
INLINE vf place_bytes(uint8x16_t bytes, uint8x16_t place, float less) {
    static const int32_t two_to_23[4] = {0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000};
    vf x;
    __asm__ __volatile__("ldr %q0, %1\n\ttbx %0.16b, {%2.16b}, %3.16b\n\tfsub %0.4s, %0.4s, %4.4s"
                         : "=&w"(x) : "m"(two_to_23), "w"(bytes), "w"(place), "w"(set_v(less)));
    return x;
}

INLINE vf neighbours_to_float(uint8x16_t bytes, int i, float less) {
    const uint8x16_t places[4] = {{0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255},
                                  {4, 255, 255, 255, 5, 255, 255, 255, 6, 255, 255, 255, 7, 255, 255, 255},
                                  {8, 255, 255, 255, 9, 255, 255, 255, 10, 255, 255, 255, 11, 255, 255, 255},
                                  {12, 255, 255, 255, 13, 255, 255, 255, 14, 255, 255, 255, 15, 255, 255, 255}};
    return place_bytes(bytes, places[i], less);
}

INLINE vf byte_of_words_to_float(uint8x16_t words, int i, float less) {
    const uint8x16_t places[4] = {{0, 255, 255, 255, 4, 255, 255, 255, 8, 255, 255, 255, 12, 255, 255, 255},
                                  {1, 255, 255, 255, 5, 255, 255, 255, 9, 255, 255, 255, 13, 255, 255, 255},
                                  {2, 255, 255, 255, 6, 255, 255, 255, 10, 255, 255, 255, 14, 255, 255, 255},
                                  {3, 255, 255, 255, 7, 255, 255, 255, 11, 255, 255, 255, 15, 255, 255, 255}};
    return place_bytes(words, places[i], less);
}

/* 16 signed bytes at p with 128 added, and four of them as floats. */
INLINE uint8x16_t load_shifted_bytes(const void *p) { return veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)); }
INLINE vf shifted_bytes_to_float(uint8x16_t bytes, int i) { return neighbours_to_float(bytes, i, 8388736.0f); }
#endif

/* VL signed bytes at p as floats. */
INLINE vf bytes_to_float(const void *p) {
#if defined(__aarch64__)
    return shifted_bytes_to_float(veorq_u8(vreinterpretq_u8_u32(vld1q_dup_u32(p)), vdupq_n_u8(0x80)), 0);
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

/* A factor of whole vectors, and x * v + sum. NEON multiplies by a lane: to fill the others takes as long as to multiply.
 * In assembly the factor is loaded when it is its turn; gcc would load all of them first and store sums to make room. */
#if defined(__aarch64__)
INLINE vf load_factor(const float *p) {
    vf x;
    __asm__ __volatile__("ldr %s0, %1" : "=w"(x) : "m"(*p));
    return x;
}

INLINE vf fma_factor(vf x, vf v, vf sum) { return fma_lane(sum, v, x, 0); }
#else
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

INLINE float greater(float a, float b) { return a > b ? a : b; }

INLINE float max_lanes(vf v) {
    float x[VL];
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    memcpy(x, &v, sizeof x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = greater(x[i], x[i + half]);
    return x[0];
}

#endif
