"""Steps of one token of one sequence find their inputs in memory that is used again: the same inputs, the same bits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from quire.kernels.types import StepContext
from quire.layers.stream import ResidualStream
from quire.scheduler.plan import PlanEntry
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import StepInputs, step_inputs
from tests.models.test_recorded_steps import decoder_of, recorder_of, tokens_of
from tests.paged_driver import PagedDriver


def filled_table(groups: int) -> RequestTable:
    table, draw = RequestTable(5, 60, 4, groups), np.random.default_rng(groups)
    table.tokens[:] = draw.integers(0, 90, table.tokens.shape)
    for blocks in table.tables:
        blocks[:] = draw.integers(1, 200, blocks.shape)
    return table


@pytest.mark.parametrize("groups", [1, 3])
def test_they_say_what_new_tensors_say(groups: int) -> None:
    table, draw = filled_table(groups), random.Random(groups)
    inputs, seen = StepInputs(table), list[tuple[torch.Tensor, StepContext]]()
    for _ in range(40):
        entry = PlanEntry(draw.randrange(5), draw.randrange(60), 1, True)
        (ids, ctx), (wanted, plain) = inputs.of([entry]), step_inputs(table, [entry])
        assert torch.equal(ids, wanted) and ctx.lasting and not plain.lasting
        for name in ("positions", "query_start", "context_len"):
            mine, other = getattr(ctx, name), getattr(plain, name)
            assert torch.equal(mine, other) and mine.dtype is other.dtype
        for mine, other in zip(ctx.slots + ctx.block_tables, plain.slots + plain.block_tables, strict=True):
            assert torch.equal(mine[..., : other.shape[-1]], other) and mine.dtype is other.dtype
        seen.append((ids, ctx))
    assert all(one[1] is not other[1] for one, other in pairwise(seen))
    assert all(one[1] is other[1] and one[0] is other[0] for one, other in zip(seen, seen[2:], strict=False))


@pytest.mark.parametrize("entries", [
    [PlanEntry(0, 7, 1, True), PlanEntry(2, 9, 1, True)],
    [PlanEntry(0, 7, 3, True)],
    [PlanEntry(0, 7, 1, True, given=(4,))],
    [PlanEntry(0, 7, 2, True, drafts=(5,))],
], ids=["two sequences", "a chunk", "a token that the plan brings", "a draft"])
def test_all_other_steps_get_tensors_of_their_own(entries: list[PlanEntry]) -> None:
    inputs = StepInputs(filled_table(1))
    (_, one), (_, other) = inputs.of(entries), inputs.of(entries)
    assert one is not other and not one.lasting


class ReusingDriver(PagedDriver):
    """Single tokens come from a request table, as in a model runner."""

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        self.given = [(seq, token) for seq, chunk in tokens.items() for token in chunk]
        return super().step(tokens)

    def _context(self, tokens: Mapping[int, Sequence[int]]) -> StepContext:
        plain = super()._context(tokens)
        if len(self.given) > 1:
            return plain
        if not hasattr(self, "table"):
            self.table = RequestTable(4, 200, self.block_size, len(plain.slots))
            self.inputs = StepInputs(self.table)
        (seq, token), position = self.given[0], int(plain.positions[0])
        self.table.tokens[seq, position] = token
        for mine, blocks in zip(self.table.tables, plain.block_tables, strict=True):
            mine[seq, : blocks.shape[1]] = blocks[0]
        self.ids, ctx = self.inputs.of([PlanEntry(seq, position, 1, True)])
        return ctx

    def _forward(self, ids: torch.Tensor, ctx: StepContext) -> ResidualStream:
        self.decoder.reach(ctx)
        return super()._forward(self.ids if ctx.lasting else ids, ctx)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_recorded_or_not_their_steps_have_the_bits_of_plain_ones(family: str) -> None:
    """In between come steps of more tokens, for which the recorder's memory grows."""
    decoder = decoder_of(family)
    plain, again = PagedDriver(decoder), ReusingDriver(decoder, recorder=recorder_of(decoder))
    sizes = [1, 1, 1, 1, 6, 6, 6, 1, 1, 8, 1, 12, 12, 12, 1, 1, 1]
    left = {seq: tokens_of(seq, sum(sizes)) for seq in range(3)}
    lasting = 0
    for step, size in enumerate(size for size in sizes for _ in left):
        seq = step % 3
        chunk, left[seq] = left[seq][:size], left[seq][size:]
        assert torch.equal(again.step({seq: chunk})[seq], plain.step({seq: chunk})[seq])
        lasting += size == 1
    assert again.recorder is not None and lasting > 25
    assert (again.recorder.replayed > 25) is (family != "gpt2")  # type: ignore[attr-defined]
