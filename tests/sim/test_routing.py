"""Routing policies in simulated time: what a cache-aware router is worth, on conversations that come back."""

from __future__ import annotations

import random

import pytest

from quire.bench.serving.load_report import percentile
from quire.router.policies import POLICIES, make_policy
from quire.sim.routing import Arrival, Outcome, Shape, simulate


def conversations(number: int, seed: int, rate: float) -> list[Arrival]:
    """Users who come back with all that was said before, and a few openings that many share."""
    dice = random.Random(seed)
    talks: list[list[int]] = []
    fresh, found = 1000, []
    for turn in range(number):
        if talks and dice.random() < 0.6:
            talk = dice.choice(talks[-40:])
        else:
            opening = dice.randrange(4)
            talk = [10 * opening + place for place in range(4)]
            talks.append(talk)
        talk += range(fresh, fresh + dice.randrange(2, 12))
        fresh = talk[-1] + 1
        found.append(Arrival(turn / rate, list(talk), dice.randrange(1, 20)))
    return found


def played(name: str, rate: float, seed: int = 0, number: int = 1500) -> Outcome:
    return simulate(make_policy(name), conversations(number, seed, rate), 8, Shape(blocks=400))


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_gets_its_first_token(name: str) -> None:
    found = played(name, 60.0, number=400)
    assert len(found.first_tokens) == 400 and min(found.first_tokens) > 0
    assert 0 < found.found_tokens < found.prompt_tokens
    assert found.found_tokens == played(name, 60.0, number=400).found_tokens, "another run finds the same"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [20.0, 60.0, 90.0])
def test_cache_aware_finds_more_and_answers_no_later(seed: int, rate: float) -> None:
    turns, aware = played("round-robin", rate, seed), played("cache-aware", rate, seed)
    assert aware.found_tokens > 1.5 * turns.found_tokens
    assert percentile(aware.first_tokens, 99) <= percentile(turns.first_tokens, 99)
    assert percentile(aware.first_tokens, 50) <= percentile(turns.first_tokens, 50)


def test_a_prefix_that_everybody_asks_for_does_not_pile_up_on_one_replica() -> None:
    same = [Arrival(number / 200.0, list(range(30)), 2) for number in range(800)]
    found, load = simulate(make_policy("cache-aware"), same, 8), simulate(make_policy("least-loaded"), same, 8)
    assert percentile(found.first_tokens, 99) <= 2 * percentile(load.first_tokens, 99)
