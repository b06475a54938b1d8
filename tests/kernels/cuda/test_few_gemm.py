"""GEMMs of up to eight rows in CUDA C without a GPU: run by an emulated block, and compiled for the chip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.bench.gpu import tune_few
from quire.kernels.cuda import few_gemm, nvrtc
from quire.kernels.cuda.few_gemm import OPTIONS, FewShape, Variant, can_compute
from quire.kernels.triton.linear_few import linear_reference
from tests.kernels.cuda.ptxas import expect_no_spills

FOLDER = Path(__file__).parent
SOURCES = Path(few_gemm.__file__).parent
MAIN = """
int main() {{
    alignas(16) static u16 weight[{features} * {width}], x[{rows} * {width}], gain[{width}], out[{rows} * {outputs}];
    static u16 residual[{rows} * {outputs}];
    for (auto& [place, size] : std::initializer_list<std::pair<void*, size_t>>{{
             {{weight, sizeof(weight)}}, {{x, sizeof(x)}}, {{gain, sizeof(gain)}}, {{residual, sizeof(residual)}}}})
        if (fread(place, 1, size, stdin) != size) return 2;
    run_blocks({blocks}, [&] {{ few_gemm(weight, x, gain, residual, out, 1e-5f, {rows}, {outputs}); }});
    if (launched != {blocks} * BLOCK_THREADS) return 3;
    if (early_loads != {blocks} * BLOCK_THREADS * QUADS * AHEAD) return 4;
    fwrite(out, sizeof(out), 1, stdout);
}}
"""


def emulated(variant: Variant, x: Tensor, weight: Tensor, gain: Tensor, residual: Tensor, folder: Path) -> Tensor:
    (rows, width), outputs = x.shape, weight.shape[0] // (2 if variant.gated else 1)
    defined, _, _ = variant.source().partition("//")
    blocks = weight.shape[0] // (4 * variant.shape.quads)
    main = MAIN.format(rows=rows, width=width, features=weight.shape[0], outputs=outputs, blocks=blocks)
    source, program = folder / "few.cpp", folder / "few"
    kernel = (SOURCES / "few_gemm.cu").read_text()
    source.write_text("\n".join([defined, f'#include "{FOLDER / "emulated.h"}"', kernel, main]))
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = b"".join(each.view(torch.int16).numpy().tobytes() for each in (weight, x, gain, residual))
    ran = subprocess.run([program], input=given, capture_output=True)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    return torch.frombuffer(bytearray(ran.stdout), dtype=torch.bfloat16).view(rows, outputs)


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("rows", "features", "width", "shape", "more"),
    [
        (5, 48, 1024, FewShape(4, 4, 2), {}),
        (8, 64, 512, FewShape(8, 2, 1), {"residual": True}),
        (3, 32, 512, FewShape(2, 2, 4), {"norm": True}),  # all of it on its way at once
        (6, 64, 768, FewShape(4, 2, 2), {"norm": True, "gated": True}),
        (2, 64, 512, FewShape(2, 8, 1), {"gated": True}),
    ],
)
def test_an_emulated_block_computes_the_gemm(
    rows: int, features: int, width: int, shape: FewShape, more: dict[str, bool], tmp_path: Path
) -> None:
    variant = Variant(shape, shape.lines(width), early=True, **more)
    assert can_compute(rows, features, width, shape)
    x, weight, gain = numbers(rows, width), numbers(features, width, seed=1) / width**0.5, numbers(width, seed=2)
    residual = numbers(rows, features // (2 if variant.gated else 1), seed=3)
    got = emulated(variant, x, weight, gain, residual, tmp_path)
    want = linear_reference(
        x.float(), weight.float(), None, residual.float() if variant.residual else None,
        norm=gain.float() if variant.norm else None, eps=1e-5, gated="silu" if variant.gated else None)
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)


def test_what_has_no_kernel_is_refused() -> None:
    assert can_compute(8, 6144, 4096, FewShape())
    assert not can_compute(9, 6144, 4096, FewShape())
    assert not can_compute(8, 6136, 4096, FewShape())  # half a block
    assert not can_compute(8, 6144, 4352, FewShape())  # 17 lines a warp, two at a time
    assert not can_compute(8, 6144, 4100, FewShape())  # no whole lines


def test_every_candidate_can_compute_its_gemm() -> None:
    for sizes in tune_few.SETS.values():
        for name, size in tune_few.gemms().items():
            assert can_compute(8, *size, FewShape.of(sizes)), (name, sizes)


def test_no_candidate_spills_registers(tmp_path: Path) -> None:
    expect_no_spills(sorted(set(tune_few.variants(list(tune_few.SETS))), key=repr), tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed for tests on Linux")
def test_the_compiler_that_engines_have_takes_every_kind_of_kernel() -> None:
    library = nvrtc._library()
    assert library is not None
    few = {(each.norm, each.gated, each.shape.quads): each for each in tune_few.variants(list(tune_few.SETS))}
    for variant in few.values():
        assert nvrtc._compile(library, variant.source(), OPTIONS)
