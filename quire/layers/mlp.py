"""The feed-forward part of a layer, gated or plain."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import StepContext
from quire.kernels.slices import Slices
from quire.layers.linear import Linear
from quire.layers.ops import Ops
from quire.layers.spec import MlpSpec


class Mlp:
    """down(act(gate) * up) or down(act(up)); gate and up are one projection."""

    def __init__(self, ops: Ops, spec: MlpSpec, dtype: torch.dtype) -> None:
        self._ops = ops
        self._spec = spec
        self.up = Linear(ops, ("gate", "up") if spec.gated else ("up",), spec.bias, dtype)
        self.down = Linear(ops, ("down",), spec.bias, dtype, Slices.of_width(spec.intermediate))

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        (self.down if part == "down" else self.up).receive(part, kind, tensor)

    def __call__(self, x: Tensor, ctx: StepContext, residual: Tensor | None = None) -> Tensor:
        up = self.up(x, ctx)
        act = self._ops.act_mul if self._spec.gated else self._ops.act
        return self.down(act(up, self._spec.activation), ctx, residual)
