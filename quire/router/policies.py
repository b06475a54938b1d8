"""Who gets a request: in turns, the least loaded, or the one with the least to compute before the first token.

A policy sees candidates with their loads and what each holds of the prompt; it does not know whether they are servers
behind a router or engines behind one server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.errors import ConfigError
from quire.router.load import Load

DECODE_TOKENS = 16
"""A request in flight slows another down about as much as so many tokens of prompt."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One that could take the request."""

    name: str
    load: Load
    held: int = 0
    """Tokens at the start of the prompt whose KV it has."""


@dataclass(frozen=True, slots=True)
class Destination:
    place: int
    """In the candidates."""
    why: str


class Policy(Protocol):
    """`candidates` are never none."""

    name: str

    def choose(self, num_tokens: int, candidates: Sequence[Candidate]) -> Destination:
        """Who takes a prompt of so many tokens."""
        ...


@dataclass(slots=True)
class RoundRobin:
    """Each in turn, whatever it has to do. Turns go by names, so one that comes or goes does not shift the others."""

    name: str = "round-robin"
    _turns: dict[str, int] = field(default_factory=dict)
    _clock: int = 0

    def choose(self, num_tokens: int, candidates: Sequence[Candidate]) -> Destination:
        place = min(range(len(candidates)), key=lambda i: self._turns.get(candidates[i].name, 0))
        self._took(candidates[place].name)
        return Destination(place, "its turn")

    def _took(self, name: str) -> None:
        self._clock += 1
        self._turns[name] = self._clock
        if len(self._turns) > _MOST_NAMES:  # servers that came and went
            del self._turns[min(self._turns, key=lambda each: self._turns[each])]


_MOST_NAMES = 4096


@dataclass(slots=True)
class LeastLoaded:
    """The one with the fewest requests in flight, of those the one with the fewest prompt tokens that wait, in turns
    among equals."""

    name: str = "least-loaded"
    _turns: RoundRobin = field(default_factory=RoundRobin)

    def choose(self, num_tokens: int, candidates: Sequence[Candidate]) -> Destination:
        loads = [(each.load.in_flight, each.load.waiting_tokens) for each in candidates]
        return among(self._turns, candidates, loads, lambda load: f"least loaded: {load[0]} in flight")


@dataclass(slots=True)
class CacheAware:
    """The one that has to compute least before the first token: what it lacks of this prompt, what waits before it,
    and the requests that it decodes beside."""

    name: str = "cache-aware"
    _turns: RoundRobin = field(default_factory=RoundRobin)

    def choose(self, num_tokens: int, candidates: Sequence[Candidate]) -> Destination:
        costs = [(num_tokens - each.held + each.load.waiting_tokens + DECODE_TOKENS * each.load.in_flight,)
                 for each in candidates]
        found = among(self._turns, candidates, costs, lambda cost: f"{cost[0]} tokens before the first one")
        held, most = candidates[found.place].held, max(each.held for each in candidates)
        if held:
            why = f"holds {held} of {num_tokens} tokens"
        elif most:
            why = f"free sooner than the one that holds {most} of {num_tokens} tokens"
        else:
            why = "no server holds a part; least to do"
        return Destination(found.place, why)


def among(turns: RoundRobin, candidates: Sequence[Candidate], costs: Sequence[tuple[int, ...]],
          why: Callable[[tuple[int, ...]], str]) -> Destination:
    """The cheapest, in turns among equals."""
    least = min(costs)
    places = [place for place, cost in enumerate(costs) if cost == least]
    place = places[turns.choose(0, [candidates[each] for each in places]).place]
    return Destination(place, why(least))


POLICIES: dict[str, Callable[[], Policy]] = {"round-robin": RoundRobin, "least-loaded": LeastLoaded,
                                             "cache-aware": CacheAware}


def make_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {name!r:.80}", field="policy")
    return POLICIES[name]()
