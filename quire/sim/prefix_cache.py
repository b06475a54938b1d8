"""Replay prompts over the real block pool, to see what share of their blocks a policy finds in cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from quire.errors import InvalidRequestError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import EVICTION_POLICIES
from quire.kvcache.eviction_policy import EvictionPolicy

CLAIRVOYANT = "clairvoyant"
_KEY_BYTES = 16
_NEVER = 1 << 60

Prompt = Sequence[bytes]
"""Keys of the blocks of one prompt, root first; equal keys mean equal prefixes."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one policy found in a cache of `capacity` blocks."""

    policy: str
    capacity: int
    blocks: int
    hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def read_trace(path: Path, limit: int | None = None) -> list[list[bytes]]:
    """The prompts of a trace in Mooncake's format: a JSON object with `hash_ids` on every line.

    What is cached is a prefix, so a number names another block after another beginning. In a trace of hash
    chains that never happens; in one whose numbers stand for contents alone it does.
    """
    prompts: list[list[bytes]] = []
    chains: dict[tuple[int, int], int] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(prompts) >= limit:
                    break
                if line.strip():
                    prompts.append(block_keys(_chained(_read_line(path, number, line), chains)))
    except OSError as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error.strerror}", "trace") from error
    if not prompts:
        raise InvalidRequestError(f"the trace {path} holds no requests", "trace")
    return prompts


def _read_line(path: Path, number: int, line: bytes) -> list[int]:
    where = f"line {number} of {path}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is not JSON ({error}): expected one object a line") from error
    ids = entry.get("hash_ids") if isinstance(entry, dict) else None
    if not isinstance(ids, list):
        raise InvalidRequestError(f'{where} has no list "hash_ids": is this a trace of the Mooncake format?')
    for value in ids:
        if type(value) is not int:
            raise InvalidRequestError(f'{where}: {value!r:.40} in "hash_ids" is not a block number')
    return ids


def _chained(ids: Sequence[int], chains: dict[tuple[int, int], int]) -> list[int]:
    """A number for every prefix, counted as they are first seen; `chains` knows it by (prefix before, id)."""
    prefix = -1
    numbers = []
    for value in ids:
        prefix = chains.setdefault((prefix, value), len(chains))
        numbers.append(prefix)
    return numbers


def block_keys(ids: Sequence[int]) -> list[bytes]:
    return [value.to_bytes(_KEY_BYTES, "big", signed=True) for value in ids]


def replay(prompts: Sequence[Prompt], policy: str, capacity: int) -> ReplayResult:
    """One prompt after another: find its longest cached prefix, take blocks for the rest, give all back.

    A prompt longer than the cache leaves what fits of its beginning.
    """
    if policy == CLAIRVOYANT:
        return _replay(prompts, CLAIRVOYANT, Clairvoyant([prompt[:capacity] for prompt in prompts]), capacity)
    return _replay(prompts, policy, EVICTION_POLICIES[policy](capacity), capacity)


def _replay(prompts: Sequence[Prompt], name: str, policy: EvictionPolicy, capacity: int) -> ReplayResult:
    pool = BlockPool(capacity, policy)
    blocks = hits = 0
    for prompt in prompts:
        held: list[int] = []
        for key in prompt:
            block = pool.lookup(key)
            if block == NO_BLOCK:
                break
            pool.acquire(block)
            held.append(block)
        blocks += len(prompt)
        hits += len(held)
        for key in prompt[len(held) : capacity]:
            block = pool.allocate()
            pool.register(block, key, held[-1] if held else NO_BLOCK)
            held.append(block)
        pool.release(reversed(held))
    return ReplayResult(name, capacity, blocks, hits)


class Clairvoyant(EvictionPolicy):
    """Knows the future: evicts the block whose next use is farthest away. An upper bound, not for engines.

    Belady's rule for prefix caches. Whoever uses a block uses all its ancestors, so a parent is never wanted
    later than its child; taking the deepest of those wanted at the same time keeps every cached chain whole.
    So the bound without the rule of whole prefixes is reached with it.
    """

    def __init__(self, prompts: Sequence[Prompt] = ()) -> None:
        self._future: dict[bytes, list[int]] = {}
        for number in range(len(prompts) - 1, -1, -1):
            for key in prompts[number]:
                self._future.setdefault(key, []).append(number)
        self._next: dict[int, list[int]] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._added: dict[int, int] = {}
        self._clock = 0

    def register(self, block: int, key: bytes, parent: int) -> None:
        self._next[block] = self._future[key]

    def add(self, block: int) -> None:
        uses = self._next[block]
        uses.pop()
        self._clock += 1
        self._added[block] = self._clock
        heappush(self._heap, (-uses[-1] if uses else -_NEVER, self._clock, block))

    def remove(self, block: int) -> None:
        del self._added[block]

    def pop(self) -> int:
        while True:
            _, added, block = heappop(self._heap)
            if self._added.get(block) == added:
                del self._added[block]
                return block

    def __len__(self) -> int:
        return len(self._added)
