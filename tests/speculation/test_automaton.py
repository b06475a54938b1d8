"""The suffix automaton against a search by brute force, and that a token costs the same whatever the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.speculation.automaton import SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest_earlier(text: list[int]) -> int:
    """Length of the longest suffix that also occurs earlier."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        if any(text[i : i + length] == suffix for i in range(len(text) - length)):
            return length
    return 0


@given(TEXTS)
def test_the_match_is_the_longest_and_its_place_is_one_where_it_stood(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        automaton.add(token)
        length, place = automaton.own_match()
        assert length == longest_earlier(text[:count])
        if length:
            assert length <= place < count
            assert text[place - length : place] == text[count - length : count]


@given(TEXTS, TEXTS)
def test_another_text_is_followed_by_its_longest_suffix_that_occurs(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    state = length = 0
    for count, token in enumerate(other, start=1):
        state, length = automaton.step(state, length, token)
        seen = other[:count]
        found = [n for n in range(1, count + 1)
                 if any(text[i : i + n] == seen[count - n :] for i in range(len(text) - n + 1))]
        assert length == max(found, default=0)
        if length:
            place = automaton.place(state)
            assert text[place - length : place] == seen[count - length :]


@given(TEXTS)
def test_states_and_so_memory_are_linear_in_the_text(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert automaton.num_states <= max(1, 2 * len(text))


def test_the_latest_of_several_occurrences_is_continued() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    length, place = automaton.own_match()
    assert (length, automaton.continuation(place, 1, repeat=True)) == (3, (4,))


def test_a_period_is_continued_past_the_end_of_the_text() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([5, 1, 2, 3, 1, 2, 3, 1])
    _, place = automaton.own_match()
    assert automaton.continuation(place, 7, repeat=True) == (2, 3, 1, 2, 3, 1, 2)


def test_nothing_is_continued_across_a_separator() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, -1, 7, 8])
    state, length = automaton.step(*automaton.step(0, 0, 1), 2)
    assert length == 2
    assert automaton.continuation(automaton.place(state), 5, repeat=False) == (3,)
    assert automaton.step(state, length, -1) == (0, 0)
