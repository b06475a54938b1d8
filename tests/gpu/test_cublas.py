"""GEMMs by the named algorithms of cuBLASLt, on a real GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels import cublas
    from quire.kernels.triton import gemm_table
    from quire.ops.triton import TritonOps

SHAPES = ((1, 256, 512), (7, 640, 256), (64, 4096, 1024), (300, 1000, 2048))


@pytest.mark.parametrize(("rows", "features", "width"), SHAPES)
def test_every_algorithm_on_offer_computes_the_gemm(rows: int, features: int, width: int) -> None:
    library = cublas.CublasLt(torch.device("cuda"), torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(features, width, device="cuda", dtype=torch.bfloat16)
    want = x.float() @ weight.float().t()
    found = list(library.candidates(rows, features, width))
    assert found
    for one in found:
        got = library.gemm(x, weight, one.code)
        assert got is not None
        assert (got.float() - want).abs().max() <= 0.01 * want.abs().max()
    library.close()


def test_what_the_library_does_not_know_and_what_is_not_aligned_is_left_to_torch() -> None:
    library = cublas.CublasLt(torch.device("cuda"), torch.bfloat16)
    x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    code = next(library.candidates(16, 256, 512)).code
    assert library.gemm(x, weight, "00" * 64) is None
    assert library.gemm(x[1:], weight, code) is not None
    assert library.gemm(x[:, :256], weight[:, :256].contiguous(), code) is None
    shifted = torch.randn(16 * 512 + 8, device="cuda", dtype=torch.bfloat16)[8:].view(16, 512)
    assert library.gemm(shifted, weight, code) is None
    library.close()


@pytest.mark.parametrize("rows", [3, 32, 200, 256, 5000])
def test_the_engines_gemms_are_those_of_torch_whatever_the_table_names(rows: int) -> None:
    ops = TritonOps("cuda", torch.bfloat16)
    for features, width in ((6144, 4096), (4096, 12288), (1024, 3072)):
        weight = torch.randn(features, width, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        residual = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
        want = x.float() @ weight.float().t() + residual.float()
        got = ops.linear(x, ops.pack_linear(weight), residual)
        chosen = gemm_table.lookup(rows, features, width, x.dtype)
        assert (got.float() - want).abs().max() <= 0.01 * want.abs().max(), chosen
    ops.close()
