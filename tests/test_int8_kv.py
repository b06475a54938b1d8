"""The contract with `kv_cache_dtype="int8"`: a token's bits do not depend on the path to them there either."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config import EngineConfig
from quire.engine.assembly import device
from quire.errors import ConfigError, KVMismatchError
from quire.kvtransfer.layout import LayerLayout, LayoutDescription, PartLayout, check_compatible
from tests.checkpoints import make_checkpoint
from tests.peers.pairs import SECRET, answers, pair
from tests.test_same_tokens import PROMPTS, SHARED, assert_same, params, run

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}
FEW = PROMPTS[:6]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma2 has windows and caps its scores."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama", max_position_embeddings=512)
    return folder


def test_batches_chunks_blocks_threads_and_preemptions_change_no_bit(checkpoint: Path) -> None:
    plain = run(checkpoint, FEW, one_by_one=True, enable_prefix_caching=False, enable_chunked_prefill=False, **INT8)
    tight: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 6}
    for options in (
        {},
        {"max_num_batched_tokens": 7, "block_size": 3},
        {"block_size": 33, "num_threads": 1},
        {**tight, "preemption_mode": "recompute"},
        {**tight, "swap_space": 0.01, "preemption_mode": "swap", "max_steps_in_flight": 2},
    ):
        found = run(checkpoint, FEW, **options, **INT8)
        assert_same(found, plain)
        if "preemption_mode" in options:
            assert found[2]["preemptions"] > 0
    assert run(checkpoint, FEW[:2], one_by_one=True)[0] != run(checkpoint, FEW[:2], one_by_one=True, **INT8)[0]


ASKED = SamplingParams(seed=1, max_tokens=4, temperature=0.9, ignore_eos=True, logprobs=1)


def said(llm: LLM, prompt: list[int]) -> list[Any]:
    found = llm.generate([prompt], ASKED, use_tqdm=False)[0]
    return [(output.token_ids, output.logprobs) for output in found.outputs]


def test_sinks_change_nothing_of_that(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    plain = run(tmp_path, FEW[:3], one_by_one=True, enable_prefix_caching=False, enable_chunked_prefill=False, **INT8)
    assert_same(run(tmp_path, FEW[:3], max_num_batched_tokens=7, block_size=3, **INT8), plain)


def test_a_prefix_from_the_cache_or_the_disk_has_the_bits_of_a_fresh_one(llama: Path, tmp_path: Path) -> None:
    prompts = [SHARED + prompt[:5] for prompt in FEW]
    cold = run(llama, prompts, one_by_one=True, enable_prefix_caching=False, **INT8)
    warm = run(llama, prompts, one_by_one=True, block_size=4, **INT8)
    assert warm[2]["prefix_hit_tokens"] >= 5 * 36
    assert_same(warm, cold)
    document = [random.Random(3).randrange(3, 97) for _ in range(300)]
    texts = []
    for hits in (0, 256):  # the second engine finds on disk what the first one left there
        with LLM(str(llama), skip_tokenizer_init=True, kv_disk=f"{tmp_path}:50MB", kv_pool_policy="all", **INT8) as llm:
            texts.append(said(llm, document))
            assert llm.metrics()["tier_hit_tokens"] == hits
    assert texts[0] == texts[1]


def test_a_prefix_from_the_host_has_the_bits_of_a_fresh_one(llama: Path) -> None:
    others = [[random.Random(i).randrange(3, 97) for _ in range(40)] for i in range(8)]
    with LLM(str(llama), skip_tokenizer_init=True, block_size=4, num_kv_blocks=24, swap_space=0.01, offload=True,
             preemption_mode="recompute", eviction_policy="lru", **INT8) as llm:
        llm._core.scheduler.cache.cost = None  # fetching is always worth it
        first = said(llm, SHARED)
        llm.generate(others, ASKED, use_tqdm=False)
        assert said(llm, SHARED) == first and llm.metrics()["tier_hit_tokens"] > 0


@pytest.mark.parametrize("ranks", [(2, 1), (3, 1), (1, 2)])
def test_ranks_and_stages_give_the_tokens_of_one(llama: Path, ranks: tuple[int, int]) -> None:
    """Three ranks cut the two kv heads unevenly: one is on two ranks."""
    plain = run(llama, FEW, one_by_one=True, **INT8)
    options = {"tensor_parallel_size": ranks[0], "pipeline_parallel_size": ranks[1], "num_threads": 1,
               "distributed_executor_backend": "threads"}
    with LLM(str(llama), skip_tokenizer_init=True, **options, **INT8) as llm:
        outputs = llm.generate(FEW, [params(i) for i in range(len(FEW))], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == plain[1]


def test_drafts_and_beams_give_the_tokens_of_the_plain_path(llama: Path) -> None:
    plain = run(llama, FEW, one_by_one=True, **INT8)
    draft_model = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 2}
    for drafts in ({"method": "ngram", "num_speculative_tokens": 3}, draft_model):
        found = run(llama, FEW, speculative_config={**drafts, "adaptive": False}, **INT8)
        assert found[1] == plain[1] and found[2]["spec_draft_tokens"] > 0
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    likeliest = []
    for options in ({"enable_prefix_caching": False}, {"block_size": 4, "max_num_batched_tokens": 16}):
        with LLM(str(llama), skip_tokenizer_init=True, **options, **INT8) as llm:
            likeliest.append([[(beam.token_ids, beam.cumulative_logprob) for beam in output.outputs]
                              for output in llm.beam_search(FEW[:3], beams)])
    assert likeliest[0] == likeliest[1]


def test_a_prompt_computed_elsewhere_has_the_bits_of_one_computed_here(
        llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    common: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 120, "max_model_len": 128, **INT8}
    wanted = [SamplingParams(seed=i, max_tokens=6, temperature=1.0, logprobs=1, ignore_eos=True) for i in range(3)]
    prompts = [PROMPTS[i] for i in (8, 7, 6)]
    with LLM(str(llama), **common) as llm:
        alone = answers(llm, prompts, wanted)
    with pair(str(llama), {**common, "block_size": 8, "max_num_batched_tokens": 21}, {**common}) as (_, llm):
        assert answers(llm, prompts, wanted) == alone
        assert llm.metrics()["kv_prompts_arrived"] >= 2


def test_codes_and_floats_are_not_mixed_between_engines() -> None:
    layer = LayerLayout(0, 0, None, (PartLayout("k", 1, 5, 0, 1, True),))
    codes, floats = (LayoutDescription(dtype, 16, 4, (layer,)) for dtype in ("int32", "float32"))
    check_compatible(codes, codes)
    with pytest.raises(KVMismatchError, match="kv_cache_dtype") as refused:
        check_compatible(codes, floats, convert=True)
    assert refused.value.field == "dtype"


def test_what_cannot_keep_codes_is_refused_by_the_name_of_the_field(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    with pytest.raises(ConfigError, match="latents") as caught:
        LLM(str(tmp_path), skip_tokenizer_init=True, **INT8)
    assert caught.value.field == "kv_cache_dtype"
    monkeypatch.setattr(device, "missing_for_gpu", lambda: None)
    with pytest.raises(ConfigError, match="needs a CPU") as caught:
        device.resolve(EngineConfig.create(model=str(tmp_path), device="cuda", **INT8))
    assert caught.value.field == "kv_cache_dtype"
