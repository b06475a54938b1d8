/* What ranks on one machine tell each other inside a step, through memory that their processes share.
 *
 * A group: every rank has a counter and two slots. Exchange number e goes through slot e % 2: a rank writes its values
 * there and counts itself as arrived; when all have arrived, everybody reads everybody's slot. Who arrives at exchange
 * e + 1 has read all of exchange e, so a slot is free again one exchange later and nobody has to say so.
 *
 * A link: a ring of bytes with one writer and one reader.
 *
 * All zero is the state at the start. Waiting spins for a moment, then sleeps on a futex and looks every few
 * milliseconds whether somebody asked to stop or the other process is gone. How long it spins is learned: where spinning
 * was in vain, because the other rank has no core just now, the next wait spins half as long. Not so in a group if the wait
 * took less than half of the time that this rank has computed before it: then the other rank has a core and only more to do.
 * Prompts have such waits of milliseconds, and the many short ones of decoding that follow should spin. */
#define _GNU_SOURCE
#include "export.h"
#include "pool.h"
#include "recorded.h"
#include "simd.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void quire_linear(const float *x, const void *w, int32_t format, const float *bias, const float *residual, float *out,
                  int64_t rows, int64_t n, int64_t k, const void *slices, int64_t num_slices);
void quire_embed(const int64_t *ids, const void *w, int32_t format, float *out, int64_t count, int64_t k);

enum { OK = 0, ABORTED = 1, LATE = 2, LOST = 3 };

#define LINE 64
#define LOOK_NS 20000000L /* between two looks at what could end the waiting, while asleep */
#define LEAST_SPIN_NS 5000
#define BLOCK 512         /* floats of a row that are summed at once */
#define MAX_STACK 32      /* sums at once; Python refuses trees that need more */

/* Something that changes, and how many sleep until it does. */
typedef struct {
    _Atomic uint32_t value, sleepers;
} bell;

typedef struct {
    bell arrived; /* exchanges that this rank has arrived at, modulo 2^32 */
    _Atomic int32_t process;
    char unused[LINE - sizeof(bell) - 4];
    int64_t lengths[2]; /* bytes that this rank gave, by slot */
    char unused_too[LINE - 16];
} cell;

typedef struct {
    _Atomic uint32_t abort;
    char unused[LINE - 4];
} header;

/* How a rank waits: `most_ns` is how long it spins at most, `spin_ns` how long just now. `met_ns`: when the last exchange of
 * a group was over. */
typedef struct {
    int64_t most_ns, spin_ns, timeout_ns, waited_ns, met_ns;
} patience;

/* A group as one of its ranks sees it. */
typedef struct {
    char *base;
    int64_t rank, size, slot_bytes;
    patience patience;
} group;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void ring_bell(bell *b, uint32_t value) {
    atomic_store(&b->value, value);
    if (atomic_load(&b->sleepers)) syscall(SYS_futex, &b->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int reached(bell *b, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&b->value, memory_order_acquire) - target) >= 0;
}

static int is_gone(_Atomic int32_t *process) {
    int32_t id = atomic_load(process);
    return id != 0 && kill(id, 0) != 0 && errno == ESRCH;
}

static void sleep_on(bell *b, uint32_t target) {
    struct timespec most = {0, LOOK_NS};
    atomic_fetch_add(&b->sleepers, 1);
    uint32_t seen = atomic_load(&b->value);
    if ((int32_t)(seen - target) < 0) syscall(SYS_futex, &b->value, FUTEX_WAIT, seen, &most, NULL, 0);
    atomic_fetch_sub(&b->sleepers, 1);
}

static int64_t doubled(int64_t spin_ns, int64_t most_ns) { return spin_ns * 2 < most_ns ? spin_ns * 2 : most_ns; }

/* Until the bell has reached `target`, or there is no use in waiting. */
static int await(bell *b, uint32_t target, _Atomic uint32_t *abort, _Atomic int32_t *process, patience *p) {
    if (atomic_load_explicit(abort, memory_order_relaxed)) return ABORTED;
    if (reached(b, target)) return OK;
    int64_t began = now_ns(), now = began;
    int state = -1;
    while (state < 0 && now - began < p->spin_ns) {
        for (int i = 0; i < 32 && state < 0; i++, relax())
            if (reached(b, target)) state = OK;
        now = now_ns();
    }
    if (state == OK) p->spin_ns = doubled(p->spin_ns, p->most_ns);
    else if (p->spin_ns / 2 >= LEAST_SPIN_NS) p->spin_ns /= 2;
    while (state < 0) {
        sleep_on(b, target);
        if (reached(b, target)) state = OK;
        else if (atomic_load(abort)) state = ABORTED;
        else if (is_gone(process)) state = reached(b, target) ? OK : LOST;
        else if (now_ns() - began > p->timeout_ns) state = LATE;
    }
    p->waited_ns += now_ns() - began;
    return state;
}

/* ---- a group */

static cell *cell_of(const group *g, int64_t rank) { return (cell *)(g->base + sizeof(header) + rank * sizeof(cell)); }

static char *slot_of(const group *g, int64_t rank, uint32_t number) {
    return g->base + sizeof(header) + g->size * sizeof(cell) + (rank * 2 + number % 2) * g->slot_bytes;
}

static uint32_t own_count(const group *g) { return atomic_load_explicit(&cell_of(g, g->rank)->arrived.value, memory_order_relaxed); }

/* Until every other rank has arrived `target` times. */
static int await_all(group *g, uint32_t target) {
    for (int64_t r = 0; r < g->size; r++) {
        cell *theirs = cell_of(g, r);
        if (r == g->rank) continue;
        int state = await(&theirs->arrived, target, &((header *)g->base)->abort, &theirs->process, &g->patience);
        if (state != OK) return state;
    }
    return OK;
}

/* As await_all, for the others to arrive at the exchange that this rank has arrived at. */
static int meet(group *g, uint32_t target) {
    patience *p = &g->patience;
    int64_t spin = p->spin_ns, before = p->waited_ns;
    int state = await_all(g, target);
    int64_t now = now_ns(), waited = p->waited_ns - before;
    if (waited > 0 && waited * 2 < now - waited - p->met_ns) p->spin_ns = doubled(spin, p->most_ns);
    p->met_ns = now;
    return state;
}

/* Bytes of a group's memory. */
EXPORT int64_t quire_group_bytes(int64_t size, int64_t slot_bytes) {
    return (int64_t)sizeof(header) + size * ((int64_t)sizeof(cell) + 2 * slot_bytes);
}

/* This process is `rank`; from now on others notice when it is gone. */
EXPORT void quire_group_join(group *g) { atomic_store(&cell_of(g, g->rank)->process, (int32_t)getpid()); }

/* Where this rank's values for the next exchange go, once everybody has read what was there before; NULL: see *state. */
EXPORT void *quire_group_room(group *g, int32_t *state) {
    uint32_t count = own_count(g);
    *state = await_all(g, count);
    return *state == OK ? slot_of(g, g->rank, count) : NULL;
}

/* `bytes` of this rank's values are in their slot. */
static void arrive(group *g, int64_t bytes) {
    cell *mine = cell_of(g, g->rank);
    uint32_t count = own_count(g);
    mine->lengths[count % 2] = bytes;
    ring_bell(&mine->arrived, count + 1);
}

/* Arrive, and wait for all; then `parts` [size] say where each rank's values lie and `lengths` [size] how many bytes it
 * said: what does not fit a slot comes with the next exchanges. */
EXPORT int32_t quire_group_exchange(group *g, int64_t bytes, const void **parts, int64_t *lengths) {
    uint32_t number = own_count(g);
    arrive(g, bytes);
    int state = meet(g, number + 1);
    for (int64_t r = 0; state == OK && r < g->size; r++) {
        parts[r] = slot_of(g, r, number);
        lengths[r] = cell_of(g, r)->lengths[number % 2];
    }
    return state;
}

/* One step of a tree: push a rank's node, then add so many times the two sums on top. */
typedef struct {
    int64_t rank, node, merges;
} tree_step;

typedef struct {
    const group *g;
    uint32_t number;
    const tree_step *steps;
    int64_t num_steps, rows, width, blocks;
    const float *bias, *residual;
    float *out;
} sum_job;

static void sum_task(void *arg, int64_t task) {
    const sum_job *job = arg;
    float room[MAX_STACK][BLOCK] __attribute__((aligned(64)));
    const float *stack[MAX_STACK]; /* a rank's node where it lies, or a sum in the room of that place */
    int64_t row = task / job->blocks, col = task % job->blocks * BLOCK, top = 0;
    int64_t n = job->width - col < BLOCK ? job->width - col : BLOCK, at = row * job->width + col;
    for (const tree_step *s = job->steps; s < job->steps + job->num_steps; s++) {
        stack[top++] = (const float *)slot_of(job->g, s->rank, job->number) + s->node * job->rows * job->width + at;
        for (int64_t m = 0; m < s->merges; m++, top--) {
            const float *left = stack[top - 2], *right = stack[top - 1];
            float *to = room[top - 2];
            for (int64_t i = 0; i < n; i++) to[i] = left[i] + right[i];
            stack[top - 2] = to;
        }
    }
    float *out = job->out + at;
    const float *bias = job->bias ? job->bias + col : NULL, *residual = job->residual ? job->residual + at : NULL;
    for (int64_t i = 0; i < n; i++) {
        float x = stack[0][i];
        if (bias) x = x + bias[i];
        out[i] = residual ? x + residual[i] : x;
    }
}

/* out [rows, width] = the tree over the ranks' nodes [nodes, rows, width], + bias, + residual, in that order. This rank's
 * `bytes` are in its slot. */
EXPORT int32_t quire_group_sum(group *g, int64_t bytes, const tree_step *steps, int64_t num_steps, int64_t rows,
                               int64_t width, const float *bias, const float *residual, float *out) {
    uint32_t number = own_count(g);
    arrive(g, bytes);
    int state = meet(g, number + 1);
    if (state != OK) return state;
    sum_job job = {g, number, steps, num_steps, rows, width, (width + BLOCK - 1) / BLOCK, bias, residual, out};
    if (rows * width < 65536)
        for (int64_t task = 0; task < rows * job.blocks; task++) sum_task(&job, task);
    else
        quire_parallel(sum_task, &job, rows * job.blocks);
    return OK;
}

/* Each rank's `bytes` are columns [rows, widths[rank]]; where `out` is given, they are put side by side in it. Who has
 * none does not wait. */
EXPORT int32_t quire_group_gather(group *g, int64_t bytes, const int64_t *widths, int64_t rows, float *out) {
    uint32_t number = own_count(g);
    arrive(g, bytes);
    if (!out) return OK;
    int state = meet(g, number + 1);
    if (state != OK) return state;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t r = 0; r < g->size; out += widths[r++])
            memcpy(out, (float *)slot_of(g, r, number) + row * widths[r], (size_t)widths[r] * sizeof(float));
    return OK;
}

/* A linear layer whose input ranks share: this rank's nodes [nodes, rows, n] of the sums, then those of all ranks. */
EXPORT int32_t quire_group_linear(group *g, const float *x, const void *w, int32_t format, int64_t rows, int64_t n, int64_t k,
                                  const void *slices, int64_t num_slices, int64_t nodes, const tree_step *steps,
                                  int64_t num_steps, const float *bias, const float *residual, float *out) {
    int32_t state;
    float *room = quire_group_room(g, &state);
    if (!room) return state;
    quire_linear(x, w, format, NULL, NULL, room, rows, n, k, slices, num_slices);
    return quire_group_sum(g, nodes * rows * n * (int64_t)sizeof(float), steps, num_steps, rows, n, bias, residual, out);
}

RECORDED_CHECK(quire_group_linear, PTR(0), PTR(1), PTR(2), INT32(3), INT(4), INT(5), INT(6), PTR(7), INT(8), INT(9), PTR(10),
               INT(11), PTR(12), PTR(13), PTR(14))

/* Rows ids[0..count) of a table of which rank r has the rows up to ends[r], from the end of the rank before: each rank
 * writes those that it has, and everybody reads each row from the rank that has it. Ids are known to be in the table. */
EXPORT int32_t quire_group_embed(group *g, const int64_t *ids, int64_t count, const int64_t *ends, const void *w,
                                 int32_t format, int64_t width, float *out) {
    int64_t most = g->slot_bytes / (width * (int64_t)sizeof(float)), first = g->rank ? ends[g->rank - 1] : 0;
    for (; count > 0; ids += most, out += most * width, count -= most) {
        int32_t state;
        int64_t rows = count < most ? count : most;
        float *room = quire_group_room(g, &state);
        if (!room) return state;
        for (int64_t i = 0; i < rows; i++) {
            int64_t row = ids[i] - first;
            if (row >= 0 && ids[i] < ends[g->rank]) quire_embed(&row, w, format, room + i * width, 1, width);
        }
        uint32_t number = own_count(g);
        arrive(g, rows * width * (int64_t)sizeof(float));
        state = meet(g, number + 1);
        if (state != OK) return state;
        for (int64_t i = 0; i < rows; i++) {
            int64_t owner = 0;
            while (ids[i] >= ends[owner]) owner++;
            memcpy(out + i * width, (float *)slot_of(g, owner, number) + i * width, (size_t)width * sizeof(float));
        }
    }
    return OK;
}

RECORDED_CHECK(quire_group_embed, PTR(0), PTR(1), INT(2), PTR(3), PTR(4), INT32(5), INT(6), PTR(7))

/* Each rank's slot has `rows` rows; row i of out is the one of rank owners[i]. */
EXPORT int32_t quire_group_pick(group *g, const int64_t *owners, int64_t rows, int64_t width, float *out) {
    uint32_t number = own_count(g);
    arrive(g, rows * width * (int64_t)sizeof(float));
    int state = meet(g, number + 1);
    for (int64_t i = 0; state == OK && i < rows; i++)
        memcpy(out + i * width, (float *)slot_of(g, owners[i], number) + i * width, (size_t)width * sizeof(float));
    return state;
}

/* ---- a link */

typedef struct {
    _Atomic uint32_t abort;
    _Atomic int32_t writer, reader;
    char unused[LINE - 12];
    bell written; /* rings when there is more to read */
    _Atomic uint64_t head;
    char unused_too[LINE - sizeof(bell) - 8];
    bell read; /* rings when there is more room */
    _Atomic uint64_t tail;
    char unused_as_well[LINE - sizeof(bell) - 8];
} link_head;

/* A link as one of its sides sees it. */
typedef struct {
    char *base;
    int64_t capacity;
    patience patience;
} link_end;

EXPORT int64_t quire_link_bytes(int64_t capacity) { return (int64_t)sizeof(link_head) + capacity; }

EXPORT void quire_link_join(link_end *e, int32_t writes) {
    link_head *h = (link_head *)e->base;
    atomic_store(writes ? &h->writer : &h->reader, (int32_t)getpid());
}

/* Move `bytes` from or to the ring, in pieces of at most an eighth of it, so that the other side need not wait for all. */
EXPORT int32_t quire_link_move(link_end *e, char *data, int64_t bytes, int32_t writes) {
    link_head *h = (link_head *)e->base;
    char *ring = e->base + sizeof(link_head);
    bell *theirs = writes ? &h->read : &h->written, *mine = writes ? &h->written : &h->read;
    int64_t most = e->capacity / 8 > 4096 ? e->capacity / 8 : e->capacity;
    while (bytes > 0) {
        uint32_t rung = atomic_load(&theirs->value);
        uint64_t head = atomic_load(&h->head), tail = atomic_load(&h->tail), at = writes ? head : tail;
        int64_t count = writes ? e->capacity - (int64_t)(head - tail) : (int64_t)(head - tail);
        int64_t straight = e->capacity - (int64_t)(at % (uint64_t)e->capacity);
        if (count == 0) {
            int state = await(theirs, rung + 1, &h->abort, writes ? &h->reader : &h->writer, &e->patience);
            if (state != OK) return state;
            continue;
        }
        if (count > bytes) count = bytes;
        if (count > straight) count = straight;
        if (count > most) count = most;
        char *place = ring + at % (uint64_t)e->capacity;
        if (writes) memcpy(place, data, (size_t)count);
        else memcpy(data, place, (size_t)count);
        atomic_store(writes ? &h->head : &h->tail, at + (uint64_t)count);
        ring_bell(mine, atomic_load(&mine->value) + 1);
        data += count;
        bytes -= count;
    }
    return atomic_load(&h->abort) ? ABORTED : OK;
}
