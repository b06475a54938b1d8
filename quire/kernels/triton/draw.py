"""From logits to tokens on the device: argmax, or one draw at a temperature (with min_p) over the whole vocabulary.

The same choice as `quire.sampling.sampler` makes: integer weights, so that the order of summation does not matter, and
one Philox number per (seed, sequence, position). Rows that ask for more (top_k, top_p, penalties) are left to
`kernels/triton/sample.py`. Three small kernels, none of which the host waits for; their torch reference is
`quire.kernels.step_reference.draw`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.step_reference import ELSEWHERE, FIELDS
from quire.kernels.triton.sampling_parts import integer_weights, uniform

BLOCK = 4096
_ELSEWHERE = tl.constexpr(ELSEWHERE)


@dataclass(slots=True)
class DrawScratch:
    """Scratch that the programs of a row's vocabulary blocks exchange results through."""

    peak: Tensor
    place: Tensor
    weight: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device | str) -> DrawScratch:
        blocks = triton.cdiv(vocab_size, BLOCK)
        return cls(
            torch.empty(rows, blocks, dtype=torch.float32, device=device),
            torch.empty(rows, blocks, dtype=torch.int32, device=device),
            torch.empty(rows, blocks, dtype=torch.int64, device=device),
        )


@triton.jit
def _owner_of(rows, row, state_bits, FIELDS: tl.constexpr):
    """The table's row that a row of logits is drawn for; negative: none, or one that is drawn elsewhere."""
    owner = tl.load(rows + row)
    if owner >= 0:
        owner = tl.where(tl.load(state_bits + owner * FIELDS + _ELSEWHERE) != 0, -1, owner)
    return owner


@triton.jit
def _peak_kernel(
    logits, peak, place, state_bits, rows, stride, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    if _owner_of(rows, row, state_bits, FIELDS) < 0:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    # A NaN must not hide: as +inf it makes the row's maximum infinite, which is reported.
    values = tl.where(values == values, values, float("inf"))
    best, where = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(peak + row * BLOCKS + block, best)
    tl.store(place + row * BLOCKS + block, block * BLOCK + where)


@triton.jit
def _weight_kernel(
    logits,
    peak,
    weight,
    state,
    state_bits,
    rows,
    stride,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POW: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1)
    owner = _owner_of(rows, row, state_bits, FIELDS)
    if owner >= 0:
        temperature = tl.load(state + owner * FIELDS)
        if temperature > 0:
            all_blocks = tl.arange(0, BLOCKS_POW)
            top = tl.max(tl.load(peak + row * BLOCKS + all_blocks, mask=all_blocks < BLOCKS, other=float("-inf")))
            floor = top + temperature * tl.load(state + owner * FIELDS + 1)
            token = block * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < VOCAB, other=float("-inf")).to(
                tl.float32
            )
            tl.store(weight + row * BLOCKS + block, tl.sum(integer_weights(values, top, temperature, floor)))


@triton.jit
def _pick_kernel(
    logits,
    peak,
    place,
    weight,
    state,
    state_bits,
    rows,
    positions,
    tokens,
    out,
    ring,
    stride,
    tokens_stride,
    max_len,
    out_stride,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_POW: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Find the token of one row; write it where the host reads it and where the next step does."""
    row = tl.program_id(0)
    owner = _owner_of(rows, row, state_bits, FIELDS)
    if owner >= 0:
        position = tl.load(positions + row)
        all_blocks = tl.arange(0, BLOCKS_POW)
        inside = all_blocks < BLOCKS
        peaks = tl.load(peak + row * BLOCKS + all_blocks, mask=inside, other=float("-inf"))
        top = tl.max(peaks)
        temperature = tl.load(state + owner * FIELDS)
        if temperature > 0:
            floor = top + temperature * tl.load(state + owner * FIELDS + 1)
            noise = uniform(position, state_bits + owner * FIELDS + 2, 0)
            sums = tl.load(weight + row * BLOCKS + all_blocks, mask=inside, other=0)
            total = tl.sum(sums)
            target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
            running = tl.cumsum(sums, axis=0)
            block = tl.minimum(tl.sum((running <= target).to(tl.int32)), BLOCKS - 1)
            target -= tl.sum(tl.where(all_blocks < block, sums, 0))
            lane = tl.arange(0, BLOCK)
            token = block * BLOCK + lane
            values = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < VOCAB, other=float("-inf")).to(
                tl.float32
            )
            inner = tl.cumsum(integer_weights(values, top, temperature, floor), axis=0)
            chosen = block * BLOCK + tl.sum((inner <= target).to(tl.int32))
            chosen = tl.minimum(chosen, VOCAB - 1)
        else:
            places = tl.load(place + row * BLOCKS + all_blocks, mask=inside, other=VOCAB)
            chosen = tl.min(tl.where(peaks == top, places, VOCAB))
            chosen = tl.minimum(chosen, VOCAB - 1)
        finite = (top < float("inf")) & (top > float("-inf"))
        chosen = tl.where(finite, chosen, 0)
        slot = out + tl.load(ring).to(tl.int64) * out_stride
        tl.store(slot + row * 2, chosen)
        tl.store(slot + row * 2 + 1, tl.where(finite, 0, 1))
        tl.store(tokens + owner.to(tl.int64) * tokens_stride + position, chosen, mask=position < max_len)


def draw(
    logits: Tensor,
    state: Tensor,
    rows: Tensor,
    positions: Tensor,
    tokens: Tensor,
    out: Tensor,
    ring: Tensor,
    scratch: DrawScratch,
) -> None:
    """Draw a token for each row of logits [R, V] whose table row `rows[i]` is not negative.

    `state` int32 [table rows, FIELDS] holds how each row draws (temperature 0: argmax). The token of position
    `positions[i]` goes to `tokens[rows[i], positions[i]]` (if it has room) and, with its status, to
    `out[ring[0], i]`, int32 [slots, >= R, 2].
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    pow2 = triton.next_power_of_2(blocks)
    floats = state.view(torch.float32)
    _peak_kernel[(blocks, count)](
        logits, scratch.peak, scratch.place, state, rows, logits.stride(0), vocab, blocks, BLOCK, FIELDS, num_warps=4
    )
    _weight_kernel[(blocks, count)](
        logits,
        scratch.peak,
        scratch.weight,
        floats,
        state,
        rows,
        logits.stride(0),
        vocab,
        blocks,
        pow2,
        BLOCK,
        FIELDS,
        num_warps=4,
    )
    _pick_kernel[(count,)](
        logits,
        scratch.peak,
        scratch.place,
        scratch.weight,
        floats,
        state,
        rows,
        positions,
        tokens,
        out,
        ring,
        logits.stride(0),
        tokens.stride(0),
        tokens.shape[1],
        out.stride(0),
        vocab,
        blocks,
        pow2,
        BLOCK,
        FIELDS,
        num_warps=8,
    )
