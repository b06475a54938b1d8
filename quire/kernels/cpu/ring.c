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
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE 64           /* _LINE of ring.py */
#define SKIP 0xFFFFFFFFu  /* _SKIP of ring.py: in place of a length */
#define MORE 0x80000000u  /* _MORE of ring.py */

/* All zero at first. `quire/ranks/ring.py` knows its size. */
typedef struct {
    _Atomic uint64_t written; /* bytes published so far */
    _Atomic uint32_t bell;    /* changes with every publication: what sleepers wait for */
    _Atomic uint32_t sleepers;
    _Atomic int64_t published_ns; /* when that was, by the monotonic clock */
} Signal;

/* What one process knows of a ring: `_Writer` and `_Reader` of ring.py. Whatever stays the same is handed over once, since
 * each argument of a call from Python takes time that ranks wait for. */
typedef struct {
    char *address;
    int64_t num_readers;
    uint64_t capacity;
    int64_t offers_core; /* after a publication, to a reader that waits for it */
} Writer;

typedef struct {
    char *address;
    int64_t reader;
    int64_t num_readers;
    uint64_t capacity;
    uint64_t seen;    /* up to where pieces were handed out */
    uint64_t written; /* up to where they are known to be published */
    int64_t spin_ns;
    int64_t core; /* on which it waits, or -1 */
    int64_t late; /* how often it has come late of late */
    int64_t naps; /* waits in which it sleeps at once */
} Reader;

#define LATE_NS 300000
#define LATE_TOO_OFTEN 4
#define NAPS 128

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

static void wake(Signal *signal) {
    atomic_fetch_add(&signal->bell, 1);
    if (atomic_load(&signal->sleepers) > 0)
        syscall(SYS_futex, &signal->bell, FUTEX_WAKE, INT_MAX, (void *)0, (void *)0, 0);
}

/* What a reader has taken: stored when it waits for more, read by the writer before it writes there again. */
static _Atomic uint64_t *taken_by(char *address, int64_t reader) {
    return (_Atomic uint64_t *)(address + LINE * (1 + reader));
}

static char *bytes_of(char *address, int64_t num_readers) { return address + LINE * (1 + num_readers); }

/* Append a piece to a ring of `capacity` bytes that begins after the lines of the signal and of the readers: its length,
 * with the mark that more pieces follow, then its bytes, up to a multiple of 8. A piece that does not fit before the end
 * of the ring begins at its start. 0: nothing is written, somebody must read first. */
EXPORT int32_t quire_ring_write(const Writer *writer, const char *piece, uint64_t bytes, int32_t more) {
    Signal *signal = (Signal *)writer->address;
    uint64_t capacity = writer->capacity;
    char *ring = bytes_of(writer->address, writer->num_readers);
    uint64_t written = atomic_load(&signal->written), at = written % capacity, padded = (4 + bytes + 7) / 8 * 8;
    uint64_t skipped = at + padded > capacity ? capacity - at : 0, after = written + skipped + padded;
    for (int64_t reader = 0; reader < writer->num_readers; reader++)
        if (after - atomic_load(taken_by(writer->address, reader)) > capacity) return 0;
    uint32_t length = (uint32_t)bytes | (more ? MORE : 0), skip = SKIP;
    if (skipped) {
        memcpy(ring + at, &skip, 4);
        at = 0;
    }
    memcpy(ring + at, &length, 4);
    memcpy(ring + at + 4, piece, bytes);
    atomic_store(&signal->published_ns, now_ns());
    atomic_store(&signal->written, after);
    wake(signal);
    if (writer->offers_core) sched_yield();
    return 1;
}

/* Something is about to be published: readers that sleep get up, and who spins goes on. */
EXPORT void quire_ring_wake(void *address) { wake(address); }

/* A reader that spins offers its core to others, and gets it back from one that computes only when that one's time is up,
 * a millisecond or more later. One that sleeps gets it at once. So whoever has found several messages late, on a core that
 * others want, sleeps for a while: that takes some microseconds more than to spin on a core of one's own. */
static void judge(Reader *reader, int64_t late_ns) {
    if (late_ns > LATE_NS) reader->late++;
    else if (reader->late > 0) reader->late--;
    if (reader->late < LATE_TOO_OFTEN) return;
    reader->late = LATE_TOO_OFTEN - 1;
    reader->naps = NAPS;
}

static uint64_t wait_for(Reader *reader, int64_t timeout_ns) {
    Signal *signal = (Signal *)reader->address;
    uint64_t seen = reader->seen;
    int64_t until = now_ns() + timeout_ns, spin_ns = reader->spin_ns;
    atomic_store(taken_by(reader->address, reader->reader), seen);
    int spins = spin_ns > 0 && reader->naps == 0 && atomic_load(&signal->written) == seen;
    if (reader->naps > 0) {
        reader->naps--;
        spin_ns = 0;
    }
    for (;;) {
        int64_t began = now_ns();
        uint64_t written = atomic_load(&signal->written);
        uint32_t heard = atomic_load(&signal->bell);
        for (int turn = 0; written == seen; turn++) {
            if (turn % 64 == 63) {
                uint32_t bell = atomic_load(&signal->bell);
                int64_t now = now_ns();
                if (bell != heard) began = now; /* something is about to come */
                else if (now - began > spin_ns) break;
                heard = bell;
                sched_yield();
            }
            pause_briefly();
            written = atomic_load(&signal->written);
        }
        if (written != seen) {
            if (spins) judge(reader, now_ns() - atomic_load(&signal->published_ns));
            return written;
        }
        int64_t left = until - now_ns();
        if (left <= 0) return written;
        spins = 0;
        struct timespec time = {left / 1000000000, left % 1000000000};
        atomic_fetch_add(&signal->sleepers, 1);
        uint32_t bell = atomic_load(&signal->bell);
        if (atomic_load(&signal->written) == seen)
            syscall(SYS_futex, &signal->bell, FUTEX_WAIT, bell, &time, (void *)0, 0);
        atomic_fetch_sub(&signal->sleepers, 1);
    }
}

/* Bytes published, once they are more than were seen, or the same when `timeout_ns` have passed. While a reader spins it
 * offers its core to others, of whom the writer may be one. A reader with a core of its own waits on that one, and may
 * leave it afterwards: two that wait on one core begin one after the other, and what has just run is not moved to a core
 * that falls idle. */
static uint64_t wait_on_core(Reader *reader, int64_t timeout_ns) {
    cpu_set_t all, one;
    CPU_ZERO(&one);
    if (reader->core >= 0) CPU_SET(reader->core, &one);
    int bound = reader->core >= 0 && sched_getaffinity(0, sizeof all, &all) == 0
                && sched_setaffinity(0, sizeof one, &one) == 0;
    uint64_t written = wait_for(reader, timeout_ns);
    if (bound) sched_setaffinity(0, sizeof all, &all);
    return written;
}

/* The next piece: where it begins, counted from the address of the ring, times 2^32, and its length, with the mark if more
 * pieces follow. 0: none has come for `timeout_ns`. Its bytes stay until the reader comes for the next one. */
EXPORT uint64_t quire_ring_read(Reader *reader, int64_t timeout_ns) {
    char *ring = bytes_of(reader->address, reader->num_readers);
    for (;;) {
        if (reader->written == reader->seen) reader->written = wait_on_core(reader, timeout_ns);
        if (reader->written == reader->seen) return 0;
        uint64_t at = reader->seen % reader->capacity;
        uint32_t length;
        memcpy(&length, ring + at, 4);
        if (length == SKIP) {
            reader->seen += reader->capacity - at;
            continue;
        }
        reader->seen += (4 + (uint64_t)(length & ~MORE) + 7) / 8 * 8;
        return (uint64_t)(ring + at + 4 - reader->address) << 32 | length;
    }
}
