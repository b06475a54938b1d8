/* exp, tanh and erf of a vector, accurate to about an ulp or two; a lane's result depends on that lane alone.
 *
 * The polynomials are minimax fits on the intervals named beside them. NaN goes in and comes out. */
#ifndef QUIRE_VMATH_H
#define QUIRE_VMATH_H

#include "simd.h"

#define POLY(x, ...) polynomial(x, (const float[]){__VA_ARGS__}, sizeof((const float[]){__VA_ARGS__}) / sizeof(float))

/* Horner's rule, highest coefficient first. */
INLINE vf polynomial(vf x, const float *c, int count) {
    vf y = set_v(c[0]);
    UNROLL for (int i = 1; i < count; i++) y = fma_v(y, x, set_v(c[i]));
    return y;
}

#define EXP_LOW -87.33654f /* below this e^x is no normal float, and taken as 0 */

#if defined(__aarch64__)
/* The sum takes its addend's place, so a constant is loaded for each: a copy of a register costs as much as the sum. */
#define FMA_CONSTANT(a, b, c)                                                                                       \
    ({                                                                                                              \
        static const float four_[VL] = {c, c, c, c};                                                                \
        fma_at(a, b, four_);                                                                                        \
    })
#define POLY_6(x, a, b, c, d, e, f)                                                                                 \
    FMA_CONSTANT(FMA_CONSTANT(FMA_CONSTANT(FMA_CONSTANT(FMA_CONSTANT(set_v(a), x, b), x, c), x, d), x, e), x, f)
#else
#define FMA_CONSTANT(a, b, c) fma_v(a, b, set_v(c))
#define POLY_6 POLY
#endif

/* e^x for EXP_LOW <= x < 88.3: 2^n e^r, |r| <= ln 2 / 2. */
#define SHIFT 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer held in the low bits */
INLINE vf exp_inner(vf y) {
    vf biased = FMA_CONSTANT(y, set_v(1.44269504f), SHIFT);
    vf n = biased - set_v(SHIFT);
    vf r = fma_v(n, set_v(-0.693359375f), y);
    r = fma_v(n, set_v(2.12194440e-4f), r);
    vf q = POLY_6(r, 1.9917832e-4f, 1.3946086e-3f, 8.333266e-3f, 4.166627e-2f, 1.6666667e-1f, 0.5f);
    vf e = fma_v(r * r, q, r) + set_v(1.0f);
    vi power = ((vi)biased + set_i(127)) << 23;
    return e * (vf)power;
}

/* y, but 0 where x < limit. */
INLINE vf zero_below(vf x, vf limit, vf y) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_NLT_UQ), (__m512)y);
#else
    return select_v(x < limit, set_v(0.0f), y);
#endif
}

/* e^x; the largest power is kept finite. */
INLINE vf exp_v(vf x) {
    const vf low = set_v(EXP_LOW);
    return zero_below(x, low, exp_inner(min_v(set_v(88.37626f), max_v(low, x))));
}

/* e^x for x <= 0: the same bits as exp_v, with less to do. */
INLINE vf exp_negative(vf x) {
    const vf low = set_v(EXP_LOW);
    return zero_below(x, low, exp_inner(max_v(low, x)));
}

INLINE vf abs_v(vf x) { return (vf)((vi)x & set_i(0x7fffffff)); }

INLINE vf copy_sign(vf magnitude, vf sign) {
    return (vf)((vi)magnitude | ((vi)sign & set_i((int32_t)0x80000000)));
}

INLINE vf tanh_v(vf x) {
    vf a = abs_v(x), z = x * x;
    vf q = POLY(z, 2.147537e-3f, -8.182674e-3f, 2.1702968e-2f, -5.3947203e-2f, 1.333321e-1f, -3.333333e-1f);
    vf small = fma_v(x * z, q, x); /* |x| < 0.625 */
    vf e = exp_v(a + a);
    vf large = set_v(1.0f) - set_v(2.0f) / (e + set_v(1.0f));
    return select_v(a < set_v(0.625f), small, copy_sign(large, x));
}

INLINE vf erf_v(vf x) {
    vf a = min_v(set_v(4.0f), abs_v(x)), z = x * x;
    vf s = POLY(z, 8.29661e-5f, -8.1258063e-4f, 5.1996e-3f, -2.6858851e-2f, 1.1283686e-1f, -3.7612632e-1f,
                1.2837917e-1f);
    vf small = fma_v(x, s, x); /* |x| < 0.9375 */
    vf log_erfc = POLY(a, -2.1278764e-5f, 4.36575e-4f, -4.181241e-3f, 2.5146078e-2f, -1.0832107e-1f, -6.333099e-1f,
                       -1.1295332f, 1.7845235e-4f);
    vf large = set_v(1.0f) - exp_v(log_erfc);
    return select_v(abs_v(x) < set_v(0.9375f), small, copy_sign(large, x));
}

#endif
