"""A whole decoder described as plain data, with the cache it needs and the weights it expects; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import ConfigError
from quire.kernels.kv_spec import KVSpec
from quire.layers.spec import AttentionSpec, LatentSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec

__all__ = [
    "AttentionSpec",
    "CacheGroup",
    "DecoderSpec",
    "KVSpec",
    "LayerSpec",
    "MlpSpec",
    "MoeSpec",
    "NormSpec",
    "PositionSpec",
    "RopeSpec",
]

NormPlacement = Literal["pre", "parallel", "sandwich", "post", "output"]
Shape = tuple[int, ...]
INT8_KV = "int8"
"""The `kv_cache_dtype` that keeps keys and values as codes on a CPU."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens, and so share one block table per sequence."""

    kind: Literal["full", "window"]
    window: int | None
    layers: tuple[int, ...]
    bytes_per_token: int
    """Of all its layers together, as a CPU keeps them."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    pre: x + f(norm(x)), as Llama; sandwich: x + post(f(pre(x))), as Gemma; post: norm(x + f(x)), as OPT-350M;
    output: x + norm(f(x)), as OLMo-2.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    norm: NormSpec
    placement: NormPlacement = "pre"
    int8_kv: bool = False
    """Its keys and values are kept as int8 codes."""

    def within(self, positions: int) -> LayerSpec:
        """The same layer; one whose window no sequence can leave has none (Phi-4 has one of 262144 keys)."""
        if self.attention.window is None or self.attention.window < positions:
            return self
        return replace(self, attention=replace(self.attention, window=None))

    @property
    def kv(self) -> KVSpec:
        a = self.attention
        if a.latent is not None:
            return KVSpec.latent(a.latent.width)
        kv = KVSpec.pair(a.num_kv_heads, a.head_dim, a.window)
        return kv.in_codes() if self.int8_kv else kv


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """Learned position embeddings: row `position + offset` of a table of `rows`."""

    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything the decoder needs to know about a model besides its weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...] = ()
    final_norm: NormSpec | None = None
    embed_dim: int = 0
    """Width of the token embeddings; if not hidden_size, they are projected in, and out before the head."""
    embed_scale: float = 1.0
    positions: PositionSpec | None = None
    tied_head: bool = False
    logit_softcap: float | None = None
    extra_layers: int = 0
    """Layers that a checkpoint may hold behind the last one, which guess further tokens (MTP). They are not read."""

    def __post_init__(self) -> None:
        if self.embed_dim == 0:
            object.__setattr__(self, "embed_dim", self.hidden_size)
        object.__setattr__(self, "layers", tuple(layer.within(self.max_positions) for layer in self.layers))

    def asked_len(self, max_model_len: int | None) -> int:
        """The longest sequence that an engine with this option is asked for; its memory may allow less."""
        return self.max_positions if max_model_len is None else max_model_len

    def with_kv_dtype(self, kv_cache_dtype: str) -> DecoderSpec:
        """The same decoder with a cache of that type; `int8` is a CPU's, other types are not a matter of the spec."""
        if kv_cache_dtype != "auto" and self.has_latents:
            raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is for keys and values, and {self.architecture} has "
                              "latents (MLA): use kv_cache_dtype='auto'", field="kv_cache_dtype")
        if kv_cache_dtype != INT8_KV:
            return self
        return replace(self, layers=tuple(replace(layer, int8_kv=True) for layer in self.layers))

    @property
    def has_latents(self) -> bool:
        return any(layer.attention.latent is not None for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the cache of all layers on a CPU, for a token that every group keeps."""
        return sum(layer.kv.bytes_per_token() for layer in self.layers)

    def kv_bytes_per_block(self, block_size: int, element_size: int = 4) -> int:
        """Of a block in the caches of all layers."""
        return sum(layer.kv.bytes_per_block(block_size, element_size) for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters().values())

    def cache_groups(self) -> list[CacheGroup]:
        """The full layers first, then one group per window size, narrowest first."""
        members: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.kv.window, []).append(index)
        windows = sorted(members, key=lambda w: -1 if w is None else w)
        return [
            CacheGroup(
                "full" if window is None else "window",
                window,
                tuple(members[window]),
                sum(self.layers[i].kv.bytes_per_token() for i in members[window]),
            )
            for window in windows
        ]

    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer, the index of its cache group."""
        owner = {layer: g for g, group in enumerate(self.cache_groups()) for layer in group.layers}
        return tuple(owner[i] for i in range(self.num_layers))

    def parameters(self) -> dict[str, Shape]:
        """Name and shape of every tensor the decoder is loaded from, in the decoder's own names."""
        shapes: dict[str, Shape] = {"embed.weight": (self.vocab_size, self.embed_dim)}
        if self.positions is not None:
            shapes["positions.weight"] = (self.positions.rows, self.hidden_size)
        if self.embed_dim != self.hidden_size:
            shapes["embed_in.weight"] = (self.hidden_size, self.embed_dim)
            shapes["embed_out.weight"] = (self.embed_dim, self.hidden_size)
        for index, layer in enumerate(self.layers):
            for name, shape in layer_parameters(layer, self.hidden_size).items():
                shapes[f"layers.{index}.{name}"] = shape
        if self.final_norm is not None:
            shapes |= norm_parameters("final_norm", self.final_norm, self.hidden_size)
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab_size, self.embed_dim)
        return shapes


def layer_parameters(layer: LayerSpec, hidden: int, attended: int | None = None) -> dict[str, Shape]:
    """Of one layer. `attended`: width of the rows that its attention reads, where that is another than `hidden`."""
    a, read = layer.attention, attended or hidden
    shapes = {
        **(_pair_parameters(a, read) if a.latent is None else _latent_parameters(a, a.latent, read)),
        **_linear_parameters("attn.out", hidden, a.num_heads * a.value_width, a.out_bias),
        **_mlp_parameters(layer.mlp, hidden),
        **norm_parameters("attn_norm", layer.norm, hidden),
    }
    if layer.placement != "parallel":
        shapes |= norm_parameters("mlp_norm", layer.norm, hidden)
    if a.sinks:
        shapes["attn.sinks.weight"] = (a.num_heads,)
    if a.qk_norm is not None:
        for name, heads in (("attn.q_norm", a.num_heads), ("attn.k_norm", a.num_kv_heads)):
            of = {"head": (a.head_dim,), "each": (heads, a.head_dim), "all": (heads * a.head_dim,)}
            shapes |= norm_parameters(name, a.qk_norm, *of[a.qk_norm_over])
    if layer.placement == "sandwich":
        shapes |= norm_parameters("attn_post_norm", layer.norm, hidden)
        shapes |= norm_parameters("mlp_post_norm", layer.norm, hidden)
    return shapes


def _pair_parameters(a: AttentionSpec, hidden: int) -> dict[str, Shape]:
    kv_width = a.num_kv_heads * a.head_dim
    return {
        **_linear_parameters("attn.q", a.num_heads * a.head_dim, hidden, a.qkv_bias),
        **_linear_parameters("attn.k", kv_width, hidden, a.qkv_bias),
        **_linear_parameters("attn.v", kv_width, hidden, a.qkv_bias),
    }


def _latent_parameters(a: AttentionSpec, latent: LatentSpec, hidden: int) -> dict[str, Shape]:
    """Biases are those of the two projections down; the ones up and the queries' have none."""
    width = a.num_heads * a.head_dim
    if latent.q_rank is None:
        queries = _linear_parameters("attn.q", width, hidden, False)
    else:
        queries = {
            **_linear_parameters("attn.q_a", latent.q_rank, hidden, a.qkv_bias),
            **norm_parameters("attn.q_a_norm", latent.norm, latent.q_rank),
            **_linear_parameters("attn.q_b", width, latent.q_rank, False),
        }
    return {
        **queries,
        **_linear_parameters("attn.kv_a", latent.width, hidden, a.qkv_bias),
        **norm_parameters("attn.kv_a_norm", latent.norm, latent.rank),
        **_linear_parameters("attn.kv_b", a.num_heads * (latent.nope_dim + latent.value_dim), latent.rank, False),
    }


def _mlp_parameters(mlp: MlpSpec | MoeSpec, hidden: int) -> dict[str, Shape]:
    if isinstance(mlp, MlpSpec):
        return _gated_parameters("mlp", mlp, hidden)
    router = mlp.router
    shapes = _linear_parameters("mlp.router", router.num_experts, hidden, router.bias)
    if router.choice_bias:
        shapes["mlp.choice.bias"] = (router.num_experts,)
    expert = MlpSpec(mlp.intermediate, mlp.activation, bias=mlp.bias)
    for index in range(router.num_experts):
        shapes |= _gated_parameters(f"mlp.experts.{index}", expert, hidden)
    if mlp.shared is not None:
        shapes |= _gated_parameters("mlp.shared", mlp.shared, hidden)
    if mlp.shared_gate:
        shapes |= _linear_parameters("mlp.shared_gate", 1, hidden, False)
    return shapes


def _gated_parameters(name: str, mlp: MlpSpec, hidden: int) -> dict[str, Shape]:
    return {
        **_linear_parameters(f"{name}.up", mlp.intermediate, hidden, mlp.bias),
        **_linear_parameters(f"{name}.down", hidden, mlp.intermediate, mlp.bias),
        **(_linear_parameters(f"{name}.gate", mlp.intermediate, hidden, mlp.bias) if mlp.gated else {}),
    }


def _linear_parameters(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def norm_parameters(name: str, norm: NormSpec, *size: int) -> dict[str, Shape]:
    if not norm.affine:
        return {}
    shapes: dict[str, Shape] = {f"{name}.weight": size}
    return shapes | {f"{name}.bias": size} if norm.bias else shapes
