/* Integer products with Arm's dot product instruction: 16 products of a code and an activation in one. */
#include "integer.h"

#if defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define HAS_DOTPROD (1ul << 20) /* HWCAP_ASIMDDP */
#define Q_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define Q_INLINE static inline __attribute__((always_inline, target("arch=armv8.2-a+dotprod")))
#define LANES_Q 4
typedef int32x4_t qi;
typedef float32x4_t qf;
typedef int8x16_t q_codes;
typedef qi q_four;

Q_INLINE qi q_load(const void *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
Q_INLINE qi q_low(qi x) { return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8(15))); }
Q_INLINE qi q_high(qi x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }
Q_INLINE q_codes q_prepare(qi raw, int wide) {
    uint8x16_t bytes = vreinterpretq_u8_s32(raw);
    return vreinterpretq_s8_u8(wide ? veorq_u8(bytes, vdupq_n_u8(0x80)) : bytes); /* wide codes less 128 */
}
Q_INLINE qi q_int(const int32_t *p) { return vld1q_dup_s32(p); }
Q_INLINE q_four q_x(const int8_t *p) { return vld1q_dup_s32((const int32_t *)(const void *)p); }
Q_INLINE qf q_float(const float *p) { return vld1q_dup_f32(p); }
Q_INLINE qf q_zero(void) { return vdupq_n_f32(0.0f); }
Q_INLINE qf q_fma(qf a, qf b, qf c) { return vfmaq_f32(c, a, b); }
Q_INLINE void q_store(float *p, qf x) { vst1q_f32(p, x); }
Q_INLINE qf q_scales(const uint8_t *p, int64_t bytes) {
    if (bytes == 2) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const void *)p)));
    return vld1q_f32((const void *)p);
}
Q_INLINE qi q_dot(qi acc, q_codes w, q_four x, int wide) {
    (void)wide;
    return vdotq_s32(acc, w, vreinterpretq_s8_s32(x));
}
Q_INLINE qf q_flush(qf d, qf dx, qi sum, qf acc) { return vfmaq_f32(acc, vmulq_f32(d, dx), vcvtq_f32_s32(sum)); }

#include "integer_tile.h"
#define DOT_GROUPS 1
#define DOT_TILE_ROWS 6
#include "code_dots_tile.h"

Q_TARGET static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    switch (rows * 4 + panels) {
        Q_MODES(1, 1) Q_MODES(2, 1) Q_MODES(3, 1)
    }
}

const int_kernel *quire_int_dotprod(void) {
    static const int_kernel kernel = {"dotprod", tile, 3, 1, 128, dots};
    return getauxval(AT_HWCAP) & HAS_DOTPROD ? &kernel : NULL;
}
#else
const int_kernel *quire_int_dotprod(void) { return NULL; }
#endif
