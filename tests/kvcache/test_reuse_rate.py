"""The default policy: what it prefers, and that its memory is bounded."""

from __future__ import annotations

import pytest

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import LRU, EvictionPolicy, ReuseRate


def use(pool: BlockPool, keys: list[bytes]) -> int:
    """One request over the chain `keys`; returns how many of its blocks were cached."""
    held: list[int] = []
    for key in keys:
        block = pool.lookup(key)
        if block == NO_BLOCK:
            break
        pool.acquire(block)
        held.append(block)
    hits = len(held)
    for key in keys[hits:]:
        block = pool.allocate()
        pool.register(block, key, held[-1] if held else NO_BLOCK)
        held.append(block)
    pool.release(reversed(held))
    return hits


def test_with_nothing_learned_the_least_recently_used_chain_goes_first() -> None:
    pool = BlockPool(90, ReuseRate(90))
    for i in range(9):
        use(pool, [b"%d-%d" % (i, depth) for depth in range(10)])
    use(pool, [b"0-%d" % depth for depth in range(10)])
    use(pool, [b"new-%d" % depth for depth in range(10)])
    cached = [i for i in range(9) if pool.lookup(b"%d-0" % i) != NO_BLOCK]
    assert cached == [0, 2, 3, 4, 5, 6, 7, 8]


def test_what_keeps_coming_back_outlives_a_flood_of_what_never_does() -> None:
    pool = BlockPool(400, ReuseRate(400))
    favourites = [[b"f%d-%d" % (i, depth) for depth in range(5)] for i in range(20)]
    flood = hits = 0
    for turn in range(60):
        found = sum(use(pool, chain) for chain in favourites)
        hits += found if turn >= 30 else 0
        for _ in range(50):  # 500 blocks: more than the pool
            flood += 1
            use(pool, [b"x%d-%d" % (flood, depth) for depth in range(10)])
    assert hits > 0.9 * 30 * 100  # LRU finds none


def test_what_is_used_exactly_twice_is_let_go_after_the_second_time() -> None:
    pool = BlockPool(300, ReuseRate(300))
    hits = 0
    for turn in range(400):
        use(pool, [b"%d-%d" % (turn, depth) for depth in range(10)])
        if turn >= 20:
            found = use(pool, [b"%d-%d" % (turn - 20, depth) for depth in range(10)])
            hits += found if turn >= 200 else 0
    # Twenty chains wait for their second use, and as many dead ones would fill the pool under LRU.
    assert hits > 0.95 * 200 * 10


def test_hits_while_in_use_count_as_uses() -> None:
    policy = ReuseRate(4)
    policy.register(0, b"hot", -1)
    for _ in range(10):
        policy.touch(0)
    policy.add(0)
    policy.register(1, b"cold", -1)
    policy.add(1)
    assert policy._kind[0] > policy._kind[1]


def test_uses_are_remembered_beyond_eviction() -> None:
    pool = BlockPool(4, ReuseRate(4))
    use(pool, [b"a", b"b"])
    for i in range(2):
        use(pool, [b"x%d" % i, b"y%d" % i])
    assert pool.lookup(b"a") == NO_BLOCK
    use(pool, [b"a", b"b"])
    policy = pool._policy
    assert isinstance(policy, ReuseRate) and policy._uses[pool.lookup(b"a")] == 2


def test_memory_stays_bounded_whatever_happens() -> None:
    size = 256
    policy = ReuseRate(size)
    pool = BlockPool(size, policy)
    for turn in range(4000):
        use(pool, [b"%d-%d" % (turn if turn % 3 else turn % 7, depth) for depth in range(turn % 12 + 1)])
    statistics = policy._statistics
    assert len(policy._remembered) + len(policy._remembered_before) <= 4 * size
    assert len(statistics._by_key) <= sum(map(len, statistics._by_age)) <= 16 * size
    assert sum(map(len, policy._heaps)) <= 4 * size


def test_heaps_stay_bounded_when_nothing_is_ever_evicted() -> None:
    pool = BlockPool(64, ReuseRate(64))
    policy = pool._policy
    assert isinstance(policy, ReuseRate)
    for turn in range(30_000):
        use(pool, [b"%d" % (turn % 2)])
    assert pool.num_evicted == 0 and sum(map(len, policy._heaps)) < 1000


def test_asking_an_empty_policy_for_a_victim_is_an_invariant_error() -> None:
    with pytest.raises(InvariantError, match="no KV block can be evicted"):
        ReuseRate(4).pop()


def test_a_workload_that_turns_against_what_was_learned_costs_little_against_lru() -> None:
    # First only what was used often comes back; then only what was new a moment ago does, twice over.
    def requests() -> list[list[bytes]]:
        favourites = [[b"f%d-%d" % (i, depth) for depth in range(5)] for i in range(40)]
        first = [favourites[turn % 40] if turn % 2 else [b"x%d-%d" % (turn, d) for d in range(20)]
                 for turn in range(1500)]
        then = [[b"y%d-%d" % (turn - turn % 2 * 17, d) for d in range(10)] for turn in range(3000)]
        return first + then

    def hits(policy: EvictionPolicy) -> list[int]:
        pool = BlockPool(300, policy)
        found = [use(pool, keys) for keys in requests()]
        return [sum(found[:1500]), sum(found[1500:])]

    learned, lru = hits(ReuseRate(300)), hits(LRU(300))
    assert learned[0] > 1.5 * lru[0]
    assert learned[1] > 0.95 * lru[1] > 1000
