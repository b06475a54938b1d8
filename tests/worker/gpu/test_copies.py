"""Copies start beside a running step unless the two touch the same blocks."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.scheduler.plan import BlockCopy, PlanEntry, StepPlan
from quire.worker.gpu.copies import CopyStream, collide
from tests.worker.gpu.engines import QWEN3, make_engine

TABLES = [np.array([[4, 5, 6, 0], [7, 8, 0, 0]], np.int32)]
STEP = [PlanEntry(0, 17, 1, sample=True), PlanEntry(1, 4, 9, sample=True)]
"""With blocks of 8, row 0 reads 4, 5, 6 and writes 6, row 1 writes 7 and 8."""


@pytest.mark.parametrize(
    ("copy", "collides"),
    [
        (BlockCopy(0, 4, 9), False),  # read by the step, copied to a block of nobody's: both only look
        (BlockCopy(0, 6, 9), True),
        (BlockCopy(0, 7, 9), True),
        (BlockCopy(0, 5, 9), False),
        (BlockCopy(0, 9, 5), True),
        (BlockCopy(0, 1, 4), True),
        (BlockCopy(1, 1, 4), False),  # another group's block of that number
    ],
)
def test_who_must_wait(copy: BlockCopy, collides: bool) -> None:
    assert collide([copy], STEP, TABLES, 8) is collides


def test_only_steps_in_flight_are_waited_for() -> None:
    table: Any = SimpleNamespace(host_tables=TABLES, block_size=8)
    made: list[Any] = []
    cache: Any = SimpleNamespace(copy=made.append)
    stream = CopyStream(torch.device("cpu"), cache, table)
    busy = [BlockCopy(0, 1, 4)]
    assert stream.run(busy)
    first: Future[Any] = Future()
    stream.launched(StepPlan(0, entries=STEP), first)
    assert not stream.run(busy)
    assert stream.run([BlockCopy(0, 1, 9)])
    stream.launched(StepPlan(1, entries=STEP), Future())
    assert not stream.run([BlockCopy(0, 1, 9)])  # two steps: what the older one touches is not known
    first.set_result(None)
    assert stream.run([BlockCopy(0, 1, 9)])
    assert len(made) == 5


def test_copies_wait_once_for_a_step_that_failed_while_it_was_launched() -> None:
    """A part of it may be running, and no future tells what it touches."""
    cache: Any = SimpleNamespace(copy=lambda copies: None)
    stream = CopyStream(torch.device("cpu"), cache, SimpleNamespace(host_tables=TABLES, block_size=8))  # type: ignore[arg-type]
    stream.failed()
    assert not stream.run([BlockCopy(0, 1, 9)])
    assert stream.run([BlockCopy(0, 1, 9)])


def test_copies_wait_for_what_no_step_speaks_of() -> None:
    cache: Any = SimpleNamespace(copy=lambda copies: None)
    stream = CopyStream(torch.device("cpu"), cache, SimpleNamespace(host_tables=TABLES, block_size=8))  # type: ignore[arg-type]
    stream.more_launched()
    assert not stream.run([BlockCopy(0, 1, 9)])
    assert stream.run([BlockCopy(0, 1, 9)])


def test_the_worker_knows_the_tables_that_its_plans_made() -> None:
    from quire.sampling.params import SamplingParams
    from quire.scheduler.request import Request

    core = make_engine(QWEN3, device=True)
    request = Request("r", list(range(20)), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), 1, 0.0)
    core.add(request)
    for _ in range(4):
        core.step()
    worker: Any = core.executor._worker  # type: ignore[attr-defined]
    seq = request.sequences[0]
    held = worker.table.tables[0][seq.row].tolist()
    assert worker.table.host_tables[0][seq.row].tolist() == held and any(held)
    core.close()


def test_steps_wait_for_copies_and_copies_only_for_what_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of waits on a GPU, told by streams that only take notes."""
    notes: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            notes.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            notes.append(f"{self.name} waits for event of {event.stream}")

        def __enter__(self) -> None:
            notes.append(f"on {self.name}")

        def __exit__(self, *_: object) -> None:
            notes.append(f"off {self.name}")

    class Event:
        stream = ""

        def record(self, stream: Stream) -> None:
            self.stream = stream.name

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("steps"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    cache: Any = SimpleNamespace(copy=lambda copies: notes.append("copy"))
    stream = CopyStream(torch.device("cpu"), cache, SimpleNamespace(host_tables=TABLES, block_size=8))  # type: ignore[arg-type]
    stream._stream = Stream("copies")  # type: ignore[assignment]
    stream.launched(StepPlan(0, entries=STEP), Future())
    made = ["on copies", "copy", "off copies", "steps waits for event of copies"]
    stream.run([BlockCopy(0, 1, 9)])
    assert notes == made
    notes.clear()
    stream.run([BlockCopy(0, 6, 1)])
    assert notes == ["copies waits for steps", *made]
