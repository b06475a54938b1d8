"""Sizes of the GEMM in CUDA C (`WideShape`) that are worth timing for deterministic mode, by rows and slices."""

from __future__ import annotations

from typing import Any

Sizes = tuple[int, ...]
"""Row blocks, features, stages, tiles of rows and of features in a cluster, parts; with slices also whether warp groups
take them one after the other and whether sums of nodes wait in shared memory."""
_ONE_TILE, _TWO_TILES = 128, 256
_HEAD = 128
"""Columns of the longest slice that warp groups take in turn."""
_WHOLE: dict[int, tuple[Sizes, ...]] = {
    _ONE_TILE: ((1, 48, 10, 1, 2, 1), (1, 64, 9, 1, 2, 1), (1, 96, 8, 1, 2, 1), (1, 192, 5, 1, 2, 1)),
    _TWO_TILES: ((1, 96, 8, 2, 1, 1), (1, 128, 7, 2, 1, 1), (2, 192, 4, 1, 2, 1), (2, 192, 4, 1, 1, 1)),
}
_MANY_WHOLE: tuple[Sizes, ...] = ((1, 256, 4, 2, 1, 1), (2, 192, 4, 1, 2, 1), (2, 128, 4, 1, 2, 1),
                                  (1, 256, 4, 1, 2, 1))
_HEADS: dict[int, tuple[Sizes, ...]] = {
    _ONE_TILE: ((1, 64, 9, 1, 1, 2, 1, 0), (1, 32, 11, 1, 2, 1, 1, 0)),
    _TWO_TILES: ((1, 128, 7, 1, 1, 2, 1, 0), (1, 128, 5, 1, 1, 2, 1, 1), (1, 64, 9, 2, 1, 1, 1, 0)),
}
_MANY_HEADS: tuple[Sizes, ...] = ((1, 128, 5, 2, 1, 1, 1, 1), (1, 128, 7, 2, 1, 1, 1, 0), (1, 128, 5, 1, 2, 1, 1, 1))
_RANGES: dict[int, tuple[Sizes, ...]] = {
    _ONE_TILE: ((1, 64, 9, 1, 1, 2, 0, 0), (1, 32, 11, 1, 2, 1, 0, 0)),
    _TWO_TILES: ((1, 128, 7, 1, 1, 2, 0, 0), (1, 144, 6, 2, 1, 2, 0, 0), (1, 64, 9, 2, 1, 1, 0, 0)),
}
_MANY_RANGES: tuple[Sizes, ...] = ((1, 128, 7, 2, 1, 1, 0, 0), (1, 128, 7, 2, 1, 1, 1, 0), (1, 192, 5, 2, 1, 1, 0, 0),
                                   (1, 192, 5, 2, 1, 1, 1, 0), (1, 256, 4, 2, 1, 1, 0, 0), (1, 256, 4, 2, 1, 1, 1, 0))
_GATES: dict[int, tuple[Sizes, ...]] = {
    _ONE_TILE: ((1, 192, 5, 1, 2, 1), (1, 192, 5, 1, 1, 1)),
    _TWO_TILES: ((2, 192, 4, 1, 2, 1), (2, 192, 4, 1, 1, 1), (1, 256, 4, 2, 1, 1)),
}
_MANY_GATES: tuple[Sizes, ...] = ((1, 256, 4, 2, 1, 1), (2, 192, 4, 1, 2, 1), (2, 128, 4, 1, 2, 1))


def wide_shapes(rows: int, slices: Any) -> tuple[Sizes, ...]:
    """Of a GEMM in these slices, or None."""
    if slices is None:
        return _WHOLE[_tiles(rows)] if rows <= _TWO_TILES else _MANY_WHOLE
    if slices.longest <= _HEAD:
        return _HEADS[_tiles(rows)] if rows <= _TWO_TILES else _MANY_HEADS
    return _RANGES[_tiles(rows)] if rows <= _TWO_TILES else _MANY_RANGES


def gated_shapes(rows: int) -> tuple[Sizes, ...]:
    """Of a GEMM with its gate."""
    return _GATES[_tiles(rows)] if rows <= _TWO_TILES else _MANY_GATES


def _tiles(rows: int) -> int:
    return _ONE_TILE if rows <= _ONE_TILE else _TWO_TILES
