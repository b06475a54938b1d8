"""What depends on a token's position alone, as tables computed once: cosines and sines, factors of queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.layers.spec import QueryGrowth, RopeSpec

_ROWS_AT_ONCE = 4096
"""Bounds the float64 intermediates of a table for a long context."""


class RopeTable:
    """Cosines and sines of every position, computed as far as they have been asked for.

    What has not been computed takes no memory: a model that may read 131,072 tokens mostly reads a few thousand.
    """

    def __init__(self, spec: RopeSpec, length: int, asked_len: int | None = None) -> None:
        """`asked_len`: the length that a longrope's factors are chosen by, where the table is shorter."""
        self._spec = spec
        self._frequencies = _frequencies(spec, length, asked_len or length).expand(length, -1)
        self.rows = torch.empty(length, spec.rotary_dim)
        """float32 [length, rotary_dim]: cosines of the rotary_dim / 2 pairs, then their sines."""
        self.computed = 0

    def reach(self, length: int) -> None:
        """Compute the rows of at least so many positions.

        Frequencies and angles are rounded to float32 where transformers rounds them, so that both turn by the
        same angle at any position; cosine and sine are taken in float64, so that a row's bits depend on nothing
        but its angle (a vectorised float32 cosine may round differently in the tail of a tensor).
        """
        while self.computed < min(length, len(self.rows)):
            rows = slice(self.computed, min(len(self.rows), self.computed + _ROWS_AT_ONCE))
            positions = torch.arange(rows.start, rows.stop, dtype=torch.float32)
            angles = (positions[:, None] * self._frequencies[rows]).to(torch.float64)
            turns = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(self._spec.attention_factor)
            self.rows[rows] = turns.to(torch.float32)
            self.computed = rows.stop


def rope_table(spec: RopeSpec, length: int, asked_len: int | None = None) -> Tensor:
    """All rows at once."""
    table = RopeTable(spec, length, asked_len)
    table.reach(length)
    return table.rows


def growth_table(spec: QueryGrowth, length: int) -> Tensor:
    """float32 [length, 1]: the factor of the queries at each position."""
    steps = torch.arange(length, dtype=torch.float64)[:, None].div_(spec.every).floor_()
    return (1 + spec.beta * torch.log1p(steps)).to(torch.float32)


def _frequencies(spec: RopeSpec, length: int, asked_len: int) -> Tensor:
    """Radians per position of each pair: [pairs], or [length, pairs] where they depend on the position."""
    if spec.kind == "dynamic":
        return _dynamic(spec, length)
    plain = 1.0 / (spec.theta ** _exponents(spec))
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec)
    if spec.kind == "longrope":
        return _longrope(spec, asked_len)
    return plain


def _exponents(spec: RopeSpec) -> Tensor:
    return torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim


def _dynamic(spec: RopeSpec, length: int) -> Tensor:
    """NTK scaling whose base grows with the sequence, made a function of the position alone.

    Position p turns with the base of a sequence of p + 1 tokens (of the trained length, if that is more). So
    a token's keys do not depend on how the sequence was chunked or on what came later, short sequences are
    as in transformers, and longer ones as in its token-by-token decoding, where a key keeps the base it was
    made with. (transformers' prefill of a longer prompt turns all of it with the base of the whole: it is
    path-dependent.)
    """
    trained, dim = spec.original_max_positions, spec.rotary_dim
    lengths = torch.arange(1, length + 1, dtype=torch.float64).clamp_(min=trained)
    growth = (spec.factor * lengths / trained - (spec.factor - 1)) ** (dim / (dim - 2))
    bases = (spec.theta * growth).to(torch.float32)
    return 1.0 / (bases[:, None] ** _exponents(spec))


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Slow pairs are divided by the factor, fast ones kept, those between blended."""
    trained, low, high = spec.original_max_positions, spec.low_freq_factor, spec.high_freq_factor
    wavelength = 2 * math.pi / plain
    share = (trained / wavelength - low) / (high - low)
    blended = (1 - share) * plain / spec.factor + share * plain
    scaled = torch.where(wavelength > trained / low, plain / spec.factor, plain)
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, scaled)


def _yarn(spec: RopeSpec) -> Tensor:
    """Pairs that turn often in the trained length are kept, rare ones interpolated, with a ramp between."""
    dim = spec.rotary_dim
    low, high = _turning_pair(spec, spec.beta_fast), _turning_pair(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    period = spec.theta ** _exponents(spec)
    return (1.0 / (spec.factor * period)) * (1 - kept) + (1.0 / period) * kept


def _longrope(spec: RopeSpec, asked_len: int) -> Tensor:
    """One divisor per pair: the short ones where sequences may not be longer than the trained length, else the long
    ones for every sequence and position.

    So a sequence's keys never change, whatever it grows to; vLLM chooses in the same way. (transformers chooses by
    the length of the current forward, and drops the cache of a sequence that grows past the trained length.)
    """
    return 1.0 / (torch.tensor(spec.factors(asked_len), dtype=torch.float32) * spec.theta ** _exponents(spec))


def _turning_pair(spec: RopeSpec, turns: float) -> float:
    """The (fractional) pair that makes `turns` full turns over the trained length."""
    reach = spec.original_max_positions / (turns * 2 * math.pi)
    return spec.rotary_dim * math.log(reach) / (2 * math.log(spec.theta))
