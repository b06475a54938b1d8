/* The weighted sums of a token's experts: in ascending order within fixed ranges of experts, the ranges in a tree.
 *
 * Each range is summed from zero, so an element's bits depend on its token alone, not on the batch or on the ranks. */
#include "export.h"
#include "pool.h"
#include "simd.h"

#define COLUMNS 512  /* of a task: the sums of all ranges stay in the first-level cache */
#define MAX_RANGES 8 /* MLP_RANGES of slices.py */

typedef struct {
    const float *found, *weights;
    const int64_t *places, *ranges, *merges;
    float *out;
    int64_t tokens, chosen, width, first, count, pieces;
} sum_job;

/* to = to + found * weight, rounded after the product. */
INLINE void add_weighted(float *to, const float *found, float weight, int64_t n) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store_v(to + i, load_v(to + i) + load_v(found + i) * set_v(weight));
    for (; i < n; i++) to[i] = to[i] + found[i] * weight;
}

static void sum_token(void *arg, int64_t task) {
    const sum_job *job = arg;
    float stack[MAX_RANGES][COLUMNS] __attribute__((aligned(64)));
    int64_t token = task / job->pieces, column = task % job->pieces * COLUMNS, depth = 0, pair = 0;
    int64_t n = job->width - column < COLUMNS ? job->width - column : COLUMNS;
    const int64_t *places = job->places + token * job->chosen, *ranges = job->ranges + token * job->chosen;
    while (pair < job->chosen && places[pair] < 0) pair++; /* experts of ranks before this one */
    for (int64_t r = 0; r < job->count; r++) {
        float *sum = stack[depth++];
        memset(sum, 0, (size_t)n * sizeof(float));
        for (; pair < job->chosen && places[pair] >= 0 && ranges[pair] == job->first + r; pair++)
            add_weighted(sum, job->found + places[pair] * job->width + column, job->weights[token * job->chosen + pair], n);
        for (int64_t merges = job->merges[r]; merges > 0; merges--, depth--)
            for (int64_t i = 0; i < n; i++) stack[depth - 2][i] = stack[depth - 2][i] + stack[depth - 1][i];
    }
    for (int64_t node = 0; node < depth; node++)
        memcpy(job->out + (node * job->tokens + token) * job->width + column, stack[node], (size_t)n * sizeof(float));
}

/* out [nodes, tokens, width]: of each token, what its experts of the ranges [first, first + count) add to each node of the
 * tree over all ranges. places, ranges and weights are [tokens, chosen], ascending by expert: the row of `found` that an
 * expert gave for the token (negative: not one of these ranges), the expert's range, and its weight. */
EXPORT void quire_sum_experts(const float *found, const int64_t *places, const int64_t *ranges, const float *weights,
                              const int64_t *merges, float *out, int64_t tokens, int64_t chosen, int64_t width,
                              int64_t first, int64_t count) {
    sum_job job = {found, weights, places, ranges, merges, out, tokens, chosen, width, first, count,
                   (width + COLUMNS - 1) / COLUMNS};
    quire_parallel(sum_token, &job, tokens * job.pieces);
}
