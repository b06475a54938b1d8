/* What attention over floats (attention.c) and over int8 codes (code_cache.c) share: a call's job, a task's state. */
#ifndef QUIRE_ATTENTION_H
#define QUIRE_ATTENTION_H

#include "simd.h"

#define TILE 64
#define MAX_DIM 576 /* wider heads and latents are refused by ops/cpu.py; DeepSeek-V3 has latents of 512 + 64 */
#define ROWS 6       /* (query, head) pairs of a register tile */
#define MAX_BLOCK 48 /* (query, head) pairs of a task */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIDE 4 /* vectors of a register tile: 24 sums in 32 registers */
#else
#define WIDE 2 /* 12 sums in 16 registers */
#endif

typedef struct {
    const float *qkv, *k, *v;       /* k NULL: v are latents; of codes, four of them lie in the place of a float */
    float *out;
    const int32_t *query_start, *context_len, *tables;
    const float *sinks;             /* [heads] a score beside those of the keys, without a value; NULL: none */
    const int32_t *detours;         /* [seqs][detour_stride] of draft trees (see `stored`); NULL: none */
    int64_t detour_stride;
    int64_t table_stride, seqs, heads, kv_heads, dim, block_size, window;
    int64_t value_dim, row_width;   /* floats of a value; of a row of qkv, which begins with the query heads */
    int64_t width, quads;           /* words that the cache keeps of a token's head; quads of codes among them, 0: floats */
    float scale, softcap;           /* softcap 0: none */
    int64_t share, parts, queries;  /* query heads of a kv head; pieces they are cut into; queries of a task */
    int64_t skipped;                /* query heads of the first kv head that another rank has */
    const int64_t *first_task;      /* [seqs + 1] */
    const int64_t *members;         /* [seqs] sequences that go with this one, itself included; 0: goes with another */
} attend_job;

/* One task's state: `rows` pairs (query, head) against one kv head of one sequence, or of a bundle of sequences that
 * have one query each. */
typedef struct {
    const attend_job *job;
    const int32_t *table;
    int64_t seq, members;
    int64_t kv_head, rows, row_heads; /* row r is query r / row_heads, head r % row_heads of the task */
    int64_t first_key;                /* index of the key of the task's first query */
    int64_t stride, value_stride;     /* floats between rows of q, and of acc: rounded up to a vector */
    float *q, *acc;
    float top[MAX_BLOCK], total[MAX_BLOCK];
    int8_t *q_codes;                  /* [rows][quads * 4], where keys are codes */
    float q_scale[MAX_BLOCK];
    int32_t q_init[MAX_BLOCK];        /* what a query's dot products begin with */
    int64_t lanes;                    /* keys of a k_group: VL, or DOT_KEYS of codes */
    const float *k_group[TILE / VL], *v_row[TILE]; /* this tile's keys, by `lanes`; its values, by key */
    const float *k_next[TILE / VL], *v_next[TILE]; /* where to prefetch: the next tile's */
    int64_t k_step;                                /* floats between features of a key vector */
    float *k_packed, *v_packed;
    float *k_buffer;                               /* room for k_packed, where only some tiles are packed */
    const int32_t *detour;                         /* of the sequence whose table is in use; NULL: none */
} attend_task;

/* Row r of the task's queries, `from` [dim], as codes. */
void quire_code_query(attend_task *t, int64_t row, const float *from);

/* As score_rows, where keys are codes. */
void quire_code_scores(const attend_task *t, int64_t row, int64_t rows, int64_t keys, float *scores);

#endif
