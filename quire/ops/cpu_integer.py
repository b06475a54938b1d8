"""Integer weights on a CPU: floats rounded to codes, and codes packed as the compiled integer GEMMs read them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.quantized import UNIT, QuantizedWeight, Rounding, UnreadWeight, WeightUse, joined
from quire.kernels.slices import Slices

KERNELS = ("plain", "avx2", "avx-vnni", "avx512-vnni", "dotprod", "i8mm", "amx")  # by their index in integer.c
_HEADER = 8  # int64 numbers before the parts: int_weight of integer.h
_PART = 8  # of a part: int_part
_ROWS, _PLACE = 0, 7  # of these
PANEL = 16
"""Output columns of a panel."""
_LINE = 64
_ROWS_AT_ONCE = 4096
_NARROW = 1024
"""Models with fewer features lose more in four bits than others, above all in what is added to hidden states: they get
five bits, and eight for that."""


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
    library: ctypes.CDLL, weight: Tensor, slices: Slices | None, rounding: Rounding, use: WeightUse
) -> QuantizedWeight | None:
    """A weight of floats as codes; None where it stays as it is."""
    if use is WeightUse.EXACT or rounding.bits is None or not fits(weight.shape[1], slices):
        return None
    n, k = weight.shape
    bits = rounding.bits if rounding.alike else bits_of((n, k), slices is not None, rounding.bits, use)
    group = group_of(k, slices, rounding)
    floats = weight.detach().to(torch.float32).contiguous()
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = torch.empty(n, k // group)
    offsets = torch.empty(n, k // group) if rounding.zero_points else None
    library.quire_int_round(
        floats.data_ptr(), n, k, bits, group, codes.data_ptr(), scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
    )  # fmt: skip
    return QuantizedWeight(codes, scales, offsets, 0 if rounding.zero_points else 1 << (bits - 1), bits, group)


Codes: TypeAlias = QuantizedWeight | UnreadWeight


def pack(library: ctypes.CDLL, parts: Sequence[Codes]) -> Tensor:
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
    packed = torch.empty(at + _LINE, dtype=torch.uint8)
    packed = packed[-packed.data_ptr() % _LINE :][:at]
    library.quire_advise_huge_pages(packed.data_ptr(), at)
    packed[: table.nbytes] = table.view(torch.uint8)
    for row, run in zip(rows, runs, strict=True):
        _pack_run(library, packed, row, width, run)
    return packed


def _pack_run(library: ctypes.CDLL, packed: Tensor, row: Tensor, width: int, run: Sequence[Codes]) -> None:
    """Weights of one format into the panels that `row` of the table describes."""
    own = row.clone()
    for weight in (piece for part in run for piece in _pieces(part)):
        own[_ROWS] = weight.shape[0]
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        library.quire_int_pack(
            packed.data_ptr(), own.data_ptr(), width, codes.data_ptr(), scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
        )  # fmt: skip
        own[_PLACE] += library.quire_int_bytes(own.data_ptr(), width)


def _pieces(part: Codes) -> Iterator[QuantizedWeight]:
    """Whole panels each, but for the last."""
    return part.pieces(_ROWS_AT_ONCE) if isinstance(part, UnreadWeight) else iter((part,))


def _scale_bytes(run: Sequence[Codes]) -> int:
    """2 where half precision holds every scale and offset as it is."""
    if any(isinstance(part, UnreadWeight) and not part.half for part in run):
        return 4
    read = [part for part in run if isinstance(part, QuantizedWeight)]
    held = (each for weight in read for each in (weight.scales, weight.offsets) if each is not None)
    pieces = (piece for each in held for piece in each.split(_ROWS_AT_ONCE))  # of a vocabulary, copies would be large
    return 2 if all(torch.equal(piece.half().float(), piece) for piece in pieces) else 4


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
