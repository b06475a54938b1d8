"""How the GEMMs of deterministic mode are dealt out to programs that prefetch; the kernel itself needs Hopper."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.kernels.slices import Slices  # noqa: E402
from quire.kernels.triton import fixed_prefetch, linear_prefetch  # noqa: E402
from quire.ops import triton as device_ops  # noqa: E402

MULTIPROCESSORS = 132


@pytest.fixture(autouse=True)
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_prefetch, "multiprocessors", lambda device: MULTIPROCESSORS)


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(
    ("features", "width", "slices"),
    [(6144, 4096, None), (151_936, 1024, None), (1024, 2048, Slices.each(16, 128)),
     (4096, 4096, Slices.each(32, 128)), (1024, 3072, Slices.of_width(3072)),
     (4096, 12_288, Slices.of_width(12_288)), (896, 896, Slices.each(14, 64))],
)
def test_units_are_nodes_of_the_tree_and_cover_every_column(
    rows: int, features: int, width: int, slices: Slices | None
) -> None:
    weight = torch.empty(features, width, dtype=torch.bfloat16, device="meta")
    units = fixed_prefetch.units_for(rows, weight, slices)
    count = 1 if slices is None else slices.total
    if slices is not None and rows > 32:
        assert units is None
        return
    assert units is not None and units.run & (units.run - 1) == 0 and units.run * units.parts == count
    columns = units.slice_turns * units.slabs * 64
    assert columns * count == width
    ring = units.stages * units.slabs * (64 + linear_prefetch.padded(rows)) * 128
    assert 2 * ring <= 227 << 10 and units.stages >= 2


@pytest.mark.parametrize(
    ("rows", "width", "slices"),
    [(7, 4096, Slices(4096, 32, 3, 0, 3)), (8, 1152, Slices.of_width(1152)), (8, 4000, None), (37, 4096, None),
     (8, 4096, Slices(8192, 128, 64, 0, 32))],
    ids=["unequal", "no whole slabs", "no whole slabs either", "rows that no graph has", "a rank's part"],
)
def test_what_the_kernel_cannot_sum_is_left_to_the_plain_one(rows: int, width: int, slices: Slices | None) -> None:
    weight = torch.empty(1024, width, dtype=torch.bfloat16, device="meta")
    assert fixed_prefetch.units_for(rows, weight, slices) is None


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("switched", [{}, {"fixed_prefetch": False}], ids=["by default", "switched off"])
def test_deterministic_mode_prefetches_for_up_to_eight_rows_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch, switched: dict[str, bool], early: bool
) -> None:
    """As on Hopper, with kernels that only note who was called."""
    called: list[Any] = []

    def prefetching(x: Any, *_: Any, pdl: bool, **__: Any) -> Any:
        called.append(("prefetch", x.shape[0], pdl))
        return x

    def plain(x: Any, *_: Any) -> Any:
        called.append(("plain", x.shape[0], None))
        return x

    monkeypatch.setattr(linear_prefetch, "available", lambda device: True)
    monkeypatch.setattr(device_ops, "linear_fixed_prefetch", prefetching)
    monkeypatch.setattr(device_ops.linear_fixed, "linear_fixed", plain)
    ops = device_ops.TritonOps("cpu", torch.bfloat16, deterministic=True, pdl=early, **switched)
    for slices in (None, Slices.of_width(512)):
        w = ops.pack_linear(torch.zeros(64, 512), None, slices)
        for rows in (1, 8, 9, 16, 64):
            ops.linear(torch.zeros(rows, 512, dtype=torch.bfloat16), w)
    few = [("plain" if switched else "prefetch", rows, None if switched else early) for rows in (1, 8)]
    assert called == 2 * [*few, *(("plain", rows, None) for rows in (9, 16, 64))]
    # Another compiled kernel: for norms and gates of every number of rows, or of none.
    assert {ops._early(rows) for rows in (1, 8, 9, 10_000)} == {early and not switched}


def test_one_compiled_kernel_serves_all_numbers_of_rows_that_prefetch_by_default() -> None:
    weight = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    every = range(1, fixed_prefetch.FEW_ROWS + 1)
    assert len({fixed_prefetch.units_for(rows, weight, None) for rows in every}) == 1
    assert {linear_prefetch.padded(rows) for rows in every} == {fixed_prefetch.FEW_ROWS}
