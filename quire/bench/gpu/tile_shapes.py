"""Which sizes the tuner tries for 4-bit codes in tiles (`quire.kernels.triton.codes_tiles`) on a weight.

Few: those that a simple count of cycles puts first. A turn takes what the tensor cores, the instructions that make
floats of codes or the bytes from the L2 cache take, whichever is longest; parts of tiles are written and read once
more. The number of parts needs no other kernel, so several are tried of each tile.
"""

from __future__ import annotations

from typing import Any

TILES = ((3, 64, 128, 4), (2, 128, 128, 3), (3, 64, 64, 6), (2, 128, 64, 5), (3, 64, 32, 8))
"""Warp groups, features of each, rows, stages of the ring."""
_MOST_PARTS = 8
_TRIED, _EACH = 7, 2
"""In all, and of one tile."""
_COLUMNS = 128
"""Of a turn."""
_MULTIPLIED = 2048
"""Products of a multiprocessor in a cycle."""
_MADE = 200
"""Instructions of a warp for 64 features of a turn, and cycles, since a scheduler has one warp of each warp group."""
_L2_BYTES, _PART_BYTES = 30, 45
"""Of a multiprocessor in a cycle: from the cache while all multiply, and of parts, which are few at a time."""
_START = 4000
"""Cycles of a kernel before its first and after its last turn."""


def tile_shapes(rows: int, weight: Any, scratch: Any) -> list[Any]:
    """`weight`: packed codes; the sizes that should be fastest first."""
    from quire.kernels.triton.codes_tiles import CodesTilesShape, fits, programs_of

    found = []
    for tile in TILES:
        several: dict[int, tuple[float, Any]] = {}
        for parts in (*range(1, _MOST_PARTS + 1), 0):
            shape = CodesTilesShape(*tile, parts)
            if fits(rows, weight, shape, scratch):
                several.setdefault(programs_of(rows, weight, shape), (cycles(rows, weight, shape), shape))
        found += sorted(several.values(), key=lambda pair: pair[0])[:_EACH]
    return [shape for _, shape in sorted(found, key=lambda pair: pair[0])[:_TRIED]]


def cycles(rows: int, weight: Any, shape: Any) -> float:
    """Of a multiprocessor, about."""
    from quire.kernels.triton.codes_tiles import programs_of

    tiles, programs = shape.tiles(weight.features) * shape.row_tiles(rows), programs_of(rows, weight, shape)
    features = shape.groups * shape.features
    stage = features * (_COLUMNS // 2 + 4) + shape.rows * _COLUMNS * 2
    turn = max(features * shape.rows * _COLUMNS / _MULTIPLIED, features / 64 * _MADE, stage / _L2_BYTES)
    turns = -(-tiles * (weight.width // _COLUMNS) // programs)
    cut = 0 if tiles % programs == 0 else features * shape.rows * 4 / _PART_BYTES * (1 + programs / tiles)
    return turns * turn + cut + _START
