"""An online suffix automaton: finds the longest earlier occurrence of the last tokens, and what followed it.

A state stands for all strings that end at the same places. The suffix link of the newest state is the longest suffix
that occurred before, so the longest match needs no search, and adding a token costs O(1) amortised.

Most states have one transition, kept in two arrays; only states with more have a dict. A text of 100,000 tokens takes
about a sixth of the memory that a dict for every state would.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

_NONE = -(2**31)
"""No token."""
_COPIED_PER_TOKEN = 64
"""Copying so many transitions costs about as much as adding a token."""
_LOOKED_AT = 16
"""Further transitions of a state that are searched for the latest ones."""


class SuffixAutomaton:
    """Over one growing text. Tokens below 0 may separate texts: they match nothing."""

    __slots__ = ("_copied", "_last", "_latest", "_length", "_link", "_more", "_state", "_token", "text")

    def __init__(self) -> None:
        self.text = array("i")
        self._token, self._state = array("i", [_NONE]), array("i", [0])
        """Of every state: the token of its first transition, and where that leads."""
        self._more: dict[int, dict[int, int]] = {}
        """Further transitions of the states that have several."""
        self._link = array("i", [-1])
        self._length = array("i", [0])
        self._latest = array("i", [0])
        """For every state, the place in the text right after its latest recorded occurrence."""
        self._last = 0
        self._copied = 0
        """Transitions copied so far."""

    @property
    def num_states(self) -> int:
        return len(self._length)

    def _target(self, state: int, token: int) -> int:
        """The state that a token leads to; -1: none."""
        if self._token[state] == token:
            return self._state[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _lead(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (token, _NONE):
            self._token[state], self._state[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def take(self, tokens: Sequence[int], start: int, most: int) -> tuple[int, int]:
        """Add tokens from `start` on until the cost reaches `most` ordinary tokens; returns (tokens added, cost). A
        split of a state copies its transitions, which is expensive for a common token."""
        end, before = start, self._copied
        cost = 0
        while end < len(tokens) and cost < most:
            self.add(tokens[end])
            end += 1
            cost = end - start + (self._copied - before) // _COPIED_PER_TOKEN
        return end - start, cost

    def add(self, token: int) -> None:
        # The suffix matched so far has just occurred again: its latest occurrence is here.
        if self._last:
            self._latest[self._link[self._last]] = len(self.text)
        self.text.append(token)
        self._last = self._append(token)

    def _append(self, token: int) -> int:
        link, length = self._link, self._length
        new = self._new_state(length[self._last] + 1, len(self.text))
        state, target = self._last, -1
        while state >= 0:
            target = self._target(state, token)
            if target >= 0:
                break
            self._lead(state, token, new)
            state = link[state]
        if state < 0:
            link[new] = 0
            return new
        if length[target] != length[state] + 1:
            target = self._split(state, token, target)
        link[new] = target
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """Move the shorter strings of `target`, which now end in more places than the longer ones, to a new state."""
        link = self._link
        clone = self._new_state(self._length[state] + 1, self._latest[target])
        self._token[clone], self._state[clone] = self._token[target], self._state[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
            self._copied += len(self._more[clone])
        link[clone], link[target] = link[target], clone
        while state >= 0 and self._target(state, token) == target:
            self._lead(state, token, clone)
            state = link[state]
        return clone

    def _new_state(self, length: int, latest: int) -> int:
        self._token.append(_NONE)
        self._state.append(0)
        self._link.append(-1)
        self._length.append(length)
        self._latest.append(latest)
        return len(self._length) - 1

    # ---- matches of the text's own end

    def own_match(self) -> tuple[int, int]:
        """(length of the longest suffix that also occurs earlier, the place right after that occurrence)."""
        if not self._last:
            return 0, 0
        state = self._link[self._last]
        return self._length[state], self._latest[state]

    @property
    def own_state(self) -> tuple[int, int]:
        """(state, length) of the longest suffix of the text that also occurs earlier."""
        state = self._link[self._last] if self._last else 0
        return state, self._length[state]

    # ---- what follows a state

    def followers(self, state: int, length: int, least: int, most: int) -> list[tuple[int, int]]:
        """Up to `most` different tokens that followed a state's strings, latest first, then those that followed their
        suffixes of at least `least` tokens; each with the length of the string that it followed."""
        found: dict[int, int] = {}
        while state > 0 and length >= least:
            for token in self._recent(state):
                if token >= 0 and found.setdefault(token, length) == length and len(found) == most:
                    return list(found.items())
            state = self._link[state]
            length = self._length[state]
        return list(found.items())

    def _recent(self, state: int) -> list[int]:
        """Tokens that followed a state's strings, latest known first; of many only some."""
        if self._token[state] == _NONE:
            return []
        more = self._more.get(state)
        if more is None:
            return [self._token[state]]
        tokens = [self._token[state], *islice(reversed(more), _LOOKED_AT)]
        place = self._latest[state]
        latest = self.text[place] if place < len(self.text) else _NONE
        return sorted(tokens, key=lambda token: (token != latest, -self._latest[self._target(state, token)]))

    # ---- matches of another text

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Advance a match of another text by a token: (state, length) of its longest suffix that occurs here."""
        if token < 0:
            return 0, 0
        found = self._target(state, token)
        while state and found < 0:
            state = self._link[state]
            length = self._length[state]
            found = self._target(state, token)
        return (0, 0) if found < 0 else (found, length + 1)

    def place(self, state: int) -> int:
        """The place right after the latest known occurrence of a state's strings."""
        return self._latest[state]

    # ---- what follows a place

    def continuation(self, place: int, count: int, repeat: bool) -> tuple[int, ...]:
        """Up to `count` tokens from `place` on, up to a separator.

        `repeat`: continue past the end of the text as if it were periodic, with period len(text) - place.
        """
        text = self.text
        found = text[place : place + count].tolist()
        if repeat and found:
            for i in range(len(found), count):
                found.append(found[i - (len(text) - place)])
        for i, token in enumerate(found):
            if token < 0:
                return tuple(found[:i])
        return tuple(found)
