"""Integer weights of a safetensors checkpoint (AWQ, GPTQ, compressed-tensors): several tensors make one weight.

| layout | codes | scales | zero points |
|---|---|---|---|
| AWQ | qweight int32 [K, N/8], a word is columns 0 2 4 6 1 3 5 7 | scales [K/g, N] | qzeros, packed alike |
| GPTQ | qweight int32 [K/w, N], w rows a word | scales [K/g, N] | qzeros int32 [K/g, N/w], w columns a word |
| compressed-tensors | weight_packed int32 [N, K/w], or weight int8 [N, K] | weight_scale [N, K/g] | weight_zero_point |

w numbers of `bits` bits fill a word of 32, lowest bits first. A weight is scale * (code - zero point).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.quantized import UNIT, FloatWeight, Fp8Weight, QuantizedWeight, StoredWeight, joined_fp8
from quire.kernels.quantized import joined as joined_weights
from quire.models.loader import safetensors
from quire.models.loader.quantization_config import IntegerScheme
from quire.models.spec import Shape
from quire.models.stored_parts import NOTHING, Ranges, StoredParts, take

Members = Mapping[str, Tensor]
"""The tensors of one weight, by the last part of their names."""
Make = Callable[[str, Members], StoredWeight]
"""Makes the weight of a module of its members."""

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


def read(folder: Path, scheme: IntegerScheme, parts: StoredParts | None) -> Iterator[tuple[str, StoredWeight]]:
    """(name, weight) of a checkpoint, floats in the type they are stored in; with `parts` those parts of them."""
    members = members_of(safetensors.tensor_names(folder), scheme)
    return read_members(folder, members, lambda module, have: _Reader(module, have, scheme).weight(), parts)


def read_members(
    folder: Path, members: Mapping[str, frozenset[str]], make: Make, parts: StoredParts | None, fp8: bool = False
) -> Iterator[tuple[str, StoredWeight]]:
    """The tensors of a checkpoint, where `make` makes a weight of the members of each module named in `members`."""
    if parts is None:
        yield from joined(safetensors.iterate_weights(folder, None, fp8=fp8), members, make)
        return

    def ranges_of(name: str, shape: Shape) -> Ranges | None:
        """A weight of several members is cut once it is put together: they are packed each in another way."""
        module, _, member = name.rpartition(".")
        if member not in members.get(module, ()):
            return parts.ranges(name, shape)
        return None if parts.wants(f"{module}.weight") else NOTHING

    for name, weight in joined(safetensors.iterate_weights(folder, None, ranges_of, fp8), members, make):
        if name.removesuffix(".weight") not in members:
            yield name, weight
        elif (ranges := parts.ranges(name, tuple(weight.shape))) != NOTHING:
            yield name, weight if ranges is None else _taken(weight, ranges)


def _taken(weight: StoredWeight, ranges: Ranges) -> StoredWeight:
    dim, runs = ranges
    if isinstance(weight, Fp8Weight):
        weight = weight if dim == 0 else weight.finer(runs)
        return joined_fp8([weight.rows(slice(*run)) if dim == 0 else weight.columns(*run) for run in runs], dim)
    if not isinstance(weight, QuantizedWeight):
        return take(weight if isinstance(weight, Tensor) else weight.dequantized(), ranges)
    cut = any(edge % min(UNIT, weight.group) for run in runs for edge in run)
    if dim == 1 and (cut or weight.order is not None):
        return FloatWeight(take(weight.dequantized(), ranges), kept=False)
    pieces = [weight.rows(slice(*run)) if dim == 0 else weight.columns(*run) for run in runs]
    return joined_weights(pieces, dim)


def members_of(names: Iterable[str], scheme: IntegerScheme) -> dict[str, frozenset[str]]:
    """Of every integer weight among these tensors: its module's name, and the members that it has."""
    found: dict[str, set[str]] = {}
    for name in names:
        module, _, member = name.rpartition(".")
        if member in _MEMBERS[scheme.layout]:
            found.setdefault(module, set()).add(member)
    marks = _SCALES[scheme.layout]
    return {module: frozenset(members) for module, members in found.items() if marks in members}


def joined(
    stored: Iterable[tuple[str, Tensor]], members: Mapping[str, frozenset[str]], make: Make
) -> Iterator[tuple[str, StoredWeight]]:
    """The same tensors; those of a weight of several members as the one `NAME.weight` that they make."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored:
        module, _, member = name.rpartition(".")
        if member not in members.get(module, ()):
            yield name, tensor
            continue
        have = waiting.setdefault(module, {})
        have[member] = tensor
        if len(have) == len(members[module]):
            yield f"{module}.weight", make(module, waiting.pop(module))


class _Reader:
    """Makes one weight of its members; a shape that cannot be is refused with the tensor's name."""

    def __init__(self, module: str, members: Members, scheme: IntegerScheme) -> None:
        self._module = module
        self._members = members
        self._scheme = scheme

    def weight(self) -> StoredWeight:
        if self._scheme.layout == "compressed-tensors":
            return self._compressed()
        bits = self._scheme.bits[0]
        packed, scales = self._words("qweight"), self._floats("scales")
        columns = scales.shape[1]
        if self._scheme.layout == "awq":
            codes = _unpacked(packed, bits)
            if codes.shape[1] != columns:
                self._refuse("qweight", f"{columns} columns of scales")
            codes, zeros = _awq_order(codes), _awq_order(_unpacked(self._words("qzeros"), bits))
            codes = codes.t().contiguous()
        else:
            if packed.shape[1] != columns:
                self._refuse("qweight", f"{columns} columns of scales")
            codes = _unpacked(packed.t().contiguous(), bits)
            zeros = _unpacked(self._words("qzeros"), bits)
        if zeros.shape != scales.shape:
            self._refuse("qzeros", f"scales of shape {tuple(scales.shape)}")
        # A zero point of 0, less one, is stored as the largest number: it wraps.
        zeros = (zeros.to(torch.int16).t() + self._scheme.zero_shift) & ((1 << bits) - 1)
        return self._grouped(codes, scales.t().contiguous(), zeros.contiguous(), bits, "scales", "g_idx")

    def _compressed(self) -> StoredWeight:
        scales = self._members["weight_scale"]
        scales = scales.to(torch.float32).reshape(-1, 1) if scales.dim() < 2 else self._floats("weight_scale")
        codes, bits = self._compressed_codes()
        rows = codes.shape[0]
        if scales.shape[0] == 1:
            scales = scales.expand(rows, -1)
        if scales.shape[0] != rows:
            self._refuse("weight_scale", f"a weight of {rows} rows")
        zeros = self._compressed_zeros(tuple(scales.shape), bits)
        return self._grouped(codes, scales.contiguous(), zeros, bits, "weight_scale", "weight_g_idx")

    def _compressed_codes(self) -> tuple[Tensor, int]:
        """uint8 [N, K], each 2 ** (bits - 1) more than the signed number that it stands for."""
        if "weight" in self._members:
            weight = self._members["weight"]
            if weight.dtype is not torch.int8 or weight.dim() != 2:
                self._refuse("weight", "int8 numbers of two dimensions")
            return weight.view(torch.uint8) ^ 128, 8
        if "weight_packed" not in self._members or "weight_shape" not in self._members:
            self._refuse("weight_scale", "weight_packed and weight_shape, or weight, beside it")
        packed, shape = self._words("weight_packed"), self._members["weight_shape"].flatten().tolist()
        fits = [bits for bits in self._scheme.bits
                if len(shape) == 2 and packed.shape == (shape[0], -(-shape[1] * bits // 32))]
        if not fits:
            self._refuse("weight_packed", f"a weight_shape of {shape} and {self._scheme.bits} bits")
        return _unpacked(packed, fits[0])[:, : shape[1]], fits[0]

    def _compressed_zeros(self, shape: tuple[int, ...], bits: int) -> Tensor:
        stored = self._members.get("weight_zero_point")
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
        self, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, scales_name: str, order_name: str
    ) -> StoredWeight:
        """Of codes uint8 [N, K], scales float32 [N, groups] and zero points int16 [N, groups]."""
        width, count = codes.shape[1], scales.shape[1]
        allowed = [width if group is None else group for group in self._scheme.groups]
        group = next((each for each in allowed if -(-width // each) == count), None)
        if group is None:
            self._refuse(scales_name, f"{width} input columns in groups of {' or '.join(map(str, allowed))}")
        order = self._members.get(order_name)
        usual = torch.arange(width) // group
        if order is None or (order.shape == usual.shape and torch.equal(order.to(torch.int64), usual)):
            order = None
        elif order.shape != usual.shape or not 0 <= int(order.min()) <= int(order.max()) < count:
            self._refuse(order_name, f"{width} input columns in {count} groups")
        places = None if order is None else order.to(torch.int64)
        whole = places is None or bool((torch.bincount(places, minlength=count) == group).all())
        if not whole or width % group or (group % UNIT and group != UNIT // 2):
            return _in_floats(codes, scales, zeros, usual if places is None else places)
        if places is not None:  # columns of a group side by side
            places = places.argsort(stable=True)
            codes = codes[:, places]
        rows = self._scheme.int8_rows and bits == 8 and group == width
        first = int(zeros[0, 0]) if zeros.numel() else 0
        if first < 1 << bits and bool((zeros == first).all()):
            return QuantizedWeight(codes.contiguous(), scales, None, first, bits, group, places, rows)
        return QuantizedWeight(codes.contiguous(), scales, -scales * zeros, 0, bits, group, places)

    def _words(self, member: str) -> Tensor:
        tensor = self._members.get(member)
        if tensor is None:
            self._refuse(_SCALES[self._scheme.layout], f"{member} beside it")
        if tensor.dtype is not torch.int32 or tensor.dim() != 2:
            self._refuse(member, "int32 words of two dimensions")
        return tensor

    def _floats(self, member: str) -> Tensor:
        tensor = self._members[member]
        if not tensor.is_floating_point() or tensor.dim() != 2:
            self._refuse(member, "floats of two dimensions")
        return tensor.to(torch.float32)

    def _refuse(self, member: str, wanted: str) -> NoReturn:
        tensor = self._members[member]
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


def _awq_order(numbers: Tensor) -> Tensor:
    """Eight columns of a word, from AWQ's order to their own."""
    return numbers.view(numbers.shape[0], -1, 8)[:, :, list(_AWQ_PLACE)].flatten(1)


def _in_floats(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    """float32: of groups that no kernel has."""
    signed = codes.to(torch.float32) - zeros[:, group_of]
    return signed.mul_(scales[:, group_of])
