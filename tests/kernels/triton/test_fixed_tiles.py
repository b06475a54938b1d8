"""Which tile a GEMM of deterministic mode gets, and that no tile changes its bits; in the interpreter.

tests/gpu/test_bits.py compares tiles on a chip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.bench.gpu import tune_fixed
from quire.kernels.slices import Slices
from quire.kernels.triton import linear_fixed
from quire.kernels.triton.linear_fixed import TILES, FixedShape
from tests.kernels.triton.cases import is_whole_runs, rand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's dots are replaced")
SHAPES = [FixedShape(*sizes) for sizes in tune_fixed._SHAPES]


@pytest.fixture(autouse=True)
def dots_that_round_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dot adds a block's products exactly and rounds once, so that bits show where blocks begin and end, and nothing
    of the library that multiplies here."""
    torch.manual_seed(4)
    import triton.language as tl
    from triton.runtime import interpreter

    def exact(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        total = (exact(a) @ exact(b)).astype(np.float32) + d.data
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def other_bits(
    dtype: torch.dtype, rows: int, features: int, slices: Slices | None, width: int, more: bool,
    shapes: list[tuple[FixedShape, int]], smallest: FixedShape,
) -> list[tuple[FixedShape, int]]:  # fmt: skip
    """Those of the tiles (with a number of parts) that give other bits than the smallest."""
    x, weight = (rand(n, width, dtype=dtype, device="cpu") for n in (rows, features))
    bias = rand(features, dtype=dtype, device="cpu") if more else None
    residual = rand(rows, features, dtype=dtype, device="cpu") if more else None
    given = x, weight, bias, residual, slices
    want = linear_fixed.linear_fixed(*given, sizes=smallest, parts=1)
    return [(sizes, parts) for sizes, parts in shapes
            if not torch.equal(linear_fixed.linear_fixed(*given, sizes=sizes, parts=parts), want)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "features", "width", "more"), [(130, 259, 200, True), (65, 50, 72, False), (3, 300, 128, True)]
)
def test_a_tile_changes_no_bit(dtype: torch.dtype, rows: int, features: int, width: int, more: bool) -> None:
    """Sizes that cut rows, features and columns unevenly."""
    tiles = [(sizes, 1) for sizes in SHAPES]
    assert other_bits(dtype, rows, features, None, width, more, tiles, FixedShape(32, 32)) == []


@pytest.mark.parametrize(
    ("slices", "columns"),
    [(Slices.each(8, 40), 64), (Slices.each(6, 128), 128), (Slices.of_width(1100), 64)],
    ids=["heads of 40", "six heads of 128", "uneven ranges"],
)
def test_a_tile_changes_no_bit_of_a_sum_in_slices(slices: Slices, columns: int) -> None:
    tiles = [
        (replace(sizes, columns=columns), parts)
        for sizes in SHAPES[2:]
        for parts in (1, 3, 4)
        if parts == 1 or is_whole_runs(slices.total, parts)
    ]
    assert len(tiles) == 2 * len(SHAPES[2:])
    smallest = FixedShape(32, 32, columns)
    assert other_bits(torch.bfloat16, 66, 130, slices, slices.width, True, tiles, smallest) == []
    chosen = [linear_fixed._sliced_shape(FixedShape(), slices, 128, shared) for shared in (False, True)]
    assert {sizes.columns for sizes in chosen} == {columns}


def test_another_step_along_k_would_be_noticed() -> None:
    deeper = [(replace(sizes, columns=columns), 1) for sizes in SHAPES for columns in (32, 128)]
    assert other_bits(torch.bfloat16, 130, 259, None, 512, False, deeper, FixedShape()) == deeper


def test_all_tiles_of_a_gemm_have_one_step_along_k() -> None:
    assert {tile.columns for tile, _ in TILES} == {FixedShape().columns}
    assert all((sizes.columns, parts) == (64, 1) for *given, parts in tune_fixed.tiles_for(64, None)
               for sizes in [FixedShape(*given)])  # fmt: skip
    for slices in (Slices.each(32, 128), Slices.of_width(12_288)):
        used = linear_fixed._sliced_shape(FixedShape(), slices, 128, False)
        tried = tune_fixed.tiles_for(64, slices)
        assert (used.rows, used.features, used.columns, used.warps, used.stages, 1) == tried[0]
        assert {columns for _, _, columns, *_ in tried} == {used.columns} and len(tried) == 4


SMALL, SQUARE, LARGE = FixedShape(), FixedShape(128, 128, 64, 8, 4), FixedShape(128, 256, 64, 8, 3)
MEASURED = [
    (1, 6144, SMALL), (64, 6144, SMALL), (256, 6144, SQUARE), (1024, 6144, SQUARE), (64, 24_576, SMALL),
    (256, 24_576, SQUARE), (1024, 24_576, LARGE), (64, 151_936, SMALL), (256, 151_936, LARGE),
]  # fmt: skip
"""Rows and features of GEMMs of 8B, and the tile that an H200 was fastest with (128 x 128 drew at 256 x 6,144)."""


@pytest.mark.parametrize(("rows", "features", "tile"), MEASURED)
def test_the_tile_is_the_one_that_was_fastest(
    monkeypatch: pytest.MonkeyPatch, rows: int, features: int, tile: FixedShape
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(linear_fixed, "capability", lambda device: (9, 0))
    assert linear_fixed.tile_for(rows, features, device) == tile
    for other in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(linear_fixed, "capability", lambda device, other=other: other)
        assert linear_fixed.tile_for(rows, features, device) == SMALL


def test_a_residual_is_added_to_tiles_that_leave_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_fixed, "capability", lambda device: (9, 0))
    assert linear_fixed.tile_for(1024, 24_576, torch.device("cuda"), residual=True) == SQUARE


def test_a_chip_without_a_name_gets_the_small_tile() -> None:
    assert linear_fixed.tile_for(8192, 24_576, torch.device("cpu")) == SMALL


class Launches:
    """Stands in for a kernel: runs it and notes the tile of every launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.tiles = kernel, []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.tiles.append((*args[17:20], options["num_warps"], options["num_stages"]))
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize(
    ("dtype", "rows", "slices", "tile"),
    [(torch.bfloat16, 64, None, (64, 64, 64, 4, 4)), (torch.bfloat16, 65, None, (128, 128, 64, 8, 4)),
     (torch.bfloat16, 300, None, (128, 256, 64, 8, 3)), (torch.float32, 300, None, (32, 32, 32, 4, 3)),
     (torch.bfloat16, 300, Slices.each(2, 48), (64, 64, 64, 4, 3))],
)  # fmt: skip
def test_a_gemm_runs_by_the_tile_of_its_rows_and_gives_the_bits_of_the_small_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, slices: Slices | None, tile: tuple[int, ...]
) -> None:
    """With a table for small GEMMs in place of the measured one."""
    launches = Launches(linear_fixed._fixed_kernel)
    monkeypatch.setattr(linear_fixed, "_fixed_kernel", launches)
    monkeypatch.setattr(linear_fixed, "capability", lambda device: (9, 0))
    monkeypatch.setattr(linear_fixed, "TILES", ((TILES[0][0], 6), (TILES[1][0], 3)))
    x, weight = (rand(n, 96, dtype=dtype, device="cpu") for n in (rows, 270))
    found = linear_fixed.linear_fixed(x, weight, slices=slices)
    assert launches.tiles == [tile]
    small = FixedShape(columns=tile[2])
    assert torch.equal(found, linear_fixed.linear_fixed(x, weight, slices=slices, sizes=small, parts=1))
