"""What a router knows of an engine's load without asking: what it has sent there and what has come back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Load:
    """Requests on their way at one engine."""

    waiting: int = 0
    """Those that have not sent their first token."""
    waiting_tokens: int = 0
    """Prompt tokens of these that the engine did not have when they were sent."""
    running: int = 0
    """Those that have sent it."""
    sent: int = 0
    """All there ever were."""

    @property
    def in_flight(self) -> int:
        return self.waiting + self.running

    def send(self, tokens: int) -> Ticket:
        """A request goes there that needs so many tokens computed before its first one."""
        self.waiting += 1
        self.waiting_tokens += tokens
        self.sent += 1
        return Ticket(self, tokens)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at one engine."""

    load: Load
    tokens: int
    _started: bool = False
    _ended: bool = False

    def started(self) -> None:
        """Its first token is there."""
        if not self._started and not self._ended:
            self._started = True
            self.load.waiting -= 1
            self.load.waiting_tokens -= self.tokens
            self.load.running += 1

    def ended(self) -> None:
        """However it ended. Idempotent."""
        if self._ended:
            return
        if self._started:
            self.load.running -= 1
        else:
            self.load.waiting -= 1
            self.load.waiting_tokens -= self.tokens
        self._ended = True
