"""The yardsticks: exactly what LRU and LRU-2 would find, and when a policy is stopped and tried again."""

from __future__ import annotations

from random import Random

import pytest

from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import LRU, LRU2, EvictionPolicy
from quire.kvcache.lru_shadow import LRU2Shadow, LRUShadow


@pytest.mark.parametrize(("policy", "kind"), [(LRU, LRUShadow), (LRU2, LRU2Shadow)])
def test_the_shadow_holds_what_a_pool_holds(policy: type[EvictionPolicy],
                                            kind: type[LRUShadow] | type[LRU2Shadow]) -> None:
    random = Random(4)
    pool, shadow = BlockPool(50, policy(50)), kind(50)
    for _ in range(400):
        path = [min(random.randrange(6), random.randrange(6)) for _ in range(random.randint(1, 9))]
        keys = [bytes(path[:depth]) for depth in range(1, len(path) + 1)]
        held: list[int] = []
        for key in keys:
            block = pool.lookup(key)
            assert (key in shadow._keys) == (block != NO_BLOCK)
            shadow.wanted(key, found=block != NO_BLOCK)
            if block == NO_BLOCK:
                block = pool.allocate()
                pool.register(block, key, held[-1] if held else NO_BLOCK)
            else:
                pool.acquire(block)
            held.append(block)
        for key, block in zip(reversed(keys), reversed(held), strict=True):
            pool.release([block])
            shadow.released(key)
    assert pool.num_evicted > 100 and shadow.trusted


def test_a_policy_that_finds_less_than_lru_is_stopped_until_the_allowance_has_paid() -> None:
    shadow = LRUShadow(80)
    shadow.released(b"x")
    lost = 0
    while shadow.trusted:
        shadow.wanted(b"x", found=False)
        lost += 1
    assert lost == 6  # a sixteenth of 80 blocks, and one
    waits = []
    for _ in range(3):
        waits.append(0)
        while not shadow.trusted:
            shadow.wanted(b"x", found=True)
            waits[-1] += 1
        while shadow.trusted:
            shadow.wanted(b"x", found=False)
            lost += 1
    assert lost / (lost + sum(waits)) < 0.01
    assert waits[0] < waits[1] < waits[2], "who fails again waits longer"


def test_being_ahead_is_remembered_but_not_for_ever() -> None:
    shadow = LRUShadow(80)
    for _ in range(100_000):
        shadow.wanted(b"only the real cache has it", found=True)
    shadow.released(b"x")
    lost = 0
    while shadow.trusted:
        shadow.wanted(b"x", found=False)
        lost += 1
    assert 80 <= lost <= 83
