"""Where sums are cut, and that the tree over the slices is the same whoever owns which of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import EngineError
from quire.kernels.slices import Slices, add_in_tree, finish_tree, is_node, rank_run

WIDTHS = st.integers(1, 40_000)
COUNTS = st.integers(1, 150)


class Term(str):
    """Adds up to the formula of its sum, so that two sums are equal only if every addition is."""

    def __add__(self, other: str) -> Term:
        return Term(f"({self!s} {other})")


def grow(values: list[Term]) -> Term:
    """The tree by its definition: neighbours are added, an odd one is carried up, until one is left."""
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def leaves(count: int) -> list[Term]:
    return [Term(index) for index in range(count)]


def run_stack(part: Slices) -> dict[tuple[int, int], Term]:
    """What the kernels do with `merges()`, by node."""
    stack: list[Term] = []
    for index, merges in zip(range(part.first, part.last), part.merges(), strict=True):
        value = Term(index)
        for _ in range(merges):
            value = stack.pop() + value
        stack.append(value)
    return dict(zip(part.nodes(), stack, strict=True))


@given(width=WIDTHS)
def test_an_mlps_width_is_cut_into_eight_even_ranges_at_multiples_of_32(width: int) -> None:
    slices = Slices.of_width(width)
    borders = slices.borders
    assert borders[0] == 0 and borders[-1] == slices.width == width and slices.whole
    assert all(border % 32 == 0 for border in borders[:-1])
    assert slices.count == (8 if width > 7 * 32 else -(-width // 32))
    units = [-(-high // 32) - low // 32 for low, high in pairwise(borders)]
    assert min(units) >= 1 and max(units) - min(units) <= 1


def test_widths_of_real_models() -> None:
    assert Slices.of_width(1536).borders == tuple(range(0, 1537, 192))
    assert Slices.of_width(4864).borders == tuple(range(0, 4865, 608))
    assert Slices.of_width(336).borders == (0, 32, 64, 128, 160, 192, 256, 288, 336)
    assert Slices.of_width(100).borders == (0, 32, 64, 96, 100)
    assert Slices.of_heads(9, 64).borders == tuple(range(0, 577, 64))
    assert Slices.of_heads(32, 128).borders == tuple(range(0, 4097, 512))
    assert Slices.of_heads(28, 128).borders == tuple(128 * heads for heads in (0, 3, 7, 10, 14, 17, 21, 24, 28))


@given(heads=st.integers(1, 130), size=st.integers(1, 8))
def test_ranks_have_whole_heads_and_whole_slices(heads: int, size: int) -> None:
    whole = Slices.of_heads(heads, 64)
    for rank in range(size):
        first, last = (whole.border(index) for index in rank_run(whole.total, rank, size))
        assert first % 64 == last % 64 == 0
        if first < last:
            assert whole.over(first, last).width == last - first


@given(count=COUNTS, size=st.integers(1, 12))
def test_ranks_own_all_slices_once_in_order(count: int, size: int) -> None:
    runs = [rank_run(count, rank, size) for rank in range(size)]
    assert [index for run in runs for index in range(*run)] == list(range(count))
    lengths = [high - low for low, high in runs]
    assert max(lengths) - min(lengths) <= 1


@given(count=COUNTS)
def test_the_tree_adds_neighbours_first_and_carries_an_odd_one(count: int) -> None:
    assert add_in_tree(leaves(count)) == grow(leaves(count))
    assert run_stack(Slices.each(count, 1)) == {(0, count): grow(leaves(count))}


@given(data=st.data(), count=COUNTS)
def test_any_split_into_runs_gives_the_same_additions(data: st.DataObject, count: int) -> None:
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=8))})
    slices = Slices.each(count, 3)
    values: dict[tuple[int, int], Term] = {}
    for low, high in pairwise(cuts):
        values |= run_stack(slices.part(low, high))
    assert all(is_node(*node, count) for node in values)
    assert finish_tree(count, values) == grow(leaves(count))


@given(data=st.data(), width=WIDTHS)
def test_a_part_counts_its_columns_from_its_own_first(data: st.DataObject, width: int) -> None:
    slices = Slices.of_width(width)
    low = data.draw(st.integers(0, slices.count - 1))
    high = data.draw(st.integers(low + 1, slices.count))
    part, columns = slices.part(low, high), slices.columns(low, high)
    assert part.width == columns.stop - columns.start
    assert part.borders == tuple(border - columns.start for border in slices.borders[low : high + 1])
    assert part.columns(low, high) == slice(0, part.width)


def test_values_that_leave_a_slice_out_are_refused() -> None:
    with pytest.raises(KeyError):
        finish_tree(4, {(0, 2): 1, (3, 4): 1})


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(EngineError, match="do not fit a weight of 64"):
        Slices.each(3, 20).check_width(64)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (0, 5), (-1, 2)])
def test_a_run_that_is_none_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="no run of slices"):
        Slices.each(4, 8).part(first, last)
