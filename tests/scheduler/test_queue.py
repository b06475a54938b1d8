"""Orders of waiting."""

from __future__ import annotations

import pytest

from quire.scheduler.queue import FCFSQueue, PriorityQueue, WaitingQueue
from quire.scheduler.request import Request
from tests.scheduler.simulation import make_request


def request(name: str, index: int, priority: int = 0) -> Request:
    made = make_request(name, [1], priority=priority)
    made.arrival_index = index
    return made


def names(queue: WaitingQueue) -> list[str]:
    """In the order of iteration, which must be the order of popping."""
    listed = [r.request_id for r in queue]
    popped = []
    while len(queue):
        assert queue.peek().request_id == listed[len(popped)]
        popped.append(queue.pop().request_id)
    assert popped == listed
    return popped


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_equals_leave_in_order_of_arrival(queue: WaitingQueue) -> None:
    for i, name in enumerate("abc"):
        queue.add(request(name, i))
    assert names(queue) == ["a", "b", "c"]


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_a_preempted_request_goes_before_its_equals(queue: WaitingQueue) -> None:
    first = request("first", 0)
    queue.add(request("second", 1))
    queue.put_back(first)
    assert names(queue) == ["first", "second"]


def test_priority_goes_before_arrival() -> None:
    queue = PriorityQueue()
    for i, (name, priority) in enumerate([("low", 5), ("high", -1), ("middle", 0)]):
        queue.add(request(name, i, priority))
    assert names(queue) == ["high", "middle", "low"]


@pytest.mark.parametrize("queue", [FCFSQueue(), PriorityQueue()])
def test_a_removed_request_is_gone_wherever_it_stood(queue: WaitingQueue) -> None:
    requests = [request(name, i) for i, name in enumerate("abc")]
    for r in requests:
        queue.add(r)
    queue.remove(requests[0])
    queue.remove(requests[1])
    assert len(queue) == 1 and names(queue) == ["c"]


def test_an_id_that_comes_again_stands_where_its_new_priority_puts_it() -> None:
    queue = PriorityQueue()
    old = request("a", 0, priority=0)
    queue.add(old)
    queue.remove(old)
    queue.add(request("b", 1, priority=1))
    queue.add(request("a", 2, priority=2))
    assert names(queue) == ["b", "a"]
