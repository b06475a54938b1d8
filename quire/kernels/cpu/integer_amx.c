/* Integer products with AMX: a tile of 16 rows by one panel, a step of k at a time.
 *
 * A step of a panel, one code a byte, is what the instruction wants as its right side as it lies there: [quads][COLS][4].
 * The integer sums of a step go through memory to the vector registers, which keep the sums of floats; while one step's
 * are taken from there, the next step is multiplied. Fewer rows are left to AVX-512 VNNI, which is faster there. */
#include "integer.h"

#if defined(__AVX512F__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define Q_TARGET __attribute__((target("amx-tile,amx-int8")))
#define LEAST_ROWS 64 /* codes of 4 bits are faster by AVX-512 VNNI to some 100, of 8 bits to some 30 */
#define ROWS_OF_FLUSH 4

/* The shapes of the tile registers, as the processor reads them. */
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

Q_TARGET static inline __attribute__((always_inline)) __m512 scales_at(const uint8_t *p, int64_t bytes) {
    return bytes == 2 ? _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)) : _mm512_loadu_ps((const void *)p);
}

/* Rows [from, to): sum += d * dx * (a step's integer sums + init), then + m * shift. */
typedef struct {
    __m512 d, m;
    const float *dx, *shift;
    const int32_t *begin, *whole;
} step_sums;

Q_TARGET static inline __attribute__((always_inline)) step_sums take(const int_tile *t, int64_t s, const int32_t *whole,
                                                                     const int offsets) {
    const uint8_t *at = t->scales + s / t->steps_of_group * t->scale_row;
    int64_t first = s * t->step_stride;
    step_sums taken = {scales_at(at, t->scale_bytes), _mm512_setzero_ps(), t->dx + first, t->shift + first,
                       t->init + first, whole};
    if (offsets) taken.m = scales_at(at + COLS * t->scale_bytes, t->scale_bytes);
    return taken;
}

Q_TARGET static inline __attribute__((always_inline)) void flush(const step_sums *of, const int from, const int to,
                                                                 const int init, const int offsets, __m512 *sum) {
    UNROLL for (int r = from; r < to; r++) {
        __m512i step = _mm512_load_si512(of->whole + r * COLS);
        if (init) step = _mm512_add_epi32(step, _mm512_set1_epi32(of->begin[r]));
        sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(of->d, _mm512_set1_ps(of->dx[r])), _mm512_cvtepi32_ps(step), sum[r]);
        if (offsets) sum[r] = _mm512_fmadd_ps(of->m, _mm512_set1_ps(of->shift[r]), sum[r]);
    }
}

/* The sums of step `s`, which lie in `whole`, and between its rows: those of step s + 1 leave register `other`, and step
 * s + 2 is multiplied into `into`, whose sides go to A and B. */
#define STEP(s, whole, other, other_whole, into, A, B)                                                              \
    {                                                                                                               \
        step_sums of = take(t, s, whole, offsets);                                                                  \
        int64_t ahead = (s) + 2 < t->last ? (s) + 2 : t->last - 1;                                                  \
        _tile_loadd(B, t->codes + ahead * step_bytes, QUAD_BYTES);                                                  \
        flush(&of, 0, held / 4, init, offsets, sum);                                                                \
        _tile_loadd(A, t->x + ahead * t->quads * 4, t->k);                                                          \
        _tile_zero(into);                                                                                           \
        flush(&of, held / 4, held / 2, init, offsets, sum);                                                         \
        _tile_dpbsud(into, A, B);                                                                                   \
        flush(&of, held / 2, held * 3 / 4, init, offsets, sum);                                                     \
        _tile_stored(other, other_whole, COLS * 4);                                                                 \
        flush(&of, held * 3 / 4, held, init, offsets, sum);                                                         \
    }

#define MULTIPLY(s, into, A, B)                                                                                     \
    _tile_zero(into);                                                                                               \
    _tile_loadd(B, t->codes + (s) * step_bytes, QUAD_BYTES);                                                        \
    _tile_loadd(A, t->x + (s) * t->quads * 4, t->k);                                                                \
    _tile_dpbsud(into, A, B);

/* `held` is `rows` rounded up to ROWS_OF_FLUSH; what comes of the rows beyond is not stored. */
Q_TARGET static inline __attribute__((always_inline)) void amx_tile(const int_tile *t, int rows, const int held,
                                                                    const int init, const int offsets) {
    int32_t whole[2][AMX_ROWS * COLS] __attribute__((aligned(64)));
    __m512 sum[AMX_ROWS];
    UNROLL for (int r = 0; r < held; r++) sum[r] = _mm512_setzero_ps();
    const int64_t step_bytes = t->quads * QUAD_BYTES, second = t->first + 1 < t->last ? t->first + 1 : t->first;
    MULTIPLY(t->first, 0, 4, 5)
    MULTIPLY(second, 1, 6, 7)
    _tile_stored(0, whole[0], COLS * 4);
    for (int64_t s = t->first; s < t->last; s += 2) {
        STEP(s, whole[0], 1, whole[1], 0, 4, 5)
        if (s + 1 == t->last) break;
        STEP(s + 1, whole[1], 0, whole[0], 1, 6, 7)
    }
    UNROLL for (int r = 0; r < held; r++) if (r < rows) _mm512_storeu_ps(t->sums + r * COLS, sum[r]);
}

#define AMX_HELD(held)                                                                                              \
    case (held) / ROWS_OF_FLUSH:                                                                                    \
        if (offsets && t->zero_init) amx_tile(t, rows, held, 0, 1);                                                 \
        else if (offsets) amx_tile(t, rows, held, 1, 1);                                                            \
        else if (t->zero_init) amx_tile(t, rows, held, 0, 0);                                                       \
        else amx_tile(t, rows, held, 1, 0);                                                                         \
        break;

Q_TARGET static void tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    (void)panels, (void)mode;
    switch ((rows + ROWS_OF_FLUSH - 1) / ROWS_OF_FLUSH) { AMX_HELD(4) AMX_HELD(8) AMX_HELD(12) AMX_HELD(16) }
}

/* Always for 16 rows: to set the shapes costs as much as several steps. Constants, since gcc 12 does not know that the
 * instruction reads all of them and would leave out the writing. */
#define SHAPES(quads)                                                                                               \
    {.palette = 1, .rows = {AMX_ROWS, AMX_ROWS, 0, 0, AMX_ROWS, quads, AMX_ROWS, quads},                          \
     .row_bytes = {COLS * 4, COLS * 4, 0, 0, (quads) * 4, COLS * 4, (quads) * 4, COLS * 4}}
static const tile_shapes eight_quads = SHAPES(8), four_quads = SHAPES(4);

Q_TARGET static void begin(int64_t quads) { _tile_loadconfig(quads == 8 ? &eight_quads : &four_quads); }

Q_TARGET static void end(void) { _tile_release(); }

/* The system gives the room for tile registers only to processes that ask for it. */
static int allowed(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return 0; /* AMX-TILE, AMX-INT8 */
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}

const int_kernel *quire_int_amx(void) {
    static int_kernel kernel = {"amx", tile, AMX_ROWS, 1, 0, NULL, 1, 1, LEAST_ROWS, NULL, begin, end};
    kernel.few = quire_int_avx512vnni();
    if (!kernel.few || !allowed()) return NULL;
    kernel.dots = kernel.few->dots;
    return &kernel;
}
#else
const int_kernel *quire_int_amx(void) { return NULL; }
#endif
