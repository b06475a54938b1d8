"""The only decoder: every model family runs through this code, configured by its spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.kernels.quantized import StoredWeight, WeightUse
from quire.kernels.types import LayerCache, StepContext
from quire.kernels.unread import check_numbers
from quire.layers.attention import Attention
from quire.layers.experts import ExpertLoad, Moe
from quire.layers.latent import LatentAttention
from quire.layers.linear import Embedding, Linear, SharedEmbedding, SharedHead, VocabularyHead
from quire.layers.mlp import Mlp
from quire.layers.norm import Norm
from quire.layers.rotary import RopeTable, growth_table
from quire.layers.share import LayerShare
from quire.layers.spec import MoeSpec, QueryGrowth
from quire.layers.stream import ResidualStream, Rows, Unnormed
from quire.models.kv_scales import KVScales
from quire.models.shard import Shard, shard_of
from quire.models.spec import DecoderSpec, LayerSpec
from quire.ops.interface import Ops
from quire.parallel.collectives import TensorGroup
from quire.parallel.place import Place


class DecoderLayer:
    """Attention and MLP with their residuals; the spec says where the norms are."""

    def __init__(
        self,
        ops: Ops,
        spec: LayerSpec,
        hidden: int,
        rope: Tensor | None,
        group: int,
        dtype: torch.dtype | None,
        growth: Tensor | None = None,
        share: LayerShare | None = None,
        ranks: TensorGroup | None = None,
    ) -> None:
        self._placement = spec.placement
        latent = spec.attention.latent
        self.attn = (
            Attention(ops, spec.attention, rope, group, dtype, growth, share, ranks) if latent is None or rope is None
            else LatentAttention(ops, spec.attention, latent, rope, group, dtype, share, ranks)
        )
        self.mlp = (
            Moe(ops, spec.mlp, dtype, share, ranks) if isinstance(spec.mlp, MoeSpec)
            else Mlp(ops, spec.mlp, dtype, share, ranks)
        )
        self.attn_norm = Norm(ops, spec.norm, hidden)
        if spec.placement != "parallel":
            self.mlp_norm = Norm(ops, spec.norm, hidden)
        if spec.placement == "sandwich":
            self.attn_post_norm = Norm(ops, spec.norm, hidden)
            self.mlp_post_norm = Norm(ops, spec.norm, hidden)

    def receive(self, path: list[str], kind: str, tensor: StoredWeight) -> None:
        """Take one weight. `path` is its place inside the layer: attn.q, mlp.experts.3.down, attn_norm."""
        getattr(self, path[0]).receive(".".join(path[1:]), kind, tensor)

    def __call__(self, stream: ResidualStream, ctx: StepContext, cache: LayerCache) -> None:
        if self._placement == "pre":
            self.attn.add_to(stream, stream.normed(self.attn_norm, self.attn.reader), ctx, cache)
            self.mlp.add_to(stream, stream.normed(self.mlp_norm, self.mlp.reader), ctx)
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
    """A decoder, or one rank's share of one.

    Built empty. `load` takes the weights one tensor at a time, under the names of `shard.parameters`; `missing` lists
    those still to come. The first stage owns the embeddings, the last one the head. Tensor ranks of a stage make the
    same calls with the same tokens and exchange sums inside them. `max_model_len` is the longest sequence. `asked_len`
    is what it would be with unlimited memory; a longrope chooses its factors by that.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        *,
        max_model_len: int | None = None,
        asked_len: int | None = None,
        shard: Shard | None = None,
        ranks: TensorGroup | None = None,
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self.shard = shard = shard_of(spec, Place()) if shard is None else shard
        _check_ranks(shard, ranks)
        self.spec = spec
        self.ops = ops
        self.max_model_len = _checked_length(spec, max_model_len)
        self.first_layer, self.last_layer = shard.first_layer, shard.last_layer
        self.weights_dtype = dtype
        self.ranks = ranks
        self._shapes = shard.parameters
        self._of_other_stages = spec.parameters().keys() - self._shapes.keys()
        self._missing = set(self._shapes)
        self.kv_scales = KVScales(shard)
        # Kernels can fuse only RMS norms that read the residual stream before attention, MLP or head.
        self._fusable = all(layer.placement == "pre" and layer.norm.kind == "rms" for layer in spec.layers) and (
            spec.final_norm is None or spec.final_norm.kind == "rms"
        )
        self._build_ends()
        self.asked_len = self.max_model_len if asked_len is None else asked_len
        self._reached = 0
        """Positions for which the rope tables are computed."""
        self._ready: StepContext | None = None
        """The step for which `reach` has already checked that."""
        self._ropes = [RopeTable(rope, self.max_model_len, self.asked_len) for rope in spec.ropes]
        if not ops.grows_tables:
            self._compute_ropes(self.max_model_len)
        self._growths: dict[QueryGrowth, Tensor] = {}
        groups = spec.group_of_layer()
        self.layers = [
            self._build_layer(index, groups[index]) for index in range(self.first_layer, self.last_layer)
        ]
        self.expert_load = self._count_experts()

    def _count_experts(self) -> ExpertLoad:
        """Give every MoE layer a row of one tensor, in which it counts the tokens of each expert."""
        with_experts = {index: layer.mlp for index, layer in enumerate(self.layers, self.first_layer)
                        if isinstance(layer.mlp, Moe)}  # fmt: skip
        most = max((moe.num_experts for moe in with_experts.values()), default=0)
        counts = torch.zeros(len(with_experts), most, dtype=torch.int64)
        for row, moe in zip(counts, with_experts.values(), strict=True):
            moe.load = row[: moe.num_experts]
        return ExpertLoad(tuple(with_experts), counts)

    def _build_ends(self) -> None:
        spec, ops, dtype, ranks = self.spec, self.ops, self.weights_dtype, self.ranks
        projected = spec.embed_dim != spec.hidden_size
        runs = self.shard.vocabulary
        both = [Embedding(ops, dtype) if ranks is None else SharedEmbedding(ops, dtype, runs, ranks) for _ in range(2)]
        self.embed, self.head = both[0], both[0 if spec.tied_head else 1]
        self._shared_head: SharedHead | None = None if ranks is None else VocabularyHead(self.head, runs, ranks)
        self.positions = Embedding(ops, dtype, WeightUse.EXACT) if spec.positions else None
        self.embed_in = Linear(ops, ("",), False, dtype) if projected else None
        self.embed_out = Linear(ops, ("",), False, dtype) if projected else None
        self.final_norm = Norm(ops, spec.final_norm, spec.hidden_size) if spec.final_norm else None

    def _build_layer(self, index: int, group: int) -> DecoderLayer:
        layer = self.spec.layers[index]
        rope = None if layer.attention.rope is None else self._ropes[layer.attention.rope].rows
        growth = layer.attention.growth
        if growth is not None and growth not in self._growths:
            self._growths[growth] = growth_table(growth, self.max_model_len)
        factors = None if growth is None else self._growths[growth]
        share = None if self.ranks is None else self.shard.layer(index)
        return DecoderLayer(
            self.ops, layer, self.spec.hidden_size, rope, group, self.weights_dtype, factors, share, self.ranks
        )

    def load(self, name: str, tensor: StoredWeight, source: str | None = None) -> None:
        """Take one tensor; `source` is its name in the checkpoint, for error messages."""
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
        check_numbers(shown, tensor)
        self._missing.discard(name)
        *path, kind = name.split(".")
        if path[0] == "layers":
            self.layers[int(path[1]) - self.first_layer].receive(path[2:], kind, tensor)
        else:
            getattr(self, path[0]).receive("", kind, tensor)

    def missing(self) -> list[str]:
        """Parameters not loaded yet, in the order of the spec."""
        return [name for name in self._shapes if name in self._missing]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights; norms and rope tables are small and not counted."""
        ends = {id(each): each for each in (self.embed, self.head, self.positions, self.embed_in, self.embed_out)
                if each is not None}
        inner = [each for layer in self.layers for each in (*layer.attn.linears, *layer.mlp.all_linears)]
        return sum(each.packed.nbytes for each in (*ends.values(), *inner) if each.is_loaded)

    def allocate_caches(self, num_blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """One zeroed cache per layer, with `num_blocks[g]` blocks for layers of cache group g."""
        groups, found = self.spec.group_of_layer(), []
        for index in range(self.first_layer, self.last_layer):
            cache = self.ops.allocate_cache(self.shard.kv(index), num_blocks[groups[index]], block_size)
            self.kv_scales.give_to(cache, index)
            found.append(cache)
        return found

    def forward(self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache]) -> ResidualStream:
        """From token ids [T] (first stage) or hidden rows [T, hidden], which are overwritten, to the residual stream
        after this stage's last layer. The next pipeline stage gets its `settled` rows.

        The final norm is part of `logits`, so that it runs only on rows whose logits are needed.
        """
        stream = self._stream(x, ctx)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(stream, ctx, cache)
        return stream

    def forward_capturing(
        self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache], capture: Sequence[str]
    ) -> tuple[ResidualStream, dict[str, Tensor]]:
        """As `forward`; also returns the named hidden states: "embed", or "layers.i" for the output of layer i."""
        unknown = set(capture) - {"embed"} - {f"layers.{i}" for i in range(self.first_layer, self.last_layer)}
        if unknown:
            raise ConfigError(
                f"no hidden state is called {sorted(unknown)[0]!r}: use embed or layers.<index>"
            )
        captured: dict[str, Tensor] = {}
        stream = self._stream(x, ctx)
        if "embed" in capture:
            captured["embed"] = stream.kept()
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), self.first_layer):
            layer(stream, ctx, cache)
            if f"layers.{index}" in capture:
                captured[f"layers.{index}"] = stream.kept()
        return stream, captured

    def forward_some(
        self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache], kept: Sequence[int]
    ) -> ResidualStream:
        """As `forward`, but through only the layers in `kept` (those of this stage): a cheap approximation that drafts
        tokens (`skip_layers`)."""
        stream = self._stream(x, ctx)
        for index in (index for index in kept if self.first_layer <= index < self.last_layer):
            self.layers[index - self.first_layer](stream, ctx, caches[index - self.first_layer])
        return stream

    @property
    def logits_dtype(self) -> torch.dtype:
        """The activations' type, but float32 if a soft cap is applied to the logits."""
        return self.ops.dtype if self.spec.logit_softcap is None else torch.float32

    def logits(
        self, hidden: ResidualStream, ctx: StepContext | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Logits [R, vocab] of rows from the last layer, which are overwritten; into `out` if given. Tensor ranks that
        share the vocabulary use `gathered_logits` instead."""
        rows = self._before_head(hidden, ctx)
        if self.spec.logit_softcap is None:
            return self.head(rows, ctx, out)
        capped = self._capped(self.head(rows, ctx))
        return capped if out is None else out.copy_(capped)

    def share_head(self, head: SharedHead) -> None:
        """From now on compute logits through `head`, with the same result."""
        self._shared_head = head

    def gathered_logits(
        self, hidden: ResidualStream, ctx: StepContext | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """As `logits`. If tensor ranks share the vocabulary: on the ranks that draw; None on the others."""
        if self._shared_head is None:
            return self.logits(hidden, ctx, out)
        rows = self._before_head(hidden, ctx)
        whole = rows.normed() if isinstance(rows, Unnormed) else rows
        if self.spec.logit_softcap is None:
            return self._shared_head.logits(whole, ctx, out)
        found = self._shared_head.logits(whole, ctx)
        capped = None if found is None else self._capped(found)
        return capped if capped is None or out is None else out.copy_(capped)

    def _before_head(self, hidden: ResidualStream, ctx: StepContext | None) -> Rows:
        rows: Rows = hidden.settled() if self.final_norm is None else hidden.normed(self.final_norm)
        return rows if self.embed_out is None else self.embed_out(rows, ctx)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.spec.logit_softcap
        if cap is None:
            return logits
        # float64: a vectorised float32 tanh may round the same value differently at another place in the batch
        return (torch.tanh(logits.to(torch.float64) / cap) * cap).to(torch.float32)

    def resumed(self, rows: Tensor) -> ResidualStream:
        """The stream after the last layer, rebuilt from its settled rows."""
        return ResidualStream(self.ops, rows, self._fusable)

    def reach(self, ctx: StepContext) -> None:
        """Extend the rope tables to a step's positions. The forward methods call this. A caller that records a forward
        or replays recorded calls must call it first, because it is not among the recorded calls."""
        if ctx is not self._ready and self._reached < self.max_model_len:
            self._compute_ropes(int(ctx.positions.numpy().max(initial=-1)) + 1)
            self._ready = ctx

    def _compute_ropes(self, length: int) -> None:
        if length > self._reached:
            for rope in self._ropes:
                rope.reach(length)
            self._reached = min([rope.computed for rope in self._ropes], default=self.max_model_len)

    def _stream(self, x: Tensor, ctx: StepContext) -> ResidualStream:
        self.reach(ctx)
        return ResidualStream(self.ops, self._embed(x, ctx) if self.shard.place.is_first else x, self._fusable)

    def _embed(self, ids: Tensor, ctx: StepContext) -> Tensor:
        hidden = self.embed.rows(ids)
        if self.spec.embed_scale != 1.0:
            hidden = self.ops.scale(hidden, self.spec.embed_scale)
        if self.embed_in is not None:
            hidden = self.embed_in(hidden, ctx)
        if self.positions is not None and self.spec.positions is not None:
            hidden = hidden + self.positions.rows(ctx.positions + self.spec.positions.offset)
        return hidden


def _check_ranks(shard: Shard, ranks: TensorGroup | None) -> None:
    size = 1 if ranks is None else ranks.size
    if size != shard.place.tensor_size or (ranks is not None and ranks.rank != shard.place.tensor_rank):
        raise ConfigError(f"a decoder at {shard.place} needs a group of as many tensor ranks")


def _checked_length(spec: DecoderSpec, max_model_len: int | None) -> int:
    """`max_model_len` checked: rope can go past the trained length, a table of learned positions cannot."""
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
