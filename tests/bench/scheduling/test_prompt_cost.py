"""What the host adds to prompts: every part is measured, and the device's own time is none of them."""

from __future__ import annotations

import time

from quire.bench.scheduling.prompt_cost import PARTS, Door, lines, measure
from quire.sampling.params import SamplingParams


def test_there_is_a_line_with_and_without_the_prefix_cache() -> None:
    found = list(lines(3, 40, 2))
    assert [line["prefix_caching"] for line in found] == [False, True]
    for line in found:
        assert all(line[f"{part}_us"] > 0 for part in PARTS if part != "idle") and line["idle_us"] >= 0
        assert line["total_us"] >= sum(line[f"{part}_us"] for part in PARTS) - 1


def test_the_time_of_the_device_is_not_the_hosts() -> None:
    quick, slow = measure(3, 40, False, 4, 0.0), measure(3, 40, False, 4, 0.2)
    assert min(map(sum, zip(*slow.values(), strict=True))) < 0.1e6
    assert quick.keys() == slow.keys() == set(PARTS)


def test_the_device_computes_one_step_after_another() -> None:
    door = Door(16, 4096, False, 0.05)
    try:
        began = time.perf_counter()
        door.run([[1] * 4096] * 16, SamplingParams(max_tokens=1, ignore_eos=True, seed=1))
        assert time.perf_counter() - began > 4 * 0.05
    finally:
        door.llm.close()
