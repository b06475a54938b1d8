"""One batched pass from logits to tokens, in which a token depends on its own row and on nothing else.

Order of processing, as vLLM has it: the grammar's mask; allowed ids, logit bias, bad words and min_tokens;
repetition, presence and frequency penalties; argmax where the temperature is 0; else temperature, min_p,
top_k, top_p, and one draw by inverse CDF in vocabulary order with one Philox number. Log-probabilities are of
the raw logits, before all that but the grammar's mask.

But under top_p alone nobody looks for the cut: a token is drawn from the whole row, and is kept if the tokens likelier
than it have less than the share top_p. If not, the cut lies among these, and the next attempt draws from them, with
the next Philox number. Every attempt draws from all the tokens that top_p keeps, in proportion to their weights, so
the one that is kept has their distribution; 95 of 100 first attempts are kept under top_p 0.95.

Why the result cannot depend on the batch, the thread count or the path taken: probabilities become integers
(`floor(exp((logit - max) / T) * 2**40)`) and integers add up to the same total in any order. What remains is
elementwise, or a maximum. Tokens are ordered by (logit, then lower id first), so ties are decided too.
A token less likely than 2**-40 of the likeliest is never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire.sampling.batch import Draws, SamplingBatch
from quire.sampling.kernels import SamplingKernels
from quire.sampling.logprobs import SampledLogprobs, batch_logprobs
from quire.sampling.params import NOTHING_TO_DRAW
from quire.sampling.sending import send
from quire.sampling.weights import draw_kernels, integer_weights, row_chunks

OK: Final = 0
NOT_FINITE: Final = 1
NOTHING_ALLOWED: Final = 2
FAILURES: Final = {
    NOT_FINITE: "the model gave logits that are not finite (NaN or infinity) for this request",
    NOTHING_ALLOWED: NOTHING_TO_DRAW,
}

_LIKELY: Final = math.log(1e-3)
"""Under top_p, tokens of at least a thousandth of the best one's probability are looked at first."""


@dataclass(slots=True)
class SamplerOutput:
    """Tokens in the order of the rows; where `status` is not OK the token is meaningless (see FAILURES)."""

    token_ids: Tensor
    status: Tensor
    logprobs: SampledLogprobs | None

    @property
    def ok(self) -> Tensor:
        return self.status == OK


def sample(logits: Tensor, batch: SamplingBatch, kernels: SamplingKernels | None = None, *, spent: bool = False
           ) -> SamplerOutput:
    """Draw one token for each row of float32 `logits` [rows, vocabulary], which are left unchanged unless they are
    `spent`: then nobody reads them afterwards. `kernels` do what they can of it."""
    edited, raw_peak, found_peak = logits, None, None
    if batch.edits is not None:
        edited = logits if spent and not batch.logprob_rows else logits.clone()
        raw_peak, found_peak = batch.edits.apply_(edited, kernels)
    if batch.any_greedy:
        tokens = argmax_rows(edited)
        peak = edited.gather(1, tokens[:, None]).squeeze(1)
    else:
        tokens = torch.zeros(batch.num_rows, dtype=torch.int64, device=logits.device)
        peak = edited.amax(-1) if found_peak is None else found_peak
    ways = (batch.plain, _draw_plain), (batch.nucleus, draw_nucleus), (batch.filtered, _draw_filtered)
    for draws, draw in ways:
        if draws is not None and kernels is not None:
            tokens[draws.rows] = _draw_by_kernels(kernels, edited, peak, draws)
        elif draws is not None:
            tokens[draws.rows] = draw(edited, peak, draws)
    status = _status(raw_peak, peak)
    tokens = torch.where(status == OK, tokens, 0)
    return SamplerOutput(tokens, status, batch_logprobs(logits, tokens, batch, kernels))


def _draw_by_kernels(kernels: SamplingKernels, logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    top_k = torch.tensor(draws.top_k, dtype=torch.int64)
    return kernels.draw(logits, draws.rows, peak[draws.rows], draws.temperature, _min_p_floor(peak, draws), top_k,
                        draws.top_p, draws.key_columns())


def draw_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Integers [rows, vocabulary] proportional to the probabilities that `sample` draws with.

    A greedy row has one token; a row from which nothing can be drawn has none.
    """
    edited, raw_peak = logits, None
    if batch.edits is not None:
        edited = logits.clone()
        raw_peak, _ = batch.edits.apply_(edited)
    best = argmax_rows(edited)
    peak = edited.gather(1, best[:, None]).squeeze(1)
    weights = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    weights.scatter_(1, best[:, None], 1)
    if batch.plain is not None:
        rows, floor = batch.plain.rows, _min_p_floor(peak, batch.plain)
        values = edited[rows]
        drawable = integer_weights(values, peak[rows, None], batch.plain.temperature[:, None])
        weights[rows] = drawable * (values >= floor[:, None])
    for draws in (batch.nucleus, batch.filtered):
        if draws is not None and logits.device.type == "cpu":
            for row, ids, kept in _cut_rows(edited, peak, draws):
                weights[row] = 0
                weights[row, torch.from_numpy(ids)] = kept
        elif draws is not None:
            for part, drawable in _sorted_weights(edited, peak, draws):
                weights[draws.rows[part]] = drawable
    return weights.masked_fill_((_status(raw_peak, peak) != OK)[:, None], 0)


def _status(raw_peak: Tensor | None, peak: Tensor) -> Tensor:
    """A row's maximum is finite exactly when the row has no NaN, no +inf and some finite entry. `raw_peak`: before the
    edits, if there were any."""
    finite = torch.isfinite(peak)
    if raw_peak is None:
        return torch.where(finite, OK, NOT_FINITE)
    edited_broken = torch.where(peak == -torch.inf, NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(torch.isfinite(raw_peak), torch.where(finite, OK, edited_broken), NOT_FINITE)


def argmax_rows(values: Tensor) -> Tensor:
    """First place of each row's maximum (of a NaN, if there is one).

    torch's argmax is scalar on a CPU; maxima of blocks first are vectorised and 6 times faster.
    """
    rows, width = values.shape
    block = 64
    whole = width // block * block
    if values.device.type != "cpu" or whole == 0:
        return values.argmax(-1)
    blocks = values[:, :whole].view(rows, -1, block)
    best = blocks.amax(-1).argmax(-1)
    inside = blocks.gather(1, best[:, None, None].expand(rows, 1, block)).squeeze(1)
    found: Tensor = best * block + inside.argmax(-1)
    if whole == width:
        return found
    tail = values[:, whole:].argmax(-1) + whole
    pair = values.gather(1, torch.stack([found, tail], 1))
    return torch.where(pair.argmax(-1) == 0, found, tail)


def _pick(weights: Tensor, noise: Tensor) -> Tensor:
    """First place whose running total exceeds the share `noise` of the whole."""
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = (noise * total.double()).to(torch.int64).minimum(total - 1)
    return (
        torch.searchsorted(running, target[:, None], right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
    )


def _draw_plain(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """Inverse CDF over the whole vocabulary."""
    noise = draws.noise()
    return torch.cat([_pick(weights, noise[part]) for part, _, weights in _whole_weights(logits, peak, draws)])


def draw_nucleus(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """One token of each row from those that top_p keeps: drawn, judged, and drawn again among the likelier ones."""
    kernels = draw_kernels(logits.device)
    if kernels is not None:
        keys = draws.key_columns()
        return kernels.draw_nucleus(logits, draws.rows, peak[draws.rows], draws.temperature, _min_p_floor(peak, draws),
                                    draws.top_p, keys)
    ids, noise = torch.arange(logits.shape[1], device=logits.device), draws.noise()
    found = []
    for part, values, weights in _whole_weights(logits, peak, draws):
        wanted = draws.top_p[part] * weights.sum(-1).double()
        sound = torch.isfinite(peak[draws.rows[part]])
        tokens, attempt = _pick(weights, noise[part]), 0
        while True:
            mine = values.gather(1, tokens[:, None])
            likelier = weights * ((values > mine) | ((values == mine) & (ids < tokens[:, None])))
            again = sound & (likelier.sum(-1).double() >= wanted)
            if not bool(again.any()):
                break
            attempt += 1
            tokens = torch.where(again, _pick(likelier, draws.noise(attempt)[part]), tokens)
        found.append(tokens)
    return torch.cat(found)


def _whole_weights(logits: Tensor, peak: Tensor, draws: Draws) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time: (which of the draws these are, their logits, the weights above the min_p floor)."""
    floor = _min_p_floor(peak, draws)
    for part in row_chunks(len(draws.top_k), logits.shape[1], logits.device):
        rows = draws.rows[part]
        values = logits[rows]
        weights = integer_weights(values, peak[rows, None], draws.temperature[part, None])
        if draws.uses_min_p:
            weights *= values >= floor[part, None]
        yield part, values, weights


def _min_p_floor(peak: Tensor, draws: Draws) -> Tensor:
    """Logits under this have less than min_p of the likeliest token's probability."""
    return peak[draws.rows] + draws.temperature * draws.log_min_p


def _draw_filtered(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """Draw under top_k and top_p: on a CPU by finding the cut, elsewhere by a sort, without sync."""
    if logits.device.type == "cpu":
        return draw_by_cut(logits, peak, draws)
    return draw_by_sort(logits, peak, draws)


def draw_by_sort(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """One token of each row from those that top_k and top_p keep."""
    noise = draws.noise()
    return torch.cat([_pick(weights, noise[part]) for part, weights in _sorted_weights(logits, peak, draws)])


def _sorted_weights(logits: Tensor, peak: Tensor, draws: Draws) -> Iterator[tuple[slice, Tensor]]:
    """Sort whole rows, best first (stable: the lower id first among equals), and keep a prefix: (which of the draws
    these are, their weights in the order of the vocabulary)."""
    width, device = logits.shape[1], logits.device
    floor = _min_p_floor(peak, draws)
    top_k = send([k or width for k in draws.top_k], torch.int64, device)
    rank = torch.arange(width, device=device)
    for part in row_chunks(len(draws.top_k), width, device):
        rows = draws.rows[part]
        ranked, ids = logits[rows].sort(dim=-1, stable=True, descending=True)
        weights = integer_weights(ranked, peak[rows, None], draws.temperature[part, None])
        weights *= (rank < top_k[part, None]) & (ranked >= floor[part, None])
        running = weights.cumsum(-1)
        wanted = draws.top_p[part] * running[:, -1].double()
        weights *= (running - weights).double() < wanted[:, None]
        yield part, torch.zeros_like(weights).scatter_(1, ids, weights)


def draw_by_cut(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """One token of each row from those that top_k and top_p keep."""
    tokens, noise = [0] * len(draws.top_k), draws.noise()
    places = {row: place for place, row in enumerate(draws.rows.tolist())}
    for row, ids, weights in _cut_rows(logits, peak, draws):
        place = places[row]
        tokens[place] = int(ids[int(_pick(weights[None], noise[place : place + 1]))])
    return torch.tensor(tokens, dtype=torch.int64)


def _cut_rows(logits: Tensor, peak: Tensor, draws: Draws) -> Iterator[tuple[int, np.ndarray, Tensor]]:
    """Row by row: find the logit of the last token kept, sorting only values that can be in question.

    Sorting values alone takes numpy 0.24 ms for 49,152 of them, where torch's sort with indices takes 3 ms.
    """
    columns = zip(
        draws.rows.tolist(),
        peak[draws.rows].tolist(),
        draws.temperature.tolist(),
        _min_p_floor(peak, draws).tolist(),
        draws.top_k,
        draws.top_p.tolist(),
        strict=True,
    )
    for row, best, temperature, floor, top_k, top_p in columns:
        if math.isfinite(best):
            cut = _Cut(logits[row], best, temperature, floor)
            yield row, *(cut.nucleus(top_p) if top_k == 0 else cut.best(top_k, top_p))


class _Cut:
    """Finds which tokens of one row top_k and top_p keep."""

    __slots__ = ("floor", "peak", "temperature", "values")

    def __init__(self, values: Tensor, peak: float, temperature: float, floor: float) -> None:
        self.values = values.numpy()
        self.peak, self.temperature, self.floor = peak, temperature, floor

    def weights(self, values: np.ndarray) -> Tensor:
        return integer_weights(torch.from_numpy(values), self.peak, self.temperature)

    def best(self, top_k: int, top_p: float) -> tuple[np.ndarray, Tensor]:
        """The first `top_k`, and of those the share `top_p`."""
        place = len(self.values) - top_k
        kth = float(np.partition(self.values, place)[place])
        ids = np.flatnonzero(self.values >= max(kth, self.floor))
        ranked = np.sort(self.values[ids])[::-1][:top_k].copy()
        return self._keep(ids, ranked, self._kept(ranked, top_p, None))

    def nucleus(self, top_p: float) -> tuple[np.ndarray, Tensor]:
        """The share `top_p` of the row; likely tokens are looked at first, all if that is not enough."""
        weights = self.weights(self.values)
        if self.floor > -math.inf:
            weights *= torch.from_numpy(self.values >= self.floor)
        total = int(weights.sum())
        for least in (self.peak + self.temperature * _LIKELY, -math.inf):
            ids = np.flatnonzero(self.values >= max(least, self.floor))
            ranked = np.sort(self.values[ids])[::-1].copy()
            kept = self._kept(ranked, top_p, total)
            if kept < len(ranked):
                break
        return self._keep(ids, ranked, kept)

    def _kept(self, ranked: np.ndarray, top_p: float, total: int | None) -> int:
        """How many of the best tokens it takes to reach the share (of `ranked`, or of `total`)."""
        weights = self.weights(ranked)
        running = weights.cumsum(0)
        wanted = top_p * float(int(running[-1]) if total is None else total)
        return int(((running - weights).double() < wanted).sum())

    def _keep(self, ids: np.ndarray, ranked: np.ndarray, kept: int) -> tuple[np.ndarray, Tensor]:
        """The `kept` best of `ids` (ascending) with weights; of equals at the cut the lower ids stay."""
        last = ranked[kept - 1]
        values = self.values[ids]
        stays = values > last
        equals = np.flatnonzero(values == last)
        stays[equals[: kept - int(stays.sum())]] = True
        return ids[stays], self.weights(values[stays])
