"""Thoughts are told from answers, however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.reasoning import ReasoningSplitter

CASES = [
    (False, "<think>\nhm, 2 < 3\n</think>\n\nYes.", "hm, 2 < 3", "Yes."),
    (True, "hm\n\nwell\n</think>\n\nYes. </think>", "hm\n\nwell", "Yes. </think>"),
    (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    (False, "<thin air", "", "<thin air"),
    (False, "\n\n<think></think>x", "", "x"),
    (False, "<think>never ends </thin", "never ends </thin", ""),
    (False, "  plain", "", "  plain"),
    (True, "", "", ""),
]


@pytest.mark.parametrize(("thinking", "text", "thought", "answer"), CASES)
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=12))
def test_thoughts_and_answer_are_the_same_however_the_text_is_cut(
        thinking: bool, text: str, thought: str, answer: str, cuts: list[int]) -> None:
    splitter = ReasoningSplitter(thinking)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [splitter.push(text[a:b]) for a, b in itertools.pairwise(places)]
    pieces.append(splitter.finish())
    assert "".join(piece for piece, _ in pieces) == thought
    assert "".join(piece for _, piece in pieces) == answer
