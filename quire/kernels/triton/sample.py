"""From logits to tokens for rows that ask for more than a temperature: changes, the cut of top_k, the draw, which top_p
judges, reports.

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
from quire.kernels.triton import best, edit, nucleus, pick, report
from quire.kernels.triton.sampling_parts import EDITED, MASKED, RAW

_BLOCKS_AT_ONCE = 8
"""Of a row that is drawn from again."""


@dataclass(slots=True)
class SampleScratch:
    """Scratch through which the launches of one step exchange results."""

    block: int
    capacity: int
    few: int
    many: int
    spare: int
    raw_peak: Tensor
    peak: Tensor
    place: Tensor
    sub: Tensor
    """float32 [rows, blocks, groups]: largest entries of groups."""
    weight: Tensor
    likelier: Tensor
    """int64 [rows, blocks]: the weight of the tokens likelier than the drawn one."""
    bound: Tensor
    cursor: Tensor
    found: Tensor
    ids: Tensor
    better: Tensor

    @classmethod
    def allocate(
        cls, rows: int, vocab_size: int, device: torch.device | str, *, block: int = 1024, capacity: int = 16384,
        few: int = 512, many: int = 8192, spare: int = best.SPARE,
    ) -> SampleScratch:  # fmt: skip
        """`capacity`: tokens of a row that can be collected; where there are more the row is read again and again
        instead. `few`, `many`: sizes of the tile that a program holds in registers. `spare`: see `best.SPARE`."""
        blocks = triton.cdiv(vocab_size, block)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            block, capacity, few, many, spare,
            raw_peak=empty(rows, blocks, dtype=torch.float32),
            peak=empty(rows, blocks, dtype=torch.float32),
            place=empty(rows, blocks, dtype=torch.int32),
            sub=empty(rows, blocks, best.SUBS, dtype=torch.float32),
            weight=empty(rows, blocks, dtype=torch.int64),
            likelier=empty(rows, blocks, dtype=torch.int64),
            bound=empty(rows, dtype=torch.float32),
            cursor=empty(rows, dtype=torch.int32),
            found=empty(rows, capacity, dtype=torch.float32),
            ids=empty(rows, capacity, dtype=torch.int32),
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
    """Draw for the `rows` that are staged. What they ask for is among `wants`; without DRAW their tokens are drawn.
    Afterwards the next position of each is staged: a step of the same rows sends nothing."""
    if wants & Wants.DRAW:
        source = _edit(step, rows, wants, scratch)
        _draw(step, rows, wants, source, scratch)
    if wants & Wants.LOGPROBS:
        _report(step, rows, wants, scratch)
    edit.advance(step.stage, rows, step.out.shape[0])


def _mask_words(step: SampledStep) -> int:
    return -(-step.logits.shape[1] // 32)


def _edit(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> int:
    """All changes, and the largest entry of every block; returns where the logits are to be read now."""
    peaks = (scratch.raw_peak, scratch.peak, scratch.place, _group_peaks(wants, scratch))
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


def _group_peaks(wants: Wants, scratch: SampleScratch) -> Tensor | None:
    """Where the peaks of groups go, if a search for the likeliest tokens follows."""
    return scratch.sub if wants & (Wants.TOP_K | Wants.LOGPROBS) else None


def _bound(step: SampledStep, rows: int, source: int, ranked: bool, scratch: SampleScratch) -> None:
    s, vocab = scratch, step.logits.shape[1]
    blocks = s.peak.shape[1]
    best.bound_kernel[(rows,)](
        step.logits, step.edited, step.stage, s.peak, s.sub, s.cursor, s.bound, step.logits.stride(0), vocab,
        _mask_words(step), blocks, triton.next_power_of_2(blocks), s.block, best.SUBS, source, ranked, s.spare,
        num_warps=8)


def _draw(step: SampledStep, rows: int, wants: Wants, source: int, scratch: SampleScratch) -> None:
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    sizes = (vocab, _mask_words(step), blocks, triton.next_power_of_2(blocks), s.block)
    written = (step.tokens.stride(0), step.tokens.shape[1], step.out.stride(0))
    by_number = bool(wants & Wants.TOP_K)
    if by_number:
        _bound(step, rows, source, False, scratch)
    best.weigh_kernel[(blocks, rows)](
        step.logits, step.edited, step.stage, s.peak, s.cursor, s.bound, s.weight, s.found, s.ids, stride, *sizes,
        s.capacity, by_number, source, num_warps=2 if by_number else 1)
    pick.pick_kernel[(rows,)](
        step.logits, step.edited, step.stage, s.raw_peak, s.peak, s.place, s.cursor, s.bound, s.weight, s.found, s.ids,
        step.tokens, step.out, stride, *written, *sizes, s.capacity, s.few, s.many, by_number, source,
        num_warps=16 if by_number else 8)
    if wants & Wants.TOP_P:
        nucleus.likelier_kernel[(blocks, rows)](
            step.logits, step.edited, step.stage, s.peak, s.likelier, step.out, stride, step.out.stride(0), *sizes,
            source, num_warps=1)
        nucleus.redraw_kernel[(rows,)](
            step.logits, step.edited, step.stage, s.raw_peak, s.peak, s.weight, s.likelier, step.tokens, step.out,
            stride, *written, *sizes, _BLOCKS_AT_ONCE, source, num_warps=16)


def _report(step: SampledStep, rows: int, wants: Wants, scratch: SampleScratch) -> None:
    source = MASKED.value if wants & Wants.MASKS else RAW.value
    s, vocab, stride = scratch, step.logits.shape[1], step.logits.stride(0)
    blocks = s.peak.shape[1]
    sizes = (vocab, _mask_words(step), blocks, triton.next_power_of_2(blocks))
    if wants.edits or not wants & Wants.DRAW:  # else the draw has found these peaks
        edit.masked_peaks(step.stage, rows, step.logits, s.peak, s.place, s.sub, _mask_words(step), s.block, source)
    _bound(step, rows, source, True, scratch)
    best.rank_kernel[(blocks, rows)](
        step.logits, step.stage, s.peak, s.cursor, s.bound, s.weight, s.better, s.found, s.ids, step.out, stride,
        step.out.stride(0), *sizes, s.block, s.capacity, source, num_warps=2)
    report.report_kernel[(rows,)](
        step.logits, step.stage, s.peak, s.weight, s.better, s.cursor, s.bound, s.found, s.ids, step.out, step.report,
        stride, step.out.stride(0), step.report.stride(0), *sizes, s.capacity, s.few, source, num_warps=4)
