"""What becomes of an entry's drafts, from the draws at their places."""

from __future__ import annotations

from quire.sampling.sampler import FAILURES, NOT_FINITE, OK
from quire.sampling.token_logprobs import TokenLogprobs, unpack_all
from quire.scheduler.plan import EntryResult
from quire.worker.outcomes import along_drafts, drawn_result


def places(*tokens: int | None) -> list[EntryResult]:
    return [drawn_result(token or 0, NOT_FINITE if token is None else OK) for token in tokens]


def test_drafts_equal_to_what_was_drawn_are_kept_up_to_the_first_that_is_not() -> None:
    for drafts, drawn, tokens in [
        ((1, 2, 3), (1, 2, 3, 4), [1, 2, 3, 4]),
        ((1, 2, 3), (1, 5, 3, 4), [1, 5]),
        ((1, 2, 3), (9, 2, 3, 4), [9]),
        ((), (7,), [7]),
    ]:
        result = along_drafts(drafts, places(*drawn))
        assert (result.tokens, result.num_drafts, result.error) == (tokens, len(drafts), None)


def test_a_place_that_was_not_drawn_ends_it_even_where_the_token_is_the_draft() -> None:
    assert along_drafts((1, 2, 3), places(1, 2)).tokens == [1, 2]


def test_a_failed_draw_ends_it_and_is_told_only_where_nothing_stands_before_it() -> None:
    later = along_drafts((1, 0, 3), places(1, None, 3, 4))
    assert (later.tokens, later.error) == ([1], None)
    first = along_drafts((0, 2), places(None, 2, 3))
    assert (first.tokens, first.error) == ([], FAILURES[NOT_FINITE])


def test_log_probabilities_follow_the_tokens() -> None:
    mine = places(1, 2, 9)
    for place, result in enumerate(mine):
        result.logprobs = [TokenLogprobs(place, -1.0, 1, [], []).pack()]
    result = along_drafts((1, 5), mine)
    assert result.tokens == [1, 2]
    assert [one.token_id for one in unpack_all(result.logprobs or [])] == [0, 1]
