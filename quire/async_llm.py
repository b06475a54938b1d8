"""The asynchronous front door: many concurrent callers, one engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.config import EngineConfig, GuardConfig
from quire.engine import messages as m
from quire.engine.admission import Admission
from quire.engine.input import InputProcessor, Params, Prompt
from quire.engine.output import OutputProcessor, RequestOutput
from quire.engine.subscription import OUTPUT_KINDS, Subscription
from quire.engine.supervisor import Supervisor
from quire.errors import EngineDeadError, EngineError, InvalidRequestError, RequestTimeoutError
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.scheduler.limits import Limits, longest_allowed
from quire.scheduler.request import Request
from quire.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("quire.async")

_LONG_TEXT = 4096
"""Characters: longer prompts are tokenized on a thread, so that nobody else's tokens wait."""
_LONGEST_TIMEOUT = 1e9
_NOT_STARTED = "AsyncLLM is made with `await AsyncLLM.start(...)`"


@dataclass(frozen=True, slots=True)
class _Pool:
    """The engine's KV pool as far as a request's limits depend on it."""

    num_blocks: int
    block_size: int

    @property
    def max_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, as they come.

    `start` sends the request (the first `anext` does it otherwise) and raises what keeps it from being served.
    Closing the stream, dropping it, or cancelling a task that waits for it, aborts the request.
    """

    def __init__(self, llm: AsyncLLM, request_id: str, open: Callable[[], Any]) -> None:
        self.request_id = request_id
        self._llm = llm
        self._open = open
        self._subscription: Subscription | None = None
        self._closed = False

    async def start(self) -> None:
        """Tokenize, check and send; returns when the request is on its way. Idempotent."""
        if self._subscription is None and not self._closed:
            try:
                self._subscription = await self._open()
            except BaseException:
                self._close()
                raise

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._subscription is None:
            await self.start()
            if self._subscription is None:
                raise StopAsyncIteration
        try:
            output = await self._subscription.next()
        except BaseException:
            self._close()
            raise
        if output is None:
            self._close()
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent."""
        self._close()

    def _close(self) -> None:
        self._closed = True
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._llm._drop(subscription)

    def __del__(self) -> None:
        if self._subscription is not None:
            self._llm._drop_later(self._subscription)


class AsyncLLM:
    """A model behind an engine process. Everything but the process lives on the event loop that started it."""

    def __init__(self, config: EngineConfig, guard: GuardConfig, options: dict[str, Any]) -> None:
        self.config = config
        self.guard = guard
        self.options = options
        """The engine options that were given."""
        self.tokenizer: Tokenizer | None = None
        self.model_name = config.model.model
        self.max_model_len = 0
        self.vocab_size = 0
        self.on_step_stats: Callable[[m.StepStats], None] | None = None
        """Called with the numbers of every step."""
        self.on_view: Callable[[bytes, bool], None] | None = None
        """Called with every frame of the view, and whether it is a full one, while `watch` is repeated."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(options, guard, on_message=self._take, on_pause=self._wake,
                                      on_ready=self._on_ready, on_death=self._on_death)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="quire-tokenize")
        self._inputs: InputProcessor | None = None
        self._admission: Admission | None = None
        self._limits: Limits | None = None
        self._pool = _Pool(1, 1)
        self._subscriptions: dict[int, Subscription] = {}
        self._names: dict[str, Subscription | None] = {}
        """Requests that have not ended by their ids, also those (None) that are being tokenized."""
        self._aborted_early: set[str] = set()
        """Those of the latter that were aborted meanwhile."""
        self._handles = itertools.count(1)
        self._ids = itertools.count()
        self._touched: dict[int, Subscription] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._metrics: dict[str, int | float] = {}
        self._counts = {"queue_full": 0, "timed_out": 0, "died": 0}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

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
        engine = asyncio.create_task(self._supervisor.start())
        tokenizer = asyncio.create_task(asyncio.to_thread(_load_tokenizer, self.config))
        try:
            ready, self.tokenizer = await asyncio.gather(engine, tokenizer)
        except BaseException:
            engine.cancel()
            await asyncio.gather(engine, tokenizer, return_exceptions=True)
            raise
        self._inputs = InputProcessor(self.tokenizer, ready.vocab_size, ready.max_model_len,
                                      frozenset(ready.eos_token_ids), self.config.model.seed)

    def _on_ready(self, ready: m.Ready) -> None:
        """Also after a restart, when the pool may have another size."""
        self.model_name, self.vocab_size = ready.model_name, ready.vocab_size
        self.max_model_len = ready.max_model_len
        self._limits = Limits(ready.max_num_seqs, ready.max_num_batched_tokens, ready.max_model_len,
                              ready.chunked_prefill)
        self._pool = _Pool(ready.num_kv_blocks, ready.block_size)
        self._admission = Admission(self.guard.max_waiting_requests, self.guard.max_waiting_tokens,
                                    ready.max_num_seqs)

    async def shutdown(self, drain_seconds: float | None = None) -> None:
        """Refuse new requests, let those in flight finish within `drain_seconds` (None: end them now), stop."""
        self._draining = True
        if drain_seconds and self._subscriptions:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        self._fail_all(EngineDeadError("the engine was shut down before this request was done"))
        await self._supervisor.close()
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
    ) -> RequestStream:
        """An async iterator over the request's outputs; the last has `finished` set.

        `output_kind`: "cumulative" outputs hold everything so far and what is new (`text_delta`); "delta" ones hold
        only what is new, in `text`, `token_ids` and `logprobs` too; "final" is the whole, once. A reader that is slow
        gets fewer, larger outputs. Raises InvalidRequestError, QueueFullError, EngineDeadError or, after `timeout`
        seconds (default: the option request_timeout), RequestTimeoutError.
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
            self._reserve(name)
            try:
                request, text = await self._request(name, prompt, SamplingParams() if params is None else params,
                                                    priority=priority, tenant=tenant, cache_salt=cache_salt,
                                                    arrival_time=arrival)
                subscription = self._send(request, text, output_kind, params,
                                          self.guard.request_timeout if timeout is None else timeout)
            except BaseException:
                self._names.pop(name, None)
                raise
            finally:
                aborted = name in self._aborted_early
                self._aborted_early.discard(name)
            if aborted:
                await self.abort(name)
            return subscription

        return RequestStream(self, name, open)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader sees it end with finish_reason "abort". Unknown ids are ignored."""
        subscription = self._names.get(request_id)
        if subscription is None:
            if request_id in self._names:
                self._aborted_early.add(request_id)
        else:
            self._supervisor.send(m.Abort([subscription.handle]))
            subscription.processor.abort(now=time.monotonic())
            self._end(subscription)
            subscription.mark()
            subscription.wake()

    def _reserve(self, request_id: str) -> None:
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no more requests")
        self._supervisor.check()
        if request_id in self._names:
            raise InvalidRequestError(f"request id {request_id!r} is in use", field="request_id")
        self._names[request_id] = None

    async def _request(self, request_id: str, prompt: Prompt, params: Params,
                       **more: Any) -> tuple[Request, str | None]:
        inputs = self._inputs
        if inputs is None:
            raise EngineError(_NOT_STARTED)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if isinstance(text, str) and len(text) > _LONG_TEXT:
            return await self._loop.run_in_executor(
                self._threads, lambda: inputs.request(request_id, prompt, params, **more))
        return inputs.request(request_id, prompt, params, **more)

    def _send(self, request: Request, text: str | None, kind: str, params: Params | None,
              timeout: float | None) -> Subscription:
        if self._admission is None or self._limits is None:
            raise EngineError(_NOT_STARTED)
        longest_allowed(request, self._limits, self._pool)
        self._supervisor.check()  # it may have died while the prompt was tokenized
        try:
            self._admission.check(request.num_prompt_tokens, request.width)
        except Exception:
            self._counts["queue_full"] += 1
            raise
        handle = next(self._handles)
        body = m.RequestBody(
            request.request_id, list(request.prompt_token_ids), request.params, request.seed, request.arrival_time,
            params if isinstance(params, BeamSearchParams) else None, request.bad_words, request.priority,
            request.cache_key, request.tenant)
        self._supervisor.send(m.add(handle, body))
        processor = OutputProcessor(
            request.request_id, request.params, self.tokenizer, request.prompt_token_ids, text,
            num_sequences=None if request.beams is None else request.width, seed=request.seed,
            arrival_time=request.arrival_time)
        subscription = Subscription(handle, request, processor, kind)
        if timeout is not None:
            left = max(0.0, request.arrival_time + timeout - time.monotonic())
            subscription.timer = self._loop.call_later(left, self._time_out, subscription, timeout)
        self._subscriptions[handle] = self._names[request.request_id] = subscription
        self._admission.sent(handle, request.num_prompt_tokens, request.width)
        self._idle.clear()
        return subscription

    def _time_out(self, subscription: Subscription, seconds: float) -> None:
        self._counts["timed_out"] += 1
        self._supervisor.send(m.Abort([subscription.handle]))
        self._leave(subscription)
        subscription.fail(RequestTimeoutError(f"the request was not done within {seconds:g} seconds"))

    def _drop(self, subscription: Subscription) -> None:
        """Its reader has gone."""
        if not subscription.ended:
            self._supervisor.send(m.Abort([subscription.handle]))
            self._end(subscription)

    def _drop_later(self, subscription: Subscription) -> None:
        """From wherever the garbage collector runs."""
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self._drop, subscription)

    def _end(self, subscription: Subscription) -> None:
        self._leave(subscription)
        subscription.end()

    def _leave(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.handle, None) is None:
            return
        self._names.pop(subscription.request_id, None)
        if self._admission is not None:
            self._admission.ended(subscription.handle)
        if not self._subscriptions:
            self._idle.set()

    # ---- what the engine says

    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.StepOutputs):
            self._take_step(message)
        elif isinstance(message, m.Refused):
            self._take_refusal(message)
        elif isinstance(message, m.ViewFrame):
            if self.on_view is not None:
                self.on_view(message.body, message.full)
        elif isinstance(message, m.Answer):
            future = self._calls.pop(message.number, None)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(EngineError(message.error))

    def _take_step(self, step: m.StepOutputs) -> None:
        subscriptions, touched = self._subscriptions, self._touched
        for started in step.started:
            subscription = subscriptions.get(started.handle)
            if subscription is not None:
                subscription.started(started.time, started.num_cached_tokens)
                if self._admission is not None:
                    self._admission.started(started.handle)
        if self._admission is not None:
            self._admission.taken(step.taken)
        for handle, token in zip(step.handles, step.tokens, strict=True):
            subscription = subscriptions.get(handle)
            if subscription is not None:
                touched[handle] = subscription
                try:
                    stop = subscription.take_token(token)
                except Exception as error:
                    self._broke(subscription, error)
                    continue
                if stop is not None:
                    self._stopped(subscription, 0, stop)
        for news in step.news:
            subscription = subscriptions.get(news.handle)
            if subscription is not None:
                touched[news.handle] = subscription
                self._take_news(subscription, news)
        if step.metrics is not None:
            self._metrics = step.metrics
        if step.unfinished == 0 and subscriptions:
            self._miss(step.taken)
        if step.stats is not None and self.on_step_stats is not None:
            self.on_step_stats(step.stats)

    def _take_news(self, subscription: Subscription, news: m.SequenceNews) -> None:
        try:
            stop = subscription.take(news)
        except Exception as error:
            self._broke(subscription, error)
            return
        if stop is not None:
            self._stopped(subscription, news.index, stop)
        elif subscription.processor.finished:
            self._served(subscription)

    def _broke(self, subscription: Subscription, error: Exception) -> None:
        """Its text could not be made: that is its own misfortune and nobody else's."""
        log.error("request %s failed", subscription.request_id, exc_info=error)
        self._supervisor.send(m.Abort([subscription.handle]))
        self._leave(subscription)
        subscription.fail(EngineError(f"the output of this request could not be made: {type(error).__name__}: {error}"))

    def _stopped(self, subscription: Subscription, index: int, stop: str) -> None:
        """A stop string was found here; the engine goes on until it hears of it."""
        self._supervisor.send(m.Finish(subscription.handle, index, stop))
        if subscription.processor.finished:
            self._served(subscription)

    def _served(self, subscription: Subscription) -> None:
        self._supervisor.proved = True
        self._end(subscription)

    def _take_refusal(self, refused: m.Refused) -> None:
        subscription = self._subscriptions.get(refused.handle)
        if subscription is not None:
            self._leave(subscription)
            subscription.fail(InvalidRequestError(refused.message, refused.field) if refused.invalid
                              else EngineError(refused.message))

    def _miss(self, taken: int) -> None:
        """The engine has no request left, so who still waits for one that it took would wait for ever."""
        for subscription in [s for s in self._subscriptions.values() if s.handle <= taken]:
            self._leave(subscription)
            subscription.fail(EngineError("the engine lost this request: an internal error"))

    def _wake(self) -> None:
        """Everybody with news, once for all messages that were there."""
        if self._touched:
            for subscription in self._touched.values():
                subscription.wake()
            self._touched.clear()

    def _on_death(self, error: EngineDeadError) -> None:
        self._counts["died"] += len(self._subscriptions)
        self._fail_all(error)

    def _fail_all(self, error: EngineDeadError) -> None:
        for subscription in list(self._subscriptions.values()):
            self._leave(subscription)
            subscription.fail(EngineDeadError(str(error), error.retry_after))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error), error.retry_after))
        self._calls.clear()

    # ---- looking after it

    @property
    def state(self) -> str:
        """starting, ready, restarting, failed or closed."""
        return self._supervisor.state.value

    async def check_health(self) -> None:
        """Raises EngineDeadError unless the engine is up and, while there is work, makes steps."""
        self._supervisor.check()

    @property
    def engine_pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._subscriptions)

    async def metrics(self, refresh: bool = False) -> dict[str, int | float]:
        """Counters and gauges of the engine (those of `LLM.metrics`), as of its last report, and of this front door.

        Reports come twice a second and whenever the engine comes to rest; `refresh` asks for one, which takes as long
        as the step that runs.
        """
        if refresh:
            self._metrics = await self.call("metrics")
        waiting = (0, 0) if self._admission is None else self._admission.waiting
        return {
            **self._metrics,
            "requests_in_flight": len(self._subscriptions),
            "requests_queued": waiting[0],
            "tokens_queued": waiting[1],
            "requests_refused_queue_full": self._counts["queue_full"],
            "requests_timed_out": self._counts["timed_out"],
            "requests_lost": self._counts["died"],
            "engine_restarts": self._supervisor.restarts,
        }

    def watch(self, seconds: float, fresh: bool = False) -> None:
        """Have the engine report to `on_view` for so long; `fresh`: with everything first, not only what changes."""
        self._supervisor.send(m.Watch(seconds, fresh))

    async def check(self) -> None:
        """Verify the engine's bookkeeping, between two steps; raises EngineError where it contradicts itself."""
        await self.call("check")

    async def clear_prefix_cache(self) -> int:
        """Forget cached prefixes that nobody uses; returns the number of blocks freed."""
        freed: int = await self.call("clear_prefix_cache")
        return freed

    async def call(self, name: str) -> Any:
        """Ask the engine something between two steps."""
        self._supervisor.check()
        number = next(self._handles)
        future = self._calls[number] = self._loop.create_future()
        try:
            self._supervisor.send(m.Call(number, name))
            return await future
        finally:
            self._calls.pop(number, None)


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
    from quire.engine.assembly import open_source

    return open_source(config, progress=False).tokenizer()
