"""Writes down what a step launches on a GPU: every Triton kernel and every torch operation, allocations included.

Kernels are not run, so the numbers are garbage and a step takes milliseconds; what is launched depends on no number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = ("view", "slice", "select", "t", "transpose", "split", "split_with_sizes", "unbind", "detach", "expand",
          "_unsafe_view", "alias", "unsqueeze", "squeeze", "permute", "as_strided")  # fmt: skip


class _Recorder(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").split(".")[0]
        if name not in _VIEWS:
            self._found.append(f"{name} {_shapes(result if isinstance(result, torch.Tensor) else args)}".strip())
        return result


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Inside, everything launched is added to the list: its name, and the shape of what it makes or the launch's grid
    and the shapes it is given."""
    from triton.runtime.interpreter import InterpretedFunction

    found: list[str] = []
    original = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        flags = [str(value) for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
        found.append(f"{self.__name__}{tuple(grid)} {_shapes(args)} {' '.join(flags)}")

    InterpretedFunction.run = run
    try:
        with _Recorder(found):
            yield found
    finally:
        InterpretedFunction.run = original


def names(found: list[str]) -> list[str]:
    """The launches without their shapes, and without the allocations."""
    short = [entry.split("(")[0].split(" ")[0].strip("_").removesuffix("_kernel") for entry in found]
    return [name for name in short if name not in ("empty", "empty_like", "new_empty")]


def _shapes(value: Any) -> str:
    tensors = [value] if isinstance(value, torch.Tensor) else [v for v in value if isinstance(v, torch.Tensor)]
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
