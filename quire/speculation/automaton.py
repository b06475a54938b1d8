"""A suffix automaton that grows by a token at a time: where did the last tokens stand before, and what followed?

Every state stands for the strings that end at the same places. The state of the longest suffix that occurred
earlier is the suffix link of the newest state, so the longest match costs nothing to find, and adding a token
costs O(1) amortised however long the text is.

Most states have one transition, so it stands in two arrays; only states with more have a dict. A text of 100,000
tokens takes about a sixth of the memory that a dict for every state would.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice

_NONE = -(2**31)
"""No token."""
_COPIED_PER_TOKEN = 64
"""Transitions whose copying costs about as much as adding a token."""
_LOOKED_AT = 16
"""Transitions of a state that are looked at for the latest ones."""


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
        """For every state, the place in the text after its latest occurrence that was recorded."""
        self._last = 0
        self._copied = 0
        """Transitions that were copied, over its life."""

    @property
    def num_states(self) -> int:
        return len(self._length)

    def _target(self, state: int, token: int) -> int:
        """Where a token leads from a state; -1: nowhere."""
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
        """Add tokens from `start` on until that has cost as much as `most` ordinary tokens; how many it added, and what
        they cost. (Where a common token gets a state of its own, all that ever followed it is copied.)"""
        end, before = start, self._copied
        cost = 0
        while end < len(tokens) and cost < most:
            self.add(tokens[end])
            end += 1
            cost = end - start + (self._copied - before) // _COPIED_PER_TOKEN
        return end - start, cost

    def add(self, token: int) -> None:
        # The suffix that was matched until now has occurred again: the next match of it continues from here.
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
        """The shorter strings of `target` now end in more places than its longer ones: a state of their own."""
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

    # ---- its own end

    def own_match(self) -> tuple[int, int]:
        """Length of the longest suffix of the text that also occurs earlier, and the place after it there."""
        if not self._last:
            return 0, 0
        state = self._link[self._last]
        return self._length[state], self._latest[state]

    @property
    def own_state(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that also occurs earlier."""
        state = self._link[self._last] if self._last else 0
        return state, self._length[state]

    # ---- what follows a state

    def followers(self, state: int, length: int, least: int, most: int) -> list[tuple[int, int]]:
        """Up to `most` different tokens that followed a state's strings, the latest first, and after those what
        followed their suffixes of `least` tokens and more; each with the length of the string that it followed."""
        found: dict[int, int] = {}
        while state > 0 and length >= least:
            for token in self._recent(state):
                if token >= 0 and found.setdefault(token, length) == length and len(found) == most:
                    return list(found.items())
            state = self._link[state]
            length = self._length[state]
        return list(found.items())

    def _recent(self, state: int) -> list[int]:
        """Tokens that followed a state's strings, the latest first, as far as is known; of many only some."""
        if self._token[state] == _NONE:
            return []
        more = self._more.get(state)
        if more is None:
            return [self._token[state]]
        tokens = [self._token[state], *islice(reversed(more), _LOOKED_AT)]
        place = self._latest[state]
        latest = self.text[place] if place < len(self.text) else _NONE
        return sorted(tokens, key=lambda token: (token != latest, -self._latest[self._target(state, token)]))

    # ---- another text

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow another text by one token: the state of its longest suffix that occurs here, and its length."""
        if token < 0:
            return 0, 0
        found = self._target(state, token)
        while state and found < 0:
            state = self._link[state]
            length = self._length[state]
            found = self._target(state, token)
        return (0, 0) if found < 0 else (found, length + 1)

    def place(self, state: int) -> int:
        """The place in the text after the latest known occurrence of a state's strings."""
        return self._latest[state]

    # ---- what follows a place

    def continuation(self, place: int, count: int, repeat: bool) -> tuple[int, ...]:
        """Up to `count` tokens from `place` on, up to a separator.

        `repeat`: past the end of the text goes on what was copied, as in a text of period len(text) - place.
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
