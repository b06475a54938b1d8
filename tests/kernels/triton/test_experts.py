"""Routing and grouped GEMMs of experts agree with their torch references (interpreted on a CPU, compiled on a GPU)."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.routing import Clamp, RoutedRows, RouterSpec
from quire.kernels.triton.expert_linear import CHOICES, ExpertShape, expert_choice, suited
from quire.kernels.triton.route import most_blocks
from tests.kernels.triton import cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = ExpertShape(16, 32, 32, 4, 2)
COPIED = ExpertShape(16, 16, 32, 4, 2, copied=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize(
    "spec",
    [
        RouterSpec(8, 2),
        RouterSpec(12, 3, "sigmoid", choice_bias=True, groups=4, chosen_groups=2, group_score="best two", scale=2.5),
        RouterSpec(10, 3, renormalised=False, groups=5, chosen_groups=2, scale=1.5),
        RouterSpec(5, 5, "sigmoid", renormalised=False, choice_bias=True),
    ],
    ids=str,
)
def test_the_choice_is_the_references(spec: RouterSpec) -> None:
    cases.check_choice(DEVICE, spec, 7)


def test_a_row_of_nothing_still_names_experts_that_exist() -> None:
    """Rows of padding hold whatever was there."""
    logits = torch.full((1, 5), float("nan"), device=DEVICE)
    chosen, _ = cases.route.choose(RoutedRows(RouterSpec(5, 2), logits, None, None, None))
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 5


@pytest.mark.parametrize(
    ("tokens", "experts", "rows"), [(1, 4, 16), (40, 3, 16), (9, 40, 16), (700, 5, 16), (5000, 3, 64)]
)
def test_pairs_stand_by_expert_in_blocks(tokens: int, experts: int, rows: int) -> None:
    chosen = torch.randint(0, experts, (tokens, 2), dtype=torch.int32)
    cases.check_blocks(DEVICE, chosen, experts, rows)


def test_there_is_room_for_the_worst_choice() -> None:
    for pairs, experts, rows in ((1, 8, 16), (17, 8, 16), (512, 128, 16), (64, 2, 64)):
        spread = [pairs // min(pairs, experts)] * min(pairs, experts)
        spread[0] += pairs - sum(spread)
        assert sum(-(-count // rows) for count in spread) <= most_blocks(pairs, experts, rows)


@pytest.mark.parametrize(
    ("dtype", "clamp", "biased"), [(torch.float32, None, False), (torch.bfloat16, Clamp(0.7, 1.702), True)]
)
@pytest.mark.parametrize("sizes", [None, SMALL, COPIED], ids=["few", "loaded", "copied"])
def test_experts_agree(dtype: torch.dtype, sizes: ExpertShape | None, clamp: Clamp | None, biased: bool) -> None:
    tokens = 3 if sizes is None else 9  # a program for every pair of token and expert, or blocks of pairs
    cases.check_experts(DEVICE, dtype, tokens, RouterSpec(6, 2), 40, 24, clamp=clamp, biased=biased, sizes=sizes)


def test_blocks_grow_with_the_rows_of_an_expert() -> None:
    assert [expert_choice(tokens * 8, 128).up.rows for tokens in (8, 256, 512, 8192)] == [16, 32, 64, 128]
    assert all(choice.up.rows == choice.down.rows for choice in CHOICES)


def test_shapes_fit_the_shared_memory_of_the_chip() -> None:
    wide = CHOICES[-2].up
    assert suited(wide, True, 2, 227 << 10, True) == wide
    older = suited(wide, True, 2, 163 << 10, False)
    assert (older.stages, older.depth, older.copied) == (3, 64, False)
    assert suited(wide, True, 4, 99 << 10, False) == ExpertShape(128, 128, 16, 8, 3)
