"""What a reader gets: everything once, in as few pieces as its pace allows, the same whatever that pace is."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from quire.engine.front.subscription import Subscription
from quire.engine.outputs.output_processor import OutputProcessor
from quire.engine.process import messages as m
from quire.errors import EngineDeadError
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import TokenLogprobs
from quire.scheduler.request import Request
from tests.engine.vocabularies import byte_level

TOKENIZER = byte_level()
TEXT = "Grüße aus Köln: 👍🏽 私はガラスを食べられます. The quick brown fox"


def subscription(kind: str, **params: Any) -> Subscription:
    request = Request("r", [1, 2], SamplingParams(max_tokens=1000, **params), seed=1, arrival_time=0.0)
    return Subscription(1, request, OutputProcessor("r", request.params, TOKENIZER, [1, 2]), kind)


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_join_to_the_whole_at_any_pace(kind: str, seed: int) -> None:
    dice, tokens = random.Random(seed), TOKENIZER.encode(TEXT)
    one = subscription(kind)

    async def feed() -> None:
        for token in tokens:
            assert one.take_token(token) is None
            one.wake()
            if dice.random() < 0.5:
                await asyncio.sleep(0)
        one.take(m.SequenceNews(1, 0, [], finish_reason="length"))
        one.end()
        one.wake()

    async def read() -> list[Any]:
        found = []
        while (output := await one.next()) is not None:
            found.append(output)
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
        return found

    async def both() -> list[Any]:
        return (await asyncio.gather(read(), feed()))[0]

    outputs = asyncio.run(both())
    parts = [part for output in outputs for part in output.outputs]
    assert "".join(part.text_delta for part in parts) == TEXT
    assert [token for part in parts for token in part.token_ids_delta] == tokens
    assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
    assert parts[-1].finish_reason == "length"
    if kind == "delta":
        assert all(part.text == part.text_delta and part.token_ids == part.token_ids_delta for part in parts)
    else:
        assert parts[-1].text == TEXT and parts[-1].token_ids == tokens
    assert kind != "final" or len(outputs) == 1


def test_only_sequences_with_news_are_in_a_delta_and_their_log_probabilities_are_new_ones() -> None:
    one = subscription("delta", n=2, logprobs=0)

    def push(index: int, token: int, reason: str | None = None) -> None:
        one.take(m.SequenceNews(1, index, [token], reason, logprobs=[TokenLogprobs(token, -0.5, 1, [], []).pack()]))

    async def read() -> list[Any]:
        found = []
        for step in ([(0, 300, None)], [(0, 301, None), (1, 302, None)], [(1, 303, "length")], [(0, 304, "length")]):
            for index, token, reason in step:
                push(index, token, reason)
            found.append(await one.next())
        one.end()
        assert await one.next() is None
        return found

    outputs = asyncio.run(read())
    seen = [[(part.index, part.token_ids, [list(p) for p in part.logprobs], part.finish_reason)
             for part in output.outputs] for output in outputs]
    assert seen == [[(0, [300], [[300]], None)], [(0, [301], [[301]], None), (1, [302], [[302]], None)],
                    [(1, [303], [[303]], "length")], [(0, [304], [[304]], "length")]]
    assert [output.finished for output in outputs] == [False, False, False, True]


def test_ranked_sequences_come_whole_at_the_end_whatever_was_asked_for() -> None:
    one = subscription("delta", n=1, best_of=2)
    for index, logprob in ((0, -3.0), (1, -1.0)):
        record = TokenLogprobs(7, logprob, 1, [], []).pack()
        one.take(m.SequenceNews(1, index, [310 + index], "length", logprobs=[record]))
    one.end()
    output = asyncio.run(one.next())
    assert output is not None and [(part.index, part.token_ids) for part in output.outputs] == [(0, [311])]


def test_a_failure_is_raised_once_and_wakes_who_waits() -> None:
    one = subscription("cumulative")

    async def job() -> None:
        waiting = asyncio.create_task(one.next())
        await asyncio.sleep(0)
        one.fail(EngineDeadError("gone"))
        one.fail(EngineDeadError("gone again"))
        with pytest.raises(EngineDeadError, match=r"^gone$"):
            await waiting
        assert await one.next() is None

    asyncio.run(job())


def test_a_stop_string_across_tokens_is_reported_once_and_ends_the_text_before_it() -> None:
    one = subscription("cumulative", stop="brown fox")
    stops = [one.take_token(token) for token in TOKENIZER.encode("The quick brown fox jumps")]
    assert [stop for stop in stops if stop is not None] == ["brown fox"]
    output = asyncio.run(one.next())
    assert output is not None
    part = output.outputs[0]
    assert (part.text, part.stop_reason) == ("The quick ", "brown fox")
    assert len(part.token_ids) == stops.index("brown fox") + 1
