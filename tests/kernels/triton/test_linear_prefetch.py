"""GEMMs that prefetch their weights, run by our interpreter, which also checks how they wait and refill."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from triton.experimental.gluon._runtime import GluonJITFunction

from quire.kernels.triton import gemm_table, prefetch_kernel
from quire.kernels.triton import linear_prefetch as host
from quire.kernels.triton.linear_prefetch import FEATURES, PrefetchScratch, PrefetchShape, fits, linear_prefetch, padded
from tests.kernels.triton.gluon_interpreter import Run, interpreting
from tests.kernels.triton.gluon_memory import ProtocolError

ORDERS = (range, lambda n: reversed(range(n)), lambda n: random.Random(n).sample(range(n), n))
"""In which programs run: a tile of several must come out the same whoever is last."""
SEEDS = (None, 1, 2)
"""Of interleavings of the warps that load and those that multiply."""


@contextmanager
def programs(count: int | None) -> Iterator[None]:
    """So many, or as many as the shape says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "multiprocessors", lambda device: 4)
        if count is not None:
            patch.setattr(host, "_programs", lambda *_: count)
        yield


def scratch(partials: int = 1 << 19) -> PrefetchScratch:
    """Poisoned, so that a part which nobody has left shows."""
    found = PrefetchScratch.allocate("cpu", partials)
    found.partial.fill_(float("nan"))
    return found


def whole(*size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers, whose sums have no rounding until they are stored: results must be equal to the bit."""
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gemm(x: Tensor, weight: Tensor, *added: Tensor | None) -> Tensor:
    sums = x.double() @ weight.double().t()
    return sum((each.double() for each in added if each is not None), start=sums).to(x.dtype)


def check(
    rows: int, features: int, width: int, sizes: PrefetchShape, count: int | None, dtype: torch.dtype = torch.bfloat16
) -> list[Run]:
    """Every order of programs and an interleaving each, over and over in one scratch; of a bias, a residual, both and
    neither three, other ones for other numbers of rows."""
    places, found = scratch(2 * (count or 8) * FEATURES * padded(rows)), []
    for salt, (seed, order) in enumerate(zip(SEEDS, ORDERS)):
        x, weight = whole(rows, width, seed=salt, dtype=dtype), whole(features, width, seed=salt + 9, dtype=dtype)
        bias = whole(features, seed=salt + 999, dtype=dtype) if (rows + salt) & 1 else None
        residual = whole(rows, features, seed=salt + 99, dtype=dtype) if (rows + salt) & 2 else None
        out = torch.full((rows, features), float("nan"), dtype=dtype)
        with programs(count), interpreting(order, seed) as runs:
            got = linear_prefetch(x, weight, bias, residual, sizes=sizes, scratch=places, out=out, pdl=seed is not None)
        assert got is out and torch.equal(got, gemm(x, weight, bias, residual))
        assert not places.arrived.any()
        found += runs
    return found


@pytest.mark.parametrize(
    ("rows", "features", "width", "sizes", "count"),
    [
        (1, 512, 512, PrefetchShape(1, 5, 4), None),
        (1, 512, 512, PrefetchShape(1, 4, 1), 13),
        (2, 384, 256, PrefetchShape(2, 6, 2), None),
        (7, 200, 192, PrefetchShape(1, 5, 1), 3),
        (8, 328, 1024, PrefetchShape(1, 3, 4), None),
        (16, 64, 512, PrefetchShape(1, 2, 2), 4),
        (17, 100, 448, PrefetchShape(1, 3, 1), 4),
        (24, 648, 320, PrefetchShape(5, 3, 1), None),
        (33, 520, 128, PrefetchShape(1, 4, 1), 2),
        (48, 300, 512, PrefetchShape(3, 3, 2), None),
        (64, 256, 512, PrefetchShape(4, 4, 1), None),
        (80, 200, 256, PrefetchShape(3, 3, 1), None),
        (96, 208, 256, PrefetchShape(1, 3, 2), 5),
        (100, 300, 768, PrefetchShape(1, 3, 2), 8),
        (112, 400, 384, PrefetchShape(3, 4, 1), None),
        (128, 512, 64, PrefetchShape(2, 2, 1), None),
        (200, 136, 384, PrefetchShape(1, 2, 2), 7),
        (256, 256, 256, PrefetchShape(1, 3, 1), 3),
    ],
)
def test_shares_of_every_shape_add_up_to_the_gemm(
    rows: int, features: int, width: int, sizes: PrefetchShape, count: int | None
) -> None:
    check(rows, features, width, sizes, count)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 11, 12])
def test_any_number_of_programs_shares_the_turns(count: int) -> None:
    """12 turns of two tiles: from all of them in one program to one in each, of a ring that stays empty but for it."""
    check(3, 128, 768, PrefetchShape(1, 3, 2), count)


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("slabs", [1, 2, 4])
def test_a_ring_of_any_length_is_filled_again_in_time(stages: int, slabs: int) -> None:
    check(5, 192, 512, PrefetchShape(1, stages, slabs), 2)


def test_float16() -> None:
    check(9, 200, 256, PrefetchShape(1, 4, 2), 5, torch.float16)


@pytest.mark.parametrize(
    ("rows", "sizes", "count"),
    [(1, PrefetchShape(1, 5, 4), None), (21, PrefetchShape(1, 3, 1), 5), (64, PrefetchShape(3, 2, 2), None)],
)
def test_gemms_of_fp8_are_multiplied_by_the_scales_of_features_and_rows(
    rows: int, sizes: PrefetchShape, count: int | None
) -> None:
    features, width = 328, 1024
    x, weight = (whole(*size, seed=1).to(torch.float8_e4m3fn) for size in ((rows, width), (features, width)))
    # Powers of two, so that every result is exact.
    scales = 2.0 ** whole(features, seed=3).float(), 2.0 ** whole(rows, seed=4).float()
    bias, residual = whole(features, seed=5), whole(rows, features, seed=6)
    out = torch.full((rows, features), float("nan"), dtype=torch.bfloat16)
    places = scratch()
    with programs(count), interpreting(seed=1):
        linear_prefetch(x, weight, bias, residual, sizes=sizes, scratch=places, scales=scales, out=out, pdl=True)
    wide = gemm(x.double() * scales[1][:, None], weight.double() * scales[0][:, None], bias, residual)
    assert torch.equal(out, wide.bfloat16())
    assert fits(x, weight, sizes, places) and not fits(x.bfloat16(), weight, sizes, places)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    features=st.integers(1, 5 * 64).map(lambda n: n + -n % 8),
    tiles=st.integers(1, 3),
    turns=st.integers(1, 8),
    stages=st.integers(2, 6),
    slabs=st.sampled_from((1, 2, 4)),
    count=st.integers(1, 24),
)
def test_every_turn_is_computed_by_exactly_one_program(
    rows: int, features: int, tiles: int, turns: int, stages: int, slabs: int, count: int
) -> None:
    sizes = PrefetchShape(tiles, min(stages, host._SHARED // PrefetchShape(tiles, 1, slabs).shared(rows)), slabs)
    groups = sizes.groups(features)
    count = groups if tiles > 1 else min(count, groups * turns)
    every = {(tile * 64, slab * 64): 1 for tile in range(groups * tiles) for slab in range(turns * slabs)}
    for run in check(rows, features, turns * slabs * 64, sizes, count):
        assert Counter(copy.place for copy in run.copies if copy.name == "weight") == every
        shares = Counter(copy.program for copy in run.copies if copy.name == "x")
        boxes = len({copy.place[0] for copy in run.copies if copy.name == "x"})
        assert len(shares) == count and max(shares.values()) - min(shares.values()) <= slabs * boxes


@pytest.mark.parametrize("slabs", [1, 2, 4])
def test_bits_depend_neither_on_the_order_of_programs_nor_on_that_of_their_warps(slabs: int) -> None:
    x, weight, residual = numbers(20, 512, seed=1), numbers(300, 512, seed=2), numbers(20, 300, seed=3)
    bias = numbers(300, seed=4)
    for count in (1, 5, 9):
        got = []
        for order, seed in zip((*ORDERS, lambda n: random.Random(7).sample(range(n), n)), (None, 3, 4, 5)):
            with programs(count), interpreting(order, seed):
                sizes = PrefetchShape(1, 4, slabs)
                got.append(linear_prefetch(x, weight, bias, residual, sizes=sizes, scratch=scratch(), pdl=True))
        assert all(torch.equal(each, got[0]) for each in got[1:])
        assert (got[0] - gemm(x, weight, bias, residual)).abs().max() < 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ring_is_full_of_weights_before_the_previous_kernel_has_ended(seed: int | None) -> None:
    x, weight = whole(4, 1024, seed=1), whole(256, 1024, seed=2)
    with programs(6), interpreting(seed=seed) as runs:
        linear_prefetch(x, weight, sizes=PrefetchShape(1, 4, 2), scratch=scratch(), pdl=True)
        linear_prefetch(x, weight, sizes=PrefetchShape(1, 4, 2), scratch=scratch(), pdl=False)
    early = Counter((copy.program, copy.name) for copy in runs[0].copies if copy.early)
    assert early == {(program, "weight"): 8 for program in range(6)}
    assert not any(copy.early for copy in runs[1].copies)


_NARROW = {
    "qwen2.5-0.5b": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "gemma3-1b": ((1536, 1152), (1152, 1024), (13824, 1152), (1152, 6912)),
    "gemma3-270m": ((1536, 640), (640, 1024), (4096, 640), (640, 2048)),
    "smollm2": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
}


@pytest.mark.parametrize("form", ["plain", "fp8 plain"])
@pytest.mark.parametrize("model", _NARROW)
def test_widths_that_no_timed_weight_has_get_the_kernel_that_the_table_names(
    model: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "multiprocessors", lambda device: 132)
    dtype, places = torch.bfloat16 if form == "plain" else torch.float8_e4m3fn, PrefetchScratch.allocate("cpu")
    found = 0
    for features, width in _NARROW[model]:
        weight = torch.empty(features, width, dtype=dtype)
        for rows in (8, 16, 32, 48, 64):
            choice = gemm_table.lookup(rows, features, width, torch.bfloat16, form)
            slabs, rest = divmod(width, host.columns(dtype))
            if choice.kernel == "prefetch" and not rest and slabs not in (5, 7):  # few and prime: rings too short
                sizes = PrefetchShape(*choice.sizes).in_turns_of(slabs)
                assert fits(torch.empty(rows, width, dtype=dtype), weight, sizes, places), (features, width, rows)
                found += 1
    assert found >= 5


def test_turns_change_only_where_they_do_not_fill_a_row() -> None:
    wanted = PrefetchShape(1, 5, 4, 1)
    for width, slabs, stages in (
        (4096, 4, 5), (896, 2, 10), (1152, 3, 6), (640, 5, 4), (576, 3, 6), (960, 5, 4),
    ):  # fmt: skip
        assert wanted.in_turns_of(width // 64) == PrefetchShape(1, stages, slabs, 1)
    assert wanted.in_turns_of(7) == wanted.in_turns_of(1) == wanted  # only one at a time: `fits` says no
    two = PrefetchShape(1, 2, 4)  # a ring of two turns that do fill a row stays what it is
    assert two.in_turns_of(16) == two


@pytest.mark.parametrize(("rows", "width"), [(8, 896), (24, 1152), (16, 640), (5, 576)])
def test_rings_in_other_turns_add_up_to_the_gemm(rows: int, width: int) -> None:
    check(rows, 200, width, PrefetchShape(1, 5, 4, 1).in_turns_of(width // 64), 3)


@pytest.mark.parametrize(("features", "width"), [(64, 256), (1024, 256), (4096, 4096)])
@pytest.mark.parametrize("slabs", [1, 2, 4])
def test_the_chip_never_gets_more_programs_than_there_are_turns(
    features: int, width: int, slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "multiprocessors", lambda device: 132)
    weight = torch.empty(features, width, dtype=torch.bfloat16)
    turns = features // 64 * (width // 64 // slabs)
    assert host._programs(weight, PrefetchShape(slabs=slabs, programs=1)) == min(132, turns)
    assert host._programs(weight, PrefetchShape(1, slabs=slabs, programs=2)) == min(264, turns)
    assert host._programs(weight, PrefetchShape(slabs=slabs)) == features // 64
    assert host._programs(weight, PrefetchShape(3, slabs=slabs)) == -(-features // 192)


def test_a_program_without_a_turn_would_be_noticed() -> None:
    """The kernel does not know of one: that there is none is what the test above is for."""
    with pytest.raises(ProtocolError, match="place -1 of"):
        check(3, 128, 384, PrefetchShape(1, 3, 1), 20)


def test_what_the_kernel_cannot_multiply_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "multiprocessors", lambda device: 4)

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(sizes, dtype=dtype)

    sizes, places, weight = PrefetchShape(1, 4, 2, 1), PrefetchScratch.allocate("cpu", 2 * 4 * 64 * 16), empty(640, 256)
    assert fits(empty(16, 256), weight, sizes, places)
    assert fits(empty(16, 256, dtype=torch.float16), weight.half(), sizes, places)
    assert not fits(empty(16, 256, dtype=torch.float32), weight.float(), sizes, places)
    assert not fits(empty(16, 320), empty(640, 320), sizes, places)  # two turns and a half
    assert fits(empty(16, 320), empty(640, 320), PrefetchShape(1, 4, 1, 1), places)
    assert not fits(empty(17, 256), weight, sizes, places)  # 32 rows, for whose parts there is no place
    assert fits(empty(17, 256), weight[:256], sizes, places)  # a tile a program: nobody leaves parts
    assert fits(empty(17, 256), weight, PrefetchShape(1, 4, 2), places)
    assert not fits(empty(16, 256), weight, PrefetchShape(2, 4, 2, 1), places)  # shares of more tiles than one
    assert fits(empty(16, 256), weight[:512], PrefetchShape(2, 4, 2, 1), places)  # none are shared
    assert fits(empty(16, 256), weight, PrefetchShape(2, 4, 2), places)
    assert not fits(empty(65, 256), weight, PrefetchShape(3, 3, 2), places)  # 240 KiB
    assert fits(empty(65, 256), weight, PrefetchShape(3, 3, 1), places)
    assert not fits(empty(65, 256), weight, PrefetchShape(4, 2, 1), places)  # more sums than registers
    assert not fits(empty(129, 256), weight, PrefetchShape(2, 2, 1), places)
    assert fits(empty(256, 256), weight[:256], PrefetchShape(1, 5, 1), places)
    assert not fits(empty(256, 256), weight[:256], PrefetchShape(1, 6, 1), places)  # 240 KiB
    assert fits(empty(128, 512), empty(256, 512), PrefetchShape(1, 8, 1), places)
    assert not fits(empty(128, 512), empty(256, 512), PrefetchShape(1, 9, 1), places)  # 216 KiB and 16 to add a bias
    assert not fits(empty(257, 256), weight[:256], PrefetchShape(1, 2, 1), places)
    assert not fits(empty(16, 512)[:, :256], weight, sizes, places)
    assert not fits(empty(16 * 256 + 1)[1:].view(16, 256), weight, sizes, places)
    assert not fits(empty(16, 256), empty(640 * 256 + 1)[1:].view(640, 256), sizes, places)
    assert not fits(empty(16, 256), empty(64 * 4097, 256), PrefetchShape(1, 4, 2), places)


def test_a_weight_whose_turns_the_kernel_cannot_count_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a program is found by multiplying 32-bit numbers."""
    monkeypatch.setattr(host, "multiprocessors", lambda device: 4)
    x, places = torch.empty(1, 1 << 14, dtype=torch.bfloat16), PrefetchScratch.allocate("cpu", 1)
    # So large a weight is there in name only.
    monkeypatch.setattr(torch.Tensor, "is_contiguous", lambda _: True)
    weight = torch.empty(1, 1, dtype=torch.bfloat16).expand(64 * 4096, 1 << 14)
    assert not fits(x, weight, PrefetchShape(1, 4, 1), places)
    assert fits(x, weight, PrefetchShape(1, 4, 4), places)


@pytest.mark.parametrize(("rows", "pad"), [(1, 8), (8, 8), (9, 16), (48, 64), (256, 256)])
def test_rows_are_padded_to_what_the_tensor_cores_multiply(rows: int, pad: int) -> None:
    assert padded(rows) == pad


@pytest.mark.parametrize(
    ("rows", "boxes"),
    [
        (1, (0,)), (8, (0,)), (12, (0, 8)), (16, (0,)), (20, (0, 8, 16)), (48, (0, 16, 32)), (64, (0,)),
        (80, range(0, 80, 16)), (96, (0, 32, 64)), (100, range(0, 104, 8)), (112, range(0, 112, 16)),
        (192, (0, 64, 128)), (256, (0,)),
    ],
)  # fmt: skip
def test_only_boxes_with_rows_in_them_are_copied(rows: int, boxes: Sequence[int]) -> None:
    """And the largest that the rows are a multiple of."""
    for run in check(rows, 64, 128, PrefetchShape(1, 2, 1), None):
        asked = [copy.place for copy in run.copies if copy.name == "x"]
        assert asked == [(row, column) for column in (0, 64) for row in boxes]


_OVER, _NEVER = "is copied over", "never ends: (?=.*load_turns ).*"
_ARRIVES = "            mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), pred=turn > first)\n"
_TURN = "            sums = multiply_turn(w_ring, x_ring, stage, sums, TILES, SLABS)\n"
_SUMS = "        sums = waited(sums, 0, TILES)\n"
_LAST = "        mbarrier.arrive(free.index((last - 1 - begin) % STAGES))\n"
_FREE = "mbarrier.wait(free.index(stage), done // STAGES - 1 & 1)"
_ROWS = (
    "    for turn in range(begin, early):\n"
    "        load_rows(x, full, x_ring, turn, turn - begin, turns, SLABS, BOXES)\n"
)
_GDC = "    if PDL:\n        gdc_wait()\n"
_GROUPS = "    for group in range("
_WEIGHT, _READ = "ring.index((stage * SLABS + slab) * TILES + tile)", "first = (stage * SLABS + slab) * TILES"

# One wrong word each, and who complains. `None`: no rule is broken, the numbers are wrong.
MUTATIONS = {
    # Between the copy engine and those who multiply.
    "parity": ("done // STAGES & 1", "(done // STAGES + 1) & 1", "an MMA of what"),
    "parity of the second turn": ("done // STAGES & 1", "0", "an MMA of what|never ends"),
    "no wait for the copy": ("mbarrier.wait(full.index(stage), done // STAGES & 1)", "pass", "an MMA of what"),
    "not expected": ("mbarrier.expect(full.index(stage), BYTES)", "pass", "0 expected"),
    "a slab expected": ("BYTES: gl.constexpr = SLABS * (", "BYTES: gl.constexpr = (", "bytes asked for"),
    "a tile expected": ("TILES * weight.block_type.nbytes", "weight.block_type.nbytes", "bytes asked for"),
    "a box expected": ("BOXES * x.block_type.nbytes", "x.block_type.nbytes", "bytes asked for"),
    "a whole place expected": ("BOXES * x.block", "2 * BOXES * x.block", _NEVER + "bytes are asked for"),
    "more expected": ("index(stage), BYTES)", "index(stage), BYTES + 16)", _NEVER + "bytes are asked for"),
    "asked beyond the share": ("range(early, end)", "range(early, end + 1)", "copies under way|never ends"),
    "asked beyond a short share": ("gl.minimum(begin + STAGES, end)", "begin + STAGES", "copies under way"),
    "not all asked for": ("range(early, end)", "range(early, end - 1)", r"ends: _multiply waits for .* of full\["),
    "rows without slabs": ("= ring.index(stage * SLABS + slab)", "= ring.index(stage + slab)", _OVER),
    "rows read without slabs": ("x_ring.index(stage * SLABS + slab)", "x_ring.index(stage + slab)", "an MMA|over"),
    "columns without slabs": ("(turn % turns * SLABS + slab)", "(turn % turns + slab)", None),
    "one slab twice": ("x_ring.index(stage * SLABS + slab)", "x_ring.index(stage * SLABS)", _OVER),
    "weights without slabs": (_WEIGHT, "ring.index((stage + slab) * TILES + tile)", _OVER),
    "weights without tiles": (_WEIGHT, "ring.index(stage * SLABS + slab + tile)", _OVER),
    "weights read without slabs": (_READ, _READ.replace(" * SLABS", ""), "an MMA of what|" + _OVER),
    "weights read without tiles": (_READ, _READ.replace(" * TILES", ""), "an MMA of what|" + _OVER),
    "one tile twice": ("w_ring.index(first + tile)", "w_ring.index(first)", _OVER + "|no MMA has read"),
    "the slab of another tile": ("(turn // turns * TILES + tile) * F", "(turn // turns + tile) * F", None),
    "the sums of another tile": ("rows, sums[tile], is", "rows, sums[0], is", None),
    "no fence": ("    fence_async_shared()\n", "", "before the fence"),
    # Boxes of rows.
    "a box too few": ("in gl.static_range(BOXES)", "in gl.static_range(BOXES - 1)", _NEVER + "bytes are asked for"),
    "a box that nobody knows of": ("SLABS, BOXES, PDL)),", "SLABS, BOXES - 1, PDL)),", None),
    "all boxes in one place": ("slice(box * HEIGHT", "slice(0", _OVER + " a copy that nobody waited for"),
    "boxes the other way around": ("slice(box * HEIGHT", "slice((BOXES - 1 - box) * HEIGHT", None),
    "boxes between two": ("slice(box * HEIGHT", "slice(box * HEIGHT // 2", "cuts the pattern|" + _OVER),
    "boxes beyond the place": ("slice(box * HEIGHT", "slice(2 * box * HEIGHT", r"rows \d+ \+ \d+ of"),
    "one box again and again": ("[box * HEIGHT, column]", "[0, column]", None),
    "half a box": ("slice(box * HEIGHT, HEIGHT,", "slice(box * HEIGHT, HEIGHT // 2,", "differ|cuts the pattern"),
    # Between those who multiply and the one who loads.
    "no wait for room": (_FREE, "pass", _OVER + "|come to again"),
    "parity of room": (_FREE, _FREE.replace(" - 1", ""), _OVER + "|come to again"),
    "parity of room the first time": (_FREE, _FREE.replace("done // STAGES - 1 & 1", "0"), _OVER + "|never ends"),
    "parity of room two phases ago": (_FREE, _FREE.replace("- 1 &", "- 2 &"), _OVER + "|come to again"),
    "room of another turn": (_FREE, _FREE.replace("(stage)", "((stage + STAGES - 1) % STAGES)"), _NEVER),
    "no turn is said to be read": (_ARRIVES, "", _NEVER + r"_multiply waits for .* full\[0\].*free\[0\]"),
    "the last turn is not said to be read": (_LAST, "", _NEVER),
    "said to be read at once": (_ARRIVES, "            mbarrier.arrive(free.index(stage))\n", _OVER),
    "said to be read twice": (_ARRIVES, _ARRIVES.replace("turn > first", "turn > begin"), _OVER + "|" + _NEVER),
    "said to be read before any": (_ARRIVES, _ARRIVES.replace("turn > first", "True"), _OVER),
    "two must have read": ("init(free.index(stage), count=1)", "init(free.index(stage), count=2)", _NEVER),
    # Between MMAs and their sums.
    "no wait for the sums": (_SUMS, "", "before their MMA"),
    "waited for too few": (_SUMS, _SUMS.replace("0,", "1,"), "before their MMA"),
    # With other kernels and programs.
    "multiplies with the previous kernel": (_GDC + _GROUPS, _GROUPS, "before gdc_wait"),
    "loads with the previous kernel": (_GDC + _ROWS, _ROWS, "x is asked for before gdc_wait"),
    "asks for rows too early": (_GDC + _ROWS, _ROWS + _GDC, "x is asked for before gdc_wait"),
    "not published": ("        gl.thread_barrier()\n", "", "does not publish"),
    "parts in the wrong place": ("(first == begin).to", "(first != begin).to", None),
    "the wrong first part": ("partial + (2 * one + 1) * SIZE", "partial + 2 * one * SIZE", None),
    "one part left out": ("range(one + 1, other + 1)", "range(one + 1, other)", None),
    "added too early": ("== other - one", "== other - one - 1", "a race"),
    "never the last": ("== other - one", "== other - one + 1", None),
    "a count left behind": ("            gl.store(arrived + tile, 0)\n", "", None),
    "stored beyond the features": ("real = feature < num_features", "real = feature >= 0", "beyond its tensor"),
    "stored beyond the rows": (" & (row < num_rows)[None, :]", " & (row >= 0)[None, :]", "beyond its tensor"),
    "stored where another tile is": ("place = group * TILES + tile", "place = group + tile", "a race"),
    "the bias of another tile": ("bias + feature", "bias + feature % FEATURES", None),
    "a bias beyond the features": ("mask=real, other", "mask=feature >= 0, other", "beyond its tensor"),
    "no bias": ("    if BIAS:", "    if BIAS and RESIDUAL:", None),
}
# Said to be read while it is: whether it is harmed depends on time, that it may be does not.
EARLY = {
    "an MMA too few": (("waited(sums, SLABS * TILES,", "waited(sums, SLABS * TILES + 1,"),),
    "a turn too few": (("waited(sums, SLABS * TILES,", "waited(sums, 2 * SLABS * TILES,"),),
    "before the wait": ((_ARRIVES, ""), (_TURN, _ARRIVES + _TURN)),
    "before the last wait": ((_SUMS + _LAST, _LAST + _SUMS),),
}


def mutated(folder: Path, *changes: tuple[str, str]) -> GluonJITFunction:
    text = Path(str(prefetch_kernel.__file__)).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mutated.py").write_text(text)
    spec = importlib.util.spec_from_file_location("mutated_prefetch_kernel", folder / "mutated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prefetch_kernel


def multiplied() -> None:
    """Tiles of several programs and programs of several tiles, all of whose rings go around more than twice; a ring
    that is longer than a share; groups of tiles, the last beyond the features."""
    check(21, 200, 1024, PrefetchShape(1, 3, 2), 3)
    check(5, 64, 512, PrefetchShape(1, 6, 2), 1)
    check(24, 300, 640, PrefetchShape(3, 3, 2), None)


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_wrong_word_in_the_kernel_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, complaint = MUTATIONS[name]
    monkeypatch.setattr(host, "prefetch_kernel", mutated(tmp_path, (old, new)))
    error, threads = AssertionError if complaint is None else ProtocolError, threading.active_count()
    with pytest.raises(error, match=complaint):
        multiplied()
    assert threading.active_count() == threads  # whoever fails, all partitions end


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize(("tiles", "slabs"), [(1, 1), (1, 2), (1, 4), (2, 1), (3, 2)])
def test_a_place_that_is_free_too_early_is_noticed_whenever_it_is_filled(
    name: str, tiles: int, slabs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "prefetch_kernel", mutated(tmp_path, *EARLY[name]))
    x, weight = whole(3, 1024, seed=1), whole(128 * tiles, 1024, seed=2)
    for seed in SEEDS:
        complains = pytest.raises(ProtocolError, match="copied over what an MMA still reads")
        with complains, programs(1), interpreting(seed=seed):
            linear_prefetch(x, weight, sizes=PrefetchShape(tiles, 3, slabs), scratch=scratch())


def test_two_parts_of_a_program_in_one_place_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right if programs run in their order, one after another; the rules are broken all the same."""
    changes = ((" + (first == begin).to(gl.int32)", ""), ("(2 * one + 1) * SIZE", "2 * one * SIZE"))
    monkeypatch.setattr(host, "prefetch_kernel", mutated(tmp_path, *changes))
    with pytest.raises(ProtocolError, match="a race with the last write"):
        multiplied()


def test_the_kernel_as_it_is_passes_what_its_mutations_fail() -> None:
    multiplied()
