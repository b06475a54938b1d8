"""Rejection sampling gives the target's distribution, whatever the drafts were drawn from; coupling its very tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.params import SamplingParams
from quire.sampling.philox import Purpose
from quire.sampling.reference import ReferenceRow, probabilities
from quire.sampling.sampler import _sorted_weights, draw_weights, sample
from quire.speculation.verify import NoiseKeys, judge_by_rejection, pick, rows_along

DRAWS = 200_000
UNLIKELY = 1e-4
"""A right program fails such a test with this probability; seeds are fixed, so it does so never or always."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads of torch's that wait for one another make them ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chi_square_p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chance of counts at least so far from what is expected; what cannot be must not have been."""
    assert not counts[expected == 0].any()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) < 2:
        return 1.0
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64),
                                         torch.tensor(statistic / 2, dtype=torch.float64)))


def keys(first_seed: int) -> NoiseKeys:
    seeds = torch.arange(first_seed, first_seed + DRAWS)
    return NoiseKeys(seeds, torch.zeros_like(seeds), torch.full_like(seeds, 7))


def speculate(p: list[Tensor], q: list[Tensor], first_seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts from q, judged against p, DRAWS times: (drafts, kept, token)."""
    who = keys(first_seed)
    drafts = torch.stack([pick(one.expand(DRAWS, -1), who.noise(Purpose.DRAFT, j)) for j, one in enumerate(q)], 1)
    target = torch.stack(p)[None].expand(DRAWS, -1, -1)
    kept, token = judge_by_rejection(drafts, target, torch.stack(q)[None].expand(DRAWS, -1, -1), who)
    return drafts, kept, token


def outcome(drafts: Tensor, kept: Tensor, token: Tensor, place: int) -> Tensor:
    """The tokens at `place` of those that got that far."""
    reached = kept >= place
    at = torch.where(kept == place, token, drafts[:, min(place, drafts.shape[1] - 1)])
    return at[reached]


def assert_distributed(tokens: Tensor, p: Tensor | np.ndarray) -> None:
    share = np.asarray(p, np.float64) / float(np.asarray(p, np.float64).sum())
    counts = torch.bincount(tokens, minlength=len(share)).numpy()
    assert chi_square_p_value(counts, share * len(tokens)) > UNLIKELY


W = torch.tensor
PAIRS = {
    "close": (W([5, 3, 2, 1, 1, 4]), W([4, 4, 2, 1, 2, 3])),
    "identical": (W([5, 3, 2, 1, 1, 4]), W([10, 6, 4, 2, 2, 8])),
    "disjoint": (W([5, 3, 2, 0, 0, 0]), W([0, 0, 0, 1, 1, 4])),
    "target inside draft": (W([0, 3, 2, 0, 0, 0]), W([1, 1, 1, 1, 1, 1])),
    "draft inside target": (W([1, 2, 3, 4, 5, 6]), W([0, 0, 7, 1, 0, 0])),
    "certain draft": (W([1, 2, 3, 4, 5, 6]), W([0, 0, 0, 1, 0, 0])),
    "certain target": (W([0, 0, 0, 1, 0, 0]), W([1, 2, 3, 4, 5, 6])),
    "nearly certain": (W([1 << 40, 1 << 20, 1, 0, 0, 1 << 30]), W([1 << 20, 1 << 40, 1, 5, 0, 1 << 30])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_token_is_distributed_as_the_target_whatever_the_draft(name: str) -> None:
    p, q = PAIRS[name]
    found = speculate([p, p], [q])
    assert_distributed(outcome(*found, 0), p)


def test_after_accepted_drafts_the_next_place_and_the_bonus_token_are_the_targets_too() -> None:
    p = [W([5, 3, 2, 1]), W([1, 1, 6, 2]), W([2, 2, 0, 5])]
    q = [W([4, 3, 3, 1]), W([2, 1, 5, 2])]
    found = speculate(p, q)
    for place in range(3):
        tokens = outcome(*found, place)
        assert len(tokens) > DRAWS / 2
        assert_distributed(tokens, p[place])


@pytest.mark.parametrize("name", PAIRS)
def test_as_many_drafts_are_accepted_as_the_two_distributions_have_in_common(name: str) -> None:
    p, q = PAIRS[name]
    _, kept, _ = speculate([p, p], [q], first_seed=10**6)
    common = float(torch.minimum(p / p.sum(), q / q.sum()).sum())
    assert abs(float((kept == 1).double().mean()) - common) < 5 * math.sqrt(0.25 / DRAWS)


def test_the_joint_distribution_of_two_places_is_the_product() -> None:
    """The second place must not know how the first was decided."""
    p = [W([5, 3, 2]), W([1, 6, 2]), W([1, 1, 1])]
    drafts, kept, token = speculate(p, [W([4, 3, 3]), W([2, 5, 2])])
    first = outcome(drafts, kept, token, 0)
    # Where the first draft was refused, the second token is drawn by a later step: here, from the target.
    who = keys(0)
    later = pick(p[1].expand(DRAWS, -1), who.noise(Purpose.SAMPLE, 1))
    second = torch.where(kept == 0, later, torch.where(kept == 1, token, drafts[:, 1]))
    joint = torch.outer(p[0] / p[0].sum(), p[1] / p[1].sum()).flatten()
    assert_distributed(first * 3 + second, joint.numpy())


@pytest.mark.parametrize("name", PAIRS)
def test_a_certain_draft_needs_no_weights(name: str) -> None:
    p, _ = PAIRS[name]
    drafts = torch.full((DRAWS, 1), 3)
    target = torch.stack([p, p])[None].expand(DRAWS, -1, -1)
    found = drafts, *judge_by_rejection(drafts, target, None, keys(5))
    assert_distributed(outcome(*found, 0), p)


def test_a_row_with_fewer_drafts_gets_its_bonus_after_them() -> None:
    p = W([1, 2, 3])
    target = torch.stack([p] * 4)[None].expand(2, -1, -1)
    who = NoiseKeys(W([1, 1]), W([0, 0]), W([5, 5]))
    kept, _ = judge_by_rejection(W([[2, -1, -1], [-1, -1, -1]]), target, None, who)
    assert kept[0] <= 1
    assert kept[1] == 0


PROCESSING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit_bias": {"temperature": 1.0, "logit_bias": {3: 2.0, 5: -3.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [1, 4, 5, 9]},
    "all": {"temperature": 0.8, "top_k": 7, "top_p": 0.95, "repetition_penalty": 1.2, "logit_bias": {2: 1.0}},
}


@pytest.mark.parametrize("name", PROCESSING)
def test_what_is_asked_of_the_target_holds_under_speculation(name: str) -> None:
    """Every place of the draft is processed with the drafts before it; the reference says what must come out."""
    params = SamplingParams(**PROCESSING[name])
    prompt, output, width = [1, 2, 3], [4, 4, 5], 12
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(2, width, generator=generator) * 2
    rows = rows_along(SamplingRow(params, 0, 0, prompt + output, len(prompt)), [9])
    p = draw_weights(logits, SamplingBatch.build(rows, width))
    q = draw_weights(logits[:1] + torch.randn(1, width, generator=generator),
                     SamplingBatch.build([SamplingRow(SamplingParams(temperature=1.1), 0, 0, prompt, 3)], width))[0]
    expected = probabilities(logits[0].tolist(), ReferenceRow(params, 0, 0, prompt, output))
    assert_distributed(outcome(*speculate([p[0], p[1]], [q]), 0), expected)
    after = probabilities(logits[1].tolist(), ReferenceRow(params, 0, 0, prompt, [*output, 9]))
    # The weights are floor(... * 2**40): a token less likely than 2**-40 of the best has none.
    assert np.allclose(np.asarray(p[1], np.float64) / float(p[1].sum()), after, atol=1e-6)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "penalties", "all"])
def test_a_grammar_of_the_target_holds_at_every_place_whatever_the_draft(name: str) -> None:
    """The draft model knows no grammar: what it proposes outside of one is refused, the rest is distributed as p."""
    params = SamplingParams(**PROCESSING[name])
    prompt, output, width = [1, 2, 3], [4, 4, 5], 12
    allowed = [[0, 2, 4, 5, 9, 11], [1, 3, 9, 10]]
    masks = b"".join(sum(1 << token for token in ids).to_bytes(4, "little") for ids in allowed)
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(2, width, generator=generator) * 2
    rows = rows_along(SamplingRow(params, 0, 0, prompt + output, len(prompt)), [9], masks)
    p = draw_weights(logits, SamplingBatch.build(rows, width))
    q = [draw_weights(logits[:1] + torch.randn(1, width, generator=generator),
                      SamplingBatch.build([SamplingRow(SamplingParams(temperature=1.1), 0, 0, prompt, 3)], width))[0]]
    found = speculate([p[0], p[1]], q)
    for place, known in enumerate((output, [*output, 9])):
        masked = [value if token in allowed[place] else -math.inf for token, value in enumerate(logits[place].tolist())]
        expected = probabilities(masked, ReferenceRow(params, 0, 0, prompt, known))
        # The second place stands after draft 9, whatever was drawn: its distribution is that of its row.
        tokens = outcome(*found, place)
        assert set(tokens.tolist()) <= set(allowed[place])
        assert_distributed(tokens, expected)
    assert len(outcome(*found, 0)) == DRAWS >= 200_000


@pytest.mark.parametrize("name", ["top_k", "top_p", "all"])
def test_a_gpu_sorts_its_way_to_the_same_weights(name: str) -> None:
    params = SamplingParams(**PROCESSING[name])
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(40, 90, generator=generator) * 8).round() / 4  # many are equal
    rows = [SamplingRow(params, seed, 0, [1, 2, 3, seed], 2) for seed in range(40)]
    batch = SamplingBatch.build(rows, 90)
    edited = logits.clone()
    if batch.edits is not None:
        batch.edits.apply_(edited)
    draws = batch.nucleus if batch.filtered is None else batch.filtered
    assert draws is not None
    found = torch.zeros(40, 90, dtype=torch.int64)
    for part, weights in _sorted_weights(edited, edited.amax(-1), draws):
        found[draws.rows[part]] = weights
    assert torch.equal(found, draw_weights(logits, batch))


def test_weights_are_what_the_sampler_draws_with() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.8)
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(1)).expand(4_000, 9)
    rows = [SamplingRow(params, seed, 0, [1, 2], 2) for seed in range(4_000)]
    batch = SamplingBatch.build(rows, 9)
    assert_distributed(sample(logits, batch).token_ids, draw_weights(logits[:1], SamplingBatch.build(rows[:1], 9))[0])
