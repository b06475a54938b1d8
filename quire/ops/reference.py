"""The operations of the layers in plain torch, on any device: slow, clear, what the kernels are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import EngineError
from quire.kernels import torch_norm
from quire.kernels.kv_spec import KVSpec
from quire.kernels.slices import Slices, add_in_tree
from quire.kernels.torch_attention import softmax_attention
from quire.kernels.types import HeadShape, LatentShape, LayerCache, StepContext
from quire.ops.interface import Ops

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(slots=True)
class PlainLinear:
    """A linear layer's weight kept as it came, [out_features, in_features]."""

    weight: Tensor
    bias: Tensor | None
    slices: Slices | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class TorchOps(Ops):
    """Reference implementation of `quire.ops.interface.Ops`.

    Correct to rounding, not bit-reproducible: torch's matmul may round a row differently in another batch.
    """

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None
    ) -> PlainLinear:
        if slices is not None:
            slices.check_width(weight.shape[1])
        return PlainLinear(weight.float(), None if bias is None else bias.float(), slices)

    def linear(
        self, x: Tensor, w: PlainLinear, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if w.slices is None:
            found = F.linear(x, w.weight, w.bias)
        else:
            (found,) = self.linear_nodes(x, w)
            found = found if w.bias is None else found + w.bias
        found = found if residual is None else found + residual
        return found if out is None else out.copy_(found)

    def linear_nodes(self, x: Tensor, w: PlainLinear, out: Tensor | None = None) -> Tensor:
        slices = w.slices
        if slices is None:
            raise EngineError("a weight without slices has no tree of sums: use linear")

        def summed(index: int) -> Tensor:
            columns = slices.columns(index, index + 1)
            return F.linear(x[:, columns], w.weight[:, columns])

        found = torch.stack([add_in_tree([summed(i) for i in range(*node)]) for node in slices.nodes()])
        return found if out is None else out.copy_(found)

    def embed(self, ids: Tensor, w: PlainLinear) -> Tensor:
        return w.weight[ids.long()]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms(x, eps) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def norm_all_heads(self, qkv: Tensor, shape: HeadShape, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
        torch_norm.norm_all_heads(qkv, shape.num_heads, shape.num_kv_heads, q_norm, k_norm, eps)

    def head_squares(self, qkv: Tensor, shape: HeadShape) -> Tensor:
        return torch_norm.head_squares(qkv, shape.num_heads + shape.num_kv_heads, shape.head_dim)

    def norm_some_heads(
        self, qkv: Tensor, shape: HeadShape, squares: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], eps: float
    ) -> None:
        start = 0
        for all_heads, norm in zip(squares, norms, strict=True):
            part = qkv[:, start : start + norm.shape[0]]
            torch_norm.norm_some_heads(part, all_heads, norm, shape.head_dim, eps)
            start += norm.shape[0]

    def act(self, x: Tensor, kind: str) -> Tensor:
        return _ACTIVATIONS[kind](x)

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[kind](gate) * up

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        rope: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
    ) -> None:
        """Normalise and rotate q and k in place, then write k and v to the slots of this step's tokens."""
        q, k, v = _split_heads(qkv, shape)
        if q_norm is not None:
            q.copy_(_rms(q, norm_eps) * q_norm)
        if k_norm is not None:
            k.copy_(_rms(k, norm_eps) * k_norm)
        if rope is not None:
            table = rope[ctx.positions].unsqueeze(1)
            q.copy_(_rotate(q, table))
            k.copy_(_rotate(k, table))
        slots = ctx.slots[group]
        block, offset = slots // layer.block_size, slots % layer.block_size
        layer.k[block, :, :, offset] = k
        layer.v[block, :, offset, :] = v

    def attend(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of this step's queries over their sequences' cached keys and values."""
        q, _, _ = _split_heads(qkv, shape)
        out = qkv.new_zeros(q.shape)
        starts, lengths = ctx.query_start.tolist(), ctx.context_len.tolist()
        for s, length in enumerate(lengths):
            lo, hi = starts[s], starts[s + 1]
            if lo == hi:
                continue
            queries = torch.arange(length - (hi - lo), length, device=qkv.device)
            first = 0 if window is None else max(0, length - (hi - lo) - window + 1)
            k, v, start = _gather(layer, ctx.block_tables[group][s], first, length, _detour(ctx, s))
            if not shape.is_even:
                mine = [shape.kv_head(head) for head in range(shape.num_heads)]
                k, v = k[mine], v[mine]
            visible = _visible(queries, torch.arange(start, length, device=qkv.device), window)
            out[lo:hi] = softmax_attention(q[lo:hi], k, v, visible, scale, softcap, sinks)
        return out.reshape(qkv.shape[0], shape.num_heads * shape.head_dim)

    def latent_attend(
        self,
        q: Tensor,
        kv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: LatentShape,
        rope: Tensor,
        scale: float,
    ) -> Tensor:
        heads, table = q.view(q.shape[0], shape.num_heads, shape.width), rope[ctx.positions]
        heads[..., shape.rank :] = _rotate(heads[..., shape.rank :], table.unsqueeze(1))
        kv[:, shape.rank :] = _rotate(kv[:, shape.rank :], table)
        slots = ctx.slots[group]
        layer.latents[slots // layer.block_size, 0, slots % layer.block_size] = kv
        out = q.new_zeros(q.shape[0], shape.num_heads, shape.rank)
        starts, lengths = ctx.query_start.tolist(), ctx.context_len.tolist()
        for s, length in enumerate(lengths):
            lo, hi = starts[s], starts[s + 1]
            places = _places(length, _detour(ctx, s))
            blocks = ctx.block_tables[group][s, places // layer.block_size].long()
            kept = layer.latents[blocks, 0, places % layer.block_size][None]
            queries = torch.arange(length - (hi - lo), length, device=q.device)
            visible = _visible(queries, torch.arange(length, device=q.device), None)
            out[lo:hi] = softmax_attention(heads[lo:hi], kept, kept[..., : shape.rank], visible, scale, None)
        return out.view(q.shape[0], -1)

    def allocate_cache(self, kv: KVSpec, num_blocks: int, block_size: int) -> LayerCache:
        if kv.kind in ("latent", "feature"):
            (part,) = kv.parts
            return LayerCache(kv, block_size, {part.name: torch.zeros(num_blocks, 1, block_size, part.width)})
        if kv.coded_dim is not None:
            raise EngineError("plain torch keeps keys and values as floats, not as int8 codes")
        heads, dim = kv.heads_of_pair()
        k = torch.zeros(num_blocks, heads, dim, block_size)
        v = torch.zeros(num_blocks, heads, block_size, dim)
        return LayerCache(kv, block_size, {"k": k, "v": v}, tokens_last=("k",))

    def copy_blocks(self, layer: LayerCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Block src[i] -> dst[i]; indexing gathers every source before the first target is written."""
        for part in layer.tensors.values():
            part[list(dst)] = part[list(src)]


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _split_heads(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views [T, heads, head_dim] of the three parts of the fused projection."""
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    return q, k, v


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the first `rot_dim` features, pairing feature i with i + rot_dim / 2 (neox style)."""
    rot = table.shape[-1]
    cos, sin = table.chunk(2, dim=-1)
    a, b = x[..., :rot].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rot:]), dim=-1)


def _gather(layer: LayerCache, table: Tensor, first: int, length: int, detour: list[int]
            ) -> tuple[Tensor, Tensor, int]:
    """Keys and values [Hkv, length - start, head_dim] from the block of key `first`; and that start."""
    start = first // layer.block_size * layer.block_size
    places = _places(length, detour)[start:]
    block, offset = table[places // layer.block_size].long(), places % layer.block_size
    return layer.k[block, :, :, offset].transpose(0, 1), layer.v[block, :, offset].transpose(0, 1), start


def _places(length: int, detour: list[int]) -> Tensor:
    """Where keys 0 .. length - 1 of a sequence lie, counted along its block table."""
    places = torch.arange(length)
    if detour and detour[0] < length:
        places[detour[0] :] = torch.tensor(detour[1 : 1 + length - detour[0]])
    return places


def _detour(ctx: StepContext, s: int) -> list[int]:
    return [] if ctx.detours is None else ctx.detours[s].tolist()


def _visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which keys each query (given by its own key's index) sees: itself and before, at most `window`."""
    distance = queries[:, None] - keys[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
