"""The launches of a step's main part: gather its inputs, run the model, draw. Nothing here waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.decode_lengths import Lengths
from quire.kernels.growth import NodeRows
from quire.kernels.types import LayerCache
from quire.layers.stream import ResidualStream
from quire.sampling.sampler import OK
from quire.worker.gpu.backend import StepKernels, step_kernels
from quire.worker.gpu.batches import FreshRuns, MixedBatch, aligned
from quire.worker.gpu.contexts import StepContexts, View
from quire.worker.gpu.decode_buffers import DecodeBuffers
from quire.worker.gpu.padded import MixedRung
from quire.worker.gpu.passes import DevicePasses
from quire.worker.gpu.sampled_steps import SampledSteps
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import DeviceTable

RING = 32
"""Slots for drawn tokens: more than steps in flight, so that no slot is overwritten before it is copied."""


class StepLaunches:
    """One model over one table. Tokens go to the table's rows and to `drawn`, a ring of the last steps' draws; stages
    of a pipeline that have no head draw nothing."""

    def __init__(
        self, passes: DevicePasses, table: DeviceTable, contexts: StepContexts, max_num_seqs: int, advance: bool
    ) -> None:
        """`advance`: a decode step leaves its positions one further, so that the next needs no staging."""
        device = table.arena.device
        self._device = device
        self._table = table
        self._contexts = contexts
        self._advance = advance
        self.passes = passes
        self.draws = passes.place.is_last
        decoder = passes.decoder
        self._kernels: StepKernels = step_kernels(device)
        vocab_size = decoder.spec.vocab_size
        self.buffers = DecodeBuffers.allocate(
            max_num_seqs, len(contexts.windows), vocab_size, decoder.logits_dtype, device
        )
        self._scratch = self._kernels.draw_scratch(max_num_seqs, vocab_size)
        self.drawn = torch.zeros(RING, max_num_seqs, 2, dtype=torch.int32, device=device)
        """int32 [slot of the ring, place, 2]: token and status."""
        self.caches: list[LayerCache] = []

    def sampled_steps(self, pool: Any) -> SampledSteps | None:
        """The sampling kernels over the same table, logits and ring, where there are such."""
        if self._kernels.sampling is None:
            return None
        return SampledSteps(self._kernels.sampling, self._table, self.buffers.logits, self.drawn,
                            self.drawn.shape[1], pool)

    def scatter(self, places: np.ndarray, values: np.ndarray) -> None:
        """Make a plan's changes in the table."""
        if len(places):
            stage = Stage()
            stage.add("places", places)
            stage.add("values", values)
            self.scatter_staged(stage, stage.send(self._device))

    def scatter_staged(self, stage: Stage, sent: Tensor) -> None:
        self._kernels.scatter(self._table.arena, stage.view(sent, "places"), stage.view(sent, "values"))

    def decode(
        self, rung: int, separate_rope: bool, lengths: Lengths = Lengths.MIDDLE, rests: bool = False
    ) -> None:
        """A decode step of `rung` rows, all on fixed addresses. `separate_rope`: rotation and KV write run in a kernel
        before attention, not inside it. Steps with drafts need that, since a draft's query sees keys of other rows of
        the step; of few rows in chains, an attention that knows of them (`DeviceContext.drafted`) does both. `rests`:
        nothing is kept for a draft head."""
        b = self.buffers
        rows, context_len = b.rows[:rung], b.lengths[:rung]
        slots = tuple(slot[:rung] for slot in b.slots)
        ids, positions = b.ids[:rung], b.wide_positions[:rung]
        self._gather(rows, b.positions[:rung], ids, positions, slots, context_len)
        starts = b.query_start[: rung + 1]
        ctx = self._contexts.decode(
            rows, positions, starts, context_len, slots, separate_rope, self.caches, lengths=lengths)
        forward = self.passes.unwatched if rests else self.passes.forward
        hidden = forward(ids, ctx, self.caches, rows, b.positions[:rung])
        if self.draws:
            self.draw(self.passes.logits(hidden, ctx, b.logits[:rung]), rows, context_len, b.ring)
        self.passes.settle()
        if self._advance:
            b.positions[:rung].add_(1)

    def decode_short(self, rung: int, separate_rope: bool = False) -> None:
        """A decode step of few rows with few keys, without drafts."""
        self.decode(rung, False, Lengths.SHORT)

    def decode_long(self, rung: int, separate_rope: bool = False) -> None:
        """A decode step of rows with many keys, without drafts."""
        self.decode(rung, False, Lengths.LONG)

    def decode_resting(self, rung: int, separate_rope: bool = False) -> None:
        """A decode step without drafts, of a target whose head rests."""
        self.decode(rung, False, rests=True)

    def decode_resting_short(self, rung: int, separate_rope: bool = False) -> None:
        """The same of few rows with few keys, of a target whose head rests."""
        self.decode(rung, False, Lengths.SHORT, rests=True)

    def decode_last(self, wide: DecodeBuffers, rung: int, span: int) -> None:
        """Up to `span` tokens of each of `rung` sequences, every one a row of a decode step, staged in `wide`. Draws
        after the last of each, whose row is the last of its sequence's `span`, and leaves the buffers of decode steps
        ready for the token that was drawn."""
        b, count, last = self.buffers, rung * span, slice(span - 1, rung * span, span)
        rows, places, lengths = wide.rows[:count], wide.positions[:count], wide.lengths[:count]
        slots = tuple(slot[:count] for slot in wide.slots)
        ids, positions = wide.ids[:count], wide.wide_positions[:count]
        self._gather(rows, places, ids, positions, slots, lengths)
        starts = wide.query_start[: count + 1]
        ctx = self._contexts.decode(rows, positions, starts, lengths, slots, True, self.caches)
        hidden = self.passes.forward(ids, ctx, self.caches, rows, places)
        b.rows[:rung].copy_(rows[last])
        b.lengths[:rung].copy_(lengths[last])
        b.positions[:rung].copy_(places[last]).add_(1)
        self.draw(self.passes.logits(hidden[last], None, b.logits[:rung]), b.rows[:rung], b.lengths[:rung], b.ring)
        self.passes.settle()

    def trees(self, rung: int, view: View) -> None:
        """A decode step of `rung` rows, some of them nodes of trees: each lies at a place of its own in its row of the
        table, and has the position of its depth. What is drawn after nodes is put into the rows by `walk_trees`."""
        b = self.buffers
        rows, places, positions = view("rows")[:rung], view("places")[:rung], view("positions")[:rung]
        ids, wide, lengths = b.ids[:rung], b.wide_positions[:rung], b.lengths[:rung]
        slots = tuple(slot[:rung] for slot in b.slots)
        self._gather(rows, places, ids, wide, slots, lengths)
        wide.copy_(positions)
        lengths.copy_((positions + 1) * (rows >= 0))
        detours = view("detours").view(b.rows.shape[0], -1)[:rung]
        ctx = self._contexts.decode(rows, wide, b.query_start[: rung + 1], lengths, slots, True, self.caches, detours)
        hidden = self.passes.forward(ids, ctx, self.caches, rows, places)
        if self.draws:
            self.draw(self.passes.logits(hidden, ctx, b.logits[:rung]), rows, lengths, view("ring"))
        self.passes.settle()

    def walk_trees(self, count: int, view: View, path: Tensor, nodes: int) -> None:
        """Of up to `count` trees of the step: the branch that was drawn."""
        trees = view("trees").view(-1, 4)[:count]
        self._kernels.walk_trees(trees, view("parents"), self.buffers.ids, self.drawn, view("ring"),
                                 self._table.tokens, path[:count], OK, nodes)

    def follow_chains(self, chains: Tensor, wide: DecodeBuffers, span: int) -> None:
        """Into the rows and positions of `wide`: what became of chains of drafts in the decode step launched last."""
        b = self.buffers
        self._kernels.follow_chains(chains, b.ids, self.drawn, b.ring, wide.rows, wide.positions, OK, span)

    def nodes(self, nodes: NodeRows, count: int, ring: Tensor) -> None:
        """A pass over `count` nodes of trees that grow. What is drawn after them is found in the ring's slot."""
        b, rows, places = self.buffers, nodes.rows[:count], nodes.places[:count]
        slots = tuple(slot[:count] for slot in b.slots)
        self._gather(rows, places, b.ids[:count], b.wide_positions[:count], slots, None)
        lengths = nodes.lengths[:count]
        ctx = self._contexts.decode(rows, nodes.positions[:count], b.query_start[: count + 1], lengths, slots, True,
                                    self.caches, nodes.detours[:count])
        hidden = self.passes.forward_nodes(nodes.ids[:count], ctx, self.caches, rows, places, nodes.after[:count])
        self.draw(self.passes.logits(hidden, ctx, b.logits[:count]), rows, lengths, ring)
        self.passes.settle()

    def padded(self, rung: MixedRung, view: View, draws: int) -> None:
        """A mixed step of a fixed shape, all of it on fixed addresses."""
        rows, places = view("token_rows"), view("positions")
        ids, positions, slots = self._gathered(rows, places)
        ctx = self._contexts.padded(rung, view, positions, slots)
        hidden = self.passes.forward(ids, ctx, self.caches, rows, places)
        if self.draws:
            logits = self.passes.logits(hidden[view("last")], ctx, self.buffers.logits[:draws])
            self.draw(logits, view("draw_rows"), view("draw_positions"), view("ring"))
        self.passes.settle()

    def mixed(self, view: View, batch: MixedBatch, fresh: FreshRuns) -> ResidualStream:
        """A step of any shape, up to its last layer."""
        rows, places = view("token_rows"), view("positions")
        ids, positions, slots = self._gathered(rows, places)
        ctx = self._contexts.mixed(view, batch, fresh, positions, slots, self.caches)
        if not fresh.dense:
            return self.passes.forward(ids, ctx, self.caches, rows, places)
        from quire.attention.triton import dense_attention

        with dense_attention():
            return self.passes.forward(ids, ctx, self.caches, rows, places)

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor, ring: Tensor) -> None:
        """The drawing kernel: what temperature and min_p ask for."""
        self._kernels.draw(
            logits, self._table.state, rows, positions, self._table.tokens, self.drawn, ring, self._scratch
        )

    def _gathered(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Ids, positions and cache slots of tokens, in memory of their own."""
        # Rows at aligned addresses whatever the number of tokens, or kernels are compiled again for an odd one.
        tokens = len(rows)
        numbers = torch.empty(2 + len(self._contexts.windows), aligned(tokens), dtype=torch.int64, device=self._device)
        ids, positions, *slots = numbers[:, :tokens]
        self._gather(rows, places, ids, positions, tuple(slots), None)
        return ids, positions, tuple(slots)

    def _gather(
        self, rows: Tensor, places: Tensor, ids: Tensor, positions: Tensor, slots: tuple[Tensor, ...],
        lengths: Tensor | None,
    ) -> None:  # fmt: skip
        self._kernels.gather_inputs(self._table.tokens, self._contexts.tables, self._table.block_size, rows, places,
                                    ids, positions, slots, lengths)
