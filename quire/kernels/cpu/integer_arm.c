/* Integer products with Arm's dot product instruction: 16 products of a code and an activation in one.
 *
 * A shift or a copy of a register costs as much as such an instruction, a conversion four times that; a load
 * costs nothing beside them. So activations are taken from lanes: four quads of a row are one register. And a sum
 * begins, by a load, with the bits of the float 1.5 * 2^23: one subtraction, which is exact, makes it a float in
 * the end. */
#include "integer.h"

#if defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>

#define HAS_DOTPROD (1ul << 20) /* HWCAP_ASIMDDP */
#define Q_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define Q_INLINE static inline __attribute__((always_inline, target("arch=armv8.2-a+dotprod")))
#define VECTORS (COLS / 4)
#define MOST_ROWS 3      /* of a tile: a row's sums are four registers of integers and four of floats */
#define AHEAD 2048       /* bytes */
#define START 0x4b400000 /* the bits of 1.5 * 2^23; sums stay far below 2^22 */

Q_INLINE int32x4_t dot_lane(int32x4_t sum, int8x16_t codes, int8x16_t x, int lane) {
    switch (lane) {
        case 0: return vdotq_laneq_s32(sum, codes, x, 0);
        case 1: return vdotq_laneq_s32(sum, codes, x, 1);
        case 2: return vdotq_laneq_s32(sum, codes, x, 2);
        default: return vdotq_laneq_s32(sum, codes, x, 3);
    }
}

/* gcc would copy a register instead. */
Q_INLINE int32x4_t begin_sum(void) {
    static const int32_t start[4] = {START, START, START, START};
    int32x4_t sum;
    __asm__ __volatile__("ldr %q0, %1" : "=w"(sum) : "m"(start));
    return sum;
}

/* Tells the compiler to begin with `codes` when `sum` has its last ones: what only one unit can do, such as a shift, is
 * then spread among the products. It costs no instruction. */
#define IN_TURN(codes, sum) __asm__ __volatile__("" : "+w"(codes) : "w"(sum))

Q_INLINE int8x16_t byte_codes(const uint8_t *codes, int mode, const int32x4_t *before) {
    uint8x16_t bytes = vld1q_u8(codes);
    if (mode == BYTES) return vreinterpretq_s8_u8(bytes);
    IN_TURN(bytes, *before);
    return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(0x80))); /* wide codes less 128 */
}

/* Two quads of the four columns at `codes`. */
Q_INLINE void two_quads(const uint8_t *codes, int mode, const int32x4_t *before, int8x16_t *even, int8x16_t *odd) {
    if (mode == NIBBLES) {
        uint8x16_t both = vld1q_u8(codes);
        IN_TURN(both, *before);
        *even = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        *odd = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    } else {
        *even = byte_codes(codes, mode, before);
        *odd = byte_codes(codes + QUAD_BYTES, mode, before);
    }
}

/* The sums of four columns, of every row, += a quad of codes times quad `lane` of the row. */
Q_INLINE void add_rows(int rows, int8x16_t quad, const int8x16_t *xs, int lane, int32x4_t *acc) {
    UNROLL for (int r = 0; r < rows; r++) acc[r * VECTORS] = dot_lane(acc[r * VECTORS], quad, xs[r], lane);
}

Q_INLINE void add_four_quads(const int_tile *t, const int8_t *x, const uint8_t *codes, int rows, int mode,
                             int32x4_t *acc) {
    const int pair_bytes = QUAD_BYTES * (mode == NIBBLES ? 1 : 2);
    int8x16_t xs[MOST_ROWS], even, odd;
    UNROLL for (int r = 0; r < rows; r++) xs[r] = vld1q_s8(x + r * t->k);
    if (mode != BYTES) /* which come from a cache */
        for (int line = 0; line < 2 * pair_bytes; line += 64) __builtin_prefetch(codes + line + AHEAD);
    UNROLL for (int i = 0; i < 2 * VECTORS; i++) {
        const int v = i / 2, pair = i % 2, last = i == 0 ? VECTORS - 1 : (i - 1) / 2;
        two_quads(codes + v * 16 + pair * pair_bytes, mode, acc + last, &even, &odd);
        add_rows(rows, even, xs, 2 * pair, acc + v);
        add_rows(rows, odd, xs, 2 * pair + 1, acc + v);
    }
}

Q_INLINE float32x4_t four_scales(const uint8_t *p, int64_t bytes) {
    if (bytes == 2) return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const void *)p)));
    return vld1q_f32((const void *)p);
}

/* The scales of a group, and offsets behind them, as floats: where they lie, if they can be read there, or in `to`. For
 * one row they are always there, since the compiler then keeps them in registers. */
Q_INLINE const float *group_scales(const int_tile *t, int64_t group, int rows, int offsets, float *to) {
    const uint8_t *from = t->scales + group * t->scale_row;
    if (rows > 1 && t->scale_bytes == 4) return (const float *)(const void *)from;
    UNROLL for (int i = 0; i < COLS * (1 + offsets); i += 4)
        vst1q_f32(to + i, four_scales(from + i * t->scale_bytes, t->scale_bytes));
    return to;
}

/* The floats of one row of so many += its integers of a step. */
Q_INLINE void flush_row(const int_tile *t, int64_t at, const float *scales, int rows, int offsets, const int32x4_t *acc,
                        float32x4_t *sum) {
    float32x4_t start = vreinterpretq_f32_s32(vsubq_s32(vdupq_n_s32(START), vld1q_dup_s32(t->init + at)));
    /* With more rows registers are full of sums, and gcc would store those to keep the scales. */
    if (rows > 1) __asm__ __volatile__("" : "+r"(scales));
    UNROLL for (int v = 0; v < VECTORS; v++) {
        float32x4_t found = vsubq_f32(vreinterpretq_f32_s32(acc[v]), start);
        sum[v] = vfmaq_f32(sum[v], vmulq_n_f32(vld1q_f32(scales + v * 4), t->dx[at]), found);
        if (offsets) sum[v] = vfmaq_n_f32(sum[v], vld1q_f32(scales + COLS + v * 4), t->shift[at]);
    }
}

Q_INLINE void tile_of(const int_tile *t, const int rows, const int mode, const int offsets) {
    float32x4_t sum[MOST_ROWS * VECTORS];
    UNROLL for (int i = 0; i < rows * VECTORS; i++) sum[i] = vdupq_n_f32(0.0f);
    int64_t s = t->first, group = s / t->steps_of_group, four = QUAD_BYTES * (mode == NIBBLES ? 2 : 4);
    const uint8_t *codes = t->codes + s * (t->quads / 4) * four;
    for (int64_t stop = (group + 1) * t->steps_of_group; s < t->last; stop += t->steps_of_group, group++) {
        float floats[2 * COLS];
        const float *scales = group_scales(t, group, rows, offsets, floats);
        for (stop = stop < t->last ? stop : t->last; s < stop; s++) {
            int32x4_t acc[MOST_ROWS * VECTORS];
            UNROLL for (int i = 0; i < rows * VECTORS; i++) acc[i] = begin_sum();
            for (int64_t quad = 0; quad < t->quads; quad += 4, codes += four)
                add_four_quads(t, t->x + (s * t->quads + quad) * 4, codes, rows, mode, acc);
            UNROLL for (int r = 0; r < rows; r++)
                flush_row(t, r * t->row_stride + s, scales, rows, offsets, acc + r * VECTORS, sum + r * VECTORS);
        }
    }
    UNROLL for (int i = 0; i < rows * VECTORS; i++) vst1q_f32(t->sums + i * 4, sum[i]);
}

#define EACH_MODE(rows)                                                                                             \
    switch (mode * 2 + offsets) {                                                                                   \
        case NIBBLES * 2: tile_of(t, rows, NIBBLES, 0); break;                                                      \
        case NIBBLES * 2 + 1: tile_of(t, rows, NIBBLES, 1); break;                                                  \
        case BYTES * 2: tile_of(t, rows, BYTES, 0); break;                                                          \
        case BYTES * 2 + 1: tile_of(t, rows, BYTES, 1); break;                                                      \
        case WIDE * 2: tile_of(t, rows, WIDE, 0); break;                                                            \
        case WIDE * 2 + 1: tile_of(t, rows, WIDE, 1); break;                                                        \
    }

Q_TARGET static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    (void)panels; /* one */
    if (rows == 1) EACH_MODE(1)
    else if (rows == 2) EACH_MODE(2)
    else EACH_MODE(3)
}

/* ---- queries and keys */

/* Four codes of a query in the first lane: gcc would fill the others too. */
Q_INLINE int8x16_t query_quad(const int8_t *q) {
    int8x16_t x;
    __asm__("ldr %s0, %1" : "=w"(x) : "m"(*(const char(*)[4])q));
    return x;
}

Q_INLINE void dots_tile(const code_dots *d, int64_t group, const int rows) {
    int32x4_t acc[DOT_ROWS * VECTORS];
    UNROLL for (int i = 0; i < rows * VECTORS; i++) acc[i] = vld1q_dup_s32(d->init + i / VECTORS);
    const uint8_t *keys = d->keys[group], *next = d->next[group];
    const int8_t *q = d->q;
    for (int64_t quad = 0; quad < d->quads; quad++, keys += d->step, next += d->step, q += 4) {
        int8x16_t codes[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) codes[v] = byte_codes(keys + v * 16, WIDE, acc + v);
        if (d->ahead) __builtin_prefetch(next, 0, 2);
        UNROLL for (int r = 0; r < rows; r++) {
            int8x16_t x = query_quad(q + r * d->q_stride);
            int32x4_t *to = acc + r * VECTORS;
            UNROLL for (int v = 0; v < VECTORS; v++) to[v] = dot_lane(to[v], codes[v], x, 0);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++)
        vst1q_s32(d->dots + r * d->dots_stride + group * DOT_KEYS + v * 4, acc[r * VECTORS + v]);
}

Q_TARGET static void dots(const code_dots *d, int rows) {
    for (int64_t group = 0; group < d->groups; group++)
        switch (rows) {
            case 1: dots_tile(d, group, 1); break;
            case 2: dots_tile(d, group, 2); break;
            case 3: dots_tile(d, group, 3); break;
            case 4: dots_tile(d, group, 4); break;
            case 5: dots_tile(d, group, 5); break;
            case 6: dots_tile(d, group, 6); break;
        }
}

const int_kernel *quire_int_dotprod(void) {
    static const int_kernel kernel = {"dotprod", tile, MOST_ROWS, 1, 128, dots};
    return getauxval(AT_HWCAP) & HAS_DOTPROD ? &kernel : NULL;
}
#else
const int_kernel *quire_int_dotprod(void) { return NULL; }
#endif
