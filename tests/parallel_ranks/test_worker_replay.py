"""The plans of an engine of one rank, carried out again by the workers of several: every result is the same.

Results hold tokens, log-probabilities and candidates, whose bits follow from those of the logits.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config import EngineConfig
from quire.scheduler.plan import StepPlan, StepResult
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import make_head
from tests.parallel_ranks.rank_threads import RankWorkers
from tests.test_draft_trees import planted

PROMPTS = [random.Random(i).choices(range(3, 97), k=3 + 11 * i % 41) for i in range(6)]
SIZES = [(2, 1), (3, 1), (1, 2), (2, 2)]
ENGINE = {"skip_tokenizer_init": True, "num_threads": 1, "num_kv_blocks": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama", shards=3, intermediate_size=272)
    # A draft that agrees now and then: the target's embeddings and head, and its first layer.
    config = json.loads((folder / "config.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file({name: tensor for name, tensor in weights.items() if ".layers." not in name or ".layers.0." in name},
              folder / "draft" / "model.safetensors")
    for kind in ("eagle", "eagle3"):
        make_head(folder / kind, folder, kind)
    return folder


def params(index: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.7, "logprobs": 3},
        {"temperature": 0.3, "top_p": 0.9, "top_k": 20, "n": 2},
        {"temperature": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {5: 3.0, 6: 3.0}},
    ]
    return SamplingParams(seed=1000 + index, max_tokens=10, ignore_eos=True, **kinds[index % 4])


Steps = list[tuple[StepPlan, StepResult]]


def unchanged(llm: LLM) -> None:
    pass


def recorded(folder: Path, options: dict[str, Any], beams: bool = False,
             prepare: Callable[[LLM], None] = unchanged) -> tuple[Any, Steps]:
    """The pool of an engine of one rank, and every plan that it carried out with what came of it."""
    steps: Steps = []
    with LLM(str(folder), **options) as llm:
        prepare(llm)
        worker = llm._core.executor._worker  # type: ignore[attr-defined]
        execute = worker.execute

        def recording(plan: StepPlan) -> StepResult:
            kept = copy.deepcopy(plan)
            result = execute(plan)
            steps.append((kept, copy.deepcopy(result)))
            return result

        worker.execute = recording
        if beams:
            llm.beam_search(PROMPTS[:3], BeamSearchParams(beam_width=3, max_tokens=6))
        else:
            llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        return worker.pool, steps


def replayed(folder: Path, options: dict[str, Any], sizes: list[tuple[int, int]] = SIZES,
             beams: bool = False, prepare: Callable[[LLM], None] = unchanged) -> Steps:
    options = ENGINE | options
    pool, steps = recorded(folder, options, beams, prepare)
    assert sum(len(result.entries) for _, result in steps) > 10
    for tensor_size, num_stages in sizes:
        ranks = RankWorkers(EngineConfig.create(model=str(folder), **options), pool, tensor_size, num_stages)
        try:
            for plan, expected in steps:
                assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries, (tensor_size, num_stages, plan)
        finally:
            ranks.close()
    return steps


def test_prompts_in_chunks_draws_groups_and_logprobs(llama: Path) -> None:
    replayed(llama, {"max_num_batched_tokens": 19, "block_size": 4})


def test_beams(llama: Path) -> None:
    replayed(llama, {"block_size": 4}, beams=True)


def test_preempted_to_the_swap_space_and_back(llama: Path) -> None:
    replayed(llama, {"block_size": 4, "num_kv_blocks": 20, "swap_space": 0.01, "preemption_mode": "swap"})


def test_windows_whose_group_a_stage_may_not_have(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma3", intermediate_size=272)
    options = {"block_size": 4, "num_kv_blocks": 24, "swap_space": 0.01, "preemption_mode": "swap"}
    replayed(tmp_path, options, [(3, 1), (1, 3)])


@pytest.mark.parametrize(("method", "verifier"), [
    ("ngram", "coupled"), ("skip_layers", "coupled"), ("draft_model", "coupled"),  # heads: test_heads.py
    *((method, "rejection") for method in ("ngram", "skip_layers", "draft_model", "eagle", "eagle3"))])
def test_drafts_and_how_they_are_judged(llama: Path, method: str, verifier: str) -> None:
    said: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False, "verifier": verifier}
    if method == "draft_model":
        said["model"] = str(llama / "draft")
    elif method.startswith("eagle"):
        said |= {"method": "eagle", "model": str(llama / method)}
    replayed(llama, {"speculative_config": said, "block_size": 4}, [(2, 1), (1, 3), (2, 2)])


@pytest.mark.parametrize("method", ["ngram", "skip_layers", "draft_model", "eagle"])
def test_trees_on_ranks(llama: Path, method: str) -> None:
    """Ranks with the model grow them, the others are told their shape. Each moves its share of what was kept, earlier
    stages when they learn which branch it is; blocks that were swapped out come back with it."""
    said: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False,
                            "tree": {"width": 3, "nodes": 8}}
    if method == "draft_model":
        said["model"] = str(llama / "draft")
    elif method == "eagle":
        said |= {"model": str(llama / method), "tree": {"width": 16, "nodes": 40}}  # of weights at random
    options = {"speculative_config": said, "block_size": 4, "num_kv_blocks": 28, "swap_space": 0.01,
               "preemption_mode": "swap"}
    prepare: Callable[[LLM], None] = unchanged
    if method == "ngram":  # finds little in texts at random: trees are planted, of which some branch is right
        with LLM(str(llama), **ENGINE) as llm:
            found = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        prepare = partial(planted, outputs=[one.outputs[0].token_ids for one in found], seed=1)
    steps = replayed(llama, options, [(2, 1), (1, 2), (1, 3), (2, 2)], prepare=prepare)
    assert any(plan.transfers for plan, _ in steps)
    kept = [result.kept for _, found in steps for result in found.entries if result.parents]
    assert any(nodes != tuple(range(len(nodes))) for nodes in kept)  # something was moved
