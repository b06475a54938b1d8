"""One HTTP request's work for the engine: its prompts run side by side, and end with their client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from quire.engine.input import Params
from quire.engine.outputs.output import RequestOutput
from quire.errors import EngineError, InvalidRequestError, QuarantinedError, QuireError
from quire.sampling.params import NOTHING_TO_DRAW
from quire.server.api_error import ApiError
from quire.server.openai_api.parameters import in_words_of
from quire.server.service import Service
from quire.server.telemetry.metrics import Stopwatch

Receive = Callable[[], Awaitable[Any]]
_STARTED_AT_ONCE = 4
"""Prompts of one request that are given to the engine before others have a turn."""


class ClientGone(QuireError):
    """The client has closed its connection."""


@contextlib.asynccontextmanager
async def until_disconnect(receive: Receive, ending: Callable[[], bool]) -> AsyncIterator[None]:
    """Cancels what runs inside as soon as the client is gone, and says so with ClientGone.

    Where `ending` says that it was the server that cancelled, the client gets a 503.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
        if gone:  # it left just as the work was done: let the cancellation arrive here and not somewhere else
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        if not gone and not ending():
            raise
        task.uncancel()
        if not gone:
            raise ApiError(503, "the server is closing and could not finish this request", code="closing",
                           retry_after=5.0) from None
        raise ClientGone("the client has closed its connection") from None
    finally:
        watcher.cancel()


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts as token ids, and how to continue them."""

    request_id: str
    prompts: list[list[int]]
    params: Params
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    constraint_field: str | None = None
    """The field of the client's that asks for a shape, to name it where the shape is refused."""
    pieces: bool = False
    """What is new, as it comes; else each prompt's output once, whole."""
    prompt_field: str = "prompt"
    prefill: tuple[str, ...] | None = None
    """Engines that are asked for the prompts."""

    def client_name(self, field: str | None) -> str | None:
        """What the client calls a field of the engine's."""
        if field is not None and field.startswith("structured_outputs"):
            return self.constraint_field or field
        return self.prompt_field if field == "prompt" else field


async def outputs(service: Service, work: Work) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place of the prompt, its output): what is new, or each once as a whole. Closing this ends them all."""
    if len(work.prompts) == 1:
        async with contextlib.aclosing(_one(service, work, 0)) as single:
            async for output in single:
                yield 0, output
        return
    async with contextlib.aclosing(_many(service, work)) as several:
        async for found in several:
            yield found


async def _one(service: Service, work: Work, place: int) -> AsyncGenerator[RequestOutput, None]:
    name = work.request_id if len(work.prompts) == 1 else f"{work.request_id}-{place}"
    stream = service.engine.generate(
        {"prompt_token_ids": work.prompts[place]}, work.params, request_id=name, priority=work.priority,
        tenant=work.tenant, cache_salt=work.cache_salt, timeout=work.timeout,
        output_kind="delta" if work.pieces else "final", prefill=work.prefill)
    watch = Stopwatch(service.metrics)
    note = watch.note if work.pieces else watch.note_whole
    reason = "abort"
    try:
        await _start(stream)
        async for output in stream:
            note(output)
            if output.error == NOTHING_TO_DRAW:
                raise ApiError(400, output.error, param=work.constraint_field, code="nothing_to_draw")
            if output.error is not None:
                raise ApiError(500, f"the engine gave the request up: {output.error}", code="engine_error")
            yield output
            if output.finished:
                return
        raise EngineError("the engine ended the request without saying why")
    except InvalidRequestError as error:
        reason = "error"
        message = in_words_of(work.constraint_field, str(error))
        raise ApiError(400, message, param=work.client_name(error.field)) from error
    except Exception:
        reason = "error"
        raise
    finally:
        watch.close(reason)
        await stream.aclose()


async def _start(stream: Any) -> None:
    """Give the engine the request. One that is being started anew will take it later, which is not a failure."""
    try:
        await stream.start()
    except EngineError as error:
        wait = getattr(error, "retry_after", None)
        if wait is None or isinstance(error, QuarantinedError):
            raise
        raise ApiError(503, str(error), code="engine_restarting", retry_after=wait) from error


async def _many(service: Service, work: Work) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several prompts, in the order in which they come."""
    news: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue(maxsize=len(work.prompts))

    async def follow(place: int) -> None:
        stream = _one(service, work, place)
        try:
            async for output in stream:
                await news.put((place, output))
        except Exception as error:
            await news.put((place, error))
        finally:
            await stream.aclose()

    followers: list[asyncio.Task[None]] = []
    running = len(work.prompts)
    try:
        for place in range(len(work.prompts)):
            followers.append(asyncio.create_task(follow(place)))
            if place % _STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have a turn
        while running:
            place, found = await news.get()
            if isinstance(found, BaseException):
                raise found
            running -= found.finished
            yield place, found
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
