"""What computes for long at a grammar goes after the engine's own work; what is quick does not, nor waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire import AsyncLLM, SamplingParams, StructuredOutputs
from quire.config import EngineConfig
from quire.engine.assembly.engine import build_engine
from quire.engine.process.doorbell import Doorbell
from quire.scheduler.request import Request
from quire.structured.compile_queue import CompileQueue
from quire.structured.isolated import IsolatedGrammars
from tests.async_engines import last, run, until
from tests.structured.test_isolated import LARGE, _jobs, grammars_of, settle

QUICK: dict[str, Any] = {"choice": ["left", "right"]}
BASE = os.getpriority(os.PRIO_PROCESS, 0)
"""Where everything begins: tests may be run by `nice`."""


def nices(pid: int) -> list[int]:
    """Of all threads of a process; none where it has gone."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.append(int(task.read_text().rpartition(")")[2].split()[16]))
        except OSError:
            continue
    return sorted(found)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def grammars(tiny_folder: Path) -> Iterator[IsolatedGrammars]:
    found = grammars_of(tiny_folder, token_seconds=30.0)
    yield found
    found.close()


def test_a_long_compilation_steps_down_and_what_follows_a_quick_one_does_not(grammars: IsolatedGrammars) -> None:
    # A second grammar of a tenant that has one under way is not in a hurry from the start.
    claims = [grammars.submit(StructuredOutputs(json={**LARGE, "title": title})) for title in "ab"]
    for claim in claims:
        settle(grammars, lambda claim=claim: claim._home._job.link._pid > 0)  # type: ignore[misc]
        pid = claim._home._job.link._pid
        settle(grammars, lambda pid=pid: nices(pid) == [BASE, 19])  # type: ignore[misc]
        claim.release()
    quick = grammars.submit(StructuredOutputs(**QUICK))
    settle(grammars, lambda: quick.settled)
    cell = quick.result().start(frozenset())._cell
    settle(grammars, lambda: cell.link._pid > 0)
    assert nices(cell.link._pid) == [BASE, BASE], "its masks are made as soon as they are asked for"
    assert not cell.slow
    quick.release()


def test_one_tenant_s_grammars_are_in_a_hurry_one_at_a_time() -> None:
    queue = CompileQueue(4, 30.0, lambda: 0.0)
    jobs, _ = _jobs(queue, "a", "a", "b", "a")
    assert [job.link.low for job in jobs] == [False, True, False, True]  # type: ignore[union-attr]
    for job in jobs:
        queue.remove(job)
    (later,), _ = _jobs(queue, "a")
    assert not later.link.low  # type: ignore[union-attr]


def test_a_cell_that_is_slow_at_a_mask_steps_down_and_others_leave_it(grammars: IsolatedGrammars) -> None:
    slow = grammars.submit(StructuredOutputs(regex="((.?){100}){100}"))
    settle(grammars, lambda: bool(slow._sequences))
    cell = slow._sequences[0]._cell
    settle(grammars, lambda: cell.link._pid > 0)
    settle(grammars, lambda: cell.slow and 19 in nices(cell.link._pid))
    other = grammars.submit(StructuredOutputs(regex="((.?){100}){100}"))  # the same grammar, another request
    assert other._sequences[0]._cell is not cell
    for claim in (slow, other):
        claim.release()


def test_a_step_does_not_wait_for_a_grammar_where_its_caller_waits_for_messages_too(tiny_folder: Path) -> None:
    options: dict[str, Any] = {"model": str(tiny_folder), "load_format": "dummy", "executor": "dummy", "num_threads": 1,
                               "device": "cpu"}
    engine = build_engine(EngineConfig.create(**options), progress=False, clock=time.monotonic, options=options)
    context: Any = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind("inproc://priority")
    try:
        core = engine.core
        bell = Doorbell(inbox, core.executor.arrivals, core.scheduler.compiling.isolated)
        params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(**QUICK))
        core.add(Request("r", [1, 2], params, seed=1, arrival_time=0.0, eos_token_ids=frozenset({2})))
        waits: list[float] = []
        core.scheduler.compiling.wait = waits.append  # type: ignore[method-assign]
        updates: list[Any] = []
        until = time.monotonic() + 90.0
        while not any(update.sequence.finish_reason for update in updates):
            assert time.monotonic() < until
            updates += core.step(wait_for_kv=False)
            if core.stalled_for is not None:
                # Told by the grammar's process: by itself it would wait for longer than this test may take.
                assert not bell.wait(120_000)
        assert not waits
    finally:
        engine.core.close()
        inbox.close(0)
        context.term()


def test_the_nursery_is_there_before_it_is_asked_for_and_gives_way_to_who_asks_sooner(tiny_folder: Path) -> None:
    async def nursery_of(llm: AsyncLLM) -> list[int]:
        assert llm.engine_pid is not None
        return [pid for pid in children(llm.engine_pid)
                if b"grammar_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    async def job(llm: AsyncLLM) -> None:
        await until(lambda: nursery_of(llm), 60.0)
        (pid,) = await nursery_of(llm)
        await until(lambda: nices(pid)[-1] > BASE, 60.0)
        params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(**QUICK))
        assert (await last(llm.generate("x", params))).outputs[0].text in QUICK["choice"]
        found = await nursery_of(llm)
        assert len(found) == 1 and nices(found[0])[0] == BASE
        await last(llm.generate("x", params))
        assert await nursery_of(llm) == found, "it is started once"

    options: dict[str, Any] = {"load_format": "dummy", "executor": "dummy"}
    run(job, tiny_folder, grammar_warm_start=True, **options)
