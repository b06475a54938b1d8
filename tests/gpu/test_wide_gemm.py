"""GEMMs whose thread blocks share what they load, on a real GPU: right, the same each time, never too early, and with
the bits of deterministic mode's kernels where one thread block has all columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.cuda.wide_gemm import WideShape, available, fits, linear_wide
    from quire.kernels.triton import linear_fixed, norm

SHAPES = (
    (1, 128, 4, 1, 1, 1),
    (1, 128, 7, 2, 1, 1),
    (1, 96, 8, 1, 2, 1),
    (1, 96, 8, 2, 2, 1),
    (2, 192, 4, 1, 2, 1),
    (1, 256, 4, 2, 1, 1),
    (1, 64, 9, 1, 1, 2),
    (2, 96, 5, 1, 1, 2),
    (2, 144, 4, 1, 1, 4),
    (1, 160, 6, 1, 1, 4),
)
WIDTH = 2048


def numbers(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.float32)


def weight_of(features: int, width: int = WIDTH) -> Tensor:
    return (numbers(features, width) / width**0.5).bfloat16()


def wrong(found: Tensor, want: Tensor) -> int:
    return int((~((found.double() - want).abs() <= 2**-8 * want.abs() + 2e-3)).sum())


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not available(torch.device("cuda"), torch.bfloat16):
        pytest.skip("needs Hopper and NVRTC")
    torch.manual_seed(3)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_gemm_is_right_and_the_same_each_time_though_it_begins_before_its_rows_are_there(
    shape: tuple[int, ...],
) -> None:
    """Behind a norm, and the second behind the first: what they read is written just before. Tiles that are cut off at
    the end in both directions, and more tiles than the chip has multiprocessors."""
    sizes = WideShape(*shape)
    weights = [weight_of(features) for features in (WIDTH, 1016)]
    gain = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 64, 200, 256, 1000):
        x = numbers(rows, WIDTH).bfloat16()
        residual = numbers(rows, 1016).bfloat16() if rows != 64 else None
        seen: list[list[Tensor]] = []
        for _ in range(3):
            seen.append([norm.rms_norm(x, gain, 1e-6, pdl=True)])
            for weight, added in zip(weights, (None, residual)):
                assert fits(seen[-1][-1], weight, sizes)
                out = torch.full((rows, weight.shape[0]), float("nan"), device="cuda", dtype=torch.bfloat16)
                found = linear_wide(seen[-1][-1], weight, added, shape=sizes, out=out, pdl=True, watched=True)
                assert found is not None
                seen[-1].append(found)
        torch.cuda.synchronize()
        for place, weight in enumerate(weights):
            want = seen[0][place].double() @ weight.double().t()
            if place and residual is not None:
                want = want + residual.double()
            assert wrong(seen[0][place + 1], want) == 0, f"{rows} rows, GEMM {place}"
            assert all(torch.equal(each[place + 1], seen[0][place + 1]) for each in seen), f"{rows} rows"


@pytest.mark.parametrize("shape", [(2, 192, 4, 1, 2, 1), (1, 192, 5, 1, 1, 1), (1, 256, 4, 2, 1, 1)])
@torch.inference_mode()
def test_gate_and_up_come_out_multiplied(shape: tuple[int, ...]) -> None:
    inner = 768
    weight, sizes = weight_of(2 * inner), WideShape(*shape)
    for rows in (64, 200, 600):
        x = numbers(rows, WIDTH).bfloat16()
        assert fits(x, weight, sizes, gated=True)
        found = linear_wide(x, weight, shape=sizes, gated=True, pdl=True, watched=True)
        assert found is not None
        both = x.double() @ weight.double().t()
        assert wrong(found, F.silu(both[:, :inner]) * both[:, inner:]) == 0, f"{rows} rows"


@torch.inference_mode()
def test_a_graph_of_them_repeats_what_they_computed() -> None:
    shapes = [WideShape(2, 192, 4, 1, 2, 1), WideShape(1, 128, 7, 2, 1, 1), WideShape(2, 144, 4, 1, 1, 4)]
    weights, x = [weight_of(WIDTH) for _ in shapes], numbers(256, WIDTH).bfloat16()

    def chain(x: Tensor) -> Tensor:
        for shape, weight in zip(shapes, weights):
            found = linear_wide(x, weight, x, shape=shape, pdl=True, watched=True)
            assert found is not None
            x = found
        return x

    want = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, want)


@torch.inference_mode()
def test_one_part_has_the_bits_of_the_fixed_kernel_for_any_number_of_rows() -> None:
    weight = weight_of(1024)
    x = numbers(1000, WIDTH).bfloat16()
    want = linear_fixed.linear_fixed(x, weight, None, None, None)
    for shape in SHAPES:
        if shape[-1] > 1:
            continue
        for rows in (1, 64, 130, 256, 1000):
            found = linear_wide(x[:rows].contiguous(), weight, shape=WideShape(*shape), pdl=True, watched=True)
            assert found is not None
            assert torch.equal(found, want[:rows]), f"{shape}, {rows} rows: {int((found != want[:rows]).sum())} differ"
