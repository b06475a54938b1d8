/* Integer products with AVX2, and with AVX-VNNI where compiler and processor have it (integer_avxvnni.c). */
#include "integer.h"

#if defined(__AVX2__)
#include <immintrin.h>

#define Q_TARGET
#define Q_INLINE static inline __attribute__((always_inline))
#define LANES_Q 8
typedef __m256i qi;
typedef __m256 qf;

/* One instruction multiplies unsigned bytes with signed ones and adds neighbours in 16 bits, where 255 * 127 * 2 does not
 * fit. So wide codes are taken less 128, and their sign goes to the other side: 128 * 127 * 2 fits. */
typedef struct {
    qi size, sign;
} q_codes;
typedef qi q_four;

Q_INLINE qi q_load(const void *p) { return _mm256_loadu_si256(p); }
Q_INLINE qi q_low(qi x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
Q_INLINE qi q_high(qi x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
Q_INLINE q_codes q_prepare(qi raw, int wide) {
    if (!wide) return (q_codes){raw, raw};
    qi less = _mm256_xor_si256(raw, _mm256_set1_epi8((char)0x80));
    return (q_codes){_mm256_abs_epi8(less), less};
}
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
    qi pairs = _mm256_maddubs_epi16(w.size, wide ? _mm256_sign_epi8(x, w.sign) : x);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
Q_INLINE qf q_flush(qf d, qf dx, qi sum, qf acc) {
    return _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(sum), acc);
}

#include "integer_tile.h"
#define DOT_GROUPS 1
#define DOT_TILE_ROWS 3
#include "code_dots_tile.h"

static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    switch (rows * 4 + panels) {
        Q_MODES(1, 1) Q_MODES(2, 1) Q_MODES(3, 1)
    }
}

const int_kernel *quire_int_avx2(void) {
    static const int_kernel kernel = {"avx2", tile, 3, 1, 128, dots};
    return &kernel;
}
#else
const int_kernel *quire_int_avx2(void) { return NULL; }
#endif
