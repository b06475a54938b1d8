/* Integer products with AVX-VNNI: as AVX2, with one instruction for 32 products. */
#include "integer.h"

#if defined(__AVX2__) && !defined(__AVX512F__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include <cpuid.h>
#include <immintrin.h>

#define Q_TARGET __attribute__((target("avxvnni")))
#define Q_INLINE static inline __attribute__((always_inline, target("avxvnni")))
#define LANES_Q 8
typedef __m256i qi;
typedef __m256 qf;
typedef __m256i q_codes;
typedef qi q_four;

Q_INLINE qi q_load(const void *p) { return _mm256_loadu_si256(p); }
Q_INLINE qi q_low(qi x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
Q_INLINE qi q_high(qi x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
Q_INLINE q_codes q_prepare(qi raw, int wide) { (void)wide; return raw; }
Q_INLINE qi q_int(const int32_t *p) { return _mm256_set1_epi32(*p); }
Q_INLINE q_four q_x(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
Q_INLINE qf q_float(const float *p) { return _mm256_set1_ps(*p); }
Q_INLINE qf q_zero(void) { return _mm256_setzero_ps(); }
Q_INLINE qf q_fma(qf a, qf b, qf c) { return _mm256_fmadd_ps(a, b, c); }
Q_INLINE void q_store(float *p, qf x) { _mm256_storeu_ps(p, x); }
Q_INLINE qf q_scales(const uint8_t *p, int64_t bytes) {
    return bytes == 2 ? _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)) : _mm256_loadu_ps((const void *)p);
}
Q_INLINE qi q_dot(qi acc, q_codes w, q_four x, int wide) {
    (void)wide;
    return _mm256_dpbusd_avx_epi32(acc, w, x);
}
Q_INLINE qf q_flush(qf d, qf dx, qi sum, qf acc) {
    return _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(sum), acc);
}

#include "integer_tile.h"
#define DOT_GROUPS 2
#define DOT_TILE_ROWS 3
#include "code_dots_tile.h"

Q_TARGET static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    switch (rows * 4 + panels) {
        Q_MODES(1, 1) Q_MODES(2, 1) Q_MODES(3, 1)
    }
}

const int_kernel *quire_int_avxvnni(void) {
    static const int_kernel kernel = {"avx-vnni", tile, 3, 1, 0, dots};
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) ? &kernel : NULL;
}
#else
const int_kernel *quire_int_avxvnni(void) { return NULL; }
#endif
