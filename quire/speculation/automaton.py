"""A suffix automaton that grows by a token at a time: where did the last tokens stand before, and what followed?

Every state stands for the strings that end at the same places. The state of the longest suffix that occurred
earlier is the suffix link of the newest state, so the longest match costs nothing to find, and adding a token
costs O(1) amortised however long the text is.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """Over one growing text. Tokens below 0 may separate texts: nobody matches them."""

    __slots__ = ("_last", "_latest", "_length", "_link", "_next", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._latest = [0]
        """For every state, the place in the text after its latest occurrence that somebody took note of."""
        self._last = 0

    @property
    def num_states(self) -> int:
        return len(self._length)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        # The suffix that was matched until now has occurred again: whoever finds it next continues from here.
        if self._last:
            self._latest[self._link[self._last]] = len(self.text)
        self.text.append(token)
        self._last = self._append(token)

    def _append(self, token: int) -> int:
        follow, link, length = self._next, self._link, self._length
        new = self._new_state({}, length[self._last] + 1, len(self.text))
        state = self._last
        while state >= 0 and token not in follow[state]:
            follow[state][token] = new
            state = link[state]
        if state < 0:
            link[new] = 0
            return new
        target = follow[state][token]
        if length[target] != length[state] + 1:
            target = self._split(state, token, target)
        link[new] = target
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """The shorter strings of `target` now end in more places than its longer ones: a state of their own."""
        follow, link = self._next, self._link
        clone = self._new_state(dict(follow[target]), self._length[state] + 1, self._latest[target])
        link[clone], link[target] = link[target], clone
        while state >= 0 and follow[state].get(token) == target:
            follow[state][token] = clone
            state = link[state]
        return clone

    def _new_state(self, follow: dict[int, int], length: int, latest: int) -> int:
        self._next.append(follow)
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

    # ---- another text

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow another text by one token: the state of its longest suffix that occurs here, and its length."""
        if token < 0:
            return 0, 0
        follow = self._next
        while state and token not in follow[state]:
            state = self._link[state]
            length = self._length[state]
        found = follow[state].get(token)
        return (0, 0) if found is None else (found, length + 1)

    def place(self, state: int) -> int:
        """The place in the text after the latest known occurrence of a state's strings."""
        return self._latest[state]

    # ---- what follows a place

    def continuation(self, place: int, count: int, repeat: bool) -> tuple[int, ...]:
        """Up to `count` tokens from `place` on, up to a separator.

        `repeat`: past the end of the text goes on what was copied, as in a text of period len(text) - place.
        """
        text = self.text
        found = text[place : place + count]
        if repeat and found:
            for i in range(len(found), count):
                found.append(found[i - (len(text) - place)])
        for i, token in enumerate(found):
            if token < 0:
                return tuple(found[:i])
        return tuple(found)
