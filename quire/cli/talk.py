"""The loop of a chat: reads messages and commands, shows answers; who makes those is a class of its own."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from typing import Any

from quire.cli.terminal import CYAN, DIM, styled
from quire.errors import InvalidRequestError

DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.2, "top_p": 0.9}
"""Sampling parameters of chats, local or through a server."""
COMMANDS = (
    ("/help", "this list"),
    ("/reset", "forget the conversation; the system prompt stays"),
    ("/system TEXT", "set the system prompt and start anew; without TEXT, take it away"),
    ("/exit", "leave (also Ctrl-D)"),
)
PROMPT, CONTINUED, QUOTES = "› ", "… ", '"""'


class Talk(ABC):
    """The loop of reading a line and answering it."""

    def __init__(self, system: str | None) -> None:
        self._conversation = self._begin(system)
        self._interactive = sys.stdin.isatty()
        self._failed = False

    @abstractmethod
    def _begin(self, system: str | None) -> Any:
        """A conversation in which nothing was said yet."""

    def talk(self) -> int:
        """Until the input ends; 1 where it was a pipe's and a question of it got no answer."""
        if self._interactive:
            _enable_editing()
            self._note("Ask something. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat.")
        while True:
            try:
                text = self._read()
            except EOFError:
                if self._interactive:
                    print()
                return self._code()
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()
                self._note("(Ctrl-D or /exit leaves)")
                continue
            if text is None:
                continue
            if text.startswith("/") and "\n" not in text and not self._obey(text):
                return self._code()
            if not text.startswith("/") or "\n" in text:
                self._answer(text)

    def _code(self) -> int:
        return 1 if self._failed and not self._interactive else 0

    def _read(self) -> str | None:
        """A message: a line, lines that end in a backslash, or lines between triple quotes; None if empty."""
        line = self._input(PROMPT)
        if line.strip().startswith(QUOTES):
            return self._read_quoted(line.strip()[len(QUOTES) :]).strip() or None
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._continued() or ""
        return "\n".join([*lines, line]).strip() or None

    def _read_quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            more = self._continued()
            if more is None:
                return "\n".join(lines)
            line = more
        return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)])

    def _continued(self) -> str | None:
        """The next line of a message; None where a pipe ends within it, so that what came is not lost."""
        try:
            return self._input(CONTINUED)
        except EOFError:
            if self._interactive:
                raise
            return None

    def _input(self, prompt: str) -> str:
        if not self._interactive:
            return input()
        if not sys.stdout.isatty():
            return input(prompt)
        # Between \x01 and \x02 is what takes no place on the line, so that editing counts columns right.
        return input(f"\x01\x1b[{CYAN}m\x02{prompt}\x01\x1b[0m\x02")

    def _obey(self, text: str) -> bool:
        """Carry out a command; False when it ends the chat."""
        word, _, rest = text.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/help":
            self._note("\n".join(f"{name:<14}{what}" for name, what in COMMANDS))
        elif word == "/reset":
            self._conversation.reset()
            self._note("(the conversation is forgotten)")
        elif word == "/system":
            self._conversation = self._begin(rest.strip() or None)
            self._note(
                f"(new conversation, system prompt: {rest.strip()})"
                if rest.strip()
                else "(new conversation without a system prompt)"
            )
        else:
            self._note(f"there is no command {word}; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        try:
            prompt, forgotten = self._conversation.ask(text, self._max_tokens())
        except InvalidRequestError as error:
            self._failed = True
            self._note(f"({error})")
            return
        if forgotten:
            self._note(f"({self._context()} is full: the oldest {forgotten} messages are forgotten)")
        answer, note = self._stream(prompt)
        self._conversation.answered(answer)
        if note:
            self._note(note)

    def _max_tokens(self) -> int | None:
        """Room that an answer may need, where it is known here."""
        return None

    def _context(self) -> str:
        """How a note calls what holds the conversation."""
        return "the context"

    @abstractmethod
    def _stream(self, prompt: Any) -> tuple[str, str | None]:
        """Show the answer as it is made; what it is, and what to say about its end."""

    def _note(self, text: str) -> None:
        """Something that the model did not say."""
        print(
            styled(text, DIM, sys.stdout) if self._interactive else text,
            file=sys.stdout if self._interactive else sys.stderr,
            flush=True,
        )


def _enable_editing() -> None:
    """Arrow keys and a history of lines, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
