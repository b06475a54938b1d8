/* Putting this step's keys and values into the paged cache: head norms, rotation, the write, and block copies. */
#include "code_cache.h"
#include "export.h"
#include "pool.h"
#include "recorded.h"
#include "simd.h"

void quire_rms_row(const float *x, const float *weight, float *out, int64_t n, float eps);

typedef struct {
    float *qkv, *k, *v;
    const float *rope, *q_norm, *k_norm;
    const int64_t *positions, *slots;
    int64_t tokens, heads, kv_heads, dim, block_size, rot, step;
    float eps;
    int codes; /* k and v of the cache are int8 codes */
} rope_job;

/* (a, b) -> (a cos - b sin, b cos + a sin) for feature i and i + half of the first 2 * half features. */
INLINE void rotate_head(float *x, const float *table, int64_t half) {
    const float *cos = table, *sin = table + half;
    int64_t i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load_v(x + i), b = load_v(x + half + i), c = load_v(cos + i), s = load_v(sin + i);
        store_v(x + i, fma_v(a, c, -(b * s)));
        store_v(x + half + i, fma_v(b, c, a * s));
    }
    if (i < half) {
        int64_t n = half - i;
        vf a = load_tail(x + i, n), b = load_tail(x + half + i, n);
        vf c = load_tail(cos + i, n), s = load_tail(sin + i, n);
        store_tail(x + i, fma_v(a, c, -(b * s)), n);
        store_tail(x + half + i, fma_v(b, c, a * s), n);
    }
}

static void write_token(const rope_job *job, const float *k, const float *v, int64_t slot) {
    int64_t block = slot / job->block_size, offset = slot % job->block_size;
    int64_t dim = job->dim, size = job->block_size;
    for (int64_t h = 0; h < job->kv_heads; h++) {
        int64_t head = (block * job->kv_heads + h) * dim * size;
        float *to = job->k + head + offset;
        for (int64_t d = 0; d < dim; d++) to[d * size] = k[h * dim + d];
        memcpy(job->v + head + offset * dim, v + h * dim, (size_t)dim * sizeof(float));
    }
}

static void rope_token(const rope_job *job, int64_t t) {
    int64_t dim = job->dim, heads = job->heads + job->kv_heads;
    float *row = job->qkv + t * (heads + job->kv_heads) * dim;
    for (int64_t h = 0; h < heads; h++) {
        const float *norm = h < job->heads ? job->q_norm : job->k_norm;
        if (norm) quire_rms_row(row + h * dim, norm, row + h * dim, dim, job->eps);
        if (job->rope) rotate_head(row + h * dim, job->rope + job->positions[t] * job->rot, job->rot / 2);
    }
    if (job->codes)
        quire_write_codes(row + job->heads * dim, row + heads * dim, job->k, job->v, job->slots[t], job->kv_heads, dim,
                          job->block_size);
    else write_token(job, row + job->heads * dim, row + heads * dim, job->slots[t]);
}

static void rope_task(void *arg, int64_t task) {
    const rope_job *job = arg;
    int64_t end = (task + 1) * job->step < job->tokens ? (task + 1) * job->step : job->tokens;
    for (int64_t t = task * job->step; t < end; t++) rope_token(job, t);
}

static void rope_and_write(rope_job *job) {
    job->step = 8192 / ((job->heads + 2 * job->kv_heads) * job->dim) + 1;
    quire_parallel(rope_task, job, (job->tokens + job->step - 1) / job->step);
}

/* The same with a cache of int8 codes (code_cache.c); q stays as it is. */
EXPORT void quire_rope_and_code(float *qkv, float *k, float *v, const float *rope, const float *q_norm, const float *k_norm,
                         const int64_t *positions, const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t block_size, int64_t rot, float eps) {
    rope_job job = {qkv, k,     v,        rope, q_norm,     k_norm, positions,
                    slots, tokens, heads, kv_heads, dim, block_size, rot, 1, eps, 1};
    rope_and_write(&job);
}

RECORDED(quire_rope_and_code, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), PTR(5), PTR(6), PTR(7), INT(8), INT(9), INT(10),
         INT(11), INT(12), INT(13), REAL(14))

EXPORT void quire_rope_and_cache(float *qkv, float *k, float *v, const float *rope, const float *q_norm, const float *k_norm,
                          const int64_t *positions, const int64_t *slots, int64_t tokens, int64_t heads,
                          int64_t kv_heads, int64_t dim, int64_t block_size, int64_t rot, float eps) {
    rope_job job = {qkv, k,     v,        rope, q_norm,     k_norm, positions,
                    slots, tokens, heads, kv_heads, dim, block_size, rot, 1, eps, 0};
    rope_and_write(&job);
}

RECORDED(quire_rope_and_cache, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), PTR(5), PTR(6), PTR(7), INT(8), INT(9), INT(10),
         INT(11), INT(12), INT(13), REAL(14))

typedef struct {
    float *q, *kv, *latents;
    const float *rope;
    const int64_t *positions, *slots;
    int64_t heads, rank, width, rot;
} latent_job;

static void latent_token(void *arg, int64_t t) {
    const latent_job *job = arg;
    const float *table = job->rope + job->positions[t] * job->rot;
    float *kv = job->kv + t * job->width;
    for (int64_t h = 0; h < job->heads; h++)
        rotate_head(job->q + (t * job->heads + h) * job->width + job->rank, table, job->rot / 2);
    rotate_head(kv + job->rank, table, job->rot / 2);
    memcpy(job->latents + job->slots[t] * job->width, kv, (size_t)job->width * sizeof(float));
}

/* Rotates the last `rot` features of each query head of q [tokens, heads * (rank + rot)] and of kv [tokens, rank + rot],
 * and writes kv to the cache of latents [block][slot][rank + rot]. */
EXPORT void quire_rope_latents(float *q, float *kv, float *latents, const float *rope, const int64_t *positions,
                               const int64_t *slots, int64_t tokens, int64_t heads, int64_t rank, int64_t rot) {
    latent_job job = {q, kv, latents, rope, positions, slots, heads, rank, rank + rot, rot};
    quire_parallel(latent_token, &job, tokens);
}

RECORDED(quire_rope_latents, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), PTR(5), INT(6), INT(7), INT(8), INT(9))

/* Does a detour (see `stored` of attention.c) lead where a block is, for every key of a sequence? Returns whether not. */
static int check_detour(const int32_t *detour, int64_t stride, int64_t count, int64_t length, const int32_t *table,
                        int64_t table_width, int64_t block_size, int64_t num_blocks) {
    if (detour[0] >= length) return 0;
    if (count != 1 || detour[0] < 0 || length - detour[0] > stride - 1) return 1;
    for (int64_t i = 1; i <= length - detour[0]; i++) {
        if (detour[i] < 0 || detour[i] >= table_width * block_size) return 1;
        int64_t block = table[detour[i] / block_size];
        if (block < 0 || block >= num_blocks) return 1;
    }
    return 0;
}

/* Is every index that a step gives us inside its array? 0, or which of them is not: 1 query_start, 2 context_len,
 * 3 block table, 4 slot, 5 detour. Table entries that no query reads (past the keys, behind the window) may hold anything;
 * with a negative window no table is read at all. */
EXPORT int32_t quire_check_step(const int32_t *query_start, const int32_t *context_len, const int32_t *tables,
                                const int64_t *slots, const int32_t *detours, int64_t detour_stride,
                                int64_t table_stride, int64_t table_width, int64_t seqs, int64_t tokens,
                                int64_t block_size, int64_t num_blocks, int64_t window) {
    if (query_start[0] != 0 || query_start[seqs] != tokens) return 1;
    for (int64_t s = 0; s < seqs; s++) {
        int64_t count = query_start[s + 1] - query_start[s], length = context_len[s];
        if (count < 0) return 1;
        if (count > length || length > table_width * block_size) return 2;
        if (count == 0 || window < 0) continue;
        int64_t first = window > 0 && length - count - window + 1 > 0 ? length - count - window + 1 : 0;
        for (int64_t b = first / block_size; b * block_size < length; b++) {
            int64_t block = tables[s * table_stride + b];
            if (block < 0 || block >= num_blocks) return 3;
        }
        if (detours && check_detour(detours + s * detour_stride, detour_stride, count, length, tables + s * table_stride,
                                    table_width, block_size, num_blocks))
            return 5;
    }
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= num_blocks * block_size) return 4;
    return 0;
}

RECORDED_CHECK(quire_check_step, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), INT(5), INT(6), INT(7), INT(8), INT(9), INT(10),
               INT(11), INT(12))

/* Are all of ids[0 .. count) in [0, limit)? */
EXPORT int32_t quire_check_ids(const int64_t *ids, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= limit) return 1;
    return 0;
}

RECORDED_CHECK(quire_check_ids, PTR(0), INT(1), INT(2))

/* Block src[i] -> dst[i] of one cache tensor, `floats` floats a block. The caller makes sure that no block is both
 * a source and a target. */
EXPORT void quire_copy_blocks(float *cache, const int64_t *src, const int64_t *dst, int64_t count, int64_t floats) {
    for (int64_t i = 0; i < count; i++)
        memcpy(cache + dst[i] * floats, cache + src[i] * floats, (size_t)floats * sizeof(float));
}

/* Slot src[i] -> dst[i] of one cache tensor, in order. A block is [heads][width][block_size] words where tokens_last, else
 * [heads][block_size][width]. */
EXPORT void quire_copy_slots(float *cache, const int64_t *src, const int64_t *dst, int64_t count, int64_t heads,
                             int64_t width, int64_t block_size, int64_t tokens_last) {
    int64_t step = tokens_last ? block_size : 1, token = tokens_last ? 1 : width, head = width * block_size;
    for (int64_t i = 0; i < count; i++) {
        const float *from = cache + src[i] / block_size * heads * head + src[i] % block_size * token;
        float *to = cache + dst[i] / block_size * heads * head + dst[i] % block_size * token;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t d = 0; d < width; d++) memcpy(to + h * head + d * step, from + h * head + d * step, sizeof *to);
    }
}
