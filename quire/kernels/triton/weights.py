"""What the drawing kernels do for the full sampler (`sampling.weights.DrawKernels`): draws under top_p alone, and
integer weights of whole rows, by the same instructions, since torch's exp rounds otherwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.nucleus_rows import draw_nucleus
from quire.kernels.triton.sampling_parts import integer_weights

__all__ = ["draw_nucleus", "row_weights"]

_BLOCK = 1024


@triton.jit
def _kernel(values, peak, temperature, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    found = tl.load(values + row * width + column, mask=inside, other=float("-inf"))
    weights = integer_weights(found, tl.load(peak + row), tl.load(temperature + row), float("-inf"))
    tl.store(out + row * width + column, weights, mask=inside)


def row_weights(values: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """int64 like float32 `values` [rows, width]; float32 `peak` and `temperature` [rows]."""
    out = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    if out.numel():
        rows, width = values.shape
        _kernel[(rows, triton.cdiv(width, _BLOCK))](
            values.contiguous(), peak.contiguous(), temperature.contiguous(), out, width, _BLOCK, num_warps=4
        )
    return out
