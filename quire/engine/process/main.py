"""An engine in a process of its own: takes messages in between two steps, sends what each step brought.

Started through `quire/child.py` with INBOX OUTBOX PARENT_PID; everything else arrives as messages. It knows tokens
only: text, stop strings and JSON are its front door's business.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.assembly.engine import Engine, build_engine
from quire.engine.metrics import flat_metrics
from quire.engine.outputs.news import SequenceNews
from quire.engine.process import messages as m
from quire.engine.process.doorbell import Doorbell
from quire.engine.process.pulse import Pulse
from quire.engine.watch.watching import Watching
from quire.errors import EngineError, InvalidRequestError, QuireError
from quire.kvcache.held_names import HeldNames
from quire.scheduler.beam import BeamSearch
from quire.scheduler.request import FinishReason, Request
from quire.scheduler.scheduler import SequenceUpdate

log = logging.getLogger("quire.engine")

_SNAPSHOT_SECONDS = 0.5
_START_SECONDS = 60
"""How long a parent may take to say what to build."""
_REST_MS = 1000
_WARM_SECONDS = 2.0
"""After so long an engine is not one that starts to do one thing and end: what may be wanted later is made ready."""
_TAKE_IN_SECONDS = 0.005
"""How long a burst of messages may hold up the next step."""


class EngineServer:
    """The step loop with its mailbox. Requests go by the handles that the front door gave them."""

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], pulse: Pulse,
                 doorbell: Doorbell | None = None) -> None:
        """Without a `doorbell` it waits for messages only, and KV that arrives is taken in with the next one."""
        self._engine = engine
        self._core = engine.core
        self._scheduler = engine.core.scheduler
        self._inbox, self._outbox, self._pulse = inbox, outbox, pulse
        vocabulary = engine.spec.vocab_size
        self._eos = frozenset(token for token in engine.source.eos_token_ids if 0 <= token < vocabulary)
        self._requests: dict[int, Request] = {}
        self._handles: dict[Request, int] = {}
        self._started: list[Request] = []
        """Begun since the last message; some may be other engines'."""
        self._scheduler.tell_of_starts(self._started.append)
        self._taken = 0
        self._ending = False
        self._news_due = False
        """Something has changed that no step will report."""
        self._snapshot_at = 0.0
        self._doorbell = doorbell
        self._warm_at = math.inf
        """When to start the grammar process if no request needs it earlier."""
        self._watching = Watching(engine)
        cache = engine.config.cache
        self._held = (HeldNames(self._scheduler.cache)
                      if cache.kv_secret is not None and cache.enable_prefix_caching else None)
        """KV events to publish; None without a shared secret, since no reader could use them."""

    def ready(self) -> m.Ready:
        limits, peers = self._scheduler.limits, self._engine.peers
        return m.Ready(
            self._engine.source.name, self._engine.spec.vocab_size, self._engine.pool.max_model_len, sorted(self._eos),
            self._scheduler.cache.num_blocks, self._scheduler.cache.block_size, limits.max_num_seqs,
            limits.max_num_batched_tokens, limits.chunked_prefill, self._metrics(),
            None if peers is None or peers.listener is None else peers.listener.address)

    def _metrics(self) -> dict[str, int | float]:
        executor = self._core.executor
        return flat_metrics(self._scheduler, self._engine.pool, executor.expert_load(), executor.describe_ranks())

    def run(self) -> None:
        """Until told to stop."""
        self._pulse.state = ("idle", time.monotonic(), 0)
        if self._engine.config.structured.grammar_warm_start:
            self._warm_at = time.monotonic() + _WARM_SECONDS
        while not self._ending:
            self._take_in()
            if time.monotonic() > self._warm_at:
                self._warm_at = math.inf
                self._core.warm_grammars()
            if self._core.has_work:
                self._step()
            elif self._news_due:
                self._send([], None)
            self._show()
            self._publish()

    # ---- what comes in

    def _take_in(self) -> None:
        """All messages that are there, while running requests can spare the time; waits only when there are none."""
        until = None
        if not self._core.has_work and not self._news_due:
            self._pulse.state = ("idle", time.monotonic(), self._scheduler.stats.steps)
            while not self._wait(0 if self._core.self_check.due else self._watching.patience_ms(_REST_MS)):
                self._check_executor()
                self._core.take_arrivals()
                self._core.hear_grammars()
                if self._core.has_work:
                    break  # another engine has asked for something
                self._core.self_check.slice()
                self._show()
                self._publish()
                if time.monotonic() > self._warm_at:
                    return
        elif self._core.stalled_for is not None and not self._news_due:
            # All that is left waits for KV or a grammar: whatever comes first, one of these or a message, goes on.
            self._wait(min(self._watching.patience_ms(_REST_MS), 1 + int(1e3 * self._core.stalled_for)))
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(m.decode_to_engine(data))
            except msgspec.DecodeError as error:
                log.error("dropped a message that cannot be decoded: %s", error)
            if self._scheduler.running:
                until = until or time.monotonic() + _TAKE_IN_SECONDS
                if time.monotonic() > until:
                    return

    def _wait(self, milliseconds: int) -> bool:
        """For something to do, but no longer than that; is there a message?"""
        if self._doorbell is not None:
            return self._doorbell.wait(milliseconds)
        return bool(self._inbox.poll(milliseconds))

    def _handle(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Add):
            self._add(message)
        elif isinstance(message, m.Abort):
            for handle in message.handles:
                self._abort(handle)
        elif isinstance(message, m.Finish):
            self._finish(message)
        elif isinstance(message, m.Call):
            self._send_message(self._answer(message))
        elif isinstance(message, m.Watch):
            self._watching.renew(message.seconds, message.fresh, message.engine)
        elif isinstance(message, m.Shutdown):
            self._ending = True
        else:
            log.error("ignored the message %s: the engine is running already", type(message).__name__)

    def _add(self, message: m.Add) -> None:
        handle = message.handle
        self._taken = max(self._taken, handle)
        try:
            request = self._request(m.decode_body(message.body))
            self._core.add(request)
        except msgspec.DecodeError as error:
            self._send_message(m.Refused(handle, f"the request could not be read: {error}"))
        except InvalidRequestError as error:
            self._send_message(m.Refused(handle, str(error), error.field))
        except Exception as error:  # whatever it is, it concerns this request alone
            log.exception("a request could not be added")
            self._send_message(m.Refused(handle, f"{type(error).__name__}: {error}", None, False))
        else:
            self._requests[handle] = request
            self._handles[request] = handle

    def _request(self, body: m.RequestBody) -> Request:
        tokens = body.prompt_token_ids
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._engine.spec.vocab_size:
            raise InvalidRequestError("the prompt has a token id outside the vocabulary", field="prompt")
        body.params.validate_for_vocab(self._engine.spec.vocab_size)
        request = Request(
            request_id=body.request_id,
            prompt_token_ids=tokens,
            params=body.params,
            seed=body.seed,
            arrival_time=body.arrival_time,
            eos_token_ids=self._eos,
            bad_words=body.bad_words,
            priority=body.priority,
            cache_key=body.cache_key,
            tenant=body.tenant,
            beams=None if body.beams is None else BeamSearch(body.beams, self._eos),
        )
        if self._engine.peers is not None:
            self._engine.peers.prepare(request, body.prefill)
        elif body.prefill:
            raise InvalidRequestError("prefill names engines to ask for the prompt, which needs kv_role 'decode' or "
                                      "'both'", field="prefill")
        return request

    def _abort(self, handle: int) -> None:
        request = self._requests.get(handle)
        if request is not None:
            self._forget(handle)
            self._core.abort(request.request_id)
            self._news_due = True

    def _finish(self, message: m.Finish) -> None:
        request = self._requests.get(message.handle)
        if request is None or not 0 <= message.index < len(request.sequences):
            return  # it has ended by itself meanwhile
        self._core.finish(request.sequences[message.index], FinishReason.STOP, message.stop)
        if request.finished:
            self._forget(message.handle)
        self._news_due = True

    def _forget(self, handle: int) -> None:
        request = self._requests.pop(handle, None)
        if request is not None:
            self._handles.pop(request, None)

    def _answer(self, call: m.Call) -> m.Answer:
        try:
            if call.name == "metrics":
                return m.Answer(call.number, self._metrics())
            if call.name == "check":
                self._scheduler.check()
                return m.Answer(call.number)
            if call.name == "clear_prefix_cache":
                return m.Answer(call.number, self._core.clear_prefix_cache())
            return m.Answer(call.number, error=f"there is no call {call.name!r}")
        except Exception as error:
            return m.Answer(call.number, error=f"{type(error).__name__}: {error}")

    # ---- what goes out

    def _step(self) -> None:
        stats = self._scheduler.stats
        before = (stats.steps, stats.prompt_tokens, stats.output_tokens, stats.preemptions)
        began = time.monotonic()
        self._pulse.state = ("stepping", began, stats.steps)
        updates = self._core.step(wait_for_kv=False)
        self._check_executor()
        if stats.steps == before[0] and not updates and not self._news_due:
            return
        times, scheduler = self._core.times, self._scheduler
        pools = scheduler.cache.pools
        self._send(updates, m.StepStats(
            stats.steps, began, times.plan, times.execute, times.update, stats.prompt_tokens - before[1],
            stats.output_tokens - before[2], stats.preemptions - before[3], len(scheduler.running),
            len(scheduler.waiting), sum(p.num_used for p in pools) / sum(p.num_blocks for p in pools)))

    def _check_executor(self) -> None:
        """An engine that lost its ranks ends; its supervisor starts a new one."""
        failure = self._core.executor.failure
        if failure is not None:
            raise failure

    def _send(self, updates: list[SequenceUpdate], stats: m.StepStats | None) -> None:
        handles, tokens, records, news, ended = [], [], [], [], []
        for update in updates:
            request, seq = update.request, update.sequence
            handle = self._handles.get(request)
            if handle is None:
                continue  # its caller has gone
            if request.refusal is not None:
                self._send_message(m.Refused(handle, str(request.refusal), request.refusal.field))
                self._forget(handle)
                continue
            if (len(update.new_tokens) == 1 and seq.finish_reason is None and not request.grouped
                    and not update.prompt_logprobs):
                handles.append(handle)
                tokens.append(update.new_tokens[0])
                records.append(update.logprobs[0] if update.logprobs else b"")
                continue
            news.append(_news(handle, update))
            if seq.finish_reason is not None and request.finished:
                ended.append(handle)
        started = self._newly_started() if self._started else []
        for handle in ended:
            self._forget(handle)
        now = time.monotonic()
        metrics = None
        if not self._requests or now >= self._snapshot_at:
            metrics = self._metrics()
            self._snapshot_at = now + _SNAPSHOT_SECONDS
        self._news_due = False
        self._send_message(m.StepOutputs(handles, tokens, news, started, self._taken, len(self._requests), stats,
                                         metrics, records if any(records) else []))

    def _show(self) -> None:
        """Send a view frame if the engine is watched and one is due."""
        if not self._watching.active:
            return
        frame = self._watching.frame(at_rest=not self._core.has_work)
        if frame is not None:
            self._send_message(m.ViewFrame(*frame))

    def _publish(self) -> None:
        """Publish which prefixes the device holds, for routers."""
        changes = None if self._held is None else self._held.take()
        if changes is not None:
            self._send_message(m.KVChanges(*changes))

    def _newly_started(self) -> list[m.Started]:
        found = [m.Started(self._handles[request], request.first_scheduled_time, request.num_cached_tokens or 0)
                 for request in self._started if request in self._handles and request.first_scheduled_time is not None]
        self._started.clear()
        return found

    def _send_message(self, message: m.FromEngine) -> None:
        self._outbox.send(m.encode(message))


def _news(handle: int, update: SequenceUpdate) -> m.SequenceNews:
    news = SequenceNews.of(update)
    # Counts are sent once, at the end of a sequence.
    counts = None if news.finish_reason is None else news.counts
    return m.SequenceNews(handle, news.index, news.tokens, news.finish_reason, news.stop_reason, news.error,
                          news.logprobs, news.prompt_logprobs, news.score, counts, news.num_sequences)


def serve(inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], pulse: Pulse) -> int:
    """Build what the first message asks for and run it; the exit code."""
    try:
        if not inbox.poll(_START_SECONDS * 1000):
            return 1
        start = m.decode_to_engine(inbox.recv())
        if not isinstance(start, m.Start):
            raise EngineError(f"the first message must say what to start, not {type(start).__name__}")
        engine = build_engine(EngineConfig.create(**start.options), progress=False, clock=time.monotonic,
                              options=start.options)
        server = EngineServer(engine, inbox, outbox, pulse, Doorbell(
            inbox, engine.core.executor.arrivals, engine.core.scheduler.compiling.isolated))
        outbox.send(m.encode(server.ready()))
        gc.collect()
        gc.freeze()  # the model is not garbage to be searched for ever
        try:
            server.run()
        finally:
            engine.core.close()
        return 0
    except Exception as error:
        known = isinstance(error, QuireError)
        if not known:
            log.exception("the engine stops after an unexpected error")
        message = str(error) if known else f"{type(error).__name__}: {error}"
        kind = type(error).__name__ if known else EngineError.__name__
        outbox.send(m.encode(m.Failed(kind, message, getattr(error, "field", None))))
        return 1


def main(argv: list[str]) -> int:
    # Ctrl-C and a service manager's SIGTERM reach every process; when to stop is the front door's decision, and
    # without a parent this one ends by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # not meant to end it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # short of memory, rather this one than the server that can say what happened
        Path("/proc/self/oom_score_adj").write_text("300")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    inbox_at, outbox_at, parent = argv
    context: zmq.Context[Any] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
    inbox.bind(inbox_at)
    outbox.connect(outbox_at)
    pulse = Pulse(context, outbox_at, int(parent))
    pulse.start()
    try:
        return serve(inbox, outbox, pulse)
    finally:
        pulse.end()
        inbox.close()
        outbox.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
