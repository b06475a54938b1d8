"""A link to another engine as the core's thread sees it, and the box into which other threads put what came.

Nothing here blocks: what is sent is queued, what came waits in the `Inbox` until the core looks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from quire.peers.messages import Data, Message

log = logging.getLogger("quire.peers")

Event = Callable[[], None]


class Inbox:
    """What threads have for the core, in its order; a put wakes the core."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._wake = wake

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def run_all(self) -> int:
        """Call what has come, on the core's thread; how many there were."""
        count = 0
        while self._events:
            count += 1
            try:
                self._events.popleft()()
            except Exception:  # whatever another engine did, this one goes on
                log.exception("a message from another engine could not be handled")
        return count


class Link(ABC):
    """One connection between two engines. Its events go to whoever owns it, on the core's thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        """For logs and errors: the address of the other side."""
        self.theirs: Data | None = None
        """What the other side said of itself; None before the handshake is over."""
        self.made = float("inf")
        """When it was begun, by the engine's clock."""
        self.heard = float("-inf")
        """When the other side last gave a sign of life, by the engine's clock."""
        self.error: str | None = None
        """Why it is closed, once it is."""

    @property
    def closed(self) -> bool:
        return self.error is not None

    @property
    def up(self) -> bool:
        return self.theirs is not None and not self.closed

    @abstractmethod
    def send(self, data: dict[str, Any]) -> None:
        """Queue a message. To a closed link it goes nowhere."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Idempotent. The other side notices."""


Handler = Callable[[Link, Message], None]
