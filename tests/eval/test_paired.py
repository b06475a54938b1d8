"""Paired differences and KL are what their definitions say."""

from __future__ import annotations

import math

import pytest
import torch

from quire.bench.cpu.accuracy import compared
from quire.eval.paired import Mean, kl_by_position, paired_difference
from quire.eval.tasks import Result


def test_a_difference_counts_only_the_questions_on_which_answers_differ() -> None:
    mine = [True] * 50 + [False] * 46 + [True, True, False, False]
    other = [True] * 50 + [False] * 46 + [False, False, False, True]
    found = paired_difference(mine, other)
    assert found.value == pytest.approx(0.01)
    differences = torch.tensor([0.0] * 96 + [1, 1, 0, -1], dtype=torch.float64)
    assert found.error == pytest.approx(float(differences.std() / 10))


def test_the_error_of_one_number_is_not_known() -> None:
    assert Mean.of([3.0]) == Mean(3.0, math.inf)


def test_kl_is_that_of_torch_and_zero_of_equal_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    mine, other = (torch.randn(5, 97, generator=generator) for _ in range(2))
    own, reference = (each.double().log_softmax(-1) for each in (mine, other))
    expected = torch.nn.functional.kl_div(own, reference, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(kl_by_position(mine, other), expected)
    assert torch.equal(kl_by_position(mine, mine + 0.0), torch.zeros(5, dtype=torch.float64))


def test_a_line_gives_points_and_changed_answers() -> None:
    reference = Result("arc_easy", {}, [0, 1, 2, 3], 0, [True, True, False, False])
    mine = Result("arc_easy", {}, [0, 2, 1, 3], 0, [True, False, False, False])
    found = compared(mine, reference)
    assert found["points"] == -25.0 and found["other_answers"] == 2
    assert found["points_error"] == pytest.approx(25.0)
