"""The GEMM table: the nearest measured weight decides, and every entry names a kernel that exists."""

from __future__ import annotations

import pytest
import torch

from quire.bench.gpu.cases import MODELS
from quire.bench.gpu.tune import weights_of
from quire.kernels.cuda.few_gemm import MOST_ROWS, FewShape, can_compute
from quire.kernels.cuda.wide_gemm import WideShape
from quire.kernels.triton import gemm_table
from quire.kernels.triton.codes_row import CodesRowShape
from quire.kernels.triton.codes_tiles import CodesTilesShape
from quire.kernels.triton.gemm_table import (
    FEW,
    FP8,
    GATED,
    INT4,
    NORM,
    PLAIN,
    WIDE,
    GemmChoice,
    TimedGemm,
    choose,
    library_version,
    lookup,
    table,
)
from quire.kernels.triton.linear_codes import CodesShape, PackedCodes
from quire.kernels.triton.linear_prefetch import PrefetchShape
from quire.kernels.triton.linear_row import RowShape
from quire.kernels.triton.linear_stream import StreamShape
from quire.ops.triton import TritonOps

KERNELS = {"row": RowShape, "norm_then_row": RowShape, "prefetch": PrefetchShape, "codes": CodesShape, "vector": tuple,
           "library": tuple, "codes_row": CodesRowShape, "norm_then_codes_row": CodesRowShape,
           "bytes_row": CodesRowShape, "stream": StreamShape, "wide": WideShape, "codes_tiles": CodesTilesShape,
           "few": FewShape}


def test_every_entry_names_a_kernel_with_sizes_it_takes() -> None:
    for entry in table():
        sizes = entry.choice.sizes
        assert sizes == () if KERNELS[entry.choice.kernel] is tuple else KERNELS[entry.choice.kernel](*sizes)
        assert not entry.choice.kernel.endswith("row") or entry.rows == 1
        assert not entry.choice.kernel.startswith("norm_then") or not entry.form.endswith(PLAIN)
        assert ("codes" not in entry.choice.kernel) or entry.form.startswith(INT4)
        assert ("bytes" not in entry.choice.kernel) or entry.form.startswith(FP8)
        assert entry.choice.kernel != "vector" or entry.rows in (2, 4)
        assert (entry.choice.kernel == "few") == entry.form.startswith(FEW)


def test_gemms_of_few_rows_are_for_one_weight_each_and_for_no_other_number_of_rows() -> None:
    few = [entry for entry in table() if entry.form.startswith(FEW)]
    for entry in few:
        form, size = entry.form.removeprefix(FEW), (entry.features, entry.width)
        shape = FewShape.of(entry.choice.sizes)
        assert entry.rows == MOST_ROWS and can_compute(entry.rows, *size, shape)
        assert gemm_table.lookup_few(2, *size, form) == gemm_table.lookup_few(8, *size, form) == entry.choice
        assert gemm_table.lookup_few(1, *size, form) is None and gemm_table.lookup_few(9, *size, form) is None
        assert gemm_table.lookup_few(5, entry.features + 16, entry.width, form) is None
        assert gemm_table.few_knows_gate(*size) == (form == gemm_table.GATED)
    assert few and not gemm_table.few_knows_gate(28_672, 4096)


TUNED = {"0.6b", "8b", "14b"}
"""Models of the bench whose GEMMs were timed: the weights of the others take the choices of the nearest ones."""


def test_every_gemm_of_the_benchmarked_models_was_measured_at_one_row() -> None:
    known = {(entry.form, entry.features, entry.width) for entry in table() if entry.rows == 1}
    assert {weight for model in TUNED for weight in weights_of(model)} <= known


def test_an_unknown_weight_takes_the_choice_of_the_nearest_and_of_enough_rows() -> None:
    small, large = GemmChoice("prefetch", (1, 5, 4, 0)), GemmChoice("prefetch", (3, 4, 2, 0))
    known = [TimedGemm(2, 1000, 1000, PLAIN, small), TimedGemm(2, 8000, 8000, PLAIN, large),
             TimedGemm(4, 1000, 1000, PLAIN, large)]
    assert choose(known, 2, 1200, 900, PLAIN) == small
    assert choose(known, 2, 6000, 9000, PLAIN) == large
    assert choose(known, 3, 1000, 1000, PLAIN) == large


def test_tiles_that_fill_the_chip_are_for_the_weight_that_they_were_timed_on() -> None:
    wide = GemmChoice(WIDE, (2, 192, 4, 1, 2, 1))
    known = [TimedGemm(256, 24576, 4096, PLAIN, wide)]
    assert choose(known, 200, 24576, 4096, PLAIN) == wide
    assert choose(known, 200, 24576, 4104, PLAIN) == GemmChoice()
    assert choose(known, 5, 1000, 1000, PLAIN) == GemmChoice()
    assert choose(known, 1, 1000, 1000, GATED) == GemmChoice()


def test_an_algorithm_of_the_library_is_for_the_weight_it_was_timed_on() -> None:
    known = [TimedGemm(64, 1000, 1000, PLAIN, GemmChoice(algorithm="aa")),
             TimedGemm(8192, 1000, 1000, PLAIN, GemmChoice())]
    assert choose(known, 33, 1000, 1000, PLAIN).algorithm == "aa"
    assert choose(known, 33, 1000, 1008, PLAIN) == GemmChoice()
    assert choose(known, 65, 1000, 1000, PLAIN) == GemmChoice()


def test_algorithms_are_named_only_beside_the_version_they_belong_to() -> None:
    assert library_version() > 0 or not any(entry.choice.algorithm for entry in table())


def test_without_a_gpu_no_library_is_loaded() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    from quire.kernels import cublas
    from quire.ops.triton import TritonOps

    assert cublas.version() == 0
    assert TritonOps("cpu", torch.bfloat16)._library is None
    with pytest.raises(RuntimeError, match="not loaded"):
        cublas.CublasLt(torch.device("cpu"), torch.bfloat16)


def test_many_rows_are_the_librarys_and_float32_never_meets_a_tensor_core() -> None:
    assert lookup(100_000, 4096, 4096, torch.bfloat16) == GemmChoice()
    assert {lookup(rows, 4096, 4096, torch.float32, NORM).kernel for rows in (1, 2, 9)} == {"row", "vector", "library"}


def test_every_kind_of_choice_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.kernels.triton import gemm_table, linear_few
    from quire.ops.triton import TritonOps

    ops = TritonOps("cpu", torch.float32)
    x, weight, gain = torch.randn(1, 48), torch.randn(20, 48), torch.rand(48) + 0.5
    packed = ops.pack_linear(weight)
    for choice in (GemmChoice("row", (2, 32, 1)), GemmChoice("norm_then_row", (2, 32, 1)), GemmChoice()):
        monkeypatch.setattr(gemm_table, "lookup", lambda *_, chosen=choice: chosen)
        for gated in (None, "silu"):
            want = linear_few.linear_reference(x, weight, norm=gain, eps=1e-6, gated=gated)
            got = ops.norm_linear(x, gain, 1e-6, packed, gated)
            assert torch.allclose(got, want, atol=1e-4), (choice, gated)


@pytest.mark.parametrize(("rows", "prefetch"), [(1, True), (7, True), (8, True), (9, False), (37, False), (48, True)])
def test_no_kernel_is_compiled_for_a_number_of_rows_that_no_graph_has(
    monkeypatch: pytest.MonkeyPatch, rows: int, prefetch: bool
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.kernels.triton import gemm_table, linear_prefetch
    from quire.ops.triton import TritonOps

    monkeypatch.setattr(linear_prefetch, "available", lambda _: True)
    ops, asked = TritonOps("cpu", torch.bfloat16), []
    x, weight = torch.randn(rows, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    monkeypatch.setattr(gemm_table, "lookup", lambda *_: GemmChoice("prefetch", (1, 3, 2, 0)))
    monkeypatch.setattr(
        linear_prefetch, "linear_prefetch", lambda x, w, *_, **__: asked.append(x.shape[0]) or x @ w.t()
    )
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), x @ weight.t())
    assert asked == [rows] * prefetch


def test_every_prefetching_gemm_fits_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the table, and those that the tuner would try."""
    from quire.bench.gpu import tune_prefetch as gpu_tune_prefetch
    from quire.kernels.triton import linear_prefetch

    monkeypatch.setattr(linear_prefetch, "multiprocessors", lambda _: 132)
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu")
    named = [entry for entry in table() if entry.choice.kernel == "prefetch"]
    assert len(named) > 50
    tried = [(rows, features, width, shape) for model in MODELS for _, features, width in weights_of(model)
             for rows in gpu_tune_prefetch.ROWS for shape in gpu_tune_prefetch.rings_of(features, width, rows)]
    tried += [(entry.rows, entry.features, entry.width, entry.choice.sizes) for entry in named]
    for rows, features, width, shape in tried:
        x = torch.empty(rows, width, dtype=torch.bfloat16)
        weight = torch.empty(1, dtype=torch.bfloat16).expand(features, width)
        monkeypatch.setattr(torch.Tensor, "is_contiguous", lambda _: True)
        assert linear_prefetch.fits(x, weight, PrefetchShape(*shape), scratch), (rows, features, width, shape)


@pytest.mark.parametrize("coded", [True, False])
def test_the_tuner_tries_several_kernels_of_one_row_on_every_weight_of_4_bits_and_of_fp8(coded: bool) -> None:
    """Not many, since each is compiled; all programs of most run at once; and none has too few registers."""
    from quire.bench.gpu.row_shapes import LEAST_PROGRAMS, row_shapes

    for model in TUNED:
        for form, features, width in weights_of(model)[:4]:
            words = torch.empty(0, dtype=torch.int32)
            weight = PackedCodes(words, words, features, width, 128, torch.bfloat16) if coded else torch.empty(
                1, dtype=torch.float8_e4m3fn).expand(features, width)
            shapes, outputs = row_shapes(weight, form == "gated"), features // (2 if form == "gated" else 1)
            least = 0 if outputs < 16 * LEAST_PROGRAMS else 1 if width < 4096 else 3
            assert len(shapes) == len(set(shapes)) and least <= len(shapes) <= 12 * min(least, 1)
            assert all(shape.registers is None or 32 <= shape.registers <= 255 for shape in shapes)
            at_once = [shape for shape in shapes if shape.programs * 132 * shape.features * shape.steps >= outputs]
            assert len(at_once) >= least - 1
            # A narrow weight's turns are all in registers: nothing is left to fetch.
            assert any(shape.fetched for shape in shapes) or width < 4096


def test_the_tuner_lets_programs_share_the_tiles_of_wide_weights_of_4_bits() -> None:
    """Where neither a norm nor a gate is fused: a handful, whose programs all run at once."""
    from quire.bench.gpu.row_shapes import row_shapes
    from quire.kernels.triton.codes_row import fits
    from quire.kernels.triton.linear_prefetch import PrefetchScratch

    words, scratch = torch.empty(0, dtype=torch.int32), PrefetchScratch.allocate("meta")
    for features, width in ((4096, 12288), (5120, 17408)):
        weight = PackedCodes(words, words, features, width, 128, torch.bfloat16)
        shared = [shape for shape in row_shapes(weight, False, plain=True) if shape.parts > 1]
        assert 3 <= len(shared) <= 5 and all(fits(weight, shape, scratch=scratch) for shape in shared)
        assert all(0.9 < features * shape.parts / (132 * shape.programs * shape.features) <= 1 for shape in shared)
        assert all(shape.parts == 1 for shape in row_shapes(weight, False))
    narrow = PackedCodes(words, words, 4096, 4096, 128, torch.bfloat16)
    assert all(shape.parts == 1 for shape in row_shapes(narrow, False, plain=True))


def test_a_wide_gemm_runs_in_the_library_where_its_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without its gate: here there is no Hopper."""
    ops = TritonOps("cpu", torch.bfloat16)
    monkeypatch.setattr(gemm_table, "lookup", lambda *_: GemmChoice(WIDE, (2, 192, 4, 1, 2, 1)))
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    packed = ops.pack_linear(weight)
    found = ops.linear(x, packed)
    assert torch.equal(found, torch.nn.functional.linear(x, weight))
    assert torch.equal(ops.gated_linear(x, packed, "silu"), ops.act_mul(found, "silu"))
