/* A small pool of threads that shares out the tasks of one operation at a time.
 *
 * Workers join a job that is open and leave when no task is left. The caller never waits for a worker that has
 * not joined: on a busy machine an operation then costs at most what it costs alone, where a barrier would wait
 * for a thread that the system has put aside. A second caller that finds the pool taken runs its job alone. */
#define _GNU_SOURCE
#include "export.h"
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#define MAX_THREADS 256
#define SPINS 4000 /* about 100 us of waiting for the next operation before a worker goes to sleep */
#define STACK_BYTES (4 << 20)
#define CLOSED ((uint64_t)1 << 16)
#define JOINED (CLOSED - 1)
#define GENERATION (CLOSED << 1)

static struct {
    pthread_mutex_t owner; /* held by the thread whose job runs */
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    _Atomic uint64_t state; /* generation | closed | number of workers inside the job */
    _Atomic int sleeping;
    _Atomic int wanted; /* threads that an operation may use, the caller included */
    int started;        /* workers alive; guarded by owner */
    task_fn fn;
    void *arg;
    int64_t tasks;
    _Atomic int64_t next;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, CLOSED, 0, 1, 0, 0, 0, 0, 0};

static pthread_once_t fork_guard = PTHREAD_ONCE_INIT;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static void run_tasks(void) {
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
        if (task >= pool.tasks) return;
        pool.fn(pool.arg, task);
    }
}

static uint64_t await_change(uint64_t seen) {
    for (int i = 0; i < SPINS; i++) {
        uint64_t now = atomic_load_explicit(&pool.state, memory_order_acquire);
        if (now / GENERATION != seen / GENERATION) return now;
        relax();
    }
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.sleeping, 1);
    uint64_t now;
    while ((now = atomic_load(&pool.state)) / GENERATION == seen / GENERATION)
        pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.sleep);
    return now;
}

static void *worker(void *index) {
    uint64_t seen = (uint64_t)(uintptr_t)index;
    int id = (int)(seen & JOINED);
    seen -= (uint64_t)id;
    for (;;) {
        uint64_t now = await_change(seen);
        seen = now;
        if (id >= atomic_load_explicit(&pool.wanted, memory_order_relaxed)) continue;
        while (now / GENERATION == seen / GENERATION && !(now & CLOSED)) {
            if (atomic_compare_exchange_weak(&pool.state, &now, now + 1)) {
                run_tasks();
                atomic_fetch_sub(&pool.state, 1);
                break;
            }
        }
    }
    return NULL;
}

/* A forked child has none of the workers and perhaps a locked mutex: start over. */
static void reset_after_fork(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.state, CLOSED);
    atomic_store(&pool.sleeping, 0);
    pool.started = 0;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

static void start_workers(int count) {
    pthread_once(&fork_guard, watch_forks);
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    uint64_t generation = atomic_load(&pool.state) / GENERATION * GENERATION;
    while (pool.started < count) {
        pthread_t thread;
        uintptr_t index = (uintptr_t)(generation + (uint64_t)pool.started + 1);
        if (pthread_create(&thread, &attr, worker, (void *)index) != 0) break;
        pool.started++;
    }
    pthread_attr_destroy(&attr);
}

static void open_job(task_fn fn, void *arg, int64_t tasks) {
    pool.fn = fn;
    pool.arg = arg;
    pool.tasks = tasks;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    uint64_t generation = atomic_load(&pool.state) / GENERATION + 1;
    atomic_store(&pool.state, generation * GENERATION);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
}

static void close_job(void) {
    uint64_t now = atomic_fetch_or(&pool.state, CLOSED);
    for (int spins = 0; now & JOINED; now = atomic_load_explicit(&pool.state, memory_order_acquire)) {
        if (++spins < 10000) relax();
        else sched_yield();
    }
}

void quire_parallel(task_fn fn, void *arg, int64_t tasks) {
    int threads = atomic_load_explicit(&pool.wanted, memory_order_relaxed);
    if (tasks < 2 || threads < 2 || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t i = 0; i < tasks; i++) fn(arg, i);
        return;
    }
    if (pool.started < threads - 1) start_workers(threads - 1);
    open_job(fn, arg, tasks);
    run_tasks();
    close_job();
    pthread_mutex_unlock(&pool.owner);
}

EXPORT void quire_set_num_threads(int32_t threads) {
    atomic_store(&pool.wanted, threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads);
}

EXPORT int32_t quire_get_num_threads(void) { return atomic_load(&pool.wanted); }
