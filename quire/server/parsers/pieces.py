"""What a parser finds in a model's text, in the order of the text: thoughts, content and pieces of tool calls."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Thought:
    text: str


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class CallDelta:
    """A piece of a tool call: the first of each has `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = Thought | Content | CallDelta


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def whole_characters(text: str) -> str:
    """The text with every half of a surrogate pair replaced: JSON's escapes can write one, UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_value(text: str) -> Any:
    """What a JSON text holds, in whole characters. Raises ValueError or RecursionError where it is none."""
    found = json.loads(text)
    return json.loads(whole_characters(json.dumps(found, ensure_ascii=False))) if "\\u" in text else found


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind made one piece."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Thought | Content) and isinstance(last, Thought | Content) and type(piece) is type(last):
            last.text += piece.text
        elif isinstance(piece, CallDelta) and isinstance(last, CallDelta) and piece.index == last.index:
            last.arguments += piece.arguments
        else:
            found.append(piece)
    return found
