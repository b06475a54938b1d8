"""Reads on the host what experts on the device have done, without waiting for a step."""

from __future__ import annotations

from typing import Any

import torch

from quire.kernels.routing import LayerLoad
from quire.layers.experts import ExpertLoad


class ExpertMeter:
    """Each reading starts a copy beside the steps and returns the latest one that has arrived. Counts only grow, so one
    that is copied in the middle of a step is between those before and after it."""

    def __init__(self, load: ExpertLoad, device: torch.device) -> None:
        self._load = load
        self._latest: list[LayerLoad] = load.as_data(torch.zeros_like(load.counts, device="cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and load.layers else None
        pinned = self._stream is not None
        self._copied = torch.empty(load.counts.shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._arrived: Any = None
        """Recorded behind the copy that is on its way."""

    def read(self) -> list[LayerLoad]:
        if self._stream is None:
            return self._load.as_data()
        if self._arrived is None or self._arrived.query():
            if self._arrived is not None:
                self._latest = self._load.as_data(self._copied)
            with torch.inference_mode(), torch.cuda.stream(self._stream):  # as the worker that made both tensors
                self._copied.copy_(self._load.counts, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()
        return self._latest
