"""Every kernel compiles for the GPUs that nobody here has, with tiles that fit them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.test_hopper import kept_kernels

SCRIPT = Path(__file__).with_name("compile_for_chips.py")
KERNELS = Path(__file__).parents[3] / "quire/kernels/triton"
SHARED = {80: 163 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""
HOPPER = {"attention_fresh._fresh_mixed_kernel", "unpacked_pages._unpack_kernel"}
"""Kernels that need the copy engine, which came with Hopper, or serve one that does."""


def _launched() -> set[str]:
    """The kernels of the package by file and name, but for those in Gluon, which are Hopper's alone."""
    return {
        f"{file.stem}.{node.name}" for file in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel")
        and any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    }  # fmt: skip


@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_for_a_chip_and_fits_its_shared_memory(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(kept_kernels())
    done = subprocess.run([sys.executable, str(SCRIPT), str(capability)], capture_output=True, text=True,
                          env=environment, timeout=900, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    compiled = {kernel for part in found.values() for kernel in part}
    assert compiled == _launched() - (HOPPER if capability < 90 else set())
    assert [(part, kernel, size) for part, sizes in found.items() for kernel, size in sizes.items()
            if size > SHARED[capability]] == []  # fmt: skip
