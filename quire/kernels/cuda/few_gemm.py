"""GEMMs of up to eight rows on Hopper, with norm, gate and residual (`few_gemm.cu`): steps of one sequence with drafts.

As for one row (`kernels.triton.linear_row`), many small blocks come and go, and weights go from memory into registers:
the next kernel's are on their way before this one's have all come. With rings in shared memory five rows took 15 us a
layer of Qwen3-8B more than one row. Unlike there tensor cores multiply: products of five rows one by one would take
most of the instructions that fit.

`available` is false without Hopper, without NVRTC, or where the driver refuses: other kernels run then. The reference
is `linear_few.linear_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels.cuda import loading, nvrtc
from quire.kernels.cuda.driver import Kernel, Launch

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
MOST_ROWS = 8
_QUAD, _LINE = 4, 64
"""Features of an instruction, columns of a warp's line: as in the source."""
_FILES = ("rounding.cu", "common.cu", "few_instructions.cu", "few_gemm.cu")


@dataclass(frozen=True, slots=True)
class FewShape:
    """Fours of features of a block, warps that divide the columns among them, lines of 64 columns that are on their
    way to a warp, and blocks that a multiprocessor has registers for."""

    quads: int = 4
    warps: int = 4
    ahead: int = 2
    blocks: int = 5

    @classmethod
    def of(cls, sizes: Sequence[int]) -> FewShape:
        """As a table has them."""
        return cls(*sizes)

    def lines(self, width: int) -> int:
        """Of a warp; 0 if the columns cannot be divided like this."""
        lines, rest = divmod(width, self.warps * _LINE)
        return 0 if rest or lines % self.ahead else lines


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled: a shape for a width, and what is done besides."""

    shape: FewShape
    lines: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    early: bool = False

    def source(self) -> str:
        shape = self.shape
        defined = {
            "QUADS": shape.quads, "WARPS": shape.warps, "AHEAD": shape.ahead, "BLOCKS": shape.blocks,
            "LINES": self.lines, "NORM": self.norm, "GATED": self.gated, "RESIDUAL": self.residual,
            "EARLY": self.early, "WATCHED": False,
        }  # fmt: skip
        return "\n".join([*(f"#define {name} {int(value)}" for name, value in defined.items()), text()])


@lru_cache(maxsize=1)
def text() -> str:
    return loading.text_of(_FILES)


@lru_cache(maxsize=256)
def _loaded(variant: Variant, device: int) -> Kernel | None:
    """None where it cannot be compiled or loaded."""
    return loading.made(
        "few_gemm", device, lambda: Kernel(nvrtc.compiled(variant.source(), OPTIONS), "few_gemm", 0))


@lru_cache(maxsize=8)
def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether chip, compiler and driver are there; the smallest kernel is tried."""
    return loading.is_for(device, dtype) and _loaded(Variant(FewShape(), 4), loading.index_of(device)) is not None


def can_compute(rows: int, features: int, width: int, shape: FewShape) -> bool:
    """Whether there is such a kernel for x [rows, width] times a weight [features, width]."""
    return 1 <= rows <= MOST_ROWS and features % (_QUAD * shape.quads) == 0 and shape.lines(width) > 0


def fits(x: Tensor, weight: Tensor, shape: FewShape, norm: Tensor | None = None) -> bool:
    """Whether the kernel can multiply these."""
    given = (x, weight) if norm is None else (x, weight, norm)
    known = all(each.dtype == torch.bfloat16 and each.is_contiguous() and each.data_ptr() % 16 == 0 for each in given)
    features, width = weight.shape
    return known and can_compute(x.shape[0], features, width, shape)


def linear_few_rows(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    shape: FewShape,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor | None:
    """norm(x) W^T + residual, or silu(first half) * second half of norm(x) W^T; None if the kernel could not be
    made."""
    rows, width = x.shape
    features = weight.shape[0] // (2 if gated else 1)
    variant = Variant(shape, shape.lines(width), norm is not None, gated, residual is not None, pdl)
    kernel = _loaded(variant, loading.index_of(x.device))
    if kernel is None:
        return None
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    given = (weight, x, norm, residual, out)
    kernel(
        Launch(weight.shape[0] // (_QUAD * shape.quads), 1, 32 * shape.warps, pdl),
        torch.cuda.current_stream(x.device).cuda_stream,
        (*(c_void_p(None if each is None else each.data_ptr()) for each in given), c_float(eps), c_int(rows),
         c_int(features)),
    )
    return out
