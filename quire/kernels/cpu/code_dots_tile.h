/* Dot products of queries and keys as codes, written once for all vector widths; uses what integer_tile.h is given.
 * Whoever includes it also defines
 *   DOT_GROUPS         groups of keys that a tile takes at once: their sums must fit the registers
 *   DOT_TILE_ROWS      queries that a tile takes at once */

Q_INLINE void q_dots_tile(const code_dots *d, int64_t row, int64_t group, const int rows, const int groups) {
    qi acc[DOT_TILE_ROWS * DOT_GROUPS * VPP];
    UNROLL for (int r = 0; r < rows; r++) {
        qi begin = q_int(d->init + row + r);
        UNROLL for (int i = 0; i < groups * VPP; i++) acc[r * groups * VPP + i] = begin;
    }
    const int8_t *q = d->q + row * d->q_stride;
    for (int64_t at = 0, quad = 0; quad < d->quads; quad++, at += d->step) {
        q_codes keys[DOT_GROUPS * VPP];
        UNROLL for (int g = 0; g < groups; g++) {
            UNROLL for (int v = 0; v < VPP; v++)
                keys[g * VPP + v] = q_prepare(q_load(d->keys[group + g] + at + v * LANES_Q * 4), 1);
            if (d->ahead && row == 0) __builtin_prefetch(d->next[group + g] + at, 0, 2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            q_four x = q_x(q + r * d->q_stride + quad * 4);
            UNROLL for (int i = 0; i < groups * VPP; i++)
                acc[r * groups * VPP + i] = q_dot(acc[r * groups * VPP + i], keys[i], x, 1);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        memcpy(d->dots + (row + r) * d->dots_stride + group * DOT_KEYS, acc + r * groups * VPP,
               (size_t)groups * DOT_KEYS * sizeof(int32_t));
}

Q_INLINE void q_dots_rows(const code_dots *d, int64_t row, const int rows) {
    int64_t group = 0;
    for (; group + DOT_GROUPS <= d->groups; group += DOT_GROUPS) q_dots_tile(d, row, group, rows, DOT_GROUPS);
    for (; group < d->groups; group++) q_dots_tile(d, row, group, rows, 1);
}

Q_TARGET static void dots(const code_dots *d, int rows) {
    for (int row = 0; row < rows; row += DOT_TILE_ROWS) {
        switch (rows - row < DOT_TILE_ROWS ? rows - row : DOT_TILE_ROWS) {
            case 1: q_dots_rows(d, row, 1); break;
            case 2: q_dots_rows(d, row, 2); break;
            case 3: q_dots_rows(d, row, 3); break;
#if DOT_TILE_ROWS > 3
            case 4: q_dots_rows(d, row, 4); break;
            case 5: q_dots_rows(d, row, 5); break;
            case 6: q_dots_rows(d, row, 6); break;
#endif
        }
    }
}
