"""Whatever branches a tree offers, drawn or chosen, the tokens that come of it are distributed as the target's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.params import SamplingParams
from quire.sampling.philox import Purpose
from quire.sampling.reference import ReferenceRow, probabilities
from quire.sampling.sampler import draw_weights
from quire.speculation.tree import ancestry, child_with, depths, path_along
from quire.speculation.verify import NoiseKeys, judge_by_rejection, pick, rows_along
from quire.speculation.verify_tree import judge_tree
from tests.speculation.test_verify import DRAWS, PAIRS, PROCESSING, W, assert_distributed, keys, one_thread, speculate

__all__ = ["one_thread"]  # a fixture


def judged(drafts: Tensor, parents: tuple[int, ...], target: list[Tensor], proposal: Tensor | None, who: NoiseKeys
           ) -> tuple[Tensor, Tensor, Tensor]:
    count = len(drafts)
    shape = torch.tensor(parents)[None].expand(count, -1)
    return judge_tree(drafts, shape, torch.stack(target)[None].expand(count, -1, -1), proposal, who)


def first_tokens(drafts: Tensor, parents: tuple[int, ...], found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The token that came after the text."""
    last, _, token = found
    first = torch.tensor([path[0] for path in ancestry(parents)])
    return torch.where(last < 0, token, drafts.gather(1, first[last.clamp(min=0)][:, None]).squeeze(1))


def drawn_children(q: Tensor, count: int, first_seed: int) -> tuple[Tensor, Tensor]:
    """Children drawn from q one after the other, none of them twice; and the weights that each was drawn with."""
    seeds = torch.arange(first_seed, first_seed + DRAWS)
    weights = q.expand(DRAWS, -1).clone()
    tokens, kept = [], []
    for sibling in range(count):
        noise = NoiseKeys(seeds, torch.zeros_like(seeds), torch.full_like(seeds, 7)).noise(Purpose.DRAFT, 0, sibling)
        token = pick(weights, noise)
        none = weights.sum(1) == 0
        tokens.append(torch.where(none, -1, token))
        kept.append(weights.clone())
        weights.scatter_(1, token[:, None], 0)
    return torch.stack(tokens, 1), torch.stack(kept, 1)


@pytest.mark.parametrize("name", PAIRS)
def test_children_chosen_by_value_leave_the_target_as_it_is(name: str) -> None:
    p, q = PAIRS[name]
    best = q.argsort(descending=True, stable=True)[:3]
    parents = (-1, -1, -1)
    found = judged(best.expand(DRAWS, -1), parents, [p] * 4, None, keys(3))
    assert_distributed(first_tokens(best.expand(DRAWS, -1), parents, found), p)
    # A chosen child is kept as often as the target says it.
    share = p.double() / p.sum()
    for node in range(3):
        kept = float((found[0] == node).double().mean())
        assert abs(kept - float(share[best[node]])) < 5 * math.sqrt(0.25 / DRAWS)


@pytest.mark.parametrize("name", PAIRS)
def test_drawn_children_are_judged_with_what_they_were_drawn_with(name: str) -> None:
    p, q = PAIRS[name]
    count = 3
    drafts, weights = drawn_children(q, count, 10**6)
    found = judged(drafts, (-1,) * count, [p] * (count + 1), weights, keys(10**6))
    assert_distributed(first_tokens(drafts, (-1,) * count, found), p)


@pytest.mark.parametrize("name", PAIRS)
def test_beside_a_drawn_child_others_may_be_chosen(name: str) -> None:
    """One is drawn; the second is the likeliest of what is left, which depends on the draw; the third is any."""
    p, q = PAIRS[name]
    drafts, weights = drawn_children(q, 1, 2 * 10**6)
    rest = q.expand(DRAWS, -1).clone().scatter_(1, drafts, 0)
    drafts = torch.cat([drafts, rest.argmax(1, keepdim=True), torch.full((DRAWS, 1), 2)], 1)
    proposal = torch.cat([weights, torch.zeros_like(weights), torch.zeros_like(weights)], 1)
    found = judged(drafts, (-1, -1, -1), [p] * 4, proposal, keys(2 * 10**6))
    assert_distributed(first_tokens(drafts, (-1, -1, -1), found), p)


@pytest.mark.parametrize("name, allowed", [
    ("top_p", None), ("min_p", None), ("penalties", None), ("logit_bias", [0, 2, 4, 5, 9, 11]), ("all", [1, 2, 3, 9])])
def test_drawn_children_leave_what_is_asked_of_the_target_as_it_is(name: str, allowed: list[int] | None) -> None:
    """Three children drawn from a q that knows nothing of the processing, nor of a grammar."""
    params, width = SamplingParams(**PROCESSING[name]), 12
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(1, width, generator=generator) * 2
    mask = b"" if allowed is None else sum(1 << token for token in allowed).to_bytes(4, "little")
    row = rows_along(SamplingRow(params, 0, 0, [1, 2, 3, 4, 4, 5], 3), [], mask)
    p = draw_weights(logits, SamplingBatch.build(row, width))[0]
    q = torch.randint(0, 50, (width,), generator=generator)
    drafts, weights = drawn_children(q, 3, 3 * 10**6)
    found = judged(drafts, (-1,) * 3, [p] * 4, weights, keys(3 * 10**6))
    told = [value if allowed is None or token in allowed else -math.inf for token, value in
            enumerate(logits[0].tolist())]
    expected = probabilities(told, ReferenceRow(params, 0, 0, [1, 2, 3], [4, 4, 5]))
    assert_distributed(first_tokens(drafts, (-1,) * 3, found), expected)


def test_a_value_counted_as_drawn_shows() -> None:
    """The test above can fail: the likeliest token, judged as if it had been drawn from q, is kept too often."""
    p, q = PAIRS["close"]
    drafts = q.argmax().expand(DRAWS, 1)
    found = judged(drafts, (-1,), [p, p], q.expand(DRAWS, 1, -1), keys(1))
    with pytest.raises(AssertionError):
        assert_distributed(first_tokens(drafts, (-1,), found), p)


def test_two_places_of_a_tree_have_the_joint_distribution_of_the_target() -> None:
    """p after each first token is another; nodes 0 and 1 follow the text, the others one of these two."""
    first = W([5, 3, 2])
    after = [W([1, 6, 2]), W([4, 1, 1]), W([2, 2, 9])]
    tokens, parents = W([0, 2, 1, 2, 0]), (-1, -1, 0, 0, 1)
    target = [first, after[0], after[2], W([1, 1, 1]), W([1, 1, 1]), W([1, 1, 1])]
    last, depth, token = judged(tokens.expand(DRAWS, -1), parents, target, None, keys(0))
    one = first_tokens(tokens.expand(DRAWS, -1), parents, (last, depth, token))
    at = torch.where(depth == 2, tokens[last.clamp(min=0)], token)
    # Where no first draft was kept, the second token is drawn by a later step, from the target.
    later = pick(torch.stack(after)[one], keys(0).noise(Purpose.SAMPLE, 1))
    two = torch.where(depth == 0, later, at)
    joint = torch.stack([share * rest / rest.sum() for share, rest in zip(first / first.sum(), after, strict=True)])
    assert_distributed(one * 3 + two, joint.flatten().numpy())
    assert float((depth == 2).double().mean()) > 0.3


@pytest.mark.parametrize("name", PROCESSING)
def test_what_is_asked_of_the_target_holds_in_a_tree(name: str) -> None:
    """Every node is processed with the drafts on its branch; the reference says what must come out."""
    check_processing(name, None)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "penalties", "all"])
def test_a_grammar_holds_at_every_node(name: str) -> None:
    check_processing(name, [[0, 2, 4, 5, 9, 11], [1, 3, 9, 10], [4, 5, 6], [0, 1]])


def check_processing(name: str, allowed: list[list[int]] | None) -> None:
    params = SamplingParams(**PROCESSING[name])
    prompt, output, width = [1, 2, 3], [4, 4, 5], 12
    drafts, parents = [9, 4, 9], (-1, -1, 1)
    masks = b"" if allowed is None else b"".join(
        sum(1 << token for token in ids).to_bytes(4, "little") for ids in allowed)
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(len(name))) * 2
    rows = rows_along(SamplingRow(params, 0, 0, prompt + output, len(prompt)), drafts, masks, parents)
    p = draw_weights(logits, SamplingBatch.build(rows, width))
    many = torch.tensor(drafts).expand(DRAWS, -1)
    found = judged(many, parents, list(p), None, keys(77))
    texts = [output, [*output, 9], [*output, 4], [*output, 4, 9]]
    for node in range(-1, 3):
        told = logits[node + 1].tolist()
        if allowed is not None:
            told = [value if token in allowed[node + 1] else -math.inf for token, value in enumerate(told)]
        expected = probabilities(told, ReferenceRow(params, 0, 0, prompt, texts[node + 1]))
        came = after_node(node, many, parents, found)
        if node == -1:
            assert len(came) == DRAWS
        if len(came):
            assert_distributed(came, expected)


def after_node(node: int, drafts: Tensor, parents: tuple[int, ...], found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The tokens that came after a node, of those that got there."""
    last, _, token = found
    tokens = torch.full((len(last),), -1)
    for end, path in enumerate([[], *ancestry(parents)], start=-1):
        trail = [-1, *path]
        if node in trail:
            at = trail.index(node)
            mine = last == end
            tokens[mine] = token[mine] if at == len(trail) - 1 else drafts[mine, trail[at + 1]]
    return tokens[tokens >= 0]


def test_a_tree_of_one_branch_is_judged_as_a_chain() -> None:
    p = [W([5, 3, 2, 1]), W([1, 1, 6, 2]), W([2, 2, 0, 5])]
    q = [W([4, 3, 3, 1]), W([2, 1, 5, 2])]
    drafts, kept, token = speculate(p, q)
    found = judged(drafts, (-1, 0), p, torch.stack(q)[None].expand(DRAWS, -1, -1), keys(0))
    assert torch.equal(found[1], kept)
    assert torch.equal(found[2], token)
    chosen = W([[1, 2]]).expand(DRAWS, -1)
    chain = judge_by_rejection(chosen, torch.stack(p)[None].expand(DRAWS, -1, -1), None, keys(9))
    tree = judged(chosen, (-1, 0), p, None, keys(9))
    assert torch.equal(tree[1], chain[0])
    assert torch.equal(tree[2], chain[1])


def test_rows_may_have_trees_of_different_shapes_and_none() -> None:
    p = W([0, 0, 9, 0])
    target = torch.stack([p] * 4)[None].expand(3, -1, -1)
    drafts, parents = W([[1, 2, 2], [2, -1, -1], [-1, -1, -1]]), W([[-1, -1, 1], [-1, 0, 0], [0, 0, 0]])
    last, depth, token = judge_tree(drafts, parents, target, None, NoiseKeys(W([1, 2, 3]), W([0, 0, 0]), W([5, 5, 5])))
    assert last.tolist() == [2, 0, -1]
    assert depth.tolist() == [2, 1, 0]
    assert token.tolist() == [2, 2, 2]


def test_shapes() -> None:
    drafts, parents = (7, 8, 7, 9, 8), (-1, 0, -1, 2, 2)
    assert depths(parents) == [1, 2, 1, 2, 2]
    assert ancestry(parents) == [[0], [0, 1], [2], [2, 3], [2, 4]]
    assert child_with(drafts, parents, -1, 7) == 0
    assert child_with(drafts, parents, 2, 8) == 4
    assert child_with(drafts, parents, 1, 8) is None
    assert path_along(drafts, parents, [7, 8, 1]) == [0, 1]
    assert path_along(drafts, parents, [5]) == []
    assert path_along((1, 2, 3), (), [1, 2, 4]) == [0, 1]
