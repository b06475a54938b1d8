/* What NEON does better in assembly. simd.h includes it.
 *
 * To copy a register, or to fill one with a number, costs as much as a fused multiply-add; to load one costs
 * nothing beside them. gcc knows neither: it copies what an instruction overwrites, fills registers with lanes,
 * and loads so many factors ahead that it must store sums to make room. These stay in the order in which they are
 * written, but `fma_at`. */
#ifndef QUIRE_NEON_H
#define QUIRE_NEON_H

/* acc + w * x[lane]; the lane is known when it is compiled. */
INLINE vf fma_lane(vf acc, vf w, vf x, int lane) {
    if (lane == 0) __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(acc) : "w"(w), "w"(x));
    else if (lane == 1) __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[1]" : "+w"(acc) : "w"(w), "w"(x));
    else if (lane == 2) __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[2]" : "+w"(acc) : "w"(w), "w"(x));
    else __asm__ __volatile__("fmla %0.4s, %1.4s, %2.s[3]" : "+w"(acc) : "w"(w), "w"(x));
    return acc;
}

/* A factor of whole vectors, in lane 0, and x * v + sum. */
INLINE vf load_factor(const float *p) {
    vf x;
    __asm__ __volatile__("ldr %s0, %1" : "=w"(x) : "m"(*p));
    return x;
}

INLINE vf fma_factor(vf x, vf v, vf sum) { return fma_lane(sum, v, x, 0); }

/* a * b + the vector at p */
INLINE vf fma_at(vf a, vf b, const void *p) {
    const char(*at)[16] = p;
    vf sum;
    __asm__("ldr %q0, %3\n\tfmla %0.4s, %1.4s, %2.4s" : "=&w"(sum) : "w"(a), "w"(b), "m"(*at));
    return sum;
}

/* Four of 16 bytes as floats, less a number. Each becomes the last bits of 2^23 + byte, and the subtraction is exact: a
 * conversion takes as long as four such instructions. `place` says which bytes, and is 255 for those of 2^23. */
INLINE vf four_bytes_to_float(uint8x16_t bytes, uint8x16_t place, float less) {
    static const int32_t two_to_23[4] = {0x4b000000, 0x4b000000, 0x4b000000, 0x4b000000};
    vf x;
    __asm__ __volatile__("ldr %q0, %1\n\ttbx %0.16b, {%2.16b}, %3.16b\n\tfsub %0.4s, %0.4s, %4.4s"
                         : "=&w"(x) : "m"(two_to_23), "w"(bytes), "w"(place), "w"(set_v(less)));
    return x;
}

#define PLACE(a, b, c, d) {a, 255, 255, 255, b, 255, 255, 255, c, 255, 255, 255, d, 255, 255, 255}

/* Byte i of each word. */
INLINE vf word_bytes_to_float(uint8x16_t words, int i) {
    const uint8x16_t places[4] = {PLACE(0, 4, 8, 12), PLACE(1, 5, 9, 13), PLACE(2, 6, 10, 14), PLACE(3, 7, 11, 15)};
    return four_bytes_to_float(words, places[i], 8388608.0f);
}

/* 16 signed bytes at p with 128 added, and the i-th four of them as floats. */
INLINE uint8x16_t load_shifted_bytes(const void *p) { return veorq_u8(vld1q_u8(p), vdupq_n_u8(128)); }

INLINE vf shifted_bytes_to_float(uint8x16_t bytes, int i) {
    const uint8x16_t places[4] = {PLACE(0, 1, 2, 3), PLACE(4, 5, 6, 7), PLACE(8, 9, 10, 11), PLACE(12, 13, 14, 15)};
    return four_bytes_to_float(bytes, places[i], 8388736.0f);
}

#endif
