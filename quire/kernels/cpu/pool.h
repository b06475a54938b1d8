/* The threads that share one operation's tasks. */
#ifndef QUIRE_POOL_H
#define QUIRE_POOL_H

#include <stdint.h>

typedef void (*task_fn)(void *arg, int64_t task);

/* Run fn(arg, 0 .. tasks-1), each exactly once, in any order, on this thread and on idle pool threads.
 * Returns when all are done. Tasks write disjoint memory, so the result does not depend on who ran what. */
void quire_parallel(task_fn fn, void *arg, int64_t tasks);

int32_t quire_get_num_threads(void);

#endif
