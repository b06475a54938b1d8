"""However large its input, no request holds the event loop: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.async_llm import AsyncLLM
from quire.server.api_error import ApiError
from quire.server.app import App
from quire.server.long_texts.text_work import AT_ONCE, Turns
from tests.server.scripted import running

TICK = 0.005
BOUND = 0.05
SAMPLE = json.dumps([[i, f"text {i}"] for i in range(8000)])
SAMPLE_SECONDS = 0.0045
"""CPU time of `slowness` on the machine of the figures."""
WORDS = ["alpha", "beta", " gamma", "δέλτα", "1234", "\n", "{}", "zzzzzzzz"]


class Lag:
    """How long the server's event loop could do nothing else, in CPU time: on a slow or busy machine the clock would
    count what other programs do.

    `own`: the most that the loop's thread computed between two of its ticks. `others`: the most that other threads of
    this process computed while a tick was late: they may have held the GIL.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._on, self.own, self.others = loop, True, 0.0, 0.0
        loop.call_soon_threadsafe(self._tick, None)

    def _tick(self, before: tuple[float, float, float] | None) -> None:
        now, own, everybody = self._loop.time(), time.thread_time(), time.process_time()
        if before is not None:
            due, own_before, everybody_before = before
            self.own = max(self.own, own - own_before)
            self.others = max(self.others, min(now - due, everybody - everybody_before - (own - own_before)))
        if self._on:
            self._loop.call_at(now + TICK, self._tick, (now + TICK, own, everybody))

    def end(self) -> tuple[float, float]:
        self._on = False
        return self.own, self.others


def slowness() -> float:
    """How many times longer this machine computes now than the one on which the bound of 50 ms was measured."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        json.dumps(json.loads(SAMPLE))
        times.append(time.thread_time() - began)
    return max(1.0, min(times) / SAMPLE_SECONDS)


@pytest.fixture(scope="module")
def real(smollm2: str) -> Iterator[tuple[str, App, asyncio.AbstractEventLoop]]:
    """A server with the tokenizer of a real model; its engine only pretends to compute."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def start() -> AsyncLLM:
        loops.append(asyncio.get_running_loop())
        return await AsyncLLM.start(smollm2, executor="dummy", num_threads=1, device="cpu")

    with running(start) as (address, app):
        text = "word " * 2000
        httpx.post(f"{address}/tokenize", json={"prompt": text}, timeout=120)  # its process has started
        httpx.post(f"{address}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
        gc.collect()
        gc.freeze()  # as `quire serve` does: what the other tests have left is not searched
        yield address, app, loops[0]
        gc.unfreeze()


def _text(characters: int) -> str:
    dice = random.Random(1)
    return "".join(dice.choice(WORDS) for _ in range(characters // 5))[:characters]


def _schema() -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(2000)}}


def _called(arguments: str, times: int = 1) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "a"}]
    return {"messages": turn * times, "max_tokens": 1}


INPUTS: dict[str, tuple[str, Any]] = {
    "tokenize": ("/tokenize", {"prompt": _text(3_000_000)}),
    "tokenize one word": ("/tokenize", {"prompt": "a" * 3_000_000}),
    "tokenize with strings": ("/tokenize", {"prompt": _text(500_000), "return_token_strs": True}),
    "tokenize messages": ("/tokenize", {"messages": [{"role": "user", "content": "hello " * 20}] * 5000}),
    "detokenize": ("/detokenize", {"tokens": [list(range(100, 500))[i % 400] for i in range(250_000)]}),
    "completion": ("/v1/completions", {"prompt": _text(3_000_000), "max_tokens": 1}),
    "completions": ("/v1/completions", {"prompt": [_text(4000)] * 100, "max_tokens": 1}),
    "echo": ("/v1/completions", {"prompt": [[100 + i % 400 for i in range(1500)]] * 100, "max_tokens": 0,
                                 "echo": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _text(3_000_000)}], "max_tokens": 1}),
    "chat of many": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 7000, "max_tokens": 1}),
    "too many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 60_000}),
    "too many tokens": ("/v1/completions", {"prompt": [1] * 700_000}),
    "too many arrays": ("/v1/completions", {"prompt": [[]] * 700_000}),
    "too many biases": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(200_000)}}),
    "schema": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": _schema()}}),
    "tools": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [
        {"type": "function", "function": {"name": f"f{i}", "parameters": _schema()}} for i in range(3)]}),
    "responses": ("/v1/responses", {"input": _text(3_000_000), "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": _text(3_000_000)}], "max_tokens": 1}),
    "token ids of no kind": ("/v1/completions", {"prompt": [True] * 230_000}),
    "ids and numbers": ("/v1/completions", {"prompt": [1.5, "a"] * 100_000}),
    "short prompts": ("/v1/completions", {"prompt": [[1]] * 25_000}),
    "allowed tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [
        i % 49_000 for i in range(200_000)]}),
    "stop tokens": ("/v1/completions", {"prompt": "a", "stop_token_ids": list(range(200_000))}),
    "biases": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(25_000)}}),
    "unknown fields": ("/v1/completions", {"prompt": "a", **{f"f{i}": 1 for i in range(25_000)}}),
    "long enum": ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"enum": list(range(240_000))}}}),
    "variables": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1,
                                           "chat_template_kwargs": {f"v{i}": i for i in range(25_000)}}),
    "arguments of numbers": ("/v1/chat/completions", _called('{"a": [' + "1," * 1_500_000 + "1]}")),
    "arguments of objects": ("/v1/chat/completions", _called('{"a": [' + "{}," * 1_000_000 + "1]}")),
    "many calls": ("/v1/chat/completions", _called('{"a": [' + "[]," * 5000 + "1]}", 200)),
    "arguments of responses": ("/v1/responses", {"input": [
        {"role": "user", "content": "a"}, {"type": "function_call", "call_id": "1", "name": "f",
                                           "arguments": '{"a": [' + "1," * 1_500_000 + "1]}"},
        {"type": "function_call_output", "call_id": "1", "output": "a"}]}),
    "items of responses": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 5000,
                                             "max_output_tokens": 16}),
    "unknown items of responses": ("/v1/responses", {"input": [{"type": "nothing"}] * 8000}),
    "unknown parts": ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": [{"type": "nothing"}]}] * 2500}),
    "input of a call": ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1] * 230_000}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a"}]}]}),
    "json in a text": ("/tokenize", {"prompt": json.dumps([{"a": [1, 2]}] * 60_000)}),
}


def _status(address: str, path: str, data: bytes) -> int:
    """A client that takes no time of its own from the server, which is in the same process."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
        client.sendall(data)
        status = int(client.recv(16).split(b" ")[1])
        while client.recv(1 << 20):
            pass
    return status


@pytest.mark.parametrize("kind", INPUTS)
def test_no_large_input_holds_the_event_loop(real: tuple[str, App, asyncio.AbstractEventLoop], kind: str) -> None:
    address, _, loop = real
    path, body = INPUTS[kind]
    data = json.dumps(body, ensure_ascii=False).encode()
    found = []
    for _ in range(5):
        slow = slowness()
        lag = Lag(loop)
        status = _status(address, path, data)
        own, others = lag.end()
        assert status in ((413,) if kind.startswith("too many") else (200, 400, 413))
        slow = max(slow, slowness())
        if own < BOUND * slow + TICK and others < BOUND * slow:
            return
        found.append((own, others, slow))
    pytest.fail(f"the loop was held (its thread, other threads, slowness of the machine): {found}")


def test_abandoned_texts_are_given_up_and_one_key_has_a_bound(
        real: tuple[str, App, asyncio.AbstractEventLoop]) -> None:
    address, _, _ = real
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "word " * 600_000}).encode()
    clients = []
    for _ in range(30):
        client = socket.create_connection((host, int(port)), timeout=30)
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
        client.sendall(body)
        clients.append(client)
    waiting, refused = list(clients), 0
    while refused < 15:
        ready, _, _ = select.select(waiting, [], [], 60)
        assert ready, f"{refused} were refused, and {len(waiting)} wait"
        for client in ready:
            refused += client.recv(64).startswith(b"HTTP/1.1 429")
            waiting.remove(client)
    for client in clients:
        client.close()
    short = httpx.post(f"{address}/tokenize", json={"prompt": "word " * 2000}, timeout=120)
    assert short.status_code == 200


def test_long_texts_have_the_tokens_that_the_tokenizer_gives(real: tuple[str, App, asyncio.AbstractEventLoop]) -> None:
    address, app, _ = real
    tokenizer = app.service.tokenizer
    assert tokenizer is not None
    for text in (_text(50_000), "<|im_start|>user\n" + "é" * 9000, " " * 10_000):
        whole = httpx.post(f"{address}/tokenize", json={"prompt": text, "return_token_strs": True}, timeout=60).json()
        assert whole["tokens"] == tokenizer.encode(text) and whole["count"] == len(whole["tokens"])
        assert whole["token_strs"] == [tokenizer.token_text(token) for token in whole["tokens"]]
        back = httpx.post(f"{address}/detokenize", json={"tokens": whole["tokens"]}, timeout=60).json()
        assert back["prompt"] == tokenizer.decode(whole["tokens"], False)
    bad = httpx.post(f"{address}/tokenize", content=b'{"prompt": "' + b"a" * 9000 + b'\\ud800"}', timeout=60,
                     headers={"content-type": "application/json"})
    assert bad.status_code == 400


def test_turns_are_shared_among_keys_smallest_first() -> None:
    async def job() -> list[str]:
        turns, order, gate = Turns(), [], asyncio.Event()

        async def work(tenant: str, name: str, size: int) -> None:
            async with turns.turn(tenant, size):
                order.append(name)
                await gate.wait()

        tasks = [asyncio.create_task(work("a", f"a{i}", 100 - i)) for i in range(8)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(work("b", "b0", 1000)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await work("a", "one too many", 1)
        assert caught.value.status == 429
        assert order == ["a0", "a1"] and AT_ONCE == 2
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(job())[2:5] == ["b0", "a7", "a6"]

