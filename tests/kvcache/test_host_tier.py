"""The host tier: what is stored is found only once it is there, and swapped groups come before prefixes."""

from __future__ import annotations

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.swap import Swapper
from quire.kvcache.table import PrefixMatch, SequenceKV

SIZE = 4


def make(num_blocks: int, host: int, cost: MoveCost | None = None) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, tiers=[HostTier(host)], cost=cost, block_bytes=(10,))


def check(cache: KVCacheManager, *holders: SequenceKV) -> None:
    cache.check(list(holders))
    for tier in cache.tiers:
        tier.check([cache.transfers.held_in_tier(tier, 0)])


def carry_out(cache: KVCacheManager, failed: bool = False) -> None:
    """Make all transfers of the draft, or none of them; then the next draft begins."""
    cache.begin_draft(0)
    for transfer in cache.transfers.take_drafted(0.0, 99.0):
        cache.transfers.report(transfer.number, 0 if failed else len(transfer.moves), True, "gone" if failed else None)


def look_up(cache: KVCacheManager, kv: SequenceKV, tokens: list[int]) -> PrefixMatch:
    return cache.match(kv, tokens, cache.ask(kv, tokens))


def compute(cache: KVCacheManager, tokens: list[int], failed: bool = False,
            beside: tuple[SequenceKV, ...] = ()) -> SequenceKV:
    """Compute and publish; what has to leave first is carried out at once."""
    kv = SequenceKV()
    match = look_up(cache, kv, tokens)
    while cache.open(kv, match, len(tokens) - match.num_tokens) is None:
        carry_out(cache, failed)
    carry_out(cache, failed)
    while not cache.extend(kv, len(tokens), match.num_tokens):
        carry_out(cache, failed)
    cache.publish(kv, tokens, len(tokens))
    check(cache, kv, *beside)
    return kv


def fill_and_evict(cache: KVCacheManager, failed: bool = False) -> None:
    cache.free(compute(cache, list(range(9))))
    cache.free(compute(cache, list(range(50, 66)), failed))


def test_an_evicted_prefix_is_found_again_and_fetched() -> None:
    cache = make(4, 8)
    fill_and_evict(cache)
    assert cache.events.stats.blocks == 2 and cache.events.stats.bytes == 20
    kv = SequenceKV()
    match = look_up(cache, kv, list(range(9)))
    assert (match.num_tokens, match.num_outside, match.outside_tokens) == (8, 2, 8)
    while (fetch := cache.open(kv, match)) is None:
        carry_out(cache)
    assert not fetch.over and len(fetch.pending) == 2 and fetch.missing_from(kv) == 0
    assert cache.stats.tier_hits == 2 and cache.stats.tier_hit_tokens == 8 and kv.num_registered == 0
    check(cache, kv)
    carry_out(cache)
    assert fetch.over and fetch.error is None and fetch.missing_from(kv) == 2
    cache.publish(kv, list(range(9)), 8)
    check(cache, kv)
    assert cache.tiers[0].num_used == 0


def test_a_block_that_leaves_is_nobodys_until_its_copy_is_made() -> None:
    cache = make(4, 8)
    cache.free(compute(cache, list(range(16))))
    assert cache.pools[0].num_cached == 4
    kv = SequenceKV()
    match = cache.match(kv, list(range(50, 58)))
    assert cache.fits(8, match, 8) and cache.open(kv, match, 8) is None, "its blocks are on their way out"
    assert cache.room_is_coming and cache.pools[0].num_leaving == 2 and cache.pools[0].num_used == 2
    check(cache)
    carry_out(cache)
    assert cache.open(kv, match, 8) is not None and not cache.room_is_coming
    check(cache, kv)


def test_what_a_failed_transfer_was_to_store_is_not_there() -> None:
    cache = make(4, 8)
    fill_and_evict(cache, failed=True)
    kv = SequenceKV()
    assert look_up(cache, kv, list(range(9))).num_outside == 0
    assert (cache.tiers[0].num_used, cache.tiers[0].num_cached) == (0, 0)


def test_a_copy_out_that_is_late_gives_its_blocks_back_and_is_not_trusted() -> None:
    cache = make(4, 8)
    cache.free(compute(cache, list(range(16))))
    kv = SequenceKV()
    match = cache.match(kv, list(range(50, 58)))
    assert cache.open(kv, match, 8) is None
    (transfer,) = cache.transfers.take_drafted(0.0, 5.0)
    cache.expire(4.9)
    cache.begin_draft(0)
    assert cache.open(kv, match, 8) is None
    cache.expire(5.0)
    assert cache.transfers.take_cancels() == [transfer.number] and cache.transfers.stats.timed_out == 1
    cache.begin_draft(0)
    assert cache.open(kv, match, 8) is not None
    check(cache, kv)
    cache.transfers.report(transfer.number, 2, True)
    assert (cache.tiers[0].num_used, cache.tiers[0].num_cached) == (0, 0), "a copy of who knows what was kept"
    check(cache, kv)


def test_a_prefix_is_fetched_only_where_that_is_cheaper_than_computing() -> None:
    for cost, fetched in ((MoveCost(1.0, 1e6), True), (MoveCost(1e6, 1.0), False)):
        cache = make(4, 8, cost)
        fill_and_evict(cache)
        assert (look_up(cache, SequenceKV(), list(range(9))).num_outside > 0) == fetched


def found(tier: HostTier, key: bytes) -> int:
    return tier.lookup([key], 1).block(0, 0)


def test_a_block_is_not_found_before_its_copy_is_done() -> None:
    tier = HostTier(2)
    block = tier.evicted(0, b"k")
    assert block != NO_BLOCK and found(tier, b"k") == NO_BLOCK
    assert tier.evicted(0, b"k") == NO_BLOCK, "it is on its way"
    tier.settled(0, block, b"k", stored=True)
    assert found(tier, b"k") == block and tier.evicted(0, b"k") == NO_BLOCK


def test_old_prefixes_make_way_and_held_blocks_do_not() -> None:
    tier = HostTier(2)
    for key in (b"a", b"b"):
        tier.settled(0, tier.evicted(0, key), key, stored=True)
    assert tier.hold(0, found(tier, b"b"), b"b") and not tier.hold(0, found(tier, b"b"), b"a")
    assert tier.room(0) == 1
    tier.allocate(0)
    assert found(tier, b"a") == NO_BLOCK != found(tier, b"b")
    assert tier.evicted(0, b"c") == NO_BLOCK, "there is no room"


def test_what_a_stopped_sibling_left_outside_comes_back_in_the_order_in_which_it_may_be_evicted() -> None:
    cache = make(8, 8)
    tokens = list(range(17))
    stopped = compute(cache, tokens)
    other = compute(cache, [*tokens[:4], *range(50, 60)], beside=(stopped,))
    swapper = Swapper(cache, cache.tiers[0])
    swapped = swapper.out([(stopped, 16), (other, 12)])
    assert swapped is not None and not swapped.settled
    carry_out(cache)
    assert swapped.settled and not swapped.lost
    assert swapper.back(swapped, [other]) is not None
    carry_out(cache)
    check(cache, other)
    while cache.pools[0].num_available:  # evicts what the stopped one left, children before parents
        if not cache.pools[0].make_room(1):
            carry_out(cache)
        cache.pools[0].allocate()


def test_a_sequence_that_waits_asks_a_tier_again_only_when_the_device_has_changed() -> None:
    asked = []

    class Counted(HostTier):
        def lookup(self, keys, num_groups, prefix=None):  # type: ignore[no-untyped-def]
            asked.append(len(keys))
            return super().lookup(keys, num_groups, prefix)

    cache = KVCacheManager(8, 4, tiers=[Counted(16, 1, True)])
    waiting, tokens = SequenceKV(), list(range(24))
    first = cache.match(waiting, tokens, cache.ask(waiting, tokens))
    for _ in range(5):
        assert cache.match(waiting, tokens, cache.ask(waiting, tokens)) is first
    assert asked == [5]
    other = SequenceKV()
    assert cache.open(other, cache.match(other, tokens[:9])) is not None
    assert cache.extend(other, 9, 0)
    cache.publish(other, tokens, 8)
    found = cache.match(waiting, tokens, cache.ask(waiting, tokens))
    assert (found.num_tokens, asked) == (8, [5, 5])
