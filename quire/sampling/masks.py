"""Token masks of grammars, applied to logits: what is not allowed becomes impossible, what is stays as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.kernels import SamplingKernels
from quire.sampling.sending import send, send_tensor


@dataclass(slots=True)
class TokenMasks:
    """Masks of some rows of a batch, in words of 32 tokens, the lowest bit first."""

    rows: Tensor
    words: Tensor
    """int32 [rows, words]."""

    @classmethod
    def of(cls, masks: Mapping[int, bytes], device: torch.device) -> TokenMasks | None:
        """The masks by row, sent to the device from fresh memory so that nobody waits for the copy."""
        if not masks:
            return None
        width = len(next(iter(masks.values()))) // 4
        host = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.int32).view(len(masks), width)
        return cls(send(list(masks), torch.int64, device), send_tensor(host, device))

    def apply_(self, logits: Tensor, kernels: SamplingKernels | None = None) -> None:
        """Of logits [batch, vocabulary]."""
        if kernels is not None:
            kernels.mask_(logits, self.rows, self.words)
            return
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((self.words[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[self.rows] = logits[self.rows].masked_fill(~allowed, -math.inf)
