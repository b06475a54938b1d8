"""GEMMs of 4-bit codes, run by our interpreter: the order of the codes, the scales, and how the kernel waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton import linear_codes as host
from quire.kernels.triton.linear_codes import CodesShape, fits, linear_codes, pack, packs, unpack, unpacked
from quire.kernels.triton.linear_prefetch import PrefetchScratch
from tests.kernels.triton.gluon_interpreter import interpreting
from tests.kernels.triton.gluon_memory import Value


def codes_of(words: Value, kind: torch.dtype) -> tuple[Value, ...]:
    """What the assembler of `codes_kernel._codes` does."""
    shifts = (0, 16, 4, 20, 8, 24, 12, 28)
    return tuple(Value(((words.data >> shift & 15) - 8).to(kind)) for shift in shifts)


def scaled(codes: Value, scale: Value, offset: Value) -> Value:
    return Value((codes.data.double() * scale.data.double() + offset.data.double()).to(codes.data.dtype))


ASSEMBLY = {"_codes": codes_of, "_scaled": scaled}


def weight_of(features: int, width: int, group: int, offsets: bool, seed: int = 0) -> QuantizedWeight:
    """Scales and offsets are powers of two, so that the weight is exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (features, width), dtype=torch.uint8, generator=generator)
    scales = 2.0 ** torch.randint(-2, 2, (features, width // group), generator=generator)
    added = scales * torch.randint(-2, 3, scales.shape, generator=generator) if offsets else None
    return QuantizedWeight(codes, scales, added, 7, 4, group)


def run(
    x: Tensor, weight: QuantizedWeight, sizes: CodesShape, programs: int, seed: int | None, **more: Tensor
) -> Tensor:
    places = PrefetchScratch.allocate("cpu", 1 << 18)
    places.partial.fill_(float("nan"))
    packed = pack(weight, x.dtype)
    assert fits(len(x), packed, sizes, places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_programs", lambda *_: programs)
        with interpreting(reversed_range, seed, ("weight", "scales"), ASSEMBLY):
            return linear_codes(x, packed, sizes=sizes, scratch=places, pdl=True, **more)


def reversed_range(count: int) -> list[int]:
    return list(reversed(range(count)))


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "multiprocessors", lambda device: 4)


@pytest.mark.parametrize(
    ("rows", "features", "width", "group", "offsets", "sizes", "programs"),
    [
        (1, 256, 512, 128, False, CodesShape(3, 2), 2),
        (5, 200, 512, 128, True, CodesShape(2, 4), 3),
        (16, 128, 256, 64, True, CodesShape(3, 1), 2),
        (33, 130, 256, 32, True, CodesShape(2, 2), 3),
        (8, 128, 384, 384, False, CodesShape(3, 2), 1),
        (2, 128, 384, 192, True, CodesShape(2, 2), 2),
        (17, 128, 256, 128, False, CodesShape(2, 2), 2),
    ],
)
def test_products_with_codes_are_those_with_the_floats_they_stand_for(
    rows: int, features: int, width: int, group: int, offsets: bool, sizes: CodesShape, programs: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-2, 3, (rows, width), generator=generator).bfloat16()
    weight = weight_of(features, width, group, offsets)
    residual = torch.randint(-2, 3, (rows, features), generator=generator).bfloat16()
    bias = torch.randint(-2, 3, (features,), generator=generator).bfloat16()
    want = (x.double() @ weight.dequantized().double().t() + bias.double() + residual.double()).bfloat16()
    for seed in (None, 1):
        assert torch.equal(run(x, weight, sizes, programs, seed, bias=bias, residual=residual), want)


@pytest.mark.parametrize(("group", "features"), [(128, 200), (64, 128), (32, 130)])
def test_packed_codes_are_unpacked_to_the_floats_they_stand_for(group: int, features: int) -> None:
    weight = weight_of(features, 256, group, True)
    packed = pack(weight, torch.bfloat16)
    assert torch.equal(unpacked(packed), weight.dequantized().bfloat16())
    assert torch.equal(unpack(packed, torch.empty(features, 256, dtype=torch.bfloat16)), unpacked(packed))


def test_what_the_kernel_has_no_form_for_is_not_packed() -> None:
    assert packs(weight_of(64, 128, 32, False)) and packs(weight_of(64, 128, 128, False))
    assert not packs(weight_of(64, 96, 32, False)) and not packs(weight_of(64, 192, 96, False))
    eight = QuantizedWeight(torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 1), None, 128, 8, 128)
    assert not packs(eight)
