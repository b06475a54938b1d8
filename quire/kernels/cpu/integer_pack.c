/* Packing integer weights into panels, rounding floats to integer codes, and reading rows back. */
#include "export.h"
#include "integer.h"
#include "pool.h"

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

static void put_code(const int_part *p, uint8_t *step, int64_t i, int64_t j, uint8_t code) {
    int64_t quads = step_of(p) / 4, quad = i / 4, byte = j * 4 + i % 4;
    if (p->bits == 8) {
        step[quad * QUAD_BYTES + byte] = code;
        return;
    }
    uint8_t *high = step + quads / 2 * QUAD_BYTES;
    step[quad / 2 * QUAD_BYTES + byte] |= (uint8_t)((code & 15) << (quad % 2 * 4));
    if (p->bits == 5) high[byte] |= (uint8_t)((code >> 4) << quad);
    if (p->bits == 6) high[quad / 4 * QUAD_BYTES + byte] |= (uint8_t)((code >> 4) << (quad % 4 * 2));
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

static void pack_panel(void *arg, int64_t panel) {
    const int_pack_job *job = arg;
    const int_part *p = &job->part;
    int64_t k = job->k, groups = k / p->group, step = step_of(p);
    uint8_t *to = job->to + panel * int_panel_bytes(p, k);
    memset(to, 0, (size_t)int_panel_bytes(p, k));
    for (int64_t j = 0; j < COLS && panel * COLS + j < p->n; j++) {
        int64_t row = panel * COLS + j;
        for (int64_t g = 0; g < groups; g++) {
            put_scale(to + g * scale_row(p), p->scale_bytes, j, job->scales[row * groups + g]);
            if (p->offsets) put_scale(to + g * scale_row(p), p->scale_bytes, COLS + j, job->offsets[row * groups + g]);
        }
        uint8_t *codes = to + scales_bytes(p, k);
        for (int64_t i = 0; i < k; i++)
            put_code(p, codes + i / step * code_bytes(p), i % step, j, job->codes[row * k + i]);
    }
}

/* Bytes of a part's panels. */
EXPORT int64_t quire_int_bytes(const void *part, int64_t k) {
    const int_part *p = part;
    return (p->n + COLS - 1) / COLS * int_panel_bytes(p, k);
}

/* Codes [n, k] and their scales and offsets [n, groups] -> panels, at the part's place in the weight. */
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

/* Row `row` of the weight as floats: scale * (code - zero) + offset, rounded twice as the formats say. */
void quire_int_embed_row(const void *w, int64_t row, int64_t k, float *out) {
    const int_weight *weight = w;
    const int_part *p = weight->parts;
    while (row - p->start >= p->n) p++;
    int64_t at = row - p->start, j = at % COLS, step = step_of(p);
    const uint8_t *panel = (const uint8_t *)w + p->at + at / COLS * int_panel_bytes(p, k);
    const uint8_t *codes = panel + scales_bytes(p, k);
    for (int64_t i = 0; i < k; i++) {
        const uint8_t *scales = panel + i / p->group * scale_row(p);
        int code = get_code(p, codes + i / step * code_bytes(p), i % step, j);
        float x = get_scale(scales, p->scale_bytes, j) * (float)(code - (int)p->zero);
        out[i] = p->offsets ? x + get_scale(scales, p->scale_bytes, COLS + j) : x;
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

static void round_group(const float *x, int64_t count, float d, float m, int zero, int top, uint8_t *codes) {
    float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    for (int64_t i = 0; i < count; i++) {
        float code = rintf((x[i] - m) * inverse) + (float)zero;
        codes[i] = (uint8_t)(code < 0.0f ? 0.0f : code > (float)top ? (float)top : code);
    }
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

static void round_row(void *arg, int64_t row) {
    const round_job *job = arg;
    int levels = 1 << job->bits, zero = job->offsets ? 0 : levels / 2;
    for (int64_t g = 0; g < job->k / job->group; g++) {
        const float *x = job->src + row * job->k + g * job->group;
        float d, m = 0.0f;
        if (job->offsets) {
            float least = x[0], most = x[0];
            for (int64_t i = 1; i < job->group; i++) {
                least = x[i] < least ? x[i] : least;
                most = x[i] > most ? x[i] : most;
            }
            m = to_half(least);
            d = to_half((most - m) / (float)(levels - 1));
            job->offsets[row * (job->k / job->group) + g] = m;
        } else
            d = to_half(symmetric_scale(x, job->group, -levels / 2, levels / 2 - 1));
        job->scales[row * (job->k / job->group) + g] = d;
        round_group(x, job->group, d, m, zero, levels - 1, job->codes + row * job->k + g * job->group);
    }
}

/* Floats [n, k] -> codes of so many bits [n, k] with scales, and offsets where there is room for them, [n, k / group]. */
EXPORT void quire_int_round(const float *src, int64_t n, int64_t k, int64_t bits, int64_t group, uint8_t *codes,
                            float *scales, float *offsets) {
    round_job job = {src, codes, scales, offsets, n, k, group, (int)bits};
    quire_parallel(round_row, &job, n);
}
