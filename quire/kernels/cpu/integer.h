/* Weights of integer codes: how they lie in memory, and the job that kernels of every instruction set carry out.
 *
 * A weight is one or more parts, one below the other along its output columns; each part has its own format. A part is
 * cut into panels of COLS output columns. A panel holds the scales (and offsets) of all its groups, then its codes in
 * steps of k: 32 columns of the input, or 16 where so few share a scale. The codes of a step are quads, [4 columns of k]
 * for each of COLS output columns, 64 bytes as one code a byte:
 *
 *   8 bits    quad 0, quad 1, ...                         a byte is a code
 *   4 bits    quads 0 and 1, quads 2 and 3, ...           low nibbles are the even quad, high nibbles the odd one
 *   5 bits    as 4 bits, then 64 bytes of fifth bits      bit q of a byte belongs to quad q
 *   6 bits    as 4 bits, then 64 bytes for every 4 quads  bits 2q and 2q + 1 of a byte belong to quad q of the four
 *
 * Scales of K-quants are one byte each, times a number of half precision for every BLOCK columns of k, which stands before
 * them; so are their offsets. Tiles read them as floats.
 *
 * One layout serves all: a quad is a register of AVX-512, two of AVX2, four of NEON. */
#ifndef QUIRE_INTEGER_H
#define QUIRE_INTEGER_H

#include "code_dots.h"
#include "simd.h"

#define UNIT 32 /* columns of the input that share an activation's scale */
#define COLS 16 /* output columns of a panel */
#define BLOCK 256 /* columns of the input whose scales are multiples of one number, in K-quants */
#define QUAD_BYTES (COLS * 4)
#define MAX_TILE_ROWS 6   /* of a tile whose sums are held in registers; AMX has its own */
#define MAX_TILE_PANELS 2
#define AMX_ROWS 16
#define MAX_TILE (AMX_ROWS * COLS) /* sums of a tile, of any kernel */

/* One part of a weight. Python writes it, before the data, at the beginning of the packed weight. */
typedef struct {
    int64_t n;           /* output columns */
    int64_t start;       /* the first of them in the whole weight's */
    int64_t bits, group; /* of a code; columns of k that share a scale */
    int64_t scale_bytes; /* 1: multiples of a number for each BLOCK, 2: half precision, 4: float */
    int64_t offsets;     /* 1: every scale has an offset */
    int64_t zero;        /* what a code of weight zero is */
    int64_t at;          /* bytes from the beginning of the packed weight to the part's panels */
} int_part;

typedef struct {
    int64_t num_parts;
    int64_t unused[7];
    int_part parts[];
} int_weight;

INLINE int64_t step_of(const int_part *p) { return p->group < UNIT ? p->group : UNIT; }

INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/* Bytes of the codes of one step. */
INLINE int64_t code_bytes(const int_part *p) {
    int64_t quads = step_of(p) / 4, high = p->bits == 5 ? QUAD_BYTES : p->bits == 6 ? quads / 4 * QUAD_BYTES : 0;
    return p->bits == 8 ? quads * QUAD_BYTES : quads / 2 * QUAD_BYTES + high;
}

/* Bytes of the scales, and offsets, of one group; of those of a panel. */
INLINE int64_t scale_row(const int_part *p) { return COLS * p->scale_bytes * (1 + p->offsets); }
INLINE int64_t scales_bytes(const int_part *p, int64_t k) {
    int64_t numbers = p->scale_bytes == 1 ? k / BLOCK * COLS * 2 * (1 + p->offsets) : 0;
    return round_up(k / p->group * scale_row(p) + numbers, 64);
}

/* Where the scales of a BLOCK begin, of one byte each: behind the numbers that they are multiples of. */
INLINE int64_t block_scales(const int_part *p, int64_t block) {
    int64_t numbers = COLS * 2 * (1 + p->offsets);
    return block * (numbers + BLOCK / p->group * scale_row(p)) + numbers;
}

INLINE int64_t int_panel_bytes(const int_part *p, int64_t k) {
    return scales_bytes(p, k) + k / step_of(p) * code_bytes(p);
}

/* A slice of k ends at column `end`; then it is added to the sum before it on the stack, and their sum to the one before
 * that, `merges` times in all, as in linear.c. */
typedef struct {
    int64_t end, merges;
} int_slice;

/* How the codes lie that a tile reads. */
enum {
    NIBBLES = 0, /* two quads in 64 bytes */
    BYTES = 1,   /* a code a byte, below 128; a kernel with a `wide_bias` may find codes less that bias, signed */
    WIDE = 2,    /* a code a byte, any */
};

/* The sums of some rows by some panels over steps [first, last) of k, from zero:
 * for each step in order: sum = fma(d * dx, the step's integer sum, sum), then sum = fma(m, dx * the step's sum of x, sum).
 * That order, and exact integer sums, make every kernel give the same bits. */
typedef struct {
    const int8_t *x;        /* [rows][k] */
    const float *dx;        /* scale of x, of each row and step: at row * row_stride + step * step_stride */
    const int32_t *init;    /* so too: what the integer sum begins with: (bias - zero) times the sum of x */
    const float *shift;     /* so too: scale times sum of x, for offsets */
    int64_t k, row_stride, step_stride;
    const uint8_t *codes;   /* of the first panel, at step 0 */
    const uint8_t *scales;  /* of the first panel, at group 0 */
    int64_t codes_stride, scales_stride; /* bytes from panel to panel */
    int64_t scale_bytes, scale_row, steps_of_group, quads;
    int64_t first, last;
    const int_slice *slices; /* for kernels of all slices, instead of first and last */
    int zero_init;          /* whether init is zero everywhere */
    float *sums;            /* [rows][panels * COLS], one such for each slice that a tree leaves */
} int_tile;

typedef void (*int_tile_fn)(const int_tile *t, int rows, int panels, int mode, int offsets);

/* A kernel: its tile, how large a tile may be, what it subtracts from WIDE codes (0 or 128), its dot products of queries
 * and keys, which subtract the same from codes of keys; whether it reads codes one a byte only, and scales of x step by
 * step instead of row by row. Fewer than `least` rows are left to another kernel, `few`, unless
 * this one was asked for by name. `begin` and `end`, where a kernel
 * has them, stand around its tiles. With `all_slices` a tile takes all slices of k and adds them in their tree. */
typedef struct int_kernel {
    const char *name;
    int_tile_fn tile;
    int rows, panels;
    int wide_bias;
    code_dots_fn dots;
    int bytes_only, steps_first, least;
    const struct int_kernel *few;
    void (*begin)(int64_t quads);
    void (*end)(void);
    int all_slices;
} int_kernel;

/* NULL where the library was not built for it or the processor has no such instructions. */
const int_kernel *quire_int_avx512vnni(void);
const int_kernel *quire_int_avxvnni(void);
const int_kernel *quire_int_avx2(void);
const int_kernel *quire_int_dotprod(void);
const int_kernel *quire_int_i8mm(void);
const int_kernel *quire_int_amx(void);

void quire_int_linear(const float *x, const void *w, const float *bias, const float *residual, float *out, int64_t rows,
                      int64_t n, int64_t k, const void *slices, int64_t num_slices);
void quire_int_embed_row(const void *w, int64_t row, int64_t k, float *out);

#endif
