"""Groups whose leader ends from outside, and requests that nothing can be planned for."""

from __future__ import annotations

import pytest

from quire.engine.core import EngineCore
from quire.executor.dummy import DummyExecutor
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.limits import Limits
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.request import FinishReason, Request, Status
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import expected_tokens, make_request, make_scheduler


def make_core(depth: int = 1) -> EngineCore:
    return EngineCore(Scheduler(Limits(4, 8, 512), KVCacheManager(64, 4)), DummyExecutor(), depth)


def step_until_three_tokens(core: EngineCore, group: Request) -> None:
    while any(seq.num_output_tokens < 3 for seq in group.sequences):
        core.step()


def preempt(core: EngineCore, group: Request) -> None:
    """Preempt the group by recompute, with nothing left of its KV in the cache."""
    while core.scheduler.num_in_flight:
        core._collect()
    core.scheduler.take_updates()
    core.scheduler._giving_way.requeue(group, PreemptionReason.MEMORY, may_move=False)
    core.scheduler.cache.drop_cached()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("ended", [[0], [0, 1], [1], [0, 2]])
def test_siblings_go_on_when_the_front_door_ends_the_leader_that_computes_the_prompt_again(
        depth: int, steps: int, ended: list[int]) -> None:
    core = make_core(depth)
    group = make_request("group", list(range(30)), 12, n=3, seed=5)
    core.add(group)
    step_until_three_tokens(core, group)
    preempt(core, group)
    for _ in range(steps):
        core.step()
    for index in ended:
        core.finish(group.sequences[index], FinishReason.STOP, "end")
        core.scheduler.check()
    for _ in range(200):
        if not core.has_work:
            break
        core.step()
        core.scheduler.check()
    assert group.status is Status.FINISHED and core.scheduler.stats.requests_finished == 1
    for seq in group.sequences:
        assert seq.error is None
        if seq.index not in ended:
            assert seq.tokens[30:] == expected_tokens(group, 512, seq.index)
    assert core.scheduler.cache.pools[0].num_used == 0


def test_a_leader_that_ends_before_it_drew_anything_leaves_the_prompt_to_its_siblings() -> None:
    core = make_core()
    group = make_request("group", list(range(30)), 5, n=3, seed=6)
    core.add(group)
    core.step()
    core.finish(group.sequences[0], FinishReason.STOP, "end")
    while core.has_work:
        core.step()
        core.scheduler.check()
    for seq in group.sequences[1:]:
        assert seq.error is None and seq.tokens[30:] == expected_tokens(group, 512, seq.index)


def test_a_whole_group_that_is_stuck_ends_and_nobody_else_does() -> None:
    """`fail_stuck` used to end each of a group's sequences after the first had ended them all: a KeyError."""
    core = make_core()
    group = make_request("group", list(range(30)), 5, n=3, seed=5)
    core.add(group)
    core.scheduler.fail_stuck()
    assert [seq.error for seq in group.sequences] == ["the KV pool has no room left for this request"] * 3
    assert not core.scheduler.running and not len(core.scheduler.waiting)
    core.scheduler.check()


def test_the_one_that_runs_and_cannot_go_on_is_ended_not_the_one_that_waits() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=1)
    core = EngineCore(scheduler, DummyExecutor())
    running, waiting = make_request("running", list(range(8)), 4), make_request("waiting", [1, 2, 3], 4, seed=9)
    core.add(running)
    core.step()
    core.add(waiting)
    # However it came to that: it runs, lacks nothing, and no result is due.
    running.sequences[0].held_at = running.sequences[0].num_computed
    for _ in range(20):
        core.step()
        scheduler.check()
    assert running.sequences[0].error is not None
    assert waiting.sequences[0].error is None and waiting.sequences[0].tokens[3:] == expected_tokens(waiting, 99)
