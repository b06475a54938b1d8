"""Few rows times 4-bit codes without tensor cores, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.codes_few import MOST_ROWS, fits, linear_codes_few
from quire.kernels.triton.linear_codes import PackedCodes, pack, unpacked
from quire.kernels.triton.linear_few import linear_reference
from tests.kernels.triton.test_linear_codes import weight_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed_of(features: int, width: int, group: int, offsets: bool, dtype: torch.dtype) -> PackedCodes:
    packed = pack(weight_of(features, width, group, offsets), dtype)
    return replace(packed, words=packed.words.to(DEVICE), scales=packed.scales.to(DEVICE))


@pytest.mark.parametrize(("rows", "features", "width", "group", "offsets"), [
    (1, 96, 576, 32, True),
    (2, 64, 576, 32, False),
    (8, 40, 1536, 32, True),
    (3, 200, 64, 64, True),
    (1, 144, 640, 128, False),
    (1, 32, 4416, 32, True),  # more slabs than are unrolled
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_with_the_floats_that_codes_stand_for(
    rows: int, features: int, width: int, group: int, offsets: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-2, 3, (rows, width), generator=generator).to(DEVICE, dtype)
    packed = packed_of(features, width, group, offsets, dtype)
    bias = torch.randint(-9, 9, (features,), generator=generator).to(DEVICE, dtype)
    residual = torch.randint(-9, 9, (rows, features), generator=generator).to(DEVICE, dtype)
    assert fits(rows, packed)
    for more in ((bias, residual), ()):
        found, want = linear_codes_few(x, packed, *more), linear_reference(x, unpacked(packed), *more)
        # Whole numbers and powers of two: all sums are exact. The interpreter cuts off what bf16 has no bits for.
        assert ((found.float() - want.float()).abs() <= want.float().abs() * (dtype == torch.bfloat16) / 128).all()


@pytest.mark.parametrize("gains", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [None, "silu", "gelu"])
def test_norm_and_gate_are_part_of_it(gains: torch.dtype, gated: str | None) -> None:
    x, gain = torch.randn(2, 576).to(DEVICE, torch.bfloat16), (torch.rand(576) + 0.5).to(DEVICE, gains)
    packed = packed_of(160, 576, 32, True, torch.bfloat16)
    bias = torch.randn(160).to(DEVICE, torch.bfloat16)
    assert fits(2, packed, gated is not None)
    found = linear_codes_few(x, packed, bias, norm=gain, eps=1e-5, gated=gated)
    want = linear_reference(x, unpacked(packed), bias, norm=gain, eps=1e-5, gated=gated)
    assert (found.float() - want.float()).abs().max() <= 0.01 * want.float().abs().max()


def test_what_it_cannot_multiply_it_does_not_fit() -> None:
    packed = packed_of(48, 64, 32, False, torch.bfloat16)
    assert fits(MOST_ROWS, packed) and not fits(MOST_ROWS + 1, packed) and not fits(1, packed, gated=True)
