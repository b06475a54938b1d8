/* The tile of an integer product, written once for all vector widths. Whoever includes it defines
 *   LANES_Q            32-bit lanes of a vector; VPP = COLS / LANES_Q vectors make a panel
 *   qi, qf             vectors of 32-bit integers and of floats
 *   q_codes            a vector of codes as q_dot wants them: q_codes q_prepare(qi raw, int wide)
 *   q_load, q_low, q_high                 bytes; their low and high nibbles
 *   q_int(p), q_float(p)                  an integer, a float at p, in every lane
 *   q_four             four bytes for every lane as q_dot wants them: q_four q_x(p)
 *   q_dot(qi acc, q_codes w, q_four x, int wide)
 *   q_flush(qf d, qf dx, qi sum, qf acc)  fma(d * dx, (float)sum, acc)
 *   q_fma, q_zero, q_store, q_scales(p, bytes)
 *   TILE(name)         begins the definition of a function for the instruction set */

#define VPP (COLS / LANES_Q)

Q_INLINE void q_tile(const int_tile *t, const int rows, const int panels, const int mode, const int offsets) {
    const int wide = mode == WIDE;
    qf sum[MAX_TILE_ROWS * MAX_TILE_PANELS * VPP];
    UNROLL for (int i = 0; i < rows * panels * VPP; i++) sum[i] = q_zero();
    int64_t step_bytes = t->quads * QUAD_BYTES / (mode == NIBBLES ? 2 : 1);
    int64_t s = t->first, group = s / t->steps_of_group; /* a division takes as long as a step on some processors */
    for (int64_t stop = (group + 1) * t->steps_of_group; s < t->last; stop += t->steps_of_group, group++) {
        if (stop > t->last) stop = t->last;
        qf d[MAX_TILE_PANELS * VPP], m[MAX_TILE_PANELS * VPP];
        UNROLL for (int p = 0; p < panels; p++) UNROLL for (int v = 0; v < VPP; v++) {
            const uint8_t *at = t->scales + p * t->scales_stride + group * t->scale_row;
            d[p * VPP + v] = q_scales(at + v * LANES_Q * t->scale_bytes, t->scale_bytes);
            if (offsets) m[p * VPP + v] = q_scales(at + (COLS + v * LANES_Q) * t->scale_bytes, t->scale_bytes);
        }
        for (; s < stop; s++) {
            qi acc[MAX_TILE_ROWS * MAX_TILE_PANELS * VPP];
            UNROLL for (int r = 0; r < rows; r++) {
                qi begin = q_int(t->init + r * t->row_stride + s);
                UNROLL for (int i = 0; i < panels * VPP; i++) acc[r * panels * VPP + i] = begin;
            }
            const uint8_t *codes = t->codes + s * step_bytes;
            const int8_t *x = t->x + s * t->quads * 4;
            for (int64_t q = 0; q < t->quads; q += 2, x += 8) {
                q_codes even[MAX_TILE_PANELS * VPP], odd[MAX_TILE_PANELS * VPP];
                UNROLL for (int p = 0; p < panels; p++) UNROLL for (int v = 0; v < VPP; v++) {
                    const uint8_t *at = codes + p * t->codes_stride + v * LANES_Q * 4;
                    if (mode == NIBBLES) {
                        qi both = q_load(at);
                        even[p * VPP + v] = q_prepare(q_low(both), 0);
                        odd[p * VPP + v] = q_prepare(q_high(both), 0);
                        __builtin_prefetch(at + 2048);
                    } else {
                        even[p * VPP + v] = q_prepare(q_load(at), wide);
                        if (wide) __builtin_prefetch(at + 2048), __builtin_prefetch(at + QUAD_BYTES + 2048);
                        odd[p * VPP + v] = q_prepare(q_load(at + QUAD_BYTES), wide);
                    }
                }
                codes += mode == NIBBLES ? QUAD_BYTES : 2 * QUAD_BYTES;
                UNROLL for (int r = 0; r < rows; r++) {
                    q_four a = q_x(x + r * t->k), b = q_x(x + r * t->k + 4);
                    UNROLL for (int i = 0; i < panels * VPP; i++) {
                        qi *to = acc + r * panels * VPP + i;
                        *to = q_dot(*to, even[i], a, wide);
                        *to = q_dot(*to, odd[i], b, wide);
                    }
                }
            }
            UNROLL for (int r = 0; r < rows; r++) {
                qf dx = q_float(t->dx + r * t->row_stride + s), shift = q_zero();
                if (offsets) shift = q_float(t->shift + r * t->row_stride + s);
                UNROLL for (int i = 0; i < panels * VPP; i++) {
                    qf *to = sum + r * panels * VPP + i;
                    *to = q_flush(d[i], dx, acc[r * panels * VPP + i], *to);
                    if (offsets) *to = q_fma(m[i], shift, *to);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < rows * panels * VPP; i++) q_store(t->sums + i * LANES_Q, sum[i]);
}

#define Q_MODES(r, p)                                                                                               \
    case (r) * 4 + (p):                                                                                             \
        switch (mode * 2 + offsets) {                                                                               \
            case NIBBLES * 2: q_tile(t, r, p, NIBBLES, 0); break;                                                   \
            case NIBBLES * 2 + 1: q_tile(t, r, p, NIBBLES, 1); break;                                               \
            case BYTES * 2: q_tile(t, r, p, BYTES, 0); break;                                                       \
            case BYTES * 2 + 1: q_tile(t, r, p, BYTES, 1); break;                                                   \
            case WIDE * 2: q_tile(t, r, p, WIDE, 0); break;                                                         \
            case WIDE * 2 + 1: q_tile(t, r, p, WIDE, 1); break;                                                     \
        }                                                                                                           \
        break;
