"""The interface of attention: one backend per device for any step, and libraries for prompts without context.

`AttentionBackend` is a part of every `quire.ops.interface.Ops`: the CPU's kernels, plain torch, and Triton's (through
`quire.attention.triton`). A `PrefillLibrary` is another project's attention, which the Triton backend uses for
whole prompts if it is installed, right and faster (`quire.attention.prefill_libraries`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.errors import EngineError
from quire.kernels.kv_spec import KVSpec
from quire.kernels.types import HeadShape, HeadTurn, LatentShape, LayerCache, StepContext


class AttentionBackend(ABC):
    """Owns the layout of the paged cache and attends over it."""

    @abstractmethod
    def allocate_cache(self, kv: KVSpec, num_blocks: int, block_size: int) -> LayerCache:
        """A zeroed cache of one layer."""

    @abstractmethod
    def copy_blocks(self, layer: LayerCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Block src[i] -> dst[i] for every i, each read before any is written."""

    def copy_slots(self, layer: LayerCache, src: Tensor, dst: Tensor) -> None:
        """The token in slot src[i] -> slot dst[i], int64, each read before any is written."""
        size = layer.block_size
        for name, part in layer.tensors.items():
            tokens = part.movedim(-1, 1) if name in layer.tokens_last else part.movedim(-2, 1)
            tokens[dst // size, dst % size] = tokens[src // size, src % size]

    @abstractmethod
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
        """In place on qkv [T, shape.width]: RMS norm of q and k heads, rotation of both, k and v to the cache.

        `rope` is [max_pos, rotary_dim], cosines in the first half of a row and sines in the second, for the
        half-split ("neox") pairing of the first rotary_dim elements of a head; None rotates nothing.
        """

    @abstractmethod
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
        """[T, Hq*hd]: causal attention over the cache; a window of w is the last w keys, itself included. `sinks`
        [Hq] are scores beside those of the keys, without a value."""

    def rope_attend(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        turn: HeadTurn,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """`rope_and_cache`, then `attend`; a backend may do both in one launch. qkv is used up."""
        self.rope_and_cache(qkv, layer, ctx, group, shape, turn.rope, turn.q_norm, turn.k_norm, turn.eps)
        return self.attend(qkv, layer, ctx, group, shape, scale, window, softcap, turn.sinks)

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
        """[T, heads * rank]: causal attention in the latent space, q [T, heads * width] over the cache of latents.

        First the last `rope_dim` features of each head of q and of kv [T, width] are rotated, in place, and kv goes to
        the cache. A token's vector is its key, and its first `rank` features are its value. A device without latent
        attention inherits this; its models are refused before (`models.decoder`).
        """
        raise EngineError(f"{type(self).__name__} has no latent attention")


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """Neighbouring prompts of a step that are computed from their first token on, so that they see only themselves."""

    first: int
    """Token of the step at which the first of them begins."""
    tokens: int
    starts: Tensor
    """int32 [prompts + 1]: where each begins and the last ends, counted from `first`."""
    longest: int


class PrefillLibrary(Protocol):
    """Prefill attention of whole prompts: causal, over the prompt's own K and V, without the cache."""

    @property
    def name(self) -> str: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prompts: FreshPrompts, scale: float) -> Tensor:
        """[tokens, heads, dim] of q [tokens, heads, dim] and k, v [tokens, kv heads, dim]; only the last dimension
        need be contiguous."""
        ...
