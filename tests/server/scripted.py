"""An engine whose answers are written beforehand, with the interface of AsyncLLM, and a server around any engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from quire.engine.outputs.output import RequestOutput
from quire.engine.outputs.output_processor import OutputProcessor
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs
from quire.server.app import App
from quire.server.run import Stops, serve
from quire.server_config import ServerConfig
from quire.tokenizer.tokenizer import Tokenizer


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, make: Callable[[], AsyncIterator[RequestOutput]]) -> None:
        self._engine, self._outputs = engine, make()

    async def start(self) -> None:
        if self._engine.refuses is not None:
            raise self._engine.refuses

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        return await anext(self._outputs)

    async def aclose(self) -> None:
        await self._outputs.aclose()  # type: ignore[attr-defined]


class ScriptedEngine:
    """Answers every prompt with `text`, a token at a time; notes what it was asked."""

    model_name = "scripted"
    options = None
    """Nobody could read its tokenizer again: long texts are worked on in this process."""
    max_model_len = 4096
    config = None
    kv_listens = None
    kv_log = None
    """It holds nothing that could be told."""

    def __init__(self, tokenizer: Tokenizer, text: str = "Hello, world!", *, tokens_at_once: int = 1) -> None:
        self.tokenizer: Tokenizer | None = tokenizer
        self.text = text
        self.tokens_at_once = tokens_at_once
        self.delay = 0.0
        self.asked: list[tuple[list[int], Any, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.running = 0
        self.refuses: Exception | None = None
        self.fails_after: tuple[int, Exception] | None = None
        self.healthy = True
        self.on_step_stats: Any = None

    def generate(self, prompt: Any, params: Any, *, request_id: str, output_kind: str = "cumulative",
                 **more: Any) -> ScriptedStream:
        ids = prompt["prompt_token_ids"]
        self.asked.append((ids, params, {"request_id": request_id, **more}))
        return ScriptedStream(self, lambda: self._run(request_id, ids, params, output_kind))

    async def _run(self, request_id: str, ids: list[int], params: Any, kind: str) -> AsyncIterator[RequestOutput]:
        assert self.tokenizer is not None
        sampling = params if isinstance(params, SamplingParams) else SamplingParams(max_tokens=params.max_tokens)
        width = None if isinstance(params, SamplingParams) else params.beam_width
        work = OutputProcessor(request_id, sampling, self.tokenizer, ids, num_sequences=width,
                               arrival_time=time.monotonic())
        work.num_cached_tokens = len(ids) // 2
        work.metrics.first_scheduled_time = time.monotonic()
        script = self.tokenizer.encode(self.text, add_special_tokens=False)
        script = [*script, self.tokenizer.eos_token_id or 0]
        if sampling.prompt_logprobs is not None:
            work.add_prompt_logprobs([_logprobs(token) for token in ids[1:]])
        self.running += 1
        finished = False
        try:
            most = sampling.max_tokens or len(script)
            for place in range(0, len(script), self.tokens_at_once):
                await asyncio.sleep(self.delay)
                if self.fails_after is not None and place >= self.fails_after[0]:
                    raise self.fails_after[1]
                self._feed(work, script[place:place + self.tokens_at_once], place, most)
                finished = work.finished
                if finished or (kind != "final" and not work.silent_until_done):
                    yield work.output(only_new=kind == "delta")
                if finished:
                    return
        finally:
            self.running -= 1
            if not finished:
                self.aborted.append(request_id)

    def _feed(self, work: OutputProcessor, tokens: list[int], place: int, most: int) -> None:
        assert self.tokenizer is not None
        tokens = tokens[:most - place]
        reason = "length" if place + len(tokens) >= most else None
        if tokens and tokens[-1] == self.tokenizer.eos_token_id:
            reason = "stop"
        for index in range(len(work._sequences)):
            logprobs = None if work.params.logprobs is None else [_logprobs(token) for token in tokens]
            work.process(tokens, logprobs, reason, index=index, now=time.monotonic())

    async def check_health(self) -> None:
        if not self.healthy:
            raise RuntimeError("the engine is dead")

    async def given_up(self) -> None:
        await asyncio.Event().wait()

    async def metrics(self, refresh: bool = False) -> dict[str, Any]:
        return {"requests_running": self.running, "requests_waiting": 0, "kv_blocks_total": 10, "kv_blocks_used": 5}

    async def shutdown(self, drain_seconds: float | None = None) -> None:
        self.healthy = False


def _logprobs(token: int) -> LogprobRecord:
    """The token itself is the second likeliest."""
    return TokenLogprobs(token, -1.0, 2, [(token + 1) % 256, token], [-0.5, -1.0]).pack()


@contextlib.contextmanager
def running(engine: Any, **options: Any) -> Iterator[tuple[str, App]]:
    """(address, application) of a server in a thread; `engine` is one, or a coroutine function that starts one."""
    config = ServerConfig.create(**{"port": 0, "drain_timeout": 5.0, **options})

    async def start() -> Any:
        return await engine() if asyncio.iscoroutinefunction(engine) else engine

    with served_in_thread(partial(serve, config, start)) as found:
        yield found


@contextlib.contextmanager
def served_in_thread(serve_until_stopped: Callable[..., Awaitable[None]]) -> Iterator[tuple[str, Any]]:
    """(address, application) of what `serve_until_stopped(on_ready, stops=…)` serves, in a thread with a loop."""
    ready, stops = threading.Event(), Stops()
    found: list[Any] = []
    loops: list[asyncio.AbstractEventLoop] = []
    failures: list[BaseException] = []

    def on_ready(address: str, app: Any) -> None:
        found.extend([address, app])
        ready.set()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await serve_until_stopped(on_ready, stops=stops)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(120)
    if failures:
        raise failures[0]
    try:
        yield found[0], found[1]
    finally:
        loops[0].call_soon_threadsafe(stops.stop)
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
