"""What the compiler for Hopper says of kernels in CUDA C: each has to find its registers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

NO_SPILL = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


class Compiled(Protocol):
    """A variant of a kernel."""

    def source(self) -> str: ...


def expect_no_spills(variants: Iterable[Compiled], folder: Path) -> list[str]:
    """Compile all; what was said of each."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    all_of_them = list(variants)
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda each: _compile(nvcc, *each, folder), enumerate(all_of_them)))
    for variant, text in zip(all_of_them, said, strict=True):
        assert NO_SPILL in text, f"{variant}: {text}"
    return said


def _compile(nvcc: str, index: int, variant: Compiled, folder: Path) -> str:
    source = folder / f"{index}.cu"
    source.write_text(variant.source())
    command = [nvcc, "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", str(source) + "bin", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{variant}: {done.stderr}"
    return done.stderr
