"""The cost model finds the formula behind the times it sees, in spite of noise, outliers and change."""

from __future__ import annotations

import random

import pytest

from quire.scheduler.step_cost import StepCostModel, StepLoad, chunk_pairs


def some_load(rng: random.Random) -> StepLoad:
    load = StepLoad()
    for _ in range(rng.randint(0, 8)):
        load.add(rng.randint(10, 1000), 1, 1, decode=True)
    if rng.random() < 0.7 or not load.tokens:
        load.add(rng.randint(0, 1000), rng.randint(2, 200), rng.randint(0, 1), decode=False)
    return load


def true_cost(load: StepLoad) -> float:
    return 0.02 + 0.003 * load.tokens + 0.002 * load.logit_rows + 1e-6 * load.pairs


def worst_error(model: StepCostModel, rng: random.Random, factor: float = 1.0) -> float:
    loads = [some_load(rng) for _ in range(50)]
    return max(abs(model.predict(load) / (factor * true_cost(load)) - 1) for load in loads)


def test_chunk_pairs_counts_each_query_with_all_keys_up_to_itself() -> None:
    for start, tokens in [(0, 1), (0, 5), (7, 3), (100, 1)]:
        assert chunk_pairs(start, tokens) == sum(start + i + 1 for i in range(tokens))


def test_exact_times_give_an_exact_model() -> None:
    rng, model = random.Random(1), StepCostModel(0.1)
    for _ in range(150):
        load = some_load(rng)
        model.observe(load, true_cost(load))
    assert worst_error(model, rng) < 0.02


@pytest.mark.parametrize(("spread", "outliers", "allowed"), [(0.05, 0.0, 0.08), (0.05, 0.05, 0.25)])
def test_noise_and_outliers_move_it_little(spread: float, outliers: float, allowed: float) -> None:
    rng, model = random.Random(2), StepCostModel(0.1)
    for _ in range(300):
        load = some_load(rng)
        slow = 5.0 if rng.random() < outliers else 1.0
        model.observe(load, true_cost(load) * rng.lognormvariate(0.0, spread) * slow)
    assert worst_error(model, rng) < allowed


def test_a_changed_machine_is_learned_anew() -> None:
    rng, model = random.Random(3), StepCostModel(0.1)
    for i in range(600):
        load = some_load(rng)
        model.observe(load, true_cost(load) * (1.0 if i < 300 else 3.0))
    assert worst_error(model, rng, 3.0) < 0.05


def test_no_coefficient_is_ever_negative() -> None:
    rng, model = random.Random(4), StepCostModel(0.1)
    for _ in range(100):
        model.observe(some_load(rng), rng.uniform(0.001, 1.0))
        assert all(weight >= 0.0 for weight in model._weights)


def test_predicting_with_a_chunk_is_predicting_the_load_with_it() -> None:
    rng, model = random.Random(5), StepCostModel(0.1)
    for _ in range(50):
        load = some_load(rng)
        model.observe(load, true_cost(load))
    load = some_load(rng)
    expected = model.predict_with(load, 30, 17, 1)
    load.add(30, 17, 1, decode=False)
    assert model.predict(load) == pytest.approx(expected)
