"""Counters by which ranks wait for each other on the device, run by Triton's interpreter: one rank, the others told."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton import meeting

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _state() -> torch.Tensor:
    return torch.zeros(meeting.STATE_WORDS, dtype=torch.int64, pin_memory=DEVICE == "cuda")


def _done() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("before", [0, 2**31 - 2, -1])
def test_whoever_has_come_is_not_waited_for_also_where_counters_wrap_around(before: int) -> None:
    counts = [(before + turn + 2**31) % 2**32 - 2**31 for turn in range(4)]
    flags = [_words(0, counts[3], counts[3]), _words(0, 0, 0), _words(0, 0, 0)]
    peers = torch.tensor([each.data_ptr() for each in flags], device=DEVICE)
    counter, state = _words(counts[0]), _state()
    for turn in range(1, 4):
        meeting.meet(peers, flags[0], counter, state, 0, 5.0)
        _done()
        assert [each[0].item() for each in flags[1:]] == [counts[turn]] * 2
    assert state[0] == 0 and counter.item() == counts[3]


def test_a_wait_for_one_who_does_not_come_ends_and_so_do_all_after_it() -> None:
    flags, other = _words(0, 0), _words(0, 0)
    peers = torch.tensor([flags.data_ptr(), other.data_ptr()], device=DEVICE)
    counter, state = _words(0), _state()
    meeting.meet(peers, flags, counter, state, 0, 0.05)
    _done()
    assert state[0] == meeting.TIMED_OUT
    meeting.wait_for(flags[1:], counter, 5, state, 3600.0)
    _done()
    assert state[0] == meeting.TIMED_OUT


def test_rows_are_waited_for_and_answered() -> None:
    written, read = _words(0), _words(0)
    sent, taken, state = _words(0), _words(0), _state()
    for count in (1, 2):
        meeting.wait_for(read, sent, 0, state, 5.0)
        meeting.post(written, sent)
        meeting.wait_for(written, taken, 1, state, 5.0)
        meeting.post(read, taken)
        _done()
        assert (written.item(), read.item(), state[0].item()) == (count, count, 0)
