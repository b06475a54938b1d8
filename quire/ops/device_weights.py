"""Weights as they lie on a GPU, plain and quantized, and floats rounded to codes at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from quire.kernels.quantized import Fp8Weight, QuantizedWeight
from quire.kernels.slices import Slices
from quire.kernels.triton import linear_codes, linear_planes
from quire.kernels.triton.coded_rows import FP8, LARGEST, LARGEST_INT8
from quire.kernels.triton.expert_codes import CodedExperts


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
    """float32 [out_features], or of fp8 [out_features, in_features / 128]."""
    bias: Tensor | None
    input_scale: Tensor | None
    """float32 [1]: the scale of all rows, where calibration fixed it."""

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
    """Parts of different formats, one below the other, each multiplied by itself: Q4_K files have values in Q6_K."""

    parts: tuple[BytesLinear | CodesLinear, ...]

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


def to_fp8(weight: Tensor) -> Fp8Weight:
    """A weight of floats with a scale for each feature."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Fp8Weight((wide / scales).clamp(-LARGEST, LARGEST).to(FP8), scales, weight.shape[1])


def to_int8(weight: Tensor) -> QuantizedWeight:
    """A weight of floats with a scale for each feature, for rows in int8."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST_INT8
    codes = (wide / scales).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).add_(128).to(torch.uint8)
    return QuantizedWeight(codes, scales, None, 128, 8, weight.shape[1], int8_rows=True)


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
