"""Attention over the paged cache: project, rotate, write the step's keys and values, attend, project out."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import StepContext
from quire.kernels.slices import Slices
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.ops import HeadShape, LayerCache, Ops
from quire.layers.spec import AttentionSpec


class Attention:
    """One layer's attention; `rope` is the shared table of its rotation, `group` its cache group."""

    def __init__(
        self, ops: Ops, spec: AttentionSpec, rope: Tensor | None, group: int, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._rope = rope
        self._group = group
        self.shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.qkv = Linear(ops, ("q", "k", "v"), spec.qkv_bias, dtype)
        self.out = Linear(ops, ("out",), spec.out_bias, dtype, Slices.of_heads(spec.num_heads, spec.head_dim))
        self.q_norm = Norm(ops, spec.qk_norm, spec.head_dim) if spec.qk_norm else None
        self.k_norm = Norm(ops, spec.qk_norm, spec.head_dim) if spec.qk_norm else None

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        if part == "q_norm" and self.q_norm is not None:
            self.q_norm.receive(part, kind, tensor)
        elif part == "k_norm" and self.k_norm is not None:
            self.k_norm.receive(part, kind, tensor)
        else:
            (self.out if part == "out" else self.qkv).receive(part, kind, tensor)

    def __call__(
        self, x: Tensor, ctx: StepContext, cache: LayerCache, residual: Tensor | None = None
    ) -> Tensor:
        s = self._spec
        qkv = self.qkv(x, ctx)
        self._ops.rope_and_cache(
            qkv,
            cache,
            ctx,
            self._group,
            self.shape,
            self._rope,
            self.q_norm.weight if self.q_norm else None,
            self.k_norm.weight if self.k_norm else None,
            self.q_norm.eps if self.q_norm else 0.0,
        )
        mixed = self._ops.attend(qkv, cache, ctx, self._group, self.shape, s.scale, s.window, s.softcap)
        return self.out(mixed, ctx, residual)
