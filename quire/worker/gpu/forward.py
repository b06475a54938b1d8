"""The decoder's pass on a GPU, with the kernels that only make sense across the borders of its layers.

Layers that normalise first with RMS (Llama, Mistral, Qwen and their like) run fused: the residual sum with
the norm
after it, and for a handful of rows norm, product, activation and residual in one launch. Any other layer
runs through
the decoder as it is. Weights and caches are the decoder's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.context import StepContext
from quire.layers.ops import HeadTurn, LayerCache, Ops
from quire.models.decoder import Decoder, DecoderLayer
from quire.models.spec import DecoderSpec


@dataclass(slots=True)
class Hidden:
    """Rows after the last layer: `stream`, plus `delta` where the last sum has not been made yet."""

    stream: Tensor
    delta: Tensor | None = None

    def rows(self, index: Tensor | slice | None) -> Hidden:
        if index is None:
            return self
        return Hidden(self.stream[index], None if self.delta is None else self.delta[index])


class DeviceForward:
    """Runs a decoder whose `Ops` may offer the fused forms of `TritonOps`."""

    def __init__(self, decoder: Decoder, ops: Ops) -> None:
        self._decoder = decoder
        self._ops = ops
        self.fused = hasattr(ops, "norm_linear") and fusable(decoder.spec)
        # Before any step: comparing them waits for the device, which a step must not.
        norms = [norm for layer in decoder.layers for norm in (layer.attn_norm, layer.mlp_norm)] if self.fused else []
        if self.fused and decoder.final_norm is not None:
            norms.append(decoder.final_norm)
        self._gains = {id(norm): self._narrow(norm.weight) for norm in norms}

    def __call__(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache]) -> Hidden:
        if not self.fused:
            return Hidden(self._decoder.forward(ids, ctx, caches))
        if self._ops.fuses_norm(ids.shape[0], self._decoder.spec.hidden_size):  # type: ignore[attr-defined]
            return Hidden(self._few(ids, ctx, caches))
        return self._many(ids, ctx, caches)

    def logits(self, hidden: Hidden, out: Tensor | None = None) -> Tensor:
        """[R, vocab] in the type of the activations; into `out` if given. `hidden` is used up."""
        decoder, ops = self._decoder, self._ops
        if not self.fused:
            found = decoder.logits(hidden.stream)
            return found if out is None else out.copy_(found)
        norm = decoder.final_norm
        if norm is None or decoder.embed_out is not None:
            raise NotImplementedError("fusable() admits no such decoder")
        if hidden.delta is not None:
            rows = ops.add_rms_norm(hidden.delta, hidden.stream, norm.weight, norm.eps)  # type: ignore[attr-defined]
        elif ops.fuses_norm(*hidden.stream.shape):  # type: ignore[attr-defined]
            return self._capped(
                ops.norm_linear(  # type: ignore[attr-defined]
                    hidden.stream, self._gains[id(norm)], norm.eps, decoder.head.packed, None, out
                )
            )
        else:
            rows = norm(hidden.stream)
        return self._capped(ops.linear(rows, decoder.head.packed, None, out))  # type: ignore[call-arg]

    def _narrow(self, gain: Tensor) -> Tensor:
        """A norm's weight for the fused products, each of whose programs reads all of it: in the activations' type
        where that loses nothing (so the result is the same), else as it is."""
        narrow = gain.to(getattr(self._ops, "dtype", torch.float32))
        return narrow if torch.equal(narrow.float(), gain) else gain

    def _capped(self, found: Tensor) -> Tensor:
        decoder = self._decoder
        cap = decoder.spec.logit_softcap
        return found if cap is None else found.copy_(torch.tanh(found.float() / cap) * cap)

    def _embed(self, ids: Tensor) -> Tensor:
        hidden = self._decoder.embed.rows(ids)
        scale = self._decoder.spec.embed_scale
        return hidden if scale == 1.0 else hidden * scale

    def _few(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache]) -> Tensor:
        """A handful of rows: every launch counts, every product takes what is next to it along."""
        ops = self._ops
        x = self._embed(ids)
        for layer, cache in zip(self._decoder.layers, caches, strict=True):
            norm, mlp = layer.attn_norm, layer.mlp
            qkv = ops.norm_linear(  # type: ignore[attr-defined]
                x, self._gains[id(norm)], norm.eps, layer.attn.qkv.packed
            )
            x = ops.linear(self._attend(layer, qkv, ctx, cache), layer.attn.out.packed, x)
            up = ops.norm_linear(  # type: ignore[attr-defined]
                x, self._gains[id(layer.mlp_norm)], layer.mlp_norm.eps, mlp.up.packed, mlp._spec.activation
            )
            x = ops.linear(up, mlp.down.packed, x)
        return x

    def _many(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache]) -> Hidden:
        """Products by themselves; each residual sum in one pass with the norm that follows it."""
        ops, layers = self._ops, self._decoder.layers
        stream = self._embed(ids)
        normed, delta = layers[0].attn_norm(stream), stream
        for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            if index:
                norm = layer.attn_norm
                normed = ops.add_rms_norm(delta, stream, norm.weight, norm.eps)  # type: ignore[attr-defined]
            mixed = self._attend(layer, ops.linear(normed, layer.attn.qkv.packed), ctx, cache)
            norm = layer.mlp_norm
            mixed = ops.linear(mixed, layer.attn.out.packed)
            normed = ops.add_rms_norm(mixed, stream, norm.weight, norm.eps)  # type: ignore[attr-defined]
            delta = ops.linear(self._gated(normed, layer), layer.mlp.down.packed)
        return Hidden(stream, delta)

    def _gated(self, normed: Tensor, layer: DecoderLayer) -> Tensor:
        """The feed-forward up to its second product."""
        wide = self._ops.linear(normed, layer.mlp.up.packed)
        return self._ops.act_mul(wide, layer.mlp._spec.activation)

    def _attend(self, layer: DecoderLayer, qkv: Tensor, ctx: StepContext, cache: LayerCache) -> Tensor:
        """What `Attention` does between its two projections."""
        attn, spec = layer.attn, layer.attn._spec
        q_norm, k_norm = attn.q_norm, attn.k_norm
        turn = HeadTurn(
            attn._rope,
            q_norm.weight if q_norm else None,
            k_norm.weight if k_norm else None,
            q_norm.eps if q_norm else 0.0,
        )
        return self._ops.rope_attend(  # type: ignore[attr-defined]
            qkv, cache, ctx, attn._group, attn.shape, turn, spec.scale, spec.window, spec.softcap
        )


def fusable(spec: DecoderSpec) -> bool:
    """Whether every layer is x + f(rms(x)) with a gated feed-forward, between plain embeddings and a final
    norm."""
    ends = (
        spec.final_norm is not None
        and spec.final_norm.kind == "rms"
        and spec.positions is None
        and spec.embed_dim == spec.hidden_size
    )
    return ends and all(
        layer.placement == "pre" and layer.norm.kind == "rms" and layer.mlp.gated for layer in spec.layers
    )
