"""Neighbouring blocks become one write, and no block is lost or added by it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import KVTransferError
from quire.kvtransfer.joined import JoinedRanges
from quire.kvtransfer.runs import BlockRun, merged_range, merged_runs, token_runs


def test_five_blocks_in_two_writes() -> None:
    assert merged_runs([5, 6, 7, 12, 13], [2, 3, 4, 8, 9]) == [BlockRun(5, 2, 3), BlockRun(12, 8, 2)]
    assert merged_runs([5, 6, 7], [2, 3, 9]) == [BlockRun(5, 2, 2), BlockRun(7, 9, 1)]
    assert merged_runs([], []) == []
    with pytest.raises(KVTransferError):
        merged_runs([1], [])


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_runs_are_the_pairs_and_cannot_be_fewer(pairs: list[tuple[int, int]]) -> None:
    runs = merged_runs([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert [(run.source + i, run.target + i) for run in runs for i in range(run.count)] == pairs
    breaks = sum((a[0] + 1, a[1] + 1) != b for a, b in itertools.pairwise(pairs))
    assert len(runs) == breaks + bool(pairs)


@given(st.permutations(range(12)), st.integers(1, 5), st.data())
def test_tokens_are_found_where_their_blocks_are(table: list[int], size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(table) * size - 1))
    end = data.draw(st.integers(start, len(table) * size))
    runs = token_runs(table, start, end, size)
    found = [(run.block + i // run.length, run.offset + i % run.length, run.at + i)
             for run in runs for i in range(run.count * run.length)]
    assert found == [(table[t // size], t % size, t - start) for t in range(start, end)]
    with pytest.raises(KVTransferError):
        token_runs(table, start, len(table) * size + 1, size)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_ranges_are_what_was_added(added: list[tuple[int, int]]) -> None:
    ranges: list[tuple[int, int]] = []
    for start, end in added:
        ranges = merged_range(ranges, start, end)
    assert {t for a, b in ranges for t in range(a, b)} == {t for a, b in added for t in range(a, b)}
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20))), st.integers(1, 3))
def test_tokens_count_when_everybody_has_reported_them(reports: list[tuple[int, int, int]], ranks: int) -> None:
    joined, told = JoinedRanges(), set[int]()
    seen: list[set[int]] = [set() for _ in range(3)]
    for who, start, end in reports:
        if start < end and who < ranks:
            complete = joined.add(who, start, end, range(ranks))
            told |= {token for a, b in complete for token in range(a, b)}
            seen[who] |= set(range(start, end))
            assert told == set.intersection(*seen[:ranks])
