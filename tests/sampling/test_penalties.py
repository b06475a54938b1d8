"""Token history: incremental counts equal counts made at once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.penalties import TokenHistory

tokens = st.lists(st.integers(0, 40), max_size=120)


@given(tokens, tokens, tokens)
def test_counts_are_of_the_output_and_ids_of_prompt_and_output(prompt, past, new):
    history = TokenHistory(prompt, past)
    before = history.copy()
    for token in new:
        history.append(token)
    assert dict(zip(before.ids.tolist(), before.counts.tolist(), strict=True)) == {
        **dict.fromkeys(prompt, 0),
        **Counter(past),
    }
    expected = {**dict.fromkeys(prompt, 0), **Counter(past + new)}
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == expected
    assert len(history) == len(expected)
