"""What steps of some sizes take, learned from others."""

from __future__ import annotations

import random

import pytest

from quire.speculation.costs import StepCosts
from quire.speculation.device_speculator import DeviceSpeculator


def linear(tokens: int) -> float:
    """SmolLM2 in float32 on two cores, from some ten tokens on."""
    return 3.1e-3 + 0.7e-3 * tokens


@pytest.mark.parametrize("sizes", [(16, 17, 18, 19), (16, 18, 30), (40, 41, 43), (70, 71, 90)])
def test_steps_a_little_larger_do_not_make_large_ones_cheap(sizes: tuple[int, ...]) -> None:
    costs, dice = StepCosts(), random.Random(1)
    for _ in range(300):
        size = dice.choice(sizes)
        costs.observe(size, linear(size) * dice.uniform(0.97, 1.03))
    for size in sizes:
        assert costs.estimate(size) == pytest.approx(linear(size), rel=0.05)
    assert costs.estimate(max(sizes) + 3) == pytest.approx(linear(max(sizes) + 3), rel=0.1)


@pytest.mark.parametrize(("sizes", "larger"), [((1, 2, 3, 5, 9, 16, 32, 64), 288), ((1, 32, 64), 100), ((32, 48), 96)])
def test_steps_larger_than_any_grow_as_the_last_ones_did(sizes: tuple[int, ...], larger: int) -> None:
    """The first tokens of a step cost next to nothing where reading the weights is all that counts."""
    def bent(tokens: int) -> float:
        return 0.020 * max(1.0, tokens / 24)

    costs = StepCosts()
    for size in sizes:
        costs.observe(size, bent(size))
    assert costs.estimate(larger) == pytest.approx(bent(larger))


def test_a_single_size_says_what_a_token_costs() -> None:
    costs = StepCosts()
    costs.observe(8, 0.01)
    assert costs.estimate(16) == pytest.approx(0.02)


def test_where_steps_are_padded_they_count_as_the_larger_size() -> None:
    costs = StepCosts(padded=True)
    for _ in range(50):
        costs.observe(16, 1.0)
        costs.observe(17, 1.4)
        costs.observe(23, 1.4)
    assert costs.estimate(24) == pytest.approx(1.4, rel=0.02)


def test_passes_of_a_model_that_drafts_are_padded_on_a_gpu_too() -> None:
    costs = DeviceSpeculator(3, gpu=True).drafting
    for _ in range(50):
        for size, seconds in ((16, 1.0), (17, 1.4), (23, 1.4)):
            costs.observe(size, seconds)
    assert costs.estimate(24) == pytest.approx(1.4, rel=0.02)


def test_sizes_just_above_an_entry_say_little_of_the_next() -> None:
    for seed in range(20):
        costs, dice = StepCosts(), random.Random(seed)
        for size in (*range(1, 17), 24, 32, 40, 48, 56, 64):
            costs.observe(size, linear(size))
        for _ in range(20):
            costs.observe(65, linear(65) * dice.uniform(0.93, 1.07))
        assert costs.estimate(96) == pytest.approx(linear(96), rel=0.1)
        costs.observe(96, 1.2 * linear(96))
        assert costs.estimate(64) == pytest.approx(linear(64), rel=0.1)
        assert costs.estimate(96) == pytest.approx(1.2 * linear(96))


def test_one_slow_step_does_not_make_larger_ones_dear_for_good() -> None:
    costs = StepCosts()
    costs.observe(16, linear(16))
    costs.observe(17, 5 * linear(17))
    assert costs.estimate(24) <= 1.2 * linear(16) * 24 / 16
    for _ in range(20):
        costs.observe(18, linear(18))
    assert costs.estimate(24) == pytest.approx(linear(24), rel=0.05)
