/* Draws one token from one row of logits, for whoever draws between the steps of a draft model. */
#pragma once
#include <stdint.h>

/* What one sequence draws with; a temperature of 0 or less: the likeliest token. `DrawRule` of
 * quire/kernels/cpu/sampling.py. */
typedef struct {
    float temperature, log_min_p;
    int64_t top_k; /* 0: no limit */
    double top_p;  /* 1 or more: none */
    int64_t key[3]; /* seed, sequence index, position */
} draw_rule;

/* The token that `quire_draw` gives a row [width] with the largest logit `peak`, and its share of what it was drawn from first;
 * -1 where there is no memory for it or the peak is not finite. */
int64_t quire_draw_one(const float *logits, int64_t width, float peak, const draw_rule *rule, float *chance);
