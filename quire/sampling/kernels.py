"""What a device may do faster than torch: draw tokens, apply masks, and find the likeliest ones."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SamplingKernels(Protocol):
    """The same choices as the plain pass, but for the last bits of exp."""

    def draw(self, logits: Tensor, rows: Tensor, peak: Tensor, temperature: Tensor, floor: Tensor, top_k: Tensor,
             top_p: Tensor, keys: Tensor) -> Tensor: ...

    def mask_(self, logits: Tensor, rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]: ...

    def rank(self, logits: Tensor, token_ids: Tensor, peak: Tensor, count: int
             ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
