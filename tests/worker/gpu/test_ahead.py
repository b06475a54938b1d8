"""Drafts of a head that are launched before the host knows which of those before them were accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.plan import BlockCopy, PlanEntry, RowStart, StepPlan, TableDiff
from quire.scheduler.request import Request
from quire.worker.gpu.ahead import DraftsAhead
from quire.worker.gpu.copies import CopyStream
from quire.worker.gpu.spans import SpanRunner
from quire.worker.gpu.table import DeviceTable
from tests.worker.gpu.drafting import accepted, looping
from tests.worker.gpu.engines import make_engine, run
from tests.worker.gpu.head_cases import TARGETS, asked, faint

Drafts = dict[tuple[int, ...], tuple[int, ...]]


def simple(count: int = 6, **more: Any) -> list[Request]:
    """Requests of different lengths whose draws need no more than a temperature."""
    return [Request(f"s{i}", [7 + i, 8, 9, 10 + i] * 4, SamplingParams(
        temperature=0.0 if i % 3 else 0.7, max_tokens=14 + 9 * i, ignore_eos=True, **more), seed=i, arrival_time=0.0)
        for i in range(count)]


def observed(core: Any) -> tuple[Drafts, list[int], list[int]]:
    """Fill up while an engine runs: drafts by text, passes launched by whoever was asked to propose, and drafts that
    were there when an entry asked for some."""
    worker = core.executor._worker
    drafter, table, runner = worker._runner.drafter, worker.table, worker._runner.drafter.runner
    propose, launch, take = drafter.propose, runner.launch, drafter._ahead.take
    seen: Drafts = {}
    passes: list[int] = []
    taken: list[int] = []

    def proposing(entries: Sequence[PlanEntry], rows: Any) -> Any:
        passes.append(0)
        filled, drafted = propose(entries, rows)
        for entry, tokens in zip(entries, drafted.by_entry(), strict=True):
            text = table.info(entry.row).state.seed, *table.tokens[entry.row, : entry.start + 1].tolist()
            assert seen.setdefault(text, tokens) == tokens, "two proposals for one text differ"
        return filled, drafted

    def launching(entries: list[PlanEntry]) -> None:
        passes[-1] += 1
        launch(entries)

    def taking(entry: PlanEntry, start: int) -> int:
        taken.append(take(entry, start))
        return taken[-1]

    drafter.propose, runner.launch, drafter._ahead.take = proposing, launching, taking
    return seen, passes, taken


def check_drafts_ahead(engine: Callable[[], Any]) -> tuple[Drafts, Drafts]:
    """Tokens of one engine that drafts ahead and one that does not are the same; returns the drafts of both."""
    found: list[tuple[Any, Drafts]] = []
    for ahead in (True, False):
        core = engine()
        assert core.scheduler.speculator is not None and core.scheduler.speculator.drafts_ahead
        core.scheduler.speculator.drafts_ahead = ahead
        seen, passes, taken = observed(core)
        found.append((run(core, simple()), seen))
        kept, offered = accepted(core)
        assert 0 < kept < offered
        # But for the first of each sequence, and when one of them has joined.
        assert (passes.count(0) > 0.6 * len(passes)) is ahead
        assert (sum(map(bool, taken)) > 0.6 * len(taken)) is ahead
        core.close()
    assert found[0][0] == found[1][0]
    return found[0][1], found[1][1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_drafts_made_ahead_are_those_that_would_be_made_when_asked_for(kind: str) -> None:
    ahead, asked_for = check_drafts_ahead(
        lambda: make_engine(TARGETS[kind], device=True, depth=2, budget=120, **asked(kind)))
    assert ahead == asked_for and len(ahead) > 30


@pytest.mark.parametrize(("options", "requests"), [
    ({"num_blocks": 16, "budget": 30}, simple),
    ({"block_size": 4, "num_blocks": 60, "budget": 120}, lambda: simple(stop_token_ids=list(range(0, 131, 7)))),
    ({"budget": 120}, lambda: simple(logprobs=2)),
    ({"budget": 120}, lambda: [*looping(6, max_tokens=6), *simple()]),
], ids=["short memory", "sudden ends", "logprobs", "all kinds"])
def test_tokens_are_those_without_drafts(options: dict[str, Any], requests: Any) -> None:
    found = []
    for more in ({"weights": faint}, asked("eagle3", 4)):
        core = make_engine(TARGETS["eagle3"], device=True, depth=2, **options, **more)
        if len(more) > 1:
            _, _, taken = observed(core)
        found.append(run(core, requests()))
        core.scheduler.check()
        core.close()
    assert found[0] == found[1]
    assert any(taken)


def test_drafts_ahead_that_fail_cost_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found, failures = [], []
    for broken in (False, True):
        core = make_engine(TARGETS["eagle"], device=True, depth=2, budget=120, **asked("eagle"))
        if broken:
            def fail(*_: Any) -> bool:
                failures.append(1)
                raise RuntimeError("no memory for drafts")

            monkeypatch.setattr(core.executor._worker._runner, "draft_on", fail)
        found.append(run(core, simple()))
        core.close()
    assert found[0] == found[1] and failures


def test_draws_that_read_their_text_are_not_drafted_ahead() -> None:
    core = make_engine(TARGETS["eagle"], device=True, depth=2, budget=120, **asked("eagle"))
    _, passes, taken = observed(core)
    run(core, simple(repetition_penalty=1.2))
    assert taken and not any(taken) and 0 not in passes
    core.close()


def test_a_row_has_room_for_as_many_tokens_as_its_own_blocks_hold() -> None:
    table = DeviceTable(2, 40, 8, 1, 100, torch.device("cpu"))
    start = RowStart(1, [1, 2, 3], 3, SamplingParams(), 0, 0)
    table.apply(StepPlan(1, starts=[start], diffs=[TableDiff(1, 0, 0, [4, 5])]))
    assert table.room(0, 1) == 16 and table.room(0, 0) == 0
    table.apply(StepPlan(2, diffs=[TableDiff(1, 0, 2, [6, 7, 8])]))
    assert table.room(0, 1) == 40
    table.apply(StepPlan(3, freed_rows=[1], starts=[start], diffs=[TableDiff(1, 0, 0, [4])]))
    assert table.room(0, 1) == 8


def test_drafts_ahead_hold_until_their_sequence_goes_on() -> None:
    launched = []
    runner: Any = SimpleNamespace(draft_after=lambda chains, passes: launched.append((chains.tolist(), passes)) or True,
                                  asks_more=lambda rows: False)
    ahead = DraftsAhead(runner, SimpleNamespace(room=lambda group, row: 30), 0)  # type: ignore[arg-type]
    judged: Any = SimpleNamespace(counts=[3, 0, 2, 4, 3], starts=[(0, 10), (1, 5), (2, 20), (3, 3), (4, 24)],
                                  came_with_plan={3})
    entries = [PlanEntry(row, 25, 4, True, device_drafts=3) for row in (0, 2, 4)]
    started = RowStart(2, [1], 1, SamplingParams(), 0, 0)

    assert ahead.launch(judged) and not ahead.launch(
        SimpleNamespace(counts=[3], starts=[(4, 25)], came_with_plan=set()))  # type: ignore[arg-type]
    assert ahead.launch(judged)
    ahead.keep(StepPlan(1, starts=[started], entries=entries[:2]))
    assert [ahead.take(entry, start) for entry, start in zip(entries, (10, 20, 24), strict=True)] == [3, 0, 3]
    assert ahead.launch(judged)
    ahead.keep(StepPlan(1, entries=entries))
    assert [ahead.take(entry, start) for entry, start in zip(entries, (10, 19, 24), strict=True)] == [3, 0, 3]
    assert ahead.launch(judged)
    ahead.keep(StepPlan(1, entries=[PlanEntry(0, 25, 1, True), PlanEntry(7, 0, 9, False)]))
    ahead.keep(StepPlan(2, entries=entries))
    assert [ahead.take(entry, start) for entry, start in zip(entries, (10, 20, 24), strict=True)] == [0, 3, 3]
    assert not any(ahead.take(entry, start) for entry, start in zip(entries, (10, 20, 24), strict=True))
    assert launched[0] == ([[0, 10, 0, 3], [2, 20, 5, 2], [4, 24, 13, 3]], 3)


def test_copies_wait_once_for_drafts_that_were_launched_behind_a_step() -> None:
    cache: Any = SimpleNamespace(copy=lambda copies: None)
    stream = CopyStream(torch.device("cpu"), cache, SimpleNamespace(host_tables=[], block_size=8))  # type: ignore[arg-type]
    copies = [BlockCopy(0, 1, 4)]
    assert stream.run(copies)
    stream.more_launched()
    assert not stream.run(copies)
    assert stream.run(copies)


def test_more_chains_than_a_captured_step_holds_are_not_drafted_ahead() -> None:
    core = make_engine(TARGETS["eagle"], device=True, **asked("eagle"))
    worker: Any = core.executor._worker  # type: ignore[attr-defined]
    runner: SpanRunner = worker._runner.drafter.runner
    assert not runner.draft_after(np.zeros((1 + max(runner._wide_rungs), 4), np.int32), 3)
    core.close()
