"""KV without tensors: what a slot holds, and the next token as a hash of everything that a query reads.

A slot holds a number made of its token and position, and the hash weighs each number by the position at which it is
read. So a wrong token, a wrong block, a wrong order or a slot that was never written changes the text; how the tokens
are cut into blocks does not. `PlainKV` is the same without any blocks: what the text must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.sampling.params import SamplingParams

_PRIME = (1 << 61) - 1
_BASE = 0x1F3D5B79A2C4E60
_NEVER_WRITTEN = 0x0BAD0BAD0BAD0BAD % _PRIME
_MASK = (1 << 64) - 1

_powers = [1]


def _power(exponent: int) -> int:
    while len(_powers) <= exponent:
        _powers.append(_powers[-1] * _BASE % _PRIME)
    return _powers[exponent]


def _mixed(value: int) -> int:
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def total(parts: Sequence[int]) -> int:
    """The sum of what several ranks hold."""
    return sum(parts) % _PRIME


def content_part(token: int, position: int, rank: int, num_ranks: int) -> int:
    """What the slot of a token holds on one of several ranks. Only all of them together have its content."""
    return part_of(content(token, position), rank, num_ranks)


def part_of(whole: int, rank: int, num_ranks: int) -> int:
    """What one of several ranks holds of a slot's content."""
    others = [_mixed(whole + (other + 1) * 0xBF58476D1CE4E5B9) % _PRIME for other in range(num_ranks - 1)]
    return others[rank] if rank < num_ranks - 1 else (whole - sum(others)) % _PRIME


def content(token: int, position: int) -> int:
    """What the slot of a token holds."""
    return _mixed(token * 0x9E3779B97F4A7C15 + position * 0xD6E8FEB86659FD93 + 1) % _PRIME


def visible_from(window: int | None, end: int) -> int:
    """First position that the query at `end - 1` sees."""
    return 0 if window is None else max(0, end - window)


def combined(sums: Sequence[int]) -> int:
    """One state of what a query read in every cache group; it stands for the logits."""
    state = 0
    for each in sums:
        state = _mixed(state * 0x9E3779B97F4A7C15 + each + 1)
    return state


def drawn_token(state: int, params: SamplingParams, seed: int, index: int, position: int, vocab_size: int) -> int:
    """The token for `position`: greedily from the state alone, else from the draw of this sequence too."""
    if not params.greedy:
        state = _mixed(state + seed * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB + position)
    return _mixed(state) % vocab_size


def ranked_candidates(state: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """What may follow a beam, likeliest first; how fast likelihood falls depends on the state too."""
    tokens: dict[int, None] = {}
    place = 0
    while len(tokens) < min(count, vocab_size):
        tokens[_mixed(state + place * 0x9E3779B97F4A7C15) % vocab_size] = None
        place += 1
    slope = 0.5 + state % 7 / 9
    return [(token, -0.1 - slope * rank) for rank, token in enumerate(tokens)]


def log_likelihood(state: int, token: int) -> float:
    """A log-probability that tells one state from another."""
    return -0.5 - _mixed(state + token) % 4096 / 1024


class PlainKV:
    """A sequence that has all its KV: states of its prefixes, without blocks."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._windows = list(windows)
        self._sums = [0]
        """Of all contents before each position."""

    def append(self, token: int) -> None:
        position = len(self._sums) - 1
        self._sums.append((self._sums[-1] + content(token, position) * _power(position)) % _PRIME)

    @property
    def state(self) -> int:
        """What the last token appended reads."""
        return self.state_at(len(self._sums) - 1)

    def state_at(self, end: int) -> int:
        return combined([(self._sums[end] - self._sums[visible_from(window, end)]) % _PRIME
                         for window in self._windows])


class BlockStore:
    """Blocks of one cache group on one tier, slot by slot."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._slots = [[_NEVER_WRITTEN] * block_size for _ in range(num_blocks)]
        self._sums: list[int | None] = [None] * num_blocks
        """Of a whole block, as if its first slot were position 0; None where it has changed."""

    def write(self, block: int, offset: int, value: int) -> None:
        self._slots[block][offset] = value
        self._sums[block] = None

    def at(self, block: int, offset: int, position: int) -> int:
        """A slot, weighed as if it were read at that position."""
        return self._slots[block][offset] * _power(position) % _PRIME

    def read(self, block: int) -> list[int]:
        return list(self._slots[block])

    def put(self, block: int, slots: list[int]) -> None:
        self._slots[block] = list(slots)
        self._sums[block] = None

    def sum(self, table: Sequence[int], first: int, end: int) -> int:
        """Of positions first … end-1 through a block table, each weighed by where it is read."""
        size, total = self._size, 0
        for index in range(first // size, -(-end // size)):
            low, high = max(first - index * size, 0), min(end - index * size, size)
            block = table[index]
            if high - low == size:
                total += self._whole(block) * _power(index * size)
            else:
                slots = self._slots[block]
                total += sum(slots[i] * _power(index * size + i) for i in range(low, high))
        return total % _PRIME

    def _whole(self, block: int) -> int:
        known = self._sums[block]
        if known is None:
            known = sum(value * _power(i) for i, value in enumerate(self._slots[block])) % _PRIME
            self._sums[block] = known
        return known
