"""GEMMs whose thread blocks share what they load, on a real GPU: right, the same each time, never too early, and with
the bits of deterministic mode's kernels where one thread block has all columns."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.bench.gpu.fixed_wide_shapes import gated_shapes, wide_shapes
    from quire.kernels.cuda import nvrtc, wide_gemm
    from quire.kernels.cuda.wide_gemm import (
        OPTIONS,
        Variant,
        WideShape,
        available,
        fits,
        linear_wide,
        stack_bytes,
        variant_of,
    )
    from quire.kernels.slices import Slices
    from quire.kernels.triton import activation, fixed_table, fixed_tiles, linear_fixed, norm
    from quire.ops.triton import TritonOps

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
SLICED = (("each", 32, 128), ("each", 16, 128), ("each", 40, 128), ("of_width", 12_288), ("of_width", 3072))


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
    sizes = Variant(WideShape(*shape))
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
                found = linear_wide(seen[-1][-1], weight, added, variant=sizes, out=out, pdl=True, watched=True)
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
    weight, sizes = weight_of(2 * inner), Variant(WideShape(*shape), gated=True)
    for rows in (64, 200, 600):
        x = numbers(rows, WIDTH).bfloat16()
        assert fits(x, weight, sizes)
        found = linear_wide(x, weight, variant=sizes, pdl=True, watched=True)
        assert found is not None
        both = x.double() @ weight.double().t()
        assert wrong(found, F.silu(both[:, :inner]) * both[:, inner:]) == 0, f"{rows} rows"


@torch.inference_mode()
def test_a_graph_of_them_repeats_what_they_computed() -> None:
    shapes = [WideShape(2, 192, 4, 1, 2, 1), WideShape(1, 128, 7, 2, 1, 1), WideShape(2, 144, 4, 1, 1, 4)]
    weights, x = [weight_of(WIDTH) for _ in shapes], numbers(256, WIDTH).bfloat16()

    def chain(x: Tensor) -> Tensor:
        for shape, weight in zip(shapes, weights):
            found = linear_wide(x, weight, x, variant=Variant(shape), pdl=True, watched=True)
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
            given = x[:rows].contiguous()
            found = linear_wide(given, weight, variant=Variant(WideShape(*shape)), pdl=True, watched=True)
            assert found is not None
            assert torch.equal(found, want[:rows]), f"{shape}, {rows} rows: {int((found != want[:rows]).sum())} differ"


def _sliced_variants(slices: Slices) -> Iterator[Variant]:
    """Of every shape that the tuner tries for any number of rows."""
    shapes = {shape for rows in (64, 256, 8192) for shape in wide_shapes(rows, slices)}
    found = (variant_of(WideShape.of(shape), slices.width, slices) for shape in sorted(shapes))
    return (variant for variant in found if variant is not None)


def _compiled(variants: list[Variant]) -> list[tuple[Variant, int]]:
    """Variants and their stacks. In threads: the compiler does not hold Python's lock."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda each: nvrtc.compiled(each.source(), OPTIONS), variants))
    return [(variant, stack_bytes(variant, torch.cuda.current_device())) for variant in variants]


@pytest.mark.parametrize("made", SLICED)
@torch.inference_mode()
def test_sums_in_slices_have_the_bits_of_the_fixed_kernel(made: tuple[str, int, int]) -> None:
    """Tiles that are cut off in both directions; of undivided columns also more tiles than run at once."""
    name, *sizes = made
    slices = getattr(Slices, name)(*sizes)
    deep = fixed_tiles.TileScratch.for_device(torch.device("cuda", torch.cuda.current_device())).deep
    variants = list(_sliced_variants(slices))
    assert len(variants) > 3
    for variant, stack in _compiled([replace(each, residual=True, early=True, watched=True) for each in variants]):
        assert stack == 0, f"the compiler of this machine finds too few registers for {variant}"
    for features, counts in ((1000, (1, 64, 130, 256, 600)), (4096, (2100,))):
        weight, x = weight_of(features, slices.width), numbers(max(counts), slices.width).bfloat16()
        residual = numbers(max(counts), features).bfloat16()
        want = linear_fixed.linear_fixed(x, weight, None, residual, slices)
        for variant in variants:
            for rows in counts:
                given = x[:rows].contiguous()
                assert fits(given, weight, variant, deep)
                out = torch.full((rows, features), float("nan"), device="cuda", dtype=torch.bfloat16)
                found = linear_wide(given, weight, residual[:rows].contiguous(), variant=variant, deep=deep, out=out,
                                    pdl=True, watched=True)  # fmt: skip
                if found is None:  # parts that would not all run at once
                    assert variant.shape.parts > 1 and rows > 256
                    continue
                other = int((found != want[:rows]).sum())
                assert other == 0, f"{variant.shape}, {rows} rows of {features}: {other} of {found.numel()} differ"


@torch.inference_mode()
def test_a_rounded_gate_has_the_bits_of_two_kernels() -> None:
    inner = 768
    weight, x = 3 * weight_of(2 * inner), numbers(600, WIDTH).bfloat16()
    want = activation.act_mul(linear_fixed.linear_fixed(x, weight), "silu")
    for shape in sorted({shape for rows in (64, 256, 8192) for shape in gated_shapes(rows)}):
        variant = Variant(WideShape.of(shape), gated=True, rounded=True)
        for rows in (1, 64, 200, 600):
            found = linear_wide(x[:rows].contiguous(), weight, variant=variant, pdl=True, watched=True)
            assert found is not None
            other = int((found != want[:rows]).sum())
            assert other == 0, f"{shape}, {rows} rows: {other} of {found.numel()} differ"


@torch.inference_mode()
def test_the_table_of_deterministic_mode_changes_no_bit_in_a_graph_or_out_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer's GEMMs by `wide`, against the kernels that run without a table."""
    rows, heads, ranges = 300, Slices.each(16, 128), Slices.of_width(3072)
    sizes = {(3072, WIDTH, 1): (1, 128, 7, 2, 1, 1), (WIDTH, WIDTH, 16): (1, 128, 5, 2, 1, 1, 1, 1),
             (6144, WIDTH, 1): (1, 256, 4, 2, 1, 1), (WIDTH, 3072, 8): (1, 192, 5, 2, 1, 1, 0, 0)}  # fmt: skip
    known = {key: [(rows, fixed_table.FixedChoice(fixed_table.WIDE, each))] for key, each in sizes.items()}
    ops = TritonOps("cuda", torch.bfloat16, deterministic=True, pdl=True)
    cut = {WIDTH: heads, 3072: ranges}
    packed = {key: ops.pack_linear(weight_of(*key[:2]), None, cut[key[1]] if key[2] > 1 else None) for key in sizes}
    x = numbers(rows, WIDTH).bfloat16()

    def layer() -> Tensor:
        qkv = ops.linear(x, packed[3072, WIDTH, 1])
        attended = ops.linear(qkv[:, :WIDTH].contiguous(), packed[WIDTH, WIDTH, 16])
        return ops.linear(ops.gated_linear(attended, packed[6144, WIDTH, 1], "silu"), packed[WIDTH, 3072, 8], x)

    monkeypatch.setattr(fixed_table, "table", dict)
    monkeypatch.setattr(fixed_table, "gates", dict)
    want = layer()
    calls = []
    launch = wide_gemm.linear_wide
    monkeypatch.setattr(wide_gemm, "linear_wide", lambda *args, **named: calls.append(1) or launch(*args, **named))
    monkeypatch.setattr(fixed_table, "table", lambda: known)
    monkeypatch.setattr(fixed_table, "gates", lambda: {(6144, WIDTH, 1): known[6144, WIDTH, 1]})
    assert torch.equal(layer(), want) and len(calls) == 4
    monkeypatch.setattr(fixed_table, "gates", dict)
    assert torch.equal(layer(), want) and len(calls) == 8
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer()
    for _ in range(2):
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, want)
