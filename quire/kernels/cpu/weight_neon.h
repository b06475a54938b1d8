/* Weights of bytes and nibbles as floats, by NEON: the half of weight.h, which includes it, that is its own there. */
#ifndef QUIRE_WEIGHT_NEON_H
#define QUIRE_WEIGHT_NEON_H

/* Vector i of two steps of a panel of bytes. */
INLINE vf weight_byte(uint8x16_t bytes, int i, const scales *s) {
    return s->d[i % NV] * shifted_bytes_to_float(bytes, i);
}

/* Eight steps of VL columns: a word is a column, its bytes are two steps each, the even one in the low nibble. */
typedef struct {
    uint8x16_t low, high;
} nibbles;

INLINE nibbles load_nibbles(const uint8_t *words) {
    uint8x16_t both = vld1q_u8(words);
    return (nibbles){vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8(both, 4)};
}

/* Step i of the eight. The offset is loaded from `m` each time, since the sum takes its place. */
INLINE vf weight_nibble(const nibbles *q, int i, vf d, const uint8_t *m) {
    return fma_at(d, word_bytes_to_float(i % 2 ? q->high : q->low, i / 2), m);
}

INLINE void widen_scaled8(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k += GROUP, from += group_bytes(SCALED8)) {
        scales s = load_scales(from, SCALED8);
        fetch(from, group_bytes(SCALED8));
        for (int64_t i = 0; i < GROUP; i += 2, to += 2 * NR) {
            uint8x16_t bytes = load_shifted_bytes(from + NR * (4 + i));
            UNROLL for (int v = 0; v < 2 * NV; v++) store_v(to + v * VL, weight_byte(bytes, v, &s));
        }
    }
}

INLINE void widen_scaled4(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k += GROUP, from += group_bytes(SCALED4)) {
        scales s = load_scales(from, SCALED4);
        fetch(from, group_bytes(SCALED4));
        for (int64_t i = 0; i < GROUP; i += 8, to += 8 * NR)
            UNROLL for (int j = 0; j < NV; j++) {
                nibbles q = load_nibbles(from + NR * (8 + i / 2) + j * 16);
                UNROLL for (int step = 0; step < 8; step++)
                    store_v(to + step * NR + j * VL, weight_nibble(&q, step, s.d[j], from + (NR + j * VL) * 4));
            }
    }
}

#endif
