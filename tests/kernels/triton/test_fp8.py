"""Kernels of rows and weights in fp8 or int8, in the interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton import coded_rows, linear_bytes
from quire.kernels.triton.linear_row import RowShape, linear_row


def same(got: coded_rows.CodedRows, want: coded_rows.CodedRows) -> None:
    """Numbers may be neighbours: a gated activation is rounded on the way."""
    assert torch.allclose(got.scales, want.scales, rtol=1e-2)
    ours, theirs = (rows.codes.float() * rows.scales[:, None] for rows in (got, want))
    assert (ours - theirs).norm() <= 0.04 * theirs.norm()


@pytest.mark.parametrize("gated", [None, "silu"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("width", [64, 2500])
def test_rows_become_codes_of_their_own_scale_or_of_the_one_given(gated: str | None, static: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, width * (2 if gated else 1), generator=generator).bfloat16()
    x[1] = 0
    scale = torch.tensor([0.001]) if static else None  # so small that some numbers are larger than codes can say
    got = coded_rows.quantize_rows(x, scale, gated=gated)
    same(got, coded_rows.quantize_reference(x, scale, gated))
    assert not got.codes.float().isnan().any()


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_a_norm_writes_codes_of_what_it_would_have_stored(added: bool, static: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, gain = torch.randn(3, 96, generator=generator).bfloat16(), torch.rand(96, generator=generator)
    residuals = [torch.ones(3, 96).bfloat16() if added else None for _ in range(2)]
    scale = torch.tensor([0.01]) if static else None
    same(
        coded_rows.norm_rows(x, residuals[0], gain, 1e-6, scale),
        coded_rows.norm_reference(x, residuals[1], gain, 1e-6, scale),
    )
    if residuals[0] is not None and residuals[1] is not None:
        assert torch.allclose(residuals[0].float(), residuals[1].float(), rtol=1e-2)
        assert not torch.equal(residuals[0].float(), torch.ones(3, 96))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 70])
def test_gemms_of_fp8_have_the_scales_of_rows_and_of_features_or_blocks(blocks: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    features, width = 200, 320
    x = torch.randint(-4, 5, (rows, width), generator=generator).to(coded_rows.FP8)
    weight = torch.randint(-4, 5, (features, width), generator=generator).to(coded_rows.FP8)
    of_weight = torch.rand((features, 3) if blocks else (features,), generator=generator)
    scales = of_weight, torch.rand(rows, generator=generator)
    bias, residual = torch.randn(features).bfloat16(), torch.randn(rows, features).bfloat16()
    out = torch.empty(rows, features, dtype=torch.bfloat16)
    got = linear_bytes.linear_bytes(x, weight, scales, bias, residual, out=out)
    want = linear_bytes.linear_reference(x, weight, scales, bias, residual, torch.bfloat16)
    assert got is out and torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("gated", [None, "silu"])
def test_rows_become_the_nearest_integers(gated: str | None) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 192 if gated else 96, generator=generator).bfloat16()
    got = coded_rows.quantize_rows(x, gated=gated, dtype=torch.int8)
    want = coded_rows.quantize_reference(x, gated=gated, dtype=torch.int8)
    assert torch.allclose(got.scales, want.scales, rtol=1e-2)
    # A gated activation is rounded on the way, by the interpreter towards zero.
    assert (got.codes.int() - want.codes.int()).abs().max() <= (2 if gated else 0)
    gain = torch.ones(x.shape[1])
    normed = coded_rows.norm_rows(x, None, gain, 1e-6, dtype=torch.int8)
    reference = coded_rows.norm_reference(x, None, gain, 1e-6, dtype=torch.int8)
    assert normed.codes.abs().max() == 127 and (normed.codes.int() - reference.codes.int()).abs().max() <= 1


@pytest.mark.parametrize("rows", [1, 70])
def test_gemms_of_int8_are_exact_sums_times_scales(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, 320), generator=generator, dtype=torch.int8)
    weight = torch.randint(-127, 128, (200, 320), generator=generator, dtype=torch.int8)
    scales = torch.rand(200, generator=generator), torch.rand(rows, generator=generator)
    got = linear_bytes.linear_bytes(x, weight, scales, out=torch.empty(rows, 200))
    assert torch.equal(got, (x.long() @ weight.long().t()).float() * scales[1][:, None] * scales[0])


@pytest.mark.parametrize("gated", [None, "silu"])
@pytest.mark.parametrize("dtype", [coded_rows.FP8, torch.int8])
def test_one_row_in_its_own_type_by_a_weight_of_bytes(gated: str | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, gain = torch.randn(1, 96, generator=generator).bfloat16(), torch.rand(96, generator=generator)
    weight = (4 * torch.randn(128, 96, generator=generator)).to(dtype)
    scales = torch.rand(128, generator=generator)
    got = linear_row(x, weight, scales=scales, norm=gain, eps=1e-6, gated=gated, sizes=RowShape(2, 64, 1))
    floats = weight.float() * scales[:, None]
    want = linear_row(x, floats, norm=gain, eps=1e-6, gated=gated, sizes=RowShape(2, 64, 1))
    assert torch.allclose(got.float(), want.float(), rtol=1e-2, atol=1e-2)
