/* Draws and log-probabilities, a row of logits to a task, without sorting the vocabulary.
 *
 * Probabilities are integers, floor(exp((logit - peak) / temperature) * 2^40), whose sums are the same in any order: a
 * row's token depends on that row alone. Tokens are ordered by logit, of equals the lower id first. */
#include "export.h"
#include "pool.h"
#include "sampling.h"
#include "vmath.h"

#include <math.h>
#include <stdlib.h>

#define RUN 1024 /* tokens that are looked at together */
#define BINS 2048
#define PER_NAT 72.0f /* bins in which a weight falls to 1/e of another; the last bin is for tokens without weight */
#define SCALE 1099511627776.0f
#define STRIP 256       /* tokens of whose largest logits the top_k-th is taken */
#define MOST_RANKED 256 /* the largest top_k for which that is done */
#define NOT_FINITE -1   /* these two in place of a token */
#define NO_MEMORY -2

typedef struct {
    float value;
    int32_t id;
} token;

/* What tokens of one row weigh. */
typedef struct {
    const float *x;
    int64_t width;
    float peak, temperature, floor;
    const float *known; /* what `scaled` gives for all of them, where that is at hand */
} weighing;

/* The last token that is kept; all that come before it in the order are too. */
typedef struct {
    float value;
    int64_t id;
} limit;

/* e^((logit - peak) / temperature) * 2^40; 0 under the floor. */
INLINE vf scaled_vector(const weighing *row, vf x) {
    vf y = exp_negative((x - set_v(row->peak)) / set_v(row->temperature)) * set_v(SCALE);
    return select_v(x < set_v(row->floor), set_v(0.0f), y);
}

/* The same of `count` tokens from `at` on. */
INLINE void scaled(const weighing *row, int64_t at, int64_t count, float *out) {
    const float *x = row->x + at;
    int64_t i = 0;
    for (; i + VL <= count; i += VL) store_v(out + i, scaled_vector(row, load_v(x + i)));
    if (i < count) {
        float rest[VL] = {0}, e[VL];
        memcpy(rest, x + i, (size_t)(count - i) * sizeof(float));
        store_v(e, scaled_vector(row, load_v(rest)));
        memcpy(out + i, e, (size_t)(count - i) * sizeof(float));
    }
}

/* Integer weights of the tokens from `at` on; returns how many these are. */
INLINE int64_t weigh(const weighing *row, int64_t at, int64_t *weights) {
    int64_t count = row->width - at < RUN ? row->width - at : RUN;
    float fresh[RUN];
    const float *known = row->known == NULL ? fresh : row->known + at;
    if (row->known == NULL) scaled(row, at, count, fresh);
    for (int64_t i = 0; i < count; i++) weights[i] = (int64_t)known[i];
    return count;
}

/* A larger logit has no larger bin. */
INLINE int32_t bin_of(const weighing *row, float x) {
    float scale = PER_NAT / row->temperature;
    float place = (row->peak - x) * (scale < 1e30f ? scale : 1e30f);
    return place < (float)(BINS - 1) ? (int32_t)place : BINS - 1;
}

static int by_rank(const void *a, const void *b) {
    const token *one = a, *other = b;
    if (one->value != other->value) return one->value > other->value ? -1 : 1;
    return one->id < other->id ? -1 : one->id > other->id;
}

INLINE int64_t weight_of(const weighing *row, int64_t id) { return (int64_t)row->known[id]; }

/* The tokens of one bin, best first. */
static token *sorted_bin(const weighing *row, int32_t bin, int64_t count) {
    token *found = malloc((size_t)(count + 1) * sizeof *found);
    int64_t n = 0;
    if (found == NULL) return NULL;
    for (int64_t i = 0; i < row->width && n < count; i++)
        if (row->x[i] >= row->floor && bin_of(row, row->x[i]) == bin) found[n++] = (token){row->x[i], (int32_t)i};
    qsort(found, (size_t)n, sizeof *found, by_rank);
    return found;
}

typedef struct {
    int64_t count[BINS], weight[BINS];
} histogram;

/* Count and weigh by bins the tokens that are not under `least`. */
static void fill(const weighing *row, float least, histogram *h) {
    memset(h, 0, sizeof *h);
    for (int64_t at = 0; at < row->width; at += RUN) {
        int64_t n = row->width - at < RUN ? row->width - at : RUN;
        const float *x = row->x + at;
        int32_t above = 0;
        for (int64_t i = 0; i < n; i++) above |= x[i] >= least;
        for (int64_t i = 0; above && i < n; i++)
            if (x[i] >= least) {
                int32_t bin = bin_of(row, x[i]);
                h->count[bin]++;
                h->weight[bin] += (int64_t)row->known[at + i];
            }
    }
    h->count[BINS - 1] = 0; /* never drawn */
}

INLINE float largest(const float *x, int64_t count) {
    float top = -INFINITY, lanes[VL];
    int64_t i = 0;
    vf most = set_v(-INFINITY);
    for (; i + VL <= count; i += VL) most = max_v(most, load_v(x + i));
    store_v(lanes, most);
    for (int j = 0; j < VL; j++) top = lanes[j] > top ? lanes[j] : top;
    for (; i < count; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* A logit that at least `top_k` tokens are not under: the top_k-th of the largest logits of strips. -inf where there are
 * fewer strips. */
static float least_of_best(const weighing *row, int64_t top_k) {
    float best[MOST_RANKED];
    int64_t held = 0;
    if (top_k > MOST_RANKED) return -INFINITY;
    for (int64_t at = 0; at < row->width; at += STRIP) {
        float top = largest(row->x + at, row->width - at < STRIP ? row->width - at : STRIP);
        if (held == top_k && !(top > best[held - 1])) continue;
        int64_t place = held < top_k ? held++ : held - 1;
        for (; place > 0 && top > best[place - 1]; place--) best[place] = best[place - 1];
        best[place] = top;
    }
    return held == top_k ? best[held - 1] : -INFINITY;
}

/* Where top_k, and of what that keeps top_p, cut the row; 0 without memory. */
static int32_t find_limit(const weighing *all, histogram *h, int64_t top_k, double top_p, limit *cut) {
    weighing looked_at = *all, *row = &looked_at;
    float best = least_of_best(all, top_k);
    looked_at.floor = best > all->floor ? best : all->floor;
    fill(row, row->floor, h);
    int64_t left = top_k, total = 0, before = 0;
    int32_t last = 0;
    for (; last < BINS - 1 && h->count[last] < left; last++) {
        left -= h->count[last];
        total += h->weight[last];
    }
    /* Of the bin that top_k ends in, the first `left`. */
    token *tokens = NULL;
    if (last < BINS - 1) {
        tokens = sorted_bin(row, last, h->count[last]);
        if (tokens == NULL) return 0;
        h->count[last] = left;
        h->weight[last] = 0;
        for (int64_t i = 0; i < left; i++) h->weight[last] += weight_of(row, tokens[i].id);
        total += h->weight[last];
        memset(h->count + last + 1, 0, (size_t)(BINS - 1 - last) * sizeof(int64_t));
        memset(h->weight + last + 1, 0, (size_t)(BINS - 1 - last) * sizeof(int64_t));
    }
    double wanted = top_p * (double)total;
    int32_t bin = 0;
    int32_t end = -1; /* the last bin with a kept token */
    for (; bin < BINS; bin++) {
        if (h->count[bin] == 0) continue;
        if (!((double)before < wanted)) break;
        end = bin;
        if (!((double)(before + h->weight[bin]) < wanted)) break;
        before += h->weight[bin];
    }
    int32_t ok = 1;
    *cut = (limit){-INFINITY, row->width};
    if (end >= 0 && (end == last || !((double)(before + h->weight[end]) < wanted))) {
        /* `before` counts the bins before `end`, unless that one was passed whole. */
        if (bin != end) before -= h->weight[end];
        token *mine = end == last && tokens != NULL ? tokens : sorted_bin(row, end, h->count[end]);
        ok = mine != NULL;
        if (ok) {
            int64_t kept = 0;
            for (; kept < h->count[end] && (double)before < wanted; kept++) before += weight_of(row, mine[kept].id);
            *cut = (limit){mine[kept - 1].value, mine[kept - 1].id};
        }
        if (mine != tokens) free(mine);
    }
    free(tokens);
    return ok;
}

INLINE void drop(const weighing *row, int64_t at, int64_t n, limit cut, int64_t *weights) {
    for (int64_t i = 0; i < n; i++) {
        float x = row->x[at + i];
        if (!(x > cut.value || (x == cut.value && at + i <= cut.id))) weights[i] = 0;
    }
}

/* The weights of all runs that the cut leaves; returns their sum. */
static int64_t weigh_runs(const weighing *row, const limit *cut, int64_t *sums) {
    int64_t weights[RUN], total = 0;
    for (int64_t at = 0, run = 0; at < row->width; at += RUN, run++) {
        int64_t n = weigh(row, at, weights), sum = 0;
        if (cut != NULL) drop(row, at, n, *cut, weights);
        for (int64_t i = 0; i < n; i++) sum += weights[i];
        sums[run] = sum;
        total += sum;
    }
    return total;
}

/* The first token whose running total exceeds the share `noise` of `total`, with the weights of `weigh_runs`. */
static int64_t pick(const weighing *row, const limit *cut, const int64_t *sums, int64_t total, double noise) {
    int64_t weights[RUN], runs = (row->width + RUN - 1) / RUN, target = (int64_t)(noise * (double)total), run = 0;
    if (target > total - 1) target = total - 1;
    for (; run < runs - 1 && sums[run] <= target; run++) target -= sums[run];
    int64_t n = weigh(row, run * RUN, weights), i = 0;
    if (cut != NULL) drop(row, run * RUN, n, *cut, weights);
    for (; i < n - 1 && weights[i] <= target; i++) target -= weights[i];
    return run * RUN + i;
}

/* `uniform` of quire/sampling/philox.py for the purpose of drawing; `key`: seed, sequence index, position. */
static double uniform(const int64_t *key, uint32_t attempt) {
    uint64_t seed = (uint64_t)key[0];
    uint32_t c0 = (uint32_t)key[2], c1 = (uint32_t)key[1], c2 = 0, c3 = attempt;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)((uint64_t)(c0 >> 5) << 26 | c1 >> 6) * 0x1p-53;
}

/* Under top_p alone: a token of the row is kept if those before it in the order have less than that share of the weight;
 * else they are drawn from, with the next random number. */
static int64_t draw_nucleus(const weighing *row, double top_p, const int64_t *key, int64_t *sums, int64_t *all) {
    int64_t total = *all = weigh_runs(row, NULL, sums), token = pick(row, NULL, sums, total, uniform(key, 0));
    double wanted = top_p * (double)total;
    for (uint32_t attempt = 1;; attempt++) {
        limit before = {row->x[token], token - 1};
        total = weigh_runs(row, &before, sums);
        if ((double)total < wanted) return token;
        token = pick(row, &before, sums, total, uniform(key, attempt));
    }
}

typedef struct {
    const float *logits, *peak, *temperature, *floor;
    const int64_t *rows, *top_k;
    const double *top_p;
    const int64_t *keys;
    int64_t width;
    int64_t *out;
} draw_job;

/* One token of a row, or -1 without memory; `total`: the weight of all that it was drawn from first. */
static int64_t draw_from(weighing *row, int64_t top_k, double top_p, const int64_t *key, int64_t *total) {
    int64_t runs = (row->width + RUN - 1) / RUN, out = -1;
    int32_t is_cut = top_k > 0 || top_p < 1.0;
    limit cut = {-INFINITY, row->width};
    int64_t *sums = malloc((size_t)runs * sizeof *sums);
    histogram *h = top_k > 0 ? malloc(sizeof *h) : NULL;
    float *known = is_cut ? malloc((size_t)row->width * sizeof *known) : NULL;
    int32_t ok = sums != NULL && (top_k == 0 || h != NULL) && (!is_cut || known != NULL);
    if (ok && is_cut) {
        scaled(row, 0, row->width, known);
        row->known = known;
    }
    if (ok && is_cut && top_k == 0) {
        out = draw_nucleus(row, top_p, key, sums, total);
    } else if (ok && (top_k == 0 || find_limit(row, h, top_k, top_p, &cut))) {
        const limit *kept = is_cut ? &cut : NULL;
        *total = weigh_runs(row, kept, sums);
        out = pick(row, kept, sums, *total, uniform(key, 0));
    }
    free(sums);
    free(h);
    free(known);
    row->known = NULL;
    return out;
}

static void draw_task(void *arg, int64_t task) {
    const draw_job *job = arg;
    int64_t total;
    weighing row = {job->logits + job->rows[task] * job->width, job->width, job->peak[task], job->temperature[task],
                    job->floor[task], NULL};
    job->out[task] = !isfinite(row.peak) ? 0
                     : draw_from(&row, job->top_k[task], job->top_p[task], job->keys + 3 * task, &total);
}

int64_t quire_draw_one(const float *logits, int64_t width, float peak, const draw_rule *rule, float *chance) {
    float below = rule->temperature * rule->log_min_p, mine;
    weighing row = {logits, width, peak, rule->temperature, peak + below, NULL};
    int64_t total = 0, found = isfinite(peak) ? draw_from(&row, rule->top_k, rule->top_p, rule->key, &total) : -1;
    if (found >= 0) {
        scaled(&row, found, 1, &mine);
        *chance = (float)((double)mine / (double)total);
    }
    return found;
}

/* Token out[i] of row rows[i], drawn from what top_k (0: no limit), top_p (1 or more: none) and the floor leave, with the
 * random numbers of key i (seed, sequence index, position); -1 where there was no memory, 0 where the peak is not finite. */
EXPORT void quire_draw(const float *logits, const int64_t *rows, const float *peak, const float *temperature,
                       const float *floor, const int64_t *top_k, const double *top_p, const int64_t *keys, int64_t *out,
                       int64_t count, int64_t width) {
    draw_job job = {logits, peak, temperature, floor, rows, top_k, top_p, keys, width, out};
    quire_parallel(draw_task, &job, count);
}

typedef struct {
    const float *logits;
    const int64_t *tokens;
    int64_t width, count;
    int64_t *total, *rank, *ids;
    const float *peak;
    float *values;
} rank_job;

/* Keep the best of a row, best first: in goes one more, if it is better than the last. */
INLINE void keep_best(float *values, int64_t *ids, int64_t *held, int64_t count, float x, int64_t id) {
    int64_t place = *held < count ? (*held)++ : count - 1;
    for (; place > 0 && x > values[place - 1]; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
    }
    values[place] = x;
    ids[place] = id;
}

static void rank_task(void *arg, int64_t task) {
    const rank_job *job = arg;
    const float *x = job->logits + task * job->width;
    float mine = x[job->tokens[task]], *values = job->values + task * job->count;
    int64_t *ids = job->ids + task * job->count, held = 0, better = 0, total = 0, weights[RUN];
    weighing row = {x, job->width, job->peak[task], 1.0f, -INFINITY, NULL};
    for (int64_t at = 0; at < job->width; at += RUN) {
        int64_t n = weigh(&row, at, weights);
        int64_t equals = job->tokens[task] - at < n ? job->tokens[task] - at : n;
        int32_t above = 0, larger = 0;
        float least = held < job->count ? -INFINITY : job->count ? values[job->count - 1] : INFINITY;
        /* A loop for each, so that the compiler makes vectors of it. */
        for (int64_t i = 0; i < n; i++) total += weights[i];
        for (int64_t i = 0; i < n; i++) larger += x[at + i] > mine;
        for (int64_t i = 0; i < equals; i++) larger += x[at + i] == mine;
        for (int64_t i = 0; i < n; i++) above |= x[at + i] > least;
        better += larger;
        if (!above && !(held < job->count)) continue;
        for (int64_t i = 0; i < n; i++)
            if (job->count && (held < job->count || x[at + i] > values[job->count - 1]))
                keep_best(values, ids, &held, job->count, x[at + i], at + i);
    }
    job->total[task] = total;
    job->rank[task] = better + 1;
}

/* Of one token of each row: its rank; of the row: the weight of all its tokens, and the `count` likeliest. */
EXPORT void quire_rank(const float *logits, const int64_t *tokens, const float *peak, int64_t *total, int64_t *rank,
                       int64_t *ids, float *values, int64_t rows, int64_t width, int64_t count) {
    rank_job job = {logits, tokens, width, count, total, rank, ids, peak, values};
    quire_parallel(rank_task, &job, rows);
}

/* The largest of some logits, and whether one of them is no number. */
typedef struct {
    vf most;
    vi broken;
} extremes;

INLINE void look(extremes *seen, vf x) {
    seen->most = max_v(seen->most, x);
    seen->broken |= x != x;
}

INLINE float peak_of(const extremes *seen) {
    float top = -INFINITY, lanes[VL];
    int32_t broken = 0;
    store_v(lanes, seen->most);
    for (int j = 0; j < VL; j++) broken |= seen->broken[j];
    for (int j = 0; j < VL; j++) top = lanes[j] > top ? lanes[j] : top;
    return broken ? NAN : top;
}

typedef struct {
    float *logits;
    const int64_t *places;
    const uint32_t *words;
    int64_t width, mask_words;
    float *before, *after;
} mask_job;

static void mask_task(void *arg, int64_t task) {
    const mask_job *job = arg;
    float *row = job->logits + task * job->width, rest[32];
    const uint32_t *words = job->places[task] < 0 ? NULL : job->words + job->places[task] * job->mask_words;
    extremes before = {set_v(-INFINITY), set_i(0)}, after = before;
    for (int64_t at = 0; at < job->width; at += 32) {
        uint32_t word = words == NULL ? UINT32_MAX : words[at / 32];
        int64_t n = job->width - at < 32 ? job->width - at : 32;
        float *x = n == 32 ? row + at : rest;
        if (n < 32) {
            for (int64_t i = n; i < 32; i++) rest[i] = -INFINITY;
            memcpy(rest, row + at, (size_t)n * sizeof(float));
        }
        for (int i = 0; i < 32; i += VL) look(&before, load_v(x + i));
        if (word == 0)
            for (int i = 0; i < 32; i += VL) store_v(x + i, set_v(-INFINITY));
        else if (word != UINT32_MAX)
            for (int i = 0; i < 32; i++) x[i] = word >> i & 1 ? x[i] : -INFINITY;
        for (int i = 0; word != 0 && i < 32; i += VL) look(&after, load_v(x + i));
        if (n < 32) memcpy(row + at, rest, (size_t)n * sizeof(float));
    }
    job->before[task] = peak_of(&before);
    job->after[task] = peak_of(&after);
}

/* Every row of the logits without the tokens whose bit is not set in mask places[row] (negative: none), and its largest
 * logit before and after; NaN where there is one. */
EXPORT void quire_mask(float *logits, const int64_t *places, const uint32_t *words, float *before, float *after,
                       int64_t rows, int64_t width, int64_t mask_words) {
    mask_job job = {logits, places, words, width, mask_words, before, after};
    quire_parallel(mask_task, &job, rows);
}

/* The first place of a number that stands in x. */
static int64_t first_of(const float *x, int64_t width, float wanted) {
    int64_t at = 0;
    for (; at + STRIP <= width; at += STRIP) {
        int32_t here = 0;
        for (int64_t i = 0; i < STRIP; i++) here |= x[at + i] == wanted;
        if (here) break;
    }
    while (x[at] != wanted) at++;
    return at;
}

typedef struct {
    const float *logits;
    const draw_rule *rules;
    int64_t width;
    int64_t *out;
} choose_job;

static void choose_task(void *arg, int64_t task) {
    const choose_job *job = arg;
    const float *x = job->logits + task * job->width;
    const draw_rule *rule = job->rules == NULL ? NULL : job->rules + task;
    extremes seen = {set_v(-INFINITY), set_i(0)};
    float rest[VL], chance;
    int64_t i = 0;
    for (; i + VL <= job->width; i += VL) look(&seen, load_v(x + i));
    for (int j = 0; j < VL; j++) rest[j] = i + j < job->width ? x[i + j] : -INFINITY;
    look(&seen, load_v(rest));
    float peak = peak_of(&seen);
    if (!isfinite(peak)) job->out[task] = NOT_FINITE;
    else if (rule == NULL || rule->temperature <= 0.0f) job->out[task] = first_of(x, job->width, peak);
    else {
        int64_t found = quire_draw_one(x, job->width, peak, rule, &chance);
        job->out[task] = found < 0 ? NO_MEMORY : found;
    }
}

/* A token of each row of logits [count, width], by its rule (`rules` NULL: the likeliest of each). NOT_FINITE where the
 * logits are not, NO_MEMORY where there was none to draw. */
EXPORT void quire_choose(const float *logits, const draw_rule *rules, int64_t *out, int64_t count, int64_t width) {
    choose_job job = {logits, rules, width, out};
    if (count == 1) choose_task(&job, 0);
    else quire_parallel(choose_task, &job, count);
}
