"""The feed-forward part of a layer, gated or plain."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.slices import Slices
from quire.kernels.types import StepContext
from quire.layers.linear import Linear, SharedLinear
from quire.layers.share import LayerShare
from quire.layers.spec import MlpSpec
from quire.layers.stream import ResidualStream, Rows
from quire.ops.interface import Ops, PackedLinear
from quire.parallel.collectives import TensorGroup


class Mlp:
    """down(act(gate) * up) or down(act(up)); gate and up are one projection.

    Where ranks share it, each has a run of the width's slices: of gate and up the rows, of down the columns.
    """

    def __init__(
        self, ops: Ops, spec: MlpSpec, dtype: torch.dtype | None, share: LayerShare | None = None,
        ranks: TensorGroup | None = None,
    ) -> None:
        self._ops = ops
        self._gated = spec.gated
        self._activation = spec.activation
        self.up = Linear(ops, ("gate", "up") if spec.gated else ("up",), spec.bias, dtype)
        if share is None or ranks is None:
            self.down = Linear(ops, ("down",), spec.bias, dtype, Slices.of_width(spec.intermediate))
        else:
            self.down = SharedLinear(ops, "down", spec.bias, dtype, share.mlp_slices, share.mlp_tree, ranks)

    @property
    def reader(self) -> PackedLinear | None:
        """The one weight that is multiplied by what this part reads."""
        return self.up.packed

    @property
    def linears(self) -> tuple[Linear, ...]:
        """What every row goes through."""
        return self.up, self.down

    @property
    def all_linears(self) -> tuple[Linear, ...]:
        return self.linears

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        (self.down if part == "down" else self.up).receive(part, kind, tensor)

    def __call__(self, x: Rows, ctx: StepContext) -> Tensor:
        return self.down(self._inner(x, ctx), ctx)

    def add_to(self, stream: ResidualStream, x: Rows, ctx: StepContext) -> None:
        """stream += self(x), fused as the stream wants it."""
        self.down.add_to(stream, self._inner(x, ctx), ctx)

    def _inner(self, x: Rows, ctx: StepContext) -> Tensor:
        if self._gated:
            return self.up.gated(x, ctx, self._activation, self.down.packed)
        return self._ops.act(self.up(x, ctx), self._activation)
