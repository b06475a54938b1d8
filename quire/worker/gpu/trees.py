"""Steps with draft trees: all nodes are rows of a decode step, and the branch that the target draws is moved to the
slots of its positions before anybody can read them.

Trees of lookups come with the plan. Of those that a model grows on the device (`worker/gpu/growing.py`) the host knows
the number of nodes; their shape is written into the rows of the step by the device itself.

A node's slot is its number, its position is its depth; attention reads the keys of its ancestors where they lie
(`StepContext.detours`). Two captured graphs: the step itself, and, once all its tokens are drawn, the walk along the
trees and the moves. A step with prompts, and sequences whose draws look at their text, take chains: of a tree that came
with the plan, its first branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.growth import JudgedRows
from quire.kernels.types import NO_DETOUR, LayerCache
from quire.ops.interface import Ops
from quire.sampling.sending import send
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.speculation.tree import ROOT, TreeShape, ancestry, depths, path_along
from quire.worker.gpu.batches import ladder, rung_for
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.launches import StepLaunches
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import DeviceTable


def first_branch(entry: PlanEntry) -> PlanEntry:
    """The entry with the first child of each node only: a chain."""
    chain: list[int] = []
    for node, parent in enumerate(entry.parents):
        if parent == (chain[-1] if chain else ROOT):
            chain.append(node)
    return replace(entry, drafts=tuple(entry.drafts[node] for node in chain), parents=(), num_tokens=1 + len(chain))


def as_chain(entry: PlanEntry) -> PlanEntry:
    """The entry with a chain in the place of its tree, if it has one."""
    if not entry.draft_depth:
        return first_branch(entry) if entry.parents else entry
    count = min(entry.device_drafts, entry.draft_depth)
    return replace(entry, device_drafts=count, draft_depth=0, num_tokens=1 + count)


def nodes_as_decodes(entries: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Every token of a step an entry of its own, at its position: as `drafts_as_decodes`, of trees too. Where the
    device alone knows the shape of a tree, its nodes are said to be where the text ends."""
    found: list[PlanEntry] = []
    for entry in entries:
        ahead = [0, *(depths(entry.parents) if entry.parents else range(1, entry.num_tokens))]
        if entry.draft_depth:
            ahead = [0] * entry.num_tokens
        size = len(entry.masks) // entry.num_tokens
        found += [PlanEntry(entry.row, entry.start + depth, 1, True, masks=entry.masks[i * size : (i + 1) * size])
                  for i, depth in enumerate(ahead)]
    return found


class Grower(Protocol):
    """Who grows trees on the device."""

    @property
    def most(self) -> int:
        """Trees of one step."""
        ...

    def finish(self, count: int) -> None:
        """Write so many trees, which have grown, into the rows of the step that is staged."""
        ...


class TreeSteps:
    """Stages and launches such steps of one target."""

    def __init__(self, launches: StepLaunches, ops: Ops, table: DeviceTable, shape: TreeShape, rungs: Sequence[int],
                 groups: Sequence[int], pool: Any) -> None:
        """`groups`: the cache group of every layer. `pool`: of the runner's graphs; None: there are none."""
        self._launches = launches
        self._ops = ops
        self._table = table
        self._shape = shape
        self._rungs = rungs
        self._groups = groups
        self._device = table.arena.device
        self._empty = self._staged([])
        self._stage = torch.zeros(self._empty.size, dtype=torch.int32, device=self._device)
        self._empty.send(self._device, self._stage)
        self._most_trees = table.num_rows
        self._tree_rungs = ladder(self._most_trees)
        self._path = torch.full((self._most_trees, shape.depth), -1, dtype=torch.int32, device=self._device)
        self._kept: list[tuple[LayerCache, int]] = []
        self.grower: Grower | None = None
        """Of trees that grow on the device."""
        self.most_growing = 0
        """How many of these a step may have, here or on the stage that has them."""
        self._open: dict[int, PlanEntry] = {}
        """On a stage that draws nothing, by row: the last entry with a tree, until it is known what was kept of it."""
        self._learned: list[tuple[int, int, list[int]]] = []
        """Row, position of the first draft, and the nodes of branches that were kept since."""
        self._graphs = None if pool is None else GraphCache(self._device, self._launch, pool)
        self._settling = None if pool is None else GraphCache(self._device, self._settle, pool)
        self._replays = False

    def also_moves(self, cache: LayerCache, group: int) -> None:
        """What else is kept of the tokens that the target has computed, in blocks of that group."""
        self._kept.append((cache, group))

    def chains(self, plan: StepPlan) -> StepPlan:
        """The plan with its trees, or with chains in the place of those that this step or sequence cannot have."""
        if not any(entry.parents or entry.draft_depth for entry in plan.entries):
            return plan
        started = {start.row for start in plan.starts}
        decoding = all(entry.sample and entry.num_tokens == 1 + entry.num_drafts and not entry.candidates
                       and entry.prompt_logprobs_from is None for entry in plan.entries)
        growing = sum(entry.draft_depth > 0 for entry in plan.entries)
        fit = growing <= self.most_growing

        def fits(entry: PlanEntry) -> bool:
            if not decoding or entry.row in started or entry.masks:
                return False
            info = self._table.info(entry.row)
            if info.reads_history:
                return False
            if entry.draft_depth:
                # The host does not know at which positions the nodes draw: bans that depend on it must be over.
                return fit and entry.start + 1 - info.num_prompt >= info.params.min_tokens
            return max(depths(entry.parents)) <= self._shape.depth

        return replace(plan, entries=[entry if not (entry.parents or entry.draft_depth) or fits(entry)
                                      else as_chain(entry) for entry in plan.entries])

    def capture(self) -> None:
        self._replays = True
        if self._graphs is not None and self._settling is not None:
            self._graphs.capture(self._rungs)
            if self._launches.draws:
                self._settling.capture(self._tree_rungs)
        if not self._launches.draws:
            # No graph has its kernels: moving nothing compiles them, before the first branch is learned.
            self._learned = [(-1, 0, [])]
            self.settle_learned()

    def close(self) -> None:
        for graphs in (self._graphs, self._settling):
            if graphs is not None:
                graphs.close()
        self._graphs = self._settling = None

    @property
    def replays(self) -> int:
        return 0 if self._graphs is None else self._graphs.replays

    @property
    def parents(self) -> Tensor:
        """int32, of the rows of the step: where a row is a node, the number of its parent."""
        return self._view("parents")

    @property
    def positions(self) -> Tensor:
        """int32: of the rows of the step."""
        return self._view("positions")

    @property
    def judged(self) -> JudgedRows:
        """Where a tree that grows on the device says what it is."""
        return JudgedRows(self._view("trees").view(-1, 4), self._view("rows"), self.positions, self.parents,
                          self._view("detours").view(self._rungs[-1], -1), self._table.tokens)

    def stage(self, entries: Sequence[PlanEntry], slot: int) -> None:
        self._staged(entries, slot).send(self._device, self._stage)
        growing = sum(entry.draft_depth > 0 for entry in entries)
        if growing and self.grower is not None:
            self.grower.finish(growing)

    def launch(self, entries: Sequence[PlanEntry]) -> None:
        """The step that is staged, up to the draws of the drawing kernel."""
        rung = rung_for(self._rungs, sum(entry.num_tokens for entry in entries))
        if self._graphs is not None and self._replays:
            self._graphs.run(rung)
        else:
            self._launch(rung)

    def settle(self, entries: Sequence[PlanEntry]) -> None:
        """Once all tokens are drawn: the branches that were kept, where they belong."""
        rung = rung_for(self._tree_rungs, sum(bool(entry.parents or entry.draft_depth) for entry in entries))
        if self._settling is not None and self._replays:
            self._settling.run(rung)
        else:
            self._settle(rung)

    # ---- on a stage that draws nothing

    def keep_open(self, entries: Sequence[PlanEntry]) -> None:
        """The branches that were kept will be learned."""
        self._open |= {entry.row: entry for entry in entries if entry.parents}

    def forget(self, plan: StepPlan) -> None:
        """Rows that belong to nobody any more, or to another sequence."""
        if self._open:
            for row in (*plan.freed_rows, *(start.row for start in plan.starts)):
                self._open.pop(row, None)

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """What was drawn for a row, the first token for `position`."""
        entry = self._open.pop(row, None)
        if entry is not None and entry.start + 1 == position:
            path = path_along(entry.drafts, entry.parents, tokens)
            if any(node != depth for depth, node in enumerate(path)):
                self._learned.append((row, position, path))

    def settle_learned(self) -> bool:
        """The branches that were kept, where they belong: before the next plan moves blocks. True if anything was
        launched."""
        if not self._learned:
            return False
        trees = [[row, position, 0, len(path)] for row, position, path in self._learned]
        paths = [[*path, *[-1] * (self._shape.depth - len(path))] for _, _, path in self._learned]
        self._learned = []
        self._move_all(send(trees, torch.int32, self._device), send(paths, torch.int32, self._device))
        return True

    def _view(self, name: str) -> Tensor:
        return self._empty.view(self._stage, name)

    def _launch(self, rung: int, separate_rope: bool = True) -> None:
        self._launches.trees(rung, self._view)

    def _settle(self, count: int, separate_rope: bool = True) -> None:
        self._launches.walk_trees(count, self._view, self._path, self._shape.nodes)
        self._move_all(self._view("trees").view(-1, 4)[:count], self._path[:count])

    def _move_all(self, trees: Tensor, path: Tensor) -> None:
        for cache, group in (*zip(self._launches.caches, self._groups, strict=True), *self._kept):
            self._move(cache, self._table.tables[group], trees, path)

    def _move(self, cache: LayerCache, table: Tensor, trees: Tensor, path: Tensor) -> None:
        if self._ops.attention is not None:
            from quire.kernels.triton.branch import move_branches

            move_branches(cache, table, trees, path)
            return
        # Operations of a CPU, whose tensors may be looked at.
        sources: list[int] = []
        targets: list[int] = []
        size = cache.block_size
        for (row, position, _, _), nodes in zip(trees.tolist(), path.tolist(), strict=True):
            for depth, node in enumerate(nodes):
                if row >= 0 and node > depth:
                    for places, place in ((sources, position + node), (targets, position + depth)):
                        places.append(int(table[row, place // size]) * size + place % size)
        if sources:
            self._ops.copy_slots(cache, torch.tensor(sources), torch.tensor(targets))

    def _staged(self, entries: Sequence[PlanEntry], slot: int = 0) -> Stage:
        most, width = self._rungs[-1], 1 + self._shape.depth
        rows, places, positions = np.full(most, -1, np.int32), np.zeros(most, np.int32), np.zeros(most, np.int32)
        parents, trees = np.full(most, -2, np.int32), np.full((self._table.num_rows, 4), -1, np.int32)
        detours = np.zeros((most, width), np.int32)
        detours[:, 0] = NO_DETOUR
        first = num_trees = 0
        for entry in entries:
            # Rows beyond the drafts of a tree that was told are padding.
            count, start = entry.num_tokens if entry.draft_depth else 1 + entry.num_drafts, entry.start
            here = slice(first, first + count)
            rows[here] = entry.row
            places[here] = range(start, start + count)
            positions[here] = places[here]
            if entry.draft_depth:
                trees[num_trees] = entry.row, start + 1, first, count - 1
                num_trees += 1
                detours[first, 0] = start + 1
            elif entry.parents:
                positions[first + 1 : first + count] = [start + depth for depth in depths(entry.parents)]
                parents[first + 1 : first + count] = entry.parents
                trees[num_trees] = entry.row, start + 1, first, count - 1
                num_trees += 1
                detours[first, 0] = start + 1
                for node, path in enumerate(ancestry(entry.parents)):
                    detours[first + 1 + node, : 1 + len(path)] = [start + 1, *(start + 1 + each for each in path)]
            first += entry.num_tokens
        stage = Stage()
        for name, part in (("ring", np.array([slot], np.int32)), ("rows", rows), ("places", places),
                           ("positions", positions), ("parents", parents), ("trees", trees.reshape(-1)),
                           ("detours", detours.reshape(-1))):
            stage.add(name, part)
        return stage
