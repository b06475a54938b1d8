"""What the faces of a conversation share: putting turns together, and errors in the words of the client's API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from quire.server.api_error import ApiError, validation_error
from quire.server.openai_api.chat_protocol import AssistantMessage, CalledFunction, Message, SystemMessage, ToolCall

_T = TypeVar("_T")


def never(value: _T) -> _T:
    """A field that may be there, but ask for nothing."""
    if value:
        raise ValueError("is not supported by this server: leave it out")
    return value


@contextmanager
def told_in(words: Mapping[str, str]) -> Iterator[None]:
    """Errors raised in here name the fields as the client wrote them."""
    try:
        yield
    except ValidationError as error:
        raise in_words(validation_error(error.errors(include_url=False, include_input=False), None), words) from None
    except ApiError as error:
        raise in_words(error, words) from error


def in_words(error: ApiError, words: Mapping[str, str]) -> ApiError:
    """The same complaint about the field that the client has written. `words`: from chat's fields to its own."""
    pattern = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, words)) + r")(?!\w)")

    def own(text: str) -> str:
        return pattern.sub(lambda found: words[found[1]], text)

    return ApiError(error.status, own(str(error)), param=None if error.param is None else own(error.param),
                    code=error.code, retry_after=error.retry_after, allow=error.allow, context=error.context)


class Turns:
    """Messages of a chat from parts that come one by one: what an assistant says in one turn is one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._assistant: dict[str, Any] | None = None

    def add(self, message: Message) -> None:
        self.end()
        last = self.messages[-1] if self.messages else None
        if isinstance(message, SystemMessage) and isinstance(last, SystemMessage):
            # Most chat templates know one system message only.
            self.messages[-1] = SystemMessage(role="system", content=f"{last.content}\n\n{message.content}")
        else:
            self.messages.append(message)

    def thinks(self, text: str) -> None:
        if self._has("content", "tool_calls"):
            self.end()
        parts = self._parts()
        parts["reasoning_content"] = parts.get("reasoning_content", "") + text

    def says(self, text: str) -> None:
        if self._has("tool_calls"):
            self.end()
        parts = self._parts()
        parts["content"] = "\n".join(filter(None, [parts.get("content"), text]))

    def calls(self, call_id: str, name: str, arguments: str) -> None:
        function = CalledFunction(name=name, arguments=arguments)
        self._parts().setdefault("tool_calls", []).append(ToolCall(id=call_id, function=function, index=None))

    def end(self) -> None:
        """The assistant's turn is over."""
        parts, self._assistant = self._assistant, None
        if parts and ("content" in parts or "tool_calls" in parts):
            self.messages.append(AssistantMessage(role="assistant", **parts))

    def _has(self, *names: str) -> bool:
        return self._assistant is not None and any(name in self._assistant for name in names)

    def _parts(self) -> dict[str, Any]:
        if self._assistant is None:
            self._assistant = {}
        return self._assistant
