"""The trace of an engine: every step, who ran, copies, preemptions and blocks, in the format Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.engine.trace import StepTrace
from tests.scheduler.simulation import SimulatedExecutor, SimulatedWorker, make_request, make_scheduler


def core(**options: Any) -> EngineCore:
    scheduler = make_scheduler(**options)
    return EngineCore(scheduler, SimulatedExecutor(SimulatedWorker.beside(scheduler)))


def test_the_trace_tells_the_whole_story(tmp_path: Path) -> None:
    engine = core(num_blocks=8, block_size=4, host_blocks=40, mode="swap", caching=False)
    path = tmp_path / "trace.json"
    with StepTrace(engine, path):
        for i in range(3):
            engine.add(make_request(f"r{i}", [100 * i + j for j in range(5)], 14))
        while engine.has_work:
            engine.step()
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events
             if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == 2}
    assert set(lanes.values()) == {"r0[0]", "r1[0]", "r2[0]"}
    stats = engine.scheduler.stats
    steps = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (1, 1)]
    assert [event["name"] for event in steps] == [f"step {i + 1}" for i in range(stats.steps)]
    assert all(event["dur"] >= 0 for event in steps)
    ran: dict[str, int] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == 2:
            ran[lanes[event["tid"]]] = ran.get(lanes[event["tid"]], 0) + event["args"]["tokens"]
    # Every token but the last is computed once: who comes back from the host goes on where it was.
    assert sum(ran.values()) == 3 * 18
    preempted = [event for event in events if event["ph"] == "i"]
    assert len(preempted) == stats.preemptions > 0
    assert {event["args"]["reason"] for event in preempted} == {"memory"}
    assert {event["args"]["KV"] for event in preempted} <= {"moved to the host", "computed again"}
    blocks = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"]
    assert all(sum(counts.values()) == 8 for counts in blocks) and max(c["used"] for c in blocks) == 8
    assert engine.trace is None and engine.scheduler.on_preempt is None


def test_a_path_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    engine = core()
    with pytest.raises(OSError):
        StepTrace(engine, tmp_path / "missing" / "trace.json")
    assert engine.trace is None


def test_the_file_is_whole_whenever_the_engine_is_idle_and_grows_with_the_next_run(tmp_path: Path) -> None:
    engine, path = core(), tmp_path / "trace.json"
    trace = StepTrace(engine, path)
    counts = [len(json.loads(path.read_text())["traceEvents"])]
    for name in ("a", "b"):
        engine.add(make_request(name, [1, 2, 3], 4))
        while engine.has_work:
            engine.step()
        counts.append(len(json.loads(path.read_text())["traceEvents"]))
    assert counts[0] < counts[1] < counts[2] and not trace._events
    trace.close()
    assert len(json.loads(path.read_text())["traceEvents"]) == counts[2]
