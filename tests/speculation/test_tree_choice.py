"""Whether a tree, a chain or nothing is drafted: what pays by simulated costs is what is chosen."""

from __future__ import annotations

import random

import pytest

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.speculation.device_speculator import DeviceSpeculator
from quire.speculation.ngram import NgramSource
from quire.speculation.speculator import LookupSpeculator
from quire.speculation.tree import TreeShape
from tests.speculation.test_speculator import Cost, compute_bound, free, memory_bound, repeating, speedup

SHAPE = TreeShape(width=4, depth=8, nodes=16)


def nearly_free(tokens: int) -> float:
    """A step in which some rows more cost next to nothing."""
    return 0.020 + 0.0001 * tokens


def forking(length: int = 900) -> list[int]:
    """A word after which one of three comes, and then the same word."""
    rng = random.Random(5)
    return [1 if i % 2 else rng.choice([100, 200, 300]) for i in range(length)]


def lookups(tree: bool = True, width: int = 4) -> LookupSpeculator:
    return LookupSpeculator(NgramSource(1), 8, tree=TreeShape(width, 8, 16) if tree else None)


def test_a_text_that_forks_is_faster_with_trees_where_rows_are_cheap() -> None:
    chain, tree = lookups(tree=False), lookups()
    by_chain, by_tree = speedup([forking()], nearly_free, chain), speedup([forking()], nearly_free, tree)
    assert by_tree > 1.25 * by_chain
    assert tree.stats.offered[0] > 1.3 * tree.stats.verifications


def test_a_text_that_repeats_itself_is_as_fast_as_with_chains() -> None:
    assert speedup([repeating()], memory_bound, lookups()) > 0.97 * speedup([repeating()], memory_bound, lookups(False))


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("seed", range(2))
def test_a_text_that_nobody_can_guess_is_hardly_slower_with_trees(cost: Cost, seed: int) -> None:
    assert speedup([free(seed=seed)], cost, lookups()) > 0.97


def test_no_alternatives_where_a_row_more_costs_its_share() -> None:
    tree = lookups()
    assert speedup([forking(400)], compute_bound, tree) > 0.97
    assert tree.stats.offered[:1] == [] or tree.stats.offered[0] <= 1.1 * tree.stats.verifications


def test_a_large_batch_ends_trees_by_itself() -> None:
    def cost(tokens: int) -> float:
        return 0.020 * max(1.0, tokens / 24)

    crowded = lookups()
    assert speedup([forking(200) for _ in range(32)], cost, crowded) > 0.97
    assert crowded.stats.decode_tokens / crowded.stats.decode_steps < 1.3


def model() -> DeviceSpeculator:
    speculator = DeviceSpeculator(4, tree=TreeShape(4, 4, 16))
    speculator.drafting.observe(1, 0.002)
    return speculator


def test_a_model_drafts_trees_where_they_hit_more_and_rows_are_cheap() -> None:
    speculator = model()
    gain = speedup([free(800)], nearly_free, speculator, draft_cost=0.002, draft_hits=0.5, tree_hits=0.85)
    chains = DeviceSpeculator(4)
    chains.drafting.observe(1, 0.002)
    assert gain > 1.2 * speedup([free(800)], nearly_free, chains, draft_cost=0.002, draft_hits=0.5)
    assert speculator.stats.offered[0] > 5 * speculator.stats.verifications


def test_a_model_drafts_chains_where_rows_are_dear() -> None:
    speculator = model()
    gain = speedup([free(800)], memory_bound, speculator, draft_cost=0.002, draft_hits=0.8, tree_hits=0.85)
    chains = DeviceSpeculator(4)
    chains.drafting.observe(1, 0.002)
    assert gain > 0.97 * speedup([free(800)], memory_bound, chains, draft_cost=0.002, draft_hits=0.8)
    assert speculator.stats.offered[0] < 1.5 * speculator.stats.verifications


def test_a_model_whose_trees_miss_too_ends_soon() -> None:
    speculator = model()
    assert speedup([free(2000)], memory_bound, speculator, draft_cost=0.010, draft_hits=0.1, tree_hits=0.2) > 0.97


@pytest.mark.parametrize(("params", "chain"), [
    ({}, False), ({"top_p": 0.9}, False), ({"frequency_penalty": 0.5}, True), ({"min_tokens": 4}, True),
], ids=str)
def test_a_gpu_is_asked_for_chains_where_draws_depend_on_their_text(params: dict[str, float], chain: bool) -> None:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=40, **params), seed=0, arrival_time=0.0)
    request.max_len = 43
    for gpu in (False, True):
        found = DeviceSpeculator(4, adaptive=False, tree=SHAPE, gpu=gpu)._choose(request.sequences, 1, 64)
        assert [bool(drafts.depth) for drafts in found.values()] == [not (gpu and chain)]
