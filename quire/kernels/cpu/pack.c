/* Packing weights into panels, in the narrowest format that keeps every bit, and reading rows back. */
#include "export.h"
#include "integer.h"
#include "pool.h"
#include "recorded.h"
#include "weight.h"

#include <math.h>
#include <stdatomic.h>

typedef struct {
    const float *src;
    uint8_t *dst;
    int64_t n, k;
    int32_t format;
    _Atomic int exact;
} pack_job;

/* One group of a column: its scale, its offset and its quanta. */
typedef struct {
    float d, m;
    int8_t q[GROUP];
} quanta;

INLINE int same_bits(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

/* A scale of 17 bits times a quantum of 7 is exact, so fused or not the weight rounds once, the same way. */
INLINE float shorten(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x40) & ~(uint32_t)0x7f;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int try_scale(const float *x, quanta *out, int low, int high) {
    float inverse = out->d != 0.0f ? 1.0f / out->d : 0.0f;
    for (int i = 0; i < GROUP; i++) {
        float q = rintf((x[i] - out->m) * inverse);
        if (!(q >= (float)low && q <= (float)high) || !same_bits(out->d * q + out->m, x[i])) return 0;
        out->q[i] = (int8_t)q;
    }
    return 1;
}

/* w = d * q: the largest magnitude is d times some whole number, most often the largest of a known format. */
static int fit_scaled8(const float *x, quanta *out) {
    static const int usual[] = {127, 128, 16, 8};
    float largest = 0.0f;
    for (int i = 0; i < GROUP; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    out->m = 0.0f;
    for (int i = -4; i < 128; i++) {
        int top = i < 0 ? usual[i + 4] : 127 - i;
        if (top == 0) break;
        out->d = shorten(largest / (float)top);
        if (try_scale(x, out, -128, 127)) return 1;
    }
    return 0;
}

/* w = d * q + m: the least is m itself (q = 0), the greatest is q = 15. */
static int fit_scaled4(const float *x, quanta *out) {
    float least = x[0], greatest = x[0];
    for (int i = 1; i < GROUP; i++) {
        least = x[i] < least ? x[i] : least;
        greatest = x[i] > greatest ? x[i] : greatest;
    }
    out->m = least;
    float guess = (greatest - least) / 15.0f;
    /* Rounding of the greatest hides the scale's last bits: a half-precision scale is the usual one. */
    for (int drop = 0; drop < 2; drop++) {
        uint32_t bits;
        memcpy(&bits, &guess, sizeof bits);
        bits = drop == 0 ? (bits + 0x1000) & ~(uint32_t)0x1fff : (bits + 0x40) & ~(uint32_t)0x7f;
        memcpy(&out->d, &bits, sizeof bits);
        if (try_scale(x, out, 0, 15)) return 1;
    }
    return 0;
}

static int pack_groups(const pack_job *job, int64_t panel, uint8_t *dst) {
    int64_t cols = job->n - panel * NR < NR ? job->n - panel * NR : NR, size = group_bytes(job->format);
    memset(dst, 0, (size_t)panel_bytes(job->format, job->k));
    for (int64_t j = 0; j < cols; j++)
        for (int64_t g = 0; g < job->k / GROUP; g++) {
            const float *x = job->src + (panel * NR + j) * job->k + g * GROUP;
            uint8_t *to = dst + g * size;
            quanta fit;
            if (!(job->format == SCALED8 ? fit_scaled8(x, &fit) : fit_scaled4(x, &fit))) return 0;
            memcpy(to + j * 4, &fit.d, 4);
            if (job->format == SCALED8) {
                for (int i = 0; i < GROUP; i++) to[NR * (4 + i) + j] = (uint8_t)fit.q[i];
                continue;
            }
            memcpy(to + (NR + j) * 4, &fit.m, 4);
            for (int word = 0; word < GROUP / 8; word++) {
                uint32_t q = 0;
                for (int i = 0; i < 8; i++) q |= (uint32_t)fit.q[word * 8 + i] << (4 * i);
                memcpy(to + (NR * (2 + word) + j) * 4, &q, 4);
            }
        }
    return 1;
}

static int pack_plain(const pack_job *job, int64_t panel, uint8_t *dst) {
    int64_t cols = job->n - panel * NR < NR ? job->n - panel * NR : NR;
    uint32_t lost = 0;
    for (int64_t k0 = 0; k0 < job->k; k0 += 16) {
        int64_t k1 = k0 + 16 < job->k ? k0 + 16 : job->k;
        for (int64_t j = 0; j < NR; j++)
            for (int64_t k = k0; k < k1; k++) {
                uint32_t bits = 0;
                if (j < cols) memcpy(&bits, job->src + (panel * NR + j) * job->k + k, 4);
                if (job->format == FLOAT32) memcpy(dst + (k * NR + j) * 4, &bits, 4);
                else {
                    uint16_t half = (uint16_t)(bits >> 16);
                    memcpy(dst + (k * NR + j) * 2, &half, 2);
                    lost |= bits & 0xffff;
                }
            }
    }
    return lost == 0;
}

static void pack_task(void *arg, int64_t panel) {
    pack_job *job = arg;
    if (!atomic_load_explicit(&job->exact, memory_order_relaxed)) return;
    uint8_t *dst = job->dst + panel * panel_bytes(job->format, job->k);
    int exact = job->format < SCALED8 ? pack_plain(job, panel, dst) : pack_groups(job, panel, dst);
    if (!exact) atomic_store_explicit(&job->exact, 0, memory_order_relaxed);
}

/* Bytes of a packed weight [n, k]; 0 if the format cannot hold a k like this. */
EXPORT int64_t quire_packed_bytes(int32_t format, int64_t n, int64_t k) {
    if (format >= SCALED8 && k % GROUP != 0) return 0;
    return (n + NR - 1) / NR * panel_bytes(format, k);
}

/* Weight [n, k] row-major -> panels; columns past n are zero. Returns whether every weight comes back bit for bit;
 * if not, dst is garbage. */
EXPORT int32_t quire_pack(const float *src, void *dst, int64_t n, int64_t k, int32_t format) {
    pack_job job = {src, dst, n, k, format, 1};
    quire_parallel(pack_task, &job, (n + NR - 1) / NR);
    return atomic_load(&job.exact);
}

static float read_weight(const uint8_t *panel, int32_t format, int64_t k, int64_t j) {
    float x, m;
    uint32_t bits = 0;
    if (format == FLOAT32) {
        memcpy(&x, panel + (k * NR + j) * 4, 4);
        return x;
    }
    if (format == BFLOAT16) {
        memcpy((uint8_t *)&bits + 2, panel + (k * NR + j) * 2, 2);
        memcpy(&x, &bits, 4);
        return x;
    }
    const uint8_t *group = panel + k / GROUP * group_bytes(format);
    memcpy(&x, group + j * 4, 4);
    k %= GROUP;
    if (format == SCALED8) return x * (float)(int8_t)group[NR * (4 + k) + j];
    memcpy(&m, group + (NR + j) * 4, 4);
    memcpy(&bits, group + (NR * (2 + k / 8) + j) * 4, 4);
    return x * (float)(bits >> (k % 8 * 4) & 15) + m;
}

typedef struct {
    const int64_t *ids;
    const uint8_t *w;
    float *out;
    int64_t count, k;
    int32_t format;
} embed_job;

#define IDS_OF_A_TASK 16

static void embed_task(void *arg, int64_t task) {
    const embed_job *job = arg;
    int64_t k = job->k, end = (task + 1) * IDS_OF_A_TASK < job->count ? (task + 1) * IDS_OF_A_TASK : job->count;
    for (int64_t i = task * IDS_OF_A_TASK; i < end; i++) {
        if (job->format == INTEGER) {
            quire_int_embed_row(job->w, job->ids[i], k, job->out + i * k);
            continue;
        }
        const uint8_t *panel = job->w + job->ids[i] / NR * panel_bytes(job->format, k);
        for (int64_t j = 0; j < k; j++) job->out[i * k + j] = read_weight(panel, job->format, j, job->ids[i] % NR);
    }
}

/* Row ids[i] of the weight -> out[i], exactly as it was before packing. */
EXPORT void quire_embed(const int64_t *ids, const void *w, int32_t format, float *out, int64_t count, int64_t k) {
    embed_job job = {ids, w, out, count, k, format};
    quire_parallel(embed_task, &job, (count + IDS_OF_A_TASK - 1) / IDS_OF_A_TASK);
}

RECORDED(quire_embed, PTR(0), PTR(1), INT32(2), PTR(3), INT(4), INT(5))
