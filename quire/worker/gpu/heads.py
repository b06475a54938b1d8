"""A draft head on the device: the target's steps keep the hidden states that it reads, and its own steps are graphs.

As on a CPU (`worker/eagle.py`) a slot holds the head's key and value of (token p, hidden state p - 1), and the target's
hidden state p. While a step is drafted, slots of drafts hold the head's guesses at hidden states: so each pass finds
what it reads in the slot before, whoever wrote it, and the target, which judges the drafts in the same step, writes
over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.ops.interface import Ops
from quire.parallel.place import Place
from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.backend import StepKernels, step_kernels
from quire.worker.gpu.batches import is_decode, rung_for
from quire.worker.gpu.decode_buffers import DecodeBuffers
from quire.worker.gpu.drafter import DraftRunner
from quire.worker.gpu.draws import DrawnStep
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.passes import DevicePasses, DeviceRanks
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.table import DeviceTable

_NO_TOKEN = PlanEntry(-1, 0, 1, sample=False)
"""A row of padding."""


class KeptStates:
    """Hidden states by slot, in the blocks of one cache group."""

    def __init__(self, table: DeviceTable, group: int) -> None:
        """`group`: of the table's block tables."""
        self._kernels: StepKernels = step_kernels(table.arena.device)
        self._table = table.tables[group]
        self._block_size = table.block_size
        self._slots: Tensor | None = None

    def connect(self, cache: LayerCache) -> None:
        feature = cache.tensors["feature"]
        self._slots = feature.view(-1, feature.shape[-1])

    def keep(self, features: Tensor, rows: Tensor, places: Tensor) -> None:
        """Of tokens, by their rows of the table (-1: padding) and positions. Before there is a cache, nothing."""
        if self._slots is not None:
            self._kernels.keep_features(features, self._slots, self._table, self._block_size, rows, places)

    def before(self, rows: Tensor, places: Tensor) -> Tensor:
        """[T, hidden]: what is kept of the token before each."""
        if self._slots is None:
            raise InvariantError("a draft head ran before it had a cache")
        kept = self._slots
        out = torch.empty(rows.shape[0], kept.shape[1], dtype=kept.dtype, device=kept.device)
        self._kernels.fetch_features(kept, self._table, self._block_size, rows, places, out)
        return out


class WatchedPasses(DevicePasses):
    """The target's passes: of every token that it computes, what its head reads is kept."""

    def __init__(self, decoder: Decoder, ranks: DeviceRanks | None, head: DraftHead, states: KeptStates) -> None:
        super().__init__(decoder, ranks)
        self._head = head
        self._states = states

    def forward(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> ResidualStream:
        captured: dict[str, Tensor] = {}
        names = self._head.captured_states
        if names:
            stream, captured = self._decoder.forward_capturing(ids, ctx, caches, names)
        else:
            stream = self._decoder.forward(ids, ctx, caches)
        self._states.keep(self._head.features(self._head.kept(stream, captured)), rows, places)
        return stream


class HeadRows(ResidualStream):
    """What came out of a head, and of which tokens."""

    __slots__ = ("owners", "places")

    def __init__(self, ops: Ops, rows: Tensor, owners: Tensor, places: Tensor) -> None:
        super().__init__(ops, rows, fusable=False)
        self.owners = owners
        self.places = places

    def __getitem__(self, index: Tensor | slice) -> HeadRows:
        return HeadRows(self._ops, *(each[index].contiguous() for each in (self.rows, self.owners, self.places)))


class HeadPasses(DevicePasses):
    """Passes of a head. It guesses after the tokens whose logits are asked for: there its output is kept as the hidden
    state that the target has not computed yet."""

    def __init__(self, head: DraftHead, ops: Ops, states: KeptStates) -> None:
        self.decoder = head
        self.place = Place()
        self._ranks = DeviceRanks()
        self._ops = ops
        self._head = head
        self._states = states

    def forward(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> HeadRows:
        return HeadRows(self._ops, self._head.forward(ids, self._states.before(rows, places), ctx, caches[0]), rows,
                        places)

    def logits(self, hidden: ResidualStream, ctx: StepContext | None = None, out: Tensor | None = None) -> Tensor:
        if not isinstance(hidden, HeadRows):
            raise InvariantError("rows that are not a head's")
        self._states.keep(hidden.rows, hidden.owners, hidden.places)
        return self._head.logits(hidden.rows, out)


class HeadRunner(DraftRunner):
    """Steps of a head. The first pass of a step's drafts computes all tokens that the target has accepted since, now
    with its hidden states: up to `span` of each sequence, every one a row of a captured step."""

    def __init__(self, head: DraftHead, ops: Ops, table: DeviceTable, device: torch.device, *, span: int,
                 most_rows: int, states: KeptStates, **options: Any) -> None:
        """`most_rows`: of such a step."""
        super().__init__(head, ops, table, device, passes=HeadPasses(head, ops, states), **options)
        self._span = span
        self._wide_rungs = [rung for rung in self.rungs if rung * span <= most_rows]
        self._wide = DecodeBuffers.allocate(span * max(self._wide_rungs, default=0), len(self.contexts.windows), 0,
                                            ops.dtype, device)
        self.contexts.reserve({*self.rungs, *(rung * span for rung in self._wide_rungs)})
        self._wide_graphs: GraphCache | None = None
        if self.graphs is not None:
            self._wide_graphs = GraphCache(device, self._decode_last, self.graphs.pool)

    def capture(self, max_num_seqs: int) -> None:
        if self._wide_graphs is not None:
            self._wide_graphs.capture(self._wide_rungs)
        super().capture(max_num_seqs)

    def close(self) -> None:
        if self._wide_graphs is not None:
            self._wide_graphs.close()
        self._wide_graphs = None
        super().close()

    @property
    def replays(self) -> int:
        """Passes that were replayed from graphs."""
        return sum(graphs.replays for graphs in (self.graphs, self._wide_graphs) if graphs is not None)

    def launch(self, entries: list[PlanEntry]) -> None:
        if is_decode(entries) or not self._fits(entries):
            super().launch(entries)
            return
        count, span = len(entries), self._span
        rung = rung_for(self._wide_rungs, count)
        rows: list[PlanEntry] = []
        for entry in entries:
            rows += [_NO_TOKEN] * (span - entry.num_tokens)
            rows += [PlanEntry(entry.row, entry.start + i, 1, sample=False) for i in range(entry.num_tokens)]
        self._wide.staged(rows, 0).send(self._device, self._wide.stage)
        if self._wide_graphs is not None and self._replays:
            self._wide_graphs.run(rung)
        else:
            self._decode_last(rung)
        drawn = self.launches.drawn[0]
        pending = PendingStep(0, count, range(count), drawn[:count])
        self.draws.draw(DrawnStep(pending, entries, range(count), self.launches.buffers.logits, drawn))
        self._staged = [(entry.row, entry.start + entry.num_tokens) for entry in entries]

    def _fits(self, entries: Sequence[PlanEntry]) -> bool:
        most = max(self._wide_rungs, default=0)
        return len(entries) <= most and all(entry.sample and entry.num_tokens <= self._span for entry in entries)

    def _decode_last(self, rung: int, separate_rope: bool = True) -> None:
        self.launches.decode_last(self._wide, rung, self._span)
