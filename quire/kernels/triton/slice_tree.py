"""The tree of `quire.kernels.slices` while slices come one after another: a binary counter of sums."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_slice(value, index, LAST: tl.constexpr, c0, c1, c2, c3, c4, c5, c6, c7):
    """Put the sum of slice `index` into a binary counter: place p holds a sum of 2**p slices, and a sum that finds its
    place taken is added to it and goes on to the next. LAST is the highest place in use."""
    if LAST == 0 or (index & 1) == 0:
        c0 = value
    else:
        value = c0 + value
        if LAST == 1 or (index & 2) == 0:
            c1 = value
        else:
            value = c1 + value
            if LAST == 2 or (index & 4) == 0:
                c2 = value
            else:
                value = c2 + value
                if LAST == 3 or (index & 8) == 0:
                    c3 = value
                else:
                    value = c3 + value
                    if LAST == 4 or (index & 16) == 0:
                        c4 = value
                    else:
                        value = c4 + value
                        if LAST == 5 or (index & 32) == 0:
                            c5 = value
                        else:
                            value = c5 + value
                            if LAST == 6 or (index & 64) == 0:
                                c6 = value
                            else:
                                c7 = c6 + value
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def total_of(N: tl.constexpr, c0, c1, c2, c3, c4, c5, c6, c7):
    """What a counter of N slices adds up to, the smallest sums first."""
    value = c0
    if N & 2:
        value = c1 + value if N & 1 else c1
    if N & 4:
        value = c2 + value if N & 3 else c2
    if N & 8:
        value = c3 + value if N & 7 else c3
    if N & 16:
        value = c4 + value if N & 15 else c4
    if N & 32:
        value = c5 + value if N & 31 else c5
    if N & 64:
        value = c6 + value if N & 63 else c6
    if N & 128:
        value = c7 + value if N & 127 else c7
    return value
