"""GEMMs whose weights go straight to registers, on a real GPU: right, and never too early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.triton.linear_few import linear_reference
    from quire.kernels.triton.linear_stream import StreamShape, available, fits, linear_stream

WIDTH = 2048
FEATURES = (2048, 1000)
"""Of two GEMMs in a row: the second is no multiple of any tile."""


def numbers(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize("shape", [(16, 64, 8, 1, 4, 2), (16, 64, 16, 1, 4, 0), (32, 32, 8, 3, 4, 2)])
@pytest.mark.parametrize("rows", [1, 5, 8, 13])
@torch.inference_mode()
def test_a_gemm_is_right_though_it_begins_before_its_rows_are_there(shape: tuple[int, ...], rows: int) -> None:
    if not available(torch.device("cuda"), torch.bfloat16):
        pytest.skip("needs Hopper and a Triton with Gluon")
    sizes = StreamShape(*shape)
    torch.manual_seed(5)
    first, second = ((numbers(features, WIDTH) / WIDTH**0.5).bfloat16() for features in FEATURES)
    bias, residual, gain = numbers(FEATURES[1]).bfloat16(), numbers(rows, FEATURES[0]).bfloat16(), numbers(WIDTH)
    for _ in range(3):
        x = numbers(rows, WIDTH).bfloat16()
        sums = linear_stream(x, first, None, residual, sizes=sizes, pdl=True)
        found = linear_stream(sums, second, bias, sizes=sizes, pdl=True)
        _close(sums, linear_reference(x, first, None, residual))
        _close(found, linear_reference(sums, second, bias))
    assert fits(rows, *first.shape, sizes, True)
    normed = linear_stream(x, first, None, norm=gain, eps=1e-6, sizes=sizes, pdl=True)
    _close(normed, linear_reference(x, first, norm=gain, eps=1e-6))
    gated = linear_stream(normed, first, None, norm=gain, eps=1e-6, gated="silu", sizes=sizes, pdl=True)
    _close(gated, linear_reference(normed, first, norm=gain, eps=1e-6, gated="silu"))


def _close(got: Tensor, want: Tensor) -> None:
    """Rows are rounded once more before they are multiplied, with a norm."""
    torch.testing.assert_close(got.float(), want.float(), rtol=0.03, atol=0.06 * float(want.float().abs().mean()))
