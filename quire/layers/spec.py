"""What one layer's parts look like, as plain data: the vocabulary in which every model family is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.kernels.routing import Clamp, RouterSpec

__all__ = [
    "Activation",
    "AttentionSpec",
    "Clamp",
    "LatentSpec",
    "MlpSpec",
    "MoeSpec",
    "NormKind",
    "NormSpec",
    "QueryGrowth",
    "RopeKind",
    "RopeSpec",
    "RouterSpec",
]

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation over the last dimension."""

    kind: NormKind
    eps: float
    bias: bool = False
    affine: bool = True
    """False: no weight and no bias in the checkpoint (an OPT option)."""
    weight_offset: float = 0.0
    """Added to the weight when it is loaded: Gemma stores w for a factor of 1 + w."""
    scale: float = 1.0
    """Multiplies what comes out; part of the weight and the bias once they are loaded."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotation: how fast each pair of features turns with the position."""

    theta: float
    rotary_dim: int
    """How many leading features of a head turn; the rest stay."""
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """The length the model was trained at; read by dynamic, llama3, yarn and longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cosines and sines (yarn, longrope)."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: one divisor per pair of features, for models used within and past their trained length."""
    interleaved: bool = False
    """The checkpoint pairs features 2i and 2i + 1. The loader reorders the rows of q and k, so that every kernel
    pairs feature i with i + rotary_dim / 2."""

    def factors(self, asked_len: int) -> tuple[float, ...]:
        """The factors of a longrope in an engine that was asked for sequences of this length."""
        return self.long_factors if asked_len > self.original_max_positions else self.short_factors


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta ln(1 + floor(p / every)) (Ministral 3, Llama 4)."""

    beta: float
    every: int


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values as projections of a latent vector that all heads share (MLA, DeepSeek)."""

    rank: int
    """Width of the latent."""
    nope_dim: int
    """Features of a query and key head that do not turn; the keys' come from the latent."""
    rope_dim: int
    """Features that turn; one key part for all heads."""
    value_dim: int
    norm: NormSpec
    """Of the latent, and of the queries' own."""
    q_rank: int | None = None
    """Queries too come from a latent of this width; None: straight from the hidden rows."""

    @property
    def width(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. With a `latent` there is one kv head, and `head_dim` is that of the queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    """Norm of queries and keys before the rotation; an RMS norm, unless `qk_norm_over` is each."""
    qk_norm_over: Literal["head", "all", "each"] = "head"
    """head: of each head by itself, all with one weight; each: by itself, with a weight of its own (Command R+);
    all: of all query heads as one vector, and of all key heads (OLMo-2)."""
    rope: int | None = 0
    """Which of the decoder's rotations; None: positions come in with the embeddings."""
    window: int | None = None
    """How many keys a query sees, itself included; None: all of them."""
    softcap: float | None = None
    growth: QueryGrowth | None = None
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax and has no value (gpt-oss)."""
    latent: LatentSpec | None = None

    @property
    def value_width(self) -> int:
        """Columns of the output projection that belong to one head."""
        return self.head_dim if self.latent is None else self.latent.value_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """One layer's feed-forward part: gated (act(gate) * up, then down) or plain (act(up), then down)."""

    intermediate: int
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """One layer's feed-forward part as a mixture of experts: some of many gated MLPs, chosen for each token, and maybe
    one more that every token goes through."""

    router: RouterSpec
    intermediate: int
    """Of each expert."""
    activation: Activation
    bias: bool = False
    clamp: Clamp | None = None
    shared: MlpSpec | None = None
    """Runs beside the experts for every token."""
    shared_gate: bool = False
    """What the shared one gives is multiplied by the sigmoid of a projection to one number."""
