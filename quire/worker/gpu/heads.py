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
from quire.worker.gpu.backend import StepKernels, step_kernels
from quire.worker.gpu.passes import CapturingPasses, DevicePasses, DeviceRanks
from quire.worker.gpu.spans import SpanRunner
from quire.worker.gpu.table import DeviceTable


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

    def keep_projected(self, states: Sequence[Tensor], weight: Tensor, rows: Tensor, places: Tensor, pdl: bool) -> bool:
        """Keep what a projection makes of states side by side, in one launch; False where there is none for them."""
        kernels = self._kernels.features
        if kernels is None or not kernels.projects(states, weight):
            return False
        if self._slots is not None:
            kernels.keep_projected(states, weight, self._slots, self._table, self._block_size, rows, places, pdl=pdl)
        return True

    def before(self, rows: Tensor, places: Tensor) -> Tensor:
        """[T, hidden]: what is kept of the token before each."""
        if self._slots is None:
            raise InvariantError("a draft head ran before it had a cache")
        kept = self._slots
        out = torch.empty(rows.shape[0], kept.shape[1], dtype=kept.dtype, device=kept.device)
        self._kernels.fetch_features(kept, self._table, self._block_size, rows, places, out)
        return out


class WatchedPasses(CapturingPasses):
    """The target's passes: of every token that it computes, what its head reads is kept."""

    def __init__(self, decoder: Decoder, ranks: DeviceRanks | None, head: DraftHead, states: KeptStates) -> None:
        super().__init__(decoder, ranks, head.captured_states)
        self._head = head
        self._states = states
        # Stages would have to agree on it, step by step.
        self.may_rest = self.place.num_stages == 1

    def forward(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> ResidualStream:
        stream, captured = self._capture(ids, ctx, caches)
        if not self._kept_at_once(captured, rows, places):
            self._states.keep(self._head.features(self._head.kept(stream, captured)), rows, places)
        return stream

    def _kept_at_once(self, captured: dict[str, Tensor], rows: Tensor, places: Tensor) -> bool:
        """Where steps are launched early, of few rows: a step without drafts of a small model is hardly longer than
        without a head. What is kept shall not depend on their number where that is promised, so not there."""
        weight, pdl = self._head.state_projection, getattr(self._decoder.ops, "pdl", False)
        if weight is None or not captured or not pdl:
            return False
        states = [captured[name] for name in self._head.spec.states]
        return self._states.keep_projected(states, weight, rows, places, pdl)


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
    state that the target has not computed yet. Every one of the `ranks` makes them, and draws the same."""

    def __init__(self, head: DraftHead, ops: Ops, states: KeptStates, ranks: DeviceRanks | None) -> None:
        self.decoder = head
        self.place = Place()
        self._ranks = DeviceRanks() if ranks is None else ranks
        self._ops = ops
        self._head = head
        self._states = states

    def forward(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> HeadRows:
        return self.forward_nodes(ids, ctx, caches, rows, places, places)

    def forward_nodes(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor, after: Tensor
    ) -> HeadRows:
        return HeadRows(self._ops, self._head.forward(ids, self._states.before(rows, after), ctx, caches[0]), rows,
                        places)

    def logits(self, hidden: ResidualStream, ctx: StepContext | None = None, out: Tensor | None = None) -> Tensor:
        if not isinstance(hidden, HeadRows):
            raise InvariantError("rows that are not a head's")
        self._states.keep(hidden.rows, hidden.owners, hidden.places)
        return self._head.logits(hidden.rows, out)


class HeadRunner(SpanRunner):
    """Steps of a head. The first pass of a step's drafts computes all tokens that the target has accepted since, now
    with its hidden states."""

    def __init__(self, head: DraftHead, ops: Ops, table: DeviceTable, device: torch.device, *, states: KeptStates,
                 ranks: DeviceRanks | None = None, **options: Any) -> None:
        super().__init__(head, ops, table, device, passes=HeadPasses(head, ops, states, ranks), **options)
