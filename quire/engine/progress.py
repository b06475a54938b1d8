"""The progress bar of a batch: finished requests, prefill and decode tokens per second."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from quire.scheduler.scheduler import SchedulerStats

_INTERVAL_S = 0.1


class Progress:
    def __init__(self, total: int, stats: SchedulerStats, enabled: bool) -> None:
        self._total = total
        self._stats = stats
        self._enabled = enabled
        self._before = (stats.prompt_tokens, stats.output_tokens)

    def __enter__(self) -> Progress:
        self._bar = None
        if self._enabled:
            self._bar = self._make_bar()
        self._start = time.perf_counter()
        self._next = self._start
        return self

    def _make_bar(self) -> Any:
        try:
            from tqdm import tqdm
        except ImportError:
            return None  # the engine itself does without
        return tqdm(total=self._total, desc="Generating", unit="req", dynamic_ncols=True)

    def update(self, finished: int) -> None:
        """Called after every step: looks at the clock, and draws ten times a second or when a request has finished."""
        if self._bar is None:
            return
        now = time.perf_counter()
        if finished == self._bar.n and now < self._next:
            return
        self._next = now + _INTERVAL_S
        elapsed = max(now - self._start, 1e-9)
        prefill = (self._stats.prompt_tokens - self._before[0]) / elapsed
        decode = (self._stats.output_tokens - self._before[1]) / elapsed
        self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
        self._bar.update(finished - self._bar.n)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
