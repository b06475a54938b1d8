"""The plain way to draw one token: slow, one row at a time, in float64; what the batched pass is tested
against.

Same meaning as `sampler.py`, written without its devices (no integers, no candidates, no batching).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.sampling.params import SamplingParams
from quire.sampling.philox import Purpose, uniform


@dataclass(slots=True)
class ReferenceRow:
    """One row's request and past."""

    params: SamplingParams
    seed: int
    seq_index: int
    prompt_ids: list[int]
    output_ids: list[int]
    stop_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


def edited_logits(logits: Sequence[float], row: ReferenceRow) -> list[float]:
    """Logits after allowed ids, bias, bad words, min_tokens and penalties."""
    params, values = row.params, [float(x) for x in logits]
    if params.allowed_token_ids is not None:
        values = [x if i in params.allowed_token_ids else -math.inf for i, x in enumerate(values)]
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for word in row.bad_words:
        head = list(word[:-1])
        if not head or row.output_ids[-len(head) :] == head:
            values[word[-1]] = -math.inf
    if len(row.output_ids) < params.min_tokens:
        for token in row.stop_ids:
            values[token] = -math.inf
    for token in set(row.prompt_ids) | set(row.output_ids):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(row.output_ids):
        values[token] -= params.frequency_penalty * row.output_ids.count(token) + params.presence_penalty
    return values


def probabilities(logits: Sequence[float], row: ReferenceRow) -> np.ndarray:
    """The distribution the row's token is drawn from; all on one token when greedy."""
    params, values = row.params, edited_logits(logits, row)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    weights = np.zeros(len(values))
    if params.greedy:
        weights[order[0]] = 1.0
        return weights
    peak = values[order[0]]
    for i, value in enumerate(values):
        weights[i] = math.exp((value - peak) / params.temperature)
    weights[weights < params.min_p] = 0.0
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    if params.top_p < 1.0:
        wanted, reached = params.top_p * weights.sum(), 0.0
        for i in order:
            weights[i] = weights[i] if reached < wanted else 0.0
            reached += weights[i]
    normalised: np.ndarray = weights / weights.sum()
    return normalised


def noise(row: ReferenceRow, attempt: int = 0) -> float:
    position = len(row.prompt_ids) + len(row.output_ids)
    return uniform(row.seed, row.seq_index, position, Purpose.SAMPLE, attempt)


def sample_one(logits: Sequence[float], row: ReferenceRow) -> int:
    """First token whose cumulative probability exceeds the row's random number. Under top_p alone the row is drawn from
    as if there were none, and what that would not have kept leads to another draw, from the likelier tokens."""
    params = row.params
    by_share = not params.greedy and params.top_p < 1.0 and not 0 < params.top_k < len(logits)
    if not by_share:
        return _pick(probabilities(logits, row), noise(row))
    kept = probabilities(logits, row)
    left = probabilities(logits, replace(row, params=replace(params, top_p=1.0)))
    values, attempt = edited_logits(logits, row), 0
    while True:
        token = _pick(left, noise(row, attempt))
        if kept[token] > 0.0:
            return token
        left = np.array([p if (-x, i) < (-values[token], token) else 0.0
                         for i, (x, p) in enumerate(zip(values, left, strict=True))])
        attempt += 1


def _pick(weights: np.ndarray, share: float) -> int:
    cumulative = np.cumsum(weights)
    return min(int(np.searchsorted(cumulative, share * cumulative[-1], side="right")), len(cumulative) - 1)


def logprobs_one(
    logits: Sequence[float], token: int, count: int
) -> tuple[float, int, list[int], list[float]]:
    """(log-probability, rank, likeliest ids, their log-probabilities) of the raw logits."""
    values = np.asarray(logits, dtype=np.float64)
    logs = values - values.max() - math.log(np.exp(values - values.max()).sum())
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    best = order[:count]
    return float(logs[token]), order.index(token) + 1, best, [float(logs[i]) for i in best]
