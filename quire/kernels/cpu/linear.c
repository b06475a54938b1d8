/* Matrix products with a weight packed once: y = x W^T, every element one fused chain over k in order.
 *
 * The weight [N, K] is stored as panels [ceil(N / NR)][K][NR], so a product reads it front to back. However many
 * rows share a pass, and however k is cut, each output element is x[0]*w[0] + x[1]*w[1] + ... from left to right,
 * so its bits depend on its own row and column only. */
#include "export.h"
#include "pool.h"
#include "simd.h"

#define NV 2
#define NR (NV * VL) /* columns of a panel */

#if VL == 8 || !(defined(__AVX512F__) || defined(__aarch64__))
#define MAX_ROWS 6 /* 16 registers: 12 sums, 2 weights, 1 input */
#else
#define MAX_ROWS 12 /* 32 registers: 24 sums */
#endif

#ifndef K_BLOCK
#define K_BLOCK 288 /* a block of a panel stays in the first-level cache while the rows pass over it */
#endif
#ifndef ROW_BLOCK
#define ROW_BLOCK (MAX_ROWS * 8) /* rows of a task: their inputs stay in the second-level cache */
#endif
#ifndef PREFETCH
#define PREFETCH 512 /* floats ahead */
#endif
#define MAX_PANELS 4

typedef struct {
    const float *x, *w, *bias, *residual;
    float *out;
    int64_t rows, n, k;
    int64_t panels, row_blocks, panel_step; /* how the work is cut into tasks */
} linear_job;

EXPORT int32_t quire_panel_width(void) { return NR; }

/* sums[rows][panels * NR] of `rows` rows by `panels` panels over `depth` steps of k, from zero if `first`, else
 * going on from what `sums` holds. */
INLINE void tile(int rows, int panels, const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t depth,
                 int first, float *sums) {
    const int wide = panels * NV;
    vf acc[MAX_ROWS * NV];
    UNROLL for (int i = 0; i < rows * wide; i++) acc[i] = first ? set_v(0.0f) : load_v(sums + i * VL);
    for (int64_t k = 0; k < depth; k++) {
        vf b[MAX_PANELS * NV];
        UNROLL for (int p = 0; p < panels; p++) {
            const float *panel = w + p * ldw + k * NR;
            UNROLL for (int j = 0; j < NV; j++) {
                b[p * NV + j] = load_v(panel + j * VL);
                if (j * VL % 16 == 0) __builtin_prefetch(panel + PREFETCH + j * VL);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf a = set_v(x[r * ldx + k]);
            UNROLL for (int j = 0; j < wide; j++) acc[r * wide + j] = fma_v(a, b[j], acc[r * wide + j]);
        }
    }
    UNROLL for (int i = 0; i < rows * wide; i++) store_v(sums + i * VL, acc[i]);
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

#define CASE(r, p)                                                                                                  \
    case r:                                                                                                         \
        tile(r, p, x, ldx, w, ldw, depth, first, sums);                                                             \
        break;

static void tile_one_panel(int64_t rows, const float *x, int64_t ldx, const float *w, int64_t depth, int first,
                           float *sums) {
    const int64_t ldw = 0;
    switch (rows) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
#if MAX_ROWS > 6
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
#endif
    }
}

/* How many panels a tile of few rows takes at once: enough independent sums to hide the latency of an FMA. */
static int panels_at_once(int64_t rows) {
    return rows == 1 ? 4 : rows == 2 ? (MAX_ROWS > 6 ? 4 : 2) : MAX_ROWS > 6 && rows <= 6 ? 2 : 1;
}

static void tile_wide(int64_t rows, const float *x, int64_t ldx, const float *w, int64_t ldw, float *sums) {
    const int64_t depth = ldx;
    const int first = 1;
    switch (rows) {
        CASE(1, 4)
#if MAX_ROWS > 6
        CASE(2, 4) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)
#else
        CASE(2, 2)
#endif
    }
}

/* Few rows: stream the panels once, all of k at a time. */
static void few_rows(const linear_job *job, int64_t panel, int64_t end) {
    float sums[MAX_ROWS * MAX_PANELS * NR] __attribute__((aligned(64)));
    int64_t k = job->k;
    int wide = panels_at_once(job->rows);
    for (int step; panel < end; panel += step) {
        step = panel + wide <= end ? wide : 1;
        const float *w = job->w + panel * k * NR;
        if (step > 1) tile_wide(job->rows, job->x, k, w, k * NR, sums);
        else tile_one_panel(job->rows, job->x, k, w, k, 1, sums);
        finish(job, sums, step * NR, 0, job->rows, panel * NR);
    }
}

/* Many rows: each block of a panel is read once and used by every tile of rows. */
static void many_rows(const linear_job *job, int64_t row, int64_t end, int64_t panel) {
    float sums[ROW_BLOCK * NR] __attribute__((aligned(64)));
    int64_t rows = end - row, tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, k = job->k;
    int64_t blocks = (k + K_BLOCK - 1) / K_BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t k0 = k * b / blocks, depth = k * (b + 1) / blocks - k0;
        const float *w = job->w + (panel * k + k0) * NR;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
            tile_one_panel(count, job->x + (row + first) * k + k0, k, w, depth, b == 0, sums + first * NR);
        }
    }
    finish(job, sums, NR, row, rows, panel * NR);
}

static void linear_task(void *arg, int64_t task) {
    const linear_job *job = arg;
    int64_t block = task % job->row_blocks, panel = task / job->row_blocks * job->panel_step;
    int64_t end = panel + job->panel_step < job->panels ? panel + job->panel_step : job->panels;
    if (job->rows <= MAX_ROWS) {
        few_rows(job, panel, end);
        return;
    }
    int64_t row = job->rows * block / job->row_blocks, stop = job->rows * (block + 1) / job->row_blocks;
    for (; panel < end; panel++) many_rows(job, row, stop, panel);
}

/* out [rows, n] = x [rows, k] times the packed weight, + bias, + residual, in that order. */
EXPORT void quire_linear(const float *x, const float *w, const float *bias, const float *residual, float *out, int64_t rows,
                  int64_t n, int64_t k) {
    linear_job job = {x, w, bias, residual, out, rows, n, k, (n + NR - 1) / NR, 1, 1};
    if (rows > MAX_ROWS) job.row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t threads = quire_get_num_threads();
    int64_t pieces = threads * 8 / job.row_blocks > 1 ? threads * 8 / job.row_blocks : 1;
    if (threads == 1 || rows * n * k < 100000) pieces = 1;
    job.panel_step = (job.panels + pieces - 1) / pieces;
    int wide = rows <= MAX_ROWS ? panels_at_once(rows) : 1;
    job.panel_step = (job.panel_step + wide - 1) / wide * wide;
    quire_parallel(linear_task, &job, (job.panels + job.panel_step - 1) / job.panel_step * job.row_blocks);
}

typedef struct {
    const float *src;
    float *dst;
    int64_t n, k;
} pack_job;

static void pack_task(void *arg, int64_t panel) {
    const pack_job *job = arg;
    float *dst = job->dst + panel * job->k * NR;
    int64_t cols = job->n - panel * NR < NR ? job->n - panel * NR : NR;
    for (int64_t k0 = 0; k0 < job->k; k0 += 16) {
        int64_t k1 = k0 + 16 < job->k ? k0 + 16 : job->k;
        for (int64_t j = 0; j < NR; j++)
            for (int64_t k = k0; k < k1; k++)
                dst[k * NR + j] = j < cols ? job->src[(panel * NR + j) * job->k + k] : 0.0f;
    }
}

/* Weight [n, k] row-major -> panels; columns past n are zero. */
EXPORT void quire_pack(const float *src, float *dst, int64_t n, int64_t k) {
    pack_job job = {src, dst, n, k};
    quire_parallel(pack_task, &job, (n + NR - 1) / NR);
}

/* Row ids[i] of the weight -> out[i], exactly as it was before packing. */
EXPORT void quire_embed(const int64_t *ids, const float *w, float *out, int64_t count, int64_t k) {
    for (int64_t i = 0; i < count; i++) {
        const float *src = w + ids[i] / NR * k * NR + ids[i] % NR;
        for (int64_t j = 0; j < k; j++) out[i * k + j] = src[j * NR];
    }
}
