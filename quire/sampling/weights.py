"""Probabilities as integers, whose sums are the same in any order, and how many rows of them exist at once; also what a
device's kernels do in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch import Tensor

SCALE: Final = 2.0**40
"""The weight of the likeliest token. One less likely than 2**-40 of it has none."""
_CHUNK_ELEMENTS: Final = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Entries of a temporary: rows of a CPU stay in its cache, and memory stays bounded whatever the batch."""


class DrawKernels(Protocol):
    """What a device's drawing kernels do for the full sampler."""

    def row_weights(self, values: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
        """Their weights, whose last bits torch's exp does not have."""

    def draw_nucleus(self, values: Tensor, rows: Tensor, peak: Tensor, temperature: Tensor, floor: Tensor,
                     top_p: Tensor, keys: Tensor) -> Tensor:
        """Tokens under top_p alone, without a word to the host between attempts."""


_KERNELS: dict[str, DrawKernels] = {}


def use_kernels(device_type: str, kernels: DrawKernels) -> None:
    _KERNELS[device_type] = kernels


def draw_kernels(device: torch.device) -> DrawKernels | None:
    return _KERNELS.get(device.type)


def integer_weights(values: Tensor, peak: Tensor | float, temperature: Tensor | float) -> Tensor:
    """Integer weights of float32 logits relative to the likeliest one; on a GPU those of the drawing kernels."""
    kernels = draw_kernels(values.device)
    if kernels is not None:
        return kernels.row_weights(values, _of_rows(peak, values), _of_rows(temperature, values))
    scaled = (values - peak).div_(temperature)
    return scaled.exp_().mul_(SCALE).to(torch.int64)


def _of_rows(number: Tensor | float, values: Tensor) -> Tensor:
    """One number for each row of `values`, without a copy that the host would wait for."""
    if isinstance(number, Tensor):
        return number.reshape(-1).expand(values.shape[0])
    return torch.full((values.shape[0],), number, dtype=torch.float32, device=values.device)


def row_chunks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Runs of rows whose temporaries of `width` columns are of a good size for the device."""
    size = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 24) // max(1, width))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))
