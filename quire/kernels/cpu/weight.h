/* How a packed weight lies in memory, and how a piece of it becomes floats.
 *
 * A weight [N, K] is cut into panels of NR columns of the product, each panel [K][NR], so that a product reads it front
 * to back. A narrow format holds the same floats in fewer bytes: it is only chosen when every float comes back bit
 * for bit, so it changes the time of a product and never its result. */
#ifndef QUIRE_WEIGHT_H
#define QUIRE_WEIGHT_H

#include "simd.h"

#define NV 2
#define NR (NV * VL) /* columns of a panel */
#define GROUP 32     /* steps of k that share a scale */

enum {
    FLOAT32 = 0,
    BFLOAT16 = 1, /* the upper half of each float, the lower being zero */
    SCALED8 = 2,  /* groups of d[NR] floats, q[GROUP][NR] signed bytes: w = d * q (Q8_0, Q5_0, Q4_0) */
    SCALED4 = 3,  /* groups of d[NR], m[NR] floats, q[GROUP / 8][NR] words, each holding 8 steps of k from its lowest
                     bits up: w = d * q + m (Q4_1) */
    INTEGER = 4,  /* integer codes that are multiplied as integers, see integer.h */
};

INLINE int64_t group_bytes(int32_t format) { return format == SCALED8 ? NR * (4 + GROUP) : NR * (8 + GROUP / 2); }

/* Bytes of steps [0, k) of one panel; k is a multiple of GROUP for the scaled formats. */
INLINE int64_t panel_bytes(int32_t format, int64_t k) {
    if (format == FLOAT32) return k * NR * 4;
    if (format == BFLOAT16) return k * NR * 2;
    return k / GROUP * group_bytes(format);
}

#define FETCH_AHEAD 2048 /* bytes */

INLINE void fetch(const uint8_t *from, int64_t bytes) {
    UNROLL for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + FETCH_AHEAD + i);
}

/* The scale (and offset) of one group's columns. */
typedef struct {
    vf d[NV], m[NV];
} scales;

INLINE scales load_scales(const uint8_t *group, int32_t format) {
    scales s;
    UNROLL for (int j = 0; j < NV; j++) {
        s.d[j] = load_v((const float *)group + j * VL);
        if (format == SCALED4) s.m[j] = load_v((const float *)group + NR + j * VL);
    }
    return s;
}

INLINE vf weight_bfloat16(const uint8_t *panel, int64_t k, int j) {
#if defined(__aarch64__)
    uint16x8_t halves = vld1q_u16((const void *)(panel + k * NR * 2)), none = vdupq_n_u16(0);
    return (vf)(j == 0 ? vzip1q_u16(none, halves) : vzip2q_u16(none, halves)); /* only one unit shifts, two zip */
#else
    return (vf)(load_u16(panel + (k * NR + j * VL) * 2) << 16);
#endif
}

INLINE void widen_bfloat16(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k++) {
        fetch(from + k * NR * 2, NR * 2);
        UNROLL for (int j = 0; j < NV; j++) store_v(to + k * NR + j * VL, weight_bfloat16(from, k, j));
    }
}

#if defined(__aarch64__)
#include "weight_neon.h"
#else
INLINE vf weight_scaled8(const uint8_t *group, const scales *s, int64_t i, int j) {
    return s->d[j] * bytes_to_float(group + NR * (4 + i) + j * VL);
}

INLINE vi words_scaled4(const uint8_t *group, int64_t word, int j) {
    return load_i(group + NR * 4 * (2 + word) + j * VL * 4);
}

INLINE vf weight_scaled4(vi words, const scales *s, int i, int j) {
    return fma_v(s->d[j], nibble_to_float(words, i), s->m[j]);
}

INLINE void widen_scaled8(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k += GROUP, from += group_bytes(SCALED8)) {
        scales s = load_scales(from, SCALED8);
        fetch(from, group_bytes(SCALED8));
        for (int64_t i = 0; i < GROUP; i++, to += NR)
            UNROLL for (int j = 0; j < NV; j++) store_v(to + j * VL, weight_scaled8(from, &s, i, j));
    }
}

INLINE void widen_scaled4(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k += GROUP, from += group_bytes(SCALED4)) {
        scales s = load_scales(from, SCALED4);
        fetch(from, group_bytes(SCALED4));
        for (int64_t word = 0; word < GROUP / 8; word++, to += 8 * NR)
            UNROLL for (int j = 0; j < NV; j++) {
                vi q = words_scaled4(from, word, j);
                UNROLL for (int i = 0; i < 8; i++) store_v(to + i * NR + j * VL, weight_scaled4(q, &s, i, j));
            }
    }
}
#endif

#endif
