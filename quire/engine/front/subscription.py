"""One request as its front door sees it: takes in what the engine says, hands out what its reader has not seen.

However slow a reader is, there is one pending output: what came meanwhile is merged into it.
"""

from __future__ import annotations

import asyncio
import time

from quire.engine.outputs.output import RequestOutput
from quire.engine.outputs.output_processor import OutputProcessor
from quire.engine.process import messages as m
from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.request import Request

OUTPUT_KINDS = ("cumulative", "delta", "final")


class Subscription:
    """Lives on the event loop. It is over when the request has ended or `fail` was called."""

    __slots__ = ("_error", "_kind", "_news", "_waiter", "ended", "handle", "processor", "request", "request_id",
                 "running", "timer")

    def __init__(self, handle: int, request: Request, processor: OutputProcessor, kind: str) -> None:
        self.handle = handle
        self.request = request
        self.request_id = request.request_id
        self.running = False
        """The engine has begun with it."""
        self.processor = processor
        self.timer: asyncio.TimerHandle | None = None
        self.ended = False
        """Nothing more will come; what has come may still be unread."""
        self._kind = kind
        self._news = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- what the engine says

    def take_token(self, token: int, logprobs: LogprobRecord | None = None) -> str | None:
        """One token of the only sequence; the stop string that it completed, if any."""
        self._news = True
        return self.processor.process_token(token, logprobs=logprobs)

    def take(self, news: m.SequenceNews) -> str | None:
        """Whatever else; the stop string that ended the sequence here and not in the engine, if any."""
        self._news = True
        return self.processor.take(news, time.monotonic())

    def started(self, when: float, num_cached_tokens: int) -> None:
        self.running = True
        self.processor.started(when, num_cached_tokens)

    def fail(self, error: Exception) -> None:
        """The reader gets this instead of anything that it has not read yet."""
        if not self.ended:
            self._error = error
            self.end()
            self.wake()

    def mark(self) -> None:
        """There is something to tell that the engine did not say."""
        self._news = True

    def end(self) -> None:
        self.ended = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def wake(self) -> None:
        """Let the reader run, once for all that has come."""
        if self._waiter is not None and (self.ended or self._presentable) and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def _presentable(self) -> bool:
        return self._news and self._kind != "final" and not self.processor.silent_until_done

    # ---- what the reader gets

    async def next(self) -> RequestOutput | None:
        """The next output as soon as there is one; None after the last."""
        while True:
            if self._error is not None:
                error, self._error = self._error, None
                self._news = False
                raise error
            if self._presentable or (self._news and self.ended):
                self._news = False
                return self.processor.output(only_new=self._kind == "delta")
            if self.ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
