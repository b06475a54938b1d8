"""Weights that several tensors of a safetensors checkpoint make, their members: codes, scales, zero points.

A rank reads its own part of each member. Members follow the rows and columns of their weight each in steps of its own:
a word holds several codes, a scale is of a group of columns, or of a block. What is asked for is widened to whole steps
of all members, and cut to what was asked once the weight is put together:

     columns asked for              [ 100 to 299 ]
     scales of 128 columns    |   0   |   1   |   2   |   3   |     three entries are read
     words of 8 codes         ||||||||||||||||||||||||||||||||      and 48 words of each row: columns 0 to 383
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.quantized import UNIT, FloatWeight, Fp8Weight, QuantizedWeight, StoredWeight, joined_fp8
from quire.kernels.quantized import joined as joined_weights
from quire.kernels.unread import UnreadRows, UnreadWeight
from quire.models.loader import safetensors
from quire.models.shard import Run
from quire.models.spec import Shape
from quire.models.stored_parts import NOTHING, Ranges, StoredParts, take

Member = Tensor | UnreadRows
Members = Mapping[str, Member]
"""The tensors of one weight, by the last part of their names."""
_ROWS_AT_ONCE = 256
Axes = tuple[tuple[int, int], ...]
"""Of each dimension of a member: which of the weight's it follows (0: rows, 1: columns), and how many of these are one
entry of it."""


@dataclass(frozen=True, slots=True)
class MemberCut:
    """Which part of a weight is read, and so which of its members. Members without axes are read whole."""

    shape: Shape
    """Of the whole weight."""
    wanted: Ranges
    axes: Mapping[str, Axes]
    group: int
    """Columns of the whole weight that share a scale."""
    step: int = 1
    """Columns that are read together, whatever the members' own steps."""

    @property
    def row_scale(self) -> bool:
        """Whether all columns of a row share one scale, in the whole weight."""
        return self.group >= self.shape[1]

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether the members have the shapes that follow from their axes."""
        return all(shapes[member] == tuple(-(-self.shape[follows] // unit) for follows, unit in axes)
                   for member, axes in self.axes.items())

    def of(self, axes: Axes) -> Ranges | None:
        """What is read of a member; None: all of it, where one entry is for all rows or columns too."""
        for place, (follows, unit) in enumerate(axes):
            if follows == self.wanted[0] and unit < self.shape[follows]:
                return place, tuple((low // unit, -(-high // unit)) for low, high in self.read)
        return None

    @property
    def read(self) -> list[Run]:
        """The runs of rows, or of columns, that are read: whole steps, none of them twice."""
        dim, runs = self.wanted
        units = [unit for axes in self.axes.values() for follows, unit in axes
                 if follows == dim and unit < self.shape[dim]]
        step = math.lcm(self.step if dim else 1, *units)
        found: list[Run] = []
        for low, high in sorted(runs):
            start, stop = low // step * step, min(-(-high // step) * step, self.shape[dim])
            if found and start <= found[-1][1]:
                start, stop = found[-1][0], max(stop, found.pop()[1])
            found.append((start, stop))
        return found

    @property
    def read_shape(self) -> tuple[int, int]:
        """Of the weight that what is read makes."""
        dim, count = self.wanted[0], sum(stop - start for start, stop in self.read)
        return (self.shape[0], count) if dim else (count, self.shape[1])

    @property
    def rest(self) -> Ranges:
        """What was asked for, in the rows or columns of what was read."""
        dim, runs = self.wanted
        places, before = [], 0
        for start, stop in self.read:
            places.append((start, stop, before))
            before += stop - start
        shifts = [next(place - start for start, stop, place in places if start <= low and high <= stop)
                  for low, high in runs]
        return dim, tuple((low + shift, high + shift) for (low, high), shift in zip(runs, shifts, strict=True))


Make = Callable[[str, Members, MemberCut | None], StoredWeight]
"""Makes the weight of a module of its members, or of what was read of them."""
CutOf = Callable[[str, Mapping[str, Shape], Shape, Ranges], MemberCut | None]
"""Of a module, its members' shapes, the weight's own, and what is wanted of it: which part can be read; None: its
layout has no such part, so that all of it is read."""


def read_members(
    folder: Path, members: Mapping[str, frozenset[str]], make: Make, cut_of: CutOf, parts: StoredParts | None,
    fp8: bool = False, unread: bool = False,
) -> Iterator[tuple[str, StoredWeight]]:
    """The tensors of a checkpoint, where `make` makes a weight of the members of each module named in `members`.
    `unread`: large ones are left in their files, members of one byte a code among them."""
    if parts is None:
        whole = _tensors(folder, members, None, fp8, unread)
        yield from joined(whole, members, lambda module, have: make(module, have, None))
        return
    cuts = _Cuts(folder, members, cut_of, parts)

    def ranges_of(name: str, shape: Shape) -> Ranges | None:
        module, _, member = name.rpartition(".")
        if member not in members.get(module, ()):
            return parts.ranges(name, shape)
        if not parts.wants(f"{module}.weight"):
            return NOTHING
        cut = cuts.of(module)
        return None if cut is None else cut.of(cut.axes.get(member, ()))

    stored = _tensors(folder, members, ranges_of, fp8, unread)
    for name, weight in joined(stored, members, lambda module, have: make(module, have, cuts.of(module))):
        module = name.removesuffix(".weight")
        cut = cuts.of(module) if module in members else None
        if cut is not None:
            yield name, _taken(weight, cut.rest, cut.row_scale)
        elif module not in members:
            yield name, weight
        elif (ranges := parts.ranges(name, tuple(weight.shape))) != NOTHING:
            yield name, weight if ranges is None else _taken(weight, ranges)


def _tensors(
    folder: Path, members: Mapping[str, frozenset[str]], ranges_of: safetensors.RangesOf | None, fp8: bool, unread: bool
) -> Iterator[tuple[str, Member]]:
    def is_member(name: str) -> bool:
        module, _, member = name.rpartition(".")
        return member in members.get(module, ())

    if unread:
        return safetensors.iterate_unread(folder, ranges_of, fp8, codes=is_member)
    return (each for each in safetensors.iterate_weights(folder, None, ranges_of, fp8))


class _Cuts:
    """Of every module of which a rank has some rows or columns."""

    def __init__(
        self, folder: Path, members: Mapping[str, frozenset[str]], cut_of: CutOf, parts: StoredParts
    ) -> None:
        self._cut_of = cut_of
        self._parts = parts
        self._found: dict[str, MemberCut | None] = {}
        self._shapes: dict[str, dict[str, Shape]] = {}
        for name, shape in safetensors.tensor_shapes(folder):
            module, _, member = name.rpartition(".")
            if member in members.get(module, ()):
                self._shapes.setdefault(module, {})[member] = shape

    def of(self, module: str) -> MemberCut | None:
        """None: all of the weight is read."""
        if module not in self._found:
            self._found[module] = self._make(module)
        return self._found[module]

    def _make(self, module: str) -> MemberCut | None:
        name = f"{module}.weight"
        shape = self._parts.shape_of(name)
        ranges = None if shape is None else self._parts.ranges(name, shape)
        if shape is None or len(shape) != 2 or ranges is None or ranges == NOTHING:
            return None
        shapes = self._shapes[module]
        cut = self._cut_of(module, shapes, shape, ranges)
        # Who puts the whole weight together says what is wrong with a shape.
        return cut if cut is not None and cut.fits(shapes) else None


def joined(
    stored: Iterable[tuple[str, Member]], members: Mapping[str, frozenset[str]],
    make: Callable[[str, Members], StoredWeight],
) -> Iterator[tuple[str, StoredWeight]]:
    """The same tensors; those of a weight of several members as the one `NAME.weight` that they make."""
    waiting: dict[str, dict[str, Member]] = {}
    for name, tensor in stored:
        module, _, member = name.rpartition(".")
        if member not in members.get(module, ()):
            yield name, tensor
            continue
        have = waiting.setdefault(module, {})
        have[member] = tensor
        if len(have) == len(members[module]):
            yield f"{module}.weight", make(module, waiting.pop(module))


def _float_columns(weight: QuantizedWeight, runs: Sequence[Run]) -> Tensor:
    """A few rows at a time: the floats of all columns are several times what is wanted."""
    found = torch.empty(weight.shape[0], sum(stop - start for start, stop in runs))
    for row in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(row, row + _ROWS_AT_ONCE)
        found[rows] = take(weight.rows(rows).dequantized(), (1, tuple(runs)))
    return found


def _taken(weight: StoredWeight, ranges: Ranges, row_scale: bool | None = None) -> StoredWeight:
    """`row_scale`: as of the whole weight, where this one is a part of it."""
    dim, runs = ranges
    if isinstance(weight, UnreadRows | UnreadWeight):
        if runs == ((0, weight.shape[dim]),):
            return weight
        if dim == 0 and len(runs) == 1:
            return weight.rows(slice(*runs[0]))
        weight = weight.whole()
    if isinstance(weight, Fp8Weight):
        if dim == 0:
            return joined_fp8([weight.rows(slice(*run)) for run in runs], dim)
        weight = weight.finer(runs, row_scale)
        return joined_fp8([weight.columns(*run, row_scale) for run in runs], dim)
    if not isinstance(weight, QuantizedWeight):
        return take(weight if isinstance(weight, Tensor) else weight.dequantized(), ranges)
    if dim == 0:
        return joined_weights([weight.rows(slice(*run)) for run in runs], dim)
    cut = any(edge % min(UNIT, weight.group) for run in runs for edge in run)
    if cut or weight.order is not None:
        return FloatWeight(_float_columns(weight, runs), kept=False)
    return joined_weights([weight.columns(*run, row_scale) for run in runs], dim)
