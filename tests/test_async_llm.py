"""AsyncLLM: the same tokens as LLM, for many at once, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, InvalidRequestError, SamplingParams
from quire.engine.front.request_stream import RequestStream
from quire.errors import EngineDeadError, EngineError, QueueFullError, RequestTimeoutError
from quire.structured.spec import StructuredOutputs
from tests.async_engines import greedy, last, run, until
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

    found = run(job, tiny, skip_tokenizer_init=True, max_steps_in_flight=2)
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


DUMMY: dict[str, Any] = {"executor": "dummy", "num_kv_blocks": 4096}


async def comes_to_rest(llm: AsyncLLM) -> dict[str, Any]:
    """The engine holds nothing for anybody, and its books are in order."""
    await until(lambda: llm.num_in_flight == 0)
    metrics = await llm.metrics(refresh=True)
    assert metrics["kv_blocks_used"] == 0 and metrics["requests_running"] == metrics["requests_waiting"] == 0
    assert metrics["invariant_errors"] == 0 and metrics["requests_queued"] == 0
    await llm.check()
    return metrics


def test_text_and_stop_strings_are_those_of_llm(smollm2: str) -> None:
    prompts = ["The capital of France is", "1, 2, 3,", "Once upon a time"]
    params = [greedy(24), greedy(24, stop=[" 9", ", 12"]), greedy(24, stop="the", include_stop_str_in_output=True)]
    with LLM(smollm2, num_threads=1, device="cpu") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)

    async def one(llm: AsyncLLM, prompt: str, params: SamplingParams, kind: str) -> Any:
        text, tokens, final = "", [], None
        async for output in llm.generate(prompt, params, output_kind=kind):
            for each in output.outputs:
                text += each.text_delta
                tokens += each.token_ids_delta
            final = output
        assert final is not None and final.finished
        return text, tokens, final.outputs[0].finish_reason, final.outputs[0].stop_reason

    async def job(llm: AsyncLLM) -> list[Any]:
        found = await asyncio.gather(*[one(llm, prompt, each, kind) for kind in ("cumulative", "delta", "final")
                                       for prompt, each in zip(prompts, params, strict=True)])
        metrics = await comes_to_rest(llm)
        assert metrics["requests_finished"] == 9 and metrics["requests_aborted"] == 0
        return found

    wanted = [(o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason)
              for o in expected]
    assert any(reason == "stop" for _, _, reason, _ in wanted)
    assert run(job, smollm2) == wanted * 3


def test_five_hundred_streams_at_once(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*[last(llm.generate([1, i], greedy(40))) for i in range(500)])
        assert all(len(output.outputs[0].token_ids) == 40 and output.error is None for output in outputs)
        metrics = await comes_to_rest(llm)
        assert metrics["requests_finished"] == 500 and metrics["output_tokens"] == 20_000

    run(job, smollm2, max_waiting_requests=500, **DUMMY)


async def drained(stream: RequestStream) -> None:
    """Read to the end; the last output, if any is left, says that it is the last."""
    outputs = [output async for output in stream]
    assert not outputs or outputs[-1].finished


def test_after_a_storm_of_aborts_the_pool_is_whole(smollm2: str) -> None:
    dice = random.Random(0)

    async def one(llm: AsyncLLM, number: int) -> None:
        params = greedy(dice.randrange(1, 400), n=dice.choice([1, 1, 3]))
        stream = llm.generate([number % 7] * dice.randrange(1, 200), params, request_id=f"storm-{number}")
        how = dice.randrange(5)
        await stream.start()
        for _ in range(dice.randrange(3)):
            await anext(stream, None)
        if how == 0:
            await stream.aclose()
        elif how == 1:
            await llm.abort(f"storm-{number}")
            await drained(stream)
        elif how == 2:
            del stream
        elif how == 3:
            task = asyncio.create_task(drained(stream))
            await asyncio.sleep(0.01 * dice.random())
            task.cancel()
        else:
            await drained(stream)

    async def job(llm: AsyncLLM) -> None:
        for batch in range(4):
            await asyncio.gather(*[one(llm, 100 * batch + i) for i in range(100)])
        await comes_to_rest(llm)
        assert not llm._desk._names and not llm._desk._subscriptions

    run(job, smollm2, max_waiting_requests=500, **DUMMY)


def test_closing_a_stream_frees_its_blocks_within_two_steps(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        usage: list[float] = []
        llm.on_step_stats = lambda stats: usage.append(stats.kv_usage)
        small, large = llm.generate([1] * 32, greedy(3000)), llm.generate([2] * 3200, greedy(3000))
        await anext(small)
        await anext(large)
        await until(lambda: usage[-1] > 202 / 4096)
        before = len(usage)
        await large.aclose()
        await until(lambda: len(usage) >= before + 3)
        # The step that runs when it is closed, and the one that is planned without it.
        assert max(usage[before + 1:]) < 20 / 4096 < usage[before - 1]
        await small.aclose()
        await comes_to_rest(llm)

    run(job, smollm2, dummy_step_ms=50.0, **DUMMY)


def test_a_slow_reader_gets_fewer_and_larger_outputs_and_slows_nobody(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        slow = llm.generate([1], greedy(300), output_kind="delta")
        first = await anext(slow)
        quick = await last(llm.generate([2], greedy(300)))
        assert len(quick.outputs[0].token_ids) == 300
        await until(lambda: llm.num_in_flight == 0)
        rest = [output async for output in slow]
        assert len(rest) == 1 and rest[0].finished
        assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 300

    run(job, smollm2, dummy_step_ms=1.0, **DUMMY)


def test_a_full_queue_refuses_and_says_when_to_come_back(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        streams = [llm.generate([1], greedy(300)) for _ in range(5)]
        for stream in streams:
            await stream.start()
        with pytest.raises(QueueFullError) as caught:
            await llm.generate([1], greedy(100)).start()
        assert 1.0 <= caught.value.retry_after <= 60.0
        assert (await llm.metrics())["requests_queued"] == 3
        assert len({len((await last(stream)).outputs[0].token_ids) for stream in streams}) == 1
        await last(llm.generate([1], greedy(5)))
        metrics = await comes_to_rest(llm)
        assert metrics["requests_refused_queue_full"] == 1 and metrics["requests_finished"] == 6

    run(job, smollm2, max_num_seqs=2, max_waiting_requests=3, dummy_step_ms=5.0, **DUMMY)


def test_a_request_is_given_up_after_its_time(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        with pytest.raises(RequestTimeoutError, match=r"within 0\.3 seconds"):
            await last(llm.generate([1], greedy(5000), timeout=0.3))
        with pytest.raises(RequestTimeoutError, match=r"within 0\.6 seconds"):
            await last(llm.generate([1], greedy(5000)))
        await last(llm.generate([1], greedy(3), timeout=60.0))
        metrics = await comes_to_rest(llm)
        assert metrics["requests_timed_out"] == 2 and metrics["requests_aborted"] == 2

    run(job, smollm2, request_timeout=0.6, dummy_step_ms=5.0, **DUMMY)


def test_an_id_in_use_is_refused_and_free_again_afterwards(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        first = llm.generate([1], greedy(1000), request_id="a")
        await first.start()
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="'a' is in use"):
                await llm.generate([1], greedy(2), request_id="a").start()
        assert llm.num_in_flight == 1
        await first.aclose()
        assert (await last(llm.generate([1], greedy(2), request_id="a"))).request_id == "a"
        await comes_to_rest(llm)

    run(job, smollm2, dummy_step_ms=2.0, **DUMMY)


def test_structured_outputs_and_speculation_cross_the_wire(smollm2: str) -> None:
    shape = StructuredOutputs(choice=["yes", "no"])

    async def job(llm: AsyncLLM) -> None:
        chosen, plain = await asyncio.gather(
            last(llm.generate("Is it?", SamplingParams(max_tokens=8, structured_outputs=shape))),
            last(llm.generate([5] * 20, greedy(30))))
        assert chosen.outputs[0].text in ("yes", "no") and len(plain.outputs[0].token_ids) == 30
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            await last(llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(regex="(" * 9))))
        await comes_to_rest(llm)

    run(job, smollm2, speculative_config={"method": "ngram", "num_speculative_tokens": 2}, **DUMMY)


def test_an_abort_reaches_a_request_that_is_still_being_tokenized(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        reading = asyncio.create_task(last(llm.generate("word " * 5000, greedy(1000), request_id="a")))
        await until(lambda: "a" in llm._desk._names)
        await llm.abort("a")
        await llm.abort("no such request")
        assert (await reading).outputs[0].finish_reason == "abort"
        await comes_to_rest(llm)

    run(job, smollm2, dummy_step_ms=2.0, **DUMMY)


def test_a_request_whose_text_cannot_be_made_fails_alone(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def job(llm: AsyncLLM) -> None:
        good, bad = llm.generate([1], greedy(50)), llm.generate([2], greedy(50))
        await bad.start()
        await good.start()
        assert bad._subscription is not None
        monkeypatch.setattr(bad._subscription.processor._sequences[0], "_text", None)
        with pytest.raises(EngineError, match="could not be made"):
            await last(bad)
        assert len((await last(good)).outputs[0].token_ids) == 50
        await comes_to_rest(llm)

    run(job, smollm2, dummy_step_ms=2.0, **DUMMY)


def test_a_listener_to_steps_that_raises_stops_nothing(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        llm.on_step_stats = lambda stats: 1 / 0  # type: ignore[assignment]
        assert len((await last(llm.generate([1], greedy(50)))).outputs[0].token_ids) == 50

    run(job, smollm2, **DUMMY)


def test_a_long_prompt_is_tokenized_beside_the_streams(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        long, short = await asyncio.gather(last(llm.generate("word " * 5000, greedy(2))),
                                           last(llm.generate("word", greedy(2))))
        assert len(long.prompt_token_ids) == 5001 and short.prompt == "word"
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            await llm.generate("word " * 9000, greedy(2)).start()

    run(job, smollm2, **DUMMY)


def test_the_numbers_of_steps_add_up_to_the_workload(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        seen: list[Any] = []
        llm.on_step_stats = seen.append
        await asyncio.gather(*[last(llm.generate([1] * 10 + [i], greedy(20))) for i in range(8)])
        metrics = await comes_to_rest(llm)
        assert sum(step.output_tokens for step in seen) == metrics["output_tokens"] == 160
        assert sum(step.prompt_tokens for step in seen) == metrics["prompt_tokens"] == 88
        assert len(seen) == metrics["steps"] and all(step.seconds > 0 for step in seen)

    run(job, smollm2, enable_prefix_caching=False, **DUMMY)


def test_health_says_no_more_than_is_so(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        await llm.check_health()
        assert llm.state == "ready" and llm.model_name == smollm2 and llm.tokenizer is not None
        assert (await llm.metrics())["kv_blocks_total"] == 4096 and (await llm.metrics())["steps"] == 0
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await llm.metrics(refresh=True)

    run(job, smollm2, **DUMMY)
