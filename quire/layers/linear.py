"""Linear layers: each owns its weight's format, and is put together from the parts a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.slices import Slices
from quire.kernels.types import StepContext
from quire.layers.stream import ResidualStream, Rows, Unnormed
from quire.ops.interface import Ops, PackedLinear


class Linear:
    """One projection, or several that share their input and are run as one (q, k and v; gate and up).

    Parts wait as they came until the last one is there, then are joined, packed and let go of: peak memory
    is the packed weights plus one layer's sources. Nothing is allocated from what a config says before the
    tensors came. `slices` fix the order of its sums where ranks may share them (see `quire.kernels.slices`).
    """

    def __init__(
        self, ops: Ops, parts: Sequence[str], bias: bool, dtype: torch.dtype, slices: Slices | None = None
    ) -> None:
        self._ops = ops
        self._parts = tuple(parts)
        self._bias = bias
        self._dtype = dtype
        self._slices = slices
        self._waiting: dict[tuple[str, str], Tensor] = {}
        self._packed: PackedLinear | None = None

    @property
    def packed(self) -> PackedLinear:
        if self._packed is None:
            raise InvariantError(f"a linear layer of {self._parts} was used before its weights came")
        return self._packed

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        """Take one stored tensor, of the shape the spec declared."""
        self._waiting[part, kind] = tensor
        if len(self._waiting) == len(self._parts) * (2 if self._bias else 1):
            weight = self._joined("weight")
            bias = self._joined("bias") if self._bias else None
            self._packed = self._ops.pack_linear(weight, bias, self._slices)

    def _joined(self, kind: str) -> Tensor:
        parts = [self._waiting.pop((part, kind)) for part in self._parts]
        if len(parts) == 1:
            return parts[0].to(self._dtype).contiguous()
        joined = torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=self._dtype)
        start = 0
        for part in parts:
            joined[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return joined

    def __call__(self, x: Rows, ctx: StepContext | None, out: Tensor | None = None) -> Tensor:
        """x W^T (+ bias), into `out` if given. The step's context is for layers that add adapters to some rows."""
        if isinstance(x, Unnormed):
            return self._ops.norm_linear(x.rows, x.norm.gain, x.norm.eps, self.packed, None, out)
        return self._ops.linear(x, self.packed, None, out)

    def gated(self, x: Rows, ctx: StepContext | None, activation: str) -> Tensor:
        """act(first half of x W^T) * second half."""
        if isinstance(x, Unnormed):
            return self._ops.norm_linear(x.rows, x.norm.gain, x.norm.eps, self.packed, activation)
        return self._ops.act_mul(self._ops.linear(x, self.packed), activation)

    def add_to(self, stream: ResidualStream, x: Tensor, ctx: StepContext | None) -> None:
        """stream += x W^T (+ bias). Here ranks that hold a part of K each will add up their results."""
        if stream.owes:
            stream.owe(self._ops.linear(x, self.packed))
        else:
            stream.rows = self._ops.linear(x, self.packed, stream.rows)


class Embedding(Linear):
    """A table of rows: token or position embeddings. A tied head projects on the same packed table."""

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__(ops, ("",), False, dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self._ops.embed(ids, self.packed)
