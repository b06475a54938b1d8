/* Runs every integer kernel that this processor has on fixed inputs and prints a hash of each format's bits: the same on
 * every machine. Compiled together with the library's sources, as fingerprint.c is. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void quire_set_num_threads(int32_t);
const char *quire_int_kernel(int32_t);
int64_t quire_int_bytes(const void *, int64_t);
void quire_int_pack(void *, const void *, int64_t, const uint8_t *, const float *, const float *);
void quire_int_round(const float *, int64_t, int64_t, int64_t, int64_t, uint8_t *, float *, float *);
void quire_linear(const float *, const void *, int32_t, const float *, const float *, float *, int64_t, int64_t, int64_t,
                  const int64_t *, int64_t);
void quire_embed(const int64_t *, const void *, int32_t, float *, int64_t, int64_t);

#define BLOCK 256
#define N 41
#define K 192
#define ROWS 23

static uint32_t state = 1;

static float draw(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)(state >> 8) / 8388608.0f - 1.0f;
}

static void report(const char *name, const float *x, size_t count) {
    uint64_t hash = 14695981039346656037u;
    const unsigned char *bytes = (const unsigned char *)x;
    for (size_t i = 0; i < count * sizeof *x; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

static void multiply(const char *name, const float *x, const void *weight, int64_t k) {
    const int64_t slices[] = {64, 0, 96, 1, k, 1};
    float first[ROWS * N], out[ROWS * N];
    for (int kernel = 0; kernel < 7; kernel++) {
        if (!quire_int_kernel(kernel)) continue;
        quire_linear(x, weight, 4, NULL, NULL, out, ROWS, N, k, slices, 3);
        if (kernel == 0) memcpy(first, out, sizeof out), report(name, out, ROWS * N);
        if (memcmp(first, out, sizeof out)) printf("%s does not fit the plain kernel\n", quire_int_kernel(kernel));
        for (int rows = 1; rows <= 7; rows++) {
            quire_linear(x, weight, 4, NULL, NULL, out, rows, N, k, slices, 3);
            if (memcmp(first, out, sizeof(float) * N * (size_t)rows))
                printf("%s with %d rows does not fit\n", quire_int_kernel(kernel), rows);
        }
    }
}

/* K-quants: scales and offsets are bytes, times a number of half precision for each block. */
static void multiply_blocks(int64_t bits, int64_t group, int64_t offset, int64_t zero) {
    static float x[ROWS * 2 * BLOCK], row[2 * BLOCK], scales[2][N * (2 + 2 * BLOCK / 16)];
    static uint8_t codes[N * 2 * BLOCK];
    const int64_t k = 2 * BLOCK, groups = k / group;
    int64_t id = 17, head[16] = {1, 0, 0, 0, 0, 0, 0, 0, N, 0, bits, group, 1, offset, zero, 128};
    char name[40];
    for (int i = 0; i < ROWS * k; i++) x[i] = draw();
    for (int i = 0; i < N * k; i++) codes[i] = (uint8_t)((draw() + 1.0f) / 2 * (float)(1 << bits));
    for (int kind = 0; kind < 2; kind++)
        for (int i = 0; i < N * (2 + groups); i++) {
            float times = (float)(int32_t)(draw() * 128.0f), number = (float)(_Float16)(draw() * 0.001f);
            scales[kind][i] = i % (2 + groups) < 2 ? number : times;
        }
    uint8_t *weight = aligned_alloc(64, (size_t)(128 + quire_int_bytes(head + 8, k) + 63) / 64 * 64);
    memcpy(weight, head, sizeof head);
    quire_int_pack(weight, head + 8, k, codes, scales[0], offset ? scales[1] : NULL);
    snprintf(name, sizeof name, "bits %d group %d in blocks", (int)bits, (int)group);
    multiply(name, x, weight, k);
    quire_embed(&id, weight, 4, row, 1, k);
    report("row", row, (size_t)k);
    free(weight);
}

int main(int count, char **arguments) {
    static const int64_t formats[][4] = {{8, 32, 0, 128}, {4, 32, 0, 8},  {4, 32, 1, 0}, {5, 32, 0, 16}, {5, 32, 1, 0},
                                         {6, 16, 0, 32},  {4, 96, 1, 0}, {8, K, 0, 128}, {8, 64, 1, 0}};
    static float x[ROWS * K], w[N * K], scales[N * K], offsets[N * K], row[K];
    static uint8_t codes[N * K];
    int64_t id = 17;
    quire_set_num_threads(2);
    if (count > 1 && arguments[1][0] == 'k') /* which kernels there are */
        for (int kernel = 0; kernel < 7; kernel++)
            if (quire_int_kernel(kernel)) printf("%s\n", quire_int_kernel(kernel));
    for (int f = 0; f < 9; f++) {
        const int64_t *is = formats[f];
        for (int i = 0; i < ROWS * K; i++) x[i] = draw() * (i % 37 == 0 ? 20.0f : 1.0f);
        for (int i = 0; i < N * K; i++) w[i] = draw();
        quire_int_round(w, N, K, is[0], is[1], codes, scales, is[2] ? offsets : NULL);
        int64_t head[16] = {1, 0, 0, 0, 0, 0, 0, 0, N, 0, is[0], is[1], 2, is[2], is[3], 128};
        for (int wide = 2; wide <= 4; wide += 2) {
            char name[40];
            head[12] = wide;
            uint8_t *weight = aligned_alloc(64, (size_t)(128 + quire_int_bytes(head + 8, K) + 63) / 64 * 64);
            memcpy(weight, head, sizeof head);
            quire_int_pack(weight, head + 8, K, codes, scales, is[2] ? offsets : NULL);
            snprintf(name, sizeof name, "bits %d group %d scale %d", (int)is[0], (int)is[1], wide);
            multiply(name, x, weight, K);
            quire_embed(&id, weight, 4, row, 1, K);
            report("row", row, K);
            free(weight);
        }
    }
    multiply_blocks(4, 32, 1, 0);
    multiply_blocks(5, 32, 1, 0);
    multiply_blocks(6, 16, 0, 32);
    return 0;
}
