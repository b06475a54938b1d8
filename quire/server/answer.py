"""The way of an answer to its client: whole as JSON, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from quire.engine.outputs.output import CompletionOutput, RequestOutput
from quire.server.api_error import ApiError, api_error
from quire.server.generation import ClientGone, Work, outputs, until_disconnect
from quire.server.openai_api.protocol import StreamOptions
from quire.server.service import RequestRecord, Service
from quire.server.telemetry.log import LOGGER

encode = msgspec.json.Encoder().encode
_JSON = [(b"content-type", b"application/json")]
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]
_READING_SECONDS = 30.0
"""Beyond its time limit, a request may wait so long for a client to read."""
_MANY_LOGPROBS = 2000
"""Some milliseconds' work."""
_DONE = b"data: [DONE]\n\n"


async def send_json(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    found = [*(headers or _JSON), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": found})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Any, error: ApiError, body: dict[str, Any] | None = None) -> None:
    """`body`: the error in the form of another API."""
    await send_json(send, error.status, encode(error.body() if body is None else body), error.headers())


class Usage:
    """Tokens of one HTTP request, over all its prompts and choices."""

    def __init__(self) -> None:
        self._prompts: dict[int, RequestOutput] = {}
        self._generated = 0

    def note(self, place: int, output: RequestOutput) -> None:
        self._prompts[place] = output
        for completion in output.outputs:
            self._generated += len(completion.token_ids_delta)

    def body(self, counts_output: bool = True) -> dict[str, Any]:
        prompt = sum(len(output.prompt_token_ids) for output in self._prompts.values())
        cached = sum(output.num_cached_tokens or 0 for output in self._prompts.values())
        generated = self._generated if counts_output else 0
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
                "prompt_tokens_details": {"cached_tokens": cached}}


class Answer(ABC):
    """An ASGI application that runs the engine for one request. Nothing is sent before the engine has answered, so
    that whatever goes wrong until then has a status of its own."""

    def __init__(self, service: Service, record: RequestRecord, work: Work, *, stream: bool,
                 options: StreamOptions | None) -> None:
        self.service = service
        self.record = record
        self.work = work
        self.created = int(time.time())
        self._stream = stream
        self.include_usage = options is not None and bool(options.include_usage)
        self.usage_in_each = self.include_usage and options is not None and bool(options.continuous_usage_stats)
        self.usage = Usage()
        self._started = False

    @abstractmethod
    def events(self, place: int, output: RequestOutput) -> bytes:
        """The server-sent events for news of one prompt; may be empty."""

    @abstractmethod
    def whole(self, found: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def last_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that ends a stream with usage."""
        raise NotImplementedError

    def tail(self) -> bytes:
        """The events after the last of the engine's."""
        return (sse(self.last_usage(self.usage_body())) if self.include_usage else b"") + _DONE

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream in the middle."""
        return sse(error.body())

    def usage_body(self) -> dict[str, Any]:
        return self.usage.body()

    def chunk_usage(self) -> dict[str, Any]:
        """What a chunk before the last says of usage."""
        return {"usage": self.usage_body() if self.usage_in_each else None} if self.include_usage else {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.service.active.add(task)
        try:
            async with (until_disconnect(receive, lambda: task in self.service.ending),
                        contextlib.aclosing(outputs(self.service, self.work)) as found,
                        asyncio.timeout(None if self.work.timeout is None else self.work.timeout + _READING_SECONDS)):
                await (self._send_events(found, send) if self._stream else self._send_whole(found, send))
        except ClientGone:
            raise
        except TimeoutError:
            # The engine has long ended it: what is left is a client that does not read.
            raise ClientGone("the client does not read its answer") from None
        except Exception as error:
            if not self._started:
                raise
            await self._send_failure(error, send)
        finally:
            self.service.ending.discard(task)
            self.service.active.discard(task)
            self._note_facts()

    async def _send_whole(self, found: AsyncIterator[tuple[int, RequestOutput]], send: Any) -> None:
        latest: dict[int, RequestOutput] = {}
        async for place, output in found:
            latest[place] = output
            self.usage.note(place, output)
        all_of_it = [latest[place] for place in sorted(latest)]
        body = await _beside(sum(map(_num_logprobs, all_of_it)),
                             lambda: encode(self.whole(all_of_it, self.usage_body())))
        await send_json(send, 200, body)

    async def _send_events(self, found: AsyncIterator[tuple[int, RequestOutput]], send: Any) -> None:
        async for place, output in found:
            self.usage.note(place, output)
            body = await _beside(_num_logprobs(output), functools.partial(self.events, place, output))
            if body:
                await self._start(send)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._start(send)
        await send({"type": "http.response.body", "body": self.tail(), "more_body": False})

    async def _start(self, send: Any) -> None:
        """With the first event: a token without a text of its own is none, and until then a failure has its status."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})

    async def _send_failure(self, error: Exception, send: Any) -> None:
        """The stream has begun, so the status is spent: the error is an event, and the stream ends there."""
        found = api_error(error)
        if found.code == "internal_error":
            LOGGER.error("stream_failed", exc_info=error, extra={"fields": {"request_id": self.record.request_id}})
        self.record.facts["error"] = str(found)
        await send({"type": "http.response.body", "body": self.failure(found), "more_body": False})

    def _note_facts(self) -> None:
        body = self.usage_body()
        self.record.facts.update(
            prompt_tokens=body["prompt_tokens"], completion_tokens=body["completion_tokens"],
            cached_tokens=body["prompt_tokens_details"]["cached_tokens"], stream=self._stream)


def _num_logprobs(output: RequestOutput) -> int:
    """About how many log-probabilities there are: every position has as many as the last, or one more."""
    found = sum(each.num_logprobs for each in output.outputs)
    prompt = output.prompt_logprobs or (None,)
    return found + len(prompt) * len(prompt[-1] or ())


async def _beside(num_logprobs: int, make: Callable[[], bytes]) -> bytes:
    """What `make` gives; where that takes long, made in a thread, so that other streams go on meanwhile."""
    return make() if num_logprobs < _MANY_LOGPROBS else await asyncio.to_thread(make)


def sse(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


def named_sse(event: dict[str, Any]) -> bytes:
    """An event under the name of its type."""
    return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"


def finish_reason(completion: CompletionOutput) -> str | None:
    """OpenAI's word for how a choice ended."""
    if completion.finish_reason == "abort":
        raise ApiError(503, "the request was ended before it was complete: the server is closing", code="aborted",
                       retry_after=1.0)
    return completion.finish_reason


def new_logprobs(completion: CompletionOutput) -> list[Any]:
    """Those of the tokens that are new."""
    fresh = len(completion.token_ids_delta)
    return [] if completion.logprobs is None or not fresh else completion.logprobs[-fresh:]
