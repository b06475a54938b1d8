"""How likely a chain of a head has to stay, by its own account, to go on: less where its drafts come true."""

from __future__ import annotations

_COST = 0.4
"""Of asking for drafts, in tokens: what the head and a row that is refused take of a step, and some more."""
_MOST, _LEAST = 2.0, -1.0
"""Of a text's balance, so that it soon follows a change."""
_GOOD_START = 0.5
"""Balance of a new text where the last ones came out well: about one miss is free."""
_FOLLOW, _WELL = 0.05, 0.15
"""Weight of each new balance in their mean, and the mean from which on they came out well."""


class ChainFloors:
    """A head is mostly too modest: drafts that it hardly believes in come true often enough. On a text that it does not
    understand they do not, and a short answer never makes up for those that were tried. So a text begins with likely
    drafts alone, unless those before it came out well, and a text that came out well gets all that may pay."""

    def __init__(self, floor: float, careful: float) -> None:
        """`careful`: the floor for texts that did not come out well."""
        self._floor, self._careful = floor, max(floor, careful)
        self._balances: dict[int, float] = {}
        """By row: accepted tokens less what asking for them cost."""
        self._asked: dict[int, tuple[int, int]] = {}
        """By row, of drafts whose result is not known: the position of the text's last token, and how many."""
        self._mean = 0.0

    def restart(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
        self._balances.pop(row, None)
        self._asked.pop(row, None)

    def of(self, row: int) -> float:
        """The floor for the next chain of a row."""
        return self._floor if self._balance(row) > 0.0 else self._careful

    def offered(self, row: int, position: int, count: int) -> None:
        """So many drafts follow the token at `position`."""
        if self._careful > self._floor:
            self._asked[row] = (position, count)

    def kept(self, row: int, num_tokens: int) -> None:
        """So many tokens of the row are known to be right, its last drafts among them."""
        asked = self._asked.pop(row, None)
        if asked is None:
            return
        position, count = asked
        change = max(0, min(count, num_tokens - position - 1)) - _COST
        self._mean += _FOLLOW * (change - self._mean)
        self._balances[row] = min(max(self._balance(row) + change, _LEAST), _MOST)

    def _balance(self, row: int) -> float:
        known = self._balances.get(row)
        return known if known is not None else _GOOD_START if self._mean > _WELL else 0.0
