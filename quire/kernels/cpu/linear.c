/* GEMMs with a packed weight: y = x W^T, every element summed over k in one fixed order.
 *
 * A slice of k is one fused chain: x[0]*w[0] + x[1]*w[1] + ... from left to right, from zero. Slices are added in the
 * binary tree of slices.py; most weights are one slice. However many rows share a pass, and however a slice is cut into
 * pieces, the order is the same, so an element's bits depend on its own row and column only. */
#include "export.h"
#include "integer.h"
#include "pool.h"
#include "recorded.h"
#include "weight.h"
#if defined(__aarch64__)
#include "lane_tile.h"
#include "narrow_neon.h"
#endif

#include <stdlib.h>

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
/* Rows that a narrow weight is widened for in registers: with drafts a decoding step has some more than one. */
#if defined(__AVX512F__)
#define NARROW_ROWS 6
#elif defined(__aarch64__)
#define NARROW_ROWS 4
#else
#define NARROW_ROWS FEW
#endif
/* With one panel at a time for more of them, where registers are enough. */
#if defined(__AVX512F__)
#define TALL_ROWS 12
#elif defined(__aarch64__)
#define TALL_ROWS NARROW_MOST
#else
#define TALL_ROWS NARROW_ROWS
#endif
#define SUMS (TILE_ROWS * PAIR * NV) /* 24 of 32 registers, or 12 of 16 */

/* A piece of PAIR panels and the partial sums of a task's rows stay in the first-level cache together; a task's panels
 * and its rows' inputs in the second, where the panels serve one block of rows after another. */
#define K_BLOCK (PAIR * NR >= 64 ? 96 : 256) /* most steps of k in a piece; a multiple of GROUP */
#define ROW_BLOCK 96                         /* rows of a task */
#define CHUNK_BYTES (768 << 10)              /* of a task's panels, as floats, where several blocks of rows use them */
#define NEAR 512                             /* floats ahead within a panel, fetched by the first tile of rows */

/* Sums of slices lie on a stack. When a slice is summed, it is added to the one before it on the stack, and their sum to
 * the one before that, `merges` times in all: Slices.merges() of slices.py. */
#define MAX_STACK 16 /* sums at once: enough for all of 32,768 slices, or any run of 256 */
typedef struct {
    int64_t end, merges;
} slice;

typedef struct {
    const float *x;
    const uint8_t *w;
    const float *bias, *residual;
    float *out;
    int64_t rows, n, k;
    int32_t format;
    const slice *slices;
    int64_t num_slices, stack, left; /* entries on the stack at most, and in the end */
    int64_t panels, row_blocks, panel_step; /* how the work is cut into tasks */
    int64_t ldx, narrow_rows;               /* floats from row to row of x; rows whose weights are widened in registers */
    float *lanes;                           /* x as lane_tile.h wants it, or NULL: x is read as it is */
} linear_job;

/* Most rows whose weights may be widened in registers; scales take some. */
INLINE int64_t tall_rows(const linear_job *job) { return job->format == BFLOAT16 ? TALL_ROWS : TALL_ROWS - 1; }

/* Where a tile finds its weights, and what it fetches meanwhile. */
typedef struct {
    float *w;
    int64_t ldw;           /* floats from one panel to the next */
    const uint8_t *packed; /* the same weights as they are packed; WIDENS: the tile reads these and leaves floats in w */
    const uint8_t *next;   /* the piece of the packed weight that follows, from where on this tile fetches it */
    int64_t apart;         /* bytes from one packed panel to the next */
    int64_t lines;         /* cache lines of `next` to fetch per 4 steps of k, from all its panels in turn */
} weights;

/* How a tile comes by its weights: floats that a tile before it has read, floats from memory, bfloat16 from memory. */
enum { HAS = 0, READS = 1, WIDENS = 2 };

/* Where a tile keeps its sums [rows][panels * NR], and what it does with them before and after its steps of k. */
typedef struct {
    float *sums;
    int64_t below;  /* floats from one entry of the stack down to the one under it */
    int64_t merges; /* of the slice that ends here, else 0 */
    int first;      /* from zero, else going on from what `sums` holds */
} target;

/* The sums of `rows` rows by `panels` panels over `depth` steps of k. */
INLINE void tile(int rows, int panels, int how, const float *x, int64_t ldx, weights at, int64_t depth, target to) {
    const int wide = panels * NV;
    vf acc[SUMS];
    UNROLL for (int i = 0; i < rows * wide; i++) acc[i] = to.first ? set_v(0.0f) : load_v(to.sums + i * VL);
    const uint8_t *after = at.next + at.apart; /* with two panels, the line that is fetched after `next` */
    for (int64_t k = 0; k < depth;) {
        int64_t stop = k + 4 < depth ? k + 4 : depth;
        for (int64_t i = 0; i < at.lines; i++) {
            const uint8_t *line = at.next;
            __builtin_prefetch(line, 0, 2);
            at.next = panels > 1 ? after : line + 64;
            after = line + 64;
        }
        for (; k < stop; k++) {
            vf b[WIDE * NV];
            UNROLL for (int p = 0; p < panels; p++) {
                float *panel = at.w + p * at.ldw + k * NR;
                UNROLL for (int j = 0; j < NV; j++) {
                    if (how == WIDENS) {
                        b[p * NV + j] = weight_bfloat16(at.packed + p * at.apart, k, j);
                        store_v(panel + j * VL, b[p * NV + j]);
                        if (j * VL % 32 == 0) __builtin_prefetch(at.packed + p * at.apart + (k * NR + j * VL) * 2 + NEAR * 4);
                        continue;
                    }
                    b[p * NV + j] = load_v(panel + j * VL);
                    if (how == READS && j * VL % 16 == 0) __builtin_prefetch(panel + NEAR + j * VL);
                }
            }
            UNROLL for (int r = 0; r < rows; r++) {
                vf a = load_factor(&x[r * ldx + k]);
                UNROLL for (int j = 0; j < wide; j++) acc[r * wide + j] = fma_factor(a, b[j], acc[r * wide + j]);
            }
        }
    }
    for (; to.merges > 0; to.merges--) {
        to.sums -= to.below;
        UNROLL for (int i = 0; i < rows * wide; i++) acc[i] = load_v(to.sums + i * VL) + acc[i];
    }
    UNROLL for (int i = 0; i < rows * wide; i++) store_v(to.sums + i * VL, acc[i]);
}

#define CASE(r, p)                                                                                                  \
    case (r) * 8 + (p):                                                                                             \
        if (how == HAS) tile(r, p, HAS, x, ldx, at, depth, to);                                                     \
        else if (how == READS) tile(r, p, READS, x, ldx, at, depth, to);                                            \
        else tile(r, p, WIDENS, x, ldx, at, depth, to);                                                             \
        break;

static void run_tile(int64_t rows, int64_t panels, int how, const float *x, int64_t ldx, weights at, int64_t depth,
                     target to) {
    switch (rows * 8 + panels) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2)
#if PAIR == 2
        CASE(4, 2) CASE(5, 2) CASE(6, 2)
        CASE(1, 4) CASE(2, 4) CASE(3, 4)
#endif
    }
}

#if !defined(__aarch64__) /* which has its own, see narrow_neon.h */
/* acc += steps [k0, k1) of k for few rows, widening a narrow weight on its way to the registers. `w` is at step k0. */
INLINE void narrow_steps(int rows, int panels, int32_t format, const float *x, int64_t ldx, int64_t k0, int64_t k1,
                         const uint8_t *w, int64_t ldw, vf *acc) {
    const int wide = panels * NV;
#define ADD(step, p, j, weight)                                                                                     \
    do {                                                                                                            \
        vf b = weight;                                                                                              \
        UNROLL for (int r = 0; r < rows; r++)                                                                       \
            acc[r * wide + (p) * NV + (j)] = fma_v(set_v(x[r * ldx + (step)]), b, acc[r * wide + (p) * NV + (j)]);  \
    } while (0)
#define EACH(p, j) UNROLL for (int p = 0; p < panels; p++) UNROLL for (int j = 0; j < NV; j++)
    if (format == BFLOAT16)
        for (; k0 < k1; k0++, w += NR * 2) {
            UNROLL for (int p = 0; p < panels; p++) fetch(w + p * ldw, NR * 2);
            EACH(p, j) ADD(k0, p, j, weight_bfloat16(w + p * ldw, 0, j));
        }
    else
        for (; k0 < k1; k0 += GROUP, w += group_bytes(format)) {
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
}
#endif

/* The sums of few rows over all of k, entry after entry of the stack. */
INLINE void narrow_tile(int rows, int panels, int32_t format, const linear_job *job, const float *x, const uint8_t *w,
                        float *sums) {
    const int size = rows * panels * NV;
    int64_t k = job->k, ldw = panel_bytes(format, k), k0 = 0;
    vf acc[NARROW_ROWS * PAIR * NV];
    for (const slice *s = job->slices; s < job->slices + job->num_slices; k0 = s->end, s++, sums += size * VL) {
        UNROLL for (int i = 0; i < size; i++) acc[i] = set_v(0.0f);
        narrow_steps(rows, panels, format, x, job->ldx, k0, s->end, w + panel_bytes(format, k0), ldw, acc);
        for (int64_t merges = s->merges; merges > 0; merges--) {
            sums -= size * VL;
            UNROLL for (int i = 0; i < size; i++) acc[i] = load_v(sums + i * VL) + acc[i];
        }
        UNROLL for (int i = 0; i < size; i++) store_v(sums + i * VL, acc[i]);
    }
}

#define NARROW(r, p, f)                                                                                             \
    case ((r) * 8 + (p)) * 4 + (f):                                                                                 \
        narrow_tile(r, p, f, job, x, w, sums);                                                                      \
        break;
#define NARROW_FEW(p, f) NARROW(1, p, f) NARROW(2, p, f) NARROW(3, p, f)
#define NARROW_TALL(f)                                                                                              \
    NARROW(7, 1, f) NARROW(8, 1, f) NARROW(9, 1, f) NARROW(10, 1, f) NARROW(11, 1, f)
#define NARROW_MORE(p, f) NARROW(4, p, f) NARROW(5, p, f) NARROW(6, p, f)

static void run_narrow_tile(const linear_job *job, int64_t rows, int64_t panels, const float *x, const uint8_t *w,
                            float *sums) {
    switch ((rows * 8 + panels) * 4 + job->format) {
        NARROW_FEW(1, BFLOAT16) NARROW_FEW(1, SCALED8) NARROW_FEW(1, SCALED4)
#if PAIR == 2
        NARROW_FEW(2, BFLOAT16) NARROW_FEW(2, SCALED8) NARROW_FEW(2, SCALED4)
#endif
#if defined(__AVX512F__)
        NARROW_TALL(BFLOAT16) NARROW(12, 1, BFLOAT16) NARROW_TALL(SCALED8) NARROW_TALL(SCALED4)
        NARROW_MORE(1, BFLOAT16) NARROW_MORE(1, SCALED8) NARROW_MORE(1, SCALED4) NARROW_MORE(2, BFLOAT16)
#elif defined(__aarch64__)
        NARROW_MORE(1, BFLOAT16) NARROW_MORE(1, SCALED8) NARROW_MORE(1, SCALED4) NARROW(4, 2, BFLOAT16)
        NARROW(7, 1, BFLOAT16) NARROW(7, 1, SCALED8) NARROW(7, 1, SCALED4) NARROW(8, 1, BFLOAT16)
#endif
    }
}

/* A range of rows by a range of panels; `held` rows of sums are kept, where a tile has more than there are. */
typedef struct {
    int64_t row, rows, panel, panels, held;
} area;

/* out = sums + bias + residual. */
static void write_out(const linear_job *job, const area *of, const float *sums, float *to) {
    int64_t width = of->panels * NR, col = of->panel * NR, count = job->n - col < width ? job->n - col : width;
    for (int64_t r = 0; r < of->rows; r++, sums += width) {
        int64_t at = (of->row + r) * job->n + col;
        float *out = to + at;
        if (job->bias && job->residual)
            for (int64_t j = 0; j < count; j++) out[j] = sums[j] + job->bias[col + j] + job->residual[at + j];
        else if (job->bias)
            for (int64_t j = 0; j < count; j++) out[j] = sums[j] + job->bias[col + j];
        else if (job->residual)
            for (int64_t j = 0; j < count; j++) out[j] = sums[j] + job->residual[at + j];
        else
            memcpy(out, sums, (size_t)count * sizeof(float));
    }
}

/* Write what is left on the stack: one sum, or several where the job has only a run of the slices. */
static void finish(const linear_job *job, const area *of, const float *stack) {
    for (int64_t i = 0; i < job->left; i++)
        write_out(job, of, stack + i * of->held * of->panels * NR, job->out + i * job->rows * job->n);
}

/* Steps [k0, k0 + depth) of one panel as floats. */
static void widen(const linear_job *job, int64_t panel, int64_t k0, int64_t depth, float *to) {
    const uint8_t *from = job->w + panel * panel_bytes(job->format, job->k) + panel_bytes(job->format, k0);
    if (job->format == BFLOAT16) widen_bfloat16(from, depth, to);
    else if (job->format == SCALED8) widen_scaled8(from, depth, to);
    else widen_scaled4(from, depth, to);
}

/* Share the fetching of the next piece, so many bytes of each panel, evenly among the tiles of rows that use this one, so
 * that memory never rests. */
static void plan_fetch(weights *at, int64_t panels, int64_t bytes, int64_t tile_index, int64_t tiles, int64_t depth) {
    at->lines = (panels * bytes * 4 + 64 * depth * tiles - 1) / (64 * depth * tiles);
    at->next += bytes * tile_index / tiles / 64 * 64;
}

/* Steps [k0, k0 + depth) of k for all rows of the area: this piece of the weight is read once and used by every tile. */
INLINE void piece(const linear_job *job, const area *of, int64_t k0, int64_t depth, target to) {
    float wide[PAIR * K_BLOCK * NR] __attribute__((aligned(64)));
    int64_t k = job->k, tiles = (of->rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t whole = panel_bytes(job->format, k), bytes = panel_bytes(job->format, depth);
    const uint8_t *here = job->w + of->panel * whole + panel_bytes(job->format, k0);
    weights from = {(float *)here, k * NR, here, here + bytes, whole, 0};
    int how = job->format == FLOAT32 ? READS : job->format == BFLOAT16 ? WIDENS : HAS;
    if (k0 + depth == k) from.next += (of->panels - 1) * whole;
    if (how != READS) from.w = wide, from.ldw = depth * NR;
    if (how == HAS)
        for (int64_t p = 0; p < of->panels; p++) widen(job, of->panel + p, k0, depth, wide + p * depth * NR);
    float *sums = to.sums;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = of->rows * t / tiles, count = of->rows * (t + 1) / tiles - first;
        weights at = from;
        if (how != HAS && tiles > 1) plan_fetch(&at, of->panels, bytes, t, tiles, depth);
        to.sums = sums + first * of->panels * NR;
        run_tile(count, of->panels, t == 0 ? how : HAS, job->x + (of->row + first) * job->ldx + k0, job->ldx, at, depth, to);
    }
}

#if defined(__aarch64__)
/* The sums of a tile of 8 rows, or of its first 4, by one panel. */
INLINE void lane_tile(const float *x, const float *w, int64_t depth, int rows, target to) {
    float32x4_t acc[2 * LANE_ROWS];
    UNROLL for (int i = 0; i < 2 * rows; i++) acc[i] = to.first ? vdupq_n_f32(0.0f) : vld1q_f32(to.sums + i * VL);
    lane_steps(x, w, depth, rows, acc);
    for (; to.merges > 0; to.merges--) {
        to.sums -= to.below;
        UNROLL for (int i = 0; i < 2 * rows; i++) acc[i] = vaddq_f32(vld1q_f32(to.sums + i * VL), acc[i]);
    }
    UNROLL for (int i = 0; i < 2 * rows; i++) vst1q_f32(to.sums + i * VL, acc[i]);
}

/* The same for one panel and rows that are packed in lanes. */
static void lane_piece(const linear_job *job, const area *of, int64_t k0, int64_t depth, target to) {
    float wide[LANE_DEPTH * NR] __attribute__((aligned(64)));
    const float *w = (const float *)job->w + (of->panel * job->k + k0) * NR;
    if (job->format != FLOAT32) {
        widen(job, of->panel, k0, depth, wide);
        w = wide;
    }
    for (int64_t t = 0; t < of->held / LANE_ROWS; t++, to.sums += LANE_ROWS * NR) {
        const float *x = job->lanes + ((of->row / LANE_ROWS + t) * job->k + k0) * LANE_ROWS;
        if (of->rows - t * LANE_ROWS > LANE_ROWS / 2) lane_tile(x, w, depth, LANE_ROWS, to);
        else lane_tile(x, w, depth, LANE_ROWS / 2, to);
    }
}

static void lanes_task(void *arg, int64_t tile) {
    const linear_job *job = arg;
    int64_t row = tile * LANE_ROWS, rows = job->rows - row < LANE_ROWS ? job->rows - row : LANE_ROWS;
    pack_lanes(job->x + row * job->k, rows, job->k, job->lanes + row * job->k);
}

/* Pack the rows of x, where that pays and there is memory. For fewer rows a tile of 8 would do too much in vain. */
static void take_lanes(linear_job *job) {
    int64_t tiles = (job->rows + LANE_ROWS - 1) / LANE_ROWS;
    if (job->rows <= (job->format == FLOAT32 ? 5 : tall_rows(job))) return;
    job->lanes = malloc((size_t)(tiles * LANE_ROWS * job->k) * sizeof(float));
    if (!job->lanes) return;
    job->row_blocks = (job->rows + LANE_ROW_BLOCK - 1) / LANE_ROW_BLOCK;
    quire_parallel(lanes_task, job, tiles);
}
#endif

/* Steps of k in each piece of a slice: of even size, since a short piece costs as much to begin and end as a long one.
 * A weight of floats that one tile reads once need not be cut. */
static int64_t piece_depth(const linear_job *job, const area *of, int64_t depth) {
    int64_t most = K_BLOCK;
#if defined(__aarch64__)
    if (job->lanes) most = LANE_DEPTH;
#endif
    if (job->format == FLOAT32 && of->rows <= TILE_ROWS) return depth;
    int64_t pieces = (depth + most - 1) / most;
    return pieces < 2 ? depth : ((depth + pieces - 1) / pieces + GROUP - 1) / GROUP * GROUP;
}

INLINE void any_piece(const linear_job *job, const area *of, int64_t k0, int64_t depth, target to) {
#if defined(__aarch64__)
    if (job->lanes) {
        lane_piece(job, of, k0, depth, to);
        return;
    }
#endif
    piece(job, of, k0, depth, to);
}

static void product(const linear_job *job, const area *of) {
    int64_t size = of->held * of->panels * NR, k0 = 0;
    float stack[job->stack * size] __attribute__((aligned(64))), *top = stack;
    for (const slice *s = job->slices; s < job->slices + job->num_slices; s++) {
        int64_t block = piece_depth(job, of, s->end - k0);
        for (int first = 1; first || k0 < s->end; first = 0) {
            int64_t depth = k0 + block < s->end ? block : s->end - k0;
            int last = k0 + depth == s->end;
            any_piece(job, of, k0, depth, (target){top, size, last ? s->merges : 0, first});
            k0 += depth;
        }
        top += (1 - s->merges) * size;
    }
    finish(job, of, stack);
}

static void narrow_product(const linear_job *job, const area *of) {
    float stack[MAX_STACK * NARROW_ROWS * PAIR * NR] __attribute__((aligned(64)));
    const uint8_t *w = job->w + of->panel * panel_bytes(job->format, job->k);
    run_narrow_tile(job, of->rows, of->panels, job->x + of->row * job->ldx, w, stack);
    finish(job, of, stack);
}

static void linear_task(void *arg, int64_t task) {
    const linear_job *job = arg;
    int64_t block = task % job->row_blocks, panel = task / job->row_blocks * job->panel_step;
    int64_t end = panel + job->panel_step < job->panels ? panel + job->panel_step : job->panels;
    int64_t row = job->rows * block / job->row_blocks, rows = job->rows * (block + 1) / job->row_blocks - row;
#if defined(__aarch64__)
    if (job->lanes) {
        int64_t tiles = (job->rows + LANE_ROWS - 1) / LANE_ROWS, first = tiles * block / job->row_blocks;
        int64_t held = (tiles * (block + 1) / job->row_blocks - first) * LANE_ROWS;
        row = first * LANE_ROWS;
        rows = held < job->rows - row ? held : job->rows - row;
        for (; panel < end; panel++) product(job, &(area){row, rows, panel, 1, held});
        return;
    }
#endif
    for (int64_t step; panel < end; panel += step) {
        int narrow = rows <= job->narrow_rows;
        step = rows <= FEW && !narrow && panel + WIDE <= end ? WIDE : panel + PAIR <= end ? PAIR : 1;
        /* scales, or more rows, take the registers of a second panel */
        if (narrow && rows > (job->format == BFLOAT16 ? NARROW_ROWS : FEW)) step = 1;
        area of = {row, rows, panel, step, rows};
        if (narrow) narrow_product(job, &of);
        else product(job, &of);
    }
}

/* Decide how many rows' weights are widened in registers. Rows of x that lie a multiple of 4 KiB apart share a set of the
 * first cache and push each other out where more than NARROW_ROWS are read together: then they are copied apart. Returns
 * the memory of that copy, or NULL. */
static float *plan_narrow(linear_job *job) {
    int64_t tall = tall_rows(job);
    job->narrow_rows = job->format == FLOAT32 ? 0 : NARROW_ROWS;
    if (job->format == FLOAT32 || job->rows <= NARROW_ROWS || job->rows > tall) return NULL;
    float *copy = NULL;
    if (job->k % 1024 == 0) {
        int64_t apart = job->k + 16;
        copy = malloc((size_t)(job->rows * apart) * sizeof(float));
        if (!copy) return NULL;
        for (int64_t r = 0; r < job->rows; r++)
            memcpy(copy + r * apart, job->x + r * job->k, (size_t)job->k * sizeof(float));
        job->x = copy, job->ldx = apart;
    }
    job->narrow_rows = tall;
    return copy;
}

/* Cut a job into about `pieces` tasks for each block of rows; returns how many they are. */
static int64_t cut_tasks(linear_job *job, int64_t pieces) {
    int64_t unit = job->rows <= FEW && job->format == FLOAT32 ? WIDE : PAIR;
    int64_t step = (job->panels + pieces - 1) / pieces, chunk = CHUNK_BYTES / (job->k * NR * 4);
    if (job->row_blocks > 1 && chunk < step) step = chunk > 1 ? chunk : 1;
    job->panel_step = (step + unit - 1) / unit * unit;
    return (job->panels + job->panel_step - 1) / job->panel_step * job->row_blocks;
}

/* out [rows, n] = x [rows, k] times the packed weight, + bias, + residual, in that order. Without slices all of k is one.
 * Slices that are only a run of a sum's leave several nodes of its tree: then out is [nodes, rows, n]. */
EXPORT void quire_linear(const float *x, const void *w, int32_t format, const float *bias, const float *residual,
                         float *out, int64_t rows, int64_t n, int64_t k, const slice *slices, int64_t num_slices) {
    if (rows == 0) return;
    if (format == INTEGER) {
        quire_int_linear(x, w, bias, residual, out, rows, n, k, slices, num_slices);
        return;
    }
    slice all = {k, 0};
    linear_job job = {x, w, bias, residual, out, rows, n, k, format, &all, 1, 0, 0, (n + NR - 1) / NR, 1, 1, k, 0, NULL};
    if (num_slices) job.slices = slices, job.num_slices = num_slices;
    for (int64_t i = 0; i < job.num_slices; job.left -= job.slices[i++].merges)
        if (++job.left > job.stack) job.stack = job.left;
    job.row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#if defined(__aarch64__)
    take_lanes(&job);
#endif
    float *spread = plan_narrow(&job);
    int64_t threads = quire_get_num_threads(), pieces = threads * 8 / job.row_blocks;
    if (threads == 1 || rows * n * k < 100000 || pieces < 1) pieces = 1;
    quire_parallel(linear_task, &job, cut_tasks(&job, pieces));
    free(spread);
    free(job.lanes);
}

/* The columns of `count` panels from a multiple of it on, of up to ROW_BLOCK rows, on this thread. */
void quire_linear_panels(const float *x, const void *w, int32_t format, float *out, int64_t rows, int64_t n, int64_t k,
                         int64_t panel, int64_t count) {
    slice all = {k, 0};
    linear_job job = {x, w, NULL, NULL, out, rows, n, k, format, &all, 1, 1, 1, (n + NR - 1) / NR, 1, count, k, 0, NULL};
    float *spread = plan_narrow(&job);
    linear_task(&job, panel / count);
    free(spread);
}

int64_t quire_panel_columns(void) { return NR; }

RECORDED(quire_linear, PTR(0), PTR(1), INT32(2), PTR(3), PTR(4), PTR(5), INT(6), INT(7), INT(8), PTR(9), INT(10))

/* One of several weights of the same shape, and the rows that go through it. */
typedef struct {
    const void *w;
    const float *bias;
    int64_t format, rows;
} linear_group;

typedef struct {
    linear_job *jobs;
    int64_t *first_task; /* [count + 1] */
    int64_t count;
} grouped_job;

static void grouped_task(void *arg, int64_t task) {
    const grouped_job *all = arg;
    int64_t low = 0, high = all->count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (all->first_task[middle] <= task) low = middle;
        else high = middle;
    }
    linear_task(&all->jobs[low], task - all->first_task[low]);
}

/* out [rows, n] of x [rows, k], whose rows stand in groups, one after the other, each with a weight [n, k] of its own (an
 * expert's, a head's). An element has the bits that quire_linear gives it. Returns 0, or 1 for want of memory. */
EXPORT int32_t quire_grouped_linear(const float *x, const linear_group *groups, int64_t count, float *out, int64_t n,
                                    int64_t k) {
    grouped_job all = {malloc((size_t)count * sizeof *all.jobs), malloc((size_t)(count + 1) * sizeof *all.first_task), 0};
    if (!all.jobs || !all.first_task) {
        free(all.jobs);
        free(all.first_task);
        return 1;
    }
    slice whole = {k, 0};
    int64_t used = 0, pieces, row = 0, tasks = 0;
    for (int64_t g = 0; g < count; g++) used += groups[g].rows > 0;
    pieces = used ? (quire_get_num_threads() * 8 + used - 1) / used : 1;
    if (quire_get_num_threads() == 1) pieces = 1;
    for (int64_t g = 0; g < count; row += groups[g++].rows) {
        int64_t rows = groups[g].rows;
        if (rows == 0) continue;
        if (groups[g].format == INTEGER) {
            quire_int_linear(x + row * k, groups[g].w, groups[g].bias, NULL, out + row * n, rows, n, k, NULL, 0);
            continue;
        }
        linear_job *job = &all.jobs[all.count];
        *job = (linear_job){x + row * k, groups[g].w, groups[g].bias, NULL, out + row * n, rows, n, k,
                            (int32_t)groups[g].format, &whole, 1, 1, 1, (n + NR - 1) / NR,
                            (rows + ROW_BLOCK - 1) / ROW_BLOCK, 1, k, groups[g].format == FLOAT32 ? 0 : NARROW_ROWS,
                            NULL};
        all.first_task[all.count++] = tasks;
        tasks += cut_tasks(job, pieces);
    }
    all.first_task[all.count] = tasks;
    quire_parallel(grouped_task, &all, tasks);
    free(all.jobs);
    free(all.first_task);
    return 0;
}
