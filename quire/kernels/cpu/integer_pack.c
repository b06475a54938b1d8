/* Packing integer weights into panels, rounding floats to integer codes, and reading rows back. */
#include "export.h"
#include "integer.h"
#include "pool.h"

#include <float.h>
#include <math.h>

typedef struct {
    const uint8_t *codes;
    const float *scales, *offsets;
    uint8_t *to;
    int_part part;
    int64_t k;
} int_pack_job;

static void put_scale(uint8_t *to, int64_t bytes, int64_t i, float x) {
    _Float16 half = (_Float16)x;
    if (bytes == 2) memcpy(to + i * 2, &half, 2);
    else memcpy(to + i * 4, &x, 4);
}

/* The codes of row j of a panel: four of them, a quad, at a time. The panel's codes are zero before the first row. */
static void put_row(const int_part *p, uint8_t *codes, int64_t k, int64_t j, const uint8_t *row) {
    int64_t step = step_of(p), quads = step / 4, bytes = code_bytes(p);
    for (int64_t s = 0; s < k / step; s++, codes += bytes, row += step) {
        uint32_t *to = (uint32_t *)(void *)codes + j, *high = (uint32_t *)(void *)(codes + quads / 2 * QUAD_BYTES) + j;
        for (int64_t q = 0; q < quads; q++) {
            uint32_t quad;
            memcpy(&quad, row + q * 4, 4);
            if (p->bits == 8) {
                to[q * COLS] = quad;
                continue;
            }
            to[q / 2 * COLS] |= (quad & 0x0f0f0f0f) << (q % 2 * 4);
            if (p->bits == 5) *high |= (quad >> 4 & 0x01010101) << q;
            if (p->bits == 6) high[q / 4 * COLS] |= (quad >> 4 & 0x03030303) << (q % 4 * 2);
        }
    }
}

static int get_code(const int_part *p, const uint8_t *step, int64_t i, int64_t j) {
    int64_t quads = step_of(p) / 4, quad = i / 4, byte = j * 4 + i % 4;
    if (p->bits == 8) return step[quad * QUAD_BYTES + byte];
    const uint8_t *high = step + quads / 2 * QUAD_BYTES;
    int code = step[quad / 2 * QUAD_BYTES + byte] >> (quad % 2 * 4) & 15;
    if (p->bits == 5) code |= (high[byte] >> quad & 1) << 4;
    if (p->bits == 6) code |= (high[quad / 4 * QUAD_BYTES + byte] >> (quad % 4 * 2) & 3) << 4;
    return code;
}

/* The scales and offsets of row j of a panel. Those of one byte come as [numbers of the blocks][multiples]. */
static void put_scales(const int_pack_job *job, uint8_t *to, int64_t row, int64_t j) {
    const int_part *p = &job->part;
    const int64_t groups = job->k / p->group, blocks = job->k / BLOCK, of_block = BLOCK / p->group;
    for (int64_t kind = 0; kind <= p->offsets; kind++) {
        const float *from = kind ? job->offsets : job->scales;
        int64_t at = kind * COLS + j;
        if (p->scale_bytes != 1) {
            for (int64_t g = 0; g < groups; g++) put_scale(to + g * scale_row(p), p->scale_bytes, at, from[row * groups + g]);
            continue;
        }
        from += row * (blocks + groups);
        for (int64_t block = 0; block < blocks; block++) {
            uint8_t *bytes = to + block_scales(p, block);
            put_scale(bytes - COLS * 2 * (1 + p->offsets), 2, at, from[block]);
            for (int64_t g = 0; g < of_block; g++)
                bytes[g * scale_row(p) + at] = (uint8_t)(int8_t)from[blocks + block * of_block + g];
        }
    }
}

static void pack_panel(void *arg, int64_t panel) {
    const int_pack_job *job = arg;
    const int_part *p = &job->part;
    int64_t k = job->k;
    uint8_t *to = job->to + panel * int_panel_bytes(p, k);
    memset(to, 0, (size_t)int_panel_bytes(p, k));
    for (int64_t j = 0; j < COLS && panel * COLS + j < p->n; j++) {
        int64_t row = panel * COLS + j;
        put_scales(job, to, row, j);
        put_row(p, to + scales_bytes(p, k), k, j, job->codes + row * k);
    }
}

/* Bytes of a part's panels. */
EXPORT int64_t quire_int_bytes(const void *part, int64_t k) {
    const int_part *p = part;
    return (p->n + COLS - 1) / COLS * int_panel_bytes(p, k);
}

/* Codes [n, k] and their scales and offsets [n, groups], or [n, blocks + groups] in bytes -> panels, at the part's place
 * in the weight. */
EXPORT void quire_int_pack(void *weight, const void *part, int64_t k, const uint8_t *codes, const float *scales,
                           const float *offsets) {
    const int_part *p = part;
    int_pack_job job = {codes, scales, offsets, (uint8_t *)weight + p->at, *p, k};
    quire_parallel(pack_panel, &job, (p->n + COLS - 1) / COLS);
}

static float get_scale(const uint8_t *p, int64_t bytes, int64_t i) {
    _Float16 half;
    float x;
    if (bytes == 4) {
        memcpy(&x, p + i * 4, 4);
        return x;
    }
    memcpy(&half, p + i * 2, 2);
    return (float)half;
}

/* Scale `at` of a group, or offset (at >= COLS). */
static float scale_of_group(const int_part *p, const uint8_t *panel, int64_t g, int64_t at) {
    if (p->scale_bytes != 1) return get_scale(panel + g * scale_row(p), p->scale_bytes, at);
    int64_t of_block = BLOCK / p->group;
    const uint8_t *bytes = panel + block_scales(p, g / of_block);
    return (float)(int8_t)bytes[g % of_block * scale_row(p) + at] * get_scale(bytes - COLS * 2 * (1 + p->offsets), 2, at);
}

/* Row `row` of the weight as floats: scale * (code - zero) + offset, rounded twice as the formats say. */
void quire_int_embed_row(const void *w, int64_t row, int64_t k, float *out) {
    const int_weight *weight = w;
    const int_part *p = weight->parts;
    while (row - p->start >= p->n) p++;
    int64_t at = row - p->start, j = at % COLS, step = step_of(p);
    const uint8_t *panel = (const uint8_t *)w + p->at + at / COLS * int_panel_bytes(p, k);
    const uint8_t *codes = panel + scales_bytes(p, k);
    for (int64_t i = 0; i < k; i++) {
        int code = get_code(p, codes + i / step * code_bytes(p), i % step, j);
        float x = scale_of_group(p, panel, i / p->group, j) * (float)(code - (int)p->zero);
        out[i] = p->offsets ? x + scale_of_group(p, panel, i / p->group, COLS + j) : x;
    }
}

/* ---- floats to codes */

typedef struct {
    const float *src;
    uint8_t *codes;
    float *scales, *offsets;
    int64_t n, k, group;
    int bits;
} round_job;

static float to_half(float x) { return (float)(_Float16)x; }

static float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; /* an integer, ties to even; |x| < 2^22 */ }

static float between(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

static void round_group(const float *x, int64_t count, float d, float m, int zero, int top, uint8_t *codes) {
    float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    for (int64_t i = 0; i < count; i++)
        codes[i] = (uint8_t)(int32_t)between(nearest((x[i] - m) * inverse) + (float)zero, 0.0f, (float)top);
}

/* Sums of x^3 q and x^2 q^2 over the codes q of a group, in an order that every machine keeps. */
static void fit(const float *x, int64_t count, float inverse, float low, float high, float *xq, float *qq) {
    float products[LANES] = {0.0f}, squares[LANES] = {0.0f};
    for (int64_t i = 0; i < count; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float value = x[i + j], q = (value * inverse + 12582912.0f) - 12582912.0f; /* an integer, ties to even */
            q = q < low ? low : q;
            q = q > high ? high : q;
            products[j] += value * value * value * q;
            squares[j] += value * value * q * q;
        }
    for (int j = 0; j < LANES; j++) {
        *xq += products[j];
        *qq += squares[j];
    }
}

/* A scale for codes around zero: among some near the one that makes the largest magnitude the lowest code, each followed
 * by the least squares scale for the codes that it gives, the one that leaves the smallest error. Errors of large weights
 * count more. */
static float symmetric_scale(const float *x, int64_t count, int low, int high) {
    float top = 0.0f;
    for (int64_t i = 0; i < count; i++) top = fabsf(x[i]) > fabsf(top) ? x[i] : top;
    if (fabsf(top) < 1e-20f) return 0.0f;
    if (high > 64) return fabsf(top) / (float)high;
    float best = 0.0f, found = top / (float)low;
    for (int turn = -6; turn <= 6; turn++) {
        float inverse = ((float)low + 0.1f * (float)turn) / top, xq = 0.0f, qq = 0.0f;
        fit(x, count, inverse, (float)low, (float)high, &xq, &qq);
        if (qq > 0.0f && xq * xq > best * qq) best = xq * xq / qq, found = xq / qq;
    }
    return found;
}

/* A line through zero points: code q stands for d * q + m. */
typedef struct {
    float d, m;
} line;

INLINE vf codes_of(vf x, line is, float inverse, float top) {
    const vf shift = set_v(12582912.0f); /* rounds to an integer, ties to even */
    return min_v(set_v(top), max_v(set_v(0.0f), ((x - set_v(is.m)) * set_v(inverse) + shift) - shift));
}

/* The line of least squares through the codes that `start` gives, in half precision; `start` where the codes are all one. */
static line fitted(const float *x, int64_t count, line start, float top) {
    vf q1[SUB], q2[SUB], x1[SUB], xq[SUB];
    for (int j = 0; j < SUB; j++) q1[j] = q2[j] = x1[j] = xq[j] = set_v(0.0f);
    float inverse = 1.0f / start.d;
    for (int64_t i = 0; i < count; i += LANES)
        UNROLL for (int j = 0; j < SUB; j++) {
            vf value = load_v(x + i + j * VL), q = codes_of(value, start, inverse, top);
            q1[j] += q, q2[j] += q * q, x1[j] += value, xq[j] += value * q;
        }
    float n = (float)count, sum = sum_lanes(q1), values = sum_lanes(x1), spread = n * sum_lanes(q2) - sum * sum;
    if (!(spread > 0.0f)) return start;
    float d = (n * sum_lanes(xq) - sum * values) / spread;
    return (line){to_half(d), to_half((values - d * sum) / n)};
}

static float squared_error(const float *x, int64_t count, line is, float top) {
    vf error[SUB];
    for (int j = 0; j < SUB; j++) error[j] = set_v(0.0f);
    float inverse = is.d != 0.0f ? 1.0f / is.d : 0.0f;
    for (int64_t i = 0; i < count; i += LANES)
        UNROLL for (int j = 0; j < SUB; j++) {
            vf value = load_v(x + i + j * VL), q = codes_of(value, is, inverse, top);
            vf off = value - (set_v(is.d) * q + set_v(is.m));
            error[j] += off * off;
        }
    return sum_lanes(error);
}

/* A scale and an offset for codes 0 .. top. Four and five bits: of lines that take the group's range for 3/5 to 6/5 of top
 * steps, each followed by the line of least squares for its codes, the one that leaves the smallest error. Weights that
 * lay on some grid of as many steps before, of which the group uses a part, are found again so. */
static line offset_line(const float *x, int64_t count, int top) {
    vf low = load_v(x), high = low;
    for (int64_t i = VL; i < count; i += VL) low = min_v(low, load_v(x + i)), high = max_v(high, load_v(x + i));
    float least = -max_lanes(-low), most = max_lanes(high);
    line best = {0.0f, to_half(least)};
    best.d = to_half((most - best.m) / (float)top);
    if (top > 64 || !(best.d > 0.0f)) return best;
    float smallest = squared_error(x, count, best, (float)top);
    for (int steps = top * 3 / 5; steps <= top * 6 / 5; steps++) {
        line found = fitted(x, count, (line){(most - least) / (float)steps, least}, (float)top);
        if (!(found.d > 0.0f)) continue;
        float error = squared_error(x, count, found, (float)top);
        if (error < smallest) smallest = error, best = found;
    }
    return best;
}

/* Whether all weights are finite: minima and maxima pass over what is no number, and made numbers of such a group. */
static int all_finite(const float *x, int64_t count) {
    int finite = 1;
    for (int64_t i = 0; i < count; i++) finite &= fabsf(x[i]) <= FLT_MAX;
    return finite;
}

static void round_row(void *arg, int64_t row) {
    const round_job *job = arg;
    int levels = 1 << job->bits, zero = job->offsets ? 0 : levels / 2;
    for (int64_t g = 0; g < job->k / job->group; g++) {
        const float *x = job->src + row * job->k + g * job->group;
        line is = {0.0f, 0.0f};
        if (job->offsets) {
            is = offset_line(x, job->group, levels - 1);
            job->offsets[row * (job->k / job->group) + g] = is.m;
        } else
            is.d = to_half(symmetric_scale(x, job->group, -levels / 2, levels / 2 - 1));
        if (!all_finite(x, job->group)) is.d = NAN;
        job->scales[row * (job->k / job->group) + g] = is.d;
        round_group(x, job->group, is.d, is.m, zero, levels - 1, job->codes + row * job->k + g * job->group);
    }
}

/* Floats [n, k] -> codes of so many bits [n, k] with scales, and offsets where there is room for them, [n, k / group]. */
EXPORT void quire_int_round(const float *src, int64_t n, int64_t k, int64_t bits, int64_t group, uint8_t *codes,
                            float *scales, float *offsets) {
    round_job job = {src, codes, scales, offsets, n, k, group, (int)bits};
    quire_parallel(round_row, &job, n);
}
