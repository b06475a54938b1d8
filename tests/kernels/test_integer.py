"""Integer products: right, lossless in every format, the same bits for every kernel, batch, thread count and cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from quire.errors import EngineError, ModelLoadError
from quire.kernels.cpu.library import supported_variants
from quire.kernels.quantized import BLOCK, QuantizedWeight, Rounding, WeightUse
from quire.kernels.slices import Slices, finish_tree, rank_run
from quire.kernels.unread import UnreadWeight
from quire.ops.cpu import CpuOps
from quire.ops.cpu_integer import KERNELS

# bits, zero, group, offsets: those of the GGUF formats, of AWQ and GPTQ, of one scale per row
FORMATS = {
    "Q8_0": (8, 128, 32, False),
    "Q4_0": (4, 8, 32, False),
    "Q4_1": (4, 0, 32, True),
    "Q5_0": (5, 16, 32, False),
    "Q5_1": (5, 0, 32, True),
    "Q6_K": (6, 32, 16, False),
    "AWQ": (4, 0, 96, True),
    "W8A8": (8, 128, 192, False),
    "int8 with zero points": (8, 0, 64, True),
}
WIDTH = 192


def random_weight(name: str, n: int = 41, halves: bool = True) -> QuantizedWeight:
    bits, zero, group, offsets = FORMATS[name]
    generator = torch.Generator().manual_seed(len(name))
    codes = torch.randint(0, 1 << bits, (n, WIDTH), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, WIDTH // group, generator=generator) * 0.01
    minima = torch.randn(n, WIDTH // group, generator=generator) if offsets else None
    if halves:
        scales, minima = scales.half().float(), None if minima is None else minima.half().float()
    return QuantizedWeight(codes, scales, minima, zero, bits, group)


@pytest.fixture(autouse=True)
def best_kernel(ops):
    yield
    ops.use_integer_kernel(None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_comes_back_as_its_format_says(ops, name):
    for halves in (True, False):
        weight = random_weight(name, halves=halves)
        assert torch.equal(ops.embed(torch.arange(41), ops.pack_quantized([weight])), weight.dequantized())


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_floats_but_for_rounded_activations(ops, randn, name):
    weight, x = random_weight(name), randn(9, WIDTH, seed=3)
    bias, residual = randn(41, seed=4), randn(9, 41, seed=5)
    exact = x.double() @ weight.dequantized().double().T
    found = ops.linear(x, ops.pack_quantized([weight], bias), residual) - bias - residual
    # Half a step of 127 in each activation, of independent signs.
    bound = 4 * 0.5 / 127 * x.abs().max().item() * weight.dequantized().norm(dim=1).double()
    assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_every_kernel_gives_the_bits_of_the_plain_one(variant_ops, randn, name):
    kernels = [kernel for kernel in KERNELS[1:] if variant_ops.use_integer_kernel(kernel)]
    for halves in (True, False):
        packed = variant_ops.pack_quantized([random_weight(name, halves=halves)])
        for rows in (1, 2, 3, 4, 5, 6, 7, 20):
            x = randn(rows, WIDTH, seed=rows)
            variant_ops.use_integer_kernel("plain")
            plain = variant_ops.linear(x, packed)
            for kernel in kernels:
                variant_ops.use_integer_kernel(kernel)
                assert torch.equal(variant_ops.linear(x, packed), plain), (kernel, rows)


def test_a_rows_bits_depend_on_nothing_else(ops, randn):
    packed = ops.pack_quantized([random_weight("Q4_1"), random_weight("Q6_K")], None, Slices.of_width(WIDTH))
    x = randn(700, WIDTH)
    full = ops.linear(x, packed)
    ops.set_num_threads(1)
    assert torch.equal(ops.linear(x, packed), full)
    ops.set_num_threads(2)
    for start, stop in ((0, 1), (3, 8), (10, 110), (255, 258), (699, 700)):
        assert torch.equal(ops.linear(x[start:stop].contiguous(), packed), full[start:stop])


def test_parts_of_different_formats_stand_side_by_side(ops, randn):
    parts = [random_weight(name, n) for name, n in
             (("Q4_1", 32), ("Q4_1", 5), ("Q4_1", 16), ("Q4_1", 3), ("Q6_K", 7), ("Q8_0", 3))]
    x = randn(8, WIDTH)
    together = ops.linear(x, ops.pack_quantized(parts))
    alone = [ops.linear(x, ops.pack_quantized([part])) for part in parts]
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("halves", [True, False])
def test_a_table_that_is_read_while_it_is_packed_is_the_same_weight(ops, randn, monkeypatch, name, halves):
    monkeypatch.setattr("quire.kernels.unread.NUMBERS_AT_ONCE", 1)
    whole, x, read = random_weight(name, 57, halves), randn(3, WIDTH), []

    def rows(start, stop):
        read.append(stop - start)
        return whole.rows(slice(start, stop))

    bits, zero, group, offsets = FORMATS[name]
    table = UnreadWeight(0, whole.shape, bits, zero, group, offsets, 2 if halves else 4, rows)
    for unread, expected in ((table, whole), (table.rows(slice(5, 40)), whole.rows(slice(5, 40)))):
        read.clear()
        kept = CpuOps(num_threads=2, rounding=Rounding(None)).quantized(unread)
        assert kept is unread
        packed = ops.pack_quantized([kept])
        assert max(read) == 16 and sum(read) == expected.shape[0]
        assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack_quantized([expected])))
        assert torch.equal(unread.dequantized(), expected.dequantized())
        both = ops.linear(x, ops.pack_quantized([kept, whole]))
        assert torch.equal(both, ops.linear(x, ops.pack_quantized([expected, whole])))
    assert torch.equal(table.rows([3, 1]).dequantized(), whole.rows([3, 1]).dequantized())


@pytest.mark.parametrize("rounding", [
    Rounding(8, 32, False), Rounding(8, 64, True), Rounding(4, 32, True), Rounding(4, 32, False), Rounding(8, 0, False),
    Rounding(5, 128, True), Rounding(4, 0, True)])
def test_a_large_weight_is_rounded_while_it_is_packed(randn, monkeypatch, rounding):
    """A few rows at a time, to the same bytes: nobody looks at all scales before, for how few bytes hold them. Some
    rows are of one number, of two, huge, or tiny."""
    ops, weight = CpuOps(num_threads=2, rounding=rounding), randn(57, WIDTH)
    weight[1], weight[2], weight[3] = 0.75, torch.arange(WIDTH) % 2, torch.arange(WIDTH) == 5
    weight[4], weight[5] = 1e3 * weight[4], 1e-30 * weight[5]
    weight = weight.to(torch.bfloat16)
    whole = ops.quantized(weight, use=WeightUse.EXPERT)
    monkeypatch.setattr("quire.kernels.unread.NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr("quire.ops.cpu_integer._LARGE", 1)
    kept = ops.quantized(weight, use=WeightUse.EXPERT)
    looked_at = rounding.bits < 8 and rounding.zero_points and rounding.group == 0
    assert isinstance(kept, UnreadWeight) != looked_at
    assert torch.equal(kept.dequantized(), whole.dequantized())
    assert torch.equal(ops.pack_quantized([kept]).panels, ops.pack_quantized([whole]).panels)


BLOCKS = {"Q4_K": (4, 0, 32, True), "Q5_K": (5, 0, 32, True), "Q6_K": (6, 32, 16, False)}


def k_quants(name: str, n: int = 41) -> QuantizedWeight:
    """Two blocks a row; some numbers of blocks are zero, some of the smallest."""
    bits, zero, group, offsets = BLOCKS[name]
    generator = torch.Generator().manual_seed(len(name) + bits)
    codes = torch.randint(0, 1 << bits, (n, 2 * BLOCK), generator=generator, dtype=torch.uint8)
    steps = (torch.randn(n, 2, 1 + offsets, generator=generator) * 0.001).half()
    steps[3], steps[5] = 0.0, 2.0**-24
    steps = steps.float()
    times = torch.randint(-128, 128, (n, 2, BLOCK // group, 2), generator=generator).float()
    scales = (times[..., 0] * steps[:, :, :1]).flatten(1)
    minima = (times[..., 1] * steps[:, :, 1:]).flatten(1) if offsets else None
    return QuantizedWeight(codes, scales, minima, zero, bits, group, steps=steps)


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_of_blocks_are_bytes_and_every_kernel_reads_them_as_they_are(variant_ops, randn, name):
    """The same bits as with scales of four bytes, in as many bytes as the file has, or hardly more."""
    weight, x = k_quants(name), randn(23, 2 * BLOCK)
    wide = replace(weight, steps=None)
    packed, other = variant_ops.pack_quantized([weight]), variant_ops.pack_quantized([wide])
    scales = 2 * 2 + 2 * BLOCK // weight.group  # two bytes for a block, one for a group
    rows = -(-weight.shape[0] // 16) * 16
    held = rows * (2 * BLOCK * weight.bits // 8 + scales * (1 + (weight.offsets is not None)))
    assert held <= packed.nbytes <= held + 64 * rows // 16 + 128 and packed.nbytes < other.nbytes
    assert torch.equal(variant_ops.embed(torch.arange(41), packed), weight.dequantized())
    for kernel in KERNELS:
        if not variant_ops.use_integer_kernel(kernel):
            continue
        for rows in (1, 2, 7, 23):
            mine = variant_ops.linear(x[:rows], packed)
            assert torch.equal(mine, variant_ops.linear(x[:rows], other)), (kernel, rows)


def test_scales_that_are_no_multiples_of_their_blocks_keep_their_bits(ops, randn):
    weight, x = k_quants("Q4_K"), randn(3, 2 * BLOCK)
    for changed in (replace(weight, scales=weight.scales * 1.5), replace(weight, steps=weight.steps * 3),
                    replace(weight, steps=weight.steps / 3)):
        wide = replace(changed, steps=None)
        assert torch.equal(ops.linear(x, ops.pack_quantized([changed])), ops.linear(x, ops.pack_quantized([wide])))
        assert torch.equal(ops.embed(torch.arange(41), ops.pack_quantized([changed])), wide.dequantized())


@pytest.mark.parametrize("name", BLOCKS)
def test_parts_and_rows_of_blocks_are_those_of_the_weight(ops, randn, name):
    """Cuts at the border of a block keep bytes, others need four; a table is packed while it is read."""
    weight, x = k_quants(name, 48), randn(3, 2 * BLOCK)
    assert weight.columns(0, BLOCK).steps is not None and weight.columns(0, 96).steps is None
    bits, zero, group, offsets = BLOCKS[name]
    table = UnreadWeight(0, weight.shape, bits, zero, group, offsets, 1,
                         lambda start, stop: weight.rows(slice(start, stop)))
    pieces = [weight.rows(slice(0, 7)), weight.rows(slice(7, 16)), table.rows(slice(16, 32)),
              replace(weight.rows(slice(32, 48)), steps=None)]
    whole = ops.linear(x, ops.pack_quantized([weight]))
    for parts in (pieces, pieces[:3]):
        columns = sum(part.shape[0] for part in parts)
        assert torch.equal(ops.linear(x, ops.pack_quantized(parts)), whole[:, :columns])
    for start, stop in ((0, BLOCK), (BLOCK, 2 * BLOCK), (96, 352)):
        cut = weight.columns(start, stop)
        assert torch.equal(ops.embed(torch.arange(48), ops.pack_quantized([cut])), weight.dequantized()[:, start:stop])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_share_a_sum_get_the_bits_of_one(ops, randn, size):
    weight, x, whole = random_weight("Q4_1"), randn(5, WIDTH), Slices.of_width(WIDTH)
    nodes: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(size):
        run = whole.part(*rank_run(whole.total, rank, size))
        columns = slice(run.border(run.first), run.border(run.last))
        packed = ops.pack_quantized([weight.columns(columns.start, columns.stop)], None, run)
        found = ops.linear_nodes(x[:, columns].contiguous(), packed)
        nodes.update(zip(run.nodes(), found, strict=True))
    expected = ops.linear(x, ops.pack_quantized([weight], None, whole))
    assert torch.equal(finish_tree(whole.total, nodes), expected)


ROUNDINGS = [Rounding(8), Rounding(4), Rounding(4, 64, True), Rounding(8, 0), Rounding(4, 128)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_floats_are_rounded_to_the_nearest_codes(randn, rounding):
    ops = CpuOps(num_threads=2, rounding=rounding)
    for width, four in ((256, 5), (1024, 4)):  # narrow models get five bits where four were asked for
        weight = randn(33, width)
        found = ops.quantized(weight)
        assert found is not None and found.bits == (four if rounding.bits == 4 else rounding.bits)
        assert found.group == (rounding.group or width)
        levels = (1 << found.bits) - 1
        spread = weight.view(33, -1, found.group)
        step = spread.amax(-1) - spread.amin(-1) if rounding.zero_points else 2 * spread.abs().amax(-1)
        error = (found.dequantized() - weight).view(33, -1, found.group).pow(2).mean(-1).sqrt()
        assert (error <= 0.6 / levels * step).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("variant", supported_variants())
def test_a_weight_that_is_not_finite_is_not_hidden(randn, variant, rounding, bad):
    """Its row says so, as that of floats does; rounding would pass over what is no number."""
    weight = randn(33, 256)
    weight[2, 37] = bad
    ops = CpuOps(num_threads=1, variant=variant, rounding=rounding)
    others = [row for row in range(33) if row != 2]
    found, without = ops.quantized(weight), ops.quantized(weight[others])
    assert found is not None and without is not None
    result = ops.linear(randn(3, 256), ops.pack_quantized([found]))
    assert not result[:, 2].isfinite().any()
    assert result[:, others].isfinite().all()
    assert torch.equal(without.dequantized(), found.rows(others).dequantized())


@pytest.mark.parametrize("bits", [4, 5])
def test_a_grid_with_minima_is_found_again(randn, bits):
    """Weights that a file stored in as many bits lose nothing when they are rounded at load."""
    ops = CpuOps(num_threads=2, rounding=Rounding(4, 32, True))
    width = 1024 if bits == 4 else 256
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (24, width), generator=generator, dtype=torch.uint8)
    scales, minima = (randn(24, width // 32, seed=seed).half().float() for seed in (1, 2))
    weight = QuantizedWeight(codes, scales.abs() + 0.125, minima, 0, bits, 32).dequantized()
    found = ops.quantized(weight)
    assert found is not None and found.bits == bits
    assert (found.dequantized() - weight).norm() <= 1e-3 * weight.norm()


def test_the_use_of_a_layer_decides_what_is_rounded(randn):
    ops = CpuOps(num_threads=2, rounding=Rounding(4))
    weight = randn(8, 64)
    table = ops.quantized(weight, None, WeightUse.VOCABULARY)
    assert table is not None and table.bits == 8
    assert ops.quantized(weight, None, WeightUse.EXACT) is None
    assert ops.quantized(randn(8, 50)) is None, "columns that are no multiple of 32 stay floats"
    assert ops.quantized(weight, Slices.each(4, 16)) is None, "so does a sum whose slices cut a unit"
    kept = random_weight("Q5_1")
    assert ops.quantized(kept) is kept
    # Hidden states are what a projection reads, or (with slices) adds to; experts take most of the memory.
    wide, back = ops.quantized(randn(64, 1024)), ops.quantized(randn(1024, 64), Slices.of_width(64))
    narrow, expert = ops.quantized(randn(1024, 64)), ops.quantized(weight, None, WeightUse.EXPERT)
    assert wide is not None and back is not None and narrow is not None and expert is not None
    assert (wide.bits, back.bits, narrow.bits, expert.bits) == (4, 4, 5, 4)
    added = ops.quantized(randn(64, 64), Slices.of_width(64))
    assert added is not None and added.bits == 8
    assert CpuOps(num_threads=2).quantized(kept) is None, "without quantization floats are multiplied"


def test_every_number_of_ranks_rounds_the_same_groups(randn):
    ops = CpuOps(num_threads=2, rounding=Rounding(4, 128))
    weight, whole = randn(8, 768), Slices.of_width(768)
    found = ops.quantized(weight, whole)
    half = whole.part(0, 4)
    mine = ops.quantized(weight[:, : half.width].contiguous(), half)
    assert found is not None and mine is not None
    assert torch.equal(found.columns(0, half.width).dequantized(), mine.dequantized())


def test_an_activation_that_is_not_finite_is_not_hidden(variant_ops, randn):
    packed = variant_ops.pack_quantized([random_weight("Q4_0")])
    nan = torch.tensor(float("nan"))
    for bad, place in itertools.product((nan, -nan, torch.tensor(float("inf")), torch.tensor(float("-inf"))), (33, 63)):
        x = randn(2, WIDTH)
        x[1, place] = bad
        found = variant_ops.linear(x, packed)
        assert found[0].isfinite().all() and not found[1].isfinite().any()
    assert torch.equal(variant_ops.linear(torch.full((1, WIDTH), 1e-38), packed), torch.zeros(1, 41))


def test_what_does_not_fit_is_refused(ops):
    weight = random_weight("Q4_0")
    with pytest.raises(EngineError, match="bias or slices"):
        ops.pack_quantized([weight], torch.zeros(3))
    with pytest.raises(ModelLoadError, match="groups of 48"):
        QuantizedWeight(weight.codes, weight.scales, None, 8, 4, 48)
