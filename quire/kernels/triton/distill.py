"""Cross-entropy of logits against a teacher's distribution and its gradient, a row a program (torch:
`quire.training.distill`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LEAST = tl.constexpr(-1.0e30)


@triton.jit
def _distill_kernel(
    logits, taught, which, weights, losses, width, sharpness, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """What is read again lies in the cache: a row of both is small."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    own = logits + row * width
    theirs = taught + tl.load(which + row) * width
    column = tl.arange(0, BLOCK)
    most, most_taught = tl.full([BLOCK], _LEAST, tl.float32), tl.full([BLOCK], _LEAST, tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        most = tl.maximum(most, tl.load(own + start + column, mask=inside, other=_LEAST).to(tl.float32))
        taught_here = tl.load(theirs + start + column, mask=inside, other=_LEAST).to(tl.float32)
        most_taught = tl.maximum(most_taught, taught_here)
    top, top_taught = tl.max(most, axis=0), tl.max(most_taught, axis=0)
    total, total_taught = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(own + start + column, mask=inside, other=0.0).to(tl.float32) - top
        t = tl.load(theirs + start + column, mask=inside, other=_LEAST).to(tl.float32)
        share = tl.exp((t - top_taught) * sharpness)
        total += tl.where(inside, tl.exp(x), 0.0)
        total_taught += share
        product += share * x
    own_sum, taught_sum = tl.sum(total, axis=0), tl.sum(total_taught, axis=0)
    tl.store(losses + row, weight * (tl.log(own_sum) - tl.sum(product, axis=0) / taught_sum))
    if GRADIENT:
        for start in range(0, width, BLOCK):
            inside = start + column < width
            x = tl.load(own + start + column, mask=inside, other=0.0).to(tl.float32)
            t = tl.load(theirs + start + column, mask=inside, other=0.0).to(tl.float32)
            apart = tl.exp(x - top) / own_sum - tl.exp((t - top_taught) * sharpness) / taught_sum
            tl.store(own + start + column, (weight * apart).to(logits.dtype.element_ty), mask=inside)


def distill(logits: Tensor, taught: Tensor, which: Tensor, weights: Tensor, temperature: float, losses: Tensor,
            gradient: bool) -> None:
    """Into `losses` float32 [n]: weights [n] times the cross-entropy of logits [n, V] against the softmax of rows
    `which` (int64) of `taught` [m, V] at a temperature. With `gradient`, that of their sum takes the logits' place."""
    if len(logits):
        _distill_kernel[(len(logits),)](
            logits, taught, which, weights, losses, logits.shape[1], 1.0 / temperature, gradient, _BLOCK, num_warps=8
        )
