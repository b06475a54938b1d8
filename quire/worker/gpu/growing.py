"""Draft trees of a model that grow on the device: level by level, and nobody waits to see which nodes were chosen.

The host knows how many trees there are, how deep each may be and how many nodes it may have; so it can launch all
passes, and name the slots of all nodes. Which candidates are expanded, and in the end the shape of every tree, is
decided by kernels (`kernels/growth.py`), which leave the next pass's rows where its graph finds them, and the nodes
that are to be judged in the rows of the target's step (`worker/gpu/trees.py`).

A level is one captured graph: what the pass before said becomes candidates, the likeliest are expanded, and a pass
computes them. Node n of a tree that is being drafted lies n places behind the text: its key, its value and, of a head,
its guess at the hidden state. All of that is written over by the target, which judges other nodes at these places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels import growth
from quire.kernels.growth import Growing, NodeRows
from quire.scheduler.plan import PlanEntry
from quire.speculation.tree import TreeShape
from quire.worker.gpu.backend import step_kernels
from quire.worker.gpu.batches import rung_for
from quire.worker.gpu.draws import DrawnStep
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.spans import SpanRunner
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import DeviceTable
from quire.worker.gpu.trees import TreeSteps

_AT_ONCE = 32
"""Rows whose probabilities exist at a time: they are a vocabulary wide."""
_RING = 0
"""Slot of the ring in which a model that drafts leaves its draws."""

Rung = tuple[int, bool]
"""Trees, and whether their texts alone have been read yet."""


def expanded_at_once(shape: TreeShape) -> int:
    """Nodes of a level that get children, as on a CPU."""
    return max(1, min(shape.width, shape.nodes // shape.depth))


class TreeGrower:
    """Grows the trees of a step with the passes of one runner, for one target."""

    def __init__(self, runner: SpanRunner, trees: TreeSteps, table: DeviceTable, shape: TreeShape, rejection: bool
                 ) -> None:
        """`rejection`: the target's draws have noise of which no draft may know."""
        device = table.arena.device
        self._runner, self._trees, self._table, self._shape = runner, trees, table, shape
        self._rejection = rejection
        self._kernels = step_kernels(device)
        self._device = device
        self._rungs = runner.tree_rungs
        self.span = runner.span
        self.most = max(self._rungs)
        """Trees of one step."""
        trees.most_growing = self.most
        self._width = min(shape.width, runner.launches.buffers.logits.shape[1])
        self._expands = expanded_at_once(shape)
        self._empty = self._staged([])
        self._stage = torch.zeros(self._empty.size, dtype=torch.int32, device=device)
        self._empty.send(device, self._stage)
        view = self._empty.view
        self._ring = view(self._stage, "ring")
        self._growing = Growing.allocate(self.most, self._width, self._expands, shape.depth,
                                         view(self._stage, "trees").view(self.most, growth.FIELDS),
                                         view(self._stage, "level"))
        self._nodes = NodeRows.allocate(self.most * self._expands, shape.depth, device)
        self._likely = (torch.zeros(self.most * self._expands, self._width, dtype=torch.int64, device=device),
                        torch.zeros(self.most * self._expands, self._width, device=device))
        pool = None if runner.graphs is None else runner.graphs.pool
        self._levels = None if pool is None else GraphCache(device, self._expand, pool)
        self._ends = None if pool is None else GraphCache(device, self._finish, pool)
        self._first = True
        self._replays = False

    def capture(self) -> None:
        self._replays = True
        for graphs in (self._levels, self._ends):
            if graphs is not None:
                graphs.capture([(rung, first) for rung in self._rungs for first in (True, False)])

    def close(self) -> None:
        for graphs in (self._levels, self._ends):
            if graphs is not None:
                graphs.close()
        self._levels = self._ends = None

    @property
    def replays(self) -> int:
        """Levels that were replayed from graphs."""
        return 0 if self._levels is None else self._levels.replays

    # ---- what the host does

    def nodes_of(self, entry: PlanEntry) -> int:
        """Most nodes that the tree of an entry can have: there may be fewer candidates than it may keep."""
        found = level = self._width
        for depth in range(1, entry.draft_depth):
            left = entry.device_drafts - (depth - 1) * self._expands
            level = self._width * max(0, min(self._expands, level, left))
            found += level
        return min(found, entry.device_drafts)

    def grow(self, entries: Sequence[PlanEntry]) -> None:
        """After a pass over the last tokens of these entries' texts, in their order: all levels of their trees."""
        self._staged(entries).send(self._device, self._stage)
        count = len(entries)
        self._first = True
        for level in range(1, max(entry.draft_depth for entry in entries)):
            self._run(self._levels, self._expand, count)
            self._first = False
            if not self._rejection and not self._table.plain:
                self._draw(entries, level)

    def finish(self, count: int) -> None:
        """Write the trees into the rows of the target's step."""
        self._run(self._ends, self._finish, count)

    def _run(self, graphs: GraphCache | None, launch: Callable[[Rung], None], count: int) -> None:
        rung = rung_for(self._rungs, count), self._first
        if graphs is not None and self._replays:
            graphs.run(rung)
        else:
            launch(rung)

    def _draw(self, entries: Sequence[PlanEntry], level: int) -> None:
        """For sequences that ask for more than a temperature: all nodes of a level have one position."""
        rows = [PlanEntry(entry.row, entry.start + level, 1, sample=True) for entry in entries
                for _ in range(self._expands)]
        launches, count = self._runner.launches, len(rows)
        drawn = launches.drawn[_RING]
        pending = PendingStep(0, count, range(count), drawn[:count])
        self._runner.draws.draw(DrawnStep(pending, rows, range(count), launches.buffers.logits, drawn, _RING))

    def _staged(self, entries: Sequence[PlanEntry]) -> Stage:
        trees = np.zeros((self.most, growth.FIELDS), np.int32)
        trees[:, growth.ROW] = -1
        for tree, entry in enumerate(entries):
            params = self._table.info(entry.row).params
            warm = not params.greedy and not self._rejection
            trees[tree, : growth.HEAT] = entry.row, entry.start, entry.device_drafts, entry.draft_depth, warm
            trees.view(np.float32)[tree, growth.HEAT] = params.temperature or 1.0
        trees.view(np.float32)[len(entries) :, growth.HEAT] = 1.0
        stage = Stage()
        for name, part in (("ring", np.array([_RING], np.int32)), ("level", np.zeros(1, np.int32)),
                           ("trees", trees.reshape(-1))):
            stage.add(name, part)
        return stage

    # ---- what the device does

    def _expand(self, rung: Rung, separate_rope: bool = True) -> None:
        """One level: candidates of the pass before, and a pass over the likeliest of them."""
        count, first = rung
        self._add(count, first)
        self._runner.launches.nodes(self._nodes, count * self._expands, self._ring)
        self._growing.level.add_(1)

    def _finish(self, rung: Rung, separate_rope: bool = True) -> None:
        """Candidates of the last pass, then the best of all."""
        count, first = rung
        self._add(count, first)
        self._kernels.finish(self._growing, self._trees.judged, count, self._shape.nodes)

    def _add(self, count: int, first: bool) -> None:
        launches, rows = self._runner.launches, count if first else count * self._expands
        heat = self._growing.trees.view(torch.float32)[:count, growth.HEAT]
        heat = (heat if first else heat[:, None].expand(count, self._expands).reshape(-1))[:, None]
        tokens, chances = self._likely
        for at in range(0, rows, _AT_ONCE):
            some = slice(at, min(at + _AT_ONCE, rows))
            found: Tensor = (launches.buffers.logits[some].float() / heat[some]).softmax(-1)
            torch.topk(found, self._width, out=(chances[some], tokens[some]))
        self._kernels.grow(self._growing, tokens, chances, launches.drawn[_RING], self._nodes, count, first)
