"""From logits to tokens for rows that ask for more than a temperature: changes, the cut, the draw, reports.

The same choice as `quire.sampling.sampler` makes for them. Every launch reads what it needs from one staged buffer
(`kernels/sampled_row.py`), so a captured sequence of launches serves any step of as many rows that asks for the same
kinds of things.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import sampled_row
from quire.kernels.sampled_row import Wants
from quire.kernels.triton import cut, cut_search, edit, report
from quire.kernels.triton.sampling_parts import (
    EDITED,
    HEAD,
    MASKED,
    RAW,
    WORDS,
    integer_weights,
    is_finite,
    load_float,
    read_logits,
    row_peak,
    uniform,
)

_OWNER = tl.constexpr(sampled_row.OWNER)
_PLACE = tl.constexpr(sampled_row.PLACE)
_POSITION = tl.constexpr(sampled_row.POSITION)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_SEED_LOW = tl.constexpr(sampled_row.SEED_LOW)
_RING = tl.constexpr(sampled_row.RING)


@dataclass(slots=True)
class SampleScratch:
    """What the launches of one step tell each other."""

    block: int
    capacity: int
    few: int
    many: int
    totals: Tensor
    raw_peak: Tensor
    peak: Tensor
    place: Tensor
    weight: Tensor
    sums: Tensor
    above: Tensor
    pivots: Tensor
    bracket: Tensor
    found: Tensor
    ids: Tensor
    cut: Tensor
    cut_id: Tensor

    @classmethod
    def allocate(
        cls, rows: int, vocab_size: int, device: torch.device | str, *, block: int = 1024, capacity: int = 16384,
        few: int = 512, many: int = 4096,
    ) -> SampleScratch:  # fmt: skip
        """`capacity`: tokens that can be in question at a row's cut; where there are more the row is read again and
        again instead. `few`, `many`: sizes of the tile that a program holds in registers."""
        blocks = triton.cdiv(vocab_size, block)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        # In one piece, so that one launch empties them.
        totals = empty(rows * (cut.SUM_WORDS + cut.LEVELS * (cut.PIVOTS + 1) // 2), dtype=torch.int64)
        return cls(
            block, capacity, few, many, totals,
            raw_peak=empty(rows, blocks, dtype=torch.float32),
            peak=empty(rows, blocks, dtype=torch.float32),
            place=empty(rows, blocks, dtype=torch.int32),
            weight=empty(rows, blocks, dtype=torch.int64),
            sums=totals[: rows * cut.SUM_WORDS].view(rows, -1),
            above=totals[rows * cut.SUM_WORDS :].view(torch.float32).view(rows, cut.LEVELS, -1),
            pivots=empty(rows, cut.LEVELS, cut.PIVOTS + 1, dtype=torch.float32),
            bracket=empty(rows, 2, dtype=torch.float32),
            found=empty(rows, capacity, dtype=torch.float32),
            ids=empty(rows, capacity, dtype=torch.int32),
            cut=empty(rows, dtype=torch.float32),
            cut_id=empty(rows, dtype=torch.int32),
        )  # fmt: skip


@dataclass(slots=True)
class SampledStep:
    """Where the launches of a step read and write."""

    stage: Tensor
    logits: Tensor
    tokens: Tensor
    """int32 [table rows, positions]."""
    out: Tensor
    """int32 [slots of the ring, places, 2]: token and status."""
    report: Tensor
    """int32 [slots of the ring, places, REPORT_WORDS]."""
    edited: Tensor
    """float32 [rows, vocabulary], for steps with changes."""
    counts: Tensor
    """int32 [slots, vocabulary], for steps with penalties."""


@triton.jit
def _pick_kernel(
    logits, edited, stage, raw_peak, peak, place, weight, cut, cut_id, tokens, out, stride, tokens_stride, max_len,
    out_stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr,
    BLOCK: tl.constexpr, CUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Find the token of one row; write it where the host reads it and where the next step does."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    owner = tl.load(me + _OWNER)
    if owner >= 0:
        position = tl.load(me + _POSITION)
        blocks = tl.arange(0, BLOCKS_POW)
        inside = blocks < BLOCKS
        peaks = tl.load(peak + row * BLOCKS + blocks, mask=inside, other=float("-inf"))
        top = tl.max(peaks)
        temperature = load_float(me + _TEMPERATURE)
        if (temperature > 0) & is_finite(top):
            sums = tl.load(weight + row * BLOCKS + blocks, mask=inside, other=0)
            total = tl.sum(sums)
            target = (uniform(position, me + _SEED_LOW) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            block = tl.minimum(tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32)), BLOCKS - 1)
            target -= tl.sum(tl.where(blocks < block, sums, 0))
            token = block * BLOCK + tl.arange(0, BLOCK)
            values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
            floor = top + temperature * load_float(me + _TEMPERATURE + 1)
            weights = integer_weights(values, top, temperature, floor)
            if CUT:
                limit, last = tl.load(cut + row), tl.load(cut_id + row)
                weights = tl.where((values > limit) | ((values == limit) & (token <= last)), weights, 0)
            chosen = block * BLOCK + tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32))
        else:
            places = tl.load(place + row * BLOCKS + blocks, mask=inside, other=VOCAB)
            chosen = tl.min(tl.where(peaks == top, places, VOCAB))
        sound = is_finite(row_peak(raw_peak, row, BLOCKS, BLOCKS_POW))
        status = tl.where(sound & (top == float("-inf")), 2, tl.where(sound & is_finite(top), 0, 1))
        chosen = tl.where(status == 0, tl.minimum(chosen, VOCAB - 1), 0)
        slot = out + tl.load(stage + _RING).to(tl.int64) * out_stride + tl.load(me + _PLACE) * 2
        tl.store(slot, chosen)
        tl.store(slot + 1, status)
        tl.store(tokens + owner.to(tl.int64) * tokens_stride + position, chosen, mask=position < max_len)


def sample_rows(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> None:
    """Draw for the `rows` that are staged. What they ask for is among `wants`; without DRAW their tokens are drawn."""
    if wants & Wants.DRAW:
        source = _edit(step, rows, wants, scratch)
        _draw(step, rows, bool(wants & Wants.CUT), source, scratch)
    if wants & Wants.LOGPROBS:
        _report(step, rows, MASKED.value if wants & Wants.MASKS else RAW.value, scratch)


def _mask_words(step: SampledStep) -> int:
    return -(-step.logits.shape[1] // 32)


def _edit(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> int:
    """All changes, and the largest entry of every block; returns where the logits are to be read now."""
    peaks = (scratch.raw_peak, scratch.peak, scratch.place)
    penalties, changes = bool(wants & Wants.PENALTIES), bool(wants & Wants.CHANGES)
    if penalties:
        edit.count_tokens(step.stage, rows, step.tokens, step.counts)

    def run(**parts: bool) -> None:
        edit.edit_logits(step.stage, rows, step.logits, step.edited, step.counts, peaks, _mask_words(step),
                         scratch.block, masks=bool(wants & Wants.MASKS), penalties=penalties, store=wants.edits,
                         **parts)

    if changes:
        run(first=True, last=False)
        edit.change_logits(step.stage, step.tokens, step.edited)
        run(first=False, last=True)
    else:
        run(first=True, last=True)
    return EDITED.value if wants.edits else RAW.value


def _narrow(step: SampledStep, rows: int, source: int, ranked: bool, scratch: SampleScratch) -> None:
    """Which logits the last of the likeliest tokens can have."""
    s, vocab = scratch, step.logits.shape[1]
    blocks = s.peak.shape[1]
    pow2 = triton.next_power_of_2(blocks)
    s.totals.zero_()
    for level in range(cut.LEVELS):
        cut.narrow_kernel[(blocks, rows)](
            step.logits, step.edited, step.stage, s.peak, s.sums, s.above, s.pivots, step.logits.stride(0), vocab,
            _mask_words(step), blocks, pow2, s.block, s.many * 3 // 4, level, source, ranked, num_warps=1)
    cut.bracket_kernel[(rows,)](
        step.stage, s.peak, s.sums, s.above, s.pivots, s.bracket, blocks, pow2, ranked, num_warps=1)


def _draw(step: SampledStep, rows: int, is_cut: bool, source: int, scratch: SampleScratch) -> None:
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    pow2 = triton.next_power_of_2(blocks)
    if is_cut:
        _narrow(step, rows, source, False, scratch)
    cut.weigh_kernel[(blocks, rows)](
        step.logits, step.edited, step.stage, s.peak, s.weight, s.sums, s.bracket, s.found, s.ids, stride,
        vocab, _mask_words(step), blocks, pow2, s.block, s.capacity, is_cut, source, num_warps=4 if is_cut else 1)
    if is_cut:
        cut_search.resolve_kernel[(rows,)](
            step.logits, step.edited, step.stage, s.peak, s.weight, s.sums, s.bracket, s.found, s.ids, s.cut,
            s.cut_id, stride, vocab, _mask_words(step), blocks, pow2, s.block, s.capacity, s.few, s.many, source,
            num_warps=8)
    _pick_kernel[(rows,)](
        step.logits, step.edited, step.stage, s.raw_peak, s.peak, s.place, s.weight, s.cut, s.cut_id, step.tokens,
        step.out, stride, step.tokens.stride(0), step.tokens.shape[1], step.out.stride(0), vocab, _mask_words(step),
        blocks, pow2, s.block, is_cut, source, num_warps=8)


def _report(step: SampledStep, rows: int, source: int, scratch: SampleScratch) -> None:
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    pow2 = triton.next_power_of_2(blocks)
    edit.masked_peaks(step.stage, rows, step.logits, s.peak, s.place, _mask_words(step), s.block, source)
    _narrow(step, rows, source, True, scratch)
    report.rank_kernel[(blocks, rows)](
        step.logits, step.stage, s.peak, s.sums, s.bracket, s.found, s.ids, step.out, stride,
        step.out.stride(0), vocab, _mask_words(step), blocks, pow2, s.block, s.capacity, source, num_warps=4)
    report.report_kernel[(rows,)](
        step.logits, step.stage, s.peak, s.sums, s.bracket, s.found, s.ids, step.out, step.report, stride,
        step.out.stride(0), step.report.stride(0), vocab, _mask_words(step), blocks, pow2, s.capacity, s.few, source,
        num_warps=4)
