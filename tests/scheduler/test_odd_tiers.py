"""Tiers that lose what they found or break, reservations with nothing to write, leases of an idle engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.engine.core import EngineCore
from quire.kvcache.connector import Lookup
from quire.kvcache.host_tier import HostTier
from quire.kvcache.token_prefix import TokenPrefix
from quire.scheduler.plan import TransferReport
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.remote import RemotePrefill
from quire.scheduler.request import Request, Status
from tests.scheduler.simulation import SimulatedExecutor, expected_tokens, make_request
from tests.scheduler.test_arriving import PROMPT, Engine, Shelf, got_its_tokens


def run(engine: Engine, *requests: Request) -> EngineCore:
    """To the end through a core, which ends requests that nothing can be planned for."""
    executor = SimulatedExecutor(engine.worker)
    core = EngineCore(engine.scheduler, executor)
    for request in requests:
        core.add(request)
    for _ in range(100):
        if not core.has_work:
            break
        core.step(wait_for_kv=False)
        for number, (start, done) in list(engine.worker.moving.items()):
            for move in start.moves[done:]:
                engine.worker._move(start, move)
            del engine.worker.moving[number]
            executor.arrivals.put(TransferReport(number, len(start.moves), True))
        engine.scheduler.check()
    return core


class Forgetful(HostTier):
    """Has lost some prefixes when it is to hold what it has just found."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.losses: list[int] = []
        """Which holds, counted from the next one, find nothing."""
        self.holds = 0

    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        if key is not None:
            self.holds += 1
            if self.holds - 1 in self.losses:
                return False
        return super().hold(group, block, key)


@pytest.mark.parametrize(("losses", "cached"), [([0], 0), ([3], 12), ([3, 5], 4), (list(range(99)), 0)])
def test_what_a_tier_has_lost_since_it_was_asked_is_computed(losses: list[int], cached: int) -> None:
    """Nothing else was there to be done, so the request ended for want of room."""
    tier = Forgetful(64)
    engine = Engine(tiers=[tier])
    engine.offloaded(PROMPT)
    tier.holds, tier.losses = 0, losses
    request, other = make_request("again", PROMPT, 3, seed=2), make_request("other", [1, 2, 3], 3, seed=3)
    run(engine, request, other)
    assert request.sequences[0].error is None and got_its_tokens(request) and got_its_tokens(other)
    assert request.num_cached_tokens == cached


def test_what_the_near_tier_has_lost_comes_from_the_far_one() -> None:
    near, far = Forgetful(64), Shelf(64)
    engine = Engine(tiers=[near, far])
    first = make_request("first", PROMPT, 1, seed=1)
    engine.scheduler.add(first)
    engine.run(first)
    engine.step()
    engine.move()
    engine.evict_everything()
    assert near.num_cached == far.num_cached == 6
    near.holds, near.losses = 0, [2]
    request = make_request("again", PROMPT, 3, seed=2)
    run(engine, request)
    assert got_its_tokens(request) and request.num_cached_tokens == 24


class Breaking(HostTier):
    """Raises when it is asked `what`."""

    what = ""

    def _may_break(self, name: str) -> None:
        if self.what == name:
            raise OSError("the index is gone")

    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        self._may_break("lookup")
        return super().lookup(keys, num_groups)

    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        self._may_break("hold")
        return super().hold(group, block, key)

    def stored(self, group: int, key: bytes) -> int:
        self._may_break("stored")
        return super().stored(group, key)

    def finished(self, group: int, keys: Sequence[bytes]) -> list[int]:
        self._may_break("finished")
        return super().finished(group, keys)

    def evicted(self, group: int, key: bytes) -> int:
        self._may_break("evicted")
        return super().evicted(group, key)


@pytest.mark.parametrize("what", ["lookup", "hold", "stored", "finished", "evicted"])
def test_a_tier_that_breaks_costs_the_hit_and_not_the_engine(what: str) -> None:
    """What it raised came out of `core.step`, and everybody's requests were lost."""
    tier = Breaking(64)
    engine = Engine(tiers=[tier])
    engine.offloaded(PROMPT)
    tier.what = what
    request = make_request("again", PROMPT, 3, seed=2)
    big = make_request("big", list(range(700, 756)), 3, seed=3)
    run(engine, request, big)
    assert got_its_tokens(request) and got_its_tokens(big)


# ---- reservations


def test_a_prompt_that_is_cached_already_asks_nobody() -> None:
    """It waited for its deadline: no writer has anything to tell."""
    engine = Engine(tiers=[])
    first = make_request("first", PROMPT, 1, seed=1)
    engine.scheduler.add(first)
    engine.run(first)
    for name, prompt in (("cached", PROMPT), ("one", [5])):
        request = make_request(name, prompt, 3, seed=2)
        request.remote = RemotePrefill(["somebody"], first_token=False)
        engine.scheduler.add(request)
        engine.step()
        assert request.status is Status.RUNNING and engine.scheduler.take_asking() == []
        engine.run(request)
        assert got_its_tokens(request)
    assert engine.scheduler.cache.pools[0].num_used == 0


# ---- leases


def test_a_lease_ends_in_an_idle_engine_too() -> None:
    """It ended with the next request."""
    engine = Engine(tiers=[])
    kept = make_request("kept", PROMPT, 3, seed=2)
    kept.lease_seconds = 5.0
    core = run(engine, kept)
    cache = engine.scheduler.cache
    engine.clock.now += 4.9
    core.step()
    assert len(cache.leases) == 1 and cache.pools[0].num_used == 7
    engine.clock.now += 0.1
    core.step()
    assert len(cache.leases) == 0 and cache.pools[0].num_used == 0
    engine.scheduler.check()


# ---- what a copy to a tier holds


def test_a_copy_of_full_blocks_does_not_hold_the_one_that_is_being_written() -> None:
    """It held all the sequence had, so that every token behind it was written into a copy of its block."""
    far = Shelf(64)
    engine = Engine(tiers=[far])
    request = make_request("long", PROMPT, 20, seed=2)
    engine.scheduler.add(request)
    while request.status is not Status.FINISHED:
        engine.step()
    engine.move()
    assert far.num_cached == 10
    assert got_its_tokens(request) and engine.scheduler.cache.stats.copies_on_write == 0


# ---- groups whose KV comes back in part


@pytest.mark.parametrize("arrived", range(8))
def test_a_group_goes_on_whatever_part_of_its_kv_came_back(arrived: int) -> None:
    """With just the prompt's blocks there, and nobody else to run, nothing was planned and the group was ended."""
    engine = Engine(num_blocks=24, seqs=6)
    core = EngineCore(engine.scheduler, SimulatedExecutor(engine.worker))
    group = make_request("group", list(range(50, 66)), 9, n=3, seed=5)
    core.add(group)
    while any(seq.num_output_tokens < 5 for seq in group.sequences):
        core.step()
    engine.scheduler._giving_way.requeue(group, PreemptionReason.MEMORY, may_move=True)
    engine.scheduler.cache.drop_cached()
    while group.fetch is None:
        core.step(wait_for_kv=False)
        engine.move(out=True)
        engine.scheduler.cache.drop_cached()
    while not engine.worker.moving:
        core.step(wait_for_kv=False)
    engine.move(arrived, error="gone")
    for _ in range(100):
        if group.status is Status.FINISHED:
            break
        core.step(wait_for_kv=False)
        engine.scheduler.check()
    for seq in group.sequences:
        assert seq.error is None and seq.tokens[16:] == expected_tokens(group, 99, seq.index)
