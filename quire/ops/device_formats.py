"""Quantized weights on a GPU: which formats stay packed there, and which kernel multiplies each by how many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.quantized import (
    CodedWeight,
    FloatWeight,
    Fp8Weight,
    QuantizedWeight,
    Rounding,
    WeightUse,
)
from quire.kernels.quantized import joined as joined_codes
from quire.kernels.slices import Slices
from quire.kernels.triton import (
    activation,
    coded_rows,
    codes_few,
    codes_row,
    codes_tiles,
    gemm_table,
    linear_bytes,
    linear_codes,
    linear_fixed,
    linear_planes,
    linear_prefetch,
    linear_sliced_bytes,
    norm,
)
from quire.kernels.triton.coded_rows import FP8, CodedRows
from quire.kernels.triton.linear_row import RowShape, linear_row
from quire.ops import device_experts
from quire.ops.cpu_integer import group_of
from quire.ops.device_weights import (
    BytesLinear,
    CodesLinear,
    DeviceLinear,
    QuantizedLinear,
    SplitLinear,
    to_codes,
    to_fp8,
    to_int8,
)
from quire.parallel.collectives import TensorGroup

_EARLY_ROWS = 512
_UNIT = 16
"""Features and columns of a weight of bytes come in multiples of so many: what the library's GEMM takes."""
_ROW_KERNELS = ("row", "norm_then_row")
_ROW_SHAPE = RowShape(1, 2048, 4)
"""Of bytes that the table leaves to a kernel which cannot multiply them: int8, or on another chip."""
_BYTES_ROW_KERNEL = "bytes_row"
_CODES_ROW_KERNELS = ("codes_row", "norm_then_codes_row")
_CODES_TILES_KERNEL = "codes_tiles"
_CODES_RINGS = ((4, 2, 1), (3, 2, 1), (5, 1, 1))
"""Of codes that the table leaves to tiles or to a ring which cannot multiply them: those in groups of 32 columns, or of
columns that are no whole number of the ring's turns."""
_SMALL, _NARROW = 8 << 20, 1536
"""Weights of a matrix, and columns of it, up to which no ring is worth its beginning and end for one row (H200,
2026-11-18, groups of 32: 960 x 576 in 2.1 us, by the ring 3.2; 576 x 1,536 3.3 and 3.7; 1,024 x 2,048 5.6 and 4.1)."""
INT8_TILES = ((16, (16, 32, 256, 4, 4)), (64, (64, 64, 128, 4, 4)), (1 << 62, (128, 256, 128, 8, 3)))
"""Up to so many rows: the tile of an int8 GEMM. Not timed yet."""


class DeviceFormats:
    """The formats of one device. `rounding`: what weights that the file stores as floats become at load; None: they
    stay floats. `plain` multiplies those."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, rounding: Rounding | None,
        plain: Callable[[Tensor, DeviceLinear], Tensor], *, deterministic: bool, pdl: bool,
        scratch: linear_prefetch.PrefetchScratch | None,
    ) -> None:  # fmt: skip
        self._device = device
        self._dtype = dtype
        self._rounding = rounding
        self._plain = plain
        self._deterministic = deterministic
        self._pdl = pdl
        self._scratch = scratch
        self._has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)

    # ---- what is kept

    def quantized(
        self, weight: Tensor | CodedWeight, slices: Slices | None, use: WeightUse
    ) -> CodedWeight | None:
        """The codes that are multiplied in place of a weight; None: floats are."""
        if self._dtype == torch.float32 or use in (WeightUse.VOCABULARY, WeightUse.EXACT):
            return None
        if use is WeightUse.EXPERT:
            return device_experts.quantized(weight, self._rounding)
        slices = slices if self._deterministic else None
        if isinstance(weight, Fp8Weight):
            return weight if self._has_fp8 and self._fits(weight, slices) else None
        if isinstance(weight, QuantizedWeight):
            kept = not (slices is not None and weight.order is not None) and self._packs(weight, slices)
            return weight if kept else None
        if isinstance(weight, Tensor) and self._rounding is not None:
            return self._rounded(weight, slices, self._rounding)
        return None

    def _fits(self, weight: Fp8Weight, slices: Slices | None) -> bool:
        """Whether kernels multiply it: a scale a feature, or one for each 128 columns; in slices for any number of
        columns. In deterministic mode that must not depend on how much of a weight a rank has."""
        scaled = slices is not None or weight.scales.shape[1] == 1 or weight.group == linear_bytes.SCALE_BLOCK
        return scaled and (self._deterministic or _in_units(weight.shape))

    def _packs(self, weight: QuantizedWeight, slices: Slices | None) -> bool:
        """Whether a kernel has a form for it, and for each slice of it that a rank may have."""
        if _is_int8(weight):
            whole = weight.scales.shape[1] == 1 if slices is None else slices.divisible_by(linear_planes.UNIT)
            return whole and (self._deterministic or weight.shape[0] % _UNIT == 0)
        if linear_codes.packs(weight):
            return not _cuts(slices, weight.shape[1], linear_codes.COLUMNS)
        return linear_planes.packs(weight) and not _cuts(slices, weight.shape[1], linear_planes.UNIT)

    def _rounded(self, weight: Tensor, slices: Slices | None, rounding: Rounding) -> CodedWeight | None:
        width = weight.shape[1]
        if rounding.whole_rows:
            if not self._deterministic and not _in_units(weight.shape):
                return None
            if rounding.fp8:
                return to_fp8(weight, slices)
            units = width if slices is None else slices.common
            return None if units % linear_planes.UNIT else to_int8(weight, slices)
        group = (rounding.group or width) if slices is None else group_of(width, slices, rounding)
        if rounding.bits is None or width % group or group % linear_planes.UNIT:
            return None
        found = to_codes(weight, group, rounding.zero_points, rounding.bits)
        return found if self._packs(found, slices) else None

    def pack(
        self, parts: Sequence[CodedWeight], bias: Tensor | None, slices: Slices | None = None
    ) -> QuantizedLinear:
        """The parts one below the other; runs of neighbours that have one format are multiplied as one."""
        bias = None if bias is None else bias.to(self._device, self._dtype).contiguous()
        slices = slices if self._deterministic else None
        found: list[BytesLinear | CodesLinear | DeviceLinear] = []
        start = 0
        for _, run in groupby(_by_format(parts), key=lambda pair: pair[0]):
            some = [part for _, part in run]
            end = start + sum(part.shape[0] for part in some)
            found.append(self._pack_run(some, None if bias is None else bias[start:end], slices))
            start = end
        whole = found[0] if len(found) == 1 else None
        return SplitLinear(tuple(found)) if whole is None or isinstance(whole, DeviceLinear) else whole

    def _pack_run(
        self, parts: list[CodedWeight], bias: Tensor | None, slices: Slices | None
    ) -> BytesLinear | CodesLinear | DeviceLinear:
        floats = [part.floats.to(self._device, self._dtype) for part in parts if isinstance(part, FloatWeight)]
        if floats:
            return DeviceLinear(torch.cat(floats), bias, slices)
        fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        if fp8:
            return self._pack_fp8(fp8, bias, slices)
        codes = [part for part in parts if isinstance(part, QuantizedWeight)]
        # Parts with offsets and parts without are one where those without get offsets of zero.
        if any(part.offsets is not None for part in codes):
            codes = [part if part.offsets is not None else _with_offsets(part) for part in codes]
        whole = joined_codes(codes, 0)
        if _is_int8(whole):
            return _bytes_linear((whole.codes ^ 128).view(torch.int8), whole.scales, bias, None, whole.group, slices)
        if linear_codes.packs(whole):
            return CodesLinear(linear_codes.pack(whole, self._dtype), bias, slices, whole.order)
        return CodesLinear(linear_planes.pack(whole, self._deterministic), bias, slices, whole.order)

    def _pack_fp8(self, parts: list[Fp8Weight], bias: Tensor | None, slices: Slices | None) -> BytesLinear:
        weight = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(FP8).to(self._device)
        scales = torch.cat([part.scales for part in parts]).to(self._device)
        # Rows are quantized once for all parts: by the largest scale nothing is cut off.
        given = [part.input_scale for part in parts if part.input_scale is not None]
        fixed = torch.tensor([max(given)], device=self._device) if len(given) == len(parts) else None
        return _bytes_linear(weight, scales, bias, fixed, parts[0].group, slices)

    # ---- rows

    def _early(self, rows: int) -> bool:
        return self._pdl and rows <= _EARLY_ROWS

    def norm_for(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Any) -> CodedRows | None:
        """The norm of residual += x as the reader wants its rows; None: as they are."""
        if not isinstance(reader, BytesLinear):
            return None
        return coded_rows.norm_rows(x, residual, weight, eps, reader.input_scale, dtype=reader.weight.dtype,
                                    pdl=self._early(x.shape[0]))

    def gate_for(self, gate_up: Tensor, kind: str, reader: Any) -> CodedRows | None:
        """None too where ranks may share the reader's sum: a rank has some columns of such a row, whose scale is that
        of all, and every number of ranks shall run the same kernels."""
        if not isinstance(reader, BytesLinear) or reader.slices is not None:
            return None
        return self._rows(gate_up, reader, kind)

    def _rows(self, x: Tensor, reader: BytesLinear, gated: str | None = None) -> CodedRows:
        return coded_rows.quantize_rows(x, reader.input_scale, gated=gated, dtype=reader.weight.dtype,
                                        pdl=self._early(x.shape[0]))

    def shared_rows(self, x: Tensor, w: BytesLinear, ranks: TensorGroup) -> CodedRows:
        """Rows of which every rank has some columns, by the scales of whole rows: ranks exchange their largest numbers
        first, unless calibration fixed the scale."""
        peaks = None
        if w.input_scale is None:
            room = ranks.room(x.shape[0], 1)
            peaks = ranks.maximum(coded_rows.row_peaks(x, None if room is None else room.view(-1)))
        return coded_rows.quantize_rows(x, w.input_scale, peaks=peaks, dtype=w.weight.dtype)

    # ---- GEMMs

    def linear(
        self, x: Tensor | CodedRows, w: QuantizedLinear, residual: Tensor | None, out: Tensor | None
    ) -> Tensor:
        if isinstance(w, BytesLinear):
            return self._bytes(x, w, residual, out)
        if isinstance(x, CodedRows):
            raise EngineError("rows in fp8 or int8 for a weight of integer codes")
        if isinstance(w, CodesLinear):
            return self._codes(x, w, residual, out)
        parts = [self._plain(x, part) if isinstance(part, DeviceLinear) else self.linear(x, part, None, None)
                 for part in w.parts]
        found = torch.cat(parts, 1)
        found = found if residual is None else found.add_(residual)
        return found if out is None else out.copy_(found)

    def linear_nodes(self, x: Tensor | CodedRows, w: CodesLinear | BytesLinear, out: Tensor | None) -> Tensor:
        """See `Ops.linear_nodes`: only in deterministic mode."""
        if w.slices is None:
            raise EngineError("a weight without slices has no tree of sums: use linear")
        if isinstance(w, BytesLinear):
            if isinstance(x, Tensor) or w.sliced is None:
                raise EngineError("a rank's columns of a row in fp8 or int8 have the scale of all: use shared_rows")
            return linear_sliced_bytes.linear_sliced_nodes(x.codes, x.scales, w.sliced, out=out)
        if isinstance(x, CodedRows):
            raise EngineError("rows in fp8 or int8 for a weight of integer codes")
        return linear_fixed.linear_fixed_nodes(x, self._floats(x, w), w.slices, out=out)

    def norm_linear(
        self, x: Tensor, gain: Tensor, eps: float, w: QuantizedLinear, gated: str | None, out: Tensor | None
    ) -> Tensor:
        """linear(rms_norm(x)), and the gated activation of it, of one row or two."""
        if not isinstance(w, BytesLinear):
            one = self._norm_codes_row(x, gain, eps, w, gated, out) if isinstance(w, CodesLinear) else None
            if one is not None:
                return one
            found = self.linear(norm.rms_norm(x, gain, eps, pdl=self._pdl), w, None, None if gated else out)
        else:
            one = self._bytes_row(x, w, gain=gain, eps=eps, gated=gated, out=out)
            if one is not None:
                return one
            rows = coded_rows.norm_rows(x, None, gain, eps, w.input_scale, dtype=w.weight.dtype, pdl=self._pdl)
            found = self._bytes(rows, w, None, None if gated else out)
        return activation.act_mul(found, gated, pdl=self._pdl) if gated else found

    def _norm_codes_row(
        self, x: Tensor, gain: Tensor, eps: float, w: CodesLinear, gated: str | None, out: Tensor | None
    ) -> Tensor | None:
        """By the kernel of one row of 4-bit codes; None where that should not run."""
        row = self._codes_row_choice(x, w, gemm_table.GATED if gated else gemm_table.NORM)
        if row is None:
            few = self._few_codes(x, w, gated is not None) if w.order is None else None
            return None if few is None else codes_few.linear_codes_few(x, few, w.bias, norm=gain, eps=eps, gated=gated,
                                                                       out=out, pdl=self._pdl)
        packed, sizes, apart = row
        x = norm.rms_norm(x, gain, eps, pdl=self._pdl) if apart else x
        return codes_row.linear_codes_row(x, packed, w.bias, norm=None if apart else gain, eps=eps, gated=gated,
                                          out=out, sizes=sizes, scratch=self._scratch, pdl=self._pdl)

    def _codes_row_choice(
        self, x: Tensor, w: CodesLinear, form: str
    ) -> tuple[linear_codes.PackedCodes, codes_row.CodesRowShape, bool] | None:
        """A weight of 4-bit codes, how the kernel of one row runs it, and whether its norm is a kernel of its own; None
        where the table names another kernel, or that one cannot."""
        if x.shape[0] != 1 or self._deterministic or self._scratch is None:
            return None
        if not isinstance(w.packed, linear_codes.PackedCodes) or (w.order is not None and form != gemm_table.PLAIN):
            return None
        choice = gemm_table.lookup(1, w.out_features, w.in_features, x.dtype, gemm_table.INT4 + form)
        if choice.kernel not in _CODES_ROW_KERNELS:
            return None
        sizes = codes_row.CodesRowShape(*choice.sizes)
        apart = choice.kernel != _CODES_ROW_KERNELS[0]
        normed = form != gemm_table.PLAIN and not apart
        if not codes_row.fits(w.packed, sizes, form == gemm_table.GATED, normed, self._scratch):
            return None
        return w.packed, sizes, apart

    def _few_codes(self, x: Tensor, w: CodesLinear, gated: bool = False) -> linear_codes.PackedCodes | None:
        """A weight of 4-bit codes that is multiplied without tensor cores: a small one by one row, or any by few rows
        where there are no rings. None where that should not run."""
        packed = w.packed
        if self._deterministic or not isinstance(packed, linear_codes.PackedCodes):
            return None
        small = x.shape[0] == 1 and packed.features * packed.width <= _SMALL and packed.width <= _NARROW
        few = (small or self._scratch is None) and codes_few.fits(x.shape[0], packed, gated)
        return packed if few else None

    def _bytes_row(
        self, x: Tensor, w: BytesLinear, residual: Tensor | None = None, *, gain: Tensor | None = None,
        eps: float = 0.0, gated: str | None = None, out: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """By a kernel of one row, which keeps its own type; None: rows become codes."""
        if x.shape[0] != 1 or self._deterministic or w.input_scale is not None:
            return None
        form = gemm_table.PLAIN if gain is None else gemm_table.GATED if gated else gemm_table.NORM
        choice = gemm_table.lookup(1, w.out_features, w.in_features, x.dtype, gemm_table.FP8 + form)
        row = RowShape(*choice.sizes) if choice.kernel in _ROW_KERNELS else None
        if choice.kernel == _BYTES_ROW_KERNEL:
            wide = codes_row.CodesRowShape(*choice.sizes)
            if self._scratch is not None and codes_row.fits_bytes(w.weight, w.scales, wide, gated is not None,
                                                                  gain is not None, self._scratch):  # fmt: skip
                return codes_row.linear_bytes_row(x, w.weight, w.scales, w.bias, residual, norm=gain, eps=eps,
                                                  gated=gated, out=out, sizes=wide, scratch=self._scratch,
                                                  pdl=self._pdl)
            row = _ROW_SHAPE
        if row is None or w.scales.dim() != 1:
            return None
        if choice.kernel == _ROW_KERNELS[1] and gain is not None:
            x, gain = norm.rms_norm(x, gain, eps, pdl=self._pdl), None
        return linear_row(x, w.weight, w.bias, residual, scales=w.scales, norm=gain, eps=eps, gated=gated, out=out,
                          sizes=row, pdl=self._pdl)

    def _bytes(self, x: Tensor | CodedRows, w: BytesLinear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        if isinstance(x, Tensor):
            one = self._bytes_row(x, w, residual, out=out)
            if one is not None:
                return one
            x = self._rows(x, w)
        rows, sizes = x.shape[0], linear_bytes.BytesShape()
        if w.weight.dtype == torch.int8 and not self._deterministic:
            sizes = linear_bytes.BytesShape(*next(tile for most, tile in INT8_TILES if rows <= most))
        elif not self._deterministic and w.scales.dim() == 1:
            form = gemm_table.FP8 + gemm_table.PLAIN
            choice = gemm_table.lookup(rows, w.out_features, w.in_features, self._dtype, form)
            if choice.kernel == "prefetch":
                found = self._prefetch(choice, x, w, residual, out)
                if found is not None:
                    return found
            if self._device.type == "cuda" and choice.kernel != "tiles":
                return self._library(x, w, residual, out)
        into = torch.empty(rows, w.out_features, dtype=self._dtype, device=x.codes.device) if out is None else out
        if w.sliced is not None:
            return linear_sliced_bytes.linear_sliced(x.codes, x.scales, w.sliced, w.bias, residual, out=into)
        return linear_bytes.linear_bytes(x.codes, w.weight, (w.scales, x.scales), w.bias, residual, out=into,
                                         sizes=sizes)

    def _prefetch(
        self, choice: gemm_table.GemmChoice, x: CodedRows, w: BytesLinear, residual: Tensor | None, out: Tensor | None
    ) -> Tensor | None:
        sizes = linear_prefetch.PrefetchShape(*choice.sizes).in_turns_of(
            w.in_features // linear_prefetch.columns(x.codes.dtype))
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

    def _library(self, x: CodedRows, w: BytesLinear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        found = torch._scaled_mm(
            x.codes, w.weight.t(), scale_a=x.scales[:, None], scale_b=w.scales[None], bias=w.bias,
            out_dtype=self._dtype, use_fast_accum=True,
        )  # fmt: skip
        found = found if residual is None else found.add_(residual)
        return found if out is None else out.copy_(found)

    def _codes(self, x: Tensor, w: CodesLinear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        x = x if w.order is None else x.index_select(1, w.order)
        if not self._deterministic:
            found = self._packed_gemm(x, w, residual, out)
            if found is not None:
                return found
        floats = self._floats(x, w)
        if self._deterministic:
            found = linear_fixed.linear_fixed(x, floats, w.bias, residual, w.slices)
        else:
            found = torch.nn.functional.linear(x, floats, w.bias)
            found = found if residual is None else found.add_(residual)
        return found if out is None else out.copy_(found)

    def _packed_gemm(self, x: Tensor, w: CodesLinear, residual: Tensor | None, out: Tensor | None) -> Tensor | None:
        """By a kernel that reads codes; None: so many rows are better multiplied by floats."""
        rows, packed = x.shape[0], w.packed
        if isinstance(packed, linear_planes.PackedPlanes):
            if rows > linear_planes.MOST_ROWS:
                return None
            return linear_planes.linear_planes(x, packed, w.bias, residual, out=out, pdl=self._early(rows))
        row = self._codes_row_choice(x, w, gemm_table.PLAIN)
        if row is not None:
            return codes_row.linear_codes_row(x, packed, w.bias, residual, out=out, sizes=row[1],
                                              scratch=self._scratch, pdl=self._pdl)
        if self._few_codes(x, w) is not None:
            return codes_few.linear_codes_few(x, packed, w.bias, residual, out=out, pdl=self._early(rows))
        if self._scratch is None:
            return None
        choice = self._codes_choice(x, w)
        if choice.kernel == _CODES_TILES_KERNEL:
            tiles = codes_tiles.CodesTilesShape(*choice.sizes)
            if codes_tiles.fits(rows, packed, tiles, self._scratch):
                return codes_tiles.linear_codes_tiles(x, packed, w.bias, residual, sizes=tiles, scratch=self._scratch,
                                                      out=out, pdl=self._early(rows))
        rings = {"codes": (choice.sizes, *_CODES_RINGS), _CODES_TILES_KERNEL: _CODES_RINGS}.get(choice.kernel, ())
        for ring in rings if linear_prefetch.is_common(rows) else ():
            sizes = linear_codes.CodesShape(*ring)
            if linear_codes.fits(rows, packed, sizes, self._scratch):
                return linear_codes.linear_codes(x, packed, w.bias, residual, sizes=sizes, scratch=self._scratch,
                                                 out=out, pdl=self._early(rows))
        return None

    def _codes_choice(self, x: Tensor, w: CodesLinear) -> gemm_table.GemmChoice:
        """As the table has it; a weight that the kernel of one row cannot multiply is taken as one of two rows."""
        form = gemm_table.INT4 + gemm_table.PLAIN
        choice = gemm_table.lookup(x.shape[0], w.out_features, w.in_features, x.dtype, form)
        if choice.kernel in _CODES_ROW_KERNELS:
            choice = gemm_table.lookup(2, w.out_features, w.in_features, x.dtype, form)
        return choice

    def _floats(self, x: Tensor, w: CodesLinear) -> Tensor:
        """The weight in the activations' type, in scratch memory."""
        floats = torch.empty(w.out_features, w.in_features, dtype=x.dtype, device=x.device)
        if isinstance(w.packed, linear_planes.PackedPlanes):
            return linear_planes.unpack(w.packed, floats)
        return linear_codes.unpack(w.packed, floats)


def _in_units(shape: tuple[int, int] | torch.Size) -> bool:
    """Whether the library's GEMM takes such a weight of bytes."""
    return shape[0] % _UNIT == 0 and shape[1] % _UNIT == 0


def _bytes_linear(
    weight: Tensor, scales: Tensor, bias: Tensor | None, fixed: Tensor | None, group: int, slices: Slices | None
) -> BytesLinear:
    if scales.shape[1] == 1:
        return BytesLinear(weight, scales.squeeze(1).contiguous(), bias, fixed, None, slices)
    return BytesLinear(weight, scales.contiguous(), bias, fixed, group, slices)


def _is_int8(weight: QuantizedWeight) -> bool:
    """Whether it is multiplied by rows in int8: codes around zero."""
    plain = weight.offsets is None and weight.order is None
    return weight.int8_rows and weight.bits == 8 and weight.zero == 128 and plain


def _cuts(slices: Slices | None, width: int, unit: int) -> bool:
    """Whether units of columns do not fill a weight, or a border of the sum's slices lies inside one."""
    borders = () if slices is None else (slices.border(index) for index in range(slices.total + 1))
    return width % unit != 0 or any(border % unit for border in borders)


def _by_format(parts: Sequence[CodedWeight]) -> list[tuple[object, CodedWeight]]:
    """Each part with what must be equal for it to be joined with its neighbour."""
    found: list[tuple[object, CodedWeight]] = []
    for place, part in enumerate(parts):
        kind: object = place
        if isinstance(part, FloatWeight):
            kind = "floats"
        elif isinstance(part, Fp8Weight):
            kind = "fp8", part.scales.shape[1] == 1
        elif isinstance(part, QuantizedWeight):
            kind = part.group, part.zero, part.bits, part.int8_rows, _same_order(found, part, place)
        found.append((kind, part))
    return found


def _same_order(before: list[tuple[object, CodedWeight]], part: QuantizedWeight, place: int) -> int:
    """A number for the order of a part's columns: -1 for none, else the place of the first neighbour that has it."""
    if part.order is None:
        return -1
    while place > 0:
        other = before[place - 1][1]
        if not isinstance(other, QuantizedWeight) or other.order is None or not torch.equal(other.order, part.order):
            break
        place -= 1
    return place


def _with_offsets(part: QuantizedWeight) -> QuantizedWeight:
    return replace(part, offsets=torch.zeros_like(part.scales))
