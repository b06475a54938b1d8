"""GEMMs of many rows in deterministic mode by tiles that the copy engine loads, run by our interpreter, which also
checks how they wait and refill. The sums are exact but for the additions of slices, so bits show the tree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.slices import Slices, add_in_tree
from quire.kernels.triton import fixed_prefetch, fixed_tiles, linear_fixed, linear_prefetch
from quire.kernels.triton.fixed_tiles import FixedTiles, TileScratch, fits, linear_fixed_tiles
from quire.kernels.triton.linear_prefetch import PrefetchScratch
from tests.kernels.triton.gluon_interpreter import interpreting

PROGRAMS = 4
ORDERS = (range, lambda n: reversed(range(n)), lambda n: random.Random(n).sample(range(n), n))
SEEDS = (None, 1, 2)


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fixed_tiles, fixed_prefetch, linear_prefetch):
        monkeypatch.setattr(module, "multiprocessors", lambda device: PROGRAMS)


def numbers(rows: int, features: int, width: int, slices: Slices | None, seed: int) -> tuple[Tensor, Tensor]:
    """Small whole numbers, a slice's times a power of two of its own: additions of slices lose bits, others none. The
    second half of the slices takes away what the first adds, in another order: what is left is what was lost."""
    chance = torch.Generator().manual_seed(seed)
    x, weight = (torch.randint(-3, 4, (n, width), generator=chance).bfloat16() for n in (rows, features))
    if slices is not None:
        half, length = slices.total // 2, width // slices.total
        power = torch.randint(0, 28, (half,), generator=chance).repeat_interleave(length)
        weight[:, : half * length] *= (2.0**power).bfloat16()
        for each, sign in ((x, 1), (weight, -1)):
            each[:, half * length :] = sign * each[:, : half * length].roll(length, 1)
    return x, weight


def slice_sums(x: Tensor, weight: Tensor, slices: Slices | None) -> list[Tensor]:
    borders = (0, x.shape[1]) if slices is None else slices.borders
    return [(x[:, a:b].double() @ weight[:, a:b].double().t()).float() for a, b in pairwise(borders)]


def places(parts: int = 1 << 19) -> tuple[PrefetchScratch, TileScratch]:
    """Poisoned, so that a sum which nobody has left shows."""
    scratch, deep = PrefetchScratch.allocate("cpu", parts), TileScratch.allocate("cpu", PROGRAMS)
    scratch.partial.fill_(float("nan"))
    deep.deep.fill_(float("nan"))
    return scratch, deep


def check(rows: int, features: int, width: int, slices: Slices | None, tiles: FixedTiles) -> None:
    """Every order of programs and an interleaving each, over and over in one scratch."""
    scratch, deep = places()
    for salt, (seed, order) in enumerate(zip(SEEDS, ORDERS)):
        x, weight = numbers(rows, features, width, slices, salt)
        bias = torch.randint(-2, 3, (features,)).bfloat16() if salt & 1 else None
        residual = torch.randint(-2, 3, (rows, features)).bfloat16() if salt & 2 else None
        assert fits(x, weight, slices, tiles, scratch, deep)
        with interpreting(order, seed) as runs:
            got = linear_fixed_tiles(
                x, weight, bias, residual, slices, tiles=tiles, scratch=scratch, deep=deep, pdl=seed is not None)
        want = add_in_tree(slice_sums(x, weight, slices))
        for each in (bias, residual):
            want = want if each is None else want + each.float()
        assert torch.equal(got, want.to(x.dtype))
        assert len(runs) == 1 and not scratch.arrived.any()


HEADS, RANGES = partial(Slices.each, width=128), Slices.of_width


@pytest.mark.parametrize(
    ("rows", "features", "width", "slices", "tiles"),
    [
        (1, 128, 64, None, FixedTiles(128, 2)),
        (130, 300, 256, None, FixedTiles(128, 3, band=1)),
        (300, 520, 200, None, FixedTiles(256, 4)),
        (128, 128, 256, HEADS(2), FixedTiles(128, 4, ordered=True)),
        (129, 130, 512, HEADS(4), FixedTiles(128, 4, ordered=True)),
        (65, 128, 1024, HEADS(8), FixedTiles(128, 4)),
        (200, 136, 1536, HEADS(12), FixedTiles(128, 3, ordered=True)),
        (130, 128, 2048, HEADS(16), FixedTiles(128, 5, ordered=True)),
        (70, 128, 5120, HEADS(40), FixedTiles(128, 4, ordered=True)),
        (70, 128, 1024, Slices.each(16, 64), FixedTiles(128, 4, ordered=True)),
        (128, 256, 1024, HEADS(8), FixedTiles(128, 4, 2)),
        (128, 256, 1024, HEADS(8), FixedTiles(128, 4, 4)),
        (260, 200, 1536, HEADS(12), FixedTiles(128, 4, 3)),
        (140, 264, 1536, RANGES(1536), FixedTiles(128, 4)),
        (140, 264, 3072, RANGES(3072), FixedTiles(128, 4, 2)),
        (100, 128, 1536, RANGES(1536), FixedTiles(128, 5, 4)),
    ],
)
def test_tiles_add_up_to_the_tree_of_their_slices(
    rows: int, features: int, width: int, slices: Slices | None, tiles: FixedTiles
) -> None:
    check(rows, features, width, slices, tiles)


@pytest.mark.parametrize("slices", [None, HEADS(16), RANGES(2048)], ids=["whole", "heads", "ranges"])
def test_one_row_and_many_have_the_same_bits_by_all_three_kernels(slices: Slices | None) -> None:
    """The kernel that prefetches, for few rows; Triton's tiles, for any number; these tiles."""
    x, weight = numbers(200, 136, 2048, slices, 5)
    scratch, deep = places()

    def tiled(rows: Tensor) -> Tensor:
        shapes: Sequence[FixedTiles] = [FixedTiles(128, 4)]
        if slices is not None:
            shapes = [*shapes, FixedTiles(128, 4, 2), *([FixedTiles(128, 4, 1, True)] if slices.total == 16 else [])]
        found = [linear_fixed_tiles(rows, weight, None, None, slices, tiles=each, scratch=scratch, deep=deep)
                 for each in shapes]  # fmt: skip
        assert all(torch.equal(each, found[0]) for each in found)
        return found[0]

    with interpreting():
        many, one = tiled(x), tiled(x[77:78].contiguous())
        units = fixed_prefetch.units_for(3, weight, slices)
        assert units is not None
        few = fixed_prefetch.linear_fixed_prefetch(
            x[76:79].contiguous(), weight, None, None, units=units, scratch=scratch)
    assert torch.equal(one, many[77:78]) and torch.equal(few, many[76:79])
    # The interpreter of Triton rounds to bfloat16 in another way: sums are compared before that.
    sums = linear_fixed.linear_fixed_nodes(x, weight, Slices.single(2048) if slices is None else slices)
    assert torch.equal(sums[0].bfloat16(), many)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("slices", [HEADS(16), RANGES(2048)], ids=["heads", "ranges"])
def test_any_number_of_ranks_has_the_bits_of_one_by_tiles(slices: Slices, ranks: int) -> None:
    """Nodes that ranks compute by `linear_fixed_nodes`, finished in the tree."""
    from quire.kernels.slices import RankTree, finish_tree

    x, weight = numbers(130, 40, 2048, slices, 6)
    scratch, deep = places()
    with interpreting():
        one = linear_fixed_tiles(x, weight, None, None, slices, tiles=FixedTiles(), scratch=scratch, deep=deep)
    tree, values = RankTree.even(slices.total, ranks), {}
    for first, last in tree.runs:
        part, columns = slices.part(first, last), slices.columns(first, last)
        own = linear_fixed.linear_fixed_nodes(x[:, columns].contiguous(), weight[:, columns].contiguous(), part)
        values |= dict(zip(part.nodes(), own))
    assert torch.equal(finish_tree(slices.total, values).to(x.dtype), one)


def test_another_order_of_slices_would_be_noticed() -> None:
    slices = HEADS(16)
    x, weight = numbers(64, 64, 2048, slices, 7)
    each = slice_sums(x, weight, slices)
    chain = each[0]
    for more in each[1:]:
        chain = chain + more
    assert not torch.equal(chain.bfloat16(), add_in_tree(each).bfloat16())
    assert not torch.equal(add_in_tree(each[1:] + each[:1]).bfloat16(), add_in_tree(each).bfloat16())


@pytest.mark.parametrize(
    ("width", "slices", "tiles"),
    [
        (1152, RANGES(1152), FixedTiles()),
        (1792, HEADS(14), FixedTiles()),
        (2048, Slices(4096, 128, 32, 0, 16), FixedTiles()),
        (2048, HEADS(16), FixedTiles(parts=8)),
        (1536, RANGES(1536), FixedTiles(stages=6)),
        (2048, HEADS(16), FixedTiles(256, 3)),
        (3072, RANGES(3072), FixedTiles(ordered=True)),
        (2048, HEADS(16), FixedTiles(parts=2, ordered=True)),
        (204, None, FixedTiles()),
    ],
    ids=["no whole turns", "groups of two", "a rank's part", "too many parts", "too much shared memory",
         "too many registers", "slices too long to wait for", "parts in turn", "rows that the copy engine cannot read"],
)  # fmt: skip
def test_what_the_kernel_cannot_sum_is_left_to_others(width: int, slices: Slices | None, tiles: FixedTiles) -> None:
    x, weight = torch.zeros(130, width, dtype=torch.bfloat16), torch.zeros(128, width, dtype=torch.bfloat16)
    assert not fits(x, weight, slices, tiles, *places())
