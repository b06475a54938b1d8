"""The bound on inter-token latency holds on steady, noisy and changing machines."""

from __future__ import annotations

import pytest

from quire.scheduler.pacing import StepPacer
from quire.scheduler.plan import StepPlan
from quire.scheduler.step_cost import StepLoad
from tests.scheduler.timed import Clock, Cost, linear_cost, noisy, play, roofline_cost, workload


def share_within(gaps: list[float], bound: float) -> float:
    return sum(gap <= bound * (1 + 1e-9) for gap in gaps) / len(gaps)


@pytest.mark.parametrize("bound", [0.3, 0.15, 0.1])
@pytest.mark.parametrize("seed", [1, 2])
def test_on_a_steady_machine_every_gap_is_within_the_bound(bound: float, seed: int) -> None:
    free = play(workload(seed), linear_cost())
    paced = play(workload(seed), linear_cost(), bound)
    assert share_within(free.gaps(), bound) < 0.97 and max(free.gaps()) > 5 * bound, "this tests nothing"
    # The first few gaps teach what a chunk costs.
    assert share_within(paced.gaps(), bound) > 0.995 and max(paced.gaps(after=5.0)) <= bound
    assert paced.seconds < 1.3 * free.seconds


@pytest.mark.parametrize(("cost", "least"), [
    (roofline_cost(), 0.99),
    (linear_cost(pair=2e-5), 0.99),
    (noisy(linear_cost(), 1, 0.05), 0.98),
    (noisy(linear_cost(), 2, 0.15), 0.96),
    (noisy(roofline_cost(), 3, 0.1, outliers=0.01), 0.97),
], ids=["roofline", "attention", "noise", "much noise", "outliers"])
def test_on_other_machines_nearly_every_gap_is(cost: Cost, least: float) -> None:
    assert share_within(play(workload(4), cost, 0.15).gaps(), 0.15) >= least


def test_a_machine_that_becomes_half_as_fast_is_followed() -> None:
    fast, slow, steps = linear_cost(), linear_cost(0.04, 0.006, 0.002, 2e-6), [0]

    def cost(plan: StepPlan) -> float:
        steps[0] += 1
        return (fast if steps[0] < 300 else slow)(plan)

    played = play(workload(5, rate=0.3), cost, 0.15)
    assert len(played.plans) > 600
    late = sorted(t for times in played.tokens.values() for t in times)[len(played.plans) // 2]
    assert share_within(played.gaps(after=late), 0.15) > 0.98


def test_chunks_are_as_large_as_the_bound_allows() -> None:
    played = play([(0.0, 64, 400), (1.0, 4000, 5)], linear_cost(0.02, 0.003, 0.0, 0.0), 0.2)
    chunks = [plan.num_tokens - 1 for plan in played.plans if len(plan.entries) == 2 and plan.num_tokens > 2]
    most = int((0.2 - 0.02) / 0.003) - 1
    assert max(chunks) <= most
    assert sorted(chunks)[len(chunks) // 2] > 0.85 * most


def test_with_nobody_decoding_a_prompt_is_computed_whole() -> None:
    played = play([(0.0, 2000, 2)], linear_cost(), 0.05)
    assert played.plans[0].num_tokens == 2000


def test_a_bound_that_even_one_stream_breaks_does_not_stop_the_engine() -> None:
    played = play(workload(6, count=10), linear_cost(), 0.001)
    assert len(played.tokens) == 10
    assert any(len(plan.entries) > 1 for plan in played.plans), "requests should still share steps"


def test_requests_wait_rather_than_make_every_step_too_long() -> None:
    cost = linear_cost(0.01, 0.001, 0.01, 0.0)
    together = play([(0.0, 20, 100)] * 16, cost, 0.065)
    sizes = [len(plan.entries) for plan in together.plans]
    assert max(sizes) <= 6, "one may join too early, while it is being learned what a sequence costs"
    assert 4 <= max(sizes[len(sizes) // 2:]) <= 5


def test_prompts_whose_tokens_are_all_scored_get_smaller_chunks() -> None:
    clock = Clock()
    pacer = StepPacer(0.2, clock)
    for tokens, rows in [(64, 1), (64, 64), (128, 1), (128, 128), (1, 1), (2, 2), (96, 1), (96, 96)] * 4:
        load = StepLoad()
        load.add(0, tokens, rows, decode=False)
        load.add(100, 1, 1, decode=True)
        pacer.submitted(load)
        clock.now += 0.02 + 0.001 * tokens + 0.001 * rows
        pacer.done()
    streaming = StepLoad()
    streaming.add(100, 1, 1, decode=True)
    assert 60 < pacer.room(streaming, 0, 1000, scored=True) * 2 < pacer.room(streaming, 0, 1000) * 1.2


def test_with_steps_in_flight_a_step_is_charged_from_the_result_before_it() -> None:
    clock = Clock()
    pacer = StepPacer(0.2, clock)
    observed: list[float] = []
    pacer._model.observe = lambda load, seconds: observed.append(seconds)  # type: ignore[method-assign]
    load = StepLoad()
    load.add(10, 1, 1, decode=True)
    prompt = StepLoad()
    prompt.add(0, 10, 1, decode=False)
    pacer.submitted(prompt)
    pacer.submitted(load)
    clock.now = 0.5
    pacer.done()
    pacer.submitted(load)
    clock.now = 0.6
    pacer.done()
    clock.now = 0.8
    pacer.done()
    assert observed == pytest.approx([0.5, 0.1, 0.2])
