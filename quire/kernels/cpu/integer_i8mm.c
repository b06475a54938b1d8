/* Integer products with Arm's matrix instruction: two columns by two rows by eight steps of k in one. */
#include "integer.h"

#if defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define HAS_I8MM (1ul << 13) /* HWCAP2_I8MM */
#define Q_TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define Q_INLINE static inline __attribute__((always_inline, target("arch=armv8.2-a+dotprod+i8mm")))
#define VECTORS (COLS / 4)

Q_INLINE float32x4_t scales_at(const uint8_t *p, int64_t bytes) {
    if (bytes == 2) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const void *)p)));
    return vld1q_f32((const void *)p);
}

/* Two quads of four columns as two registers of [2 columns][8 steps of k]. */
Q_INLINE void two_quads(const uint8_t *at, int mode, int8x16_t *low, int8x16_t *high) {
    uint8x16_t even = vld1q_u8(at), odd;
    if (mode == NIBBLES) odd = vshrq_n_u8(even, 4), even = vandq_u8(even, vdupq_n_u8(15));
    else odd = vld1q_u8(at + QUAD_BYTES);
    if (mode == WIDE) even = veorq_u8(even, vdupq_n_u8(0x80)), odd = veorq_u8(odd, vdupq_n_u8(0x80));
    *low = vreinterpretq_s8_u32(vzip1q_u32(vreinterpretq_u32_u8(even), vreinterpretq_u32_u8(odd)));
    *high = vreinterpretq_s8_u32(vzip2q_u32(vreinterpretq_u32_u8(even), vreinterpretq_u32_u8(odd)));
}

/* The integer sums of one step: acc[2 * v] is [row][columns 0, 1 of vector v], acc[2 * v + 1] columns 2 and 3. */
Q_INLINE void step_sums(const int_tile *t, int64_t s, int mode, int64_t step_bytes, int32x4_t *acc) {
    int32x4_t begin = vcombine_s32(vdup_n_s32(t->init[s]), vdup_n_s32(t->init[t->row_stride + s]));
    UNROLL for (int i = 0; i < 2 * VECTORS; i++) acc[i] = begin;
    const uint8_t *codes = t->codes + s * step_bytes;
    const int8_t *x = t->x + s * t->quads * 4;
    for (int64_t q = 0; q < t->quads; q += 2, x += 8, codes += mode == NIBBLES ? QUAD_BYTES : 2 * QUAD_BYTES) {
        int8x16_t rows = vcombine_s8(vld1_s8(x), vld1_s8(x + t->k));
        UNROLL for (int v = 0; v < VECTORS; v++) {
            int8x16_t low, high;
            two_quads(codes + v * 16, mode, &low, &high);
            acc[2 * v] = vmmlaq_s32(acc[2 * v], rows, low);
            acc[2 * v + 1] = vmmlaq_s32(acc[2 * v + 1], rows, high);
        }
    }
}

/* Two rows by one panel. */
Q_INLINE void pair_tile(const int_tile *t, const int mode, const int offsets) {
    float32x4_t sum[2 * VECTORS];
    UNROLL for (int i = 0; i < 2 * VECTORS; i++) sum[i] = vdupq_n_f32(0.0f);
    int64_t step_bytes = t->quads * QUAD_BYTES / (mode == NIBBLES ? 2 : 1);
    for (int64_t s = t->first; s < t->last; s++) {
        const uint8_t *scales = t->scales + s / t->steps_of_group * t->scale_row;
        int32x4_t acc[2 * VECTORS];
        step_sums(t, s, mode, step_bytes, acc);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float32x4_t d = scales_at(scales + v * 4 * t->scale_bytes, t->scale_bytes), m = d;
            if (offsets) m = scales_at(scales + (COLS + v * 4) * t->scale_bytes, t->scale_bytes);
            int64x2_t left = vreinterpretq_s64_s32(acc[2 * v]), right = vreinterpretq_s64_s32(acc[2 * v + 1]);
            int32x4_t found[2] = {vreinterpretq_s32_s64(vzip1q_s64(left, right)),
                                  vreinterpretq_s32_s64(vzip2q_s64(left, right))};
            UNROLL for (int r = 0; r < 2; r++) {
                float32x4_t *to = sum + r * VECTORS + v, dx = vld1q_dup_f32(t->dx + r * t->row_stride + s);
                *to = vfmaq_f32(*to, vmulq_f32(d, dx), vcvtq_f32_s32(found[r]));
                if (offsets) *to = vfmaq_f32(*to, m, vld1q_dup_f32(t->shift + r * t->row_stride + s));
            }
        }
    }
    UNROLL for (int i = 0; i < 2 * VECTORS; i++) vst1q_f32(t->sums + i * 4, sum[i]);
}

Q_TARGET static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    if (rows != 2) {
        quire_int_dotprod()->tile(t, rows, panels, mode, offsets);
        return;
    }
    switch (mode * 2 + offsets) {
        case NIBBLES * 2: pair_tile(t, NIBBLES, 0); break;
        case NIBBLES * 2 + 1: pair_tile(t, NIBBLES, 1); break;
        case BYTES * 2: pair_tile(t, BYTES, 0); break;
        case BYTES * 2 + 1: pair_tile(t, BYTES, 1); break;
        case WIDE * 2: pair_tile(t, WIDE, 0); break;
        case WIDE * 2 + 1: pair_tile(t, WIDE, 1); break;
    }
}

/* Queries are few: two rows at once would leave half of the matrix instruction idle. */
static void dots(const code_dots *d, int rows) { quire_int_dotprod()->dots(d, rows); }

const int_kernel *quire_int_i8mm(void) {
    static const int_kernel kernel = {"i8mm", tile, 2, 1, 128, dots};
    return getauxval(AT_HWCAP2) & HAS_I8MM && quire_int_dotprod() ? &kernel : NULL;
}
#else
const int_kernel *quire_int_i8mm(void) { return NULL; }
#endif
