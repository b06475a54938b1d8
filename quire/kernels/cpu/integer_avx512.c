/* Integer products with AVX-512 VNNI: 64 products of a code and an activation in one instruction. */
#include "integer.h"

#if defined(__AVX512F__)
#include <cpuid.h>
#include <immintrin.h>

#define Q_TARGET __attribute__((target("avx512vnni")))
#define Q_INLINE static inline __attribute__((always_inline, target("avx512vnni")))
#define TILE_ROWS 6
#define TILE_PANELS 2
#define QUADS_AT_ONCE 4 /* a step has 4 or 8 */
#define NIBBLES_AHEAD 8192 /* bytes of prefetch: past the end of a narrow weight's panels, where the next ones begin */
#define BYTES_AHEAD 2048   /* codes that were unpacked are in the cache already: there it is in vain, and cheap */

/* Not the intrinsic: gcc 12 copies accumulators from register to register around it. */
Q_INLINE __m512i dot(__m512i acc, __m512i codes, __m512i x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
    return acc;
}

Q_INLINE __m512i four(const int8_t *p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
}

Q_INLINE __m512 scales_at(const uint8_t *p, int64_t bytes) {
    return bytes == 2 ? _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)) : _mm512_loadu_ps((const void *)p);
}

/* Quad q of the four at p. Nibbles of two quads lie together. */
Q_INLINE __m512i quad_at(const uint8_t *p, const int q, const int nibbles) {
    if (!nibbles) return _mm512_loadu_si512(p + q * QUAD_BYTES);
    __m512i both = _mm512_loadu_si512(p + q / 2 * QUAD_BYTES);
    return _mm512_and_si512(q % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}

/* The integer sums of one step. An activation goes to a register once for all panels: as an operand in memory, which
 * the instruction could take, it would be loaded for every product, and loads would be what limits. */
Q_INLINE void multiply_step(const int_tile *t, const uint8_t *codes, const int8_t *x, const int rows, const int panels,
                            const int nibbles, __m512i *acc) {
    const int64_t k = t->k;
    for (int64_t q = 0; q < t->quads; q += QUADS_AT_ONCE, x += 4 * QUADS_AT_ONCE) {
        const int8_t *lower = x + 3 * k;
        UNROLL for (int i = 0; i < QUADS_AT_ONCE; i++) {
            __m512i quad[TILE_PANELS];
            UNROLL for (int p = 0; p < panels; p++) {
                quad[p] = quad_at(codes + p * t->codes_stride, i, nibbles);
                if (!nibbles) __builtin_prefetch(codes + p * t->codes_stride + i * QUAD_BYTES + BYTES_AHEAD);
                else if (i % 2 == 0) __builtin_prefetch(codes + p * t->codes_stride + i / 2 * QUAD_BYTES + NIBBLES_AHEAD);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                __m512i own = four((r < 3 ? x + r * k : lower + (r - 3) * k) + 4 * i);
                UNROLL for (int p = 0; p < panels; p++) acc[r * panels + p] = dot(acc[r * panels + p], quad[p], own);
            }
        }
        codes += QUADS_AT_ONCE * QUAD_BYTES / (nibbles ? 2 : 1);
    }
}

/* All slices of k: each is summed in registers from zero, and added to those before it on the stack as often as the
 * tree says. */
Q_INLINE void sum_slices(const int_tile *t, const int rows, const int panels, const int nibbles, const int offsets) {
    const int64_t step_bytes = t->quads * QUAD_BYTES / (nibbles ? 2 : 1);
    const int64_t width = t->quads * 4;
    const uint8_t *codes = t->codes, *scales = t->scales;
    const int8_t *x = t->x, *const end = x + t->k;
    const float *dx = t->dx, *shift = t->shift;
    const int32_t *init = t->init;
    float *to = t->sums;
    int64_t steps_of_group = 0;
    __m512 d[TILE_PANELS], m[TILE_PANELS];
    for (const int_slice *slice = t->slices; x < end; slice++) {
        __m512 sum[TILE_ROWS * TILE_PANELS];
        UNROLL for (int i = 0; i < rows * panels; i++) sum[i] = _mm512_setzero_ps();
        for (const int8_t *last = t->x + slice->end; x < last; x += width, codes += step_bytes) {
            __m512i acc[TILE_ROWS * TILE_PANELS];
            UNROLL for (int i = 0; i < rows * panels; i++) acc[i] = _mm512_set1_epi32(init[i / panels]);
            multiply_step(t, codes, x, rows, panels, nibbles, acc);
            if (steps_of_group == 0) {
                UNROLL for (int p = 0; p < panels; p++) {
                    const uint8_t *at = scales + p * t->scales_stride;
                    d[p] = scales_at(at, t->scale_bytes);
                    if (offsets) m[p] = scales_at(at + COLS * t->scale_bytes, t->scale_bytes);
                }
                scales += t->scale_row;
                steps_of_group = t->steps_of_group;
            }
            steps_of_group--;
            UNROLL for (int i = 0; i < rows * panels; i++) {
                __m512 scale = _mm512_mul_ps(d[i % panels], _mm512_set1_ps(dx[i / panels]));
                sum[i] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(acc[i]), sum[i]);
                if (offsets) sum[i] = _mm512_fmadd_ps(m[i % panels], _mm512_set1_ps(shift[i / panels]), sum[i]);
            }
            dx += t->step_stride, init += t->step_stride, shift += t->step_stride;
        }
        for (int64_t merges = slice->merges; merges > 0; merges--) {
            to -= rows * panels * COLS;
            UNROLL for (int i = 0; i < rows * panels; i++)
                sum[i] = _mm512_add_ps(_mm512_loadu_ps(to + i * COLS), sum[i]);
        }
        UNROLL for (int i = 0; i < rows * panels; i++) _mm512_storeu_ps(to + i * COLS, sum[i]);
        to += rows * panels * COLS;
    }
}

/* A function for each: in one for all, gcc 12 keeps sums on the stack. */
typedef void (*tile_fn)(const int_tile *t);
#define VARIANT(r, p, nibbles, offsets)                                                                             \
    Q_TARGET static __attribute__((noinline)) void tile_##r##p##nibbles##offsets(const int_tile *t) {              \
        sum_slices(t, r, p, nibbles, offsets);                                                                      \
    }
#define VARIANTS(r, p) VARIANT(r, p, 0, 0) VARIANT(r, p, 0, 1) VARIANT(r, p, 1, 0) VARIANT(r, p, 1, 1)
VARIANTS(1, 1) VARIANTS(2, 1) VARIANTS(3, 1) VARIANTS(4, 1) VARIANTS(5, 1) VARIANTS(6, 1)
VARIANTS(1, 2) VARIANTS(2, 2) VARIANTS(3, 2) VARIANTS(4, 2) VARIANTS(5, 2) VARIANTS(6, 2)

#define NAMES(r, p) {{tile_##r##p##00, tile_##r##p##01}, {tile_##r##p##10, tile_##r##p##11}}
static const tile_fn tiles[TILE_ROWS][TILE_PANELS][2][2] = {
    {NAMES(1, 1), NAMES(1, 2)}, {NAMES(2, 1), NAMES(2, 2)}, {NAMES(3, 1), NAMES(3, 2)},
    {NAMES(4, 1), NAMES(4, 2)}, {NAMES(5, 1), NAMES(5, 2)}, {NAMES(6, 1), NAMES(6, 2)},
};

static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    tiles[rows - 1][panels - 1][mode == NIBBLES][offsets](t);
}

/* ---- dot products of queries and keys */

#define LANES_Q 16
#define VPP 1
typedef __m512i qi;
typedef __m512i q_codes;
typedef __m512i q_four;
Q_INLINE qi q_load(const void *p) { return _mm512_loadu_si512(p); }
Q_INLINE q_codes q_prepare(qi raw, int wide) { (void)wide; return raw; }
Q_INLINE qi q_int(const int32_t *p) { return _mm512_set1_epi32(*p); }
Q_INLINE q_four q_x(const int8_t *p) { return four(p); }
Q_INLINE qi q_dot(qi acc, q_codes w, q_four x, int wide) { (void)wide; return dot(acc, w, x); }
#define DOT_GROUPS 4
#define DOT_TILE_ROWS 6
#include "code_dots_tile.h"

const int_kernel *quire_int_avx512vnni(void) {
    static const int_kernel kernel = {.name = "avx512-vnni", .tile = tile, .rows = TILE_ROWS, .panels = TILE_PANELS,
                                      .dots = dots, .steps_first = 1, .all_slices = 1};
    /* Not __builtin_cpu_supports: of a shared library clang's linker refuses what it refers to. */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1) ? &kernel : NULL; /* AVX512_VNNI */
}
#else
const int_kernel *quire_int_avx512vnni(void) { return NULL; }
#endif
