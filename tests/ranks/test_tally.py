"""A transfer has come as far as the slowest rank, and ends once, when all of them have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.ranks.tally import TransferTally
from quire.scheduler.plan import HOST, BlockMove, TransferReport, TransferStart


@given(st.integers(1, 4), st.integers(0, 5), st.data())
def test_reports_of_ranks_in_any_order_make_one_story(num_ranks: int, size: int, data: st.DataObject) -> None:
    tally = TransferTally(num_ranks)
    tally.start([TransferStart(3, HOST, True, [BlockMove(0, i, i) for i in range(size)])])
    # Every rank reports some of its progress and then its end, perhaps with an error.
    stories = []
    for _ in range(num_ranks):
        failed = data.draw(st.booleans())
        end = data.draw(st.integers(0, size)) if failed else size
        steps = sorted(data.draw(st.lists(st.integers(0, end), max_size=3)))
        stories.append([TransferReport(3, step) for step in steps]
                       + [TransferReport(3, end, True, "no" if failed else None)])
    done, told = [0] * num_ranks, []
    while any(stories):
        rank = data.draw(st.sampled_from([rank for rank, story in enumerate(stories) if story]))
        report = stories[rank].pop(0)
        done[rank] = max(done[rank], report.num_done)
        whole = tally.take(rank, report)
        if whole is not None:
            assert whole.num_done == min(done) and whole.finished == (not any(stories))
            told.append(whole)
    assert [one.finished for one in told].count(True) == 1 and told[-1].finished
    assert len({one.num_done for one in told[:-1]}) == len(told) - 1
    assert tally.take(0, TransferReport(3, size, True)) is None and len(tally) == 0


def test_what_is_under_way_when_ranks_are_lost_ends_as_failed() -> None:
    tally = TransferTally(2)
    tally.start([TransferStart(1, HOST, True, []), TransferStart(2, HOST, True, [])])
    tally.take(0, TransferReport(1, 4))
    tally.take(1, TransferReport(1, 2))
    assert tally.give_up("gone") == [TransferReport(1, 2, True, "gone"), TransferReport(2, 0, True, "gone")]
    assert tally.give_up("gone") == []
