/* What a draft head does beside its layer: it reads the hidden state before each token, keeps its own guesses in the same
 * slots, and takes the likeliest token, or draws one. A chain of guesses is one call: each pass reads the token of the one
 * before. */
#include "export.h"
#include "pool.h"
#include "recorded.h"
#include "sampling.h"
#include "vmath.h"

/* Columns [at, at + width) of out [rows, out_width] become x [rows, width]. */
EXPORT void quire_put_columns(const float *x, float *out, int64_t rows, int64_t width, int64_t out_width, int64_t at) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(out + r * out_width + at, x + r * width, (size_t)width * sizeof(float));
}

RECORDED(quire_put_columns, PTR(0), PTR(1), INT(2), INT(3), INT(4), INT(5))

/* What is kept [slots, width] of the token before each, found by its sequence's block table; zeros before the first. */
EXPORT void quire_states_before(const float *kept, const int64_t *positions, const int32_t *query_start,
                                const int32_t *table, int64_t stride, int64_t seqs, int64_t block_size, int64_t width,
                                float *out) {
    size_t bytes = (size_t)width * sizeof(float);
    for (int64_t s = 0; s < seqs; s++)
        for (int64_t t = query_start[s]; t < query_start[s + 1]; t++) {
            int64_t before = positions[t] - 1;
            if (before < 0) {
                memset(out + t * width, 0, bytes);
                continue;
            }
            int64_t slot = (int64_t)table[s * stride + before / block_size] * block_size + before % block_size;
            memcpy(out + t * width, kept + slot * width, bytes);
        }
}

RECORDED(quire_states_before, PTR(0), PTR(1), PTR(2), PTR(3), INT(4), INT(5), INT(6), INT(7), PTR(8))

/* Keep a row [width] for each token, in its slot. */
EXPORT void quire_keep_rows(const float *rows, float *kept, const int64_t *slots, int64_t count, int64_t width) {
    for (int64_t t = 0; t < count; t++)
        memcpy(kept + slots[t] * width, rows + t * width, (size_t)width * sizeof(float));
}

RECORDED(quire_keep_rows, PTR(0), PTR(1), PTR(2), INT(3), INT(4))

/* out [seqs, width]: the row of each sequence's last token, which is kept in that token's slot too. */
EXPORT void quire_keep_last(const float *rows, float *kept, const int64_t *slots, const int32_t *query_start, int64_t seqs,
                            int64_t width, float *out) {
    for (int64_t s = 0; s < seqs; s++) {
        int64_t last = query_start[s + 1] - 1;
        quire_keep_rows(rows + last * width, kept, slots + last, 1, width);
        memcpy(out + s * width, rows + last * width, (size_t)width * sizeof(float));
    }
}

RECORDED(quire_keep_last, PTR(0), PTR(1), PTR(2), PTR(3), INT(4), INT(5), PTR(6))

/* The first of the largest numbers, or -1 if that is not finite. */
static int64_t largest(const float *x, int64_t count) {
    vf most = set_v(-__builtin_inff());
    float lanes[VL], best;
    int64_t i = 0;
    for (; i + VL <= count; i += VL) most = max_v(most, load_v(x + i));
    store_v(lanes, most);
    best = lanes[0];
    for (int j = 1; j < VL; j++) best = lanes[j] > best ? lanes[j] : best;
    for (; i < count; i++) best = x[i] > best ? x[i] : best;
    if (!(best - best == 0.0f)) return -1;
    for (i = 0; x[i] != best; i++) {}
    return i;
}

/* The share of e^(the largest of x) in the sum of all. */
static float share(const float *x, int64_t count, float best) {
    vf sums[SUB];
    for (int j = 0; j < SUB; j++) sums[j] = set_v(0.0f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < SUB; j++) sums[j] = sums[j] + exp_negative(load_v(x + i + j * VL) - set_v(best));
    float rest[LANES];
    for (int64_t j = 0; j < LANES; j++) rest[j] = i + j < count ? x[i + j] - best : 2 * EXP_LOW;
    for (int j = 0; j < SUB; j++) sums[j] = sums[j] + exp_negative(load_v(rest + j * VL));
    return 1.0f / sum_lanes(sums);
}

typedef struct {
    const float *logits;
    int64_t width;
    const int64_t *ids;
    const draw_rule *rules;
    int64_t *tokens;
    float *chances;
} guess_job;

static void guess_task(void *arg, int64_t r) {
    const guess_job *job = arg;
    const float *x = job->logits + r * job->width;
    const draw_rule *rule = job->rules && job->rules[r].temperature > 0.0f ? job->rules + r : NULL;
    int64_t found = largest(x, job->width);
    float chance = found < 0 ? -1.0f : share(x, job->width, x[found]);
    if (!(chance > 0.0f)) found = -1; /* a NaN among them */
    if (found >= 0 && rule) found = quire_draw_one(x, job->width, x[found], rule, &chance);
    job->chances[r] = found < 0 ? -1.0f : chance;
    job->tokens[r] = found < 0 ? -1 : job->ids ? job->ids[found] : found;
}

/* The likeliest token of each row of logits [rows, width], or one drawn by the row's rule (`rules` NULL: none is), and its
 * probability among those that it was drawn from. `ids` are the tokens that the columns stand for (NULL: their own
 * numbers). -1 and a chance of -1: the logits are not finite, or there was no memory to draw. */
EXPORT void quire_guess(const float *logits, int64_t rows, int64_t width, const int64_t *ids, const draw_rule *rules,
                        int64_t *tokens, float *chances) {
    guess_job job = {logits, width, ids, rules, tokens, chances};
    if (rules) quire_parallel(guess_task, &job, rows);
    else
        for (int64_t r = 0; r < rows; r++) guess_task(&job, r);
}

/* The context of a recorded step of one token of each sequence: it is changed from pass to pass. */
typedef struct {
    int64_t *ids, *positions, *slots;
    int32_t *context_len;
    const int32_t *table;
    int64_t stride, seqs, block_size;
} chain_step;

static void advance(const chain_step *step, const int64_t *tokens) {
    for (int64_t s = 0; s < step->seqs; s++) {
        int64_t at = ++step->positions[s];
        step->ids[s] = tokens[s] < 0 ? 0 : tokens[s]; /* of a chain that has ended nobody looks at the rest */
        step->context_len[s]++;
        step->slots[s] = (int64_t)step->table[s * step->stride + at / step->block_size] * step->block_size
                         + at % step->block_size;
    }
}

/* A recorded step, its context, and where it leaves its logits. */
typedef struct {
    const recorded_call *calls;
    int64_t count;
    const int64_t *words;
    const float *logits;
} recorded_pass;

/* Run a recorded step up to `passes` times; each time its logits [seqs, width] give every sequence the next token, as
 * `quire_guess` does; `rules`, if there are any, go on to the next position with each pass. The first time it may be
 * another step, `first` (else NULL), and then `step` stands at the token before. `chances` [passes + 1, seqs] begin with
 * those of the chains so far, and become those of the chains with each token; when all have fallen below `floor`, nothing
 * more is run. Returns the passes that were run; if a call of them found something wrong, less than 0, and *failed says
 * which it was. */
EXPORT int64_t quire_draft_chain(const recorded_pass *first, const recorded_pass *next, int64_t *failed,
                                 const chain_step *step, int64_t width, const int64_t *ids, draw_rule *rules,
                                 int64_t *tokens, float *chances, int64_t passes, float floor) {
    int64_t seqs = step->seqs;
    for (int64_t pass = 1; pass <= passes; pass++, tokens += seqs) {
        const recorded_pass *now = pass == 1 && first ? first : next;
        if (quire_replay(now->calls, now->count, now->words, failed)) return -pass;
        float *mine = chances + pass * seqs;
        quire_guess(now->logits, seqs, width, ids, rules, tokens, mine);
        int going = 0;
        for (int64_t s = 0; s < seqs; s++) {
            if (rules) rules[s].key[2]++;
            float before = mine[s - seqs];
            mine[s] = mine[s] < 0.0f || before < 0.0f ? -1.0f : mine[s] * before;
            going |= mine[s] >= floor;
        }
        if (!going) return pass;
        if (pass < passes) advance(step, tokens);
    }
    return passes;
}
