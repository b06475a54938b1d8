"""Which texts a draft head can say something about, when some hidden states were not kept for it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from quire.scheduler.plan import HOST, BlockCopy, BlockMove, PlanEntry, TransferStart
from quire.worker.block_flags import BlockFlags
from quire.worker.head_progress import HeadProgress

SIZE = 4


def progress(*rows: list[int]) -> HeadProgress:
    return HeadProgress(np.array(rows), SIZE, 0, num_blocks=12, num_host_blocks=8)


def tokens(row: int, start: int, count: int = 1) -> PlanEntry:
    return PlanEntry(row, start, count, sample=True)


def asked(row: int, start: int) -> PlanEntry:
    return PlanEntry(row, start, 2, sample=True, device_drafts=1)


def test_a_text_with_a_hole_is_refused_and_others_are_not() -> None:
    found = progress([0, 1, 2, 3], [4, 5, 6, 7])
    found.written([tokens(0, 0, 6), tokens(1, 0, 6)])
    assert not found.refuses(asked(0, 6))
    found.computed(tokens(0, 0, 7))
    found.written([tokens(0, 6), tokens(1, 6)], left_out=True)
    found.written([tokens(1, 4, 3)])  # computed again
    assert found.refuses(asked(0, 7)) and not found.refuses(asked(1, 7))


def test_a_hole_stays_when_its_block_is_written_on_and_ends_when_it_is_written_anew() -> None:
    found = progress([0, 1, 2, 3], [1, 4, 5, 6])
    found.written([tokens(0, 0, 6)])
    found.written([tokens(0, 6)], left_out=True)
    for place in (7, 8):
        found.written([tokens(0, place)])
    assert found.refuses(asked(0, 9))
    found.written([tokens(1, 0)])  # block 1 is another sequence's now
    assert not found.refuses(asked(1, 1))
    found.written([tokens(0, 6)], left_out=True)
    found.written([tokens(0, 3, 4)])  # computed again, from block 1 on
    found.restart(0)
    assert not found.refuses(asked(0, 7))


def test_a_hole_goes_where_its_block_goes() -> None:
    found = progress([0, 1], [0, 2], [0, 3], [4, 5])
    found.written([tokens(0, 0, 4)])
    found.written([tokens(0, 4)], left_out=True)
    found.written([tokens(3, 0, 5)])
    found.copied([BlockCopy(0, source=1, target=2), BlockCopy(1, source=5, target=1)])
    assert found.refuses(asked(1, 5)) and found.refuses(asked(0, 5))
    found.moved([TransferStart(0, HOST, True, [BlockMove(0, 1, 6)])])
    found.moved([TransferStart(1, HOST, False, [BlockMove(0, 3, 6)])])
    assert found.refuses(asked(2, 5)) and not found.refuses(asked(3, 5))


def test_flags_of_another_group_are_left_alone() -> None:
    flags = BlockFlags(1, 4, 2)
    flags.device[0] = True
    flags.copied([BlockCopy(0, 0, 1)])
    flags.moved([TransferStart(0, HOST, True, [BlockMove(0, 0, 0)])])
    flags.moved([TransferStart(1, HOST, False, [BlockMove(1, 2, 0)])])
    assert flags.device.tolist() == [True, False, False, False] and flags.few[0]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([(0,), (1,), (0, 1), (0, 1, 2)])), max_size=40))
def test_steps_that_change_nothing_may_be_left_out(steps: list[tuple[bool, tuple[int, ...]]]) -> None:
    """Rows decode, with states stored or not; one that has filled its blocks begins anew as another sequence."""
    rows = [0, 1, 2], [3, 4, 5], [6, 7, 8]
    always, seldom, starts, left = progress(*rows), progress(*rows), [0, 1, 3], 0
    for rests, decoding in steps:
        for row in decoding:
            if starts[row] == 3 * SIZE:
                starts[row] = 0
                always.restart(row)
                seldom.restart(row)
        places = [starts[row] for row in decoding]
        entries = [tokens(row, place) for row, place in zip(decoding, places, strict=True)]
        always.written(entries, rests)
        if rests and seldom.marked((list(decoding), places)):
            left += 1
        else:
            seldom.written(entries, rests)
        for flags in ("_holes", "_filled"):
            assert (getattr(always, flags).device == getattr(seldom, flags).device).all()
        for row in decoding:
            starts[row] += 1
    alike = sum(a == b and a[0] for a, b in pairwise(steps))
    event(f"{left} of {alike} left out")


def test_a_step_like_the_one_before_changes_nothing() -> None:
    found = progress([0, 1, 2, 3], [4, 5, 6, 7])
    found.written([tokens(0, 4), tokens(1, 5)], left_out=True)
    assert not found.marked(([0], [5])) and not found.marked(None)
    assert found.marked(([0, 1], [5, 6])) and found.marked(([0, 1], [6, 7]))
    assert not found.marked(([0, 1], [7, 8])), "row 1 begins a block"
