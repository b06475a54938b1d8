"""The kernel of wide GEMMs without a GPU: what it can compute, and that the compiler finds registers for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.bench.gpu import tune_wide
from quire.kernels.cuda.wide_gemm import Variant, WideShape, can_compute

ROWS = (64, 256, 8192)


def test_every_candidate_can_compute_its_gemm() -> None:
    for rows in ROWS:
        for name in tune_wide.weights_of():
            jobs = list(tune_wide.jobs([rows], [name]))
            assert [shape for _, _, shape in jobs] == list(tune_wide.candidates(rows, name))


@pytest.mark.parametrize(
    "shape, gated",
    [
        ((3, 128, 4, 1, 1, 1), False),  # 384 rows
        ((1, 264, 4, 1, 1, 1), False),  # wider than one instruction
        ((2, 256, 3, 1, 1, 1), False),  # 256 sums of a thread
        ((1, 128, 8, 1, 1, 1), False),  # a ring of 256 KB
        ((1, 128, 4, 2, 4, 2), False),  # a cluster of 16
        ((1, 144, 4, 1, 1, 4), False),  # 18 sums for each part: not by fours
        ((1, 128, 4, 1, 1, 2), True),  # gates in parts
        ((1, 240, 4, 1, 1, 1), True),  # 12,288 gates are not whole tiles of 120
    ],
)
def test_what_has_no_kernel_is_refused(shape: tuple[int, ...], gated: bool) -> None:
    assert not can_compute(256, 24576, 4096, Variant(WideShape(*shape), gated=gated))


def test_widths_that_the_copy_engine_cannot_step_over_are_refused() -> None:
    assert can_compute(256, 4096, 4104, Variant(WideShape()))
    assert not can_compute(256, 4096, 4100, Variant(WideShape()))
    assert not can_compute(256, 4100, 4096, Variant(WideShape()))


def compile_with(nvcc: str, variant: Variant, folder: Path) -> str:
    name = re.sub(r"\W+", "_", repr(variant))[-180:]
    source = folder / f"{name}.cu"
    source.write_text(variant.source())
    command = [nvcc, "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", str(source) + "bin", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_no_candidate_spills_registers_or_serializes_its_products(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    jobs = tune_wide.jobs([256, 8192], list(tune_wide.weights_of()))
    variants = {tune_wide.variant_of(*job, watched=False) for job in jobs}
    variants |= {Variant(WideShape(2, 192, 4, 1, 2, 1), residual=True, early=True), Variant(WideShape())}
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda each: compile_with(nvcc, each, tmp_path), variants))
    for variant, text in zip(variants, said):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text, f"{variant}: {text}"
        assert "serialized" not in text, f"{variant}: {text}"
