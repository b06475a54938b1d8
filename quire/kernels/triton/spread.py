"""Logits of a draft vocabulary among those of all tokens, in one pass over them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["guessed"])
def _spread_kernel(found, places, out, least, guessed, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCABULARY
    place = tl.load(places + token, mask=inside, other=-1)
    value = tl.load(found + row * guessed + place, mask=place >= 0, other=0.0).to(tl.float32)
    tl.store(out + row * VOCABULARY + token, tl.where(place >= 0, value, least).to(out.dtype.element_ty), mask=inside)


def spread(found: Tensor, places: Tensor, out: Tensor, least: float) -> None:
    """`found` [R, guessed tokens] into `out` [R, vocabulary], both contiguous. `places` int32 [vocabulary]: which of
    the guessed tokens each is; -1: none, its logit is `least`."""
    rows, vocabulary = out.shape
    if rows:
        _spread_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
            found, places, out, least, found.shape[1], vocabulary, _BLOCK, num_warps=4
        )
