"""Linear layers: each owns its weight's format, and is put together from the parts a checkpoint stores."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import StepContext
from quire.layers.ops import Ops, PackedLinear


class Linear:
    """One projection, or several that share their input and are run as one (q, k and v; gate and up).

    Parts are copied into one buffer as they arrive, so a source tensor can be dropped at once; when the last one
    is there the buffer is packed and released. Peak memory is the packed weights plus one such buffer.
    """

    def __init__(
        self, ops: Ops, parts: dict[str, int], in_features: int, bias: bool, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._parts = parts
        self._in_features = in_features
        self._dtype = dtype
        self._missing = {
            (part, kind) for part in parts for kind in (("weight", "bias") if bias else ("weight",))
        }
        self._weight: Tensor | None = None
        self._bias: Tensor | None = torch.empty(sum(parts.values()), dtype=dtype) if bias else None
        self._packed: PackedLinear | None = None

    @property
    def packed(self) -> PackedLinear:
        if self._packed is None:
            raise RuntimeError(f"linear layer used before its weights came: {sorted(self._missing)}")
        return self._packed

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        """Take one stored tensor, of the shape the spec declared."""
        start = 0
        for name, rows in self._parts.items():
            if name == part:
                break
            start += rows
        if kind == "bias" and self._bias is not None:
            self._bias[start : start + self._parts[part]].copy_(tensor)
        elif len(self._parts) == 1 and tensor.dtype == self._dtype and tensor.is_contiguous():
            self._weight = tensor
        else:
            if self._weight is None:
                self._weight = torch.empty(sum(self._parts.values()), self._in_features, dtype=self._dtype)
            self._weight[start : start + self._parts[part]].copy_(tensor)
        self._missing.discard((part, kind))
        if not self._missing and self._weight is not None:
            self._packed = self._ops.pack_linear(self._weight, self._bias)
            self._weight = self._bias = None

    def __call__(self, x: Tensor, ctx: StepContext | None, residual: Tensor | None = None) -> Tensor:
        """x W^T (+ bias) (+ residual). The step's context is there for layers that add adapters to some rows."""
        return self._ops.linear(x, self.packed, residual)


class Embedding(Linear):
    """A table of rows: token or position embeddings. As a tied head, the same packed table is also projected on."""

    def __init__(self, ops: Ops, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(ops, {"": rows}, width, False, dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self._ops.embed(ids, self.packed)
