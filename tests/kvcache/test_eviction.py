"""What every eviction policy owes the pool, checked on random lives of trees of prefixes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import EVICTION_POLICIES, LRU, EvictionPolicy

policies = pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))


class Recorder(EvictionPolicy):
    """Passes everything on and keeps the victims."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.victims: list[int] = []

    def register(self, block: int, key: bytes, parent: int) -> None:
        self.policy.register(block, key, parent)

    def add(self, block: int) -> None:
        self.policy.add(block)

    def remove(self, block: int) -> None:
        self.policy.remove(block)

    def touch(self, block: int) -> None:
        self.policy.touch(block)

    def pop(self) -> int:
        self.victims.append(self.policy.pop())
        return self.victims[-1]

    def __len__(self) -> int:
        return len(self.policy)


def hold(pool: BlockPool, path: list[int]) -> list[int]:
    """Take the cached part of a prefix, compute and publish the rest as far as there is room."""
    held: list[int] = []
    for depth in range(1, len(path) + 1):
        key = bytes(path[:depth])
        block = pool.lookup(key)
        if block == NO_BLOCK:
            if not pool.num_available:
                break
            block = pool.allocate()
            pool.register(block, key, held[-1] if held else NO_BLOCK)
        else:
            pool.acquire(block)
        held.append(block)
    return held


def live(pool: BlockPool, random: Random, steps: int, check_every: int = 1) -> None:
    """Sequences over a tree of prefixes come, overlap, fork and go; the pool checks itself."""
    running: list[list[int]] = []
    for step in range(steps):
        action = random.random()
        if running and (action < 0.45 or not pool.num_available):
            pool.release(reversed(running.pop(random.randrange(len(running)))))
        elif running and action < 0.5:
            twin = random.choice(running)
            for block in twin:
                pool.share(block)
            running.append(list(twin))
        elif action < 0.995:
            length = random.randint(1, 8)
            running.append(hold(pool, [min(random.randrange(4), random.randrange(4)) for _ in range(length)]))
        else:
            pool.drop_cached()
        if step % check_every == 0:
            pool.check()
    for held in running:
        pool.release(reversed(held))
    pool.check()


@policies
@settings(max_examples=60, deadline=None, database=None)
@given(num_blocks=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_a_parent_is_never_evicted_before_its_cached_child(name: str, num_blocks: int, seed: int) -> None:
    # The pool raises when a victim still has registered children, and `check` when one is stranded.
    live(BlockPool(num_blocks, EVICTION_POLICIES[name](num_blocks)), Random(seed), 120)


@policies
def test_the_same_calls_evict_the_same_blocks(name: str) -> None:
    victims = []
    for _ in range(2):
        recorder = Recorder(EVICTION_POLICIES[name](64))
        live(BlockPool(64, recorder), Random(5), 3000, check_every=500)
        victims.append(recorder.victims)
    assert victims[0] == victims[1] and len(victims[0]) > 1000


@policies
def test_every_idle_block_can_be_evicted_and_children_go_first(name: str) -> None:
    pool = BlockPool(200, EVICTION_POLICIES[name](200))
    live(pool, Random(1), 400)
    assert pool.drop_cached() > 100
    assert pool.num_available == 200 and pool.num_cached == 0
    pool.check()


@policies
def test_a_pool_without_chains_may_evict_in_any_order(name: str) -> None:
    pool = BlockPool(30, EVICTION_POLICIES[name](30), chained=False)
    live(pool, Random(3), 2000, check_every=50)


def test_lru_evicts_in_the_order_of_last_use() -> None:
    policy = LRU(4)
    for block in (2, 0, 3, 1):
        policy.add(block)
    policy.remove(0)
    policy.add(0)
    assert [policy.pop() for _ in range(len(policy))] == [2, 3, 1, 0]
