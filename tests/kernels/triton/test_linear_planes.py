"""GEMMs of 5-, 6- and 8-bit codes in the interpreter, against the floats that the codes stand for."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton.linear_planes import linear_planes, pack, packs, unpack, unpacked

FORMS = [(8, 128, 32, False), (8, 0, 128, True), (5, 16, 32, False), (5, 0, 32, True), (6, 32, 16, False)]


def weight_of(features: int, width: int, bits: int, zero: int, group: int, offsets: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (features, width), dtype=torch.uint8, generator=generator)
    scales = torch.rand(features, width // group, generator=generator).half().float()
    added = torch.rand(scales.shape, generator=generator).half().float() if offsets else None
    return QuantizedWeight(codes, scales, added, zero, bits, group)


@pytest.mark.parametrize(("bits", "zero", "group", "offsets"), FORMS)
@pytest.mark.parametrize(("features", "width"), [(40, 512), (33, 384)])
def test_codes_are_packed_into_as_many_bytes_as_they_have_bits_and_come_back(
    bits: int, zero: int, group: int, offsets: bool, features: int, width: int
) -> None:
    weight = weight_of(features, width, bits, zero, group, offsets)
    packed = pack(weight)
    assert packs(weight) and packed.pieces.nbytes == features * 512 * bits // 8
    assert packed.scales.dtype == torch.float16
    assert torch.equal(unpacked(packed), weight.dequantized())
    assert torch.equal(unpack(packed, torch.empty(features, width)), weight.dequantized())


@pytest.mark.parametrize(("bits", "zero", "group", "offsets"), FORMS)
@pytest.mark.parametrize("rows", [1, 20])
def test_a_gemm_is_that_of_the_floats(bits: int, zero: int, group: int, offsets: bool, rows: int) -> None:
    weight = weight_of(40, 384, bits, zero, group, offsets)
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, 384, generator=generator).half(), torch.randn(40, generator=generator).half()
    residual = torch.randn(rows, 40, generator=generator).half()
    want = x.double() @ weight.dequantized().half().double().t() + bias.double() + residual.double()
    got = linear_planes(x, pack(weight), bias, residual)
    assert (got.double() - want).abs().max() <= want.abs().max() * 2**-10


def test_scales_that_half_precision_cannot_hold_stay_float32() -> None:
    weight = weight_of(16, 64, 8, 128, 32, False)
    weight.scales[3, 1] = 1e-7
    packed = pack(weight)
    assert packed.scales.dtype == torch.float32 and torch.equal(unpacked(packed), weight.dequantized())
