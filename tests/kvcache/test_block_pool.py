"""Small claims about the block pool that a random life would state less clearly."""

from __future__ import annotations

import pytest

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import LRU


def pool_with_chain(length: int, num_blocks: int) -> tuple[BlockPool, list[int]]:
    """A pool whose first holder registered a chain k0 → k1 → …"""
    pool = BlockPool(num_blocks, LRU())
    blocks: list[int] = []
    for i in range(length):
        blocks.append(pool.allocate())
        pool.register(blocks[i], b"k%d" % i, blocks[i - 1] if i else NO_BLOCK)
    return pool, blocks


def test_a_cached_prefix_held_by_nobody_stays_until_its_place_is_needed() -> None:
    pool, blocks = pool_with_chain(2, 4)
    pool.release(blocks[::-1])
    taken = [pool.allocate(), pool.allocate()]
    assert [pool.lookup(b"k0"), pool.lookup(b"k1")] == blocks and pool.num_evicted == 0
    taken.append(pool.allocate())
    assert pool.lookup(b"k1") == NO_BLOCK and pool.num_evicted == 1


def test_eviction_takes_the_deepest_block_first() -> None:
    pool, blocks = pool_with_chain(3, 3)
    pool.release(blocks[::-1])
    assert [pool.allocate() for _ in range(3)] == blocks[::-1]


def test_a_block_used_again_is_evicted_later() -> None:
    pool = BlockPool(2, LRU())
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"a", NO_BLOCK)
    pool.register(second, b"b", NO_BLOCK)
    pool.release([first])
    pool.release([second])
    pool.acquire(first)
    pool.release([first])
    assert [pool.allocate(), pool.allocate()] == [second, first]


def test_an_unregistered_block_is_free_as_soon_as_nobody_holds_it() -> None:
    pool = BlockPool(1, LRU())
    block = pool.allocate()
    pool.acquire(block)
    pool.release([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_available == 1 and pool.num_cached == 0


def test_allocating_from_an_exhausted_pool_is_an_invariant_error() -> None:
    pool = BlockPool(1, LRU())
    pool.allocate()
    with pytest.raises(InvariantError, match="none is left"):
        pool.allocate()


def test_many_blocks_at_once_are_those_of_one_after_another() -> None:
    pool, blocks = pool_with_chain(3, 8)
    other, _ = pool_with_chain(3, 8)
    for each in (pool, other):
        each.release(blocks[::-1])
    taken = [99]
    pool.allocate_into(taken, 7)  # five are free, two cached ones must go
    assert taken == [99, *(other.allocate() for _ in range(7))]
    assert pool.num_evicted == other.num_evicted == 2 and pool.counts == other.counts
    pool.allocate_into(taken, 0)
    pool.allocate_into(taken, -1)
    assert len(taken) == 8


def test_a_block_that_is_held_is_not_handed_out_among_many() -> None:
    pool = BlockPool(4, LRU())
    pool.counts[2] = 1
    taken: list[int] = []
    with pytest.raises(InvariantError, match="block 2 was handed out while 1 hold it"):
        pool.allocate_into(taken, 3)
    assert taken == [0, 1], "those before it are the caller's"


def test_releasing_too_often_is_reported_after_the_other_blocks_were_released() -> None:
    pool = BlockPool(3, LRU())
    a, b, c = (pool.allocate() for _ in range(3))
    pool.release([b])
    with pytest.raises(InvariantError, match=f"block {b} released more often"):
        pool.release([a, b, c])
    assert pool.num_available == 3
    pool.check()


def test_a_free_block_cannot_be_acquired() -> None:
    with pytest.raises(InvariantError, match="holds nothing"):
        BlockPool(1, LRU()).acquire(0)


def test_registering_twice_or_without_holder_or_behind_a_stranger_is_refused_and_changes_nothing() -> None:
    pool, (first,) = pool_with_chain(1, 3)
    second = pool.allocate()
    with pytest.raises(InvariantError, match="registered twice"):
        pool.register(second, b"k0", NO_BLOCK)
    with pytest.raises(InvariantError, match="registered twice"):
        pool.register(first, b"other", NO_BLOCK)
    with pytest.raises(InvariantError, match="reference count is 0"):
        pool.register(2, b"x", NO_BLOCK)
    with pytest.raises(InvariantError, match="unregistered parent"):
        pool.register(second, b"y", 2)
    assert pool.lookup(b"y") == NO_BLOCK and pool.hash_of(second) is None
    pool.check()


def test_evicting_a_parent_before_its_child_is_caught() -> None:
    pool, blocks = pool_with_chain(2, 2)
    pool.release(blocks)  # the wrong way round
    with pytest.raises(InvariantError, match="before its 1 children"):
        pool.allocate()


@pytest.mark.parametrize("corrupt", [
    lambda pool: pool.counts.__setitem__(0, 5),
    lambda pool: pool.counts.__setitem__(2, 1),
    lambda pool: pool._free.append(2),
    lambda pool: pool._index.pop(b"k0"),
    lambda pool: pool._children.__setitem__(0, 7),
    lambda pool: pool._policy.pop(),
    lambda pool: pool._hash.__setitem__(0, None),
])
def test_check_notices_a_corrupted_pool(corrupt: object) -> None:
    pool, blocks = pool_with_chain(2, 4)
    pool.release(blocks[::-1])
    pool.check()
    corrupt(pool)  # type: ignore[operator]
    with pytest.raises(InvariantError):
        pool.check()


def test_a_pool_of_windows_lets_a_parent_go_before_its_child() -> None:
    pool = BlockPool(2, LRU(), chained=False)
    parent, child = pool.allocate(), pool.allocate()
    pool.register(parent, b"p", NO_BLOCK)
    pool.register(child, b"c", parent)
    pool.release([parent, child])
    assert pool.allocate() == parent and pool.lookup(b"c") == child
    pool.check()
