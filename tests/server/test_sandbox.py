"""Small engines to look at: a step for every stage keeps a pipeline busy, a single step does not."""

from __future__ import annotations

import asyncio
import json

from quire.server.view.scenarios import SCENARIOS, play


def test_two_steps_in_flight_keep_two_stages_busy() -> None:
    times: dict[tuple[int, int], list[tuple[float, float]]] = {}

    async def watch() -> None:
        async for frame in play(SCENARIOS["two-stages"], 1000.0):
            if isinstance(frame, bytes):
                told = json.loads(frame)
                if "facts" in told:
                    assert told["facts"]["num_stages"] == 2
                for stage, _, began, ended in told.get("stages", []):
                    times.setdefault((told.get("engine", 0), stage), []).append((began, ended))

    asyncio.run(watch())
    busy = {key: sum(ended - began for began, ended in found) / (found[-1][1] - found[0][0])
            for key, found in times.items()}
    assert set(busy) == {(engine, stage) for engine in range(2) for stage in range(2)}
    assert max(busy[0, 0], busy[0, 1]) < 0.55  # one waits while the other computes
    assert min(busy[1, 0], busy[1, 1]) > 0.8
