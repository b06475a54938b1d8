/* Runs every kernel on fixed inputs and prints a hash of the bits: the same on every machine with a fused
 * multiply-add. Compiled together with the library's sources by test_fingerprint.py. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../quire/kernels/cpu/sampling.h"

void quire_choose(const float *, const draw_rule *, int64_t *, int64_t, int64_t);
void quire_set_num_threads(int32_t);
int64_t quire_packed_bytes(int32_t, int64_t, int64_t);
int32_t quire_pack(const float *, void *, int64_t, int64_t, int32_t);
void quire_linear(const float *, const void *, int32_t, const float *, const float *, float *, int64_t, int64_t, int64_t,
                  const int64_t *, int64_t);
void quire_embed(const int64_t *, const void *, int32_t, float *, int64_t, int64_t);
void quire_rms_norm(const float *, const float *, float *, int64_t, int64_t, float);
void quire_layer_norm(const float *, const float *, const float *, float *, int64_t, int64_t, float);
void quire_act(const float *, float *, int64_t, int64_t, int32_t);
void quire_rope_and_cache(float *, float *, float *, const float *, const float *, const float *, const int64_t *,
                          const int64_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);
const char *quire_int_kernel(int32_t);
void quire_rope_and_code(float *, float *, float *, const float *, const float *, const float *, const int64_t *,
                         const int64_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);
int32_t quire_attend_codes(const float *, const float *, const float *, float *, const int32_t *, const int32_t *,
                           const int32_t *, const float *, const int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t,
                           int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
int32_t quire_attend(const float *, const float *, const float *, float *, const int32_t *, const int32_t *,
                     const int32_t *, const float *, const int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, float, float);
void quire_clamped_act_mul(const float *, float *, int64_t, int64_t, float, float);

static uint32_t state = 1;

static float draw(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)(state >> 8) / 8388608.0f - 1.0f;
}

static float *array(size_t count, float scale) {
    float *x = malloc(count * sizeof *x);
    for (size_t i = 0; i < count; i++) x[i] = draw() * scale;
    return x;
}

static void report(const char *name, const float *x, size_t count) {
    uint64_t hash = 14695981039346656037u;
    const unsigned char *bytes = (const unsigned char *)x;
    for (size_t i = 0; i < count * sizeof *x; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

/* A sum of five slices of 32, whole and as two ranks share it: slices 0 to 2 and 3, 4. */
static void slices(const float *x, const float *w, const void *packed, int32_t format, int64_t rows, int64_t n, int64_t k,
                   float *out) {
    static const int64_t all[] = {32, 0, 64, 1, 96, 0, 128, 2, 160, 1}, low[] = {32, 0, 64, 1, 96, 0}, high[] = {32, 0, 64, 0};
    const struct {
        int64_t first, last, nodes;
        const int64_t *ends;
    } ranks[2] = {{0, 3, 2, low}, {3, 5, 2, high}};
    float *nodes[2];
    quire_linear(x, packed, format, NULL, NULL, out, rows, n, k, all, 5);
    report("slices", out, (size_t)(rows * n));
    for (int r = 0; r < 2; r++) {
        int64_t start = ranks[r].first * 32, width = ranks[r].last * 32 - start;
        float *part_x = malloc((size_t)(rows * width) * 4), *part_w = malloc((size_t)(n * width) * 4);
        for (int64_t i = 0; i < rows; i++) memcpy(part_x + i * width, x + i * k + start, (size_t)width * 4);
        for (int64_t i = 0; i < n; i++) memcpy(part_w + i * width, w + i * k + start, (size_t)width * 4);
        void *part = malloc((size_t)quire_packed_bytes(format, n, width));
        if (!quire_pack(part_w, part, n, width, format)) printf("a part does not fit format %d\n", (int)format);
        nodes[r] = malloc((size_t)(ranks[r].nodes * rows * n) * 4);
        quire_linear(part_x, part, format, NULL, NULL, nodes[r], rows, n, width, ranks[r].ends, ranks[r].last - ranks[r].first);
    }
    for (int64_t i = 0; i < rows * n; i++) { /* ((0 + 1) + (2 + 3)) + 4 */
        float sum = (nodes[0][i] + (nodes[0][rows * n + i] + nodes[1][i])) + nodes[1][rows * n + i];
        if (memcmp(&sum, &out[i], 4) != 0) printf("two ranks do not fit one\n");
    }
}

static void products(int32_t format, int64_t n, int64_t k) {
    float *w = array((size_t)(n * k), 1.0f), *x = array((size_t)(40 * k), 1.0f), *bias = array((size_t)n, 1.0f);
    for (int64_t i = 0; i < n * k; i++) { /* make the weights fit their format */
        uint32_t bits;
        int q = (int)(draw() * 7.0f + 8.0f);
        if (format >= 2) w[i] = 0.125f * (float)(i % 32 == 3 ? 0 : i % 32 == 5 ? 15 : q) - (format == 3 ? 0.7f : 0.0f);
        if (format == 2 && i % 32 == 3) w[i] = -0.125f * 127.0f;
        memcpy(&bits, &w[i], 4);
        if (format == 1) bits &= 0xffff0000u;
        memcpy(&w[i], &bits, 4);
    }
    void *packed = malloc((size_t)quire_packed_bytes(format, n, k));
    if (!quire_pack(w, packed, n, k, format)) printf("format %d does not fit\n", (int)format);
    float *out = array((size_t)(40 * n), 1.0f);
    for (int64_t rows = 1; rows <= 40; rows += 13) {
        quire_linear(x, packed, format, bias, NULL, out, rows, n, k, NULL, 0);
        report("linear", out, (size_t)(rows * n));
    }
    if (k == 160) {
        for (int64_t rows = 1; rows <= 40; rows += 13) slices(x, w, packed, format, rows, n, k, out);
    }
    int64_t ids[2] = {0, n - 1};
    quire_embed(ids, packed, format, out, 2, k);
    report("embed", out, (size_t)(2 * k));
}

static void rows(void) {
    float *x = array(7 * 577, 4.0f), *w = array(577, 1.0f), *out = array(7 * 577, 0.0f);
    quire_rms_norm(x, w, out, 7, 577, 1e-5f);
    report("rms_norm", out, 7 * 577);
    quire_layer_norm(x, w, w, out, 7, 577, 1e-5f);
    report("layer_norm", out, 7 * 577);
    for (int32_t kind = 0; kind < 4; kind++) {
        quire_act(x, out, 7, 577, kind);
        report("act", out, 7 * 577);
    }
}

static void attention(int64_t dim, int64_t block, int64_t window, float cap, int with_sinks) {
    enum { TOKENS = 150, HEADS = 6, KV = 2 };
    int64_t blocks = (TOKENS + block - 1) / block, width = (HEADS + 2 * KV) * dim;
    float *qkv = array((size_t)(TOKENS * width), 1.0f), *rope = array((size_t)(TOKENS * dim), 1.0f);
    float *k = array((size_t)(blocks * KV * dim * block), 1.0f), *v = array((size_t)(blocks * KV * dim * block), 1.0f);
    float *out = array((size_t)(TOKENS * HEADS * dim), 0.0f), *norm = array((size_t)dim, 1.0f);
    int64_t at[TOKENS], slots[TOKENS];
    int32_t table[TOKENS], starts[2] = {0, TOKENS}, length[1] = {TOKENS};
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)(blocks - 1 - i);
    for (int64_t i = 0; i < TOKENS; i++) at[i] = i, slots[i] = table[i / block] * block + i % block;
    quire_rope_and_cache(qkv, k, v, rope, norm, norm, at, slots, TOKENS, HEADS, KV, dim, block, dim, 1e-6f);
    float *sinks = with_sinks ? array(HEADS, 2.0f) : NULL;
    quire_attend(qkv, k, v, out, starts, length, table, sinks, NULL, 0, blocks, 1, HEADS, KV, HEADS / KV, 0, dim, block, window,
                 0.125f, cap);
    report("attend", out, (size_t)(TOKENS * HEADS * dim));
    if (!with_sinks) return;
    quire_clamped_act_mul(qkv, out, TOKENS, dim, 0.5f, 1.702f);
    report("clamped", out, (size_t)(TOKENS * dim));
}

/* Over a cache of int8 codes, by every integer kernel that this processor has. */
static void code_attention(int64_t dim, int64_t block, int64_t window, float softcap) {
    enum { TOKENS = 70, HEADS = 6, KV = 2 };
    int64_t blocks = (TOKENS + block - 1) / block, width = (dim + 15) / 16 * 4 + 1, at[TOKENS], slots[TOKENS];
    int32_t table[TOKENS], starts[2] = {0, TOKENS}, length[1] = {TOKENS};
    float qkv[TOKENS * (HEADS + 2 * KV) * 64], first[TOKENS * HEADS * 64], out[TOKENS * HEADS * 64];
    float *k = calloc((size_t)(blocks * block * KV * width), sizeof *k);
    float *v = calloc((size_t)(blocks * block * KV * width), sizeof *v);
    for (int64_t i = 0; i < TOKENS * (HEADS + 2 * KV) * dim; i++) qkv[i] = draw();
    for (int64_t i = 0; i < TOKENS; i++) at[i] = i, table[i] = (int32_t)i, slots[i] = i;
    quire_rope_and_code(qkv, k, v, NULL, NULL, NULL, at, slots, TOKENS, HEADS, KV, dim, block, 0, 1e-6f);
    report("codes of keys", k, (size_t)(blocks * block * KV * width));
    report("codes of values", v, (size_t)(blocks * block * KV * width));
    for (int kernel = 0; kernel < 7; kernel++) {
        if (!quire_int_kernel(kernel)) continue;
        quire_attend_codes(qkv, k, v, out, starts, length, table, NULL, NULL, 0, blocks, 1, HEADS, KV, HEADS / KV, 0, dim, block,
                           window, 0.3f, softcap);
        size_t count = (size_t)(TOKENS * HEADS * dim);
        if (kernel == 0) memcpy(first, out, sizeof out), report("attend to codes", out, count);
        if (memcmp(first, out, count * sizeof *out)) printf("%s does not fit the plain kernel\n", quire_int_kernel(kernel));
    }
    quire_int_kernel(-1);
    free(k), free(v);
}

/* Tokens of rows with ties, by rules of every kind. */
static void draws(int64_t width) {
    enum { ROWS = 24 };
    static const float temperatures[] = {0.0f, 0.3f, 1.0f, 1.7f}, floors[] = {-1.0f / 0.0f, -4.6f};
    static const double top_ps[] = {2.0, 0.3, 0.95};
    float *x = array((size_t)(ROWS * width), 6.0f);
    draw_rule rules[ROWS];
    int64_t tokens[2 * ROWS];
    float said[2 * ROWS];
    for (int i = 0; i < ROWS; i++) {
        for (int64_t j = 0; i % 5 == 1 && j < width; j++) x[i * width + j] = (float)(int)x[i * width + j];
        rules[i] = (draw_rule){temperatures[i % 4], floors[i % 2], i % 7 == 3 ? 20 : 0, top_ps[i % 3], {9 + i, i % 2, 7 + i}};
    }
    quire_choose(x, rules, tokens, ROWS, width);
    quire_choose(x, NULL, tokens + ROWS, ROWS, width);
    for (int i = 0; i < 2 * ROWS; i++) said[i] = (float)tokens[i];
    report("draws", said, 2 * ROWS);
    free(x);
}

int main(void) {
    for (int32_t threads = 1; threads <= 2; threads++) {
        state = 1;
        quire_set_num_threads(threads);
        for (int32_t format = 0; format < 4; format++) products(format, 77, 160);
        products(0, 33, 333);
        rows();
        attention(64, 16, 0, 0.0f, 0);
        attention(20, 5, 40, 3.0f, 0);
        attention(20, 16, 40, 0.0f, 1);
        code_attention(64, 16, 0, 0.0f);
        code_attention(20, 5, 40, 3.0f);
        draws(300);
        draws(5003);
    }
    return 0;
}
