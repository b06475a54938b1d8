"""Replays against independent ones, and the rates that the default policy must reach on seeded workloads."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequestError
from quire.kvcache.eviction import EVICTION_POLICIES
from quire.sim.prefix_cache import CLAIRVOYANT, block_keys, read_trace, replay
from quire.sim.prefix_workloads import PREFIX_WORKLOADS, make_workload

REQUESTS = 2000


@cache
def rate(workload: str, policy: str, capacity: int) -> float:
    prompts = [block_keys(request) for request in make_workload(workload, REQUESTS)]
    return replay(prompts, policy, capacity).hit_rate


def naive_lru_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """Least recently used first, the deeper block of a prompt counting as used earlier; no pool involved."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        found = next((i for i, block in enumerate(request) if block not in cached), len(request))
        hits += found
        for block in request:
            cached.pop(block, None)
        while len(cached) + len(request) > capacity:
            cached.popitem(last=False)
        for block in reversed(request):
            cached[block] = None
    return hits


def best_possible_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """By trying every set of blocks that a cache could keep between requests."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        wanted = frozenset(request)
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = next((i for i, block in enumerate(request) if block not in kept), len(request))
            others = kept - wanted
            for size in range(min(len(others), capacity - len(wanted)) + 1):
                for chosen in combinations(sorted(others), size):
                    state = wanted | frozenset(chosen)
                    after[state] = max(after.get(state, 0), hits + found)
        states = after
    return max(states.values())


@pytest.mark.parametrize("capacity", [130, 400, 1500])
@pytest.mark.parametrize("workload", ["conversations", "scans", "phases"])
def test_lru_over_the_pool_is_lru(workload: str, capacity: int) -> None:
    requests = make_workload(workload, 800, seed=3)
    result = replay([block_keys(request) for request in requests], "lru", capacity)
    assert result.hits == naive_lru_hits(requests, capacity) > 0
    assert result.blocks == sum(map(len, requests))


@settings(max_examples=40, deadline=None, database=None)
@given(seed=st.integers(0, 10**6), capacity=st.integers(4, 6))
def test_the_clairvoyant_bound_is_the_best_that_can_be_had(seed: int, capacity: int) -> None:
    random = Random(seed)
    tree = [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [5], [5, 6], [5, 6, 7], [8, 9, 10, 11]]
    requests = [random.choice(tree) for _ in range(9)]
    result = replay([block_keys(request) for request in requests], CLAIRVOYANT, capacity)
    assert result.hits == best_possible_hits(requests, capacity)


@pytest.mark.parametrize("workload", sorted(PREFIX_WORKLOADS))
def test_no_policy_beats_the_clairvoyant_bound_or_an_endless_cache(workload: str) -> None:
    endless = rate(workload, CLAIRVOYANT, 10**6)
    for capacity in (300, 1200):
        bound = rate(workload, CLAIRVOYANT, capacity)
        assert bound <= endless
        for policy in EVICTION_POLICIES:
            assert rate(workload, policy, capacity) <= bound


@pytest.mark.parametrize("workload", sorted(PREFIX_WORKLOADS))
@pytest.mark.parametrize("capacity", [300, 1200])
def test_the_default_is_never_much_under_lru(workload: str, capacity: int) -> None:
    if workload == "uniform":
        pytest.skip("all blocks are alike: what is found is the share that fits, and luck")
    assert rate(workload, "reuse-rate", capacity) >= 0.98 * rate(workload, "lru", capacity)


@pytest.mark.parametrize("capacity", [300, 1200])
def test_among_equally_popular_documents_the_default_finds_the_share_that_fits(capacity: int) -> None:
    requests = make_workload("uniform", REQUESTS)
    distinct = len({block for request in requests for block in request})
    assert rate("uniform", "reuse-rate", capacity) == pytest.approx(capacity / distinct, rel=0.15)


@pytest.mark.parametrize(("workload", "capacity", "gain"), [
    ("conversations", 1200, 1.15),
    ("system_prompts", 300, 1.3),
    ("system_prompts", 1200, 1.15),
    ("drifting_prompts", 300, 1.08),
    ("scans", 1200, 1.15),
    ("twice", 1200, 2.0),
    ("tool_mix", 300, 1.03),
])
def test_the_default_beats_lru_where_lru_can_be_beaten(workload: str, capacity: int, gain: float) -> None:
    assert rate(workload, "reuse-rate", capacity) >= gain * rate(workload, "lru", capacity)


@pytest.mark.parametrize(("workload", "capacity"), [("regular", 500), ("regular", 1200), ("regular", 4000),
                                                    ("regular_documents", 400), ("regular_documents", 1200),
                                                    ("conversations", 250), ("scans", 500)])
def test_where_reuse_is_regular_the_default_finds_what_the_better_of_lru_and_lru_2_does(workload: str,
                                                                                        capacity: int) -> None:
    best = max(rate(workload, "lru", capacity), rate(workload, "lru-2", capacity))
    assert rate(workload, "reuse-rate", capacity) >= 0.97 * best


def test_the_default_holds_most_of_a_loop_that_lru_loses_whole() -> None:
    assert rate("loop", "lru", 1200) == 0.0
    assert rate("loop", "reuse-rate", 1200) > 0.85 * rate("loop", CLAIRVOYANT, 1200)


@pytest.mark.parametrize("policy", [*EVICTION_POLICIES, CLAIRVOYANT])
def test_a_prompt_longer_than_the_cache_leaves_its_beginning(policy: str) -> None:
    long, short = block_keys(range(10)), block_keys(range(2))
    assert replay([long, short, long], policy, 4).hits in (4, 6)
    assert replay([long, long], policy, 4).hits == 4


def test_workloads_are_the_same_for_the_same_seed_only() -> None:
    for name in PREFIX_WORKLOADS:
        assert make_workload(name, 50, seed=1) == make_workload(name, 50, seed=1)
        if name != "loop":
            assert make_workload(name, 50, seed=1) != make_workload(name, 50, seed=2)


@pytest.mark.parametrize("workload", sorted(PREFIX_WORKLOADS))
def test_workloads_are_chains(workload: str) -> None:
    before: dict[int, int | None] = {}
    for request in make_workload(workload, 500):
        assert len(set(request)) == len(request)
        for previous, block in zip([None, *request], request, strict=False):
            assert before.setdefault(block, previous) == previous


# ---- reading traces


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_trace_is_read_up_to_the_limit(tmp_path: Path) -> None:
    lines = [json.dumps({"timestamp": i, "input_length": 600, "hash_ids": [0, i + 1]}) for i in range(5)]
    path = write(tmp_path / "trace.jsonl", *lines)
    assert read_trace(path, 3) == [block_keys([0, i + 1]) for i in range(3)]
    assert len(read_trace(path)) == 5


@pytest.mark.parametrize(("line", "complaint"), [
    ('{"hash_ids": [1, 2', "not JSON"),
    ('{"timestamp": 3}', "hash_ids"),
    ("[1, 2]", "hash_ids"),
    ('{"hash_ids": "12"}', "hash_ids"),
    ('{"hash_ids": [1, "2"]}', "not a block number"),
    ('{"hash_ids": [1, 2.5]}', "not a block number"),
    ('{"hash_ids": [true]}', "not a block number"),
    ("[" * 100_000, "not JSON"),
    ("\x00\x01", "not JSON"),
])
def test_a_malformed_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "trace.jsonl", '{"hash_ids": [1]}', "", line)
    with pytest.raises(InvalidRequestError, match=complaint) as raised:
        read_trace(path)
    assert "line 3" in str(raised.value) and len(str(raised.value)) < 400


def test_a_missing_or_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequestError, match="no requests"):
        read_trace(write(tmp_path / "empty.jsonl", ""))


def test_numbers_that_are_no_hash_chain_are_read_as_prefixes(tmp_path: Path) -> None:
    """Of contents alone: 2 after 1 is another block than 2 at the start, and one prompt may repeat itself."""
    lists = [[1, 2, 2], [2, 1], [1, 2, 3], [-7, 10**40], [1, 2, 2]]
    path = write(tmp_path / "trace.jsonl", *(json.dumps({"hash_ids": ids}) for ids in lists))
    prompts = read_trace(path)
    keys = {key for prompt in prompts for key in prompt}
    assert len(keys) == len({tuple(ids[: i + 1]) for ids in lists for i in range(len(ids))})
    for policy in (*EVICTION_POLICIES, CLAIRVOYANT):
        assert replay(prompts, policy, 100).hits == 2 + 3
        assert replay(prompts, policy, 3).hits <= 5
