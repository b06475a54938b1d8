/* The signal of a ring in shared memory: one process publishes how many bytes it has written, others wait for that.
 * Readers spin for a moment and then sleep in the kernel; the writer enters the kernel only if somebody sleeps. */
#define _GNU_SOURCE
#include "export.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* All zero at first. `quire/ranks/ring.py` knows its size. */
typedef struct {
    _Atomic uint64_t written; /* bytes published so far */
    _Atomic uint32_t bell;    /* changes with every publication: what sleepers wait for */
    _Atomic uint32_t sleepers;
} Signal;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

EXPORT void quire_ring_publish(void *address, uint64_t written) {
    Signal *signal = address;
    atomic_store(&signal->written, written);
    atomic_fetch_add(&signal->bell, 1);
    if (atomic_load(&signal->sleepers) > 0)
        syscall(SYS_futex, &signal->bell, FUTEX_WAKE, INT_MAX, (void *)0, (void *)0, 0);
}

/* Bytes published, once they are more than `seen`, or the same when `timeout_ns` have passed. */
EXPORT uint64_t quire_ring_wait(void *address, uint64_t seen, int64_t spin_ns, int64_t timeout_ns) {
    Signal *signal = address;
    uint64_t written = atomic_load(&signal->written);
    int64_t began = now_ns(), until = began + timeout_ns;
    for (int turn = 0; written == seen; turn++) {
        if (turn % 64 == 63 && now_ns() - began > spin_ns) break;
        pause_briefly();
        written = atomic_load(&signal->written);
    }
    while (written == seen) {
        int64_t left = until - now_ns();
        if (left <= 0) break;
        struct timespec time = {left / 1000000000, left % 1000000000};
        atomic_fetch_add(&signal->sleepers, 1);
        uint32_t bell = atomic_load(&signal->bell);
        written = atomic_load(&signal->written);
        if (written == seen) syscall(SYS_futex, &signal->bell, FUTEX_WAIT, bell, &time, (void *)0, 0);
        atomic_fetch_sub(&signal->sleepers, 1);
        written = atomic_load(&signal->written);
    }
    return written;
}

/* What a reader has taken: stored after it has copied it, read by the writer before it writes there again. */
EXPORT void quire_ring_store(void *address, uint64_t value) { atomic_store((_Atomic uint64_t *)address, value); }

EXPORT uint64_t quire_ring_load(void *address) { return atomic_load((_Atomic uint64_t *)address); }
