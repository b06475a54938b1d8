"""A few numbers on their way from the host to a device, without waiting for the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.tensor(values, device=device)`, which on a GPU would wait for all that was launched before."""
    return send_tensor(torch.tensor(values, dtype=dtype), device)


def send_tensor(host: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return host.to(device)
    # The allocator of pinned memory keeps it until the copy is through.
    return host.pin_memory().to(device, non_blocking=True)
