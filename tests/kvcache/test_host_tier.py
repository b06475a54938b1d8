"""The host tier: what is stored is found only once it is there, and swapped groups come before prefixes."""

from __future__ import annotations

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.swap import Swapper
from quire.kvcache.table import SequenceKV

SIZE = 4


def make(num_blocks: int, host: int, cost: MoveCost | None = None) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, tier=HostTier(host), cost=cost, block_bytes=(10,))


def compute(cache: KVCacheManager, tokens: list[int], step: int, lost: bool = False,
            beside: tuple[SequenceKV, ...] = ()) -> SequenceKV:
    kv = SequenceKV()
    match = cache.match(kv, tokens)
    cache.open(kv, match)
    assert cache.extend(kv, len(tokens), match.num_tokens)
    cache.take_copies()
    cache.steps_submitted(step)
    cache.steps_done(step, lost)
    if not lost:
        cache.publish(kv, tokens, len(tokens))
    cache.check([kv, *beside])
    return kv


def fill_and_evict(cache: KVCacheManager, lost: bool = False) -> None:
    cache.free(compute(cache, list(range(9)), 1))
    cache.free(compute(cache, list(range(50, 66)), 2, lost))


def test_an_evicted_prefix_is_found_again_and_fetched() -> None:
    cache = make(4, 8)
    fill_and_evict(cache)
    assert cache.stats.blocks_offloaded == 2 and cache.stats.bytes_offloaded == 20
    kv = SequenceKV()
    match = cache.match(kv, list(range(9)))
    assert (match.num_tokens, match.num_outside, match.outside_tokens) == (8, 2, 8)
    cache.open(kv, match)
    copies = [copy for copy in cache.take_copies() if copy[3:] == ("host", "device")]
    assert len(copies) == 2 == cache.stats.tier_hits and cache.stats.tier_hit_tokens == 8
    cache.steps_submitted(3)
    cache.steps_done(3)
    cache.publish(kv, list(range(9)), 8)
    cache.check([kv])
    assert cache.tier is not None and cache.tier.num_used == 0


def test_what_a_lost_step_was_to_store_is_not_there() -> None:
    cache = make(4, 8)
    fill_and_evict(cache, lost=True)
    assert cache.match(SequenceKV(), list(range(9))).num_outside == 0
    assert cache.tier is not None and (cache.tier.num_used, cache.tier.num_cached) == (0, 0)


def test_a_prefix_is_fetched_only_where_that_is_cheaper_than_computing() -> None:
    for cost, fetched in ((MoveCost(1.0, 1e6), True), (MoveCost(1e6, 1.0), False)):
        cache = make(4, 8, cost)
        fill_and_evict(cache)
        assert (cache.match(SequenceKV(), list(range(9))).num_outside > 0) == fetched


def test_a_block_is_not_found_before_its_copy_is_done() -> None:
    tier = HostTier(2)
    block = tier.evicted(0, b"k")
    assert block != NO_BLOCK and tier.match(0, b"k") == NO_BLOCK
    assert tier.evicted(0, b"k") == NO_BLOCK, "it is on its way"
    tier.submitted(1)
    assert tier.match(0, b"k") == NO_BLOCK
    tier.settled(1, done=True)
    assert tier.match(0, b"k") == block and tier.evicted(0, b"k") == NO_BLOCK


def test_old_prefixes_make_way_and_held_blocks_do_not() -> None:
    tier = HostTier(2)
    for step, key in enumerate((b"a", b"b"), start=1):
        tier.evicted(0, key)
        tier.submitted(step)
        tier.settled(step, done=True)
    tier.hold(0, tier.match(0, b"b"))
    assert tier.room(0) == 1
    tier.allocate(0)
    assert tier.match(0, b"a") == NO_BLOCK != tier.match(0, b"b")
    assert tier.evicted(0, b"c") == NO_BLOCK, "there is no room"


def test_what_a_stopped_sibling_left_outside_comes_back_in_the_order_in_which_it_may_be_evicted() -> None:
    cache = make(8, 8)
    tier = cache.tier
    assert tier is not None
    tokens = list(range(17))
    stopped = compute(cache, tokens, 1)
    other = compute(cache, [*tokens[:4], *range(50, 60)], 2, beside=(stopped,))
    swapper = Swapper(cache, tier)
    swapped = swapper.out([(stopped, 16), (other, 12)])
    assert swapped is not None
    cache.steps_submitted(3)
    cache.steps_done(3)
    swapper.back(swapped, [other])
    cache.check([other])
    while cache.pools[0].num_available:  # evicts what the stopped one left, children before parents
        cache.pools[0].allocate()
