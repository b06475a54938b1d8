"""The queue is bounded by requests and by prompt tokens, a burst that fits is no queue, and the wait is estimated."""

from __future__ import annotations

import pytest

from quire.engine.front.admission import Admission
from quire.errors import QueueFullError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def send(queue: Admission, handle: int, tokens: int = 10, rows: int = 1, tenant: str | None = None) -> None:
    queue.check(tokens, rows)
    queue.sent(handle, tokens, rows, tenant)


def test_a_burst_that_an_idle_engine_takes_at_once_fills_no_queue() -> None:
    queue = Admission(max_requests=2, max_tokens=1000, max_num_seqs=4)
    for handle in range(1, 7):
        send(queue, handle)
    assert queue.waiting == (2, 20)
    with pytest.raises(QueueFullError, match="2 requests are waiting already"):
        send(queue, 7)


def test_who_was_passed_over_waits_though_there_are_rows() -> None:
    queue = Admission(max_requests=1, max_tokens=1000, max_num_seqs=4)
    send(queue, 1)
    send(queue, 2)
    queue.started(1)
    queue.taken(2)  # the engine had no memory for the second
    assert queue.waiting == (1, 10)
    with pytest.raises(QueueFullError):
        send(queue, 3)
    queue.started(2)
    send(queue, 3)
    assert queue.waiting == (0, 0)


def test_a_group_takes_as_many_rows_as_it_has_sequences() -> None:
    queue = Admission(max_requests=0, max_tokens=1000, max_num_seqs=4)
    send(queue, 1, rows=3)
    with pytest.raises(QueueFullError):
        send(queue, 2, rows=2)
    send(queue, 2, rows=1)
    queue.ended(1)
    send(queue, 3, rows=3)


def test_prompt_tokens_are_bounded_but_a_long_prompt_may_wait_alone() -> None:
    queue = Admission(max_requests=100, max_tokens=50, max_num_seqs=1)
    send(queue, 1, tokens=10)
    send(queue, 2, tokens=500)
    with pytest.raises(QueueFullError, match="500 prompt tokens are waiting already, and this request has 10 more"):
        send(queue, 3)
    queue.ended(2)
    for handle in range(4, 9):
        send(queue, handle)
    with pytest.raises(QueueFullError, match="max_waiting_tokens is 50"):
        send(queue, 9)


def test_rows_come_back_when_requests_end_however_they_do() -> None:
    queue = Admission(max_requests=0, max_tokens=50, max_num_seqs=2)
    for round in range(0, 30, 3):
        send(queue, round + 1)
        send(queue, round + 2)
        queue.started(round + 1)
        queue.taken(round + 2)
        with pytest.raises(QueueFullError):
            send(queue, round + 3)
        queue.ended(round + 1)
        queue.ended(round + 2)
        queue.ended(round + 2)
    send(queue, 100)
    queue.clear()
    assert queue.waiting == (0, 0)
    send(queue, 101, rows=2)


def test_the_wait_follows_the_pace_at_which_requests_have_left_the_queue() -> None:
    clock = Clock()
    queue = Admission(max_requests=100, max_tokens=10**6, max_num_seqs=1, clock=clock)

    def refusal(tokens: int = 10) -> float:
        with pytest.raises(QueueFullError) as caught:
            queue.check(tokens, 1)
        return caught.value.retry_after

    for handle in range(1, 102):
        send(queue, handle)
    assert refusal() == 5.0  # nothing has moved yet
    queue.started(1)
    queue.taken(101)
    for handle in range(1, 11):  # one in two seconds
        clock.now += 2.0
        queue.ended(handle)
        queue.started(handle + 1)
        send(queue, 200 + handle)
    assert refusal() == 2.0
    clock.now += 3600.0
    assert refusal() == 5.0


def test_a_full_queue_is_shared_fairly_among_tenants() -> None:
    queue = Admission(max_requests=4, max_tokens=1000, max_num_seqs=1)
    for handle in range(1, 6):
        send(queue, handle, tenant="a")
    queue.started(1)
    places = []
    for handle in range(6, 10):
        with pytest.raises(QueueFullError):
            queue.check(10, 1)
        leaving = queue.displaced_by("b", 10)
        places.append(leaving)
        for each in leaving:
            queue.ended(each)
            send(queue, handle, tenant="b")
    assert places == [[5], [4], [], []]  # the newest of the other's, until each has half
    assert queue.displaced_by("a", 10) == []
    assert queue.displaced_by("c", 10) in ([3], [7])


def test_a_queue_full_of_tokens_makes_room_for_a_tenant_with_fewer() -> None:
    queue = Admission(max_requests=100, max_tokens=100, max_num_seqs=1)
    for handle in range(1, 12):
        send(queue, handle, tokens=10, tenant="a")
    queue.started(1)
    assert queue.waiting == (10, 100)
    assert queue.displaced_by("a", 10) == []
    assert queue.displaced_by("b", 25) == [11, 10, 9]
    assert queue.displaced_by("b", 60) == []  # more than the other one would keep
    for handle in range(2, 12):
        queue.ended(handle)
    assert queue.waiting == (0, 0) and not queue._shares and not queue._tenants
