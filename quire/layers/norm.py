"""Normalisation layers: RMS and layer norm behind one call."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.spec import NormSpec
from quire.ops.interface import Ops


class Norm:
    """One normalisation and its learned vectors, kept in float32 whatever the weights are."""

    def __init__(self, ops: Ops, spec: NormSpec, size: int) -> None:
        self._ops = ops
        self._spec = spec
        self._is_rms = spec.kind == "rms"
        self.eps = spec.eps
        self._set_weight(torch.full((size,), spec.scale))
        self.bias: Tensor | None = (
            torch.zeros(size) if spec.kind == "layer" and spec.affine and spec.bias else None
        )

    def _set_weight(self, weight: Tensor) -> None:
        self.weight = weight
        # Now, not in a step: it may wait for the device.
        self.gain = self._ops.norm_gain(weight) if self._is_rms else weight
        """The weight as a GEMM that takes the norm along wants it."""

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        """Take the stored weight or bias, folding the family's offset and scale into it."""
        if kind == "bias":
            self.bias = tensor.to(torch.float32) * self._spec.scale
        else:
            self._set_weight((tensor.to(torch.float32) + self._spec.weight_offset) * self._spec.scale)

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_rms:
            return self._ops.rms_norm(x, self.weight, self.eps)
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)
