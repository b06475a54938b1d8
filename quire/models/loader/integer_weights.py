"""Integer weights of a safetensors checkpoint (AWQ, GPTQ, compressed-tensors): several tensors make one weight.

| layout | codes | scales | zero points |
|---|---|---|---|
| AWQ | qweight int32 [K, N/8], a word is columns 0 2 4 6 1 3 5 7 | scales [K/g, N] | qzeros, packed alike |
| GPTQ | qweight int32 [K/w, N], w rows a word | scales [K/g, N] | qzeros int32 [K/g, N/w], w columns a word |
| compressed-tensors | weight_packed int32 [N, K/w], or weight int8 [N, K] | weight_scale [N, K/g] | weight_zero_point |

w numbers of `bits` bits fill a word of 32, lowest bits first. A weight is scale * (code - zero point).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.quantized import UNIT, QuantizedWeight, StoredWeight, in_groups
from quire.kernels.unread import LARGE, UnreadRows, UnreadWeight, half_holds, rows_of
from quire.models.loader import safetensors
from quire.models.loader.members import Axes, Member, MemberCut, Members, read_members
from quire.models.loader.quantization_config import IntegerScheme
from quire.models.spec import Shape
from quire.models.stored_parts import Ranges, StoredParts, take

_SCALES = {"awq": "scales", "gptq": "scales", "compressed-tensors": "weight_scale"}
"""The member that every integer weight of a layout has, and no other weight."""
_MEMBERS = {
    "awq": frozenset(("qweight", "qzeros", "scales")),
    "gptq": frozenset(("qweight", "qzeros", "scales", "g_idx")),
    "compressed-tensors": frozenset(
        ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    ),
}
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds each of its eight columns."""
_NUMBERS_AT_ONCE = 4 << 20
"""That are unpacked of a file's words: what does it makes several copies."""
_ORDERS = ("g_idx", "weight_g_idx")
"""The members that say which group each column is in."""


def read(
    folder: Path, scheme: IntegerScheme, parts: StoredParts | None, unread: bool = False
) -> Iterator[tuple[str, StoredWeight]]:
    """(name, weight) of a checkpoint, floats in the type they are stored in; with `parts` those parts of them.
    `unread`: large ones are left in their files, or as a file's words, until their rows are asked for."""
    members = members_of(safetensors.tensor_names(folder), scheme)

    def make(module: str, have: Members, cut: MemberCut | None) -> StoredWeight:
        return _Reader(module, have, scheme, cut, unread).weight()

    def cut_of(module: str, shapes: Mapping[str, Shape], shape: Shape, wanted: Ranges) -> MemberCut | None:
        cut = _cut_of(scheme, shapes, shape, wanted)
        order = next((f"{module}.{member}" for member in _ORDERS if member in shapes), None)
        if cut is None or order is None or wanted[0] == 0:
            return cut
        # Columns of act-order share their scales with columns from all over the weight.
        places = safetensors.read_tensor(folder, order)
        usual = torch.arange(shape[1]) // cut.group
        return cut if places.shape == usual.shape and torch.equal(places.to(torch.int64), usual) else None

    return read_members(folder, members, make, cut_of, parts, unread=unread)


def _cut_of(
    scheme: IntegerScheme, shapes: Mapping[str, Shape], shape: Shape, wanted: Ranges
) -> MemberCut | None:
    """Codes and scales are cut. Zero points are read whole, one for a group: whether all of them are the same number
    says how the weight is held, on every rank alike."""
    rows, columns = shape
    scales = shapes[_SCALES[scheme.layout]]
    if columns % UNIT:
        return None
    if scheme.layout == "compressed-tensors":
        group = _group_of(scheme, columns, scales[1] if len(scales) == 2 else 1)
        packed = shapes.get("weight_packed", (0, 0))
        word = next((32 // bits for bits in scheme.bits if packed == (rows, -(-columns * bits // 32))), None)
        if group is None or ("weight" not in shapes and word is None):
            return None
        axes: dict[str, Axes] = {"weight": ((0, 1), (1, 1))} if word is None else {"weight_packed": ((0, 1), (1, word))}
        if math.prod(scales) != 1:
            axes["weight_scale"] = ((0, 1), (1, group))[: len(scales)]
        return MemberCut(shape, wanted, axes, group, UNIT)
    group, word = _group_of(scheme, columns, scales[0]), 32 // scheme.bits[0]
    if group is None or rows % word:
        return None
    codes: Axes = ((1, 1), (0, word)) if scheme.layout == "awq" else ((1, word), (0, 1))
    return MemberCut(shape, wanted, {"qweight": codes, "scales": ((1, group), (0, 1))}, group, UNIT)


def _group_of(scheme: IntegerScheme, width: int, count: int) -> int | None:
    """Columns that share a scale, in a weight of so many columns and groups."""
    allowed = [width if group is None else group for group in scheme.groups]
    return next((each for each in allowed if -(-width // each) == count), None)


def members_of(names: Iterable[str], scheme: IntegerScheme) -> dict[str, frozenset[str]]:
    """Of every integer weight among these tensors: its module's name, and the members that it has."""
    found: dict[str, set[str]] = {}
    for name in names:
        module, _, member = name.rpartition(".")
        if member in _MEMBERS[scheme.layout]:
            found.setdefault(module, set()).add(member)
    marks = _SCALES[scheme.layout]
    return {module: frozenset(members) for module, members in found.items() if marks in members}


@dataclass(frozen=True, slots=True)
class _Codes:
    """Codes [N, K] as a file has them."""

    shape: tuple[int, int]
    unpacked: Callable[[int, int], Tensor]
    """uint8 [rows, K] of rows [start, stop)."""

    def rows(self, start: int, stop: int) -> Tensor:
        step = max(UNIT, _NUMBERS_AT_ONCE // max(1, self.shape[1]) // UNIT * UNIT)
        if stop - start <= step:
            return self.unpacked(start, stop).contiguous()
        found = torch.empty(stop - start, self.shape[1], dtype=torch.uint8)
        for row in range(start, stop, step):
            found[row - start : row - start + step] = self.unpacked(row, min(row + step, stop))
        return found


class _Words:
    """int32 words of codes. What was left in its file is read when the first of its columns are asked for, and let go
    with the last: of parts that are packed one after the other, one is in memory."""

    def __init__(self, held: Member) -> None:
        self._held = held
        self._read: Tensor | None = None
        self.shape = (held.shape[0], held.shape[1])

    def rows(self, start: int, stop: int) -> Tensor:
        return rows_of(self._held, start, stop)

    def columns(self, start: int, stop: int) -> Tensor:
        if isinstance(self._held, Tensor):
            return self._held[:, start:stop]
        read = self._all(self._held) if self._read is None else self._read
        self._read = None if stop >= self.shape[1] else read
        return read[:, start:stop]

    def _all(self, held: UnreadRows) -> Tensor:
        """A few rows at a time: of a file, no more is in memory beside them."""
        found, step = torch.empty(self.shape, dtype=torch.int32), max(1, _NUMBERS_AT_ONCE // max(1, self.shape[1]))
        for row in range(0, self.shape[0], step):
            found[row : row + step] = rows_of(held, row, min(row + step, self.shape[0]))
        return found


class _Reader:
    """Makes one weight of its members, or of what was read of them; a shape that cannot be is refused with the tensor's
    name. Codes and scales are those that were read, zero points and orders those of the whole weight."""

    def __init__(
        self, module: str, members: Members, scheme: IntegerScheme, cut: MemberCut | None, unread: bool
    ) -> None:
        self._module = module
        self._members = members
        self._scheme = scheme
        self._cut = cut
        self._unread = unread

    def weight(self) -> StoredWeight:
        if self._scheme.layout == "compressed-tensors":
            return self._compressed()
        bits = self._scheme.bits[0]
        packed, scales = self._words("qweight"), self._scales("scales")
        columns = scales.shape[1]
        in_word = 32 // bits if self._scheme.layout == "awq" else 1
        if packed.shape[1] * in_word != columns:
            self._refuse("qweight", f"{columns} columns of scales")
        stored = self._words("qzeros")
        zeros = _unpacked(stored.columns(0, stored.shape[1]), bits)
        if self._scheme.layout == "awq":
            zeros = _awq_order(zeros)
            codes = _Codes((columns, packed.shape[0]), lambda start, stop: _awq_rows(packed, bits, start, stop))
        else:
            shape = (columns, packed.shape[0] * 32 // bits)
            codes = _Codes(shape, lambda start, stop: _unpacked(packed.columns(start, stop).t(), bits))
        if tuple(zeros.t().shape) != self._whole(scales.t()):
            self._refuse("qzeros", f"scales of shape {self._whole(scales.t())[::-1]}")
        # A zero point of 0, less one, is stored as the largest number: it wraps.
        zeros = (zeros.to(torch.int16).t() + self._scheme.zero_shift) & ((1 << bits) - 1)
        return self._grouped(codes, scales.t().contiguous(), zeros.contiguous(), bits, "scales", "g_idx")

    def _compressed(self) -> StoredWeight:
        scales = self._scales("weight_scale", flat=True)
        codes, bits = self._compressed_codes()
        rows = codes.shape[0]
        if scales.shape[0] == 1:
            scales = scales.expand(rows, -1)
        if scales.shape[0] != rows:
            self._refuse("weight_scale", f"a weight of {rows} rows")
        zeros = self._compressed_zeros(self._whole(scales), bits)
        return self._grouped(codes, scales.contiguous(), zeros, bits, "weight_scale", "weight_g_idx")

    def _compressed_codes(self) -> tuple[_Codes, int]:
        """Each 2 ** (bits - 1) more than the signed number that it stands for."""
        if "weight" in self._members:
            weight = self._members["weight"]
            if weight.dim() != 2 or rows_of(weight, 0, 0).dtype is not torch.int8:
                self._refuse("weight", "int8 numbers of two dimensions")
            size = (weight.shape[0], weight.shape[1])
            return _Codes(size, lambda start, stop: rows_of(weight, start, stop).view(torch.uint8) ^ 128), 8
        if "weight_packed" not in self._members or "weight_shape" not in self._members:
            self._refuse("weight_scale", "weight_packed and weight_shape, or weight, beside it")
        packed, shape = self._words("weight_packed"), self._tensor("weight_shape").flatten().tolist()
        if self._cut is not None and shape == list(self._cut.shape):
            shape = list(self._cut.read_shape)
        fits = [bits for bits in self._scheme.bits
                if len(shape) == 2 and packed.shape == (shape[0], -(-shape[1] * bits // 32))]
        if not fits:
            self._refuse("weight_packed", f"a weight_shape of {shape} and {self._scheme.bits} bits")
        size = (shape[0], shape[1])
        return _Codes(size, lambda start, stop: _unpacked(packed.rows(start, stop), fits[0])[:, : size[1]]), fits[0]

    def _compressed_zeros(self, shape: tuple[int, ...], bits: int) -> Tensor:
        stored = self._tensor("weight_zero_point") if "weight_zero_point" in self._members else None
        if stored is None and self._scheme.zero_points:
            raise ModelLoadError("quantization_config says zero points (symmetric=false), but "
                                 f"{self._module} has no weight_zero_point")  # fmt: skip
        if stored is None:
            return torch.full(shape, 1 << (bits - 1), dtype=torch.int16)
        if stored.dtype is torch.int32 and stored.dim() == 2 and "weight_packed" in self._members:
            zeros = _unpacked(stored.t().contiguous(), bits).t()[: shape[0]].to(torch.int16)
        else:
            zeros = stored.to(torch.int16) + (1 << (bits - 1))
            zeros = zeros.reshape(-1, 1) if zeros.dim() < 2 else zeros
            zeros = zeros.expand(shape) if zeros.shape[0] == 1 and shape[1:] == zeros.shape[1:] else zeros
        if zeros.shape != shape:
            self._refuse("weight_zero_point", f"scales of shape {shape}")
        return zeros.contiguous()

    def _grouped(
        self, codes: _Codes, scales: Tensor, zeros: Tensor, bits: int, scales_name: str, order_name: str
    ) -> StoredWeight:
        """Of codes [N, K], scales float32 [N, groups] and zero points int16 [N, groups]."""
        width, count = codes.shape[1] if self._cut is None else self._cut.shape[1], zeros.shape[1]
        group = _group_of(self._scheme, width, count)
        if group is None:
            allowed = [width if group is None else group for group in self._scheme.groups]
            self._refuse(scales_name, f"{width} input columns in groups of {' or '.join(map(str, allowed))}")
        places = self._order(order_name, width, count, group)
        whole = places is None or bool((torch.bincount(places, minlength=count) == group).all())
        first = int(zeros[0, 0]) if zeros.numel() else 0
        one_zero = first < 1 << bits and bool((zeros == first).all())
        zeros = self._part(zeros, group)
        if not whole or not in_groups(width, group):
            group_of = torch.arange(codes.shape[1]) // group if places is None else places
            return self._left(codes, lambda start, stop: _in_floats(
                codes.rows(start, stop), scales[start:stop], zeros[start:stop], group_of))
        order = None if places is None else places.argsort(stable=True)  # columns of a group side by side
        int8_rows = one_zero and self._scheme.int8_rows and bits == 8 and group == width
        group = min(group, codes.shape[1])  # some columns of one scale
        offsets, zero = (None, first) if one_zero else (-scales * zeros, 0)

        def some(start: int, stop: int) -> QuantizedWeight:
            found, own = codes.rows(start, stop), None if offsets is None else offsets[start:stop]
            found = found if order is None else found[:, order].contiguous()
            return QuantizedWeight(found, scales[start:stop], own, zero, bits, group, order, int8_rows)

        if order is not None or not self._leaves(codes):
            return self._left(codes, some)
        return UnreadWeight(0, codes.shape, bits, zero, group, offsets is not None,
                            2 if half_holds(scales, offsets) else 4, some)

    def _leaves(self, codes: _Codes) -> bool:
        return self._unread and math.prod(codes.shape) >= LARGE

    def _left(self, codes: _Codes, some: Callable[[int, int], StoredWeight]) -> StoredWeight:
        """What a CPU multiplies as floats."""
        return UnreadRows(0, codes.shape, some, coded=True) if self._leaves(codes) else some(0, codes.shape[0])

    def _order(self, member: str, width: int, count: int, group: int) -> Tensor | None:
        """int64 [K], the group of each column; None: those of neighbours."""
        order = self._tensor(member) if member in self._members else None
        usual = torch.arange(width) // group
        if order is None and count > 1 and self._scheme.order_field is not None:
            where = f"quantization_config says act-order ({self._scheme.order_field})"
            raise ModelLoadError(f"{where}, but {self._module} has no {member}, which says the group of each column")
        if order is None or (order.shape == usual.shape and torch.equal(order.to(torch.int64), usual)):
            return None
        if order.shape != usual.shape or not 0 <= int(order.min()) <= int(order.max()) < count:
            self._refuse(member, f"{width} input columns in {count} groups")
        return order.to(torch.int64)

    def _whole(self, scales: Tensor) -> tuple[int, int]:
        """The shape [N, groups] that scales of the whole weight have."""
        cut = self._cut
        return (scales.shape[0], scales.shape[1]) if cut is None else (cut.shape[0], -(-cut.shape[1] // cut.group))

    def _part(self, zeros: Tensor, group: int) -> Tensor:
        """Of the zero points of the whole weight those of what was read."""
        ranges = None if self._cut is None else self._cut.of(((0, 1), (1, group)))
        return zeros if ranges is None else take(zeros, ranges)

    def _words(self, member: str) -> _Words:
        if member not in self._members:
            self._refuse(_SCALES[self._scheme.layout], f"{member} beside it")
        held = self._members[member]
        if held.dim() != 2 or rows_of(held, 0, 0).dtype is not torch.int32:
            self._refuse(member, "int32 words of two dimensions")
        return _Words(held)

    def _scales(self, member: str, flat: bool = False) -> Tensor:
        """float32 of two dimensions; `flat`: the file may have fewer. Some tools write negative ones, and a group of
        zeros may have a scale of zero."""
        tensor = self._tensor(member)
        if flat and tensor.dim() < 2:
            tensor = tensor.reshape(-1, 1)
        if not tensor.is_floating_point() or tensor.dim() != 2:
            self._refuse(member, "floats of two dimensions")
        scales = tensor.to(torch.float32)
        if not scales.isfinite().all():
            raise ModelLoadError(f"tensor {self._module + '.' + member!r} has a scale that is infinite or no number")
        return scales

    def _tensor(self, member: str) -> Tensor:
        """All of it."""
        held = self._members[member]
        return held if isinstance(held, Tensor) else held.dequantized()

    def _refuse(self, member: str, wanted: str) -> NoReturn:
        tensor = self._tensor(member)
        raise ModelLoadError(
            f"tensor {self._module + '.' + member!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, which does not "
            f"go with {wanted}: quantization_config and the weights are not of the same model"
        )


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [a, b] to the uint8 numbers [a, b * 32 / bits] in them, lowest bits first."""
    numbers = words.contiguous().view(torch.uint8)
    if bits == 8:
        return numbers
    return torch.stack([numbers & 15, numbers >> 4], -1).flatten(1)


def _awq_rows(packed: _Words, bits: int, start: int, stop: int) -> Tensor:
    """Of words [K, N / 8] the codes of rows [start, stop), each of which is a column of numbers."""
    each = 32 // bits
    first = start // each
    codes = _awq_order(_unpacked(packed.columns(first, -(-stop // each)), bits))
    return codes.t()[start - first * each : stop - first * each]


def _awq_order(numbers: Tensor) -> Tensor:
    """Eight columns of a word, from AWQ's order to their own."""
    return numbers.view(numbers.shape[0], -1, 8)[:, :, list(_AWQ_PLACE)].flatten(1)


def _in_floats(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    """float32: of groups that no kernel has."""
    signed = codes.to(torch.float32) - zeros[:, group_of]
    return signed.mul_(scales[:, group_of])
