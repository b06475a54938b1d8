"""From logits to tokens for rows that ask for more than a temperature: changes, the cut, the draw, reports.

The same choice as `quire.sampling.sampler` makes for them. Every launch reads what it needs from one staged buffer
(`kernels/sampled_row.py`), so a captured sequence of launches serves any step of as many rows that asks for the same
kinds of things.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.kernels.sampled_row import Wants
from quire.kernels.triton import band, band_refine, band_search, cut, cut_search, edit, pick, report
from quire.kernels.triton.sampling_parts import EDITED, MASKED, RAW

BANDED = False
"""Which kernels find cuts and the likeliest tokens: those of `band.py`, or those of `cut.py`, which were measured on a
chip. `quire bench gpu --sampling --sampling-kernels both` times both."""


@dataclass(slots=True)
class SampleScratch:
    """Scratch through which the launches of one step exchange results."""

    block: int
    capacity: int
    few: int
    many: int
    raw_peak: Tensor
    peak: Tensor
    place: Tensor
    weight: Tensor
    sums: Tensor
    above: Tensor
    pivots: Tensor
    guess: Tensor
    bracket: Tensor
    found: Tensor
    ids: Tensor
    cut: Tensor
    cut_id: Tensor
    banded: bool
    """Whether the kernels of `band.py` are used, which need what follows."""
    near: int
    far: int
    held: int
    """Tokens of a band that a program holds in registers."""
    sub: Tensor
    beside: Tensor
    tops: Tensor
    cursor: Tensor
    upper: Tensor
    whole: Tensor
    better: Tensor

    @classmethod
    def allocate(
        cls, rows: int, vocab_size: int, device: torch.device | str, *, block: int = 1024, capacity: int = 16384,
        few: int = 512, many: int = 4096, banded: bool | None = None, near: int = band.NEAR,
        far: int = band.FAR, held: int = 8192,
    ) -> SampleScratch:  # fmt: skip
        """`capacity`: tokens that can be in question at a row's cut; where there are more the row is read again and
        again instead. `few`, `many`: sizes of the tile that a program holds in registers. `banded`: as BANDED if it is
        None."""
        blocks = triton.cdiv(vocab_size, block)
        banded = BANDED if banded is None else banded

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            block, capacity, few, many,
            raw_peak=empty(rows, blocks, dtype=torch.float32),
            peak=empty(rows, blocks, dtype=torch.float32),
            place=empty(rows, blocks, dtype=torch.int32),
            weight=empty(rows, blocks, dtype=torch.int64),
            sums=empty(rows, cut.SUM_WORDS, dtype=torch.int64),
            above=empty(rows, cut.LEVELS, cut.LEVEL_WORDS, dtype=torch.float32),
            pivots=empty(rows, cut.LEVELS, cut.LEVEL_WORDS, dtype=torch.float32),
            guess=empty(rows, dtype=torch.float32),
            bracket=empty(rows, 2, dtype=torch.float32),
            found=empty(rows, capacity, dtype=torch.float32),
            ids=empty(rows, capacity, dtype=torch.int32),
            cut=empty(rows, dtype=torch.float32),
            cut_id=empty(rows, dtype=torch.int32),
            banded=banded, near=near, far=far, held=held,
            beside=empty(rows, band_refine.BESIDE_WORDS, dtype=torch.float32),
            sub=empty(rows, blocks, band.SUBS, dtype=torch.float32),
            tops=empty(rows, dtype=torch.float32),
            cursor=empty(rows, dtype=torch.int32),
            upper=empty(rows, blocks, dtype=torch.int64),
            whole=empty(rows, blocks, dtype=torch.int64),
            better=empty(rows, blocks, dtype=torch.int32),
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


def sample_rows(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> None:
    """Draw for the `rows` that are staged. What they ask for is among `wants`; without DRAW their tokens are drawn."""
    if wants & Wants.DRAW:
        source = _edit(step, rows, wants, scratch)
        _draw(step, rows, bool(wants & Wants.CUT), source, scratch)
    if wants & Wants.LOGPROBS:
        _report(step, rows, wants, scratch)


def _mask_words(step: SampledStep) -> int:
    return -(-step.logits.shape[1] // 32)


def _edit(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> int:
    """All changes, and the largest entry of every block; returns where the logits are to be read now."""
    peaks = (scratch.raw_peak, scratch.peak, scratch.place, _sub_peaks(scratch))
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


def _sub_peaks(scratch: SampleScratch) -> Tensor | None:
    """Where the peaks of groups go that only the kernels of `band.py` read."""
    return scratch.sub if scratch.banded else None


def _narrow(step: SampledStep, rows: int, source: int, ranked: bool, scratch: SampleScratch) -> None:
    """Which logits the last of the likeliest tokens can have."""
    s, vocab = scratch, step.logits.shape[1]
    blocks = s.peak.shape[1]
    pow2 = triton.next_power_of_2(blocks)
    where = (step.logits, step.edited, step.stage, s.peak, s.sums, s.above)
    sizes = (step.logits.stride(0), vocab, _mask_words(step), blocks, pow2, s.block)
    cut.guess_kernel[(rows,)](*where, s.guess, *sizes, source, ranked, num_warps=8)
    for level in range(cut.LEVELS):
        cut.narrow_kernel[(blocks, rows)](
            *where, s.pivots, s.guess, *sizes, s.many * 3 // 4, level, source, ranked, num_warps=1)


def _draw(step: SampledStep, rows: int, is_cut: bool, source: int, scratch: SampleScratch) -> None:
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    pow2 = triton.next_power_of_2(blocks)
    if is_cut and s.banded:
        _draw_banded(step, rows, source, scratch)
        return
    if is_cut:
        _narrow(step, rows, source, False, scratch)
    cut.weigh_kernel[(blocks, rows)](
        step.logits, step.edited, step.stage, s.peak, s.weight, s.sums, s.above, s.pivots, s.bracket, s.found,
        s.ids, stride, vocab, _mask_words(step), blocks, pow2, s.block, s.capacity, is_cut, source,
        num_warps=2 if is_cut else 1)
    if is_cut:
        cut_search.resolve_kernel[(rows,)](
            step.logits, step.edited, step.stage, s.peak, s.weight, s.sums, s.bracket, s.found, s.ids, s.cut,
            s.cut_id, stride, vocab, _mask_words(step), blocks, pow2, s.block, s.capacity, s.few, s.many, source,
            num_warps=8)
    pick.pick_kernel[(rows,)](
        step.logits, step.edited, step.stage, s.raw_peak, s.peak, s.place, s.weight, s.cut, s.cut_id, step.tokens,
        step.out, stride, step.tokens.stride(0), step.tokens.shape[1], step.out.stride(0), vocab, _mask_words(step),
        blocks, pow2, s.block, is_cut, source, num_warps=8)


def _guess_band(step: SampledStep, rows: int, source: int, ranked: bool, scratch: SampleScratch) -> None:
    s, vocab = scratch, step.logits.shape[1]
    blocks = s.peak.shape[1]
    band.guess_band_kernel[(rows,)](
        step.logits, step.edited, step.stage, s.peak, s.sub, s.tops, s.cursor, s.bracket, s.guess, s.beside,
        step.logits.stride(0), vocab, _mask_words(step), blocks, triton.next_power_of_2(blocks), s.block, band.SUBS,
        source, ranked, s.near, s.far, num_warps=8)


def _draw_banded(step: SampledStep, rows: int, source: int, scratch: SampleScratch) -> None:
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    _guess_band(step, rows, source, False, scratch)
    band_refine.refine_kernel[(triton.cdiv(blocks, band_refine.SHARE), rows)](
        step.logits, step.edited, step.stage, s.tops, s.guess, s.beside, stride, vocab, _mask_words(step), s.block,
        source, num_warps=1)
    band.weigh_band_kernel[(blocks, rows)](
        step.logits, step.edited, step.stage, s.tops, s.cursor, s.bracket, s.guess, s.beside, s.weight, s.upper,
        s.whole, s.found, s.ids, stride, vocab, _mask_words(step), blocks, s.block, s.capacity, s.far, source,
        num_warps=2)
    band_search.finish_kernel[(rows,)](
        step.logits, step.edited, step.stage, s.raw_peak, s.peak, s.place, s.tops, s.cursor, s.bracket, s.weight,
        s.upper, s.whole, s.found, s.ids, step.tokens, step.out, stride, step.tokens.stride(0), step.tokens.shape[1],
        step.out.stride(0), vocab, _mask_words(step), blocks, triton.next_power_of_2(blocks), s.block, s.capacity,
        s.few, s.held, source, num_warps=16)


def _report(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> None:
    source = MASKED.value if wants & Wants.MASKS else RAW.value
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    pow2 = triton.next_power_of_2(blocks)
    if wants.edits or not wants & Wants.DRAW:  # else the draw has found these peaks
        edit.masked_peaks(step.stage, rows, step.logits, s.peak, s.place, _sub_peaks(s), _mask_words(step), s.block,
                          source)
    if s.banded:
        _guess_band(step, rows, source, True, scratch)
        band.rank_band_kernel[(blocks, rows)](
            step.logits, step.stage, s.tops, s.cursor, s.bracket, s.whole, s.better, s.found, s.ids, step.out, stride,
            step.out.stride(0), vocab, _mask_words(step), blocks, s.block, s.capacity, source, num_warps=2)
    else:
        _narrow(step, rows, source, True, scratch)
        report.rank_kernel[(blocks, rows)](
            step.logits, step.stage, s.peak, s.sums, s.above, s.pivots, s.bracket, s.found, s.ids, step.out, stride,
            step.out.stride(0), vocab, _mask_words(step), blocks, pow2, s.block, s.capacity, source, num_warps=2)
    report.report_kernel[(rows,)](
        step.logits, step.stage, s.peak, s.sums, s.whole, s.better, s.cursor, s.bracket, s.found, s.ids, step.out,
        step.report, stride, step.out.stride(0), step.report.stride(0), vocab, _mask_words(step), blocks, pow2,
        s.capacity, s.few, source, s.banded, num_warps=4)
