"""Small engines to look at: a step for every stage keeps a pipeline busy; drafts that are right save steps."""

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


def test_drafts_are_shown_with_how_many_were_right_and_save_steps() -> None:
    steps: dict[int, int] = {}
    judged: list[tuple[int, int]] = []
    trees: list[tuple[list[int], list[int]]] = []
    ends: list[dict[str, object]] = []

    async def watch() -> None:
        async for frame in play(SCENARIOS["speculation"], 1000.0):
            if isinstance(frame, dict):
                ends.extend(frame["end"])
                continue
            told = json.loads(frame)
            for step in told.get("steps", []):
                engine = told.get("engine", 0)
                steps[engine] = steps.get(engine, 0) + 1
                for _, _, _, _, drafts, accepted, *tree in step["entries"]:
                    if engine == 1 and drafts:
                        judged.append((drafts, accepted))
                    elif drafts and tree[0]:
                        trees.append((tree[0], tree[1]))
                        assert accepted == len(tree[1])

    asyncio.run(watch())
    assert steps[2] < steps[1] < 0.75 * steps[0]
    assert {drafts for drafts, _ in judged} <= set(range(1, 7)) and all(0 <= kept <= drafts for drafts, kept in judged)
    share = sum(kept for _, kept in judged) / sum(drafts for drafts, _ in judged)
    assert 0.1 < share < 0.3  # a half at the first, 1 of 64 at the sixth
    assert len(trees) > 20 and any(kept and kept[0] > 0 for _, kept in trees)
    for parents, kept in trees:
        assert [parents[node] for node in kept] == [-1, *kept][: len(kept)]  # a branch from the text on
    assert len(ends) == 3
