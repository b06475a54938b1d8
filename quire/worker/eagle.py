"""Drafts of a head that reads the target's hidden states, on a CPU.

A slot holds the head's key and value of (token p, hidden state p - 1), and the target's hidden state p. So a block is a
function of its tokens, as the target's KV is; whatever happens to a block happens to all three. What the head has not
computed it catches up with, like a draft model, from the hidden states that lie there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.heads.head import DraftHead
from quire.scheduler.plan import PlanEntry
from quire.worker.draft_models import DraftProgress
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import step_inputs
from quire.worker.tree_inputs import Node, node_inputs


class EagleDrafts:
    """A draft head over the blocks of `group`. Its own guesses at hidden states never outlive a step: what the target
    accepts is computed again with the target's."""

    def __init__(self, head: DraftHead, caches: Sequence[LayerCache], table: RequestTable, group: int,
                 num_blocks: int, num_host_blocks: int) -> None:
        self._head = head
        self._cache, kept = caches
        feature = kept.tensors["feature"]
        self._kept = feature.view(-1, feature.shape[-1])
        """By slot: what is kept of the target's hidden state."""
        self._table = table
        self._group = group
        self.states: Sequence[str] = head.spec.states
        self._guessed: dict[int, Tensor] = {}
        """By row with drafts under way: the head's guess at the hidden state before the next token."""
        self._node_guesses: dict[tuple[int, int], Tensor] = {}
        """By row and node of its tree: the same, after that node."""
        progress = DraftProgress(table.tables[group], table.block_size, group, num_blocks, num_host_blocks)
        self._progress = progress
        self.copied, self.moved = progress.copied, progress.moved
        self.written, self.restart, self.kept = progress.written, progress.restart, progress.kept

    def watched(self, ctx: StepContext, stream: ResidualStream, captured: Mapping[str, Tensor]) -> None:
        self._kept[ctx.slots[self._group]] = self._head.kept(stream, captured)

    def catch_up(self, entry: PlanEntry) -> tuple[int, int]:
        self._guessed.pop(entry.row, None)
        return self._progress.catch_up(entry)

    def logits(self, passes: Sequence[PlanEntry]) -> Tensor:
        ids, ctx = step_inputs(self._table, passes, [self._group])
        rows = self._head.forward(ids, self._features(passes, ctx), ctx, self._cache)
        last = rows[ctx.query_start[1:].long() - 1]
        for i, one in enumerate(passes):
            if one.row not in self._guessed:
                self._progress.computed(one)
            if one.sample:
                self._guessed[one.row] = last[i]
        return self._head.logits(last)

    def node_logits(self, nodes: Sequence[Node]) -> Tensor:
        ids, ctx = node_inputs(self._table, nodes, [self._group])
        before = [self._guessed[node.row] if len(node.path) == 1 else self._node_guesses[node.row, node.path[-2]]
                  for node in nodes]
        rows = self._head.forward(ids, torch.stack(before), ctx, self._cache)
        for i, node in enumerate(nodes):
            self._node_guesses[node.row, node.path[-1]] = rows[i]
        return self._head.logits(rows)

    def _features(self, passes: Sequence[PlanEntry], ctx: StepContext) -> Tensor:
        """Of the token before each: the target's hidden state, or after a draft the head's guess at it."""
        size, table = self._table.block_size, self._table.tables[self._group]
        rows = np.repeat([one.row for one in passes], [one.num_tokens for one in passes])
        before = np.maximum(ctx.positions.numpy() - 1, 0)
        slots = torch.from_numpy(table[rows, before // size].astype(np.int64) * size + before % size)
        features = self._head.features(self._kept[slots])
        features[ctx.positions == 0] = 0.0  # nothing comes before the first token
        for i, one in enumerate(passes):
            guess = self._guessed.get(one.row)
            if guess is not None:
                features[int(ctx.query_start[i])] = guess
        return features
