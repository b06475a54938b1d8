"""Block copies on a stream of their own: they start while the step before is still running, where that is safe.

A plan's copies come before its forward pass, so the steps' stream waits for them. They themselves wait for the steps
launched before only if those still write what is copied, or touch what is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from quire.scheduler.plan import BlockCopy, PlanEntry, StepPlan, StepResult
from quire.worker.cache_engine import CacheEngine
from quire.worker.gpu.table import DeviceTable


class CopyStream:
    """Carries out the copies of plans, in order with one another."""

    def __init__(self, device: torch.device, cache: CacheEngine, table: DeviceTable) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cache = cache
        self._table = table
        self._launched: list[tuple[StepPlan, Future[StepResult]]] = []
        self._half_launched = False
        """A step failed while it was being launched: a part of it may be running."""
        self._more_launched = False
        """Since the last copies something was launched of which no step's result says anything."""

    def run(self, copies: Sequence[BlockCopy]) -> bool:
        """Start the copies of the plan that comes next; True if they did not have to wait for any step."""
        free = not self.must_wait(copies)
        self._half_launched = self._more_launched = False
        if self._stream is None:
            self._cache.copy(copies)
            return free
        steps = torch.cuda.current_stream()
        if not free:
            self._stream.wait_stream(steps)
        with torch.cuda.stream(self._stream):
            self._cache.copy(copies)
            done = torch.cuda.Event()
            done.record(self._stream)
        steps.wait_event(done)
        return free

    def launched(self, plan: StepPlan, future: Future[StepResult]) -> None:
        """Take note of a step, until its result is there."""
        self._launched = [known for known in self._launched if not known[1].done()]
        self._launched.append((plan, future))

    def failed(self) -> None:
        """A step failed while it was being launched. Parts of it may be running without a future: the next copies
        wait."""
        self._half_launched = True

    def more_launched(self) -> None:
        """Drafts were launched behind the last step, which write where it does not; or branches that were kept are
        moved."""
        self._more_launched = True

    def must_wait(self, copies: Sequence[BlockCopy]) -> bool:
        """Whether a step in flight and the copies conflict on a block."""
        running = [plan for plan, future in self._launched if not future.done()]
        if self._half_launched or self._more_launched or len(running) != 1:
            # Rows of an older step may belong to other sequences by now, so what it touches is no longer known.
            return self._half_launched or self._more_launched or bool(running)
        return collide(copies, running[0].entries, self._table.host_tables, self._table.block_size)


def collide(
    copies: Iterable[BlockCopy], entries: Sequence[PlanEntry], tables: Sequence[np.ndarray], block_size: int
) -> bool:
    """Whether a step of these entries writes a block that is copied from, or reads or writes one that is copied to."""
    sources: dict[int, set[int]] = {}
    targets: dict[int, set[int]] = {}
    for copy in copies:
        sources.setdefault(copy.group, set()).add(copy.source)
        targets.setdefault(copy.group, set()).add(copy.target)
    for group, table in enumerate(tables):
        if group not in sources and group not in targets:
            continue
        for entry in entries:
            end = -(-(entry.start + entry.num_tokens) // block_size)
            blocks = table[entry.row, :end].tolist()
            # A draft model catches up in the blocks before, too.
            first = 0 if entry.device_drafts else entry.start // block_size
            if not sources.get(group, _NONE).isdisjoint(blocks[first:]):
                return True
            if not targets.get(group, _NONE).isdisjoint(blocks):
                return True
    return False


_NONE: set[int] = set()
