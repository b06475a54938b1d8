/* Keys and values as int8 codes: how they lie in the cache, and who writes them there. */
#ifndef QUIRE_CODE_CACHE_H
#define QUIRE_CODE_CACHE_H

#include "simd.h"

/* 32-bit words that the cache keeps of one head of a token: quads of codes, padded to whole vectors, then the scale. */
INLINE int64_t quire_code_width(int64_t dim) { return (dim + 15) / 16 * 4 + 1; }

/* x [dim] as codes -127 .. 127, zeros up to `padded`; *scale is what a code is multiplied by. Returns the sum of the codes.
 * The same on every machine: the largest magnitude is exact in any order, every other operation rounds once. A vector
 * with a number that is not finite has codes of 0 and a scale of NaN. */
int32_t quire_to_codes(const float *x, int64_t dim, int64_t padded, int8_t *codes, float *scale);

/* Keys and values [kv_heads][dim] of one token to its slot. */
void quire_write_codes(const float *k, const float *v, float *k_cache, float *v_cache, int64_t slot, int64_t kv_heads,
                       int64_t dim, int64_t block_size);

#endif
