"""The one decoder: every model family runs through this code, shaped by its spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.kernels.types import LayerCache, StepContext
from quire.layers.attention import Attention
from quire.layers.linear import Embedding, Linear
from quire.layers.mlp import Mlp
from quire.layers.norm import Norm
from quire.layers.rotary import growth_table, rope_table
from quire.layers.spec import QueryGrowth
from quire.layers.stream import ResidualStream, Rows
from quire.models.spec import DecoderSpec, LayerSpec
from quire.ops.interface import Ops


class DecoderLayer:
    """Attention and feed-forward with their residuals, norms placed as the spec says."""

    def __init__(
        self,
        ops: Ops,
        spec: LayerSpec,
        hidden: int,
        rope: Tensor | None,
        group: int,
        dtype: torch.dtype,
        growth: Tensor | None = None,
    ) -> None:
        self._placement = spec.placement
        self.attn = Attention(ops, spec.attention, rope, group, dtype, growth)
        self.mlp = Mlp(ops, spec.mlp, dtype)
        self.attn_norm = Norm(ops, spec.norm, hidden)
        if spec.placement != "parallel":
            self.mlp_norm = Norm(ops, spec.norm, hidden)
        if spec.placement == "sandwich":
            self.attn_post_norm = Norm(ops, spec.norm, hidden)
            self.mlp_post_norm = Norm(ops, spec.norm, hidden)

    def receive(self, path: list[str], kind: str, tensor: Tensor) -> None:
        """`path` is the parameter's place inside the layer: attn.q, mlp.down, attn_norm."""
        getattr(self, path[0]).receive(path[-1], kind, tensor)

    def __call__(self, stream: ResidualStream, ctx: StepContext, cache: LayerCache) -> None:
        if self._placement == "pre":
            self.attn.add_to(stream, stream.normed(self.attn_norm), ctx, cache)
            self.mlp.add_to(stream, stream.normed(self.mlp_norm), ctx)
        elif self._placement == "sandwich":
            stream.add(self.attn_post_norm(self.attn(stream.normed(self.attn_norm), ctx, cache)))
            stream.add(self.mlp_post_norm(self.mlp(stream.normed(self.mlp_norm), ctx)))
        elif self._placement == "parallel":
            normed = stream.normed(self.attn_norm)
            self.attn.add_to(stream, normed, ctx, cache)
            self.mlp.add_to(stream, normed, ctx)
        elif self._placement == "output":
            stream.add(self.attn_norm(self.attn(stream.rows, ctx, cache)))
            stream.add(self.mlp_norm(self.mlp(stream.rows, ctx)))
        else:
            self.attn.add_to(stream, stream.rows, ctx, cache)
            stream.rows = self.attn_norm(stream.rows)
            self.mlp.add_to(stream, stream.rows, ctx)
            stream.rows = self.mlp_norm(stream.rows)


class Decoder:
    """A decoder, or the layers [first_layer, last_layer) of one.

    Built empty; `load` brings the weights one tensor at a time under the names of `spec.parameters()`, and
    `finish_loading` says what is missing. The first stage owns the embeddings, the last one the head.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        *,
        max_model_len: int | None = None,
        first_layer: int = 0,
        last_layer: int | None = None,
        rank: int = 0,
        size: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        last_layer = spec.num_layers if last_layer is None else last_layer
        _check_shard(spec, first_layer, last_layer, rank, size)
        self.spec = spec
        self.ops = ops
        self.max_model_len = _checked_length(spec, max_model_len)
        self.first_layer, self.last_layer = first_layer, last_layer
        self._dtype = dtype
        parameters = spec.parameters()
        self._shapes = {name: shape for name, shape in parameters.items() if self._owns(name)}
        self._of_other_stages = parameters.keys() - self._shapes.keys()
        self._missing = set(self._shapes)
        # Every norm reads the stream before a part of a layer, or before the head, and is one that kernels can fuse.
        self._fusable = all(layer.placement == "pre" and layer.norm.kind == "rms" for layer in spec.layers) and (
            spec.final_norm is None or spec.final_norm.kind == "rms"
        )
        self._build_ends()
        ropes = [rope_table(rope, self.max_model_len) for rope in spec.ropes]
        self._growths: dict[QueryGrowth, Tensor] = {}
        groups = spec.group_of_layer()
        self.layers = [
            self._build_layer(index, ropes, groups[index]) for index in range(first_layer, last_layer)
        ]

    def _build_ends(self) -> None:
        spec, ops, dtype = self.spec, self.ops, self._dtype
        projected = spec.embed_dim != spec.hidden_size
        self.embed = Embedding(ops, dtype)
        self.head: Linear = self.embed if spec.tied_head else Linear(ops, ("",), False, dtype)
        self.positions = Embedding(ops, dtype) if spec.positions else None
        self.embed_in = Linear(ops, ("",), False, dtype) if projected else None
        self.embed_out = Linear(ops, ("",), False, dtype) if projected else None
        self.final_norm = Norm(ops, spec.final_norm, spec.hidden_size) if spec.final_norm else None

    def _build_layer(self, index: int, ropes: list[Tensor], group: int) -> DecoderLayer:
        layer = self.spec.layers[index]
        rope = None if layer.attention.rope is None else ropes[layer.attention.rope]
        growth = layer.attention.growth
        if growth is not None and growth not in self._growths:
            self._growths[growth] = growth_table(growth, self.max_model_len)
        factors = None if growth is None else self._growths[growth]
        return DecoderLayer(self.ops, layer, self.spec.hidden_size, rope, group, self._dtype, factors)

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.last_layer == self.spec.num_layers

    def _owns(self, name: str) -> bool:
        """Whether a parameter belongs to this range of layers (a tied table belongs to both ends)."""
        place = name.split(".")
        if place[0] == "layers":
            return self.first_layer <= int(place[1]) < self.last_layer
        if place[0] in ("head", "final_norm", "embed_out"):
            return self.is_last
        return self.is_first or (place[0] == "embed" and self.spec.tied_head and self.is_last)

    def load(self, name: str, tensor: Tensor, source: str | None = None) -> None:
        """Take one tensor; `source` is its name in the checkpoint, for messages."""
        shown = source or name
        if name not in self._shapes:
            if name in self._of_other_stages:
                return
            raise ModelLoadError(f"tensor {shown!r} is not one that {self.spec.architecture} has")
        if name not in self._missing:
            raise ModelLoadError(f"tensor {shown!r} is in the checkpoint twice: remove one of its files")
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelLoadError(
                f"tensor {shown!r} has shape {tuple(tensor.shape)}, but the config asks for "
                f"{self._shapes[name]}: config.json and the weights are not of the same model"
            )
        if not tensor.is_floating_point():
            raise ModelLoadError(f"tensor {shown!r} has type {tensor.dtype}, but weights are floating point")
        self._missing.discard(name)
        *path, kind = name.split(".")
        if path[0] == "layers":
            self.layers[int(path[1]) - self.first_layer].receive(path[2:], kind, tensor)
        else:
            getattr(self, path[0]).receive("", kind, tensor)

    def missing(self) -> list[str]:
        """Parameters that have not come yet, in the order of the spec."""
        return [name for name in self._shapes if name in self._missing]

    def allocate_caches(self, num_blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """One zeroed cache per layer, with `num_blocks[g]` blocks in those of cache group g."""
        layers = self.spec.layers[self.first_layer : self.last_layer]
        groups = self.spec.group_of_layer()[self.first_layer : self.last_layer]
        return [
            self.ops.allocate_cache(layer.kv, num_blocks[group], block_size)
            for layer, group in zip(layers, groups, strict=True)
        ]

    def forward(self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache]) -> ResidualStream:
        """Token ids [T] (first stage) or hidden rows [T, hidden], which are used up, to the stream after the last
        layer owned. The next stage of a pipeline gets its `settled` rows.

        The final norm is part of `logits`, so that it runs only on the rows that are asked for.
        """
        stream = self._stream(x, ctx)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(stream, ctx, cache)
        return stream

    def forward_capturing(
        self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache], capture: Sequence[str]
    ) -> tuple[ResidualStream, dict[str, Tensor]]:
        """As `forward`, with the named hidden states: "embed", or "layers.i" for what layer i puts out."""
        unknown = set(capture) - {"embed"} - {f"layers.{i}" for i in range(self.first_layer, self.last_layer)}
        if unknown:
            raise ConfigError(
                f"no hidden state is called {sorted(unknown)[0]!r}: use embed or layers.<index>"
            )
        captured: dict[str, Tensor] = {}
        stream = self._stream(x, ctx)
        if "embed" in capture:
            captured["embed"] = stream.copied()
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), self.first_layer):
            layer(stream, ctx, cache)
            if f"layers.{index}" in capture:
                captured[f"layers.{index}"] = stream.copied()
        return stream, captured

    def forward_some(
        self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache], kept: Sequence[int]
    ) -> ResidualStream:
        """As `forward`, through only the layers `kept`: a rough guess at what all of them would give."""
        stream = self._stream(x, ctx)
        for index in kept:
            self.layers[index - self.first_layer](stream, ctx, caches[index - self.first_layer])
        return stream

    @property
    def logits_dtype(self) -> torch.dtype:
        """Of the logits: the activations', but float32 where a soft cap is computed on top."""
        return self.ops.dtype if self.spec.logit_softcap is None else torch.float32

    def logits(
        self, hidden: ResidualStream, ctx: StepContext | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[R, vocab] of rows that came out of the last layer, which are used up; into `out` if given."""
        rows: Rows = hidden.settled() if self.final_norm is None else hidden.normed(self.final_norm)
        if self.embed_out is not None:
            rows = self.embed_out(rows, ctx)
        cap = self.spec.logit_softcap
        if cap is None:
            return self.head(rows, ctx, out)
        # float64, because a vectorised float32 tanh may round differently at another place of the batch
        capped = (torch.tanh(self.head(rows, ctx).to(torch.float64) / cap) * cap).to(torch.float32)
        return capped if out is None else out.copy_(capped)

    def _stream(self, x: Tensor, ctx: StepContext) -> ResidualStream:
        return ResidualStream(self.ops, self._embed(x, ctx) if self.is_first else x, self._fusable)

    def _embed(self, ids: Tensor, ctx: StepContext) -> Tensor:
        hidden = self.embed.rows(ids)
        if self.spec.embed_scale != 1.0:
            hidden = hidden * self.spec.embed_scale
        if self.embed_in is not None:
            hidden = self.embed_in(hidden, ctx)
        if self.positions is not None and self.spec.positions is not None:
            hidden = hidden + self.positions.rows(ctx.positions + self.spec.positions.offset)
        return hidden


def _check_shard(spec: DecoderSpec, first: int, last: int, rank: int, size: int) -> None:
    if size != 1 or rank != 0:
        raise ConfigError(f"tensor parallel shards are not built yet: rank {rank} of {size}; use size 1")
    if not 0 <= first < last <= spec.num_layers:
        raise ConfigError(f"layers [{first}, {last}) are not a range of the model's {spec.num_layers} layers")


def _checked_length(spec: DecoderSpec, max_model_len: int | None) -> int:
    """Rotations go on past the trained length; a table of learned positions ends."""
    length = spec.max_positions if max_model_len is None else max_model_len
    if length < 1:
        raise ConfigError(f"max_model_len must be at least 1, not {length}", field="max_model_len")
    if spec.positions is not None and length + spec.positions.offset > spec.positions.rows:
        room = spec.positions.rows - spec.positions.offset
        raise ConfigError(
            f"max_model_len {length} is more than the {room} positions this model learned: lower it",
            field="max_model_len",
        )
    return length
