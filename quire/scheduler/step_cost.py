"""How long a step will take, learned from how long steps took: a small robust regression."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepLoad:
    """What one step computes, in the quantities that cost time. Adding chunks adds their parts."""

    tokens: int = 0
    """Tokens through the layers."""
    logit_rows: int = 0
    """Positions whose logits are wanted: tokens drawn, and prompt tokens with log-probabilities."""
    pairs: int = 0
    """Query-key pairs of attention."""
    prefill_tokens: int = 0
    """Those of `tokens` that are part of a chunk of several."""
    decodes: int = 0
    """Sequences that compute a single token after others: they are streaming, and wait for this step."""
    sequences: int = 0
    """All that are in the step: sooner or later each of them decodes."""
    length: int = 0
    """Their lengths after the step, summed: the pairs of a step in which all of them decode."""

    def add(self, start: int, num_tokens: int, logit_rows: int, decode: bool) -> None:
        self.tokens += num_tokens
        self.logit_rows += logit_rows
        self.pairs += chunk_pairs(start, num_tokens)
        self.sequences += 1
        self.length += start + num_tokens
        if decode:
            self.decodes += 1
        else:
            self.prefill_tokens += num_tokens


def chunk_pairs(start: int, num_tokens: int) -> int:
    """Query-key pairs of `num_tokens` tokens, the first of them at position `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


_FORGET = 0.98
"""Weight of an observation after each further one: about the last 50 steps count."""
_SWEEPS = 8
_OUTLIER = 0.5
"""Relative error beyond which an observation counts for less than a full one (Huber)."""
_UNITS = (1.0, 64.0, 8.0, 65536.0)
"""Typical sizes of the features, so that the regression sees numbers near one."""


class StepCostModel:
    """seconds = a + b·tokens + c·logit rows + d·attention pairs, every coefficient at least 0.

    Weighted least squares with exponential forgetting. `scale` is the step time that matters: steps near it
    and below count alike, much longer ones less, since a machine's cost is only roughly linear and the fit
    should be good where it is used. A step much longer than predicted counts for less, since the machine may
    have been busy with something else, but it counts: one that has become slower is followed.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        size = len(_UNITS)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._weights = [0.0] * size
        self.num_observed = 0

    def predict(self, load: StepLoad) -> float:
        features = _features(load.tokens, load.logit_rows, load.pairs)
        return sum(w * x for w, x in zip(self._weights, features, strict=True))

    def predict_with(self, load: StepLoad, start: int, num_tokens: int, logit_rows: int) -> float:
        """As `predict`, with a chunk added to the load."""
        pairs = load.pairs + chunk_pairs(start, num_tokens)
        features = _features(load.tokens + num_tokens, load.logit_rows + logit_rows, pairs)
        return sum(w * x for w, x in zip(self._weights, features, strict=True))

    def observe(self, load: StepLoad, seconds: float) -> None:
        features = _features(load.tokens, load.logit_rows, load.pairs)
        weight = 1.0 / (self._scale + seconds) ** 2
        if self.num_observed > len(features):
            expected = self.predict(load)
            error = abs(seconds - expected) / max(expected, 1e-9)
            weight *= min(1.0, _OUTLIER / error) if error > 0 else 1.0
        self.num_observed += 1
        for i, x in enumerate(features):
            row = self._gram[i]
            self._moment[i] = _FORGET * self._moment[i] + weight * x * seconds
            for j, y in enumerate(features):
                row[j] = _FORGET * row[j] + weight * x * y
        self._solve()

    def _solve(self) -> None:
        """Coordinate descent under w >= 0, from where the last solution was."""
        weights = self._weights
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._gram):
                if row[i] > 0.0:
                    rest = sum(a * w for a, w in zip(row, weights, strict=True)) - row[i] * weights[i]
                    weights[i] = max(0.0, (self._moment[i] - rest) / row[i])


def _features(tokens: int, logit_rows: int, pairs: int) -> tuple[float, ...]:
    return (1.0, tokens / _UNITS[1], logit_rows / _UNITS[2], pairs / _UNITS[3])
