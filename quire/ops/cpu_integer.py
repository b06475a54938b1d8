"""Integer weights on a CPU: floats rounded to codes, and codes packed as the compiled integer GEMMs read them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.quantized import BLOCK, UNIT, QuantizedWeight, Rounding, StoredWeight, WeightUse, joined
from quire.kernels.slices import Slices
from quire.kernels.unread import PANEL, UnreadWeight, half_holds
from quire.ops.cpu_panels import PanelMemory, float_rows, rows_at_once

KERNELS = ("plain", "avx2", "avx-vnni", "avx512-vnni", "dotprod", "i8mm", "amx")  # by their index in integer.c
_HEADER = 8  # int64 numbers before the parts: int_weight of integer.h
_PART = 8  # of a part: int_part
_ROWS, _SCALE_BYTES, _PLACE = 0, 4, 7  # of these
_LINE = 64
_ROWS_AT_ONCE = 4096
_LARGE = 16 << 20
"""Numbers of a weight from which on they are rounded a few rows at a time, when it is packed."""
_EXACT_SUMS = 128
"""Columns of a group, rounded to codes of less than eight bits with an offset, up to which half precision holds scale
and offset: sums over its codes are exact. In a larger one a line may not be fitted (`fitted` of integer_pack.c)."""
_NARROW = 1024
"""Models with fewer features lose more in four bits than others, above all in what is added to hidden states: they get
five bits, and eight for that."""


Codes: TypeAlias = QuantizedWeight | UnreadWeight


def fits(width: int, slices: Slices | None) -> bool:
    """Whether a weight of so many columns can be multiplied in units of 32, none of which a slice's border cuts."""
    return width % UNIT == 0 and (slices is None or slices.divisible_by(UNIT))


def group_of(width: int, slices: Slices | None, rounding: Rounding) -> int:
    """Columns that share a scale: as asked for, but never more than a slice of the sum, so that every number of
    ranks rounds the same groups."""
    return math.gcd(rounding.group, width if slices is None else slices.common)


def bits_of(shape: tuple[int, int], adds: bool, asked: int, use: WeightUse) -> int:
    """Bits that a weight is rounded to. It reads hidden states or `adds` to them (its sums have slices then, which
    ranks may share). Their width is what no rank has a part of: every number of ranks decides alike."""
    if use in (WeightUse.VOCABULARY, WeightUse.SHARED):
        return 8
    if asked != 4 or use is WeightUse.EXPERT or shape[0 if adds else 1] >= _NARROW:
        return asked
    return 8 if adds else 5


def round_to_codes(
    library: ctypes.CDLL, weight: StoredWeight, slices: Slices | None, rounding: Rounding, use: WeightUse
) -> Codes | None:
    """A weight that is not of integers as codes, which of a large one are made when it is packed; None where it stays
    as it is."""
    if use is WeightUse.EXACT or rounding.bits is None or not fits(weight.shape[1], slices):
        return None
    n, k = weight.shape
    bits = rounding.bits if rounding.alike else bits_of((n, k), slices is not None, rounding.bits, use)
    group = group_of(k, slices, rounding)
    zero = 0 if rounding.zero_points else 1 << (bits - 1)

    def rounded(start: int, stop: int) -> QuantizedWeight:
        codes = torch.empty(stop - start, k, dtype=torch.uint8)
        scales = torch.empty(stop - start, k // group)
        offsets = torch.empty(stop - start, k // group) if rounding.zero_points else None
        step = rows_at_once(k)
        for row in range(start, stop, step):
            floats = float_rows((weight,), row, min(row + step, stop))
            places = [None if each is None else each[row - start :].data_ptr() for each in (codes, scales, offsets)]
            library.quire_int_round(floats.data_ptr(), len(floats), k, bits, group, *places)
        return QuantizedWeight(codes, scales, offsets, zero, bits, group)

    if n * k < _LARGE or (bits < 8 and rounding.zero_points and group > _EXACT_SUMS):
        return rounded(0, n)
    return UnreadWeight(0, (n, k), bits, zero, group, rounding.zero_points, 2, rounded)


def pack(library: ctypes.CDLL, parts: Sequence[Codes], memory: PanelMemory) -> Tensor:
    """The parts, one below the other, in the one array that `quire_linear` reads as format `integer`."""
    runs = _runs(parts)
    width = parts[0].shape[1]
    if any(part.shape[1] != width for part in parts) or not fits(width, None):
        raise EngineError(f"integer weights have one width, a multiple of {UNIT}, not {[part.shape for part in parts]}")
    table = torch.zeros(_HEADER + _PART * len(runs), dtype=torch.int64)
    table[0] = len(runs)
    start, at = 0, -(-table.nbytes // _LINE) * _LINE
    rows = table[_HEADER:].view(len(runs), _PART)
    for row, run in zip(rows, runs, strict=True):
        n, one = sum(part.shape[0] for part in run), run[0]
        numbers = [n, start, one.bits, one.group, _scale_bytes(run), _has_offsets(one), one.zero, at]
        row.copy_(torch.tensor(numbers))
        start += n
        at += library.quire_int_bytes(row.data_ptr(), width)
    packed = memory.room(at)
    packed[: table.nbytes] = table.view(torch.uint8)
    for row, run in zip(rows, runs, strict=True):
        _pack_run(library, packed, row, width, run)
    return packed


def _pack_run(library: ctypes.CDLL, packed: Tensor, row: Tensor, width: int, run: Sequence[Codes]) -> None:
    """Weights of one format into the panels that `row` of the table describes."""
    own = row.clone()
    for weight in (piece for part in run for piece in _pieces(part)):
        own[_ROWS] = weight.shape[0]
        numbers = _multiples(weight) if row[_SCALE_BYTES] == 1 else (weight.scales, weight.offsets)
        held = [None if each is None else each.contiguous() for each in (weight.codes, *numbers)]
        library.quire_int_pack(
            packed.data_ptr(), own.data_ptr(), width, *(None if each is None else each.data_ptr() for each in held))
        own[_PLACE] += library.quire_int_bytes(own.data_ptr(), width)


def _pieces(part: Codes) -> Iterator[QuantizedWeight]:
    """Whole panels each, but for the last."""
    return part.pieces() if isinstance(part, UnreadWeight) else iter((part,))


def _scale_bytes(run: Sequence[Codes]) -> int:
    """As few as hold every scale and offset as it is: 1 for multiples of a number of each block, 2 for half
    precision."""
    needed = {part.scale_bytes if isinstance(part, UnreadWeight) else _needed(part) for part in run}
    return needed.pop() if len(needed) == 1 else 4


def _needed(weight: QuantizedWeight) -> int:
    """Of a weight that has been read, a few rows at a time: of a vocabulary, copies would be large."""
    pieces = [weight.rows(slice(at, at + _ROWS_AT_ONCE)) for at in range(0, weight.shape[0], _ROWS_AT_ONCE)]
    if weight.steps is not None and all(_are_multiples(piece) for piece in pieces):
        return 1
    return 2 if all(half_holds(piece.scales, piece.offsets) for piece in pieces) else 4


def _are_multiples(weight: QuantizedWeight) -> bool:
    """Whether bytes hold the scales and offsets: what a file says of them is not taken on trust."""
    blocks = weight.shape[1] // BLOCK
    for each, values in zip(_multiples(weight), (weight.scales, weight.offsets), strict=True):
        if each is None or values is None:
            continue
        numbers, times = each[:, :blocks], each[:, blocks:].unflatten(1, (blocks, -1))
        held = torch.equal(numbers.half().float(), numbers) and torch.equal(times.char().float(), times)
        if not held or not torch.equal(times * numbers.unsqueeze(2), values.unflatten(1, (blocks, -1))):
            return False
    return True


def _multiples(weight: QuantizedWeight) -> tuple[Tensor | None, Tensor | None]:
    """Scales, and offsets, as quire_int_pack takes them in bytes: [N, blocks + groups], the number of each block, then
    how many times it each is."""
    numbers = () if weight.steps is None else weight.steps.unbind(2)
    found: list[Tensor | None] = []
    for values, number in zip_longest((weight.scales, weight.offsets), numbers):
        if values is None or number is None:
            found.append(None)
            continue
        times = values.unflatten(1, (number.shape[1], -1)) / number.unsqueeze(2)
        found.append(torch.cat([number, times.nan_to_num(0.0).flatten(1)], 1))  # 0 / 0: all of the block is zero
    return found[0], found[1]


def _runs(parts: Sequence[Codes]) -> list[list[Codes]]:
    """Neighbours of one format together: one GEMM instead of several. All but the last of a run fill whole panels."""
    found: list[list[Codes]] = []
    for part in parts:
        last = found[-1][-1] if found else None
        if last is None or _format(last) != _format(part):
            found.append([part])
        elif last.shape[0] % PANEL:
            found[-1][-1] = joined([_read(last), _read(part)], 0)
        else:
            found[-1].append(part)
    return found


def _read(part: Codes) -> QuantizedWeight:
    return part.whole() if isinstance(part, UnreadWeight) else part


def _has_offsets(part: Codes) -> bool:
    return part.offsets if isinstance(part, UnreadWeight) else part.offsets is not None


def _format(part: Codes) -> tuple[object, ...]:
    return part.bits, part.group, part.zero, _has_offsets(part), part.shape[1]
