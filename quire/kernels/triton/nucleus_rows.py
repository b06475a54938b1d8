"""top_p alone over rows of logits that are at hand, a program to a row: what `nucleus.py` does for a step's rows, done
for the full sampler, in which the host must not wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sampling_parts import integer_weights, is_finite, uniform

_BLOCK = 1024
_AT_ONCE = 8
_SEED, _POSITION = tl.constexpr(0), tl.constexpr(4)
"""Places among a key's int32 words: seed (two), sequence index (two), position (two)."""


@triton.jit
def _likelier(mine, token, top, temperature, floor, limit, last, WIDTH: tl.constexpr):
    """The weights of some tokens of a row, of those that are likelier than token `last` with the logit `limit`."""
    values = tl.load(mine + token, mask=token < WIDTH, other=float("-inf"))
    weights = integer_weights(values, top, temperature, floor)
    return tl.where((values > limit) | ((values == limit) & (token < last)), weights, 0)


@triton.jit
def _picked(sums, noise, mine, top, temperature, floor, limit, last, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
            BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The first token whose running total exceeds the share `noise` of the weights in `sums`, those of the blocks."""
    blocks = tl.arange(0, BLOCKS_POW)
    total = tl.sum(sums)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    block = tl.minimum(tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32)), BLOCKS - 1)
    target -= tl.sum(tl.where(blocks < block, sums, 0))
    token = block * BLOCK + tl.arange(0, BLOCK)
    weights = _likelier(mine, token, top, temperature, floor, limit, last, WIDTH)
    return tl.minimum(block * BLOCK + tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32)), WIDTH - 1)


@triton.jit
def _kernel(
    values, rows, peak, temperatures, floors, top_p, keys, room, out, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    mine, key = values + tl.load(rows + row) * WIDTH, keys + row * 6
    top, temperature, floor = tl.load(peak + row), tl.load(temperatures + row), tl.load(floors + row)
    blocks = tl.arange(0, BLOCKS_POW)
    limit, last = tl.full([], float("-inf"), tl.float32), row * 0 + WIDTH
    attempt, wanted = row * 0, tl.full([], 0.0, tl.float64)
    going = is_finite(top)
    while going:
        tl.debug_barrier()  # all have read the sums that are written over now
        for start in range(0, BLOCKS, EACH):
            some = start + tl.arange(0, EACH)
            token = some[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            weights = _likelier(mine, token, top, temperature, floor, limit, last, WIDTH)
            tl.store(room + row * BLOCKS + some, tl.sum(weights, axis=1), mask=some < BLOCKS)
        tl.debug_barrier()
        # Not from the first-level cache, which may hold the sums of the attempt before.
        sums = tl.load(room + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0, cache_modifier=".cg")
        left = tl.sum(sums).to(tl.float64)
        wanted = tl.where(attempt == 0, tl.load(top_p + row) * left, wanted)
        going = (attempt == 0) | (left >= wanted)
        if going:
            noise = uniform(tl.load(key + _POSITION), key + _SEED, attempt)
            last = _picked(sums, noise, mine, top, temperature, floor, limit, last, WIDTH, BLOCKS, BLOCKS_POW, BLOCK)
            limit = tl.load(mine + last)
            attempt += 1
    tl.store(out + row, tl.where(is_finite(top), last, 0).to(tl.int64))


def draw_nucleus(values: Tensor, rows: Tensor, peak: Tensor, temperature: Tensor, floor: Tensor, top_p: Tensor,
                 keys: Tensor) -> Tensor:
    """A token of each of the `rows` of float32 `values` [R, width]; all else is by place in `rows`. `keys`, int64
    [rows, 3]: seed, sequence index, position."""
    count, width = len(rows), values.shape[1]
    blocks = triton.cdiv(width, _BLOCK)
    room = torch.empty(count, blocks, dtype=torch.int64, device=values.device)
    out = torch.empty(count, dtype=torch.int64, device=values.device)
    _kernel[(count,)](
        values.contiguous(), rows.contiguous(), peak.contiguous(), temperature.contiguous(), floor.contiguous(),
        top_p.contiguous(), keys.contiguous().view(torch.int32), room, out, width, blocks,
        triton.next_power_of_2(blocks), _BLOCK, _AT_ONCE, num_warps=16)
    return out
