"""Products that ask ahead for their weights, run by our interpreter, which also checks how they wait and refill."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.experimental.gluon._runtime import GluonJITFunction

from quire.kernels.triton import ahead_kernel
from quire.kernels.triton import linear_ahead as host
from quire.kernels.triton.linear_ahead import AheadShape, fits, linear_ahead, padded
from quire.kernels.triton.linear_split import SplitScratch
from tests.kernels.triton.gluon_interpreter import Run, interpreting
from tests.kernels.triton.gluon_memory import ProtocolError

ORDERS = (range, lambda n: reversed(range(n)), lambda n: random.Random(n).sample(range(n), n))
"""In which programs run: a tile of several must come out the same whoever is last."""


@contextmanager
def programs(count: int) -> Iterator[None]:
    """As on a chip with so many multiprocessors, but never fewer programs: shares of nothing are tested too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_programs", lambda *_: count)
        yield


def scratch(partials: int = 1 << 19) -> SplitScratch:
    """Poisoned, so that a part which nobody has left shows."""
    found = SplitScratch.allocate("cpu", partials)
    found.partial.fill_(float("nan"))
    return found


def whole(*size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers, whose sums have no rounding until they are stored: results must be equal to the bit."""
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    sums = x.double() @ weight.double().t()
    return (sums if residual is None else sums + residual.double()).to(x.dtype)


def check(
    rows: int, features: int, width: int, sizes: AheadShape, count: int, dtype: torch.dtype = torch.bfloat16
) -> list[Run]:
    """Every order of programs, with and without a residual, over and over in one scratch."""
    places, found = scratch(2 * count * sizes.features * padded(rows)), []
    for seed, order in enumerate(ORDERS):
        x, weight = whole(rows, width, seed=seed, dtype=dtype), whole(features, width, seed=seed + 9, dtype=dtype)
        residual = whole(rows, features, seed=seed + 99, dtype=dtype) if seed % 2 == 0 else None
        out = torch.full((rows, features), float("nan"), dtype=dtype)
        with programs(count), interpreting(order) as runs:
            got = linear_ahead(x, weight, residual, sizes=sizes, scratch=places, out=out, pdl=seed > 0)
        assert got is out and torch.equal(got, product(x, weight, residual))
        assert not places.arrived.any()
        found += runs
    return found


@pytest.mark.parametrize(
    ("rows", "features", "width", "sizes", "count"),
    [
        (1, 512, 512, AheadShape(64, 4), 13),
        (2, 384, 256, AheadShape(128, 6), 5),
        (7, 200, 192, AheadShape(128, 5), 3),
        (16, 64, 512, AheadShape(64, 2), 8),
        (17, 100, 448, AheadShape(64, 3), 4),
        (33, 520, 128, AheadShape(256, 4), 2),
        (64, 256, 512, AheadShape(256, 3), 7),
        (100, 300, 320, AheadShape(128, 4), 11),
        (128, 512, 64, AheadShape(128, 2), 4),
        (200, 136, 384, AheadShape(64, 3), 9),
        (256, 256, 256, AheadShape(256, 3), 3),
    ],
)
def test_shares_of_every_shape_add_up_to_the_product(
    rows: int, features: int, width: int, sizes: AheadShape, count: int
) -> None:
    check(rows, features, width, sizes, count)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 12, 13, 17, 20])
def test_any_number_of_programs_shares_the_turns(count: int) -> None:
    """12 turns of two tiles: from all of them in one program to programs that have none."""
    check(3, 128, 384, AheadShape(64, 3), count)


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
def test_a_ring_of_any_length_is_filled_again_in_time(stages: int) -> None:
    check(5, 192, 512, AheadShape(64, stages), 3)


def test_float16() -> None:
    check(9, 200, 256, AheadShape(64, 4), 5, torch.float16)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    features=st.integers(1, 5 * 64).map(lambda n: n + -n % 8),
    turns=st.integers(1, 8),
    stages=st.integers(2, 6),
    count=st.integers(1, 24),
)
def test_every_turn_is_computed_by_exactly_one_program(
    rows: int, features: int, turns: int, stages: int, count: int
) -> None:
    tiles = -(-features // 64)
    every = {(tile * 64, turn * 64): 1 for tile in range(tiles) for turn in range(turns)}
    for run in check(rows, features, turns * 64, AheadShape(64, stages), count):
        assert Counter(copy.place for copy in run.copies if copy.name == "weight") == every
        shares = Counter(copy.program for copy in run.copies if copy.name == "x")
        shares.update({program: 0 for program in range(count)})
        assert max(shares.values()) - min(shares.values()) <= 1


def test_bits_do_not_depend_on_the_order_of_programs() -> None:
    x, weight, residual = numbers(20, 512, seed=1), numbers(300, 512, seed=2), numbers(20, 300, seed=3)
    for count in (1, 5, 11, 18):
        got = []
        for order in (*ORDERS, lambda n: random.Random(7).sample(range(n), n)):
            with programs(count), interpreting(order):
                got.append(linear_ahead(x, weight, residual, sizes=AheadShape(64, 4), scratch=scratch(), pdl=True))
        assert all(torch.equal(each, got[0]) for each in got[1:])
        assert (got[0] - product(x, weight, residual)).abs().max() < 0.5


def test_the_ring_is_full_of_weights_before_the_kernel_ahead_has_ended() -> None:
    x, weight = whole(4, 512, seed=1), whole(256, 512, seed=2)
    with programs(6), interpreting() as runs:
        linear_ahead(x, weight, sizes=AheadShape(64, 4), scratch=scratch(), pdl=True)
        linear_ahead(x, weight, sizes=AheadShape(64, 4), scratch=scratch(), pdl=False)
    early = Counter((copy.program, copy.name) for copy in runs[0].copies if copy.early)
    assert early == {(program, "weight"): 4 for program in range(6)}
    assert not any(copy.early for copy in runs[1].copies)


def test_a_slice_of_wider_rows_is_multiplied_in_place() -> None:
    x, weight = whole(3, 512, seed=1)[:, 128:320], whole(64, 192, seed=2)
    with programs(2), interpreting():
        got = linear_ahead(x, weight, sizes=AheadShape(64, 3), scratch=scratch())
    assert torch.equal(got, product(x, weight, None))


@pytest.mark.parametrize(("features", "width"), [(64, 64), (1024, 128), (4096, 4096)])
def test_the_chip_never_gets_more_programs_than_there_are_turns(
    features: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_multiprocessors", lambda device: 132)
    weight = torch.empty(features, width, dtype=torch.bfloat16)
    assert host._programs(weight, AheadShape(64)) == min(132, features // 64 * (width // 64))
    assert host._programs(weight, AheadShape(64, programs=0)) == features // 64


def test_a_product_without_whole_turns_or_a_place_for_its_parts_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_multiprocessors", lambda device: 4)
    sizes, places = AheadShape(64), SplitScratch.allocate("cpu", 2 * 4 * 64 * 16)
    x, weight = torch.empty(16, 256), torch.empty(640, 256)
    assert fits(x, weight, sizes, places)
    assert not fits(x[:, :100], weight[:, :100], sizes, places)
    assert not fits(torch.empty(17, 256), weight, sizes, places)
    assert fits(torch.empty(17, 256), weight[:256], sizes, places)  # a tile a program: nobody leaves parts
    assert not fits(torch.empty(257, 256), weight[:256], sizes, places)


# One wrong word each, and who complains. `None`: no rule is broken, the numbers are wrong.
MUTATIONS = {
    "parity": ("done // STAGES & 1", "(done // STAGES + 1) & 1", "does not wait for its copies"),
    "parity of the second turn": ("done // STAGES & 1", "0", "does not wait for its copies"),
    "refilled while read": ("warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,", "still reads"),
    "refilled at once": ("free = (done + STAGES - 1)", "free = (done + STAGES)", "still reads"),
    "not expected": ("mbarrier.expect(ready.index(stage), BYTES, pred=asked)", "pass", "expected"),
    "half expected": ("BYTES, pred=asked", "BYTES // 2, pred=asked", "bytes asked for"),
    "more expected": ("BYTES, pred=asked", "BYTES + 16, pred=asked", "never ends"),
    "expected unasked": ("BYTES, pred=asked", "BYTES", "again in a phase"),
    "asked beyond the share": ("& (after < end)", "& (after <= end)", "copies under way"),
    "asked twice": ("asked = (done > 0) & (after < end)", "asked = after < end", "again in a phase"),
    "never asked again": ("asked = (done > 0) & (after < end)", "asked = done < 0", "never ends"),
    "no fence": ("    fence_async_shared()\n", "", "before the fence"),
    "no wait for the kernel ahead": ("        gdc_wait()\n", "", "before gdc_wait"),
    "no wait for the copy": ("mbarrier.wait(ready.index(full), done // STAGES & 1)", "pass", "not waited for"),
    "no wait for the sums": ("acc = warpgroup_mma_wait(0, deps=(acc,))", "pass", "before their product"),
    "waited for too few": ("warpgroup_mma_wait(0, deps=(acc,))", "warpgroup_mma_wait(1, deps=(acc,))", "before their"),
    "not published": ("        gl.thread_barrier()\n", "", "does not publish"),
    "parts in the wrong place": ("(first == begin).to", "(first != begin).to", None),
    "the wrong first part": ("partial + (2 * one + 1) * SIZE", "partial + 2 * one * SIZE", None),
    "one part left out": ("range(one + 1, other + 1)", "range(one + 1, other)", None),
    "added too early": ("== other - one", "== other - one - 1", "a race"),
    "never the last": ("== other - one", "== other - one + 1", None),
    "a count left behind": ("            gl.store(arrived + tile, 0)\n", "", None),
    "stored beyond the features": ("(feature < num_features)", "(feature >= 0)", "beyond its tensor"),
    "stored beyond the rows": (" & (row < num_rows)[None, :]", " & (row >= 0)[None, :]", "beyond its tensor"),
}


def mutated(folder: Path, *changes: tuple[str, str]) -> GluonJITFunction:
    text = Path(str(ahead_kernel.__file__)).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mutated.py").write_text(text)
    spec = importlib.util.spec_from_file_location("mutated_ahead_kernel", folder / "mutated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ahead_kernel


def multiplied() -> None:
    """Tiles of several programs and programs of several tiles, all of whose rings go around more than twice."""
    check(5, 200, 512, AheadShape(64, 3), 3)


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_wrong_word_in_the_kernel_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, complaint = MUTATIONS[name]
    monkeypatch.setattr(host, "ahead_kernel", mutated(tmp_path, (old, new)))
    error = AssertionError if complaint is None else ProtocolError
    with pytest.raises(error, match=complaint):
        multiplied()


def test_rows_asked_for_too_early_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(str(ahead_kernel.__file__)).read_text()
    wait = "    if PDL:\n        gdc_launch_dependents()\n        gdc_wait()\n"
    rows = text.partition(wait)[2].partition("    for tile in range(")[0]
    assert "_ask_rows" in rows
    monkeypatch.setattr(host, "ahead_kernel", mutated(tmp_path, (wait + rows, rows + wait)))
    with pytest.raises(ProtocolError, match="x is asked for before gdc_wait"):
        multiplied()


def test_two_parts_of_a_program_in_one_place_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right if programs run in their order, one after another; the rules are broken all the same."""
    changes = ((" + (first == begin).to(gl.int32)", ""), ("(2 * one + 1) * SIZE", "2 * one * SIZE"))
    monkeypatch.setattr(host, "ahead_kernel", mutated(tmp_path, *changes))
    with pytest.raises(ProtocolError, match="a race with the last write"):
        multiplied()


def test_the_kernel_as_it_is_passes_what_its_mutations_fail() -> None:
    multiplied()
