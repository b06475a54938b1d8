"""Ranks that share a model on GPUs. Where there are fewer GPUs than ranks, processes share one.

Without a GPU the same engines run on the CPU: that the tests themselves are sound.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine.assembly import engine as assembly
from quire.errors import ConfigError, QuireError, RankLostError
from tests.eagle_heads import make_head
from tests.gpu.models import config_of, weights_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 16}
EIGHT_SLICES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 272}
"""Of the MLP: at 8 ranks each has a query head, and four of them hold the same kv head."""
SMALL = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 200}
SWAPPING = {"num_kv_blocks": 14, "max_model_len": 100, "swap_space": 0.01, "preemption_mode": "swap",
            "max_num_batched_tokens": 200}
PROMPTS = [[random.Random(i).randrange(3, 97) for _ in range(3 + 17 * i % 61)] for i in range(9)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.8, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "n": 2},
    {"temperature": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {5: 3.0}},
    {"temperature": 0.0, "logprobs": 1},
]


def checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    config = {**config_of(family), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights_of(config)}, folder / "model.safetensors")
    return folder


def engine(folder: Path, **options: Any) -> LLM:
    if not GPU:
        options = {name: value for name, value in options.items() if name not in ("dtype", "deterministic")}
    return LLM(str(folder), skip_tokenizer_init=True, device=DEVICE, **{**SMALL, **options})


def answers(llm: LLM) -> list[Any]:
    """Everything that requests of several kinds are answered with."""
    params = [SamplingParams(seed=50 + i, max_tokens=12, ignore_eos=True, **KINDS[i % len(KINDS)])
              for i in range(len(PROMPTS))]
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    beams = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=5))
    return [(one.prompt_logprobs, [(each.token_ids, each.logprobs, each.cumulative_logprob) for each in one.outputs])
            for one in (*found, *beams)]


CASES = [
    ("llama", {}, {"dtype": "bfloat16"}, [(2, 1), (1, 2)]),
    ("qwen3", {}, {"dtype": "float32", "enforce_eager": True}, [(2, 1)]),
    ("gemma3", {}, {"dtype": "bfloat16"}, [(2, 2)]),
    ("gpt2", {}, {"dtype": "float32"}, [(3, 1)]),
    ("llama", NINE_HEADS, {"dtype": "bfloat16"}, [(2, 1)]),
    ("olmo2", {}, {"dtype": "bfloat16"}, [(2, 1)]),
    ("llama", EIGHT_SLICES, {"dtype": "bfloat16"}, [(4, 1), (8, 1)]),
    ("llama", {}, {"dtype": "float32", **SWAPPING}, [(2, 1), (1, 2)]),
    ("qwen3_moe", {}, {"dtype": "bfloat16"}, [(2, 1), (2, 2)]),
]


@pytest.mark.parametrize(("family", "changes", "options", "sizes"), CASES if GPU else CASES[:1])
def test_deterministic_mode_gives_the_bits_of_one_rank(
    tmp_path: Path, family: str, changes: dict[str, Any], options: dict[str, Any], sizes: list[tuple[int, int]]
) -> None:
    checkpoint(tmp_path, family, **changes)
    with engine(tmp_path, deterministic=True, **options) as llm:
        want = answers(llm)
        assert (llm.metrics()["preemptions_by_swap"] > 0) == ("swap_space" in options)
    for tensor, stages in sizes:
        with engine(tmp_path, deterministic=True, tensor_parallel_size=tensor, pipeline_parallel_size=stages,
                    **options) as llm:
            assert answers(llm) == want, (tensor, stages)


@on_gpu
@pytest.mark.parametrize(("family", "sizes"), [("llama", (2, 1)), ("llama", (2, 2)), ("qwen3_moe", (2, 1))])
def test_the_fast_mode_draws_what_one_rank_draws_unless_two_were_as_likely(
    tmp_path: Path, family: str, sizes: tuple[int, int]
) -> None:
    checkpoint(tmp_path, family)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    found = []
    for tensor, stages in ((1, 1), sizes):
        with engine(tmp_path, dtype="float32", tensor_parallel_size=tensor, pipeline_parallel_size=stages) as llm:
            found.append([one.outputs[0] for one in llm.generate(PROMPTS, greedy, use_tqdm=False)])
    _same_unless_as_likely(*found)


def _same_unless_as_likely(wanted: list[Any], found: list[Any]) -> None:
    for want, got in zip(wanted, found, strict=True):
        for place, (mine, other) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
            if mine != other:
                best, second = sorted((each.logprob for each in want.logprobs[place].values()), reverse=True)[:2]
                assert best - second < 1e-3
                break


def _two_sides(kind: str, patience: float) -> tuple[list[Any], list[Any], list[Any]]:
    """Waits, groups and memory of two ranks in this process."""
    from quire.parallel import device_waits
    from quire.parallel.cuda_memory import SharedDeviceMemory
    from quire.parallel.peers import PeerGroup, group_bytes

    device = torch.device("cuda")
    memories = [SharedDeviceMemory.create(group_bytes(1 << 20), device) for _ in range(2)]
    waits = [getattr(device_waits, kind)(device, patience) for _ in range(2)]
    groups = [PeerGroup(rank, [each.bytes for each in memories], waits[rank].meeting(rank, memories))
              for rank in range(2)]
    return waits, groups, memories


def _loaded(group: Any, launch: Callable[[], object]) -> None:
    """Launch once without waiting for anybody: what a kernel needs when it is first launched may wait for all that
    runs, and the host would hang before it is watched."""
    meet, group._meet = group._meet, lambda turn: None
    launch()
    group._meet = meet
    torch.cuda.synchronize()


def _close(waits: list[Any], memories: list[Any]) -> None:
    torch.cuda.synchronize()
    for each in (*waits, *memories):
        each.close()


@on_gpu
@pytest.mark.parametrize("kind", ["KernelWaits", "StreamWaits"])
@torch.inference_mode()
def test_two_streams_of_one_process_exchange_inside_graphs(kind: str) -> None:
    waits, groups, memories = _two_sides(kind, 30.0)
    parts = [torch.full((8, 512), rank + 1.0, device="cuda") for rank in range(2)]
    found = [torch.zeros(8, 512, device="cuda") for _ in range(2)]

    def launch(rank: int) -> None:
        for _ in range(3):  # an odd number: `settle` makes it even
            found[rank].add_(groups[rank].sum_parts(parts[rank], None, None))
        groups[rank].settle()

    sides = [torch.cuda.Stream() for _ in range(2)]
    for rank in range(2):
        _loaded(groups[rank], partial(launch, rank))
    if kind == "KernelWaits":
        from quire.kernels.triton import meeting

        flags = torch.full((2,), 9, dtype=torch.int32, device="cuda")
        peers = torch.tensor([flags.data_ptr()] * 2, device="cuda")
        for rank in range(2):
            meeting.meet(peers, flags, torch.zeros_like(flags[:1]), waits[rank]._state, rank, 30.0)
    torch.cuda.synchronize()
    graphs = []
    for rank, side in enumerate(sides):
        with torch.cuda.stream(side):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            launch(rank)
            graph.capture_end()
            graphs.append(graph)
    for each in found:
        each.zero_()
    torch.cuda.synchronize()
    for _ in range(5):
        for rank, side in enumerate(sides):
            with torch.cuda.stream(side):
                graphs[rank].replay()
    with waits[0].watched(), waits[1].watched():
        torch.cuda.synchronize()
    assert all(bool((each == 5 * 3 * 3).all()) for each in found)
    _close(waits, memories)


@on_gpu
@pytest.mark.parametrize("kind", ["KernelWaits", "StreamWaits"])
@torch.inference_mode()
def test_a_wait_for_one_who_does_not_come_is_an_error_and_no_hang(kind: str) -> None:
    waits, groups, memories = _two_sides(kind, 1.0)
    part = torch.ones(4, 4, device="cuda")
    _loaded(groups[0], lambda: groups[0].sum_parts(part, None, None))
    groups[0].sum_parts(part, None, None)
    with pytest.raises(RankLostError, match="did not come"), waits[0].watched():
        torch.cuda.synchronize()
    _close(waits, memories)


@on_gpu
@pytest.mark.parametrize("method", ["ngram", "skip_layers", "draft_model"])
def test_drafts_of_ranks_are_those_of_one(tmp_path: Path, method: str) -> None:
    checkpoint(tmp_path, "llama")
    said: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    sizes = [(1, 1), (2, 1)]
    if method == "ngram":
        sizes.append((1, 2))
    elif method == "draft_model":
        (tmp_path / "draft").mkdir()
        said["model"] = str(checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1))
    prompts = [prompt * 3 for prompt in PROMPTS[:5]]
    params = [SamplingParams(temperature=0.6 * (i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    found = []
    for tensor, stages in sizes:
        with engine(tmp_path, dtype="bfloat16", deterministic=True, speculative_config=said,
                    tensor_parallel_size=tensor, pipeline_parallel_size=stages) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
    assert all(each == found[0] for each in found)


def with_head(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """A checkpoint whose layers say little, so that some guesses are right; what asks for a head for it."""
    family = "deepseek_v3" if kind == "mtp" else "llama"
    checkpoint(folder, family, **changes)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.15
    asked: dict[str, Any] = {"method": kind}
    if kind == "mtp":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        last, behind = (f"model.layers.{config['num_hidden_layers'] - back}." for back in (1, 0))
        hidden = config["hidden_size"]
        weights |= {name.replace(last, behind): weight.clone() for name, weight in weights.items()
                    if name.startswith(last)}
        weights |= {f"{behind}{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{behind}eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    save_file(weights, folder / "model.safetensors")
    if kind != "mtp":
        asked = {"method": "eagle", "model": str(make_head(folder / "head", folder, kind))}
    return {"speculative_config": {**asked, "num_speculative_tokens": 3, "adaptive": False}}


THREE_OF_NINE = {"hidden_size": 72, "intermediate_size": 272, "num_attention_heads": 9, "num_key_value_heads": 3}
TREE = {"width": 3, "depth": 3, "nodes": 9}
HEADS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[tuple[int, int]]]] = [
    ("eagle", {}, {"dtype": "bfloat16"}, {}, [(2, 1), (1, 2)]),
    ("eagle", {"tie_word_embeddings": True}, {"dtype": "float32", "enforce_eager": True}, {"verifier": "rejection"},
     [(2, 1), (1, 2)]),
    ("eagle3", THREE_OF_NINE, {"dtype": "float32", **SWAPPING}, {}, [(2, 1), (3, 1), (1, 2)]),
    ("eagle3", {}, {"dtype": "bfloat16"}, {"verifier": "rejection"}, [(2, 1), (2, 2)]),
    ("eagle3", {}, {"dtype": "bfloat16", "max_num_batched_tokens": 400}, {"tree": TREE}, [(2, 1), (1, 2)]),
    ("eagle", {}, {"dtype": "float32"}, {"tree": TREE, "verifier": "rejection"}, [(2, 2)]),
    ("mtp", {}, {"dtype": "bfloat16"}, {}, [(2, 1), (1, 2)]),
]


@contextmanager
def steps_of_stages(stages: int) -> Iterator[None]:
    """Engines plan their steps as those of so many stages: each has its share of the sequences."""
    limits_of = assembly.limits_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "limits_of", lambda *given: replace(limits_of(*given), num_stages=stages))
        yield


@pytest.mark.parametrize(("kind", "changes", "options", "ask", "sizes"), HEADS if GPU else HEADS[2:6])
def test_heads_on_ranks_draft_what_one_rank_drafts(
    tmp_path: Path, kind: str, changes: dict[str, Any], options: dict[str, Any], ask: dict[str, Any],
    sizes: list[tuple[int, int]]
) -> None:
    """Bit for bit, in deterministic mode: answers, and how many drafts were right of how many. One rank has the same
    steps: who is in a step with whom says how many drafts have room. Coupled, the answers are those without drafts. Who
    swaps comes back when a copy is over, so the number of drafts is another each time."""
    asked = with_head(tmp_path, kind, **changes)
    asked["speculative_config"] |= ask
    if "tree" in ask:
        del asked["speculative_config"]["num_speculative_tokens"]
    options = {"deterministic": True, "max_steps_in_flight": 1, **options}

    def found(tensor: int, stages: int) -> tuple[list[Any], tuple[int, int] | None]:
        with engine(tmp_path, tensor_parallel_size=tensor, pipeline_parallel_size=stages, **options, **asked) as llm:
            said, metrics = answers(llm), llm.metrics()
        drafts, kept = metrics["spec_draft_tokens"], metrics["spec_accepted_tokens"]
        assert drafts > kept > 0 and (metrics["preemptions_by_swap"] > 0) == ("swap_space" in options)
        return said, None if "swap_space" in options else (drafts, kept)

    of_one_rank = {}
    for stages in {stages for _, stages in sizes}:
        with steps_of_stages(stages):
            of_one_rank[stages] = found(1, 1)
    for tensor, stages in sizes:
        assert found(tensor, stages) == of_one_rank[stages], (tensor, stages)
    if ask.get("verifier") != "rejection":
        with engine(tmp_path, **options) as llm:
            want = answers(llm)
        assert all(said == want for said, _ in of_one_rank.values())


@on_gpu
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_heads_on_ranks_change_no_token_of_the_fast_mode_unless_two_were_as_likely(
    tmp_path: Path, kind: str, sizes: tuple[int, int]
) -> None:
    """Ranks that drew different drafts would judge a text that none of them has. With drafts made ahead, by replayed
    graphs, and steps in flight."""
    asked = with_head(tmp_path, kind)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    found = []
    for more in ({}, {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1], **asked}):
        with engine(tmp_path, dtype="float32", **more) as llm:
            found.append([one.outputs[0] for one in llm.generate(PROMPTS, greedy, use_tqdm=False)])
            metrics = llm.metrics()
    assert metrics["spec_draft_tokens"] > metrics["spec_accepted_tokens"] > 0
    _same_unless_as_likely(*found)


@on_gpu
def test_a_killed_rank_ends_the_engine_with_its_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    llm = engine(tmp_path, dtype="bfloat16", tensor_parallel_size=2)
    try:
        executor = llm._core.executor
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)
        os.kill(executor.ranks.handles[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with suppress(QuireError):
            while executor.failure is None:
                llm.generate(PROMPTS[:1], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert "rank 1 of 2" in str(executor.failure)
    finally:
        llm.close()


@on_gpu
@pytest.mark.parametrize(("options", "field"), [
    ({"distributed_executor_backend": "threads"}, "distributed_executor_backend"),
    ({"speculative_config": {"method": "skip_layers", "num_speculative_tokens": 2}, "pipeline_parallel_size": 2},
     "speculative_config"),
    ({"tensor_parallel_size": 7}, "tensor_parallel_size"),
])
def test_what_ranks_on_gpus_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError) as refused:
        engine(tmp_path, **{"tensor_parallel_size": 2, **options})
    assert refused.value.field == field
