"""What kernels, backends and layers say to each other: a step's tokens, the shape of heads, a layer's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.kernels.kv_spec import KVSpec

if TYPE_CHECKING:  # what a model is, and what a rank holds of it, can be said without the import of torch
    from torch import Tensor

NO_DETOUR = 2**31 - 1


@dataclass(slots=True)
class StepContext:
    """The step's metadata, built once per step and passed to every layer; there is no global copy of it.

    Sequence `s` owns the tokens `query_start[s]:query_start[s+1]`, which are consecutive in it. Its last
    token sees `context_len[s]` keys, itself included, so token `t` of `n` sees `context_len[s] - (n - 1 -
    t)` of them, and the key at absolute position `p` lies in block `block_tables[g][s, p // block_size]`.
    """

    positions: Tensor
    """int64 [T]: the position that rope and learned position embeddings see."""
    query_start: Tensor
    """int32 [S+1]"""
    context_len: Tensor
    """int32 [S]"""
    block_tables: tuple[Tensor, ...]
    """One per cache group: int32 [S, max_blocks]. Entries past a sequence's keys are never read. Those wholly
    behind its window may name any block that exists: its content must be finite, but does not matter."""
    slots: tuple[Tensor, ...]
    """One per cache group: int64 [T], `block * block_size + offset` where the token's keys and values go."""
    num_decodes: int = 0
    """So many first sequences have one query each, where the caller sorted them so; 0: unknown."""
    detours: Tensor | None = None
    """Of a step with draft trees, whose nodes are sequences of one query each: int32 [S, 1 + depth]. With d =
    detours[s], the key at position p >= d[0] of sequence s lies at place d[1 + p - d[0]] of its block table; earlier
    keys, and all of a sequence whose d[0] is `NO_DETOUR`, lie where their position says."""
    lasting: bool = False
    """Its tensors are the same in many steps, and only what they hold changes."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How one row of a merged qkv projection splits into heads: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: int = 0
    """Query heads that share a kv head, where these are some of a layer's heads only; 0: as the numbers say."""
    skipped: int = 0
    """Query heads of the first kv head that come before these: another rank has them."""

    def __post_init__(self) -> None:
        if self.group == 0:
            object.__setattr__(self, "group", self.num_heads // max(1, self.num_kv_heads))
        first, last = self.kv_head(0), self.kv_head(self.num_heads - 1)
        if self.num_kv_heads < 1 or first != 0 or last != self.num_kv_heads - 1:
            raise ValueError(f"query heads that do not match their kv heads: {self}")

    def kv_head(self, head: int) -> int:
        """The kv head that a query head reads."""
        return (self.skipped + head) // self.group

    @property
    def is_even(self) -> bool:
        """Whether every kv head is read by as many query heads as any other."""
        return self.group * self.num_kv_heads == self.num_heads

    @property
    def evened(self) -> HeadShape:
        """With the query heads that other ranks have of the same kv heads, before and behind these."""
        return self if self.is_even else HeadShape(self.group * self.num_kv_heads, self.num_kv_heads, self.head_dim)

    @property
    def width(self) -> int:
        """Columns of the merged qkv projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv(self) -> KVSpec:
        """What a layer with such heads keeps of each token."""
        return KVSpec.pair(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Query heads that attend in the latent space (MLA): each is `rank` features of it and `rope_dim` that turn."""

    num_heads: int
    rank: int
    rope_dim: int

    @property
    def width(self) -> int:
        """Of a query head, and of what is kept of a token."""
        return self.rank + self.rope_dim

    @property
    def kv(self) -> KVSpec:
        return KVSpec.latent(self.width)

    @property
    def blocks(self) -> HeadShape:
        """Heads that a GPU's program takes together, as attention over pairs says it: a block is a kv head. At most 64:
        their sums are [64, 512] in float32, 128 registers of each of 256 threads."""
        group = max(size for size in range(1, min(64, self.num_heads) + 1) if self.num_heads % size == 0)
        return HeadShape(self.num_heads, self.num_heads // group, self.rank)


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """What a layer does to each head of q and k before it attends: norm, then rotation by position; and its sinks."""

    rope: Tensor | None
    """float32 [positions, rotated features]: cosines, then sines."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    sinks: Tensor | None = None
    """float32 [query heads]: a score of each head that takes part in the softmax and has no value."""


@dataclass(slots=True)
class LayerCache:
    """The paged KV of one layer: a tensor for each part of its spec.

    The layout belongs to the backend that allocated it; the block is always the first dimension, so that
    copying a block is one slice of each tensor. On a CPU keys are stored transposed inside the block so that
    scores vectorise over keys: k [num_blocks, Hkv, head_dim, block_size], v [num_blocks, Hkv, block_size, head_dim].
    """

    spec: KVSpec
    block_size: int
    tensors: dict[str, Tensor]
    """By the names of the spec's parts."""
    tokens_last: tuple[str, ...] = field(default=(), kw_only=True)
    """Parts whose tensor is [num_blocks, heads, width, block_size]; the others are [..., block_size, width]."""
    scales: Tensor | None = field(default=None, kw_only=True)
    """float32 [2, heads] of a pair in fp8: keys and values of each head are what is stored times these; None: as
    stored."""

    @property
    def num_blocks(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def k(self) -> Tensor:
        """Of a pair."""
        return self.tensors["k"]

    @property
    def v(self) -> Tensor:
        """Of a pair."""
        return self.tensors["v"]

    @property
    def latents(self) -> Tensor:
        """[num_blocks, 1, block_size, width]"""
        return self.tensors["latent"]


def pair_cache(k: Tensor, v: Tensor, block_size: int) -> LayerCache:
    """A cache of these keys and values; v is [num_blocks, Hkv, block_size, head_dim] in every layout."""
    return LayerCache(KVSpec.pair(v.shape[1], v.shape[3]), block_size, {"k": k, "v": v})
