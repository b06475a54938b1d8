"""One batched pass from logits to tokens, in which a token depends on its own row and on nothing else.

Order of processing, as vLLM has it: allowed ids, logit bias, bad words and min_tokens; repetition, presence and
frequency penalties; argmax where the temperature is 0; else temperature, min_p, top_k, top_p, and one draw by
inverse CDF in vocabulary order with one Philox number. Log-probabilities are of the raw logits, before all that.

Why the result cannot depend on the batch, the thread count or the path taken: probabilities become integers
(`floor(exp((logit - max) / T) * 2**40)`) and integers add up to the same total in any order. What remains is
elementwise, or a maximum. Tokens are ordered by (logit, then lower id first), so ties are decided too.
A token less likely than 2**-40 of the likeliest is never drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quire.sampling.batch import Draws, SamplingBatch
from quire.sampling.philox import Purpose, uniforms

OK: Final = 0
NOT_FINITE: Final = 1
NOTHING_ALLOWED: Final = 2
FAILURES: Final = {
    NOT_FINITE: "the model gave logits that are not finite (NaN or infinity) for this request",
    NOTHING_ALLOWED: "allowed_token_ids, bad_words, stop ids before min_tokens and logit_bias together leave no "
                     "token that may be drawn; relax one of them",
}

_SCALE: Final = 2.0**40
_TIERS: Final = (64, 256, 1024, 4096)
"""Numbers of candidates looked at before a whole row is sorted (measured: 49,152 entries take 3 ms to sort)."""
_NUCLEUS_START: Final = 256
_CHUNK_ELEMENTS: Final = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Entries of a temporary: rows of a CPU stay in its cache, and memory stays bounded whatever the batch."""


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

    def to_list(self) -> list[tuple[int, float, int, list[int], list[float]]]:
        """(token id, logprob, rank, top ids, their logprobs) of each of `rows`, on the host."""
        columns = zip(self.token_ids.tolist(), self.logprob.tolist(), self.rank.tolist(), self.top_ids.tolist(),
                      self.top_logprobs.tolist(), self.counts, strict=True)
        return [(token, logprob, rank, ids[:n], tops[:n]) for token, logprob, rank, ids, tops, n in columns]


@dataclass(slots=True)
class SamplerOutput:
    """Tokens in the order of the rows; where `status` is not OK the token is meaningless (see FAILURES)."""

    token_ids: Tensor
    status: Tensor
    logprobs: SampledLogprobs | None

    @property
    def ok(self) -> Tensor:
        return self.status == OK


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """Draw one token for each row of float32 `logits` [rows, vocabulary], which are left unchanged."""
    edited = logits
    if batch.edits is not None:
        edited = logits.clone()
        batch.edits.apply_(edited)
    if batch.any_greedy:
        tokens = argmax_rows(edited)
        peak = edited.gather(1, tokens[:, None]).squeeze(1)
    else:
        tokens = torch.zeros(batch.num_rows, dtype=torch.int64, device=logits.device)
        peak = edited.amax(-1)
    if batch.plain is not None:
        tokens[batch.plain.rows] = _draw_plain(edited, peak, batch.plain)
    if batch.filtered is not None:
        tokens[batch.filtered.rows] = _draw_filtered(edited, peak, batch.filtered)
    status = _status(logits, edited, peak)
    tokens = torch.where(status == OK, tokens, 0)
    return SamplerOutput(tokens, status, _batch_logprobs(logits, tokens, batch))


def _status(logits: Tensor, edited: Tensor, peak: Tensor) -> Tensor:
    """A row's maximum is finite exactly when the row has no NaN, no +inf and some finite entry."""
    finite = torch.isfinite(peak)
    if edited is logits:
        return torch.where(finite, OK, NOT_FINITE)
    raw_finite = torch.isfinite(logits.amax(-1))
    edited_broken = torch.where(peak == -torch.inf, NOTHING_ALLOWED, NOT_FINITE)
    return torch.where(raw_finite, torch.where(finite, OK, edited_broken), NOT_FINITE)


def argmax_rows(values: Tensor) -> Tensor:
    """First place of each row's maximum (of a NaN, if there is one).

    torch's argmax is scalar on a CPU; maxima of blocks first are vectorised and 6 times faster.
    """
    rows, width = values.shape
    block = 64
    whole = width // block * block
    if values.device.type != "cpu" or whole == 0:
        return values.argmax(-1)
    blocks = values[:, :whole].unflatten(1, (-1, block))
    best = blocks.amax(-1).argmax(-1)
    inside = blocks.gather(1, best[:, None, None].expand(rows, 1, block)).squeeze(1)
    found = best * block + inside.argmax(-1)
    if whole == width:
        return found
    tail = values[:, whole:].argmax(-1) + whole
    pair = values.gather(1, torch.stack([found, tail], 1))
    return torch.where(pair.argmax(-1) == 0, found, tail)


def _chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Runs of rows whose temporaries of `width` columns are of a good size for the device."""
    size = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 24) // max(1, width))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def _weights(values: Tensor, peak: Tensor, temperature: Tensor | None) -> Tensor:
    """Integer weights of logits relative to the likeliest one (`peak` and `temperature` as columns)."""
    scaled = values - peak
    if temperature is not None:
        scaled /= temperature
    return scaled.exp_().mul_(_SCALE).to(torch.int64)


def _pick(weights: Tensor, noise: Tensor) -> Tensor:
    """First place whose running total exceeds the share `noise` of the whole."""
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = (noise * total.double()).to(torch.int64).minimum(total - 1)
    return torch.searchsorted(running, target[:, None], right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _noise(draws: Draws) -> Tensor:
    return uniforms(draws.seed, draws.seq_index, draws.position, Purpose.SAMPLE)


def _draw_plain(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """Inverse CDF over the whole vocabulary."""
    noise, floor = _noise(draws), _min_p_floor(peak, draws)
    parts = []
    for part in _chunks(len(draws.top_k), logits.shape[1], logits.device):
        parts.append(_pick(_row_weights(logits, peak, floor, draws, part), noise[part]))
    return torch.cat(parts)


def _row_weights(logits: Tensor, peak: Tensor, floor: Tensor, draws: Draws, part: slice | Tensor) -> Tensor:
    """Weights of the whole vocabulary after temperature and min_p for some of the rows that draw."""
    rows = draws.rows[part]
    values = logits[rows]
    weights = _weights(values, peak[rows, None], draws.temperature[part, None])
    if draws.uses_min_p:
        weights *= values >= floor[part, None]
    return weights


def _min_p_floor(peak: Tensor, draws: Draws) -> Tensor:
    """Logits under this have less than min_p of the likeliest token's probability."""
    return peak[draws.rows] + draws.temperature * draws.log_min_p


def _draw_filtered(logits: Tensor, peak: Tensor, draws: Draws) -> Tensor:
    """Try a few best candidates of each row; rows whose cut lies further down get more, in the end all."""
    width = logits.shape[1]
    tiers = [tier for tier in _TIERS if tier < width] if logits.device.type == "cpu" else []
    tokens = torch.zeros(len(draws.top_k), dtype=torch.int64, device=logits.device)
    state = _Filter.of(logits, peak, draws)
    open_rows = list(range(len(draws.top_k)))
    for tier in [*tiers, width]:
        ready = [i for i in open_rows if tier == width or (draws.top_k[i] or _NUCLEUS_START - 1) < tier]
        for part in _chunks(len(ready), width, logits.device):
            group = ready[part]
            index = torch.tensor(group, dtype=torch.int64, device=logits.device)
            drawn, inside = state.select(index).draw(logits, tier)
            tokens[index] = drawn
            if tier < width:
                done = {i for i, closed in zip(group, inside.tolist(), strict=True) if closed}
                open_rows = [i for i in open_rows if i not in done]
        if not open_rows:
            break
    return tokens


@dataclass(slots=True)
class _Filter:
    """Per-row bounds of top_k, top_p and min_p for a set of rows."""

    rows: Tensor
    peak: Tensor
    temperature: Tensor
    floor: Tensor
    noise: Tensor
    top_k: Tensor
    top_p: Tensor
    total: Tensor
    """Weight of the whole row above `floor`; only looked at where there is no top_k."""

    @classmethod
    def of(cls, logits: Tensor, peak: Tensor, draws: Draws) -> _Filter:
        device = logits.device
        top_k = torch.tensor([k or logits.shape[1] for k in draws.top_k], dtype=torch.int64, device=device)
        floor = _min_p_floor(peak, draws)
        total = torch.zeros(len(draws.top_k), dtype=torch.int64, device=device)
        nucleus = [i for i, k in enumerate(draws.top_k) if k == 0]
        for part in _chunks(len(nucleus), logits.shape[1], device):
            index = torch.tensor(nucleus[part], dtype=torch.int64, device=device)
            total[index] = _row_weights(logits, peak, floor, draws, index).sum(-1)
        return cls(draws.rows, peak[draws.rows], draws.temperature, floor, _noise(draws), top_k, draws.top_p, total)

    def select(self, index: Tensor) -> _Filter:
        return _Filter(*(getattr(self, name)[index] for name in self.__slots__))

    def draw(self, logits: Tensor, tier: int) -> tuple[Tensor, Tensor]:
        """Tokens out of the `tier` best of each row, and whether all that top_k and top_p keep was among them."""
        values, ids = _candidates(logits[self.rows], tier)
        ranked, places = values.sort(dim=-1, stable=True, descending=True)
        weights = _weights(ranked, self.peak[:, None], self.temperature[:, None])
        rank = torch.arange(tier, device=logits.device)
        keep = (rank < self.top_k[:, None]) & (ranked >= self.floor[:, None])
        weights *= keep
        before = weights.cumsum(-1)
        total = torch.where(self.top_k < logits.shape[1], before[:, -1], self.total)
        before -= weights
        keep &= before.double() < (self.top_p * total.double())[:, None]
        weights *= keep
        # Tokens left out are no likelier than the last candidate: the cut is safe when it lies above all its equals.
        inside = ~(keep & (ranked == ranked[:, -1:])).any(-1)
        chosen = _pick(torch.zeros_like(weights).scatter_(1, places, weights), self.noise)
        return (chosen if ids is None else ids.gather(1, chosen[:, None]).squeeze(1)), inside


def _candidates(values: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """The `count` largest entries of each row in the order of their ids (None: all of them)."""
    if count == values.shape[1]:
        return values, None
    largest, ids = values.topk(count, sorted=False)
    ids, order = ids.sort(dim=-1)
    return largest.gather(1, order), ids


def _ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries of each row and their ids, larger first, lower id first among equals."""
    width = values.shape[1]
    tier = count + 12
    if values.device.type == "cpu" and tier < width:
        largest, ids = _candidates(values, tier)
        largest, order = largest.sort(dim=-1, stable=True, descending=True)
        if ids is not None and bool((largest[:, count - 1] > largest[:, -1]).all()):
            return largest[:, :count], ids.gather(1, order)[:, :count]
    largest, ids = values.sort(dim=-1, stable=True, descending=True)
    return largest[:, :count], ids[:, :count]


def _batch_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> SampledLogprobs | None:
    if not batch.logprob_rows:
        return None
    rows = torch.tensor(batch.logprob_rows, dtype=torch.int64, device=logits.device)
    found = token_logprobs(logits[rows], tokens[rows], max(batch.logprob_counts))
    found.rows, found.counts = batch.logprob_rows, batch.logprob_counts
    return found


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> SampledLogprobs:
    """Log-probability and rank of one token per row of `logits`, and the `count` likeliest of the row.

    This is prompt_logprobs too: the rows are positions of a prompt, the tokens those that follow them.
    The rank is 1 for the likeliest; among equals the lower id comes first.
    """
    rows, width = logits.shape
    count = min(count, width)
    parts = [
        _token_logprobs(logits[part], token_ids[part], count) for part in _chunks(max(rows, 1), width, logits.device)
    ]
    merged = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    return SampledLogprobs(list(range(rows)), [count] * rows, token_ids, *merged)


def _token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    peak = logits.amax(-1, keepdim=True)
    total = _weights(logits, peak, None).sum(-1, keepdim=True).double() * (1.0 / _SCALE)
    log_total = total.log()
    mine = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = (logits > mine) | ((logits == mine) & (ids < token_ids[:, None]))
    best, best_ids = _ranked(logits, count) if count else (logits[:, :0], token_ids[:, None][:, :0])

    def logprob(values: Tensor) -> Tensor:
        return ((values - peak).double() - log_total).float()

    return logprob(mine).squeeze(1), better.sum(-1) + 1, best_ids, logprob(best)
