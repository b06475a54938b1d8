"""Draft heads over ranks of the device worker, on CPU tensors: on every rank the drafts of one rank, and its results.

Plans are those of an engine of one rank, with all that they tell workers. Every tensor rank of the last stage proposes
for itself, and tells its neighbours in the other stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.config import CacheConfig, EngineConfig
from quire.engine.assembly import engine as assembly
from quire.engine.assembly.source import open_source
from quire.errors import ConfigError, StepError
from quire.models.heads.head import DraftHead
from quire.models.registry import read_spec
from quire.ops.cpu import CpuOps
from quire.parallel.peers import PeerGroup
from quire.scheduler.plan import BlockCopy, PlanEntry, StepPlan, StepResult
from quire.speculation.options import SpeculationOptions
from quire.worker.gpu import runner
from quire.worker.gpu.launches import StepLaunches
from quire.worker.gpu.speculation import Speculation, speculation_of
from quire.worker.gpu.worker import GpuWorker
from tests import test_mtp
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import make_head
from tests.parallel_ranks.rank_threads import side_by_side
from tests.parallel_ranks.test_worker_replay import PROMPTS, params
from tests.worker.gpu.device_ranks import DeviceRankWorkers
from tests.worker.gpu.drafting import accepted, looping
from tests.worker.gpu.engines import make_engine, run, workload
from tests.worker.gpu.head_cases import TARGETS, Pause, asked, faint, spec_of
from tests.worker.gpu.test_ahead import simple
from tests.worker.gpu.test_heads import build
from tests.worker.gpu.test_ranks import OPTIONS

SIZES = ((2, 1), (3, 1), (1, 2), (2, 2))
"""Tensor ranks and stages."""
NINE_HEADS = {"hidden_size": 72, "intermediate_size": 272, "num_attention_heads": 9, "num_key_value_heads": 3}
Drafts = list[tuple[int, int, tuple[int, ...]]]
"""Row, place of its last token, what was proposed to follow."""


class Recorded:
    """What the worker of one rank was told, what came of it, and what was proposed."""

    def __init__(self, worker: GpuWorker) -> None:
        self.steps: list[tuple[StepPlan, StepResult]] = []
        self.options = worker._options
        self.drafts, self._submit = proposed(worker), worker.submit
        self.ahead = launched_ahead(worker)
        worker.submit = self._recording  # type: ignore[method-assign]

    def _recording(self, plan: StepPlan) -> Future[StepResult]:
        kept = copy.deepcopy(plan)
        future = self._submit(plan)
        self.steps.append((kept, copy.deepcopy(future.result())))  # the scheduler cuts tokens after an end
        return future

    def replay(self, size: tuple[int, int], config: dict[str, Any], cache: Any,
               speculation: Callable[[], Speculation | None], weights: Any) -> None:
        ranks = DeviceRankWorkers(config, cache, self.options, *size, speculation, weights)
        try:
            # A stage that is told hears of trees when they have grown.
            told = [proposed(worker) for worker in ranks.workers
                    if worker.shard.place.is_last or worker._runner.trees is None]
            ahead = [launched_ahead(worker) for worker in ranks.workers if worker.shard.place.is_last]
            for plan, expected in self.steps:
                assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries, (size, plan)
            assert all(each == self.drafts for each in told)
            assert all(each == self.ahead for each in ahead)
        finally:
            ranks.close()


def proposed(worker: GpuWorker) -> Drafts:
    """Fills up while the worker runs."""
    drafter: Any = worker._runner.drafter
    propose, found = drafter.propose, []

    def recording(entries: Sequence[PlanEntry], table: Any) -> Any:
        filled, drafted = propose(entries, table)
        found.extend((entry.row, entry.start, tuple(tokens))
                     for entry, tokens in zip(entries, drafted.by_entry(), strict=True) if tokens)
        return filled, drafted

    drafter.propose = recording
    return found


def launched_ahead(worker: GpuWorker) -> list[bool]:
    """Fills up while the worker runs: whether drafts were launched behind a step that others would follow."""
    draft_on, found = worker._runner.draft_on, []

    def recording(pending: Any) -> bool:
        found.append(draft_on(pending))
        return found[-1]

    worker._runner.draft_on = recording  # type: ignore[method-assign]
    return found


def of_files(target: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Recorded, LLM]:
    monkeypatch.setattr(assembly, "build_worker", build)
    llm = LLM(str(target), **options)
    return Recorded(llm._core.executor._worker), llm  # type: ignore[attr-defined]


def replay_files(record: Recorded, target: Path, options: dict[str, Any], sizes: Sequence[tuple[int, int]]) -> None:
    config = EngineConfig.create(model=str(target), **options)
    source = open_source(config)
    for size in sizes:
        record.replay(size, dict(source.config), config.cache, lambda: speculation_of(config, source),
                      lambda _, parts: source.weights(None, parts))


@pytest.mark.parametrize(("kind", "tied", "verifier"), [
    ("eagle", True, "coupled"), ("eagle3", False, "coupled"), ("eagle", False, "rejection"),
    ("eagle3", True, "rejection"),
])
def test_in_chunks_swapped_shared_and_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                                     tied: bool, verifier: str) -> None:
    """Nine query heads on three of keys; every prompt twice, greedy and drawn, with penalties, alone and in groups."""
    target = tmp_path / "target"
    make_checkpoint(target, "llama", **NINE_HEADS, tie_word_embeddings=tied)
    if tied and kind == "eagle3":
        _store_the_tied_head(target)
    head = make_head(tmp_path / "head", target, kind)
    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 19, "block_size": 4,
        "num_kv_blocks": 24, "swap_space": 0.01, "preemption_mode": "swap",
        "speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "adaptive": False,
                               "verifier": verifier}}
    record, llm = of_files(target, options, monkeypatch)
    with llm:
        for _ in range(2):
            llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        metrics = llm.metrics()
    assert all(metrics[name] for name in ("preemptions_by_swap", "copies_on_write", "prefix_hit_tokens"))
    assert len(record.drafts) > 50 and metrics["spec_accepted_tokens"] > 0
    replay_files(record, target, options, SIZES)


def _store_the_tied_head(target: Path) -> None:
    """`make_head` takes rows of it."""
    weights = load_file(target / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()},
              target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("own", ["tables", "rows of the target"])
def test_tables_of_the_head_are_shared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    """Embeddings that differ from the target's in the last row, and a projection: the head's own, or of the target's
    just the rows that it can guess. Each rank has its rows of the projection and no others."""
    target = tmp_path / "target"
    make_checkpoint(target, "llama", tie_word_embeddings=False, intermediate_size=272)
    head = make_head(tmp_path / "head", target, "eagle3")
    weights, theirs = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
    if own == "tables":
        weights["embed_tokens.weight"] = theirs["model.embed_tokens.weight"].clone()
        weights["embed_tokens.weight"][-1] *= 2
    else:
        del weights["lm_head.weight"]
    save_file(weights, head / "model.safetensors")
    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 64,
        "speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}}
    record, llm = of_files(target, options, monkeypatch)
    with llm:
        llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    assert len(record.drafts) > 30
    found: list[Any] = []
    original = GpuWorker._build_head_runner
    monkeypatch.setattr(GpuWorker, "_build_head_runner",
                        lambda self, head, asked: found.append(head) or original(self, head, asked))
    replay_files(record, target, options, ((2, 1),))
    assert sorted(head.head.packed.out_features for head in found) == [17, 32]
    assert [head.embed is head._target.embed for head in found] == [own != "tables"] * 2


@pytest.mark.parametrize("family", test_mtp.FAMILIES)
def test_layers_trained_with_the_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = test_mtp.make_target(family, tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 8, "block_size": 4,
                               "max_num_batched_tokens": 40, **test_mtp.MTP}
    record, llm = of_files(target, options, monkeypatch)
    with llm:
        llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
    assert len(record.drafts) > 30
    replay_files(record, target, options, ((2, 1), (1, 2)))


CACHE = CacheConfig(block_size=8, num_kv_blocks=60)


def replay_random(record: Recorded, kind: str, keywords: dict[str, Any], sizes: Sequence[tuple[int, int]],
                  cache: CacheConfig = CACHE) -> None:
    for size in sizes:
        record.replay(size, TARGETS[kind], cache, lambda: speculation_with(kind, keywords), faint)


def speculation_with(kind: str, keywords: dict[str, Any]) -> Speculation:
    return Speculation(keywords["speculation"], head=keywords["head"],
                       head_spec=spec_of(kind, read_spec(TARGETS[kind])))


@pytest.mark.parametrize(("kind", "memory"), [
    ("eagle", {"num_blocks": 60, "budget": 120}), ("eagle3", {"num_blocks": 16, "budget": 30}),
    ("mtp", {"num_blocks": 60, "budget": 120}),
], ids=["eagle", "eagle3 in short memory", "mtp"])
def test_drafts_made_ahead_are_made_by_every_rank(kind: str, memory: dict[str, int],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a graph would hold begins where the one before it ended: at the first slot of the group's memory."""
    keywords = asked(kind)
    core = make_engine(TARGETS[kind], device=True, depth=2, **memory, **keywords)
    record = Recorded(core.executor._worker)  # type: ignore[attr-defined]
    run(core, simple())
    core.close()
    assert sum(record.ahead) > 10 and 0 < accepted(core)[0] < accepted(core)[1]
    assert (core.scheduler.stats.preemptions > 0) == (memory["num_blocks"] < 60)
    turns = []
    for name in ("decode", "decode_last", "mixed", "padded"):
        monkeypatch.setattr(StepLaunches, name, _noting_the_turn(getattr(StepLaunches, name), turns))
    replay_random(record, kind, keywords, SIZES, replace(CACHE, num_kv_blocks=memory["num_blocks"]))
    assert len(turns) > 300 and not any(turns)


def _noting_the_turn(launch: Callable[..., Any], turns: list[int]) -> Callable[..., Any]:
    def noting(self: StepLaunches, *args: Any, **more: Any) -> Any:
        group = self.passes._ranks.group
        assert group is None or isinstance(group, PeerGroup)
        turns.append(0 if group is None else group._turn)
        return launch(self, *args, **more)

    return noting


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_ranks_draw_from_the_same_logits_whatever_their_heads_round(kind: str) -> None:
    """As in the fast mode of a GPU, which promises no bits: here one rank's head is off by a millionth."""
    keywords = asked(kind)
    core = make_engine(TARGETS[kind], device=True, budget=120, **keywords)
    record = Recorded(core.executor._worker)  # type: ignore[attr-defined]
    run(core, simple(3))
    core.close()
    ranks = DeviceRankWorkers(TARGETS[kind], CACHE, record.options, 2, 1,
                              lambda: speculation_with(kind, keywords), faint)
    rows: list[list[Tensor]] = [[], []]
    logits: list[list[Tensor]] = [[], []]
    try:
        for rank, worker in enumerate(ranks.workers):
            drafter: Any = worker._runner.drafter
            _watch(drafter.runner.launches.passes._head, 1.0 + 1e-6 * rank, rows[rank], logits[rank])
        for plan, expected in record.steps:
            assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries
    finally:
        ranks.close()
    assert not any(torch.equal(*pair) for pair in zip(*rows, strict=True))
    assert len(logits[0]) > 20 and all(torch.equal(*pair) for pair in zip(*logits, strict=True))


def _watch(head: DraftHead, factor: float, rows: list[Tensor], logits: list[Tensor]) -> None:
    inner, projected = head.forward, head.logits

    def forward(*args: Any) -> Tensor:
        rows.append(inner(*args) * factor)
        return rows[-1]

    def of(found: Tensor, out: Tensor | None = None) -> Tensor:
        said = projected(found, out)
        logits.append(said.clone())
        return said

    head.forward, head.logits = forward, of  # type: ignore[method-assign]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_that_rests_rests_on_every_rank(kind: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for drafts of a text with holes is told by every rank that there are none. Over stages no head rests:
    there are never holes."""
    if stages > 1:
        monkeypatch.setattr(runner, "MOST_RESTING", 0)
    keywords = asked(kind)
    core = make_engine(TARGETS[kind], device=True, **keywords)
    record = Recorded(core.executor._worker)  # type: ignore[attr-defined]
    pause = Pause(core.scheduler.speculator, 4, 12, tells=False)
    run(core, looping(8))
    core.close()
    assert pause.rested and sum(plan.head_rests for plan, _ in record.steps) == pause.rested
    assert any(entry.undraftable for _, result in record.steps for entry in result.entries) == (stages == 1)
    replay_random(record, kind, keywords, [size for size in SIZES if (size[1] > 1) == (stages > 1)])


@pytest.mark.parametrize(("kind", "verifier"), [("eagle", "coupled"), ("eagle3", "coupled"), ("eagle3", "rejection")])
def test_trees_grow_alike_on_all_ranks(kind: str, verifier: str) -> None:
    """Stages before the last learn a step later which branches were kept, and move these then."""
    keywords = asked(kind, verifier=verifier, tree={"width": 3, "depth": 3, "nodes": 6})
    core = make_engine(TARGETS[kind], device=True, **keywords)
    record = Recorded(core.executor._worker)  # type: ignore[attr-defined]
    run(core, looping(6))
    run(core, workload(3, 11))
    core.close()
    trees = [entry for _, result in record.steps for entry in result.entries if entry.parents]
    assert len(trees) > 20 and any(entry.kept for entry in trees)
    replay_random(record, kind, keywords, SIZES)


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_trees_of_lookups_are_verified_alike_on_all_ranks(verifier: str) -> None:
    """They come with the plan, and stages before the last move the branches that were kept a step later."""
    options = SpeculationOptions.parse({"method": "ngram", "adaptive": False, "verifier": verifier,
                                        "tree": {"width": 3, "depth": 3, "nodes": 6}})
    core = make_engine(TARGETS["eagle"], device=True, speculation=options, weights=faint)
    steps: list[tuple[StepPlan, StepResult]] = []
    worker: Any = core.executor._worker  # type: ignore[attr-defined]
    submit = worker.submit

    def recording(plan: StepPlan) -> Future[StepResult]:
        kept, future = copy.deepcopy(plan), submit(plan)
        steps.append((kept, copy.deepcopy(future.result())))
        return future

    worker.submit = recording
    run(core, looping(8))
    run(core, workload(3, 11))
    core.close()
    assert sum(bool(entry.kept) for _, result in steps for entry in result.entries if entry.parents) > 2
    for size in SIZES:
        ranks = DeviceRankWorkers(TARGETS["eagle"], CACHE, worker._options, *size, lambda: Speculation(options), faint)
        try:
            for plan, expected in steps:
                assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries, (size, plan)
        finally:
            ranks.close()


def test_copies_wait_for_branches_that_a_stage_moves_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is under way, and still a block may be written that the next plan copies."""
    keywords = asked("eagle", tree={"width": 3, "depth": 3, "nodes": 6})
    core = make_engine(TARGETS["eagle"], device=True, **keywords)
    options = core.executor._worker._options  # type: ignore[attr-defined]
    core.close()
    moves: list[tuple[list[int], list[int]]] = []
    free: list[bool] = []
    ranks = DeviceRankWorkers(TARGETS["eagle"], CACHE, options, 1, 2, lambda: speculation_with("eagle", keywords),
                              faint)
    worker = ranks.workers[0]
    trees, run_copies, num_layers = worker._runner.trees, worker._copies.run, len(worker.decoder.layers)
    assert trees is not None
    monkeypatch.setattr(CpuOps, "copy_slots", lambda self, cache, source, target: moves.append(
        (source.tolist(), target.tolist())))
    monkeypatch.setattr(worker._copies, "run", lambda copies: free.append(run_copies(copies)))
    try:
        for step, drawn in enumerate(([7, 1], [8, 9, 1], [7, 1])):
            trees.keep_open([PlanEntry(0, 4, 4, True, drafts=(7, 8, 9), parents=(-1, -1, 1))])
            worker.learn(0, 5, drawn)
            worker.submit(StepPlan(step, copies=[BlockCopy(0, 1, 2)])).result()
    finally:
        ranks.close()
    assert free == [True, False, True]
    assert moves == [([6, 7], [5, 6])] * num_layers


def test_a_stage_that_cannot_draft_loses_the_step_on_all() -> None:
    """And the steps after it go on as if nothing had been."""
    keywords = asked("eagle")
    core = make_engine(TARGETS["eagle"], device=True, budget=120, **keywords)
    record = Recorded(core.executor._worker)  # type: ignore[attr-defined]
    run(core, simple(2))
    core.close()
    ranks = DeviceRankWorkers(TARGETS["eagle"], CACHE, record.options, 1, 2,
                              lambda: speculation_with("eagle", keywords), faint)
    first, last = ranks.workers
    asking = next(i for i, (plan, _) in enumerate(record.steps) if any(e.device_drafts for e in plan.entries))
    drafter: Any = last._runner.drafter
    propose = drafter._drafter.propose

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory for drafts")

    try:
        for plan, expected in record.steps[:asking]:
            assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries
        drafter._drafter.propose = fail
        found = side_by_side([lambda worker=worker: worker.submit(copy.deepcopy(record.steps[asking][0])).exception()
                              for worker in (first, last)], lambda: None)
        assert isinstance(found[0], StepError) and "last pipeline stage" in str(found[0])
        assert "no memory for drafts" in str(found[1])
        drafter._drafter.propose = propose
        for plan, expected in record.steps[asking:]:
            assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries
    finally:
        ranks.close()


def test_a_rank_that_fails_in_drafts_ahead_has_failed_in_the_step() -> None:
    """The others wait for it in those drafts. With one rank such a failure costs no token."""
    keywords = asked("eagle")
    core = make_engine(TARGETS["eagle"], device=True, depth=2, budget=120, **keywords)
    record = Recorded(core.executor._worker)  # type: ignore[attr-defined]
    run(core, simple(2))
    core.close()
    ranks = DeviceRankWorkers(TARGETS["eagle"], CACHE, record.options, 2, 1,
                              lambda: speculation_with("eagle", keywords), faint)

    def fail(*_: Any) -> bool:
        raise RuntimeError("no memory for drafts")

    ranks.workers[1]._runner.draft_on = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="no memory for drafts"):
            for plan, _ in record.steps:
                ranks.execute(copy.deepcopy(plan))
        assert plan.drafts_follow
    finally:
        ranks.close()


def test_trees_of_latents_are_refused_by_name() -> None:
    keywords = asked("mtp", tree={"width": 3, "depth": 3, "nodes": 6})
    with pytest.raises(ConfigError, match=r"tree of method 'mtp' is not drafted on a GPU with latent att") as error:
        DeviceRankWorkers(TARGETS["mtp"], CACHE, OPTIONS, 2, 1, lambda: speculation_with("mtp", keywords), faint)
    assert error.value.field == "speculative_config"
