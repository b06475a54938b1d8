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
    SCALED4 = 3,  /* groups of d[NR], m[NR] floats, q[GROUP / 2][NR] bytes: w = d * q + m, steps i and i + 16 of k in
                     the lower and the upper half of a byte (Q4_1) */
};

INLINE int64_t group_bytes(int32_t format) { return format == SCALED8 ? NR * (4 + GROUP) : NR * (8 + GROUP / 2); }

/* Bytes of steps [0, k) of one panel; k is a multiple of GROUP for the scaled formats. */
INLINE int64_t panel_bytes(int32_t format, int64_t k) {
    if (format == FLOAT32) return k * NR * 4;
    if (format == BFLOAT16) return k * NR * 2;
    return k / GROUP * group_bytes(format);
}

#define FETCH_AHEAD 2048 /* bytes */

INLINE void widen_bfloat16(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t i = 0; i < depth * NR; i += VL) {
        if (i * 2 % 64 == 0) __builtin_prefetch(from + i * 2 + FETCH_AHEAD);
        store_v(to + i, (vf)(load_u16(from + i * 2) << 16));
    }
}

INLINE void widen_scaled8(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k += GROUP, from += group_bytes(SCALED8)) {
        vf d[NV];
        for (int j = 0; j < NV; j++) d[j] = load_v((const float *)from + j * VL);
        for (int64_t i = 0; i < GROUP; i++, to += NR) {
            __builtin_prefetch(from + NR * (4 + i) + FETCH_AHEAD);
            UNROLL for (int j = 0; j < NV; j++)
                store_v(to + j * VL, d[j] * to_float(load_i8(from + NR * (4 + i) + j * VL)));
        }
    }
}

INLINE void widen_scaled4(const uint8_t *from, int64_t depth, float *to) {
    for (int64_t k = 0; k < depth; k += GROUP, from += group_bytes(SCALED4), to += GROUP * NR) {
        vf d[NV], m[NV];
        for (int j = 0; j < NV; j++) {
            d[j] = load_v((const float *)from + j * VL);
            m[j] = load_v((const float *)from + NR + j * VL);
        }
        for (int64_t i = 0; i < GROUP / 2; i++) {
            __builtin_prefetch(from + NR * (8 + i) + FETCH_AHEAD);
            UNROLL for (int j = 0; j < NV; j++) {
                vi both = load_u8(from + NR * (8 + i) + j * VL);
                store_v(to + i * NR + j * VL, fma_v(d[j], to_float(both & set_i(15)), m[j]));
                store_v(to + (i + GROUP / 2) * NR + j * VL, fma_v(d[j], to_float(both >> 4), m[j]));
            }
        }
    }
}

#endif
