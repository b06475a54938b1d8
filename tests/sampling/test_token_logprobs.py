"""Records of log-probabilities: what is packed is what is read, by single tokens and by whole steps alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.logprob_columns import pack_columns
from quire.sampling.logprobs import PackedLogprobs
from quire.sampling.token_logprobs import TokenLogprobs, is_record, logprob_of, unpack_all

ids = st.integers(0, (1 << 31) - 1)
values = st.floats(-1e4, 0, width=32)


@st.composite
def steps(draw: st.DrawFn) -> list[TokenLogprobs]:
    width = draw(st.integers(0, 4))
    return draw(st.lists(st.builds(
        TokenLogprobs, ids, values, ids, st.lists(ids, min_size=width, max_size=width),
        st.lists(values, min_size=width, max_size=width)), min_size=1, max_size=5))


def packed(rows: list[TokenLogprobs], counts: list[int]) -> list[bytes]:
    width = len(rows[0].top_ids)
    tops = np.array([row.top_logprobs for row in rows], np.float32).reshape(len(rows), width)
    return pack_columns(
        np.array([row.token_id for row in rows]), np.array([row.logprob for row in rows], np.float32),
        np.array([row.rank for row in rows]), np.array([row.top_ids for row in rows], np.int64).reshape(tops.shape),
        tops, counts)


@given(steps(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_step_packed_at_once_is_its_rows_packed_one_by_one(rows: list[TokenLogprobs], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 6)) for _ in rows]
    cut = [TokenLogprobs(row.token_id, row.logprob, row.rank, row.top_ids[:count], row.top_logprobs[:count])
           for row, count in zip(rows, counts, strict=True)]
    records = packed(rows, counts)
    assert records == [row.pack() for row in cut] and unpack_all(records) == cut
    assert [logprob_of(record) for record in records] == [row.logprob for row in rows]
    assert all(is_record(record) for record in records)


def test_the_likeliest_end_where_a_grammar_allows_no_more() -> None:
    rows = [TokenLogprobs(1, -0.5, 1, [1, 2, 3], [-0.5, -1.0, -math.inf]),
            TokenLogprobs(4, -math.inf, 9, [7, 8, 9], [-math.inf] * 3)]
    found = unpack_all(packed(rows, [3, 3]))
    assert [one.top_ids for one in found] == [[1, 2], []] and found[1].logprob == -math.inf
    assert [one.top_ids for one in unpack_all(packed(rows, [1, 3]))] == [[1], []]


def test_reports_of_a_kernel_are_read_by_the_rows_that_asked() -> None:
    words = torch.zeros(4, 3 + 2 * 2, dtype=torch.int32)
    for row in range(4):
        words[row, :5] = torch.tensor([10 + row, 0, 1 + row, 20 + row, 30 + row])
        words.view(torch.float32)[row, [1, 5, 6]] = torch.tensor([-0.5 - row, -1.0, -2.0])
    found = unpack_all(PackedLogprobs([3, 1], [1, 2], words, 2).records())
    assert found == [TokenLogprobs(13, -3.5, 4, [23], [-1.0]), TokenLogprobs(11, -1.5, 2, [21, 31], [-1.0, -2.0])]


@pytest.mark.parametrize("size", [0, 15, 17, 27])
def test_other_bytes_are_no_record(size: int) -> None:
    assert not is_record(bytes(size)) and is_record(bytes(16)) and is_record(bytes(28))
