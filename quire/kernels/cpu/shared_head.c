/* The head of a model whose first and last stage both hold its table: the last stage asks, the first one helps.
 *
 * A GEMM with the table is cut into pieces of its columns. Whoever is free takes the next piece: the asking thread writes
 * it to its result, a thread of the other process to memory that both share. A piece that the helper has taken and not
 * finished in the time of two is computed by the asking thread too: nobody waits for a process without a core, and one
 * that is gone is not even noticed. An element has the same bits from either.
 *
 * All zero is the state at the start. */
#define _GNU_SOURCE
#include "export.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void quire_linear_panels(const float *x, const void *w, int32_t format, float *out, int64_t rows, int64_t n, int64_t k,
                         int64_t panel, int64_t count);
int64_t quire_panel_columns(void);

#define PIECES 32
#define DATA 4096          /* bytes before the rows; _DATA of shared_head.py */
#define LEAST_WAIT_NS 200000
#define LOOK_NS 500000000L /* between two looks whether to stop, while asleep */

typedef struct {
    _Atomic uint32_t stop;
    _Atomic uint32_t asked, sleepers; /* the number of the last job; changes with each, which is what sleepers wait for */
    _Atomic int64_t rows;
    _Atomic uint64_t next;         /* job << 32 | the piece that nobody has taken yet */
    _Atomic uint32_t done[PIECES]; /* the job of which the helper has computed this piece last */
} head;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The next piece of a job, or -1: all are taken, or it is not the job any more. */
static int take_piece(head *h, uint32_t job) {
    uint64_t next = atomic_load(&h->next);
    while ((uint32_t)(next >> 32) == job && (uint32_t)next < PIECES)
        if (atomic_compare_exchange_weak(&h->next, &next, next + 1)) return (int)(uint32_t)next;
    return -1;
}

typedef struct {
    const float *x;
    const void *w;
    int32_t format;
    int64_t rows, n, k, per; /* panels of a piece */
} table_job;

static table_job job_of(const float *x, const void *w, int32_t format, int64_t rows, int64_t n, int64_t k) {
    int64_t panels = (n + quire_panel_columns() - 1) / quire_panel_columns();
    return (table_job){x, w, format, rows, n, k, (panels + PIECES - 1) / PIECES};
}

static void compute(const table_job *job, int piece, float *out) {
    int64_t panel = piece * job->per;
    if (panel * quire_panel_columns() < job->n)
        quire_linear_panels(job->x, job->w, job->format, out, job->rows, job->n, job->k, panel, job->per);
}

static void copy_piece(const table_job *job, int piece, const float *from, float *out) {
    int64_t width = job->per * quire_panel_columns(), column = piece * width;
    if (column + width > job->n) width = job->n - column;
    for (int64_t r = 0; width > 0 && r < job->rows; r++)
        memcpy(out + r * job->n + column, from + r * job->n + column, (size_t)width * sizeof(float));
}

static int finished_by(head *h, int piece, uint32_t job, int64_t until) {
    while (atomic_load(&h->done[piece]) != job) {
        if (now_ns() > until) return 0;
        sched_yield();
    }
    return 1;
}

/* out [rows, n] of x [rows, k], with the help of whoever serves `area`, which has room for at least so many rows of x and,
 * after `most` rows of x, of out. */
EXPORT void quire_head_logits(char *area, int64_t most, const float *x, const void *w, int32_t format, float *out,
                              int64_t rows, int64_t n, int64_t k) {
    head *h = (head *)area;
    float *shared = (float *)(area + DATA);
    uint32_t number = (uint32_t)(atomic_load(&h->next) >> 32) + 1, mine = 0;
    table_job job = job_of(x, w, format, rows, n, k);
    memcpy(shared, x, (size_t)(rows * k) * sizeof(float));
    atomic_store(&h->rows, rows);
    atomic_store(&h->next, (uint64_t)number << 32);
    atomic_store(&h->asked, number);
    if (atomic_load(&h->sleepers)) syscall(SYS_futex, &h->asked, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    int64_t began = now_ns(), count = 0;
    for (int piece; (piece = take_piece(h, number)) >= 0; count++) {
        compute(&job, piece, out);
        mine |= 1u << piece;
    }
    int64_t now = now_ns(), wait = count ? 2 * (now - began) / count : 0;
    for (int piece = 0; piece < PIECES; piece++) {
        if (mine >> piece & 1) continue;
        if (finished_by(h, piece, number, now + (wait > LEAST_WAIT_NS ? wait : LEAST_WAIT_NS)))
            copy_piece(&job, piece, shared + most * k, out);
        else compute(&job, piece, out);
    }
}

/* Compute pieces of what is asked for, until told to stop. */
EXPORT void quire_head_help(char *area, int64_t most, const void *w, int32_t format, int64_t n, int64_t k) {
    head *h = (head *)area;
    float *shared = (float *)(area + DATA);
    uint32_t seen = atomic_load(&h->asked);
    struct timespec look = {0, LOOK_NS};
    while (!atomic_load(&h->stop)) {
        uint32_t asked = atomic_load(&h->asked);
        if (asked == seen) {
            atomic_fetch_add(&h->sleepers, 1);
            if (!atomic_load(&h->stop)) syscall(SYS_futex, &h->asked, FUTEX_WAIT, seen, &look, NULL, 0);
            atomic_fetch_sub(&h->sleepers, 1);
            continue;
        }
        seen = asked;
        for (int piece; (piece = take_piece(h, seen)) >= 0;) {
            int64_t rows = atomic_load(&h->rows);
            if (rows < 1 || rows > most) continue;
            table_job job = job_of(shared, w, format, rows, n, k);
            compute(&job, piece, shared + most * k);
            atomic_store(&h->done[piece], seen);
        }
    }
}

/* End `quire_head_help`; nothing is left to help with. */
EXPORT void quire_head_stop(char *area) {
    head *h = (head *)area;
    atomic_store(&h->stop, 1);
    syscall(SYS_futex, &h->asked, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
