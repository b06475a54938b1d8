"""A GEMM whose every output element is summed in one fixed order, whatever the number of rows: deterministic mode.

One program sums all of k for its tile, in the same steps whatever the tile, so a row's bits depend on the row and the
weight alone. **Why a tile's size changes no bit**: an element's sum is one chain of MMA instructions, each of which
adds the products of 16 columns to the element's accumulator, in the order of k and from zero. Rows and features of a
tile say how many other elements an instruction computes besides (64 x 64, 64 x 128 or 64 x 256 on Hopper) and which
warps issue it. No two warps share an element's products, and nothing else touches an accumulator before its sum is
complete. What could change bits is the step along k, so all tiles of a GEMM have the same; tests hold them to it.

A weight with slices sums each slice from zero and adds the slices in the tree of `quire.kernels.slices`: at each
slice's end the sum goes into a binary counter of sums. A slice that is one block of columns (a head) makes the loop
over slices the pipelined one; else each slice is a pipelined loop.

Few rows make too few programs to fill a GPU, so there the slices are shared out: each program sums an aligned run of
them, which is a node of the tree, and a second kernel adds the nodes. The additions are the same, and so are the bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.slices import Node, Slices
from quire.kernels.triton.slice_tree import count_slice, total_of

MAX_SLICES = 255
"""The binary counter has eight places."""
_PROGRAMS = 256
"""Programs that fill a GPU of 132 multiprocessors: with fewer tiles than that, slices are shared out."""
_LONGEST_RUN = 8
"""Slices of a program that shares a tile: a counter of more places does not fit beside its larger tile."""
_TREE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class FixedShape:
    """A tile, and the step along k (`columns`). The default is the tile of few rows, and the only one of chips on which
    no other has been timed."""

    rows: int = 64
    features: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 4

    def tiles(self, rows: int, features: int) -> int:
        return triton.cdiv(rows, self.rows) * triton.cdiv(features, self.features)


TILES = ((FixedShape(128, 256, 64, 8, 3), 768), (FixedShape(128, 128, 64, 8, 4), 96))
"""Tiles for more than 64 rows on Hopper, for sums without slices; each with the number of tiles that a GEMM must have.

768 and 96 are the fewest with which they were not slower than the next smaller tile, on an H200 in bf16 with 4,096
columns (docs/gpu-speed.md): 128 x 256 lost to 128 x 128 with 192 tiles and won with 768; 128 x 128 lost to 64 x 64 with
48, drew with 96 and won with 384. With up to 64 rows 64 x 64 was the fastest, however many features.
"""
_MOST_ADDED = 128
"""Features of a tile of 128 rows to which a residual is added."""
_FLOAT32 = FixedShape(32, 32, 32, 4, 3)


@lru_cache(maxsize=8)
def capability(device: torch.device) -> tuple[int, int]:
    """The chip's compute capability, (0, 0) where there is none."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def tile_for(rows: int, features: int, device: torch.device, residual: bool = False) -> FixedShape:
    """Of a GEMM in 16 bits without slices. 128 x 128 and 128 x 256 need 128 and 144 KiB of shared memory, which not
    every chip has, and were timed and compared bit by bit on Hopper alone. Beside a residual the registers do not hold
    the sums of 128 x 256."""
    small = FixedShape()
    if rows > small.rows and capability(device)[0] == 9:
        for tile, least in TILES:
            if tile.tiles(rows, features) >= least and not (residual and tile.features > _MOST_ADDED):
                return tile
    return small


@triton.jit
def border(index, WIDTH: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """Where slice `index` of a sum over WIDTH columns begins: slices of even length, or made of whole units."""
    if WIDTH % (COUNT * UNIT) == 0:
        return index * (WIDTH // COUNT)
    else:
        return tl.minimum(((WIDTH + UNIT - 1) // UNIT * index) // COUNT * UNIT, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    num_rows,
    NUM_FEATURES: tl.constexpr,
    STRIDE: tl.constexpr,  # columns of x and of the weight
    WIDTH: tl.constexpr,  # columns of the whole sum, in COUNT slices made of whole UNITs
    COUNT: tl.constexpr,
    UNIT: tl.constexpr,
    LONGEST: tl.constexpr,  # columns of the longest slice
    OWNED: tl.constexpr,  # x and the weight begin with this slice
    FIRST: tl.constexpr,  # part p sums slices [FIRST + p * N, FIRST + (p + 1) * N)
    N: tl.constexpr,
    LAST_PLACE: tl.constexpr,
    PARTS: tl.constexpr,  # more than one: `out` takes the float32 sum of each, [PARTS, rows, features]
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BAND: tl.constexpr,
):
    # Bands of row tiles share the weight tiles in the L2 cache.
    tiles_m = tl.cdiv(num_rows, ROWS)
    tiles_n: tl.constexpr = (NUM_FEATURES + FEATURES - 1) // FEATURES
    pid = tl.program_id(0)
    band = pid // (BAND * tiles_n)
    band_rows = tl.minimum(tiles_m - band * BAND, BAND)
    inside_band = pid % (BAND * tiles_n)
    row = (band * BAND + inside_band % band_rows) * ROWS + tl.arange(0, ROWS)
    feature = (inside_band // band_rows) * FEATURES + tl.arange(0, FEATURES)
    used, real = row < num_rows, feature < NUM_FEATURES
    zero = tl.zeros([ROWS, FEATURES], tl.float32)
    c0, c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero, zero
    x_row = x + row.to(tl.int64)[:, None] * STRIDE
    w_row = weight + feature.to(tl.int64)[:, None] * STRIDE
    # Every slice has the same number of blocks; in a shorter one the last may lie outside and add nothing.
    blocks: tl.constexpr = (LONGEST + COLUMNS - 1) // COLUMNS
    before = border(OWNED, WIDTH, COUNT, UNIT)
    first = FIRST
    if PARTS > 1:
        first += tl.program_id(1) * N
        out += tl.program_id(1).to(tl.int64) * num_rows * NUM_FEATURES
    for turn in range(0, N):
        start = border(first + turn, WIDTH, COUNT, UNIT) - before
        end = border(first + turn + 1, WIDTH, COUNT, UNIT) - before
        acc = tl.zeros([ROWS, FEATURES], tl.float32)
        for block in range(0, blocks):
            place = start + block * COLUMNS + tl.arange(0, COLUMNS)
            inside = place < end
            values = tl.load(x_row + place[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_row + place[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(values, tl.trans(w), acc, input_precision=PRECISION)
        c0, c1, c2, c3, c4, c5, c6, c7 = count_slice(acc, turn, LAST_PLACE, c0, c1, c2, c3, c4, c5, c6, c7)
    acc = total_of(N, c0, c1, c2, c3, c4, c5, c6, c7)
    if BIAS:
        acc += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    target = row.to(tl.int64)[:, None] * NUM_FEATURES + feature[None, :]
    stores = used[:, None] & real[None, :]
    if RESIDUAL:
        acc += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=stores)


@triton.jit(do_not_specialize=["num_rows"])
def _tree_kernel(
    parts,
    bias,
    residual,
    out,
    num_rows,
    NUM_FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    LAST_PLACE: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of the sums of all parts, added in the tree, then bias and residual."""
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = feature < NUM_FEATURES
    target = tl.program_id(0).to(tl.int64) * NUM_FEATURES + feature
    zero = tl.zeros([BLOCK], tl.float32)
    c0, c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero, zero
    for part in tl.static_range(PARTS):
        value = tl.load(parts + part * num_rows.to(tl.int64) * NUM_FEATURES + target, mask=real, other=0.0)
        c0, c1, c2, c3, c4, c5, c6, c7 = count_slice(value, part, LAST_PLACE, c0, c1, c2, c3, c4, c5, c6, c7)
    total = total_of(PARTS, c0, c1, c2, c3, c4, c5, c6, c7)
    if BIAS:
        total += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=real)


def linear_fixed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    slices: Slices | None = None,
    *,
    sizes: FixedShape | None = None,
    parts: int | None = None,
) -> Tensor:
    """x W^T + bias + residual in a fixed order; its reference is `linear_few.linear_reference`.

    `sizes`: the tile, as it is (None: chosen by rows, features and slices). `parts`: programs that share the slices of
    one tile (None: as many as fill the GPU). Bits do not depend on either, as long as the step along k is the same.
    """
    if slices is None:
        slices = Slices.single(weight.shape[1])
    if not slices.whole:
        raise EngineError("this weight holds only some slices of the sum: use linear_fixed_nodes")
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, residual, slices, (0, slices.total), out, sizes, parts)
    return out


def linear_fixed_nodes(
    x: Tensor, weight: Tensor, slices: Slices, *, out: Tensor | None = None
) -> Tensor:
    """float32 [nodes, rows, features], in `out` if given: the sum of each of `slices.nodes()`, without bias and
    residual."""
    nodes = slices.nodes()
    if out is None:
        out = torch.empty(len(nodes), x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for node, part in zip(nodes, out, strict=True):
        _launch(x, weight, None, None, slices, node, part)
    return out


def _sliced_shape(sizes: FixedShape, slices: Slices, most: int, shared_out: bool) -> FixedShape:
    """A short slice in one block; a tile small enough that the binary counter fits into registers.

    H200, 4,096 rows, 32 heads of 128 (eight ranges of 12,288) to 4,096 features: 616 us (1,112) by these tiles, 2,825
    (1,268) by the 64 x 64 of a sum without slices, which takes 380 (1,269). The shape changed no bit there.

    `TILES` are not for these: the sums of 128 x 128 take 64 KiB, and a counter of eight slices holds four such, all the
    registers that a multiprocessor has. Larger tiles need shorter runs, whose sums go through memory;
    `quire.bench.gpu.tune_fixed` times some.
    """
    if slices.longest <= most:
        sizes = replace(sizes, columns=max(16, triton.next_power_of_2(slices.longest)), stages=3)
        return sizes if shared_out else replace(sizes, features=sizes.features // 2)
    return sizes if shared_out else replace(sizes, rows=2 * sizes.rows, warps=2 * sizes.warps)


def _chosen(
    rows: int, features: int, slices: Slices, count: int, num_parts: int | None, x: Tensor, residual: bool
) -> tuple[FixedShape, int]:
    """Tile of a sum of `count` slices, and programs that share them."""
    ieee = x.dtype == torch.float32
    base = _FLOAT32 if ieee else FixedShape()
    parts = num_parts or shared_parts(base.tiles(rows, features), count)
    if slices.total > 1:
        return _sliced_shape(base, slices, 64 if ieee else 128, parts > 1), parts
    return base if ieee else tile_for(rows, features, x.device, residual), parts


def shared_parts(tiles: int, count: int) -> int:
    """Into how many equal runs of slices, each a node of the tree, so few tiles are best shared out."""
    run = min(count & -count, _LONGEST_RUN)  # a power of two that divides the number of slices
    while run > 1 and tiles * (count // run) < _PROGRAMS:
        run //= 2
    return count // run if tiles < _PROGRAMS else 1


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    slices: Slices,
    node: Node,
    out: Tensor,
    sizes: FixedShape | None = None,
    num_parts: int | None = None,
) -> None:
    rows, features = out.shape
    if slices.total > MAX_SLICES:
        raise EngineError(f"a sum of {slices.total} slices: deterministic mode on a GPU adds up to {MAX_SLICES}")
    if rows == 0:
        return
    count = node[1] - node[0]
    if sizes is None:
        sizes, parts = _chosen(rows, features, slices, count, num_parts, x, residual is not None)
    else:
        parts = num_parts or shared_parts(sizes.tiles(rows, features), count)
    sums = out if parts == 1 else torch.empty(parts, rows, features, dtype=torch.float32, device=x.device)
    _fixed_kernel[(sizes.tiles(rows, features), parts)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        sums,
        rows,
        features,
        slices.width,
        slices.sum_width,
        slices.total,
        slices.unit,
        slices.longest,
        slices.first,
        node[0],
        count // parts,
        (count // parts).bit_length() - 1,
        parts,
        sizes.rows,
        sizes.features,
        sizes.columns,
        bias is not None and parts == 1,
        residual is not None and parts == 1,
        "ieee" if x.dtype == torch.float32 else "tf32",
        8,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    if parts > 1:
        add_parts(sums, bias, residual, out)


def add_parts(sums: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """out [rows, features] = the float32 sums of runs of slices [parts, rows, features], added in the tree, then bias
    and residual."""
    parts, rows, features = sums.shape
    _tree_kernel[(rows, triton.cdiv(features, _TREE_BLOCK))](
        sums,
        sums if bias is None else bias,
        sums if residual is None else residual,
        out,
        rows,
        features,
        parts,
        parts.bit_length() - 1,
        bias is not None,
        residual is not None,
        _TREE_BLOCK,
    )
