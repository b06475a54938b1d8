"""Everyone who waits for an engine in another process: takes requests in, deals out what the engine says of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.front.admission import Admission
from quire.engine.front.kv_log import KVLog
from quire.engine.front.quarantine import Quarantine, content_of
from quire.engine.front.subscription import Subscription
from quire.engine.front.supervisor import Supervisor
from quire.engine.outputs.output_processor import OutputProcessor
from quire.engine.process import messages as m
from quire.errors import EngineDeadError, EngineError, InvalidRequestError, QueueFullError, RequestTimeoutError
from quire.sampling.params import BeamSearchParams
from quire.scheduler.limits import Limits, longest_allowed
from quire.scheduler.request import Request
from quire.server_config import GuardConfig
from quire.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("quire.desk")

_HELD = ("requests_running", "requests_waiting", "requests_arriving", "requests_swapped", "kv_blocks_used",
         "kv_blocks_cached", "kv_blocks_moving", "transfers_under_way", "kv_leases", "kv_reservations",
         "kv_reservations_quarantined", "host_blocks_used", "host_blocks_cached",
         "kv_links", "kv_prefills_open", "kv_prompts_open")
"""Metrics of what an engine holds, which is nothing once it is dead."""


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


@dataclass(slots=True)
class DeskCounts:
    """What happened to requests outside the engine."""

    refused_queue_full: int = 0
    timed_out: int = 0
    lost: int = 0
    """In flight when an engine died."""


class RequestDesk:
    """Lives on one event loop and owns the engine's supervisor, which tells it what happens (`EngineListener`)."""

    def __init__(self, options: Mapping[str, m.Plain], guard: GuardConfig) -> None:
        self.supervisor = Supervisor(options, guard, self)
        self.counts = DeskCounts()
        self.engine_metrics: dict[str, int | float] = {}
        """The engine's last report."""
        self.on_step_stats: Callable[[m.StepStats], None] | None = None
        self.on_view: Callable[[bytes, bool], None] | None = None
        self.kv_log = KVLog()
        """What the engine holds, where it says so."""
        self.closing = False
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._ready: m.Ready | None = None
        self._admission = Admission(0, 0, 0)
        self._quarantine = Quarantine()
        self._subscriptions: dict[int, Subscription] = {}
        self._names: dict[str, Subscription | None] = {}
        """Requests that have not ended by their ids, also those (None) that are being tokenized."""
        self._aborted_early: set[str] = set()
        """Those of the latter that were aborted meanwhile."""
        self._handles = itertools.count(1)
        self._touched: dict[int, Subscription] = {}
        """Who has news since `paused`."""
        self._calls: dict[int, asyncio.Future[Any]] = {}

    @property
    def engine(self) -> m.Ready:
        """What the last engine that was ready said of itself."""
        if self._ready is None:
            raise EngineError("the engine has not started yet: use `await AsyncLLM.start(...)`")
        return self._ready

    @property
    def num_in_flight(self) -> int:
        return len(self._subscriptions)

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests, and their prompt tokens, that the engine has not begun with."""
        return self._admission.waiting

    # ---- requests come

    def reserve(self, request_id: str) -> None:
        """The id is taken from now on, if there is an engine that could serve it."""
        if self.closing:
            raise EngineDeadError("the engine is shutting down and takes no more requests")
        self.supervisor.check()
        if request_id in self._names:
            raise InvalidRequestError(f"request_id {request_id!r} is in use", field="request_id")
        self._names[request_id] = None

    def release(self, request_id: str) -> None:
        """It came to nothing."""
        self._names.pop(request_id, None)
        self._aborted_early.discard(request_id)

    def submit(self, request: Request, beams: BeamSearchParams | None, text: str | None, tokenizer: Tokenizer | None,
               kind: str, timeout: float | None, prefill: list[str] | None = None) -> Subscription:
        """Send a request whose id is reserved, or raise what keeps it from being served."""
        ready = self.engine
        longest_allowed(
            request,
            Limits(ready.max_num_seqs, ready.max_num_batched_tokens, ready.max_model_len, ready.chunked_prefill),
            _Pool(ready.num_kv_blocks, ready.block_size))
        self.supervisor.check()  # it may have died while the prompt was tokenized
        if len(self._quarantine):
            self._quarantine.check(content_of(request))
        try:
            self._admission.check(request.num_prompt_tokens, request.width)
        except QueueFullError as full:
            displaced = self._admission.displaced_by(request.tenant, request.num_prompt_tokens)
            self.counts.refused_queue_full += max(1, len(displaced))
            if not displaced:
                raise
            self._displace(displaced, full.retry_after)
        handle = next(self._handles)
        self.supervisor.send(m.add(handle, m.RequestBody(
            request.request_id, list(request.prompt_token_ids), request.params, request.seed, request.arrival_time,
            beams, request.bad_words, request.priority, request.cache_key, request.tenant, prefill)))
        processor = OutputProcessor(
            request.request_id, request.params, tokenizer, request.prompt_token_ids, text,
            num_sequences=None if request.beams is None else request.width, seed=request.seed,
            arrival_time=request.arrival_time)
        subscription = Subscription(handle, request, processor, kind)
        if timeout is not None:
            left = max(0.0, request.arrival_time + timeout - time.monotonic())
            subscription.timer = self._loop.call_later(left, self._time_out, subscription, timeout)
        self._subscriptions[handle] = self._names[request.request_id] = subscription
        self._admission.sent(handle, request.num_prompt_tokens, request.width, request.tenant)
        self.idle.clear()
        if request.request_id in self._aborted_early:
            self.abort(request.request_id)
        return subscription

    # ---- and go

    def abort(self, request_id: str) -> None:
        """Its reader sees it end; a request that is still being tokenized ends as soon as it is not."""
        subscription = self._names.get(request_id)
        if subscription is None:
            if request_id in self._names:
                self._aborted_early.add(request_id)
            return
        self.supervisor.send(m.Abort([subscription.handle]))
        subscription.processor.abort(now=time.monotonic())
        self._end(subscription)
        subscription.mark()
        subscription.wake()

    def drop(self, subscription: Subscription) -> None:
        """Its reader has gone."""
        if not subscription.ended:
            self.supervisor.send(m.Abort([subscription.handle]))
            self._end(subscription)

    def drop_later(self, subscription: Subscription) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self.drop, subscription)

    def fail_all(self, error: EngineDeadError) -> None:
        for subscription in list(self._subscriptions.values()):
            self._fail(subscription, EngineDeadError(str(error), error.retry_after))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error), error.retry_after))
        self._calls.clear()

    def _displace(self, handles: list[int], retry_after: float) -> None:
        self.supervisor.send(m.Abort(handles))
        for handle in handles:
            self._fail(self._subscriptions[handle], QueueFullError(
                "the queue is full, and others who wait have less in it: try again later", retry_after))

    def _time_out(self, subscription: Subscription, seconds: float) -> None:
        self.counts.timed_out += 1
        self.supervisor.send(m.Abort([subscription.handle]))
        self._fail(subscription, RequestTimeoutError(f"the request was not done within {seconds:g} seconds"))

    def _fail(self, subscription: Subscription, error: Exception) -> None:
        self._leave(subscription)
        subscription.fail(error)

    def _end(self, subscription: Subscription) -> None:
        self._leave(subscription)
        subscription.end()

    def _leave(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.handle, None) is None:
            return
        self.release(subscription.request_id)
        self._admission.ended(subscription.handle)
        if not self._subscriptions:
            self.idle.set()

    # ---- what the supervisor tells

    def ready(self, ready: m.Ready) -> None:
        """Also after a restart, when the pool may have another size."""
        self._ready = ready
        self.engine_metrics = ready.metrics
        self._admission = Admission(self._guard.max_waiting_requests, self._guard.max_waiting_tokens,
                                    ready.max_num_seqs)

    def died(self, error: EngineDeadError) -> None:
        self.counts.lost += len(self._subscriptions)
        running = [s.request for s in self._subscriptions.values() if s.running]
        self._quarantine.died_with([content_of(request) for request in
                                    running or [s.request for s in self._subscriptions.values()]])
        self.engine_metrics = {name: 0 if name in _HELD else value for name, value in self.engine_metrics.items()}
        self.kv_log.start_over()
        self.fail_all(error)

    def paused(self) -> None:
        """Wake everybody with news, once for all messages that were there."""
        if self._touched:
            for subscription in self._touched.values():
                subscription.wake()
            self._touched.clear()

    def take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.StepOutputs):
            self._take_step(message)
        elif isinstance(message, m.Refused):
            subscription = self._subscriptions.get(message.handle)
            if subscription is not None:
                self._fail(subscription, InvalidRequestError(message.message, message.field) if message.invalid
                           else EngineError(message.message))
        elif isinstance(message, m.Answer):
            self._take_answer(message)
        elif isinstance(message, m.ViewFrame) and self.on_view is not None:
            self.on_view(message.body, message.full)
        elif isinstance(message, m.KVChanges):
            self.kv_log.take(message)

    # ---- what the engine says

    def _take_step(self, step: m.StepOutputs) -> None:
        subscriptions, touched = self._subscriptions, self._touched
        for started in step.started:
            subscription = subscriptions.get(started.handle)
            if subscription is not None:
                subscription.started(started.time, started.num_cached_tokens)
                self._admission.started(started.handle)
        self._admission.taken(step.taken)
        records = step.logprobs or [b""] * len(step.tokens)
        for handle, token, record in zip(step.handles, step.tokens, records, strict=True):
            subscription = subscriptions.get(handle)
            if subscription is not None:
                touched[handle] = subscription
                try:
                    stop = subscription.take_token(token, record or None)
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
            self.engine_metrics = step.metrics
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

    def _stopped(self, subscription: Subscription, index: int, stop: str) -> None:
        """A stop string was found here; the engine goes on until the abort reaches it."""
        self.supervisor.send(m.Finish(subscription.handle, index, stop))
        if subscription.processor.finished:
            self._served(subscription)

    def _served(self, subscription: Subscription) -> None:
        self.supervisor.proved = True
        if len(self._quarantine):
            self._quarantine.served(content_of(subscription.request))
        self._end(subscription)

    def _broke(self, subscription: Subscription, error: Exception) -> None:
        """Its output could not be made: this request fails, the others go on."""
        log.error("request %s failed", subscription.request_id, exc_info=error)
        self.supervisor.send(m.Abort([subscription.handle]))
        self._fail(subscription, EngineError(
            f"the output of this request could not be made: {type(error).__name__}: {error}"))

    def _miss(self, taken: int) -> None:
        """The engine has no request left, so who still waits for one that it took would wait for ever."""
        for subscription in [s for s in self._subscriptions.values() if s.handle <= taken]:
            self._fail(subscription, EngineError("the engine lost this request: an internal error"))

    # ---- questions

    async def call(self, name: str) -> Any:
        """Ask the engine something between two steps."""
        self.supervisor.check()
        number = next(self._handles)
        future = self._calls[number] = self._loop.create_future()
        try:
            self.supervisor.send(m.Call(number, name))
            return await future
        finally:
            self._calls.pop(number, None)

    def _take_answer(self, answer: m.Answer) -> None:
        future = self._calls.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(EngineError(answer.error))
