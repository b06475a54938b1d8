"""Takes a plan to the device: stage its numbers, choose how the step runs, hand back what it will have drawn.

A decode step (one token per sequence) is padded to a rung of the ladder and runs the same launches every time, so it
can be captured as a graph and replayed; so is a small mixed one (`padded`). Any other step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import torch

from quire.errors import InvariantError
from quire.kernels.decode_lengths import Lengths, lengths_of
from quire.kernels.types import LayerCache
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.ops.interface import Ops
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.worker.gpu.batches import (
    LogitRows,
    MixedBatch,
    drafts_as_decodes,
    end_of,
    is_decode,
    ladder,
    rung_for,
)
from quire.worker.gpu.contexts import StepContexts
from quire.worker.gpu.drafted import Drafted, DraftSource
from quire.worker.gpu.draws import DrawnStep, SpecialDraws
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.launches import RING, StepLaunches
from quire.worker.gpu.padded import PaddedSteps
from quire.worker.gpu.passes import DevicePasses, DeviceRanks
from quire.worker.gpu.prompt_logprobs import add_prompt_logprobs
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import NOTHING, DeviceTable
from quire.worker.gpu.trees import TreeSteps, as_chain, nodes_as_decodes

MOST_RESTING = 8
"""Rows of a decode step that may leave out what a draft head reads: what that takes shows in small steps, and every
size is a captured graph more."""


class Resting(Enum):
    """Decode steps of a target whose draft head rests, by `Lengths`."""

    SHORT = "resting short"
    MIDDLE = "resting"


Kind = Lengths | Resting
"""Of decode steps, each with graphs of its own."""


class DeviceRunner:
    """Executes plans on one device, decides nothing and never waits for the device."""

    def __init__(
        self,
        decoder: Decoder | DraftHead,
        ops: Ops,
        table: DeviceTable,
        device: torch.device,
        *,
        max_num_seqs: int,
        use_graphs: bool,
        fuse_rope: bool = False,
        windows: tuple[int | None, ...] | None = None,
        mixed_tokens: int = 0,
        least_rows: int = 0,
        rejection: bool = False,
        advance: bool = False,
        ranks: DeviceRanks | None = None,
        passes: DevicePasses | None = None,
    ) -> None:
        """`fuse_rope`: decode steps without drafts rotate inside their attention. `windows`: of the table's cache
        groups, where the decoder's layers are not all that these were made for. `mixed_tokens`: mixed steps of up to
        so many tokens (of prompts) are padded to fixed shapes; 0: none are. `least_rows`: there is room for so many
        in decode steps of whoever launches these by himself. `rejection`: see `SpecialDraws`.
        `advance`: see `StepLaunches`. `ranks`: the others that share the model. `passes`: other than the decoder's
        own."""
        self._device = device
        self._table = table
        self.contexts = StepContexts(decoder, ops, table, windows, fuse_rope)
        if passes is None:
            if isinstance(decoder, DraftHead):
                raise InvariantError("a draft head has passes of its own")
            passes = DevicePasses(decoder, ranks)
        self.launches = StepLaunches(passes, table, self.contexts, max(max_num_seqs, least_rows), advance)
        self.rungs = ladder(max_num_seqs)
        self.resting_rungs = [rung for rung in self.rungs if rung <= MOST_RESTING] if passes.may_rest else []
        self._most_resting = max(self.resting_rungs, default=0)
        """Of decode steps that can do without what a draft head reads."""
        # Steps with drafts are never padded to these, so rows that are there for drafts need no shapes.
        mixed = self.contexts.mixed_rungs(decoder, min(max_num_seqs, table.num_rows), mixed_tokens)
        self.contexts.reserve({*self.rungs, *([] if mixed is None else mixed.decode_counts)})
        self.graphs = GraphCache(device, self.launches.decode) if use_graphs and device.type == "cuda" else None
        self._other_graphs: dict[Kind, GraphCache] = {} if self.graphs is None else {
            kind: GraphCache(device, launch, self.graphs.pool)
            for kind, launch in self._launches_of().items() if kind is not Lengths.MIDDLE
        }  # fmt: skip
        # Of a draft model nobody has measured it.
        self._rungs_of = {} if advance else {
            Lengths.SHORT: self.contexts.short_rungs(self.rungs), Lengths.LONG: self.contexts.long_rungs(self.rungs),
        }  # fmt: skip
        self.sampled = self.launches.sampled_steps(None if self.graphs is None else self.graphs.pool)
        self.draws = SpecialDraws(table, rejection, self.sampled)
        self._replays = False
        self.padded = None if mixed is None else PaddedSteps(
            mixed, self.launches.padded, device, None if self.graphs is None else self.graphs.pool)
        self.drafter: DraftSource | None = None
        self.trees: TreeSteps | None = None

    @property
    def caches(self) -> list[LayerCache]:
        return self.launches.caches

    @caches.setter
    def caches(self, caches: list[LayerCache]) -> None:
        self.launches.caches = caches

    def close(self) -> None:
        """Let go of graphs and caches: the graphs' launches hold all the memory."""
        for graphs in (self.graphs, *self._other_graphs.values(), self.padded, self.sampled, self.trees):
            if graphs is not None:
                graphs.close()
        self.graphs = self.padded = self.trees = None
        self._other_graphs = {}
        self.caches = []

    def capture(self, max_num_seqs: int) -> None:
        """Graphs of all steps, over the caches as they are now: rungs beyond `max_num_seqs` are there for drafts. From
        here on steps are replayed."""
        self._replays = True
        if self.padded is not None:
            self.padded.capture()
        if self.trees is not None:
            self.trees.capture()
        if self.graphs is None:
            return
        for kind, rungs, separate_rope in self._captured(max_num_seqs):
            self._other_graphs.get(kind, self.graphs).capture(rungs, separate_rope)

    @property
    def replays(self) -> int:
        """Decode steps that were replayed from captured graphs, of all kinds."""
        return sum(each.replays for each in (self.graphs, *self._other_graphs.values()) if each is not None)

    def _launches_of(self) -> dict[Kind, Callable[[int, bool], None]]:
        launches = self.launches
        return {Lengths.MIDDLE: launches.decode, Lengths.SHORT: launches.decode_short,
                Lengths.LONG: launches.decode_long, Resting.MIDDLE: launches.decode_resting,
                Resting.SHORT: launches.decode_resting_short}  # fmt: skip

    def _captured(self, max_num_seqs: int) -> list[tuple[Kind, list[int], bool]]:
        """Decode steps that are captured: their kind, their rungs, and `separate_rope` of `StepLaunches.decode`."""
        fuse_rope, rungs = self.contexts.fuse_rope, self.rungs
        last = rung_for(rungs, max_num_seqs) if fuse_rope else rungs[-1]
        found: list[tuple[Kind, list[int], bool]] = []
        if fuse_rope and rungs[-1] > max_num_seqs:
            found.append((Lengths.MIDDLE, rungs, True))
        found.append((Lengths.MIDDLE, [rung for rung in rungs if rung <= last], False))
        found += [(kind, of_kind, False) for kind, of_kind in self._rungs_of.items()]
        resting_short = [rung for rung in self.resting_rungs if rung in self._rungs_of.get(Lengths.SHORT, ())]
        return [*found, (Resting.SHORT, resting_short, False), (Resting.MIDDLE, self.resting_rungs, False)]

    def launch_captured(self, max_num_seqs: int) -> None:
        """Every step that `capture` would capture, once and outside graphs."""
        if self.padded is not None:
            self.padded.launch_all()
        kinds = self._launches_of()
        for kind, rungs, separate_rope in self._captured(max_num_seqs):
            for rung in sorted(rungs, reverse=True):
                kinds[kind](rung, separate_rope)

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch everything; the tokens will be in the returned tensors once the device gets there."""
        self.launches.scatter(*self._table.take_learned())
        plan = _with_chains(plan) if self.trees is None else self.trees.chains(plan)
        places, values = self._table.apply(plan)
        if self.trees is not None:
            self.trees.forget(plan)
        if plan.head_rests and not self._may_rest(plan):
            plan = replace(plan, head_rests=False)
        if self.drafter is not None:
            self.drafter.follow(plan)
        if not plan.entries:
            self.launches.scatter(places, values)
            return self._nothing_drawn(plan.step)
        if not any(entry.num_drafts for entry in plan.entries):
            return self._run(plan, places, values)
        if self.trees is not None and any(entry.parents or entry.draft_depth for entry in plan.entries):
            return self._run_trees(self.trees, plan, places, values)
        entries: Sequence[PlanEntry] = plan.entries
        if self.drafter is not None and any(entry.device_drafts for entry in entries):
            self.launches.scatter(places, values)
            places = values = NOTHING
            entries, drafted = self._proposed(self.drafter, entries)
        else:
            drafted = Drafted.known(entries)
        pending = self._run(replace(plan, entries=drafts_as_decodes(entries)), places, values, drafted)
        if self.launches.draws:
            pending.drafts = drafted
        return pending

    def _may_rest(self, plan: StepPlan) -> bool:
        """Whether there is a step for such a plan that keeps nothing for a draft head."""
        entries = plan.entries
        return (0 < len(entries) <= self._most_resting and (plan.decoding is not None or is_decode(entries))
                and self._lengths_of(entries) is not Lengths.LONG)

    def _lengths_of(self, entries: Sequence[PlanEntry]) -> Lengths:
        """Of a decode step without drafts: the kind that it is launched as."""
        rung = rung_for(self.rungs, len(entries))
        if not any(rung in of_kind for of_kind in self._rungs_of.values()):
            return Lengths.MIDDLE
        found = lengths_of([entry.start + 1 for entry in entries])
        return found if rung in self._rungs_of.get(found, ()) else Lengths.MIDDLE

    def draft_on(self, pending: PendingStep) -> bool:
        """Launch drafts for the step after one that is under way, if whoever proposes can do so before its drafts are
        judged on the host; True if anything was launched."""
        drafted = pending.drafts
        if self.drafter is None or drafted is None or not isinstance(pending.drawing, range):
            return False
        chains = not drafted.parents and not drafted.grown_depths
        return chains and self.drafter.draft_on(drafted)

    def _run_trees(self, trees: TreeSteps, plan: StepPlan, places: np.ndarray, values: np.ndarray) -> PendingStep:
        self.launches.scatter(places, values)
        entries: Sequence[PlanEntry] = plan.entries
        slot = plan.step % RING
        if self.drafter is not None and any(entry.device_drafts for entry in entries):
            entries, drafted = self._proposed(self.drafter, entries, trees, slot)
        else:
            drafted = Drafted.known(entries)
            trees.stage(entries, slot)
        trees.launch(entries)
        if not self.launches.draws:
            trees.keep_open(entries)
            return self._nothing_drawn(plan.step)
        rows = nodes_as_decodes(entries)
        count, drawn = len(rows), self.launches.drawn[slot]
        pending = PendingStep(plan.step, count, range(count), drawn[:count])
        self.draws.draw(DrawnStep(pending, rows, range(count), self.launches.buffers.logits, drawn, slot, drafted,
                                  trees.positions if drafted.grown_depths else None))
        trees.settle(entries)
        pending.drafts = drafted
        return pending

    def _proposed(
        self, drafter: DraftSource, asked: Sequence[PlanEntry], trees: TreeSteps | None = None, slot: int = 0
    ) -> tuple[Sequence[PlanEntry], Drafted]:
        """What is proposed to entries that ask for drafts. With `trees` the step is staged, since trees end to grow as
        it is. Stages that wait for the drafts are told."""
        entries, found = asked, None
        try:
            entries, drafted = drafter.propose(asked, self._table)
            if not self.launches.draws:
                self.launches.scatter(*self._table.told(entries))
            if trees is not None:
                trees.stage(entries, slot)
                if any(entry.draft_depth for entry in entries):
                    drafted = Drafted.grown(entries, self._table, trees.parents, drafted)
            found = drafted
        finally:
            drafter.tell(asked, entries, found)
        return entries, drafted

    def _nothing_drawn(self, step: int) -> PendingStep:
        return PendingStep(step, 0, [], self.launches.drawn[0, :0])

    def launch(self, entries: list[PlanEntry]) -> None:
        """A step for the draft model: its tokens go to the table only, not to the host."""
        self._run(StepPlan(0, entries=entries), NOTHING, NOTHING)

    def _run(
        self, plan: StepPlan, places: np.ndarray, values: np.ndarray, drafted: Drafted | None = None
    ) -> PendingStep:
        return (self._run_decode if is_decode(plan.entries) else self._run_mixed)(plan, places, values, drafted)

    # ---- decode steps

    def _run_decode(
        self, plan: StepPlan, places: np.ndarray, values: np.ndarray, drafted: Drafted | None
    ) -> PendingStep:
        buffers = self.launches.buffers
        stage = buffers.staged(plan.entries, plan.step % RING)
        if len(places) and buffers.hold(len(places)):
            stage.add("places", places)
            stage.add("values", values)
            self.launches.scatter_staged(stage, stage.send(self._device, buffers.stage))
        else:
            stage.send(self._device, buffers.stage)
            self.launches.scatter(places, values)
        return self.launch_staged(plan.entries, plan.step, drafted, plan.head_rests)

    def launch_staged(
        self, entries: Sequence[PlanEntry], step: int, drafted: Drafted | None, rests: bool = False
    ) -> PendingStep:
        """The decode step whose rows and positions are staged. `rests`: see `StepLaunches.decode`."""
        count, drawn = len(entries), self.launches.drawn[step % RING]
        rung = rung_for(self.rungs, count)
        # A draft's query sees keys of other rows of this step: all keys must be written before attention starts.
        drafts = self.contexts.fuse_rope and drafted is not None
        lengths = Lengths.MIDDLE if drafted is not None else self._lengths_of(entries)
        self.launch_decode(rung, drafts, lengths, rests)
        if not self.launches.draws:
            return self._nothing_drawn(step)
        pending = PendingStep(step, count, range(count), drawn[:count])
        logits = self.launches.buffers.logits
        self.draws.draw(DrawnStep(pending, entries, range(count), logits, drawn, step % RING, drafted))
        return pending

    def launch_decode(
        self, rung: int, separate_rope: bool = False, lengths: Lengths = Lengths.MIDDLE, rests: bool = False
    ) -> None:
        """A decode step of so many rows, as they are staged (see `StepLaunches.decode`)."""
        if self.graphs is not None and self._replays:
            kind: Kind = lengths
            if rests:
                kind = Resting.SHORT if lengths is Lengths.SHORT else Resting.MIDDLE
            self._other_graphs.get(kind, self.graphs).run(rung, separate_rope)
        else:
            self.launches.decode(rung, separate_rope, lengths, rests)

    # ---- steps of any shape

    def _run_mixed(
        self, plan: StepPlan, places: np.ndarray, values: np.ndarray, drafted: Drafted | None
    ) -> PendingStep:
        entries, slot = plan.entries, plan.step % RING
        launches, drawn = self.launches, self.launches.drawn[slot]
        batch = MixedBatch.of(entries)
        reads = LogitRows.of(entries, batch)
        pending = PendingStep(plan.step, len(entries), reads.drawing, drawn[: len(reads.drawing)])
        rung = None if self.padded is None or drafted is not None else self.padded.rung_of(entries, batch, reads)
        if rung is not None and self.padded is not None:
            launches.scatter(places, values)
            self.padded.run(rung, batch, reads, entries, slot)
            if not launches.draws:
                return self._nothing_drawn(plan.step)
            self.draws.draw(DrawnStep(pending, entries, reads.drawing, launches.buffers.logits, drawn, slot))
            return pending
        stage = staged_step(slot, entries, batch, reads, places, values)
        fresh = self.contexts.add_tiles(stage, batch)
        sent = stage.send(self._device)
        if len(places):
            launches.scatter_staged(stage, sent)
        hidden = launches.mixed(lambda name: stage.view(sent, name), batch, fresh)
        if not launches.draws:
            launches.passes.settle()
            return self._nothing_drawn(plan.step)
        add_prompt_logprobs(pending, entries, batch, hidden, launches.passes, self._table)
        logits = None
        if len(reads.last):
            everyone = np.array_equal(reads.last, np.arange(batch.query_start[-1]))
            logits = launches.passes.logits(hidden if everyone else hidden[stage.view(sent, "last")])
        launches.passes.settle()
        if logits is not None and reads.drawing:
            launches.draw(logits[: len(reads.drawing)], stage.view(sent, "draw_rows"),
                          stage.view(sent, "draw_positions"), stage.view(sent, "ring"))
            self.draws.draw(DrawnStep(pending, entries, reads.drawing, logits, drawn, slot, drafted))
        if logits is not None and reads.ranking:
            self.draws.rank(pending, entries, reads, logits)
        return pending


def _with_chains(plan: StepPlan) -> StepPlan:
    """The plan with a chain in the place of every tree."""
    if not any(entry.parents or entry.draft_depth for entry in plan.entries):
        return plan
    return replace(plan, entries=[as_chain(entry) for entry in plan.entries])


def staged_step(
    slot: int,
    entries: Sequence[PlanEntry],
    batch: MixedBatch,
    reads: LogitRows,
    places: np.ndarray,
    values: np.ndarray,
) -> Stage:
    """The numbers of a step of any shape, but for attention's tiles."""
    stage = Stage()
    stage.add("ring", np.array([slot], np.int32))
    stage.add("token_rows", batch.token_rows())
    stage.add("positions", batch.positions())
    stage.add("query_start", batch.query_start)
    stage.add("lengths", batch.starts + batch.counts)
    stage.add("rows", batch.rows)
    stage.add("last", reads.last)
    stage.add("draw_rows", np.array([entries[i].row for i in reads.drawing], np.int32))
    stage.add("draw_positions", np.array([end_of(entries[i]) for i in reads.drawing], np.int32))
    stage.add("places", places)
    stage.add("values", values)
    return stage
