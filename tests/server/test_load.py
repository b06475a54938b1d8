"""Many streams at once, and a soak of mixed requests with hang-ups, bad input and killed engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire.bench.serving.http_client import Reply, ask
from quire.bench.serving.served import served
from quire.bench.soak.command import soak

INSTANT = {"executor": "dummy", "load_format": "dummy", "device": "cpu"}


def test_five_hundred_streams_at_once(tiny: Path) -> None:
    async def main() -> list[Reply]:
        engine = {**INSTANT, "model": str(tiny), "max_waiting_requests": 500}
        async with served({}, engine) as (address, app, _):
            body = {"prompt": "x", "max_tokens": 20, "stream": True, "ignore_eos": True,
                    "stream_options": {"include_usage": True}}
            replies = await asyncio.gather(*[ask(address, "/v1/completions", body) for _ in range(500)])
            assert not app.service.active
            return replies

    replies = asyncio.run(main())
    assert all(reply.status == 200 and reply.complete for reply in replies)
    assert all(reply.events()[-1]["usage"]["completion_tokens"] == 20 for reply in replies)


def test_a_full_queue_says_429_and_when_to_come_back(tiny: Path) -> None:
    async def main() -> list[Reply]:
        engine = {"model": str(tiny), "load_format": "dummy", "device": "cpu", "num_threads": 1, "max_num_seqs": 1,
                  "max_waiting_requests": 2}
        async with served({}, engine) as (address, _, _engine):
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
            return await asyncio.gather(*[ask(address, "/v1/completions", body) for _ in range(12)])

    replies = asyncio.run(main())
    refused = [reply for reply in replies if reply.status == 429]
    assert {reply.status for reply in replies} == {200, 429} and len(refused) >= 6
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert refused[0].json()["error"]["code"] == "queue_full"


def test_one_key_s_flood_does_not_starve_another(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("many key-of-many\nfew key-of-few\n")
    order: list[str] = []

    async def main() -> None:
        engine = {"model": str(tiny), "load_format": "dummy", "device": "cpu", "num_threads": 1, "max_num_seqs": 2,
                  "scheduling_policy": "fair"}
        async with served({"api_key_file": str(keys)}, engine) as (address, _, _engine):

            async def one(key: str) -> None:
                body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
                reply = await ask(address, "/v1/completions", body, key=key)
                assert reply.status == 200
                order.append(key)

            flood = [asyncio.create_task(one("key-of-many")) for _ in range(30)]
            await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(one("key-of-few"), one("key-of-few"), *flood)

    asyncio.run(main())
    places = [place for place, key in enumerate(order) if key == "key-of-few"]
    assert places[-1] < 16, order


def test_one_key_s_flood_leaves_room_in_the_queue_for_another(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("many key-of-many\nfew key-of-few\n")

    async def main() -> tuple[list[int], list[int]]:
        engine = {"model": str(tiny), "load_format": "dummy", "executor": "dummy", "dummy_step_ms": 5.0,
                  "max_num_seqs": 1, "scheduling_policy": "fair", "max_waiting_requests": 4}
        async with served({"api_key_file": str(keys)}, engine) as (address, _, _engine):

            async def one(key: str) -> int:
                body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
                reply = await ask(address, "/v1/completions", body, key=key)
                assert reply.status == 200 or int(reply.headers["retry-after"]) >= 1
                return reply.status

            flood = [asyncio.create_task(one("key-of-many")) for _ in range(20)]
            await asyncio.sleep(0.1)
            few = await asyncio.gather(one("key-of-few"), one("key-of-few"))
            return few, await asyncio.gather(*flood)

    few, flood = asyncio.run(main())
    assert few == [200, 200] and sorted(set(flood)) == [200, 429]
    assert flood.count(200) >= 3


def test_a_soak_leaves_no_damage(tiny: Path) -> None:
    """2,000 mixed requests; three times the engine is killed while some are in flight."""
    found = asyncio.run(soak(2000, 3, 48, 0, {**INSTANT, "model": str(tiny)}))
    assert not found.wrong
    assert found.kills == 3 and found.hung_up > 50
    assert sum(found.statuses.values()) + found.hung_up == 2000
    for kind in ("whole", "stream", "chat", "chat stream", "group", "beams", "batch"):
        assert found.statuses[f"{kind} 200"] > 20, kind
