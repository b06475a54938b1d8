"""The outputs of one request as an async iterator, which aborts the request when its reader is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from quire.engine.front.subscription import Subscription
from quire.engine.outputs.output import RequestOutput


class Desk(Protocol):
    """Called when the reader has gone: directly, or from the garbage collector's thread."""

    def drop(self, subscription: Subscription) -> None: ...

    def drop_later(self, subscription: Subscription) -> None: ...


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, as they come.

    `start` sends the request (the first `anext` does it otherwise) and raises what keeps it from being served.
    Closing the stream, dropping it, or cancelling a task that waits for it, aborts the request.
    """

    # Who drops a stream drops this, and `__del__` aborts: so nothing that lives longer may hold it, only what it holds.
    def __init__(self, request_id: str, desk: Desk, open: Callable[[], Awaitable[Subscription]]) -> None:
        self.request_id = request_id
        self._desk = desk
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
            self._desk.drop(subscription)

    def __del__(self) -> None:
        if self._subscription is not None:
            self._desk.drop_later(self._subscription)
