"""The tier's decisions: what is offered, kept, held and fetched; breakers, rates, odds, and names that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, InvariantError
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.token_prefix import TokenPrefix
from quire.kvpool.benefit import KVShape, Network, benefit, break_even
from quire.kvpool.breaker import CircuitBreaker
from quire.kvpool.keys import UNIT_TOKENS, UnitKeys, unit_name
from quire.kvpool.memory import MemoryStore
from quire.kvpool.names import UnitNumbers
from quire.kvpool.publishing import BenefitPublisher, ReuseOdds
from quire.kvpool.rates import StoreRate
from quire.kvpool.staging import Staging
from quire.kvpool.tier import UnitTier

TOKENS = list(range(3 * UNIT_TOKENS + 40))
KEYS = UnitKeys(b"the secret of a test", b"model")


class SlowStore(MemoryStore):
    """Answers when it is told to."""

    instant = False

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.may_answer, self.error = threading.Event(), False
        self.num_asked = 0

    def find(self, names: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        self.may_answer.wait(60.0)
        if self.error:
            raise OSError("the store is gone")
        return super().find(names)


def make_tier(store: MemoryStore, clock: list[float] | None = None, groups: int = 1) -> UnitTier:
    now = [0.0] if clock is None else clock
    return UnitTier("pool", store, KEYS, 16, [64] * groups, Staging(1 << 20), BenefitPublisher(100, None), 0.005,
                    clock=lambda: now[0])


def prefix(tokens: list[int] = TOKENS) -> TokenPrefix:
    return TokenPrefix(b"", tokens, len(tokens))


def publish(tier: UnitTier, made: bool = True) -> int:
    """Offer all units of TOKENS; how many ranges were wanted. All copies are made, or none."""
    ranges = tier.grown(prefix(), 0)
    for wanted in ranges:
        for place in wanted.places:
            tier.settled(wanted.group, place, b"", made)
    return len(ranges)


def wait_until(condition: object) -> None:
    until = time.monotonic() + 60.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_unit_is_offered_once_written_and_found_by_its_blocks() -> None:
    store = MemoryStore(1 << 20)
    tier = make_tier(store, groups=2)
    block_keys = [bytes([i]) for i in range(50)]
    assert not tier.lookup(block_keys, 2, prefix()).found_any
    assert publish(tier) == 6
    wait_until(lambda: store.num_units == 6)
    assert publish(tier) == 0 and tier.num_used == 0
    found = tier.lookup(block_keys, 2, prefix())
    assert [found.block(1, i) != NO_BLOCK for i in range(50)] == [True] * 48 + [False] * 2
    places = [found.block(0, i) for i in range(48)]
    assert len(set(places)) == 48 and not set(places) & {found.block(1, i) for i in range(48)}
    assert tier.hold(0, places[3], b"key")
    tier.check([[places[3]], []])
    with pytest.raises(InvariantError):
        tier.check([[places[4]], []])
    store.discard(unit_name(KEYS.extend(prefix())[0], 0))
    assert not tier.hold(0, places[3], b"key")  # it has gone since it was found
    tier.give_back(0, places[3])
    tier.check([[], []])
    tier.close()


def test_a_unit_of_which_a_block_was_not_copied_is_not_written() -> None:
    store = MemoryStore(1 << 20)
    tier = make_tier(store)
    assert publish(tier, made=False) == 3 and tier.staging.num_bytes == 0
    ranges = tier.grown(prefix(), 1)
    assert [wanted.first for wanted in ranges] == [16, 32]
    for place in ranges[0].places:
        tier.settled(0, place, b"", place != ranges[0].places[5])
    for place in ranges[1].places:
        tier.settled(0, place, b"", True)
    wait_until(lambda: store.num_units == 1)
    tier.close()
    assert store.names() == [unit_name(KEYS.extend(prefix())[2], 0)]


def test_without_room_in_the_staging_memory_units_are_left_out() -> None:
    tier = make_tier(MemoryStore(1 << 20))
    tier.staging.capacity = 100
    assert len(tier.grown(prefix(), 0)) == 1 and tier.num_refused == 2
    tier.reset()
    assert tier.staging.num_bytes == 0 and tier.num_used == 0


def test_a_store_that_hangs_is_not_asked_again_until_a_pause_is_over() -> None:
    store, clock = SlowStore(), [0.0]
    tier = make_tier(store, clock)
    rung = threading.Event()
    tier.wake = rung.set
    first = tier.lookup([b"k"], 1, prefix())
    assert not first.settled
    wait_until(lambda: store.num_asked == 1)
    clock[0] = 1.0
    for _ in range(5):
        assert tier.lookup([b"k"], 1, prefix()).settled  # with nothing, and nobody waits
    assert tier.breaker.open and store.num_asked == 1 and tier.grown(prefix(), 0) == []
    store.may_answer.set()
    wait_until(lambda: first.settled and rung.is_set())
    asked = store.num_asked
    while tier.breaker.open:
        clock[0] += 100.0
        again = tier.lookup([b"k"], 1, prefix())
        wait_until(lambda again=again: again.settled)  # type: ignore[misc]
        assert clock[0] < 1e6
    assert store.num_asked > asked
    store.error = True
    for _ in range(3):
        broken = tier.lookup([b"k"], 1, prefix())
        wait_until(lambda broken=broken: broken.settled)  # type: ignore[misc]
    wait_until(lambda: tier.breaker.open)
    tier.close()


def test_a_breaker_opens_after_three_failures_and_lets_one_try() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(3):
        assert breaker.may_ask()
        breaker.failed()
    assert breaker.open and not breaker.may_ask() and breaker.num_opened == 1
    now[0] = 0.6
    assert breaker.may_ask() and not breaker.may_ask()
    breaker.failed()
    now[0] = 1.2
    assert not breaker.may_ask()  # the pause has doubled
    now[0] = 1.7
    assert breaker.may_ask()
    breaker.succeeded()
    assert breaker.may_ask() and breaker.may_ask() and not breaker.open


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200))
def test_numbers_of_units_that_are_held_are_never_forgotten(steps: list[tuple[int, bool]]) -> None:
    numbers = UnitNumbers(4, remembered=8)
    held: dict[bytes, int] = {}
    for number, keep in steps:
        name = bytes([number])
        place = numbers.places(name)[1]
        assert numbers.name(place) == name
        if name in held:
            assert held[name] == place
            if not keep:
                numbers.let_go(held.pop(name))
        elif keep and len(held) < 6:
            numbers.hold(place)
            held[name] = place
        assert all(numbers.name(place) == name for name, place in held.items())
        assert set(numbers.holders) == set(held.values())


def test_rates_follow_what_is_observed() -> None:
    rate = StoreRate(1e9, latency=0.0)
    rate.observe(1000, 1.0)
    assert rate.bytes_per_second == pytest.approx(1000.0)
    for _ in range(60):
        rate.observe(4000, 1.0)
    assert rate.bytes_per_second == pytest.approx(4000.0, rel=0.01)
    assert rate.seconds(8000) == pytest.approx(2.0, rel=0.01)


def test_what_is_never_used_again_is_not_kept_and_what_is_fetched_slowly_neither() -> None:
    rate = StoreRate(1e9, latency=0.0)
    seconds = UNIT_TOKENS / 1000.0
    publisher = BenefitPublisher(50, lambda tokens: tokens / 1000.0)
    assert publisher.wanted(b"first", 1000, rate)  # nothing is known yet
    assert not BenefitPublisher(50, lambda tokens: tokens / 1e9).wanted(b"x", 10**9, rate)  # computing is faster
    slow = StoreRate(1e6 / seconds * 1.1, latency=0.0)
    for number in range(2000):
        publisher.wanted(b"once %d" % number, 10**6, slow)
    assert publisher.reuse.odds(1) < 0.02 and not publisher.wanted(b"once more", 10**6, slow)
    odds = ReuseOdds(1000)
    for number in range(3000):
        odds.used(b"%d" % (number % 300))
    assert odds.odds(3) > 0.9 and odds.odds(1) > 0.9


def test_a_block_size_that_does_not_divide_a_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        UnitTier("pool", MemoryStore(1), KEYS, 24, [64], Staging(1), BenefitPublisher(1, None))


def test_the_table_of_the_seed_computed() -> None:
    """Its own shapes: a block is 8.4 MB, not 67; 1,024 tokens at 100 Gbit/s take 43 ms, not 3.7."""
    shape = KVShape(32, 32, 128, 2)
    assert shape.bytes_per_token * 16 == 8_388_608
    cell = benefit(1024, shape.bytes_per_token, 2000.0, Network(100.0))
    assert cell.fetch == pytest.approx(0.04295, rel=1e-3) and cell.prefill == pytest.approx(0.512)
    assert cell.saved == pytest.approx(0.512 - 0.04295, rel=1e-3)
    assert benefit(1024, shape.bytes_per_token, 40_000.0, Network(10.0)).saved < 0  # here the pool loses
    assert break_even(shape.bytes_per_token, 2000.0) == pytest.approx(8.39, rel=1e-2)
    assert benefit(128, shape.bytes_per_token, 2000.0, Network(100.0)).num_bytes == 0  # no whole unit
