"""The engine's frames over HTTP: for many readers, slow ones and gone ones, and across a restart of the engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.async_llm import AsyncLLM
from quire.server.access.places import Place
from quire.server.app import App
from quire.server.view.engine_view import Watcher
from tests.server.scripted import running


@pytest.fixture(scope="module")
def live(tiny: Path) -> Iterator[tuple[str, App]]:
    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), executor="dummy", load_format="dummy", device="cpu", num_threads=1,
                                    num_kv_blocks=64, max_model_len=512, swap_space=0.001, preemption_mode="swap")

    with running(start) as found:
        yield found


def complete(address: str, prompt: str = "Hello", **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, **fields}
    assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 200


def frames(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_a_snapshot_is_a_full_frame(live: tuple[str, App]) -> None:
    address, _ = live
    complete(address)
    frame = httpx.get(f"{address}/v1/engine/snapshot", timeout=30).json()
    assert frame["full"] and frame["facts"]["num_blocks"] == 64 and frame["facts"]["num_host_blocks"] > 0
    assert frame["totals"]["requests_finished"] >= 1


def test_every_reader_gets_a_full_frame_first_and_then_what_changes(live: tuple[str, App]) -> None:
    address, _ = live
    with httpx.Client(timeout=30) as client, client.stream("GET", f"{address}/v1/engine/events") as first:
        ours = frames(first)
        assert next(ours)["full"]
        with httpx.Client(timeout=30) as other, other.stream("GET", f"{address}/v1/engine/events") as second:
            theirs = frames(second)
            assert next(theirs)["full"]
            complete(address, "A prompt of more than one block, which is why it can be cached. " * 2)
            assert any(block[2] for block in next(frame for frame in theirs if frame.get("steps"))["blocks"][0])
        assert next(frame for frame in ours if frame.get("steps"))["totals"]["steps"] > 0


def test_requests_under_pressure_are_seen_on_the_host(live: tuple[str, App]) -> None:
    address, _ = live
    with httpx.Client(timeout=60) as client, client.stream("GET", f"{address}/v1/engine/events") as response:
        found = frames(response)
        next(found)
        complete(address, prompt=[f"{number} " * 60 for number in range(8)], max_tokens=200)  # type: ignore[arg-type]
        moved, why = 0, set()
        for frame in found:
            for step in frame.get("steps", []):
                moved += step["moved_out"]
                why |= {reason for _, reason, _ in step["preempted"]}
            if not frame.get("num_running"):
                break
    assert frame["totals"]["preemptions"] > 0
    assert not why or why == {"memory"}
    assert moved <= frame["totals"]["swap_blocks_out"] + frame["totals"]["offloaded_blocks"]


def test_no_more_than_sixteen_may_watch(live: tuple[str, App]) -> None:
    address, _ = live
    with httpx.Client(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
        open_ones = [client.send(client.build_request("GET", f"{address}/v1/engine/events"), stream=True)
                     for _ in range(16)]
        refused = client.get(f"{address}/v1/engine/events")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_watchers"
        for response in open_ones:
            assert next(frames(response))["full"]
            response.close()
    deadline = time.monotonic() + 60
    while httpx.get(f"{address}/v1/engine/snapshot", timeout=30).status_code != 200:
        assert time.monotonic() < deadline  # those who have gone make room


def test_a_scenario_that_is_none_is_refused_by_name(live: tuple[str, App]) -> None:
    address, _ = live
    for body, field in (({"scenario": "nothing"}, "scenario"), ({"scenario": "samples", "speed": 0}, "speed"),
                        ({"scenario": "samples", "volume": 1}, "volume")):
        answer = httpx.post(f"{address}/v1/engine/scenarios", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_slow_reader_starts_over_instead_of_piling_up_frames() -> None:
    watcher = Watcher(Place(None))
    assert not watcher.take(b"change", False)  # it knows nothing yet
    assert watcher.take(b"full", True)
    while watcher.take(b"change", False):
        assert len(watcher.pending) < 100
    assert not watcher.pending and not watcher.take(b"change", False)
    assert watcher.take(b"full again", True) and list(watcher.pending) == [(0, b"full again")]


def test_full_frames_of_one_engine_leave_those_of_another() -> None:
    watcher = Watcher(Place(None))
    assert watcher.take(b"full 0", True, 0) and not watcher.take(b"change 1", False, 1)
    assert watcher.take(b"full 1", True, 1) and watcher.take(b"change 0", False, 0)
    assert watcher.take(b"full 1 again", True, 1)
    assert list(watcher.pending) == [(0, b"full 0"), (0, b"change 0"), (1, b"full 1 again")]


def test_a_restarted_engine_is_watched_again_and_a_closing_server_lets_go(tiny: Path) -> None:
    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), executor="dummy", load_format="dummy", device="cpu", num_threads=1,
                                    num_kv_blocks=64)

    # `running` waits for a minute: the stream that is still open does not hold the end up.
    with running(start, drain_timeout=600.0) as (address, app):
        client = httpx.Client(timeout=60)
        response = client.send(client.build_request("GET", f"{address}/v1/engine/events"), stream=True)
        found = frames(response)
        assert next(found)["full"]
        os.kill(app.service.engine.engine_pid, signal.SIGKILL)
        assert next(frame for frame in found if frame.get("full"))["totals"]["steps"] == 0
    response.close()
    client.close()
