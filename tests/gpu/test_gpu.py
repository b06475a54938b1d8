"""The engine on a real GPU: right against the CPU path, the same bits where they are promised."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import FAMILY_NAMES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.models.build import build_decoder
    from quire.ops.triton import TritonOps
    from quire.sampling.params import BeamSearchParams, SamplingParams
    from quire.scheduler.request import Request
    from quire.worker.gpu.options import DeviceOptions
    from quire.worker.gpu.weights import build_on_device
    from tests.gpu.models import VOCAB, config_of, device_engine, greedy, host_engine, host_ops, weights_of
    from tests.paged_driver import PagedDriver
    from tests.worker.gpu import engines

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "opt", "gpt2")
HEADS_OF_128 = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
"""For tests that take long; the others run every family."""
DTYPES = ("float32", "bfloat16")
GAP = 1e-3


def tokens_of(core: Any, requests: list[Any]) -> dict[str, tuple[list[int], list[Any]]]:
    """Tokens and log-probabilities of every request; none may fail."""
    found = engines.run(core, requests)
    core.close()
    assert [error for *_, error in found.values() if error] == []
    return {name: (tokens, logprobs) for name, (tokens, logprobs, *_) in found.items()}


# ---- right


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_fp32_logits_are_within_a_thousandth_of_the_cpu_path(family: str) -> None:
    config, device = config_of(family), torch.device("cuda")
    with torch.inference_mode():
        host = PagedDriver(build_decoder(config, weights_of(config), host_ops(), max_model_len=200), block_size=8)
        ops = TritonOps(device, torch.float32)
        decoder = build_on_device(config, weights_of(config), ops, device, torch.float32, 200)
        rng = random.Random(1)
        tokens = {s: [rng.randrange(VOCAB) for _ in range(n)] for s, n in enumerate((3, 60, 1, 33))}
        with torch.device(device):
            mine = PagedDriver(decoder, block_size=8)
        for _ in range(4):
            want = host.step(tokens)
            with torch.device(device):
                got = mine.step(tokens)
            worst = max(float((got[s].cpu() - want[s]).abs().max()) for s in tokens)
            assert worst < GAP
            tokens = {s: [rng.randrange(VOCAB)] for s in tokens}


@pytest.mark.parametrize(("family", "padded"), [
    (family, padded) for place, family in enumerate(FAMILY_NAMES) for padded in (False, True)
    if padded == bool(place % 2) or family in FAMILIES
])
def test_fp32_tokens_are_those_of_the_cpu_path_unless_two_were_as_likely(family: str, padded: bool) -> None:
    config = config_of(family)
    want = tokens_of(host_engine(config), greedy(12))
    got = tokens_of(device_engine(config, dtype="float32", pad_mixed=padded), greedy(12))
    for name, (tokens, logprobs) in want.items():
        for place, (mine, other) in enumerate(zip(got[name][0], tokens, strict=True)):
            if mine != other:
                best, second = logprobs[place].top_logprobs[:2]
                assert best - second < GAP, f"{name} differs at {place} where the gap is {best - second}"
                break


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_every_kind_of_sampling_draws_what_the_cpu_path_draws(family: str) -> None:
    config = config_of(family)
    want = tokens_of(host_engine(config), engines.workload(0, 22, VOCAB))
    got = tokens_of(device_engine(config, dtype="float32"), engines.workload(0, 22, VOCAB))
    same = sum(got[name][0] == want[name][0] for name in want)
    # A draw lands between two tokens where the last bits decide; one request in twenty may.
    assert same >= len(want) - 1


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_precision_stays_near_fp32(kind: str) -> None:
    config = config_of("qwen3")
    exact = tokens_of(device_engine(config, dtype="float32"), greedy(6, 1))
    near = tokens_of(device_engine(config, dtype=kind), greedy(6, 1))
    bound = 0.2 if kind == "bfloat16" else 0.03
    for name, (_, logprobs) in exact.items():
        a, b = logprobs[0], near[name][1][0]
        assert abs(a.top_logprobs[0] - b.top_logprobs[0]) < bound


def test_fp8_keys_and_values_stay_near_those_of_the_model() -> None:
    config = config_of("qwen3")
    plain = tokens_of(device_engine(config, dtype="bfloat16"), greedy(6, 2))
    small = tokens_of(device_engine(config, dtype="bfloat16", kv_cache_dtype="fp8"), greedy(6, 2))
    for name, (_, logprobs) in plain.items():
        assert abs(logprobs[0].top_logprobs[0] - small[name][1][0].top_logprobs[0]) < 0.5


# ---- the same bits


@pytest.mark.parametrize(("family", "dtype", "padded"), [
    ("llama", "float32", True), ("llama", "bfloat16", False), ("gemma3", "float32", False),
    ("gemma3", "bfloat16", True), ("gpt2", "float32", True), ("gpt2", "bfloat16", False),
])
def test_graphs_change_no_bit(family: str, dtype: str, padded: bool) -> None:
    config = config_of(family)
    found = [
        tokens_of(device_engine(config, dtype=dtype, pad_mixed=padded, enforce_eager=eager),
                  engines.workload(0, 22, VOCAB))
        for eager in (False, True)
    ]  # fmt: skip
    assert found[1] == found[0]


def test_as_many_tokens_as_sequences_in_a_step_are_no_stale_graph() -> None:
    """The trial step is then one that a graph could replay, over a cache that is gone once the pool is there."""
    config = config_of("llama")
    want = tokens_of(device_engine(config, dtype="float32"), greedy(6))
    found = tokens_of(device_engine(config, dtype="float32", budget=engines.SEQS), greedy(6))
    assert sum(found[name][0] == want[name][0] for name in want) >= len(want) - 1


def test_prompts_attended_to_out_of_their_steps_rows_stay_near_those_of_the_cache() -> None:
    """The first answers, before a close call can turn a text; heads large enough for that kernel, prompts too."""
    config = {**config_of("llama"), "head_dim": 64}

    def first(prompt_rows: bool) -> list[float]:
        core = device_engine(config, dtype="bfloat16", budget=400, prompt_rows=prompt_rows, pad_mixed=False)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2)
        requests = [Request(f"r{i}", [(7 * i + 5 * j) % VOCAB for j in range(n)], params, i, 0.0)
                    for i, n in enumerate((64, 65, 190, 40, 127))]
        found = tokens_of(core, requests)
        return [logprobs[0].top_logprobs[0] for _, logprobs in found.values()]

    for near, far in zip(first(True), first(False), strict=True):
        assert abs(near - far) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_inside_the_attention_changes_no_token_and_graphs_no_bit_of_it(dtype: str) -> None:
    """With heads large enough for the fused kernel; in bf16 a norm's last bit may turn the argmax of a close call."""
    config = {**config_of("qwen3"), "head_dim": 64}
    graphed = tokens_of(device_engine(config, dtype=dtype), engines.workload(0, 22, VOCAB))
    assert tokens_of(device_engine(config, dtype=dtype, enforce_eager=True), engines.workload(0, 22, VOCAB)) == graphed
    for depth in (1, 3):
        found = tokens_of(device_engine(config, dtype=dtype, depth=depth), greedy(engines.SEQS))
        assert found == tokens_of(device_engine(config, dtype=dtype, depth=2), greedy(engines.SEQS))
    apart = tokens_of(device_engine(config, dtype=dtype, fuse_rope=False), engines.workload(0, 22, VOCAB))
    same = sum(apart[name][0] == graphed[name][0] for name in apart)
    assert same >= len(apart) - (1 if dtype == "float32" else 4)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("gemma3", "float32")])
def test_overlap_changes_no_bit(family: str, dtype: str) -> None:
    config, count = config_of(family), engines.SEQS
    alone = tokens_of(device_engine(config, depth=1, dtype=dtype), greedy(count))
    for depth in (2, 3):
        assert tokens_of(device_engine(config, depth=depth, dtype=dtype), greedy(count)) == alone


def test_early_launch_changes_no_bit() -> None:
    config = config_of("qwen3")
    for count in (1, 2, 4):
        late = tokens_of(device_engine(config, dtype="bfloat16", launch_early=False), greedy(count, 60))
        early = tokens_of(device_engine(config, dtype="bfloat16", launch_early=True), greedy(count, 60))
        assert early == late


@pytest.mark.parametrize(("family", "dtype", "kept"), [
    *((family, "bfloat16", "auto") for family in FAMILIES),
    *((family, "float32", "auto") for family in ("llama", "gemma3", "gpt2")),
    ("qwen3", "bfloat16", "fp8"), ("heads of 128", "bfloat16", "auto"), ("heads of 128", "float16", "auto"),
])
def test_deterministic_means_the_same_bits_whatever_the_batch(family: str, dtype: str, kept: str) -> None:
    """Tokens, log-probabilities, and those of prompts; `tests/gpu/test_bits.py` says which operation is at fault.
    Hopper has kernels of its own for heads of 128."""
    config = {**config_of("qwen3"), **HEADS_OF_128} if family == "heads of 128" else config_of(family)

    def found(count: int = 22, alone: bool = False, **options: Any) -> dict[str, Any]:
        core = device_engine(config, dtype=dtype, kv_cache_dtype=kept, deterministic=True, **options)
        requests = engines.workload(0, count, VOCAB)
        parts = [[request] for request in requests] if alone else [requests]
        outcome = {name: one for part in parts for name, one in engines.run(core, part).items()}
        core.close()
        assert [error for *_, error in outcome.values() if error] == []
        return outcome

    base = found()
    changes: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True}, "chunks": {"budget": 17}, "one step at a time": {"depth": 1},
        "blocks": {"block_size": 16}, "preemption": {"num_blocks": 26}, "few": {"count": 2},
        "alone, one after another": {"alone": True}, "no prefix cache": {"prefix_caching": False},
        "mixed steps padded": {"pad_mixed": True},
        "mixed steps padded, eager": {"pad_mixed": True, "enforce_eager": True},
    }
    different = {}
    for name, change in changes.items():
        other = found(**change)
        wrong = [key for key in other if other[key] != base[key]]
        if wrong:
            different[name] = wrong
    assert different == {}


def test_borrowed_attention_agrees_with_ours() -> None:
    """Every library that is installed here, on the trial of the start; speed is not asked for."""
    from quire.attention import prefill_libraries
    from quire.kernels.types import HeadShape

    attention = TritonOps(torch.device("cuda"), torch.bfloat16).attention
    with torch.inference_mode():
        for candidate in prefill_libraries.installed():
            times = iter([1.0, 0.1])
            attention.prefill_library = None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prefill_libraries, "device_clock", lambda call, times=times: next(times))
                attention.try_out(HeadShape(16, 8, 128), [candidate])
            assert attention.prefill_library is candidate


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompts_by_a_library_give_our_tokens(family: str) -> None:
    from quire.attention import prefill_libraries

    torchs = [found for found in prefill_libraries.installed() if found.name == "torch varlen_attn"]
    if not torchs:
        pytest.skip("this torch has no varlen_attn")
    config = config_of(family)
    found = []
    for library in (None, torchs[0]):
        core = device_engine(config, dtype="float16", budget=80, pad_mixed=False)
        core.executor._worker._runner.contexts.attention.prefill_library = library
        found.append(tokens_of(core, greedy(6, 1)))
    for name, (_, logprobs) in found[0].items():
        assert abs(logprobs[0].top_logprobs[0] - found[1][name][1][0].top_logprobs[0]) < 0.03


def test_groups_and_beams_are_those_of_the_cpu_path() -> None:
    from tests.worker.gpu import test_groups

    settings = DeviceOptions(device="cuda", dtype="float32", max_num_seqs=engines.SEQS, max_num_batched_tokens=40,
                             max_model_len=engines.MAX_LEN)
    host = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=engines.SEQS, max_num_batched_tokens=40,
                         max_model_len=engines.MAX_LEN)
    want = test_groups.outcome(engines.QWEN3, device=True, options=host, ops=host_ops())
    assert test_groups.outcome(engines.QWEN3, device=True, depth=2, options=settings) == want


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammars_masks_hold_on_the_device(depth: int) -> None:
    from tests.worker.gpu import test_grammars

    config = config_of("qwen3")
    want = test_grammars.constrained(host_engine(config), VOCAB)
    found = test_grammars.constrained(device_engine(config, dtype="float32", depth=depth), VOCAB)
    test_grammars.assert_kept(found)
    same = sum(found[name][0] == want[name][0] for name in want)
    assert same >= len(want) - 1


# ---- through the front door


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    Path(path, "config.json").write_text(json.dumps(engines.QWEN3))
    return str(path)


def llm_of(folder: str, **options: Any) -> Any:
    from quire import LLM

    base = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "kv_cache_memory": "64MiB"}
    return LLM(folder, **{**base, **options})


def test_samples_and_beams_come_through_the_front_door(folder: str) -> None:
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    with llm_of(folder) as llm:
        found = llm.generate(prompts, SamplingParams(n=3, seed=1, max_tokens=6, detokenize=False), use_tqdm=False)
        assert [len(output.outputs) for output in found] == [3, 3]
        beams = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=5))
        assert [len(output.outputs) for output in beams] == [2, 2]


def test_swapped_out_and_in_changes_no_bit(folder: str) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(131) for _ in range(40)] for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    found = []
    short = {"kv_cache_memory": None, "num_kv_blocks": 24, "swap_space": 0.01, "preemption_mode": "swap"}
    for tight in ({}, short, {**short, "offload": True}):
        with llm_of(folder, deterministic=True, max_model_len=200, **tight) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False) + llm.generate(prompts, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            assert not tight or llm.metrics()["preemptions"] > 0
    assert found[1] == found[0] and found[2] == found[0]
