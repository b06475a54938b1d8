"""Latent attention (MLA): of each token one latent vector and one rotated key part are kept, for all heads.

Keys and values of a head are projections of the latent (`kv_b`). They are never made: the key projection is applied to
the query instead, the value projection to what the softmax mixes ("absorbed"). Prompts and decoding do the same
arithmetic, so a token's bits do not depend on how its prompt was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.quantized import CodedWeight, StoredWeight, WeightUse
from quire.kernels.slices import Slices
from quire.kernels.types import LatentShape, LayerCache, StepContext
from quire.layers.linear import Linear, LinearGroup, SharedLinear
from quire.layers.norm import Norm
from quire.layers.share import LayerShare
from quire.layers.spec import AttentionSpec, LatentSpec
from quire.layers.stream import ResidualStream, Rows, Unnormed
from quire.ops.interface import Ops
from quire.parallel.collectives import TensorGroup


class HeadProjections:
    """Two projections for each head: of its query into the latent space (`keys`), and out of it (`values`)."""

    def __init__(self, ops: Ops, spec: LatentSpec, heads: int, dtype: torch.dtype | None) -> None:
        self._spec = spec
        self.keys, self.values = (
            LinearGroup(ops, [Linear(ops, ("",), False, dtype, use=WeightUse.EXACT) for _ in range(heads)])
            for _ in range(2)
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.keys.linears, *self.values.linears)

    def receive(self, stored: StoredWeight) -> None:
        """`kv_b`: for each head the rows of its keys, then those of its values, all over the latent."""
        weight = stored.dequantized() if isinstance(stored, CodedWeight) else stored
        for index, head in enumerate(weight.chunk(len(self.keys.linears))):
            self.keys.receive(index, "", "weight", head[: self._spec.nope_dim].T)
            self.values.receive(index, "", "weight", head[self._spec.nope_dim :])

    def __call__(self, x: Tensor, linears: LinearGroup) -> Tensor:
        """[T, heads, out] of x [T, heads, in], each head through its own projection."""
        return linears.of_heads(x.transpose(0, 1).contiguous()).transpose(0, 1)


class LatentAttention:
    """One layer's attention over latents, seen as `Attention` is.

    Where ranks share it, each has a run of whole heads; the latents, which all heads read, are on every rank.
    """

    def __init__(
        self,
        ops: Ops,
        spec: AttentionSpec,
        latent: LatentSpec,
        rope: Tensor,
        group: int,
        dtype: torch.dtype | None,
        share: LayerShare | None = None,
        ranks: TensorGroup | None = None,
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._latent = latent
        self._rope = rope
        self._group = group
        if share is None or ranks is None:
            heads = spec.num_heads
            slices = Slices.of_heads(heads, spec.value_width)
            self.out = Linear(ops, ("out",), spec.out_bias, dtype, slices)
        else:
            heads = share.heads.last - share.heads.first
            self.out = SharedLinear(ops, "out", spec.out_bias, dtype, share.heads.slices(spec), share.head_tree, ranks)
        self.shape = LatentShape(heads, latent.rank, latent.rope_dim)
        self.q = Linear(ops, ("q" if latent.q_rank is None else "q_b",), False, dtype)
        self.q_a = None if latent.q_rank is None else Linear(ops, ("q_a",), spec.qkv_bias, dtype)
        self.q_a_norm = None if latent.q_rank is None else Norm(ops, latent.norm, latent.q_rank)
        self.kv_a = Linear(ops, ("kv_a",), spec.qkv_bias, dtype)
        self.kv_a_norm = Norm(ops, latent.norm, latent.rank)
        self.kv_b = HeadProjections(ops, latent, heads, dtype)

    @property
    def reader(self) -> None:
        """Several projections read the rows."""
        return None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """What every row goes through."""
        down = () if self.q_a is None else (self.q_a,)
        return (*down, self.q, self.kv_a, *self.kv_b.linears, self.out)

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        if part == "kv_b":
            self.kv_b.receive(tensor)
        elif part == "q_a_norm" and self.q_a_norm is not None:
            self.q_a_norm.receive(part, kind, tensor)
        elif part == "kv_a_norm":
            self.kv_a_norm.receive(part, kind, tensor)
        elif part == "q_a" and self.q_a is not None:
            self.q_a.receive(part, kind, tensor)
        else:
            {"kv_a": self.kv_a, "out": self.out}.get(part, self.q).receive(part, kind, tensor)

    def __call__(self, x: Rows, ctx: StepContext, cache: LayerCache) -> Tensor:
        return self.out(self._mixed(x, ctx, cache), ctx)

    def add_to(self, stream: ResidualStream, x: Rows, ctx: StepContext, cache: LayerCache) -> None:
        """stream += self(x), fused as the stream wants it."""
        self.out.add_to(stream, self._mixed(x, ctx, cache), ctx)

    def _mixed(self, x: Rows, ctx: StepContext, cache: LayerCache) -> Tensor:
        """Everything up to the output projection."""
        rows = x.normed() if isinstance(x, Unnormed) else x
        q = self._queries(rows, ctx)
        kv = self.kv_a(rows, ctx)
        rank, tokens = self.shape.rank, kv.shape[0]
        kv[:, :rank] = self.kv_a_norm(kv[:, :rank].contiguous())
        mixed = self._ops.latent_attend(q, kv, cache, ctx, self._group, self.shape, self._rope, self._spec.scale)
        values = self.kv_b(mixed.view(tokens, self.shape.num_heads, rank), self.kv_b.values)
        return values.contiguous().view(tokens, -1)

    def _queries(self, rows: Tensor, ctx: StepContext) -> Tensor:
        """[T, heads * width]: each head's query in the latent space, and its part that will turn."""
        if self.q_a is not None and self.q_a_norm is not None:
            rows = self.q_a_norm(self.q_a(rows, ctx))
        shape, nope = self.shape, self._latent.nope_dim
        heads = self.q(rows, ctx).view(-1, shape.num_heads, nope + shape.rope_dim)
        q = heads.new_empty(heads.shape[0], shape.num_heads, shape.width)
        q[..., : shape.rank] = self.kv_b(heads[..., :nope], self.kv_b.keys)
        q[..., shape.rank :] = heads[..., nope:]
        return q.view(heads.shape[0], -1)
