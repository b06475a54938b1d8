"""Drafts of a head that reads the target's hidden states, on a CPU.

A slot holds the head's key and value of (token p, hidden state p - 1), and what the head reads of the target's hidden
state p. So a block is a function of its tokens, as the target's KV is; whatever happens to a block happens to all
three. What the head has not computed it catches up with, like a draft model, from the hidden states that lie there.

While a step is drafted, slots of tokens that the target has not computed yet hold the head's guesses at their hidden
states: so each pass finds what it reads in the slot before, whoever wrote it. The target, which judges the drafts in
the same step, writes over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.cpu.sampling import Rules
from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.heads.head import DraftHead
from quire.ops.cpu import CpuOps
from quire.ops.cpu_drafts import Chain, Guesses
from quire.ops.cpu_step import CpuLayerCache
from quire.sampling.batch import PlainDraw
from quire.scheduler.plan import PlanEntry
from quire.worker.chain_floors import ChainFloors
from quire.worker.draft_models import DraftProgress
from quire.worker.draws import rules_of
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import SingleStep, step_inputs
from quire.worker.tree_inputs import Node, node_inputs

_FEW = 8
"""Tokens of one sequence for which a step's inputs lie ready."""


class EagleDrafts:
    """A draft head over the blocks of `group`. Its own guesses at hidden states never outlive a step: what the target
    accepts is computed again with the target's."""

    def __init__(self, head: DraftHead, caches: Sequence[LayerCache], table: RequestTable, group: int,
                 num_blocks: int, num_host_blocks: int, ops: CpuOps, floor: float = 0.0, careful: float = 0.0) -> None:
        """`floor`: a chain ends before the token with which its chance, by the head's own account, falls below it;
        `careful`: the same on texts that it does not understand."""
        self._head, self._ops = head, ops
        self._floors = ChainFloors(floor, careful)
        width = table.tables[group].shape[1]
        self._single = [SingleStep(max(1, count), (width,)) for count in range(_FEW + 1)]
        """By number of tokens; the first is for the passes of a chain after the first one."""
        self._cache, kept = caches
        if not isinstance(kept, CpuLayerCache):
            raise EngineError("a head's states were not allocated by the CPU's operations")
        self._caches, self._kept = list(caches), kept
        feature = kept.tensors["feature"]
        self._rows = feature.view(-1, feature.shape[-1])
        """By slot: what the head reads of the target's hidden state, or its own guess at it."""
        self._recorder = ops.recorder()
        self._table = table
        self._group = group
        self.states: Sequence[str] = head.spec.states
        self._drafting: dict[int, int] = {}
        """Rows with drafts under way, and the position of the last token of their text."""
        self._node_guesses: dict[tuple[int, int], Tensor] = {}
        """By row and node of its tree: the head's guess at the hidden state after that node."""
        progress = DraftProgress(table.tables[group], table.block_size, group, num_blocks, num_host_blocks)
        self._progress = progress
        self.copied, self.moved = progress.copied, progress.moved
        self.written = progress.written

    def watched(self, ctx: StepContext, stream: ResidualStream, captured: Mapping[str, Tensor]) -> None:
        features = self._head.features(self._head.kept(stream, captured))
        self._ops.keep_rows(features, self._kept, ctx, self._group)

    def restart(self, row: int) -> None:
        self._progress.restart(row)
        self._floors.restart(row)

    def kept(self, row: int, num_tokens: int) -> None:
        self._progress.kept(row, num_tokens)
        self._floors.kept(row, num_tokens)

    def catch_up(self, entry: PlanEntry) -> tuple[int, int]:
        self._drafting.pop(entry.row, None)
        return self._progress.catch_up(entry)

    # ---- one pass

    def logits(self, passes: Sequence[PlanEntry]) -> Tensor:
        return self._head.spread(self._pass(passes))

    def _pass(self, passes: Sequence[PlanEntry]) -> Tensor:
        """Compute these; logits of the draft vocabulary after the last token of each."""
        ids, ctx = step_inputs(self._table, passes, [self._group])
        if all(one.sample for one in passes):
            found = self._guess_after(ids, ctx)
        else:
            found = self._read(passes, ids, ctx)
        for one in passes:
            if one.row not in self._drafting:
                self._progress.computed(one)
                if one.sample:
                    self._drafting[one.row] = one.start + one.num_tokens - 1
        return found

    def _guess_after(self, ids: Tensor, ctx: StepContext) -> Tensor:
        """The same of sequences that all go on: their last rows are guesses, and kept as such."""
        def forward() -> tuple[Tensor, Tensor]:
            before = self._ops.states_before(self._kept, ctx, 0)
            rows = self._head.forward(ids, before, ctx, self._cache)
            return rows, self._head.narrow_logits(self._ops.keep_last(rows, self._kept, ctx, 0))

        if self._recorder is None:
            return forward()[1]
        return self._recorder.run_all(len(ctx.context_len), ids, ctx, self._caches, forward)[1]

    def _read(self, passes: Sequence[PlanEntry], ids: Tensor, ctx: StepContext) -> Tensor:
        """Some have more to read: of the last token that they have read now the target's state is known."""
        rows = self._head.forward(ids, self._ops.states_before(self._kept, ctx, 0), ctx, self._cache)
        ends = ctx.query_start[1:].long() - 1
        last, guessing = rows[ends], torch.tensor([one.sample for one in passes])
        self._rows[ctx.slots[0][ends[guessing]]] = last[guessing]
        return self._head.narrow_logits(last)

    def node_logits(self, nodes: Sequence[Node]) -> Tensor:
        ids, ctx = node_inputs(self._table, nodes, [self._group])
        before = [self._rows[self._slot(node.row, self._drafting[node.row])] if len(node.path) == 1
                  else self._node_guesses[node.row, node.path[-2]] for node in nodes]
        rows = self._head.forward(ids, torch.stack(before), ctx, self._cache)
        for i, node in enumerate(nodes):
            self._node_guesses[node.row, node.path[-1]] = rows[i]
        return self._head.logits(rows)

    def _slot(self, row: int, position: int) -> int:
        size = self._table.block_size
        return int(self._table.tables[self._group][row, position // size]) * size + position % size

    # ---- chains

    def chains(self, passes: Sequence[PlanEntry], counts: Sequence[int], draws: Sequence[PlainDraw]) -> list[list[int]]:
        chains = [_Chain(one, count, self._floors.of(one.row)) for one, count in zip(passes, counts, strict=True)]
        rules = rules_of(draws, self._head.spec.vocab_size)
        guesses = self._single_chain(chains[0], rules) if len(chains) == 1 else None
        if guesses is not None:
            _take(chains, guesses)
        else:
            live = _take(chains, self._ops.guess(self._pass(passes), self._head.guessed, rules))
            while live:
                rules = rules_of([draws[chains.index(each)] for each in live], self._head.spec.vocab_size,
                                 [len(each.tokens) for each in live])
                live = _take(live, self._go_on(live, rules))
        for each in chains:
            self._floors.offered(each.text.row, each.end, len(each.tokens))
        return [each.tokens for each in chains]

    def _chain(self, floor: float) -> Chain:
        return Chain(self._head.guessed, floor, self._table.block_size)

    def _single_chain(self, of: _Chain, rules: Rules | None) -> Guesses | None:
        """The whole chain of one sequence in one call; None where its passes are not recorded yet."""
        one, count = of.text, of.most
        if self._recorder is None or one.num_tokens > _FEW:
            return None
        tokens, blocks = self._table.tokens[one.row], self._table.tables[self._group][one.row]
        first, chain, size = self._single[one.num_tokens], self._single[0], self._table.block_size
        first.at(tokens, (blocks,), one.start, size)
        chain.at(tokens, (blocks,), of.end, size, count - 1)
        guesses = Guesses(np.empty((count, 1), np.int64), np.ones((count + 1, 1), np.float32))
        if not self._recorder.run_chain(chain.ids, chain.ctx, self._caches, guesses,
                                        self._chain(of.floor), (first.ids, first.ctx), rules):
            return None
        self._progress.computed(one)
        self._drafting[one.row] = of.end
        return guesses

    def _go_on(self, chains: Sequence[_Chain], rules: Rules | None) -> Guesses:
        """More tokens of each, in one call where the pass is recorded: as many as the one that has the fewest to go."""
        size, count = self._table.block_size, len(chains)
        steps = min(each.most - len(each.tokens) for each in chains)
        rows = np.array([each.text.row for each in chains])
        at = np.array([each.end + len(each.tokens) for each in chains])
        chances = np.array([each.chance for each in chains], np.float32)
        blocks = self._table.tables[self._group][rows, : -(-(int(at.max()) + steps) // size)]
        slots = blocks[np.arange(count), at // size].astype(np.int64) * size + at % size
        ids = torch.tensor([each.tokens[-1] for each in chains])
        ctx = StepContext(
            positions=torch.from_numpy(at), query_start=torch.arange(count + 1, dtype=torch.int32),
            context_len=torch.from_numpy((at + 1).astype(np.int32)), block_tables=(torch.from_numpy(blocks),),
            slots=(torch.from_numpy(slots),),
        )
        guesses = Guesses(np.empty((steps, count), np.int64), np.empty((steps + 1, count), np.float32))
        guesses.chances[0] = chances
        if self._recorder is not None and self._recorder.run_chain(ids, ctx, self._caches, guesses,
                                                                   self._chain(min(each.floor for each in chains)),
                                                                   rules=rules):
            return guesses
        one = self._ops.guess(self._guess_after(ids, ctx), self._head.guessed, rules)
        one.chances[1] = np.where(one.chances[1] < 0.0, -1.0, one.chances[1] * chances)
        return one


@dataclass(slots=True, eq=False)
class _Chain:
    """Drafts of one sequence, as far as they are there."""

    text: PlanEntry
    """What the head computes of it first."""
    most: int
    floor: float
    tokens: list[int] = field(default_factory=list)
    chance: float = 1.0
    """That all of them come true, by the head's own account."""

    @property
    def end(self) -> int:
        """Position of the text's last token."""
        return self.text.start + self.text.num_tokens - 1


def _take(chains: Sequence[_Chain], guesses: Guesses) -> list[_Chain]:
    """Add what was guessed to the chains, as far as it is likely enough; those that go on."""
    live = list(chains)
    for tokens, likely in zip(guesses.tokens[: guesses.passes], guesses.chances[1:], strict=False):
        for place, each in enumerate(chains):
            if each not in live:
                continue
            each.chance = float(likely[place])
            if not each.chance >= each.floor:
                live.remove(each)
                continue
            each.tokens.append(int(tokens[place]))
            if len(each.tokens) == each.most:
                live.remove(each)
    return live
