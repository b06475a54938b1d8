"""Requests whose KV is on its way: neither waiting nor running, in nobody's way, and no worse off when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from quire.engine.core import EngineCore
from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector, Lookup
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.kvcache.reservations import Reservation
from quire.kvcache.token_prefix import TokenPrefix
from quire.scheduler.limits import Limits
from quire.scheduler.plan import StepPlan, TransferReport
from quire.scheduler.preemption import Preemption, PreemptionMode, PreemptionReason
from quire.scheduler.remote import RemotePrefill
from quire.scheduler.request import FinishReason, Request, Status
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import SimulatedExecutor, SimulatedWorker, expected_tokens, make_request

SIZE = 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A scheduler over a simulated worker whose transfers move only when told to."""

    def __init__(self, *, num_blocks: int = 16, tiers: Sequence[KVConnector] | None = None, seqs: int = 4,
                 windows: tuple[int | None, ...] = (None,), budget: int = 64) -> None:
        self.clock = Clock()
        tiers = [HostTier(64, len(windows))] if tiers is None else tiers
        cache = KVCacheManager(num_blocks, SIZE, tuple(GroupWindow(w) for w in windows), tiers=tiers,
                               block_bytes=(1,) * len(windows))
        self.scheduler = Scheduler(Limits(seqs, budget, 256, fetch_timeout=5.0), cache, clock=self.clock,
                                   preemption=Preemption(cache, PreemptionMode.SWAP))
        self.worker = SimulatedWorker.beside(self.scheduler)
        self.worker.advance = lambda most=False: []  # type: ignore[method-assign]
        self.plans: list[StepPlan] = []

    def add_reserved(self, request: Request, deadline: float) -> Reservation | None:
        """Take a request whose prompt somebody else computes; None where it finds no room now."""
        request.remote = RemotePrefill(["somebody"], first_token=False)
        self.scheduler.add(request)
        assert self.scheduler.schedule() is None
        for _, reservation in self.scheduler.take_asking():
            reservation.deadline = deadline
            return reservation
        return None

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self.plans.append(plan)
            result = self.worker.execute(plan)
            self.worker.retire(plan.step)
            self.scheduler.update(result)
            self.scheduler.check()
        return plan

    def move(self, count: int | None = None, error: str | None = None, out: bool | None = None) -> None:
        """Make the first `count` moves of every transfer (of one direction), and all of them by default."""
        for number, (start, done) in list(self.worker.moving.items()):
            if out is not None and start.out is not out:
                continue
            last = len(start.moves) if count is None else min(len(start.moves), done + count)
            for move in start.moves[done:last]:
                self.worker._move(start, move)
            finished = last == len(start.moves) or error is not None
            self.worker.moving[number] = (start, last)
            if finished:
                del self.worker.moving[number]
            self.scheduler.arrived([TransferReport(number, last, finished, error)])
            self.scheduler.check()

    def run(self, *requests: Request, most: int = 200) -> None:
        while any(request.status is not Status.FINISHED for request in requests):
            self.step()
            self.move()
            most -= 1
            assert most, "a request starves"

    def evict_everything(self) -> None:
        """All that is cached on the device goes to the tier."""
        cache = self.scheduler.cache
        cache.make_room([pool.num_blocks for pool in cache.pools])
        self.step()
        self.move()

    def offloaded(self, prompt: list[int]) -> None:
        """The prompt's blocks are in the tier, and not on the device."""
        first = make_request("first", prompt, 1, seed=1)
        self.scheduler.add(first)
        self.run(first)
        self.evict_everything()


PROMPT = list(range(500, 525))


def got_its_tokens(request: Request) -> bool:
    seq = request.sequences[0]
    return seq.error is None and seq.tokens[seq.num_prompt_tokens :] == expected_tokens(request, request.max_len)


def test_those_behind_go_on_while_a_prefix_comes_back() -> None:
    engine = Engine()
    engine.offloaded(PROMPT)
    slow, quick = make_request("slow", PROMPT, 3, seed=2), make_request("quick", [1, 2, 3], 5, seed=3)
    scheduler = engine.scheduler
    scheduler.add(slow)
    scheduler.add(quick)
    engine.step()
    assert slow.status is Status.ARRIVING and slow.request_id in scheduler.arriving
    assert slow.sequences[0].row < 0 and not len(scheduler.waiting) and list(scheduler.running) == ["quick"]
    while quick.status is not Status.FINISHED:
        engine.step()
    assert slow.status is Status.ARRIVING and got_its_tokens(quick)
    assert scheduler.schedule() is None and scheduler.awaits_until == 105.0
    engine.run(slow)
    assert got_its_tokens(slow) and slow.num_cached_tokens == 24
    assert scheduler.stats.prompt_tokens == len(PROMPT) + 3 + 1, "the prefix was computed again"


def test_progress_is_by_token_range_and_counts_only_once_reported() -> None:
    engine = Engine()
    engine.offloaded(PROMPT)
    slow = make_request("slow", PROMPT, 3, seed=2)
    engine.scheduler.add(slow)
    engine.step()
    seq, pool = slow.sequences[0], engine.scheduler.cache.pools[0]
    assert (seq.num_computed, seq.num_confirmed, pool.num_cached) == (24, 0, 0)
    engine.move(2)
    assert (seq.num_confirmed, seq.kv.num_registered) == (8, 2), "what has come from the front is for everybody"
    beside = make_request("beside", PROMPT[:9], 2, seed=5)
    engine.scheduler.add(beside)
    engine.step()
    assert beside.num_cached_tokens == 8 and beside.status is Status.RUNNING
    engine.run(slow, beside)
    assert got_its_tokens(slow) and got_its_tokens(beside)


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("arrived", [0, 2, 5])
def test_what_did_not_arrive_is_computed(arrived: int, windows: tuple[int | None, ...]) -> None:
    engine = Engine(windows=windows)
    engine.offloaded(PROMPT)
    slow, other = make_request("slow", PROMPT, 3, seed=2), make_request("other", [1, 2, 3], 9, seed=3)
    engine.scheduler.add(slow)
    engine.scheduler.add(other)
    engine.step()
    before = engine.scheduler.stats.prompt_tokens
    engine.move(arrived, error="the disk is gone")
    assert engine.scheduler.stats.fetches_failed == 1
    if len(windows) == 1:
        assert slow.sequences[0].num_computed == slow.sequences[0].num_confirmed == SIZE * arrived
    engine.run(slow, other)
    assert got_its_tokens(slow) and got_its_tokens(other)
    if len(windows) == 1:
        assert engine.scheduler.stats.prompt_tokens - before == len(PROMPT) - SIZE * arrived
    assert engine.scheduler.cache.pools[0].num_used == 0


def test_kv_that_does_not_come_in_time_is_computed_and_its_blocks_stay_out_of_circulation() -> None:
    engine = Engine()
    engine.offloaded(PROMPT)
    slow = make_request("slow", PROMPT, 3, seed=2)
    engine.scheduler.add(slow)
    engine.step()
    engine.move(1)
    engine.clock.now += 5.0
    plan = engine.step()
    assert plan is not None and plan.cancels and slow.status is Status.RUNNING
    while slow.status is not Status.FINISHED:
        engine.step()
    pool = engine.scheduler.cache.pools[0]
    assert got_its_tokens(slow) and pool.num_used == 5, "a late write could hit somebody"
    engine.move()
    assert pool.num_used == 0 == engine.scheduler.cache.tiers[0].num_used
    assert engine.scheduler.cache.transfers.stats.timed_out == 1


def test_an_abort_while_arriving_frees_everything_once_the_transfer_has_ended() -> None:
    engine = Engine()
    engine.offloaded(PROMPT)
    slow = make_request("slow", PROMPT, 3, seed=2)
    engine.scheduler.add(slow)
    engine.step()
    engine.move(3)
    assert engine.scheduler.abort("slow")
    engine.scheduler.check()
    assert not engine.scheduler.arriving and slow.status is Status.FINISHED
    assert engine.scheduler.cache.pools[0].num_used == 3
    engine.step()
    assert engine.plans[-1].cancels
    engine.move(0, error="cancelled")
    assert engine.scheduler.cache.pools[0].num_used == 0 == engine.scheduler.cache.tiers[0].num_used


def test_kv_whose_step_was_lost_is_not_trusted() -> None:
    """Bug 3: offload, swap and two steps in flight. A fetch was believed because its plan had been drafted; the request
    was preempted by swap while that step was in flight, the step was lost, and garbage came back from the host."""
    engine = Engine(num_blocks=10)
    engine.offloaded(PROMPT)
    victim = make_request("victim", PROMPT, 6, seed=2)
    engine.scheduler.add(victim)
    lost = engine.scheduler.schedule()
    assert lost is not None and lost.transfers
    seq = victim.sequences[0]
    assert seq.num_keepable == 0, "nothing has arrived"
    # As a running sequence short of memory does, while the step is in flight.
    engine.scheduler._giving_way.requeue(victim, PreemptionReason.MEMORY, may_move=True)
    assert victim.swapped is None
    engine.scheduler.fail_step("the step was lost")
    engine.scheduler.never_started(lost)
    engine.scheduler.check()
    engine.run(victim)
    assert got_its_tokens(victim), "the simulated worker would have read another prefix"


def test_a_swapped_group_comes_back_beside_the_steps_and_survives_a_failure() -> None:
    for failing in (False, True):
        engine = Engine(num_blocks=12, seqs=6)
        first = make_request("first", list(range(16)), 12, seed=4)
        group = make_request("group", list(range(50, 66)), 6, n=3, seed=5)
        engine.scheduler.add(first)
        engine.scheduler.add(group)
        for _ in range(100):
            engine.step()
            if group.swapped is not None:
                break
            engine.move()
        assert group.swapped is not None and not group.swapped.settled
        engine.move(out=True)
        for _ in range(100):
            if group.status is Status.ARRIVING:
                break
            engine.step()
            engine.move(out=True)
        assert group.status is Status.ARRIVING
        engine.move(1, error="gone" if failing else None)
        engine.run(first, group)
        assert got_its_tokens(first)
        for seq in group.sequences:
            assert seq.error is None and seq.tokens[16:] == expected_tokens(group, 99, seq.index)
        assert engine.scheduler.stats.fetches_failed == failing


class SlowIndex(HostTier):
    """Answers when it is told to."""

    lookup_timeout = 1.0

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.asked: list[tuple[Lookup, Lookup]] = []

    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        later = Lookup(keys, num_groups, self.wake)
        self.asked.append((later, super().lookup(keys, num_groups)))
        return later

    def answer(self) -> None:
        for later, now in self.asked:
            later.answer([[now.block(0, i) for i in range(len(now.keys))]])
        self.asked.clear()


def test_a_lookup_that_answers_later_holds_nobody_up() -> None:
    tier = SlowIndex(64)
    engine = Engine(tiers=[tier])
    tier.lookup = HostTier.lookup.__get__(tier)  # type: ignore[method-assign]
    engine.offloaded(PROMPT)
    del tier.lookup
    slow, quick = make_request("slow", PROMPT, 3, seed=2), make_request("quick", [1, 2, 3], 2, seed=3)
    engine.scheduler.add(slow)
    engine.scheduler.add(quick)
    engine.step()
    assert slow.status is Status.ARRIVING and quick.status is Status.RUNNING and slow.fetch is None
    tier.answer()
    engine.step()
    assert slow.status is Status.ARRIVING and slow.fetch is not None
    engine.run(slow, quick)
    assert slow.num_cached_tokens == 24 and got_its_tokens(slow) and got_its_tokens(quick)


def test_a_lookup_that_never_answers_costs_the_hit_and_not_the_request() -> None:
    tier = SlowIndex(64)
    engine = Engine(tiers=[tier])
    slow = make_request("slow", PROMPT, 3, seed=2)
    engine.scheduler.add(slow)
    assert engine.step() is None and slow.status is Status.ARRIVING and engine.scheduler.awaits_until == 101.0
    engine.clock.now += 1.0
    engine.run(slow)
    assert got_its_tokens(slow) and slow.num_cached_tokens == 0


class Shelf(HostTier):
    """A second tier: takes what is stored, at once, and nothing that is evicted."""

    name, swaps = "shelf", False

    def stored(self, group: int, key: bytes) -> int:
        return HostTier.evicted(self, group, key)

    def evicted(self, group: int, key: bytes) -> int:
        return NO_BLOCK


def test_a_prefix_continues_from_one_tier_into_the_next() -> None:
    near, far = HostTier(2), Shelf(64)
    engine = Engine(tiers=[near, far])
    first = make_request("first", PROMPT, 1, seed=1)
    engine.scheduler.add(first)
    engine.run(first)
    engine.step()
    engine.move()
    assert far.num_cached == 6, "it was stored when its blocks were full, not when they were evicted"
    engine.evict_everything()
    again = make_request("again", PROMPT, 2, seed=2)
    engine.scheduler.add(again)
    plan = engine.step()
    assert plan is not None
    moved = {start.tier: len(start.moves) for start in plan.transfers}
    assert moved == {"host": 2, "shelf": 4}, "each block from the nearest tier that has it"
    # The far one arrives first: the range from the front has not come yet.
    for number, (start, _) in list(engine.worker.moving.items()):
        if start.tier == "shelf":
            for move in start.moves:
                engine.worker._move(start, move)
            del engine.worker.moving[number]
            engine.scheduler.arrived([TransferReport(number, len(start.moves), True)])
    confirmed = again.sequences[0].num_confirmed
    assert again.status is Status.ARRIVING and confirmed < 24
    engine.run(again)
    assert got_its_tokens(again) and again.num_cached_tokens == 24


def test_observers_hear_of_what_is_stored_finished_and_evicted() -> None:
    engine = Engine(tiers=[])
    heard: list[tuple[str, int]] = []

    class Index:
        def stored(self, group: int, key: bytes, parent: bytes | None, block: int) -> None:
            heard.append(("stored", block))

        def evicted(self, group: int, key: bytes, block: int) -> None:
            heard.append(("evicted", block))

        def finished(self, keys: Sequence[bytes]) -> None:
            heard.append(("finished", len(keys)))

        def cleared(self) -> None:
            heard.append(("cleared", 0))

    engine.scheduler.cache.events.observers.append(Index())
    request = make_request("r", list(range(9)), 2, seed=1)
    engine.scheduler.add(request)
    engine.run(request)
    assert [kind for kind, _ in heard] == ["stored", "stored", "finished"] and heard[-1][1] == 2
    engine.scheduler.cache.make_room([16])
    assert [kind for kind, _ in heard[3:]] == ["evicted", "evicted"]
    engine.scheduler.cache.drop_cached()
    assert heard[5:] == [("cleared", 0)]


# ---- reservations and leases


def test_kv_that_is_written_from_outside_arrives_by_token_range() -> None:
    engine = Engine(tiers=[])
    request, other = make_request("remote", PROMPT, 3, seed=2), make_request("other", [1, 2], 2, seed=3)
    reservation = engine.add_reserved(request, deadline=110.0)
    assert reservation is not None and request.status is Status.ARRIVING
    engine.scheduler.add(other)
    engine.run(other)
    reservations = engine.scheduler.cache.reservations
    _write(engine, request, 0, 24)
    assert reservations.arrived(reservation.number, 8, 24) and reservations.arrived(reservation.number, 0, 4)
    engine.scheduler.look()
    assert request.sequences[0].num_confirmed == 4
    assert reservations.arrived(reservation.number, 4, 8) and len(reservations) == 0
    engine.step()
    assert request.status is Status.RUNNING
    assert engine.plans[-1].entries[0].start == 24
    assert not reservations.arrived(reservation.number, 0, 4), "the reservation has ended"
    engine.run(request)
    assert got_its_tokens(request) and engine.scheduler.cache.pools[0].num_used == 0


def _write(engine: Engine, request: Request, start: int, end: int) -> None:
    from tests.kvcache.contents import fingerprints

    seq = request.sequences[0]
    chain = fingerprints(b"", seq.tokens)
    for position in range(start, end):
        block = seq.kv.tables[0].blocks[position // SIZE]
        engine.worker.contents.slots[0][block][position % SIZE] = chain[position]


@pytest.mark.parametrize("ending", ["cancel", "late", "abort"])
def test_blocks_of_a_cancelled_reservation_are_nobodys_until_the_writer_has_confirmed(ending: str) -> None:
    engine = Engine(tiers=[])
    cache = engine.scheduler.cache
    request = make_request("remote", PROMPT, 3, seed=2)
    reservation = engine.add_reserved(request, deadline=110.0)
    assert reservation is not None
    _write(engine, request, 0, 8)
    cache.reservations.arrived(reservation.number, 0, 9)
    if ending == "cancel":
        assert cache.reservations.cancel(reservation.number)
    elif ending == "late":
        engine.clock.now = 110.0
    else:
        engine.scheduler.abort("remote")
    if ending != "abort":
        engine.step()
        assert request.status is Status.RUNNING and engine.plans[-1].entries[0].start == 8, "it computes the rest"
        engine.run(request)
        assert got_its_tokens(request)
    engine.scheduler.check()
    assert cache.pools[0].num_used == 6 and cache.reservations.num_quarantined == 1
    assert not cache.reservations.arrived(reservation.number, 9, 24), "too late to count"
    assert cache.reservations.confirm(reservation.number) and not cache.reservations.confirm(reservation.number)
    assert cache.pools[0].num_used == 0
    engine.scheduler.check()


def test_a_reservation_that_finds_no_room_changes_nothing() -> None:
    engine = Engine(tiers=[], num_blocks=8)
    first = engine.add_reserved(make_request("a", PROMPT, 3, seed=2), deadline=110.0)
    second = make_request("b", list(range(25)), 3, seed=2)
    assert first is not None and engine.add_reserved(second, deadline=110.0) is None
    engine.scheduler.check()
    assert list(engine.scheduler.arriving) == ["a"]


def test_a_finished_sequence_keeps_its_blocks_under_a_lease_that_ends() -> None:
    engine = Engine(tiers=[], num_blocks=8)
    cache = engine.scheduler.cache
    request = make_request("kept", list(range(20)), 3, seed=2)
    request.lease_seconds = 10.0
    engine.scheduler.add(request)
    engine.run(request)
    number = request.sequences[0].lease
    assert number is not None and cache.pools[0].num_used == 6
    lease = cache.leases.get(number)
    assert lease is not None and lease.num_tokens == 22 and len(lease.kv.tables[0].blocks) == 6
    engine.scheduler.check()
    waiting = make_request("waiting", list(range(100, 120)), 3, seed=3)
    engine.scheduler.add(waiting)
    assert engine.step() is None and engine.scheduler.awaits_until == lease.until, "nobody fails for a lease"
    assert cache.leases.renew(number, engine.clock.now + 20.0)
    engine.clock.now += 10.0
    assert engine.step() is None and cache.pools[0].num_used == 6
    engine.clock.now += 10.0
    assert engine.step() is not None and cache.leases.num_expired == 1 and not cache.leases.renew(number, 999.0)
    engine.run(waiting)
    assert got_its_tokens(waiting)
    released = make_request("released", [1, 2, 3], 2, seed=4)
    released.lease_seconds = 10.0
    engine.scheduler.add(released)
    engine.run(released)
    assert cache.leases.release(released.sequences[0].lease or 0) and not cache.leases.release(99)
    assert cache.pools[0].num_used == 0
    engine.scheduler.check()


# ---- the core


def make_core(moves_after: float | None) -> tuple[EngineCore, SimulatedWorker]:
    engine = Engine()
    engine.offloaded(PROMPT)
    executor = SimulatedExecutor(engine.worker)
    core = EngineCore(engine.scheduler, executor)
    if moves_after is not None:
        def later() -> None:
            time.sleep(moves_after)
            for number, (start, _) in list(engine.worker.moving.items()):
                for move in start.moves:
                    engine.worker._move(start, move)
                executor.arrivals.put(TransferReport(number, len(start.moves), True))
        threading.Thread(target=later).start()
    return core, engine.worker


def test_an_arrival_wakes_an_idle_core() -> None:
    core, _ = make_core(moves_after=0.15)
    slow = make_request("slow", PROMPT, 3, seed=2)
    core.add(slow)
    steps, began = 0, time.monotonic()
    while core.has_work:
        core.step()
        steps += 1
        assert time.monotonic() - began < 5.0
    assert got_its_tokens(slow) and steps < 15, "the core polls"


def test_a_core_that_waits_elsewhere_says_for_how_long() -> None:
    core, _ = make_core(moves_after=None)
    slow = make_request("slow", PROMPT, 3, seed=2)
    core.add(slow)
    core.step(wait_for_kv=False)
    began = time.monotonic()
    core.step(wait_for_kv=False)
    assert core.stalled_for == 5.0 and time.monotonic() - began < 4.0
    core.finish(slow.sequences[0], FinishReason.STOP, "end")
    core.scheduler.check()
    assert slow.status is Status.FINISHED


def test_a_plan_that_never_reached_the_worker_leaves_nothing_behind() -> None:
    core, _ = make_core(moves_after=None)

    def refuse(plan: StepPlan) -> None:
        raise RuntimeError("no such device")

    good, core.executor.submit = core.executor.submit, refuse  # type: ignore[method-assign, assignment]
    slow = make_request("slow", PROMPT, 3, seed=2)
    core.add(slow)
    core.step()
    core.executor.submit = good  # type: ignore[method-assign]
    while core.has_work:
        core.step()
    core.scheduler.check()
    assert got_its_tokens(slow) and core.scheduler.cache.pools[0].num_used == 0


def test_a_request_in_two_places_is_noticed() -> None:
    engine = Engine()
    request = make_request("r", [1, 2, 3], 3, seed=2)
    engine.scheduler.add(request)
    engine.scheduler.check()
    engine.scheduler.arriving["r"] = request
    with pytest.raises(InvariantError, match="in two"):
        engine.scheduler.check()


def test_an_abort_while_a_tier_is_asked_leaves_nothing_behind() -> None:
    tier = SlowIndex(64)
    engine = Engine(tiers=[tier])
    engine.scheduler.add(make_request("slow", PROMPT, 3, seed=2))
    engine.step()
    assert engine.scheduler.abort("slow") and not engine.scheduler.arriving
    tier.answer()
    engine.step()
    engine.scheduler.check()
    engine.scheduler.take_updates()
    assert engine.scheduler.cache.pools[0].num_used == 0 and not engine.scheduler.has_work


def test_a_running_sequence_short_of_memory_takes_it_from_one_that_arrives() -> None:
    """The one that came last gives way, also when its KV is on its way; it computes later."""
    engine = Engine(num_blocks=12)
    engine.offloaded(PROMPT)
    first, late = make_request("first", list(range(12)), 30, seed=3), make_request("late", PROMPT, 3, seed=4)
    engine.scheduler.add(first)
    engine.step()
    engine.scheduler.add(late)
    engine.step()
    assert late.status is Status.ARRIVING
    for _ in range(60):
        if late.num_preemptions:
            break
        engine.step()
        engine.move(out=True)
    assert late.num_preemptions == 1 and late.status is Status.WAITING
    engine.run(first, late)
    assert got_its_tokens(first) and got_its_tokens(late) and first.num_preemptions == 0


def test_a_swap_out_that_fails_costs_its_request_a_recompute() -> None:
    engine = Engine(num_blocks=8)
    requests = [make_request(f"r{i}", [100 * i + j for j in range(5)], 14, seed=i) for i in range(2)]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(60):
        engine.step()
        if requests[1].swapped is not None:
            break
        engine.move()
    assert requests[1].swapped is not None
    engine.move(0, error="the host is gone", out=True)
    assert requests[1].swapped.lost
    engine.run(*requests)
    assert all(map(got_its_tokens, requests)) and requests[1].counts.swaps_in == 0
    assert all(tier.num_used == 0 for tier in engine.scheduler.cache.tiers)
