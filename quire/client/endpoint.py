"""A server of the OpenAI API: its address, key and model, and what its errors say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.client.events import EventParser
from quire.errors import QuireError

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_SECONDS = 10.0
_ERROR_CHARACTERS = 300


class EndpointError(QuireError):
    """A server could not be reached or refused what was asked of it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def base_url(url: str) -> str:
    """The address up to, not including, `/v1`: http://host:8000/v1/ and host:8000 name the same server."""
    text = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if "://" not in text:
        text = f"http://{text}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EndpointError(f"{url!r} is no address of a server: write it as {DEFAULT_URL}")
    return text


def error_text(status: int, body: str) -> str:
    """What an answer other than 200 says, in one line, whatever shape it has."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        message = error.get("message", error) if isinstance(error, dict) else error
        text = str(message if message != {} else body)
    except (ValueError, AttributeError):
        text = body
    return f"{status}: {' '.join(text.split())[:_ERROR_CHARACTERS] or 'no reason given'}"


@dataclass(slots=True)
class Endpoint:
    """One server. `model` is found out by asking where it is not given."""

    url: str = DEFAULT_URL
    api_key: str | None = None
    model: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        self.url = base_url(self.url)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def model_name(self) -> str:
        """The model to ask for: the first that the server lists."""
        if self.model is None:
            listed = self._get("/v1/models").get("data") or []
            if not listed or "id" not in listed[0]:
                raise EndpointError(f"{self.url} lists no model: name one with --model")
            self.model = str(listed[0]["id"])
        return self.model

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer."""
        import httpx

        timeout = httpx.Timeout(self.timeout, connect=_CONNECT_SECONDS)
        asked = {**body, "model": self.model_name(), "stream": True}
        try:
            with httpx.stream("POST", self.url + path, json=asked, headers=self.headers, timeout=timeout) as answer:
                if answer.status_code != 200:
                    raise self._refused(answer.status_code, answer.read().decode(errors="replace"))
                yield from self._chunks(answer.iter_bytes())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _chunks(self, pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
        parser = EventParser()
        for piece in pieces:
            for data in parser.feed(piece):
                if data == b"[DONE]":
                    return
                try:
                    chunk = json.loads(data)
                except ValueError as error:
                    raise EndpointError(f"{self.url} sent an event that is not JSON: {data[:80]!r}") from error
                if isinstance(chunk, dict) and chunk.get("error"):
                    raise EndpointError(f"{self.url} broke off: {error_text(500, data.decode(errors='replace'))}", 500)
                yield chunk
        raise EndpointError(f"{self.url} closed the connection in the middle of an answer")

    def _get(self, path: str) -> dict[str, Any]:
        import httpx

        try:
            answer = httpx.get(self.url + path, headers=self.headers, timeout=_CONNECT_SECONDS)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise self._refused(answer.status_code, answer.text)
        try:
            found = answer.json()
        except ValueError as error:
            raise EndpointError(f"{self.url}{path} is no OpenAI API: it does not answer with JSON") from error
        return found if isinstance(found, dict) else {}

    def _refused(self, status: int, body: str) -> EndpointError:
        hint = " (give the key with --api-key, or in the variable OPENAI_API_KEY)" if status == 401 else ""
        return EndpointError(f"{self.url} answered {error_text(status, body)}{hint}", status)

    def _unreachable(self, error: Exception) -> EndpointError:
        return EndpointError(f"{self.url} cannot be reached ({error or type(error).__name__}): is a server running "
                             "there? `quire serve` starts one")
