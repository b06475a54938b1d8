/* Products with a packed weight: y = x W^T, every element one fused chain over k in order.
 *
 * However many rows share a pass, and however k is cut, each output element is x[0]*w[0] + x[1]*w[1] + ... from left
 * to right, so its bits depend on its own row and column only. */
#include "export.h"
#include "pool.h"
#include "weight.h"

/* A register tile is TILE_ROWS rows by PAIR panels, or, for the first rows of a decoding step, FEW rows by WIDE panels:
 * as many sums as registers allow, and for memory's sake more than one stream of weights. */
#define TILE_ROWS 6
#define FEW 3
#if defined(__AVX512F__) || defined(__aarch64__)
#define PAIR 2
#else
#define PAIR 1
#endif
#define WIDE (PAIR * 2)
#define SUMS (TILE_ROWS * PAIR * NV) /* 24 of 32 registers, or 12 of 16 */

/* A piece of PAIR panels and the partial sums of a task's rows stay in the first-level cache together; a task's panels
 * and its rows' inputs in the second, where the panels serve one block of rows after another. */
#define K_BLOCK (PAIR * NR >= 64 ? 96 : 256) /* steps of k in a piece */
#define ROW_BLOCK 96                         /* rows of a task */
#define CHUNK_BYTES (768 << 10)              /* of a task's panels, as floats, where several blocks of rows use them */
#define NEAR 512                             /* floats ahead within a panel, fetched by the first tile of rows */

typedef struct {
    const float *x;
    const uint8_t *w;
    const float *bias, *residual;
    float *out;
    int64_t rows, n, k;
    int32_t format;
    int64_t panels, row_blocks, panel_step; /* how the work is cut into tasks */
} linear_job;

/* Where a tile finds its weights, and what it fetches meanwhile. */
typedef struct {
    const float *w;
    int64_t ldw;       /* floats from one panel to the next */
    const float *next; /* the piece of the weight that follows */
    int64_t lines;     /* cache lines of it to fetch per 4 steps of k */
} weights;

/* sums[rows][panels * NR] of `rows` rows by `panels` panels over `depth` steps of k, from zero if `first`, else
 * going on from what `sums` holds. */
INLINE void tile(int rows, int panels, int near, const float *x, int64_t ldx, weights at, int64_t depth, int first,
                 float *sums) {
    const int wide = panels * NV;
    vf acc[SUMS];
    UNROLL for (int i = 0; i < rows * wide; i++) acc[i] = first ? set_v(0.0f) : load_v(sums + i * VL);
    for (int64_t k = 0; k < depth;) {
        int64_t stop = k + 4 < depth ? k + 4 : depth;
        for (int64_t i = 0; i < at.lines; i++) __builtin_prefetch(at.next + i * 16, 0, 2);
        at.next += at.lines * 16;
        for (; k < stop; k++) {
            vf b[WIDE * NV];
            UNROLL for (int p = 0; p < panels; p++) {
                const float *panel = at.w + p * at.ldw + k * NR;
                UNROLL for (int j = 0; j < NV; j++) {
                    b[p * NV + j] = load_v(panel + j * VL);
                    if (near && j * VL % 16 == 0) __builtin_prefetch(panel + NEAR + j * VL);
                }
            }
            UNROLL for (int r = 0; r < rows; r++) {
                vf a = set_v(x[r * ldx + k]);
                UNROLL for (int j = 0; j < wide; j++) acc[r * wide + j] = fma_v(a, b[j], acc[r * wide + j]);
            }
        }
    }
    UNROLL for (int i = 0; i < rows * wide; i++) store_v(sums + i * VL, acc[i]);
}

#define CASE(r, p)                                                                                                  \
    case (r) * 8 + (p):                                                                                             \
        if (near) tile(r, p, 1, x, ldx, at, depth, first, sums);                                                    \
        else tile(r, p, 0, x, ldx, at, depth, first, sums);                                                         \
        break;

static void run_tile(int64_t rows, int64_t panels, int near, const float *x, int64_t ldx, weights at, int64_t depth,
                     int first, float *sums) {
    switch (rows * 8 + panels) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2)
#if PAIR == 2
        CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(1, 4) CASE(2, 4) CASE(3, 4)
#endif
    }
}

/* The same for all of k and few rows, widening a narrow weight on its way to the registers. */
INLINE void narrow_tile(int rows, int panels, int32_t format, const float *x, int64_t k, const uint8_t *w, int64_t ldw,
                        float *sums) {
    const int wide = panels * NV;
    vf acc[FEW * PAIR * NV];
    UNROLL for (int i = 0; i < rows * wide; i++) acc[i] = set_v(0.0f);
#define ADD(step, p, j, weight)                                                                                     \
    do {                                                                                                            \
        vf b = weight;                                                                                              \
        UNROLL for (int r = 0; r < rows; r++)                                                                       \
            acc[r * wide + (p) * NV + (j)] = fma_v(set_v(x[r * k + (step)]), b, acc[r * wide + (p) * NV + (j)]);    \
    } while (0)
#define EACH(p, j) UNROLL for (int p = 0; p < panels; p++) UNROLL for (int j = 0; j < NV; j++)
    if (format == BFLOAT16)
        for (int64_t i = 0; i < k; i++) {
            UNROLL for (int p = 0; p < panels; p++) fetch(w + p * ldw + i * NR * 2, NR * 2);
            EACH(p, j) ADD(i, p, j, weight_bfloat16(w + p * ldw, i, j));
        }
    else
        for (int64_t k0 = 0; k0 < k; k0 += GROUP, w += group_bytes(format)) {
            scales s[PAIR];
            UNROLL for (int p = 0; p < panels; p++) {
                s[p] = load_scales(w + p * ldw, format);
                fetch(w + p * ldw, group_bytes(format));
            }
            if (format == SCALED8)
                for (int64_t i = 0; i < GROUP; i++)
                    EACH(p, j) ADD(k0 + i, p, j, weight_scaled8(w + p * ldw, &s[p], i, j));
            else
                for (int64_t word = 0; word < GROUP / 8; word++) {
                    vi q[PAIR * NV];
                    EACH(p, j) q[p * NV + j] = words_scaled4(w + p * ldw, word, j);
                    UNROLL for (int i = 0; i < 8; i++)
                        EACH(p, j) ADD(k0 + word * 8 + i, p, j, weight_scaled4(q[p * NV + j], &s[p], i, j));
                }
        }
    UNROLL for (int i = 0; i < rows * wide; i++) store_v(sums + i * VL, acc[i]);
}

#define NARROW(r, p, f)                                                                                             \
    case ((r) * 8 + (p)) * 4 + (f):                                                                                 \
        narrow_tile(r, p, f, x, k, w, ldw, sums);                                                                   \
        break;
#define NARROW_ROWS(p, f) NARROW(1, p, f) NARROW(2, p, f) NARROW(3, p, f)

static void run_narrow_tile(int64_t rows, int64_t panels, int32_t format, const float *x, int64_t k, const uint8_t *w,
                            int64_t ldw, float *sums) {
    switch ((rows * 8 + panels) * 4 + format) {
        NARROW_ROWS(1, BFLOAT16) NARROW_ROWS(1, SCALED8) NARROW_ROWS(1, SCALED4)
#if PAIR == 2
        NARROW_ROWS(2, BFLOAT16) NARROW_ROWS(2, SCALED8) NARROW_ROWS(2, SCALED4)
#endif
    }
}

/* out = sums + bias + residual for `rows` rows of `width` columns of sums. */
static void finish(const linear_job *job, const float *sums, int64_t width, int64_t row, int64_t rows, int64_t col) {
    int64_t count = job->n - col < width ? job->n - col : width;
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (row + r) * job->n + col;
        const float *from = sums + r * width;
        float *out = job->out + at;
        if (job->bias && job->residual)
            for (int64_t j = 0; j < count; j++) out[j] = from[j] + job->bias[col + j] + job->residual[at + j];
        else if (job->bias)
            for (int64_t j = 0; j < count; j++) out[j] = from[j] + job->bias[col + j];
        else if (job->residual)
            for (int64_t j = 0; j < count; j++) out[j] = from[j] + job->residual[at + j];
        else
            memcpy(out, from, (size_t)count * sizeof(float));
    }
}

/* Steps [k0, k0 + depth) of one panel as floats. */
static void widen(const linear_job *job, int64_t panel, int64_t k0, int64_t depth, float *to) {
    const uint8_t *from = job->w + panel * panel_bytes(job->format, job->k) + panel_bytes(job->format, k0);
    if (job->format == BFLOAT16) widen_bfloat16(from, depth, to);
    else if (job->format == SCALED8) widen_scaled8(from, depth, to);
    else widen_scaled4(from, depth, to);
}

/* Share the fetching of the next piece among the tiles of rows that use this one: each panel's part among half. */
static void plan_fetch(weights *at, int64_t tile_index, int64_t tiles, int64_t depth) {
    int64_t half = tiles / 2, side = tile_index / half, slice = tile_index % half;
    at->lines = side < PAIR ? (NR / 4 + half - 1) / half : 0;
    at->next += side * at->ldw + depth * NR * slice / half;
}

/* All rows [row, row + rows) by `panels` panels: each piece of the weight is read once and used by every tile. */
static void product(const linear_job *job, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    float sums[ROW_BLOCK * PAIR * NR] __attribute__((aligned(64)));
    float wide[PAIR * K_BLOCK * NR] __attribute__((aligned(64)));
    int64_t k = job->k, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t block = job->format == FLOAT32 && tiles == 1 ? k : K_BLOCK; /* read once, a weight need not be cut */
    for (int64_t k0 = 0; k0 < k; k0 += block) {
        int64_t depth = k0 + block < k ? block : k - k0;
        const float *direct = (const float *)job->w + (panel * k + k0) * NR;
        weights piece = {direct, k * NR, direct + depth * NR, 0};
        if (k0 + depth == k) piece.next += (panels - 1) * k * NR;
        if (job->format != FLOAT32) {
            for (int64_t p = 0; p < panels; p++) widen(job, panel + p, k0, depth, wide + p * depth * NR);
            piece = (weights){wide, depth * NR, wide, 0};
        }
        for (int64_t t = 0; t < tiles; t++) {
            int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            weights at = piece;
            if (job->format == FLOAT32 && tiles > 1) plan_fetch(&at, t, tiles, depth);
            run_tile(count, panels, t == 0 && job->format == FLOAT32, job->x + (row + first) * k + k0, k, at, depth,
                     k0 == 0, sums + first * panels * NR);
        }
    }
    finish(job, sums, panels * NR, row, rows, panel * NR);
}

static void narrow_product(const linear_job *job, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    float sums[FEW * PAIR * NR] __attribute__((aligned(64)));
    int64_t stride = panel_bytes(job->format, job->k);
    run_narrow_tile(rows, panels, job->format, job->x + row * job->k, job->k, job->w + panel * stride, stride, sums);
    finish(job, sums, panels * NR, row, rows, panel * NR);
}

static void linear_task(void *arg, int64_t task) {
    const linear_job *job = arg;
    int64_t block = task % job->row_blocks, panel = task / job->row_blocks * job->panel_step;
    int64_t end = panel + job->panel_step < job->panels ? panel + job->panel_step : job->panels;
    int64_t row = job->rows * block / job->row_blocks, rows = job->rows * (block + 1) / job->row_blocks - row;
    for (int64_t step; panel < end; panel += step) {
        int narrow = rows <= FEW && job->format != FLOAT32;
        step = rows <= FEW && !narrow && panel + WIDE <= end ? WIDE : panel + PAIR <= end ? PAIR : 1;
        if (narrow) narrow_product(job, row, rows, panel, step);
        else product(job, row, rows, panel, step);
    }
}

/* out [rows, n] = x [rows, k] times the packed weight, + bias, + residual, in that order. */
EXPORT void quire_linear(const float *x, const void *w, int32_t format, const float *bias, const float *residual,
                         float *out, int64_t rows, int64_t n, int64_t k) {
    if (rows == 0) return;
    linear_job job = {x, w, bias, residual, out, rows, n, k, format, (n + NR - 1) / NR, 1, 1};
    job.row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t threads = quire_get_num_threads(), pieces = threads * 8 / job.row_blocks;
    if (threads == 1 || rows * n * k < 100000 || pieces < 1) pieces = 1;
    int64_t unit = rows <= FEW && format == FLOAT32 ? WIDE : PAIR;
    int64_t step = (job.panels + pieces - 1) / pieces, chunk = CHUNK_BYTES / (k * NR * 4);
    if (job.row_blocks > 1 && chunk < step) step = chunk > 1 ? chunk : 1;
    job.panel_step = (step + unit - 1) / unit * unit;
    quire_parallel(linear_task, &job, (job.panels + job.panel_step - 1) / job.panel_step * job.row_blocks);
}
