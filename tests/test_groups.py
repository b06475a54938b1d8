"""Groups on real (tiny) models: samples that share their prompt, beams as transformers finds them, swapping."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError, InvalidRequestError, OutOfMemoryError
from quire.sampling.params import BeamSearchParams
from tests.checkpoints import make_checkpoint, make_model

PROMPT = random.Random(3).choices(range(3, 97), k=37)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model whose beams end early: tokens in the middle of some of them are made ends of sequence."""
    folder = tmp_path_factory.mktemp(request.param)
    beams = oracle(make_model(request.param, eos_token_id=[2]), PROMPT, 4, 12)
    eos = [2, beams[1][0][4], beams[3][0][7]]
    return folder, make_checkpoint(folder, request.param, eos_token_id=eos)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Any:
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4) as engine:
        yield engine


def tokens(output: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


# ---- n and best_of


def test_samples_differ_are_reproducible_and_are_those_of_their_own_stream(llm: LLM) -> None:
    params = SamplingParams(n=5, seed=5, max_tokens=9, ignore_eos=True)
    before = llm.metrics()
    first = llm.generate([PROMPT], params, use_tqdm=False)[0]
    assert len({tuple(t) for t in tokens(first)}) == 5
    assert [one.index for one in first.outputs] == list(range(5))
    assert tokens(llm.generate([PROMPT], params, use_tqdm=False)[0]) == tokens(first)
    alone = llm.generate([PROMPT], SamplingParams(seed=5, max_tokens=9, ignore_eos=True), use_tqdm=False)[0]
    assert tokens(alone)[0] == tokens(first)[0]
    after = llm.metrics()
    assert after["forks"] - before["forks"] == 8
    assert first.metrics.counts.copies_on_write == 4 * len(llm._core.scheduler.cache.groups)


def test_the_prompt_is_computed_once_for_all(checkpoint: tuple[Path, Any]) -> None:
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4) as llm:
        llm.generate([PROMPT], SamplingParams(n=8, seed=1, max_tokens=3), use_tqdm=False)
        assert llm.metrics()["prompt_tokens"] == len(PROMPT)


def test_a_prompt_of_whole_blocks_needs_no_copy(llm: LLM) -> None:
    output = llm.generate([PROMPT[:36]], SamplingParams(n=4, seed=1, max_tokens=3), use_tqdm=False)[0]
    assert output.metrics.counts.copies_on_write == 0


def test_best_of_returns_the_likeliest(llm: LLM) -> None:
    every = llm.generate([PROMPT], SamplingParams(n=6, seed=5, max_tokens=7, logprobs=0), use_tqdm=False)[0]
    best = llm.generate([PROMPT], SamplingParams(n=2, best_of=6, seed=5, max_tokens=7), use_tqdm=False)[0]
    ranked = sorted(every.outputs, key=lambda one: -(one.cumulative_logprob or 0.0))[:2]
    assert tokens(best) == [list(one.token_ids) for one in ranked]
    assert [one.cumulative_logprob for one in best.outputs] == [one.cumulative_logprob for one in ranked]
    assert [one.index for one in best.outputs] == [0, 1] and best.outputs[0].logprobs is None
    both = llm.generate([PROMPT], SamplingParams(n=6, best_of=6, seed=5, max_tokens=7), use_tqdm=False)[0]
    scores = [one.cumulative_logprob or 0.0 for one in both.outputs]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1


def test_a_stream_reports_each_sequence_by_index_and_best_of_only_at_the_end(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=2, max_tokens=6, ignore_eos=True)
    joined: dict[int, list[int]] = {0: [], 1: [], 2: []}
    last = None
    for output in llm.stream([PROMPT], params):
        for one in output.outputs:
            joined[one.index] += one.token_ids_delta
        last = output
    assert last is not None and last.finished and list(joined.values()) == tokens(last)
    shown = list(llm.stream([PROMPT], SamplingParams(n=1, best_of=3, seed=2, max_tokens=4)))
    assert len(shown) == 1 and shown[0].finished and len(shown[0].outputs) == 1


def test_a_group_is_aborted_as_one(llm: LLM) -> None:
    llm.add_request("group", PROMPT, SamplingParams(n=4, max_tokens=50, ignore_eos=True))
    llm.add_request("beams", PROMPT, BeamSearchParams(beam_width=4, max_tokens=50, ignore_eos=True))
    llm.add_request("young", PROMPT[:9], BeamSearchParams(beam_width=4, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        llm.step()
    llm.abort(["group", "beams", "young"])
    ended = {}
    while llm.has_unfinished_requests():
        ended |= {output.request_id: output for output in llm.step()}
    assert set(ended) == {"group", "beams", "young"}
    for output in ended.values():
        assert output.finished and {one.finish_reason for one in output.outputs} == {"abort"}
    llm.check()
    assert llm.metrics()["kv_blocks_used"] == 0


# ---- beam search


def oracle(model: Any, prompt: list[int], width: int, max_tokens: int, **options: Any) -> list[tuple[list[int], float]]:
    eos = model.config.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos)
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), num_beams=width,
            num_return_sequences=width, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **options)
    beams = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        cut = next((i + 1 for i, token in enumerate(output) if token in ends), max_tokens)
        beams.append((output[:cut], score))
    return beams


def assert_same_beams(output: Any, expected: list[tuple[list[int], float]], tolerance: float = 1e-4) -> None:
    assert tokens(output) == [beam for beam, _ in expected]
    for one, (_, score) in zip(output.outputs, expected, strict=True):
        assert one.score == pytest.approx(score, abs=tolerance)


@pytest.mark.parametrize(("width", "penalty", "early"), [
    (4, 1.0, False), (4, 0.0, True), (4, -1.0, "never"), (8, 0.0, False), (8, 2.0, True),
])
def test_the_beams_are_those_of_transformers(llm: LLM, checkpoint: Any, width: int, penalty: float,
                                             early: Any) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=penalty, early_stopping=early)
    found = llm.beam_search([PROMPT, PROMPT[:20]], params)
    for output, prompt in zip(found, [PROMPT, PROMPT[:20]], strict=True):
        expected = oracle(checkpoint[1], prompt, width, 12, length_penalty=penalty, early_stopping=early)
        assert_same_beams(output, expected)
    if penalty <= 0.0:
        assert any(one.finish_reason == "stop" for output in found for one in output.outputs)


def test_beams_in_a_mixed_and_crowded_batch_are_the_same(llm: LLM, checkpoint: Any) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10)
    expected = tokens(llm.beam_search([PROMPT], params)[0])
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4, num_kv_blocks=24, max_num_seqs=9,
             max_num_batched_tokens=16) as small:
        for i in range(6):
            small.add_request(f"s{i}", PROMPT[: 10 + i], SamplingParams(n=2, seed=i, max_tokens=12, ignore_eos=True))
            small.add_request(f"b{i}", PROMPT, params)
        done = {}
        while small.has_unfinished_requests():
            done |= {output.request_id: output for output in small.step() if output.finished}
            small.check()
        assert small.metrics()["preemptions"] > 0
        for i in range(6):
            assert tokens(done[f"b{i}"]) == expected


def test_eight_beams_over_a_long_prompt_share_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_position_embeddings=640)
    prompt = random.Random(1).choices(range(3, 97), k=512)
    width, length, size = 8, 24, 16
    with LLM(str(tmp_path), skip_tokenizer_init=True, block_size=size) as llm:
        llm.add_request("b", prompt, BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
        most = 0
        while llm.has_unfinished_requests():
            llm.step()
            most = max(most, llm.metrics()["kv_blocks_used"])
        one_sequence = -(-len(prompt) // size)
        assert one_sequence < most <= one_sequence + width * -(-length // size)


# ---- swap


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_a_pool_ten_times_too_small_changes_no_token(checkpoint: Any, mode: str) -> None:
    prompts = [PROMPT[: 5 + 3 * i % 30] + PROMPT[i : i + 6] for i in range(24)]
    params = [SamplingParams(n=1 + i % 3, seed=i, max_tokens=14, ignore_eos=True, logprobs=1) for i in range(24)]
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4) as plain:
        expected = plain.generate(prompts, params, use_tqdm=False)
    load = sum(-(-(len(p) + 14) // 4) * each.n for p, each in zip(prompts, params, strict=True))
    options = {"preemption_mode": mode, "swap_space": 0.01 if mode != "recompute" else 0.0}
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4, num_kv_blocks=load // 10,
             **options) as small:
        found = small.generate(prompts, params, use_tqdm=False)
        metrics = small.metrics()
        small.check()
    assert [tokens(o) for o in found] == [tokens(o) for o in expected]
    assert [[one.logprobs for one in o.outputs] for o in found] == [[one.logprobs for one in o.outputs]
                                                                   for o in expected]
    assert metrics["preemptions"] > 5
    assert metrics["preemptions"] == sum(o.metrics.counts.preemptions_for_memory for o in found)
    assert metrics["swaps_out"] == metrics["swaps_in"] == sum(o.metrics.counts.swaps_out for o in found)
    assert metrics["swap_bytes_out"] + metrics["swap_bytes_in"] == sum(o.metrics.counts.swap_bytes for o in found)
    assert (metrics["swaps_out"] > 0) == (mode == "swap") or mode == "auto"
    assert metrics["host_blocks_used"] == 0


def test_evicted_prefixes_come_back_from_the_host(checkpoint: Any) -> None:
    others = [random.Random(i).choices(range(3, 97), k=40) for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4, num_kv_blocks=24, swap_space=0.01,
             offload=True, preemption_mode="recompute", eviction_policy="lru") as llm:
        llm._core.scheduler.cache.cost = None  # fetching is always worth it
        first = llm.generate([PROMPT], params, use_tqdm=False)[0]
        crowd = llm.generate(others, params, use_tqdm=False)
        assert llm.metrics()["offloaded_blocks"] > 9
        again = llm.generate([PROMPT], params, use_tqdm=False)[0]
        metrics = llm.metrics()
        llm.check()
    assert tokens(again) == tokens(first) and again.outputs[0].logprobs == first.outputs[0].logprobs
    assert metrics["tier_hits"] > 0 and again.num_cached_tokens == 36
    assert again.metrics.counts.tier_hit_tokens > 0
    assert sum(output.metrics.counts.tier_hit_tokens for output in [*crowd, again]) == metrics["tier_hit_tokens"]


# ---- bad input


def test_what_cannot_be_is_refused_by_name_and_the_engine_goes_on(checkpoint: Any) -> None:
    with LLM(str(checkpoint[0]), skip_tokenizer_init=True, block_size=4, max_num_seqs=4, num_kv_blocks=20) as llm:
        for make, field in [
            (lambda: SamplingParams(n=3, best_of=2), "best_of"),
            (lambda: BeamSearchParams(beam_width=0, max_tokens=4), "beam_width"),
            (lambda: BeamSearchParams(beam_width=10**6, max_tokens=4), "beam_width"),
            (lambda: llm.generate([PROMPT], SamplingParams(n=5), use_tqdm=False), "n"),
            (lambda: llm.generate([PROMPT], SamplingParams(best_of=5), use_tqdm=False), "best_of"),
            (lambda: llm.beam_search([PROMPT], BeamSearchParams(beam_width=5, max_tokens=4)), "beam_width"),
            (lambda: llm.beam_search([PROMPT], BeamSearchParams(beam_width=40, max_tokens=4)), "beam_width"),
            (lambda: llm.beam_search([PROMPT], SamplingParams()), "params"),  # type: ignore[arg-type]
            (lambda: llm.generate([PROMPT], SamplingParams(n=4, max_tokens=40), use_tqdm=False), "max_tokens"),
        ]:
            with pytest.raises(InvalidRequestError) as caught:
                make()
            assert caught.value.field == field, str(caught.value)
        assert llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_swap_space_that_is_not_there_is_refused(checkpoint: Any) -> None:
    with pytest.raises(OutOfMemoryError, match="swap_space takes"):
        LLM(str(checkpoint[0]), skip_tokenizer_init=True, swap_space=1e5)
    for options in ({"swap_space": -1.0}, {"offload": True}, {"preemption_mode": "swap"}, {"swap_space": 1e-9}):
        with pytest.raises(ConfigError):
            LLM(str(checkpoint[0]), skip_tokenizer_init=True, **options)
