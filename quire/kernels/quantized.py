"""A weight of codes (integers, or fp8) and scales, as readers hand it over and packers take it: no format of a file or
a device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, Union

from quire.errors import ModelLoadError

if TYPE_CHECKING:  # saying what a weight is must not cost the import of torch
    import torch
    from torch import Tensor

UNIT = 32
"""Columns that are multiplied as integers before a scale is applied; activations share a scale over as many."""
BITS = (4, 5, 6, 8)
BLOCK = 256
"""Columns whose scales are multiples of one number, in K-quants."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of an MXFP4 code's low three bits."""
StoredWeight: TypeAlias = Union["Tensor", "CodedWeight"]
"""What a reader hands over for one parameter."""


def in_groups(width: int, group: int) -> bool:
    """Whether a row of so many integer codes may share scales in such groups. Readers make floats of others."""
    return group > 0 and (group == UNIT // 2 or group % UNIT == 0) and width % group == 0


class WeightUse(Enum):
    """What a linear layer is for: a quantization made at load time treats them differently."""

    LAYER = "layer"
    """A projection inside a layer: rounded to as many bits as the user asked for."""
    VOCABULARY = "vocabulary"
    """An embedding or a head: rounded to 8 bits, whatever was asked for."""
    EXPERT = "expert"
    """As LAYER, of one of several experts, which a device may multiply as a group."""
    SHARED = "shared"
    """Keys and values that many query heads read: few weights, whose error is in all of those. Rounded to 8 bits."""
    EXACT = "exact"
    """A router or a gate: small, and an error there changes which expert computes. Never rounded."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a user wants of weights: multiplied as integers, and which are made integers at load time."""

    bits: int | None
    """Weights stored as floats are rounded to so many; None: they stay floats. Integers of the file keep their bits."""
    group: int = UNIT
    """Columns that share a scale; 0: one scale per row."""
    zero_points: bool = False
    """Codes count from the least weight of a group instead of lying around zero."""
    alike: bool = False
    """To so many bits all of them, where otherwise some get more."""
    fp8: bool = False
    """Weights stored as floats become fp8 with a scale per row (a GPU)."""

    @property
    def whole_rows(self) -> bool:
        """On a GPU: rows of activations become codes of the same type, with one scale each (W8A8)."""
        return self.fp8 or (self.bits == 8 and not self.group and not self.zero_points)


class CodedWeight(ABC):
    """A weight [N, K] of codes with scales, whatever the codes are."""

    __slots__ = ()
    kept: bool = False
    """Nobody rounds it: the checkpoint's config excludes it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    def dim(self) -> int:
        return 2

    @abstractmethod
    def rows(self, index: Tensor | Sequence[int] | slice) -> CodedWeight:
        """These rows, in this order."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> CodedWeight:
        """Columns [start, stop)."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """float32 [N, K]."""

    @abstractmethod
    def to(self, device: torch.device) -> CodedWeight:
        """The same on a device."""

    def split(self, rows: Sequence[int]) -> list[CodedWeight]:
        """Runs of so many rows, one after the other."""
        found, start = [], 0
        for count in rows:
            found.append(self.rows(slice(start, start + count)))
            start += count
        return found


@dataclass(frozen=True, slots=True)
class QuantizedWeight(CodedWeight):
    """A weight [N, K]: w[n, k] = scales[n, g] * (codes[n, k] - zero) (+ offsets[n, g]), where g = k // group.

    The product rounds first, then the sum. So the usual formats are held without loss:

    | format | bits | zero | group | offsets |
    |---|---|---|---|---|
    | Q8_0 (codes q + 128) | 8 | 128 | 32 | none |
    | Q4_0, Q5_0 | 4, 5 | 8, 16 | 32 | none |
    | Q4_1, Q5_1 | 4, 5 | 0 | 32 | m |
    | Q4_K, Q5_K (scales d * s) | 4, 5 | 0 | 32 | -dmin * m |
    | Q6_K (scales d * s) | 6 | 32 | 16 | none |
    | AWQ, GPTQ, zero points z | 4, 8 | 0 | 32 to 128 | -s * z |
    | the same, where every z is one number | 4, 8 | z | 32 to 128 | none |
    | W8A8, one scale per row (codes q + 128) | 8 | 128 | K | none |
    """

    codes: Tensor
    """uint8 [N, K], each from 0 to 2 ** bits - 1."""
    scales: Tensor
    """float32 [N, K / group]."""
    offsets: Tensor | None
    """float32 [N, K / group], where a format has minima or zero points of its own for each group."""
    zero: int
    bits: int
    group: int
    """Columns that share a scale: 16, or a multiple of 32."""
    order: Tensor | None = None
    """int64 [K]: column k here is column order[k] of the weight, where groups are not neighbours there (act-order)."""
    int8_rows: bool = False
    """Multiplied by activations in int8 with a scale for each token (W8A8): a file asks for it, or it was rounded for
    that. Groups are the rows then, or the slices of a sum that ranks share."""
    steps: Tensor | None = None
    """float32 [N, K / BLOCK, 1 or 2], of K-quants: in a block every scale is the first of these times a whole number
    from -128 to 127, and every offset the second. None: not known of this weight."""

    def __post_init__(self) -> None:
        if self.bits not in BITS or not 0 <= self.zero < 1 << self.bits:
            raise ModelLoadError(f"a quantized weight has {BITS} bits and a zero in them, not {self.bits}, {self.zero}")
        n, k = self.shape
        if not in_groups(k, self.group):
            raise ModelLoadError(f"{k} columns cannot share scales in groups of {self.group}")
        for part in (self.scales, self.offsets):
            if part is not None and tuple(part.shape) != (n, k // self.group):
                raise ModelLoadError(
                    f"{k // self.group} groups in each of {n} rows do not have {tuple(part.shape)} scales or offsets"
                )

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    def to(self, device: torch.device) -> QuantizedWeight:
        offsets = None if self.offsets is None else self.offsets.to(device)
        order = None if self.order is None else self.order.to(device)
        steps = None if self.steps is None else self.steps.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), offsets=offsets, order=order,
                       steps=steps)

    def rows(self, index: Tensor | Sequence[int] | slice) -> QuantizedWeight:
        """These rows, in this order."""
        return replace(
            self,
            codes=self.codes[index],
            scales=self.scales[index],
            offsets=None if self.offsets is None else self.offsets[index],
            steps=None if self.steps is None else self.steps[index],
        )

    def columns(self, start: int, stop: int, row_scale: bool | None = None) -> QuantizedWeight:
        """Columns [start, stop). A cut inside a group leaves smaller groups with the same scales: the same weight.
        `row_scale`: whether a row has one scale, where this is a part of a weight of which it cannot be seen."""
        if self.order is not None:
            raise ModelLoadError("columns of a quantized weight in another order (act-order) cannot be cut")
        row_scale = self.scales.shape[1] == 1 if row_scale is None else row_scale
        if row_scale and start % UNIT == 0 and (stop - start) % UNIT == 0:
            return replace(self, codes=self.codes[:, start:stop], group=stop - start)
        group = self.group
        while group > UNIT and (start % group or stop % group):
            group = UNIT if group % (2 * UNIT) else group // 2
        if start % group or stop % group:
            raise ModelLoadError(f"columns {start} to {stop} cut a group of {group} of a quantized weight")
        finer = self.regrouped(group)
        part = slice(start // group, stop // group)
        whole = self.steps is not None and start % BLOCK == stop % BLOCK == 0
        return replace(
            finer,
            steps=self.steps[:, start // BLOCK : stop // BLOCK] if self.steps is not None and whole else None,
            codes=finer.codes[:, start:stop],
            scales=finer.scales[:, part],
            offsets=None if finer.offsets is None else finer.offsets[:, part],
        )

    def regrouped(self, group: int) -> QuantizedWeight:
        """The same weight with scales repeated for smaller groups."""
        times = self.group // group
        if times == 1:
            return self
        return replace(
            self,
            scales=self.scales.repeat_interleave(times, 1),
            offsets=None if self.offsets is None else self.offsets.repeat_interleave(times, 1),
            group=group,
        )

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scales, self.offsets)
        return sum(part.nbytes for part in held if part is not None)

    def dequantized(self) -> Tensor:
        """float32 [N, K]."""
        n, k = self.shape
        grouped = (self.codes.float() - self.zero).view(n, -1, self.group) * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            grouped += self.offsets.unsqueeze(-1)
        found = grouped.view(n, k)
        return found if self.order is None else found[:, self.order.argsort()]


@dataclass(frozen=True, slots=True)
class FloatWeight(CodedWeight):
    """A weight [N, K] that a checkpoint with codes holds as floats, or a part of one whose codes could not be cut."""

    floats: Tensor
    kept: bool = True
    """If not, a device may round it that would round the whole as well."""

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.floats.shape
        return n, k

    def to(self, device: torch.device) -> FloatWeight:
        return replace(self, floats=self.floats.to(device))

    def rows(self, index: Tensor | Sequence[int] | slice) -> FloatWeight:
        return replace(self, floats=self.floats[index])

    def columns(self, start: int, stop: int) -> FloatWeight:
        return replace(self, floats=self.floats[:, start:stop])

    def dequantized(self) -> Tensor:
        """In the type that it is stored in."""
        return self.floats


@dataclass(frozen=True, slots=True)
class Fp8Weight(CodedWeight):
    """A weight [N, K] in fp8 (e4m3): w[n, k] = codes[n, k] * scales[n, k // group]."""

    codes: Tensor
    """float8_e4m3fn [N, K]."""
    scales: Tensor
    """float32 [N, K / group, rounded up]."""
    group: int
    """Columns that share a scale: all of them; 128 where the file has a scale for each block of 128 x 128, or fewer
    where a rank's columns begin or end inside a block; or those of a slice of a sum that ranks share."""
    input_scale: float | None = None
    """Of the activations, where calibration fixed it; None: each row finds its own."""

    def __post_init__(self) -> None:
        n, k = self.shape
        if tuple(self.scales.shape) != (n, -(-k // self.group)):
            raise ModelLoadError(f"a weight of shape {(n, k)} in groups of {self.group} columns does not have "
                                 f"{tuple(self.scales.shape)} scales")

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> Fp8Weight:
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def rows(self, index: Tensor | Sequence[int] | slice) -> Fp8Weight:
        # torch cannot index fp8 by a list on every device: by its bytes it can.
        import torch

        codes = self.codes.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        return replace(self, codes=codes, scales=self.scales[index])

    def columns(self, start: int, stop: int, row_scale: bool | None = None) -> Fp8Weight:
        """`row_scale`: as of a quantized weight."""
        if self.scales.shape[1] == 1 if row_scale is None else row_scale:
            return replace(self, codes=self.codes[:, start:stop], group=max(1, stop - start))
        if start % self.group or (stop % self.group and stop != self.shape[1]):
            raise ModelLoadError(f"columns {start} to {stop} cut a block of {self.group} of an fp8 weight")
        part = slice(start // self.group, -(-stop // self.group))
        return replace(self, codes=self.codes[:, start:stop], scales=self.scales[:, part])

    def finer(self, runs: Sequence[tuple[int, int]], row_scale: bool | None = None) -> Fp8Weight:
        """The same weight, with scales repeated for smaller groups where one of these runs of columns begins or ends
        inside one."""
        edges = [edge for run in runs for edge in run if edge != self.shape[1]]
        group = math.gcd(self.group, *edges)
        if group == self.group or (self.scales.shape[1] == 1 if row_scale is None else row_scale):
            return self
        scales = self.scales.repeat_interleave(self.group // group, 1)[:, : -(-self.shape[1] // group)]
        return replace(self, scales=scales, group=group)

    def dequantized(self) -> Tensor:
        wide = self.scales.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        return self.codes.float() * wide


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(CodedWeight):
    """A weight [N, K] in MXFP4: w[n, k] = number of code [n, k] * 2 ** (scales[n, k // 32] - 127).

    A code has four bits: a sign, and one of eight magnitudes (e2m1)."""

    codes: Tensor
    """uint8 [N, K / 2]: two columns a byte, the first in its low half."""
    scales: Tensor
    """uint8 [N, K / 32]."""

    def __post_init__(self) -> None:
        n, k = self.shape
        if k % UNIT or tuple(self.scales.shape) != (n, k // UNIT):
            raise ModelLoadError(f"an MXFP4 weight of shape {(n, k)} does not have {tuple(self.scales.shape)} scales")

    @property
    def shape(self) -> tuple[int, int]:
        n, half = self.codes.shape
        return n, 2 * half

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> Mxfp4Weight:
        return Mxfp4Weight(self.codes.to(device), self.scales.to(device))

    def rows(self, index: Tensor | Sequence[int] | slice) -> Mxfp4Weight:
        return Mxfp4Weight(self.codes[index], self.scales[index])

    def columns(self, start: int, stop: int) -> Mxfp4Weight:
        if start % UNIT or stop % UNIT:
            raise ModelLoadError(f"columns {start} to {stop} cut a group of {UNIT} of an MXFP4 weight")
        return Mxfp4Weight(self.codes[:, start // 2 : stop // 2], self.scales[:, start // UNIT : stop // UNIT])

    def one_a_byte(self) -> Tensor:
        """uint8 [N, K]: the codes."""
        import torch

        return torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)

    def dequantized(self) -> Tensor:
        import torch

        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=self.codes.device)
        grouped = table[self.one_a_byte().to(torch.int32)].view(self.shape[0], -1, UNIT)
        return (grouped * torch.exp2(self.scales.to(torch.float32) - 127).unsqueeze(-1)).flatten(1)


def are_scales(values: Tensor) -> bool:
    """Whether numbers can be divided by all of them, and multiplied again."""
    return bool(((values > 0) & values.isfinite()).all())


def joined(parts: Sequence[QuantizedWeight], dim: int) -> QuantizedWeight:
    """Parts of one form, one below the other (dim 0) or side by side (dim 1)."""
    import torch

    if len(parts) == 1:
        return parts[0]
    group = math.gcd(*(part.group for part in parts))
    finer = [part.regrouped(group) for part in parts]
    offsets = [part.offsets for part in finer if part.offsets is not None]
    steps = [part.steps for part in finer if part.steps is not None]
    return replace(
        finer[0],
        steps=torch.cat(steps, dim) if len(steps) == len(parts) else None,
        codes=torch.cat([part.codes for part in finer], dim),
        scales=torch.cat([part.scales for part in finer], dim),
        offsets=torch.cat(offsets, dim) if offsets else None,
    )


def joined_fp8(parts: Sequence[Fp8Weight], dim: int) -> Fp8Weight:
    """Parts of one form, one below the other (dim 0) or, where they are whole blocks of one weight, side by side."""
    import torch

    if len(parts) == 1:
        return parts[0]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts], dim).view(torch.float8_e4m3fn)
    one_scale = dim == 1 and parts[0].scales.shape[1] == 1 and all(
        torch.equal(part.scales, parts[0].scales) for part in parts)
    scales = parts[0].scales if one_scale else torch.cat([part.scales for part in parts], dim)
    group = codes.shape[1] if one_scale else parts[0].group
    return replace(parts[0], codes=codes, scales=scales, group=group)
