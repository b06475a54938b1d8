/* A cache of int8 codes, one scale for each token and head: who writes it, and the scores of queries against its keys.
 *
 * Four codes of a head, a quad, lie in a 32-bit word, and the scale is one word more. With that word as the element the
 * cache has the two forms of a float cache: keys [block][kv head][quad or scale][slot], so that a dot product of four
 * features takes whole vectors of keys; values [block][kv head][slot][quad or scale]. Codes of keys are stored with 128
 * added, as unsigned bytes: the instructions of x86 multiply unsigned bytes by signed ones.
 *
 * A query becomes codes of its own with one scale. Its dot products with keys are exact integers; the score is that
 * integer times (scale of the query * scale of the key), two roundings in a fixed order. From there on softmax and the
 * sum of the values are attention.c's, in floats. */
#include "code_cache.h"
#include "attention.h"
#include "code_dots.h"

#define MAX_PADDED ((MAX_DIM + 15) / 16 * 16)
#define INFINITE_BITS 0x7f800000
#define TINY 1e-30f /* a vector of smaller numbers is zero: the inverse of its scale would overflow */

int32_t quire_to_codes(const float *x, int64_t dim, int64_t padded, int8_t *codes, float *scale) {
    int32_t bits = 0, sum = 0;
    for (int64_t i = 0; i < dim; i++) { /* of numbers without a sign the order of floats is that of their bits */
        int32_t size;
        memcpy(&size, x + i, sizeof size);
        size &= 0x7fffffff;
        bits = size > bits ? size : bits;
    }
    float top;
    memcpy(&top, &bits, sizeof top);
    int zero = bits >= INFINITE_BITS || top < TINY;
    float inverse = zero ? 0.0f : 127.0f / top;
    *scale = bits >= INFINITE_BITS ? __builtin_nanf("") : zero ? 0.0f : top / 127.0f;
    if (zero) memset(codes, 0, (size_t)padded);
    for (int64_t i = 0; i < dim && !zero; i++) {
        float whole = (x[i] * inverse + 12582912.0f) - 12582912.0f; /* rounds to an integer, ties to even */
        int32_t code = (int32_t)whole;
        codes[i] = (int8_t)code;
        sum += code;
    }
    memset(codes + dim, 0, (size_t)(padded - dim));
    return sum;
}

void quire_write_codes(const float *k, const float *v, float *k_cache, float *v_cache, int64_t slot, int64_t kv_heads,
                       int64_t dim, int64_t block_size) {
    int64_t width = quire_code_width(dim), quads = width - 1, block = slot / block_size, offset = slot % block_size;
    int8_t codes[MAX_PADDED];
    for (int64_t h = 0; h < kv_heads; h++) {
        int64_t head = (block * kv_heads + h) * width * block_size;
        float *to = k_cache + head + offset;
        quire_to_codes(k + h * dim, dim, quads * 4, codes, to + quads * block_size);
        for (int64_t i = 0; i < quads * 4; i++) codes[i] = (int8_t)(codes[i] ^ 0x80);
        for (int64_t q = 0; q < quads; q++) memcpy(to + q * block_size, codes + q * 4, 4);
        to = v_cache + head + offset * width;
        quire_to_codes(v + h * dim, dim, quads * 4, (int8_t *)to, to + quads);
    }
}

void quire_code_query(attend_task *t, int64_t row, const float *from) {
    int64_t padded = t->job->quads * 4;
    float scale;
    int32_t sum = quire_to_codes(from, t->job->dim, padded, t->q_codes + row * padded, &scale);
    t->q_scale[row] = scale * t->job->scale;
    t->q_init[row] = (quire_code_bias() - 128) * sum;
}

void quire_code_scores(const attend_task *t, int64_t row, int64_t rows, int64_t keys, float *scores) {
    int32_t dots[ROWS * TILE] __attribute__((aligned(64)));
    const uint8_t *at[TILE / DOT_KEYS], *next[TILE / DOT_KEYS];
    int64_t quads = t->job->quads, groups = (keys + DOT_KEYS - 1) / DOT_KEYS;
    for (int64_t g = 0; g < groups; g++) at[g] = (const uint8_t *)t->k_group[g], next[g] = (const uint8_t *)t->k_next[g];
    code_dots d = {.q = t->q_codes + row * quads * 4, .q_stride = quads * 4, .init = t->q_init + row, .keys = at,
                   .next = next, .step = t->k_step * 4, .quads = quads, .groups = groups, .dots = dots,
                   .dots_stride = TILE, .ahead = row == 0};
    quire_code_dots(&d, (int)rows);
    for (int64_t g = 0; g < groups; g++) {
        const float *scales = t->k_group[g] + quads * t->k_step;
        for (int64_t i = 0; i < DOT_KEYS; i += VL) {
            vf scale = load_v(scales + i);
            for (int64_t r = 0; r < rows; r++) {
                int64_t to = r * TILE + g * DOT_KEYS + i;
                store_v(scores + to, to_float(load_i(dots + to)) * (set_v(t->q_scale[row + r]) * scale));
            }
        }
    }
}
