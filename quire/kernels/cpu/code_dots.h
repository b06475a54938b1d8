/* Dot products of queries and keys that are int8 codes. A kernel of each instruction set carries them out (integer.h);
 * int32 sums are exact in any order, so all of them give the same numbers. */
#ifndef QUIRE_CODE_DOTS_H
#define QUIRE_CODE_DOTS_H

#include <stdint.h>

#define DOT_KEYS 16 /* keys of a group: their quads lie side by side */
#define DOT_ROWS 6  /* most queries of a call */

/* dots[r][16 * g + i] = init[r] + sum over quads of q[r] times the codes of key i of group g (code - bias for kernels
 * that take codes less 128, see int_kernel). */
typedef struct {
    const int8_t *q; /* [rows][quads * 4] */
    int64_t q_stride;
    const int32_t *init;               /* [rows] */
    const uint8_t *const *keys, *const *next; /* by group: [quads][16 keys][4 codes], `step` bytes from quad to quad */
    int64_t step, quads, groups;
    int32_t *dots; /* [rows][dots_stride] */
    int64_t dots_stride;
    int ahead; /* fetch `next` into the cache */
} code_dots;

typedef void (*code_dots_fn)(const code_dots *d, int rows);

/* By the kernel that was chosen for this processor (integer.c). */
void quire_code_dots(const code_dots *d, int rows);
/* What that kernel subtracts from a code of a key before it multiplies. */
int32_t quire_code_bias(void);

#endif
