"""Keeps streams smooth: sizes the prompt chunks of a step so that those who decode need not wait long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from quire.scheduler.step_cost import StepCostModel, StepLoad

_PROBE_TOKENS = 16
"""Chunk to begin with beside decoding sequences, before any was measured."""
_PROBE_SEQUENCES = 4
"""Sequences to begin with, before a step was measured in which they decode."""
_GROWTH = 2
"""Times the largest measured that a chunk or a batch may be: predictions far outside are worth little."""
_MISSES = 0.01
"""Share of steps that may take longer than predicted times the margin."""
_MARGIN_STEP = 0.05
_MAX_MARGIN = 2.0
"""Steps longer than that are accidents, which no size of chunk prevents."""


class StepPacer:
    """Learns what steps cost and says how much prompt fits beside the sequences that decode.

    The bound is on the time from one result to the next, which is what a stream's reader sees: planning and
    output handling are in it. Nobody decoding: no limit. A request that would make the decoding step itself
    too long, once it decodes too, waits until others have finished. Where even one stream alone is over the
    bound, nobody could hold it, and prompts go on in small chunks.
    """

    def __init__(self, bound_seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.bound = bound_seconds
        self._clock = clock
        self._model = StepCostModel(bound_seconds)
        self._margin = 1.0
        """Actual over predicted time that only `_MISSES` of the steps exceed, followed step by step."""
        self._largest_chunk = 0
        self._most_decodes = 0
        self._in_flight: deque[tuple[StepLoad, float, float]] = deque()
        """Load, predicted seconds and time of submission of the steps not done."""
        self._last_done = float("-inf")

    # ---- while a step is planned

    def room(self, load: StepLoad, start: int, todo: int, scored: bool = False) -> int:
        """How many of `todo` prompt tokens from position `start` may join `load`.

        `scored`: the logits of each are wanted, not of the last one only.
        """
        possible = self._with_decoding(StepLoad(), start + todo) <= self.bound
        if load.sequences and possible and self._too_many(load, start + todo):
            return 0
        if load.decodes == 0:
            return todo
        if not possible or not self._model.num_observed:
            return min(todo, max(0, _PROBE_TOKENS - load.prefill_tokens))
        most = max(0, min(todo, max(_PROBE_TOKENS, _GROWTH * self._largest_chunk) - load.prefill_tokens))
        fits = self._largest_fitting(load, start, most, scored, self.bound / self._margin)
        # Where the margin leaves nothing, prompts go on by what fits without it.
        small = min(most, max(0, _PROBE_TOKENS - load.prefill_tokens))
        return fits or self._largest_fitting(load, start, small, scored, self.bound)

    def allows(self, load: StepLoad, start: int, num_tokens: int) -> bool:
        """May a sequence compute `num_tokens` at once, each with its logits, where one is what it must?"""
        return self._model.num_observed == 0 or self._model.predict_with(
            load, start, num_tokens, num_tokens) <= self.bound / self._margin

    def _largest_fitting(self, load: StepLoad, start: int, most: int, scored: bool, seconds: float) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._model.predict_with(load, start, middle, middle if scored else 1) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _too_many(self, load: StepLoad, length: int) -> bool:
        """Would the steps in which all of these decode, and one of `length` tokens too, be too long?"""
        if load.sequences >= max(_PROBE_SEQUENCES, _GROWTH * self._most_decodes):
            return True
        return self._with_decoding(load, length) > self.bound / self._margin

    def _with_decoding(self, load: StepLoad, length: int) -> float:
        """Seconds of a step in which all the sequences of `load` and one of `length` tokens decode."""
        decoding = StepLoad(tokens=load.sequences, logit_rows=load.sequences, pairs=load.length)
        return self._model.predict_with(decoding, length, 1, 1)

    # ---- when it runs

    def submitted(self, load: StepLoad) -> None:
        predicted = self._model.predict(load) if self._model.num_observed else 0.0
        self._in_flight.append((load, predicted, self._clock()))

    def done(self) -> None:
        """The oldest step is back."""
        load, predicted, submitted = self._in_flight.popleft()
        now = self._clock()
        # Who decodes has waited since the last result; an engine that only prefills may have been idle.
        began = self._last_done if load.decodes else max(submitted, self._last_done)
        seconds = now - began
        self._last_done = now
        if not 0.0 < seconds < float("inf"):
            return
        if load.decodes:
            self._largest_chunk = max(self._largest_chunk, load.prefill_tokens)
            self._most_decodes = max(self._most_decodes, load.decodes)
        if load.decodes and predicted > 0.0:
            self._follow(seconds / predicted)
        self._model.observe(load, seconds)

    def _follow(self, ratio: float) -> None:
        """Move the margin towards the quantile: a rare miss raises it much, a hit lowers it little."""
        if ratio > self._margin:
            self._margin = min(_MAX_MARGIN, self._margin + _MARGIN_STEP)
        else:
            self._margin = max(1.0, self._margin - _MARGIN_STEP * _MISSES / (1 - _MISSES))
