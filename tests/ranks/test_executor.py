"""An executor over ranks: results, lost steps, transfers and tokens that cross stages, on ranks that are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from quire.errors import EngineDeadError
from quire.executor.kv_hash import PlainKV, drawn_token
from quire.executor.lost_rows import REFUSED
from quire.parallel.collectives import Collectives
from quire.parallel.place import Place
from quire.parallel.threads import QueueLink
from quire.ranks.rank import Pulse
from quire.ranks.threads import ThreadExecutor, start_threads
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import HOST, BlockMove, PlanEntry, RowStart, StepPlan, TableDiff, TransferStart

VOCAB = 10**6
GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4


@pytest.fixture(params=[(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def executor(request: pytest.FixtureRequest) -> Iterator[ThreadExecutor]:
    made = ThreadExecutor(Place.all(*request.param))
    start_threads(made, {"kind": "kv_hash", "num_blocks": 64, "block_size": BLOCK, "num_host_blocks": 16,
                         "vocab_size": VOCAB})
    yield made
    made.close()


def begin(step: int, row: int, prompt: list[int], count: int | None = None, first_block: int = 0) -> StepPlan:
    """A row gets a prompt, of which `count` tokens are computed."""
    blocks = list(range(first_block, first_block + 8))
    count = len(prompt) if count is None else count
    return StepPlan(step, starts=[RowStart(row, prompt, len(prompt), GREEDY, 7, 0)],
                    diffs=[TableDiff(row, 0, 0, blocks)], entries=[PlanEntry(row, 0, count, count == len(prompt))])


def plain(prompt: list[int], count: int) -> list[int]:
    kv, found = PlainKV([None]), list[int]()
    for token in prompt:
        kv.append(token)
    for _ in range(count):
        found.append(drawn_token(kv.state, GREEDY, 7, 0, len(prompt) + len(found), VOCAB))
        kv.append(found[-1])
    return found


def tokens(future: Future[object]) -> list[int]:
    return future.result(30).entries[0].tokens  # type: ignore[attr-defined, no-any-return]


def test_a_sequence_decodes_as_without_ranks(executor: ThreadExecutor) -> None:
    prompt = [5, 9, 2, 7, 1]
    got = tokens(executor.submit(begin(1, 0, prompt)))
    for step in range(6):
        got += tokens(executor.submit(StepPlan(2 + step, entries=[PlanEntry(0, 5 + step, 1, True)])))
    assert got == plain(prompt, 7)


def test_a_sequence_that_gets_its_blocks_while_it_decodes_reads_what_it_wrote(executor: ThreadExecutor) -> None:
    prompt = [5, 9, 2, 7, 1]
    first = begin(1, 0, prompt)
    first.diffs = [TableDiff(0, 0, 0, [3, 1])]
    got = tokens(executor.submit(first))
    for step, start in enumerate(range(5, 25)):
        diffs = [TableDiff(0, 0, start // BLOCK, [40 - start])] if start % BLOCK == 0 else []
        got += tokens(executor.submit(StepPlan(2 + step, diffs=diffs, entries=[PlanEntry(0, start, 1, True)],
                                               decoding=([0], [start]))))
    assert got == plain(prompt, 21)


def test_ranks_are_heard_on_another_core_than_that_of_the_one_that_draws() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if not 2 <= len(cores) <= 8:
        pytest.skip("needs as many ranks as cores")
    executor = ThreadExecutor(Place.all(len(cores), 1))
    start_threads(executor, {"kind": "dummy", "vocab_size": 9})
    try:
        assert os.sched_getaffinity(executor.ranks.native_id or 0) == set(cores[1:])
        assert sorted(os.sched_getaffinity(0)) == cores
    finally:
        executor.close()


def test_a_token_of_a_rows_former_owner_is_not_learned_for_the_new_one(executor: ThreadExecutor) -> None:
    """The former owner is in flight when its row is given away: what it draws belongs to nobody."""
    long = [8, 1, 6, 3, 9, 4, 2, 7, 5]
    first = executor.submit(begin(1, 0, [5, 9, 2]))
    taken = begin(2, 0, long, count=2, first_block=20)
    taken.freed_rows = [0]
    second = executor.submit(taken)
    assert tokens(first) == plain([5, 9, 2], 1)
    assert tokens(second) == []
    assert tokens(executor.submit(StepPlan(3, entries=[PlanEntry(0, 2, 7, True)]))) == plain(long, 1)


def test_a_step_that_fails_on_every_rank_is_lost_alone(executor: ThreadExecutor) -> None:
    prompt = [5, 9, 2, 7, 1]
    executor.submit(begin(1, 0, prompt, first_block=8)).result(30)
    broken = executor.submit(StepPlan(2, entries=[PlanEntry(33, 0, 1, True)]))
    with pytest.raises(Exception, match="row 33 of the request table is empty"):
        broken.result(30)
    later = executor.submit(StepPlan(3, entries=[PlanEntry(0, 5, 1, True), PlanEntry(33, 1, 1, True)])).result(30)
    assert later.entries[0].tokens == plain(prompt, 2)[1:]
    assert later.entries[1].error == REFUSED
    assert executor.failure is None


def test_transfers_are_reported_once_for_all_ranks_and_move_every_part(executor: ThreadExecutor) -> None:
    prompt = [5, 9, 2, 7, 1]
    executor.submit(begin(1, 0, prompt)).result(30)
    out = [BlockMove(0, block, block + 3) for block in range(2)]
    executor.submit(StepPlan(2, transfers=[TransferStart(1, HOST, True, out)])).result(30)
    while not executor.quiet:
        assert executor.arrivals.wait(30)
        executor.arrivals.ring()
    back = [BlockMove(0, block + 40, block + 3) for block in range(2)]
    executor.submit(StepPlan(3, transfers=[TransferStart(2, HOST, False, back)])).result(30)
    moved = begin(4, 1, [*prompt, plain(prompt, 1)[0]], first_block=40)
    moved.entries = [PlanEntry(1, 5, 1, True)]
    assert tokens(executor.submit(moved)) == plain(prompt, 2)[1:]
    while not executor.quiet:
        assert executor.arrivals.wait(30)
        executor.arrivals.ring()
    reports = executor.arrivals.take()
    assert [(r.number, r.num_done, r.finished, r.error) for r in reports if r.finished] == [
        (1, 2, True, None), (2, 2, True, None)]


def test_everything_under_way_fails_when_a_connection_is_cut() -> None:
    executor = ThreadExecutor(Place.all(1, 1))
    start_threads(executor, {"kind": "dummy", "vocab_size": 9, "step_seconds": 0.3})
    rung = threading.Event()
    executor.arrivals.on_ring = rung.set
    under_way = executor.submit(StepPlan(1, transfers=[TransferStart(4, HOST, True, [BlockMove(0, 0, 0)])]))
    executor.ranks.handles[0].link.cut()
    with pytest.raises(EngineDeadError, match="rank 0 of 1"):
        under_way.result(30)
    with pytest.raises(EngineDeadError):
        executor.submit(StepPlan(2)).result(30)
    assert rung.wait(30) and executor.failure is not None
    assert [(r.number, r.finished) for r in executor.arrivals.take()] == [(4, True)]


def test_the_time_of_a_step_leaves_out_waits_for_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its lane is full, and shows no bubbles. Steps that were launched ahead do not lie over each other."""
    now, link, other = [0], QueueLink(), QueueLink()
    monkeypatch.setattr("quire.ranks.rank.time.monotonic_ns", lambda: now[0])
    pulse, talk = Pulse(None, lambda: None), Collectives(None, link, other)  # type: ignore[arg-type]
    for number, began, ended, waited in ((1, 1, 5, 3), (2, 2, 8, 1), (3, 9, 10, 0)):
        now[0], link.waited_ns = ended * 10**9, link.waited_ns + waited * 10**9
        pulse.step_over(number, 10 + number, began * 10**9, talk)
    assert list(pulse.recent) == [(11, 4.0, 5.0), (12, 6.0, 8.0), (13, 9.0, 10.0)]
    assert (pulse.steps, pulse.busy_ns, pulse.waited_ns) == (3, 8 * 10**9, 4 * 10**9)
