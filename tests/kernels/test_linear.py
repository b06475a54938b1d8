"""The packed product: right, and the same bits for every row count, thread count and machine with an FMA."""

from __future__ import annotations

import pytest
import torch

from quire.errors import EngineError
from quire.kernels.cpu.library import supported_variants
from quire.kernels.quantized import Fp8Weight, QuantizedWeight
from quire.kernels.slices import Slices, add_in_tree, finish_tree, rank_run
from quire.ops.cpu import CpuOps

SHAPES = [(1, 1), (7, 5), (31, 17), (33, 64), (100, 1000), (960, 576), (576, 1536), (130, 2500)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 25, 32, 97, 200]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_agrees_with_float64(variant_ops, randn, n, k):
    weight, bias = randn(n, k), randn(n, seed=1)
    packed = variant_ops.pack_linear(weight, bias)
    for rows in (1, 3, 13, 100):
        x, residual = randn(rows, k, seed=2), randn(rows, n, seed=3)
        exact = x.double() @ weight.double().T + bias + residual
        bound = 1e-6 * (1 + x.abs().double() @ weight.abs().double().T + bias.abs() + residual.abs())
        assert ((variant_ops.linear(x, packed, residual) - exact).abs() <= bound).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_other_rows(variant_ops, randn, n, k):
    packed = variant_ops.pack_linear(randn(n, k), randn(n, seed=1))
    x, residual = randn(200, k, seed=2), randn(200, n, seed=3)
    full = variant_ops.linear(x, packed, residual)
    for rows in ROWS:
        for start in {0, 200 - rows}:
            part = slice(start, start + rows)
            assert torch.equal(variant_ops.linear(x[part], packed, residual[part]), full[part])


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bits_do_not_depend_on_the_number_of_threads(randn, n, k):
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(randn(n, k))
    inputs = [randn(rows, k, seed=rows) for rows in (1, 8, 33, 200)]
    alone = [ops.linear(x, packed) for x in inputs]
    for threads in (2, 3):
        ops.set_num_threads(threads)
        assert all(torch.equal(ops.linear(x, packed), one) for x, one in zip(inputs, alone, strict=True))


@pytest.mark.parametrize("kinds", ["floats", "codes", "codes and floats"])
def test_parts_are_packed_as_the_weight_that_they_make(variant_ops, randn, monkeypatch, kinds):
    """Of any type, with borders inside panels, in more pieces than parts."""
    monkeypatch.setattr("quire.ops.cpu_panels._NUMBERS_AT_ONCE", 64 * 96)
    codes = torch.randint(0, 256, (77, 96)).to(torch.uint8)
    order = torch.randperm(96)
    coded = [QuantizedWeight(codes, randn(77, 3), randn(77, 3, seed=1), 0, 8, 32, order),
             Fp8Weight(randn(130, 96).to(torch.float8_e4m3fn), randn(130, 2, seed=3), 64)]
    floats = [randn(33, 96), randn(150, 96, seed=2).bfloat16()]
    parts = {"floats": floats, "codes": coded, "codes and floats": [*coded, *floats]}[kinds]
    whole = torch.cat([part if isinstance(part, torch.Tensor) else part.dequantized() for part in parts])
    found, expected = variant_ops.pack_parts(parts), variant_ops.pack_linear(whole.float())
    assert found.format == expected.format and found.out_features == len(whole)
    assert torch.equal(found.panels, expected.panels)
    with pytest.raises(EngineError, match="parts"):
        variant_ops.pack_parts([*parts, randn(3, 95)])


def test_the_chain_is_fused_and_runs_over_k_in_order(ops, randn):
    """Each element is fma(x[k], w[k], sum) for k = 0, 1, ...: each step exact, then rounded once."""
    if supported_variants()[0] == "x86-64-v2":
        pytest.skip("this processor has no fused multiply-add")
    x, weight = randn(1, 40), randn(5, 40, seed=1)
    expected = torch.zeros(5, dtype=torch.float64)
    for k in range(40):
        # A product of two floats is exact in double; adding a float to it rounds twice almost never, and not
        # with this seed.
        expected = (x[0, k].double() * weight[:, k].double() + expected).float().double()
    assert torch.equal(ops.linear(x, ops.pack_linear(weight))[0], expected.float())


def test_variants_with_an_fma_give_the_same_bits(randn):
    names = [name for name in supported_variants() if name != "x86-64-v2"]
    x, weight = randn(30, 333, seed=2), randn(77, 333)
    results = []
    for name in names:
        ops = CpuOps(num_threads=2, variant=name)
        results.append(ops.linear(x, ops.pack_linear(weight)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_packing_keeps_every_row_exactly(variant_ops, randn):
    weight = randn(101, 37)
    packed = variant_ops.pack_linear(weight)
    ids = torch.tensor([0, 100, 5, 5, 31, 32, 33])
    assert torch.equal(variant_ops.embed(ids, packed), weight[ids])
    assert torch.equal(variant_ops.embed(ids.int(), packed), weight[ids])


def test_half_precision_weights_are_widened_exactly(ops, randn):
    weight = randn(40, 24).to(torch.bfloat16)
    assert torch.equal(ops.embed(torch.arange(40), ops.pack_linear(weight)), weight.float())


def test_packing_leaves_the_callers_bias_alone(ops, randn):
    bias = randn(8)
    packed = ops.pack_linear(randn(8, 4), bias)
    bias.zero_()
    assert packed.bias.abs().sum() > 0


def test_no_rows_give_no_rows(ops, randn):
    packed = ops.pack_linear(randn(8, 4))
    assert ops.linear(torch.empty(0, 4), packed).shape == (0, 8)


def test_a_nan_in_one_row_stays_in_that_row(ops, randn):
    packed = ops.pack_linear(randn(50, 64))
    x = randn(20, 64, seed=1)
    clean = ops.linear(x, packed)
    x[7, 3] = float("nan")
    dirty = ops.linear(x, packed)
    assert dirty[7].isnan().all()
    rest = torch.arange(20) != 7
    assert torch.equal(dirty[rest], clean[rest])


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, 5),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(4, 2).T,
        torch.zeros(4),
        torch.zeros(1, 2, 4),
    ],
)
def test_inputs_of_another_kind_are_refused(ops, randn, bad):
    packed = ops.pack_linear(randn(8, 4))
    with pytest.raises(EngineError, match="contiguous float32"):
        ops.linear(bad, packed)


def test_a_residual_of_another_height_is_refused(ops, randn):
    packed = ops.pack_linear(randn(8, 4))
    with pytest.raises(EngineError, match="residual"):
        ops.linear(randn(3, 4), packed, randn(2, 8))


@pytest.mark.parametrize("token", [-1, 10])
def test_ids_outside_the_table_are_refused(ops, randn, token):
    packed = ops.pack_linear(randn(10, 4))
    with pytest.raises(EngineError, match="outside"):
        ops.embed(torch.tensor([0, token]), packed)


def scaled4(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Weights as Q4_1 gives them: per 32, a half-precision scale and offset, quanta 0 to 15."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k // 32, 32), generator=generator).float()
    q[..., 3], q[..., 30] = 0, 15
    d = (torch.rand(n, k // 32, 1, generator=generator) * 0.01 + 1e-3).half().float()
    m = -(torch.rand(n, k // 32, 1, generator=generator) * 0.1).half().float()
    return (d * q + m).reshape(n, k)


def scaled8(n: int, k: int, top: int = 127) -> torch.Tensor:
    """Weights as Q8_0 (top 127), Q5_0 (16) or Q4_0 (8) give them: a scale times whole numbers."""
    generator = torch.Generator().manual_seed(top)
    q = torch.randint(1 - top, top, (n, k // 32, 32), generator=generator).float()
    q[..., 7] = -top
    return (q * (torch.rand(n, k // 32, 1, generator=generator) * 0.01 + 1e-3).half().float()).reshape(n, k)


NARROW = {
    "scaled4": [scaled4(70, 160), scaled4(33, 1536), torch.full((8, 64), 0.25)],
    "scaled8": [scaled8(70, 160), scaled8(33, 576, 16), scaled8(33, 96, 8)],
    "bfloat16": [torch.randn(9, 77).bfloat16().float(),
                 torch.full((3, 7), -0.0), torch.full((4, 6), torch.nan)],
    "float32": [torch.randn(40, 64), torch.randn(40, 65)],
}
CASES = [(name, index) for name, weights in NARROW.items() for index in range(len(weights))]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_weight_is_kept_in_the_narrowest_format_that_holds_it(variant_ops, name, index):
    weight = NARROW[name][index]
    packed = variant_ops.pack_linear(weight)
    assert packed.format == name
    back = variant_ops.embed(torch.arange(weight.shape[0]), packed)
    assert torch.equal(back.view(torch.int32), weight.view(torch.int32))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_narrow_format_does_not_change_a_bit_of_a_product(variant_ops, randn, name, index):
    weight = NARROW[name][index]
    packed = variant_ops.pack_linear(weight)
    variant_ops.narrow_weights = False
    plain = variant_ops.pack_linear(weight)
    assert plain.format == "float32"
    assert packed.nbytes <= plain.nbytes
    for rows in (1, 2, 3, 4, 7, 8, 11, 12, 13, 40, 200):
        x = randn(rows, weight.shape[1], seed=rows)
        got, expected = variant_ops.linear(x, packed), variant_ops.linear(x, plain)
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


def test_one_weight_that_does_not_fit_keeps_the_whole_matrix_wide(ops):
    weight = scaled4(70, 160)
    weight[69, 159] += 1e-6
    assert ops.pack_linear(weight).format == "float32"


SLICED = {
    "heads of 64": Slices.each(9, 64),
    "heads of 128": Slices.each(5, 128),
    "one head": Slices.each(1, 32),
    "even ranges": Slices.of_width(1536),
    "rows 4 KiB apart": Slices.of_width(1024),
    "uneven ranges": Slices.of_width(480),
    "few ranges": Slices.of_width(96),
}
MAKE = {
    "float32": torch.randn,
    "bfloat16": lambda n, k: torch.randn(n, k).bfloat16().float(),
    "scaled8": scaled8,
    "scaled4": scaled4,
}


@pytest.mark.parametrize("slices", SLICED.values(), ids=SLICED)
@pytest.mark.parametrize("name", MAKE)
def test_slices_are_summed_from_zero_and_added_in_their_tree(variant_ops, randn, name, slices):
    """In every format, and for every number of rows."""
    weight, bias = MAKE[name](70, slices.width), randn(70, seed=1)
    packed = variant_ops.pack_linear(weight, bias, slices)
    assert packed.format == name
    x, residual = randn(200, slices.width, seed=2), randn(200, 70, seed=3)

    def one_slice(index):
        columns = slices.columns(index, index + 1)
        alone = variant_ops.pack_linear(weight[:, columns].contiguous())
        return variant_ops.linear(x[:, columns].contiguous(), alone)

    expected = add_in_tree([one_slice(index) for index in range(slices.count)]) + bias + residual
    for rows in ROWS:
        assert torch.equal(variant_ops.linear(x[:rows], packed, residual[:rows]), expected[:rows])


@pytest.mark.parametrize("slices", SLICED.values(), ids=SLICED)
@pytest.mark.parametrize("name", MAKE)
def test_ranks_that_own_runs_of_slices_give_the_bits_of_one(variant_ops, randn, name, slices):
    weight, bias = MAKE[name](70, slices.width), randn(70, seed=1)
    x, residual = randn(33, slices.width, seed=2), randn(33, 70, seed=3)
    packed = variant_ops.pack_linear(weight, bias, slices)
    whole = {rows: variant_ops.linear(x[:rows], packed, residual[:rows]) for rows in (1, 3, 5, 33)}
    for size in (1, 2, 3, 4, 5, 8):
        nodes = {rows: {} for rows in whole}
        for first, last in {rank_run(slices.count, rank, size) for rank in range(size)}:
            if first == last:
                continue
            columns = slices.columns(first, last)
            part = variant_ops.pack_linear(weight[:, columns].contiguous(), None, slices.part(first, last))
            assert part.format == name
            for rows, found in nodes.items():
                sums = variant_ops.linear_nodes(x[:rows, columns].contiguous(), part)
                found |= dict(zip(part.slices.nodes(), sums, strict=True))
        for rows, found in nodes.items():
            assert torch.equal(finish_tree(slices.count, found) + bias + residual[:rows], whole[rows])


@pytest.mark.parametrize("name", MAKE)
def test_the_packed_layout_can_be_cut_at_the_borders_of_slices(variant_ops, name):
    """The bytes of a run of slices are a part of the whole panel's."""
    slices = Slices.each(9, 64)
    weight = MAKE[name](8, slices.width)  # one panel in every variant
    whole = variant_ops.pack_linear(weight, None, slices).panels
    part = variant_ops.pack_linear(weight[:, slices.columns(2, 5)].contiguous(), None, slices.part(2, 5)).panels
    of_a_slice = whole.numel() // slices.count
    assert torch.equal(part, whole[2 * of_a_slice : 5 * of_a_slice])


@pytest.mark.parametrize(
    ("heads", "head_dim", "expected"), [(6, 32, "scaled8"), (5, 96, "scaled8"), (6, 16, "float32"), (4, 80, "float32")]
)
def test_a_format_of_groups_is_taken_only_where_slices_do_not_cut_a_group(ops, randn, heads, head_dim, expected):
    """Ranks then pack what they own in the same format, and a group is never on two ranks."""
    slices = Slices.each(heads, head_dim)
    weight = scaled8(40, slices.width)
    packed = ops.pack_linear(weight, None, slices)
    assert packed.format == expected
    ops.narrow_weights = False
    plain = ops.pack_linear(weight, None, slices)
    for rows in (1, 3, 7, 40):
        x = randn(rows, slices.width, seed=rows)
        assert torch.equal(ops.linear(x, packed), ops.linear(x, plain))


def test_slices_give_the_same_bits_with_any_number_of_threads_and_any_fma(randn):
    slices = Slices.of_width(1536)
    weight, x = scaled4(300, 1536), randn(130, 1536)
    results = []
    for name in supported_variants():
        ops = CpuOps(num_threads=1, variant=name)
        packed = ops.pack_linear(weight, None, slices)
        alone = ops.linear(x, packed)
        ops.set_num_threads(3)
        assert torch.equal(ops.linear(x, packed), alone)
        if name != "x86-64-v2":
            results.append(alone)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_run_of_slices_has_no_product_of_its_own(ops, randn):
    slices = Slices.each(4, 32)
    part = ops.pack_linear(randn(8, 64), None, slices.part(2, 4))
    with pytest.raises(EngineError, match="linear_nodes"):
        ops.linear(randn(2, 64), part)
    with pytest.raises(EngineError, match="without slices"):
        ops.linear_nodes(randn(2, 64), ops.pack_linear(randn(8, 64)))


def test_slices_of_another_width_are_refused(ops, randn):
    with pytest.raises(EngineError, match="do not fit a weight of 65"):
        ops.pack_linear(randn(8, 65), None, Slices.each(2, 32))


def test_a_tree_that_needs_too_many_sums_at_once_is_refused(ops, randn):
    """A run of all but the first and last slice is the hardest."""
    held, many = Slices.each(256, 1).part(1, 255), Slices.each(2048, 1).part(1, 2047)
    weight = randn(8, 2046)
    ops.pack_linear(weight[:, :254].contiguous(), None, held)
    with pytest.raises(EngineError, match="needs 20 sums at once"):
        ops.pack_linear(weight, None, many)
