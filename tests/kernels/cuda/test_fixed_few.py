"""The GEMM of few rows in CUDA C (`fixed_few.cu`), without a GPU: compiled for this machine and run there thread by
thread, compared bit by bit with norms, sums in steps of 16 columns, trees, gates and residuals one after another; and
compiled for Hopper, where the compiler must find registers."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.cuda import nvrtc
from quire.kernels.cuda.fixed_few import OPTIONS, Variant, plan
from quire.kernels.slices import Slices, add_in_tree
from tests.kernels.cuda.ptxas import expect_no_spills

PROGRAMS = 132
EPS = 1e-6
HARNESS = Path(__file__).with_name("fixed_few_harness.cpp")


def run(variant: Variant, folder: Path, tensors: list[Tensor], rows: int, features: int) -> Tensor:
    """What the kernel makes of x, weight, gain, bias, residual, as far as it has them."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = variant.source()
    kernel, program = folder / "kernel.cu", folder / "kernel"
    # Rounding and the chip are the harness's.
    kernel.write_text(source[source.index("// Up to ROWS rows") :])
    defined = [f"-D{name}={value}" for name, value in re.findall(r"#define (\w+) (\d+)", source)]
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", f'-DKERNEL="{kernel}"', *defined,
               f"-DSHARED={variant.shared}", "-o", str(program), str(HARNESS)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensors)
    given = [str(program), str(rows), str(features), str(EPS)]
    found = subprocess.run(given, input=data, capture_output=True, check=True).stdout
    return torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(rows, features)


def in_steps(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x W^T: 16 columns at a time, exactly, each time rounded."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], 16):
        step = slice(start, start + 16)
        total = (total.double() + x[:, step].double() @ weight[:, step].double().t()).float()
    return total


def neighbours_first(values: Tensor) -> Tensor:
    size = 1 << (values.shape[1] - 1).bit_length()
    values = torch.nn.functional.pad(values, (0, size - values.shape[1]))
    while values.shape[1] > 1:
        values = values[:, ::2] + values[:, 1::2]
    return values


def normed(x: Tensor, gain: Tensor) -> Tensor:
    mean = torch.tensor(1 / x.shape[1], dtype=torch.float32)
    squares = neighbours_first(x.float() * x.float())
    # A product of two floats is exact in float64; one rounding, as a fused multiply-add has it.
    root = (squares.double() * mean.double() + np.float32(EPS)).float().sqrt()
    return (x.float() * (1.0 / root) * gain.float()).bfloat16()


def numbers(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


@pytest.mark.parametrize(
    ("rows", "features", "width", "gain", "gated", "bias", "programs"),
    [(1, 32, 1024, 2, False, False, 1), (1, 40, 1024, 2, True, False, 2), (3, 24, 576, 4, False, True, 2),
     (8, 16, 1280, 2, True, True, 1), (5, 8, 32, 4, True, False, 1), (2, 48, 320, 2, False, False, 132)],
)  # fmt: skip
def test_a_norm_and_a_gate_have_the_bits_of_kernels_one_by_one(
    tmp_path: Path, rows: int, features: int, width: int, gain: int, gated: bool, bias: bool, programs: int
) -> None:
    torch.manual_seed(rows)
    variant = plan(rows, features, width, None, programs, gain=gain, gated=gated)
    assert variant is not None and variant.rows >= rows
    variant = replace(variant, bias=bias, early=True)
    lines = features * (2 if gated else 1)
    x, weight = 3 * numbers(rows, width), numbers(lines, width)
    gains = (torch.rand(width) + 0.5).to(torch.bfloat16 if gain == 2 else torch.float32)
    added = [numbers(lines)] if bias else []
    found = run(variant, tmp_path, [x, weight, gains, *added], rows, features)
    sums = in_steps(normed(x, gains), weight)
    if bias:
        sums = sums + added[0].float()
    want = sums.bfloat16()
    if gated:
        gate, up = want.float().chunk(2, 1)
        want = ((gate + 0.5) * up).bfloat16()  # the harness's gate
    assert torch.equal(found, want)
    in_a_row = (x.float() ** 2).cumsum(1)[:, -1:]
    assert width < 1000 or not torch.equal(in_a_row, neighbours_first(x.float() ** 2))  # another order would show


@pytest.mark.parametrize(
    ("rows", "features", "slices", "bias"),
    [(1, 24, Slices.of_width(3072), False), (8, 16, Slices.of_heads(16, 128), True), (3, 8, Slices.each(9, 64), False),
     (4, 16, Slices.each(14, 64), True), (2, 8, Slices.of_width(4864), False)],
)  # fmt: skip
@pytest.mark.parametrize("residual", [True, False])
def test_slices_are_added_in_their_tree_and_rounded_before_the_residual(
    tmp_path: Path, rows: int, features: int, slices: Slices, bias: bool, residual: bool
) -> None:
    torch.manual_seed(features)
    variant = plan(rows, features, slices.width, slices, PROGRAMS)
    assert variant is not None
    variant = replace(variant, bias=bias, residual=residual)
    x, weight = numbers(rows, slices.width), numbers(features, slices.width)
    more = [numbers(features)] if bias else []
    stream = numbers(rows, features) * 64
    found = run(variant, tmp_path, [x, weight, *more, *([stream] if residual else [])], rows, features)
    borders = [slices.border(index) for index in range(slices.total + 1)]
    parts = [in_steps(x[:, a:b], weight[:, a:b]).numpy() for a, b in pairwise(borders)]
    sums = torch.from_numpy(add_in_tree(parts)) + (more[0].float() if bias else 0.0)
    want = sums.bfloat16()
    assert torch.equal(found, want + stream if residual else want)


def engine_variants() -> list[Variant]:
    """Of Qwen3-0.6B and Qwen2.5-0.5B."""
    found = []
    for rows in (1, 8):
        found += [plan(rows, 4096, 1024, None, PROGRAMS, gain=2), plan(rows, 1152, 896, None, PROGRAMS, gain=4),
                  plan(rows, 3072, 1024, None, PROGRAMS, gain=2, gated=True),
                  plan(rows, 1024, 2048, Slices.of_heads(16, 128), PROGRAMS),
                  plan(rows, 1024, 3072, Slices.of_width(3072), PROGRAMS),
                  plan(rows, 896, 896, Slices.of_heads(14, 64), PROGRAMS)]  # fmt: skip
    assert None not in found
    return [replace(each, early=True, bias=each.width == 896, residual=each.slices > 1) for each in found if each]


def test_every_weight_of_a_layer_of_0_6b_is_on_its_way_at_once() -> None:
    """A thread block for nearly every multiprocessor, and room beside it."""
    for features, variant in ((4096, plan(1, 4096, 1024, None, PROGRAMS, gain=2)),
                              (3072, plan(1, 3072, 1024, None, PROGRAMS, gain=2, gated=True)),
                              (1024, plan(1, 1024, 3072, Slices.of_width(3072), PROGRAMS))):  # fmt: skip
        assert variant is not None and features // 8 // variant.tiles == 128
        assert variant.shared < 113 << 10


@pytest.mark.parametrize(
    ("rows", "features", "width", "slices", "gain", "gated"),
    [(9, 4096, 1024, None, 2, False), (1, 4100, 1024, None, 2, False), (1, 4096, 1040, None, 2, False),
     (1, 24_576, 4096, None, 2, True), (1, 1024, 1024, None, 0, False), (1, 1024, 2048, Slices.each(32, 64), 0, False),
     (1, 1024, 2048, Slices.each(16, 128), 2, False), (1, 1024, 3040, Slices.of_width(3040), 0, False),
     (1, 1024, 1536, Slices.of_width(3072).part(0, 4), 0, False)],
    ids=["rows", "no whole tiles", "no whole steps", "too large", "no norm", "too many slices", "norm and slices",
         "unequal slices", "a rank's part"],
)  # fmt: skip
def test_what_has_no_kernel_is_declined(
    rows: int, features: int, width: int, slices: Slices | None, gain: int, gated: bool
) -> None:
    assert plan(rows, features, width, slices, PROGRAMS, gain=gain, gated=gated) is None


def test_no_kernel_spills_registers(tmp_path: Path) -> None:
    expect_no_spills(engine_variants(), tmp_path)


def test_the_compiler_that_engines_have_takes_every_kind_of_kernel() -> None:
    library = nvrtc._library()
    if library is None:
        pytest.skip("needs NVRTC")
    for variant in engine_variants()[:6]:
        assert nvrtc._compile(library, replace(variant, watched=True).source(), OPTIONS)
