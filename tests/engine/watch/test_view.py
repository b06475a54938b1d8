"""What is told to those who watch an engine: enough to know its blocks exactly, and nothing of anybody's prompt."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from quire import AsyncLLM
from quire.engine.watch.pool_view import label
from quire.engine.watch.view import FRAME_SECONDS, EngineView, _Step, _step_view
from quire.engine.watch.view_frame import EntryView
from quire.executor.base import RankFacts
from quire.executor.dummy import DummyExecutor
from quire.kernels.routing import LayerLoad
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.scheduler.preemption import Preemption, PreemptionMode
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.worker.memory import PoolSize
from tests.async_engines import greedy, last, run, until

BLOCK = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Small:
    """A small engine with a view on it; `step` makes one step."""

    def __init__(self, num_blocks: int = 24, host_blocks: int = 0, groups: tuple[GroupWindow, ...] = (GroupWindow(),),
                 budget: int = 64) -> None:
        tiers = [HostTier(host_blocks, len(groups))] if host_blocks else []
        cache = KVCacheManager(num_blocks, BLOCK, groups=groups, tiers=tiers, eviction_policy="lru")
        mode = PreemptionMode.SWAP if tiers else PreemptionMode.RECOMPUTE
        self.clock = Clock()
        self.scheduler = Scheduler(Limits(8, budget, num_blocks * BLOCK), cache, clock=self.clock,
                                   preemption=Preemption(cache, mode))
        self.pool = PoolSize(num_blocks, num_blocks * BLOCK, 1, host_blocks)
        self.executor = DummyExecutor(1 << 20)
        self.view = self.watch()
        self.count = 0

    def watch(self) -> EngineView:
        return EngineView(self.scheduler, self.pool, "small", clock=self.clock)

    def add(self, prompt: list[int], max_tokens: int, n: int = 1) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0, ignore_eos=True)
        self.scheduler.add(Request(f"name-{self.count}", prompt, params, seed=self.count, arrival_time=self.clock.now,
                                   tenant="acme"))

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.view.submitted(plan)
        self.clock.now += 0.01
        self.scheduler.update(self.executor.execute(plan))
        self.view.collected()
        self.scheduler.take_updates()
        return True

    def frame(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.view.frame()[0])
        return found


class Reader:
    """Puts frames together as the page does."""

    def __init__(self) -> None:
        self.pools: list[dict[int, tuple[int, str, int]]] = []
        self.host: list[dict[int, tuple[int, str, int]]] = []
        self.tables: dict[tuple[str, int, bool], list[int]] = {}

    def take(self, frame: dict[str, Any]) -> None:
        if frame.get("full"):
            groups = len(frame["facts"]["windows"])
            self.pools, self.host, self.tables = [{} for _ in range(groups)], [{} for _ in range(groups)], {}
        for pools, changed in ((self.pools, frame.get("blocks", [])), (self.host, frame.get("host", []))):
            for pool, changes in zip(pools, changed, strict=False):
                for block, holders, key, parent in changes:
                    pool[block] = (holders, key, parent)
                    if not holders and not key:
                        del pool[block]
        for owner, on_host in frame.get("gone", []):
            self.tables = {key: blocks for key, blocks in self.tables.items() if (key[0], key[2]) != (owner, on_host)}
        for owner, group, start, blocks, on_host in frame.get("tables", []):
            key = (owner, group, on_host)
            self.tables[key] = self.tables.get(key, [])[:start] + blocks


def truth(small: Small) -> Reader:
    """The same, from the engine itself."""
    found, cache = Reader(), small.scheduler.cache
    tiers = [pool for tier in cache.tiers for pool in tier.pools]  # type: ignore[attr-defined]
    for pools, target in ((cache.pools, found.pools), (tiers, found.host)):
        for pool in pools:
            target.append({b: (pool.counts[b], (pool.hashes[b] or b"").hex()[:8], pool.parents[b])
                           for b in range(pool.num_blocks) if pool.counts[b] or pool.hashes[b] is not None})
    found.host = found.host or [{} for _ in found.pools]
    for request in small.scheduler.running.values():
        for seq in request.sequences:
            for group, table in enumerate(seq.kv.tables if seq.row >= 0 else ()):
                found.tables[label(seq), group, False] = table.blocks
    for request in small.scheduler.arriving.values():
        for seq in request.live:
            for group, table in enumerate(seq.kv.tables):
                found.tables[label(seq), group, False] = table.blocks
    for request in small.scheduler.waiting:
        if request.swapped is not None:
            for kv, tables in request.swapped.tables:
                seq = next(seq for seq in request.sequences if seq.kv is kv)
                for group, table in enumerate(tables):
                    found.tables[label(seq), group, True] = table.blocks
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layout", ["recompute", "swap", "windows"])
def test_frames_put_together_are_the_engine_as_it_is(seed: int, layout: str) -> None:
    rng = random.Random(seed)
    more: dict[str, Any] = {"recompute": {}, "swap": {"host_blocks": 30},
                            "windows": {"groups": (GroupWindow(), GroupWindow(9))}}[layout]
    small, reader = Small(**more), Reader()
    for _ in range(250):
        if rng.random() < 0.4 and len(small.scheduler.waiting) < 6:
            common = [7] * rng.choice((0, 8, 17))
            small.add(common + [rng.randrange(1000) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 18),
                      n=rng.choice((1, 1, 1, 3)))
        if rng.random() < 0.05 and small.scheduler.running:
            small.scheduler.abort(next(iter(small.scheduler.running)))
        if rng.random() < 0.03:
            small.view.start_over()
        small.step()
        if rng.random() < 0.6 or not reader.pools:
            reader.take(small.frame())
            expected = truth(small)
            assert (reader.pools, reader.host, reader.tables) == (expected.pools, expected.host, expected.tables)
    small.scheduler.check()
    assert layout == "windows" or small.scheduler.stats.preemptions > 0


def test_steps_say_who_computed_how_much_and_what_happened() -> None:
    small = Small(num_blocks=14, budget=16)
    small.add(list(range(100, 126)), 20)
    small.add([1, 2], 24, n=2)
    frames = []
    while small.step():
        frames.append(small.frame())
    steps = [step for frame in frames for step in frame["steps"]]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    # A prompt of 26 in chunks of 16: ten are left, and room for the other request's two.
    no_drafts = [0, 0, [], []]
    assert steps[0]["entries"] == [["1", 0, 16, "p", *no_drafts]]
    assert steps[1]["entries"] == [
        ["1", 16, 10, "p", *no_drafts],
        ["2.1", 0, 2, "p", *no_drafts],
        ["2.2", 2, 0, "f", *no_drafts],
    ]
    assert (steps[1]["prompt_tokens"], steps[1]["decode_tokens"]) == (12, 0)
    assert ["1", 26, 1, "d", *no_drafts] in steps[2]["entries"]
    copied = [copy for step in steps for copy in step["copied"]]
    assert len(copied) == small.scheduler.cache.stats.copies_on_write > 0
    preempted = [each for step in steps for each in step["preempted"]]
    assert len(preempted) == small.scheduler.stats.preemptions > 0
    assert all(reason == "memory" and not moved for _, reason, moved in preempted)
    first = [each for frame in frames for each in frame.get("first_tokens", [])]
    assert [(owner, round(seconds, 3)) for owner, _, seconds in first] == [("1", 0.02), ("2.1", 0.02)]
    totals = frames[-1]["totals"]
    assert totals["steps"] == len(steps) and totals["preemptions"] == len(preempted)


def test_drafts_are_those_that_there_were_and_a_tree_has_its_shape() -> None:
    """A worker that had fewer drafts than it was asked for is not shown with more that were refused."""
    asked = PlanEntry(0, 6, 5, True, device_drafts=4, judged=(3, (-1, -1, 1), (1,)))
    told = _step_view(_Step(StepPlan(1, entries=[asked]), {}, 0.0, [], accepted={0: 1}), 0.0)
    assert told.entries == [EntryView("?", 6, 4, "d", 3, 1, (-1, -1, 1), (1,))]
    assert told.decode_tokens == 4


def test_no_token_name_or_tenant_is_ever_told() -> None:
    small = Small()
    secret = [918_273, 645_546, 102_938] * 8
    small.add(secret, 8)
    told = small.view.frame()[0]
    while small.step():
        told += small.view.frame()[0]
    text = told.decode()
    for word in ("918273", "645546", "102938", "name-1", "acme"):
        assert word not in text
    full = small.scheduler.cache.pools[0].hashes[0]
    assert full is not None and full.hex()[:8] in text and full.hex()[:10] not in text


def test_frames_come_farther_apart_when_they_cost_much_and_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small()
    small.view.frame()
    ticks = iter(range(1000))
    monkeypatch.setattr("quire.engine.watch.view.time.perf_counter", lambda: next(ticks) * 0.05)
    small.view.frame()
    # 50 milliseconds for a frame: not before five seconds have passed.
    assert not small.view.due and small.view.due_in > 1.0
    small.clock.now += FRAME_SECONDS
    assert not small.view.due
    for i in range(20):
        small.add([i], 60)
    while small.step():
        pass
    frame = small.frame()
    assert frame["skipped_steps"] + len(frame["steps"]) == small.scheduler.stats.steps and frame["skipped_steps"] > 0


def test_an_engine_reports_only_while_somebody_watches(tiny_model: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        frames: list[tuple[dict[str, Any], bool]] = []
        llm.on_view = lambda body, full: frames.append((json.loads(body), full))
        await last(llm.generate([1, 2, 3], greedy(20)))
        await asyncio.sleep(0.3)
        assert frames == []
        llm.watch(1.0)
        await until(lambda: frames)
        assert frames[0][1] and frames[0][0]["facts"]["num_blocks"] == 64
        await last(llm.generate([1, 2, 3], greedy(20)))
        await until(lambda: frames[-1][0]["totals"]["requests_finished"] == 2)
        assert not frames[-1][1] and "num_running" not in frames[-1][0]
        count = len(frames)
        llm.watch(1.0, fresh=True)
        await until(lambda: len(frames) > count)
        assert frames[-1][1]
        await asyncio.sleep(1.2)
        count = len(frames)
        await last(llm.generate([1, 2, 3], greedy(20)))
        await asyncio.sleep(0.3)
        assert len(frames) == count  # nobody has said again that he watches

    run(job, tiny_model, executor="dummy", load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=64)


def test_many_short_requests_do_not_make_many_frames(tiny_model: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        frames: list[bytes] = []
        llm.on_view = lambda body, full: frames.append(body)
        llm.watch(30.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(60):
            await last(llm.generate([1, 2, 3], greedy(1)))
        seconds = loop.time() - began
        assert len(frames) <= 2 + seconds / FRAME_SECONDS

    run(job, tiny_model, executor="dummy", load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=64)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_ranks_and_the_steps_of_every_stage_are_told_once() -> None:
    times = [(1, 0.1, 0.2), (2, 0.2, 0.3)]

    def ranks() -> list[RankFacts]:
        return [RankFacts(stage * 2 + tensor, stage, tensor, 5 << 20, len(times), 2.0, 0.5,
                          tuple((step, began + stage / 10, ended + stage / 10) for step, began, ended in times))
                for stage in range(2) for tensor in range(2)]

    scheduler = Scheduler(Limits(4, 64, 64), KVCacheManager(16, 4))
    view = EngineView(scheduler, PoolSize(16, 64, 1), "two stages", clock=lambda: 0.0, ranks=ranks)
    first = json.loads(view.frame()[0])
    assert (first["facts"]["num_stages"], first["facts"]["num_ranks"]) == (2, 4)
    assert first["stages"] == [[0, 1, 0.1, 0.2], [0, 2, 0.2, 0.3], [1, 1, 0.2, 0.3], [1, 2, 0.3, 0.4]]
    assert first["ranks"][3] == [3, 1, 1, 5 << 20, 0.25, 2, 0.1]
    times.append((3, 0.3, 0.5))
    assert json.loads(view.frame()[0])["stages"] == [[0, 3, 0.3, 0.5], [1, 3, 0.4, 0.6]]
    assert "stages" not in json.loads(view.frame()[0])


def test_experts_that_worked_are_told_as_digits() -> None:
    loads = [LayerLoad(1, (0, 0, 0)), LayerLoad(3, (0, 0, 0))]
    scheduler = Scheduler(Limits(4, 64, 64), KVCacheManager(16, 4))
    view = EngineView(scheduler, PoolSize(16, 64, 1), "experts", clock=lambda: 0.0, experts=lambda: loads)
    first = json.loads(view.frame()[0])
    assert first["facts"]["expert_layers"] == [1, 3] and "experts" not in first
    loads[:] = [LayerLoad(1, (0, 40, 1)), LayerLoad(3, (5, 0, 5))]
    assert json.loads(view.frame()[0])["experts"] == ["091", "909"]
    loads[:] = [LayerLoad(1, (2, 40, 1)), LayerLoad(3, (5, 0, 5))]
    assert json.loads(view.frame()[0])["experts"] == ["900", "000"]
    assert "experts" not in json.loads(view.frame()[0])
    view.start_over()
    assert json.loads(view.frame()[0])["experts"] == ["191", "909"]
