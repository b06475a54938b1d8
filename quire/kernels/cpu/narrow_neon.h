/* NEON's way with narrow weights: some rows of x times a panel or two, whose weights become floats in registers.
 *
 * A shift, a conversion or a copy of a register costs as much as a fused multiply-add or more; a load costs
 * nothing beside them. So bytes and halves are put in their place by tbx and zip, what is overwritten is loaded
 * anew, and factors are taken from lanes of x, four steps of k being a vector of it. Every sum has the order of
 * any other tile. */
#ifndef QUIRE_NARROW_NEON_H
#define QUIRE_NARROW_NEON_H

#include "weight.h"

#define NARROW_MOST 8 /* rows */

/* acc of every row += x[row][lane] * w. */
INLINE void add_rows(int rows, const vf *x, int lane, vf w, vf *acc, int width) {
    UNROLL for (int r = 0; r < rows; r++) acc[r * width] = fma_lane(acc[r * width], w, x[r], lane);
}

INLINE void load_rows(int rows, const float *x, int64_t ldx, vf *to) {
    UNROLL for (int r = 0; r < rows; r++) to[r] = load_v(x + r * ldx);
}

/* Four steps of a panel of bfloat16. */
INLINE void four_bfloat16(int rows, const vf *x, const uint8_t *w, vf *acc, int width) {
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int j = 0; j < NV; j++) add_rows(rows, x, i, weight_bfloat16(w, i, j), acc + j, width);
}

/* Four steps of a panel of bytes with scales d. */
INLINE void four_scaled8(int rows, const vf *x, const uint8_t *w, const scales *s, vf *acc, int width) {
    UNROLL for (int half = 0; half < 2; half++) {
        uint8x16_t bytes = load_shifted_bytes(w + half * 16);
        UNROLL for (int i = 0; i < 4; i++)
            add_rows(rows, x, half * 2 + i / NV, weight_byte(bytes, i, s), acc + i % NV, width);
    }
}

/* Eight steps of a panel of nibbles; scales and offsets begin the group. */
INLINE void eight_scaled4(int rows, const float *x, int64_t ldx, const uint8_t *w, const uint8_t *group, vf *acc,
                          int width) {
    nibbles q[NV];
    vf xs[NARROW_MOST], d[NV];
    UNROLL for (int j = 0; j < NV; j++) q[j] = load_nibbles(w + j * 16), d[j] = load_v((const float *)group + j * VL);
    UNROLL for (int i = 0; i < 8; i++) {
        if (i % 4 == 0) load_rows(rows, x + i, ldx, xs);
        UNROLL for (int j = 0; j < NV; j++)
            add_rows(rows, xs, i % 4, weight_nibble(&q[j], i, d[j], group + (NR + j * VL) * 4), acc + j, width);
    }
}

#define EACH_PANEL UNROLL for (int p = 0; p < panels; p++)

INLINE void narrow_bfloat16(int rows, int panels, const float *x, int64_t ldx, int64_t steps, const uint8_t *w,
                            int64_t ldw, vf *acc) {
    vf xs[NARROW_MOST];
    int64_t k = 0;
    for (; k + 4 <= steps; k += 4, w += 4 * NR * 2) {
        load_rows(rows, x + k, ldx, xs);
        EACH_PANEL {
            fetch(w + p * ldw, 4 * NR * 2);
            four_bfloat16(rows, xs, w + p * ldw, acc + p * NV, panels * NV);
        }
    }
    for (; k < steps; k++, w += NR * 2) {
        UNROLL for (int r = 0; r < rows; r++) xs[r] = set_v(x[r * ldx + k]);
        EACH_PANEL UNROLL for (int j = 0; j < NV; j++)
            add_rows(rows, xs, 0, weight_bfloat16(w + p * ldw, 0, j), acc + p * NV + j, panels * NV);
    }
}

INLINE void narrow_scaled8(int rows, int panels, const float *x, int64_t ldx, const uint8_t *w, int64_t ldw, vf *acc) {
    scales s[2];
    vf xs[NARROW_MOST];
    EACH_PANEL s[p] = load_scales(w + p * ldw, SCALED8);
    for (int64_t i = 0; i < GROUP; i += 4) {
        load_rows(rows, x + i, ldx, xs);
        EACH_PANEL four_scaled8(rows, xs, w + p * ldw + NR * (4 + i), &s[p], acc + p * NV, panels * NV);
    }
}

/* acc += steps [k0, k1) of k. `w` is at step k0, and `ldw` bytes lie between panels. */
INLINE void narrow_steps(int rows, int panels, int32_t format, const float *x, int64_t ldx, int64_t k0, int64_t k1,
                         const uint8_t *w, int64_t ldw, vf *acc) {
    if (format == BFLOAT16) narrow_bfloat16(rows, panels, x + k0, ldx, k1 - k0, w, ldw, acc);
    else
        for (; k0 < k1; k0 += GROUP, w += group_bytes(format)) {
            EACH_PANEL fetch(w + p * ldw, group_bytes(format));
            if (format == SCALED8) narrow_scaled8(rows, panels, x + k0, ldx, w, ldw, acc);
            else
                for (int64_t i = 0; i < GROUP; i += 8)
                    EACH_PANEL eight_scaled4(rows, x + k0 + i, ldx, w + p * ldw + NR * (8 + i / 2), w + p * ldw,
                                             acc + p * NV, panels * NV);
        }
}

#endif
