"""What a draft head does beside its layer, against plain torch: states by slot, likeliest tokens, recorded chains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.kv_spec import KVSpec
from quire.kernels.types import StepContext
from quire.ops.cpu_drafts import Chain, Guesses, Rules
from quire.sampling.batch import PlainDraw, SamplingBatch, SamplingRow
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import draw_weights, sample
from quire.worker.draws import rules_of

WIDTH, SIZE = 20, 4
SETTINGS = [{"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 0.4, "top_k": 3},
            {"temperature": 0.9, "top_k": 30, "top_p": 0.9}, {"temperature": 2.0, "min_p": 0.2}, {"temperature": 0.0},
            {"temperature": 1.0, "top_k": 1}, {"temperature": 1e9, "top_p": 0.5, "min_p": 0.9, "top_k": 55}]


def a_step(starts: list[int], counts: list[int]) -> tuple[StepContext, list[list[int]]]:
    """Tokens of sequences whose blocks are dealt out backwards, and the slot of every position of each."""
    blocks = torch.arange(11, -1, -1, dtype=torch.int32).view(len(starts), -1)
    slots = [[int(block) * SIZE + i for block in row for i in range(SIZE)] for row in blocks]
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    ctx = StepContext(
        positions=positions, query_start=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        context_len=torch.tensor([s + n for s, n in zip(starts, counts, strict=True)], dtype=torch.int32),
        block_tables=(blocks,),
        slots=(torch.tensor([slots[i][p] for i, (s, n) in enumerate(zip(starts, counts, strict=True))
                             for p in range(s, s + n)]),),
    )
    return ctx, slots


def test_rows_stand_side_by_side(variant_ops, randn):
    parts = [randn(3, width, seed=width) for width in (1, 16, 7)]
    assert torch.equal(variant_ops.concat(parts), torch.cat(parts, 1))
    with pytest.raises(EngineError, match="side by side"):
        variant_ops.concat([parts[0], randn(4, 2)])


def test_states_are_kept_by_slot_and_found_one_token_later(variant_ops, randn):
    kept = variant_ops.allocate_cache(KVSpec.feature(WIDTH), 12, SIZE)
    rows = kept.tensors["feature"].view(-1, WIDTH)
    before, slots = a_step([0, 5, 2], [6, 1, 3])
    first = randn(10, WIDTH)
    variant_ops.keep_rows(first, kept, before, 0)
    assert torch.equal(rows[before.slots[0]], first)
    after, _ = a_step([0, 6, 4], [4, 1, 2])
    found = variant_ops.states_before(kept, after, 0)
    wanted = [torch.zeros(WIDTH), *(rows[slots[0][p]] for p in (0, 1, 2)), rows[slots[1][5]], rows[slots[2][3]],
              rows[slots[2][4]]]
    assert torch.equal(found, torch.stack(wanted))
    second, untouched = randn(7, WIDTH, seed=9), rows.clone()
    last = variant_ops.keep_last(second, kept, after, 0)
    assert torch.equal(last, second[[3, 4, 6]])
    untouched[[slots[0][3], slots[1][6], slots[2][5]]] = last
    assert torch.equal(rows, untouched)


def test_a_step_that_leads_outside_the_cache_is_refused(variant_ops, randn):
    kept = variant_ops.allocate_cache(KVSpec.feature(WIDTH), 5, SIZE)
    ctx, _ = a_step([1], [2])
    for call in (lambda: variant_ops.states_before(kept, ctx, 0),
                 lambda: variant_ops.keep_rows(randn(2, WIDTH), kept, ctx, 0)):
        with pytest.raises(EngineError, match="broken"):
            call()
    with pytest.raises(EngineError, match="rows to be kept"):
        variant_ops.keep_rows(randn(3, WIDTH), variant_ops.allocate_cache(KVSpec.feature(WIDTH), 12, SIZE), ctx, 0)


@pytest.mark.parametrize("width", [1, 3, 16, 17, 100, 1537])
def test_the_likeliest_token_and_its_probability(variant_ops, randn, width):
    logits, ids = 4 * randn(5, width), torch.arange(width) * 3 + 1
    logits[1] = logits[1, 0]  # all alike: the first
    found = variant_ops.guess(logits, ids)
    assert found.tokens[0].tolist() == ids[logits.argmax(-1)].tolist() and found.tokens[0, 1] == 1
    torch.testing.assert_close(torch.from_numpy(found.chances[1]).double(), logits.double().softmax(-1).amax(-1),
                               rtol=1e-5, atol=1e-7)
    assert variant_ops.guess(logits, None).tokens[0].tolist() == logits.argmax(-1).tolist()
    with pytest.raises(EngineError, match="int64"):
        variant_ops.guess(logits, ids.int())


def test_logits_that_are_not_finite_give_no_token(variant_ops):
    logits = torch.full((2, 40), -torch.inf)
    logits[1, 7] = torch.inf
    found = variant_ops.guess(logits, None)
    assert found.tokens.tolist() == [[-1, -1]] and found.chances[1].tolist() == [-1.0, -1.0]


def drawing(count: int, first: int = 0) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**SETTINGS[(first + i) % len(SETTINGS)]), 77 + i, i % 2, [1] * (3 + i), 1)
            for i in range(count)]


def rules(rows: list[SamplingRow], vocab: int) -> Rules | None:
    return rules_of([draw for row in rows if (draw := PlainDraw.of(row)) is not None], vocab)


@pytest.mark.parametrize("width", [1, 40, 1537])
def test_a_drawn_token_is_the_samplers(variant_ops, randn, width):
    """Of the draft vocabulary's logits what the sampler draws from the same among those of all tokens."""
    logits, ids, rows = 4 * randn(24, width), torch.arange(width) * 3 + 1, drawing(24)
    spread = torch.full((24, 4 * width), -1e9)
    spread[:, ids] = logits
    wanted = sample(spread, SamplingBatch.build(rows, spread.shape[1]))
    found = variant_ops.guess(logits, ids, rules(rows, spread.shape[1]))
    assert found.tokens[0].tolist() == wanted.token_ids.tolist()
    everything = [row.ahead(()) for row in rows]
    for row in everything:  # by its chance among the tokens that top_p alone leaves for the first attempt: all
        row.params = replace(row.params, top_p=1.0 if row.params.top_k <= 0 else row.params.top_p)
    weights = draw_weights(spread, SamplingBatch.build(everything, spread.shape[1])).double()
    shares = (weights / weights.sum(1, keepdim=True)).gather(1, wanted.token_ids[:, None])[:, 0]
    drawn = torch.tensor([not row.params.greedy and row.params.top_k != 1 for row in rows])
    torch.testing.assert_close(torch.from_numpy(found.chances[1]).double()[drawn], shares[drawn], rtol=1e-5, atol=1e-9)
    logits[4, width // 2] = torch.nan
    broken = variant_ops.guess(logits, ids, rules(rows, spread.shape[1]))
    assert broken.tokens[0, 4] == -1 and broken.chances[1, 4] == -1.0
    assert rules(drawing(1, 5), 40) is None
    with pytest.raises(EngineError, match="24 rules for drawing from 3 rows"):
        variant_ops.guess(logits[:3], ids, rules(rows, spread.shape[1]))


@pytest.mark.parametrize("changed", [{"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"min_tokens": 9},
                                     {"allowed_token_ids": [1, 2]}])
def test_rows_whose_logits_are_changed_are_not_drawn_plainly(changed):
    assert PlainDraw.of(SamplingRow(SamplingParams(max_tokens=20, **changed), 1, 0, [1, 2], 1)) is None


@pytest.mark.parametrize("starts", [[3], [2, 6, 1]])
def test_a_drawn_chain_in_one_call_is_the_chain_step_by_step(variant_ops, randn, starts):
    toy, passes, rows = Toy(variant_ops, randn), 5, drawing(len(starts))
    ids = [7, 1, 30][: len(starts)]
    for _ in range(2):  # until it is recorded
        tokens, at, mine = [], ids, [row.ahead(()) for row in rows]
        for i in range(passes):
            ctx, _ = a_step([start + i for start in starts], [1] * len(starts))
            at = sample(toy.run(torch.tensor(at), ctx), SamplingBatch.build(mine, 40)).token_ids.tolist()
            mine = [row.ahead((token,)) for row, token in zip(mine, at, strict=True)]
            tokens.append(at)
    ctx, _ = a_step(starts, [1] * len(starts))
    found = Guesses(np.empty((passes, len(ids)), np.int64), np.ones((passes + 1, len(ids)), np.float32))
    given = rules(rows, 40)
    assert toy.recorder.run_chain(torch.tensor(ids), ctx, [toy.kept], found, Chain(None, 0.0, SIZE), rules=given)
    assert found.passes == passes and found.tokens.tolist() == tokens
    assert (np.diff(found.chances, axis=0) <= 0.0).all() and (found.chances > 0.0).all()
    assert given is not None and [rule.key[2] for rule in given] == [row.position + passes for row in rows]


class Toy:
    """A head of two kernels: the states before are its rows, and their product with a table its logits."""

    def __init__(self, ops, randn) -> None:
        self.ops = ops
        self.kept = ops.allocate_cache(KVSpec.feature(WIDTH), 12, SIZE)
        self.table = ops.pack_linear(randn(40, WIDTH, seed=3))
        self.embedding = ops.pack_linear(3 * randn(40, WIDTH, seed=4))
        self.recorder = ops.recorder()

    def run(self, ids: Tensor, ctx: StepContext) -> Tensor:
        def forward() -> tuple[Tensor, Tensor]:
            rows = self.ops.add(self.ops.states_before(self.kept, ctx, 0), self.ops.embed(ids, self.embedding))
            return rows, self.ops.linear(self.ops.keep_last(rows, self.kept, ctx, 0), self.table)

        return self.recorder.run_all(len(ids), ids, ctx, [self.kept], forward)[1]

    def step_by_step(self, ids: list[int], starts: list[int], passes: int) -> tuple[list[list[int]], list[list[float]]]:
        tokens, chances = [], [[1.0] * len(ids)]
        for i in range(passes):
            ctx, _ = a_step([start + i for start in starts], [1] * len(starts))
            found = self.ops.guess(self.run(torch.tensor(ids), ctx), None)
            ids = found.tokens[0].tolist()
            tokens.append(ids)
            chances.append((found.chances[1] * np.array(chances[-1], np.float32)).tolist())
        return tokens, chances[1:]


@pytest.mark.parametrize("starts", [[3], [2, 6, 1]])
def test_a_chain_in_one_call_is_the_chain_step_by_step(variant_ops, randn, starts):
    toy, passes = Toy(variant_ops, randn), 5
    ids = [7, 1, 30][: len(starts)]

    def chain(floor: float) -> Guesses | None:
        ctx, _ = a_step(starts, [1] * len(starts))
        found = Guesses(np.empty((passes, len(ids)), np.int64), np.ones((passes + 1, len(ids)), np.float32))
        same = Chain(None, floor, SIZE)
        return found if toy.recorder.run_chain(torch.tensor(ids), ctx, [toy.kept], found, same) else None

    assert chain(0.0) is None  # nothing is recorded yet
    tokens, chances = toy.step_by_step(ids, starts, passes)
    kept = toy.kept.tensors["feature"].clone()
    toy.kept.tensors["feature"].zero_()
    tokens, chances = toy.step_by_step(ids, starts, passes)
    kept = toy.kept.tensors["feature"].clone()
    toy.kept.tensors["feature"].zero_()
    found = chain(0.0)
    assert found is not None and found.passes == passes
    assert found.tokens.tolist() == tokens and found.chances[1:].tolist() == chances
    assert torch.equal(toy.kept.tensors["feature"], kept)
    # It ends with the pass in which the last of the chains falls below the floor.
    floor = max(chances[2])
    cut = chain(floor * 1.0001)
    assert cut is not None and 1 <= cut.passes <= 3
    assert cut.tokens[: cut.passes].tolist() == tokens[: cut.passes]
    assert all(max(each) >= floor * 1.0001 for each in chances[: cut.passes - 1])
    assert max(chances[cut.passes - 1]) < floor * 1.0001


def test_a_recorded_chain_says_what_refused_it(variant_ops, randn):
    toy = Toy(variant_ops, randn)
    toy.step_by_step([7], [3], 3)
    ctx, _ = a_step([9], [1])
    ctx.slots[0][0] = 10_000
    found = Guesses(np.empty((2, 1), np.int64), np.ones((3, 1), np.float32))
    with pytest.raises(EngineError, match="quire_check_step"):
        toy.recorder.run_chain(torch.tensor([7]), ctx, [toy.kept], found, Chain(None, 0.0, SIZE))
