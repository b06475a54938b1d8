/* A kernel in a form that takes its arguments as 64-bit words: then a list of calls can be kept and run again (recorded.c).
 *
 * `RECORDED(quire_x, PTR(0), INT(1), REAL(2))` after quire_x makes quire_x_recorded. Kernels that return an int32 which
 * is not 0 when something is wrong use RECORDED_CHECK. The words follow the order of the arguments in library.py. */
#ifndef QUIRE_RECORDED_H
#define QUIRE_RECORDED_H

#include "export.h"

#include <stdint.h>
#include <string.h>

typedef int32_t (*recorded_fn)(const int64_t *words);

static inline float word_as_float(int64_t word) {
    uint32_t bits = (uint32_t)word;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define PTR(i) ((void *)(intptr_t)words[i])
#define INT(i) (words[i])
#define INT32(i) ((int32_t)words[i])
#define REAL(i) (word_as_float(words[i]))

#define RECORDED(function, ...)                                                                                     \
    EXPORT int32_t function##_recorded(const int64_t *words) {                                                      \
        function(__VA_ARGS__);                                                                                      \
        return 0;                                                                                                   \
    }
#define RECORDED_CHECK(function, ...)                                                                               \
    EXPORT int32_t function##_recorded(const int64_t *words) { return function(__VA_ARGS__); }

#define MOST_WORDS 24 /* _MOST_WORDS of recording.py; quire_attend has 21 arguments */

/* Argument i is values[i] plus the step's word number bases[i]. Word 0 is zero, so a constant has base 0; word 1 is
 * where the intermediate results lie; the others are what changes from step to step. */
typedef struct {
    recorded_fn run;
    int32_t count;
    uint8_t bases[MOST_WORDS];
    int64_t values[MOST_WORDS];
} recorded_call;

int32_t quire_replay(const recorded_call *calls, int64_t count, const int64_t *step, int64_t *failed);

#endif
