"""Which experts of each layer worked since somebody looked last, as a digit for each."""

from __future__ import annotations

from collections.abc import Callable

from quire.kernels.routing import LayerLoad


class ExpertView:
    """Asks for the counts of all layers and tells how they grew."""

    def __init__(self, load: Callable[[], list[LayerLoad]]) -> None:
        self._load = load
        self._told: dict[int, tuple[int, ...]] = {}

    def start_over(self) -> None:
        """Somebody new watches: he is told of all work so far."""
        self._told = {}

    @property
    def layers(self) -> list[int]:
        """Those that have experts, in the order of `changes`."""
        return [load.layer for load in self._load()]

    def changes(self) -> list[str]:
        """For each layer a digit for each expert: 0 for one that had no row since the last call, 9 for the layer's
        busiest. Nothing where nothing happened."""
        loads = self._load()
        grown = [[now - before for now, before in zip(load.rows, self._told.get(load.layer, (0,) * len(load.rows)),
                                                      strict=True)] for load in loads]  # fmt: skip
        self._told = {load.layer: load.rows for load in loads}
        if not any(map(any, grown)):
            return []
        return ["".join(map(str, _digits(rows))) for rows in grown]


def _digits(rows: list[int]) -> list[int]:
    most = max(1, *rows)
    return [-(-9 * count // most) for count in rows]
