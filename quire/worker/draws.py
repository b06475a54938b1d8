"""The tokens of one pass on a CPU: by one call into C where no row wants more than a token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.cpu.sampling import CpuSampling, DrawRule, Rules
from quire.sampling.batch import PlainDraw, SamplingBatch, SamplingRow
from quire.sampling.logprobs import SampledLogprobs
from quire.sampling.sampler import NOT_FINITE, OK, sample


@dataclass(slots=True)
class Drawn:
    """In the order of the rows."""

    tokens: list[int]
    """Meaningless where the status is not OK (`sampler.FAILURES`)."""
    status: list[int]
    logprobs: SampledLogprobs | None = None
    batch: SamplingBatch | None = None
    """None: the rows want tokens and nothing else."""


def draw_rows(logits: Tensor, rows: Sequence[SamplingRow], kernels: CpuSampling, *, spent: bool = False) -> Drawn:
    """A token for each row of logits, which are left unchanged unless they are `spent`."""
    draws = _plain_draws(rows)
    if draws is not None:
        chosen = kernels.choose(logits, rules_of(draws, logits.shape[1]))
        return Drawn([max(token, 0) for token in chosen], [OK if token >= 0 else NOT_FINITE for token in chosen])
    batch = SamplingBatch.build(rows, logits.shape[1])
    output = sample(logits, batch, kernels, spent=spent)
    return Drawn(output.token_ids.tolist(), output.status.tolist(), output.logprobs, batch)


def _plain_draws(rows: Sequence[SamplingRow]) -> list[PlainDraw] | None:
    found = []
    for row in rows:
        draw = PlainDraw.of(row) if row.params.logprobs is None else None
        if draw is None:
            return None
        found.append(draw)
    return found


def rules_of(draws: Sequence[PlainDraw], vocab_size: int, ahead: Sequence[int] | None = None) -> Rules | None:
    """`ahead`: tokens that were drawn since. None where all want their likeliest tokens."""
    if all(draw.temperature <= 0.0 for draw in draws):
        return None
    found = (DrawRule * len(draws))()
    for i, draw in enumerate(draws):
        seed, index, position = draw.key
        key = (ctypes.c_int64 * 3)(seed, index, position + (0 if ahead is None else ahead[i]))
        top_k = draw.top_k if draw.top_k < vocab_size else 0
        found[i] = DrawRule(draw.temperature, draw.log_min_p, top_k, draw.top_p, key)
    return found
