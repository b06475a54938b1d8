/* Products of integer weights and activations rounded to int8: y = x W^T, every element in one fixed order.
 *
 * The rows of x become int8, each UNIT columns with a scale of their own (the largest magnitude is 127). Integer sums are
 * exact; what rounds is one chain of fused multiply-adds over the steps of k for each element (int_tile), and the
 * binary tree over slices, so an element's bits depend on its own row and column only, on every machine. */
#include "export.h"
#include "integer.h"
#include "pool.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#define ROWS_AT_ONCE 256 /* rows of x that are int8 at the same time */
#define ROW_BLOCK 256     /* rows of a task */
#define MAX_STACK 16     /* as in linear.c */
#define AHEAD 2048       /* bytes that are fetched before they are unpacked */
/* With fewer tiles beside them the next panels would come in too long a burst, and codes of 8 bits are not worth a copy. */
#define LEAST_TILES 4
#define LEAST_TASK 100000 /* products that are worth a task */
#define TINY 1e-30f      /* a group of smaller activations is zero: the inverse of its scale would overflow */

/* ---- the plain kernel: the reference, and what runs where no other does */

static float scale_at(const uint8_t *p, int64_t bytes, int64_t i) {
    _Float16 half;
    float x;
    if (bytes == 2) {
        memcpy(&half, p + i * 2, 2);
        return (float)half;
    }
    memcpy(&x, p + i * 4, 4);
    return x;
}

static int code_at(const uint8_t *codes, int mode, int64_t quad, int64_t column, int64_t i) {
    if (mode != NIBBLES) return codes[quad * QUAD_BYTES + column * 4 + i];
    return codes[quad / 2 * QUAD_BYTES + column * 4 + i] >> (quad % 2 * 4) & 15;
}

static void plain_tile(const int_tile *t, int rows, int panels, int mode, int offsets) {
    int64_t step_bytes = t->quads * QUAD_BYTES / (mode == NIBBLES ? 2 : 1);
    for (int r = 0; r < rows; r++)
        for (int column = 0; column < panels * COLS; column++) {
            int64_t panel = column / COLS, j = column % COLS;
            float acc = 0.0f;
            for (int64_t s = t->first; s < t->last; s++) {
                const uint8_t *codes = t->codes + panel * t->codes_stride + s * step_bytes;
                const uint8_t *scales = t->scales + panel * t->scales_stride + s / t->steps_of_group * t->scale_row;
                int32_t sum = t->init[r * t->row_stride + s * t->step_stride];
                for (int64_t i = 0; i < t->quads * 4; i++)
                    sum += code_at(codes, mode, i / 4, j, i % 4) * t->x[r * t->k + s * t->quads * 4 + i];
                acc = fmaf(scale_at(scales, t->scale_bytes, j) * t->dx[r * t->row_stride + s * t->step_stride], (float)sum, acc);
                if (offsets) acc = fmaf(scale_at(scales, t->scale_bytes, COLS + j), t->shift[r * t->row_stride + s * t->step_stride], acc);
            }
            t->sums[r * panels * COLS + column] = acc;
        }
}

static void plain_dots(const code_dots *d, int rows) {
    for (int r = 0; r < rows; r++)
        for (int64_t key = 0; key < d->groups * DOT_KEYS; key++) {
            const uint8_t *codes = d->keys[key / DOT_KEYS] + key % DOT_KEYS * 4;
            int32_t sum = d->init[r];
            for (int64_t i = 0; i < d->quads * 4; i++)
                sum += codes[i / 4 * d->step + i % 4] * d->q[r * d->q_stride + i];
            d->dots[r * d->dots_stride + key] = sum;
        }
}

static const int_kernel plain = {"plain", plain_tile, MAX_TILE_ROWS, MAX_TILE_PANELS, 0, plain_dots};

/* ---- which kernel runs */

static const int_kernel *chosen;
static int asked_for; /* by name: then it runs for few rows too */

static const int_kernel *kernel_at(int32_t index) {
    switch (index) {
        case 0: return &plain;
        case 1: return quire_int_avx2();
        case 2: return quire_int_avxvnni();
        case 3: return quire_int_avx512vnni();
        case 4: return quire_int_dotprod();
        case 5: return quire_int_i8mm();
        case 6: return quire_int_amx();
    }
    return NULL;
}

#define NUM_KERNELS 7

static const int_kernel *best_kernel(void) {
    for (int32_t i = NUM_KERNELS; !chosen && i-- > 0;) chosen = kernel_at(i);
    return chosen;
}

static const int_kernel *kernel_for(int64_t rows) {
    const int_kernel *best = best_kernel();
    return rows < best->least && !asked_for ? best->few : best;
}

/* The name of the kernel that runs from now on: the one of this index, the best for -1. NULL: there is no such one here. */
EXPORT const char *quire_int_kernel(int32_t index) {
    if (index >= 0 && !kernel_at(index)) return NULL;
    asked_for = index >= 0;
    chosen = asked_for ? kernel_at(index) : NULL;
    return best_kernel()->name;
}

void quire_code_dots(const code_dots *d, int rows) { best_kernel()->dots(d, rows); }

int32_t quire_code_bias(void) { return best_kernel()->wide_bias; }

/* ---- activations */

/* One call: rows of x as int8, and what each part's tiles need of them. */
typedef struct {
    const int_kernel *kernel;
    const float *x;
    int64_t rows, k, n;
    int8_t *q;       /* [rows][k] */
    float *scale;    /* [rows][k / UNIT] */
    int32_t *sum;    /* [rows][2 * k / UNIT]: of each half of a unit */
    float *dx;       /* for the part at hand: see int_tile */
    float *shift;
    int32_t *init;
    const int_part *part;
    const uint8_t *panels;
    int64_t bias_of_codes; /* what the kernel subtracts from a code */
    const int_slice *slices;
    int64_t num_slices, left;
    const float *bias, *residual;
    float *out;
    int64_t first_row, all_rows; /* where the rows lie in out */
    int64_t row_blocks, panel_step, num_panels;
} int_job;

/* The scale of a unit whose largest magnitude has these bits; returns its inverse. */
INLINE float unit_scale(int32_t largest, float *scale) {
    float top;
    memcpy(&top, &largest, 4);
    int finite = largest < 0x7F800000, some = finite && !(top < TINY);
    float inverse = some ? 127.0f / top : 0.0f;
    *scale = !finite ? NAN : some ? top / 127.0f : 0.0f;
    return inverse;
}

/* q = round(x / scale): the same on every machine, since each operation rounds once, ties to even. A unit with a number
 * that is not finite has the scale NaN. Magnitudes are compared as integers. */
#if defined(__aarch64__)
/* The lower halves of x / scale + 1.5 * 2^23, whose lowest bytes are the codes: nothing has to be converted. */
INLINE uint8x16_t eight_codes(const float *x, float inverse) {
    const float32x4_t shift = vdupq_n_f32(12582912.0f);
    float32x4_t low = vaddq_f32(vmulq_n_f32(vld1q_f32(x), inverse), shift);
    float32x4_t high = vaddq_f32(vmulq_n_f32(vld1q_f32(x + 4), inverse), shift);
    return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
}

static void quantize_unit(const float *x, int8_t *q, float *scale, int32_t *sums) {
    uint32x4_t largest[UNIT / 4];
    for (int i = 0; i < UNIT / 4; i++) largest[i] = vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i * 4)));
    for (int count = UNIT / 8; count > 0; count /= 2)
        for (int i = 0; i < count; i++) largest[i] = vmaxq_u32(largest[i], largest[i + count]);
    float inverse = unit_scale((int32_t)vmaxvq_u32(largest[0]), scale);
    for (int i = 0; i < 2; i++, x += UNIT / 2) {
        int8x16_t codes = vreinterpretq_s8_u8(vuzp1q_u8(eight_codes(x, inverse), eight_codes(x + 8, inverse)));
        vst1q_s8(q + i * 16, codes);
        sums[i] = vaddlvq_s8(codes);
    }
}
#else
typedef int8_t bytes_v __attribute__((vector_size(VL)));

/* Numbers plus 1.5 * 2^23 are integers in their last bits: nothing has to be converted. */
static void quantize_unit(const float *x, int8_t *q, float *scale, int32_t *sums) {
    vi half[2][SUB];
    UNROLL for (int i = 0; i < SUB; i++) {
        vi a = load_i(x + i * VL) & set_i(0x7FFFFFFF), b = load_i(x + LANES + i * VL) & set_i(0x7FFFFFFF), above = a > b;
        half[0][i] = (above & a) | (~above & b);
    }
    const vf inverse = set_v(unit_scale(largest_i(half[0]), scale)), shift = set_v(12582912.0f);
    UNROLL for (int h = 0; h < 2; h++, x += LANES, q += LANES) {
        UNROLL for (int i = 0; i < SUB; i++) {
            half[h][i] = (vi)(load_v(x + i * VL) * inverse + shift) - set_i(0x4B400000);
            bytes_v codes = __builtin_convertvector(half[h][i], bytes_v);
            memcpy(q + i * VL, &codes, sizeof codes);
        }
        sums[h] = sum_i(half[h]);
    }
}
#endif

static void quantize_row(void *arg, int64_t r) {
    const int_job *job = arg;
    int64_t units = job->k / UNIT;
    for (int64_t u = 0; u < units; u++)
        quantize_unit(job->x + r * job->k + u * UNIT, job->q + r * job->k + u * UNIT, job->scale + r * units + u,
                      job->sum + (r * units + u) * 2);
}

/* From step to step of what the tiles need of the rows, where a kernel takes that step by step. A little more than the
 * rows: a power of two would put the steps of a tile into the same few lines of a cache. */
static int64_t stride_of_steps(const int_job *job) { return job->rows + AMX_ROWS; }

/* What the tiles of a part need of each row. */
static void prepare_row(void *arg, int64_t r) {
    const int_job *job = arg;
    int64_t units = job->k / UNIT, halves = step_of(job->part) == UNIT ? 1 : 2;
    int32_t zero = (int32_t)(job->bias_of_codes - job->part->zero);
    for (int64_t s = 0; s < units * halves; s++) {
        const int32_t *sums = job->sum + r * units * 2;
        float scale = job->scale[r * units + s / halves];
        int32_t sum = halves == 1 ? sums[2 * s] + sums[2 * s + 1] : sums[s];
        int64_t at = job->kernel->steps_first ? s * stride_of_steps(job) + r : r * units * halves + s;
        job->dx[at] = scale;
        job->init[at] = zero * sum;
        job->shift[at] = scale * (float)sum;
        /* AMX takes rows in fours: what stands after the last must not be slow to multiply with. */
        if (job->kernel->steps_first && r == job->rows - 1)
            for (int64_t beyond = at + 1; beyond < at + 4; beyond++)
                job->dx[beyond] = job->shift[beyond] = 0.0f, job->init[beyond] = 0;
    }
}

static void quantize_and_prepare_row(void *arg, int64_t r) {
    quantize_row(arg, r);
    prepare_row(arg, r);
}

static void for_rows(int_job *job, task_fn fn) {
    if (job->rows * job->k < 16384)
        for (int64_t r = 0; r < job->rows; r++) fn(job, r);
    else
        quire_parallel(fn, job, job->rows);
}

/* ---- tasks */

/* The codes of a step, one a byte. Shifts of whole words: what comes from a neighbouring byte is masked. */
INLINE void unpack_step(const uint8_t *from, uint8_t *to, const int quads, const int bits) {
    const vi nibbles = set_i(0x0F0F0F0F), more = set_i(bits == 5 ? 0x10101010 : 0x30303030);
    const uint8_t *high = from + quads / 2 * QUAD_BYTES;
    UNROLL for (int pair = 0; pair < quads / 2; pair++)
        UNROLL for (int i = 0; i < QUAD_BYTES; i += VL * 4) {
            vi both = load_i(from + pair * QUAD_BYTES + i), even = both & nibbles, odd = both >> 4 & nibbles;
            if (bits == 5) {
                vi fifth = load_i(high + i);
                even |= (pair < 2 ? fifth << (4 - 2 * pair) : fifth >> (2 * pair - 4)) & more;
                odd |= (pair < 2 ? fifth << (3 - 2 * pair) : fifth >> (2 * pair - 3)) & more;
            } else if (bits == 6) {
                vi two = load_i(high + pair / 2 * QUAD_BYTES + i);
                even |= (pair % 2 ? two : two << 4) & more;
                odd |= (pair % 2 ? two >> 2 : two << 2) & more;
            }
            memcpy(to + pair * 2 * QUAD_BYTES + i, &even, sizeof even);
            memcpy(to + (pair * 2 + 1) * QUAD_BYTES + i, &odd, sizeof odd);
        }
}

INLINE void unpack_steps(const uint8_t *from, uint8_t *to, int64_t steps, int64_t size, const int quads, const int bits) {
    for (int64_t s = 0; s < steps; s++, from += size, to += quads * QUAD_BYTES) {
        for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(from + line + AHEAD);
        unpack_step(from, to, quads, bits);
    }
}

#if defined(__aarch64__)
/* Codes of 8 bits less 128, as every tile would make them. */
static void shift_codes(const uint8_t *from, uint8_t *to, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(from + i + AHEAD);
        for (int64_t j = i; j < i + 64; j += 16) vst1q_u8(to + j, veorq_u8(vld1q_u8(from + j), vdupq_n_u8(128)));
    }
}
#endif

/* A panel's codes, one a byte. */
static void unpack_codes(const int_job *job, const uint8_t *panel, uint8_t *to) {
    const int_part *p = job->part;
    int64_t steps = job->k / step_of(p), size = code_bytes(p);
    const uint8_t *from = panel + scales_bytes(p, job->k);
    switch (p->bits * 2 + (step_of(p) == UNIT)) {
        case 4 * 2: unpack_steps(from, to, steps, size, UNIT / 8, 4); break;
        case 4 * 2 + 1: unpack_steps(from, to, steps, size, UNIT / 4, 4); break;
        case 5 * 2: unpack_steps(from, to, steps, size, UNIT / 8, 5); break;
        case 5 * 2 + 1: unpack_steps(from, to, steps, size, UNIT / 4, 5); break;
        case 6 * 2: unpack_steps(from, to, steps, size, UNIT / 8, 6); break;
        case 6 * 2 + 1: unpack_steps(from, to, steps, size, UNIT / 4, 6); break;
#if defined(__aarch64__)
        default: shift_codes(from, to, steps * size);
#endif
    }
}

/* Scales of bytes as floats: exact, since half precision and a byte have 19 bits together. The first codes of the panel
 * come meanwhile. */
INLINE void multiply_blocks(const uint8_t *bytes, const uint8_t *codes, int64_t blocks, const int groups, const int kinds,
                            float *to) {
    for (int64_t block = 0; block < blocks; block++, codes += 2 * 64) {
        vf numbers[2 * COLS / VL];
        UNROLL for (int i = 0; i < kinds * COLS / VL; i++, bytes += VL * 2) numbers[i] = halves_to_float(bytes);
        __builtin_prefetch(codes), __builtin_prefetch(codes + 64);
        UNROLL for (int g = 0; g < groups; g++)
            UNROLL for (int i = 0; i < kinds * COLS / VL; i++, bytes += VL, to += VL)
                store_v(to, to_float(load_i8(bytes)) * numbers[i]);
    }
}

static void multiply_scales(const int_part *p, int64_t k, const uint8_t *panel, float *to) {
    const uint8_t *codes = panel + scales_bytes(p, k);
    switch (BLOCK / p->group * 2 + p->offsets) {
        case BLOCK / 16 * 2: multiply_blocks(panel, codes, k / BLOCK, BLOCK / 16, 1, to); break;
        case BLOCK / 16 * 2 + 1: multiply_blocks(panel, codes, k / BLOCK, BLOCK / 16, 2, to); break;
        case BLOCK / UNIT * 2: multiply_blocks(panel, codes, k / BLOCK, BLOCK / UNIT, 1, to); break;
        case BLOCK / UNIT * 2 + 1: multiply_blocks(panel, codes, k / BLOCK, BLOCK / UNIT, 2, to); break;
    }
}

/* A panel's scales, and offsets, as floats. */
static void unpack_scales(const int_job *job, const uint8_t *panel, float *to) {
    int64_t count = job->k / job->part->group * COLS * (1 + job->part->offsets);
    if (job->part->scale_bytes == 1) multiply_scales(job->part, job->k, panel, to);
    else if (job->part->scale_bytes == 4) memcpy(to, panel, (size_t)count * 4);
    else for (int64_t i = 0; i < count; i += VL) store_v(to + i, halves_to_float(panel + i * 2));
}

static void write_rows(const int_job *job, int64_t row, int64_t rows, int64_t panel, int64_t panels, const float *sums,
                       float *out) {
    int64_t width = panels * COLS, col = panel * COLS, count = job->part->n - col < width ? job->part->n - col : width;
    int64_t place = job->part->start + col;
    for (int64_t r = 0; r < rows; r++, sums += width) {
        int64_t at = (job->first_row + row + r) * job->n + place;
        int64_t j = 0;
        for (; j + VL <= count; j += VL) {
            vf y = load_v(sums + j);
            if (job->bias) y = y + load_v(job->bias + place + j);
            if (job->residual) y = y + load_v(job->residual + at + j);
            store_v(out + at + j, y);
        }
        for (; j < count; j++) {
            float y = sums[j];
            if (job->bias) y = y + job->bias[place + j];
            if (job->residual) y = y + job->residual[at + j];
            out[at + j] = y;
        }
    }
}

/* What a tile will write and add lies far away where there are many rows: it comes while the tile is summed. */
static void fetch_rows(const int_job *job, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t p = panel; p < panel + panels; p++) {
            int64_t at = (job->first_row + row + r) * job->n + job->part->start + p * COLS;
            __builtin_prefetch(job->out + at, 1);
            if (job->residual) __builtin_prefetch(job->residual + at);
        }
}

/* A tile's slices, one after the other, added in their tree. */
static void run_tile(const int_job *job, int_tile *t, int64_t row, int64_t rows, int64_t panel, int64_t panels, int mode) {
    const int64_t size = rows * panels * COLS;
    const int shift = __builtin_ctzll((unsigned long long)step_of(job->part)); /* 16 or 32 */
    float stack[MAX_STACK * MAX_TILE] __attribute__((aligned(64)));
    t->x = job->q + row * job->k;
    t->dx = job->dx + row * t->row_stride;
    t->init = job->init + row * t->row_stride;
    t->shift = job->shift + row * t->row_stride;
    t->sums = stack;
    t->slices = job->slices;
    t->last = 0;
    fetch_rows(job, row, rows, panel, panels);
    if (job->kernel->all_slices) job->kernel->tile(t, (int)rows, (int)panels, mode, (int)job->part->offsets);
    else for (const int_slice *s = job->slices; s < job->slices + job->num_slices; s++, t->sums += size) {
        t->first = t->last;
        t->last = s->end >> shift;
        job->kernel->tile(t, (int)rows, (int)panels, mode, (int)job->part->offsets);
        for (int64_t merges = s->merges; merges > 0; merges--) {
            t->sums -= size;
            for (int64_t i = 0; i < size; i++) t->sums[i] = t->sums[i] + t->sums[size + i];
        }
    }
    for (int64_t i = 0; i < job->left; i++)
        write_rows(job, row, rows, panel, panels, stack + i * size, job->out + i * job->all_rows * job->n);
}

/* Rows [row, row + rows) by some panels. Codes that are not what a tile reads, and what several tiles read, are
 * unpacked. */
static void run_area(const int_job *job, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    const int_part *p = job->part;
    int64_t step = step_of(p), bytes = int_panel_bytes(p, job->k), most = job->kernel->rows;
    const uint8_t *from = job->panels + panel * bytes;
    int_tile t = {.k = job->k, .row_stride = job->k / step, .step_stride = 1, .quads = step / 4, .steps_of_group = p->group / step};
    t.zero_init = job->bias_of_codes == p->zero;
    if (job->kernel->steps_first) t.row_stride = 1, t.step_stride = stride_of_steps(job);
    int direct = p->bits == 4 && rows <= most && !job->kernel->bytes_only;
    int mode = p->bits == 8 ? WIDE : direct ? NIBBLES : BYTES;
#if defined(__aarch64__)
    if (mode == WIDE && job->kernel->wide_bias && rows > LEAST_TILES * most) mode = BYTES;
#endif
    uint8_t codes[mode == BYTES ? panels * job->k * COLS : 1] __attribute__((aligned(64)));
    t.codes = from + scales_bytes(p, job->k), t.codes_stride = bytes;
    t.scales = from, t.scales_stride = bytes, t.scale_bytes = p->scale_bytes, t.scale_row = scale_row(p);
    int64_t scales_count = job->k / p->group * COLS * (1 + p->offsets);
    int as_floats = rows > most || p->scale_bytes == 1;
    float scales[as_floats ? panels * scales_count : 1] __attribute__((aligned(64)));
    if (mode == BYTES) {
        for (int64_t i = 0; i < panels; i++) unpack_codes(job, from + i * bytes, codes + i * job->k * COLS);
        t.codes = codes, t.codes_stride = job->k * COLS;
    }
    if (as_floats) {
        for (int64_t i = 0; i < panels; i++) unpack_scales(job, from + i * bytes, scales + i * scales_count);
        t.scales = (const uint8_t *)scales, t.scales_stride = scales_count * 4;
        t.scale_bytes = 4, t.scale_row = COLS * 4 * (1 + p->offsets);
    }
    /* Divisions before the loop: one takes as long as a step of a tile. */
    int64_t tiles = (rows + most - 1) / most, even = rows / tiles, more = rows % tiles;
    const uint8_t *next = from + panels * bytes, *const end = next + panels * bytes;
    const int64_t share = tiles < LEAST_TILES ? 0 : round_up(panels * bytes / tiles, 64);
    if (job->kernel->begin) job->kernel->begin(t.quads);
    for (int64_t i = 0; i < tiles; i++) {
        int64_t count = even + (i < more);
        /* The panels after these, a share of them beside each tile. */
        for (const uint8_t *stop = next + share; next < stop && next < end; next += 64) __builtin_prefetch(next, 0, 2);
        run_tile(job, &t, row, count, panel, panels, mode);
        row += count;
    }
    if (job->kernel->end) job->kernel->end();
}

static void int_task(void *arg, int64_t task) {
    const int_job *job = arg;
    int64_t block = task % job->row_blocks, panel = task / job->row_blocks * job->panel_step;
    int64_t end = panel + job->panel_step < job->num_panels ? panel + job->panel_step : job->num_panels;
    int64_t row = job->rows * block / job->row_blocks, rows = job->rows * (block + 1) / job->row_blocks - row;
    for (int64_t step; panel < end; panel += step) {
        step = panel + job->kernel->panels <= end ? job->kernel->panels : end - panel;
        run_area(job, row, rows, panel, step);
    }
}

/* The first part finds its rows as floats. */
static void run_part(int_job *job, const uint8_t *weight, const int_part *part, int first) {
    job->part = part;
    job->panels = weight + part->at;
    job->bias_of_codes = part->bits == 8 ? job->kernel->wide_bias : 0;
    for_rows(job, first ? quantize_and_prepare_row : prepare_row);
    job->num_panels = (part->n + COLS - 1) / COLS;
    job->row_blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t threads = quire_get_num_threads(), pieces = threads * 8 / job->row_blocks, unit = job->kernel->panels;
    if (threads == 1 || job->rows * part->n * job->k < LEAST_TASK || pieces < 1) pieces = 1;
    int64_t step = round_up((job->num_panels + pieces - 1) / pieces, unit);
    /* Rather too many tasks than too few: nine are a bad number for two threads. */
    if (pieces > 1 && step > unit && job->rows * (step - unit) * COLS * job->k >= LEAST_TASK) step -= unit;
    job->panel_step = step > 0 ? step : unit;
    quire_parallel(int_task, job, (job->num_panels + job->panel_step - 1) / job->panel_step * job->row_blocks);
}

/* ---- room for the activations: each calling thread keeps what its largest call needed */

static pthread_key_t room_key;
static pthread_once_t room_once = PTHREAD_ONCE_INIT;

static void make_room_key(void) { pthread_key_create(&room_key, free); }

static uint8_t *room(int64_t bytes) {
    pthread_once(&room_once, make_room_key);
    int64_t *kept = pthread_getspecific(room_key);
    if (!kept || *kept < bytes) {
        free(kept);
        kept = aligned_alloc(64, (size_t)round_up(bytes + 64, 64));
        pthread_setspecific(room_key, kept);
        if (!kept) abort(); /* a few megabytes: as with a stack that cannot grow, there is nobody to tell */
        *kept = bytes;
    }
    return (uint8_t *)kept + 64;
}

static void place_rows(int_job *job, int64_t rows) {
    rows += AMX_ROWS; /* which reads rows that are not there, and leaves what comes of them */
    int64_t halves = rows * job->k / UNIT * 2;
    uint8_t *at = room(round_up(rows * job->k, 64) + halves * 4 * 5);
    job->q = (int8_t *)at;
    job->sum = (int32_t *)(at + round_up(rows * job->k, 64));
    job->init = job->sum + halves;
    job->dx = (float *)(job->init + halves);
    job->shift = job->dx + halves;
    job->scale = job->shift + halves;
}

/* As quire_linear, of a weight in integer parts. */
void quire_int_linear(const float *x, const void *w, const float *bias, const float *residual, float *out, int64_t rows,
                      int64_t n, int64_t k, const void *slices, int64_t num_slices) {
    const int_weight *weight = w;
    int_slice all = {k, 0};
    int_job job = {.k = k, .n = n, .slices = num_slices ? slices : &all, .num_slices = num_slices ? num_slices : 1};
    job.bias = bias, job.residual = residual, job.out = out, job.all_rows = rows;
    for (int64_t i = 0; i < job.num_slices; i++) job.left += 1 - job.slices[i].merges;
    for (int64_t row = 0; row < rows; row += job.rows) {
        job.rows = rows - row < ROWS_AT_ONCE ? rows - row : ROWS_AT_ONCE;
        job.x = x + row * k, job.first_row = row;
        job.kernel = kernel_for(job.rows);
        place_rows(&job, job.rows);
        for (int64_t i = 0; i < weight->num_parts; i++) run_part(&job, w, weight->parts + i, i == 0);
    }
}
