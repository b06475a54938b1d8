"""Workloads repeat from their seed, and every token of a played one has its time."""

from __future__ import annotations

import pytest

from quire import LLM
from quire.bench.scheduling.arrivals import arrivals, play, quantile


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    one, two, other = (arrivals(20, 2.0, (5, 50), (3, 9), 1000, seed) for seed in (1, 1, 2))
    assert one == two != other
    assert all(5 <= len(r.prompt) <= 50 and 3 <= r.num_output <= 9 and max(r.prompt) < 1000 for r in one)
    assert [r.at for r in one] == sorted(r.at for r in one)


def test_requests_come_at_about_the_rate_asked_for() -> None:
    last = arrivals(2000, 4.0, (1, 1), (1, 1), 10, 0)[-1].at
    assert last == pytest.approx(500, rel=0.1)


def test_every_token_has_a_time_after_the_arrival_of_its_request(dummy_model: str) -> None:
    work = arrivals(5, 20.0, (5, 30), (2, 6), 512, 0)
    with LLM(dummy_model, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64) as llm:
        stories = play(llm, work)
    for request, story in zip(work, stories, strict=True):
        assert len(story.tokens) == request.num_output and story.tokens == sorted(story.tokens)
        assert story.arrived == request.at and request.at <= story.scheduled <= story.tokens[0]
        assert story.first_token_time > 0 and len(story.gaps) == request.num_output - 1


def test_a_quantile_is_the_smallest_value_that_covers_its_share() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [quantile(values, q) for q in (0.5, 0.99, 1.0, 0.0)] == [50.0, 99.0, 100.0, 1.0]
    assert quantile([7.0], 0.99) == 7.0
