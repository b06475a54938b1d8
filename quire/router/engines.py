"""Several engines behind one server (`data_parallel_size`): AsyncLLM's interface, and a router's policies inside.

One process serves HTTP, for it costs little beside a model; each engine is a process of its own, as it is alone, and
is restarted alone. A request goes to the engine that has to compute least before its first token. If that engine dies
before the first text, another one takes the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.engine.front.kv_log import Entry, JoinedKVLog, names_of
from quire.engine.front.request_stream import RequestStream
from quire.engine.input import Params, Prompt
from quire.engine.outputs.output import RequestOutput
from quire.errors import ConfigError, EngineDeadError
from quire.kvcache.prefix import HashChain, cache_key
from quire.kvcache.secret import derived_secret
from quire.router.index import KVIndex
from quire.router.load import Load, Ticket
from quire.router.policies import Candidate, Policy, make_policy
from quire.server_config import GuardConfig
from quire.tokenizer.tokenizer import Tokenizer

MOST_ENGINES = 64
_MAX_INDEX_BLOCKS = 1 << 24
_MOST_HELD_BACK = 4
"""Outputs without text before the first that has some."""
_LEVELS = ("spec_tokens_per_step", "spec_acceptance_rate")
"""Metrics of engines that are averages; all others are sums."""


class ReplicatedLLM:
    """`size` engines with equal options. Everything but their processes lives on the event loop that started it."""

    def __init__(self, engines: list[AsyncLLM], key: bytes, policy: Policy, folder: Any,
                 publishes: bool = False) -> None:
        self.engines = engines
        self.kv_secret_name = engines[0].kv_secret_name if publishes else None
        self.kv_log = JoinedKVLog() if publishes else None
        """What the engines hold together, for routers that have the secret."""
        self.kv_listens = None
        """It does not compute prompts for others."""
        self._policy = policy
        self._folder = folder
        self._loads = [Load() for _ in engines]
        self._index = KVIndex(_MAX_INDEX_BLOCKS)
        self._chain = HashChain(engines[0].block_size, key)
        for number, engine in enumerate(engines):
            log = engine.kv_log
            if log is not None:
                log.on_change = partial(self._changed, number)
                self._changed(number, Entry(0, b"".join(log.held), b"", False))

    @classmethod
    async def start(cls, size: int, **options: Any) -> ReplicatedLLM:
        """Options are those of `AsyncLLM`. Without a number of threads the cores are shared out among the engines."""
        if not 2 <= size <= MOST_ENGINES:
            raise ConfigError(f"data_parallel_size must be between 1 and {MOST_ENGINES}, not {size}",
                              field="data_parallel_size")
        if options.get("num_threads") is None:
            options["num_threads"] = max(1, len(os.sched_getaffinity(0)) // size)
        _, engine_options = GuardConfig.split(options)
        config = EngineConfig.create(**engine_options)
        for name, given in (("kv_role", config.transfer.kv_role), ("kv_disk", config.cache.kv_disk)):
            if given is not None:
                raise ConfigError(f"{name} is for one engine, and data_parallel_size starts {size}: start as many "
                                  "servers with a router (`quire route`)", field=name)
        secret = config.cache.kv_secret
        shared = secret is not None
        with contextlib.ExitStack() as stack:
            if secret is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-"))
                secret = secrets.token_hex(32).encode()
                file = Path(folder) / "secret"
                file.touch(mode=0o600)
                file.write_bytes(secret)
                options["kv_secret_file"] = str(file)
            found = await asyncio.gather(*(AsyncLLM.start(**options) for _ in range(size)), return_exceptions=True)
            failed = [each for each in found if isinstance(each, BaseException)]
            engines = [each for each in found if isinstance(each, AsyncLLM)]
            if failed:
                await asyncio.gather(*(engine.shutdown() for engine in engines))
                raise failed[0]
            return cls(engines, derived_secret(secret, "prefix"), make_policy("cache-aware"), stack.pop_all(),
                       publishes=shared)

    async def shutdown(self, drain_seconds: float | None = None) -> None:
        await asyncio.gather(*(engine.shutdown(drain_seconds) for engine in self.engines))
        self._folder.close()

    def _changed(self, number: int, entry: Entry) -> None:
        if entry.cleared:
            self._index.cleared(number)
        self._index.evicted(number, names_of(entry.evicted))
        self._index.stored(number, names_of(entry.stored))
        if self.kv_log is not None:
            self.kv_log.take_of(number, entry)

    # ---- requests

    def generate(self, prompt: Prompt, params: Params | None = None, *, request_id: str, cache_salt: str | None = None,
                 **more: Any) -> ReplicatedStream:
        """As `AsyncLLM.generate`; the engine is chosen when the stream starts."""
        def open(engine: AsyncLLM) -> RequestStream:
            return engine.generate(prompt, params, request_id=request_id, cache_salt=cache_salt, **more)

        return ReplicatedStream(request_id, partial(self._choose, _tokens(prompt), cache_salt), open)

    def _choose(self, tokens: list[int], salt: str | None, tried: set[int]) -> tuple[int, AsyncLLM, Ticket]:
        """The engine for a prompt, of those that are up and were not tried; any, where all are down."""
        numbers = [number for number, engine in enumerate(self.engines)
                   if number not in tried and engine.state == "ready"]
        numbers = numbers or [number for number in range(len(self.engines)) if number not in tried]
        if not numbers:
            raise EngineDeadError("every engine died while this request waited", retry_after=1.0)
        root = b"" if salt is None else cache_key(["salt", salt])
        held = self._index.leading(self._chain.names(root, tokens[:-1]), numbers)
        size = self._chain.block_size
        candidates = [Candidate(str(number), self._loads[number], size * held.get(number, 0)) for number in numbers]
        place = self._policy.choose(len(tokens), candidates).place
        number = numbers[place]
        ticket = self._loads[number].send(max(1, len(tokens) - candidates[place].held))
        return number, self.engines[number], ticket

    async def abort(self, request_id: str) -> None:
        await asyncio.gather(*(engine.abort(request_id) for engine in self.engines))

    # ---- what there is to know: of one, where all are alike

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engines[0].tokenizer

    @property
    def options(self) -> dict[str, Any]:
        return self.engines[0].options

    @property
    def config(self) -> EngineConfig:
        return self.engines[0].config

    @property
    def model_name(self) -> str:
        return self.engines[0].model_name

    @property
    def block_size(self) -> int:
        return self.engines[0].block_size

    @property
    def max_model_len(self) -> int:
        return min(engine.max_model_len for engine in self.engines)

    @property
    def on_step_stats(self) -> Callable[[Any], None] | None:
        return self.engines[0].on_step_stats

    @on_step_stats.setter
    def on_step_stats(self, listener: Callable[[Any], None] | None) -> None:
        for engine in self.engines:
            engine.on_step_stats = listener

    @property
    def on_view(self) -> Callable[..., None] | None:
        return self.engines[0].on_view

    @on_view.setter
    def on_view(self, listener: Callable[..., None] | None) -> None:
        """Told of every engine's frames, and of which engine they are."""
        for number, engine in enumerate(self.engines):
            engine.on_view = None if listener is None else partial(_view, listener, number)

    def watch(self, seconds: float, fresh: bool = False) -> None:
        for number, engine in enumerate(self.engines):
            engine.watch(seconds, fresh, number)

    # ---- looking after them

    async def check_health(self) -> None:
        """Well while one of them is; one that is restarted gets no requests meanwhile."""
        error: EngineDeadError | None = None
        for engine in self.engines:
            try:
                await engine.check_health()
                return
            except EngineDeadError as found:
                error = found
        assert error is not None
        raise error

    async def given_up(self) -> None:
        """When the first of them is: whoever supervises this process had better start it anew."""
        tasks = [asyncio.create_task(engine.given_up()) for engine in self.engines]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def metrics(self, refresh: bool = False) -> dict[str, int | float]:
        """Those of all engines together."""
        found = await asyncio.gather(*(_metrics(engine, refresh) for engine in self.engines))
        total: dict[str, int | float] = {}
        for each in found:
            for name, value in each.items():
                total[name] = total.get(name, 0) + value
        for name in _LEVELS:
            if name in total:
                total[name] /= len(found)
        return total

    async def check(self) -> None:
        for engine in self.engines:
            await engine.check()


class ReplicatedStream(AsyncIterator[RequestOutput]):
    """The outputs of one request; moves to another engine if its engine dies before the first of them.

    A first token may have no text of its own (half a character, say). Such outputs are held back until text comes, a
    few of them at most: as long as nothing was handed out, another engine can begin anew.
    """

    def __init__(self, request_id: str, choose: Callable[[set[int]], tuple[int, AsyncLLM, Ticket]],
                 open: Callable[[AsyncLLM], RequestStream]) -> None:
        self.request_id = request_id
        self._choose, self._open = choose, open
        self._tried: set[int] = set()
        self._stream: RequestStream | None = None
        self._ticket: Ticket | None = None
        self._begun = self._closed = False
        self._held: deque[RequestOutput] = deque()

    async def start(self) -> None:
        """Idempotent."""
        while self._stream is None and not self._closed:
            number, engine, self._ticket = self._choose(self._tried)
            self._tried.add(number)
            self._stream = self._open(engine)
            try:
                await self._stream.start()
            except EngineDeadError:
                self._leave()
                if not self._tries_again():
                    raise
            except BaseException:
                self._leave()
                raise

    def __aiter__(self) -> ReplicatedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            if self._begun and self._held:
                return self._held.popleft()
            await self.start()
            if self._stream is None or self._ticket is None:
                raise StopAsyncIteration
            try:
                output = await anext(self._stream)
            except EngineDeadError:
                self._leave()
                self._held.clear()
                if self._begun or not self._tries_again():
                    raise
                continue
            except BaseException:
                self._leave()
                self._closed = True
                raise
            self._held.append(output)
            self._ticket.started()
            self._begun = (self._begun or output.finished or len(self._held) > _MOST_HELD_BACK
                           or any(each.text for each in output.outputs))

    def _tries_again(self) -> bool:
        """Twice at most: a request that ends engines does not end them all."""
        return not self._closed and len(self._tried) < 3

    def _leave(self) -> None:
        self._stream = None
        if self._ticket is not None:
            self._ticket.ended()
            self._ticket = None

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent."""
        self._closed = True
        stream = self._stream
        self._leave()
        if stream is not None:
            await stream.aclose()

    def __del__(self) -> None:
        if self._ticket is not None:  # the stream itself aborts its request
            self._ticket.ended()


def _tokens(prompt: Prompt) -> list[int]:
    """Those that are given; a text is taken to have a token for every four characters."""
    given = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
    if isinstance(given, str):
        return [0] * max(1, len(given) // 4)
    return given if isinstance(given, list) else [0]


def _view(listener: Callable[..., None], number: int, body: bytes, full: bool) -> None:
    listener(body, full, number)


async def _metrics(engine: AsyncLLM, refresh: bool) -> dict[str, int | float]:
    """Of an engine that is being restarted, as of its last report."""
    try:
        return await engine.metrics(refresh)
    except EngineDeadError:
        return await engine.metrics()
