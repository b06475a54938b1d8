"""GEMMs of 4-bit codes in tiles, run by our interpreter: features, rows and columns of tiles, and waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.bench.gpu.tile_shapes import TILES, tile_shapes
from quire.bench.gpu.tune import weights_of
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton import codes_tiles as host
from quire.kernels.triton import gemm_table, linear_codes, linear_prefetch
from quire.kernels.triton.codes_tiles import CodesTilesShape, fits, linear_codes_tiles, programs_of
from quire.kernels.triton.gemm_table import GemmChoice
from quire.kernels.triton.linear_codes import PackedCodes, pack, unpacked
from quire.kernels.triton.linear_prefetch import PrefetchScratch
from quire.ops.triton import TritonOps
from tests.kernels.triton.gluon_interpreter import Run, interpreting
from tests.kernels.triton.test_linear_codes import ASSEMBLY, reversed_range, weight_of


def run(
    x: Tensor, weight: QuantizedWeight, sizes: CodesTilesShape, seed: int | None, **more: Tensor
) -> tuple[Tensor, Run]:
    places = PrefetchScratch.allocate("cpu", 1 << 20)
    places.partial.fill_(float("nan"))
    packed = pack(weight, x.dtype)
    assert fits(len(x), packed, sizes, places)
    with interpreting(reversed_range, seed, ("weight", "scales"), ASSEMBLY) as runs:
        found = linear_codes_tiles(x, packed, sizes=sizes, scratch=places, pdl=True, **more)
    assert not places.arrived.any()
    return found, runs[0]


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "multiprocessors", lambda device: 4)


@pytest.mark.parametrize(
    ("rows", "features", "width", "group", "offsets", "sizes", "programs"),
    [
        (33, 200, 512, 128, True, CodesTilesShape(3, 64, 32, 2, 1), 4),  # two tiles of features, two of rows
        (17, 200, 640, 128, False, CodesTilesShape(3, 64, 32, 2, 0), 4),  # shares that end inside tiles
        (64, 130, 384, 64, True, CodesTilesShape(2, 64, 64, 3, 3), 3),  # two scales a turn; a tile of three programs
        (40, 300, 384, 384, False, CodesTilesShape(2, 128, 64, 2, 2), 4),  # one scale a feature
        (70, 128, 384, 192, True, CodesTilesShape(2, 64, 32, 2, 1), 3),
        (96, 640, 256, 128, False, CodesTilesShape(2, 64, 32, 2, 1), 4),  # 15 tiles in four rounds
    ],
)
def test_products_in_tiles_are_those_with_the_floats_that_codes_stand_for(
    rows: int, features: int, width: int, group: int, offsets: bool, sizes: CodesTilesShape, programs: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-2, 3, (rows, width), generator=generator).bfloat16()
    weight = weight_of(features, width, group, offsets)
    residual = torch.randint(-2, 3, (rows, features), generator=generator).bfloat16()
    bias = torch.randint(-2, 3, (features,), generator=generator).bfloat16()
    want = (x.double() @ weight.dequantized().double().t() + bias.double() + residual.double()).bfloat16()
    for seed in (None, 1):
        found, launched = run(x, weight, sizes, seed, bias=bias, residual=residual)
        assert torch.equal(found, want) and launched.programs == programs


def test_sums_that_nothing_is_added_to_are_stored_as_they_are() -> None:
    x = torch.randint(-2, 3, (20, 256), generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = weight_of(64, 256, 128, True)
    want = (x.double() @ weight.dequantized().double().t()).bfloat16()
    assert torch.equal(run(x, weight, CodesTilesShape(2, 64, 32, 2, 2), 3)[0], want)


def test_codes_are_asked_for_before_the_kernel_before_has_ended_and_rows_after() -> None:
    _, launched = run(torch.zeros(17, 512).bfloat16(), weight_of(128, 512, 128, False), CodesTilesShape(2, 64, 32), 0)
    early = {copy.name for copy in launched.copies if copy.early}
    assert early == {"weight", "scales"} and "x" in {copy.name for copy in launched.copies}


def test_what_does_not_fit_is_refused() -> None:
    scratch = PrefetchScratch.allocate("cpu", 1 << 16)

    def fitting(sizes: CodesTilesShape, rows: int = 32, width: int = 512, group: int = 128) -> bool:
        words = torch.empty(256, width // 2, dtype=torch.int32, device="meta")
        scales = torch.empty(width // group, 1024, dtype=torch.int32, device="meta")
        return fits(rows, PackedCodes(words, scales, 1024, width, group, torch.bfloat16), sizes, scratch)

    assert fitting(CodesTilesShape(2, 64, 32, 4, 1))
    assert not fitting(CodesTilesShape(2, 64, 32, 4, 1), rows=513)
    assert not fitting(CodesTilesShape(2, 64, 32, 4, 1), group=32)
    assert not fitting(CodesTilesShape(2, 64, 32, 4, 1), width=576, group=64)  # no whole turns
    assert not fitting(CodesTilesShape(2, 64, 32, 40, 1))  # shared memory
    assert not fitting(CodesTilesShape(3, 128, 128, 2, 1))  # registers
    assert not fitting(CodesTilesShape(3, 64, 64, 2, 0))  # scratch for parts


@pytest.mark.parametrize("rows", [32, 64, 128, 256, 512])
def test_the_tuner_tries_few_tiles_that_keep_most_multiprocessors_busy(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "multiprocessors", lambda device: 132)
    scratch, words = PrefetchScratch.allocate("meta"), torch.empty(0, dtype=torch.int32)
    for _, features, width in weights_of("8b")[:4]:
        weight = PackedCodes(words, words, features, width, 128, torch.bfloat16)
        shapes = tile_shapes(rows, weight, scratch)
        assert len(set(shapes)) == len(shapes) and 4 <= len(shapes) <= 7
        assert all(fits(rows, weight, shape, scratch) for shape in shapes)
        assert len({shape.rows for shape in shapes}) > 1 and programs_of(rows, weight, shapes[0]) >= 128


def test_operations_run_tiles_where_the_table_names_them_and_the_ring_where_those_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    launched = []

    def ring(x: Tensor, packed: PackedCodes, bias: Tensor | None, residual: Tensor | None, **_: object) -> Tensor:
        launched.append("ring")
        return (x.float() @ unpacked(packed).float().t()).to(x.dtype)

    monkeypatch.setattr(linear_prefetch, "available", lambda _: True)
    monkeypatch.setattr(linear_codes, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(gemm_table, "lookup", lambda *_: GemmChoice("codes_tiles", (2, 64, 32, 2, 1)))
    monkeypatch.setattr(linear_codes, "linear_codes", ring)
    ops, x = TritonOps("cpu", torch.bfloat16), torch.randint(-2, 3, (19, 256)).bfloat16()
    weight = weight_of(96, 256, 128, True)
    with interpreting(reversed_range, None, ("weight", "scales"), ASSEMBLY):
        found = ops.linear(x, ops.pack_quantized([weight]))  # 19 rows: no kernel is compiled for such a number alone
    assert torch.equal(found, (x.double() @ weight.dequantized().double().t()).bfloat16()) and launched == []
    ops.linear(x[:16], ops.pack_quantized([weight_of(96, 256, 32, True)]))
    assert launched == ["ring"]


def test_tiles_of_the_tuner_are_known_to_the_kernel() -> None:
    assert all(CodesTilesShape(*tile).known for tile in TILES)
