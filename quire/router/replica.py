"""One server as the router sees it: whether it takes requests, what it has to do, and what it said of itself."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.router.load import Load
from quire.router.upstream import Upstream

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_MOST_ACCUSED = 4096
_PREFILL_SECONDS = 60.0
"""A server that refused whom the router names for a prompt is not named anybody for so long."""
_MISSES = 2
"""So many questions without an answer in a row, and a server counts as dead."""


class State(enum.Enum):
    UNKNOWN = "unknown"
    UP = "up"
    DRAINING = "draining"
    """It finishes what it has and takes no more."""
    DOWN = "down"


class Role(enum.Enum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Breaker:
    """Opens when a server fails a request: nobody is sent there until it has answered a question about its health, and
    not before a pause that grows with each failure in a row."""

    clock: Callable[[], float] = time.monotonic
    failures: int = 0
    """In a row."""
    open_until: float = 0.0

    def failed(self) -> None:
        self.failures += 1
        self.open_until = self.clock() + min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self.failures - 1, 16))

    def succeeded(self) -> None:
        self.failures, self.open_until = 0, 0.0

    @property
    def open(self) -> bool:
        return self.clock() < self.open_until


@dataclass(slots=True, eq=False)
class Replica:
    """A server. `number` is its name for clients, who need not know addresses."""

    number: int
    url: str
    role: Role
    upstream: Upstream
    load: Load = field(default_factory=Load)
    breaker: Breaker = field(default_factory=Breaker)
    state: State = State.UNKNOWN
    why: str = "not asked yet"
    model: str | None = None
    card: dict[str, object] = field(default_factory=dict)
    """What its /v1/models says of the model."""
    leased_until: float | None = None
    """Of one that has registered itself: when it is forgotten unless it is heard of again."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How its requests ended: ok, refused, retried, broken."""
    events: str = "none"
    """Whether it tells what it holds: none, another secret, or following."""
    looks: int = 0
    """Questions about its health that it has answered."""
    block_size: int = 0
    """Tokens of one of its KV blocks, while its events are followed."""
    no_prefill_until: float = 0.0
    """It refused whom the router names to compute a prompt: until then it computes prompts itself."""
    _misses: int = 0
    _accused: set[bytes] = field(default_factory=set)
    """Contents of requests that it has failed with since it was last found well again."""

    @property
    def name(self) -> str:
        return self.url

    @property
    def available(self) -> bool:
        return self.state is State.UP and not self.breaker.open

    def failed(self, why: str) -> None:
        """A request failed by its fault: no request is sent there until a health check succeeds."""
        self.breaker.failed()
        if self.state is not State.DRAINING:
            self.state, self.why = State.DOWN, why

    def accuse(self, content: bytes) -> bool:
        """It failed while a request of this content was there; false if another such request has said so already."""
        if content in self._accused or len(self._accused) >= _MOST_ACCUSED:
            return False
        self._accused.add(content)
        return True

    def refused(self, code: str | None, status: int) -> None:
        """It answered that it cannot take a request now; what its health says next holds."""
        self.outcomes["refused"] += 1
        if code == "closing":
            self.state, self.why = State.DRAINING, "it says that it is closing"
        elif code == "engine_dead":
            self.state, self.why = State.DOWN, "its engine is dead"
        elif status in (502, 504) or (status >= 500 and code is None):
            self.failed(f"it answered {status}")

    @property
    def takes_prefill(self) -> bool:
        return self.role is Role.DECODE and time.monotonic() >= self.no_prefill_until

    def refused_prefill(self) -> None:
        self.no_prefill_until = time.monotonic() + _PREFILL_SECONDS

    def answered_health(self, status: int, closing: bool, why: str) -> None:
        self._misses = 0
        if status == 200:
            if self.state is not State.UP:
                self._accused.clear()
            self.state, self.why = State.UP, "well"
        elif closing:
            self.state, self.why = State.DRAINING, why
        else:
            self.state, self.why = State.DOWN, why

    def missed_health(self, why: str, *, gone: bool) -> bool:
        """It did not answer; true if that is the end of it. `gone`: it did not even take the connection."""
        self._misses += 1
        if gone or self._misses >= _MISSES:
            self.state, self.why = State.DOWN, why
            return True
        return False
