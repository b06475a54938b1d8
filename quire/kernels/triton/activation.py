"""Activations of the feed-forward part: gated (act(gate) * up in one pass) and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
_BLOCK = 1024


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of a float32 tensor; used inside other kernels too."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        # tanh(y) as 2 * sigmoid(2 y) - 1, which neither overflows nor needs a tanh instruction
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 / (1.0 + tl.exp(-2.0 * inner)))
    elif KIND == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def _act_mul_kernel(
    gate_up, out, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = gate_up + row * 2 * WIDTH
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _act_kernel(x, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, activate(values, KIND).to(out.dtype.element_ty), mask=inside)


def act_mul(gate_up: Tensor, kind: str, *, pdl: bool = False) -> Tensor:
    """[rows, 2 I] -> [rows, I]: act(first half) * second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        launch = {"num_warps": 4, **({"launch_pdl": True} if pdl else {})}
        _act_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, KINDS[kind], _BLOCK, pdl, **launch)
    return out


def act(x: Tensor, kind: str) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        _act_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), KINDS[kind], _BLOCK, num_warps=4)
    return out


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def act_reference(x: Tensor, kind: str) -> Tensor:
    return _TORCH[kind](x.float()).to(x.dtype)


def act_mul_reference(gate_up: Tensor, kind: str) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (_TORCH[kind](gate) * up).to(gate_up.dtype)
