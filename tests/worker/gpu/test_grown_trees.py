"""Draft trees that a model grows on the device, over CPU tensors: the trees of a CPU, and the tokens without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.assembly import engine as assembly
from quire.errors import ConfigError
from quire.scheduler.plan import PlanEntry
from quire.scheduler.request import Request
from quire.worker.gpu import results
from quire.worker.gpu.growing import TreeGrower
from quire.worker.gpu.trees import as_chain
from quire.worker.tree_drafter import TreeDrafter
from tests import test_eagle, test_mtp
from tests.test_eagle import PROMPTS, eagle
from tests.worker.gpu import test_heads
from tests.worker.gpu.drafting import accepted, guessed_at_random, looping, remembering
from tests.worker.gpu.engines import QWEN3, make_engine, run
from tests.worker.gpu.head_cases import asked, faint
from tests.worker.gpu.test_drafts import same

target = test_eagle.target
plain = test_eagle.plain
TREE = {"width": 3, "depth": 4, "nodes": 9}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.7}, {"temperature": 1.0, "top_k": 6},
    {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.7, "min_p": 0.05, "logit_bias": {7: 3.0}},
]


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills up with the number of trees that grew in each step."""
    found: list[int] = []
    grow = TreeGrower.grow
    monkeypatch.setattr(TreeGrower, "grow", lambda self, entries: found.append(len(entries)) or grow(self, entries))
    return found


@pytest.mark.parametrize(("kind", "options"), [
    ("eagle", {"max_steps_in_flight": 2}),
    ("eagle3", {"max_steps_in_flight": 2}),
    ("eagle", {"max_num_batched_tokens": 9}),
    ("eagle3", {"block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01, "preemption_mode": "swap"}),
    ("eagle", {"block_size": 1, "num_kv_blocks": 110, "max_steps_in_flight": 3}),
], ids=["eagle", "eagle3", "chunks", "swap", "small blocks"])
def test_tokens_and_logprobs_are_those_without_drafts(
    target: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, grown: list[int], kind: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(assembly, "build_worker", test_heads.build)
    found, metrics, _ = test_heads.told(target, **eagle(target / kind, tree=TREE), **options)
    assert found == [(tokens, logprobs) for tokens, logprobs, _ in plain[1]]
    assert metrics["spec_draft_tokens"] > metrics["spec_accepted_tokens"] > (8 if kind == "eagle" else 0)
    assert sum(grown) > 20


def trees_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Fills up while an engine runs: drafts and parents, by row, start and step."""
    found: dict[Any, Any] = {}
    propose = TreeDrafter.propose

    def recording(self: TreeDrafter, entries: Sequence[PlanEntry]) -> Any:
        filled, weights = propose(self, entries)
        for entry, now in zip(entries, filled, strict=True):
            if entry.draft_depth:
                text = tuple(self._table.tokens[entry.row, : entry.start + 1].tolist())
                found[text] = now.drafts, now.parents
        return filled, weights

    monkeypatch.setattr(TreeDrafter, "propose", recording)
    return found


def trees_of_the_device(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The same of the device's worker, as the host is told of them."""
    found: dict[Any, Any] = {}
    texts: list[Any] = []
    grow, judged = TreeGrower.grow, results._judged

    def growing(self: TreeGrower, entries: Sequence[PlanEntry]) -> None:
        texts[:] = [tuple(self._table.tokens[entry.row, : entry.start + 1].tolist()) for entry in entries]
        grow(self, entries)

    def told(drafted: Any, places: Any) -> Any:
        if drafted.grown_depths:
            trees = [one for one, depth in zip(drafted.trees_by_entry(), drafted.grown_depths, strict=True) if depth]
            found.update(zip(texts, trees, strict=True))
        return judged(drafted, places)

    monkeypatch.setattr(TreeGrower, "grow", growing)
    monkeypatch.setattr(results, "_judged", told)
    return found


@pytest.mark.parametrize("tree", [TREE, {"width": 4, "depth": 3, "nodes": 6}, {"width": 2, "depth": 3, "nodes": 12},
                                  {"width": 5, "depth": 4, "nodes": 5}], ids=str)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_are_those_of_a_cpu(target: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tree: dict[str, int]
                                  ) -> None:
    """Token for token and parent for parent, whatever is drawn, while accepted branches are moved and read again."""
    told = [SamplingParams(max_tokens=18, ignore_eos=True, seed=i, **one) for i, one in enumerate(KINDS)]
    prompts = [prompt[:30] for prompt in PROMPTS[: len(told)]]
    both, outputs = [], []
    for device in (False, True):
        both.append((trees_of_the_device if device else trees_of_a_cpu)(monkeypatch))
        if device:
            monkeypatch.setattr(assembly, "build_worker", test_heads.build)
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, max_steps_in_flight=1,
                 max_num_batched_tokens=400, **eagle(target / kind, tree=tree)) as llm:
            outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, told, use_tqdm=False)])
            llm.check()
    assert outputs[0] == outputs[1]
    want, found = both
    shared = want.keys() & found.keys()
    assert len(shared) > 30 and any(want[text][1] for text in shared)
    assert {text: found[text] for text in shared} == {text: want[text] for text in shared}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_rejection_draws_what_it_draws_on_a_cpu(target: Path, monkeypatch: pytest.MonkeyPatch, grown: list[int],
                                                kind: str) -> None:
    """Of requests that begin together, so that each has a tree in every step."""
    told = [SamplingParams(max_tokens=18, ignore_eos=True, seed=i, **one) for i, one in enumerate(KINDS)]
    # They share no prefix: nobody waits for another's.
    prompts, found = [[(5 * i + 3 * j) % 89 for j in range(20 + i)] for i in range(len(told))], []
    for device in (False, True):
        if device:
            monkeypatch.setattr(assembly, "build_worker", test_heads.build)
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, max_steps_in_flight=1,
                 max_num_batched_tokens=400, **eagle(target / kind, tree=TREE, verifier="rejection")) as llm:
            outputs = [one.outputs[0].token_ids for one in llm.generate(prompts, told, use_tqdm=False)]
            found.append((outputs, [llm.metrics()[f"spec_{name}_tokens"] for name in ("draft", "accepted")]))
    assert found[0] == found[1]
    assert found[0][1][0] > found[0][1][1] > 0 and sum(grown) > 20


@pytest.mark.parametrize("method", ["skip_layers", "draft_model", "itself"])
def test_models_grow_trees(method: str, grown: list[int]) -> None:
    """`itself`: the draft model is the target, so that a branch is right wherever likeliest tokens are drawn."""
    from quire.speculation.options import SpeculationOptions
    from tests.worker.gpu.drafting import METHODS

    config, draft = METHODS[method]
    options = SpeculationOptions.parse({**config, "adaptive": False, "tree": TREE})
    without = run(make_engine(QWEN3, device=False), looping())
    core = make_engine(QWEN3, device=True, depth=2, budget=60, speculation=options, draft=draft)
    same(run(core, looping()), without)
    core.scheduler.check()
    kept, offered = accepted(core)
    assert 0 < kept < offered and sum(grown) > 10


@pytest.mark.parametrize("seed", range(8))
def test_whatever_runs_with_trees_gives_the_tokens_without(seed: int, grown: list[int]) -> None:
    """Chunks, prefixes, preemption, aborts, windows, steps in flight and trees in any mixture."""
    from quire.speculation.options import SpeculationOptions
    from tests.worker.gpu.drafting import METHODS, Case

    case, method = Case(seed), ("skip_layers", "draft_model", "itself")[seed % 3]
    config, draft = METHODS[method]
    tree = {"width": 2 + seed % 3, "depth": case.drafts, "nodes": 2 * case.drafts + seed % 4}
    options = SpeculationOptions.parse({**config, "adaptive": False, "tree": tree})
    plain = case.outcome(make_engine(case.config, device=False, block_size=8, num_blocks=200, budget=case.budget))
    core = make_engine(case.config, device=True, depth=case.depth, block_size=case.block_size,
                       num_blocks=case.num_blocks + 10, budget=case.budget, speculation=options, draft=draft)
    case.assert_same(case.outcome(core), plain)
    core.close()
    assert grown


def test_draws_that_read_their_text_take_chains(grown: list[int]) -> None:
    found = []
    for more in ({"weights": faint}, asked("eagle", tree=TREE)):
        core = make_engine(QWEN3, device=True, depth=2, budget=60, **more)
        found.append(run(core, remembering()))
    same(*found)
    assert accepted(core)[1] > 0 and not grown


def test_trees_and_chains_of_one_step(grown: list[int]) -> None:
    """Requests whose draws read their text beside others."""
    def both() -> list[Any]:
        return [*guessed_at_random(3), *remembering(3)]

    found = []
    for more in ({"weights": faint}, asked("eagle", tree=TREE)):
        core = make_engine(QWEN3, device=True, depth=2, budget=200, **more)
        found.append(run(core, both()))
    same(*found)
    assert accepted(core)[0] > 0 and max(grown) == 3


def test_siblings_grow_trees_from_their_common_prompt(target: Path, monkeypatch: pytest.MonkeyPatch,
                                                      grown: list[int]) -> None:
    many = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True, seed=4, n=3)
    outputs = []
    for more in ({}, eagle(target / "eagle", tree=TREE)):
        if more:
            monkeypatch.setattr(assembly, "build_worker", test_heads.build)
        with LLM(str(target), skip_tokenizer_init=True, num_threads=1, block_size=4, **more) as llm:
            found = llm.generate([PROMPTS[3][:22]], many, use_tqdm=False)[0]
            outputs.append([one.token_ids for one in found.outputs])
    assert outputs[0] == outputs[1]
    assert sum(grown) > 10


def test_layers_trained_with_the_model_grow_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grown: list[int]
                                                  ) -> None:
    """A head whose layer has experts."""
    folder, outputs = test_mtp.make_target("glm4_moe", tmp_path), []
    told = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[(5 * i + 3 * j) % 89 for j in range(20 + i)] for i in range(4)]
    options = {"speculative_config": {"method": "mtp", "adaptive": False, "tree": TREE}}
    for device in (False, True):
        if device:
            monkeypatch.setattr(assembly, "build_worker", test_heads.build)
        with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, max_num_batched_tokens=400, **options) as llm:
            found = llm.generate(prompts, [told] * len(prompts), use_tqdm=False)
            counts = [llm.metrics()[f"spec_{name}_tokens"] for name in ("draft", "accepted")]
            outputs.append(([one.outputs[0].token_ids for one in found], counts))
    assert outputs[0] == outputs[1]
    assert counts[0] > 100 and sum(grown) > 10


def test_a_head_of_latents_grows_no_trees() -> None:
    from tests.worker.gpu.head_cases import LATENT

    with pytest.raises(ConfigError, match="tree of method 'mtp' is not drafted on a GPU with latent attention"):
        make_engine(LATENT, device=True, **asked("mtp", tree=TREE))


def test_too_many_trees_for_a_pass_are_chains(monkeypatch: pytest.MonkeyPatch, grown: list[int]) -> None:
    monkeypatch.setattr("quire.worker.gpu.spans.MOST_NODE_ROWS", 4)
    without = run(make_engine(QWEN3, device=True, weights=faint), guessed_at_random())
    core = make_engine(QWEN3, device=True, budget=200, **asked("eagle", tree=TREE))
    same(run(core, guessed_at_random()), without)
    assert accepted(core)[0] > 0 and max(grown, default=0) <= 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_on_the_kernels_grows_the_same_trees(monkeypatch: pytest.MonkeyPatch, grown: list[int],
                                                       deterministic: bool) -> None:
    """Attention along detours and the growth itself, by Triton's interpreter: slow, so short."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.kernels.triton import growth as kernels
    from quire.ops.triton import TritonOps
    from quire.worker.gpu import growing

    inner = growing.step_kernels
    config = {**QWEN3, "num_hidden_layers": 1, "vocab_size": 61}
    told = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def requests() -> list[Request]:
        return [Request("r", [3, 8, 5], told, seed=0, arrival_time=0.0)]

    more = asked("eagle", tree={"width": 2, "depth": 3, "nodes": 6})
    plain = run(make_engine(config, device=True, weights=faint), requests())
    host = make_engine(config, device=True, **more)
    same(run(host, requests()), plain)
    monkeypatch.setattr(growing, "step_kernels", lambda device: replace(inner(device), grow=kernels.grow,
                                                                        finish=kernels.finish))
    core = make_engine(config, device=True, ops=TritonOps("cpu", torch.float32, deterministic=deterministic), **more)
    grown.clear()
    same(run(core, requests()), plain)
    assert grown and accepted(core) == accepted(host) and accepted(core)[0] > 0


def test_a_chain_in_the_place_of_a_tree() -> None:
    entry = PlanEntry(0, 5, 10, True, device_drafts=9, draft_depth=4)
    cut = as_chain(entry)
    assert (cut.device_drafts, cut.draft_depth, cut.num_tokens) == (4, 0, 5)
    assert as_chain(cut) is cut
