"""AsyncLLM: the same tokens as LLM, for many at once, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, InvalidRequestError, SamplingParams
from tests.async_engines import greedy, last, run
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "llama")
    return folder


def test_its_outputs_are_those_of_llm(tiny: Path) -> None:
    prompts = [[3, 4, 5], [6, 7], [8] * 20]
    params: list[Any] = [greedy(9), SamplingParams(max_tokens=8, seed=5, n=2, logprobs=2, prompt_logprobs=1),
                         SamplingParams(max_tokens=7, seed=9, best_of=3)]
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    with LLM(str(tiny), skip_tokenizer_init=True, num_threads=1, device="cpu") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False) + llm.beam_search([[9, 9]], beams)

    async def job(llm: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*[last(llm.generate(prompt, each)) for prompt, each in
                                      zip([*prompts, [9, 9]], [*params, beams], strict=True)])

    found = run(job, tiny, skip_tokenizer_init=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert [(o.token_ids, o.logprobs, o.finish_reason, o.score) for o in ours.outputs] == \
            [(o.token_ids, o.logprobs, o.finish_reason, o.score) for o in theirs.outputs]
        assert ours.prompt_logprobs == theirs.prompt_logprobs and ours.finished and ours.error is None
        assert ours.metrics.arrival_time <= ours.metrics.first_scheduled_time <= ours.metrics.first_token_time \
            <= ours.metrics.finished_time


def test_a_request_that_cannot_be_served_raises_before_it_is_sent_and_harms_nobody(tiny: Path) -> None:
    async def job(llm: AsyncLLM) -> None:
        for prompt, params in (([], None), ([97], None), ([1] * 256, None), ("text", None),
                               ([1], SamplingParams(n=64)), ([1], SamplingParams(stop_token_ids=[97]))):
            stream = llm.generate(prompt, params)
            with pytest.raises(InvalidRequestError):
                await stream.start()
        assert llm.num_in_flight == 0
        assert len((await last(llm.generate([1], greedy(3)))).outputs[0].token_ids) == 3

    run(job, tiny, skip_tokenizer_init=True, max_num_seqs=8)
