"""The contract: the bits of a token's logits do not depend on the path by which it was computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.checkpoints import FAMILY_NAMES, make_checkpoint
from tests.engine_capture import Bits, record_logits

PROMPTS = [random.Random(i).choices(range(3, 97), k=3 + 7 * i % 61) for i in range(32)]
SHARED = random.Random(99).choices(range(3, 97), k=40)


def params(index: int, max_tokens: int = 12) -> SamplingParams:
    """A mix: greedy, plain, filtered, penalised; seeds name the request in the record."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    return SamplingParams(seed=1000 + index, max_tokens=max_tokens, ignore_eos=True, **kinds[index % 4])


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param)
    return folder


def run(
    folder: Path, prompts: list[list[int]], *, one_by_one: bool = False, **options: Any
) -> tuple[Bits, list[list[int]], dict[str, Any]]:
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        bits = record_logits(llm)
        wanted = [params(i) for i in range(len(prompts))]
        batches = [[i] for i in range(len(prompts))] if one_by_one else [list(range(len(prompts)))]
        tokens = []
        for batch in batches:
            outputs = llm.generate([prompts[i] for i in batch], [wanted[i] for i in batch], use_tqdm=False)
            tokens += [output.outputs[0].token_ids for output in outputs]
        llm.check()
        return bits, tokens, llm.metrics()


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> tuple[Bits, list[list[int]], dict[str, Any]]:
    return run(checkpoint, PROMPTS, one_by_one=True, enable_prefix_caching=False, enable_chunked_prefill=False)


def assert_same(found: tuple[Bits, list[list[int]], Any], plain: tuple[Bits, list[list[int]], Any]) -> None:
    assert found[1] == plain[1]
    assert found[0] == plain[0]


def test_alone_or_among_31_others(checkpoint: Path, plain: Any) -> None:
    assert_same(run(checkpoint, PROMPTS, enable_prefix_caching=False), plain)


@pytest.mark.parametrize("budget", [1, 5, 33, 64])
def test_prompt_whole_or_in_chunks_of_any_size(checkpoint: Path, plain: Any, budget: int) -> None:
    count = 6 if budget == 1 else 16
    found = run(checkpoint, PROMPTS[:count], max_num_batched_tokens=budget)
    assert found[1] == plain[1][:count]
    assert found[0].items() <= plain[0].items()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(checkpoint: Path, plain: Any, block_size: int) -> None:
    assert_same(run(checkpoint, PROMPTS, block_size=block_size), plain)


def test_preempted_any_number_of_times(checkpoint: Path, plain: Any) -> None:
    found = run(checkpoint, PROMPTS, block_size=4, num_kv_blocks=24, max_num_seqs=8)
    assert found[2]["preemptions"] >= 3
    assert_same(found, plain)


def test_one_thread_or_two(checkpoint: Path, plain: Any) -> None:
    assert_same(run(checkpoint, PROMPTS, num_threads=1), plain)
    assert_same(run(checkpoint, PROMPTS, num_threads=2), plain)


def test_two_and_three_steps_in_flight(checkpoint: Path, plain: Any) -> None:
    for depth in (2, 3):
        assert_same(run(checkpoint, PROMPTS, max_steps_in_flight=depth, num_kv_blocks=20), plain)


def test_any_arrival_order(checkpoint: Path, plain: Any) -> None:
    with LLM(str(checkpoint), skip_tokenizer_init=True, max_num_seqs=5) as llm:
        bits = record_logits(llm)
        order = random.Random(5).sample(range(len(PROMPTS)), len(PROMPTS))
        for i in order:
            llm.add_request(str(i), PROMPTS[i], params(i))
            llm.step()
        while llm.has_unfinished_requests():
            llm.step()
    assert bits == plain[0]


def test_prefix_cold_warm_and_partly_evicted(checkpoint: Path) -> None:
    prompts = [SHARED + prompt[:5] for prompt in PROMPTS[:8]]
    cold = run(checkpoint, prompts, one_by_one=True, enable_prefix_caching=False)
    warm = run(checkpoint, prompts, one_by_one=True, block_size=4)
    assert warm[2]["prefix_hit_tokens"] >= 7 * 36
    assert_same(warm, cold)
    evicted = run(checkpoint, prompts, one_by_one=True, block_size=4, num_kv_blocks=19)
    assert evicted[2]["kv_blocks_evicted"] > 0 and evicted[2]["prefix_hit_tokens"] > 0
    assert_same(evicted, cold)
