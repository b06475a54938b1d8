"""A random life of a cache above two tiers: transfers in any order, late or failed, leases, writers from outside.

Every block, on the device and in the tiers, remembers the prefix that was written into it. Whatever can be found under
a prefix must hold that prefix, whoever wrote last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.kvcache.reservations import Reservation
from quire.kvcache.table import SequenceKV
from quire.kvcache.transfers import Fetch, Transfer

SIZE = 2
PROMPTS = st.builds(lambda zeros, tail: [0] * zeros + tail, st.integers(0, 9),
                    st.lists(st.integers(0, 1), min_size=1, max_size=4))
TIMEOUT = 10.0


class Shelf(HostTier):
    """Takes what is stored or finished, and nothing that is evicted."""

    name, swaps = "shelf", False

    def stored(self, group: int, key: bytes) -> int:
        return HostTier.evicted(self, group, key) if key[0] % 2 else NO_BLOCK

    def finished(self, group: int, keys: Sequence[bytes]) -> list[int]:
        return [HostTier.evicted(self, group, key) for key in keys]

    def evicted(self, group: int, key: bytes) -> int:
        return NO_BLOCK


@dataclass(eq=False)
class Life:
    kv: SequenceKV
    tokens: list[int]
    goal: int
    fetch: Fetch
    reservation: Reservation | None = None
    confirmed: int = 0
    running: bool = False


@dataclass
class Moving:
    transfer: Transfer
    made: int = 0
    cancelled: bool = False
    written: list[int] = field(default_factory=list)


class TiersMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 12), near=st.integers(1, 8), far=st.integers(1, 12),
                windows=st.sampled_from([(None,), (None,), (None, 3), (4,)]))
    def make(self, num_blocks: int, near: int, far: int, windows: tuple[int | None, ...]) -> None:
        groups = tuple(GroupWindow(w) for w in windows)
        self.cache = KVCacheManager(num_blocks, SIZE, groups, secret=b"the same always!",
                                    tiers=[HostTier(near, len(groups)), Shelf(far, len(groups))])
        self.device: dict[tuple[int, int], bytes | None] = {}
        self.stores: dict[tuple[str, int, int], bytes | None] = {}
        self.lives: list[Life] = []
        self.moving: list[Moving] = []
        self.writers: list[tuple[Reservation, SequenceKV, list[bytes]]] = []
        """Who may write from outside, and what: until confirmed, whatever became of the reservation."""
        self.now = 0.0

    # ---- sequences

    @rule(tokens=PROMPTS)
    def come(self, tokens: list[int]) -> None:
        kv = SequenceKV()
        match = self.cache.match(kv, tokens, self.cache.ask(kv, tokens))
        if not self.cache.fits(len(tokens), match, len(tokens) - match.num_tokens):
            return
        fetch = self.cache.open(kv, match, len(tokens) - match.num_tokens)
        self.start()
        if fetch is not None:
            assert fetch.over == (match.num_outside == 0)
            self.lives.append(Life(kv, tokens, match.num_tokens, fetch))

    @rule(tokens=PROMPTS)
    def reserve(self, tokens: list[int]) -> None:
        kv = SequenceKV()
        match = self.cache.match(kv, tokens)
        goal = len(tokens) - 1
        if goal <= match.num_tokens:
            return
        reservation = self.cache.reserve(kv, match, goal, self.now + TIMEOUT)
        self.start()
        if reservation is not None:
            self.lives.append(Life(kv, tokens, goal, reservation.fetch, reservation))
            keys = self.cache.chain.extend(SequenceKV(), tokens, len(tokens))
            tables = self.cache.fork(kv)
            self.cache.free(tables)  # only a copy of the numbers: a writer holds nothing
            self.writers.append((reservation, SequenceKV(tables=[_copy(t) for t in kv.tables]), keys))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """As the scheduler does: confirm what has come, go without what will not."""
        life = data.draw(st.sampled_from(self.lives))
        if life.running:
            return
        life.confirmed = max(life.confirmed, min(life.goal, SIZE * life.fetch.missing_from(life.kv)))
        self.cache.publish(life.kv, life.tokens, life.confirmed)
        if life.fetch.over:
            if life.fetch.error is not None and life.fetch.pending:
                self.cache.transfers.cancel(life.fetch)
                life.confirmed = min(life.goal, self.cache.cut(life.kv, life.fetch.missing_from(life.kv)))
            life.running = True
        self.start()

    @precondition(lambda self: any(life.running for life in self.lives))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives if life.running]))
        if not self.cache.extend(life.kv, len(life.tokens), life.confirmed):
            self.start()
            return
        for group, source, target in self.cache.take_copies():
            self.device[group, target] = self.device.get((group, source))
        keys = self.cache.chain.extend(life.kv, life.tokens, len(life.tokens))
        for group, table in enumerate(life.kv.tables):
            for i in range(life.confirmed // SIZE, len(keys)):
                if table.blocks[i] != NO_BLOCK:
                    self.device[group, table.blocks[i]] = keys[i]
        life.confirmed = len(life.tokens)
        self.cache.publish(life.kv, life.tokens, life.confirmed)
        self.cache.leave_window(life.kv, life.confirmed)
        self.start()

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), lease=st.booleans())
    def leave(self, data: st.DataObject, lease: bool) -> None:
        life = data.draw(st.sampled_from(self.lives))
        self.lives.remove(life)
        if life.running:
            self.cache.events.finished(life.kv)
        else:
            self.cache.transfers.cancel(life.fetch)
            if life.reservation is not None:
                self.cache.reservations.cancel(life.reservation.number)
        if lease and life.running:
            self.cache.leases.grant(life.kv, life.confirmed, self.now + TIMEOUT)
        self.cache.free(life.kv)
        self.start()

    # ---- transfers

    def start(self) -> None:
        self.cache.begin_draft(len(self.lives))
        self.moving += [Moving(transfer) for transfer in self.cache.transfers.take_drafted(self.now, TIMEOUT)]
        cancelled = self.cache.transfers.take_cancels()
        for moving in self.moving:
            moving.cancelled |= moving.transfer.number in cancelled

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), count=st.integers(0, 3), fails=st.sampled_from([False, False, False, True]))
    def move(self, data: st.DataObject, count: int, fails: bool) -> None:
        moving = data.draw(st.sampled_from(self.moving))
        transfer = moving.transfer
        for move in transfer.moves[moving.made : moving.made + count]:
            here, there = (move.group, move.device), (transfer.tier.name, move.group, move.place)
            if transfer.out:
                self.stores[there] = self.device.get(here)
            else:
                self.device[here] = self.stores.get(there)
            moving.made += 1
        finished = moving.made == len(transfer.moves) or fails or moving.cancelled
        if finished:
            self.moving.remove(moving)
        self.cache.transfers.report(transfer.number, moving.made, finished, "it failed" if fails else None)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.cache.expire(self.now)
        self.start()

    # ---- writers

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), start=st.integers(0, 12), length=st.integers(1, 6), twice=st.booleans())
    def write(self, data: st.DataObject, start: int, length: int, twice: bool) -> None:
        """A writer that does not know of a cancelled reservation writes all the same."""
        reservation, kv, keys = data.draw(st.sampled_from(self.writers))
        start = max(start, reservation.start)
        end = min(start + length, reservation.num_tokens)
        for group, table in enumerate(kv.tables):
            for i, block in enumerate(table.blocks):
                if start <= i * SIZE and (i + 1) * SIZE <= end and block != NO_BLOCK:
                    self.device[group, block] = keys[i]
        # What it writes of a block that is not full does not show here: only whole blocks are told.
        whole = (-(-start // SIZE) * SIZE, end // SIZE * SIZE if end < reservation.num_tokens else end)
        for _ in range(1 + twice):
            self.cache.reservations.arrived(reservation.number, *whole)
        if self.cache.reservations.get(reservation.number) is None:
            self.writers = [w for w in self.writers if w[0] is not reservation]

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def stop_writer(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.cache.reservations.cancel(writer[0].number)
        self.writers.remove(writer)
        assert self.cache.reservations.confirm(writer[0].number)

    # ---- what must hold

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check([life.kv for life in self.lives])
        for tier in self.cache.tiers:
            tier.check([self.cache.transfers.held_in_tier(tier, g) for g in range(len(self.cache.groups))])

    @invariant()
    def what_can_be_found_is_what_it_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        for group, pool in enumerate(self.cache.pools):
            for block in range(pool.num_blocks):
                key = pool.hash_of(block)
                assert key is None or self.device.get((group, block)) == key, "a block of the device lies"
        for tier in self.cache.tiers:
            assert isinstance(tier, HostTier)
            for group, pool in enumerate(tier.pools):
                for block in range(pool.num_blocks):
                    key = pool.hash_of(block)
                    assert key is None or self.stores.get((tier.name, group, block)) == key, f"{tier.name} lies"

    def teardown(self) -> None:
        """Once everybody has gone and every writer has stopped, nothing is held."""
        if not hasattr(self, "cache"):
            return
        for life in self.lives:
            self.cache.transfers.cancel(life.fetch)
            if life.reservation is not None:
                self.cache.reservations.cancel(life.reservation.number)
            self.cache.free(life.kv)
        self.lives = []
        for reservation, _, _ in self.writers:
            self.cache.reservations.cancel(reservation.number)
            self.cache.reservations.confirm(reservation.number)
        self.wait(1000.0)
        for moving in self.moving:
            self.cache.transfers.report(moving.transfer.number, moving.made, True, "the end")
        self.adds_up()
        assert all(pool.num_available == pool.num_blocks for pool in self.cache.pools), "blocks leaked"
        assert all(tier.num_used == 0 for tier in self.cache.tiers), "blocks of a tier leaked"


def _copy(table):  # type: ignore[no-untyped-def]
    return type(table)(list(table.blocks), table.first_live)


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, database=None, print_blob=True)
