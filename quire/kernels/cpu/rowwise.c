/* Norms and activations: each row, and for activations each element, on its own. */
#include "export.h"
#include "pool.h"
#include "recorded.h"
#include "vmath.h"

#include <math.h>

enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

#define ROWS_WORTH_SHARING 8192 /* elements of a task: below this a second thread costs more than it brings */

typedef struct {
    const float *x, *weight, *bias;
    float *out;
    int64_t rows, width, step; /* step: rows of a task */
    float eps;
    int32_t kind;
} row_job;

/* Sum of squares (of x - mean) in LANES interleaved chains, the tail as zeros. */
INLINE float square_sum(const float *x, int64_t n, float mean) {
    vf acc[SUB];
    for (int j = 0; j < SUB; j++) acc[j] = set_v(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < SUB; j++) {
            vf v = load_v(x + i + j * VL) - set_v(mean);
            acc[j] = fma_v(v, v, acc[j]);
        }
    float rest[LANES] = {0};
    for (int64_t t = i; t < n; t++) rest[t - i] = x[t] - mean;
    if (i < n)
        for (int j = 0; j < SUB; j++) acc[j] = fma_v(load_v(rest + j * VL), load_v(rest + j * VL), acc[j]);
    return sum_lanes(acc);
}

INLINE float plain_sum(const float *x, int64_t n) {
    vf acc[SUB];
    for (int j = 0; j < SUB; j++) acc[j] = set_v(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < SUB; j++) acc[j] += load_v(x + i + j * VL);
    float rest[LANES] = {0};
    for (int64_t t = i; t < n; t++) rest[t - i] = x[t];
    if (i < n)
        for (int j = 0; j < SUB; j++) acc[j] += load_v(rest + j * VL);
    return sum_lanes(acc);
}

/* out = ((x - mean) * scale) * weight + bias; a product and a sum, each rounded, in the tail too. */
INLINE void scale_row(const float *x, const float *weight, const float *bias, float *out, int64_t n, float mean,
                      float scale) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf v = (load_v(x + i) - set_v(mean)) * set_v(scale) * load_v(weight + i);
        store_v(out + i, bias ? v + load_v(bias + i) : v);
    }
    for (; i < n; i++) {
        float v = (x[i] - mean) * scale * weight[i];
        out[i] = bias ? v + bias[i] : v;
    }
}

void quire_rms_row(const float *x, const float *weight, float *out, int64_t n, float eps) {
    float scale = 1.0f / sqrtf(square_sum(x, n, 0.0f) / (float)n + eps);
    scale_row(x, weight, NULL, out, n, 0.0f, scale);
}

static void rms_task(void *arg, int64_t task) {
    const row_job *job = arg;
    int64_t end = (task + 1) * job->step < job->rows ? (task + 1) * job->step : job->rows;
    for (int64_t r = task * job->step; r < end; r++)
        quire_rms_row(job->x + r * job->width, job->weight, job->out + r * job->width, job->width, job->eps);
}

static void layer_norm_task(void *arg, int64_t task) {
    const row_job *job = arg;
    int64_t n = job->width, end = (task + 1) * job->step < job->rows ? (task + 1) * job->step : job->rows;
    for (int64_t r = task * job->step; r < end; r++) {
        const float *x = job->x + r * n;
        float mean = plain_sum(x, n) / (float)n;
        float scale = 1.0f / sqrtf(square_sum(x, n, mean) / (float)n + job->eps);
        scale_row(x, job->weight, job->bias, job->out + r * n, n, mean, scale);
    }
}

static void share_rows(task_fn fn, row_job *job) {
    job->step = ROWS_WORTH_SHARING / (job->width > 0 ? job->width : 1);
    if (job->step < 1) job->step = 1;
    quire_parallel(fn, job, (job->rows + job->step - 1) / job->step);
}

EXPORT void quire_rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps) {
    row_job job = {x, weight, NULL, out, rows, width, 0, eps, 0};
    share_rows(rms_task, &job);
}

RECORDED(quire_rms_norm, PTR(0), PTR(1), PTR(2), INT(3), INT(4), REAL(5))

EXPORT void quire_layer_norm(const float *x, const float *weight, const float *bias, float *out, int64_t rows, int64_t width,
                      float eps) {
    row_job job = {x, weight, bias, out, rows, width, 0, eps, 0};
    share_rows(layer_norm_task, &job);
}

RECORDED(quire_layer_norm, PTR(0), PTR(1), PTR(2), PTR(3), INT(4), INT(5), REAL(6))

typedef struct {
    float *qkv;
    const float *q_norm, *k_norm;
    int64_t tokens, heads, kv_heads, dim, step;
    float eps;
} heads_job;

/* The factor of an RMS norm of `heads` heads as one vector. Squares are summed inside each head (or come as `squares`),
 * then over the heads in a fixed binary tree: neighbours first, an odd one is carried up. Sums wait in `waiting` until a
 * neighbour of their size is there. */
static float heads_scale(const float *x, const float *squares, int64_t heads, int64_t dim, float eps) {
    float waiting[64];
    int depth = 0;
    for (int64_t h = 0; h < heads; h++) {
        float sum = squares ? squares[h] : square_sum(x + h * dim, dim, 0.0f);
        for (int64_t full = h + 1; full % 2 == 0; full /= 2) sum = waiting[--depth] + sum;
        waiting[depth++] = sum;
    }
    float total = waiting[--depth];
    while (depth > 0) total = waiting[--depth] + total;
    return 1.0f / sqrtf(total / (float)(heads * dim) + eps);
}

static void norm_heads(float *x, const float *weight, int64_t heads, int64_t dim, float eps) {
    scale_row(x, weight, NULL, x, heads * dim, 0.0f, heads_scale(x, NULL, heads, dim, eps));
}

static void norm_heads_task(void *arg, int64_t task) {
    const heads_job *job = arg;
    int64_t width = (job->heads + 2 * job->kv_heads) * job->dim;
    int64_t end = (task + 1) * job->step < job->tokens ? (task + 1) * job->step : job->tokens;
    for (int64_t t = task * job->step; t < end; t++) {
        float *row = job->qkv + t * width;
        norm_heads(row, job->q_norm, job->heads, job->dim, job->eps);
        norm_heads(row + job->heads * job->dim, job->k_norm, job->kv_heads, job->dim, job->eps);
    }
}

EXPORT void quire_norm_all_heads(float *qkv, const float *q_norm, const float *k_norm, int64_t tokens, int64_t heads,
                                 int64_t kv_heads, int64_t dim, float eps) {
    int64_t width = (heads + 2 * kv_heads) * dim;
    heads_job job = {qkv, q_norm, k_norm, tokens, heads, kv_heads, dim, 0, eps};
    job.step = ROWS_WORTH_SHARING / (width > 0 ? width : 1);
    if (job.step < 1) job.step = 1;
    quire_parallel(norm_heads_task, &job, (tokens + job.step - 1) / job.step);
}

RECORDED(quire_norm_all_heads, PTR(0), PTR(1), PTR(2), INT(3), INT(4), INT(5), INT(6), REAL(7))

/* out [tokens, heads]: the sum of squares of each of the first `heads` heads of rows of `width` floats. */
EXPORT void quire_head_squares(const float *qkv, float *out, int64_t tokens, int64_t width, int64_t heads, int64_t dim) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) out[t * heads + h] = square_sum(qkv + t * width + h * dim, dim, 0.0f);
}

/* In place on `heads` heads at x, in rows of `width` floats: their part of an RMS norm over `all` heads as one vector,
 * whose squares are given [tokens, all]. */
EXPORT void quire_norm_some_heads(float *x, const float *weight, const float *squares, int64_t tokens, int64_t width,
                                  int64_t heads, int64_t all, int64_t dim, float eps) {
    for (int64_t t = 0; t < tokens; t++) {
        float scale = heads_scale(NULL, squares + t * all, all, dim, eps);
        scale_row(x + t * width, weight, NULL, x + t * width, heads * dim, 0.0f, scale);
    }
}

INLINE vf activate(vf x, int32_t kind) {
    const vf one = set_v(1.0f), half = set_v(0.5f);
    switch (kind) {
        case SILU:
            return x / (one + exp_v(-x));
        case GELU:
            return half * x * (one + erf_v(x * set_v(0.70710678f)));
        case GELU_TANH: {
            vf cubic = fma_v(x * x * x, set_v(0.044715f), x);
            return half * x * (one + tanh_v(cubic * set_v(0.79788456f)));
        }
        default:
            return max_v(set_v(0.0f), x);
    }
}

INLINE void activate_row(const float *x, const float *up, float *out, int64_t n, int32_t kind) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf y = activate(load_v(x + i), kind);
        store_v(out + i, up ? y * load_v(up + i) : y);
    }
    if (i < n) {
        vf y = activate(load_tail(x + i, n - i), kind);
        store_tail(out + i, up ? y * load_tail(up + i, n - i) : y, n - i);
    }
}

INLINE void activate_rows(const row_job *job, int64_t row, int64_t end, int gated, int32_t kind) {
    int64_t n = job->width;
    for (; row < end; row++) {
        const float *x = job->x + row * n * (gated ? 2 : 1);
        activate_row(x, gated ? x + n : NULL, job->out + row * n, n, kind);
    }
}

INLINE void activate_task(const row_job *job, int64_t task, int gated) {
    int64_t row = task * job->step, end = row + job->step < job->rows ? row + job->step : job->rows;
    switch (job->kind) {
        case SILU: activate_rows(job, row, end, gated, SILU); break;
        case GELU: activate_rows(job, row, end, gated, GELU); break;
        case GELU_TANH: activate_rows(job, row, end, gated, GELU_TANH); break;
        default: activate_rows(job, row, end, gated, RELU);
    }
}

static void act_task(void *arg, int64_t task) { activate_task(arg, task, 0); }
static void act_mul_task(void *arg, int64_t task) { activate_task(arg, task, 1); }

/* out [rows, width] = act(x [rows, width]) */
EXPORT void quire_act(const float *x, float *out, int64_t rows, int64_t width, int32_t kind) {
    row_job job = {x, NULL, NULL, out, rows, width, 0, 0.0f, kind};
    share_rows(act_task, &job);
}

RECORDED(quire_act, PTR(0), PTR(1), INT(2), INT(3), INT32(4))

/* out [rows, width] = act(x[:, :width]) * x[:, width:] */
EXPORT void quire_act_mul(const float *x, float *out, int64_t rows, int64_t width, int32_t kind) {
    row_job job = {x, NULL, NULL, out, rows, width, 0, 0.0f, kind};
    share_rows(act_mul_task, &job);
}

RECORDED(quire_act_mul, PTR(0), PTR(1), INT(2), INT(3), INT32(4))

INLINE vf clamped_gate(vf gate, vf up, vf limit, vf alpha) {
    const vf one = set_v(1.0f);
    gate = select_v(gate > limit, limit, gate);
    up = select_v(up > limit, limit, select_v(up < -limit, -limit, up));
    return gate / (one + exp_v(-(gate * alpha))) * (up + one);
}

static void clamped_task(void *arg, int64_t task) {
    const row_job *job = arg;
    int64_t n = job->width, end = (task + 1) * job->step < job->rows ? (task + 1) * job->step : job->rows;
    const vf limit = set_v(job->weight[0]), alpha = set_v(job->weight[1]);
    for (int64_t row = task * job->step; row < end; row++) {
        const float *gate = job->x + row * n * 2, *up = gate + n;
        float *out = job->out + row * n;
        int64_t i = 0;
        for (; i + VL <= n; i += VL) store_v(out + i, clamped_gate(load_v(gate + i), load_v(up + i), limit, alpha));
        if (i < n)
            store_tail(out + i, clamped_gate(load_tail(gate + i, n - i), load_tail(up + i, n - i), limit, alpha), n - i);
    }
}

/* out [rows, width] = g sigmoid(alpha g) (u + 1), g = min(x[:, :width], limit), u = x[:, width:] within +-limit */
EXPORT void quire_clamped_act_mul(const float *x, float *out, int64_t rows, int64_t width, float limit, float alpha) {
    const float limits[2] = {limit, alpha};
    row_job job = {x, limits, NULL, out, rows, width, 0, 0.0f, 0};
    share_rows(clamped_task, &job);
}

RECORDED(quire_clamped_act_mul, PTR(0), PTR(1), INT(2), INT(3), REAL(4), REAL(5))

typedef struct {
    const float *x, *y;
    float *out;
    int64_t count;
    float factor;
} element_job;

static void element_task(void *arg, int64_t task) {
    const element_job *job = arg;
    int64_t begin = task * ROWS_WORTH_SHARING;
    int64_t end = begin + ROWS_WORTH_SHARING < job->count ? begin + ROWS_WORTH_SHARING : job->count;
    if (job->y)
        for (int64_t i = begin; i < end; i++) job->out[i] = job->x[i] + job->y[i];
    else
        for (int64_t i = begin; i < end; i++) job->out[i] = job->x[i] * job->factor;
}

static void share_elements(element_job *job) {
    quire_parallel(element_task, job, (job->count + ROWS_WORTH_SHARING - 1) / ROWS_WORTH_SHARING);
}

/* out = x + y */
EXPORT void quire_add(const float *x, const float *y, float *out, int64_t count) {
    element_job job = {x, y, out, count, 0.0f};
    share_elements(&job);
}

RECORDED(quire_add, PTR(0), PTR(1), PTR(2), INT(3))

/* out = x * factor */
EXPORT void quire_scale(const float *x, float *out, int64_t count, float factor) {
    element_job job = {x, NULL, out, count, factor};
    share_elements(&job);
}

RECORDED(quire_scale, PTR(0), PTR(1), INT(2), REAL(3))
