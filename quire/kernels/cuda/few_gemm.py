"""GEMMs of up to eight rows on Hopper, with norm, gate and residual (`few_gemm.cu`): steps of one sequence with drafts.

One row has kernels of its own, in which many small programs come and go: the next kernel's weights are on their way
before this one's have all come. For a few rows that took a ring in shared memory, which filled a multiprocessor, so
that memory rested between two GEMMs. Here the ring is half as large, and the rows stay in registers.

`available` is false without Hopper, without NVRTC, or where the driver refuses: other kernels run then. The reference
is `linear_few.linear_reference`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import torch
from torch import Tensor

from quire.kernels.cuda import nvrtc
from quire.kernels.cuda.driver import DriverError, Kernel, Launch
from quire.kernels.triton.linear_prefetch import PrefetchScratch, multiprocessors

_log = logging.getLogger("quire.kernels")
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
MOST_ROWS = 8
_TILE, _WARPS, _THREADS, _STEP = 16, 8, 320, 32
"""Features of a tile, warps that multiply, threads of a block, columns of a warp's step: as in the source."""
_MOST_STEPS = 16
"""Of a warp: its part of the rows takes four registers a step."""
_ROOM = (228 << 10) - 1024
"""Bytes of shared memory that blocks of a multiprocessor share, less what the barriers of one take; each block costs a
KiB more."""
_PADDED = 8 * 20 * 4
_HOPPER = 9
_FILES = ("rounding.cu", "common.cu", "few_instructions.cu", "few_gemm.cu")


@dataclass(frozen=True, slots=True)
class FewShape:
    """Steps of 32 columns in a stage of the ring, stages, blocks that divide the columns, blocks that fit on a
    multiprocessor, how many of them are launched (of each multiprocessor), and whether (1 or 0) the next kernel may
    start only when the last weights are asked for."""

    chunk: int = 4
    stages: int = 3
    parts: int = 1
    blocks: int = 2
    launched: int = 1
    late: int = 1

    @classmethod
    def of(cls, sizes: Sequence[int]) -> FewShape:
        """As a table has them."""
        return cls(*sizes)

    def steps(self, width: int) -> int:
        """Of a warp; 0 if the columns cannot be divided like this."""
        steps, rest = divmod(width, self.parts * _WARPS * _STEP)
        return 0 if rest or steps % self.chunk or steps > _MOST_STEPS else steps

    @property
    def ring(self) -> int:
        return self.stages * _TILE * (_WARPS * _STEP * self.chunk * 2 + 16)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled: a shape for a width, and what is done besides."""

    shape: FewShape
    steps: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    early: bool = False
    watched: bool = False
    """Whether a wait of seconds ends in an error: for tests and benches, where a kernel may be wrong."""

    @property
    def shared(self) -> int:
        """Of a block, in bytes: the ring, the gains, and the sums of tiles."""
        gains = self.steps * _WARPS * _STEP * 2 if self.norm else 0
        return self.shape.ring + gains + (2 if self.shape.parts > 1 else 1) * _WARPS * _PADDED

    def source(self) -> str:
        shape = self.shape
        defined = {
            "STEPS": self.steps, "CHUNK_STEPS": shape.chunk, "STAGES": shape.stages, "PARTS": shape.parts,
            "BLOCKS": shape.blocks, "NORM": self.norm, "GATED": self.gated, "RESIDUAL": self.residual,
            "EARLY": self.early, "LATE": shape.late, "WATCHED": self.watched,
        }  # fmt: skip
        return "\n".join([*(f"#define {name} {int(value)}" for name, value in defined.items()), text()])


@lru_cache(maxsize=1)
def text() -> str:
    folder = resources.files("quire.kernels.cuda")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _FILES)


@lru_cache(maxsize=256)
def _loaded(variant: Variant, device: int) -> Kernel | None:
    """None where it cannot be compiled or loaded."""
    with torch.cuda.device(device):
        torch.empty(1, device="cuda")  # the driver needs torch's context, which is made with the first tensor
        try:
            return Kernel(nvrtc.compiled(variant.source(), OPTIONS), "few_gemm", variant.shape.ring)
        except nvrtc.Missing:
            return None
        except (nvrtc.CompileError, DriverError, OSError) as error:
            _log.warning("a GEMM in CUDA C could not be made, another kernel takes its place: %s", error)
            return None


@lru_cache(maxsize=8)
def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether chip, compiler and driver are there; the smallest kernel is tried."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.cuda is None:
        return False
    hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    return hopper and _loaded(Variant(FewShape(), 4), _index(device)) is not None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def can_compute(rows: int, features: int, width: int, shape: FewShape, norm: bool = False, gated: bool = False) -> bool:
    """Whether there is such a kernel for x [rows, width] times a weight [features, width]."""
    steps = shape.steps(width)
    whole = features % _TILE == 0 and (shape.parts == 1 or not (norm or gated))
    room = steps > 0 and shape.blocks * (Variant(shape, steps, norm).shared + 1024) <= _ROOM
    return 1 <= rows <= MOST_ROWS and steps > 0 and whole and room


def fits(
    x: Tensor, weight: Tensor, shape: FewShape, scratch: PrefetchScratch | None = None, norm: Tensor | None = None,
    gated: bool = False,
) -> bool:
    """Whether the kernel can multiply these."""
    given = (x, weight) if norm is None else (x, weight, norm)
    known = all(each.dtype == torch.bfloat16 and each.is_contiguous() and each.data_ptr() % 16 == 0 for each in given)
    features, width = weight.shape
    tiles = features // _TILE
    parted = shape.parts == 1 or (
        scratch is not None and tiles <= scratch.arrived.numel()
        and tiles * shape.parts * _TILE * MOST_ROWS <= scratch.partial.numel())
    return known and parted and can_compute(x.shape[0], features, width, shape, norm is not None, gated)


def linear_few_rows(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    shape: FewShape,
    scratch: PrefetchScratch | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
    watched: bool = False,
) -> Tensor | None:
    """norm(x) W^T + residual, or silu(first half) * second half of norm(x) W^T; None if the kernel could not be made.
    No two launches that may run at the same time have the same `scratch`."""
    rows, width = x.shape
    features = weight.shape[0] // (2 if gated else 1)
    variant = Variant(shape, shape.steps(width), norm is not None, gated, residual is not None, pdl, watched)
    kernel = _loaded(variant, _index(x.device))
    if kernel is None:
        return None
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    joined = (None, None) if scratch is None else (scratch.partial, scratch.arrived)
    given = (weight, x, norm, residual, out, *joined)
    groups = min(multiprocessors(x.device) * shape.launched // shape.parts, weight.shape[0] // _TILE)
    kernel(
        Launch(groups * shape.parts, 1, _THREADS, pdl),
        torch.cuda.current_stream(x.device).cuda_stream,
        (*(c_void_p(None if each is None else each.data_ptr()) for each in given), c_float(eps),
         *map(c_int, (rows, features, width))),
    )
    return out
