"""What the GEMMs in CUDA C share on the host: their text, whether a GPU can run them, and loading what was compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TypeVar

import torch

from quire.kernels.cuda import nvrtc
from quire.kernels.cuda.driver import DriverError

Made = TypeVar("Made")
_log = logging.getLogger("quire.kernels")
_HOPPER = 9


def text_of(files: Sequence[str]) -> str:
    """The sources of this folder one behind the other: there are no headers."""
    folder = resources.files("quire.kernels.cuda")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in files)


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels are for such a chip and type: bf16 on Hopper."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == _HOPPER


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def made(name: str, device: int, make: Callable[[], Made]) -> Made | None:
    """What `make` compiles and loads for a GPU; None where it cannot: another kernel runs then."""
    with torch.cuda.device(device):
        torch.empty(1, device="cuda")  # the driver needs torch's context, which is made with the first tensor
        try:
            return make()
        except nvrtc.Missing:
            return None
        except (nvrtc.CompileError, DriverError, OSError) as error:
            _log.warning("%s (CUDA C) could not be made, another kernel takes its place: %s", name, error)
            return None
