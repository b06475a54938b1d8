"""Attention over the paged cache: project, rotate, write the step's keys and values, attend, project out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.quantized import WeightUse
from quire.kernels.slices import Slices
from quire.kernels.types import HeadShape, HeadTurn, LayerCache, StepContext
from quire.layers.linear import Linear, SharedLinear
from quire.layers.norm import Norm
from quire.layers.share import HeadShare, LayerShare
from quire.layers.spec import AttentionSpec
from quire.layers.stream import ResidualStream, Rows
from quire.ops.interface import Ops, PackedLinear
from quire.parallel.collectives import TensorGroup

_MANY_QUERIES = 4
"""Query heads that read one kv head, from which on a rounding at load is finer for keys and values."""


class Attention:
    """One layer's attention; `rope` is the shared table of its rotation, `growth` that of its queries' factors, `group`
    its cache group.

    Where ranks share it, each has a run of whole query heads with the kv heads that they read.
    """

    def __init__(
        self,
        ops: Ops,
        spec: AttentionSpec,
        rope: Tensor | None,
        group: int,
        dtype: torch.dtype | None,
        growth: Tensor | None = None,
        share: LayerShare | None = None,
        ranks: TensorGroup | None = None,
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._rope = rope
        self._growth = growth
        self._group = group
        self._ranks = ranks
        shared = spec.num_heads >= _MANY_QUERIES * spec.num_kv_heads
        uses = {"k": WeightUse.SHARED, "v": WeightUse.SHARED} if shared else None
        self.qkv = Linear(ops, ("q", "k", "v"), spec.qkv_bias, dtype, uses=uses)
        if share is None or ranks is None:
            self.shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
            self.out = Linear(ops, ("out",), spec.out_bias, dtype, Slices.of_heads(spec.num_heads, spec.head_dim))
        else:
            self.shape = share.heads.shape(spec)
            self.out = SharedLinear(ops, "out", spec.out_bias, dtype, share.heads.slices(spec), share.head_tree, ranks)
        self._same_for_all = spec.qk_norm_over == "head"
        self.q_norm = self._norm(self.shape.num_heads)
        self.k_norm = self._norm(self.shape.num_kv_heads)
        self._unweighted = (
            Norm(ops, replace(spec.qk_norm, affine=False), spec.head_dim)
            if spec.qk_norm is not None and spec.qk_norm_over == "each"
            else None
        )
        self._sinks: Tensor | None = None
        self._turn = self._head_turn()

    def _norm(self, heads: int) -> Norm | None:
        spec = self._spec
        if spec.qk_norm is None:
            return None
        return Norm(self._ops, spec.qk_norm, spec.head_dim * (1 if self._same_for_all else heads))

    def _head_turn(self) -> HeadTurn:
        """What every head goes through in the same way; a norm that differs between heads has been before."""
        if self.q_norm is None or self.k_norm is None or not self._same_for_all:
            return HeadTurn(self._rope, sinks=self._sinks)
        return HeadTurn(self._rope, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self._sinks)

    @property
    def reader(self) -> PackedLinear | None:
        """The one weight that is multiplied by what this part reads."""
        return self.qkv.packed

    @property
    def linears(self) -> tuple[Linear, ...]:
        """What every row goes through."""
        return self.qkv, self.out

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        if part == "q_norm" and self.q_norm is not None:
            self.q_norm.receive(part, kind, tensor.reshape(-1))
        elif part == "k_norm" and self.k_norm is not None:
            self.k_norm.receive(part, kind, tensor.reshape(-1))
        elif part == "sinks":
            self._sinks = tensor.to(torch.float32).contiguous()
        else:
            (self.out if part == "out" else self.qkv).receive(part, kind, tensor)
            return
        self._turn = self._head_turn()

    def __call__(self, x: Rows, ctx: StepContext, cache: LayerCache) -> Tensor:
        return self.out(self._mixed(x, ctx, cache), ctx)

    def add_to(self, stream: ResidualStream, x: Rows, ctx: StepContext, cache: LayerCache) -> None:
        """stream += self(x), fused as the stream wants it."""
        self.out.add_to(stream, self._mixed(x, ctx, cache), ctx)

    def _mixed(self, x: Rows, ctx: StepContext, cache: LayerCache) -> Tensor:
        """Everything up to the output projection."""
        s, shape = self._spec, self.shape
        qkv = self.qkv(x, ctx)
        if self._growth is not None:
            qkv[:, : shape.num_heads * shape.head_dim].mul_(self._growth[ctx.positions])
        if self.q_norm is not None and self.k_norm is not None:
            if self._unweighted is not None:
                self._norm_each_head(qkv, self._unweighted, self.q_norm.weight, self.k_norm.weight)
            elif not self._same_for_all:
                self._norm_all_heads(qkv, self.q_norm, self.k_norm)
        return self._ops.rope_attend(
            qkv, cache, ctx, self._group, shape, self._turn, s.scale, s.window, s.softcap
        )

    def _norm_all_heads(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> None:
        """In place on qkv: one norm over all query heads, one over all kv heads, those of the other ranks included."""
        if self._ranks is None:
            self._ops.norm_all_heads(qkv, self.shape, q_norm.weight, k_norm.weight, q_norm.eps)
            return
        spec, tokens = self._spec, qkv.shape[0]
        mine = self._ops.head_squares(qkv, self.shape)
        queries, keys = mine.new_empty(tokens, spec.num_heads), mine.new_empty(tokens, spec.num_kv_heads)
        shares = [HeadShare.of(spec, rank, self._ranks.size) for rank in range(self._ranks.size)]
        counts = [tokens * (share.last - share.first + share.last_kv - share.first_kv) for share in shares]
        for share, squares in zip(shares, self._ranks.exchange(mine, counts), strict=True):
            heads = share.last - share.first
            theirs = squares.view(tokens, -1)
            queries[:, share.first : share.last] = theirs[:, :heads]
            keys[:, share.first_kv : share.last_kv] = theirs[:, heads:]
        self._ops.norm_some_heads(qkv, self.shape, (queries, keys), (q_norm.weight, k_norm.weight), q_norm.eps)

    def _norm_each_head(self, qkv: Tensor, unweighted: Norm, q_weight: Tensor, k_weight: Tensor) -> None:
        """In place on qkv: each head of q and k by itself, then its own weight."""
        start = 0
        for weight in (q_weight, k_weight):
            part = qkv[:, start : start + len(weight)]
            heads = unweighted(part.reshape(-1, self.shape.head_dim).contiguous())
            part.copy_(heads.view(part.shape) * weight)
            start += len(weight)
