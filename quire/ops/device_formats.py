"""Quantized weights on a GPU: which formats stay packed there, and which kernel multiplies each by how many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import EngineError, UnsupportedModelError
from quire.kernels.quantized import CodedWeight, Fp8Weight, QuantizedWeight, Rounding, UnreadWeight, WeightUse
from quire.kernels.quantized import joined as joined_codes
from quire.kernels.triton import (
    activation,
    fp8_rows,
    gemm_table,
    linear_codes,
    linear_fixed,
    linear_fp8,
    linear_prefetch,
    norm,
)
from quire.kernels.triton.fp8_rows import FP8, LARGEST, Fp8Rows
from quire.kernels.triton.linear_row import RowShape, linear_row

_EARLY_ROWS = 512
_UNIT = 16
"""Features and columns of an fp8 weight come in multiples of so many: what the library's GEMM takes."""


@dataclass(slots=True)
class Fp8Linear:
    """An fp8 weight [out_features, in_features] on the device, multiplied by rows in fp8 (W8A8)."""

    weight: Tensor
    scales: Tensor
    """float32 [out_features], or [out_features, in_features / 128]."""
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
    """A weight of 4-bit codes on the device, multiplied by rows in their own type (W4A16)."""

    packed: linear_codes.PackedCodes
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.packed.features

    @property
    def in_features(self) -> int:
        return self.packed.width

    @property
    def nbytes(self) -> int:
        held = (self.packed.words, self.packed.scales, self.bias)
        return sum(each.nbytes for each in held if each is not None)


class DeviceFormats:
    """The formats of one device. `rounding`: what weights that the file stores as floats become at load; None: they
    stay floats."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, rounding: Rounding | None, *, deterministic: bool,
        pdl: bool, scratch: linear_prefetch.PrefetchScratch | None,
    ) -> None:  # fmt: skip
        self._device = device
        self._dtype = dtype
        self._rounding = rounding
        self._deterministic = deterministic
        self._pdl = pdl
        self._scratch = scratch
        self._has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)

    # ---- what is kept

    def quantized(self, weight: Tensor | CodedWeight, use: WeightUse) -> CodedWeight | None:
        """The codes that are multiplied in place of a weight; None: floats are."""
        if self._dtype == torch.float32 or use in (WeightUse.VOCABULARY, WeightUse.EXACT):
            return None
        if use is WeightUse.EXPERT:
            if self._rounding is not None and (self._rounding.fp8 or self._rounding.bits):
                raise UnsupportedModelError("quantization of experts is not built for GPUs yet: leave it out")
            return None
        if isinstance(weight, UnreadWeight):
            weight = weight.whole()
        if isinstance(weight, Fp8Weight):
            return weight if self._has_fp8 and _fits(weight) else None
        if isinstance(weight, QuantizedWeight):
            return weight if linear_codes.packs(weight) else None
        if isinstance(weight, Tensor) and self._rounding is not None:
            return self._rounded(weight, self._rounding)
        return None

    def _rounded(self, weight: Tensor, rounding: Rounding) -> CodedWeight | None:
        features, width = weight.shape
        if rounding.fp8:
            return None if features % _UNIT or width % _UNIT else to_fp8(weight)
        group = rounding.group or width
        if rounding.bits != 4 or width % group or width % linear_codes.COLUMNS:
            return None
        return to_codes(weight, group, rounding.zero_points)

    def pack(self, parts: Sequence[CodedWeight], bias: Tensor | None) -> Fp8Linear | CodesLinear | None:
        """The parts one below the other; None where they are of different formats, and are multiplied as floats."""
        bias = None if bias is None else bias.to(self._device, self._dtype).contiguous()
        fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        codes = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(fp8) == len(parts) and len({part.scales.shape[1] == 1 for part in fp8}) == 1:
            return self._pack_fp8(fp8, bias)
        if len(codes) == len(parts) and len({(part.group, part.zero) for part in codes}) == 1:
            # Parts with offsets and parts without are one where those without get offsets of zero.
            if any(part.offsets is not None for part in codes):
                codes = [part if part.offsets is not None else _with_offsets(part) for part in codes]
            return CodesLinear(linear_codes.pack(joined_codes(codes, 0), self._dtype), bias)
        return None

    def _pack_fp8(self, parts: list[Fp8Weight], bias: Tensor | None) -> Fp8Linear:
        weight = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(FP8).to(self._device)
        scales = torch.cat([part.scales for part in parts]).to(self._device)
        # Rows are quantized once for all parts: by the largest scale nothing is cut off.
        given = [part.input_scale for part in parts if part.input_scale is not None]
        fixed = torch.tensor([max(given)], device=self._device) if len(given) == len(parts) else None
        return Fp8Linear(weight, scales.squeeze(1).contiguous() if scales.shape[1] == 1 else scales, bias, fixed)

    # ---- rows

    def _early(self, rows: int) -> bool:
        return self._pdl and rows <= _EARLY_ROWS

    def norm_for(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Any) -> Fp8Rows | None:
        """The norm of residual += x as the reader wants its rows; None: as they are."""
        if not isinstance(reader, Fp8Linear):
            return None
        return fp8_rows.norm_rows(x, residual, weight, eps, reader.input_scale, pdl=self._early(x.shape[0]))

    def gate_for(self, gate_up: Tensor, kind: str, reader: Any) -> Fp8Rows | None:
        if not isinstance(reader, Fp8Linear):
            return None
        return fp8_rows.quantize_rows(gate_up, reader.input_scale, gated=kind, pdl=self._early(gate_up.shape[0]))

    # ---- GEMMs

    def linear(
        self, x: Tensor | Fp8Rows, w: Fp8Linear | CodesLinear, residual: Tensor | None, out: Tensor | None
    ) -> Tensor:
        if isinstance(w, CodesLinear):
            if isinstance(x, Fp8Rows):
                raise EngineError("rows in fp8 for a weight of integer codes")
            return self._codes(x, w, residual, out)
        if isinstance(x, Tensor):
            if x.shape[0] == 1 and not self._deterministic and w.scales.dim() == 1 and w.input_scale is None:
                choice = gemm_table.lookup(1, w.out_features, w.in_features, x.dtype, gemm_table.FP8 + gemm_table.PLAIN)
                if choice.kernel == "row":
                    return linear_row(x, w.weight, w.bias, residual, scales=w.scales, out=out,
                                      sizes=RowShape(*choice.sizes), pdl=self._pdl)
            x = fp8_rows.quantize_rows(x, w.input_scale, pdl=self._early(x.shape[0]))
        return self._fp8(x, w, residual, out)

    def norm_linear(
        self, x: Tensor, gain: Tensor, eps: float, w: Fp8Linear | CodesLinear, gated: str | None, out: Tensor | None
    ) -> Tensor:
        """linear(rms_norm(x)), and the gated activation of it, of one row or two."""
        if isinstance(w, CodesLinear):
            found = self._codes(norm.rms_norm(x, gain, eps, pdl=self._pdl), w, None, None if gated else out)
        else:
            form = gemm_table.FP8 + (gemm_table.GATED if gated else gemm_table.NORM)
            choice = gemm_table.lookup(1, w.out_features, w.in_features, x.dtype, form)
            if choice.kernel == "row" and x.shape[0] == 1 and w.scales.dim() == 1 and w.input_scale is None:
                return linear_row(x, w.weight, w.bias, None, scales=w.scales, norm=gain, eps=eps, gated=gated, out=out,
                                  sizes=RowShape(*choice.sizes), pdl=self._pdl)
            rows = fp8_rows.norm_rows(x, None, gain, eps, w.input_scale, pdl=self._pdl)
            found = self._fp8(rows, w, None, None if gated else out)
        return activation.act_mul(found, gated, pdl=self._pdl) if gated else found

    def _fp8(self, x: Fp8Rows, w: Fp8Linear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        rows = x.shape[0]
        blocks = w.scales.dim() == 2
        if not self._deterministic and not blocks:
            form = gemm_table.FP8 + gemm_table.PLAIN
            choice = gemm_table.lookup(rows, w.out_features, w.in_features, self._dtype, form)
            if choice.kernel == "prefetch":
                found = self._prefetch(choice, x, w, residual, out)
                if found is not None:
                    return found
            if self._device.type == "cuda" and choice.kernel != "tiles":
                return self._library(x, w, residual, out)
        into = torch.empty(rows, w.out_features, dtype=self._dtype, device=x.codes.device) if out is None else out
        return linear_fp8.linear_fp8(x.codes, w.weight, (w.scales, x.scales), w.bias, residual, out=into)

    def _prefetch(
        self, choice: gemm_table.GemmChoice, x: Fp8Rows, w: Fp8Linear, residual: Tensor | None, out: Tensor | None
    ) -> Tensor | None:
        sizes = linear_prefetch.PrefetchShape(*choice.sizes)
        if self._scratch is None or not linear_prefetch.is_common(x.shape[0]):
            return None
        if not linear_prefetch.fits(x.codes, w.weight, sizes, self._scratch):
            return None
        if out is None:
            out = torch.empty(x.shape[0], w.out_features, dtype=self._dtype, device=x.codes.device)
        return linear_prefetch.linear_prefetch(
            x.codes, w.weight, w.bias, residual, sizes=sizes, scratch=self._scratch, scales=(w.scales, x.scales),
            out=out, pdl=self._early(x.shape[0]),
        )  # fmt: skip

    def _library(self, x: Fp8Rows, w: Fp8Linear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        found = torch._scaled_mm(
            x.codes, w.weight.t(), scale_a=x.scales[:, None], scale_b=w.scales[None], bias=w.bias,
            out_dtype=self._dtype, use_fast_accum=True,
        )  # fmt: skip
        found = found if residual is None else found.add_(residual)
        return found if out is None else out.copy_(found)

    def _codes(self, x: Tensor, w: CodesLinear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if not self._deterministic and self._scratch is not None and linear_prefetch.is_common(rows):
            choice = gemm_table.lookup(rows, w.out_features, w.in_features, x.dtype, gemm_table.INT4 + gemm_table.PLAIN)
            sizes = linear_codes.CodesShape(*choice.sizes) if choice.kernel == "codes" else None
            if sizes is not None and linear_codes.fits(rows, w.packed, sizes, self._scratch):
                return linear_codes.linear_codes(
                    x, w.packed, w.bias, residual, sizes=sizes, scratch=self._scratch, out=out, pdl=self._early(rows)
                )
        floats = torch.empty(w.out_features, w.in_features, dtype=x.dtype, device=x.device)
        linear_codes.unpack(w.packed, floats)
        if self._deterministic:
            found = linear_fixed.linear_fixed(x, floats, w.bias, residual)
        else:
            found = torch.nn.functional.linear(x, floats, w.bias)
            found = found if residual is None else found.add_(residual)
        return found if out is None else out.copy_(found)


def to_fp8(weight: Tensor) -> Fp8Weight:
    """A weight of floats with a scale for each feature."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return Fp8Weight((wide / scales).clamp(-LARGEST, LARGEST).to(FP8), scales, weight.shape[1])


def to_codes(weight: Tensor, group: int, zero_points: bool) -> QuantizedWeight:
    """A weight of floats as 4-bit codes with a scale for each group of columns, and an offset with `zero_points`."""
    features, width = weight.shape
    wide = weight.float().view(features, -1, group)
    if zero_points:
        least, most = wide.amin(-1), wide.amax(-1)
        scales = ((most - least) / 15).clamp(min=1e-12)
        codes = (wide - least[:, :, None]).div_(scales[:, :, None])
    else:
        least, scales = None, (wide.abs().amax(-1) / 7.5).clamp(min=1e-12)
        codes = wide / scales[:, :, None] + 8
    codes = codes.round_().clamp_(0, 15).to(torch.uint8).view(features, width)
    return QuantizedWeight(codes, scales, least, 0 if zero_points else 8, 4, group)


def _fits(weight: Fp8Weight) -> bool:
    """Whether kernels multiply it: sizes in multiples of 16, one scale a feature or one for each 128 columns."""
    features, width = weight.shape
    scaled = weight.scales.shape[1] == 1 or weight.group == linear_fp8.SCALE_BLOCK
    return features % _UNIT == 0 and width % _UNIT == 0 and scaled


def _with_offsets(part: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(part.codes, part.scales, torch.zeros_like(part.scales), part.zero, part.bits, part.group)
