/* The register tile of NEON for more than a handful of rows: 8 rows by one panel of 8 columns.
 *
 * Rows are packed as [k][8], so that a step of k is two loads of x, two of the weight and 16 fused multiply-adds that take
 * their factor from a lane of x. With 16 sums nothing spills. The order of every sum is that of any other tile. */
#ifndef QUIRE_LANE_TILE_H
#define QUIRE_LANE_TILE_H

#include "weight.h"

#define LANE_ROWS 8
#define LANE_DEPTH 576     /* steps of one panel that are kept in the first-level cache: 18 KB */
#define LANE_ROW_BLOCK 256 /* rows of a task */

/* Rows [0, rows) of x [rows, k], at most 8, as [k][8]; missing rows are zero. */
static void pack_lanes(const float *x, int64_t rows, int64_t k, float *to) {
    int64_t i = 0;
    if (rows == LANE_ROWS)
        for (; i + 4 <= k; i += 4)
            for (int half = 0; half < 2; half++) {
                const float *from = x + half * 4 * k + i;
                float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + k), c = vld1q_f32(from + 2 * k), d = vld1q_f32(from + 3 * k);
                float32x4_t ac = vzip1q_f32(a, c), bd = vzip1q_f32(b, d), ac2 = vzip2q_f32(a, c), bd2 = vzip2q_f32(b, d);
                float *at = to + i * LANE_ROWS + half * 4;
                vst1q_f32(at, vzip1q_f32(ac, bd));
                vst1q_f32(at + LANE_ROWS, vzip2q_f32(ac, bd));
                vst1q_f32(at + 2 * LANE_ROWS, vzip1q_f32(ac2, bd2));
                vst1q_f32(at + 3 * LANE_ROWS, vzip2q_f32(ac2, bd2));
            }
    for (; i < k; i++)
        for (int64_t r = 0; r < LANE_ROWS; r++) to[i * LANE_ROWS + r] = r < rows ? x[r * k + i] : 0.0f;
}

#define LANE_ROW(r, x, lane)                                                                                        \
    acc[2 * (r)] = vfmaq_laneq_f32(acc[2 * (r)], w0, x, lane);                                                      \
    acc[2 * (r) + 1] = vfmaq_laneq_f32(acc[2 * (r) + 1], w1, x, lane);

/* acc [rows][2 vectors] += `depth` steps of packed rows times a panel; rows are 8, or 4 where no more are left. */
INLINE void lane_steps(const float *x, const float *w, int64_t depth, int rows, float32x4_t *acc) {
    for (int64_t k = 0; k < depth; k++, x += LANE_ROWS, w += NR) {
        float32x4_t x0 = vld1q_f32(x), w0 = vld1q_f32(w), w1 = vld1q_f32(w + 4);
        LANE_ROW(0, x0, 0) LANE_ROW(1, x0, 1) LANE_ROW(2, x0, 2) LANE_ROW(3, x0, 3)
        if (rows == LANE_ROWS / 2) continue;
        float32x4_t x1 = vld1q_f32(x + 4);
        LANE_ROW(4, x1, 0) LANE_ROW(5, x1, 1) LANE_ROW(6, x1, 2) LANE_ROW(7, x1, 3)
    }
}

#endif
