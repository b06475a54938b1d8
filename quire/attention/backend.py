"""What attends: one backend per device for any step, and optional ones for prompts that start from nothing.

`AttentionBackend` is implemented by the CPU's kernels (`quire.kernels.cpu.ops`), by plain torch
(`quire.kernels.reference`) and by Triton's (`quire.kernels.triton.ops`, through `quire.attention.triton`). A
`PromptBackend` is somebody else's library that takes whole prompts off the Triton backend where it is installed,
right and faster (`quire.attention.prompts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from quire.attention.context import StepContext

if TYPE_CHECKING:
    from quire.layers.ops import HeadShape, LayerCache


class AttentionBackend(Protocol):
    """Owns the layout of the paged cache and attends over it."""

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
    ) -> Tensor:
        """[T, Hq*hd]: causal attention over the cache; a window of w is the last w keys, itself included."""
        ...

    def allocate_cache(self, shape: HeadShape, num_blocks: int, block_size: int) -> LayerCache:
        """A zeroed cache of one layer."""
        ...


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """Neighbouring prompts of a step that are computed from their first token on, so that they see only themselves."""

    first: int
    """Token of the step at which the first of them begins."""
    tokens: int
    starts: Tensor
    """int32 [prompts + 1]: where each begins and the last ends, counted from `first`."""
    longest: int


class PromptBackend(Protocol):
    """Causal attention of fresh prompts over themselves, without a look at the cache."""

    @property
    def name(self) -> str: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prompts: FreshPrompts, scale: float) -> Tensor:
        """[tokens, heads, dim] of q [tokens, heads, dim] and k, v [tokens, kv heads, dim]; only the last dimension
        need be contiguous."""
        ...
