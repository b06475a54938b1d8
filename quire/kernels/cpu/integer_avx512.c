/* Integer products with AVX-512 VNNI: 64 products of a code and an activation in one instruction. */
#include "integer.h"

#if defined(__AVX512F__)
#include <immintrin.h>

#define Q_TARGET __attribute__((target("avx512vnni")))
#define Q_INLINE static inline __attribute__((always_inline, target("avx512vnni")))
#define LANES_Q 16
typedef __m512i qi;
typedef __m512 qf;
typedef __m512i q_codes;
typedef const int32_t __attribute__((may_alias)) *q_four;

Q_INLINE qi q_load(const void *p) { return _mm512_loadu_si512(p); }
Q_INLINE qi q_low(qi x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
Q_INLINE qi q_high(qi x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
Q_INLINE q_codes q_prepare(qi raw, int wide) { (void)wide; return raw; }
Q_INLINE qi q_int(const int32_t *p) { return _mm512_set1_epi32(*p); }
Q_INLINE q_four q_x(const int8_t *p) { return (q_four)(const void *)p; }
Q_INLINE qf q_float(const float *p) { return _mm512_set1_ps(*p); }
Q_INLINE qf q_zero(void) { return _mm512_setzero_ps(); }
Q_INLINE qf q_fma(qf a, qf b, qf c) { return _mm512_fmadd_ps(a, b, c); }
Q_INLINE void q_store(float *p, qf x) { _mm512_storeu_ps(p, x); }
Q_INLINE qf q_scales(const uint8_t *p, int64_t bytes) {
    return bytes == 2 ? _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)) : _mm512_loadu_ps((const void *)p);
}
/* Not the intrinsic: gcc 12 copies accumulators from register to register around it, and reads the four bytes by an
 * instruction of their own. */
Q_INLINE qi q_dot(qi acc, q_codes w, q_four x, int wide) {
    (void)wide;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
}
Q_INLINE qf q_flush(qf d, qf dx, qi sum, qf acc) {
    return _mm512_fmadd_ps(_mm512_mul_ps(d, dx), _mm512_cvtepi32_ps(sum), acc);
}

#include "integer_tile.h"
#define DOT_GROUPS 4
#define DOT_TILE_ROWS 6
#include "code_dots_tile.h"

Q_TARGET static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    switch (rows * 4 + panels) {
        Q_MODES(1, 1) Q_MODES(2, 1) Q_MODES(3, 1) Q_MODES(4, 1) Q_MODES(5, 1) Q_MODES(6, 1)
        Q_MODES(1, 2) Q_MODES(2, 2) Q_MODES(3, 2) Q_MODES(4, 2) Q_MODES(5, 2) Q_MODES(6, 2)
    }
}

const int_kernel *quire_int_avx512vnni(void) {
    static const int_kernel kernel = {"avx512-vnni", tile, 6, 2, 0, dots};
    return __builtin_cpu_supports("avx512vnni") ? &kernel : NULL;
}
#else
const int_kernel *quire_int_avx512vnni(void) { return NULL; }
#endif
