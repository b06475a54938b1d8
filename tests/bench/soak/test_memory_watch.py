"""Growth of memory is judged after warm-up, by medians, and for the process that is there now."""

from __future__ import annotations

import asyncio
import os

from quire.bench.soak.memory import _gauges
from quire.bench.soak.memory_watch import MemoryCurve, resident, watch_memory


def curve(samples: list[int]) -> MemoryCurve:
    found = MemoryCurve()
    for size in samples:
        found.add(1, size)
    return found


def test_what_a_process_takes_while_it_warms_up_is_no_growth() -> None:
    assert curve([10 * i for i in range(25)] + [1000] * 75).growth(0.25) == 0.0


def test_a_leak_is_seen_and_single_peaks_are_not() -> None:
    leak = curve([1000 + i for i in range(100)]).growth(0.25)
    assert leak is not None
    assert leak > 0.05
    assert curve([1000, 5000, 1000, 1000] * 25).growth(0.25) == 0.0


def test_a_process_that_was_replaced_begins_anew() -> None:
    found = curve([10**6] * 50)
    found.add(2, 1000)
    assert found.samples == [1000]
    assert found.growth(0.25) is None


def test_processes_are_sampled_while_they_live() -> None:
    async def sampled() -> dict[str, MemoryCurve]:
        curves: dict[str, MemoryCurve] = {}
        task = asyncio.create_task(watch_memory({"this": os.getpid, "none": lambda: None}, curves, 0.0))
        while len(curves.get("this", MemoryCurve()).samples) < 3:
            await asyncio.sleep(0)
        task.cancel()
        return curves

    curves = asyncio.run(sampled())
    assert set(curves) == {"this"}
    assert curves["this"].summary(0.0)["end_mb"] > 1.0
    assert resident(2**30) == 0


def test_gauges_are_read_by_name() -> None:
    assert _gauges('# HELP quire:a of it\nquire:kv_blocks_used{model_name="m x"} 3.0\nup 1\n') == {
        "kv_blocks_used": 3.0, "up": 1.0}
