"""Token ids to text, one token at a time: no half characters, no part of a stop string, nothing lost.

The contract of a detokenizer: what `push` returned so far is always a prefix of the full decode of any
continuation, and with `finish` added it is exactly the full decode. Text that a later token could still
change is withheld.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_PATIENCE = 16
"""Withheld tokens after which a window is decoded again only when it has grown by half."""


class TextDecoder(Protocol):
    """The part of a tokenizer that turning ids into text needs."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """No more tokens: return the rest of the text, incomplete characters as U+FFFD."""
        ...


def make_detokenizer(tokenizer: TextDecoder, skip_special_tokens: bool) -> Detokenizer:
    """Bytes where the vocabulary is one of bytes, else a window that is decoded again for each token."""
    decoder = getattr(getattr(tokenizer, "backend", None), "decoder", None)
    if type(decoder).__name__ == "ByteLevel":
        return ByteDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: each token is a string of bytes, so UTF-8 is decoded as it arrives.

    Python's incremental decoder and the tokenizers library replace invalid bytes alike (one U+FFFD for each
    maximal part of a character), so the pieces join to the full decode whatever the tokens are.
    """

    __slots__ = ("_bytes_of", "_skip", "_utf8")

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._utf8.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decode a short window twice, with and without the new tokens, and take the
    rest.

    The window starts with tokens whose text is out already, so that what a decoder does to the start of a
    text (SentencePiece drops a space there) happens to both decodes alike. Three things are withheld: a run
    of byte tokens, since one bad byte turns the whole run into U+FFFD; a text that ends in U+FFFD, which
    may be half a character; a window whose start changed. `finish` decodes everything once.
    """

    __slots__ = ("_context", "_emitted", "_ids", "_skip", "_start", "_text_of", "_tokenizer", "_try_at")

    def __init__(self, tokenizer: TextDecoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._text_of = tokenizer.token_text
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._start = 0
        """Where the window starts in `_ids`."""
        self._context = 0
        """Where the tokens whose text is not out yet start."""
        self._emitted: list[str] = []
        self._try_at = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        text = self._text_of(token_id)
        # An id without a token leaves an open run of bytes open.
        if not text or _is_byte_token(text) or len(self._ids) < self._try_at:
            return ""
        known = self._decode(self._ids[self._start : self._context])
        text = self._decode(self._ids[self._start :])
        if text.endswith(_REPLACEMENT) or not text.startswith(known):
            waiting = len(self._ids) - self._context
            self._try_at = 0 if waiting < _PATIENCE else len(self._ids) + waiting // 2
            return ""
        self._advance()
        return self._emit(text[len(known) :])

    def finish(self) -> str:
        text, emitted = self._decode(self._ids), "".join(self._emitted)
        return self._emit(text[len(emitted) :])

    def _advance(self) -> None:
        """All is out: the last tokens become the context, unless the next one would be first after them."""
        if self._decode(self._ids[self._context :]):
            self._start = self._context
        self._context = len(self._ids)
        self._try_at = 0

    def _emit(self, text: str) -> str:
        self._emitted.append(text)
        return text

    def _decode(self, ids: list[int]) -> str:
        # Skipped tokens never enter `_ids`, so nothing is left to skip.
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def _is_byte_token(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


class StopStrings:
    """Looks for stop strings in text that arrives in pieces, and withholds what may become one.

    The string that is complete first wins; of two complete at the same character, the longer one. So the
    result does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_fallback", "_held", "_include", "_matched", "_state", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include_in_output
        self._fallback = [_borders(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)
        """For each stop string, how much of its start the text ends with."""
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def push(self, text: str, armed: bool = True) -> str:
        """Take some text; return what may be shown. Matches that end in an unarmed piece do not count."""
        if not self._stops:
            return text
        buffer, start = self._held + text, len(self._held)
        for place in range(start, len(buffer)):
            found = self._step(buffer[place])
            if found is not None and armed:
                self._matched, self._held = found, ""
                return buffer[: place + 1] if self._include else buffer[: place + 1 - len(found)]
        shown = len(buffer) - max(self._state)
        self._held = buffer[shown:]
        return buffer[:shown]

    def finish(self) -> str:
        """No more text: what was withheld is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Move each automaton by one character; the longest stop string that is now complete, if any."""
        found = None
        for i, stop in enumerate(self._stops):
            state, fallback = self._state[i], self._fallback[i]
            while state and stop[state] != char:
                state = fallback[state - 1]
            state += stop[state] == char
            if state == len(stop):
                found = found or stop
                state = fallback[state - 1]
            self._state[i] = state
        return found


def _borders(text: str) -> list[int]:
    """For each prefix, the longest shorter prefix that is also its end (Knuth, Morris, Pratt)."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        length += text[i] == text[length]
        borders[i] = length
    return borders
