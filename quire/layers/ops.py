"""The compute operations the layers need: one implementation per device, chosen when a model is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.context import StepContext
from quire.kernels.slices import Slices


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How one row of a merged qkv projection splits into heads: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Columns of the merged qkv projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """What a layer does to each head of q and k before it attends: norm, then rotation by position."""

    rope: Tensor | None
    """float32 [positions, rotated features]: cosines, then sines."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(slots=True)
class LayerCache:
    """The paged keys and values of one layer.

    The layout belongs to the `Ops` that allocated it; the block is always the first dimension, so that
    copying a block is one slice. On a CPU keys are stored transposed inside the block so that scores
    vectorise over keys: k [num_blocks, Hkv, head_dim, block_size], v [num_blocks, Hkv, block_size, head_dim].
    """

    k: Tensor
    v: Tensor
    block_size: int


class PackedLinear(Protocol):
    """A weight (and bias) in the form its device wants; only the `Ops` that packed it looks inside."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class Ops(AttentionBackend, Protocol):
    """Every operation a decoder runs. Activations are contiguous float32 [tokens, features] tensors on a CPU.

    Contract in fp32: each output element is reduced in an order fixed by the element itself, so that its
    bits do not depend on the other tokens of the step, on chunking, on the block size or on the number of
    threads. A packed weight goes back only to the object that packed it, hence `Any` where one comes in.
    """

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None
    ) -> PackedLinear:
        """Take a contiguous weight [N, K] (and bias [N]); the caller drops its own reference afterwards.

        With `slices`, which cover K, the product sums each slice from zero and adds the slices in their tree, then
        bias and residual. On a GPU this holds in deterministic mode.
        """
        ...

    def linear(self, x: Tensor, w: Any, residual: Tensor | None = None) -> Tensor:
        """[M, N] = x W^T (+ bias) (+ residual), in that order."""
        ...

    def linear_nodes(self, x: Tensor, w: Any) -> Tensor:
        """[nodes, M, N] float32: what a weight packed with a run of a sum's slices adds to each of `slices.nodes()`,
        without bias and residual. With the nodes of the other runs, `finish_tree` gives the bits of the whole."""
        ...

    def embed(self, ids: Tensor, w: Any) -> Tensor:
        """Rows `ids` of a packed weight, exactly as before packing (a tied head is one copy of both)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        """[M, 2I] -> [M, I]: act(first half) * second half; kind is silu, gelu_tanh or gelu."""
        ...

    def act(self, x: Tensor, kind: str) -> Tensor:
        """kind is silu, gelu_tanh, gelu or relu."""
        ...

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
        """In place on qkv [T, shape.width]: RMS norm of q and k heads, rotation of both, k and v to the
        cache.

        `rope` is [max_pos, rotary_dim], cosines in the first half of a row and sines in the second, for the
        half-split ("neox") pairing of the first rotary_dim elements of a head; None rotates nothing.
        """
        ...

    def copy_blocks(self, layer: LayerCache, src: list[int], dst: list[int]) -> None:
        """Block src[i] -> dst[i] for every i, each read before any is written."""
        ...
