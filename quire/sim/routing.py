"""Plays a trace through a routing policy in simulated time: the prefix tokens it finds and when first tokens come.

Each replica computes steps of a fixed length with a bounded number of tokens, decoding sequences first, and keeps the
blocks it used last. Nothing here depends on how busy the machine is, so that policies can be compared exactly.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.router.load import Load, Ticket
from quire.router.policies import Candidate, Policy


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: when, the blocks of its prompt, the tokens of its output."""

    time: float
    blocks: Sequence[int]
    output: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What one replica is like."""

    blocks: int = 2000
    block_size: int = 16
    step_seconds: float = 0.010
    step_tokens: int = 64


@dataclass(slots=True)
class Outcome:
    found_tokens: int = 0
    prompt_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Prompt:
    arrival: Arrival
    ticket: Ticket
    left: int | None = None
    """Tokens to compute; None before it was begun."""


class _Replica:
    def __init__(self, shape: Shape, outcome: Outcome) -> None:
        self.load = Load()
        self._shape, self._outcome = shape, outcome
        self._held: OrderedDict[int, None] = OrderedDict()
        self._prompts: deque[_Prompt] = deque()
        self._decoding: list[tuple[int, Ticket]] = []

    @property
    def busy(self) -> bool:
        return bool(self._prompts or self._decoding)

    def num_held(self, blocks: Sequence[int]) -> int:
        """Tokens of the leading blocks that it has."""
        count = next((place for place, block in enumerate(blocks) if block not in self._held), len(blocks))
        return count * self._shape.block_size

    def take(self, prompt: _Prompt) -> None:
        self._prompts.append(prompt)

    def step(self, now: float) -> None:
        """What one step, which ends now, has computed."""
        room = self._shape.step_tokens - len(self._decoding)
        going_on = []
        for left, ticket in self._decoding:
            if left > 1:
                going_on.append((left - 1, ticket))
            else:
                ticket.ended()
        self._decoding = going_on
        while self._prompts and room > 0:
            prompt = self._prompts[0]
            if prompt.left is None:
                prompt.left = self._begin(prompt.arrival)
            computed = min(room, prompt.left)
            room -= computed
            prompt.left -= computed
            if not prompt.left:
                self._prompts.popleft()
                self._first_token(prompt, now)

    def _begin(self, arrival: Arrival) -> int:
        length, held = len(arrival.blocks) * self._shape.block_size + 1, self.num_held(arrival.blocks)
        self._outcome.prompt_tokens += length
        self._outcome.found_tokens += held
        return length - held

    def _first_token(self, prompt: _Prompt, now: float) -> None:
        self._outcome.first_tokens.append(now - prompt.arrival.time)
        prompt.ticket.started()
        for block in reversed(prompt.arrival.blocks):  # the deepest is the first to go
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._shape.blocks:
            self._held.popitem(last=False)
        if prompt.arrival.output > 1:
            self._decoding.append((prompt.arrival.output - 1, prompt.ticket))
        else:
            prompt.ticket.ended()


def arrivals_of(trace: Sequence[dict[str, Any]], rate: float, shape: Shape, trace_block: int = 512) -> list[Arrival]:
    """A trace at so many requests per second; outputs are scaled as blocks are."""
    first = trace[0]["timestamp"]
    scale = len(trace) / rate / max(1e-9, float(trace[-1]["timestamp"] - first))
    return [Arrival((each["timestamp"] - first) * scale, each["hash_ids"],
                    max(1, each["output_length"] * shape.block_size // trace_block)) for each in trace]


def simulate(policy: Policy, arrivals: Sequence[Arrival], num_replicas: int, shape: Shape | None = None) -> Outcome:
    shape = Shape() if shape is None else shape
    outcome = Outcome()
    replicas = [_Replica(shape, outcome) for _ in range(num_replicas)]
    steps: list[tuple[float, int]] = []
    """When a replica's next step ends."""

    def steps_until(time: float) -> None:
        while steps and steps[0][0] <= time:
            now, number = heapq.heappop(steps)
            replicas[number].step(now)
            if replicas[number].busy:
                heapq.heappush(steps, (now + shape.step_seconds, number))

    for arrival in arrivals:
        steps_until(arrival.time)
        length = len(arrival.blocks) * shape.block_size + 1
        candidates = [Candidate(str(number), replica.load, replica.num_held(arrival.blocks))
                      for number, replica in enumerate(replicas)]
        place = policy.choose(length, candidates).place
        replica = replicas[place]
        if not replica.busy:
            heapq.heappush(steps, (arrival.time + shape.step_seconds, place))
        replica.take(_Prompt(arrival, replica.load.send(max(1, length - candidates[place].held))))
    steps_until(float("inf"))
    return outcome
