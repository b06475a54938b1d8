"""Weights as they lie on a GPU, plain and quantized, and floats rounded to codes at load."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from quire.kernels.quantized import Fp8Weight, QuantizedWeight
from quire.kernels.slices import Slices
from quire.kernels.triton import linear_codes, linear_planes
from quire.kernels.triton.coded_rows import FP8, LARGEST, LARGEST_INT8
from quire.kernels.triton.expert_codes import CodedExperts
from quire.kernels.triton.linear_sliced_bytes import SlicedBytes


@dataclass(slots=True)
class DeviceLinear:
    """A weight [out_features, in_features] as it was stored, on the device."""

    weight: Tensor
    bias: Tensor | None
    slices: Slices | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(slots=True)
class ExpertLinear:
    """The weight of one expert in codes, which is only ever multiplied as one of a group."""

    packed: CodedExperts
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.packed.features

    @property
    def in_features(self) -> int:
        return self.packed.width

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Weights of one shape in one tensor [members, out_features, in_features]: experts, or heads; or experts in
    codes."""

    members: tuple[DeviceLinear | ExpertLinear, ...]
    weight: Tensor | CodedExperts
    bias: Tensor | None


@dataclass(slots=True)
class BytesLinear:
    """A weight [out_features, in_features] in fp8 or int8, multiplied by rows in the same type (W8A8)."""

    weight: Tensor
    scales: Tensor
    """float32 [out_features], or [out_features, in_features / group]."""
    bias: Tensor | None
    input_scale: Tensor | None
    """float32 [1]: the scale of all rows, where calibration fixed it."""
    group: int | None = None
    """Columns that share a scale; None: all of a feature. Without slices it is 128 (of fp8)."""
    slices: Slices | None = None
    """In deterministic mode, of a sum that ranks may share."""

    @property
    def sliced(self) -> SlicedBytes | None:
        if self.slices is None:
            return None
        return SlicedBytes(self.weight, self.scales, self.group, self.slices)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(slots=True)
class CodesLinear:
    """A weight of 4-, 5-, 6- or 8-bit codes, multiplied by rows in their own type (W4A16, W8A16)."""

    packed: linear_codes.PackedCodes | linear_planes.PackedPlanes
    bias: Tensor | None
    slices: Slices | None = None
    order: Tensor | None = None
    """int64 [in_features]: which number of a row each column is multiplied by; None: its own."""

    @property
    def out_features(self) -> int:
        return self.packed.features

    @property
    def in_features(self) -> int:
        return self.packed.width

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(slots=True)
class SplitLinear:
    """Parts of different formats, one below the other, each multiplied by itself: Q4_K files have values in Q6_K, and
    a config may keep keys in floats."""

    parts: tuple[BytesLinear | CodesLinear | DeviceLinear, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


QuantizedLinear: TypeAlias = BytesLinear | CodesLinear | SplitLinear


def to_fp8(weight: Tensor, slices: Slices | None = None) -> Fp8Weight:
    """A weight of floats with a scale for each feature, or for each slice of one: of those a rank has whole ones, so
    that every number of ranks rounds alike."""
    wide = weight.float()
    scales, group = _scales(wide, slices, LARGEST)
    codes = (wide.unflatten(1, (-1, group)) / scales[:, :, None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return Fp8Weight(codes.flatten(1), scales, group)


def to_int8(weight: Tensor, slices: Slices | None = None) -> QuantizedWeight:
    """The same in integers, for rows in int8."""
    wide = weight.float()
    scales, group = _scales(wide, slices, LARGEST_INT8)
    codes = (wide.unflatten(1, (-1, group)) / scales[:, :, None]).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    return QuantizedWeight(
        codes.add_(128).to(torch.uint8).flatten(1), scales, None, 128, 8, group, int8_rows=True)


def _scales(wide: Tensor, slices: Slices | None, most: float) -> tuple[Tensor, int]:
    """float32 [features, columns / group] and the group: one scale for all columns, or for those of each slice."""
    if slices is None:
        return wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / most, wide.shape[1]
    group = slices.common
    peaks = [wide[:, start:stop].abs().amax(1, keepdim=True).expand(-1, (stop - start) // group)
             for start, stop in pairwise(slices.borders)]
    return torch.cat(peaks, 1).clamp(min=1e-12) / most, group


def to_codes(weight: Tensor, group: int, zero_points: bool, bits: int = 4) -> QuantizedWeight:
    """A weight of floats as codes with a scale for each group of columns, and an offset with `zero_points`."""
    features, width = weight.shape
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    wide = weight.float().view(features, -1, group)
    if zero_points:
        least, largest = wide.amin(-1), wide.amax(-1)
        scales = ((largest - least) / most).clamp(min=1e-12)
        codes = (wide - least[:, :, None]).div_(scales[:, :, None])
    else:
        least, scales = None, (wide.abs().amax(-1) / (most / 2)).clamp(min=1e-12)
        codes = wide / scales[:, :, None] + middle
    codes = codes.round_().clamp_(0, most).to(torch.uint8).view(features, width)
    return QuantizedWeight(codes, scales, least, 0 if zero_points else middle, bits, group)
