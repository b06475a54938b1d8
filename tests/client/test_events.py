"""Events come out whole, however the bytes were cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from quire.client.events import EventParser

STREAM = b'data: {"a": 1}\n\n: a comment\n\ndata: two\r\ndata: lines\r\n\r\ndata:[DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int]) -> None:
    parser, found = EventParser(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += parser.feed(STREAM[start:end])
    assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


def test_an_event_that_is_not_complete_is_held_back() -> None:
    assert EventParser().feed(b"data: half") == []
