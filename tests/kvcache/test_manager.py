"""Small claims about the cache manager: matching, growth, copy on write, limbo, windows."""

from __future__ import annotations

import pytest

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.kvcache.prefix import cache_key
from quire.kvcache.table import SequenceKV

SIZE = 4


def make(num_blocks: int = 16, *windows: int | None, caching: bool = True) -> KVCacheManager:
    groups = tuple(GroupWindow(w) for w in windows or (None,))
    return KVCacheManager(num_blocks, SIZE, groups, caching, secret=b"s" * 32)


def compute(cache: KVCacheManager, tokens: list[int], key: bytes = b"") -> tuple[SequenceKV, int]:
    """A sequence whose KV is all there and published; and how much of it was found cached."""
    kv = SequenceKV(key)
    match = cache.match(kv, tokens)
    cache.open(kv, match)
    assert cache.extend(kv, len(tokens), match.num_tokens)
    cache.publish(kv, tokens, len(tokens))
    return kv, match.num_tokens


def hit(cache: KVCacheManager, tokens: list[int], key: bytes = b"") -> int:
    return cache.match(SequenceKV(key), tokens).num_tokens


def test_a_match_is_the_longest_run_of_full_equal_blocks() -> None:
    cache = make()
    compute(cache, list(range(10)))
    assert hit(cache, [*range(8), 99]) == 8
    assert hit(cache, [*range(7), 99, 8, 9]) == 4
    assert hit(cache, [99, *range(1, 10)]) == 0


def test_the_whole_prompt_is_never_matched() -> None:
    cache = make()
    compute(cache, list(range(8)))
    assert hit(cache, list(range(8))) == 4
    assert hit(cache, list(range(9))) == 8


def test_the_whole_prompt_is_never_matched_even_when_its_hashes_are_known_already() -> None:
    cache = make()
    kv, _ = compute(cache, list(range(8)))
    cache.free(kv)
    assert len(kv.hashes) == 2
    assert cache.match(kv, list(range(8))).num_tokens == 4


def test_salt_and_extra_keys_keep_caches_apart() -> None:
    cache = make()
    tokens = list(range(9))
    alice, bob = cache_key(["salt:alice"]), cache_key(["salt:bob"])
    compute(cache, tokens, alice)
    assert hit(cache, tokens, alice) == 8
    assert hit(cache, tokens, bob) == hit(cache, tokens) == 0


def test_with_prefix_caching_off_nothing_is_found() -> None:
    cache = make(caching=False)
    kv, _ = compute(cache, list(range(9)))
    assert hit(cache, list(range(9))) == 0
    cache.free(kv)
    assert cache.pools[0].num_cached == 0


def test_a_second_writer_of_a_prefix_changes_over_to_the_first_ones_blocks() -> None:
    cache = make()
    one, two = SequenceKV(), SequenceKV()
    for kv in (one, two):
        cache.open(kv, cache.no_match())
        assert cache.extend(kv, 8, 0)
    cache.publish(one, list(range(8)), 8)
    for table in two.tables:
        table.take_dirty()
    cache.publish(two, list(range(8)), 8)
    assert two.tables[0].blocks == one.tables[0].blocks
    assert two.tables[0].take_dirty() == (0, one.tables[0].blocks), "the worker must hear of it"
    assert cache.stats.blocks_deduplicated == 2 and cache.pools[0].num_used == 2
    cache.check([one, two])


def test_decoding_into_an_own_last_block_takes_nothing() -> None:
    cache = make()
    kv, _ = compute(cache, list(range(5)))
    before = list(kv.tables[0].blocks)
    assert cache.extend(kv, 6, 5) and cache.take_copies() == []
    assert kv.tables[0].blocks == before


def test_a_refused_extension_changes_nothing() -> None:
    cache = make(3)
    kv, _ = compute(cache, list(range(6)))
    assert not cache.extend(kv, 13, 6)
    assert len(kv.tables[0].blocks) == 2
    assert cache.extend(kv, 12, 6)


def test_who_writes_a_shared_block_first_gets_a_copy() -> None:
    cache = make()
    parent, _ = compute(cache, list(range(6)))
    child = cache.fork(parent)
    shared = parent.tables[0].blocks[1]
    assert cache.extend(child, 7, 6)
    target = child.tables[0].blocks[1]
    assert cache.take_copies() == [(0, shared, target)] and target != shared
    assert child.tables[0].blocks[0] == parent.tables[0].blocks[0], "full blocks stay shared"
    cache.check([parent, child])


def test_the_last_holder_of_a_shared_block_writes_it_without_a_copy() -> None:
    cache = make()
    parent, _ = compute(cache, list(range(6)))
    children = [cache.fork(parent) for _ in range(3)]
    shared = parent.tables[0].blocks[1]
    for kv in [*children, parent]:
        assert cache.extend(kv, 7, 6)
    assert len(cache.take_copies()) == 3 == cache.stats.copies_on_write
    assert parent.tables[0].blocks[1] == shared
    cache.check([parent, *children])


def test_copies_stand_in_the_order_in_which_they_became_necessary() -> None:
    cache = make(4)
    parent, _ = compute(cache, list(range(6)))
    child = cache.fork(parent)
    cache.extend(child, 7, 6)
    cache.free(parent)
    other, _ = compute(cache, list(range(50, 54)))
    assert other.tables[0].blocks[0] not in child.tables[0].blocks
    assert len(cache.take_copies()) == 1 and cache.take_copies() == []


def test_blocks_given_back_wait_until_every_plan_that_may_name_them_is_done() -> None:
    cache = make(4)
    kv, _ = compute(cache, list(range(6)))
    cache.steps_submitted(1)
    cache.steps_submitted(2)
    cache.free(kv)
    cache.steps_done(1)
    assert cache.room_is_coming and cache.pools[0].num_available == 2
    cache.steps_done(2)
    assert not cache.room_is_coming and cache.pools[0].num_available == 4


def test_a_prefix_in_limbo_can_still_be_matched() -> None:
    cache = make()
    kv, _ = compute(cache, list(range(9)))
    cache.steps_submitted(1)
    cache.free(kv)
    again, found = compute(cache, list(range(9)))
    cache.steps_done(1)
    assert found == 8
    cache.check([again])


def test_eviction_shortens_a_prefix_from_its_end() -> None:
    cache = make(4)
    kv, _ = compute(cache, list(range(13)))
    cache.free(kv)
    lengths = []
    other = SequenceKV()
    cache.open(other, cache.no_match())
    for blocks in range(1, 5):
        cache.extend(other, blocks * SIZE, (blocks - 1) * SIZE)
        lengths.append(hit(cache, list(range(13))))
    assert lengths == [12, 8, 4, 0]


def test_blocks_behind_the_window_are_given_back_once_published() -> None:
    cache = make(8, 5)
    kv, _ = compute(cache, list(range(14)))
    cache.leave_window(kv, 14)
    table = kv.tables[0]
    assert table.first_live == 2 and table.blocks[:2] == [NO_BLOCK, NO_BLOCK]
    assert cache.pools[0].num_used == 2 and cache.pools[0].num_cached == 2
    cache.check([kv])


def test_a_window_match_needs_only_the_blocks_that_the_window_sees() -> None:
    cache = make(8, 5)
    tokens = list(range(14))
    kv, _ = compute(cache, tokens)
    cache.leave_window(kv, 14)
    cache.drop_cached()  # the two blocks behind the window are gone
    match = cache.match(SequenceKV(), tokens)
    assert match.num_tokens == 12
    assert match.blocks == [[NO_BLOCK, NO_BLOCK, kv.tables[0].blocks[2]]]
    assert hit(cache, tokens[:12]) == 0, "a shorter prefix would see blocks that are gone"


def test_a_match_is_the_longest_one_valid_in_every_group() -> None:
    cache = make(8, None, 5)
    tokens = list(range(14))
    kv, _ = compute(cache, tokens)
    cache.leave_window(kv, 14)
    cache.pools[1].drop_cached()
    assert hit(cache, tokens) == 12
    assert hit(cache, tokens[:9]) == 0


def test_room_for_a_first_chunk_is_asked_for_even_behind_a_window() -> None:
    cache = make(4, 5)
    assert not cache.fits(40, cache.no_match(), first_chunk=17)
    assert cache.fits(40, cache.no_match(), first_chunk=16)


def test_a_block_in_a_table_that_counts_no_holder_is_noticed_when_written() -> None:
    cache = make()
    kv, _ = compute(cache, list(range(5)))
    cache.pools[0].counts[kv.tables[0].blocks[1]] = 0
    with pytest.raises(InvariantError, match="counts no holder"):
        cache.extend(kv, 6, 5)


def test_check_notices_a_holder_that_nobody_knows() -> None:
    cache = make()
    kv, _ = compute(cache, list(range(5)))
    cache.check([kv])
    with pytest.raises(InvariantError, match="holders and has 0"):
        cache.check([])


def test_reset_frees_every_block_and_keeps_the_count_of_evictions() -> None:
    cache = make(2)
    for start in range(3):
        cache.free(compute(cache, list(range(start, start + 5)))[0])
    evicted = cache.num_evicted
    cache.reset()
    assert cache.pools[0].num_cached == 0 and cache.pools[0].num_available == 2
    assert cache.num_evicted == evicted > 0


def test_blocks_that_refused_drafts_left_are_not_room_for_copies() -> None:
    """A table longer than is wanted made up for shared blocks in the count, and a copy then found no block."""
    cache = KVCacheManager(6, 4)
    kv = SequenceKV()
    assert cache.open(kv, cache.no_match()) is not None and cache.extend(kv, 16, 0)
    held = cache.fork(kv)
    assert cache.extend(kv, 9, 7), "two of the four are copied, and that is all there is room for"
    cache.check([kv, held])
    assert cache.extend(kv, 9, 7) and not cache.extend(kv, 16, 9)
    cache.check([kv, held])
    other = cache.fork(kv)
    assert not cache.extend(other, 9, 7)
    cache.check([kv, held, other])
