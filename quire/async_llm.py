"""The asynchronous front door: many concurrent callers, one engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.config import EngineConfig
from quire.engine.front.kv_log import KVLog
from quire.engine.front.request_desk import RequestDesk
from quire.engine.front.request_stream import RequestStream
from quire.engine.front.subscription import OUTPUT_KINDS, Subscription
from quire.engine.input import InputProcessor, Params, Prompt
from quire.engine.process.messages import StepStats, Watch
from quire.errors import EngineDeadError, EngineError, InvalidRequestError
from quire.kvcache.secret import secret_name
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.scheduler.request import Request
from quire.server_config import GuardConfig
from quire.tokenizer.tokenizer import Tokenizer

_LONG_TEXT = 4096
"""Characters: longer prompts are tokenized on a thread, so that other requests' tokens do not wait."""
_LONGEST_TIMEOUT = 1e9


class AsyncLLM:
    """A model behind an engine process. Everything but the process lives on the event loop that started it."""

    def __init__(self, config: EngineConfig, guard: GuardConfig, options: dict[str, Any]) -> None:
        self.config = config
        self.guard = guard
        self.options = options
        """The engine options that were given."""
        self.tokenizer: Tokenizer | None = None
        secret = config.cache.kv_secret if config.cache.enable_prefix_caching else None
        self.kv_secret_name = None if secret is None else secret_name(secret)
        """Of the secret that names of prefixes are made with, where it is shared."""
        self._desk = RequestDesk(options, guard)
        self._inputs: InputProcessor | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="quire-tokenize")
        self._ids = itertools.count()

    # ---- a life

    @classmethod
    async def start(cls, model: str = "smollm2-135m", **options: Any) -> AsyncLLM:
        """Load a model in a process of its own. Options are those of `LLM` and of `quire.config.GuardConfig`."""
        guard, engine_options = GuardConfig.split({"model": model, **options})
        config = EngineConfig.create(**engine_options)
        llm = cls(config, guard, engine_options)
        try:
            await llm._start()
        except BaseException:
            await llm.shutdown()
            raise
        return llm

    async def _start(self) -> None:
        await asyncio.to_thread(_fetch, self.config)
        engine = asyncio.create_task(self._desk.supervisor.start())
        tokenizer = asyncio.create_task(asyncio.to_thread(_load_tokenizer, self.config))
        try:
            ready, self.tokenizer = await asyncio.gather(engine, tokenizer)
        except BaseException:
            engine.cancel()
            await asyncio.gather(engine, tokenizer, return_exceptions=True)
            raise
        self._inputs = InputProcessor(self.tokenizer, ready.vocab_size,
                                      frozenset(ready.eos_token_ids), self.config.model.seed)

    async def shutdown(self, drain_seconds: float | None = None) -> None:
        """Refuse new requests, let those in flight finish within `drain_seconds` (None: end them now), stop."""
        self._desk.closing = True
        if drain_seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._desk.idle.wait(), drain_seconds)
        self._desk.fail_all(EngineDeadError("the engine was shut down before this request was done"))
        await self._desk.supervisor.close()
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.shutdown()

    # ---- requests

    def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        output_kind: str = "cumulative",
        prefill: Sequence[str] | None = None,
    ) -> RequestStream:
        """An async iterator over the request's outputs; the last has `finished` set.

        `output_kind`: "cumulative" outputs hold everything so far and what is new (`text_delta`); "delta" ones hold
        only what is new, in `text`, `token_ids` and `logprobs` too; "final" is the whole, once. A reader that is slow
        gets fewer, larger outputs. Raises InvalidRequestError, QueueFullError, EngineDeadError or, after `timeout`
        seconds (default: the option request_timeout), RequestTimeoutError. `prefill`: as in `LLM.add_request`.
        """
        if output_kind not in OUTPUT_KINDS:
            raise InvalidRequestError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, not {output_kind!r:.80}",
                                      field="output_kind")
        if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout <= _LONGEST_TIMEOUT):
            raise InvalidRequestError(f"timeout must be a number of seconds above 0 and up to {_LONGEST_TIMEOUT:g}",
                                      field="timeout")
        if request_id is None:
            request_id = f"q{next(self._ids)}"
        elif not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError("request_id must be a non-empty string", field="request_id")
        name, arrival = request_id, time.monotonic()

        async def open() -> Subscription:
            self._desk.reserve(name)
            try:
                request, text = await self._request(name, prompt, SamplingParams() if params is None else params,
                                                    priority=priority, tenant=tenant, cache_salt=cache_salt,
                                                    arrival_time=arrival)
                return self._desk.submit(request, params if isinstance(params, BeamSearchParams) else None, text,
                                         self.tokenizer, output_kind,
                                         self.guard.request_timeout if timeout is None else timeout,
                                         None if prefill is None else list(prefill))
            except BaseException:
                self._desk.release(name)
                raise

        return RequestStream(name, self._desk, open)

    async def _request(self, request_id: str, prompt: Prompt, params: Params,
                       **more: Any) -> tuple[Request, str | None]:
        inputs = self._inputs
        if inputs is None:
            raise EngineError("the engine has not started yet: use `await AsyncLLM.start(...)`")
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _LONG_TEXT:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: inputs.request(request_id, prompt, params, **more))
        return inputs.request(request_id, prompt, params, **more)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader sees it end with finish_reason "abort". Unknown ids are ignored."""
        self._desk.abort(request_id)

    # ---- what there is to know

    @property
    def model_name(self) -> str:
        return self._desk.engine.model_name

    @property
    def vocab_size(self) -> int:
        return self._desk.engine.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output; a restarted engine may have found less memory."""
        return self._desk.engine.max_model_len

    @property
    def kv_listens(self) -> tuple[str, int] | None:
        """Where other engines reach this one; None unless it computes prompts for them."""
        return self._desk.engine.kv_listens

    @property
    def state(self) -> str:
        """starting, ready, restarting, failed or closed."""
        return self._desk.supervisor.state.value

    @property
    def engine_pid(self) -> int | None:
        return self._desk.supervisor.pid

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return self._desk.num_in_flight

    @property
    def kv_log(self) -> KVLog | None:
        """What the engine's device holds, by name; None where it shares no secret or caches no prefixes."""
        return None if self.kv_secret_name is None else self._desk.kv_log

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._desk.engine.block_size

    @property
    def on_step_stats(self) -> Callable[[StepStats], None] | None:
        """Called with the numbers of every step, if set."""
        return self._desk.on_step_stats

    @on_step_stats.setter
    def on_step_stats(self, listener: Callable[[StepStats], None] | None) -> None:
        self._desk.on_step_stats = listener

    @property
    def on_view(self) -> Callable[[bytes, bool], None] | None:
        """Called with every frame of the view, and whether it is a full one, while `watch` is repeated."""
        return self._desk.on_view

    @on_view.setter
    def on_view(self, listener: Callable[[bytes, bool], None] | None) -> None:
        self._desk.on_view = listener

    def watch(self, seconds: float, fresh: bool = False, number: int = 0) -> None:
        """Have the engine report to `on_view` for so long; `fresh`: with everything first, not only what changes;
        `number`: what its frames say it is, among several engines."""
        self._desk.supervisor.send(Watch(seconds, fresh, number))

    # ---- looking after it

    async def check_health(self) -> None:
        """Raises EngineDeadError unless the engine is up and, while there is work, makes steps."""
        self._desk.supervisor.check()

    async def given_up(self) -> None:
        """Returns when the engine has died too often and is not restarted any more, which may be never."""
        await self._desk.supervisor.gave_up.wait()

    async def metrics(self, refresh: bool = False) -> dict[str, int | float]:
        """Counters and gauges of the engine (those of `LLM.metrics`), as of its last report, and of this front door.

        Reports come twice a second and whenever the engine comes to rest; `refresh` asks for one, which takes as long
        as the step that runs.
        """
        desk = self._desk
        if refresh:
            desk.engine_metrics = await desk.call("metrics")
        requests, tokens = desk.waiting
        return {
            **desk.engine_metrics,
            "requests_in_flight": desk.num_in_flight,
            "requests_queued": requests,
            "tokens_queued": tokens,
            "requests_refused_queue_full": desk.counts.refused_queue_full,
            "requests_timed_out": desk.counts.timed_out,
            "requests_lost": desk.counts.lost,
            "engine_restarts": desk.supervisor.restarts,
        }

    async def check(self) -> None:
        """Verify the engine's bookkeeping, between two steps; raises EngineError where it contradicts itself."""
        await self._desk.call("check")

    async def clear_prefix_cache(self) -> int:
        """Evict cached prefixes that no sequence uses; returns the number of blocks freed."""
        freed: int = await self._desk.call("clear_prefix_cache")
        return freed


def _fetch(config: EngineConfig) -> None:
    """Download a model of the catalog once, before two processes look for it."""
    from quire.models.loader.catalog import CATALOG
    from quire.models.loader.pull import cached_file, pull

    entry = CATALOG.get(config.model.model)
    if entry is not None and not Path(config.model.model).exists() \
            and cached_file(entry, config.model.cache_dir) is None:
        pull(config.model.model, cache_dir=config.model.cache_dir, progress=True)


def _load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    if config.model.skip_tokenizer_init:
        return None
    from quire.engine.assembly.source import open_source

    return open_source(config, progress=False).tokenizer()
