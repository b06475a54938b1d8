"""Drafts of a head for the step after the one that runs, launched behind it before the host knows what was accepted.

The device finds out itself where every chain goes on (`kernels.triton.chains`). Results travel to the host and the
next step is planned while the head drafts, so the GPU does not wait for the host between the two. Nothing depends on
whether the plan that comes then is the one that was expected: the passes write what passes of that plan would write,
and behind it only slots and places that hold nothing yet. Drafts that nobody asks for were in vain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.scheduler.plan import PlanEntry, StepPlan
from quire.worker.gpu.drafted import Drafted
from quire.worker.gpu.spans import SpanRunner
from quire.worker.gpu.table import DeviceTable


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Of one row: from which token on the head has computed it, and how many drafts follow its text."""

    start: int
    drafts: int


class DraftsAhead:
    def __init__(self, runner: SpanRunner, table: DeviceTable, group: int) -> None:
        """`group`: of the table's block tables, in which the head's KV lies."""
        self._runner = runner
        self._table = table
        self._group = group
        self._known: dict[int, _Ahead] = {}

    def launch(self, drafted: Drafted) -> bool:
        """Drafts for sequences whose drafts are judged by the decode step launched last, as many for each as the one
        with the most had. All of them or none, since each part of them would take passes of its own; True if anything
        was launched."""
        drawn = [0 if i in drafted.came_with_plan else count for i, count in enumerate(drafted.counts)]
        passes, first = max(drawn), 0
        found = []
        for (row, position), count, mine in zip(drafted.starts, drafted.counts, drawn, strict=True):
            if mine:
                found.append((row, position, first, count))
                # Where all of its drafts are accepted, the last of the new ones is drawn after this many tokens.
                if position + count + passes > self._table.room(self._group, row):
                    return False
            first += 1 + count
        chains = np.array(found, np.int32)
        # Whoever asks for more than a temperature is drawn for by more than the kernel of these graphs.
        if not found or self._runner.asks_more(chains[:, 0]) or not self._runner.draft_after(chains, passes):
            return False
        self._known |= {row: _Ahead(position, passes) for row, position, _, _ in found}
        return True

    def keep(self, plan: StepPlan) -> None:
        """Only for sequences that go on with a chain of drafts, if not in this plan, then in a later one."""
        if self._known:
            for start in plan.starts:
                self._known.pop(start.row, None)
            for row, group, first, _ in plan.diffs:
                known = self._known.get(row)
                if known is not None and group == self._group and first <= known.start // self._table.block_size:
                    del self._known[row]  # a block with the same text took the place of the one that was written
            for entry in plan.entries:
                if not entry.device_drafts or entry.draft_depth:
                    self._known.pop(entry.row, None)

    def take(self, entry: PlanEntry, start: int) -> int:
        """How many drafts lie in the row of an entry behind its text, if the head has computed it from `start` on."""
        found = self._known.pop(entry.row, None)
        return found.drafts if found is not None and found.start == start else 0
