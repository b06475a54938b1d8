/* Causal attention of a mixed batch over a paged cache.
 *
 * A query folds its keys in tiles of TILE at absolute positions 0, 64, 128, ...: a score is one fused chain over the
 * features, the softmax runs online over the tiles, and an output feature is one fused chain over the keys in order.
 * Nothing in that depends on the other queries, on how the prompt was cut, on the block size or on the threads.
 * Keys that a query must not see never enter its sums, so a slot that nobody has written cannot leak into them.
 *
 * Decoding sequences that begin with the same blocks go as a bundle: a tile that they share is read once for all.
 *
 * Each node of a draft tree is a sequence of one query. Nodes at the same depth have the same position, so all but one of
 * them lie elsewhere than their position says: a detour lists, by position, where the keys of a node's ancestors lie. They
 * are folded at their position, in the tile and lane of plain decoding, so the bits are those of plain decoding.
 *
 * Keys are stored [block][kv head][feature][slot], values [block][kv head][slot][feature]. Of latents (MLA) there is one
 * vector [block][slot][feature] for all heads: it is the key, and its first `value_dim` features are the value.
 * A cache of int8 codes has the same two forms with four codes in the place of a float (code_cache.c). */
#include "attention.h"
#include "code_cache.h"
#include "code_dots.h"
#include "export.h"
#include "pool.h"
#include "recorded.h"
#include "vmath.h"

#include <math.h>
#include <stdlib.h>

/* NEON's vectors of a tile are one line of the cache together, which is fetched once, and their codes one register. */
#if defined(__aarch64__)
#define NEW_LINE(j) ((j) == 0)
#define CODES_TO_FLOAT(p, j, vectors)                                                                               \
    ((vectors) == WIDE ? shifted_bytes_to_float(load_shifted_bytes((p) - (j) * VL), j) : bytes_to_float(p))
#else
#define NEW_LINE(j) 1
#define CODES_TO_FLOAT(p, j, vectors) bytes_to_float(p)
#endif

/* scores[r][0 .. WIDE*VL) of `rows` rows against WIDE vectors of keys. */
INLINE void score_tile(int rows, int ahead, const float *q, int64_t ldq, const float *const *k, int64_t step,
                       const float *const *next, int64_t dim, float *scores) {
    vf acc[ROWS * WIDE];
    UNROLL for (int i = 0; i < rows * WIDE; i++) acc[i] = set_v(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        vf keys[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) {
            keys[j] = load_v(k[j] + d * step);
            if (ahead && NEW_LINE(j)) __builtin_prefetch(next[j] + d * step, 0, 2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf x = load_factor(&q[r * ldq + d]);
            UNROLL for (int j = 0; j < WIDE; j++) acc[r * WIDE + j] = fma_factor(x, keys[j], acc[r * WIDE + j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < WIDE; j++) store_v(scores + r * TILE + j * VL, acc[r * WIDE + j]);
}

/* acc[r][0 .. vectors*VL) += sum over keys [low, high) in order of p[r][key] * v[key]. */
INLINE void value_tile(int rows, int vectors, int ahead, int codes, const float *p, const float *const *v,
                       const float *const *next, int64_t offset, int64_t low, int64_t high, float *acc, int64_t ld) {
    vf sum[ROWS * WIDE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) sum[r * vectors + j] = load_v(acc + r * ld + offset + j * VL);
    for (int64_t key = low; key < high; key++) {
        vf values[WIDE];
        UNROLL for (int j = 0; j < vectors; j++) {
            int64_t at = offset + j * VL;
            values[j] = codes ? CODES_TO_FLOAT((const char *)v[key] + at, j, vectors) : load_v(v[key] + at);
            if (ahead && !codes && NEW_LINE(j)) __builtin_prefetch(next[key] + at, 0, 2);
            if (ahead && codes && j == 0) __builtin_prefetch((const char *)next[key] + at, 0, 2);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf x = load_factor(&p[r * TILE + key]);
            UNROLL for (int j = 0; j < vectors; j++)
                sum[r * vectors + j] = fma_factor(x, values[j], sum[r * vectors + j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < vectors; j++) store_v(acc + r * ld + offset + j * VL, sum[r * vectors + j]);
}

#define EACH_ROW_COUNT(CALL)                                                                                        \
    switch (rows) {                                                                                                 \
        case 1: CALL(1); break;                                                                                     \
        case 2: CALL(2); break;                                                                                     \
        case 3: CALL(3); break;                                                                                     \
        case 4: CALL(4); break;                                                                                     \
        case 5: CALL(5); break;                                                                                     \
        default: CALL(6);                                                                                           \
    }

/* Raw scores of rows [row, row + rows) against the first `keys` keys of the tile. */
static void score_rows(const attend_task *t, int64_t row, int64_t rows, int64_t keys, float *scores) {
    if (t->job->quads) {
        quire_code_scores(t, row, rows, keys, scores);
        return;
    }
    const float *q = t->q + row * t->stride;
    int ahead = row == 0;
    for (int64_t g = 0; g * VL < keys; g += WIDE) {
        const float *const *k = t->k_group + g, *const *next = t->k_next + g;
        float *to = scores + g * VL;
#define SCORE(R)                                                                                                    \
    if (ahead) score_tile(R, 1, q, t->stride, k, t->k_step, next, t->job->dim, to);                                 \
    else score_tile(R, 0, q, t->stride, k, t->k_step, next, t->job->dim, to)
        EACH_ROW_COUNT(SCORE)
    }
}

/* The weights p of rows and keys, times the scales of the keys' values. */
static void scale_weights(const attend_task *t, int64_t rows, int64_t low, int64_t high, const float *p, float *scaled) {
    for (int64_t key = low; key < high; key++) {
        float scale = t->v_row[key][t->job->quads];
        for (int64_t r = 0; r < rows; r++) scaled[r * TILE + key] = p[r * TILE + key] * scale;
    }
}

static void code_value_rows(const attend_task *t, int64_t row, int64_t rows, int64_t low, int64_t high, const float *p) {
    float scaled[ROWS * TILE] __attribute__((aligned(64)));
    float *acc = t->acc + row * t->value_stride;
    int64_t offset = 0;
    scale_weights(t, rows, low, high, p, scaled);
#define CODE_VALUE_WIDE(R)                                                                                          \
    if (row == 0) value_tile(R, WIDE, 1, 1, scaled, t->v_row, t->v_next, offset, low, high, acc, t->value_stride);  \
    else value_tile(R, WIDE, 0, 1, scaled, t->v_row, t->v_next, offset, low, high, acc, t->value_stride)
#define CODE_VALUE_ONE(R) value_tile(R, 1, 0, 1, scaled, t->v_row, t->v_next, offset, low, high, acc, t->value_stride)
    for (; offset + WIDE * VL <= t->value_stride; offset += WIDE * VL) EACH_ROW_COUNT(CODE_VALUE_WIDE)
    for (; offset < t->value_stride; offset += VL) EACH_ROW_COUNT(CODE_VALUE_ONE)
}

static void value_rows(const attend_task *t, int64_t row, int64_t rows, int64_t low, int64_t high, const float *p) {
    if (t->job->quads) {
        code_value_rows(t, row, rows, low, high, p);
        return;
    }
    float *acc = t->acc + row * t->value_stride;
    int ahead = row == 0;
    int64_t offset = 0;
#define VALUE_WIDE(R)                                                                                               \
    if (ahead) value_tile(R, WIDE, 1, 0, p, t->v_row, t->v_next, offset, low, high, acc, t->value_stride);                   \
    else value_tile(R, WIDE, 0, 0, p, t->v_row, t->v_next, offset, low, high, acc, t->value_stride)
#define VALUE_ONE(R) value_tile(R, 1, 0, 0, p, t->v_row, t->v_next, offset, low, high, acc, t->value_stride)
    for (; offset + WIDE * VL <= t->value_stride; offset += WIDE * VL) EACH_ROW_COUNT(VALUE_WIDE)
    for (; offset < t->value_stride; offset += VL) EACH_ROW_COUNT(VALUE_ONE)
}

/* Cap the scores and hide all but keys [low, high) in every group of lanes that holds one; returns the largest. */
INLINE float mask_scores(const attend_job *job, int64_t low, int64_t high, float *s) {
    const vf minus_inf = set_v(-INFINITY), cap = set_v(job->softcap), uncap = set_v(1.0f / job->softcap);
    const vi lane = iota_v();
    vf top = minus_inf;
    for (int64_t i = low / LANES * LANES; i < (high + LANES - 1) / LANES * LANES; i += VL) {
        vf x = load_v(s + i);
        if (job->softcap != 0.0f) x = cap * tanh_v(x * uncap);
        vi key = lane + set_i((int32_t)i);
        vi seen = (key >= set_i((int32_t)low)) & (key < set_i((int32_t)high));
        x = select_v(seen, x, minus_inf);
        store_v(s + i, x);
        top = max_v(top, x);
    }
    return max_lanes(top);
}

/* The same for a tile seen whole and not capped. */
INLINE float top_score(const float *s) {
    vf top = load_v(s);
    UNROLL for (int i = VL; i < TILE; i += VL) top = max_v(top, load_v(s + i));
    return max_lanes(top);
}

/* s = e^(s - top) over keys [start, end), rounded up to whole groups of lanes; returns the sum, each lane in order of
 * the keys, then the lanes by a tree. */
INLINE float weigh(float *s, int64_t start, int64_t end, float top) {
    vf sum[SUB];
    UNROLL for (int j = 0; j < SUB; j++) sum[j] = set_v(0.0f);
    for (int64_t i = start; i < end; i += LANES)
        UNROLL for (int j = 0; j < SUB; j++) {
            vf p = exp_negative(load_v(s + i + j * VL) - set_v(top));
            store_v(s + i + j * VL, p);
            sum[j] += p;
        }
    return sum_lanes(sum);
}

/* The row's sums so far were taken against a smaller top score. */
static void shrink_row(attend_task *t, int64_t row, float by) {
    float *acc = t->acc + row * t->value_stride;
    t->total[row] *= by;
    for (int64_t d = 0; d < t->value_stride; d += VL) store_v(acc + d, load_v(acc + d) * set_v(by));
}

/* Scores of one row -> weights, zero outside keys [low, high); brings the row's running sums up to date. */
INLINE void softmax_row(attend_task *t, int64_t row, int64_t low, int64_t high, float *s) {
    int whole = low == 0 && high == TILE && t->job->softcap == 0.0f;
    float before = t->top[row];
    float now = greater(before, whole ? top_score(s) : mask_scores(t->job, low, high, s));
    float sum = whole ? weigh(s, 0, TILE, now) : weigh(s, low / LANES * LANES, high, now);
    t->top[row] = now;
    if (now > before && before != -INFINITY) shrink_row(t, row, exp_v(set_v(before - now))[0]);
    t->total[row] += sum;
}

/* The keys of tile [start, start + TILE) that row `row` sees: [*low, *high) relative to start, perhaps empty. */
INLINE void visible(const attend_task *t, int64_t row, int64_t start, int64_t *low, int64_t *high) {
    int64_t query = row / t->row_heads;
    int64_t own = t->members > 1 ? t->job->context_len[t->seq + query] - 1 : t->first_key + query;
    int64_t from = t->job->window > 0 ? own - t->job->window + 1 - start : 0, to = own + 1 - start;
    *low = from > 0 ? from : 0;
    *high = to < TILE ? to : TILE;
    if (*low >= *high) *low = *high = 0;
}

/* Fold one tile of keys into up to ROWS rows. */
static void fold_rows(attend_task *t, int64_t row, int64_t rows, int64_t start) {
    float scores[ROWS * TILE] __attribute__((aligned(64)));
    int64_t low[ROWS], high[ROWS], most = 0, common_low = 0, common_high = TILE;
    for (int64_t r = 0; r < rows; r++) {
        visible(t, row + r, start, &low[r], &high[r]);
        if (high[r] > most) most = high[r];
        if (low[r] > common_low) common_low = low[r];
        if (high[r] < common_high) common_high = high[r];
    }
    if (most == 0) return;
    score_rows(t, row, rows, most, scores);
    for (int64_t r = 0; r < rows; r++)
        if (low[r] < high[r]) softmax_row(t, row + r, low[r], high[r], scores + r * TILE);
    if (common_low >= common_high) common_low = common_high = TILE;
    for (int64_t r = 0; r < rows; r++) { /* what this row sees and another does not, before the common keys */
        int64_t end = high[r] < common_low ? high[r] : common_low;
        if (low[r] < end) value_rows(t, row + r, 1, low[r], end, scores + r * TILE);
    }
    if (common_low < common_high) value_rows(t, row, rows, common_low, common_high, scores);
    for (int64_t r = 0; r < rows; r++)
        if (common_high < high[r]) value_rows(t, row + r, 1, common_high, high[r], scores + r * TILE);
}

/* Point k_group and v_row at keys [low, high) of the cache itself (absolute; high > low). */
static void locate(const attend_task *t, int64_t start, int64_t low, int64_t high, const float **k_group,
                   const float **v_row) {
    const attend_job *job = t->job;
    int64_t size = job->block_size, width = job->width, number = low / size, lanes = t->lanes;
    int64_t group = (low - start) / lanes;
    for (int64_t key = low; key < high; number++) {
        int64_t block = (t->table[number] * job->kv_heads + t->kv_head) * width * size, origin = number * size;
        int64_t end = origin + size < high ? origin + size : high;
        for (; key < end; key++) v_row[key - start] = job->v + block + (key - origin) * width;
        if (t->k_packed) continue;
        for (; start + group * lanes < end; group++) k_group[group] = job->k + block + (start + group * lanes - origin);
    }
    if (t->k_packed) return;
    /* Vectors that no row sees read one that some row does; their scores are dropped. */
    for (int64_t g = 0; g < (low - start) / lanes; g++) k_group[g] = k_group[group - 1];
    for (int64_t g = group; g < TILE / lanes; g++) k_group[g] = k_group[group - 1];
}

/* Latents lie token by token: turn the tile's round, so that scores vectorise over its keys. */
static void pack_latents(attend_task *t, int64_t start, int64_t low, int64_t high) {
    int64_t dim = t->job->dim, key = low - start, end = high - start;
    for (; key + LANES <= end; key += LANES)
        for (int64_t d = 0; d < dim; d++)
            UNROLL for (int i = 0; i < LANES; i++) t->k_packed[d * TILE + key + i] = t->v_row[key + i][d];
    for (; key < end; key++)
        for (int64_t d = 0; d < dim; d++) t->k_packed[d * TILE + key] = t->v_row[key][d];
}

/* Blocks too narrow for a vector, and latents: copy the tile's keys side by side. */
static void pack_keys(attend_task *t, int64_t start, int64_t low, int64_t high) {
    const attend_job *job = t->job;
    for (int64_t g = 0; g < TILE / t->lanes; g++) t->k_group[g] = t->k_packed + g * t->lanes;
    if (!job->k) {
        pack_latents(t, start, low, high);
        return;
    }
    int64_t size = job->block_size, width = job->width, number = low / size;
    for (int64_t key = low; key < high; number++) {
        int64_t offset = key - number * size, count = size - offset < high - key ? size - offset : high - key;
        const float *from = job->k + (t->table[number] * job->kv_heads + t->kv_head) * width * size + offset;
        float *to = t->k_packed + key - start;
        for (int64_t d = 0; d < width; d++)
            for (int64_t i = 0; i < count; i++) memcpy(to + d * TILE + i, from + d * size + i, sizeof *to);
        key += count;
    }
}

/* Heads that do not fill a vector: copy the tile's values to rows that do. */
static void pack_values(attend_task *t, int64_t start, int64_t low, int64_t high) {
    for (int64_t key = low - start; key < high - start; key++) {
        float *to = t->v_packed + key * t->value_stride;
        memcpy(to, t->v_row[key], (size_t)t->job->value_dim * sizeof(float));
        t->v_row[key] = to;
    }
}

/* Where the sequence keeps the key at position `key`: there, but for the tail of a tree's node. A detour is the position
 * of its first key, then the places of the keys from there on. */
INLINE int64_t stored(const attend_task *t, int64_t key) {
    return t->detour && key >= t->detour[0] ? t->detour[1 + key - t->detour[0]] : key;
}

/* Fold keys [low, high) of the tile at `start`, which are located, into rows [row, row + rows). */
static void fold_located(attend_task *t, int64_t row, int64_t rows, int64_t start, int64_t low, int64_t high) {
    if (t->k_packed) pack_keys(t, start, low, high);
    if (t->v_packed) pack_values(t, start, low, high);
    for (int64_t end = row + rows; row < end; row += ROWS) fold_rows(t, row, end - row < ROWS ? end - row : ROWS, start);
}

/* The same where some of the keys lie elsewhere: they are copied side by side. */
static void fold_detour(attend_task *t, int64_t row, int64_t rows, int64_t start, int64_t low, int64_t high) {
    const attend_job *job = t->job;
    float *packed = t->k_packed;
    int64_t step = t->k_step, size = job->block_size, width = job->width;
    t->k_packed = t->k_buffer, t->k_step = TILE;
    for (int64_t g = 0; g < TILE / t->lanes; g++) t->k_group[g] = t->k_packed + g * t->lanes;
    for (int64_t key = low; key < high; key++) {
        int64_t place = stored(t, key);
        int64_t block = (t->table[place / size] * job->kv_heads + t->kv_head) * width * size;
        t->v_row[key - start] = job->v + block + place % size * width;
        for (int64_t d = 0; job->k && d < width; d++)
            memcpy(t->k_packed + d * TILE + key - start, job->k + block + place % size + d * size, sizeof *t->k_packed);
    }
    if (!job->k) pack_latents(t, start, low, high);
    memcpy(t->k_next, t->k_group, sizeof t->k_group); /* nothing to fetch */
    memcpy(t->v_next, t->v_row, sizeof t->v_row);
    if (t->v_packed) pack_values(t, start, low, high);
    for (int64_t end = row + rows; row < end; row += ROWS) fold_rows(t, row, end - row < ROWS ? end - row : ROWS, start);
    t->k_packed = packed, t->k_step = step;
}

/* Fold every tile that some row of the task sees. */
static void fold_tiles(attend_task *t) {
    int64_t window = t->job->window;
    int64_t end = t->first_key + (t->rows - 1) / t->row_heads + 1;
    int64_t begin = window > 0 && t->first_key - window + 1 > 0 ? t->first_key - window + 1 : 0;
    for (int64_t start = begin / TILE * TILE; start < end; start += TILE) {
        int64_t low = start > begin ? start : begin, high = start + TILE < end ? start + TILE : end;
        if (t->detour && high > t->detour[0]) {
            fold_detour(t, 0, t->rows, start, low, high);
            continue;
        }
        if (low == begin) locate(t, start, low, high, t->k_next, t->v_next);
        memcpy(t->k_group, t->k_next, sizeof t->k_group);
        memcpy(t->v_row, t->v_next, sizeof t->v_row);
        int64_t after = high + TILE < end ? high + TILE : end;
        if (high < after) locate(t, high, high, after, t->k_next, t->v_next);
        fold_located(t, 0, t->rows, start, low, high);
    }
}

static void use_table(attend_task *t, int64_t member) {
    const attend_job *job = t->job;
    t->table = job->tables + (t->seq + member) * job->table_stride;
    t->detour = job->detours ? job->detours + (t->seq + member) * job->detour_stride : NULL;
}

/* Fold the tile [start, high) into rows [row, row + rows), with nothing to fetch ahead. */
static void fold_tile(attend_task *t, int64_t row, int64_t rows, int64_t start, int64_t high) {
    if (t->detour && high > t->detour[0]) {
        fold_detour(t, row, rows, start, start, high);
        return;
    }
    locate(t, start, start, high, t->k_group, t->v_row);
    memcpy(t->k_next, t->k_group, sizeof t->k_group);
    memcpy(t->v_next, t->v_row, sizeof t->v_row);
    fold_located(t, row, rows, start, start, high);
}

/* Keys of a sequence that lie where their position says. */
static int64_t straight_tokens(const attend_job *job, int64_t seq) {
    int64_t length = job->context_len[seq], detour = job->detours ? job->detours[seq * job->detour_stride] : length;
    return detour < length ? detour : length;
}

/* Tokens at the beginning, in whole tiles, that two sequences have in the same blocks. */
static int64_t common_tokens(const attend_job *job, int64_t a, int64_t b) {
    const int32_t *x = job->tables + a * job->table_stride, *y = job->tables + b * job->table_stride;
    int64_t ours = straight_tokens(job, a), theirs = straight_tokens(job, b), most = ours < theirs ? ours : theirs;
    int64_t blocks = most / job->block_size, same = 0;
    while (same < blocks && x[same] == y[same]) same++;
    return same * job->block_size / TILE * TILE;
}

/* The tiles that all members share for all rows at once, then each member's own. */
static void fold_bundle(attend_task *t) {
    int64_t shared = common_tokens(t->job, t->seq, t->seq + 1);
    for (int64_t m = 2; m < t->members; m++) {
        int64_t common = common_tokens(t->job, t->seq, t->seq + m);
        if (common < shared) shared = common;
    }
    for (int64_t start = 0; start < shared; start += TILE) fold_tile(t, 0, t->rows, start, start + TILE);
    for (int64_t m = 0; m < t->members; m++) {
        int64_t end = t->job->context_len[t->seq + m];
        use_table(t, m);
        for (int64_t start = shared; start < end; start += TILE)
            fold_tile(t, m * t->row_heads, t->row_heads, start, start + TILE < end ? start + TILE : end);
    }
}

/* First head of the task's query, and how many of them the task takes. */
static void task_rows(const attend_job *job, int64_t seq, int64_t index, attend_task *t, int64_t *token, int64_t *head) {
    int64_t part = index % job->parts, rest = index / job->parts;
    int64_t start = job->query_start[seq], count = job->query_start[seq + 1] - start;
    int64_t blocks = (count + job->queries - 1) / job->queries;
    int64_t block = blocks - 1 - rest / job->kv_heads; /* the longest first, so that threads end together */
    int64_t from = block * job->queries, to = from + job->queries < count ? from + job->queries : count;
    t->kv_head = rest % job->kv_heads;
    /* The first and the last kv head may have fewer of these query heads than the others. */
    int64_t begin = t->kv_head * job->share - job->skipped, end = begin + job->share;
    if (begin < 0) begin = 0;
    if (end > job->heads) end = job->heads;
    int64_t first = begin + (end - begin) * part / job->parts;
    t->row_heads = begin + (end - begin) * (part + 1) / job->parts - first;
    t->seq = seq;
    t->members = job->members[seq];
    t->rows = (t->members > 1 ? t->members : to - from) * t->row_heads;
    t->first_key = job->context_len[seq] - count + from;
    use_table(t, 0);
    *token = start + from;
    *head = first;
}

static int64_t find_seq(const attend_job *job, int64_t task) {
    int64_t low = 0, high = job->seqs;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (job->first_task[middle] <= task) low = middle;
        else high = middle;
    }
    return low;
}

/* The factor of a row whose softmax has one more score, `sink`, that adds to the sum of weights and to nothing else. */
static float beside_sink(float sink, float top, float total) {
    float most = greater(top, sink), by = exp_v(set_v(top - most))[0];
    return by / (total * by + exp_v(set_v(sink - most))[0]);
}

static void attend_one(void *arg, int64_t index) {
    const attend_job *job = arg;
    float q[MAX_BLOCK * MAX_DIM] __attribute__((aligned(64))), acc[MAX_BLOCK * MAX_DIM] __attribute__((aligned(64)));
    float k_packed[TILE * MAX_DIM] __attribute__((aligned(64))), v_packed[TILE * MAX_DIM] __attribute__((aligned(64)));
    attend_task t = {.job = job, .q = q, .q_codes = (int8_t *)q, .acc = acc, .k_step = job->block_size,
                     .k_buffer = k_packed};
    int64_t seq = find_seq(job, index), token, head, dim = job->dim, value_dim = job->value_dim;
    task_rows(job, seq, index - job->first_task[seq], &t, &token, &head);
    if (t.rows == 0) return; /* fewer heads than pieces */
    t.stride = (dim + VL - 1) / VL * VL;
    t.value_stride = (value_dim + VL - 1) / VL * VL;
    t.lanes = job->quads ? DOT_KEYS : VL;
    if (!job->k || job->block_size % t.lanes) t.k_packed = k_packed, t.k_step = TILE;
    if (value_dim % VL && !job->quads) t.v_packed = v_packed; /* codes are padded in the cache */
    for (int64_t g = 0; t.k_packed && g < TILE / t.lanes; g++) t.k_next[g] = k_packed + g * t.lanes; /* nothing to fetch */
    for (int64_t r = 0; r < t.rows; r++) {
        const float *from = job->qkv + (token + r / t.row_heads) * job->row_width + (head + r % t.row_heads) * dim;
        if (job->quads) quire_code_query(&t, r, from);
        for (int64_t d = 0; d < dim && !job->quads; d++) q[r * t.stride + d] = from[d] * job->scale;
        for (int64_t d = 0; d < t.value_stride; d++) acc[r * t.value_stride + d] = 0.0f;
        t.top[r] = -INFINITY;
        t.total[r] = 0.0f;
    }
    if (t.members > 1) fold_bundle(&t);
    else fold_tiles(&t);
    for (int64_t r = 0; r < t.rows; r++) {
        float *to = job->out + ((token + r / t.row_heads) * job->heads + head + r % t.row_heads) * value_dim;
        float inverse = 1.0f / t.total[r];
        if (job->sinks) inverse = beside_sink(job->sinks[head + r % t.row_heads], t.top[r], t.total[r]);
        for (int64_t d = 0; d < value_dim; d++) to[d] = acc[r * t.value_stride + d] * inverse;
    }
}

/* Sequences from `seq` on, at most `most`, that decode one token and share enough to be worth bundling. */
static int64_t count_members(const attend_job *job, int64_t seq, int64_t most) {
    int64_t count = 1;
    while (count < most && seq + count < job->seqs && job->query_start[seq + count + 1] - job->query_start[seq] == count + 1
           && common_tokens(job, seq, seq + count) * 2 >= job->context_len[seq + count])
        count++;
    return count;
}

/* Cut the work into tasks: fills first [seqs + 1] and members [seqs]. */
static void cut_tasks(const attend_job *job, int64_t most_members, int64_t *first, int64_t *members) {
    first[0] = 0;
    for (int64_t s = 0, covered = 0; s < job->seqs; s++) {
        int64_t count = job->query_start[s + 1] - job->query_start[s];
        int64_t blocks = s < covered ? 0 : (count + job->queries - 1) / job->queries;
        members[s] = s < covered ? 0 : count == 1 ? count_members(job, s, most_members) : 1;
        if (members[s]) covered = s + members[s];
        first[s + 1] = first[s] + blocks * job->kv_heads * job->parts;
    }
}

/* Cut a job into tasks and carry them out. Returns 0, or 1 for want of memory. */
static int32_t attend(attend_job *job) {
    int64_t *first = malloc((size_t)(2 * job->seqs + 1) * sizeof *first);
    if (!first) return 1;
    int64_t threads = quire_get_num_threads(), tokens = job->query_start[job->seqs] - job->query_start[0];
    job->parts = 1;
    /* A lone decoding sequence has too few kv heads to keep every thread busy: cut their query heads apart. */
    while (job->parts < job->share && tokens * job->kv_heads * job->parts < threads * 2) job->parts++;
    while ((job->share + job->parts - 1) / job->parts > MAX_BLOCK) job->parts++;
    job->queries = MAX_BLOCK / ((job->share + job->parts - 1) / job->parts);
    /* A bundle is one task for each kv head: enough of them must remain for every thread. */
    int64_t most = job->window > 0 ? 1 : job->seqs * job->kv_heads / (threads * 2);
    cut_tasks(job, most < job->queries ? most : job->queries, first, first + job->seqs + 1);
    job->first_task = first;
    job->members = first + job->seqs + 1;
    quire_parallel(attend_one, job, first[job->seqs]);
    free(first);
    return 0;
}

/* out [tokens, heads * dim]: attention of the queries in qkv over the cache. `group` query heads share a kv head, the
 * first one has `skipped` that are not here; `sinks` are [heads] scores without a value, or NULL; `detours` [seqs][stride]
 * say where the tails of draft trees lie (see `stored`), or NULL. Returns 0, or 1 for want of memory. */
EXPORT int32_t quire_attend(const float *qkv, const float *k, const float *v, float *out, const int32_t *query_start,
                     const int32_t *context_len, const int32_t *tables, const float *sinks, const int32_t *detours,
                     int64_t detour_stride, int64_t table_stride, int64_t seqs, int64_t heads, int64_t kv_heads, int64_t group, int64_t skipped, int64_t dim, int64_t block_size,
                     int64_t window, float scale, float softcap) {
    attend_job job = {.qkv = qkv, .k = k, .v = v, .out = out, .query_start = query_start, .context_len = context_len,
                      .tables = tables, .sinks = sinks, .detours = detours, .detour_stride = detour_stride,
                      .table_stride = table_stride, .seqs = seqs, .heads = heads,
                      .kv_heads = kv_heads, .dim = dim, .block_size = block_size, .window = window, .value_dim = dim,
                      .width = dim,
                      .row_width = (heads + 2 * kv_heads) * dim, .scale = scale, .softcap = softcap, .share = group,
                      .skipped = skipped};
    return attend(&job);
}

/* The same over a cache of codes, as quire_rope_and_code writes it. */
EXPORT int32_t quire_attend_codes(const float *qkv, const float *k, const float *v, float *out, const int32_t *query_start,
                                  const int32_t *context_len, const int32_t *tables, const float *sinks,
                                  const int32_t *detours, int64_t detour_stride, int64_t table_stride, int64_t seqs, int64_t heads, int64_t kv_heads, int64_t group,
                                  int64_t skipped, int64_t dim, int64_t block_size, int64_t window, float scale,
                                  float softcap) {
    int64_t width = quire_code_width(dim);
    attend_job job = {.qkv = qkv, .k = k, .v = v, .out = out, .query_start = query_start, .context_len = context_len,
                      .tables = tables, .sinks = sinks, .detours = detours, .detour_stride = detour_stride,
                      .table_stride = table_stride, .seqs = seqs, .heads = heads,
                      .kv_heads = kv_heads, .dim = dim, .block_size = block_size, .window = window, .value_dim = dim,
                      .width = width, .quads = width - 1, .row_width = (heads + 2 * kv_heads) * dim, .scale = scale,
                      .softcap = softcap, .share = group, .skipped = skipped};
    return attend(&job);
}

/* out [tokens, heads * rank]: attention of queries in the latent space, q [tokens, heads * (rank + rope)], over latents
 * [block][slot][rank + rope]. Returns 0, or 1 for want of memory. */
EXPORT int32_t quire_latent_attend(const float *q, const float *latents, float *out, const int32_t *query_start,
                                   const int32_t *context_len, const int32_t *tables, const int32_t *detours,
                                   int64_t detour_stride, int64_t table_stride, int64_t seqs, int64_t heads, int64_t rank, int64_t rope, int64_t block_size, float scale) {
    attend_job job = {.qkv = q, .v = latents, .out = out, .query_start = query_start, .context_len = context_len,
                      .tables = tables, .detours = detours, .detour_stride = detour_stride, .table_stride = table_stride,
                      .seqs = seqs, .heads = heads, .kv_heads = 1,
                      .dim = rank + rope, .block_size = block_size, .value_dim = rank, .width = rank + rope,
                      .row_width = heads * (rank + rope), .scale = scale, .share = heads};
    return attend(&job);
}

RECORDED_CHECK(quire_latent_attend, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), PTR(5), PTR(6), INT(7), INT(8), INT(9), INT(10),
               INT(11), INT(12), INT(13), REAL(14))

RECORDED_CHECK(quire_attend, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), PTR(5), PTR(6), PTR(7), PTR(8), INT(9), INT(10), INT(11),
               INT(12), INT(13), INT(14), INT(15), INT(16), INT(17), INT(18), REAL(19), REAL(20))

RECORDED_CHECK(quire_attend_codes, PTR(0), PTR(1), PTR(2), PTR(3), PTR(4), PTR(5), PTR(6), PTR(7), PTR(8), INT(9), INT(10),
               INT(11), INT(12), INT(13), INT(14), INT(15), INT(16), INT(17), INT(18), REAL(19), REAL(20))
