"""The engine examines itself when the tokens are out, a little at a time, and begins again when something changed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import pytest

from quire.engine.core import EngineCore
from quire.engine.self_check import EXAMINE_EVERY, SelfCheck
from quire.executor.dummy import DummyExecutor
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.examination import PART_BLOCKS
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import make_request, make_scheduler

MANY = 250_000


class Examined:
    """Counts the examinations that a scheduler began, and the parts of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.begun = self.parts = 0
        self._original = scheduler.examination
        scheduler.examination = self._examination  # type: ignore[method-assign]

    def _examination(self) -> Iterator[None]:
        self.begun += 1
        for _ in self._original():
            self.parts += 1
            yield


def make_core(num_blocks: int = 64, **options: int) -> EngineCore:
    return EngineCore(make_scheduler(num_blocks, 16, **options), DummyExecutor())  # type: ignore[arg-type]


def serve(core: EngineCore, name: str) -> None:
    core.add(make_request(name, [1, 2, 3], 2))
    while core.has_work:
        core.step()


def test_the_step_that_brings_the_last_token_examines_nothing() -> None:
    core = make_core()
    seen = Examined(core.scheduler)
    serve(core, "a")
    assert seen.begun == 0
    core.step()
    assert seen.begun == 1


def test_an_engine_at_rest_is_examined_but_not_at_every_pause() -> None:
    core = make_core()
    now = [0.0]
    core.self_check = SelfCheck(core.scheduler, clock=lambda: now[0])
    seen = Examined(core.scheduler)
    begun = []
    for clock in (0.0, 1.0, EXAMINE_EVERY - 1, EXAMINE_EVERY, EXAMINE_EVERY + 5, 2 * EXAMINE_EVERY):
        now[0] = clock
        serve(core, "a")
        core.step()
        core.step()
        begun.append(seen.begun)
    assert begun == [1, 1, 1, 2, 2, 3]
    now[0] = 100 * EXAMINE_EVERY
    core.step()
    assert seen.begun == 3, "nothing has changed since the last one"


def test_a_slice_looks_at_so_many_blocks_however_large_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(MANY, host_blocks=MANY, offload=True)
    ticks = itertools.count()
    core.self_check = SelfCheck(core.scheduler, stopwatch=lambda: float(next(ticks)))  # every slice is one part
    looked = [0]
    check_block = BlockPool._check_block

    def counted(pool: BlockPool, block: int, free: bool) -> None:
        looked[0] += 1
        check_block(pool, block, free)

    monkeypatch.setattr(BlockPool, "_check_block", counted)
    per_slice = []
    while core.self_check.due:
        before = looked[0]
        core.self_check.slice()
        per_slice.append(looked[0] - before)
    assert looked[0] == 2 * MANY
    assert max(per_slice) == PART_BLOCKS and len(per_slice) > 2 * MANY // PART_BLOCKS


def test_slices_of_a_large_pool_are_short_and_a_step_costs_none_of_them() -> None:
    """Generous, and in CPU time: the bound is a millisecond, and other programs run beside the tests."""
    core = make_core(MANY)
    core.add(make_request("a", [1, 2, 3], 2))
    core.step()
    began = time.thread_time()
    while core.has_work:
        core.step()
    assert time.thread_time() - began < 0.1
    slices = []
    while core.self_check.due:
        began = time.thread_time()
        core.step()
        slices.append(time.thread_time() - began)
    assert len(slices) > 20 and statistics.median(slices) < 0.01


def test_no_part_of_an_examination_takes_milliseconds() -> None:
    """A set of all free blocks used to stop for up to 5 ms whenever it grew."""
    core = make_core(MANY, host_blocks=MANY // 2, offload=True)
    serve(core, "a")
    runs: list[list[float]] = []
    for _ in range(4):
        seconds, parts = [], core.scheduler.examination()
        began = time.thread_time()
        for _ in parts:
            seconds.append(time.thread_time() - began)
            began = time.thread_time()
        runs.append(seconds)
    # The best of four: a busy machine is slow now and then, and never at the same part.
    assert max(min(times) for times in zip(*runs, strict=True)) < 0.003


def test_an_examination_begins_again_when_something_changed() -> None:
    core = make_core(20 * PART_BLOCKS)
    ticks = itertools.count()
    core.self_check = SelfCheck(core.scheduler, stopwatch=lambda: float(next(ticks)))
    seen = Examined(core.scheduler)
    for _ in range(5):
        core.step()
    assert seen.begun == 1 and seen.parts == 5
    serve(core, "a")
    core.step()
    core.clear_prefix_cache()
    core.step()
    assert seen.begun == 3
    while core.self_check.due:
        core.step()
    assert seen.begun == 3 and core.scheduler.stats.invariant_errors == 0


def test_batches_do_not_wait_for_the_first_slice_of_a_large_pool_again_and_again() -> None:
    core = make_core(20 * PART_BLOCKS)
    ticks, now = itertools.count(), [0.0]
    core.self_check = SelfCheck(core.scheduler, lambda: now[0], lambda: float(next(ticks)))  # every slice is one part
    seen = Examined(core.scheduler)
    begun = []
    for clock in (0.0, 1.0, EXAMINE_EVERY - 1, EXAMINE_EVERY, EXAMINE_EVERY + 5):
        now[0] = clock
        core.self_check.glance()
        serve(core, "a")
        begun.append(seen.begun)
    assert begun == [1, 1, 1, 2, 2]
    core.step()
    assert seen.begun == 3, "without work at hand it is examined as before"


def test_what_is_known_to_be_broken_is_mended_at_the_next_glance() -> None:
    core = make_core(20 * PART_BLOCKS)
    ticks = itertools.count()
    core.self_check = SelfCheck(core.scheduler, stopwatch=lambda: float(next(ticks)))
    core.self_check.glance()
    serve(core, "a")
    core.scheduler._endings.note_broken(ValueError("found while it ran"))  # type: ignore[arg-type]
    core.self_check.glance()
    assert not core.scheduler.broken


def test_what_an_examination_finds_wrong_is_mended_at_its_end() -> None:
    core = make_core(20 * PART_BLOCKS)
    pool = core.scheduler.cache.pools[0]
    pool.allocate()  # a leak
    while core.self_check.due:
        core.step()
    assert core.scheduler.stats.invariant_errors == 1 and not core.scheduler.broken
    assert core.scheduler.cache.pools[0].num_available == 20 * PART_BLOCKS


def test_what_is_known_to_be_broken_is_mended_before_the_next_request_starts() -> None:
    core = make_core()
    serve(core, "a")
    core.scheduler.cache.pools[0].allocate()
    core.scheduler._endings.note_broken(ValueError("found while it ran"))  # type: ignore[arg-type]
    serve(core, "b")
    assert not core.scheduler.broken and core.scheduler.cache.pools[0].num_used == 0
