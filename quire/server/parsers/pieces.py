"""What a parser finds in a model's text, in the order of the text: thoughts, content and pieces of tool calls."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass


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
