"""Compiles kernels for a GPU on a machine that has none, and says what the assembler made of them.

`with compiling() as kernels:` turns every launch into a compilation, for sm_90 where nothing else is said; tensors lie
on the CPU.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class _NoDevice:
    """As much of a driver as compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextmanager
def compiling(capability: int = 90) -> Iterator[list[Any]]:
    """Launches inside compile only; the compiled kernels are collected in the list."""
    import triton
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(original(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    triton.runtime.driver.set_active(_NoDevice(capability))
    JITFunction.run = run
    try:
        yield compiled
    finally:
        JITFunction.run = original
        triton.runtime.driver._active = None


def resources(kernel: Any) -> str:
    """What cuobjdump says of a kernel: registers, stack (spills), shared memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return " ".join(word for word in shown.split() if word.startswith(("REG:", "STACK:")))
