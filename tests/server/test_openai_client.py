"""The real openai client, sync and async, against a tiny model that computes, in an engine process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.server.app import App
from tests.server.scripted import running

KEY, OTHER_KEY = "key-for-the-tests", "key-of-another"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, App]]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"tests {KEY}\n{OTHER_KEY}\n")

    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), load_format="dummy", num_threads=1, device="cpu",
                                    scheduling_policy="fair")

    with running(start, api_key_file=str(file), served_model_name="tiny") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: tuple[str, App]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key=KEY, max_retries=0, timeout=60.0)


def test_completions_are_those_of_llm(client: openai.OpenAI, tiny: Path) -> None:
    with LLM(str(tiny), load_format="dummy", num_threads=1, device="cpu") as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
        (expected,) = llm.generate(["Once upon"], params, use_tqdm=False)
    found = client.completions.create(model="tiny", prompt="Once upon", max_tokens=12, logprobs=2, **GREEDY,
                                      extra_body={"ignore_eos": True, "return_token_ids": True})
    choice = found.choices[0]
    assert choice.text == expected.outputs[0].text and choice.finish_reason == "length"
    assert choice.token_ids == expected.outputs[0].token_ids  # type: ignore[attr-defined]
    assert choice.logprobs is not None and expected.outputs[0].logprobs is not None
    assert choice.logprobs.token_logprobs == [
        next(iter(position.values())).logprob for position in expected.outputs[0].logprobs]
    assert found.usage is not None and found.usage.completion_tokens == 12


def test_a_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 24, "n": 2, **GREEDY}
    whole = client.chat.completions.create(**asked)
    texts: dict[int, str] = {}
    usage = None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        usage = chunk.usage
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None


def test_many_callers_at_once(server: tuple[str, App]) -> None:
    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=KEY, max_retries=0, timeout=60.0) as client:

            async def one(number: int) -> tuple[str, str]:
                asked: dict[str, Any] = {"model": "tiny", "max_tokens": 10 + number, **GREEDY}
                pieces = []
                async for chunk in await client.completions.create(prompt=f"Number {number}", stream=True, **asked):
                    pieces.append(chunk.choices[0].text)
                whole = await client.completions.create(prompt=f"Number {number}", **asked)
                return "".join(pieces), whole.choices[0].text

            return await asyncio.gather(*[one(number) for number in range(16)])

    for streamed, whole in asyncio.run(main()):
        assert streamed == whole


def test_errors_are_those_that_the_client_knows(server: tuple[str, App], client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt") as refused:
        client.completions.create(model="tiny", prompt="")
    assert refused.value.param == "prompt" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="unknown field nonsense"):
        client.completions.create(model="tiny", prompt="x", extra_body={"nonsense": 1})
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="not-the-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"


def test_groups_and_extras(client: openai.OpenAI) -> None:
    beams = client.completions.create(model="tiny", prompt="Once", max_tokens=6, n=2,
                                      extra_body={"use_beam_search": True, "beam_width": 3})
    assert len(beams.choices) == 2
    best = client.completions.create(model="tiny", prompt="Once", max_tokens=6, n=2, best_of=4)
    assert len(best.choices) == 2
    scored = client.completions.create(model="tiny", prompt="Once", max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].logprobs is not None and scored.choices[0].logprobs.token_logprobs is not None
    assert len(scored.choices[0].logprobs.token_logprobs) == 4
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3,
                                          logit_bias={"5": -100}, presence_penalty=0.5, extra_body={"top_k": 5})
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 3


def test_a_salt_hides_what_is_cached(client: openai.OpenAI) -> None:
    prompt = "A prompt of more than one block, which is cached when it was computed once. " * 2

    def cached(salt: str) -> int:
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt})
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        return found.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("mine") == 0 and cached("mine") > 64 and cached("other") == 0


def test_no_key_sees_what_is_cached_for_another(server: tuple[str, App]) -> None:
    def cached(key: str) -> int:
        client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key=key, max_retries=0)
        found = client.completions.create(model="tiny", prompt="The same long prompt. " * 9, max_tokens=1)
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        return found.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(KEY) == 0 and cached(KEY) > 100
    assert cached(OTHER_KEY) == 0
