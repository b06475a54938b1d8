"""A step's numbers, laid out in one buffer that goes to the device in one copy.

The host fills fresh pinned memory for every step: a buffer that is still being copied is never written again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Stage:
    """Named int32 runs in one buffer. Add them all, then `send`; `view` gives a run's place on the device."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._spans: dict[str, tuple[int, int]] = {}
        self._size = 0

    def add(self, name: str, values: np.ndarray) -> None:
        self._spans[name] = (self._size, self._size + len(values))
        self._parts.append(values)
        # Runs start at multiples of 16 entries, so that kernels see aligned addresses whatever came before.
        self._size += -(-len(values) // 16) * 16

    @property
    def size(self) -> int:
        return self._size

    def send(self, device: torch.device, target: Tensor | None = None) -> Tensor:
        """Copy everything to the device, into `target` if it is given and large enough; returns where it
        is."""
        host = torch.empty(max(self._size, 1), dtype=torch.int32, pin_memory=device.type == "cuda")
        flat = host.numpy()
        for (begin, end), values in zip(self._spans.values(), self._parts, strict=True):
            flat[begin:end] = values
        if target is None or target.shape[0] < self._size:
            target = torch.empty(max(self._size, 1), dtype=torch.int32, device=device)
        target[: host.shape[0]].copy_(host, non_blocking=True)
        return target

    def view(self, sent: Tensor, name: str) -> Tensor:
        begin, end = self._spans[name]
        return sent[begin:end]
