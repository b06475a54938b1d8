"""The rules of beam search on made-up likelihoods."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.sampling.params import BeamSearchParams
from quire.scheduler.beam import BeamSearch, BeamStep

EOS = frozenset([0])


def search(width: int, **options: Any) -> BeamSearch:
    return BeamSearch(BeamSearchParams(beam_width=width, max_tokens=9, **options), EOS)


def test_the_likeliest_continuations_go_on_wherever_they_come_from() -> None:
    beams = search(2)
    beams.report(0, [(5, -0.1), (6, -1.0), (7, -2.0), (8, -3.0)])
    assert beams.advance(9) == [BeamStep(0, 5, -0.1), BeamStep(0, 6, -1.0)]
    assert not beams.report(0, [(1, -3.0), (2, -4.0), (3, -5.0), (4, -6.0)])
    assert beams.report(1, [(1, -0.5), (2, -0.6), (3, -7.0), (4, -8.0)])
    assert [(c.parent, c.token) for c in beams.advance(9)] == [(1, 1), (1, 2)]


def test_an_end_outside_the_best_width_is_not_kept() -> None:
    beams = search(1)
    beams.report(0, [(5, -0.1), (0, -0.2)])
    assert [c.token for c in beams.advance(9)] == [5]
    assert beams.hypotheses == []


def test_the_length_penalty_divides_by_a_power_of_the_length() -> None:
    beams = search(1, length_penalty=2.0, early_stopping=True)
    beams.report(0, [(5, -1.0), (6, -9.0)])
    beams.advance(9)
    beams.report(0, [(0, -1.0), (6, -9.0)])
    assert beams.advance(9) == [] and beams.done
    found = beams.hypotheses[0]
    assert (found.tokens, found.cumulative_logprob, found.score, found.ended) == ([5, 0], -2.0, -0.5, True)


@pytest.mark.parametrize(("early", "done"), [(True, True), (False, True), ("never", False)])
def test_when_a_search_may_end(early: bool | str, done: bool) -> None:
    beams = search(1, length_penalty=1.0, early_stopping=early)
    beams.report(0, [(0, -1.0), (5, -1.1)])
    beams.advance(9)
    # At its present length the running beam loses, at nine tokens it might win.
    assert beams.done is done


def test_everything_ends_at_the_longest_length() -> None:
    beams = search(2)
    beams.report(0, [(5, -0.1), (6, -1.0), (7, -2.0), (8, -3.0)])
    assert beams.advance(1) == [] and beams.done
    assert [(h.tokens, h.ended) for h in beams.hypotheses] == [([5], False), ([6], False)]


def test_beams_that_lost_their_place_report_again() -> None:
    beams = search(2)
    beams.report(0, [(5, -0.1), (6, -1.0), (7, -2.0), (8, -3.0)])
    beams.advance(9)
    beams.report(1, [(1, -0.5)] * 4)
    beams.forget_reports()
    assert not beams.report(0, [(1, -0.5)] * 4)
    assert beams.report(1, [(1, -0.5)] * 4)


@pytest.mark.parametrize("value", ["sometimes", 1, 0, None, 2.0])
def test_early_stopping_is_one_of_three(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="early_stopping"):
        BeamSearchParams(beam_width=2, max_tokens=4, early_stopping=value)
