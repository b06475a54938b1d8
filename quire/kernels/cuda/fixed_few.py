"""GEMMs of up to eight rows in deterministic mode on Hopper, with the norm before them or the residual after them
(`fixed_few.cu`): the bits of the kernels that many rows have.

Those are `norm.rms_norm`, `linear_fixed`, `activation.act_mul`, and the sum of a rounded result and the residual that
`norm.add_rms_norm` begins with. A step of one row has nine kernels a layer with them, and five with this one. Each
thread block asks for all its weights at once, before the kernel before has ended: it is for weights that the shared
memory of a chip holds (`plan` declines others).

`available` is false without Hopper, without NVRTC, or where the driver refuses: the kernels above run then.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels.cuda import loading, nvrtc
from quire.kernels.cuda.driver import Kernel, Launch
from quire.kernels.slices import Slices
from quire.kernels.triton.linear_prefetch import multiprocessors

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
MOST_ROWS = 8
TILE, _SEGMENT, _STEP = 8, 256, 32
"""Features of a warp; columns that a warp norms at once; columns of two instructions."""
_MOST_SHARED = 120 << 10
"""Bytes of a thread block: blocks of the next kernel, with weights of its own on their way, fit beside it."""
_MOST_BLOCKS = 2
"""Of a multiprocessor: where there are more, kernels with a ring of shared memory are better."""
_MOST_SLICES, _NORM_WARPS = 16, 8
_FILES = ("rounding.cu", "fixed_few_parts.cu", "fixed_few.cu")


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled. `rows`: up to so many, a power of two; `tiles` of a thread block, where the sum has no
    slices."""

    rows: int
    width: int
    slices: int = 1
    tiles: int = 1
    gain: int = 0
    """Bytes of a number of the norm's gain; 0: no norm."""
    gated: bool = False
    bias: bool = False
    residual: bool = False
    early: bool = False
    watched: bool = False
    """Whether a wait of seconds ends in an error: for tests."""

    @property
    def units(self) -> int:
        """Warps that multiply."""
        return self.slices if self.slices > 1 else self.tiles

    @property
    def threads(self) -> int:
        segments = self.rows * -(-self.width // _SEGMENT)
        return 32 * max(self.units, min(_NORM_WARPS, segments) if self.gain else 1)

    @property
    def shared(self) -> int:
        """Bytes: weights and rows, sums of slices or of squares, barriers. As the source has them."""
        length = self.width // self.slices
        line, chunks = 2 * length + 16, -(-length // _SEGMENT)
        lines = self.units * (2 * TILE if self.gated else TILE) + self.slices * self.rows
        sums = self.slices * self.rows * TILE if self.slices > 1 else self.rows * chunks
        return lines * line + -(-4 * sums // 8) * 8 + 8 * self.units * chunks

    def source(self) -> str:
        defined = {
            "ROWS": self.rows, "WIDTH": self.width, "SLICES": self.slices, "TILES": self.tiles, "NORM": self.gain,
            "GATED": self.gated, "BIAS": self.bias, "RESIDUAL": self.residual, "EARLY": self.early,
            "WATCHED": self.watched, "THREADS": self.threads,
        }  # fmt: skip
        return "\n".join([*(f"#define {name} {int(value)}" for name, value in defined.items()), _text()])


@lru_cache(maxsize=1)
def _text() -> str:
    return loading.text_of(_FILES)


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm before a GEMM: its gain [width] in bf16 or float32."""

    gain: Tensor
    eps: float


def plan(
    rows: int, features: int, width: int, slices: Slices | None, programs: int, *, gain: int = 0, gated: bool = False
) -> Variant | None:
    """For `features` of the output, and a chip of so many multiprocessors; None where another kernel must run. A sum
    in slices has no norm before it, any other one has."""
    count = 1 if slices is None else slices.total
    if not 0 < rows <= MOST_ROWS or features % TILE or width % (_STEP * count) or count > _MOST_SLICES:
        return None
    if (count > 1) == bool(gain) or (count > 1 and gated):
        return None
    if slices is not None and (not slices.whole or slices.sum_width % (count * slices.unit)):
        return None
    tiles = features // TILE
    each = 1 if count > 1 else -(-tiles // programs)
    found = Variant(1 << (rows - 1).bit_length(), width, count, each, gain, gated)
    while found.tiles > 1 and found.shared > _MOST_SHARED:
        found = replace(found, tiles=found.tiles - 1)
    fits = found.shared <= _MOST_SHARED and -(-tiles // found.tiles) <= _MOST_BLOCKS * programs
    return found if fits else None


@lru_cache(maxsize=256)
def _loaded(variant: Variant, device: int) -> Kernel | None:
    """None where it cannot be compiled or loaded."""
    return loading.made(
        "fixed_few", device, lambda: Kernel(nvrtc.compiled(variant.source(), OPTIONS), "fixed_few", variant.shared))


@lru_cache(maxsize=8)
def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether chip, compiler and driver are there; the smallest kernel is tried."""
    return loading.is_for(device, dtype) and _loaded(Variant(1, _STEP, gain=4), loading.index_of(device)) is not None


def linear_few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    slices: Slices | None = None, norm: RowNorm | None = None, gated: bool = False, pdl: bool = False,
    watched: bool = False,
) -> Tensor | None:
    """norm(x) W^T + bias, or silu(first half) * second half of it; or x W^T + bias in slices, and the residual. Each
    result is rounded before the next step, as kernels one by one do. None: nothing was launched, another kernel must.

    Its reference is those kernels' own: `norm.rms_norm_reference`, `linear_few.linear_reference`.
    """
    features, width = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    tensors = [each for each in (x, weight, bias, residual) if each is not None]
    if any(each.dtype != torch.bfloat16 or not each.is_contiguous() or each.data_ptr() % 16 for each in tensors):
        return None
    gain = 0 if norm is None else norm.gain.dtype.itemsize
    found = plan(x.shape[0], features, width, slices, multiprocessors(x.device), gain=gain, gated=gated)
    if found is None or (residual is not None and found.slices == 1):
        return None
    variant = replace(found, bias=bias is not None, residual=residual is not None, early=pdl, watched=watched)
    kernel = _loaded(variant, loading.index_of(x.device))
    if kernel is None:
        return None
    out = torch.empty(x.shape[0], features, dtype=x.dtype, device=x.device)
    given = (x, weight, None if norm is None else norm.gain, bias, residual, out)
    kernel(
        Launch(-(-features // (TILE * variant.tiles)), 1, variant.threads, pdl),
        torch.cuda.current_stream(x.device).cuda_stream,
        (*(c_void_p(None if each is None else each.data_ptr()) for each in given),
         c_float(0.0 if norm is None else norm.eps), c_int(x.shape[0]), c_int(features)),
    )  # fmt: skip
    return out
