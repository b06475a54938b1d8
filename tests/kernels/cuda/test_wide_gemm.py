"""The kernel of wide GEMMs without a GPU: what it can compute, and that the compiler finds registers for it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quire.bench.gpu import tune_wide
from quire.bench.gpu.fixed_wide_shapes import gated_shapes, wide_shapes
from quire.kernels.cuda import nvrtc
from quire.kernels.cuda.wide_gemm import OPTIONS, Variant, WideShape, can_compute, variant_of
from quire.kernels.slices import Slices
from quire.kernels.triton.fixed_tiles import TileScratch
from tests.kernels.cuda.ptxas import expect_no_spills

ROWS = (64, 256, 8192)
HEADS, RANGES = Slices.each(32, 128), Slices.of_width(12_288)


def test_every_candidate_can_compute_its_gemm() -> None:
    for rows in ROWS:
        for name in tune_wide.weights_of():
            jobs = list(tune_wide.jobs([rows], [name]))
            assert [shape for _, _, shape in jobs] == list(tune_wide.candidates(rows, name))


@pytest.mark.parametrize(
    "shape, gated",
    [
        ((3, 128, 4, 1, 1, 1), False),  # 384 rows
        ((1, 264, 4, 1, 1, 1), False),  # wider than one instruction
        ((2, 256, 3, 1, 1, 1), False),  # 256 sums of a thread
        ((1, 128, 8, 1, 1, 1), False),  # a ring of 256 KB
        ((1, 128, 4, 2, 4, 2), False),  # a cluster of 16
        ((1, 144, 4, 1, 1, 4), False),  # 18 sums for each part: not by fours
        ((1, 128, 4, 1, 1, 2), True),  # gates in parts
        ((1, 240, 4, 1, 1, 1), True),  # 12,288 gates are not whole tiles of 120
    ],
)
def test_what_has_no_kernel_is_refused(shape: tuple[int, ...], gated: bool) -> None:
    assert not can_compute(256, 24576, 4096, Variant(WideShape(*shape), gated=gated))


def test_widths_that_the_copy_engine_cannot_step_over_are_refused() -> None:
    assert can_compute(256, 4096, 4104, Variant(WideShape()))
    assert not can_compute(256, 4096, 4100, Variant(WideShape()))
    assert not can_compute(256, 4100, 4096, Variant(WideShape()))


def fixed_variants() -> list[Variant | None]:
    """What the tuner of deterministic mode tries for 8B, but for sums in one slice."""
    sliced = [variant_of(WideShape.of(shape), slices.width, slices)
              for slices in (HEADS, RANGES) for rows in ROWS for shape in wide_shapes(rows, slices)]
    gates = [variant_of(WideShape.of(shape), 4096, gated=True, rounded=True)
             for rows in ROWS for shape in gated_shapes(rows)]
    return sliced + gates


def test_every_candidate_of_deterministic_mode_can_compute_its_gemm() -> None:
    for variant in fixed_variants():
        assert variant is not None
        features, width = (24_576, 4096) if variant.gated else (4096, variant.slices * variant.slice_turns * 64)
        assert can_compute(256, features, width, variant), variant
        assert variant.deep_floats <= TileScratch.allocate("cpu", 1).deep.numel()
    for rows in ROWS:
        assert all(can_compute(rows, 6144, 4096, Variant(WideShape.of(shape))) for shape in wide_shapes(rows, None))


def test_a_counter_has_a_place_for_each_node_that_waits() -> None:
    def places(slices: Slices, *shape: int) -> tuple[int, int]:
        variant = variant_of(WideShape.of(shape), slices.width, slices)
        assert variant is not None
        return variant.inner, variant.places

    assert places(HEADS, 1, 128, 5, 2, 1, 1, 1, 1) == (4, 3)  # 8 nodes: sums of 4, 8 and 16 slices wait
    assert places(HEADS, 1, 128, 7, 1, 1, 2, 1, 0) == (4, 2)
    assert places(RANGES, 1, 128, 7, 2, 1, 1) == (4, 1)
    assert places(RANGES, 1, 192, 5, 2, 1, 1) == (2, 2)
    assert places(RANGES, 1, 256, 4, 2, 1, 1) == (1, 3)
    assert places(Slices.each(40, 128), 1, 128, 5, 2, 1, 1, 1, 1) == (4, 4)


@pytest.mark.parametrize(
    "slices, shape",
    [
        (Slices.each(9, 64), (1, 128, 5, 2, 1, 1)),  # nodes of four, and one slice left
        (Slices.each(8, 80), (1, 128, 5, 2, 1, 1)),  # no whole turns
        (Slices.of_width(3040), (1, 128, 5, 2, 1, 1)),  # unequal ones
        (Slices.each(40, 128), (1, 128, 7, 1, 1, 2)),  # 20 slices are no node of the tree
        (HEADS.part(0, 16), (1, 128, 5, 2, 1, 1)),  # a rank's own, whose sum is not the whole
        (Slices.each(8, 320), (1, 128, 7, 2, 1, 1, 1, 0)),  # five turns: a ring longer than that is a slice ahead
        (Slices.each(4, 128), (1, 128, 5, 2, 1, 1, 0, 1)),  # one node: nothing waits
        (Slices.single(4096), (1, 128, 5, 2, 1, 1, 1, 0)),
        (None, (1, 128, 5, 2, 1, 1, 0, 1)),
    ],
)
def test_slices_that_it_cannot_sum_are_refused(slices: Slices | None, shape: tuple[int, ...]) -> None:
    assert variant_of(WideShape.of(shape), 4096 if slices is None else slices.width, slices) is None


def test_no_candidate_spills_registers_or_serializes_its_products(tmp_path: Path) -> None:
    jobs = tune_wide.jobs([256, 8192], list(tune_wide.weights_of()))
    variants = {tune_wide.variant_of(*job, watched=False) for job in jobs}
    variants |= {Variant(WideShape(2, 192, 4, 1, 2, 1), residual=True, early=True), Variant(WideShape())}
    variants |= {replace(variant, early=True) for variant in fixed_variants() if variant is not None}
    for text in expect_no_spills(variants, tmp_path):
        assert "serialized" not in text, text


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed for tests on Linux")
def test_the_compiler_that_engines_have_takes_every_kind_of_kernel() -> None:
    """NVRTC refuses what nvcc takes: a function that is not said to be the device's, a header."""
    library = nvrtc._library()
    assert library is not None
    few = {(each.slices, each.gated, each.shape.parts, each.shape.ordered, each.shape.kept): each
           for each in fixed_variants() if each is not None}  # fmt: skip
    for variant in (Variant(WideShape()), *few.values()):
        assert nvrtc._compile(library, variant.source(), OPTIONS)
