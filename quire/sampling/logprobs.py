"""Log-probabilities of raw logits: of chosen tokens, of the likeliest, and of the candidates of beams. One arithmetic.

The sum over the vocabulary is one of integers (`weights`), so it is exact, and the same in any batch and on any device.
torch's log_softmax in float32 is not taken: over 49,152 tokens it is off by up to 1e-5 a token on x86 and by 4e-5 on
Arm, always to the same side, which adds up along a beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.batch import SamplingBatch
from quire.sampling.kernels import SamplingKernels
from quire.sampling.logprob_columns import pack_columns
from quire.sampling.sending import send
from quire.sampling.token_logprobs import LogprobRecord
from quire.sampling.weights import SCALE, integer_weights, row_chunks


@dataclass(slots=True)
class SampledLogprobs:
    """Raw log-probabilities of chosen tokens, and the likeliest ids at their positions, best first."""

    rows: list[int]
    counts: list[int]
    token_ids: Tensor
    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def moved(self, copy: Callable[[Tensor], Tensor]) -> SampledLogprobs:
        """With its tensors copied somewhere else."""
        tensors = (self.token_ids, self.logprob, self.rank, self.top_ids, self.top_logprobs)
        return SampledLogprobs(self.rows, self.counts, *(copy(tensor) for tensor in tensors))

    def records(self) -> list[LogprobRecord]:
        """Of each of `rows`, on the host."""
        tensors = (self.token_ids, self.logprob, self.rank, self.top_ids, self.top_logprobs)
        tokens, logprobs, ranks, top_ids, top_logprobs = (tensor.cpu().numpy() for tensor in tensors)
        return pack_columns(tokens, logprobs, ranks, top_ids, top_logprobs, self.counts)


@dataclass(slots=True)
class PackedLogprobs:
    """The same out of a kernel's reports: int32 rows of (token, log-probability, rank, `width` ids, their
    log-probabilities), of which those of `rows` are wanted."""

    rows: list[int]
    counts: list[int]
    numbers: Tensor
    width: int

    def moved(self, copy: Callable[[Tensor], Tensor]) -> PackedLogprobs:
        return PackedLogprobs(self.rows, self.counts, copy(self.numbers), self.width)

    def records(self) -> list[LogprobRecord]:
        """As `SampledLogprobs.records`."""
        words, most = self.numbers.cpu().numpy()[self.rows], max(self.counts)
        floats, first = words.view(np.float32), 3 + self.width
        return pack_columns(words[:, 0], floats[:, 1], words[:, 2], words[:, 3 : 3 + most],
                            floats[:, first : first + most], self.counts)


def batch_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch, kernels: SamplingKernels | None = None
                   ) -> SampledLogprobs | None:
    """Of the tokens of those rows of a batch that ask for it: among the tokens that a grammar allows."""
    if not batch.logprob_rows:
        return None
    rows = send(batch.logprob_rows, torch.int64, logits.device)
    if batch.masks is not None:
        logits = logits.clone()
        batch.masks.apply_(logits, kernels)
    # Without a copy where every row asks: of 32 rows of 151,936 it takes longer than their ranks.
    asking = logits if batch.logprob_rows == list(range(len(logits))) else logits[rows]
    found = token_logprobs(asking, tokens[rows], max(batch.logprob_counts), kernels)
    found.rows, found.counts = batch.logprob_rows, batch.logprob_counts
    return found


def token_logprobs(
    logits: Tensor, token_ids: Tensor, count: int, kernels: SamplingKernels | None = None
) -> SampledLogprobs:
    """Log-probability and rank of one token per row of `logits`, and the `count` likeliest of the row.

    This is prompt_logprobs too: the rows are positions of a prompt, the tokens those that follow them.
    The rank is 1 for the likeliest; among equals the lower id comes first.
    """
    rows, width = logits.shape
    count = min(count, width)
    if kernels is not None:
        base, rank, ids, values = _ranked_by_kernels(kernels, logits, token_ids, count)
        mine = base.logprob(logits.gather(1, token_ids[:, None])).squeeze(1)
        return SampledLogprobs(list(range(rows)), [count] * rows, token_ids, mine, rank, ids, base.logprob(values))
    parts = [
        _token_logprobs(logits[part], token_ids[part], count)
        for part in row_chunks(max(rows, 1), width, logits.device)
    ]
    merged = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    return SampledLogprobs(list(range(rows)), [count] * rows, token_ids, *merged)


def _token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    base = _Base.of(logits)
    mine = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = (logits > mine) | ((logits == mine) & (ids < token_ids[:, None]))
    best, best_ids = _ranked(logits, count) if count else (logits[:, :0], token_ids[:, None][:, :0])
    return base.logprob(mine).squeeze(1), better.sum(-1) + 1, best_ids, base.logprob(best)


@dataclass(slots=True)
class _Base:
    """What a row's logits are measured against: float32 [rows, 1] and float64 [rows, 1]."""

    peak: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> _Base:
        peak = logits.amax(-1, keepdim=True)
        total = integer_weights(logits, peak, 1.0).sum(-1, keepdim=True).double() * (1.0 / SCALE)
        return cls(peak, total.log())

    def logprob(self, values: Tensor) -> Tensor:
        return ((values - self.peak).double() - self.log_total).float()


def _ranked_by_kernels(
    kernels: SamplingKernels, logits: Tensor, token_ids: Tensor, count: int
) -> tuple[_Base, Tensor, Tensor, Tensor]:
    """(What logits are measured against, ranks of the given tokens, the likeliest ids, their logits) of each row."""
    peak = logits.amax(-1, keepdim=True) if len(logits) else logits[:, :1]
    total, rank, ids, values = kernels.rank(logits, token_ids, peak.squeeze(1), count)
    return _Base(peak, (total.double() * (1.0 / SCALE)).log()[:, None]), rank, ids, values


@dataclass(slots=True)
class Candidates:
    """The likeliest next tokens of some rows, which beams choose from."""

    counts: Sequence[int]
    ids: Tensor
    logprobs: Tensor
    peak: Tensor
    """float32 [rows]: the largest logit, which is finite where the row is sound."""

    def to_list(self) -> list[list[tuple[int, float]] | None]:
        """(token, log-probability) of each row's, best first, on the host; None where the logits are not finite."""
        rows = zip(self.counts, self.ids.tolist(), self.logprobs.tolist(), self.peak.tolist(), strict=True)
        return [list(zip(ids[:count], logprobs[:count], strict=True)) if math.isfinite(peak) else None
                for count, ids, logprobs, peak in rows]


def rank_candidates(
    logits: Tensor, counts: Sequence[int], temperatures: Sequence[float], kernels: SamplingKernels | None = None
) -> Candidates:
    """The `counts[i]` likeliest of row i of `logits`, whose log-probabilities are at its temperature."""
    wide = logits.float()
    if any(temperature != 1.0 for temperature in temperatures):
        wide = wide / send(temperatures, torch.float32, wide.device)[:, None]
    count = min(max(counts), wide.shape[1])
    if kernels is not None:
        base, _, ids, values = _ranked_by_kernels(kernels, wide, torch.zeros(len(counts), dtype=torch.int64), count)
        return Candidates(counts, ids, base.logprob(values), base.peak.squeeze(1))
    parts = []
    for part in row_chunks(len(counts), wide.shape[1], wide.device):
        base = _Base.of(wide[part])
        best, ids = _ranked(wide[part], count)
        parts.append((ids, base.logprob(best), base.peak.squeeze(1)))
    ids, logprobs, peak = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Candidates(counts, ids, logprobs, peak)


def _ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row and their ids, larger first, lower id first among equals."""
    spare = count + 12
    if values.device.type == "cpu" and spare < values.shape[1]:
        largest, ids = values.topk(spare, sorted=False)
        ids, order = ids.sort(dim=-1)
        largest, order = largest.gather(1, order).sort(dim=-1, stable=True, descending=True)
        # Nothing equal to the last one wanted was left out when it is above the last one looked at.
        if bool((largest[:, count - 1] > largest[:, -1]).all()):
            return largest[:, :count], ids.gather(1, order)[:, :count]
    largest, ids = values.sort(dim=-1, stable=True, descending=True)
    return largest[:, :count], ids[:, :count]
